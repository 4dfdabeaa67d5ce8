"""What a PromQL expression gives - labels and dimension - and what is wrong with it, without asking a server.

Pure. Names, labels, label values and units come from the metric catalogue, the closed list of other exporters' series
and the recording rules; an expression is walked once, from the leaves up. Found this way: names and labels that do not
exist, counters that are not under `rate`, windows that are not Grafana's, ratios that give NaN when idle, and operands
that can never match.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

import promql_parser as promql

from kvtune_telemetry.catalogue import CATALOGUE

Kind = Literal["counter", "gauge", "recorded"]
Dimension = Mapping[str, int]
"""Powers of `second`, `byte` and `count` (of tokens, turns, blocks ...); empty for a plain number."""

TARGET_LABELS = frozenset({"job", "instance"})
"""What Prometheus adds to every series it scrapes."""
_UNITS: Mapping[str, Dimension] = {
    "seconds": {"second": 1},
    "seconds^2": {"second": 2},
    "bytes": {"byte": 1},
    "token seconds": {"count": 1, "second": 1},
    "tokens^2": {"count": 2},
}
"""Dimension of a catalogue unit; "1" is unknown (settings, information), anything else counts things."""
ALERTS = "ALERTS"
"""Prometheus' own series of its alerts."""
_STAND_INS = {"$__rate_interval": "97m", "$__range": "89m", "$__interval": "83m"}
"""What the parser sees instead of Grafana's windows: lengths that nobody would write."""
_RATES = frozenset({"rate", "increase", "irate"})
_OF_COUNTERS = _RATES | {"resets"}
_OF_GAUGES = frozenset({"delta", "deriv", "idelta", "predict_linear"})
_GUARDS = frozenset({">", ">=", "<", "<=", "==", "and"})
_SETS = frozenset({"and", "or", "unless"})
_COMPARE = frozenset({"==", "!=", ">", "<", ">=", "<="})
_NO_VECTOR = frozenset({"time", "pi", "vector", "scalar"})


@dataclass(frozen=True, slots=True)
class Series:
    """A series that may be asked for: one sample name of a metric."""

    name: str
    family: str
    """The name a document gives it: a histogram's without `_bucket`."""
    kind: Kind
    labels: frozenset[str]
    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The values a label can have, where they are a closed set."""
    dimension: Dimension | None = None
    """None: unknown."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with an expression."""

    rule: str
    message: str


@dataclass(frozen=True, slots=True)
class Shape:
    """What an expression gives."""

    labels: frozenset[str]
    """Labels that can be on its series."""
    scalar: bool = False
    dimension: Dimension | None = None
    maybe: bool = False
    """The labels may differ from series to series (`or` of unlike operands, names taken by `label_replace`)."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """The result of `examine`. `shape` is None where the expression does not parse."""

    shape: Shape | None
    problems: tuple[Problem, ...]
    series: tuple[Series, ...]
    """What is asked for, in order, each once."""


@cache
def known_series() -> Mapping[str, Series]:
    """Everything a board may ask for, by sample name."""
    from kvtune_dashboards.promql import OTHER_SERIES
    from kvtune_dashboards.recording import RECORDING_RULES

    found = catalogue_series()
    for other in OTHER_SERIES:
        found[other.name] = other
    alert = frozenset({"alertname", "alertstate", "severity"})
    found[ALERTS] = Series(ALERTS, ALERTS, "gauge", alert | TARGET_LABELS, {"alertstate": ("pending", "firing")})
    for rule in RECORDING_RULES:
        shape = examine(rule.expr, found, windows=None).shape
        before = found.get(rule.name)
        values = {
            label: tuple(dict.fromkeys([*(before.values.get(label, ()) if before else ()), value]))
            for label, value in rule.labels.items()
        }
        dimension = shape.dimension if shape is not None else None
        found[rule.name] = Series(rule.name, rule.name, "recorded", frozenset(rule.all_labels()), values, dimension)
    return found


def catalogue_series() -> dict[str, Series]:
    """kvtune's own series, by sample name."""
    found = {}
    for metric in CATALOGUE:
        labels = TARGET_LABELS | frozenset(metric.label_names())
        values = {label.name: label.values for label in metric.labels if label.values is not None}
        unit = _UNITS.get(metric.unit, {"count": 1}) if metric.unit != "1" else None
        for sample in metric.sample_names():
            if sample == metric.name:
                kind: Kind = "counter" if metric.kind == "counter" else "gauge"
                found[sample] = Series(sample, metric.name, kind, labels, values, unit)
                continue
            suffix = sample.removeprefix(metric.name)
            more = frozenset({"le"}) if suffix == "_bucket" else frozenset()
            dimension = unit if suffix != "_count" else {"count": 1}
            found[sample] = Series(sample, metric.name, "counter", labels | more, values, dimension)
    return found


def examine(expr: str, known: Mapping[str, Series], *, windows: frozenset[str] | None) -> Meaning:
    """Walk an expression.

    Args:
        expr: PromQL as Grafana holds it, macros and variables included.
        known: What may be asked for, by sample name.
        windows: The windows a range may have, as written (`$__rate_interval`); None allows any.
    """
    text = expr
    for macro, stand_in in _STAND_INS.items():
        text = re.sub(rf"\[{re.escape(macro)}([\]:])", rf"[{stand_in}\1", text)
    # Offsets and arithmetic know the macros too.
    text = text.replace("$__range_s", "5347").replace("$__range", _STAND_INS["$__range"])
    try:
        tree = promql.parse(text)
    except ValueError as error:
        return Meaning(None, (Problem("promql", f"does not parse: {error}"),), ())
    walk = _Walk(known, windows)
    shape = walk.shape(tree)
    return Meaning(shape, tuple(dict.fromkeys(walk.problems)), tuple({one.name: one for one in walk.asked}.values()))


class _Walk:
    def __init__(self, known: Mapping[str, Series], windows: frozenset[str] | None) -> None:
        self.known = known
        self.windows = windows
        self.problems: list[Problem] = []
        self.asked: list[Series] = []

    def wrong(self, rule: str, message: str) -> None:
        self.problems.append(Problem(rule, message))

    def shape(self, node: Any, under: str | None = None) -> Shape:
        """The shape of `node`; `under` is the function that takes it."""
        if isinstance(node, promql.ParenExpr):
            return self.shape(node.expr, under)
        if isinstance(node, promql.NumberLiteral):
            return Shape(frozenset(), scalar=True, dimension={})
        if isinstance(node, promql.StringLiteral):
            return Shape(frozenset(), scalar=True)
        if isinstance(node, promql.UnaryExpr):
            return self.shape(node.expr)
        if isinstance(node, promql.VectorSelector):
            return self._selector(node, under)
        if isinstance(node, promql.MatrixSelector):
            before = len(self.asked)
            shape = self._selector(node.vector_selector, under)
            if any(series.kind == "counter" for series in self.asked[before:]):
                self._window(node.range, self.asked[-1].name)
            return shape
        if isinstance(node, promql.SubqueryExpr):
            self._window(node.range, "a subquery")
            if under in _RATES:
                self.wrong("counter", f"{under}() of a subquery: a restart inside it counts as a burst; rate first")
            return self.shape(node.expr)
        if isinstance(node, promql.AggregateExpr):
            return self._aggregate(node)
        if isinstance(node, promql.Call):
            return self._call(node, under)
        if isinstance(node, promql.BinaryExpr):
            return self._binary(node)
        raise TypeError(f"unknown PromQL node {type(node).__name__}")

    def _selector(self, node: Any, under: str | None) -> Shape:
        name = node.name
        names = [matcher for matcher in node.matchers.matchers if matcher.name == "__name__"]
        if not name and names and names[0].op == promql.MatchOp.Re:
            return self._any_of(node, names[0].value.split("|"), under)
        if not name:
            self.wrong("metric", "a selector without a metric's name")
            return Shape(frozenset(), maybe=True)
        series = self.known.get(name)
        if series is None:
            self.wrong("metric", f"`{name}` is in neither the catalogue, the recording rules nor the other series")
            return Shape(frozenset(), maybe=True)
        self.asked.append(series)
        for matcher in node.matchers.matchers:
            self._matcher(series, matcher)
        if series.kind == "counter" and under not in _OF_COUNTERS:
            self.wrong("counter", f"counter `{name}` outside rate() or increase(): it starts again at a restart")
        if series.kind == "gauge" and under in _OF_COUNTERS:
            self.wrong("counter", f"{under}() of gauge `{name}`: when it falls, that counts as a restart")
        if series.kind == "counter" and under in _OF_GAUGES:
            self.wrong("counter", f"{under}() of counter `{name}`: use rate() or increase()")
        return Shape(series.labels, dimension=series.dimension)

    def _any_of(self, node: Any, names: list[str], under: str | None) -> Shape:
        """`{__name__=~"a|b"}`: one of several series."""
        shapes = []
        more = ",".join(str(matcher) for matcher in node.matchers.matchers if matcher.name != "__name__")
        # `vllm_x` is what some expositions make of `vllm:x`.
        for name in dict.fromkeys(re.sub("^vllm_", "vllm:", name) for name in names):
            if re.fullmatch(r"[\w:]+", name):
                shapes.append(self._selector(promql.parse(f"{name}{{{more}}}"), under))
            else:
                self.wrong("metric", f"{name!r} is no name: list whole names, with | between them")
        if len(shapes) == 1:
            return shapes[0]
        return Shape(frozenset.intersection(*(shape.labels for shape in shapes)) if shapes else frozenset(), maybe=True)

    def _matcher(self, series: Series, matcher: Any) -> None:
        if matcher.name not in series.labels:
            self.wrong("label", f"`{series.name}` has no label `{matcher.name}`; it has {_listed(series.labels)}")
            return
        values = series.values.get(matcher.name)
        if values is None or "$" in matcher.value:
            return
        plain = matcher.op in (promql.MatchOp.Equal, promql.MatchOp.NotEqual)
        wanted = [matcher.value] if plain else matcher.value.split("|")
        for value in wanted:
            hits = value in values if plain else any(re.fullmatch(value, one) for one in values)
            if not hits:
                self.wrong(
                    "label", f"`{matcher.name}` of `{series.name}` is never {value!r}; it is one of {', '.join(values)}"
                )

    def _window(self, length: Any, what: str) -> None:
        if self.windows is None:
            return
        minutes = length.total_seconds() / 60
        for macro, stand_in in _STAND_INS.items():
            if f"{minutes:g}m" == stand_in:
                if macro not in self.windows:
                    self.wrong("rate-interval", f"window [{macro}] of {what}: use {_listed(self.windows)}")
                return
        self.wrong("rate-interval", f"fixed window of {minutes:g} min of {what}: use {_listed(self.windows)}")

    def _aggregate(self, node: Any) -> Shape:
        operation = str(node.op)
        inner = self.shape(node.expr)
        if node.param is not None:
            self.shape(node.param)
        labels = frozenset[str]()
        if operation in ("topk", "bottomk"):
            labels = inner.labels
        if node.modifier is not None:
            named = frozenset(node.modifier.labels)
            by = node.modifier.type == promql.AggModifierType.By
            if not inner.maybe:
                for label in sorted(named - inner.labels):
                    which = "by" if by else "without"
                    self.wrong("label", f"{operation} {which} ({label}): its operand has {_listed(inner.labels)}")
            if operation not in ("topk", "bottomk"):
                labels = named if by and inner.maybe else named & inner.labels if by else inner.labels - named
        counting = operation in ("count", "group", "count_values")
        return Shape(labels, dimension={"count": 1} if counting else inner.dimension, maybe=inner.maybe and not labels)

    def _call(self, node: Any, under: str | None) -> Shape:
        name = node.func.name
        if name in _NO_VECTOR:
            for argument in node.args:
                self.shape(argument, name)
            dimension: Dimension | None = {"second": 1} if name == "time" else {}
            return Shape(frozenset(), scalar=name != "vector", dimension=dimension)
        shapes = [self.shape(argument, name) for argument in node.args]
        vectors = [shape for shape in shapes if not shape.scalar]
        inner = vectors[0] if vectors else Shape(frozenset())
        if name in ("rate", "irate", "deriv"):
            return replace(inner, dimension=_times(inner.dimension, {"second": 1}, -1))
        if name in ("histogram_quantile", "histogram_fraction"):
            if under != "guard":
                self.wrong(
                    "nan", f"{name}() is NaN when idle: write {name}(...) >= 0, or `and` that something was counted"
                )
            if "le" not in inner.labels and not inner.maybe:
                self.wrong("histogram", f"{name}() needs the label le; its operand has {_listed(inner.labels)}")
            if _rated(node.args[-1]):
                inner = replace(inner, dimension=_times(inner.dimension, {"second": 1}, 1))
            return replace(inner, labels=inner.labels - {"le"})
        if name in ("label_replace", "label_join"):
            source = [node.args[3].val] if name == "label_replace" else [one.val for one in node.args[3:]]
            for label in source:
                if label and label not in inner.labels and not inner.maybe:
                    self.wrong("label", f"{name}() from {label}: its operand has {_listed(inner.labels)}")
            return replace(inner, labels=inner.labels | {node.args[1].val})
        if name in ("changes", "resets", "count_over_time"):
            return replace(inner, dimension={"count": 1})
        if name in ("absent", "absent_over_time", "timestamp"):
            return Shape(inner.labels, dimension={"second": 1} if name == "timestamp" else {}, maybe=True)
        if name in ("sqrt", "exp", "ln", "log2", "log10"):
            return replace(inner, dimension=None)
        return inner

    def _binary(self, node: Any) -> Shape:
        operation = str(node.op)
        # A comparison drops NaN, and `and` keeps only what the other side has.
        left = self.shape(node.lhs, "guard" if operation in _GUARDS else None)
        right = self.shape(node.rhs)
        if operation == "/" and not _guarded(node.rhs):
            self.wrong("ratio", "a division whose divisor can be 0 gives NaN when idle: write x / (y > 0)")
        if left.scalar and right.scalar:
            return Shape(frozenset(), scalar=True, dimension=_combined(operation, left, right))
        if left.scalar or right.scalar:
            return replace(right if left.scalar else left, dimension=_combined(operation, left, right))
        return replace(self._matched(node, operation, left, right), dimension=_combined(operation, left, right))

    def _matched(self, node: Any, operation: str, left: Shape, right: Shape) -> Shape:
        matching = node.modifier.matching if node.modifier is not None else None
        certain = not (left.maybe or right.maybe)
        if matching is None:
            if certain and operation != "or" and left.labels != right.labels:
                self.wrong(
                    "matching",
                    f"the sides of {operation} never match: {_listed(left.labels)} against {_listed(right.labels)}",
                )
        elif matching.type == promql.LabelModifierType.Include:
            for side, shape in (("left", left), ("right", right)):
                for label in sorted(frozenset(matching.labels) - shape.labels):
                    if not shape.maybe:
                        self.wrong("matching", f"{operation} on ({label}): its {side} side has {_listed(shape.labels)}")
        elif certain and operation != "or":
            ignored = frozenset(matching.labels)
            if left.labels - ignored != right.labels - ignored:
                self.wrong("matching", f"the sides of {operation} never match, even ignoring {_listed(ignored)}")
        if operation in _SETS:
            if operation != "or":
                return left
            return Shape(left.labels | right.labels, maybe=left.labels != right.labels or not certain)
        card = node.modifier.card if node.modifier is not None else promql.VectorMatchCardinality.OneToOne
        extra = frozenset(getattr(node.modifier, "group_labels", None) or ())
        if card == promql.VectorMatchCardinality.ManyToOne:
            return Shape(left.labels | extra, maybe=left.maybe)
        if card == promql.VectorMatchCardinality.OneToMany:
            return Shape(right.labels | extra, maybe=right.maybe)
        if matching is None or operation in _COMPARE:
            return left
        named = frozenset(matching.labels)
        include = matching.type == promql.LabelModifierType.Include
        return Shape(left.labels & named if include else left.labels - named, maybe=left.maybe)


def _rated(node: Any) -> bool:
    """Whether a histogram's buckets are rates (per second), not increases."""
    if isinstance(node, promql.Call):
        return node.func.name in ("rate", "irate") or any(_rated(argument) for argument in node.args)
    return any(_rated(child) for child in _children(node))


def _children(node: Any) -> Iterator[Any]:
    for name in ("expr", "lhs", "rhs"):
        child = getattr(node, name, None)
        if child is not None:
            yield child
    yield from getattr(node, "args", ())


def _guarded(node: Any) -> bool:
    """Whether a divisor cannot be 0: a number, a comparison `> 0` (or with something above it), or a call that clamps.

    A product is guarded where both factors are.
    """
    if isinstance(node, promql.ParenExpr):
        return _guarded(node.expr)
    if isinstance(node, promql.NumberLiteral):
        return bool(node.val != 0)
    if isinstance(node, promql.Call) and node.func.name == "clamp_min":
        return isinstance(node.args[1], promql.NumberLiteral) and node.args[1].val > 0
    if not isinstance(node, promql.BinaryExpr):
        return False
    operation = str(node.op)
    if operation == "*":
        return _guarded(node.lhs) and _guarded(node.rhs)
    bound = node.rhs
    if not isinstance(bound, promql.NumberLiteral) or getattr(node.modifier, "return_bool", False):
        return False
    return (operation == ">" and bound.val >= 0) or (operation == ">=" and bound.val > 0)


def _times(dimension: Dimension | None, other: Dimension | None, sign: int) -> Dimension | None:
    if dimension is None or other is None:
        return None
    powers = {name: dimension.get(name, 0) + sign * other.get(name, 0) for name in {*dimension, *other}}
    return {name: power for name, power in powers.items() if power}


def _combined(operation: str, left: Shape, right: Shape) -> Dimension | None:
    if operation == "*":
        return _times(left.dimension, right.dimension, 1)
    if operation == "/":
        return _times(left.dimension, right.dimension, -1)
    if operation == "^":
        return None
    if operation in ("+", "-"):
        return left.dimension if left.dimension == right.dimension else None
    return right.dimension if left.scalar else left.dimension


def _listed(labels: frozenset[str]) -> str:
    return ", ".join(sorted(labels)) or "no labels"
