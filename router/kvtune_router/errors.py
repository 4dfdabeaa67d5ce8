"""Errors as OpenAI's clients expect them."""

from __future__ import annotations

import orjson
from aiohttp import web


class RequestError(Exception):
    """A request that is answered with an error of OpenAI's shape; `message` must not quote the request's text."""

    def __init__(
        self, status: int, message: str, *, kind: str = "invalid_request_error", code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code

    def body(self) -> bytes:
        """The JSON body."""
        return error_body(self.message, kind=self.kind, code=self.code)


def error_body(message: str, *, kind: str, code: str | int | None = None, param: str | None = None) -> bytes:
    """`{"error": {...}}` as JSON."""
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})


def error_response(error: RequestError, headers: dict[str, str] | None = None) -> web.Response:
    """The HTTP answer for an error."""
    extra = dict(headers or {})
    if error.status == 503:
        extra.setdefault("Retry-After", "1")
    return web.Response(status=error.status, body=error.body(), content_type="application/json", headers=extra)
