"""Hundreds of turns of all kinds, in random order, against a small pool: nothing is lost, left or booked twice."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus
from vllm_harness import FIRST, Engine, handover, reference, tokens

from kvtune_telemetry import events
from kvtune_telemetry.vocabulary import Decision, Direction, End

Make = Callable[..., Engine]
REQUESTS = 500


class Traffic:
    """Steps an engine, with a worker that takes its time and a client that may leave at any moment."""

    def __init__(self, engine: Engine, rng: random.Random, depth: int) -> None:
        self.engine, self.rng, self.depth = engine, rng, depth
        self.requests: list[Request] = []
        self.aborted: set[str] = set()
        self.admitted: set[str] = set()
        self.outcomes: Counter[str] = Counter()
        """How reads ended, as the worker told."""
        self.sent = 0
        self._in_flight: deque[SchedulerOutput] = deque()
        self._told = engine.connector.update_state_after_alloc
        engine.connector.update_state_after_alloc = self._admit

    def _admit(self, request: Request, blocks: Any, external: int) -> None:
        if (request.kv_transfer_params or {}).get("do_remote_decode"):
            self.admitted.add(request.request_id)
        self._told(request, blocks, external)

    def step(self) -> None:
        engine, rng = self.engine, self.rng
        self._in_flight.append(engine.schedule())
        if len(self._in_flight) < self.depth:
            return
        ends: dict[str, list[str]] = {"read": [], "failed": [], "declined": []}
        for req_id in list(engine.reading):
            if rng.random() < 0.3:
                ends[rng.choices(list(ends), [4, 1, 1])[0]].append(req_id)
        self.outcomes.update({end: len(ids) for end, ids in ends.items()})
        sent = {req_id: rng.choice([*End, None]) for req_id in engine.sending if rng.random() < 0.2}
        self.sent += len(sent)
        moved = engine.moved(**ends, sent={req_id: end and end.value for req_id, end in sent.items()})
        engine.process(self._in_flight.popleft(), moved)

    def run(self, arrive: Callable[[], Request]) -> None:
        """All requests arrive, some are aborted, everything ends."""
        for _ in range(20_000):
            if len(self.requests) < REQUESTS and self.rng.random() < 0.6:
                self.requests.append(arrive())
            if self.rng.random() < 0.08:
                alive = [one for one in self.requests if not one.is_finished()]
                if alive:
                    gone = self.rng.choice(alive)
                    self.engine.abort(gone)
                    self.aborted.add(gone.request_id)
            self.step()
            if len(self.requests) == REQUESTS and not self.engine.scheduler.requests:
                break
        while self._in_flight:
            self.engine.process(self._in_flight.popleft())
        finished = {one.request_id: one.status for one in self.requests}
        assert {
            req_id for req_id, status in finished.items() if status == RequestStatus.FINISHED_ABORTED
        } == self.aborted
        assert {s for req_id, s in finished.items() if req_id not in self.aborted} == {
            RequestStatus.FINISHED_LENGTH_CAPPED
        }


@pytest.mark.parametrize(
    ("seed", "overlapping", "caching"), [(1, False, True), (2, False, False), (3, True, True), (4, True, False)]
)
def test_prefills(engine: Make, seed: int, overlapping: bool, caching: bool) -> None:
    rng = random.Random(seed)
    p = engine(blocks=90, budget=128, max_seqs=16, overlapping=overlapping, caching=caching)
    traffic = Traffic(p, rng, 2 if overlapping else 1)
    p.step(offsets={"d": 0.0})
    holding: dict[str, list[int]] = {}
    read: Counter[str] = Counter()

    def arrive() -> Request:
        kind = rng.choice(
            ["first", "honest", "honest", "honest", "edited", "foreign", "expired", "replayed", "unproven", "plain"]
        )
        history = tokens(rng.randrange(40, 500), rng.randrange(20))
        prompt = history + tokens(rng.randrange(1, 100), rng.randrange(1000))
        name = f"d-{len(holding)}"
        if kind == "replayed" and holding:
            name = rng.choice(list(holding))
            history = holding[name]
            prompt = history + tokens(20, rng.randrange(1000))
        params: dict[str, Any] | None = dict(FIRST)
        if kind == "plain":
            params = None
        elif kind != "first":
            holding[name] = held = tokens(400, 7 + seed) if kind == "foreign" else history
            expires_in = rng.choice([-60.0, 3.0]) if kind == "expired" else 480.0
            params = reference(held, name=name, proof=kind != "unproven", expires_in=expires_in)
        if kind == "edited":
            at = rng.randrange(len(history))
            prompt = prompt[:at] + tokens(len(prompt) - at, 2000)
        # Real prefills make one token; some make more, so that blocks run out while they run.
        return p.add(prompt, params, max_tokens=rng.choice([1, 1, 60]))

    stock = p.schedule

    def watched() -> SchedulerOutput:
        """Every read is of tokens that are the prompt's own; no reference is used twice."""
        before, told = set(p.reading), len(p.notified)
        output = stock()
        for req_id in set(p.reading) - before:
            remote, request = p.reading[req_id].remote, p.scheduler.requests[req_id]
            read[remote.request_id] += 1
            assert request.prompt_token_ids[: remote.num_tokens] == holding[remote.request_id][: remote.num_tokens]
        read.update(name.split("#")[0] for name in p.notified[told:])
        return output

    p.schedule = watched  # type: ignore[method-assign]
    traffic.run(arrive)
    assert set(read.values()) == {1}
    decided = p.booked(events.PrefillDecided)
    assert len(decided) == len(traffic.admitted)
    assert sum(e.decision is Decision.FETCH for e in decided) == traffic.outcomes["read"]
    assert len(p.booked(events.KvRead)) == traffic.outcomes["read"]
    assert p.booked(events.KvReadFailed) == [events.KvReadFailed(Direction.D2P)] * traffic.outcomes["failed"]
    assert len(p.booked(events.KvReadDeclined)) == sum(e.reason.value == "expired" for e in decided)
    assert p.booked(events.RetentionEnded) == []
    # It was a soak: all of this has happened.
    assert {e.reason.value for e in decided} >= {
        "none", "below_threshold", "expired", "rewritten", "unverified", "consumed", "read_failed",
    }  # fmt: skip
    assert min(traffic.outcomes.values()) > 3 and len(traffic.aborted) > 10
    assert sum(one.num_preemptions > 0 for one in traffic.requests) > 5
    p.assert_clean()


@pytest.mark.parametrize(("seed", "overlapping"), [(5, False), (6, True)])
def test_decodes(engine: Make, seed: int, overlapping: bool) -> None:
    rng = random.Random(seed)
    d = engine(role="kv_consumer", blocks=90, max_seqs=16, overlapping=overlapping)
    traffic = Traffic(d, rng, 2 if overlapping else 1)

    def arrive() -> Request:
        asked = rng.choice([{}, {"retain_s": 0}, {"retain_s": 30.0}])
        params = rng.choice([handover(**asked), handover(**asked), None, {"do_remote_prefill": False}])
        return d.add(tokens(rng.randrange(20, 300), rng.randrange(6)), params, max_tokens=rng.randrange(1, 80))

    traffic.run(arrive)
    named = [one.kv_transfer_params for one in d.answers.values() if one.kv_transfer_params]
    assert all(params["remote_block_ids"][0] and params["kvtune"]["fingerprint"] for params in named)
    started, ended = d.booked(events.RetentionStarted), d.booked(events.RetentionEnded)
    assert len(named) == len(started) == len(ended) + len(d.connector._ledger) == traffic.sent
    assert sum(e.tokens for e in started) == sum(e.tokens for e in ended)
    # Every leg of disaggregated serving was held, or is told why not.
    legs = [one for one in traffic.requests if (one.kv_transfer_params or {}).get("remote_engine_id")]
    assert len(legs) == len(started) + len(d.booked(events.RetentionMissed))
    # `error`: finished while preempted.
    why = {e.missed.value for e in d.booked(events.RetentionMissed)}
    assert {"aborted", "unwanted"} <= why <= {"aborted", "unwanted", *(["error"] if overlapping else [])}
    assert len(d.booked(events.KvRead)) == traffic.outcomes["read"]
    broken = traffic.outcomes["failed"] + traffic.outcomes["declined"]
    assert d.booked(events.KvReadFailed) == [events.KvReadFailed(Direction.P2D)] * broken
    assert d.booked(events.PrefillDecided) == []
    assert {e.end for e in ended} == set(End)
    assert len(traffic.aborted) > 10 and sum(one.num_preemptions > 0 for one in traffic.requests) > 5
    d.assert_clean()
