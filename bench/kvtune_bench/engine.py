"""A simulated vLLM engine: scheduler, KV pool and the bidirectional NIXL contract, in model time.

What decides about reuse is the connector's own code (`policy`, `fingerprint`, `RetentionLedger`, `wire`); what a GPU
would do is a calibrated duration. All times are seconds of the injected clock. Differences from vLLM 0.32 that matter:

* Compute is one FCFS server without chunked prefill or batching; decoding never slows down.
* A request gets all pages for its prompt and longest answer at admission, in order of arrival; nothing is preempted.
* Pages are one fingerprint stride (64 tokens at the usual block sizes), so a local hit is a multiple of that.
* `remote_block_ids` is a short stand-in (first and last block): nothing here addresses blocks by number.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import uuid
from collections import OrderedDict, deque
from collections.abc import Coroutine, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from loguru import logger
from prometheus_client import CollectorRegistry

from kvtune_bench.calibration import Calibration, Noise, calibration
from kvtune_bench.engine_chain import Chain
from kvtune_bench.engine_metrics import ENGINE_INDEX, VllmMetrics
from kvtune_bench.faults import Faults
from kvtune_bench.pool import Pages, Pool
from kvtune_bench.sidechannel import DeadPeerError, Peer, SideChannelServer
from kvtune_connector import wire
from kvtune_connector.fingerprint import stride_for
from kvtune_connector.policy import DEFAULT_THRESHOLD_TOKENS, DEFAULT_TTL_S, EXPIRY_MARGIN_S, Offer, Verdict, decide
from kvtune_connector.retention import RetentionLedger
from kvtune_connector.settings import ConnectorSettings
from kvtune_telemetry.clock import Clock, clock_from_spec
from kvtune_telemetry.events import (
    ConnectorEvent,
    KvLateNotification,
    KvRead,
    KvReadDeclined,
    KvReadFailed,
    PrefillComputed,
    PrefillDecided,
    RetentionMissed,
)
from kvtune_telemetry.recorder import ConnectorRecorder
from kvtune_telemetry.vocabulary import Decision, Direction, End, Missed, Reason, Role

LEASE_S = 30.0
"""vLLM's `kv_lease_duration`: how long P keeps a prompt's KV for D."""
LEASE_WALL_S = 3.0
"""The lease lasts at least so many wall seconds: between P's answer and D's read lies real Python, not model time."""
HEARTBEAT_S = 5.0
LEASE_EXTENSION_S = 20.0
_REMEMBERED_ENDS = 20_000
_HEAP_SLACK = 1024


class EngineError(Exception):
    """The request fails with HTTP `status`."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one simulated engine; names as vLLM's where there is one. Raises ValueError for impossible ones."""

    role: Role
    host: str = "127.0.0.1"
    port: int = 0
    side_channel_port: int = 0
    model: str = "qwen3-32b"
    """A calibration preset, or a calibration file."""
    served_model_name: str | None = None
    """Default: the calibration's name."""
    time_scale: str | None = None
    """As `clock_from_spec` reads it."""
    ttl_s: float = DEFAULT_TTL_S
    threshold_tokens: int = DEFAULT_THRESHOLD_TOKENS
    bidirectional: bool = True
    failure_policy: Literal["fail", "recompute"] = "fail"
    connector: Literal["kvtune", "stock"] = "kvtune"
    stream_params: bool = True
    """Whether streams carry `kv_transfer_params`; stock 0.32 streams do not."""
    prefix_caching: bool = True
    pool_tokens: int | None = None
    block_size: int = 16
    tp: int = 8
    seed: int = 0
    noise: float = 0.1
    instant: bool = False
    """Wait for nothing; durations are still booked as calibrated."""
    chunk_tokens: int | None = None
    """Tokens a stream chunk; default: few enough for at most 32 chunks an answer."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "role", Role(self.role))
        if self.failure_policy not in ("fail", "recompute"):
            raise ValueError(f"failure policy must be fail or recompute, got {self.failure_policy!r}")
        if self.connector not in ("kvtune", "stock"):
            raise ValueError(f"connector must be kvtune or stock, got {self.connector!r}")
        for name, value, low in (
            ("ttl", self.ttl_s, 0),
            ("threshold", self.threshold_tokens, 0),
            ("noise", self.noise, 0),
            ("block size", self.block_size, 1),
            ("tensor parallel size", self.tp, 1),
            ("pool tokens", self.pool_tokens if self.pool_tokens is not None else 1, 1),
            ("chunk tokens", self.chunk_tokens if self.chunk_tokens is not None else 1, 1),
        ):
            if not value >= low:
                raise ValueError(f"{name} must be at least {low}, got {value}")
        for name, port in (("port", self.port), ("side channel port", self.side_channel_port)):
            if not 0 <= port <= 65535:
                raise ValueError(f"{name} must be between 0 and 65535, got {port}")

    def as_dict(self) -> dict[str, Any]:
        """Plain data; `EngineConfig(**data)` reads it."""
        return {**asdict(self), "role": self.role.value}


@dataclass(frozen=True, slots=True)
class Reference:
    """Another engine's blocks, as `kv_transfer_params` name them."""

    engine_id: str
    request_id: str
    host: str
    port: int
    tokens: int
    expiry_s: float | None

    @classmethod
    def parse(cls, params: Mapping[str, Any]) -> Reference | None:
        """The reference in `params`; None when one of vLLM's required fields is missing or unusable."""
        engine, request, host, port = (
            params.get(f"remote_{name}") for name in ("engine_id", "request_id", "host", "port")
        )
        tokens, expiry = params.get("remote_num_tokens"), params.get("remote_blocks_expiry_time")
        texts = isinstance(engine, str) and isinstance(request, str) and isinstance(host, str)
        if not texts or not isinstance(port, int) or not isinstance(tokens, int) or tokens < 1:
            return None
        if not params.get("remote_block_ids") or not 0 < port < 65536:
            return None
        deadline = float(expiry) if isinstance(expiry, (int, float)) and not isinstance(expiry, bool) else None
        return cls(str(engine), str(request), str(host), port, tokens, deadline)


@dataclass(slots=True, eq=False)
class Job:
    """One request in the engine. Times in the engine's clock (s)."""

    request_id: str
    prompt: bytes
    """Token ids as little-endian 32-bit bytes."""
    max_tokens: int
    params: Mapping[str, Any]
    arrived_s: float
    salt: bytes = b""
    chain: Chain = field(init=False)
    pages: Pages | None = None
    admitted_s: float = 0.0
    first_token_s: float = 0.0
    local_tokens: int = 0
    fetched_tokens: int = 0
    wrong: bool = False
    """Some of its KV belongs to other tokens: the answer is wrong too."""
    report: dict[str, Any] | None = None
    reference: Reference | None = None
    settled: bool = False
    """Whether the holder of `reference` has been told what became of it."""
    waiting: bool = True
    leaked: bool = False

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.prompt) // 4

    @property
    def for_decode(self) -> bool:
        """Whether another engine will decode it (P's leg)."""
        return bool(self.params.get("do_remote_decode"))

    @property
    def from_prefill(self) -> bool:
        """Whether another engine has prefilled it (D's leg)."""
        return bool(self.params.get("do_remote_prefill"))


@dataclass(slots=True)
class _Holding:
    """Pages kept for another engine: D's retention, or P's lease (`retained` False)."""

    pages: Pages
    chain: Chain
    deadline_s: float
    retained: bool
    wrong: bool
    read_until_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Ended:
    end: End
    deadline_s: float
    wrong: bool
    read_in_flight: bool


class Engine:
    """One engine, of the running event loop.

    `serve()` first; then for each request `start`, and `finish` or `abandon`; `close` at the end.
    """

    def __init__(self, config: EngineConfig, *, clock: Clock | None = None, model: Calibration | None = None) -> None:
        self.config = config
        self.role = config.role
        self.clock = clock if clock is not None else clock_from_spec(config.time_scale)
        self.model = model if model is not None else calibration(config.model)
        self.model_name = config.served_model_name or self.model.name
        self.engine_id = str(uuid.uuid4())
        self.faults = Faults()
        self.random = random.Random(config.seed)
        self.registry = CollectorRegistry()
        page = stride_for(1, config.block_size)
        pool_tokens = config.pool_tokens or self.model.pool_tokens
        self.pool = Pool(max(1, pool_tokens // page), page, caching=config.prefix_caching)
        self.ledger = RetentionLedger()
        self.violations = {"late_read": 0, "double_read": 0, "wrong_kv": 0}
        self.leaked_pages = 0
        self._noise = Noise(config.noise, config.seed)
        self._compute_free: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._compute_free.set_result(float("-inf"))
        self._queue: deque[tuple[Job, asyncio.Future[None]]] = deque()
        self._holdings: dict[str, _Holding] = {}
        self._ended: OrderedDict[str, _Ended] = OrderedDict()
        self._deadlines: list[tuple[float, str]] = []
        self._wake = asyncio.Event()
        self._peers: dict[tuple[str, int], Peer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._channel = SideChannelServer(self._on_side_channel)
        self._running = 0
        self._waiting = 0
        self._served = 0
        scale = float(getattr(self.clock, "scale", 1.0))
        self._lease_s = max(LEASE_S, LEASE_WALL_S * scale)
        self.metrics = VllmMetrics(
            self.registry,
            model_name=self.model_name,
            tp=config.tp,
            block_size=config.block_size,
            gpu_blocks=pool_tokens // config.block_size,
            usage=lambda: self.pool.usage,
            running=lambda: self._running,
            waiting=lambda: self._waiting,
        )
        self._recorder: ConnectorRecorder | None = None
        if config.connector == "kvtune":
            recorder = self._recorder = ConnectorRecorder(
                self.registry, model_name=self.model_name, engine=ENGINE_INDEX, role=self.role
            )
            settings = ConnectorSettings(config.bidirectional, config.ttl_s, config.threshold_tokens)
            for setting, value in settings.in_force(pool_tokens).items():
                recorder.set_setting(setting, value)

    # --- life -------------------------------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Open the side channel and start the timer of retentions. Raises OSError if the port is taken."""
        await self._channel.start(self.config.host, self.config.side_channel_port)
        self._spawn(self._reap(), "reaper")

    async def close(self) -> None:
        """Drop what is held, hang up, stop the tasks."""
        await self._channel.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for peer in self._peers.values():
            await peer.close()
        for key in list(self._holdings):
            self._end(key, End.ABORTED, self.clock.now())

    def state(self) -> dict[str, Any]:
        """What `/sim/state` answers."""
        leases = sum(not holding.retained for holding in self._holdings.values())
        return {
            "engine_id": self.engine_id,
            "role": self.role.value,
            "model": self.model_name,
            "now_s": self.clock.now(),
            "side_channel": {"host": self._channel.host, "port": self._channel.port},
            "requests": {"running": self._running, "waiting": self._waiting, "finished": self._served},
            "pool": {
                "capacity_pages": self.pool.capacity,
                "page_tokens": self.pool.page_tokens,
                "used_pages": self.pool.used,
                "cached_pages": self.pool.cached,
                "leaked_pages": self.leaked_pages,
                "usage": self.pool.usage,
            },
            "retained": {"requests": len(self.ledger), "tokens": self.ledger.tokens, "blocks": self.ledger.blocks},
            "leases": leases,
            "tasks": len(self._tasks),
            "violations": dict(self.violations),
            "faults": self.faults.as_dict(),
        }

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=f"{self.role} {name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _record(self, event: ConnectorEvent) -> None:
        if self._recorder is not None:
            self._recorder.record(event)

    def _violation(self, kind: Literal["late_read", "double_read", "wrong_kv"], request_id: str) -> None:
        self.violations[kind] += 1
        self.metrics.violations[kind].inc()
        logger.error("{} of {}", kind, request_id)

    async def until(self, moment_s: float) -> None:
        """Wait until that moment of the clock; not at all in instant mode."""
        if not self.config.instant and (delay := moment_s - self.clock.now()) > 0:
            await self.clock.sleep(delay)

    # --- a request --------------------------------------------------------------------------------------------------

    def job(
        self, request_id: str, prompt: bytes, max_tokens: int, params: Mapping[str, Any] | None, salt: bytes = b""
    ) -> Job:
        """A request that arrives now. Raises EngineError(400) if it can never run."""
        job = Job(request_id, prompt, max_tokens, params or {}, self.clock.now(), salt)
        total = job.prompt_tokens + max_tokens
        limit = self.model.context_tokens
        if total > limit:
            raise EngineError(
                400,
                f"This model's maximum context length is {limit} tokens. However, you requested {total} tokens "
                f"({job.prompt_tokens} in the messages, {max_tokens} in the completion). "
                "Please reduce the length of the messages or completion.",
            )
        if self.pool.pages_for(total) > self.pool.capacity:
            raise EngineError(400, f"The request needs {total} tokens of KV cache, more than the engine has.")
        return job

    async def start(self, job: Job) -> None:
        """Queue, get the KV of the prompt, and wait for the first token.

        Raises EngineError. If it raises, or is cancelled, nothing stays held (but for what vLLM leaks).
        """
        self._waiting += 1
        try:
            if job.for_decode or job.from_prefill:
                job.reference = Reference.parse(job.params)
            job.chain = Chain(job.prompt, self.pool.page_tokens, job.salt)
            offset_s = await self._alive(job.reference) if job.reference is not None else None
            await self._admit(job)
            if job.from_prefill and job.reference is not None:
                await self._start_pulled(job, job.reference, offset_s)
            elif job.for_decode:
                await self._start_prefill(job, job.reference, offset_s)
            else:
                await self._start_alone(job)
        except asyncio.CancelledError:
            self.abandon(job)
            raise
        except EngineError:
            self._drop(job, "error")
            raise
        assert job.pages is not None
        self.pool.commit(job.pages, job.chain.links, wrong=job.wrong)
        self._first_token(job)

    def _first_token(self, job: Job) -> None:
        metrics = self.metrics
        metrics.ttft.observe(max(0.0, job.first_token_s - job.arrived_s))
        metrics.prompt_tokens.inc(job.prompt_tokens)
        source = metrics.prompt_source
        source["local_cache_hit"].inc(job.local_tokens)
        source["external_kv_transfer"].inc(job.fetched_tokens)
        source["local_compute"].inc(job.prompt_tokens - job.local_tokens - job.fetched_tokens)

    def token_s(self, job: Job, number: int) -> float:
        """When the answer's token `number` (from 1) is there."""
        return job.first_token_s + (number - 1) * self.model.decode_token_s

    def finish(
        self,
        job: Job,
        answer: bytes,
        *,
        reason: Literal["length", "stop"],
        aborted: bool = False,
        extra_tokens: int = 0,
    ) -> dict[str, Any] | None:
        """The answer is complete: release or keep its KV; the `kv_transfer_params` that lead to it, or None.

        `answer`: its token ids; `aborted`: cut by a stop string, which vLLM treats as an abort; `extra_tokens`: of
        further choices.
        """
        tokens = len(answer) // 4
        assert job.pages is not None
        # The last sampled token is never computed, so there is no KV for it.
        job.chain.extend(answer[:-4])
        self.pool.commit(job.pages, job.chain.links, wrong=job.wrong)
        self._book_end(job, "abort" if aborted else reason, tokens + extra_tokens, self.token_s(job, tokens))
        if not aborted and job.for_decode:
            return self._export_prefill(job)
        if not aborted and self.role is Role.DECODE and self.config.bidirectional and job.params:
            return self._export_decode(job)
        if self.role is Role.DECODE and job.params:
            self._record(RetentionMissed(Missed.ABORTED if aborted else Missed.DISABLED))
        self._free(job)
        return None

    def abandon(self, job: Job) -> None:
        """The client left: stop, and free everything at once. Doing it again, or after `finish`, changes nothing."""
        self._drop(job, "abort")

    def _drop(self, job: Job, reason: Literal["abort", "error"]) -> None:
        if job.reference is not None and job.from_prefill and not job.settled:
            job.settled = True
            self._notify(job.reference, "release", end=End.RELEASED)
        if job.leaked:
            return
        if self.role is Role.DECODE and job.params and (job.waiting or job.pages is not None):
            self._record(RetentionMissed(Missed.ABORTED if reason == "abort" else Missed.ERROR))
        if job.waiting:
            job.waiting = False
            self._waiting -= 1
            self.metrics.success[reason].inc()
        elif job.pages is not None:
            self._running -= 1
            self.metrics.success[reason].inc()
        self._free(job)

    def _book_end(self, job: Job, reason: str, tokens: int, end_s: float) -> None:
        self._running -= 1
        self._served += 1
        self.metrics.generation_tokens.inc(tokens)
        self.metrics.e2e.observe(max(0.0, end_s - job.arrived_s))
        self.metrics.success[reason].inc()

    def _free(self, job: Job) -> None:
        if job.pages is not None:
            pages, job.pages = job.pages, None
            self.pool.release(pages)
            self._pump()

    def _runs(self, job: Job) -> None:
        job.waiting = False
        self._waiting -= 1
        self._running += 1

    # --- admission --------------------------------------------------------------------------------------------------

    async def _admit(self, job: Job) -> None:
        """Take the pages for the prompt and the whole answer, in order of arrival."""
        if self._queue or not self._take(job):
            place: tuple[Job, asyncio.Future[None]] = (job, asyncio.get_running_loop().create_future())
            self._queue.append(place)
            heartbeat = None
            if job.from_prefill and job.reference is not None:
                heartbeat = asyncio.create_task(self._heartbeats(job.reference))
            try:
                await place[1]
            finally:
                if heartbeat is not None:
                    heartbeat.cancel()
                if place in self._queue:
                    self._queue.remove(place)
                    self._pump()
        assert job.pages is not None
        job.local_tokens = job.pages.hit_pages * self.pool.page_tokens
        job.wrong = self.pool.is_wrong(job.pages)
        self.metrics.local_queries.inc(job.prompt_tokens)
        self.metrics.local_hits.inc(job.local_tokens)

    def _take(self, job: Job) -> bool:
        # At least the last prompt token is computed, so a page that holds it is no hit.
        usable = job.chain.links[: (job.prompt_tokens - 1) // self.pool.page_tokens]
        job.pages = self.pool.acquire(usable, self.pool.pages_for(job.prompt_tokens + job.max_tokens))
        job.admitted_s = self.clock.now()
        return job.pages is not None

    def _pump(self) -> None:
        while self._queue:
            job, place = self._queue[0]
            if not place.done():
                if not self._take(job):
                    return
                place.set_result(None)
            self._queue.popleft()

    async def _heartbeats(self, reference: Reference) -> None:
        while True:
            await self.clock.sleep(HEARTBEAT_S)
            try:
                await self._peer(reference).call("heartbeat", request_id=reference.request_id)
            except DeadPeerError:
                return

    # --- compute ----------------------------------------------------------------------------------------------------

    async def _compute(self, job: Job, ready_s: float, tokens: int) -> None:
        """Queue for the compute server from `ready_s` on, and compute `tokens`."""
        seconds = self.model.prefill.at(tokens) * self._noise.factor()
        if self.config.instant:
            start_s = ready_s
            self._runs(job)
        else:
            start_s = await self._turn(job, ready_s, seconds)
        self.metrics.queue.observe(max(0.0, start_s - job.arrived_s))
        self.metrics.prefill.observe(seconds)
        job.first_token_s = start_s + seconds
        if self.role is Role.PREFILL:
            self._record(PrefillComputed(tokens, seconds))

    async def _turn(self, job: Job, ready_s: float, seconds: float) -> float:
        """Wait for the server to be free and for `seconds` of its time; when that began.

        The server passes from one request to the next as the moment it becomes free, not as the moment this process
        noticed, so that late wake-ups do not add up.
        """
        before, mine = self._compute_free, asyncio.get_running_loop().create_future()
        self._compute_free = mine
        end_s: float | None = None
        try:
            start_s = max(ready_s, await asyncio.shield(before))
            end_s = start_s + seconds
            await self.until(start_s)
            self._runs(job)
            await self.until(end_s)
        except asyncio.CancelledError:
            if end_s is None:
                before.add_done_callback(lambda done: mine.set_result(done.result()))
            else:
                mine.set_result(min(end_s, max(before.result(), self.clock.now())))
            raise
        mine.set_result(end_s)
        return start_s

    async def _start_alone(self, job: Job) -> None:
        """A request with no other engine in it."""
        if self.role is Role.PREFILL:
            verdict = decide(prompt_tokens=job.prompt_tokens, local_tokens=job.local_tokens, offer=None, now_s=0.0)
            self._decided(job, verdict)
        await self._compute(job, job.admitted_s, job.prompt_tokens - job.local_tokens)

    # --- P ----------------------------------------------------------------------------------------------------------

    async def _start_prefill(self, job: Job, reference: Reference | None, offset_s: float | None) -> None:
        if reference is not None and self.config.connector == "stock":
            ready_s = await self._history_stock(job, reference, offset_s)
        else:
            ready_s = await self._history(job, reference, offset_s)
        await self._compute(job, ready_s, max(1, job.prompt_tokens - job.local_tokens - job.fetched_tokens))

    async def _history(self, job: Job, reference: Reference | None, offset_s: float | None) -> float:
        """The connector's decision and the fetch; returns when the prompt is ready for compute."""
        offer = None
        if reference is not None:
            held = wire.read_fingerprint(job.params)
            deadline_s = None
            if reference.expiry_s is not None and offset_s is not None:
                deadline_s = reference.expiry_s - offset_s
            offer = Offer(
                tokens=reference.tokens,
                verified_tokens=None if held is None else job.chain.verified_prefix(held),
                deadline_s=deadline_s,
                engine_alive=offset_s is not None,
                explored=wire.read_explore(job.params),
            )
        verdict = self._verdict(job, offer)
        ready_s = job.admitted_s
        if reference is not None and offer is not None:
            if verdict.decision is Decision.FETCH:
                arrived_s = await self._fetch(job, reference, offset_s or 0.0, verdict.fetch_tokens, verdict.use_tokens)
                if arrived_s is None:
                    verdict = self._verdict(job, replace(offer, read_failed=True))
                else:
                    ready_s = arrived_s
            elif verdict.reason is Reason.EXPIRED:
                self._record(KvReadDeclined())
            if verdict.notify_release:
                kept = verdict.decision is Decision.LOCAL_HIT or verdict.reason is Reason.BELOW_THRESHOLD
                self._notify(reference, "release", end=End.LOCAL_HIT if kept else End.RELEASED)
        self._decided(job, verdict)
        return ready_s

    def _verdict(self, job: Job, offer: Offer | None) -> Verdict:
        return decide(
            prompt_tokens=job.prompt_tokens,
            local_tokens=job.local_tokens,
            offer=offer,
            now_s=self.clock.now(),
            threshold_tokens=self.config.threshold_tokens,
            enabled=self.config.bidirectional,
        )

    def _decided(self, job: Job, verdict: Verdict) -> None:
        self.metrics.external_queries.inc(job.prompt_tokens - job.local_tokens)
        self.metrics.external_hits.inc(job.fetched_tokens)
        self._record(
            PrefillDecided(
                verdict.decision,
                verdict.reason,
                job.prompt_tokens,
                job.local_tokens,
                job.fetched_tokens,
                verdict.available_tokens,
            )
        )
        if self.config.connector == "kvtune":
            job.report = wire.report_extras(
                decision=verdict.decision,
                reason=verdict.reason,
                fetched=job.fetched_tokens,
                local=job.local_tokens,
                available=verdict.available_tokens,
            )

    async def _history_stock(self, job: Job, reference: Reference, offset_s: float | None) -> float:
        """What vLLM 0.32 does by itself: no proof of equality, and its failure policy for what cannot be read."""
        ready_s = job.admitted_s
        if not self.config.bidirectional:
            # The scheduler waits for a read that no worker was told to make.
            await self._hang(job)
        count = min(reference.tokens, job.prompt_tokens) - job.local_tokens
        self.metrics.external_queries.inc(job.prompt_tokens - job.local_tokens)
        if count <= 0 or count < self.config.threshold_tokens:
            self._notify(reference, "release", end=End.LOCAL_HIT)
            return ready_s
        self.metrics.external_hits.inc(count)
        deadline_s = None
        if reference.expiry_s is not None and offset_s is not None:
            deadline_s = reference.expiry_s - offset_s
        arrived_s = None
        if offset_s is None:
            self.metrics.transfer_failed()
        elif deadline_s is not None and self.clock.now() + EXPIRY_MARGIN_S >= deadline_s:
            self.metrics.expired()
        else:
            use = min(reference.tokens, job.prompt_tokens)
            arrived_s = await self._fetch(job, reference, offset_s, count, use)
        if arrived_s is None:
            if self.config.failure_policy == "fail":
                raise EngineError(500, "Internal server error")
            await self._hang(job)
        assert arrived_s is not None
        return arrived_s

    async def _hang(self, job: Job) -> None:
        """The request is never scheduled again, and its blocks are lost even when its client gives up."""
        assert job.pages is not None
        job.leaked = True
        self.leaked_pages += job.pages.count
        self.metrics.leaked.set(self.leaked_pages)
        await asyncio.get_running_loop().create_future()

    async def _fetch(
        self, job: Job, reference: Reference, offset_s: float, tokens: int, use_tokens: int
    ) -> float | None:
        """Read `tokens` tokens, so that the first `use_tokens` are here; when they arrived, or None if it failed."""
        seconds = self.model.transfer.at(tokens) * self._noise.factor()
        until_s = await self._read(job, reference, offset_s, Direction.D2P, use_tokens, seconds)
        if until_s is None:
            return None
        if self.pool.pages_for(reference.tokens) > self.pool.pages_for(job.prompt_tokens) and (
            self.config.connector == "stock"
        ):
            # vLLM aligns block lists at their ends: of a longer sequence it reads the wrong blocks.
            self._wrong(job)
        await self._arrival(job, reference, until_s, offset_s)
        job.fetched_tokens = tokens
        self._book_read(Direction.D2P, tokens, seconds)
        return until_s

    # --- D ----------------------------------------------------------------------------------------------------------

    async def _start_pulled(self, job: Job, reference: Reference, offset_s: float | None) -> None:
        """Pull what the prefix cache lacks from P, and hand over to decoding."""
        prompt = job.prompt_tokens
        missing = min(reference.tokens, prompt) - job.local_tokens
        handoff_s = self.model.handoff.at(prompt) * self._noise.factor()
        ready_s = job.admitted_s + handoff_s
        self.metrics.external_queries.inc(prompt - job.local_tokens)
        if missing <= 0:
            job.settled = True
            self._notify(reference, "release", end=End.READ)
        else:
            self.metrics.external_hits.inc(missing)
            seconds = min(self.model.pull_s(missing, prompt), handoff_s)
            until_s = None
            if offset_s is None:
                self.metrics.transfer_failed()
                self._record(KvReadFailed(Direction.P2D))
            else:
                use = min(reference.tokens, prompt)
                until_s = await self._read(job, reference, offset_s, Direction.P2D, use, seconds)
            job.settled = True
            if until_s is None:
                if self.config.connector == "stock" and self.config.failure_policy == "fail":
                    raise EngineError(500, "Internal server error")
                await self._compute(job, job.admitted_s, prompt - job.local_tokens)
                return
            await self._arrival(job, reference, until_s, offset_s or 0.0)
            job.fetched_tokens = missing
            self._book_read(Direction.P2D, missing, seconds)
        job.first_token_s = ready_s
        self.metrics.queue.observe(max(0.0, ready_s - job.arrived_s))
        self.metrics.prefill.observe(0.0)
        self._runs(job)
        await self.until(ready_s)

    # --- reading from another engine --------------------------------------------------------------------------------

    def _peer(self, reference: Reference) -> Peer:
        address = (reference.host, reference.port)
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = Peer(*address)
        return peer

    async def _alive(self, reference: Reference) -> float | None:
        """The offset of the other engine's clock, or None if that incarnation cannot be reached."""
        peer = self._peer(reference)
        try:
            if not peer.facts:
                sent_s = self.clock.now()
                reply = await peer.call("handshake")
                offset_s = float(reply["now_s"]) - (sent_s + self.clock.now()) / 2
                peer.facts = {"engine_id": reply["engine_id"], "offset_s": offset_s}
        except DeadPeerError as error:
            logger.warning("no handshake with {}: {}", reference.engine_id, error)
            return None
        if peer.facts.get("engine_id") != reference.engine_id:
            return None
        return float(peer.facts["offset_s"])

    async def _read(
        self, job: Job, reference: Reference, offset_s: float, direction: Direction, use_tokens: int, seconds: float
    ) -> float | None:
        """Start a read of `seconds`; when it will be complete (s), or None if it failed (which is booked here)."""
        start_s = max(job.admitted_s, self.clock.now()) if direction is Direction.D2P else job.admitted_s
        until_s = start_s + seconds
        try:
            if self.faults.fail_reads_rate and self.random.random() < self.faults.fail_reads_rate:
                raise DeadPeerError("injected fault")
            reply = await self._peer(reference).call(
                "read",
                engine_id=reference.engine_id,
                request_id=reference.request_id,
                tokens=use_tokens,
                proof=job.chain.cut(use_tokens).hex(),
                until_s=until_s + offset_s,
            )
            if not reply.get("ok"):
                raise DeadPeerError("it is another incarnation")
        except asyncio.CancelledError:
            if direction is Direction.D2P:
                # The read may have started, and then it completes; the reference is used up either way.
                self._notify(reference, "done", at_s=until_s + offset_s)
            raise
        except DeadPeerError as error:
            logger.warning("read of {} from {} failed: {}", reference.request_id, reference.engine_id, error)
            self.metrics.transfer_failed()
            self._record(KvReadFailed(direction))
            return None
        if reply.get("wrong"):
            self._wrong(job)
        return until_s

    def _wrong(self, job: Job) -> None:
        if not job.wrong:
            job.wrong = True
            self._violation("wrong_kv", job.request_id)

    async def _arrival(self, job: Job, reference: Reference, until_s: float, offset_s: float) -> None:
        """Wait for a started read, and tell the holder. A read cannot be stopped: also when the client leaves."""
        try:
            await self.until(until_s)
        finally:
            job.settled = True
            self._notify(reference, "done", at_s=until_s + offset_s)

    def _book_read(self, direction: Direction, tokens: int, seconds: float) -> None:
        size = tokens * self.model.bytes_per_token
        blocks = -(-tokens // self.config.block_size)
        self.metrics.transfer(seconds=seconds, size_bytes=size, descriptors=blocks * self.model.descriptors_per_block)
        self._record(KvRead(direction, tokens, size, seconds, seconds))

    def _notify(self, reference: Reference, op: str, **fields: Any) -> None:
        """Tell a holder something without waiting for it."""

        async def send() -> None:
            try:
                await self._peer(reference).call(
                    op, engine_id=reference.engine_id, request_id=reference.request_id, **fields
                )
            except DeadPeerError as error:
                logger.debug("{} to {} lost: {}", op, reference.engine_id, error)

        self._spawn(send(), op)

    # --- holding for another engine ---------------------------------------------------------------------------------

    def _address(self, job: Job, tokens: int) -> dict[str, Any]:
        last = max(0, -(-tokens // self.config.block_size) - 1)
        return {
            "remote_block_ids": [[0, last]],
            "remote_engine_id": self.engine_id,
            "remote_request_id": job.request_id,
            "remote_host": self._channel.host,
            "remote_port": self._channel.port,
            "remote_num_tokens": tokens,
            "tp_size": self.config.tp,
            "dcp_size": 1,
            "pp_size": 1,
            "transfer_mode": "pull",
        }

    def _export_prefill(self, job: Job) -> dict[str, Any] | None:
        """P's answer to its leg: the blocks are leased to D."""
        tokens = job.chain.tokens
        self._hold(job, self.clock.now() + self._lease_s, retained=False)
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            **self._address(job, tokens),
            "remote_blocks_expiry_time": None,
            "remote_prefill_cached_tokens": job.local_tokens + job.fetched_tokens,
        }
        if job.report is not None:
            params[wire.KEY] = job.report
        return None if self.faults.drop_params else params

    def _export_decode(self, job: Job) -> dict[str, Any] | None:
        """D's answer to its leg: the blocks are retained for the conversation's next turn."""
        now_s = self.clock.now()
        tokens = job.chain.tokens
        blocks = -(-tokens // self.config.block_size)
        ttl_s = self.config.ttl_s
        if self.config.connector == "kvtune":
            wanted_s = wire.read_retain_s(job.params)
            ttl_s = ttl_s if wanted_s is None else min(ttl_s, wanted_s)
        if ttl_s <= 0:
            self._record(RetentionMissed(Missed.UNWANTED))
            self._free(job)
            return None
        self._record(self.ledger.start(job.request_id, tokens=tokens, blocks=blocks, now_s=now_s, ttl_s=ttl_s))
        chain = job.chain
        self._hold(job, now_s + ttl_s, retained=True)
        params = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            **self._address(job, tokens),
            "remote_blocks_expiry_time": now_s + ttl_s,
        }
        if self.config.connector == "kvtune":
            fingerprint = chain.fingerprint(self.config.block_size)
            params[wire.KEY] = wire.reference_extras(fingerprint=fingerprint, ttl_s=ttl_s)
        return None if self.faults.drop_params else params

    def _hold(self, job: Job, deadline_s: float, *, retained: bool) -> None:
        assert job.pages is not None
        pages, job.pages = job.pages, None
        self.pool.shrink(pages, self.pool.pages_for(job.chain.tokens))
        self._holdings[job.request_id] = _Holding(pages, job.chain, deadline_s, retained, job.wrong)
        self._schedule(deadline_s, job.request_id)
        self._pump()

    def _schedule(self, deadline_s: float, key: str) -> None:
        if len(self._deadlines) > 2 * len(self._holdings) + _HEAP_SLACK:
            self._deadlines = [(holding.deadline_s, name) for name, holding in self._holdings.items()]
            heapq.heapify(self._deadlines)
        first = not self._deadlines or deadline_s < self._deadlines[0][0]
        heapq.heappush(self._deadlines, (deadline_s, key))
        if first:
            self._wake.set()

    def _end(self, key: str, end: End, at_s: float, *, read_in_flight: bool = False) -> bool:
        """End a holding; False if there is none. `read_in_flight`: the reader's notification is still to come."""
        holding = self._holdings.pop(key, None)
        if holding is None:
            return False
        self._ended[key] = _Ended(end, holding.deadline_s, holding.wrong, read_in_flight)
        if len(self._ended) > _REMEMBERED_ENDS:
            self._ended.popitem(last=False)
        if holding.retained and (event := self.ledger.end(key, end, at_s)) is not None:
            self._record(event)
        if end is End.LAPSED:
            self.metrics.expired()
        self.pool.release(holding.pages)
        self._pump()
        return True

    async def _reap(self) -> None:
        """End what has run out; one timer for all."""
        while True:
            self._wake.clear()
            self._reap_due(self.clock.now())
            waker = asyncio.ensure_future(self._wake.wait())
            waits: list[asyncio.Future[Any]] = [waker]
            if self._deadlines:
                waits.append(asyncio.ensure_future(self.clock.sleep(self._deadlines[0][0] - self.clock.now())))
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()

    def _reap_due(self, now_s: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now_s:
            deadline_s, key = heapq.heappop(self._deadlines)
            holding = self._holdings.get(key)
            if holding is None:
                continue
            if holding.deadline_s > deadline_s:
                heapq.heappush(self._deadlines, (holding.deadline_s, key))
                continue
            read_s = holding.read_until_s
            if read_s is not None and read_s <= deadline_s:
                # Complete in model time; only the notification is still on its way.
                self._end(key, End.READ, read_s, read_in_flight=True)
            else:
                self._end(key, End.LAPSED, deadline_s)

    def _on_side_channel(self, request: dict[str, Any]) -> dict[str, Any]:
        op = request["op"]
        if op == "handshake":
            return {"engine_id": self.engine_id, "now_s": self.clock.now(), "tp_size": self.config.tp}
        key = str(request["request_id"])
        if op == "heartbeat":
            holding = self._holdings.get(key)
            if holding is not None and not holding.retained:
                holding.deadline_s = max(holding.deadline_s, self.clock.now() + LEASE_EXTENSION_S)
            return {"ok": holding is not None}
        if request["engine_id"] != self.engine_id:
            return {"ok": False}
        if op == "read":
            return self._on_read(key, request)
        if op == "done":
            return self._on_end(key, End.READ, min(self.clock.now(), float(request["at_s"])))
        if op == "release":
            return self._on_end(key, End(request["end"]), self.clock.now())
        raise ValueError(f"unknown operation {op!r}")

    def _on_read(self, key: str, request: dict[str, Any]) -> dict[str, Any]:
        until_s = float(request["until_s"])
        holding = self._holdings.get(key)
        if holding is None:
            ended = self._ended.get(key)
            if ended is not None and ended.end is End.LAPSED and until_s <= ended.deadline_s:
                # In time on the model's clock: only this process was late to hear of it.
                self._ended[key] = replace(ended, read_in_flight=True)
                return {"ok": True, "wrong": ended.wrong}
            self._violation("double_read" if ended is not None and ended.end is End.READ else "late_read", key)
            return {"ok": True, "wrong": True}
        if holding.read_until_s is not None:
            self._violation("double_read", key)
        holding.read_until_s = until_s
        same = holding.chain.cut(int(request["tokens"])).hex() == request["proof"]
        return {"ok": True, "wrong": holding.wrong or not same}

    def _on_end(self, key: str, end: End, at_s: float) -> dict[str, Any]:
        if not self._end(key, end, at_s):
            ended = self._ended.get(key)
            if ended is not None and ended.read_in_flight:
                self._ended[key] = replace(ended, read_in_flight=False)
            else:
                self.metrics.late_notification()
                self._record(KvLateNotification())
        return {"ok": True}
