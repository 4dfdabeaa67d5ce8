"""The report's charts: figures in, inline SVG out, titled with what they show. matplotlib is imported on first use."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtune_bench.load import TurnRecord
from kvtune_telemetry.vocabulary import Outcome, Path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette: told apart with any common colour vision.
BLUE, VERMILLION, GREEN, ORANGE, SKY, PURPLE, YELLOW = (
    "#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#F0E442",
)  # fmt: skip
INK, MUTED, GRID, PALE = "#1f2933", "#5f6c7b", "#e3e8ee", "#c8d1db"
SIZE_INCHES = (7.0, 3.7)
WIDE_INCHES = (12.6, 4.4)
"""Of the first chart, which takes a row of its own."""
MAX_POINTS = 700
"""Scatter points drawn; more would double the page and show nothing new."""
HEADROOM = 1.08
"""Of the frame over the tallest bar."""
FONTS = "Segoe UI, Helvetica, Arial, sans-serif"

OUTCOME_COLOURS: dict[str, str] = {
    Outcome.HIT: BLUE,
    Outcome.FIRST: PALE,
    Outcome.DISABLED: VERMILLION,
    Outcome.NO_IDENTITY: "#8a97a6",
    Outcome.EXPIRED: ORANGE,
    Outcome.REWRITTEN: YELLOW,
    Outcome.CONSUMED: PURPLE,
    Outcome.ENGINE_GONE: "#7a3e9d",
    Outcome.EVICTED: GREEN,
    Outcome.ABSENT: SKY,
    Outcome.UNVERIFIED: "#8c6d31",
    Outcome.READ_FAILED: "#a6192e",
    Outcome.ERROR: "#000000",
    "unreported": "#e8ebef",
}
"""Colour of each outcome, in the order they are stacked."""


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart: `title` says what it shows, `svg` is an inline element, `note` how to read it."""

    name: str
    title: str
    svg: str
    note: str


def seconds(value: float | None) -> str:
    """A time for people: `35 ms`, `1.24 s`, `8 min`, `1.5 h`; a dash for None."""
    if value is None or not math.isfinite(value):
        return "–"
    size = abs(value)
    if size >= 5400:
        return f"{value / 3600:.3g}\u00a0h"
    if size >= 120:
        return f"{value / 60:.3g}\u00a0min"
    if size >= 0.9995:
        return f"{value:.3g}\u00a0s"
    return f"{value * 1000:.3g}\u00a0ms"


def both(left: float, right: float) -> tuple[str, str]:
    """Two times to be compared, in one unit: `0.90 s` and `2.37 s`."""
    if 1 <= max(abs(left), abs(right)) < 120:
        return f"{left:.2f}\u00a0s", f"{right:.2f}\u00a0s"
    return seconds(left), seconds(right)


def tokens(value: float | None) -> str:
    """A number of tokens for people: `512`, `24.5k`, `1.2M`; a dash for None."""
    if value is None or not math.isfinite(value):
        return "–"
    for limit, factor, unit in ((999_500, 1e6, "M"), (999.5, 1e3, "k")):
        if abs(value) >= limit:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.3g}"


def percent(value: float | None) -> str:
    """A share for people: `82 %`, `0.4 %`; a dash for None. Neither 0 nor 100 % unless it is."""
    if value is None or not math.isfinite(value):
        return "–"
    points = value * 100
    if 0 < points < 0.1:
        return "<\u00a00.1\u00a0%"
    if 99.95 < points < 100:
        return ">\u00a099.9\u00a0%"
    return f"{points:.1f}\u00a0%" if 0 < points < 10 or 99 < points < 100 else f"{points:.0f}\u00a0%"


def ttl(value: float | None) -> str:
    """A TTL, always in seconds, as it is set: `480 s`; a dash for None."""
    return "–" if value is None else f"{value:.10g}\u00a0s"


def threshold_tokens(value: float | None) -> str:
    """A threshold as it is set: `8192 tokens`; a dash for None."""
    return "–" if value is None else f"{value:.10g}\u00a0token{'' if value == 1 else 's'}"


def no_data(name: str, title: str, why: str) -> Chart:
    """A box that says why there is nothing to see."""
    svg = (
        f'<svg viewBox="0 0 504 120" role="img" aria-label="{html.escape(why)}" xmlns="http://www.w3.org/2000/svg">'
        f'<rect x="1" y="1" width="502" height="118" rx="6" fill="#f7f9fb" stroke="{PALE}" stroke-dasharray="5 4"/>'
        f'<text x="252" y="56" text-anchor="middle" font-size="15" fill="{INK}">no data</text>'
        f'<text x="252" y="78" text-anchor="middle" font-size="12" fill="{MUTED}">{html.escape(why)}</text></svg>'
    )
    return Chart(name, title, svg, "")


def _new(size: tuple[float, float] = SIZE_INCHES) -> tuple[Figure, Axes]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_axisbelow(True)
    axes.grid(True, color=GRID, linewidth=0.8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(PALE)
    axes.tick_params(colors=MUTED, labelsize=10, length=3)
    return figure, axes


def _labels(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x, fontsize=10.5, color=INK)
    axes.set_ylabel(y, fontsize=10.5, color=INK)


def _legend(axes: Axes, **changes: Any) -> None:
    options: dict[str, Any] = {"frameon": False, "fontsize": 10, "labelcolor": INK, **changes}
    axes.legend(**options)


def _svg(name: str, figure: Figure, label: str) -> str:
    """The figure as an SVG element for a page that holds several: own ids, no prologue, text as text, same bytes."""
    import io

    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": f"kvtune-{name}"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, facecolor="none")
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", text)
    # Layout was done with the widest of these fonts, so that text fits whichever the reader has.
    text = re.sub(r"font-family: [^;\"]+", f"font-family: {FONTS}", text)
    text = re.sub(r"font: (?:[\w.]+ )?([\d.]+px) [^;\"]+", rf"font: \1 {FONTS}", text)
    text = re.sub(r"(<svg[^>]*?) width=\"[^\"]*\"", r"\1", text, count=1)
    text = re.sub(r"(<svg[^>]*?) height=\"[^\"]*\"", r"\1", text, count=1)
    return text.replace("<svg ", f'<svg role="img" aria-label="{html.escape(label)}" ', 1).strip()


def ttft_by_size(
    records: Sequence[TurnRecord],
    classes: Sequence[Mapping[str, Any]],
    comparison: Mapping[str, Any],
    costs: Mapping[str, Any] | None = None,
) -> Chart:
    """(a) TTFT of follow-up turns against prompt length, reuse on and off: points, medians and P90 by size class."""
    from kvtune_bench.figures import arm_of

    ratio, on, off = comparison.get("ratio"), comparison.get("on_s"), comparison.get("off_s")
    title = "Time to first token of follow-up turns, by prompt length"
    if ratio is not None and on is not None and off is not None:
        with_reuse, without = both(on, off)
        title = (
            f"Follow-up turns start {ratio:.1f}× sooner with reuse: {with_reuse} instead of {without}"
            if ratio >= 1.05
            else f"Reuse hardly changes when follow-up turns start: {with_reuse}, without it {without}"
            if ratio > 0.95
            else f"Follow-up turns start later with reuse here: {with_reuse} instead of {without}"
        )
    if not classes:
        return no_data("ttft", title, "no answered follow-up turn carried the router's outcome header")
    figure, axes = _new(WIDE_INCHES)
    tops = [row[arm]["p90"] for row in classes for arm in ("on", "off") if row[arm]["p90"] is not None]
    top = 1.35 * max(tops) or 1.0
    over = 0
    for arm, colour, marker, label in (("off", VERMILLION, "^", "reuse off"), ("on", BLUE, "o", "reuse on")):
        points = [
            (record.prompt_tokens / 1000, record.ttft_s)
            for record in records
            if record.followup and record.answered and record.ttft_s is not None and arm_of(record) == arm
        ]
        over += sum(y > top for _, y in points)
        points = points[:: max(1, -(-len(points) // (MAX_POINTS // 2)))]
        shown = [(x, y) for x, y in points if y <= top]
        axes.scatter(
            [x for x, _ in shown], [y for _, y in shown], s=9, marker=marker, color=colour, alpha=0.22, linewidths=0
        )
        rows = [row for row in classes if row[arm]["n"]]
        x = [row[arm]["mean_tokens"] / 1000 for row in rows]
        axes.plot(
            x, [row[arm]["p50"] for row in rows], color=colour, marker=marker, markersize=5, linewidth=2.2,
            label=f"{label}: median",
        )  # fmt: skip
        axes.plot(
            x, [row[arm]["p90"] for row in rows], color=colour, marker=marker, markersize=4, linewidth=1.4,
            linestyle=(0, (4, 2)), label=f"{label}: P90",
        )  # fmt: skip
    axes.set_ylim(0, top)
    axes.set_xlim(left=0)
    _labels(axes, "prompt length (thousand tokens)", "time to first token (s)")
    _legend(axes, loc="upper left")
    note = "Each point is one answered follow-up turn; lines join size classes (nearest-rank quantiles)."
    if over:
        note += f" Above the frame: {over} slower turn{'s' if over > 1 else ''}."
    if ratio is not None:
        note += " The means in the title are of follow-up turns at equal prompt lengths"
        interval = comparison.get("ratio_interval")
        kept = comparison.get("conversations_off")
        if interval and kept:
            note += (
                f"; ratio {interval[0]:.1f} to {interval[1]:.1f} (P5 to P95; {kept} "
                f"conversation{'s' if kept > 1 else ''} without reuse had follow-up turns)"
            )
        note += "."
    note += _slower_with_reuse(classes, costs or {})
    return Chart("ttft", title, _svg("ttft", figure, title), note)


def _slower_with_reuse(classes: Sequence[Mapping[str, Any]], costs: Mapping[str, Any]) -> str:
    """Which size classes had a longer median with reuse, if any, and what reuse could have saved there at most."""
    compared = [row for row in classes if row["on"]["n"] and row["off"]["n"]]
    slower = [row for row in compared if row["on"]["p50"] > row["off"]["p50"]]
    if not slower:
        return ""
    named = []
    for row in slower:
        on, off = both(row["on"]["p50"], row["off"]["p50"])
        size = f"{tokens(row['from'])} to {tokens(row['to'])}" if row["from"] else f"up to {tokens(row['to'])}"
        named.append(f"{size} tokens ({on}, without reuse {off}; {row['on']['n']:,} and {row['off']['n']:,} turns)")
    text = f" Slower with reuse, by the median, in {len(slower)} of {len(compared)} classes: {', '.join(named)}."
    fetch, recompute = ((costs.get(path.value) or {}).get("line") for path in (Path.FETCH, Path.RECOMPUTE))
    if fetch and recompute:
        largest = slower[-1]["to"]
        saved = recompute["base_s"] - fetch["base_s"] + (recompute["per_token_s"] - fetch["per_token_s"]) * largest
        if saved > 0:
            text += f" Fetching {tokens(largest)} tokens instead of computing them saves {seconds(saved)} of prefill"
            # Said only where it is so in every class named.
            spread = min(row[arm]["p90"] - row[arm]["p50"] for row in slower for arm in ("on", "off"))
            text += "; the times scatter by more than that (P90 over median, in either arm)." if spread > saved else "."
    return text


def outcomes_over_time(outcomes: Mapping[str, Any]) -> Chart:
    """(b) Turns by outcome, stacked over time."""
    total: Mapping[str, int] = outcomes.get("total") or {}
    everything = sum(total.values())
    title = "What became of each turn's history"
    if not everything:
        return no_data("outcomes", title, "no turn was sent")
    eligible = {
        name: n
        for name, n in total.items()
        if name not in (Outcome.FIRST, Outcome.DISABLED, Outcome.NO_IDENTITY, "unreported")
    }
    if sum(eligible.values()):
        share = eligible.get(Outcome.HIT, 0) / sum(eligible.values())
        title = f"{percent(share)} of the turns that could reuse their history did"
        others = {name: n for name, n in eligible.items() if name != Outcome.HIT and n}
        if others:
            worst = max(others, key=lambda name: others[name])
            title += f"; what most often stood in the way: outcome “{worst.replace('_', ' ')}”"
    figure, axes = _new()
    width = float(outcomes["bin_s"]) / 60
    counts: Mapping[str, Sequence[int]] = outcomes["counts"]
    known = [name for name in OUTCOME_COLOURS if name in counts]
    names = known + sorted(set(counts) - set(known))
    bins = len(next(iter(counts.values())))
    base = [0.0] * bins
    for name in names:
        rates = [n / width for n in counts[name]]
        axes.bar(
            [index * width for index in range(bins)], rates, width=width, bottom=base, align="edge",
            color=OUTCOME_COLOURS.get(name, MUTED), edgecolor="white", linewidth=0.5,
            label=f"{name.replace('_', ' ')}  {percent(total[name] / everything)}",
        )  # fmt: skip
        base = [low + rate for low, rate in zip(base, rates, strict=True)]
    axes.set_xlim(0, bins * width)
    axes.set_ylim(0, HEADROOM * max(base))
    axes.grid(False, axis="x")
    _labels(axes, "time since the load began (min)", "turns per minute")
    _legend(axes, loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=True, handlelength=1.0)
    note = "By the start of the turn. “disabled” is the share kept without reuse on purpose, to compare with."
    return Chart("outcomes", title, _svg("outcomes", figure, title), note)


_TIME_TICKS = (0.1, 1, 3, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000)
"""Seconds, as TTLs are given."""


def gap_survival(
    gaps: Mapping[str, Any],
    *,
    current_s: float | None = None,
    suggested_s: float | None = None,
    interval_s: Sequence[float] | None = None,
) -> Chart:
    """(c) Share of turns whose conversation is still away after t, with the TTL in force and the one suggested."""
    points: Sequence[Sequence[float]] = gaps.get("points") or []
    title = "How long conversations pause between turns"
    if not points:
        return no_data("gaps", title, "no conversation came back for another turn")
    median = gaps.get("p50")
    if median is not None:
        title = f"Half of the turns are followed up within {seconds(median)}"
        if current_s is not None and current_s <= points[-1][0]:
            title += f"; {percent(_share_after(points, current_s))} are still open at the TTL of {ttl(current_s)}"
    figure, axes = _new()
    positive = [(max(t, 0.1), share) for t, share in points]
    right = max(positive[-1][0], 1.3 * max(current_s or 0, suggested_s or 0), 10.0)
    low = max(0.1, min(positive[0][0], 1.0))
    x = [low, *(t for t, _ in positive), right]
    y = [1.0, *(share for _, share in positive), positive[-1][1]]
    axes.step(x[:-1], y[:-1], where="post", color=BLUE, linewidth=2.2)
    axes.fill_between(x[:-1], y[:-1], step="post", color=BLUE, alpha=0.10, linewidth=0)
    if right > positive[-1][0]:
        axes.plot([positive[-1][0], right], [y[-1], y[-1]], color=BLUE, linewidth=1.2, linestyle=":")
    axes.set_xscale("log")
    axes.set_xlim(low, right)
    axes.set_ylim(0, 1.0)
    ticks = [tick for tick in _TIME_TICKS if low <= tick <= right]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
    if interval_s is not None and suggested_s is not None and suggested_s != current_s:
        axes.axvspan(max(interval_s[0], low), min(interval_s[1], right), color=GREEN, alpha=0.13, linewidth=0)
    marks: list[tuple[float, str, str, str]] = []
    if current_s is not None and current_s > 0:
        words = "TTL in force, kept" if suggested_s == current_s else "TTL in force"
        marks.append((current_s, INK, "-", words))
    if suggested_s is not None and suggested_s > 0 and suggested_s != current_s:
        marks.append((suggested_s, GREEN, "--", "TTL suggested"))
    marks.sort()
    for index, (value, colour, style, words) in enumerate(marks):
        axes.axvline(value, color=colour, linewidth=1.8, linestyle=style)
        # Each beside its line and away from the other's; inside the frame in any case.
        place = math.log(value / low) / math.log(right / low)
        to_left = place > 0.3 if index == 0 and len(marks) > 1 else place > 0.68
        axes.annotate(
            f"{words}: {ttl(value)}", (value, 0.97 - 0.13 * index), xytext=(-6 if to_left else 6, 0),
            textcoords="offset points", ha="right" if to_left else "left", va="top", fontsize=10.5, color=colour,
            fontweight="bold", bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5},
        )  # fmt: skip
    _labels(axes, "seconds since the answer (log scale)", "turns not yet followed up")
    n, censored = gaps["n"], gaps["censored"]
    note = f"Kaplan-Meier over {n:,} answered turns, {censored:,} of them not followed up when the load ended."
    return Chart("gaps", title, _svg("gaps", figure, title), note)


def _share_after(points: Sequence[Sequence[float]], t: float) -> float:
    share = 1.0
    for value, after in points:
        if value > t:
            break
        share = after
    return share


def fetch_or_recompute(
    costs: Mapping[str, Any], *, threshold: float | None = None, suggested: float | None = None
) -> Chart:
    """(d) Seconds to fetch and to recompute n tokens: measured class means, fitted lines, and the threshold."""
    title = "What it costs to fetch a history, and to compute it again"
    paths = {path: costs.get(path.value) or {} for path in Path}
    if not any(data.get("classes") for data in paths.values()):
        return no_data("costs", title, "the prefill engines reported no cost of either path")
    fetch, recompute = paths[Path.FETCH], paths[Path.RECOMPUTE]
    if fetch.get("line") and recompute.get("line") and fetch["classes"] and recompute["classes"]:
        # The largest size that both paths were measured at: no claim beyond what was seen.
        size = min(fetch["classes"][-1]["mean_tokens"], recompute["classes"][-1]["mean_tokens"])
        at = [line["base_s"] + line["per_token_s"] * size for line in (fetch["line"], recompute["line"])]
        if min(at) > 0:
            title = (
                f"{tokens(size)} tokens are fetched in {seconds(at[0])}; computing them again takes {seconds(at[1])}"
            )
    figure, axes = _new()
    for path, colour, marker, label in (
        (Path.RECOMPUTE, VERMILLION, "^", "recompute"),
        (Path.FETCH, BLUE, "o", "fetch"),
    ):
        classes = [row for row in paths[path].get("classes", ()) if row["mean_tokens"] > 0 and row["mean_s"] > 0]
        if not classes:
            continue
        x = [row["mean_tokens"] for row in classes]
        area = [18 + 22 * math.log10(1 + row["n"]) for row in classes]
        line = paths[path].get("line")
        if line is not None:
            label += f": {seconds(line['base_s'])} + {line['per_token_s'] * 1e6:.3g} µs a token"
            grid = [x[0] * (x[-1] / x[0]) ** (index / 40) for index in range(41)]
            fitted = [(n, line["base_s"] + line["per_token_s"] * n) for n in grid]
            fitted = [(n, value) for n, value in fitted if value > 0]
            axes.plot([n for n, _ in fitted], [value for _, value in fitted], color=colour, linewidth=1.8)
        axes.scatter(x, [row["mean_s"] for row in classes], s=area, marker=marker, color=colour, zorder=3, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tokens(value)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: seconds(value)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_locator(LogLocator(10))
    axes.yaxis.set_major_locator(LogLocator(10, subs=(1.0, 3.0)))
    axes.minorticks_off()
    axes.margins(x=0.06, y=0.12)
    marks = [(threshold, INK, "-", "threshold in force")] if threshold is not None and threshold > 0 else []
    if suggested is not None and suggested > 0 and suggested != threshold:
        marks.append((suggested, GREEN, "--", "threshold suggested"))
    if marks:
        low, high = axes.get_xlim()
        axes.set_xlim(min(low, *(0.7 * mark[0] for mark in marks)), max(high, *(1.4 * mark[0] for mark in marks)))
    for index, (value, colour, style, words) in enumerate(marks):
        axes.axvline(value, color=colour, linewidth=1.8, linestyle=style)
        axes.annotate(
            f"{words}: {threshold_tokens(value)}", (value, 0.93 - 0.09 * index), xycoords=("data", "axes fraction"),
            xytext=(6, 0), textcoords="offset points", fontsize=10.5, color=colour, fontweight="bold",
        )  # fmt: skip
    _labels(axes, "tokens of history (log scale)", "time (log scale)")
    _legend(axes, loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=2, handlelength=1.0, columnspacing=1.2)
    note = "Means by size class; a larger mark stands for more observations. Lines are least squares over all of them."
    return Chart("costs", title, _svg("costs", figure, title), note)


def retained_tokens(retained: Mapping[str, Any]) -> Chart:
    """(e) Tokens retained on the decode engines over time, against their KV pool."""
    points: Sequence[Sequence[float]] = retained.get("points") or []
    title = "KV retained for conversations that may come back"
    if len(points) < 2:
        return no_data("retained", title, "fewer than two scrapes of the decode engines")
    share, pool = retained.get("peak_share"), retained.get("pool_tokens")
    if share is not None:
        title = f"Waiting conversations held up to {percent(share)} of the decode engines' KV pool"
    figure, axes = _new()
    x = [t / 60 for t, _ in points]
    y = [value / 1e6 for _, value in points]
    axes.fill_between(x, y, color=BLUE, alpha=0.18, linewidth=0)
    axes.plot(x, y, color=BLUE, linewidth=2.0)
    axes.set_xlim(min(0.0, x[0]), x[-1])
    top = max([*y, (pool or 0) / 1e6])
    axes.set_ylim(0, 1.14 * top if top > 0 else 1.0)
    if pool:
        axes.axhline(pool / 1e6, color=INK, linewidth=1.8, linestyle=(0, (5, 2)))
        axes.annotate(
            f"KV pool: {tokens(pool)} tokens", (0.01, pool / 1e6), xycoords=("axes fraction", "data"), xytext=(0, 4),
            textcoords="offset points", fontsize=10.5, color=INK, fontweight="bold",
        )  # fmt: skip
    _labels(axes, "time since the load began (min)", "retained KV (million tokens)")
    note = "Retained blocks cannot be evicted: what they take, running requests cannot have."
    return Chart("retained", title, _svg("retained", figure, title), note)


def all_charts(
    records: Sequence[TurnRecord],
    figures: Mapping[str, Any],
    *,
    ttl_advice: Mapping[str, Any] | None = None,
    threshold_advice: Mapping[str, Any] | None = None,
) -> list[Chart]:
    """The five charts of `figures.summarise`; the two pieces of advice are `kvtune suggest`'s.

    Never raises for missing figures: a chart without data says so, all of them where matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        why = "charts need matplotlib: pip install 'kvtune[bench]'"
        return [no_data(name, title, why) for name, title in _NAMES.items()]
    lifetime, threshold = ttl_advice or {}, threshold_advice or {}
    costs = figures.get("costs") or {}
    return [
        ttft_by_size(records, figures.get("ttft_by_size") or [], figures.get("comparison") or {}, costs),
        outcomes_over_time(figures.get("outcomes") or {}),
        gap_survival(
            figures.get("gaps") or {},
            current_s=lifetime.get("current"),
            suggested_s=lifetime.get("recommended"),
            interval_s=lifetime.get("interval"),
        ),
        fetch_or_recompute(costs, threshold=threshold.get("current"), suggested=threshold.get("recommended")),
        retained_tokens(figures.get("retained") or {}),
    ]


_NAMES = {
    "ttft": "Time to first token of follow-up turns",
    "outcomes": "What became of each turn's history",
    "gaps": "Pauses between turns",
    "costs": "Fetch or recompute",
    "retained": "Retained KV",
}
