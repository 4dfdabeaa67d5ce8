"""`kvtune record`: snapshots of live metrics for `kvtune suggest --snapshot`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def record(
    scrape: Annotated[
        list[str], typer.Option("--scrape", metavar="URL", help="A /metrics address; repeat per target.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Directory for the snapshots; created if missing.")],
    interval: Annotated[
        str | None, typer.Option("--interval", metavar="DURATION", help="Time between scrapes [15s].")
    ] = None,
    duration: Annotated[
        str | None, typer.Option("--duration", metavar="DURATION", help="Stop after so long; default: until Ctrl-C.")
    ] = None,
    output: Annotated[str, typer.Option("--format", metavar="table|json", help="What to print at the end.")] = "table",
) -> None:
    """Write exposition snapshots DIR/<unix ms>-<target>.prom."""
    from kvtune_tuning.run import run_record

    raise typer.Exit(run_record(scrape=scrape, out=out, interval=interval, duration=duration, output=output))
