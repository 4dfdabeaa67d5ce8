"""Raw series, whatever they were read from, and increments that survive counter resets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Labels = frozenset[tuple[str, str]]
COUNTER_SUFFIXES = ("_total", "_bucket", "_count", "_sum")


@dataclass(frozen=True, slots=True)
class Series:
    """One series of one target: `times` (Unix s, ascending) and `values`, both of shape (n,)."""

    name: str
    labels: Labels
    target: str
    times: Floats
    values: Floats

    def label(self, name: str) -> str | None:
        """The value of a label, or None."""
        return next((value for key, value in self.labels if key == name), None)

    def resets(self) -> Floats:
        """Times at which the counter was first seen below its value before."""
        return self.times[1:][np.diff(self.values) < 0]

    def unwrapped(self) -> Floats:
        """The counter as if it had never been reset: first value plus all increments, shape (n,).

        After a reset the new value itself is the increment, as in PromQL's `increase`, but nothing is extrapolated.
        """
        if len(self.values) == 0:
            return self.values
        steps = np.diff(self.values)
        steps = np.where(steps < 0, self.values[1:], steps)
        return np.asarray(np.concatenate(([self.values[0]], self.values[0] + np.cumsum(steps))), dtype=np.float64)

    def increase(self) -> float:
        """Increments over all samples."""
        unwrapped = self.unwrapped()
        return float(unwrapped[-1] - unwrapped[0]) if len(unwrapped) else 0.0

    def at(self, times: Floats) -> Floats:
        """The unwrapped counter at `times`, linear between samples, flat outside."""
        return np.asarray(np.interp(times, self.times, self.unwrapped()), dtype=np.float64)


@dataclass(frozen=True, slots=True)
class SeriesSet:
    """Everything that was read. `scrapes` maps each target to the times it answered (Unix s, ascending)."""

    series: tuple[Series, ...]
    scrapes: dict[str, Floats]
    not_finite: int = 0
    notes: tuple[str, ...] = ()
    ahead_s: float = 0.0
    """How far the times of scrapes are ahead of the wall clock: only those of a scaled simulation are."""
    _by_name: dict[str, list[Series]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        index: dict[str, list[Series]] = {}
        for one in self.series:
            index.setdefault(one.name, []).append(one)
        object.__setattr__(self, "_by_name", index)

    def named(self, name: str, where: Callable[[Series], bool] | None = None, **labels: str) -> list[Series]:
        """The series called `name` whose labels have the given values and for which `where` holds."""
        wanted = set(labels.items())
        return [s for s in self._by_name.get(name, []) if wanted <= s.labels and (where is None or where(s))]

    def increase(self, name: str, where: Callable[[Series], bool] | None = None, **labels: str) -> float | None:
        """Summed increments of a counter over the window; None where no such series exists."""
        found = self.named(name, where, **labels)
        return sum(s.increase() for s in found) if found else None

    def window(self) -> tuple[float, float]:
        """First and last scrape (Unix s)."""
        times = [t for ts in self.scrapes.values() for t in (ts[0], ts[-1])]
        return float(min(times)), float(max(times))

    def samples(self) -> int:
        """Values kept in all series."""
        return sum(len(s.times) for s in self.series)

    def last(self, window_s: float) -> SeriesSet:
        """Only what was scraped in the last `window_s` seconds."""
        start = self.window()[1] - window_s
        series = []
        for s in self.series:
            keep = s.times >= start
            if keep.any():
                series.append(Series(s.name, s.labels, s.target, s.times[keep], s.values[keep]))
        scrapes = {target: times[times >= start] for target, times in self.scrapes.items()}
        kept = {k: v for k, v in scrapes.items() if len(v)}
        return SeriesSet(tuple(series), kept, self.not_finite, self.notes, self.ahead_s)


@dataclass(slots=True)
class Collector:
    """Gathers samples scrape by scrape into a `SeriesSet`."""

    _points: dict[tuple[str, Labels, str], tuple[list[float], list[float]]] = field(default_factory=dict)
    _scrapes: dict[str, list[float]] = field(default_factory=dict)
    not_finite: int = 0
    notes: list[str] = field(default_factory=list)
    ahead_s: float = 0.0

    def scraped(self, target: str, time_s: float, samples: Iterable[tuple[str, Labels, float]]) -> None:
        """One answer of one target at `time_s` (Unix s)."""
        self._scrapes.setdefault(target, []).append(time_s)
        for name, labels, value in samples:
            times, values = self._points.setdefault((name, labels, target), ([], []))
            times.append(time_s)
            values.append(value)

    def collected(self) -> SeriesSet:
        """What was gathered; a counter child born inside the window starts from zero at the scrape before its birth."""
        scrapes = {target: np.unique(np.asarray(times, dtype=np.float64)) for target, times in self._scrapes.items()}
        series = tuple(self._series(scrapes))
        return SeriesSet(series, scrapes, self.not_finite, tuple(self.notes), self.ahead_s)

    def _series(self, scrapes: dict[str, Floats]) -> Iterator[Series]:
        for (name, labels, target), (raw_times, raw_values) in self._points.items():
            times, values = np.asarray(raw_times, dtype=np.float64), np.asarray(raw_values, dtype=np.float64)
            times, values = in_order(times, values)
            if name.endswith(COUNTER_SUFFIXES):
                times, values = from_birth(times, values, scrapes[target])
            yield Series(name, labels, target, times, values)


def in_order(times: Floats, values: Floats) -> tuple[Floats, Floats]:
    """The same samples by ascending time; of equal times the last wins."""
    order = np.argsort(times, kind="stable")
    times, values = times[order], values[order]
    keep = np.concatenate((times[1:] != times[:-1], [True]))
    return times[keep], values[keep]


def from_birth(times: Floats, values: Floats, scrapes: Floats, began_s: float | None = None) -> tuple[Floats, Floats]:
    """A counter with the zero it began from, where that is known.

    One whose target was scraped before without it began at zero at the last such scrape. One that comes with its
    target began at zero with the target's process (`began_s`, Unix s; None where that was before the window, or is not
    known). Any other has a history that nobody saw: it counts from its first sample.
    """
    before = scrapes[: np.searchsorted(scrapes, times[0])]
    zero = float(before[-1]) if len(before) else began_s
    if zero is None or zero >= times[0]:
        return times, values
    return np.concatenate(([zero], times)), np.concatenate(([0.0], values))
