"""A small world with a known gap distribution and known cost lines, exposed through the real recorders."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from loguru import logger
from prometheus_client import CollectorRegistry, generate_latest

from kvtune_connector.policy import EXPLORE_FACTOR
from kvtune_telemetry import events as ev
from kvtune_telemetry.recorder import ConnectorRecorder, RouterRecorder
from kvtune_telemetry.vocabulary import Decision, Direction, End, Outcome, Reason, Role
from kvtune_tuning.names import NEEDED


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Golden worlds book thousands of turns; their log lines say nothing here."""
    logger.disable("kvtune_telemetry")
    yield
    logger.enable("kvtune_telemetry")


T0 = 1_700_000_000.0


def agent_gap(rng: random.Random) -> float | None:
    """Tool pauses of seconds, human ones of minutes; some conversations end."""
    u = rng.random()
    if u < 0.02:
        return None
    if u < 0.85:
        return rng.lognormvariate(math.log(8.5), 0.8)
    return rng.lognormvariate(math.log(120.0), 1.2)


def chat_gap(rng: random.Random) -> float | None:
    """Two thirds never return; the others after minutes."""
    return None if rng.random() < 0.66 else rng.lognormvariate(math.log(150.0), 0.8)


@dataclass
class World:
    """Known truth. Costs: a fetch takes `alpha + beta n`, a computation `fixed + b n` seconds."""

    ttl: float = 480.0
    threshold: int = 64
    pool: int = 3_500_000
    conversations_per_s: float = 0.02
    warm_conversations: int = 0
    duration: float = 3600.0
    interval: float = 60.0
    prehistory: float = 0.0
    """Seconds the processes ran before the first snapshot."""
    gap: Callable[[random.Random], float | None] = agent_gap
    first_tokens: Callable[[random.Random], float] = lambda rng: rng.uniform(20_000, 60_000)
    growth: Callable[[random.Random], float] = lambda rng: rng.lognormvariate(math.log(700), 1.0)
    active: float = 200_000.0
    alpha: float = 0.0209
    beta: float = 4.55e-6
    fixed: float = 0.0993
    b: float = 26.9e-6
    noise: float = 0.15
    answer: Callable[[random.Random], float] = lambda rng: rng.uniform(60, 500)
    local_hits: bool = False
    """P keeps its own prefix cache: only the answer and what was added is fetchable."""
    reuse: bool = True
    routers: int = 1
    granted: float = 900.0
    restart_at: float | None = None
    """The engines and the routers restart so long after the first snapshot, keeping what they hold."""
    expose_settings: bool = True
    explore: float = 0.0
    """Share of references that prefill is asked to take the other path with, near the threshold."""
    retain: float | None = None
    """What the routers ask decode to retain, which it grants up to its TTL setting."""
    expose_vllm: bool = True
    expose_router: bool = True
    whole_pages: bool = False
    seed: int = 1
    truth: dict[str, float] = field(default_factory=dict)

    def record(self, directory: Path) -> Path:
        """Play the world and write its snapshots; returns the directory."""
        directory.mkdir(parents=True, exist_ok=True)
        rng = random.Random(self.seed)
        self._start()
        queue: list[tuple[float, int, str, dict]] = []
        serial = 0

        def push(when: float, kind: str, data: dict) -> None:
            nonlocal serial
            serial += 1
            heapq.heappush(queue, (when, serial, kind, data))

        begin = T0 - self.prehistory
        when = begin
        while self.conversations_per_s > 0:
            when += rng.expovariate(self.conversations_per_s)
            if when > T0 + self.duration:
                break
            push(when, "arrive", {"router": rng.randrange(self.routers)})
        for k in range(int(self.duration / self.interval) + 1):
            push(T0 + k * self.interval, "scrape", {})
        if self.restart_at is not None:
            push(T0 + self.restart_at, "restart", {})
        self.held: dict[int, tuple[int, float]] = {}
        self.key = 0
        while queue:
            when, _, kind, data = heapq.heappop(queue)
            if kind == "scrape":
                self._scrape(directory, when)
            elif kind == "restart":
                self._start()
                for tokens, _ in self.held.values():
                    self.decode.record(ev.RetentionStarted(tokens, tokens // 16))
            elif kind == "lapse":
                self._end(data["key"], End.LAPSED, when)
            elif kind == "end":
                self._ended(rng, when, data, push)
            else:
                self._turn(rng, when, data, push)
            if when > T0 + self.duration:
                break
        return directory

    def _start(self) -> None:
        self.router_registries = [CollectorRegistry() for _ in range(self.routers)]
        self.router = [RouterRecorder(r, version="t") for r in self.router_registries]
        self.registries = {"p": CollectorRegistry(), "d": CollectorRegistry()}
        self.prefill = ConnectorRecorder(self.registries["p"], model_name="m", engine="p0", role=Role.PREFILL)
        self.decode = ConnectorRecorder(self.registries["d"], model_name="m", engine="d0", role=Role.DECODE)
        if self.expose_settings:
            self.prefill.set_setting("kv_recompute_threshold", self.threshold)
            self.prefill.set_setting("expiry_margin_seconds", 5.0)
            self.decode.set_setting("decoder_kv_blocks_ttl", self.granted if self.retain is not None else self.ttl)
            self.decode.set_setting("max_retain_seconds", self.granted if self.retain is not None else self.ttl)
            self.decode.set_setting("kv_pool_tokens", self.pool)
            for router in self.router:
                router.set_setting("default_ttl_seconds", self.ttl)
                router.set_setting("margin_seconds", 5.0)
                router.set_setting("retain_seconds", self.retain or 0.0)
                router.set_setting("explore_ratio", self.explore)

    def _noisy(self, rng: random.Random, seconds: float) -> float:
        return seconds * rng.lognormvariate(0.0, self.noise)

    def _turn(self, rng: random.Random, when: float, data: dict, push) -> None:
        router = self.router[data["router"]]
        followup = "key" in data
        if followup:
            router.record(ev.TurnReturned(when - data["ended"], data["held"]))
            prompt = data["held"] + int(self.growth(rng))
        else:
            router.record(ev.ConversationSeen())
            prompt = int(self.first_tokens(rng))
        fetched = local = 0
        outcome = Outcome.FIRST
        decision, reason = Decision.RECOMPUTE, Reason.NONE
        ttft = 0.05
        if followup:
            in_time = data["key"] in self.held and when < data["ended"] + self.ttl - 5 and self.reuse
            outcome = Outcome.HIT if in_time else Outcome.EXPIRED
            if self.local_hits:
                local = data["local"]
            if in_time:
                available = data["held"] - local
                near = self.threshold / EXPLORE_FACTOR <= available <= self.threshold * EXPLORE_FACTOR
                explored = near and self.explore > 0 and rng.random() < self.explore
                reason = Reason.EXPLORED if explored else Reason.NONE
                if (available >= self.threshold) != explored:
                    decision, fetched = Decision.FETCH, available
                    wait = self._noisy(rng, self.alpha + self.beta * available)
                    ttft += wait
                    self.prefill.record(ev.KvRead(Direction.D2P, available, available * 1000, wait, wait))
                    self._end(data["key"], End.READ, when)
                else:
                    reason = Reason.EXPLORED if explored else Reason.BELOW_THRESHOLD
                    self._end(data["key"], End.LOCAL_HIT, when)
            else:
                reason = Reason.EXPIRED
        available = 0 if not followup else data["held"] - local
        self.prefill.record(ev.PrefillDecided(decision, reason, prompt, local, fetched, available))
        computed = prompt - local - fetched
        seconds = self._noisy(rng, self.fixed + self.b * computed)
        ttft += seconds
        self.prefill.record(ev.PrefillComputed(computed, seconds))
        router.record(
            ev.TurnEnded(
                outcome=outcome, followup=followup, endpoint="chat", status=200, duration_s=ttft + 5, ttft_s=ttft
            )
        )
        self._count("turns")
        push(when + ttft + 5.0, "end", {"router": data["router"], "prompt": prompt, "answer": int(self.answer(rng))})

    def _ended(self, rng: random.Random, when: float, data: dict, push) -> None:
        held = data["prompt"] + data["answer"]
        self.router[data["router"]].record(ev.TurnCouldReturn(held))
        self.key += 1
        key = self.key
        if self.reuse:
            self.decode.record(ev.RetentionStarted(held, held // 16))
            self.held[key] = (held, when)
            push(when + self.ttl, "lapse", {"key": key})
        gap = self.gap(rng)
        if gap is not None and held < 120_000:
            back = {"router": data["router"], "key": key, "held": held, "ended": when, "local": data["prompt"]}
            push(when + gap, "turn", back)

    def _end(self, key: int, end: End, when: float) -> None:
        if key in self.held:
            tokens, since = self.held.pop(key)
            self.decode.record(ev.RetentionEnded(end, tokens, tokens // 16, when - since))

    def _count(self, name: str) -> None:
        self.truth[name] = self.truth.get(name, 0) + 1

    def _page(self, registry: CollectorRegistry) -> str:
        # the whole page costs ten times as much to render, and the reader skips the rest of it
        return generate_latest(registry if self.whole_pages else registry.restricted_registry(list(NEEDED))).decode()

    def _scrape(self, directory: Path, when: float) -> None:
        retained = sum(t for t, _ in self.held.values())
        demand = retained + self.active
        full = demand > self.pool
        self.truth["retained_max"] = max(self.truth.get("retained_max", 0), retained)
        vllm = (
            f'vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} {min(1.0, demand / self.pool)}\n'
            f'vllm:num_requests_waiting{{engine="0",model_name="m"}} {3.0 if full else 0.0}\n'
            f'vllm:num_preemptions_total{{engine="0",model_name="m"}} 0.0\n'
        )
        pages = {
            "p": self._page(self.registries["p"]),
            "d": self._page(self.registries["d"]),
        }
        if self.expose_vllm:
            pages["d"] += vllm
        if self.expose_router:
            for k, registry in enumerate(self.router_registries):
                pages[f"router{k}"] = self._page(registry)
        for name, text in pages.items():
            (directory / f"{round(when * 1000)}-{name}.prom").write_text(text)


@pytest.fixture(scope="session")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Snapshots of a world; each distinct one is played once a session. Read only."""
    made: dict[str, Path] = {}

    def of(**parameters: object) -> Path:
        key = repr(sorted(parameters.items(), key=lambda item: item[0]))
        if key not in made:
            made[key] = World(**parameters).record(tmp_path_factory.mktemp("world"))  # type: ignore[arg-type]
        return made[key]

    return of


@pytest.fixture(scope="session")
def gaps() -> dict[str, Callable[[random.Random], float | None]]:
    """Named gap distributions, for worlds."""
    return {"agent": agent_gap, "chat": chat_gap}


@pytest.fixture(scope="session")
def small_answers() -> dict[str, object]:
    """Parameters of a world in which fetchable histories of 30 to 8,000 tokens occur."""
    return SMALL


SMALL: dict[str, object] = {
    "local_hits": True,
    "pool": 20_000_000,
    "interval": 120.0,
    "answer": lambda rng: math.exp(rng.uniform(math.log(30), math.log(8000))),
    "growth": lambda rng: rng.lognormvariate(math.log(500), 1.2),
    "first_tokens": lambda rng: rng.uniform(500, 30000),
}
