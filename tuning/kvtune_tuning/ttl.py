"""The advice on `decoder_kv_blocks_ttl`. Pure: no clock, no I/O.

Retained KV is shot noise: pins arrive with the ends of turns and stay for min(gap, TTL). Its mean follows from
Little's law, its variance from Campbell's theorem. The longest TTL whose 99th percentile still fits the pool beside
the active requests is the memory form; the TTL beyond which another second of holding costs more than the prefill it
saves is the value form. Where the costs of prefill are known, the two sides of the matter are weighed in the user's own
unit instead: a long TTL makes requests wait for room on decode, a short one makes prefill compute, and others queue
behind it. The TTL with the least expected time to first token is the waiting form; it takes the memory form's place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvtune_tuning.gaps import GapCurves, Survival
from kvtune_tuning.series import Floats
from kvtune_tuning.wording import digits

SETTING = "decoder_kv_blocks_ttl"
Z_P99 = 2.33
"""Standard normal quantile of the 99th percentile."""
POOL_SHARE = 0.9
"""Share of the KV pool that the 99th percentile of retained and active KV may fill."""
MIN_TTL_S = 15.0
"""A shorter TTL leaves less than 10 s beyond the reader's margin."""
MAX_TTL_S = 3600.0
"""The longest gap that is measured."""
STEP_S = 5.0
MIN_CHANGE = 0.15
"""Changes smaller than this share of the TTL in force are not worth a restart."""
MIN_CONVERSATIONS = 20
MIN_GAPS = 500
MIN_GAPS_STARVED = 100
"""... while requests wait for room on decode: waiting for more evidence would cost them more than it could add."""
CONVERSATIONS_FOR_INTERVAL = 50
"""Intervals from fewer conversations cover far less than they claim."""
DESIGN_EFFECT = 5.4
"""Turns of one conversation are alike: so many of them tell as much as one independent turn (seen on agent traces)."""
MIN_GAIN = 0.01
"""A longer TTL must save at least this share of the savable prefill."""
SCARCITY_FLOOR = 0.02
"""Retained KV is never priced at nothing, or returns that no longer pay would be held for ever."""
HARDLY_USED = 0.1
"""Below this share of what came back in time being fetched, the reason lies with prefill, not with the pauses."""
ENOUGH = 0.995
"""A TTL that reaches this share of the returns that were seen reaches all that matter."""
NEVER_RETURNS = 0.005
"""Below this share of returning tokens, retention serves nobody."""
WAITS_LONGER = 4.0
"""Requests that find no room wait so many times longer than what does not fit at one moment would tell: the shortage
lasts as long as retentions do, and meanwhile others queue up. 1 to 8 was seen in replays of agents' conversations."""
WAITS_RANGE = (0.5, 8.0)
"""... where the wait at the TTL in force tells: a window may be luckier than its demand."""
MOSTLY_FITS_SIGMA = 1.0
"""Retained and active KV must fit the pool up to so many standard deviations above the mean, five times of six."""
MOST_HELD_BACK = 2.0
"""Waiting is not taken to hold back more than every other turn, unless more are seen to queue up."""
LEAST_ENDING = 0.05
"""Share of turns that end a conversation, at least: a turn that waits stands for no more than 20."""
SEEN_WAIT_S = 0.05
"""Shorter waits say nothing: the model of prefill is no more exact than that."""
SAME_S = 0.001
SAME_SHARE = 0.001
"""Expected times to first token that differ by less than both together are the same."""
FAR_WORSE = 10.0
"""A wait so many times as long is a queue that does not empty."""
FULL = 0.98
"""Prefill's utilisation beyond which its queue is only said to be very long."""
MIN_GAIN_TTFT = 0.01
"""A change must improve the expected time to first token by at least this share of the observed one."""
URGENT_TTFT = 0.1
"""A change that improves it by this share is worth a restart, however small: just beyond what fits, waits shoot up."""
_DRAWS = 200
_WAITS = 2.5 * -np.log(1.0 - (np.arange(6) + 0.5) / 6)
"""Equally likely waits of those who wait, in mean waits: exponential, and in a bad spell, as one is enough (replays of
heavy prompts: just beyond what the mean wait allows, one in three ended in a queue that never emptied)."""
_ROUNDS = 40
_SETTLED = 1e-3
TABLE_S = (15.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1800.0)
"""TTLs that a table always shows."""
_LEAST_S = 1e-3
"""A break-even below a millisecond is none."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What prefill's time is made of. Rates are over all prefill engines."""

    turns_per_s: float
    prefill_engines: int
    compute_base_s: float
    compute_token_s: float
    fetch_base_s: float
    fetch_token_s: float
    computed_mean: float
    """Tokens computed for a turn, on average over the window."""
    computed_square: float
    """The mean of their squares."""

    @property
    def engine_rate(self) -> float:
        """Turns a second of one prefill engine."""
        return self.turns_per_s / self.prefill_engines

    def service_s(self, computed: Floats) -> Floats:
        """Seconds prefill computes for so many tokens."""
        return np.asarray(self.compute_base_s + self.compute_token_s * computed, dtype=np.float64)


@dataclass(frozen=True, slots=True)
class TtlInputs:
    """What the advice is computed from. Rates and pools are those of the decode engine with the least room."""

    current_s: float
    margin_s: float
    conversations: float
    """Conversations seen in the window: new ones, and those that were going on when it began."""
    window_s: float
    ends: float
    """Turns that could return and ended in the window."""
    curves: GapCurves
    token_rate: float
    """Tokens whose retention could begin, per second, on one decode engine."""
    token_squared_rate: float
    """Squares of those tokens, per second."""
    mean_tokens: float
    """Mean tokens held at a turn's end."""
    pool_tokens: float | None
    usage_p99: float | None
    """99th percentile of the KV pool's usage (0 to 1); None when not exposed."""
    active_mean: float | None
    """Mean of the tokens in use that are not retained."""
    active_variance: float
    starved: bool
    """Requests waited while the pool was full, or were preempted."""
    kappa: float
    """Observed over predicted retained tokens; 1 when it could not be measured."""
    saving_s_per_token: float | None
    """Seconds of prefill that one fetched token saves; None when the cost lines are not known."""
    useful: float
    """Share of the tokens of in-time returns, less those late at prefill, that were really fetched, 0 to 1."""
    ttft_followup_s: float | None
    """Observed mean TTFT of follow-up turns."""
    costs: Costs | None = None
    """None when they are not known."""
    raised_by: float = 1.0
    """Factor by which `unhindered` raised the rates that were seen."""
    late: float = 0.0
    """Share of the tokens of in-time returns whose turns queued for so long that they were too late at prefill."""
    waits_longer: float = WAITS_LONGER


@dataclass(frozen=True, slots=True)
class TtlRow:
    """What one TTL would give. None where it cannot be said."""

    value: float
    hit_ratio: float
    """Turns that return in time, of all that ended."""
    hit_ratio_returning: float | None
    """... of those that were seen to return at all."""
    token_hit_ratio: float
    pinned_tokens_mean: float
    """Never more than the pool leaves room for, and so the 99th percentile."""
    pinned_tokens_p99: float
    pool_share_p99: float | None
    """What retained (P99) and active tokens would need, as a share of the pool."""
    prefill_saved_s_per_turn: float | None
    ttft_mean_s: float | None
    bound: bool
    """Longer than the gaps that could be observed: the row is a bound (hits from below, memory from above)."""
    ttft_change_s: float | None = None
    """Mean time to first token by the model, less that at the TTL in force."""


@dataclass(frozen=True, slots=True)
class TtlAdvice:
    """The recommendation and every number behind it."""

    status: str
    current: float
    recommended: float | None
    interval: tuple[float, float] | None
    uncapped: float | None
    clamped_by: tuple[str, ...]
    reason_code: str
    reason: str
    rows: tuple[TtlRow, ...]
    memory_s: float | None
    """The longest TTL that fits the pool."""
    value_s: float | None
    """The TTL beyond which holding no longer pays."""
    break_even_s: float | None
    """How long a token may be held for what fetching it saves, at the scarcity used."""
    scarcity: float | None
    retry_after_s: float | None = None
    waiting_s: float | None = None
    """The TTL with the least expected time to first token; None when costs are not known."""
    gain_s: float | None = None
    """By how much the change improves the expected time to first token (s a turn); None when costs are not known."""
    gain_interval: tuple[float, float] | None = None
    """5 and 95 % of `gain_s`."""
    no_interval: str | None = None
    """Why a change comes without an interval."""


def _grid(inputs: TtlInputs) -> Floats:
    """TTLs that are considered: multiples of 5 s up to an hour, and the one in force."""
    grid = np.arange(STEP_S, MAX_TTL_S + STEP_S / 2, STEP_S)
    return np.union1d(grid, [inputs.current_s]) if inputs.current_s > 0 else grid


def pinned(inputs: TtlInputs, ttl_s: Floats) -> tuple[Floats, Floats]:
    """Mean and variance of the tokens one decode engine retains at each TTL, after the correction by `kappa`."""
    mean = inputs.kappa * inputs.token_rate * inputs.curves.tokens.integral(ttl_s)
    variance = inputs.kappa * inputs.token_squared_rate * inputs.curves.tokens_squared.integral(ttl_s)
    return mean, variance


def filled(inputs: TtlInputs, ttl_s: Floats) -> Floats:
    """99th percentile of retained and active tokens at each TTL."""
    mean, variance = pinned(inputs, ttl_s)
    return (inputs.active_mean or 0.0) + mean + Z_P99 * np.sqrt(variance + inputs.active_variance)


def memory_ttl(inputs: TtlInputs) -> float:
    """The longest TTL (s) of the grid that fits the pool; 0 if none does, inf without a pool."""
    if inputs.pool_tokens is None:
        return math.inf
    grid = _grid(inputs)
    fits = filled(inputs, grid) <= POOL_SHARE * inputs.pool_tokens
    # monotone in the TTL: the first that does not fit ends it
    fitting = len(grid) if fits.all() else int(np.argmin(fits))
    return float(grid[fitting - 1]) if fitting else 0.0


def waiting_for_room(inputs: TtlInputs, ttl_s: Floats) -> Floats:
    """Mean seconds a turn waits for room on decode at each TTL; zeros without a pool.

    What does not fit, E[(demand - pool)+] for a normal demand, waits; by Little's law that is so much a turn.
    """
    if inputs.pool_tokens is None or inputs.token_rate <= 0:
        return np.zeros_like(ttl_s)
    mean, variance = pinned(inputs, ttl_s)
    sigma = np.sqrt(np.maximum(variance + inputs.active_variance, 1e-9))
    z = (inputs.pool_tokens - (inputs.active_mean or 0.0) - mean) / sigma
    beyond = 0.5 * np.vectorize(math.erfc)(z / math.sqrt(2))
    excess = sigma * (np.exp(-z * z / 2) / math.sqrt(2 * math.pi) - z * beyond)
    return np.asarray(inputs.waits_longer * np.maximum(excess, 0.0) / inputs.token_rate, dtype=np.float64)


def prefill_seconds(inputs: TtlInputs, costs: Costs, ttl_s: Floats) -> Floats:
    """Mean seconds a turn spends with prefill at each TTL: in its queue (M/G/1), computing, reading back.

    Less hits than at the TTL in force are so many tokens more to compute, with the spread that whole histories have.
    A turn that queues for too long comes too late to read, computes as well, and makes others queue for longer: where
    prefill cannot carry the traffic without reuse, a short TTL ends in a queue that never empties again.
    """
    curves = inputs.curves
    usable, now = ttl_s - inputs.margin_s, np.asarray([inputs.current_s - inputs.margin_s])
    read_now, read_square_now = (
        (1.0 - inputs.late) * (1.0 - c.at(now)[0]) for c in (curves.tokens, curves.tokens_squared)
    )
    mean_square = inputs.mean_tokens * inputs.token_squared_rate / max(inputs.token_rate, 1e-9)
    base, token, rate = costs.compute_base_s, costs.compute_token_s, costs.engine_rate

    def queued(tokens: Floats, squared: Floats) -> tuple[Floats, Floats, Floats]:
        """Utilisation, mean wait and mean service where the survivals of tokens and of their squares are these."""
        lost = inputs.useful * inputs.mean_tokens * (tokens - 1.0 + read_now)
        lost_square = inputs.useful**2 * mean_square * (squared - 1.0 + read_square_now)
        computed = np.maximum(costs.computed_mean + lost, 0.0)
        square = np.maximum(costs.computed_square + lost_square, computed**2)
        service = costs.service_s(computed)
        service_square = base**2 + 2 * base * token * computed + token**2 * square
        busy = rate * service
        idle = np.maximum(1.0 - busy, 1.0 - FULL)
        # beyond that the queue grows for as long as the load lasts: longer, the fuller
        return busy, rate * service_square / (2 * idle) * np.maximum(1.0, busy / FULL) ** 4, service

    turns, tokens, squared = (np.array(c.at(usable)) for c in (curves.turns, curves.tokens, curves.tokens_squared))
    busy, queue, service = queued(tokens, squared)
    some = np.flatnonzero(queue >= SEEN_WAIT_S)
    for _ in range(_ROUNDS if len(some) else 0):
        # Waits of those who wait are exponential, nearly: https://en.wikipedia.org/wiki/Kingman%27s_formula
        waits = np.minimum(1.0, busy[some])
        late = usable[some] - _WAITS[:, None] * queue[some] / waits
        before = tokens[some]
        for values, curve in ((turns, curves.turns), (tokens, curves.tokens), (squared, curves.tokens_squared)):
            values[some] = (1.0 - waits) * curve.at(usable[some]) + waits * curve.at(late).mean(axis=0)
        busy[some], queue[some], service[some] = queued(tokens[some], squared[some])
        some = some[np.abs(tokens[some] - before) > _SETTLED]
        if not len(some):
            break
    hits, hit_tokens = 1.0 - turns, 1.0 - tokens
    read = costs.fetch_base_s * hits + costs.fetch_token_s * inputs.useful * inputs.mean_tokens * hit_tokens
    return np.asarray(queue + service + read, dtype=np.float64)


def expected(inputs: TtlInputs, costs: Costs, ttl_s: Floats) -> Floats:
    """Seconds of a turn's time to first token that depend on the TTL, at each TTL."""
    return waiting_for_room(inputs, ttl_s) + prefill_seconds(inputs, costs, ttl_s)


def unhindered(inputs: TtlInputs, pause_s: float | None, backlog: float) -> TtlInputs:
    """The inputs at the rate of turns that would come if none had to wait for room.

    Conversations go round: a turn, a pause (`pause_s` on average), the next turn. What turns wait for room slows them,
    so that a crowded pool sees less demand than there is; it cannot have slowed more turns than those that came to
    wait (`backlog`: by so many more requests wait at the window's end than at its begin) and their conversations' rest.
    """
    if not inputs.starved or inputs.costs is None or inputs.ttft_followup_s is None or not pause_s:
        return inputs
    prefill = float(prefill_seconds(inputs, inputs.costs, np.asarray([inputs.current_s]))[0])
    waited = max(0.0, inputs.ttft_followup_s - prefill)
    ending = float(inputs.curves.turns.values[-1])
    queued = max(0.0, backlog) / max(1.0, inputs.ends) / max(LEAST_ENDING, ending)
    # Who begins a conversation has not waited before.
    held_back = (1.0 - ending) * waited / (pause_s + prefill)
    factor = 1.0 + min(max((MOST_HELD_BACK - 1.0) * (1.0 - ending), queued), held_back)
    return replace(
        inputs,
        token_rate=inputs.token_rate * factor,
        token_squared_rate=inputs.token_squared_rate * factor,
        costs=replace(inputs.costs, turns_per_s=inputs.costs.turns_per_s * factor),
        raised_by=factor,
    )


def as_seen_waiting(inputs: TtlInputs) -> TtlInputs:
    """The inputs with `waits_longer` as the wait at the TTL in force tells it, where one is expected and known."""
    if inputs.costs is None or inputs.ttft_followup_s is None:
        return inputs
    now = np.asarray([inputs.current_s])
    foretold = float(waiting_for_room(inputs, now)[0])
    if foretold < SEEN_WAIT_S:
        return inputs
    waited = inputs.ttft_followup_s - float(prefill_seconds(inputs, inputs.costs, now)[0])
    least, most = WAITS_RANGE
    return replace(inputs, waits_longer=min(most, max(least, inputs.waits_longer * waited / foretold)))


def waiting_ttl(inputs: TtlInputs, costs: Costs) -> float:
    """The longest TTL (s) of the grid whose expected time to first token is the least, but for a thousandth.

    Of those only whose demand fits the pool most of the time: what waits beyond that grows with the load's duration;
    of all where prefill cannot do without longer retention: what fits is worse than the TTL in force, or by far worse
    than what does not fit.
    Where less was waited than demand foretells, further than else only as far as its 99th percentile fits. 0 where
    holding nothing is best, or nothing fits.
    """
    whole = np.concatenate(([0.0], _grid(inputs)))
    pool = inputs.pool_tokens or math.inf
    mean, variance = pinned(inputs, whole)
    demand = (inputs.active_mean or 0.0) + mean + MOSTLY_FITS_SIGMA * np.sqrt(variance + inputs.active_variance)
    mostly = (demand <= pool) | (whole == 0.0)
    seconds = prefill_seconds(inputs, costs, whole)
    cost = waiting_for_room(inputs, whole) + seconds

    def best(cost: Floats, among: npt.NDArray[np.bool_]) -> int:
        cost = np.where(among, cost, math.inf)
        return int(np.flatnonzero(cost <= _as_good(float(cost.min())))[-1])

    if inputs.waits_longer >= WAITS_LONGER:
        found = best(cost, mostly)
    else:
        fits = (filled(inputs, whole) <= pool) | (whole == 0.0)
        careful = waiting_for_room(replace(inputs, waits_longer=WAITS_LONGER), whole) + seconds
        found = max(best(careful, mostly), min(best(cost, mostly), int(np.flatnonzero(fits)[-1])))
    evil = best(cost, np.ones_like(mostly))
    here = float(cost[np.searchsorted(whole, inputs.current_s)])
    much = cost[found] > min(_as_good(here), FAR_WORSE * cost[evil])
    return float(whole[evil if much else found])


def _as_good(seconds: float) -> float:
    """The most seconds that are as good as so many."""
    return seconds * (1.0 + SAME_SHARE) + SAME_S


def longest_good(inputs: TtlInputs) -> tuple[float, str]:
    """The TTL that what is retained allows, and the name of the form that says so."""
    if inputs.costs is None or inputs.pool_tokens is None or inputs.raised_by > MOST_HELD_BACK:
        # Demand that was mostly not seen says nothing as fine as a mean wait: the next window will.
        return memory_ttl(inputs), "memory"
    return waiting_ttl(inputs, inputs.costs), "waiting"


def worth(inputs: TtlInputs, ttl_s: Floats, break_even_s: float) -> Floats:
    """J(T): savable prefill that is saved less the price of what is held, as a share of all tokens."""
    in_time = 1.0 - inputs.curves.tokens.at(ttl_s - inputs.margin_s)
    return inputs.useful * in_time - inputs.curves.tokens.integral(ttl_s) / break_even_s


def scarcity(inputs: TtlInputs) -> float:
    """How scarce the pool is, 0 to 1: 0 while usage leaves room, 1 when requests had to wait for it."""
    if inputs.starved:
        return 1.0
    if inputs.usage_p99 is None:
        return 0.0
    return min(1.0, max(0.0, (inputs.usage_p99 - POOL_SHARE) / (1.0 - POOL_SHARE)))


def under_pressure(inputs: TtlInputs) -> bool:
    """Whether the pool was seen to be short: the only ground on which a TTL is ever lowered."""
    return inputs.starved or (inputs.usage_p99 is not None and inputs.usage_p99 >= POOL_SHARE)


def _break_even(inputs: TtlInputs, price: float) -> float | None:
    if inputs.saving_s_per_token is None or inputs.pool_tokens is None:
        return None
    return max(0.0, inputs.saving_s_per_token) * inputs.pool_tokens / max(price, SCARCITY_FLOOR)


def _value_ttl(inputs: TtlInputs, break_even_s: float | None) -> tuple[float | None, float | None]:
    """Best TTL by value and its J; the whole range is scanned, a hazard need not fall."""
    if break_even_s is None:
        return None, None
    if break_even_s < _LEAST_S:
        return 0.0, -math.inf
    grid = _grid(inputs)
    j = worth(inputs, grid, break_even_s)
    best = int(np.argmax(j))
    return float(grid[best]), float(j[best])


def reach_ttl(inputs: TtlInputs) -> float:
    """The shortest TTL whose usable life reaches all but 0.5 % of the returns that were seen."""
    curve = inputs.curves.tokens
    seen = 1.0 - float(curve.values[-1])
    grid = _grid(inputs)
    enough = (1.0 - curve.at(grid - inputs.margin_s)) >= ENOUGH * seen
    return float(grid[int(np.argmax(enough))]) if enough.any() else MAX_TTL_S


def _room(inputs: TtlInputs) -> float:
    """Tokens of the pool that the active requests leave to what is retained."""
    return math.inf if inputs.pool_tokens is None else max(0.0, inputs.pool_tokens - (inputs.active_mean or 0.0))


def row(inputs: TtlInputs, ttl_s: float) -> TtlRow:
    """What a TTL would give."""
    at = np.asarray([ttl_s])
    usable = np.asarray([ttl_s - inputs.margin_s])
    now = np.asarray([inputs.current_s - inputs.margin_s])
    turns, tokens = inputs.curves.turns, inputs.curves.tokens
    hit, token_hit = 1.0 - float(turns.at(usable)[0]), 1.0 - float(tokens.at(usable)[0])
    seen = 1.0 - float(turns.values[-1])
    mean, variance = (float(value[0]) for value in pinned(inputs, at))
    # What does not fit is not retained but waited for.
    held, p99 = (min(value, _room(inputs)) for value in (mean, mean + Z_P99 * math.sqrt(variance)))
    share = float(filled(inputs, at)[0]) / inputs.pool_tokens if inputs.pool_tokens else None
    saved = ttft = None
    if inputs.saving_s_per_token is not None:
        per_hit = inputs.saving_s_per_token * inputs.mean_tokens * inputs.useful
        saved = token_hit * per_hit
        # Under pressure waiting for blocks dominates, and no mean of today says how long it would be at another TTL.
        if inputs.ttft_followup_s is not None and not under_pressure(inputs) and seen > 0:
            change = (float(tokens.at(usable)[0]) - float(tokens.at(now)[0])) * per_hit / seen
            wait, waits_now = waiting_for_room(inputs, np.asarray([ttl_s, inputs.current_s]))
            ttft = max(0.0, inputs.ttft_followup_s + change + float(wait - waits_now))
    return TtlRow(
        value=ttl_s,
        hit_ratio=hit,
        hit_ratio_returning=min(1.0, hit / seen) if seen > 0 else None,
        token_hit_ratio=token_hit,
        pinned_tokens_mean=held,
        pinned_tokens_p99=p99,
        pool_share_p99=share,
        prefill_saved_s_per_turn=saved,
        ttft_mean_s=ttft,
        bound=ttl_s - inputs.margin_s > inputs.curves.horizon_s,
    )


def _rows(inputs: TtlInputs, *more: float | None) -> tuple[TtlRow, ...]:
    values = {*TABLE_S, inputs.current_s}
    for value in more:
        if value is not None and math.isfinite(value) and value > 0:
            values |= {value, value / 2, value * 2}
    values |= {inputs.current_s / 2, inputs.current_s * 2}
    keep = sorted({round(v / STEP_S) * STEP_S if v != inputs.current_s else v for v in values})
    always = {inputs.current_s, *more}
    return tuple(row(inputs, v) for v in keep if inputs.margin_s < v <= MAX_TTL_S or v in always)


def perturbed(curve: Survival, factors: Floats) -> Survival:
    """The curve with each bucket's mass multiplied by a factor of shape (n,)."""
    mass = -np.diff(curve.values) * factors
    left = np.clip(1.0 - np.cumsum(mass), 0.0, 1.0)
    return Survival(curve.edges, np.concatenate(([1.0], left)))


def resampled(inputs: TtlInputs, draws: int, seed: int) -> Iterator[tuple[Floats, float]]:
    """Factors of each bucket's mass, shape (n,), and of the rate of ends, as so many turns of their effective number
    might have given: gamma around 1. The same seed gives the same draws."""
    rng = np.random.default_rng(seed)
    mass = -np.diff(inputs.curves.turns.values)
    counts = np.maximum(mass * inputs.curves.exposure / DESIGN_EFFECT, 1e-9)
    ends = max(1.0, inputs.ends / DESIGN_EFFECT)
    for _ in range(draws):
        factors = rng.gamma(counts) / counts
        yield factors, float(rng.gamma(ends) / ends)


def _interval(inputs: TtlInputs, cap_s: float) -> tuple[float, float] | None:
    """90 % interval of min(what retention allows, cap): bucket counts and the rate of ends resampled
    at their effective sizes.

    None below 50 conversations. Seeded: the same inputs give the same interval.
    """
    if inputs.conversations < CONVERSATIONS_FOR_INTERVAL or inputs.pool_tokens is None:
        return None
    found = []
    for factors, rate in resampled(inputs, _DRAWS, seed=20):
        draw = replace(
            inputs,
            curves=replace(
                inputs.curves,
                tokens=perturbed(inputs.curves.tokens, factors),
                tokens_squared=perturbed(inputs.curves.tokens_squared, factors),
            ),
            token_rate=inputs.token_rate * rate,
            token_squared_rate=inputs.token_squared_rate * rate,
        )
        found.append(min(max(longest_good(draw)[0], MIN_TTL_S), cap_s))
    low, high = np.quantile(found, (0.05, 0.95))
    return float(low), float(high)


def gaps_needed(inputs: TtlInputs) -> int:
    """Pauses that must have been seen to end before anything is said."""
    return MIN_GAPS_STARVED if inputs.starved else MIN_GAPS


def _retry_after(inputs: TtlInputs) -> float | None:
    """Seconds until the minimum sample sizes are reached at the rates seen; None when nothing comes."""
    if inputs.window_s <= 0:
        return None
    waits = []
    for have, need in ((inputs.conversations, MIN_CONVERSATIONS), (inputs.curves.returned, gaps_needed(inputs))):
        if have < need:
            if have <= 0:
                return None
            waits.append((need - have) / (have / inputs.window_s))
    return math.ceil(max(waits)) if waits else None


def advise(inputs: TtlInputs) -> TtlAdvice:
    """Recommend a TTL, or say why not.

    `status` is change, keep, off or insufficient. The TTL is lowered only if the pool was seen to be short, raised
    only if that surely gains at least 1 % of the savable prefill, and changed only by 15 % or more. What is
    recommended fits the pool by the model.
    """
    current = inputs.current_s
    returning = 1.0 - float(inputs.curves.tokens.values[-1])
    observed = inputs.curves.horizon_s >= min(current - inputs.margin_s, MAX_TTL_S)
    blank = TtlAdvice("insufficient", current, None, None, None, (), "", "", (), None, None, None, None)
    if (
        returning < NEVER_RETURNS
        and observed
        and inputs.conversations >= MIN_CONVERSATIONS
        and float(inputs.curves.exposure.min(initial=math.inf)) >= MIN_GAPS
    ):
        # Too few returns to place a TTL among them, but enough turns that had the time to return.
        return replace(
            blank, status="off", reason_code="nobody_returns", rows=_rows(inputs), uncapped=0.0,
            reason=f"switch retention off: {100 * (1 - returning):.1f} % of what is held belongs to conversations that "
            f"did not return within {inputs.curves.horizon_s:.0f} s",
        )  # fmt: skip
    if inputs.conversations < MIN_CONVERSATIONS or inputs.curves.returned < gaps_needed(inputs):
        return replace(
            blank,
            reason_code="too_few_gaps",
            reason=f"cannot tell: {inputs.conversations:.0f} conversations and {inputs.curves.returned:.0f} pauses "
            f"seen in {inputs.window_s:.0f} s, need {MIN_CONVERSATIONS} and {gaps_needed(inputs)}",
            retry_after_s=_retry_after(inputs),
        )
    if inputs.pool_tokens is None or inputs.usage_p99 is None or inputs.active_mean is None:
        missing = "size of decode's KV pool" if inputs.pool_tokens is None else "vllm:kv_cache_usage_perc of decode"
        return replace(
            blank,
            reason_code="missing_series",
            reason=f"cannot tell: no usable {missing} was found, so nothing says what retention may use",
            rows=_rows(inputs),
        )
    pressed = under_pressure(inputs)
    memory = memory_ttl(inputs)
    fit, form = longest_good(inputs)
    price = scarcity(inputs)
    # Once what is pinned fits, the pool is no longer scarce: the value form is asked at the scarcity after the change.
    after = SCARCITY_FLOOR if fit >= MIN_TTL_S else max(price, SCARCITY_FLOOR)
    break_even = _break_even(inputs, after)
    value, _ = _value_ttl(inputs, break_even)
    reach = reach_ttl(inputs)
    base = replace(
        blank, memory_s=memory, waiting_s=fit if form == "waiting" else None, value_s=value, break_even_s=break_even,
        scarcity=after,
    )  # fmt: skip

    now = row(inputs, current)
    usage = f"P99 usage {100 * inputs.usage_p99:.0f} %"
    short = "requests waited for KV blocks" if inputs.starved else usage

    def keep(code: str, reason: str, target: float | None, clamps: tuple[str, ...] = ()) -> TtlAdvice:
        return replace(
            base, status="keep", recommended=current, reason_code=code, reason=f"keep {digits(current)} s: {reason}",
            uncapped=target, clamped_by=clamps, rows=_rows(inputs),
        )  # fmt: skip

    def no_pressure(target: float, clamps: tuple[str, ...] = ()) -> TtlAdvice:
        fits = f"{digits(memory)} s fit" if memory > 0 else "no TTL fits"
        return keep(
            "no_pressure_observed",
            f"{usage} was measured, and a TTL is only lowered from {100 * POOL_SHARE:.0f} % on; the model expects "
            f"{100 * (now.pool_share_p99 or 0.0):.0f} % once retention has filled up, and that {fits}",
            target,
            clamps,
        )

    if pressed:
        best = _best_that_fits(inputs, fit, after)
        # Returns that could not be seen yet could still pay, unless a fetch costs more than it saves.
        if best is not None and best <= 0 and (observed or best == -math.inf):
            never = 100 * float(inputs.curves.turns.values[-1])
            unreturned = f"{never:.0f} % of turns have no return within {inputs.curves.horizon_s:.0f} s"
            why = (
                f"not even {MIN_TTL_S:g} s of retention fits, nor does it save more than it costs ({unreturned})"
                if memory < MIN_TTL_S
                else _unfetched(inputs)
                if inputs.useful < HARDLY_USED
                else f"no TTL that fits saves more than it costs ({unreturned})"
            )
            return replace(
                base, status="off", reason_code="does_not_pay", rows=_rows(inputs, fit), uncapped=0.0,
                clamped_by=(form, "floor") if fit < MIN_TTL_S else (),
                reason=f"switch retention off: the pool is short ({short}), and {why}",
            )  # fmt: skip
    if fit < MIN_TTL_S:
        # The shortest TTL worth having does not fit: nothing is recommended in its place.
        clamps_at_floor = (form, "floor")
        if not pressed and fit < current:
            return no_pressure(fit, clamps_at_floor)
        if not pressed:
            return keep(
                "floor_does_not_fit",
                f"the model lets {digits(fit)} s fit the pool, and less than {MIN_TTL_S:g} s is not worth a change "
                f"({usage})",
                fit,
                clamps_at_floor,
            )
        if fit < current and inputs.starved:
            why = (
                f"the model lets only {digits(fit)} s fit; less than {MIN_TTL_S:g} s is not worth having"
                if memory < MIN_TTL_S
                else _unfetched(inputs)
                if inputs.useful < HARDLY_USED
                else f"holding for {MIN_TTL_S:g} s or longer makes requests wait for more than it saves"
            )
            return replace(
                base, status="off", reason_code="does_not_fit" if memory < MIN_TTL_S else "does_not_pay",
                rows=_rows(inputs, fit), uncapped=fit, clamped_by=clamps_at_floor,
                reason=f"switch retention off, or give decode more KV: {short}, and {why}",
            )  # fmt: skip
        if fit < current:
            return keep(
                "floor_does_not_fit",
                f"the pool is short ({short}), but not even {MIN_TTL_S:g} s fit, the shortest TTL worth having; give "
                "decode more KV, or switch retention off once requests wait",
                fit,
                clamps_at_floor,
            )
    bounds = {form: fit}
    if observed or not pressed:
        # What lies beyond the longest observable pause is no ground for a shorter TTL.
        bounds["reach"] = reach
        if value is not None:
            bounds["value"] = value
    if not pressed:
        bounds["horizon"] = max(current, inputs.curves.horizon_s + inputs.margin_s)
    binding = min(bounds, key=lambda name: bounds[name])
    uncapped = bounds[binding]
    clamps = [binding]
    target = math.floor(uncapped / STEP_S) * STEP_S
    if target < MIN_TTL_S:
        target, clamps = MIN_TTL_S, [binding, "floor"]
    if target >= MAX_TTL_S and target > current:
        target, clamps = MAX_TTL_S, [*clamps, "ceiling"]
    if not pressed and target <= current:
        if fit < current:
            return no_pressure(uncapped)
        return keep("pool_slack", f"the pool has room ({usage}) and a longer TTL would gain nothing", uncapped)
    if pressed and max(target, uncapped) >= current:
        return keep(
            "pressure_not_from_retention",
            f"the pool is short ({short}), but by the model what is retained {_allows(form, fit)}; look at "
            "the active requests",
            uncapped,
        )
    if binding == "value" and uncapped < target and target > current:
        # the floor must not raise a TTL beyond what pays
        return keep(
            "gain_too_small", f"holding for more than {digits(uncapped)} s costs more than late returns save", uncapped
        )
    saved = _saved(inputs, current, target)
    urgent = pressed and saved is not None and saved >= URGENT_TTFT * (inputs.ttft_followup_s or math.inf)
    if abs(target - current) < MIN_CHANGE * current and not urgent:
        return keep(
            "change_too_small", f"{target:.0f} s would be best, less than {100 * MIN_CHANGE:.0f} % away", uncapped
        )
    if saved is not None and saved < MIN_GAIN_TTFT * (inputs.ttft_followup_s or 0.0):
        return keep(
            "gain_too_small",
            f"{target:.0f} s would change the expected time to first token by {1000 * -saved:+.0f} ms only",
            uncapped,
        )
    then = row(inputs, target)
    if target > current:
        gain = (then.token_hit_ratio - now.token_hit_ratio) * inputs.useful
        sure = gain - 1.28 * math.sqrt(max(gain, 0.0) * (1 - min(1.0, gain)) * DESIGN_EFFECT / max(1.0, inputs.ends))
        if sure < MIN_GAIN and not _prefill_is_full(inputs):
            return keep(
                "gain_too_small",
                f"{target:.0f} s would reach {100 * gain:.1f} % more of the history, too little or too uncertain to "
                "act on",
                uncapped,
            )
        code = "late_returns"
        reason = (
            f"{digits(current)} -> {target:.0f} s: the pool has room ({usage}) and conversations return later; turns "
            f"back in time {100 * now.hit_ratio:.1f} -> {100 * then.hit_ratio:.1f} %"
        )
    else:
        code = "pool_pressure"
        needs = f"P99 of retained and active KV would need {100 * (now.pool_share_p99 or 0.0):.0f} % of the pool"
        why = {
            "memory": needs,
            "waiting": f"{needs}, and waiting for room costs more than late returns save",
            "reach": f"the pool is short and all but {100 * (1 - ENOUGH):.1g} % of the returns come sooner",
            "value": "the pool is short and holding on costs more than late returns save",
        }[binding]
        reason = (
            f"{digits(current)} -> {target:.0f} s: {why}, at {_rate(inputs)}; "
            f"turns back in time {100 * now.hit_ratio:.1f} -> {100 * then.hit_ratio:.1f} %"
        )
    cap = min((v for k, v in bounds.items() if k != form), default=MAX_TTL_S)
    interval = _interval(inputs, max(MIN_TTL_S, cap)) if binding == form else None
    return replace(
        base, status="change", recommended=target, uncapped=uncapped, clamped_by=tuple(clamps), reason_code=code,
        reason=reason, interval=interval and (min(interval[0], target), max(interval[1], target)),
        rows=_rows(inputs, target),
    )  # fmt: skip


def _rate(inputs: TtlInputs) -> str:
    served = inputs.ends / inputs.window_s
    taken = f" served, taken as {served * inputs.raised_by:.2f} wanted" if inputs.raised_by > 1.05 else ""
    return f"{served:.2f} turns/s{taken}"


def _unfetched(inputs: TtlInputs) -> str:
    return (
        f"retention saves nothing as set: prefill fetched {100 * inputs.useful:.1f} % of the tokens that came back in "
        "time (the rest it held itself, or it lay below the threshold)"
    )


def _allows(form: str, ttl_s: float) -> str:
    return f"fits up to {digits(ttl_s)} s" if form == "memory" else f"is best held for {digits(ttl_s)} s or longer"


def _saved(inputs: TtlInputs, current_s: float, target_s: float) -> float | None:
    """By how much a change improves the expected time to first token (s); None when costs are not known."""
    if inputs.costs is None:
        return None
    before, after = expected(inputs, inputs.costs, np.asarray([current_s, target_s]))
    return float(before - after)


def _prefill_is_full(inputs: TtlInputs) -> bool:
    """Whether prefill computes all the time: then returns are late because they queue, and every hit shortens that."""
    if inputs.costs is None:
        return False
    costs = inputs.costs
    return bool(costs.engine_rate * costs.service_s(np.asarray(costs.computed_mean)) >= 0.9 * FULL)


def _best_that_fits(inputs: TtlInputs, memory_s: float, price: float) -> float | None:
    """The best J of the TTLs that fit, at that scarcity; None when savings are not known."""
    break_even = _break_even(inputs, price)
    if break_even is None:
        return None
    if break_even < _LEAST_S:
        return -math.inf
    grid = _grid(inputs)
    grid = grid[grid <= max(memory_s, MIN_TTL_S)]
    return float(worth(inputs, grid, break_even).max())
