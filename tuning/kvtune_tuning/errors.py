"""The one error of the tuning room: what went wrong, where, and what to do about it."""

from __future__ import annotations


class TuningError(Exception):
    """An input that cannot be used. `code` is stable and machine-readable; `hint` says what to do."""

    def __init__(self, code: str, message: str, hint: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[type[TuningError], tuple[str, str, str]]:
        """So that it gets out of a worker process whole."""
        return type(self), (self.code, self.message, self.hint)

    def as_dict(self) -> dict[str, str]:
        """The `error` member of a failed document."""
        return {"code": self.code, "message": self.message, "hint": self.hint}


NOT_ENOUGH_DATA = frozenset(("no_series", "no_kvtune_series", "window_too_short"))
"""Codes of errors that say: nothing failed, there is only too little to read (exit code 3)."""


class UsageError(TuningError):
    """Options that contradict each other or cannot be read (exit code 2)."""
