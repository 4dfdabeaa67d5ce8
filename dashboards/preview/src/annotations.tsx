// Annotations from queries, as dashed lines on time series: Grafana's core draws them, its libraries do not.
import { createDataFrame, DataTopic, type DataFrame, FieldType, LoadingState } from '@grafana/data';
import { config as runtime } from '@grafana/runtime';
import {
  type SceneDataLayerProvider,
  SceneDataLayerBase,
  type SceneDataLayerProviderState,
  sceneGraph,
} from '@grafana/scenes';

import { type PreviewPrometheus } from './datasource';

const marked = new WeakSet<object>();

/** Let a plot draw these annotations. */
export function withAnnotations(builder: any, frames: DataFrame[]): void {
  if (marked.has(builder)) {
    return;
  }
  marked.add(builder);
  builder.addHook('draw', (u: any) => {
    const { ctx, bbox } = u;
    for (const frame of frames) {
      const at = frame.fields.find((field) => field.name === 'time');
      const color = frame.fields.find((field) => field.name === 'color');
      at?.values.forEach((t: number, row: number) => {
        const x = Math.round(u.valToPos(t, 'x', true));
        if (x < bbox.left || x > bbox.left + bbox.width) {
          return;
        }
        ctx.save();
        ctx.strokeStyle = runtime.theme2.visualization.getColorByName(color?.values[row] ?? 'red');
        ctx.lineWidth = 2;
        ctx.setLineDash([5, 5]);
        ctx.beginPath();
        ctx.moveTo(x, bbox.top);
        ctx.lineTo(x, bbox.top + bbox.height);
        ctx.stroke();
        ctx.restore();
      });
    }
  });
}

interface State extends SceneDataLayerProviderState {
  model: any;
  prometheus: PreviewPrometheus;
}

/** One annotation query of a dashboard; a stretch without a gap in its answer is one annotation, as in Grafana. */
export class AnnotationsLayer extends SceneDataLayerBase<State> implements SceneDataLayerProvider {
  /** What came of it, for the report. */
  public found: { name: string; state: 'loading' | 'data' | 'error'; text: string };

  public constructor(state: State) {
    // Asked again when a variable in its query gets its value.
    super(state, ['model']);
    this.found = { name: state.name, state: 'loading', text: '' };
  }

  public onEnable(): void {
    this.runLayer();
  }

  public onDisable(): void {}

  public runLayer(): void {
    void this.ask();
  }

  private async ask(): Promise<void> {
    const range = sceneGraph.getTimeRange(this).state.value;
    const { model, prometheus } = this.state;
    const request = {
      targets: [{ refId: 'Anno', expr: model.expr, range: true, interval: model.step, legendFormat: '' }],
      range, intervalMs: 1000, maxDataPoints: 500,
      scopedVars: { __sceneObject: { value: { valueOf: () => this }, text: '__sceneObject' } },
    };
    const answer = await prometheus.query(request as any);
    const times: number[] = [];
    for (const frame of answer.data as DataFrame[]) {
      let open = false;
      frame.fields[0]!.values.forEach((t: number, i: number) => {
        const value = frame.fields[1]!.values[i];
        const there = value !== null && value !== 0;
        if (there && !open) {
          times.push(t);
        }
        open = there;
      });
    }
    const series = createDataFrame({
      fields: [
        { name: 'time', type: FieldType.time, values: times },
        { name: 'color', type: FieldType.string, values: times.map(() => model.iconColor ?? 'red') },
      ],
    });
    series.meta = { dataTopic: DataTopic.Annotations };
    const failure = answer.errors?.[0]?.message;
    this.found = failure
      ? { ...this.found, state: 'error', text: failure }
      : { ...this.found, state: 'data', text: `${times.length} shown` };
    this.publishResults({ state: LoadingState.Done, series: [series], timeRange: range, errors: answer.errors });
  }
}
