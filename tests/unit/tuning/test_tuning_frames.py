from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from kvtune_tuning.errors import TuningError
from kvtune_tuning.frames import COLUMNS, to_frame, write_samples
from kvtune_tuning.series import Series, SeriesSet


def found() -> SeriesSet:
    times = np.array([100.0, 110.0, 120.0])
    return SeriesSet(
        (
            Series("b_total", frozenset({("engine", "0")}), "d", times, np.array([5.0, 9.0, 2.0])),
            Series("a", frozenset(), "p", times[:2], np.array([1.0, 1.5])),
        ),
        {"d": times, "p": times[:2]},
    )


def test_a_row_a_sample_and_increments_without_resets() -> None:
    frame = to_frame(found())
    assert list(frame.columns) == [*COLUMNS, "engine"]
    assert list(frame["series"]) == ["b_total"] * 3 + ["a"] * 2
    assert list(frame["value"]) == [5.0, 9.0, 2.0, 1.0, 1.5]
    assert frame["increase"].fillna(-1).tolist() == [-1.0, 4.0, 2.0, -1.0, 0.5]
    assert frame["time"].iloc[0] == pd.Timestamp("1970-01-01T00:01:40Z")
    assert frame["engine"].isna().tolist() == [False] * 3 + [True] * 2
    # The table alone gives what the tuner reads.
    assert frame.groupby("series")["increase"].sum().to_dict() == {"a": 0.5, "b_total": 6.0}


def test_no_samples_are_an_empty_table() -> None:
    assert to_frame(SeriesSet((), {})).shape == (0, len(COLUMNS))


def test_written_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "samples.csv"
    assert write_samples(found(), path) == 5
    assert pd.read_csv(path)["value"].sum() == 18.5


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(TuningError, match=r"cannot write .*nowhere"):
        write_samples(found(), tmp_path / "nowhere" / "x.csv")
