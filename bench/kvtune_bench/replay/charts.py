"""Charts of a simulation: TTFT against TTL, and reuse against what it retains. Imports matplotlib on first use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvtune_bench.charts import BLUE, GREEN, GRID, INK, MUTED, ORANGE, PURPLE, SKY, VERMILLION, YELLOW
from kvtune_bench.replay.model import ReplayError

COLOURS = {
    "default": VERMILLION, "suggestion": BLUE, "hindsight": GREEN, "clairvoyant": PURPLE, "ski_rental": ORANGE,
    "keep_alive_p99": SKY, "continuum": YELLOW,
}  # fmt: skip
_MARK = {"suggestion": "*", "default": "s", "hindsight": "D"}


def draw(document: dict[str, Any], directory: Path) -> list[Path]:
    """Two charts for each load and pool, as SVG and PNG; returns the files. Raises ReplayError where nothing can be
    drawn or written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReplayError(f"--charts: {directory}: {error.strerror}") from None
    written: list[Path] = []
    for number, (rate, pool) in enumerate(dict.fromkeys((r["rate"], r["pool_tokens"]) for r in document["rows"]), 1):
        rows = [row for row in document["rows"] if (row["rate"], row["pool_tokens"]) == (rate, pool)]
        where = f"simulated {document['model']}, {rate:g} turns/s, pool of {pool / 1e6:.3g}M tokens"
        swept = [row for row in document["sweep"] if (row["rate"], row["pool_tokens"]) == (rate, pool)]
        curve = sorted((row for row in (*rows, *swept) if row["ttl"] is not None), key=lambda row: row["ttl"])
        for name, paint in (("ttft", _ttft), ("frontier", _frontier)):
            figure, axes = pyplot.subplots(figsize=(7.2, 4.2), layout="constrained")
            title = paint(axes, rows, curve)
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
                written.append(path)
            pyplot.close(figure)
    return written


_Rows = list[dict[str, Any]]


def _ttft(axes: Any, rows: _Rows, curve: _Rows) -> str:
    ttls = [row["ttl"] for row in curve]
    axes.plot(ttls, [row["ttft_mean_s"] for row in curve], color=MUTED, linewidth=1.5, zorder=1, label="mean")
    axes.plot(
        ttls, [row["ttft_p90_s"] for row in curve], color=MUTED, linewidth=1, linestyle=":", zorder=1, label="P90"
    )
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

    axes.plot(
        [held(row) for row in curve], [row["hit_ratio"] or 0.0 for row in curve], color=MUTED, linewidth=1.5, zorder=1
    )
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
