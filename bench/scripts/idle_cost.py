"""What holding blocks costs a decode engine that has nothing to do: CPU of all its processes, kvtune and stock in turn.

    python bench/scripts/idle_cost.py --vllm-python PYTHON --vllm-model DIR

Starts a pair for each connector, has D retain the KV of one turn, and counts CPU seconds of D's processes over some
seconds of idleness. Needs the environment that `make e2e-vllm` makes. Loopback only.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp

from kvtune_bench.vllm_pair import VllmConfig, VllmServer, free_port
from kvtune_router.requests import FIRST_TURN

SETTLE_S = 5.0
WATCH_S = 10.0


def cpu_seconds(group: int) -> float:
    """CPU seconds of all processes of a process group, from /proc."""
    total = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group:
            total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


async def measure(connector: str, python: str, model: Path, logs: Path) -> dict[str, float]:
    """Cores that P and D use while D holds blocks."""
    async with AsyncExitStack() as stack:
        timeout = aiohttp.ClientTimeout(total=300)
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        servers = {}
        for role in ("prefill", "decode"):
            config = VllmConfig(
                role=role, python=python, model=model, connector=connector, port=free_port(),
                side_channel_port=free_port(), ttl_s=900,
            )  # fmt: skip
            servers[role] = await VllmServer.spawn(config, logs / f"{connector}-{role}.log")
            stack.push_async_callback(servers[role].stop)
        await asyncio.gather(*(server.ready() for server in servers.values()))
        params: object = FIRST_TURN
        for role, tokens in (("prefill", 1), ("decode", 16)):
            body = {
                "model": "tiny",
                "prompt": "one two three " * 80,
                "max_tokens": tokens,
                "kv_transfer_params": params,
            }
            async with session.post(servers[role].url + "/v1/completions", json=body) as answer:
                params = (await answer.json())["kv_transfer_params"]
        await asyncio.sleep(SETTLE_S)
        groups = {role: server.child.pid for role, server in servers.items()}
        before, begun = {role: cpu_seconds(group) for role, group in groups.items()}, time.monotonic()
        await asyncio.sleep(WATCH_S)
        took = time.monotonic() - begun
        return {role: (cpu_seconds(group) - before[role]) / took for role, group in groups.items()}


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm-python", required=True)
    parser.add_argument("--vllm-model", type=Path, required=True)
    parser.add_argument("--connector", choices=("kvtune", "stock", "both"), default="both")
    given = parser.parse_args()
    logs = Path(tempfile.mkdtemp(prefix="kvtune-idle-"))
    print(f"cores in use over {WATCH_S:g} s of idleness, while decode retains one turn ({os.cpu_count()} cores here)")
    for connector in ("kvtune", "stock") if given.connector == "both" else (given.connector,):
        cores = asyncio.run(measure(connector, given.vllm_python, given.vllm_model, logs))
        print(f"{connector:8} decode {cores['decode']:.2f}   prefill {cores['prefill']:.2f}", flush=True)


if __name__ == "__main__":
    main()
