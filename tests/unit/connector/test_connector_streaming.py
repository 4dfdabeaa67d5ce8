from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import orjson
import pytest
from loguru import logger
from pydantic import BaseModel, ConfigDict

from kvtune_connector.streaming import extend, register

PARAMS = {"remote_engine_id": "e", "remote_block_ids": ([1, 2],)}


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """What was logged."""
    logged: list[str] = []
    sink = logger.add(lambda message: logged.append(message.record["message"]), level="WARNING")
    yield logged
    logger.remove(sink)


class Choice(BaseModel):
    index: int = 0
    text: str
    finish_reason: str | None = None


@dataclass
class Request:
    n: int | None = None


@dataclass
class Output:
    text: str
    finish_reason: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    index: int = 0


def stream_model(**config: Any) -> type[BaseModel]:
    """A model of a stream's chunks, as vLLM has them; a new one each time."""

    class Chunk(BaseModel):
        model_config = ConfigDict(**{"extra": "allow", **config})
        id: str
        choices: list[Choice]
        usage: dict[str, int] | None = None

    return Chunk


def stream_of(chunk: Any) -> Callable[..., AsyncIterator[str]]:
    """What vLLM's stream generators do, as far as it matters."""

    async def generator(request: Request, outputs: list[Output]) -> AsyncIterator[str]:
        for res in outputs:
            made = chunk(id="r", choices=[Choice(index=res.index, text=res.text, finish_reason=res.finish_reason)])
            yield f"data: {made.model_dump_json(exclude_unset=True)}\n\n"
        last = chunk(id="r", choices=[], usage={"total_tokens": 3})
        yield f"data: {last.model_dump_json(exclude_unset=False, exclude_none=True)}\n\n"
        yield "data: [DONE]\n\n"

    return generator


async def pieces(chunk: Any, outputs: list[Output], *, extended: bool, n: int | None = None) -> list[str]:
    generator = stream_of(chunk)
    if extended:
        extend(chunk, generator)
        assert chunk.model_dump_json is not BaseModel.model_dump_json
    return [piece async for piece in generator(Request(n), outputs)]


TOLD = [Output("hé", None), Output("", "length", PARAMS)]


async def test_the_last_chunk_with_choices_carries_them() -> None:
    got = await pieces(stream_model(), TOLD, extended=True)
    plain = await pieces(stream_model(), TOLD, extended=False)
    assert [got[0], *got[2:]] == [plain[0], *plain[2:]]
    event = orjson.loads(got[1][6:])
    assert event.pop("kv_transfer_params") == {"remote_engine_id": "e", "remote_block_ids": [[1, 2]]}
    assert event == orjson.loads(plain[1][6:])


@pytest.mark.parametrize("params", [None, {}])
async def test_a_stream_without_them_is_untouched(params: Any) -> None:
    told = [Output("a"), Output("b", "stop", params)]
    got = await pieces(stream_model(), told, extended=True)
    assert got == await pieces(stream_model(), told, extended=False)


async def carried(told: list[Output], n: int | None) -> list[Any]:
    """What of `kv_transfer_params` the chunks carry."""
    got = await pieces(stream_model(), told, extended=True, n=n)
    return [orjson.loads(piece[6:]).get("kv_transfer_params") for piece in got[:-1]]


async def test_each_prompt_that_ends_carries_its_own() -> None:
    told = [Output("a", "stop", {"n": 1}, index=1), Output("b"), Output("c", "length", {"n": 2})]
    assert await carried(told, None) == [{"n": 1}, None, {"n": 2}, None]


async def test_no_choice_carries_anothers() -> None:
    first, second = ({"remote_request_id": f"{n}_cmpl-x"} for n in (0, 1))
    # Both choices end in one step of the engine, and vLLM keeps what it knows of the second.
    together = [Output("a", "stop", second, index=0), Output("b", "stop", second, index=1)]
    assert await carried(together, 2) == [None, second, None]
    # Choices of a second prompt are numbered on.
    assert await carried([Output("a", "stop", first, index=2), Output("b", "stop", second, index=3)], 2) == [
        first, second, None,
    ]  # fmt: skip


async def test_nobody_elses_chunks_are_touched() -> None:
    chunk: Any = stream_model()
    extend(chunk, stream_of(chunk))
    res = Output("x", "stop", PARAMS)
    made = chunk(id="r", choices=[Choice(text=res.text, finish_reason="stop")])
    assert made.model_dump_json(exclude_unset=True) == '{"id":"r","choices":[{"text":"x","finish_reason":"stop"}]}'


async def test_extending_twice_changes_nothing() -> None:
    chunk: Any = stream_model()
    generator = stream_of(chunk)
    extend(chunk, generator)
    first = chunk.model_dump_json
    extend(chunk, generator)
    assert chunk.model_dump_json is first


async def other(outputs: list[Output]) -> AsyncIterator[str]:
    for output in outputs:
        yield output.text


@pytest.mark.parametrize(
    "config, generator", [({}, None), ({}, other), ({}, print), ({"extra": "ignore"}, stream_of(None))]
)
def test_what_is_laid_out_differently_is_left_alone_and_said(config: Any, generator: Any, warnings: list[str]) -> None:
    chunk = stream_model(**config)
    extend(chunk, generator)
    assert chunk.model_dump_json is BaseModel.model_dump_json
    assert len(warnings) == 1 and "no kv_transfer_params: this vLLM makes Chunk differently" in warnings[0]


def test_a_model_that_has_the_field_is_left_alone_silently(warnings: list[str]) -> None:
    class Chunk(BaseModel):
        kv_transfer_params: dict[str, Any] | None = None

    extend(Chunk, stream_of(Chunk))
    assert Chunk.model_dump_json is BaseModel.model_dump_json
    assert warnings == []


def test_without_vllm_registering_does_nothing(warnings: list[str]) -> None:
    register()
    assert len(warnings) == 1 and "laid out differently" in warnings[0]
