"""vLLM's own connector, waiting as kvtune's does: for stock servers on a machine with fewer cores than they spin on.

An idle stock server spins one core a worker (NIXL's progress thread), and two more while it holds blocks. On two cores
a turn of a stock pair then takes up to minutes, as the threads that have work wait for those that have none. What is
read, when and whether is stock's own; only waiting differs. vLLM imports it (`kv_connector_module_path`).
"""

from __future__ import annotations

import time
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector

from kvtune_connector.relax import relax_cpu_platform
from kvtune_connector.settings import ConnectorSettings

_REST_S = 0.002


class NixlConnector(NixlPullConnector):
    """vLLM keys behaviour on this name."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        with relax_cpu_platform(ConnectorSettings()):
            super().__init__(vllm_config, role, kv_cache_config)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Rest in a step that only holds blocks."""
        if scheduler_output.total_num_scheduled_tokens == 0:
            time.sleep(_REST_S)
        return super().build_connector_meta(scheduler_output)
