"""The recorders: the only code that knows Prometheus, spans and the log. One event is booked here, once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from loguru import logger
from prometheus_client import CollectorRegistry

from kvtune_telemetry import events
from kvtune_telemetry.buckets import COARSE_SIZE_EDGES, size_label
from kvtune_telemetry.instruments import Families, Instruments, without_created
from kvtune_telemetry.vocabulary import Decision, Path, Role

_FAILED_STATUS = 500


def status_class(status: int) -> str:
    """The `code` label of an HTTP status; 499 (client left) has its own."""
    if status == 499:
        return "499"
    return "2xx" if status < 400 else "4xx" if status < _FAILED_STATUS else "5xx"


class RouterRecorder:
    """Books router events on a registry, a turn's spans, and the log (one line a turn)."""

    def __init__(self, registry: CollectorRegistry, *, version: str) -> None:
        without_created()
        self._on = instruments = Instruments(Families("router", registry))
        instruments.gauge("kvtune_router_build_info", version).set(1)
        self._book: dict[type, Callable[[Any], None]] = {
            events.TurnEnded: self._turn_ended,
            events.TurnReturned: self._turn_returned,
            events.TurnCouldReturn: self._turn_could_return,
            events.ConversationSeen: self._conversation_seen,
            events.ConversationGivenUp: self._conversation_given_up,
            events.ReferenceReceived: self._reference_received,
            events.ReferenceMissed: self._reference_missed,
            events.ReferenceEnded: self._reference_ended,
            events.ReferencePutBack: self._reference_put_back,
            events.ForgedParameters: self._forged,
            events.TurnRetried: self._retried,
            events.HttpAnswered: self._http,
            events.LegEnded: self._leg,
            events.EngineState: self._engine_state,
            events.EngineProvesNothing: self._engine_proves_nothing,
            events.EngineRestarted: self._engine_restarted,
        }

    def record(self, event: events.RouterEvent) -> None:
        """Book one event."""
        self._book[type(event)](event)

    def set_setting(self, setting: str, value: float) -> None:
        """Expose a setting in force; the catalogue lists which."""
        if not self._on.known("kvtune_router_setting", "setting", setting):
            raise ValueError(f"setting {setting!r} is not in the catalogue")
        self._on.gauge("kvtune_router_setting", setting).set(value)

    def turn_started(self) -> None:
        """A turn is being served."""
        self._on.gauge("kvtune_turns_in_flight").inc()

    def _turn_ended(self, event: events.TurnEnded) -> None:
        on, outcome = self._on, event.outcome.value
        turn = "followup" if event.followup else "first"
        trace = event.trace
        sampled = trace.sampled_trace_id if trace is not None else None
        exemplar = {"trace_id": sampled} if sampled else None
        on.gauge("kvtune_turns_in_flight").dec()
        on.counter("kvtune_turns_total", outcome).inc()
        if event.ttft_s is not None:
            on.histogram("kvtune_turn_ttft_seconds", turn, outcome).observe(event.ttft_s, exemplar)
        on.histogram("kvtune_turn_duration_seconds", turn).observe(event.duration_s, exemplar)
        for phase, seconds in event.phases.items():
            on.histogram("kvtune_turn_phase_seconds", phase.value).observe(seconds)
        if event.reference_age_s is not None and on.declared("kvtune_reference_age_seconds", outcome):
            on.histogram("kvtune_reference_age_seconds", outcome).observe(event.reference_age_s)
        if trace is not None:
            trace.end(_span_attributes(event), event.error)
        _log_turn(event, trace.trace_id if trace is not None else None)

    def _turn_returned(self, event: events.TurnReturned) -> None:
        self._on.histogram("kvtune_turn_gap_seconds").observe(event.gap_s)
        self._on.weighted("kvtune_turn_gap_tokens").observe(event.gap_s, event.tokens)
        self._on.weighted("kvtune_turn_gap_tokens_squared").observe(event.gap_s, float(event.tokens) ** 2)

    def _turn_could_return(self, event: events.TurnCouldReturn) -> None:
        self._on.counter("kvtune_turn_ends_total").inc()
        self._on.counter("kvtune_turn_end_tokens_total").inc(event.tokens)
        self._on.counter("kvtune_turn_end_tokens_squared_total").inc(float(event.tokens) ** 2)

    def _conversation_seen(self, _: events.ConversationSeen) -> None:
        self._on.counter("kvtune_conversations_total").inc()
        self._on.gauge("kvtune_conversations_remembered").inc()

    def _conversation_given_up(self, event: events.ConversationGivenUp) -> None:
        self._on.gauge("kvtune_conversations_remembered").dec()
        if event.ended_turn:
            self._on.counter("kvtune_turns_given_up_total").inc()

    def _reference_received(self, _: events.ReferenceReceived) -> None:
        self._on.counter("kvtune_references_received_total").inc()
        self._on.gauge("kvtune_references").inc()

    def _reference_missed(self, event: events.ReferenceMissed) -> None:
        self._on.counter("kvtune_references_missed_total", event.reason.value).inc()

    def _reference_ended(self, event: events.ReferenceEnded) -> None:
        self._on.counter("kvtune_references_ended_total", event.end.value).inc()
        self._on.gauge("kvtune_references").dec()

    def _reference_put_back(self, _: events.ReferencePutBack) -> None:
        self._on.counter("kvtune_references_put_back_total").inc()

    def _forged(self, _: events.ForgedParameters) -> None:
        self._on.counter("kvtune_forged_parameters_total").inc()
        logger.warning("a client sent kv_transfer_params; dropped")

    def _retried(self, event: events.TurnRetried) -> None:
        self._on.counter("kvtune_turn_retries_total", event.kind).inc()

    def _http(self, event: events.HttpAnswered) -> None:
        self._on.counter("kvtune_http_responses_total", event.endpoint, status_class(event.status)).inc()

    def _leg(self, event: events.LegEnded) -> None:
        self._on.counter("kvtune_engine_requests_total", event.engine, event.role.value, event.result).inc()

    def _engine_state(self, event: events.EngineState) -> None:
        self._on.gauge("kvtune_engine_up", event.engine, event.role.value).set(1 if event.up else 0)
        for result in ("ok", "refused", "failed", "cancelled"):
            self._on.counter("kvtune_engine_requests_total", event.engine, event.role.value, result)
        self._on.counter("kvtune_engine_restarts_total", event.engine, event.role.value)
        if event.up:
            logger.info("{} engine {} is up", event.role.value, event.engine)
        else:
            logger.warning("{} engine {} is down ({})", event.role.value, event.engine, event.why)

    def _engine_proves_nothing(self, event: events.EngineProvesNothing) -> None:
        logger.warning(
            "prefill engine {} cannot prove what it reads (no kvtune connector): no reference is handed to it, and "
            "turns that could have reused KV are booked as unverified",
            event.engine,
        )

    def _engine_restarted(self, event: events.EngineRestarted) -> None:
        self._on.counter("kvtune_engine_restarts_total", event.engine, event.role.value).inc()
        logger.warning("{} engine {} came back as another incarnation", event.role.value, event.engine)


def _span_attributes(event: events.TurnEnded) -> dict[str, str | int | float | None]:
    """GenAI attribute names where they exist, `kvtune.*` otherwise."""
    return {
        "gen_ai.operation.name": "chat" if event.endpoint == "chat" else "text_completion",
        "gen_ai.request.model": event.model,
        "gen_ai.conversation.id": event.conversation,
        "gen_ai.usage.input_tokens": event.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": event.reused_tokens,
        "http.response.status_code": event.status,
        "kvtune.outcome": event.outcome.value,
        "kvtune.turn": "followup" if event.followup else "first",
        "kvtune.decision": event.decision.value if event.decision else None,
        "kvtune.reason": event.reason.value if event.reason else None,
        "kvtune.explore.propensity": event.explored,
        "kvtune.reference.age_s": event.reference_age_s,
        "kvtune.ttft_s": event.ttft_s,
        "kvtune.prefill.engine": event.prefill,
        "kvtune.decode.engine": event.decode,
        **{f"kvtune.phase.{phase.value}_s": seconds for phase, seconds in event.phases.items()},
    }


def _log_turn(event: events.TurnEnded, trace_id: str | None) -> None:
    log = logger.bind(
        event="turn",
        trace_id=trace_id,
        outcome=event.outcome.value,
        turn="followup" if event.followup else "first",
        endpoint=event.endpoint,
        status=event.status,
        conversation=event.conversation,
        prefill=event.prefill,
        decode=event.decode,
        decision=event.decision.value if event.decision else None,
        reason=event.reason.value if event.reason else None,
        explore_propensity=event.explored,
        prompt_tokens=event.prompt_tokens,
        reused_tokens=event.reused_tokens,
        ttft_s=event.ttft_s,
        duration_s=event.duration_s,
    )
    ttft = "-" if event.ttft_s is None else f"{event.ttft_s:.3f}s"
    if event.error is None:
        log.info("turn {} status={} ttft={}", event.outcome.value, event.status, ttft)
    else:
        log.bind(error=event.error).warning(
            "turn {} status={} ttft={}: {}", event.outcome.value, event.status, ttft, event.error
        )


class ConnectorRecorder:
    """Books connector events on a registry: an engine's in production, a simulated engine's otherwise."""

    def __init__(
        self,
        registry: CollectorRegistry | Families,
        *,
        model_name: str,
        engine: str,
        role: Role,
        version: str = "unknown",
    ) -> None:
        """`registry`: where to register, or families that several engines' recorders share."""
        families = registry if isinstance(registry, Families) else Families("connector", registry)
        self._on = instruments = Instruments(families, (model_name, engine, role.value))
        instruments.gauge("kvtune_connector_build_info", version).set(1)
        self._book: dict[type, Callable[[Any], None]] = {
            events.PrefillDecided: self._decided,
            events.PrefillComputed: self._computed,
            events.KvRead: self._read,
            events.KvReadFailed: self._read_failed,
            events.KvReadDeclined: self._read_declined,
            events.KvLateNotification: self._late_notification,
            events.RetentionStarted: self._retention_started,
            events.RetentionMissed: self._retention_missed,
            events.RetentionEnded: self._retention_ended,
        }

    def record(self, event: events.ConnectorEvent) -> None:
        """Book one event."""
        self._book[type(event)](event)

    def set_setting(self, setting: str, value: float) -> None:
        """Expose a setting in force; the catalogue lists which."""
        if not self._on.known("kvtune_connector_setting", "setting", setting):
            raise ValueError(f"setting {setting!r} is not in the catalogue")
        self._on.gauge("kvtune_connector_setting", setting).set(value)

    def _decided(self, event: events.PrefillDecided) -> None:
        on, labels = self._on, (event.decision.value, event.reason.value)
        about = {
            Decision.FETCH: event.fetched_tokens,
            Decision.LOCAL_HIT: event.local_tokens,
            Decision.RECOMPUTE: event.available_tokens,
        }[event.decision]
        on.counter("kvtune_decisions_total", *labels).inc()
        on.counter("kvtune_decision_tokens_total", *labels).inc(about)
        computed = event.prompt_tokens - event.local_tokens - event.fetched_tokens
        on.counter("kvtune_prompt_tokens_total", "local_hit").inc(event.local_tokens)
        on.counter("kvtune_prompt_tokens_total", "fetched").inc(event.fetched_tokens)
        on.counter("kvtune_prompt_tokens_total", "computed").inc(max(0, computed))

    def _path(self, path: Path, tokens: int, seconds: float) -> None:
        on, labels = self._on, (path.value, size_label(tokens))
        on.counter("kvtune_path_observations_total", *labels).inc()
        on.counter("kvtune_path_tokens_total", *labels).inc(tokens)
        on.counter("kvtune_path_tokens_squared_total", *labels).inc(float(tokens) ** 2)
        on.counter("kvtune_path_seconds_total", *labels).inc(seconds)
        on.counter("kvtune_path_seconds_squared_total", *labels).inc(seconds**2)
        on.counter("kvtune_path_token_seconds_total", *labels).inc(tokens * seconds)

    def _computed(self, event: events.PrefillComputed) -> None:
        self._path(Path.RECOMPUTE, event.tokens, event.seconds)

    def _read(self, event: events.KvRead) -> None:
        on, way = self._on, event.direction.value
        size = size_label(event.tokens)
        on.counter("kvtune_kv_reads_total", way, size).inc()
        on.counter("kvtune_kv_read_tokens_total", way, size).inc(event.tokens)
        on.counter("kvtune_kv_read_bytes_total", way, size).inc(event.size_bytes)
        coarse = size_label(event.tokens, COARSE_SIZE_EDGES)
        on.histogram("kvtune_kv_read_seconds", way, coarse).observe(event.seconds)
        on.histogram("kvtune_kv_wait_seconds", way).observe(event.wait_s)
        if way == "d2p":
            # The fetch path is what the request waited, not what the transfer timer says: the latter can be half of it.
            self._path(Path.FETCH, event.tokens, event.wait_s)

    def _read_failed(self, event: events.KvReadFailed) -> None:
        self._on.counter("kvtune_kv_reads_failed_total", event.direction.value).inc()

    def _read_declined(self, _: events.KvReadDeclined) -> None:
        self._on.counter("kvtune_kv_reads_declined_total").inc()

    def _late_notification(self, _: events.KvLateNotification) -> None:
        self._on.counter("kvtune_kv_late_notifications_total").inc()

    def _retention_started(self, event: events.RetentionStarted) -> None:
        on = self._on
        on.counter("kvtune_retentions_total").inc()
        on.counter("kvtune_retention_tokens_total").inc(event.tokens)
        on.gauge("kvtune_retained_requests").inc()
        on.gauge("kvtune_retained_tokens").inc(event.tokens)
        on.gauge("kvtune_retained_blocks").inc(event.blocks)

    def _retention_missed(self, event: events.RetentionMissed) -> None:
        self._on.counter("kvtune_retentions_missed_total", event.missed.value).inc()

    def _retention_ended(self, event: events.RetentionEnded) -> None:
        on, end = self._on, event.end.value
        on.counter("kvtune_retentions_ended_total", end).inc()
        on.counter("kvtune_retained_token_seconds_total", end).inc(event.tokens * event.age_s)
        on.histogram("kvtune_retention_age_seconds", end).observe(event.age_s)
        on.gauge("kvtune_retained_requests").dec()
        on.gauge("kvtune_retained_tokens").dec(event.tokens)
        on.gauge("kvtune_retained_blocks").dec(event.blocks)
