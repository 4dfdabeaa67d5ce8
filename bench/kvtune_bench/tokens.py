"""The simulated engines' tokenizer and answers: deterministic, prefix-exact, with no work per token.

Every 4 bytes of UTF-8 are one token, and its id is those bytes read as a little-endian 32-bit integer. A message is one
header token and its content, padded to a whole token, so that a longer history begins with exactly the tokens of a
shorter one. All functions return token ids as their little-endian bytes, which is what
`kvtune_connector.fingerprint.fingerprint` takes: `len(tokens) // 4` tokens.

An answer is a function of the prompt's tokens and its length alone, so that a test can tell what must come back.
"""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from typing import Any
from zlib import crc32

import orjson

TOKEN_BYTES = 4
MIN_TOOL_CALL_TOKENS = 32
"""The smallest answer that has room for a tool call."""

_PAD = b"\xff"  # never a byte of UTF-8, so that padding cannot be mistaken for content
_HEADER = b"\xff\xfe\xfd"
_ROLES = {role: bytes([code]) for code, role in enumerate(("system", "developer", "user", "assistant", "tool"), 1)}
_TOOLS = b"\xff\xfe\xfc\xfb"
_TEXT_BYTES = 1 << 20
_ALPHABET = b"abcdefghijklmnopqrstuvwxyz     ,"
_SERIAL_BYTES = 8


class PromptError(ValueError):
    """A prompt that cannot be rendered; the message says which part and why."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model says: `reasoning` then `content` or `tool_calls`; `tokens` renders all of it."""

    tokens: bytes
    content: str | None
    reasoning: str | None = None
    tool_calls: tuple[dict[str, Any], ...] = ()


def _padded(data: bytes) -> bytes:
    return data + _PAD * (-len(data) % TOKEN_BYTES)


def _header(role: str) -> bytes:
    return _HEADER + (_ROLES.get(role) or bytes([128 + crc32(role.encode()) % 127]))


def _content(content: object, where: str) -> bytes:
    if content is None:
        return b""
    if isinstance(content, str):
        return _encoded(content, where)
    if not isinstance(content, Sequence) or isinstance(content, (bytes, bytearray)):
        raise PromptError(f"{where} must be a string, a list of parts or null")
    parts = []
    for index, part in enumerate(content):
        if not isinstance(part, Mapping):
            raise PromptError(f"{where}[{index}] must be an object")
        if part.get("type") == "text" and isinstance(part.get("text"), str):
            parts.append(_encoded(part["text"], f"{where}[{index}].text"))
        else:
            parts.append(orjson.dumps(part, option=orjson.OPT_SORT_KEYS))
    return b"".join(parts)


def _encoded(text: str, where: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise PromptError(f"{where} is not valid Unicode") from None


def _tool_calls(calls: Sequence[Any]) -> bytes:
    # Clients that reassemble a stream may keep its `index`; only what names the call is rendered.
    kept = [
        {key: call[key] for key in ("id", "type", "function") if key in call} if isinstance(call, Mapping) else call
        for call in calls
    ]
    return orjson.dumps(kept, option=orjson.OPT_SORT_KEYS)


def render_chat(
    messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, *, tools: Sequence[Any] | None = None
) -> bytes:
    """The tokens of a conversation; with `add_generation_prompt` the header of the answer follows.

    A message's `reasoning_content` (if sent back), `content` and `tool_calls` are rendered in this order.
    Raises PromptError on anything that is not a chat.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise PromptError("messages must be a non-empty list")
    parts: list[bytes] = []
    if tools:
        parts += (_TOOLS, _padded(orjson.dumps(tools, option=orjson.OPT_SORT_KEYS)))
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise PromptError(f"messages[{index}] must be an object with a role")
        parts.append(_header(message["role"]))
        reasoning = message.get("reasoning_content")
        if reasoning:
            parts.append(_padded(_content(reasoning, f"messages[{index}].reasoning_content")))
        parts.append(_padded(_content(message.get("content"), f"messages[{index}].content")))
        calls = message.get("tool_calls")
        if calls:
            if not isinstance(calls, Sequence) or isinstance(calls, str):
                raise PromptError(f"messages[{index}].tool_calls must be a list")
            parts.append(_padded(_tool_calls(calls)))
    if add_generation_prompt:
        parts.append(_header("assistant"))
    return b"".join(parts)


def render_completion(prompt: str | Sequence[int]) -> bytes:
    """The tokens of a text or of given token ids. Raises PromptError.

    A text that goes on after `prompt` extends its tokens only if `prompt` is a multiple of 4 bytes long: the seam is
    tokenised anew, as with real tokenizers.
    """
    if isinstance(prompt, str):
        if not prompt:
            raise PromptError("prompt must not be empty")
        return _padded(_encoded(prompt, "prompt"))
    if not isinstance(prompt, Sequence) or not prompt:
        raise PromptError("prompt must be a string or a list of token ids")
    try:
        packed = array("I", prompt)
    except (TypeError, OverflowError):
        raise PromptError("prompt must hold integer token ids between 0 and 2^32 - 1") from None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


@cache
def _text() -> bytes:
    letters = bytes(_ALPHABET[byte % len(_ALPHABET)] for byte in range(256))
    return random.Random(7).randbytes(_TEXT_BYTES).translate(letters)


def text_of(n_tokens: int, seed: int) -> str:
    """`n_tokens` tokens of ASCII text that needs no escaping in JSON. Equal seeds give equal text.

    Answers of two or more tokens begin with a serial number made from `seed`, so that different seeds differ.
    """
    if n_tokens <= 0:
        return ""
    source = _text()
    size = n_tokens * TOKEN_BYTES
    while len(source) < 2 * size:
        source += source
    start = (seed * TOKEN_BYTES) % (len(source) - size)
    body = source[start : start + size].decode()
    if n_tokens < _SERIAL_BYTES // TOKEN_BYTES:
        return body
    return f"{seed & 0xFFFFFFFF:0{_SERIAL_BYTES}x}" + body[_SERIAL_BYTES:]


def answer_seed(prompt_tokens: bytes, choice: int = 0) -> int:
    """The seed of a prompt's answer number `choice`."""
    return int.from_bytes(blake2b(prompt_tokens, digest_size=8).digest(), "little") + choice


def expected_answer(prompt_tokens: bytes, max_tokens: int, choice: int = 0) -> str:
    """The text that a correct engine answers to these prompt tokens: exactly `max_tokens` tokens."""
    return text_of(max_tokens, answer_seed(prompt_tokens, choice))


def answer(seed: int, max_tokens: int, *, reasoning: bool = False, tool_call: bool = False) -> Answer:
    """The answer of `max_tokens` tokens: plain text, or half of it reasoning, or ending in a tool call.

    Rendering the answer as an assistant message (`render_chat`) gives exactly `tokens`. Raises PromptError when a tool
    call does not fit.
    """
    if not reasoning and not tool_call:
        text = text_of(max_tokens, seed)
        return Answer(text.encode(), text)
    thinking = max_tokens // 2 if reasoning else 0
    rest = max_tokens - thinking
    thought = text_of(thinking, seed + 1) or None
    head = (thought or "").encode()
    if not tool_call:
        text = text_of(rest, seed)
        return Answer(head + text.encode(), text, thought)
    if rest < MIN_TOOL_CALL_TOKENS:
        raise PromptError(f"a tool call needs {MIN_TOOL_CALL_TOKENS} tokens, this answer has {rest}")
    call = {"id": f"call_{seed & 0xFFFFFFFF:08x}", "type": "function", "function": {"name": "lookup", "arguments": ""}}
    frame = len(_tool_calls([call])) + len(_tool_call_arguments("")) + 4  # its four quotes are escaped
    text = text_of(rest, seed)[: rest * TOKEN_BYTES - frame]
    call["function"] = {"name": "lookup", "arguments": _tool_call_arguments(text)}
    return Answer(head + _tool_calls([call]), None, thought, (call,))


def _tool_call_arguments(text: str) -> str:
    return f'{{"query": "{text}"}}'
