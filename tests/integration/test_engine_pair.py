"""A prefill and a decode engine in one event loop, references carried by hand, time moved by the test."""

from __future__ import annotations

import asyncio
import heapq
import random
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import orjson
import pytest

from kvtune_bench import tokens
from kvtune_bench.calibration import PRESETS
from kvtune_bench.engine import EngineConfig
from kvtune_bench.engine_server import EngineServer
from kvtune_connector import wire
from kvtune_telemetry.buckets import size_label
from kvtune_telemetry.catalogue import DECISION_REASONS
from kvtune_telemetry.clock import ScaledClock
from kvtune_telemetry.vocabulary import End, Role

MODEL = "qwen3-32b"
QWEN = PRESETS[MODEL]
NO_BLOCKS = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip
Message = dict[str, Any]


class ManualClock:
    """Time that stands still until the test moves it."""

    def __init__(self) -> None:
        self.time = 1000.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def now(self) -> float:
        return self.time

    def unix(self) -> float:
        return 1_700_000_000 + self.time

    async def sleep(self, seconds: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.time + seconds, id(future), future))
        await future

    async def advance(self, seconds: float) -> None:
        self.time += seconds
        while self._sleepers and self._sleepers[0][0] <= self.time:
            future = heapq.heappop(self._sleepers)[2]
            if not future.done():
                future.set_result(None)
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - looks into another component, which signals nobody
            await asyncio.sleep(0.002)


class Pair:
    """P and D, and a client that plays the router."""

    def __init__(self, prefill: EngineServer, decode: EngineServer, client: aiohttp.ClientSession) -> None:
        self.p, self.d, self.client = prefill, decode, client

    async def post(self, server: EngineServer, body: dict[str, Any], path: str = "/v1/chat/completions") -> Any:
        async with self.client.post(server.url + path, json={"model": MODEL, **body}) as reply:
            data = await reply.json()
            assert reply.status == 200, data
            return data

    async def prefill(
        self, messages: list[Message], reference: dict[str, Any] | None = None, **more: Any
    ) -> dict[str, Any]:
        params = dict(reference or NO_BLOCKS)
        body = {"messages": messages, "max_tokens": 1, "kv_transfer_params": params, **more}
        reply = await self.post(self.p, body)
        params = reply["kv_transfer_params"]
        assert isinstance(params, dict)
        return params

    async def decode(
        self, messages: list[Message], params: dict[str, Any] | None, max_tokens: int = 80, **more: Any
    ) -> tuple[str, dict[str, Any] | None]:
        """The streamed answer and the reference on its last chunk."""
        body = {"messages": messages, "max_tokens": max_tokens, "stream": True, "kv_transfer_params": params, **more}
        async with self.client.post(self.d.url + "/v1/chat/completions", json={"model": MODEL, **body}) as reply:
            assert reply.status == 200, await reply.text()
            text, reference = "", None
            for event in (await reply.read()).split(b"\n\n"):
                if event.startswith(b"data: {"):
                    chunk = orjson.loads(event[6:])
                    text += chunk["choices"][0]["delta"].get("content") or ""
                    reference = chunk.get("kv_transfer_params") or reference
            return text, reference

    async def turn(
        self, messages: list[Message], reference: dict[str, Any] | None, max_tokens: int = 80
    ) -> tuple[dict[str, Any], str, dict[str, Any] | None]:
        """One turn through both engines: P's parameters, the checked answer, the next reference."""
        params = await self.prefill(messages, reference)
        text, following = await self.decode(messages, params, max_tokens)
        assert text == tokens.expected_answer(tokens.render_chat(messages), max_tokens)
        return params, text, following

    def value(self, server: EngineServer, name: str, **labels: str) -> float:
        sampled = server.engine.registry.get_sample_value(name, self.labels(server, name, labels))
        assert sampled is not None, name
        return sampled

    @staticmethod
    def labels(server: EngineServer, name: str, labels: dict[str, str]) -> dict[str, str]:
        if name.startswith("sim_"):
            return labels
        common = {"model_name": MODEL, "engine": "0", **labels}
        return common | ({"role": server.engine.role.value} if name.startswith("kvtune_") else {})

    def ended(self, end: str) -> float:
        return self.value(self.d, "kvtune_retentions_ended_total", end=end)

    def decided(self, decision: str, reason: str) -> float:
        return self.value(self.p, "kvtune_decisions_total", decision=decision, reason=reason)

    async def idle(self, *, retained: int = 0) -> None:
        """Nothing but `retained` requests is held any more, and no promise was broken."""
        await eventually(lambda: len(self.d.engine.ledger) == retained and self.p.engine.pool.used == 0)
        await eventually(lambda: retained > 0 or self.d.engine.pool.used == 0)
        await eventually(lambda: len(self.p.engine._tasks) == 1 and len(self.d.engine._tasks) == 1)
        for server in (self.p, self.d):
            assert server.engine.state()["violations"] == {"late_read": 0, "double_read": 0, "wrong_kv": 0}
            assert server.engine.state()["requests"]["running"] == 0
            assert server.engine.state()["requests"]["waiting"] == 0


Make = Callable[..., Awaitable[Pair]]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def make(clock: ManualClock) -> AsyncIterator[Make]:
    async with AsyncExitStack() as stack:

        async def build(
            *, p: dict[str, Any] | None = None, d: dict[str, Any] | None = None, scaled: float = 0, **both: Any
        ) -> Pair:
            servers = []
            chosen = ScaledClock.starting_now(scaled) if scaled else clock
            for role, own in ((Role.PREFILL, {"prefix_caching": False, **(p or {})}), (Role.DECODE, d or {})):
                config = EngineConfig(role=role, **{"instant": True, "noise": 0.0, **both, **own})
                server = EngineServer(config, clock=chosen)
                await server.start()
                stack.push_async_callback(server.close)
                servers.append(server)
            client = await stack.enter_async_context(aiohttp.ClientSession())
            return Pair(servers[0], servers[1], client)

        yield build


def question(text: str, words: int = 200) -> Message:
    return {"role": "user", "content": f"{text} " * words}


async def follow_up(pair: Pair, max_tokens: int = 80) -> tuple[list[Message], dict[str, Any]]:
    """A first turn, and the conversation with the next question; D retains the first turn."""
    messages = [question("first")]
    _, text, reference = await pair.turn(messages, None, max_tokens)
    assert reference is not None
    return [*messages, {"role": "assistant", "content": text}, question("second", 30)], reference


async def test_three_turns_fetch_the_whole_history(make: Make) -> None:
    pair = await make()
    messages, reference = [question("first")], None
    held = 0
    for turn in range(3):
        params, text, reference = await pair.turn(messages, reference)
        report = wire.read_report(params)
        assert report is not None
        prompt = len(tokens.render_chat(messages)) // 4
        assert report.fetched_tokens == held == params["remote_prefill_cached_tokens"]
        assert report.decision == ("fetch" if turn else "recompute")
        held = prompt + 80 - 1
        assert reference is not None and reference["remote_num_tokens"] == held
        assert reference["kvtune"]["ttl_s"] == 480.0
        messages += [{"role": "assistant", "content": text}, question(f"more {turn}", 40)]
    await pair.idle(retained=1)
    assert pair.decided("fetch", "none") == 2
    assert (pair.ended("read"), pair.ended("lapsed")) == (2, 0)
    assert pair.value(pair.d, "kvtune_retained_tokens") == held
    assert pair.value(pair.p, "vllm:nixl_xfer_time_seconds_count") == 2 * 8
    assert pair.value(pair.p, "vllm:prompt_tokens_by_source_total", source="external_kv_transfer") > 0


async def test_durations_are_booked_as_calibrated(make: Make) -> None:
    pair = await make(tp=4)
    messages, reference = await follow_up(pair)
    first = reference["remote_num_tokens"] - 79
    params = await pair.prefill(messages, reference)
    fetched = reference["remote_num_tokens"]
    rest = len(tokens.render_chat(messages)) // 4 - fetched
    expected = QWEN.transfer.at(fetched)
    assert wire.read_report(params).fetched_tokens == fetched  # type: ignore[union-attr]
    assert pair.value(pair.p, "kvtune_path_seconds_total", path="fetch", size=size_label(fetched)) == pytest.approx(
        expected
    )
    assert pair.value(pair.p, "vllm:nixl_xfer_time_seconds_sum") == pytest.approx(4 * expected)
    assert pair.value(pair.p, "vllm:nixl_bytes_transferred_sum") == pytest.approx(fetched * QWEN.bytes_per_token)
    assert pair.value(pair.p, "vllm:request_prefill_time_seconds_sum") == pytest.approx(
        QWEN.prefill.at(first) + QWEN.prefill.at(rest)
    )
    # All of the fetch counts as queueing, as in vLLM.
    assert pair.value(pair.p, "vllm:request_queue_time_seconds_sum") == pytest.approx(expected)
    assert pair.value(pair.d, "vllm:time_to_first_token_seconds_sum") == pytest.approx(QWEN.handoff.at(first))
    assert pair.value(pair.d, "vllm:e2e_request_latency_seconds_sum") == pytest.approx(
        QWEN.handoff.at(first) + 79 * QWEN.decode_token_s
    )


async def test_p_with_a_prefix_cache_says_that_it_needs_nothing(make: Make) -> None:
    pair = await make(p={"prefix_caching": True}, threshold_tokens=2000)
    messages, reference = await follow_up(pair)
    report = wire.read_report(await pair.prefill(messages, reference))
    assert report is not None and (report.decision, report.reason) == ("recompute", "below_threshold")
    assert report.local_tokens > 0
    await eventually(lambda: pair.ended("local_hit") == 1)
    text, _ = await pair.decode(messages, None)
    assert text == tokens.expected_answer(tokens.render_chat(messages), 80)


async def test_rewritten_history_is_cut_to_what_is_equal(make: Make) -> None:
    pair = await make()
    messages, reference = await follow_up(pair)
    edited = [*messages[:1], {"role": "assistant", "content": "something else"}, messages[2]]
    report = wire.read_report(await pair.prefill(edited, reference))
    assert report is not None and (report.decision, report.reason) == ("fetch", "rewritten")
    shared = len(tokens.render_chat(messages[:1])) // 4
    assert report.fetched_tokens == shared // 64 * 64
    await eventually(lambda: pair.ended("read") == 1)


async def test_foreign_reference_gives_a_recompute_and_frees_d(make: Make) -> None:
    pair = await make()
    _, reference = await follow_up(pair)
    other = [question("another conversation")]
    params, _, _ = await pair.turn(other, reference)
    report = wire.read_report(params)
    assert report is not None and (report.decision, report.reason) == ("recompute", "rewritten")
    await eventually(lambda: pair.ended("released") == 1)
    await pair.idle(retained=1)


async def test_a_tenants_salt_shares_nothing(make: Make) -> None:
    pair = await make()
    messages, reference = await follow_up(pair)
    report = wire.read_report(await pair.prefill(messages, reference, cache_salt="tenant"))
    assert report is not None and (report.decision, report.reason) == ("recompute", "rewritten")


async def test_a_reference_without_proof_is_refused(make: Make) -> None:
    pair = await make()
    messages, reference = await follow_up(pair)
    del reference["kvtune"]
    report = wire.read_report(await pair.prefill(messages, reference))
    assert report is not None and (report.decision, report.reason) == ("recompute", "unverified")
    await eventually(lambda: pair.ended("released") == 1)


async def test_explored_and_disabled(make: Make) -> None:
    pair = await make(p={"threshold_tokens": 256})
    messages, reference = await follow_up(pair)
    reference["kvtune"] |= wire.request_extras(explore=True)
    report = wire.read_report(await pair.prefill(messages, reference))
    assert report is not None and (report.decision, report.reason) == ("recompute", "explored")
    await eventually(lambda: pair.ended("released") == 1)
    off = await make(p={"bidirectional": False})
    messages, reference = await follow_up(off)
    report = wire.read_report(await off.prefill(messages, reference))
    assert report is not None and (report.decision, report.reason) == ("recompute", "disabled")
    await eventually(lambda: off.ended("released") == 1)


@pytest.mark.parametrize(("age", "fetched"), [(474.9, True), (475.1, False), (480.5, False)])
async def test_expiry_keeps_the_margin(make: Make, clock: ManualClock, age: float, fetched: bool) -> None:
    pair = await make()
    messages, reference = await follow_up(pair)
    await clock.advance(age)
    params, _, _ = await pair.turn(messages, reference)
    report = wire.read_report(params)
    assert report is not None and report.decision == ("fetch" if fetched else "recompute")
    assert report.reason == ("none" if fetched else "expired")
    await clock.advance(10)
    await eventually(lambda: pair.ended("read" if fetched else "lapsed") == 1)
    assert pair.value(pair.p, "kvtune_kv_reads_declined_total") == (0 if fetched else 1)
    assert pair.value(pair.d, "vllm:nixl_num_kv_expired_reqs_total") == (0 if fetched else 8)
    await pair.idle(retained=1)
    assert pair.value(pair.d, "kvtune_retention_age_seconds_sum", end="lapsed") == (0 if fetched else 480)


async def test_retention_is_bounded_by_the_engine_and_by_the_wish(make: Make, clock: ManualClock) -> None:
    pair = await make(ttl_s=100)
    messages = [question("first")]
    for wish, granted in ((30, 30.0), (1000, 100.0), (None, 100.0)):
        params = await pair.prefill(messages)
        params["kvtune"] |= wire.request_extras(retain_s=wish)
        _, reference = await pair.decode(messages, params)
        assert wire.read_ttl_s(reference) == granted
        assert reference is not None and reference["remote_blocks_expiry_time"] == clock.now() + granted
    await clock.advance(31)
    await eventually(lambda: len(pair.d.engine.ledger) == 2)
    await clock.advance(70)
    await pair.idle()
    assert pair.ended("lapsed") == 3


async def test_no_retention_wanted(make: Make) -> None:
    pair = await make()
    messages = [question("first")]
    params = await pair.prefill(messages)
    params["kvtune"] |= wire.request_extras(retain_s=0)
    text, reference = await pair.decode(messages, params)
    assert text and reference is None
    assert pair.value(pair.d, "kvtune_retentions_missed_total", reason="unwanted") == 1
    assert pair.value(pair.d, "kvtune_retentions_total") == 0
    await pair.idle()


async def test_single_use(make: Make) -> None:
    pair = await make()
    messages, reference = await follow_up(pair)
    await pair.prefill(messages, reference)
    await eventually(lambda: pair.ended("read") == 1)
    params = await pair.prefill(messages, reference)
    assert pair.d.engine.violations["double_read"] == 1
    assert pair.value(pair.d, "sim_violations_total", kind="double_read") == 1
    assert pair.p.engine.violations["wrong_kv"] == 1
    text, _ = await pair.decode(messages, params)
    assert text != tokens.expected_answer(tokens.render_chat(messages), 80)
    await eventually(lambda: pair.value(pair.d, "kvtune_kv_late_notifications_total") == 1)


async def test_dead_and_restarted_engines(make: Make, clock: ManualClock) -> None:
    pair = await make()
    messages, reference = await follow_up(pair)
    port = reference["remote_port"]
    await pair.d.close()
    report = wire.read_report(await pair.prefill(messages, reference))
    assert report is not None and (report.decision, report.reason) == ("recompute", "engine_gone")
    again = EngineServer(EngineConfig(role=Role.DECODE, instant=True, side_channel_port=port, noise=0.0), clock=clock)
    await again.start()
    try:
        report = wire.read_report(await pair.prefill(messages, reference))
        assert report is not None and (report.decision, report.reason) == ("recompute", "engine_gone")
        assert pair.decided("recompute", "engine_gone") == 2
        pair.d = again
        _, text, _ = await pair.turn(messages, None)
        assert text
    finally:
        await again.close()


async def test_failed_reads_are_computed(make: Make, clock: ManualClock) -> None:
    pair = await make()
    messages, reference = await follow_up(pair)
    for server in (pair.p, pair.d):
        async with pair.client.post(server.url + "/sim/faults", json={"fail_reads_rate": 1}) as reply:
            assert (await reply.json())["fail_reads_rate"] == 1.0
    params, _, _ = await pair.turn(messages, reference)
    report = wire.read_report(params)
    assert report is not None and (report.decision, report.reason) == ("recompute", "read_failed")
    assert report.fetched_tokens == 0
    assert pair.value(pair.p, "kvtune_kv_reads_failed_total", direction="d2p") == 1
    assert pair.value(pair.d, "kvtune_kv_reads_failed_total", direction="p2d") == 1
    assert pair.value(pair.p, "vllm:nixl_num_failed_transfers_total") == 8
    await clock.advance(481)  # neither holder was told
    await eventually(lambda: pair.ended("lapsed") == 2)
    await pair.idle()


async def test_dead_prefill_is_computed_on_decode(make: Make) -> None:
    pair = await make()
    messages = [question("first")]
    params = await pair.prefill(messages)
    await pair.p.close()
    text, reference = await pair.decode(messages, params)
    assert text == tokens.expected_answer(tokens.render_chat(messages), 80) and reference
    assert pair.value(pair.d, "kvtune_kv_reads_failed_total", direction="p2d") == 1


async def test_leases_of_prefill_run_out(make: Make, clock: ManualClock) -> None:
    pair = await make()
    messages = [question("first")]
    params = await pair.prefill(messages)
    assert pair.p.engine.pool.used > 0
    await clock.advance(30.1)
    await eventually(lambda: pair.p.engine.pool.used == 0)
    assert pair.value(pair.p, "vllm:nixl_num_kv_expired_reqs_total") == 8
    text, _ = await pair.decode(messages, params)
    assert text != tokens.expected_answer(tokens.render_chat(messages), 80)
    assert pair.p.engine.violations["late_read"] == 1


# --- stock ----------------------------------------------------------------------------------------------------------


async def test_stock_reuses_without_proof(make: Make) -> None:
    pair = await make(connector="stock")
    messages, reference = await follow_up(pair)
    assert "kvtune" not in reference
    params, _, _ = await pair.turn(messages, reference)
    assert "kvtune" not in params
    assert params["remote_prefill_cached_tokens"] == reference["remote_num_tokens"]
    assert pair.p.engine.registry.get_sample_value("kvtune_retained_requests") is None
    await pair.idle(retained=1)


async def test_stock_takes_foreign_kv_and_keeps_it(make: Make) -> None:
    pair = await make(connector="stock")
    _, reference = await follow_up(pair)
    other = [question("another", 300)]
    right = tokens.expected_answer(tokens.render_chat(other), 80)
    text, _ = await pair.decode(other, await pair.prefill(other, reference))
    assert text != right
    assert pair.p.engine.violations["wrong_kv"] == 1
    # D's prefix cache holds it now, so that even a clean turn is wrong.
    text, _ = await pair.decode(other, await pair.prefill(other))
    assert text != right


@pytest.mark.parametrize("policy", ["fail", "recompute"])
async def test_stock_and_an_expired_reference(make: Make, clock: ManualClock, policy: str) -> None:
    pair = await make(connector="stock", failure_policy=policy)
    messages, reference = await follow_up(pair)
    await clock.advance(476)
    body = {"model": MODEL, "messages": messages, "max_tokens": 1, "kv_transfer_params": reference}
    url = pair.p.url + "/v1/chat/completions"
    if policy == "fail":
        async with pair.client.post(url, json=body) as reply:
            assert reply.status == 500
            error = (await reply.json())["error"]
        assert error == {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}
        assert pair.value(pair.p, "vllm:request_success_total", finished_reason="error") == 1
        assert pair.p.engine.pool.used == 0
    else:
        request = asyncio.create_task(pair.post(pair.p, body))
        await eventually(lambda: pair.p.engine.leaked_pages > 0)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await asyncio.sleep(0.05)
        leaked = pair.p.engine.leaked_pages
        assert pair.p.engine.pool.used == leaked > 0
        assert pair.value(pair.p, "vllm:num_requests_waiting") == 1
        assert pair.value(pair.p, "sim_leaked_pages") == leaked
    assert pair.value(pair.p, "vllm:nixl_num_kv_expired_reqs_total") == 8


async def test_stock_late_read_without_the_expiry_field(make: Make, clock: ManualClock) -> None:
    pair = await make(connector="stock")
    messages, reference = await follow_up(pair)
    del reference["remote_blocks_expiry_time"]
    await clock.advance(481)
    await eventually(lambda: len(pair.d.engine.ledger) == 0)
    await pair.prefill(messages, reference)
    assert pair.d.engine.violations == {"late_read": 1, "double_read": 0, "wrong_kv": 0}
    await eventually(lambda: pair.value(pair.d, "vllm:nixl_num_notifications_after_expiry_total") == 8)


async def test_stock_below_the_threshold_frees_d(make: Make) -> None:
    pair = await make(connector="stock", threshold_tokens=5000)
    messages, reference = await follow_up(pair)
    params, _, _ = await pair.turn(messages, reference)
    assert params["remote_prefill_cached_tokens"] == 0
    await pair.idle(retained=1)


async def test_streams_without_parameters(make: Make) -> None:
    pair = await make(stream_params=False)
    messages = [question("first")]
    params = await pair.prefill(messages)
    text, reference = await pair.decode(messages, params)
    assert text and reference is None
    reply = await pair.post(
        pair.d, {"messages": messages, "max_tokens": 4, "kv_transfer_params": await pair.prefill(messages)}
    )
    assert reply["kv_transfer_params"]["do_remote_decode"] is True


# --- what a request leaves behind -----------------------------------------------------------------------------------


async def test_what_is_not_a_normal_end_exports_nothing(make: Make, clock: ManualClock) -> None:
    pair = await make()
    messages = [question("first")]
    whole = tokens.expected_answer(tokens.render_chat(messages), 80)
    text, reference = await pair.decode(messages, await pair.prefill(messages), stop=[whole[40:52]])
    assert (text, reference) == (whole[:40], None)
    await pair.idle()
    _, reference = await pair.decode(messages, await pair.prefill(messages), sim={"finish": "stop"})
    assert reference is not None
    _, reference = await pair.decode(messages, None)
    assert reference is None
    plain = await make(d={"bidirectional": False})
    _, reference = await plain.decode(messages, await plain.prefill(messages))
    assert reference is None
    await plain.idle()


async def test_clients_that_leave_free_everything(make: Make, clock: ManualClock) -> None:
    pair = await make(instant=False)
    prompt = [question("first")]
    body = {"messages": prompt, "max_tokens": 1, "kv_transfer_params": NO_BLOCKS}
    # Two prefills: one computes, the other queues behind it. Both clients leave.
    requests = [asyncio.create_task(pair.post(pair.p, body)) for _ in range(2)]
    await eventually(lambda: pair.p.engine.state()["requests"] == {"running": 1, "waiting": 1, "finished": 0})
    for request in requests:
        request.cancel()
    await pair.idle()
    assert pair.value(pair.p, "vllm:request_success_total", finished_reason="abort") == 2
    # The compute server is free again: the next prefill takes its own time only.
    started = clock.now()
    request = asyncio.create_task(pair.post(pair.p, body))
    await eventually(lambda: pair.p.engine._running == 1)
    await clock.advance(QWEN.prefill.at(len(tokens.render_chat(prompt)) // 4) + 1e-6)
    params = (await request)["kv_transfer_params"]
    assert clock.now() - started < 0.2
    # A decode: first while it pulls, then in mid-answer.
    request = asyncio.create_task(pair.decode(prompt, params))
    await eventually(lambda: pair.d.engine._running == 1 or len(pair.d.engine._peers) == 1)
    await eventually(lambda: pair.d.engine.pool.used > 0)
    request.cancel()
    await pair.idle()
    alone = asyncio.create_task(pair.decode(prompt, None))
    await eventually(lambda: pair.d.engine._running == 1)
    await clock.advance(1.0)
    await asyncio.sleep(0.05)
    assert not alone.done()
    alone.cancel()
    await pair.idle()
    assert len(pair.d.engine.ledger) == 0


async def test_a_client_that_leaves_prefill_in_mid_fetch_still_uses_the_reference_up(
    make: Make, clock: ManualClock
) -> None:
    pair = await make(p={"instant": False})
    messages = [question("first")]
    first = asyncio.create_task(pair.prefill(messages))
    await eventually(lambda: pair.p.engine._running == 1)
    await clock.advance(1)
    text, reference = await pair.decode(messages, await first)
    messages += [{"role": "assistant", "content": text}, question("second")]
    request = asyncio.create_task(pair.prefill(messages, reference))
    await eventually(lambda: any(held.read_until_s for held in pair.d.engine._holdings.values()))
    request.cancel()
    await eventually(lambda: pair.ended("read") == 1)
    await pair.idle()


async def test_admission_is_fifo_and_waits_for_retained_pages(make: Make, clock: ManualClock) -> None:
    pair = await make(d={"pool_tokens": 64 * 12}, ttl_s=60)
    messages = [question("first", 250)]
    await pair.turn(messages, None, 64)
    other, short = [question("other", 250)], [question("s", 3)]
    params = await pair.prefill(other)
    waiting = asyncio.create_task(pair.decode(other, params, 64))
    await eventually(lambda: pair.d.engine._waiting == 1)
    behind = asyncio.create_task(pair.decode(short, None, 4))
    await eventually(lambda: pair.d.engine._waiting == 2)
    assert pair.value(pair.d, "vllm:num_requests_waiting") == 2
    # P's lease is kept alive by heartbeats while D makes it wait.
    for _ in range(11):
        await clock.advance(5)
        await asyncio.sleep(0.02)
    assert pair.p.engine.state()["leases"] == 1
    await clock.advance(5.1)
    text, _ = await waiting
    assert text == tokens.expected_answer(tokens.render_chat(other), 64)
    assert (await behind)[0] == tokens.expected_answer(tokens.render_chat(short), 4)
    assert pair.d.engine.violations == pair.p.engine.violations == {"late_read": 0, "double_read": 0, "wrong_kv": 0}
    too_long = {"model": MODEL, "messages": [question("long", 800)], "max_tokens": 64}
    async with pair.client.post(pair.d.url + "/v1/chat/completions", json=too_long) as reply:
        assert reply.status == 400


async def test_prefill_is_first_come_first_served(make: Make, clock: ManualClock) -> None:
    pair = await make(instant=False)
    prompts = [[question(f"q{number}", 100 * (number + 1))] for number in range(3)]
    services = [QWEN.prefill.at(len(tokens.render_chat(prompt)) // 4) for prompt in prompts]
    requests = []
    for number, prompt in enumerate(prompts):
        requests.append(asyncio.create_task(pair.prefill(prompt)))
        await eventually(lambda number=number: pair.p.engine._running + pair.p.engine._waiting == number + 1)
    for done in range(3):
        await clock.advance(services[done] - 0.001)
        await asyncio.sleep(0.02)
        assert [request.done() for request in requests] == [number < done for number in range(3)]
        await clock.advance(0.001 + 1e-9)
        await requests[done]
    assert pair.value(pair.p, "vllm:request_queue_time_seconds_sum") == pytest.approx(2 * services[0] + services[1])


async def test_series_do_not_grow_with_requests(make: Make) -> None:
    pair = await make()

    def series() -> int:
        return sum(len(list(family.samples)) for family in pair.d.engine.registry.collect())

    before = series()
    messages, reference = await follow_up(pair)
    for _ in range(3):
        await pair.turn([question(str(uuid.uuid4()))], None)
    await pair.prefill(messages, reference)
    assert series() == before


async def test_many_conversations_with_clients_that_leave(make: Make) -> None:
    """Whatever the order of events: right answers, no broken promise, nothing left behind."""
    pair = await make(scaled=100, instant=False, ttl_s=40, d={"pool_tokens": 64 * 120}, p={"prefix_caching": True})
    draw = random.Random(5)

    async def conversation(number: int) -> None:
        messages, reference = [question(f"conversation {number}", 20 + number)], None
        for turn in range(4):
            work = asyncio.create_task(pair.turn(messages, reference, 20))
            if draw.random() < 0.25:
                await asyncio.sleep(draw.random() * 0.02)
                work.cancel()
            done = (await asyncio.gather(work, return_exceptions=True))[0]
            if isinstance(done, asyncio.CancelledError):
                reference = None  # it may have been read
                continue
            assert not isinstance(done, BaseException), done
            _, text, reference = done
            messages += [{"role": "assistant", "content": text}, question(f"turn {turn}", 5)]

    await asyncio.gather(*(conversation(number) for number in range(24)))
    async with asyncio.timeout(10):
        while pair.d.engine.pool.used or pair.p.engine.pool.used:  # noqa: ASYNC110 - as in `eventually`
            await asyncio.sleep(0.01)
    await pair.idle()
    started = pair.value(pair.d, "kvtune_retentions_total")
    assert sum(pair.ended(end.value) for end in End) == started > 24
    prefills = sum(
        pair.value(pair.p, "kvtune_decisions_total", decision=decision, reason=reason)
        for decision, reason in DECISION_REASONS
    )
    assert 24 < prefills <= 24 * 4
    assert pair.decided("fetch", "none") + pair.decided("local_hit", "none") > 0
