"""The demo: engines and router as processes, real conversations through them, then advice from what was scraped."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from dataclasses import replace as replace_turn
from pathlib import Path
from typing import Any

import orjson

from kvtune_bench import figures
from kvtune_bench.calibration import Calibration, calibration, to_dict
from kvtune_bench.demo_progress import Progress, live_progress
from kvtune_bench.load import LoadSettings, TurnRecord, replay, simulated_answer
from kvtune_bench.process import ChildProcess, free_port
from kvtune_bench.traces import Plan, load_trace, plan
from kvtune_bench.vllm_pair import VllmConfig, VllmServer
from kvtune_connector.policy import DEFAULT_THRESHOLD_TOKENS, DEFAULT_TTL_S
from kvtune_telemetry.clock import ScaledClock
from kvtune_tuning import api, recording

SCHEMA = "kvtune.demo/1"
_MARK = ".kvtune-demo"
"""Names a directory as a demo's own."""
SCRAPE_INTERVAL_S = 30.0
"""Model seconds between scrapes."""
_POLL_WALL_S = 1.0
_VLLM_CONTEXT = 2400
_VLLM_HASTE = 20
_VLLM_LONGEST_GAP_S = 8.0
_VLLM_ANSWER_TOKENS = 24
_VLLM_SCRAPE_S = 2.0
SETTLE_S = 2.0
"""Model seconds after the last answer until the books are read: hand-overs finish."""


class DemoError(RuntimeError):
    """The demo could not run; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """What to run. Times in model seconds."""

    engine: str = "sim"
    """sim: simulated engines; vllm: a real pair on this machine's CPUs."""
    vllm_python: str = sys.executable
    """The interpreter that has vLLM, NIXL and kvtune."""
    vllm_model: Path | None = None
    """A model's directory, as bench/scripts/make_tiny_model.py writes one."""
    model: str = "qwen3-32b"
    """A calibration preset or file."""
    prefill: int = 1
    decode: int = 1
    ttl_s: float = DEFAULT_TTL_S
    threshold_tokens: int = DEFAULT_THRESHOLD_TOKENS
    pool_tokens: int | None = None
    """KV pool of each engine; None: the calibration's."""
    prefill_cache: bool = False
    """P's own prefix cache; off as in the published benchmark."""
    conversations: int = 32
    """Conversations at once."""
    duration_s: float = 1500.0
    time_scale: float = 20.0
    """Model seconds in a wall second."""
    holdout: float = 0.2
    """Share of conversations served without reuse, to compare with."""
    seed: int = 1
    trace: Path | None = None
    """Conversations to replay; None: the packaged sample."""

    def __post_init__(self) -> None:
        for name, low in (("prefill", 1), ("decode", 1), ("conversations", 1)):
            if getattr(self, name) < low:
                raise DemoError(f"--{name} must be at least {low}, got {getattr(self, name)}")
        for name in ("duration_s", "time_scale", "ttl_s"):
            if not getattr(self, name) > 0:
                raise DemoError(f"--{name.removesuffix('_s').replace('_', '-')} must be positive")
        if self.engine not in ("sim", "vllm"):
            raise DemoError(f"--engine is sim or vllm, got {self.engine!r}")
        if self.engine == "vllm":
            if self.time_scale != 1:
                raise DemoError("real engines run in real time: --time-scale must be 1 with --engine vllm")
            if self.vllm_model is None or not (self.vllm_model / "config.json").is_file():
                raise DemoError(
                    f"--engine vllm needs --vllm-model DIR with a model, got {self.vllm_model}; "
                    "`make demo-vllm` installs vLLM and makes a small one"
                )
        if not 0 <= self.holdout < 1:
            raise DemoError(f"--holdout is a share from 0 to below 1, got {self.holdout}")


@dataclass(slots=True)
class _Fleet:
    """Base addresses of what was started."""

    prefill: list[str] = field(default_factory=list)
    decode: list[str] = field(default_factory=list)
    router: str = ""
    metrics: str = ""

    def targets(self) -> list[str]:
        return [self.metrics, *(url + "/metrics" for url in (*self.prefill, *self.decode))]


def statement(model: Calibration, settings: DemoSettings) -> str:
    """What is simulated and what is real, in plain words."""
    if settings.engine == "vllm":
        return (
            "The engines are real: vLLM servers with NIXL on this machine's CPUs, no GPU. The model is small and its "
            "weights are random, so its answers mean nothing and its times are this machine's. Recorded conversations "
            f"are cut to {_VLLM_CONTEXT} tokens and their pauses shortened {_VLLM_HASTE} times."
        )
    return (
        f"The engines are simulated: no GPU and no model ran. Their times follow the calibration {model.name}, "
        f"fitted to published measurements. Time is compressed {settings.time_scale:g} times; all seconds are model "
        "seconds, and what the compressed harness itself takes is in them, with reuse on and off alike. The router, "
        "the decisions, the fingerprints, the metrics and the advice are the code that ships."
    )


async def run_demo(settings: DemoSettings, out: Path) -> dict[str, Any]:
    """Run the demo and return its result (`report.render_report` takes it). Leaves snapshots and logs in `out`.

    Raises DemoError, TraceError, CalibrationError, ProcessError. Whatever happens, no process is left behind.
    """
    real = settings.engine == "vllm"
    model = calibration(settings.model)
    pool = settings.pool_tokens if settings.pool_tokens is not None else model.pool_tokens
    if pool < 2 * model.context_tokens:
        raise DemoError(
            f"--pool-tokens {pool}: an engine must hold at least two whole contexts of {model.context_tokens} tokens"
        )
    conversations = load_trace(settings.trace)
    plans = plan(conversations, context_limit=_VLLM_CONTEXT if real else model.context_tokens)
    if real:
        plans = [hurried(one) for one in plans]
    logs, snapshots = out / "logs", out / "snapshots"
    _clear(out, logs, snapshots)
    async with AsyncExitStack() as stack:
        clock = ScaledClock.starting_now(settings.time_scale)
        fleet = await (_start_vllm if real else _start_simulated)(stack, settings, clock, logs)
        await _start_router(stack, settings, fleet, clock, logs)
        began_unix = clock.unix()
        stop_scraping = asyncio.Event()
        scraping = asyncio.create_task(
            recording.record(
                fleet.targets(), snapshots, clock, _VLLM_SCRAPE_S if real else SCRAPE_INTERVAL_S, stop_scraping
            )
        )
        stack.push_async_callback(_cancelled, scraping)
        with live_progress(settings.duration_s, clock) as progress:
            polling = asyncio.create_task(_poll(snapshots, progress))
            stack.push_async_callback(_cancelled, polling)
            records = await _replay(plans, settings, model, fleet, clock, progress, scraping)
            polling.cancel()
        await clock.sleep(SETTLE_S)
        states = [] if real else await _states(fleet)
        stop_scraping.set()
        await scraping
        ended_s = clock.unix() - began_unix
    return _result(settings, model, records, states, snapshots, began_unix, ended_s)


def _clear(out: Path, logs: Path, snapshots: Path) -> None:
    """Make room for a run: remove an earlier demo's files, and nobody else's."""
    mark = out / _MARK
    if not mark.exists() and any(directory.exists() for directory in (logs, snapshots)):
        raise DemoError(f"{out} holds 'logs' or 'snapshots' that no demo wrote; name another directory with --out")
    mark.touch()
    for directory in (logs, snapshots):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)


async def _cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def hurried(one: Plan) -> Plan:
    """A conversation with shorter pauses and answers, for engines that take their own time."""
    turns = tuple(
        replace_turn(
            turn,
            gap_s=None if turn.gap_s is None else min(turn.gap_s / _VLLM_HASTE, _VLLM_LONGEST_GAP_S),
            output_tokens=min(turn.output_tokens, _VLLM_ANSWER_TOKENS),
        )
        for turn in one.turns
    )
    return Plan(one.id, turns)


async def _child(stack: AsyncExitStack, logs: Path, name: str, *arguments: str) -> ChildProcess:
    command = [sys.executable, "-m", "kvtune_cli", *arguments]
    started = await ChildProcess.start(name, command, logs / f"{name}.log")
    stack.push_async_callback(started.stop)
    return started


def _roles(settings: DemoSettings) -> list[str]:
    return ["prefill"] * settings.prefill + ["decode"] * settings.decode


async def _start_vllm(stack: AsyncExitStack, settings: DemoSettings, _: ScaledClock, logs: Path) -> _Fleet:
    assert settings.vllm_model is not None
    fleet, servers = _Fleet(), []
    for number, role in enumerate(_roles(settings)):
        config = VllmConfig(
            role=role, python=settings.vllm_python, model=settings.vllm_model, port=free_port(),
            side_channel_port=free_port(), ttl_s=settings.ttl_s, threshold_tokens=settings.threshold_tokens,
        )  # fmt: skip
        server = await VllmServer.spawn(config, logs / f"{role}-{number}.log")
        stack.push_async_callback(server.stop)
        servers.append(server)
        (fleet.prefill if role == "prefill" else fleet.decode).append(server.url)
    await asyncio.gather(*(server.ready() for server in servers))
    return fleet


async def _start_simulated(stack: AsyncExitStack, settings: DemoSettings, clock: ScaledClock, logs: Path) -> _Fleet:
    fleet = _Fleet()

    async def engine(number: int, role: str) -> ChildProcess:
        return await _child(
            stack, logs, f"{role}-{number}",
            *("bench", "engine", "--role", role, "--model", settings.model, "--time-scale", clock.spec()),
            *("--ttl", f"{settings.ttl_s}", "--threshold", f"{settings.threshold_tokens}"),
            *("--seed", f"{settings.seed * 100 + number}"),
            *(("--pool-tokens", f"{settings.pool_tokens}") if settings.pool_tokens else ()),
            "--prefix-caching" if role == "decode" or settings.prefill_cache else "--no-prefix-caching",
        )  # fmt: skip

    tasks = (engine(number, role) for number, role in enumerate(_roles(settings)))
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
        url = result.ready.split()[1]
        (fleet.prefill if result.name.startswith("prefill") else fleet.decode).append(url)
    return fleet


async def _start_router(
    stack: AsyncExitStack, settings: DemoSettings, fleet: _Fleet, clock: ScaledClock, logs: Path
) -> None:
    router = await _child(
        stack, logs, "router",
        *("router", "--port", "0", "--metrics-port", "0", "--outcome-header"),
        *(() if settings.engine == "vllm" else ("--time-scale", clock.spec())),
        *("--ttl", f"{settings.ttl_s}", "--holdout", f"{settings.holdout}", "--log-format", "json"),
        # Which conversations are held out depends on it; with the seed alone two runs would differ.
        *("--identity-key", f"demo-{settings.seed}"),
        *(part for url in fleet.prefill for part in ("--prefill", url)),
        *(part for url in fleet.decode for part in ("--decode", url)),
    )  # fmt: skip
    announced = orjson.loads(router.ready)
    fleet.router, fleet.metrics = announced["ready"], announced["metrics"]


async def _replay(
    plans: Any,
    settings: DemoSettings,
    model: Calibration,
    fleet: _Fleet,
    clock: ScaledClock,
    progress: Progress,
    scraping: asyncio.Task[Any],
) -> list[TurnRecord]:
    real = settings.engine == "vllm"
    load = LoadSettings(
        base_url=fleet.router,
        model="tiny" if real else model.name,
        extra_body={"ignore_eos": True} if real else {},
        concurrency=settings.conversations,
        duration_s=settings.duration_s,
        ramp_s=min(240.0, settings.duration_s / 4),
        seed=settings.seed,
    )
    expect = None if real else simulated_answer
    playing = asyncio.create_task(replay(plans, load, clock=clock, on_turn=progress.turn, expect=expect))
    try:
        await asyncio.wait({playing, scraping}, return_when=asyncio.FIRST_COMPLETED)
        if not playing.done():
            # Scraping runs until it is told to stop: it can only have failed.
            await scraping
            raise DemoError("scraping stopped before the replay did")
        return await playing
    finally:
        await _cancelled(playing)


async def _poll(snapshots: Path, progress: Progress) -> None:
    """Show the tokens D retains, from the newest snapshots."""
    while True:
        await asyncio.sleep(_POLL_WALL_S)
        progress.retained(await asyncio.to_thread(_retained_now, snapshots))


def _retained_now(snapshots: Path) -> float:
    newest: dict[str, Path] = {}
    for path in sorted(snapshots.glob("*.prom")):
        newest[path.stem.split("-", 1)[1]] = path
    total = 0.0
    for path in newest.values():
        for line in path.read_text().splitlines():
            if line.startswith("kvtune_retained_tokens{") and 'role="decode"' in line:
                total += float(line.rsplit(" ", 1)[1])
    return total


async def _states(fleet: _Fleet) -> list[dict[str, Any]]:
    """What each engine says of itself at the end."""
    import aiohttp

    states = []
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10.0)) as session:
            for url in (*fleet.prefill, *fleet.decode):
                async with session.get(f"{url}/sim/state") as answer:
                    states.append(orjson.loads(await answer.read()))
    except (aiohttp.ClientError, TimeoutError) as error:
        raise DemoError(f"an engine is gone before the end ({type(error).__name__}); see the logs") from None
    return states


def _scrapes(snapshots: Path, began_unix: float) -> list[figures.Scrape]:
    found = []
    for path in sorted(snapshots.glob("*.prom")):
        milliseconds, target = path.stem.split("-", 1)
        found.append(figures.Scrape(int(milliseconds) / 1e3 - began_unix, target, path.read_text()))
    return found


def _result(
    settings: DemoSettings,
    model: Calibration,
    records: list[TurnRecord],
    states: list[dict[str, Any]],
    snapshots: Path,
    began_unix: float,
    ended_s: float,
) -> dict[str, Any]:
    scrapes = _scrapes(snapshots, began_unix)
    summary = figures.summarise(records, scrapes, duration_s=ended_s)
    last = figures.latest(scrapes)
    plain = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(settings).items()}
    return {
        "schema": SCHEMA,
        "simulated": {
            "model": "a random model" if settings.engine == "vllm" else model.name,
            "statement": statement(model, settings),
            **({} if settings.engine == "vllm" else {"calibration": to_dict(model)}),
            "time_scale": settings.time_scale,
        },
        "settings": plain,
        "duration_s": ended_s,
        "turns": [record.as_dict() for record in records],
        "figures": summary,
        "books": books(records, last, states),
        "suggest": api.suggest_snapshots(snapshots),
    }


def books(records: list[TurnRecord], last: list[figures.Series], states: list[dict[str, Any]]) -> dict[str, Any]:
    """Whether what client, router, P and D counted adds up. `last`: the newest exposition of every target."""

    def counted(name: str, **labels: str) -> float:
        return sum(
            value
            for series in last
            for found, value in series.get(name, ())
            if all(found.get(key) == wanted for key, wanted in labels.items())
        )

    outcomes: Counter[str] = Counter()
    for series in last:
        for labels, value in series.get("kvtune_turns_total", ()):
            outcomes[labels["outcome"]] += int(value)
    violations: Counter[str] = Counter()
    for state in states:
        violations.update(state["violations"])
    reads = int(counted("kvtune_kv_reads_total", direction="d2p", role="prefill"))
    released = int(counted("kvtune_retentions_ended_total", end="read", role="decode"))
    received = int(counted("kvtune_references_received_total"))
    ended = int(counted("kvtune_references_ended_total"))
    held = int(counted("kvtune_references"))
    checks: Mapping[str, bool] = {
        "turns sent = turns booked": len(records) == sum(outcomes.values()),
        "turns answered = turns sent": all(record.answered for record in records),
        "every answer is the right one": not any(record.correct is False for record in records),
        "references received = ended + held": received == ended + held,
        "reads at P = reads released at D": reads == released,
        "no reference read twice or late": not any(violations.values()),
    }
    return {
        "turns": len(records),
        "outcomes": dict(sorted(outcomes.items())),
        "reads_at_prefill": reads,
        "reads_released_at_decode": released,
        "references": {"received": received, "ended": ended, "held": held},
        "violations": dict(violations),
        "checks": dict(checks),
        "ok": all(checks.values()),
    }


def default_out() -> Path:
    """Where a demo without `--out` leaves its files: a new directory under the system's temporary one."""
    return Path(tempfile.mkdtemp(prefix="kvtune-demo-"))


def run_to_end(settings: DemoSettings, out: Path) -> dict[str, Any]:
    """`run_demo`, ended cleanly by Ctrl-C or SIGTERM (then KeyboardInterrupt is raised)."""

    async def main() -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(run_demo(settings, out))
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        try:
            return await task
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None

    return asyncio.run(main())
