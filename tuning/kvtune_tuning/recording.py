"""Scrapes targets and writes exposition snapshots `<unix ms>-<target>.prom`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kvtune_telemetry.clock import Clock
from kvtune_tuning.access import Access, connection_hint, split_address
from kvtune_tuning.access import without_secrets as without_secrets
from kvtune_tuning.errors import TuningError, UsageError
from kvtune_tuning.exposition import check_known

if TYPE_CHECKING:
    import httpx

SUFFIX = ".prom"
FILE_NAME = re.compile(r"^(?P<ms>\d{1,15})-(?P<target>.+)\.prom$")
SCRAPE_TIMEOUT_S = 10.0
"""Wall seconds one scrape may take; Prometheus' own default."""
MAX_PAGE_BYTES = 256 * 2**20
"""Decompressed; one that is larger is not read to its end."""
LAST_S = 5.0
"""Wall seconds that scrapes have once the recording is to stop."""

Fetch = Callable[[str], Awaitable[str]]
Sink = Callable[[float, str, str], None]
"""Takes the time of a scrape (Unix s), the target's name and the exposition text."""
Complain = Callable[[str], None]


@dataclass(slots=True)
class Recording:
    """What a recording did."""

    rounds: int = 0
    snapshots: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    """Failed scrapes by target."""
    last_failure: dict[str, str] = field(default_factory=dict)
    """Why the last one failed, by target."""


def normalise(url: str) -> str:
    """A target's full address: `host:9400` becomes `http://host:9400/metrics`. Raises UsageError if none."""
    parts = split_address(url, "--scrape http://router:9400/metrics")
    if parts.path in ("", "/"):
        parts = parts._replace(path="/metrics")
    return parts.geturl()


def target_name(url: str) -> str:
    """A name for the target that is safe in file names: host and port, and the path unless it is `/metrics`."""
    parts = urlsplit(normalise(url))
    # user:password@ never gets into a file name
    host = (parts.hostname or "") + (f"_{parts.port}" if parts.port else "")
    path = "" if parts.path == "/metrics" else parts.path
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", host + path).strip("_")


def names_of(urls: Sequence[str]) -> dict[str, str]:
    """Name to full address, in the order given; the same address twice is one target."""
    named: dict[str, str] = {}
    for url in urls:
        full, name = normalise(url), target_name(url)
        while named.get(name, full) != full:
            name += "_"
        named[name] = full
    if not named:
        raise UsageError("no_target", "nothing to scrape", "Give at least one --scrape URL.")
    return named


def write_whole(path: Path, text: str) -> None:
    """Write a file that appears whole or not at all, readable by all. Raises OSError."""
    handle, temporary = tempfile.mkstemp(prefix=".", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


class SnapshotWriter:
    """Writes snapshots into a directory; each file appears whole or not at all."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Creates the directory. Raises TuningError (`cannot_write`) where that is impossible."""
        self.directory = Path(directory)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._cannot(error) from None

    def write(self, unix_s: float, target: str, text: str) -> Path:
        """Write one exposition; a second one of the same millisecond and target replaces the first."""
        path = self.directory / f"{round(unix_s * 1000)}-{target}{SUFFIX}"
        try:
            write_whole(path, text)
        except OSError as error:
            raise self._cannot(error) from None
        return path

    def _cannot(self, error: OSError) -> TuningError:
        return TuningError(
            "cannot_write",
            f"{self.directory}: {error.strerror or error}",
            "Give a directory that can be written.",
        )


@contextlib.asynccontextmanager
async def http_fetch(urls: Sequence[str] = (), access: Access | None = None) -> AsyncIterator[Fetch]:
    """A fetch function over one HTTP client for `urls`.

    It raises TuningError: `unreachable`, `timeout` (the whole answer has so long, however it drips), `http_status`,
    `answer_too_large`.
    """
    import httpx

    access = access or Access()
    options = access.client_options(urls, SCRAPE_TIMEOUT_S)
    patience_s = access.timeout_s or SCRAPE_TIMEOUT_S
    client: httpx.AsyncClient
    # A redirect would carry headers, which may be secrets, to wherever it likes.
    async with httpx.AsyncClient(follow_redirects=not access.headers, **options) as client:

        async def fetch(url: str) -> str:
            content = bytearray()
            try:
                async with (
                    asyncio.timeout(patience_s),
                    client.stream("GET", url, headers={"accept": "text/plain;version=0.0.4;q=1,*/*;q=0.1"}) as answer,
                ):
                    if answer.status_code == 200:
                        async for part in answer.aiter_bytes():
                            content += part
                            if len(content) > MAX_PAGE_BYTES:
                                raise TuningError(
                                    "answer_too_large",
                                    f"{without_secrets(url)}: a page of more than {MAX_PAGE_BYTES // 2**20} MiB",
                                    "Check the address; metrics are usually at /metrics.",
                                )
            except (TimeoutError, httpx.TimeoutException):
                raise TuningError(
                    "timeout",
                    f"{without_secrets(url)}: no whole answer within {patience_s:g} s",
                    "Check that the target is up and reachable, or give a longer --timeout.",
                ) from None
            # A redirect may lead to what is no address.
            except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
                said = str(error) or type(error).__name__
                raise TuningError(
                    "unreachable",
                    f"{without_secrets(url)}: {said}",
                    connection_hint(said, "Check that the target is up and reachable."),
                ) from None
            if answer.status_code != 200:
                raise TuningError(
                    "http_status",
                    f"{without_secrets(url)}: HTTP {answer.status_code}",
                    access.login_hint()
                    if answer.status_code in (401, 403)
                    else "Check the address; metrics are usually at /metrics.",
                )
            # Both formats are UTF-8, whatever a header says.
            return content.decode("utf-8", "replace")

        yield fetch


async def scrape_rounds(
    targets: dict[str, str],
    clock: Clock,
    interval_s: float,
    stop: asyncio.Event,
    sink: Sink,
    fetch: Fetch,
    *,
    duration_s: float | None = None,
    complain: Complain | None = None,
) -> Recording:
    """Scrape all targets every `interval_s` seconds of `clock` until `stop` is set or `duration_s` have passed.

    The last round is taken at the end, whatever ends it, so that nothing that was counted is lost; a stop gives it
    `LAST_S`. A target that does not answer misses rounds, the others do not. A failed scrape is
    counted and the round goes on; a first round in which no target answers raises that TuningError, and so does one in
    which a target shows anything but metrics of kvtune or vLLM. Later such a page is a failed scrape. Sink errors are
    raised.
    """
    if not interval_s > 0:
        raise UsageError("bad_interval", f"interval must be positive, got {interval_s}", "Give e.g. --interval 5s")
    done = Recording()
    known: set[str] = set()
    strangers: list[TuningError] = []

    def failed(name: str, error: TuningError) -> None:
        done.failures[name] = done.failures.get(name, 0) + 1
        done.last_failure[name] = error.message
        if done.rounds > 1 and complain is not None:
            complain(error.message)

    async def one(name: str, url: str) -> TuningError | None:
        try:
            text = await fetch(url)
            # Stamped on arrival: the counters are no older than that.
            arrived = clock.unix()
            try:
                check_known(text, without_secrets(url), thoroughly=name not in known)
            except TuningError as error:
                strangers.append(error)
                raise
        except TuningError as error:
            failed(name, error)
            return error
        known.add(name)
        sink(arrived, name, text)
        done.snapshots += 1
        return None

    async def ended() -> list[TuningError]:
        """Errors of the scrapes that are under way, once they are through or there is no time left for them."""
        await _through(under_way.values(), stop)
        errors = []
        for name, task in under_way.items():
            if task.done():
                error = task.result()
            else:
                task.cancel()
                error = TuningError(
                    "timeout", f"{without_secrets(targets[name])}: no whole answer before the end", "Is it overloaded?"
                )
                failed(name, error)
            errors += [error] if error is not None else []
        return errors

    began = clock.now()
    last = False
    under_way: dict[str, asyncio.Task[TuningError | None]] = {}
    try:
        while True:
            # A target that has not answered yet misses this round, and holds up nobody else.
            for name, task in tuple(under_way.items()):
                if task.done():
                    task.result()
                    del under_way[name]
            done.rounds += 1
            for name, url in targets.items():
                if name not in under_way:
                    under_way[name] = asyncio.create_task(one(name, url))
            if done.rounds == 1:
                errors = await ended()
                if strangers:
                    raise strangers[0]
                if len(errors) == len(targets):
                    raise errors[0]
                for error in errors:
                    if complain is not None:
                        complain(error.message)
            elapsed = clock.now() - began
            if last or stop.is_set() or (duration_s is not None and elapsed >= duration_s):
                if done.rounds > 1:
                    await ended()
                return done
            # Rounds stay on the grid of the first; one that is late is skipped, not caught up.
            due = (int(elapsed / interval_s) + 1) * interval_s
            if duration_s is not None and due >= duration_s:
                due, last = duration_s, True
            last |= await _slept_or_stopped(clock, due - elapsed, stop, under_way.values())
    finally:
        for task in under_way.values():
            task.cancel()
        await asyncio.gather(*under_way.values(), return_exceptions=True)


async def _through(scrapes: Collection[asyncio.Task[TuningError | None]], stop: asyncio.Event) -> None:
    """Wait until all are done; once `stop` is set, only a little longer. Raises what one of them raised."""
    waiting: set[asyncio.Future[Any]] = set(scrapes)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        while waiting and not stopping.done():
            finished, _ = await asyncio.wait({*waiting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            waiting -= finished
        if waiting:
            await asyncio.wait(waiting, timeout=LAST_S)
    finally:
        stopping.cancel()
        await asyncio.gather(stopping, return_exceptions=True)
    for scrape in scrapes:
        if scrape.done():
            scrape.result()


async def _slept_or_stopped(
    clock: Clock, seconds: float, stop: asyncio.Event, scrapes: Collection[asyncio.Task[TuningError | None]]
) -> bool:
    """Whether `stop` was set before `seconds` had passed. Raises what a scrape under way raises meanwhile."""
    sleeping = asyncio.ensure_future(clock.sleep(seconds))
    stopping = asyncio.ensure_future(stop.wait())
    waiting: set[asyncio.Future[Any]] = {sleeping, stopping, *scrapes}
    try:
        while not (sleeping.done() or stopping.done()):
            finished, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for scrape in finished - {sleeping, stopping}:
                scrape.result()
    finally:
        for task in (sleeping, stopping):
            task.cancel()
        await asyncio.gather(sleeping, stopping, return_exceptions=True)
    return stop.is_set()


async def record(
    targets: Sequence[str],
    directory: str | os.PathLike[str],
    clock: Clock,
    interval_s: float,
    stop: asyncio.Event,
    *,
    duration_s: float | None = None,
    fetch: Fetch | None = None,
    access: Access | None = None,
    complain: Complain | None = None,
) -> Recording:
    """Write snapshots of `targets` (addresses) into `directory` until `stop` is set or `duration_s` have passed.

    Times and intervals are `clock`'s, so that a recording of a scaled simulation is in model time. Raises UsageError
    where `access` cannot be used, before anything is written, and TuningError where the directory cannot be written or
    no target answers the first time.
    """
    named = names_of(targets)
    async with contextlib.AsyncExitStack() as stack:
        use = fetch if fetch is not None else await stack.enter_async_context(http_fetch(targets, access))
        writer = SnapshotWriter(directory)

        def sink(unix_s: float, target: str, text: str) -> None:
            writer.write(unix_s, target, text)

        return await scrape_rounds(named, clock, interval_s, stop, sink, use, duration_s=duration_s, complain=complain)
