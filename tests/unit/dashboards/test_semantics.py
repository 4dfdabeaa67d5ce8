from __future__ import annotations

import pytest

from kvtune_dashboards.semantics import Meaning, catalogue_series, examine, known_series


def meaning(expr: str, *windows: str) -> Meaning:
    return examine(expr, known_series(), windows=frozenset(windows) if windows else None)


def rules_broken(expr: str, *windows: str) -> set[str]:
    return {problem.rule for problem in meaning(expr, *windows).problems}


@pytest.mark.parametrize(
    ("expr", "broken"),
    [
        ("sum by (job) (rate(kvtune_turns_total[5m]))", set()),
        ("kvtune_turns_total", {"counter"}),
        ("rate(kvtune_retained_tokens[5m])", {"counter"}),
        ("deriv(kvtune_turns_total[5m])", {"counter"}),
        ("rate(sum(kvtune_turns_total)[5m:1m])", {"counter"}),
        ("sum(nothing)", {"metric"}),
        ('{job="a"}', {"metric"}),
        ('up{role="decode"}', {"label"}),
        ('rate(kvtune_turns_total{outcome="won"}[5m])', {"label"}),
        ('rate(kvtune_turns_total{outcome=~"hit|won"}[5m])', {"label"}),
        ("sum by (role) (up)", {"label"}),
        ("sum(rate(kvtune_turns_total[5m])) / sum(up)", {"ratio"}),
        ("sum(rate(kvtune_turns_total[5m])) / (sum(up) > 0)", set()),
        ("sum(up) / clamp_min(sum(up), 1)", set()),
        ("sum by (job) (up) and sum by (instance) (up)", {"matching"}),
        ("sum by (job) (up) * on (role) sum by (job) (up)", {"matching"}),
        ("histogram_quantile(0.9, sum by (le) (rate(kvtune_turn_ttft_seconds_bucket[5m])))", {"nan"}),
        ("histogram_quantile(0.9, sum by (le) (rate(kvtune_turn_ttft_seconds_bucket[5m]))) >= 0", set()),
        ("histogram_quantile(0.9, sum(rate(kvtune_turn_ttft_seconds_bucket[5m]))) >= 0", {"histogram"}),
        ("sum(", {"promql"}),
    ],
)
def test_what_is_wrong_with_an_expression(expr: str, broken: set[str]) -> None:
    assert rules_broken(expr) == broken


def test_only_grafanas_windows_where_asked() -> None:
    assert rules_broken("sum(rate(kvtune_turns_total[$__rate_interval]))", "$__rate_interval") == set()
    assert rules_broken("sum(rate(kvtune_turns_total[5m]))", "$__rate_interval") == {"rate-interval"}
    assert rules_broken("sum(increase(kvtune_turns_total[$__range]))", "$__rate_interval") == {"rate-interval"}


@pytest.mark.parametrize(
    ("expr", "labels", "dimension"),
    [
        ("sum by (job) (rate(kvtune_turns_total[5m]))", {"job"}, {"count": 1, "second": -1}),
        ("sum without (instance) (up)", {"job"}, None),
        ("count by (job) (up)", {"job"}, {"count": 1}),
        ("kvtune:followup_turns_reused:ratio", {"job"}, {}),
        ('label_replace(up, "x", "$1", "job", "(.+)")', {"job", "instance", "x"}, None),
        ("sum by (role, size) (rate(kvtune_kv_read_bytes_total[5m]))", {"role", "size"}, {"byte": 1, "second": -1}),
    ],
)  # fmt: skip
def test_what_an_expression_gives(expr: str, labels: set[str], dimension: dict[str, int] | None) -> None:
    shape = meaning(expr).shape
    assert shape is not None
    assert shape.labels == labels
    if dimension is not None:
        assert shape.dimension == dimension


def test_both_spellings_of_vllm_are_one_series() -> None:
    found = meaning('max({__name__=~"vllm:num_requests_waiting|vllm_num_requests_waiting",job="d"})')
    assert not found.problems
    assert [series.name for series in found.series] == ["vllm:num_requests_waiting"]
    assert rules_broken('max({__name__=~"vllm:num_requests|vllm_num_requests"})') == {"metric"}
    assert rules_broken('max({__name__=~"vllm:num.*"})') == {"metric"}


def test_the_catalogue_by_sample() -> None:
    known = catalogue_series()
    assert known["kvtune_turn_ttft_seconds_bucket"].labels >= {"le", "turn", "outcome", "job", "instance"}
    assert known["kvtune_turn_ttft_seconds_bucket"].family == "kvtune_turn_ttft_seconds"
    assert known["kvtune_turn_ttft_seconds_sum"].dimension == {"second": 1}
    assert known["kvtune_retained_tokens"].kind == "gauge"
    assert "kvtune_turn_ttft_seconds" not in known
