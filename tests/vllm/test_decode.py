"""D: what it exports, what it holds and for how long, and how each holding ends."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.request import Request, RequestStatus
from vllm_harness import Engine, handover, tokens

from kvtune_connector import wire
from kvtune_connector.fingerprint import verified_prefix
from kvtune_telemetry import events
from kvtune_telemetry.vocabulary import Direction, End, Missed

Make = Callable[..., Engine]
PROMPT = tokens(200)


@pytest.fixture
def d(engine: Make) -> Engine:
    return engine(role="kv_consumer")


def decoded(d: Engine, params: dict[str, Any], *, max_tokens: int = 5, **sampling: Any) -> Request:
    """A turn that D pulled from P and answered."""
    turn = d.add(PROMPT, params, max_tokens=max_tokens, **sampling)
    d.step()
    d.step(read=[turn.request_id])
    d.run(turn)
    d.step()
    return turn


@pytest.mark.parametrize(("stop", "answered"), [((), 5), ((102,), 3)])
def test_a_finished_turn_is_exported_with_proof_and_held(d: Engine, stop: tuple[int, ...], answered: int) -> None:
    turn = decoded(d, handover(), stop_token_ids=list(stop))
    told = d.answers[turn.request_id].kv_transfer_params
    # The last token was sampled and not computed.
    held = 200 + answered - 1
    assert (told["do_remote_decode"], told["remote_num_tokens"], told["remote_request_id"]) == (
        True, held, turn.request_id,
    )  # fmt: skip
    proof = wire.read_fingerprint(told)
    assert proof is not None
    assert verified_prefix(proof, array("I", turn.all_token_ids), seed=b"") == held
    assert verified_prefix(proof, array("I", [1, *turn.all_token_ids[1:]]), seed=b"") == 0
    assert (wire.read_ttl_s(told), wire.read_block_size(told)) == (480.0, 16)
    assert told[wire.KEY]["incarnation"].startswith("here-")
    assert [(e.tokens, e.blocks) for e in d.booked(events.RetentionStarted)] == [(held, 13)]
    assert [(e.direction, e.tokens, e.size_bytes) for e in d.booked(events.KvRead)] == [(Direction.P2D, 200, 1000)]
    assert turn.request_id in d.connector._ledger
    assert d.free == d.free_at_start - 13
    d.assert_clean()


@pytest.mark.parametrize("told", [*End, None])
def test_how_a_holding_ends(d: Engine, told: End | None) -> None:
    turn = decoded(d, handover())
    d.step(sent={turn.request_id: told and told.value})
    assert [(e.end, e.tokens, e.blocks) for e in d.booked(events.RetentionEnded)] == [(told or End.READ, 204, 13)]
    d.assert_clean()


def test_a_word_for_an_end_that_is_none_of_ours_is_a_read(d: Engine) -> None:
    turn = decoded(d, handover())
    d.step(sent={turn.request_id: "melted"})
    assert [e.end for e in d.booked(events.RetentionEnded)] == [End.READ]
    d.assert_clean()


@pytest.mark.parametrize(("asked", "ttl"), [(None, 480), (1, 6), (6, 6), (60.5, 60.5), (480, 480), (9999, 480)])
def test_how_long_it_holds(d: Engine, asked: float | None, ttl: float) -> None:
    turn = decoded(d, handover(retain_s=asked) if asked is not None else handover())
    told = d.answers[turn.request_id].kv_transfer_params
    held = d.connector._ledger.get(turn.request_id)
    assert wire.read_ttl_s(told) == ttl
    assert held.deadline_s - held.since_s == pytest.approx(ttl)
    assert told["remote_blocks_expiry_time"] == pytest.approx(held.deadline_s, abs=1.0)
    assert d.sending[turn.request_id] == told["remote_blocks_expiry_time"]
    assert d.connector.decoder_kv_blocks_ttl == 480, "the next request's is the configured one"
    d.assert_clean()


def test_the_settings_bound_what_is_asked(engine: Make) -> None:
    d = engine(role="kv_consumer", decoder_kv_blocks_ttl=100, kvtune={"min_retain_s": 20, "max_retain_s": 300})
    ttls = []
    for asked in (1, 50, 1000):
        turn = decoded(d, handover(retain_s=asked))
        ttls.append(wire.read_ttl_s(d.answers[turn.request_id].kv_transfer_params))
    assert ttls == [20, 50, 300]
    d.assert_clean()


def test_nothing_is_held_that_nobody_wants(d: Engine) -> None:
    turn = decoded(d, handover(retain_s=0))
    assert d.answers[turn.request_id].kv_transfer_params is None
    assert d.booked(events.RetentionMissed) == [events.RetentionMissed(Missed.UNWANTED)]
    assert d.booked(events.RetentionStarted) == [] and d.sending == {}
    assert d.free == d.free_at_start
    d.assert_clean()


def test_without_bidirectional_nothing_is_held(engine: Make) -> None:
    d = engine(role="kv_consumer", bidirectional_kv_xfer=False)
    turn = decoded(d, handover())
    assert d.answers[turn.request_id].kv_transfer_params is None
    assert d.booked(events.RetentionMissed) == [events.RetentionMissed(Missed.DISABLED)]
    d.assert_clean()


def missed(d: Engine) -> list[Missed]:
    assert d.booked(events.RetentionStarted) == []
    return [e.missed for e in d.booked(events.RetentionMissed)]


def test_aborted_before_it_is_scheduled_p_is_told(d: Engine) -> None:
    d.abort(d.add(PROMPT, handover("p-1")))
    d.step()
    assert d.notified == ["p-1"]
    assert missed(d) == [Missed.ABORTED]
    d.assert_clean()


@pytest.mark.parametrize("end", ["read", "failed"])
def test_aborted_while_it_waits_for_p(d: Engine, end: str) -> None:
    turn = d.add(PROMPT, handover())
    d.step()
    d.abort(turn)
    d.step()
    assert d.free == d.free_at_start - 13, "NIXL still writes into them"
    d.step(**{end: [turn.request_id]})
    assert missed(d) == [Missed.ABORTED]
    assert len(d.booked(events.KvRead)) == (end == "read")
    d.assert_clean()


def test_aborted_while_it_runs(d: Engine) -> None:
    turn = d.add(PROMPT, handover(), max_tokens=50)
    d.step()
    d.step(read=[turn.request_id])
    d.step()
    assert turn.status == RequestStatus.RUNNING
    d.abort(turn)
    d.step()
    assert missed(d) == [Missed.ABORTED]
    d.assert_clean()


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_failed_pull_costs_a_prefill(engine: Make, policy: str) -> None:
    d = engine(role="kv_consumer", policy=policy)
    turn = d.add(PROMPT, handover(), max_tokens=5)
    d.step()
    d.step(failed=[turn.request_id])
    d.run(turn)
    assert d.computed[turn.request_id] == 204
    assert d.booked(events.KvReadFailed) == [events.KvReadFailed(Direction.P2D)]
    assert len(d.booked(events.RetentionStarted)) == 1
    d.assert_clean()


def test_preempted_on_d_it_recomputes(engine: Make) -> None:
    d = engine(role="kv_consumer", blocks=31, caching=False)
    other = d.add(tokens(160, 2), None, max_tokens=100)
    d.step()
    turn = d.add(PROMPT, handover(), max_tokens=100)
    d.step()
    d.step(read=[turn.request_id])
    d.run(other)
    d.run(turn)
    assert turn.num_preemptions > 0 and d.reading == {}
    assert len(d.booked(events.KvRead)) == 1
    assert [e.tokens for e in d.booked(events.RetentionStarted)] == [299]
    d.assert_clean()


def test_finished_while_preempted_it_exports_nothing(engine: Make) -> None:
    """With overlapping batches the last token may come back when the blocks are gone already."""
    d = engine(role="kv_consumer", overlapping=True)
    turn = d.add(PROMPT, handover())
    d.step()
    d.step(read=[turn.request_id])
    last = d.schedule()
    d.scheduler.running.remove(turn)
    d.scheduler._preempt_request(turn, 0.0)
    d.process(last)
    assert turn.status == RequestStatus.FINISHED_LENGTH_CAPPED
    assert d.answers[turn.request_id].kv_transfer_params is None
    assert missed(d) == [Missed.ERROR]
    assert turn.request_id in d.connector._reqs_not_processed, "the worker forgets it"
    d.assert_clean()


@pytest.mark.parametrize("overlapping", [False, True])
def test_what_d_exports_p_can_read_and_give_back(engine: Make, overlapping: bool) -> None:
    d, p = engine(role="kv_consumer", overlapping=overlapping), engine(overlapping=overlapping)
    p.step(offsets={"here": 0.0})
    one, two = decoded(d, handover()), decoded(d, handover(), max_tokens=60)
    for turn in (one, two):
        told = d.answers[turn.request_id].kv_transfer_params
        follow = p.add([*turn.all_token_ids, *tokens(50, 3)], told)
        p.step()
        p.step(read=[follow.request_id])
        p.step()
        decision, reason, fetched, local = p.report(follow)
        assert (decision, reason, fetched + local) == ("fetch", "none", told["remote_num_tokens"])
    edited = decoded(d, handover())
    p.add(tokens(300, 8), d.answers[edited.request_id].kv_transfer_params)
    p.step()
    assert p.notified == [f"{edited.request_id}#kvtune-released"]
    message, given_back = wire.split_notification(f"{p.notified[0]}:1")
    assert (message, given_back) == (f"{edited.request_id}:1", (edited.request_id, End.RELEASED))
    p.assert_clean()
    d.assert_clean()
