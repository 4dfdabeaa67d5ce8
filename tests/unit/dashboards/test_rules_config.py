from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtune_dashboards.config import (
    Burn,
    ConfigError,
    RulesConfig,
    TtftSlo,
    config_from,
    duration,
    load_config,
    parse_duration,
    settings,
)
from kvtune_telemetry.buckets import TTFT_SECONDS


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (0.25, "250ms"), (90, "1m30s"), (3600, "1h"), (90000, "1d1h"), (5880, "1h38m")]
)
def test_durations_are_written_as_prometheus_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text
    assert parse_duration(text, "x") == seconds


@pytest.mark.parametrize("text", [30, "30", "5 m", "m", "", None, "-5m", "1h 30m"])
def test_a_duration_without_a_unit_is_refused(text: object) -> None:
    with pytest.raises(ConfigError, match=r"windows\.rate: .* is no duration"):
        parse_duration(text, "windows.rate")


def test_a_file_changes_what_it_names(tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text("windows: {scrape: 30s}\nalerts: {expired_ratio: 0.1}\ndeployment_labels: [cluster]\n")
    found = load_config(file)
    assert (found.windows.scrape, found.alerts.expired_ratio, found.deployment_labels) == (30.0, 0.1, ("cluster",))
    assert found.windows.rate == RulesConfig().windows.rate


def test_defaults_written_out_are_the_defaults() -> None:
    nested: dict[str, Any] = {}
    for key, default, why in settings():
        assert why.endswith("."), key
        *path, last = key.split(".")
        inside = nested
        for part in path:
            inside = inside.setdefault(part, {})
        inside[last] = default
    assert config_from(yaml.safe_load(yaml.safe_dump(nested))) == RulesConfig()


BURN = {"severity": "critical", "long": "1h", "short": "5m", "factor": 14.4, "for": "2m"}


def burns(*changes: dict[str, Any]) -> dict[str, Any]:
    return {"ttft_slo": {"burns": [{**BURN, **change} for change in changes]}}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        # A share of slow turns cannot be above 1.
        (burns({"factor": 20}), r"over 1h can never fire: factor 20 times the 0.05 .* use a factor below 20 or"),
        ({"ttft_slo": {"target": 0.9}}, r"factor 14.4 .* is 1.44, and no more than all turns can be slow"),
        (burns({"factor": float("nan")}), "it must be above 0"),
        (burns({"factor": float("inf")}), "can never fire"),
        (burns({"factor": 0}), "it must be above 0"),
        (burns({"short": "1h"}), "short window that is not shorter"),
        (burns({"short": "20s"}), "short window: 20s holds less than two scrapes"),
        (burns({}, {}), "is there twice as critical"),
        (burns({"severity": "page"}), r"burns\[0\].severity: 'page' is none of critical, warning, info"),
        (burns({"factor": "x"}), r"burns\[0\].factor: expected a number"),
        ({"ttft_slo": {"burns": [{"long": "1h"}]}}, r"burns\[0\]: expected exactly severity, long, short"),
        ({"ttft_slo": {"burns": []}}, "expected a list of burn rates"),
        ({"ttft_slo": {"bound": "2s"}}, "2 s is no edge of the TTFT histogram; the nearest are 1970ms and 2360ms"),
        ({"ttft_slo": {"turns": "second"}}, "'second' is none of all, first, followup"),
        ({"ttft_slo": {"target": 1}}, r"ttft_slo.target: 1 is out of range; it must be between 0.5 and 0.99999"),
        ({"alerts": {"expired_ratio": 1.5}}, r"alerts.expired_ratio: 1.5 is out of range"),
        ({"alerts": {"expired_ratio": float("nan")}}, "out of range"),
        ({"alerts": {"turns_floor": float("inf")}}, "can never be reached"),
        ({"alerts": {"expired_ratio": True}}, "expected a number"),
        ({"alerts": {"expired_ratio": 0.01}}, "the alert fires again at the TTL that it advised"),
        ({"alerts": {"retained_share": 0.3}}, "the alert fires again at the TTL that it advised"),
        ({"alerts": {"absent_for": "20s"}}, "less than two scrapes"),
        ({"alerts": {"guard_window": "20s"}}, "alerts.guard_window: 20s holds less than two scrapes"),
        ({"windows": {"rate": "20s"}}, "windows.rate: 20s holds less than two scrapes"),
        ({"windows": {"scrape": "0s"}}, "windows.scrape: 0s is out of range; it must be between 100ms and 5m"),
        ({"windows": {"slow_evaluation": "6m"}}, "out of range"),
        ({"windows": 5}, "windows: expected settings by name, found 5"),
        ({"alerts": {"expird_ratio": 0.1}}, "did you mean `expired_ratio`"),
        ({"alerts": {"bound": "1s"}}, "it belongs under `ttft_slo`"),
        ({"deployment_labels": ["job"]}, "job is on every series already"),
        ({"deployment_labels": "cluster"}, "expected a list of label names"),
        ({"links": {"runbooks": "https://a/"}}, "links.runbooks: it must hold {alert}"),
        ({"links": {"dashboards": "https://a/"}}, "links.dashboards: it must hold {uid}"),
        ({"links": {"runbooks": ""}}, "expected text"),
        ([], "the file: expected settings by name"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_with_the_reason(data: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config_from(data)


def test_also_when_made_in_code() -> None:
    with pytest.raises(ConfigError, match="can never fire"):
        RulesConfig(ttft_slo=TtftSlo(burns=(Burn("critical", 3600, 300, 21, 0),)))


def test_every_edge_is_a_bound() -> None:
    for edge in TTFT_SECONDS:
        assert config_from({"ttft_slo": {"bound": f"{edge * 1000:g}ms"}}).ttft_slo.bound == edge


@pytest.mark.parametrize(
    ("text", "said"), [("a: [", "is no YAML"), ("alerts: {x: 1}", "alerts.x: there is no such setting")]
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=rf"rules\.yaml: {said}"):
        load_config(file)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_config(tmp_path / "none.yaml")


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text("# nothing\n")
    assert load_config(file) == RulesConfig()
