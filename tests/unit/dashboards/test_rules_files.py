from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtune_dashboards import alerts_page, rules
from kvtune_dashboards.alerts import alerts
from kvtune_dashboards.config import RulesConfig, config_from
from kvtune_dashboards.recording import RECORDING_RULES, RecordingRule

ROOT = Path(__file__).resolve().parents[3]
COMMITTED = ROOT / "dashboards" / "prometheus"
CONFIG = RulesConfig()


def test_what_is_committed_is_what_is_rendered() -> None:
    tests = rules.render_tests()
    assert rules.drift(rules.render(CONFIG) | tests, COMMITTED) == []
    assert rules.left_over(tests, COMMITTED) == []


def test_the_rules_are_well() -> None:
    assert rules.lint(CONFIG) == []
    assert rules.lint(config_from({"deployment_labels": ["cluster", "namespace"]})) == []


def test_rendering_twice_gives_the_same() -> None:
    assert rules.render(CONFIG) == rules.render(RulesConfig())


def test_the_files_hold_all_rules_and_alerts() -> None:
    files = rules.render(CONFIG)
    assert list(files) == [rules.RECORDING_FILE, rules.ALERTS_FILE, rules.SCRAPE_FILE, rules.CRD_FILE]
    recording = yaml.safe_load(files[rules.RECORDING_FILE])["groups"]
    assert [rule["expr"] for group in recording for rule in group["rules"]] == [r.expr for r in RECORDING_RULES]
    assert [(group["name"], group["interval"]) for group in recording][-1] == ("kvtune-retention-other-ttl", "2m")
    (alerting,) = yaml.safe_load(files[rules.ALERTS_FILE])["groups"]
    found = alerts(CONFIG)
    assert [rule["alert"] for rule in alerting["rules"]] == [alert.name for alert in found]
    burn = next(rule for rule in alerting["rules"] if rule["alert"] == "KvtuneTTFTBurnRate")
    assert burn["labels"] == {"severity": "critical", "long": "1h", "short": "5m"}
    assert burn["for"] == "2m"
    assert "for" not in alerting["rules"][0]


def test_the_custom_resource_holds_the_same_groups() -> None:
    files = rules.render(CONFIG)
    resource = yaml.safe_load(files[rules.CRD_FILE])
    assert (resource["apiVersion"], resource["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    plain = [yaml.safe_load(files[name])["groups"] for name in (rules.RECORDING_FILE, rules.ALERTS_FILE)]
    assert resource["spec"]["groups"] == plain[0] + plain[1]


@pytest.mark.parametrize(
    ("format", "names"),
    [
        ("prometheus", {rules.RECORDING_FILE, rules.ALERTS_FILE, rules.SCRAPE_FILE}),
        ("crd", {rules.CRD_FILE}),
    ],
)
def test_one_format_alone(format: Any, names: set[str]) -> None:
    assert set(rules.render(CONFIG, format)) == names


def test_the_scrape_example_scrapes_as_the_windows_expect() -> None:
    text = rules.scrape_example(config_from({"windows": {"scrape": "30s"}}))
    assert yaml.safe_load(text)["global"] == {"scrape_interval": "30s", "evaluation_interval": "30s"}


def test_drift_is_shown_line_by_line(tmp_path: Path) -> None:
    files = {"a.yaml": "one\ntwo\n", "b.yaml": "x\n", "c.yaml": "y\n"}
    (tmp_path / "a.yaml").write_text("one\nTWO\n")
    (tmp_path / "c.yaml").write_bytes(b"\xff")
    changed, missing, unread = rules.drift(files, tmp_path)
    assert str(changed) == f"{tmp_path}/a.yaml:2: has 'TWO', rendered is 'two'; run `kvtune rules render`"
    assert (missing.where, missing.message) == (str(tmp_path / "b.yaml"), "is missing; run `kvtune rules render`")
    assert "cannot be read" in unread.message
    (tmp_path / "a.yaml").write_text("one\n")
    assert "a.yaml:2: has nothing, rendered is 'two'" in str(rules.drift({"a.yaml": "one\ntwo\n"}, tmp_path)[0])


def test_tests_that_are_not_rendered_any_more(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "old.test.yaml").write_text("")
    (finding,) = rules.left_over({"tests/new.test.yaml": ""}, tmp_path)
    assert finding.where.endswith("old.test.yaml") and "delete it" in finding.message


RULE = RecordingRule("kvtune:x:rate", "sum by (job) (rate(kvtune_turns_total[5m]))", "g", "Help.", "1", {}, ("job",))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([{"name": "kvtune_x"}], "is not of the form kvtune:<what>:<operation>"),
        ([{"help": ""}], "has no help or no unit"),
        ([{}, {}], "is recorded twice with the same labels"),
        ([{}, {"keeps": ("role",)}], "has different labels in different rules"),
        ([{"expr": "sum by (job) (rate(kvtune_turn_total[5m]))"}], "`kvtune_turn_total` is in neither"),
        ([{"expr": "sum by (job) (rate(kvtune_turns_total[20s]))"}], r"[20s] holds less than two scrapes (15s)"),
        ([{"expr": "sum by (role) (rate(kvtune_turns_total[5m]))"}], "sum by (role)"),
        ([{"expr": "sum(kvtune_turns_total)"}], "outside rate() or increase()"),
        ([{"expr": "sum(rate(kvtune_turns_total[5m])) / sum(rate(kvtune_turns_total[5m]))"}], "NaN when idle"),
        ([{"expr": "sum(("}], "does not parse"),
    ],
)
def test_a_bad_recording_rule_is_found(
    monkeypatch: pytest.MonkeyPatch, changes: list[dict[str, Any]], said: str
) -> None:
    monkeypatch.setattr(rules, "recording_rules", lambda _: tuple(replace(RULE, **change) for change in changes))
    monkeypatch.setattr(rules, "alerts", lambda _: ())
    assert said in "\n".join(map(str, rules.lint(CONFIG)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": "TooSlow"}, "its name does not begin with Kvtune"),
        ({"summary": "{{ $value }} turns"}, "its summary holds a template"),
        ({"description": ""}, "its description is empty"),
        ({"description": "{{ $value"}, "has a template that is not closed"),
        ({"labels": {"value": "{{ $value }}"}}, "a label holds a template"),
        ({"expr": "kvtune:turns:rat > 1"}, "`kvtune:turns:rat` is in neither"),
        ({"expr": 'kvtune:turns:rate{role="decode"} > 1'}, "has no label `role`"),
    ],
)
def test_a_bad_alert_is_found(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], said: str) -> None:
    good = alerts(CONFIG)[0]
    monkeypatch.setattr(rules, "alerts", lambda _: (replace(good, **change),))
    assert said in "\n".join(map(str, rules.lint(CONFIG)))
    monkeypatch.setattr(rules, "alerts", lambda _: (good, good))
    assert "is there twice with the same labels" in "\n".join(map(str, rules.lint(CONFIG)))


def test_promtool_is_asked_where_there_is_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A stand-in for promtool: what it says of a file becomes a finding."""
    program = tmp_path / "bin" / "promtool"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\ncase "$5" in *alerts*) echo Checking; echo "  FAILED: bad"; exit 1;; esac\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    files = {rules.RECORDING_FILE: "groups: []\n", rules.ALERTS_FILE: "groups: []\n"}
    found = rules.promtool_findings(files, tmp_path)
    assert [str(one) for one in found or ()] == [f"{rules.ALERTS_FILE}: promtool: FAILED: bad"]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert rules.promtool_findings(files, tmp_path) is None


# --- docs/alerts.md -------------------------------------------------------------------------------------------------

PAGE = (ROOT / "docs" / "alerts.md").read_text(encoding="utf-8")


def test_the_page_shows_the_rules_as_they_are() -> None:
    assert alerts_page.page(PAGE, CONFIG) == PAGE, "run python -m kvtune_dashboards.alerts_page docs/alerts.md"


def test_a_page_that_is_behind_is_brought_up_to_date(tmp_path: Path) -> None:
    file = tmp_path / "alerts.md"
    file.write_text(PAGE.replace("| warning | 30m |", "| warning | 3m |"))
    assert alerts_page.page(file.read_text(), CONFIG) != file.read_text()
    alerts_page.main(str(file))
    assert file.read_text() == PAGE


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="has no marks `<!-- settings -->`"):
        alerts_page.page(PAGE.replace("<!-- settings -->", ""), CONFIG)


def test_the_tables_hold_everything() -> None:
    table = alerts_page.alerts_table(CONFIG)
    for alert in alerts(CONFIG):
        assert table.count(f"[{alert.name}](../dashboards/runbooks/{alert.name}.md)") == 1
    assert "| critical, warning | 2m, 15m, 1h, 3h |" in table
    recorded = alerts_page.recording_table(CONFIG)
    for name in {rule.name for rule in RECORDING_RULES}:
        assert recorded.count(f"| `{name}` |") == 1
    assert "| `alerts.expired_ratio` | 0.05 |" in alerts_page.settings_table(CONFIG)


def test_the_example_configuration_of_the_page_works() -> None:
    example = next(block for block in alerts_page.blocks(PAGE, "yaml") if "ttft_slo" in block)
    found = config_from(yaml.safe_load(example))
    assert found.ttft_slo.bound == 1.64
    assert rules.lint(found) == []
