"""Which dashboards, rules and inputs of `kvtune suggest` a deployment answers, by the series that it exposes.

Pure: what is exposed comes in as label sets by sample name, what comes out is a list of what was asked and what of it
was missing. An expression is answered where each series that it cannot do without is there with the labels it is
selected by; no value is looked at, so that an idle system answers too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import promql_parser as promql

from kvtune_telemetry.catalogue import CATALOGUE, Metric

Labels = Mapping[str, str]
Live = Mapping[str, Sequence[Labels]]
"""The label sets that are exposed, by sample name."""

SCHEMA = "kvtune.check/1"
_OF_SAMPLE: dict[str, Metric] = {sample: metric for metric in CATALOGUE for sample in metric.sample_names()}
_TARGET = ("job", "instance")
"""Labels that Prometheus adds: a target itself does not have them."""
_OWN = ("up", "ALERTS", "ALERTS_FOR_STATE")
"""Series that Prometheus makes itself."""
_MACRO = re.compile(r"\$(?:__(?:rate_interval|range|interval)|\{__(?:rate_interval|range|interval)\})(?!_)")
_MACRO_NUMBER = re.compile(r"\$(?:__(?:range|interval)_m?s|\{__(?:range|interval)_m?s\})")
_LABEL_VALUES = re.compile(r"label_values\((?P<selector>.*),\s*(?P<label>\w+)\s*\)", re.DOTALL)
_QUERY_RESULT = re.compile(r"query_result\((?P<expr>.*)\)", re.DOTALL)
_ANYTHING = ("time", "pi", "vector", "scalar")
EMITTERS = ("router", "connector", "suggest", "vllm", "process", "rules", "prometheus", "other")


# --- what an expression needs ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Need:
    """One selector: any of `names`, with a label set that satisfies all matchers (label, operator, value)."""

    names: tuple[str, ...]
    matchers: tuple[tuple[str, str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Every:
    """All of them."""

    parts: tuple[Need | Every | Either, ...] = ()


@dataclass(frozen=True, slots=True)
class Either:
    """Any of them (`or`)."""

    parts: tuple[Need | Every | Either, ...]


Needs = Need | Every | Either


def needs(expr: str) -> Needs:
    """What an expression cannot do without; `or` takes either side. Raises ValueError where it does not parse."""
    return _needs(promql.parse(_MACRO.sub("5m", _MACRO_NUMBER.sub("300", expr))))


def _needs(node: Any) -> Needs:
    if isinstance(node, promql.VectorSelector):
        return _selected(node)
    if isinstance(node, promql.MatrixSelector):
        return _selected(node.vector_selector)
    if isinstance(node, (promql.ParenExpr, promql.UnaryExpr, promql.SubqueryExpr, promql.AggregateExpr)):
        return _needs(node.expr)
    if isinstance(node, promql.Call):
        if node.func.name in _ANYTHING or node.func.name.startswith("absent"):
            return Every()
        return _every(_needs(argument) for argument in node.args)
    if isinstance(node, promql.BinaryExpr):
        operator = str(node.op)
        left = _needs(node.lhs)
        if operator == "unless":
            return left
        if operator == "or":
            return Either((left, _needs(node.rhs)))
        return _every((left, _needs(node.rhs)))
    return Every()


def _every(parts: Iterable[Needs]) -> Needs:
    found = tuple(part for part in parts if part != Every())
    return found[0] if len(found) == 1 else Every(found)


def _selected(node: Any) -> Need:
    names: tuple[str, ...] = (node.name,) if node.name else ()
    matchers = []
    for one in node.matchers.matchers:
        operator = {"Equal": "=", "NotEqual": "!=", "Re": "=~", "NotRe": "!~"}[str(one.op).rpartition(".")[2]]
        if one.name == "__name__":
            names = tuple(name for part in one.value.split("|") for name in _spellings(part))
        else:
            matchers.append((one.name, operator, one.value))
    return Need(names, tuple(matchers))


def _spellings(pattern: str) -> tuple[str, ...]:
    """The names that `vllm[:_]x` stands for; any other name stands for itself."""
    return tuple(pattern.replace("[:_]", mark) for mark in ":_") if "[:_]" in pattern else (pattern,)


def every_need(tree: Needs) -> Iterator[Need]:
    """The selectors of an expression."""
    if isinstance(tree, Need):
        yield tree
    else:
        for part in tree.parts:
            yield from every_need(part)


# --- what is missing ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gap:
    """A series that is missing, and how: not exposed, without a label, or without such a value of it."""

    series: str
    why: str
    """`absent`, `renamed`, `label`, `value`, or `not_loaded` (a rule)."""
    detail: str = ""

    @property
    def emitter(self) -> str:
        """Who would expose it."""
        return emitter_of(self.series) if self.why != "not_loaded" else "rules"


def other_name(name: str) -> str:
    """What Prometheus may have stored a name with a colon as.

    prometheus_client (0.26, for one) writes `_` for `:` where a server asks for OpenMetrics, as Prometheus does.
    """
    return name.replace(":", "_") if name.startswith("vllm:") else name


def emitter_of(name: str) -> str:
    """Who exposes a sample name, one of `EMITTERS`."""
    metric = _OF_SAMPLE.get(name)
    if metric is not None:
        return metric.emitter
    if name in _OWN:
        return "prometheus"
    for prefix, emitter in (("kvtune:", "rules"), ("vllm:", "vllm"), ("vllm_", "vllm"), ("process_", "process")):
        if name.startswith(prefix):
            return emitter
    return "other"


@dataclass(frozen=True, slots=True)
class Rule:
    """A recording rule or an alert: `name`, its expression, and the labels a recording rule sets."""

    name: str
    expr: str
    labels: Labels = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Deployment:
    """What there is to answer. `stored`: read from Prometheus, so that series have `job`, and rules their results.

    `loaded`: the rules that Prometheus evaluates, None where it does not say. `hidden`: labels that `live` leaves out
    of label sets (one for each engine would be many); a name that has such a label is in `having`.
    """

    live: Live
    stored: bool = False
    loaded: frozenset[str] | None = None
    hidden: frozenset[str] = frozenset()
    having: Mapping[str, frozenset[str]] = field(default_factory=dict)
    elsewhere: frozenset[str] = frozenset()
    """Names that targets expose, whatever Prometheus has of them."""


class _Check:
    def __init__(self, deployment: Deployment, recording: Sequence[Rule]) -> None:
        self.of = deployment
        self.rules: dict[str, list[Rule]] = {}
        for rule in recording:
            self.rules.setdefault(rule.name, []).append(rule)
        self.advised = any(
            name in deployment.live for name, metric in _OF_SAMPLE.items() if metric.emitter == "suggest"
        )
        self._known: dict[str, tuple[Gap, ...]] = {}

    def gaps(self, tree: Needs) -> tuple[Gap, ...]:
        """What is missing; nothing where the expression is answered."""
        if isinstance(tree, Need):
            return self._gap(tree)
        found = [self.gaps(part) for part in tree.parts]
        if isinstance(tree, Either) and any(not one for one in found):
            return ()
        return tuple(dict.fromkeys(gap for one in found for gap in one))

    def _gap(self, need: Need) -> tuple[Gap, ...]:
        found: list[Gap] = []
        for name in need.names:
            gaps = self._of_name(name, need.matchers)
            if not gaps:
                return ()
            found += gaps
        # Where neither spelling of a name is there, it is missing by its own.
        spelt = {other_name(name) for name in need.names if other_name(name) != name}
        return tuple(gap for gap in found if gap.series not in spelt)

    def _of_name(self, name: str, matchers: Sequence[tuple[str, str, str]]) -> tuple[Gap, ...]:
        emitter = emitter_of(name)
        if emitter == "prometheus" and (not self.of.stored or name != "up"):
            return ()
        if emitter == "suggest" and self.advised:
            # Values that are not advised are left out on purpose.
            return ()
        if emitter == "rules":
            return self._recorded(name)
        rows = self.of.live.get(name)
        if not rows:
            return (self._absent(name),)
        metric = _OF_SAMPLE.get(name)
        declared = metric.label_names() if metric is not None else ()
        rows_ = rows
        for label in dict.fromkeys(
            (*declared, *(label for label, operator, value in matchers if _wants(operator, value)))
        ):
            if not self._has(name, rows, label):
                return (Gap(name, "label", f"without the label {label}"),)
        for label, operator, value in matchers:
            if "$" in value or label in self.of.hidden or (label in _TARGET and not self.of.stored):
                continue
            rows_ = [row for row in rows_ if _matches(row.get(label, ""), operator, value)]
            if not rows_:
                return (Gap(name, "value", f"none with {label}{operator}{value!r}"),)
        return ()

    def _absent(self, name: str) -> Gap:
        if other_name(name) in self.of.live:
            return Gap(name, "renamed", f"it is there as {other_name(name)}")
        return Gap(name, "absent", "exposed, but not in Prometheus" if name in self.of.elsewhere else "")

    def _has(self, name: str, rows: Sequence[Labels], label: str) -> bool:
        if label in self.of.hidden:
            return name in self.of.having.get(label, frozenset())
        return (label in _TARGET and not self.of.stored) or any(row.get(label) for row in rows)

    def _recorded(self, name: str) -> tuple[Gap, ...]:
        """What keeps a recording rule from its result: not loaded, or inputs that are missing."""
        if name not in self._known:
            self._known[name] = ()
            if name in self.of.live:
                return ()
            rules = self.rules.get(name)
            if rules is None:
                self._known[name] = (Gap(name, "absent"),)
            else:
                gaps = dict.fromkeys(gap for rule in rules for gap in self.gaps(needs(rule.expr)))
                if self.of.stored and not (self.of.loaded is not None and name in self.of.loaded):
                    # Said of this one; that those it reads are not loaded either is said of them.
                    gaps = {Gap(name, "not_loaded"): None} | {g: None for g in gaps if g.why != "not_loaded"}
                self._known[name] = tuple(gaps)
        return self._known[name]


def _wants(operator: str, value: str) -> bool:
    """Whether a matcher only holds for series that have the label; Grafana's variables stand for `.+`."""
    if "$" in value:
        return operator in ("=", "=~")
    return not _matches("", operator, value)


def _matches(found: str, operator: str, value: str) -> bool:
    if operator in ("=", "!="):
        return (found == value) == (operator == "=")
    return (re.fullmatch(value, found) is not None) == (operator == "=~")


# --- what is asked --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Item:
    """One thing that asks: a panel, variable or annotation of a dashboard, a rule, an alert, an input of `suggest`."""

    kind: str
    where: str
    """The dashboard's title; empty for what is not on one."""
    name: str
    gaps: tuple[Gap, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "kind": self.kind, "dashboard": self.where or None, "name": self.name, "answered": not self.gaps,
            "missing": [_plain(gap) for gap in self.gaps],
        }  # fmt: skip


def _plain(gap: Gap) -> dict[str, str]:
    return {"series": gap.series, "emitter": gap.emitter, "why": gap.why, "detail": gap.detail}


def questions(dashboard: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(kind, name, expression) of all that a dashboard asks Prometheus."""
    for variable in dashboard.get("templating", {}).get("list", ()):
        query = variable.get("query")
        text = query.get("query", "") if isinstance(query, dict) else query
        if variable.get("type") != "query" or not isinstance(text, str):
            continue
        if match := _LABEL_VALUES.fullmatch(text.strip()):
            # label_values(x, l) is answered by series that have the label.
            yield (
                "variable",
                variable["name"],
                f"count by ({match['label']}) ({_with(match['selector'], match['label'])})",
            )
        elif match := _QUERY_RESULT.fullmatch(text.strip()):
            yield "variable", variable["name"], match["expr"]
    for annotation in dashboard.get("annotations", {}).get("list", ()):
        if annotation.get("expr"):
            yield "annotation", annotation["name"], annotation["expr"]
    yield from _of_panels(dashboard.get("panels", ()))


def _with(selector: str, label: str) -> str:
    """The selector, of series that have the label."""
    text = selector.strip()
    if text.endswith("}"):
        body = text[:-1].rstrip().rstrip(",")
        return f'{body}{"" if body.endswith("{") else ","}{label}!=""}}'
    return f'{text}{{{label}!=""}}'


def _of_panels(panels: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str, str]]:
    for panel in panels:
        for target in panel.get("targets", ()):
            if target.get("expr"):
                yield "panel", str(panel.get("title", "")), target["expr"]
        yield from _of_panels(panel.get("panels", ()))


def asked_for(
    dashboards: Sequence[Mapping[str, Any]], recording: Sequence[Rule], alerts: Sequence[Rule], inputs: Sequence[str]
) -> list[Need]:
    """Every selector of all of them, and the recording rules' own results."""
    exprs = [expr for dashboard in dashboards for _, _, expr in questions(dashboard)]
    exprs += [rule.expr for rule in (*recording, *alerts)]
    found = dict.fromkeys(need for expr in exprs for need in every_need(needs(expr)))
    found |= dict.fromkeys(Need((name,)) for name in (*(rule.name for rule in recording), *inputs))
    return list(found)


def check(
    deployment: Deployment,
    dashboards: Sequence[Mapping[str, Any]],
    recording: Sequence[Rule],
    alerts: Sequence[Rule],
    inputs: Sequence[str],
) -> list[Item]:
    """What asks, with what is missing of it. A panel of several queries is one item.

    Args:
        deployment: What there is to answer.
        dashboards: In classic JSON.
        recording: The recording rules.
        alerts: The alerts.
        inputs: Sample names that `kvtune suggest` reads.
    """
    one = _Check(deployment, recording)
    items: list[Item] = []
    for dashboard in dashboards:
        found: dict[tuple[str, str], dict[Gap, None]] = {}
        for kind, name, expr in questions(dashboard):
            found.setdefault((kind, name), {}).update(dict.fromkeys(one.gaps(needs(expr))))
        items += [Item(kind, str(dashboard["title"]), name, tuple(gaps)) for (kind, name), gaps in found.items()]
    for name, gaps in _by_name((rule.name, one.gaps(Need((rule.name,)))) for rule in recording):
        items.append(Item("recording rule", "", name, gaps))
    for name, gaps in _by_name((rule.name, one.gaps(needs(rule.expr))) for rule in alerts):
        if deployment.loaded is not None and name not in deployment.loaded:
            gaps = (*gaps, Gap(name, "not_loaded"))
        items.append(Item("alert", "", name, gaps))
    items += [Item("suggest", "", name, one.gaps(Need((name,)))) for name in inputs]
    return items


def _by_name(found: Iterable[tuple[str, tuple[Gap, ...]]]) -> Iterator[tuple[str, tuple[Gap, ...]]]:
    """Several of a name are one, with the gaps of all."""
    merged: dict[str, dict[Gap, None]] = {}
    for name, gaps in found:
        merged.setdefault(name, {}).update(dict.fromkeys(gaps))
    for name, all_gaps in merged.items():
        yield name, tuple(all_gaps)


# --- what to do about it --------------------------------------------------------------------------------------------


def advice(emitter: str, deployment: Deployment, gaps: Sequence[Gap]) -> str:
    """What to do about the gaps of one emitter."""
    live = deployment.live
    some = any(emitter_of(name) == emitter for name in live)
    where = "have Prometheus scrape" if deployment.stored else "add --metrics of"
    if emitter == "router":
        if not some:
            return f"No series of kvtune's router: {where} its metrics port (9400, not the one for clients)."
        return "The router is there but lacks these: see its version, and what relabelling or a metric filter drops."
    if emitter == "connector":
        if not some and any(name.startswith("vllm:") for name in live):
            return "vLLM is there without kvtune's connector: set kv_connector_module_path (docs/connector.md)."
        if not some:
            return f"No series of an engine: {where} /metrics of every prefill and decode engine."
        roles = {row.get("role") for name in live if emitter_of(name) == "connector" for row in live[name]}
        for role in ("prefill", "decode"):
            if role not in roles:
                return f"No {role} engine among the engines: {where} its /metrics too."
        return "The connector is there but lacks these: see its version, and what relabelling or a metric filter drops."
    if emitter == "suggest":
        return (
            "No advice as gauges: run kvtune suggest --watch and scrape its port (9401), or write --export files for "
            "node_exporter's textfile collector (docs/suggest.md)."
        )
    if emitter == "vllm":
        if any(gap.why == "renamed" for gap in gaps):
            return (
                "Prometheus has vLLM's series by names with _ for the colon, as prometheus_client writes OpenMetrics. "
                "Add to the scrape job of the engines: metric_relabel_configs: [{source_labels: [__name__], regex: "
                "'vllm_(.+)', target_label: __name__, replacement: 'vllm:$1'}]"
            )
        if not some:
            return f"No series of vLLM: {where} /metrics of every engine, and leave --disable-log-stats away."
        if all(gap.series.startswith("vllm:nixl_") for gap in gaps):
            return "vLLM exposes nothing of NIXL: it does with a NIXL connector, from version 0.11 on."
        return "This vLLM does not expose these: see its version; panels that use them stay empty."
    if emitter == "process":
        return "The targets do not expose process_* series: panels and alerts that look for restarts stay empty."
    if emitter == "rules":
        return "Rules are not loaded: write them with kvtune rules render --out DIR and name DIR in rule_files."
    if emitter == "prometheus":
        return "Prometheus has no series `up` of these jobs: see its scrape_configs."
    return "Nothing of kvtune exposes these: see what the dashboards or rules were changed to ask for."


def document(items: Sequence[Item], deployment: Deployment, sources: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON document of `kvtune check`."""
    users: dict[Gap, list[str]] = {}
    for item in items:
        for gap in item.gaps:
            users.setdefault(gap, []).append(f"{item.where}: {item.name}" if item.where else f"{item.kind} {item.name}")
    emitters = []
    for emitter in EMITTERS:
        gaps = [gap for gap in users if gap.emitter == emitter]
        if gaps:
            emitters.append(
                {
                    "emitter": emitter, "advice": advice(emitter, deployment, gaps),
                    "missing": [{**_plain(gap), "used_by": users[gap]} for gap in gaps],
                }
            )  # fmt: skip
    kinds = dict.fromkeys(item.kind for item in items)
    dashboards = dict.fromkeys(item.where for item in items if item.where)
    return {
        "schema": SCHEMA,
        "sources": dict(sources),
        "answered": not any(item.gaps for item in items),
        "summary": {kind: _count(item for item in items if item.kind == kind) for kind in kinds},
        "dashboards": {title: _count(item for item in items if item.where == title) for title in dashboards},
        "missing": emitters,
        "items": [item.as_dict() for item in items],
    }


def _count(items: Iterable[Item]) -> dict[str, int]:
    found = list(items)
    return {"asked": len(found), "answered": sum(not item.gaps for item in found)}
