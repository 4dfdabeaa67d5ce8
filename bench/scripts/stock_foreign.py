"""What proof is worth: the same two requests on a stock pair and on a pair with kvtune's connector.

    python bench/scripts/stock_foreign.py --vllm-python PYTHON --vllm-model DIR [--connector kvtune|stock|relaxed-stock]

The second request is handed the reference of the first one's, foreign, history. Printed: what it shares with a clean
run of the same prompt, and the largest difference of the log-probabilities that are shared, on P and then on D; and
what a later, clean request finds on D. The tests hold kvtune to the tolerance named. Needs the environment that
`make e2e-vllm` makes. `stock` spins on more than two cores (see `relaxed_stock.py`): on two it takes some minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path

from kvtune_bench.vllm_pair import Bench, text, top

CONNECTORS = ("kvtune", "relaxed-stock", "stock")
TOLERANCE = 0.05


def compared(one: Mapping[str, float], clean: Mapping[str, float]) -> str:
    """Two top fives in words."""
    shared = one.keys() & clean.keys()
    if not shared:
        return "none of the top 5: FAILS"
    worst = max(abs(one[token] - clean[token]) for token in shared)
    verdict = "passes" if len(shared) >= 3 and worst < TOLERANCE else "FAILS"
    return f"{len(shared)} of the top 5, difference {worst:.3f}: {verdict}"


async def measure(connector: str, python: str, model: Path, logs: Path) -> str:
    """Start a pair, hand over a foreign reference, compare with a clean run."""
    async with AsyncExitStack() as stack:
        bench = Bench(stack, logs, python, model)
        await bench.connect(600.0)
        p, d = [await bench.server(role, connector=connector, ttl_s=900.0) for role in ("prefill", "decode")]
        await asyncio.gather(p.ready(), d.ready())
        _, mine = await bench.legs(p, d, text("mine", 420))
        foreign_p, foreign_d = await bench.legs(p, d, text("another", 420), mine["kv_transfer_params"])
        _, later_d = await bench.legs(p, d, text("another", 420))
        # Of a prompt nobody read anything for: D's cache has no such blocks under another salt.
        clean_p = await bench.prefill(p, text("another", 420))
        clean_d = await bench.decode(d, text("another", 420), clean_p, salt="clean")
        return "\n".join(
            f"  {what:28} {compared(top(one), top(clean))}"
            for what, one, clean in (
                ("prefill", foreign_p, clean_p),
                ("decode", foreign_d, clean_d),
                ("decode, a later clean turn", later_d, clean_d),
            )
        )


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm-python", required=True)
    parser.add_argument("--vllm-model", type=Path, required=True)
    parser.add_argument("--connector", choices=CONNECTORS, action="append", help="may be given more than once [all]")
    given = parser.parse_args()
    print(f"a prompt handed another's history, against a clean run; the tolerance of the tests is {TOLERANCE}")
    for connector in given.connector or CONNECTORS:
        logs = Path(tempfile.mkdtemp(prefix=f"kvtune-{connector}-"))
        print(f"{connector}\n{asyncio.run(measure(connector, given.vllm_python, given.vllm_model, logs))}", flush=True)


if __name__ == "__main__":
    main()
