"""`kvtune`: the command line. Commands import what they need when they run, so that `--help` is quick."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from kvtune_cli.panels import Commands, Panels, open_streams

app = typer.Typer(
    name="kvtune",
    cls=Commands,
    help="See, trust and tune KV-cache reuse in prefill/decode disaggregated vLLM.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(show: bool) -> None:
    if show:
        from kvtune_router.server import package_version

        typer.echo(f"kvtune {package_version()}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """See, trust and tune KV-cache reuse in prefill/decode disaggregated vLLM."""


def _register() -> None:
    from kvtune_cli import bench, check, dashboards, demo, metrics, push, record, router, rules, simulate, suggest

    app.command("demo")(demo.demo)
    app.command("suggest", cls=Panels)(suggest.suggest)
    app.command("simulate")(simulate.simulate)
    app.command("record", cls=Panels)(record.record)
    app.command("router")(router.router)
    app.command("metrics")(metrics.metrics)
    app.command("check", cls=Panels)(check.check)
    benchmarks = typer.Typer(help="Simulated engines and measurements.", no_args_is_help=True, rich_markup_mode=None)
    benchmarks.command("engine")(bench.engine)
    app.add_typer(benchmarks, name="bench")
    boards = typer.Typer(help="Grafana dashboards.", no_args_is_help=True, rich_markup_mode=None)
    boards.command("render")(dashboards.render)
    boards.command("check")(dashboards.check)
    boards.command("push", cls=Panels)(push.push)
    app.add_typer(boards, name="dashboards")
    alerting = typer.Typer(help="Prometheus rules and alerts.", no_args_is_help=True, rich_markup_mode=None)
    alerting.command("render")(rules.render)
    alerting.command("check")(rules.check)
    app.add_typer(alerting, name="rules")


def run() -> None:
    """Entry point of the `kvtune` script. No traceback reaches a user."""
    for name in ("KVTUNE_ROUTER_PORT", "KVTUNE_ROUTER_METRICS_PORT"):
        # Kubernetes sets this for a Service of that name; it is an address, not our setting.
        if os.environ.get(name, "").startswith("tcp://"):
            del os.environ[name]
    open_streams()
    try:
        _register()
        app()
    except KeyboardInterrupt:
        print("kvtune: interrupted", file=sys.stderr)
        sys.exit(130)
