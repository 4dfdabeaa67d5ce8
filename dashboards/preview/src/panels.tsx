// Panels of Grafana's core, put together from the components that @grafana/ui ships: what core adds is thin.
import {
  cacheFieldDisplayNames,
  type DataFrame,
  FieldType,
  getDisplayValueAlignmentFactors,
  getFieldDisplayName,
  getFieldDisplayValues,
  PanelPlugin,
  type PanelProps,
  renderTextPanelMarkdown,
} from '@grafana/data';
import {
  BarGauge,
  BigValue,
  TimeSeries,
  useStyles2,
  useTheme2,
  VizRepeater,
} from '@grafana/ui';
import { TableNG } from '@grafana/ui/unstable';
import { css } from '@emotion/css';
import * as React from 'react';

import { withAnnotations } from './annotations';
import { Heatmap, StateTimeline } from './own';
import { BY_THRESHOLDS, custom, PALETTE } from './registries';

/** What Grafana shows in a panel's place when there is nothing to draw. */
export function NoData({ fieldConfig, width, height }: { fieldConfig: any; width: number; height: number }) {
  const styles = useStyles2((theme) => ({
    box: css({
      display: 'flex', alignItems: 'center', justifyContent: 'center', textAlign: 'center',
      color: theme.colors.text.secondary, fontSize: theme.typography.size.lg, padding: theme.spacing(1),
    }),
  }));
  return (
    <div className={styles.box} style={{ width, height }}>
      {fieldConfig?.defaults?.noValue ?? 'No data'}
    </div>
  );
}

function empty(series: DataFrame[]): boolean {
  return !series.length || series.every((frame) => !frame.length);
}

function TimeSeriesPanel(props: PanelProps<any>) {
  const { data, width, height, options, timeRange, timeZone, fieldConfig } = props;
  const frames = React.useMemo(
    () =>
      data.series
        .filter((frame) => frame.fields.some((field) => field.type === FieldType.time))
        .map((frame) => ({
          ...frame,
          fields: frame.fields
            .filter((field) => field.type === FieldType.time || field.type === FieldType.number)
            .map((field) =>
              field.type !== FieldType.number
                ? field
                : {
                    ...field,
                    // Neither NaN nor an infinity can be drawn; core leaves a gap, too.
                    values: field.values.map((v: number | null) => (Number.isFinite(v) ? v : null)),
                  },
            ),
        })),
    [data.series],
  );
  // The plot is made anew when its options change: annotations that come late are drawn, too.
  const withMarks = React.useMemo(() => ({ ...options, marks: data.annotations }), [options, data.annotations]);
  if (empty(frames)) {
    return <NoData fieldConfig={fieldConfig} width={width} height={height} />;
  }
  return (
    <TimeSeries
      frames={frames}
      structureRev={data.structureRev}
      timeRange={timeRange}
      timeZone={timeZone}
      width={width}
      height={height}
      legend={options.legend}
      options={withMarks}
    >
      {(config: any) => {
        withAnnotations(config, data.annotations ?? []);
        return null;
      }}
    </TimeSeries>
  );
}

/** The reduced values that stat and bar gauge show. */
function useValues(props: PanelProps<any>, sparkline: boolean) {
  const theme = useTheme2();
  const { data, options, fieldConfig, replaceVariables, timeZone } = props;
  return () =>
    getFieldDisplayValues({
      fieldConfig,
      reduceOptions: options.reduceOptions,
      replaceVariables,
      theme,
      data: data.series,
      sparkline,
      timeZone,
    });
}

function StatPanel(props: PanelProps<any>) {
  const theme = useTheme2();
  const { options, width, height, data, renderCounter, timeRange } = props;
  const getValues = useValues(props, options.graphMode !== 'none');
  return (
    <VizRepeater
      getValues={getValues}
      getAlignmentFactors={getDisplayValueAlignmentFactors}
      renderValue={({ value, alignmentFactors, width, height, count }) => (
        <BigValue
          value={value.display}
          count={count}
          sparkline={value.sparkline ? { ...value.sparkline, timeRange } : undefined}
          colorMode={options.colorMode}
          graphMode={options.graphMode}
          justifyMode={options.justifyMode}
          textMode={options.textMode}
          alignmentFactors={alignmentFactors}
          text={options.text}
          width={width}
          height={height}
          theme={theme}
          disableWideLayout={!options.wideLayout}
        />
      )}
      width={width}
      height={height}
      source={data}
      itemSpacing={3}
      renderCounter={renderCounter}
      autoGrid
      orientation={options.orientation}
    />
  );
}

function BarGaugePanel(props: PanelProps<any>) {
  const theme = useTheme2();
  const { options, width, height, data, renderCounter } = props;
  const getValues = useValues(props, false);
  return (
    <VizRepeater
      source={data}
      getAlignmentFactors={getDisplayValueAlignmentFactors}
      getValues={getValues}
      renderValue={({ value, alignmentFactors, orientation, width, height, count }) => (
        <BarGauge
          value={value.display}
          width={width}
          height={height}
          orientation={orientation}
          field={value.field}
          text={options.text}
          display={value.view?.getFieldDisplayProcessor(value.colIndex!)}
          theme={theme}
          itemSpacing={options.displayMode === 'lcd' ? 2 : 10}
          displayMode={options.displayMode}
          alignmentFactors={count > 1 ? alignmentFactors : undefined}
          showUnfilled={options.showUnfilled}
          valueDisplayMode={options.valueMode}
          namePlacement={options.namePlacement}
        />
      )}
      width={width}
      height={height}
      renderCounter={renderCounter}
      minVizWidth={options.minVizWidth}
      minVizHeight={options.minVizHeight}
      maxVizHeight={options.sizing === 'manual' ? options.maxVizHeight : 300}
      itemSpacing={10}
      orientation={options.orientation}
    />
  );
}

function TablePanel(props: PanelProps<any>) {
  const { data, width, height, options, fieldConfig, timeRange } = props;
  // The table reads names from the cache only; core fills it here.
  cacheFieldDisplayNames(data.series);
  const frames = data.series.filter((frame) => frame.fields.length);
  const main = frames[options.frameIndex ?? 0] ?? frames[0];
  if (!main || !main.length) {
    return <NoData fieldConfig={fieldConfig} width={width} height={height} />;
  }
  return (
    <TableNG
      data={main}
      width={width}
      height={height}
      noHeader={!options.showHeader}
      showTypeIcons={options.showTypeIcons}
      resizable
      sortBy={options.sortBy}
      enablePagination={options.enablePagination}
      cellHeight={options.cellHeight}
      timeRange={timeRange}
      fieldConfig={fieldConfig}
      structureRev={data.structureRev}
    />
  );
}

function TextPanel({ options, replaceVariables, width, height }: PanelProps<any>) {
  const styles = useStyles2((theme) => ({
    box: css({ overflow: 'auto', 'table td, table th': { padding: theme.spacing(0.25, 1) } }),
  }));
  const text = replaceVariables(options.content ?? '', {}, options.mode === 'html' ? 'html' : undefined);
  const html = options.mode === 'code' ? undefined : options.mode === 'html' ? text : renderTextPanelMarkdown(text);
  return (
    <div className={`markdown-html ${styles.box}`} style={{ width, height }}>
      {html === undefined ? <pre>{text}</pre> : <div dangerouslySetInnerHTML={{ __html: html }} />}
    </div>
  );
}

const REDUCE = { values: false, calcs: ['lastNotNull'], fields: '' };
const LEGEND = { displayMode: 'list', placement: 'bottom', showLegend: true, calcs: [] };

/** Defaults of core's options and custom field options, by panel type. */
const KINDS: Record<string, { panel: React.ComponentType<any>; options: object; field: object; custom?: Record<string, unknown>; noPadding?: boolean }> = {
  timeseries: {
    panel: TimeSeriesPanel,
    options: { legend: LEGEND, tooltip: { mode: 'single', sort: 'none' } },
    field: PALETTE,
    custom: {
      drawStyle: 'line', lineInterpolation: 'linear', lineWidth: 1, lineStyle: null, fillOpacity: 0, gradientMode: 'none',
      showPoints: 'auto', pointSize: 5, spanNulls: false, insertNulls: false, stacking: { mode: 'none', group: 'A' },
      axisPlacement: 'auto', axisLabel: null, axisWidth: null, axisSoftMin: null, axisSoftMax: null, axisGridShow: null,
      axisCenteredZero: false, axisColorMode: 'text', axisBorderShow: false, barAlignment: 0, barWidthFactor: 0.6,
      barMaxWidth: null, scaleDistribution: { type: 'linear' }, fillBelowTo: null, transform: null, lineColor: null,
      hideFrom: { tooltip: false, viz: false, legend: false }, thresholdsStyle: { mode: 'off' },
    },
  },
  stat: {
    panel: StatPanel,
    options: {
      reduceOptions: REDUCE, orientation: 'auto', textMode: 'auto', wideLayout: true, colorMode: 'value',
      graphMode: 'area', justifyMode: 'auto', showPercentChange: false,
    },
    field: BY_THRESHOLDS,
  },
  bargauge: {
    panel: BarGaugePanel,
    options: {
      reduceOptions: REDUCE, orientation: 'auto', displayMode: 'gradient', valueMode: 'color', namePlacement: 'auto',
      showUnfilled: true, sizing: 'auto', minVizWidth: 8, minVizHeight: 16, maxVizHeight: 300,
    },
    field: BY_THRESHOLDS,
  },
  table: {
    panel: TablePanel,
    options: { frameIndex: 0, showHeader: true, cellHeight: 'sm', footer: { show: false } },
    field: BY_THRESHOLDS,
    custom: {
      width: null, minWidth: 50, align: 'auto', cellOptions: { type: 'auto' }, filterable: false, hidden: false,
      inspect: false, hideFrom: null, hideHeader: null, wrapText: false, displayMode: null, wrapHeaderText: false,
      tooltip: null, footer: null, styleField: null,
    },
    noPadding: true,
  },
  text: { panel: TextPanel, options: { mode: 'markdown', content: '' }, field: PALETTE },
  heatmap: {
    panel: Heatmap,
    options: {
      calculate: false, legend: { show: true }, showValue: 'never', cellGap: 1, exemplars: {}, rowsFrame: {},
      color: { mode: 'scheme', scheme: 'Oranges', exponent: 0.5, steps: 64, reverse: false, fill: 'dark-orange' },
      yAxis: { axisPlacement: 'left', reverse: false }, filterValues: { le: 1e-9 },
    },
    field: PALETTE,
    custom: { hideFrom: null, scaleDistribution: { type: 'linear' } },
  },
  'state-timeline': {
    panel: StateTimeline,
    options: { mergeValues: true, showValue: 'auto', rowHeight: 0.9, alignValue: 'left', legend: LEGEND },
    field: PALETTE,
    custom: { lineWidth: 0, fillOpacity: 70, spanNulls: false, insertNulls: false, hideFrom: null, axisPlacement: 'auto' },
  },
  'status-history': {
    panel: StateTimeline,
    options: { mergeValues: false, showValue: 'auto', rowHeight: 0.9, colWidth: 0.9, legend: LEGEND },
    field: BY_THRESHOLDS,
    custom: { lineWidth: 1, fillOpacity: 70, hideFrom: null, axisPlacement: 'auto' },
  },
};

export function plugins(): Record<string, PanelPlugin> {
  const made: Record<string, PanelPlugin> = {};
  for (const [id, kind] of Object.entries(KINDS)) {
    const plugin = new PanelPlugin(kind.panel).useFieldConfig({
      standardOptions: kind.field as any,
      useCustomConfig: kind.custom ? custom(kind.custom) : undefined,
    });
    // Without it a panel is not given its annotations.
    plugin.setDataSupport({ annotations: id === 'timeseries', alertStates: false });
    if (kind.noPadding) {
      plugin.setNoPadding();
    }
    plugin.setPanelOptions((builder: any) => {
      for (const [path, value] of Object.entries(kind.options)) {
        builder.addCustomEditor({ id: path, path, name: path, defaultValue: value, editor: () => null });
      }
    });
    plugin.meta = { id, name: id, type: 'panel', skipDataQuery: id === 'text', info: {}, module: '', baseUrl: '', sort: 1 } as any;
    made[id] = plugin;
  }
  return made;
}

/** What a panel shows, for the report: how many values there are, and how many of them say something. */
export function content(series: DataFrame[]): { values: number; finite: number; names: string[] } {
  let values = 0;
  let finite = 0;
  const names: string[] = [];
  for (const frame of series) {
    for (const field of frame.fields) {
      if (field.type === FieldType.time) {
        continue;
      }
      values += field.values.length;
      finite += field.values.filter((v: unknown) => (typeof v === 'number' ? Number.isFinite(v) : v != null && v !== '')).length;
      names.push(getFieldDisplayName(field, frame, series));
    }
  }
  return { values, finite, names };
}
