"""A live kvtune system to look at: simulated engines, the real router, recorded conversations, a real Prometheus.

    python dashboards/preview/live.py --minutes 15 --pictures build/preview

All of it runs as processes of its own, on loopback, in real time, and is gone when this ends (Ctrl-C ends it early).
The first line on stdout is a JSON object with the addresses; progress goes to stderr. `--pictures DIR` draws every
dashboard of `dashboards/grafana` at the end. `--hold` keeps Prometheus answering until Ctrl-C.

So that a quarter of an hour shows something of everything, pauses between turns are `--haste` times shorter than they
were recorded, and the TTL with them; in the middle a decode engine restarts, later some KV reads fail for a while.
`--calm` leaves both out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from kvtune_bench.load import LoadSettings, TurnRecord, replay, simulated_answer
from kvtune_bench.process import ChildProcess, ProcessError, free_port
from kvtune_bench.traces import Plan, load_trace, plan
from kvtune_telemetry.clock import SystemClock

HERE = Path(__file__).resolve().parent
DASHBOARDS = HERE.parent / "grafana"
RULES = HERE.parent / "prometheus"
KVTUNE = (sys.executable, "-m", "kvtune_cli")
CONTEXT = 131_072
"""Tokens; of the calibration's model."""
LONGEST_ANSWER = 250
"""Tokens; longer answers are cut, so that a conversation has more turns in the time there is."""
RESTART_AT = 0.45
"""Of the time played: a decode engine stops and comes back."""
RESTART_GAP_S = 8.0
FAILING = (0.65, 0.75)
"""Of the time played: some KV reads fail."""
FAILING_SHARE = 0.25
SEED = 7


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; ends with status 2 where it makes no sense."""
    parser = argparse.ArgumentParser(
        prog="live.py",
        description="Run simulated engines, the router, recorded conversations and Prometheus on loopback.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--minutes", type=float, default=15.0, help="of traffic")
    add("--prefill", type=int, default=1, help="prefill engines")
    add("--decode", type=int, default=2, help="decode engines")
    add("--conversations", type=int, default=14, help="conversations at once")
    add("--haste", type=float, default=6.0, help="recorded pauses are divided by it")
    add("--ttl", type=float, default=60.0, help="decoder_kv_blocks_ttl, seconds")
    add("--threshold", type=int, default=64, help="kv_recompute_threshold, tokens")
    add("--pool-tokens", type=int, default=2_000_000, help="KV pool of an engine")
    add("--holdout", type=float, default=0.1, help="share of conversations served without reuse")
    add("--explore", type=float, default=0.05, help="share of references near the threshold sent the other way")
    add("--model", default="qwen3-32b", help="calibration of the simulated engines")
    add("--scrape", type=float, default=5.0, help="scrape and evaluation interval, seconds")
    add("--port", type=int, default=0, help="of Prometheus; 0 takes any free one")
    add("--rules", type=Path, default=RULES, help="directory with Prometheus rule files (*.yaml)")
    add("--calm", action="store_true", help="nothing restarts or fails")
    add("--hold", action="store_true", help="keep Prometheus answering after the traffic, until Ctrl-C")
    add("--pictures", type=Path, help="draw every dashboard into this directory at the end")
    settings = parser.parse_args(argv)
    for name in ("minutes", "prefill", "decode", "conversations", "haste", "ttl", "scrape"):
        if not getattr(settings, name) > 0:
            parser.error(f"--{name} must be positive, got {getattr(settings, name)}")
    if settings.pool_tokens < 2 * CONTEXT:
        parser.error(f"--pool-tokens must be at least {2 * CONTEXT}: an engine must hold two whole contexts")
    return settings


def plans(haste: float) -> list[Plan]:
    """The packaged conversations, fitted to the model, their pauses shortened."""
    found = []
    for one in plan(load_trace(None), context_limit=CONTEXT):
        turns = tuple(
            replace(
                turn,
                gap_s=None if turn.gap_s is None else turn.gap_s / haste,
                output_tokens=min(turn.output_tokens, LONGEST_ANSWER),
            )
            for turn in one.turns
        )
        found.append(Plan(one.id, turns))
    return found


def rule_files(directory: Path) -> list[Path]:
    """The Prometheus rule files of a directory; other YAML (a PrometheusRule resource) is left out."""
    found = []
    for path in sorted(directory.glob("*.yaml")):
        document = yaml.safe_load(path.read_text())
        if isinstance(document, dict) and set(document) == {"groups"}:
            found.append(path.resolve())
    return found


def say(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)


@dataclass
class Live:
    """What runs."""

    settings: argparse.Namespace
    home: Path
    stack: AsyncExitStack
    session: aiohttp.ClientSession
    engines: dict[str, tuple[ChildProcess, str]] = field(default_factory=dict)
    """Process and URL by name (`decode-0`)."""
    router: str = ""
    prometheus: str = ""
    turns: Counter[str] = field(default_factory=Counter)
    ended: float = 0.0
    """When the traffic ended, unix seconds; what was under way then is still answered."""

    async def child(self, name: str, *command: str) -> ChildProcess:
        """Start a kvtune command; it ends with the stack."""
        started = await ChildProcess.start(name, [*KVTUNE, *command], self.home / f"{name}.log")
        self.stack.push_async_callback(started.stop)
        return started

    async def engine(self, name: str, port: int = 0) -> None:
        """Start a simulated engine, its role before the dash of its name."""
        s, role = self.settings, name.split("-")[0]
        child = await self.child(
            name, "bench", "engine", "--role", role, "--model", s.model, "--ttl", f"{s.ttl:g}",
            "--threshold", f"{s.threshold}", "--pool-tokens", f"{s.pool_tokens}", "--port", f"{port}",
            "--seed", f"{SEED + len(self.engines)}",
            # Without a prefix cache of its own prefill reads every history back, as where P is shared by many.
            "--prefix-caching" if role == "decode" else "--no-prefix-caching",
        )  # fmt: skip
        self.engines[name] = (child, child.ready.split()[1])

    async def start(self) -> None:
        """Start engines, router, Prometheus and `kvtune suggest --watch`; all of them answer when this returns."""
        s = self.settings
        names = [f"prefill-{k}" for k in range(s.prefill)] + [f"decode-{k}" for k in range(s.decode)]
        for name in names:
            await self.engine(name)
        urls = [part for name, (_, url) in self.engines.items() for part in (f"--{name.split('-')[0]}", url)]
        router = await self.child(
            "router", "router", "--port", "0", "--metrics-port", "0", "--outcome-header", "--log-format", "json",
            "--ttl", f"{s.ttl:g}", "--holdout", f"{s.holdout:g}", "--explore", f"{s.explore:g}",
            "--identity-key", f"preview-{SEED}", *urls,
        )  # fmt: skip
        announced = json.loads(router.ready)
        self.router = announced["ready"]
        targets: dict[str, list[str]] = {"router": [announced["metrics"]], "prefill": [], "decode": []}
        for name, (_, url) in self.engines.items():
            targets[name.split("-")[0]].append(f"{url}/metrics")
        port = free_port()
        targets["suggest"] = [f"http://127.0.0.1:{port}/metrics"]
        await self._prometheus(targets)
        # It asks Prometheus for advice, and Prometheus scrapes what it got.
        await self.child(
            "suggest", "suggest", "--prometheus", self.prometheus, "--watch", "--every", "60s", "--port", f"{port}",
            "--window", f"{max(2, math.ceil(s.minutes))}m", "--log-format", "json",
        )  # fmt: skip

    async def _prometheus(self, targets: dict[str, list[str]]) -> None:
        program = shutil.which("prometheus")
        if program is None:
            raise ProcessError("no `prometheus` on PATH; install it (Debian: apt-get install prometheus)")
        rules = rule_files(self.settings.rules)
        every = f"{max(1, round(self.settings.scrape))}s"
        config = {
            "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
            "rule_files": [str(path) for path in rules],
            "scrape_configs": [
                {"job_name": f"kvtune-{job}", "static_configs": [{"targets": [_netloc(url) for url in urls]}]}
                for job, urls in targets.items()
            ],
        }
        (self.home / "prometheus.yml").write_text(yaml.safe_dump(config))
        port = self.settings.port or free_port()
        log = self.home / "prometheus.log"
        # Prometheus prints nothing on stdout; the shell does so in its stead, and becomes it.
        child = await ChildProcess.start(
            "prometheus",
            [
                "sh", "-c", 'echo started; exec "$@"', "sh", program, f"--config.file={self.home / 'prometheus.yml'}",
                f"--storage.tsdb.path={self.home / 'data'}", f"--web.listen-address=127.0.0.1:{port}",
                "--enable-feature=exemplar-storage",
            ],
            log,
        )  # fmt: skip
        self.stack.push_async_callback(child.stop)
        self.prometheus = f"http://127.0.0.1:{port}"
        say(f"{len(rules)} rule files from {self.settings.rules}")
        for _ in range(300):
            if child.returncode is not None:
                raise ProcessError(f"prometheus stopped with status {child.returncode}:\n{log.read_text()}")
            with contextlib.suppress(aiohttp.ClientError):
                async with self.session.get(f"{self.prometheus}/-/ready") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.1)
        raise ProcessError(f"prometheus was not ready within 30 s; see {log}")

    async def play(self) -> None:
        """Traffic for the time asked for, with what happens during it."""
        s = self.settings
        seconds = 60 * s.minutes
        # Counters are scraped at zero first, or the first increments are lost.
        await asyncio.sleep(2 * s.scrape)
        load = LoadSettings(
            base_url=self.router, model=s.model, concurrency=s.conversations, duration_s=seconds,
            ramp_s=min(30.0, seconds / 6), seed=SEED, park_after_s=s.ttl, run="preview", drain_s=30.0,
        )  # fmt: skip
        began = time.monotonic()
        self.ended = time.time() + seconds
        events: list[asyncio.Task[Any]] = [asyncio.create_task(self._tell(began))]
        if not s.calm:
            events += [
                asyncio.create_task(self._after(RESTART_AT * seconds, self.restart)),
                asyncio.create_task(self._after(FAILING[0] * seconds, lambda: self.failing(FAILING_SHARE))),
                asyncio.create_task(self._after(FAILING[1] * seconds, lambda: self.failing(0.0))),
            ]
        try:
            playing = asyncio.create_task(
                replay(plans(s.haste), load, clock=SystemClock(), on_turn=self._turn, expect=simulated_answer)
            )
            events.append(playing)
            await playing
        finally:
            for task in events:
                task.cancel()
            await asyncio.gather(*events, return_exceptions=True)
        await asyncio.sleep(2 * s.scrape)

    def _turn(self, record: TurnRecord) -> None:
        self.turns["wrong" if record.correct is False else record.outcome or "failed"] += 1

    async def _tell(self, began: float) -> None:
        while True:
            await asyncio.sleep(15)
            outcomes = ", ".join(f"{name} {count}" for name, count in self.turns.most_common())
            say(f"{time.monotonic() - began:4.0f} s  {outcomes}")

    async def _after(self, seconds: float, act: Callable[[], Awaitable[None]]) -> None:
        await asyncio.sleep(seconds)
        await act()

    async def restart(self) -> None:
        """The last decode engine stops and comes back at its address, with nothing of what it held."""
        name = f"decode-{self.settings.decode - 1}"
        child, url = self.engines[name]
        say(f"{name} restarts")
        await child.stop()
        await asyncio.sleep(RESTART_GAP_S)
        await self.engine(name, int(url.rsplit(":", 1)[1]))

    async def failing(self, share: float) -> None:
        """Let this share of prefill's KV reads fail."""
        say(f"{share:.0%} of KV reads fail")
        for name, (_, url) in self.engines.items():
            if name.startswith("prefill"):
                async with self.session.post(f"{url}/sim/faults", json={"fail_reads_rate": share}) as answer:
                    answer.raise_for_status()

    async def pictures(self, directory: Path) -> int:
        """Draw every dashboard as it was when the traffic ended; the number that failed."""
        await asyncio.to_thread(directory.mkdir, parents=True, exist_ok=True)
        shown = 60 * max(5.0, self.settings.minutes)
        start, end = (
            datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds") for at in (self.ended - shown, self.ended)
        )
        failed = 0
        for board in sorted(DASHBOARDS.glob("*.json")):
            out = directory / f"dashboard-{board.stem.removeprefix('kvtune-')}.png"
            process = await asyncio.create_subprocess_exec(
                "node", str(HERE / "shot.mjs"), "--dashboard", str(board), "--prometheus", self.prometheus,
                "--out", str(out), "--from", start, "--to", end, "--scrape", f"{self.settings.scrape:g}",
                stdout=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
            failed += await process.wait() != 0
        return failed


def _netloc(url: str) -> str:
    return url.split("://", 1)[1].split("/", 1)[0]


async def run(settings: argparse.Namespace) -> int:
    """Everything; the exit status."""
    async with AsyncExitStack() as stack:
        home = Path(tempfile.mkdtemp(prefix="kvtune-preview-"))
        stack.callback(shutil.rmtree, home, ignore_errors=True)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        live = Live(settings, home, stack, session)
        await live.start()
        addresses: dict[str, Any] = {"prometheus": live.prometheus, "router": live.router}
        addresses["engines"] = {name: url for name, (_, url) in live.engines.items()}
        print(json.dumps(addresses), flush=True)
        say(f"Prometheus: {live.prometheus}  traffic for {settings.minutes:g} minutes; Ctrl-C ends it")
        await live.play()
        say(f"played: {dict(live.turns)}")
        status = 0
        if live.turns["wrong"]:
            say(f"{live.turns['wrong']} answers were not the expected ones")
            status = 1
        if settings.pictures is not None and await live.pictures(settings.pictures):
            status = 1
        if settings.hold:
            say(f"Prometheus answers at {live.prometheus} until Ctrl-C")
            await asyncio.Event().wait()
        return status


def main(argv: list[str] | None = None) -> int:
    """Run to the end, or to Ctrl-C or SIGTERM; the exit status."""
    settings = arguments(argv)

    async def guarded() -> int:
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(run(settings))
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        try:
            return await task
        except asyncio.CancelledError:
            return 0

    try:
        return asyncio.run(guarded())
    except ProcessError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
