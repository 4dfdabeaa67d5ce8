"""`kvtune dashboards push`: the dashboards into a Grafana server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from kvtune_cli.errors import fail
from kvtune_cli.options import option

TOKEN = "GRAFANA_TOKEN"  # noqa: S105 - the name of a variable
"""Environment variable that holds the token where no file is given."""
URL = "GRAFANA_URL"
_ACCESS = "Access to Grafana"


def push(
    url: Annotated[
        str | None,
        option("--url", "URL", f"Grafana's root, with its sub-path, e.g. https://host/grafana [env: {URL}]."),
    ] = None,
    folder: Annotated[
        str, option("--folder", "NAME", "Folder to put them in, by title or uid; made where it is absent.")
    ] = "kvtune",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the differences and write nothing.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what others saved, and move what lies in another folder.")
    ] = False,
    message: Annotated[
        str | None, option("--message", "TEXT", "For the dashboards' history; a commit, say [kvtune VERSION].")
    ] = None,
    directory: Annotated[
        Path | None, option("--dir", "DIR", "Push the dashboards in its *.json instead of kvtune's own.")
    ] = None,
    token_file: Annotated[
        Path | None,
        option("--token-file", "FILE", f"A service account's token; else the variable {TOKEN}.", _ACCESS),
    ] = None,
    ca_file: Annotated[
        Path | None, option("--ca-file", "FILE", "Authorities that sign the server's certificate (PEM).", _ACCESS)
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure-skip-verify", help="Trust any certificate.", rich_help_panel=_ACCESS)
    ] = False,
    timeout: Annotated[
        str | None, option("--timeout", "DURATION", "Wait for an answer so long [10s].", _ACCESS)
    ] = None,
) -> None:
    """Show what differs from the dashboards in Grafana, then save it there.

    Nothing is written where a dashboard was saved by anybody else, or lies in another folder, unless --overwrite is
    given. Needs the extra: pip install 'kvtune[grafana]'. Exit codes: 0 ok, 1 not pushed, 2 usage.
    """
    from kvtune_dashboards.push import DEFAULT_TIMEOUT_S, PushError, State, connect, describe, plan, read_directory
    from kvtune_dashboards.push import push as save
    from kvtune_dashboards.rendering import boards
    from kvtune_router.server import package_version
    from kvtune_tuning.errors import UsageError
    from kvtune_tuning.run import seconds

    address = url or os.environ.get(URL)
    if not address:
        fail("no server: give --url URL", code=2)
    try:
        timeout_s = seconds(timeout, "--timeout") if timeout else DEFAULT_TIMEOUT_S
    except UsageError as error:
        fail(f"{error.message}. {error.hint}", code=2)
    try:
        dashboards = read_directory(directory) if directory is not None else boards()
        target = connect(address, _token(token_file), verify=not insecure, ca_file=ca_file, timeout_s=timeout_s)
        version = target.health()
        place = target.ensure_folder(folder, create=False)
        typer.echo(f"Grafana {version}, folder {place.title!r}{' (to be made)' if place.uid is None else ''}", err=True)
        changes = plan(target, dashboards, place)
        for change in changes:
            for line in describe(change):
                typer.echo(line)
        forbidden = [change.uid for change in changes if change.forbidden]
        if forbidden:
            fail(f"{', '.join(forbidden)}: Grafana refuses to save; nothing was written. Change the files instead.")
        stopped = [change.uid for change in changes if change.obstacles]
        if stopped and not overwrite:
            fail(
                f"{', '.join(stopped)}: not as a push of kvtune left it; nothing was written. Ask whoever saved it, or "
                "replace it with --overwrite."
            )
        if dry_run:
            typer.echo("nothing was written (--dry-run)", err=True)
            return
        saved = 0
        for change, result in save(target, changes, place, message or f"kvtune {package_version()}"):
            saved += 1
            typer.echo(f"saved {change.uid} as version {result.version}", err=True)
        unchanged = sum(change.state is State.UNCHANGED for change in changes)
        typer.echo(f"{saved} saved, {unchanged} unchanged", err=True)
    except PushError as error:
        _end(error)


def _token(file: Path | None) -> str:
    """The token from the file, or from the environment. It is never printed."""
    if file is None:
        token = os.environ.get(TOKEN, "").strip()
        if not token:
            fail(f"no token: give --token-file FILE, or set {TOKEN}", code=2)
        return token
    try:
        token = file.read_text(encoding="utf-8").strip()
    except OSError as error:
        fail(f"--token-file: {file}: {error.strerror}", code=2)
    except UnicodeDecodeError:
        fail(f"--token-file: {file}: not text; it must hold one token", code=2)
    if not token:
        fail(f"--token-file: {file}: it is empty; it must hold one token", code=2)
    return token


def _end(error: object) -> NoReturn:
    from kvtune_dashboards.push import PushError

    assert isinstance(error, PushError)
    fail(f"{error.message}\n{error.hint}", code=2 if error.usage else 1)
