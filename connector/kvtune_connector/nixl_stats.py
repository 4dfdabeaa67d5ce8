"""From engine to `/metrics`: connector events travel in vLLM's own statistics and are booked in the API server.

The scheduler hands its events out with `get_kv_connector_stats()`; vLLM merges them with the workers' NIXL statistics,
ships both to the API server and calls `observe` there. Stock series and the `KV Transfer metrics:` line are untouched.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from loguru import logger
from prometheus_client import REGISTRY, CollectorRegistry
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats, NixlPromMetrics

from kvtune_connector.settings import ConnectorSettings, read_settings
from kvtune_telemetry import events
from kvtune_telemetry.instruments import Families
from kvtune_telemetry.recorder import ConnectorRecorder
from kvtune_telemetry.vocabulary import Decision, Direction, End, Missed, Reason, Role

EVENTS = "kvtune_events"
"""The key our events travel under."""

_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        events.PrefillDecided,
        events.PrefillComputed,
        events.KvRead,
        events.KvReadFailed,
        events.KvReadDeclined,
        events.KvLateNotification,
        events.RetentionStarted,
        events.RetentionMissed,
        events.RetentionEnded,
    )
}
_ENUMS = {"decision": Decision, "reason": Reason, "direction": Direction, "end": End, "missed": Missed}


def pack(event: events.ConnectorEvent) -> list[Any]:
    """An event as plain data: its name, then its fields in order."""
    return [type(event).__name__, *(getattr(event, field.name) for field in dataclasses.fields(event))]


def unpack(data: list[Any]) -> events.ConnectorEvent:
    """The inverse of `pack`, after a journey as MessagePack (enums are strings by then)."""
    kind = _KINDS[data[0]]
    values = {
        field.name: _ENUMS[field.name](value) if field.name in _ENUMS else value
        for field, value in zip(dataclasses.fields(kind), data[1:], strict=True)
    }
    found: events.ConnectorEvent = kind(**values)
    return found


def role_of(kv_role: str) -> Role:
    """P produces KV, D consumes it."""
    return Role.PREFILL if kv_role == "kv_producer" else Role.DECODE


@dataclasses.dataclass
class ConnectorStats(NixlKVConnectorStats):
    """NIXL's statistics and our events."""

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.data[EVENTS] = []

    def aggregate(self, other: Any) -> ConnectorStats:
        """Merge another side's; a stock one has no events."""
        for data in (self.data, other.data):
            data.setdefault(EVENTS, [])
        super().aggregate(other)
        return self

    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return not self.data.get(EVENTS) and super().is_empty()


def of_events(found: list[events.ConnectorEvent]) -> ConnectorStats | None:
    """Statistics that hold only events; None for none."""
    if not found:
        return None
    stats = ConnectorStats()
    stats.data[EVENTS] = [pack(event) for event in found]
    return stats


class ConnectorPromMetrics(NixlPromMetrics):
    """Books events on the API server's registry, beside the stock NIXL series."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        *,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        _forget(registry)
        families = Families("connector", registry)
        config = vllm_config.kv_transfer_config
        settings = read_settings(config.kv_connector_extra_config)
        self._recorders: dict[int, ConnectorRecorder] = {}
        for engine, values in per_engine_labelvalues.items():
            named = dict(zip(labelnames, values, strict=True))
            self._recorders[engine] = recorder = ConnectorRecorder(
                families,
                model_name=str(named.get("model_name", "")),
                engine=str(named.get("engine", engine)),
                role=role_of(config.kv_role),
                version=_version(),
            )
            for setting, value in settings_in_force(settings, vllm_config).items():
                recorder.set_setting(setting, value)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Book one batch."""
        super().observe(transfer_stats_data, engine_idx)
        recorder = self._recorders[engine_idx]
        for data in transfer_stats_data.get(EVENTS, ()):
            try:
                event = unpack(data)
            except (KeyError, TypeError, ValueError):
                # An event of another version must not take the engine's metrics down.
                logger.warning("a connector event of an unknown kind was dropped: {}", data[:1])
                continue
            recorder.record(event)


def settings_in_force(settings: ConnectorSettings, vllm_config: Any) -> dict[str, float]:
    """What `kvtune_connector_setting` shows."""
    cache = vllm_config.cache_config
    return settings.in_force(cache.num_gpu_blocks * cache.block_size if cache.num_gpu_blocks else None)


def _forget(registry: CollectorRegistry) -> None:
    """vLLM clears its own series when it initialises again, but only names that begin with `vllm`."""
    for collector, names in list(registry._collector_to_names.items()):
        if any(name.startswith("kvtune_") for name in names):
            registry.unregister(collector)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("kvtune")
    except PackageNotFoundError:
        return "unknown"
