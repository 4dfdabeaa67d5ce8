"""What is replayed, with which settings, and what comes out. Tokens, seconds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvtune_bench.calibration import Calibration
from kvtune_bench.traces import PlannedTurn
from kvtune_router.config import ConfigError, RouterConfig

HANDOVER_S = 1.0
"""The router hands nothing over that lapses within so long beyond the reader's margin."""
P99_BINS = 4000
"""Resolution of the distribution of retained tokens, in shares of the pool."""


class ReplayError(ValueError):
    """A replay that cannot be run; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """One decode engine and the prefill engines in front of it."""

    calibration: Calibration
    pool_tokens: int
    prefill_engines: int = 1
    prefill_cache: bool = False
    """Prefill still holds the prompt of the turn before; the published measurement had it off."""
    block_tokens: int = 64
    """A rewritten history is cut to whole blocks."""
    noise: float = 0.1
    """Sigma of the log-normal factor on every time."""

    def __post_init__(self) -> None:
        limit = self.calibration.context_tokens
        if self.pool_tokens < limit:
            raise ReplayError(
                f"a pool of {self.pool_tokens} tokens cannot hold one request of {self.calibration.name} "
                f"({limit} tokens); give at least that many"
            )
        if not 0 <= self.noise < math.inf:
            raise ReplayError(f"noise must be a number of at least 0, got {self.noise}")
        if self.prefill_engines < 1:
            raise ReplayError(f"there must be a prefill engine, got {self.prefill_engines}")


@dataclass(frozen=True, slots=True)
class Load:
    """How much traffic, for how long. What happens before `warmup_s` is not measured."""

    turns_per_s: float
    duration_s: float = 4 * 3600.0
    warmup_s: float = 1800.0
    seed: int = 1

    def __post_init__(self) -> None:
        for name in ("turns_per_s", "duration_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ReplayError(f"{name} must be positive, got {value}")
        if not 0 <= self.warmup_s < math.inf:
            raise ReplayError(f"warmup_s must be a number of at least 0, got {self.warmup_s}")


@dataclass(frozen=True, slots=True)
class Setting:
    """What is tried. `holds` decides for each turn how long to retain it; None: `ttl_s`, for all."""

    ttl_s: float
    threshold_tokens: int = 64
    holds: Callable[[PlannedTurn], float] | None = None
    explore: float = 0.0
    """Share of references for which the router asks prefill to take the other path, near the threshold."""

    def __post_init__(self) -> None:
        try:
            RouterConfig(explore=self.explore)
        except ConfigError as error:
            raise ReplayError(str(error)) from None
        if not 0 <= self.ttl_s < math.inf:
            raise ReplayError(f"a TTL must be a number of seconds, at least 0, got {self.ttl_s}")

    def hold_s(self, turn: PlannedTurn) -> float:
        """How long a turn's KV is retained unless it is read; 0 keeps nothing."""
        return self.ttl_s if self.holds is None else self.holds(turn)


@dataclass(slots=True)
class Result:
    """What was measured after the warm-up."""

    window_s: float
    pool_tokens: int
    turns: int = 0
    followups: int = 0
    """Those about whose history prefill has decided: what became of the others is not known."""
    hits: int = 0
    """Follow-up turns of whose history something was read back or held by prefill. Not the router's outcome `hit`,
    which says that the reference was good: below the threshold it is, and nothing is reused."""
    outcomes: Counter[str] = field(default_factory=Counter)
    ttft_s: list[float] = field(default_factory=list)
    """Of every turn that came; of those still unserved at the end, how long they had waited."""
    unserved: int = 0
    pinned_bins: list[float] = field(default_factory=lambda: [0.0] * (P99_BINS + 1))
    """Seconds spent at each level of retained tokens: none, then up to one, two, ... shares of the pool."""
    pinned_token_s: float = 0.0
    used_token_s: float = 0.0
    active_token_s: float = 0.0
    wasted_token_s: float = 0.0
    """Token-seconds of retentions that ended unread."""
    waited_s: float = 0.0
    """For room in decode's pool, all turns together."""
    waited: int = 0
    events: int = 0

    @property
    def turns_per_s(self) -> float:
        """What came; the load's rate is what was aimed at."""
        return self.turns / self.window_s

    @property
    def hit_ratio(self) -> float | None:
        """Share of follow-up turns that reused something; None without any."""
        return self.hits / self.followups if self.followups else None

    @property
    def ttft_mean_s(self) -> float | None:
        """Mean time to first token of all turns."""
        return sum(self.ttft_s) / len(self.ttft_s) if self.ttft_s else None

    def ttft_quantile_s(self, q: float) -> float | None:
        """A quantile (0 to 1) of the time to first token."""
        return float(np.quantile(self.ttft_s, q)) if self.ttft_s else None

    @property
    def pinned_mean(self) -> float:
        """Mean of the tokens retained."""
        return self.pinned_token_s / self.window_s

    @property
    def active_mean(self) -> float:
        """Mean of the tokens of requests being decoded."""
        return self.active_token_s / self.window_s

    @property
    def pinned_p99(self) -> float:
        """99th percentile, over time, of the tokens retained."""
        bins = np.asarray(self.pinned_bins)
        level = int(np.searchsorted(np.cumsum(bins), 0.99 * bins.sum()))
        return max(0.0, level - 0.5) / P99_BINS * self.pool_tokens if bins.sum() else 0.0
