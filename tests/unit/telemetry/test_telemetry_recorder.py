from __future__ import annotations

import io

import orjson
import pytest
from loguru import logger
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from kvtune_telemetry import events
from kvtune_telemetry.exposition import render
from kvtune_telemetry.logs import setup_logging
from kvtune_telemetry.recorder import ConnectorRecorder, RouterRecorder
from kvtune_telemetry.tracing import Tracing, TracingError, provider_from_environment, tracing_wanted
from kvtune_telemetry.vocabulary import Decision, Direction, End, Outcome, Phase, Reason, Role


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)


@pytest.fixture
def router() -> tuple[RouterRecorder, CollectorRegistry]:
    registry = CollectorRegistry()
    return RouterRecorder(registry, version="1"), registry


def turn_ended(**more: object) -> events.TurnEnded:
    base = dict(outcome=Outcome.HIT, followup=True, endpoint="chat", status=200, duration_s=3.0, ttft_s=0.5)
    return events.TurnEnded(**{**base, **more})  # type: ignore[arg-type]


def test_a_turn_is_booked_once(router: tuple[RouterRecorder, CollectorRegistry]) -> None:
    recorder, registry = router
    recorder.turn_started()
    assert value(registry, "kvtune_turns_in_flight") == 1
    recorder.record(turn_ended(phases={Phase.PREFILL: 0.4}, reference_age_s=12.0))
    assert value(registry, "kvtune_turns_total", outcome="hit") == 1
    assert value(registry, "kvtune_turns_in_flight") == 0
    assert value(registry, "kvtune_turn_ttft_seconds_sum", turn="followup", outcome="hit") == 0.5
    assert value(registry, "kvtune_turn_duration_seconds_sum", turn="followup") == 3.0
    assert value(registry, "kvtune_turn_phase_seconds_sum", phase="prefill") == 0.4
    assert value(registry, "kvtune_reference_age_seconds_sum", outcome="hit") == 12.0


def test_a_turn_without_a_first_byte_has_no_ttft(router: tuple[RouterRecorder, CollectorRegistry]) -> None:
    recorder, registry = router
    recorder.record(turn_ended(outcome=Outcome.ERROR, ttft_s=None, status=503, error="no decode engine"))
    assert value(registry, "kvtune_turn_ttft_seconds_count", turn="followup", outcome="error") == 0
    assert value(registry, "kvtune_turns_total", outcome="error") == 1


def test_gaps_are_weighted_by_tokens_and_their_squares(router: tuple[RouterRecorder, CollectorRegistry]) -> None:
    recorder, registry = router
    recorder.record(events.TurnReturned(gap_s=7.0, tokens=100))
    recorder.record(events.TurnReturned(gap_s=700.0, tokens=50))
    assert value(registry, "kvtune_turn_gap_seconds_count") == 2
    assert value(registry, "kvtune_turn_gap_tokens_bucket", le="6.0") == 0
    assert value(registry, "kvtune_turn_gap_tokens_bucket", le="8.0") == 100
    assert value(registry, "kvtune_turn_gap_tokens_count") == 150
    assert value(registry, "kvtune_turn_gap_tokens_sum") == 7 * 100 + 700 * 50
    assert value(registry, "kvtune_turn_gap_tokens_squared_bucket", le="+Inf") == 100**2 + 50**2


@pytest.mark.parametrize(("status", "code"), [(200, "2xx"), (404, "4xx"), (499, "499"), (503, "5xx")])
def test_http_status_classes(router: tuple[RouterRecorder, CollectorRegistry], status: int, code: str) -> None:
    recorder, registry = router
    recorder.record(events.HttpAnswered("chat", status))
    assert value(registry, "kvtune_http_responses_total", endpoint="chat", code=code) == 1


def test_series_do_not_grow_with_conversations(router: tuple[RouterRecorder, CollectorRegistry]) -> None:
    recorder, registry = router
    recorder.record(turn_ended(conversation="c0", prefill="p:1", decode="d:1"))
    before = render(registry)[0].count(b"\n")
    for number in range(10_000):
        recorder.record(turn_ended(conversation=f"c{number}", model=f"m{number}"))
    assert render(registry)[0].count(b"\n") == before


LABELS = {"model_name": "m", "engine": "0", "role": "prefill"}


def test_what_is_held_locally_is_not_booked_as_computed_again() -> None:
    registry = CollectorRegistry()
    recorder = ConnectorRecorder(registry, model_name="m", engine="0", role=Role.PREFILL)
    recorder.record(events.PrefillDecided(Decision.RECOMPUTE, Reason.CONSUMED, 300, 256, 0, 0))
    recorder.record(events.PrefillDecided(Decision.RECOMPUTE, Reason.BELOW_THRESHOLD, 350, 256, 0, 49))
    recorder.record(events.PrefillDecided(Decision.LOCAL_HIT, Reason.NONE, 350, 320, 0, 300))
    got = lambda name, **more: value(registry, name, **LABELS, **more)  # noqa: E731
    tokens = "kvtune_decision_tokens_total"
    assert got(tokens, decision="recompute", reason="consumed") == 0
    assert got(tokens, decision="recompute", reason="below_threshold") == 49
    assert got(tokens, decision="local_hit", reason="none") == 320
    assert got("kvtune_prompt_tokens_total", source="local_hit") == 256 + 256 + 320


def test_connector_events() -> None:
    registry = CollectorRegistry()
    recorder = ConnectorRecorder(registry, model_name="m", engine="0", role=Role.PREFILL)
    recorder.record(events.PrefillDecided(Decision.FETCH, Reason.REWRITTEN, 1000, 64, 448, 448))
    recorder.record(events.PrefillComputed(488, 0.1))
    recorder.record(events.KvRead(Direction.D2P, 448, 10**6, 0.02, 0.05))
    recorder.record(events.KvRead(Direction.P2D, 1000, 10**6, 0.02, 0.02))
    recorder.record(events.RetentionStarted(1000, 63))
    recorder.record(events.RetentionStarted(10, 1))
    recorder.record(events.RetentionEnded(End.READ, 1000, 63, 20.0))
    got = lambda name, **more: value(registry, name, **LABELS, **more)  # noqa: E731
    assert got("kvtune_decisions_total", decision="fetch", reason="rewritten") == 1
    assert got("kvtune_decision_tokens_total", decision="fetch", reason="rewritten") == 448
    assert got("kvtune_prompt_tokens_total", source="computed") == 488
    assert got("kvtune_prompt_tokens_total", source="fetched") == 448
    assert got("kvtune_prompt_tokens_total", source="local_hit") == 64
    for name, want in {
        "observations": 1, "tokens": 448, "tokens_squared": 448**2, "seconds": 0.05, "seconds_squared": 0.05**2,
        "token_seconds": 448 * 0.05,
    }.items():  # fmt: skip
        assert got(f"kvtune_path_{name}_total", path="fetch", size="512") == pytest.approx(want)
    assert got("kvtune_path_seconds_total", path="recompute", size="512") == 0.1
    assert got("kvtune_path_observations_total", path="fetch", size="1024") == 0, "p2d reads are not the fetch path"
    assert got("kvtune_kv_reads_total", direction="p2d", size="1024") == 1
    assert got("kvtune_retained_tokens") == 10
    assert got("kvtune_retained_blocks") == 1
    assert got("kvtune_retained_token_seconds_total", end="read") == 20_000
    assert got("kvtune_retentions_ended_total", end="read") == 1


def test_spans_join_the_clients_trace_and_exemplars_lead_to_it() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace = Tracing(provider).start_turn({"traceparent": "00-0123456789abcdef0123456789abcdef-00f067aa0ba902b7-01"})
    leg = trace.leg("kvtune.prefill", {"server.address": "p:1"})
    assert leg.headers["traceparent"].split("-")[1] == "0123456789abcdef0123456789abcdef"
    leg.end({"kvtune.result": "ok"})
    registry = CollectorRegistry()
    RouterRecorder(registry, version="1").record(turn_ended(trace=trace, model="m", reused_tokens=7))
    spans = {span.name: span for span in exporter.get_finished_spans()}
    turn = spans["kvtune.turn"]
    assert f"{turn.context.trace_id:032x}" == "0123456789abcdef0123456789abcdef"
    assert spans["kvtune.prefill"].parent is not None and spans["kvtune.prefill"].parent.span_id == turn.context.span_id
    assert leg.headers["traceparent"].split("-")[2] == f"{spans['kvtune.prefill'].context.span_id:016x}"
    assert turn.attributes is not None
    assert turn.attributes["kvtune.outcome"] == "hit"
    assert turn.attributes["gen_ai.usage.cache_read.input_tokens"] == 7
    body, kind = render(registry, "application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    assert b'trace_id="0123456789abcdef0123456789abcdef"' in body
    assert b"trace_id" not in render(registry)[0]


def test_without_tracing_the_clients_context_passes_through() -> None:
    headers = {"traceparent": "00-0123456789abcdef0123456789abcdef-00f067aa0ba902b7-01", "tracestate": "a=b", "x": "y"}
    trace = Tracing().start_turn(headers)
    assert dict(trace.leg("kvtune.prefill", {}).headers) == {k: headers[k] for k in ("traceparent", "tracestate")}
    assert trace.trace_id == "0123456789abcdef0123456789abcdef"
    assert trace.sampled_trace_id is None


@pytest.mark.parametrize(
    ("env", "wanted"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:4318/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}, False),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_TRACES_EXPORTER": "otlp"}, False),
    ],
)
def test_the_standard_variables_switch_tracing(env: dict[str, str], wanted: bool) -> None:
    assert tracing_wanted(env) is wanted


def test_an_unknown_exporter_is_named() -> None:
    with pytest.raises(TracingError, match="OTEL_TRACES_EXPORTER='zipkin'"):
        provider_from_environment("kvtune", {"OTEL_TRACES_EXPORTER": "zipkin"})


def test_json_logs_hold_the_trace_and_no_nulls() -> None:
    stream = io.StringIO()
    setup_logging(fmt="json", stream=stream)
    try:
        recorder = RouterRecorder(CollectorRegistry(), version="1")
        trace = Tracing().start_turn({"traceparent": "00-0123456789abcdef0123456789abcdef-00f067aa0ba902b7-01"})
        recorder.record(turn_ended(trace=trace, conversation="ab12"))
    finally:
        logger.remove()
    line = orjson.loads(stream.getvalue())
    assert line["event"] == "turn" and line["outcome"] == "hit" and line["conversation"] == "ab12"
    assert line["trace_id"] == "0123456789abcdef0123456789abcdef"
    assert None not in line.values()


def test_a_broken_log_stream_never_fails_a_request() -> None:
    class Full(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError(28, "No space left on device")

    for fmt in ("console", "json"):
        setup_logging(fmt=fmt, stream=Full())
        try:
            RouterRecorder(CollectorRegistry(), version="1").record(turn_ended())
        finally:
            logger.remove()


@pytest.mark.parametrize("bad", [{"level": "LOUD"}, {"fmt": "xml"}])
def test_bad_log_settings_are_named(bad: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"LOUD|xml"):
        setup_logging(**bad)
