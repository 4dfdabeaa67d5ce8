"""Recording rules as data: what boards, alerts and operators share, computed once by Prometheus.

Names are `kvtune:<what>:<operation>`. Router series are kept by `job`; series that join router and engines carry the
router's `job`. Rules about other TTLs come from the pauses between turns, which are known as bucketed counters: a share
of pauses below T is interpolated linearly inside T's bucket, and mean retained tokens are the rate of tokens that ask
to be retained times the integral of their survival up to T (Little's law).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType

from kvtune_dashboards.config import RulesConfig, duration
from kvtune_dashboards.promql import (
    Expr,
    Match,
    PromqlError,
    Selector,
    any_of,
    by,
    ceil_to,
    clamp,
    clamp_max,
    clamp_min,
    constants,
    first_seen,
    floor_to,
    increase,
    metric,
    none_of,
    now,
    over_time,
    quantile,
    rate,
    ratio,
    re_,
    sum_by,
    total,
    whole,
    without_point,
)
from kvtune_telemetry.buckets import COARSE_SIZE_EDGES, GAP_SECONDS, SIZE_EDGES, size_label, size_labels
from kvtune_telemetry.vocabulary import End, Outcome, Path, Role

NOT_REUSABLE = (Outcome.FIRST, Outcome.NO_IDENTITY, Outcome.DISABLED, Outcome.ERROR)
"""Outcomes of turns that could not have reused: nothing was known before them, reuse was off, or the turn failed."""
OTHER_TTLS = "kvtune-retention-other-ttl"
"""The group of rules about other TTLs: over long windows, and evaluated less often."""
TTL_FACTORS = (0.5, 1.0, 2.0)
"""The TTLs that are asked about, as parts of the one in force."""
_TINY = 1e-9


@dataclass(frozen=True, slots=True)
class RecordingRule:
    """One rule. Several may share a name; their static `labels` then differ."""

    name: str
    expr: str
    group: str
    help: str
    unit: str
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Labels that the rule sets."""
    keeps: tuple[str, ...] = ()
    """Labels that its series have from the expression, sorted."""

    def all_labels(self) -> tuple[str, ...]:
        """Every label of its series, sorted."""
        return tuple(sorted({*self.keeps, *self.labels}))


def interval_of(group: str, config: RulesConfig) -> float:
    """Seconds between evaluations of a group."""
    slow = group == OTHER_TTLS
    return config.windows.slow_evaluation if slow else config.windows.evaluation


def le(edge: float) -> Match:
    """The bucket with this upper edge, written `60` by some exporters and `60.0` by others."""
    whole = edge == int(edge)
    text = f"{int(edge)}" if whole else f"{edge!r}"
    return re_(f"{re.escape(text)}(\\.0)?" if whole else re.escape(text))


class _Book:
    """Rules in the making, and what selects them."""

    def __init__(self, config: RulesConfig) -> None:
        self.config = config
        self.rules: list[RecordingRule] = []
        self.own = config.deployment_labels
        self.job = ("job", *self.own)
        self.model = ("job", "model_name", *self.own)
        self._group = ""

    def group(self, name: str) -> None:
        """Begin a group."""
        self._group = name

    def of(self, name: str, /, **matchers: str | Match) -> Selector:
        """Series as they are scraped."""
        return metric(name, extra=self.own, **matchers)

    def add(self, name: str, expr: Expr, unit: str, help: str, **static: str) -> None:
        """A rule; `static` are labels that it sets."""
        clash = expr.labels.intersection(static)
        if clash:
            raise PromqlError(f"{name} sets {sorted(clash)}, which its expression has")
        if expr.is_scalar:
            raise PromqlError(f"{name} is a constant")
        self.rules.append(
            RecordingRule(
                name, expr.text, self._group, " ".join(help.split()), unit, MappingProxyType(dict(static)),
                tuple(sorted(expr.labels)),
            )
        )  # fmt: skip

    def recorded(self, name: str, /, **matchers: str | Match) -> Selector:
        """Series of a rule that was added."""
        return recorded(name, self.rules, **matchers)


def recorded(name: str, rules: Sequence[RecordingRule] | None = None, /, **matchers: str | Match) -> Selector:
    """Select the series of a recording rule; refuses rules and labels that there are not."""
    found = [rule for rule in (RECORDING_RULES if rules is None else rules) if rule.name == name]
    if not found:
        raise PromqlError(f"there is no recording rule `{name}`")
    labels = frozenset(found[0].all_labels())
    parts = []
    for label, value in matchers.items():
        if label not in labels:
            raise PromqlError(f"`{name}` has no label `{label}`; it has {', '.join(sorted(labels)) or 'none'}")
        match = Match("=", value) if isinstance(value, str) else value
        static = {rule.labels[label] for rule in found if label in rule.labels}
        if static and match.operator == "=" and "$" not in match.value and match.value not in static:
            raise PromqlError(f"`{label}` of `{name}` is never `{match.value}`; it is one of {sorted(static)}")
        escaped = match.value.replace("\\", "\\\\").replace('"', '\\"')
        parts.append(f'{label}{match.operator}"{escaped}"')
    return Selector(name + (f"{{{','.join(parts)}}}" if parts else ""), labels)


def recording_rules(config: RulesConfig) -> tuple[RecordingRule, ...]:
    """All rules, in an order in which each comes after those it reads."""
    book = _Book(config)
    _reuse(book)
    _objective(book)
    _transfer(book)
    _costs(book)
    _retention(book)
    _settings(book)
    _other_ttls(book)
    return tuple(book.rules)


def _min_of(first: Expr, second: Expr) -> Expr:
    return first.under(second).otherwise(second)


def _max_of(first: Expr, second: Expr) -> Expr:
    return first.over(second).otherwise(second)


def _reuse(book: _Book) -> None:
    w = duration(book.config.windows.rate)
    book.group("kvtune-reuse")
    book.add(
        "kvtune:turns:rate", sum_by(rate(book.of("kvtune_turns_total"), w), *book.job, "outcome"), "turns/s",
        "Turns a second, by outcome.",
    )  # fmt: skip

    def turns(outcome: str | Match) -> Expr:
        return sum_by(book.recorded("kvtune:turns:rate", outcome=outcome), *book.job)

    book.add(
        "kvtune:followup_turns:rate", turns(none_of(*NOT_REUSABLE)), "turns/s",
        "Turns a second that had a history and could have reused it: all but first turns, turns of unknown "
        "conversations, turns served without reuse on purpose and failed ones.",
    )  # fmt: skip
    followup = book.recorded("kvtune:followup_turns:rate")
    for name, outcome, what in (
        ("reused", Outcome.HIT, "whose history was reused"),
        ("expired", Outcome.EXPIRED, "that came too late for the retention"),
        ("lost", Outcome.ENGINE_GONE, "whose engine is down or has restarted"),
        ("unverified", Outcome.UNVERIFIED, "whose reference nothing proves"),
    ):
        book.add(
            f"kvtune:followup_turns_{name}:ratio", ratio(turns(outcome.value), followup), "ratio",
            f"Share of follow-up turns {what}.",
        )  # fmt: skip
    book.add(
        "kvtune:turns_unidentified:ratio",
        ratio(turns(Outcome.NO_IDENTITY.value), sum_by(book.recorded("kvtune:turns:rate"), *book.job)), "ratio",
        "Share of all turns of which nothing tells their conversation.",
    )  # fmt: skip
    name = "kvtune_turn_ttft_seconds"
    missed = none_of(Outcome.HIT, Outcome.DISABLED, Outcome.ERROR)
    groups: tuple[tuple[str, dict[str, str | Match], str], ...] = (
        ("first", {"turn": "first"}, "first turns"),
        ("followup", {"turn": "followup"}, "follow-up turns"),
        ("hit", {"turn": "followup", "outcome": Outcome.HIT.value}, "follow-up turns that reused"),
        ("miss", {"turn": "followup", "outcome": missed}, "follow-up turns that could have reused and did not"),
    )
    for q, operation in ((0.5, "p50"), (0.9, "p90")):
        for group, matchers, what in groups:
            book.add(
                f"kvtune:ttft_seconds:{operation}", quantile(q, name, w, book.job, extra=book.own, **matchers),
                "seconds", f"Time to first token, P{q * 100:g} of {what}.", group=group,
            )  # fmt: skip


def _objective(book: _Book) -> None:
    slo = book.config.ttft_slo
    book.group("kvtune-ttft-objective")
    turns: dict[str, str | Match] = {} if slo.turns == "all" else {"turn": slo.turns}
    for seconds in sorted({window for burn in slo.burns for window in (burn.long, burn.short)}):
        w = duration(seconds)
        good = sum_by(rate(book.of("kvtune_turn_ttft_seconds_bucket", le=le(slo.bound), **turns), w), *book.job)
        every = sum_by(rate(book.of("kvtune_turn_ttft_seconds_count", **turns), w), *book.job)
        book.add(
            "kvtune:ttft_slow:ratio", 1 - ratio(good, every), "ratio",
            f"Share of turns whose first byte took longer than {duration(slo.bound)}.", window=w,
        )  # fmt: skip


def _coarse_classes() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each coarse size class and the fine ones in it."""
    fine = size_labels(SIZE_EDGES)
    for label in size_labels(COARSE_SIZE_EDGES):
        inside = [f for f, edge in zip(fine, (*SIZE_EDGES, SIZE_EDGES[-1] + 1), strict=True)
                  if size_label(edge, COARSE_SIZE_EDGES) == label]  # fmt: skip
        yield label, tuple(inside)


def _transfer(book: _Book) -> None:
    w = duration(book.config.windows.rate)
    keep = (*book.model, "direction")
    book.group("kvtune-transfer")
    book.add(
        "kvtune:history_tokens:rate",
        sum_by(rate(book.of("kvtune_decision_tokens_total"), w), *book.model, "decision", "reason"), "tokens/s",
        "Tokens of histories a second by what prefill did about them: fetched, held locally, or available on decode "
        "and computed again.",
    )  # fmt: skip
    book.add(
        "kvtune:prompt_tokens:rate",
        sum_by(rate(book.of("kvtune_prompt_tokens_total"), w), *book.model, "source"), "tokens/s",
        "Prompt tokens a second, by where their KV comes from.",
    )  # fmt: skip
    book.add(
        "kvtune:kv_reads:rate", sum_by(rate(book.of("kvtune_kv_reads_total"), w), *keep, "size"), "reads/s",
        "KV reads a second, by direction and size.",
    )  # fmt: skip
    book.add(
        "kvtune:kv_read_bytes:rate", sum_by(rate(book.of("kvtune_kv_read_bytes_total"), w), *keep, "size"), "bytes/s",
        "Bytes of KV read a second, by direction and size.",
    )  # fmt: skip
    failed = sum_by(rate(book.of("kvtune_kv_reads_failed_total"), w), *keep)
    read = sum_by(book.recorded("kvtune:kv_reads:rate"), *keep)
    book.add(
        "kvtune:kv_reads_failed:ratio", ratio(failed, failed + read), "ratio", "Share of KV reads that failed.",
    )  # fmt: skip
    seconds = sum_by(rate(book.of("kvtune_kv_read_seconds_sum"), w), *keep, "size")
    count = sum_by(rate(book.of("kvtune_kv_read_seconds_count"), w), *keep, "size")
    book.add(
        "kvtune:kv_read_seconds:mean", ratio(seconds, count), "seconds",
        "Mean transfer time of a KV read, by direction and coarse size.",
    )  # fmt: skip
    for size, fine in _coarse_classes():
        moved = sum_by(book.recorded("kvtune:kv_read_bytes:rate", size=any_of(*fine)), *keep)
        taken = sum_by(rate(book.of("kvtune_kv_read_seconds_sum", size=size), w), *keep)
        book.add(
            "kvtune:kv_read_bytes_per_second:mean", ratio(moved, taken), "bytes/s",
            "Bytes a second while a KV read lasts, by direction and coarse size: what one read gets of the network.",
            size=size,
        )  # fmt: skip


_SUMS = ("observations", "tokens", "tokens_squared", "seconds", "token_seconds")


def _costs(book: _Book) -> None:
    advice = book.config.advice
    w = duration(book.config.windows.cost)
    book.group("kvtune-costs")
    each = (*book.model, "path", "size")
    for name in ("tokens", "seconds"):
        book.add(
            f"kvtune:path_{name}:mean",
            ratio(
                sum_by(rate(book.of(f"kvtune_path_{name}_total"), w), *each),
                sum_by(rate(book.of("kvtune_path_observations_total"), w), *each),
            ),
            name, f"Mean {name} of an observed fetch or computation, by size.",
        )  # fmt: skip
    for name in _SUMS:
        book.add(
            f"kvtune:path_{name}:increase",
            sum_by(increase(book.of(f"kvtune_path_{name}_total"), w), *book.model, "path"), name.replace("_", " "),
            "One of the sums over the cost window that the lines through both costs are drawn from.",
        )  # fmt: skip
    n, x, xx, y, xy = (book.recorded(f"kvtune:path_{name}:increase") for name in _SUMS)
    determinant = (n * xx - x * x).over(x * x * advice.cost_spread).over(0)
    enough = n.at_least(advice.cost_observations)
    book.add(
        "kvtune:path_seconds_per_token:slope", ((n * xy - x * y) / determinant).where(enough), "seconds/token",
        "Seconds that one more token costs, by least squares; absent where too few or too similar sizes were seen.",
    )  # fmt: skip
    book.add(
        "kvtune:path_fixed_seconds:intercept",
        (y - book.recorded("kvtune:path_seconds_per_token:slope") * x) / n.over(0), "seconds",
        "Seconds that a path costs whatever the size.",
    )  # fmt: skip

    def line(name: str, path: Path) -> Expr:
        return sum_by(book.recorded(name, path=path.value), *book.model)

    computing = clamp_min(line("kvtune:path_seconds_per_token:slope", Path.RECOMPUTE), 0)
    fetching = line("kvtune:path_seconds_per_token:slope", Path.FETCH)
    fixed = clamp_min(line("kvtune:path_fixed_seconds:intercept", Path.FETCH), 0)

    short = duration(book.config.windows.rate)
    tokens = sum_by(rate(book.of("kvtune_path_tokens_total", path=Path.FETCH.value), short), *book.model)
    spent = sum_by(rate(book.of("kvtune_path_seconds_total", path=Path.FETCH.value), short), *book.model)
    on_average = ratio(
        line("kvtune:path_seconds:increase", Path.RECOMPUTE), line("kvtune:path_tokens:increase", Path.RECOMPUTE)
    )
    book.add(
        "kvtune:recompute_seconds_per_token:mean", computing.otherwise(on_average), "seconds/token",
        "Seconds of prefill that one more token of history costs: the line's slope, or, where there is none, the mean "
        "with the fixed part in it.",
    )  # fmt: skip
    book.add(
        "kvtune:prefill_seconds_saved:rate",
        tokens * book.recorded("kvtune:recompute_seconds_per_token:mean") - spent, "seconds/s",
        "Seconds of prefill saved each second: what computing the fetched tokens would have taken, less the fetches.",
    )  # fmt: skip
    sizes = book.recorded("kvtune:path_tokens:mean", path=Path.FETCH.value)
    seconds = book.recorded("kvtune:path_seconds:mean", path=Path.FETCH.value)
    by_size = (*book.model, "size")
    per_token = book.recorded("kvtune:recompute_seconds_per_token:mean")
    book.add(
        "kvtune:fetch_gain_seconds:mean",
        sum_by(sizes, *by_size).joined("*", per_token, book.model) - sum_by(seconds, *by_size), "seconds",
        "Seconds that one fetch of this size saves against computing; below zero it costs.",
    )  # fmt: skip
    book.add(
        "kvtune:threshold_tokens:in_force",
        by("max", book.of("kvtune_connector_setting", setting="kv_recompute_threshold", role=Role.PREFILL.value),
           *book.model), "tokens",
        "`kv_recompute_threshold` of prefill.",
    )  # fmt: skip
    book.add(
        "kvtune:threshold_tokens:crossing", fixed / (computing - fetching).over(0), "tokens",
        "History length at which fetching and computing cost the same; absent where computing is always "
        "cheaper.",
    )  # fmt: skip
    seen = by("max", book.recorded("kvtune:path_tokens:mean", path=Path.RECOMPUTE.value), *book.model)
    book.add(
        "kvtune:threshold_tokens:highest", _min_of(by("max", sizes, *book.model), seen), "tokens",
        "The longest histories that were both fetched and computed: no threshold above is advised.",
    )  # fmt: skip
    book.add(
        "kvtune:threshold_tokens:lowest", by("min", sizes, *book.model) / advice.threshold_reach, "tokens",
        "No threshold below is advised: the line through fetches is not trusted further from those that were seen.",
    )  # fmt: skip
    highest, lowest = book.recorded("kvtune:threshold_tokens:highest"), book.recorded("kvtune:threshold_tokens:lowest")
    # Where computing is cheaper per token as well, nothing that was seen is worth fetching.
    never = highest.where((computing - fetching).at_most(0))
    capped = _min_of(book.recorded("kvtune:threshold_tokens:crossing"), highest).where(
        book.recorded("kvtune:threshold_tokens:crossing")
    )
    book.add(
        "kvtune:threshold_tokens:advised",
        whole(_max_of(capped.otherwise(never), lowest).where(computing)), "tokens",
        "Threshold to set: the crossing, within the sizes that were seen on both paths.",
    )  # fmt: skip


def _retention(book: _Book) -> None:
    w = duration(book.config.windows.rate)
    decode = Role.DECODE.value
    book.group("kvtune-retention")
    book.add(
        "kvtune:retained_token_seconds:rate",
        sum_by(rate(book.of("kvtune_retained_token_seconds_total"), w), *book.model, "end"), "tokens",
        "Token-seconds of retention booked a second, by end: the mean of tokens that were held and ended so.",
    )  # fmt: skip
    every = sum_by(book.recorded("kvtune:retained_token_seconds:rate"), *book.model)
    read = sum_by(book.recorded("kvtune:retained_token_seconds:rate", end=End.READ.value), *book.model)
    book.add(
        "kvtune:retained_wasted:ratio", 1 - ratio(read, every), "ratio",
        "Share of the retained token-seconds that ended without being read.",
    )  # fmt: skip
    each = (*book.model, "instance", "engine")
    pool = by("max", book.of("kvtune_connector_setting", setting="kv_pool_tokens", role=decode), *each)
    held = by("max", book.of("kvtune_retained_tokens", role=decode), *each)
    book.add(
        "kvtune:retained_pool:ratio", ratio(held, pool), "ratio", "Share of an engine's KV pool that is retained.",
    )  # fmt: skip
    book.add("kvtune:retained_tokens:sum", sum_by(held, *book.model), "tokens", "Tokens that decode retains.")
    book.add("kvtune:kv_pool_tokens:sum", sum_by(pool, *book.model), "tokens", "Tokens that decode's KV pools hold.")


def _settings(book: _Book) -> None:
    own = book.own
    book.group("kvtune-settings")
    shown = book.of("kvtune_connector_setting", setting=none_of("kv_pool_tokens"))
    keep = ("model_name", "role", "setting", *own)
    book.add(
        "kvtune:connector_setting:spread", by("max", shown, *keep) - by("min", shown, *keep), "1",
        "Largest less smallest value of a setting among the engines of one role; 0 where they agree.",
    )  # fmt: skip
    routers = book.of("kvtune_router_setting")
    book.add(
        "kvtune:router_setting:spread",
        by("max", routers, "job", "setting", *own) - by("min", routers, "job", "setting", *own), "1",
        "The same among the routers of one job.",
    )  # fmt: skip

    def router(setting: str) -> Expr:
        return by("max", book.of("kvtune_router_setting", setting=setting), *own)

    def decode(setting: str) -> Expr:
        return by("min", book.of("kvtune_connector_setting", setting=setting, role=Role.DECODE.value), *own)

    asked = router("retain_seconds").over(0)
    book.add(
        "kvtune:ttl_seconds:in_force",
        decode("max_retain_seconds").under(asked).otherwise(asked).otherwise(decode("decoder_kv_blocks_ttl"))
        .otherwise(router("default_ttl_seconds")), "seconds",
        "Seconds that decode retains a turn: what the router asks for within decode's bound, else decode's TTL, else "
        "what the router assumes.",
    )  # fmt: skip


def ladder(config: RulesConfig) -> tuple[float, ...]:
    """The TTLs (s) at which retained tokens are predicted, to find the one that fits: the bucket edges."""
    return tuple(edge for edge in GAP_SECONDS if edge >= config.advice.ttl_floor)


_BEYOND = 1e12
"""Edge after the last: so far that nothing rises between."""
_EDGES = ("lower", "upper", "after")


def _edges(book: _Book) -> None:
    """Constants by `le`, so that a formula in all buckets is one expression: PromQL cannot compute with a label."""
    for name, edges in zip(_EDGES, ((0.0, *GAP_SECONDS[:-1]), GAP_SECONDS, (*GAP_SECONDS[1:], _BEYOND)), strict=True):
        values = {f"{le:g}": edge for le, edge in zip(GAP_SECONDS, edges, strict=True)}
        book.add(
            f"kvtune:gap_edge_seconds:{name}", constants("le", values), "seconds",
            f"Constant: the {name} edge of each bucket of pauses ('after': the upper edge of the next).",
        )  # fmt: skip


def _ramp(book: _Book, t: Expr | float, low: str, high: str) -> Expr:
    """Per bucket: 0 for `t` below its edge `low`, 1 above `high`, linear between. `t` is a number or has label `le`."""
    width = book.recorded(f"kvtune:gap_edge_seconds:{high}") - book.recorded(f"kvtune:gap_edge_seconds:{low}")
    return clamp(_per_bucket("/", _past(book, t, low), width.over(0)), 0, 1)


def _area(book: _Book, t: Expr | float, low: str, high: str) -> Expr:
    """The integral of `_ramp` from 0 to `t`."""
    width = book.recorded(f"kvtune:gap_edge_seconds:{high}") - book.recorded(f"kvtune:gap_edge_seconds:{low}")
    below, above = clamp_min(_past(book, t, low), 0), clamp_min(_past(book, t, high), 0)
    return _per_bucket("/", (below - above) ** 2, (2 * width).over(0)) + above


def _past(book: _Book, t: Expr | float, edge: str) -> Expr:
    at = book.recorded(f"kvtune:gap_edge_seconds:{edge}")
    return _per_bucket("-", t, at) if isinstance(t, Expr) else t - at


def _per_bucket(operator: str, left: Expr, right: Expr) -> Expr:
    if left.labels == right.labels:
        return left - right if operator == "-" else left / right
    return left.joined(operator, right, ("le",))


def _other_ttls(book: _Book) -> None:
    config, job = book.config, book.job
    history, demand = duration(config.windows.history), duration(config.windows.demand)
    book.group(OTHER_TTLS)
    _edges(book)
    book.add(
        "kvtune:turn_ends:increase", sum_by(increase(book.of("kvtune_turn_ends_total"), history), *job), "turns",
        "Turns that ended in the history window: how much the predictions rest on.",
    )  # fmt: skip
    for what, gaps, exposed in (
        ("turn_gaps", "kvtune_turn_gap_seconds_bucket", "kvtune_turn_ends_total"),
        ("turn_gap_tokens", "kvtune_turn_gap_tokens_bucket", "kvtune_turn_end_tokens_total"),
    ):
        weighted = "tokens held at turn ends" if what == "turn_gap_tokens" else "turn ends"
        exposure = sum_by(rate(book.of(exposed), history), *job).over(0)
        share = clamp_max(sum_by(rate(book.of(gaps), history), *job, "le").joined("/", exposure, job), 1)
        book.add(
            f"kvtune:{what}:ratio", without_point(share, "le"), "ratio",
            f"Share of {weighted} whose conversation returned within `le` seconds.",
        )  # fmt: skip
    in_force = book.recorded("kvtune:ttl_seconds:in_force")
    ends = book.recorded("kvtune:turn_ends:increase")
    margin = by("max", book.of("kvtune_router_setting", setting="margin_seconds"), *job)
    for factor in TTL_FACTORS:
        book.add(
            "kvtune:ttl_seconds:factor", (ends * 0).joined("+", in_force * factor, book.own), "seconds",
            "The TTL in force, times `factor`.", factor=f"{factor:g}",
        )  # fmt: skip
    book.add(
        "kvtune:ttl_usable_seconds:factor",
        clamp_min(book.recorded("kvtune:ttl_seconds:factor").joined("-", margin, job), 0), "seconds",
        "How long after a turn's end its KV can be read at that TTL: less the margin that reader and router keep.",
    )  # fmt: skip
    gaps_within = book.recorded("kvtune:turn_gaps:ratio")
    for factor in TTL_FACTORS:
        usable = sum_by(book.recorded("kvtune:ttl_usable_seconds:factor", factor=f"{factor:g}"), *job)
        at = (gaps_within * 0).joined("+", usable, job)
        hat = _ramp(book, at, "lower", "upper") - _ramp(book, at, "upper", "after")
        book.add(
            "kvtune:predicted_reuse:ratio", sum_by(gaps_within * hat, *job), "ratio",
            "Share of turn ends whose conversation returns in time at that TTL; the rest is late or never returns.",
            factor=f"{factor:g}",
        )  # fmt: skip
    returned = sum_by(book.recorded("kvtune:turn_gaps:ratio", le="+Inf"), *job).over(0)
    book.add(
        "kvtune:predicted_in_time:ratio", book.recorded("kvtune:predicted_reuse:ratio").joined("/", returned, job),
        "ratio", "Of the turns that return at all, the share that returns in time at that TTL.",
    )  # fmt: skip
    # A rate divides by its whole window, however little of it a young router or a young Prometheus has seen.
    begin = first_seen(book.of("kvtune_router_build_info"), demand, duration(config.windows.evaluation))
    book.add(
        "kvtune:demand_covered_seconds:max", by("max", now() - begin, *job).over(0), "seconds",
        "How much of the demand window was really observed: less than all of it while router or Prometheus are young.",
    )  # fmt: skip
    covered = book.recorded("kvtune:demand_covered_seconds:max")
    book.add(
        "kvtune:retained_demand_tokens:rate",
        sum_by(increase(book.of("kvtune_turn_end_tokens_total"), demand), *job) / covered.over(0), "tokens/s",
        "Tokens a second that ask to be retained, over what was observed of the demand window.",
    )  # fmt: skip
    asked = book.recorded("kvtune:retained_demand_tokens:rate")
    tokens_within = book.recorded("kvtune:turn_gap_tokens:ratio")

    def old_enough(ttl: Expr) -> Expr:
        return covered.at_least(clamp_max(ttl, config.windows.demand * 0.9))

    for factor in TTL_FACTORS:
        ttl = sum_by(book.recorded("kvtune:ttl_seconds:factor", factor=f"{factor:g}"), *job)
        at = (tokens_within * 0).joined("+", ttl, job)
        lost = _area(book, at, "lower", "upper") - _area(book, at, "upper", "after")
        book.add(
            "kvtune:predicted_retained_tokens:mean",
            (clamp_min(ttl - sum_by(tokens_within * lost, *job), 0) * asked).where(old_enough(ttl)), "tokens",
            "Mean tokens retained at that TTL: demand times the integral of token-weighted survival. Absent until what "
            "was observed is longer than the TTL: before, nobody can have been seen to stay away so long.",
            factor=f"{factor:g}",
        )  # fmt: skip
    pool = sum_by(book.recorded("kvtune:kv_pool_tokens:sum"), *book.own)
    book.add(
        "kvtune:predicted_retained_pool:ratio",
        book.recorded("kvtune:predicted_retained_tokens:mean").joined("/", pool.over(0), book.own), "ratio",
        "The same as a share of decode's KV pools.",
    )  # fmt: skip
    for rung in ladder(config):
        lost = _area(book, rung, "lower", "upper") - _area(book, rung, "upper", "after")
        left = rung - sum_by(tokens_within.joined("*", lost, ("le",)), *job)
        book.add(
            "kvtune:predicted_retained_tokens:at_ttl", clamp_min(left, 0) * asked, "tokens",
            "Mean tokens retained if the TTL were `ttl` seconds.", ttl=f"{rung:g}",
        )  # fmt: skip
    _advised_ttls(book, pool)


def _advised_ttls(book: _Book, pool: Expr) -> None:
    config, job = book.config, book.job
    advice = config.advice
    demand = duration(config.windows.demand)
    ends = book.recorded("kvtune:turn_ends:increase")
    enough = ends.at_least(advice.turn_ends)
    now = sum_by(book.recorded("kvtune:predicted_retained_tokens:mean", factor="1"), *job)
    held = sum_by(over_time("avg", book.recorded("kvtune:retained_tokens:sum"), demand), *book.own).over(0)
    # What decode was seen to hold scales what is foretold: some turns are not retained, others come past the router.
    seen = clamp(now.joined("/", held, book.own), 0.2, 5).otherwise(now * 0 + 1)
    book.add(
        "kvtune:retained_allowance_tokens:limit", seen.joined("*", pool * advice.pool_share, book.own), "tokens",
        "Predicted tokens at which decode would hold the share of its pools that retained KV may take.",
    )  # fmt: skip
    limit = book.recorded("kvtune:retained_allowance_tokens:limit")

    def held_at(ttl: float) -> Expr:
        return sum_by(book.recorded("kvtune:predicted_retained_tokens:at_ttl", ttl=f"{ttl:g}"), *job)

    rungs = ladder(config)
    # Retained tokens grow with the TTL: the inverse of a rising broken line is a sum of clamped pieces.
    pieces = [clamp(limit / clamp_min(held_at(rungs[0]), _TINY), 0, 1) * rungs[0]]
    for low, high in pairwise(rungs):
        rise = clamp_min(held_at(high) - held_at(low), _TINY)
        pieces.append(clamp((limit - held_at(low)) / rise, 0, 1) * (high - low))
    book.add(
        "kvtune:ttl_seconds:fits_pool", total(pieces).where(enough), "seconds",
        "The longest TTL whose retained tokens fit the share of decode's pools that they may take.",
    )  # fmt: skip
    gaps = book.recorded("kvtune:turn_gaps:ratio")
    margin = by("max", book.of("kvtune_router_setting", setting="margin_seconds"), *job)
    reach = Expr(f"histogram_quantile({1 - advice.expired_target:g}, {gaps})", frozenset(job))
    returned = sum_by(book.recorded("kvtune:turn_gaps:ratio", le="+Inf"), *job)
    book.add(
        "kvtune:ttl_seconds:reaches_target",
        (reach.at_least(0) + margin).where(returned.over(0)).where(enough), "seconds",
        "The TTL at which no more than the targeted share of returns comes too late.",
    )  # fmt: skip
    in_force = sum_by(book.recorded("kvtune:ttl_seconds:factor", factor="1"), *job)
    fits = book.recorded("kvtune:ttl_seconds:fits_pool")
    wanted = book.recorded("kvtune:ttl_seconds:reaches_target")
    raised = fits.under(wanted).otherwise(wanted)
    book.add(
        "kvtune:ttl_seconds:advised_raise", ceil_to(_max_of(in_force, raised), advice.ttl_step), "seconds",
        "TTL to raise to where too many turns come too late: what reaches the target, or less where the pool has no "
        "room for it; the TTL in force where neither allows more.",
    )  # fmt: skip
    book.add(
        "kvtune:ttl_seconds:advised_lower",
        clamp_min(floor_to(_min_of(fits, in_force).where(fits), advice.ttl_step), advice.ttl_floor), "seconds",
        "TTL to lower to where retained KV crowds the pool.",
    )  # fmt: skip


RECORDING_RULES: tuple[RecordingRule, ...] = recording_rules(RulesConfig())
"""The rules of the default configuration."""
