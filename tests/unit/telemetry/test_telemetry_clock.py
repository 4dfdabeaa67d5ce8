from __future__ import annotations

import time

import pytest

from kvtune_telemetry.clock import ScaledClock, SystemClock, clock_from_spec


def test_scaled_clocks_of_two_processes_agree() -> None:
    clock = ScaledClock(40.0, time.monotonic() - 2.0, 1_000_000.0)
    other = ScaledClock.parse(clock.spec())
    assert other == clock
    assert clock.now() >= 80.0
    assert clock.unix() - 1_000_000.0 == pytest.approx(clock.now(), abs=40.0)


@pytest.mark.parametrize("bad", ["", "x", "0", "-1", "1@2", "1@2@3@4", "nan"])
def test_bad_specs_are_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="time scale must be"):
        ScaledClock.parse(bad)


def test_no_spec_is_the_system_clock() -> None:
    assert isinstance(clock_from_spec(None), SystemClock)
