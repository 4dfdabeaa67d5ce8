"""A vLLM plug-in that puts `kv_transfer_params` on the last chunk of a stream that has choices.

vLLM 0.32 returns them in whole answers but not in streams of chat and text completions, so that a router in front of
streamed traffic never gets a reference. Loaded through the entry point `vllm.general_plugins`; no file of vLLM is
changed. Where vLLM's own stream models have the field, the plug-in steps aside.

A stream of a thousand chunks must not pay a thousand times for what one of them carries. So nothing stands between
vLLM's generator and its reader: the generator's own call that turns a chunk into text is answered here, which for all
chunks but a choice's last is pydantic's own text; for that one the engine's output is looked up in the generator that
asks. Its names are vLLM's; whether they are there is checked once, before anything is replaced.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from loguru import logger
from pydantic import BaseModel

from kvtune_connector.wire import PARAMS

_REQUEST, _OUTPUT = "request", "res"
"""The request, and the engine's output at hand, in vLLM's stream generators."""


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
    extend(ChatCompletionStreamResponse, getattr(OpenAIServingChat, "chat_completion_stream_generator", None))
    extend(CompletionStreamResponse, getattr(OpenAIServingCompletion, "completion_stream_generator", None))


def extend(chunk: type[BaseModel], generator: Callable[..., Any] | None) -> None:
    """Let the chunks that `generator` turns into text carry the parameters of its engine's outputs.

    Left alone, with a warning: a model that would drop an unknown field, a generator without the expected name.
    Left alone, silently: a model with the field, a model that was extended before.
    """
    if PARAMS in chunk.model_fields or chunk.model_dump_json is not BaseModel.model_dump_json:
        return
    code = getattr(generator, "__code__", None)
    if code is None or not {_REQUEST, _OUTPUT} <= set(code.co_varnames) or chunk.model_config.get("extra") != "allow":
        logger.warning("streams will carry no kv_transfer_params: this vLLM makes {} differently", chunk.__name__)
        return

    def model_dump_json(self: Any, **options: Any) -> str:
        choices = self.choices
        if choices and choices[0].finish_reason is not None:
            caller = sys._getframe(1)
            if caller.f_code is code:
                known = caller.f_locals
                params = getattr(known.get(_OUTPUT), PARAMS, None)
                if params and _of_choice(params, choices[0].index, getattr(known.get(_REQUEST), "n", None) or 1):
                    setattr(self, PARAMS, params)
        # What pydantic does, without its spelling out of fifteen defaults: the look at `choices` is paid by that.
        return self.__pydantic_serializer__.to_json(self, **options).decode()

    chunk.model_dump_json = model_dump_json  # type: ignore[method-assign]


def _of_choice(params: dict[str, Any], index: int, n: int) -> bool:
    """Whether they are of the choice `index`, of `n` a prompt.

    vLLM makes a request of each choice, `0_...`, `1_...`, and one output of those that end in one step, which keeps
    the parameters of one of them only.
    """
    return n == 1 or str(params.get("remote_request_id")).startswith(f"{index % n}_")
