"""HTTP/1.1 to the engines: pooled connections, one request at a time each, bytes handed on as they come.

A general client spends more on a request than everything else the router does (`bench/scripts/router_cost.py`). This
one knows what a router needs and no more: POST with a body, answers of any length, no redirects, cookies or proxies.
Parsing is httptools' (llhttp).
"""

from __future__ import annotations

import asyncio
import ssl
import zlib
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from urllib.parse import urlsplit

import httptools

_HIGH_WATER = 256 * 1024
"""Bytes that wait for their reader before the engine is made to wait."""
_MAX_HEAD = 64 * 1024
_SMALL = 64 * 1024
"""Bodies up to here are sent in one piece with the head; larger ones are not copied."""


class UpstreamError(Exception):
    """No usable answer."""


class NotSent(UpstreamError):
    """No connection could be made: the engine has seen nothing of the request."""


class Broken(UpstreamError):
    """The connection broke, fell silent, or brought what is not HTTP: the engine may have done anything."""


class Answer:
    """An engine's answer whose head has come. Use as a context manager: leaving it early closes the connection."""

    def __init__(self, connection: _Connection, status: int, headers: Mapping[bytes, bytes]) -> None:
        self._connection = connection
        self.status = status
        self._headers = headers

    def header(self, name: bytes, default: str = "") -> str:
        """A header by its name in lower case."""
        value = self._headers.get(name)
        return value.decode("latin-1") if value is not None else default

    @property
    def content_type(self) -> str:
        """The media type without parameters, in lower case."""
        return self.header(b"content-type", "application/octet-stream").partition(";")[0].strip().lower()

    async def some(self) -> bytes:
        """All bytes of the body that have come, at least one; empty at its end. Raises Broken."""
        return await self._connection.some()

    async def read(self) -> bytes:
        """The whole body, or what is left of it. Raises Broken."""
        parts = []
        while data := await self._connection.some():
            parts.append(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def __enter__(self) -> Answer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.release()


class _Connection(asyncio.Protocol):
    """One connection and the answer that is being read from it."""

    def __init__(self, pool: _Pool) -> None:
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._failure: str | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._active_s = 0.0
        self._patience_s = 0.0
        self.idle_since_s = 0.0
        self._reset()
        self._complete = True

    def _reset(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[bytes, bytes] = {}
        self._head_bytes = 0
        self._headed = False
        self._complete = self._keep = False
        self._interim = False
        self._decoder: zlib._Decompress | None = None
        self._data: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._paused = False

    # --- asyncio.Protocol -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        if self._complete:
            # Nothing was asked: what comes belongs to no request.
            self._fail("sent more than was asked for")
            return
        self._active_s = self._loop.time()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail("wants to change the protocol")
            return
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            self._fail(str(cause) if isinstance(cause, Broken) else f"brought what cannot be read ({error})")
            return
        except httptools.HttpParserError as error:
            self._fail(f"is not HTTP ({error})")
            return
        if self._waiting_bytes > _HIGH_WATER and not self._paused and not self._complete:
            self._paused = True
            assert self._transport is not None
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if not self._complete:
            until_closed = (
                self._headed and b"content-length" not in self._headers and b"transfer-encoding" not in self._headers
            )
            if until_closed and error is None:
                self._complete = True
            elif self._failure is None:
                self._failure = "broke" + (f" ({type(error).__name__})" if error is not None else "")
        self._pool.forget(self)
        self._wake()

    # --- httptools --------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._complete:
            # The answer stands; what follows it belongs to no request.
            raise Broken("sent more than was asked for")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > _MAX_HEAD:
            raise Broken(f"sent a head of more than {_MAX_HEAD} bytes")
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        if self._parser.get_status_code() < 200:
            self._interim = True
            return
        encoding = self._headers.get(b"content-encoding", b"identity").lower()
        if encoding in (b"gzip", b"deflate", b"x-gzip"):
            self._decoder = zlib.decompressobj(zlib.MAX_WBITS | 32)
        elif encoding not in (b"identity", b""):
            raise Broken("answered in an encoding that was not asked for")
        self._headed = True

    def on_body(self, body: bytes) -> None:
        if self._decoder is not None:
            try:
                body = self._decoder.decompress(body)
            except zlib.error:
                raise Broken("sent compressed data that cannot be read") from None
            if not body:
                return
        self._data.append(body)
        self._waiting_bytes += len(body)

    def on_message_complete(self) -> None:
        if self._interim:
            self._interim, self._headers = False, {}
            return
        self._complete = True
        # llhttp forgets it with the next message
        self._keep = self._parser.should_keep_alive()

    # --- one request ------------------------------------------------------------------------------------------------

    async def exchange(self, head: bytes, body: bytes, patience_s: float) -> Answer:
        """Send a request, wait for the head of its answer. `patience_s`: the longest silence. Raises Broken."""
        self._reset()
        transport = self._transport
        if transport is None:
            raise Broken("the connection broke")
        self._patience_s = patience_s
        self._active_s = self._loop.time()
        if self._watch is None:
            self._watch = self._loop.call_later(patience_s, self._look)
        if len(body) <= _SMALL:
            transport.write(head + body)
        else:
            transport.writelines((head, body))
        while not self._headed:
            self._raise()
            await self._news()
        return Answer(self, self._parser.get_status_code(), self._headers)

    async def some(self) -> bytes:
        """See `Answer.some`."""
        while not self._data:
            if self._complete:
                return b""
            self._raise()
            await self._news()
        data = self._data.popleft() if len(self._data) == 1 else b"".join(self._data)
        self._data.clear()
        self._waiting_bytes = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return data

    def _raise(self) -> None:
        if self._failure is not None:
            raise Broken(f"the connection {self._failure}")

    async def _news(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _look(self) -> None:
        """One timer a connection, moved on when it fires: arming one for each piece would cost more than the piece."""
        self._watch = None
        if self._complete or self._transport is None:
            return
        left = self._active_s + self._patience_s - self._loop.time()
        # A full buffer is our own client's slowness, not the engine's silence.
        if left <= 0 and not self._paused:
            self._fail(f"was silent for {self._patience_s:g} s")
            return
        self._watch = self._loop.call_later(max(left, 0.01) if left > 0 else self._patience_s, self._look)

    def _fail(self, why: str) -> None:
        if self._failure is None:
            self._failure = why
        self.abort()
        self._wake()

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def release(self) -> None:
        """The request is over: back to the pool if the answer was read to its end, else closed."""
        whole = self._complete and not self._data and self._failure is None
        if whole and self._transport is not None and self._keep:
            self._pool.put(self)
        else:
            self.abort()


class _Pool:
    """Connections to one address that wait for a request."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None, keep_s: float) -> None:
        self._host, self._port, self._tls, self._keep_s = host, port, tls, keep_s
        self._idle: deque[_Connection] = deque()
        self._all: set[_Connection] = set()

    async def take(self, patience_s: float) -> _Connection:
        """A connection, the one used last if any waits; else a new one. Raises NotSent."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        while self._idle and now - self._idle[0].idle_since_s > self._keep_s:
            self._idle.popleft().abort()
        if self._idle:
            return self._idle.pop()
        try:
            async with asyncio.timeout(patience_s):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self), self._host, self._port, ssl=self._tls,
                    server_hostname=self._host if self._tls is not None else None,
                )  # fmt: skip
        except TimeoutError:
            raise NotSent("no connection within the time-out") from None
        except ConnectionRefusedError:
            raise NotSent("connection refused") from None
        except OSError as error:
            raise NotSent(f"no connection ({error.strerror or type(error).__name__})") from None
        self._all.add(connection)
        return connection

    def put(self, connection: _Connection) -> None:
        connection.idle_since_s = asyncio.get_running_loop().time()
        self._idle.append(connection)

    def forget(self, connection: _Connection) -> None:
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        for connection in tuple(self._all):
            connection.abort()


class Upstream:
    """Requests to engines by URL. Times in seconds: `connect` a connection, `read` the longest silence, `keep` idle."""

    def __init__(self, *, connect_timeout: float, read_timeout: float, keep: float) -> None:
        self._connect_timeout, self._read_timeout, self._keep = connect_timeout, read_timeout, keep
        self._pools: dict[str, tuple[_Pool, bytes, str]] = {}

    async def post(self, base: str, path: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        """POST `body` to `base` + `path`, and the head of the answer. Raises NotSent or Broken.

        ValueError for a header with a line break in it.
        """
        found = self._pools.get(base)
        if found is None:
            found = self._pools[base] = self._open(base)
        pool, host, prefix = found
        lines = [f"POST {prefix}{path} HTTP/1.1\r\n".encode("ascii"), host]
        for name, value in headers.items():
            if "\r" in value or "\n" in value:
                raise ValueError(f"a line break in the header {name}")
            # As aiohttp's server decodes what clients send.
            lines.append(f"{name}: {value}\r\n".encode("utf-8", "surrogateescape"))
        lines.append(b"Content-Length: %d\r\n\r\n" % len(body))
        connection = await pool.take(self._connect_timeout)
        try:
            return await connection.exchange(b"".join(lines), body, self._read_timeout)
        except BaseException:
            connection.abort()
            raise

    def _open(self, base: str) -> tuple[_Pool, bytes, str]:
        parts = urlsplit(base)
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        assert parts.hostname is not None
        pool = _Pool(parts.hostname, parts.port or (443 if tls is not None else 80), tls, self._keep)
        return pool, f"Host: {parts.netloc}\r\n".encode("ascii"), parts.path

    def close(self) -> None:
        """Close every connection."""
        for pool, _, _ in self._pools.values():
            pool.close()
