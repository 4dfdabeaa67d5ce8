"""Shared pieces of PromQL. An expression is built from the catalogue: what it does not hold cannot be written.

Every piece knows which labels its series carry, so that a misspelt name, a label that a metric does not have, a value
that a closed label cannot take, a `rate()` of a gauge and operands that could never match are refused where the
expression is built, not where it stays empty on somebody's screen. All refusals are `PromqlError`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from kvtune_dashboards.semantics import TARGET_LABELS, Series, catalogue_series

_ENGINE = TARGET_LABELS | {"model_name", "engine"}
_LE = _ENGINE | {"le"}

OTHER_SERIES: tuple[Series, ...] = (
    Series("up", "up", "gauge", TARGET_LABELS),
    Series("process_start_time_seconds", "process_start_time_seconds", "gauge", TARGET_LABELS, {}, {"second": 1}),
    Series("vllm:kv_cache_usage_perc", "vllm:kv_cache_usage_perc", "gauge", _ENGINE, {}, {}),
    Series("vllm:num_requests_waiting", "vllm:num_requests_waiting", "gauge", _ENGINE, {}, {"count": 1}),
    Series(
        "vllm:num_requests_waiting_by_reason", "vllm:num_requests_waiting_by_reason", "gauge",
        _ENGINE | {"reason"}, {}, {"count": 1},
    ),
    Series("vllm:num_requests_running", "vllm:num_requests_running", "gauge", _ENGINE, {}, {"count": 1}),
    *(
        Series(
            f"vllm:{name}{suffix}", f"vllm:{name}", "counter", _LE if suffix == "_bucket" else _ENGINE, {},
            {"count": 1} if suffix != "_sum" else unit,
        )
        for name, unit in (
            ("time_to_first_token_seconds", {"second": 1}),
            ("nixl_xfer_time_seconds", {"second": 1}),
            ("nixl_post_time_seconds", {"second": 1}),
            ("nixl_bytes_transferred", {"byte": 1}),
            ("nixl_num_descriptors", {"count": 1}),
        )
        for suffix in ("_bucket", "_sum", "_count")
    ),
    *(
        Series(f"vllm:{name}_total", f"vllm:{name}_total", "counter", _ENGINE, {}, {"count": 1})
        for name in (
            "nixl_num_failed_transfers",
            "nixl_num_failed_notifications",
            "nixl_num_kv_expired_reqs",
            "nixl_num_notifications_after_expiry",
        )
    ),
)  # fmt: skip
"""The series of vLLM and of Prometheus itself that boards and rules may use; what others may change without telling us
is kept few."""

_DURATION = re.compile(r"(?:\d+(?:ms|[smhdwy]))+")
_MACROS = frozenset({"$__rate_interval", "$__range", "$__interval"})
_PREFERENCE = {"^": 6, "*": 5, "/": 5, "%": 5, "+": 4, "-": 4, ">": 3, "<": 3, ">=": 3, "<=": 3, "==": 3, "!=": 3}
_PREFERENCE |= {"and": 2, "unless": 2, "or": 1}
_ATOM = 9


class PromqlError(ValueError):
    """An expression that makes no sense: says what, and what there is instead."""


@dataclass(frozen=True, slots=True)
class Match:
    """A matcher other than equality: `operator` is `!=`, `=~` or `!~`."""

    operator: str
    value: str


def re_(value: str) -> Match:
    """Series whose label matches the regular expression, anchored at both ends as PromQL does."""
    return Match("=~", value)


def not_re(value: str) -> Match:
    """Series whose label does not match the regular expression."""
    return Match("!~", value)


def any_of(*values: str) -> Match:
    """Series whose label is one of the words."""
    return Match("=~", "|".join(re.escape(value) for value in values))


def none_of(*values: str) -> Match:
    """Series whose label is none of the words."""
    return Match("!~", "|".join(re.escape(value) for value in values))


@dataclass(frozen=True, slots=True)
class Expr:
    """A PromQL expression. `labels` are the labels of its series; a scalar has none and matches everything."""

    text: str
    labels: frozenset[str] = frozenset()
    is_scalar: bool = False
    binds: int = _ATOM
    """How tightly its outermost operator binds; `_ATOM` where there is none."""

    def __str__(self) -> str:
        return self.text

    def __add__(self, other: Expr | float) -> Expr:
        return _binary(self, "+", other)

    def __radd__(self, other: float) -> Expr:
        return _binary(other, "+", self)

    def __sub__(self, other: Expr | float) -> Expr:
        return _binary(self, "-", other)

    def __rsub__(self, other: float) -> Expr:
        return _binary(other, "-", self)

    def __mul__(self, other: Expr | float) -> Expr:
        return _binary(self, "*", other)

    def __rmul__(self, other: float) -> Expr:
        return _binary(other, "*", self)

    def __rtruediv__(self, other: float) -> Expr:
        return _binary(other, "/", self)

    def __truediv__(self, other: Expr | float) -> Expr:
        return _binary(self, "/", other)

    def __pow__(self, power: float) -> Expr:
        return _binary(self, "^", power)

    def over(self, floor: Expr | float) -> Expr:
        """Those of its series that are above `floor`."""
        return _binary(self, ">", floor)

    def under(self, ceiling: Expr | float) -> Expr:
        """Those of its series that are below `ceiling`."""
        return _binary(self, "<", ceiling)

    def at_least(self, floor: Expr | float) -> Expr:
        """Those of its series that are `floor` or more."""
        return _binary(self, ">=", floor)

    def at_most(self, ceiling: Expr | float) -> Expr:
        """Those of its series that are `ceiling` or less."""
        return _binary(self, "<=", ceiling)

    def equal_to(self, value: Expr | float) -> Expr:
        """Those of its series that are exactly `value`."""
        return _binary(self, "==", value)

    def where(self, other: Expr, on: Iterable[str] | None = None) -> Expr:
        """Its series for which `other` has one too (`and`), by the labels `on` or by all of them."""
        return _set(self, "and", other, on)

    def unless(self, other: Expr, on: Iterable[str] | None = None) -> Expr:
        """Its series for which `other` has none."""
        return _set(self, "unless", other, on)

    def otherwise(self, other: Expr) -> Expr:
        """Its series, and those of `other` that it lacks (`or`); both must carry the same labels."""
        if self.labels != other.labels:
            raise PromqlError(
                f"`or` of {_listed(self.labels)} and {_listed(other.labels)}: what comes out would have one or the "
                f"other; aggregate both to the same labels: `{self}` and `{other}`"
            )
        return Expr(f"{_wrapped(self, 1)} or {_wrapped(other, 1)}", self.labels, binds=1)

    def joined(self, operator: str, other: Expr, on: Iterable[str]) -> Expr:
        """Arithmetic or a comparison with the one series of `other` that has the same labels `on`; keeps its labels.

        `other` must have no labels but `on`: with more there could be several, which Prometheus refuses at run time.
        """
        keys = tuple(on)
        if operator not in _PREFERENCE or operator in ("and", "or", "unless"):
            raise PromqlError(f"`{operator}` is no arithmetic or comparison")
        missing = frozenset(keys) - self.labels
        if missing:
            raise PromqlError(f"`{self}` has no label {_listed(missing)} to match on")
        if other.labels != frozenset(keys):
            raise PromqlError(
                f"`{other}` has the labels {_listed(other.labels)} and is matched on {_listed(keys)}: "
                "aggregate it to those"
            )
        many = "" if self.labels == other.labels else " group_left ()"
        level = _PREFERENCE[operator]
        text = f"{_wrapped(self, level)} {operator} on ({', '.join(keys)}){many} {_wrapped(other, level + 1)}"
        return Expr(text, self.labels, binds=level)


@dataclass(frozen=True, slots=True)
class Selector(Expr):
    """An instant selector of one sample name."""

    kind: str = "gauge"

    def ranged(self, window: str, offset: str | None = None) -> str:
        """The text of its range selector."""
        return f"{self.text}[{_window(window)}]" + (f" offset {_window(offset)}" if offset else "")


@cache
def _known() -> dict[str, Series]:
    return catalogue_series() | {series.name: series for series in OTHER_SERIES}


def spellings(name: str) -> tuple[str, ...]:
    """A sample name, and what else a server may hold it as.

    vLLM names its series `vllm:x`. prometheus_client from 0.22 on writes `vllm_x` for it in OpenMetrics, unless the
    scraper says `escaping=allow-utf-8`, which Prometheus 2 does not. No target has both.
    """
    return (name, name.replace(":", "_")) if name.startswith("vllm:") else (name,)


def metric(name: str, /, *, extra: Iterable[str] = (), **matchers: str | Match) -> Selector:
    """Select the series of a sample name (`_bucket`, `_sum` and `_count` included), in all its `spellings`.

    Args:
        name: A name of the catalogue or of `OTHER_SERIES`.
        extra: Labels that the deployment's Prometheus adds to every series (cluster, namespace).
        matchers: Label and value, or a `Match`. Values of closed labels are checked; Grafana's variables are not.
    """
    series = _known().get(name)
    if series is None:
        raise PromqlError(
            f"`{name}` is neither in the metric catalogue nor one of the other series in promql.py{_nearest(name)}"
        )
    labels = series.labels | frozenset(extra)
    parts = [_matcher(series, labels, label, value) for label, value in matchers.items()]
    known_as = spellings(name)
    if len(known_as) > 1:
        parts.insert(0, f'__name__=~"{"|".join(known_as)}"')
    head = name if len(known_as) == 1 else ""
    text = head + (f"{{{','.join(parts)}}}" if parts else "")
    return Selector(text, labels, kind=series.kind)


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name, _known(), n=1)
    return f"; did you mean `{near[0]}`?" if near else ""


def _matcher(series: Series, labels: frozenset[str], label: str, value: str | Match) -> str:
    if label not in labels:
        raise PromqlError(f"`{series.name}` has no label `{label}`; it has {_listed(labels)}")
    match = Match("=", value) if isinstance(value, str) else value
    closed = series.values.get(label)
    if closed is not None and "$" not in match.value:
        regex = match.operator in ("=~", "!~")
        for word in match.value.split("|") if regex else (match.value,):
            if not any(re.fullmatch(word, one) if regex else word == one for one in closed):
                raise PromqlError(f"`{label}` of `{series.name}` is never `{word}`; it is one of {_listed(closed)}")
    escaped = match.value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{label}{match.operator}"{escaped}"'


def number(value: float) -> Expr:
    """A literal, written without an exponent where that is short."""
    text = f"{value:.15g}"
    return Expr(text if value >= 0 else f"({text})", is_scalar=True)


def rate(selector: Selector, window: str, offset: str | None = None) -> Expr:
    """Increase a second of a counter over the window, restarts allowed for."""
    return _of_counter("rate", selector, window, offset)


def increase(selector: Selector, window: str, offset: str | None = None) -> Expr:
    """Increase of a counter over the window, restarts allowed for."""
    return _of_counter("increase", selector, window, offset)


def _of_counter(function: str, selector: Selector, window: str, offset: str | None) -> Expr:
    if selector.kind != "counter":
        raise PromqlError(f"{function}() of `{selector}`, which is a gauge: when it falls, that counts as a restart")
    return Expr(f"{function}({selector.ranged(window, offset)})", selector.labels)


def over_time(function: str, selector: Selector, window: str, offset: str | None = None) -> Expr:
    """`min_over_time` and its kind, of a gauge or a recorded series."""
    if function not in ("min", "max", "avg", "count", "last", "sum", "stddev", "present"):
        raise PromqlError(f"there is no {function}_over_time()")
    if selector.kind == "counter":
        raise PromqlError(f"{function}_over_time() of counter `{selector}`: use rate() or increase()")
    return Expr(f"{function}_over_time({selector.ranged(window, offset)})", selector.labels)


def first_seen(selector: Selector, window: str, step: str) -> Expr:
    """Unix time of each series' first sample in the window, as far as it is looked at every `step`."""
    text = f"min_over_time(timestamp({selector})[{_window(window)}:{_window(step)}])"
    return Expr(text, selector.labels)


def now() -> Expr:
    """Unix time of the evaluation."""
    return Expr("time()", is_scalar=True)


def by(function: str, expr: Expr, *labels: str) -> Expr:
    """Aggregate to `labels`: sum, min, max, avg or count."""
    if function not in ("sum", "min", "max", "avg", "count", "group"):
        raise PromqlError(f"`{function}` is not an aggregation that keeps numbers comparable")
    lacking = frozenset(labels) - expr.labels
    if lacking:
        raise PromqlError(f"`{expr}` has no label {_listed(lacking)} to aggregate by; it has {_listed(expr.labels)}")
    if not labels:
        return Expr(f"{function}({expr})")
    return Expr(f"{function} by ({', '.join(labels)}) ({expr})", frozenset(labels))


def sum_by(expr: Expr, *labels: str) -> Expr:
    """Sum by `labels`; a rate comes before the sum, never after."""
    return by("sum", expr, *labels)


def ratio(numerator: Expr, denominator: Expr, floor: float = 0.0) -> Expr:
    """A quotient that is absent, not NaN, while the denominator is not above `floor`."""
    return numerator / denominator.over(floor)


def quantile(
    q: float, name: str, window: str, labels: Iterable[str] = (), *, extra: Iterable[str] = (), **matchers: str | Match
) -> Expr:
    """Quantile of the histogram `name` (family name), by `labels`, absent while nothing is observed."""
    if not 0 < q < 1:
        raise PromqlError(f"a quantile lies between 0 and 1, not at {q:g}")
    keys = tuple(labels)
    more = tuple(extra)
    buckets = sum_by(rate(metric(f"{name}_bucket", extra=more, **matchers), window), *keys, "le")
    counts = sum_by(rate(metric(f"{name}_count", extra=more, **matchers), window), *keys)
    return Expr(f"histogram_quantile({q:g}, {buckets})", frozenset(keys)).where(counts.over(0))


def quantile_of(q: float, buckets: Expr) -> Expr:
    """Quantile of buckets that are summed already."""
    if "le" not in buckets.labels:
        raise PromqlError(f"`{buckets}` has no label `le`")
    return Expr(f"histogram_quantile({q:g}, {buckets})", buckets.labels - {"le"})


def clamp(expr: Expr, low: float, high: float) -> Expr:
    """`expr`, no less than `low` and no more than `high`."""
    return Expr(f"clamp({expr}, {number(low)}, {number(high)})", expr.labels)


def clamp_min(expr: Expr, low: float) -> Expr:
    """`expr`, no less than `low`."""
    return Expr(f"clamp_min({expr}, {number(low)})", expr.labels)


def clamp_max(expr: Expr, high: float) -> Expr:
    """`expr`, no more than `high`."""
    return Expr(f"clamp_max({expr}, {number(high)})", expr.labels)


def whole(expr: Expr) -> Expr:
    """`expr` rounded to the nearest whole number."""
    return Expr(f"round({expr})", expr.labels)


def ceil_to(expr: Expr, step: float) -> Expr:
    """`expr` rounded up to a multiple of `step`."""
    return Expr(f"ceil({expr / step})", expr.labels) * step


def floor_to(expr: Expr, step: float) -> Expr:
    """`expr` rounded down to a multiple of `step`."""
    return Expr(f"floor({expr / step})", expr.labels) * step


def absent(selector: Expr) -> Expr:
    """One series while `selector` has none."""
    return Expr(f"absent({selector})")


def constants(label: str, values: Mapping[str, float]) -> Expr:
    """A series for each value of `label`, with a number that never changes."""
    parts = [f'label_replace(vector({value:.15g}), "{label}", "{word}", "", "")' for word, value in values.items()]
    return Expr(" or ".join(parts), frozenset({label}), binds=1)


def without_point(expr: Expr, label: str) -> Expr:
    """`60` for a label value that some exporters write `60.0`."""
    return Expr(f'label_replace({expr}, "{label}", "$1", "{label}", "(.+)[.]0")', expr.labels)


def total(terms: Iterable[Expr]) -> Expr:
    """The sum of expressions with the same labels."""
    found: Expr | None = None
    for term in terms:
        found = term if found is None else found + term
    if found is None:
        raise PromqlError("a sum of nothing")
    return found


def _binary(left: Expr | float, operator: str, right: Expr | float) -> Expr:
    first = left if isinstance(left, Expr) else number(left)
    second = right if isinstance(right, Expr) else number(right)
    if not first.is_scalar and not second.is_scalar and first.labels != second.labels:
        raise PromqlError(
            f"`{first}` has the labels {_listed(first.labels)}, `{second}` has {_listed(second.labels)}: they never "
            f"match; aggregate both to the same labels or use joined()"
        )
    level = _PREFERENCE[operator]
    scalar = first.is_scalar and second.is_scalar
    if scalar and level == 3:
        raise PromqlError(f"`{first} {operator} {second}` compares two constants")
    # A power binds to the right, all others to the left.
    text = f"{_wrapped(first, level + (operator == '^'))} {operator} {_wrapped(second, level + 1)}"
    return Expr(text, first.labels if second.is_scalar else second.labels, scalar, level)


def _set(left: Expr, operator: str, right: Expr, on: Iterable[str] | None) -> Expr:
    keys = None if on is None else tuple(on)
    if keys is None:
        if left.labels != right.labels:
            raise PromqlError(
                f"`{left}` has the labels {_listed(left.labels)}, `{right}` has {_listed(right.labels)}: `{operator}` "
                "never matches; say on which labels"
            )
    else:
        for side in (left, right):
            lacking = frozenset(keys) - side.labels
            if lacking:
                raise PromqlError(f"`{side}` has no label {_listed(lacking)} to match on")
    matched = "" if keys is None else f" on ({', '.join(keys)})"
    return Expr(f"{_wrapped(left, 2)} {operator}{matched} {_wrapped(right, 3)}", left.labels, binds=2)


def _wrapped(expr: Expr, level: int) -> str:
    """Its text, in parentheses if its outermost operator binds less tightly than `level`."""
    return expr.text if expr.binds >= level else f"({expr.text})"


def _window(text: str) -> str:
    if text not in _MACROS and not _DURATION.fullmatch(text):
        raise PromqlError(f"`{text}` is no duration: write 5m or 1h30m, or one of {_listed(_MACROS)}")
    return text


def _listed(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in sorted(words)) or "none"
