"""The ledger of KV that D retains after an answer: what is held, for how long, and how each holding ended. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvtune_telemetry.events import RetentionEnded, RetentionStarted
from kvtune_telemetry.vocabulary import End


@dataclass(frozen=True, slots=True)
class Held:
    """One retained request. Times in the owner's clock (s)."""

    tokens: int
    blocks: int
    since_s: float
    deadline_s: float


class RetentionLedger:
    """What is retained now. A key is retained at most once and ends exactly once; unknown keys end nothing."""

    def __init__(self) -> None:
        self._held: dict[str, Held] = {}
        self.tokens = 0
        self.blocks = 0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: str) -> bool:
        return key in self._held

    def get(self, key: str) -> Held | None:
        """What is retained under `key`."""
        return self._held.get(key)

    def start(self, key: str, *, tokens: int, blocks: int, now_s: float, ttl_s: float) -> RetentionStarted:
        """Retain `tokens` in `blocks` for `ttl_s` seconds. Raises ValueError if `key` is retained already."""
        if key in self._held:
            raise ValueError(f"request {key} is retained already")
        self._held[key] = Held(tokens, blocks, now_s, now_s + ttl_s)
        self.tokens += tokens
        self.blocks += blocks
        return RetentionStarted(tokens, blocks)

    def end(self, key: str, end: End, now_s: float) -> RetentionEnded | None:
        """End the retention of `key`; None if it is not (or no longer) retained."""
        held = self._held.pop(key, None)
        if held is None:
            return None
        self.tokens -= held.tokens
        self.blocks -= held.blocks
        return RetentionEnded(end, held.tokens, held.blocks, max(0.0, now_s - held.since_s))

    def due(self, now_s: float) -> list[str]:
        """Keys whose TTL has run out (per-request TTLs: not in order of insertion)."""
        return [key for key, held in self._held.items() if held.deadline_s <= now_s]

    def next_deadline_s(self) -> float | None:
        """The earliest deadline, or None."""
        return min((held.deadline_s for held in self._held.values()), default=None)

    def drain(self, end: End, now_s: float) -> Iterator[RetentionEnded]:
        """End everything, as at shut-down."""
        for key in list(self._held):
            ended = self.end(key, end, now_s)
            assert ended is not None
            yield ended
