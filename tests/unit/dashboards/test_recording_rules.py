from __future__ import annotations

from collections.abc import Iterator

import promql_parser
import pytest

from kvtune_dashboards.config import RulesConfig, config_from, parse_duration
from kvtune_dashboards.promql import PromqlError
from kvtune_dashboards.recording import (
    OTHER_TTLS,
    RECORDING_RULES,
    RecordingRule,
    interval_of,
    ladder,
    le,
    recorded,
    recording_rules,
)
from kvtune_dashboards.scenarios import needed
from kvtune_telemetry.buckets import COARSE_SIZE_EDGES, GAP_SECONDS, SIZE_EDGES, size_labels


def rule(name: str, **labels: str) -> RecordingRule:
    (found,) = (r for r in RECORDING_RULES if r.name == name and labels.items() <= dict(r.labels).items())
    return found


def test_each_rule_reads_what_comes_before_it() -> None:
    names = {r.name for r in RECORDING_RULES}
    before: set[str] = set()
    for one in RECORDING_RULES:
        read = {name for name in needed(one.expr, ()) if name.startswith("kvtune:")}
        assert read <= names, one.name
        assert read - before <= {one.name} - {one.name}, (one.name, read - before)
        before.add(one.name)


def test_every_expression_parses() -> None:
    for one in RECORDING_RULES:
        promql_parser.parse(one.expr)


def test_follow_up_turns_that_could_have_reused() -> None:
    assert rule("kvtune:followup_turns:rate").expr == (
        'sum by (job) (kvtune:turns:rate{outcome!~"first|no_identity|disabled|error"})'
    )
    assert rule("kvtune:followup_turns_reused:ratio").expr == (
        'sum by (job) (kvtune:turns:rate{outcome="hit"}) / (kvtune:followup_turns:rate > 0)'
    )


def test_slow_turns_are_counted_at_an_edge() -> None:
    one = rule("kvtune:ttft_slow:ratio", window="1h")
    assert 'kvtune_turn_ttft_seconds_bucket{le=~"1\\\\.97"}[1h]' in one.expr
    windows = [r.labels["window"] for r in RECORDING_RULES if r.name == "kvtune:ttft_slow:ratio"]
    assert windows == ["5m", "30m", "1h", "2h", "6h", "1d", "3d"]
    other = recording_rules(config_from({"ttft_slo": {"bound": "1640ms"}}))
    assert 'le=~"1\\\\.64"' in next(r.expr for r in other if r.name == "kvtune:ttft_slow:ratio")
    first = recording_rules(config_from({"ttft_slo": {"turns": "first"}}))
    assert 'turn="first"' in next(r.expr for r in first if r.name == "kvtune:ttft_slow:ratio")


@pytest.mark.parametrize(("edge", "values"), [(60.0, ("60", "60.0")), (0.5, ("0.5",)), (1.97, ("1.97",))])
def test_an_edge_is_found_however_it_is_written(edge: float, values: tuple[str, ...]) -> None:
    import re

    for value in values:
        assert re.fullmatch(le(edge).value, value)
    assert not re.fullmatch(le(edge).value, "160")


def test_sizes_are_grouped_without_a_gap() -> None:
    coarse = [r for r in RECORDING_RULES if r.name == "kvtune:kv_read_bytes_per_second:mean"]
    assert [r.labels["size"] for r in coarse] == list(size_labels(COARSE_SIZE_EDGES))
    for label in size_labels(SIZE_EDGES):
        assert sum(f'"{label}"' in r.expr or f"{label}|" in r.expr or f'|{label}"' in r.expr for r in coarse) >= 1


def test_the_ladder_begins_at_the_least_ttl() -> None:
    rungs = ladder(RulesConfig())
    assert rungs[0] == 15 and rungs[-1] == GAP_SECONDS[-1]
    assert ladder(config_from({"advice": {"ttl_floor": "40s"}}))[0] == 45
    held = [r.labels["ttl"] for r in RECORDING_RULES if r.name == "kvtune:predicted_retained_tokens:at_ttl"]
    assert held == [f"{rung:g}" for rung in rungs]


def test_demand_is_divided_by_what_was_observed() -> None:
    assert rule("kvtune:retained_demand_tokens:rate").expr == (
        "sum by (job) (increase(kvtune_turn_end_tokens_total[30m])) / (kvtune:demand_covered_seconds:max > 0)"
    )
    assert rule("kvtune:demand_covered_seconds:max").expr == (
        "max by (job) (time() - min_over_time(timestamp(kvtune_router_build_info)[30m:30s])) > 0"
    )
    for factor in ("0.5", "1", "2"):
        text = rule("kvtune:predicted_retained_tokens:mean", factor=factor).expr
        ttl = f'sum by (job) (kvtune:ttl_seconds:factor{{factor="{factor}"}})'
        assert text.endswith(f" and kvtune:demand_covered_seconds:max >= clamp_max({ttl}, 1620)")


def test_windows_come_from_the_configuration() -> None:
    found = recording_rules(config_from({"windows": {"rate": "7m", "cost": "2h", "history": "3h", "demand": "50m"}}))
    texts = {r.name: r.expr for r in found}
    assert "[7m]" in texts["kvtune:turns:rate"]
    assert "[2h]" in texts["kvtune:path_tokens:increase"]
    assert "[3h]" in texts["kvtune:turn_ends:increase"]
    assert "[50m]" in texts["kvtune:retained_demand_tokens:rate"]
    assert not any("[5m]" in text or "[1h]" in text for name, text in texts.items() if "ttft_slow" not in name)


def test_deployments_are_kept_apart() -> None:
    for one in recording_rules(config_from({"deployment_labels": ["cluster"]})):
        assert "cluster" in one.all_labels() or one.name.startswith("kvtune:gap_edge_seconds:"), one.name


def test_groups_are_evaluated_at_their_own_pace() -> None:
    config = RulesConfig()
    groups = list(dict.fromkeys(one.group for one in RECORDING_RULES))
    assert groups[-1] == OTHER_TTLS
    assert {interval_of(group, config) for group in groups[:-1]} == {30.0}
    assert interval_of(OTHER_TTLS, config) == 120.0


def ranges(config: RulesConfig) -> Iterator[float]:
    import re

    for one in recording_rules(config):
        for window in re.findall(r"\[([0-9a-z]+)[\]:]", one.expr):
            yield parse_duration(window, one.name)


def test_every_window_holds_two_scrapes() -> None:
    assert min(ranges(RulesConfig())) >= 2 * RulesConfig().windows.scrape


def test_selecting_what_is_not_recorded_is_refused() -> None:
    assert str(recorded("kvtune:turns:rate", outcome="hit")) == 'kvtune:turns:rate{outcome="hit"}'
    with pytest.raises(PromqlError, match="no recording rule `kvtune:turn:rate`"):
        recorded("kvtune:turn:rate")
    with pytest.raises(PromqlError, match="has no label `role`"):
        recorded("kvtune:turns:rate", role="decode")
    with pytest.raises(PromqlError, match="`factor` of `kvtune:ttl_seconds:factor` is never `3`"):
        recorded("kvtune:ttl_seconds:factor", factor="3")
