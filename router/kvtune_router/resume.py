"""Carries a broken stream on from another engine's answer to the same request. Pure.

The client already has the beginning. The second engine answers from the start; as long as its text repeats what was
delivered it is held back, and what goes beyond is sent on. So the whole is exactly the second engine's answer, or it
ends: where the two differ (sampling without a seed), or cannot be compared, nothing is made up.
"""

from __future__ import annotations

from typing import Any

import orjson

_TEXT = ("content", "reasoning_content", "reasoning", "text")
_PLAIN = (*_TEXT, "role", "index", "finish_reason", "stop_reason", "delta")
"""Fields of a choice or its delta that are understood; any other with something in it cannot be compared."""


class Diverged(Exception):
    """The second answer does not begin with what was delivered, or cannot be compared."""


def _payload(line: bytes) -> dict[str, Any] | None:
    if not line.startswith(b"data:"):
        return None
    data = line[5:].strip()
    if data == b"[DONE]":
        return None
    try:
        event = orjson.loads(data)
    except orjson.JSONDecodeError:
        raise Diverged from None
    if not isinstance(event, dict) or "error" in event:
        raise Diverged
    return event


def _choices(event: dict[str, Any]) -> list[tuple[int, dict[str, Any], dict[str, Any]]]:
    """(index, choice, where its text is) of every choice; raises Diverged for what is not understood."""
    found = []
    choices = event.get("choices") or []
    if not isinstance(choices, list):
        raise Diverged
    for choice in choices:
        delta = choice.get("delta") if isinstance(choice, dict) else None
        holder = choice if delta is None else delta
        if not isinstance(choice, dict) or not isinstance(holder, dict):
            raise Diverged
        index = choice.get("index", 0)
        if type(index) is not int:
            raise Diverged
        for part in (choice, holder):
            if any(value and key not in _PLAIN for key, value in part.items()):
                raise Diverged
        if any(not isinstance(holder.get(name) or "", str) for name in _TEXT):
            raise Diverged
        found.append((index, choice, holder))
    return found


class Resumer:
    """Holds back what `delivered` (bytes of a broken event stream, whole lines) already said."""

    def __init__(self, delivered: bytes) -> None:
        """Raises Diverged when the delivered part cannot be compared (tool calls, log-probabilities, no events)."""
        self._owed: dict[tuple[int, str], str] = {}
        self._roles: set[int] = set()
        self._finished: set[int] = set()
        self._usage = False
        self._dropped = False
        for line in delivered.splitlines():
            event = _payload(line)
            if event is None:
                continue
            self._usage |= bool(event.get("usage")) and not event.get("choices")
            for index, choice, holder in _choices(event):
                for name in _TEXT:
                    if holder.get(name):
                        self._owed[index, name] = self._owed.get((index, name), "") + holder[name]
                if holder.get("role"):
                    self._roles.add(index)
                if choice.get("finish_reason"):
                    self._finished.add(index)

    def feed(self, lines: bytes) -> bytes:
        """What of the second engine's whole `lines` goes on to the client. Raises Diverged."""
        return b"".join(self._line(line) for line in lines.splitlines(keepends=True))

    def _settled(self) -> bool:
        return not (self._owed or self._roles or self._finished or self._usage)

    def _line(self, line: bytes) -> bytes:
        if not line.strip():
            # The blank line after an event goes the way of the event.
            dropped, self._dropped = self._dropped, False
            return b"" if dropped else line
        if self._settled():
            return line
        event = _payload(line)
        if event is None:
            if line.startswith(b"data:") and (self._owed or self._finished):
                raise Diverged  # the second answer is over, and shorter
            return line
        return self._event(line, event)

    def _event(self, line: bytes, event: dict[str, Any]) -> bytes:
        choices = _choices(event)
        new = changed = False
        for index, choice, holder in choices:
            for name in _TEXT:
                text, owed = holder.get(name) or "", self._owed.get((index, name), "")
                if not text or not owed:
                    new |= bool(text)
                    continue
                if owed.startswith(text):
                    self._settle((index, name), owed[len(text) :])
                    holder[name], changed = "", True
                elif text.startswith(owed):
                    self._settle((index, name), "")
                    holder[name], changed, new = text[len(owed) :], True, True
                else:
                    raise Diverged
            if holder.get("role") and index in self._roles:
                self._roles.discard(index)
                del holder["role"]
                changed = True
            if choice.get("finish_reason"):
                if any(place[0] == index for place in self._owed):
                    raise Diverged  # it ends before it has said what was delivered
                if index in self._finished:
                    self._finished.discard(index)
                    choice["finish_reason"], changed = None, True
                else:
                    new = True
        if event.get("usage") and not choices:
            if self._usage:
                self._usage, changed = False, True
            else:
                new = True
        if not changed:
            return line
        if not new:
            self._dropped = True
            return b""
        return b"data: " + orjson.dumps(event) + b"\n"

    def _settle(self, place: tuple[int, str], owed: str) -> None:
        if owed:
            self._owed[place] = owed
        else:
            self._owed.pop(place, None)
