"""`kvtune router`: the router."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

_ENV = "KVTUNE_ROUTER_"


_known: set[str] = set()


def _option(flag: str, help: str, **more: Any) -> Any:
    variable = _ENV + flag.split("/")[0].lstrip("-").upper().replace("-", "_")
    _known.add(variable)
    return typer.Option(flag, help=help, envvar=variable, **more)


def router(
    prefill: Annotated[list[str] | None, _option("--prefill", "URL of a prefill engine; repeatable")] = None,
    decode: Annotated[list[str] | None, _option("--decode", "URL of a decode engine; repeatable")] = None,
    config: Annotated[Path | None, _option("--config", "YAML file; its keys are these flags' names")] = None,
    host: Annotated[str | None, _option("--host", "address for clients [127.0.0.1]")] = None,
    port: Annotated[int | None, _option("--port", "port for clients, 0 = any [8000]")] = None,
    metrics_host: Annotated[str | None, _option("--metrics-host", "address of /metrics [127.0.0.1]")] = None,
    metrics_port: Annotated[int | None, _option("--metrics-port", "port of /metrics, 0 = any [9400]")] = None,
    ttl: Annotated[
        float | None, _option("--ttl", "seconds D retains KV, where it does not say so itself; its TTL or less [480]")
    ] = None,
    retain: Annotated[
        float | None,
        _option("--retain", "seconds to ask D to retain each turn's KV; D keeps to its own bounds [D's own TTL]"),
    ] = None,
    margin: Annotated[float | None, _option("--margin", "P reads nothing this close (s) to the deadline [5]")] = None,
    handover: Annotated[float | None, _option("--handover", "seconds from the router's look to P's check [1]")] = None,
    accept_unverified: Annotated[
        bool | None,
        _option(
            "--accept-unverified/--require-verified",
            "let prefill engines without proof (stock vLLM) read KV: a rewritten history is answered wrongly [no]",
        ),
    ] = None,
    identity_key: Annotated[
        str | None, _option("--identity-key", "secret that keys the hashes of ids; shared by replicas [random]")
    ] = None,
    holdout: Annotated[
        float | None, _option("--holdout", "share (0..1) of conversations served without reuse, to compare [0]")
    ] = None,
    explore: Annotated[
        float | None,
        _option("--explore", "share (0..0.05) of references to try the other path with, near the threshold [0]"),
    ] = None,
    max_conversations: Annotated[int | None, _option("--max-conversations", "remembered at most [200000]")] = None,
    forget_after: Annotated[
        float | None, _option("--forget-after", "seconds until a conversation is given up [3600]")
    ] = None,
    max_body_mib: Annotated[float | None, _option("--max-body-mib", "largest request body, MiB [32]")] = None,
    connect_timeout: Annotated[float | None, _option("--connect-timeout", "seconds to reach an engine [5]")] = None,
    read_timeout: Annotated[float | None, _option("--read-timeout", "longest silence of an engine, s [600]")] = None,
    drain_timeout: Annotated[float | None, _option("--drain-timeout", "seconds to finish turns at stop [30]")] = None,
    outcome_header: Annotated[
        bool | None, _option("--outcome-header/--no-outcome-header", "send X-Kvtune-Outcome to clients [no]")
    ] = None,
    log_level: Annotated[str | None, _option("--log-level", "TRACE to CRITICAL [INFO]")] = None,
    log_format: Annotated[str | None, _option("--log-format", "console or json [console]")] = None,
    time_scale: Annotated[str | None, _option("--time-scale", "simulations only: the engines' clock")] = None,
) -> None:
    """Run the KV-aware router in front of prefill and decode engines.

    Clients use it as any OpenAI endpoint: /v1/chat/completions, /v1/completions, /v1/models. Metrics are on a port of
    their own. Spans leave by OTLP when the OTEL_* variables say where to. Stops on SIGTERM after finishing the turns in
    flight. Each flag is also an environment variable, KVTUNE_ROUTER_<FLAG> (lists separated by spaces), and a key
    of the --config file (with - or _); flags win over the environment, and that over the file.
    """
    unknown = sorted(
        name
        for name in os.environ
        if name.startswith(_ENV) and name not in _known and not name.endswith(("_SERVICE_HOST", "_SERVICE_PORT"))
    )
    given = {
        name: value for name, value in locals().items() if name not in ("config", "unknown") and value not in (None, [])
    }
    from kvtune_cli.errors import fail
    from kvtune_cli.loop import run_loop
    from kvtune_router.config import ConfigError, load_config
    from kvtune_router.engines import EngineAddressError
    from kvtune_router.server import ServeError, ready_line, serve_until_stopped
    from kvtune_telemetry.logs import setup_logging
    from kvtune_telemetry.tracing import TracingError

    for name in unknown:
        typer.echo(f"kvtune: environment variable {name} is not a setting; ignored", err=True)
    for name in ("prefill", "decode"):
        if name in given:
            given[name] = tuple(given[name])
    try:
        settings = load_config(config, given)
        setup_logging(level=settings.log_level, fmt=settings.log_format)
    except (ConfigError, ValueError) as error:
        fail(str(error), code=2)
    try:
        run_loop(serve_until_stopped(settings, lambda started: typer.echo(ready_line(started))))
    except (EngineAddressError, TracingError) as error:
        fail(str(error), code=2)
    except ServeError as error:
        fail(str(error), code=1)
