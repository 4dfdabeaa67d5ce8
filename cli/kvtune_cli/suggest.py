"""`kvtune suggest`: a TTL and a threshold, with evidence."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from kvtune_cli import options
from kvtune_cli.options import option

PROMETHEUS_URL = "KVTUNE_PROMETHEUS_URL"
"""Environment variable that names the server where no source is given."""
_PROMETHEUS = "Reading Prometheus"
_SCRAPING = "Live scrapes"
_STOCK = "What engines without kvtune do not say"


def suggest(
    prometheus: Annotated[
        str | None,
        option("--prometheus", "URL", f"Read from Prometheus, Thanos, Mimir, VictoriaMetrics [env: {PROMETHEUS_URL}]."),
    ] = None,
    scrape: Annotated[
        list[str] | None, option("--scrape", "URL", "Scrape a /metrics address for --duration; repeat per target.")
    ] = None,
    snapshot: Annotated[Path | None, option("--snapshot", "DIR", "Read what `kvtune record` wrote.")] = None,
    window: Annotated[
        str | None, option("--window", "DURATION", "Use the last so long: 90s, 1h, 30d. Prometheus: 1h by default.")
    ] = None,
    output: Annotated[str, option("--format", "table|json|yaml", "What to print.")] = "table",
    explain: Annotated[bool, typer.Option("--explain", help="Print formulas, numbers and queries too.")] = False,
    samples: Annotated[Path | None, option("--samples", "FILE", "Write every sample that was read, as CSV.")] = None,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 4 when a change is advised.")] = False,
    matcher: Annotated[
        list[str] | None,
        option("--matcher", "MATCHER", "Read only series with e.g. 'cluster=\"a\"'; repeatable.", _PROMETHEUS),
    ] = None,
    replica_label: Annotated[
        list[str] | None,
        option("--replica-label", "NAME", "Label that only tells scraping servers apart; repeatable.", _PROMETHEUS),
    ] = None,
    max_points: Annotated[
        int | None, option("--max-points", "N", "Points of a series in one query, at most [10000].", _PROMETHEUS)
    ] = None,
    role: Annotated[
        list[str] | None, option("--role", "ROLE=PART", "prefill= or decode= and a part of names; repeatable.", _STOCK)
    ] = None,
    tp: Annotated[int | None, option("--tp", "N", "Ranks of an engine (tensor parallel size).", _STOCK)] = None,
    current_ttl: Annotated[
        str | None, option("--current-ttl", "DURATION", "decoder_kv_blocks_ttl in force [480s].", _STOCK)
    ] = None,
    current_threshold: Annotated[
        int | None, option("--current-threshold", "N", "kv_recompute_threshold in force [64].", _STOCK)
    ] = None,
    header: options.Headers = None,
    bearer_token_file: options.BearerTokenFile = None,
    ca_file: options.CaFile = None,
    client_cert: options.ClientCert = None,
    client_key: options.ClientKey = None,
    insecure: options.Insecure = False,
    timeout: options.Timeout = None,
    interval: Annotated[str | None, option("--interval", "DURATION", "Time between scrapes [5s].", _SCRAPING)] = None,
    duration: Annotated[
        str | None, option("--duration", "DURATION", "How long to scrape [60s]; Ctrl-C ends it early.", _SCRAPING)
    ] = None,
) -> None:
    """Recommend decoder_kv_blocks_ttl and kv_recompute_threshold from live metrics.

    Exit codes: 0 ok, 1 error, 2 usage, 3 not enough data, 4 change advised (with --exit-code).
    """
    from kvtune_tuning.access import Access
    from kvtune_tuning.run import run_suggest

    if not (prometheus or scrape or snapshot):
        prometheus = os.environ.get(PROMETHEUS_URL)
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
            access=Access(tuple(header or ()), bearer_token_file, ca_file, client_cert, client_key, insecure),
            timeout=timeout,
            matchers=matcher or (),
            replica_labels=replica_label or (),
            max_points=max_points,
            roles=role or (),
            ranks=tp,
            current_ttl=current_ttl,
            current_threshold=current_threshold,
        )
    )
