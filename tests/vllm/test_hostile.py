"""Parameters that nobody honest sends, and references whose words are true but whose blocks are not: none of them may
stop an engine, hang, leak, or be read."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from test_ranks import holds, reads, worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata, NixlHandshakePayload
from vllm_harness import BLOCK, FIRST, Engine, handover, reference, tokens

from kvtune_connector.nixl_scheduler import engine_id_of_process, renamed
from kvtune_telemetry.events import RetentionMissed
from kvtune_telemetry.vocabulary import End

__all__ = ["worker"]

Make = Callable[..., Engine]
HISTORY = tokens(640)
PROMPT = HISTORY + tokens(60, 1)

BAD: dict[str, list[Any]] = {
    "remote_engine_id": [5, ["x"], {"a": 1}, True, "", None],
    "remote_request_id": [5, ["x"], {"a": 1}, ""],
    "remote_host": [5, ["x"], ""],
    "remote_port": ["x", -1, 1.5, [1]],
    "remote_num_tokens": ["640", 640.0, -1, 10**15, float("nan"), [640], True, {"a": 1}],
    "remote_block_ids": [
        5, "abc", {"a": [1]}, [1, 2, 3], [["a"]], [[]], [[1]], [list(range(1000, 1100))], [[-1] * 40], [None],
        [[1.5] * 40], [[1] * 40, [1] * 40], True,
    ],
    "remote_blocks_expiry_time": ["x", float("nan"), float("inf"), -1, [1], True, 10**15],
    "tp_size": ["x", 0, -1, 2**31, None, 1.5],
    "kvtune": [5, "x", [], {"fingerprint": 5}, {"fingerprint": {"alg": "blake2b-64"}}],
}  # fmt: skip
CASES = [(name, value) for name, values in BAD.items() for value in values]


@pytest.mark.parametrize("proof", [True, False])
@pytest.mark.parametrize(("name", "value"), CASES, ids=[f"{name}={str(value)[:20]}" for name, value in CASES])
def test_prefill_answers_whatever_a_reference_says(engine: Make, name: str, value: Any, proof: bool) -> None:
    p = engine(kvtune={"require_fingerprint": proof})
    p.step(offsets={"d": 0.0})
    turn = p.add(PROMPT, {**reference(HISTORY, proof=proof), name: value})
    p.step()
    if turn.request_id in p.reading:
        told = p.reading[turn.request_id]
        assert len(told.local_block_ids[0]) == len(told.remote.block_ids[0])
        p.step(read=[turn.request_id])
    p.run(turn)
    p.assert_clean()


@pytest.mark.parametrize(
    ("name", "value"), [case for case in CASES if case[0] != "kvtune"],
    ids=[f"{name}={str(value)[:20]}" for name, value in CASES if name != "kvtune"],
)  # fmt: skip
def test_decode_answers_whatever_a_hand_over_says(engine: Make, name: str, value: Any) -> None:
    d = engine(role="kv_consumer")
    turn = d.add(tokens(40), {**handover(), name: value}, max_tokens=3)
    d.step()
    if turn.request_id in d.reading:
        d.step(read=[turn.request_id])
    d.run(turn)


@pytest.mark.parametrize("role", ["kv_consumer", "kv_producer"])
@pytest.mark.parametrize("aborted", [False, True])
@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_prefill": True},
        {"do_remote_prefill": 1, "remote_block_ids": [[1, 2, 3]]},
        {"do_remote_prefill": True, "do_remote_decode": True},
        {"do_remote_decode": True, "_remote_blocks_processed": True},
        {"_remote_blocks_processed": True},
        "text",
        ["a"],
    ],
)
def test_half_a_set_of_parameters(engine: Make, role: str, params: Any, aborted: bool) -> None:
    one = engine(role=role)
    turn = one.add(tokens(40), copy.deepcopy(params), max_tokens=3)
    if aborted:
        one.abort(turn)
        one.step()
        one.step()
        return
    one.step()
    if turn.request_id in one.reading:
        one.step(read=[turn.request_id])
    one.run(turn)


def test_a_clients_own_mark_retains_nothing(engine: Make) -> None:
    d = engine(role="kv_consumer")
    turn = d.add(tokens(40), {"_remote_blocks_processed": True}, max_tokens=3)
    d.run(turn)
    assert d.free == d.free_at_start and d.sending == {}


@pytest.mark.parametrize("fingerprinted", [True, False])
@pytest.mark.parametrize("blocks", [39, 41, 1])
def test_blocks_that_are_not_the_tokens_are_not_read(engine: Make, blocks: int, fingerprinted: bool) -> None:
    assert 40 * BLOCK == 640
    p = engine(kvtune={"require_fingerprint": fingerprinted})
    p.step(offsets={"d": 0.0})
    params = reference(HISTORY, proof=fingerprinted)
    params["remote_block_ids"] = [list(range(1000, 1000 + blocks))]
    turn = p.add(PROMPT, params)
    p.step()
    assert p.reading == {} and p.report(turn)[:2] == ("recompute", "rewritten")
    p.assert_clean()


@pytest.mark.parametrize("in_flight", [1, 2])
def test_kv_that_a_batch_in_flight_still_computes_is_not_exported(engine: Make, in_flight: int) -> None:
    d = engine(role="kv_consumer", overlapping=in_flight == 2)
    turn = d.add(tokens(200), handover(), max_tokens=50, stop_token_ids=[103])
    d.step()
    d.step(read=[turn.request_id])
    batches = []
    while not turn.is_finished():
        batches.append(d.schedule())
        if len(batches) >= in_flight:
            d.process(batches.pop(0))
    told = d.answers[turn.request_id].kv_transfer_params
    # The last token is sampled, not computed; one batch computes it all the same if another is in flight.
    assert turn.num_in_flight_tokens == in_flight - 1
    assert told["remote_num_tokens"] == len(turn.all_token_ids) - 1 == told["kvtune"]["fingerprint"]["tokens"]
    assert len(told["remote_block_ids"][0]) == -(-told["remote_num_tokens"] // BLOCK)


@pytest.mark.parametrize("raw", [b"\xff\xfe", b"nocolon", b"a:x", b"a:0", b"#kvtune-released:1", b"x#kvtune-released:"])
def test_a_notification_that_is_none_ends_nothing(worker: Callable[..., Any], raw: bytes) -> None:
    one = worker()
    holds(one, "a", "x")
    one._stock_notifs = lambda: {"agent": [raw]}
    results = one.get_transfer_results()
    assert not results.finished_sending and not one._news.ended


@pytest.mark.parametrize(("left_s", "kept"), [(-30.0, False), (0.5, False), (30.0, True)])
def test_a_read_that_outlives_the_retention_is_not_believed(
    worker: Callable[..., Any], left_s: float, kept: bool
) -> None:
    one = worker()
    reads(one, "a", 1)
    one._recving_metadata["a"].remote.blocks_expiry_time = time.perf_counter() + left_s
    one._engine_clock_offset["d"] = 0.0
    one.nixl_wrapper.states[1] = "DONE"
    results = one.get_transfer_results()
    assert (results.failed_recving == set()) is kept
    assert ("a" in one._news.declined) is not kept


def test_offsets_may_grow_while_they_are_told(worker: Callable[..., Any]) -> None:
    one = worker()
    told: dict[str, float] = {"d": 0.0}

    class Growing(dict):  # type: ignore[type-arg]
        def items(self) -> Any:
            for pair in super().items():
                self["late"] = 1.0
                yield pair

    one._engine_clock_offset = Growing(told)
    news = one.take_news()
    assert news is not None and news.offsets["d"] == 0.0


@pytest.mark.parametrize(
    ("given", "made"),
    [("d0", "d0-ab12c"), ("d0_dp3", "d0-ab12c_dp3"), ("my_dpx", "my_dpx-ab12c"), ("_dp", "_dp-ab12c")],
)
def test_a_configured_engine_id_does_not_survive_a_restart(given: str, made: str) -> None:
    assert engine_id_of_process(given, "ab12c") == made


def test_a_first_turn_is_untouched(engine: Make) -> None:
    p = engine()
    turn = p.add(PROMPT, dict(FIRST))
    p.run(turn)
    assert p.decisions == [("recompute", "none", 0)]
    assert End.READ not in p.sending.values()


def test_a_second_aborted_request_of_the_same_hand_over_is_no_other(engine: Make) -> None:
    """What vLLM's API server sends when a client leaves before a whole answer."""
    d = engine(role="kv_consumer")
    params = handover()
    turn = d.add(tokens(40), dict(params), max_tokens=50)
    d.step()
    d.step(read=[turn.request_id])
    d.step()
    d.abort(turn)
    d.step()
    again = d.add(tokens(40), dict(params), max_tokens=50)
    d.abort(again)
    d.step()
    assert len(d.booked(RetentionMissed)) == 1
    assert d.notified == []


def test_a_request_that_never_ran_tells_p_once(engine: Make) -> None:
    d = engine(role="kv_consumer")
    params = handover("p-1")
    for _ in range(2):
        refused = d.add(tokens(40), dict(params), max_tokens=50)
        d.abort(refused)
        d.step()
    assert len(d.booked(RetentionMissed)) == 1
    assert d.notified == ["p-1"]


def test_a_handshake_goes_by_the_name_of_the_process() -> None:
    agent = NixlAgentMetadata(
        engine_id="d0", agent_metadata=b"x", kv_caches_base_addr=[1], device_id=0, num_blocks=2, block_lens=[3],
        block_strides=[4], kv_cache_layout="HND", block_size=16, ssm_sizes=(0, 0), attn_backend_name="CPU",
        physical_blocks_per_logical_kv_block=1,
    )  # fmt: skip
    told = NixlHandshakePayload("hash", msgspec.msgpack.encode(agent))
    found = msgspec.msgpack.decode(renamed(told, "d0-1").agent_metadata_bytes, type=NixlAgentMetadata)
    assert found == replace(agent, engine_id="d0-1")
