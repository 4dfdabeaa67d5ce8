"""Engines as processes: start, port in use, three turns between two of them in model time, restart, stop."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import aiohttp
import pytest

from kvtune_bench import tokens
from kvtune_bench.engine import EngineConfig
from kvtune_bench.engine_process import EngineProcess, engine_process
from kvtune_bench.process import ProcessError
from kvtune_connector import wire
from kvtune_telemetry.clock import ScaledClock
from kvtune_telemetry.vocabulary import Role

MODEL = "qwen3-32b"


async def ask(client: aiohttp.ClientSession, url: str, messages: list[dict[str, Any]], count: int, params: Any) -> Any:
    body = {"model": MODEL, "messages": messages, "max_tokens": count, "kv_transfer_params": params}
    async with client.post(url + "/v1/chat/completions", json=body) as reply:
        assert reply.status == 200, await reply.text()
        return await reply.json()


async def test_three_turns_between_processes_and_a_restart() -> None:
    scale = ScaledClock.starting_now(50).spec()
    common: dict[str, Any] = {"time_scale": scale, "noise": 0.05}
    async with (
        engine_process(EngineConfig(role=Role.PREFILL, prefix_caching=False, **common)) as prefill,
        engine_process(EngineConfig(role=Role.DECODE, **common)) as decode,
        aiohttp.ClientSession() as client,
    ):
        messages: list[dict[str, Any]] = [{"role": "user", "content": "begin " * 300}]
        reference: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
        held = 0
        for _ in range(3):
            params = (await ask(client, prefill.url, messages, 1, reference))["kv_transfer_params"]
            report = wire.read_report(params)
            assert report is not None and report.fetched_tokens == held
            reply = await ask(client, decode.url, messages, 40, params)
            text = reply["choices"][0]["message"]["content"]
            assert text == tokens.expected_answer(tokens.render_chat(messages), 40)
            reference = reply["kv_transfer_params"]
            held = reference["remote_num_tokens"]
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on " * 50}]
        for url in (prefill.url, decode.url):
            async with client.get(url + "/sim/state") as answer:
                assert set((await answer.json())["violations"].values()) == {0}
        await decode.kill()
        port = reference["remote_port"]
        async with engine_process(EngineConfig(role=Role.DECODE, side_channel_port=port, **common)):
            params = (await ask(client, prefill.url, messages, 1, reference))["kv_transfer_params"]
            report = wire.read_report(params)
            assert report is not None and (report.decision, report.reason) == ("recompute", "engine_gone")
        assert await prefill.stop() == 0


async def test_a_port_in_use_is_one_line() -> None:
    async with engine_process(EngineConfig(role=Role.DECODE, instant=True)) as running:
        port = int(running.url.rsplit(":", 1)[1])
        config = EngineConfig(role=Role.PREFILL, port=port)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvtune_bench.engine_server", json.dumps(config.as_dict()),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await process.communicate()
        assert (process.returncode, out) == (1, b"")
        lines = err.decode().splitlines()
        assert len(lines) == 1 and f"127.0.0.1:{port}" in lines[0] and "in use" in lines[0]
        with pytest.raises(ProcessError, match="status 1"):
            await EngineProcess.start(config)


async def test_it_stops_with_requests_in_flight() -> None:
    async with aiohttp.ClientSession() as client:
        process = await EngineProcess.start(EngineConfig(role=Role.DECODE))
        messages = [{"role": "user", "content": "begin"}]
        request = asyncio.create_task(ask(client, process.url, messages, 5000, None))
        await asyncio.sleep(0.2)
        assert not request.done()
        assert await process.stop() == 0
        with pytest.raises(aiohttp.ClientError):
            await request
