"""Robust straight lines through cost points. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtune_tuning.series import Floats

_HUBER = 1.345
"""Huber's constant: 95 % efficiency on normal residuals."""
_ROUNDS = 25
_ENOUGH = 50
"""Observations on each path before an average saving is stated."""


@dataclass(frozen=True, slots=True)
class CostPoint:
    """Mean cost of one path, one size class, one stretch of time."""

    stretch: int
    """Which stretch of the window; resampled as a whole, because its points share the load of that time."""
    size: str
    """The size class's label."""
    tokens: float
    """Mean tokens of its observations."""
    seconds: float
    """Mean seconds."""
    count: float
    """Observations."""


@dataclass(frozen=True, slots=True)
class Line:
    """`intercept` (s) + `slope` (s per token)."""

    intercept: float
    slope: float

    def at(self, tokens: float) -> float:
        """Seconds for so many tokens."""
        return self.intercept + self.slope * tokens


def weighted_median(values: Floats, weights: Floats) -> float:
    """The value at which half of the weight is reached."""
    order = np.argsort(values, kind="stable")
    total = np.cumsum(weights[order])
    return float(values[order][int(np.searchsorted(total, total[-1] / 2))])


def theil_sen(tokens: Floats, seconds: Floats, weights: Floats) -> Line:
    """Weighted Theil-Sen: the median slope of all pairs, each weighted by its distance in tokens and its counts."""
    i, j = np.triu_indices(len(tokens), 1)
    apart = np.abs(tokens[i] - tokens[j])
    use = apart > 0
    i, j, apart = i[use], j[use], apart[use]
    if not len(i):
        return Line(weighted_median(seconds, weights), 0.0)
    slopes = (seconds[i] - seconds[j]) / (tokens[i] - tokens[j])
    slope = weighted_median(slopes, apart * np.sqrt(weights[i] * weights[j]))
    return Line(weighted_median(seconds - slope * tokens, weights), slope)


@dataclass(frozen=True, slots=True)
class Arm:
    """The points of one path as arrays of shape (k,); `size` numbers the size classes."""

    tokens: Floats
    seconds: Floats
    count: Floats
    size: NDArray[np.intp]
    stretch: NDArray[np.intp]

    @classmethod
    def of(cls, points: Sequence[CostPoint]) -> Arm:
        """From points."""
        sizes = {label: i for i, label in enumerate(dict.fromkeys(p.size for p in points))}
        return cls(
            np.array([p.tokens for p in points], dtype=np.float64),
            np.array([p.seconds for p in points], dtype=np.float64),
            np.array([p.count for p in points], dtype=np.float64),
            np.array([sizes[p.size] for p in points], dtype=np.intp),
            np.array([p.stretch for p in points], dtype=np.intp),
        )

    def weighted(self, factors: Floats) -> Arm:
        """With each point's count multiplied by a factor of shape (k,); points of factor 0 are left out."""
        keep = factors > 0
        return Arm(
            self.tokens[keep], self.seconds[keep], (self.count * factors)[keep], self.size[keep], self.stretch[keep]
        )

    def by_class(self) -> tuple[Floats, Floats, Floats]:
        """A robust point a size class, by size: mean tokens, median seconds, observations; each of shape (m,).

        Means and medians are weighted by counts. The median runs over stretches of time, so that a stall in one of
        them does not move the class.
        """
        rows = []
        for label in np.unique(self.size):
            of = self.size == label
            n, s, w = self.tokens[of], self.seconds[of], self.count[of]
            rows.append((float(n @ w / w.sum()), weighted_median(s, w), float(w.sum())))
        table = np.array(sorted(rows), dtype=np.float64).reshape(-1, 3)
        return table[:, 0], table[:, 1], table[:, 2]


def fit(arm: Arm) -> Line:
    """A robust line: weighted Theil-Sen over the size classes, then Huber-weighted least squares on relative residuals.

    Noise of a cost grows with the cost, so that residuals are weighed relative to it; otherwise the largest sizes alone
    would set the intercept, and the intercept is what the threshold depends on. Needs two classes; raises ValueError.
    """
    n, s, w = arm.by_class()
    if len(n) < 2:
        raise ValueError("a line needs two size classes")
    line = theil_sen(n, s, w)
    x, y, c = arm.tokens, arm.seconds, arm.count
    root = np.sqrt(c)
    floor = max(1e-9, 0.05 * float(np.median(y)))
    for _ in range(_ROUNDS):
        predicted = line.intercept + line.slope * x
        expected = np.maximum(predicted, floor)
        # standardised by the number of observations behind each mean
        standard = np.abs(y - predicted) / expected * root
        scale = max(1e-9, 1.4826 * weighted_median(standard, c))
        weights = c * np.minimum(1.0, _HUBER * scale / np.maximum(standard, 1e-12)) / expected**2
        total = weights.sum()
        mean_x, mean_y = float(weights @ x / total), float(weights @ y / total)
        spread = float(weights @ (x - mean_x) ** 2)
        if spread <= 0:
            return line
        slope = float(weights @ ((x - mean_x) * (y - mean_y))) / spread
        new = Line(mean_y - slope * mean_x, slope)
        settled = abs(new.slope - line.slope) <= 1e-6 * abs(new.slope) and abs(new.intercept - line.intercept) <= 1e-7
        line = new
        if settled:
            break
    return line


def line_of(points: Sequence[CostPoint]) -> Line | None:
    """A line through a path's costs; None where too few were seen, or of one size only."""
    if sum(p.count for p in points) < _ENOUGH:
        return None
    try:
        return fit(Arm.of(points))
    except ValueError:
        return None


def saving_per_token(recompute: Sequence[CostPoint], fetch: Sequence[CostPoint]) -> float | None:
    """Seconds of prefill one fetched token saves on average, over the sizes that are fetched; None if not known.

    The fixed cost of fetching is spread over the mean size; that of computing is paid either way.
    """
    line = line_of(recompute)
    if line is None or sum(p.count for p in fetch) < _ENOUGH:
        return None
    tokens = sum(p.tokens * p.count for p in fetch)
    seconds = sum(p.seconds * p.count for p in fetch)
    return line.slope - seconds / tokens if tokens > 0 else None
