"""The engines' side channel: requests and replies as JSON lines over a persistent TCP connection on loopback.

It stands for vLLM's handshake socket and for NIXL's reads and notifications together. Operations: `handshake` (who are
you, what time is it), `read` (may I read these blocks), `done` (I have read them), `release` (you may free them),
`heartbeat` (keep the leases of these requests).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import orjson
from loguru import logger

CONNECT_TIMEOUT_S = 2.0
CALL_TIMEOUT_S = 5.0
"""Wall seconds; a peer on loopback that does not answer in this time is taken for dead."""
_MAX_LINE = 1 << 20

Handler = Callable[[dict[str, Any]], dict[str, Any]]
"""Answers one request; runs on the event loop and must not wait."""


class DeadPeerError(ConnectionError):
    """The other engine cannot be reached, went away, or does not answer in time."""


class SideChannelServer:
    """Listens for other engines and answers them with `handler`."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self.host = ""
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Bind; port 0 takes any free one. Raises OSError if the port is taken."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=_MAX_LINE)
        self.host, self.port = self._server.sockets[0].getsockname()[:2]

    async def close(self) -> None:
        """Stop listening and drop all connections."""
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            while line := await reader.readline():
                writer.write(self._reply(line))
        except (ConnectionError, ValueError, asyncio.CancelledError):
            # The peer left, sent a line without end, or this engine stops: all that is left is to hang up.
            return
        finally:
            self._connections.discard(task)
            writer.close()

    def _reply(self, line: bytes) -> bytes:
        number: object = None
        try:
            request = orjson.loads(line)
            number = request["n"]
            answer = self._handler(request)
        except Exception as error:  # a fault in one request must not take down the channel of all
            logger.opt(exception=error).error("side channel request failed")
            answer = {"error": type(error).__name__}
        return orjson.dumps({**answer, "n": number}) + b"\n"


class Peer:
    """The connection to one other engine: opened at first use, and again after it broke."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._writer: asyncio.StreamWriter | None = None
        self._reader_task: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._number = 0
        self._opening = asyncio.Lock()
        self.facts: dict[str, Any] = {}
        """What the caller learned about the peer; forgotten when the connection breaks."""

    async def call(self, op: str, **fields: Any) -> dict[str, Any]:
        """Send a request and wait for its reply. Raises DeadPeerError."""
        async with self._opening:
            if self._writer is None:
                await self._open()
            writer = self._writer
        if writer is None:
            raise DeadPeerError(f"{self._host}:{self._port} went away")
        self._number += 1
        number = self._number
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            writer.write(orjson.dumps({**fields, "op": op, "n": number}) + b"\n")
            async with asyncio.timeout(CALL_TIMEOUT_S):
                reply: dict[str, Any] = await future
        except TimeoutError:
            raise DeadPeerError(f"{self._host}:{self._port} did not answer {op} in {CALL_TIMEOUT_S} s") from None
        finally:
            self._waiting.pop(number, None)
        if "error" in reply:
            raise DeadPeerError(f"{self._host}:{self._port} failed at {op}: {reply['error']}")
        return reply

    async def _open(self) -> None:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                reader, self._writer = await asyncio.open_connection(self._host, self._port, limit=_MAX_LINE)
        except (OSError, TimeoutError, ValueError, OverflowError) as error:
            raise DeadPeerError(f"{self._host}:{self._port}: {error or 'no answer'}") from None
        self._reader_task = asyncio.create_task(self._read(reader), name=f"peer {self._host}:{self._port}")

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                reply = orjson.loads(line)
                future = self._waiting.get(reply.get("n"))
                if future is not None and not future.done():
                    future.set_result(reply)
        except (ConnectionError, ValueError) as error:
            logger.debug("side channel to {}:{} broke: {}", self._host, self._port, error)
        finally:
            self._lost()

    def _lost(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self.facts = {}
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(DeadPeerError(f"{self._host}:{self._port} went away"))

    async def close(self) -> None:
        """Hang up."""
        if self._reader_task is not None:
            self._reader_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader_task
        self._lost()
