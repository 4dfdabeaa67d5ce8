"""Unit tests of the rules for `promtool test rules`: a small deployment, healthy, idle, restarted, and with each fault.

Every alert is asked three times: before its fault, while it lasts, and after. Written for the default configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvtune_dashboards.config import RulesConfig
from kvtune_dashboards.recording import RecordingRule, recording_rules
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
    before: World = field(default_factory=healthy)
    quiet: int = 30
    after: int = 45
    step: int = 1
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of the firing alert beside its name."""
    value: tuple[str, float] | None = None
    """An expression that the alert's number comes from, and what it must be while the fault lasts."""


def cases() -> Iterator[Case]:
    """One for each way an alert fires."""
    twice = healthy(gaps=lambda t: 0.9 * min(t / 900.0, 1.0), expired=4.0, hit=9.0)
    yield Case(
        "KvtuneLateReadOfFreedKV", "kvtune's connector", edited(_grow("kvtune_kv_late_notifications_total", 0.5)), 10
    )
    yield Case(
        "KvtuneLateReadOfFreedKV", "stock vLLM",
        edited(_grow("vllm:nixl_num_notifications_after_expiry_total", 0.5, job="kvtune-decode")), 10,
        labels={"job": "kvtune-decode"},
    )  # fmt: skip
    lax = _all(
        _set("kvtune_router_setting", 1, setting="accept_unverified"),
        _set("kvtune_connector_setting", 0, setting="require_fingerprint"),
    )
    yield Case("KvtuneReuseGuardBypassed", "nobody insists on proof", edited(lax), 10, labels={"job": "kvtune-router"})
    stock = _all(
        _set("kvtune_router_setting", 1, setting="accept_unverified"),
        lambda world: world.show("kvtune_engine_up", 1, *ROUTER, engine="stock:8100", role="prefill"),
    )
    yield Case("KvtuneReuseGuardBypassed", "a stock prefill beside one that proves", edited(stock), 10)
    alone = _all(
        _set("kvtune_connector_setting", 0, setting="require_fingerprint"),
        _set("kvtune_router_setting", None),
    )
    yield Case("KvtuneReuseGuardBypassed", "another router, prefill asks for no proof", edited(alone), 10,
               labels={"job": "kvtune-prefill"})  # fmt: skip
    # 98 % of returns, evenly over 900 s, end at 882 s; the 6 s of the margin come on top.
    yield Case(
        "KvtuneExpiredReadsHigh", "pauses longer than the TTL", twice, 45, before=healthy(gaps=lambda t: 0.9 * min(t / 900.0, 1.0)),
        after=45, value=("kvtune:ttl_seconds:reaches_target", 888.0),
    )  # fmt: skip
    crowd = _all(_set("kvtune_retained_tokens", 0.6 * POOL), _set("vllm:num_requests_waiting", 3, job="kvtune-decode"))
    yield Case("KvtuneRetainedKVCrowdsPool", "requests wait for memory", edited(crowd), 30)
    dear = healthy(read_fixed_s=0.2, read_s_per_token=0.00005)
    # 0.2 s / (100 - 50) us a token.
    yield Case("KvtuneFetchSlowerThanRecompute", "reads with a high fixed cost", dear, 120, after=90,
               value=("round(kvtune:threshold_tokens:crossing / 10) * 10", 4000.0))  # fmt: skip
    high = _set("kvtune_connector_setting", 2048, setting="kv_recompute_threshold")
    yield Case("KvtuneRecomputeWhereFetchIsFaster", "a threshold far above the crossing",
               edited(high, healthy(skipped_tokens=2000)), 60)  # fmt: skip
    yield Case(
        "KvtuneReuseCollapsed",
        "histories are rewritten",
        healthy(hit=2.0, absent=10.0),
        60,
        quiet=1500,
        after=60,
        step=2,
    )
    yield Case("KvtuneNothingReused", "streams carry no reference", healthy(hit=0.0, absent=12.0, expired=0.0), 45)
    yield Case("KvtuneNothingReused", "nothing identifies conversations",
               healthy(hit=0.0, absent=0.0, expired=0.0, first=0.0, no_identity=12.0), 45)  # fmt: skip
    yield Case("KvtuneRouterTTLNotBelowEngine", "decode's TTL was lowered alone",
               edited(_set("kvtune_connector_setting", 240, setting="decoder_kv_blocks_ttl")), 45)  # fmt: skip
    yield Case("KvtuneRouterTTLNotBelowEngine", "the router asks for more than decode grants",
               edited(_set("kvtune_router_setting", 900, setting="retain_seconds")), 45)  # fmt: skip
    second = (("job", "kvtune-prefill"), ("instance", "prefill-1:8100"), *ENGINE)
    other = edited(
        lambda world: world.show(
            "kvtune_connector_setting", 512, *second, role="prefill", setting="kv_recompute_threshold"
        )
    )
    yield Case("KvtuneSettingsDiffer", "a second prefill with another threshold", other, 45,
               labels={"setting": "kv_recompute_threshold"})  # fmt: skip
    yield Case("KvtuneSettingsDiffer", "decode is not bidirectional",
               edited(_set("kvtune_connector_setting", 0, setting="bidirectional_kv_xfer", role="decode")), 45,
               labels={"setting": "bidirectional_kv_xfer"})  # fmt: skip
    yield Case("KvtuneTransfersFailing", "one read in ten fails",
               edited(_grow("kvtune_kv_reads_failed_total", 1.3, direction="d2p")), 30, labels={"direction": "d2p"})  # fmt: skip
    yield Case("KvtuneTransferSlow", "reads take ten times as long",
               healthy(read_s_per_token=0.0001, read_fixed_s=0.05), 60, quiet=1500, after=60, step=2,
               labels={"direction": "d2p"})  # fmt: skip
    crash = edited(_grow("kvtune_engine_restarts_total", 0.2, role="decode"), healthy(gone=3.0, hit=9.0))
    yield Case("KvtuneEngineRestartsLoseReferences", "decode restarts every five minutes", crash, 30, after=90,
               labels={"role": "decode"})  # fmt: skip
    slow = healthy(ttft_s=2.5)
    yield Case("KvtuneTTFTBurnRate", "every turn is slow", slow, 75, after=90, labels={"long": "1h"})
    for part, target in (("router", ROUTER), ("prefill", PREFILL), ("decode", DECODE)):
        yield Case("KvtuneExporterAbsent", f"no {part} is scraped", edited(_gone(target, down=False)), 20, after=20,
                   labels={"part": part})  # fmt: skip
    yield Case("KvtuneExporterAbsent", "decode does not answer", edited(_gone(DECODE, down=True)), 20, after=20,
               labels={"part": "target", "instance": "decode-0:8200"})  # fmt: skip
    hung = edited(_set("vllm:num_requests_waiting_by_reason", 2, job="kvtune-prefill"))
    yield Case(
        "KvtuneDeferredRequestsStuck", "requests hang while others pass", hung, 30, labels={"job": "kvtune-prefill"}
    )
    halted = _all(
        _set("vllm:num_requests_waiting", 2, job="kvtune-prefill"),
        _set("vllm:num_requests_running", 0, job="kvtune-prefill"),
        _set("vllm:num_requests_waiting_by_reason", None, job="kvtune-prefill"),
    )
    yield Case(
        "KvtuneDeferredRequestsStuck", "nothing runs and something waits", edited(halted, still()), 30, before=still()
    )


def _text(labels: Labels) -> str:
    inside = ",".join(f'{name}="{value}"' for name, value in labels)
    return f"{{{inside}}}"


def _series(phases: list[tuple[World, int]], step: int, *, restart_at: int | None = None) -> list[dict[str, str]]:
    """Input series of a test whose phases last so many minutes each; `restart_at`: the phase before which all restart."""
    counters = list(dict.fromkeys(key for world, _ in phases for key in world.rates))
    gauges = list(dict.fromkeys(key for world, _ in phases for key in world.gauges))
    found = []
    for name, labels in counters:
        at, parts = 0.0, []
        for number, (world, minutes) in enumerate(phases):
            if number == restart_at:
                at = 0.0
            rate = world.rates.get((name, labels), 0.0) * step
            steps = minutes // step
            parts.append(f"{at:.12g}+{rate:.12g}x{steps - 1}")
            at += rate * steps
        found.append({"series": name + _text(labels), "values": " ".join(parts)})
    for name, labels in gauges:
        parts = []
        for world, minutes in phases:
            value = world.gauges.get((name, labels))
            steps = minutes // step
            parts.append(f"_x{steps}" if value is None else f"{value:g}x{steps - 1}")
        found.append({"series": name + _text(labels), "values": " ".join(parts)})
    return found


def _firing(alert: str, labels: Mapping[str, str], minute: int, *, expected: bool) -> dict[str, Any]:
    """An expectation: whether the alert fires at that time."""
    more = "".join(f',{name}="{value}"' for name, value in labels.items())
    return {
        "expr": f'clamp_max(count(ALERTS{{alertname="{alert}",alertstate="firing"{more}}}), 1)',
        "eval_time": f"{minute}m",
        "exp_samples": [{"labels": "{}", "value": 1}] if expected else [],
    }


def _none_fires(minute: int) -> dict[str, Any]:
    return {"expr": 'ALERTS{alertstate="firing"}', "eval_time": f"{minute}m", "exp_samples": []}


def _case(case: Case) -> dict[str, Any]:
    phases = [(case.before, case.quiet), (case.fault, case.lasts), (case.before, case.after)]
    end = case.quiet + case.lasts
    tests = [
        _firing(case.alert, {}, case.quiet - 1, expected=False),
        _firing(case.alert, case.labels, end - 1, expected=True),
        _firing(case.alert, {}, end + case.after - 1, expected=False),
    ]
    if case.value is not None:
        expr, value = case.value
        tests.append(
            {"expr": f"sum({expr})", "eval_time": f"{end - 1}m", "exp_samples": [{"labels": "{}", "value": value}]}
        )
    return {
        "name": f"{case.alert}: {case.what}", "interval": f"{case.step}m",
        "input_series": _series(phases, case.step), "promql_expr_test": tests,
    }  # fmt: skip


def _quiet_tests(rules: tuple[RecordingRule, ...]) -> Iterator[dict[str, Any]]:
    busy, idle = healthy(), still()
    yield {
        "name": "a healthy deployment: nothing fires, every rule has a sample", "interval": "1m",
        "input_series": _series([(busy, 120)], 1),
        "promql_expr_test": [_none_fires(minute) for minute in (5, 30, 119)] + list(_samples(rules, 119)),
    }  # fmt: skip
    yield {
        "name": "nobody uses it: nothing fires", "interval": "1m",
        "input_series": _series([(idle, 90), (busy, 60), (idle, 90)], 1),
        "promql_expr_test": [_none_fires(minute) for minute in (5, 89, 149, 170, 239)],
    }  # fmt: skip
    yield {
        "name": "everything restarts once: nothing fires", "interval": "1m",
        "input_series": _series([(busy, 60), (busy, 60)], 1, restart_at=1),
        "promql_expr_test": [_none_fires(minute) for minute in (59, 61, 65, 75, 119)],
    }  # fmt: skip


def _samples(rules: tuple[RecordingRule, ...], minute: int) -> Iterator[dict[str, Any]]:
    """That each rule records something."""
    for rule in rules:
        static = ",".join(f'{name}="{value}"' for name, value in rule.labels.items())
        yield {
            "expr": f"clamp_max(count({rule.name}{{{static}}}), 1)", "eval_time": f"{minute}m",
            "exp_samples": [{"labels": "{}", "value": 1}],
        }  # fmt: skip


def rule_tests(config: RulesConfig, rule_files: list[str]) -> dict[str, Any]:
    """The document for `promtool test rules`; `rule_files` relative to it."""
    _check_names()
    tests = [*_quiet_tests(recording_rules(config)), *(_case(case) for case in cases())]
    return {"rule_files": rule_files, "evaluation_interval": "1m", "tests": tests}


def _check_names() -> None:
    """Input series that no exporter has would test nothing."""
    samples = {name for metric in BY_NAME.values() for name in metric.sample_names()}
    world = healthy()
    for name, _ in (*world.rates, *world.gauges):
        assert not name.startswith("kvtune_") or name in samples, name
