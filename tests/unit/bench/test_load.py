"""The load: prompts of exactly the planned length, honest records, and an end that leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import orjson
import pytest
from aiohttp import web

from kvtune_bench import tokens
from kvtune_bench.load import (
    Load,
    LoadSettings,
    TextModel,
    Transcript,
    TurnRecord,
    replay,
    simulated_answer,
    words,
)
from kvtune_bench.traces import Conversation, Plan, PlannedTurn, TraceTurn, load_trace, plan
from kvtune_telemetry.clock import ScaledClock

SCALE = 200.0


def conversation(number: int = 0, length: int = 4, gap: float = 2.0) -> Plan:
    """Prompts of 400, 500, ... tokens with answers of 20, each keeping the whole history."""
    recorded = [TraceTurn(400 + 100 * index, 20, gap, 420 + 100 * index) for index in range(length)]
    recorded[-1] = replace(recorded[-1], gap_s=None, reusable_next=0)
    return plan([Conversation(number, tuple(recorded))], context_limit=8000)[0]


@dataclass
class Endpoint:
    """A stand-in for the router: answers as the simulated engines do, and notes what it was sent."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    answer: Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]] | None = None
    outcome: str | None = None
    usage: bool = True
    delay_s: float = 0.0

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if self.answer is not None:
            return await self.answer(request, body)
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        return await self.stream(request, body)

    async def stream(self, request: web.Request, body: dict[str, Any], text: str | None = None) -> web.StreamResponse:
        prompt = tokens.render_chat(body["messages"])
        if text is None:
            text = tokens.expected_answer(prompt, body["max_tokens"])
        response = web.StreamResponse(headers={"X-Kvtune-Outcome": self.outcome} if self.outcome else {})
        await response.prepare(request)
        half = len(text) // 2
        deltas = ({"role": "assistant", "content": ""}, {"content": text[:half]}, {"content": text[half:]})
        events: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
        if self.usage:
            counts = {"prompt_tokens": len(prompt) // 4, "completion_tokens": body["max_tokens"]}
            events.append({"choices": [], "usage": counts})
        data = b"".join(b"data: " + orjson.dumps(event) + b"\n\n" for event in events) + b"data: [DONE]\n\n"
        # Cut at odd places: a chunk is not an event.
        for start in range(0, len(data), 97):
            await response.write(data[start : start + 97])
        return response


@asynccontextmanager
async def serving(endpoint: Endpoint) -> AsyncIterator[Endpoint]:
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/chat/completions", endpoint.chat)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    endpoint.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield endpoint
    finally:
        await runner.cleanup()


def settings(endpoint: Endpoint, **changes: Any) -> LoadSettings:
    base = LoadSettings(
        endpoint.url, "sim", concurrency=1, duration_s=60.0, ramp_s=0.0, no_identity_share=0.0, mid_conversation=False
    )
    return replace(base, **changes)


def by_play(records: list[TurnRecord]) -> dict[int, list[TurnRecord]]:
    plays: dict[int, list[TurnRecord]] = {}
    for record in records:
        plays.setdefault(record.conversation, []).append(record)
    return plays


def test_words_are_four_bytes_and_need_no_escaping() -> None:
    text = words(1000, np.random.default_rng(1))
    assert len(text) == 4000
    assert orjson.dumps(text.decode()) == b'"' + text + b'"'
    assert text.strip() == text
    assert words(0, np.random.default_rng(1)) == b""


def test_the_text_model_is_that_of_the_simulated_tokenizer() -> None:
    model = TextModel.simulated()
    messages = [{"role": "user", "content": "abcdefgh"}, {"role": "assistant", "content": "abcd"}]
    counted = sum(model.header_tokens + len(m["content"]) // 4 + model.trailer_tokens for m in messages)
    assert len(tokens.render_chat(messages)) // 4 == counted + model.generation_tokens


def test_transcripts_of_the_sample_have_exactly_the_planned_tokens() -> None:
    """Every prompt is as long as planned, and begins as the plan says with the sequence before it, token for token."""
    plans = plan(load_trace(), context_limit=16_384)
    rewritten = compacted = 0
    for planned in sorted(plans, key=lambda one: len(one.turns))[::12]:
        transcript = Transcript(TextModel.simulated(), np.random.default_rng(3))
        sequence = b""
        for turn in planned.turns[:60]:
            kept = transcript.extend(turn)
            body = orjson.loads(transcript.body(b'{"messages":[', turn.output_tokens, b"}"))
            prompt = tokens.render_chat(body["messages"])
            assert len(prompt) // 4 == turn.prompt_tokens == transcript.prompt_tokens
            assert body["max_tokens"] == turn.output_tokens
            # A cut that falls on a message's header takes the header, too: one token less.
            assert turn.keep_tokens - 1 <= kept <= turn.keep_tokens
            assert prompt[: kept * 4] == sequence[: kept * 4]
            answer = tokens.expected_answer(prompt, turn.output_tokens)
            transcript.answer(answer)
            sequence = prompt + answer.encode()
            rewritten += turn.rewritten
            compacted += turn.compacted
    assert rewritten > 10
    assert compacted > 10


def test_answers_that_need_escaping_stay_what_they_were() -> None:
    transcript = Transcript(TextModel.simulated(), np.random.default_rng(3))
    answer = 'say "hi"\n\\ and é ünd 漢字'
    turn = PlannedTurn(100, 10, 0, 100, 1.0, rewritten=False, compacted=False)
    transcript.extend(turn)
    transcript.answer(answer)
    transcript.extend(PlannedTurn(150, 10, 110, 40, 1.0, rewritten=False, compacted=False))
    body = orjson.loads(transcript.body(b'{"messages":[', 10, b"}"))
    assert body["messages"][1] == {"role": "assistant", "content": answer}
    assert len(tokens.render_chat(body["messages"])) // 4 == transcript.prompt_tokens == 150
    # Cut inside the answer: still valid JSON, still the same beginning.
    transcript.extend(PlannedTurn(150, 10, 103, 47, 1.0, rewritten=True, compacted=False))
    cut = orjson.loads(transcript.body(b'{"messages":[', 10, b"}"))["messages"][1]["content"]
    assert cut == answer[: len(cut)]
    assert len(cut) == 12


async def test_plays_a_conversation_as_planned_and_records_it() -> None:
    async with serving(Endpoint(outcome="hit")) as endpoint:
        clock = ScaledClock.starting_now(SCALE)
        seen: list[TurnRecord] = []
        stop = asyncio.Event()

        def on_turn(record: TurnRecord) -> None:
            seen.append(record)
            if len(seen) == 4:
                stop.set()

        records = await replay(
            [conversation()],
            settings(endpoint, duration_s=None),
            clock=clock,
            on_turn=on_turn,
            stop=stop,
            expect=simulated_answer,
        )
    assert records == seen
    first = by_play(records)[0]
    assert [(r.turn, r.followup, r.prompt_tokens, r.keep_tokens) for r in first] == [
        (0, False, 400, 0),
        (1, True, 500, 420),
        (2, True, 600, 520),
        (3, True, 700, 620),
    ]
    assert [r.next_gap_s for r in first] == [2.0, 2.0, 2.0, None]
    assert first[0].gap_s is None
    assert all(r.gap_s is not None and r.gap_s >= 2.0 for r in first[1:])
    assert all(r.answered and r.status == 200 and r.error is None and r.outcome == "hit" for r in first)
    assert all(r.correct is True for r in first)
    assert all(r.ttft_s is not None and 0 < r.ttft_s <= r.duration_s for r in first)
    assert [r.output_tokens for r in first] == [20, 20, 20, 20]
    assert [message["role"] for message in endpoint.bodies[1]["messages"]] == ["user", "assistant", "user"]
    assert endpoint.bodies[0]["stream"] is True
    assert endpoint.bodies[0]["model"] == "sim"
    assert {headers["X-Session-ID"] for headers in endpoint.headers[:4]} == {"load-0"}
    assert [TurnRecord.from_dict(orjson.loads(orjson.dumps(r.as_dict()))) for r in records] == records


async def test_a_share_of_conversations_carries_no_identity() -> None:
    async with serving(Endpoint()) as endpoint:
        records = await replay(
            [conversation(length=2, gap=0.5)],
            settings(endpoint, concurrency=8, duration_s=60.0, no_identity_share=0.5, seed=4),
            clock=ScaledClock.starting_now(SCALE),
        )
    plays = by_play(records)
    anonymous = sum(not turns[0].session for turns in plays.values())
    assert 0.3 < anonymous / len(plays) < 0.7
    assert all(len({r.session for r in turns}) == 1 for turns in plays.values())
    named = [headers for headers in endpoint.headers if "X-Session-ID" in headers]
    assert len(named) == sum(r.session for r in records)
    assert len({headers["X-Session-ID"] for headers in named}) == len(plays) - anonymous


async def test_slots_start_in_the_middle_and_spread_out() -> None:
    plans = [conversation(number, length=10, gap=50.0) for number in range(12)]
    async with serving(Endpoint()) as endpoint:
        load = Load(
            plans,
            settings(endpoint, concurrency=8, duration_s=40.0, ramp_s=30.0, mid_conversation=True),
            clock=ScaledClock.starting_now(SCALE / 4),
        )
        records = await load.run()
    assert len(records) == 8
    assert len({r.turn for r in records}) > 3
    assert all(r.turn <= 8 and not r.followup and r.keep_tokens == 0 for r in records)
    assert all(30 * k / 8 <= r.start_s for k, r in enumerate(sorted(records, key=lambda r: r.conversation)))
    assert load.in_flight == 0


async def test_equal_seeds_send_equal_requests() -> None:
    sent = []
    for _ in range(2):
        async with serving(Endpoint()) as endpoint:
            stop = asyncio.Event()
            await replay(
                [conversation(number) for number in range(3)],
                settings(endpoint, duration_s=None, seed=9, mid_conversation=True),
                clock=ScaledClock.starting_now(SCALE),
                stop=stop,
                on_turn=lambda r, stop=stop: stop.set() if r.conversation == 2 else None,
            )
            sent.append(endpoint.bodies)
    shorter = min(map(len, sent))
    assert shorter >= 5
    assert sent[0][:shorter] == sent[1][:shorter]


async def test_a_long_pause_yields_the_slot_and_ends() -> None:
    recorded = Conversation(0, (TraceTurn(400, 20, 30.0, 420), TraceTurn(500, 20, None, 0)))
    async with serving(Endpoint()) as endpoint:
        records = await replay(
            [plan([recorded], context_limit=8000)[0]],
            settings(endpoint, duration_s=34.0, park_after_s=10.0),
            clock=ScaledClock.starting_now(SCALE / 4),
        )
    plays = by_play(records)
    assert len(plays) > 3  # others took the slot meanwhile
    assert [r.turn for r in plays[0]] == [0, 1]
    assert plays[0][1].gap_s == pytest.approx(30.0, abs=3.0)


@pytest.mark.parametrize("status", [400, 500, 503])
async def test_http_errors_are_recorded_and_the_conversation_goes_on(status: int) -> None:
    endpoint = Endpoint()

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if len(endpoint.bodies) == 2:
            return web.json_response({"error": "no"}, status=status)
        return await endpoint.stream(request, body)

    endpoint.answer = answer
    async with serving(endpoint):
        records = await replay(
            [conversation()], settings(endpoint, duration_s=25.0), clock=ScaledClock.starting_now(SCALE / 4)
        )
    first = by_play(records)[0]
    assert [(r.status, r.answered) for r in first] == [(200, True), (status, False), (200, True), (200, True)]
    assert first[1].error == f'HTTP {status}: {{"error": "no"}}'
    assert first[1].ttft_s is None
    assert first[1].answer_sha is None
    # The prompt after it is as long as planned, although an answer is missing.
    assert [r.prompt_tokens for r in first] == [400, 500, 600, 700]


async def test_broken_streams_and_dead_endpoints_are_recorded() -> None:
    endpoint = Endpoint()

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        turn = len(endpoint.bodies)
        response = web.StreamResponse()
        await response.prepare(request)
        if turn == 1:
            await response.write(b'data: {"choices":[{"delta":{"content":"half"}}]}\n\n')
        elif turn == 2:
            await response.write(b'data: {"error":{"message":"engine died"}}\n\ndata: [DONE]\n\n')
        elif turn == 3:
            await response.write(b"data: {nonsense\n\ndata: [DONE]\n\n")
        else:
            await response.write(b'data: {"choices":[{"delta":{"content":"half"}}]}\n\n')
            assert request.transport is not None
            request.transport.abort()
        return response

    endpoint.answer = answer
    async with serving(endpoint):
        records = await replay(
            [conversation()], settings(endpoint, duration_s=20.0), clock=ScaledClock.starting_now(SCALE / 4)
        )
    first = by_play(records)[0]
    assert [r.answered for r in first] == [False] * 4
    assert not any(r.followup for r in first)
    assert first[0].error == "the stream ended before its end mark"
    assert first[0].ttft_s is not None
    assert "engine died" in (first[1].error or "")
    assert "unreadable event" in (first[2].error or "")
    assert first[3].status == 200
    assert first[3].error
    dead = await replay([conversation()], settings(endpoint, duration_s=5.0), clock=ScaledClock.starting_now(SCALE / 4))
    assert dead
    assert all(r.status == 0 and not r.answered and "Connect" in (r.error or "") for r in dead)
    assert len(dead) <= 5  # a pause after each failure


async def test_a_wrong_answer_is_seen() -> None:
    endpoint = Endpoint()

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await endpoint.stream(request, body, "not what was asked for..")

    endpoint.answer = answer
    async with serving(endpoint):
        records = await replay(
            [conversation()],
            settings(endpoint, duration_s=1.5),
            clock=ScaledClock.starting_now(SCALE / 4),
            expect=simulated_answer,
        )
    assert records[0].answered
    assert records[0].correct is False


async def test_without_usage_the_planned_and_received_tokens_are_recorded() -> None:
    async with serving(Endpoint(usage=False)) as endpoint:
        records = await replay(
            [conversation()], settings(endpoint, duration_s=1.5), clock=ScaledClock.starting_now(SCALE / 4)
        )
    assert (records[0].prompt_tokens, records[0].output_tokens) == (400, 20)


async def test_turns_in_flight_at_the_end_may_finish() -> None:
    async with serving(Endpoint(delay_s=0.2)) as endpoint:
        records = await replay(
            [conversation()], settings(endpoint, duration_s=2.0), clock=ScaledClock.starting_now(SCALE / 4)
        )
    assert [r.answered for r in records] == [True]
    assert len(endpoint.bodies) == 1


async def test_what_does_not_finish_is_cut_off_and_recorded() -> None:
    async with serving(Endpoint(delay_s=1.0)) as endpoint:
        load = Load(
            [conversation()],
            settings(endpoint, concurrency=3, duration_s=2.0, drain_s=2.0),
            clock=ScaledClock.starting_now(SCALE / 4),
        )
        records = await load.run()
        assert [(r.answered, r.error) for r in records] == [(False, "cut off at the end of the load")] * 3
        assert load.in_flight == 0


async def test_cancelling_leaves_no_task_behind() -> None:
    async with serving(Endpoint(delay_s=1.0)) as endpoint:
        before = asyncio.all_tasks()
        load = Load([conversation()], settings(endpoint, concurrency=3), clock=ScaledClock.starting_now(SCALE / 4))
        task = asyncio.create_task(load.run())
        while len(endpoint.bodies) < 3:  # noqa: ASYNC110 - the endpoint has no event to wait for
            await asyncio.sleep(0.01)
        assert load.in_flight == 3
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert load.in_flight == 0
        assert {one.get_coro().__qualname__ for one in asyncio.all_tasks() - before if "Load" in repr(one)} == set()


async def test_a_fault_of_the_caller_is_not_swallowed() -> None:
    def on_turn(record: TurnRecord) -> None:
        raise RuntimeError("disk full")

    async with serving(Endpoint()) as endpoint:
        with pytest.raises(RuntimeError, match="disk full"):
            await replay([conversation()], settings(endpoint), clock=ScaledClock.starting_now(SCALE), on_turn=on_turn)


@pytest.mark.parametrize("changes", [{"concurrency": 0}, {"no_identity_share": 1.5}, {"duration_s": 0.0}])
def test_refuses_settings_that_cannot_be_played(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        LoadSettings("http://x", "m", **changes)


async def test_refuses_to_run_for_ever_or_without_plans() -> None:
    clock = ScaledClock.starting_now(SCALE)
    with pytest.raises(ValueError, match="never ends"):
        await Load([conversation()], LoadSettings("http://x", "m"), clock=clock).run()
    with pytest.raises(ValueError, match="no conversations"):
        Load([], LoadSettings("http://x", "m"), clock=clock)
