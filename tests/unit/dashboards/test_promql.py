from __future__ import annotations

import pytest

from kvtune_dashboards import promql
from kvtune_dashboards.promql import (
    Expr,
    PromqlError,
    any_of,
    by,
    first_seen,
    increase,
    metric,
    number,
    over_time,
    quantile,
    rate,
    ratio,
    sum_by,
)


def test_a_selector_writes_its_matchers() -> None:
    found = metric("kvtune_turns_total", outcome=any_of("hit", "expired"), job="a")
    assert str(found) == 'kvtune_turns_total{outcome=~"hit|expired",job="a"}'
    assert found.kind == "counter"
    assert found.labels == {"job", "instance", "outcome"}


@pytest.mark.parametrize(
    ("name", "matchers", "said"),
    [
        ("kvtune_turn_total", {}, "did you mean `kvtune_turns_total`"),
        ("kvtune_turns_total", {"role": "decode"}, "has no label `role`"),
        ("kvtune_turns_total", {"outcome": "won"}, "is never `won`"),
        ("vllm:gpu_cache_usage_perc", {}, "neither in the metric catalogue"),
    ],
)
def test_what_no_exporter_has_cannot_be_written(name: str, matchers: dict[str, str], said: str) -> None:
    with pytest.raises(PromqlError, match=said):
        metric(name, **matchers)


def test_vllm_is_taken_under_both_of_its_names() -> None:
    waiting = metric("vllm:num_requests_waiting", job="d")
    assert str(waiting) == '{__name__=~"vllm:num_requests_waiting|vllm_num_requests_waiting",job="d"}'
    assert str(over_time("avg", waiting, "5m")).endswith('job="d"}[5m])')
    assert str(rate(metric("vllm:nixl_num_failed_transfers_total"), "5m")) == (
        'rate({__name__=~"vllm:nixl_num_failed_transfers_total|vllm_nixl_num_failed_transfers_total"}[5m])'
    )
    assert promql.spellings("kvtune_turns_total") == ("kvtune_turns_total",)


def test_every_series_of_vllm_has_two_names() -> None:
    ours = [series.name for series in promql.OTHER_SERIES if series.name.startswith("vllm:")]
    assert len(ours) > 10
    for name in ours:
        assert f'"{name}|{name.replace(":", "_")}"' in str(metric(name))


def test_a_gauge_has_no_rate_and_a_counter_no_mean() -> None:
    with pytest.raises(PromqlError, match="which is a gauge"):
        rate(metric("kvtune_retained_tokens"), "5m")
    with pytest.raises(PromqlError, match="use rate"):
        over_time("avg", metric("kvtune_turns_total"), "5m")
    with pytest.raises(PromqlError, match="no duration"):
        increase(metric("kvtune_turns_total"), "5 min")


def test_operands_that_never_match_are_refused() -> None:
    one, other = sum_by(metric("up"), "job"), sum_by(metric("up"), "instance")
    with pytest.raises(PromqlError, match="never match"):
        one + other
    with pytest.raises(PromqlError, match="no label `role`"):
        sum_by(metric("up"), "role")
    with pytest.raises(PromqlError, match="would have one or the other"):
        one.otherwise(other)
    with pytest.raises(PromqlError, match="compares two constants"):
        number(1).over(2)


def test_parentheses_where_they_are_needed() -> None:
    a, b = Expr("a"), Expr("b")
    assert str((a + b) * 2) == "(a + b) * 2"
    assert str(a + b * 2) == "a + b * 2"
    assert str(a - (b - a)) == "a - (b - a)"
    assert str(ratio(a, b)) == "a / (b > 0)"
    assert str((a.over(1)).where(b.over(2))) == "a > 1 and b > 2"
    assert str(1 - ratio(a, b)) == "1 - a / (b > 0)"


def test_joining_keeps_the_labels_of_the_many() -> None:
    many = sum_by(metric("kvtune_turns_total"), "job", "outcome")
    one = sum_by(metric("up"), "job")
    joined = many.joined("*", one, ("job",))
    assert joined.labels == {"job", "outcome"}
    assert "* on (job) group_left () " in str(joined)
    with pytest.raises(PromqlError, match="aggregate it to those"):
        one.joined("*", many, ("job",))


def test_a_quantile_is_absent_without_observations() -> None:
    text = str(quantile(0.9, "kvtune_turn_ttft_seconds", "5m", ["job"]))
    assert text.startswith("histogram_quantile(0.9, sum by (job, le) (rate(kvtune_turn_ttft_seconds_bucket[5m])))")
    assert text.endswith("and sum by (job) (rate(kvtune_turn_ttft_seconds_count[5m])) > 0")
    with pytest.raises(PromqlError, match="between 0 and 1"):
        quantile(90, "kvtune_turn_ttft_seconds", "5m")


def test_how_much_of_a_window_was_seen() -> None:
    begin = first_seen(metric("kvtune_router_build_info"), "30m", "30s")
    assert str(begin) == "min_over_time(timestamp(kvtune_router_build_info)[30m:30s])"
    assert str(by("max", promql.now() - begin, "job")) == f"max by (job) (time() - {begin})"
