"""What the connector adds to a scheduler step and to a streamed chunk, beside what stock does.

    PYTHON_WITH_VLLM bench/scripts/connector_overhead.py

Calls the very methods, stock and ours in turn, in one process: scheduler side with 256 running requests and nothing to
transfer (the ordinary step), worker side idle, and the stream generator per chunk. A decode step of a large model takes
10 ms and more; 1 % of that is 100 microseconds.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

REPEATS = 7
CALLS = 2000
RUNNING = 256
CHUNKS = 5000


def per_call(call: Callable[[], Any]) -> float:
    """Median microseconds a call."""
    times = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - begun) / CALLS * 1e6)
    return statistics.median(times)


def scheduler_step() -> tuple[float, float]:
    """(stock, ours): build_connector_meta, update_connector_output and the statistics of one step."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
    from vllm.v1.outputs import KVConnectorOutput

    from kvtune_connector.nixl_scheduler import ConnectorScheduler
    from kvtune_connector.nixl_worker import WorkerNews
    from kvtune_connector.settings import ConnectorSettings

    output = SimpleNamespace(
        total_num_scheduled_tokens=RUNNING, num_scheduled_tokens={f"request-{n}": 1 for n in range(RUNNING)}
    )
    moved = KVConnectorOutput()

    def bare(kind: Any) -> Any:
        made = kind.__new__(kind)
        made.__dict__.update(
            _reqs_need_recv={}, _reqs_need_send={}, _reqs_in_batch=set(), _reqs_not_processed=set(),
            use_host_buffer=False, _heartbeat_by_engine={}, _prefills={}, _to_compute=set(), _pulls={}, _events=[],
            _offsets={}, _rest_s=0.0, _steps=deque(),
            _news=WorkerNews(), _gone={}, _lockstep=False, settings=ConnectorSettings(), _heartbeat_req_engine={},
        )  # fmt: skip
        return made

    stock, ours = bare(NixlPullConnectorScheduler), bare(ConnectorScheduler)

    def stock_step() -> None:
        stock.build_connector_meta(output)
        stock.update_connector_output(moved)

    def our_step() -> None:
        ours.build_connector_meta(output)
        ours.update_connector_output(moved)
        ours.take_stats()

    return per_call(stock_step), per_call(our_step)


def chunk() -> tuple[float, float]:
    """(stock, ours): microseconds a chunk of a stream of a disaggregated request."""
    from kvtune_connector.streaming import extended

    text = 'data: {"choices":[{"index":0,"delta":{"content":"word"},"finish_reason":null}]}\n\n'
    request = SimpleNamespace(kv_transfer_params={"do_remote_prefill": True})
    result = SimpleNamespace(kv_transfer_params=None)

    async def results() -> AsyncIterator[Any]:
        for _ in range(CHUNKS):
            yield result

    async def stock(self: Any, request: Any, found: AsyncIterator[Any]) -> AsyncIterator[str]:
        async for _ in found:
            yield text

    async def drain(stream: Any) -> None:
        async for _ in stream(None, request, results()):
            pass

    def timed(stream: Any) -> float:
        times = []
        for _ in range(REPEATS):
            begun = time.perf_counter()
            asyncio.run(drain(stream))
            times.append((time.perf_counter() - begun) / CHUNKS * 1e6)
        return statistics.median(times)

    timed(stock)  # warm-up
    return timed(stock), timed(extended(stock))


def main() -> None:
    """Print a table."""
    print(f"{'':28}{'stock':>10}{'kvtune':>10}{'added':>10}   (microseconds, median of {REPEATS})")
    for name, (stock, ours) in (("scheduler step, 256 running", scheduler_step()), ("streamed chunk", chunk())):
        print(f"{name:28}{stock:>10.2f}{ours:>10.2f}{ours - stock:>10.2f}")


if __name__ == "__main__":
    main()
