"""Unit tests of the rules for `promtool test rules`: a small deployment, healthy, idle, restarted, and with each fault.

Every alert is asked three times: before its fault, while it lasts (all labels of what fires, and its number), and
after. Written for the default configuration. A fault's test holds only the series that its alert reads, and where it
can leaves out the rules about other TTLs, which take most of the time; the quiet tests hold everything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvtune_dashboards.alerts import Alert, alerts
from kvtune_dashboards.config import RulesConfig
from kvtune_dashboards.recording import OTHER_TTLS, RecordingRule, recording_rules
from kvtune_telemetry.buckets import GAP_SECONDS
from kvtune_telemetry.catalogue import BY_NAME
from kvtune_telemetry.vocabulary import NoReference, Outcome, ReferenceEnd

Labels = tuple[tuple[str, str], ...]
Rates = dict[tuple[str, Labels], float]
"""Increase a minute of each counter."""
ROUTER = (("job", "kvtune-router"), ("instance", "router:9400"))
PREFILL = (("job", "kvtune-prefill"), ("instance", "prefill-0:8100"))
DECODE = (("job", "kvtune-decode"), ("instance", "decode-0:8200"))
ENGINE = (("model_name", "m"), ("engine", "0"))
POOL = 1_000_000.0
TURN_TOKENS = 8000.0
"""Tokens held at a turn's end."""


@dataclass
class World:
    """What a deployment exposes: counters by their increase a minute, gauges by their value; None is not there."""

    rates: Rates = field(default_factory=dict)
    gauges: dict[tuple[str, Labels], float | None] = field(default_factory=dict)

    def count(self, name: str, rate: float, *target: tuple[str, str], **labels: str) -> None:
        """Set a counter's increase a minute."""
        self.rates[name, (*target, *labels.items())] = rate

    def show(self, name: str, value: float | None, *target: tuple[str, str], **labels: str) -> None:
        """Set a gauge."""
        self.gauges[name, (*target, *labels.items())] = value

    def copy(self) -> World:
        """Another world with the same series."""
        return World(dict(self.rates), dict(self.gauges))


def returned(gap_s: float) -> float:
    """Share of turns whose conversation is back within so long: 90 % come back, evenly over 0 to 120 s."""
    return 0.9 * min(gap_s / 120.0, 1.0)


def healthy(
    *,
    hit: float = 12.0,
    expired: float = 0.1,
    absent: float = 0.2,
    gone: float = 0.0,
    no_identity: float = 0.0,
    first: float = 2.0,
    ttft_s: float = 0.4,
    read_s_per_token: float = 0.00001,
    read_fixed_s: float = 0.005,
    compute_s_per_token: float = 0.0001,
    gaps: Callable[[float], float] = returned,
    skipped_tokens: float = 0.0,
) -> World:
    """A router, a prefill and a decode engine in work."""
    world = World()
    _router(world, hit, expired, absent, gone, no_identity, first, ttft_s, gaps)
    _prefill(world, hit, read_s_per_token, read_fixed_s, compute_s_per_token, skipped_tokens)
    _decode(world, hit + first)
    return world


def _router(
    world: World, hit: float, expired: float, absent: float, gone: float, no_identity: float, first: float,
    ttft_s: float, gaps: Callable[[float], float],
) -> None:  # fmt: skip
    by_outcome = dict.fromkeys(Outcome, 0.0) | {
        Outcome.FIRST: first, Outcome.HIT: hit, Outcome.EXPIRED: expired, Outcome.ABSENT: absent,
        Outcome.ENGINE_GONE: gone, Outcome.NO_IDENTITY: no_identity,
    }  # fmt: skip
    for outcome, rate in by_outcome.items():
        world.count("kvtune_turns_total", rate, *ROUTER, outcome=outcome.value)
        turn = "first" if outcome in (Outcome.FIRST, Outcome.NO_IDENTITY) else "followup"
        if rate or outcome in (Outcome.EXPIRED, Outcome.ABSENT):
            for edge in (0.319, 0.46, 0.953, 1.97, 2.83, 5.88):
                world.count(
                    "kvtune_turn_ttft_seconds_bucket", rate if ttft_s <= edge else 0.0, *ROUTER,
                    turn=turn, outcome=outcome.value, le=f"{edge}",
                )  # fmt: skip
            labels = {"turn": turn, "outcome": outcome.value}
            world.count("kvtune_turn_ttft_seconds_bucket", rate, *ROUTER, **labels, le="+Inf")
            world.count("kvtune_turn_ttft_seconds_count", rate, *ROUTER, **labels)
    turns = sum(by_outcome.values())
    for name, weight in (("kvtune_turn_gap_seconds", 1.0), ("kvtune_turn_gap_tokens", TURN_TOKENS)):
        for edge in GAP_SECONDS:
            world.count(f"{name}_bucket", turns * weight * gaps(edge), *ROUTER, le=f"{edge}")
        world.count(f"{name}_bucket", turns * weight * gaps(1e9), *ROUTER, le="+Inf")
    world.count("kvtune_turn_ends_total", turns, *ROUTER)
    world.count("kvtune_turn_end_tokens_total", turns * TURN_TOKENS, *ROUTER)
    world.count("kvtune_references_received_total", turns, *ROUTER)
    for end in ReferenceEnd:
        lost = gone if end is ReferenceEnd.ENGINE_GONE else turns if end is ReferenceEnd.HANDED_OVER else 0.0
        world.count("kvtune_references_ended_total", lost, *ROUTER, end=end.value)
    for reason in NoReference:
        world.count("kvtune_references_missed_total", 0.0, *ROUTER, reason=reason.value)
    for setting, value in (
        ("default_ttl_seconds", 480.0), ("margin_seconds", 6.0), ("holdout_ratio", 0.0), ("explore_ratio", 0.0),
        ("retain_seconds", 0.0), ("accept_unverified", 0.0),
    ):  # fmt: skip
        world.show("kvtune_router_setting", value, *ROUTER, setting=setting)
    world.show("kvtune_router_build_info", 1, *ROUTER, version="1")
    world.show("up", 1, *ROUTER)
    for engine, role in (("prefill-0:8100", "prefill"), ("decode-0:8200", "decode")):
        world.show("kvtune_engine_up", 1, *ROUTER, engine=engine, role=role)
        world.count("kvtune_engine_restarts_total", 0.0, *ROUTER, engine=engine, role=role)


def _engine(world: World, role: str, target: Labels) -> None:
    own = (*target, *ENGINE)
    for setting, value in (
        ("decoder_kv_blocks_ttl", 480.0), ("kv_recompute_threshold", 64.0), ("expiry_margin_seconds", 5.0),
        ("bidirectional_kv_xfer", 1.0), ("kv_pool_tokens", POOL), ("max_retain_seconds", 480.0),
        ("require_fingerprint", 1.0),
    ):  # fmt: skip
        world.show("kvtune_connector_setting", value, *own, role=role, setting=setting)
    world.show("kvtune_connector_build_info", 1, *own, role=role, version="1")
    world.show("up", 1, *target)
    world.show("vllm:num_requests_waiting", 0, *own)
    world.show("vllm:num_requests_running", 2, *own)
    world.show("vllm:num_requests_waiting_by_reason", 0, *own, reason="deferred")
    world.count("kvtune_kv_late_notifications_total", 0.0, *own, role=role)
    world.count("vllm:nixl_num_notifications_after_expiry_total", 0.0, *own)


_SIZES = (("1024", "1024", 900.0), ("4096", "4096", 3000.0), ("16384", "16384", 12000.0))
"""Fine class, coarse class, and tokens of what is in it."""
_READ_SIZES = (("128", "256", 100.0), *_SIZES, ("65536", "65536", 50000.0), ("131072", "inf", 100000.0))


def _reads(
    world: World, role: str, target: Labels, direction: str, rate: float, seconds: Callable[[float], float]
) -> None:
    own = (*target, *ENGINE, ("role", role))
    for fine, coarse, tokens in _READ_SIZES:
        each = rate / len(_READ_SIZES)
        world.count("kvtune_kv_reads_total", each, *own, direction=direction, size=fine)
        world.count("kvtune_kv_read_bytes_total", each * tokens * 100_000, *own, direction=direction, size=fine)
        world.count("kvtune_kv_read_seconds_sum", each * seconds(tokens), *own, direction=direction, size=coarse)
        world.count("kvtune_kv_read_seconds_count", each, *own, direction=direction, size=coarse)
    world.count("kvtune_kv_reads_failed_total", 0.0, *own, direction=direction)
    world.count("kvtune_kv_wait_seconds_sum", rate * seconds(4000), *own, direction=direction)
    world.count("kvtune_kv_wait_seconds_count", rate, *own, direction=direction)


def _prefill(
    world: World, hit: float, per_token: float, fixed: float, compute: float, skipped: float
) -> None:  # fmt: skip
    _engine(world, "prefill", PREFILL)
    own = (*PREFILL, *ENGINE, ("role", "prefill"))

    def fetching(tokens: float) -> float:
        return fixed + per_token * tokens

    def computing(tokens: float) -> float:
        return 0.02 + compute * tokens

    _reads(world, "prefill", PREFILL, "d2p", hit, fetching)
    for path, seconds, rate in (("fetch", fetching, hit), ("recompute", computing, hit + 4)):
        for fine, _, n in _SIZES:
            each, s = rate / len(_SIZES), seconds(n)
            for name, amount in (
                ("observations", 1.0), ("tokens", n), ("tokens_squared", n * n), ("seconds", s),
                ("seconds_squared", s * s), ("token_seconds", n * s),
            ):  # fmt: skip
                world.count(f"kvtune_path_{name}_total", each * amount, *own, path=path, size=fine)
    for (decision, reason), rate in {
        ("fetch", "none"): hit, ("recompute", "none"): 4.0, ("recompute", "below_threshold"): skipped and 60.0,
    }.items():  # fmt: skip
        labels = {"decision": decision, "reason": reason}
        tokens = skipped * 60 if reason == "below_threshold" else rate * 4000
        world.count("kvtune_decisions_total", rate, *own, **labels)
        world.count("kvtune_decision_tokens_total", tokens, *own, **labels)
    for source, rate in (("computed", 5000.0), ("local_hit", 0.0), ("fetched", hit * 4000)):
        world.count("kvtune_prompt_tokens_total", rate, *own, source=source)


def _decode(world: World, turns: float) -> None:
    _engine(world, "decode", DECODE)
    own = (*DECODE, *ENGINE, ("role", "decode"))
    _reads(world, "decode", DECODE, "p2d", turns, lambda tokens: 0.005 + 0.00001 * tokens)
    world.show("kvtune_retained_tokens", 0.12 * POOL, *own)
    for end, rate in (("read", 800_000.0), ("lapsed", 200_000.0)):
        world.count("kvtune_retained_token_seconds_total", rate, *own, end=end)


def changed(**edits: Any) -> World:
    """A healthy deployment with another traffic."""
    return healthy(**edits)


def edited(edit: Callable[[World], None], base: World | None = None) -> World:
    """A healthy deployment after `edit`."""
    world = base.copy() if base else healthy()
    edit(world)
    return world


def still() -> World:
    """A deployment that nobody uses."""
    world = healthy()
    world.rates = dict.fromkeys(world.rates, 0.0)
    for (name, labels), value in world.gauges.items():
        if name in ("vllm:num_requests_running", "kvtune_retained_tokens"):
            world.gauges[name, labels] = 0.0 if value is not None else None
    return world


def _set(name: str, value: float | None, **labels: str) -> Callable[[World], None]:
    def edit(world: World) -> None:
        hits = [key for key in world.gauges if key[0] == name and labels.items() <= dict(key[1]).items()]
        assert hits, (name, labels)
        for key in hits:
            world.gauges[key] = value

    return edit


def _grow(name: str, rate: float, **labels: str) -> Callable[[World], None]:
    def edit(world: World) -> None:
        hits = [key for key in world.rates if key[0] == name and labels.items() <= dict(key[1]).items()]
        assert hits, (name, labels)
        for key in hits:
            world.rates[key] = rate

    return edit


def _gone(target: Labels, *, down: bool) -> Callable[[World], None]:
    """A target that no longer answers (`down`), or that is no longer scraped."""

    def edit(world: World) -> None:
        for key in world.gauges:
            if set(target) <= set(key[1]):
                world.gauges[key] = 0.0 if down and key[0] == "up" else None

    return edit


def _all(*edits: Callable[[World], None]) -> Callable[[World], None]:
    def edit(world: World) -> None:
        for one in edits:
            one(world)

    return edit


@dataclass(frozen=True, slots=True)
class Case:
    """A fault between two healthy times; all in minutes."""

    alert: str
    what: str
    fault: World
    lasts: int
    fires: tuple[Mapping[str, str], ...]
    """Labels of each alert that fires, beside its name and severity."""
    value: float
    """The number of each of them, near the end of the fault, to a thousandth."""
    before: World = field(default_factory=healthy)
    quiet: int = 30
    after: int = 45
    step: int = 1
    severity: str = ""
    """That of those that fire, where the alert has several."""
    without: tuple[str, ...] = ()
    """Recording rules that are not loaded."""


_ROUTER_JOB = {"job": "kvtune-router"}
_PREFILL_JOB = {"job": "kvtune-prefill"}
_OF_PREFILL = dict((*PREFILL, *ENGINE))
_OF_DECODE = dict((*DECODE, *ENGINE))
_PREFILL_MODEL = {"job": "kvtune-prefill", "model_name": "m"}


def cases() -> Iterator[Case]:
    """One for each way an alert fires."""
    yield from _correctness_cases()
    yield from _advising_cases()
    yield from _reuse_cases()
    yield from _settings_cases()
    yield from _fleet_cases()


def _correctness_cases() -> Iterator[Case]:
    late = "KvtuneLateReadOfFreedKV"
    # Half a read a minute, ten minutes.
    yield Case(
        late, "kvtune's connector", edited(_grow("kvtune_kv_late_notifications_total", 0.5, job="kvtune-decode")), 12,
        (_OF_DECODE,), 5,
    )  # fmt: skip
    stock = edited(_grow("vllm:nixl_num_notifications_after_expiry_total", 0.5, job="kvtune-decode"))
    yield Case(late, "stock vLLM", stock, 12, (_OF_DECODE,), 5)
    yield Case(late, "stock vLLM, its colon escaped", _renamed(stock), 12, (_OF_DECODE,), 5, before=_renamed(healthy()))
    bypassed = "KvtuneReuseGuardBypassed"
    lax = _all(
        _set("kvtune_router_setting", 1, setting="accept_unverified"),
        _set("kvtune_connector_setting", 0, setting="require_fingerprint"),
    )
    # Twelve reused turns a minute in ten minutes: of the router's turns, and of prefill's reads.
    yield Case(bypassed, "nobody insists on proof", edited(lax), 12, (_ROUTER_JOB, _PREFILL_JOB), 120)
    beside = _all(
        _set("kvtune_router_setting", 1, setting="accept_unverified"),
        lambda world: world.show("kvtune_engine_up", 1, *ROUTER, engine="stock:8100", role="prefill"),
    )
    yield Case(bypassed, "a stock prefill beside one that proves", edited(beside), 12, (_ROUTER_JOB,), 120)
    alone = _all(
        _set("kvtune_connector_setting", 0, setting="require_fingerprint"), _set("kvtune_router_setting", None)
    )
    yield Case(bypassed, "another router, prefill asks for no proof", edited(alone), 12, (_PREFILL_JOB,), 120)


def _advising_cases() -> Iterator[Case]:
    def slowly(gap_s: float) -> float:
        return 0.9 * min(gap_s / 900.0, 1.0)

    # Evenly over 900 s, 0.72 return within the edge 720 s and 0.9 within 960 s. 98 % of those 0.9 are 0.882: on the
    # straight line between the edges, 936 s. The margin adds 6 s, and the step of 5 s rounds up.
    yield Case(
        "KvtuneExpiredReadsHigh", "pauses longer than the TTL", healthy(gaps=slowly, expired=4.0, hit=9.0), 45,
        (_ROUTER_JOB,), 945, before=healthy(gaps=slowly),
    )  # fmt: skip
    # 1907 tokens a second survive 102 s on average at the TTL in force: 194480 are foretold where 600000 are held. Of
    # the 300000 that may be held, 97240 would be foretold: 51 s of survival, which is 46.5 s at a TTL of 60 s and
    # 59.625 s at one of 90 s. On the line between: 70.3 s, in steps of 5 s.
    crowd = _all(_set("kvtune_retained_tokens", 0.6 * POOL), _set("vllm:num_requests_waiting", 3, job="kvtune-decode"))
    yield Case(
        "KvtuneRetainedKVCrowdsPool",
        "requests wait for memory",
        edited(crowd),
        45,
        (_ROUTER_JOB,),
        70,
        quiet=10,
        after=12,
    )
    yield Case(
        "KvtuneRetainedKVCrowdsPool", "the same, vLLM's colon escaped", _renamed(edited(crowd)), 45, (_ROUTER_JOB,), 70,
        before=_renamed(healthy()), quiet=10, after=12,
    )  # fmt: skip
    # Both cost the same at 0.2 s / (100 - 50) us a token.
    yield Case(
        "KvtuneFetchSlowerThanRecompute", "reads with a high fixed cost",
        healthy(read_fixed_s=0.2, read_s_per_token=0.00005), 120, (_PREFILL_MODEL,), 4000, after=90,
    )  # fmt: skip
    # Reads of 5 ms and 10 us a token cross at 56 tokens: half of the smallest read that was seen is as far as it goes.
    high = _set("kvtune_connector_setting", 2048, setting="kv_recompute_threshold")
    yield Case(
        "KvtuneRecomputeWhereFetchIsFaster", "a threshold far above the crossing",
        edited(high, healthy(skipped_tokens=2000)), 60, (_PREFILL_MODEL,), 450,
    )  # fmt: skip


def _reuse_cases() -> Iterator[Case]:
    # 2 of 12.1 follow-up turns.
    yield Case(
        "KvtuneReuseCollapsed", "histories are rewritten", healthy(hit=2.0, absent=10.0), 60, (_ROUTER_JOB,), 0.165,
        quiet=1500, after=60, step=2,
    )  # fmt: skip
    nothing = "KvtuneNothingReused"
    yield Case(nothing, "streams carry no reference", healthy(hit=0.0, absent=12.0, expired=0.0), 45, (_ROUTER_JOB,), 0)
    yield Case(
        nothing, "nothing identifies conversations",
        healthy(hit=0.0, absent=0.0, expired=0.0, first=0.0, no_identity=12.0), 45, (_ROUTER_JOB,), 0,
    )  # fmt: skip
    # It burns from the first minute on: so both pairs of windows hold nothing but slow turns.
    yield Case(
        "KvtuneTTFTBurnRate", "every turn is slow", healthy(ttft_s=2.5), 75,
        ({**_ROUTER_JOB, "long": "1h", "short": "5m"}, {**_ROUTER_JOB, "long": "6h", "short": "30m"}), 1,
        severity="critical", quiet=0, after=400,
    )  # fmt: skip


def _settings_cases() -> Iterator[Case]:
    differ, below = "KvtuneSettingsDiffer", "KvtuneRouterTTLNotBelowEngine"
    yield Case(
        below, "decode's TTL was lowered alone",
        edited(_set("kvtune_connector_setting", 240, setting="decoder_kv_blocks_ttl")), 45, (_ROUTER_JOB,), 240,
    )  # fmt: skip
    yield Case(
        below, "the router asks for more than decode grants",
        edited(_set("kvtune_router_setting", 900, setting="retain_seconds")), 45, (_ROUTER_JOB,), 480,
    )  # fmt: skip
    second = (("job", "kvtune-prefill"), ("instance", "prefill-1:8100"), *ENGINE)
    other = edited(
        lambda world: world.show(
            "kvtune_connector_setting", 512, *second, role="prefill", setting="kv_recompute_threshold"
        )
    )
    yield Case(
        differ, "a second prefill with another threshold", other, 45, ({"setting": "kv_recompute_threshold"},), 448
    )
    yield Case(
        differ, "decode is not bidirectional",
        edited(_set("kvtune_connector_setting", 0, setting="bidirectional_kv_xfer", role="decode")), 45,
        ({"setting": "bidirectional_kv_xfer"},), 1,
    )  # fmt: skip


def _fleet_cases() -> Iterator[Case]:
    # 1.3 failed and 12 succeeded.
    yield Case(
        "KvtuneTransfersFailing", "one read in ten fails",
        edited(_grow("kvtune_kv_reads_failed_total", 1.3, direction="d2p", job="kvtune-prefill")), 30,
        ({**_PREFILL_MODEL, "direction": "d2p"},), 0.098,
    )  # fmt: skip
    yield Case(
        "KvtuneTransferSlow", "reads take ten times as long", healthy(read_s_per_token=0.0001, read_fixed_s=0.05), 60,
        ({**_PREFILL_MODEL, "direction": "d2p"},), 0.1, quiet=1500, after=60, step=2,
    )  # fmt: skip
    crash = edited(_grow("kvtune_engine_restarts_total", 0.2, role="decode"), healthy(gone=3.0, hit=9.0))
    # Every five minutes: 12 in the hour.
    yield Case(
        "KvtuneEngineRestartsLoseReferences", "decode restarts every five minutes", crash, 65,
        ({**_ROUTER_JOB, "engine": "decode-0:8200", "role": "decode"},), 12, after=90,
    )  # fmt: skip
    absent = "KvtuneExporterAbsent"
    for part, target in (("router", ROUTER), ("prefill", PREFILL), ("decode", DECODE)):
        yield Case(
            absent, f"no {part} is scraped", edited(_gone(target, down=False)), 20, ({"part": part},), 1, after=20
        )
    yield Case(
        absent, "decode does not answer, beside one that does",
        edited(_gone(DECODE, down=True), _with_second_decode()), 20, ({**dict(DECODE), "part": "target"},), 0,
        before=_with_second_decode(), after=20,
    )  # fmt: skip
    stuck = "KvtuneDeferredRequestsStuck"
    hung = edited(_set("vllm:num_requests_waiting_by_reason", 2, job="kvtune-prefill"))
    # Of the two, what passes keeps 0.2 reads a second waiting 45 ms each: 0.009.
    yield Case(stuck, "requests hang while others pass", hung, 30, (_OF_PREFILL,), 1.991)
    halted = _all(
        _set("vllm:num_requests_waiting", 2, job="kvtune-prefill"),
        _set("vllm:num_requests_running", 0, job="kvtune-prefill"),
        _set("vllm:num_requests_waiting_by_reason", None, job="kvtune-prefill"),
    )
    yield Case(
        stuck, "nothing runs and something waits", edited(halted, still()), 30, (_OF_PREFILL,), 2, before=still()
    )
    yield Case(
        stuck, "the same, vLLM's colon escaped", _renamed(edited(halted, still())), 30, (_OF_PREFILL,), 2,
        before=_renamed(still()),
    )  # fmt: skip
    yield Case(
        "KvtuneRecordingRulesAbsent", "no recording rules are loaded", healthy(), 30, ({},), 1, before=World(),
        without=("all",),
    )  # fmt: skip


def _with_second_decode() -> World:
    world = healthy()
    _engine(world, "decode", (("job", "kvtune-decode"), ("instance", "decode-1:8200")))
    return world


def _renamed(world: World) -> World:
    """The same deployment, with vLLM's names as Prometheus 2 may hold them."""

    def name(of: str) -> str:
        return of.replace("vllm:", "vllm_")

    return World(
        {(name(one), labels): rate for (one, labels), rate in world.rates.items()},
        {(name(one), labels): value for (one, labels), value in world.gauges.items()},
    )


def _text(labels: Labels) -> str:
    inside = ",".join(f'{name}="{value}"' for name, value in labels)
    return f"{{{inside}}}"


def _series(phases: list[tuple[World, int]], step: int, *, restart_at: int | None = None) -> list[dict[str, str]]:
    """Input series of a test whose phases last so many minutes each; all restart before phase `restart_at`."""
    counters = list(dict.fromkeys(key for world, _ in phases for key in world.rates))
    gauges = list(dict.fromkeys(key for world, _ in phases for key in world.gauges))
    found = []
    for name, labels in counters:
        at, parts = 0.0, []
        for number, (world, minutes) in enumerate(phases):
            if not minutes:
                continue
            if number == restart_at:
                at = 0.0
            steps = minutes // step
            if (name, labels) not in world.rates:
                parts.append(f"_x{steps}")
                continue
            rate = world.rates[name, labels] * step
            parts.append(f"{at:.12g}+{rate:.12g}x{steps - 1}")
            at += rate * steps
        found.append({"series": name + _text(labels), "values": " ".join(parts)})
    for name, labels in gauges:
        parts = []
        for world, minutes in phases:
            if not minutes:
                continue
            value = world.gauges.get((name, labels))
            steps = minutes // step
            parts.append(f"_x{steps}" if value is None else f"{value:g}x{steps - 1}")
        found.append({"series": name + _text(labels), "values": " ".join(parts)})
    return found


def _none_fires(minute: int) -> dict[str, Any]:
    return {"expr": 'ALERTS{alertstate="firing"}', "eval_time": f"{minute}m", "exp_samples": []}


_NAME = re.compile(r"(?:kvtune[:_]|vllm:|up\b|process_)[\w:]*")


def needed(expr: str, rules: Iterable[RecordingRule]) -> set[str]:
    """Every name that an expression reads, those that its recording rules read included."""
    by_name: dict[str, list[RecordingRule]] = {}
    for rule in rules:
        by_name.setdefault(rule.name, []).append(rule)
    found: set[str] = set()
    left = [expr]
    while left:
        for name in set(_NAME.findall(left.pop())) - found:
            found.add(name)
            left += [rule.expr for rule in by_name.get(name, ())]
    return found


def _case(case: Case, config: RulesConfig) -> dict[str, Any]:
    rules = recording_rules(config)
    asked = [alert for alert in alerts(config) if alert.name == case.alert]
    names = set().union(*(needed(alert.expr, rules) for alert in asked))
    names |= {name.replace("vllm:", "vllm_") for name in names}
    phases = [(case.before, case.quiet), (case.fault, case.lasts), (case.before, case.after)]
    end = case.quiet + case.lasts
    firing = f'ALERTS{{alertname="{case.alert}",alertstate="firing"}}'
    severity = case.severity or asked[0].severity
    while_it_lasts = [
        {
            "labels": "ALERTS" + _text((("alertname", case.alert), ("alertstate", "firing"), ("severity", severity),
                                        *sorted(labels.items()))),
            "value": 1,
        }
        for labels in case.fires
    ]  # fmt: skip
    tests: list[dict[str, Any]] = [
        {"expr": firing, "eval_time": f"{max(0, case.quiet - 1)}m", "exp_samples": []},
        {"expr": firing, "eval_time": f"{end - 1}m", "exp_samples": while_it_lasts},
        {"expr": firing, "eval_time": f"{end + case.after - 1}m", "exp_samples": []},
    ]
    for alert in asked:
        shown = [labels for labels in case.fires if alert.labels.items() <= labels.items()]
        if shown and alert.severity == severity:
            tests.append(_value_test(case, alert, shown, end - 1))
    return {
        "name": f"{case.alert}: {case.what}", "interval": f"{case.step}m",
        "input_series": [one for one in _series(phases, case.step) if one["series"].partition("{")[0] in names],
        "promql_expr_test": tests,
    }  # fmt: skip


def _value_test(case: Case, alert: Alert, shown: list[Mapping[str, str]], minute: int) -> dict[str, Any]:
    """The alert's own expression, whose number is what its text tells to set."""
    return {
        "expr": f"round({alert.expr}, 0.001)", "eval_time": f"{minute}m",
        "exp_samples": [
            {
                "labels": _text(tuple(sorted((k, v) for k, v in labels.items() if k not in alert.labels))),
                "value": case.value,
            }
            for labels in shown
        ],
    }  # fmt: skip


def _quiet_tests(rules: tuple[RecordingRule, ...]) -> Iterator[dict[str, Any]]:
    busy, idle = healthy(), still()
    yield {
        "name": "a healthy deployment: nothing fires, every rule has a sample", "interval": "1m",
        "input_series": _series([(busy, 90)], 1),
        "promql_expr_test": [_none_fires(minute) for minute in (6, 30, 88)] + list(_samples(rules, 88)),
    }  # fmt: skip
    yield {
        "name": "nobody uses it: nothing fires", "interval": "1m",
        "input_series": _series([(idle, 60), (busy, 40), (idle, 60)], 1),
        "promql_expr_test": [_none_fires(minute) for minute in (6, 58, 98, 110, 158)],
    }  # fmt: skip
    yield {
        "name": "everything restarts once: nothing fires", "interval": "1m",
        "input_series": _series([(busy, 45), (busy, 45)], 1, restart_at=1),
        "promql_expr_test": [_none_fires(minute) for minute in (44, 46, 50, 60, 88)],
    }  # fmt: skip


def _young() -> dict[str, Any]:
    """Predictions of a system that is younger than the windows: 8000 tokens at each of 14.3 turns a minute.

    Of those, 78 s of the first 240 s survive on average, and 102 s of 480 s.
    """
    demand = 14.3 * TURN_TOKENS / 60

    def held(minute: int, *seconds_by_factor: tuple[str, float]) -> dict[str, Any]:
        return {
            "expr": "round(kvtune:predicted_retained_tokens:mean)", "eval_time": f"{minute}m",
            "exp_samples": [
                {
                    "labels": f'{{factor="{factor}",job="kvtune-router"}}',
                    "value": round(demand * seconds),
                }
                for factor, seconds in seconds_by_factor
            ],
        }  # fmt: skip

    return {
        "name": "a young system: predictions divide by what was observed, and wait until it is as long as the TTL",
        "interval": "1m", "input_series": _series([(World(), 10), (healthy(), 30)], 1),
        "promql_expr_test": [held(12), held(16, ("0.5", 78.0)), held(20, ("0.5", 78.0), ("1", 102.0))],
    }  # fmt: skip


def _samples(rules: tuple[RecordingRule, ...], minute: int) -> Iterator[dict[str, Any]]:
    """That each rule records something."""
    for rule in rules:
        static = ",".join(f'{name}="{value}"' for name, value in rule.labels.items())
        yield {
            "expr": f"clamp_max(count({rule.name}{{{static}}}), 1)", "eval_time": f"{minute}m",
            "exp_samples": [{"labels": "{}", "value": 1}],
        }  # fmt: skip


def rule_tests(config: RulesConfig, recording: str, alert_file: str, fast: str) -> dict[str, dict[str, Any]]:
    """Documents for `promtool test rules`, by name: the quiet times, and one for each alert.

    Args:
        config: The default configuration: the numbers in here are made for it.
        recording: The file of all recording rules, as the documents name it.
        alert_file: The file of the alerts.
        fast: A file of the recording rules without those about other TTLs.
    """
    _check_names()
    rules = recording_rules(config)
    slow = {rule.name for rule in rules if rule.group == OTHER_TTLS}
    quiet = [*_quiet_tests(rules), _young()]
    found: dict[str, dict[str, Any]] = {
        "quiet": {"rule_files": [recording, alert_file], "evaluation_interval": "2m", "tests": quiet}
    }
    for case in cases():
        exprs = [alert.expr for alert in alerts(config) if alert.name == case.alert]
        reads = set().union(*(needed(expr, rules) for expr in exprs))
        files = [recording, alert_file] if reads & slow else [fast, alert_file]
        if case.without:
            files = [alert_file]
        key = f"{case.alert}{'-unloaded' if case.without else ''}"
        # As seldom as the alerts' `for` allow: a day of evaluations, or the rules about other TTLs, take time.
        every = 5 if case.quiet > 600 else 2 if files[0] == recording else 1
        document = found.setdefault(key, {"rule_files": files, "evaluation_interval": f"{every}m", "tests": []})
        document["tests"].append(_case(case, config))
    return found


def _check_names() -> None:
    """Input series that no exporter has would test nothing."""
    samples = {name for metric in BY_NAME.values() for name in metric.sample_names()}
    world = healthy()
    for name, _ in (*world.rates, *world.gauges):
        assert not name.startswith("kvtune_") or name in samples, name
