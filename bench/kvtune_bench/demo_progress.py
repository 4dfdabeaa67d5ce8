"""The demo's live line, on stderr: turns, outcomes, time to first token, retained tokens."""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from kvtune_bench.figures import quantile
from kvtune_bench.load import TurnRecord
from kvtune_telemetry.clock import Clock

_RECENT = 200
"""Turns the moving quantiles are taken over."""
_PLAIN_EVERY_S = 10.0


class Progress:
    """Takes what happens; shows it at most a few times a second."""

    def __init__(self, bar: Bar | None, task: TaskID | None, duration_s: float, clock: Clock, console: Console) -> None:
        self._bar, self._task, self._duration_s, self._clock, self._console = bar, task, duration_s, clock, console
        self._began = clock.now()
        self._outcomes: Counter[str] = Counter()
        self._on: deque[float] = deque(maxlen=_RECENT)
        self._retained = 0.0
        self._next_plain = 0.0

    def turn(self, record: TurnRecord) -> None:
        """A turn ended."""
        self._outcomes[record.outcome or ("failed" if not record.answered else "unreported")] += 1
        if record.followup and record.ttft_s is not None and record.outcome != "disabled":
            self._on.append(record.ttft_s)
        self._show()

    def retained(self, tokens: float) -> None:
        """D retains that many tokens now."""
        self._retained = tokens
        self._show()

    def line(self) -> str:
        """The figures as one line."""
        p50, p90 = quantile(self._on, 0.5), quantile(self._on, 0.9)
        ttft = "-" if p50 is None or p90 is None else f"{p50:.2f}/{p90:.2f} s"
        outcomes = " ".join(f"{name} {count}" for name, count in self._outcomes.most_common(5))
        total = sum(self._outcomes.values())
        return f"{total} turns | {outcomes} | TTFT P50/P90 {ttft} | {self._retained / 1e6:.2f}M tokens retained"

    def _show(self) -> None:
        elapsed = min(self._clock.now() - self._began, self._duration_s)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=elapsed, figures=self.line())
        elif elapsed >= self._next_plain:
            self._next_plain = elapsed + max(_PLAIN_EVERY_S, self._duration_s / 10)
            self._console.print(f"{elapsed:5.0f} s  {self.line()}", soft_wrap=True, highlight=False)


@contextmanager
def live_progress(duration_s: float, clock: Clock) -> Iterator[Progress]:
    """Shows progress while the block runs."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield Progress(None, None, duration_s, clock, console)
        return
    columns = (BarColumn(bar_width=20), TimeRemainingColumn(compact=True), TextColumn("{task.fields[figures]}"))
    with Bar(*columns, console=console, refresh_per_second=5) as bar:
        task = bar.add_task("replay", total=duration_s, figures="")
        yield Progress(bar, task, duration_s, clock, console)
