"""`kvtune suggest`: a TTL and a threshold, with evidence."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def suggest(
    prometheus: Annotated[
        str | None, typer.Option("--prometheus", metavar="URL", help="Read from a Prometheus server.")
    ] = None,
    scrape: Annotated[
        list[str] | None,
        typer.Option("--scrape", metavar="URL", help="Scrape a /metrics address for --duration; repeat per target."),
    ] = None,
    snapshot: Annotated[
        Path | None, typer.Option("--snapshot", metavar="DIR", help="Read what `kvtune record` wrote.")
    ] = None,
    window: Annotated[
        str | None,
        typer.Option(
            "--window", metavar="DURATION", help="Use the last so long: 90s, 1h, 7d. Prometheus: 1h by default."
        ),
    ] = None,
    interval: Annotated[
        str | None, typer.Option("--interval", metavar="DURATION", help="Time between live scrapes [5s].")
    ] = None,
    duration: Annotated[
        str | None,
        typer.Option("--duration", metavar="DURATION", help="How long to scrape live [60s]; Ctrl-C ends it early."),
    ] = None,
    output: Annotated[str, typer.Option("--format", metavar="table|json|yaml", help="What to print.")] = "table",
    explain: Annotated[bool, typer.Option("--explain", help="Print formulas, numbers and queries too.")] = False,
    samples: Annotated[
        Path | None, typer.Option("--samples", metavar="FILE", help="Write every sample that was read, as CSV.")
    ] = None,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 4 when a change is advised.")] = False,
) -> None:
    """Recommend decoder_kv_blocks_ttl and kv_recompute_threshold from live metrics.

    Exit codes: 0 ok, 1 error, 2 usage, 3 not enough data, 4 change advised (with --exit-code).
    """
    from kvtune_tuning.run import run_suggest

    raise typer.Exit(
        run_suggest(
            prometheus=prometheus,
            scrape=scrape or [],
            snapshot=snapshot,
            window=window,
            explain=explain,
            output=output,
            exit_code=exit_code,
            interval=interval,
            duration=duration,
            samples=samples,
        )
    )
