"""Histogram edges and token-size classes, shared by the catalogue, the tuner and the dashboards."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


def geometric(low: float, high: float, ratio: float) -> tuple[float, ...]:
    """Edges from `low` up to at least `high`, each `ratio` times the one before, rounded to 3 significant digits."""
    edges = [low]
    while edges[-1] < high:
        edges.append(float(f"{edges[-1] * ratio:.3g}"))
    return tuple(edges)


TTFT_SECONDS = geometric(0.01, 60.0, 1.2)
"""10 ms to 60 s. A P90 inside a bucket of ratio 1.2 is within 10 % of the bucket's middle."""

READ_SECONDS = geometric(0.001, 10.0, 1.2)
"""1 ms to 10 s, same ratio: NIXL's own edges (5, 10, 25 ... ms) misplace a P90 by 20 % and more."""

DURATION_SECONDS = geometric(0.1, 600.0, 1.5)
"""Whole turns, streams included."""

PHASE_SECONDS = geometric(0.0005, 60.0, 1.5)
"""Router phases."""

GAP_SECONDS = (
    0.5, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0, 240.0, 300.0, 360.0,
    475.0, 600.0, 720.0, 960.0, 1200.0, 1800.0, 2700.0, 3600.0,
)  # fmt: skip
"""Pauses between turns. 475 s is the usable life at the default TTL (480 s less P's 5 s margin)."""

AGE_SECONDS = GAP_SECONDS
"""Ages of retained KV."""

SIZE_EDGES = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Upper edges (inclusive, tokens) of the fine size classes that the cost sums are kept in."""

COARSE_SIZE_EDGES = (256, 1024, 4096, 16384, 65536)
"""Upper edges (inclusive, tokens) of the coarse classes that histograms are kept in; a subset of the fine ones."""


def size_labels(edges: Sequence[int]) -> tuple[str, ...]:
    """Label values for `edges`: the upper edge in tokens, and `inf`."""
    return (*map(str, edges), "inf")


def size_label(tokens: int, edges: Sequence[int] = SIZE_EDGES) -> str:
    """The class of a size in tokens: the smallest edge that is not below it, else `inf`."""
    index = bisect_left(edges, tokens)
    return str(edges[index]) if index < len(edges) else "inf"
