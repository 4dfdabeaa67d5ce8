"""vLLM's own v1 scheduler with our connector in it, and a worker that does what the test says. No model, no server."""

from __future__ import annotations

import itertools
import json
import time
from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvtune_connector import wire
from kvtune_connector.fingerprint import fingerprint, stride_for
from kvtune_connector.nixl_stats import EVENTS, unpack
from kvtune_connector.nixl_worker import WorkerNews
from kvtune_telemetry import events

BLOCK = 16
FIRST = {"do_remote_decode": True, "do_remote_prefill": False}
_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "float32", "vocab_size": 4096,
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1,
    "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6,
}  # fmt: skip
_ids = itertools.count()


def model(directory: Path) -> Path:
    """A model directory that is a configuration and nothing else."""
    (directory / "config.json").write_text(json.dumps(_CONFIG))
    init_none_hash(sha256)
    return directory


def tokens(count: int, seed: int = 0) -> list[int]:
    """`count` token ids that differ from those of any other seed."""
    return [(seed * 7919 + n * 31) % 4000 + 3 for n in range(count)]


def reference(
    held: list[int],
    *,
    name: str | None = None,
    engine: str = "d",
    block_size: int = BLOCK,
    expires_in: float | None = 480.0,
    proof: bool = True,
    explore: bool = False,
) -> dict[str, Any]:
    """What a router hands to P: D holds `held` under `name`, for `expires_in` seconds of this machine's clock."""
    params: dict[str, Any] = {
        **FIRST, "remote_engine_id": engine, "remote_request_id": name or f"d-{next(_ids)}", "remote_host": "h",
        "remote_port": 1, "remote_num_tokens": len(held), "tp_size": 1,
        "remote_block_ids": [list(range(1000, 1000 - -len(held) // block_size))],
        "remote_blocks_expiry_time": None if expires_in is None else time.perf_counter() + expires_in,
    }  # fmt: skip
    if proof:
        proven = fingerprint(array("I", held), stride=stride_for(len(held), block_size), seed=b"")
        params[wire.KEY] = wire.reference_extras(fingerprint=proven, ttl_s=480.0, block_size=block_size)
        if explore:
            params[wire.KEY]["explore"] = True
    return params


def handover(name: str | None = None, **asked: Any) -> dict[str, Any]:
    """What a router hands to D: P holds the prompt. `asked`: what kvtune's router asks beside."""
    params: dict[str, Any] = {
        "do_remote_decode": False, "do_remote_prefill": True, "remote_engine_id": "p",
        "remote_request_id": name or f"p-{next(_ids)}", "remote_host": "h", "remote_port": 1, "tp_size": 1,
        "remote_block_ids": [[1, 2, 3]],
    }  # fmt: skip
    return params | ({wire.KEY: {"v": 1, **asked}} if asked else {})


def settings_of(
    directory: Path,
    *,
    role: str = "kv_producer",
    ours: bool = True,
    blocks: int = 200,
    caching: bool = True,
    policy: str = "fail",
    max_seqs: int = 64,
    budget: int = 8192,
    order: Any = "fcfs",
    ranks: int = 1,
    replicas: int = 1,
    overlapping: bool = False,
    **extra: Any,
) -> VllmConfig:
    """vLLM's configuration. `extra`: kv_connector_extra_config."""
    config = VllmConfig(
        model_config=ModelConfig(model=str(directory), skip_tokenizer_init=True, dtype="float32", max_model_len=8192),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=caching),
        scheduler_config=SchedulerConfig(
            max_model_len=8192,
            is_encoder_decoder=False,
            max_num_seqs=max_seqs,
            max_num_batched_tokens=budget,
            enable_chunked_prefill=True,
            policy=order,
            async_scheduling=overlapping,
        ),
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="NixlConnector",
            kv_connector_module_path="kvtune_connector" if ours else None,
            kv_role=role,
            engine_id="here",
            kv_load_failure_policy=policy,
            kv_connector_extra_config={"bidirectional_kv_xfer": True, **extra},
        ),
    )
    # Set afterwards: a configuration of several ranks asks for as many devices.
    config.parallel_config.tensor_parallel_size = ranks
    config.parallel_config.data_parallel_size = replicas
    config.cache_config.num_gpu_blocks = blocks
    return config


class Engine:
    """A scheduler and its worker. The worker finishes nothing by itself: `step` says what it did."""

    def __init__(self, directory: Path, *, overlapping: bool = False, **settings: Any) -> None:
        self.config = settings_of(directory, overlapping=overlapping, **settings)
        blocks = self.config.cache_config.num_gpu_blocks
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.float32)
        self.scheduler = (AsyncScheduler if overlapping else Scheduler)(
            vllm_config=self.config,
            kv_cache_config=KVCacheConfig(
                num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
            ),
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=BLOCK,
            log_stats=True,
        )
        assert self.scheduler.connector is not None
        self.connector: Any = self.scheduler.connector.connector_scheduler
        self.free_at_start = self.free
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.events: list[Any] = []
        self.answers: dict[str, Any] = {}
        """Request id to its last output."""
        self.reading: dict[str, Any] = {}
        """Request id to what the worker was told to read, until the test says that it did."""
        self.notified: list[str] = []
        """Ids under which D was told to let go, as on the wire."""
        self.sending: dict[str, float] = {}
        """Finished requests whose blocks are held, with their deadlines."""
        self.computed: dict[str, int] = {}
        """Request id to the tokens that the model was asked to compute."""
        self.sampled = itertools.count(100)
        self._sampling: dict[int, set[str]] = {}

    @property
    def free(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def add(
        self,
        prompt: list[int],
        params: dict[str, Any] | None = None,
        *,
        name: str | None = None,
        max_tokens: int = 1,
        priority: int = 0,
        **sampling: Any,
    ) -> Request:
        """A request arrives."""
        request = Request(
            name or f"r-{next(_ids)}",
            list(prompt),
            SamplingParams(
                max_tokens=max_tokens, ignore_eos=True, extra_args={"kv_transfer_params": params}, **sampling
            ),
            None,
            priority=priority,
            block_hasher=self.hasher,
        )
        self.scheduler.add_request(request)
        return request

    def schedule(self) -> SchedulerOutput:
        """The first half of a step: what is scheduled, and what the worker is told."""
        output = self.scheduler.schedule()
        told = output.kv_connector_metadata
        for req_id, meta in told.reqs_to_recv.items():
            if meta.awaiting_kvs:
                self.reading[req_id] = meta
            else:
                self.notified.append(meta.remote.request_id)
        self.sending.update(told.reqs_to_send)
        for req_id, count in output.num_scheduled_tokens.items():
            self.computed[req_id] = self.computed.get(req_id, 0) + count
        # Noted now: with overlapping batches the next one moves on before this one is processed.
        self._sampling[id(output)] = {
            req_id for req_id in output.num_scheduled_tokens if not self.scheduler.requests[req_id].is_prefill_chunk
        }
        return output

    def process(self, output: SchedulerOutput, moved: KVConnectorOutput | None = None) -> None:
        """The second half: the model's and the worker's output."""
        ids = list(output.num_scheduled_tokens)
        sampling = self._sampling.pop(id(output))
        self.outputs = self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={one: n for n, one in enumerate(ids)},
                sampled_token_ids=[[next(self.sampled) % 4000] if one in sampling else [] for one in ids],
                kv_connector_output=moved or KVConnectorOutput(),
            ),
        )
        for batch in self.outputs.values():
            for answer in batch.outputs:
                self.answers[answer.request_id] = answer
            if batch.scheduler_stats is not None and batch.scheduler_stats.kv_connector_stats:
                told = batch.scheduler_stats.kv_connector_stats.get(EVENTS, ())
                self.events.extend(unpack(json.loads(json.dumps(data))) for data in told)

    def moved(
        self,
        *,
        read: Iterable[str] = (),
        failed: Iterable[str] = (),
        declined: Iterable[str] = (),
        sent: Mapping[str, str | None] | None = None,
        offsets: Mapping[str, float] | None = None,
    ) -> KVConnectorOutput:
        """What the worker says of a step, in vLLM's form and with our news. `sent`: id to how the holding ended."""
        read, broken = set(read), set(failed) | set(declined)
        news = WorkerNews(
            reads={one: (0.25, 1000) for one in read},
            declined=set(declined),
            failed=set(broken),
            ended={one: end for one, end in (sent or {}).items() if end is not None},
            offsets=dict(offsets or {}),
        )
        blocks = {block for one in broken for block in self.reading[one].local_block_ids[0]}
        for one in read | broken:
            del self.reading[one]
        for one in sent or ():
            del self.sending[one]
        return KVConnectorOutput(
            finished_recving=read | broken or None,
            finished_sending=set(sent or ()) or None,
            failed_recving=broken,
            invalid_block_ids=blocks,
            kv_connector_worker_meta=news or None,
        )

    def step(self, **moved: Any) -> SchedulerOutput:
        """A whole step; `moved` as in the method of that name."""
        output = self.schedule()
        self.process(output, self.moved(**moved))
        return output

    def run(self, request: Request, steps: int = 2000) -> None:
        """Step until the request is finished; the worker has nothing to do."""
        for _ in range(steps):
            if request.is_finished():
                return
            self.step()
        raise AssertionError(f"{request.request_id} is {request.status!r} after {steps} steps")

    def abort(self, request: Request) -> None:
        """The client leaves."""
        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    def booked(self, kind: type[Any]) -> list[Any]:
        """Events of one kind, in order."""
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def decisions(self) -> list[tuple[str, str, int]]:
        """What was booked of each prefill: decision, reason, fetched tokens."""
        return [(e.decision.value, e.reason.value, e.fetched_tokens) for e in self.booked(events.PrefillDecided)]

    def report(self, request: Request) -> tuple[str, str, int, int]:
        """What P's answer says: decision, reason, fetched and local tokens."""
        told = self.answers[request.request_id].kv_transfer_params[wire.KEY]
        return told["decision"], told["reason"], told["fetched_tokens"], told["local_tokens"]

    def let_go(self) -> None:
        """D has read, or P's lease ended: whatever is held is let go."""
        # A step tells the worker what is held; the next one brings its answer.
        self.step()
        if self.sending:
            self.step(sent=dict.fromkeys(self.sending))

    def assert_clean(self) -> None:
        """Nothing is left of any request, with the scheduler or with us; all blocks are back."""
        self.let_go()
        ours = self.connector
        left = {
            "requests": self.scheduler.requests, "running": self.scheduler.running, "prefills": ours._prefills,
            "to compute": ours._to_compute, "pulls": ours._pulls, "gone": ours._gone, "held": len(ours._ledger),
            "reads": ours._news.reads, "failed": ours._news.failed, "declined": ours._news.declined,
            "ended": ours._news.ended, "to read": ours._reqs_need_recv, "heartbeats": ours._heartbeat_req_engine,
        }  # fmt: skip
        assert {name: what for name, what in left.items() if what} == {}
        assert (ours._ledger.tokens, ours._ledger.blocks) == (0, 0)
        assert self.free == self.free_at_start
