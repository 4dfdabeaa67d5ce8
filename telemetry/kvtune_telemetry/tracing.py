"""Spans over OTLP, set up by the standard `OTEL_*` variables; off unless an endpoint or exporter is named.

One W3C trace a turn: `kvtune.turn` over `kvtune.prefill` and `kvtune.decode`, whose contexts travel to the engines, so
that vLLM's own `llm_request` spans and the connector's reads join it. Spans leave through a `BatchSpanProcessor` only:
with the collector absent or dead a turn pays nothing.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_PROPAGATOR = TraceContextTextMapPropagator()
_TRACE_HEADERS = ("traceparent", "tracestate")
_SHUTDOWN_S = 3.0


class TracingError(ValueError):
    """The `OTEL_*` settings cannot be followed."""


def tracing_wanted(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the `OTEL_*` variables ask for spans."""
    env = os.environ if environ is None else environ
    if env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporter = env.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    if exporter == "none":
        return False
    return bool(exporter or env.get("OTEL_EXPORTER_OTLP_ENDPOINT") or env.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"))


def provider_from_environment(service_name: str, environ: Mapping[str, str] | None = None) -> TracerProvider | None:
    """A tracer provider as the `OTEL_*` variables describe it, or None when they ask for none.

    Sampler, batch sizes, headers, time-outs and resource attributes are read by the OpenTelemetry SDK itself.
    Raises TracingError for an exporter or protocol that is not available.
    """
    env = os.environ if environ is None else environ
    if not tracing_wanted(env):
        return None
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporter = env.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower() or "otlp"
    if exporter != "otlp":
        raise TracingError(f"OTEL_TRACES_EXPORTER={exporter!r}: only 'otlp' and 'none' are supported")
    resource = Resource.create({} if env.get("OTEL_SERVICE_NAME") else {"service.name": service_name})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(_otlp_exporter(env)))
    # The exporter logs every failed batch with a traceback; a dead collector must not flood the router's log.
    logging.getLogger("opentelemetry.exporter.otlp.proto.http").setLevel(logging.CRITICAL)
    logging.getLogger("opentelemetry.sdk.trace.export").setLevel(logging.CRITICAL)
    logging.getLogger("opentelemetry.sdk._shared_internal").setLevel(logging.CRITICAL)
    return provider


def _otlp_exporter(env: Mapping[str, str]) -> Any:
    protocol = (
        env.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or env.get("OTEL_EXPORTER_OTLP_PROTOCOL") or "http/protobuf"
    )
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter()
    if protocol == "grpc":
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (  # type: ignore[import-not-found,unused-ignore]
                OTLPSpanExporter as GrpcSpanExporter,
            )
        except ImportError:
            raise TracingError(
                "OTEL_EXPORTER_OTLP_PROTOCOL=grpc needs the package opentelemetry-exporter-otlp-proto-grpc; "
                "install it, or use http/protobuf"
            ) from None
        return GrpcSpanExporter()
    raise TracingError(f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol!r}: use 'http/protobuf' or 'grpc'")


class TurnTrace:
    """The spans of one turn. Created at its start because its context travels to the engines; ended by the recorder."""

    __slots__ = ("_incoming", "_legs", "_span", "_tracer", "trace_id")

    def __init__(self, tracer: Tracer | None, incoming: Mapping[str, str]) -> None:
        self._tracer = tracer
        self._incoming = {name: incoming[name] for name in _TRACE_HEADERS if name in incoming}
        self._legs: list[Span] = []
        self._span: Span | None = None
        parent = _PROPAGATOR.extract(self._incoming) if self._incoming else Context()
        if tracer is not None:
            self._span = tracer.start_span("kvtune.turn", context=parent, kind=SpanKind.SERVER)
            context = self._span.get_span_context()
        else:
            context = trace.get_current_span(parent).get_span_context()
        self.trace_id: str | None = trace.format_trace_id(context.trace_id) if context.is_valid else None

    @property
    def sampled_trace_id(self) -> str | None:
        """The trace id if the trace is recorded, else None: an exemplar must lead somewhere."""
        return self.trace_id if self._span is not None and self._span.is_recording() else None

    def leg(self, name: str, attributes: Mapping[str, str | int | float]) -> Leg:
        """Start a child span for one request to an engine."""
        if self._span is None or self._tracer is None:
            return Leg(None, self._incoming)
        span = self._tracer.start_span(
            name,
            context=trace.set_span_in_context(self._span, Context()),
            kind=SpanKind.CLIENT,
            attributes=dict(attributes),
        )
        self._legs.append(span)
        headers: dict[str, str] = {}
        _PROPAGATOR.inject(headers, trace.set_span_in_context(span, Context()))
        return Leg(span, headers)

    def event(self, name: str, attributes: Mapping[str, str | int | float] | None = None) -> None:
        """Note something on the turn's span."""
        if self._span is not None:
            self._span.add_event(name, attributes=dict(attributes or {}))

    def end(self, attributes: Mapping[str, str | int | float | None], error: str | None) -> None:
        """End the turn's span (and any leg still open) with its final attributes."""
        for span in self._legs:
            # The SDK logs a warning for a span that is ended twice.
            if span.is_recording():
                span.end()
        if self._span is None:
            return
        if self._span.is_recording():
            self._span.set_attributes({key: value for key, value in attributes.items() if value is not None})
            if error is not None:
                self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()


class Leg:
    """One request to one engine: the headers that carry its context, and its span if there is one."""

    __slots__ = ("_span", "headers")

    def __init__(self, span: Span | None, headers: Mapping[str, str]) -> None:
        self._span = span
        self.headers: Mapping[str, str] = headers

    def end(self, attributes: Mapping[str, str | int | float] | None = None, error: str | None = None) -> None:
        """End the span; ending it again changes nothing."""
        if self._span is None or not self._span.is_recording():
            return
        if attributes:
            self._span.set_attributes(dict(attributes))
        if error is not None:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()


class Tracing:
    """Starts turn traces; with no provider it passes the client's trace context through unchanged."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("kvtune") if provider is not None else None

    @property
    def enabled(self) -> bool:
        """Whether spans are made."""
        return self._tracer is not None

    def start_turn(self, headers: Mapping[str, str]) -> TurnTrace:
        """Begin a turn's trace under the client's, if `headers` (lower-case or case-insensitive names) carry one."""
        return TurnTrace(self._tracer, headers)

    def shutdown(self) -> None:
        """Send what is batched, for at most a few seconds: a dead collector must not hold up a stop."""
        if self._provider is None:
            return
        provider = self._provider
        worker = threading.Thread(target=provider.shutdown, name="otel-shutdown", daemon=True)
        worker.start()
        worker.join(_SHUTDOWN_S)
