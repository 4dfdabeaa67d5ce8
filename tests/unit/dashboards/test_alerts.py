from __future__ import annotations

import re

import promql_parser
import pytest

from kvtune_dashboards.alerts import Alert, alerts, names
from kvtune_dashboards.config import RulesConfig, config_from
from kvtune_dashboards.layout import panel_id
from kvtune_dashboards.rendering import boards

ALERTS = alerts(RulesConfig())
WANTED = {
    "KvtuneLateReadOfFreedKV": "critical",
    "KvtuneReuseGuardBypassed": "critical",
    "KvtuneExpiredReadsHigh": "warning",
    "KvtuneRetainedKVCrowdsPool": "warning",
    "KvtuneFetchSlowerThanRecompute": "warning",
    "KvtuneRecomputeWhereFetchIsFaster": "info",
    "KvtuneReuseCollapsed": "warning",
    "KvtuneNothingReused": "warning",
    "KvtuneRouterTTLNotBelowEngine": "warning",
    "KvtuneSettingsDiffer": "warning",
    "KvtuneTransfersFailing": "warning",
    "KvtuneTransferSlow": "warning",
    "KvtuneEngineRestartsLoseReferences": "warning",
    "KvtuneTTFTBurnRate": "critical",
    "KvtuneExporterAbsent": "warning",
    "KvtuneDeferredRequestsStuck": "critical",
    "KvtuneRecordingRulesAbsent": "warning",
}


def one(name: str, found: tuple[Alert, ...] = ALERTS) -> Alert:
    return next(alert for alert in found if alert.name == name)


def test_all_alerts_and_how_grave_they_are() -> None:
    assert {name: one(name).severity for name in names(ALERTS)} == WANTED
    assert len(ALERTS) == 23


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name + "-" + "-".join(alert.labels.values()))
def test_each_alert_is_whole(alert: Alert) -> None:
    promql_parser.parse(alert.expr)
    said = alert.annotations(RulesConfig())
    assert list(said) == ["summary", "description", "runbook_url", "dashboard_url"]
    assert all(said.values())
    assert not re.search(r"\{\{|\d", alert.summary)
    assert said["runbook_url"] == f"https://kvtune.example/runbooks/{alert.name}.md"
    titles = {
        inner["title"]: inner["id"]
        for board in boards()
        if board["uid"] == alert.board
        for panel in board["panels"]
        for inner in (panel, *panel.get("panels", ()))
    }
    assert f"viewPanel={titles[alert.panel]}" in said["dashboard_url"]
    assert panel_id(alert.panel) == titles[alert.panel]
    assert alert.value and alert.floor


def test_a_link_to_a_board_chooses_the_job() -> None:
    url = one("KvtuneExpiredReadsHigh").annotations(RulesConfig())["dashboard_url"]
    assert url.startswith("https://grafana.example/d/kvtune-reuse?viewPanel=")
    assert url.endswith("&var-job={{ $labels.job }}")
    config = config_from({"links": {"dashboards": "https://g/d/{uid}?orgId=2", "runbooks": "https://r/{alert}"}})
    said = one("KvtuneSettingsDiffer", alerts(config)).annotations(config)
    assert said["dashboard_url"].startswith("https://g/d/kvtune-fleet?orgId=2&viewPanel=")
    assert "var-job" not in said["dashboard_url"]
    assert said["runbook_url"] == "https://r/KvtuneSettingsDiffer"


def test_burn_rates_are_the_factor_times_the_budget() -> None:
    burning = [alert for alert in ALERTS if alert.name == "KvtuneTTFTBurnRate"]
    assert [(a.labels["long"], a.labels["short"], a.severity, a.hold) for a in burning] == [
        ("1h", "5m", "critical", 120), ("6h", "30m", "critical", 900), ("1d", "2h", "warning", 3600),
        ("3d", "6h", "warning", 10800),
    ]  # fmt: skip
    for alert, limit in zip(burning, ("0.72", "0.3", "0.15", "0.05"), strict=True):
        assert alert.expr.count(f"}}) > {limit} and") == 2


def test_shares_are_judged_above_a_floor_only() -> None:
    config = config_from({"alerts": {"turns_floor": 0.125, "reads_floor": 0.25, "skipped_floor": 77}})
    found = alerts(config)
    for name in ("KvtuneExpiredReadsHigh", "KvtuneReuseCollapsed", "KvtuneNothingReused"):
        assert "kvtune:followup_turns:rate > 0.125" in one(name, found).expr
    for name in ("KvtuneTransfersFailing", "KvtuneTransferSlow", "KvtuneFetchSlowerThanRecompute"):
        assert "> 0.25" in one(name, found).expr
    assert "> 77" in one("KvtuneRecomputeWhereFetchIsFaster", found).expr


def test_thresholds_and_times_come_from_the_configuration() -> None:
    config = config_from(
        {"alerts": {"expired_ratio": 0.17, "expired_for": "11m", "slow_factor": 0.21, "collapsed_factor": 0.6}}
    )
    found = alerts(config)
    assert one("KvtuneExpiredReadsHigh", found).hold == 660
    assert "kvtune:followup_turns_expired:ratio > 0.17" in one("KvtuneExpiredReadsHigh", found).expr
    assert "< 0.21" in one("KvtuneTransferSlow", found).expr
    assert "* 0.6" in one("KvtuneReuseCollapsed", found).expr
    assert "less than 60%" in one("KvtuneReuseCollapsed", found).description


def test_advice_is_the_value_and_stands_in_the_text() -> None:
    for name, unit in (
        ("KvtuneExpiredReadsHigh", " s"), ("KvtuneRetainedKVCrowdsPool", " s"),
        ("KvtuneFetchSlowerThanRecompute", " tokens"), ("KvtuneRecomputeWhereFetchIsFaster", " tokens"),
    ):  # fmt: skip
        assert f'{{{{ printf "%.0f" $value }}}}{unit}' in one(name).description
        assert "to set" in one(name).value
    assert one("KvtuneExpiredReadsHigh").expr.startswith("(kvtune:ttl_seconds:advised_raise or ")
    assert one("KvtuneFetchSlowerThanRecompute").expr.startswith("kvtune:threshold_tokens:advised > ")


def test_deployments_are_matched_among_themselves() -> None:
    found = alerts(config_from({"deployment_labels": ["cluster"]}))
    assert " on (cluster) " in one("KvtuneRouterTTLNotBelowEngine", found).expr
    assert " on () " not in "".join(a.expr for a in found if a.name != "KvtuneRecordingRulesAbsent")
    assert "max by (setting, cluster)" in one("KvtuneSettingsDiffer", found).expr


def test_a_text_asks_about_its_own_deployment() -> None:
    found = alerts(config_from({"deployment_labels": ["cluster"]}))
    text = one("KvtuneExpiredReadsHigh", found).description
    ratio = "kvtune:followup_turns_expired:ratio{job='%s',cluster='%s'}"
    assert f'{{{{ with printf "{ratio}" $labels.job $labels.cluster | query }}}}' in text
    text = one("KvtuneFetchSlowerThanRecompute", found).description
    in_force = "kvtune:threshold_tokens:in_force{job='%s',model_name='%s',cluster='%s'}"
    assert f'{{{{ with printf "{in_force}" $labels.job $labels.model_name $labels.cluster | query }}}}' in text


def test_no_exporter_is_missed_for_one_lost_scrape() -> None:
    for alert in ALERTS:
        if alert.name == "KvtuneExporterAbsent":
            assert alert.hold >= 2 * RulesConfig().windows.scrape
    assert {a.labels["part"] for a in ALERTS if a.name == "KvtuneExporterAbsent"} == {
        "router", "prefill", "decode", "target",
    }  # fmt: skip
