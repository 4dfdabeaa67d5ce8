"""The worker's side: what each read cost, what was declined, how retentions ended. Told to the scheduler each step."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

from kvtune_connector import wire
from kvtune_connector.nixl_stats import ConnectorStats
from kvtune_connector.settings import ConnectorSettings
from kvtune_telemetry.vocabulary import End

_CLOCK_ERROR_S = 1.0
"""What the offset of another host's clock may be wrong by."""


@dataclass
class WorkerNews(KVConnectorWorkerMetadata):
    """What happened in a worker's step. Only rank 0 tells: one request is one read whatever the parallel size."""

    reads: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Request id to transfer seconds and bytes (this rank's)."""
    declined: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    ended: dict[str, str] = field(default_factory=dict)
    """Request id to how its retention ended (`End`)."""
    late: int = 0
    offsets: dict[str, float] = field(default_factory=dict)
    """Engine id to its clock's offset (s): its deadline less this is ours."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Merge another rank's."""
        assert isinstance(other, WorkerNews)
        self.reads.update(other.reads)
        self.declined |= other.declined
        self.failed |= other.failed
        self.ended.update(other.ended)
        self.late += other.late
        self.offsets.update(other.offsets)
        return self

    def __bool__(self) -> bool:
        return bool(self.reads or self.declined or self.failed or self.ended or self.late or self.offsets)


class ConnectorWorker(NixlPullConnectorWorker):
    """A stock pull worker that remembers what it did."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any, settings: ConnectorSettings) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self.settings = settings
        self.xfer_stats = ConnectorStats()
        self._news = WorkerNews()
        self._told_offsets: dict[str, float] = {}
        self._reading: str | None = None
        self._begun: dict[str, float] = {}
        self._reads: dict[str, tuple[float, int]] = {}
        self._stock_notifs = self.nixl_wrapper.get_new_notifs
        self.nixl_wrapper.get_new_notifs = self._notifs
        self._stock_telemetry = self.nixl_wrapper.get_xfer_telemetry
        self.nixl_wrapper.get_xfer_telemetry = self._telemetry

    # --- reads ------------------------------------------------------------------------------------------------------

    def _read_blocks_for_req(self, req_id: str, meta: Any) -> None:
        if meta.awaiting_kvs:
            self._begun.setdefault(req_id, time.perf_counter())
        super()._read_blocks_for_req(req_id, meta)

    def _is_turn2_read_expired(self, meta: Any) -> bool:
        expired: bool = super()._is_turn2_read_expired(meta)
        if expired:
            for req_id, known in self._recving_metadata.items():
                if known is meta:
                    self._news.declined.add(req_id)
        return expired

    def _pop_done_transfers(self, transfers: dict[str, list[int]]) -> tuple[set[str], set[str]]:
        done: set[str] = set()
        failed: set[str] = set()
        # One request at a time, so that what NIXL tells of a handle can be booked under its request.
        for req_id in list(transfers):
            self._reading = req_id
            mine = {req_id: transfers[req_id]}
            finished, broken = super()._pop_done_transfers(mine)
            self._reading = None
            if req_id in mine:
                transfers[req_id] = mine[req_id]
            else:
                del transfers[req_id]
            done |= finished
            failed |= broken
            if finished and not broken and self._outlived(req_id):
                # D may have let the blocks go while they were read: what arrived is nobody knows whose.
                self._news.declined.add(req_id)
                failed.add(req_id)
        return done, failed

    def _outlived(self, req_id: str) -> bool:
        """Whether a read ended after its deadline."""
        meta = self._recving_metadata.get(req_id)
        expiry = getattr(meta.remote, "blocks_expiry_time", None) if meta is not None else None
        if expiry is None or not any(meta.local_block_ids):
            return False
        offset = self._engine_clock_offset.get(meta.remote.engine_id)
        return offset is None or time.perf_counter() + _CLOCK_ERROR_S >= expiry - offset

    def _telemetry(self, handle: int) -> Any:
        try:
            told = self._stock_telemetry(handle)
        except Exception:
            # A transfer that is done is done, whether or not NIXL can say how long it took.
            told = None
        req_id = self._reading
        if req_id is not None:
            seconds, size = self._reads.get(req_id, (0.0, 0))
            if told is not None:
                seconds, size = max(seconds, told.xferDuration / 1e6), size + int(told.totalBytes)
            elif req_id in self._begun:
                seconds = time.perf_counter() - self._begun[req_id]
            self._reads[req_id] = (seconds, size)
        return told

    def get_transfer_results(self) -> Any:
        """Stock results, with the failures noted."""
        results = super().get_transfer_results()
        failed = results.failed_recving or set()
        self._news.failed |= failed
        for req_id in (results.finished_recving or set()) | failed:
            self._begun.pop(req_id, None)
            read = self._reads.pop(req_id, None)
            if read is not None and req_id not in failed:
                self._news.reads[req_id] = read
        return results

    # --- retentions -------------------------------------------------------------------------------------------------

    def _notifs(self) -> dict[str, list[bytes]]:
        """Notifications as stock understands them; what a reader says beyond that is noted."""
        found: dict[str, list[bytes]] = {}
        for agent, notifs in self._stock_notifs().items():
            plain = found[agent] = []
            for notif in notifs:
                try:
                    message, given_back = wire.split_notification(notif.decode())
                    if not message.startswith("HB:") and int(message.rsplit(":", 1)[1]) < 1:
                        continue
                except (ValueError, IndexError):
                    # vLLM would stop the engine for it.
                    continue
                # A late one ends nothing: what is no longer held has been told as ended.
                if given_back is not None and given_back[0] in self._reqs_to_process:
                    self._news.ended[given_back[0]] = given_back[1].value
                plain.append(message.encode())
        return found

    def _get_new_notifs(self) -> set[str]:
        late = len(self.xfer_stats.data["num_notifications_after_expiry"])
        done: set[str] = super()._get_new_notifs()
        self._news.late += len(self.xfer_stats.data["num_notifications_after_expiry"]) - late
        for req_id in done:
            self._news.ended.setdefault(req_id, End.READ.value)
        return done

    def _reap_expired_send_leases(self, done_sending: set[str]) -> None:
        before = set(done_sending)
        super()._reap_expired_send_leases(done_sending)
        for req_id in done_sending - before:
            self._news.ended[req_id] = End.LAPSED.value

    # --- to the scheduler -------------------------------------------------------------------------------------------

    def take_news(self) -> WorkerNews | None:
        """What happened since the last call; None for nothing, and on all ranks but the first."""
        for engine, offset in self._engine_clock_offset.copy().items():
            if self._told_offsets.get(engine) != offset:
                self._told_offsets[engine] = self._news.offsets[engine] = offset
        if not self._news:
            return None
        news, self._news = self._news, WorkerNews()
        return news if self.tp_rank == 0 else None
