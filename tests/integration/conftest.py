from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web

from kvtune_bench.engine import EngineConfig
from kvtune_bench.engine_server import EngineServer, running_engine
from kvtune_router.config import RouterConfig
from kvtune_router.server import Router, running
from kvtune_telemetry.vocabulary import Role


@dataclass
class Seen:
    """A request as an engine got it."""

    path: str
    headers: Any
    body: dict[str, Any]


@dataclass
class Stub:
    """An engine that answers what it is told to, byte for byte, and remembers what it was asked."""

    url: str = ""
    seen: list[Seen] = field(default_factory=list)
    answer: bytes = b"{}"
    status: int = 200
    content_type: str = "application/json"
    handler: Callable[[web.Request], Any] | None = None

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/health":
            return web.Response()
        self.seen.append(Seen(request.path, request.headers.copy(), orjson.loads(await request.read())))
        if self.handler is not None:
            response: web.StreamResponse = await self.handler(request)
            return response
        return web.Response(status=self.status, body=self.answer, headers={"Content-Type": self.content_type})


PREFILL_PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "p1",
    "remote_num_tokens": 9,
}


class Lab:
    """Engines and a router on loopback, and what the router says of itself."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.router: Router
        self.session: aiohttp.ClientSession

    async def engine(self, role: str, **more: Any) -> EngineServer:
        config = EngineConfig(**{"role": Role(role), "instant": True, "prefix_caching": role == "decode", **more})
        return await self._stack.enter_async_context(running_engine(config))

    async def stub(self, **more: Any) -> Stub:
        stub = Stub(**more)
        app = web.Application(client_max_size=2**27)
        app.router.add_route("*", "/{path:.*}", stub.handle)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        stub.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return stub

    async def start(self, prefill: list[Any], decode: list[Any], **more: Any) -> None:
        config = RouterConfig(
            prefill=tuple(engine if isinstance(engine, str) else engine.url for engine in prefill),
            decode=tuple(engine if isinstance(engine, str) else engine.url for engine in decode),
            port=0, metrics_port=0, outcome_header=True, drain_timeout=1.0, **more,
        )  # fmt: skip
        self.router = await self._stack.enter_async_context(running(config))
        self.session = await self._stack.enter_async_context(
            aiohttp.ClientSession(f"http://127.0.0.1:{self.router.port}", connector=aiohttp.TCPConnector(limit=0))
        )

    def value(self, name: str, **labels: str) -> float:
        found = self.router.registry.get_sample_value(name, labels)
        assert found is not None, f"{name}{labels} is not exported"
        return found

    def outcomes(self) -> dict[str, int]:
        found = {}
        for family in self.router.registry.collect():
            for sample in family.samples:
                if sample.name == "kvtune_turns_total" and sample.value:
                    found[sample.labels["outcome"]] = int(sample.value)
        return found

    async def exposition(self, accept: str = "") -> str:
        url = f"http://127.0.0.1:{self.router.metrics_port}/metrics"
        async with self.session.get(url, headers={"Accept": accept}) as answer:
            assert answer.status == 200
            return await answer.text()


@pytest.fixture
async def lab() -> AsyncIterator[Lab]:
    async with AsyncExitStack() as stack:
        yield Lab(stack)
