"""Simulated engines as processes of their own."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvtune_bench.engine import EngineConfig
from kvtune_bench.process import ChildProcess


class EngineProcess:
    """A started engine process."""

    def __init__(self, child: ChildProcess) -> None:
        self._child = child
        self.url = child.ready.split(" ", 1)[1]
        """`http://HOST:PORT`."""

    @property
    def pid(self) -> int:
        """Process id."""
        return self._child.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, or None while it runs."""
        return self._child.returncode

    @classmethod
    async def start(cls, config: EngineConfig) -> EngineProcess:
        """Start an engine and wait until it serves. Its log goes to this process's stderr. Raises ProcessError."""
        command = [sys.executable, "-m", "kvtune_bench.engine_server", json.dumps(config.as_dict())]
        return cls(await ChildProcess.start(f"{config.role.value} engine", command))

    async def stop(self) -> int:
        """Ask it to stop (SIGTERM), or make it; its exit status."""
        return await self._child.stop()

    async def kill(self) -> int:
        """Kill it (SIGKILL), as a crash would; its exit status."""
        return await self._child.kill()


@asynccontextmanager
async def engine_process(config: EngineConfig) -> AsyncIterator[EngineProcess]:
    """An engine process that lives as long as the block."""
    process = await EngineProcess.start(config)
    try:
        yield process
    finally:
        await process.stop()
