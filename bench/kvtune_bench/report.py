"""The demo's report: one HTML file that needs nothing else, for readers with ten seconds and for those with an hour."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvtune_bench.charts import Chart, all_charts, both, percent, seconds, tokens
from kvtune_bench.load import TurnRecord
from kvtune_telemetry.vocabulary import Outcome

SCHEMA = "kvtune.demo/1"
MANY_FACTS = 8
"""More facts than these are folded away."""
TTL = "decoder_kv_blocks_ttl"
THRESHOLD = "kv_recompute_threshold"

OUTCOMES: dict[str, str] = {
    Outcome.FIRST: "no earlier turn of the conversation was known: nothing to reuse",
    Outcome.HIT: "the history was read back from decode, or prefill held it already",
    Outcome.EXPIRED: "the next turn came after the retention had run out",
    Outcome.REWRITTEN: "the history had been changed, and too little of it could be proven equal",
    Outcome.CONSUMED: "another turn of the conversation had used the single-use reference",
    Outcome.ENGINE_GONE: "the engine that held the history was down or had restarted",
    Outcome.EVICTED: "the router had let the reference go to bound its memory",
    Outcome.ABSENT: "the turn before had ended without a reference",
    Outcome.UNVERIFIED: "nothing proved the held history equal, so it was refused",
    Outcome.READ_FAILED: "the read failed, and prefill computed instead",
    Outcome.DISABLED: "kept without reuse on purpose, to compare with",
    Outcome.NO_IDENTITY: "nothing told which conversation the turn belonged to",
    Outcome.ERROR: "the turn itself failed",
    "unreported": "the router sent no debug header",
}
"""What each outcome means, in the reader's words."""

_SETTINGS = {TTL: "How long decode keeps a history (TTL)", THRESHOLD: "From how many tokens on prefill fetches"}
_VERDICTS = {
    "change": "change advised",
    "keep": "keep",
    "off": "turn off",
    "insufficient": "not enough data yet",
    "unidentifiable": "cannot be told from this traffic",
}
_COLUMNS = {
    "value": "value",
    "hit_ratio": "turns back in time",
    "hit_ratio_returning": "of those that return",
    "token_hit_ratio": "tokens back in time",
    "pinned_tokens_mean": "retained, mean",
    "pinned_tokens_p99": "retained, P99",
    "pool_share_p99": "pool in use, P99",
    "prefill_saved_s_per_turn": "prefill saved a turn",
    "ttft_mean_s": "TTFT, mean",
    "fetched_share": "histories fetched",
    "extra_mean_s": "cost of a history",
    "bound": "a bound only",
}
_NEXT = (
    (
        "Ask for advice on a live deployment",
        "kvtune suggest --prometheus http://prometheus:9090 --window 24h",
    ),
    (
        "Record what engines and router say of themselves, and ask later",
        "kvtune record --scrape http://router:9400/metrics --scrape http://decode:8200/metrics --out DIR\n"
        "kvtune suggest --snapshot DIR",
    ),
    ("Put the router in front of your engines", "kvtune router --prefill http://P:8100 --decode http://D:8200"),
    ("See what every metric means", "kvtune metrics"),
)

_CSS = """
:root{--ink:#1f2933;--muted:#5f6c7b;--line:#dfe5ec;--paper:#fff;--wash:#f5f7fa;--blue:#0072B2;--good:#007a5a;--bad:#b3261e}
*{box-sizing:border-box}html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--wash);color:var(--ink);font:16px/1.5 "Segoe UI",Helvetica,Arial,sans-serif}
main{max-width:1200px;margin:0 auto;padding:28px 20px 48px}
h1{font-size:2rem;line-height:1.2;margin:.2em 0 .35em;letter-spacing:-.01em;max-width:26em}
h1,h3{text-wrap:balance}.wide{grid-column:1/-1}
h2{font-size:1.3rem;margin:2.2em 0 .7em}h3{font-size:1.02rem;line-height:1.35;margin:0 0 .5em}
p{margin:.4em 0}.eyebrow{color:var(--muted);font-weight:600;margin:0}.lead{color:var(--muted);max-width:56em}
.simulated{background:#fff6e0;border:1px solid #f0d48a;border-radius:8px;padding:10px 14px;margin:14px 0 20px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,290px),1fr));gap:14px}
.tile,.card,figure{background:var(--paper);border:1px solid var(--line);border-radius:10px;padding:16px 18px;margin:0}
.tile b{display:block;font-size:1.9rem;line-height:1.2;letter-spacing:-.01em}
.tile span{color:var(--muted);font-size:.92rem}
.wrong{color:var(--bad);font-weight:700}.good b{color:var(--good)}.bad b{color:var(--bad)}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));gap:16px}
.chart{overflow-x:auto}.chart svg{display:block;width:100%;min-width:430px;height:auto}
.wide .chart svg{min-width:680px}
figcaption{color:var(--muted);font-size:.88rem;margin-top:.5em}
.advice{display:flex;flex-wrap:wrap;gap:6px 18px;align-items:baseline}.advice .big{font-size:1.5rem;font-weight:700}
.pill{border-radius:99px;padding:2px 10px;font-size:.85rem;font-weight:600;background:#e8edf3;color:var(--ink)}
.pill.change{background:#d9f2e8;color:#00573f}.pill.off,.pill.error{background:#fbe3e1;color:#8c1d18}
.pill.warning,.pill.insufficient,.pill.unidentifiable{background:#fff0cc;color:#6b4e00}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:.92rem}
th,td{padding:6px 10px;text-align:right;border-bottom:1px solid var(--line);vertical-align:top}
th{color:var(--muted);font-weight:600}th:first-child,td:first-child,td.text,th.text{text-align:left}
tr.now td{background:#eef2f6;font-weight:600}tr.best td{background:#e3f5ee;font-weight:600}
tbody tr:last-child td{border-bottom:0}
pre{background:#f0f3f7;border-radius:8px;padding:12px 14px;overflow-x:auto;white-space:pre-wrap;
font-size:.86rem;margin:.5em 0}
code{font-family:ui-monospace,Menlo,Consolas,monospace}ul{padding-left:1.2em;margin:.4em 0}li{margin:.3em 0}
details{margin-top:.8em}summary{cursor:pointer;color:var(--blue);font-weight:600}
footer{color:var(--muted);font-size:.88rem;margin-top:3em}
@media(max-width:600px){main{padding:18px 12px}h1{font-size:1.5rem}.tile b{font-size:1.6rem}}
@media print{body{background:#fff;font-size:11pt}main{max-width:none;padding:0}.tile,.card,figure{break-inside:avoid}
.tiles{grid-template-columns:repeat(3,1fr)}.grid{grid-template-columns:1fr 1fr}.chart svg,.wide .chart svg{min-width:0}
h2{break-after:avoid}pre{white-space:pre-wrap}}
"""


def render_report(result: Mapping[str, Any]) -> str:
    """The page for a `kvtune.demo/1` result. Self-contained: no script, no request; every value is escaped.

    Keys that are missing or None leave their part out or say that there is nothing; only a wrong `schema` raises
    ValueError. `result`: `simulated` {model, statement, calibration, time_scale}, `settings`, `duration_s` (model
    seconds), `turns` (`TurnRecord.as_dict`), `figures` (`figures.summarise`), `books`, and `suggest`
    (`kvtune.suggest/1`); optionally `next`, a list of {text, command}.
    """
    if result.get("schema") != SCHEMA:
        raise ValueError(f"expected a result with schema {SCHEMA}, got {result.get('schema')!r}")
    figures = _mapping(result.get("figures"))
    suggest = _mapping(result.get("suggest"))
    advice = {one.get("setting"): one for one in suggest.get("recommendations") or [] if isinstance(one, Mapping)}
    records = [TurnRecord.from_dict(turn) for turn in result.get("turns") or []]
    charts = all_charts(records, figures, ttl=advice.get(TTL), threshold=advice.get(THRESHOLD))
    parts = [
        _head(result, figures),
        _tiles(result, figures, advice),
        _advice_cards(suggest),
        _charts(charts),
        _counterfactuals(suggest),
        _evidence(suggest),
        _books(result, figures),
        _run(result, figures),
        _go_on(result, suggest),
    ]
    title = "kvtune demo report"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="data:,">'
        f"<style>{_CSS}</style></head>\n<body><main>\n{''.join(parts)}\n"
        "<footer>Made by <code>kvtune demo</code>. This file holds everything it shows and loads nothing.</footer>"
        "</main></body></html>\n"
    )


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(value: object) -> str:
    return html.escape(str(value))


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


# --- the first screen ---


def _head(result: Mapping[str, Any], figures: Mapping[str, Any]) -> str:
    compared = _mapping(figures.get("comparison"))
    turns = _mapping(figures.get("turns"))
    ratio, on, off = (_number(compared.get(name)) for name in ("ratio", "on_s", "off_s"))
    if ratio is None:
        headline = "What KV reuse did for these conversations"
    elif ratio >= 1.05:
        headline = f"With KV reuse, follow-up turns got their first token {ratio:.1f}× sooner"
    elif ratio > 0.95:
        headline = "KV reuse made no difference to the first token of follow-up turns here"
    else:
        headline = "KV reuse made follow-up turns slower to start here"
    lead = []
    if on is not None and off is not None:
        lead.append(
            f"{' instead of '.join(both(on, off))} on average, at equal prompt lengths, in the same run: a share of "
            "the conversations was kept without reuse to compare with."
        )
    if turns.get("sent"):
        lead.append(
            f"{turns['sent']:,} turns of {turns.get('conversations', 0):,} recorded coding-agent conversations, "
            f"{tokens(_number(turns.get('mean_prompt_tokens')))} tokens a prompt on average, "
            f"in {seconds(_number(result.get('duration_s')))} of model time."
        )
    return (
        f'<p class="eyebrow">kvtune demo report</p><h1>{_text(headline)}</h1>'
        f'<p class="lead">{_text(" ".join(lead))}</p>{_simulated(_mapping(result.get("simulated")))}'
    )


def _simulated(simulated: Mapping[str, Any]) -> str:
    if not simulated:
        return ""
    calibration = _mapping(simulated.get("calibration"))
    said = str(simulated.get("statement") or "The engines are simulated: no GPU was used.").strip()
    first, _, rest = said.partition(". ")
    more = [_text(rest)] if rest else []
    source = calibration.get("source")
    if (model := simulated.get("model")) and (str(model) not in said or (source and str(source) not in said)):
        more.append(f"Calibration: <b>{_text(model)}</b>" + _optional("; ", source) + ".")
    scale = _number(simulated.get("time_scale"))
    if scale is not None and scale != 1 and f"{scale:g} times" not in said:
        more.append(f"Time ran {scale:g} times faster than on the wall; every time on this page is model time.")
    return f'<p class="simulated"><b>{_text(first.rstrip("."))}.</b> {" ".join(more)}</p>'


def _optional(before: str, value: object) -> str:
    return f"{before}{_text(value).rstrip('.')}" if value else ""


def _tile(value: str, words: str, kind: str = "") -> str:
    return f'<div class="tile {kind}"><b>{_text(value)}</b><span>{_text(words)}</span></div>'


def _tiles(result: Mapping[str, Any], figures: Mapping[str, Any], advice: Mapping[Any, Mapping[str, Any]]) -> str:
    tiles = []
    compared = _mapping(figures.get("comparison"))
    if compared.get("on_s") is not None:
        tiles.append(
            _tile(
                " vs ".join(both(compared["on_s"], compared["off_s"])),
                "time to first token of follow-up turns, reuse on vs off",
            )
        )
    total: Mapping[str, int] = _mapping(figures.get("outcomes")).get("total") or {}
    outside = (Outcome.FIRST, Outcome.DISABLED, Outcome.NO_IDENTITY, "unreported")
    eligible = sum(n for name, n in total.items() if name not in outside)
    if eligible:
        tiles.append(
            _tile(percent(total.get(Outcome.HIT, 0) / eligible), f"of {eligible:,} turns that could reuse history did")
        )
    sources = _mapping(figures.get("prompt_tokens"))
    prompt = sum(sources.values())
    if prompt:
        tiles.append(_tile(percent(1 - sources.get("computed", 0) / prompt), "of all prompt tokens not computed again"))
    turns = _mapping(figures.get("turns"))
    if turns.get("judged"):
        wrong = turns.get("wrong", 0)
        tiles.append(
            _tile(
                "all correct" if not wrong else f"{wrong:,} wrong",
                f"{turns['judged']:,} answers compared with the only right one",
                "bad" if wrong else "good",
            )
        )
    books = _mapping(result.get("books"))
    if "ok" in books:
        tiles.append(
            _tile("books balance", "every turn and every read booked once, on both sides", "good")
            if books["ok"]
            else _tile("books differ", "see “Do the books balance?” below", "bad")
        )
    one = advice.get(TTL)
    if one is not None:
        tiles.append(_tile(_move(one), f"TTL: {_VERDICTS.get(str(one.get('status')), one.get('status'))}"))
    return f'<section class="tiles">{"".join(tiles)}</section>' if tiles else ""


# --- advice ---


def _value(setting: object, value: object) -> str:
    number = _number(value)
    if number is None:
        return "–"
    return f"{number:g}\u00a0s" if setting == TTL else f"{number:g}\u00a0tokens"


def _move(one: Mapping[str, Any]) -> str:
    current, recommended = one.get("current"), one.get("recommended")
    now = _value(one.get("setting"), current)
    if one.get("status") == "off":
        return f"{now} → off"
    if recommended is None or recommended == current:
        return now
    return f"{now} → {_value(one.get('setting'), recommended)}"


def _advice_cards(suggest: Mapping[str, Any]) -> str:
    cards = []
    for one in suggest.get("recommendations") or []:
        setting, status = one.get("setting"), str(one.get("status"))
        lines = []
        if interval := one.get("interval"):
            words = "90 % interval" if setting == TTL else "interval"
            lines.append(f"{words}: {_value(setting, interval[0])} to {_value(setting, interval[1])}")
        clamps = one.get("clamped_by")
        uncapped = _number(one.get("uncapped"))
        if clamps:
            names = clamps if isinstance(clamps, str) else ", ".join(map(str, clamps))
            free = uncapped is not None and uncapped != one.get("recommended")
            lines.append(f"bounded by: {names}" + (f" (without: {_value(setting, uncapped)})" if free else ""))
        effects = _mapping(one.get("effects"))
        table = _effects(effects)
        cards.append(
            f'<div class="card"><h3>{_text(_SETTINGS.get(str(setting), setting))}</h3>'
            f'<p class="advice"><span class="big">{_text(_move(one))}</span>'
            f'<span class="pill {_text(status)}">{_text(_VERDICTS.get(status, status))}</span></p>'
            f"<p>{_text(one.get('reason') or '')}</p>"
            + "".join(f'<p class="lead">{_text(line)}</p>' for line in lines)
            + (f"<details><summary>Expected effects</summary>{table}</details>" if table else "")
            + f'<p class="lead"><code>{_text(setting)}</code></p></div>'
        )
    if error := suggest.get("error"):
        cards.append(f'<div class="card"><h3>No advice</h3><p>{_text(_plain(error))}</p></div>')
    return f'<h2>What kvtune suggests</h2><section class="grid">{"".join(cards)}</section>' if cards else ""


def _effects(effects: Mapping[str, Any]) -> str:
    """Figures now and then, as a table; figures that are no such pair as they come."""
    pairs = {name: pair for name, pair in effects.items() if isinstance(pair, Mapping) and "recommended" in pair}
    if not pairs:
        return _facts(effects)
    body = "".join(
        f"<tr><td>{_text(_COLUMNS.get(name, name.replace('_', ' ')))}</td>"
        f"<td>{_text(_named(name, pair.get('current')))}</td><td>{_text(_named(name, pair['recommended']))}</td></tr>"
        for name, pair in pairs.items()
    )
    return (
        '<div class="scroll"><table><thead><tr><th>expected</th><th>now</th><th>suggested</th></tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _plain(value: object) -> str:
    if isinstance(value, Mapping) and "message" in value:
        return str(value["message"])
    return str(value)


def _counterfactuals(suggest: Mapping[str, Any]) -> str:
    blocks = []
    for one in suggest.get("recommendations") or []:
        rows = [row for row in one.get("counterfactual") or [] if isinstance(row, Mapping)]
        if not rows:
            continue
        columns = [name for name in rows[0] if any(row.get(name) is not None for row in rows)]
        if "bound" in columns and not any(row.get("bound") for row in rows):
            columns.remove("bound")
        head = "".join(f"<th>{_text(_COLUMNS.get(name, name.replace('_', ' ')))}</th>" for name in columns)
        body = []
        for row in rows:
            value = row.get("value")
            kind = (
                "best"
                if value is not None and value == one.get("recommended")
                else "now"
                if value is not None and value == one.get("current")
                else ""
            )
            cells = "".join(f"<td>{_text(_cell(one.get('setting'), name, row.get(name)))}</td>" for name in columns)
            body.append(f'<tr class="{kind}">{cells}</tr>')
        blocks.append(
            f'<div class="card"><h3>{_text(_SETTINGS.get(str(one.get("setting")), one.get("setting")))}</h3>'
            f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'
            '<p class="lead">Grey: in force now. Green: suggested.</p></div>'
        )
    return f'<h2>What other values would do</h2><section class="grid">{"".join(blocks)}</section>' if blocks else ""


def _cell(setting: object, name: str, value: object) -> str:
    if name == "value":
        return _value(setting, value)
    return _named(name, value)


def _named(name: str, value: object) -> str:
    """A value for people, its unit read off its name (`_s`, `tokens`, `ratio`, `share`)."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(_named(name, item) for item in value) or "–"
    if isinstance(value, Mapping):
        return "; ".join(f"{key}: {_named(str(key), item)}" for key, item in value.items()) or "–"
    number = _number(value)
    if number is None:
        return str(value)
    if name.endswith("_per_s"):
        return f"{number:.3g}/s"
    if name.endswith(("_s", "seconds", "_s_per_turn")):
        return seconds(number)
    if name.endswith(("ratio", "share")) or "_share_" in name:
        return percent(number)
    if "tokens" in name:
        return tokens(number)
    return f"{int(number):,}" if number == int(number) and abs(number) < 1e15 else f"{number:.4g}"


def _facts(facts: Mapping[str, Any]) -> str:
    rows = "".join(
        f'<tr><td>{_text(str(name).replace("_", " "))}</td><td class="text">{_text(_named(str(name), value))}</td></tr>'
        for name, value in facts.items()
    )
    return f'<div class="scroll"><table><tbody>{rows}</tbody></table></div>' if rows else ""


def _key_facts(facts: Mapping[str, Any]) -> str:
    """One sentence with the sample sizes, of those that are known."""
    costs = _mapping(facts.get("cost_observations"))
    known = [
        f"{number:,.0f} {words}"
        for number, words in (
            (facts.get("turns"), "turns"),
            (facts.get("conversations"), "conversations"),
            (facts.get("gaps"), "pauses that ended"),
            (costs.get("fetch"), "timed fetches"),
            (costs.get("recompute"), "timed recomputes"),
        )
        if _number(number) is not None
    ]
    return f"<p>{_text(', '.join(known))}.</p>" if known else ""


def _evidence(suggest: Mapping[str, Any]) -> str:
    parts = []
    window = _mapping(suggest.get("window"))
    facts: dict[str, Any] = {"source": suggest["source"]} if suggest.get("source") else {}
    if window.get("seconds") is not None:
        facts["window_seconds"] = window["seconds"]
    facts |= _mapping(suggest.get("evidence"))
    if facts:
        table = _facts(facts)
        if len(facts) > MANY_FACTS:
            table = f"<details><summary>All {len(facts)} facts</summary>{table}</details>"
        parts.append(f'<div class="card"><h3>What the advice rests on</h3>{_key_facts(facts)}{table}</div>')
    checks = [check for check in suggest.get("checks") or [] if isinstance(check, Mapping)]
    if checks:
        items = "".join(
            f'<li><span class="pill {_text(check.get("level", ""))}">{_text(check.get("level", ""))}</span> '
            f"{_text(check.get('message') or check.get('code') or '')}</li>"
            for check in checks
        )
        parts.append(f'<div class="card"><h3>Checks</h3><ul>{items}</ul></div>')
    return f'<h2>Evidence and checks</h2><section class="grid">{"".join(parts)}</section>' if parts else ""


# --- the rest ---


def _charts(charts: Sequence[Chart]) -> str:
    drawn = "".join(
        f'<figure class="{"wide" if number == 0 else ""}"><h3>{_text(chart.title)}</h3>'
        f'<div class="chart">{chart.svg}</div>'
        f"<figcaption>{_text(chart.note)}</figcaption></figure>"
        for number, chart in enumerate(charts)
    )
    return f'<h2>What was measured</h2><section class="grid">{drawn}</section>'


def _books(result: Mapping[str, Any], figures: Mapping[str, Any]) -> str:
    books = _mapping(result.get("books"))
    parts = []
    total = _mapping(books.get("outcomes")) or _mapping(_mapping(figures.get("outcomes")).get("total"))
    if total:
        everything = sum(total.values())
        rows = "".join(
            f"<tr><td>{_text(str(name).replace('_', ' '))}</td><td>{n:,.0f}</td><td>{percent(n / everything)}</td>"
            f'<td class="text">{_text(OUTCOMES.get(name, ""))}</td></tr>'
            for name, n in sorted(total.items(), key=lambda item: -item[1])
            if n
        )
        parts.append(
            '<div class="card"><h3>Every turn has exactly one outcome</h3><div class="scroll"><table><thead><tr>'
            '<th>outcome</th><th>turns</th><th>share</th><th class="text">meaning</th></tr></thead>'
            f"<tbody>{rows}<tr><td><b>sum</b></td><td><b>{everything:,.0f}</b></td><td></td><td></td></tr></tbody>"
            "</table></div></div>"
        )
    if books:
        lines = []
        if books.get("turns") is not None and total:
            lines.append(_equal("turns sent", books["turns"], "outcomes booked", sum(total.values())))
        if books.get("reads_at_prefill") is not None and books.get("reads_released_at_decode") is not None:
            lines.append(
                _equal(
                    "histories read, as prefill counts", books["reads_at_prefill"],
                    "released as read, as decode counts", books["reads_released_at_decode"],
                )
            )  # fmt: skip
        known = {"turns", "outcomes", "reads_at_prefill", "reads_released_at_decode", "violations", "checks", "ok"}
        rest = {name: value for name, value in books.items() if name not in known}
        failed = {name: ok for name, ok in _mapping(books.get("checks")).items() if not ok}
        lines += [f"✗ {name}" for name in failed]
        lines += [f"✓ {name}" for name in _mapping(books.get("checks")) if name not in failed]
        if "violations" in books:
            found = _violations(books["violations"])
            lines += [f"✗ {item}" for item in found] or ["✓ no invariant violated"]
        mark = (
            ""
            if "ok" not in books
            else '<span class="pill change">they balance</span>'
            if books["ok"]
            else '<span class="pill error">they do not</span>'
        )
        parts.append(
            f'<div class="card"><h3>Do the books balance? {mark}</h3><ul>'
            + "".join(f'<li class="{"wrong" if line[0] == "✗" else ""}">{_text(line)}</li>' for line in lines)
            + f"</ul>{_facts(rest)}</div>"
        )
    return f'<h2>Accounts</h2><section class="grid">{"".join(parts)}</section>' if parts else ""


def _violations(value: object) -> list[str]:
    """What went wrong, from a list of texts, counts by kind, or a mere count."""
    if isinstance(value, Mapping):
        return [f"{str(name).replace('_', ' ')}: {_named('', n)}" for name, n in value.items() if n]
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return [f"{value} violations"] if value else []


def _equal(left: str, a: float, right: str, b: float) -> str:
    return f"{'✓' if a == b else '✗'} {a:,.0f} {left} {'=' if a == b else '≠'} {b:,.0f} {right}"


def _run(result: Mapping[str, Any], figures: Mapping[str, Any]) -> str:
    parts = []
    timings = _mapping(figures.get("ttft"))
    rows = []
    for arm, words in (("on", "reuse on"), ("off", "reuse off"), ("unreported", "not reported")):
        for kind, name in (("first", "first turns"), ("followup", "follow-up turns")):
            one = _mapping(_mapping(timings.get(arm)).get(kind))
            if one.get("n"):
                rows.append((f"{name}, {words}", one))
    for name, one in _mapping(figures.get("ttft_by_outcome")).items():
        if _mapping(one).get("n"):
            rows.append((f"follow-up, {str(name).replace('_', ' ')}", one))
    if rows:
        body = "".join(
            f"<tr><td>{_text(name)}</td><td>{one['n']:,}</td>"
            + "".join(f"<td>{_text(seconds(_number(one.get(key))))}</td>" for key in ("mean", "p50", "p90"))
            + "</tr>"
            for name, one in rows
        )
        parts.append(
            '<div class="card"><h3>Time to first token, as clients saw it</h3><div class="scroll"><table><thead><tr>'
            f"<th>turns</th><th>n</th><th>mean</th><th>P50</th><th>P90</th></tr></thead><tbody>{body}</tbody></table>"
            '</div><p class="lead">Quantiles are nearest rank. Prompts differ in length from row to row.</p></div>'
        )
    settings = _facts(_mapping(result.get("settings")))
    calibration = _mapping(_mapping(result.get("simulated")).get("calibration"))
    if calibration:
        text = json.dumps(calibration, indent=2, ensure_ascii=False, default=str)
        settings += (
            "<details><summary>Calibration of the simulated engines</summary>"
            f"<pre><code>{_text(text)}</code></pre></details>"
        )
    if settings:
        parts.append(f'<div class="card"><h3>Settings of this run</h3>{settings}</div>')
    return f'<h2>The run in numbers</h2><section class="grid">{"".join(parts)}</section>' if parts else ""


def _go_on(result: Mapping[str, Any], suggest: Mapping[str, Any]) -> str:
    parts = []
    for key, title in (("apply", "Apply the advice"), ("rollback", "Take it back")):
        if blocks := _change(suggest.get(key)):
            parts.append(f'<div class="card"><h3>{title}</h3>{blocks}</div>')
    steps = [(step.get("text", ""), step.get("command", "")) for step in result.get("next") or []] or list(_NEXT)
    items = "".join(f"<li>{_text(words)}<pre><code>{_text(command)}</code></pre></li>" for words, command in steps)
    parts.append(f'<div class="card"><h3>With your own engines</h3><ul>{items}</ul></div>')
    return f'<h2>How to go on</h2><section class="grid">{"".join(parts)}</section>'


def _change(value: object) -> str:
    """What to paste where: engine fragments by role, the router's flag, a note; anything else as it comes."""
    change = _mapping(value)
    if "engines" not in change:
        return _blocks(value)
    parts = [
        f"<p><b>{_text(engine.get('role', 'engine'))} engines</b></p>{_blocks(engine.get('text'))}"
        for engine in change.get("engines") or []
        if isinstance(engine, Mapping)
    ]
    if change.get("router"):
        parts.append(f"<p><b>router</b></p>{_blocks(change['router'])}")
    if change.get("note"):
        parts.append(f'<p class="lead">{_text(change["note"])}</p>')
    return "".join(parts)


def _blocks(value: object) -> str:
    """Text, or named texts, as blocks to copy from."""
    if not value:
        return ""
    if isinstance(value, str):
        return f"<pre><code>{_text(value)}</code></pre>"
    if isinstance(value, Mapping):
        return "".join(
            f"<p><b>{_text(str(name).replace('_', ' '))}</b></p>{_blocks(item)}" for name, item in value.items() if item
        )
    if isinstance(value, Sequence):
        return "".join(_blocks(item) for item in value)
    return f"<pre><code>{_text(value)}</code></pre>"
