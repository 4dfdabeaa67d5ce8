from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import orjson
import pytest

from kvtune_connector.streaming import extended, register, with_params

PARAMS = {"remote_engine_id": "e", "remote_block_ids": ([1, 2],)}


@dataclass
class Request:
    kv_transfer_params: dict[str, Any] | None


@dataclass
class Output:
    kv_transfer_params: dict[str, Any] | None = None


async def outputs(*params: dict[str, Any] | None) -> AsyncIterator[Output]:
    for found in params:
        yield Output(found)


async def pairs(*params: dict[str, Any] | None) -> AsyncIterator[tuple[int, Output]]:
    for found in params:
        yield 0, Output(found)


def chunk(text: str, finish: str | None) -> str:
    event = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]}
    return f"data: {orjson.dumps(event).decode()}\n\n"


async def stock(self: Any, request: Any, results: AsyncIterator[Any], *_: Any, **__: Any) -> AsyncIterator[str]:
    """What vLLM's stream generators do, as far as it matters."""
    last = None
    async for result in results:
        last = result
        yield chunk("hi", None)
    assert last is not None
    yield chunk("", "length")
    yield 'data: {"choices":[],"usage":{"total_tokens":3}}\n\n'
    yield "data: [DONE]\n\n"


@pytest.mark.parametrize("make", [outputs, pairs])
async def test_the_last_chunk_with_choices_carries_them(make: Any) -> None:
    got = [piece async for piece in extended(stock)(None, Request({"do_remote_prefill": True}), make(None, PARAMS))]
    plain = [piece async for piece in stock(None, None, make(None, PARAMS))]
    assert [piece for n, piece in enumerate(got) if n != 2] == [piece for n, piece in enumerate(plain) if n != 2]
    event = orjson.loads(got[2][6:])
    assert event.pop("kv_transfer_params") == {"remote_engine_id": "e", "remote_block_ids": [[1, 2]]}
    assert event == orjson.loads(plain[2][6:])


@pytest.mark.parametrize("request_params", [None, {}])
async def test_ordinary_streams_are_untouched(request_params: Any) -> None:
    got = [piece async for piece in extended(stock)(None, Request(request_params), outputs(PARAMS))]
    assert got == [piece async for piece in stock(None, None, outputs(PARAMS))]


async def test_a_stream_without_them_is_untouched() -> None:
    got = [piece async for piece in extended(stock)(None, Request({"a": 1}), outputs(None))]
    assert got == [piece async for piece in stock(None, None, outputs(None))]


@pytest.mark.parametrize("piece", ["data: [DONE]\n\n", ": ping\n\n", 'data: {"choices":[],"usage":{}}\n\n', "data: {}"])
def test_what_is_no_chunk_is_left_alone(piece: str) -> None:
    assert with_params(piece, PARAMS) == piece


def test_without_vllm_registering_does_nothing() -> None:
    register()
