"""The document as text for people; fits 100 columns, but for what is there to be copied."""

from __future__ import annotations

import io
from typing import Any

from kvtune_tuning.wording import digits

WIDTH = 100
_STYLE = {
    "change": "bold yellow",
    "off": "bold yellow",
    "keep": "green",
    "insufficient": "cyan",
    "unidentifiable": "cyan",
}
_LEVEL = {"ok": "green", "info": "dim", "warning": "yellow", "error": "bold red"}
_MARK = {"ok": "ok", "info": "note", "warning": "warn", "error": "ERROR"}
_MODE = {
    "kvtune": "series of kvtune's router and of its connector on the engines",
    "router": "series of kvtune's router; no engine with kvtune's connector",
    "engines": "series of kvtune's connector; no kvtune router, so no pauses longer than the TTL",
    "stock": "vLLM's own series only; no kvtune router, no kvtune connector: bounds, not figures",
}
_APART = 0.1
"""Differences of this share of the pool are worth a word."""
_ROUNDED = 1e-4
"""Figures of a document are rounded."""


def render_table(document: dict[str, Any], *, width: int = WIDTH, color: bool = False) -> str:
    """The document as text of at most `width` columns, with ANSI colours if `color`.

    Settings to apply and queries are whole lines, however long.
    """
    from rich.console import Console

    console = Console(
        file=io.StringIO(), width=width, force_terminal=color, no_color=not color, highlight=False, markup=False,
        legacy_windows=False, color_system="standard" if color else None,
    )  # fmt: skip
    if "error" in document:
        _error(console, document["error"])
    else:
        _report(console, document)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def _error(console: Any, error: dict[str, str]) -> None:
    from rich.text import Text

    console.print(Text.assemble(("kvtune: ", "bold red"), error["message"]))
    if error["hint"]:
        console.print(Text(error["hint"]))


def _report(console: Any, document: dict[str, Any]) -> None:
    from rich.padding import Padding
    from rich.text import Text

    facts, window = document["evidence"], document["window"]
    source = document["source"]
    console.print(
        Text(
            f"kvtune suggest: {source['kind']} {', '.join(source.get('where', []))}, {facts['samples']} samples, "
            f"restarts {sum(facts['restarts'].values())}"
        )
    )
    console.print(Text(
        f"window {window['start']} to {window['end']} ({_duration(window['seconds'])}"
        f"{' of model time' if window['model_time'] else ''}), {facts['scrape_rounds']} rounds of scrapes, "
        f"{facts['scraped_targets']} target(s)"
    ))  # fmt: skip
    several = "" if facts["decode_engines"] < 2 else " on the tightest" if facts["pools_differ"] else " each"
    pool = "not known" if facts["pool_tokens"] is None else f"{_tokens(facts['pool_tokens'])} tokens{several}"
    console.print(Text(f"mode {facts['mode']}: {_MODE[facts['mode']]}"))
    bounds = facts["stock"]
    seen = [f"{facts['turns']:.0f} turns"]
    if facts["conversations"] is not None:
        seen.append(f"{'at least ' if facts['mode'] == 'engines' else ''}{facts['conversations']:.0f} conversations")
    if facts["gaps"] is not None:
        seen.append(f"{facts['gaps']:.0f} pauses")
    console.print(Text(
        f"{', '.join(seen)}; "
        f"{facts['turn_ends_per_s']:.3g} turns/s on {facts['decode_engines']} decode engine(s), "
        f"pool {pool}, measured P99 usage {_percent(facts['kv_usage_p99'])}"
    ))  # fmt: skip
    if bounds is not None:
        console.print(Text(
            f"of what decode retained, {_percents(bounds['lapsed_share_bounds'])} lapsed before anybody fetched it"
        ))  # fmt: skip
        console.print(Text(
            f"of prefill's requests, {_percents(bounds['read_share'])} fetched KV from decode; of its prompt tokens, "
            f"{_percent(bounds['read_token_share'])} came that way; tensor parallel "
            f"{bounds['ranks']['lapses'] or 'not known'}"
        ))  # fmt: skip
    for one in document["recommendations"]:
        console.print()
        assumed = " (assumed)" if one["current_assumed"] else ""
        unit = " s" if one["unit"] == "seconds" else " tokens"
        head = Text.assemble(
            (one["setting"], "bold"), "  ", (one["status"].upper(), _STYLE[one["status"]]),
            f"  now {_g(one['current'])}{unit}{assumed}",
        )  # fmt: skip
        if one["status"] == "change":
            head.append(f" -> {_g(one['recommended'])}{unit}", "bold")
        if one["interval"]:
            head.append(f"  [{_g(one['interval'][0])}, {_g(one['interval'][1])}]")
        console.print(head)
        console.print(Padding(Text(one["reason"]), (0, 0, 0, 2)))
        if one["clamped_by"]:
            console.print(
                Padding(Text(f"bound by {', '.join(one['clamped_by'])}; uncapped {_g(one['uncapped'])}"), (0, 0, 0, 2))
            )
        if one["status"] == "change" and (why := one["model"].get("no_interval")):
            console.print(Padding(Text(f"no interval: {why}"), (0, 0, 0, 2)))
        if (gain := one["model"].get("gain_interval_s")) and one["unit"] == "seconds":
            saved = one["model"]["gain_s_per_turn"]
            console.print(Padding(Text(
                f"time to first token {_signed_ms(-saved)} a turn by the model, with 90 % certainty between "
                f"{_signed_ms(-gain[1])} and {_signed_ms(-gain[0])}"
            ), (0, 0, 0, 2)))  # fmt: skip
        if one["retry_after"]:
            console.print(Padding(Text(_again(document, one["retry_after"])), (0, 0, 0, 2)))
        if one["counterfactual"]:
            console.print(Padding(Text("modelled at each value, none of it measured:", "dim"), (0, 0, 0, 2)))
            console.print(Padding(_rows(one), (0, 0, 0, 2)))
            if capped := _capped(one, facts):
                console.print(Padding(Text(capped, "dim"), (0, 0, 0, 2)))
            if apart := _apart(one, facts):
                console.print(Padding(Text(apart, "dim"), (0, 0, 0, 2)))
    console.print()
    for check in document["checks"]:
        mark = Text(f"{_MARK[check['level']]:>5}  ", _LEVEL[check["level"]])
        console.print(_hanging(mark, check["message"]))
    for title in ("apply", "rollback"):
        change = document[title]
        if change is None:
            continue
        console.print()
        console.print(Text(title, "bold"))
        for engine in change["engines"]:
            _whole(console, f"  {engine['role']:>7}  {engine['text']}")
        if change["router"]:
            _whole(console, f"   router  {change['router']}")
        console.print(Padding(Text(change["note"], "dim"), (0, 0, 0, 2)))
    if "explain" in document:
        console.print()
        console.print(Text("explain", "bold"))
        for line in (*document["explain"]["ttl"], *document["explain"]["threshold"]):
            console.print(Padding(Text(line), (0, 0, 0, 2)))
        for query in document["explain"]["queries"]:
            _whole(console, f"  query {query}")


def _whole(console: Any, line: str) -> None:
    """A line that is there to be copied: never broken, however long."""
    from rich.text import Text

    console.print(Text(line), soft_wrap=True)


def _hanging(mark: Any, text: str) -> Any:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=0)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(mark, Text(text))
    return grid


def _capped(one: dict[str, Any], facts: dict[str, Any]) -> str:
    """What pinned figures are bounded by, where they are; empty if they are not."""
    room = facts["retention_room_tokens"]
    if one["unit"] != "seconds" or room is None:
        return ""
    if not any(row["pinned_tokens_p99"] >= room * (1 - _ROUNDED) for row in one["counterfactual"]):
        return ""
    return f"pinned is at most {_tokens(room)}, what active requests leave of the pool; what is beyond it waits"


def _apart(one: dict[str, Any], facts: dict[str, Any]) -> str:
    """Why the model and the measurement of the pool's usage differ at the value in force; empty if they hardly do."""
    at: dict[float, dict[str, Any]] = {row["value"]: row for row in one["counterfactual"]}
    modelled, measured = at.get(one["current"], {}).get("pool_share_p99"), facts["kv_usage_p99"]
    if modelled is None or measured is None or abs(modelled - measured) < _APART:
        return ""
    why = ["steady state"]
    if facts["kappa"] is not None and abs(facts["kappa"] - 1) >= _APART:
        why.append(f"kappa {facts['kappa']:.2f}")
    if facts["holdout_ratio"]:
        why.append(f"hold-out {100 * facts['holdout_ratio']:.3g} %")
    return f"pool P99 now: {_percent(modelled)} modelled ({', '.join(why)}), {_percent(measured)} measured"


def _again(document: dict[str, Any], retry_after_s: float) -> str:
    """When to come back, or how much to watch where nobody goes on watching meanwhile."""
    if document["source"]["kind"] == "prometheus":
        return f"ask again in about {_duration(retry_after_s)}"
    window = document["window"]
    whole = window["end_unix"] - window["start_unix"] + retry_after_s
    return f"it takes about {_duration(whole)} of such traffic in one recording"


def _rows(one: dict[str, Any]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, pad_edge=False, show_edge=False)
    names: tuple[str, ...]
    if one["unit"] == "seconds":
        absolute = any(row["ttft_mean_s"] is not None for row in one["counterfactual"])
        ttft = "TTFT mean" if absolute else "TTFT to now"
        names = ("TTL", "in time", "of returning", "pinned mean", "pinned P99", "pool P99", ttft)
    else:
        names = ("threshold", "fetched", "history cost", "TTFT mean")
    for name in (*names, ""):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    for row in one["counterfactual"]:
        note = "now" if row["value"] == one["current"] else ""
        if one["status"] == "change" and row["value"] == one["recommended"]:
            note = "advised"
        if row.get("bound"):
            note = (note + " bound").strip()
        cells: tuple[str, ...]
        if one["unit"] == "seconds":
            cells = (
                f"{_g(row['value'])} s", _percent(row["hit_ratio"]), _percent(row["hit_ratio_returning"]),
                _tokens(row["pinned_tokens_mean"]), _tokens(row["pinned_tokens_p99"]), _percent(row["pool_share_p99"]),
                _ms(row["ttft_mean_s"]) if absolute else _signed_ms(row["ttft_change_s"]),
            )  # fmt: skip
        else:
            cells = (
                _g(row["value"]),
                _percent(row["fetched_share"]),
                _ms(row["extra_mean_s"]),
                _ms(row["ttft_mean_s"]),
            )
        table.add_row(*cells, note, style="bold" if note.startswith(("now", "advised")) else None)
    return table


def _g(value: float | None) -> str:
    return "unbounded" if value is None else digits(value)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _percents(pair: list[float] | None) -> str:
    """Bounds of a share."""
    if pair is None:
        return "-"
    low, high = (100 * one for one in pair)
    return f"{high:.1f} %" if high - low < 0.1 else f"{low:.1f} to {high:.1f} %"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f} ms"


def _signed_ms(seconds: float | None) -> str:
    """A difference; of a second or more, in seconds."""
    if seconds is None:
        return "-"
    return f"{seconds:+.2f} s" if abs(seconds) >= 1 else f"{1000 * seconds:+.0f} ms"


def _tokens(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value / 1e6:.2f}M" if value >= 1e6 else f"{value / 1e3:.1f}k" if value >= 1e4 else f"{value:.0f}"


def _duration(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.0f} s"
