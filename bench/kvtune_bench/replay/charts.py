"""Charts of a simulation: TTFT against TTL, reuse against what it retains, regret against conversations seen.

Imports matplotlib on first use.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from kvtune_bench.charts import BLUE, GREEN, GRID, INK, MUTED, ORANGE, PURPLE, SKY, VERMILLION, YELLOW
from kvtune_bench.replay.model import ReplayError
from kvtune_bench.replay.table import overloaded

COLOURS = {
    "default": VERMILLION, "suggestion": BLUE, "hindsight": GREEN, "clairvoyant": PURPLE, "ski_rental": ORANGE,
    "keep_alive_p99": SKY, "continuum": YELLOW,
}  # fmt: skip
_MARK = {"suggestion": "*", "default": "s", "hindsight": "D"}
CURVE = 3
"""TTLs that make a line; fewer are points, with nothing known between them."""


def draw(document: dict[str, Any], directory: Path) -> dict[Path, str]:
    """The charts of each load and pool, as SVG and PNG; returns the files with what each is of.

    Raises ReplayError where nothing can be drawn or written. Regret is drawn where suggestions after several windows
    were compared with the best TTL.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReplayError(f"--charts: {directory}: {error.strerror}") from None
    written: dict[Path, str] = {}
    for number, (rate, pool) in enumerate(dict.fromkeys((r["rate"], r["pool_tokens"]) for r in document["rows"]), 1):
        rows = [row for row in document["rows"] if (row["rate"], row["pool_tokens"]) == (rate, pool)]
        world = f"{rate:g} turns/s, pool of {pool:,} tokens"
        where = f"simulated {document['model']}, {world}"
        swept = [row for row in document["sweep"] if (row["rate"], row["pool_tokens"]) == (rate, pool)]
        curve = sorted((row for row in (*rows, *swept) if row["ttl"] is not None), key=lambda row: row["ttl"])
        learnt = [
            row for row in document["learning"]
            if (row["rate"], row["pool_tokens"]) == (rate, pool) and None not in (row["regret"], row["conversations"])
        ]  # fmt: skip
        charts = (
            ("ttft", _ttft, (rows, curve)),
            ("frontier", _frontier, (rows, curve)),
            ("regret", _regret, (learnt, rows)),
        )
        for name, paint, given in charts if learnt else charts[:2]:
            figure, axes = pyplot.subplots(figsize=(7.2, 4.2), layout="constrained")
            title = paint(axes, *given)
            axes.set_title(f"{title}\n{where}", fontsize=11, color=INK, loc="left")
            axes.grid(color=GRID, linewidth=0.8)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(colors=MUTED)
            for kind in ("svg", "png"):
                path = directory / f"{name}-{number}.{kind}"
                try:
                    figure.savefig(path, dpi=160)
                except OSError as error:
                    raise ReplayError(f"--charts: {path}: {error.strerror}") from None
                written[path] = world
            pyplot.close(figure)
    return written


_Rows = list[dict[str, Any]]
_At = Callable[[dict[str, Any]], tuple[float, float]]


def _lines(curve: _Rows) -> list[_Rows]:
    """Rows of one threshold each, by TTL, where there are enough TTLs to see a line in."""
    of = [[row for row in curve if row["threshold"] == one] for one in sorted({row["threshold"] for row in curve})]
    return [line for line in of if len({row["ttl"] for row in line}) >= CURVE]


def _asked(axes: Any, rows: _Rows, at: _At) -> None:
    """The settings asked for, as small points."""
    points = [at(row) for row in rows if row["policy"] == "fixed"]
    if points:
        axes.scatter(*zip(*points, strict=True), color=MUTED, s=18, zorder=2, label="asked for")


def _unserved(axes: Any, rows: _Rows, at: _At) -> None:
    """A ring around each point of an overload: it depends on how long was measured."""
    points = [at(row) for row in rows if row["ttl"] is not None and overloaded(row)]
    if points:
        axes.scatter(
            *zip(*points, strict=True), facecolors="none", edgecolors=VERMILLION, s=190, linewidths=1.0, zorder=4,
            label="overloaded: turns left unserved",
        )  # fmt: skip


def _ttft(axes: Any, rows: _Rows, curve: _Rows) -> str:
    for key, label, style in (("ttft_mean_s", "mean", "-"), ("ttft_p90_s", "P90", ":")):
        for number, line in enumerate(_lines(curve)):
            axes.plot(
                [row["ttl"] for row in line], [row[key] for row in line], color=MUTED, linewidth=1.2, linestyle=style,
                zorder=1, label=label if number == 0 else None,
            )  # fmt: skip
    _asked(axes, rows, lambda row: (row["ttl"], row["ttft_mean_s"]))
    _unserved(axes, [*rows, *curve], lambda row: (row["ttl"], row["ttft_mean_s"]))
    for row in rows:
        if row["policy"] in COLOURS and row["ttl"] is not None:
            axes.scatter(
                [row["ttl"]], [row["ttft_mean_s"]], color=COLOURS[row["policy"]], zorder=3,
                marker=_MARK.get(row["policy"], "o"), s=130 if row["policy"] == "suggestion" else 45,
                label=f"{row['policy'].replace('_', ' ')} ({row['ttl']:g} s)",
            )  # fmt: skip
    axes.set_xscale("symlog", linthresh=15)
    axes.set_yscale("log")
    axes.set_xlabel("TTL, seconds")
    axes.set_ylabel("time to first token, seconds")
    axes.set_xticks([0, 15, 30, 60, 120, 240, 480, 960, 1920, 3600], minor=False)
    axes.set_xticks([], minor=True)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend(fontsize=8, frameon=False)
    return "Time to first token against TTL"


def _frontier(axes: Any, rows: _Rows, curve: _Rows) -> str:
    def held(row: dict[str, Any]) -> float:
        total: float = row["wasted_token_seconds"] + row["used_token_seconds"]
        return total / 1e3 / max(1, int(row["turns"]))

    def at(row: dict[str, Any]) -> tuple[float, float]:
        return held(row), row["hit_ratio"] or 0.0

    for line in _lines(curve):
        axes.plot(*zip(*map(at, line), strict=True), color=MUTED, linewidth=1.2, zorder=1)
    _asked(axes, rows, at)
    _unserved(axes, [*rows, *curve], at)
    for row in rows:
        if row["policy"] in COLOURS:
            axes.scatter(
                [held(row)], [row["hit_ratio"] or 0.0], color=COLOURS[row["policy"]], zorder=3,
                marker=_MARK.get(row["policy"], "o"), s=130 if row["policy"] == "suggestion" else 45,
                label=row["policy"].replace("_", " "),
            )  # fmt: skip
    axes.set_xlabel("retained, thousand token-seconds a turn")
    axes.set_ylabel("follow-up turns reused")
    axes.legend(fontsize=8, frameon=False)
    return "Reuse against what it retains"


def _regret(axes: Any, learnt: _Rows, rows: _Rows) -> str:
    """How far suggestions are from the best fixed TTL; a median over windows of one length, and each window."""
    lengths: dict[float, _Rows] = {}
    for row in learnt:
        lengths.setdefault(row["watched_s"], []).append(row)
    middle = [
        [median(row[key] for row in group) for key in ("conversations", "regret")]
        for _, group in sorted(lengths.items())
    ]
    axes.plot(
        [seen for seen, _ in middle], [100 * regret for _, regret in middle], color=BLUE, linewidth=1.5, zorder=2,
        label="suggestion, median of windows of one length",
    )  # fmt: skip
    for advises, fill in ((True, BLUE), (False, "none")):
        some = [row for row in learnt if (row["status"] in ("change", "off", "keep")) is advises]
        if some:
            axes.scatter(
                [row["conversations"] for row in some], [100 * row["regret"] for row in some], edgecolors=BLUE,
                facecolors=fill, s=30, zorder=3, label="one window" if advises else "one window: not enough data yet",
            )  # fmt: skip
    best = min((row["ttft_mean_s"] for row in rows if row["policy"] == "hindsight"), default=None)
    default = next((row["ttft_mean_s"] for row in rows if row["policy"] == "default"), None)
    if best and default:
        regret = max(0.0, 100 * (default / best - 1))
        axes.axhline(regret, color=COLOURS["default"], linewidth=1.2, linestyle="--", label=f"default ({regret:.3g} %)")
    axes.set_xlim(left=0)
    axes.set_ylim(0, max(2.0, 1.1 * axes.get_ylim()[1]))
    axes.set_xlabel("conversations seen before the suggestion")
    axes.set_ylabel("mean time to first token above the best TTL's, %")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.legend(fontsize=8, frameon=False)
    return "Regret against conversations seen"
