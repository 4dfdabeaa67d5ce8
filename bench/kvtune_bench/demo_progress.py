"""The demo's live lines, on stderr: turns, outcomes, time to first token, retained tokens. They fit in 80 columns."""

from __future__ import annotations

import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text

from kvtune_bench.figures import outcome_name, quantile
from kvtune_bench.load import TurnRecord
from kvtune_telemetry.clock import Clock

_RECENT = 200
"""Turns the moving quantiles are taken over."""
WIDTH = 80
"""Columns that are always enough."""
PLAIN_EVERY_WALL_S = 5.0
"""Without a terminal, lines are at least this far apart,"""
PLAIN_LINES = 11
"""and at least this part of the run; one more line ends it."""


class Progress:
    """Takes what happens; shows it at most a few times a second.

    With `bar` (and its `task`) as live lines on a terminal, else as plain lines on `console`. `clock` is the load's,
    `wall` the watch the reader goes by.
    """

    def __init__(
        self,
        bar: _TwoLines | None,
        task: TaskID | None,
        duration_s: float,
        clock: Clock,
        console: Console,
        wall: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bar, self._task, self._duration_s, self._clock, self._console = bar, task, duration_s, clock, console
        self._wall = wall
        self._began = clock.now()
        self._outcomes: Counter[str] = Counter()
        self._on: deque[float] = deque(maxlen=_RECENT)
        self._retained = 0.0
        self._next_s = duration_s / PLAIN_LINES
        self._next_wall_s = wall() + PLAIN_EVERY_WALL_S

    def turn(self, record: TurnRecord) -> None:
        """A turn ended."""
        self._outcomes[outcome_name(record)] += 1
        if record.followup and record.ttft_s is not None and record.outcome != "disabled":
            self._on.append(record.ttft_s)
        self._show()

    def retained(self, tokens: float) -> None:
        """D retains that many tokens now."""
        self._retained = tokens
        self._show()

    def end(self) -> None:
        """The run is over: show the last figures once more."""
        if self._bar is None:
            self._plain()

    def outcomes(self, width: int = WIDTH) -> str:
        """How many turns ended and how, the most frequent outcomes first; those that do not fit are counted as one."""
        total = sum(self._outcomes.values())
        if not total:
            return "no turn has ended yet"
        text = f"{total:,} turn{'' if total == 1 else 's'}:"
        left = total
        for name, count in self._outcomes.most_common():
            word = f" {name.replace('_', ' ')} {count:,}"
            rest = left - count
            if len(text) + len(word) + (len(f", other {rest:,}") if rest else 0) > width:
                break
            text += word + ("," if rest else "")
            left = rest
        return text + (f" other {left:,}" if left else "")

    def figures(self) -> str:
        """Time to first token of the latest follow-up turns with reuse, and what D retains."""
        p50, p90 = quantile(self._on, 0.5), quantile(self._on, 0.9)
        ttft = "–" if p50 is None or p90 is None else f"{p50:.2f}/{p90:.2f} s"
        return f"TTFT P50/P90 {ttft}  {self._retained / 1e6:.2f}M tokens retained"

    def _elapsed(self) -> float:
        return max(0.0, min(self._clock.now() - self._began, self._duration_s))

    def _show(self) -> None:
        elapsed = self._elapsed()
        if self._bar is not None and self._task is not None:
            self._bar.above = self.outcomes(max(WIDTH, self._console.width))
            self._bar.update(self._task, completed=elapsed, figures=self.figures())
        elif elapsed >= self._next_s and self._wall() >= self._next_wall_s:
            self._next_s = elapsed + self._duration_s / PLAIN_LINES
            self._next_wall_s = self._wall() + PLAIN_EVERY_WALL_S
            self._plain()

    def _plain(self) -> None:
        line = f"{self._elapsed():.0f} of {self._duration_s:.0f} s | {self.outcomes(WIDTH)} | {self.figures()}"
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)


class _TwoLines(Bar):
    """A bar with a line of text above."""

    above = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield Text(self.above, no_wrap=True, overflow="ellipsis")
        yield from super().get_renderables()


@contextmanager
def live_progress(duration_s: float, clock: Clock, console: Console | None = None) -> Iterator[Progress]:
    """Shows progress while the block runs, on stderr unless another console is given."""
    console = console or Console(file=sys.stderr)
    if not console.is_terminal:
        progress = Progress(None, None, duration_s, clock, console)
        yield progress
        progress.end()
        return
    columns = (BarColumn(bar_width=16), TimeRemainingColumn(compact=True), TextColumn("{task.fields[figures]}"))
    with _TwoLines(*columns, console=console, refresh_per_second=5) as bar:
        task = bar.add_task("replay", total=duration_s, figures="")
        progress = Progress(bar, task, duration_s, clock, console)
        progress.retained(0.0)
        yield progress
