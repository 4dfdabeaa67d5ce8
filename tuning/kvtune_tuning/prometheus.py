"""Reads a window of a fleet from Prometheus: few queries, each within a budget, and every increment once.

Values are read on a grid of `step` seconds. A grid that is coarser than the scrapes would lose what was counted just
before a counter was reset or a pod went away, so there the last value of each step is read, and the raw samples around
restarts. What is asked:

1. the server's time, its scrape interval, and how many series of each name there are: they decide on step and queries;
2. the values, several names at once;
3. when targets were really scraped, where the grid is as fine as that;
4. which targets restarted, and the raw counters around those moments;
5. for targets that came inside the window, when their processes started.

Only 2 must succeed; a server that does not answer the others gives less exact figures, and a note.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtune_tuning.access import Access, check_matcher
from kvtune_tuning.errors import TuningError
from kvtune_tuning.frames import LATEST_S
from kvtune_tuning.names import NEEDED, exposed_name, spellings
from kvtune_tuning.promapi import TIMEOUT_S, PrometheusApi, Refused, TooLarge
from kvtune_tuning.replicas import Found, Sorted, Target, as_exposed, sort_targets
from kvtune_tuning.series import COUNTER_SUFFIXES, Floats, Labels, Series, SeriesSet, from_birth, in_order

if TYPE_CHECKING:
    import httpx

MAX_POINTS = 10_000
"""Points of one range query per series; Prometheus refuses more than 11,000."""
MAX_STEPS = 720
"""Points per series that a window is read with: more would not sharpen anything, and costs the server."""
MIN_STEPS = 60
"""A short window is read with as many: what lies between its edge and the nearest point is lost. Fewer than that in a
long one would say too little about gauges."""
POINTS_PER_ANSWER = 250_000
"""Of all series together; some 7 MB of JSON."""
MAX_TOTAL = 10_000_000
"""Points of a whole run: what a machine reads in a minute and keeps in a gigabyte."""
MAX_RAW = 2_000_000
"""Points around restarts, of those."""
MAX_RAW_QUERIES = 200
FLOOR_POINTS = 16
"""A query that is refused for so few points of one name is given up."""
USUAL_SCRAPE_S = 15.0
"""Where the scrape interval could not be read."""
LOOKBACK_S = 300.0
"""How long Prometheus shows a value that is not followed by another; scrapes are nearer than that."""
COUNT_STEPS = 24
"""Points of the window at which series are counted to plan with."""
SKEW_S = 30.0
"""A clock that is off by less is not worth a word."""
STAMPED = ("kvtune_connector_setting", "kvtune_router_setting", *spellings("vllm:num_requests_waiting"))
"""Small families that every router and engine exposes: their samples tell when the target was really scraped."""
STARTED = "process_start_time_seconds"
INSTANCES_PER_QUERY = 100
MAX_NOTES = 12
EDGE_S = 5.0
"""How exactly it is found out when data began and ended."""
MARGIN_S = 600.0
"""What is read before the first sample: processes start before they are scraped."""
EARLIER_S = 86_400.0
"""Where a window holds nothing, the newest sample is looked for in so long before its end."""
STALE_SCRAPES = 3
"""A newest sample that is older than so many scrapes, and `STALE_S`, is worth a word."""
STALE_S = 120.0
COVERED = 0.9
"""Data that covers less of the window is worth a word."""
NOT_A_COUNTER = 0.2
"""Share of samples below the one before, by less than half, that no restarting process shows."""

FINE_S = 1800.0
"""Longer steps are narrowed down before raw samples are read."""

Job = tuple[tuple[str, ...], int, int]
"""Names, first point of the grid, number of points."""
Stretch = tuple[float, float]
"""Begin and end, Unix s."""


@dataclass(frozen=True, slots=True)
class _Shown:
    """Of which names there is data, and at which points of the counting, `step` s apart: first and last (Unix s)."""

    names: tuple[str, ...]
    first: float
    last: float
    step: float


@dataclass(frozen=True, slots=True)
class Grid:
    """Points in time: `count` of them, `step` seconds apart, from `start` (Unix s) on."""

    start: float
    step: float
    count: int

    @property
    def end(self) -> float:
        """The last one."""
        return self.at(self.count - 1)

    def at(self, index: int) -> float:
        """Time of a point, Unix s, in whole milliseconds as it is sent."""
        return round(self.start + index * self.step, 3)


def query_prometheus(
    url: str,
    *,
    window_s: float,
    end_unix_s: float | None = None,
    step_s: float | None = None,
    client: httpx.Client | None = None,
    access: Access | None = None,
    matchers: Sequence[str] = (),
    replica_labels: Sequence[str] = (),
    names: Collection[str] = NEEDED,
    max_points: int = MAX_POINTS,
    max_total: int = MAX_TOTAL,
    sleep: Callable[[float], None] = time.sleep,
    wall: Callable[[], float] = time.time,
    progress: Callable[[int], None] | None = None,
) -> tuple[SeriesSet, list[str]]:
    """Read the last `window_s` seconds of every needed series through Prometheus' HTTP API.

    Returns the series and the queries that were sent, each with its cost as a comment. The window ends at
    `end_unix_s`, or now by the server's clock. `step_s` defaults to the scrape interval, or what gives from 60 to 720
    points. Raises UsageError for options, and TuningError: `unreachable`, `timeout`, `busy`, `http_status`,
    `redirected`, `bad_answer`, `prometheus_error` (with the server's own words), `too_many_samples`; `no_series` and
    `window_too_short` where the server is fine but has no data.
    """
    import httpx

    access = access or Access()
    added = tuple(check_matcher(text) for text in matchers)
    with contextlib.ExitStack() as stack:
        options = access.client_options([url], TIMEOUT_S)
        use = client or stack.enter_context(httpx.Client(**options))
        if client is not None:
            use.headers.update(options["headers"])
            use.auth = options["auth"]
        api = PrometheusApi(url, use, access, sleep)
        asked = tuple(sorted(spelt for name in names for spelt in spellings(name)))
        return _Reader(api, added, asked, max_points, max_total, wall, progress).read(
            window_s, end_unix_s, step_s, replica_labels
        )


@dataclass(slots=True)
class _Reader:
    api: PrometheusApi
    matchers: tuple[str, ...]
    names: tuple[str, ...]
    """As a server may hold them: both spellings of vLLM's."""
    max_points: int
    max_total: int
    wall: Callable[[], float]
    progress: Callable[[int], None] | None = None
    per_answer: int = POINTS_PER_ANSWER
    points: int = 0
    not_finite: int = 0
    shown: _Shown | None = None
    histograms: set[str] = field(default_factory=set)
    asked: dict[str, list[int]] = field(default_factory=dict)
    """Requests and points of each query."""

    def read(
        self, window_s: float, end_unix_s: float | None, step_s: float | None, replica_labels: Sequence[str]
    ) -> tuple[SeriesSet, list[str]]:
        asked_end = end_unix_s if end_unix_s is not None else self._now()
        counts = self._counts(asked_end, window_s)
        interval, newest = self._interval(asked_end)
        begin, end = self._covered(asked_end - window_s, asked_end, newest)
        if interval is None and end < asked_end:
            interval, _ = self._interval(end)
        grid = self._grid(end, end - begin, step_s, interval, counts)
        coarse = grid.step > 2 * (interval or LOOKBACK_S / 2)
        over = f"[{_duration(grid.step)}]" if coarse else ""
        names = [name for name in self.names if counts is None or counts.get(name)]

        def values(some: Sequence[str]) -> str:
            return f"last_over_time({self._selector(some)}{over})" if over else self._selector(some)

        found = self._matrix(values, names, grid, counts)
        if coarse:
            # What had ended within a step before the window is no part of it.
            found = {key: points for key, points in found.items() if points[0][-1] > grid.start}
        found = self._checked(found)
        if not found:
            raise self._no_series(asked_end, window_s)
        scrape = interval or USUAL_SCRAPE_S
        stamps = {} if coarse else self._stamps([name for name in names if name in STAMPED], grid)
        done = sort_targets(
            found, stamps, replica_labels,
            lag_points=min(30, 1 + math.ceil(scrape / grid.step)), fresh_s=2 * scrape + grid.step,
        )  # fmt: skip
        if not done.targets:
            raise self._no_series(asked_end, window_s)
        began = self._began(done, grid)
        raw = self._around_restarts(done, names, began, grid, scrape, coarse)
        series: list[Series] = []
        scrapes: dict[str, Floats] = {}
        for target in done.targets:
            own, scrapes[target.name] = _collected(
                target, done.stamps, raw.get(target.name, {}), began.get(target.name)
            )
            series += own
        if max(len(times) for times in scrapes.values()) < 2:
            raise TuningError(
                "window_too_short",
                f"{self.api.shown}: a window of {window_s:g} s holds only one scrape: counters need two"
                + (f", and targets are scraped each {interval:g} s" if interval else ""),
                f"Give a longer --window, {_duration(max(600.0, 20 * scrape))} at least.",
            )
        notes = (*_coverage(series, asked_end, window_s, scrape), *done.notes, *self.api.notes)
        if len(notes) > MAX_NOTES:
            notes = (*notes[:MAX_NOTES], f"and {len(notes) - MAX_NOTES} notes more")
        return SeriesSet(tuple(series), scrapes, self.not_finite, notes), self._explained(grid)

    # --- planning -------------------------------------------------------------------------------------------------

    def _selector(self, names: Sequence[str], *more: str) -> str:
        matchers = [*more, *self.matchers]
        if len(names) == 1 and ":" not in names[0]:
            return names[0] + (f"{{{','.join(matchers)}}}" if matchers else "")
        which = f'__name__="{names[0]}"' if len(names) == 1 else f'__name__=~"{"|".join(names)}"'
        return f"{{{','.join([which, *matchers])}}}"

    def _now(self) -> float:
        """The server's time, or this machine's where it does not tell."""
        here = self.wall()
        there: float | None = None
        with contextlib.suppress(Refused, TooLarge, KeyError, TypeError, ValueError, IndexError, OverflowError):
            said = float(self._instant("time()", None)["result"][0])
            there = said if 0 < said < LATEST_S else None
        there = there or self.api.date_s
        if there is None:
            return here
        if abs(there - here) > SKEW_S:
            ahead = "ahead of" if here > there else "behind"
            self.api.note(f"this machine's clock is {abs(there - here):.0f} s {ahead} Prometheus', which was used")
        return there

    def _instant(self, query: str, at: float | None) -> Any:
        data = self.api.instant(query, at)
        self._count(query, 1)
        return data

    def _count(self, query: str, points: int) -> None:
        spent = self.asked.setdefault(query, [0, 0])
        spent[0] += 1
        spent[1] += points
        self.points += points
        if self.progress is not None:
            self.progress(self.points)
        if self.points > self.max_total:
            raise self._too_many(self.points)

    def _too_many(self, points: float) -> TuningError:
        return TuningError(
            "too_many_samples",
            f"{self.api.shown}: {points:,.0f} samples, more than the {self.max_total:,} that are read at once",
            "Read a part of the fleet, e.g. --matcher 'cluster=\"a\"', or give a shorter --window.",
        )

    def _counts(self, end: float, window_s: float) -> dict[str, int] | None:
        """Series by name at the time that has most of them; None where the server does not tell."""
        step = max(0.001, math.floor(1000 * window_s / COUNT_STEPS) / 1000)
        over = _duration(max(step, LOOKBACK_S))
        query = f"count by (__name__) (last_over_time({self._selector(self.names)}[{over}]))"
        counts: dict[str, int] = {}
        shown: list[tuple[str, Floats]] = []
        try:
            data = self.api.over_range(query, round(end - COUNT_STEPS * step, 3), round(end, 3), step)
            for labels, times, values, _ in _rows(data):
                if labels["__name__"] not in self.names:
                    return None
                if not np.isfinite(values).all():
                    return None
                counts[labels["__name__"]] = int(values.max(initial=0))
                shown.append((labels["__name__"], times[values > 0]))
        except (Refused, TooLarge, _Shape, KeyError):
            return None
        self._count(query, len(counts) * (COUNT_STEPS + 1))
        if not counts:
            raise self._no_series(end, window_s)
        # Where kvtune's own are there, the advice is about them.
        own = [one for one in shown if one[0].startswith("kvtune_")] or shown
        times = np.concatenate([times for _, times in own])
        if len(times):
            self.shown = _Shown(tuple(sorted(name for name, _ in own)), float(times.min()), float(times.max()), step)
        return counts

    def _covered(self, start: float, end: float, newest: float | None) -> Stretch:
        """The part of the window that there is data for, with a margin: a grid over the rest would only be coarse."""
        shown = self.shown
        if shown is None:
            return start, end
        over = max(shown.step, LOOKBACK_S)
        if newest is None:
            edge = self._edge(shown.names, shown.last - over, shown.last, first=False)
            if edge is not None and edge[1] <= start:
                raise self._no_series(end, end - start, edge[1])
            newest = edge[1] if edge is not None else end
        begin = start
        if shown.first > start + shown.step / 2:
            edge = self._edge(shown.names, shown.first - shown.step, shown.first, first=True)
            # The process began a little before, which tells what its counters began with.
            begin = max(start, edge[0] - MARGIN_S) if edge is not None else start
        return begin, end if end - newest < LOOKBACK_S else newest

    def _edge(self, names: Sequence[str], low: float, high: float, *, first: bool) -> Stretch | None:
        """Two times (Unix s), near to each other, between which the first or last sample in (low, high] is."""
        found = None
        with contextlib.suppress(Refused, TooLarge, _Shape):
            while found is None or high - low > EDGE_S:
                step = max(1.0, math.ceil(1000 * (high - low) / COUNT_STEPS) / 1000)
                count = math.ceil((high - low) / step)
                query = f"count (last_over_time({self._selector(names)}[{_duration(step)}]))"
                data = self.api.over_range(query, round(low + step, 3), round(low + count * step, 3), step)
                times = np.concatenate([np.empty(0), *(times[values > 0] for _, times, values, _ in _rows(data))])
                self._count(query, len(times))
                if not len(times):
                    break
                at = float(times.min() if first else times.max())
                found = low, high = at - step, at
        return found

    def _no_series(self, end: float, window_s: float, newest: float | None = None) -> TuningError:
        matching = f" matching {', '.join(self.matchers)}" if self.matchers else ""
        hint = "Check --matcher, " if self.matchers else "Check "
        if newest is None:
            edge = self._edge(self.names, end - EARLIER_S, end, first=False)
            newest = edge[1] if edge is not None else None
        # One within the window is no number, or of no use otherwise.
        far = newest is not None and end - newest > window_s / 2
        old = f"; the newest sample is {_length(end - newest)} old" if newest is not None and far else ""
        return TuningError(
            "no_series",
            f"{self.api.shown}: none of the needed series{matching} in the last {window_s:.0f} s{old}",
            f"{hint}that Prometheus scrapes the router and both engines, and try a longer --window.",
        )

    def _interval(self, end: float) -> tuple[float | None, float | None]:
        """The shortest scrape interval of the targets (s) and the newest sample (Unix s); None where not known."""
        query = f"{self._selector(STAMPED)}[{_duration(LOOKBACK_S)}]"
        with contextlib.suppress(Refused, TooLarge, _Shape):
            rows = [times for _, times, _, _ in _rows(self.api.instant(query, end))]
            self._count(query, sum(len(times) for times in rows))
            found = [float(np.median(np.diff(times))) for times in rows if len(times) > 1]
            newest = max((float(times[-1]) for times in rows if len(times)), default=None)
            return float(f"{min(found):.2g}") if found else None, newest
        return None, None

    def _grid(
        self, end: float, window_s: float, step_s: float | None, interval: float | None, counts: dict[str, int] | None
    ) -> Grid:
        """Points that fill the window from end to end, as many as are of use and within the budget."""
        scrape = interval or USUAL_SCRAPE_S
        step = step_s or max(1.0, min(scrape, window_s / MIN_STEPS), window_s / MAX_STEPS)
        if step_s is None and interval and interval < step <= 2 * interval:
            step = interval
        # Half of the budget: restarts want some of it.
        most = self.max_total / 2 / max(1, sum((counts or {}).values()))
        if step_s is None and window_s / step > most:
            if most < MIN_STEPS and window_s / step > MIN_STEPS:
                raise self._too_many(MIN_STEPS * sum((counts or {}).values()))
            step = max(step, window_s / most)
        steps = max(1, math.ceil(window_s / step - 1e-6))
        step = max(0.001, math.floor(1000 * window_s / steps + 1e-6) / 1000)
        return Grid(round(round(end, 3) - steps * step, 3), step, steps + 1)

    # --- reading --------------------------------------------------------------------------------------------------

    def _matrix(
        self,
        query_of: Callable[[Sequence[str]], str],
        names: Sequence[str],
        grid: Grid,
        counts: dict[str, int] | None,
        *,
        named: bool = True,
    ) -> Found:
        """All series that `query_of` some names gives, over the whole grid, in as few queries as the budget allows.

        `named`: the answer tells the name of each series; else it is taken to be that of the first of the query.
        """
        parts: dict[tuple[str, Labels], list[tuple[Floats, Floats]]] = {}
        weight = counts or {}
        together = [tuple(names)] if names and (counts is not None or not named) else [(name,) for name in names]
        jobs: deque[Job] = deque((some, 0, grid.count) for some in together)
        while jobs:
            some, first, count = jobs.popleft()
            expected = count * sum(weight.get(name, 1) for name in some)
            if expected > self.per_answer and len(some) > 1:
                jobs.extendleft(reversed(_by_weight((some, first, count), weight, self.per_answer)))
                continue
            most = max(1, min(self.max_points, self.per_answer // max(1, expected // count)))
            if count > most:
                jobs.extendleft([(some, first + most, count - most), (some, first, most)])
                continue
            query = query_of(some)
            try:
                data = self.api.over_range(query, grid.at(first), grid.at(first + count - 1), grid.step)
                rows = list(self._known_rows(data, some, named))
            except TooLarge as error:
                if len(some) > 1:
                    self.per_answer = max(1, min(self.per_answer, expected // 2))
                    jobs.extendleft([(some[len(some) // 2 :], first, count), (some[: len(some) // 2], first, count)])
                elif count > FLOOR_POINTS:
                    self.max_points = max(FLOOR_POINTS, count // 2)
                    jobs.appendleft((some, first, count))
                else:
                    raise error
                continue
            except (Refused, _Nameless):
                if len(some) == 1:
                    raise
                jobs.extendleft(((name,), first, count) for name in reversed(some))
                continue
            self._count(query, sum(len(times) for _, _, times, _ in rows))
            for name, labels, times, numbers in rows:
                parts.setdefault((name, labels), []).append((times, numbers))
        return {
            key: in_order(np.concatenate([t for t, _ in some]), np.concatenate([v for _, v in some]))
            for key, some in parts.items()
        }

    def _known_rows(self, data: Any, names: Sequence[str], named: bool) -> Iterator[tuple[str, Labels, Floats, Floats]]:
        try:
            for labels, times, values, histogram in _rows(data):
                name = labels.pop("__name__", None)
                if name is None or not named:
                    if named and len(names) > 1:
                        raise _Nameless
                    name = names[0]
                # Both spellings of a series are one: of what is there twice, one is kept.
                name = exposed_name(name) if named else name
                if histogram and name not in self.histograms:
                    self.histograms.add(name)
                    self.api.note(
                        f"{name} is a native histogram, which cannot be used: have its classic buckets scraped too"
                    )
                finite = np.isfinite(values)
                self.not_finite += int(len(values) - finite.sum())
                if finite.any():
                    yield name, as_exposed(name, labels), times[finite], values[finite]
        except _Shape:
            raise TuningError(
                "bad_answer",
                f"{self.api.shown}: unexpected shape of the answer about {names[0]}",
                "Check that it is a Prometheus server.",
            ) from None

    def _checked(self, found: Found) -> Found:
        """Without what is named like a counter and goes up and down like a gauge; and say what histograms lack."""
        bad: dict[str, int] = {}
        kept: Found = {}
        for (name, labels), (times, values) in found.items():
            if name.endswith(COUNTER_SUFFIXES) and len(values) > 4:
                slight = (values[1:] < values[:-1]) & (values[1:] > values[:-1] / 2)
                if slight.sum() > NOT_A_COUNTER * (len(values) - 1):
                    bad[name] = bad.get(name, 0) + 1
                    continue
            kept[name, labels] = times, values
        for name, count in sorted(bad.items()):
            self.api.note(f"{count} series of {name} go up and down, no counter does; they were left out")
        present = {name for name, _ in kept}
        if "kvtune_turn_ends_total" in present and "kvtune_turn_gap_seconds_bucket" not in present:
            self.api.note(
                "kvtune_turn_gap_seconds_bucket is missing beside the router's other series: is it dropped by a "
                "relabelling, or kept as a native histogram only?"
            )
        return kept

    def _stamps(self, names: Sequence[str], grid: Grid) -> Found:
        """Series whose values are the times of the scrapes behind the points of the grid."""
        found: Found = {}
        try:
            for name in names:
                found |= self._matrix(
                    lambda some: f"timestamp({self._selector(some)})", [name], grid, None, named=False
                )
        except TuningError as error:
            self.api.note(f"when targets were scraped is not known, times are those of the queries ({error.message})")
        return found

    # --- restarts and births --------------------------------------------------------------------------------------

    def _began(self, done: Sorted, grid: Grid) -> dict[str, float]:
        """When the processes of targets that came inside the window started (Unix s), of those that started in it."""
        new = [target for target in done.targets if target.times[0] > grid.start and target.label("instance")]
        began: dict[str, float] = {}
        try:
            for some in _batches(new, INSTANCES_PER_QUERY):
                since = min(float(target.times[0]) for target in some)
                selector = self._selector([STARTED], _any_instance(some))
                over = _duration(grid.end - since + grid.step)
                query = f"min by (job, instance) (min_over_time({selector}[{over}]))"
                rows = self._instant(query, grid.end)["result"]
                started = {_job_and_instance(row["metric"]): float(row["value"][1]) for row in rows}
                for target in some:
                    at = min((started[key] for key in target.addresses() if key in started), default=math.nan)
                    if grid.start <= at <= target.times[0]:
                        began[target.name] = at
        except (Refused, TooLarge, KeyError, TypeError, ValueError):
            self.api.note(f"{STARTED} could not be read: what came inside the window counts from its first sample")
        return began

    def _around_restarts(
        self,
        done: Sorted,
        names: Sequence[str],
        began: dict[str, float],
        grid: Grid,
        interval: float,
        coarse: bool,
    ) -> dict[str, Found]:
        """Raw samples of counters around the moments at which they were reset, or came, inside a step of the grid."""
        there = {n for t in done.targets for n, _ in t.series if n.endswith(COUNTER_SUFFIXES)}
        counters = [name for name in names if exposed_name(name) in there]
        if not counters:
            return {}
        # A reset shows where both the sample before it and the one after it are looked at.
        reach = grid.step + 1.5 * interval
        new = {t.name for t in done.targets if coarse and t.times[0] > grid.start and t.name not in began}
        try:
            reset = self._resets(counters, grid, reach)
            stretches: dict[Stretch, list[Target]] = {}
            for target in done.targets:
                moments = set().union(*(reset.get(key, ()) for key in target.addresses()))
                moments |= {float(target.times[0])} if target.name in new else set()
                for stretch in _stretches(sorted(moments), reach):
                    stretches.setdefault(stretch, []).append(target)
            if reach > FINE_S:
                stretches = self._narrowed(stretches, new, counters, interval)
            return self._raw(done, stretches, counters, interval)
        except TuningError as error:
            if error.code == "too_many_samples":
                raise
            why = error.message
        except _Nameless:
            why = "raw samples have no names"
        self.api.note(f"what was counted just before a restart may be missing ({why})")
        return {}

    def _resets(
        self, counters: Sequence[str], grid: Grid, reach: float, *more: str
    ) -> dict[tuple[str, str], set[float]]:
        """Points of the grid (Unix s) by job and instance that any of the counters was reset `reach` seconds before."""
        over = _duration(reach)
        found = self._matrix(
            lambda some: " or ".join(
                f"(max by (job, instance) (resets({self._selector([name], *more)}[{over}])) > 0)" for name in some
            ),
            counters, grid, None, named=False,
        )  # fmt: skip
        moments: dict[tuple[str, str], set[float]] = {}
        for (_, labels), (times, _) in found.items():
            moments.setdefault(_job_and_instance(dict(labels)), set()).update(times.tolist())
        return moments

    def _arrivals(self, counters: Sequence[str], grid: Grid, reach: float, where: str) -> dict[tuple[str, str], float]:
        """The first point of the grid (Unix s) at which a job and instance had a counter, if not from the start on."""
        over = _duration(reach)
        found = self._matrix(
            lambda some: f"count by (job, instance) (last_over_time({self._selector(some, where)}[{over}]))",
            counters, grid, None, named=False,
        )  # fmt: skip
        came: dict[tuple[str, str], float] = {}
        for (_, labels), (times, _) in found.items():
            key = _job_and_instance(dict(labels))
            came[key] = min(float(times[0]), came.get(key, math.inf))
        return {key: at for key, at in came.items() if at > grid.start}

    def _narrowed(
        self, stretches: dict[Stretch, list[Target]], new: set[str], counters: Sequence[str], interval: float
    ) -> dict[Stretch, list[Target]]:
        """Shorter stretches around the same restarts, and arrivals of `new` targets, on a grid of their own each."""
        narrow: dict[Stretch, list[Target]] = {}
        queries = 0
        for (begin, end), targets in sorted(stretches.items(), key=lambda item: item[0]):
            step = max(2 * interval, math.ceil((end - begin) / 100))
            count = math.ceil((end - begin) / step) + 1
            grid = Grid(round(end - (count - 1) * step, 3), step, count)
            reach = step + 1.5 * interval
            for some in _batches(targets, INSTANCES_PER_QUERY):
                if queries >= MAX_RAW_QUERIES:
                    narrow.setdefault((begin, end), []).extend(some)
                    continue
                queries += 1
                where = _any_instance(some)
                moments = self._resets(counters, grid, reach, where)
                if new & {target.name for target in some}:
                    for key, came in self._arrivals(counters, grid, reach, where).items():
                        moments.setdefault(key, set()).add(came)
                for target in some:
                    own = set().union(*(moments.get(key, ()) for key in target.addresses()))
                    for stretch in _stretches(sorted(own), reach):
                        narrow.setdefault(stretch, []).append(target)
        return narrow

    def _raw(
        self, done: Sorted, stretches: dict[Stretch, list[Target]], counters: Sequence[str], interval: float
    ) -> dict[str, Found]:
        """Raw samples of the counters of targets in stretches of time, by target."""
        ranks = done.by_place()
        parts: dict[str, dict[tuple[str, Labels], list[tuple[Floats, Floats]]]] = {}
        spent = queries = missed = 0
        for (begin, end), targets in sorted(stretches.items(), key=lambda item: item[0]):
            each = max(len(target.series) for target in targets) * (end - begin) / interval
            for some in _batches(targets, min(INSTANCES_PER_QUERY, max(1, int(self.per_answer / each)))):
                if spent + each * len(some) > min(MAX_RAW, self.max_total - self.points) or queries >= MAX_RAW_QUERIES:
                    missed += len(some)
                    continue
                query = f"{self._selector(counters, _any_instance(some))}[{_duration(end - begin)}]"
                data = self.api.instant(query, end)
                rows = [
                    (ranks[place], (name, own), points)
                    for name, labels, *points in self._known_rows(data, counters, named=True)
                    for place, own in [done.split(labels)]
                    if place in ranks
                ]
                read = sum(len(times) for *_, (times, _) in rows)
                spent, queries = spent + read, queries + 1
                self._count(query, read)
                best = {target.name: min(r for (t, r), *_ in rows if t is target) for (target, _), *_ in rows}
                for (target, rank), key, (times, values) in rows:
                    if rank == best[target.name]:
                        parts.setdefault(target.name, {}).setdefault(key, []).append((times, values))
        if missed:
            self.api.note(
                f"{missed} restart(s) too many to look at each: what was counted just before them is missing; a "
                "shorter --window reads finer"
            )
        return {
            name: {
                key: (np.concatenate([t for t, _ in some]), np.concatenate([v for _, v in some]))
                for key, some in series.items()
            }
            for name, series in parts.items()
        }

    def _explained(self, grid: Grid) -> list[str]:
        """The queries, with what they cost as comments."""
        requests, points = (sum(spent[i] for spent in self.asked.values()) for i in (0, 1))
        whole = (
            f"; in all {requests} requests, {points:,} points of at most {self.max_total:,}, one each {grid.step:g} s"
        )
        return [
            f"{query}  # {spent[0]} request(s), {spent[1]:,} points{'' if i else whole}"
            for i, (query, spent) in enumerate(self.asked.items())
        ]


class _Shape(Exception):
    """The answer is not shaped like Prometheus'."""


class _Nameless(Exception):
    """The answer does not tell which series is called what."""


def _rows(data: Any) -> Iterator[tuple[dict[str, str], Floats, Floats, bool]]:
    """Labels, times and values of each series of a matrix, and whether it is a native histogram."""
    try:
        if data["resultType"] != "matrix":
            raise _Shape
        for row in data["result"]:
            pairs = row.get("values", ())
            labels = {str(key): str(value) for key, value in row["metric"].items()}
            times = np.fromiter((pair[0] for pair in pairs), np.float64, len(pairs))
            values = np.fromiter((float(pair[1]) for pair in pairs), np.float64, len(pairs))
            if len(times) and not (times.min() >= 0 and times.max() < LATEST_S):
                raise _Shape
            yield labels, times, values, "histograms" in row
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        raise _Shape from None


def _by_weight(job: Job, weight: dict[str, int], most: int) -> list[Job]:
    """The job cut into groups of names of at most `most` points each, or of one name."""
    names, first, count = job
    groups: list[list[str]] = [[]]
    room = most
    for name in names:
        points = count * weight.get(name, 1)
        if groups[-1] and points > room:
            groups.append([])
            room = most
        groups[-1].append(name)
        room -= points
    return [(tuple(group), first, count) for group in groups]


def _stretches(moments: Sequence[float], reach: float) -> list[Stretch]:
    """Stretches of time that hold the `reach` seconds before each moment; near ones are joined, up to a length."""
    found: list[Stretch] = []
    for moment in moments:
        if found and moment - reach <= found[-1][1] and moment - found[-1][0] <= max(3 * reach, 2 * LOOKBACK_S):
            found[-1] = (found[-1][0], moment)
        else:
            found.append((moment - reach, moment))
    return found


def _batches(targets: Sequence[Target], size: int) -> Iterator[Sequence[Target]]:
    return (targets[i : i + size] for i in range(0, len(targets), size))


def _any_instance(targets: Sequence[Target]) -> str:
    """A matcher for the addresses of targets."""
    pattern = "|".join(re.escape(instance) for instance in sorted({i for t in targets for _, i in t.addresses()}))
    escaped = pattern.replace("\\", "\\\\").replace('"', '\\"')
    return f'instance=~"{escaped}"'


def _job_and_instance(labels: dict[str, str]) -> tuple[str, str]:
    return labels.get("job", ""), labels.get("instance", "")


def _coverage(series: Sequence[Series], end: float, window_s: float, interval: float) -> list[str]:
    """What is to be said about data that ends before the window does, or does not fill it: kvtune's own, if any."""
    own = [one for one in series if one.name.startswith("kvtune_")]
    whose = " of kvtune's own series" if 0 < len(own) < len(series) else ""
    first = min(float(one.times[0]) for one in own or series)
    last = max(float(one.times[-1]) for one in own or series)
    notes = []
    if last - first < COVERED * window_s - interval:
        notes.append(f"data covers {_length(last - first)} of the {_length(window_s)} asked for")
    if end - last > max(STALE_S, STALE_SCRAPES * interval):
        notes.append(f"the newest sample{whose} is {_length(end - last)} old: are targets still scraped?")
    return notes


def _length(seconds: float) -> str:
    """A time span in words, to two digits or so."""
    for unit, size in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size or (unit != "d" and seconds >= size):
            return f"{round(seconds / size, 1):g} {unit}"
    return f"{seconds:.0f} s"


def _duration(seconds: float) -> str:
    """As PromQL writes it, in whole milliseconds."""
    milliseconds = max(1, round(1000 * seconds))
    return f"{milliseconds // 1000}s" if milliseconds % 1000 == 0 else f"{milliseconds}ms"


def _collected(
    target: Target, stamps: dict[Labels, dict[float, float]], raw: Found, began_s: float | None
) -> tuple[list[Series], Floats]:
    """The series of a target with the times of its scrapes, raw samples among them; and those times."""
    told: dict[float, float] = {}
    for place in reversed(target.places):
        told.update(stamps.get(place, {}))
    points = target.times
    scraped = np.minimum(points, [told.get(at, at) for at in points.tolist()])
    common = frozenset.intersection(*target.places)
    place = frozenset(pair for pair in common if pair[0] not in ("job", "instance"))
    found = []
    for (name, own), (times, values) in target.series.items():
        times = scraped[np.searchsorted(points, times)]
        extra = raw.get((name, own))
        if extra is not None:
            # What was read raw comes first: of equal times the last wins, and both say the same.
            times, values = np.concatenate((extra[0], times)), np.concatenate((extra[1], values))
        times, values = in_order(times, values)
        if name.endswith(COUNTER_SUFFIXES):
            times, values = from_birth(times, values, scraped, began_s)
        found.append(Series(name, own | place, target.name, times, values))
    return found, np.unique(scraped)
