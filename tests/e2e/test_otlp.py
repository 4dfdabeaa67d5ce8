"""Spans of a router process, over the wire to an OTLP receiver: one trace a turn, nothing private in it."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson
import pytest
import pytest_asyncio
from aiohttp import web
from opentelemetry.trace import SpanKind
from opentelemetry.trace.status import StatusCode

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

MODEL = "qwen3-32b"
KEY = "sk-very-secret-key-0123456789"
SESSION = "patient-4711-session"
PROMPT = "confidential-question-about-my-diagnosis "
SERVER, CLIENT = SpanKind.SERVER.value + 1, SpanKind.CLIENT.value + 1
"""On the wire 0 is `unspecified`, so that the API's numbers are one less."""
HOP_BY_HOP = ("connection", "content-length", "host", "keep-alive", "transfer-encoding")


@dataclass
class Tap:
    """A proxy before an engine that remembers the trace headers of what passes."""

    engine: str
    session: aiohttp.ClientSession
    url: str = ""
    seen: list[Mapping[str, str]] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
        if request.method == "POST":
            self.seen.append({name.lower(): value for name, value in request.headers.items()})
        async with self.session.request(
            request.method, self.engine + request.path, data=await request.read(), headers=headers
        ) as answer:
            kept = {name: answer.headers[name] for name in ("Content-Type", "X-Request-Id") if name in answer.headers}
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response


@dataclass
class Pair:
    """Two simulated engines, each behind a tap."""

    processes: Any
    session: aiohttp.ClientSession
    prefill: Tap
    decode: Tap
    routers: int = 0

    async def router(self, env: tuple[str, ...], *more: str) -> Any:
        """A router process in front of them, and the name of its log."""
        self.routers += 1
        name = f"router-{self.routers}"
        child = await self.processes.start(
            name, "router", "--port", "0", "--metrics-port", "0", "--prefill", self.prefill.url,
            "--decode", self.decode.url, "--log-format", "json", "--outcome-header", *more, env=env,
        )  # fmt: skip
        return child, Talk(orjson.loads(child.ready)["ready"], self.session), self.processes.log(name)


@dataclass
class Talk:
    """A client in one conversation after another."""

    url: str
    session: aiohttp.ClientSession
    messages: list[dict[str, str]] = field(default_factory=list)

    async def turn(self, *, stream: bool = True, traceparent: str | None = None, **more: Any) -> aiohttp.ClientResponse:
        """One turn of the conversation, read to its end."""
        self.messages.append({"role": "user", "content": PROMPT * 40})
        headers = {"X-Session-ID": SESSION, "Authorization": f"Bearer {KEY}"}
        if traceparent is not None:
            headers |= {"traceparent": traceparent, "tracestate": "vendor=kept"}
        body = {"model": MODEL, "messages": self.messages, "max_tokens": 8, "stream": stream, **more}
        async with self.session.post(f"{self.url}/v1/chat/completions", json=body, headers=headers) as answer:
            raw = await answer.read()
        if answer.status == 200:
            self.messages.append({"role": "assistant", "content": _text(raw, stream)})
        return answer


def _text(raw: bytes, stream: bool) -> str:
    if not stream:
        text: str = orjson.loads(raw)["choices"][0]["message"]["content"]
        return text
    assert raw.endswith(b"data: [DONE]\n\n")
    events = [orjson.loads(line[6:]) for line in raw.splitlines() if line.startswith(b"data: {")]
    return "".join(e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"])


def new_parent(flags: str = "01") -> tuple[str, str, str]:
    """A client's traceparent with its trace and span id."""
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    return f"00-{trace_id}-{span_id}-{flags}", trace_id, span_id


def log_lines(log: Any, **wanted: Any) -> list[dict[str, Any]]:
    """The JSON lines of a log that have these values. Every whole line must be JSON."""
    text = log.read_text()
    lines = [orjson.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return [line for line in lines if wanted.items() <= line.items()]


async def turn_line(wait_until: Any, log: Any, trace_id: str) -> dict[str, Any]:
    """The one log line of a turn, which may be written just after its answer."""

    async def written() -> list[dict[str, Any]]:
        return log_lines(log, event="turn", trace_id=trace_id)

    lines = await wait_until(written, f"the log line of trace {trace_id}")
    assert len(lines) == 1
    line: dict[str, Any] = lines[0]
    return line


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(processes: Any, session: aiohttp.ClientSession) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        taps = []
        for role, more in (("prefill", ("--no-prefix-caching",)), ("decode", ())):
            _, url = await processes.engine(role, "--instant", *more)
            tap = Tap(url, session)
            app = web.Application(client_max_size=2**26)
            app.router.add_route("*", "/{path:.*}", tap.handle)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            tap.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            taps.append(tap)
        yield Pair(processes, session, taps[0], taps[1])


async def test_one_trace_a_turn_that_continues_the_clients(pair: Pair, otlp: Any, wait_until: Any) -> None:
    receiver = await otlp()
    _, talk, log = await pair.router(receiver.environment())
    pair.prefill.seen.clear()
    pair.decode.seen.clear()
    parents = []
    for number in range(3):
        parent, trace_id, span_id = new_parent()
        answer = await talk.turn(stream=number != 1, traceparent=parent)
        assert answer.status == 200
        parents.append((trace_id, span_id, answer.headers["X-Kvtune-Outcome"]))
    assert [outcome for *_, outcome in parents] == ["first", "hit", "hit"]

    conversations = set()
    for number, (trace_id, span_id, outcome) in enumerate(parents):
        spans = await receiver.whole_trace(trace_id)
        assert set(spans) == {"kvtune.turn", "kvtune.prefill", "kvtune.decode"}
        turn = spans["kvtune.turn"]
        assert (turn.parent_id, turn.kind, turn.status) == (span_id, SERVER, StatusCode.UNSET.value)
        assert turn.resource["service.name"] == "kvtune-router"
        told = turn.attributes
        assert told["gen_ai.operation.name"] == "chat" and told["gen_ai.request.model"] == MODEL
        assert told["kvtune.outcome"] == outcome and told["kvtune.turn"] == ("followup" if number else "first")
        assert told["http.response.status_code"] == 200
        assert told["kvtune.decision"] == ("fetch" if number else "recompute") and told["kvtune.reason"] == "none"
        assert told["gen_ai.usage.input_tokens"] > 400
        reused = told.get("gen_ai.usage.cache_read.input_tokens", 0)
        assert 0 < reused < told["gen_ai.usage.input_tokens"] if number else reused == 0
        assert told["kvtune.ttft_s"] > 0
        for phase in ("route", "prefill", "handoff", "first_token"):
            assert told[f"kvtune.phase.{phase}_s"] >= 0
        assert ("kvtune.reference.age_s" in told) == (number > 0)
        conversations.add(told["gen_ai.conversation.id"])
        for role, tap in (("prefill", pair.prefill), ("decode", pair.decode)):
            leg = spans[f"kvtune.{role}"]
            address = tap.url.removeprefix("http://")
            assert (leg.parent_id, leg.kind) == (turn.span_id, CLIENT)
            assert leg.attributes == {
                "server.address": address, "kvtune.engine.role": role, "kvtune.result": "ok"
            }  # fmt: skip
            assert told[f"kvtune.{role}.engine"] == address
            # What the engine adds to the trace hangs below the router's leg.
            version, sent_trace, sent_span, flags = tap.seen[number]["traceparent"].split("-")
            assert (version, sent_trace, sent_span) == ("00", trace_id, leg.span_id)
            assert int(flags, 16) & 1 and tap.seen[number]["tracestate"] == "vendor=kept"
        line = await turn_line(wait_until, log, trace_id)
        assert (line["outcome"], line["status"]) == (outcome, 200)
    assert len(conversations) == 1, "the hash of a conversation's id joins its turns"


async def test_a_turn_without_a_parent_begins_a_trace(pair: Pair, otlp: Any, wait_until: Any) -> None:
    receiver = await otlp()
    _, talk, log = await pair.router(receiver.environment())
    for _ in range(2):
        assert (await talk.turn()).status == 200

    async def both() -> bool:
        return [span.name for span in receiver.spans].count("kvtune.turn") == 2

    await wait_until(both, "two traces")
    turns = [span for span in receiver.spans if span.name == "kvtune.turn"]
    assert all(turn.parent_id == "" for turn in turns) and len({turn.trace_id for turn in turns}) == 2
    for turn in turns:
        assert (await turn_line(wait_until, log, turn.trace_id))["outcome"] == turn.attributes["kvtune.outcome"]
        assert {span.parent_id for span in receiver.trace(turn.trace_id)} == {"", turn.span_id}


async def test_what_a_client_does_not_sample_is_passed_on_and_not_recorded(pair: Pair, otlp: Any) -> None:
    receiver = await otlp()
    _, talk, _ = await pair.router(receiver.environment())
    pair.prefill.seen.clear()
    quiet, quiet_id, _ = new_parent(flags="00")
    loud, loud_id, _ = new_parent()
    assert (await talk.turn(traceparent=quiet)).status == 200
    assert (await talk.turn(traceparent=loud)).status == 200
    await receiver.whole_trace(loud_id)
    assert not receiver.trace(quiet_id)
    _, trace_id, _, flags = pair.prefill.seen[0]["traceparent"].split("-")
    assert trace_id == quiet_id and not int(flags, 16) & 1


async def test_a_refused_turn_is_an_error_and_gives_nothing_away(pair: Pair, otlp: Any, wait_until: Any) -> None:
    receiver = await otlp()
    _, talk, log = await pair.router(receiver.environment())
    assert (await talk.turn()).status == 200
    parent, trace_id, _ = new_parent()
    assert (await talk.turn(traceparent=parent, max_tokens=-1)).status == 400
    spans = await receiver.whole_trace(trace_id)
    turn = spans["kvtune.turn"]
    assert turn.status == StatusCode.ERROR.value
    assert turn.attributes["http.response.status_code"] == 400 and turn.attributes["kvtune.outcome"] == "error"
    # Prefill makes one token whatever the limit; decode minds it.
    assert spans["kvtune.decode"].attributes["kvtune.result"] == "refused"
    line = await turn_line(wait_until, log, trace_id)
    assert line["status"] == 400


async def test_no_prompt_no_session_id_and_no_key_leaves_the_router(pair: Pair, otlp: Any, wait_until: Any) -> None:
    receiver = await otlp()
    _, talk, log = await pair.router(receiver.environment(), "--log-level", "TRACE")
    answers = []
    for stream in (True, False, True):
        parent, trace_id, _ = new_parent()
        answer = await talk.turn(stream=stream, traceparent=parent, kv_transfer_params={"do_remote_prefill": True})
        assert answer.status == 200
        answers.append(talk.messages[-1]["content"])
    await receiver.whole_trace(trace_id)
    parent, trace_id, _ = new_parent()
    # The engine's refusal quotes what it refuses, to the client only.
    refusal = await talk.turn(traceparent=parent, max_tokens=PROMPT)
    assert refusal.status == 400 and PROMPT in await refusal.text()
    await receiver.whole_trace(trace_id)
    assert (await turn_line(wait_until, log, trace_id))["status"] == 400
    sent = b"".join(receiver.raw)
    logged = log.read_bytes()
    for private in (KEY, SESSION, PROMPT.split()[0], *answers):
        assert private.encode() not in sent
        assert private.encode() not in logged


@pytest.mark.parametrize("fate", ["killed", "hanging"])
async def test_turns_and_the_stop_do_not_wait_for_a_collector(
    pair: Pair, otlp: Any, wait_until: Any, fate: str
) -> None:
    receiver = await otlp()
    child, talk, log = await pair.router(receiver.environment())
    parent, trace_id, _ = new_parent()
    assert (await talk.turn(traceparent=parent)).status == 200
    await receiver.whole_trace(trace_id)
    if fate == "killed":
        await receiver.stop()
    else:
        receiver.hangs = True
    for number in range(30):
        answer = await talk.turn(stream=number % 2 == 0)
        assert answer.status == 200 and answer.headers["X-Kvtune-Outcome"] == "hit"
        if number == 10 and fate == "hanging":

            async def hung() -> bool:
                return bool(receiver.waiting)

            await wait_until(hung, "an export that hangs")
    # A child that does not stop by itself is killed, and has another status.
    assert await child.stop() == 0
    assert len(log_lines(log, event="turn", outcome="hit")) == 30
    rest = [line["message"] for line in log_lines(log) if line.get("event") != "turn"]
    assert sorted(rest) == sorted(
        [
            f"prefill engine {pair.prefill.url.removeprefix('http://')} is up",
            f"decode engine {pair.decode.url.removeprefix('http://')} is up",
            "stopping: finishing the turns in flight",
        ]
    ), "the log says nothing of the collector"


async def test_spans_of_the_last_turns_are_sent_at_the_stop(pair: Pair, otlp: Any) -> None:
    receiver = await otlp()
    # Nothing would leave by itself within the test.
    child, talk, _ = await pair.router((*receiver.environment(), "OTEL_BSP_SCHEDULE_DELAY=3600000"))
    parent, trace_id, _ = new_parent()
    assert (await talk.turn(traceparent=parent)).status == 200
    assert not receiver.spans
    assert await child.stop() == 0
    assert {span.name for span in receiver.trace(trace_id)} == {"kvtune.turn", "kvtune.prefill", "kvtune.decode"}


async def test_without_otel_variables_nothing_is_sent_and_the_context_passes(pair: Pair, otlp: Any) -> None:
    receiver = await otlp()
    off = ("env", f"OTEL_EXPORTER_OTLP_ENDPOINT={receiver.url}", "OTEL_SDK_DISABLED=true")
    child, talk, log = await pair.router(off)
    pair.prefill.seen.clear()
    parent, trace_id, _ = new_parent()
    assert (await talk.turn(traceparent=parent)).status == 200
    assert pair.prefill.seen[0]["traceparent"] == parent
    assert await child.stop() == 0
    assert log_lines(log, event="turn", trace_id=trace_id)
    assert not receiver.raw
