"""What the boards share: frame, variables, links, annotations, and how series are selected.

Tiles and quantiles pool all that the variables select: who wants a deployment apart chooses its jobs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from kvtune_dashboards.layout import Section, place
from kvtune_dashboards.panels import BAD, DATASOURCE, FAIR, NEUTRAL, Panel
from kvtune_dashboards.promql import Expr, Match, Selector, any_of, increase, metric, rate, re_, sum_by
from kvtune_dashboards.semantics import examine, known_series
from kvtune_telemetry.vocabulary import Outcome

SCHEMA_VERSION = 39
"""Of Grafana 10.4; later versions migrate it when they load it."""
STEP = "$__rate_interval"
RANGE = "$__range"

REUSED = Outcome.HIT
NOT_REUSED = (
    Outcome.EXPIRED,
    Outcome.REWRITTEN,
    Outcome.CONSUMED,
    Outcome.ENGINE_GONE,
    Outcome.EVICTED,
    Outcome.ABSENT,
    Outcome.UNVERIFIED,
    Outcome.READ_FAILED,
)
"""Outcomes of follow-up turns that reuse was meant for and did not reach."""
UNTRIED = (Outcome.NO_IDENTITY, Outcome.DISABLED, Outcome.ERROR)
"""Outcomes of turns that reuse was not tried for."""

VLLM_BOARD = "/d/vllm-kv-cache"
"""vLLM's own dashboard of its KV cache, as its repository publishes it."""


def _metric(name: str, matchers: Mapping[str, Any]) -> Selector:
    return metric(name, **matchers)


def router(name: str, /, **matchers: str | Match) -> Selector:
    """Series of the chosen routers."""
    return _metric(name, {"job": re_("$job"), **matchers})


def engine(name: str, /, **matchers: str | Match) -> Selector:
    """Series of the chosen engines; those of vLLM itself have no role."""
    chosen: dict[str, str | Match] = {"job": re_("$job"), "model_name": re_("$model"), "engine": re_("$engine")}
    if name.startswith("kvtune_"):
        chosen["role"] = re_("$role")
    return _metric(name, {**chosen, **matchers})


def suggested(name: str, /, **matchers: str | Match) -> Selector:
    """Advice of `kvtune suggest`. It comes from a job of its own (or a text file), so that `job` does not choose it."""
    return _metric(name, matchers)


def turns(*outcomes: str, window: str = STEP) -> Expr:
    """Turns a second (over `RANGE`: turns) with one of these outcomes, all jobs together."""
    counted = router("kvtune_turns_total", outcome=any_of(*outcomes))
    return sum_by(increase(counted, window) if window == RANGE else rate(counted, window))


def per_second(selector: Selector, *labels: str) -> Expr:
    """Rate by labels."""
    return sum_by(rate(selector, STEP), *labels)


def in_range(selector: Selector, *labels: str) -> Expr:
    """Increase over the time range shown, by labels."""
    return sum_by(increase(selector, RANGE), *labels)


def label_values(series: str, label: str) -> str:
    """The query of a variable; refuses a label that the series does not have."""
    selector = metric(series.split("{")[0])
    if label not in selector.labels:
        raise ValueError(f"{series} has no label {label}")
    return f"label_values({series}, {label})"


def _chooser(name: str, label: str, description: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "description": description,
        "type": "query",
        "datasource": dict(DATASOURCE),
        "definition": query,
        "query": {"query": query, "refId": f"variable-{name}"},
        "multi": True,
        "includeAll": True,
        "allValue": ".+",
        "current": {"text": ["All"], "value": ["$__all"], "selected": True},
        "options": [],
        "refresh": 2,
        "regex": "",
        "sort": 1,
        "hide": 0,
        "skipUrlSync": False,
    }


def _source(name: str, label: str, description: str, kind: str, *, hide: bool = False) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "description": description,
        "type": "datasource",
        "query": kind,
        "multi": False,
        "includeAll": False,
        "current": {},
        "options": [],
        "refresh": 1,
        "regex": "",
        "hide": 2 if hide else 0,
        "skipUrlSync": False,
    }


def variables() -> list[dict[str, Any]]:
    """The choosers at the top of every board."""
    engines = 'kvtune_connector_build_info{job=~"$job"}'
    return [
        _source("datasource", "Prometheus", "Where the metrics are.", "prometheus"),
        _chooser(
            "job",
            "Job",
            "Prometheus jobs of routers and engines.",
            'label_values({__name__=~"kvtune_router_build_info|kvtune_connector_build_info"}, job)',
        ),
        _chooser("model", "Model", "Models of the engines.", label_values(engines, "model_name")),
        _chooser("engine", "Engine", "Data-parallel index of an engine, as vLLM labels it.",
                 label_values(engines, "engine")),
        _chooser("role", "Role", "prefill or decode.", label_values(engines, "role")),
        # Only links read it, and a chooser without a choice is drawn as an error: most have no Tempo.
        _source("traces", "Traces", "Where spans are: the first Tempo, for the links to traces.", "tempo", hide=True),
    ]  # fmt: skip


def trace_link() -> tuple[str, str]:
    """(title, URL) of the turns' spans in the range shown, for a panel whose series carry exemplars."""
    pane = {
        "kvtune": {
            "datasource": "${traces}",
            "queries": [
                {
                    "refId": "A",
                    "datasource": {"type": "tempo", "uid": "${traces}"},
                    "queryType": "traceql",
                    "query": '{ name = "kvtune.turn" }',
                }
            ],
            "range": {"from": "${__from}", "to": "${__to}"},
        }
    }
    # Grafana fills in its variables only where they stand as they are.
    parts = re.split(r"(\$\{\w+\})", json.dumps(pane, separators=(",", ":")))
    quoted = "".join(part if part.startswith("${") else quote(part) for part in parts)
    return "Traces of these turns", f"/explore?schemaVersion=1&panes={quoted}"


def _annotation(
    name: str, colour: str, expr: str, title: str, text: str, *, tags: str = "", on: bool = True
) -> dict[str, Any]:
    return {
        "name": name,
        "datasource": dict(DATASOURCE),
        "enable": on,
        "hide": False,
        "iconColor": colour,
        "expr": expr,
        "step": "30s",
        "titleFormat": title,
        "textFormat": text,
        "tagKeys": tags,
        "useValueForTime": False,
    }


def marks() -> list[dict[str, Any]]:
    """Marks on every time axis: alerts that fire, engines that restarted, settings that changed."""
    restarts = sum_by(rate(router("kvtune_engine_restarts_total"), STEP), "engine", "role").over(0)
    now, before = (
        " or ".join(
            f"max by (job, setting) ({selector}{offset})"
            for selector in (engine("kvtune_connector_setting"), router("kvtune_router_setting"))
        )
        for offset in ("", " offset 2m")
    )
    return [
        {
            "builtIn": 1,
            "name": "Annotations & Alerts",
            "type": "dashboard",
            "datasource": {"type": "grafana", "uid": "-- Grafana --"},
            "enable": True,
            "hide": True,
            "iconColor": "rgba(0, 211, 255, 1)",
        },
        _annotation(
            "Alerts", BAD, 'ALERTS{alertname=~"Kvtune.*",alertstate="firing"}', "{{alertname}}", "{{severity}}",
            tags="severity",
        ),
        _annotation("Engine restarts", FAIR, str(restarts), "Engine restarted", "{{role}} {{engine}}"),
        # A new pod is a new series: compared is what a job is set to, not what a series says.
        _annotation("Setting changes", NEUTRAL, f"({now}) != ({before})", "Setting changed", "{{job}}: {{setting}}"),
    ]  # fmt: skip


def links() -> list[dict[str, Any]]:
    """The other boards, keeping time and variables, and vLLM's own."""
    shared = {"icon": "external link", "tooltip": "", "targetBlank": False, "keepTime": True}
    return [
        {
            **shared, "title": "kvtune", "type": "dashboards", "tags": ["kvtune"], "asDropdown": False,
            "includeVars": True, "url": "",
        },
        {
            **shared, "title": "vLLM KV cache", "type": "link", "tags": [], "asDropdown": False, "includeVars": False,
            "url": VLLM_BOARD, "tooltip": "vLLM's own dashboard of its KV cache and of NIXL, where it is installed",
        },
    ]  # fmt: skip


def frame(uid: str, title: str, description: str, sections: Sequence[Section]) -> dict[str, Any]:
    """A whole dashboard."""
    panels = place(sections)
    _cite(panels)
    return {
        "uid": uid,
        "title": title,
        "description": description,
        "tags": ["kvtune"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timepicker": {},
        "timezone": "",
        "weekStart": "",
        "fiscalYearStartMonth": 0,
        "liveNow": False,
        "annotations": {"list": marks()},
        "links": links(),
        "templating": {"list": variables()},
        "panels": panels,
    }


def _cite(panels: Sequence[Panel]) -> None:
    """End each panel's description with the metrics it reads, so that the two cannot differ."""
    known = known_series()
    for panel in panels:
        _cite(panel.get("panels", ()))
        asked = [
            series.family
            for target in panel.get("targets", ())
            for series in examine(target["expr"], known, windows=None).series
        ]
        if asked:
            panel["description"] += f"\n\nReads {', '.join(f'`{name}`' for name in dict.fromkeys(asked))}."
