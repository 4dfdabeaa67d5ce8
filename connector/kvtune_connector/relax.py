"""Keeps waiting processes from burning cores where that costs nothing.

On the CPU platform NIXL's progress thread spins one core a worker, idle or not, and readers of vLLM's message queue
spin between steps, which never cease while blocks are held. Elsewhere nothing is changed unless the settings say so.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvtune_connector.settings import ConnectorSettings

_SPIN_REST_S = 0.0002


@contextmanager
def relax_cpu_platform(settings: ConnectorSettings) -> Iterator[None]:
    """While a worker is built: no progress thread, if it is unwanted. For good: rest where the queue would spin."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
    from vllm.platforms import current_platform

    cpu = current_platform.is_cpu()
    if cpu and settings.idle_sleep_ms:
        from vllm.distributed.device_communicators import shm_broadcast

        shm_broadcast.sched_yield = lambda: time.sleep(_SPIN_REST_S)
    unwanted = cpu if settings.progress_thread is None else not settings.progress_thread
    stock = base_worker.nixl_agent_config
    if unwanted and stock is not None:
        base_worker.nixl_agent_config = functools.partial(stock, enable_prog_thread=False)
    try:
        yield
    finally:
        base_worker.nixl_agent_config = stock
