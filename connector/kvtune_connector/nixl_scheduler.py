"""The scheduler's side: decides, with proof, whether P reads a history back; fingerprints and retains it on D."""

from __future__ import annotations

import math
import time
import uuid
from array import array
from collections import OrderedDict, deque
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from loguru import logger
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.v1.request import RequestStatus

from kvtune_connector import wire
from kvtune_connector.fingerprint import fingerprint, stride_for, verified_prefix
from kvtune_connector.nixl_spans import DECISION, READ, emit
from kvtune_connector.nixl_stats import ConnectorStats, of_events
from kvtune_connector.nixl_worker import WorkerNews
from kvtune_connector.policy import EXPIRY_MARGIN_S, Offer, Verdict, decide
from kvtune_connector.retention import RetentionLedger
from kvtune_connector.settings import ConnectorSettings
from kvtune_telemetry import events
from kvtune_telemetry.vocabulary import Decision, Direction, End, Missed, Reason

_REQUIRED = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
_FIRST_REST_S = 0.0005
_STEPS = 64
_REMEMBERED_GONE = 4096
_REMEMBERED = 65_536
"""References this reader remembers to have used; each is a few hundred bytes."""
_ENDS = {end.value for end in End}
_READ = wire.READ_MARK


@dataclass(slots=True)
class _Prefill:
    """What is known of one request that P prefills."""

    offer: Offer | None
    headers: Any
    """The request's trace headers; None unless vLLM traces."""
    asked_s: float
    prompt_tokens: int
    local_tokens: int = 0
    verdict: Verdict | None = None
    booked: bool = False
    admitted_s: float | None = None
    arrived_s: float | None = None
    computing_s: float | None = None
    failure: Reason | None = None


@dataclass(slots=True)
class _Pull:
    """What is known of one request that D pulls from P."""

    admitted_s: float
    tokens: int
    headers: Any


class ConnectorScheduler(NixlPullConnectorScheduler):
    """A stock pull scheduler that reads only what it can prove, never waits for what will not come, and keeps books."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any, settings: ConnectorSettings) -> None:
        process = uuid.uuid4().hex
        super().__init__(vllm_config, engine_id_of_process(engine_id, process[:8]), kv_cache_config)
        self.decoder_kv_blocks_ttl: float
        self.settings = settings
        self.incarnation = f"{self.engine_id}:{process}"
        self._prefills: dict[str, _Prefill] = {}
        # Prefills that have not been scheduled yet: a step looks at these, not at all that runs.
        self._to_compute: set[str] = set()
        self._pulls: dict[str, _Pull] = {}
        self._ledger = RetentionLedger()
        self._events: list[events.ConnectorEvent] = []
        self._offsets: dict[str, float] = {}
        self._news = WorkerNews()
        self._gone: OrderedDict[str, _Prefill] = OrderedDict()
        self._steps: deque[bool] = deque(maxlen=_STEPS)
        self._lockstep = vllm_config.parallel_config.data_parallel_size > 1
        self._rest_s = min(_FIRST_REST_S, settings.idle_sleep_ms / 1e3)
        self._used: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._ranks = max(1, self.transfer_tp_size)
        config = vllm_config.kv_transfer_config
        if config.kv_load_failure_policy != "recompute":
            # Read by vLLM's scheduler after this: a failed read costs a prefill, never the turn.
            logger.info("kv_load_failure_policy is {}: kvtune recomputes instead", config.kv_load_failure_policy)
            config.kv_load_failure_policy = "recompute"

    def set_xfer_handshake_metadata(self, metadata: Any) -> None:
        """Shake hands under the id of this process: vLLM's reader refuses a partner of another name."""
        super().set_xfer_handshake_metadata({rank: renamed(told, self.engine_id) for rank, told in metadata.items()})

    def on_new_request(self, request: Any) -> None:
        """What a client sends is believed by vLLM without a look: take out what would stop the engine."""
        if request.kv_transfer_params is not None:
            request.kv_transfer_params = wire.sanitized(request.kv_transfer_params)
        super().on_new_request(request)

    # --- P: the decision --------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens to read beyond the local hit. Called again for each failed admission: decides, books nothing."""
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_decode"):
            return super().get_num_new_matched_tokens(request, num_computed_tokens)
        if params.get(_READ):
            # Looked up again after a failed read or a preemption. Nothing more will come: stock would wait for ever.
            return 0, False
        known = self._prefills.get(request.request_id)
        if known is None:
            known = self._prefills[request.request_id] = _Prefill(
                self._offer(request, params), request.trace_headers, time.perf_counter(), request.num_prompt_tokens
            )
            self._to_compute.add(request.request_id)
        offer = known.offer
        if offer is not None and (params["remote_engine_id"], params["remote_request_id"]) in self._used:
            # Another request may have used it since this one was looked at first.
            known.offer = replace(offer, verified_tokens=None, consumed=True)
        known.local_tokens = num_computed_tokens
        known.verdict = verdict = decide(
            prompt_tokens=request.num_prompt_tokens,
            local_tokens=num_computed_tokens,
            offer=known.offer,
            now_s=time.perf_counter(),
            threshold_tokens=self.settings.threshold_tokens,
            margin_s=EXPIRY_MARGIN_S,
            require_fingerprint=self.settings.require_fingerprint,
            # With a host buffer vLLM queues no read-back: waiting for one would be for ever.
            enabled=self.is_bidirectional_kv_xfer_enabled and not self.use_host_buffer,
        )
        return (verdict.fetch_tokens, True) if verdict.decision is Decision.FETCH else (0, False)

    def _offer(self, request: Any, params: dict[str, Any]) -> Offer | None:
        if not params.get("remote_block_ids") or any(params.get(name) is None for name in _REQUIRED):
            return None
        tokens = params.get("remote_num_tokens") or 0
        if not self._tail_only(params) and len(params["remote_block_ids"][0]) != -(-tokens // self._block_of(params)):
            # Not the blocks of so many tokens: vLLM would take the last ones for the first.
            return Offer(tokens, 0, None)
        expiry = params.get("remote_blocks_expiry_time")
        offset = self._offsets.get(params["remote_engine_id"])
        deadline = expiry - offset if expiry is not None and offset is not None else None
        held = wire.read_fingerprint(params)
        verified: int | None = None
        if held is None and tokens > request.num_prompt_tokens and self._tail_only(params):
            verified = 0
        elif held is not None and expiry is not None:
            # Without its deadline a proven reference may name blocks that are long another request's.
            prompt = request.prompt_token_ids if request.prompt_embeds is None else None
            proven = verified_prefix(held, array("I", prompt), seed=seed_of(request)) if prompt else 0
            verified = self._readable(params, min(proven, held.tokens), tokens)
        return Offer(tokens, verified, deadline, explored=wire.read_explore(params))

    def _readable(self, params: dict[str, Any], proven: int, offered: int) -> int:
        """How much of a proven prefix can be read: all of the sequence, else whole blocks of both sides."""
        remote = wire.read_block_size(params) or self.block_size
        if proven >= offered and (remote == self.block_size or self._tail_only(params)):
            return offered
        if self._tail_only(params):
            return 0
        whole = math.lcm(int(remote), int(self.block_size))
        return proven // whole * whole

    def _block_of(self, params: dict[str, Any], block_size: int | None = None) -> int:
        """Tokens that one of the named blocks stands for, over all context-parallel ranks."""
        return int(block_size or wire.read_block_size(params) or self.block_size) * int(params.get("dcp_size") or 1)

    def _tail_only(self, params: dict[str, Any]) -> bool:
        """Whether blocks are exported for the end of the sequence only (sliding windows, states): all or nothing."""
        return bool(self._is_hma_required) or len(params["remote_block_ids"]) != 1

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request is admitted: act on the decision, and book it, once."""
        params = request.kv_transfer_params
        known = self._prefills.get(request.request_id)
        if params and params.get("do_remote_decode") and known is not None and not params.get(_READ):
            self._commit(request, params, known, num_external_tokens)
        elif params and params.get("do_remote_prefill") and num_external_tokens > 0:
            self._use(params)
            self._pulls[request.request_id] = _Pull(time.perf_counter(), num_external_tokens, request.trace_headers)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def _use(self, params: dict[str, Any]) -> None:
        """Remember that what these parameters name was read, or given back: nobody gets it a second time."""
        self._used[params["remote_engine_id"], params["remote_request_id"]] = None
        while len(self._used) > _REMEMBERED:
            self._used.popitem(last=False)

    def _commit(self, request: Any, params: dict[str, Any], known: _Prefill, external: int) -> None:
        verdict = known.verdict
        assert verdict is not None
        if known.offer is not None and not known.offer.consumed:
            self._use(params)
        if external > 0:
            known.admitted_s = time.perf_counter()
            if external < verdict.fetch_tokens:
                verdict = known.verdict = replace(
                    verdict, fetch_tokens=external, use_tokens=known.local_tokens + external
                )
            self._cut(params, verdict.use_tokens)
            return
        if verdict.decision is Decision.FETCH:
            # The scheduler loads nothing for it (prompt log-probabilities, another connector's hit): give it back.
            verdict = known.verdict = Verdict(
                Decision.RECOMPUTE, Reason.DISABLED, 0, verdict.available_tokens, 0, notify_release=True
            )
        if known.offer is not None and not verdict.notify_release:
            # Gone or going: a notification could name blocks that are another request's by now.
            params["remote_block_ids"] = None
        elif known.offer is not None and wire.has_fingerprint(params):
            why = End.LOCAL_HIT if verdict.reason in (Reason.NONE, Reason.BELOW_THRESHOLD) else End.RELEASED
            params["remote_request_id"] = wire.marked_release(params["remote_request_id"], why)
        if verdict.reason is Reason.EXPIRED:
            self._events.append(events.KvReadDeclined())
        self._book(known, verdict.decision, verdict.reason, 0)

    def _cut(self, params: dict[str, Any], use: int) -> None:
        if use >= (params.get("remote_num_tokens") or 0):
            return
        remote = wire.read_block_size(params) or self.block_size
        keep = -(-use // int(remote))
        params["remote_num_tokens"] = use
        params["remote_block_ids"] = [group[:keep] for group in params["remote_block_ids"]]

    def _book(self, known: _Prefill, decision: Decision, reason: Reason, fetched: int) -> None:
        if known.booked:
            return
        known.booked = True
        verdict = known.verdict
        self._events.append(
            events.PrefillDecided(
                decision,
                reason,
                known.prompt_tokens,
                known.local_tokens,
                fetched,
                verdict.available_tokens if verdict is not None else 0,
            )
        )
        known.failure = reason if decision is Decision.RECOMPUTE else None
        emit(
            known.headers,
            DECISION,
            known.asked_s,
            known.admitted_s or time.perf_counter(),
            {
                "kvtune.decision": decision.value,
                "kvtune.reason": reason.value,
                "kvtune.kv.tokens": fetched,
                "kvtune.local_tokens": known.local_tokens,
            },
        )

    # --- both: what the workers did ---------------------------------------------------------------------------------

    def update_connector_output(self, connector_output: Any) -> None:
        """Reads that arrived or failed, retentions that ended."""
        super().update_connector_output(connector_output)
        fresh, received = connector_output.kv_connector_worker_meta, connector_output.finished_recving
        if fresh is None and not received and not connector_output.finished_sending:
            # The ordinary step.
            return
        now = time.perf_counter()
        news = self._news
        if isinstance(fresh, WorkerNews):
            # Kept: rank 0 tells when it is done, vLLM reports a request when the last rank is.
            news.aggregate(fresh)
            self._offsets.update(fresh.offsets)
            self._events.extend(events.KvLateNotification() for _ in range(fresh.late))
        failed = set(connector_output.failed_recving or ())
        for req_id in received or ():
            self._received(req_id, now, news, req_id in failed or req_id in news.failed)
            news.reads.pop(req_id, None)
            news.failed.discard(req_id)
            news.declined.discard(req_id)
        for req_id in connector_output.finished_sending or ():
            told = news.ended.pop(req_id, End.READ.value)
            end = End(told) if told in _ENDS else End.READ
            ended = self._ledger.end(req_id, end, now)
            if ended is not None:
                self._events.append(ended)

    def _received(self, req_id: str, now: float, news: WorkerNews, failed: bool) -> None:
        gone = self._gone.pop(req_id, None)
        known = gone or self._prefills.get(req_id)
        pull = self._pulls.pop(req_id, None)
        seconds, size = news.reads.get(req_id, (0.0, 0))
        if known is not None and known.admitted_s is not None and known.verdict is not None:
            if failed:
                known.offer = None
                reason = Reason.EXPIRED if req_id in news.declined else Reason.READ_FAILED
                known.failure = reason
                if req_id in news.declined:
                    self._events.append(events.KvReadDeclined())
                else:
                    self._events.append(events.KvReadFailed(Direction.D2P))
                if gone is not None:
                    # Its end is over: nothing later would book it.
                    self._book(gone, Decision.RECOMPUTE, reason, 0)
                return
            known.arrived_s = now
            tokens = known.verdict.fetch_tokens
            self._book(known, known.verdict.decision, known.verdict.reason, tokens)
            emit_read(known.headers, Direction.D2P, known.admitted_s, now, tokens, seconds, size * self._ranks)
            self._events.append(
                events.KvRead(Direction.D2P, tokens, size * self._ranks, seconds, now - known.admitted_s)
            )
        elif pull is not None:
            if failed:
                self._events.append(events.KvReadFailed(Direction.P2D))
            else:
                emit_read(pull.headers, Direction.P2D, pull.admitted_s, now, pull.tokens, seconds, size * self._ranks)
                self._events.append(
                    events.KvRead(Direction.P2D, pull.tokens, size * self._ranks, seconds, now - pull.admitted_s)
                )

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Note which prefills begin to compute; rest when there is nothing to do but hold blocks."""
        if scheduler_output.total_num_scheduled_tokens == 0:
            if self._may_rest():
                # vLLM steps empty batches for as long as blocks are held, at a full core. The rest grows from step to
                # step: what comes soon after work finds the engine awake.
                time.sleep(self._rest_s)
                self._rest_s = min(2 * self._rest_s, self.settings.idle_sleep_ms / 1e3)
        else:
            self._rest_s = min(_FIRST_REST_S, self.settings.idle_sleep_ms / 1e3)
            for req_id in [one for one in self._to_compute if one in scheduler_output.num_scheduled_tokens]:
                self._to_compute.discard(req_id)
                known = self._prefills.get(req_id)
                if known is not None:
                    known.computing_s = time.perf_counter()
        self._steps.append(scheduler_output.total_num_scheduled_tokens > 0)
        return super().build_connector_meta(scheduler_output)

    def _may_rest(self) -> bool:
        """Whether nobody waits for this step: no rank in lockstep, no batch in flight, no KV on its way."""
        if not self.settings.idle_sleep_ms or self._lockstep or self._reqs_need_recv or self._pulls:
            return False
        reading = any(known.admitted_s is not None and known.arrived_s is None for known in self._prefills.values())
        return not reading and not any(self._steps)

    # --- the end of a request ---------------------------------------------------------------------------------------

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Export what the other side needs; on D with proof, and for as long as the router asks."""
        params = request.kv_transfer_params
        known = self._prefills.pop(request.request_id, None)
        self._to_compute.discard(request.request_id)
        if not params:
            return super().request_finished(request, block_ids)
        if params.get("do_remote_decode"):
            return self._prefilled(request, block_ids, known)
        return self._decoded(request, block_ids, params)

    def _prefilled(self, request: Any, block_ids: Any, known: _Prefill | None) -> tuple[bool, dict[str, Any] | None]:
        delay, exported = super().request_finished(request, block_ids)
        if known is None:
            return delay, exported
        verdict = known.verdict
        fetched = verdict.fetch_tokens if verdict is not None and known.arrived_s is not None else 0
        if known.failure is not None:
            self._book(known, Decision.RECOMPUTE, known.failure, 0)
        elif known.admitted_s is not None and known.arrived_s is None:
            # Aborted while the read is under way: it will arrive all the same.
            self._gone[request.request_id] = known
            while len(self._gone) > _REMEMBERED_GONE:
                self._gone.popitem(last=False)
        if exported is None or verdict is None:
            return delay, exported
        computed = request.num_prompt_tokens - known.local_tokens - fetched
        # A preempted prefill computed more than this, and waited in between: it says nothing of the cost.
        if known.computing_s is not None and computed > 0 and not request.num_preemptions:
            self._events.append(events.PrefillComputed(computed, time.perf_counter() - known.computing_s))
        decision = verdict.decision if known.failure is None else Decision.RECOMPUTE
        reason = verdict.reason if known.failure is None else known.failure
        exported[wire.KEY] = {
            **wire.report_extras(
                decision=decision,
                reason=reason,
                fetched=fetched,
                local=known.local_tokens,
                available=verdict.available_tokens,
            ),
            "incarnation": self.incarnation,
        }
        return delay, exported

    def _decoded(self, request: Any, block_ids: Any, params: dict[str, Any]) -> tuple[bool, dict[str, Any] | None]:
        if not params.get(_READ) and not params.get("do_remote_prefill"):
            # Parameters that ask for nothing: stock would hold the blocks, and no worker would ever let them go.
            return False, None
        if params.get("do_remote_prefill"):
            if (params["remote_engine_id"], params["remote_request_id"]) in self._used:
                # vLLM's API server tells of a client that left before a whole answer with a second, aborted request of
                # the same parameters: P has been told, and the turn is booked.
                return False, None
            self._use(params)
        finished = request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        ttl = self.settings.retention_s(wire.read_retain_s(params))
        if finished and self.is_bidirectional_kv_xfer_enabled and ttl == 0:
            self._stop_heartbeat(request.request_id)
            self._reqs_not_processed.add(request.request_id)
            self._events.append(events.RetentionMissed(Missed.UNWANTED))
            return False, None
        usual, self.decoder_kv_blocks_ttl = self.decoder_kv_blocks_ttl, ttl
        try:
            delay, exported = super().request_finished(request, block_ids)
        finally:
            self.decoder_kv_blocks_ttl = usual
        if not delay or exported is None:
            # Also a turn whose last token came back after a preemption (overlapping batches): stock would export a
            # reference to no blocks.
            self._reqs_not_processed.add(request.request_id)
            self._events.append(events.RetentionMissed(self._why_missed(request)))
            return delay, None
        held = min(exported["remote_num_tokens"] - request.num_in_flight_tokens, len(request.all_token_ids))
        whole = held == exported["remote_num_tokens"]
        if not whole and not self._tail_only(exported):
            # With overlapping batches the last token's KV is still being computed by the batch in flight.
            exported["remote_num_tokens"] = held
            (blocks,) = exported["remote_block_ids"]
            exported["remote_block_ids"] = [blocks[: -(-held // self._block_of(exported, self.block_size))]]
            whole = True
        # A sliding window or a state cannot be cut: without proof nobody reads it.
        if whole and getattr(request, "prompt_embeds", None) is None:
            exported[wire.KEY] = self._proof(request, held, ttl)
        self._events.append(
            self._ledger.start(
                request.request_id,
                tokens=held,
                blocks=sum(len(group) for group in block_ids),
                now_s=time.perf_counter(),
                ttl_s=ttl,
            )
        )
        return delay, exported

    def _proof(self, request: Any, held: int, ttl: float) -> dict[str, Any]:
        """What makes a reference provable. Prompts of embeddings have no token ids to prove."""
        return wire.reference_extras(
            fingerprint=fingerprint(
                array("I", request.all_token_ids[:held]),
                stride=stride_for(held, self.block_size),
                seed=seed_of(request),
            ),
            ttl_s=ttl,
            block_size=self.block_size,
            incarnation=self.incarnation,
        )

    def _why_missed(self, request: Any) -> Missed:
        if not self.is_bidirectional_kv_xfer_enabled:
            return Missed.DISABLED
        return Missed.ABORTED if request.status == RequestStatus.FINISHED_ABORTED else Missed.ERROR

    def take_stats(self) -> ConnectorStats | None:
        """The events since the last call, as statistics; None for none. Called once for each processed step."""
        if self._steps:
            self._steps.popleft()
        found, self._events = self._events, []
        return of_events(found)


def engine_id_of_process(engine_id: str, process: str) -> str:
    """The engine id with what tells this start of the engine from the last; a data-parallel rank stays at the end.

    A configured id survives restarts. A reader knows its partner by it, and would read a reference to what the process
    before held, with a valid proof, out of the blocks of the new one.
    """
    base, mark, rank = engine_id.rpartition("_dp")
    return f"{base}-{process}_dp{rank}" if mark and rank.isdecimal() else f"{engine_id}-{process}"


def renamed(told: Any, engine_id: str) -> Any:
    """A rank's handshake with another engine id in it."""
    agent = msgspec.msgpack.decode(told.agent_metadata_bytes, type=NixlAgentMetadata)
    agent.engine_id = engine_id
    return replace(told, agent_metadata_bytes=msgspec.msgpack.encode(agent))


def emit_read(
    headers: Any, direction: Direction, begun_s: float, ended_s: float, tokens: int, seconds: float, size: int
) -> None:
    """The span of a read, from admission to arrival."""
    emit(
        headers,
        READ,
        begun_s,
        ended_s,
        {
            "kvtune.kv.direction": direction.value,
            "kvtune.kv.tokens": tokens,
            "kvtune.kv.bytes": size,
            "kvtune.kv.transfer_s": seconds,
        },
    )


def seed_of(request: Any) -> bytes:
    """Whatever the KV depends on besides token ids: adapter, cache salt, multi-modal content at its places."""
    parts = []
    if request.lora_request is not None:
        parts.append(f"lora:{request.lora_request.lora_name}")
    if request.cache_salt:
        parts.append(f"salt:{request.cache_salt}")
    parts.extend(
        f"mm:{feature.identifier}:{feature.mm_position.offset}:{feature.mm_position.length}"
        for feature in request.mm_features or ()
    )
    return "\n".join(parts).encode()
