// Draws a dashboard with Grafana's own panel libraries in headless Chromium and takes its picture.
//
//   node shot.mjs --dashboard FILE.json --prometheus http://127.0.0.1:9090 --out FILE.png
//
// One JSON line a panel on stdout: what it shows, or why not. Exit status: 0 when every panel is there and none shows
// an error, 1 when not, 2 for a command line that makes no sense.
import { createServer } from 'node:http';
import { existsSync, mkdirSync, readdirSync, readFileSync, statSync } from 'node:fs';
import { dirname, extname, join, normalize, resolve } from 'node:path';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';

const here = dirname(fileURLToPath(import.meta.url));
const TYPES = { '.html': 'text/html', '.js': 'text/javascript', '.css': 'text/css', '.svg': 'image/svg+xml' };
/** What Grafana's libraries say outside Grafana; a query that failed is reported by its panel. */
const HARMLESS = /grafanaBootData was not set|Failed to load resource/;
const SETTLED_MS = 1200;

const HELP = `usage: node shot.mjs --dashboard FILE --prometheus URL --out FILE.png [options]
  --from now-15m --to now      time range
  --width 1600                 of the picture, pixels
  --scale 1                    device pixels a pixel
  --theme dark|light
  --scrape 5                   the data source's scrape interval, seconds ($__rate_interval is at least four of them)
  --var name=value             choose a variable's value; repeatable
  --expand                     open collapsed rows
  --timezone utc               of the axes
  --chromium PATH              the browser [$CHROMIUM, or /usr/bin/chromium]
  --timeout 480                seconds until panels must have settled
  --rebuild                    bundle the page anew even if it is there`;

class Usage extends Error {}

function settings() {
  let values;
  try {
    ({ values } = parseArgs({
      options: {
        dashboard: { type: 'string' },
        prometheus: { type: 'string' },
        out: { type: 'string' },
        from: { type: 'string', default: 'now-15m' },
        to: { type: 'string', default: 'now' },
        width: { type: 'string', default: '1600' },
        scale: { type: 'string', default: '1' },
        theme: { type: 'string', default: 'dark' },
        scrape: { type: 'string', default: '5' },
        var: { type: 'string', multiple: true, default: [] },
        expand: { type: 'boolean', default: false },
        timezone: { type: 'string', default: 'utc' },
        chromium: { type: 'string', default: process.env.CHROMIUM ?? '/usr/bin/chromium' },
        timeout: { type: 'string', default: '480' },
        rebuild: { type: 'boolean', default: false },
        help: { type: 'boolean', default: false },
      },
    }));
  } catch (error) {
    throw new Usage(error.message);
  }
  if (values.help) {
    console.log(HELP);
    process.exit(0);
  }
  for (const name of ['dashboard', 'prometheus', 'out']) {
    if (!values[name]) {
      throw new Usage(`--${name} is missing`);
    }
  }
  if (!['dark', 'light'].includes(values.theme)) {
    throw new Usage(`--theme is dark or light, got ${values.theme}`);
  }
  const numbers = {};
  for (const name of ['width', 'scale', 'scrape', 'timeout']) {
    numbers[name] = Number(values[name]);
    if (!(numbers[name] > 0)) {
      throw new Usage(`--${name} must be a positive number, got ${values[name]}`);
    }
  }
  if (!existsSync(values.dashboard)) {
    throw new Usage(`${values.dashboard}: no such file`);
  }
  if (!existsSync(values.chromium)) {
    throw new Usage(`${values.chromium}: no such browser; install chromium, or name one with --chromium`);
  }
  const chosen = {};
  for (const pair of values.var) {
    const [name, ...rest] = pair.split('=');
    if (!rest.length) {
      throw new Usage(`--var is name=value, got ${pair}`);
    }
    (chosen[name] ??= []).push(rest.join('='));
  }
  let dashboard;
  try {
    dashboard = JSON.parse(readFileSync(values.dashboard, 'utf8'));
  } catch (error) {
    throw new Usage(`${values.dashboard}: not JSON: ${error.message}`);
  }
  if (!Array.isArray(dashboard.panels)) {
    throw new Usage(`${values.dashboard}: not a dashboard: it has no list of panels`);
  }
  if (values.expand) {
    dashboard = expanded(dashboard);
  }
  return { ...values, ...numbers, chosen, dashboard };
}

/** The dashboard with its collapsed rows open, and what is below them moved down. */
function expanded(dashboard) {
  const panels = [];
  let shift = 0;
  for (const panel of dashboard.panels) {
    const y = panel.gridPos.y + shift;
    const moved = { ...panel, gridPos: { ...panel.gridPos, y } };
    if (panel.type !== 'row' || !panel.collapsed || !panel.panels?.length) {
      panels.push(moved);
      continue;
    }
    const first = Math.min(...panel.panels.map((one) => one.gridPos.y));
    panels.push({ ...moved, collapsed: false, panels: [] });
    let height = 0;
    for (const inner of panel.panels) {
      const below = inner.gridPos.y - first;
      panels.push({ ...inner, gridPos: { ...inner.gridPos, y: y + 1 + below } });
      height = Math.max(height, below + inner.gridPos.h);
    }
    shift += height;
  }
  return { ...dashboard, panels };
}

/** The page, and Prometheus behind it: one origin, on loopback. */
function serve(prometheus) {
  const icons = join(here, 'node_modules/@grafana/ui/dist/public/img');
  const server = createServer(async (request, response) => {
    const path = new URL(request.url, 'http://x').pathname;
    try {
      if (path.startsWith('/prometheus/')) {
        const body = [];
        for await (const chunk of request) {
          body.push(chunk);
        }
        const answer = await fetch(prometheus.replace(/\/$/, '') + request.url.slice('/prometheus'.length), {
          method: request.method,
          headers: body.length ? { 'content-type': 'application/x-www-form-urlencoded' } : {},
          body: body.length ? Buffer.concat(body) : undefined,
        });
        response.writeHead(answer.status, { 'content-type': 'application/json' });
        response.end(Buffer.from(await answer.arrayBuffer()));
        return;
      }
      const image = /^\/public\/(?:build\/)?img\/(.+)$/.exec(path);
      const root = image ? icons : join(here, 'build');
      const file = normalize(join(root, image ? image[1] : path === '/' ? 'index.html' : path));
      if (!file.startsWith(root) || !existsSync(file)) {
        response.writeHead(404).end();
        return;
      }
      response.writeHead(200, { 'content-type': TYPES[extname(file)] ?? 'application/octet-stream' });
      response.end(readFileSync(file));
    } catch (error) {
      response.writeHead(502, { 'content-type': 'text/plain' }).end(`${prometheus}: ${error.cause?.message ?? error.message}`);
    }
  });
  return new Promise((done) => server.listen(0, '127.0.0.1', () => done(server)));
}

/** Whether the bundle is missing or older than what it is made of. */
function stale() {
  const bundle = join(here, 'build/app.js');
  if (!existsSync(bundle)) {
    return true;
  }
  const made = statSync(bundle).mtimeMs;
  const sources = readdirSync(join(here, 'src')).map((name) => join(here, 'src', name));
  return [...sources, join(here, 'build.mjs'), join(here, 'package.json')].some((file) => statSync(file).mtimeMs > made);
}

/** Pixels the dashboard will need, for a first drawing that is nearly the last: cells of the grid are 30 high, 8 apart. */
function roughHeight(dashboard) {
  const ends = dashboard.panels.map((panel) => panel.gridPos.y + panel.gridPos.h);
  return 130 + 38 * Math.max(1, ...ends);
}

function titles(dashboard) {
  return dashboard.panels.filter((panel) => panel.title).map((panel) => panel.title);
}

async function main() {
  const it = settings();
  if (!existsSync(join(here, 'node_modules'))) {
    throw new Error(`no node_modules in ${here}; run: npm ci --prefix ${here}`);
  }
  if (it.rebuild || stale()) {
    const { bundle } = await import('./build.mjs');
    await bundle();
  }
  const { chromium } = await import('playwright-core');
  const server = await serve(it.prometheus);
  const browser = await chromium.launch({
    executablePath: it.chromium,
    args: ['--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage', '--force-color-profile=srgb', '--hide-scrollbars'],
  });
  const problems = [];
  try {
    const page = await browser.newPage({ viewport: { width: it.width, height: roughHeight(it.dashboard) }, deviceScaleFactor: it.scale });
    page.on('pageerror', (error) => problems.push(`page error: ${error.stack ?? error.message}`));
    page.on('console', (message) => {
      // React reports what a panel threw here, and goes on without the panel.
      if (message.type() === 'error' && !HARMLESS.test(message.text())) {
        problems.push(`console: ${message.text().slice(0, 400)}`);
      }
    });
    await page.addInitScript((value) => {
      window.__preview__ = value;
    }, {
      dashboard: it.dashboard, from: it.from, to: it.to, scrapeS: it.scrape, theme: it.theme, timeZone: it.timezone,
      values: it.chosen,
    });
    const limit = Date.now() + it.timeout * 1000;
    page.setDefaultTimeout(it.timeout * 1000);
    await page.goto(`http://127.0.0.1:${server.address().port}/`, { waitUntil: 'commit' });
    let report = await settled(page, limit, problems);
    if (report) {
      await page.setViewportSize({ width: it.width, height: Math.max(400, report.height) });
      report = (await settled(page, limit, problems)) ?? report;
      problems.push(...(await judged(page, it.dashboard, report)));
    }
    mkdirSync(dirname(resolve(it.out)), { recursive: true });
    await page.screenshot({ path: it.out, fullPage: true });
    const words = await page.evaluate(() =>
      Object.fromEntries(
        [...document.querySelectorAll('[data-viz-panel-key]')].map((one) => [one.dataset.vizPanelKey, one.innerText]),
      ),
    );
    for (const { key, ...panel } of report?.panels ?? []) {
      console.log(JSON.stringify({ ...panel, words: (words[key] ?? '').replace(/\s+/g, ' ').slice(0, 400) }));
    }
    const tally = {};
    for (const panel of report?.panels ?? []) {
      tally[panel.state] = (tally[panel.state] ?? 0) + 1;
    }
    console.error(`${it.out}: ${JSON.stringify(tally)}, variables ${JSON.stringify(report?.variables ?? {})}, annotations ${JSON.stringify(report?.annotations ?? [])}`);
  } finally {
    await browser.close();
    server.close();
    server.closeAllConnections();
  }
  for (const problem of new Set(problems)) {
    console.error(`problem: ${problem}`);
  }
  return problems.length ? 1 : 0;
}

/** The report once no panel loads any more and it stays so for a while; null when that does not happen in time. */
async function settled(page, limit, problems) {
  let quietSince = null;
  while (Date.now() < limit) {
    const report = await page.evaluate(() => window.__report__?.() ?? null);
    if (report?.done) {
      quietSince ??= Date.now();
      if (Date.now() - quietSince >= SETTLED_MS) {
        return report;
      }
    } else {
      quietSince = null;
    }
    await page.waitForTimeout(150);
  }
  const report = await page.evaluate(() => window.__report__?.() ?? null);
  const loading = report?.panels.filter((panel) => panel.state === 'loading').map((panel) => panel.title) ?? [];
  if (!report) {
    problems.push('the page did not start in time');
  } else if (loading.length) {
    problems.push(`not settled in time: ${loading.join(', ')}`);
  }
  return report;
}

/** What is wrong with what the page shows. */
async function judged(page, dashboard, report) {
  const found = report.panels
    .filter((panel) => panel.state === 'error')
    .map((panel) => `panel "${panel.title}": ${panel.text}`);
  for (const one of report.annotations) {
    if (one.state === 'error') {
      found.push(`annotation "${one.name}": ${one.text}`);
    }
  }
  const text = await page.evaluate(() => document.body.innerText);
  for (const title of titles(dashboard)) {
    const parts = title.split(/\$\{?\w+\}?/).filter((part) => part.trim());
    if (!parts.every((part) => text.includes(part.trim()))) {
      found.push(`the title "${title}" is not on the page`);
    }
  }
  const crashed = await page.evaluate(() =>
    [...document.querySelectorAll('[data-viz-panel-key]')]
      .filter((panel) => panel.querySelector('[role="alert"]'))
      .map((panel) => panel.textContent.slice(0, 300)),
  );
  return [...found, ...crashed.map((one) => `a panel shows an alert: ${one}`)];
}

try {
  process.exitCode = await main();
} catch (error) {
  if (error instanceof Usage) {
    console.error(`error: ${error.message}\n\n${HELP}`);
    process.exitCode = 2;
  } else {
    console.error(`error: ${error.message}`);
    process.exitCode = 1;
  }
}
