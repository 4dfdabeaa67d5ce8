"""The closed sets of words that label every decision. One place; label values, span attributes and logs use these."""

from __future__ import annotations

import ast
import inspect
from enum import StrEnum


class Outcome(StrEnum):
    """What became of a turn's reference to the KV of its history, as the router knows it. A turn has exactly one."""

    FIRST = "first"
    """No earlier turn of this conversation is known: there was nothing to reuse."""
    HIT = "hit"
    """P accepted the reference: the history was read from D, or P held it already (see `decision`)."""
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
    """Nothing spoke against it."""
    BELOW_THRESHOLD = "below_threshold"
    """Less than `kv_recompute_threshold` tokens could be fetched."""
    EXPIRED = "expired"
    """The retention had run out, or would before the read was safe."""
    REWRITTEN = "rewritten"
    """The prompt does not begin with the tokens D holds, or with few of them."""
    UNVERIFIED = "unverified"
    """The reference carries no fingerprint."""
    CONSUMED = "consumed"
    """This reference was read before."""
    ENGINE_GONE = "engine_gone"
    """The engine that held the KV is not the one that answers at its address."""
    READ_FAILED = "read_failed"
    """The read was begun and failed, or never reached D."""
    EXPLORED = "explored"
    """The router asked for the path that the threshold speaks against."""
    DISABLED = "disabled"
    """P is not bidirectional, or the request cannot reuse."""


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
    """The request failed."""
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
    """Its retention ran out before the next turn came, or would have while it was handed over."""
    SUPERSEDED = "superseded"
    """A newer turn of the same conversation brought another."""
    EVICTED = "evicted"
    """The router forgot it to keep its own memory bounded."""
    ENGINE_GONE = "engine_gone"
    """The engine that held the KV went away or restarted."""
    REWRITTEN = "rewritten"
    """The router itself saw that the history was rewritten."""
    LOST = "lost"
    """P may or may not have read it (broken connection): not safe to use again."""
    SHUTDOWN = "shutdown"
    """The router stopped."""


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
    """Computes prompts (P)."""
    DECODE = "decode"
    """Generates answers, and retains their KV (D)."""


class Path(StrEnum):
    """The two ways to get the KV of a history; each has its cost sums."""

    RECOMPUTE = "recompute"
    """A prefill's computation, its fixed part included."""
    FETCH = "fetch"
    """A read back from D, from admission to arrival."""


def meanings(words: type[StrEnum]) -> dict[str, str]:
    """What each word of a set means, as written under it above; empty where the word says all."""
    body = ast.parse(inspect.getsource(words)).body[0].body  # type: ignore[attr-defined]
    found = {word.value: "" for word in words}
    for name, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(name, ast.Assign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            target = name.targets[0]
            assert isinstance(target, ast.Name)
            found[words[target.id].value] = " ".join(str(after.value.value).split())
    return found
