"""How figures are written for people."""

from __future__ import annotations


def digits(value: float) -> str:
    """A setting's value in plain digits, to a thousandth: 7, 0.5, 10000000."""
    return f"{round(value, 3):.16g}"
