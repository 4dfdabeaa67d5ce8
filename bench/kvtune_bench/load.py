"""Replay recorded conversations against an OpenAI endpoint: closed loop, real text, turns timed on a given clock."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import aiohttp
import numpy as np
import orjson

from kvtune_bench import tokens
from kvtune_bench.traces import Plan, PlannedTurn
from kvtune_telemetry.clock import Clock

OUTCOME_HEADER = "X-Kvtune-Outcome"
"""The router's debug header: what became of the turn's reference (`kvtune_telemetry.vocabulary.Outcome`)."""
SESSION_HEADER = "X-Session-ID"
TOKEN_BYTES = tokens.TOKEN_BYTES
"""Bytes of ASCII that simulated engines take for one token. Every word below is as long; real tokenizers, too, make
about one token of each."""
FAILURE_PAUSE_S = 1.0
"""A conversation waits at least this long after a failed turn, so that a dead endpoint is not hammered."""

_WORDS = (
    b"the and for are but not you all any can had her was one our out day get has him his how man new now old see two "
    b"way who boy did its let put say she too use act add age ago aid aim air arm art ask bad bag bar bed big bit box "
    b"buy car cat cup cut dog dry due ear eat egg end eye far few fit fix fly fun gas got gun guy hat hit hot ice ill "
    b"job key kid lay led leg lie lot low map may met mix net nor off oil own pay pen per pop pot raw red rid row run "
    b"sad sea set sew shy sit six sky son sun tax tea ten tie tip top toy try "
)
_TABLE = np.frombuffer(_WORDS, dtype="<u4")
_LAST_WORD = b"end."


@dataclass(frozen=True, slots=True)
class TextModel:
    """How many tokens a chat template adds around the contents of a prompt's messages.

    A prompt of contents c1, c2, ... has sum(`header_tokens` + c + `trailer_tokens`) + `generation_tokens` tokens; an
    answer follows the generation header, so that the next prompt, which quotes it, begins with the same tokens.
    """

    header_tokens: int
    trailer_tokens: int
    generation_tokens: int

    @classmethod
    def simulated(cls) -> TextModel:
        """The simulated engines' template, measured on an empty message."""
        message = tokens.render_chat([{"role": "user", "content": ""}], add_generation_prompt=False)
        prompt = tokens.render_chat([{"role": "user", "content": ""}])
        return cls(len(message) // TOKEN_BYTES, 0, (len(prompt) - len(message)) // TOKEN_BYTES)


def simulated_answer(body: bytes) -> str:
    """What a correct simulated engine answers to this request, whichever way it came by the KV of the history."""
    request = orjson.loads(body)
    return tokens.expected_answer(tokens.render_chat(request["messages"]), request["max_tokens"])


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """What to play, where, and for how long. Times are seconds of the load's clock unless said otherwise."""

    base_url: str
    """Of the endpoint, without `/v1`."""
    model: str
    concurrency: int = 16
    """Conversations played at once; those parked in a long pause are not counted."""
    duration_s: float | None = None
    """No turn starts later than this; None: until the stop event."""
    drain_s: float = 120.0
    """Turns in flight at the end may take this long to finish; what is left is cut off and recorded as failed."""
    ramp_s: float = 60.0
    """The slots' first turns are spread over this time."""
    seed: int = 0
    no_identity_share: float = 0.2
    """Share of conversations sent without a session header, known by the content of their messages only."""
    mid_conversation: bool = True
    """Slots begin at a random turn of their first conversation, as a fleet found at work; else at its first turn."""
    park_after_s: float | None = 600.0
    """In a longer pause a conversation yields its slot to the next one, and comes back by itself; None: never."""
    request_timeout_wall_s: float = 120.0
    """Wall seconds after which a request counts as hung (a guard, not part of the model)."""
    run: str = "load"
    """Prefix of the session ids, so that two runs against one router stay apart."""
    api_key: str | None = None
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of each request, such as `{"ignore_eos": true}` for engines that may stop early."""

    def __post_init__(self) -> None:
        """Refuse settings that cannot be played."""
        if self.concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, got {self.concurrency}")
        if not 0 <= self.no_identity_share <= 1:
            raise ValueError(f"no_identity_share must be from 0 to 1, got {self.no_identity_share}")
        if self.duration_s is not None and not self.duration_s > 0:
            raise ValueError(f"duration_s must be positive, got {self.duration_s}")


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One turn as its client saw it. Times in seconds of the load's clock, counted from the start of the load."""

    conversation: int
    """Number of this play of a conversation, unique in the run."""
    turn: int
    """Index in the recorded conversation."""
    followup: bool
    """An earlier turn of this play was answered, so there could be something to reuse."""
    start_s: float
    ttft_s: float | None
    """From the request to the first text of the answer; None without one."""
    duration_s: float
    """From the request to the end of its answer or its failure."""
    prompt_tokens: int
    """As the engine counted, or as planned where it did not say."""
    output_tokens: int
    """As the engine counted, or from the text received."""
    keep_tokens: int
    """Leading tokens the prompt shares with the previous sequence of this play: the most that could be reused."""
    gap_s: float | None
    """Pause since the previous answer of this play ended, as it came about; None on the first turn."""
    next_gap_s: float | None
    """Pause planned after this turn; None: the conversation ends here."""
    status: int
    """HTTP status; 0 without a response."""
    answered: bool
    """A complete answer arrived."""
    outcome: str | None
    """From the router's debug header; None where it was absent."""
    session: bool
    """Sent with a session header."""
    rewritten: bool
    compacted: bool
    answer_sha: str | None
    """First 16 hex digits of the SHA-256 of the answer's text: equal prompts must have equal ones at temperature 0."""
    correct: bool | None
    """The answer is the one expected; None where nothing was expected (no `expect`) or none arrived."""
    error: str | None
    """What went wrong, without prompt text."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-safe fields."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TurnRecord:
        """The inverse of `as_dict`; unknown keys are ignored. Raises KeyError when a field is missing."""
        return cls(**{item.name: data[item.name] for item in fields(cls)})


def words(count: int, rng: np.random.Generator) -> bytes:
    """`count` tokens of plain English words, 4 bytes each; nothing in them needs escaping in JSON."""
    if count <= 0:
        return b""
    text: bytes = _TABLE[rng.integers(0, len(_TABLE), count, dtype=np.uint8)].tobytes()
    # No blank at the end: chat templates that strip contents would shorten the message.
    return text[:-TOKEN_BYTES] + _LAST_WORD


_HEADS = {role: f'{{"role":"{role}","content":"'.encode() for role in ("user", "assistant")}
_TAIL = b'"}'


@dataclass(slots=True)
class _Message:
    role: str
    escaped: bytes
    """The content as it stands between the quotes of a JSON string."""
    tokens: int
    plain: bool
    """Nothing is escaped: bytes are text."""

    @classmethod
    def of_answer(cls, text: str) -> _Message:
        escaped = orjson.dumps(text)[1:-1]
        raw = text.encode()
        return cls("assistant", escaped, -(-len(raw) // TOKEN_BYTES), escaped == raw and text.isascii())

    def cut(self, tokens: int) -> None:
        """Keep the first `tokens` tokens of the content."""
        if tokens >= self.tokens:
            return
        if self.plain:
            self.escaped = self.escaped[: tokens * TOKEN_BYTES]
        else:
            raw = orjson.loads(b'"' + self.escaped + b'"').encode()[: tokens * TOKEN_BYTES]
            self.escaped = orjson.dumps(raw.decode(errors="ignore"))[1:-1]
        self.tokens = tokens


class Transcript:
    """The messages of one conversation, kept encoded, with their length in tokens.

    A request's body is a join of bytes that exist already: a prompt of 100,000 tokens is 400 kB, and encoding it anew
    on every turn would cost more than all the rest of the load.
    """

    def __init__(self, model: TextModel, rng: np.random.Generator) -> None:
        self._model = model
        self._rng = rng
        self._messages: list[_Message] = []

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt these messages make."""
        around = self._model.header_tokens + self._model.trailer_tokens
        return sum(message.tokens + around for message in self._messages) + self._model.generation_tokens

    def extend(self, turn: PlannedTurn) -> int:
        """Make the messages those of `turn`'s prompt; returns how many leading tokens of the last sequence they keep.

        The kept prefix may end inside a message: that message is cut there. Text is added to it if it is the user's,
        else as a new message; a prompt that cannot be as short as planned has one word of new text.
        """
        kept = self._cut(turn.keep_tokens)
        around = self._model.header_tokens + self._model.trailer_tokens
        last = self._messages[-1] if self._messages else None
        if last is not None and last.role == "user":
            text = words(max(1, turn.prompt_tokens - self.prompt_tokens), self._rng)
            last.escaped += text
            last.tokens += len(text) // TOKEN_BYTES
        else:
            text = words(max(1, turn.prompt_tokens - self.prompt_tokens - around), self._rng)
            self._messages.append(_Message("user", text, len(text) // TOKEN_BYTES, True))
        return kept

    def _cut(self, keep: int) -> int:
        """Drop what lies beyond the first `keep` tokens; a message of which only the header would remain goes whole."""
        position = 0
        for index, message in enumerate(self._messages):
            start = position + self._model.header_tokens
            if keep <= start:
                del self._messages[index:]
                return min(keep, position)
            if keep < start + message.tokens:
                message.cut(keep - start)
                del self._messages[index + 1 :]
                return keep
            position = start + message.tokens + self._model.trailer_tokens
        return min(keep, position)

    def answer(self, text: str) -> None:
        """Append the engine's answer."""
        self._messages.append(_Message.of_answer(text))

    def body(self, head: bytes, max_tokens: int, tail: bytes) -> bytes:
        """The request: `head` opens the object before `messages`, `tail` closes it after `max_tokens`."""
        return b"".join((head, *self._parts(), b'],"max_tokens":%d' % max_tokens, tail))

    def _parts(self) -> Iterator[bytes]:
        for index, message in enumerate(self._messages):
            if index:
                yield b","
            yield _HEADS[message.role]
            yield message.escaped
            yield _TAIL


@dataclass(slots=True)
class _Answer:
    """What has come of a stream so far."""

    pieces: list[str] = field(default_factory=list)
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    done: bool = False
    error: str | None = None

    def take(self, line: bytes) -> bool:
        """Read one line of the event stream; True when it brought text."""
        if not line.startswith(b"data:"):
            return False
        payload = line[5:].strip()
        if payload == b"[DONE]":
            self.done = True
            return False
        try:
            event = orjson.loads(payload)
            if error := event.get("error"):
                self.error = f"error in the stream: {str(error)[:200]}"
                return False
            if usage := event.get("usage"):
                self.prompt_tokens = usage["prompt_tokens"]
                self.output_tokens = usage["completion_tokens"]
            choices = event.get("choices")
            text = choices[0].get("delta", {}).get("content") if choices else None
        except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError, IndexError) as error:
            self.error = f"unreadable event in the stream: {type(error).__name__}"
            return False
        if not text:
            return False
        self.pieces.append(text)
        return True


@dataclass(slots=True)
class _Play:
    """One conversation being played."""

    number: int
    plan: Plan
    turn: int
    transcript: Transcript
    session: str | None
    answered_any: bool = False
    ended_s: float | None = None
    """When the last answer (or failure) ended, on the load's clock; None before the first turn."""


class Load:
    """A fleet of clients playing `plans` in a closed loop. One instance plays once.

    Slot k begins with a conversation chosen by its length (as a look at a running fleet would find it), at a random
    turn, and goes on through the shuffled plans, over again when they are used up; each play has text and an identity
    of its own. A turn that fails is recorded, never raised.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        settings: LoadSettings,
        *,
        clock: Clock,
        on_turn: Callable[[TurnRecord], None] | None = None,
        text_model: TextModel | None = None,
        expect: Callable[[bytes], str] | None = None,
    ) -> None:
        """`expect` tells a request's right answer, such as `simulated_answer`; without it no answer is judged."""
        if not plans:
            raise ValueError("no conversations to play")
        self._plans = plans
        self._settings = settings
        self._clock = clock
        self._on_turn = on_turn
        self._text_model = text_model if text_model is not None else TextModel.simulated()
        self._expect = expect
        self._rng = random.Random(settings.seed)
        self._order: list[int] = []
        self._played = 0
        self._stopping = False
        self._began_s = 0.0
        self._in_flight: set[asyncio.Task[None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._fault: BaseException | None = None
        self._faulted = asyncio.Event()
        self._session: aiohttp.ClientSession | None = None
        self._head = b'{"model":' + orjson.dumps(settings.model) + b',"messages":['
        rest = {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}, **settings.extra_body}
        self._tail = b"," + orjson.dumps(rest)[1:]
        self._url = settings.base_url.rstrip("/") + "/v1/chat/completions"
        self.records: list[TurnRecord] = []
        """Turns in the order they ended; complete when `run` returns."""

    @property
    def in_flight(self) -> int:
        """Turns being answered now."""
        return len(self._in_flight)

    async def run(self, stop: asyncio.Event | None = None) -> list[TurnRecord]:
        """Play until the duration is over or `stop` is set, let turns in flight finish, and return all records.

        When cancelled, everything is cut off at once. Raises ValueError if neither an end nor a stop event is given,
        and what `on_turn` raised, if it did.
        """
        settings = self._settings
        if stop is None and settings.duration_s is None:
            raise ValueError("give a duration_s or a stop event, or the load never ends")
        self._began_s = self._clock.now()
        timeout = aiohttp.ClientTimeout(total=settings.request_timeout_wall_s)
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=timeout, auto_decompress=False
        ) as session:
            self._session = session
            try:
                for slot, play in enumerate(self._first_plays()):
                    delay = settings.ramp_s * (slot + self._rng.random()) / settings.concurrency
                    self._spawn(self._slot(play, delay))
                await self._until_end(stop)
                self._stopping = True
                for task in self._tasks - self._in_flight:
                    task.cancel()
                await self._drain()
            finally:
                # Also reached when cancelled: no request may outlive its session.
                left = list(self._tasks)
                for task in left:
                    task.cancel()
                await asyncio.gather(*left, return_exceptions=True)
        if self._fault is not None:
            raise self._fault
        return self.records

    async def _until_end(self, stop: asyncio.Event | None) -> None:
        waits: set[asyncio.Task[Any]] = {asyncio.create_task(self._faulted.wait())}
        if stop is not None:
            waits.add(asyncio.create_task(stop.wait()))
        if self._settings.duration_s is not None:
            waits.add(asyncio.create_task(self._clock.sleep(self._settings.duration_s)))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()

    async def _drain(self) -> None:
        if not self._tasks:
            return
        limit = asyncio.create_task(self._clock.sleep(self._settings.drain_s))
        try:
            while self._tasks and not limit.done():
                await asyncio.wait({*self._tasks, limit}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            limit.cancel()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            # A failed turn never comes here; a slot that died unseen would leave a load that lies.
            self._fault = self._fault or fault
            self._faulted.set()

    # --- which conversation next ---

    def _first_plays(self) -> list[_Play]:
        plays = []
        weights = [len(plan.turns) for plan in self._plans]
        left = list(range(len(self._plans)))
        for _ in range(self._settings.concurrency):
            if not self._settings.mid_conversation:
                plays.append(self._next_play())
                continue
            if not left:
                left = list(range(len(self._plans)))
            index = self._rng.choices(left, [weights[candidate] for candidate in left])[0]
            left.remove(index)
            # At the latest at the last turn but one, so that every slot has a follow-up to show.
            turn = self._rng.randrange(max(1, len(self._plans[index].turns) - 1))
            plays.append(self._new_play(self._plans[index], turn))
        return plays

    def _next_play(self) -> _Play:
        if not self._order:
            self._order = list(range(len(self._plans)))
            self._rng.shuffle(self._order)
        return self._new_play(self._plans[self._order.pop()], 0)

    def _new_play(self, plan: Plan, turn: int) -> _Play:
        number = self._played
        self._played += 1
        known = self._rng.random() >= self._settings.no_identity_share
        rng = np.random.Generator(np.random.PCG64([self._settings.seed & 0xFFFFFFFF, number]))
        return _Play(
            number=number,
            plan=plan,
            turn=turn,
            transcript=Transcript(self._text_model, rng),
            session=f"{self._settings.run}-{number}" if known else None,
        )

    # --- playing ---

    async def _slot(self, play: _Play, delay_s: float) -> None:
        await self._clock.sleep(delay_s)
        while not self._stopping:
            await self._play(play, may_park=True)
            play = self._next_play()

    async def _resume(self, play: _Play) -> None:
        await self._play(play, may_park=False)

    async def _play(self, play: _Play, *, may_park: bool) -> None:
        """Play on from `play.turn`, to the end of the conversation or to a pause in which it is parked."""
        park_after = self._settings.park_after_s
        while not self._stopping:
            # A parked conversation arrives here with its pause still ahead; its text is made when it is over.
            if play.ended_s is not None:
                gap = play.plan.turns[play.turn - 1].gap_s or 0.0
                left = play.ended_s + gap - self._clock.now()
                if may_park and park_after is not None and left > park_after:
                    self._spawn(self._resume(play))
                    return
                await self._clock.sleep(left)
            planned = play.plan.turns[play.turn]
            kept = play.transcript.extend(planned)
            await self._one_turn(play, planned, kept)
            play.turn += 1
            if play.turn >= len(play.plan.turns):
                return

    async def _one_turn(self, play: _Play, planned: PlannedTurn, kept: int) -> None:
        transcript = play.transcript
        body = transcript.body(self._head, planned.output_tokens, self._tail)
        headers = {"Content-Type": "application/json"}
        if play.session is not None:
            headers[SESSION_HEADER] = play.session
        if self._settings.api_key is not None:
            headers["Authorization"] = f"Bearer {self._settings.api_key}"
        task = asyncio.current_task()
        assert task is not None
        self._in_flight.add(task)
        answer = _Answer()
        status, outcome, error = 0, None, None
        first: float | None = None
        start = self._clock.now()
        try:
            assert self._session is not None
            async with self._session.post(self._url, data=body, headers=headers) as response:
                status = response.status
                outcome = response.headers.get(OUTCOME_HEADER)
                if status == 200:
                    first = await self._read(response, answer)
                else:
                    text = (await response.content.read(400)).decode(errors="replace")
                    error = f"HTTP {status}: {text}"
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as caught:
            error = f"{type(caught).__name__}: {caught}"[:300]
        except asyncio.CancelledError:
            error = "cut off at the end of the load"
            raise
        finally:
            # Recorded even when cut off: a turn that was sent is a turn the router books.
            self._in_flight.discard(task)
            end = self._clock.now()
            error = error or answer.error
            if error is None and not answer.done:
                error = "the stream ended before its end mark"
            text = "".join(answer.pieces)
            record = TurnRecord(
                conversation=play.number,
                turn=play.turn,
                followup=play.answered_any,
                start_s=start - self._began_s,
                ttft_s=None if first is None else first - start,
                duration_s=end - start,
                prompt_tokens=transcript.prompt_tokens if answer.prompt_tokens is None else answer.prompt_tokens,
                output_tokens=-(-len(text.encode()) // TOKEN_BYTES)
                if answer.output_tokens is None
                else answer.output_tokens,
                keep_tokens=kept,
                gap_s=None if play.ended_s is None else start - play.ended_s,
                next_gap_s=planned.gap_s,
                status=status,
                answered=error is None,
                outcome=outcome,
                session=play.session is not None,
                rewritten=planned.rewritten,
                compacted=planned.compacted,
                answer_sha=hashlib.sha256(text.encode()).hexdigest()[:16] if text else None,
                correct=text == self._expect(body) if self._expect is not None and error is None else None,
                error=error,
            )
            self.records.append(record)
            if self._on_turn is not None:
                self._on_turn(record)
        play.ended_s = end
        if record.answered:
            play.answered_any = True
            transcript.answer(text)
        elif not self._stopping:
            await self._clock.sleep(FAILURE_PAUSE_S)

    async def _read(self, response: aiohttp.ClientResponse, answer: _Answer) -> float | None:
        """Read the event stream to its end; returns when the first text came (clock's seconds)."""
        first: float | None = None
        rest = b""
        async for chunk in response.content.iter_any():
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                if answer.take(line) and first is None:
                    first = self._clock.now()
        answer.take(rest)
        return first


async def replay(
    plans: Sequence[Plan],
    settings: LoadSettings,
    *,
    clock: Clock,
    on_turn: Callable[[TurnRecord], None] | None = None,
    stop: asyncio.Event | None = None,
    text_model: TextModel | None = None,
    expect: Callable[[bytes], str] | None = None,
) -> list[TurnRecord]:
    """Play `plans` once (`Load`); returns a record of every turn that was sent."""
    load = Load(plans, settings, clock=clock, on_turn=on_turn, text_model=text_model, expect=expect)
    return await load.run(stop)
