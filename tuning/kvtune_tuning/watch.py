"""`kvtune suggest --watch`: asks again and again, and serves the advice as gauges."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from types import FrameType
from typing import Any, TextIO

from loguru import logger

from kvtune_telemetry.clock import Clock, SystemClock
from kvtune_telemetry.logs import setup_logging
from kvtune_tuning.errors import TuningError, UsageError
from kvtune_tuning.export import Advice, AdviceCollector, check_export, write_export
from kvtune_tuning.run import Question, answer, seconds, tell
from kvtune_tuning.wording import digits

DEFAULT_EVERY_S = 900.0
DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 9401

Pause = Callable[[float], None]
"""Waits so many seconds."""


@dataclass(frozen=True, slots=True)
class Watch:
    """How to keep asking, as the options say."""

    every: str | None = None
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    """0: any that is free."""
    export: Path | None = None
    """Rewritten after each round."""
    log_format: str = "console"


class _Stop(BaseException):
    """SIGTERM or SIGINT: ends a round wherever it is, which closes its connections."""


def run_watch(
    question: Question,
    watch: Watch,
    *,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    clock: Clock | None = None,
    pause: Pause | None = None,
) -> int:
    """Ask now and then every so often until SIGTERM or SIGINT, and serve the gauges meanwhile; returns the exit code.

    Prints one JSON object with the address once it is served, then logs one line a round. A round that fails is logged
    and shows as `kvtune_suggest_up` 0; the next one is asked as usual. Options that cannot be used, and a file that
    cannot be written the first time, end it at once.
    """
    out, err, time = stdout or sys.stdout, stderr or sys.stderr, clock or SystemClock()
    collector = AdviceCollector()
    try:
        every_s = _checked(question, watch)
        setup_logging(fmt=watch.log_format, stream=err)
        with _stopped_by_signals(), _served(collector, watch) as address:
            print(json.dumps({"metrics": address, "every_seconds": every_s}), file=out, flush=True)
            began, rounds = time.now(), 0
            while True:
                _round(question, watch, collector, time, first=rounds == 0)
                # Rounds stay on the grid of the first; one that is late is skipped, not caught up.
                rounds = int((time.now() - began) / every_s) + 1
                (pause or _pause)(began + rounds * every_s - time.now())
    except _Stop:
        return 0
    except TuningError as error:
        tell(error, err)
        return 2 if isinstance(error, UsageError) else 1


def _checked(question: Question, watch: Watch) -> float:
    """Seconds between rounds. Raises UsageError for what makes no sense in a watch."""
    other = [name for name, value in (("--scrape", question.scrape), ("--snapshot", question.snapshot)) if value]
    if other or not question.prometheus:
        raise UsageError(
            "only_for_prometheus", f"--watch {'with ' + ' and '.join(other) if other else 'without a server'}",
            "It asks again about a window that moves on, which only --prometheus URL keeps.",
        )  # fmt: skip
    if question.samples is not None:
        raise UsageError("not_in_a_watch", "--samples with --watch", "Each round would overwrite it: ask without.")
    if watch.log_format not in ("console", "json"):
        raise UsageError(
            "bad_format", f"--log-format: unknown format {watch.log_format!r}", "Choose one of console, json."
        )
    if not 0 <= watch.port <= 65535:
        raise UsageError("bad_port", f"--port {watch.port}: no such port", "Give one from 1 to 65535, or 0 for any.")
    if watch.export is not None:
        check_export(watch.export)
    return seconds(watch.every, "--every") if watch.every else DEFAULT_EVERY_S


def _round(question: Question, watch: Watch, collector: AdviceCollector, clock: Clock, *, first: bool) -> None:
    """Ask once, and show what came of it. Raises TuningError where going on would not help."""
    # A line that counts points would be torn by the log.
    report, failure = answer(question, io.StringIO(), clock)
    if first and isinstance(failure, UsageError):
        raise failure
    before = collector.advice
    advice = Advice.of(report, clock.unix(), before.last_success_s if before is not None else None)
    collector.advice = advice
    if failure is None:
        logger.info("{}", _line(report))
    else:
        logger.log("INFO" if advice.up else "ERROR", "no advice: {} {}", failure.message, failure.hint)
    if watch.export is not None:
        try:
            write_export(watch.export, advice)
        except TuningError as error:
            if first:
                raise
            logger.error("{} {}", error.message, error.hint)


def _line(document: dict[str, Any]) -> str:
    """Both recommendations in one line."""
    parts = []
    for one in document["recommendations"]:
        to = f" -> {digits(one['recommended'])}" if one["status"] == "change" else ""
        parts.append(f"{one['setting']} {digits(one['current'])}{to} {one['unit']}: {one['status']}")
    return f"{'; '.join(parts)} (window {document['window']['seconds']:.0f} s)"


@contextlib.contextmanager
def _served(collector: AdviceCollector, watch: Watch) -> Iterator[str]:
    """Serves the gauges; gives the address. Raises UsageError where it cannot be served there."""
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    registry.register(collector)
    try:
        server, thread = start_http_server(watch.port, watch.host, registry)
    except OSError as error:
        raise UsageError(
            "cannot_listen", f"--host {watch.host} --port {watch.port}: {error.strerror or error}",
            "Give an address of this machine and a port that is free.",
        ) from None  # fmt: skip
    try:
        host = f"[{watch.host}]" if ":" in watch.host else watch.host
        yield f"http://{host}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """SIGTERM and SIGINT raise `_Stop`, once; a second one interrupts as usual."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {sig: signal.getsignal(sig) for sig in (signal.SIGTERM, signal.SIGINT)}

    def stop(_: int, __: FrameType | None) -> None:
        restore()
        raise _Stop

    def restore() -> None:
        for sig, handler in before.items():
            signal.signal(sig, handler)

    for sig in before:
        signal.signal(sig, stop)
    try:
        yield
    finally:
        restore()


def _pause(seconds_: float) -> None:
    # The handler of a signal raises, which ends it.
    sleep(max(0.0, seconds_))
