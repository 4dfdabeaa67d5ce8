"""Renders rules and alerts as files for Prometheus and for its operator, and finds what is wrong with them.

Rendering is pure: the same configuration gives the same bytes, so that a committed file that differs has drifted.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any, Literal

import yaml

from kvtune_dashboards.alerts import Alert, alerts
from kvtune_dashboards.config import RulesConfig, duration, parse_duration
from kvtune_dashboards.promql import OTHER_SERIES
from kvtune_dashboards.recording import OTHER_TTLS, RecordingRule, interval_of, recording_rules
from kvtune_dashboards.semantics import Series, catalogue_series, examine

Format = Literal["prometheus", "crd", "both"]
RECORDING_FILE = "kvtune-recording.yaml"
ALERTS_FILE = "kvtune-alerts.yaml"
CRD_FILE = "kvtune-prometheusrule.yaml"
SCRAPE_FILE = "kvtune-scrape-example.yaml"
TESTS = "tests"
"""Directory of the tests for promtool, in that of the rules."""
FAST_FILE = f"{TESTS}/kvtune-recording-fast.yaml"
_MADE = "# Made by `kvtune rules render`; change the configuration, not this file.\n"
_RANGE = re.compile(r"\[([0-9a-z]+)\]")


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong, and where."""

    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


class _Dumper(yaml.SafeDumper):
    """Writes expressions as they are, not folded, and no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _dump(document: Any) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=10**6, allow_unicode=True)


def recording_groups(config: RulesConfig) -> list[dict[str, Any]]:
    """Groups of recording rules as Prometheus reads them."""
    found = []
    for group, rules in groupby(recording_rules(config), key=lambda rule: rule.group):
        rows: list[dict[str, Any]] = []
        for rule in rules:
            row: dict[str, Any] = {"record": rule.name, "expr": rule.expr}
            if rule.labels:
                row["labels"] = dict(rule.labels)
            rows.append(row)
        found.append({"name": group, "interval": duration(interval_of(group, config)), "rules": rows})
    return found


def alert_groups(config: RulesConfig) -> list[dict[str, Any]]:
    """The group of alerts as Prometheus reads it."""
    rows = []
    for alert in alerts(config):
        row: dict[str, Any] = {"alert": alert.name, "expr": alert.expr}
        if alert.hold:
            row["for"] = duration(alert.hold)
        row["labels"] = {"severity": alert.severity, **alert.labels}
        row["annotations"] = alert.annotations(config)
        rows.append(row)
    return [{"name": "kvtune-alerts", "interval": duration(config.windows.evaluation), "rules": rows}]


def prometheus_rule(config: RulesConfig) -> dict[str, Any]:
    """The same groups as a PrometheusRule of the Prometheus operator."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "kvtune", "labels": {"app.kubernetes.io/name": "kvtune", "role": "alert-rules"}},
        "spec": {"groups": recording_groups(config) + alert_groups(config)},
    }


def scrape_example(config: RulesConfig) -> str:
    """A scrape configuration that gives the labels the rules expect."""
    every = duration(config.windows.scrape)
    document = {
        "global": {"scrape_interval": every, "evaluation_interval": duration(config.windows.evaluation)},
        "rule_files": [RECORDING_FILE, ALERTS_FILE],
        "scrape_configs": [
            {"job_name": "kvtune-router", "static_configs": [{"targets": ["router:9400"]}]},
            {"job_name": "kvtune-prefill", "static_configs": [{"targets": ["prefill-0:8100"]}]},
            {"job_name": "kvtune-decode", "static_configs": [{"targets": ["decode-0:8200"]}]},
        ],
    }
    said = (
        "# An example: one job a role, each target once. The interval is windows.scrape of the rules' configuration.\n"
        "# Engines may share a job; the connector's own label `role` tells them apart. Deployments that share this\n"
        "# server need a label of their own (`labels:` beside `targets:`), named in deployment_labels.\n"
    )
    return _MADE + said + _dump(document)


def render(config: RulesConfig, format: Format = "both") -> dict[str, str]:
    """Text of each file, by name."""
    files = {}
    if format in ("prometheus", "both"):
        files[RECORDING_FILE] = _MADE + _dump({"groups": recording_groups(config)})
        files[ALERTS_FILE] = _MADE + _dump({"groups": alert_groups(config)})
        files[SCRAPE_FILE] = scrape_example(config)
    if format in ("crd", "both"):
        files[CRD_FILE] = _MADE + _dump(prometheus_rule(config))
    return files


def render_tests() -> dict[str, str]:
    """Tests of the rules for `promtool test rules`, by name; for the default configuration only."""
    from kvtune_dashboards.scenarios import rule_tests

    config = RulesConfig()
    fast = [group for group in recording_groups(config) if group["name"] != OTHER_TTLS]
    files = {FAST_FILE: f"{_MADE}# {RECORDING_FILE} without the group that takes longest.\n" + _dump({"groups": fast})}
    documents = rule_tests(config, f"../{RECORDING_FILE}", f"../{ALERTS_FILE}", Path(FAST_FILE).name)
    for name, document in documents.items():
        files[f"{TESTS}/{name}.test.yaml"] = _MADE + _dump(document)
    return files


def drift(files: Mapping[str, str], directory: Path) -> list[Finding]:
    """Which files in `directory` are not what `files` says, and the first line that differs."""
    found = []
    for name, wanted in files.items():
        path = directory / name
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            found.append(Finding(str(path), "is missing; run `kvtune rules render`"))
            continue
        except (OSError, UnicodeDecodeError) as error:
            found.append(Finding(str(path), f"cannot be read: {error}"))
            continue
        if text != wanted:
            found.append(_first_difference(path, text, wanted))
    return found


def left_over(tests: Mapping[str, str], directory: Path) -> list[Finding]:
    """Files beside the tests that are not rendered any more, and would be run all the same."""
    return [
        Finding(str(path), "is not rendered any more; delete it")
        for path in sorted((directory / TESTS).iterdir())
        if f"{TESTS}/{path.name}" not in tests
    ]


def _first_difference(path: Path, text: str, wanted: str) -> Finding:
    pairs = zip_longest(text.splitlines(keepends=True), wanted.splitlines(keepends=True))
    number, (has, should) = next((n, pair) for n, pair in enumerate(pairs, 1) if pair[0] != pair[1])

    def shown(line: str | None) -> str:
        if line is None:
            return "nothing"
        text = repr(line.rstrip("\n") if line.strip() else line)
        return text if len(text) <= 160 else text[:157] + "..."

    return Finding(f"{path}:{number}", f"has {shown(has)}, rendered is {shown(should)}; run `kvtune rules render`")


def lint(config: RulesConfig) -> list[Finding]:
    """What is wrong with rules and alerts themselves, whatever is on disk."""
    rules = recording_rules(config)
    found = list(_recording_problems(rules, config))
    found += _alert_problems(alerts(config), rules, config)
    return found


def _known(config: RulesConfig) -> dict[str, Series]:
    own = frozenset(config.deployment_labels)
    scraped = catalogue_series() | {series.name: series for series in OTHER_SERIES}
    return {name: replace(series, labels=series.labels | own) for name, series in scraped.items()}


def _recording_problems(rules: Sequence[RecordingRule], config: RulesConfig) -> Iterator[Finding]:
    known = _known(config)
    labels: dict[str, tuple[str, ...]] = {}
    seen: set[tuple[str, tuple[tuple[str, str], ...]]] = set()
    for rule in rules:
        if not re.fullmatch(r"kvtune:[a-z0-9_]+:[a-z0-9_]+", rule.name):
            yield Finding(rule.name, "is not of the form kvtune:<what>:<operation>")
        if not rule.help or not rule.unit:
            yield Finding(rule.name, "has no help or no unit")
        if labels.setdefault(rule.name, rule.all_labels()) != rule.all_labels():
            yield Finding(rule.name, "has different labels in different rules")
        key = (rule.name, tuple(sorted(rule.labels.items())))
        if key in seen:
            yield Finding(rule.name, "is recorded twice with the same labels")
        seen.add(key)
        yield from _expression_problems(rule.name, rule.expr, known, config)
        known[rule.name] = _series_of(rule, rules)


def _series_of(rule: RecordingRule, rules: Sequence[RecordingRule]) -> Series:
    same = [other for other in rules if other.name == rule.name]
    values = {label: tuple(dict.fromkeys(other.labels[label] for other in same)) for label in rule.labels}
    return Series(rule.name, rule.name, "recorded", frozenset(rule.all_labels()), values)


def _alert_problems(
    found: Sequence[Alert], rules: Sequence[RecordingRule], config: RulesConfig
) -> Iterator[Finding]:  # fmt: skip
    known = _known(config) | {rule.name: _series_of(rule, rules) for rule in rules}
    seen: set[tuple[str, tuple[tuple[str, str], ...]]] = set()
    for alert in found:
        where = alert.name
        if not re.fullmatch(r"Kvtune[A-Za-z]+", alert.name):
            yield Finding(where, "its name does not begin with Kvtune")
        key = (alert.name, (*sorted(alert.labels.items()), ("severity", alert.severity)))
        if key in seen:
            yield Finding(where, "is there twice with the same labels")
        seen.add(key)
        if "{{" in alert.summary:
            yield Finding(where, "its summary holds a template: notifications of one alert would not group")
        if any("{{" in value for value in alert.labels.values()):
            yield Finding(where, "a label holds a template: each new value would be a new alert")
        for name, text in alert.annotations(config).items():
            if not text:
                yield Finding(where, f"its {name} is empty")
            if text.count("{{") != text.count("}}"):
                yield Finding(where, f"its {name} has a template that is not closed")
        yield from _expression_problems(where, alert.expr, known, config)


def _expression_problems(
    where: str, expr: str, known: Mapping[str, Series], config: RulesConfig
) -> Iterator[Finding]:  # fmt: skip
    for problem in examine(expr, known, windows=None).problems:
        yield Finding(where, problem.message)
    for window in _RANGE.findall(expr):
        if parse_duration(window, where) < 2 * config.windows.scrape:
            yield Finding(where, f"[{window}] holds less than two scrapes ({duration(config.windows.scrape)})")


def promtool_findings(files: Mapping[str, str], directory: Path) -> list[Finding] | None:
    """What `promtool check rules` says of the rule files, written to `directory`; None where there is no promtool."""
    promtool = shutil.which("promtool")
    if promtool is None:
        return None
    found = []
    for name in (RECORDING_FILE, ALERTS_FILE):
        if name in files:
            path = directory / name
            path.write_text(files[name], encoding="utf-8")
            ran = subprocess.run(  # noqa: S603 - a program found on PATH, with a path that we made
                [promtool, "check", "rules", "--lint=all", "--lint-fatal", str(path)],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            if ran.returncode:
                said = [line.strip() for line in (ran.stdout + ran.stderr).splitlines() if line.strip()]
                found.append(Finding(name, "promtool: " + "; ".join(said[1:])))
    return found
