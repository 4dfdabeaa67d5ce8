"""What vLLM's own series tell where kvtune's are missing: bounds, and what would end the guessing. Pure.

Facts of vLLM 0.32 that this rests on:

* Prefill answers with one token, decode with many: generation tokens a request tell the roles apart.
* NIXL's statistics are lists that are joined over ranks: a read or a lapse counts once a rank, not once a request.
* Transfers are booked by the reader. On prefill they are read-backs, on decode the ordinary hand-over.
* On decode, `vllm:nixl_num_kv_expired_reqs` counts the retentions whose TTL ran out. On prefill it counts lapsed leases
  and declined reads together.
* Decode retains what finished as `stop` or `length`, with its prompt and its answer. Retained and active KV are one
  figure in `vllm:kv_cache_usage_perc`.
* `vllm:request_prefill_time_seconds` begins after the read, `vllm:nixl_xfer_time_seconds` leaves out all but the
  transfer itself.

So the share of retentions that lapse is one exact point of the survival curve, S(TTL). The mean hold E[min(gap, TTL)]
follows from what is retained (Little), within what cannot be told from active requests. Survival only falls, so the
mean hold at a shorter TTL lies between the chord and the tangent, and with it the longest TTL that fits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvtune_telemetry.buckets import size_label
from kvtune_telemetry.vocabulary import Role
from kvtune_tuning import threshold, ttl
from kvtune_tuning.counters import Ended, steps, stretches
from kvtune_tuning.errors import UsageError
from kvtune_tuning.gaps import GapCurves, Survival
from kvtune_tuning.lines import Arm, CostPoint, Line, fit
from kvtune_tuning.series import Floats, Series, SeriesSet
from kvtune_tuning.wording import digits

RANKS = (1, 2, 4, 8, 16, 32)
"""Ranks that may count one request."""
MIN_STEPS = 12
"""Increments of a counter that must share a divisor before that is taken for the number of ranks."""
SHARED = 0.9
"""... of which this share must: ranks that report in different scrapes split an increment."""
NEAR = 0.1
"""Reads a request may be off a number of ranks by this share: requests in progress or failed."""
PREFILL_ANSWER = 1.05
"""Generation tokens a request up to which an engine only prefills."""
DECODE_ANSWER = 1.5
"""... and from which it decodes. Between them it does both, or hardly anything."""
ACTIVE_SHARE = (0.5, 2.0)
"""Running requests times the mean length is what they hold, within these factors: long requests run for longer."""
SPREAD = 1.5
"""E[n^2] over E[n]^2 where prompt lengths are not exposed: that of agents' prompts. 1: all equal."""
MIN_TURNS = ttl.MIN_GAPS
"""Retentions that could have lapsed, before the share that did is believed."""
NEVER_READ = 0.9
"""Where this share of retentions lapses and nothing is read back, nothing ever will be."""
DOUBT = 1.2
"""What is retained may contradict the TTL by this factor: sizes and holds are not independent."""
MIN_COSTS = 200.0
MIN_RANGE = 2.0
"""Means of stretches must differ by this factor before a line is laid through them."""
NOT_KNOWN = "pauses between turns, hits by outcome, and why a turn had no hit"
NOT_KNOWN_OF_PREFILL = (
    "declined reads apart from lapsed leases, sizes of what was fetched or computed, and whether what was read was "
    "right"
)
NEVER_IDENTIFIABLE = "not_identifiable"
"""Reason of a refusal that no amount of data ends."""
_FINISHED = ("stop", "length")


@dataclass(frozen=True, slots=True)
class Stated:
    """What the user says about a deployment that does not say it itself."""

    prefill: tuple[str, ...] = ()
    """Parts of the names of prefill targets."""
    decode: tuple[str, ...] = ()
    ranks: int | None = None
    """Tensor parallel size of the engines."""
    ttl_s: float | None = None
    threshold: float | None = None
    """Tokens."""

    def __post_init__(self) -> None:
        """Raises UsageError (`bad_statement`) for values that cannot be."""
        for what, value, least in (
            ("tensor parallel size", self.ranks, 1.0),
            ("TTL", self.ttl_s, 0.001),
            ("threshold", self.threshold, 0.0),
        ):
            if value is not None and not least <= value <= 1e9:
                raise UsageError("bad_statement", f"the stated {what} cannot be {value:g}", "State what is in force.")

    @classmethod
    def of(
        cls, roles: Sequence[str] = (), ranks: int | None = None, ttl_s: float | None = None,
        threshold: float | None = None,
    ) -> Stated:  # fmt: skip
        """From options; `roles` are like `prefill=SUBSTRING`. Raises UsageError (`bad_role`, `bad_statement`)."""
        parts: dict[str, list[str]] = {role.value: [] for role in Role}
        for given in roles:
            role, _, part = given.partition("=")
            if role not in parts or not part:
                raise UsageError(
                    "bad_role", f"--role: {given!r} is not ROLE=PART",
                    "Write prefill= or decode= and a part of the names of its targets.",
                )  # fmt: skip
            parts[role].append(part)
        return cls(tuple(parts[Role.PREFILL]), tuple(parts[Role.DECODE]), ranks, ttl_s, threshold)


@dataclass(frozen=True, slots=True)
class Ranks:
    """How often one request is counted: `value`, and what says so (`stated`, `lapses` or `reads`); None: not known."""

    value: int | None
    source: str | None

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the most it can be."""
        return (float(self.value),) * 2 if self.value is not None else (1.0, float(RANKS[-1]))


@dataclass(frozen=True, slots=True)
class StockInputs:
    """What the advice is computed from. Pairs are bounds (lower, upper)."""

    current_s: float
    window_s: float
    roles_known: bool
    nixl: bool
    """Decode exposes NIXL's series."""
    turns: float
    """Turns that ended on decode with something to retain."""
    turns_per_s: float
    exposed: float
    """... those whose TTL ran out inside the window."""
    lapsed: float
    """Counts of lapsed retentions on decode, as exposed (ranks not taken out)."""
    lapsed_share: tuple[float, float] | None
    """S(TTL), turns: bounds of a 90 % interval, and of the ranks where those are not known."""
    ranks: Ranks
    read_ranks: Ranks
    reads: float | None
    """Counts of reads on prefill, as exposed. None without a prefill engine."""
    prefill_requests: float
    """Requests that prefill finished."""
    read_tokens: float
    """Prompt tokens of prefill that came from decode."""
    prompt_tokens: float
    """Prompt tokens of prefill."""
    lapses_or_declines: float
    """What prefill's counter of expired requests shows: lapsed leases, declined reads, by rank."""
    usage_p99: float | None
    starved: bool
    pool_tokens: float | None
    retained: tuple[float, float] | None
    """Tokens retained on the fullest decode engine, mean."""
    held: tuple[float, float] | None
    """Mean hold E[min(gap, TTL)], s."""
    doubt: str | None
    """Whether the TTL in force must be `longer` or `shorter` than the one taken, by what is retained."""
    cases: tuple[ttl.TtlInputs, ...]
    """The corners of what is not known; empty where it is too little."""
    read_seconds: float
    """Summed transfer times on prefill, by rank."""
    read_bytes: float
    fetch: tuple[CostPoint, ...]
    recompute: tuple[CostPoint, ...]
    unverified_reads: bool
    """Prefill's connector is stock too: it reads by count, and proves nothing."""
    ran_before: bool
    """Decode was running before the window."""
    late: float
    """Notifications of reads of KV that was freed already."""
    failed: float
    """Failed transfers, handshakes and notifications, by rank."""
    errors: float
    """Requests that prefill ended with an error."""

    @property
    def share(self) -> float | None:
        """S(TTL) as counted, in the middle of its bounds where ranks are not known."""
        if self.lapsed_share is None or self.exposed <= 0:
            return None
        if self.ranks.value is None:
            return sum(self.lapsed_share) / 2
        return min(1.0, self.lapsed / self.ranks.value / self.exposed)


# --- roles ------------------------------------------------------------------------------------------------------------


def engines(series: SeriesSet) -> list[str]:
    """Targets that expose an engine's own series."""
    names = ("vllm:request_success_total", "vllm:kv_cache_usage_perc", "vllm:generation_tokens_total")
    return sorted({s.target for name in names for s in series.named(name)})


def with_nixl(series: SeriesSet) -> set[str]:
    """Targets that transfer KV over NIXL."""
    return {s.target for s in series.named("vllm:nixl_xfer_time_seconds_count")}


def roles(series: SeriesSet, stated: Stated, labelled: dict[str, str]) -> dict[str, str]:
    """Role of each engine target, in this order: stated, labelled by kvtune's connector, told by what it counts.

    A role that labels give already is not guessed again: other vLLM engines may be scraped beside those of the
    deployment. Raises UsageError (`unknown_target`, `ambiguous_role`).
    """
    targets = engines(series)
    known = dict(labelled)
    said: dict[str, str] = {}
    for role, parts in ((Role.PREFILL.value, stated.prefill), (Role.DECODE.value, stated.decode)):
        for part in parts:
            matching = [t for t in targets if part in t]
            if not matching:
                raise UsageError(
                    "unknown_target", f"no engine among the targets has {part!r} in its name",
                    f"Engines found: {', '.join(targets) or 'none'}.",
                )  # fmt: skip
            for target in matching:
                if said.setdefault(target, role) != role:
                    raise UsageError(
                        "ambiguous_role", f"{target} is stated to be both prefill and decode",
                        "Give parts of names that fit one role only.",
                    )  # fmt: skip
    open_roles = {Role.PREFILL.value, Role.DECODE.value} - set(labelled.values()) - set(said.values())
    for target in sorted(with_nixl(series) - set(known)):
        told = _told_by_counts(series, target)
        if told in open_roles:
            known[target] = told
    return {**known, **said}


def _told_by_counts(series: SeriesSet, target: str) -> str:
    """The role its answers' lengths tell; empty where they do not."""
    finished = _of(series, "vllm:request_success_total", {target})
    answer = _of(series, "vllm:generation_tokens_total", {target}) / finished if finished > 0 else math.nan
    if PREFILL_ANSWER / 2 <= answer <= PREFILL_ANSWER:
        return Role.PREFILL.value
    return Role.DECODE.value if answer >= DECODE_ANSWER else ""


def _of(series: SeriesSet, name: str, targets: set[str], **labels: str) -> float:
    """Increments of a counter on some targets."""
    return series.increase(name, lambda s: s.target in targets, **labels) or 0.0


# --- ranks ------------------------------------------------------------------------------------------------------------


def common_divisor(counters: Sequence[Series]) -> int | None:
    """The largest number of ranks that (nearly) all increments between scrapes are multiples of; None if not known."""
    grown = [np.diff(one.unwrapped()) for one in counters]
    found = np.concatenate([step[step > 0] for step in grown]) if grown else np.zeros(0)
    if len(found) < MIN_STEPS or np.abs(found - np.round(found)).max() > 1e-6:
        return None
    return max(n for n in RANKS if n == 1 or float((np.round(found) % n == 0).mean()) >= SHARED)


def near_ranks(per_request: float) -> int | None:
    """The number of ranks that so many counts a request stand for."""
    return next((n for n in RANKS if abs(per_request - n) <= NEAR * n), None)


def _ranks(series: SeriesSet, stated: Stated, prefill: set[str], decode: set[str]) -> tuple[Ranks, Ranks]:
    """Ranks that count a lapse on decode, and those that count a read on prefill."""
    if stated.ranks is not None:
        return Ranks(stated.ranks, "stated"), Ranks(stated.ranks, "stated")
    reads = _of(series, "vllm:nixl_xfer_time_seconds_count", decode)
    finished = _of(series, "vllm:request_success_total", decode)
    handed_over = near_ranks(reads / finished) if finished >= MIN_STEPS else None

    def told(name: str, targets: set[str]) -> Ranks:
        divisor = common_divisor(series.named(name, lambda s: s.target in targets))
        if divisor is not None:
            return Ranks(divisor, "lapses" if "expired" in name else "reads")
        return Ranks(handed_over, "reads" if handed_over is not None else None)

    return told("vllm:nixl_num_kv_expired_reqs_total", decode), told("vllm:nixl_xfer_time_seconds_count", prefill)


# --- what is read -----------------------------------------------------------------------------------------------------


def pinned(series: SeriesSet, decode: set[str]) -> list[Series]:
    """Counters of turns whose KV decode may retain: a stop string counts here too, though it retains nothing."""
    return series.named(
        "vllm:request_success_total", lambda s: s.target in decode and s.label("finished_reason") in _FINISHED
    )


def mean_tokens(series: SeriesSet, decode: set[str]) -> float:
    """Mean tokens of a finished request on decode, prompt and answer; 0 if not known."""
    finished = _of(series, "vllm:request_success_total", decode)
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
    return sum(_of(series, name, decode) for name in names) / finished if finished > 0 else 0.0


def spread(series: SeriesSet, decode: set[str]) -> float:
    """E[n^2] over E[n]^2 of prompts on decode, from their histogram."""
    upto: dict[float, float] = {}
    for one in series.named("vllm:request_prompt_tokens_bucket", lambda s: s.target in decode):
        try:
            edge = float(one.label("le") or "nan")
        except ValueError:
            continue
        upto[edge] = upto.get(edge, 0.0) + one.increase()
    edges = sorted(e for e in upto if math.isfinite(e) and e > 0)
    if len(edges) < 2 or upto[edges[-1]] <= 0:
        return SPREAD
    high = np.array(edges)
    low = np.concatenate(([0.0], high[:-1]))
    count = np.maximum(0.0, np.diff(np.concatenate(([0.0], [upto[e] for e in edges]))))
    # uniform in each bucket
    first = float(count @ (low + high) / 2 / count.sum())
    second = float(count @ (low**2 + low * high + high**2) / 3 / count.sum())
    return max(1.0, second / first**2)


def active(series: SeriesSet, target: str, times: Floats, tokens: float) -> Floats | None:
    """What running requests of one engine hold at `times`, by their mean length (tokens); None if not exposed."""
    running = [s for s in series.named("vllm:num_requests_running") if s.target == target]
    if not running or tokens <= 0:
        return None
    total = sum((np.interp(times, one.times, one.values) for one in running), np.zeros_like(times))
    return np.asarray(total * tokens, dtype=np.float64)


def gather(
    series: SeriesSet, stated: Stated, roles_: dict[str, str], pools: dict[str, float], current_s: float,
    usage_p99: float | None, starved: bool, margin_s: float,
) -> StockInputs:  # fmt: skip
    """Reduce vLLM's series to what the advice needs. `pools`: tokens of decode's KV pools, by target."""
    start, end = series.window()
    decode = {t for t, role in roles_.items() if role == Role.DECODE}
    prefill = {t for t, role in roles_.items() if role == Role.PREFILL}
    counters = pinned(series, decode)
    ended = Ended(counters)
    turns = sum(one.increase() for one in counters)
    exposed = float(ended.exposed(np.array([current_s]))[0])
    ranks, read_ranks = _ranks(series, stated, prefill, decode)
    lapsed = _of(series, "vllm:nixl_num_kv_expired_reqs_total", decode)
    share = _share(lapsed, exposed, ranks)
    window = max(1e-9, end - start)
    base = StockInputs(
        current_s=current_s,
        window_s=window,
        roles_known=bool(decode),
        nixl=bool(decode & with_nixl(series)),
        turns=turns,
        turns_per_s=turns / window,
        exposed=exposed,
        lapsed=lapsed,
        lapsed_share=share,
        ranks=ranks,
        read_ranks=read_ranks,
        reads=_of(series, "vllm:nixl_xfer_time_seconds_count", prefill) if prefill else None,
        prefill_requests=_of(series, "vllm:request_success_total", prefill),
        read_tokens=_of(series, "vllm:prompt_tokens_by_source_total", prefill, source="external_kv_transfer"),
        prompt_tokens=_of(series, "vllm:prompt_tokens_total", prefill),
        lapses_or_declines=_of(series, "vllm:nixl_num_kv_expired_reqs_total", prefill),
        usage_p99=usage_p99,
        starved=starved,
        pool_tokens=None,
        retained=None,
        held=None,
        doubt=None,
        cases=(),
        read_seconds=_of(series, "vllm:nixl_xfer_time_seconds_sum", prefill),
        read_bytes=_of(series, "vllm:nixl_bytes_transferred_sum", prefill),
        **_costs(series, prefill, read_ranks),
        unverified_reads=not series.named("kvtune_connector_setting"),
        ran_before=ended.before,
        late=_of(series, "vllm:nixl_num_notifications_after_expiry_total", prefill | decode),
        failed=_of(series, "vllm:nixl_num_failed_transfers_total", prefill | decode),
        errors=_of(series, "vllm:request_success_total", prefill, finished_reason="error"),
    )
    return _with_memory(series, base, decode, pools, margin_s)


def _share(lapsed: float, exposed: float, ranks: Ranks) -> tuple[float, float] | None:
    """Bounds of the share of retentions that lapse: 90 %, of turns that are alike within a conversation."""
    if exposed < 1:
        return None
    fewest, most = ranks.bounds
    n, z = exposed / ttl.DESIGN_EFFECT, 1.645

    def wilson(p: float, side: int) -> float:
        middle, reach = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + (z / (2 * n)) ** 2)
        return min(1.0, max(0.0, (middle + side * reach) / (1 + z * z / n)))

    return wilson(min(1.0, lapsed / most / exposed), -1), wilson(min(1.0, lapsed / fewest / exposed), 1)


def _with_memory(
    series: SeriesSet, base: StockInputs, decode: set[str], pools: dict[str, float], margin_s: float
) -> StockInputs:
    """The fullest decode engine: what it retains, how long on average, and the corners of what is not known."""
    tokens = mean_tokens(series, decode)
    fullest = None
    for target in sorted(decode & set(pools)):
        usage = [s for s in series.named("vllm:kv_cache_usage_perc") if s.target == target]
        if not usage or not tokens:
            continue
        times = usage[0].times
        # a process that has just started has not filled up yet
        settled = times if base.ran_before else times[times >= times[0] + base.current_s]
        if not len(settled):
            continue
        used = sum((np.interp(settled, s.times, s.values) for s in usage), np.zeros_like(settled)) / len(usage)
        busy = active(series, target, settled, tokens)
        if busy is None:
            continue
        share = float(used.mean())
        if fullest is None or share > fullest[1]:
            fullest = (target, share, used * pools[target], busy)
    if fullest is None:
        return replace(base, pool_tokens=max((pools[t] for t in decode & set(pools)), default=None))
    target, _, used, busy = fullest
    pool = pools[target]
    mean_used = float(used.mean())
    active_bounds = [min(mean_used, factor * float(busy.mean())) for factor in ACTIVE_SHARE]
    retained = (mean_used - active_bounds[1], mean_used - active_bounds[0])
    rate = sum(one.increase() for one in pinned(series, {target})) / base.window_s
    known = replace(base, pool_tokens=pool, retained=retained)
    if rate <= 0 or base.lapsed_share is None:
        return known
    flow, limit = rate * tokens, base.current_s
    least, _ = base.lapsed_share
    seen = (retained[0] / flow, retained[1] / flow)
    # the mean hold is no longer than the TTL, and what lapses was held for all of it
    doubt = "longer" if seen[0] > DOUBT * limit else "shorter" if least * limit > DOUBT * seen[1] else None
    held_high = min(limit, seen[1])
    held_low = min(held_high, max(min(limit, seen[0]), least * limit))
    cases = []
    for held, busy_tokens in ((held_low, active_bounds[1]), (held_high, active_bounds[0])):
        for curve in (_chord(held, limit), _tangent(held, limit, min(least, held / limit))):
            cases.append(_case(base, curve, busy_tokens, busy, flow, tokens * spread(series, decode), pool, margin_s))
    return replace(known, held=(held_low, held_high), doubt=doubt, cases=tuple(cases))


def _chord(held_s: float, ttl_s: float) -> Survival:
    """The least that may be held at a shorter TTL: the mean hold in proportion (it is concave in the TTL)."""
    level = held_s / ttl_s
    return Survival(np.array([0.0, ttl_s]), np.array([level, level]))


def _tangent(held_s: float, ttl_s: float, lapsed: float) -> Survival:
    """The most: everything is held until the rest of the mean hold is what lapses."""
    if lapsed >= 1.0:
        return Survival(np.array([0.0, ttl_s]), np.array([1.0, 1.0]))
    bend = min(ttl_s, max(0.0, (held_s - lapsed * ttl_s) / (1.0 - lapsed)))
    edges = np.array([0.0, bend, bend + 1e-6, max(ttl_s, bend + 2e-6)])
    return Survival(edges, np.array([1.0, 1.0, lapsed, lapsed]))


def _case(
    base: StockInputs, curve: Survival, busy_tokens: float, busy: Floats, flow: float, size: float, pool: float,
    margin_s: float,
) -> ttl.TtlInputs:  # fmt: skip
    """The memory form's inputs at one corner. `size`: E[n^2] / E[n], tokens."""
    scale = busy_tokens / max(1e-9, float(busy.mean())) if busy.mean() > 0 else 0.0
    return ttl.TtlInputs(
        current_s=base.current_s,
        margin_s=margin_s,
        conversations=0.0,
        window_s=base.window_s,
        ends=base.turns,
        curves=GapCurves(curve, curve, curve, 0.0, np.full(len(curve.edges) - 1, base.exposed)),
        token_rate=flow,
        token_squared_rate=flow * size,
        mean_tokens=flow / max(1e-9, base.turns_per_s),
        pool_tokens=pool,
        usage_p99=base.usage_p99,
        active_mean=busy_tokens,
        active_variance=float(busy.var()) * scale**2,
        starved=base.starved,
        kappa=1.0,
        saving_s_per_token=None,
        useful=1.0,
        ttft_followup_s=None,
    )


def _costs(series: SeriesSet, prefill: set[str], ranks: Ranks) -> dict[str, tuple[CostPoint, ...]]:
    """Mean costs of reading back and of computing on prefill, a point a stretch of the window."""
    start, end = series.window()
    cuts = stretches(start, end, max((len(t) for t in series.scrapes.values()), default=2))

    def of(name: str, **labels: str) -> Floats:
        return steps(series.named(name, lambda s: s.target in prefill, **labels), cuts)

    def points(tokens: Floats, seconds: Floats, count: Floats) -> tuple[CostPoint, ...]:
        found = []
        for i in np.flatnonzero((count >= threshold.MIN_CLASS) & (tokens > 0) & (seconds >= 0)):
            mean = float(tokens[i] / count[i])
            found.append(CostPoint(int(i), size_label(math.ceil(mean)), mean, float(seconds[i] / count[i]),
                                   float(count[i])))  # fmt: skip
        return tuple(found)

    transfers = of("vllm:nixl_xfer_time_seconds_count")
    many = ranks.value or 1
    fetched = of("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")
    computed = of("vllm:prompt_tokens_by_source_total", source="local_compute")
    prefills = of("vllm:request_prefill_time_seconds_count")
    return {
        # ranks transfer side by side: the mean of one is the time of the read, or a little less
        "fetch": points(fetched, of("vllm:nixl_xfer_time_seconds_sum") / many, transfers / many)
        if ranks.value is not None
        else (),
        "recompute": points(computed, of("vllm:request_prefill_time_seconds_sum"), prefills),
    }


def line(points: Sequence[CostPoint]) -> Line | None:
    """A line through means of stretches; None where too few were seen, or all of about one size."""
    sizes = [p.tokens for p in points]
    if sum(p.count for p in points) < MIN_COSTS or max(sizes, default=0.0) < MIN_RANGE * min(sizes, default=1.0):
        return None
    try:
        found = fit(Arm.of(points))
    except ValueError:
        return None
    return found if found.slope > 0 else None


# --- advice -----------------------------------------------------------------------------------------------------------


def fits(inputs: StockInputs) -> tuple[float, float] | None:
    """The longest TTL that fits the pool, in the worst case and in the best (s); None where it cannot be said."""
    found = [ttl.memory_ttl(case) for case in inputs.cases]
    return (min(found), max(found)) if found else None


def advise_ttl(inputs: StockInputs) -> ttl.TtlAdvice:
    """Recommend a TTL from bounds, or say why not. It is never raised: nothing beyond the TTL in force was seen."""
    i, current = inputs, inputs.current_s
    now = digits(current)
    blank = ttl.TtlAdvice("insufficient", current, None, None, None, (), "", "", (), None, None, None, None)

    def cannot(code: str, reason: str, retry_after_s: float | None = None) -> ttl.TtlAdvice:
        return replace(blank, reason_code=code, reason=f"cannot tell: {reason}", retry_after_s=retry_after_s)

    if not i.roles_known:
        return cannot(
            "role_unknown", "no engine could be told to be decode by what it counts; say which one is (--role)"
        )
    if not i.nixl:
        return cannot("missing_series", "decode exposes no vllm:nixl_* series: it does not transfer KV over NIXL")
    if i.exposed < MIN_TURNS or i.lapsed_share is None:
        unripe = 0.0 if i.ran_before else max(0.0, current - i.window_s)
        wait = math.ceil(unripe + (MIN_TURNS - i.exposed) / i.turns_per_s) if i.turns_per_s > 0 else None
        return cannot(
            "too_few_turns",
            f"the TTL of {i.exposed:.0f} turns ran out in {i.window_s:.0f} s, need {MIN_TURNS} to say how many lapse",
            wait,
        )
    lapse = f"{_between(*i.lapsed_share)} of what is retained lapses unread after {now} s"
    unread = i.reads is not None and i.reads / i.read_ranks.bounds[0] <= ttl.NEVER_RETURNS * i.turns
    if unread and i.lapsed == 0:
        return cannot(
            "nothing_retained",
            "nothing was fetched and nothing lapsed: bidirectional_kv_xfer seems off, or the TTL in force is longer "
            f"than the {now} s taken",
        )
    if unread and i.lapsed_share[1] >= NEVER_READ:
        return replace(
            blank, status="off", reason_code="never_read", uncapped=0.0,
            reason=f"switch retention off, or make it useful: {lapse}, and prefill fetched nothing; streamed answers "
            "of vLLM 0.32 carry no reference, so a stock proxy has none to hand over (kvtune's connector and router "
            "do)",
        )  # fmt: skip
    if i.usage_p99 is None:
        return cannot("missing_series", "no usable vllm:kv_cache_usage_perc of decode, so nothing says whether it fits")
    usage = f"P99 usage {100 * i.usage_p99:.0f} %"
    short = "requests waited for KV blocks" if i.starved else usage

    def keep(code: str, reason: str, target: float | None = None, clamps: tuple[str, ...] = ()) -> ttl.TtlAdvice:
        return replace(
            blank, status="keep", recommended=current, reason_code=code, uncapped=target, clamped_by=clamps,
            reason=f"keep {now} s: {reason}",
        )  # fmt: skip

    if not (i.starved or i.usage_p99 >= ttl.POOL_SHARE):
        return keep(
            "pool_slack",
            f"the pool has room ({usage}), so holding costs nothing; {lapse}, and whether those return later is not "
            "seen",
        )
    found = fits(i)
    if found is None:
        lacking = (
            "size of decode's KV pool (vllm:cache_config_info)"
            if i.pool_tokens is None
            else "vllm:num_requests_running, or no retention as old as the TTL,"
        )
        return cannot(
            "missing_series" if i.pool_tokens is None else "window_too_short_for_ttl",
            f"the pool is short ({short}), but no usable {lacking} was seen",
            None if i.pool_tokens is None else math.ceil(current),
        )
    if i.doubt is not None:
        return cannot(
            "ttl_doubtful",
            f"the pool is short ({short}), but what is retained tells that the TTL in force is {i.doubt} than {now} s; "
            "state it (--current-ttl)",
        )
    worst, best = found
    bounds = f"at most {digits(best)} s fit even in the best case, at least {digits(worst)} s in the worst"
    if worst >= current:
        return keep(
            "pressure_not_from_retention",
            f"the pool is short ({short}), but what is retained fits at {now} s even in the worst case; look at the "
            "active requests",
            worst,
        )
    if best > (1 - ttl.MIN_CHANGE) * current:
        return replace(
            cannot(
                "bounds_too_wide",
                f"the pool is short ({short}), but stock series do not tell retained from active KV well enough: "
                f"between {digits(worst)} and {digits(best)} s fit; kvtune's connector on decode would tell",
            ),
            interval=(worst, min(best, current)), memory_s=None,
        )  # fmt: skip
    if best < ttl.MIN_TTL_S:
        clamps = ("memory", "floor")
        if i.starved:
            return replace(
                blank, status="off", reason_code="does_not_fit", uncapped=best, clamped_by=clamps,
                reason=f"switch retention off, or give decode more KV: {short}, and not even {ttl.MIN_TTL_S:g} s fit "
                "in the best case",
            )  # fmt: skip
        return keep(
            "floor_does_not_fit",
            f"the pool is short ({short}), but not even {ttl.MIN_TTL_S:g} s fit in the best case; give decode more KV, "
            "or switch retention off once requests wait",
            best,
            clamps,
        )
    target = math.floor(best / ttl.STEP_S) * ttl.STEP_S
    return replace(
        blank, status="change", recommended=target, interval=(min(worst, target), target), uncapped=best,
        clamped_by=("memory",), reason_code="pool_pressure", memory_s=best,
        reason=f"{now} -> {target:.0f} s: the pool is short ({short}); {bounds}. {lapse[0].upper()}{lapse[1:]}",
    )  # fmt: skip


def advise_threshold(current: float, inputs: StockInputs | None) -> threshold.ThresholdAdvice:
    """What can be said of a stock prefill's threshold: that it cannot be said, and what would change that."""
    fetch, recompute = (line(inputs.fetch), line(inputs.recompute)) if inputs is not None else (None, None)
    seen = ""
    if fetch is not None and recompute is not None:
        seen = (
            f" (means of stretches: a transfer {1000 * fetch.intercept:.1f} ms + {1e6 * fetch.slope:.1f} us a token, "
            f"computing {1e6 * recompute.slope:.1f} us a token)"
        )
    return threshold.ThresholdAdvice(
        "unidentifiable", current, None, None, None, (), NEVER_IDENTIFIABLE,
        "not identifiable: vLLM's series do not tell costs by size, nor what stayed below the threshold"
        f"{seen}; kvtune's connector on prefill would (kvtune_path_*, kvtune_decisions_total)",
        (), recompute, fetch, None, None, None,
    )  # fmt: skip


def _between(low: float, high: float) -> str:
    if high - low < 0.002:
        return f"{100 * high:.1f} %"
    return f"{100 * low:.1f} to {100 * high:.1f} %"


# --- what the report says about it ------------------------------------------------------------------------------------


def facts(i: StockInputs) -> dict[str, Any]:
    """The `stock` member of the evidence."""
    reads = None if i.reads is None else [i.reads / i.read_ranks.bounds[1], i.reads / i.read_ranks.bounds[0]]
    return {
        "ranks": {"lapses": i.ranks.value, "lapses_from": i.ranks.source, "reads": i.read_ranks.value,
                  "reads_from": i.read_ranks.source},
        "turns_exposed": i.exposed,
        "lapsed_share": i.share,
        "lapsed_share_bounds": None if i.lapsed_share is None else list(i.lapsed_share),
        "prefill_requests": i.prefill_requests,
        "reads": reads,
        "read_share": None if reads is None or i.prefill_requests <= 0
        else [min(1.0, r / i.prefill_requests) for r in reads],
        # reads without tokens: the series that counts them is not there, or does not count them
        "read_token_share": None if i.prompt_tokens <= 0 or (i.reads and not i.read_tokens)
        else i.read_tokens / i.prompt_tokens,
        "lapses_or_declines_on_prefill": i.lapses_or_declines,
        "retained_tokens": None if i.retained is None else list(i.retained),
        "held_s": None if i.held is None else list(i.held),
        "fits_s": (found := fits(i)) and [min(f, ttl.MAX_TTL_S) for f in found],
        "transfer_mean_s": i.read_seconds / i.reads if i.reads else None,
        "transfer_bytes_per_s": i.read_bytes / i.read_seconds if i.read_seconds > 0 else None,
        "read_bytes_per_token": i.read_bytes / i.read_tokens if i.read_tokens > 0 else None,
    }  # fmt: skip


def checks(i: StockInputs) -> list[tuple[str, str, str]]:
    """Code, level and message of what the reader should know."""
    unknown = f"{NOT_KNOWN}; {NOT_KNOWN_OF_PREFILL}" if i.unverified_reads else NOT_KNOWN
    found = [("stock_mode", "info", f"no kvtune series of decode or of a router, so not known: {unknown}")]
    if i.unverified_reads and i.reads != 0:
        found.append((
            "unverified_reuse", "warning",
            "stock reads back by count and proves nothing: where a client rewrites its history, the answer is wrong "
            "with HTTP 200, and no series shows it",
        ))  # fmt: skip
    if i.roles_known and i.nixl and i.ranks.value is None:
        found.append((
            "ranks_unknown", "warning",
            "NIXL counts once a tensor parallel rank, and how many there are could not be told: figures are bounds; "
            "state it (--tp)",
        ))  # fmt: skip
    elif None not in (i.ranks.value, i.read_ranks.value) and i.ranks.value != i.read_ranks.value:
        found.append((
            "ranks_differ", "info",
            f"a lapse counts {i.ranks.value} times, a read {i.read_ranks.value} times: prefill and decode seem to "
            "differ in tensor parallel size",
        ))  # fmt: skip
    if i.doubt is not None:
        found.append((
            "ttl_doubtful", "warning",
            f"what is retained tells that the TTL in force is {i.doubt} than the {digits(i.current_s)} s taken",
        ))  # fmt: skip
    if i.lapses_or_declines:
        found.append((
            "lapses_or_declines", "warning",
            f"prefill counted {i.lapses_or_declines:.0f} expired requests (once a rank): leases that decode let lapse, "
            "and reads declined as too late; stock does not tell which",
        ))  # fmt: skip
    if i.errors:
        found.append((
            "prefill_errors", "warning",
            f"prefill ended {i.errors:.0f} requests with an error, as it does where a read fails or is declined",
        ))  # fmt: skip
    if i.failed:
        found.append(("failed_reads", "warning", f"{i.failed:.0f} transfers, handshakes or notifications failed"))
    if i.late:
        found.append((
            "late_reads", "error",
            f"{i.late:.0f} reads finished after the KV had been freed: what they read may have been another request's",
        ))  # fmt: skip
    if i.reads:
        found.append((
            "transfer_only", "info",
            "transfer times leave out handshake, queueing and wake-up: fetching may cost twice as much",
        ))  # fmt: skip
    return found


def explain(i: StockInputs) -> list[str]:
    """Formulas and numbers of the bounds."""
    pool = "not known yet" if i.pool_tokens is None else f"{i.pool_tokens:.4g} tokens"
    return [
        "S(TTL) = lapses on decode / ranks / turns whose TTL ran out in the window; turns count where they finished as "
        "stop or length",
        f"lapses {i.lapsed:.4g}, ranks {i.ranks.value or 'not known'}, turns {i.exposed:.4g}; "
        f"bounds are 90 %, as if {ttl.DESIGN_EFFECT:g} turns told as much as one",
        f"retained = usage x pool - active; active = running requests x mean length, within factors of "
        f"{ACTIVE_SHARE[0]:g} and {ACTIVE_SHARE[1]:g}",
        f"pool {pool}; retained {_pair(i.retained, ' tokens')}; mean hold = retained / (turns/s x mean length): "
        f"{_pair(i.held, ' s')}",
        "mean hold H(T) at a shorter T: at least H(TTL) x T / TTL, at most min(T, H(TTL) - S(TTL) x (TTL - T))",
        f"memory: the longest T with active + m + z x sqrt(s2 + active's variance) <= {ttl.POOL_SHARE} x pool, "
        f"z = {ttl.Z_P99}, in the worst and in the best corner: {_pair(fits(i), ' s')}",
    ]


def _pair(pair: tuple[float, float] | None, unit: str) -> str:
    return "not known" if pair is None else f"{pair[0]:.4g} to {pair[1]:.4g}{unit}"
