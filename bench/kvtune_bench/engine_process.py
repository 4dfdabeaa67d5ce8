"""Simulated engines as processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvtune_bench.engine import EngineConfig

START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 5.0


class EngineStartError(RuntimeError):
    """The engine did not come up; the message is what it said."""


class EngineProcess:
    """A started engine process."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self._process = process
        self.url = url
        """`http://HOST:PORT`."""

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, or None while it runs."""
        return self._process.returncode

    @classmethod
    async def start(cls, config: EngineConfig) -> EngineProcess:
        """Start an engine and wait until it serves. Its log goes to this process's stderr. Raises EngineStartError."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvtune_bench.engine_server", json.dumps(config.as_dict()),
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                line = (await process.stdout.readline()).decode().strip()
        except TimeoutError:
            process.kill()
            await process.wait()
            raise EngineStartError(f"engine said nothing in {START_TIMEOUT_S} s") from None
        except BaseException:
            process.kill()
            raise
        word, _, url = line.partition(" ")
        if word != "ready":
            status = await process.wait()
            raise EngineStartError(f"engine stopped with status {status}: {line or 'see its log'}")
        return cls(process, url)

    async def stop(self) -> int:
        """Ask it to stop (SIGTERM), or make it; its exit status."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                return await self._process.wait()
        except TimeoutError:
            return await self.kill()

    async def kill(self) -> int:
        """Kill it (SIGKILL), as a crash would; its exit status."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        return await self._process.wait()


@asynccontextmanager
async def engine_process(config: EngineConfig) -> AsyncIterator[EngineProcess]:
    """An engine process that lives as long as the block."""
    process = await EngineProcess.start(config)
    try:
        yield process
    finally:
        if process.returncode is None:
            await process.stop()
