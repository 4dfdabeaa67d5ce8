"""`kvtune rules`: recording rules and alerts as files."""

from __future__ import annotations

import tempfile
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtune_cli.errors import fail

if TYPE_CHECKING:
    from kvtune_dashboards.config import RulesConfig

Config = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="Other thresholds, windows and links (YAML).")
]


class RulesFormat(StrEnum):
    """Which files."""

    PROMETHEUS = "prometheus"
    CRD = "crd"
    BOTH = "both"


def render(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where to; made if it is not there.")],
    config: Config = None,
    format: Annotated[
        RulesFormat, typer.Option("--format", help="prometheus: rule files; crd: PrometheusRule; both.")
    ] = RulesFormat.BOTH,
    tests: Annotated[
        bool, typer.Option("--tests", help="Also the tests for promtool, which are made for the default thresholds.")
    ] = False,
) -> None:
    """Write the rule files, and print their paths."""
    from kvtune_dashboards import rules

    if tests and (config is not None or format is RulesFormat.CRD):
        fail("--tests are made for the default thresholds and Prometheus' files; leave --config and crd out", code=2)
    files = rules.render(_config(config), format.value) | (rules.render_tests() if tests else {})
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (out / name).parent.mkdir(exist_ok=True)
            (out / name).write_text(text, encoding="utf-8")
            typer.echo(out / name)
    except OSError as error:
        fail(f"cannot write to {out}: {error.strerror or error}")


def check(
    directory: Annotated[Path, typer.Argument(metavar="[DIR]", help="Rendered rule files.")] = Path(
        "dashboards/prometheus"
    ),
    config: Config = None,
    format: Annotated[RulesFormat, typer.Option("--format", help="Which files must be there.")] = RulesFormat.BOTH,
) -> None:
    """Compare DIR with what would be rendered, and check rules, alerts and runbooks (in DIR/../runbooks).

    Uses promtool too where it is on PATH. DIR/tests is compared where it is there and thresholds are the defaults.
    """
    from kvtune_dashboards import rules, runbooks

    chosen = _config(config)
    if not directory.is_dir():
        fail(f"{directory} is no directory; name the one that `kvtune rules render --out` wrote", code=2)
    files = rules.render(chosen, format.value)
    found = rules.drift(files, directory) + rules.lint(chosen)
    if config is None and (directory / rules.TESTS).is_dir():
        tests = rules.render_tests()
        found += rules.drift(tests, directory) + rules.left_over(tests, directory)
    pages = directory.resolve().parent / "runbooks"
    if pages.is_dir():
        found += runbooks.runbook_findings(chosen, pages, _router_flags())
    else:
        typer.echo(f"kvtune: no runbooks at {pages}: not checked", err=True)
    with tempfile.TemporaryDirectory() as scratch:
        said = rules.promtool_findings(files, Path(scratch))
    if said is None:
        typer.echo("kvtune: promtool is not on PATH: its checks are left out", err=True)
    found += said or []
    for finding in found:
        typer.echo(finding)
    if found:
        fail(f"{len(found)} finding{'s' if len(found) > 1 else ''}")
    typer.echo("kvtune: rules, alerts and files agree", err=True)


def _router_flags() -> frozenset[str]:
    """The flags that a runbook may tell to set, and those of the commands here."""
    from kvtune_cli.router import router

    app = typer.Typer()
    app.command()(router)
    command = typer.main.get_command(app)
    return frozenset(flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts))


def _config(path: Path | None) -> RulesConfig:
    from kvtune_dashboards.config import ConfigError, RulesConfig, load_config

    try:
        return load_config(path) if path is not None else RulesConfig()
    except ConfigError as error:
        fail(str(error), code=2)
