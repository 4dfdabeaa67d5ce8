"""A real vLLM prefill/decode pair with NIXL on this machine's CPUs, through the router and by hand.

The pair is started once; its environment is named by KVTUNE_VLLM_PYTHON and a small model's directory by
KVTUNE_VLLM_MODEL (`make e2e` makes both).
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest
import pytest_asyncio
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from kvtune_bench.process import ChildProcess, free_port, tail
from kvtune_bench.vllm_pair import Bench, VllmServer, difference, report, text, top
from kvtune_dashboards.config import config_from
from kvtune_dashboards.execute import Prometheus as Asked
from kvtune_dashboards.execute import Span, matrix
from kvtune_dashboards.execute import run as run_board
from kvtune_dashboards.rendering import load as load_boards
from kvtune_dashboards.rules import RECORDING_FILE, render

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

BOARDS = Path(__file__).resolve().parents[2] / "dashboards" / "grafana"
NOISE = 0.05
"""Largest difference of a top-5 log-probability between read and computed KV (bf16; 0.008 seen)."""
TTL_S = 150.0


class Pair(Bench):
    """A P, a D, a router in front, and a session."""

    def __init__(self, stack: AsyncExitStack, work: Path) -> None:
        super().__init__(stack, work, os.environ["KVTUNE_VLLM_PYTHON"], Path(os.environ["KVTUNE_VLLM_MODEL"]))
        self.p: VllmServer
        self.d: VllmServer
        self.plain: VllmServer
        """A P that is not bidirectional; it starts while the pair is tested."""
        self.router: ChildProcess
        self.spans: list[dict[str, Any]] = []

    async def start_router(self, *more: str) -> ChildProcess:
        router = await ChildProcess.start(
            "router",
            [
                *(os.sys.executable, "-m", "kvtune_cli", "router", "--port", "0", "--metrics-port", "0"),
                *("--prefill", self.p.url, "--decode", self.d.url, "--outcome-header", "--log-format", "json", *more),
            ],
            self.work / "router.log",
        )
        self.stack.push_async_callback(router.stop)
        return router

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url("ready") + "/v1", api_key="none", max_retries=0)

    def url(self, what: str) -> str:
        return str(orjson.loads(self.router.ready)[what])

    async def turn(
        self, prompt: Any, reference: dict[str, Any] | None = None, **decode: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Both legs by hand; returns P's and D's answers."""
        return await self.legs(self.p, self.d, prompt, reference, **decode)


@dataclass
class Collector:
    """What an OTLP/HTTP receiver on loopback got: each span's name, ids, service and attributes."""

    url: str = ""
    spans: list[dict[str, Any]] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.Response:
        message = ExportTraceServiceRequest.FromString(await request.read())
        for resource in message.resource_spans:
            about = {a.key: a.value.string_value for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.append(
                        {
                            "name": span.name, "trace": span.trace_id.hex(), "id": span.span_id.hex(),
                            "parent": span.parent_span_id.hex(), "service": about.get("service.name"),
                            "attributes": {
                                a.key: a.value.string_value or a.value.int_value or a.value.double_value
                                for a in span.attributes
                            },
                        }
                    )  # fmt: skip
        return web.Response(body=b"", content_type="application/x-protobuf")


@asynccontextmanager
async def otlp_receiver() -> AsyncIterator[Collector]:
    collector = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", collector.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    collector.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield collector
    finally:
        await runner.cleanup()


def traced(service: str, url: str) -> dict[str, Any]:
    return {
        "arguments": ("--otlp-traces-endpoint", f"{url}/v1/traces"),
        "environment": {
            "OTEL_SERVICE_NAME": service, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            "OTEL_BSP_SCHEDULE_DELAY": "500",
        },
    }  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        made = Pair(stack, tmp_path_factory.mktemp("pair"))
        await made.connect(90.0)
        collector = await stack.enter_async_context(otlp_receiver())
        made.spans = collector.spans
        made.p = await made.server("prefill", ttl_s=TTL_S, **traced("kvtune-prefill", collector.url))
        made.d = await made.server("decode", ttl_s=TTL_S, **traced("kvtune-decode", collector.url))
        await asyncio.gather(made.p.ready(), made.d.ready())
        made.router = await made.start_router()
        # The first request of an engine compiles and shakes hands.
        await made.turn(text("warm", 200))
        made.plain = await made.server("prefill", ttl_s=TTL_S, bidirectional=False)
        yield made


@pytest.fixture(autouse=True)
def tell_the_logs_on_failure(request: pytest.FixtureRequest, pair: Pair) -> Any:
    yield
    if getattr(request.node, "failed", False):
        for server in (pair.p, pair.d):
            print(f"\n--- {server.config.role}: {tail(server.log)}")


async def clean(pair: Pair, prompt: Any) -> tuple[dict[str, float], dict[str, float]]:
    """P's and D's view of a prompt that nothing was read for."""
    p, d = await pair.turn(prompt)
    return top(p), top(d)


# --- proof ----------------------------------------------------------------------------------------------------------


async def test_an_honest_follow_up_is_read_whole_and_equals_a_clean_run(pair: Pair) -> None:
    prompt = await pair.tokens(pair.p, text("honest", 400))
    _, d = await pair.turn(prompt)
    reference = d["kv_transfer_params"]
    kept = reference["remote_num_tokens"]
    assert kept == len(prompt) + 23
    assert reference["kvtune"]["ttl_s"] == TTL_S
    # The answer's token ids are not known here; the prompt, extended, is provable to its last whole block.
    p2, d2 = await pair.turn([*prompt, 11, 12, 13], reference)
    decision, _, fetched = report(p2)
    assert decision == "fetch" and fetched == len(prompt) // 128 * 128
    want_p, want_d = await clean(pair, [*prompt, 11, 12, 13])
    assert difference(top(p2), want_p) < NOISE and difference(top(d2), want_d) < NOISE


@pytest.mark.parametrize(
    "case",
    [
        "foreign",
        "edited",
        "truncated",
        "replayed",
        "compacted",
        "forged",
        "stripped",
        "retokenised",
    ],
)
async def test_a_history_that_differs_never_changes_an_answer(pair: Pair, case: str) -> None:
    base = text(f"base {case}", 420)
    _, d = await pair.turn(base)
    reference = d["kv_transfer_params"]
    words = base.split()
    said = d["choices"][0]["text"]
    prompt = {
        "foreign": text(f"another {case}", 420),
        "edited": " ".join([*words[:300], "changed", *words[301:]]) + " go on",
        "truncated": " ".join(words[:280]),
        "replayed": base + " go on",
        "compacted": "summary " + " ".join(words[-200:]),
        "forged": text(f"forged {case}", 420),
        "stripped": base + said[len(said) // 2 :] + " go on",
        "retokenised": [*(await pair.tokens(pair.p, base))[:-1], *(await pair.tokens(pair.p, "x y z"))] + [5] * 20,
    }[case]
    if case == "replayed":
        await pair.turn(prompt, dict(reference))
    if case == "forged":
        # A stock peer's reference, or one that lost its proof on the way.
        reference = {key: value for key, value in reference.items() if key != "kvtune"}
    p, d = await pair.turn(prompt, dict(reference))
    decision, reason, fetched = report(p)
    want_p, want_d = await clean(pair, prompt)
    assert difference(top(p), want_p) < NOISE and difference(top(d), want_d) < NOISE, (decision, reason, fetched)
    again_p, again_d = await clean(pair, prompt)
    assert difference(again_p, want_p) < NOISE and difference(again_d, want_d) < NOISE, "the caches are clean"
    if case in ("foreign", "compacted"):
        assert (decision, reason, fetched) == ("recompute", "rewritten", 0)
    elif case == "forged":
        assert (decision, reason, fetched) == ("recompute", "unverified", 0)
    elif case == "replayed":
        assert (decision, reason, fetched) == ("recompute", "consumed", 0)
    elif case in ("edited", "truncated"):
        assert decision == "fetch" and 128 <= fetched <= 384 and fetched % 128 == 0


# --- faults ---------------------------------------------------------------------------------------------------------


async def test_an_expired_reference_is_recomputed(pair: Pair) -> None:
    prompt = text("expired", 300)
    _, d = await pair.turn(prompt, kvtune={"v": 1, "retain_s": 6.5})
    reference = d["kv_transfer_params"]
    assert reference["kvtune"]["ttl_s"] == 6.5
    before = await pair.values(pair.p.url, "kvtune_kv_reads_declined_total")
    lapsed = await pair.values(pair.d.url, "kvtune_retentions_ended_total", end="lapsed")
    await asyncio.sleep(2.0)
    p, _ = await pair.turn(prompt + " go on", reference)
    assert report(p) == ("recompute", "expired", 0)
    await pair.settles(pair.p.url, "kvtune_kv_reads_declined_total", before + 1)
    await pair.settles(pair.d.url, "kvtune_retentions_ended_total", lapsed + 1, end="lapsed")
    await pair.rests(pair.p)


async def test_a_handshake_that_times_out_is_recomputed(pair: Pair) -> None:
    prompt = text("handshake", 300)
    _, d = await pair.turn(prompt)
    # As if D had come back under another name, and then did not answer.
    asleep = {**d["kv_transfer_params"], "remote_engine_id": "someone-else"}
    os.killpg(pair.d.child.pid, signal.SIGSTOP)
    try:
        p = await pair.post(pair.p, prompt=prompt + " go on", max_tokens=1, kv_transfer_params=asleep)
    finally:
        os.killpg(pair.d.child.pid, signal.SIGCONT)
    assert report(p) == ("recompute", "read_failed", 0)
    await pair.rests(pair.p)


async def test_nothing_is_retained_that_nobody_wants(pair: Pair) -> None:
    before = await pair.values(pair.d.url, "kvtune_retentions_total")
    _, d = await pair.turn(text("unwanted", 200), kvtune={"v": 1, "retain_s": 0})
    assert d["kv_transfer_params"] is None
    await pair.settles(pair.d.url, "kvtune_retentions_missed_total", 1.0, reason="unwanted")
    assert await pair.values(pair.d.url, "kvtune_retentions_total") == before


async def test_a_read_of_a_reference_to_nowhere_is_recomputed(pair: Pair) -> None:
    prompt = text("nowhere", 300)
    _, d = await pair.turn(prompt)
    lost = {**d["kv_transfer_params"], "remote_engine_id": "nobody", "remote_port": free_port()}
    p, _ = await pair.turn(prompt + " go on", lost)
    assert report(p) == ("recompute", "read_failed", 0)
    await pair.rests(pair.p)


# --- through the router ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("api", ["chat", "completions"])
async def test_three_turns_through_the_router(pair: Pair, api: str, stream: bool) -> None:
    client = pair.client()
    outcomes, content = [], text(f"{api} {stream}", 300)
    messages = [{"role": "user", "content": content}]
    for _ in range(3):
        if api == "chat":
            raw = await client.chat.completions.with_raw_response.create(
                model="tiny", messages=messages, max_tokens=16, stream=stream, temperature=0  # type: ignore[arg-type]
            )  # fmt: skip
        else:
            raw = await client.completions.with_raw_response.create(
                model="tiny", prompt=content, max_tokens=16, stream=stream, temperature=0
            )
        outcomes.append(raw.headers["x-kvtune-outcome"])
        answer: Any = raw.parse()
        if stream:
            said = ""
            async for chunk in answer:
                assert "kv_transfer_params" not in (chunk.model_extra or {})
                for choice in chunk.choices:
                    said += (choice.delta.content if api == "chat" else choice.text) or ""
        else:
            assert "kv_transfer_params" not in (answer.model_extra or {})
            said = answer.choices[0].message.content if api == "chat" else answer.choices[0].text
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]
        content += said + " go on"
    assert outcomes == ["first", "hit", "hit"]


async def test_sixteen_conversations_at_once(pair: Pair) -> None:
    client = pair.client()

    async def converse(number: int) -> list[str]:
        messages = [{"role": "user", "content": text(f"many {number}", 200)}]
        outcomes = []
        for _ in range(2):
            raw = await client.chat.completions.with_raw_response.create(
                model="tiny", messages=messages, max_tokens=8, temperature=0,  # type: ignore[arg-type]
                extra_headers={"X-Session-ID": f"many-{number}"},
            )  # fmt: skip
            outcomes.append(raw.headers["x-kvtune-outcome"])
            messages += [
                {"role": "assistant", "content": raw.parse().choices[0].message.content or ""},
                {"role": "user", "content": "go on"},
            ]
        return outcomes

    found = await asyncio.gather(*(converse(number) for number in range(16)))
    assert all(outcomes == ["first", "hit"] for outcomes in found), found
    assert await pair.values(pair.d.url, "kvtune_kv_late_notifications_total") == 0


async def test_a_client_that_leaves_mid_stream_leaves_nothing_behind(pair: Pair) -> None:
    client = pair.client()
    stream = await client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": text("leaves", 200)}], max_tokens=2000, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    async for _ in stream:
        break
    await stream.close()
    await pair.settles(pair.d.url, "vllm:num_requests_running", 0.0)
    await pair.rests(pair.p)


async def test_a_stop_string_ends_without_a_reference_and_is_booked(pair: Pair) -> None:
    client = pair.client()
    messages = [{"role": "user", "content": text("stops", 200)}]
    headers = {"X-Session-ID": "stops"}
    missed = await pair.values(pair.d.url, "kvtune_retentions_missed_total", reason="aborted")
    for wanted in ("first", "absent"):
        raw = await client.chat.completions.with_raw_response.create(
            model="tiny", messages=messages, max_tokens=64, stop=["e", "a", "i", "o"], temperature=0,  # type: ignore[arg-type]
            extra_headers=headers, extra_body={"ignore_eos": True},
        )  # fmt: skip
        assert raw.headers["x-kvtune-outcome"] == wanted
        assert raw.parse().choices[0].finish_reason == "stop"
    await pair.settles(pair.d.url, "kvtune_retentions_missed_total", missed + 2, reason="aborted")


async def test_a_restarted_router_knows_nothing_and_serves_all_the_same(pair: Pair) -> None:
    await pair.router.stop()
    pair.router = await pair.start_router()
    client = pair.client()
    raw = await client.chat.completions.with_raw_response.create(
        model="tiny", messages=[{"role": "user", "content": text("again", 100)}], max_tokens=8,
        extra_headers={"X-Session-ID": "many-1"},
    )  # fmt: skip
    assert raw.headers["x-kvtune-outcome"] == "first"


async def test_the_read_and_the_decision_are_spans_of_the_turns_trace(pair: Pair) -> None:
    client = pair.client()
    trace = f"{random.getrandbits(128):032x}"
    messages = [{"role": "user", "content": text("traced", 300)}]
    for number in range(2):
        raw = await client.chat.completions.with_raw_response.create(
            model="tiny", messages=messages, max_tokens=8, temperature=0,  # type: ignore[arg-type]
            extra_headers={"X-Session-ID": "traced", "traceparent": f"00-{trace}-{number + 1:016x}-01"},
        )  # fmt: skip
        messages.append({"role": "assistant", "content": raw.parse().choices[0].message.content or ""})
        messages.append({"role": "user", "content": "go on"})
    wanted = {"kvtune.kv.decision": 2, "kvtune.kv.read": 3, "llm_request": 4}
    deadline = time.monotonic() + 20
    while True:
        mine = [span for span in pair.spans if span["trace"] == trace]
        found = {name: sum(span["name"] == name for span in mine) for name in wanted}
        if found == wanted:
            break
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.3)
    back = [s for s in mine if s["name"] == "kvtune.kv.read" and s["attributes"]["kvtune.kv.direction"] == "d2p"]
    assert len(back) == 1 and back[0]["attributes"]["kvtune.kv.tokens"] > 128
    assert back[0]["service"] == "kvtune-prefill"
    decisions = [s["attributes"]["kvtune.decision"] for s in mine if s["name"] == "kvtune.kv.decision"]
    assert sorted(decisions) == ["fetch", "recompute"]


async def test_stock_log_lines_and_series_still_work(pair: Pair) -> None:
    assert await pair.values(pair.p.url, "vllm:nixl_xfer_time_seconds_count") >= 4
    assert await pair.values(pair.d.url, "vllm:nixl_xfer_time_seconds_count") >= 4
    deadline = time.monotonic() + 25
    while "KV Transfer metrics: Num successful transfers=" not in pair.p.log.read_text(errors="replace"):
        assert time.monotonic() < deadline, "no KV Transfer metrics line"
        await asyncio.sleep(1.0)


async def test_the_books_of_both_sides_agree(pair: Pair) -> None:
    reads = await pair.values(pair.p.url, "kvtune_kv_reads_total", direction="d2p")
    assert reads == await pair.values(pair.p.url, "kvtune_decisions_total", decision="fetch")
    # One reader had lost the reference's proof, and could not tell D that it gave it back unread.
    await pair.settles(pair.d.url, "kvtune_retentions_ended_total", reads + 1, end="read")
    started = await pair.values(pair.d.url, "kvtune_retentions_total")
    ended = await pair.values(pair.d.url, "kvtune_retentions_ended_total")
    assert started == ended + await pair.values(pair.d.url, "kvtune_retained_requests")


CORE = {
    "Follow-up turns reused", "Turns by outcome", "Prompt tokens fetched", "KV reads", "KV bytes", "Wait for remote KV",
    "Tokens retained", "Share of the KV pool", "Engines up", "Engine settings in force", "Versions",
}  # fmt: skip
"""Panels that a few reused turns must fill. Others wait for a lost turn, a restart, advice, a crossing, or a day."""


async def test_the_boards_are_answered_by_a_real_pair(pair: Pair, prometheuses: Any, tmp_path: Path) -> None:
    """Every query of every board, as Grafana would send it, against a Prometheus that scrapes router and engines."""
    rules = tmp_path / RECORDING_FILE
    quick = {"windows": {"scrape": "2s", "evaluation": "4s", "slow_evaluation": "8s"}}
    rules.write_text(
        render(config_from({**quick, "advice": {"cost_observations": 3, "turn_ends": 3}}), "prometheus")[RECORDING_FILE]
    )
    prometheus = await prometheuses.start(
        {
            "router": pair.url("metrics").removeprefix("http://").removesuffix("/metrics"),
            "prefill": pair.p.url.removeprefix("http://"),
            "decode": pair.d.url.removeprefix("http://"),
        },
        rules=[rules],
        every="2s",
    )
    await prometheus.scraped_often(4)
    client = pair.client()

    async def converse(name: str) -> None:
        messages: list[Any] = []
        for turn in range(4):
            messages.append({"role": "user", "content": text(f"board {name} {turn}", 150 + 60 * turn)})
            answer = await client.chat.completions.create(
                model="tiny", messages=messages, max_tokens=12, temperature=0, extra_headers={"X-Session-ID": name}
            )
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
            await asyncio.sleep(4.0)

    await asyncio.gather(*(converse(f"board-{number}") for number in range(4)))
    await prometheus.scraped_since(time.time() + 20)
    end = math.ceil(time.time() / 30) * 30.0
    asked = Asked(prometheus.url, scrape_s=2.0)
    answers = [
        answer
        for board in load_boards(BOARDS)
        for answer in await asyncio.to_thread(run_board, board, asked, Span(end - 900, end))
    ]
    print("\n" + matrix(answers))
    wrong = [a for a in answers if a.verdict in ("error", "NaN") or a.warnings]
    assert not wrong, "\n" + matrix(wrong)
    filled = {a.where for a in answers if a.verdict == "ok"}
    assert filled >= CORE, CORE - filled
    assert len(filled) > 60, sorted(filled)
    read = await prometheus.value('sum(kvtune_kv_reads_total{direction="d2p"})')
    assert read is not None and read >= 4, "the series are of turns that were really read back"


async def test_a_prefill_that_is_not_bidirectional_computes_and_hangs_never(pair: Pair) -> None:
    await pair.plain.ready()
    prompt = text("one way", 300)
    _, d = await pair.turn(prompt)
    p = await pair.post(pair.plain, prompt=prompt + " go on", max_tokens=1, kv_transfer_params=d["kv_transfer_params"])
    assert report(p) == ("recompute", "disabled", 0)
    await pair.rests(pair.plain)
    await pair.plain.stop()


async def test_decode_that_is_killed_and_comes_back(pair: Pair) -> None:
    client = pair.client()
    messages = [{"role": "user", "content": text("killed", 300)}]
    headers = {"X-Session-ID": "killed"}

    async def turn() -> str:
        raw = await client.chat.completions.with_raw_response.create(
            model="tiny", messages=messages, max_tokens=8, temperature=0, extra_headers=headers  # type: ignore[arg-type]
        )  # fmt: skip
        messages.append({"role": "assistant", "content": raw.parse().choices[0].message.content or ""})
        messages.append({"role": "user", "content": "go on"})
        return str(raw.headers["x-kvtune-outcome"])

    assert [await turn(), await turn()] == ["first", "hit"]
    config = pair.d.config
    await pair.d.kill()
    pair.d = await VllmServer.spawn(config, pair.work / "decode-again.log")
    pair.stack.push_async_callback(pair.d.stop)
    await pair.d.ready()
    for _ in range(100):
        async with pair.session.get(pair.url("ready") + "/ready") as answer:
            if answer.status == 200:
                break
        await asyncio.sleep(0.1)
    assert await turn() in ("engine_gone", "read_failed")
    assert await turn() == "hit"
    await pair.rests(pair.p)
