"""Real vLLM servers in other company and other shapes than `test_vllm`'s pair: several ranks, several API servers, a
prefix cache on P, a pool too small, and stock vLLM on either side.

Five servers: `p` has a prefix cache; `d` two tensor parallel ranks and two API servers; `narrow` a pool of a few blocks
and takes references without proof; `stock_p` and `stock_d` are stock vLLM (`relaxed_stock`: but for how they wait).
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import openai
import orjson
import pytest
import pytest_asyncio

from kvtune_bench.process import ChildProcess, free_port
from kvtune_bench.vllm_pair import Bench, VllmServer, cpu_seconds, difference, report, text, top

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

NOISE = 0.05
"""As in `test_vllm`."""
BLOCK = 128
"""Tokens a block on the CPU platform."""
UNKEPT: Any = {"tokens": 2, "kvtune": {"v": 1, "retain_s": 0}}
"""A decode leg of which nothing is wanted but its first words."""
NARROW = ("--num-gpu-blocks-override", "12", "--max-model-len", "1024")


class Peers(Bench):
    """The five servers, and what is asked of them."""

    p: VllmServer
    d: VllmServer
    narrow: VllmServer
    stock_p: VllmServer
    stock_d: VllmServer

    async def conversation(self, seed: str, p: VllmServer, d: VllmServer, tokens: int = 24) -> tuple[list[int], Any]:
        """A first turn by hand; its prompt and answer as token ids, and D's reference."""
        prompt = await self.tokens(d, text(seed, 300))
        prefilled = await self.prefill(p, prompt)
        params = prefilled["kv_transfer_params"]
        told = await self.post(
            d, prompt=prompt, max_tokens=tokens, ignore_eos=True, return_token_ids=True, kv_transfer_params=params
        )
        return [*prompt, *told["choices"][0]["token_ids"]], told["kv_transfer_params"]

    async def equals_a_clean_run(self, p: VllmServer, d: VllmServer, prompt: Any, answers: Any) -> None:
        """A turn's answers are those of a run that read nothing, and so is what P and D have cached since."""
        salted = await self.prefill(p, prompt, cache_salt="clean")
        clean = salted, await self.decode(d, prompt, salted, salt="clean", **UNKEPT)
        again = await self.legs(p, d, prompt, **UNKEPT)
        for found in (answers, again):
            assert difference(top(found[0]), top(clean[0])) < NOISE
            assert difference(top(found[1]), top(clean[1])) < NOISE

    def block_bytes(self) -> int:
        """Bytes of a block of KV in bf16, all ranks'."""
        shape = json.loads((self.model / "config.json").read_text())
        return int(BLOCK * 2 * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def peers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Peers]:
    async with AsyncExitStack() as stack:
        python, model = os.environ["KVTUNE_VLLM_PYTHON"], Path(os.environ["KVTUNE_VLLM_MODEL"])
        made = Peers(stack, tmp_path_factory.mktemp("peers"), python, model)
        await made.connect(240.0)
        made.p = await made.server("prefill", prefix_caching=True, failure_policy="recompute")
        made.d = await made.server("decode", api_servers=2, arguments=("--tensor-parallel-size", "2"))
        made.narrow = await made.server(
            "prefill", failure_policy="fail", kvtune={"require_fingerprint": False}, arguments=NARROW
        )
        await asyncio.gather(*(one.ready() for one in (made.p, made.d, made.narrow)))
        made.stock_p = await made.server("prefill", connector="relaxed-stock", ttl_s=900.0)
        made.stock_d = await made.server("decode", connector="relaxed-stock", ttl_s=900.0)
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def stock_is_ready(peers: Peers) -> None:
    """The stock servers start while the others are tested."""
    await asyncio.gather(peers.stock_p.ready(), peers.stock_d.ready())


# --- a pool too small -----------------------------------------------------------------------------------------------


async def test_a_prefill_preempted_after_its_read_finishes_right(peers: Peers) -> None:
    before = await peers.values(peers.narrow.url, "vllm:num_preemptions_total")
    conversations = [await peers.conversation(f"preempted {n}", peers.narrow, peers.d) for n in range(2)]
    # Together they begin in the pool and outgrow it: the later one loses its blocks, and what it has read with them.
    asked = [[*history, 11, 12, 13] for history, _ in conversations]
    more = {"max_tokens": 300, "ignore_eos": True, "return_token_ids": True}
    found = await asyncio.gather(
        *(
            peers.prefill(peers.narrow, prompt, reference, **more)
            for prompt, (_, reference) in zip(asked, conversations, strict=True)
        )
    )
    assert await peers.values(peers.narrow.url, "vllm:num_preemptions_total") > before
    for prompt, (history, _), told in zip(asked, conversations, found, strict=True):
        assert report(told) == ("fetch", "none", len(history) - 1)
        ids = told["choices"][0]["token_ids"]
        assert len(ids) == 300
        for place in (0, 150, 299):
            # What a server that has all its KV from computing it says after the same tokens.
            clean = await peers.post(peers.p, prompt=[*prompt, *ids[:place]], max_tokens=1, cache_salt="clean")
            assert difference(top(told, place), top(clean)) < NOISE, place


# --- a prefix cache on P, two ranks on D ----------------------------------------------------------------------------


async def test_a_follow_up_hits_the_local_cache_and_reads_the_rest_once(peers: Peers) -> None:
    name = "kvtune_kv_read_bytes_total"
    ended = await peers.values(peers.d.url, "kvtune_retentions_ended_total", end="read")
    reads = await peers.values(peers.d.url, "kvtune_kv_reads_total", direction="p2d")
    before = await peers.values(peers.d.url, name, direction="p2d")
    history, reference = await peers.conversation("honest", peers.p, peers.d, tokens=150)
    held, local = len(history) - 1, (len(history) - 150) // BLOCK * BLOCK
    assert reference["remote_num_tokens"] == held and reference["tp_size"] == 2
    assert await peers.series(peers.d.url, "kvtune_retained_requests") == [1.0]
    prompt = [*history, 11, 12, 13]
    p, d = await peers.legs(peers.p, peers.d, prompt, reference, **UNKEPT)
    assert report(p) == ("fetch", "none", held - local)
    assert p["kv_transfer_params"]["kvtune"]["local_tokens"] == local
    # One request is one decision, one read and one retention, whatever the number of ranks it was read from.
    await peers.settles(peers.p.url, "kvtune_decisions_total", 1.0, decision="fetch")
    await peers.settles(peers.p.url, "kvtune_kv_reads_total", 1.0, direction="d2p")
    await peers.settles(peers.p.url, "kvtune_prompt_tokens_total", held - local, source="fetched")
    await peers.settles(peers.p.url, "kvtune_prompt_tokens_total", local, source="local_hit")
    await peers.settles(peers.p.url, "kvtune_prompt_tokens_total", len(history) - 150 + 4, source="computed")
    await peers.settles(peers.d.url, "kvtune_retentions_ended_total", ended + 1, end="read")
    await peers.settles(peers.d.url, "kvtune_retained_requests", 0.0)
    blocks = -(-held // BLOCK) - local // BLOCK
    assert await peers.values(peers.p.url, name, direction="d2p") == blocks * peers.block_bytes()
    # And by the two ranks: the first turn's prompt, and of the second what their own cache did not hold.
    await peers.settles(peers.d.url, "kvtune_kv_reads_total", reads + 2, direction="p2d")
    read = -(-(len(history) - 150) // BLOCK) + -(-len(prompt) // BLOCK) - held // BLOCK
    assert await peers.values(peers.d.url, name, direction="p2d") - before == read * peers.block_bytes()
    await peers.equals_a_clean_run(peers.p, peers.d, prompt, (p, d))


@pytest.mark.parametrize(
    ("case", "said"),
    [("edited", ("fetch", "rewritten", BLOCK)), ("foreign", ("recompute", "rewritten", 0))],
)
async def test_a_history_that_differs_leaves_the_caches_clean(peers: Peers, case: str, said: Any) -> None:
    history, reference = await peers.conversation(case, peers.p, peers.d, tokens=150)
    local = (len(history) - 150) // BLOCK * BLOCK
    prompt = {
        # The difference is in the second block beyond what P has itself.
        "edited": [*history[: local + BLOCK + 20], 7, *history[local + BLOCK + 21 :], 11, 12],
        "foreign": await peers.tokens(peers.p, text("another's", 400)),
    }[case]
    p, d = await peers.legs(peers.p, peers.d, prompt, reference, **UNKEPT)
    assert report(p) == said
    assert p["kv_transfer_params"]["kvtune"]["local_tokens"] == (local if case == "edited" else 0)
    await peers.equals_a_clean_run(peers.p, peers.d, prompt, (p, d))
    await peers.settles(peers.d.url, "kvtune_retained_requests", 0.0)


# --- two API servers on D -------------------------------------------------------------------------------------------


def owner(server: VllmServer, port: int) -> str:
    """The process that serves the connection which `port` of ours has to a server, from /proc."""
    ends = f":{server.config.port:04X}", f":{port:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    inode = next(row[9] for row in rows if (row[1][-5:], row[2][-5:]) == ends)
    for path in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(path) == f"socket:[{inode}]":
                return path.parts[2]
        except OSError:
            continue
    raise AssertionError(f"nobody has the connection from port {port}")


async def test_streams_of_both_api_servers_carry_references_and_the_books_are_one(peers: Peers) -> None:
    url, name = peers.d.url, "kvtune_retentions_total"
    before = await peers.values(url, name)
    references: dict[str, list[Any]] = {}
    prompt = text("streamed", 60)
    for count in range(1, 41):
        prefilled = await peers.prefill(peers.p, prompt)
        body = {
            "model": "tiny", "prompt": prompt, "max_tokens": 4, "stream": True, "ignore_eos": True,
            "kv_transfer_params": prefilled["kv_transfer_params"],
        }  # fmt: skip
        port = free_port()
        # Each over a connection of its own: the kernel deals them out.
        connector = aiohttp.TCPConnector(local_addr=("127.0.0.1", port))
        async with aiohttp.ClientSession(connector=connector) as session:
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                chunks = [orjson.loads(line[6:]) async for line in answer.content if line.startswith(b"data: {")]
            by = owner(peers.d, port)
        carried = [chunk["kv_transfer_params"] for chunk in chunks if "kv_transfer_params" in chunk]
        assert len(carried) == 1
        assert carried[0]["kvtune"]["fingerprint"]["tokens"] == carried[0]["remote_num_tokens"]
        references.setdefault(by, []).append(carried[0])
        if len(references) == 2 and count >= 4:
            break
    assert len(references) == 2, "only one API server was ever asked"
    held = [reference for found in references.values() for reference in found]
    tokens = float(sum(reference["remote_num_tokens"] for reference in held))
    await peers.settles(url, name, before + count)
    # Whichever of them is asked, and whichever heard of it: each series once, with what both were told.
    for _ in range(4):
        assert await peers.series(url, name) == [before + count]
        assert await peers.series(url, "kvtune_retained_requests") == [float(count)]
        assert await peers.series(url, "kvtune_retained_tokens") == [tokens]
        assert await peers.series(url, "kvtune_connector_setting", setting="decoder_kv_blocks_ttl") == [480.0]
        assert await peers.series(url, "kvtune_connector_build_info") == [1.0]
        assert await peers.series(url, "kvtune_retentions_missed_total", reason="error") == [0.0]
    for reference in held:
        await peers.prefill(peers.p, prompt, reference)
    await peers.settles(url, "kvtune_retained_requests", 0.0)
    await peers.settles(url, "kvtune_retained_tokens", 0.0)


# --- stock vLLM on one side -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("stock_is_ready")
async def test_a_stock_decodes_reference_is_refused_or_taken_as_the_settings_say(peers: Peers) -> None:
    reads = await peers.values(peers.narrow.url, "kvtune_kv_reads_total", direction="d2p")
    for p, fetches in ((peers.p, False), (peers.narrow, True)):
        history, reference = await peers.conversation(f"stock {fetches}", p, peers.stock_d)
        assert "kvtune" not in reference
        prompt = [*history, 11, 12, 13]
        told = await peers.prefill(p, prompt, reference)
        assert report(told) == (("fetch", "none", len(history) - 1) if fetches else ("recompute", "unverified", 0))
        if not fetches:
            # D is told that nobody will read it, and has its blocks back. Later turns' are its own again.
            await peers.settles(peers.stock_d.url, "vllm:kv_cache_usage_perc", 0.0)
        found = told, await peers.decode(peers.stock_d, prompt, told)
        await peers.equals_a_clean_run(p, peers.stock_d, prompt, found)
    await peers.settles(peers.narrow.url, "kvtune_kv_reads_total", reads + 1, direction="d2p")
    await peers.settles(peers.p.url, "kvtune_decisions_total", 1.0, reason="unverified")


@pytest.mark.usefixtures("stock_is_ready")
async def test_a_stock_prefill_reads_our_reference_and_our_books_are_right(peers: Peers) -> None:
    ended = await peers.values(peers.d.url, "kvtune_retentions_ended_total", end="read")
    history, reference = await peers.conversation("stock p", peers.stock_p, peers.d)
    prompt = [*history, 11, 12, 13]
    found = await peers.legs(peers.stock_p, peers.d, prompt, reference, **UNKEPT)
    assert "kvtune" not in found[0]["kv_transfer_params"]
    assert found[0]["kv_transfer_params"]["remote_prefill_cached_tokens"] == len(history) - 1
    await peers.settles(peers.d.url, "kvtune_retentions_ended_total", ended + 1, end="read")
    await peers.settles(peers.d.url, "kvtune_retained_requests", 0.0)
    await peers.equals_a_clean_run(peers.stock_p, peers.d, prompt, found)


@pytest.mark.usefixtures("stock_is_ready")
async def test_the_router_hands_a_stock_prefill_no_reference(peers: Peers) -> None:
    started = await peers.values(peers.d.url, "kvtune_retentions_total")
    router = await ChildProcess.start(
        "router",
        [
            *(os.sys.executable, "-m", "kvtune_cli", "router", "--port", "0", "--metrics-port", "0"),  # type: ignore[attr-defined]
            *("--prefill", peers.stock_p.url, "--decode", peers.d.url, "--outcome-header", "--log-format", "json"),
        ],
        peers.work / "router.log",
    )
    peers.stack.push_async_callback(router.stop)
    client = openai.AsyncOpenAI(base_url=orjson.loads(router.ready)["ready"] + "/v1", api_key="none", max_retries=0)
    messages: list[Any] = [{"role": "user", "content": text("routed", 200)}]
    outcomes = []
    for _ in range(2):
        raw = await client.chat.completions.with_raw_response.create(
            model="tiny", messages=messages, max_tokens=8, temperature=0, extra_headers={"X-Session-ID": "routed"}
        )
        outcomes.append(raw.headers["x-kvtune-outcome"])
        said = raw.parse().choices[0].message.content or ""
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]
    assert outcomes == ["first", "unverified"]
    # Nobody read the first turn's: it is held until its time is up.
    await peers.settles(peers.d.url, "kvtune_retentions_total", started + 2)
    await peers.settles(peers.d.url, "kvtune_retained_requests", 2.0)
    await router.stop()


# --- faults ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["recompute", "fail"])
async def test_a_failed_read_is_recomputed_whatever_the_policy(peers: Peers, policy: str) -> None:
    p = {"recompute": peers.p, "fail": peers.narrow}[policy]
    assert p.config.failure_policy == policy
    history, reference = await peers.conversation(f"failed {policy}", p, peers.d, tokens=200)
    failed = await peers.values(p.url, "kvtune_kv_reads_failed_total", direction="d2p")
    prompt = [*history, 11, 12, 13]
    lost = {**reference, "remote_engine_id": f"nobody {policy}", "remote_port": free_port()}
    found = await peers.legs(p, peers.d, prompt, lost, **UNKEPT)
    assert report(found[0]) == ("recompute", "read_failed", 0)
    await peers.settles(p.url, "kvtune_kv_reads_failed_total", failed + 1, direction="d2p")
    await peers.equals_a_clean_run(p, peers.d, prompt, found)


async def test_after_all_that_prefill_has_its_blocks_and_rests(peers: Peers) -> None:
    for p in (peers.p, peers.narrow):
        await peers.rests(p)
        # Of processor time, not of the clock: a loop that waits for what will not come takes a core, idleness 0.02.
        before, begun = cpu_seconds(p.child.pid), time.monotonic()
        await asyncio.sleep(5.0)
        assert (cpu_seconds(p.child.pid) - before) / (time.monotonic() - begun) < 0.5


async def test_the_books_of_decode_close(peers: Peers) -> None:
    started = await peers.values(peers.d.url, "kvtune_retentions_total")
    ended = await peers.values(peers.d.url, "kvtune_retentions_ended_total")
    assert started == ended + await peers.values(peers.d.url, "kvtune_retained_requests")
    assert await peers.values(peers.d.url, "kvtune_kv_late_notifications_total") == 0
