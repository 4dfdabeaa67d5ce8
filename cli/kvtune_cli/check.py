"""`kvtune check`: which dashboards, rules and inputs of `suggest` a deployment answers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtune_cli import options
from kvtune_cli.errors import fail
from kvtune_cli.options import option
from kvtune_cli.suggest import PROMETHEUS_URL

if TYPE_CHECKING:
    from kvtune_dashboards.coverage import Deployment, Need
    from kvtune_tuning.access import Access

HIDDEN = ("engine", "instance", "le", "model_name", "version")
"""Labels with a value for each engine or bucket: of them Prometheus is asked only which series have them."""
_USERS = 6


def check(
    metrics: Annotated[
        list[str] | None, option("--metrics", "URL", "A /metrics address: router, engines, suggest --watch; repeat.")
    ] = None,
    prometheus: Annotated[
        str | None, option("--prometheus", "URL", f"What this server has, and its rules [env: {PROMETHEUS_URL}].")
    ] = None,
    output: Annotated[str, option("--format", "table|json", "What to print.")] = "table",
    header: options.Headers = None,
    bearer_token_file: options.BearerTokenFile = None,
    ca_file: options.CaFile = None,
    client_cert: options.ClientCert = None,
    client_key: options.ClientKey = None,
    insecure: options.Insecure = False,
    timeout: options.Timeout = None,
) -> None:
    """Say which dashboards, rules, alerts and inputs of `kvtune suggest` are answered by what is exposed.

    With --prometheus by what that server has; --metrics beside it tells what is exposed and not scraped. Exit codes:
    0 all is answered, 1 something is not, or an error, 2 usage.
    """
    from dataclasses import replace

    from kvtune_dashboards import coverage
    from kvtune_dashboards.alerts import alerts
    from kvtune_dashboards.config import RulesConfig
    from kvtune_dashboards.recording import RECORDING_RULES
    from kvtune_dashboards.rendering import boards
    from kvtune_tuning.access import Access
    from kvtune_tuning.errors import TuningError, UsageError
    from kvtune_tuning.names import BESIDE_KVTUNE, CATALOGUED
    from kvtune_tuning.recording import without_secrets
    from kvtune_tuning.run import seconds

    if output not in ("table", "json"):
        fail(f"--format: unknown format {output!r}. Choose one of table, json.", code=2)
    if not (metrics or prometheus):
        prometheus = os.environ.get(PROMETHEUS_URL)
    if not (metrics or prometheus):
        fail("nothing to check: give --metrics URL..., --prometheus URL, or both", code=2)
    dashboards = boards()
    recording = [coverage.Rule(rule.name, rule.expr, rule.labels) for rule in RECORDING_RULES]
    alarms = [coverage.Rule(alert.name, alert.expr, alert.labels) for alert in alerts(RulesConfig())]
    inputs = (*CATALOGUED, *BESIDE_KVTUNE)
    asked = coverage.asked_for(dashboards, recording, alarms, inputs)
    sources = {
        "metrics": [without_secrets(url) for url in metrics or ()],
        "prometheus": without_secrets(prometheus).partition("?")[0] if prometheus else None,
    }
    try:
        access = Access(tuple(header or ()), bearer_token_file, ca_file, client_cert, client_key, insecure)
        access = replace(access, timeout_s=seconds(timeout, "--timeout") if timeout else None)
        deployment = _deployment(asked, metrics or [], prometheus, access)
    except TuningError as error:
        hint = error.hint.replace("--scrape", "--metrics")
        if output == "json":
            _json({"schema": coverage.SCHEMA, "error": {**error.as_dict(), "hint": hint}})
        fail(f"{error.message}\n{hint}", code=2 if isinstance(error, UsageError) else 1)
    items = coverage.check(deployment, dashboards, recording, alarms, inputs)
    document = coverage.document(items, deployment, sources)
    if output == "json":
        _json(document)
    else:
        _table(document)
    raise typer.Exit(0 if document["answered"] else 1)


def _deployment(asked: list[Need], metrics: list[str], prometheus: str | None, access: Access) -> Deployment:
    """What the servers named by the options have of what is asked for."""
    from kvtune_dashboards.coverage import Deployment, other_name
    from kvtune_telemetry.catalogue import CATALOGUE
    from kvtune_tuning.live import exposed, stored

    names = {name for need in asked for name in need.names}
    at_targets = exposed(metrics, names, access) if metrics else {}
    if prometheus is None:
        return Deployment(at_targets)
    labels = {label for need in asked for label, _, _ in need.matchers}
    labels |= {label for metric in CATALOGUE for label in metric.label_names()}
    names |= {other_name(name) for name in names}
    there = stored(prometheus, names, labels.difference(HIDDEN), HIDDEN, access)
    return Deployment(
        there.series, stored=True, loaded=there.rules, hidden=frozenset(HIDDEN), having=there.having,
        elsewhere=frozenset(at_targets),
    )  # fmt: skip


def _json(document: dict[str, Any]) -> None:
    import orjson

    typer.echo(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode())


def _table(document: dict[str, Any]) -> None:
    for title, count in document["dashboards"].items():
        typer.echo(_counted(title, count))
    for kind, what in (("recording rule", "recording rules"), ("alert", "alerts"), ("suggest", "inputs of suggest")):
        typer.echo(_counted(what, document["summary"].get(kind, {"asked": 0, "answered": 0})))
    for group in document["missing"]:
        typer.echo(f"\n{group['emitter']}: {len(group['missing'])} not answered. {group['advice']}")
        for gap in group["missing"]:
            detail = f" ({gap['detail']})" if gap["detail"] else ""
            typer.echo(f"  {gap['series']}{detail}{_users(gap)}")


def _users(gap: dict[str, Any]) -> str:
    """Who asks for it, unless it is only the rule itself."""
    users = [name for name in gap["used_by"] if not name.endswith(f" {gap['series']}")]
    more = f" and {len(users) - _USERS} more" if len(users) > _USERS else ""
    return f"\n      {'; '.join(users[:_USERS])}{more}" if users else ""


def _counted(what: str, count: dict[str, int]) -> str:
    mark = "ok" if count["asked"] == count["answered"] else "NOT"
    return f"{mark:<4} {what}: {count['answered']} of {count['asked']} answered"
