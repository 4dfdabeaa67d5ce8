"""The bodies of `kvtune suggest` and `kvtune record`: all but option parsing. Payload goes to stdout only."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from kvtune_telemetry.clock import Clock, SystemClock
from kvtune_tuning.access import Access
from kvtune_tuning.errors import TuningError, UsageError
from kvtune_tuning.export import Advice, check_export, write_export

DEFAULT_WINDOW_S = 3600.0
"""Window asked of Prometheus."""
DEFAULT_INTERVAL_S = 5.0
"""Between live scrapes of `suggest`."""
DEFAULT_DURATION_S = 60.0
"""Of live scraping by `suggest`."""
DEFAULT_RECORD_INTERVAL_S = 15.0
FORMATS = ("table", "json", "yaml")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhdw])")


def seconds(text: str, option: str) -> float:
    """A duration in seconds: `90`, `90s`, `1h30m`, `7d`. Raises UsageError."""
    given = text.strip()
    total = 0.0
    if re.fullmatch(r"\d+(\.\d+)?", given):
        total = float(given)
    elif given and _DURATION.sub("", given) == "":
        total = sum(float(number) * _UNITS[unit] for number, unit in _DURATION.findall(given))
    if not 0 < total < 1e9:
        raise UsageError(
            "bad_duration", f"{option}: not a positive duration: {text!r}", "Write e.g. 90s, 30m, 1h30m or 7d."
        )
    return total


def _rhythm(
    interval: str | None, duration: str | None, default_interval_s: float, default_duration_s: float | None
) -> tuple[float, float | None]:
    """Interval and duration of scraping (s). A default interval is no longer than the duration. Raises UsageError."""
    total = seconds(duration, "--duration") if duration else default_duration_s
    if not interval:
        return min(default_interval_s, total or math.inf), total
    every = seconds(interval, "--interval")
    if total is not None and every > total:
        default = "" if duration else ", the default"
        raise UsageError(
            "interval_too_long",
            f"--interval {every:g} s is longer than --duration {total:g} s{default}",
            "Counters need two scrapes, better dozens: give a shorter --interval or a longer --duration.",
        )
    return every, total


def _patient(access: Access | None, timeout: str | None) -> Access:
    """The access with the time to wait for one answer. Raises UsageError."""
    return replace(access or Access(), timeout_s=seconds(timeout, "--timeout") if timeout else None)


@contextlib.contextmanager
def _stop_on_signals(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> Iterator[None]:
    """Ctrl-C and SIGTERM set `stop`, so that the last round is still taken; a second one interrupts as usual."""
    added = []

    def once(sig: int) -> None:
        stop.set()
        loop.remove_signal_handler(sig)

    for sig in (signal.SIGINT, signal.SIGTERM):
        # not in the main thread, or on a platform without: the default behaviour stays
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(sig, once, sig)
            added.append(sig)
    try:
        yield
    finally:
        for sig in added:
            loop.remove_signal_handler(sig)


@dataclass(frozen=True, slots=True)
class Question:
    """What `kvtune suggest` is asked: one source and how to read it, as its options say.

    `interval` and `duration` are of live scrapes: 5 s and 60 s by default. `matchers`, `replica_labels` and
    `max_points` (of one series in one query) are for Prometheus, `access` for both. `roles` (`prefill=PART`), `ranks`,
    `current_ttl` and `current_threshold` state what a stock deployment does not expose.
    """

    prometheus: str | None = None
    scrape: Sequence[str] = ()
    snapshot: str | Path | None = None
    window: str | None = None
    explain: bool = False
    interval: str | None = None
    duration: str | None = None
    samples: Path | None = None
    access: Access | None = None
    timeout: str | None = None
    matchers: Sequence[str] = ()
    replica_labels: Sequence[str] = ()
    max_points: int | None = None
    roles: Sequence[str] = ()
    ranks: int | None = None
    current_ttl: str | None = None
    current_threshold: int | None = None


def run_suggest(
    question: Question,
    *,
    output: str,
    exit_code: bool,
    export: Path | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    clock: Clock | None = None,
) -> int:
    """Run `kvtune suggest`; returns its exit code. Prints the document, also of a failure, whose message is on stderr.

    `export`: a file that gets the advice as gauges, for a textfile collector; of a failure too.
    """
    from kvtune_tuning import document as documents

    out, err = stdout or sys.stdout, stderr or sys.stderr
    try:
        if output not in FORMATS:
            raise UsageError(
                "bad_format", f"--format: unknown format {output!r}", f"Choose one of {', '.join(FORMATS)}."
            )
        if export is not None:
            check_export(export)
    except UsageError as error:
        tell(error, err)
        _print(documents.failed(error), output, out)
        return 2
    report, failure = answer(question, err, clock)
    if failure is None:
        code = documents.exit_code(report, signal_change=exit_code)
    else:
        code = 2 if isinstance(failure, UsageError) else documents.exit_code(report)
        tell(failure, err)
    _print(report, output, out)
    if export is not None:
        try:
            write_export(export, Advice.of(report, (clock or SystemClock()).unix()))
        except TuningError as error:
            tell(error, err)
            return code or 1
    return code


def answer(question: Question, err: TextIO, clock: Clock | None = None) -> tuple[dict[str, Any], TuningError | None]:
    """The document that answers `question`, and the error it tells of where there is no advice.

    Progress goes to `err`.
    """
    from kvtune_tuning import document as documents
    from kvtune_tuning.api import suggest_series
    from kvtune_tuning.recording import without_secrets
    from kvtune_tuning.stock import Stated

    source: dict[str, Any] | None = None
    try:
        prometheus, scrape, snapshot = question.prometheus, question.scrape, question.snapshot
        given = [
            name
            for name, value in (("--prometheus", prometheus), ("--scrape", scrape), ("--snapshot", snapshot))
            if value
        ]
        if len(given) != 1:
            what = "no source" if not given else f"more than one source ({', '.join(given)})"
            raise UsageError(
                "one_source", what, "Give exactly one of --prometheus URL, --scrape URL..., --snapshot DIR."
            )
        timing = [
            name
            for name, value in (("--interval", question.interval), ("--duration", question.duration))
            if value is not None
        ]
        if timing and not scrape:
            raise UsageError(
                "only_for_scrape",
                f"{' and '.join(timing)} with {given[0]}",
                "They are for live scrapes (--scrape); give --window to use only the last part of what there is.",
            )
        access = _patient(question.access, question.timeout)
        _no_misfits(given[0], access, question.matchers, question.replica_labels, question.max_points)
        window_s = seconds(question.window, "--window") if question.window else None
        stated = Stated.of(
            question.roles,
            question.ranks,
            seconds(question.current_ttl, "--current-ttl") if question.current_ttl else None,
            question.current_threshold,
        )
        every_s, total_s = _rhythm(question.interval, question.duration, DEFAULT_INTERVAL_S, DEFAULT_DURATION_S)
        if prometheus:
            source = {"kind": "prometheus", "where": [without_secrets(prometheus).partition("?")[0]]}
        elif scrape:
            source = {"kind": "scrape", "where": [without_secrets(url) for url in scrape]}
        else:
            source = {"kind": "snapshot", "where": [str(snapshot)]}
        assert total_s is not None
        queries: list[str] = []
        if prometheus:
            series, queries = _read_prometheus(
                prometheus, window_s or DEFAULT_WINDOW_S, access, question.matchers, question.replica_labels,
                question.max_points, err, clock,
            )  # fmt: skip
            window_s = None
        elif scrape:
            series = asyncio.run(_scrape(scrape, every_s, total_s, access, err, clock or SystemClock()))
        else:
            from kvtune_tuning.sources import read_snapshots

            assert snapshot is not None
            series = read_snapshots(snapshot)
        if question.samples is not None:
            from kvtune_tuning.frames import write_samples

            print(f"wrote {write_samples(series, question.samples)} samples to {question.samples}", file=err)
        report = suggest_series(
            series, source, window_s=window_s, explain=question.explain, queries=queries, stated=stated
        )
    except TuningError as error:
        return documents.failed(error, source), error
    return report, None


def _no_misfits(
    source: str, access: Access, matchers: Sequence[str], replica_labels: Sequence[str], max_points: int | None
) -> None:
    """Refuse options that say nothing about the source. Raises UsageError."""
    own = {"--matcher": matchers, "--replica-label": replica_labels, "--max-points": max_points is not None}
    only = [name for name, value in own.items() if value]
    if only and source != "--prometheus":
        raise UsageError(
            "only_for_prometheus", f"{' and '.join(only)} with {source}", "They say what to read from --prometheus URL."
        )
    if source == "--snapshot" and access.given():
        raise UsageError(
            "only_for_servers", f"{' and '.join(access.given())} with {source}", "A directory asks for no log-in."
        )


def _read_prometheus(
    url: str,
    window_s: float,
    access: Access,
    matchers: Sequence[str],
    replica_labels: Sequence[str],
    max_points: int | None,
    err: TextIO,
    clock: Clock | None,
) -> tuple[Any, list[str]]:
    from kvtune_tuning.prometheus import MAX_POINTS, query_prometheus

    if max_points is not None and max_points < 2:
        raise UsageError("bad_max_points", f"--max-points {max_points}: too few", "Give 100 or more.")
    tty = err.isatty()

    def progress(points: int) -> None:
        print(f"\rreading: {points:,} points", end="", file=err, flush=True)

    try:
        return query_prometheus(
            url, window_s=window_s, end_unix_s=clock.unix() if clock is not None else None, access=access,
            matchers=matchers, replica_labels=replica_labels, max_points=max_points or MAX_POINTS,
            progress=progress if tty else None,
        )  # fmt: skip
    finally:
        if tty:
            print(file=err)


async def _scrape(
    urls: Sequence[str], interval_s: float, duration_s: float, access: Access, err: TextIO, clock: Clock
) -> Any:
    from kvtune_tuning import sources

    stop = asyncio.Event()
    tty = err.isatty()

    def complain(message: str) -> None:
        print(("\r" if tty else "") + f"scrape failed: {message}", file=err)

    def progress(elapsed: float) -> None:
        if tty:
            print(f"\rscraping {elapsed:4.0f} of {duration_s:.0f} s", end="", file=err, flush=True)

    if not tty:
        print(f"scraping {len(urls)} target(s) for {duration_s:g} s, every {interval_s:g} s", file=err)
    with _stop_on_signals(asyncio.get_running_loop(), stop):
        series = await sources.scrape_live(
            urls, clock, interval_s=interval_s, duration_s=duration_s, stop=stop, access=access, complain=complain,
            progress=progress,
        )  # fmt: skip
    if tty:
        print(file=err)
    return series


def tell(error: TuningError, err: TextIO) -> None:
    """What went wrong and what to do, as every command says it."""
    print(f"kvtune: {error.message}", file=err)
    if error.hint:
        print(error.hint, file=err)


def _print(report: dict[str, Any], output: str, out: TextIO) -> None:
    if output == "json":
        print(json.dumps(report, indent=2, allow_nan=False), file=out)
    elif output == "yaml":
        import yaml

        out.write(yaml.safe_dump(report, sort_keys=False, allow_unicode=True, width=100))
    elif "error" not in report:
        from kvtune_tuning.render import render_table

        out.write(render_table(report, color=out.isatty()))


def run_record(
    *,
    scrape: Sequence[str],
    out: str | Path,
    interval: str | None = None,
    duration: str | None = None,
    output: str = "table",
    access: Access | None = None,
    timeout: str | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    clock: Clock | None = None,
) -> int:
    """Run `kvtune record` until its duration or Ctrl-C; returns its exit code. The summary goes to stdout.

    `interval` is 15 s by default; `access` and `timeout` are as in `run_suggest`.
    """
    payload, err = stdout or sys.stdout, stderr or sys.stderr
    try:
        if output not in ("table", "json"):
            raise UsageError("bad_format", f"--format: unknown format {output!r}", "Choose one of table, json.")
        every, total = _rhythm(interval, duration, DEFAULT_RECORD_INTERVAL_S, None)
        summary = asyncio.run(
            _record(scrape, out, every, total, _patient(access, timeout), err, clock or SystemClock())
        )
    except TuningError as error:
        tell(error, err)
        if output == "json":
            print(json.dumps({"schema": "kvtune.record/1", "error": error.as_dict()}, indent=2), file=payload)
        return 2 if isinstance(error, UsageError) else 1
    if output == "json":
        print(json.dumps({"schema": "kvtune.record/1", **summary}, indent=2), file=payload)
    else:
        failures = sum(summary["failures"].values())
        print(
            f"{summary['snapshots']} snapshots of {summary['targets']} target(s) in {summary['directory']}"
            + (f", {failures} scrapes failed" if failures else ""),
            file=payload,
        )
    return 0


async def _record(
    urls: Sequence[str],
    directory: str | Path,
    interval_s: float,
    duration_s: float | None,
    access: Access,
    err: TextIO,
    clock: Clock,
) -> dict[str, Any]:
    from kvtune_tuning.recording import names_of, record

    stop = asyncio.Event()
    until = f"for {duration_s:g} s" if duration_s is not None else "until Ctrl-C"
    targets = names_of(urls)
    print(f"recording {len(targets)} target(s) every {interval_s:g} s {until}", file=err)
    with _stop_on_signals(asyncio.get_running_loop(), stop):
        done = await record(
            urls, directory, clock, interval_s, stop, duration_s=duration_s, access=access,
            complain=lambda message: print(f"scrape failed: {message}", file=err),
        )  # fmt: skip
    return {
        "directory": str(directory),
        "targets": len(targets),
        "rounds": done.rounds,
        "snapshots": done.snapshots,
        "failures": done.failures,
    }
