"""What proof costs: `python bench/scripts/fingerprint_cost.py` prints time and size for prompts of several lengths."""

from __future__ import annotations

import random
import statistics
import time

import orjson

from kvtune_connector.fingerprint import fingerprint, stride_for, verified_prefix

BLOCK_SIZE = 16
REPEATS = 15


def main() -> None:
    """Print a table."""
    print(f"{'tokens':>8}  {'made':>8}  {'verified':>8}  {'wire':>8}   (median of {REPEATS}, from a list of ints)")
    for tokens in (1024, 8192, 32768, 131072):
        prompt = [random.randrange(150_000) for _ in range(tokens)]
        made, checked = [], []
        for _ in range(REPEATS):
            begun = time.perf_counter()
            held = fingerprint(prompt, stride=stride_for(tokens, BLOCK_SIZE))
            middle = time.perf_counter()
            assert verified_prefix(held, prompt) == tokens
            checked.append(time.perf_counter() - middle)
            made.append(middle - begun)
        wire = len(orjson.dumps(held.to_wire()))
        print(
            f"{tokens:>8}  {statistics.median(made) * 1e3:>5.2f} ms  {statistics.median(checked) * 1e3:>5.2f} ms"
            f"  {wire / 1e3:>5.1f} kB"
        )


if __name__ == "__main__":
    main()
