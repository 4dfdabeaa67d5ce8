"""What the end-to-end tests talk to: a real Prometheus server, an OTLP receiver, and kvtune's own processes."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
import pytest_asyncio
import yaml
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from kvtune_bench.process import ChildProcess, ProcessError, free_port

KVTUNE = (sys.executable, "-m", "kvtune_cli")
WAIT_S = 60.0
"""How long anything may take to come about; nothing here is expected to take a tenth of it."""
_PORT_TRIES = 5


async def until(condition: Callable[[], Awaitable[Any]], what: str) -> Any:
    """The first true value of `condition`, asked again and again; fails the test when it never comes."""
    try:
        async with asyncio.timeout(WAIT_S):
            while True:
                found = await condition()
                if found:
                    return found
                await asyncio.sleep(0.1)
    except TimeoutError:
        pytest.fail(f"waited {WAIT_S:g} s in vain: {what}")


# --- OTLP -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as it came over the wire; ids in hex, the parent's empty for a root."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    kind: int
    attributes: dict[str, Any]
    status: int
    resource: dict[str, Any]


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


@dataclass
class OtlpReceiver:
    """An OTLP/HTTP collector on loopback that keeps all it gets, and can be killed or made to hang."""

    url: str = ""
    spans: list[ReceivedSpan] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    """Decompressed request bodies, to look for what must not be in them."""
    hangs: bool = False
    """Take requests and never answer."""
    waiting: int = 0
    """Requests that hang now."""
    _runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/traces", self._receive)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _receive(self, request: web.Request) -> web.Response:
        if self.hangs:
            self.waiting += 1
            await asyncio.Event().wait()
        body = await request.read()
        self.raw.append(body)
        batch = ExportTraceServiceRequest()
        batch.ParseFromString(body)
        for part in batch.resource_spans:
            resource = _attributes(part.resource.attributes)
            for scope in part.scope_spans:
                for span in scope.spans:
                    self.spans.append(
                        ReceivedSpan(
                            span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(), span.name, span.kind,
                            _attributes(span.attributes), span.status.code, resource,
                        )
                    )  # fmt: skip
        return web.Response(
            body=ExportTraceServiceResponse().SerializeToString(), content_type="application/x-protobuf"
        )

    def environment(self) -> tuple[str, ...]:
        """A command prefix that makes a child send its spans here, soon and all of them."""
        return (
            "env", f"OTEL_EXPORTER_OTLP_ENDPOINT={self.url}", "OTEL_BSP_SCHEDULE_DELAY=200",
            "OTEL_TRACES_SAMPLER=parentbased_always_on",
        )  # fmt: skip

    def trace(self, trace_id: str) -> list[ReceivedSpan]:
        """All spans of a trace so far."""
        return [span for span in self.spans if span.trace_id == trace_id]

    async def whole_trace(self, trace_id: str) -> dict[str, ReceivedSpan]:
        """The spans of a trace by name, once its turn has ended; each name once."""

        async def ended() -> bool:
            return any(span.name == "kvtune.turn" for span in self.trace(trace_id))

        await until(ended, f"the turn's span of trace {trace_id}")
        spans = self.trace(trace_id)
        named = {span.name: span for span in spans}
        assert len(named) == len(spans), [span.name for span in spans]
        return named


# --- Prometheus -----------------------------------------------------------------------------------------------------


class Prometheus:
    """A running Prometheus server and its HTTP API."""

    def __init__(self, url: str, targets: int, child: ChildProcess, log: Path, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.targets = targets
        self.log = log
        self.child = child
        self._session = session

    async def get(self, path: str, **parameters: str) -> Any:
        """`data` of an API answer."""
        async with self._session.get(f"{self.url}/api/v1/{path}", params=parameters) as answer:
            body = orjson.loads(await answer.read())
        assert body["status"] == "success", body
        return body["data"]

    async def value(self, query: str) -> float | None:
        """The value of a query that gives one series; None where it gives none."""
        result = (await self.get("query", query=query))["result"]
        assert len(result) <= 1, result
        return float(result[0]["value"][1]) if result else None

    async def own_metrics(self) -> str:
        """Prometheus' own exposition."""
        async with self._session.get(f"{self.url}/metrics") as answer:
            return await answer.text()

    async def scraped_since(self, unix_s: float) -> None:
        """Wait until every target was scraped, and answered, after `unix_s`."""

        async def scraped() -> bool:
            oldest = await self.value(f"min(timestamp(up) and up == 1) and on() count(up == 1) == {self.targets}")
            return oldest is not None and oldest > unix_s

        await until(scraped, "a scrape of every target")

    async def scraped_often(self, times: int) -> None:
        """Wait until every target was scraped so often (within a minute)."""

        async def scraped() -> bool:
            counts = await self.get("query", query="count_over_time(up[1m])")
            rows = [float(row["value"][1]) for row in counts["result"]]
            # Targets come into being some seconds after the start, each at a time of its own.
            return len(rows) == self.targets and min(rows) >= times

        await until(scraped, f"{times} scrapes of every target")


class Prometheuses:
    """Starts Prometheus servers in directories of their own and stops them, each by its process id."""

    def __init__(self, directory: Path, session: aiohttp.ClientSession) -> None:
        self._directory = directory
        self._session = session
        self._running: list[ChildProcess] = []
        self._started = 0

    async def start(
        self,
        jobs: Mapping[str, str | Sequence[str]],
        *flags: str,
        prefix: str = "",
        blocks: Path | None = None,
        rules: Sequence[Path] = (),
        every: str = "1s",
    ) -> Prometheus:
        """A server that scrapes each job's targets (`host:port`) so often, and evaluates the files of `rules`.

        It begins with the data in `blocks`.
        """
        targets = {job: [one] if isinstance(one, str) else list(one) for job, one in jobs.items()}
        program = shutil.which("prometheus")
        if program is None:
            pytest.fail("no `prometheus` on PATH; install it: apt-get install -y --no-install-recommends prometheus")
        self._started += 1
        home = self._directory / f"prometheus-{self._started}"
        home.mkdir()
        if blocks is not None:
            os.rename(blocks, home / "data")
        config = {
            "global": {"scrape_interval": every, "scrape_timeout": every},
            "rule_files": [str(path) for path in rules],
            "scrape_configs": [
                {"job_name": job, "static_configs": [{"targets": some}]} for job, some in targets.items()
            ],
        }
        (home / "prometheus.yml").write_text(yaml.safe_dump(config))
        log = home / "log"
        for attempt in range(_PORT_TRIES):
            port = free_port()
            # Prometheus prints nothing on stdout; the shell does so in its stead, and becomes it.
            child = await ChildProcess.start(
                "prometheus",
                [
                    "sh", "-c", 'echo started; exec "$@"', "sh", program, f"--config.file={home / 'prometheus.yml'}",
                    f"--storage.tsdb.path={home / 'data'}", f"--web.listen-address=127.0.0.1:{port}",
                    f"--web.route-prefix=/{prefix}", "--enable-feature=exemplar-storage", *flags,
                ],
                log,
            )  # fmt: skip
            self._running.append(child)
            url = f"http://127.0.0.1:{port}/{prefix}".rstrip("/")
            server = Prometheus(url, sum(map(len, targets.values())), child, log, self._session)
            try:
                await self._ready(server)
                return server
            except ProcessError:
                if attempt == _PORT_TRIES - 1 or "address already in use" not in log.read_text():
                    raise
        raise AssertionError("unreachable")

    async def _ready(self, server: Prometheus) -> None:
        async def ready() -> bool:
            if server.child.returncode is not None:
                raise ProcessError(f"prometheus stopped with {server.child.returncode}:\n{server.log.read_text()}")
            try:
                async with self._session.get(f"{server.url}/-/ready") as answer:
                    return answer.status == 200
            except aiohttp.ClientError:
                return False

        await until(ready, f"Prometheus at {server.url}")

    async def stop(self) -> None:
        for child in self._running:
            await child.stop()


# --- kvtune's own processes -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ran:
    """A finished command."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Its stdout as JSON, all of it."""
        return orjson.loads(self.out)


@dataclass(frozen=True)
class Recorder:
    """`kvtune record` at work."""

    directory: Path
    targets: int
    _process: asyncio.subprocess.Process

    async def scraped_since(self, unix_s: float) -> None:
        """Wait until every target was recorded after `unix_s`."""

        async def recorded() -> bool:
            assert self._process.returncode is None, await self._process.communicate()
            names = [name.partition("-") for name in os.listdir(self.directory) if name.endswith(".prom")]
            return len({target for ms, _, target in names if int(ms) > 1000 * unix_s}) == self.targets

        await until(recorded, "snapshots of every target")

    async def finish(self) -> Ran:
        """Interrupt it, as Ctrl-C would; it takes a last round."""
        self._process.send_signal(signal.SIGINT)
        out, err = await asyncio.wait_for(self._process.communicate(), WAIT_S)
        assert self._process.returncode is not None
        return Ran(self._process.returncode, out.decode(), err.decode())


class Processes:
    """Starts kvtune commands as children and stops them in reverse order."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._running: list[ChildProcess] = []
        self._recording: list[asyncio.subprocess.Process] = []

    def log(self, name: str) -> Path:
        """Where the child's stderr goes."""
        return self.directory / f"{name}.log"

    async def start(self, name: str, *arguments: str, env: tuple[str, ...] = ()) -> ChildProcess:
        child = await ChildProcess.start(name, [*env, *KVTUNE, *arguments], self.log(name))
        self._running.append(child)
        return child

    async def engine(self, role: str, *more: str, name: str | None = None) -> tuple[ChildProcess, str]:
        """A simulated engine in real time; its URL with it."""
        child = await self.start(name or role, "bench", "engine", "--role", role, "--noise", "0", *more)
        return child, child.ready.split()[1]

    async def run(self, *arguments: str) -> Ran:
        """Run a command to its end."""
        process = await asyncio.create_subprocess_exec(
            *KVTUNE, *arguments, stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            out, err = await asyncio.wait_for(process.communicate(), WAIT_S)
        except BaseException:
            process.kill()
            await process.wait()
            raise
        assert process.returncode is not None
        return Ran(process.returncode, out.decode(), err.decode())

    async def record(self, directory: Path, *urls: str) -> Recorder:
        """`kvtune record` of `urls` each second, once every target was written."""
        targets = [part for url in urls for part in ("--scrape", url)]
        os.makedirs(directory, exist_ok=True)
        process = await asyncio.create_subprocess_exec(
            *KVTUNE, "record", *targets, "--out", str(directory), "--interval", "1s", "--format", "json",
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        self._recording.append(process)
        recorder = Recorder(directory, len(urls), process)
        await recorder.scraped_since(0)
        return recorder

    async def stop(self) -> None:
        for process in self._recording:
            if process.returncode is None:
                process.kill()
                await process.wait()
        statuses = {child.name: await child.stop() for child in reversed(self._running)}
        assert not any(statuses.values()), f"stopped by themselves, each: {statuses}"


@contextmanager
def _directory(factory: pytest.TempPathFactory, name: str) -> Iterator[Path]:
    path = factory.mktemp(name)
    yield path
    # a time series database per run adds up, and logs are shown where they matter
    shutil.rmtree(path, ignore_errors=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        yield session


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def processes(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Processes]:
    with _directory(tmp_path_factory, "processes") as directory:
        processes = Processes(directory)
        try:
            yield processes
        finally:
            await processes.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def prometheuses(
    tmp_path_factory: pytest.TempPathFactory, session: aiohttp.ClientSession
) -> AsyncIterator[Prometheuses]:
    with _directory(tmp_path_factory, "prometheus") as directory:
        servers = Prometheuses(directory, session)
        try:
            yield servers
        finally:
            await servers.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def otlp() -> AsyncIterator[Callable[[], Awaitable[OtlpReceiver]]]:
    """Starts OTLP receivers."""
    async with AsyncExitStack() as stack:

        async def start() -> OtlpReceiver:
            receiver = OtlpReceiver()
            await receiver.start()
            stack.push_async_callback(receiver.stop)
            return receiver

        yield start


@pytest.fixture(scope="session")
def wait_until() -> Callable[[Callable[[], Awaitable[Any]], str], Awaitable[Any]]:
    """`until`, for test modules, which cannot import this one."""
    return until
