"""The two decisions and the estimators under them, as pure functions: properties and every way to refuse."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvtune_telemetry.buckets import GAP_SECONDS, SIZE_EDGES, size_label
from kvtune_tuning import threshold, ttl
from kvtune_tuning.document import _threshold_first
from kvtune_tuning.gaps import GapCurves, Survival, mean_held, survival
from kvtune_tuning.lines import Arm, CostPoint, Line, fit, theil_sen, weighted_median
from kvtune_tuning.series import Collector, Series

EDGES = np.array((0.0, *GAP_SECONDS))


def exponential(mean: float, never: float = 0.05) -> GapCurves:
    curve = Survival(EDGES, never + (1 - never) * np.exp(-EDGES / mean))
    return GapCurves(curve, curve, curve, 5000.0, np.full(len(GAP_SECONDS), 5000.0))


def inputs(**changes: object) -> ttl.TtlInputs:
    base = ttl.TtlInputs(
        current_s=480.0,
        margin_s=5.0,
        conversations=100.0,
        window_s=3600.0,
        ends=5000.0,
        curves=exponential(60.0),
        token_rate=40_000.0,
        token_squared_rate=40_000.0 * 40_000.0,
        mean_tokens=40_000.0,
        pool_tokens=50_000_000.0,
        usage_p99=0.3,
        active_mean=100_000.0,
        active_variance=1e8,
        starved=False,
        kappa=1.0,
        saving_s_per_token=22e-6,
        useful=1.0,
        ttft_followup_s=0.5,
    )
    return replace(base, **changes)


# --- survival -------------------------------------------------------------------------------------------------------


def test_survival_of_uncensored_counts_is_one_minus_their_cumulative_share() -> None:
    edges = np.array([1.0, 10.0, 100.0])
    curve, exposure = survival(edges, np.array([500.0, 300.0, 100.0]), lambda g: np.full(len(g), 1000.0))
    assert curve.values == pytest.approx([1.0, 0.5, 0.2, 0.1])
    assert exposure == pytest.approx([1000.0] * 3)


def test_survival_divides_by_the_turns_that_could_have_returned() -> None:
    """A process that has run for 100 s at one turn a second: only half of its turns are 50 s old."""
    edges = np.array([10.0, 50.0, 90.0])
    exposure = lambda g: np.maximum(0.0, 100.0 - g)  # noqa: E731
    counts = np.array([0.3 * 95.0, 0.2 * 70.0, 0.1 * 30.0])
    curve, _ = survival(edges, counts, exposure, observed=3)
    assert curve.values == pytest.approx([1.0, 0.7, 0.5, 0.4])


def test_buckets_without_exposure_are_not_observed() -> None:
    edges = np.array([10.0, 50.0, 90.0, 200.0])
    curve, _ = survival(edges, np.zeros(4), lambda g: np.maximum(0.0, 100.0 - g))
    assert curve.horizon_s == 50.0


@given(st.lists(st.floats(0.0, 1.0), min_size=2, max_size=8), st.floats(0.0, 500.0))
def test_the_integral_of_survival_is_bounded_and_monotone(drops: list[float], at: float) -> None:
    values = np.cumprod([1.0, *(1.0 - d for d in drops)])
    curve = Survival(np.arange(len(values)) * 20.0, values)
    whole = float(curve.integral(np.array([at]))[0])
    assert 0.0 <= whole <= at + 1e-9
    assert whole >= at * values[-1] - 1e-9
    steps = curve.integral(np.linspace(0.0, at, 20))
    assert (np.diff(steps) >= -1e-9).all()
    dense = np.linspace(0.0, at, 4001)
    assert whole == pytest.approx(float(np.trapezoid(curve.at(dense), dense)), rel=0.02, abs=0.5)


def test_the_integral_of_an_exponential_is_exact() -> None:
    curve = exponential(60.0, never=0.0).tokens
    assert curve.integral(np.array([120.0]))[0] == pytest.approx(60.0 * (1 - math.exp(-2)), rel=1e-6)


def test_retention_that_is_still_filling_is_predicted_from_what_has_ended() -> None:
    """1000 tokens/s since t = 0 and nobody returns: 60 s later 60,000 tokens are held, later on TTL times rate."""
    curve = Survival(EDGES, np.ones(len(EDGES)))
    held = mean_held(curve, lambda t: np.maximum(0.0, t) * 1000.0, np.array([60.0, 1000.0]), 480.0)
    assert held == pytest.approx([60_000.0, 480_000.0], rel=1e-9)


# --- counters -------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 1000), min_size=3, max_size=20),
    st.integers(1, 18),
)
def test_a_reset_changes_no_increase(steps: list[int], where: int) -> None:
    where = min(where, len(steps) - 1)
    times = np.arange(len(steps) + 1, dtype=float)
    plain = np.concatenate(([0.0], np.cumsum(steps))).astype(float)
    reset = plain.copy()
    reset[where + 1 :] -= plain[where]
    assume(reset[where + 1] < reset[where] or reset[where] == 0)
    whole = Series("a_total", frozenset(), "t", times, plain)
    again = Series("a_total", frozenset(), "t", times, reset)
    assert again.increase() == pytest.approx(whole.increase())


def test_a_child_born_in_the_window_counts_from_zero() -> None:
    collector = Collector()
    collector.scraped("t", 1.0, [("a_total", frozenset(), 5.0)])
    collector.scraped("t", 2.0, [("a_total", frozenset(), 6.0), ("b_total", frozenset(), 4.0), ("g", frozenset(), 9.0)])
    series = collector.collected()
    assert series.increase("a_total") == 1.0 and series.increase("b_total") == 4.0
    assert series.named("g")[0].times.tolist() == [2.0], "a gauge has no zero before its birth"
    assert series.increase("c_total") is None, "what does not exist is not zero"


# --- TTL ------------------------------------------------------------------------------------------------------------


def test_the_memory_form_is_little_and_campbell() -> None:
    one = inputs(active_mean=0.0, active_variance=0.0, kappa=2.0, curves=exponential(60.0, 0.0))
    mean, variance = ttl.pinned(one, np.array([120.0]))
    held = 60 * (1 - math.exp(-2))
    assert mean[0] == pytest.approx(2 * 40_000 * held, rel=1e-6)
    assert variance[0] == pytest.approx(2 * 40_000.0**2 * held, rel=1e-6)
    fits = ttl.memory_ttl(replace(one, pool_tokens=6_000_000.0))
    at = ttl.filled(one, np.array([fits, fits + 5]))
    assert at[0] <= 5_400_000 < at[1]


def test_the_value_form_stops_at_the_break_even_hazard() -> None:
    """With a constant hazard 1/60 a turn is worth holding for ever if the break-even exceeds 60 s, else not at all."""
    patient = ttl.advise(inputs(saving_s_per_token=1e-3, curves=exponential(60.0, 0.0)))
    assert patient.value_s is not None and patient.value_s > 300
    poor = inputs(saving_s_per_token=1e-9, curves=exponential(60.0, 0.0))
    assert ttl.advise(poor).value_s == 5.0


@settings(max_examples=60, deadline=None)
@given(st.floats(2.0, 300.0), st.floats(1.0, 3.0), st.floats(20.0, 1000.0))
def test_longer_gaps_never_shorten_the_ttl_of_a_slack_pool(mean: float, longer: float, current: float) -> None:
    slack = inputs(pool_tokens=1e12, saving_s_per_token=1e-3, current_s=current)
    first = ttl.advise(replace(slack, curves=exponential(mean)))
    second = ttl.advise(replace(slack, curves=exponential(mean * longer)))
    assert first.recommended is not None and second.recommended is not None
    assert second.recommended >= first.recommended - 5.0
    assert first.recommended >= current and second.recommended >= current


@settings(max_examples=60, deadline=None)
@given(
    st.floats(5.0, 300.0), st.floats(1e5, 1e9), st.floats(0.0, 1.0), st.booleans(),
    st.one_of(st.floats(0.0, 30.0), st.floats(6.0, 2000.0), st.floats(3600.0, 1e15)),
    st.one_of(st.none(), st.floats(-1e-4, 1e-3)), st.floats(0.0, 1.0),
)  # fmt: skip
def test_ttl_advice_keeps_its_rules(
    mean: float, pool: float, usage: float, starved: bool, current: float, saving: float | None, useful: float
) -> None:
    one = inputs(
        curves=exponential(mean), pool_tokens=pool, usage_p99=usage, starved=starved, current_s=current,
        saving_s_per_token=saving, useful=useful,
    )  # fmt: skip
    advice = ttl.advise(one)
    assert advice.status in ("change", "keep", "off")
    assert advice.reason and advice.reason_code and "e+" not in advice.reason
    if advice.status == "keep":
        assert advice.recommended == current
    if advice.status == "change":
        assert advice.recommended is not None
        assert ttl.MIN_TTL_S <= advice.recommended <= ttl.MAX_TTL_S and advice.recommended % 5 == 0
        assert abs(advice.recommended - current) >= 0.15 * current
        assert advice.recommended > current or ttl.under_pressure(one), "lowered without pressure"
        then = next(row for row in advice.rows if row.value == advice.recommended)
        assert then.pool_share_p99 is not None and then.pool_share_p99 <= ttl.POOL_SHARE + 1e-9, "it does not fit"
        assert {current, advice.recommended} <= {row.value for row in advice.rows}
    if advice.status == "off":
        assert ttl.under_pressure(one)
    now = next(row for row in advice.rows if row.value == current)
    assert now.pool_share_p99 is not None
    if "has room" in advice.reason:
        assert now.pool_share_p99 <= ttl.POOL_SHARE + 1e-9, "room is claimed that the table denies"
    values = [row.value for row in advice.rows]
    assert values == sorted(values)
    for a, b in zip(advice.rows, advice.rows[1:], strict=False):
        assert b.hit_ratio >= a.hit_ratio and b.pinned_tokens_mean >= a.pinned_tokens_mean


TIGHT = {"active_mean": 600_000.0, "pool_tokens": 1_500_000.0, "saving_s_per_token": 1e-2}
"""A pool into which the model lets 10 s of retention fit."""


@pytest.mark.parametrize(
    ("changes", "status", "code"),
    [
        ({"current_s": 4.0}, "keep", "floor_does_not_fit"),
        ({"current_s": 10.0}, "keep", "floor_does_not_fit"),
        ({"current_s": 10.0, "starved": True}, "keep", "pressure_not_from_retention"),
        ({"current_s": 14.0}, "keep", "no_pressure_observed"),
        ({"current_s": 480.0}, "keep", "no_pressure_observed"),
        ({"current_s": 480.0, "usage_p99": 0.95}, "keep", "floor_does_not_fit"),
        ({"current_s": 14.0, "usage_p99": 0.95}, "keep", "floor_does_not_fit"),
        ({"current_s": 480.0, "starved": True}, "off", "does_not_fit"),
        ({"current_s": 480.0, "starved": True, "saving_s_per_token": 0.0}, "off", "does_not_pay"),
        ({"current_s": 7.0, "active_mean": 1_900_000.0}, "keep", "no_pressure_observed"),
    ],
)
def test_a_floor_that_does_not_fit_is_never_advised(changes: dict[str, object], status: str, code: str) -> None:
    one = inputs(**{**TIGHT, **changes})
    assert ttl.memory_ttl(replace(one, current_s=480.0)) in (0.0, 10.0)
    advice = ttl.advise(one)
    assert (advice.status, advice.reason_code) == (status, code), advice.reason
    assert "has room" not in advice.reason
    if code != "pressure_not_from_retention":
        assert advice.clamped_by == ("memory", "floor")


def test_the_floor_does_not_raise_a_ttl_beyond_what_pays() -> None:
    advice = ttl.advise(inputs(current_s=7.0, saving_s_per_token=1e-9))
    assert (advice.status, advice.reason_code, advice.value_s) == ("keep", "gain_too_small", 5.0), advice.reason


@pytest.mark.parametrize("current", [3601.5, 7200.0, 1e7, 1e9, 1e15])
@pytest.mark.parametrize("starved", [False, True])
def test_a_huge_ttl_in_force_costs_no_memory(current: float, starved: bool) -> None:
    one = inputs(current_s=current, starved=starved, pool_tokens=5_000_000.0)
    assert len(ttl._grid(one)) <= 721
    advice = ttl.advise(one)
    assert (advice.status, advice.reason_code) == (
        ("change", "pool_pressure") if starved else ("keep", "no_pressure_observed")
    ), advice.reason
    assert current in {row.value for row in advice.rows}
    roomy = ttl.advise(replace(one, pool_tokens=1e22, starved=False))
    assert (roomy.status, roomy.reason_code, roomy.memory_s) == ("keep", "pool_slack", current)


def test_a_reason_without_pressure_gives_both_numbers() -> None:
    advice = ttl.advise(inputs(pool_tokens=4_000_000.0, usage_p99=0.5))
    now = next(row for row in advice.rows if row.value == 480.0)
    assert advice.memory_s is not None and now.pool_share_p99 is not None and now.pool_share_p99 > 0.9
    for words in ("P99 usage 50 % was measured", f"{100 * now.pool_share_p99:.0f} %", f"{advice.memory_s:g} s fit"):
        assert words in advice.reason, advice.reason


def test_pressure_is_told_by_what_was_seen() -> None:
    waited = {"current_s": 60.0, "usage_p99": 0.3, "starved": True, "saving_s_per_token": None}
    reason = ttl.advise(inputs(**waited, curves=exponential(200.0, 0.0))).reason
    assert "requests waited for KV blocks" in reason and "30 %" not in reason


@pytest.mark.parametrize(
    ("changes", "status", "code"),
    [
        ({"conversations": 9.0}, "insufficient", "too_few_gaps"),
        ({"pool_tokens": None}, "insufficient", "missing_series"),
        ({"usage_p99": None}, "insufficient", "missing_series"),
        ({"active_mean": None}, "insufficient", "missing_series"),
        ({}, "keep", "pool_slack"),
        ({"pool_tokens": 4_000_000.0, "usage_p99": 0.5}, "keep", "no_pressure_observed"),
        ({"usage_p99": 0.99, "current_s": 60.0, "curves": exponential(200.0, 0.0), "saving_s_per_token": None},
         "keep", "pressure_not_from_retention"),
        ({"usage_p99": 0.95, "pool_tokens": 5_000_000.0}, "change", "pool_pressure"),
        ({"starved": True, "pool_tokens": 5_000_000.0}, "change", "pool_pressure"),
        ({"starved": True, "pool_tokens": 5_000_000.0, "saving_s_per_token": -1e-6}, "off", "does_not_pay"),
        ({"current_s": 30.0}, "change", "late_returns"),
        ({"current_s": 260.0, "saving_s_per_token": 1.0}, "keep", "gain_too_small"),
        ({"curves": exponential(60.0, 0.999)}, "off", "nobody_returns"),
    ],
)  # fmt: skip
def test_every_ttl_answer(changes: dict[str, object], status: str, code: str) -> None:
    advice = ttl.advise(inputs(**changes))
    assert (advice.status, advice.reason_code) == (status, code), advice.reason


def test_pauses_shorter_than_the_ttl_do_not_shorten_it_while_longer_ones_could_not_be_seen() -> None:
    young = exponential(20.0, 0.2)
    cut = {
        name: Survival(getattr(young, name).edges[:13], getattr(young, name).values[:13])
        for name in ("turns", "tokens", "tokens_squared")
    }
    curves = replace(young, **cut, exposure=young.exposure[:12])
    assert curves.horizon_s == 60.0
    short = inputs(curves=curves, usage_p99=0.99, pool_tokens=40_000_000.0, saving_s_per_token=None)
    assert ttl.advise(short).reason_code == "pressure_not_from_retention"
    assert [row.bound for row in ttl.advise(short).rows if row.value > 65] and ttl.row(short, 480.0).bound


def test_retention_is_not_switched_off_while_longer_pauses_could_not_be_seen() -> None:
    late = exponential(400.0, 0.3)
    cut = {
        name: Survival(getattr(late, name).edges[:13], getattr(late, name).values[:13])
        for name in ("turns", "tokens", "tokens_squared")
    }
    short = inputs(curves=replace(late, **cut, exposure=late.exposure[:12]), starved=True, pool_tokens=3_000_000.0)
    assert ttl.advise(short).status == "change"
    assert ttl.advise(replace(short, saving_s_per_token=-1e-6)).status == "off", "a loss stays a loss"


def test_retry_after_follows_the_slower_count() -> None:
    few = inputs(conversations=10.0, curves=replace(exponential(60.0), returned=50.0))
    assert ttl.advise(few).retry_after_s == pytest.approx(9 * 3600.0)


def test_less_evidence_is_enough_while_requests_wait() -> None:
    few = inputs(curves=replace(exponential(60.0), returned=150.0), pool_tokens=3_000_000.0, usage_p99=0.95)
    assert ttl.advise(few).reason_code == "too_few_gaps"
    waiting = ttl.advise(replace(few, starved=True))
    assert waiting.status == "change" and waiting.recommended is not None and waiting.recommended < few.current_s
    told = ttl.advise(replace(few, starved=True, curves=replace(few.curves, returned=99.0)))
    assert told.reason_code == "too_few_gaps" and "need 20 and 100" in told.reason


def test_no_interval_from_few_conversations() -> None:
    tight = {"usage_p99": 0.95, "pool_tokens": 3_400_000.0}
    assert ttl.advise(inputs(**tight, conversations=49.0)).interval is None
    many = ttl.advise(inputs(**tight))
    assert many.interval is not None and many.recommended is not None
    assert many.interval[0] <= many.recommended <= many.interval[1]
    assert ttl.advise(inputs(**tight)) == many, "the same inputs give the same interval"


# --- lines and threshold --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mean", [64.0, 70.0, 312.0, 576.0, 1500.0, 2040.0, 2048.0])
def test_a_size_class_keeps_its_mean_and_its_parts_their_sides(mean: float) -> None:
    tau = np.array([64.0, 100.0, 512.0, 1024.0, 1856.0, 2048.0])
    under_share, over_share, under, over = threshold._split(threshold.Sizes(64.0, 2048.0, mean, 10.0), tau)
    assert (np.diff(under_share) >= 0).all() and np.allclose(under_share + over_share, 1)
    assert (under <= tau).all() and (over >= tau).all() and (under >= 64).all() and (over <= 2048).all()
    assert under_share * under + over_share * over == pytest.approx(mean, rel=0.02)


def test_a_size_class_without_width_is_one_size() -> None:
    one = threshold.Sizes(1e17, 1e17, 1e17, 1.0)
    under, over, _, _ = threshold._split(one, np.array([64.0, 1e18]))
    assert under.tolist() == [0.0, 1.0] and over.tolist() == [1.0, 0.0]


def arm(line: Line, low: float, high: float, n: int = 400, noise: float = 0.15, seed: int = 1) -> tuple[CostPoint, ...]:
    """Points as the counters give them: class means in 20 stretches of log-uniform sizes, with outliers."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.uniform(math.log(low), math.log(high), n)).round()
    costs = np.maximum(1e-6, (line.intercept + line.slope * sizes)) * rng.lognormal(0, noise, n)
    costs = np.where(rng.random(n) < (0.02 if noise else 0.0), costs * 4, costs)
    sums: dict[tuple[int, str], list[float]] = {}
    for i in range(n):
        entry = sums.setdefault((i * 20 // n, size_label(int(sizes[i]))), [0.0, 0.0, 0.0])
        entry[0] += 1
        entry[1] += sizes[i]
        entry[2] += costs[i]
    return tuple(CostPoint(k, s, v[1] / v[0], v[2] / v[0], v[0]) for (k, s), v in sums.items())


def fetched(low: float, high: float, count: float = 400.0) -> tuple[threshold.Sizes, ...]:
    found = []
    for a, b in zip((1, *SIZE_EDGES), (*SIZE_EDGES, 10**6), strict=True):
        bottom, top = max(a, low), min(b, high)
        if bottom < top:
            share = math.log(top / bottom) / math.log(high / low)
            found.append(threshold.Sizes(bottom, top, (top - bottom) / math.log(top / bottom), share * count))
    return tuple(found)


RECOMPUTE = Line(0.0993, 26.9e-6)
FETCH = Line(0.0209, 4.55e-6)
TRUTH = 0.0209 / (26.9e-6 - 4.55e-6)


def case(**changes: object) -> threshold.ThresholdInputs:
    base = threshold.ThresholdInputs(
        current=64.0,
        window_s=3600.0,
        fetch=arm(FETCH, 64, 16_000, seed=2),
        recompute=arm(RECOMPUTE, 32, 32_000, seed=3),
        fetched=fetched(64, 4096),
        below=None,
        ttft_followup_s=0.15,
    )
    return replace(base, **changes)


def test_noise_free_lines_are_found_exactly() -> None:
    for line in (RECOMPUTE, FETCH):
        found = fit(Arm.of(arm(line, 32, 32_000, noise=0.0)))
        assert found.intercept == pytest.approx(line.intercept, rel=1e-6)
        assert found.slope == pytest.approx(line.slope, rel=1e-6)


def test_a_weighted_median_is_the_point_of_half_the_weight() -> None:
    assert weighted_median(np.array([3.0, 1.0, 2.0]), np.array([1.0, 1.0, 1.0])) == 2.0
    assert weighted_median(np.array([1.0, 10.0]), np.array([9.0, 1.0])) == 1.0


def test_theil_sen_ignores_an_outlier() -> None:
    n = np.array([100.0, 200.0, 400.0, 800.0, 1600.0, 3200.0, 6400.0])
    s = 0.02 + 1e-5 * n
    s[3] *= 10
    line = theil_sen(n, s, np.ones(len(n)))
    assert line.slope == pytest.approx(1e-5, rel=1e-6) and line.intercept == pytest.approx(0.02, rel=1e-6)


def test_the_crossing_is_recovered_from_noisy_costs() -> None:
    found = [
        threshold.advise(case(fetch=arm(FETCH, 64, 16_000, seed=s), recompute=arm(RECOMPUTE, 32, 32_000, seed=s + 100)))
        for s in range(5)
    ]
    for advice in found:
        assert advice.status == "change" and advice.crossing == pytest.approx(TRUTH, rel=0.25)
        assert advice.interval is not None and advice.interval[0] <= TRUTH <= advice.interval[1]
        lines = (RECOMPUTE, FETCH)
        cost, _ = threshold.path_cost(case(), *lines, np.array([float(advice.recommended or 0), TRUTH]))
        assert cost[0] - cost[1] < 0.001, "regret below 1 ms a turn"


@settings(max_examples=10, deadline=None)
@given(st.floats(0.1, 1.0), st.integers(0, 5))
def test_a_faster_link_never_raises_the_crossing(faster: float, seed: int) -> None:
    slow = arm(FETCH, 64, 16_000, seed=seed)
    quick = tuple(replace(p, seconds=p.seconds * faster) for p in slow)
    recompute = fit(Arm.of(arm(RECOMPUTE, 32, 32_000, seed=9)))
    a, b = threshold.crossing(recompute, fit(Arm.of(slow))), threshold.crossing(recompute, fit(Arm.of(quick)))
    assert b is not None and (a is None or b <= a * (1 + 1e-9))
    first = threshold.advise(case(fetch=slow))
    second = threshold.advise(case(fetch=quick))
    if first.status == second.status == "change":
        assert (second.recommended or 0) <= (first.recommended or 0)


@pytest.mark.parametrize(
    ("changes", "status", "code"),
    [
        ({}, "change", "fetching_small_is_slow"),
        ({"current": 928.0, "fetched": fetched(928, 8192)}, "keep", "gain_too_small"),
        ({"current": 4096.0, "fetched": fetched(4096, 8192, 200),
          "below": threshold.Sizes(64, 4096, 2500.0, 2000.0), "ttft_followup_s": None},
         "change", "fetching_small_is_fast"),
        ({"ttft_followup_s": 3.0}, "keep", "gain_too_small"),
        ({"fetch": arm(FETCH, 64, 16_000, n=50), "fetched": fetched(64, 4096, 50)}, "insufficient", "too_few_costs"),
        ({"recompute": arm(RECOMPUTE, 32, 32_000, n=80)}, "insufficient", "too_few_costs"),
        ({"recompute": ()}, "unidentifiable", "recompute_not_observed"),
        ({"fetch": (), "fetched": (), "below": threshold.Sizes(1, 64, 30.0, 500.0)},
         "unidentifiable", "fetch_not_observed"),
        ({"fetch": arm(FETCH, 64, 300)}, "unidentifiable", "fetch_range_too_narrow"),
        ({"recompute": arm(RECOMPUTE, 20, 60)}, "unidentifiable", "recompute_range_too_narrow"),
        ({"fetch": arm(Line(0.2, 4e-6), 64, 16_000), "recompute": arm(RECOMPUTE, 30, 600, n=4000, noise=0.02)},
         "unidentifiable", "crossing_out_of_sight"),
        ({"recompute": arm(Line(0.1, 4.6e-6), 32, 32_000)}, "unidentifiable", "lines_do_not_cross"),
        ({"recompute": arm(Line(0.1, 2e-6), 32, 32_000)}, "off", "fetch_never_pays"),
        ({"fetch": arm(FETCH, 8192, 16_000), "fetched": fetched(8192, 131_072)}, "keep", "nothing_fetchable_between"),
    ],
)  # fmt: skip
def test_every_threshold_answer(changes: dict[str, object], status: str, code: str) -> None:
    advice = threshold.advise(case(**changes))
    assert (advice.status, advice.reason_code) == (status, code), advice.reason
    assert (advice.recommended is not None) == (status in ("change", "keep"))


@settings(max_examples=25, deadline=None)
@given(st.one_of(st.sampled_from([0.0, 0.5, 1.0, 15.999, 100.5, 927.3, 1e6, 1e7 + 0.5, 1e12]), st.floats(0.0, 2e5)))
def test_the_threshold_in_force_is_in_the_table_whatever_it_is(current: float) -> None:
    advice = threshold.advise(case(current=current))
    if advice.rows:
        values = [row.value for row in advice.rows]
        assert current in values and values == sorted(set(values))
        assert advice.recommended is None or advice.recommended in values
    if current in (0.0, 0.5, 100.5, 1e7 + 0.5):
        assert advice.status == "change" and advice.rows, advice.reason
    assert "e+" not in advice.reason


def test_costs_that_go_up_and_down_are_refused() -> None:
    zigzag = tuple(
        replace(p, seconds=p.seconds + (0.4 if p.size in ("128", "512", "2048", "8192") else 0.0))
        for p in arm(FETCH, 64, 16_000)
    )
    advice = threshold.advise(case(fetch=zigzag))
    assert advice.status == "unidentifiable"


def move(seed: int, noise: float, n: int = 1) -> threshold.ThresholdInputs:
    """A move from 2048 to the crossing, worth some 4 ms, seen through noise; `n` times as much of it."""
    return case(
        current=2048.0, ttft_followup_s=None, fetched=fetched(2048, 4096, 200),
        below=threshold.Sizes(900, 2048, 1200.0, 300.0),
        fetch=arm(FETCH, 256, 16_000, n=250 * n, noise=noise, seed=seed),
        recompute=arm(RECOMPUTE, 32, 32_000, n=300 * n, noise=noise, seed=seed + 50),
    )  # fmt: skip


@pytest.mark.parametrize("seed", [1, 5, 6])
def test_a_move_whose_gain_is_not_certain_waits(seed: int) -> None:
    unsure = threshold.advise(move(seed, 0.7))
    assert (unsure.status, unsure.reason_code, unsure.recommended) == ("insufficient", "gain_not_certain", None)
    assert unsure.gain_s is not None and unsure.gain_interval is not None
    low, high = unsure.gain_interval
    assert low <= 0 < threshold.MIN_GAIN_S < unsure.gain_s < high
    # the half-width is to shrink to the gain, with the root of the time
    assert unsure.retry_after_s == math.ceil((((unsure.gain_s - low) / unsure.gain_s) ** 2 - 1) * 3600)
    assert f"{1000 * unsure.gain_s:.1f} ms a turn, or anything from -" in unsure.reason
    sure = threshold.advise(move(seed, 0.1))
    assert sure.status == "change" and sure.gain_interval is not None and sure.gain_s is not None
    assert 0 < sure.gain_interval[0] <= sure.gain_s <= sure.gain_interval[1]
    again = threshold.advise(move(seed, 0.7, n=16))
    assert again.status == "change" or again.reason_code == "gain_too_small", again.reason


def test_the_gain_of_a_move_is_that_of_the_lines_on_the_sizes_that_occur() -> None:
    one = case(fetch=arm(FETCH, 64, 16_000, noise=0.0), recompute=arm(RECOMPUTE, 32, 32_000, noise=0.0))
    advice = threshold.advise(one)
    cost, _ = threshold.path_cost(one, RECOMPUTE, FETCH, np.array([64.0, float(advice.recommended or 0)]))
    assert advice.gain_s == pytest.approx(cost[0] - cost[1], rel=1e-3)
    assert advice.gain_interval == pytest.approx((advice.gain_s, advice.gain_s), rel=1e-3)


NARROW: dict[str, object] = {"fetch": arm(FETCH, 64, 480, seed=2), "fetched": fetched(64, 480)}
FEW: dict[str, object] = {
    "current": 2048.0, "ttft_followup_s": None, "fetch": arm(FETCH, 512, 8000, n=60, seed=4),
    "fetched": fetched(2048, 8000, 40), "below": threshold.Sizes(64, 2048, 500.0, 4000.0),
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "explored", "status", "code"),
    [
        (NARROW, None, "unidentifiable", "fetch_range_too_narrow"),
        (NARROW, 4.0, "unidentifiable", "fetch_range_too_narrow"),
        (NARROW, 5.0, "change", "fetching_small_is_slow"),
        ({"fetch": arm(FETCH, 300, 480, seed=2), "fetched": fetched(300, 480), "below": threshold.Sizes(10, 64, 30, 9)},
         50.0, "unidentifiable", "fetch_range_too_narrow"),
        (FEW, None, "unidentifiable", "fetch_not_observed"),
        (FEW, 4.0, "unidentifiable", "fetch_not_observed"),
        (FEW, 20.0, "keep", "gain_too_small"),
        ({**FEW, "fetch": arm(FETCH, 512, 8000, n=40)}, 20.0, "unidentifiable", "fetch_not_observed"),
    ],
)  # fmt: skip
def test_what_exploration_makes_identifiable(
    changes: dict[str, object], explored: float | None, status: str, code: str
) -> None:
    advice = threshold.advise(case(**changes, explored=explored))
    assert (advice.status, advice.reason_code) == (status, code), advice.reason
    if status == "unidentifiable":
        assert ("let the router explore" in advice.reason) == (explored is None)
    else:
        assert advice.crossing == pytest.approx(TRUTH, rel=0.25)


def test_while_the_router_explores_it_is_said_how_long_it_takes() -> None:
    few = {**FEW, "fetch": arm(FETCH, 512, 8000, n=40, seed=4)}
    assert threshold.advise(case(**few)).retry_after_s is None, "waiting alone shows nothing else"
    assert threshold.advise(case(**few, explored=9.0)).retry_after_s == 900, "10 of 50 fetches are missing"
    assert threshold.advise(case(**few, explored=0.0)).retry_after_s == 4 * 3600, "what was explored has yet to come"
    seldom = (CostPoint(0, "64", 40.0, FETCH.at(40), 2.0), *arm(FETCH, 129, 256, seed=2))
    narrow = threshold.advise(case(fetch=seldom, fetched=fetched(64, 256), explored=9.0))
    assert narrow.reason_code == "fetch_range_too_narrow" and narrow.retry_after_s == 1.5 * 3600
    hopeless = threshold.advise(case(fetch=seldom[1:], fetched=fetched(64, 256), explored=9.0))
    assert hopeless.reason_code == "fetch_range_too_narrow" and hopeless.retry_after_s is None


def test_a_crossing_out_of_sight_is_approached_as_far_as_exploration_sees() -> None:
    """Fetching pays from 206 tokens; at 8192 nothing below 2048 is fetched, explored or not."""
    latent, link = Line(0.2966, 101.7e-6), Line(0.0200, 4.50e-6)
    far: dict[str, object] = {
        "current": 8192.0, "ttft_followup_s": None, "fetch": arm(link, 2048, 40_000, seed=1),
        "recompute": arm(latent, 32, 32_000, seed=2), "fetched": fetched(8192, 16_000, 100),
        "below": threshold.Sizes(200, 8192, 2500.0, 900.0),
    }  # fmt: skip
    refused = threshold.advise(case(**far))
    assert (refused.reason_code, refused.retry_after_s) == ("crossing_out_of_sight", None)
    assert "lower the threshold to 1024" in refused.reason
    step = threshold.advise(case(**far, explored=20.0))
    assert (step.status, step.reason_code, step.clamped_by) == ("change", "fetching_small_is_fast", ("sizes_seen",))
    assert 2048 < (step.recommended or 0) < 4096, "no further than fetches were seen"
    assert step.uncapped == pytest.approx(0.02 / 97.2e-6, rel=0.25)


def test_what_is_seen_at_one_size_is_compared_with_the_lines() -> None:
    exact = case(
        fetch=arm(FETCH, 32, 16_000, n=2000, noise=0.0), recompute=arm(RECOMPUTE, 32, 32_000, n=2000, noise=0.0),
        explored=40.0,
    )  # fmt: skip
    pairs = threshold.advise(exact).pairs
    assert [16 <= pair.tokens <= 256 for pair in pairs] == [True] * 3, "within the reach of exploration only"
    for pair in pairs:
        assert pair.seen_s == pytest.approx(FETCH.at(pair.tokens) - RECOMPUTE.slope * pair.tokens, abs=2e-4)
        assert pair.line_s == pytest.approx(pair.seen_s, abs=2e-4) and not pair.contradicts
    assert threshold.advise(replace(exact, explored=None)).pairs == ()


def test_costs_that_contradict_the_lines_are_said_to() -> None:
    """Fetches of up to 64 tokens are 15 ms cheaper than the line through all others."""
    points = arm(FETCH, 32, 16_000, n=4000, noise=0.05)
    cheap = tuple(replace(p, seconds=p.seconds - 0.015) if p.size == "64" else p for p in points)
    seen = []
    for fetch, contradicted in ((points, False), (cheap, True)):
        advice = threshold.advise(
            case(fetch=fetch, recompute=arm(RECOMPUTE, 32, 32_000, n=4000, noise=0.05), explored=9.0)
        )
        assert advice.status == "change"
        assert len(advice.pairs) == 3 and advice.pairs[0].contradicts == contradicted
        assert any(pair.contradicts for pair in advice.pairs) == contradicted
        assert ("tokens contradict the lines" in advice.reason) == contradicted
        seen.append(advice.pairs[0].seen_s)
    assert seen[1] - seen[0] == pytest.approx(-0.015)


def test_noise_alone_seldom_contradicts() -> None:
    found = [
        pair.contradicts
        for seed in range(12)
        for pair in threshold.advise(
            case(
                fetch=arm(FETCH, 32, 16_000, n=1000, seed=seed), explored=20.0,
                recompute=arm(RECOMPUTE, 32, 32_000, n=1000, seed=seed + 20),
            )
        ).pairs
    ]  # fmt: skip
    assert len(found) == 36 and sum(found) <= 1


@settings(max_examples=40, deadline=None)
@given(st.floats(1.0, 5e4), st.floats(1.01, 50.0), st.floats(0.0, 1.0), st.floats(1.0, 1e5))
def test_splitting_a_class_loses_nothing(low: float, ratio: float, where: float, tau: float) -> None:
    high = low * ratio + 1
    mean = low + where * (high - low)
    sizes = threshold.Sizes(low, high, mean, 10.0)
    under_share, over_share, under, over = threshold._split(sizes, np.array([tau]))
    assert under_share[0] + over_share[0] == pytest.approx(1.0)
    assert under_share[0] * under[0] + over_share[0] * over[0] == pytest.approx(mean, rel=0.02)


# --- the waiting form -----------------------------------------------------------------------------------------------

COSTS = ttl.Costs(
    turns_per_s=1.0, prefill_engines=1, compute_base_s=0.1, compute_token_s=27e-6, fetch_base_s=0.02,
    fetch_token_s=4.5e-6, computed_mean=2000.0, computed_square=8e6,
)  # fmt: skip


def test_waiting_for_room_is_the_mean_excess_by_littles_law() -> None:
    one = inputs(pool_tokens=2_500_000.0, active_variance=0.0)
    mean, variance = (float(v[0]) for v in ttl.pinned(one, np.array([480.0])))
    draws = np.random.default_rng(1).normal(mean + one.active_mean, math.sqrt(variance), 2_000_000)
    excess = np.maximum(draws - one.pool_tokens, 0.0).mean()
    got = ttl.waiting_for_room(one, np.array([480.0]))[0]
    assert got == pytest.approx(ttl.WAITS_LONGER * excess / one.token_rate, rel=0.02)
    assert ttl.waiting_for_room(replace(one, pool_tokens=1e9), np.array([480.0]))[0] == pytest.approx(0.0, abs=1e-9)


def test_prefills_queue_is_pollaczek_khinchine_and_its_time_that_of_the_misses() -> None:
    one = inputs(costs=COSTS)
    service, square = 0.1 + 27e-6 * 2000, 0.1**2 + 2 * 0.1 * 27e-6 * 2000 + 27e-6**2 * 8e6
    in_time = 1 - float(one.curves.tokens.at(np.array([475.0]))[0])
    read = 0.02 * in_time + 4.5e-6 * 40_000 * in_time
    now = ttl.prefill_seconds(one, COSTS, np.array([480.0]))[0]
    assert now == pytest.approx(square / (2 * (1 - service)) + service + read)
    off = ttl.prefill_seconds(replace(one, costs=replace(COSTS, turns_per_s=1e-9)), COSTS, np.array([0.0]))[0]
    lost = in_time * 40_000 * 27e-6
    assert off > service + lost


def test_the_waiting_form_trades_room_for_prefill() -> None:
    def best(**changes: object) -> float:
        one = inputs(costs=COSTS, **changes)
        return ttl.waiting_ttl(one, one.costs)

    assert best() == ttl.MAX_TTL_S, "with room there is no reason to let go"
    tight = best(pool_tokens=2_200_000.0)
    tighter = best(pool_tokens=1_500_000.0)
    assert 0 < tighter < tight < 480
    dear = replace(COSTS, compute_token_s=100e-6, turns_per_s=0.2)
    cheap = replace(COSTS, compute_token_s=6e-6, turns_per_s=0.2)
    one = inputs(pool_tokens=1_800_000.0)
    assert ttl.waiting_ttl(one, cheap) <= ttl.waiting_ttl(one, dear)
    assert best(pool_tokens=150_000.0) == 0.0


def test_a_longer_ttl_that_makes_requests_wait_is_shown_to() -> None:
    slack = inputs(costs=COSTS, ttft_followup_s=1.0, usage_p99=0.5, pool_tokens=3_400_000.0, saving_s_per_token=1e-5)
    long, longer = (ttl.row(slack, t).ttft_mean_s for t in (480.0, 3600.0))
    assert long == pytest.approx(1.0) and longer is not None
    waits = ttl.waiting_for_room(slack, np.array([480.0, 3600.0]))
    assert waits[1] > waits[0] and longer > 1.0 + 0.5 * float(waits[1] - waits[0])


def test_the_wait_that_was_seen_says_how_much_is_waited() -> None:
    one = inputs(costs=COSTS, starved=True, usage_p99=1.0, pool_tokens=2_000_000.0)
    now = np.array([one.current_s])
    prefill, foretold = (float(v[0]) for v in (ttl.prefill_seconds(one, COSTS, now), ttl.waiting_for_room(one, now)))
    assert foretold > 1.0

    def seen(waited: float) -> ttl.TtlInputs:
        return ttl.as_seen_waiting(replace(one, ttft_followup_s=prefill + waited))

    assert seen(foretold / 2).waits_longer == pytest.approx(ttl.WAITS_LONGER / 2)
    assert (seen(0.0).waits_longer, seen(1e6).waits_longer) == ttl.WAITS_RANGE
    best = [ttl.waiting_ttl(seen(waited), COSTS) for waited in (0.0, foretold, 10 * foretold)]
    assert best[0] >= best[1] >= best[2] > 0
    # what was luckily not waited for is used only as far as the 99th percentile fits
    assert best[0] == best[1] or ttl.filled(one, np.array([best[0]]))[0] <= 2_000_000.0
    slack = inputs(costs=COSTS, ttft_followup_s=9.0, pool_tokens=9e6)
    assert ttl.as_seen_waiting(slack) == slack, "no wait is expected: a long first token has other reasons"


def test_who_begins_a_conversation_has_not_been_held_back() -> None:
    """Of a chat's turns three in four are the last: however long they wait, no more turns are hidden than return."""
    one = inputs(costs=COSTS, starved=True, ttft_followup_s=1e6)
    chat = replace(
        one,
        curves=replace(one.curves, turns=Survival(one.curves.turns.edges, 1 - 0.25 * (1 - one.curves.turns.values))),
    )
    assert ttl.unhindered(one, 150.0, 0.0).raised_by == pytest.approx(1.95)
    assert ttl.unhindered(chat, 150.0, 0.0).raised_by == pytest.approx(1.2375)


def test_a_small_step_out_of_a_crowded_pool_is_taken() -> None:
    one = inputs(costs=COSTS, starved=True, usage_p99=1.0, pool_tokens=2_500_000.0, current_s=80.0)
    before, after = ttl.expected(one, COSTS, np.array([80.0, 70.0]))
    saved = float(before - after)
    told = ttl.advise(replace(one, ttft_followup_s=9 * saved))
    assert (told.status, told.recommended) == ("change", 70.0)
    assert ttl.advise(replace(one, ttft_followup_s=11 * saved)).reason_code == "change_too_small"


def test_where_neither_pool_nor_prefill_has_room_the_lesser_evil_is_taken() -> None:
    full = replace(COSTS, turns_per_s=4.0, compute_token_s=60e-6, computed_mean=3000.0)
    one = inputs(costs=full, starved=True, usage_p99=1.0, pool_tokens=900_000.0, ttft_followup_s=60.0)
    found = ttl.waiting_ttl(one, full)
    grid = np.arange(5.0, 1000.0, 5.0)
    cost = ttl.expected(one, full, grid)
    here = ttl.expected(one, full, np.array([found, one.current_s]))
    assert here[0] <= here[1] and here[0] == pytest.approx(cost.min(), rel=ttl.SAME_SHARE, abs=2 * ttl.SAME_S)
    mean, variance = ttl.pinned(one, np.array([found]))
    assert float(mean[0] + np.sqrt(variance[0])) + (one.active_mean or 0.0) > 900_000.0, (
        "it does not fit, nor does less"
    )


def test_a_queue_at_prefill_makes_turns_late_and_grows_by_them() -> None:
    """At 80 s prefill's utilisation is 0.88 by the hits that the pauses allow; its queue makes them misses."""
    heavy = replace(COSTS, compute_token_s=60e-6)
    one = inputs(costs=heavy)

    def utilisation(ttl_s: float) -> float:
        usable = np.array([ttl_s, one.current_s]) - one.margin_s
        there, here = one.curves.tokens.at(usable)
        return float(heavy.engine_rate * heavy.service_s(heavy.computed_mean + one.mean_tokens * (there - here)))

    assert utilisation(80.0) == pytest.approx(0.88, abs=0.02)
    at_60, at_80, at_100, at_480 = ttl.prefill_seconds(one, heavy, np.array([60.0, 80.0, 100.0, 480.0]))
    assert at_60 > 1000 and at_80 > 1000 and at_100 < 5 and at_480 < 1
    # so many more computed, as turns that were late in the window had been, are turns that need not be late elsewhere
    fewer = ttl.prefill_seconds(replace(one, late=0.2), heavy, np.array([480.0]))
    assert fewer[0] < at_480


def test_full_prefill_raises_a_ttl_on_less_than_sure_hits() -> None:
    few = inputs(costs=COSTS, current_s=120.0, usage_p99=0.3, pool_tokens=2e7, ttft_followup_s=100.0, ends=300.0)
    assert ttl.advise(few).reason_code == "gain_too_small"
    full = replace(COSTS, turns_per_s=0.98 / (COSTS.compute_base_s + COSTS.compute_token_s * COSTS.computed_mean))
    told = ttl.advise(replace(few, costs=full))
    assert told.status == "change" and told.recommended is not None and told.recommended > 120


def test_retention_that_nothing_is_fetched_of_is_not_said_not_to_fit() -> None:
    one = inputs(costs=COSTS, starved=True, usage_p99=1.0, useful=0.002, pool_tokens=2_000_000.0)
    told = ttl.advise(one)
    assert (told.status, told.reason_code) == ("off", "does_not_pay")
    assert "prefill fetched 0.2 % of the tokens that came back" in told.reason and "fits" not in told.reason


@pytest.mark.parametrize(("below", "status", "code"), [(0.9, "keep", "threshold_first"), (0.3, "off", "does_not_pay")])
def test_the_threshold_is_settled_before_retention_is_called_useless(below: float, status: str, code: str) -> None:
    one = inputs(costs=COSTS, starved=True, usage_p99=1.0, useful=0.002, pool_tokens=2_000_000.0)
    sizes = case(
        current=2048.0, below=threshold.Sizes(64.0, 2048.0, 300.0, 1000 * below),
        fetched=(threshold.Sizes(2048.0, 4096.0, 3000.0, 1000 * (1 - below)),),
    )  # fmt: skip
    told = _threshold_first(ttl.advise(one), SimpleNamespace(ttl=one, threshold=sizes))  # type: ignore[arg-type]
    assert (told.status, told.reason_code) == (status, code)
    assert (
        code != "threshold_first" or "90 % of the histories that could have been fetched lie below 2048" in told.reason
    )


def test_waiting_slows_conversations_and_hides_demand() -> None:
    one = inputs(costs=COSTS, starved=True, ttft_followup_s=60.0)
    prefill = float(ttl.prefill_seconds(one, COSTS, np.array([480.0]))[0])
    more = ttl.unhindered(one, 150.0, 0.0)
    factor = more.raised_by
    ending = float(one.curves.turns.values[-1])
    assert factor == pytest.approx(1 + (1 - ending) * (60 - prefill) / (150 + prefill))
    assert more.token_rate == pytest.approx(one.token_rate * factor)
    assert more.costs is not None and more.costs.turns_per_s == pytest.approx(factor)
    stalled = replace(one, ttft_followup_s=1e6)
    most = 1 + (1 - ending) * (ttl.MOST_HELD_BACK - 1)
    assert ttl.unhindered(stalled, 150.0, 0.0).raised_by == pytest.approx(most)
    assert ttl.unhindered(stalled, 150.0, -9.0).raised_by == pytest.approx(most)
    # as many more wait as turns ended, each with the rest of its conversation
    flooded = ttl.unhindered(stalled, 150.0, one.ends)
    assert flooded.raised_by == pytest.approx(1 + 1 / ending)
    assert ttl.longest_good(flooded) == (ttl.memory_ttl(flooded), "memory"), "hardly seen: only what surely fits"
    for changed in (replace(one, starved=False), replace(one, costs=None), replace(one, ttft_followup_s=None)):
        assert ttl.unhindered(changed, 150.0, 9.0) == changed
