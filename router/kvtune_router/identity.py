"""Which conversation a request belongs to: an explicit id, or the history it carries. Pure.

Ids are namespaced by the caller's credentials, and only keyed hashes leave this module, so that one tenant cannot name
another's conversation and no raw id reaches a log, a label or a span.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import orjson

ID_HEADERS = ("x-session-id", "x-conversation-id")
ID_FIELDS = ("conversation_id", "session_id")
MAX_ID_LENGTH = 512
MAX_MESSAGES = 4096
MAX_TEXT = 8 * 1024 * 1024
"""Histories beyond these (messages, characters) are known by an explicit id or not at all: hashing them would hold up
everybody else."""
_FINE_STEP, _COARSE_STEP = 64, 1024
"""Prompt text is hashed at every 64 bytes up to 1 KiB, then at every KiB."""
_DIGEST = 16


class IdentityError(ValueError):
    """An explicit conversation id is unusable."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A point in a history: its hash, and how far it reaches (messages or bytes)."""

    hash: bytes
    reach: int


@dataclass(frozen=True, slots=True)
class Identity:
    """What names the conversation. Exactly one of `key` and `own` is set."""

    key: bytes | None
    """Hash of an explicit id."""
    own: Mark | None = None
    """The whole request, under which its continuation will look for it."""
    index: bytes | None = None
    """Where `own` is filed: its hash (chat), or the last regular mark before it (prompt text)."""
    earlier: tuple[Mark, ...] = ()
    """Marks under which an earlier turn may be filed, longest first."""
    prompt: bytes | None = None
    """Prompt text, to check an earlier turn's whole against (completions only)."""


class Identifier:
    """Finds identities; holds the secret that keys the hashes and is never exported."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret[:64]

    def _hash(self, *parts: bytes) -> bytes:
        digest = blake2b(key=self._secret, digest_size=_DIGEST)
        for part in parts:
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        return digest.digest()

    def identify(self, headers: Mapping[str, str], body: Mapping[str, Any]) -> Identity | None:
        """The request's identity; None when nothing names its conversation. Raises IdentityError."""
        tenant = self._hash(b"tenant", headers.get("Authorization", "").encode("utf-8", "surrogateescape"))
        explicit = _explicit_id(headers, body)
        if explicit is not None:
            return Identity(self._hash(b"id", tenant, explicit.encode("utf-8", "surrogatepass")))
        model = str(body.get("model", "")).encode("utf-8", "surrogatepass")
        messages = body.get("messages")
        if isinstance(messages, list) and messages:
            if len(messages) > MAX_MESSAGES or not all(isinstance(message, dict) for message in messages):
                return None
            return self._from_messages(self._hash(b"chat", tenant, model), messages)
        prompt = body.get("prompt")
        if isinstance(prompt, str) and len(prompt) <= MAX_TEXT:
            text = prompt.encode("utf-8", "surrogatepass")
        elif isinstance(prompt, list) and 0 < len(prompt) <= MAX_TEXT // 4 and type(prompt[0]) is int:
            text = orjson.dumps(prompt)[:-1] + b","
        else:
            return None
        return self._from_text(self._hash(b"text", tenant, model), text)

    def _from_messages(self, link: bytes, messages: Sequence[Any]) -> Identity:
        marks: list[Mark] = []
        for reach, message in enumerate(messages, 1):
            try:
                link = self._hash(link, orjson.dumps(message, option=orjson.OPT_SORT_KEYS))
            except TypeError:
                raise IdentityError("the messages are nested too deeply") from None
            marks.append(Mark(link, reach))
        own = marks[-1]
        # A continuation repeats an earlier request and goes on with the answer it got; anything else that shares a
        # beginning is another conversation.
        earlier = tuple(mark for mark in reversed(marks[:-1]) if _role(messages[mark.reach]) == "assistant")
        return Identity(None, own, own.hash, earlier)

    def _from_text(self, link: bytes, text: bytes) -> Identity | None:
        marks: list[Mark] = []
        start, step = 0, _FINE_STEP
        while start + step <= len(text):
            end = start + step
            link = self._hash(link, text[start:end])
            marks.append(Mark(link, end))
            start = end
            step = _FINE_STEP if start < _COARSE_STEP else _COARSE_STEP
        if not marks:
            return None
        return Identity(None, Mark(self.whole(text), len(text)), marks[-1].hash, tuple(reversed(marks)), text)

    def whole(self, text: bytes) -> bytes:
        """The hash of a whole prompt, to compare an earlier turn's with."""
        return self._hash(b"whole", text)

    def continues(self, identity: Identity, earlier: Mark, known: dict[int, bytes] | None = None) -> bool:
        """Whether the request is a continuation of the earlier whole that `earlier` describes. `known` saves hashes of
        the request's beginnings between calls."""
        if identity.prompt is None:
            return True
        if earlier.reach >= len(identity.prompt):
            return False
        known = {} if known is None else known
        if earlier.reach not in known:
            known[earlier.reach] = self.whole(identity.prompt[: earlier.reach])
        return known[earlier.reach] == earlier.hash


def _role(message: object) -> object:
    return message.get("role") if isinstance(message, Mapping) else None


def _explicit_id(headers: Mapping[str, str], body: Mapping[str, Any]) -> str | None:
    for name in ID_HEADERS:
        value = headers.get(name)
        if value:
            return _checked(value, f"header {name}")
    for field in ID_FIELDS:
        found = body.get(field)
        if found is None:
            continue
        if not isinstance(found, str) or not found:
            raise IdentityError(f"{field} must be a non-empty string")
        return _checked(found, field)
    return None


def _checked(value: str, where: str) -> str:
    if len(value) > MAX_ID_LENGTH:
        raise IdentityError(f"{where} is longer than {MAX_ID_LENGTH} characters")
    return value
