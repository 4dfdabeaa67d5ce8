"""`kvtune metrics`: the catalogue."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated

import typer


class MetricsFormat(StrEnum):
    """How to print."""

    TABLE = "table"
    JSON = "json"
    MD = "md"


def metrics(
    format: Annotated[MetricsFormat, typer.Option("--format", help="table, json or md")] = MetricsFormat.TABLE,
) -> None:
    """Print every metric kvtune exports: name, type, unit, labels, who exports it, what it means."""
    from kvtune_telemetry.catalogue import CATALOGUE

    rows = [metric.as_dict() for metric in CATALOGUE]
    if format is MetricsFormat.JSON:
        import orjson

        typer.echo(orjson.dumps({"schema": "kvtune.metrics/1", "metrics": rows}, option=orjson.OPT_INDENT_2).decode())
        return
    cells = [
        (row["name"], row["type"], row["unit"], ", ".join(row["labels"]) or "-", row["emitter"], row["help"])
        for row in rows
    ]
    heads = ("Name", "Type", "Unit", "Labels", "Emitter", "Meaning")
    if format is MetricsFormat.MD:
        typer.echo("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
        for name, *rest in cells:
            typer.echo("| `" + name + "` | " + " | ".join(str(cell).replace("|", "\\|") for cell in rest) + " |")
        for line in _label_values():
            typer.echo(line)
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(box=None, pad_edge=False, title=None)
    for head in heads:
        table.add_column(head, overflow="fold", no_wrap=head == "Name")
    for row in cells:
        table.add_row(*row)
    # A pipe has no width of its own; names must not be folded there.
    width = max(console.width, 160) if not console.is_terminal else console.width
    Console(width=width).print(table)


def _label_values() -> Iterator[str]:
    """Tables of what label values mean, as Markdown."""
    from kvtune_telemetry.catalogue import CATALOGUE
    from kvtune_telemetry.vocabulary import meanings

    users: dict[tuple[str, type[StrEnum]], list[str]] = {}
    for metric in CATALOGUE:
        for label in metric.labels:
            if label.words is not None:
                users.setdefault((label.name, label.words), []).append(f"`{metric.name}`")
    for (name, words), names in users.items():
        yield f"\n## `{name}` of {', '.join(names)}\n\n{' '.join((words.__doc__ or '').split())}\n"
        yield "| Value | Meaning |\n|---|---|"
        for value, meaning in meanings(words).items():
            yield f"| `{value}` | {meaning.replace('|', chr(92) + '|')} |"
