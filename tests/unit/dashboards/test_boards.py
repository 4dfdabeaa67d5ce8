from __future__ import annotations

import copy
import importlib
import pkgutil
import re
from collections import Counter
from itertools import pairwise
from typing import Any

import grafana_foundation_sdk.models.units as grafana_units
import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

import kvtune_dashboards.boards as boards_package
from kvtune_dashboards.alerts import alerts
from kvtune_dashboards.boards import BOARDS
from kvtune_dashboards.boards.common import NOT_REUSED, REUSED, UNTRIED
from kvtune_dashboards.boards.formulas import rows
from kvtune_dashboards.config import RulesConfig
from kvtune_dashboards.lint import UNITS, all_panels, lint, queries
from kvtune_dashboards.panels import COLOURS
from kvtune_dashboards.rendering import boards, to_json
from kvtune_dashboards.semantics import examine, known_series
from kvtune_telemetry.buckets import GAP_SECONDS, READ_SECONDS, TTFT_SECONDS
from kvtune_telemetry.catalogue import CATALOGUE
from kvtune_telemetry.vocabulary import Outcome

import json  # isort: skip

MADE = {board["uid"]: board for board in boards()}
every_board = pytest.mark.parametrize("board", MADE.values(), ids=list(MADE))

NOT_SHOWN = {
    "kvtune_turn_duration_seconds": "the whole stream; says nothing about reuse",
    "kvtune_turn_gap_tokens": "in the recording rules about other TTLs",
    "kvtune_turn_gap_tokens_squared": "for `kvtune suggest` alone",
    "kvtune_turn_end_tokens_total": "in the recording rules about other TTLs",
    "kvtune_turn_end_tokens_squared_total": "for `kvtune suggest` alone",
    "kvtune_path_tokens_squared_total": "in the recording rules about costs",
    "kvtune_path_seconds_squared_total": "for `kvtune suggest` alone",
    "kvtune_path_token_seconds_total": "in the recording rules about costs",
    "kvtune_kv_read_tokens_total": "for `kvtune suggest` alone; bytes are shown",
    "kvtune_retentions_total": "ends are shown; what is held is a gauge",
    "kvtune_retention_tokens_total": "token-seconds are shown",
    "kvtune_suggest_last_success_timestamp_seconds": "the age of the last look is shown, and whether it failed",
}
"""Metrics that no board reads, and why."""


def test_there_are_four_boards_with_known_addresses() -> None:
    assert list(MADE) == list(BOARDS) == ["kvtune-reuse", "kvtune-transfer", "kvtune-retention", "kvtune-fleet"]
    assert [board["title"] for board in MADE.values()] == [
        "kvtune / Reuse", "kvtune / Transfer and decisions", "kvtune / Retention and tuning", "kvtune / Fleet",
    ]  # fmt: skip
    modules = {name for _, name, _ in pkgutil.iter_modules(boards_package.__path__)} - {"common", "formulas"}
    assert {importlib.import_module(f"kvtune_dashboards.boards.{name}").UID for name in modules} == set(MADE)


def test_the_boards_break_no_rule() -> None:
    assert [str(finding) for finding in lint(list(MADE.values()))] == []


@every_board
def test_the_frame(board: dict[str, Any]) -> None:
    assert board["tags"] == ["kvtune"]
    assert (board["refresh"], board["graphTooltip"], board["schemaVersion"]) == ("30s", 1, 39)
    names = [variable["name"] for variable in board["templating"]["list"]]
    assert names == ["datasource", "job", "model", "engine", "role", "traces"]
    own, vllm = board["links"]
    assert (own["type"], own["tags"], own["keepTime"], own["includeVars"]) == ("dashboards", ["kvtune"], True, True)
    assert (vllm["url"], vllm["keepTime"]) == ("/d/vllm-kv-cache", True)
    marks = [one["name"] for one in board["annotations"]["list"] if not one.get("builtIn")]
    assert marks == ["Alerts", "Engine restarts", "Setting changes"]


@every_board
def test_the_first_row_is_a_verdict_and_nothing_is_asked_by_a_collapsed_row(board: dict[str, Any]) -> None:
    first_row = next(panel for panel in board["panels"] if panel["type"] == "row")
    tiles = [panel for panel in board["panels"] if panel["gridPos"]["y"] < first_row["gridPos"]["y"]]
    assert tiles and {panel["type"] for panel in tiles} == {"stat"}
    assert {panel["gridPos"]["y"] for panel in tiles} == {0}
    assert sum(panel["gridPos"]["w"] for panel in tiles) == 24
    assert all(target["instant"] for panel in tiles for target in panel["targets"])
    collapsed = [panel for panel in board["panels"] if panel["type"] == "row" and panel["collapsed"]]
    assert all(panel["panels"] for panel in collapsed)


def test_every_outcome_is_counted_once() -> None:
    assert Counter([REUSED, *NOT_REUSED, *UNTRIED, Outcome.FIRST]) == Counter(Outcome)


def test_every_metric_is_shown_or_said_why_not() -> None:
    known = known_series()
    shown = {
        series.family
        for board in MADE.values()
        for query in queries(board)
        for series in examine(query.expr, known, windows=None).series
    }
    shown |= {
        name
        for board in MADE.values()
        for variable in board["templating"]["list"]
        for name in re.findall(r"kvtune_\w+", str(variable["query"]))
    }
    names = {metric.name for metric in CATALOGUE}
    assert names - shown == set(NOT_SHOWN)


def test_series_of_routers_are_chosen_by_job_alone_and_those_of_engines_by_all() -> None:
    emitters = {name: metric.emitter for metric in CATALOGUE for name in metric.sample_names()}
    selectors = re.compile(r"(kvtune_\w+)(\{[^}]*\})?")
    for board in MADE.values():
        for query in queries(board):
            for name, matchers in selectors.findall(query.expr):
                emitter = emitters.get(name)
                if emitter is None:
                    continue
                where = (board["uid"], query.where, name)
                assert ('job=~"$job"' in matchers) == (emitter != "suggest"), where
                for label in ("$model", "$engine"):
                    assert (label in matchers) == (emitter == "connector"), where


@every_board
def test_exemplars_are_asked_for_where_the_recorder_leaves_them(board: dict[str, Any]) -> None:
    for query in queries(board):
        if query.target.get("exemplar"):
            assert "kvtune_turn_ttft_seconds_bucket" in query.expr, query


@every_board
def test_the_chooser_of_traces_is_hidden_for_most_have_none(board: dict[str, Any]) -> None:
    hidden = {variable["name"] for variable in board["templating"]["list"] if variable["hide"]}
    assert hidden == {"traces"}


@pytest.mark.parametrize(("edges", "most"), [(TTFT_SECONDS, 20), (READ_SECONDS, 20), (GAP_SECONDS, 20)])
def test_a_heatmap_has_as_many_rows_as_can_be_told_apart(edges: tuple[float, ...], most: int) -> None:
    exposed = [f"{edge:g}" for edge in edges] + [str(float(edge)) for edge in edges] + ["+Inf"]
    pattern = re.compile(str(rows(edges).value).replace("\\\\", "\\"))
    taken = {float(le) for le in exposed if pattern.fullmatch(le)}
    # Every other edge, say, down from the last one: rows are equally high.
    finite = sorted(taken - {float("inf")})
    assert float("inf") in taken and 10 <= len(finite) <= most
    places = [edges.index(edge) for edge in finite]
    assert places[-1] == len(edges) - 1 and len({b - a for a, b in pairwise(places)}) == 1
    # However 1 is written.
    assert {float(le) for le in exposed[: len(edges)] if pattern.fullmatch(le)} == set(finite)


def test_ttft_leads_to_traces() -> None:
    titles = {p["title"]: p for p in all_panels(MADE["kvtune-reuse"])}
    (link,) = titles["TTFT, first and follow-up turns"]["fieldConfig"]["defaults"]["links"]
    assert link["url"].startswith("/explore?schemaVersion=1&panes=%7B")
    # Variables must reach Grafana as they are.
    for variable in ("${traces}", "${__from}", "${__to}"):
        assert variable in link["url"]
    assert "{" not in link["url"].replace("${", "")


@every_board
def test_a_word_has_one_colour_on_all_boards(board: dict[str, Any]) -> None:
    for panel in all_panels(board):
        for override in panel.get("fieldConfig", {}).get("overrides", ()):
            word = override["matcher"]["options"]
            colours = [c["value"]["fixedColor"] for c in override["properties"] if c["id"] == "color"]
            if word in COLOURS and colours:
                assert colours == [COLOURS[word]], (panel["title"], word)


def test_units_are_grafanas() -> None:
    own = {value for name, value in vars(grafana_units).items() if isinstance(value, str) and not name.startswith("__")}
    assert {unit for unit in UNITS if not unit.startswith(("suffix:", "si:"))} <= own


def test_the_panel_that_each_alert_names_exists() -> None:
    ids = {(uid, panel["title"]): panel["id"] for uid, board in MADE.items() for panel in all_panels(board)}
    for alert in alerts(RulesConfig()):
        assert (alert.board, alert.panel) in ids, alert.name


# --- Grafana's own models -------------------------------------------------------------------------------------------


def dropped(there: Any, back: Any, path: str = "") -> list[str]:
    """Keys that Grafana's models do not know: they are gone after a round trip. Added defaults do not count."""
    if isinstance(there, dict) and isinstance(back, dict):
        return [
            found
            for key, value in there.items()
            for found in ([f"{path}.{key}"] if key not in back else dropped(value, back[key], f"{path}.{key}"))
        ]
    if isinstance(there, list) and isinstance(back, list):
        if len(there) != len(back):
            return [f"{path}: {len(there)} items became {len(back)}"]
        return [
            found
            for number, (a, b) in enumerate(zip(there, back, strict=True))
            for found in dropped(a, b, f"{path}[{number}]")
        ]
    return []


def round_trip(board: dict[str, Any]) -> list[str]:
    register_default_plugins()
    back = json.loads(json.dumps(Dashboard.from_json(copy.deepcopy(board)), cls=JSONEncoder))
    return dropped(board, back)


@every_board
def test_grafanas_models_know_every_key(board: dict[str, Any]) -> None:
    assert round_trip(json.loads(to_json(board))) == []


@pytest.mark.parametrize(
    ("kind", "place", "key"),
    [
        ("timeseries", ("options",), "spanNulls"),
        ("timeseries", ("fieldConfig", "defaults"), "unitt"),
        ("timeseries", ("fieldConfig", "defaults", "custom"), "fillOpacityy"),
        ("timeseries", ("targets", 0), "legend"),
        ("stat", ("options",), "colourMode"),
        ("stat", ("gridPos",), "width"),
        ("heatmap", ("options", "yAxis"), "units"),
        ("table", ("options",), "headers"),
        ("bargauge", ("options",), "sort"),
    ],
)
def test_a_misplaced_key_is_found(kind: str, place: tuple[str | int, ...], key: str) -> None:
    board = copy.deepcopy(MADE["kvtune-retention"])
    panel = next(panel for panel in board["panels"] if panel["type"] == kind)
    number = board["panels"].index(panel)
    inside: Any = panel
    for step in place:
        inside = inside[step]
    inside[key] = True
    (found,) = round_trip(board)
    assert found.startswith(f".panels[{number}].") and found.endswith(f".{key}")
