"""Draw the packaged trace from the full one: conversations whose pauses together look like all of them.

    python bench/scripts/make_sample.py [--check]

Deterministic: the same input gives the same bytes. Prints how the sample compares. `--check` writes nothing and exits 1
if the packaged file differs.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvtune_bench.traces import COLUMNS, Conversation, load_trace

BENCH = Path(__file__).resolve().parent.parent
FULL = BENCH / "data" / "agent_turns.csv.gz"
SAMPLE = BENCH / "kvtune_bench" / "data" / "agent_sample.csv.gz"
CONVERSATIONS = 100
DRAWS = 2000
SEED = 480
DEFAULT_TTL_S = 480.0


def summary(conversations: Sequence[Conversation]) -> dict[str, float]:
    """What the sample must reproduce; pauses in seconds, sizes in tokens, shares of all turns."""
    turns = [turn for conversation in conversations for turn in conversation.turns]
    gaps = np.array([turn.gap_s for turn in turns if turn.gap_s is not None])
    prompts = np.array([turn.prompt_tokens for turn in turns])
    p25, p50, p75, p90 = np.percentile(gaps, [25, 50, 75, 90])
    return {
        "gap P25 (s)": float(p25),
        "gap P50 (s)": float(p50),
        "gap P75 (s)": float(p75),
        "gap P90 (s)": float(p90),
        "share of pauses > 480 s": float((gaps > DEFAULT_TTL_S).mean()),
        "share that never returns": 1 - len(gaps) / len(turns),
        "prompt P50 (tokens)": float(np.percentile(prompts, 50)),
        "turns per conversation": len(turns) / len(conversations),
    }


def choose(conversations: Sequence[Conversation]) -> list[Conversation]:
    """The draw whose worst relative deviation in `summary` is least, in the order of the full trace."""
    target = summary(conversations)
    rng = random.Random(SEED)
    best: tuple[float, list[int]] | None = None
    for _ in range(DRAWS):
        drawn = sorted(rng.sample(range(len(conversations)), CONVERSATIONS))
        got = summary([conversations[index] for index in drawn])
        worst = max(abs(got[name] / target[name] - 1) for name in target)
        if best is None or worst < best[0]:
            best = (worst, drawn)
    assert best is not None
    return [conversations[index] for index in best[1]]


def encode(conversations: Sequence[Conversation]) -> bytes:
    """The sample as gzipped CSV, pauses to 0.1 s, without a time stamp in the gzip header."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for number, conversation in enumerate(conversations):
        for index, turn in enumerate(conversation.turns):
            gap = "" if turn.gap_s is None else f"{turn.gap_s:.1f}".removesuffix(".0")
            writer.writerow((number, index, turn.prompt_tokens, turn.output_tokens, gap, turn.reusable_next))
    return gzip.compress(text.getvalue().encode(), 9, mtime=0)


def main() -> int:
    """Write or check the packaged sample; 0 when it is up to date."""
    parser = argparse.ArgumentParser(description="Draw the packaged trace from the full one.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the packaged file differs")
    check = parser.parse_args().check
    full = load_trace(FULL)
    sample = choose(full)
    data = encode(sample)
    here, there = summary(sample), summary(full)
    print(f"{'':26}{'full':>12}{'sample':>12}")
    for name in there:
        print(f"{name:26}{there[name]:12.4g}{here[name]:12.4g}")
    print(f"{len(sample)} conversations, {sum(len(c.turns) for c in sample)} turns, {len(data)} bytes")
    if check:
        # Compressed bytes differ between zlib versions; the rows may not.
        same = SAMPLE.is_file() and gzip.decompress(SAMPLE.read_bytes()) == gzip.decompress(data)
        print("up to date" if same else f"{SAMPLE} differs: run this script without --check")
        return 0 if same else 1
    SAMPLE.write_bytes(data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
