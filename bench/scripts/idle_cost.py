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

from kvtune_bench.vllm_pair import Bench, cpu_seconds

SETTLE_S = 5.0
WATCH_S = 10.0


async def measure(connector: str, python: str, model: Path, logs: Path) -> dict[str, float]:
    """Cores that P and D use while D holds blocks."""
    async with AsyncExitStack() as stack:
        bench = Bench(stack, logs, python, model)
        await bench.connect(300.0)
        servers = {role: await bench.server(role, connector=connector, ttl_s=900.0) for role in ("prefill", "decode")}
        await asyncio.gather(*(server.ready() for server in servers.values()))
        await bench.legs(servers["prefill"], servers["decode"], "one two three " * 80, tokens=16)
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
