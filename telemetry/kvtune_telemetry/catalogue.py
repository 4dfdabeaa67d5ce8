"""Every series kvtune exports, declared once: name, type, unit, labels, buckets, help, emitter.

Dashboards, rules, documents and `kvtune suggest` may use only what is declared here. Labels have closed value sets, or
are bounded by the deployment (`engine`, `model_name`); conversation ids, request ids and prompts are never labels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from typing import Any, Literal

from kvtune_telemetry import buckets
from kvtune_telemetry.vocabulary import (
    Decision,
    Direction,
    End,
    Missed,
    NoReference,
    Outcome,
    Path,
    Phase,
    Reason,
    ReferenceEnd,
    Role,
)

Kind = Literal["counter", "gauge", "histogram", "weighted_histogram", "info"]
Emitter = Literal["router", "connector", "suggest"]

CONNECTOR_LABELS = ("model_name", "engine", "role")
"""Every series of the connector carries these, the first two as vLLM's own do."""


@dataclass(frozen=True, slots=True)
class Label:
    """A label and the values it can take; `None` means bounded by the deployment (configured engines)."""

    name: str
    values: tuple[str, ...] | None = None
    words: type[StrEnum] | None = None
    """The set the values are of, which says what each means; None where they say it themselves."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One declared metric family. `name` is the exposed name (`_total` included for counters)."""

    name: str
    kind: Kind
    unit: str
    help: str
    emitter: Emitter
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] | None = None
    combinations: tuple[tuple[str, ...], ...] | None = None
    """The label value tuples that can occur; `None` means all of the product."""

    def initial(self) -> Iterator[tuple[str, ...]]:
        """Label value tuples to expose from the start, so that a first increment is seen by `increase()`."""
        if any(label.values is None for label in self.labels):
            return
        if self.combinations is not None:
            yield from self.combinations
            return
        yield from product(*(label.values or () for label in self.labels))

    def label_names(self) -> tuple[str, ...]:
        """All label names as exposed, the emitter's constant ones first."""
        own = tuple(label.name for label in self.labels)
        return (CONNECTOR_LABELS if self.emitter == "connector" else ()) + own

    def sample_names(self) -> tuple[str, ...]:
        """The sample names the family exposes, without `_created`."""
        if self.kind in ("histogram", "weighted_histogram"):
            return tuple(self.name + suffix for suffix in ("_bucket", "_count", "_sum"))
        return (self.name,)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for `kvtune metrics --format json`."""
        return {
            "name": self.name,
            "type": "histogram" if self.kind == "weighted_histogram" else "gauge" if self.kind == "info" else self.kind,
            "unit": self.unit,
            "labels": {
                **{name: None for name in (CONNECTOR_LABELS if self.emitter == "connector" else ())},
                **{label.name: list(label.values) if label.values else None for label in self.labels},
            },
            "buckets": list(self.buckets) if self.buckets else None,
            "emitter": self.emitter,
            "help": self.help,
        }


def _of(name: str, enum: type[StrEnum]) -> Label:
    return Label(name, tuple(member.value for member in enum), enum)


FIRST_TURN_OUTCOMES = (Outcome.FIRST, Outcome.NO_IDENTITY, Outcome.DISABLED, Outcome.ERROR)
"""Outcomes a turn without a known earlier turn can have."""

TURN_OUTCOMES: tuple[tuple[str, str], ...] = (
    *(("first", o.value) for o in FIRST_TURN_OUTCOMES),
    *(("followup", o.value) for o in Outcome if o not in (Outcome.FIRST, Outcome.NO_IDENTITY)),
)
"""(turn, outcome) pairs that can occur."""

DECISION_REASONS: tuple[tuple[str, str], ...] = (
    (Decision.LOCAL_HIT.value, Reason.NONE.value),
    (Decision.FETCH.value, Reason.NONE.value),
    (Decision.FETCH.value, Reason.REWRITTEN.value),
    (Decision.FETCH.value, Reason.EXPLORED.value),
    *((Decision.RECOMPUTE.value, reason.value) for reason in Reason),
)
"""(decision, reason) pairs that can occur; a fetch is `rewritten` when it was cut to the verified prefix, and
`explored` when the threshold spoke against it."""

_OUTCOME = _of("outcome", Outcome)
_TURN = Label("turn", ("first", "followup"))
_DECISION = (_of("decision", Decision), _of("reason", Reason))
_DIRECTION = _of("direction", Direction)
_SIZE = Label("size", buckets.size_labels(buckets.SIZE_EDGES))
_COARSE = Label("size", buckets.size_labels(buckets.COARSE_SIZE_EDGES))
_END = _of("end", End)
_PATH = _of("path", Path)
_ENGINE = Label("engine")
_ROLE = _of("role", Role)
_ADVISED = Label("setting", ("decoder_kv_blocks_ttl", "kv_recompute_threshold"))
_STATUS = Label("status", ("change", "keep", "off", "insufficient", "unidentifiable"))


def _router() -> Iterator[Metric]:
    yield Metric(
        "kvtune_turns_total", "counter", "turns",
        "Turns answered or failed, by what became of the reference to their history; each turn once.",
        "router", (_OUTCOME,),
    )  # fmt: skip
    yield Metric(
        "kvtune_turn_ttft_seconds", "histogram", "seconds",
        "Time from a turn's last request byte to the first byte of the answer sent to the client.",
        "router", (_TURN, _OUTCOME), buckets.TTFT_SECONDS, TURN_OUTCOMES,
    )  # fmt: skip
    yield Metric(
        "kvtune_turn_duration_seconds", "histogram", "seconds",
        "Time from a turn's last request byte to the end of its answer.",
        "router", (_TURN,), buckets.DURATION_SECONDS,
    )  # fmt: skip
    yield Metric(
        "kvtune_turn_phase_seconds", "histogram", "seconds",
        "Parts of the time to first token as the router sees them: route, prefill leg, hand-off, first token.",
        "router", (_of("phase", Phase),), buckets.PHASE_SECONDS,
    )  # fmt: skip
    yield Metric(
        "kvtune_turn_gap_seconds", "histogram", "seconds",
        "Pause from the end of an answer to the arrival of the conversation's next turn, for pauses that ended.",
        "router", (), buckets.GAP_SECONDS,
    )  # fmt: skip
    yield Metric(
        "kvtune_turn_gap_tokens", "weighted_histogram", "seconds",
        "The same pauses, each weighted by the tokens D holds for the conversation; the sum is token-seconds.",
        "router", (), buckets.GAP_SECONDS,
    )  # fmt: skip
    yield Metric(
        "kvtune_turn_gap_tokens_squared", "weighted_histogram", "seconds",
        "The same pauses, each weighted by the square of the tokens held: the variance of retained KV.",
        "router", (), buckets.GAP_SECONDS,
    )  # fmt: skip
    yield Metric(
        "kvtune_turn_ends_total", "counter", "turns",
        "Answered turns whose conversation could return: the exposure of the gap histogram.", "router",
    )  # fmt: skip
    yield Metric(
        "kvtune_turn_end_tokens_total", "counter", "tokens",
        "Tokens D held at the end of those turns.", "router",
    )  # fmt: skip
    yield Metric(
        "kvtune_turn_end_tokens_squared_total", "counter", "tokens^2",
        "Sum of the squares of those tokens.", "router",
    )  # fmt: skip
    yield Metric(
        "kvtune_turns_given_up_total", "counter", "turns",
        "Turns whose conversation had not returned when the router forgot it (right-censored gaps).", "router",
    )  # fmt: skip
    yield Metric(
        "kvtune_conversations_total", "counter", "conversations",
        "Conversations seen for the first time.", "router",
    )  # fmt: skip
    yield Metric(
        "kvtune_conversations_remembered", "gauge", "conversations",
        "Conversations the router remembers now.", "router",
    )  # fmt: skip
    yield Metric(
        "kvtune_references", "gauge", "references",
        "Unused references the router holds now.", "router",
    )  # fmt: skip
    yield Metric(
        "kvtune_references_received_total", "counter", "references",
        "References to retained KV lifted out of D's answers.", "router",
    )  # fmt: skip
    yield Metric(
        "kvtune_references_missed_total", "counter", "turns",
        "Turns of identified conversations that brought no reference though reuse was on for them, by why.",
        "router", (_of("reason", NoReference),),
    )  # fmt: skip
    yield Metric(
        "kvtune_references_ended_total", "counter", "references",
        "References that left the router, by how; received = ended + held.",
        "router", (_of("end", ReferenceEnd),),
    )  # fmt: skip
    yield Metric(
        "kvtune_reference_age_seconds", "histogram", "seconds",
        "Age of a reference when the next turn came for it, by the turn's outcome.",
        "router", (_OUTCOME,), buckets.AGE_SECONDS,
        tuple((o.value,) for o in (Outcome.HIT, Outcome.EXPIRED, Outcome.REWRITTEN, Outcome.ENGINE_GONE)),
    )  # fmt: skip
    yield Metric(
        "kvtune_references_put_back_total", "counter", "references",
        "References leased to a turn whose prefill never read them, and kept for the next.", "router",
    )  # fmt: skip
    yield Metric(
        "kvtune_forged_parameters_total", "counter", "requests",
        "Requests whose client sent kv_transfer_params; they were dropped.", "router",
    )  # fmt: skip
    yield Metric(
        "kvtune_http_responses_total", "counter", "responses",
        "Answers to clients by status class; 499 is a client that left first.",
        "router",
        (
            Label("endpoint", ("chat", "completions", "models", "other")),
            Label("code", ("2xx", "4xx", "499", "5xx")),
        ),
    )  # fmt: skip
    yield Metric(
        "kvtune_turns_in_flight", "gauge", "turns", "Turns being served now.", "router",
    )  # fmt: skip
    yield Metric(
        "kvtune_turn_retries_total", "counter", "retries",
        "Legs tried again: without the reference, on another prefill, on another decode, through decode alone, "
        "or a broken stream carried on from another decode.",
        "router", (Label("kind", ("without_reference", "other_prefill", "other_decode", "decode_alone", "resumed")),),
    )  # fmt: skip
    yield Metric(
        "kvtune_engine_up", "gauge", "1", "1 while the engine answers, by configured address.",
        "router", (_ENGINE, _ROLE),
    )  # fmt: skip
    yield Metric(
        "kvtune_engine_requests_total", "counter", "requests",
        "Legs sent to an engine, by result.",
        "router", (_ENGINE, _ROLE, Label("result", ("ok", "refused", "failed", "cancelled"))),
    )  # fmt: skip
    yield Metric(
        "kvtune_engine_restarts_total", "counter", "restarts",
        "Times an engine came back as another incarnation; what its predecessor held is gone.",
        "router", (_ENGINE, _ROLE),
    )  # fmt: skip
    yield Metric(
        "kvtune_router_setting", "gauge", "1",
        "Settings in force: default_ttl_seconds (assumed where D does not say), margin_seconds (kept before expiry, "
        "hand-over included), "
        "holdout_ratio, explore_ratio, retain_seconds (asked of D for each turn; 0: what D is set to), "
        "accept_unverified (1: references that nothing proves are handed over).",
        "router",
        (
            Label(
                "setting",
                (
                    "default_ttl_seconds",
                    "margin_seconds",
                    "holdout_ratio",
                    "explore_ratio",
                    "retain_seconds",
                    "accept_unverified",
                ),
            ),
        ),
    )  # fmt: skip
    yield Metric(
        "kvtune_router_build_info", "info", "1", "Version of the router; always 1.", "router", (Label("version"),),
    )  # fmt: skip


def _connector() -> Iterator[Metric]:
    yield Metric(
        "kvtune_decisions_total", "counter", "requests",
        "What P's scheduler did about a prompt's history, and why; each prefill once.",
        "connector", _DECISION, None, DECISION_REASONS,
    )  # fmt: skip
    yield Metric(
        "kvtune_decision_tokens_total", "counter", "tokens",
        "Tokens of the history each decision was about: fetched, held locally, or available on D but computed again.",
        "connector", _DECISION, None, DECISION_REASONS,
    )  # fmt: skip
    yield Metric(
        "kvtune_prompt_tokens_total", "counter", "tokens",
        "Prompt tokens by where their KV is to come from, as prefill decides; what is aborted after that counts whole.",
        "connector", (Label("source", ("computed", "local_hit", "fetched")),),
    )  # fmt: skip
    yield Metric(
        "kvtune_path_observations_total", "counter", "requests",
        "Costs observed: a fetch timed from admission to arrival, a prefill computation by its own time.",
        "connector", (_PATH, _SIZE),
    )  # fmt: skip
    yield Metric(
        "kvtune_path_tokens_total", "counter", "tokens",
        "Sum of tokens (n) over those observations.", "connector", (_PATH, _SIZE),
    )  # fmt: skip
    yield Metric(
        "kvtune_path_tokens_squared_total", "counter", "tokens^2",
        "Sum of n squared.", "connector", (_PATH, _SIZE),
    )  # fmt: skip
    yield Metric(
        "kvtune_path_seconds_total", "counter", "seconds",
        "Sum of seconds (s).", "connector", (_PATH, _SIZE),
    )  # fmt: skip
    yield Metric(
        "kvtune_path_seconds_squared_total", "counter", "seconds^2",
        "Sum of s squared.", "connector", (_PATH, _SIZE),
    )  # fmt: skip
    yield Metric(
        "kvtune_path_token_seconds_total", "counter", "token seconds",
        "Sum of n times s; with the other sums a regression from counters alone.", "connector", (_PATH, _SIZE),
    )  # fmt: skip
    yield Metric(
        "kvtune_kv_reads_total", "counter", "reads",
        "KV reads that succeeded, booked by the reader; one request is one read whatever the tensor parallel size.",
        "connector", (_DIRECTION, _SIZE),
    )  # fmt: skip
    yield Metric(
        "kvtune_kv_read_seconds", "histogram", "seconds",
        "Transfer time of those reads.", "connector", (_DIRECTION, _COARSE), buckets.READ_SECONDS,
    )  # fmt: skip
    yield Metric(
        "kvtune_kv_read_bytes_total", "counter", "bytes",
        "Bytes of those reads, summed over ranks.", "connector", (_DIRECTION, _SIZE),
    )  # fmt: skip
    yield Metric(
        "kvtune_kv_read_tokens_total", "counter", "tokens",
        "Tokens of those reads.", "connector", (_DIRECTION, _SIZE),
    )  # fmt: skip
    yield Metric(
        "kvtune_kv_reads_failed_total", "counter", "reads",
        "KV reads that failed.", "connector", (_DIRECTION,),
    )  # fmt: skip
    yield Metric(
        "kvtune_kv_reads_declined_total", "counter", "reads",
        "Reads not started because the retention had run out, or would before the read was safe.", "connector",
    )  # fmt: skip
    yield Metric(
        "kvtune_kv_late_notifications_total", "counter", "notifications",
        "Readers that reported a read of KV already freed: what they read may have been another request's.",
        "connector",
    )  # fmt: skip
    yield Metric(
        "kvtune_kv_wait_seconds", "histogram", "seconds",
        "Time a request waited for remote KV, apart from queueing for compute.",
        "connector", (_DIRECTION,), buckets.READ_SECONDS,
    )  # fmt: skip
    yield Metric(
        "kvtune_retentions_total", "counter", "requests",
        "Finished requests whose KV D retained.", "connector",
    )  # fmt: skip
    yield Metric(
        "kvtune_retentions_missed_total", "counter", "requests",
        "Finished requests of disaggregated serving whose KV D did not retain, by why.",
        "connector", (_of("reason", Missed),),
    )  # fmt: skip
    yield Metric(
        "kvtune_retention_tokens_total", "counter", "tokens",
        "Tokens retained, counted when the retention starts.", "connector",
    )  # fmt: skip
    yield Metric(
        "kvtune_retentions_ended_total", "counter", "requests",
        "Retentions that ended, by how; started = ended + held.", "connector", (_END,),
    )  # fmt: skip
    yield Metric(
        "kvtune_retained_token_seconds_total", "counter", "token seconds",
        "Tokens times seconds held, booked when the retention ends: the memory a TTL costs, useful (read) or not.",
        "connector", (_END,),
    )  # fmt: skip
    yield Metric(
        "kvtune_retention_age_seconds", "histogram", "seconds",
        "Age of a retention at its end.", "connector", (_END,), buckets.AGE_SECONDS,
    )  # fmt: skip
    yield Metric(
        "kvtune_retained_requests", "gauge", "requests", "Requests whose KV D retains now.", "connector",
    )  # fmt: skip
    yield Metric(
        "kvtune_retained_tokens", "gauge", "tokens", "Tokens D retains now.", "connector",
    )  # fmt: skip
    yield Metric(
        "kvtune_retained_blocks", "gauge", "blocks", "KV blocks D retains now.", "connector",
    )  # fmt: skip
    yield Metric(
        "kvtune_connector_setting", "gauge", "1",
        "Settings in force: decoder_kv_blocks_ttl (s), kv_recompute_threshold (tokens), "
        "expiry_margin_seconds (kept by the reader), bidirectional_kv_xfer (0 or 1), kv_pool_tokens, "
        "max_retain_seconds (the longest retention a router may ask for), "
        "require_fingerprint (1: references that nothing proves are refused).",
        "connector",
        (
            Label(
                "setting",
                (
                    "decoder_kv_blocks_ttl",
                    "kv_recompute_threshold",
                    "expiry_margin_seconds",
                    "bidirectional_kv_xfer",
                    "kv_pool_tokens",
                    "max_retain_seconds",
                    "require_fingerprint",
                ),
            ),
        ),
    )  # fmt: skip
    yield Metric(
        "kvtune_connector_build_info", "info", "1", "Version of the connector; always 1.", "connector",
        (Label("version"),),
    )  # fmt: skip


def _suggest() -> Iterator[Metric]:
    yield Metric(
        "kvtune_suggest_recommended", "gauge", "1",
        "Value advised: decoder_kv_blocks_ttl (s), kv_recompute_threshold (tokens). Absent where no value is advised.",
        "suggest", (_ADVISED,),
    )  # fmt: skip
    yield Metric(
        "kvtune_suggest_current", "gauge", "1",
        "Value in force when the advice was made. Absent where it could not be read.", "suggest", (_ADVISED,),
    )  # fmt: skip
    yield Metric(
        "kvtune_suggest_interval_low", "gauge", "1",
        "Lower end of the interval around the advised value. Absent where there is none.", "suggest", (_ADVISED,),
    )  # fmt: skip
    yield Metric(
        "kvtune_suggest_interval_high", "gauge", "1",
        "Upper end of the interval around the advised value. Absent where there is none.", "suggest", (_ADVISED,),
    )  # fmt: skip
    yield Metric(
        "kvtune_suggest_status", "gauge", "1",
        "1 for the status of the advice, 0 for the others: change, keep, off (do not retain), insufficient (too little "
        "to read), unidentifiable (more of the same would not tell). All 0 where the last attempt failed.",
        "suggest", (_ADVISED, _STATUS),
    )  # fmt: skip
    yield Metric(
        "kvtune_suggest_timestamp_seconds", "gauge", "seconds",
        "Unix time of the last attempt to advise, failed ones included.", "suggest",
    )  # fmt: skip
    yield Metric(
        "kvtune_suggest_last_success_timestamp_seconds", "gauge", "seconds",
        "Unix time of the last attempt that did not fail. Absent where this process had none.", "suggest",
    )  # fmt: skip
    yield Metric(
        "kvtune_suggest_up", "gauge", "1",
        "1 where the last attempt could read its source, too little data included; 0 where it failed.", "suggest",
    )  # fmt: skip


CATALOGUE: tuple[Metric, ...] = (*_router(), *_connector(), *_suggest())
"""Every metric, in the order the documents print it."""

BY_NAME: dict[str, Metric] = {metric.name: metric for metric in CATALOGUE}


def emitted_by(emitter: Emitter) -> tuple[Metric, ...]:
    """The metrics one emitter exports."""
    return tuple(metric for metric in CATALOGUE if metric.emitter == emitter)
