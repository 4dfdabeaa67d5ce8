"""What an expression cannot do without, what of it is missing, and what to do about that."""

from __future__ import annotations

from typing import Any

import pytest

from kvtune_dashboards.boards import BOARDS
from kvtune_dashboards.coverage import (
    Deployment,
    Every,
    Gap,
    Item,
    Need,
    Rule,
    advice,
    asked_for,
    check,
    document,
    emitter_of,
    every_need,
    needs,
    questions,
)
from kvtune_dashboards.recording import RECORDING_RULES
from kvtune_telemetry.catalogue import CATALOGUE

ENGINE = {"model_name": "m", "engine": "0", "role": "decode"}
TURNS = [{"outcome": "hit"}, {"outcome": "first"}]


def missing(expr: str, deployment: Deployment, *recording: Rule) -> set[tuple[str, str]]:
    """(series, why) of what keeps an expression from its answer."""
    (item,) = check(deployment, [], recording, [Rule("A", expr)], [])[len({r.name for r in recording}) :]
    return {(gap.series, gap.why) for gap in item.gaps}


# --- what an expression needs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expr", "wanted"),
    [
        ("a", {"a"}),
        ("sum by (x) (rate(a[$__rate_interval])) / (b > 0)", {"a", "b"}),
        ("increase(a[$__range]) / $__range_s + a offset 1h", {"a"}),
        ("increase(a[${__range}]) / ${__interval_ms}", {"a"}),
        ("histogram_quantile(0.9, sum by (le) (rate(a_bucket[5m]))) and on (job) b > 0", {"a_bucket", "b"}),
        ("a unless b", {"a"}),
        ("max_over_time(a[1h:1m])", {"a"}),
        ("-(a)", {"a"}),
        ("topk(5, a)", {"a"}),
        ("absent(a)", set()),
        ("absent_over_time(a[1h])", set()),
        ("vector(1) + time()", set()),
        ("label_replace(a, \"x\", \"$1\", \"y\", \"(.*)\")", {"a"}),
        ('{__name__=~"a|b"}', {"a", "b"}),
    ],
)  # fmt: skip
def test_the_series_of_an_expression(expr: str, wanted: set[str]) -> None:
    assert {name for need in every_need(needs(expr)) for name in need.names} == wanted


def test_matchers_are_kept_as_written() -> None:
    found = needs('a{x="1",y!="2",z=~"3|4",w!~"5",job=~"$job"}')
    assert isinstance(found, Need)
    assert set(found.matchers) == {("x", "=", "1"), ("y", "!=", "2"), ("z", "=~", "3|4"), ("w", "!~", "5"),
                                   ("job", "=~", "$job")}  # fmt: skip
    assert needs("vector(0)") == Every()
    with pytest.raises(ValueError, match="parenthesis"):
        needs("sum(")


def test_or_takes_either_side_and_everything_else_all() -> None:
    live = Deployment({"a": [{}], "b": [{}]})
    assert missing("a or gone", live) == missing("gone or a", live) == set()
    assert missing("count(gone) or vector(0)", live) == set()
    assert missing("gone or lost", live) == {("gone", "absent"), ("lost", "absent")}
    assert missing("a / (gone > 0)", live) == missing("a and gone", live) == {("gone", "absent")}
    assert missing("a unless gone", live) == missing("absent(gone)", live) == set()
    assert missing('{__name__=~"gone|b"}', live) == set()
    assert missing('{__name__=~"gone|lost"}', live) == {("gone", "absent"), ("lost", "absent")}


# --- what is missing ------------------------------------------------------------------------------------------------


def test_a_selector_wants_its_labels_and_their_values() -> None:
    live = Deployment({"kvtune_turns_total": TURNS})
    for matcher in (
        'outcome="hit"',
        'outcome=~"hit|expired"',
        'outcome!="hit"',
        'outcome!~"h.*"',
        'job=~"$job"',
        'a=""',
    ):
        assert missing(f"rate(kvtune_turns_total{{{matcher}}}[5m])", live) == set(), matcher
    for matcher in ('outcome="expired"', 'outcome=~"hi"', 'outcome!~"hit|first"'):
        assert missing(f"kvtune_turns_total{{{matcher}}}", live) == {("kvtune_turns_total", "value")}, matcher
    for matcher in ('cluster="a"', 'cluster=~"$cluster"', 'cluster=~".+"'):
        assert missing(f"kvtune_turns_total{{{matcher}}}", live) == {("kvtune_turns_total", "label")}, matcher


def test_matchers_must_hold_together() -> None:
    name = "kvtune_decisions_total"
    rows = [{**ENGINE, "decision": "fetch", "reason": "none"}, {**ENGINE, "decision": "recompute", "reason": "expired"}]
    live = Deployment({name: rows})
    assert missing(f'{name}{{decision="fetch",reason="none"}}', live) == set()
    assert missing(f'{name}{{decision="fetch",reason="expired"}}', live) == {(name, "value")}


def test_a_label_of_the_catalogue_that_was_dropped_is_missing_whoever_asks() -> None:
    without = {key: value for key, value in ENGINE.items() if key != "model_name"}
    item = check(Deployment({"kvtune_retained_tokens": [without]}), [], [], [], ["kvtune_retained_tokens"])[0]
    assert item.gaps == (Gap("kvtune_retained_tokens", "label", "without the label model_name"),)
    assert check(Deployment({"kvtune_retained_tokens": [ENGINE]}), [], [], [], ["kvtune_retained_tokens"])[0].gaps == ()


def test_job_and_instance_are_of_prometheus_only() -> None:
    name = "kvtune_turns_total"
    expr = f'{name}{{job="router"}}'
    assert missing(expr, Deployment({name: TURNS})) == set()
    stored = [{**row, "job": "other"} for row in TURNS]
    assert missing(expr, Deployment({name: stored}, stored=True)) == {(name, "value")}
    assert missing("up", Deployment({})) == set()
    assert missing("up", Deployment({}, stored=True)) == {("up", "absent")}
    assert missing("ALERTS", Deployment({}, stored=True)) == set(), "it is there only while one fires"


def test_labels_that_prometheus_was_not_asked_by_are_known_by_name() -> None:
    name = "kvtune_engine_up"
    rows = [{"role": "decode", "job": "r"}]
    hidden = frozenset({"engine"})
    there = Deployment({name: rows}, stored=True, hidden=hidden, having={"engine": frozenset({name})})
    assert missing(f'{name}{{engine="http://d"}}', there) == set()
    assert missing(name, Deployment({name: rows}, stored=True, hidden=hidden)) == {(name, "label")}


def test_advice_that_is_not_given_is_no_gap_where_suggest_is_exported() -> None:
    assert missing("kvtune_suggest_recommended", Deployment({})) == {("kvtune_suggest_recommended", "absent")}
    assert missing("kvtune_suggest_recommended", Deployment({"kvtune_suggest_up": [{}]})) == set()


def test_names_that_prometheus_stored_without_their_colon_are_recognised() -> None:
    live = Deployment({"vllm_num_requests_waiting": [{"engine": "0"}]}, stored=True)
    assert missing("vllm:num_requests_waiting", live) == {("vllm:num_requests_waiting", "renamed")}
    (item,) = check(live, [], [], [], ["vllm:num_requests_waiting"])
    assert item.gaps[0].detail == "it is there as vllm_num_requests_waiting"
    told = advice("vllm", live, item.gaps)
    assert "metric_relabel_configs" in told and "vllm:$1" in told


def test_either_spelling_answers_where_an_expression_takes_both() -> None:
    expr = 'sum({__name__=~"vllm[:_]x",job=~"$job"}) by (job)'
    assert asked_for([], [], [Rule("A", expr)], [])[0].names == ("vllm:x", "vllm_x")
    for name in ("vllm:x", "vllm_x"):
        assert missing(expr, Deployment({name: [{}]})) == set()
    assert missing(expr, Deployment({})) == {("vllm:x", "absent")}


def test_a_series_that_is_exposed_and_not_scraped_says_so() -> None:
    live = Deployment({}, stored=True, elsewhere=frozenset({"kvtune_references"}))
    found = check(live, [], [], [], ["kvtune_references", "kvtune_turns_in_flight"])
    assert [item.gaps[0].detail for item in found] == ["exposed, but not in Prometheus", ""]


# --- rules ----------------------------------------------------------------------------------------------------------

HITS = Rule("kvtune:hits:rate", 'rate(kvtune_turns_total{outcome="hit"}[5m])')
SHARE = Rule("kvtune:hits:ratio", "kvtune:hits:rate / (sum(rate(kvtune_turns_total[5m])) > 0)")


def test_without_prometheus_a_rule_is_answered_by_what_it_reads() -> None:
    assert missing("kvtune:hits:ratio > 0.5", Deployment({"kvtune_turns_total": TURNS}), HITS, SHARE) == set()
    assert missing("kvtune:hits:ratio > 0.5", Deployment({}), HITS, SHARE) == {("kvtune_turns_total", "absent")}
    assert missing("kvtune:gone:ratio", Deployment({}), HITS) == {("kvtune:gone:ratio", "absent")}


def test_with_prometheus_a_rule_must_be_loaded() -> None:
    rows = {"kvtune_turns_total": [{**row, "job": "r"} for row in TURNS]}
    asked = "kvtune:hits:ratio > 0.5"
    own = {"A"}
    loaded = frozenset({"kvtune:hits:rate", "kvtune:hits:ratio", *own})
    assert missing(asked, Deployment(rows, stored=True, loaded=loaded), HITS, SHARE) == set(), "idle, yet answered"
    half = Deployment(rows, stored=True, loaded=frozenset({"kvtune:hits:ratio", *own}))
    assert missing(asked, half, HITS, SHARE) == {("kvtune:hits:rate", "not_loaded")}
    none = Deployment(rows, stored=True, loaded=frozenset(own))
    assert missing(asked, none, HITS, SHARE) == {("kvtune:hits:ratio", "not_loaded")}
    unknown = Deployment(rows, stored=True)
    assert missing(asked, unknown, HITS, SHARE) == {("kvtune:hits:ratio", "not_loaded")}
    there = Deployment({**rows, "kvtune:hits:ratio": [{"job": "r"}]}, stored=True)
    assert missing(asked, there, HITS, SHARE) == set(), "its result is there, whoever computes it"
    idle = Deployment({}, stored=True, loaded=loaded)
    assert missing(asked, idle, HITS, SHARE) == {("kvtune_turns_total", "absent")}


def test_an_alert_that_is_not_loaded_is_not_answered() -> None:
    live = Deployment(
        {"kvtune_turns_total": [{**row, "job": "r"} for row in TURNS]}, stored=True, loaded=frozenset({"A"})
    )
    found = check(live, [], [], [Rule("A", "kvtune_turns_total"), Rule("B", "kvtune_turns_total")], [])
    assert [(item.name, [gap.why for gap in item.gaps]) for item in found] == [("A", []), ("B", ["not_loaded"])]


def test_rules_that_read_each_other_in_a_circle_end() -> None:
    first, second = Rule("kvtune:a", "kvtune:b + gone"), Rule("kvtune:b", "kvtune:a")
    assert missing("kvtune:a", Deployment({}), first, second) == {("gone", "absent")}


# --- what is asked --------------------------------------------------------------------------------------------------


def board(**more: Any) -> dict[str, Any]:
    return {"title": "T", "uid": "t", "panels": [], **more}


def test_variables_annotations_and_panels_ask_also_in_collapsed_rows() -> None:
    asking = board(
        templating={
            "list": [
                {"name": "job", "type": "query", "query": {"query": "label_values(a, job)"}},
                {"name": "model", "type": "query", "query": 'label_values(a{x="1"}, model_name)'},
                {"name": "q", "type": "query", "query": "query_result(sum(a))"},
                {"name": "datasource", "type": "datasource", "query": "prometheus"},
            ]
        },
        annotations={"list": [{"name": "built in"}, {"name": "Restarts", "expr": "b"}]},
        panels=[
            {"title": "Row", "type": "row", "panels": [{"title": "In", "targets": [{"expr": "c"}, {"refId": "B"}]}]},
            {"title": "Text", "type": "text"},
            {"title": "Two", "targets": [{"expr": "d"}, {"expr": "e"}]},
        ],
    )
    assert list(questions(asking)) == [
        ("variable", "job", 'count by (job) (a{job!=""})'),
        ("variable", "model", 'count by (model_name) (a{x="1",model_name!=""})'),
        ("variable", "q", "sum(a)"),
        ("annotation", "Restarts", "b"),
        ("panel", "In", "c"),
        ("panel", "Two", "d"),
        ("panel", "Two", "e"),
    ]
    found = check(Deployment({"a": [{"x": "1", "model_name": "m"}], "d": [{}]}), [asking], [], [], [])
    assert {item.name: [gap.series for gap in item.gaps] for item in found} == {
        "job": [], "model": [], "q": [], "Restarts": ["b"], "In": ["c"], "Two": ["e"],
    }  # fmt: skip


def test_a_variable_wants_its_label() -> None:
    asking = board(templating={"list": [{"name": "m", "type": "query", "query": "label_values(a, model_name)"}]})
    (item,) = check(Deployment({"a": [{}]}), [asking], [], [], [])
    assert item.gaps == (Gap("a", "label", "without the label model_name"),)


def test_all_that_is_asked_for_is_listed_once() -> None:
    asking = board(panels=[{"title": "P", "targets": [{"expr": "a + a"}]}])
    found = asked_for([asking], [Rule("r", "b")], [Rule("A", "a")], ["c"])
    assert [need.names for need in found] == [("a",), ("b",), ("r",), ("c",)]


def test_the_emitters_are_told_apart() -> None:
    assert [
        emitter_of(name)
        for name in ("kvtune_turns_total", "kvtune_kv_read_seconds_bucket", "kvtune_suggest_up", "vllm:x", "up",
                     "process_start_time_seconds", "kvtune:a:b", "node_load1")
    ] == ["router", "connector", "suggest", "vllm", "prometheus", "process", "rules", "other"]  # fmt: skip


def full() -> dict[str, list[dict[str, str]]]:
    """Label sets of everything the catalogue declares, and one of each other series that is asked for."""
    live: dict[str, list[dict[str, str]]] = {}
    for metric in CATALOGUE:
        for role in ("prefill", "decode"):
            for values in metric.combinations or [()]:
                row = {label: "x" for label in metric.label_names()} | {"role": role, "le": "60.0"}
                rows = [row | dict(zip((label.name for label in metric.labels), values, strict=False))]
                if not values:
                    for label in metric.labels:
                        if label.values:
                            rows = [one | {label.name: value} for one in rows for value in label.values]
                for sample in metric.sample_names():
                    live.setdefault(sample, []).extend(rows)
    return live


def test_the_boards_and_rules_of_kvtune_ask_for_nothing_else() -> None:
    boards = [make() for make in BOARDS.values()]
    rules = [Rule(rule.name, rule.expr, rule.labels) for rule in RECORDING_RULES]
    live = full()
    for need in asked_for(boards, rules, [], []):
        for name in need.names:
            if emitter_of(name) in ("vllm", "process"):
                live[name] = [{"model_name": "m", "engine": "0", "le": "1", "reason": "capacity"}]
    items = check(Deployment(live), boards, rules, [], [])
    assert {item.kind for item in items} == {"variable", "annotation", "panel", "recording rule"}
    # Buckets are looked for by their bound, and this deployment has but one.
    assert {gap.detail.partition("=")[0] for item in items for gap in item.gaps} <= {"none with le"}


# --- the document ---------------------------------------------------------------------------------------------------


def test_the_document_counts_groups_and_says_what_to_do() -> None:
    panels = [{"title": "P", "targets": [{"expr": "kvtune_turns_total"}]},
              {"title": "Q", "targets": [{"expr": "vllm:x + kvtune_references"}]}]  # fmt: skip
    live = Deployment({"kvtune_turns_total": TURNS})
    items = check(live, [board(panels=panels)], [], [Rule("A", "vllm:x")], ["kvtune_turns_total"])
    made = document(items, live, {"metrics": ["http://r"], "prometheus": None})
    assert made["schema"] == "kvtune.check/1" and made["answered"] is False
    assert made["summary"] == {
        "panel": {"asked": 2, "answered": 1},
        "alert": {"asked": 1, "answered": 0},
        "suggest": {"asked": 1, "answered": 1},
    }
    assert made["dashboards"] == {"T": {"asked": 2, "answered": 1}}
    router, vllm = made["missing"]
    assert router["emitter"] == "router" and [gap["series"] for gap in router["missing"]] == ["kvtune_references"]
    assert "lacks these" in router["advice"]
    assert vllm["missing"] == [
        {"series": "vllm:x", "emitter": "vllm", "why": "absent", "detail": "", "used_by": ["T: Q", "alert A"]}
    ]
    assert made["items"][0] == {"kind": "panel", "dashboard": "T", "name": "P", "answered": True, "missing": []}
    assert document([Item("panel", "T", "P", ())], live, {})["answered"] is True


@pytest.mark.parametrize(
    ("emitter", "live", "gaps", "told"),
    [
        ("router", {}, ["kvtune_turns_total"], "port (9400"),
        ("router", {"kvtune_references": [{}]}, ["kvtune_turns_total"], "see its version"),
        ("connector", {}, ["kvtune_retained_tokens"], "/metrics of every prefill and decode engine"),
        ("connector", {"vllm:x": [{}]}, ["kvtune_retained_tokens"], "without kvtune's connector"),
        ("connector", {"kvtune_retained_tokens": [ENGINE]}, ["kvtune_decisions_total"], "No prefill engine"),
        ("connector", {"kvtune_retained_tokens": [ENGINE, {**ENGINE, "role": "prefill"}]}, ["x"], "see its version"),
        ("suggest", {}, ["kvtune_suggest_up"], "--watch"),
        ("vllm", {}, ["vllm:x"], "No series of vLLM"),
        ("vllm", {"vllm:y": [{}]}, ["vllm:nixl_a", "vllm:nixl_b"], "NIXL"),
        ("vllm", {"vllm:y": [{}]}, ["vllm:nixl_a", "vllm:x"], "does not expose these"),
        ("process", {}, ["process_x"], "process_*"),
        ("rules", {}, ["kvtune:a"], "kvtune rules render"),
        ("prometheus", {}, ["up"], "scrape_configs"),
        ("other", {}, ["x"], "Nothing of kvtune"),
    ],
)
def test_what_to_do_depends_on_what_is_there(
    emitter: str, live: dict[str, list[dict[str, str]]], gaps: list[str], told: str
) -> None:
    found = [Gap(name, "absent") for name in gaps]
    assert told in advice(emitter, Deployment(live), found)


def test_where_to_add_targets_depends_on_what_was_asked() -> None:
    gap = [Gap("kvtune_turns_total", "absent")]
    assert "add --metrics of its" in advice("router", Deployment({}), gap)
    assert "have Prometheus scrape its" in advice("router", Deployment({}, stored=True), gap)
