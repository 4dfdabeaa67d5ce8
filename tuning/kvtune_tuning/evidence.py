"""From raw series to what the two decisions need, and to what the report says about its own evidence."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

import numpy as np

from kvtune_connector.policy import DEFAULT_THRESHOLD_TOKENS, DEFAULT_TTL_S, EXPIRY_MARGIN_S, EXPLORE_FACTOR
from kvtune_telemetry.buckets import GAP_SECONDS, SIZE_EDGES
from kvtune_telemetry.vocabulary import Decision, End, Outcome, Path, Reason, Role
from kvtune_tuning import missing, stock, threshold, ttl
from kvtune_tuning.counters import Ended, lives, steps, stretches, summed
from kvtune_tuning.errors import TuningError
from kvtune_tuning.gaps import GapCurves, Survival, mean_held, survival
from kvtune_tuning.lines import CostPoint, line_of, saving_per_token
from kvtune_tuning.series import Floats, Labels, Series, SeriesSet
from kvtune_tuning.wording import digits

KAPPA_RANGE = (0.25, 4.0)
"""Beyond it observed and predicted retention are about different things, and neither is believed."""
MIN_PREDICTED_SHARE = 0.002
"""Share of the pool that must be predicted as retained before a correction factor means anything."""


MAX_USAGE = 1.5
"""Above it a usage is no share of the pool. A little over 1 may be rounding."""
MAX_GAUGE = 1e15
"""No pool, no setting and no number of requests is larger."""
MAX_COUNTER = 1e30
LEAST = 1e-15
"""No counter comes so far (squares of tokens do not either), and nothing but zero is smaller."""
MIN_FALLS = 3
FALLS = 1 / 3
"""What falls so often, and in such a share of the scrapes, is no counter that is reset now and then."""
MAX_AHEAD_S = 10.0
"""Scrapes further ahead of the wall clock are in the time of a simulation."""


class Mode(StrEnum):
    """Whose series the advice is made from."""

    KVTUNE = "kvtune"
    """kvtune's router and its connector on the engines."""
    ROUTER = "router"
    """kvtune's router; the engines are stock vLLM, or none is among the targets."""
    ENGINES = "engines"
    """Engines with kvtune's connector; another router."""
    STOCK = "stock"
    """vLLM's own series only."""


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
    mode: Mode
    bounds: stock.StockInputs | None = None
    """Set where nothing tells when conversations return: the advice on the TTL is made from bounds then."""
    stock_prefill: bool = False
    """Prefill engines do not run kvtune's connector: nothing tells costs by size."""
    asked: Asked | None = None
    """Set where the routers ask for a retention of their own."""
    model_time: bool = False
    """Times are those of a scaled simulation, not the wall clock's."""
    gaps: tuple[missing.Gap, ...] = ()
    """What is missing of the series, or contradicts itself."""
    read_back_tokens: float = 0.0
    """Tokens that prefill read back from decode, by its own count."""
    explain: tuple[str, ...] = field(default=())

    @property
    def has_router(self) -> bool:
        """Whether kvtune's router is among the targets."""
        return self.mode in (Mode.KVTUNE, Mode.ROUTER)


@dataclass(frozen=True, slots=True)
class _Pools:
    """Decode engines: targets, pool of each (tokens), share of retention each takes."""

    targets: tuple[str, ...]
    tokens: dict[str, float]
    shares: dict[str, float]
    total: float
    """Tokens of all pools together, on average over the window."""

    def tightest(self) -> str | None:
        """The engine with the least room for its share."""
        known = [t for t in self.targets if t in self.tokens]
        return max(known, key=lambda t: self.shares.get(t, 0.0) / self.tokens[t], default=None)


@dataclass(frozen=True, slots=True)
class _Turns:
    """What ended, what came back, and the same in tokens: rates are per second, over all engines."""

    curves: GapCurves
    tokens_ended: Ended
    extrapolated: bool
    ends: float
    tokens: float
    tokens_squared: float
    conversations: float | None
    conversations_new: float | None
    in_time_tokens: Callable[[float], float]
    """Tokens whose conversation returned within so many seconds."""
    returned_tokens: float = 0.0
    """Tokens held over the pauses that ended."""
    merged: tuple[float, ...] = ()
    """Usual bucket edges (s) that not all histograms have."""
    unusable: tuple[str, ...] = ()
    """Histograms whose buckets are too few to say when conversations return."""

    @property
    def mean_tokens(self) -> float:
        return self.tokens / self.ends if self.ends > 0 else 0.0


def gather(series: SeriesSet, stated: stock.Stated | None = None) -> Evidence:
    """Reduce raw series to evidence. `stated`: what the user says where nothing else does.

    Raises TuningError: `no_kvtune_series` where nothing of kvtune's and of vLLM's is there, `window_too_short` with one
    scrape only; and UsageError where what is stated does not fit the targets.
    """
    stated = stated or stock.Stated()
    start, end = _window(series)
    series, implausible, left_out = _plausible(series)
    labelled = _roles(series)
    roles = stock.roles(series, stated, labelled)
    routers = missing.routers(series)
    mode = (
        Mode.KVTUNE if routers and labelled else Mode.ROUTER if routers
        else Mode.STOCK if not labelled and stock.engines(series) else Mode.ENGINES
    )  # fmt: skip
    # neither a router nor decode's retentions tell when conversations return
    blind = not routers and Role.DECODE not in labelled.values()
    checks: list[Check] = []
    ttl_setting, asked = _ttl_setting(series, stated)
    threshold_setting = _setting(
        series, "kv_recompute_threshold", Role.PREFILL, float(DEFAULT_THRESHOLD_TOKENS), stated.threshold
    )
    margin = _setting(series, "expiry_margin_seconds", Role.PREFILL, EXPIRY_MARGIN_S)
    life = lives(series.scrapes, start, end)
    pools = _pools(series, roles, life)
    window = max(1e-9, end - start)

    def engines_of(role: Role) -> int:
        return (
            max(1, round(sum(life.get(t, 1.0) for t, r in roles.items() if r == role))) if role in roles.values() else 0
        )

    turns = (
        _from_router(series, window) if routers
        else _from_vllm(series, set(pools.targets), window) if blind
        else _from_retentions(series, set(pools.targets), window, ttl_setting.value)
    )  # fmt: skip
    curves = turns.curves
    tightest = pools.tightest()
    share = pools.shares.get(tightest, 1.0) if tightest is not None else 1.0 / max(1, len(pools.targets))
    pool = pools.tokens.get(tightest) if tightest is not None else None
    kappa, held_observed, held_predicted = _kappa(series, pools, curves.tokens, turns.tokens_ended, ttl_setting.value)
    usage = _usage(series, roles, pools, set(labelled))
    starved, preempted = _starved(series, roles, pools, turns.mean_tokens)
    fetch, recompute = _points(series, Path.FETCH, start, end), _points(series, Path.RECOMPUTE, start, end)
    saving = saving_per_token(recompute, fetch)
    late, useful, useful_known = _useful(series, turns, ttl_setting.value - margin.value)
    ttft = _ttft(series)
    bounds = (
        stock.gather(
            series, stated, roles, pools.tokens, ttl_setting.value, usage.p99, starved, margin.value,
        )
        if blind
        else None
    )  # fmt: skip
    ttl_inputs = ttl.TtlInputs(
        current_s=ttl_setting.value,
        margin_s=margin.value,
        conversations=turns.conversations or 0.0,
        window_s=window,
        ends=turns.ends * window,
        curves=curves,
        token_rate=turns.tokens * share,
        token_squared_rate=turns.tokens_squared * share,
        mean_tokens=turns.mean_tokens,
        pool_tokens=pool,
        usage_p99=usage.p99,
        active_mean=usage.active_mean,
        active_variance=usage.active_variance,
        starved=starved,
        kappa=kappa if kappa is not None else 1.0,
        saving_s_per_token=saving,
        useful=useful,
        late=late,
        ttft_followup_s=ttft,
        costs=_costs(series, recompute, fetch, window, engines_of(Role.PREFILL)),
    )
    ttl_inputs = ttl.as_seen_waiting(ttl.unhindered(ttl_inputs, _pause(series), _backlog(series, roles)))
    gaps = _gaps(series, mode, roles, labelled, routers, turns, usage, starved, window)
    exploring = _share(series, "explore_ratio")
    explored = {
        decision.value: _decided(series, decision, Reason.EXPLORED)[0]
        for decision in (Decision.FETCH, Decision.RECOMPUTE)
    }
    threshold_inputs = threshold.ThresholdInputs(
        current=threshold_setting.value,
        window_s=window,
        fetch=fetch,
        recompute=recompute,
        fetched=_fetched(series, threshold_setting.value),
        below=_below(series, threshold_setting.value),
        ttft_followup_s=ttft,
        explored=sum(explored.values()) if exploring or any(explored.values()) else None,
    )
    restarts = _restarts(series)
    holes = _holes(series, start, end)
    checks += implausible
    checks += [Check(gap.code, "warning" if gap.refuses or gap.weakens else "info", gap.message) for gap in gaps]
    if turns.merged:
        listed = ", ".join(f"{edge:g}" for edge in turns.merged)
        checks.append(Check(
            "bucket_edges", "warning",
            f"not every histogram of pauses has an edge at {listed} s: the buckets on both sides are taken as one",
        ))  # fmt: skip
    checks += _mode_checks(series, mode, labelled, roles, bounds)
    checks += _setting_checks(series, ttl_setting, threshold_setting, margin, asked)
    checks += _statement_checks(series, stated)
    checks += _target_checks(series, mode, roles, pools)
    checks += _event_checks(
        series, restarts, holes, any(r == Role.PREFILL and t not in labelled for t, r in roles.items())
    )
    if turns.extrapolated or (bounds is not None and bounds.ran_before):
        who = "the router" if routers else "decode"
        checks.append(Check(
            "stationarity", "info",
            f"{who} was running before the window: turns that ended before it are taken to have come at the "
            "window's rate",
        ))  # fmt: skip
    if 0 < curves.horizon_s < ttl_setting.value - margin.value and curves.returned:
        checks.append(Check(
            "short_window", "warning",
            f"pauses longer than {curves.horizon_s:.0f} s could not be observed yet; beyond that, figures are bounds",
        ))  # fmt: skip
    if blind or not curves.horizon_s:
        pass
    elif kappa is None:
        checks.append(Check(
            "kappa", "info", "retained tokens could not be compared with the prediction; no correction is applied",
        ))  # fmt: skip
    elif not 0.5 <= kappa <= 2.0:
        checks.append(Check(
            "kappa", "warning",
            f"decode retains {_times(kappa)} what the pauses predict; the advice is scaled by that, look for "
            "the cause (turns that leave no reference, or retention released early)",
        ))  # fmt: skip
    if saving is None and mode is not Mode.STOCK:
        checks.append(Check(
            "saving_unknown", "info", "costs of fetching and computing are not known yet: TTLs are not capped by value",
        ))  # fmt: skip
    facts: dict[str, object] = {
        "mode": mode.value,
        "targets": {
            "router": routers,
            "prefill": sorted(t for t, r in roles.items() if r == Role.PREFILL),
            "decode": list(pools.targets),
            "unknown": sorted(set(stock.engines(series)) - set(roles)),
        },
        "scrapes": int(sum(len(t) for t in series.scrapes.values())),
        "scrape_rounds": max(len(t) for t in series.scrapes.values()),
        "scraped_targets": len(series.scrapes),
        "scrape_interval_s": _interval(series),
        "scrape_gaps": holes,
        "series": len(series.series),
        "samples": series.samples(),
        "samples_dropped": series.not_finite + left_out,
        "models": _models(series, roles),
        "turns": turns.ends * window if not routers else series.increase("kvtune_turns_total") or 0.0,
        "turns_by_outcome": _by(series, "kvtune_turns_total", "outcome"),
        "conversations": turns.conversations,
        "conversations_new": turns.conversations_new,
        "gaps": None if blind else curves.returned,
        "turn_ends": turns.ends * window,
        "turns_given_up": series.increase("kvtune_turns_given_up_total"),
        "turn_ends_per_s": turns.ends,
        "tokens_per_turn_end": turns.mean_tokens or None,
        "gap_horizon_s": curves.horizon_s,
        "extrapolated_before_window": turns.extrapolated,
        "restarts": restarts,
        "settings": {
            ttl.SETTING: _stated(ttl_setting),
            threshold.SETTING: _stated(threshold_setting),
            "expiry_margin_seconds": _stated(margin),
        },
        "pool_tokens": pool,
        "pools_differ": len({pools.tokens.get(t) for t in pools.targets}) > 1,
        "decode_engines": engines_of(Role.DECODE),
        "kv_usage_p99": usage.p99,
        "retention_room_tokens": None
        if pool is None or usage.active_mean is None
        else max(0.0, pool - usage.active_mean),
        "active_tokens_mean": usage.active_mean,
        "active_tokens_sd": math.sqrt(usage.active_variance),
        "waited_for_kv": starved,
        "preemptions": preempted,
        "retained_tokens_mean": held_observed,
        "retained_tokens_predicted": held_predicted,
        "kappa": kappa,
        "holdout_ratio": _share(series, "holdout_ratio"),
        "explore_ratio": exploring,
        "explored": explored,
        "demand_factor": ttl_inputs.raised_by,
        "useful_share": useful if useful_known else None,
        "saving_us_per_token": None if saving is None else 1e6 * saving,
        "ttft_followup_mean_s": ttft,
        "cost_observations": {
            "fetch": sum(p.count for p in fetch),
            "recompute": sum(p.count for p in recompute),
        },
        "stock": None if bounds is None else stock.facts(bounds),
    }
    return Evidence(
        start, end, facts, tuple(checks), ttl_inputs, threshold_inputs, ttl_setting, threshold_setting, mode,
        bounds, mode is Mode.STOCK or (Role.PREFILL in roles.values() and Role.PREFILL not in labelled.values()),
        asked, series.ahead_s > MAX_AHEAD_S, tuple(gaps), missing.read_back(series),
    )  # fmt: skip


def _gaps(
    series: SeriesSet, mode: Mode, roles: dict[str, str], labelled: dict[str, str], routers: list[str], turns: _Turns,
    usage: _Usage, starved: bool, window: float,
) -> list[missing.Gap]:  # fmt: skip
    """What is missing of each emitter that is there."""
    prefill, decode = (missing.prefills(roles, labelled, role) for role in (Role.PREFILL, Role.DECODE))
    pressed = starved or (usage.p99 is not None and usage.p99 >= ttl.POOL_SHARE)
    found = missing.of_routers(series, routers, starved=starved)
    found += missing.of_prefill(series, prefill)
    found += missing.of_decode(
        series, decode, has_router=bool(routers), could_be_short=usage.was_full, pressed=pressed
    )  # fmt: skip
    if mode is Mode.STOCK:
        by_role = ({t for t, r in roles.items() if r == role} for role in (Role.DECODE, Role.PREFILL))
        found += missing.of_stock(series, *by_role)
    if turns.unusable and not any(name in gap.what for name in turns.unusable for gap in found):
        found.append(missing.Gap(
            f"missing: usable bucket edges of {', '.join(turns.unusable)}", "when conversations return is not known",
            (ttl.SETTING,),
        ))  # fmt: skip
    if routers and not any(gap.refuses and ttl.SETTING in gap.refuses for gap in found):
        found += missing.contradictions(
            series, returned=turns.curves.returned, returned_tokens=turns.returned_tokens, ends=turns.ends * window,
            mean_tokens=turns.mean_tokens, going_on=_alive_at_start(series),
        )  # fmt: skip
    return found


def _costs(
    series: SeriesSet, recompute: tuple[CostPoint, ...], fetch: tuple[CostPoint, ...], window_s: float, prefills: int
) -> ttl.Costs | None:
    """What prefill's time is made of; None where too little was seen to say."""
    compute, read = line_of(recompute), line_of(fetch)
    count = series.increase("kvtune_path_observations_total", path=Path.RECOMPUTE) or 0.0
    square = series.increase("kvtune_path_tokens_squared_total", path=Path.RECOMPUTE)
    if compute is None or read is None or not count or square is None or compute.slope <= 0:
        return None
    return ttl.Costs(
        turns_per_s=count / window_s,
        prefill_engines=max(1, prefills),
        compute_base_s=max(0.0, compute.intercept),
        compute_token_s=compute.slope,
        fetch_base_s=max(0.0, read.intercept),
        fetch_token_s=max(0.0, read.slope),
        computed_mean=(series.increase("kvtune_path_tokens_total", path=Path.RECOMPUTE) or 0.0) / count,
        computed_square=square / count,
    )


_COUNTERS = ("_total", "_bucket", "_count", "_sum")
_ENDS = ("kvtune_turn_ends_total", "kvtune_turn_end_tokens_total", "kvtune_turn_end_tokens_squared_total")
_RETAINED_TOKENS = "kvtune_retention_tokens_total"
_RETURNED = (End.READ.value, End.LOCAL_HIT.value, End.RELEASED.value)
"""Ends of retentions that a returning turn brought about."""
_AGES = "kvtune_retention_age_seconds_bucket"
MIN_EDGES = 8
MAX_RATIO = 4.0
FIRST_EDGE_S = 10.0
LAST_EDGE_S = 60.0
"""A histogram with fewer edges, with edges further apart up to vLLM's TTL, or that begins later or ends earlier, says
too little about pauses."""
SCRAPED_APART = 0.005
"""By this share, and one, a bucket may show less than a narrower one: the two may have been read at different times."""
_GAPS = ("kvtune_turn_gap_seconds_bucket", "kvtune_turn_gap_tokens_bucket", "kvtune_turn_gap_tokens_squared_bucket")


def _window(series: SeriesSet) -> tuple[float, float]:
    if not any(s.name.startswith(("kvtune_", "vllm:")) for s in series.series):
        raise TuningError(
            "no_kvtune_series",
            "none of the sources exposes kvtune_* or vllm:* series",
            "Scrape the router's metrics port and both engines.",
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

    Nothing that is read can be negative, a usage is a share, and nothing is astronomic.
    """
    kept = []
    dropped: dict[tuple[str, str], list[float]] = {}
    backwards: dict[tuple[str, str], list[float]] = {}
    for one in series.series:
        most = MAX_COUNTER
        if one.name == "vllm:kv_cache_usage_perc":
            most = MAX_USAGE
        elif not one.name.endswith(_COUNTERS):
            most = MAX_GAUGE
        falls = len(one.resets()) if one.name.endswith(_COUNTERS) else 0
        if falls >= MIN_FALLS and falls > FALLS * (len(one.times) - 1):
            backwards.setdefault((one.name, one.target), []).append(falls / (len(one.times) - 1))
            continue
        good = ((one.values >= LEAST) & (one.values <= most)) | (one.values == 0)
        if not good.all():
            key = (one.label("setting") or one.name, one.target)
            dropped.setdefault(key, []).extend(float(v) for v in one.values[~good])
            one = Series(one.name, one.labels, one.target, one.times[good], one.values[good])
        if len(one.times):
            kept.append(one)
    if not dropped and not backwards:
        return series, [], 0
    checks = [
        Check(
            "implausible",
            "warning",
            f"{target}: {len(values)} value(s) of {name} cannot be, e.g. {values[0]:.3g}; they were left out",
        )
        for (name, target), values in sorted(dropped.items())
    ]
    checks += [
        Check(
            "not_a_counter",
            "warning",
            f"{target}: {len(shares)} series of {name} fell in {100 * max(shares):.0f} % of the scrapes, as no counter "
            "does; they were left out",
        )
        for (name, target), shares in sorted(backwards.items())
    ]
    rest = SeriesSet(tuple(kept), series.scrapes, series.not_finite, series.notes, series.ahead_s)
    return rest, checks, sum(len(values) for values in dropped.values())


def _share(series: SeriesSet, setting: str) -> float | None:
    """A share that is set in the routers: the largest, if they differ."""
    found = series.named("kvtune_router_setting", setting=setting)
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


def _setting(series: SeriesSet, name: str, role: Role, default: float, stated: float | None = None) -> Setting:
    """The setting in force as engines expose it, else as the user states it, else vLLM's default."""
    found = series.named("kvtune_connector_setting", setting=name, role=role.value)
    if not found:
        return Setting(default, True) if stated is None else Setting(stated, False)
    values = tuple(sorted({float(s.values[-1]) for s in found}))
    counts = {v: sum(float(s.values[-1]) == v for s in found) for v in values}
    return Setting(max(values, key=lambda v: (counts[v], v)), False, values)


def _ttl_setting(series: SeriesSet, stated: stock.Stated) -> tuple[Setting, Asked | None]:
    """The retention in force, and what the routers ask of decode for each turn (None where they ask nothing)."""
    own = _setting(series, ttl.SETTING, Role.DECODE, DEFAULT_TTL_S, stated.ttl_s)
    asking = series.named("kvtune_router_setting", setting="retain_seconds")
    if not asking or not all(s.values[-1] > 0 for s in asking):
        return own, None
    asked = sorted({float(s.values[-1]) for s in asking})
    most = _setting(series, "max_retain_seconds", Role.DECODE, own.value)
    kept = tuple(sorted({min(one, most.value) for one in asked}))
    return Setting(kept[-1], False, kept), Asked(asked[-1], most.value)


def _stated(setting: Setting) -> dict[str, object]:
    return {"value": setting.value, "assumed": setting.assumed}


def _pools(series: SeriesSet, roles: dict[str, str], life: dict[str, float]) -> _Pools:
    """Pools and shares; a share is that of the retention in the time the engine was there."""
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
                total += _capacity(info)
        if 0 < total <= MAX_GAUGE:
            tokens[target] = total
    flows = series.named("kvtune_retention_tokens_total") or stock.pinned(series, set(targets))
    retained = {t: sum(s.increase() for s in flows if s.target == t) for t in targets}
    total = sum(retained.values())
    alive = sum(life.get(t, 1.0) for t in targets)
    shares = {
        t: min(1.0, retained[t] / max(1e-9, life.get(t, 1.0)) / total) if total > 0 else 1.0 / max(1.0, alive)
        for t in targets
    }
    return _Pools(targets, tokens, shares, sum(tokens.get(t, 0.0) * life.get(t, 1.0) for t in targets))


def _capacity(info: Series) -> float:
    """Tokens that one data-parallel engine's pool holds, by `vllm:cache_config_info`; 0 if it does not say.

    `kv_cache_size_tokens` comes first: blocks times block size is wrong for hybrid models.
    """
    for names in (("kv_cache_size_tokens",), ("block_size", "num_gpu_blocks")):
        try:
            product = math.prod(float(info.label(name) or "nan") for name in names)
        except ValueError:
            continue
        if 0 < product < math.inf:
            return product
    return 0.0


def _alive_at_start(series: SeriesSet) -> float:
    """Conversations that were going on when the window began.

    The router remembers ended ones for long, decode retains only what may return: the smaller of the two is taken.
    """
    remembered = sum(float(s.values[0]) for s in series.named("kvtune_conversations_remembered"))
    retained = sum(float(s.values[0]) for s in series.named("kvtune_retained_requests"))
    return max(0.0, min(remembered, retained))


def _from_router(series: SeriesSet, window: float) -> _Turns:
    """Ends and returns of turns as kvtune's router counts them."""
    ended = [Ended(series.named(name)) for name in _ENDS]
    found = histograms(series, _GAPS)
    edges, counts = found.edges, found.counts
    turns, exposure = survival(edges, counts[0][:-1], ended[0].exposed)
    used = len(exposure)
    tokens, _ = survival(edges, counts[1][:-1], ended[1].exposed, used)
    squares, _ = survival(edges, counts[2][:-1], ended[2].exposed, used)
    new = series.increase("kvtune_conversations_total") or 0.0
    ends, end_tokens, end_squares = ((series.increase(name) or 0.0) / window for name in _ENDS)
    return _Turns(
        GapCurves(turns, tokens, squares, float(counts[0].sum()), exposure), ended[1], ended[0].before,
        ends, end_tokens, end_squares, new + _alive_at_start(series), new,
        lambda usable_s: _up_to(edges, counts[1], usable_s), float(counts[1].sum()), found.merged, found.unusable,
    )  # fmt: skip


def _up_to(edges: Floats, counts: Floats, seconds: float) -> float:
    """What the buckets hold up to so many seconds; a bucket that reaches beyond counts in proportion."""
    return float(np.interp(seconds, np.concatenate(([0.0], edges)), np.concatenate(([0.0], np.cumsum(counts[:-1])))))


def _from_vllm(series: SeriesSet, decode: set[str], window: float) -> _Turns:
    """Ends of turns only, as stock decode engines count their requests."""
    ends = sum(s.increase() for s in stock.pinned(series, decode)) / window
    mean = stock.mean_tokens(series, decode)
    unknown = Survival(np.zeros(1), np.ones(1))
    return _Turns(
        GapCurves(unknown, unknown, unknown, 0.0, np.zeros(0)), Ended([]), False,
        ends, ends * mean, ends * mean**2 * stock.spread(series, decode), None, None, lambda _: 0.0,
    )  # fmt: skip


def _from_retentions(series: SeriesSet, decode: set[str], window: float, ttl_s: float) -> _Turns:
    """From the ages at which decode's retentions were read or given back: nothing is seen beyond the TTL.

    Ages are not weighted by tokens, so that turns of all sizes are taken to return alike (`kappa` corrects the mean),
    and the second moment is that of the prompts. There are at least as many conversations as retained at a time.
    """
    started, tokens = (Ended(series.named(name)) for name in ("kvtune_retentions_total", _RETAINED_TOKENS))
    found = histograms(series, (_AGES,), lambda s: s.label("end") in _RETURNED)
    edges, counts = found.edges, found.counts[0]
    below = int(np.searchsorted(edges, ttl_s))
    if below < len(edges):
        edges = np.append(edges[:below], ttl_s)
    curve, exposure = survival(edges, counts[: len(edges)], started.exposed)
    ends = (series.increase("kvtune_retentions_total") or 0.0) / window
    rate = (series.increase(_RETAINED_TOKENS) or 0.0) / window
    held = series.named("kvtune_retained_requests")
    times = np.unique(np.concatenate([s.times for s in held])) if held else np.zeros(0)
    return _Turns(
        GapCurves(curve, curve, curve, float(counts.sum()), exposure), tokens, started.before, ends, rate,
        rate * rate / ends * stock.spread(series, decode) if ends > 0 else 0.0,
        float(summed(held, times).max(initial=0.0)), None,
        lambda usable_s: rate * window * (1.0 - float(curve.at(np.array([usable_s]))[0])),
        merged=found.merged, unusable=found.unusable,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Histograms:
    """Increments of buckets on the edges that all the histograms have."""

    edges: Floats
    """Finite upper edges (s), shape (n,)."""
    counts: tuple[Floats, ...]
    """For each name, increments of each bucket alone, shape (n + 1,): the last is what lies beyond the edges."""
    merged: tuple[float, ...]
    """Edges of kvtune's own layout that some of the histograms lack (s)."""
    unusable: tuple[str, ...]
    """Names whose edges are too few, or too far apart, to say anything."""


def histograms(series: SeriesSet, names: tuple[str, ...], where: Callable[[Series], bool] | None = None) -> Histograms:
    """Increments of the buckets of all histograms with these names, on the edges they share.

    Where one lacks an edge, or its count there contradicts those at other edges, the two buckets beside it are one:
    no mass is counted twice or put where it was not seen.
    """
    usual = np.asarray(GAP_SECONDS, dtype=np.float64)
    found: dict[str, list[dict[float, float]]] = {name: [] for name in names}
    for name in names:
        groups: dict[tuple[str, frozenset[tuple[str, str]]], dict[float, float]] = {}
        for one in series.named(name, where):
            try:
                edge = float(f"{float(one.label('le') or 'nan'):.6g}")
            except ValueError:
                continue
            if edge > 0:
                key = (one.target, frozenset(pair for pair in one.labels if pair[0] != "le"))
                upto = groups.setdefault(key, {})
                upto[edge] = upto.get(edge, 0.0) + one.increase()
        found[name] = [_rising(upto) for upto in groups.values()]
    sets = [{edge for edge in upto if math.isfinite(edge)} for groups_of in found.values() for upto in groups_of]
    common = set.intersection(*sets) if sets else set()
    unusable = tuple(name for name in names if not found[name] or not all(map(_enough, found[name])))
    if not unusable and not _enough(dict.fromkeys(common, 0.0)):
        unusable = names
    if unusable:
        return Histograms(usual, tuple(np.zeros(len(usual) + 1) for _ in names), (), unusable)
    edges = sorted(common)
    counts = []
    for name in names:
        total = np.zeros(len(edges) + 1)
        for upto in found[name]:
            so_far = [upto[edge] for edge in edges]
            total += np.diff(np.concatenate(([0.0], so_far, [max(upto.values())])))
        counts.append(np.asarray(np.maximum(0.0, total), dtype=np.float64))
    merged = tuple(float(edge) for edge in usual if not any(math.isclose(edge, e, rel_tol=1e-5) for e in edges))
    return Histograms(np.asarray(edges, dtype=np.float64), tuple(counts), merged, ())


def _rising(upto: dict[float, float]) -> dict[float, float]:
    """Cumulative counts by edge, but for the fewest edges without which they do not rise."""
    edges = sorted(upto)
    length, before = [1] * len(edges), [-1] * len(edges)
    for j in range(len(edges)):
        for i in range(j):
            if upto[edges[i]] <= upto[edges[j]] * (1 + SCRAPED_APART) + 1 and length[i] + 1 > length[j]:
                length[j], before[j] = length[i] + 1, i
    last = max(range(len(edges)), key=lambda j: length[j], default=-1)
    kept = []
    while last >= 0:
        kept.append(edges[last])
        last = before[last]
    most = 0.0
    rising = {}
    for edge in reversed(kept):
        most = rising[edge] = max(most, upto[edge])
    return rising


def _enough(upto: dict[float, float]) -> bool:
    """Whether the edges are enough, and close enough to each other, for a curve."""
    edges = sorted(edge for edge in upto if math.isfinite(edge))
    near = all(b <= MAX_RATIO * a for a, b in pairwise(edges) if b <= DEFAULT_TTL_S)
    return len(edges) >= MIN_EDGES and near and edges[0] <= FIRST_EDGE_S and edges[-1] >= LAST_EDGE_S


def _times(kappa: float) -> str:
    least, most = KAPPA_RANGE
    if least < kappa < most:
        return f"{kappa:.2f} times"
    return f"{kappa:g} times, or {'less' if kappa <= least else 'more'}, of"


def _kappa(
    series: SeriesSet, pools: _Pools, curve: Survival, ended: Ended, ttl_s: float
) -> tuple[float | None, float | None, float | None]:
    """Observed over predicted retained tokens of all decode engines, with both means; None where not comparable."""
    gauges = [s for s in series.named("kvtune_retained_tokens") if s.target in pools.targets]
    if not gauges or {s.target for s in gauges} != set(pools.targets):
        return None, None, None
    begun = min(float(s.times[0]) for s in gauges)
    usual = _interval(series) or 0.0
    # from when all that were there at the start had been scraped; what comes later held nothing before
    first = max(float(s.times[0]) for s in gauges if s.times[0] <= begun + 2.5 * usual)
    times = np.unique(np.concatenate([s.times for s in gauges]))
    times = times[times >= first]
    observed = float(summed(gauges, times).mean())
    predicted = float(mean_held(curve, ended.by, times, ttl_s).mean())
    if not predicted > MIN_PREDICTED_SHARE * pools.total or observed <= 0:
        return None, observed, predicted
    return min(max(observed / predicted, KAPPA_RANGE[0]), KAPPA_RANGE[1]), observed, predicted


LEAST_FULL = 0.5
"""Below this usage a pool has room for any request."""


@dataclass(frozen=True, slots=True)
class _Usage:
    p99: float | None
    active_mean: float | None
    active_variance: float
    was_full: bool = False
    """Some decode engine was so full at times that requests may have waited for room."""


def _usage(series: SeriesSet, roles: dict[str, str], pools: _Pools, labelled: set[str]) -> _Usage:
    """Usage of the fullest decode engine, and what requests in progress hold on the busiest one.

    A stock engine does not tell what it retains: there, running requests and their mean length stand in.
    """
    by_target: dict[str, list[Series]] = {}
    for one in series.named("vllm:kv_cache_usage_perc"):
        if roles.get(one.target) == Role.DECODE:
            by_target.setdefault(one.target, []).append(one)
    p99 = [float(np.quantile(one.values, 0.99)) for ranks in by_target.values() for one in ranks]
    was_full = any((one.values >= LEAST_FULL).any() for ranks in by_target.values() for one in ranks)
    active: list[Floats] = []
    for target, ranks in by_target.items():
        pool = pools.tokens.get(target)
        if pool is None:
            continue
        times = ranks[0].times
        if target not in labelled:
            busy = stock.active(series, target, times, stock.mean_tokens(series, set(by_target)))
            if busy is not None:
                active.append(busy)
            continue
        retained = [s for s in series.named("kvtune_retained_tokens") if s.target == target]
        # data-parallel ranks of one target have a series and an equal share of the pool each
        used = sum((np.interp(times, one.times, one.values) for one in ranks), np.zeros_like(times)) / len(ranks)
        active.append(np.maximum(0.0, used * pool - summed(retained, times)))
    if not active:
        return _Usage(max(p99, default=None), None, 0.0, was_full)
    means = [float(a.mean()) for a in active]
    worst = int(np.argmax(means))
    return _Usage(max(p99), means[worst], float(active[worst].var()), was_full)


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
        full = max(LEAST_FULL, min(ttl.POOL_SHARE, 1.0 - 1.5 * mean_tokens / pool))
        at = np.interp(waiting.times, usage[0].times, usage[0].values)
        short += int(((waiting.values > 0) & (at >= full)).sum())
        total += len(waiting.times)
    return preempted > 0 or (total > 0 and short > max(1.0, 0.01 * total)), preempted


def _points(series: SeriesSet, path: Path, start: float, end: float) -> tuple[CostPoint, ...]:
    """Mean costs by size class and stretch of the window, summed over engines first so that replicas add up."""
    cuts = stretches(start, end, max((len(t) for t in series.scrapes.values()), default=2))

    names = ("kvtune_path_observations_total", "kvtune_path_tokens_total", "kvtune_path_seconds_total")
    points = []
    for size in (*map(str, SIZE_EDGES), "inf"):
        # of engines that expose all three: a mean is a quotient of two
        sets = [{(s.target, s.labels) for s in series.named(name, path=path.value, size=size)} for name in names]
        whole = set.intersection(*sets)

        def of(name: str, size: str, whole: set[tuple[str, Labels]] = whole) -> Floats:
            found = series.named(name, path=path.value, size=size)
            return steps([one for one in found if (one.target, one.labels) in whole], cuts)

        count = of("kvtune_path_observations_total", size)
        if not count.any():
            continue
        tokens, seconds = of("kvtune_path_tokens_total", size), of("kvtune_path_seconds_total", size)
        for stretch in np.flatnonzero(count > 0.5):
            mean = float(tokens[stretch] / count[stretch])
            cost = float(seconds[stretch] / count[stretch])
            if mean > 0 and cost >= 0:
                points.append(CostPoint(int(stretch), size, mean, cost, float(count[stretch])))
    return tuple(points)


def _decided(series: SeriesSet, decision: Decision, reason: Reason) -> tuple[float, float]:
    """How often prefill decided so, and the tokens of the histories it was about."""
    count, tokens = (
        series.increase(name, decision=decision.value, reason=reason.value) or 0.0
        for name in ("kvtune_decisions_total", "kvtune_decision_tokens_total")
    )
    return count, tokens


def _fetched(series: SeriesSet, current: float) -> tuple[threshold.Sizes, ...]:
    """Histories that are fetched unless exploration prevents it, by size class."""
    found = []
    low = 0.0
    # What exploration fetched lies below the threshold: the smallest fetches of all. It belongs to `_below`.
    less, less_tokens = _decided(series, Decision.FETCH, Reason.EXPLORED)
    for size in (*map(str, SIZE_EDGES), "inf"):
        count = series.increase("kvtune_path_observations_total", path=Path.FETCH.value, size=size) or 0.0
        tokens = series.increase("kvtune_path_tokens_total", path=Path.FETCH.value, size=size) or 0.0
        high = float(size) if size != "inf" else max(2 * low, 2 * tokens / count if count else 0.0)
        gone, gone_tokens = (count, tokens) if count <= less else (less, less_tokens)
        less, less_tokens = less - gone, max(0.0, less_tokens - gone_tokens)
        count, tokens = count - gone, tokens - gone_tokens
        if count > 0:
            mean = min(max(tokens / count, low + 1), high)
            found.append(threshold.Sizes(min(max(low, current - 1), mean), max(high, mean), mean, count))
        low = high
    count, tokens = _decided(series, Decision.RECOMPUTE, Reason.EXPLORED)
    if count > 0 and tokens > 0:
        mean = tokens / count
        found.append(threshold.Sizes(min(current, mean), max(EXPLORE_FACTOR * current, mean), mean, count))
    return tuple(found)


def _below(series: SeriesSet, current: float) -> threshold.Sizes | None:
    """What is computed again because it is too small, and what exploration fetched all the same."""
    ordinary = _decided(series, Decision.RECOMPUTE, Reason.BELOW_THRESHOLD)
    explored = _decided(series, Decision.FETCH, Reason.EXPLORED)
    count, tokens = ordinary[0] + explored[0], ordinary[1] + explored[1]
    if count <= 0 or tokens <= 0:
        return None
    mean = tokens / count
    # log-uniform between low and the threshold: spread about the mean that was seen
    low = max(1.0, min(mean, mean**2 / max(current, mean)))
    return threshold.Sizes(low, max(current, mean), mean, count)


def _useful(series: SeriesSet, turns: _Turns, usable_s: float) -> tuple[float, float, bool]:
    """Of the tokens of in-time returns: the share that was late at prefill, because its turns had queued for too long;
    and the share of the others that was really fetched (the rest P held itself, or could not use), if that is known."""
    fetched = series.increase("kvtune_decision_tokens_total", decision=Decision.FETCH.value)
    in_time = turns.in_time_tokens(usable_s)
    if fetched is None or in_time <= 0:
        return 0.0, 1.0, False
    declined = series.increase(
        "kvtune_decision_tokens_total", decision=Decision.RECOMPUTE.value, reason=Reason.EXPIRED.value
    )
    late = min(declined or 0.0, max(0.0, in_time - fetched))
    if fetched <= 0:
        return late / in_time, 1.0, False
    return late / in_time, min(1.0, fetched / (in_time - late)), True


def _ttft(series: SeriesSet) -> float | None:
    """Mean TTFT of follow-up turns that were answered."""

    return _mean(series, "kvtune_turn_ttft_seconds", lambda s: s.label("outcome") != Outcome.ERROR, turn="followup")


def _mean(series: SeriesSet, name: str, where: Callable[[Series], bool] | None = None, **labels: str) -> float | None:
    """The mean of a histogram over the window, of the series that expose both its sum and its count."""
    sums, counts = (
        {(s.target, s.labels): s.increase() for s in series.named(f"{name}_{part}", where, **labels)}
        for part in ("sum", "count")
    )
    both = sums.keys() & counts.keys()
    count = sum(counts[key] for key in both)
    return sum(sums[key] for key in both) / count if count > 0 else None


def _pause(series: SeriesSet) -> float | None:
    """Mean pause between a turn's end and the next turn (s)."""
    mean = _mean(series, "kvtune_turn_gap_seconds")
    if mean is not None:
        return mean
    total, count = series.increase("kvtune_turn_gap_seconds_sum"), _whole_count(series, "kvtune_turn_gap_seconds")
    return total / count if total is not None and count else None


def _whole_count(series: SeriesSet, name: str) -> float:
    """Observations of a histogram by its widest bucket."""
    return sum(s.increase() for s in series.named(f"{name}_bucket") if (s.label("le") or "").lower() in ("+inf", "inf"))


def _backlog(series: SeriesSet, roles: dict[str, str]) -> float:
    """By how many more requests wait on decode at the window's end than at its begin."""
    return sum(
        float(waiting.values[-1] - waiting.values[0])
        for waiting in series.named("vllm:num_requests_waiting")
        if roles.get(waiting.target) == Role.DECODE and len(waiting.values)
    )


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


def _holes(series: SeriesSet, start: float, end: float) -> dict[str, float]:
    """Targets that were not scraped for more than five of their own intervals (and 30 s), and for how long (s)."""
    found = {}
    for target, times in sorted(series.scrapes.items()):
        between = np.diff(times)
        usual = float(np.median(between)) if len(between) else end - start
        longest = max(float(times[0]) - start, end - float(times[-1]), float(between.max(initial=0.0)))
        if longest > max(5 * usual, 30.0) or (not len(between) and end > start):
            found[target] = longest
    return found


def _models(series: SeriesSet, roles: dict[str, str]) -> list[str]:
    """Models that the engines of the deployment serve."""
    named = [*series.named("kvtune_connector_setting")]
    named += [s for name in ("vllm:request_success_total", "vllm:kv_cache_usage_perc") for s in series.named(name)]
    return sorted({m for s in named if s.target in roles and (m := s.label("model_name"))})


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
    for name, setting, unit, flag in (
        (ttl.SETTING, ttl_now, " s", "--current-ttl"),
        (threshold.SETTING, tau, " tokens", "--current-threshold"),
    ):
        if setting.assumed:
            checks.append(Check(
                "assumed_setting", "warning",
                f"{name} is not exposed (kvtune_connector_setting); vLLM's default {digits(setting.value)}{unit} is "
                f"assumed; state what is in force ({flag})",
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
        elif highest > (kept := asked.most_s if asked is not None else ttl_now.value):
            checks.append(Check(
                "router_ttl", "warning",
                f"the router takes {digits(highest)} s for the life of references that do not carry their own, and "
                f"decode keeps KV for {digits(kept)} s; kvtune's connector writes it into them, others would lapse",
            ))  # fmt: skip
        else:
            checks.append(Check("router_ttl", "ok", f"router TTL {digits(highest)} s fits decode's {digits(kept)} s"))
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


def _statement_checks(series: SeriesSet, stated: stock.Stated) -> list[Check]:
    """What engines say themselves is believed, whatever is stated."""
    checks = []
    for name, value, flag, role in (
        (ttl.SETTING, stated.ttl_s, "--current-ttl", Role.DECODE),
        (threshold.SETTING, stated.threshold, "--current-threshold", Role.PREFILL),
    ):
        found = series.named("kvtune_connector_setting", setting=name, role=role.value)
        exposed = {float(s.values[-1]) for s in found}
        if value is None or not exposed:
            continue
        said = ", ".join(map(digits, sorted(exposed)))
        if exposed != {value}:
            checks.append(Check(
                "stated_differs", "warning",
                f"{flag} {digits(value)} is not used: engines say that {name} is {said} (kvtune_connector_setting), "
                f"and that counts",
            ))  # fmt: skip
        else:
            checks.append(Check(
                "stated_needless", "info", f"{flag} {digits(value)} is not needed: engines say the same of {name}",
            ))  # fmt: skip
    return checks


def _mode_checks(
    series: SeriesSet, mode: Mode, labelled: dict[str, str], roles: dict[str, str], bounds: stock.StockInputs | None
) -> list[Check]:
    """Which series are missing, and what is not known for want of them."""
    checks = []
    if bounds is not None:
        checks += [Check(*one) for one in stock.checks(bounds)]
    elif mode is Mode.ENGINES:
        checks.append(Check(
            "no_router", "warning",
            "no router series (kvtune_turns_total, kvtune_turn_gap_seconds, kvtune_turn_ends_total): pauses are the "
            "ages at which decode's retentions were read; returns after the TTL, outcomes and TTFT are not known",
        ))  # fmt: skip
    guessed = sorted(set(roles) - set(labelled))
    if guessed and mode is not Mode.STOCK:
        checks.append(Check(
            "stock_engines", "warning",
            f"without kvtune's connector (no kvtune_connector_setting): {', '.join(guessed)}; kvtune's router hands "
            "over no reference that such an engine made, so what it retains serves nobody"
            if mode in (Mode.KVTUNE, Mode.ROUTER)
            else f"without kvtune's connector (no kvtune_connector_setting): {', '.join(guessed)}",
        ))  # fmt: skip
    unknown = sorted((set(stock.engines(series)) & stock.with_nixl(series)) - set(roles))
    if unknown:
        checks.append(Check(
            "role_unknown", "warning",
            f"prefill or decode? {', '.join(unknown)} was left out; say which it is (--role)",
        ))  # fmt: skip
    return checks


def _target_checks(series: SeriesSet, mode: Mode, roles: dict[str, str], pools: _Pools) -> list[Check]:
    checks = []
    connector = "" if mode is Mode.STOCK else " with the kvtune connector"
    for role in (Role.PREFILL, Role.DECODE):
        if role not in roles.values():
            checks.append(Check(
                f"no_{role.value}", "error", f"no {role.value} engine{connector} among the targets",
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
    models = _models(series, roles)
    if len(models) > 1:
        checks.append(Check(
            "mixed_models", "warning",
            f"several models in the sources ({', '.join(models)}): ask for each alone",
        ))  # fmt: skip
    connectors = {v for s in series.named("kvtune_connector_build_info") if (v := s.label("version"))}
    fields: dict[str, set[str]] = {}
    for info in series.named("vllm:cache_config_info"):
        fields.setdefault(info.target, set()).update(name for name in _VERSIONED if info.label(name) is not None)
    if len(connectors) > 1 or len({frozenset(of) for target, of in fields.items() if target in roles}) > 1:
        of = f"of kvtune's connector ({', '.join(sorted(connectors))})" if len(connectors) > 1 else "of vLLM"
        checks.append(Check("mixed_versions", "warning", f"the engines run different versions {of}"))
    return checks


_VERSIONED = ("effective_attention_block_size", "kv_cache_size_tokens", "kv_cache_max_concurrency", "hash_block_size")
"""Fields of `vllm:cache_config_info` that came with later versions; no series states vLLM's version itself."""


def _event_checks(
    series: SeriesSet, restarts: dict[str, int], holes: dict[str, float], stock_prefill: bool
) -> list[Check]:
    checks = []
    if restarts:
        listed = ", ".join(f"{target} ({count})" for target, count in restarts.items())
        checks.append(Check(
            "restarts", "warning",
            f"counters were reset: {listed}; increments are corrected, pauses that spanned a router's restart are lost",
        ))  # fmt: skip
    # of P's notifications nothing follows: those are hand-overs of clients that left
    late = series.increase("kvtune_kv_late_notifications_total", role=Role.DECODE.value) or 0.0
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
    for target, longest in holes.items():
        checks.append(Check("scrape_gaps", "warning", f"{target}: no scrape for {longest:.0f} s inside the window"))
    checks.extend(Check("source", "info", note) for note in series.notes)
    if stock_prefill:
        checks.append(Check(
            "failure_policy", "info",
            "set kv_load_failure_policy to recompute on stock prefill engines: its default fails a turn whose read "
            "fails or is declined",
        ))  # fmt: skip
    return checks
