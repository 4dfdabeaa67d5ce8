"""Logging through loguru: a console line for people or one JSON object a line for collectors, trace id included."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any, TextIO

import orjson
from loguru import logger

if TYPE_CHECKING:
    from loguru import Message, Record

LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
FORMATS = ("console", "json")


def setup_logging(*, level: str = "INFO", fmt: str = "console", stream: TextIO | None = None) -> None:
    """Send all logs, the standard library's too, to `stream` (default: stderr) in one format.

    A full disk or closed pipe behind `stream` drops lines; it never fails a request. Raises ValueError for an unknown
    level or format.
    """
    level = level.upper()
    if level not in LEVELS:
        raise ValueError(f"log level {level!r} is not one of {', '.join(LEVELS)}")
    if fmt not in FORMATS:
        raise ValueError(f"log format {fmt!r} is not one of {', '.join(FORMATS)}")
    target = sys.stderr if stream is None else stream
    sink = _JsonSink(target) if fmt == "json" else _ConsoleSink(target)
    logger.remove()
    # `diagnose` would print the values of local variables, prompts among them.
    logger.add(
        sink, level=level, format=_console_format if fmt == "console" else "{message}",
        backtrace=False, diagnose=False, catch=True, colorize=False,
    )  # fmt: skip
    logging.basicConfig(handlers=[_Intercept()], level=logging.WARNING, force=True)


class _ConsoleSink:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __call__(self, message: Message) -> None:
        try:
            self._stream.write(message)
            self._stream.flush()
        except (OSError, ValueError):
            return


class _JsonSink:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __call__(self, message: Message) -> None:
        record = message.record
        line: dict[str, Any] = {
            "time": record["time"].isoformat(),
            "level": record["level"].name,
            "message": record["message"],
            "logger": record["name"],
            **{key: value for key, value in record["extra"].items() if value is not None},
        }
        if record["exception"] is not None:
            kind, value, _ = record["exception"]
            line["exception"] = f"{kind.__name__ if kind else ''}: {value}"
        try:
            self._stream.write(orjson.dumps(line, default=str).decode() + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            return


def _console_format(record: Record) -> str:
    trace_id = record["extra"].get("trace_id")
    trace = " [{extra[trace_id]}]" if trace_id else ""
    return "{time:YYYY-MM-DDTHH:mm:ss.SSSZ} {level: <7} {message}" + trace + "\n{exception}"


class _Intercept(logging.Handler):
    """Hands the standard library's records to loguru."""

    def emit(self, record: logging.LogRecord) -> None:
        level: str | int = record.levelname if record.levelname in LEVELS else record.levelno
        if record.name.startswith("aiohttp"):
            # Its messages quote the bytes it could not parse: headers with keys, prompts.
            kind = record.exc_info[0] if record.exc_info else None
            logger.log(level, "{}: {}", record.name, kind.__name__ if kind else "see the status of the answer")
            return
        logger.opt(exception=record.exc_info).log(level, "{}", record.getMessage())
