"""Worlds whose right answer is known: the advice must find it, or say why it cannot."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest

from kvtune_tuning.api import suggest_snapshots
from kvtune_tuning.document import exit_code, schema
from kvtune_tuning.render import render_table

Snapshots = Callable[..., Path]


def widest(document: dict) -> int:
    """Columns of the table, but for what is there to be copied."""
    lines = render_table(document).splitlines()
    return max(len(line) for line in lines if not re.match(r" +(prefill|decode|both|router)  \S|  query ", line))


def advice(directory: Path, **options: object) -> dict:
    """The document, checked against its schema and for JSON safety."""
    document = suggest_snapshots(directory, **options)
    jsonschema.validate(document, schema())
    json.dumps(document, allow_nan=False)
    return document


def ttl(document: dict) -> dict:
    return next(r for r in document["recommendations"] if r["setting"] == "decoder_kv_blocks_ttl")


def tau(document: dict) -> dict:
    return next(r for r in document["recommendations"] if r["setting"] == "kv_recompute_threshold")


def heading(document: dict) -> str:
    """What the table says first, in one line."""
    return " ".join(render_table(document).split("\n\n")[0].split())


def codes(document: dict) -> set[str]:
    return {check["code"] for check in document["checks"]}


def survival_of(gap: Callable[[random.Random], float | None], at: float, n: int = 20_000) -> float:
    rng = random.Random(99)
    return sum(g is None or g > at for g in (gap(rng) for _ in range(n))) / n


PRESSED = {"pool": 1_500_000, "interval": 120.0}
CROWDED = {"interval": 240.0, "conversations_per_s": 0.05, "duration": 2400.0}
"""With a pool of 1.5M tokens, the 99th percentile of only 5 or 10 s of retention fits."""


def test_a_short_pool_lowers_the_ttl_until_the_99th_percentile_fits(snapshots: Snapshots) -> None:
    document = advice(snapshots(**PRESSED))
    one = ttl(document)
    assert one["status"] == "change" and one["reason_code"] == "pool_pressure"
    assert 40 <= one["recommended"] <= 120
    assert one["recommended"] % 5 == 0
    assert one["clamped_by"] == ["waiting"] and one["uncapped"] == one["recommended"]
    assert one["interval"][0] <= one["recommended"] <= one["interval"][1]
    rows = {row["value"]: row for row in one["counterfactual"]}
    assert {480, one["recommended"]} <= set(rows)
    assert rows[one["recommended"]]["pool_share_p99"] <= 1.0 < rows[480]["pool_share_p99"]
    assert rows[480]["ttft_mean_s"] is None, "no mean of today says how long one waits for blocks"
    assert one["effects"]["hit_ratio"]["recommended"] < one["effects"]["hit_ratio"]["current"]
    assert exit_code(document) == 0 and exit_code(document, signal_change=True) == 4


def test_where_the_router_asks_for_the_retention_the_router_is_told(snapshots: Snapshots) -> None:
    document = advice(snapshots(**PRESSED, retain=480.0))
    one = ttl(document)
    assert one["current"] == 480 and not one["current_assumed"]
    assert document["apply"]["engines"] == [] and document["rollback"]["engines"] == []
    assert document["apply"]["router"] == f"--retain {one['recommended']}"
    assert document["rollback"]["router"] == "--retain 480"
    assert "engines stay as they are" in document["apply"]["note"]
    assert any(check["code"] == "asked_by_router" for check in document["checks"])


def test_the_advice_can_be_pasted_and_taken_back(snapshots: Snapshots) -> None:
    document = advice(snapshots(**PRESSED))
    value = ttl(document)["recommended"]
    (engine,) = document["apply"]["engines"]
    assert engine["role"] == "decode"
    assert json.loads(engine["text"]) == engine["kv_transfer_config"]
    assert engine["kv_transfer_config"]["kv_connector_extra_config"]["decoder_kv_blocks_ttl"] == value
    assert document["apply"]["router"] == f"--ttl {value}"
    (back,) = document["rollback"]["engines"]
    assert back["kv_transfer_config"]["kv_connector_extra_config"]["decoder_kv_blocks_ttl"] == 480


def test_the_world_at_the_advised_ttl_fits(snapshots: Snapshots) -> None:
    value = ttl(advice(snapshots(**PRESSED)))["recommended"]
    after = advice(snapshots(**{**PRESSED, "ttl": float(value)}))
    assert after["evidence"]["kv_usage_p99"] < 1.0 and not after["evidence"]["waited_for_kv"]
    assert ttl(after)["current"] == value
    again = ttl(after)
    assert again["status"] == "keep" or abs(again["recommended"] - value) <= 0.5 * value


def test_a_slack_pool_keeps_the_ttl(snapshots: Snapshots) -> None:
    document = advice(snapshots(pool=20_000_000, interval=120.0))
    one = ttl(document)
    assert one["status"] == "keep" and one["recommended"] == 480
    assert one["reason_code"] in ("pool_slack", "gain_too_small", "change_too_small")
    assert document["apply"] is None and document["rollback"] is None
    assert all(row["ttft_mean_s"] is not None for row in one["counterfactual"])


def test_a_short_ttl_on_a_slack_pool_is_raised(snapshots: Snapshots) -> None:
    one = ttl(advice(snapshots(pool=20_000_000, ttl=30.0, interval=120.0)))
    assert one["status"] == "change" and one["reason_code"] == "late_returns"
    assert one["recommended"] >= 240
    gained = one["effects"]["hit_ratio"]
    assert gained["recommended"] - gained["current"] > 0.1


def test_the_gap_curve_is_the_true_one(snapshots: Snapshots, gaps: dict[str, Callable]) -> None:
    document = advice(snapshots(**PRESSED), explain=True)
    for point in document["explain"]["survival"]:
        if 4 <= point["seconds"] <= 480:
            truth = survival_of(gaps["agent"], point["seconds"])
            assert point["turns"] == pytest.approx(truth, abs=0.035)


def test_retained_tokens_are_predicted(snapshots: Snapshots) -> None:
    facts = advice(snapshots(**PRESSED))["evidence"]
    assert facts["kappa"] == pytest.approx(1.0, abs=0.06)
    assert facts["retained_tokens_predicted"] == pytest.approx(facts["retained_tokens_mean"], rel=0.06)


def test_a_router_that_ran_before_gives_the_same_curve(snapshots: Snapshots, gaps: dict[str, Callable]) -> None:
    document = advice(snapshots(**PRESSED, prehistory=4000.0, duration=2400.0), explain=True)
    assert document["evidence"]["extrapolated_before_window"] and "stationarity" in codes(document)
    facts = document["evidence"]
    assert facts["conversations_new"] < facts["conversations"], "those that were going on count too"
    for point in document["explain"]["survival"]:
        if 4 <= point["seconds"] <= 480:
            assert point["turns"] == pytest.approx(survival_of(gaps["agent"], point["seconds"]), abs=0.05)


def test_chat_on_a_short_pool_switches_retention_off(snapshots: Snapshots, gaps: dict[str, Callable]) -> None:
    world = {"pool": 1_000_000, "gap": gaps["chat"], "conversations_per_s": 0.35, "interval": 120.0}
    document = advice(snapshots(**world))
    one = ttl(document)
    assert one["status"] == "off" and one["reason_code"] == "does_not_pay"
    assert one["recommended"] is None
    for engine in document["apply"]["engines"]:
        assert engine["kv_transfer_config"]["kv_connector_extra_config"] == {"bidirectional_kv_xfer": False}


def test_conversations_that_never_return_switch_retention_off(snapshots: Snapshots) -> None:
    world = {"gap": _never, "conversations_per_s": 1.0, "duration": 5400.0, "interval": 300.0, "pool": 500_000_000}
    one = ttl(advice(snapshots(**world)))
    assert one["status"] == "off" and one["reason_code"] == "nobody_returns"


def _never(_: random.Random) -> None:
    return None


def test_too_little_says_how_much_is_missing(snapshots: Snapshots) -> None:
    document = advice(snapshots(conversations_per_s=0.01, duration=900.0, interval=30.0))
    one = ttl(document)
    assert one["status"] == "insufficient" and one["reason_code"] == "too_few_gaps"
    assert one["recommended"] is None and one["retry_after"] > 0
    assert "need 20 and 500" in one["reason"]
    assert exit_code(document) == 3
    # A recording ends with its window: another one as short would say as little.
    whole = 900 + one["retry_after"]
    assert 3600 < one["retry_after"] < whole < 7200
    assert f"it takes about {whole / 60:.3g} min of such traffic in one recording" in render_table(document)
    asked = {**document, "source": {**document["source"], "kind": "prometheus"}}
    assert f"ask again in about {one['retry_after'] / 60:.3g} min" in render_table(asked)


def test_no_traffic_is_insufficient_with_no_date(snapshots: Snapshots) -> None:
    document = advice(snapshots(conversations_per_s=0.0, duration=600.0, interval=60.0))
    assert [r["status"] for r in document["recommendations"]] == ["insufficient", "insufficient"]
    assert all(r["retry_after"] is None for r in document["recommendations"])
    assert exit_code(document) == 3
    assert "insufficient" in render_table(document).lower()


def test_without_the_router_the_ages_of_retentions_tell_the_pauses(snapshots: Snapshots) -> None:
    document = advice(snapshots(**PRESSED, expose_router=False))
    assert document["evidence"]["mode"] == "engines" and "no_router" in codes(document)
    assert ttl(document)["status"] == "change" and ttl(document)["reason_code"] == "pool_pressure"
    assert "mode engines" in heading(document) and "at least" in heading(document)


def test_the_router_alone_says_nothing_of_decodes_settings(snapshots: Snapshots, tmp_path: Path) -> None:
    """What is only assumed is not checked against, and what is not known is said to be so."""
    for file in snapshots(**PRESSED).glob("*-router0.prom"):
        (tmp_path / file.name).write_text(file.read_text())
    document = advice(tmp_path, explain=True)
    levels = {check["code"]: check["level"] for check in document["checks"]}
    assert levels["router_ttl"] == "info" and "router_margin" not in levels
    text = render_table(document)
    assert "fits decode's" not in text and "unknown" not in text and "pool not known" in text
    assert "beta not known yet" in text and "kappa not known yet" in text and "not known yet s" not in text
    for file in tmp_path.iterdir():
        file.write_text(file.read_text().replace('default_ttl_seconds"} 480.0', 'default_ttl_seconds"} 900.0'))
    assert "error" not in {c["level"] for c in advice(tmp_path)["checks"] if c["code"] == "router_ttl"}


def test_the_table_tells_the_measured_from_the_modelled(snapshots: Snapshots, tmp_path: Path) -> None:
    document = advice(snapshots(**PRESSED), explain=True)
    facts, text = document["evidence"], render_table(document)
    rounds = facts["scrape_rounds"]
    assert facts["scrapes"] == 3 * rounds and f"{rounds} rounds of scrapes, 3 target(s)" in text
    assert "measured P99 usage" in text and "modelled at each value" in text
    now = next(row for row in ttl(document)["counterfactual"] if row["value"] == 480)
    said = f"pool P99 now: {100 * now['pool_share_p99']:.1f} % modelled (steady state"
    assert said in text and f"{100 * facts['kv_usage_p99']:.1f} % measured" in text
    for word in ("kappa: tokens that decode", "useful: share", "z = 2.33", "(sigma)"):
        assert word in text, word
    for file in snapshots(**PRESSED).iterdir():
        held = 'setting="margin_seconds"} 5.0\n'
        extra = held + 'kvtune_router_setting{setting="holdout_ratio"} 0.1\n'
        (tmp_path / file.name).write_text(file.read_text().replace(held, extra))
    held_out = advice(tmp_path)
    assert held_out["evidence"]["holdout_ratio"] == 0.1 and "hold-out 10 %)" in render_table(held_out)


def test_without_usage_there_is_no_ttl(snapshots: Snapshots) -> None:
    one = ttl(advice(snapshots(**PRESSED, expose_vllm=False)))
    assert one["status"] == "insufficient" and one["reason_code"] == "missing_series"
    assert "kv_cache_usage_perc" in one["reason"]


def test_assumed_settings_are_said_to_be(snapshots: Snapshots) -> None:
    document = advice(snapshots(expose_settings=False, duration=900.0))
    assert all(r["current_assumed"] for r in document["recommendations"])
    assert "assumed_setting" in codes(document)
    assert "(assumed)" in render_table(document)


@pytest.mark.parametrize(
    ("name", "costs", "truth"),
    [
        ("dense", {}, 0.0209 / (26.9e-6 - 4.55e-6)),
        ("latent", {"b": 101.7e-6, "fixed": 0.2966, "alpha": 0.0200, "beta": 4.5e-6}, 0.0200 / (101.7e-6 - 4.5e-6)),
    ],
)
def test_the_crossing_is_found(
    snapshots: Snapshots, small_answers: dict, name: str, costs: dict[str, float], truth: float
) -> None:
    one = tau(advice(snapshots(**small_answers, **costs)))
    assert one["model"]["crossing_tokens"] == pytest.approx(truth, rel=0.1)
    low, high = one["model"]["crossing_interval"]
    assert low <= truth * 1.05 and high >= truth * 0.95
    assert one["interval"][0] <= truth <= one["interval"][1]
    if name == "dense":
        assert one["status"] == "change" and one["recommended"] == pytest.approx(truth, rel=0.1)
        assert one["recommended"] % 16 == 0
        assert one["model"]["gain_s_per_turn"] > 0.002
    else:
        assert one["status"] == "keep" and one["reason_code"] == "gain_too_small"
        assert one["recommended"] == 64


def test_a_slow_link_switches_reading_back_off(snapshots: Snapshots, small_answers: dict) -> None:
    document = advice(snapshots(**small_answers, b=3e-6))
    assert tau(document)["status"] == "off" and tau(document)["reason_code"] == "fetch_never_pays"


def test_whole_histories_make_every_threshold_equivalent(snapshots: Snapshots) -> None:
    one = tau(advice(snapshots(**PRESSED)))
    assert one["status"] == "keep" and one["reason_code"] == "nothing_fetchable_between"
    assert one["interval"][0] == 64 and one["interval"][1] >= 8192
    assert "nothing fetchable lies between" in one["reason"]


def test_one_narrow_range_of_sizes_is_not_identifiable(snapshots: Snapshots) -> None:
    one = tau(advice(snapshots(local_hits=True, pool=20_000_000, interval=120.0)))
    assert one["status"] == "unidentifiable" and one["reason_code"] == "fetch_range_too_narrow"
    assert one["recommended"] is None
    assert "lower the threshold to 16" in one["reason"] and "let the router explore" in one["reason"]


NARROW = {"local_hits": True, "pool": 20_000_000, "interval": 240.0, "duration": 7200.0, "threshold": 256}
"""Answers of 60 to 500 tokens: about half of them below the threshold."""


def test_exploration_shows_what_a_threshold_hides(snapshots: Snapshots) -> None:
    """The same traffic: refused without, and with it the crossing is found, from the same composition of sizes."""
    hidden, document = advice(snapshots(**NARROW)), advice(snapshots(**NARROW, explore=0.05), explain=True)
    assert tau(hidden)["reason_code"] == "fetch_range_too_narrow" and tau(hidden)["retry_after"] is None
    assert hidden["evidence"]["explored"] == {"fetch": 0, "recompute": 0} and not hidden["evidence"]["explore_ratio"]
    assert document["evidence"]["explore_ratio"] == 0.05
    assert all(50 < count < 200 for count in document["evidence"]["explored"].values())
    one = tau(document)
    assert (one["status"], one["reason_code"]) == ("change", "fetching_small_is_slow"), one["reason"]
    assert one["model"]["crossing_tokens"] == pytest.approx(0.0209 / (26.9e-6 - 4.55e-6), rel=0.15)
    low, high = one["model"]["gain_interval_s"]
    assert 0.002 < low <= one["model"]["gain_s_per_turn"] <= high < 0.02
    rows = {row["value"]: row for row in one["counterfactual"]}
    # answers of 60 to 499 tokens, all equally likely
    for value, share in ((128, 371 / 439), (256, 244 / 439), (512, 0.0)):
        assert rows[value]["fetched_share"] == pytest.approx(share, abs=0.06)
    seen = [line for line in document["explain"]["threshold"] if line.startswith("near")]
    assert len(seen) >= 2 and not any("contradicted" in line for line in seen), seen


def test_everything_below_the_threshold_is_not_identifiable(snapshots: Snapshots) -> None:
    one = tau(advice(snapshots(local_hits=True, pool=20_000_000, interval=120.0, threshold=1024)))
    assert one["status"] == "unidentifiable" and one["reason_code"] == "fetch_not_observed"
    assert "lower the threshold" in one["reason"]


def test_reuse_switched_off_is_insufficient_for_the_threshold(snapshots: Snapshots) -> None:
    one = tau(advice(snapshots(reuse=False, duration=1800.0, interval=60.0)))
    assert one["status"] == "insufficient"


def test_replicas_change_nothing(snapshots: Snapshots, tmp_path: Path) -> None:
    """The same router counters split over two replicas give the same document."""
    whole = snapshots(**PRESSED)
    split = tmp_path / "split"
    split.mkdir()
    for file in whole.iterdir():
        text = file.read_text()
        if not file.name.endswith("-router0.prom"):
            (split / file.name).write_text(text)
            continue
        for name, share in (("a", 0.25), ("b", 0.75)):
            (split / file.name.replace("router0", name)).write_text(_scaled(text, share))
    _alike(advice(whole), advice(split))


def test_two_decode_engines_are_advised_for_one_of_them(snapshots: Snapshots, tmp_path: Path) -> None:
    """Half the pool and half the turns each: the mean halves, the spread does not, so the TTL can only be shorter."""
    whole = snapshots(**PRESSED)
    for file in whole.iterdir():
        text = file.read_text()
        if not file.name.endswith("-d.prom"):
            (tmp_path / file.name).write_text(text)
            continue
        pool = 'kvtune_connector_setting{engine="d0",model_name="m",role="decode",setting="kv_pool_tokens"'
        half = _scaled(text, 0.5, gauges=("kvtune_retained_tokens", pool))
        (tmp_path / file.name).write_text(half)
        (tmp_path / file.name.replace("-d.", "-e.")).write_text(half.replace('"d0"', '"e0"'))
    one, two = advice(whole), advice(tmp_path)
    assert two["evidence"]["decode_engines"] == 2 and two["evidence"]["pool_tokens"] == 750_000
    assert "pool 750.0k tokens each" in heading(two) and "each" not in heading(one)
    for file in tmp_path.glob("*-e.prom"):
        file.write_text(file.read_text().replace('kv_pool_tokens"} 750000.0', 'kv_pool_tokens"} 740000.0'))
    assert "tokens on the tightest" in heading(advice(tmp_path))
    assert two["evidence"]["kappa"] == pytest.approx(one["evidence"]["kappa"], rel=0.02)
    assert ttl(two)["status"] == "change" and 15 <= ttl(two)["recommended"] < ttl(one)["recommended"]


def test_a_counter_reset_changes_nothing(snapshots: Snapshots, tmp_path: Path) -> None:
    """Counters that start again from zero in the middle give the same advice, and say so."""
    whole = snapshots(**PRESSED)
    reset = tmp_path / "reset"
    reset.mkdir()
    files = sorted(whole.iterdir())
    base: dict[str, str] = {}
    middle = files[len(files) // 2].name.split("-")[0]
    for file in files:
        when, target = file.name.split("-", 1)
        if when < middle:
            base[target] = file.read_text()
            (reset / file.name).write_text(file.read_text())
        else:
            (reset / file.name).write_text(_less(file.read_text(), base[target]))
    before, after = advice(whole), advice(reset)
    _alike(before, after)
    assert not before["evidence"]["restarts"] and "restarts" not in codes(before)
    assert set(after["evidence"]["restarts"]) == {"d", "p", "router0"} and "restarts" in codes(after)


def _counter(line: str) -> bool:
    name = line.split("{")[0].split(" ")[0]
    return not line.startswith("#") and name.endswith(("_total", "_bucket", "_count", "_sum"))


def _scaled(text: str, share: float, gauges: tuple[str, ...] = ()) -> str:
    lines = []
    for line in text.splitlines():
        if _counter(line) or (gauges and line.startswith(gauges)):
            key, value = line.rsplit(" ", 1)
            line = f"{key} {float(value) * share!r}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def _less(text: str, base: str) -> str:
    start = {k: float(v) for k, v in (line.rsplit(" ", 1) for line in base.splitlines() if _counter(line))}
    lines = []
    for line in text.splitlines():
        if _counter(line):
            key, value = line.rsplit(" ", 1)
            line = f"{key} {float(value) - start.get(key, 0.0)!r}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def _alike(a: dict, b: dict) -> None:
    for one, other in zip(a["recommendations"], b["recommendations"], strict=True):
        for key in ("status", "recommended", "reason_code", "clamped_by"):
            assert one[key] == other[key]
        for row, twin in zip(one["counterfactual"], other["counterfactual"], strict=True):
            for key, value in row.items():
                assert twin[key] == value or math.isclose(twin[key], value, rel_tol=0.02), key
    for key in ("turns", "conversations", "gaps", "turn_ends"):
        assert a["evidence"][key] == pytest.approx(b["evidence"][key], rel=1e-6)


def test_a_restarted_deployment_is_still_advised(snapshots: Snapshots) -> None:
    document = advice(snapshots(**PRESSED, restart_at=1830.0))
    assert ttl(document)["status"] == "change" and 40 <= ttl(document)["recommended"] <= 120
    assert "restarts" in codes(document)


def test_a_pod_that_takes_anothers_place_is_one_engine(snapshots: Snapshots, tmp_path: Path) -> None:
    restarted = snapshots(**PRESSED, restart_at=1830.0)
    for file in restarted.iterdir():
        ms, _, target = file.name.partition("-")
        later = int(ms) / 1000 > 1_700_000_000 + 1830
        name = target.replace(".prom", "-b.prom") if later and target in ("d.prom", "p.prom") else target
        (tmp_path / f"{ms}-{name}").write_bytes(file.read_bytes())
    one, other = advice(restarted), advice(tmp_path)
    assert other["evidence"]["targets"]["decode"] == ["d", "d-b"]
    assert other["evidence"]["decode_engines"] == one["evidence"]["decode_engines"] == 1
    for name in ("kappa", "retained_tokens_mean", "pool_tokens"):
        assert other["evidence"][name] == pytest.approx(one["evidence"][name], rel=0.15), name
    assert ttl(other)["status"] == "change"
    assert ttl(other)["recommended"] == pytest.approx(ttl(one)["recommended"], abs=25)


@pytest.mark.parametrize(
    ("world", "status", "code"),
    [
        ({"ttl": 5.0, "pool": 20_000_000}, "change", "late_returns"),
        ({"ttl": 7200.0, "pool": 50_000_000}, "keep", "pool_slack"),
        ({"ttl": 7200.0, "pool": 1_500_000}, "change", "pool_pressure"),
        ({"pool": 60_000, "active": 10_000.0}, "off", "does_not_pay"),
        ({**CROWDED, "ttl": 10.0}, "keep", "pressure_not_from_retention"),
        ({**CROWDED, "ttl": 7.0}, "change", "late_returns"),
        ({**CROWDED, "ttl": 5.0}, "keep", "floor_does_not_fit"),
        ({**CROWDED, "ttl": 4.0}, "keep", "floor_does_not_fit"),
        ({**CROWDED, "ttl": 480.0}, "change", "pool_pressure"),
        # prefill cannot carry the traffic without reuse: 35 s wait for room, 0 s for a queue that never empties
        ({**CROWDED, "ttl": 480.0, "pool": 800_000}, "change", "pool_pressure"),
    ],
)
def test_settings_and_pools_at_the_edges(snapshots: Snapshots, world: dict, status: str, code: str) -> None:
    document = advice(snapshots(**{**PRESSED, **world}), explain=True)
    assert widest(document) <= 100
    assert (ttl(document)["status"], ttl(document)["reason_code"]) == (status, code), ttl(document)["reason"]
    assert ("ttl_useless" in codes(document)) == (world.get("ttl", 480.0) <= 5.0)
    if code in ("floor_does_not_fit", "does_not_fit"):
        assert ttl(document)["clamped_by"] == ["memory", "floor"] and "has room" not in ttl(document)["reason"]


@pytest.mark.parametrize("value", ["0", "0.5", "100.5", "200000", "1e7"])
def test_any_threshold_in_force_is_compared_with(
    snapshots: Snapshots, small_answers: dict, tmp_path: Path, value: str
) -> None:
    document = advice(_with_setting(snapshots(**small_answers), tmp_path, "kv_recompute_threshold", value))
    one = tau(document)
    assert one["status"] == "change" and one["effects"]
    assert {one["current"], one["recommended"]} <= {row["value"] for row in one["counterfactual"]}
    assert widest(document) <= 100


@pytest.mark.parametrize("value", ["1e7", "1e9", "1e15"])
def test_a_huge_ttl_in_force_is_answered_at_once(snapshots: Snapshots, tmp_path: Path, value: str) -> None:
    began = time.process_time()
    document = advice(_with_setting(snapshots(**PRESSED), tmp_path, "decoder_kv_blocks_ttl", value), explain=True)
    assert time.process_time() - began < 10
    assert ttl(document)["status"] == "change" and ttl(document)["current"] == float(value)
    text = render_table(document)
    assert widest(document) <= 100 and "e+" not in text.split("explain")[0]


def _with_setting(source: Path, target: Path, setting: str, value: str) -> Path:
    for file in source.iterdir():
        lines = file.read_text().splitlines()
        lines = [f"{x.rsplit(' ', 1)[0]} {value}" if f'setting="{setting}"' in x else x for x in lines]
        (target / file.name).write_text("\n".join(lines) + "\n")
    return target


def test_a_threshold_of_zero_is_a_setting_too(snapshots: Snapshots) -> None:
    one = tau(advice(snapshots(**PRESSED, threshold=0)))
    assert one["current"] == 0 and not one["current_assumed"] and one["status"] == "keep"


def test_the_window_can_be_cut(snapshots: Snapshots) -> None:
    document = advice(snapshots(**PRESSED), window_s=1800.0)
    assert document["window"]["seconds"] == pytest.approx(1800.0)
    assert document["evidence"]["turns"] < advice(snapshots(**PRESSED))["evidence"]["turns"]


def test_settings_that_differ_or_change_are_named(snapshots: Snapshots, tmp_path: Path) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(snapshots(**PRESSED), copied)
    files = sorted(copied.glob("*-d.prom"))
    setting = 'setting="decoder_kv_blocks_ttl"} 480.0'
    for file in files[: len(files) // 2]:
        text = file.read_text()
        assert setting in text
        file.write_text(text.replace(setting, setting.replace("480", "240")))
    for file in sorted(copied.glob("*-router0.prom")):
        file.write_text(file.read_text().replace('default_ttl_seconds"} 480.0', 'default_ttl_seconds"} 900.0'))
    for file in files:
        (copied / file.name.replace("-d", "-e")).write_text(
            file.read_text().replace('"d0"', '"e0"').replace("480", "60")
        )
    found = codes(advice(copied))
    assert {"setting_changed", "router_ttl", "mixed_settings"} <= found
    levels = {c["code"]: c["level"] for c in advice(copied)["checks"]}
    assert levels["router_ttl"] == "warning"


def test_whole_pages_of_the_real_recorders_are_read_the_same(snapshots: Snapshots) -> None:
    world = {"pool": 1_500_000, "interval": 600.0}
    few, all_of_it = advice(snapshots(**world)), advice(snapshots(**world, whole_pages=True))
    assert few["recommendations"] == all_of_it["recommendations"]
    assert few["evidence"] == all_of_it["evidence"]


def test_the_table_fits_100_columns(snapshots: Snapshots, small_answers: dict) -> None:
    for document in (advice(snapshots(**PRESSED), explain=True), advice(snapshots(**small_answers))):
        text = render_table(document)
        assert widest(document) <= 100
        assert "decoder_kv_blocks_ttl" in text and "kv_recompute_threshold" in text
        assert "\x1b" not in text and "\x1b" in render_table(document, color=True)


def test_what_is_there_to_be_copied_is_never_broken(snapshots: Snapshots) -> None:
    document = advice(snapshots(**PRESSED), explain=True)
    long = {"kv_connector_extra_config": {"decoder_kv_blocks_ttl": 60, **{f"key_{n}": n for n in range(20)}}}
    text, query = json.dumps(long), "increase(" + "kvtune_a_name_of_a_series:" * 20 + "[1h])"
    for title in ("apply", "rollback"):
        document[title] = {
            "engines": [{"role": "decode", "text": text}], "router": "--ttl 60 " + "--x y " * 40, "note": "prose " * 40,
        }  # fmt: skip
    document["explain"]["queries"] = [query]
    for color in (False, True):
        lines = render_table(document, color=color).splitlines()
        assert [line.strip() for line in lines].count(f"decode  {text}") == 2
        assert [line.strip() for line in lines].count("router  " + ("--ttl 60 " + "--x y " * 40).strip()) == 2
        assert f"  query {query}" in lines
    assert json.loads(next(line for line in lines if text in line).split("decode  ")[1]) == long
