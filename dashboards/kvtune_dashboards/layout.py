"""Places panels on Grafana's grid of 24 columns, and numbers them.

A section is a row's head and the panels under it. Panels flow from left to right and wrap; a line is as high as its
highest panel or column of panels; the lint finds what leaves a hole. Ids are made from titles, so that links to a panel
outlive others being added, moved or taken away.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from kvtune_dashboards.panels import Panel, row

COLUMNS = 24
"""Width of Grafana's grid."""


@dataclass(frozen=True, slots=True)
class Sized:
    """A panel with its width (columns) and height (grid rows of 30 px + 8 px)."""

    panel: Panel
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Column:
    """Panels that flow in a part of a line: beside a panel as high as they are together."""

    width: int
    panels: Sequence[Sized | Column]


@dataclass(frozen=True, slots=True)
class Section:
    """Panels under one head; without a title they stand at the top of the board, under none."""

    title: str
    panels: Sequence[Sized | Column]
    collapsed: bool = False


def panel_id(title: str) -> int:
    """The id of the panel with this title: 1 to 2^20."""
    return zlib.crc32(title.encode()) % 2**20 + 1


def place(sections: Sequence[Section]) -> list[Panel]:
    """The board's `panels`, each with `id` and `gridPos`.

    Raises:
        ValueError: when a panel is wider than the grid, two ids are the same, or a section without a title is not the
            first.
    """
    placed: list[Panel] = []
    y = 0
    for number, section in enumerate(sections):
        if not section.title:
            if number:
                raise ValueError("a section without a title must be the first: its panels would seem the last one's")
            flowed, y = _flow(section.panels, y)
            placed += flowed
            continue
        head = row(section.title, collapsed=section.collapsed)
        head |= {"id": panel_id(f"row: {section.title}"), "gridPos": _position(0, y, COLUMNS, 1)}
        flowed, below = _flow(section.panels, y + 1)
        placed.append(head)
        if section.collapsed:
            head["panels"] = flowed
            y += 1
        else:
            placed += flowed
            y = below
    _refuse_double_ids(placed)
    return placed


def _flow(panels: Sequence[Sized | Column], y: int, left: int = 0, columns: int = COLUMNS) -> tuple[list[Panel], int]:
    """The panels placed from `left` on in so many columns, and the first free line below them."""
    flowed: list[Panel] = []
    x = tallest = 0
    for one in panels:
        if isinstance(one, Column):
            what, height = "a column of panels", 1
        else:
            what, height = f"panel {one.panel['title']!r}", one.height
        if not 0 < one.width <= columns or height < 1:
            raise ValueError(f"{what} is {one.width} by {height}; the grid is {columns} wide")
        if x + one.width > columns:
            x, y, tallest = 0, y + tallest, 0
        if isinstance(one, Column):
            inside, below = _flow(one.panels, y, left + x, one.width)
            flowed += inside
            height = below - y
        else:
            where = _position(left + x, y, one.width, one.height)
            flowed.append({"id": panel_id(one.panel["title"]), "gridPos": where, **one.panel})
        x += one.width
        tallest = max(tallest, height)
    return flowed, y + tallest


def _position(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _refuse_double_ids(placed: Sequence[Panel]) -> None:
    seen: dict[int, str] = {}
    for panel in placed:
        for one in (panel, *panel.get("panels", ())):
            if one["id"] in seen:
                raise ValueError(f"panels {seen[one['id']]!r} and {one['title']!r} have the same id: change one title")
            seen[one["id"]] = one["title"]
