"""What a real deployment would have exposed during a replay: kvtune's own recorders and vLLM's series, scraped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from loguru import logger
from prometheus_client import CollectorRegistry, generate_latest

from kvtune_bench.engine_metrics import ENGINE_INDEX, VllmMetrics
from kvtune_bench.replay.model import HANDOVER_S, Deployment, Setting
from kvtune_connector.policy import EXPIRY_MARGIN_S
from kvtune_connector.settings import ConnectorSettings
from kvtune_telemetry import events
from kvtune_telemetry.recorder import ConnectorRecorder, RouterRecorder
from kvtune_telemetry.vocabulary import Decision, Direction, End, Outcome, Reason, Role
from kvtune_tuning.names import NEEDED
from kvtune_tuning.recording import SnapshotWriter
from kvtune_tuning.series import Collector, SeriesSet

BEGAN_UNIX_S = 1_700_000_000.0
"""When replays begin, by their snapshots; in the past, so that nothing takes them for live."""
_BLOCK_TOKENS = 64
_NEEDED = list(NEEDED)

Sink = Callable[[float, str, CollectorRegistry], None]
"""Takes one target's registry at a time (Unix s)."""


class ObservedDeployment:
    """Books what a replay reports, as router and engines would, and hands the registries to a sink at every tick.

    `stock`: neither router nor connector are kvtune's, so that only vLLM's series are there; each transfer counts once
    a tensor-parallel rank, as there.
    """

    def __init__(
        self, deployment: Deployment, setting: Setting, sink: Sink, *, stock: bool = False, ranks: int = 1
    ) -> None:
        self._sink, self._calibration = sink, deployment.calibration
        self._usage = self._waiting = self._running = 0.0
        model = deployment.calibration.name
        self.registries = {name: CollectorRegistry() for name in ("prefill", "decode")}
        blocks = deployment.pool_tokens // _BLOCK_TOKENS
        self._vllm = {
            role: VllmMetrics(
                registry, model_name=model, tp=ranks, block_size=_BLOCK_TOKENS, gpu_blocks=blocks,
                usage=(lambda: self._usage) if role == "decode" else (lambda: 0.0),
                running=(lambda: self._running) if role == "decode" else (lambda: 0.0),
                waiting=(lambda: self._waiting) if role == "decode" else (lambda: 0.0),
            )
            for role, registry in self.registries.items()
        }  # fmt: skip
        self._router: RouterRecorder | None = None
        self._connectors: dict[str, ConnectorRecorder] = {}
        if stock:
            return
        self.registries["router"] = CollectorRegistry()
        self._router = RouterRecorder(self.registries["router"], version="replay")
        self._router.set_setting("default_ttl_seconds", setting.ttl_s)
        self._router.set_setting("margin_seconds", EXPIRY_MARGIN_S + HANDOVER_S)
        self._router.set_setting("explore_ratio", setting.explore)
        in_force = ConnectorSettings(True, setting.ttl_s, setting.threshold_tokens).in_force(deployment.pool_tokens)
        for role in (Role.PREFILL, Role.DECODE):
            recorder = self._connectors[role.value] = ConnectorRecorder(
                self.registries[role.value], model_name=model, engine=ENGINE_INDEX, role=role, version="replay"
            )
            for name, value in in_force.items():
                recorder.set_setting(name, value)

    def _routed(self, event: events.RouterEvent) -> None:
        if self._router is not None:
            self._router.record(event)

    def _connected(self, role: str, event: events.ConnectorEvent) -> None:
        if self._connectors:
            self._connectors[role].record(event)

    # --- what the replay reports (`simulator.Observer`) -------------------------------------------------------------

    def seen(self) -> None:
        """A conversation's first turn."""
        self._routed(events.ConversationSeen())

    def returned(self, gap_s: float, tokens: int) -> None:
        """A follow-up turn came."""
        self._routed(events.TurnReturned(gap_s, tokens))

    def decided(self, decision: Decision, reason: Reason, prompt: int, local: int, fetched: int, offered: int) -> None:
        """Prefill decided about a history."""
        self._connected("prefill", events.PrefillDecided(decision, reason, prompt, local, fetched, offered))
        self._vllm["prefill"].prompt_tokens.inc(prompt)

    def declined(self) -> None:
        """Prefill refused to read what was about to lapse."""
        self._connected("prefill", events.KvReadDeclined())
        self._vllm["prefill"].expired()

    def read(self, direction: Direction, tokens: int, seconds: float) -> None:
        """A read ended."""
        role = "prefill" if direction is Direction.D2P else "decode"
        size = tokens * self._calibration.bytes_per_token
        self._connected(role, events.KvRead(direction, tokens, size, seconds, seconds))
        blocks = -(-tokens // _BLOCK_TOKENS)
        self._vllm[role].transfer(
            seconds=seconds, size_bytes=size, descriptors=blocks * self._calibration.descriptors_per_block
        )

    def computed(self, tokens: int, seconds: float) -> None:
        """Prefill computed."""
        self._connected("prefill", events.PrefillComputed(tokens, seconds))
        self._vllm["prefill"].prefill.observe(seconds)
        self._vllm["prefill"].prompt_source["local_compute"].inc(tokens)
        self._vllm["prefill"].success["length"].inc()
        self._vllm["prefill"].generation_tokens.inc()

    def served(self, outcome: Outcome, followup: bool, ttft_s: float) -> None:
        """A turn's first token left."""
        self._routed(
            events.TurnEnded(
                outcome=outcome, followup=followup, endpoint="chat", status=200, duration_s=ttft_s, ttft_s=ttft_s
            )
        )
        self._vllm["decode"].ttft.observe(ttft_s)

    def ended(self, prompt: int, output: int) -> None:
        """A turn was answered to its end."""
        self._routed(events.TurnCouldReturn(prompt + output))
        vllm = self._vllm["decode"]
        vllm.success["stop"].inc()
        vllm.prompt_tokens.inc(prompt)
        vllm.generation_tokens.inc(output)

    def retained(self, tokens: int) -> None:
        """Decode keeps a sequence."""
        self._connected("decode", events.RetentionStarted(tokens, -(-tokens // _BLOCK_TOKENS)))

    def released(self, end: End, tokens: int, age_s: float) -> None:
        """A retention is over."""
        self._connected("decode", events.RetentionEnded(end, tokens, -(-tokens // _BLOCK_TOKENS), age_s))
        if end is End.LAPSED:
            self._vllm["decode"].expired()

    def tick(self, now_s: float, usage: float, waiting: int, running: int) -> None:
        """Scrape."""
        self._usage, self._waiting, self._running = usage, float(waiting), float(running)
        for target, registry in self.registries.items():
            self._sink(BEGAN_UNIX_S + now_s, target, registry)


def quiet() -> None:
    """Recorders log a line a turn; a replay has millions of turns."""
    logger.disable("kvtune_telemetry")


def to_directory(directory: Path) -> Sink:
    """A sink that writes snapshots as `kvtune record` does. Raises TuningError where it cannot."""
    writer = SnapshotWriter(directory)

    def sink(unix_s: float, target: str, registry: CollectorRegistry) -> None:
        writer.write(unix_s, target, generate_latest(registry).decode())

    return sink


class InMemory:
    """A sink that keeps what `kvtune suggest` would read."""

    def __init__(self) -> None:
        self._collector = Collector()

    def __call__(self, unix_s: float, target: str, registry: CollectorRegistry) -> None:
        """Take one target's samples."""
        self._collector.scraped(
            target,
            unix_s,
            (
                (sample.name, frozenset(sample.labels.items()), sample.value)
                for family in registry.restricted_registry(_NEEDED).collect()
                for sample in family.samples
            ),
        )

    def series(self) -> SeriesSet:
        """All that was taken."""
        return self._collector.collected()
