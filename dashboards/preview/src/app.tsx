// Draws one dashboard (Grafana's classic JSON) as a scene of @grafana/scenes. shot.mjs serves this page, sets
// `window.__preview__`, and reads `window.__report__` when every panel has settled.
import '@fontsource/inter/400.css';
import '@fontsource/inter/500.css';
import '@fontsource/roboto-mono/400.css';
import 'react-grid-layout/css/styles.css';
import 'uplot/dist/uPlot.min.css';

import {
  createTheme,
  dateTimeFormat,
  EventBusSrv,
  type DataFrame,
  type DataQueryRequest,
  FieldType,
  getFieldDisplayName,
  LoadingState,
  type PanelData,
  ThemeContext,
} from '@grafana/data';
import { initPluginTranslations } from '@grafana/i18n';
import {
  config,
  LocationServiceProvider,
  locationService,
  setAppEvents,
  setDataSourceSrv,
  setPluginImportUtils,
  setRunRequest,
} from '@grafana/runtime';
import {
  CustomVariable,
  DataSourceVariable,
  EmbeddedScene,
  QueryVariable,
  sceneGraph,
  sceneUtils,
  SceneDataLayerSet,
  SceneDataTransformer,
  SceneGridItem,
  SceneGridLayout,
  SceneGridRow,
  SceneQueryRunner,
  SceneTimeRange,
  SceneVariableSet,
  type SceneVariable,
  TextBoxVariable,
  VariableValueSelectors,
  VizPanel,
} from '@grafana/scenes';
import { GlobalStyles, PortalContainer, useTheme2 } from '@grafana/ui';
import * as React from 'react';
import { createRoot } from 'react-dom/client';
import { MemoryRouter } from 'react-router-dom';
import { from, map, startWith } from 'rxjs';

import { AnnotationsLayer } from './annotations';
import { PreviewPrometheus, UID } from './datasource';
import { content, plugins } from './panels';
import { register } from './registries';

interface Settings {
  dashboard: any;
  from: string;
  to: string;
  scrapeS: number;
  theme: 'dark' | 'light';
  timeZone: string;
  values: Record<string, string[]>;
}

interface PanelReport {
  key: string;
  title: string;
  type: string;
  state: 'data' | 'empty' | 'error' | 'static' | 'loading';
  text: string;
  series: number;
  names: string[];
}

declare global {
  interface Window {
    __preview__: Settings;
    __report__?: () => { done: boolean; height: number; panels: PanelReport[]; variables: Record<string, unknown>; annotations: unknown[] };
    __grafana_public_path__?: string;
  }
}

const KNOWN = plugins();

function runRequest(datasource: any, request: DataQueryRequest, other?: any) {
  const answer = from((other ?? datasource.query.bind(datasource))(request) as any) as any;
  const base = { series: [] as DataFrame[], timeRange: request.range, request };
  return answer.pipe(
    map(
      (response: any): PanelData => ({
        ...base,
        state: response.error ? LoadingState.Error : LoadingState.Done,
        series: response.data,
        errors: response.errors,
        error: response.error,
      }),
    ),
    startWith({ ...base, state: LoadingState.Loading } as PanelData),
  );
}

function start(settings: Settings): void {
  const theme = createTheme({ colors: { mode: settings.theme } });
  config.theme2 = theme;
  config.bootData = { user: { timezone: settings.timeZone }, settings: {}, navTree: [] } as any;
  window.__grafana_public_path__ = '/public/';
  register();
  setAppEvents(new EventBusSrv());
  const prometheus = new PreviewPrometheus(settings.scrapeS);
  const listed = {
    uid: UID, name: 'Prometheus', type: 'prometheus', isDefault: true, readOnly: true, access: 'proxy', jsonData: {},
    meta: { id: 'prometheus', name: 'Prometheus', metrics: true, type: 'datasource', info: {}, module: '', baseUrl: '' },
  } as any;
  const of = (filters: any) => !filters?.pluginId || filters.pluginId === 'prometheus';
  setDataSourceSrv({
    get: async () => prometheus,
    getList: (filters: any) => (of(filters) ? [listed] : []),
    getInstanceSettings: () => listed,
    reload: async () => undefined,
    registerRuntimeDataSource: () => undefined,
  } as any);
  sceneUtils.registerRuntimeDataSource({ dataSource: prometheus });
  for (const [pluginId, plugin] of Object.entries(KNOWN)) {
    sceneUtils.registerRuntimePanelPlugin({ pluginId, plugin });
  }
  setPluginImportUtils({
    importPanelPlugin: async (id) => Promise.reject(new Error(`no panel of type ${id} in the preview`)),
    getPanelPluginFromCache: (id) => KNOWN[id],
  });
  setRunRequest(runRequest as any);
  const scene = build(settings, prometheus);
  window.__report__ = () => report(scene);
  createRoot(document.getElementById('root')!).render(
    <ThemeContext.Provider value={theme}>
      <LocationServiceProvider service={locationService}>
        <MemoryRouter>
          <GlobalStyles />
          <Page scene={scene} settings={settings} />
          <PortalContainer />
        </MemoryRouter>
      </LocationServiceProvider>
    </ThemeContext.Provider>,
  );
}

/** The time range shown as clock times, where it does not end now. */
function clock(scene: EmbeddedScene): string {
  const { from, to } = scene.state.$timeRange!.state.value;
  const timeZone = scene.state.$timeRange!.getTimeZone();
  return [from, to].map((time) => dateTimeFormat(time, { format: 'HH:mm', timeZone })).join(' to ');
}

function Page({ scene, settings }: { scene: EmbeddedScene; settings: Settings }) {
  const theme = useTheme2();
  const { title, links = [] } = settings.dashboard;
  const chip: React.CSSProperties = {
    padding: '4px 10px', borderRadius: theme.shape.radius.default, border: `1px solid ${theme.colors.border.medium}`,
    color: theme.colors.text.secondary, fontSize: theme.typography.bodySmall.fontSize, whiteSpace: 'nowrap',
  };
  return (
    <div id="page" style={{ background: theme.colors.background.canvas, padding: 16, minHeight: '100vh' }}>
      <div style={{ display: 'flex', gap: 8, alignItems: 'center', marginBottom: 8, flexWrap: 'wrap' }}>
        <h3 style={{ margin: 0, flexGrow: 1 }}>{title}</h3>
        {links.map((link: any, index: number) => (
          <span key={index} style={chip}>{link.title}</span>
        ))}
        <span style={chip}>{settings.to === 'now' ? `Last ${settings.from.replace(/^now-/, '')}` : clock(scene)}</span>
      </div>
      <scene.Component model={scene} />
    </div>
  );
}

function variable(model: any, settings: Settings): SceneVariable | null {
  const chosen = settings.values[model.name];
  const common = { name: model.name, label: model.label || undefined, hide: model.hide ?? 0, skipUrlSync: true };
  const current = chosen ?? model.current?.value;
  const value = Array.isArray(current) && !model.multi ? current[0] : current;
  switch (model.type) {
    case 'datasource':
      return new DataSourceVariable({ ...common, pluginId: model.query, regex: model.regex ?? '' });
    case 'query':
      return new QueryVariable({
        ...common,
        query: model.query,
        datasource: { uid: UID, type: 'prometheus' },
        isMulti: model.multi,
        includeAll: model.includeAll,
        allValue: model.allValue,
        regex: model.regex ?? '',
        sort: model.sort,
        refresh: model.refresh,
        defaultToAll: model.includeAll && !value?.length,
        value: value ?? (model.multi ? ['$__all'] : '$__all'),
        text: model.current?.text ?? '',
      });
    case 'custom':
      return new CustomVariable({ ...common, query: model.query, isMulti: model.multi, includeAll: model.includeAll, value: value ?? '', text: model.current?.text ?? '' });
    case 'textbox':
      return new TextBoxVariable({ ...common, value: value ?? model.query ?? '' });
    default:
      throw new Error(`variable ${model.name}: type ${model.type} is not known to the preview`);
  }
}

function panel(model: any, prometheus: PreviewPrometheus): VizPanel {
  const targets = (model.targets ?? []).filter((target: any) => !target.hide);
  const runner = targets.length
    ? new SceneQueryRunner({
        datasource: { uid: UID, type: 'prometheus' },
        queries: targets.map(({ datasource: _, ...target }: any) => target),
        minInterval: model.interval ?? prometheus.interval,
        maxDataPoints: model.maxDataPoints,
        maxDataPointsFromWidth: true,
      })
    : undefined;
  return new VizPanel({
    key: `panel-${model.id}`,
    title: model.title ?? '',
    description: model.description,
    pluginId: model.type,
    options: model.options ?? {},
    fieldConfig: model.fieldConfig ?? { defaults: {}, overrides: [] },
    displayMode: model.transparent ? 'transparent' : 'default',
    $data: runner && model.transformations?.length
      ? new SceneDataTransformer({ $data: runner, transformations: model.transformations })
      : runner,
  });
}

function item(model: any, prometheus: PreviewPrometheus): SceneGridItem {
  const { x, y, w: width, h: height } = model.gridPos;
  return new SceneGridItem({ key: `grid-${model.id}`, x, y, width, height, body: panel(model, prometheus) });
}

function build(settings: Settings, prometheus: PreviewPrometheus): EmbeddedScene {
  const { dashboard } = settings;
  const children: Array<SceneGridItem | SceneGridRow> = [];
  let row: SceneGridRow | null = null;
  for (const model of dashboard.panels) {
    if (model.type === 'row') {
      const inner = (model.panels ?? []).map((one: any) => item(one, prometheus));
      const made: SceneGridRow = new SceneGridRow({
        key: `row-${model.id}`, title: model.title, y: model.gridPos.y, isCollapsed: Boolean(model.collapsed), children: inner,
      });
      children.push(made);
      row = model.collapsed ? null : made;
    } else if (row) {
      row.setState({ children: [...row.state.children, item(model, prometheus)] });
    } else {
      children.push(item(model, prometheus));
    }
  }
  const variables = (dashboard.templating?.list ?? []).map((model: any) => variable(model, settings)).filter(Boolean);
  const layers = (dashboard.annotations?.list ?? [])
    .filter((one: any) => one.enable && one.expr)
    .map((one: any) => new AnnotationsLayer({ name: one.name, isEnabled: true, isHidden: one.hide, model: one, prometheus }));
  return new EmbeddedScene({
    $timeRange: new SceneTimeRange({ from: settings.from, to: settings.to, timeZone: settings.timeZone }),
    $variables: new SceneVariableSet({ variables }),
    $data: layers.length ? new SceneDataLayerSet({ layers }) : undefined,
    controls: [new VariableValueSelectors({})],
    body: new SceneGridLayout({ isDraggable: false, isResizable: false, isLazy: false, children }),
  });
}

function describe(one: VizPanel): PanelReport {
  const title = sceneGraph.interpolate(one, one.state.title, undefined, 'text');
  const type = one.state.pluginId;
  const base = { key: one.state.key ?? '', title, type, series: 0, names: [] as string[], text: '' };
  if (one.state._pluginLoadError) {
    return { ...base, state: 'error', text: one.state._pluginLoadError };
  }
  if (!one.state.$data) {
    return { ...base, state: 'static', text: type };
  }
  const data = sceneGraph.getData(one).state.data;
  if (!data || data.state === LoadingState.Loading || data.state === LoadingState.NotStarted) {
    return { ...base, state: 'loading', text: 'loading' };
  }
  const errors = data.errors?.length ? data.errors : data.error ? [data.error] : [];
  if (errors.length) {
    return { ...base, state: 'error', text: errors.map((error) => error.message ?? 'error').join('; ') };
  }
  const withFields = one.applyFieldConfig(data);
  const { finite, names } = content(withFields.series);
  const numbers = withFields.series.filter((frame) => frame.fields.some((field) => field.type === FieldType.number));
  if (!finite) {
    return { ...base, state: 'empty', text: one.state.fieldConfig.defaults.noValue ?? 'No data', series: 0 };
  }
  return { ...base, state: 'data', text: latest(withFields.series), series: numbers.length, names };
}

/** The last value of each series, as it is shown: for reading a board without its picture. */
function latest(series: DataFrame[]): string {
  const said = series.flatMap((frame) =>
    frame.fields
      .filter((field) => field.type === FieldType.number)
      .map((field) => {
        const last = [...field.values].reverse().find((v: unknown) => v !== null && v !== undefined);
        const shown = field.display?.(last);
        return `${getFieldDisplayName(field, frame, series)}=${shown ? `${shown.prefix ?? ''}${shown.text}${shown.suffix ?? ''}` : last}`;
      }),
  );
  return said.slice(0, 12).join(', ') + (said.length > 12 ? `, and ${said.length - 12} more` : '');
}

function report(scene: EmbeddedScene) {
  const all = sceneGraph.findAllObjects(scene, (one) => one instanceof VizPanel) as VizPanel[];
  const shown = all.filter((one) => {
    const parent = one.parent?.parent;
    return !(parent instanceof SceneGridRow && parent.state.isCollapsed);
  });
  const panels = shown.map(describe);
  const variables: Record<string, unknown> = {};
  for (const one of scene.state.$variables!.state.variables) {
    variables[one.state.name] = { text: one.getValueText?.() ?? '', error: (one.state as any).error ?? null };
  }
  const page = document.getElementById('page');
  const layers = scene.state.$data instanceof SceneDataLayerSet ? scene.state.$data.state.layers : [];
  const annotations = layers.map((layer) => (layer as AnnotationsLayer).found);
  const done = page !== null && [...panels, ...annotations].every((one) => one.state !== 'loading');
  return { done, height: page?.scrollHeight ?? 0, panels, variables, annotations };
}

async function main() {
  await initPluginTranslations('grafana-scenes');
  start(window.__preview__);
}

void main();
