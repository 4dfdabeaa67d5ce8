from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune_router.conversations import Arrival, ConversationStore, Reference
from kvtune_router.identity import Identifier, Identity
from kvtune_telemetry import events
from kvtune_telemetry.vocabulary import Outcome, ReferenceEnd

IDENTIFIER = Identifier(b"secret")


class World:
    def __init__(self, **more: Any) -> None:
        self.events: list[events.RouterEvent] = []
        self.store = ConversationStore(IDENTIFIER, self.events.append, **more)
        self.dead: set[str] = set()
        self.identities: dict[bytes, Identity] = {}

    def arrive(self, name: str, now: float) -> Arrival:
        identity = IDENTIFIER.identify({"x-session-id": name}, {})
        assert identity is not None
        return self.arrive_as(identity, now)

    def arrive_as(self, identity: Identity, now: float) -> Arrival:
        arrival = self.store.arrive(identity, now, lambda engine, incarnation: incarnation not in self.dead)
        self.identities[arrival.conversation.key] = identity
        return arrival

    def answer(self, arrival: Arrival, now: float, *, tokens: int = 100, ttl: float = 100.0, ref: bool = True) -> None:
        reference = Reference({}, "d:1", "e1", tokens, now, now + ttl) if ref else None
        self.store.leave(arrival.conversation)
        self.store.answered(
            arrival.conversation,
            now,
            identity=self.identities[arrival.conversation.key],
            decode="d:1",
            reference=reference,
            tokens=tokens,
        )

    def ends(self) -> Counter[ReferenceEnd]:
        return Counter(event.end for event in self.events if isinstance(event, events.ReferenceEnded))

    def count(self, kind: type) -> int:
        return sum(isinstance(event, kind) for event in self.events)


def test_a_conversation_from_first_to_hit() -> None:
    world = World()
    first = world.arrive("a", 0.0)
    assert (first.outcome, first.followup, first.lease) == (Outcome.FIRST, False, None)
    world.answer(first, 5.0, tokens=70)
    second = world.arrive("a", 25.0)
    assert (second.outcome, second.followup, second.reference_age_s) == (Outcome.HIT, True, 20.0)
    assert events.TurnReturned(20.0, 70) in world.events
    assert second.lease is not None
    second.lease.end(ReferenceEnd.HANDED_OVER)
    second.lease.end(ReferenceEnd.LOST)
    assert world.ends() == {ReferenceEnd.HANDED_OVER: 1}
    assert world.store.references() == 0


def test_expired_at_arrival_and_by_the_sweep() -> None:
    for sweep in (False, True):
        world = World()
        world.answer(world.arrive("a", 0.0), 0.0, ttl=94.0)
        if sweep:
            world.store.sweep(94.0)
            assert world.store.references() == 0
        late = world.arrive("a", 94.0)
        assert (late.outcome, late.lease, late.reference_age_s) == (Outcome.EXPIRED, None, 94.0)
        assert world.ends() == {ReferenceEnd.EXPIRED: 1}


def test_the_last_usable_moment_is_usable() -> None:
    world = World()
    world.answer(world.arrive("a", 0.0), 0.0, ttl=94.0)
    world.store.sweep(93.9)
    assert world.arrive("a", 93.9).outcome is Outcome.HIT


def test_a_restarted_engine_is_gone() -> None:
    world = World()
    world.answer(world.arrive("a", 0.0), 0.0)
    world.dead.add("e1")
    assert world.arrive("a", 1.0).outcome is Outcome.ENGINE_GONE
    assert world.ends() == {ReferenceEnd.ENGINE_GONE: 1}


def test_two_turns_at_once_never_share_a_reference() -> None:
    world = World()
    world.answer(world.arrive("a", 0.0), 0.0)
    one, two = world.arrive("a", 1.0), world.arrive("a", 2.0)
    assert (one.outcome, two.outcome, two.lease) == (Outcome.HIT, Outcome.CONSUMED, None)
    world.answer(two, 3.0)
    assert one.lease is not None
    one.lease.put_back()
    assert world.ends() == {ReferenceEnd.SUPERSEDED: 1}, "the newer reference stays, the older is not put over it"
    assert world.store.references() == 1
    assert world.arrive("a", 4.0).outcome is Outcome.HIT


def test_a_reference_put_back_serves_the_next_turn() -> None:
    world = World()
    world.answer(world.arrive("a", 0.0), 0.0)
    lease = world.arrive("a", 1.0).lease
    assert lease is not None
    lease.put_back()
    assert world.arrive("a", 2.0).outcome is Outcome.HIT
    assert world.count(events.ReferencePutBack) == 1 and not world.ends()


def test_a_turn_that_brought_no_reference() -> None:
    world = World()
    world.answer(world.arrive("a", 0.0), 0.0, ref=False)
    again = world.arrive("a", 1.0)
    assert (again.outcome, again.followup) == (Outcome.ABSENT, True)


def test_a_failed_first_turn_is_no_history() -> None:
    world = World()
    world.store.leave(world.arrive("a", 0.0).conversation)
    assert world.arrive("a", 1.0).followup is False


def test_memory_is_bounded_and_booked() -> None:
    world = World(max_conversations=2)
    for number in range(4):
        world.answer(world.arrive(f"c{number}", float(number)), float(number))
    assert len(world.store) == 2
    assert world.ends() == {ReferenceEnd.EVICTED: 2}
    assert world.count(events.ConversationGivenUp) == 2


def test_a_conversation_that_does_not_return_is_given_up() -> None:
    world = World(horizon_s=3600.0)
    world.answer(world.arrive("a", 0.0), 10.0)
    world.store.sweep(3609.9)
    assert len(world.store) == 1
    world.store.sweep(3610.0)
    assert len(world.store) == 0
    assert events.ConversationGivenUp(True) in world.events
    assert world.arrive("a", 3611.0).outcome is Outcome.FIRST


def test_a_turn_in_flight_is_not_forgotten() -> None:
    world = World(horizon_s=10.0)
    arrival = world.arrive("a", 0.0)
    world.store.sweep(1000.0)
    world.answer(arrival, 1000.0)
    assert world.arrive("a", 1001.0).outcome is Outcome.HIT


def test_histories_find_their_conversation_and_move_on() -> None:
    def turn(*messages: str) -> Identity:
        roles = ("user", "assistant")
        body = {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(messages)]}
        found = IDENTIFIER.identify({}, body)
        assert found is not None
        return found

    world = World()
    world.answer(world.arrive_as(turn("hi"), 0.0), 0.0)
    world.answer(world.arrive_as(turn("hi"), 0.0), 0.0)  # another that opens alike
    third = world.arrive_as(turn("hi", "ho", "more"), 1.0)
    assert third.outcome is Outcome.HIT
    world.answer(third, 2.0)
    assert world.arrive_as(turn("hi", "ho", "more", "yes", "and"), 3.0).outcome is Outcome.HIT
    assert world.arrive_as(turn("other", "ho", "more"), 3.0).outcome is Outcome.FIRST


def completion(text: str) -> Identity:
    found = IDENTIFIER.identify({}, {"prompt": text})
    assert found is not None
    return found


def test_prompts_with_a_common_beginning_keep_their_own_conversations() -> None:
    world = World()
    for number in range(8):
        world.answer(world.arrive_as(completion("system " * 600 + f"user {number}"), 0.0), 0.0)
    for number in range(8):
        back = world.arrive_as(completion("system " * 600 + f"user {number} answer, and more"), 1.0)
        assert back.outcome is Outcome.HIT, number
    assert world.count(events.TurnReturned) == 8


def test_a_refused_turn_does_not_cost_its_retry_the_reference() -> None:
    world = World()
    opening, more = "once upon a time " * 20, "once upon a time " * 20 + "there was, and more"
    world.answer(world.arrive_as(completion(opening), 0.0), 0.0)
    refused = world.arrive_as(completion(more), 1.0)
    assert refused.lease is not None
    refused.lease.put_back()
    world.store.leave(refused.conversation)
    assert world.arrive_as(completion(more), 2.0).outcome is Outcome.HIT


def test_spent_references_are_not_kept_until_their_deadline() -> None:
    world = World()
    for turn in range(2000):
        arrival = world.arrive("a", float(turn))
        if arrival.lease is not None:
            arrival.lease.end(ReferenceEnd.HANDED_OVER)
        world.answer(arrival, float(turn), ttl=1e6)
    assert world.store.references() == 1
    assert len(world.store._deadlines) <= 65


step = st.tuples(
    st.sampled_from(["arrive", "answer", "fail", "back", "spend", "sweep", "die"]), st.integers(0, 3), st.floats(0, 60)
)


@settings(max_examples=200)
@given(st.lists(step, max_size=60))
def test_every_reference_received_ends_once_or_is_held(steps: list[tuple[str, int, float]]) -> None:
    world, now, running = World(max_conversations=3, horizon_s=200.0), 0.0, []
    for what, pick, wait in steps:
        now += wait
        arrival = running[pick % len(running)] if running else None
        if what == "arrive":
            running.append(world.arrive(f"c{pick}", now))
        elif what == "sweep":
            world.store.sweep(now)
        elif what == "die":
            world.dead ^= {"e1"}
        elif arrival is not None:
            if arrival.lease is not None and what != "answer":
                arrival.lease.put_back() if what == "back" else arrival.lease.end(ReferenceEnd.LOST)
            if what in ("answer", "fail"):
                running.remove(arrival)
                if arrival.lease is not None:
                    arrival.lease.end(ReferenceEnd.HANDED_OVER)
                if what == "answer":
                    world.answer(arrival, now)
                else:
                    world.store.leave(arrival.conversation)
        received, ended = world.count(events.ReferenceReceived), sum(world.ends().values())
        leased_elsewhere = sum(
            1
            for turn in running
            if turn.lease is not None and turn.lease.open and turn.conversation.reference is not turn.lease.reference
        )
        forgotten = sum(
            1
            for turn in running
            if turn.lease is not None
            and turn.lease.open
            and turn.conversation.reference is turn.lease.reference
            and world.store._conversations.get(turn.conversation.key) is not turn.conversation
        )
        assert received == ended + world.store.references() + leased_elsewhere + forgotten
    for turn in running:
        if turn.lease is not None:
            turn.lease.end(ReferenceEnd.LOST)
    world.store.close()
    assert world.count(events.ReferenceReceived) == sum(world.ends().values())


@pytest.mark.parametrize("retained", [True, False])
def test_only_retained_turns_count_as_able_to_return(retained: bool) -> None:
    world = World()
    arrival = world.arrive("a", 0.0)
    world.store.leave(arrival.conversation)
    world.store.answered(
        arrival.conversation, 1.0, identity=world.identities[arrival.conversation.key], decode="d", reference=None,
        tokens=9, retained=retained,
    )  # fmt: skip
    world.arrive("a", 2.0)
    assert world.count(events.TurnCouldReturn) == world.count(events.TurnReturned) == retained
