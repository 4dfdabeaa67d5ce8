"""The table of a simulation, for people; it fits in 100 columns."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console
from rich.table import Table

from kvtune_bench.charts import percent, seconds, tokens

WIDTH = 100
APART = 0.05
"""Rates that differ by more than this share are both shown."""


def overloaded(row: dict[str, Any]) -> bool:
    """Whether turns were left over at the end, beyond those that always are on their way."""
    return bool(row["unserved"] > max(10, 0.005 * row["turns"]))


def _replayed(rate: float, rows: list[dict[str, Any]]) -> str:
    """What came instead of the rate asked for, where that differs: traffic is drawn, and waits where engines do."""
    came = [row["turns_per_s"] for row in rows]
    low, high = min(came), max(came)
    if max(abs(low - rate), abs(high - rate)) <= APART * rate:
        return ""
    span = f"{low:.3g}" if high - low <= APART * rate else f"{low:.3g} to {high:.3g}"
    return f" asked for, {span} replayed,"


def render(document: dict[str, Any], *, color: bool = False) -> str:
    """The document as text."""
    out = io.StringIO()
    console = Console(file=out, width=WIDTH, force_terminal=color, highlight=False, no_color=not color)
    console.print(
        f"simulated: {document['model']}, {document['conversations']} conversations of {document['trace']}, "
        f"{seconds(document['window_s'])} measured, seed {document['seed']}"
    )
    rows = document["rows"]
    for world in dict.fromkeys((row["rate"], row["pool_tokens"]) for row in rows):
        console.print()
        here = [row for row in rows if (row["rate"], row["pool_tokens"]) == world]
        console.print(
            f"{world[0]:g} turns/s{_replayed(world[0], here)} on a pool of {tokens(world[1])} tokens", style="bold"
        )
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for name in ("policy", "TTL", "threshold", "reused", "TTFT mean", "P90", "retained mean", "P99", "wasted"):
            table.add_column(name, justify="left" if name == "policy" else "right")
        for row in here:
            wasted, used = row["wasted_token_seconds"], row["used_token_seconds"]
            table.add_row(
                row["policy"] + (" *" if overloaded(row) else ""),
                "foresight" if row["ttl"] is None else f"{row['ttl']:g} s",
                str(row["threshold"]),
                percent(row["hit_ratio"]),
                seconds(row["ttft_mean_s"]),
                seconds(row["ttft_p90_s"]),
                tokens(row["pinned_tokens_mean"]),
                tokens(row["pinned_tokens_p99"]),
                percent(wasted / (wasted + used) if wasted + used else None),
            )
        console.print(table)
    if any(overloaded(row) for row in rows):
        console.print()
        console.print("* turns were still unserved at the end; they count with the time they had waited")
    for one in document["suggestions"]:
        console.print()
        if "error" in one:
            console.print(f"suggestion at {one['rate']:g} turns/s: {one['error']['message']}")
        else:
            for setting in ("decoder_kv_blocks_ttl", "kv_recompute_threshold"):
                said = f"suggestion at {one['rate']:g} turns/s, by the traffic it watched: {one[setting]['reason']}"
                console.print(said, soft_wrap=False)
    console.print()
    console.print(
        f"{document['replays']} replays, {document['turns_replayed']} turns, "
        f"{document['turns_per_second']:.0f} turns/s a process",
        style="dim",
    )
    return out.getvalue()
