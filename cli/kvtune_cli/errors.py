"""How a command ends in error: one line on stderr that says what, where and what to do; a document if one is owed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NoReturn

import typer

SCHEMAS = {
    "suggest": "kvtune.suggest/1",
    "record": "kvtune.record/1",
    "simulate": "kvtune.simulate/1",
    "metrics": "kvtune.metrics/1",
    "check": "kvtune.check/1",
}
"""Commands that print a document, also of a failure."""
_TELLS_ITSELF = ("check",)
"""Commands that print the document of their own failures before they end with `fail`."""

_owed: ContextVar[str | None] = ContextVar("owed", default=None)


def schema_asked(arguments: Sequence[str]) -> str | None:
    """The schema of the document that these arguments ask for; None if they ask for none."""
    command = next((one for one in arguments if not one.startswith("-")), "")
    asked = ""
    for number, one in enumerate(arguments):
        if one == "--":
            break
        if one == "--format" and number + 1 < len(arguments):
            asked = arguments[number + 1]
        elif one.startswith("--format="):
            asked = one.partition("=")[2]
    # every JSON document is a YAML document too
    return SCHEMAS.get(command) if asked == "json" or (asked == "yaml" and command == "suggest") else None


@contextmanager
def owing(schema: str | None) -> Iterator[None]:
    """Meanwhile, `fail` prints a document of `schema` too."""
    before = _owed.set(None if schema in [SCHEMAS[name] for name in _TELLS_ITSELF] else schema)
    try:
        yield
    finally:
        _owed.reset(before)


def tell(schema: str, code: str, message: str, hint: str) -> None:
    """Print the document of a failure."""
    error = {"code": code, "message": message, "hint": hint}
    typer.echo(json.dumps({"schema": schema, "error": error}, indent=2))


def fail(message: str, *, code: int = 1, kind: str | None = None, hint: str = "") -> NoReturn:
    """Print `message` and exit with `code` (1 error, 2 usage).

    `kind` is the error's stable name in the document, by default `usage` or `failed`.
    """
    typer.echo(f"kvtune: {message}", err=True)
    if hint:
        typer.echo(hint, err=True)
    owed = _owed.get()
    if owed is not None:
        tell(owed, kind or ("usage" if code == 2 else "failed"), message, hint)
    raise typer.Exit(code)
