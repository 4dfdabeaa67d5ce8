"""Faults that a test can switch on in a running simulated engine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any


class FaultError(ValueError):
    """A fault setting that makes no sense; the message says which and what is allowed."""


@dataclass(frozen=True, slots=True)
class Faults:
    """What is wrong with the engine now; the default is nothing."""

    http_500_rate: float = 0.0
    """Share of requests refused with HTTP 500 (0 to 1)."""
    prefill_500_with_reference: bool = False
    """Refuse, with HTTP 500, every request that hands over another engine's blocks."""
    fail_reads_rate: float = 0.0
    """Share of KV reads that fail (0 to 1)."""
    drop_params: bool = False
    """Answer without `kv_transfer_params`; the blocks are kept all the same."""
    delay_first_byte_s: float = 0.0
    """Wait so long (model seconds) before the first byte of an answer."""
    cut_stream_after_chunks: int | None = None
    """Break the connection after so many chunks of a stream."""
    hang: bool = False
    """Never answer; the request waits until its client leaves."""

    def merged(self, changes: object) -> Faults:
        """These faults with `changes` made; null means the default. Raises FaultError."""
        if not isinstance(changes, Mapping):
            raise FaultError("faults must be a JSON object")
        kinds = {field.name: field for field in fields(self)}
        values: dict[str, Any] = {}
        for name, value in changes.items():
            if name not in kinds:
                raise FaultError(f"unknown fault {name!r}; known: {', '.join(kinds)}")
            values[name] = kinds[name].default if value is None else _checked(name, value)
        return replace(self, **values)

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def _checked(name: str, value: object) -> object:
    if name in ("prefill_500_with_reference", "drop_params", "hang"):
        if not isinstance(value, bool):
            raise FaultError(f"{name} must be true or false, got {value!r}")
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise FaultError(f"{name} must be a number, got {value!r}")
    if name.endswith("_rate"):
        if not 0 <= value <= 1:
            raise FaultError(f"{name} must be between 0 and 1, got {value!r}")
        return float(value)
    if name == "cut_stream_after_chunks":
        if not isinstance(value, int) or value < 0:
            raise FaultError(f"{name} must be a whole number of chunks, got {value!r}")
        return value
    if value < 0:
        raise FaultError(f"{name} must not be negative, got {value!r}")
    return float(value)
