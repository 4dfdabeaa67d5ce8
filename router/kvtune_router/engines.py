"""The engines behind the router: which are up, how busy they are, and which incarnation each one is."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import aiohttp

from kvtune_telemetry import events
from kvtune_telemetry.vocabulary import Role

PROBE_INTERVAL_S = 1.0
PROBE_TIMEOUT_S = 2.0
PROBES_TO_FALL = 2
"""Failed probes in a row that take an engine out; a refused request takes it out at once."""


_REMEMBERED_LOST = 256


class EngineAddressError(ValueError):
    """An engine's URL is unusable."""


@dataclass(slots=True, eq=False)
class Engine:
    """One engine."""

    url: str
    role: Role
    label: str
    """host:port as configured: its name in metrics and logs."""
    up: bool | None = None
    """None until the first probe."""
    base: str | None = None
    """What the incarnations of its data-parallel ranks have in common; None when unknown."""
    ranks: dict[str, str] = field(default_factory=dict)
    """The last incarnation seen of each rank."""
    lost: deque[str] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_LOST))
    """Incarnations known to be gone, the latest of them."""
    verifies: bool = False
    """Whether its last answer said what it decided: such a prefill engine reads only what it has proven equal."""
    told: bool = False
    """Whether the log says already that it does not."""
    in_flight: int = 0
    failed_probes: int = 0


def base_and_rank(incarnation: str) -> tuple[str, str]:
    """The engine id without its rank, and the rank. vLLM names data-parallel ranks behind one address `<id>_dp<n>`;
    kvtune's connector adds `:<process>`."""
    engine_id = incarnation.partition(":")[0]
    base, mark, rank = engine_id.rpartition("_dp")
    return (base, rank) if mark and rank.isdigit() else (engine_id, "")


def engine_from_url(url: str, role: Role) -> Engine:
    """An engine at `http(s)://host:port[/prefix]`; raises EngineAddressError that says what is wrong."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError:
        raise EngineAddressError(f"{role.value} engine {url!r}: the port is not a number from 1 to 65535") from None
    if parts.scheme not in ("http", "https"):
        raise EngineAddressError(f"{role.value} engine {url!r}: the scheme must be http or https")
    if not parts.hostname or parts.username or parts.query or parts.fragment:
        raise EngineAddressError(f"{role.value} engine {url!r}: give it as http://HOST:PORT")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    label = f"{host}:{port or (443 if parts.scheme == 'https' else 80)}"
    path = parts.path.rstrip("/")
    if path.endswith("/v1"):
        raise EngineAddressError(f"{role.value} engine {url!r}: leave out /v1, the router adds it")
    return Engine(f"{parts.scheme}://{label}{path}", role, label)


class Fleet:
    """The configured prefill and decode engines."""

    def __init__(
        self, prefill: Sequence[str], decode: Sequence[str], emit: Callable[[events.RouterEvent], None]
    ) -> None:
        """`prefill`, `decode`: URLs; there must be at least one decode engine. Raises EngineAddressError."""
        self.prefill = [engine_from_url(url, Role.PREFILL) for url in prefill]
        self.decode = [engine_from_url(url, Role.DECODE) for url in decode]
        if not self.decode:
            raise EngineAddressError("no decode engine: give at least one --decode URL")
        if not self.prefill:
            raise EngineAddressError("no prefill engine: give at least one --prefill URL")
        for engines in (self.prefill, self.decode):
            urls = [engine.url for engine in engines]
            labels = [engine.label for engine in engines]
            for engine in engines:
                if urls.count(engine.url) > 1:
                    raise EngineAddressError(f"engine {engine.url} is given twice in the same role")
                if labels.count(engine.label) > 1:
                    # Several engines behind one host and port, told apart by their path.
                    engine.label = engine.url.partition("://")[2]
        both = {engine.url for engine in self.prefill} & {engine.url for engine in self.decode}
        if both:
            raise EngineAddressError(f"engine {min(both)} is given as prefill and as decode: it can only be one")
        self._emit = emit
        self._by_label = {engine.label: engine for engine in self.decode}

    def engines(self) -> Iterable[Engine]:
        """All of them."""
        return (*self.prefill, *self.decode)

    def ready(self) -> bool:
        """Whether turns can be served at all."""
        return any(bool(engine.up) for engine in self.decode)

    def pick(self, role: Role, *, prefer: str | None = None, exclude: Iterable[Engine] = ()) -> Engine | None:
        """An engine that is up: the preferred one (by label) if it is, else the least busy; None if none is."""
        engines = self.prefill if role is Role.PREFILL else self.decode
        usable = [engine for engine in engines if engine.up and engine not in exclude]
        for engine in usable:
            if engine.label == prefer:
                return engine
        return min(usable, key=lambda engine: engine.in_flight, default=None)

    def holds(self, label: str, incarnation: str) -> bool:
        """Whether the decode engine `label` can still be that incarnation, as far as the router knows."""
        engine = self._by_label.get(label)
        if engine is None or not engine.up or incarnation in engine.lost:
            return False
        base, rank = base_and_rank(incarnation)
        if engine.base is not None and base != engine.base:
            return False
        return engine.ranks.get(rank, incarnation) == incarnation

    def saw_incarnation(self, engine: Engine, incarnation: str) -> None:
        """An answer of `engine` named the process that gave it."""
        base, rank = base_and_rank(incarnation)
        if incarnation in engine.lost or engine.ranks.get(rank) == incarnation:
            return
        if engine.base is not None and base != engine.base:
            gone = list(engine.ranks.values())
            engine.ranks = {}
        else:
            gone = [engine.ranks[rank]] if rank in engine.ranks else []
        engine.base, engine.ranks[rank] = base, incarnation
        if gone:
            engine.lost.extend(gone)
            self._emit(events.EngineRestarted(engine.label, engine.role))

    def went_down(self, engine: Engine, why: str = "connection refused") -> None:
        """`engine` does not answer."""
        # What comes back may be another build, which proves nothing.
        engine.verifies = False
        if engine.up is not False:
            engine.up = False
            self._emit(events.EngineState(engine.label, engine.role, False, why))

    def came_up(self, engine: Engine) -> None:
        """`engine` answers."""
        engine.failed_probes = 0
        if not engine.up:
            engine.up = True
            self._emit(events.EngineState(engine.label, engine.role, True))

    async def watch(self, session: aiohttp.ClientSession) -> None:
        """Probe every engine until cancelled."""
        while True:
            await asyncio.sleep(PROBE_INTERVAL_S)
            await self.probe(session)

    async def probe(self, session: aiohttp.ClientSession) -> None:
        """Ask every engine's `/health` once."""
        await asyncio.gather(*(self._probe(session, engine) for engine in self.engines()))

    async def _probe(self, session: aiohttp.ClientSession, engine: Engine) -> None:
        try:
            async with session.get(
                f"{engine.url}/health", timeout=aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
            ) as answer:
                why = "" if answer.status < 500 else f"/health says HTTP {answer.status}"
        except TimeoutError:
            why = f"/health gave no answer within {PROBE_TIMEOUT_S:g} s"
        except (aiohttp.ClientError, OSError) as error:
            why = f"{type(error).__name__}: {error}"
        if not why:
            self.came_up(engine)
            return
        engine.failed_probes += 1
        if engine.up is None or engine.failed_probes >= PROBES_TO_FALL:
            self.went_down(engine, why)
