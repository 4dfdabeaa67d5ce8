// What Grafana's core registers at its start: field options with their override processors, and transformations.
import {
  booleanOverrideProcessor,
  dataLinksOverrideProcessor,
  displayNameOverrideProcessor,
  FieldColorModeId,
  type FieldConfigPropertyItem,
  identityOverrideProcessor,
  numberOverrideProcessor,
  standardEditorsRegistry,
  standardFieldConfigEditorRegistry,
  standardTransformers,
  standardTransformersRegistry,
  stringOverrideProcessor,
  ThresholdsMode,
  thresholdsOverrideProcessor,
  unitOverrideProcessor,
  valueMappingsOverrideProcessor,
} from '@grafana/data';

const editor = () => null;

function standard(id: string, process: any, defaultValue?: unknown): FieldConfigPropertyItem<any> {
  return { id, path: id, name: id, process, defaultValue, shouldApply: () => true, editor, override: editor, settings: {} } as any;
}

export function register(): void {
  standardEditorsRegistry.setInit(() => []);
  standardFieldConfigEditorRegistry.setInit(() => [
    standard('unit', unitOverrideProcessor),
    standard('min', numberOverrideProcessor),
    standard('max', numberOverrideProcessor),
    standard('fieldMinMax', booleanOverrideProcessor),
    standard('decimals', numberOverrideProcessor),
    standard('displayName', displayNameOverrideProcessor),
    standard('color', identityOverrideProcessor),
    standard('noValue', stringOverrideProcessor),
    standard('links', dataLinksOverrideProcessor),
    standard('mappings', valueMappingsOverrideProcessor, []),
    standard('thresholds', thresholdsOverrideProcessor, {
      mode: ThresholdsMode.Absolute,
      steps: [{ value: -Infinity, color: 'green' }, { value: 80, color: 'red' }],
    }),
    standard('filterable', booleanOverrideProcessor),
  ]);
  standardTransformersRegistry.setInit(() =>
    // Two names of one transformation are listed twice.
    [...new Set(Object.values(standardTransformers) as any[])].map((transformation) => ({
      id: transformation.id,
      name: transformation.name,
      editor: editor as any,
      // Grafana loads transformations when they are first used.
      transformation: async () => transformation,
      imageDark: '',
      imageLight: '',
    })),
  );
}

/** Custom field options of a panel, each applicable by overrides; a value of null means no default. */
export function custom(defaults: Record<string, unknown>) {
  return (builder: any) => {
    for (const [path, value] of Object.entries(defaults)) {
      builder.addCustomEditor({
        id: path,
        path,
        name: path,
        defaultValue: value === null ? undefined : value,
        editor,
        override: editor,
        process: identityOverrideProcessor,
        shouldApply: () => true,
      });
    }
  };
}

export const PALETTE = { color: { defaultValue: { mode: FieldColorModeId.PaletteClassic } } };
export const BY_THRESHOLDS = { color: { defaultValue: { mode: FieldColorModeId.Thresholds } } };
