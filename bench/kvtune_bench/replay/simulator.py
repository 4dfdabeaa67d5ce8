"""The event simulator: prefill engines, one decode engine with a KV pool, and conversations that come back.

Prefill takes requests in order. A history that may be read is fetched while others compute; what is not fetched is
computed. Decode admits a request, in order, once its whole sequence fits beside what is active and what is retained;
retained KV cannot be evicted. Left out: batching and chunking inside an engine, growth of a sequence while it is
decoded, failures.
"""

from __future__ import annotations

import bisect
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from typing import Any, Protocol

from kvtune_bench.calibration import Calibration
from kvtune_bench.replay.model import HANDOVER_S, P99_BINS, Deployment, Load, ReplayError, Result, Setting
from kvtune_bench.traces import Plan, PlannedTurn
from kvtune_connector.policy import EXPIRY_MARGIN_S, Offer, Verdict, decide
from kvtune_telemetry.vocabulary import Decision, Direction, End, Outcome, Reason

_LONGEST_PAST_S = 48 * 3600.0
"""Conversations that began before this are not looked back for."""
_PROGRESS_EVENTS = 20_000

_UNREAD = {
    Reason.EXPIRED: Outcome.EXPIRED,
    Reason.REWRITTEN: Outcome.REWRITTEN,
    Reason.EXPLORED: Outcome.DISABLED,
}
"""Outcomes of turns whose history is computed; one below the threshold was a hit not worth fetching."""

_ARRIVE, _READ, _PREFILLED, _ENDED, _LAPSED, _BEGIN, _TICK = range(7)


class Observer(Protocol):
    """Hears what a real deployment's recorders would hear."""

    def seen(self) -> None:
        """A conversation's first turn."""

    def returned(self, gap_s: float, tokens: int) -> None:
        """A follow-up turn came."""

    def decided(self, decision: Decision, reason: Reason, prompt: int, local: int, fetched: int, offered: int) -> None:
        """Prefill decided about a history."""

    def declined(self) -> None:
        """Prefill refused to read what was about to lapse."""

    def read(self, direction: Direction, tokens: int, seconds: float) -> None:
        """A read ended."""

    def computed(self, tokens: int, seconds: float) -> None:
        """Prefill computed."""

    def served(self, outcome: Outcome, followup: bool, ttft_s: float) -> None:
        """A turn's first token left."""

    def ended(self, prompt: int, output: int) -> None:
        """A turn was answered to its end."""

    def retained(self, tokens: int) -> None:
        """Decode keeps a sequence."""

    def released(self, end: End, tokens: int, age_s: float) -> None:
        """A retention is over."""

    def tick(self, now_s: float, usage: float, waiting: int, running: int) -> None:
        """It is time to look at the gauges."""


class _Pin:
    __slots__ = ("open", "since", "tokens", "until")

    def __init__(self, tokens: int, since: float, until: float) -> None:
        self.tokens, self.since, self.until, self.open = tokens, since, until, True


class _Talk:
    """A conversation at work."""

    __slots__ = ("ended_s", "index", "pin", "turns")

    def __init__(self, turns: tuple[PlannedTurn, ...], index: int) -> None:
        self.turns, self.index = turns, index
        self.ended_s: float | None = None
        self.pin: _Pin | None = None


class _Job:
    """One turn at work."""

    __slots__ = (
        "arrived",
        "decided",
        "explored",
        "fetched",
        "followup",
        "local",
        "outcome",
        "pin",
        "queued",
        "talk",
        "turn",
        "work",
    )

    def __init__(self, talk: _Talk, arrived: float) -> None:
        self.talk, self.turn, self.arrived = talk, talk.turns[talk.index], arrived
        self.followup = talk.ended_s is not None
        self.outcome = Outcome.FIRST
        self.pin: _Pin | None = None
        self.explored = self.decided = False
        self.fetched = self.local = 0
        self.queued = self.work = 0.0


def nominal_starts(plan: Plan, calibration: Calibration) -> list[float]:
    """When each turn would begin, in seconds from the first, if nothing ever had to wait."""
    starts, at = [0.0], 0.0
    for turn in plan.turns[:-1]:
        at += calibration.prefill.at(turn.prompt_tokens) + turn.output_tokens * calibration.decode_token_s
        at += turn.gap_s or 0.0
        starts.append(at)
    return starts


class Replay:
    """One replay. `run` once."""

    def __init__(
        self,
        plans: Sequence[Plan],
        deployment: Deployment,
        setting: Setting,
        load: Load,
        *,
        observer: Observer | None = None,
        tick_s: float | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        """`tick_s`: how often the observer looks at the gauges after the warm-up; `progress` gets a share from 0 to 1.

        Raises ReplayError for plans without turns.
        """
        if not plans:
            raise ReplayError("there are no conversations to replay")
        self._plans, self._deployment, self._setting, self._load = plans, deployment, setting, load
        self._observer, self._tick_s, self._progress = observer, tick_s, progress
        self._random = random.Random(load.seed)
        self._noise = random.Random(load.seed + 1)
        self._explore = random.Random(load.seed + 2)
        self._queue: list[tuple[float, int, int, Any]] = []
        self._serial = 0
        self._now = 0.0
        self._free = deployment.pool_tokens
        self._pinned = self._active = self._running = 0
        self._idle_prefills = deployment.prefill_engines
        self._waiting_prefill: deque[_Job] = deque()
        self._ready: deque[_Job] = deque()
        self._waiting_decode: deque[_Job] = deque()
        self._end_s = load.warmup_s + load.duration_s
        self._accounted_s = load.warmup_s
        self._result = Result(load.duration_s, deployment.pool_tokens)

    # --- traffic ----------------------------------------------------------------------------------------------------

    def _push(self, when: float, kind: int, what: Any) -> None:
        self._serial += 1
        heappush(self._queue, (when, self._serial, kind, what))

    def _schedule(self) -> None:
        """Conversations begin at random times, the first long before the replay: traffic is steady from the start."""
        calibration, rng = self._deployment.calibration, self._random
        starts = [nominal_starts(plan, calibration) for plan in self._plans]
        turns = sum(len(plan.turns) for plan in self._plans) / len(self._plans)
        per_s = self._load.turns_per_s / turns
        past = min(_LONGEST_PAST_S, max(one[-1] for one in starts))
        when = -past
        events: list[tuple[float, int, int, Any]] = []
        while True:
            when += rng.expovariate(per_s)
            if when >= self._end_s:
                break
            which = rng.randrange(len(self._plans))
            index = bisect.bisect_left(starts[which], -when) if when < 0 else 0
            if index < len(starts[which]):
                self._serial += 1
                talk = (self._plans[which].turns, index)
                events.append((when + starts[which][index], self._serial, _BEGIN, talk))
        self._queue = events
        heapify(self._queue)

    # --- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> Result:
        """Replay to the end."""
        self._schedule()
        if self._observer is not None and self._tick_s:
            for tick in range(int(self._load.duration_s / self._tick_s) + 1):
                self._push(self._load.warmup_s + tick * self._tick_s, _TICK, None)
        act: tuple[Callable[[Any], None], ...] = (
            self._arrive, self._have_read, self._prefilled, self._turn_ended, self._lapsed, self._begin, self._tick,
        )  # fmt: skip
        queue, end, events = self._queue, self._end_s, 0
        while queue:
            when, _, kind, what = heappop(queue)
            if when > end:
                heappush(queue, (when, 0, kind, what))
                break
            self._now = when
            events += 1
            if self._progress is not None and events % _PROGRESS_EVENTS == 0:
                self._progress(when / end)
            act[kind](what)
        self._now = end
        self._account()
        self._count_unserved()
        self._result.events = events
        return self._result

    def _count_unserved(self) -> None:
        """Turns still without a token have waited at least so long: leaving them out would flatter an overload."""
        computing = [what for _, _, kind, what in self._queue if kind in (_READ, _PREFILLED)]
        for job in (*self._waiting_prefill, *self._ready, *self._waiting_decode, *computing):
            if job.arrived >= self._load.warmup_s:
                self._result.unserved += 1
                self._book_turn(job, self._end_s - job.arrived)

    def _factor(self) -> float:
        sigma = self._deployment.noise
        return math.exp(self._noise.gauss(0.0, sigma) - sigma * sigma / 2) if sigma else 1.0

    def _account(self) -> None:
        """Book the time since the last change of what is retained or active."""
        passed = self._now - self._accounted_s
        if passed > 0:
            result, pinned = self._result, self._pinned
            result.pinned_token_s += pinned * passed
            result.active_token_s += self._active * passed
            result.pinned_bins[-(-pinned * P99_BINS // self._deployment.pool_tokens)] += passed
            self._accounted_s = self._now

    # --- a turn, in order -------------------------------------------------------------------------------------------

    def _begin(self, what: tuple[tuple[PlannedTurn, ...], int]) -> None:
        self._arrive(_Talk(*what))

    def _arrive(self, talk: _Talk) -> None:
        job = _Job(talk, self._now)
        observer = self._observer
        if talk.ended_s is None:
            if observer is not None:
                observer.seen()
        else:
            before = talk.turns[talk.index - 1].sequence_tokens
            if observer is not None:
                observer.returned(self._now - talk.ended_s, before)
            pin, talk.pin = talk.pin, None
            if pin is None:
                job.outcome = Outcome.ABSENT
            elif self._now >= pin.until - EXPIRY_MARGIN_S - HANDOVER_S:
                job.outcome = Outcome.EXPIRED
            else:
                job.outcome, job.pin = Outcome.HIT, pin
                job.explored = self._setting.explore > self._explore.random()
        self._waiting_prefill.append(job)
        self._prefill()

    def _prefill(self) -> None:
        while self._idle_prefills and (self._ready or self._waiting_prefill):
            if self._ready:
                self._compute(self._ready.popleft())
            else:
                job = self._waiting_prefill.popleft()
                if not self._fetches(job):
                    self._compute(job)

    def _fetches(self, job: _Job) -> bool:
        """Decide about the history of a prompt; whether a read was begun."""
        turn, pin = job.turn, job.pin
        if job.followup and self._deployment.prefill_cache:
            before = job.talk.turns[job.talk.index - 1].prompt_tokens
            job.local = self._whole(min(turn.keep_tokens, before))
        offer = None
        if pin is not None:
            verified = turn.keep_tokens if not turn.rewritten else self._whole(turn.keep_tokens)
            offer = Offer(pin.tokens, verified, pin.until, explored=job.explored)
        verdict = decide(
            prompt_tokens=turn.prompt_tokens,
            local_tokens=job.local,
            offer=offer,
            now_s=self._now,
            threshold_tokens=self._setting.threshold_tokens,
        )
        job.fetched, job.decided = verdict.fetch_tokens, True
        if self._observer is not None:
            self._observer.decided(
                verdict.decision, verdict.reason, turn.prompt_tokens, job.local, job.fetched, verdict.available_tokens
            )
        if pin is not None and verdict.decision is not Decision.FETCH:
            self._unread(job, pin, verdict)
        if not job.fetched:
            return False
        job.work = self._deployment.calibration.transfer.at(job.fetched) * self._factor()
        self._push(self._now + job.work, _READ, job)
        return True

    def _unread(self, job: _Job, pin: _Pin, verdict: Verdict) -> None:
        """What becomes of a turn that reads nothing, and of what decode holds for it: as router and connector do."""
        job.outcome = _UNREAD.get(verdict.reason, job.outcome)
        if verdict.reason is Reason.EXPIRED and self._observer is not None:
            self._observer.declined()
        if verdict.notify_release:
            kept = verdict.reason in (Reason.NONE, Reason.BELOW_THRESHOLD)
            self._release(pin, End.LOCAL_HIT if kept else End.RELEASED)

    def _whole(self, tokens: int) -> int:
        block = self._deployment.block_tokens
        return tokens // block * block

    def _have_read(self, job: _Job) -> None:
        assert job.pin is not None
        self._release(job.pin, End.READ)
        if self._observer is not None:
            self._observer.read(Direction.D2P, job.fetched, job.work)
        self._ready.append(job)
        self._prefill()

    def _compute(self, job: _Job) -> None:
        self._idle_prefills -= 1
        tokens = job.turn.prompt_tokens - job.local - job.fetched
        job.work = self._deployment.calibration.prefill.at(tokens) * self._factor()
        self._push(self._now + job.work, _PREFILLED, job)

    def _prefilled(self, job: _Job) -> None:
        self._idle_prefills += 1
        if self._observer is not None:
            self._observer.computed(job.turn.prompt_tokens - job.local - job.fetched, job.work)
        job.queued = self._now
        self._waiting_decode.append(job)
        self._admit()
        self._prefill()

    def _admit(self) -> None:
        """Decode takes requests in order while their whole sequence fits."""
        waiting = self._waiting_decode
        while waiting and (need := waiting[0].turn.sequence_tokens) <= self._free:
            job = waiting.popleft()
            self._account()
            self._free -= need
            self._active += need
            self._running += 1
            turn, calibration = job.turn, self._deployment.calibration
            handoff = calibration.handoff.at(turn.prompt_tokens) * self._factor()
            first_s = self._now + handoff
            if self._now > job.queued and job.arrived >= self._load.warmup_s:
                self._result.waited_s += self._now - job.queued
                self._result.waited += 1
            if job.arrived >= self._load.warmup_s:
                self._book_turn(job, first_s - job.arrived)
            if self._observer is not None:
                missing = turn.prompt_tokens - job.fetched
                pull = calibration.pull_s(missing, turn.prompt_tokens)
                self._observer.read(Direction.P2D, missing, pull)
                self._observer.served(job.outcome, job.followup, first_s - job.arrived)
            self._push(first_s + turn.output_tokens * calibration.decode_token_s, _ENDED, job)

    def _book_turn(self, job: _Job, ttft_s: float) -> None:
        result = self._result
        result.turns += 1
        result.outcomes[job.outcome] += 1
        result.ttft_s.append(ttft_s)
        if job.followup and job.decided:
            result.followups += 1
            result.hits += job.fetched + job.local > 0

    def _turn_ended(self, job: _Job) -> None:
        self._account()
        talk, turn = job.talk, job.turn
        tokens = turn.sequence_tokens
        self._active -= tokens
        self._running -= 1
        hold_s = self._setting.hold_s(turn)
        observer = self._observer
        if observer is not None:
            observer.ended(turn.prompt_tokens, turn.output_tokens)
        talk.ended_s, talk.index = self._now, talk.index + 1
        if hold_s > 0:
            talk.pin = pin = _Pin(tokens, self._now, self._now + hold_s)
            self._pinned += tokens
            self._push(pin.until, _LAPSED, pin)
            if observer is not None:
                observer.retained(tokens)
        else:
            self._free += tokens
            self._admit()
        if turn.gap_s is not None and talk.index < len(talk.turns):
            self._push(self._now + turn.gap_s, _ARRIVE, talk)

    def _lapsed(self, pin: _Pin) -> None:
        if pin.open:
            self._release(pin, End.LAPSED)

    def _release(self, pin: _Pin, end: End) -> None:
        if not pin.open:
            return
        self._account()
        pin.open = False
        self._pinned -= pin.tokens
        self._free += pin.tokens
        age_s = self._now - pin.since
        if self._now >= self._load.warmup_s:
            held = pin.tokens * age_s
            if end is End.READ:
                self._result.used_token_s += held
            else:
                self._result.wasted_token_s += held
        if self._observer is not None:
            self._observer.released(end, pin.tokens, age_s)
        self._admit()

    def _tick(self, _: None) -> None:
        assert self._observer is not None
        pool = self._deployment.pool_tokens
        self._observer.tick(self._now, (pool - self._free) / pool, len(self._waiting_decode), self._running)
