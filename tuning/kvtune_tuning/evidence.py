"""From raw series to what the two decisions need, and to what the report says about its own evidence."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from kvtune_connector.policy import DEFAULT_THRESHOLD_TOKENS, DEFAULT_TTL_S, EXPIRY_MARGIN_S
from kvtune_telemetry.buckets import GAP_SECONDS, SIZE_EDGES
from kvtune_telemetry.vocabulary import Decision, Outcome, Path, Reason, Role
from kvtune_tuning import threshold, ttl
from kvtune_tuning.errors import TuningError
from kvtune_tuning.gaps import GapCurves, Survival, mean_held, survival
from kvtune_tuning.lines import CostPoint, saving_per_token
from kvtune_tuning.series import Floats, Series, SeriesSet
from kvtune_tuning.wording import digits

MAX_STRETCHES = 30
"""Stretches the window is cut into for cost points."""
KAPPA_RANGE = (0.25, 4.0)
"""Beyond it observed and predicted retention are about different things, and neither is believed."""
MIN_PREDICTED_SHARE = 0.002
"""Share of the pool that must be predicted as retained before a correction factor means anything."""


MAX_USAGE = 1.5
"""Above it a usage is no share of the pool. A little over 1 may be rounding."""
MAX_GAUGE = 1e15
"""No pool, no setting and no number of requests is larger."""
MAX_AHEAD_S = 10.0
"""Scrapes further ahead of the wall clock are in the time of a simulation."""


@dataclass(frozen=True, slots=True)
class Check:
    """Something the reader should know. `level` is ok, info, warning or error."""

    code: str
    level: str
    message: str


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting in force: its value, whether that was only assumed, and whether engines differ."""

    value: float
    assumed: bool
    values: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Asked:
    """What the routers ask of decode for each turn, and the most that decode grants. Seconds."""

    seconds: float
    most_s: float


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that was learnt from the series."""

    start_s: float
    end_s: float
    facts: dict[str, object]
    checks: tuple[Check, ...]
    ttl: ttl.TtlInputs
    threshold: threshold.ThresholdInputs
    ttl_setting: Setting
    threshold_setting: Setting
    missing_router: bool
    asked: Asked | None = None
    """Set where the routers ask for a retention of their own."""
    model_time: bool = False
    """Times are those of a scaled simulation, not the wall clock's."""
    explain: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class _Pools:
    """Decode engines: targets, pool of each (tokens), share of retention each takes."""

    targets: tuple[str, ...]
    tokens: dict[str, float]
    shares: dict[str, float]

    def tightest(self) -> str | None:
        """The engine with the least room for its share."""
        known = [t for t in self.targets if t in self.tokens]
        return max(known, key=lambda t: self.shares.get(t, 0.0) / self.tokens[t], default=None)


def gather(series: SeriesSet) -> Evidence:
    """Reduce raw series to evidence.

    Raises TuningError: `no_kvtune_series` where nothing of kvtune's is there, `window_too_short` with one scrape only.
    """
    start, end = _window(series)
    series, implausible, left_out = _plausible(series)
    roles = _roles(series)
    routers = sorted({s.target for s in series.named("kvtune_turns_total")})
    checks: list[Check] = []
    ttl_setting, asked = _ttl_setting(series)
    threshold_setting = _setting(series, "kv_recompute_threshold", Role.PREFILL, float(DEFAULT_THRESHOLD_TOKENS))
    margin = _setting(series, "expiry_margin_seconds", Role.PREFILL, EXPIRY_MARGIN_S)
    pools = _pools(series, roles)
    curves, tokens_ended, extrapolated = _curves(series)
    window = max(1e-9, end - start)
    rates = {name: (series.increase(name) or 0.0) / window for name in _ENDS}
    mean_tokens = rates[_ENDS[1]] / rates[_ENDS[0]] if rates[_ENDS[0]] > 0 else 0.0
    tightest = pools.tightest()
    share = pools.shares.get(tightest, 1.0) if tightest is not None else 1.0 / max(1, len(pools.targets))
    pool = pools.tokens.get(tightest) if tightest is not None else None
    kappa, held_observed, held_predicted = _kappa(series, pools, curves.tokens, tokens_ended, ttl_setting.value)
    usage = _usage(series, roles, pools)
    starved, preempted = _starved(series, roles, pools, mean_tokens)
    fetch, recompute = _points(series, Path.FETCH, start, end), _points(series, Path.RECOMPUTE, start, end)
    saving = saving_per_token(recompute, fetch)
    useful, useful_known = _useful(series, ttl_setting.value - margin.value)
    ttft = _ttft(series)
    new_conversations = series.increase("kvtune_conversations_total") or 0.0
    conversations = new_conversations + _alive_at_start(series)
    ttl_inputs = ttl.TtlInputs(
        current_s=ttl_setting.value,
        margin_s=margin.value,
        conversations=conversations,
        window_s=window,
        ends=rates[_ENDS[0]] * window,
        curves=curves,
        token_rate=rates[_ENDS[1]] * share,
        token_squared_rate=rates[_ENDS[2]] * share,
        mean_tokens=mean_tokens,
        pool_tokens=pool,
        usage_p99=usage.p99,
        active_mean=usage.active_mean,
        active_variance=usage.active_variance,
        starved=starved,
        kappa=kappa if kappa is not None else 1.0,
        saving_s_per_token=saving,
        useful=useful,
        ttft_followup_s=ttft,
    )
    threshold_inputs = threshold.ThresholdInputs(
        current=threshold_setting.value,
        window_s=window,
        fetch=fetch,
        recompute=recompute,
        fetched=_fetched(series, threshold_setting.value),
        below=_below(series, threshold_setting.value),
        ttft_followup_s=ttft,
    )
    restarts = _restarts(series)
    checks += implausible
    checks += _setting_checks(series, ttl_setting, threshold_setting, margin, asked)
    checks += _target_checks(series, routers, roles, pools)
    checks += _event_checks(series, restarts, start, end)
    if extrapolated:
        checks.append(Check(
            "stationarity", "info",
            "the router was running before the window: turns that ended before it are taken to have come at the "
            "window's rate",
        ))  # fmt: skip
    if curves.horizon_s < ttl_setting.value - margin.value and curves.returned:
        checks.append(Check(
            "short_window", "warning",
            f"pauses longer than {curves.horizon_s:.0f} s could not be observed yet; beyond that, figures are bounds",
        ))  # fmt: skip
    if kappa is None:
        checks.append(Check(
            "kappa", "info", "retained tokens could not be compared with the prediction; no correction is applied",
        ))  # fmt: skip
    elif not 0.5 <= kappa <= 2.0:
        checks.append(Check(
            "kappa", "warning",
            f"decode retains {kappa:.2f} times what the pauses predict; the advice is scaled by that, look for "
            "the cause (turns that leave no reference, or retention released early)",
        ))  # fmt: skip
    if saving is None:
        checks.append(Check(
            "saving_unknown", "info", "costs of fetching and computing are not known yet: TTLs are not capped by value",
        ))  # fmt: skip
    facts: dict[str, object] = {
        "targets": {
            "router": routers,
            "prefill": sorted(t for t, r in roles.items() if r == Role.PREFILL),
            "decode": list(pools.targets),
        },
        "scrapes": int(sum(len(t) for t in series.scrapes.values())),
        "scrape_rounds": max(len(t) for t in series.scrapes.values()),
        "scraped_targets": len(series.scrapes),
        "scrape_interval_s": _interval(series),
        "series": len(series.series),
        "samples": series.samples(),
        "samples_dropped": series.not_finite + left_out,
        "models": sorted({m for s in series.named("kvtune_connector_setting") if (m := s.label("model_name"))}),
        "turns": series.increase("kvtune_turns_total") or 0.0,
        "turns_by_outcome": _by(series, "kvtune_turns_total", "outcome"),
        "conversations": conversations,
        "conversations_new": new_conversations,
        "gaps": curves.returned,
        "turn_ends": rates[_ENDS[0]] * window,
        "turns_given_up": series.increase("kvtune_turns_given_up_total"),
        "turn_ends_per_s": rates[_ENDS[0]],
        "tokens_per_turn_end": mean_tokens or None,
        "gap_horizon_s": curves.horizon_s,
        "extrapolated_before_window": extrapolated,
        "restarts": restarts,
        "settings": {
            ttl.SETTING: _stated(ttl_setting),
            threshold.SETTING: _stated(threshold_setting),
            "expiry_margin_seconds": _stated(margin),
        },
        "pool_tokens": pool,
        "pools_differ": len({pools.tokens.get(t) for t in pools.targets}) > 1,
        "decode_engines": len(pools.targets),
        "kv_usage_p99": usage.p99,
        "active_tokens_mean": usage.active_mean,
        "active_tokens_sd": math.sqrt(usage.active_variance),
        "waited_for_kv": starved,
        "preemptions": preempted,
        "retained_tokens_mean": held_observed,
        "retained_tokens_predicted": held_predicted,
        "kappa": kappa,
        "holdout_ratio": _holdout(series),
        "useful_share": useful if useful_known else None,
        "saving_us_per_token": None if saving is None else 1e6 * saving,
        "ttft_followup_mean_s": ttft,
        "cost_observations": {
            "fetch": sum(p.count for p in fetch),
            "recompute": sum(p.count for p in recompute),
        },
    }
    return Evidence(
        start, end, facts, tuple(checks), ttl_inputs, threshold_inputs, ttl_setting, threshold_setting, not routers,
        asked, series.ahead_s > MAX_AHEAD_S,
    )  # fmt: skip


_COUNTERS = ("_total", "_bucket", "_count", "_sum")
_ENDS = ("kvtune_turn_ends_total", "kvtune_turn_end_tokens_total", "kvtune_turn_end_tokens_squared_total")
_GAPS = ("kvtune_turn_gap_seconds_bucket", "kvtune_turn_gap_tokens_bucket", "kvtune_turn_gap_tokens_squared_bucket")


def _window(series: SeriesSet) -> tuple[float, float]:
    if not any(s.name.startswith("kvtune_") for s in series.series):
        raise TuningError(
            "no_kvtune_series",
            "none of the sources exposes kvtune_* series",
            "Scrape the router's metrics port and both engines; engines need the kvtune connector.",
        )
    start, end = series.window()
    if end <= start:
        raise TuningError(
            "window_too_short",
            "only one scrape: counters need two",
            "Record for longer, or give a longer --window.",
        )
    return start, end


def _plausible(series: SeriesSet) -> tuple[SeriesSet, list[Check], int]:
    """The series without values that cannot be, what to say about those, and how many they are.

    Nothing that is read can be negative, a usage is a share, and no gauge is astronomic.
    """
    kept = []
    dropped: dict[tuple[str, str], list[float]] = {}
    for one in series.series:
        most = math.inf
        if one.name == "vllm:kv_cache_usage_perc":
            most = MAX_USAGE
        elif not one.name.endswith(_COUNTERS):
            most = MAX_GAUGE
        good = (one.values >= 0) & (one.values <= most)
        if not good.all():
            key = (one.label("setting") or one.name, one.target)
            dropped.setdefault(key, []).extend(float(v) for v in one.values[~good])
            one = Series(one.name, one.labels, one.target, one.times[good], one.values[good])
        if len(one.times):
            kept.append(one)
    if not dropped:
        return series, [], 0
    checks = [
        Check(
            "implausible",
            "warning",
            f"{target}: {len(values)} value(s) of {name} cannot be, e.g. {values[0]:.3g}; they were left out",
        )
        for (name, target), values in sorted(dropped.items())
    ]
    rest = SeriesSet(tuple(kept), series.scrapes, series.not_finite, series.notes, series.ahead_s)
    return rest, checks, sum(len(values) for values in dropped.values())


def _holdout(series: SeriesSet) -> float | None:
    """Share of conversations that the routers hold out from reuse."""
    found = series.named("kvtune_router_setting", setting="holdout_ratio")
    return max(float(s.values[-1]) for s in found) if found else None


def _roles(series: SeriesSet) -> dict[str, str]:
    """Role of each engine target, from the label its connector series carry."""
    roles: dict[str, str] = {}
    for one in series.series:
        role = one.label("role")
        # the router's engine series carry a role too, but that is the role of another target
        if (
            role in (Role.PREFILL, Role.DECODE)
            and one.name.startswith("kvtune_")
            and one.label("model_name") is not None
        ):
            roles[one.target] = str(role)
    return roles


def _setting(series: SeriesSet, name: str, role: Role, default: float) -> Setting:
    found = series.named("kvtune_connector_setting", setting=name, role=role.value)
    if not found:
        return Setting(default, True)
    values = tuple(sorted({float(s.values[-1]) for s in found}))
    counts = {v: sum(float(s.values[-1]) == v for s in found) for v in values}
    return Setting(max(values, key=lambda v: (counts[v], v)), False, values)


def _ttl_setting(series: SeriesSet) -> tuple[Setting, Asked | None]:
    """The retention in force, and what the routers ask of decode for each turn (None where they ask nothing)."""
    own = _setting(series, ttl.SETTING, Role.DECODE, DEFAULT_TTL_S)
    asking = series.named("kvtune_router_setting", setting="retain_seconds")
    if not asking or not all(s.values[-1] > 0 for s in asking):
        return own, None
    asked = sorted({float(s.values[-1]) for s in asking})
    most = _setting(series, "max_retain_seconds", Role.DECODE, own.value)
    kept = tuple(sorted({min(one, most.value) for one in asked}))
    return Setting(kept[-1], False, kept), Asked(asked[-1], most.value)


def _stated(setting: Setting) -> dict[str, object]:
    return {"value": setting.value, "assumed": setting.assumed}


def _pools(series: SeriesSet, roles: dict[str, str]) -> _Pools:
    targets = tuple(sorted(t for t, role in roles.items() if role == Role.DECODE))
    tokens: dict[str, float] = {}
    for target in targets:
        stated = [s for s in series.named("kvtune_connector_setting", setting="kv_pool_tokens") if s.target == target]
        if stated and stated[-1].values[-1] > 0:
            tokens[target] = sum(float(s.values[-1]) for s in stated)
            continue
        total = 0.0
        for info in series.named("vllm:cache_config_info"):
            if info.target == target:
                try:
                    block, blocks = float(info.label("block_size") or ""), float(info.label("num_gpu_blocks") or "")
                except ValueError:
                    continue
                total += block * blocks if block > 0 and blocks > 0 else 0.0
        if 0 < total <= MAX_GAUGE:
            tokens[target] = total
    retained = {
        t: sum(s.increase() for s in series.named("kvtune_retention_tokens_total") if s.target == t) for t in targets
    }
    total = sum(retained.values())
    shares = {t: retained[t] / total if total > 0 else 1.0 / len(targets) for t in targets}
    return _Pools(targets, tokens, shares)


def _alive_at_start(series: SeriesSet) -> float:
    """Conversations that were going on when the window began.

    The router remembers ended ones for long, decode retains only what may return: the smaller of the two is taken.
    """
    remembered = sum(float(s.values[0]) for s in series.named("kvtune_conversations_remembered"))
    retained = sum(float(s.values[0]) for s in series.named("kvtune_retained_requests"))
    return max(0.0, min(remembered, retained))


class _Ended:
    """Turns (or weights) that had ended by a time, over all routers, each extrapolated to before its first scrape.

    Before a router's first sample its counter is run back at its own rate in the window, but never below zero: a
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
        """Those whose return after `lags` seconds falls into the window of their own router."""
        parts = (self._at(p, p[4] - lags) - self._at(p, p[3] - lags) for p in self._parts)
        return np.asarray(sum(parts, np.zeros_like(lags)), dtype=np.float64)


def _curves(series: SeriesSet) -> tuple[GapCurves, _Ended, bool]:
    """The survival curves, the tokens that ended over time, and whether turns ended before the window."""
    ended = [_Ended(series.named(name)) for name in _ENDS]
    counts = [_bucket_counts(series, name) for name in _GAPS]
    edges = np.asarray(GAP_SECONDS, dtype=np.float64)
    turns, exposure = survival(edges, counts[0][:-1], ended[0].exposed)
    used = len(exposure)
    tokens, _ = survival(edges, counts[1][:-1], ended[1].exposed, used)
    squares, _ = survival(edges, counts[2][:-1], ended[2].exposed, used)
    curves = GapCurves(turns, tokens, squares, float(counts[0].sum()), exposure)
    return curves, ended[1], ended[0].before


def _bucket_counts(series: SeriesSet, name: str) -> Floats:
    """Increments of each bucket alone, shape (edges + 1,). Buckets of another layout are put where they fit."""
    edges = (*GAP_SECONDS, math.inf)
    upto = np.zeros(len(edges))
    for one in series.named(name):
        try:
            edge = float(one.label("le") or "nan")
        except ValueError:
            continue
        for i, mine in enumerate(edges):
            if math.isclose(edge, mine, rel_tol=1e-6) or edge == mine:
                upto[i] += one.increase()
    return np.asarray(np.maximum(0.0, np.diff(np.concatenate(([0.0], upto)))), dtype=np.float64)


def _summed(series: list[Series], times: Floats) -> Floats:
    """Sum of gauges at `times`, each held until its next sample, and not counted outside what was scraped of it."""
    total = np.zeros_like(times)
    for one in series:
        index = np.searchsorted(one.times, times, side="right") - 1
        total += np.where(index >= 0, one.values[np.maximum(index, 0)], 0.0)
    return total


def _kappa(
    series: SeriesSet, pools: _Pools, curve: Survival, ended: _Ended, ttl_s: float
) -> tuple[float | None, float | None, float | None]:
    """Observed over predicted retained tokens of all decode engines, with both means; None where not comparable."""
    gauges = [s for s in series.named("kvtune_retained_tokens") if s.target in pools.targets]
    if not gauges:
        return None, None, None
    first = max(float(s.times[0]) for s in gauges)
    times = np.unique(np.concatenate([s.times for s in gauges]))
    times = times[times >= first]
    observed = float(_summed(gauges, times).mean())
    predicted = float(mean_held(curve, ended.by, times, ttl_s).mean())
    pool = sum(pools.tokens.values())
    if not predicted > MIN_PREDICTED_SHARE * pool or observed <= 0:
        return None, observed, predicted
    return min(max(observed / predicted, KAPPA_RANGE[0]), KAPPA_RANGE[1]), observed, predicted


@dataclass(frozen=True, slots=True)
class _Usage:
    p99: float | None
    active_mean: float | None
    active_variance: float


def _usage(series: SeriesSet, roles: dict[str, str], pools: _Pools) -> _Usage:
    """Usage of the fullest decode engine, and what requests in progress hold on the busiest one."""
    by_target: dict[str, list[Series]] = {}
    for one in series.named("vllm:kv_cache_usage_perc"):
        if roles.get(one.target) == Role.DECODE:
            by_target.setdefault(one.target, []).append(one)
    p99 = [float(np.quantile(one.values, 0.99)) for ranks in by_target.values() for one in ranks]
    active: list[Floats] = []
    for target, ranks in by_target.items():
        pool = pools.tokens.get(target)
        if pool is None:
            continue
        retained = [s for s in series.named("kvtune_retained_tokens") if s.target == target]
        times = ranks[0].times
        # data-parallel ranks of one target have a series and an equal share of the pool each
        used = sum((np.interp(times, one.times, one.values) for one in ranks), np.zeros_like(times)) / len(ranks)
        active.append(np.maximum(0.0, used * pool - _summed(retained, times)))
    if not active:
        return _Usage(max(p99, default=None), None, 0.0)
    means = [float(a.mean()) for a in active]
    worst = int(np.argmax(means))
    return _Usage(max(p99), means[worst], float(active[worst].var()))


def _starved(series: SeriesSet, roles: dict[str, str], pools: _Pools, mean_tokens: float) -> tuple[bool, float]:
    """Whether decode was short of KV blocks, and its preemptions.

    Waiting alone says nothing: requests also wait for KV that is on its way. It counts while the pool could not have
    taken another request of ordinary size, and in more than 1 % of the scrapes.
    """
    preempted = series.increase("vllm:num_preemptions_total", lambda s: roles.get(s.target) == Role.DECODE) or 0.0
    short = total = 0
    for waiting in series.named("vllm:num_requests_waiting"):
        if roles.get(waiting.target) != Role.DECODE:
            continue
        usage = [
            s
            for s in series.named("vllm:kv_cache_usage_perc")
            if s.target == waiting.target and s.label("engine") == waiting.label("engine")
        ]
        pool = pools.tokens.get(waiting.target)
        if not usage or not pool:
            continue
        full = max(0.5, min(ttl.POOL_SHARE, 1.0 - 1.5 * mean_tokens / pool))
        at = np.interp(waiting.times, usage[0].times, usage[0].values)
        short += int(((waiting.values > 0) & (at >= full)).sum())
        total += len(waiting.times)
    return preempted > 0 or (total > 0 and short > max(1.0, 0.01 * total)), preempted


def _seen_by(counter: Series, times: Floats) -> Floats:
    """The unwrapped counter as last scraped by `times`: an observation is in one stretch, never divided between two."""
    index = np.searchsorted(counter.times, times, side="right") - 1
    return counter.unwrapped()[np.maximum(index, 0)]


def _points(series: SeriesSet, path: Path, start: float, end: float) -> tuple[CostPoint, ...]:
    """Mean costs by size class and stretch of the window, summed over engines first so that replicas add up."""
    n_scrapes = max((len(t) for t in series.scrapes.values()), default=2)
    cuts = np.linspace(start, end, max(2, min(MAX_STRETCHES + 1, n_scrapes)))

    def steps(name: str, size: str) -> Floats:
        found = series.named(name, path=path.value, size=size)
        return np.asarray(sum((np.diff(_seen_by(s, cuts)) for s in found), np.zeros(len(cuts) - 1)), dtype=np.float64)

    points = []
    for size in (*map(str, SIZE_EDGES), "inf"):
        count = steps("kvtune_path_observations_total", size)
        if not count.any():
            continue
        tokens, seconds = steps("kvtune_path_tokens_total", size), steps("kvtune_path_seconds_total", size)
        for stretch in np.flatnonzero(count > 0.5):
            mean = float(tokens[stretch] / count[stretch])
            cost = float(seconds[stretch] / count[stretch])
            if mean > 0 and cost >= 0:
                points.append(CostPoint(int(stretch), size, mean, cost, float(count[stretch])))
    return tuple(points)


def _fetched(series: SeriesSet, current: float) -> tuple[threshold.Sizes, ...]:
    found = []
    low = 0.0
    for size in (*map(str, SIZE_EDGES), "inf"):
        count = series.increase("kvtune_path_observations_total", path=Path.FETCH.value, size=size) or 0.0
        tokens = series.increase("kvtune_path_tokens_total", path=Path.FETCH.value, size=size) or 0.0
        high = float(size) if size != "inf" else max(2 * low, 2 * tokens / count if count else 0.0)
        if count > 0:
            mean = tokens / count
            found.append(threshold.Sizes(min(max(low, current - 1), mean), max(high, mean), mean, count))
        low = high
    return tuple(found)


def _below(series: SeriesSet, current: float) -> threshold.Sizes | None:
    decision, reason = Decision.RECOMPUTE.value, Reason.BELOW_THRESHOLD.value
    count = series.increase("kvtune_decisions_total", decision=decision, reason=reason) or 0.0
    tokens = series.increase("kvtune_decision_tokens_total", decision=decision, reason=reason) or 0.0
    if count <= 0 or tokens <= 0:
        return None
    mean = tokens / count
    # log-uniform between low and the threshold: spread about the mean that was seen
    low = max(1.0, min(mean, mean**2 / max(current, mean)))
    return threshold.Sizes(low, max(current, mean), mean, count)


def _useful(series: SeriesSet, usable_s: float) -> tuple[float, bool]:
    """Share of the tokens of in-time returns that was really fetched: the rest P held itself, or could not use."""
    fetched = series.increase("kvtune_decision_tokens_total", decision=Decision.FETCH.value)
    counts = _bucket_counts(series, "kvtune_turn_gap_tokens_bucket")
    in_time = float(counts[:-1][np.asarray(GAP_SECONDS) <= usable_s].sum())
    if fetched is None or in_time <= 0 or fetched <= 0:
        return 1.0, False
    return min(1.0, fetched / in_time), True


def _ttft(series: SeriesSet) -> float | None:
    """Mean TTFT of follow-up turns that were answered."""

    def answered(s: Series) -> bool:
        return s.label("outcome") != Outcome.ERROR

    total = series.increase("kvtune_turn_ttft_seconds_sum", answered, turn="followup")
    count = series.increase("kvtune_turn_ttft_seconds_count", answered, turn="followup")
    return total / count if total is not None and count else None


def _by(series: SeriesSet, name: str, label: str) -> dict[str, float]:
    sums: dict[str, float] = {}
    for one in series.named(name):
        value = one.label(label)
        increase = one.increase()
        if value is not None and increase > 0:
            sums[value] = sums.get(value, 0.0) + increase
    return dict(sorted(sums.items()))


def _interval(series: SeriesSet) -> float | None:
    steps = [float(np.median(np.diff(t))) for t in series.scrapes.values() if len(t) > 1]
    return max(steps) if steps else None


def _restarts(series: SeriesSet) -> dict[str, int]:
    """Restarts by target: times at which any of its counters went backwards."""
    times: dict[str, set[float]] = {}
    for one in series.series:
        if one.name.endswith(_COUNTERS):
            for when in one.resets():
                times.setdefault(one.target, set()).add(float(when))
    return {target: len(found) for target, found in sorted(times.items())}


def _setting_checks(
    series: SeriesSet, ttl_now: Setting, tau: Setting, margin: Setting, asked: Asked | None
) -> list[Check]:
    checks = []
    if asked is not None:
        checks.append(Check(
            "asked_by_router", "info",
            f"the router asks decode to retain each turn for {digits(asked.seconds)} s (--retain): "
            f"{digits(ttl_now.value)} s is in force",
        ))  # fmt: skip
    for name, setting, unit in ((ttl.SETTING, ttl_now, " s"), (threshold.SETTING, tau, " tokens")):
        if setting.assumed:
            checks.append(Check(
                "assumed_setting", "warning",
                f"{name} is not exposed; vLLM's default {digits(setting.value)}{unit} is assumed",
            ))  # fmt: skip
        elif len(setting.values) > 1:
            listed = ", ".join(digits(v) for v in setting.values)
            checks.append(Check(
                "mixed_settings", "warning",
                f"{name} differs between engines ({listed}); {digits(setting.value)} is taken",
            ))  # fmt: skip
        changed = [s for s in series.named("kvtune_connector_setting", setting=name) if np.ptp(s.values) > 0]
        if changed:
            checks.append(Check(
                "setting_changed", "warning", f"{name} changed inside the window; use a --window after the change",
            ))  # fmt: skip
    off = [s for s in series.named("kvtune_connector_setting", setting="bidirectional_kv_xfer") if s.values[-1] == 0]
    if off:
        checks.append(Check(
            "reuse_off", "warning", f"bidirectional_kv_xfer is off on {', '.join(sorted({s.target for s in off}))}",
        ))  # fmt: skip
    defaults = series.named("kvtune_router_setting", setting="default_ttl_seconds")
    if defaults:
        highest = max(float(s.values[-1]) for s in defaults)
        if ttl_now.assumed:
            checks.append(Check(
                "router_ttl", "info",
                f"router TTL {digits(highest)} s was not compared with decode's, which is not exposed",
            ))  # fmt: skip
        elif highest > ttl_now.value:
            checks.append(Check(
                "router_ttl", "error",
                f"the router assumes {digits(highest)} s where decode does not say, but decode keeps KV for "
                f"{digits(ttl_now.value)} s: it hands over references that have lapsed",
            ))  # fmt: skip
        else:
            checks.append(
                Check("router_ttl", "ok", f"router TTL {digits(highest)} s fits decode's {digits(ttl_now.value)} s")
            )
    margins = series.named("kvtune_router_setting", setting="margin_seconds")
    if margins and not margin.assumed:
        least = min(float(s.values[-1]) for s in margins)
        if least < margin.value:
            checks.append(Check(
                "router_margin", "warning",
                f"the router's margin {digits(least)} s is below the {digits(margin.value)} s in which prefill "
                "declines a read",
            ))  # fmt: skip
    if ttl_now.value <= margin.value:
        checks.append(Check(
            "ttl_useless", "error",
            f"a TTL of {digits(ttl_now.value)} s is used up by prefill's {digits(margin.value)} s margin: nothing can "
            "be read back",
        ))  # fmt: skip
    return checks


def _target_checks(series: SeriesSet, routers: list[str], roles: dict[str, str], pools: _Pools) -> list[Check]:
    checks = []
    if not routers:
        checks.append(Check(
            "no_router", "error", "no router series (kvtune_turns_total): pauses between turns are not known",
        ))  # fmt: skip
    for role in (Role.PREFILL, Role.DECODE):
        if role not in roles.values():
            checks.append(Check(
                f"no_{role.value}", "error", f"no {role.value} engine with the kvtune connector among the targets",
            ))  # fmt: skip
    for target in pools.targets:
        if target not in pools.tokens:
            checks.append(Check("no_pool", "warning", f"{target}: the size of the KV pool is not exposed"))
    if len(pools.targets) > 1:
        least, most = min(pools.shares.values()), max(pools.shares.values())
        if most > 1.5 * max(least, 1e-9):
            checks.append(Check(
                "unbalanced", "info",
                f"decode engines take {100 * least:.0f} to {100 * most:.0f} % of retention; "
                "the advice is for the tightest",
            ))  # fmt: skip
    models = {m for s in series.named("kvtune_connector_setting") if (m := s.label("model_name"))}
    if len(models) > 1:
        checks.append(Check(
            "mixed_models", "warning",
            f"several models in the sources ({', '.join(sorted(models))}): ask for each alone",
        ))  # fmt: skip
    return checks


def _event_checks(series: SeriesSet, restarts: dict[str, int], start: float, end: float) -> list[Check]:
    checks = []
    if restarts:
        listed = ", ".join(f"{target} ({count})" for target, count in restarts.items())
        checks.append(Check(
            "restarts", "warning",
            f"counters were reset: {listed}; increments are corrected, pauses that spanned a router's restart are lost",
        ))  # fmt: skip
    late = series.increase("kvtune_kv_late_notifications_total") or 0.0
    if late:
        checks.append(Check(
            "late_reads", "error",
            f"{late:.0f} reads finished after decode had freed the KV: what they read may have been another request's",
        ))  # fmt: skip
    declined = series.increase("kvtune_kv_reads_declined_total") or 0.0
    if declined:
        checks.append(Check(
            "declined_reads", "warning",
            f"prefill declined {declined:.0f} reads as expired: the router handed over references too late",
        ))  # fmt: skip
    failed = series.increase("kvtune_kv_reads_failed_total") or 0.0
    if failed:
        checks.append(Check("failed_reads", "warning", f"{failed:.0f} reads of KV failed and were computed instead"))
    if series.not_finite:
        checks.append(Check("not_finite", "warning", f"{series.not_finite} NaN or infinite values were ignored"))
    interval = _interval(series)
    for target, times in sorted(series.scrapes.items()):
        longest = float(np.max(np.diff(times))) if len(times) > 1 else end - start
        missing = max(float(times[0]) - start, end - float(times[-1]), longest)
        if interval and missing > max(5 * interval, 30.0):
            checks.append(Check("scrape_gap", "warning", f"{target}: no scrape for {missing:.0f} s inside the window"))
    checks.extend(Check("source", "info", note) for note in series.notes)
    checks.append(Check(
        "failure_policy", "info",
        "set kv_load_failure_policy to recompute on prefill: its default fails a turn whose read fails or is declined",
    ))  # fmt: skip
    return checks
