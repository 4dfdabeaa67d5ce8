"""Stock vLLM behind a stock proxy, and mixtures: bounds that hold the truth, and refusals that say what is missing."""

from __future__ import annotations

import heapq
import itertools
import json
import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvtune_tuning import stock
from kvtune_tuning.api import suggest_snapshots
from kvtune_tuning.document import exit_code, schema
from kvtune_tuning.errors import UsageError
from kvtune_tuning.evidence import gather
from kvtune_tuning.render import render_table
from kvtune_tuning.series import Series
from kvtune_tuning.sources import read_snapshots
from kvtune_tuning.stock import Stated

T0 = 1_700_000_000.0
XFER = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
BYTES = tuple(2.0 ** (10 + i) for i in range(1, 25, 2))
TOKENS = tuple(m * 10.0**e for e in range(6) for m in (1, 2, 5))
SECONDS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0)
CACHE_FIELDS = {"block_size": "16", "hash_block_size": "16", "effective_attention_block_size": "16"}


def widest(document: dict) -> int:
    """Columns of the table, but for what is there to be copied."""
    lines = render_table(document).splitlines()
    return max(len(line) for line in lines if not re.match(r" +(prefill|decode|both|router)  \S|  query ", line))


def agent_gap(rng: random.Random) -> float | None:
    """Tool pauses of seconds, human ones of minutes; some conversations end."""
    u = rng.random()
    if u < 0.02:
        return None
    return rng.lognormvariate(math.log(8.5), 0.8) if u < 0.85 else rng.lognormvariate(math.log(120.0), 1.2)


class Engine:
    """One stock engine's page: names, labels and edges of vLLM 0.32."""

    def __init__(self, pool: int, model: str, fields: dict[str, str]) -> None:
        self.registry = CollectorRegistry()
        names, values = ("model_name", "engine"), (model, "0")

        def counter(name: str) -> Counter:
            return Counter(f"vllm:{name}", "x", names, registry=self.registry).labels(*values)

        def histogram(name: str, edges: tuple[float, ...]) -> Histogram:
            return Histogram(f"vllm:{name}", "x", names, buckets=edges, registry=self.registry).labels(*values)

        def gauge(name: str) -> Gauge:
            return Gauge(f"vllm:{name}", "x", names, registry=self.registry).labels(*values)

        def by(name: str, label: str, members: tuple[str, ...]) -> dict[str, Counter]:
            family = Counter(f"vllm:{name}", "x", (*names, label), registry=self.registry)
            return {one: family.labels(*values, one) for one in members}

        self.usage, self.running = gauge("kv_cache_usage_perc"), gauge("num_requests_running")
        self.waiting, self.preempted = gauge("num_requests_waiting"), counter("num_preemptions")
        self.success = by("request_success", "finished_reason", ("stop", "length", "abort", "error", "repetition"))
        self.prompt, self.generated = counter("prompt_tokens"), counter("generation_tokens")
        self.source = by(
            "prompt_tokens_by_source", "source", ("local_compute", "local_cache_hit", "external_kv_transfer")
        )
        self.prompts, self.prefill = (
            histogram("request_prompt_tokens", TOKENS),
            histogram("request_prefill_time_seconds", SECONDS),
        )
        self.seconds, self.bytes = histogram("nixl_xfer_time_seconds", XFER), histogram("nixl_bytes_transferred", BYTES)
        self.expired, self.failed = counter("nixl_num_kv_expired_reqs"), counter("nixl_num_failed_transfers")
        self.late = counter("nixl_num_notifications_after_expiry")
        labels = {"engine": "0", "num_gpu_blocks": str(pool // 16), **fields}
        Gauge("vllm:cache_config_info", "x", tuple(labels), registry=self.registry).labels(**labels).set(1)

    def read(self, ranks: int, seconds: float, size: float) -> None:
        """A transfer as its reader counts it: once a rank."""
        for _ in range(ranks):
            self.seconds.observe(seconds)
            self.bytes.observe(size / ranks)

    def finished(self, reason: str, prompt: int, answer: int, fetched: int, prefill_s: float) -> None:
        self.success[reason].inc()
        self.prompt.inc(prompt)
        self.generated.inc(answer)
        self.prompts.observe(prompt)
        self.prefill.observe(prefill_s)
        self.source["external_kv_transfer"].inc(fetched)
        self.source["local_compute"].inc(prompt - fetched)


@dataclass
class StockWorld:
    """Stock engines behind a proxy that hands references over. Known truth; one rank more changes only what counts."""

    ttl: float = 480.0
    tp: int = 1
    prefill_tp: int | None = None
    prefills: int = 1
    decodes: int = 1
    pool: int = 3_500_000
    conversations_per_s: float = 0.02
    duration: float = 3600.0
    interval: float = 60.0
    prehistory: float = 0.0
    reuse: bool = True
    bidirectional: bool = True
    drift: float = 0.0
    """Prompts grow by this factor over the window."""
    gap: Callable[[random.Random], float | None] = agent_gap
    decode_s: float = 5.0
    restart_at: float | None = None
    """The engines' counters start again so long after the first scrape, right after a scrape."""
    missing: tuple[tuple[float, float], ...] = ()
    """Times without scrapes of decode."""
    stop_strings: float = 0.0
    model: str = "m"
    prefill_model: str | None = None
    old_prefill: bool = False
    seed: int = 3
    truth: dict[str, float] = field(default_factory=dict)

    alpha, beta, fixed, b = 0.0209, 4.55e-6, 0.0993, 26.9e-6

    def record(self, directory: Path) -> Path:
        """Play the world and write its snapshots and its truth; returns the directory."""
        directory.mkdir(parents=True, exist_ok=True)
        rng, serial = random.Random(self.seed), itertools.count()
        queue: list[tuple[float, int, str, dict]] = []

        def push(when: float, kind: str, **data: object) -> None:
            heapq.heappush(queue, (when, next(serial), kind, data))

        self._engines()
        when = T0 - self.prehistory
        conversation = 0
        while self.conversations_per_s > 0:
            when += rng.expovariate(self.conversations_per_s)
            if when > T0 + self.duration:
                break
            push(when, "turn", who=conversation, held=0, pin=None, ended=when)
            conversation += 1
        for k in range(int(self.duration / self.interval) + 1):
            push(T0 + k * self.interval, "scrape")
        if self.restart_at is not None:
            push(T0 + self.restart_at + 1e-3, "restart")
        self.held: dict[int, tuple[int, int, float]] = {}
        self.running = [[0, 0] for _ in range(self.decodes)]
        self.pins: list[list[float]] = []
        while queue:
            when, number, kind, data = heapq.heappop(queue)
            if when > T0 + self.duration:
                break
            if kind == "scrape":
                self._scrape(directory, when)
            elif kind == "restart":
                self._engines()
            elif kind == "lapse" and data["pin"] in self.held:
                engine = self.held.pop(data["pin"])[1]
                self.d[engine].expired.inc(self.tp)
                self.pins[data["pin"]][2] = 1.0
            elif kind == "turn":
                self._turn(rng, when, number, data, push)
            elif kind == "handed":
                self._handed(when, data, push)
            elif kind == "decoded":
                self._decoded(rng, when, data, push)
        ended = [p for p in self.pins if T0 - self.ttl <= p[0] <= T0 + self.duration - self.ttl]
        self.truth["lapsed_share"] = sum(p[2] for p in ended) / max(1, len(ended))
        tokens = np.array([p[1] for p in self.pins if p[0] >= T0] or [0.0])
        self.truth |= {
            "turns": float(len(tokens)),
            "tokens": float(tokens.mean()),
            "squares": float((tokens**2).mean()),
        }
        (directory / "truth.json").write_text(json.dumps(self.truth))
        return directory

    def _engines(self) -> None:
        fields = {**CACHE_FIELDS, "kv_cache_size_tokens": str(self.pool // self.decodes)}
        old = CACHE_FIELDS if self.old_prefill else fields
        self.p = [Engine(self.pool, self.prefill_model or self.model, old) for _ in range(self.prefills)]
        self.d = [Engine(self.pool // self.decodes, self.model, fields) for _ in range(self.decodes)]

    @property
    def _read_ranks(self) -> int:
        return max(self.tp, self.prefill_tp or self.tp)

    def _turn(self, rng: random.Random, when: float, number: int, data: dict, push: Callable[..., None]) -> None:
        engine = self.p[number % self.prefills]
        growth = 1.0 + self.drift * max(0.0, when - T0) / self.duration
        new = rng.lognormvariate(math.log(700), 1.0) if data["held"] else rng.uniform(20_000, 60_000)
        prompt = data["held"] + int(growth * new)
        fetched = 0
        seconds = 0.0
        if data["pin"] in self.held and self.reuse and when < data["ended"] + self.ttl - 5.0:
            fetched = self.held.pop(data["pin"])[0]
            seconds = (self.alpha + self.beta * fetched) * rng.lognormvariate(0.0, 0.1)
            engine.read(self._read_ranks, seconds, fetched * 1e5)
            self._count("reads", when)
        computing = (self.fixed + self.b * (prompt - fetched)) * rng.lognormvariate(0.0, 0.1)
        engine.finished("length", prompt, 1, fetched, computing)
        self._count("prefills", when)
        leg = {"who": data["who"], "prompt": prompt, "answer": rng.randrange(60, 500)}
        push(when + seconds + computing, "handed", **leg)

    def _handed(self, when: float, data: dict, push: Callable[..., None]) -> None:
        index = data["who"] % self.decodes
        self.d[index].read(self._read_ranks, self.alpha + self.beta * data["prompt"], data["prompt"] * 1e5)
        self.running[index][0] += 1
        self.running[index][1] += data["prompt"] + data["answer"]
        push(when + self.decode_s, "decoded", **data)

    def _decoded(self, rng: random.Random, when: float, data: dict, push: Callable[..., None]) -> None:
        index, held = data["who"] % self.decodes, data["prompt"] + data["answer"]
        self.running[index][0] -= 1
        self.running[index][1] -= held
        reason = "stop" if rng.random() < 0.8 else "length"
        self.d[index].finished(reason, data["prompt"], data["answer"], data["prompt"], 0.01)
        pin = len(self.pins)
        self.pins.append([when, float(held), 0.0])
        if self.bidirectional and rng.random() >= self.stop_strings:
            self.held[pin] = (held, index, when)
            push(when + self.ttl, "lapse", pin=pin)
        gap = self.gap(rng)
        if gap is not None and held < 120_000:
            push(when + gap, "turn", who=data["who"], held=held, pin=pin, ended=when)

    def _count(self, name: str, when: float) -> None:
        if when >= T0:
            self.truth[name] = self.truth.get(name, 0.0) + 1

    def _scrape(self, directory: Path, when: float) -> None:
        pages = {f"prefill-{k}:8100": one for k, one in enumerate(self.p)}
        for k, one in enumerate(self.d):
            retained = sum(tokens for tokens, engine, _ in self.held.values() if engine == k)
            demand = (retained + self.running[k][1]) / (self.pool // self.decodes)
            one.usage.set(min(1.0, demand))
            one.running.set(self.running[k][0])
            one.waiting.set(3 if demand > 1.0 else 0)
            if not any(a <= when - T0 <= b for a, b in self.missing):
                pages[f"decode-{k}:8200"] = one
        for name, engine in pages.items():
            (directory / f"{round(when * 1000)}-{name}.prom").write_text(generate_latest(engine.registry).decode())


Play = Callable[..., Path]


@pytest.fixture(scope="session")
def play(tmp_path_factory: pytest.TempPathFactory) -> Play:
    """Snapshots of a stock world, each distinct one played once. Read only."""
    made: dict[str, Path] = {}

    def of(**parameters: object) -> Path:
        key = repr(sorted(parameters.items()))
        if key not in made:
            made[key] = StockWorld(**parameters).record(tmp_path_factory.mktemp("stock"))  # type: ignore[arg-type]
        return made[key]

    return of


def advice(directory: Path, **options: object) -> dict:
    """The document, checked against its schema, for JSON safety and for the width of its table."""
    document = suggest_snapshots(directory, **options)  # type: ignore[arg-type]
    jsonschema.validate(document, schema())
    json.dumps(document, allow_nan=False)
    assert widest(document) <= 100
    return document


def truth(directory: Path) -> dict[str, float]:
    return json.loads((directory / "truth.json").read_text())


def ttl(document: dict) -> dict:
    return document["recommendations"][0]


def tau(document: dict) -> dict:
    return document["recommendations"][1]


def levels(document: dict) -> dict[str, str]:
    return {check["code"]: check["level"] for check in document["checks"]}


def reason(document: dict) -> str:
    return ttl(document)["reason"]


PRESSED: dict[str, object] = {"pool": 1_500_000, "interval": 120.0}
SLACK: dict[str, object] = {"pool": 20_000_000, "interval": 120.0}


def test_the_share_that_lapses_is_the_true_one(play: Play) -> None:
    world = play(**SLACK)
    document = advice(world)
    facts = document["evidence"]["stock"]
    assert document["evidence"]["mode"] == "stock"
    assert facts["lapsed_share"] == pytest.approx(truth(world)["lapsed_share"], abs=0.01)
    low, high = facts["lapsed_share_bounds"]
    assert low <= truth(world)["lapsed_share"] <= high and high - low < 0.1
    assert document["evidence"]["turns"] == truth(world)["turns"]


def test_reads_are_a_share_of_prefills_requests(play: Play) -> None:
    world = play(**SLACK)
    facts, known = advice(world)["evidence"]["stock"], truth(world)
    assert facts["reads"] == [known["reads"]] * 2
    assert facts["read_share"][0] == pytest.approx(known["reads"] / known["prefills"])
    assert facts["read_bytes_per_token"] == pytest.approx(1e5, rel=1e-6)
    assert 0.5 < facts["read_token_share"] < 1.0


def test_roles_are_told_by_what_engines_count(play: Play) -> None:
    targets = advice(play(**SLACK))["evidence"]["targets"]
    assert targets == {"router": [], "prefill": ["prefill-0:8100"], "decode": ["decode-0:8200"], "unknown": []}


def test_a_slack_pool_keeps_the_ttl_and_says_what_lapses(play: Play) -> None:
    document = advice(play(**SLACK))
    one = ttl(document)
    assert (one["status"], one["reason_code"], one["recommended"]) == ("keep", "pool_slack", 480)
    assert one["current_assumed"] and "lapses unread after 480 s" in one["reason"]
    assert document["apply"] is None and exit_code(document, signal_change=True) == 0


def test_a_short_pool_lowers_the_ttl_no_further_than_the_best_case(play: Play) -> None:
    world = play(**PRESSED)
    document = advice(world, explain=True)
    one, facts = ttl(document), document["evidence"]["stock"]
    assert (one["status"], one["reason_code"]) == ("change", "pool_pressure")
    worst, best = facts["fits_s"]
    right = _true_memory_ttl(truth(world), 1_500_000)
    assert worst <= right <= best, "the bounds hold the truth"
    assert one["recommended"] == math.floor(best / 5) * 5 < 480
    assert one["interval"] == [worst, one["recommended"]]
    assert f"at most {best:g} s fit even in the best case, at least {worst:g} s in the worst" in one["reason"]
    (engine,) = document["apply"]["engines"]
    assert engine["kv_transfer_config"]["kv_connector_extra_config"]["decoder_kv_blocks_ttl"] == one["recommended"]
    assert document["apply"]["router"] is None and "of another make" in document["apply"]["note"]
    assert document["explain"]["survival"] == [] and document["explain"]["costs"]


def _true_memory_ttl(known: dict[str, float], pool: float) -> float:
    rng = random.Random(5)
    gaps = np.array([g if (g := agent_gap(rng)) is not None else math.inf for _ in range(20_000)])
    rate = known["turns"] / 3600.0
    fitting = 0.0
    for one in range(5, 485, 5):
        held = float(np.minimum(gaps, one).mean()) + 5.0
        if rate * known["tokens"] * held + 2.33 * math.sqrt(rate * known["squares"] * held) > 0.9 * pool:
            break
        fitting = float(one)
    return fitting


def test_the_mean_hold_is_between_its_bounds(play: Play) -> None:
    facts = advice(play(**SLACK))["evidence"]["stock"]
    rng = random.Random(5)
    hold = np.mean([min(g if (g := agent_gap(rng)) is not None else 480.0, 480.0) for _ in range(20_000)])
    low, high = facts["held_s"]
    assert low <= hold <= high < 1.3 * hold


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_ranks_are_found_and_change_nothing_else(play: Play, tp: int) -> None:
    one, many = advice(play(**PRESSED)), advice(play(**PRESSED, tp=tp))
    facts, other = one["evidence"]["stock"], many["evidence"]["stock"]
    assert other["ranks"] == {"lapses": tp, "lapses_from": "lapses", "reads": tp, "reads_from": "reads"}
    for key in set(facts) - {"ranks", "transfer_bytes_per_s"}:
        assert other[key] == pytest.approx(facts[key], rel=1e-5), key
    assert many["recommendations"] == one["recommendations"]
    assert "tensor parallel 8" in " ".join(render_table(advice(play(**PRESSED, tp=8))).split())


def test_prefill_and_decode_of_different_size_are_told_apart(play: Play) -> None:
    world = play(**PRESSED, tp=2, prefill_tp=8)
    document = advice(world)
    facts = document["evidence"]["stock"]
    assert (facts["ranks"]["lapses"], facts["ranks"]["reads"]) == (2, 8)
    assert levels(document)["ranks_differ"] == "info"
    assert facts["lapsed_share"] == pytest.approx(truth(world)["lapsed_share"], abs=0.015)


def test_few_lapses_leave_the_ranks_to_the_hand_overs(play: Play) -> None:
    document = advice(play(**SLACK, tp=4, ttl=3500.0), stated=Stated(ttl_s=3500.0))
    assert document["evidence"]["stock"]["ranks"]["lapses_from"] == "reads"
    assert document["evidence"]["stock"]["ranks"]["lapses"] == 4


def test_unknown_ranks_are_bounds_until_they_are_stated(play: Play, tmp_path: Path) -> None:
    world = play(**SLACK, tp=4)
    for file in world.glob("*.prom"):
        # a deployment that neither shows a divisor nor one hand-over a request
        lines = [_scaled(line, 0.37, ("nixl_xfer", "nixl_num_kv")) for line in file.read_text().splitlines()]
        (tmp_path / file.name).write_text("\n".join(lines) + "\n")
    document = advice(tmp_path)
    facts = document["evidence"]["stock"]
    assert facts["ranks"]["lapses"] is None and levels(document)["ranks_unknown"] == "warning"
    low, high = facts["lapsed_share_bounds"]
    assert low < 0.01 and high > 0.05 and facts["reads"][1] == pytest.approx(32 * facts["reads"][0])
    assert ttl(document)["status"] == "keep"
    said = advice(tmp_path, stated=Stated(ranks=4))["evidence"]["stock"]
    assert said["ranks"] == {"lapses": 4, "lapses_from": "stated", "reads": 4, "reads_from": "stated"}


def _scaled(line: str, factor: float, parts: tuple[str, ...]) -> str:
    if line.startswith("#") or not any(part in line for part in parts):
        return line
    key, value = line.rsplit(" ", 1)
    return f"{key} {float(value) * factor!r}"


def test_replicas_change_nothing(play: Play) -> None:
    one, more = advice(play(**PRESSED)), advice(play(**PRESSED, prefills=3))
    assert len(more["evidence"]["targets"]["prefill"]) == 3
    assert more["recommendations"] == one["recommendations"]
    for key, value in one["evidence"]["stock"].items():
        if isinstance(value, float):
            assert more["evidence"]["stock"][key] == pytest.approx(value, rel=1e-5), key
    two = advice(play(**PRESSED, decodes=2))["evidence"]
    assert two["stock"]["lapsed_share"] == pytest.approx(one["evidence"]["stock"]["lapsed_share"], abs=0.002)
    assert two["stock"]["reads"] == one["evidence"]["stock"]["reads"] and two["turns"] == one["evidence"]["turns"]
    assert two["pool_tokens"] == 750_000


def test_a_restart_changes_nothing(play: Play) -> None:
    one, again = advice(play(**PRESSED)), advice(play(**PRESSED, restart_at=1800.0))
    assert again["evidence"]["restarts"] == {"decode-0:8200": 1, "prefill-0:8100": 1}
    assert levels(again)["restarts"] == "warning" and not one["evidence"]["restarts"]
    for key, value in one["evidence"]["stock"].items():
        if not isinstance(value, dict):
            assert again["evidence"]["stock"][key] == pytest.approx(value, rel=1e-5), key
    assert [r["recommended"] for r in again["recommendations"]] == [r["recommended"] for r in one["recommendations"]]


def test_engines_that_ran_before_give_the_same_share(play: Play) -> None:
    world = play(**SLACK, prehistory=3000.0)
    document = advice(world)
    assert document["evidence"]["stock"]["lapsed_share"] == pytest.approx(truth(world)["lapsed_share"], abs=0.012)
    assert levels(document)["stationarity"] == "info"


def test_what_is_never_read_is_switched_off(play: Play) -> None:
    document = advice(play(**SLACK, reuse=False))
    one = ttl(document)
    assert (one["status"], one["reason_code"]) == ("off", "never_read")
    assert document["evidence"]["stock"]["lapsed_share"] == pytest.approx(1.0, abs=0.01)
    assert "streamed answers" in one["reason"] and "unverified_reuse" not in levels(document)
    assert exit_code(document, signal_change=True) == 4
    assert {e["role"] for e in document["apply"]["engines"]} == {"prefill", "decode"}


def test_nothing_retained_is_said(play: Play) -> None:
    one = ttl(advice(play(**PRESSED, bidirectional=False)))
    assert (one["status"], one["reason_code"]) == ("insufficient", "nothing_retained")


def test_a_pool_that_active_requests_fill_is_not_the_ttls_fault(play: Play) -> None:
    world = {"pool": 2_000_000, "ttl": 20.0, "decode_s": 90.0, "interval": 120.0}
    one = ttl(advice(play(**world), stated=Stated(ttl_s=20.0)))
    assert one["reason_code"] in ("pressure_not_from_retention", "bounds_too_wide", "floor_does_not_fit")
    assert one["status"] != "change", "20 s of retention beside 90 s of decoding"


@pytest.mark.parametrize(
    ("starved", "status", "code"), [(True, "off", "does_not_fit"), (False, "keep", "floor_does_not_fit")]
)
def test_not_even_the_floor_fits(play: Play, starved: bool, status: str, code: str) -> None:
    bounds = gather(read_snapshots(play(**PRESSED))).bounds
    assert bounds is not None
    tiny = tuple(replace(case, pool_tokens=100_000.0) for case in bounds.cases)
    one = stock.advise_ttl(replace(bounds, cases=tiny, starved=starved))
    assert (one.status, one.reason_code, one.clamped_by) == (status, code, ("memory", "floor"))


@pytest.mark.parametrize("tp", [1, 8])
def test_too_few_turns_say_when_to_ask_again(play: Play, tp: int) -> None:
    document = advice(play(duration=900.0, interval=30.0, tp=tp))
    one = ttl(document)
    assert (one["status"], one["reason_code"]) == ("insufficient", "too_few_turns")
    rate = document["evidence"]["turn_ends_per_s"]
    exposed = document["evidence"]["stock"]["turns_exposed"]
    assert one["retry_after"] == math.ceil((500 - exposed) / rate)
    assert exit_code(document) == 3, "the threshold would be unknown after any time"


def test_no_traffic_has_no_roles_and_no_date(play: Play) -> None:
    document = advice(play(conversations_per_s=0.0, duration=600.0))
    one = ttl(document)
    assert (one["status"], one["reason_code"], one["retry_after"]) == ("insufficient", "role_unknown", None)
    assert levels(document)["role_unknown"] == "warning" and tau(document)["reason_code"] == "not_identifiable"
    assert document["evidence"]["targets"]["unknown"] == ["decode-0:8200", "prefill-0:8100"]


def test_roles_can_be_stated(play: Play) -> None:
    idle = play(conversations_per_s=0.0, duration=600.0)
    document = advice(idle, stated=Stated.of(["prefill=8100", "decode=8200"]))
    assert document["evidence"]["targets"]["unknown"] == [] and ttl(document)["reason_code"] == "too_few_turns"
    for roles, code in ((["prefill=nowhere"], "unknown_target"), (["prefill=8", "decode=8200"], "ambiguous_role")):
        refused = suggest_snapshots(idle, stated=Stated.of(roles))
        jsonschema.validate(refused, schema())
        assert refused["error"]["code"] == code and refused["error"]["hint"]


@pytest.mark.parametrize("given", ["prefill", "both=x", "decode=", "=x"])
def test_what_is_no_role(given: str) -> None:
    with pytest.raises(UsageError) as caught:
        Stated.of([given])
    assert caught.value.code == "bad_role"


@pytest.mark.parametrize("given", [{"ranks": 0}, {"ttl_s": -1.0}, {"threshold": -1.0}, {"ttl_s": math.nan}])
def test_what_cannot_be_stated(given: dict) -> None:
    with pytest.raises(UsageError) as caught:
        Stated(**given)
    assert caught.value.code == "bad_statement"


def test_a_stated_ttl_is_used_and_no_longer_assumed(play: Play) -> None:
    world = play(**SLACK, ttl=120.0)
    document = advice(world, stated=Stated(ttl_s=120.0, threshold=256.0))
    assert [r["current"] for r in document["recommendations"]] == [120, 256]
    assert not any(r["current_assumed"] for r in document["recommendations"])
    assert "assumed_setting" not in levels(document)
    facts = document["evidence"]["stock"]
    assert (
        facts["lapsed_share"] == pytest.approx(truth(world)["lapsed_share"], abs=0.012) and facts["lapsed_share"] > 0.08
    )


@pytest.mark.parametrize(("in_force", "taken", "doubt"), [(60.0, None, "shorter"), (480.0, 15.0, "longer")])
def test_a_ttl_that_cannot_be_is_doubted(play: Play, in_force: float, taken: float | None, doubt: str) -> None:
    """Advice from a wrong TTL could raise what it means to lower."""
    document = advice(play(pool=900_000, interval=120.0, ttl=in_force), stated=Stated(ttl_s=taken))
    one = ttl(document)
    assert (one["status"], one["reason_code"]) == ("insufficient", "ttl_doubtful")
    assert f"{doubt} than" in one["reason"] and levels(document)["ttl_doubtful"] == "warning"
    right = advice(play(pool=900_000, interval=120.0, ttl=in_force), stated=Stated(ttl_s=in_force))
    assert ttl(right)["status"] == "change" and "ttl_doubtful" not in levels(right)


def test_the_threshold_is_not_identifiable_and_says_what_would_help(play: Play) -> None:
    document = advice(play(**SLACK))
    one = tau(document)
    assert (one["status"], one["reason_code"], one["recommended"]) == ("unidentifiable", "not_identifiable", None)
    assert "kvtune_path_*" in one["reason"] and one["model"]["fetch"] is None


def test_cost_lines_are_laid_through_stretches_whose_means_differ(play: Play) -> None:
    document = advice(play(**SLACK, drift=6.0, tp=4))
    model = tau(document)["model"]
    assert model["recompute"]["us_per_token"] == pytest.approx(26.9, rel=0.15)
    assert model["fetch"]["us_per_token"] == pytest.approx(4.55, rel=0.2)
    assert model["crossing_tokens"] is None and levels(document)["transfer_only"] == "info"
    assert "4.5" in tau(document)["reason"] or "us a token" in tau(document)["reason"]


def test_what_stock_cannot_tell_is_listed(play: Play) -> None:
    document = advice(play(**PRESSED))
    found = levels(document)
    assert found["stock_mode"] == "info" and found["unverified_reuse"] == "warning"
    assert "no_router" not in found and "kappa" not in found
    text = " ".join(render_table(document).split())
    assert "mode stock: vLLM's own series only" in text and "declined reads apart from lapsed leases" in text
    assert document["evidence"]["gaps"] is None and document["evidence"]["conversations"] is None


def test_bad_news_of_the_engines_is_passed_on(play: Play, tmp_path: Path) -> None:
    files = sorted(play(**SLACK).glob("*-prefill-0:8100.prom"))
    for file in play(**SLACK).glob("*.prom"):
        (tmp_path / file.name).write_text(file.read_text())
    last = tmp_path / files[-1].name
    text = last.read_text()
    for name, value in (
        ("nixl_num_kv_expired_reqs_total", 6), ("nixl_num_notifications_after_expiry_total", 2),
        ("nixl_num_failed_transfers_total", 3),
    ):  # fmt: skip
        text = text.replace(
            f'vllm:{name}{{engine="0",model_name="m"}} 0.0', f'vllm:{name}{{engine="0",model_name="m"}} {value}.0'
        )
    text = text.replace('finished_reason="error",model_name="m"} 0.0', 'finished_reason="error",model_name="m"} 4.0')
    last.write_text(text)
    found = levels(advice(tmp_path))
    assert found["late_reads"] == "error"
    assert {found[c] for c in ("lapses_or_declines", "prefill_errors", "failed_reads")} == {"warning"}


def test_a_stop_string_only_lowers_the_share(play: Play) -> None:
    """What a stop string ends counts as finished but retains nothing: the share that lapses is a lower bound."""
    world = play(**SLACK, stop_strings=0.3)
    assert advice(world)["evidence"]["stock"]["lapsed_share"] <= truth(world)["lapsed_share"] + 0.01


def test_holes_in_the_scrapes_are_said(play: Play) -> None:
    document = advice(play(**SLACK, missing=((1200.0, 2500.0),)))
    assert document["evidence"]["scrape_gaps"] == {"decode-0:8200": pytest.approx(1440.0, abs=121.0)}
    assert levels(document)["scrape_gaps"] == "warning"
    assert advice(play(**SLACK))["evidence"]["scrape_gaps"] == {}


def test_mixed_models_and_versions_are_said(play: Play) -> None:
    document = advice(play(**SLACK, prefill_model="n", old_prefill=True))
    assert document["evidence"]["models"] == ["m", "n"]
    assert levels(document)["mixed_models"] == levels(document)["mixed_versions"] == "warning"
    assert not {"mixed_models", "mixed_versions"} & set(levels(advice(play(**SLACK))))


def test_without_nixl_nothing_is_said_of_retention(play: Play, tmp_path: Path) -> None:
    for file in play(**SLACK).glob("*.prom"):
        text = "\n".join(line for line in file.read_text().splitlines() if "nixl" not in line)
        (tmp_path / file.name).write_text(text + "\n")
    document = advice(tmp_path)
    assert document["evidence"]["mode"] == "stock" and ttl(document)["status"] == "insufficient"
    stated = advice(tmp_path, stated=Stated.of(["prefill=prefill", "decode=decode"]))
    assert ttl(stated)["reason_code"] == "missing_series" and "vllm:nixl_*" in reason(stated)


@pytest.mark.parametrize(
    ("gone", "code"),
    [("vllm:kv_cache_usage_perc", "missing_series"), ("vllm:cache_config_info", "missing_series")],
)
def test_missing_series_are_named(play: Play, tmp_path: Path, gone: str, code: str) -> None:
    for file in play(**PRESSED).glob("*.prom"):
        text = file.read_text()
        if gone == "vllm:cache_config_info":
            text += 'vllm:num_preemptions_total{engine="1",model_name="m"} ' + f"{int(file.name[:13]) - 1.7e12:.0f}\n"
        (tmp_path / file.name).write_text("\n".join(x for x in text.splitlines() if not x.startswith(gone)) + "\n")
    document = advice(tmp_path)
    assert (ttl(document)["status"], ttl(document)["reason_code"]) == ("insufficient", code)
    assert gone in reason(document)


# --- mixtures ---------------------------------------------------------------------------------------------------------

Snapshots = Callable[..., Path]


def test_engines_without_a_router_are_advised_by_the_ages_of_their_retentions(
    snapshots: Snapshots, tmp_path: Path
) -> None:
    whole = snapshots(pool=1_500_000, interval=120.0)
    for file in whole.iterdir():
        if "router" not in file.name:
            (tmp_path / file.name).write_text(file.read_text())
    document, full = advice(tmp_path, explain=True), advice(whole, explain=True)
    assert (document["evidence"]["mode"], full["evidence"]["mode"]) == ("engines", "kvtune")
    assert levels(document)["no_router"] == "warning" and document["evidence"]["stock"] is None
    assert ttl(document)["status"] == "change" and ttl(document)["reason_code"] == "pool_pressure"
    # What nobody saw wait for room is not risked: only what surely fits.
    assert 0.6 * ttl(full)["recommended"] <= ttl(document)["recommended"] <= ttl(full)["recommended"]
    ages = {p["seconds"]: p["turns"] for p in document["explain"]["survival"]}
    for point in full["explain"]["survival"]:
        if point["seconds"] in ages and point["seconds"] < 475:
            assert ages[point["seconds"]] == pytest.approx(point["turns"], abs=0.03)
    assert max(ages) == 480, "nothing is seen beyond the TTL"
    assert document["evidence"]["kappa"] == pytest.approx(1.0, abs=0.15)
    assert tau(document) == tau(full) | {"reason": tau(document)["reason"]}
    assert document["apply"]["router"] is None


def test_without_a_router_a_slack_pool_is_no_proof_that_nobody_comes_later(
    snapshots: Snapshots, tmp_path: Path
) -> None:
    for ttl_s in (480.0, 240.0):
        only = tmp_path / f"{ttl_s:g}"
        only.mkdir()
        for file in snapshots(pool=20_000_000, ttl=ttl_s, interval=120.0).iterdir():
            if "router" not in file.name:
                (only / file.name).write_text(file.read_text())
        one = ttl(advice(only))
        assert (one["status"], one["reason_code"], one["recommended"]) == ("keep", "pool_slack", ttl_s)
        assert "not seen without kvtune's router" in one["reason"]


def test_without_a_router_conversations_are_bounded_by_what_is_retained_at_a_time(
    snapshots: Snapshots, tmp_path: Path
) -> None:
    for file in snapshots(pool=20_000_000, ttl=30.0, interval=120.0).iterdir():
        if "router" not in file.name:
            (tmp_path / file.name).write_text(file.read_text())
    one = ttl(advice(tmp_path))
    assert (one["status"], one["reason_code"], one["retry_after"]) == ("insufficient", "too_few_gaps", None)
    assert "at least" in one["reason"] and "kvtune's router counts them" in one["reason"]


def test_a_router_in_front_of_stock_engines_still_tells_the_pauses(
    play: Play, snapshots: Snapshots, tmp_path: Path
) -> None:
    routers = sorted(snapshots(pool=1_500_000, interval=120.0).glob("*-router0.prom"))
    for file in (*routers, *play(**PRESSED).glob("*.prom")):
        (tmp_path / file.name).write_text(file.read_text())
    document = advice(tmp_path)
    facts = document["evidence"]
    assert facts["mode"] == "router" and facts["gaps"] > 1000 and facts["pool_tokens"] == 1_500_000
    assert facts["targets"]["decode"] == ["decode-0:8200"] and levels(document)["stock_engines"] == "warning"
    assert ttl(document)["status"] == "change" and document["apply"]["router"].startswith("--ttl ")
    assert tau(document)["reason_code"] == "not_identifiable"


def test_other_engines_beside_a_deployment_are_left_alone(play: Play, snapshots: Snapshots, tmp_path: Path) -> None:
    whole = snapshots(pool=1_500_000, interval=120.0)
    for file in (*whole.iterdir(), *play(**PRESSED).glob("*.prom")):
        (tmp_path / file.name).write_text(file.read_text())
    document, alone = advice(tmp_path), advice(whole)
    assert document["recommendations"] == alone["recommendations"]
    assert levels(document)["role_unknown"] == "warning" and "mixed_models" not in levels(document)


def test_a_stock_decode_behind_a_prefill_with_the_connector_is_said(
    play: Play, snapshots: Snapshots, tmp_path: Path
) -> None:
    for file in snapshots(pool=1_500_000, interval=120.0).glob("*-p.prom"):
        (tmp_path / file.name).write_text(file.read_text())
    for file in play(**PRESSED).glob("*-decode*.prom"):
        (tmp_path / file.name).write_text(file.read_text())
    document = advice(tmp_path)
    assert document["evidence"]["mode"] == "engines" and document["evidence"]["targets"]["decode"] == ["decode-0:8200"]
    assert levels(document)["stock_engines"] == levels(document)["assumed_setting"] == "warning"
    assert ttl(document)["status"] == "change" and document["evidence"]["stock"]["reads"] is not None
    assert tau(document)["reason_code"] == "nothing_fetchable_between"


def test_a_statement_that_engines_contradict_is_not_believed(snapshots: Snapshots) -> None:
    document = advice(snapshots(pool=1_500_000, interval=120.0), stated=Stated(ttl_s=60.0))
    assert ttl(document)["current"] == 480 and levels(document)["stated_differs"] == "warning"


# --- pure parts -------------------------------------------------------------------------------------------------------


def _series(values: list[float]) -> Series:
    return Series("x", frozenset(), "t", np.arange(len(values), dtype=float), np.array(values, dtype=float))


@given(st.lists(st.integers(0, 9), min_size=40, max_size=60), st.sampled_from([1, 2, 4, 8]))
def test_the_divisor_is_a_multiple_of_the_ranks(steps: list[int], ranks: int) -> None:
    steps = [*steps, *([1] * 12)]
    found = stock.common_divisor([_series([0.0, *itertools.accumulate(ranks * s for s in steps)])])
    odd = sum(s % 2 for s in steps) / sum(s > 0 for s in steps)
    assert found is not None and found % ranks == 0
    assert found == ranks or odd <= 0.1


def test_a_divisor_needs_whole_increments_and_enough_of_them() -> None:
    assert stock.common_divisor([_series([0.0, 8.0, 16.0])]) is None
    assert stock.common_divisor([_series([1.5 * k for k in range(30)])]) is None
    assert stock.common_divisor([]) is None
    late = [8 * k + (1 if k == 20 else 0) for k in range(40)]
    assert stock.common_divisor([_series(late)]) == 8, "a rank that reports one scrape later"


@given(st.floats(0.05, 1.0), st.floats(0.0, 1.0), st.floats(20.0, 2000.0), st.floats(0.01, 1.0))
def test_the_chord_is_never_above_the_tangent(level: float, share: float, limit: float, at: float) -> None:
    held, lapsed = level * limit, share * level
    low = stock._chord(held, limit).integral(np.array([at * limit, limit]))
    high = stock._tangent(held, limit, lapsed).integral(np.array([at * limit, limit]))
    assert low[0] <= high[0] * (1 + 1e-6) and high[0] <= at * limit * (1 + 1e-9)
    assert low[1] == pytest.approx(held) and high[1] == pytest.approx(held, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(("per_request", "ranks"), [(1.0, 1), (1.08, 1), (3.8, 4), (8.3, 8), (1.4, None), (0.2, None)])
def test_reads_a_request_near_a_number_of_ranks(per_request: float, ranks: int | None) -> None:
    assert stock.near_ranks(per_request) == ranks
