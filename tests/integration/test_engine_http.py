"""The simulated engine's HTTP face: what OpenAI clients and vLLM's users see."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson
import pytest

from kvtune_bench import tokens
from kvtune_bench.engine import EngineConfig
from kvtune_bench.engine_server import EngineServer, running_engine
from kvtune_telemetry.vocabulary import Role

MODEL = "qwen3-32b"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "What is a KV cache? " * 20}]


@pytest.fixture
async def server() -> AsyncIterator[EngineServer]:
    async with running_engine(EngineConfig(role=Role.DECODE, instant=True)) as running:
        yield running


@pytest.fixture
async def client(server: EngineServer) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(base_url=server.url) as session:
        yield session


async def post(client: aiohttp.ClientSession, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else orjson.dumps({"model": MODEL, **body})
    async with client.post(path, data=data, headers=headers) as reply:
        return reply.status, await reply.json()


async def events(client: aiohttp.ClientSession, path: str, body: dict[str, Any], **headers: str) -> list[Any]:
    async with client.post(path, json={"model": MODEL, "stream": True, **body}, headers=headers) as reply:
        assert reply.status == 200
        assert reply.content_type == "text/event-stream"
        raw = await reply.read()
    assert raw.endswith(b"data: [DONE]\n\n")
    parts = raw.split(b"\n\n")
    assert parts.pop() == b"" and parts.pop() == b"data: [DONE]"
    assert all(part.startswith(b"data: {") and b"\n" not in part for part in parts)
    return [orjson.loads(part[6:]) for part in parts]


async def test_chat_in_one_piece(client: aiohttp.ClientSession) -> None:
    status, reply = await post(client, CHAT, {"messages": MESSAGES, "max_tokens": 40}, **{"X-Request-Id": "abc"})
    assert status == 200
    assert reply["id"] == "chatcmpl-abc"
    prompt = tokens.render_chat(MESSAGES)
    message = reply["choices"][0]["message"]
    assert message["content"] == tokens.expected_answer(prompt, 40)
    assert message["role"] == "assistant" and message["tool_calls"] == []
    assert reply["choices"][0]["finish_reason"] == "length"
    used = {"prompt_tokens": len(prompt) // 4, "completion_tokens": 40, "total_tokens": len(prompt) // 4 + 40}
    assert reply["usage"] == {**used, "prompt_tokens_details": None}
    assert reply["kv_transfer_params"] is None and "kv_transfer_params" in reply


async def test_chat_stream_has_vllms_chunks(client: aiohttp.ClientSession) -> None:
    body = {"messages": MESSAGES, "max_completion_tokens": 100, "stream_options": {"include_usage": True}}
    chunks = await events(client, CHAT, body, **{"X-Request-Id": "abc"})
    assert {chunk["id"] for chunk in chunks} == {"chatcmpl-abc"}
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 100
    finishes = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
    assert finishes == [None] * (len(finishes) - 1) + ["length"]
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks[:-1])
    assert text == tokens.expected_answer(tokens.render_chat(MESSAGES), 100)
    assert len(chunks) <= 32 + 2


async def test_default_length_and_a_single_token(client: aiohttp.ClientSession) -> None:
    _, reply = await post(client, CHAT, {"messages": MESSAGES})
    assert reply["usage"]["completion_tokens"] == 16
    chunks = await events(client, CHAT, {"messages": MESSAGES, "max_tokens": 1})
    assert len(chunks) == 2 and chunks[1]["choices"][0]["finish_reason"] == "length"


async def test_completions(client: aiohttp.ClientSession) -> None:
    status, reply = await post(client, COMPLETIONS, {"prompt": "Once upon a time", "max_tokens": 9})
    assert status == 200 and reply["object"] == "text_completion"
    expected = tokens.expected_answer(tokens.render_completion("Once upon a time"), 9)
    assert reply["choices"][0]["text"] == expected
    chunks = await events(client, COMPLETIONS, {"prompt": list(range(50)), "max_tokens": 9}, **{"X-Request-Id": "r"})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == tokens.expected_answer(
        tokens.render_completion(list(range(50))), 9
    )
    assert chunks[0]["id"] == "cmpl-r"
    _, batch = await post(client, COMPLETIONS, {"prompt": ["one", "another"], "max_tokens": 5})
    assert [choice["text"] for choice in batch["choices"]] == [
        tokens.expected_answer(tokens.render_completion(text), 5) for text in ("one", "another")
    ]


async def test_choices(client: aiohttp.ClientSession) -> None:
    prompt = tokens.render_chat(MESSAGES)
    expected = [tokens.expected_answer(prompt, 12, choice) for choice in range(3)]
    _, reply = await post(client, CHAT, {"messages": MESSAGES, "max_tokens": 12, "n": 3})
    assert [choice["message"]["content"] for choice in reply["choices"]] == expected
    assert reply["usage"]["completion_tokens"] == 36
    texts = ["", "", ""]
    for chunk in await events(client, CHAT, {"messages": MESSAGES, "max_tokens": 12, "n": 3}):
        choice = chunk["choices"][0]
        texts[choice["index"]] += choice["delta"]["content"]
    assert texts == expected


@pytest.mark.parametrize("reasoning", [False, True])
async def test_tool_calls_and_reasoning_are_streamed_as_they_are_answered(
    client: aiohttp.ClientSession, reasoning: bool
) -> None:
    body = {"messages": MESSAGES, "max_tokens": 120, "sim": {"tool_call": True, "reasoning": reasoning}}
    _, reply = await post(client, CHAT, body)
    message = reply["choices"][0]["message"]
    assert message["content"] is None and reply["choices"][0]["finish_reason"] == "tool_calls"
    call: dict[str, Any] = {}
    thought = ""
    for chunk in (await events(client, CHAT, body))[1:]:
        delta = chunk["choices"][0]["delta"]
        thought += delta.get("reasoning_content", "")
        for part in delta.get("tool_calls", ()):
            assert part["index"] == 0
            function = part["function"]
            if "id" in part:
                call = {"id": part["id"], "type": part["type"], "function": {"name": function["name"], "arguments": ""}}
            call["function"]["arguments"] += function["arguments"]
    assert [call] == message["tool_calls"]
    assert (thought or None) == message["reasoning_content"]
    assert bool(thought) is reasoning


async def test_logprobs(client: aiohttp.ClientSession) -> None:
    _, reply = await post(client, CHAT, {"messages": MESSAGES, "max_tokens": 3, "logprobs": True, "top_logprobs": 1})
    content = reply["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == reply["choices"][0]["message"]["content"]
    chunks = await events(client, CHAT, {"messages": MESSAGES, "max_tokens": 3, "logprobs": True, "top_logprobs": 1})
    streamed = [entry for chunk in chunks[1:] for entry in chunk["choices"][0]["logprobs"]["content"]]
    assert streamed == content
    _, reply = await post(client, COMPLETIONS, {"prompt": "abc", "max_tokens": 3, "logprobs": 1})
    assert len(reply["choices"][0]["logprobs"]["tokens"]) == 3


@pytest.mark.parametrize(
    ("path", "body", "status", "kind", "words"),
    [
        (CHAT, {"model": "nope", "messages": MESSAGES}, 404, "NotFoundError", "`nope` does not exist"),
        (CHAT, b"{", 400, "BadRequestError", "not valid JSON"),
        (CHAT, b"[]", 400, "BadRequestError", "must be a JSON object"),
        (CHAT, {"messages": []}, 400, "BadRequestError", "non-empty list"),
        (CHAT, {"messages": MESSAGES, "max_tokens": 0}, 400, "BadRequestError", "max_tokens must be"),
        (
            CHAT,
            {"messages": MESSAGES, "max_tokens": 200_000},
            400,
            "BadRequestError",
            "context length is 131072",
        ),
        (CHAT, {"messages": MESSAGES, "n": "2"}, 400, "BadRequestError", "n must be"),
        (CHAT, {"messages": MESSAGES, "stop": 3}, 400, "BadRequestError", "stop must be"),
        (CHAT, {"messages": MESSAGES, "kv_transfer_params": []}, 400, "BadRequestError", "must be an object"),
        (CHAT, {"messages": MESSAGES, "sim": {"tool_call": True}}, 400, "BadRequestError", "needs 32 tokens"),
        (COMPLETIONS, {}, 400, "BadRequestError", "prompt must be"),
        (COMPLETIONS, {"prompt": [-1]}, 400, "BadRequestError", "token ids"),
        ("/v1/nothing", {}, 404, "NotFoundError", "/v1/nothing"),
        ("/health", {}, 405, "BadRequestError", "use GET"),
    ],
)
async def test_errors_have_vllms_shape(
    client: aiohttp.ClientSession, path: str, body: Any, status: int, kind: str, words: str
) -> None:
    got, reply = await post(client, path, body)
    assert got == status
    assert set(reply) == {"error"} and set(reply["error"]) == {"message", "type", "param", "code"}
    assert (reply["error"]["type"], reply["error"]["code"]) == (kind, status)
    assert words in reply["error"]["message"]


async def test_models_health_and_metrics(client: aiohttp.ClientSession, server: EngineServer) -> None:
    async with client.get("/v1/models") as reply:
        card = (await reply.json())["data"][0]
    assert (card["id"], card["max_model_len"]) == (MODEL, 131_072)
    async with client.get("/health") as reply:
        assert (reply.status, await reply.read()) == (200, b"")
    async with client.get("/metrics") as reply:
        text = await reply.text()
        assert reply.headers["Content-Type"].startswith("text/plain")
    for line in (
        'vllm:kv_cache_usage_perc{engine="0",model_name="qwen3-32b"} 0.0',
        'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="218750"} 1.0',
        'sim_violations_total{kind="late_read"} 0.0',
        'kvtune_connector_setting{engine="0",model_name="qwen3-32b",role="decode",setting="bidirectional_kv_xfer"} 1.0',
    ):
        assert line in text.splitlines()
    async with client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}) as reply:
        assert reply.headers["Content-Type"].startswith("application/openmetrics-text")
        assert (await reply.text()).endswith("# EOF\n")


async def faults(client: aiohttp.ClientSession, **settings: Any) -> None:
    async with client.post("/sim/faults", json=settings) as reply:
        assert reply.status == 200, await reply.text()


async def test_faults_over_http(client: aiohttp.ClientSession, server: EngineServer) -> None:
    status, reply = await post(client, "/sim/faults", b'{"http_500_rate": 2}')
    assert status == 400 and "between 0 and 1" in reply["error"]["message"]
    await faults(client, http_500_rate=1)
    assert (await post(client, CHAT, {"messages": MESSAGES}))[0] == 500
    await faults(client, http_500_rate=None, cut_stream_after_chunks=3)
    received = b""
    with pytest.raises(aiohttp.ClientPayloadError):
        async with client.post(CHAT, json={"model": MODEL, "messages": MESSAGES, "stream": True}) as response:
            async for piece in response.content.iter_any():
                received += piece
    assert received.count(b"data: ") == 3
    await faults(client, cut_stream_after_chunks=None, hang=True)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await post(client, CHAT, {"messages": MESSAGES})
    await faults(client, hang=None)
    assert (await post(client, CHAT, {"messages": MESSAGES}))[0] == 200
    async with client.get("/sim/faults") as reply_:
        assert (await reply_.json())["hang"] is False
    assert server.engine.pool.used == 0
    async with client.get("/sim/state") as reply_:
        assert (await reply_.json())["requests"]["running"] == 0


async def test_parameters_can_be_dropped_and_references_refused(client: aiohttp.ClientSession) -> None:
    reference = {
        "do_remote_decode": True, "remote_engine_id": "e", "remote_request_id": "r", "remote_host": "127.0.0.1",
        "remote_port": 9, "remote_block_ids": [[0, 1]], "remote_num_tokens": 64,
    }  # fmt: skip
    body = {"messages": MESSAGES, "max_tokens": 1}
    await faults(client, prefill_500_with_reference=True)
    assert (await post(client, CHAT, {**body, "kv_transfer_params": reference}))[0] == 500
    status, reply = await post(client, CHAT, {**body, "kv_transfer_params": {"do_remote_decode": True}})
    assert status == 200 and reply["kv_transfer_params"]["do_remote_prefill"] is True
    await faults(client, drop_params=True)
    status, reply = await post(client, CHAT, {**body, "kv_transfer_params": {"do_remote_decode": True}})
    assert status == 200 and reply["kv_transfer_params"] is None


async def test_large_prompts(client: aiohttp.ClientSession) -> None:
    messages = [{"role": "user", "content": "x" * 400_000}]
    status, reply = await post(client, CHAT, {"messages": messages, "max_tokens": 2})
    assert status == 200 and reply["usage"]["prompt_tokens"] == 100_002
