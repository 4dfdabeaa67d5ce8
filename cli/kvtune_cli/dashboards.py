"""`kvtune dashboards`: the Grafana dashboards as files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtune_cli.errors import fail


def render(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write to; made if need be.")],
) -> None:
    """Write the dashboards' JSON and the files that provision them.

    Prints the path of each file. Exit codes: 0 ok, 1 error, 2 usage.
    """
    from kvtune_dashboards.rendering import DashboardsError, write

    try:
        written = write(out)
    except DashboardsError as error:
        fail(str(error))
    for path in written:
        typer.echo(path)


def check(
    directory: Annotated[
        Path | None,
        typer.Argument(metavar="[DIR]", help="Folder of rendered files; none: only what would be rendered."),
    ] = None,
) -> None:
    """Check the dashboards: layout, units, descriptions and every query; and that DIR holds what is rendered now.

    Prints a line for each finding. Exit codes: 0 ok, 1 findings or error, 2 usage.
    """
    from kvtune_dashboards.lint import lint
    from kvtune_dashboards.rendering import DashboardsError, boards, drift, load

    try:
        shown = boards() if directory is None else load(directory)
        found = [str(finding) for finding in lint(shown)]
        if directory is not None:
            found += drift(directory)
    except DashboardsError as error:
        fail(str(error))
    for line in found:
        typer.echo(line)
    if found:
        fail(f"{len(found)} finding{'s' if len(found) > 1 else ''} in {len(shown)} dashboards")
    typer.echo(f"{len(shown)} dashboards are well", err=True)
