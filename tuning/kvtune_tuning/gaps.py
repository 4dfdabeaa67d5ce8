"""How long conversations pause: survival curves of the gap, from bucket counts and their exposure. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvtune_tuning.series import Floats

MIN_EXPOSURE_TURNS = 50.0
"""A bucket is taken as observed only if at least so many turns ended early enough to have returned in it."""
MIN_EXPOSURE_SHARE = 0.05
"""... and at least this share of all turns that ended: below that, its share of returns is mostly noise."""
_LAGS_PER_BUCKET = 5


@dataclass(frozen=True, slots=True)
class Survival:
    """S(t), the share of turns (or of their tokens) whose conversation has not returned t seconds after the end.

    Known at `edges` (s, shape (n,), the first is 0 and S(0) = 1); between them the hazard is constant, i.e. log S is
    linear. Beyond the last edge nothing was observed: S is held constant there, an upper bound.
    """

    edges: Floats
    values: Floats

    @property
    def horizon_s(self) -> float:
        """The longest gap that could have been observed."""
        return float(self.edges[-1])

    def at(self, times: Floats) -> Floats:
        """S at `times` (s); negative times give 1."""
        t = np.clip(np.asarray(times, dtype=np.float64), 0.0, self.edges[-1])
        some = self.values > 0
        logs = np.log(self.values[some])
        # log-linear has no finite rate to zero; a bucket that takes all the rest is crossed linearly
        last = self.edges[some][-1]
        geometric = np.exp(np.interp(t, self.edges[some], logs))
        return np.where(t > last, np.interp(t, self.edges, self.values), geometric)

    def integral(self, times: Floats) -> Floats:
        """The integral of S from 0 to each of `times`: the mean of min(gap, t), in seconds."""
        t = np.maximum(np.asarray(times, dtype=np.float64), 0.0)
        if len(self.edges) == 1:
            return t
        widths = np.diff(self.edges)
        whole = np.concatenate(([0.0], np.cumsum(_mean_between(self.values[:-1], self.values[1:]) * widths)))
        inside = np.minimum(t, self.edges[-1])
        j = np.clip(np.searchsorted(self.edges, inside, side="right") - 1, 0, len(self.edges) - 2)
        here = self.at(inside)
        # the same two shapes as in `at`
        mean = np.where(self.values[j + 1] > 0, _mean_between(self.values[j], here), (self.values[j] + here) / 2)
        part = mean * (inside - self.edges[j])
        beyond = np.maximum(0.0, t - self.edges[-1]) * self.values[-1]
        return np.asarray(whole[j] + part + beyond, dtype=np.float64)


def _mean_between(high: Floats, low: Floats) -> Floats:
    """Mean of S over an interval from `high` to `low` of constant hazard (the logarithmic mean)."""
    ratio = np.where(high > 0, low / np.where(high > 0, high, 1.0), 0.0)
    safe = np.clip(ratio, 1e-12, 1 - 1e-9)
    logarithmic = high * (safe - 1.0) / np.log(safe)
    return np.asarray(np.where(ratio >= 1 - 1e-9, high, np.where(low > 0, logarithmic, high / 2)), dtype=np.float64)


@dataclass(frozen=True, slots=True)
class GapCurves:
    """Survival per turn, weighted by tokens and by tokens squared, on the same edges; `returned`: gaps counted."""

    turns: Survival
    tokens: Survival
    tokens_squared: Survival
    returned: float
    exposure: Floats
    """Turns that could have returned in each observed bucket, shape (len(edges) - 1,)."""

    @property
    def horizon_s(self) -> float:
        """The longest gap that could have been observed (s)."""
        return self.turns.horizon_s


def lagged_exposure(ended: Callable[[Floats], Floats], start_s: float, end_s: float, lags: Floats) -> Floats:
    """Turns whose return after a gap of `lags` seconds would have been seen in [start, end].

    `ended(t)` is the number of turns that had ended by `t`; such a return at gap g falls into the window if the turn
    ended in [start - g, end - g].
    """
    return np.asarray(ended(end_s - lags) - ended(start_s - lags), dtype=np.float64)


def survival(
    edges: Floats,
    returns: Floats,
    ended: Callable[[Floats], Floats],
    observed: int | None = None,
) -> tuple[Survival, Floats]:
    """Right-censored survival from bucket counts.

    `edges`: finite upper bucket edges (s, shape (n,)); `returns`: gaps counted in each bucket (not cumulative, shape
    (n,)), or sums of their weights; `ended(g)`: turns (or weights) whose return after g seconds would have been
    counted. A gap in the bucket j can only have been counted for turns that ended early enough, so its probability is
    its count over that exposure, not over all turns. `observed`: how many buckets to use; None: as many as have the
    minimum exposure. Returns the curve and each used bucket's exposure.
    """
    lower = np.concatenate(([0.0], edges[:-1]))
    fractions = (np.arange(_LAGS_PER_BUCKET) + 0.5) / _LAGS_PER_BUCKET
    lags = lower[:, None] + (edges - lower)[:, None] * fractions[None, :]
    exposure = np.asarray(ended(lags.ravel()), dtype=np.float64).reshape(lags.shape).mean(axis=1)
    if observed is None:
        total = float(ended(np.zeros(1))[0])
        # judged at the far edge: a bucket whose long end could not be seen is not observed
        at_edges = ended(edges)
        enough = at_edges >= max(MIN_EXPOSURE_TURNS, MIN_EXPOSURE_SHARE * total)
        observed = int(np.argmin(enough)) if not enough.all() else len(edges)
    exposure, counts, used = exposure[:observed], returns[:observed], edges[:observed]
    mass = np.where(exposure > 0, counts / np.where(exposure > 0, exposure, 1.0), 0.0)
    left = np.clip(1.0 - np.cumsum(np.maximum(mass, 0.0)), 0.0, 1.0)
    return Survival(np.concatenate(([0.0], used)), np.concatenate(([1.0], left))), exposure


def mean_held(curve: Survival, ended: Callable[[Floats], Floats], times: Floats, ttl_s: float) -> Floats:
    """Predicted tokens retained at `times` (Unix s, shape (m,)): what ended within the TTL and has not returned.

    `ended(t)` is the cumulative sum of tokens. Retention that is still filling up is so modelled by what really ended,
    not by the steady state.
    """
    steps = np.unique(np.concatenate((np.linspace(0.0, ttl_s, 97), curve.edges[curve.edges < ttl_s])))
    middle = (steps[1:] + steps[:-1]) / 2
    young = ended((times[:, None] - steps[None, :-1]).ravel()).reshape(len(times), -1)
    old = ended((times[:, None] - steps[None, 1:]).ravel()).reshape(len(times), -1)
    return np.asarray(((young - old) * curve.at(middle)[None, :]).sum(axis=1), dtype=np.float64)
