"""`NixlConnector`: the drop-in. Stock vLLM in everything but proof, failure handling and books."""

from __future__ import annotations

import os
from typing import Any

from vllm import __version__ as vllm_version
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector, NixlPullConnector

from kvtune_connector.nixl_scheduler import ConnectorScheduler
from kvtune_connector.nixl_stats import EVENTS, ConnectorPromMetrics, ConnectorStats
from kvtune_connector.nixl_worker import ConnectorWorker
from kvtune_connector.relax import relax_cpu_platform
from kvtune_connector.settings import VERSION_OVERRIDE, check_version, read_settings


class NixlConnector(NixlPullConnector):
    """vLLM keys behaviour on this class's name. Settings: `kvtune_connector.settings`."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises SettingsError for settings or a vLLM version that cannot be followed."""
        check_version(vllm_version, os.environ.get(VERSION_OVERRIDE))
        settings = read_settings(vllm_config.kv_transfer_config.kv_connector_extra_config)
        # Not NixlPullConnector.__init__: that would build the stock sides, and open a NIXL agent.
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = ConnectorScheduler(vllm_config, self.engine_id, kv_cache_config, settings)
        else:
            with relax_cpu_platform(settings):
                self.connector_worker = ConnectorWorker(vllm_config, self.engine_id, kv_cache_config, settings)

    def get_kv_connector_stats(self) -> Any:
        """The worker's NIXL statistics, or the scheduler's events."""
        if self.connector_scheduler is not None:
            return self.connector_scheduler.take_stats()
        return super().get_kv_connector_stats()

    def build_connector_worker_meta(self) -> Any:
        """What the worker has to tell the scheduler."""
        return self.connector_worker.take_news() if self.connector_worker is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        """Statistics from what came over the wire."""
        if data is None:
            return ConnectorStats()
        # Only vLLM's log line reads these; an interval with nothing but our events has no line in stock either.
        return ConnectorStats(data={key: value for key, value in data.items() if key != EVENTS})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> ConnectorPromMetrics:
        """The API server's instruments."""
        return ConnectorPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
