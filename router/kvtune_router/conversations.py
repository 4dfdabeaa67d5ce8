"""The router's memory: conversations, the single-use references to their KV, and the leases on those. No I/O, no clock.

A reference is received once and ends once. A turn *leases* it; the lease resolves exactly once: P read it (handed
over), P certainly never read it (put back), or nobody can tell (lost).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvtune_router.identity import Identifier, Identity, Mark
from kvtune_telemetry import events
from kvtune_telemetry.vocabulary import Outcome, ReferenceEnd

_MAX_FILED = 8
"""Conversations kept under one mark."""
_MAX_LOOKS = 64
"""Candidates looked at for one request."""

Emit = Callable[[events.RouterEvent], None]


@dataclass(frozen=True, slots=True)
class Reference:
    """What D exported at the end of a turn. Times in the router's clock (s)."""

    params: dict[str, Any]
    """D's `kv_transfer_params`, unchanged."""
    engine: str
    """The configured address of the D that holds the KV."""
    incarnation: str
    """D's engine id; another process has another."""
    tokens: int
    received_s: float
    usable_until_s: float
    """Received + TTL - the reader's margin - the time a hand-over may take."""


@dataclass(slots=True)
class Conversation:
    """One remembered conversation."""

    key: bytes
    reference: Reference | None = None
    sequence: int = 0
    """Which reference that is, among all received."""
    leased: bool = False
    missing: Outcome = Outcome.ABSENT
    """Why there is no reference, when there is none."""
    missing_since_s: float | None = None
    """When the reference that is missing had been received."""
    decode: str | None = None
    """The D that served the last turn."""
    ended_s: float | None = None
    """End of the last answered turn."""
    tokens: int = 0
    """Tokens D held then."""
    awaiting: bool = False
    """Whether the pause after that turn is still open and counts."""
    filed_under: bytes | None = None
    in_flight: int = 0


class Lease:
    """A turn's hold on a reference. Resolving it again changes nothing."""

    __slots__ = ("_conversation", "_open", "_store", "reference")

    def __init__(self, store: ConversationStore, conversation: Conversation, reference: Reference) -> None:
        self._store, self._conversation, self.reference = store, conversation, reference
        self._open = True

    @property
    def open(self) -> bool:
        """Whether it is still unresolved."""
        return self._open

    def end(self, how: ReferenceEnd) -> None:
        """The reference is spent."""
        if self._open:
            self._open = False
            self._store.resolve_lease(self._conversation, self.reference, how)

    def put_back(self) -> None:
        """P never read it: the next turn may."""
        if self._open:
            self._open = False
            self._store.resolve_lease(self._conversation, self.reference, None)


@dataclass(frozen=True, slots=True)
class Arrival:
    """What is known when a turn arrives."""

    conversation: Conversation
    followup: bool
    outcome: Outcome
    """HIT stands for "there is a lease"; P has the last word."""
    lease: Lease | None
    reference_age_s: float | None


class ConversationStore:
    """All conversations, bounded in number and in time."""

    def __init__(
        self,
        identifier: Identifier,
        emit: Emit,
        *,
        max_conversations: int = 200_000,
        horizon_s: float = 3600.0,
    ) -> None:
        """`horizon_s`: seconds after its last answer at which a conversation is given up."""
        self._identifier = identifier
        self._emit = emit
        self._max = max_conversations
        self._horizon_s = horizon_s
        self._conversations: OrderedDict[bytes, Conversation] = OrderedDict()
        self._filed: dict[bytes, list[tuple[bytes, Mark]]] = {}
        self._deadlines: list[tuple[float, int, bytes]] = []
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._conversations)

    def references(self) -> int:
        """How many unused references are held (leased ones included)."""
        return sum(1 for conversation in self._conversations.values() if conversation.reference is not None)

    # --- arrival ----------------------------------------------------------------------------------------------------

    def arrive(self, identity: Identity, now_s: float, alive: Callable[[str, str], bool]) -> Arrival:
        """A turn arrives. `alive(engine, incarnation)`: whether that engine can still hold KV."""
        conversation = self._find(identity)
        if conversation is None:
            conversation = self._create(identity)
            conversation.in_flight += 1
            return Arrival(conversation, False, Outcome.FIRST, None, None)
        self._conversations.move_to_end(conversation.key)
        conversation.in_flight += 1
        followup = conversation.ended_s is not None
        if conversation.awaiting and conversation.ended_s is not None:
            conversation.awaiting = False
            self._emit(events.TurnReturned(max(0.0, now_s - conversation.ended_s), conversation.tokens))
        reference = conversation.reference
        if reference is None:
            since = conversation.missing_since_s
            outcome = conversation.missing if followup else Outcome.FIRST
            age = now_s - since if since is not None and outcome is not Outcome.ABSENT else None
            return Arrival(conversation, followup, outcome, None, age)
        age = now_s - reference.received_s
        if conversation.leased:
            return Arrival(conversation, followup, Outcome.CONSUMED, None, age)
        if now_s >= reference.usable_until_s:
            self._drop(conversation, ReferenceEnd.EXPIRED, Outcome.EXPIRED)
            return Arrival(conversation, followup, Outcome.EXPIRED, None, age)
        if not alive(reference.engine, reference.incarnation):
            self._drop(conversation, ReferenceEnd.ENGINE_GONE, Outcome.ENGINE_GONE)
            return Arrival(conversation, followup, Outcome.ENGINE_GONE, None, age)
        conversation.leased = True
        return Arrival(conversation, followup, Outcome.HIT, Lease(self, conversation, reference), age)

    def _find(self, identity: Identity) -> Conversation | None:
        if identity.key is not None:
            return self._conversations.get(identity.key)
        known: dict[int, bytes] = {}
        looked = 0
        for mark in identity.earlier:
            for key, whole in reversed(self._filed.get(mark.hash, ())):
                conversation = self._conversations.get(key)
                if conversation is not None and self._identifier.continues(identity, whole, known):
                    return conversation
                looked += 1
                if looked >= _MAX_LOOKS:
                    return None
        return None

    def _create(self, identity: Identity) -> Conversation:
        key = identity.key
        if key is None:
            assert identity.own is not None
            # Two conversations may open with the same words: the key is not the hash alone.
            self._sequence += 1
            key = identity.own.hash + self._sequence.to_bytes(8, "little")
        conversation = Conversation(key)
        self._conversations[key] = conversation
        self._emit(events.ConversationSeen())
        while len(self._conversations) > self._max:
            oldest = next(iter(self._conversations.values()))
            if oldest is conversation:
                break
            self._forget(oldest, ReferenceEnd.EVICTED)
        return conversation

    def _file(self, conversation: Conversation, identity: Identity) -> None:
        """File an answered request, so that its continuation finds the conversation. Histories that share a beginning
        share a mark; each mark keeps the latest few."""
        if identity.index is None or identity.own is None:
            return
        self._unfile(conversation)
        conversation.filed_under = identity.index
        here = self._filed.setdefault(identity.index, [])
        here.append((conversation.key, identity.own))
        del here[:-_MAX_FILED]

    def _unfile(self, conversation: Conversation) -> None:
        mark, conversation.filed_under = conversation.filed_under, None
        here = self._filed.get(mark) if mark is not None else None
        if mark is None or here is None:
            return
        here[:] = [entry for entry in here if entry[0] != conversation.key]
        if not here:
            del self._filed[mark]

    # --- end of a turn ----------------------------------------------------------------------------------------------

    def leave(self, conversation: Conversation) -> None:
        """A turn that had arrived is over, answered or not."""
        conversation.in_flight -= 1

    def answered(
        self,
        conversation: Conversation,
        now_s: float,
        *,
        identity: Identity,
        decode: str,
        reference: Reference | None,
        tokens: int,
        retained: bool = True,
    ) -> None:
        """A turn was answered by `decode`. `tokens`: what D held at its end; `retained`: whether it was to keep it."""
        if self._conversations.get(conversation.key) is not conversation:
            # Forgotten while the turn ran; a reference that nobody can find again is booked as such.
            if reference is not None:
                self._emit(events.ReferenceReceived())
                self._emit(events.ReferenceEnded(ReferenceEnd.EVICTED))
            return
        self._conversations.move_to_end(conversation.key)
        self._file(conversation, identity)
        conversation.ended_s, conversation.tokens, conversation.decode = now_s, tokens, decode
        conversation.awaiting = retained
        if retained:
            self._emit(events.TurnCouldReturn(tokens))
        if reference is None:
            if conversation.reference is None:
                conversation.missing, conversation.missing_since_s = Outcome.ABSENT, None
            return
        self._emit(events.ReferenceReceived())
        if conversation.reference is not None and not conversation.leased:
            self._emit(events.ReferenceEnded(ReferenceEnd.SUPERSEDED))
        conversation.reference, conversation.leased = reference, False
        self._sequence += 1
        conversation.sequence = self._sequence
        # Without the reference itself: it is large, and may be spent long before its deadline.
        heapq.heappush(self._deadlines, (reference.usable_until_s, self._sequence, conversation.key))
        if len(self._deadlines) > 64 and len(self._deadlines) > 4 * len(self._conversations):
            self._deadlines = [
                entry
                for entry in self._deadlines
                if (found := self._conversations.get(entry[2])) is not None and found.sequence == entry[1]
            ]
            heapq.heapify(self._deadlines)

    def resolve_lease(self, conversation: Conversation, reference: Reference, how: ReferenceEnd | None) -> None:
        """End a lease: `how` the reference was spent, or None to put it back. Called by `Lease`."""
        current = conversation.reference is reference
        known = self._conversations.get(conversation.key) is conversation
        if how is None:
            if current and known:
                conversation.leased = False
                self._emit(events.ReferencePutBack())
                return
            how = ReferenceEnd.SUPERSEDED if known else ReferenceEnd.EVICTED
        self._emit(events.ReferenceEnded(how))
        if current:
            conversation.reference, conversation.leased = None, False
            conversation.missing = Outcome.CONSUMED
            conversation.missing_since_s = reference.received_s

    # --- bounds -----------------------------------------------------------------------------------------------------

    def _drop(self, conversation: Conversation, end: ReferenceEnd, missing: Outcome) -> None:
        assert conversation.reference is not None
        conversation.missing, conversation.missing_since_s = missing, conversation.reference.received_s
        conversation.reference, conversation.leased = None, False
        self._emit(events.ReferenceEnded(end))

    def _forget(self, conversation: Conversation, end: ReferenceEnd) -> None:
        del self._conversations[conversation.key]
        self._unfile(conversation)
        if conversation.reference is not None and not conversation.leased:
            self._emit(events.ReferenceEnded(end))
            conversation.reference = None
        self._emit(events.ConversationGivenUp(conversation.awaiting))

    def sweep(self, now_s: float) -> None:
        """Let go of what can no longer be used: lapsed references, and conversations that did not return."""
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, sequence, key = heapq.heappop(self._deadlines)
            conversation = self._conversations.get(key)
            if conversation is None or conversation.sequence != sequence or conversation.leased:
                continue
            if conversation.reference is not None:
                self._drop(conversation, ReferenceEnd.EXPIRED, Outcome.EXPIRED)
        for conversation in list(self._stale(now_s)):
            self._forget(conversation, ReferenceEnd.EXPIRED)

    def _stale(self, now_s: float) -> list[Conversation]:
        stale: list[Conversation] = []
        for conversation in self._conversations.values():
            if conversation.in_flight:
                continue
            if conversation.ended_s is None or conversation.ended_s + self._horizon_s <= now_s:
                stale.append(conversation)
            else:
                break
        return stale

    def close(self) -> None:
        """End every reference, at shut-down."""
        for conversation in self._conversations.values():
            if conversation.reference is not None and not conversation.leased:
                self._drop(conversation, ReferenceEnd.SHUTDOWN, Outcome.ABSENT)
