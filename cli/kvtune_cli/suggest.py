"""`kvtune suggest`: a TTL and a threshold, with evidence."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from kvtune_cli import options
from kvtune_cli.errors import fail
from kvtune_cli.options import option

PROMETHEUS_URL = "KVTUNE_PROMETHEUS_URL"
"""Environment variable that names the server where no source is given."""
_PROMETHEUS = "Reading Prometheus"
_SCRAPING = "Live scrapes"
_STOCK = "What engines without kvtune do not say"
_GAUGES = "The advice as gauges"


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
    export: Annotated[
        Path | None,
        option("--export", "FILE", "Write it for node_exporter's textfile collector, e.g. DIR/kvtune.prom.", _GAUGES),
    ] = None,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", help="Keep asking --prometheus, and serve the gauges on /metrics.", rich_help_panel=_GAUGES
        ),
    ] = False,
    every: Annotated[str | None, option("--every", "DURATION", "Ask so often [15m].", _GAUGES)] = None,
    host: Annotated[str | None, option("--host", "ADDRESS", "Where to serve [127.0.0.1].", _GAUGES)] = None,
    port: Annotated[int | None, option("--port", "N", "Where to serve, 0 = any [9401].", _GAUGES)] = None,
    log_format: Annotated[
        str | None, option("--log-format", "console|json", "One line a round, on stderr [console].", _GAUGES)
    ] = None,
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
    from kvtune_tuning.run import Question, run_suggest

    if not (prometheus or scrape or snapshot):
        prometheus = os.environ.get(PROMETHEUS_URL)
    question = Question(
        prometheus=prometheus,
        scrape=scrape or (),
        snapshot=snapshot,
        window=window,
        explain=explain,
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
    serving = {"--every": every, "--host": host, "--port": port, "--log-format": log_format}
    if not watch:
        given = [name for name, value in serving.items() if value is not None]
        if given:
            fail(f"{' and '.join(given)} without --watch: only that keeps asking and serves", code=2)
        raise typer.Exit(run_suggest(question, output=output, exit_code=exit_code, export=export))
    from kvtune_tuning.watch import DEFAULT_HOST, DEFAULT_PORT, Watch, run_watch

    printing = {"--format": output != "table", "--explain": explain, "--exit-code": exit_code}
    given = [name for name, value in printing.items() if value]
    if given:
        fail(f"{' and '.join(given)} with --watch: it serves gauges and prints no document", code=2)
    raise typer.Exit(
        run_watch(
            question,
            Watch(
                every,
                DEFAULT_HOST if host is None else host,
                DEFAULT_PORT if port is None else port,
                export,
                log_format or "console",
            ),
        )
    )
