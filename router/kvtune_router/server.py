"""The router's two HTTP servers: the OpenAI endpoints, and `/metrics` with its like on a port of their own."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.metadata import PackageNotFoundError, version

import aiohttp
import orjson
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from loguru import logger
from prometheus_client import GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR, CollectorRegistry

from kvtune_router.config import RouterConfig
from kvtune_router.conversations import ConversationStore
from kvtune_router.engines import Fleet
from kvtune_router.errors import RequestError, error_response
from kvtune_router.identity import Identifier
from kvtune_router.turn import TurnServer
from kvtune_router.upstream import Upstream
from kvtune_telemetry import events
from kvtune_telemetry.clock import Clock, clock_from_spec
from kvtune_telemetry.exposition import render
from kvtune_telemetry.recorder import RouterRecorder
from kvtune_telemetry.tracing import Tracing, provider_from_environment

_ENDPOINTS = {"/v1/chat/completions": "chat", "/v1/completions": "completions", "/v1/models": "models"}
_SWEEP_S = 1.0
_KEEPALIVE_S = 4.0
"""Less than uvicorn's 5 s: a request must not meet a connection that the engine is just closing."""


class ServeError(OSError):
    """The router cannot listen where it was told to."""


def package_version() -> str:
    """The installed version of kvtune."""
    try:
        return version("kvtune")
    except PackageNotFoundError:
        return "0+unknown"


class Router:
    """A running router; use `async with running(config)`."""

    def __init__(self, config: RouterConfig, *, clock: Clock | None = None, tracing: Tracing | None = None) -> None:
        """Raises ConfigError, EngineAddressError or TracingError for settings that cannot be followed."""
        self.config = config
        self.clock = clock or clock_from_spec(config.time_scale)
        self.registry = CollectorRegistry()
        for collector in (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR):
            self.registry.register(collector)
        self.recorder = RouterRecorder(self.registry, version=package_version())
        if config.accept_unverified:
            logger.warning(
                "--accept-unverified: KV is read back without proof; a history that was rewritten, re-tokenised or "
                "stripped of its reasoning gets wrong answers without any error"
            )
        self.recorder.set_setting("default_ttl_seconds", config.ttl)
        self.recorder.set_setting("margin_seconds", config.margin + config.handover)
        self.recorder.set_setting("holdout_ratio", config.holdout)
        self.recorder.set_setting("explore_ratio", config.explore)
        self.recorder.set_setting("retain_seconds", config.retain or 0.0)
        self.recorder.set_setting("accept_unverified", float(config.accept_unverified))
        self.fleet = Fleet(config.prefill, config.decode, self.recorder.record)
        key = config.identity_key
        self.identifier = Identifier(key.encode() if key else secrets.token_bytes(32))
        self.store = ConversationStore(
            self.identifier,
            self.recorder.record,
            max_conversations=config.max_conversations,
            horizon_s=config.forget_after,
        )
        self.tracing = tracing or Tracing(provider_from_environment("kvtune-router"))
        self.port = config.port
        self.metrics_port = config.metrics_port
        self._session: aiohttp.ClientSession | None = None
        self._upstream: Upstream | None = None
        self._turns: TurnServer | None = None
        self._runners: list[web.AppRunner] = []
        self._tasks: list[asyncio.Task[None]] = []

    # --- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen. Raises ServeError when an address is taken."""
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S))
        self._upstream = Upstream(
            connect_timeout=self.config.connect_timeout, read_timeout=self.config.read_timeout, keep=_KEEPALIVE_S
        )
        self._turns = TurnServer(
            config=self.config,
            upstream=self._upstream,
            fleet=self.fleet,
            store=self.store,
            identifier=self.identifier,
            recorder=self.recorder,
            tracing=self.tracing,
            clock=self.clock,
        )
        await self.fleet.probe(self._session)
        try:
            self.metrics_port = await self._listen(
                self._admin_app(), self.config.metrics_host, self.config.metrics_port, "--metrics-port"
            )
            self.port = await self._listen(self._client_app(), self.config.host, self.config.port, "--port")
        except BaseException:
            await self.stop()
            raise
        self._tasks = [
            asyncio.create_task(self.fleet.watch(self._session), name="probe"),
            asyncio.create_task(self._sweep(), name="sweep"),
        ]

    async def _listen(self, app: web.Application, host: str, port: int, flag: str) -> int:
        runner = web.AppRunner(
            app,
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=self.config.drain_timeout,
            max_line_size=16384,
            max_field_size=16384,
        )
        await runner.setup()
        self._runners.append(runner)
        site = web.TCPSite(runner, host, port, backlog=1024)
        try:
            await site.start()
        except OSError as error:
            raise ServeError(
                f"cannot listen on {host}:{port} ({error.strerror or error}); choose another with {flag}"
            ) from None
        address = runner.addresses[0]
        return int(address[1])

    async def stop(self) -> None:
        """Finish the turns in flight (for at most the drain time), then let everything go."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(runner.cleanup() for runner in self._runners))
        self._runners = []
        self.store.close()
        if self._upstream is not None:
            self._upstream.close()
        if self._session is not None:
            await self._session.close()
        self.tracing.shutdown()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            self.store.sweep(self.clock.now())

    # --- OpenAI endpoints -------------------------------------------------------------------------------------------

    def _client_app(self) -> web.Application:
        app = web.Application(
            client_max_size=int(self.config.max_body_mib * 1024 * 1024), middlewares=[self._answer_errors]
        )
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        return app

    @web.middleware
    async def _answer_errors(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Turn every failure into an error of OpenAI's shape, and book every answer."""
        status = 499
        try:
            response = await self._guard(request, handler)
            status = response.status
            return response
        finally:
            if request.path not in ("/health", "/ready"):
                endpoint = _ENDPOINTS.get(request.path, "other")
                self.recorder.record(events.HttpAnswered(endpoint, status))

    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            return await handler(request)
        except RequestError as error:
            return error_response(error)
        except web.HTTPRequestEntityTooLarge:
            limit = f"{self.config.max_body_mib:g} MiB"
            return error_response(
                RequestError(413, f"the request body is larger than {limit}", code="request_too_large")
            )
        except web.HTTPNotFound:
            hint = f"; metrics are on port {self.metrics_port}" if request.path == "/metrics" else ""
            return error_response(RequestError(404, f"no such endpoint: {request.method} {request.path}{hint}"))
        except web.HTTPMethodNotAllowed as error:
            allowed = ", ".join(sorted(error.allowed_methods))
            return error_response(
                RequestError(405, f"{request.path} takes {allowed}, not {request.method}"), {"Allow": allowed}
            )
        except ConnectionResetError:
            # The client left: there is nobody to answer, and nothing to report.
            raise asyncio.CancelledError from None
        except (HttpProcessingError, web.RequestPayloadError) as error:
            return error_response(RequestError(400, f"the request body cannot be read ({type(error).__name__})"))
        except Exception:
            logger.exception("a request failed inside the router")
            return error_response(RequestError(500, "internal error of the router", kind="server_error"))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        assert self._turns is not None
        return await self._turns.serve(request, "chat")

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        assert self._turns is not None
        return await self._turns.serve(request, "completions")

    async def _models(self, request: web.Request) -> web.StreamResponse:
        assert self._session is not None
        headers = {"Authorization": request.headers["Authorization"]} if "Authorization" in request.headers else {}
        for engine in self.fleet.decode:
            if not engine.up:
                continue
            try:
                async with self._session.get(
                    f"{engine.url}/v1/models", headers=headers, timeout=aiohttp.ClientTimeout(total=10)
                ) as answer:
                    return web.Response(
                        status=answer.status, body=await answer.read(), content_type=answer.content_type
                    )
            except (aiohttp.ClientError, TimeoutError, OSError):
                continue
        raise RequestError(503, "no decode engine is available", kind="server_error", code="no_decode_engine")

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _ready(self, _: web.Request) -> web.Response:
        engines = {
            role: {engine.label: bool(engine.up) for engine in engines}
            for role, engines in (("prefill", self.fleet.prefill), ("decode", self.fleet.decode))
        }
        ready = self.fleet.ready()
        return web.json_response({"ready": ready, "engines": engines}, status=200 if ready else 503)

    # --- admin ------------------------------------------------------------------------------------------------------

    def _admin_app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        return app

    async def _metrics(self, request: web.Request) -> web.Response:
        body, content_type = render(self.registry, request.headers.get("Accept"))
        return web.Response(body=body, headers={"Content-Type": content_type})


@contextlib.asynccontextmanager
async def running(config: RouterConfig, *, clock: Clock | None = None) -> AsyncIterator[Router]:
    """A router that listens while the block runs."""
    router = Router(config, clock=clock)
    await router.start()
    try:
        yield router
    finally:
        await router.stop()


async def serve_until_stopped(config: RouterConfig, announce: Callable[[Router], None]) -> None:
    """Run until SIGTERM or SIGINT; turns in flight are finished first."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with running(config) as router:
        announce(router)
        await stop.wait()
        logger.info("stopping: finishing the turns in flight")


def ready_line(router: Router) -> str:
    """What is printed once the router listens: one JSON object."""
    return orjson.dumps(
        {
            "ready": f"http://{router.config.host}:{router.port}",
            "metrics": f"http://{router.config.metrics_host}:{router.metrics_port}/metrics",
        }
    ).decode()
