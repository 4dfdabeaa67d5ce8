// Bundles the page that draws a dashboard: build/app.js and build/app.css. `node build.mjs`
import { build } from 'esbuild';
import { mkdirSync, writeFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';

const here = dirname(fileURLToPath(import.meta.url));

/** react-custom-scrollbars-2 is CommonJS whose default export is an object; Grafana imports it as a module. */
const scrollbars = {
  name: 'scrollbars',
  setup(it) {
    it.onResolve({ filter: /^react-custom-scrollbars-2$/ }, (args) =>
      args.pluginData === 'inner' ? undefined : { path: 'scrollbars', namespace: 'shim' },
    );
    it.onLoad({ filter: /.*/, namespace: 'shim' }, () => ({
      contents: `const it = require('${join(here, 'node_modules/react-custom-scrollbars-2')}');
        export const Scrollbars = it.Scrollbars; export default it.Scrollbars;`,
      resolveDir: here,
    }));
  },
};

export async function bundle() {
  mkdirSync(join(here, 'build'), { recursive: true });
  await build({
    // Aliases are looked for from here, wherever this is started.
    absWorkingDir: here,
    entryPoints: { app: join(here, 'src/app.tsx') },
    outdir: join(here, 'build'),
    bundle: true,
    format: 'iife',
    platform: 'browser',
    target: 'chrome120',
    jsx: 'automatic',
    minify: true,
    legalComments: 'none',
    logLevel: 'error',
    define: { 'process.env.NODE_ENV': '"production"', global: 'globalThis', 'process.env': '{}' },
    loader: { '.woff': 'dataurl', '.woff2': 'dataurl', '.svg': 'dataurl', '.png': 'dataurl', '.gif': 'dataurl', '.ttf': 'empty' },
    alias: {
      '@grafana/plugin-compat/datasources': join(here, 'src/compat.ts'),
      // The one router there is: Grafana itself runs two generations of it side by side.
      'react-router-dom-v5-compat': 'react-router-dom',
    },
    plugins: [scrollbars],
  });
  writeFileSync(
    join(here, 'build/index.html'),
    '<!doctype html><html><head><meta charset="utf-8"><title>dashboard</title><style>body{margin:0}</style><link rel="stylesheet" href="/app.css">' +
      '</head><body><div id="root"></div><script src="/app.js"></script></body></html>\n',
  );
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const began = Date.now();
  await bundle();
  console.error(`bundled in ${((Date.now() - began) / 1000).toFixed(1)} s`);
}
