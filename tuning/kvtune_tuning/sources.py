"""Where series come from: a directory of snapshots, live targets, or Prometheus. All yield a `SeriesSet`."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtune_telemetry.clock import Clock
from kvtune_tuning.errors import TuningError, UsageError
from kvtune_tuning.exposition import parse
from kvtune_tuning.names import NEEDED
from kvtune_tuning.recording import (
    FILE_NAME,
    SUFFIX,
    Complain,
    Fetch,
    http_fetch,
    names_of,
    scrape_rounds,
    without_secrets,
)
from kvtune_tuning.series import Collector, Labels, SeriesSet

if TYPE_CHECKING:
    import httpx

MAX_POINTS = 10_000
"""Points of one range query; Prometheus refuses more than 11,000 per series."""
MAX_STEPS = 720
"""Points per series that a window is read with: more would not sharpen anything, and costs the server."""
MIN_STEPS = 60
"""A short window is read with as many: what lies between its edge and the nearest point is lost."""
USUAL_SCRAPE_S = 15.0
"""Reading in finer steps than Prometheus scrapes by default is only worth it where `MIN_STEPS` asks for it."""
STAMPED = ("kvtune_router_setting", "kvtune_connector_setting")
"""Small families that every router and engine exposes: their samples tell when the target was really scraped."""
PROMETHEUS_TIMEOUT_S = 30.0


_Seen = dict[str, dict[float, list[tuple[str, Labels, float]]]]
"""Samples by target and time of the point (Unix s)."""


def read_snapshots(directory: str | os.PathLike[str]) -> SeriesSet:
    """Read a directory that `kvtune record` wrote.

    Raises TuningError: `no_such_directory`, `empty_snapshot`, `bad_file_name`, `not_an_exposition`, `cannot_read`.
    """
    path = Path(directory)
    if not path.is_dir():
        raise TuningError(
            "no_such_directory", f"{path}: not a directory", "Give a directory written by `kvtune record --out DIR`."
        )
    collector = Collector()
    skipped = []
    named = []
    for file in sorted(path.iterdir()):
        if file.name.startswith(".") or file.suffix != SUFFIX or not file.is_file():
            continue
        match = FILE_NAME.match(file.name)
        if match is None:
            skipped.append(file.name)
        else:
            named.append((int(match["ms"]) / 1000.0, match["target"], file))
    if not named:
        if skipped:
            raise TuningError(
                "bad_file_name",
                f"{path / skipped[0]}: the name is not <unix ms>-<target>.prom",
                "Snapshots need the time of the scrape in their names; write them with `kvtune record`.",
            )
        raise TuningError(
            "empty_snapshot",
            f"{path}: no *.prom files",
            "Record some: kvtune record --scrape http://router:9400/metrics --out DIR",
        )
    for time_s, target, file in sorted(named, key=lambda item: item[:2]):
        try:
            text = file.read_text(encoding="utf-8")
            # A scrape is written at once: a name that is later than the file is in the time of a simulation.
            collector.ahead_s = max(collector.ahead_s, time_s - file.stat().st_mtime)
        except UnicodeDecodeError:
            raise TuningError(
                "not_an_exposition", f"{file}: not UTF-8 text", "Remove the file, or record the snapshots again."
            ) from None
        except OSError as error:
            raise TuningError("cannot_read", f"{file}: {error.strerror}", "Check the file's permissions.") from None
        _take(collector, time_s, target, text, str(file))
    if skipped:
        collector.notes.append(f"{len(skipped)} file(s) skipped, their names carry no time: {', '.join(skipped[:3])}")
    return collector.collected()


def _take(collector: Collector, time_s: float, target: str, text: str, where: str) -> None:
    parsed = parse(text, where)
    collector.not_finite += parsed.not_finite
    collector.scraped(target, time_s, ((s.name, s.labels, s.value) for s in parsed.samples))


async def scrape_live(
    urls: Sequence[str],
    clock: Clock,
    *,
    interval_s: float,
    duration_s: float,
    stop: asyncio.Event,
    fetch: Fetch | None = None,
    complain: Complain | None = None,
    progress: Callable[[float], None] | None = None,
) -> SeriesSet:
    """Scrape live targets for `duration_s` seconds and gather what they expose.

    Raises TuningError where no target answers the first time or one of them exposes something else.
    """
    collector = Collector()
    named = names_of(urls)
    began = clock.unix()

    def sink(unix_s: float, target: str, text: str) -> None:
        _take(collector, unix_s, target, text, without_secrets(named[target]))
        collector.ahead_s = max(collector.ahead_s, unix_s - time.time())
        if progress is not None:
            progress(unix_s - began)

    async with contextlib.AsyncExitStack() as stack:
        use = fetch if fetch is not None else await stack.enter_async_context(http_fetch())
        done = await scrape_rounds(named, clock, interval_s, stop, sink, use, duration_s=duration_s, complain=complain)
    for target, count in done.failures.items():
        collector.notes.append(f"{target}: {count} of {done.rounds} scrapes failed ({done.last_failure[target]})")
    return collector.collected()


def query_prometheus(
    url: str,
    *,
    window_s: float,
    end_unix_s: float,
    step_s: float | None = None,
    client: httpx.Client | None = None,
    max_points: int = MAX_POINTS,
) -> tuple[SeriesSet, list[str]]:
    """Read the last `window_s` seconds of every needed series from Prometheus' HTTP API, one range query a name.

    Returns the series and the queries that were sent. `step_s` defaults to 15 s, or what gives from 60 to 720 points,
    but no less than a second. Values get the times of their scrapes, where Prometheus tells them, so that one that is
    read twice counts once. Raises TuningError: `unreachable`, `http_status`, `prometheus_error` (with Prometheus' own
    words), `bad_answer`, `no_series`.
    """
    import httpx

    base = url if "://" in url else f"http://{url}"
    base = base.rstrip("/").removesuffix("/api/v1")
    if not base.startswith(("http://", "https://")):
        raise UsageError(
            "bad_url", f"not an http(s) address: {without_secrets(url)!r}", "Give e.g. --prometheus http://host:9090"
        )
    step, steps = _steps(window_s, step_s)
    # On whole milliseconds, as they are sent: the last point must not fall off by rounding.
    end = round(end_unix_s, 3)
    ranges = _chunks(end - steps * step, end, step, max_points)
    collector = Collector()
    seen: _Seen = {}
    stamps: _Seen = {}
    queries: list[str] = []
    with contextlib.ExitStack() as stack:
        use = client or stack.enter_context(httpx.Client(timeout=PROMETHEUS_TIMEOUT_S, follow_redirects=True))
        asked = [(name, f'{{__name__="{name}"}}' if ":" in name else name, seen) for name in sorted(NEEDED)]
        asked += [(name, f"timestamp({name})", stamps) for name in STAMPED]
        for name, query, found in asked:
            queries.append(query)
            for first, last in ranges:
                answer = _ask(use, base, query, first, last, step)
                for warning in (*answer.get("warnings", ()), *answer.get("infos", ())):
                    note = f"Prometheus about {name}: {warning}"
                    if note not in collector.notes:
                        collector.notes.append(note)
                _gather(answer, name, found, collector, base)
    for target, by_time in seen.items():
        for time_s in sorted(by_time):
            stamp = max((value for *_, value in stamps.get(target, {}).get(time_s, ())), default=time_s)
            collector.scraped(target, min(stamp, time_s), by_time[time_s])
    if not seen:
        raise TuningError(
            "no_series",
            f"{without_secrets(base)}: none of the needed series in the last {window_s:.0f} s",
            "Check that Prometheus scrapes the router and both engines, and try a longer --window.",
        )
    return collector.collected(), queries


def _steps(window_s: float, step_s: float | None) -> tuple[float, int]:
    """Step (s, whole milliseconds) and number of steps that fill the window from end to end."""
    if step_s is None:
        step_s = max(1.0, min(USUAL_SCRAPE_S, window_s / MIN_STEPS), window_s / MAX_STEPS)
    steps = max(1, math.ceil(window_s / step_s - 1e-6))
    return max(0.001, math.floor(1000 * window_s / steps + 1e-6) / 1000), steps


def _chunks(start: float, end: float, step: float, max_points: int) -> list[tuple[float, float]]:
    """Ranges of at most `max_points` points on one grid; no point is in two of them."""
    total = int((end - start) / step + 1e-6) + 1
    return [
        (start + first * step, start + (min(first + max_points, total) - 1) * step)
        for first in range(0, total, max_points)
    ]


def _ask(client: httpx.Client, base: str, query: str, start: float, end: float, step: float) -> dict[str, Any]:
    import httpx

    where = f"{base}/api/v1/query_range"
    shown = without_secrets(base)
    form = {"query": query, "start": f"{start:.3f}", "end": f"{end:.3f}", "step": f"{step:.3f}"}
    try:
        answer = client.post(where, data=form)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise TuningError(
            "unreachable", f"{shown}: {error or type(error).__name__}", "Check the address and that Prometheus is up."
        ) from None
    try:
        body = answer.json()
    except ValueError:
        body = None
    if isinstance(body, dict) and body.get("status") == "error":
        raise TuningError(
            "prometheus_error",
            f"{shown}: {query}: {body.get('errorType', 'error')}: {body.get('error', '')}",
            "Prometheus refused the query; try a shorter --window.",
        )
    if answer.status_code != 200:
        raise TuningError(
            "http_status",
            f"{shown}: HTTP {answer.status_code}",
            "Check the address: it must be Prometheus itself, or something that serves its HTTP API.",
        )
    if not isinstance(body, dict) or body.get("status") != "success":
        raise TuningError(
            "bad_answer",
            f"{shown}: the answer is not Prometheus' JSON",
            "Check that the address is a Prometheus server.",
        )
    return body


def _gather(
    answer: dict[str, Any],
    name: str,
    seen: _Seen,
    collector: Collector,
    base: str,
) -> None:
    try:
        if answer["data"]["resultType"] != "matrix":
            raise ValueError
        for row in answer["data"]["result"]:
            metric = dict(row["metric"])
            metric.pop("__name__", None)
            job, instance = metric.pop("job", ""), metric.pop("instance", "")
            target = f"{job}/{instance}" if job and instance else instance or job or "prometheus"
            labels = frozenset((str(k), str(v)) for k, v in metric.items())
            for time_s, text in row["values"]:
                value = float(text)
                if math.isfinite(value):
                    seen.setdefault(target, {}).setdefault(float(time_s), []).append((name, labels, value))
                else:
                    collector.not_finite += 1
    except (KeyError, TypeError, ValueError):
        raise TuningError(
            "bad_answer",
            f"{without_secrets(base)}: unexpected shape of the answer about {name}",
            "Check that it is a Prometheus server.",
        ) from None
