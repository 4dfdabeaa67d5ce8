// Heatmap and state timeline live in Grafana's core and are on no registry: these are small ones of our own, on
// Grafana's theme, colours, units and mappings. They draw what the options of the boards ask for, and no more.
import {
  dateTimeFormat,
  type Field,
  FieldType,
  formattedValueToString,
  getFieldDisplayName,
  getValueFormat,
  type GrafanaTheme2,
  type PanelProps,
  type TimeRange,
} from '@grafana/data';
import { useTheme2 } from '@grafana/ui';
import * as chromatic from 'd3-scale-chromatic';
import * as React from 'react';

import { NoData } from './panels';

const AXIS_H = 22;
const LEGEND_H = 24;
const FONT = 12;

/** Round times to label an axis with, at most one each 90 pixels. */
export function timeTicks(range: TimeRange, width: number): number[] {
  const [from, to] = [range.from.valueOf(), range.to.valueOf()];
  const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];
  const wanted = ((to - from) / 1000) * (90 / Math.max(90, width));
  const step = (steps.find((s) => s >= wanted) ?? 86400) * 1000;
  const ticks = [];
  for (let t = Math.ceil(from / step) * step; t <= to; t += step) {
    ticks.push(t);
  }
  return ticks;
}

function tickText(t: number, range: TimeRange, timeZone: string): string {
  const span = range.to.valueOf() - range.from.valueOf();
  const format = span < 10 * 60_000 ? 'HH:mm:ss' : span < 36 * 3_600_000 ? 'HH:mm' : 'MM/DD';
  return dateTimeFormat(t, { format, timeZone });
}

const ALWAYS = ['BrBG', 'PiYG', 'PRGn', 'PuOr', 'RdBu', 'RdGy', 'RdYlBu', 'RdYlGn', 'Spectral'];
const ON_LIGHT = ['Turbo', 'Cividis', 'Viridis', 'Magma', 'Inferno', 'Plasma', 'Warm', 'Cool', 'CubehelixDefault', 'Rainbow', 'Sinebow'];

/** The colours of a heatmap, from few to many: core's palettes, turned round where core turns them round. */
export function palette(color: any, theme: GrafanaTheme2): string[] {
  const steps = Math.max(2, color.steps ?? 64);
  const scheme: string = color.scheme ?? 'Oranges';
  const interpolate = (chromatic as any)[`interpolate${scheme}`] ?? chromatic.interpolateOranges;
  const colors = Array.from({ length: steps }, (_, i) => interpolate(i / (steps - 1)) as string);
  const turned = ALWAYS.includes(scheme) || (ON_LIGHT.includes(scheme) ? theme.isLight : theme.isDark);
  return turned !== Boolean(color.reverse) ? colors.reverse() : colors;
}

function useCanvas(width: number, height: number, draw: (ctx: CanvasRenderingContext2D) => void) {
  const ref = React.useRef<HTMLCanvasElement>(null);
  React.useLayoutEffect(() => {
    const canvas = ref.current;
    const ctx = canvas?.getContext('2d');
    if (!canvas || !ctx) {
      return;
    }
    canvas.width = Math.round(width * devicePixelRatio);
    canvas.height = Math.round(height * devicePixelRatio);
    ctx.scale(devicePixelRatio, devicePixelRatio);
    draw(ctx);
  });
  return <canvas ref={ref} style={{ width, height }} />;
}

function frameTime(
  ctx: CanvasRenderingContext2D, theme: GrafanaTheme2, range: TimeRange, timeZone: string, left: number, width: number,
  bottom: number,
) {
  const [from, to] = [range.from.valueOf(), range.to.valueOf()];
  ctx.fillStyle = theme.colors.text.primary;
  ctx.textAlign = 'center';
  ctx.textBaseline = 'top';
  for (const t of timeTicks(range, width)) {
    const x = left + ((t - from) / (to - from)) * width;
    const text = tickText(t, range, timeZone);
    const half = ctx.measureText(text).width / 2;
    if (x - half >= left - 4 && x + half <= left + width + 4) {
      ctx.fillText(text, x, bottom + 7);
    }
  }
}

export function Heatmap(props: PanelProps<any>) {
  const theme = useTheme2();
  const { data, width, height, options, timeRange, timeZone, fieldConfig } = props;
  const rows = data.series.filter((frame) => frame.length && frame.fields[1]?.type === FieldType.number);
  const least = options.filterValues?.le ?? -Infinity;
  const shown = (v: number | null) => v !== null && Number.isFinite(v) && v > least;
  const all = rows.flatMap((frame) => frame.fields[1]!.values.filter(shown) as number[]);
  const unit = options.yAxis?.unit ?? 'short';
  const format = getValueFormat(unit);
  const bound = (name: string) =>
    name === '+Inf' ? '+Inf' : Number.isFinite(Number(name)) ? formattedValueToString(format(Number(name), options.yAxis?.decimals)) : name;

  const canvas = useCanvas(width, height, (ctx) => {
    if (!all.length) {
      return;
    }
    const names = rows.map((frame) => bound(frame.fields[1]!.config.displayNameFromDS ?? frame.name ?? ''));
    ctx.font = `${FONT}px ${theme.typography.fontFamily}`;
    const left = Math.max(...names.map((name) => ctx.measureText(name).width)) + 12;
    const plot = { w: width - left - 8, h: height - AXIS_H - (options.legend?.show ? LEGEND_H : 0) - 8, top: 8 };
    const [from, to] = [timeRange.from.valueOf(), timeRange.to.valueOf()];
    const most = Math.max(...all);
    const fewest = Math.min(...all);
    const colors = palette(options.color, theme);
    const colorOf = (v: number) => {
      const share = most > fewest ? (v - fewest) / (most - fewest) : 1;
      const curved = options.color.scale === 'linear' ? share : Math.pow(share, options.color.exponent ?? 0.5);
      return colors[Math.min(colors.length - 1, Math.floor(curved * colors.length))]!;
    };
    const gap = options.cellGap ?? 1;
    const cell = plot.h / rows.length;
    let stepMs = Infinity;
    rows.forEach((frame) => {
      const times = frame.fields[0]!.values as number[];
      for (let i = 1; i < times.length; i++) {
        stepMs = Math.min(stepMs, times[i]! - times[i - 1]!);
      }
    });
    rows.forEach((frame, index) => {
      const [times, values] = [frame.fields[0]!.values as number[], frame.fields[1]!.values as Array<number | null>];
      const y = plot.top + plot.h - (index + 1) * cell;
      times.forEach((t, i) => {
        const v = values[i]!;
        if (!shown(v)) {
          return;
        }
        const x0 = left + ((t - (Number.isFinite(stepMs) ? stepMs : 0) - from) / (to - from)) * plot.w;
        const x1 = left + ((t - from) / (to - from)) * plot.w;
        const x = Math.max(left, x0);
        ctx.fillStyle = colorOf(v);
        ctx.fillRect(x, y + gap / 2, Math.max(1, Math.min(left + plot.w, x1) - x - gap), Math.max(1, cell - gap));
      });
    });
    // A row reaches up to its bound, so the bound is written at its upper edge.
    ctx.textAlign = 'right';
    ctx.textBaseline = 'middle';
    ctx.fillStyle = theme.colors.text.primary;
    const every = Math.max(1, Math.ceil((FONT + 4) / cell));
    names.forEach((name, index) => {
      if ((rows.length - 1 - index) % every === 0) {
        ctx.fillText(name, left - 6, plot.top + plot.h - (index + 1) * cell + 1);
      }
    });
    frameTime(ctx, theme, timeRange, timeZone, left, plot.w, plot.top + plot.h);
    if (options.legend?.show) {
      const y = height - LEGEND_H + 4;
      const w = Math.min(220, plot.w / 2);
      const value = (v: number) => formattedValueToString(getValueFormat(options.cellValues?.unit ?? 'short')(v));
      ctx.textBaseline = 'middle';
      ctx.textAlign = 'left';
      ctx.fillStyle = theme.colors.text.primary;
      const low = value(fewest);
      ctx.fillText(low, left, y + 6);
      const start = left + ctx.measureText(low).width + 8;
      colors.forEach((color, i) => {
        ctx.fillStyle = color;
        ctx.fillRect(start + (i * w) / colors.length, y, w / colors.length + 1, 12);
      });
      ctx.fillStyle = theme.colors.text.primary;
      ctx.fillText(value(most), start + w + 8, y + 6);
    }
  });
  return all.length ? canvas : <NoData fieldConfig={fieldConfig} width={width} height={height} />;
}

interface Run {
  from: number;
  to: number;
  value: unknown;
}

/** Stretches of equal values; a null ends one, `merge` joins neighbours that are equal. */
export function runs(times: number[], values: unknown[], end: number, merge: boolean): Run[] {
  const found: Run[] = [];
  times.forEach((t, i) => {
    const value = values[i];
    const last = found[found.length - 1];
    const to = times[i + 1] ?? Math.max(t, end);
    if (value === null || value === undefined || Number.isNaN(value)) {
      return;
    }
    if (merge && last && last.to === t && last.value === value) {
      last.to = to;
    } else {
      found.push({ from: t, to, value });
    }
  });
  return found;
}

export function StateTimeline(props: PanelProps<any>) {
  const theme = useTheme2();
  const { data, width, height, options, timeRange, timeZone, fieldConfig } = props;
  const lanes: Array<{ name: string; field: Field; runs: Run[] }> = [];
  for (const frame of data.series) {
    const time = frame.fields.find((field) => field.type === FieldType.time);
    for (const field of frame.fields) {
      if (!time || field === time || field.config.custom?.hideFrom?.viz || !frame.length) {
        continue;
      }
      const times = time.values as number[];
      const step = times.length > 1 ? times[1]! - times[0]! : 0;
      const end = Math.min(timeRange.to.valueOf(), times[times.length - 1]! + step);
      lanes.push({
        name: getFieldDisplayName(field, frame, data.series),
        field,
        runs: runs(times, field.values, end, options.mergeValues !== false),
      });
    }
  }
  const any = lanes.some((lane) => lane.runs.length);
  const canvas = useCanvas(width, height, (ctx) => {
    ctx.font = `${FONT}px ${theme.typography.fontFamily}`;
    const widest = Math.max(0, ...lanes.map((lane) => ctx.measureText(lane.name).width));
    const left = Math.min(widest + 10, width * 0.4);
    const plot = { w: width - left - 8, h: height - AXIS_H - 4 };
    const [from, to] = [timeRange.from.valueOf(), timeRange.to.valueOf()];
    const lane = plot.h / Math.max(1, lanes.length);
    const bar = lane * (options.rowHeight ?? 0.9);
    const at = (t: number) => left + ((Math.min(Math.max(t, from), to) - from) / (to - from)) * plot.w;
    lanes.forEach((one, index) => {
      const y = index * lane + (lane - bar) / 2;
      ctx.textBaseline = 'middle';
      ctx.textAlign = 'right';
      ctx.fillStyle = theme.colors.text.primary;
      ctx.fillText(one.name, left - 6, y + bar / 2, left - 8);
      for (const run of one.runs) {
        const shown = one.field.display!(run.value);
        const [x0, x1] = [at(run.from), at(run.to)];
        if (x1 <= x0) {
          continue;
        }
        const color = shown.color ?? theme.colors.primary.main;
        ctx.globalAlpha = (one.field.config.custom?.fillOpacity ?? 70) / 100;
        ctx.fillStyle = color;
        ctx.fillRect(x0, y, Math.max(1, x1 - x0 - 1), bar);
        ctx.globalAlpha = 1;
        const text = formattedValueToString(shown);
        const room = x1 - x0 - 8;
        if (options.showValue !== 'never' && (options.showValue === 'always' || ctx.measureText(text).width <= room)) {
          ctx.fillStyle = theme.colors.getContrastText(color);
          ctx.textAlign = options.alignValue === 'center' ? 'center' : options.alignValue === 'right' ? 'right' : 'left';
          const x = ctx.textAlign === 'center' ? (x0 + x1) / 2 : ctx.textAlign === 'right' ? x1 - 4 : x0 + 4;
          ctx.fillText(text, x, y + bar / 2);
        }
      }
    });
    frameTime(ctx, theme, timeRange, timeZone, left, plot.w, plot.h - 2);
  });
  return any ? canvas : <NoData fieldConfig={fieldConfig} width={width} height={height} />;
}
