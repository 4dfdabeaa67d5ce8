"""How a command ends in error: one line on stderr that says what, where and what to do."""

from __future__ import annotations

from typing import NoReturn

import typer


def fail(message: str, *, code: int = 1) -> NoReturn:
    """Print `message` and exit with `code` (1 error, 2 usage)."""
    typer.echo(f"kvtune: {message}", err=True)
    raise typer.Exit(code)
