"""`kvtune`: the command line. Commands import what they need when they run, so that `--help` is quick."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

app = typer.Typer(
    name="kvtune",
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
    from kvtune_cli import bench, demo, metrics, record, router, suggest

    app.command("demo")(demo.demo)
    app.command("suggest")(suggest.suggest)
    app.command("record")(record.record)
    app.command("router")(router.router)
    app.command("metrics")(metrics.metrics)
    benchmarks = typer.Typer(help="Simulated engines and measurements.", no_args_is_help=True, rich_markup_mode=None)
    benchmarks.command("engine")(bench.engine)
    app.add_typer(benchmarks, name="bench")


_register()


def run() -> None:
    """Entry point of the `kvtune` script. No traceback reaches a user."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of a pipe went away: nothing to say, and nobody to say it to.
        sys.stderr.close()
        sys.exit(0)
