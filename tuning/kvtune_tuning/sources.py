"""Where series come from: a directory of snapshots, or live targets (`prometheus` reads a server): a `SeriesSet`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvtune_telemetry.clock import Clock
from kvtune_tuning.access import Access
from kvtune_tuning.errors import TuningError
from kvtune_tuning.exposition import parse
from kvtune_tuning.frames import LATEST_S
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
from kvtune_tuning.series import Collector, SeriesSet

LEAST_ROUNDS = 2
MOST_DAMAGED = 0.25
"""Snapshots of a target that must be left, and the share that may be damaged, for the others to be read."""


def read_snapshots(directory: str | os.PathLike[str]) -> SeriesSet:
    """Read a directory that `kvtune record` wrote.

    Files that are damaged are skipped, and said to be. Raises TuningError: `no_such_directory`, `empty_snapshot`,
    `bad_file_name`; and `not_an_exposition` or `cannot_read` where that leaves too few of a target.
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
            at = int(match["ms"]) / 1000.0
            if at > LATEST_S:
                raise TuningError(
                    "bad_file_name",
                    f"{file}: {match['ms']} is no time in ms since 1970, it would be after the year 2255",
                    "Remove the file, or put the time of the scrape in its name; `kvtune record` does.",
                )
            named.append((at, match["target"], file))
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
    whole = {file for _, _, file in named if _ends_whole(file)}
    rounds: dict[str, int] = {}
    damaged: dict[str, list[TuningError]] = {}
    for time_s, target, file in sorted(named, key=lambda item: item[:2]):
        rounds[target] = rounds.get(target, 0) + 1
        try:
            text = _text(file)
            # Every page ends with its line; one that does not was cut, unless a tool took all the ends away.
            if whole and file not in whole and text:
                raise TuningError(
                    "not_an_exposition", f"{file}: cut inside its last line", "Remove the file, or record again."
                )
            _take(collector, time_s, target, text, str(file))
        except TuningError as error:
            damaged.setdefault(target, []).append(error)
            continue
        # A scrape is written at once: a name that is later than the file is in the time of a simulation.
        with contextlib.suppress(OSError):
            collector.ahead_s = max(collector.ahead_s, time_s - file.stat().st_mtime)
    for target, errors in damaged.items():
        if rounds[target] - len(errors) < LEAST_ROUNDS or len(errors) > MOST_DAMAGED * rounds[target]:
            raise errors[0]
    for target, errors in sorted(damaged.items()):
        collector.notes.append(
            f"{target}: {len(errors)} of {rounds[target]} snapshots are damaged and were skipped ({errors[0].message})"
        )
    if skipped:
        collector.notes.append(f"{len(skipped)} file(s) skipped, their names carry no time: {', '.join(skipped[:3])}")
    return collector.collected()


def _ends_whole(file: Path) -> bool:
    """Whether a file ends with the end of a line."""
    try:
        with file.open("rb") as opened:
            opened.seek(-1, os.SEEK_END)
            return opened.read() == b"\n"
    except OSError:
        return False


def _text(file: Path) -> str:
    """A snapshot's text. Raises TuningError: `not_an_exposition`, `cannot_read`."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise TuningError(
            "not_an_exposition", f"{file}: not UTF-8 text", "Remove the file, or record the snapshots again."
        ) from None
    except OSError as error:
        raise TuningError("cannot_read", f"{file}: {error.strerror}", "Check the file's permissions.") from None


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
    access: Access | None = None,
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
        use = fetch if fetch is not None else await stack.enter_async_context(http_fetch(urls, access))
        done = await scrape_rounds(named, clock, interval_s, stop, sink, use, duration_s=duration_s, complain=complain)
    for target, count in done.failures.items():
        collector.notes.append(f"{target}: {count} of {done.rounds} scrapes failed ({done.last_failure[target]})")
    return collector.collected()
