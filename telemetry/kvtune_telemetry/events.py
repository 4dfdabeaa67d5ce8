"""What happened, as values. Producers build one at one site and hand it to a recorder; they never know the sinks."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtune_telemetry.tracing import TurnTrace
from kvtune_telemetry.vocabulary import (
    Decision,
    Direction,
    End,
    Missed,
    NoReference,
    Outcome,
    Phase,
    Reason,
    ReferenceEnd,
    Role,
)

# --- router ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """A turn is over: answered, refused, failed or abandoned by its client. Times in seconds."""

    outcome: Outcome
    followup: bool
    endpoint: str
    """`chat` or `completions`."""
    status: int
    """HTTP status sent to the client; 499 where the client left before it was."""
    duration_s: float
    ttft_s: float | None = None
    """None when no answer byte was sent."""
    phases: dict[Phase, float] = field(default_factory=dict)
    streamed: bool = False
    model: str | None = None
    conversation: str | None = None
    """A keyed hash, never the client's own id."""
    prefill: str | None = None
    decode: str | None = None
    prompt_tokens: int | None = None
    reused_tokens: int | None = None
    decision: Decision | None = None
    reason: Reason | None = None
    explored: float | None = None
    """Propensity of the exploration this turn was part of; None: it was not."""
    reference_age_s: float | None = None
    error: str | None = None
    """Why the turn failed, in words without prompt text."""
    trace: TurnTrace | None = None


@dataclass(frozen=True, slots=True)
class TurnReturned:
    """A conversation's next turn arrived `gap_s` after the end of its last answer, for which D held `tokens`."""

    gap_s: float
    tokens: int


@dataclass(frozen=True, slots=True)
class TurnCouldReturn:
    """A turn of an identified conversation was answered; D held `tokens` at its end."""

    tokens: int


@dataclass(frozen=True, slots=True)
class ConversationSeen:
    """First turn of a conversation."""


@dataclass(frozen=True, slots=True)
class ConversationGivenUp:
    """The router forgot a conversation that had not returned."""

    ended_turn: bool
    """Whether it had an answered turn, i.e. whether a gap was censored."""


@dataclass(frozen=True, slots=True)
class ReferenceReceived:
    """A reference was lifted out of D's answer."""


@dataclass(frozen=True, slots=True)
class ReferenceMissed:
    """A turn that could have brought a reference brought none."""

    reason: NoReference


@dataclass(frozen=True, slots=True)
class ReferenceEnded:
    """A reference left the router."""

    end: ReferenceEnd


@dataclass(frozen=True, slots=True)
class ReferencePutBack:
    """A leased reference was not read and stays usable."""


@dataclass(frozen=True, slots=True)
class ForgedParameters:
    """A client sent `kv_transfer_params`; they were dropped."""


@dataclass(frozen=True, slots=True)
class TurnRetried:
    """A leg was tried again."""

    kind: str
    """One of the catalogue's `kvtune_turn_retries_total` kinds."""


@dataclass(frozen=True, slots=True)
class HttpAnswered:
    """An answer left for a client."""

    endpoint: str
    status: int


@dataclass(frozen=True, slots=True)
class LegEnded:
    """One request to one engine is over."""

    engine: str
    role: Role
    result: str
    """ok, refused (an HTTP error), failed (no or a broken answer), cancelled (client left)."""


@dataclass(frozen=True, slots=True)
class EngineState:
    """An engine became reachable or unreachable."""

    engine: str
    role: Role
    up: bool
    why: str = ""
    """What the probe met, when it is down."""


@dataclass(frozen=True, slots=True)
class EngineProvesNothing:
    """A prefill engine answered without saying what it decided: it cannot prove what it reads."""

    engine: str


@dataclass(frozen=True, slots=True)
class EngineRestarted:
    """An engine came back as another incarnation."""

    engine: str
    role: Role


RouterEvent = (
    TurnEnded
    | TurnReturned
    | TurnCouldReturn
    | ConversationSeen
    | ConversationGivenUp
    | ReferenceReceived
    | ReferenceMissed
    | ReferenceEnded
    | ReferencePutBack
    | ForgedParameters
    | TurnRetried
    | HttpAnswered
    | LegEnded
    | EngineState
    | EngineProvesNothing
    | EngineRestarted
)

# --- connector ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PrefillDecided:
    """P decided about a prompt's history; booked once a request, at admission. Tokens."""

    decision: Decision
    reason: Reason
    prompt_tokens: int
    local_tokens: int
    fetched_tokens: int
    available_tokens: int
    """What the reference could have given beyond `local_tokens` (0 without a usable one)."""


@dataclass(frozen=True, slots=True)
class PrefillComputed:
    """P computed `tokens` in `seconds` of its own compute time (waiting excluded)."""

    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class KvRead:
    """A read of KV finished. `wait_s` runs from admission to arrival, `seconds` is the transfer itself."""

    direction: Direction
    tokens: int
    size_bytes: int
    seconds: float
    wait_s: float


@dataclass(frozen=True, slots=True)
class KvReadFailed:
    """A read of KV failed."""

    direction: Direction


@dataclass(frozen=True, slots=True)
class KvReadDeclined:
    """A read was not started: the retention had run out."""


@dataclass(frozen=True, slots=True)
class KvLateNotification:
    """A reader reported a read of KV that was already freed."""


@dataclass(frozen=True, slots=True)
class RetentionStarted:
    """D retains a finished request's KV."""

    tokens: int
    blocks: int


@dataclass(frozen=True, slots=True)
class RetentionMissed:
    """A request finished on D and nothing was retained."""

    missed: Missed


@dataclass(frozen=True, slots=True)
class RetentionEnded:
    """A retention ended after `age_s` seconds."""

    end: End
    tokens: int
    blocks: int
    age_s: float


ConnectorEvent = (
    PrefillDecided
    | PrefillComputed
    | KvRead
    | KvReadFailed
    | KvReadDeclined
    | KvLateNotification
    | RetentionStarted
    | RetentionMissed
    | RetentionEnded
)
