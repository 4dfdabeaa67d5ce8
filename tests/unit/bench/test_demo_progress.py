"""The demo's live lines: they fit from 80 columns, count right, and stay few without a terminal."""

from __future__ import annotations

import io
import re
from itertools import pairwise
from typing import Any

import pytest
from rich.console import Console

from kvtune_bench import demo_progress
from kvtune_bench.demo_progress import Progress, live_progress
from kvtune_bench.load import TurnRecord
from kvtune_telemetry.vocabulary import Outcome


class Hand:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.at = 100.0

    def now(self) -> float:
        return self.at

    def unix(self) -> float:
        return self.at

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("nobody sleeps here")


def record(**changes: Any) -> TurnRecord:
    base: dict[str, Any] = {
        "conversation": 0, "turn": 1, "followup": True, "start_s": 0.0, "ttft_s": 0.5, "duration_s": 2.0,
        "prompt_tokens": 20_000, "output_tokens": 10, "keep_tokens": 0, "gap_s": None, "next_gap_s": None,
        "status": 200, "answered": True, "outcome": "hit", "session": True, "rewritten": False, "compacted": False,
        "answer_sha": None, "correct": None, "error": None,
    }  # fmt: skip
    return TurnRecord(**{**base, **changes})


def terminal(width: int) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None, legacy_windows=False)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())


def last_lines(console: Console) -> list[str]:
    return [line for line in re.split(r"[\r\n]+", written(console)) if line.strip()][-2:]


@pytest.mark.parametrize("width", [80, 100, 200])
def test_a_terminal_shows_all_of_both_lines(width: int) -> None:
    console, clock = terminal(width), Hand()
    with live_progress(1500.0, clock, console) as progress:
        for outcome in Outcome:
            for _ in range(1500 if outcome == "hit" else 12):
                progress.turn(record(outcome=outcome.value, ttft_s=105.28))
        clock.at += 700
        progress.retained(12_160_000)
    above, below = last_lines(console)
    assert all(len(line.rstrip()) <= width for line in (above, below))
    assert "…" not in above + below
    assert above.startswith("1,644 turns: hit 1,500, ")
    assert "━" in below
    assert "TTFT P50/P90 105.28/105.28 s  12.16M tokens retained" in below
    shown = sum(int(n.replace(",", "")) for n in re.findall(r" ([\d,]*\d)(?:,|$)", above.rstrip().split(":")[1]))
    assert shown == 1644


def test_before_the_first_turn_nothing_odd_is_said() -> None:
    console = terminal(80)
    with live_progress(1500.0, Hand(), console):
        pass
    above, below = last_lines(console)
    assert above.strip() == "no turn has ended yet"
    assert "TTFT P50/P90 –  0.00M tokens retained" in below


def test_one_turn_is_one_turn() -> None:
    progress = Progress(None, None, 10.0, Hand(), terminal(80))
    progress.turn(record(outcome="read_failed"))
    assert progress.outcomes() == "1 turn: read failed 1"
    progress.turn(record(outcome=None, answered=False, ttft_s=None))
    assert progress.outcomes() == "2 turns: read failed 1, error 1"


def test_what_does_not_fit_is_counted_as_other() -> None:
    progress = Progress(None, None, 10.0, Hand(), terminal(80))
    for outcome, times in (("hit", 5), ("engine_gone", 3), ("read_failed", 2), ("no_identity", 1)):
        for _ in range(times):
            progress.turn(record(outcome=outcome))
    assert progress.outcomes() == "11 turns: hit 5, engine gone 3, read failed 2, no identity 1"
    assert progress.outcomes(50) == "11 turns: hit 5, engine gone 3, other 3"
    assert progress.outcomes(5) == "11 turns: other 11"


def test_the_time_to_first_token_is_of_followups_with_reuse() -> None:
    progress = Progress(None, None, 10.0, Hand(), terminal(80))
    progress.turn(record(ttft_s=2.0))
    progress.turn(record(ttft_s=9.0, outcome="disabled"))
    progress.turn(record(ttft_s=9.0, outcome="first", followup=False))
    assert progress.figures().startswith("TTFT P50/P90 2.00/2.00 s")


@pytest.mark.parametrize(("duration_s", "wall_s"), [(1500.0, 75.0), (1500.0, 6000.0), (300.0, 15.0), (10.0, 0.5)])
def test_without_a_terminal_lines_are_few_and_apart(duration_s: float, wall_s: float) -> None:
    clock, watch = Hand(), Hand()
    console = Console(file=io.StringIO(), width=80)
    progress = Progress(None, None, duration_s, clock, console, wall=watch.now)
    times: list[float] = []
    steps = 3000
    # A fifth longer than the run: turns in flight finish.
    for step in range(steps * 6 // 5):
        before = written(console).count("\n")
        progress.turn(record())
        if written(console).count("\n") > before:
            times.append(step * wall_s / steps)
        clock.at += duration_s / steps
        watch.at += wall_s / steps
    progress.end()
    lines = written(console).splitlines()
    assert 1 <= len(lines) <= 12
    assert len(lines) == len(times) + 1
    assert all(later - earlier >= demo_progress.PLAIN_EVERY_WALL_S - 0.1 for earlier, later in pairwise(times))
    assert all(re.match(rf"\d+ of {duration_s:.0f} s \| [\d,]+ turns: hit", line) for line in lines)
    assert lines[-1].startswith(f"{duration_s:.0f} of {duration_s:.0f} s | 3,600 turns: hit 3,600 | TTFT P50/P90")
    if wall_s == 75.0:
        assert len(lines) >= 9


def test_a_run_without_a_terminal_ends_with_a_line() -> None:
    console = Console(file=io.StringIO(), width=80)
    with live_progress(60.0, Hand(), console):
        pass
    assert written(console) == "0 of 60 s | no turn has ended yet | TTFT P50/P90 –  0.00M tokens retained\n"
