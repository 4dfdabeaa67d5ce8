"""Real processes: a decode engine is killed in the middle of a run, and the command line says what is wrong."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections import Counter
from pathlib import Path

import aiohttp
import orjson
import pytest

from kvtune_bench.load import LoadSettings, TurnRecord, replay, simulated_answer
from kvtune_bench.process import ChildProcess, ProcessError
from kvtune_bench.traces import load_trace, plan
from kvtune_telemetry.clock import ScaledClock

KVTUNE = (sys.executable, "-m", "kvtune_cli")


async def start(name: str, logs: Path, *arguments: str) -> ChildProcess:
    return await ChildProcess.start(name, [*KVTUNE, *arguments], logs / f"{name}.log")


def counted(text: str, name: str) -> dict[str, float]:
    found = {}
    for line in text.splitlines():
        if line.startswith(name + "{"):
            labels, value = line.rsplit(" ", 1)
            if float(value):
                found[labels.removeprefix(name)] = float(value)
    return found


async def test_kill_minus_nine_of_one_of_two_decodes(tmp_path: Path) -> None:
    clock = ScaledClock.starting_now(60.0)
    scale = ("--time-scale", clock.spec())
    children: list[ChildProcess] = []
    try:
        engine = ("bench", "engine", "--noise", "0", *scale)
        for name in ("prefill", "decode-1", "decode-2"):
            children.append(await start(name, tmp_path, *engine, "--role", name.split("-")[0]))
        urls = [child.ready.split()[1] for child in children]
        router = await start(
            "router", tmp_path, "router", "--port", "0", "--metrics-port", "0", "--outcome-header", *scale,
            "--prefill", urls[0], "--decode", urls[1], "--decode", urls[2], "--log-format", "json",
        )  # fmt: skip
        children.append(router)
        announced = orjson.loads(router.ready)
        plans = plan(load_trace(), context_limit=20_000)
        settings = LoadSettings(
            base_url=announced["ready"], model="qwen3-32b", concurrency=30, duration_s=600.0, ramp_s=60.0, seed=3
        )
        turns: list[TurnRecord] = []
        playing = asyncio.create_task(
            replay(plans, settings, clock=clock, on_turn=turns.append, expect=simulated_answer)
        )
        while len(turns) < 120:
            await asyncio.sleep(0.02)
            assert not playing.done()
        await children[1].kill()
        await playing
        async with aiohttp.ClientSession() as session:
            async with session.get(announced["metrics"]) as answer:
                metrics = await answer.text()
            for url in (urls[0], urls[2]):
                async with session.get(url + "/sim/state") as answer:
                    assert not any(orjson.loads(await answer.read())["violations"].values())
    finally:
        statuses = [await child.stop() for child in reversed(children)]
    failed = [turn for turn in turns if not turn.answered]
    assert not failed, failed[:3]
    assert all(turn.correct for turn in turns), "answers are the engine's own, whoever gave them"
    outcomes = Counter(turn.outcome for turn in turns)
    assert outcomes["engine_gone"] > 0 and outcomes["hit"] > 100
    booked = counted(metrics, "kvtune_turns_total")
    assert sum(booked.values()) == len(turns)
    assert booked['{outcome="engine_gone"}'] >= outcomes["engine_gone"]
    assert sum(counted(metrics, "kvtune_references_ended_total").values()) + next(
        float(line.split()[1]) for line in metrics.splitlines() if line.startswith("kvtune_references ")
    ) == next(float(line.split()[1]) for line in metrics.splitlines() if line.startswith("kvtune_references_received"))
    assert statuses == [0, 0, -9, 0], "all that were asked to stop did so"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("router",), "no decode engine: give at least one --decode URL"),
        (("router", "--decode", "h:1"), "no prefill engine: give at least one --prefill URL"),
        (("router", "--prefill", "h:1", "--decode", "h:99999"), "the port is not a number from 1 to 65535"),
        (("router", "--prefill", "h:1", "--decode", "h:2", "--ttl", "5"), "ttl = 5.0: it must exceed the margin"),
        (("router", "--prefill", "h:1", "--decode", "h:2", "--log-level", "loud"), "log level 'LOUD' is not one of"),
        (("router", "--config", "/nowhere.yaml"), "cannot read /nowhere.yaml"),
        (("router", "--port", "x"), "--port"),
        (("bench", "engine", "--role", "prefill", "--model", "gpt-9"), "gpt-9"),
        (("demo", "--trace", "/nowhere.csv"), "/nowhere.csv"),
        (("demo", "--model", "gpt-9"), "gpt-9"),
        (("demo", "--conversations", "0"), "--conversations must be at least 1"),
        (("demo", "--json", "/nowhere/x.json"), "there is no directory /nowhere"),
        (("metrics", "--format", "xml"), "xml"),
        (("nonsense",), "nonsense"),
    ],
)
async def test_bad_command_lines_end_with_one_clear_message(arguments: tuple[str, ...], says: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *KVTUNE, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode in (1, 2)
    assert says in " ".join(err.decode().split()), err.decode()
    assert b"Traceback" not in err and out == b""


async def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for arguments in (
            ("router", "--prefill", "h:1", "--decode", "h:2", "--metrics-port", "0", "--port", str(port)),
            ("bench", "engine", "--role", "decode", "--port", str(port)),
        ):
            with pytest.raises(ProcessError, match=rf"(?s)stopped with status 1.*{port}") as caught:
                await start("child", tmp_path, *arguments)
            assert "Traceback" not in str(caught.value)
