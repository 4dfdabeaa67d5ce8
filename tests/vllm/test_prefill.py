"""P: what is read back, what is not, and that nothing waits, leaks or is booked twice."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.request import RequestStatus
from vllm_harness import BLOCK, FIRST, Engine, reference, tokens

from kvtune_connector import nixl_scheduler
from kvtune_connector.nixl_scheduler import _FIRST_REST_S
from kvtune_telemetry import events

Make = Callable[..., Engine]
HISTORY = tokens(640)
PROMPT = HISTORY + tokens(60, 1)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The connector's clock, which goes by hand."""
    hand = SimpleNamespace(now=1000.0, slept=[])
    monkeypatch.setattr(
        nixl_scheduler, "time", SimpleNamespace(perf_counter=lambda: hand.now, sleep=hand.slept.append, time=lambda: 0)
    )
    return hand


def at(clock: SimpleNamespace, params: dict[str, Any], in_s: float) -> dict[str, Any]:
    return params | {"remote_blocks_expiry_time": clock.now + in_s}


def held(engine: Engine) -> int:
    return engine.free_at_start - engine.free


def test_an_honest_follow_up_is_read_and_the_rest_computed(engine: Make) -> None:
    p = engine()
    turn = p.add(PROMPT, reference(HISTORY))
    p.step()
    assert turn.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    assert len(p.reading[turn.request_id].local_block_ids[0]) == len(p.reading[turn.request_id].remote.block_ids[0])
    assert held(p) == 640 // BLOCK
    p.step(read=[turn.request_id])
    p.step()
    assert p.computed[turn.request_id] == 60
    assert p.report(turn) == ("fetch", "none", 640, 0)
    assert p.decisions == [("fetch", "none", 640)]
    assert [(e.tokens, e.size_bytes, e.seconds) for e in p.booked(events.KvRead)] == [(640, 1000, 0.25)]
    assert [e.tokens for e in p.booked(events.PrefillComputed)] == [60]
    p.assert_clean()


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("end", ["read", "failed"])
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_preempted_after_its_read_it_recomputes_and_waits_for_nothing(
    engine: Make, caching: bool, end: str, policy: str
) -> None:
    p = engine(blocks=61, caching=caching, policy=policy)
    other = p.add(tokens(80, 2), None, max_tokens=300)
    p.step()
    turn = p.add(PROMPT, reference(HISTORY), max_tokens=200)
    p.step()
    p.step(**{end: [turn.request_id]})
    p.run(other)
    assert turn.num_preemptions == 1
    p.run(turn)
    assert p.reading == {}
    assert turn.status == RequestStatus.FINISHED_LENGTH_CAPPED
    assert p.decisions == [("fetch", "none", 640) if end == "read" else ("recompute", "read_failed", 0)]
    assert p.report(turn)[:3] == p.decisions[0], "the answer says what was booked"
    # What a preempted prefill took says nothing of what its tokens cost.
    assert p.booked(events.PrefillComputed) == []
    if not caching:
        assert p.computed[turn.request_id] > 700
    p.assert_clean()


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("how", ["failed", "declined"])
def test_a_failed_read_costs_a_prefill_never_the_turn(engine: Make, policy: str, how: str) -> None:
    p = engine(policy=policy)
    turn = p.add(PROMPT, reference(HISTORY))
    p.step()
    p.step(**{how: [turn.request_id]})
    p.step()
    assert turn.status == RequestStatus.FINISHED_LENGTH_CAPPED
    assert p.computed[turn.request_id] == 700
    reason = "read_failed" if how == "failed" else "expired"
    assert p.report(turn) == ("recompute", reason, 0, 0)
    assert p.decisions == [("recompute", reason, 0)]
    assert len(p.booked(events.KvReadFailed)) == (how == "failed")
    assert len(p.booked(events.KvReadDeclined)) == (how == "declined")
    assert p.booked(events.KvRead) == []
    p.assert_clean()


def crowded(engine: Make) -> tuple[Engine, Any]:
    """A P too full for the long turn, until the other request finishes."""
    p = engine(blocks=61, order="priority")
    other = p.add(tokens(320, 2), None, max_tokens=40, priority=1)
    p.step(offsets={"d": 0.0})
    return p, other


def test_consumed_by_another_between_first_look_and_admission(engine: Make) -> None:
    p, other = crowded(engine)
    shared = reference(HISTORY, name="once")
    late = p.add(PROMPT, dict(shared), priority=5)
    p.step()
    assert late.status == RequestStatus.WAITING and p.connector._prefills[late.request_id].verdict.fetch_tokens == 640
    early = p.add(PROMPT[:200], dict(shared), priority=0)
    p.step()
    assert list(p.reading) == [early.request_id]
    p.step(read=[early.request_id])
    p.run(late)
    assert p.report(early) == ("fetch", "rewritten", 192, 0)
    assert p.report(late)[:3] == ("recompute", "consumed", 0)
    assert p.notified == []
    assert p.decisions == [("fetch", "rewritten", 192), ("recompute", "consumed", 0)]
    p.run(other)
    p.assert_clean()


def test_expired_between_first_look_and_admission(engine: Make, clock: SimpleNamespace) -> None:
    p, other = crowded(engine)
    late = p.add(PROMPT, at(clock, reference(HISTORY), 20.0))
    p.step()
    assert p.connector._prefills[late.request_id].verdict.fetch_tokens == 640
    clock.now += 15.0
    p.run(late)
    assert p.reading == {} and p.notified == []
    assert p.report(late) == ("recompute", "expired", 0, 0)
    assert len(p.booked(events.KvReadDeclined)) == 1
    p.run(other)
    p.assert_clean()


@pytest.mark.parametrize(("left_s", "reason"), [(5.0, "expired"), (5.001, "none"), (-300.0, "expired")])
def test_expired_from_the_start(engine: Make, clock: SimpleNamespace, left_s: float, reason: str) -> None:
    p = engine()
    # Engine d's clock is 100 s ahead of ours.
    p.step(offsets={"d": 100.0})
    turn = p.add(PROMPT, at(clock, reference(HISTORY), left_s + 100.0))
    p.step()
    assert p.notified == []
    if reason == "expired":
        assert p.reading == {}
        assert p.report(turn) == ("recompute", "expired", 0, 0)
        assert len(p.booked(events.KvReadDeclined)) == 1
    else:
        p.step(read=[turn.request_id])
        p.step()
        assert p.report(turn) == ("fetch", "none", 640, 0)
    p.assert_clean()


def test_without_bidirectional_it_computes(engine: Make) -> None:
    p = engine(bidirectional_kv_xfer=False)
    turn = p.add(PROMPT, reference(HISTORY))
    p.step()
    assert p.computed[turn.request_id] == 700 and p.reading == {}
    assert p.report(turn) == ("recompute", "disabled", 0, 0)
    assert p.decisions == [("recompute", "disabled", 0)]
    p.assert_clean()


@pytest.mark.parametrize("bidirectional", [True, False])
def test_with_a_host_buffer_it_computes(engine: Make, bidirectional: bool) -> None:
    p = engine(bidirectional_kv_xfer=bidirectional)
    p.connector.use_host_buffer = True
    turn = p.add(PROMPT, reference(HISTORY))
    p.step()
    assert p.computed[turn.request_id] == 700 and p.reading == {}
    assert p.report(turn) == ("recompute", "disabled", 0, 0)
    assert p.decisions == [("recompute", "disabled", 0)]
    p.assert_clean()


def test_preempted_where_nothing_can_be_read_it_is_booked_once(engine: Make) -> None:
    p = engine(blocks=61, bidirectional_kv_xfer=False)
    other = p.add(tokens(80, 2), None, max_tokens=300)
    p.step()
    turn = p.add(PROMPT, reference(HISTORY), max_tokens=200)
    p.run(other)
    p.run(turn)
    assert turn.num_preemptions == 1
    assert p.decisions == [("recompute", "disabled", 0)]
    p.assert_clean()


@pytest.mark.parametrize(
    "params", [{"do_remote_decode": False, "do_remote_prefill": False}, {"kvtune": {"v": 1, "retain_s": 9}}, {}, None]
)
@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_parameters_that_ask_for_nothing_hold_nothing(engine: Make, params: Any, role: str) -> None:
    one = engine(role=role)
    turn = one.add(PROMPT, params and dict(params))
    one.step()
    assert one.answers[turn.request_id].kv_transfer_params is None
    one.step()
    assert one.sending == {} and one.events == []
    one.assert_clean()


def test_a_first_turn_is_a_recompute_without_reason(engine: Make) -> None:
    p = engine()
    empty = {**FIRST, **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))}
    turn = p.add(PROMPT, empty)
    p.step()
    assert p.report(turn) == ("recompute", "none", 0, 0)
    assert p.notified == []
    assert [(e.prompt_tokens, e.available_tokens) for e in p.booked(events.PrefillDecided)] == [(700, 0)]
    p.assert_clean()


@pytest.mark.parametrize(
    ("spoilt", "reason"),
    [
        ({"expires_in": None}, "unverified"),
        ({"proof": False}, "unverified"),
    ],
)
def test_what_is_not_read_is_given_back(engine: Make, spoilt: dict[str, Any], reason: str) -> None:
    p = engine()
    turn = p.add(PROMPT, reference(HISTORY, name="d-1", **spoilt))
    p.step()
    assert p.report(turn) == ("recompute", reason, 0, 0)
    assert p.computed[turn.request_id] == 700 and p.reading == {}
    assert p.notified == ["d-1" if "proof" in spoilt else "d-1#kvtune-released"]
    p.assert_clean()


def test_exploration_takes_the_other_path_near_the_threshold(engine: Make) -> None:
    p = engine(kv_recompute_threshold=640)
    turn = p.add(PROMPT, reference(HISTORY, name="d-1", explore=True))
    p.step()
    assert p.report(turn) == ("recompute", "explored", 0, 0) and p.notified == ["d-1#kvtune-released"]
    below = engine(kv_recompute_threshold=641)
    turn = below.add(PROMPT, reference(HISTORY, name="d-2", explore=True))
    below.step()
    below.step(read=[turn.request_id])
    below.step()
    assert below.report(turn) == ("fetch", "explored", 640, 0)
    p.assert_clean()
    below.assert_clean()


def test_an_unproven_reference_is_read_only_where_the_settings_say_so(engine: Make) -> None:
    p = engine(kvtune={"require_fingerprint": False})
    turn = p.add(PROMPT, reference(HISTORY, proof=False))
    p.step()
    p.step(read=[turn.request_id])
    p.step()
    assert p.report(turn) == ("fetch", "none", 640, 0)
    p.assert_clean()


@pytest.mark.parametrize(
    ("same", "block_size", "fetched", "blocks"),
    [
        # All of it is proven, but not all of it is whole blocks of both sides: lcm(16, 24) is 48, lcm(16, 32) is 32.
        (640, 24, 624, 26),
        (640, 32, 640, 20),
        (640, 16, 640, 40),
        # Proven as far as the link before the edit: 64 tokens, or the whole blocks nearest to that.
        (400, 16, 384, 24),
        (400, 24, 336, 14),
        (400, 128, 384, 3),
    ],
)
def test_a_cut_is_whole_blocks_of_both_sides(
    engine: Make, same: int, block_size: int, fetched: int, blocks: int
) -> None:
    p = engine()
    turn = p.add(HISTORY[:same] + tokens(700 - same, 9), reference(HISTORY, block_size=block_size))
    p.step()
    remote = p.reading[turn.request_id].remote
    assert (remote.num_tokens, len(remote.block_ids[0])) == (fetched, blocks)
    assert len(p.reading[turn.request_id].local_block_ids[0]) == fetched // BLOCK
    p.step(read=[turn.request_id])
    p.step()
    assert p.report(turn) == ("fetch", "none" if fetched == 640 else "rewritten", fetched, 0)
    assert p.computed[turn.request_id] == 700 - fetched
    p.assert_clean()


def test_a_foreign_reference_is_given_back(engine: Make) -> None:
    p = engine()
    turn = p.add(PROMPT, reference(tokens(640, 5), name="d-1"))
    p.step()
    assert p.report(turn) == ("recompute", "rewritten", 0, 0)
    assert p.notified == ["d-1#kvtune-released"]
    p.assert_clean()


def test_a_fetch_the_scheduler_does_not_load_is_given_back(engine: Make) -> None:
    """Prompt log-probabilities: the scheduler asks, and loads nothing all the same."""
    p = engine()
    turn = p.add(PROMPT, reference(HISTORY, name="d-1"), prompt_logprobs=1)
    p.step()
    assert p.report(turn) == ("recompute", "disabled", 0, 0)
    assert p.computed[turn.request_id] == 700 and p.reading == {}
    assert p.notified == ["d-1#kvtune-released"]
    p.assert_clean()


@pytest.mark.parametrize(
    ("local", "same", "threshold", "report", "told"),
    [
        # 320 of the 640 are in P's own cache: the other 320 are read.
        (320, 640, 64, ("fetch", "none", 320, 320), []),
        (320, 640, 320, ("fetch", "none", 320, 320), []),
        (320, 640, 321, ("recompute", "below_threshold", 0, 320), ["d-1#kvtune-local_hit"]),
        (640, 640, 0, ("local_hit", "none", 0, 640), ["d-1#kvtune-local_hit"]),
        (624, 640, 0, ("fetch", "none", 16, 624), []),
        # Proven no further than 128: less than is here already.
        (320, 150, 64, ("local_hit", "none", 0, 144), ["d-1#kvtune-local_hit"]),
    ],
)
def test_beyond_a_local_hit(engine: Make, local: int, same: int, threshold: int, report: Any, told: list[str]) -> None:
    p = engine(kv_recompute_threshold=threshold)
    before = p.add(HISTORY[:local] + tokens(10, 3), dict(FIRST))
    p.step()
    p.let_go()
    assert before.is_finished()
    turn = p.add(HISTORY[:same] + tokens(700 - same, 9), reference(HISTORY, name="d-1"))
    p.step()
    if report[0] == "fetch":
        assert len(p.reading[turn.request_id].local_block_ids[0]) == report[2] // BLOCK
        p.step(read=[turn.request_id])
        p.step()
    assert p.report(turn) == report
    assert p.computed[turn.request_id] == 700 - report[2] - report[3]
    assert p.notified == told
    p.assert_clean()


@pytest.mark.parametrize("prompt", [600, 639, 640])
def test_a_prompt_no_longer_than_what_d_holds(engine: Make, prompt: int) -> None:
    p = engine()
    turn = p.add(HISTORY[:prompt], reference(HISTORY))
    p.step()
    p.step(read=[turn.request_id])
    p.step()
    fetched = prompt if prompt == 640 else 576
    assert p.report(turn) == ("fetch", "none" if prompt == 640 else "rewritten", fetched, 0)
    # At least the last token is computed: something must be sampled.
    assert p.computed[turn.request_id] == max(1, prompt - fetched)
    p.assert_clean()


def test_aborted_before_it_is_looked_at(engine: Make) -> None:
    p = engine()
    p.abort(p.add(PROMPT, reference(HISTORY)))
    p.step()
    assert p.events == []
    p.assert_clean()


def test_aborted_before_it_is_admitted(engine: Make) -> None:
    p, other = crowded(engine)
    turn = p.add(PROMPT, reference(HISTORY), priority=5)
    p.step()
    assert turn.request_id in p.connector._prefills
    p.abort(turn)
    p.run(other)
    assert p.events == []
    p.assert_clean()


@pytest.mark.parametrize("end", ["read", "failed", "declined"])
def test_aborted_while_its_read_is_under_way(engine: Make, end: str) -> None:
    p = engine()
    turn = p.add(PROMPT, reference(HISTORY))
    p.step()
    p.abort(turn)
    p.step()
    assert held(p) == 40, "NIXL still writes into them"
    p.step(**{end: [turn.request_id]})
    reason = {"read": "none", "failed": "read_failed", "declined": "expired"}[end]
    assert p.decisions == [("fetch" if end == "read" else "recompute", reason, 640 if end == "read" else 0)]
    assert len(p.booked(events.KvRead)) == (end == "read")
    assert held(p) == 0
    p.assert_clean()


@pytest.mark.parametrize("end", ["read", "failed"])
def test_aborted_after_its_read_before_it_runs(engine: Make, end: str) -> None:
    p = engine()
    turn = p.add(PROMPT, reference(HISTORY))
    p.step()
    p.step(**{end: [turn.request_id]})
    p.abort(turn)
    p.step()
    assert p.decisions == [("fetch", "none", 640) if end == "read" else ("recompute", "read_failed", 0)]
    p.assert_clean()


@pytest.mark.parametrize("end", ["read", "failed"])
def test_aborted_while_it_runs(engine: Make, end: str) -> None:
    p = engine(budget=32, max_seqs=8)
    turn = p.add(PROMPT, reference(HISTORY))
    p.step()
    p.step(**{end: [turn.request_id]})
    p.step()
    assert turn.status == RequestStatus.RUNNING
    p.abort(turn)
    p.step()
    assert p.decisions == [("fetch", "none", 640) if end == "read" else ("recompute", "read_failed", 0)]
    p.assert_clean()


# --- rest -----------------------------------------------------------------------------------------------------------


def test_it_rests_while_it_only_holds_blocks(engine: Make, clock: SimpleNamespace) -> None:
    p = engine()
    p.add(PROMPT, dict(FIRST))
    p.step()
    assert clock.slept == []
    for _ in range(7):
        p.step()
    assert clock.slept == [_FIRST_REST_S * 2**n for n in range(5)] + [0.01, 0.01]
    p.add(PROMPT, dict(FIRST))
    p.step()
    p.step()
    assert clock.slept[7:] == [_FIRST_REST_S], "what comes soon after work finds the engine awake"
    p.assert_clean()


def test_it_does_not_rest_while_a_read_is_under_way(engine: Make, clock: SimpleNamespace) -> None:
    p = engine()
    turn = p.add(PROMPT, reference(HISTORY))
    p.step()
    p.step()
    assert clock.slept == []
    p.step(read=[turn.request_id])
    p.step()
    p.step()
    assert len(clock.slept) == 1


def test_it_does_not_rest_while_a_batch_is_in_flight(engine: Make, clock: SimpleNamespace) -> None:
    p = engine(overlapping=True)
    p.add(PROMPT, dict(FIRST))
    first = p.schedule()
    second = p.schedule()
    assert second.total_num_scheduled_tokens == 0 and clock.slept == []
    p.process(first)
    third = p.schedule()
    assert third.total_num_scheduled_tokens == 0 and len(clock.slept) == 1
    p.process(second)
    p.process(third)
    p.assert_clean()


@pytest.mark.parametrize("settings", [{"replicas": 2}, {"kvtune": {"idle_sleep_ms": 0}}])
def test_it_never_rests(engine: Make, clock: SimpleNamespace, settings: dict[str, Any]) -> None:
    p = engine(**settings)
    p.add(PROMPT, dict(FIRST))
    for _ in range(4):
        p.step()
    assert len(p.sending) == 1 and clock.slept == []
