"""`kvtune record`: snapshots of live metrics for `kvtune suggest --snapshot`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtune_cli import options
from kvtune_cli.options import option


def record(
    scrape: Annotated[list[str], option("--scrape", "URL", "A /metrics address; repeat per target.")],
    out: Annotated[Path, option("--out", "DIR", "Directory for the snapshots; created if missing.")],
    interval: Annotated[str | None, option("--interval", "DURATION", "Time between scrapes [15s].")] = None,
    duration: Annotated[
        str | None, option("--duration", "DURATION", "Stop after so long; default: until Ctrl-C.")
    ] = None,
    output: Annotated[str, option("--format", "table|json", "What to print at the end.")] = "table",
    header: options.Headers = None,
    bearer_token_file: options.BearerTokenFile = None,
    ca_file: options.CaFile = None,
    client_cert: options.ClientCert = None,
    client_key: options.ClientKey = None,
    insecure: options.Insecure = False,
    timeout: options.Timeout = None,
) -> None:
    """Write exposition snapshots DIR/<unix ms>-<target>.prom."""
    from kvtune_tuning.access import Access
    from kvtune_tuning.run import run_record

    raise typer.Exit(
        run_record(
            scrape=scrape,
            out=out,
            interval=interval,
            duration=duration,
            output=output,
            access=Access(tuple(header or ()), bearer_token_file, ca_file, client_cert, client_key, insecure),
            timeout=timeout,
        )
    )
