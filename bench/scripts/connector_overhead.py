"""What the connector adds to a scheduler step, to a worker's step and to a streamed chunk, beside what stock does.

    PYTHON_WITH_VLLM bench/scripts/connector_overhead.py

One process, stock and kvtune in turn, so that whatever else the machine does meets both; CPU time of the thread, all of
it is computation. What is compared:

* vLLM's own `Scheduler`, `schedule()` and `update_from_output()`, on a decode engine with 256 running requests that it
  pulled from prefill, nothing on its way: the ordinary step. Once with stock `NixlConnector`, once with ours. The
  difference of two such steps is small beside their noise, so the connector's part of them is also called by itself.
* The worker's part of such a step with vLLM's own methods; only NIXL is absent.
* vLLM's own chat completion stream, a chunk of a disaggregated request, as it is and as the plug-in extends it: its
  making alone, and as it is served by uvicorn to a client. What vLLM does for a chunk before that (detokenise, cross
  processes) is left out of both, so shares are upper bounds.

"added" is the median of the differences of neighbours, in brackets their quartiles. Its shares are of the stock step
(the connector's part: of the whole stock step; the others: of the stock figure in their line) and of a decode step of
10 ms; a large model's takes that and more.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import queue
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

BLOCK = 16
RUNNING = 256
STEPS, PARTS = 600, 400
STREAMS, SERVED = 60, 1000
"""Streams that are served, and chunks of each."""
CALLS = 50
"""What is too short for the clock is called so often for one time."""
WARM_UP = 0.1
DECODE_STEP_US = 10_000.0
_MODEL = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "float32", "vocab_size": 4096,
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1,
    "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6,
}  # fmt: skip


Timed = Callable[[], float]


def repeated(call: Callable[[], Any]) -> Timed:
    """Microseconds of one of `CALLS` calls."""

    def timed() -> float:
        begun = time.thread_time()
        for _ in range(CALLS):
            call()
        return (time.thread_time() - begun) / CALLS * 1e6

    return timed


def in_turn(stock: Timed, ours: Timed, calls: int) -> list[tuple[float, float]]:
    """Microseconds of stock and ours, called in turn; which goes first changes with every pair."""
    pairs = []
    gc.collect()
    gc.disable()
    try:
        for n in range(calls):
            if n % 2:
                mine = ours()
                pairs.append((stock(), mine))
            else:
                pairs.append((stock(), ours()))
    finally:
        gc.enable()
    return pairs[int(calls * WARM_UP) :]


# --- the scheduler --------------------------------------------------------------------------------------------------


def scheduler_step(directory: Path, *, ours: bool) -> tuple[Timed, Timed]:
    """A step of a decode engine's scheduler, and the connector's part of it by itself."""
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
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

    init_none_hash(sha256)
    config = VllmConfig(
        model_config=ModelConfig(model=str(directory), skip_tokenizer_init=True, dtype="float32", max_model_len=8192),
        cache_config=CacheConfig(block_size=BLOCK),
        scheduler_config=SchedulerConfig(
            max_model_len=8192,
            is_encoder_decoder=False,
            max_num_seqs=RUNNING,
            max_num_batched_tokens=8192,
            async_scheduling=False,
        ),
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="NixlConnector",
            kv_connector_module_path="kvtune_connector" if ours else None,
            kv_role="kv_consumer",
            kv_connector_extra_config={"bidirectional_kv_xfer": True},
        ),
    )
    blocks = config.cache_config.num_gpu_blocks = RUNNING * (100 + STEPS) // BLOCK * 2
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.float32)
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=True,
    )
    hasher = get_request_block_hasher(BLOCK, sha256)
    for n in range(RUNNING):
        params = {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "p", "remote_host": "h",
            "remote_port": 1, "remote_request_id": f"p-{n}", "remote_block_ids": [[1]], "tp_size": 1,
        }  # fmt: skip
        wanted = SamplingParams(max_tokens=8000, ignore_eos=True, extra_args={"kv_transfer_params": params})
        scheduler.add_request(Request(f"r-{n}", [n + 3] * 64, wanted, None, block_hasher=hasher))

    def step(moved: Any = None) -> float:
        # What the model and the worker say is made outside the time.
        moved = moved or KVConnectorOutput()
        ids = [one.request_id for one in scheduler.running]
        said = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={one: n for n, one in enumerate(ids)},
            sampled_token_ids=[[7] for _ in ids],
            kv_connector_output=moved,
        )
        begun = time.thread_time()
        output = scheduler.schedule()
        middle = time.thread_time()
        if len(ids) < RUNNING:
            said.req_ids = ids = list(output.num_scheduled_tokens)
            said.req_id_to_index = {one: n for n, one in enumerate(ids)}
            said.sampled_token_ids = [[7] for _ in ids]
        resumed = time.thread_time()
        scheduler.update_from_output(output, said)
        return (time.thread_time() - resumed + middle - begun) * 1e6

    step()
    step(KVConnectorOutput(finished_recving=set(scheduler.requests)))
    step()
    assert len(scheduler.running) == RUNNING
    connector: Any = scheduler.connector
    scheduled = SimpleNamespace(
        num_scheduled_tokens={one.request_id: 1 for one in scheduler.running}, total_num_scheduled_tokens=RUNNING
    )
    nothing = KVConnectorOutput()

    def part() -> None:
        connector.build_connector_meta(scheduled)
        connector.update_connector_output(nothing)
        connector.get_kv_connector_stats()

    return step, repeated(part)


# --- the worker -----------------------------------------------------------------------------------------------------


class NoNixl:
    """No notification, no transfer."""

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        """None."""
        return {}

    def get_xfer_telemetry(self, handle: int) -> None:
        """Never asked."""


def worker_step(*, ours: bool) -> Timed:
    """An idle step's connector part in the worker."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats

    from kvtune_connector.nixl_worker import ConnectorWorker
    from kvtune_connector.settings import ConnectorSettings

    def bare(self: Any, *_: Any) -> None:
        self.__dict__.update(
            nixl_wrapper=NoNixl(), xfer_stats=NixlKVConnectorStats(), tp_rank=0, transfer_topo=SimpleNamespace(),
            use_host_buffer=False, _has_mamba=False, _recving_transfers={}, _recving_metadata={}, _recv_failures=set(),
            _failed_recv_reqs=queue.Queue(), _invalid_block_ids=queue.Queue(), _replicated_pcp_done_sending=set(),
            _reqs_to_send={}, _reqs_to_process=set(), _engine_clock_offset={"p": 0.0}, _handshake_futures={},
            _handshake_lock=threading.RLock(), _remote_agents={"p": {}}, _engine_by_address={("h", 1): "p"},
            _failed_remote_engines=set(), _invalid_remote_engines=set(), _invalid_engine_backoff={},
        )  # fmt: skip

    stock = NixlPullConnectorWorker.__init__
    NixlPullConnectorWorker.__init__ = bare
    try:
        worker = ConnectorWorker(None, "here", None, ConnectorSettings()) if ours else NixlPullConnectorWorker()
    finally:
        NixlPullConnectorWorker.__init__ = stock
    NixlPullConnectorWorker.shutdown = lambda self: None

    def step() -> None:
        worker.get_transfer_results()
        worker.get_block_ids_with_load_errors()
        worker.get_kv_connector_stats()
        if ours:
            worker.take_news()

    return repeated(step)


# --- the stream -----------------------------------------------------------------------------------------------------


def streams() -> Callable[[bool, int, bool], AsyncIterator[str]]:
    """Makes a stream of so many chunks, ours or stock; waiting for each of the engine's outputs, or not."""
    from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionStreamResponse
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.outputs import CompletionOutput, RequestOutput

    from kvtune_connector.streaming import extend

    serving = OpenAIServingChat.__new__(OpenAIServingChat)
    serving.__dict__.update(
        parser_cls=None, enable_force_include_usage=False, response_role="assistant", enable_log_outputs=False,
        request_logger=None, system_fingerprint=None, _include_reasoning_tokens_details=False,
    )  # fmt: skip
    request = ChatCompletionRequest(
        messages=[{"role": "user", "content": "hello"}], model="m", stream=True,
        kv_transfer_params={"do_remote_prefill": True},
    )  # fmt: skip
    params = {"remote_engine_id": "d", "remote_block_ids": ([1, 2],)}

    def result(n: int, last: bool) -> RequestOutput:
        told = CompletionOutput(0, " word", [n], None, None, finish_reason="length" if last else None)
        return RequestOutput(
            "r", None, [1, 2, 3], None, [told], last, kv_transfer_params=params if last else None
        )  # fmt: skip

    async def engine(chunks: int, waiting: bool) -> AsyncIterator[RequestOutput]:
        word = result(1, False)
        for _ in range(chunks):
            if waiting:
                await asyncio.sleep(0)
            yield word
        yield result(2, True)

    generator = OpenAIServingChat.chat_completion_stream_generator
    sides = []
    for extended in (False, True):
        # The generator with a class of chunks to itself, so that both kinds can be made in one process.
        chunk = type("Chunk", (ChatCompletionStreamResponse,), {})
        if extended:
            extend(chunk, generator)
        known = {**generator.__globals__, "ChatCompletionStreamResponse": chunk}
        sides.append(FunctionType(generator.__code__, known, None, generator.__defaults__, generator.__closure__))

    def make(ours: bool, chunks: int, waiting: bool) -> AsyncIterator[str]:
        about = RequestResponseMetadata(request_id="r")
        return sides[ours](serving, request, engine(chunks, waiting), "r", "m", [], None, about)

    return make


def chunk_of_a_stream() -> tuple[Timed, Timed]:
    """(stock, ours): a chunk of a stream, its making alone."""
    make = streams()

    def pulls(ours: bool, chunks: int) -> Callable[[], str]:
        """Calls for one chunk after another. Nothing in it waits, so that it needs no event loop."""
        found = make(ours, chunks, False)

        def pull() -> str:
            try:
                found.__anext__().send(None)
            except StopIteration as chunk:
                return str(chunk.value)
            raise AssertionError("the stream waits for something")

        return pull

    for ours in (False, True):
        # A role, two words, one that is the last.
        pieces = [pull() for pull in [pulls(ours, 2)] for _ in range(4)]
        assert ["remote_engine_id" in piece for piece in pieces] == [False, False, False, ours], pieces
    endless = PARTS * CALLS * 2
    return repeated(pulls(False, endless)), repeated(pulls(True, endless))


@contextmanager
def served_chunk() -> Iterator[tuple[Timed, Timed]]:
    """(stock, ours): a chunk as it is served, by the web server vLLM uses, to a client on loopback."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.responses import StreamingResponse
    from starlette.routing import Route

    make = streams()

    async def answer(request: Any) -> StreamingResponse:
        return StreamingResponse(
            make(request.path_params["which"] == "ours", SERVED, True), media_type="text/event-stream"
        )

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(
            uvicorn.Config(Starlette(routes=[Route("/{which}", answer)]), log_level="error", access_log=False)
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        assert thread.ident is not None
        clock = time.pthread_getcpuclockid(thread.ident)
        address = listener.getsockname()

        def timed(which: str) -> Timed:
            def once() -> float:
                begun = time.clock_gettime(clock)
                with socket.create_connection(address) as client:
                    client.sendall(f"GET /{which} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
                    while client.recv(65536):
                        pass
                return (time.clock_gettime(clock) - begun) / SERVED * 1e6

            return once

        yield timed("stock"), timed("ours")
        server.should_exit = True
        thread.join(timeout=10)


@contextmanager
def model() -> Iterator[Path]:
    """A directory with a model's configuration."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(_MODEL))
        yield Path(directory)


def row(name: str, pairs: list[tuple[float, float]], whole: float | None = None) -> str:
    """A line of the table; `whole`: what `added` is a share of, if it is not the line's own stock figure."""
    stock = statistics.median(one for one, _ in pairs)
    ours = statistics.median(one for _, one in pairs)
    low, added, high = statistics.quantiles([mine - theirs for theirs, mine in pairs], n=4)
    return (
        f"{name:30}{stock:>10.2f}{ours:>10.2f}{added:>10.2f}  {f'[{low:.2f}, {high:.2f}]':18}"
        f"{added / (whole or stock):>10.2%}{added / DECODE_STEP_US:>12.3%}{len(pairs):>8}"
    )


def main() -> None:
    """Print the table."""
    from loguru import logger

    logger.remove()
    with model() as directory:
        stock, ours = (scheduler_step(directory, ours=which) for which in (False, True))
    step = in_turn(stock[0], ours[0], STEPS)
    part = in_turn(stock[1], ours[1], PARTS)
    worker = in_turn(worker_step(ours=False), worker_step(ours=True), PARTS)
    chunk = in_turn(*chunk_of_a_stream(), PARTS)
    with served_chunk() as sides:
        served = in_turn(*sides, STREAMS)
    print(f"{'microseconds of CPU, medians':30}{'stock':>10}{'kvtune':>10}{'added':>10}  {'quartiles':18}", end="")
    print(f"{'of stock':>10}{'of 10 ms':>12}{'pairs':>8}")
    print(row(f"scheduler step, {RUNNING} running", step))
    print(row("  the connector's part of it", part, statistics.median(one for one, _ in step)))
    print(row("worker's part, idle", worker))
    print(row("streamed chunk, its making", chunk))
    print(row("streamed chunk, served", served))


if __name__ == "__main__":
    main()
