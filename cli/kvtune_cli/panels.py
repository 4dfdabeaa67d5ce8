"""The top of the command line, which turns every way to fail into words, and help with options in groups."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from kvtune_cli.errors import owing, schema_asked, tell

# Typer brings its own click in newer versions and uses the installed one in older ones.
_CLICK_ERROR: Any = next(one for one in typer.BadParameter.__mro__ if one.__name__ == "ClickException")
_OUTPUT = (errno.ENOSPC, errno.EBADF, errno.EIO, errno.EFBIG, errno.EDQUOT)
"""What a write to a standard stream fails with; errors of files name their file."""


class Commands(TyperGroup):
    """All commands. No traceback reaches a user, and whoever asked for a document gets one of a failure too."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run, and exit with the command's code."""
        given = list(sys.argv[1:] if args is None else args)
        schema = schema_asked(given)
        try:
            with owing(schema):
                code = super().main(given, prog_name, complete_var, False, windows_expand_args, **extra)
            sys.stdout.flush()
        except _CLICK_ERROR as error:
            error.show()
            if schema is not None:
                context = getattr(error, "ctx", None)
                command = context.command_path if context is not None else "kvtune"
                try:
                    tell(schema, "usage", error.format_message(), f"See '{command} --help'.")
                    sys.stdout.flush()
                except OSError as lost:
                    _lost(lost)
            sys.exit(error.exit_code)
        except typer.Abort:
            print("kvtune: interrupted", file=sys.stderr)
            sys.exit(130)
        except SystemExit as end:
            # Typer makes this of a broken pipe
            if isinstance(end.__context__, BrokenPipeError):
                _lost(end.__context__)
            raise
        except OSError as error:
            _lost(error)
        sys.exit(code if isinstance(code, int) else 0)


def _lost(error: OSError) -> NoReturn:
    """End without a traceback where something could not be written or read."""
    # Python flushes at its end what is left, and would complain then.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        # The reader of a pipe went away: nothing to say, and nobody to say it to.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        sys.exit(0)
    reason = error.strerror or str(error)
    if error.filename is not None:
        reason = f"{error.filename}: {reason}"
    elif error.errno in _OUTPUT:
        reason = f"cannot write the output: {reason}"
    with contextlib.suppress(OSError):
        print(f"kvtune: {reason}", file=sys.stderr, flush=True)
    sys.exit(1)


def open_streams() -> None:
    """Give closed standard streams a stand-in: what is written to stdout fails then, instead of being lost quietly."""
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w", encoding="utf-8")
    if sys.stderr is None:
        # print(file=None) would go to stdout
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  lives as long as the process


class Panels(TyperCommand):
    """A command whose help lists options under their `rich_help_panel`, without rich."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the groups, in the order of their first options."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            row = parameter.get_help_record(ctx)
            if row is not None:
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or "Options", []).append(row)
        for title, rows in groups.items():
            with formatter.section(title):
                formatter.write_dl(rows)
