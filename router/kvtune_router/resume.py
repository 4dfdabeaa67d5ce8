"""Carries a broken stream on from another engine's answer to the same request. Pure.

The client already has the beginning. The second engine answers from the start; as long as its text repeats what was
delivered it is held back, and what goes beyond is sent on. So the whole is exactly the second engine's answer, or it
ends: where the two differ (sampling without a seed) nothing is made up.
"""

from __future__ import annotations

from typing import Any

import orjson

_TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "text")


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


def _pieces(event: dict[str, Any]) -> list[tuple[tuple[int, str], dict[str, Any]]]:
    """((choice index, field), the object that holds the field) for every text in an event."""
    found = []
    choices = event.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if not isinstance(choice, dict):
            raise Diverged
        holder = choice.get("delta", choice)
        if not isinstance(holder, dict) or holder.get("tool_calls"):
            raise Diverged
        found += [
            ((int(choice.get("index", 0)), field), holder)
            for field in _TEXT_FIELDS
            if isinstance(holder.get(field), str) and holder[field]
        ]
    return found


class Resumer:
    """Holds back what `delivered` (bytes of a broken event stream, whole lines) already said."""

    def __init__(self, delivered: bytes) -> None:
        """Raises Diverged when the delivered part cannot be compared (tool calls, no plain events)."""
        self._owed: dict[tuple[int, str], str] = {}
        self._finished = False
        for line in delivered.splitlines():
            event = _payload(line)
            if event is None:
                continue
            for place, holder in _pieces(event):
                self._owed[place] = self._owed.get(place, "") + holder[place[1]]
            self._finished |= any(choice.get("finish_reason") for choice in event.get("choices") or ())
        self._holding = False

    def feed(self, lines: bytes) -> bytes:
        """What of the second engine's whole `lines` goes on to the client. Raises Diverged."""
        if not self._owed and not self._holding:
            return lines
        out = []
        for line in lines.splitlines(keepends=True):
            if self._owed or (self._holding and not line.strip()):
                out.append(self._hold(line))
            else:
                self._holding = False
                out.append(line)
        return b"".join(out)

    def _hold(self, line: bytes) -> bytes:
        if not line.strip():
            return b""
        event = _payload(line)
        self._holding = True
        if event is None:
            if line.startswith(b"data:"):
                raise Diverged  # the second answer is over, and shorter
            return b""
        ends = any(choice.get("finish_reason") for choice in event.get("choices") or () if isinstance(choice, dict))
        beyond = False
        for place, holder in _pieces(event):
            owed, text = self._owed.get(place, ""), holder[place[1]]
            if len(text) <= len(owed):
                if not owed.startswith(text):
                    raise Diverged
                self._settle(place, owed[len(text) :])
                holder[place[1]] = ""
            elif text.startswith(owed):
                self._settle(place, "")
                holder[place[1]] = text[len(owed) :]
                beyond = True
            else:
                raise Diverged
        if ends and self._owed:
            raise Diverged
        if beyond or (ends and not self._finished):
            self._holding = False
            return b"data: " + orjson.dumps(event) + b"\n\n"
        return b""

    def _settle(self, place: tuple[int, str], owed: str) -> None:
        if owed:
            self._owed[place] = owed
        else:
            self._owed.pop(place, None)
