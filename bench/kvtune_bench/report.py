"""The demo's report: one HTML file that needs nothing else, for readers with ten seconds and for those with an hour."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvtune_bench.charts import Chart, all_charts, both, percent, seconds, threshold_tokens, tokens, ttl
from kvtune_bench.figures import CUT_FETCH
from kvtune_bench.load import TurnRecord
from kvtune_telemetry.vocabulary import Outcome

SCHEMA = "kvtune.demo/1"
MANY_FACTS = 8
"""More facts than these are folded away."""
MANY_LETTERS = 300
"""Longer errors are cut."""
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
    "ttft_mean_s": "TTFT, mean of all follow-ups",
    "ttft_change_s": "TTFT, change by the model",
    "fetched_share": "histories fetched",
    "extra_mean_s": "cost of a history",
}
BOUND = "†"
"""Marks a row that is only a bound."""
ALL_FOLLOWUPS = "all answered follow-up turns, with and without reuse, whatever their prompt lengths"

_FACTS = {
    "conversations": "conversations the router saw",
    "conversations_new": "conversations new to the router",
    "gaps": "pauses that ended",
    "ttft_followup_mean_s": f"TTFT, mean of {ALL_FOLLOWUPS}",
    "kv_usage_p99": "KV pool in use, P99",
    "kappa": "retained tokens, seen over predicted",
    "saving_us_per_token": "saved by fetching, per token",
    "cost_observations": "timed on prefill",
    "window_seconds": "window, model time",
    "scrape_interval_s": "scrape interval",
    "gap_horizon_s": "pauses seen up to",
    "turn_ends_per_s": "turn ends a second",
}
_RUN = {
    "prefill": "prefill engines",
    "decode": "decode engines",
    "ttl_s": "TTL",
    "threshold_tokens": "threshold",
    "pool_tokens": "KV pool of each engine",
    "prefill_cache": "prefill's own prefix cache",
    "conversations": "conversations at once",
    "duration_s": "duration, model time",
    "time_scale": "time compressed",
    "holdout": "conversations to keep without reuse",
    "holdout_ratio": "conversations to keep without reuse",
}
_UNSET = {"pool_tokens": "as calibrated", "trace": "the packaged sample"}
_BOOKED = {
    "turns": "turns sent",
    "reads_at_prefill": "histories read, as prefill counts",
    "reads_released_at_decode": "released as read, as decode counts",
}
"""Names of facts for people, by the table they stand in, where the key will not do."""
_TTLS = ("ttl_s", TTL, "expiry_margin_seconds", "gap_horizon_s")
_THRESHOLDS = ("threshold_tokens", THRESHOLD)
_SHARES = ("holdout", "kv_usage_p99")
_COUNTS = ("cost_observations", "turns", "turns_by_outcome", "conversations", "gaps", "turn_ends", "turns_given_up")

_DECISIONS = {
    "local_hit/none": "prefill's own cache had it",
    "fetch/none": "fetch",
    CUT_FETCH: "fetch, cut to the proven prefix",
    "recompute/none": "recompute: no reference was given",
    "recompute/rewritten": "recompute: too little proven equal",
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
.unanswered{background:#fbe3e1;border:1px solid #e7a9a4;border-radius:8px;padding:10px 14px;margin:14px 0 0}
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
    charts = all_charts(records, figures, ttl_advice=advice.get(TTL), threshold_advice=advice.get(THRESHOLD))
    parts = [
        _head(result, figures, records),
        _tiles(result, figures, advice),
        _advice_cards(suggest),
        _charts(charts),
        _counterfactuals(suggest),
        _evidence(suggest, figures),
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


def _head(result: Mapping[str, Any], figures: Mapping[str, Any], records: Sequence[TurnRecord]) -> str:
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
            f"{' instead of '.join(both(on, off))}: means over follow-up turns at equal prompt lengths, in the same "
            "run."
        )
    lead.append(_kept_without(turns))
    if turns.get("sent"):
        recorded = "recorded" if _mapping(result.get("settings")).get("trace") else "recorded coding-agent"
        lead.append(
            f"The load played {turns['sent']:,} turns of {turns.get('conversations', 0):,} {recorded} conversations, "
            f"{tokens(_number(turns.get('mean_prompt_tokens')))} tokens a prompt on average, "
            f"in {seconds(_number(result.get('duration_s')))} of model time."
        )
    return (
        f'<p class="eyebrow">kvtune demo report</p><h1>{_text(headline)}</h1>'
        f'<p class="lead">{_text(" ".join(filter(None, lead)))}</p>{_unanswered(turns, records)}'
        f"{_simulated(_mapping(result.get('simulated')))}"
    )


def _kept_without(turns: Mapping[str, Any]) -> str:
    """The size of the arm without reuse, in conversations and in turns."""
    off, all_turns, conversations = (turns.get(name) for name in ("turns_off", "sent", "conversations"))
    if not off or not all_turns or not conversations:
        return ""
    part = turns.get("conversations_off_in_part")
    return (
        f"{turns.get('conversations_off', 0):,} of {conversations:,} conversations, {percent(off / all_turns)} of "
        "turns, were kept without reuse to compare with"
        + (f" ({part:,} of them had other turns too)." if part else ".")
    )


def _unanswered(turns: Mapping[str, Any], records: Sequence[TurnRecord]) -> str:
    """A plain sentence, if some turns were not answered: how many, and what the first ran into."""
    failed = [record for record in records if not record.answered]
    sent = len(records) or turns.get("sent") or 0
    count = len(failed) if records else sent - (turns.get("answered") or 0)
    if not count:
        return ""
    why = ""
    if failed:
        first = failed[0]
        said = first.error or (f"HTTP status {first.status}" if first.status else "no response")
        why = f" The first failed with: {said if len(said) <= MANY_LETTERS else said[:MANY_LETTERS] + '…'}"
    words = f"{count:,} of {sent:,} turns {'was' if count == 1 else 'were'} not answered."
    return f'<p class="unanswered"><b>{_text(words)}</b>{_text(why)}</p>'


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
                "mean time to first token, reuse on vs off: follow-up turns at equal prompt lengths",
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
        checks = _mapping(books.get("checks"))
        failed = sum(not good for good in checks.values())
        tiles.append(
            _tile("books balance", f"all {len(checks)} checks hold" if checks else "every check holds", "good")
            if books["ok"]
            else _tile(
                "books differ",
                (f"{failed} of {len(checks)} checks fail: " if failed else "") + "see “Do the books balance?” below",
                "bad",
            )
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
    return ttl(number) if setting == TTL else threshold_tokens(number)


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
    rows = [(name, _column(name, [pair.get("current"), pair["recommended"]])) for name, pair in pairs.items()]
    body = "".join(
        f"<tr><td>{_text(_COLUMNS.get(name, name.replace('_', ' ')))}</td>"
        + "".join(f"<td>{_text(cell)}</td>" for cell in cells)
        + "</tr>"
        for name, cells in rows
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
        setting = one.get("setting")
        columns = [name for name in rows[0] if name != "bound" and any(row.get(name) is not None for row in rows)]
        head = "".join(f"<th>{_text(_COLUMNS.get(name, name.replace('_', ' ')))}</th>" for name in columns)
        cells = {
            name: [_value(setting, row.get(name)) + (f" {BOUND}" if row.get("bound") else "") for row in rows]
            if name == "value"
            else _column(name, [row.get(name) for row in rows])
            for name in columns
        }
        body = []
        for index, row in enumerate(rows):
            value = row.get("value")
            kind = (
                "best"
                if value is not None and value == one.get("recommended")
                else "now"
                if value is not None and value == one.get("current")
                else ""
            )
            line = "".join(f"<td>{_text(cells[name][index])}</td>" for name in columns)
            body.append(f'<tr class="{kind}">{line}</tr>')
        notes = ["Grey: in force now. Green: suggested."]
        if any(row.get("bound") for row in rows):
            notes.append(
                f"{BOUND} longer than the pauses that could be seen: a bound, reuse from below and memory from above."
            )
        if "ttft_mean_s" in columns:
            notes.append(f"TTFT is over {ALL_FOLLOWUPS}: not a mean of the headline.")
        blocks.append(
            f'<div class="card"><h3>{_text(_SETTINGS.get(str(setting), setting))}</h3>'
            f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'
            f'<p class="lead">{_text(" ".join(notes))}</p></div>'
        )
    return f'<h2>What other values would do</h2><section class="grid">{"".join(blocks)}</section>' if blocks else ""


def _unit(name: str) -> str:
    """What a value is, read off its name: `rate`, `seconds`, `share`, `tokens`, or nothing known."""
    if name.endswith("_per_s"):
        return "rate"
    if name.endswith(("_s", "seconds", "_s_per_turn")):
        return "seconds"
    if name in _SHARES or "ratio" in name.split("_") or "share" in name.split("_"):
        return "share"
    return "tokens" if "tokens" in name else ""


def _column(name: str, values: Sequence[object]) -> list[str]:
    """Values to be compared with one another: one unit, one number of decimals, as the largest asks for."""
    numbers = [_number(value) for value in values]
    largest = max((abs(number) for number in numbers if number is not None), default=0.0)
    unit = _unit(name)
    if unit == "seconds" and largest < 120:
        factor, decimals, mark = (1.0, 2, "\u00a0s") if largest >= 1 else (1e3, 1, "\u00a0ms")
    elif unit == "tokens" and largest >= 999.5:
        factor, decimals, mark = (1e-6, 2, "M") if largest >= 999_500 else (1e-3, 1, "k")
    elif unit == "share":
        return [_share(number) for number in numbers]
    else:
        return [_named(name, value) for value in values]
    return ["–" if number is None else f"{number * factor:.{decimals}f}{mark}" for number in numbers]


def _share(value: float | None) -> str:
    """A share in a table: `93.6 %`. Neither 0 nor 100 % unless it is."""
    if value is None or value == 0 or value == 1 or 0 < value < 0.001 or 0.9995 < value < 1:
        return percent(value)
    return f"{value * 100:.1f}\u00a0%"


def _named(name: str, value: object) -> str:
    """A value for people, its unit read off its name (`_s`, `tokens`, `ratio`, `share`)."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(_named(name, item) for item in value) or "–"
    if isinstance(value, Mapping):
        if set(value) == {"value", "assumed"}:
            return _named(name, value["value"]) + (" (assumed)" if value["assumed"] else "")
        inner = [
            f"{str(key).replace('_', ' ')}: {_named(name if name in _COUNTS else str(key), item)}"
            for key, item in value.items()
        ]
        return "; ".join(inner) or "–"
    number = _number(value)
    if number is None:
        return str(value)
    if name in _TTLS:
        return ttl(number)
    if name in _THRESHOLDS:
        return threshold_tokens(number)
    if name in _COUNTS:
        return f"{number:,.0f}"
    if name == "time_scale":
        return f"{number:g} times"
    if name.endswith("_us_per_token"):
        return f"{number:.3g}\u00a0µs"
    match _unit(name):
        case "rate":
            return f"{number:.3g}/s"
        case "seconds":
            return seconds(number)
        case "share":
            return percent(number)
        case "tokens":
            return tokens(number)
    return f"{int(number):,}" if number == int(number) and abs(number) < 1e15 else f"{number:.4g}"


def _facts(facts: Mapping[str, Any], names: Mapping[str, str] | None = None) -> str:
    rows = "".join(
        f"<tr><td>{_text((names or {}).get(str(name), str(name).replace('_', ' ')))}</td>"
        f'<td class="text">{_text(_named(str(name), value))}</td></tr>'
        for name, value in facts.items()
    )
    return f'<div class="scroll"><table><tbody>{rows}</tbody></table></div>' if rows else ""


def _key_facts(facts: Mapping[str, Any]) -> str:
    """One sentence with the sample sizes, of those that are known."""
    costs = _mapping(facts.get("cost_observations"))
    known = [
        f"{'' if number.is_integer() else 'about '}{number:,.0f} {words}"
        for value, words in (
            (facts.get("turns"), "turns"),
            (facts.get("conversations"), "conversations as the router saw them"),
            (facts.get("gaps"), "pauses that ended"),
            (costs.get("fetch"), "timed fetches"),
            (costs.get("recompute"), "timed recomputes"),
        )
        if (number := _number(value)) is not None
    ]
    return f"<p>{_text(', '.join(known))}.</p>" if known else ""


def _populations(facts: Mapping[str, Any], turns: Mapping[str, Any]) -> str:
    """Why the router's conversations are not as many as those the load played, where they are not."""
    seen, played = _number(facts.get("conversations")), _number(turns.get("conversations"))
    if seen is None or not played or seen == played:
        return ""
    text = f"The load played {played:,.0f} conversations; the router saw {seen:,.0f}."
    if seen > played:
        text += " A compacted or rewritten history that comes without an id counts as a new conversation there"
        new = turns.get("new_to_router")
        text += f": {new:,} turn{'s' if new > 1 else ''} here." if new else "."
    else:
        text += " The window need not cover the whole load."
    return f'<p class="lead">{_text(text)}</p>'


def _evidence(suggest: Mapping[str, Any], figures: Mapping[str, Any]) -> str:
    parts = []
    window = _mapping(suggest.get("window"))
    facts: dict[str, Any] = {"source": suggest["source"]} if suggest.get("source") else {}
    if window.get("seconds") is not None:
        facts["window_seconds"] = window["seconds"]
    facts |= _mapping(suggest.get("evidence"))
    if facts:
        table = _facts(facts, _FACTS)
        if len(facts) > MANY_FACTS:
            table = f"<details><summary>All {len(facts)} facts</summary>{table}</details>"
        parts.append(
            f'<div class="card"><h3>What the advice rests on</h3>{_key_facts(facts)}'
            f"{_populations(facts, _mapping(figures.get('turns')))}{table}</div>"
        )
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
            f"<tr><td>{_text(str(name).replace('_', ' '))}</td><td>{n:,.0f}</td><td>{_share(n / everything)}</td>"
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
        checks = _mapping(books.get("checks"))
        lines = [f"✗ {name}" for name, good in checks.items() if not good]
        lines += [f"✓ {name}" for name, good in checks.items() if good]
        rest = {name: value for name, value in books.items() if name not in ("outcomes", "checks", "ok")}
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
            + f"</ul>{_facts(rest, _BOOKED)}</div>"
        )
    parts.append(_decided(figures))
    return f'<h2>Accounts</h2><section class="grid">{"".join(parts)}</section>' if any(parts) else ""


def _decided(figures: Mapping[str, Any]) -> str:
    """What prefill did about the histories, and the three things that “rewritten” might be taken for, told apart."""
    decisions = {name: n for name, n in _mapping(figures.get("decisions")).items() if n}
    if not decisions:
        return ""
    everything = sum(decisions.values())
    rows = "".join(
        f"<tr><td>{_text(_DECISIONS.get(name) or name.replace('/', ': ').replace('_', ' '))}</td>"
        f"<td>{n:,.0f}</td><td>{_share(n / everything)}</td></tr>"
        for name, n in sorted(decisions.items(), key=lambda item: -item[1])
    )
    recorded = _mapping(figures.get("turns")).get("recorded_rewrites")
    outcome = _mapping(_mapping(figures.get("outcomes")).get("total")).get(Outcome.REWRITTEN, 0)
    note = ""
    if recorded is not None:
        note = (
            f"Three things to tell apart. Recorded rewrites: {recorded:,} turns whose history the recorded agent had "
            f"changed. Fetches cut to the proven prefix: {decisions.get(CUT_FETCH, 0):,.0f}, where enough of such a "
            f"history was still equal. Outcome “rewritten”: {outcome:,} turns where too little was."
        )
    return (
        '<div class="card wide"><h3>What prefill decided about each prompt’s history</h3><div class="scroll"><table>'
        f"<thead><tr><th>decision</th><th>prompts</th><th>share</th></tr></thead><tbody>{rows}</tbody></table></div>"
        + (f'<p class="lead">{_text(note)}</p>' if note else "")
        + "</div>"
    )


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
            rows.append((f"follow-up, outcome {str(name).replace('_', ' ')}", one))
    if rows:
        note = ["All answered turns of each kind; prompts differ in length from row to row."]
        if _mapping(figures.get("comparison")).get("on_s") is not None:
            note.append("These means are not the headline’s, which are at equal prompt lengths.")
        note.append("Quantiles are nearest rank.")
        keys = ("mean", "p50", "p90")
        cells = iter(_column("ttft_s", [one.get(key) for _, one in rows for key in keys]))
        body = "".join(
            f"<tr><td>{_text(name)}</td><td>{one['n']:,}</td>"
            + "".join(f"<td>{_text(next(cells))}</td>" for _ in keys)
            + "</tr>"
            for name, one in rows
        )
        parts.append(
            '<div class="card"><h3>Time to first token, as clients saw it</h3><div class="scroll"><table><thead><tr>'
            f"<th>turns</th><th>n</th><th>mean</th><th>P50</th><th>P90</th></tr></thead><tbody>{body}</tbody></table>"
            f'</div><p class="lead">{_text(" ".join(note))}</p></div>'
        )
    asked = _mapping(result.get("settings"))
    settings = _facts({key: _UNSET.get(key) if value is None else value for key, value in asked.items()}, _RUN)
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
