from __future__ import annotations

import re

import pytest

from kvtune_dashboards import scenarios
from kvtune_dashboards.alerts import alerts, names
from kvtune_dashboards.config import RulesConfig
from kvtune_dashboards.recording import RECORDING_RULES
from kvtune_telemetry.catalogue import BY_NAME

CONFIG = RulesConfig()
DOCUMENTS = scenarios.rule_tests(CONFIG, "all.yaml", "alerts.yaml", "fast.yaml")


def test_every_alert_has_a_fault() -> None:
    assert {case.alert for case in scenarios.cases()} == set(names(alerts(CONFIG)))


def test_every_part_of_an_alert_has_a_fault() -> None:
    parts = {labels["part"] for case in scenarios.cases() for labels in case.fires if "part" in labels}
    assert parts == {"router", "prefill", "decode", "target"}


def test_a_fault_is_asked_before_while_and_after() -> None:
    case = next(case for case in scenarios.cases() if case.alert == "KvtuneTransfersFailing")
    (test,) = DOCUMENTS["KvtuneTransfersFailing"]["tests"]
    before, during, after, value = test["promql_expr_test"]
    assert (before["eval_time"], before["exp_samples"]) == ("29m", [])
    assert during["eval_time"] == "59m"
    (sample,) = during["exp_samples"]
    assert sample["labels"] == (
        'ALERTS{alertname="KvtuneTransfersFailing",alertstate="firing",severity="warning",direction="d2p",'
        'job="kvtune-prefill",model_name="m"}'
    )
    assert (after["eval_time"], after["exp_samples"]) == ("104m", [])
    assert value["exp_samples"] == [{"labels": '{direction="d2p",job="kvtune-prefill",model_name="m"}', "value": 0.098}]
    assert case.lasts * 60 > next(a.hold for a in alerts(CONFIG) if a.name == case.alert)


@pytest.mark.parametrize("case", [*scenarios.cases()], ids=lambda case: f"{case.alert}: {case.what}")
def test_a_fault_lasts_longer_than_the_alert_waits(case: scenarios.Case) -> None:
    holds = [a.hold for a in alerts(CONFIG) if a.name == case.alert and a.severity == (case.severity or a.severity)]
    assert case.lasts * 60 > min(holds)
    assert case.fires


def test_quiet_times_are_asked_for_every_alert_and_rule() -> None:
    quiet = DOCUMENTS["quiet"]
    assert quiet["rule_files"] == ["all.yaml", "alerts.yaml"]
    healthy, idle, restarted, young = quiet["tests"]
    for test in (healthy, idle, restarted):
        silent = [ask for ask in test["promql_expr_test"] if ask["expr"] == 'ALERTS{alertstate="firing"}']
        assert len(silent) >= 3 and all(ask["exp_samples"] == [] for ask in silent)
    sampled = " ".join(ask["expr"] for ask in healthy["promql_expr_test"])
    assert all(f"{rule.name}{{" in sampled for rule in RECORDING_RULES)
    assert "young" in young["name"]


def test_a_test_holds_what_its_alert_reads_and_no_more() -> None:
    (test,) = DOCUMENTS["KvtuneTransfersFailing"]["tests"]
    held = {series["series"].partition("{")[0] for series in test["input_series"]}
    assert held == {"kvtune_kv_reads_failed_total", "kvtune_kv_reads_total"}
    assert DOCUMENTS["KvtuneTransfersFailing"]["rule_files"] == ["fast.yaml", "alerts.yaml"]
    assert DOCUMENTS["KvtuneExpiredReadsHigh"]["rule_files"] == ["all.yaml", "alerts.yaml"]


def test_needed_follows_recording_rules() -> None:
    found = scenarios.needed("kvtune:followup_turns_reused:ratio > 0", RECORDING_RULES)
    assert {"kvtune:turns:rate", "kvtune_turns_total", "kvtune:followup_turns:rate"} <= found
    assert "vllm:num_requests_waiting" not in found


def test_series_are_what_exporters_have() -> None:
    world = scenarios.healthy()
    for name, labels in (*world.rates, *world.gauges):
        if name.startswith("kvtune_"):
            family = next(m for m in BY_NAME.values() if name in m.sample_names())
            wanted = set(family.label_names()) | ({"le"} if name.endswith("_bucket") else set())
            assert {label for label, _ in labels} - {"job", "instance"} == wanted, name


def test_counters_go_on_from_where_they_were_and_begin_again_at_a_restart() -> None:
    world = scenarios.World()
    world.count("c", 3.0, ("job", "a"))
    faster = scenarios.World()
    faster.count("c", 5.0, ("job", "a"))
    (series,) = scenarios._series([(world, 10), (faster, 5)], 1)
    assert series == {"series": 'c{job="a"}', "values": "0+3x9 30+5x4"}
    (series,) = scenarios._series([(world, 10), (faster, 5)], 1, restart_at=1)
    assert series["values"] == "0+3x9 0+5x4"
    (series,) = scenarios._series([(scenarios.World(), 4), (world, 6)], 2)
    assert series["values"] == "_x2 0+6x2"


def test_gauges_that_are_gone_are_not_there() -> None:
    world, without = scenarios.World(), scenarios.World()
    world.show("g", 1, ("job", "a"))
    without.show("g", None, ("job", "a"))
    (series,) = scenarios._series([(world, 2), (without, 3), (world, 1)], 1)
    assert series["values"] == "1x1 _x3 1x0"


def test_the_other_spelling_of_vllm() -> None:
    renamed = scenarios._renamed(scenarios.healthy())
    names_of = {name for name, _ in (*renamed.rates, *renamed.gauges)}
    assert "vllm_num_requests_waiting" in names_of
    assert not any(":" in name for name in names_of)
    texts = "".join(s["series"] for d in DOCUMENTS.values() for t in d["tests"] for s in t["input_series"])
    assert "vllm_num_requests_waiting{" in texts and "vllm:num_requests_waiting{" in texts


def test_an_edit_that_changes_nothing_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="kvtune_nothing"):
        scenarios.edited(scenarios._set("kvtune_nothing", 1))
    with pytest.raises(AssertionError):
        scenarios.edited(scenarios._grow("kvtune_turns_total", 1, outcome="won"))


def test_idle_nothing_grows() -> None:
    assert set(scenarios.still().rates.values()) == {0.0}
    assert re.search("nobody uses it", DOCUMENTS["quiet"]["tests"][1]["name"])
