"""Every query of the dashboards, as Grafana would send it, against a real Prometheus that scrapes a real router and
simulated engines: idle, and under load."""

from __future__ import annotations

import asyncio
import math
import random
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
import pytest
import pytest_asyncio
from aiohttp import web

from kvtune_bench.load import LoadSettings, TurnRecord, replay, simulated_answer
from kvtune_bench.traces import Conversation, Plan, TraceTurn, plan
from kvtune_dashboards.config import RulesConfig, config_from
from kvtune_dashboards.execute import Answer, Prometheus, Span, matrix, run
from kvtune_dashboards.lint import queries
from kvtune_dashboards.rendering import load
from kvtune_dashboards.rules import RECORDING_FILE, render
from kvtune_telemetry.clock import SystemClock
from kvtune_telemetry.vocabulary import Outcome
from kvtune_tuning.export import Advice, write_export

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

BOARDS = Path(__file__).resolve().parents[2] / "dashboards" / "grafana"
TTL_S = 20.0
THRESHOLD = 600
POOL_TOKENS = 400_000
MODEL = "qwen3-32b"
LOAD_S = 35.0
CONVERSATIONS = 12
SCRAPE = "3s"
STEP_S = 30.0
"""The boards' least step, to which Grafana aligns a range."""

NEEDS_A_DAY = "compares with a day ago"
NEEDS_HOLDOUT = "nothing was held out"
MAY_BE_EMPTY: dict[tuple[str, str, str], str] = {
    ("kvtune-reuse", "Follow-up turns reused, over time", "B"): NEEDS_A_DAY,
    ("kvtune-reuse", "Held-out conversations, for comparison", "A"): NEEDS_HOLDOUT,
    ("kvtune-transfer", "Speed against a day ago", "A"): NEEDS_A_DAY,
    ("kvtune-transfer", "Speed of a read, and a day before", "B"): NEEDS_A_DAY,
    ("kvtune-transfer", "Speed against a day ago, over time", "A"): NEEDS_A_DAY,
    ("kvtune-fleet", "Settings that differ between engines", "A"): "all engines are set alike",
}
"""(board, panel, query) that need not have a series under load, and why."""
ADVICE = {
    "recommendations": [
        {"setting": "decoder_kv_blocks_ttl", "status": "change", "current": 20, "current_assumed": False,
         "recommended": 35, "interval": [25, 60]},
        {"setting": "kv_recompute_threshold", "status": "keep", "current": 600, "current_assumed": False,
         "recommended": 600, "interval": [64, 900]},
    ]
}  # fmt: skip
"""What `kvtune suggest` may say, as far as it becomes gauges."""
MARKS = {"annotation Alerts", "annotation Engine restarts", "annotation Setting changes"}
"""Annotations mark faults and changes; there are none."""


def config() -> RulesConfig:
    """Rules as quick as the load is short."""
    return config_from(
        {
            "windows": {"scrape": SCRAPE, "evaluation": "5s", "slow_evaluation": "10s"},
            "advice": {"cost_observations": 5, "turn_ends": 5},
        }
    )


def rules_file(directory: Path) -> Path:
    """The recording rules as Prometheus reads them."""
    path = directory / RECORDING_FILE
    path.write_text(render(config(), "prometheus")[RECORDING_FILE], encoding="utf-8")
    return path


def plans(seed: int) -> list[Plan]:
    """Conversations that grow by 200 to 3000 tokens a turn; some pause beyond the TTL, some rewrite their history."""
    rng = random.Random(seed)
    found = []
    for number in range(4 * CONVERSATIONS):
        turns = []
        prompt = rng.randrange(400, 2000)
        length = rng.randrange(3, 9)
        for turn in range(length):
            output = rng.randrange(4, 20)
            last = turn == length - 1
            gap = None if last else TTL_S - 2 if number % 3 == 0 and turn == 1 else rng.uniform(0.3, 3.0)
            kept = prompt + output if rng.random() > 0.125 else max(64, prompt // 2)
            turns.append(TraceTurn(prompt, output, gap, 0 if last else kept))
            prompt += output + rng.randrange(200, 3000)
        found.append(Conversation(number, tuple(turns)))
    return plan(found, context_limit=100_000)


@dataclass
class Shown:
    """The boards, and what Prometheus answered before any turn and after the load."""

    boards: list[dict[str, Any]]
    idle: list[Answer]
    loaded: list[Answer]
    turns: list[TurnRecord]
    url: str

    def value(self, board: str, panel: str, ref: str, side: list[Answer]) -> Answer:
        (found,) = (a for a in side if (a.board, a.where, a.ref) == (board, panel, ref))
        return found


def run_all(boards: list[dict[str, Any]], url: str) -> list[Answer]:
    # Grafana aligns the end of a range to the step, downwards: so that the last step is not missed, up here.
    end = math.ceil(time.time() / STEP_S) * STEP_S
    with_client = Prometheus(url, scrape_s=3.0)
    return [answer for board in boards for answer in run(board, with_client, Span(end - 900, end))]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shown(prometheuses: Any, processes: Any, tmp_path_factory: Any) -> Any:
    directory = tmp_path_factory.mktemp("dashboards")
    pool = ("--pool-tokens", str(POOL_TOKENS), "--ttl", f"{TTL_S:g}", "--threshold", str(THRESHOLD))
    _, prefill = await processes.engine("prefill", "--no-prefix-caching", *pool)
    decodes = [(await processes.engine("decode", *pool, name=f"decode-{number}"))[1] for number in (1, 2)]
    flags = [part for url in decodes for part in ("--decode", url)]
    routers = []
    for number in (1, 2):
        child = await processes.start(
            f"router-{number}", "router", "--port", "0", "--metrics-port", "0", "--prefill", prefill, *flags,
            "--ttl", f"{TTL_S:g}", "--outcome-header", "--explore", "0.05", "--log-format", "json",
        )  # fmt: skip
        routers.append(orjson.loads(child.ready))

    advice = directory / "advice.prom"

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=advice.read_text() if advice.exists() else "")

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        prometheus = await prometheuses.start(
            {
                "router": [urlsplit(router["metrics"]).netloc for router in routers],
                "prefill": urlsplit(prefill).netloc,
                "decode": [urlsplit(url).netloc for url in decodes],
                "suggest": f"127.0.0.1:{runner.addresses[0][1]}",
            },
            rules=[rules_file(directory)],
            every=SCRAPE,
        )
        await prometheus.scraped_often(4)
        boards = load(BOARDS)
        idle = await asyncio.to_thread(run_all, boards, prometheus.url)
        settings = LoadSettings(
            base_url=routers[0]["ready"], model=MODEL, concurrency=CONVERSATIONS, duration_s=LOAD_S, ramp_s=2.0,
            seed=7, mid_conversation=False, park_after_s=None, run="boards",
        )  # fmt: skip
        turns = await replay(plans(7), settings, clock=SystemClock(), expect=simulated_answer)
        # The load is too short for a real advice; this is how one is exposed.
        write_export(advice, Advice.of(ADVICE, time.time()))
        # Rules read what was scraped, and other rules: two more rounds of the slow ones.
        await prometheus.scraped_since(time.time() + 12)
        loaded = await asyncio.to_thread(run_all, boards, prometheus.url)
        yield Shown(boards, idle, loaded, turns, prometheus.url)
    finally:
        await runner.cleanup()


async def test_under_load_every_query_finds_something(shown: Shown) -> None:
    outcomes = {turn.outcome for turn in shown.turns}
    assert outcomes >= {Outcome.FIRST, Outcome.HIT, Outcome.EXPIRED, Outcome.REWRITTEN}, outcomes
    print("\n" + matrix(shown.loaded))
    wrong = [
        answer
        for answer in shown.loaded
        if answer.verdict != "ok"
        and not (answer.verdict == "empty" and (answer.board, answer.where, answer.ref) in MAY_BE_EMPTY)
        and not (answer.verdict == "empty" and answer.where in MARKS)
    ]
    assert not wrong, "\n" + matrix(wrong)
    assert not [answer for answer in shown.loaded if answer.warnings]


async def test_what_may_be_empty_exists_and_is_said_once(shown: Shown) -> None:
    there = {(answer.board, answer.where, answer.ref) for answer in shown.loaded}
    assert set(MAY_BE_EMPTY) <= there
    assert {answer.where for answer in shown.loaded if answer.where.startswith("annotation")} == MARKS


async def test_idle_nothing_errs_and_no_tile_is_nan(shown: Shown) -> None:
    print("\n" + matrix(shown.idle))
    wrong = [answer for answer in shown.idle if answer.verdict in ("error", "NaN")]
    assert not wrong, "\n" + matrix(wrong)
    # What counts is there from the start, at 0: the boards know these engines.
    for panel in ("Engines up", "Engines down", "Targets not scraped", "Settings that differ"):
        assert shown.value("kvtune-fleet", panel, "A", shown.idle).verdict == "ok", panel
    assert shown.value("kvtune-reuse", "Answers at risk", "A", shown.idle).verdict == "ok"


async def test_legends_name_labels_that_the_series_have(shown: Shown) -> None:
    answers = {(answer.board, answer.where, answer.ref): answer for answer in shown.loaded}
    for board in shown.boards:
        for query in queries(board):
            answer = answers[board["uid"], query.where, query.ref]
            if query.panel is None or not answer.series:
                continue
            named = set(re.findall(r"\{\{\s*(\w+)\s*\}\}", str(query.target.get("legendFormat"))))
            assert named <= answer.labels, (board["uid"], query.where, query.ref, named - answer.labels)


async def instant(url: str, expr: str) -> dict[tuple[str, ...], float]:
    data, error, _ = await asyncio.to_thread(Prometheus(url).get, "query", query=expr)
    assert not error, error
    return {tuple(row["metric"].values()): float(row["value"][1]) for row in data["result"]}


async def test_the_verdict_is_what_the_clients_saw(shown: Shown) -> None:
    """The first tile's number, from the turns as the load saw them."""
    meant = [
        turn
        for turn in shown.turns
        if turn.outcome not in (Outcome.FIRST, Outcome.NO_IDENTITY, Outcome.DISABLED, Outcome.ERROR)
    ]
    hits = sum(turn.outcome == Outcome.HIT for turn in meant)
    tile = shown.value("kvtune-reuse", "Follow-up turns reused", "A", shown.loaded)
    (share,) = (await instant(shown.url, tile.expr)).values()
    assert share == pytest.approx(hits / len(meant), rel=1e-6)

    away = shown.value("kvtune-fleet", "Targets not scraped", "A", shown.loaded)
    assert (await instant(shown.url, away.expr)) == {(): 0.0}
    up = shown.value("kvtune-fleet", "Engines up", "A", shown.loaded)
    # Two routers see the same engines: each counts once.
    assert (await instant(shown.url, up.expr)) == {("prefill",): 1.0, ("decode",): 2.0}
    threshold = shown.value("kvtune-transfer", "Threshold and crossing", "A", shown.loaded)
    assert (await instant(shown.url, threshold.expr)) == {(): THRESHOLD}
    ttl = shown.value("kvtune-retention", "TTL and advice", "A", shown.loaded)
    assert (await instant(shown.url, ttl.expr)) == {(): TTL_S}


async def test_a_broken_query_is_reported_as_such(shown: Shown) -> None:
    board = orjson.loads(orjson.dumps(shown.boards[0]))
    panel = next(panel for panel in board["panels"] if panel.get("targets"))
    panel["targets"][0]["expr"] = "sum(nothing_of_that_name)"
    panel["targets"].append({**panel["targets"][0], "refId": "Y", "expr": "0/0"})
    panel["targets"].append({**panel["targets"][0], "refId": "Z", "expr": "sum(up"})
    answers = await asyncio.to_thread(run_all, [board], shown.url)
    verdicts = {answer.ref: answer.verdict for answer in answers if answer.where == panel["title"]}
    assert (verdicts["A"], verdicts["Y"], verdicts["Z"]) == ("empty", "NaN", "error")
    (broken,) = (answer for answer in answers if answer.ref == "Z")
    assert "parse error" in broken.error
