from __future__ import annotations

import asyncio
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from kvtune_bench.calibration import PRESETS, CalibrationError, Noise, calibration, from_dict, to_dict
from kvtune_bench.engine import EngineConfig, Reference
from kvtune_bench.faults import FaultError, Faults
from kvtune_bench.sidechannel import DeadPeerError, Peer, SideChannelServer
from kvtune_cli.bench import engine
from kvtune_telemetry.vocabulary import Role

# --- calibration ----------------------------------------------------------------------------------------------------


def test_presets_give_the_published_end_points() -> None:
    qwen, glm = PRESETS["qwen3-32b"], PRESETS["glm-5-fp8"]
    assert qwen.prefill.at(24_000) == pytest.approx(0.0993 + 0.6456)
    assert qwen.transfer.at(24_000) == pytest.approx(0.1301)
    assert qwen.prefill.at(2_000) + qwen.handoff.at(2_000) == pytest.approx(0.1016 + 28.2e-6 * 2_000)
    assert glm.prefill.at(20_000) + glm.handoff.at(20_000) == pytest.approx(0.2962 + 101.9e-6 * 20_000)
    assert glm.handoff.at(100) == 0.001
    assert (qwen.bytes_per_token, qwen.pool_tokens, qwen.context_tokens) == (262_144, 3_500_000, 131_072)
    assert qwen.prefill.at(0) == 0.0


def test_the_pull_is_part_of_the_hand_off() -> None:
    for model in PRESETS.values():
        for tokens in (1, 2_000, 100_000):
            assert 0 < model.pull_s(tokens, 100_000) <= model.handoff.at(100_000)


def test_a_calibration_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(to_dict(PRESETS["glm-5-fp8"])))
    assert calibration(str(path)) == PRESETS["glm-5-fp8"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": ""}, "name must be"),
        ({"prefill": 3}, "prefill must be an object"),
        ({"prefill": {"base_s": 1, "token_s": -1}}, "must not be negative"),
        ({"pool_tokens": 0}, "pool_tokens must be a positive"),
        ({"bytes_per_token": True}, "bytes_per_token must be a number"),
        ({"decode_token_s": -1}, "decode_token_s"),
        ({"colour": 1}, "unknown key 'colour'"),
        ({"prefill": {"base_s": 1, "tokens_s": 1}}, "unknown key prefill.tokens_s"),
        ({"prefill": {}, "handoff": {"base_s": 1}}, "missing: prefill.base_s, prefill.token_s, handoff.token_s;"),
        ({"decode_token_s": 10**400}, "decode_token_s must be a number"),
        ({"pool_tokens": math.nan}, "pool_tokens must be a number"),
        ({"context_tokens": [1]}, "context_tokens must be a number, got [1]"),
    ],
)
def test_bad_calibrations_say_what_is_wrong(change: dict[str, Any], words: str) -> None:
    with pytest.raises(CalibrationError) as error:
        from_dict({**to_dict(PRESETS["qwen3-32b"]), **change})
    assert words in str(error.value)


def test_all_that_a_file_lacks_is_said_at_once() -> None:
    with pytest.raises(CalibrationError) as error:
        from_dict({"name": "x", "prefill": {"base_s": 1}, "pool_tokens": 5})
    assert str(error.value).startswith(
        "missing: source, transfer, decode_token_s, bytes_per_token, context_tokens, prefill.token_s; docs/simulate.md"
    )


def test_the_documented_calibration_file_works_and_has_every_key(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "simulate.md").read_text(encoding="utf-8")
    section = page.split("### A calibration file")[1].split("\n## ")[0]
    text = section.split("```json")[1].split("```")[0]
    path = tmp_path / "mine.json"
    path.write_text(text)
    assert list(json.loads(text)) == list(to_dict(PRESETS["qwen3-32b"]))
    made = calibration(str(path))
    assert made.prefill.at(10_000) == pytest.approx(0.37) and made.handoff.floor_s == 0.001
    for key in json.loads(text):
        assert f"`{key}`" in section.split("```")[2]


def test_unknown_models_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="glm-5-fp8, qwen3-32b"):
        calibration("gpt-2")
    path = tmp_path / "x.json"
    path.write_text("{")
    with pytest.raises(CalibrationError, match="not JSON"):
        calibration(str(path))
    path.write_text("[" * 100_000)
    with pytest.raises(CalibrationError, match="nested too deeply"):
        calibration(str(path))


def test_noise_has_mean_one_and_is_seeded() -> None:
    draws = [Noise(0.1, 3).factor() for _ in range(2)]
    assert draws[0] == draws[1] != 1.0
    noise = Noise(0.1, 1)
    assert statistics.fmean(noise.factor() for _ in range(4000)) == pytest.approx(1.0, abs=0.01)
    assert Noise(0.0, 1).factor() == 1.0


# --- faults ---------------------------------------------------------------------------------------------------------


def test_faults_merge_and_reset() -> None:
    faults = Faults().merged({"http_500_rate": 0.5, "hang": True}).merged({"cut_stream_after_chunks": 3})
    assert (faults.http_500_rate, faults.hang, faults.cut_stream_after_chunks) == (0.5, True, 3)
    assert faults.merged({"http_500_rate": None, "hang": None, "cut_stream_after_chunks": None}) == Faults()


@pytest.mark.parametrize(
    "change",
    [
        [],
        {"http_500_rate": 1.5},
        {"fail_reads_rate": -0.1},
        {"hang": 1},
        {"delay_first_byte_s": "1"},
        {"delay_first_byte_s": float("nan")},
        {"delay_first_byte_s": -1},
        {"cut_stream_after_chunks": 1.5},
        {"http_500_rate": True},
        {"explode": True},
    ],
)
def test_bad_faults_are_refused(change: Any) -> None:
    with pytest.raises(FaultError):
        Faults().merged(change)


# --- settings and references ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [{"ttl_s": -1}, {"tp": 0}, {"failure_policy": "x"}, {"connector": "x"}, {"port": 70_000}, {"block_size": 0}],
)
def test_impossible_settings(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        EngineConfig(role=Role.DECODE, **change)


def test_settings_survive_as_data() -> None:
    config = EngineConfig(role=Role.PREFILL, ttl_s=20, connector="stock")
    assert EngineConfig(**json.loads(json.dumps(config.as_dict()))) == config


REFERENCE = {
    "remote_engine_id": "e", "remote_request_id": "r", "remote_host": "h", "remote_port": 1,
    "remote_block_ids": [[0, 1]], "remote_num_tokens": 7, "remote_blocks_expiry_time": 3,
}  # fmt: skip


def test_reference_needs_all_that_vllm_needs() -> None:
    assert Reference.parse(REFERENCE) == Reference("e", "r", "h", 1, 7, 3.0)
    for name in REFERENCE:
        broken = Reference.parse({**REFERENCE, name: None})
        if name == "remote_blocks_expiry_time":
            assert broken == Reference("e", "r", "h", 1, 7, None)
        else:
            assert broken is None


# --- side channel ---------------------------------------------------------------------------------------------------


async def test_side_channel_answers_in_parallel_and_survives_faults() -> None:
    def handler(request: dict[str, Any]) -> dict[str, Any]:
        if request["op"] == "break":
            raise RuntimeError("no")
        return {"twice": request["value"] * 2}

    server = SideChannelServer(handler)
    await server.start("127.0.0.1", 0)
    peer = Peer("127.0.0.1", server.port)
    replies = await asyncio.gather(*(peer.call("double", value=value) for value in range(50)))
    assert [reply["twice"] for reply in replies] == [value * 2 for value in range(50)]
    with pytest.raises(DeadPeerError, match="RuntimeError"):
        await peer.call("break")
    assert (await peer.call("double", value=4))["twice"] == 8
    await peer.close()
    await server.close()


async def test_dead_peers_are_noticed_and_reached_again() -> None:
    server = SideChannelServer(lambda _: {"ok": True})
    await server.start("127.0.0.1", 0)
    peer = Peer("127.0.0.1", server.port)
    await peer.call("x")
    peer.facts = {"engine_id": "old"}
    await server.close()
    await asyncio.sleep(0.05)
    assert peer.facts == {}
    with pytest.raises(DeadPeerError):
        await peer.call("x")
    again = SideChannelServer(lambda _: {"ok": True})
    await again.start("127.0.0.1", server.port)
    assert (await peer.call("x"))["ok"] is True
    await peer.close()
    await again.close()


async def test_a_peer_that_dies_in_mid_call_fails_it() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    peer = Peer("127.0.0.1", server.sockets[0].getsockname()[1])
    with pytest.raises(DeadPeerError, match="went away"):
        await peer.call("x")
    await peer.close()
    server.close()


# --- command line ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--role", "decode", "--ttl", "-1"], "ttl must be at least 0"),
        (["--role", "decode", "--time-scale", "x"], "time scale must be"),
        (["--role", "both"], "is not one of"),
        ([], "--role"),
    ],
)
def test_usage_errors_exit_2(arguments: list[str], words: str) -> None:
    app = typer.Typer()
    app.command()(engine)
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})
    assert result.exit_code == 2
    assert words in result.output
