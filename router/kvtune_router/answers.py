"""Takes `kv_transfer_params` out of an engine's answer and leaves every other byte as it was. Pure."""

from __future__ import annotations

import json
import re
from typing import Any

import orjson

from kvtune_connector.wire import PARAMS

_FIELD = PARAMS.encode()
_KEY = b'"' + _FIELD + b'"'
_DECODER = json.JSONDecoder()
_ESCAPE = b"\\u"
"""A key may be written with escapes; documents without any need no look."""
_ERROR_EVENTS = (b'data: {"error"', b'data:{"error"')
_STOPPED = re.compile(rb'(?<!\\)"stop_reason": ?"')
_SPACE = b" \t\r\n"
MAX_LINE_BYTES = 16 * 1024 * 1024
"""A stream line longer than this is no server-sent event of a language model."""


class AnswerError(ValueError):
    """An engine's answer is not what it should be."""


def strip_document(document: bytes) -> tuple[bytes, dict[str, Any] | None]:
    """A JSON object without its top-level `kv_transfer_params`, and that field's value (None if absent or null).

    Bytes outside the field stay as they are. The cut is checked by parsing both: text inside strings or nested objects
    that merely looks like the field is left alone. Raises AnswerError if `document` is not JSON.
    """
    if _FIELD not in document and _ESCAPE not in document:
        return document, None
    try:
        whole = orjson.loads(document)
    except orjson.JSONDecodeError as error:
        raise AnswerError(f"the engine's answer is not JSON: {error}") from None
    if not isinstance(whole, dict) or PARAMS not in whole:
        return document, None
    params = whole.pop(PARAMS)
    at = document.rfind(_KEY)
    while at >= 0:
        cut = _cut_member(document, at)
        if cut is not None and _parses_to(cut, whole):
            return cut, params if isinstance(params, dict) else None
        at = document.rfind(_KEY, 0, at)
    # Escaped or repeated keys: never let the field through.
    return orjson.dumps(whole), params if isinstance(params, dict) else None


def ended_at_stop_string(answer: bytes) -> bool:
    """Whether an answer, or a chunk of one, says that a stop string ended it: then `stop_reason` is a text.

    Text of the answer cannot look so: quotation marks in it are escaped.
    """
    return b'"stop_reason"' in answer and _STOPPED.search(answer) is not None


def _parses_to(document: bytes, value: object) -> bool:
    try:
        return bool(orjson.loads(document) == value)
    except orjson.JSONDecodeError:
        return False


def _cut_member(document: bytes, at: int) -> bytes | None:
    """`document` without the member whose key starts at `at`, one comma included; None if there is no member there."""
    colon = _skip_space(document, at + len(_KEY))
    if document[colon : colon + 1] != b":":
        return None
    start = _skip_space(document, colon + 1)
    try:
        # Latin-1 keeps one character a byte, so that the end index is a byte index.
        _, length = _DECODER.raw_decode(document[start:].decode("latin-1"))
    except ValueError:
        return None
    end = _skip_space(document, start + length)
    if document[end : end + 1] == b",":
        return document[:at] + document[_skip_space(document, end + 1) :]
    before = at
    while before and document[before - 1 : before] in (b" ", b"\t", b"\r", b"\n"):
        before -= 1
    if document[before - 1 : before] == b",":
        before -= 1
    return document[:before] + document[end:]


def _skip_space(document: bytes, at: int) -> int:
    while at < len(document) and document[at] in _SPACE:
        at += 1
    return at


class StreamStripper:
    """Relays a server-sent event stream as it comes, whole lines at a time, without `kv_transfer_params`.

    After the stream: `params` is the last value lifted out, `done` tells whether `[DONE]` went by.
    """

    def __init__(self) -> None:
        self._rest = b""
        self.params: dict[str, Any] | None = None
        self.done = False
        self.error = False
        """Whether the engine reported an error as an event."""
        self.stopped = False
        """Whether a stop string ended the answer."""

    def feed(self, data: bytes) -> bytes:
        """What may be sent on now. Raises AnswerError for a line without end."""
        end = data.rfind(b"\n") + 1
        if not end:
            self._rest += data
            if len(self._rest) > MAX_LINE_BYTES:
                raise AnswerError(f"a line of the engine's stream is longer than {MAX_LINE_BYTES} bytes")
            return b""
        lines, self._rest = self._rest + data[:end], data[end:]
        if b"[DONE]" in lines and any(line.strip() == b"data: [DONE]" for line in lines.splitlines()):
            self.done = True
        if b'{"error"' in lines and any(line.startswith(_ERROR_EVENTS) for line in lines.splitlines()):
            self.error = True
        if not self.stopped and ended_at_stop_string(lines):
            self.stopped = True
        if _FIELD not in lines and _ESCAPE not in lines:
            return lines
        return b"".join(self._strip_line(line) for line in lines.splitlines(keepends=True))

    def close(self) -> bytes:
        """What is left after the engine's last byte."""
        rest, self._rest = self._rest, b""
        self.done = self.done or rest.strip() == b"data: [DONE]"
        return self._strip_line(rest)

    def _strip_line(self, line: bytes) -> bytes:
        if (_FIELD not in line and _ESCAPE not in line) or not line.startswith(b"data:"):
            return line
        payload = line[5:].rstrip(b"\r\n")
        ending = line[5 + len(payload) :]
        try:
            stripped, params = strip_document(payload.lstrip(b" "))
        except AnswerError:
            # Not an event of ours; a broken line that mentions the field must not reach the client.
            return b":" + ending if _FIELD in line else line
        if params is not None:
            self.params = params
        lead = payload[: len(payload) - len(payload.lstrip(b" "))]
        return b"data:" + lead + stripped + ending
