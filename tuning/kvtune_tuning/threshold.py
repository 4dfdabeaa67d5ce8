"""The advice on `kv_recompute_threshold`. Pure: no clock, no I/O.

n tokens of history can be fetched (`alpha + beta n`) or computed again (`b n`, on top of a fixed cost that either way
is paid for the new tokens). The two are equal at n* = alpha / (b - beta). The threshold in force hides half of each
line: below it nothing is fetched, and what is fetched was never computed. So identifiability is tested first, and
what is not identifiable is said to be so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvtune_tuning.lines import Arm, CostPoint, Line, fit
from kvtune_tuning.series import Floats
from kvtune_tuning.wording import digits

SETTING = "kv_recompute_threshold"
MIN_OBSERVATIONS = 200
"""Costs observed, on each path."""
MIN_RANGE = 8.0
"""Largest over smallest mean size of the classes observed, on each path."""
MIN_CLASS = 5.0
"""Observations that make a class count as seen."""
MIN_GAIN_S = 0.002
MIN_GAIN_SHARE = 0.02
FLAT_S = 0.001
"""Thresholds within 1 ms of the best are one answer."""
MAX_REACH = 4.0
"""How far (factor) beyond the sizes seen a line is trusted."""
MAX_SPREAD = 8.0
"""An interval for n* wider than this factor says nothing."""
PROBE_TOKENS = 2048
"""Raising the threshold to this for a while shows both lines, at 1 to 15 ms a turn."""
MAX_THRESHOLD = 131072
NEGLIGIBLE = 0.005
"""A share of fetches below this is no reason for anything."""
_DRAWS = 100
_NOISE = 0.25
"""Share of the largest difference between the two costs that is taken for noise."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Fetchable histories of one size class: between `low` (exclusive) and `high` tokens, `count` of them."""

    low: float
    high: float
    mean: float
    count: float


@dataclass(frozen=True, slots=True)
class ThresholdInputs:
    """What the advice is computed from."""

    current: float
    window_s: float
    fetch: tuple[CostPoint, ...]
    recompute: tuple[CostPoint, ...]
    fetched: tuple[Sizes, ...]
    """Sizes that were fetched."""
    below: Sizes | None
    """What could have been fetched but was below the threshold; None when there was none."""
    ttft_followup_s: float | None
    """Observed mean TTFT of follow-up turns."""


@dataclass(frozen=True, slots=True)
class ThresholdRow:
    """What one threshold would give."""

    value: float
    fetched_share: float
    """Of the histories that could be fetched."""
    extra_mean_s: float
    """Mean cost of getting a history, by either path."""
    ttft_mean_s: float | None


@dataclass(frozen=True, slots=True)
class ThresholdAdvice:
    """The recommendation and every number behind it."""

    status: str
    current: float
    recommended: float | None
    interval: tuple[float, float] | None
    uncapped: float | None
    clamped_by: tuple[str, ...]
    reason_code: str
    reason: str
    rows: tuple[ThresholdRow, ...]
    recompute: Line | None
    fetch: Line | None
    crossing: float | None
    crossing_interval: tuple[float, float] | None
    gain_s: float | None
    retry_after_s: float | None = None


def crossing(recompute: Line, fetch: Line) -> float | None:
    """n*, the size from which fetching is cheaper; None where it never is. The recompute intercept cancels."""
    slope = recompute.slope - fetch.slope
    if slope <= 0:
        return None
    return max(0.0, fetch.intercept) / slope


def _observed(points: Sequence[CostPoint]) -> float:
    return sum(p.count for p in points)


def _range(points: Sequence[CostPoint]) -> tuple[float, float]:
    """Mean sizes of the smallest and the largest class that was seen often enough; (nan, nan) without any."""
    if not points:
        return math.nan, math.nan
    n, _, count = Arm.of(points).by_class()
    seen = n[count >= MIN_CLASS]
    return (float(seen[0]), float(seen[-1])) if len(seen) else (math.nan, math.nan)


def _split(sizes: Sizes, tau: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Shares below and at or above each tau, and their mean sizes, for sizes spread log-uniformly over the class."""
    low, high = max(1.0, sizes.low), max(sizes.high, sizes.low + 1.0, 2.0)
    cut = np.clip(tau, low, high)
    span = math.log(high / low)
    share = np.log(cut / low) / span
    # log-uniform means, scaled so that the class keeps its observed mean
    scale = sizes.mean / ((high - low) / span)
    with np.errstate(divide="ignore", invalid="ignore"):
        under = np.where(share > 0, (cut - low) / np.log(cut / low), low) * scale
        over = np.where(share < 1, (high - cut) / np.log(high / cut), high) * scale
    return share, 1.0 - share, under, over


def path_cost(inputs: ThresholdInputs, recompute: Line, fetch: Line, tau: Floats) -> tuple[Floats, Floats]:
    """Mean marginal cost (s) of a fetchable history at each threshold, and the share that is fetched; shapes (m,)."""
    total = np.zeros_like(tau)
    fetched = np.zeros_like(tau)
    count = 0.0
    for sizes in (*inputs.fetched, *((inputs.below,) if inputs.below else ())):
        under_share, over_share, under, over = _split(sizes, tau)
        total += sizes.count * (
            under_share * recompute.slope * under + over_share * (fetch.intercept + fetch.slope * over)
        )
        fetched += sizes.count * over_share
        count += sizes.count
    return total / max(count, 1e-12), fetched / max(count, 1e-12)


def _grid() -> Floats:
    return np.unique(np.round(np.geomspace(16, MAX_THRESHOLD, 157)))


def _draws(inputs: ThresholdInputs) -> list[float | None]:
    """n* from resampled stretches of time; seeded, so that the same inputs give the same interval."""
    rng = np.random.default_rng(31)
    arms = [Arm.of(points) for points in (inputs.recompute, inputs.fetch)]
    stretches = np.unique(np.concatenate([arm.stretch for arm in arms]))
    found: list[float | None] = []
    for _ in range(_DRAWS):
        times = np.bincount(rng.choice(stretches, len(stretches)), minlength=int(stretches[-1]) + 1)
        try:
            recompute, fetch = (fit(arm.weighted(times[arm.stretch].astype(np.float64))) for arm in arms)
        except ValueError:
            continue
        found.append(crossing(recompute, fetch))
    return found


def smallest_fetched(inputs: ThresholdInputs) -> float:
    """The lower edge of the smallest class that holds a noticeable share of the fetches; inf without any."""
    total = sum(s.count for s in inputs.fetched)
    for sizes in sorted(inputs.fetched, key=lambda s: s.low):
        if sizes.count >= max(1.0, NEGLIGIBLE * total):
            return max(sizes.low, inputs.current)
    return math.inf


def _nothing_between(inputs: ThresholdInputs) -> tuple[float, float] | None:
    """The range of thresholds that all decide alike, if it is wide and the one in force is in it."""
    total = sum(s.count for s in inputs.fetched)
    if inputs.below is not None and inputs.below.count > NEGLIGIBLE * (total + inputs.below.count):
        return None
    upper = smallest_fetched(inputs)
    return (inputs.current, upper) if math.isfinite(upper) and upper >= MIN_RANGE * max(1.0, inputs.current) else None


def advise(inputs: ThresholdInputs) -> ThresholdAdvice:
    """Recommend a threshold, or say why not.

    `status` is change, keep, off, insufficient or unidentifiable.
    """
    current = inputs.current
    blank = ThresholdAdvice("insufficient", current, None, None, None, (), "", "", (), None, None, None, None, None)
    fetches, computes = _observed(inputs.fetch), _observed(inputs.recompute)
    fetchable = fetches + (inputs.below.count if inputs.below else 0.0)
    if fetchable < MIN_OBSERVATIONS or (computes < MIN_OBSERVATIONS and computes > 0):
        waits = []
        for have in (fetchable, computes):
            if have < MIN_OBSERVATIONS:
                waits.append((MIN_OBSERVATIONS - have) * inputs.window_s / have if have > 0 else math.inf)
        wait = max(waits)
        return replace(
            blank,
            reason_code="too_few_costs",
            reason=f"cannot tell: {fetchable:.0f} fetchable histories and {computes:.0f} computed prefills seen in "
            f"{inputs.window_s:.0f} s, need {MIN_OBSERVATIONS} of each",
            retry_after_s=math.ceil(wait) if math.isfinite(wait) else None,
        )
    between = _nothing_between(inputs)

    def unidentifiable(code: str, why: str, remedy: str) -> ThresholdAdvice:
        if between is not None:
            return _equivalent(blank, between)
        return replace(
            blank,
            status="unidentifiable",
            reason_code=code,
            recommended=None,
            reason=f"not identifiable: {why}; {remedy}",
        )

    probe = f"raise the threshold to {PROBE_TOKENS} for half an hour and ask again, or let the router explore"
    if fetches < MIN_OBSERVATIONS:
        return unidentifiable(
            "fetch_not_observed", f"only {fetches:.0f} fetches seen, everything else is below {digits(current)} tokens",
            f"lower the threshold to {max(16, current // 4):g} for half an hour and ask again",
        )  # fmt: skip
    if computes < MIN_OBSERVATIONS:
        return unidentifiable(
            "recompute_not_observed", "no prefill computation was timed", "check that P exports kvtune_path_* series"
        )
    spans = {"fetch": _range(inputs.fetch), "recompute": _range(inputs.recompute)}
    for path, (low, high) in spans.items():
        if not high >= MIN_RANGE * low:
            seen = f"{low:.0f} to {high:.0f} tokens" if low > 0 else "no size class often enough"
            remedy = probe
            if path == "fetch" and current > 64 and low < 4 * current:
                # the threshold itself cuts the range from below
                remedy = f"lower the threshold to {max(16, current // MIN_RANGE):g} for half an hour and ask again"
            return unidentifiable(
                f"{path}_range_too_narrow",
                f"{path} costs were seen over {seen}, a factor of {MIN_RANGE:g} is needed",
                remedy,
            )
    recompute, fetch = fit(Arm.of(inputs.recompute)), fit(Arm.of(inputs.fetch))
    known = replace(blank, recompute=recompute, fetch=fetch)
    wrong = _misbehaves(inputs, recompute)
    if wrong is not None:
        return unidentifiable("costs_not_linear", wrong, "look at load changes and mixed engines in the window")
    n_star = crossing(recompute, fetch)
    draws = _draws(inputs)
    crossed = np.array([d for d in draws if d is not None], dtype=np.float64)
    if (
        len(crossed) < 0.05 * len(draws)
        and n_star is None
        and fetch.at(spans["fetch"][1]) > recompute.slope * spans["fetch"][1]
    ):
        return replace(
            known, status="off", reason_code="fetch_never_pays", uncapped=math.inf, clamped_by=(),
            reason=f"switch reading back off: a fetched token costs {1e6 * fetch.slope:.1f} us, a computed one "
            f"{1e6 * recompute.slope:.1f} us, at every size",
        )  # fmt: skip
    if n_star is None or len(crossed) < 0.95 * len(draws):
        return unidentifiable(
            "lines_do_not_cross",
            "fetch and recompute cost too nearly the same per token to say where they cross",
            probe,
        )
    low, high = (float(q) for q in np.quantile(crossed, (0.05, 0.95)))
    for path, (least, most) in spans.items():
        if not least / MAX_REACH <= n_star <= most * MAX_REACH:
            return unidentifiable(
                "crossing_out_of_sight",
                f"the costs would be equal near {n_star:.0f} tokens, but {path} was seen over "
                f"{least:.0f} to {most:.0f} only",
                probe,
            )
    if high > MAX_SPREAD * max(low, 1.0) and high > PROBE_TOKENS / MAX_SPREAD:
        return unidentifiable(
            "crossing_too_uncertain", f"the costs are equal somewhere between {low:.0f} and {high:.0f} tokens", probe
        )
    return _weigh(inputs, replace(known, crossing=n_star, crossing_interval=(low, high)), recompute, fetch, n_star)


def _weigh(
    inputs: ThresholdInputs, known: ThresholdAdvice, recompute: Line, fetch: Line, n_star: float
) -> ThresholdAdvice:
    """Both lines are known: is a move worth it on the sizes that occur?"""
    current = inputs.current
    grid = np.unique(np.concatenate((_grid(), [current, float(round(n_star))])))
    cost, _ = path_cost(inputs, recompute, fetch, grid)
    here = float(cost[int(np.searchsorted(grid, current))])
    best = int(np.argmin(cost))
    near = cost <= cost[best] + FLAT_S
    # the run of equivalent thresholds around the best
    left, right = best, best
    while left > 0 and near[left - 1]:
        left -= 1
    while right < len(grid) - 1 and near[right + 1]:
        right += 1
    interval = (float(grid[left]), float(grid[right]))
    gain = max(0.0, here - float(cost[best]))
    wanted = min(max(n_star, interval[0]), interval[1])
    target = _rounded(wanted, interval)
    rows = _rows(inputs, recompute, fetch, target)
    known = replace(known, interval=interval, uncapped=n_star, rows=rows, gain_s=gain)
    share = gain / inputs.ttft_followup_s if inputs.ttft_followup_s else None
    if gain < MIN_GAIN_S or (share is not None and share < MIN_GAIN_SHARE):
        between = _nothing_between(inputs)
        if between is not None and interval[0] <= current:
            return replace(_equivalent(known, between), uncapped=n_star, rows=rows)
        of = "" if share is None else f", {100 * share:.1f} % of TTFT"
        return replace(
            known, status="keep", recommended=current, reason_code="gain_too_small",
            reason=f"keep {digits(current)}: the costs are equal at {n_star:.0f} tokens, but moving there would save "
            f"{1000 * gain:.1f} ms a turn{of}",
        )  # fmt: skip
    clamps = () if abs(target - n_star) <= 16 else ("sizes_seen",)
    return replace(
        known, status="change", recommended=target, clamped_by=clamps,
        reason_code="fetching_small_is_slow" if target > current else "fetching_small_is_fast",
        reason=f"{digits(current)} -> {target:g}: {interval[0]:.0f} to {interval[1]:.0f} are within 1 ms; "
        f"{digits(current)} costs {1000 * gain:.1f} ms more a turn",
    )  # fmt: skip


def _equivalent(known: ThresholdAdvice, between: tuple[float, float]) -> ThresholdAdvice:
    low, high = between
    return replace(
        known, status="keep", recommended=known.current, interval=between, reason_code="nothing_fetchable_between",
        reason=f"keep {digits(known.current)}: any value in [{digits(low)}, {digits(high)}] is equivalent, "
        "nothing fetchable lies between",
    )  # fmt: skip


def _rounded(value: float, interval: tuple[float, float]) -> float:
    """A multiple of 16 near `value`, inside the interval if one is."""
    rounded = max(16.0, 16.0 * round(value / 16.0))
    if not interval[0] <= rounded <= interval[1]:
        rounded = float(round(value))
    return rounded


def _misbehaves(inputs: ThresholdInputs, recompute: Line) -> str | None:
    """Whether fetch less recompute grows with size where both were seen: then no threshold separates the two."""
    seen: list[dict[str, tuple[float, float]]] = []
    for points in (inputs.fetch, inputs.recompute):
        classes: dict[str, list[CostPoint]] = {}
        for p in points:
            classes.setdefault(p.size, []).append(p)
        one: dict[str, tuple[float, float]] = {}
        for size, members in classes.items():
            if _observed(members) >= 4 * MIN_CLASS:
                n, s, _ = Arm.of(members).by_class()
                one[size] = (float(n[0]), float(s[0]))
        seen.append(one)
    shared = [size for size in seen[0] if size in seen[1]]
    if len(shared) < 4:
        return None
    table = []
    for size in shared:
        (n_fetch, fetch), (n_compute, compute) = seen[0][size], seen[1][size]
        # compared at the same size: the class's recompute cost is moved along its own line
        marginal = compute - recompute.intercept + recompute.slope * (n_fetch - n_compute)
        table.append((n_fetch, fetch - marginal))
    delta = np.array([d for _, d in sorted(table)])
    steps = np.diff(delta)
    noise = _NOISE * float(np.abs(delta).max())
    rise, fall = float(steps[steps > noise].sum()), -float(steps[steps < -noise].sum())
    if rise > 0.5 * fall > 0:
        return "fetching gains and loses on computing by turns as sizes grow"
    return None


def _rows(inputs: ThresholdInputs, recompute: Line, fetch: Line, target: float) -> tuple[ThresholdRow, ...]:
    values = {64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, inputs.current, target, target / 2, target * 2}
    values |= {inputs.current / 2, inputs.current * 2}
    # The one in force as it is, be it zero or no whole number: what is advised is compared with it.
    tau = np.unique(np.array([inputs.current, target, *(round(v) for v in values if v >= 1)], dtype=np.float64))
    at = np.concatenate((tau, [inputs.current]))
    cost, fetched = path_cost(inputs, recompute, fetch, at)
    total = sum(s.count for s in inputs.fetched) + (inputs.below.count if inputs.below else 0.0)
    base = inputs.ttft_followup_s
    return tuple(
        ThresholdRow(
            value=float(v),
            fetched_share=float(fetched[i]),
            extra_mean_s=float(cost[i]),
            ttft_mean_s=None if base is None or total <= 0 else max(0.0, base + float(cost[i] - cost[-1])),
        )
        for i, v in enumerate(tau)
    )
