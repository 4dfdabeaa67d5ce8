"""The advice on `kv_recompute_threshold`. Pure: no clock, no I/O.

n tokens of history can be fetched (`alpha + beta n`) or computed again (`b n`, on top of a fixed cost that either way
is paid for the new tokens). The two are equal at n* = alpha / (b - beta). The threshold in force hides half of each
line: below it nothing is fetched, and what is fetched was never computed. So identifiability is tested first, and
what is not identifiable is said to be so. Exploration (the router asks for the other path, at random, near the
threshold) shows what it hides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from kvtune_connector.policy import EXPLORE_FACTOR
from kvtune_tuning.lines import Arm, CostPoint, Line, fit
from kvtune_tuning.series import Floats
from kvtune_tuning.wording import digits

SETTING = "kv_recompute_threshold"
MIN_OBSERVATIONS = 200
"""Costs observed, on each path."""
MIN_RANGE = 8.0
"""Largest over smallest mean size of the classes observed, on each path."""
EXPLORED_FETCHES = 50
EXPLORED_RANGE = 3.0
"""Fetches, and range of sizes on each path, that are enough while the router explores: what is seen then lies on both
sides of the threshold, and no line need be drawn out to it."""
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
_CELLS = 128
_STEEPEST = 600.0
"""Of a class's cells, and by how much their weights may differ at most (exponent), half of it each way."""
_COMPARED = 4 * MIN_CLASS
"""Observations of a size class, on each path, before the two are compared."""
_SURE = 3.0
"""Standard errors by which costs seen at one size must differ from the lines to contradict them."""
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
    """What was fetched, or would have been but for exploration."""
    below: Sizes | None
    """What could have been fetched but was below the threshold, also where exploration fetched it; None when there was
    none."""
    ttft_followup_s: float | None
    """Observed mean TTFT of follow-up turns."""
    explored: float | None = None
    """Histories near the threshold that took the other path, because the router explores; None: it does not."""

    @property
    def exploring(self) -> bool:
        """Whether the router explores."""
        return self.explored is not None

    @property
    def histories(self) -> float:
        """Fetchable histories, whatever was done about them."""
        return sum(s.count for s in self.fetched) + (self.below.count if self.below else 0.0)


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
class Pair:
    """Fetching less computing again, as seen at one size near the threshold. Seconds."""

    tokens: float
    seen_s: float
    error_s: float
    """Standard error of `seen_s`."""
    line_s: float
    """What the two lines say at this size."""

    @property
    def contradicts(self) -> bool:
        """Whether what was seen differs from the lines by more than chance, and enough to matter."""
        return abs(self.seen_s - self.line_s) > max(_SURE * self.error_s, FLAT_S)


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
    gain_interval: tuple[float, float] | None = None
    """5 and 95 % of what moving to the advised value saves (s a history)."""
    pairs: tuple[Pair, ...] = ()
    """Set while the router explores."""
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


@lru_cache(maxsize=512)
def _spread(sizes: Sizes) -> tuple[Floats, Floats, Floats]:
    """Sizes within a class, as (edges, share below each edge, tokens of those a history); shapes (k,).

    Log-uniform, tilted as far as it takes to have the class's mean.
    """
    low = max(1.0, sizes.low)
    high = max(sizes.high, low * (1 + 1e-6), low + 1.0)
    fine = np.geomspace(low, high, 2 * _CELLS + 1)
    edges, middles = fine[::2], fine[1::2]
    place = np.linspace(-1.0, 1.0, _CELLS)
    mean = min(max(sizes.mean, float(middles[0])), float(middles[-1]))
    least, most = -_STEEPEST, _STEEPEST
    for _ in range(60):
        tilt = (least + most) / 2
        weights = np.exp(tilt * place - abs(tilt))
        if float(weights @ middles) > mean * float(weights.sum()):
            most = tilt
        else:
            least = tilt
    weights /= weights.sum()
    share, tokens = (np.concatenate(([0.0], np.cumsum(v))) for v in (weights, weights * middles))
    return edges, share / share[-1], tokens


def _split(sizes: Sizes, tau: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Shares below and at or above each tau, and their mean sizes, of a class."""
    edges, below, tokens = _spread(sizes)
    cut = np.clip(tau, edges[0], edges[-1])
    share, so_far = (np.interp(np.log(cut), np.log(edges), v) for v in (below, tokens))
    with np.errstate(divide="ignore", invalid="ignore"):
        under = np.where(share > 0, np.minimum(so_far / share, cut), edges[0])
        over = np.where(share < 1, np.maximum((tokens[-1] - so_far) / (1 - share), cut), edges[-1])
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


@dataclass(frozen=True, slots=True)
class _Draw:
    """Both lines from resampled stretches of time; `times`: how often each stretch was drawn."""

    times: Floats
    recompute: Line
    fetch: Line


def _draws(inputs: ThresholdInputs) -> list[_Draw]:
    """Seeded, so that the same inputs give the same intervals."""
    rng = np.random.default_rng(31)
    arms = [Arm.of(points) for points in (inputs.recompute, inputs.fetch)]
    stretches = np.unique(np.concatenate([arm.stretch for arm in arms]))
    found = []
    for _ in range(_DRAWS):
        drawn = rng.choice(stretches, len(stretches))
        times = np.bincount(drawn, minlength=int(stretches[-1]) + 1).astype(np.float64)
        try:
            recompute, fetch = (fit(arm.weighted(times[arm.stretch])) for arm in arms)
        except ValueError:
            continue
        found.append(_Draw(times, recompute, fetch))
    return found


def _by_size(points: Sequence[CostPoint]) -> dict[str, Arm]:
    """The size classes that were seen often enough to be compared with the other path's."""
    members: dict[str, list[CostPoint]] = {}
    for p in points:
        members.setdefault(p.size, []).append(p)
    return {size: Arm.of(of) for size, of in members.items() if _observed(of) >= _COMPARED}


def _differences(
    fetched: dict[str, Arm], computed: dict[str, Arm], recompute: Line, times: Floats | None = None
) -> dict[str, tuple[float, float]]:
    """Tokens, and fetching less computing them (s), of each class that both paths were seen in.

    A prefill's fixed cost is paid on either path, so that it is taken off; and the two are compared at the same size:
    the class's recompute cost is moved along its own line.
    """
    found = {}
    for size, one in fetched.items():
        if size not in computed:
            continue
        arms = [arm if times is None else arm.weighted(times[arm.stretch]) for arm in (one, computed[size])]
        if all(len(arm.count) for arm in arms):
            (n_fetch, fetch), (n_compute, compute) = ((float(v[0]) for v in arm.by_class()[:2]) for arm in arms)
            marginal = compute - recompute.intercept + recompute.slope * (n_fetch - n_compute)
            found[size] = (n_fetch, fetch - marginal)
    return found


def _pairs(inputs: ThresholdInputs, recompute: Line, fetch: Line, draws: Sequence[_Draw]) -> tuple[Pair, ...]:
    """Both paths compared class by class within the reach of exploration, by size; nothing where none goes on."""
    if not inputs.exploring:
        return ()
    fetched, computed = _by_size(inputs.fetch), _by_size(inputs.recompute)
    drawn = [_differences(fetched, computed, draw.recompute, draw.times) for draw in draws]
    found = []
    for size, (tokens, seen) in _differences(fetched, computed, recompute).items():
        if not inputs.current / EXPLORE_FACTOR <= tokens <= inputs.current * EXPLORE_FACTOR:
            continue
        others = [one[size][1] for one in drawn if size in one]
        if len(others) > 1:
            line = fetch.at(tokens) - recompute.slope * tokens
            found.append(Pair(tokens, seen, float(np.std(others, ddof=1)), line))
    return tuple(sorted(found, key=lambda pair: pair.tokens))


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
    fetchable = inputs.histories
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

    explore = "" if inputs.exploring else ", or let the router explore"

    def unidentifiable(code: str, why: str, remedy: str, retry_after_s: float | None = None) -> ThresholdAdvice:
        if between is not None:
            return _equivalent(blank, between)
        return replace(
            blank,
            status="unidentifiable",
            reason_code=code,
            recommended=None,
            reason=f"not identifiable: {why}; {remedy}",
            # what is in force shows no more with time, exploration does
            retry_after_s=math.ceil(retry_after_s) if inputs.exploring and retry_after_s is not None else None,
        )

    def lower(factor: float) -> str:
        return f"lower the threshold to {max(16, current // factor):g} for half an hour and ask again{explore}"

    probe = f"raise the threshold to {PROBE_TOKENS} for half an hour and ask again{explore}"
    near = inputs.explored is not None and inputs.explored >= MIN_CLASS
    enough, wide = (EXPLORED_FETCHES, EXPLORED_RANGE) if near else (MIN_OBSERVATIONS, MIN_RANGE)
    if fetches < enough:
        return unidentifiable(
            "fetch_not_observed", f"only {fetches:.0f} fetches seen, everything else is below {digits(current)} tokens",
            lower(4), (enough - fetches) * inputs.window_s / fetches if fetches > 0 else None,
        )  # fmt: skip
    if computes < MIN_OBSERVATIONS:
        return unidentifiable(
            "recompute_not_observed", "no prefill computation was timed", "check that P exports kvtune_path_* series"
        )
    spans = {"fetch": _range(inputs.fetch), "recompute": _range(inputs.recompute)}
    for path, (low, high) in spans.items():
        if not high >= wide * low:
            seen = f"{low:.0f} to {high:.0f} tokens" if low > 0 else "no size class often enough"
            # the threshold itself cuts the range of what is fetched from below
            cut = path == "fetch" and current > 16 and not low >= 4 * current
            points = inputs.fetch if path == "fetch" else inputs.recompute
            return unidentifiable(
                f"{path}_range_too_narrow",
                f"{path} costs were seen over {seen}, a factor of {wide:g} is needed",
                lower(MIN_RANGE) if cut else probe,
                _until_wide(points, wide, inputs.window_s),
            )
    recompute, fetch = fit(Arm.of(inputs.recompute)), fit(Arm.of(inputs.fetch))
    known = replace(blank, recompute=recompute, fetch=fetch)
    wrong = _misbehaves(inputs, recompute)
    if wrong is not None:
        return unidentifiable("costs_not_linear", wrong, "look at load changes and mixed engines in the window")
    n_star = crossing(recompute, fetch)
    draws = _draws(inputs)
    crossed = np.array([n for d in draws if (n := crossing(d.recompute, d.fetch)) is not None], dtype=np.float64)
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
    sight = (0.0, math.inf)
    for path, (least, most) in spans.items():
        if least / MAX_REACH <= n_star <= most * MAX_REACH:
            continue
        # Both paths are seen near the threshold: a step as far as they are seen is as good as certain, and the next
        # window sees further.
        sight = (max(sight[0], least), min(sight[1], most))
        if not near:
            return unidentifiable(
                "crossing_out_of_sight",
                f"the costs would be equal near {n_star:.0f} tokens, but {path} was seen over "
                f"{least:.0f} to {most:.0f} only",
                lower(MIN_RANGE) if n_star < least and current > 16 else probe,
            )
    if high > MAX_SPREAD * max(low, 1.0) and high > PROBE_TOKENS / MAX_SPREAD:
        # an interval shrinks with the root of what was seen
        more = (math.log(high / max(low, 1.0)) / math.log(MAX_SPREAD)) ** 2 - 1
        return unidentifiable(
            "crossing_too_uncertain", f"the costs are equal somewhere between {low:.0f} and {high:.0f} tokens", probe,
            more * inputs.window_s,
        )  # fmt: skip
    pairs = _pairs(inputs, recompute, fetch, draws)
    known = replace(known, crossing=n_star, crossing_interval=(low, high), pairs=pairs)
    return _weigh(inputs, known, recompute, fetch, draws, n_star, sight)


def _until_wide(points: Sequence[CostPoint], wide: float, window_s: float) -> float | None:
    """Seconds until size classes that were seen too seldom make the range wide enough; None where none would."""
    n, _, count = Arm.of(points).by_class()
    for least in sorted({float(c) for c in count if c < MIN_CLASS}, reverse=True):
        seen = n[count >= least]
        if seen[-1] >= wide * seen[0]:
            return (MIN_CLASS / least - 1) * window_s
    return None


def _weigh(
    inputs: ThresholdInputs,
    known: ThresholdAdvice,
    recompute: Line,
    fetch: Line,
    draws: Sequence[_Draw],
    n_star: float,
    sight: tuple[float, float],
) -> ThresholdAdvice:
    """Both lines are known: is a move worth it on the sizes that occur, and surely so? None goes beyond `sight`."""
    current = inputs.current
    grid = np.clip(np.concatenate((_grid(), [float(round(n_star))])), *sight)
    grid = np.unique(np.concatenate((grid, [current])))
    cost, _ = path_cost(inputs, recompute, fetch, grid)
    best = int(np.argmin(cost))
    near = cost <= cost[best] + FLAT_S
    # the run of equivalent thresholds around the best
    left, right = best, best
    while left > 0 and near[left - 1]:
        left -= 1
    while right < len(grid) - 1 and near[right + 1]:
        right += 1
    interval = (float(grid[left]), float(grid[right]))
    wanted = min(max(n_star, interval[0]), interval[1])
    target = _rounded(wanted, interval)
    gain = max(0.0, _gain(inputs, recompute, fetch, target))
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
    drawn = [_gain(inputs, draw.recompute, draw.fetch, target) for draw in draws]
    low, high = (float(q) for q in np.quantile(drawn, (0.05, 0.95)))
    known = replace(known, gain_interval=(low, high))
    if low <= 0:
        # an interval shrinks with the root of what was seen
        more = ((gain - low) / gain) ** 2 - 1
        return replace(
            known, status="insufficient", interval=None, reason_code="gain_not_certain",
            reason=f"cannot tell yet: {target:g} instead of {digits(current)} would save {1000 * gain:.1f} ms a turn, "
            f"or anything from {1000 * low:.1f} to {1000 * high:.1f} ms",
            retry_after_s=max(1, math.ceil(more * inputs.window_s)),
        )  # fmt: skip
    clamps = () if abs(target - n_star) <= 16 else ("sizes_seen",)
    return replace(
        known, status="change", recommended=target, clamped_by=clamps,
        reason_code="fetching_small_is_slow" if target > current else "fetching_small_is_fast",
        reason=f"{digits(current)} -> {target:g}: {interval[0]:.0f} to {interval[1]:.0f} are within 1 ms; "
        f"{digits(current)} costs {1000 * gain:.1f} ms more a turn{_contradicted(known.pairs)}",
    )  # fmt: skip


def _gain(inputs: ThresholdInputs, recompute: Line, fetch: Line, target: float) -> float:
    """What moving to `target` saves by these lines on the sizes that occur (s a history)."""
    cost, _ = path_cost(inputs, recompute, fetch, np.array([inputs.current, target]))
    return float(cost[0] - cost[1])


def _contradicted(pairs: Sequence[Pair]) -> str:
    """A warning where what exploration saw is not what the lines say."""
    wrong = [f"{pair.tokens:.0f}" for pair in pairs if pair.contradicts]
    return f"; costs seen near {', '.join(wrong)} tokens contradict the lines (--explain)" if wrong else ""


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
    table = _differences(_by_size(inputs.fetch), _by_size(inputs.recompute), recompute).values()
    if len(table) < 4:
        return None
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
