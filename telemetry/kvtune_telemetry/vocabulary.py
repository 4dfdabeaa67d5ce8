"""The closed sets of words that label every decision. One place; label values, span attributes and logs use these."""

from __future__ import annotations

from enum import StrEnum


class Outcome(StrEnum):
    """What became of a turn's reference to the KV of its history, as the router knows it. A turn has exactly one."""

    FIRST = "first"
    """No earlier turn of this conversation is known: there was nothing to reuse."""
    HIT = "hit"
    """P accepted the reference: the history was read from D, or P held it already (see `Decision`)."""
    EXPIRED = "expired"
    """The next turn came too late for the retention; the reference was not handed over, or P declined it."""
    REWRITTEN = "rewritten"
    """The history no longer begins with what D holds; nothing (or nothing worth it) could be proven equal."""
    CONSUMED = "consumed"
    """Another turn of the conversation holds, or has used up, the single-use reference."""
    ENGINE_GONE = "engine_gone"
    """The engine that held the KV is down, or has restarted since."""
    EVICTED = "evicted"
    """The router let the reference go to keep its own memory bounded."""
    ABSENT = "absent"
    """The turn before brought no reference (stop string, error, client gone, or a stream that cannot carry one)."""
    UNVERIFIED = "unverified"
    """The reference carries no fingerprint, so nothing proves it equal, and the policy is to refuse such."""
    READ_FAILED = "read_failed"
    """The reference was good, but the read failed or no prefill engine answered; the history was computed."""
    DISABLED = "disabled"
    """Reuse was switched off for this turn (hold-out group, or a shape of request that cannot reuse)."""
    NO_IDENTITY = "no_identity"
    """Nothing tells which conversation the turn belongs to."""
    ERROR = "error"
    """The turn itself failed (refused request, engine error, client gone before the first byte)."""


class Decision(StrEnum):
    """What P's scheduler did about the history of a prompt."""

    LOCAL_HIT = "local_hit"
    """P's own prefix cache covered all that could be fetched."""
    FETCH = "fetch"
    """The verified prefix is read from D."""
    RECOMPUTE = "recompute"
    """The history is computed again."""


class Reason(StrEnum):
    """Why P decided so. `none` goes with `local_hit`, `fetch`, and with `recompute` where no reference was given;
    `rewritten` also with a `fetch` that was cut to the verified prefix, `explored` with either."""

    NONE = "none"
    BELOW_THRESHOLD = "below_threshold"
    EXPIRED = "expired"
    REWRITTEN = "rewritten"
    UNVERIFIED = "unverified"
    CONSUMED = "consumed"
    ENGINE_GONE = "engine_gone"
    READ_FAILED = "read_failed"
    EXPLORED = "explored"
    DISABLED = "disabled"


class Direction(StrEnum):
    """Which way KV blocks travel."""

    D2P = "d2p"
    """A follow-up turn's history, read back by prefill."""
    P2D = "p2d"
    """The ordinary hand-over after prefill."""


class End(StrEnum):
    """How the retention of a finished turn's KV on D ended."""

    READ = "read"
    """P read it."""
    LOCAL_HIT = "local_hit"
    """P did not need it (own cache, or below the threshold) and said so."""
    LAPSED = "lapsed"
    """The TTL ran out."""
    RELEASED = "released"
    """Given back unread: P proved it useless, or nobody wanted it kept."""
    ABORTED = "aborted"
    """The engine dropped it (shut-down, error)."""


class Missed(StrEnum):
    """Why D retained nothing for a finished request that disaggregated serving had sent it."""

    ABORTED = "aborted"
    """The engine saw an abort: the client left, or a stop string was found (upstream ends those from outside)."""
    ERROR = "error"
    UNWANTED = "unwanted"
    """The router asked for no retention."""
    DISABLED = "disabled"
    """`bidirectional_kv_xfer` is off."""


class NoReference(StrEnum):
    """Why an identified conversation's turn brought the router no reference, though reuse was on for it."""

    STOP_STRING = "stop_string"
    """The answer ended at a stop string: to the engine that is an abort, and it retains nothing."""
    CLIENT_GONE = "client_gone"
    """The client left before the end of the answer."""
    ERROR = "error"
    """The turn failed."""
    NOT_SENT = "not_sent"
    """The engine answered without one (reuse is off there, or its streams cannot carry one)."""


class ReferenceEnd(StrEnum):
    """How a reference left the router. Every reference received ends exactly once."""

    HANDED_OVER = "handed_over"
    """P got it and answered."""
    EXPIRED = "expired"
    SUPERSEDED = "superseded"
    """A newer turn of the same conversation brought another."""
    EVICTED = "evicted"
    ENGINE_GONE = "engine_gone"
    REWRITTEN = "rewritten"
    """The router itself saw that the history was rewritten."""
    LOST = "lost"
    """P may or may not have read it (broken connection): not safe to use again."""
    SHUTDOWN = "shutdown"


class Phase(StrEnum):
    """The parts of a turn's time to first token that the router can tell apart."""

    ROUTE = "route"
    """Reading the request, finding its conversation, choosing engines."""
    PREFILL = "prefill"
    """P's leg, request to answer, retries included."""
    HANDOFF = "handoff"
    """From P's answer to D's response head."""
    FIRST_TOKEN = "first_token"  # noqa: S105 - not a password
    """From D's response head to the first byte of its body."""


class Role(StrEnum):
    """An engine's part in disaggregated serving."""

    PREFILL = "prefill"
    DECODE = "decode"


class Path(StrEnum):
    """The two ways to get the KV of a history; each has its cost sums."""

    RECOMPUTE = "recompute"
    FETCH = "fetch"
