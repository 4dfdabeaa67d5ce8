"""What proof is worth: the same two requests on a stock pair and on a pair with kvtune's connector.

    python bench/scripts/stock_foreign.py --vllm-python PYTHON --vllm-model DIR [--connector stock|kvtune|both]

The second request is handed the reference of the first one's, foreign, history. Printed: the largest difference of P's
top-5 log-probabilities from a clean run of the same prompt. Needs the environment that `make e2e-vllm` makes. The stock
pair starves itself on two cores: allow it five minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp

from kvtune_bench.vllm_pair import VllmConfig, VllmServer, free_port
from kvtune_router.requests import FIRST_TURN


def text(seed: str) -> str:
    """Words that a seed decides."""
    words = ["import", "class", "return", "self", "alpha", "beta", "torch", "while", "True", "print"]
    return " ".join(random.Random(seed).choices(words, k=420))


async def leg(session: aiohttp.ClientSession, server: VllmServer, prompt: str, tokens: int, params: Any) -> Any:
    """One request to one server."""
    body = {
        "model": "tiny", "temperature": 0, "logprobs": 5, "prompt": prompt, "max_tokens": tokens,
        "kv_transfer_params": params,
    }  # fmt: skip
    async with session.post(server.url + "/v1/completions", json=body) as answer:
        return answer.status, await answer.json()


async def measure(connector: str, python: str, model: Path, logs: Path) -> str:
    """Start a pair, hand over a foreign reference, compare with a clean run."""
    async with AsyncExitStack() as stack:
        timeout = aiohttp.ClientTimeout(total=300)
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        servers = []
        for role in ("prefill", "decode"):
            config = VllmConfig(
                role=role, python=python, model=model, connector=connector, port=free_port(),
                side_channel_port=free_port(), ttl_s=900,
            )  # fmt: skip
            servers.append(await VllmServer.spawn(config, logs / f"{connector}-{role}.log"))
            stack.push_async_callback(servers[-1].stop)
        await asyncio.gather(*(server.ready() for server in servers))
        prefill, decode = servers
        _, p = await leg(session, prefill, text("mine"), 1, FIRST_TURN)
        _, d = await leg(session, decode, text("mine"), 24, p["kv_transfer_params"])
        status, foreign = await leg(session, prefill, text("another"), 1, d["kv_transfer_params"])
        _, clean = await leg(session, prefill, text("another"), 1, FIRST_TURN)
        if status != 200:
            return f"{connector}: HTTP {status}"
        tops = [answer["choices"][0]["logprobs"]["top_logprobs"][0] for answer in (foreign, clean)]
        shared = tops[0].keys() & tops[1].keys()
        worst = max((abs(tops[0][token] - tops[1][token]) for token in shared), default=float("inf"))
        return f"{connector}: HTTP 200, {len(shared)} of the top 5 shared, largest difference {worst:.3f}"


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm-python", required=True)
    parser.add_argument("--vllm-model", type=Path, required=True)
    parser.add_argument("--connector", choices=("stock", "kvtune", "both"), default="both")
    given = parser.parse_args()
    logs = Path(tempfile.mkdtemp(prefix="kvtune-stock-"))
    for connector in ("kvtune", "stock") if given.connector == "both" else (given.connector,):
        print(asyncio.run(measure(connector, given.vllm_python, given.vllm_model, logs)), flush=True)


if __name__ == "__main__":
    main()
