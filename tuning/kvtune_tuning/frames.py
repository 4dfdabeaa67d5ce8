"""The raw evidence as a pandas table, for notebooks and for `kvtune suggest --samples`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvtune_tuning.errors import TuningError
from kvtune_tuning.series import SeriesSet

if TYPE_CHECKING:
    import pandas as pd

LATEST_S = 9_000_000_000.0
"""No sample is later (Unix s, in the year 2255): tables and dates end soon after, and no clock is so far off."""
COLUMNS = ("time", "target", "series", "value", "increase")
"""`time`: UTC; `value`: as scraped; `increase`: since the sample before, counter resets taken out. Labels follow."""


def to_frame(found: SeriesSet) -> pd.DataFrame:
    """Every sample that was read, a row each, in order of target, series, labels and time.

    Columns: `COLUMNS`, then one per label that any series has (empty where a series lacks it); shape (samples, 5 +
    labels).
    """
    import pandas as pd

    labels = sorted({name for series in found.series for name, _ in series.labels})
    parts = []
    for series in found.series:
        unwrapped = series.unwrapped()
        part = pd.DataFrame(
            {
                "time": pd.to_datetime(series.times, unit="s", utc=True),
                "target": series.target,
                "series": series.name,
                "value": series.values,
                "increase": np.concatenate(([np.nan], np.diff(unwrapped))),
            }
        )
        own = dict(series.labels)
        for name in labels:
            part[name] = own.get(name)
        parts.append(part)
    if not parts:
        return pd.DataFrame(columns=[*COLUMNS, *labels])
    whole = pd.concat(parts, ignore_index=True)
    return whole.sort_values(["target", "series", *labels, "time"], ignore_index=True, na_position="first")


def write_samples(found: SeriesSet, path: Path) -> int:
    """Write `to_frame` to `path` as CSV; returns the number of rows. Raises TuningError if it cannot."""
    frame = to_frame(found)
    try:
        frame.to_csv(path, index=False)
    except OSError as error:
        raise TuningError(
            "cannot_write", f"cannot write {path}: {error.strerror or error}", "Name a file in a directory that exists."
        ) from None
    return len(frame)
