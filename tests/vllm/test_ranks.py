"""The workers' side, and what becomes of several ranks' news on the way to the scheduler."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm_harness import FIRST, Engine, handover, reference, tokens

from kvtune_connector.nixl_worker import ConnectorWorker, WorkerNews
from kvtune_connector.settings import ConnectorSettings
from kvtune_telemetry import events
from kvtune_telemetry.vocabulary import End

Make = Callable[..., Engine]
HISTORY = tokens(640)


class Nixl:
    """Transfers that are done when the test says so."""

    def __init__(self) -> None:
        self.states: dict[int, str] = defaultdict(lambda: "PROC")
        self.notifs: list[str] = []
        self.mute = False

    def check_xfer_state(self, handle: int) -> str:
        return self.states[handle]

    def get_xfer_telemetry(self, handle: int) -> Any:
        if self.mute:
            raise RuntimeError("no telemetry")
        return SimpleNamespace(xferDuration=handle * 1e6, postDuration=1.0, totalBytes=1000 + handle, descCount=4)

    def release_xfer_handle(self, handle: int) -> None:
        pass

    def send_notif(self, agent: str, notif_msg: bytes) -> None:
        pass

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        found, self.notifs = self.notifs, []
        return {"agent": [one.encode() for one in found]}


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes workers with vLLM's methods and ours; only what opens a NIXL agent is left out."""

    def bare(self: Any, config: Any, engine_id: str, kv_cache_config: Any) -> None:
        self.__dict__.update(
            nixl_wrapper=Nixl(), xfer_stats=NixlKVConnectorStats(), tp_rank=config, transfer_topo=SimpleNamespace(
                get_engine_info=lambda _: SimpleNamespace(remote_block_size=16, remote_physical_blocks_per_logical=1),
                block_size_ratio=lambda _: 1,
            ),
            use_host_buffer=False, enable_permute_local_kv=False, enable_heterogeneous_attn_post_process=False,
            use_mla=False, _is_hma_required=False, _has_mamba=False, _physical_blocks_per_logical_kv_block=1,
            _recving_transfers=defaultdict(list), _recving_metadata={}, _pending_recv_notifs={}, _recv_failures=set(),
            _failed_recv_reqs=queue.Queue(), _invalid_block_ids=queue.Queue(), _replicated_pcp_done_sending=set(),
            _reqs_to_send={}, _reqs_to_process=set(), consumer_notification_counts_by_req=defaultdict(int),
            expected_consumer_notifications_by_req={}, _lease_extension=20, _engine_clock_offset={},
            _handshake_futures={}, _handshake_lock=threading.RLock(), _remote_agents={}, _engine_by_address={},
            _failed_remote_engines=set(), _invalid_remote_engines=set(), _invalid_engine_backoff={},
        )  # fmt: skip

    monkeypatch.setattr(NixlPullConnectorWorker, "__init__", bare)
    monkeypatch.setattr(NixlPullConnectorWorker, "shutdown", lambda self: None)
    monkeypatch.setattr(NixlPullConnectorWorker, "_log_failure", lambda self, **_: None)
    return lambda rank=0: ConnectorWorker(rank, "here", None, ConnectorSettings(bidirectional=True))


def reads(worker: Any, req_id: str, *handles: int, blocks: tuple[int, ...] = (1, 2)) -> None:
    """The worker posted a read."""
    worker._recving_transfers[req_id] = list(handles)
    worker._recving_metadata[req_id] = SimpleNamespace(
        local_block_ids=(list(blocks),), local_physical_block_ids=(list(blocks),), region_blocks_to_zero=None,
        remote=SimpleNamespace(engine_id="d", block_ids=([5, 6],)),
    )  # fmt: skip


def holds(worker: Any, *req_ids: str, until: float = float("inf")) -> None:
    worker._reqs_to_process.update(req_ids)
    worker._reqs_to_send.update(dict.fromkeys(req_ids, until))


def output(worker: Any) -> ModelRunnerOutput:
    """What a worker's step hands on, as vLLM's model runner builds it."""
    results = worker.get_transfer_results()
    return ModelRunnerOutput(
        req_ids=[],
        req_id_to_index={},
        kv_connector_output=KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving or set(),
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_stats=worker.get_kv_connector_stats(),
            kv_connector_worker_meta=worker.take_news(),
        ),
    )


def test_a_read_of_several_parts_is_booked_whole(worker: Callable[..., Any]) -> None:
    one = worker()
    reads(one, "a", 1, 2)
    reads(one, "b", 3)
    one.nixl_wrapper.states[1] = "DONE"
    assert one.get_transfer_results().finished_recving == set()
    assert one.take_news() is None
    one.nixl_wrapper.states[2] = "DONE"
    assert one.get_transfer_results().finished_recving == {"a"}
    assert one.take_news() == WorkerNews(reads={"a": (2.0, 2003)})
    assert dict(one._recving_transfers) == {"b": [3]}
    assert one.get_kv_connector_stats().data["bytes_transferred"] == [1001, 1002]


def test_a_read_is_done_whether_or_not_nixl_can_time_it(worker: Callable[..., Any]) -> None:
    one = worker()
    reads(one, "a", 1)
    one._begun["a"] = 0.0
    one.nixl_wrapper.mute = True
    one.nixl_wrapper.states[1] = "DONE"
    results = one.get_transfer_results()
    assert (results.finished_recving, results.failed_recving) == ({"a"}, set())
    seconds, size = one.take_news().reads["a"]
    assert seconds > 0 and size == 0
    assert one._begun == {} and one._reads == {}


def test_a_failed_part_fails_the_read(worker: Callable[..., Any]) -> None:
    one = worker()
    reads(one, "a", 1, 2)
    one.nixl_wrapper.states.update({1: "DONE", 2: "ERR"})
    results = one.get_transfer_results()
    assert (results.finished_recving, results.failed_recving) == ({"a"}, {"a"})
    assert one.take_news() == WorkerNews(failed={"a"})
    assert one.get_block_ids_with_load_errors() == {1, 2}
    assert one._reads == {}


def test_how_holdings_end(worker: Callable[..., Any]) -> None:
    one = worker()
    holds(one, "read", "back", "unread")
    holds(one, "lapsed", until=0.0)
    one.nixl_wrapper.notifs = ["read:1", "back#kvtune-local_hit:1", "HB:unread"]
    assert one.get_transfer_results().finished_sending == {"read", "back", "lapsed"}
    assert one.take_news() == WorkerNews(
        ended={"read": End.READ.value, "back": End.LOCAL_HIT.value, "lapsed": End.LAPSED.value}
    )
    assert list(one._reqs_to_send) == ["unread"]


@pytest.mark.parametrize("told", ["gone:1", "gone#kvtune-released:1"])
def test_a_late_word_is_counted_and_ends_nothing(worker: Callable[..., Any], told: str) -> None:
    """The retention it speaks of has ended already; an end kept for it would be kept for good."""
    one = worker()
    one.nixl_wrapper.notifs = [told]
    assert one.get_transfer_results().finished_sending == set()
    assert one.take_news() == WorkerNews(late=1)


def test_only_the_first_rank_tells(worker: Callable[..., Any]) -> None:
    other = worker(1)
    other._engine_clock_offset["d"] = 1.0
    reads(other, "a", 1)
    other.nixl_wrapper.states[1] = "DONE"
    assert other.get_transfer_results().finished_recving == {"a"}
    assert other.take_news() is None


def test_offsets_are_told_once_each(worker: Callable[..., Any]) -> None:
    one = worker()
    one._engine_clock_offset["d"] = 1.0
    assert one.take_news() == WorkerNews(offsets={"d": 1.0})
    assert one.take_news() is None
    one._engine_clock_offset["d"] = 2.0
    assert one.take_news() == WorkerNews(offsets={"d": 2.0})


# --- several ranks --------------------------------------------------------------------------------------------------


def together(engine: Engine, aggregator: KVOutputAggregator, *workers: Any) -> None:
    """A step whose output is what vLLM makes of all ranks' outputs."""
    scheduled = engine.schedule()
    whole = aggregator.aggregate([output(one) for one in workers])
    assert whole is not None
    moved = whole.kv_connector_output
    for req_id in moved.finished_recving or ():
        engine.reading.pop(req_id)
    for req_id in moved.finished_sending or ():
        engine.sending.pop(req_id)
    engine.process(scheduled, moved)


@pytest.mark.parametrize("first", [0, 1])
def test_one_request_is_one_read_whatever_the_ranks(engine: Make, worker: Callable[..., Any], first: int) -> None:
    p, ranks = engine(ranks=2), [worker(0), worker(1)]
    aggregator = KVOutputAggregator(2)
    turn = p.add(HISTORY + tokens(60, 1), reference(HISTORY))
    p.step()
    for one in ranks:
        reads(one, turn.request_id, 3, blocks=tuple(p.reading[turn.request_id].local_block_ids[0]))
    ranks[first].nixl_wrapper.states[3] = "DONE"
    together(p, aggregator, *ranks)
    assert p.booked(events.KvRead) == [] and turn.request_id in p.reading
    # Other news in between.
    ranks[0]._engine_clock_offset["d"] = 0.0
    together(p, aggregator, *ranks)
    ranks[1 - first].nixl_wrapper.states[3] = "DONE"
    together(p, aggregator, *ranks)
    # 1003 bytes of the first rank, on two ranks.
    assert [(e.tokens, e.seconds, e.size_bytes) for e in p.booked(events.KvRead)] == [(640, 3.0, 2006)]
    p.step()
    assert p.report(turn) == ("fetch", "none", 640, 0)
    p.assert_clean()


@pytest.mark.parametrize("broken", [0, 1])
@pytest.mark.parametrize("first", [0, 1])
def test_a_read_that_fails_on_one_rank_has_failed(
    engine: Make, worker: Callable[..., Any], broken: int, first: int
) -> None:
    p, ranks = engine(ranks=2), [worker(0), worker(1)]
    aggregator = KVOutputAggregator(2)
    turn = p.add(HISTORY + tokens(60, 1), reference(HISTORY))
    p.step()
    for one in ranks:
        reads(one, turn.request_id, 3, blocks=tuple(p.reading[turn.request_id].local_block_ids[0]))
    for rank in (first, 1 - first):
        ranks[rank].nixl_wrapper.states[3] = "ERR" if rank == broken else "DONE"
        together(p, aggregator, *ranks)
    p.step()
    p.step()
    assert p.computed[turn.request_id] == 700
    assert p.report(turn) == ("recompute", "read_failed", 0, 0)
    assert len(p.booked(events.KvReadFailed)) == 1 and p.booked(events.KvRead) == []
    p.assert_clean()


@pytest.mark.parametrize("first", [0, 1])
def test_a_holding_ends_once_when_the_last_rank_is_done(engine: Make, worker: Callable[..., Any], first: int) -> None:
    d, ranks = engine(role="kv_consumer", ranks=2), [worker(0), worker(1)]
    aggregator = KVOutputAggregator(2)
    turn = d.add(tokens(200), handover(), max_tokens=3)
    d.step()
    d.step(read=[turn.request_id])
    d.run(turn)
    d.step()
    for one in ranks:
        holds(one, turn.request_id)
    for rank in (first, 1 - first):
        assert d.booked(events.RetentionEnded) == []
        ranks[rank].nixl_wrapper.notifs = [f"{turn.request_id}#kvtune-released:1"]
        together(d, aggregator, *ranks)
    assert [e.end for e in d.booked(events.RetentionEnded)] == [End.RELEASED]
    d.assert_clean()


def test_p_letting_its_own_blocks_go_is_no_retention(engine: Make, worker: Callable[..., Any]) -> None:
    p, one = engine(), worker()
    turn = p.add(HISTORY, dict(FIRST))
    p.step()
    p.step()
    holds(one, turn.request_id)
    one.nixl_wrapper.notifs = [f"{turn.request_id}:1"]
    together(p, KVOutputAggregator(1), one)
    assert p.booked(events.RetentionEnded) == []
    p.assert_clean()
