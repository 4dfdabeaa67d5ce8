"""The body of `kvtune simulate`: what to replay, in how many processes, and the rows that come out."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from kvtune_bench.calibration import calibration
from kvtune_bench.replay import policies
from kvtune_bench.replay.model import Deployment, Load, ReplayError, Result, Setting
from kvtune_bench.replay.observe import ObservedDeployment, quiet, to_directory
from kvtune_bench.replay.simulator import Replay
from kvtune_bench.traces import Plan, load_trace, plan
from kvtune_connector.policy import DEFAULT_THRESHOLD_TOKENS, DEFAULT_TTL_S
from kvtune_tuning.recording import SUFFIX

SCHEMA = "kvtune.simulate/1"
POLICIES = ("default", "suggestion", "ski_rental", "keep_alive_p99", "continuum", "hindsight", "clairvoyant")
SCRAPE_S = 60.0
"""Between the snapshots that `--snapshot` writes."""
_OBSERVED_SEED = 7919
"""Added to the seed for the traffic a suggestion is made from: it is judged on other traffic."""
LESSONS = tuple((share, number) for share in (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0) for number in range(3))
"""Watched to see how a suggestion gets better: shares of the window, and windows of each length."""


@dataclass(frozen=True, slots=True)
class Request:
    """All that was asked for."""

    trace: Path | None = None
    model: str = "qwen3-32b"
    ttls_s: tuple[float, ...] = ()
    thresholds: tuple[int, ...] = (DEFAULT_THRESHOLD_TOKENS,)
    rates: tuple[float, ...] = (0.4,)
    pools: tuple[int, ...] = ()
    """Tokens; empty: the model's own."""
    compared: tuple[str, ...] = POLICIES
    seed: int = 1
    duration_s: float = 4 * 3600.0
    warmup_s: float = 1800.0
    prefill_engines: int = 1
    prefill_cache: bool = False
    noise: float = 0.1
    current_ttl_s: float = DEFAULT_TTL_S
    explore: float = 0.0
    snapshot: Path | None = None
    stock: bool = False
    learning: bool = False
    """Also ask after shorter windows: how good a suggestion is, by conversations seen."""
    jobs: int = 0
    """Processes; 0: as many as there are cores."""


@dataclass(frozen=True, slots=True)
class _Case:
    """One replay."""

    policy: str
    deployment: Deployment
    setting: Setting
    load: Load
    snapshot: Path | None = None
    stock: bool = False


_plans: list[Plan] = []


def _take_plans(plans: list[Plan]) -> None:
    """In each worker process: the conversations, once."""
    quiet()
    _plans[:] = plans


def _play(case: _Case) -> tuple[Result, float]:
    began = time.perf_counter()
    observer, tick = None, None
    if case.snapshot is not None:
        observer = ObservedDeployment(case.deployment, case.setting, to_directory(case.snapshot), stock=case.stock)
        tick = SCRAPE_S
    result = Replay(_plans, case.deployment, case.setting, case.load, observer=observer, tick_s=tick).run()
    return result, time.perf_counter() - began


def _suggest(case: _Case) -> tuple[Setting, dict[str, Any]]:
    return policies.suggestion(
        _plans, case.deployment, case.load, ttl_s=case.setting.ttl_s, threshold_tokens=case.setting.threshold_tokens,
        explore=case.setting.explore, stock=case.stock,
    )  # fmt: skip


def row(case: _Case, result: Result) -> dict[str, Any]:
    """What one replay says; None where there is nothing to say it from."""
    foresight = case.setting.holds is not None
    return {
        "policy": case.policy,
        "ttl": None if foresight else case.setting.ttl_s,
        "threshold": case.setting.threshold_tokens,
        "rate": case.load.turns_per_s,
        "pool_tokens": case.deployment.pool_tokens,
        "turns": result.turns,
        "turns_per_s": result.turns_per_s,
        "hit_ratio": result.hit_ratio,
        "ttft_mean_s": result.ttft_mean_s,
        "ttft_p50_s": result.ttft_quantile_s(0.5),
        "ttft_p90_s": result.ttft_quantile_s(0.9),
        "pinned_tokens_mean": result.pinned_mean,
        "pinned_tokens_p99": result.pinned_p99,
        "active_tokens_mean": result.active_mean,
        "wasted_token_seconds": result.wasted_token_s,
        "used_token_seconds": result.used_token_s,
        "waited_for_room": result.waited,
        "waited_for_room_mean_s": result.waited_s / result.waited if result.waited else 0.0,
        "unserved": result.unserved,
        "outcomes": {str(outcome): count for outcome, count in sorted(result.outcomes.items())},
    }


Progress = Callable[[int, int, str], None]
"""Gets replays done, replays known so far, and what was done last."""


def simulate(request: Request, progress: Progress | None = None) -> dict[str, Any]:
    """Replay everything that was asked for and return the document.

    Raises ReplayError, TraceError, CalibrationError, TuningError (snapshots that cannot be written).
    """
    model = calibration(request.model)
    plans = plan(load_trace(request.trace), context_limit=model.context_tokens)
    unknown = sorted(set(request.compared) - set(POLICIES))
    if unknown:
        raise ReplayError(f"unknown policy {unknown[0]!r}; choose from {', '.join(POLICIES)}, or none")
    if request.stock and request.explore:
        raise ReplayError("a deployment without kvtune does not explore: leave out explore, or stock")
    if request.snapshot is not None and any(request.snapshot.glob(f"*{SUFFIX}")):
        raise ReplayError(f"{request.snapshot} has snapshots already: name an empty directory for --snapshot")
    began = time.perf_counter()
    jobs = request.jobs or os.cpu_count() or 1
    pools = request.pools or (model.pool_tokens,)
    advice: list[dict[str, Any]] = []
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_take_plans, initargs=(plans,)) as pool:
        worlds = []
        for rate, tokens in product(request.rates, pools):
            deployment = Deployment(
                model, tokens, prefill_engines=request.prefill_engines, prefill_cache=request.prefill_cache,
                noise=request.noise,
            )  # fmt: skip
            worlds.append(
                _World(request, plans, deployment, Load(rate, request.duration_s, request.warmup_s, request.seed))
            )
        if request.snapshot is not None and sum(len(w.settings()) for w in worlds) != 1:
            raise ReplayError(
                "--snapshot writes what one setting would have exposed: give one --ttl, one --threshold, one --rate "
                "and one --pool-tokens"
            )
        first = [case for world in worlds for case in world.first()]
        asking = worlds if "suggestion" in request.compared else []
        lessons = [(world, case) for world in asking if request.learning for case in world.lessons()]
        tally = _Tally(progress, len(first) + len(asking) + len(lessons))
        pending = [pool.submit(_play, case) for case in first]
        questions = [pool.submit(_suggest, world.observed()) for world in asking]
        answers = [pool.submit(_suggest, case) for _, case in lessons]
        results = list(tally.collect(first, pending))
        second = [case for world in worlds for case in world.second([(c, r) for c, r, _ in results if world.owns(c)])]
        for world, question in zip(asking, questions, strict=True):
            setting, document = question.result()
            second.append(world.case("suggestion", setting))
            advice.append(
                {"rate": world.load.turns_per_s, "pool_tokens": world.deployment.pool_tokens, **_said(document)}
            )
            tally.one(second[-1])
        learnt = []
        for (world, watched), answer in zip(lessons, answers, strict=True):
            setting, document = answer.result()
            learnt.append((watched, world.case("learning", setting), document))
            tally.one(watched)
        second += dict.fromkeys(case for _, case, _ in learnt)
        tally.total += len(second)
        results += tally.collect(second, [pool.submit(_play, case) for case in second])
    rows = [row(case, result) for world in worlds for case, result in world.chosen([(c, r) for c, r, _ in results])]
    turns = sum(result.turns for _, result, _ in results)
    reached = {case: result.ttft_mean_s for case, result, _ in results}
    return {
        "schema": SCHEMA,
        "trace": "packaged sample" if request.trace is None else str(request.trace),
        "conversations": len(plans),
        "model": model.name,
        "seed": request.seed,
        "explore": request.explore,
        "window_s": request.duration_s,
        "simulated": True,
        "replays": len(results),
        "turns_replayed": turns,
        "turns_per_second": turns / max(1e-9, sum(seconds for *_, seconds in results)),
        "seconds": time.perf_counter() - began,
        "suggestions": advice,
        "rows": rows,
        "sweep": [row(case, result) for case, result, _ in results if case.policy == "hindsight"],
        "learning": [_learnt(watched, case, document, reached) for watched, case, document in learnt],
    }


def _learnt(
    watched: _Case, case: _Case, document: dict[str, Any], reached: dict[_Case, float | None]
) -> dict[str, Any]:
    """One suggestion after a window: what was seen, what was said, and how far that is from the best fixed TTL."""
    ttft = reached[case]
    sweep = [
        other for swept, other in reached.items()
        if swept.policy == "hindsight" and swept.load == case.load and swept.deployment == case.deployment and other
    ]  # fmt: skip
    return {
        "rate": case.load.turns_per_s,
        "pool_tokens": case.deployment.pool_tokens,
        "watched_s": watched.load.duration_s,
        "conversations": None if "error" in document else document["evidence"]["conversations"],
        "status": "error" if "error" in document else _said(document)["decoder_kv_blocks_ttl"]["status"],
        "ttl": case.setting.ttl_s,
        "ttft_mean_s": ttft,
        # a suggestion between the swept TTLs may be better than the best of them
        "regret": None if ttft is None or not sweep else max(0.0, ttft / min(sweep) - 1),
    }


@dataclass(slots=True)
class _Tally:
    """Counts replays and tells whoever wants to know."""

    progress: Progress | None
    total: int
    done: int = 0

    def one(self, case: _Case) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, self.total, f"{case.policy} at {case.load.turns_per_s:g} turns/s")

    def collect(
        self, cases: Sequence[_Case], pending: Sequence[Future[tuple[Result, float]]]
    ) -> Iterator[tuple[_Case, Result, float]]:
        """Each case with its result and how long it took (s)."""
        for case, future in zip(cases, pending, strict=True):
            result, seconds = future.result()
            self.one(case)
            yield case, result, seconds


def _said(document: dict[str, Any]) -> dict[str, Any]:
    if "error" in document:
        return {"error": document["error"]}
    return {
        one["setting"]: {key: one[key] for key in ("status", "current", "recommended", "reason_code", "reason")}
        for one in document["recommendations"]
    }


@dataclass(frozen=True, slots=True)
class _World:
    """One load on one pool: which replays it needs, in two rounds, and which of them are shown."""

    request: Request
    plans: Sequence[Plan]
    deployment: Deployment
    load: Load

    def case(self, policy: str, setting: Setting, snapshot: Path | None = None) -> _Case:
        setting = replace(setting, explore=self.request.explore)
        return _Case(policy, self.deployment, setting, self.load, snapshot, self.request.stock)

    def owns(self, case: _Case) -> bool:
        return case.deployment == self.deployment and case.load == self.load

    def settings(self) -> list[Setting]:
        return [Setting(ttl, threshold) for ttl, threshold in product(self.request.ttls_s, self.request.thresholds)]

    @property
    def _threshold(self) -> int:
        return self.request.thresholds[0]

    def first(self) -> list[_Case]:
        """What needs nothing but the request: the settings asked for, the fixed rules, and the sweep for hindsight."""
        asked = [self.case("fixed", setting, self.request.snapshot) for setting in self.settings()]
        wanted = set(self.request.compared)
        cases = []
        if wanted & {"default", "continuum"}:
            cases.append(self.case("default", Setting(DEFAULT_TTL_S, DEFAULT_THRESHOLD_TOKENS)))
        if "ski_rental" in wanted:
            ttl = policies.ski_rental_ttl(self.plans, self.deployment)
            cases.append(self.case("ski_rental", Setting(round(ttl, 1), self._threshold)))
        if "keep_alive_p99" in wanted:
            cases.append(
                self.case("keep_alive_p99", Setting(round(policies.keep_alive_ttl(self.plans), 1), self._threshold))
            )
        if "hindsight" in wanted:
            cases += [self.case("hindsight", Setting(ttl, self._threshold)) for ttl in policies.SWEEP_S]
        if "clairvoyant" in wanted:
            cases += [
                self.case("clairvoyant", Setting(ttl, self._threshold, policies.Foresight(ttl)))
                for ttl in policies.SWEEP_S[1:]
            ]
        return asked + cases

    def observed(self) -> _Case:
        """The traffic a suggestion is made from: as much, but not the same."""
        load = replace(self.load, seed=self.load.seed + _OBSERVED_SEED)
        setting = Setting(self.request.current_ttl_s, self._threshold, explore=self.request.explore)
        return _Case("suggestion", self.deployment, setting, load, None, self.request.stock)

    def lessons(self) -> list[_Case]:
        """Traffic to make suggestions from after less of it."""
        whole = self.observed()
        loads = [
            replace(whole.load, duration_s=share * whole.load.duration_s, seed=whole.load.seed + 1 + number)
            for share, number in LESSONS
        ]
        return [replace(whole, load=load) for load in loads]

    def second(self, seen: list[tuple[_Case, Result]]) -> list[_Case]:
        """What needs to know how the default did."""
        if "continuum" not in self.request.compared:
            return []
        default = next(result for case, result in seen if case.policy == "default")
        waiting = default.waited_s / max(1, default.turns)
        ttl = policies.continuum_ttl(self.plans, self.deployment.calibration, waiting)
        return [self.case("continuum", Setting(round(ttl, 1), self._threshold))]

    def chosen(self, results: Iterable[tuple[_Case, Result]]) -> list[tuple[_Case, Result]]:
        """Rows in order: the settings asked for, then the rules; of the searched ones the best."""
        mine = [(case, result) for case, result in results if self.owns(case)]
        shown = [(case, result) for case, result in mine if case.policy == "fixed"]
        for policy in self.request.compared:
            of = [(case, result) for case, result in mine if case.policy == policy]
            if of:
                shown.append(min(of, key=lambda pair: (pair[1].ttft_mean_s or float("inf"), pair[0].setting.ttl_s)))
        return shown


def to_json(document: dict[str, Any]) -> str:
    """The document as text."""
    return json.dumps(document, indent=2, allow_nan=False)
