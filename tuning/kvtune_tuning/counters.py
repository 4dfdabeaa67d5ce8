"""Counters of several processes over time: what had been counted by when, and in which stretch of the window. Pure."""

from __future__ import annotations

import numpy as np

from kvtune_tuning.series import Floats, Series

MAX_STRETCHES = 30
"""Stretches the window is cut into for cost points."""


class Ended:
    """Turns (or weights) that had ended by a time, over all processes, each extrapolated to before its first scrape.

    Before a process's first sample its counter is run back at its own rate in the window, but never below zero: a
    process that has just started had no turns before.
    """

    def __init__(self, counters: list[Series]) -> None:
        self._parts: list[tuple[Floats, Floats, float, float, float]] = []
        for counter in counters:
            values = counter.unwrapped()
            span = float(counter.times[-1] - counter.times[0])
            rate = float(values[-1] - values[0]) / span if span > 0 else 0.0
            self._parts.append((counter.times, values, rate, float(counter.times[0]), float(counter.times[-1])))
        self.before = any(values[0] > 0 for _, values, *_ in self._parts)

    def _at(self, part: tuple[Floats, Floats, float, float, float], times: Floats) -> Floats:
        at, values, rate, first, _ = part
        inside = np.interp(times, at, values)
        earlier = np.maximum(0.0, values[0] - rate * (first - times))
        return np.asarray(np.where(times < first, earlier, inside), dtype=np.float64)

    def by(self, times: Floats) -> Floats:
        """Ended by `times` (Unix s)."""
        return np.asarray(sum((self._at(p, times) for p in self._parts), np.zeros_like(times)), dtype=np.float64)

    def exposed(self, lags: Floats) -> Floats:
        """Those whose return after `lags` seconds falls into the window of their own process."""
        parts = (self._at(p, p[4] - lags) - self._at(p, p[3] - lags) for p in self._parts)
        return np.asarray(sum(parts, np.zeros_like(lags)), dtype=np.float64)


def seen_by(counter: Series, times: Floats) -> Floats:
    """The unwrapped counter as last scraped by `times`: an observation is in one stretch, never divided between two."""
    index = np.searchsorted(counter.times, times, side="right") - 1
    return counter.unwrapped()[np.maximum(index, 0)]


def stretches(start_s: float, end_s: float, scrapes: int) -> Floats:
    """Edges of the stretches that a window of so many scrapes is cut into (Unix s)."""
    return np.linspace(start_s, end_s, max(2, min(MAX_STRETCHES + 1, scrapes)))


def steps(counters: list[Series], cuts: Floats) -> Floats:
    """Increments of the counters' sum in each stretch, shape (len(cuts) - 1,)."""
    parts = (np.diff(seen_by(one, cuts)) for one in counters)
    return np.asarray(sum(parts, np.zeros(len(cuts) - 1)), dtype=np.float64)


def summed(gauges: list[Series], times: Floats) -> Floats:
    """Sum of gauges at `times`, each held until its next sample, and not counted outside what was scraped of it."""
    total = np.zeros_like(times)
    for one in gauges:
        index = np.searchsorted(one.times, times, side="right") - 1
        # what is gone holds nothing; a sample or two may be late
        gone = one.times[-1] + 2.5 * (float(np.median(np.diff(one.times))) if len(one.times) > 1 else 0.0)
        total += np.where((index >= 0) & (times <= gone), one.values[np.maximum(index, 0)], 0.0)
    return total


def lives(scrapes: dict[str, Floats], start_s: float, end_s: float) -> dict[str, float]:
    """The share of the window in which each target was there, 0 to 1: pods come and go."""
    found = {}
    for target, times in scrapes.items():
        usual = float(np.median(np.diff(times))) if len(times) > 1 else 0.0
        found[target] = min(1.0, (float(times[-1] - times[0]) + usual) / max(1e-9, end_s - start_s))
    return found
