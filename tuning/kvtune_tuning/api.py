"""Advice as a function call, for other rooms and for scripts."""

from __future__ import annotations

import os
from typing import Any

from kvtune_tuning.document import build, failed
from kvtune_tuning.errors import TuningError
from kvtune_tuning.evidence import gather
from kvtune_tuning.series import SeriesSet
from kvtune_tuning.sources import read_snapshots
from kvtune_tuning.stock import Stated


def suggest_series(
    series: SeriesSet,
    source: dict[str, Any],
    *,
    window_s: float | None = None,
    explain: bool = False,
    queries: list[str] | None = None,
    stated: Stated | None = None,
) -> dict[str, Any]:
    """The document for series that were read already. Raises TuningError where they cannot be used.

    `stated`: what the user says of a deployment that does not say it itself (roles, ranks, settings in force).
    """
    if window_s is not None and series.scrapes:
        series = series.last(window_s)
    return build(gather(series, stated), source, explain=explain, queries=queries)


def suggest_snapshots(
    directory: str | os.PathLike[str],
    *,
    window_s: float | None = None,
    explain: bool = False,
    stated: Stated | None = None,
) -> dict[str, Any]:
    """The document for a directory that `kvtune record` wrote. A failure is a document too (`error`), never raised.

    `window_s`: use only the last so many seconds of it.
    """
    source = {"kind": "snapshot", "where": [os.fspath(directory)]}
    try:
        return suggest_series(read_snapshots(directory), source, window_s=window_s, explain=explain, stated=stated)
    except TuningError as error:
        return failed(error, source)
