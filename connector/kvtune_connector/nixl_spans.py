"""Spans of the turn's trace, made in the engine where vLLM traces at all (`--otlp-traces-endpoint`)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

READ = "kvtune.kv.read"
DECISION = "kvtune.kv.decision"


def emit(
    headers: Mapping[str, str] | None,
    name: str,
    begun_s: float,
    ended_s: float,
    attributes: Mapping[str, str | int | float],
) -> None:
    """A span under the request's own context. Times are `time.perf_counter()` seconds.

    `headers`: the request's trace headers; vLLM hands none to the engine unless tracing is on, and then this costs
    nothing.
    """
    if not headers:
        return
    from opentelemetry.trace import SpanKind
    from vllm.tracing import extract_trace_context, instrument_manual

    to_epoch = time.time() - time.perf_counter()
    found: dict[str, Any] = dict(attributes)
    instrument_manual(
        name,
        int((begun_s + to_epoch) * 1e9),
        int((ended_s + to_epoch) * 1e9),
        found,
        extract_trace_context(headers),
        SpanKind.INTERNAL,
    )
