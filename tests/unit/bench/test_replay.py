"""The replay against worlds whose answer is known, its observer's books, and `kvtune simulate`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from loguru import logger
from typer.testing import CliRunner

from kvtune_bench.calibration import Calibration, Line
from kvtune_bench.replay import policies
from kvtune_bench.replay.charts import draw
from kvtune_bench.replay.model import Deployment, Load, ReplayError, Result, Setting
from kvtune_bench.replay.observe import InMemory, ObservedDeployment, quiet, to_directory
from kvtune_bench.replay.run import LESSONS, Request, simulate
from kvtune_bench.replay.simulator import Replay
from kvtune_bench.replay.table import render
from kvtune_bench.traces import Conversation, Plan, TraceTurn, plan
from kvtune_tuning.api import suggest_series, suggest_snapshots
from kvtune_tuning.series import SeriesSet


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Replays book thousands of turns; their log lines say nothing here."""
    quiet()
    yield
    logger.enable("kvtune_telemetry")


FLAT = Calibration(
    name="flat", source="a test", prefill=Line(0.0, 1e-3), transfer=Line(0.0, 1e-4), handoff=Line(0.5, 0.0),
    decode_token_s=0.01, bytes_per_token=1, pool_tokens=10_000, context_tokens=10_000,
)  # fmt: skip


def talk(gap_s: float | None, turns: int = 2, tokens: int = 900, keeps: bool = True) -> Plan:
    """Turns of growing prompts; 100 tokens of answer take a second."""
    rows = []
    prompt = tokens
    for number in range(turns):
        last = number == turns - 1
        rows.append(TraceTurn(prompt, 100, None if last else gap_s, 0 if last or not keeps else prompt + 100))
        prompt += 200
    return plan([Conversation(0, tuple(rows))], context_limit=FLAT.context_tokens)[0]


def replayed(plans: list[Plan], ttl_s: float = 60.0, *, rate: float = 0.02, pool: int = 10**9, **more: Any) -> Result:
    deployment = Deployment(FLAT, pool, noise=0.0, prefill_engines=more.pop("prefill_engines", 100))
    setting = Setting(ttl_s, more.pop("threshold", 64), more.pop("holds", None))
    load = Load(rate, duration_s=more.pop("duration_s", 40_000.0), warmup_s=1000.0, seed=more.pop("seed", 3))
    return Replay(plans, deployment, setting, load, **more).run()


def test_a_return_in_time_is_fetched_and_saves_what_it_should() -> None:
    result = replayed([talk(30.0)])
    # first turn: 0.9 s prefill, 0.5 s hand-off; second: 0.1 s fetch, 0.1 s prefill of 100 new tokens, 0.5 s
    assert set(map(lambda s: round(s, 6), result.ttft_s)) == {1.4, 0.7}
    assert result.hits == result.followups > 300
    assert result.outcomes["first"] + result.outcomes["hit"] == result.turns


@pytest.mark.parametrize(
    ("gap_s", "outcome"), [(53.9, "hit"), (54.1, "expired"), (59.0, "expired"), (3000.0, "expired")]
)
def test_the_margins_end_the_usable_life(gap_s: float, outcome: str) -> None:
    assert replayed([talk(gap_s)]).outcomes.keys() == {"first", outcome}


def test_a_rewritten_history_is_released_and_computed() -> None:
    result = replayed([talk(30.0, keeps=False)])
    assert set(result.outcomes) == {"first", "rewritten"} and result.hits == 0
    assert set(map(lambda s: round(s, 6), result.ttft_s)) == {1.4, 1.6}


def test_below_the_threshold_nothing_is_fetched() -> None:
    fetched, computed = replayed([talk(30.0)], threshold=1000), replayed([talk(30.0)], threshold=1001)
    assert min(fetched.ttft_s) < 0.71 and min(computed.ttft_s) > 1.39


def test_reused_is_what_was_fetched_or_held_by_prefill_not_what_could_have_been() -> None:
    unread, nothing = replayed([talk(30.0)], threshold=1001), replayed([talk(30.0)], ttl_s=0.0)
    assert unread.followups > 300 and unread.hit_ratio == nothing.hit_ratio == 0.0 and unread.used_token_s == 0.0
    # the router's outcome is of the reference, which was good
    assert unread.outcomes["hit"] >= unread.followups and unread.ttft_mean_s == nothing.ttft_mean_s
    held = Replay(
        [talk(30.0)], Deployment(FLAT, 10**9, noise=0.0, prefill_engines=100, prefill_cache=True), Setting(0.0),
        Load(0.02, duration_s=40_000.0, warmup_s=1000.0),
    ).run()  # fmt: skip
    assert held.hit_ratio == 1.0 and held.outcomes.keys() == {"first", "absent"} and held.used_token_s == 0.0


def test_turns_that_prefill_never_came_to_are_no_misses() -> None:
    crowded = replayed([talk(30.0, turns=6)], rate=5.0, duration_s=2000.0, prefill_engines=1, ttl_s=1e6)
    assert crowded.unserved > 100 and crowded.hit_ratio == 1.0
    assert crowded.followups < crowded.turns - crowded.outcomes["first"]


def test_nothing_retained_has_a_p99_of_nothing_and_little_of_little() -> None:
    assert replayed([talk(30.0)], ttl_s=0.0).pinned_p99 == 0.0
    little = replayed([talk(None, turns=1)], ttl_s=600.0, rate=0.02, pool=40_000_000)
    assert 10_000 < little.pinned_p99 < 30_000  # 12 of 1,000 tokens each are held on average


def test_the_rate_that_came_is_measured() -> None:
    assert replayed([talk(30.0)], rate=0.5).turns_per_s == pytest.approx(0.5, rel=0.03)


def test_retained_tokens_follow_littles_law_and_their_spread_campbells() -> None:
    result = replayed([talk(40.0), talk(None, turns=1)], ttl_s=100.0, rate=2.0, duration_s=40_000.0, pool=10**6)
    # per turn: a third each of 1,000 tokens for 40.1 s (read), 1,200 for 100 s and 1,000 for 100 s (never read)
    per_turn = (1000 * 40.1 + 1200 * 100 + 1000 * 100) / 3
    square = (1000**2 * 40.1 + 1200**2 * 100 + 1000**2 * 100) / 3
    assert result.pinned_mean == pytest.approx(2.0 * per_turn, rel=0.02)
    assert result.pinned_p99 == pytest.approx(2.0 * per_turn + 2.33 * math.sqrt(2.0 * square), rel=0.03)
    assert result.used_token_s / (result.used_token_s + result.wasted_token_s) == pytest.approx(
        40.1 * 1000 / (3 * per_turn), rel=0.03
    )


def test_retained_kv_makes_decode_wait_and_nothing_is_left_out() -> None:
    tight = replayed([talk(None, turns=1)], ttl_s=400.0, rate=0.05, pool=10_000)
    # 10 of them fit, and each is held for some 402 s: 0.025 turns/s are served of 0.05
    assert tight.waited > 0 and tight.unserved == pytest.approx(0.5 * 0.05 * 40_000, rel=0.15)
    assert tight.turns == pytest.approx(0.05 * 40_000, rel=0.1)
    loose = replayed([talk(None, turns=1)], ttl_s=0.0, rate=0.05, pool=10_000)
    assert loose.unserved <= 1 and loose.pinned_mean == 0.0


def test_foresight_holds_only_what_returns() -> None:
    result = replayed([talk(30.0), talk(500.0)], holds=policies.Foresight(100.0))
    assert result.wasted_token_s == 0.0
    assert result.outcomes["hit"] == pytest.approx(result.outcomes["absent"], rel=0.2)


def test_the_same_seed_replays_the_same() -> None:
    one, two, other = (replayed([talk(30.0), talk(90.0)], seed=seed) for seed in (5, 5, 6))
    assert one.ttft_s == two.ttft_s and one.pinned_token_s == two.pinned_token_s
    assert one.ttft_s != other.ttft_s


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Deployment(FLAT, 9_999), "cannot hold one request"),
        (lambda: Setting(1.0, explore=0.06), r"explore = 0\.06: it is a share from 0 to 0\.05"),
        (lambda: Setting(1.0, explore=math.nan), "explore = nan: it is a share"),
        (lambda: Load(0.0), "turns_per_s must be positive"),
        (lambda: Load(1.0, math.inf), "duration_s must be positive"),
        (lambda: Load(1.0, warmup_s=math.nan), "warmup_s must be a number"),
        (lambda: Setting(math.nan), "a TTL must be a number of seconds, at least 0, got nan"),
        (lambda: Setting(-5.0), "a TTL must be a number of seconds, at least 0"),
        (lambda: Setting(math.inf), "a TTL must be a number of seconds"),
        (lambda: Deployment(FLAT, 10_000, noise=math.nan), "noise must be"),
        (lambda: Deployment(FLAT, 10_000, prefill_engines=0), "there must be a prefill engine"),
        (lambda: Replay([], Deployment(FLAT, 10_000), Setting(1), Load(1.0)), "no conversations"),
    ],
)
def test_impossible_replays_are_refused(make: Any, says: str) -> None:
    with pytest.raises(ReplayError, match=says):
        make()


# --- what is exposed ------------------------------------------------------------------------------------------------


def test_the_books_of_the_observer_are_those_of_the_replay() -> None:
    setting, deployment = Setting(60.0), Deployment(FLAT, 10**5, noise=0.0, prefill_engines=50)
    memory = InMemory()
    observer = ObservedDeployment(deployment, setting, memory)
    load = Load(0.2, duration_s=20_000.0, warmup_s=500.0)
    result = Replay([talk(20.0), talk(300.0)], deployment, setting, load, observer=observer, tick_s=60.0).run()
    series = memory.series()
    for outcome, count in result.outcomes.items():
        # both ends of the window cut through a few turns
        assert series.increase("kvtune_turns_total", outcome=str(outcome)) == pytest.approx(count, abs=8)
    facts = suggest_series(series, {})["evidence"]
    assert facts["retained_tokens_mean"] == pytest.approx(result.pinned_mean, rel=0.03)
    assert facts["active_tokens_mean"] == pytest.approx(result.active_mean, rel=0.1)
    assert facts["kappa"] == pytest.approx(1.0, abs=0.05)


def test_a_stock_deployment_exposes_only_vllms_series_once_a_rank(tmp_path: Path) -> None:
    setting, deployment = Setting(60.0), Deployment(FLAT, 10**7, noise=0.0, prefill_engines=50)
    observer = ObservedDeployment(deployment, setting, to_directory(tmp_path), stock=True, ranks=4)
    load = Load(0.2, duration_s=600.0, warmup_s=0.0)
    Replay([talk(20.0)], deployment, setting, load, observer=observer, tick_s=300.0).run()
    assert sorted({path.name.split("-")[1] for path in tmp_path.iterdir()}) == ["decode.prom", "prefill.prom"]
    page = sorted(tmp_path.glob("*-decode.prom"))[-1].read_text()
    assert "kvtune_" not in page
    values = {line.split(" ")[0]: float(line.split(" ")[1]) for line in page.splitlines() if line[:1] != "#"}
    reads = values['vllm:nixl_xfer_time_seconds_count{engine="0",model_name="flat"}']
    ended = values['vllm:request_success_total{engine="0",finished_reason="stop",model_name="flat"}']
    assert reads % 4 == 0 and 0 <= reads / 4 - ended <= 3


def decided(setting: Setting, cached: bool = True, rate: float = 0.4) -> tuple[dict[tuple[str, str], float], SeriesSet]:
    """Decisions about histories, by (decision, reason), where each history is the last answer's 100 tokens (cached) or
    the 1,000 of the whole last turn."""
    deployment = Deployment(FLAT, 10**7, noise=0.0, prefill_engines=100, prefill_cache=cached, block_tokens=100)
    memory = InMemory()
    observer = ObservedDeployment(deployment, setting, memory)
    load = Load(rate, duration_s=40_000.0, warmup_s=100.0)
    Replay([talk(20.0)], deployment, setting, load, observer=observer, tick_s=600.0).run()
    series = memory.series()
    counts = {
        (str(one.label("decision")), str(one.label("reason"))): one.increase()
        for one in series.named("kvtune_decisions_total")
        if one.increase()
    }
    counts.pop(("recompute", "none"))  # first turns
    return counts, series


@pytest.mark.parametrize(
    ("threshold", "cached", "ordinary", "other"),
    [
        (100, True, ("fetch", "none"), "recompute"),
        (101, True, ("recompute", "below_threshold"), "fetch"),
        (400, True, ("recompute", "below_threshold"), "fetch"),
        (401, True, ("recompute", "below_threshold"), None),
        (25, True, ("fetch", "none"), "recompute"),
        (24, True, ("fetch", "none"), None),
        (250, False, ("fetch", "none"), "recompute"),
        (249, False, ("fetch", "none"), None),
    ],
)
def test_a_share_of_the_histories_near_the_threshold_takes_the_other_path(
    threshold: int, cached: bool, ordinary: tuple[str, str], other: str | None
) -> None:
    counts, series = decided(Setting(60.0, threshold, explore=0.05), cached)
    assert counts.keys() == ({ordinary} if other is None else {ordinary, (other, "explored")})
    assert series.named("kvtune_router_setting", setting="explore_ratio")[0].values[-1] == 0.05
    tokens = 100 if cached else 1000
    read = sum(count for (decision, _), count in counts.items() if decision == "fetch")
    assert series.increase("kvtune_path_observations_total", path="fetch") == pytest.approx(read, abs=2) or not read
    if other is not None:
        explored = counts[other, "explored"]
        assert explored / sum(counts.values()) == pytest.approx(0.05, abs=0.005) and explored > 300
        about = series.increase("kvtune_decision_tokens_total", decision=other, reason="explored")
        assert about == tokens * explored
        switched_off = series.increase("kvtune_turns_total", outcome="disabled") or 0.0
        assert switched_off == pytest.approx(explored if other == "recompute" else 0.0, abs=1)


def test_who_does_not_explore_draws_the_same_traffic() -> None:
    plain, exploring = (decided(Setting(60.0, 100, explore=share))[0] for share in (0.0, 0.05))
    assert plain.keys() == {("fetch", "none")} and sum(plain.values()) == sum(exploring.values())


# --- rules ----------------------------------------------------------------------------------------------------------


def test_the_rules_are_what_they_say() -> None:
    plans = [talk(10.0, turns=3), talk(100.0, turns=3)]
    assert policies.keep_alive_ttl(plans) == pytest.approx(110.0)
    # mean sequence 1,200 tokens: a token costs 1 ms to compute and 0.1 ms to fetch
    assert policies.ski_rental_ttl(plans, Deployment(FLAT, 100_000)) == pytest.approx(0.9e-3 * 100_000)
    assert policies.continuum_ttl(plans, FLAT, queueing_s=0.0) == 0.0
    # every conversation has three turns, so turns done tell turns to come: eta is 1
    assert policies.continuum_ttl(plans, FLAT, queueing_s=400.0) == pytest.approx(100.0)


# --- the command ----------------------------------------------------------------------------------------------------


def command(*arguments: str) -> tuple[int, str, str]:
    from kvtune_cli.main import _register, app

    if not app.registered_commands:
        _register()
    result = CliRunner().invoke(app, ["simulate", *arguments])
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "talks.jsonl"
    rows = []
    for conv in range(40):
        gap = 5.0 + conv
        for turn in range(4):
            tokens, last = 2000 + 300 * turn, turn == 3
            rows.append(
                {"conv": conv, "turn": turn, "in_tokens": tokens, "out_tokens": 100,
                 "gap_to_next_s": None if last else gap, "reusable_tokens_next": 0 if last else tokens + 100}
            )  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_command_gives_a_row_for_each_setting_and_rule(trace: Path, tmp_path: Path) -> None:
    code, out, err = command(
        str(trace), "--ttl", "10,60", "--threshold", "64,512", "--rate", "0.5,1", "--duration", "30m", "--warmup", "5m",
        "--policies", "default,hindsight", "--format", "json", "--charts", str(tmp_path / "c"), "--jobs", "2",
    )  # fmt: skip
    assert code == 0, err
    document = json.loads(out)
    rows = document["rows"]
    assert [(row["policy"], row["ttl"], row["threshold"]) for row in rows if row["rate"] == 0.5][:5] == [
        ("fixed", 10.0, 64), ("fixed", 10.0, 512), ("fixed", 60.0, 64), ("fixed", 60.0, 512), ("default", 480.0, 64),
    ]  # fmt: skip
    assert len(rows) == 2 * (4 + 2)
    assert f"wrote {tmp_path / 'c' / 'ttft-2.svg'} (1 turns/s, pool of 3,500,000 tokens)" in err
    by = {(row["rate"], row["ttl"], row["threshold"]): row for row in rows}
    assert by[0.5, 10.0, 64]["hit_ratio"] < 0.1 < 0.95 < by[0.5, 60.0, 64]["hit_ratio"]
    assert by[0.5, 60.0, 64]["ttft_mean_s"] < by[0.5, 10.0, 64]["ttft_mean_s"]
    assert by[1.0, 60.0, 64]["pinned_tokens_mean"] == pytest.approx(
        2 * by[0.5, 60.0, 64]["pinned_tokens_mean"], rel=0.2
    )
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == [
        "frontier-1.png", "frontier-1.svg", "frontier-2.png", "frontier-2.svg",
        "ttft-1.png", "ttft-1.svg", "ttft-2.png", "ttft-2.svg",
    ]  # fmt: skip


def test_regret_is_shown_by_conversations_seen(trace: Path, tmp_path: Path) -> None:
    request = Request(
        trace=trace, rates=(0.5,), duration_s=3200.0, warmup_s=300.0, compared=("default", "suggestion", "hindsight"),
        learning=True, jobs=2,
    )  # fmt: skip
    document = simulate(request)
    learnt = document["learning"]
    assert [row["watched_s"] for row in learnt] == [share * 3200.0 for share, _ in LESSONS]
    seen = [row["conversations"] for row in learnt if row["conversations"] is not None]
    assert seen and max(seen[-3:]) > 2 * min(seen[:3])
    ttft = {row["ttl"]: row["ttft_mean_s"] for row in document["sweep"]}
    best = min(ttft.values())
    for row in learnt:
        assert row["ttft_mean_s"] == pytest.approx(ttft.get(row["ttl"], row["ttft_mean_s"]), rel=1e-12)
        assert row["regret"] == pytest.approx(max(0.0, row["ttft_mean_s"] / best - 1))
    # what is not said in time leaves the default
    assert all(row["ttl"] == 480.0 for row in learnt if row["status"] in ("insufficient", "error"))
    assert {path.name for path in draw(document, tmp_path)} >= {"regret-1.svg", "regret-1.png"}
    assert simulate(replace(request, learning=False, compared=("default",)))["learning"] == []


def test_snapshots_are_what_suggest_reads(trace: Path, tmp_path: Path) -> None:
    code, out, err = command(
        "--trace", str(trace), "--ttl", "480", "--rate", "2", "--duration", "2h", "--snapshot", str(tmp_path / "s"),
        "--format", "json",
    )  # fmt: skip
    assert code == 0, err
    (row,) = json.loads(out)["rows"]
    document = suggest_snapshots(tmp_path / "s")
    assert document["evidence"]["turns"] == pytest.approx(row["turns"], abs=20)
    ttl = document["recommendations"][0]
    assert (ttl["current"], ttl["status"]) == (480, "keep")
    predicted = next(one for one in ttl["counterfactual"] if one["value"] == 480)
    assert predicted["pinned_tokens_mean"] == pytest.approx(row["pinned_tokens_mean"], rel=0.05)
    assert predicted["pinned_tokens_p99"] == pytest.approx(row["pinned_tokens_p99"], rel=0.08)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--ttl", "60,x"), "--ttl: 'x' is not a number"),
        (("--ttl", "60", "--rate", "0"), "--rate: 0 is out of range"),
        (("--ttl", "60", "--model", "gpt"), "model 'gpt' is neither"),
        (("--ttl", "60", "--pool-tokens", "1000"), "a pool of 1000 tokens cannot hold one request"),
        (("--policies", "best"), "unknown policy 'best'"),
        (("--policies", "none"), "nothing to replay"),
        (("--ttl", "60", "--duration", "soon"), "--duration: not a positive duration"),
        (("--ttl", "60", "--format", "xml"), "unknown format 'xml'"),
        (("--ttl", "60", "--explore", "0.2"), "explore = 0.2: it is a share from 0 to 0.05"),
        (("--ttl", "60", "--explore", "0.02", "--stock"), "a deployment without kvtune does not explore"),
        (("/nowhere.csv", "--ttl", "60"), "/nowhere.csv: no such file"),
        (("--ttl", "60,120", "--snapshot", "/tmp/x"), "give one --ttl"),
        (("--ttl", "60", "--threshold", "1.5"), "--threshold: '1.5' is not a whole number"),
        (("--ttl", "nan"), "--ttl: nan is out of range"),
        (("--current-ttl", "nan"), "--current-ttl: nan is out of range"),
        (("--current-ttl", "inf"), "--current-ttl: inf is out of range"),
        (("--current-ttl", "-5"), "--current-ttl: -5.0 is out of range"),
        (("--ttl", "60", "--noise", "nan"), "--noise"),
        (("--ttl", "60", "--jobs", "-1"), "--jobs"),
        (("--ttl", "60", "--duration", "0s"), "--duration: not a positive duration"),
        (("--ttl", "60", "--nosuch"), "--nosuch"),
    ],
)  # fmt: skip
def test_bad_input_is_named(arguments: tuple[str, ...], says: str) -> None:
    code, out, err = command(*arguments)
    assert code == 2 and says in err and not out and "Traceback" not in err
    code, out, err = command(*arguments, *(() if "--format" in arguments else ("--format", "json")))
    if "--format" not in arguments:
        document = json.loads(out)
        assert document.keys() == {"schema", "error"} and document["schema"] == "kvtune.simulate/1"
        assert document["error"].keys() == {"code", "message", "hint"} and says in document["error"]["message"]
    assert code == 2 and says in err


def a_row(policy: str, ttl: float | None, **more: Any) -> dict[str, Any]:
    return {
        "policy": policy, "ttl": ttl, "threshold": 64, "rate": 0.4, "turns_per_s": 0.4, "pool_tokens": 3_500_000,
        "turns": 1000, "hit_ratio": 0.5, "ttft_mean_s": 1.0 + (ttl or 0) / 1000, "ttft_p90_s": 2.0,
        "pinned_tokens_mean": 10.0, "pinned_tokens_p99": 20.0, "wasted_token_seconds": 5.0 + (ttl or 0),
        "used_token_seconds": 5.0, "unserved": 0, **more,
    }  # fmt: skip


def a_document(*rows: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": "m", "conversations": 3, "trace": "t", "window_s": 1.0, "seed": 1, "rows": list(rows), "sweep": [],
        "learning": [], "suggestions": [], "replays": 1, "turns_replayed": 1, "turns_per_second": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("came", "says"),
    [
        ((0.4, 0.39), "0.4 turns/s on a pool"),
        ((0.31, 0.312), "0.4 turns/s asked for, 0.31 replayed, on a pool"),
        ((0.2, 0.4), "0.4 turns/s asked for, 0.2 to 0.4 replayed, on a pool"),
        ((0.5, 0.5), "0.4 turns/s asked for, 0.5 replayed, on a pool"),
    ],
)
def test_the_table_shows_the_rate_that_came_where_it_is_another(came: tuple[float, float], says: str) -> None:
    document = a_document(a_row("fixed", 60.0, turns_per_s=came[0]), a_row("fixed", 120.0, turns_per_s=came[1]))
    text = " ".join(render(document).split())
    assert says in text and "1 s measured" in text.replace("\u00a0", " ")


def test_few_points_are_no_line_and_an_overload_is_marked(tmp_path: Path) -> None:
    from matplotlib import pyplot

    from kvtune_bench.replay import charts

    two = [a_row("fixed", 60.0), a_row("default", 480.0)]
    three = [a_row("fixed", ttl, unserved=500 if ttl == 60.0 else 0) for ttl in (30.0, 60.0, 120.0)]
    mixed = [*two, a_row("fixed", 60.0, threshold=512)]
    for paint in (charts._ttft, charts._frontier):
        lines = 2 if paint is charts._ttft else 1
        for rows, drawn, rings in ((two, 0, 0), (three, lines, 1), (mixed, 0, 0)):
            figure, axes = pyplot.subplots()
            paint(axes, rows, rows)
            labels = [text.get_text() for text in axes.get_legend().get_texts()]
            assert (len(axes.lines), sum("overloaded" in one for one in labels)) == (drawn, rings)
            assert "asked for" in labels
            pyplot.close(figure)
    other = {**a_row("default", 480.0), "rate": 0.8}
    written = draw(a_document(*two, other), tmp_path)
    assert {path.name: world for path, world in written.items() if path.suffix == ".svg"} == {
        f"{chart}-{number}.svg": f"{rate:g} turns/s, pool of 3,500,000 tokens"
        for chart in ("ttft", "frontier")
        for number, rate in ((1, 0.4), (2, 0.8))
    }


def test_every_key_of_the_document_is_described(trace: Path) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "simulate.md").read_text(encoding="utf-8")
    document = simulate(Request(trace=trace, ttls_s=(60.0,), compared=(), duration_s=600.0, warmup_s=60.0, jobs=1))
    (one,) = document["rows"]
    assert 0 < one["turns_per_s"] == one["turns"] / 600.0
    for key in (*document, *one):
        assert f"`{key}`" in page or key == "schema", key


def test_snapshots_of_two_replays_are_not_mixed(tmp_path: Path) -> None:
    (tmp_path / "1-router.prom").write_text("")
    with pytest.raises(ReplayError, match="has snapshots already: name an empty directory"):
        simulate(Request(snapshot=tmp_path, compared=()))
