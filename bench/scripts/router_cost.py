"""What a router costs: CPU a request and added time to first token, of kvtune's, of others, and without any.

Engines answer at once (they are a few lines over a socket), so that what is measured is the router. All run in one
command on the same machine, rounds interleaved:

    python bench/scripts/router_cost.py --rust PATH/TO/vllm-router

`vllm-router` (PyPI, Rust) is started with `--vllm-pd-disaggregation`; without `--rust` only kvtune is measured.
Prints a table, `--json FILE` also writes every round. The numbers are of one machine; compare the ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import httptools
import uvloop

from kvtune_bench.process import free_port
from kvtune_bench.vllm_pair import cpu_seconds

CHUNK = (
    b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1790000000,"model":"m",'
    b'"choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null}]}\n\n'
)
REFERENCE = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [list(range(64))],
    "remote_engine_id": "e", "remote_request_id": "r", "remote_host": "127.0.0.1", "remote_port": 5600, "tp_size": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """One kind of request: SSE chunks, seconds between them, bytes of the prompt, clients at a time, requests."""

    name: str
    chunks: int
    gap_s: float
    prompt_bytes: int
    clients: int
    requests: int


SHAPES = (
    Shape("64 chunks, 8 kB prompt", 64, 0.0, 8_000, 16, 2000),
    Shape("64 chunks 5 ms apart, 8 kB prompt", 64, 0.005, 8_000, 64, 1500),
    Shape("512 chunks, 8 kB prompt", 512, 0.0, 8_000, 16, 600),
    Shape("64 chunks, 256 kB prompt", 64, 0.0, 256_000, 16, 1000),
    Shape("64 chunks, 2 MB prompt", 64, 0.0, 2_000_000, 4, 200),
)


# --- engines ----------------------------------------------------------------------------------------------------------


class _Engine(asyncio.Protocol):
    """Answers a request the moment its body is whole. The model's name says how: `CHUNKS-GAP_MS`."""

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._url = b""
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._url = url

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        # The load puts the model first and the prompt last: nothing of the prompt is looked at.
        body, self._body = b"".join(self._body), []
        transport = self._transport
        assert transport is not None
        if not body:
            text = b'{"object":"list","data":[{"id":"m","object":"model"}]}' if self._url == b"/v1/models" else b"{}"
            transport.write(_head(b"application/json", len(text)) + text)
            return
        if b'"do_remote_decode":true' in body.replace(b" ", b""):
            text = json.dumps(
                {
                    "id": "cmpl-1", "object": "chat.completion", "created": 1, "model": "m",
                    "choices": [
                        {"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "stop"}
                    ],
                    "usage": {"prompt_tokens": 2000, "total_tokens": 2001, "completion_tokens": 1},
                    "kv_transfer_params": REFERENCE,
                }
            ).encode()  # fmt: skip
            transport.write(_head(b"application/json", len(text)) + text)
            return
        at = body.index(b"bench-")
        chunks, gap_ms = body[at + 6 : body.index(b'"', at)].split(b"-")
        transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        self._send(int(chunks), float(gap_ms) / 1000)

    def _send(self, left: int, gap_s: float) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        while left > 1:
            transport.write(_FRAME)
            left -= 1
            if gap_s:
                asyncio.get_running_loop().call_later(gap_s, self._send, left, gap_s)
                return
        transport.write(_LAST)


def _head(kind: bytes, length: int) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n" % (kind, length)


def _frame(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


_FRAME = _frame(CHUNK)
_LAST = (
    _frame(
        CHUNK.replace(b'"finish_reason":null}]', b'"finish_reason":"stop"}]')[:-3]
        + b',"kv_transfer_params":' + json.dumps(REFERENCE).encode() + b"}\n\n"
    )
    + _frame(b"data: [DONE]\n\n")
    + b"0\r\n\r\n"
)  # fmt: skip


async def _serve(ports: Sequence[int]) -> None:
    loop = asyncio.get_running_loop()
    for port in ports:
        await loop.create_server(_Engine, "127.0.0.1", port, backlog=4096)
    print("ready", flush=True)
    await asyncio.Event().wait()


# --- load -------------------------------------------------------------------------------------------------------------


class _Client(asyncio.Protocol):
    """One connection that sends requests one after the other, for as long as `load` has some."""

    def __init__(self, load: _Load) -> None:
        self._load = load
        self._transport: asyncio.Transport | None = None
        self.closed = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._next()

    def _next(self) -> None:
        assert self._transport is not None
        request = self._load.request()
        if request is None:
            self._transport.close()
            return
        self._parser = httptools.HttpResponseParser(self)
        self._chunks, self._first, self._last = 0, 0.0, 0.0
        self._tail = b""
        self._sent = time.perf_counter()
        self._transport.writelines(request)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        now = time.perf_counter()
        if not self._first:
            self._first = now
        elif self._load.shape.gap_s:
            self._load.gaps.append(now - self._last)
        self._last = now
        self._chunks += body.count(b"data: ")
        self._tail = body[-64:]

    def on_message_complete(self) -> None:
        good = self._parser.get_status_code() == 200 and self._chunks == self._load.shape.chunks + 1
        if not good or not self._tail.endswith(b"[DONE]\n\n"):
            self._load.failed = f"status {self._parser.get_status_code()}, {self._chunks} events, ends {self._tail!r}"
            self._load.left = 0
        self._load.first.append(self._first - self._sent)
        # not from within the parser, which is still busy with this response
        asyncio.get_running_loop().call_soon(self._next)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(error)


class _Load:
    """All requests of a round, and what they saw."""

    def __init__(self, shape: Shape, port: int) -> None:
        self.shape = shape
        self.left = shape.requests
        self.first: list[float] = []
        self.gaps: list[float] = []
        self.failed = ""
        self._port = port
        self._names = f"{os.getpid()}-{time.time_ns()}"
        head = (
            f'{{"model":"bench-{shape.chunks}-{shape.gap_s * 1000:g}","stream":true,"max_tokens":{shape.chunks},'
            '"messages":[{"role":"user","content":"'
        )
        tail = b'"}]}'
        words = b"the quick brown fox jumps over the lazy dog, and then it does so again. "
        prompt = (words * (shape.prompt_bytes // len(words) + 1))[: shape.prompt_bytes]
        self._body = head.encode() + prompt + tail

    def request(self) -> tuple[bytes, bytes] | None:
        """Head and body of the next request; its conversation is its own."""
        if self.left <= 0:
            return None
        self.left -= 1
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{self._port}\r\ncontent-type: application/json\r\n"
            f"x-session-id: {self._names}-{self.left}\r\nauthorization: Bearer bench\r\n"
            f"content-length: {len(self._body)}\r\n\r\n"
        )
        return head.encode(), self._body


async def _press(shape: Shape, port: int) -> _Load:
    loop = asyncio.get_running_loop()
    load = _Load(shape, port)
    clients = []
    for _ in range(min(shape.clients, shape.requests)):
        _, client = await loop.create_connection(lambda: _Client(load), "127.0.0.1", port)
        clients.append(client)
    await asyncio.gather(*(client.closed for client in clients))
    if load.failed or len(load.first) != shape.requests:
        raise SystemExit(f"router_cost: port {port}: {load.failed or 'connections were closed early'}")
    return load


# --- processes --------------------------------------------------------------------------------------------------------


@contextmanager
def running(command: Sequence[str], log: Path, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A process for as long as the block lasts; ended by SIGTERM, then SIGKILL."""
    with log.open("wb") as out:
        # Its own programs, and one that the user named.
        process = subprocess.Popen(  # noqa: S603
            command, stdout=out, stderr=out, env=env, start_new_session=True
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_ready(url: str, process: subprocess.Popen[bytes], log: Path, seconds: float = 60.0) -> None:
    """Wait until a GET of `url` is answered with 200."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:  # noqa: S310 - of this module
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"router_cost: {url} did not get ready; {log}:\n{log.read_text(errors='replace')[-2000:]}")


# --- rounds -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Round:
    """One shape through one router."""

    shape: str
    target: str
    cpu_ms: float
    """Of the router's processes, a request."""
    ttft_p50_ms: float
    ttft_p99_ms: float
    gap_p99_ms: float | None
    """Between chunks, as the client got them; only where they are paced."""
    seconds: float


def _quantile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def one_round(shape: Shape, target: str, port: int, pid: int | None) -> Round:
    """Run a shape once. `pid` of the router; None: there is none."""
    before, begun = (cpu_seconds(pid) if pid else 0.0), time.monotonic()
    load = uvloop.run(_press(shape, port))
    spent, took = (cpu_seconds(pid) - before if pid else 0.0), time.monotonic() - begun
    return Round(
        shape.name, target, 1000 * spent / shape.requests, 1000 * statistics.median(load.first),
        1000 * _quantile(load.first, 0.99), 1000 * _quantile(load.gaps, 0.99) if load.gaps else None, took,
    )  # fmt: skip


def report(rounds: Sequence[Round]) -> str:
    """Medians over rounds, and the ratio of CPU to the first other router."""
    lines = [f"{'shape':36} {'router':8} {'CPU ms':>8} {'ratio':>6} {'TTFT P50':>9} {'P99 ms':>8} {'gap P99':>8}"]
    for shape in dict.fromkeys(one.shape for one in rounds):
        mine = [one for one in rounds if one.shape == shape]
        cpu = {t: statistics.median(o.cpu_ms for o in mine if o.target == t) for t in {o.target for o in mine}}
        for target in dict.fromkeys(one.target for one in mine):
            some = [one for one in mine if one.target == target]
            ratio = f"{cpu[target] / cpu['rust']:.2f}" if cpu.get("rust") and target != "direct" else "-"
            gaps = [one.gap_p99_ms for one in some if one.gap_p99_ms is not None]
            lines.append(
                f"{shape:36} {target:8} {cpu[target]:8.3f} {ratio:>6} "
                f"{statistics.median(o.ttft_p50_ms for o in some):9.2f} "
                f"{statistics.median(o.ttft_p99_ms for o in some):8.2f} "
                f"{f'{statistics.median(gaps):8.2f}' if gaps else '       -'}"
            )
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rust", help="path of vllm-router, to be measured beside")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shapes", default="", help="numbers from 0 on, comma-separated; default: all")
    parser.add_argument("--scale", type=float, default=1.0, help="requests of a round, as a multiple of the default")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--engine", nargs="+", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.engine:
        uvloop.run(_serve(given.engine))
        return
    shapes = [SHAPES[int(n)] for n in given.shapes.split(",")] if given.shapes else list(SHAPES)
    shapes = [replace(s, requests=max(s.clients, int(s.requests * given.scale))) for s in shapes]
    prefill, decode, ours, metrics, theirs, their_metrics = (free_port() for _ in range(6))
    rounds: list[Round] = []
    with tempfile.TemporaryDirectory(prefix="router-cost-") as folder, ExitStack() as stack:
        logs = Path(folder)
        engine = stack.enter_context(
            running([sys.executable, __file__, "--engine", str(prefill), str(decode)], logs / "engine.log")
        )
        wait_ready(f"http://127.0.0.1:{decode}/health", engine, logs / "engine.log")
        p, d = f"http://127.0.0.1:{prefill}", f"http://127.0.0.1:{decode}"
        env = {**os.environ, "OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.01"}
        kvtune = stack.enter_context(
            running(
                [sys.executable, "-m", "kvtune_cli", "router", "--port", str(ours), "--metrics-port", str(metrics),
                 "--prefill", p, "--decode", d, "--log-format", "json"],
                logs / "kvtune.log", env,
            )
        )  # fmt: skip
        wait_ready(f"http://127.0.0.1:{ours}/ready", kvtune, logs / "kvtune.log")
        targets: list[tuple[str, int, int | None]] = [("direct", decode, None), ("kvtune", ours, kvtune.pid)]
        if given.rust:
            rust = stack.enter_context(
                running(
                    [given.rust, "--port", str(theirs), "--host", "127.0.0.1", "--vllm-pd-disaggregation", "--prefill",
                     p, "--decode", d, "--prometheus-port", str(their_metrics), "--log-level", "warning",
                     "--max-payload-size", str(64 << 20)],
                    logs / "rust.log",
                )
            )  # fmt: skip
            wait_ready(f"http://127.0.0.1:{theirs}/health", rust, logs / "rust.log")
            targets.append(("rust", theirs, rust.pid))
        for shape in shapes:
            for target, port, pid in targets:
                warm = Shape(
                    shape.name, shape.chunks, shape.gap_s, shape.prompt_bytes, shape.clients, shape.clients * 2
                )
                one_round(warm, target, port, pid)
            for n in range(given.rounds):
                for target, port, pid in targets if n % 2 == 0 else targets[::-1]:
                    rounds.append(one_round(shape, target, port, pid))
                    print(f"{rounds[-1]}", file=sys.stderr)
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; medians of {given.rounds}"
    )
    print(report(rounds))
    if given.json:
        given.json.write_text(json.dumps([asdict(one) for one in rounds], indent=1) + "\n")


if __name__ == "__main__":
    main()
