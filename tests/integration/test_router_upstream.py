"""The router's own HTTP client, against sockets that answer whatever they are told to."""

from __future__ import annotations

import asyncio
import gzip
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtune_router.upstream import Broken, NotSent, Upstream

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def a_request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Head and body of the next request."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    return head, await reader.readexactly(length)


@asynccontextmanager
async def engine(handler: Handler) -> AsyncIterator[tuple[str, list[int]]]:
    """A server that runs `handler` once a connection; its URL, and one entry for each connection it got."""
    connections: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(1)
        try:
            await handler(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/prefix", connections
    finally:
        server.close()


@asynccontextmanager
async def upstream(read_timeout: float = 5.0, keep: float = 4.0) -> AsyncIterator[Upstream]:
    client = Upstream(connect_timeout=5.0, read_timeout=read_timeout, keep=keep)
    try:
        yield client
    finally:
        client.close()


def answering(*pieces: bytes, close: bool = False) -> Handler:
    """Each request is answered with the same bytes, sent piece by piece."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await a_request(reader)
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            if close:
                return

    return handler


async def asked(client: Upstream, url: str, body: bytes = b"{}") -> tuple[int, bytes]:
    with await client.post(url, "/v1/x", body, {"X-A": "b"}) as answer:
        return answer.status, await answer.read()


PACKED = gzip.compress(b"packed", mtime=0)
"""Without the time, so that a test's name is the same in every process."""
OK = b"HTTP/1.1 200 OK\r\nContent-Type: Text/Event-Stream; charset=utf-8\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"6\r\ndata: \r\n1;x=y\r\na\r\n2\r\n\n\n\r\n0\r\nTrailer: t\r\n\r\n"
)


async def test_the_request_is_whole_and_its_answer_too() -> None:
    seen: list[tuple[bytes, bytes]] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            seen.append(await a_request(reader))
            writer.write(OK)

    large = bytes(range(256)) * 4096
    async with engine(handler) as (url, connections), upstream() as client:
        for body in (b"{}", large):
            with await client.post(url, "/v1/x", body, {"X-A": "b", "Authorization": "B\udcff"}) as answer:
                assert (answer.status, answer.content_type, await answer.read()) == (200, "text/event-stream", b"hello")
                assert answer.header(b"content-length") == "5" and answer.header(b"none", "-") == "-"
        host = url.removeprefix("http://").removesuffix("/prefix").encode()
    head, body = seen[0]
    assert head == (
        b"POST /prefix/v1/x HTTP/1.1\r\nHost: "
        + host
        + b"\r\nX-A: b\r\nAuthorization: B\xff\r\nContent-Length: 2\r\n\r\n"
    )
    assert body == b"{}" and seen[1][1] == large
    assert len(connections) == 1, "the second request reuses the connection of the first"


async def test_a_header_with_a_line_break_is_never_sent() -> None:
    async with engine(answering(OK)) as (url, connections), upstream() as client:
        for bad in ("a\r\nX-B: c", "a\nX-B: c", "a\r"):
            with pytest.raises(ValueError, match="line break in the header X-A"):
                await client.post(url, "/v1/x", b"{}", {"X-A": bad})
        assert connections == []


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(1, len(CHUNKED) - 1), max_size=12, unique=True))
async def test_wherever_an_answer_is_cut_it_is_read_the_same(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(CHUNKED)]
    pieces = [CHUNKED[a:b] for a, b in itertools.pairwise(edges)]
    async with engine(answering(*pieces)) as (url, connections), upstream() as client:
        assert [await asked(client, url) for _ in range(2)] == [(200, b"data: a\n\n")] * 2
        assert len(connections) == 1


@settings(max_examples=80, deadline=None)
@given(garbage=st.binary(max_size=300), begun=st.sampled_from([b"", CHUNKED[:60], CHUNKED[:90], OK[:20]]))
async def test_whatever_comes_ends_in_an_answer_or_an_error_of_ours(garbage: bytes, begun: bytes) -> None:
    async with engine(answering(begun + garbage, close=True)) as (url, _), upstream() as client:
        try:
            status, body = await asyncio.wait_for(asked(client, url), 10)
        except Broken:
            return
        # Only what really is an answer passes for one.
        assert 200 <= status <= 999 and len(body) <= len(garbage) + len(begun)


@pytest.mark.parametrize(
    ("sent", "body"),
    [
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, b"hello"),
        (b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK, b"hello"),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nuntil the end", b"until the end"),
        (b"HTTP/1.0 200 OK\r\n\r\nold", b"old"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b""),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (
            b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(PACKED) + PACKED,
            b"packed",
        ),
    ],
)
async def test_answers_of_every_length(sent: bytes, body: bytes) -> None:
    async with engine(answering(sent, close=True)) as (url, _), upstream() as client:
        assert (await asked(client, url))[1] == body


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"", "broke"),
        (OK[:-1], "broke"),
        (CHUNKED[:-2], "broke"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", "is not HTTP"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "is not HTTP"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000 + b"\r\n\r\n", "head of more than 65536 bytes"),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: br\r\nContent-Length: 1\r\n\r\nx", "encoding that was not asked for"),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nxyz", "compressed data"),
        (b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", "change the protocol"),
    ],
)
async def test_what_is_no_answer_is_broken_and_says_why(sent: bytes, why: str) -> None:
    async with engine(answering(sent, close=True)) as (url, _), upstream() as client:
        with pytest.raises(Broken, match=why):
            await asyncio.wait_for(asked(client, url), 10)


async def test_an_engine_that_falls_silent_is_given_up() -> None:
    for sent in (b"", CHUNKED[:90]):
        async with engine(answering(sent)) as (url, _), upstream(read_timeout=0.05) as client:
            with pytest.raises(Broken, match=r"was silent for 0\.05 s"):
                await asyncio.wait_for(asked(client, url), 10)


async def test_nobody_listening_is_not_sent() -> None:
    server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()
    await server.wait_closed()
    async with upstream() as client:
        with pytest.raises(NotSent, match="connection refused"):
            await client.post(url, "/", b"", {})
        with pytest.raises(NotSent, match="no connection"):
            await client.post("http://name.invalid:80", "/", b"", {})


async def test_a_connection_left_before_its_end_is_closed_and_never_used_again() -> None:
    ended = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await a_request(reader)
        writer.write(CHUNKED[:100])
        await reader.read()
        ended.set()

    async with engine(handler) as (url, connections), upstream() as client:
        with await client.post(url, "/v1/x", b"{}", {}) as answer:
            assert (await answer.some()).startswith(b"data: ")
        await asyncio.wait_for(ended.wait(), 10)
        with await client.post(url, "/v1/x", b"{}", {}):
            assert len(connections) == 2


async def test_connections_that_waited_too_long_or_were_closed_are_not_used() -> None:
    async with engine(answering(OK)) as (url, connections), upstream(keep=0.0) as client:
        assert await asked(client, url) == await asked(client, url)
        assert len(connections) == 2
    async with engine(answering(OK, close=True)) as (url, connections), upstream() as client:
        await asked(client, url)
        await asyncio.sleep(0.05)
        assert await asked(client, url) == (200, b"hello")
        assert len(connections) == 2


async def test_a_second_answer_to_one_request_reaches_nobody() -> None:
    async with engine(answering(OK + OK.replace(b"hello", b"wrong"))) as (url, connections), upstream() as client:
        for _ in range(2):
            assert await asked(client, url) == (200, b"hello")
        assert len(connections) == 2, "a connection that said more than was asked for is not used again"


async def test_an_engine_that_sends_faster_than_it_is_read_is_made_to_wait() -> None:
    sent = 0
    size = 64 * 2**20

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await a_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        while sent < size:
            writer.write(b"x" * 2**16)
            await writer.drain()
            sent += 2**16

    async with engine(handler) as (url, _), upstream(read_timeout=0.2) as client:
        with await client.post(url, "/v1/x", b"{}", {}) as answer:
            await asyncio.sleep(0.5)
            assert sent < size / 2, "the reader has not read anything"
            assert len(await answer.read()) == size, "its own slowness is not the engine's silence"
