from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from kvtune_dashboards.lint import Finding, lint, lint_board, room_px, title_px
from kvtune_dashboards.rendering import boards
from kvtune_dashboards.semantics import examine, known_series

KNOWN = known_series()
GOOD = next(board for board in boards() if board["uid"] == "kvtune-reuse")
TILE = "Follow-up turns reused"
CHART = "Rewritten histories caught"
WORDY = "Why turns were not reused"
HEAT = "TTFT of follow-up turns, spread"
TABLE = "Outcomes in numbers"

Break = Callable[[dict[str, Any]], None]


def panel(board: dict[str, Any], title: str) -> dict[str, Any]:
    found: dict[str, Any] = next(
        one for top in board["panels"] for one in (top, *top.get("panels", ())) if one["title"] == title
    )
    return found


def target(board: dict[str, Any], title: str) -> dict[str, Any]:
    found: dict[str, Any] = panel(board, title)["targets"][0]
    return found


def variable(board: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in board["templating"]["list"] if one["name"] == name)
    return found


def put(where: str, /, expr: str) -> Break:
    def change(board: dict[str, Any]) -> None:
        target(board, where)["expr"] = expr

    return change


def keys(where: str, /, **changed: Any) -> Break:
    return lambda board: panel(board, where).update(changed)


def asked(where: str, /, **changed: Any) -> Break:
    return lambda board: target(board, where).update(changed)


def placed(where: str, /, **changed: int) -> Break:
    return lambda board: panel(board, where)["gridPos"].update(changed)


def defaults(where: str, /, **changed: Any) -> Break:
    return lambda board: panel(board, where)["fieldConfig"]["defaults"].update(changed)


def custom(where: str, /, **changed: Any) -> Break:
    return lambda board: panel(board, where)["fieldConfig"]["defaults"]["custom"].update(changed)


def empty(where: str, /, **changed: Any) -> Break:
    """Change how nothing is shown."""
    return lambda board: panel(board, where)["fieldConfig"]["defaults"]["mappings"][0]["options"].update(changed)


def chooser(where: str, /, **changed: Any) -> Break:
    return lambda board: variable(board, where).update(changed)


def marked(where: str, /, **changed: Any) -> Break:
    return lambda board: next(one for one in board["annotations"]["list"] if one["name"] == where).update(changed)


TURNS = 'kvtune_turns_total{job=~"$job"}'
SUM = f"sum(rate({TURNS}[$__rate_interval]))"

CASES: list[tuple[str, str, str, Break]] = [
    # rule, panel, what the finding says, what is broken
    ("uid", "-", "up to 40 letters", lambda board: board.update(uid="x" * 41)),
    ("tag", "-", "lacks the tag 'kvtune'", lambda board: board.update(tags=[])),
    ("grid-overflow", TILE, "reaches column 28 of 24", placed(TILE, x=24)),
    ("grid-overlap", CHART, "lies over", placed(CHART, y=1)),
    ("grid", TILE, "has no gridPos", keys(TILE, gridPos={"x": 0})),
    ("panel-id", TILE, "id 7 is another panel's too", lambda b: [keys(t, id=7)(b) for t in (TILE, CHART)] and None),
    ("panel-id", TILE, "need a positive number", keys(TILE, id=None)),
    ("title", TILE, "2 panels have this title", keys(CHART, title=TILE)),
    ("description", TILE, "has no description", keys(TILE, description=" ")),
    ("description", TILE, "does not name `kvtune_turns_total`", keys(TILE, description="Says nothing of it.")),
    (
        "description", TILE, "names `kvtune_references`, which it does not read",
        keys(TILE, description="`kvtune_turns_total` and `kvtune_references`."),
    ),
    ("unit", TILE, "unit 'percentt' is not one", defaults(TILE, unit="percentt")),
    ("unit", TILE, "unit 's', but the query gives a ratio", defaults(TILE, unit="s")),
    ("unit", HEAT, "`kvtune_turn_ttft_seconds` measures s",
     lambda board: panel(board, HEAT)["options"]["yAxis"].update(unit="bytes")),
    ("no-targets", TILE, "asks nothing", keys(TILE, targets=[])),
    ("datasource", TILE, "must ask ${datasource}", keys(TILE, datasource={"type": "prometheus", "uid": "prom"})),
    ("datasource", TILE, "A: must ask ${datasource}", asked(TILE, datasource={"uid": "${DS_PROMETHEUS}"})),
    ("ref-id", TILE, "refId A stands 2 times", lambda b: panel(b, TILE)["targets"].append(target(b, TILE))),
    ("no-value", TILE, "has no noValue", defaults(TILE, noValue="")),
    ("no-value", TILE, "does not map nothing and NaN", defaults(TILE, mappings=[])),
    ("no-value", TILE, "does not map nothing and NaN", empty(TILE, match="nan")),
    ("no-value-colour", TILE, "is red where there is nothing to judge", empty(TILE, result={"text": "No traffic"})),
    ("no-value-colour", TILE, "is red where there is nothing to judge",
     empty(TILE, result={"text": "No traffic", "color": "red"})),
    ("grid-hole", CHART, "leaves 6 cells empty, from column 0 of line", placed(CHART, h=6)),
    ("grid-hole", TILE, "leaves 5 cells empty, from column 3 of line 0", placed(TILE, w=3)),
    ("title-width", TILE, "is cut: its title is some 1", placed(TILE, w=2)),
    ("title-width", 50 * "m", "its title is some 602 px", keys(CHART, title=50 * "m")),
    ("axis", CHART, "needs axisSoftMax", custom(CHART, axisSoftMax=None)),
    ("raw-word", WORDY, "the vocabulary's 'read_failed'",
     lambda b: panel(b, WORDY)["fieldConfig"].update(overrides=[])),
    ("unit", CHART, "unit 'suffix: turns/s' is not one", defaults(CHART, unit="suffix: turns/s")),
    ("promql", CHART, "does not parse", put(CHART, f"sum(rate({TURNS}[$__rate_interval])")),
    ("metric", CHART, "`kvtune_turn_total` is in neither",
     put(CHART, "sum(rate(kvtune_turn_total[$__rate_interval]))")),
    ("label", CHART, "has no label `model_name`",
     put(CHART, 'sum(rate(kvtune_turns_total{model_name=~"$model"}[$__rate_interval]))')),
    ("label", CHART, "is never 'hitt'", put(CHART, 'sum(rate(kvtune_turns_total{outcome="hitt"}[$__rate_interval]))')),
    ("label", CHART, "sum by (reason)", put(CHART, f"sum by (reason) (rate({TURNS}[$__rate_interval]))")),
    ("rate-interval", CHART, "fixed window of 5 min", put(CHART, f"sum(rate({TURNS}[5m]))")),
    ("rate-interval", CHART, "window [$__interval]", put(CHART, f"sum(rate({TURNS}[$__interval]))")),
    ("rate-interval", CHART, "window [$__range]", put(CHART, f"sum(rate({TURNS}[$__range]))")),
    ("counter", CHART, "outside rate() or increase()", put(CHART, f"sum({TURNS})")),
    ("counter", CHART, "rate() of a subquery", put(CHART, "rate(sum(kvtune_references)[$__rate_interval:])")),
    ("counter", CHART, "rate() of gauge", put(CHART, "sum(rate(kvtune_references[$__rate_interval]))")),
    ("counter", CHART, "deriv() of counter", put(CHART, f"sum(deriv({TURNS}[$__rate_interval]))")),
    ("ratio", CHART, "gives NaN when idle", put(CHART, f"{SUM} / {SUM}")),
    ("ratio", CHART, "gives NaN when idle", put(CHART, f"{SUM} / ({SUM} >= 0)")),
    ("nan", CHART, "is NaN when idle",
     put(CHART, "histogram_quantile(0.9, sum by (le) (rate(kvtune_turn_gap_seconds_bucket[$__rate_interval])))")),
    ("histogram", CHART, "needs the label le",
     put(CHART, "histogram_quantile(0.9, sum(rate(kvtune_turn_gap_seconds_bucket[$__rate_interval]))) >= 0")),
    ("histogram", CHART, "leaves le",
     put(CHART, "sum by (le) (rate(kvtune_turn_gap_seconds_bucket[$__rate_interval]))")),
    ("matching", CHART, "never match", put(CHART, f"{SUM} / (sum by (job) (rate({TURNS}[$__rate_interval])) > 0)")),
    ("matching", CHART, "its right side has no labels", put(CHART, f"kvtune_references and on (job) {SUM}")),
    ("legend", CHART, "legend names outcome; the query leaves no labels", asked(CHART, legendFormat="{{outcome}}")),
    ("variable", CHART, "uses $tenant", put(CHART, 'sum(kvtune_references{job=~"$tenant"})')),
    ("heatmap", HEAT, "format must be heatmap", asked(HEAT, format="time_series")),
    ("heatmap", HEAT, "must leave le alone",
     put(HEAT, "sum by (le, job) (increase(kvtune_turn_ttft_seconds_bucket[$__rate_interval]))")),
    ("exemplar", CHART, "exemplars come with", asked(CHART, exemplar=True)),
    ("column", TABLE, "organize names 'outcom'",
     lambda b: panel(b, TABLE)["transformations"][-1]["options"].update(renameByName={"outcom": "Outcome"})),
    ("variable", "variable role", "is missing", lambda b: b["templating"]["list"].remove(variable(b, "role"))),
    ("variable", "variable job", "allValue is None, must be '.+'", chooser("job", allValue=None)),
    ("variable", "variable job", "refresh is 1, must be 2", chooser("job", refresh=1)),
    ("variable", "variable datasource", "lists Prometheus", chooser("datasource", query="loki")),
    ("variable", "variable job", "is not label_values", chooser("job", query={"query": "up"})),
    ("datasource", "variable job", "must ask ${datasource}", chooser("job", datasource={"uid": "prom"})),
    ("metric", "variable job", "`kvtune_info` is in neither",
     chooser("job", query={"query": "label_values(kvtune_info, job)"})),
    ("label", "variable job", "has no label `pod`",
     chooser("job", query={"query": "label_values(kvtune_references, pod)"})),
    ("label", "annotation Alerts", "`ALERTS` has no label `alert`", marked("Alerts", expr='ALERTS{alert="x"}')),
    ("legend", "annotation Alerts", "titleFormat names pod", marked("Alerts", titleFormat="{{pod}}")),
    ("datasource", "annotation Alerts", "must ask ${datasource}", marked("Alerts", datasource={"uid": "prom"})),
    ("variable", "annotation Alerts", "uses $who", marked("Alerts", expr='ALERTS{alertname=~"$who"}')),
    ("link", "-", "no board has the uid kvtune-gone", lambda b: b["links"].append({"url": "/d/kvtune-gone"})),
]  # fmt: skip


def broken(change: Break) -> list[Finding]:
    board = copy.deepcopy(GOOD)
    change(board)
    return lint([board], KNOWN)


def test_the_board_that_is_broken_here_is_well() -> None:
    assert lint([GOOD], KNOWN) == []


@pytest.mark.parametrize(
    ("rule", "where", "says", "change"), CASES, ids=[f"{rule}: {says[:40]}" for rule, _, says, _ in CASES]
)
def test_each_rule_fires_and_names_panel_and_cause(rule: str, where: str, says: str, change: Break) -> None:
    found = [finding for finding in broken(change) if finding.rule == rule and finding.panel == where]
    assert found, [str(finding) for finding in broken(change)]
    assert any(says in finding.message for finding in found), [str(finding) for finding in found]
    assert f"{where}: " in str(found[0]) and f"[{rule}]" in str(found[0])


def test_what_is_bounded_or_logarithmic_needs_no_soft_bound() -> None:
    for change in (defaults(CHART, max=1), custom(CHART, scaleDistribution={"type": "log", "log": 10})):
        board = copy.deepcopy(GOOD)
        custom(CHART, axisSoftMax=None)(board)
        change(board)
        assert not [finding for finding in lint([board], KNOWN) if finding.rule == "axis"]


def test_a_word_that_the_query_leaves_out_needs_no_name() -> None:
    def narrowed(board: dict[str, Any]) -> None:
        panel(board, WORDY)["fieldConfig"]["overrides"] = []
        asked(WORDY, expr=f'sum by (outcome) (rate({TURNS[:-1]},outcome=~"hit|expired"}}[$__rate_interval]))')(board)

    assert broken(narrowed) == []


@pytest.mark.parametrize(
    ("columns", "title"), [(2, "Waiting"), (3, "Settings that differ"), (4, "Speed against a day ago")]
)
def test_titles_that_were_seen_to_fit(columns: int, title: str) -> None:
    assert title_px(title) <= room_px(columns)


@pytest.mark.parametrize(("columns", "title"), [(2, "Waiting on decode"), (3, "Targets not scraped"),
                                                (4, "Threshold: in force and advised")])  # fmt: skip
def test_titles_that_were_seen_to_be_cut(columns: int, title: str) -> None:
    assert title_px(title) > room_px(columns)


def test_two_boards_of_one_uid() -> None:
    assert [str(finding) for finding in lint([GOOD, GOOD], KNOWN)] == [
        "kvtune-reuse: -: 2 boards have this uid [uid]"
    ]  # fmt: skip


def test_panels_in_collapsed_rows_are_looked_at_too() -> None:
    inside = "Held-out conversations, for comparison"
    found = broken(keys(inside, description=""))
    assert {(finding.panel, finding.rule) for finding in found} == {(inside, "description")}


def test_a_board_of_nothing_does_not_crash_the_lint() -> None:
    rules = {finding.rule for finding in lint_board({"panels": [{}]}, KNOWN)}
    assert {"uid", "tag", "variable", "grid", "panel-id", "title", "description", "no-targets"} <= rules


# --- what an expression gives ---------------------------------------------------------------------------------------


def shape(expr: str) -> tuple[set[str], dict[str, int] | None]:
    meaning = examine(expr, KNOWN, windows=None)
    assert meaning.shape is not None and not meaning.problems, meaning.problems
    dimension = meaning.shape.dimension
    return set(meaning.shape.labels), None if dimension is None else dict(dimension)


@pytest.mark.parametrize(
    ("expr", "labels", "dimension"),
    [
        ("kvtune_references", {"job", "instance"}, {"count": 1}),
        ("sum(rate(kvtune_kv_read_bytes_total[5m]))", set(), {"byte": 1, "second": -1}),
        ("sum by (job) (rate(kvtune_retained_token_seconds_total[5m]))", {"job"}, {"count": 1}),
        ("sum without (instance) (kvtune_references)", {"job"}, {"count": 1}),
        ("sum(rate(kvtune_path_seconds_total[5m]))", set(), {}),
        (
            "histogram_quantile(0.5, sum by (le, job) (rate(kvtune_turn_ttft_seconds_bucket[5m]))) >= 0",
            {"job"}, {"second": 1},
        ),
        ("histogram_quantile(0.5, sum by (le) (increase(kvtune_turn_ttft_seconds_bucket[5m]))) > 0",
         set(), {"second": 1}),
        ("time() - max by (job) (process_start_time_seconds)", {"job"}, {"second": 1}),
        ("count(up == 0) or vector(0)", set(), {"count": 1}),
        ("kvtune_references * on (job) group_left (version) kvtune_router_build_info",
         {"job", "instance", "version"}, None),
        ('label_replace(up, "host", "$1", "instance", "(.*):.*")', {"job", "instance", "host"}, None),
        ("topk(3, sum by (outcome) (rate(kvtune_turns_total[5m])))", {"outcome"}, {"count": 1, "second": -1}),
        ("2 * sum(kvtune_retained_tokens)", set(), {"count": 1}),
        ('{__name__=~"vllm:num_requests_waiting|vllm_num_requests_waiting"}',
         {"job", "instance", "model_name", "engine"}, {"count": 1}),
        ("kvtune:retained_pool:ratio", {"job", "model_name", "instance", "engine"}, None),
    ],
)  # fmt: skip
def test_labels_and_dimension(expr: str, labels: set[str], dimension: dict[str, int] | None) -> None:
    assert shape(expr) == (labels, dimension)


def test_what_is_asked_for_is_listed_once_in_order() -> None:
    meaning = examine(
        "sum(kvtune_retained_tokens) + sum(kvtune_references) + sum(kvtune_retained_tokens)", KNOWN, windows=None
    )
    assert [series.name for series in meaning.series] == ["kvtune_retained_tokens", "kvtune_references"]


def test_what_does_not_parse_has_no_shape() -> None:
    meaning = examine("sum(", KNOWN, windows=None)
    assert meaning.shape is None and [problem.rule for problem in meaning.problems] == ["promql"]
