"""The four dashboards: what each asks, and where it stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvtune_dashboards.boards import fleet, retention, reuse, transfer

BOARDS: dict[str, Callable[[], dict[str, Any]]] = {
    reuse.UID: reuse.board,
    transfer.UID: transfer.board,
    retention.UID: retention.board,
    fleet.UID: fleet.board,
}
"""Makes each board's JSON, by uid, in the order a reader takes them."""
