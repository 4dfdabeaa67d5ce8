"""A real Prometheus server scrapes a real router and two simulated engines, all processes of their own in real time."""

from __future__ import annotations

import asyncio
import math
import random
import subprocess
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import jsonschema
import numpy as np
import orjson
import pytest
import pytest_asyncio
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from kvtune_bench.load import LoadSettings, TurnRecord, replay, simulated_answer
from kvtune_bench.traces import Conversation, Plan, TraceTurn, plan
from kvtune_telemetry.catalogue import CATALOGUE, Emitter, Metric, emitted_by
from kvtune_telemetry.clock import SystemClock
from kvtune_telemetry.vocabulary import Outcome
from kvtune_tuning.api import suggest_series
from kvtune_tuning.document import schema
from kvtune_tuning.prometheus import query_prometheus

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

TTL_S = 20.0
THRESHOLD = 96
POOL_TOKENS = 400_000
MODEL = "qwen3-32b"
LOAD_S = 32.0
CONVERSATIONS = 12
EMITTER_OF_JOB: dict[str, Emitter] = {"router": "router", "prefill": "connector", "decode": "connector"}


def plans(seed: int, *, late: bool = True) -> list[Plan]:
    """Conversations that grow by 200 to 3000 tokens a turn and pause for 0.3 to 3 s, and some (`late`) beyond the TTL.

    About one follow-up in eight rewrites the end of its history.
    """
    rng = random.Random(seed)
    found = []
    for number in range(4 * CONVERSATIONS):
        turns = []
        prompt = rng.randrange(400, 2000)
        length = rng.randrange(3, 9)
        for turn in range(length):
            output = rng.randrange(4, 20)
            last = turn == length - 1
            too_late = late and number % 3 == 0 and turn == 1
            gap = None if last else TTL_S - 2 if too_late else rng.uniform(0.3, 3.0)
            kept = prompt + output if rng.random() > 0.125 else max(64, prompt // 2)
            turns.append(TraceTurn(prompt, output, gap, 0 if last else kept))
            prompt += output + rng.randrange(200, 3000)
        found.append(Conversation(number, tuple(turns)))
    return plan(found, context_limit=100_000)


@dataclass
class World:
    """What runs, and what was seen of the load that it served."""

    prometheus: Any
    processes: Any
    receiver: Any
    targets: dict[str, str]
    """Address (`host:port`) of each job's exposition."""
    metrics: dict[str, str]
    """URL of each job's exposition."""
    router: str
    engines: dict[str, Any]
    began_s: float
    """Unix time before the load."""
    turns: list[TurnRecord]
    snapshot: Path
    recorded: Any

    async def play(self, seconds: float, seed: int, run: str, *, late: bool = True) -> list[TurnRecord]:
        settings = LoadSettings(
            base_url=self.router, model=MODEL, concurrency=CONVERSATIONS, duration_s=seconds, ramp_s=2.0, seed=seed,
            mid_conversation=False, park_after_s=None, run=run,
        )  # fmt: skip
        return await replay(plans(seed, late=late), settings, clock=SystemClock(), expect=simulated_answer)

    def window(self) -> str:
        """A window for `suggest` that begins before the load, however long the command takes to start.

        Nothing was there to scrape before.
        """
        return f"{max(60, math.ceil(time.time() - self.began_s) + 30)}s"

    async def suggest(self, *source: str) -> dict[str, Any]:
        ran = await self.processes.run("suggest", *source, "--format", "json")
        assert ran.code in (0, 3), (ran.out, ran.err)
        document: dict[str, Any] = ran.document
        jsonschema.validate(document, schema())
        assert "error" not in document
        return document


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(prometheuses: Any, processes: Any, otlp: Any, tmp_path_factory: Any) -> World:
    receiver = await otlp()
    pool = ("--pool-tokens", str(POOL_TOKENS), "--ttl", f"{TTL_S:g}", "--threshold", str(THRESHOLD))
    # Without a prefix cache of its own prefill reads every history back.
    prefill, prefill_url = await processes.engine("prefill", "--no-prefix-caching", *pool)
    decode, decode_url = await processes.engine("decode", *pool)
    router = await processes.start(
        "router", "router", "--port", "0", "--metrics-port", "0", "--prefill", prefill_url, "--decode", decode_url,
        "--ttl", f"{TTL_S:g}", "--outcome-header", "--log-format", "json", env=receiver.environment(),
    )  # fmt: skip
    announced = orjson.loads(router.ready)
    metrics = {
        "router": announced["metrics"],
        "prefill": f"{prefill_url}/metrics",
        "decode": f"{decode_url}/metrics",
    }
    targets = {job: urlsplit(url).netloc for job, url in metrics.items()}
    prometheus = await prometheuses.start(targets)
    snapshot = tmp_path_factory.mktemp("snapshot")

    recorder = await processes.record(snapshot, *metrics.values())
    # A first sample well before the load, more than a step of the query earlier: increments are complete.
    await prometheus.scraped_often(4)
    engines = {"prefill": prefill, "decode": decode}
    world = World(
        prometheus, processes, receiver, targets, metrics, announced["ready"], engines, time.time(), [], snapshot, None
    )
    world.turns = await world.play(LOAD_S, 7, "main")
    await prometheus.scraped_since(time.time())
    world.recorded = await recorder.finish()
    return world


async def test_the_load_was_worth_it(world: World) -> None:
    assert not [turn for turn in world.turns if not turn.answered]
    assert all(turn.correct for turn in world.turns)
    outcomes = Counter(turn.outcome for turn in world.turns)
    assert outcomes["hit"] >= 20 and outcomes["first"] >= CONVERSATIONS and outcomes["expired"] >= 1, outcomes
    assert world.recorded.code == 0 and not any(world.recorded.document["failures"].values())


async def test_every_catalogued_series_is_there_with_its_type_and_labels(world: World) -> None:
    names = set(await world.prometheus.get("label/__name__/values"))
    exported = [metric for metric in CATALOGUE if metric.emitter in EMITTER_OF_JOB.values()]
    wanted = {name for metric in exported for name in metric.sample_names()}
    assert {name for name in names if name.startswith("kvtune_")} == wanted

    metadata = await world.prometheus.get("metadata")
    for metric in exported:
        # OpenMetrics names a counter's family without _total.
        family = metric.name.removesuffix("_total") if metric.kind == "counter" else metric.name
        stated = {(entry["type"], entry["help"]) for entry in metadata.get(family, ())}
        assert stated == {(metric.as_dict()["type"], metric.help)}, family

    by_sample: dict[str, Metric] = {name: metric for metric in CATALOGUE for name in metric.sample_names()}
    for job, emitter in EMITTER_OF_JOB.items():
        series = await world.prometheus.get("series", **{"match[]": f'{{__name__=~"kvtune_.+",job="{job}"}}'})
        assert {one["__name__"] for one in series} == {
            name for metric in emitted_by(emitter) for name in metric.sample_names()
        }
        seen: dict[str, set[tuple[str, ...]]] = {}
        for one in series:
            metric = by_sample[one["__name__"]]
            le = {"le"} if one["__name__"].endswith("_bucket") else set()
            assert set(one) == {"__name__", "job", "instance", *metric.label_names(), *le}, one
            assert one["instance"] == world.targets[job]
            if emitter == "connector":
                assert (one["model_name"], one["role"]) == (MODEL, job)
            seen.setdefault(metric.name, set()).add(tuple(one[label.name] for label in metric.labels))
        for metric in emitted_by(emitter):
            if any(label.values is None for label in metric.labels):
                assert seen[metric.name]
            else:
                assert seen[metric.name] == set(metric.initial()), "all label sets from the start, and no other"


async def test_every_scrape_is_clean(world: World, wait_until: Any) -> None:
    async def all_up() -> bool:
        # A scrape that a busy machine holds up for a second is no fault; one that cannot be read stays one.
        return bool(await world.prometheus.value("sum(up)") == len(EMITTER_OF_JOB))

    await wait_until(all_up, "all targets up")
    active = (await world.prometheus.get("targets", state="active"))["activeTargets"]
    assert {target["labels"]["job"]: (target["health"], target["lastError"]) for target in active} == dict.fromkeys(
        EMITTER_OF_JOB, ("up", "")
    )
    troubles = (
        "prometheus_target_scrapes_exceeded_sample_limit_total",
        "prometheus_target_scrapes_exemplar_out_of_order_total",
        "prometheus_target_scrapes_sample_duplicate_timestamp_total",
        "prometheus_target_scrapes_sample_out_of_bounds_total",
        "prometheus_target_scrapes_sample_out_of_order_total",
    )
    own = {
        name: float(value)
        for name, _, value in (line.rpartition(" ") for line in (await world.prometheus.own_metrics()).splitlines())
        if name in troubles
    }
    assert own == dict.fromkeys(troubles, 0.0)
    complaints = [line for line in world.prometheus.log.read_text().splitlines() if "level=error" in line.lower()]
    assert not complaints
    assert "error" not in world.processes.log("router").read_text().lower()


def returned(turns: list[TurnRecord]) -> int:
    """Turns that the router could know as a return of their conversation.

    One that is known by its content only, and has rewritten that, is another conversation.
    """
    again = [turn for turn in turns if turn.gap_s is not None]
    unknown = [turn for turn in again if turn.outcome == Outcome.FIRST]
    assert all(turn.rewritten and not turn.session for turn in unknown)
    return len(again) - len(unknown)


def settings_of(evidence: dict[str, Any]) -> dict[str, Any]:
    return {name: stated for name, stated in evidence["settings"].items() if not stated["assumed"]}


EXACT = (
    "turns", "turns_by_outcome", "conversations", "conversations_new", "gaps", "turn_ends", "turns_given_up",
    "tokens_per_turn_end", "settings", "pool_tokens", "decode_engines", "models", "restarts", "preemptions",
    "cost_observations", "ttft_followup_mean_s", "useful_share", "waited_for_kv", "extrapolated_before_window",
)  # fmt: skip
"""Facts that depend on counters and settings only. The load lies inside the window with idle time on both sides, so
that no increment falls between a scrape and the window's edge: no tolerance."""


async def test_prometheus_and_snapshots_give_the_evidence_that_the_load_gave(world: World) -> None:
    document = await world.suggest("--prometheus", world.prometheus.url, "--window", world.window())
    direct = await world.suggest("--snapshot", str(world.snapshot))
    evidence, recorded = document["evidence"], direct["evidence"]
    assert {name: evidence[name] for name in EXACT} == {name: recorded[name] for name in EXACT}

    turns = world.turns
    fetches = evidence["cost_observations"]["fetch"]
    hits = sum(turn.outcome == Outcome.HIT for turn in turns)
    assert evidence["turns"] == len(turns)
    assert evidence["turns_by_outcome"] == Counter(turn.outcome for turn in turns)
    assert evidence["gaps"] == returned(turns)
    assert evidence["turn_ends"] == len(turns)
    assert evidence["conversations"] == evidence["conversations_new"] == len(turns) - returned(turns)
    assert 0 < fetches <= hits
    assert settings_of(evidence) == {
        "decoder_kv_blocks_ttl": {"value": TTL_S, "assumed": False},
        "kv_recompute_threshold": {"value": THRESHOLD, "assumed": False},
        "expiry_margin_seconds": {"value": 5, "assumed": False},
    }
    assert evidence["pool_tokens"] == POOL_TOKENS and evidence["decode_engines"] == 1
    found = {role: targets for role, targets in evidence["targets"].items() if targets}
    assert found == {job: [f"{job}/{target}"] for job, target in world.targets.items()}
    assert evidence["restarts"] == {} and evidence["models"] == [MODEL]
    assert evidence["samples_dropped"] == 0
    assert evidence["scrape_interval_s"] == pytest.approx(1.0, abs=0.1)
    ttft = [turn.ttft_s for turn in turns if turn.outcome in followup_outcomes() and turn.ttft_s is not None]
    # The router's clock starts later and stops earlier than the client's.
    assert 0 < evidence["ttft_followup_mean_s"] <= sum(ttft) / len(ttft)

    def advice(document: dict[str, Any]) -> list[tuple[Any, ...]]:
        return [(r["setting"], r["status"], r["reason_code"], r["current"]) for r in document["recommendations"]]

    assert advice(document) == advice(direct)


def followup_outcomes() -> set[str]:
    return {outcome.value for outcome in Outcome} - {Outcome.FIRST, Outcome.NO_IDENTITY, Outcome.ERROR}


async def test_a_watch_serves_and_writes_what_suggest_says(world: World, wait_until: Any, tmp_path: Path) -> None:
    window = world.window()
    document = await world.suggest("--prometheus", world.prometheus.url, "--window", window)
    file = tmp_path / "kvtune.prom"
    watch = await world.processes.start(
        "watch", "suggest", "--watch", "--prometheus", world.prometheus.url, "--window", window, "--port", "0",
        "--export", str(file),
    )  # fmt: skip
    address = orjson.loads(watch.ready)["metrics"]

    async def written() -> bool:
        return file.exists()

    await wait_until(written, "the first round")
    async with aiohttp.ClientSession() as session, session.get(address) as answer:
        served = await answer.text()
    assert served == file.read_text()
    values = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(served)
        for sample in family.samples
    }
    assert values["kvtune_suggest_up",] == 1
    for one in document["recommendations"]:
        assert values["kvtune_suggest_status", one["setting"], one["status"]] == 1
        assert values["kvtune_suggest_current", one["setting"]] == one["current"]
        assert ("kvtune_suggest_recommended", one["setting"]) in values or one["recommended"] is None


async def test_an_exemplar_leads_to_a_trace_that_was_received(world: World) -> None:
    for name in ("kvtune_turn_ttft_seconds_bucket", "kvtune_turn_duration_seconds_bucket"):
        rows = await world.prometheus.get(
            "query_exemplars", query=name, start=f"{world.began_s:.3f}", end=f"{time.time():.3f}"
        )
        found = [(row["seriesLabels"], exemplar) for row in rows for exemplar in row["exemplars"]]
        assert found, name
        for series, exemplar in found:
            spans = await world.receiver.whole_trace(exemplar["labels"]["trace_id"])
            assert set(exemplar["labels"]) == {"trace_id"}
            turn = spans["kvtune.turn"].attributes
            assert turn["kvtune.turn"] == series["turn"]
            if name == "kvtune_turn_ttft_seconds_bucket":
                assert turn["kvtune.outcome"] == series["outcome"]
                assert turn["kvtune.ttft_s"] == pytest.approx(float(exemplar["value"]))
    traces = [span.trace_id for span in world.receiver.spans if span.name == "kvtune.turn"]
    assert len(traces) == len(set(traces)) >= len(world.turns), "one trace a turn"


async def test_a_restarted_engine_is_seen_and_loses_no_turn(world: World, tmp_path: Path) -> None:
    began_s = time.time()
    await world.prometheus.scraped_since(began_s)
    recorder = await world.processes.record(tmp_path, *world.metrics.values())
    turns = await world.play(6.0, 11, "before", late=False)
    await asyncio.gather(world.prometheus.scraped_since(time.time()), recorder.scraped_since(time.time()))
    assert await world.engines["prefill"].stop() == 0
    port = world.targets["prefill"].split(":")[1]
    world.engines["prefill"], _ = await world.processes.engine(
        "prefill", "--no-prefix-caching", "--pool-tokens", str(POOL_TOKENS), "--ttl", f"{TTL_S:g}",
        "--threshold", str(THRESHOLD), "--port", port, name="prefill-again",
    )  # fmt: skip
    await asyncio.gather(world.prometheus.scraped_since(time.time()), recorder.scraped_since(time.time()))
    turns += await world.play(6.0, 13, "after", late=False)
    await world.prometheus.scraped_since(time.time())
    end_s = time.time()
    # Not by the command, whose window ends when it has started: this one must begin after the other loads.
    series, _ = await asyncio.to_thread(
        query_prometheus, world.prometheus.url, window_s=end_s - began_s, end_unix_s=end_s
    )
    document = suggest_series(series, {"kind": "prometheus", "where": [world.prometheus.url]})
    jsonschema.validate(document, schema())
    await recorder.finish()
    direct = await world.suggest("--snapshot", str(tmp_path))
    assert not [turn for turn in turns if not turn.answered]
    evidence, recorded = document["evidence"], direct["evidence"]
    assert list(evidence["restarts"].items()) == [(f"prefill/{world.targets['prefill']}", 1)]
    assert list(recorded["restarts"].values()) == [1]
    assert any(check["code"] == "restarts" for check in document["checks"])
    exact = ("turns", "turns_by_outcome", "gaps", "turn_ends", "conversations_new", "cost_observations", "settings")
    assert {name: evidence[name] for name in exact} == {name: recorded[name] for name in exact}
    assert evidence["turns"] == len(turns) and evidence["gaps"] == returned(turns)


async def test_without_a_scheme_and_explained(world: World) -> None:
    address = world.prometheus.url.removeprefix("http://")
    document = await world.suggest("--prometheus", address, "--window", "60s", "--explain")
    queries = document["explain"]["queries"]
    assert any("kvtune_turns_total" in query and "vllm:kv_cache_usage_perc" in query for query in queries)
    for query in queries:
        await world.prometheus.get("query", query=query)


async def failure(processes: Any, url: str, code: int = 1) -> dict[str, Any]:
    ran = await processes.run("suggest", "--prometheus", url, "--window", "60s", "--format", "json")
    assert ran.code == code, (ran.out, ran.err)
    document = ran.document
    jsonschema.validate(document, schema())
    assert "Traceback" not in ran.err
    assert "recommendations" not in document
    error: dict[str, Any] = document["error"]
    return error


async def test_what_is_not_a_prometheus_is_named(world: World, processes: Any) -> None:
    async def hello(_: web.Request) -> web.Response:
        return web.Response(text="<html>hello</html>", content_type="text/html")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", hello)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        page = f"http://127.0.0.1:{runner.addresses[0][1]}"
        error = await failure(processes, page)
        assert error["code"] == "bad_answer" and page in error["message"]
    finally:
        await runner.cleanup()
    error = await failure(processes, page)
    assert error["code"] == "unreachable" and page in error["message"]
    error = await failure(processes, world.router)
    assert error["code"] == "http_status" and "404" in error["message"]
    error = await failure(processes, "ftp://127.0.0.1:9090", code=2)
    assert error["code"] == "bad_url"


async def test_an_empty_prometheus_has_nothing_to_say(prometheuses: Any, processes: Any) -> None:
    empty = await prometheuses.start({})
    error = await failure(processes, empty.url, code=3)
    assert error["code"] == "no_series" and "none of the needed series" in error["message"]


async def test_what_prometheus_refuses_is_said_in_its_words(world: World, prometheuses: Any, processes: Any) -> None:
    strict = await prometheuses.start(
        {"router": world.targets["router"]}, "--query.max-samples=20", prefix="some/where"
    )
    await strict.scraped_often(2)
    error = await failure(processes, strict.url)
    assert error["code"] == "prometheus_error" and "too many samples" in error["message"]


async def test_without_engines_nothing_is_advised(world: World, prometheuses: Any, processes: Any) -> None:
    alone = await prometheuses.start({"router": world.targets["router"]})
    await alone.scraped_often(3)
    ran = await processes.run("suggest", "--prometheus", alone.url, "--window", "60s", "--format", "json")
    assert ran.code == 3, (ran.out, ran.err)
    document = ran.document
    jsonschema.validate(document, schema())
    assert {r["status"] for r in document["recommendations"]} == {"insufficient"}
    assert {check["code"] for check in document["checks"] if check["level"] == "error"} >= {"no_prefill", "no_decode"}
    assert document["evidence"]["turns"] == 0 and document["evidence"]["targets"]["router"]


# --- a month ---------------------------------------------------------------------------------------------------------

DAY = 1440
"""Minutes."""
DAYS = 30


@dataclass(frozen=True)
class Life:
    """A process that is scraped each minute: what it counts, minute by minute, from zero after each restart."""

    instance: str
    begin: int
    end: int
    restarts: tuple[int, ...] = ()
    told: bool = False
    """It says when it started."""

    def counted(self, rng: np.random.Generator, most: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Per minute; nothing in the first hours of the window and in the minutes around a beginning or an end."""
        counts = rng.integers(0, most, self.end - self.begin)
        for quiet in (DAY, self.begin, self.end, *self.restarts):
            margin = 240 if quiet == DAY else 3
            counts[max(0, quiet - margin - self.begin) : max(0, quiet + margin - self.begin)] = 0
        return counts

    def exposed(self, counts: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The counter at each minute."""
        values = np.cumsum(counts)
        for restart in self.restarts:
            values[restart - self.begin :] -= values[restart - self.begin]
        return values


LIVES = {
    "router": (Life("router:9400", 0, (DAYS + 1) * DAY, (9 * DAY + 700, 9 * DAY + 730, 21 * DAY + 150)),),
    "decode": (
        Life("d-old:8200", 0, 12 * DAY + 77, (5 * DAY + 30,)),
        Life("d-new:8200", 12 * DAY + 41, (DAYS + 1) * DAY, (20 * DAY + 11,), told=True),
        Life("d-brief:8200", 17 * DAY + 5, 17 * DAY + 35),
    ),
}
"""Minutes since a day before the window. The router restarts twice within an hour, and during an outage of the better
one of the two Prometheus servers."""
OUTAGES = {"a": (21 * DAY, 21 * DAY + 300), "b": (25 * DAY, 25 * DAY + 600)}


def backfill(text: Path, end_s: int) -> dict[str, int]:
    """Write a month as OpenMetrics, by two Prometheus servers; returns what was counted inside it, by series."""
    rng = np.random.default_rng(7)
    began_s = end_s - (DAYS + 1) * DAY * 60
    counted = {"turns": 0, "tokens": 0}
    with text.open("w") as out:
        for job, lives in LIVES.items():
            for life in lives:
                minutes = np.arange(life.begin, life.end)
                where = f'job="{job}",instance="{life.instance}"'
                series: list[tuple[str, Any]] = []
                for k in range(3):
                    counts = life.counted(rng, 5 if job == "router" else 9000)
                    inside = int(counts[max(0, DAY - life.begin) :].sum())
                    counted["turns" if job == "router" else "tokens"] += inside
                    if job == "router":
                        name = f'kvtune_turns_total{{outcome="{("first", "hit", "expired")[k]}",{where}'
                    else:
                        end = ("read", "lapsed", "released")[k]
                        own = 'model_name="m",engine="0",role="decode"'
                        name = f'kvtune_retention_tokens_total{{end="{end}",{own},{where}'
                    series.append((name, life.exposed(counts)))
                series.append((f'kvtune_router_setting{{setting="x",{where}', np.full(len(minutes), 480)))
                if life.told:
                    started = began_s + 60 * life.begin - 20
                    series.append((f"process_start_time_seconds{{{where}", np.full(len(minutes), started)))
                for replica, (down, up) in OUTAGES.items():
                    lag = 13 if replica == "b" else 0
                    for name, values in series:
                        label = f'{name},prometheus_replica="{replica}"}}'
                        for minute, value in zip(minutes.tolist(), values.tolist(), strict=True):
                            if not down <= minute < up:
                                out.write(f"{label} {value} {began_s + 60 * minute + lag}\n")
        out.write("# EOF\n")
    return counted


async def test_a_month_with_restarts_rolling_pods_and_two_replicas_is_counted_exactly(
    prometheuses: Any, processes: Any, tmp_path: Path
) -> None:
    end_s = int(time.time()) // 60 * 60
    counted = await asyncio.to_thread(backfill, tmp_path / "month.om", end_s)
    made = await asyncio.to_thread(
        subprocess.run,
        ["promtool", "tsdb", "create-blocks-from", "--max-block-duration=486h", "openmetrics", "month.om", "blocks"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    (tmp_path / "month.om").unlink()
    server = await prometheuses.start({}, "--storage.tsdb.retention.time=1y", blocks=tmp_path / "blocks")
    series, queries = await asyncio.to_thread(query_prometheus, server.url, window_s=60 * DAYS * DAY)
    assert sorted(series.scrapes) == [
        "decode/d-brief:8200", "decode/d-new:8200", "decode/d-old:8200", "router/router:9400",
    ]  # fmt: skip
    assert series.increase("kvtune_turns_total") == counted["turns"]
    assert series.increase("kvtune_retention_tokens_total") == counted["tokens"]
    assert any("more than one Prometheus (label prometheus_replica)" in note for note in series.notes), series.notes
    assert len([note for note in series.notes if not note.startswith("Prometheus:")]) == 1, series.notes
    assert len(queries) <= 20

    document = await World.suggest(
        World(server, processes, None, {}, {}, "", {}, 0, [], tmp_path, None),
        "--prometheus", server.url, "--window", f"{DAYS}d", "--explain",
    )  # fmt: skip
    assert document["evidence"]["turns"] == counted["turns"]
    assert sum(document["evidence"]["restarts"].values()) == 5
    ran = await processes.run(
        "suggest", "--prometheus", server.url, "--window", "30d", "--matcher", 'job="none"', "--format", "json"
    )
    assert (ran.code, ran.document["error"]["code"]) == (3, "no_series")
