"""`kvtune suggest`: a TTL and a threshold, with evidence."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

PROMETHEUS_URL = "KVTUNE_PROMETHEUS_URL"
"""Environment variable that names the server where no source is given."""
_PROMETHEUS = "Reading Prometheus"
_ACCESS = "Access to servers (--prometheus, --scrape)"
_SCRAPING = "Live scrapes"
_STOCK = "What engines without kvtune do not say"


def _option(flag: str, metavar: str, help: str, panel: str | None = None) -> Any:
    return typer.Option(flag, metavar=metavar, help=help, rich_help_panel=panel)


def suggest(
    prometheus: Annotated[
        str | None,
        _option(
            "--prometheus", "URL", f"Read from Prometheus, Thanos, Mimir, VictoriaMetrics [env: {PROMETHEUS_URL}]."
        ),
    ] = None,
    scrape: Annotated[
        list[str] | None, _option("--scrape", "URL", "Scrape a /metrics address for --duration; repeat per target.")
    ] = None,
    snapshot: Annotated[Path | None, _option("--snapshot", "DIR", "Read what `kvtune record` wrote.")] = None,
    window: Annotated[
        str | None, _option("--window", "DURATION", "Use the last so long: 90s, 1h, 30d. Prometheus: 1h by default.")
    ] = None,
    output: Annotated[str, _option("--format", "table|json|yaml", "What to print.")] = "table",
    explain: Annotated[bool, typer.Option("--explain", help="Print formulas, numbers and queries too.")] = False,
    samples: Annotated[Path | None, _option("--samples", "FILE", "Write every sample that was read, as CSV.")] = None,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 4 when a change is advised.")] = False,
    matcher: Annotated[
        list[str] | None,
        _option("--matcher", "MATCHER", "Read only series with e.g. 'cluster=\"a\"'; repeatable.", _PROMETHEUS),
    ] = None,
    replica_label: Annotated[
        list[str] | None,
        _option("--replica-label", "NAME", "Label that only tells scraping servers apart; repeatable.", _PROMETHEUS),
    ] = None,
    max_points: Annotated[
        int | None, _option("--max-points", "N", "Points of a series in one query, at most [10000].", _PROMETHEUS)
    ] = None,
    role: Annotated[
        list[str] | None, _option("--role", "ROLE=PART", "prefill= or decode= and a part of names; repeatable.", _STOCK)
    ] = None,
    tp: Annotated[int | None, _option("--tp", "N", "Ranks of an engine (tensor parallel size).", _STOCK)] = None,
    current_ttl: Annotated[
        str | None, _option("--current-ttl", "DURATION", "decoder_kv_blocks_ttl in force [480s].", _STOCK)
    ] = None,
    current_threshold: Annotated[
        int | None, _option("--current-threshold", "N", "kv_recompute_threshold in force [64].", _STOCK)
    ] = None,
    header: Annotated[
        list[str] | None,
        _option("--header", "'NAME: VALUE'", "Send it with every request, e.g. X-Scope-OrgID; repeatable.", _ACCESS),
    ] = None,
    bearer_token_file: Annotated[
        Path | None, _option("--bearer-token-file", "FILE", "Log in with the token in it.", _ACCESS)
    ] = None,
    ca_file: Annotated[
        Path | None, _option("--ca-file", "FILE", "Authorities that sign the server's certificate (PEM).", _ACCESS)
    ] = None,
    client_cert: Annotated[Path | None, _option("--client-cert", "FILE", "Our certificate (PEM).", _ACCESS)] = None,
    client_key: Annotated[
        Path | None, _option("--client-key", "FILE", "Its key, unless it is in the same file.", _ACCESS)
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure-skip-verify", help="Trust any certificate.", rich_help_panel=_ACCESS)
    ] = False,
    timeout: Annotated[
        str | None, _option("--timeout", "DURATION", "Wait for an answer so long [60s; scrapes 10s].", _ACCESS)
    ] = None,
    interval: Annotated[str | None, _option("--interval", "DURATION", "Time between scrapes [5s].", _SCRAPING)] = None,
    duration: Annotated[
        str | None, _option("--duration", "DURATION", "How long to scrape [60s]; Ctrl-C ends it early.", _SCRAPING)
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
            access=Access(
                headers=tuple(header or ()),
                bearer_token_file=bearer_token_file,
                ca_file=ca_file,
                client_cert=client_cert,
                client_key=client_key,
                insecure=insecure,
            ),
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
