"""A vLLM plug-in that puts `kv_transfer_params` on the last chunk of a stream that has choices.

vLLM 0.32 returns them in whole answers but not in streams of chat and text completions, so that a router in front of
streamed traffic never gets a reference. Loaded through the entry point `vllm.general_plugins`; no file of vLLM is
changed. Where vLLM's own stream models have the field, the plug-in steps aside.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable
from typing import Any

import orjson
from loguru import logger

from kvtune_connector.wire import PARAMS

_FINISH = '"finish_reason":"'
_END = "}\n\n"


def register() -> None:
    """Called by vLLM in each of its processes; does nothing where there is no API server to extend."""
    try:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionStreamResponse
        from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
        from vllm.entrypoints.openai.completion.protocol import CompletionStreamResponse
        from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    except ImportError as error:
        logger.warning("streams will carry no kv_transfer_params: this vLLM is laid out differently ({})", error)
        return
    for models, serving, method in (
        (ChatCompletionStreamResponse, OpenAIServingChat, "chat_completion_stream_generator"),
        (CompletionStreamResponse, OpenAIServingCompletion, "completion_stream_generator"),
    ):
        if PARAMS in models.model_fields:
            continue
        stock = getattr(serving, method, None)
        if stock is None:
            logger.warning("streams will carry no kv_transfer_params: {} has no {}", serving.__name__, method)
        elif not getattr(stock, "_kvtune", False):
            setattr(serving, method, extended(stock))


def extended(stock: Callable[..., AsyncIterator[str]]) -> Callable[..., AsyncIterator[str]]:
    """The stock generator with `kv_transfer_params` on the last chunk that has choices."""

    @functools.wraps(stock)
    async def stream(self: Any, request: Any, *args: Any, **kwargs: Any) -> AsyncIterator[str]:
        if not getattr(request, PARAMS, None):
            # Not a leg of disaggregated serving: nothing to carry, nothing to pay.
            async for chunk in stock(self, request, *args, **kwargs):
                yield chunk
            return
        caught = _Caught()
        arguments = tuple(caught.watch(value) if hasattr(value, "__aiter__") else value for value in args)
        named = {key: caught.watch(value) if hasattr(value, "__aiter__") else value for key, value in kwargs.items()}
        async for chunk in stock(self, request, *arguments, **named):
            if caught.params is not None and _FINISH in chunk:
                chunk = with_params(chunk, caught.params)
                caught.params = None
            yield chunk

    stream._kvtune = True  # type: ignore[attr-defined]
    return stream


class _Caught:
    """Watches the engine's outputs go by."""

    def __init__(self) -> None:
        self.params: dict[str, Any] | None = None

    async def watch(self, results: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for result in results:
            output = result[1] if isinstance(result, tuple) else result
            params = getattr(output, PARAMS, None)
            if params is not None:
                self.params = params
            yield result


def with_params(chunk: str, params: dict[str, Any]) -> str:
    """A `data: {...}` event with the field added at its end; anything else unchanged."""
    if not chunk.startswith("data: {") or not chunk.endswith(_END) or '"choices":[]' in chunk:
        return chunk
    field = f',"{PARAMS}":{orjson.dumps(params, default=list).decode()}'
    return chunk[: -len(_END)] + field + _END
