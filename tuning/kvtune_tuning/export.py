"""The advice as Prometheus gauges: what is exposed for a document of `kvtune suggest`, and the file that holds it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.core import Metric as MetricFamily
from prometheus_client.registry import Collector

from kvtune_telemetry.catalogue import emitted_by
from kvtune_telemetry.exposition import render
from kvtune_tuning.errors import NOT_ENOUGH_DATA, TuningError, UsageError
from kvtune_tuning.recording import write_whole

_METRICS = {metric.name: metric for metric in emitted_by("suggest")}
SETTINGS = _METRICS["kvtune_suggest_status"].labels[0].values or ()
STATUSES = _METRICS["kvtune_suggest_status"].labels[1].values or ()


@dataclass(frozen=True, slots=True)
class Advice:
    """What the gauges say: values by setting, absent where there is none; times are Unix seconds."""

    made_s: float
    up: bool
    last_success_s: float | None
    statuses: dict[str, str] = field(default_factory=dict)
    """Status by setting; empty where the attempt failed."""
    values: dict[str, dict[str, float]] = field(default_factory=dict)
    """Value by setting, by metric."""

    @classmethod
    def of(cls, document: dict[str, Any], made_s: float, last_success_s: float | None = None) -> Advice:
        """What to expose of a document made at `made_s`. `last_success_s`: of an attempt before, in the same process.

        A failed document leaves no value and no status of an earlier one in force. Too little data is an answer, not
        a failure: the status of both settings is then insufficient.
        """
        error = document.get("error")
        if error is not None:
            too_little = error["code"] in NOT_ENOUGH_DATA
            return cls(
                made_s, too_little, made_s if too_little else last_success_s,
                dict.fromkeys(SETTINGS, "insufficient") if too_little else {},
            )  # fmt: skip
        statuses: dict[str, str] = {}
        values: dict[str, dict[str, float]] = {}
        for one in document["recommendations"]:
            low, high = one["interval"] or (None, None)
            found = {
                "kvtune_suggest_recommended": one["recommended"],
                # vLLM's default is a guess of ours where the setting could not be read.
                "kvtune_suggest_current": None if one["current_assumed"] else one["current"],
                "kvtune_suggest_interval_low": low,
                "kvtune_suggest_interval_high": high,
            }
            statuses[one["setting"]] = one["status"]
            for name, value in found.items():
                if value is not None:
                    values.setdefault(name, {})[one["setting"]] = float(value)
        return cls(made_s, True, made_s, statuses, values)

    def families(self) -> Iterator[MetricFamily]:
        """The metric families, every declared one, some without samples."""
        for name, metric in _METRICS.items():
            family = GaugeMetricFamily(name, metric.help, labels=metric.label_names())
            for labels, value in self._samples(name):
                family.add_metric(labels, value)
            yield family

    def _samples(self, name: str) -> Iterator[tuple[tuple[str, ...], float]]:
        if name == "kvtune_suggest_status":
            for setting in SETTINGS:
                for status in STATUSES:
                    yield (setting, status), float(self.statuses.get(setting) == status)
        elif name == "kvtune_suggest_timestamp_seconds":
            yield (), self.made_s
        elif name == "kvtune_suggest_last_success_timestamp_seconds":
            if self.last_success_s is not None:
                yield (), self.last_success_s
        elif name == "kvtune_suggest_up":
            yield (), float(self.up)
        else:
            for setting, value in self.values.get(name, {}).items():
                yield (setting,), value


class AdviceCollector(Collector):
    """Exposes the advice that `advice` holds; nothing before the first one."""

    def __init__(self) -> None:
        self.advice: Advice | None = None

    def collect(self) -> Iterator[MetricFamily]:
        """The families of the advice in force."""
        if self.advice is not None:
            yield from self.advice.families()


def exposition(advice: Advice) -> str:
    """The advice in the Prometheus text format."""
    collector, registry = AdviceCollector(), CollectorRegistry()
    collector.advice = advice
    registry.register(collector)
    return render(registry)[0].decode()


def check_export(path: Path) -> None:
    """Refuse a file that cannot be one for a textfile collector, before the work. Raises UsageError."""
    if path.suffix != ".prom":
        raise UsageError(
            "bad_export", f"--export: {path}: the name does not end in .prom",
            "node_exporter's textfile collector reads *.prom only: name it e.g. kvtune-suggest.prom.",
        )  # fmt: skip
    if path.exists() and not path.is_file():
        raise UsageError("bad_export", f"--export: {path}: not a file", "Give the path of a file, new or old.")
    if not path.parent.is_dir():
        raise UsageError(
            "bad_export", f"--export: {path.parent}: no such directory",
            "Give the directory that node_exporter reads (--collector.textfile.directory), or create it.",
        )  # fmt: skip


def write_export(path: Path, advice: Advice) -> None:
    """Write the gauges to `path`: whole or not at all, mode 0644. Raises TuningError (`cannot_write`)."""
    try:
        write_whole(path, exposition(advice))
    except OSError as error:
        raise TuningError(
            "cannot_write", f"--export: {path}: {error.strerror or error}",
            "Files are written beside it and renamed: its directory must be writable.",
        ) from None  # fmt: skip
