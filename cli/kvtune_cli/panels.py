"""Help with options in groups, in plain text."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


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
