"""Child processes that say when they are ready, log to a file, and never outlive their parent."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0
_LOG_TAIL_LINES = 12
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


class ProcessError(RuntimeError):
    """A child did not come up; the message holds the end of its log."""


def free_port() -> int:
    """A loopback port nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def _die_with_parent() -> None:
    # Between fork and exec: nothing but the one system call.
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class ChildProcess:
    """A started child. `ready` is the first line it printed on stdout."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.ready = ""
        self._process = process

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, None while it runs."""
        return self._process.returncode

    @classmethod
    async def spawn(
        cls, name: str, command: Sequence[str], log: Path | None = None, environment: Mapping[str, str] | None = None
    ) -> ChildProcess:
        """Start `command` without waiting for it. Its stderr goes to `log` (stdout too), or to ours.

        The child has a session of its own: a Ctrl-C reaches the parent only, which then stops its children in order.
        """
        return await cls._spawned(name, command, log, environment, asyncio.subprocess.STDOUT if log else None)

    @classmethod
    async def start(cls, name: str, command: Sequence[str], log: Path | None = None) -> ChildProcess:
        """`spawn`, and wait for its first line on stdout. Raises ProcessError."""
        child = await cls._spawned(name, command, log, None, asyncio.subprocess.PIPE)
        process = child._process
        assert process.stdout is not None
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                child.ready = (await process.stdout.readline()).decode(errors="replace").strip()
        except TimeoutError:
            await _kill(process)
            raise ProcessError(f"{name} was not ready within {START_TIMEOUT_S:g} s; {tail(log)}") from None
        except BaseException:
            await _kill(process)
            raise
        if not child.ready:
            status = await process.wait()
            raise ProcessError(f"{name} stopped with status {status}; {tail(log)}")
        return child

    @classmethod
    async def _spawned(
        cls,
        name: str,
        command: Sequence[str],
        log: Path | None,
        environment: Mapping[str, str] | None,
        stdout: int | None,
    ) -> ChildProcess:
        with log.open("ab") if log is not None else contextlib.nullcontext() as stream:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=stream if stdout == asyncio.subprocess.STDOUT else stdout,
                stderr=stream,
                start_new_session=True,
                preexec_fn=_die_with_parent,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
            )
        return cls(name, process)

    async def stop(self) -> int:
        """Ask it to stop; kill it when it does not. Returns its exit status."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    return await self._process.wait()
            except TimeoutError:
                pass
        return await _kill(self._process)

    async def kill(self) -> int:
        """Kill it at once, as a crash would. Returns its exit status."""
        return await _kill(self._process)

    async def stop_group(self) -> int:
        """`stop`, then kill what its session still runs: servers start processes of their own."""
        status = await self.stop()
        self._signal_group(signal.SIGKILL)
        return status

    async def kill_group(self) -> int:
        """Kill the child and all that its session runs."""
        self._signal_group(signal.SIGKILL)
        return await _kill(self._process)

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


async def _kill(process: asyncio.subprocess.Process) -> int:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    return await process.wait()


def tail(log: Path | None) -> str:
    """The end of a log, in words."""
    if log is None:
        return "see its log"
    try:
        lines = log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
    except OSError:
        lines = []
    return "its log ends:\n  " + "\n  ".join(lines) if lines else f"its log {log} is empty"
