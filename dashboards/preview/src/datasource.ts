// A Prometheus data source for Grafana's scenes that asks as Grafana's own does: the same steps and macros, the same
// shapes of answers (time series, table, heatmap). It talks to `/prometheus`, which shot.mjs passes on.
import {
  createDataFrame,
  type DataFrame,
  type DataQueryRequest,
  type DataQueryResponse,
  type Field,
  FieldType,
  type MetricFindValue,
  rangeUtil,
  type ScopedVars,
  type TestDataSourceResponse,
  type TimeRange,
} from '@grafana/data';
import { RuntimeDataSource, sceneGraph, type SceneObject } from '@grafana/scenes';

export const UID = 'preview-prometheus';
const MOST_POINTS = 11000;

interface Target {
  refId: string;
  expr?: string;
  instant?: boolean;
  range?: boolean;
  format?: 'time_series' | 'table' | 'heatmap';
  legendFormat?: string;
  interval?: string;
  hide?: boolean;
  exemplar?: boolean;
  datasource?: unknown;
}

interface Series {
  metric: Record<string, string>;
  values?: Array<[number, string]>;
  value?: [number, string];
}

interface Result {
  resultType: 'matrix' | 'vector' | 'scalar' | 'string';
  result: Series[] | [number, string];
}

/** The object scenes hands over to interpolate for, in the form they hand it over. */
function sceneObject(vars: ScopedVars): SceneObject {
  return vars.__sceneObject!.value.valueOf() as SceneObject;
}

/** Grafana's escape of values in label matchers: one value exact, several as alternatives of a regular expression. */
export function matcher(value: unknown, variable: { multi?: boolean; includeAll?: boolean }): string {
  const regex = (text: string) => text.replace(/\\/g, '\\\\\\\\').replace(/[$^*{}[\]'+?.()|]/g, '\\\\$&');
  const exact = (text: string) => text.replace(/\\/g, '\\\\').replace(/"/g, '\\"');
  if (!variable.multi && !variable.includeAll) {
    return exact(String(value));
  }
  if (!Array.isArray(value)) {
    return regex(String(value));
  }
  const parts = value.map((one) => regex(String(one)));
  return parts.length === 1 ? parts[0]! : `(${parts.join('|')})`;
}

/** `$__rate_interval`, in seconds. */
export function rateInterval(stepS: number, scrapeS: number): number {
  return Math.max(stepS + scrapeS, 4 * scrapeS);
}

export function duration(seconds: number): string {
  return seconds % 1 === 0 ? `${seconds}s` : `${Math.round(seconds * 1000)}ms`;
}

export interface Times {
  stepS: number;
  scrapeS: number;
  range: TimeRange;
}

/** Grafana's macros, replaced before variables are. */
export function macros(expr: string, { stepS, scrapeS, range }: Times): string {
  const rangeMs = range.to.valueOf() - range.from.valueOf();
  const values: Record<string, string> = {
    __rate_interval: duration(rateInterval(stepS, scrapeS)),
    __interval: duration(stepS),
    __interval_ms: `${stepS * 1000}`,
    __range: `${Math.round(rangeMs / 1000)}s`,
    __range_s: `${Math.round(rangeMs / 1000)}`,
    __range_ms: `${rangeMs}`,
    __rate_interval_ms: `${rateInterval(stepS, scrapeS) * 1000}`,
  };
  return expr.replace(/\$(?:\{(__\w+)\}|(__\w+))/g, (all, braced, plain) => values[braced ?? plain] ?? all);
}

function seconds(text: string): number {
  return rangeUtil.intervalToMs(text) / 1000;
}

function number(text: string): number {
  return text === '+Inf' ? Infinity : text === '-Inf' ? -Infinity : Number(text);
}

function selector(metric: Record<string, string>): string {
  const { __name__: name = '', ...labels } = metric;
  const inner = Object.entries(labels).map(([key, value]) => `${key}="${value}"`);
  return `${name}{${inner.join(', ')}}`;
}

function legend(target: Target, metric: Record<string, string>): string | undefined {
  const format = target.legendFormat;
  if (format === undefined || format === '') {
    return selector(metric);
  }
  if (format === '__auto') {
    return Object.keys(metric).length ? undefined : target.expr;
  }
  return format.replace(/\{\{\s*(.+?)\s*\}\}/g, (_, label) => metric[label] ?? '');
}

function timeField(values: number[]): Field {
  return { name: 'Time', type: FieldType.time, config: {}, values };
}

function seriesFrames(target: Target, result: Series[], times: { from: number; to: number; stepS: number } | null) {
  return result.map((series): DataFrame => {
    const points = series.values ?? [series.value!];
    const at = new Map(points.map(([t, v]) => [Math.round(t * 1000), number(v)]));
    const stamps: number[] = [];
    if (times) {
      // Grafana's own answer has a row for each step; what is missing is null, and a line breaks there.
      for (let t = times.from; t <= times.to + 1e-6; t += times.stepS) {
        stamps.push(Math.round(t * 1000));
      }
    } else {
      stamps.push(...at.keys());
    }
    const first = times ? stamps.findIndex((t) => at.has(t)) : 0;
    const last = times ? stamps.length - [...stamps].reverse().findIndex((t) => at.has(t)) : stamps.length;
    const kept = stamps.slice(Math.max(0, first), last);
    const name = legend(target, series.metric);
    const value: Field = {
      name: 'Value',
      type: FieldType.number,
      labels: series.metric,
      config: name === undefined ? {} : { displayNameFromDS: name },
      values: kept.map((t) => at.get(t) ?? null),
    };
    return { ...createDataFrame({ refId: target.refId, name, fields: [timeField(kept), value] }), length: kept.length };
  });
}

/** Buckets by rising `le`, each with what is in it alone, as Grafana makes them of cumulative ones. */
function heatmapFrames(frames: DataFrame[]): DataFrame[] {
  const bound = (frame: DataFrame) => number(frame.fields[1]!.labels?.le ?? 'NaN');
  const sorted = [...frames].sort((a, b) => bound(a) - bound(b));
  const lookup = sorted.map(
    (frame) => new Map(frame.fields[0]!.values.map((t: number, i: number) => [t, frame.fields[1]!.values[i]])),
  );
  return sorted.map((frame, index) => {
    const [time, value] = frame.fields as [Field, Field];
    const values = value.values.map((v: number | null, i: number) => {
      const below = index > 0 ? lookup[index - 1]!.get(time.values[i]) : 0;
      return v === null ? null : Math.max(0, v - ((below as number | null | undefined) ?? 0));
    });
    const le = value.labels?.le ?? '';
    return { ...frame, name: le, fields: [time, { ...value, values, config: { displayNameFromDS: le } }] };
  });
}

function tableFrame(target: Target, result: Series[], several: boolean): DataFrame[] {
  if (!result.length) {
    return [];
  }
  const labels = [...new Set(result.flatMap((series) => Object.keys(series.metric)))].sort();
  const rows = result.flatMap((series) =>
    (series.values ?? [series.value!]).map(([t, v]) => ({ metric: series.metric, t: t * 1000, v: number(v) })),
  );
  const fields: Field[] = [
    timeField(rows.map((row) => row.t)),
    ...labels.map((label) => ({
      name: label,
      type: FieldType.string,
      config: { filterable: true },
      values: rows.map((row) => row.metric[label] ?? ''),
    })),
    {
      name: several ? `Value #${target.refId}` : 'Value',
      type: FieldType.number,
      config: {},
      values: rows.map((row) => row.v),
    },
  ];
  return [{ ...createDataFrame({ refId: target.refId, fields }), length: rows.length, meta: { preferredVisualisationType: 'table' } }];
}

async function ask<T>(path: string, parameters: Record<string, string>): Promise<T> {
  const answer = await fetch(`/prometheus/api/v1/${path}`, {
    method: 'POST',
    body: new URLSearchParams(parameters),
  });
  const text = await answer.text();
  let body: { status?: string; data?: T; error?: string };
  try {
    body = JSON.parse(text);
  } catch {
    throw new Error(`Prometheus answered ${answer.status}: ${text.slice(0, 200)}`);
  }
  if (body.status !== 'success') {
    throw new Error(body.error ?? `Prometheus answered ${answer.status}`);
  }
  return body.data as T;
}

async function get<T>(path: string, parameters: Record<string, string>): Promise<T> {
  const answer = await fetch(`/prometheus/api/v1/${path}?${new URLSearchParams(parameters)}`);
  const body = await answer.json();
  if (body.status !== 'success') {
    throw new Error(body.error);
  }
  return body.data as T;
}

export class PreviewPrometheus extends RuntimeDataSource<any> {
  constructor(private readonly scrapeS: number) {
    super('prometheus', UID);
    this.interval = duration(scrapeS);
  }

  async query(request: DataQueryRequest<any>): Promise<DataQueryResponse> {
    const targets = (request.targets as Target[]).filter((target) => target.expr && !target.hide);
    const tables = targets.filter((target) => target.format === 'table').length;
    const several = tables > 1;
    const answers = await Promise.all(
      targets.map(async (target) => {
        try {
          return { data: await this.one(target, request, several) };
        } catch (error) {
          return { data: [], error: { refId: target.refId, message: `${target.refId}: ${(error as Error).message}` } };
        }
      }),
    );
    const errors = answers.flatMap((answer) => (answer.error ? [answer.error] : []));
    return { data: answers.flatMap((answer) => answer.data), ...(errors.length ? { errors, error: errors[0] } : {}) };
  }

  private async one(target: Target, request: DataQueryRequest<any>, several: boolean): Promise<DataFrame[]> {
    const { range, scopedVars } = request;
    const own = target.interval ? seconds(target.interval) : 0;
    const lowest = own || request.intervalMs / 1000;
    const rangeS = (range.to.valueOf() - range.from.valueOf()) / 1000;
    const fit = rangeUtil.calculateInterval(range, request.maxDataPoints ?? 1000, duration(lowest));
    const stepS = Math.max(fit.intervalMs / 1000, rangeS / MOST_POINTS);
    // A query's own "min step" stands for the scrape interval; the panel's "min interval" does not.
    const text = macros(target.expr!, { stepS, scrapeS: own || this.scrapeS, range });
    const query = sceneGraph.interpolate(sceneObject(scopedVars), text, scopedVars, matcher);
    if (target.instant && !target.range) {
      const answer = await ask<Result>('query', { query, time: `${range.to.valueOf() / 1000}` });
      const result = vector(answer);
      return target.format === 'table' ? tableFrame(target, result, several) : seriesFrames(target, result, null);
    }
    const from = Math.floor(range.from.valueOf() / 1000 / stepS) * stepS;
    const to = Math.floor(range.to.valueOf() / 1000 / stepS) * stepS;
    const answer = await ask<Result>('query_range', { query, start: `${from}`, end: `${to}`, step: `${stepS}` });
    const result = answer.result as Series[];
    if (target.format === 'table') {
      return tableFrame(target, result, several);
    }
    const frames = seriesFrames(target, result, { from, to, stepS });
    return target.format === 'heatmap' ? heatmapFrames(frames) : frames;
  }

  /** `label_values(...)`, `query_result(...)` and `metrics(...)`, as in a variable of type query. */
  async metricFindQuery(query: any, options: any): Promise<MetricFindValue[]> {
    const raw: string = typeof query === 'string' ? query : query.query;
    const range: TimeRange = options.range;
    const text = macros(raw, { stepS: this.scrapeS, scrapeS: this.scrapeS, range });
    const asked = sceneGraph.interpolate(sceneObject(options.scopedVars), text, options.scopedVars, matcher).trim();
    const window = { start: `${range.from.valueOf() / 1000}`, end: `${range.to.valueOf() / 1000}` };
    const values = /^label_values\((?:(.+),\s*)?([A-Za-z_][\w]*)\s*\)$/.exec(asked);
    if (values) {
      const [, match, label] = values;
      const parameters = match ? { ...window, 'match[]': match } : window;
      return (await get<string[]>(`label/${label}/values`, parameters)).map((value) => ({ text: value }));
    }
    const results = /^query_result\((.+)\)$/.exec(asked);
    if (results) {
      const answer = await ask<Result>('query', { query: results[1]!, time: window.end });
      return vector(answer).map((one) => ({ text: `${selector(one.metric)} ${one.value![1]} ${one.value![0] * 1000}` }));
    }
    const names = /^metrics\((.+)\)$/.exec(asked);
    if (names) {
      const pattern = new RegExp(names[1]!);
      return (await get<string[]>('label/__name__/values', window)).filter((name) => pattern.test(name)).map((text) => ({ text }));
    }
    throw new Error(`cannot resolve the variable query ${raw}`);
  }

  async testDatasource(): Promise<TestDataSourceResponse> {
    return { status: 'success', message: '' };
  }
}

function vector(answer: Result): Series[] {
  if (answer.resultType === 'scalar' || answer.resultType === 'string') {
    return [{ metric: {}, value: answer.result as [number, string] }];
  }
  return answer.result as Series[];
}
