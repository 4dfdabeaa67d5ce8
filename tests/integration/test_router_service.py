"""The router between real HTTP peers: simulated engines for the contract, stubs for every byte."""

from __future__ import annotations

import asyncio
import gzip
from typing import Any

import orjson
import pytest
from aiohttp import web

from kvtune_bench import tokens
from kvtune_connector.wire import report_extras
from kvtune_router.answers import strip_document
from kvtune_telemetry.logs import setup_logging
from kvtune_telemetry.vocabulary import Decision, Reason

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MODEL = "qwen3-32b"
WORDS = "the quick brown fox jumps over the lazy dog again and again "


def opening(name: str, words: int = 60) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"{name:<16}" + WORDS * (words // 12)}]


def text_of(raw: bytes) -> str:
    if raw.startswith(b"{"):
        choice = orjson.loads(raw)["choices"][0]
        return choice["message"]["content"] if "message" in choice else choice["text"]
    assert raw.endswith(b"data: [DONE]\n\n")
    out = ""
    for line in raw.splitlines():
        if line.startswith(b"data: {"):
            for choice in orjson.loads(line[6:])["choices"]:
                out += choice.get("text") or choice.get("delta", {}).get("content") or ""
    return out


class Client:
    """One conversation of an ordinary OpenAI client."""

    def __init__(self, lab: Any, name: str, *, headers: dict[str, str] | None = None, stream: bool = True) -> None:
        self.lab, self.stream, self.headers = lab, stream, headers or {}
        self.messages = opening(name)
        self.outcomes: list[str] = []

    async def turn(self, max_tokens: int = 48, **more: Any) -> str:
        body = {"model": MODEL, "messages": self.messages, "max_tokens": max_tokens, "stream": self.stream, **more}
        async with self.lab.session.post(CHAT, json=body, headers=self.headers) as answer:
            raw = await answer.read()
            assert answer.status == 200, raw
            self.outcomes.append(answer.headers["X-Kvtune-Outcome"])
        text = text_of(raw)
        assert text == tokens.expected_answer(tokens.render_chat(self.messages), max_tokens)
        assert b"kv_transfer" not in raw
        self.messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on, say more "}]
        return text


# --- reuse ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("headers", [{"X-Session-ID": "s"}, {"X-Conversation-ID": "s"}, {}])
async def test_three_turns_reuse_two(lab: Any, headers: dict[str, str], stream: bool) -> None:
    p, d = await lab.engine("prefill"), await lab.engine("decode")
    await lab.start([p], [d])
    client = Client(lab, "a", headers=headers, stream=stream)
    for _ in range(3):
        await client.turn()
    assert client.outcomes == ["first", "hit", "hit"]
    assert lab.outcomes() == {"first": 1, "hit": 2}
    assert lab.value("kvtune_references_received_total") == 3
    assert lab.value("kvtune_references_ended_total", end="handed_over") == 2
    assert lab.value("kvtune_references") == 1
    assert lab.value("kvtune_turn_gap_seconds_count") == 2
    assert lab.value("kvtune_turn_ends_total") == 3


@pytest.mark.parametrize("stream", [True, False])
async def test_completions_reuse_too(lab: Any, stream: bool) -> None:
    p, d = await lab.engine("prefill"), await lab.engine("decode")
    await lab.start([p], [d])
    prompt = WORDS * 8
    for _ in range(3):
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 16, "stream": stream}
        async with lab.session.post(COMPLETIONS, json=body) as answer:
            prompt += text_of(await answer.read()) + "and so on. "
    assert lab.outcomes() == {"first": 1, "hit": 2}


async def test_body_ids_name_conversations_and_do_not_reach_engines(lab: Any) -> None:
    p = await lab.stub(
        answer=orjson.dumps({"kv_transfer_params": {"do_remote_prefill": True, "remote_engine_id": "p"}})
    )
    d = await lab.stub(answer=b'{"choices":[]}')
    await lab.start([p], [d])
    for field in ("conversation_id", "session_id"):
        body = {"model": "m", "messages": [], field: "secret-id", "kv_transfer_params": {"remote_host": "evil"}}
        async with lab.session.post(CHAT, json=body) as answer:
            assert answer.status == 200
    for seen in (*p.seen, *d.seen):
        assert "secret-id" not in str(seen.body) and "evil" not in str(seen.body)
        assert field not in seen.body
    assert lab.value("kvtune_forged_parameters_total") == 2


async def test_a_rewritten_history_is_cut_or_refused_and_answered_right(lab: Any) -> None:
    p, d = await lab.engine("prefill"), await lab.engine("decode")
    await lab.start([p], [d])
    client = Client(lab, "a", headers={"X-Session-ID": "s"})
    await client.turn()
    client.messages[0]["content"] = "entirely other " + client.messages[0]["content"]
    await client.turn()
    assert client.outcomes == ["first", "rewritten"]
    await client.turn()
    assert client.outcomes[2] == "hit"


@pytest.mark.parametrize("accept", [False, True])
@pytest.mark.parametrize(("p_kind", "d_kind"), [("stock", "kvtune"), ("kvtune", "stock"), ("stock", "stock")])
async def test_what_nobody_can_prove_is_not_handed_over(lab: Any, p_kind: str, d_kind: str, accept: bool) -> None:
    p, d = await lab.engine("prefill", connector=p_kind), await lab.engine("decode", connector=d_kind)
    await lab.start([p], [d], accept_unverified=accept)
    client = Client(lab, "a", headers={"X-Session-ID": "s"})
    for _ in range(3):
        await client.turn()
    # A kvtune prefill refuses by itself what has no fingerprint.
    wanted = "hit" if accept and p_kind == "stock" else "unverified"
    assert client.outcomes == ["first", wanted, wanted]


async def test_an_expired_reference_is_never_handed_over(lab: Any) -> None:
    p, d = await lab.engine("prefill"), await lab.engine("decode", ttl_s=6.2)
    await lab.start([p], [d], handover=1.0)
    client = Client(lab, "a", headers={"X-Session-ID": "s"})
    await client.turn()
    await asyncio.sleep(0.3)
    await client.turn()
    assert client.outcomes == ["first", "expired"]
    assert lab.value("kvtune_references_ended_total", end="expired") == 1
    for engine in (p, d):
        assert not any(engine.engine.violations.values())


async def test_the_hold_out_is_served_without_reuse_or_retention(lab: Any) -> None:
    p, d = await lab.engine("prefill"), await lab.engine("decode")
    await lab.start([p], [d], holdout=1.0)
    client = Client(lab, "a")
    for _ in range(3):
        await client.turn()
    assert client.outcomes == ["disabled"] * 3
    async with lab.session.get(d.url + "/sim/state") as answer:
        assert (await answer.json())["retained"]["requests"] == 0
    assert lab.value("kvtune_turn_ends_total") == 0


async def test_streams_that_carry_no_parameters_are_booked_as_absent(lab: Any) -> None:
    p, d = await lab.engine("prefill"), await lab.engine("decode", stream_params=False)
    await lab.start([p], [d])
    client = Client(lab, "a")
    await client.turn()
    await client.turn()
    assert client.outcomes == ["first", "absent"]
    assert lab.value("kvtune_references_missed_total", reason="not_sent") == 2


async def test_decode_is_asked_for_the_retention_the_router_is_set_to(lab: Any) -> None:
    p = await lab.stub(answer=orjson.dumps({"kv_transfer_params": {"remote_engine_id": "p"}}))
    d = await lab.stub(answer=b'{"choices":[]}')
    await lab.start([p], [d], retain=8.0)
    body = {"model": MODEL, "messages": opening("a")}
    async with lab.session.post(CHAT, json=body, headers={"X-Session-ID": "s"}) as answer:
        assert answer.status == 200
    assert d.seen[-1].body["kv_transfer_params"]["kvtune"]["retain_s"] == 8.0
    assert lab.value("kvtune_router_setting", setting="retain_seconds") == 8.0


@pytest.mark.parametrize(("status", "again"), [(503, None), (429, "R1"), (500, None), (499, None)])
async def test_a_reference_that_may_have_been_read_is_never_read_again(
    lab: Any, status: int, again: str | None
) -> None:
    kept = {"remote_engine_id": "d", "remote_request_id": "R1", "remote_block_ids": [[1]], "remote_num_tokens": 64}
    told = report_extras(decision=Decision.RECOMPUTE, reason=Reason.NONE, fetched=0, local=0, available=0)
    seen: list[str | None] = []
    failed = False

    async def answer(request: web.Request) -> web.Response:
        nonlocal failed
        reference = orjson.loads(await request.read())["kv_transfer_params"].get("remote_request_id")
        seen.append(reference)
        if reference and not failed:
            failed = True
            return web.Response(status=status, body=b"upstream connect error or disconnect/reset before headers")
        return web.json_response(
            {"kv_transfer_params": {"remote_engine_id": "p", "remote_num_tokens": 3, "kvtune": told}}
        )

    p, other = await lab.stub(handler=answer), await lab.stub(handler=answer)
    d = await lab.stub(
        answer=orjson.dumps({"kv_transfer_params": {**kept, "kvtune": {"v": 1, "ttl_s": 480.0, "fingerprint": {}}}})
    )
    await lab.start([p, other], [d])
    for engine in lab.router.fleet.prefill:
        engine.verifies = True
    for _ in range(2):
        body = {"messages": opening("a")}
        async with lab.session.post(CHAT, json=body, headers={"X-Session-ID": "s"}) as response:
            assert response.status == 200
    assert seen == [None, "R1", again]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_turn_without_a_reference_is_booked_by_why(lab: Any, stream: bool) -> None:
    p = await lab.stub(answer=orjson.dumps({"kv_transfer_params": {"remote_engine_id": "p"}}))
    d = await lab.stub()
    chunk = b'{"choices":[{"index":0,"text":"a \\"stop_reason\\":\\"x","finish_reason":"stop","stop_reason":%s}]}'
    await lab.start([p], [d])

    async def turn(stop_reason: bytes) -> None:
        document = chunk % stop_reason
        d.answer = b"data: " + document + b"\n\ndata: [DONE]\n\n" if stream else document
        d.content_type = "text/event-stream" if stream else "application/json"
        body = {"model": MODEL, "messages": opening("a"), "stream": stream}
        async with lab.session.post(CHAT, json=body, headers={"X-Session-ID": "s"}) as answer:
            assert answer.status == 200

    await turn(b'"END"')
    await turn(b"null")
    assert lab.value("kvtune_references_missed_total", reason="stop_string") == 1
    assert lab.value("kvtune_references_missed_total", reason="not_sent") == 1


# --- bytes ----------------------------------------------------------------------------------------------------------

_ODD = (
    b'{ "id":"x","z":1.0,"a":1e3, "choices":[{"index":0,"logprobs":{"content":[{"token":"\\u00e9","logprob":-0.10}]},'
    b'"message":{"role":"assistant","content":null,"reasoning_content":"hm \\"kv_transfer_params\\": 1",'
    b'"tool_calls":[{"id":"c","function":{"name":"f","arguments":"{\\"kv_transfer_params\\": {}}"}}]}}],'
    b'"usage":{"prompt_tokens":3,"completion_tokens":2}, "kv_transfer_params":{"remote_engine_id":"e",'
    b'"remote_block_ids":[[1]],"remote_num_tokens":4},"tail":  [ ] }'
)


async def test_a_documents_other_bytes_are_untouched(lab: Any) -> None:
    p = await lab.stub(answer=orjson.dumps({"kv_transfer_params": {"remote_engine_id": "p"}}))
    d = await lab.stub(answer=_ODD)
    await lab.start([p], [d])
    async with lab.session.post(CHAT, json={"messages": opening("a"), "temperature": 0.5}) as answer:
        raw = await answer.read()
        assert answer.content_type == "application/json"
    assert raw == strip_document(_ODD)[0]
    assert len(raw) > len(_ODD) - 110 and b"remote_engine_id" not in raw
    assert lab.value("kvtune_references") == 1


async def test_a_streams_other_bytes_are_untouched_and_nothing_is_held_back(lab: Any) -> None:
    pieces = [
        b'data: {"choices":[{"index":0,"delta":{"role":"assistant"}}]}\n\n',
        b': comment\n\ndata: {"choices":[{"delta":{"reasoning_content":"\xc3\xa9 1.0"}}]}\r\n\r\n',
        b'data: {"choices":[{"delta":{"tool_calls":[{"function":{"arguments":"{\\"kv_transfer_params\\":1}"}}]}}]}\n\n',
        b'data: {"choices":[{"delta":{},"finish_reason":"stop"}],"kv_transfer_params":{"remote_engine_id":"e",'
        b'"remote_block_ids":[[1]],"remote_num_tokens":4}}\n\n',
        b'data: {"choices":[],"usage":{"prompt_tokens":1.50}}\n\n',
        b"data: [DONE]\n\n",
    ]
    wanted = b"".join(pieces).replace(
        b',"kv_transfer_params":{"remote_engine_id":"e","remote_block_ids":[[1]],"remote_num_tokens":4}', b""
    )
    released = asyncio.Event()

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        await response.write(pieces[0])
        await released.wait()
        for piece in pieces[1:]:
            await response.write(piece)
        await response.write_eof()
        return response

    p = await lab.stub(answer=orjson.dumps({"kv_transfer_params": {"remote_engine_id": "p"}}))
    d = await lab.stub(handler=stream)
    await lab.start([p], [d])
    async with lab.session.post(CHAT, json={"messages": opening("a"), "stream": True}) as answer:
        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        first = await answer.content.readany()
        assert first == pieces[0], "the first chunk arrives while the engine still works"
        released.set()
        assert first + await answer.read() == wanted
    assert lab.value("kvtune_references") == 1


async def test_several_choices_go_through_decode_alone(lab: Any) -> None:
    p, d = await lab.stub(), await lab.stub(answer=b'{"choices":[{"index":0},{"index":1}]}')
    await lab.start([p], [d])
    body = {"messages": opening("a"), "n": 2, "logprobs": True}
    async with lab.session.post(CHAT, json=body) as answer:
        assert await answer.read() == b'{"choices":[{"index":0},{"index":1}]}'
    assert p.seen == [] and d.seen[0].body == body
    assert lab.outcomes() == {"disabled": 1}


async def test_trace_and_session_headers_reach_both_legs(lab: Any) -> None:
    p = await lab.stub(answer=orjson.dumps({"kv_transfer_params": {"remote_engine_id": "p"}}))
    d = await lab.stub(answer=b"{}")
    await lab.start([p], [d])
    headers = {
        "traceparent": "00-0123456789abcdef0123456789abcdef-00f067aa0ba902b7-01", "X-Session-ID": "s",
        "X-Request-Id": "r1", "Authorization": "Bearer k", "Cookie": "c=1",
    }  # fmt: skip
    async with lab.session.post(CHAT, json={"messages": opening("a")}, headers=headers) as answer:
        assert answer.headers["X-Request-Id"] == "r1"
    for seen in (p.seen[0], d.seen[0]):
        for name in ("traceparent", "X-Session-ID", "X-Request-Id", "Authorization"):
            assert seen.headers[name] == headers[name]
        assert "Cookie" not in seen.headers
    assert p.seen[0].body["max_tokens"] == 1 and p.seen[0].body["stream"] is False
    assert d.seen[0].body["kv_transfer_params"] == {"remote_engine_id": "p"}


# --- many at once ---------------------------------------------------------------------------------------------------


async def test_two_hundred_conversations_at_once(lab: Any) -> None:
    prefills = [await lab.engine("prefill") for _ in range(2)]
    decodes = [await lab.engine("decode") for _ in range(2)]
    await lab.start(prefills, decodes)

    async def converse(number: int) -> Client:
        headers = {"X-Session-ID": f"private-{number}"} if number % 2 else {}
        client = Client(lab, f"conversation {number}", headers=headers, stream=number % 3 > 0)
        for _ in range(4):
            await client.turn(max_tokens=32)
        return client

    clients = await asyncio.gather(*(converse(number) for number in range(200)))
    assert all(client.outcomes == ["first", "hit", "hit", "hit"] for client in clients)
    assert lab.outcomes() == {"first": 200, "hit": 600}
    assert lab.value("kvtune_references_ended_total", end="handed_over") == 600
    assert lab.value("kvtune_references") == 200
    reads = released = 0
    for engine in (*prefills, *decodes):
        async with lab.session.get(engine.url + "/sim/state") as answer:
            state = await answer.json()
        assert not any(state["violations"].values()), state
        released += state["retained"]["requests"]
        async with lab.session.get(engine.url + "/metrics") as answer:
            for line in (await answer.text()).splitlines():
                if line.startswith("kvtune_kv_reads_total") and 'direction="d2p"' in line:
                    reads += float(line.rsplit(" ", 1)[1])
    assert reads == 600 and released == 200
    text = await lab.exposition()
    assert "private-" not in text and "conversation 1" not in text


async def test_concurrent_turns_of_one_conversation_never_share_a_reference(lab: Any) -> None:
    p, d = await lab.engine("prefill"), await lab.engine("decode")
    await lab.start([p], [d])
    client = Client(lab, "a", headers={"X-Session-ID": "s"})
    await client.turn()
    body = {"model": MODEL, "messages": client.messages, "max_tokens": 8, "stream": True}

    async def again() -> str:
        async with lab.session.post(CHAT, json=body, headers=client.headers) as answer:
            await answer.read()
            return str(answer.headers["X-Kvtune-Outcome"])

    outcomes = await asyncio.gather(*(again() for _ in range(8)))
    assert sorted(outcomes).count("hit") >= 1 and set(outcomes) <= {"hit", "consumed"}
    async with lab.session.get(d.url + "/sim/state") as answer:
        assert not any((await answer.json())["violations"].values())


async def test_series_stay_the_same_after_many_conversations(lab: Any) -> None:
    p = await lab.stub(answer=orjson.dumps({"kv_transfer_params": {"remote_engine_id": "p", "remote_num_tokens": 3}}))
    d = await lab.stub(answer=b"{}")
    await lab.start([p], [d])

    async def one(number: int) -> None:
        headers = {"X-Session-ID": f"user-{number}@example.org", "Authorization": f"Bearer key-{number}"}
        async with lab.session.post(CHAT, json={"model": f"m{number}", "messages": opening("a")}, headers=headers) as a:
            assert a.status == 200

    await one(0)
    before = (await lab.exposition()).count("\n")
    for start in range(1, 10_001, 200):
        await asyncio.gather(*(one(number) for number in range(start, start + 200)))
    text = await lab.exposition()
    assert text.count("\n") == before
    assert "example.org" not in text and "key-" not in text


# --- faults ---------------------------------------------------------------------------------------------------------


async def test_prefill_refuses_the_reference_and_the_turn_goes_on_without(lab: Any) -> None:
    p, d = await lab.engine("prefill"), await lab.engine("decode")
    await lab.start([p], [d])
    client = Client(lab, "a", headers={"X-Session-ID": "s"})
    await client.turn()
    async with lab.session.post(p.url + "/sim/faults", json={"prefill_500_with_reference": True}) as answer:
        assert answer.status == 200
    await client.turn()
    assert client.outcomes == ["first", "read_failed"]
    assert lab.value("kvtune_turn_retries_total", kind="without_reference") == 1
    assert lab.value("kvtune_references_ended_total", end="lost") == 1


async def test_an_unread_reference_is_put_back(lab: Any) -> None:
    p, d = await lab.engine("prefill"), await lab.engine("decode")
    await lab.start([p], [d])
    client = Client(lab, "a", headers={"X-Session-ID": "s"})
    await client.turn()
    async with lab.session.post(
        CHAT, json={"model": "unknown", "messages": client.messages}, headers=client.headers
    ) as a:
        assert a.status == 404 and (await a.json())["error"]["message"]
    assert lab.value("kvtune_references_put_back_total") == 1
    await client.turn()
    assert client.outcomes == ["first", "hit"]


async def test_without_prefill_decode_serves_alone(lab: Any) -> None:
    d = await lab.engine("decode")
    await lab.start(["http://127.0.0.1:9"], [d])
    client = Client(lab, "a")
    await client.turn()
    await client.turn()
    assert client.outcomes == ["first", "absent"]
    assert lab.value("kvtune_turn_retries_total", kind="decode_alone") == 2
    assert lab.value("kvtune_engine_up", engine="127.0.0.1:9", role="prefill") == 0


async def test_a_prefill_that_dies_unnoticed_keeps_the_reference(lab: Any) -> None:
    p, d = await lab.engine("prefill"), await lab.engine("decode")
    await lab.start([p], [d])
    client = Client(lab, "a", headers={"X-Session-ID": "s"})
    await client.turn()
    await p.close()
    await client.turn()
    assert client.outcomes == ["first", "read_failed"]
    assert lab.value("kvtune_references_put_back_total") == 1


async def test_without_decode_the_answer_is_a_clear_503(lab: Any) -> None:
    p = await lab.engine("prefill")
    await lab.start([p], ["http://127.0.0.1:9"])
    async with lab.session.post(CHAT, json={"model": MODEL, "messages": opening("a")}) as answer:
        assert answer.status == 503 and answer.headers["Retry-After"] == "1"
        assert (await answer.json())["error"] == {
            "message": "no decode engine is available", "type": "server_error", "param": None,
            "code": "no_decode_engine",
        }  # fmt: skip
    async with lab.session.get("/ready") as answer:
        assert answer.status == 503 and (await answer.json())["ready"] is False
    assert lab.outcomes() == {"error": 1}


async def test_a_restarted_decode_is_gone_not_read(lab: Any) -> None:
    p, d = await lab.engine("prefill"), await lab.engine("decode")
    port = int(d.url.rsplit(":", 1)[1])
    await lab.start([p], [d])
    client = Client(lab, "a", headers={"X-Session-ID": "s"})
    await client.turn()
    await d.close()
    again = await lab.engine("decode", port=port)
    await client.turn()
    assert client.outcomes == ["first", "engine_gone"]
    assert again.url == d.url
    await client.turn()
    assert client.outcomes[2] == "hit"
    assert lab.value("kvtune_engine_restarts_total", engine=f"127.0.0.1:{port}", role="decode") == 1


@pytest.mark.parametrize("after", [0, 1, 3])
async def test_a_stream_that_breaks_is_carried_on_elsewhere(lab: Any, after: int) -> None:
    p, one, two = await lab.engine("prefill"), await lab.engine("decode"), await lab.engine("decode")
    await lab.start([p], [one, two])
    async with lab.session.post(one.url + "/sim/faults", json={"cut_stream_after_chunks": after}) as answer:
        assert answer.status == 200
    client = Client(lab, "a", headers={"X-Session-ID": "s"})
    await client.turn(max_tokens=64)
    await client.turn(max_tokens=64)
    assert client.outcomes == ["first", "hit"]
    kinds = ("resumed", "other_decode")
    assert sum(lab.value("kvtune_turn_retries_total", kind=kind) for kind in kinds) == 1


async def test_a_stream_that_cannot_be_carried_on_says_so(lab: Any) -> None:
    p, d = await lab.engine("prefill"), await lab.engine("decode")
    await lab.start([p], [d])
    async with lab.session.post(d.url + "/sim/faults", json={"cut_stream_after_chunks": 2}) as answer:
        assert answer.status == 200
    body = {"model": MODEL, "messages": opening("a"), "max_tokens": 64, "stream": True}
    async with lab.session.post(CHAT, json=body) as answer:
        raw = await answer.read()
    last = [line for line in raw.splitlines() if line.startswith(b"data: {")][-1]
    assert orjson.loads(last[6:])["error"]["code"] in ("stream_broken",)
    assert raw.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_client_that_leaves_cancels_both_legs(lab: Any, leg: str) -> None:
    gone, reached = asyncio.Event(), asyncio.Event()

    async def hang(request: web.Request) -> web.StreamResponse:
        reached.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            gone.set()
            raise
        return web.Response()

    p = await lab.stub(answer=b"{}", handler=hang if leg == "prefill" else None)
    d = await lab.stub(answer=b"{}", handler=hang if leg == "decode" else None)
    await lab.start([p], [d])
    call = asyncio.create_task(lab.session.post(CHAT, json={"messages": opening("a"), "stream": True}))
    await asyncio.wait_for(reached.wait(), 5)
    call.cancel()
    await asyncio.wait_for(gone.wait(), 5)
    for _ in range(100):
        if lab.outcomes():
            break
        await asyncio.sleep(0.02)
    assert lab.outcomes() == {"error": 1}
    assert lab.value("kvtune_turns_in_flight") == 0
    assert (
        lab.value(
            "kvtune_engine_requests_total", engine=(p if leg == "prefill" else d).url[7:], role=leg, result="cancelled"
        )
        == 1
    )
    assert lab.value("kvtune_http_responses_total", endpoint="chat", code="499") == 1


ERROR_STREAM = b'data: {"error":{"message":"boom","type":"server_error"}}\n\ndata: [DONE]\n\n'
CHUNK = b'data: {"choices":[{"index":0,"delta":{"content":"ab"}}]}\n\n'
TOOL = b'data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{"}}]}}]}\n\n'
HANDOVER = orjson.dumps({"kv_transfer_params": {"remote_engine_id": "p", "remote_num_tokens": 3}})


def breaking(*pieces: bytes) -> Any:
    """An engine that says so much and then breaks the connection."""

    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        assert request.transport is not None
        request.transport.close()
        return response

    return handle


@pytest.mark.parametrize("delivered", [TOOL, b'data: {"choices":5}\n\n', b'data: {"choices":[{"delta":null}]}\n\n'])
async def test_what_cannot_be_carried_on_ends_with_an_error_event(lab: Any, delivered: bytes) -> None:
    p = await lab.stub(answer=HANDOVER)
    one = await lab.stub(handler=breaking(delivered))
    two = await lab.stub(handler=breaking(CHUNK))
    await lab.start([p], [one, two])
    async with lab.session.post(CHAT, json={"messages": opening("a"), "stream": True}) as answer:
        raw = await answer.read()
    assert b"HTTP/1.1" not in raw, "no second response inside the first"
    assert raw.endswith(b"data: [DONE]\n\n") and b'"error"' in raw
    assert lab.value("kvtune_turns_in_flight") == 0


async def test_a_refusal_while_carrying_on_ends_with_an_error_event(lab: Any) -> None:
    answers = [web.Response(body=HANDOVER, content_type="application/json"), web.Response(status=404, body=b"{}")]

    async def prefill(_: web.Request) -> web.StreamResponse:
        return answers.pop(0)

    p = await lab.stub(handler=prefill)
    one, two = await lab.stub(handler=breaking(CHUNK)), await lab.stub(handler=breaking(CHUNK))
    await lab.start([p], [one, two])
    async with lab.session.post(CHAT, json={"messages": opening("a"), "stream": True}) as answer:
        raw = await answer.read()
    assert raw.startswith(CHUNK) and b"HTTP/1.1" not in raw and raw.endswith(b"data: [DONE]\n\n")


async def test_an_engine_that_errs_in_a_stream_is_mended_elsewhere(lab: Any) -> None:
    p = await lab.stub(answer=HANDOVER)
    bad = await lab.stub(answer=ERROR_STREAM, content_type="text/event-stream")
    good = await lab.stub(answer=CHUNK + b"data: [DONE]\n\n", content_type="text/event-stream")
    await lab.start([p], [bad, good])
    async with lab.session.post(CHAT, json={"messages": opening("a"), "stream": True}) as answer:
        assert await answer.read() == CHUNK + b"data: [DONE]\n\n"
    assert lab.value("kvtune_turn_retries_total", kind="other_decode") == 1


@pytest.mark.parametrize("status", [500, 429, 503])
async def test_a_decode_that_refuses_is_mended_elsewhere(lab: Any, status: int) -> None:
    p = await lab.stub(answer=HANDOVER)
    bad, good = await lab.stub(answer=b"{}", status=status), await lab.stub(answer=b'{"a":1}')
    await lab.start([p], [bad, good])
    async with lab.session.post(CHAT, json={"messages": opening("a")}) as answer:
        assert (answer.status, await answer.read()) == (200, b'{"a":1}')


async def test_the_only_decode_is_asked_once_more_without_the_hand_over(lab: Any) -> None:
    async def decode(request: web.Request) -> web.StreamResponse:
        handed = "kv_transfer_params" in orjson.loads(await request.read())
        return web.Response(status=500 if handed else 200, body=b'{"a":1}', content_type="application/json")

    p, d = await lab.stub(answer=HANDOVER), await lab.stub(handler=decode)
    await lab.start([p], [d])
    async with lab.session.post(CHAT, json={"messages": opening("a")}) as answer:
        assert (answer.status, await answer.read()) == (200, b'{"a":1}')
    assert lab.value("kvtune_turn_retries_total", kind="decode_alone") == 1


async def test_a_busy_fleet_says_so_in_its_own_words(lab: Any) -> None:
    p, d = await lab.stub(answer=HANDOVER), await lab.stub(answer=b'{"error":"busy"}', status=429)
    await lab.start([p], [d])
    async with lab.session.post(CHAT, json={"messages": opening("a")}) as answer:
        assert (answer.status, await answer.read()) == (429, b'{"error":"busy"}')


@pytest.mark.parametrize("tokens", [-5, 2.5, True, "9", None, 2**40])
async def test_bad_numbers_from_an_engine_lose_no_turn(lab: Any, tokens: Any) -> None:
    answer_d = {"kv_transfer_params": {"remote_engine_id": "d", "remote_block_ids": [[1]], "remote_num_tokens": tokens}}
    p, d = await lab.stub(answer=HANDOVER), await lab.stub(answer=orjson.dumps(answer_d))
    await lab.start([p], [d])
    for _ in range(2):
        async with lab.session.post(CHAT, json={"messages": []}, headers={"X-Session-ID": "s"}) as answer:
            assert answer.status == 200
    assert lab.outcomes() == {"first": 1, "absent": 1}
    assert lab.value("kvtune_turns_in_flight") == 0


async def test_engines_cannot_leak_parameters_to_clients(lab: Any) -> None:
    refusal = b'{"error":{"message":"no"},"kv_transfer_params":{"remote_host":"10.0.0.1"}}'
    p, d = await lab.stub(answer=refusal, status=400), await lab.stub()
    await lab.start([p], [d])
    async with lab.session.post(CHAT, json={"messages": opening("a")}) as answer:
        assert (answer.status, await answer.read()) == (400, b'{"error":{"message":"no"}}')


@pytest.mark.parametrize("kind", ["ones", "many", "tokens"])
async def test_no_body_holds_up_the_others(lab: Any, kind: str) -> None:
    p, d = await lab.stub(answer=b"{}"), await lab.stub(answer=b"{}")
    await lab.start([p], [d])
    body = {
        "ones": {"messages": [1] * 300_000},
        "many": {"messages": [{"role": "user", "content": "x"}] * 20_000},
        "tokens": {"prompt": [7] * 3_000_000},
    }[kind]
    async with lab.session.post(CHAT if kind != "tokens" else COMPLETIONS, data=orjson.dumps(body)) as answer:
        assert answer.status == 200
    assert lab.outcomes() in ({"no_identity": 1}, {"disabled": 1})


async def test_keys_in_broken_headers_are_not_logged(lab: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from loguru import logger

    p, d = await lab.stub(), await lab.stub()
    setup_logging(fmt="json", level="TRACE")
    try:
        await lab.start([p], [d])
        reader, writer = await asyncio.open_connection("127.0.0.1", lab.router.port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer needle-key\x01\r\n\r\n")
        assert b" 400 " in await reader.readline()
        writer.close()
    finally:
        logger.remove()
    assert "needle" not in capsys.readouterr().err


async def test_header_bytes_that_are_no_text_are_no_error(lab: Any) -> None:
    p, d = await lab.stub(answer=b"{}"), await lab.stub(answer=b"{}")
    await lab.start([p], [d])
    reader, writer = await asyncio.open_connection("127.0.0.1", lab.router.port)
    body = b'{"messages":[]}'
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: \xff\r\nX-Session-ID: s\r\n")
    writer.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
    assert b" 200 " in await reader.readline()
    writer.close()


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "data", "status", "says"),
    [
        ("POST", CHAT, b"{", 400, "not valid JSON"),
        ("POST", CHAT, b"\xff\xfe", 400, "not valid JSON"),
        ("POST", COMPLETIONS, b'["x"]', 400, "must be a JSON object"),
        ("POST", CHAT, b'{"stream": 1}', 400, "'stream' must be true or false"),
        ("POST", CHAT, b'{"messages":[],"session_id":5}', 400, "session_id must be a non-empty string"),
        ("POST", CHAT, b'{"model":"nobody","messages":[{"role":"user","content":"x"}]}', 404, "nobody"),
        ("GET", CHAT, None, 405, "takes POST"),
        ("POST", "/v1/embeddings", b"{}", 404, "no such endpoint: POST /v1/embeddings"),
        ("POST", CHAT, b"x" * (3 * 2**20), 413, "larger than 2 MiB"),
    ],
)
async def test_bad_input_is_answered_clearly(
    lab: Any, method: str, path: str, data: bytes | None, status: int, says: str
) -> None:
    p, d = await lab.engine("prefill"), await lab.engine("decode")
    await lab.start([p], [d], max_body_mib=2.0)
    async with lab.session.request(method, path, data=data) as answer:
        error = orjson.loads(await answer.read())["error"]
        assert (answer.status, answer.content_type) == (status, "application/json")
    assert says in error["message"] and set(error) >= {"message", "type", "code"}
    assert lab.value("kvtune_turns_in_flight") == 0


async def test_fifty_megabytes_are_refused_by_default(lab: Any) -> None:
    p, d = await lab.engine("prefill"), await lab.engine("decode")
    await lab.start([p], [d])
    async with lab.session.post(CHAT, data=b" " * (50 * 2**20)) as answer:
        assert answer.status == 413
        assert "larger than 32 MiB" in (await answer.json())["error"]["message"]


async def test_an_engines_refusal_reaches_the_client_as_it_was(lab: Any) -> None:
    said = b'{"error":{"message":"too long","type":"BadRequestError","param":"input","code":400}}'
    p, d = await lab.stub(answer=said, status=400), await lab.stub()
    await lab.start([p], [d])
    async with lab.session.post(CHAT, json={"messages": opening("a")}) as answer:
        assert (answer.status, await answer.read()) == (400, said)
    assert d.seen == [] and lab.outcomes() == {"error": 1}


async def test_models_health_and_metrics(lab: Any) -> None:
    p, d = await lab.engine("prefill"), await lab.engine("decode")
    await lab.start([p], [d])
    async with lab.session.get("/v1/models") as answer:
        assert [model["id"] for model in (await answer.json())["data"]] == [MODEL]
    for path in ("/health", "/ready"):
        async with lab.session.get(path) as answer:
            assert answer.status == 200
    assert "kvtune_turns_total" in await lab.exposition()
    assert (await lab.exposition("application/openmetrics-text")).endswith("# EOF\n")


async def test_logs_hold_no_prompt_no_key_and_no_id(lab: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from loguru import logger

    p, d = await lab.engine("prefill"), await lab.engine("decode")
    setup_logging(fmt="json", level="TRACE")
    try:
        await lab.start([p], [d])
        client = Client(lab, "needle", headers={"X-Session-ID": "needle-id", "Authorization": "Bearer needle-key"})
        await client.turn()
        await client.turn()
        async with lab.session.post(CHAT, data=b'{"messages": "needle', headers=client.headers) as answer:
            assert answer.status == 400
    finally:
        logger.remove()
    lines = capsys.readouterr().err
    assert lines.count('"event":"turn"') == 2
    assert "needle" not in lines


async def test_compressed_engines_are_understood(lab: Any) -> None:
    async def squeezed(_: web.Request) -> web.StreamResponse:
        return web.Response(
            body=gzip.compress(b'{"kv_transfer_params":null,"a":1}'),
            headers={"Content-Encoding": "gzip", "Content-Type": "application/json"},
        )

    p, d = await lab.stub(answer=b"{}"), await lab.stub(handler=squeezed)
    await lab.start([p], [d])
    async with lab.session.post(CHAT, json={"messages": opening("a")}) as answer:
        assert await answer.read() == b'{"a":1}'


async def test_an_unreachable_port_in_use_is_named(lab: Any) -> None:
    from kvtune_router.config import RouterConfig
    from kvtune_router.server import ServeError, running

    stub = await lab.stub()
    port = int(stub.url.rsplit(":", 1)[1])
    with pytest.raises(ServeError, match=rf"cannot listen on 127.0.0.1:{port} .*--port"):
        async with running(RouterConfig(prefill=(stub.url,), decode=("h:1",), port=port, metrics_port=0)):
            pass


async def test_a_dead_collector_costs_nothing_and_does_not_hold_up_the_stop(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    p, d = await lab.engine("prefill"), await lab.engine("decode")
    await lab.start([p], [d])
    assert lab.router.tracing.enabled
    client = Client(lab, "a")
    await client.turn()
    await client.turn()
    assert client.outcomes == ["first", "hit"]
