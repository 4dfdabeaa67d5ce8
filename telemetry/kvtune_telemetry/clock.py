"""Clocks that are handed in, so that decisions can be tested and simulations can run faster than the wall."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """Where time comes from. All values are seconds."""

    def now(self) -> float:
        """Monotonic seconds, for durations and deadlines."""
        ...

    def unix(self) -> float:
        """Seconds since the Unix epoch, for time stamps."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait that many seconds of this clock."""
        ...


class SystemClock:
    """The machine's own clock."""

    def now(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def unix(self) -> float:
        """Unix seconds."""
        return time.time()

    async def sleep(self, seconds: float) -> None:
        """Wait `seconds`; a negative wait only yields."""
        await asyncio.sleep(max(0.0, seconds))


@dataclass(frozen=True, slots=True)
class ScaledClock:
    """Model time: `scale` model seconds pass in one wall second, counted from an origin shared by processes.

    `CLOCK_MONOTONIC` is one clock for all processes of a machine, so that engines, router and load started with the
    same `spec()` agree on model time to the microsecond. Model Unix time starts at the origin's Unix time.
    """

    scale: float
    origin_monotonic: float
    origin_unix: float

    @classmethod
    def starting_now(cls, scale: float) -> ScaledClock:
        """A clock whose model time is 0 now; `scale` must be positive."""
        if not scale > 0:
            raise ValueError(f"time scale must be positive, got {scale}")
        return cls(scale, time.monotonic(), time.time())

    @classmethod
    def parse(cls, spec: str) -> ScaledClock:
        """Read `spec()`, or a bare factor such as `40` (origin: now). Raises ValueError that says what is wrong."""
        parts = spec.split("@")
        try:
            numbers = [float(part) for part in parts]
        except ValueError:
            raise ValueError(f"time scale must be FACTOR or FACTOR@MONOTONIC@UNIX, got {spec!r}") from None
        if not numbers[0] > 0:
            raise ValueError(f"time scale must be positive, got {spec!r}")
        if len(numbers) == 1:
            return cls.starting_now(numbers[0])
        if len(numbers) != 3:
            raise ValueError(f"time scale must be FACTOR or FACTOR@MONOTONIC@UNIX, got {spec!r}")
        return cls(numbers[0], numbers[1], numbers[2])

    def spec(self) -> str:
        """The text another process gives to `parse`."""
        return f"{self.scale!r}@{self.origin_monotonic!r}@{self.origin_unix!r}"

    def now(self) -> float:
        """Model seconds since the origin."""
        return (time.monotonic() - self.origin_monotonic) * self.scale

    def unix(self) -> float:
        """Model Unix seconds."""
        return self.origin_unix + self.now()

    async def sleep(self, seconds: float) -> None:
        """Wait `seconds` of model time."""
        await asyncio.sleep(max(0.0, seconds) / self.scale)


def clock_from_spec(spec: str | None) -> Clock:
    """The system's clock, or the scaled clock that `spec` describes."""
    return ScaledClock.parse(spec) if spec else SystemClock()
