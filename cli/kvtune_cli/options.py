"""Options that several commands share: how to get into the servers that they read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

_ACCESS = "Access to servers and targets"


def option(flag: str, metavar: str, help: str, panel: str | None = None) -> Any:
    """An option that takes a value, in its group of the help."""
    return typer.Option(flag, metavar=metavar, help=help, rich_help_panel=panel)


Headers = Annotated[
    list[str] | None,
    option("--header", "'NAME: VALUE'", "Send it with every request, e.g. X-Scope-OrgID; repeatable.", _ACCESS),
]
BearerTokenFile = Annotated[Path | None, option("--bearer-token-file", "FILE", "Log in with the token in it.", _ACCESS)]
CaFile = Annotated[
    Path | None, option("--ca-file", "FILE", "Authorities that sign the server's certificate (PEM).", _ACCESS)
]
ClientCert = Annotated[Path | None, option("--client-cert", "FILE", "Our certificate (PEM).", _ACCESS)]
ClientKey = Annotated[Path | None, option("--client-key", "FILE", "Its key, unless it is in the same file.", _ACCESS)]
Insecure = Annotated[
    bool, typer.Option("--insecure-skip-verify", help="Trust any certificate.", rich_help_panel=_ACCESS)
]
Timeout = Annotated[
    str | None, option("--timeout", "DURATION", "Wait for an answer so long [60s; scrapes 10s].", _ACCESS)
]
