"""Series that are missing, cut, contradictory or no counters: never another number, or `off`, without a word."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from kvtune_telemetry.buckets import GAP_SECONDS
from kvtune_tuning import certainty, ttl
from kvtune_tuning.api import suggest_series, suggest_snapshots
from kvtune_tuning.document import schema
from kvtune_tuning.evidence import histograms
from kvtune_tuning.gaps import GapCurves, Survival
from kvtune_tuning.names import CATALOGUED
from kvtune_tuning.render import render_table
from kvtune_tuning.series import Series, SeriesSet
from kvtune_tuning.sources import read_snapshots
from kvtune_tuning.stock import Stated

Snapshots = Callable[..., Path]
WORLDS: dict[str, dict[str, object]] = {
    "pressed": {"pool": 1_500_000, "interval": 120.0},
    "slack": {"pool": 20_000_000, "interval": 120.0},
    "raised": {"pool": 20_000_000, "ttl": 30.0, "interval": 120.0},
}
PARTS = ("_bucket", "_sum", "_count")
NEAR = 0.15
"""Advice that differs by less is the same: it would not be worth a change."""


@pytest.fixture(autouse=True)
def _few_draws(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Intervals are not what these tests are about."""
    monkeypatch.setattr(ttl, "_DRAWS", 20)
    yield


@pytest.fixture(scope="module")
def worlds(snapshots: Snapshots) -> dict[str, SeriesSet]:
    return {name: read_snapshots(snapshots(**world)) for name, world in WORLDS.items()}


def suggest(series: SeriesSet, keep: Callable[[Series], bool] = lambda s: True) -> dict:
    left = SeriesSet(tuple(s for s in series.series if keep(s)), series.scrapes)
    document = suggest_series(left, {"kind": "snapshot", "where": []})
    jsonschema.validate(document, schema())
    return document


def same(one: dict, other: dict) -> bool:
    if one["status"] != other["status"] or one["current"] != other["current"]:
        return False
    pair = one["recommended"], other["recommended"]
    return pair[0] == pair[1] or (None not in pair and math.isclose(*pair, rel_tol=NEAR))


def holds(whole: dict, document: dict, names: list[str]) -> None:
    """Each recommendation is the same, or says what it lacks; `off` never rests on what is missing."""
    said = [check["message"] for check in document["checks"]]
    for before, after in zip(whole["recommendations"], document["recommendations"], strict=True):
        if same(before, after):
            continue
        assert after["status"] != "off", after["reason"]
        text = " ".join((after["reason"], *said))
        assert any(name in text for name in names), (names, after["reason"])
        if after["status"] == "insufficient":
            assert after["recommended"] is None


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", CATALOGUED)
def test_without_a_family_the_advice_is_the_same_or_says_so(
    worlds: dict[str, SeriesSet], world: str, name: str
) -> None:
    holds(suggest(worlds[world]), suggest(worlds[world], lambda s: s.name != name), [name])


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("part", PARTS)
def test_without_one_part_of_all_histograms_the_advice_is_the_same_or_says_so(
    worlds: dict[str, SeriesSet], world: str, part: str
) -> None:
    names = [name for name in CATALOGUED if name.endswith(part)]
    holds(suggest(worlds[world]), suggest(worlds[world], lambda s: not s.name.endswith(part)), names)


@pytest.mark.parametrize(
    ("name", "ttl_code", "tau_code"),
    [
        ("kvtune_turn_gap_tokens_bucket", "missing_series", None),
        ("kvtune_turn_gap_seconds_bucket", "missing_series", None),
        ("kvtune_turn_gap_tokens_squared_bucket", "missing_series", None),
        ("kvtune_turn_ends_total", "missing_series", None),
        ("kvtune_turn_end_tokens_total", "missing_series", None),
        ("kvtune_turn_end_tokens_squared_total", "missing_series", None),
        ("kvtune_retained_tokens", "missing_series", None),
        ("kvtune_conversations_total", "missing_series", None),
        ("kvtune_router_setting", "missing_series", None),
        ("kvtune_path_seconds_total", None, "missing_series"),
        ("kvtune_path_tokens_total", None, "missing_series"),
        ("kvtune_path_observations_total", None, "missing_series"),
        ("kvtune_decisions_total", None, "missing_series"),
        ("kvtune_decision_tokens_total", "missing_series", "missing_series"),
    ],
)
def test_what_one_recommendation_needs_does_not_sink_the_other(
    worlds: dict[str, SeriesSet], name: str, ttl_code: str | None, tau_code: str | None
) -> None:
    whole, document = suggest(worlds["pressed"]), suggest(worlds["pressed"], lambda s: s.name != name)
    pairs = zip(whole["recommendations"], document["recommendations"], (ttl_code, tau_code), strict=True)
    for before, after, code in pairs:
        if code is None:
            assert after["status"] in (before["status"], "insufficient") and after["reason_code"] != "missing_series"
        else:
            assert (after["status"], after["reason_code"]) == ("insufficient", code)
            assert name in after["reason"] and after["counterfactual"] == []


@pytest.mark.parametrize("junk", ["NaN", "abc", ""])
def test_buckets_without_edges_are_missing(worlds: dict[str, SeriesSet], junk: str) -> None:
    series = worlds["pressed"]
    spoilt = tuple(
        replace(s, labels=frozenset((k, junk if k == "le" else v) for k, v in s.labels)) for s in series.series
    )
    one = suggest(SeriesSet(spoilt, series.scrapes))["recommendations"][0]
    assert (one["status"], one["reason_code"]) == ("insufficient", "missing_series")
    assert "kvtune_turn_gap_seconds_bucket" in one["reason"]


def test_what_falls_all_the_time_is_no_counter(worlds: dict[str, SeriesSet]) -> None:
    series = worlds["pressed"]
    fallen = tuple(
        replace(s, values=1e9 - s.values) if s.name == "kvtune_turn_end_tokens_total" else s for s in series.series
    )
    document = suggest(SeriesSet(fallen, series.scrapes))
    assert document["recommendations"][0]["reason_code"] == "missing_series"
    assert "not_a_counter" in {check["code"] for check in document["checks"]}


def test_hits_and_reads_contradict_that_nobody_returns(worlds: dict[str, SeriesSet]) -> None:
    series = worlds["pressed"]
    flat = tuple(
        replace(s, values=np.zeros_like(s.values)) if s.name.startswith("kvtune_turn_gap") else s for s in series.series
    )
    one = suggest(SeriesSet(flat, series.scrapes))["recommendations"][0]
    assert (one["status"], one["reason_code"]) == ("insufficient", "contradicting_series"), one["reason"]
    assert "hits" in one["reason"]


# --- edges ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("only", ["", "kvtune_turn_gap_tokens_bucket"])
@pytest.mark.parametrize("edge", [*GAP_SECONDS, math.inf])
def test_a_missing_edge_moves_no_mass(worlds: dict[str, SeriesSet], edge: float, only: str) -> None:
    names = ("kvtune_turn_gap_seconds_bucket", "kvtune_turn_gap_tokens_bucket")
    series = worlds["pressed"]
    left = tuple(
        s for s in series.series
        if not (s.name.startswith(only or "kvtune_turn_gap") and float(s.label("le") or "nan") == edge)
    )  # fmt: skip
    whole, cut = histograms(series, names), histograms(SeriesSet(left, series.scrapes), names)
    assert cut.merged == (() if math.isinf(edge) else (edge,)) and cut.unusable == ()
    for before, after in zip(whole.counts, cut.counts, strict=True):
        upto = dict(zip(whole.edges, np.cumsum(before), strict=False))
        for e, count in zip(cut.edges, np.cumsum(after), strict=False):
            assert count == pytest.approx(upto[e], rel=1e-9)
        if not math.isinf(edge):
            assert after.sum() == pytest.approx(before.sum())


def test_a_missing_edge_is_said_and_changes_little(worlds: dict[str, SeriesSet]) -> None:
    whole = suggest(worlds["pressed"])
    document = suggest(worlds["pressed"], lambda s: s.label("le") not in ("60.0", "60"))
    assert same(whole["recommendations"][0], document["recommendations"][0])
    told = [check["message"] for check in document["checks"] if check["code"] == "bucket_edges"]
    assert len(told) == 1 and "60 s" in told[0]


def test_an_edge_that_came_late_is_not_believed(worlds: dict[str, SeriesSet]) -> None:
    """Its whole history then looks like an increment; the buckets beside it say that it is none."""
    series = worlds["pressed"]
    name = "kvtune_turn_gap_seconds_bucket"
    high = tuple(
        replace(s, values=s.values * 50.0) if s.name == name and s.label("le") in ("60.0", "60") else s
        for s in series.series
    )
    found = histograms(SeriesSet(high, series.scrapes), (name,))
    assert found.merged == (60.0,)
    assert found.counts[0].sum() == histograms(series, (name,)).counts[0].sum()


# --- few returns ----------------------------------------------------------------------------------------------------


def rare(share: float, turns: float = 5000.0, **changes: object) -> ttl.TtlInputs:
    edges = np.array((0.0, *GAP_SECONDS))
    curve = Survival(edges, 1.0 - share * np.minimum(1.0, edges / 300.0))
    curves = GapCurves(curve, curve, curve, share * turns, np.full(len(GAP_SECONDS), turns))
    base = ttl.TtlInputs(
        current_s=480.0, margin_s=5.0, conversations=turns, window_s=86400.0, ends=turns, curves=curves,
        token_rate=4000.0, token_squared_rate=4000.0 * 40_000.0, mean_tokens=40_000.0, pool_tokens=3_000_000.0,
        usage_p99=0.5, active_mean=100_000.0, active_variance=1e8, starved=False, kappa=1.0,
        saving_s_per_token=22e-6, useful=1.0, ttft_followup_s=0.5,
    )  # fmt: skip
    return replace(base, **changes)


@pytest.mark.parametrize(
    ("inputs", "status", "code"),
    [
        (rare(0.015, usage_p99=1.0, starved=True), "off", "hardly_returns"),
        (rare(0.015, usage_p99=1.0, starved=True, saving_s_per_token=None), "off", "hardly_returns"),
        (rare(0.015), "keep", "hardly_returns"),
        (rare(0.0, turns=600.0), "keep", "hardly_returns"),
        (rare(0.09, usage_p99=1.0), "insufficient", "too_few_gaps"),
        (rare(0.015, turns=300.0), "insufficient", "too_few_gaps"),
        (rare(0.015, conversations=19.0), "insufficient", "too_few_gaps"),
    ],
)
def test_few_returns_of_many_turns_are_an_answer(inputs: ttl.TtlInputs, status: str, code: str) -> None:
    inputs = replace(inputs, curves=replace(inputs.curves, returned=min(99.0, inputs.curves.returned)))
    plain = replace(ttl.advise(inputs), status="insufficient", reason_code="too_few_gaps", reason="cannot tell")
    one = certainty.settled(inputs, plain)
    assert (one.status, one.reason_code) == (status, code), one.reason


def test_one_shot_traffic_gets_a_next_step() -> None:
    few = rare(0.0, turns=250.0, window_s=3600.0)
    few = replace(few, curves=replace(few.curves, exposure=np.full(len(GAP_SECONDS), 200.0)))
    one = certainty.settled(few, ttl.advise(few))
    assert one.status == "insufficient" and "0 of 250 turns came back" in one.reason and "no_identity" in one.reason
    assert one.retry_after_s == 7200 + 475 - 3600


@pytest.mark.parametrize(("returned", "turns"), [(0.0, 5400.0), (54.0, 5400.0), (10.0, 500.0)])
def test_the_most_that_may_come_back_is_wilsons(returned: float, turns: float) -> None:
    n, p = turns / ttl.DESIGN_EFFECT, returned / turns
    most = certainty.share_at_most(returned, turns)
    # the bound solves (most - p)^2 = z^2 most (1 - most) / n
    assert (most - p) ** 2 == pytest.approx(1.645**2 * most * (1 - most) / n, rel=1e-6) and most > p


# --- sure gains -----------------------------------------------------------------------------------------------------


def test_a_window_shorter_than_the_ttl_lowers_nothing_that_could_harm() -> None:
    edges = np.array((0.0, *GAP_SECONDS))[:20]
    curve = Survival(edges, 0.3 + 0.7 * np.exp(-edges / 20.0))
    curves = GapCurves(curve, curve, curve, 304.0, np.full(len(edges) - 1, 300.0))
    young = rare(0.0, window_s=300.0, ends=434.0, conversations=60.0, usage_p99=1.0, starved=True, curves=curves,
                 token_rate=40_000.0, token_squared_rate=40_000.0 * 40_000.0, pool_tokens=5_000_000.0)  # fmt: skip
    short = Survival(edges[:16], curve.values[:16])
    young = replace(
        young, curves=replace(curves, turns=short, tokens=short, tokens_squared=short, exposure=curves.exposure[:15])
    )
    plain = ttl.advise(young)
    assert plain.status == "change" and plain.recommended is not None and plain.recommended < 480
    one = certainty.settled(young, plain)
    assert (one.status, one.reason_code, one.retry_after_s) == ("insufficient", "gain_not_certain", 185)
    assert "shorter than the TTL" in one.reason
    assert certainty.settled(replace(young, window_s=3600.0), plain).status == "change"


def test_a_change_without_an_interval_says_why(worlds: dict[str, SeriesSet]) -> None:
    one = suggest(worlds["raised"])["recommendations"][0]
    assert one["status"] == "change" and one["recommended"] > one["current"]
    lowered = suggest(worlds["pressed"])["recommendations"][0]
    assert (lowered["interval"] is None) == (lowered["model"]["no_interval"] is not None)
    low, high = lowered["model"]["gain_interval_s"]
    assert low < lowered["model"]["gain_s_per_turn"] < high


def test_what_buys_nothing_is_said_to() -> None:
    idle = rare(0.6, useful=0.001, ends=5000.0)
    idle = replace(idle, curves=replace(idle.curves, returned=3000.0))
    one = certainty.settled(idle, ttl.advise(idle))
    assert one.status == "keep" and "retention buys nothing here" in one.reason and one.clamped_by == ()


# --- what the table says ----------------------------------------------------------------------------------------------


def test_under_pressure_the_table_has_the_models_differences(worlds: dict[str, SeriesSet]) -> None:
    document = suggest(worlds["pressed"])
    rows = {row["value"]: row for row in document["recommendations"][0]["counterfactual"]}
    assert rows[480]["ttft_change_s"] == 0 and rows[480]["ttft_mean_s"] is None
    advised = document["recommendations"][0]["recommended"]
    assert rows[advised]["ttft_change_s"] == pytest.approx(
        -document["recommendations"][0]["model"]["gain_s_per_turn"], rel=1e-4
    )
    text = render_table(document)
    assert "TTFT to now" in text and "in time   of returning" in text and "reused" not in text
    assert "pinned is at most" in text


# --- files and statements ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spoil", [b"\x80\x81\xff", b"<html>login</html>\n", b"kvtune_turns_total{outc", b"kvtune_turn_ends_total 1 2 3\n"]
)
def test_one_damaged_file_among_many_is_skipped(snapshots: Snapshots, tmp_path: Path, spoil: bytes) -> None:
    shutil.copytree(snapshots(**WORLDS["pressed"]), tmp_path, dirs_exist_ok=True)
    victim = sorted(tmp_path.glob("*-d.prom"))[7]
    victim.write_bytes(spoil)
    document = suggest_snapshots(tmp_path)
    told = [check["message"] for check in document["checks"] if "damaged" in check["message"]]
    assert len(told) == 1 and victim.name in told[0] and "1 of 31" in told[0]
    assert same(suggest_snapshots(snapshots(**WORLDS["pressed"]))["recommendations"][0], document["recommendations"][0])
    for file in sorted(tmp_path.glob("*-d.prom"))[:9]:
        file.write_bytes(spoil)
    assert suggest_snapshots(tmp_path)["error"]["code"] == "not_an_exposition"


@pytest.mark.parametrize(("value", "code"), [(100.0, "stated_differs"), (480.0, "stated_needless")])
def test_a_setting_that_is_stated_needlessly_is_said_to(worlds: dict[str, SeriesSet], value: float, code: str) -> None:
    document = suggest_series(worlds["slack"], {"kind": "snapshot", "where": []}, stated=Stated(ttl_s=value))
    (told,) = (check["message"] for check in document["checks"] if check["code"] == code)
    assert f"--current-ttl {value:g}" in told and document["recommendations"][0]["current"] == 480
