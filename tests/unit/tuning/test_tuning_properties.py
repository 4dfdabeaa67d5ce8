"""What must hold of the advice in any deployment: what moves one way only, and what must not move it at all."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvtune_tuning import threshold, ttl
from kvtune_tuning.document import build, schema
from kvtune_tuning.evidence import Evidence, gather
from kvtune_tuning.gaps import GapCurves, Survival
from kvtune_tuning.lines import Arm, CostPoint, Line, fit
from kvtune_tuning.render import render_table
from kvtune_tuning.series import COUNTER_SUFFIXES, Series, SeriesSet
from kvtune_tuning.sources import read_snapshots

Snapshots = Callable[..., Path]
WORLDS = ("pressed", "mixed")


@pytest.fixture(scope="module")
def pressed(snapshots: Snapshots) -> SeriesSet:
    """Decode is short of room, and whole histories are fetched."""
    return read_snapshots(snapshots(pool=1_500_000, interval=120.0))


@pytest.fixture(scope="module")
def mixed(snapshots: Snapshots, small_answers: dict[str, object]) -> SeriesSet:
    """Decode has room, and histories of all sizes are fetched."""
    return read_snapshots(snapshots(**small_answers))


@pytest.fixture(scope="module")
def worlds(pressed: SeriesSet, mixed: SeriesSet) -> dict[str, SeriesSet]:
    return dict(zip(WORLDS, (pressed, mixed), strict=True))


@pytest.fixture(scope="module")
def short(pressed: SeriesSet) -> ttl.TtlInputs:
    """What the advice on the TTL of the pressed world is made from."""
    return gather(pressed).ttl


@pytest.fixture(scope="module")
def varied(mixed: SeriesSet) -> threshold.ThresholdInputs:
    """What the advice on the threshold of the mixed world is made from."""
    return gather(mixed).threshold


def document(evidence: Evidence) -> dict[str, Any]:
    return build(evidence, {"kind": "snapshot", "where": ["x"]}, explain=True)


def changed(series: SeriesSet, change: Callable[[Series], list[Series]]) -> SeriesSet:
    return replace(series, series=tuple(new for one in series.series for new in change(one)))


def differing(one: Any, other: Any, rel: float, path: str = "") -> Iterator[str]:
    """Where two documents differ, numbers by more than a share of `rel`."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for key in one:
            yield from differing(one[key], other[key], rel, f"{path}/{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for i, pair in enumerate(zip(one, other, strict=True)):
            yield from differing(*pair, rel, f"{path}/{i}")
    elif one != other and not (
        isinstance(one, (int, float)) and isinstance(other, (int, float)) and math.isclose(one, other, rel_tol=rel)
    ):
        yield f"{path}: {one} and {other}"


FORETOLD = ("ttft_change_s", "gain_s_per_turn", "gain_interval_s")
"""Differences of expected waits: near a full pool or prefill, small changes of the costs are large ones of these."""


def stretched(curves: GapCurves, k: float) -> GapCurves:
    """The same conversations with pauses `k` times as long."""
    turns, tokens, squared = (
        Survival(c.edges * k, c.values) for c in (curves.turns, curves.tokens, curves.tokens_squared)
    )
    return replace(curves, turns=turns, tokens=tokens, tokens_squared=squared)


# --- what moves one way only ----------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.floats(0.0, 1.0), min_size=8, max_size=8),
    longer=st.floats(1.0, 4.0),
    current=st.floats(10.0, 1500.0),
    known=st.booleans(),
    fetch_token_s=st.sampled_from([4.5e-6, 1e-4]),
)
def test_longer_pauses_never_shorten_the_ttl_where_there_is_room(
    short: ttl.TtlInputs, shape: list[float], longer: float, current: float, known: bool, fetch_token_s: float
) -> None:
    """Of any shape, by memory as by waiting; returns beyond the hour that is measured would be given up, so none is."""
    edges = np.array([0.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, ttl.MAX_TTL_S / 4])
    curve = Survival(edges, 1.0 - 0.95 * np.concatenate(([0.0], np.cumsum(shape))) / max(1.0, sum(shape)))
    curves = GapCurves(curve, curve, curve, 5000.0, np.full(len(shape), 5000.0))

    def advised(curves: GapCurves) -> float | None:
        one = replace(
            short, curves=curves, pool_tokens=1e12, usage_p99=0.3, starved=False, current_s=current, costs=None
        )
        if known and short.costs is not None:
            # What is computed follows from the returns that come too late: it is not another fact.
            late = float(curves.tokens.at(np.array([current - one.margin_s]))[0])
            square = late * one.mean_tokens * one.token_squared_rate / one.token_rate
            one = replace(one, costs=replace(
                short.costs, fetch_token_s=fetch_token_s, computed_mean=500.0 + one.mean_tokens * late,
                computed_square=500.0**2 + 2 * 500.0 * one.mean_tokens * late + square,
            ))  # fmt: skip
        advice = ttl.advise(one)
        return current if advice.status == "keep" else advice.recommended

    first, second = advised(curves), advised(stretched(curves, longer))
    assume(first is not None)
    assert first is not None and second is not None and second >= first >= current


@settings(max_examples=12, deadline=None)
@given(
    base=st.floats(0.02, 20.0),
    token=st.floats(0.02, 6.0),
    faster=st.floats(0.05, 1.0),
    part=st.sampled_from(["base", "token"]),
    current=st.sampled_from([0.0, 64.0, 300.0, 2000.0, 9000.0]),
)
def test_a_faster_link_never_raises_the_threshold(
    varied: threshold.ThresholdInputs, base: float, token: float, faster: float, part: str, current: float
) -> None:
    """By what a fetch costs at all, and by what it costs a token: each alone, for links slow and fast."""
    seen = fit(Arm.of(varied.fetch))

    def over(base: float, token: float) -> tuple[CostPoint, ...]:
        link = Line(base * seen.intercept, token * seen.slope)
        return tuple(replace(p, seconds=p.seconds * link.at(p.tokens) / seen.at(p.tokens)) for p in varied.fetch)

    links = (
        over(base, token),
        over(base * (faster if part == "base" else 1), token * (faster if part == "token" else 1)),
    )
    recompute = fit(Arm.of(varied.recompute))
    slow, quick = (threshold.crossing(recompute, fit(Arm.of(link))) for link in links)
    # beyond every threshold the lines are as good as parallel, and which way they lean is chance
    assert slow is None or slow > threshold.MAX_THRESHOLD or (quick is not None and quick <= slow * (1 + 1e-9))
    first, second = (threshold.advise(replace(varied, fetch=link, current=current)) for link in links)
    for before, after in ((first.uncapped, second.uncapped), (_in_force(first), _in_force(second))):
        assert before is None or after is None or after <= before * (1 + 1e-9)


def _in_force(advice: threshold.ThresholdAdvice) -> float | None:
    """The threshold after the advice was taken; None where there is none."""
    return math.inf if advice.status == "off" else advice.recommended


@settings(max_examples=60, deadline=None)
@given(
    pool=st.floats(3e4, 3e7),
    larger=st.floats(1.0, 10.0),
    kappa=st.floats(0.25, 4.0),
    active=st.floats(0.0, 1e6),
    variance=st.floats(0.0, 1e11),
    current=st.sampled_from([0.0, 5.0, 123.4, 480.0, 7200.0]),
    load=st.floats(0.05, 5.0),
    compute=st.floats(0.1, 10.0),
)
def test_a_larger_pool_never_shortens_what_it_allows(
    short: ttl.TtlInputs, pool: float, larger: float, kappa: float, active: float, variance: float, current: float,
    load: float, compute: float,
) -> None:  # fmt: skip
    assert short.costs is not None
    costs = replace(
        short.costs,
        turns_per_s=short.costs.turns_per_s * load,
        compute_token_s=short.costs.compute_token_s * compute,
    )
    one = replace(
        short, kappa=kappa, active_mean=active, active_variance=variance, current_s=current, pool_tokens=pool,
        token_rate=short.token_rate * load, token_squared_rate=short.token_squared_rate * load,
    )  # fmt: skip
    roomy = replace(one, pool_tokens=pool * larger)
    assert ttl.memory_ttl(roomy) >= ttl.memory_ttl(one)
    assert ttl.waiting_ttl(roomy, costs) >= ttl.waiting_ttl(one, costs)


# --- what changes nothing -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["p", "d", "router0"])
@pytest.mark.parametrize("world", WORLDS)
def test_a_restart_of_one_process_changes_nothing(worlds: dict[str, SeriesSet], world: str, target: str) -> None:
    """In the middle, where every counter that matters had come further than it comes within one scrape."""
    series = worlds[world]
    middle = series.scrapes[target][len(series.scrapes[target]) // 2]

    def restarted(one: Series) -> list[Series]:
        if one.target != target or not one.name.endswith(COUNTER_SUFFIXES):
            return [one]
        then = one.values[one.times <= middle][-1:].sum()
        return [replace(one, values=np.where(one.times > middle, one.values - then, one.values))]

    before, after = gather(series), gather(changed(series, restarted))
    assert after.facts["restarts"] == {target: 1}
    pair = document(before)["recommendations"], document(after)["recommendations"]
    found = [one for one in differing(*pair, rel=1e-3) if not any(name in one for name in FORETOLD)]
    assert found == []
    assert list(differing(*pair, rel=0.1)) == []


@pytest.mark.parametrize("share", [0.5, 0.03])
@pytest.mark.parametrize("target", ["p", "d"])
@pytest.mark.parametrize("world", WORLDS)
def test_counters_in_two_parts_are_their_sum(
    worlds: dict[str, SeriesSet], world: str, target: str, share: float
) -> None:
    """One engine that counts under two names, as data-parallel ranks do."""
    series = worlds[world]

    def parted(one: Series) -> list[Series]:
        if one.target != target or not one.name.endswith(COUNTER_SUFFIXES):
            return [one]
        other = frozenset({*(pair for pair in one.labels if pair[0] != "engine"), ("engine", "other")})
        return [
            replace(one, values=one.values * share),
            replace(one, values=one.values * (1 - share), labels=other),
        ]

    whole, parts = (document(gather(one))["recommendations"] for one in (series, changed(series, parted)))
    assert list(differing(whole, parts, rel=1e-5)) == []


@pytest.mark.parametrize("world", WORLDS)
def test_prefill_in_two_engines_changes_only_their_number(worlds: dict[str, SeriesSet], world: str) -> None:
    """The queue before prefill is that of one engine: it alone may differ when two of them share the turns.

    Nor is decode's pool the cluster's: `test_two_decode_engines_are_advised_for_one_of_them` halves it too.
    """
    series = worlds[world]

    def shared(one: Series) -> list[Series]:
        if one.target != "p":
            return [one]
        parts = (0.25, 0.75) if one.name.endswith(COUNTER_SUFFIXES) else (1.0, 1.0)
        return [replace(one, target=name, values=one.values * part) for name, part in zip("pq", parts, strict=True)]

    one = gather(series)
    two = gather(replace(changed(series, shared), scrapes={**series.scrapes, "q": series.scrapes["p"]}))
    assert one.ttl.costs is not None and two.ttl.costs is not None
    assert (one.ttl.costs.prefill_engines, two.ttl.costs.prefill_engines) == (1, 2)
    alike = replace(two, ttl=replace(two.ttl, costs=replace(two.ttl.costs, prefill_engines=1)))
    assert list(differing(document(one)["recommendations"], document(alike)["recommendations"], rel=1e-5)) == []


def slower(inputs: ttl.TtlInputs, k: float) -> ttl.TtlInputs:
    """The same with every second `k` times as long, decided by memory."""
    return replace(
        inputs, current_s=inputs.current_s * k, margin_s=inputs.margin_s * k, window_s=inputs.window_s * k,
        curves=stretched(inputs.curves, k), token_rate=inputs.token_rate / k,
        token_squared_rate=inputs.token_squared_rate / k, saving_s_per_token=None, costs=None,
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(k=st.floats(0.1, 10.0), pool=st.floats(5e5, 2e6))
def test_the_memory_form_knows_no_unit_of_time(short: ttl.TtlInputs, k: float, pool: float) -> None:
    """While neither comes to the hour at which the grid ends."""
    one = slower(replace(short, pool_tokens=pool), 1.0)
    fits, slowly = ttl.memory_ttl(one), ttl.memory_ttl(slower(one, k))
    # each is rounded down to the grid
    assert k * fits - ttl.STEP_S < slowly < k * (fits + ttl.STEP_S)


def test_the_interval_knows_no_unit_of_time(short: ttl.TtlInputs) -> None:
    one = slower(replace(short, pool_tokens=2_500_000.0), 1.0)
    advice = ttl.advise(one)
    assert advice.status == "change" and advice.clamped_by == ("memory",) and advice.interval is not None
    for k in (0.5, 3.0):
        slowly = ttl.advise(slower(one, k)).interval
        assert slowly is not None
        for bound, scaled in zip(advice.interval, slowly, strict=True):
            assert scaled == pytest.approx(k * bound, abs=ttl.STEP_S * max(1.0, k))


# --- what is never said ---------------------------------------------------------------------------------------------

NO_NUMBER = re.compile(r"\b(nan|inf|infinity)\b", re.IGNORECASE)
UNBOUNDED = {"memory_s", "uncapped"}
"""Infinite where there is no pool, or no threshold from which fetching pays; null in JSON."""


@settings(max_examples=25, deadline=None)
@given(
    world=st.sampled_from(WORLDS),
    names=st.lists(st.integers(0, 10_000), min_size=1, max_size=5),
    factors=st.lists(
        st.one_of(st.none(), st.just(0.0), st.floats(-12, 12).map(lambda e: 10.0**e)), min_size=5, max_size=5
    ),
    window=st.sampled_from([120.0, 400.0, 3600.0, 3600.0]),
)
def test_no_document_has_what_is_no_number(
    worlds: dict[str, SeriesSet], world: str, names: list[int], factors: list[float | None], window: float
) -> None:
    """Series that are missing, stand still, or are wrong by orders of magnitude."""
    series = worlds[world].last(window)
    known = sorted({one.name for one in series.series})
    wrong = {known[pick % len(known)]: factor for pick, factor in zip(names, factors, strict=False)}

    def spoilt(one: Series) -> list[Series]:
        factor = wrong.get(one.name, 1.0)
        return [] if factor is None else [replace(one, values=one.values * factor)]

    made = document(gather(changed(series, spoilt)))
    jsonschema.validate(made, schema())
    assert NO_NUMBER.search(json.dumps(made, allow_nan=False)) is None
    assert NO_NUMBER.search(render_table(made)) is None


QUANTITY = st.one_of(st.just(0.0), st.floats(-9, 12).map(lambda e: 10.0**e))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_figure_of_an_advice_on_the_ttl_is_nan(short: ttl.TtlInputs, data: st.DataObject) -> None:
    """Whatever evidence there is: also such as no series would give together."""
    draw = data.draw
    edges = short.curves.turns.edges[: draw(st.sampled_from([1, 2, 6, len(short.curves.turns.edges)]))]
    known = st.lists(st.floats(0.0, 1.0), min_size=len(edges) - 1, max_size=len(edges) - 1)
    curves = [Survival(edges, np.cumprod([1.0, *draw(known)])) for _ in range(3)]
    assert short.costs is not None
    costs = ttl.Costs(**{
        field: draw(st.integers(1, 50)) if field == "prefill_engines" else draw(st.one_of(st.just(value), QUANTITY))
        for field, value in asdict(short.costs).items()
    })  # fmt: skip
    one = replace(
        short,
        current_s=draw(st.sampled_from([0.0, 1e-9, 4.0, 480.0, 3600.0, 1e15])),
        margin_s=draw(st.sampled_from([0.0, 5.0, 1e15])),
        conversations=draw(st.sampled_from([0.0, 49.0, 49.0, 49.0])),
        window_s=draw(st.sampled_from([1e-9, 3600.0, 1e9])),
        ends=draw(QUANTITY),
        curves=GapCurves(
            *curves, draw(st.sampled_from([0.0, 150.0, 5000.0, 5000.0])), np.full(len(edges) - 1, draw(QUANTITY))
        ),
        token_rate=draw(QUANTITY),
        token_squared_rate=draw(QUANTITY),
        mean_tokens=draw(QUANTITY),
        pool_tokens=draw(st.sampled_from([None, 1.0, 1.5e6, 5e6, 1e15])),
        usage_p99=draw(st.sampled_from([None, 0.0, 0.3, 0.95, 1.5])),
        active_mean=draw(st.sampled_from([None, 0.0, 1e5, 1e15])),
        active_variance=draw(QUANTITY),
        starved=draw(st.booleans()),
        saving_s_per_token=draw(st.sampled_from([None, 0.0, -1e-3, 2e-5, 1e9])),
        useful=draw(st.floats(0.0, 1.0)),
        ttft_followup_s=draw(st.one_of(st.none(), QUANTITY)),
        costs=draw(st.sampled_from([None, costs])),
    )
    assert list(unsound(asdict(ttl.advise(one)))) == []


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_no_figure_of_an_advice_on_the_threshold_is_nan(varied: threshold.ThresholdInputs, data: st.DataObject) -> None:
    draw = data.draw

    def costs(points: tuple[CostPoint, ...]) -> tuple[CostPoint, ...]:
        kept = draw(st.sampled_from([0, 3, len(points), len(points)]))
        seconds, count = draw(QUANTITY), draw(st.sampled_from([1.0, 1.0, 0.1, 1e12]))
        return tuple(replace(p, seconds=p.seconds * seconds, count=p.count * count) for p in points[:kept])

    sizes = tuple(replace(s, count=s.count * draw(QUANTITY)) for s in varied.fetched)
    one = replace(
        varied,
        current=draw(st.sampled_from([0.0, 0.5, 64.0, 100.5, 5000.0, 1e15])),
        window_s=draw(st.sampled_from([1e-9, 3600.0, 1e9])),
        fetch=costs(varied.fetch),
        recompute=costs(varied.recompute),
        fetched=draw(st.sampled_from([(), varied.fetched, sizes])),
        below=draw(st.sampled_from([None, varied.below])),
        ttft_followup_s=draw(st.one_of(st.none(), QUANTITY)),
    )
    assert list(unsound(asdict(threshold.advise(one)))) == []


def unsound(value: Any, path: str = "") -> Iterator[str]:
    """Figures that are no numbers, in fields or in words."""
    if isinstance(value, dict):
        for name, one in value.items():
            yield from unsound(one, name)
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from unsound(one, path)
    elif isinstance(value, str):
        yield from ([f"{path}: {value}"] if NO_NUMBER.search(value) else [])
    elif value is not None and not (math.isfinite(value) or (path in UNBOUNDED and value == math.inf)):
        yield f"{path}: {value}"
