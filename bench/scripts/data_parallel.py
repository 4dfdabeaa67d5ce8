"""Whether a decode server of two data parallel ranks is read back from the rank that holds the history.

    python bench/scripts/data_parallel.py --vllm-python PYTHON --vllm-model DIR

Four conversations at once, then a follow-up of each. Printed: a verdict a line. Not among the tests: it starts eight
processes. Needs the environment that `make e2e-vllm` makes. Loopback only.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

from kvtune_bench.vllm_pair import Bench, difference, report, text, top

TOLERANCE = 0.05


async def measure(python: str, model: Path, logs: Path) -> list[tuple[str, bool]]:
    """What was found, and whether it is as it should be."""
    async with AsyncExitStack() as stack:
        bench = Bench(stack, logs, python, model)
        await bench.connect(600.0)
        p = await bench.server("prefill", ttl_s=900.0)
        d = await bench.server("decode", ttl_s=900.0, arguments=("--data-parallel-size", "2"))
        await asyncio.gather(p.ready(), d.ready())
        prompts = [text(f"rank {number}", 420) for number in range(4)]
        first = await asyncio.gather(*(bench.legs(p, d, prompt) for prompt in prompts))
        references = [answer["kv_transfer_params"] for _, answer in first]
        ranks = {(one["remote_engine_id"], one["remote_port"]) for one in references}
        again = [
            await bench.prefill(p, f"{prompt} go on", one) for prompt, one in zip(prompts, references, strict=True)
        ]
        clean = [await bench.prefill(p, f"{prompt} go on") for prompt in prompts]
        worst = max(difference(top(one), top(two)) for one, two in zip(again, clean, strict=True))
        told = [report(one) for one in again]
        for engine in ("0", "1"):
            held = sum(one["remote_engine_id"].endswith(f"_dp{engine}") for one in references)
            await bench.settles(d.url, "kvtune_retentions_total", held, engine=engine)
            await bench.settles(d.url, "kvtune_retentions_ended_total", held, engine=engine, end="read")
        return [
            (f"{len(ranks)} ranks retained, each under an id and a port of its own", len(ranks) == 2),
            (f"follow-ups: {told}", all(decision == "fetch" for decision, _, _ in told)),
            (f"largest difference from a clean run {worst:.3f}", worst < TOLERANCE),
            ("each rank's books: retained as often as it was read", True),
        ]


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm-python", required=True)
    parser.add_argument("--vllm-model", type=Path, required=True)
    given = parser.parse_args()
    logs = Path(tempfile.mkdtemp(prefix="kvtune-ranks-"))
    for what, right in asyncio.run(measure(given.vllm_python, given.vllm_model, logs)):
        print("right" if right else "WRONG", what, flush=True)


if __name__ == "__main__":
    main()
