"""How good `kvtune suggest` is on conversations it never saw: replayed, simulated, on both halves of a split.

    python bench/scripts/suggest_regret.py [--agent TRACE] [--chat TRACE] [--seeds 5] [--hours 2] [--json FILE]

For each traffic, model, direction of the split and load: a deployment is replayed on one half's conversations at a
running TTL, a window for each seed, and watched through its scrapes only; what `kvtune suggest` makes of a window is
replayed on the other half, as are the default and a sweep of fixed TTLs, each with as many seeds. Loads are set so that
the 99th percentile of retained and active KV at 480 s would be 0.6, 0.9, 1.1 and 1.4 of the pool. Then the table:
regret against the best fixed TTL in hindsight, harm against the TTL in force, predictions against replays, repetition,
few conversations, intervals, thresholds. A world takes one to three minutes of a core.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from kvtune_bench.calibration import PRESETS, Calibration
from kvtune_bench.replay import policies
from kvtune_bench.replay.model import Deployment, Load, Setting
from kvtune_bench.replay.observe import quiet
from kvtune_bench.replay.simulator import Replay
from kvtune_bench.traces import Conversation, Plan, load_trace, plan
from kvtune_connector.policy import EXPIRY_MARGIN_S
from kvtune_router.config import MAX_EXPLORE
from kvtune_tuning.ttl import Z_P99

DATA = Path(__file__).parents[1] / "data"
USAGES = (0.6, 0.9, 1.1, 1.4)
RUNNING = (480.0, 60.0, 1200.0)
PREDICTED = (60.0, 120.0, 240.0, 480.0)
"""TTLs whose predicted retention is compared with a replay."""
JUDGED_S = 2 * 3600.0
FEW = 20
WINDOWS = 20
"""Independent windows of a world, to see whether their intervals cover."""


@dataclass(frozen=True)
class World:
    """One cell of the table."""

    traffic: str
    model: str
    way: int
    """0: watch the first half, judge on the second; 1: the other way round."""
    usage: float
    seeds: tuple[int, ...]
    """Of the windows that are watched, and of the traffic it is judged on."""
    watched_s: float


_traces: dict[str, list[Conversation]] = {}


def _take(traces: dict[str, list[Conversation]]) -> None:
    quiet()
    _traces.update(traces)


def halves(conversations: Sequence[Conversation]) -> tuple[list[Conversation], list[Conversation]]:
    """A split by conversation that no seed changes."""
    mixed = list(conversations)
    random.Random(0).shuffle(mixed)
    return mixed[::2], mixed[1::2]


@dataclass(frozen=True)
class Turns:
    """Tokens at a turn's end, pause (inf: never returns), what the next prompt reuses, time in decode: shape (n,)."""

    tokens: np.ndarray
    gap: np.ndarray
    reused: np.ndarray
    active_s: np.ndarray

    @classmethod
    def of(cls, plans: Sequence[Plan], calibration: Calibration) -> Turns:
        """All turns of all conversations."""
        rows = []
        for one in plans:
            for turn, after in zip(one.turns, [*one.turns[1:], None], strict=True):
                rows.append(
                    (
                        turn.sequence_tokens,
                        math.inf if turn.gap_s is None else turn.gap_s,
                        0 if after is None else after.keep_tokens,
                        calibration.handoff.at(turn.prompt_tokens) + turn.output_tokens * calibration.decode_token_s,
                    )
                )
        return cls(*np.array(rows, dtype=float).T)

    def demand(self, ttl_s: float) -> tuple[float, float]:
        """Mean and variance of retained and active tokens, a turn a second."""
        hold = np.minimum(self.gap, ttl_s) + self.active_s
        return float((self.tokens * hold).mean()), float((self.tokens**2 * hold).mean())

    def worth(self, ttl_s: float, break_even_s: float) -> float:
        """J(T): the share of tokens saved, less the price of what is held."""
        hit = self.reused[self.gap <= ttl_s - EXPIRY_MARGIN_S].sum()
        return float((hit - (self.tokens * np.minimum(self.gap, ttl_s)).sum() / break_even_s) / self.tokens.sum())


def rate_for(turns: Turns, ttl_s: float, tokens: float) -> float:
    """Turns a second at which the 99th percentile of the demand is `tokens`."""
    mean, variance = turns.demand(ttl_s)
    root = (-Z_P99 * math.sqrt(variance) + math.sqrt(Z_P99**2 * variance + 4 * mean * tokens)) / (2 * mean)
    return root**2


def judge(world: World) -> dict[str, Any]:
    """Everything about one world: each seed's window gives a suggestion, judged by its mean over all seeds' traffic.

    One seed's mean is mostly that of a few long conversations.
    """
    model = PRESETS[world.model]
    pair = [plan(half, context_limit=model.context_tokens) for half in halves(_traces[world.traffic])]
    watched, judged = pair[world.way], pair[1 - world.way]
    deployment = Deployment(model, model.pool_tokens)
    tokens = world.usage * model.pool_tokens
    rate, watch_rate = (rate_for(Turns.of(half, model), 480.0, tokens) for half in (judged, watched))
    ttft: dict[float, float] = {}

    def mean_ttft(ttl_s: float) -> float:
        if ttl_s not in ttft:
            loads = [Load(rate, JUDGED_S, seed=seed + 100) for seed in world.seeds]
            runs = [Replay(judged, deployment, Setting(ttl_s), load).run() for load in loads]
            ttft[ttl_s] = statistics.fmean(run.ttft_mean_s or math.inf for run in runs)
        return ttft[ttl_s]

    best = min(mean_ttft(ttl) for ttl in policies.SWEEP_S)
    out: dict[str, Any] = {
        "world": vars(world), "rate": rate, "best_s": best, "default_s": mean_ttft(480.0),
        "default_regret": mean_ttft(480.0) / best - 1, "suggestions": [],
    }  # fmt: skip
    documents = []
    for running, seed in product(RUNNING, world.seeds):
        setting, document = policies.suggestion(
            watched, deployment, Load(watch_rate, world.watched_s, seed=seed), ttl_s=running
        )
        entry: dict[str, Any] = {
            "running": running, "seed": seed, "ttl": setting.ttl_s, "regret": mean_ttft(setting.ttl_s) / best - 1,
            "harm": mean_ttft(setting.ttl_s) / mean_ttft(running) - 1, "status": "error",
        }  # fmt: skip
        if "error" not in document:
            told = document["recommendations"][0]
            entry |= {key: told[key] for key in ("status", "reason_code", "interval", "clamped_by", "model")}
            if running == 480.0:
                documents.append(document)
                again, _ = policies.suggestion(
                    watched, deployment, Load(watch_rate, world.watched_s, seed=seed + 500),
                    ttl_s=setting.ttl_s or 480.0,
                )  # fmt: skip
                entry["again"] = again.ttl_s if setting.ttl_s else setting.ttl_s
                entry["again_regret"] = mean_ttft(entry["again"]) / best - 1
        out["suggestions"].append(entry)
    loads = [Load(watch_rate, world.watched_s, seed=seed) for seed in world.seeds]
    out["predictions"] = predictions(documents, watched, deployment, loads) if world.usage < 1 else []
    out["ttft"] = sorted(ttft.items())
    return out


def predictions(
    documents: list[dict[str, Any]], plans: Sequence[Plan], deployment: Deployment, loads: Sequence[Load]
) -> list[tuple[float, float, float]]:
    """(TTL, predicted over replayed mean, the same of the 99th percentile); each the mean over the windows.

    Nothing where no window had data enough to predict.
    """
    found = []
    for ttl in PREDICTED:
        rows = [row for one in documents for row in one["recommendations"][0]["counterfactual"] if row["value"] == ttl]
        if not rows:
            continue
        runs = [Replay(plans, deployment, Setting(ttl), load).run() for load in loads]
        ratios = [
            statistics.fmean(row[key] for row in rows) / statistics.fmean(replayed)
            for key, replayed in (
                ("pinned_tokens_mean", [run.pinned_mean for run in runs]),
                ("pinned_tokens_p99", [run.pinned_p99 for run in runs]),
            )
        ]
        found.append((ttl, ratios[0], ratios[1]))
    return found


def intervals(world: World, windows: int) -> list[tuple[float, float, float]]:
    """(low, high, best before rounding) of independent windows of the world, where a window gives an interval."""
    model = PRESETS[world.model]
    watched = plan(halves(_traces[world.traffic])[world.way], context_limit=model.context_tokens)
    rate = rate_for(Turns.of(watched, model), 480.0, world.usage * model.pool_tokens)
    found = []
    for seed in range(1001, 1001 + windows):
        load = Load(rate, world.watched_s, seed=seed)
        _, document = policies.suggestion(watched, Deployment(model, model.pool_tokens), load)
        told = {} if "error" in document else document["recommendations"][0]
        if told.get("interval"):
            found.append((*told["interval"], told["uncapped"]))
    return found


def few(traffic: str, model_name: str, seed: int, duration_s: float) -> float | None:
    """Value regret, as a share of savable prefill, when only `FEW` conversations were seen."""
    model = PRESETS[model_name]
    first, second = halves(_traces[traffic])
    chosen = random.Random(seed).sample(first, FEW)
    watched, unseen = plan(chosen, context_limit=model.context_tokens), plan(second, context_limit=model.context_tokens)
    turns, other = Turns.of(watched, model), Turns.of(unseen, model)
    load = Load(rate_for(turns, 480.0, 0.6 * model.pool_tokens), duration_s, seed=seed)
    _, document = policies.suggestion(watched, Deployment(model, model.pool_tokens), load, ttl_s=1200.0)
    if "error" in document:
        return None
    told = document["recommendations"][0]["model"]
    if told["value_ttl_s"] is None:
        return None
    # At the price of a pool that is half scarce: a price that matters.
    beta = policies.ski_rental_ttl(unseen, Deployment(model, model.pool_tokens)) / 0.5
    grid = np.arange(5.0, 1200.0, 5.0)
    curve = [(row["seconds"], row["tokens"]) for row in _survival(document)]
    chosen_ttl = _best_by_value(curve, beta, grid)
    return max(other.worth(float(t), beta) for t in grid) - other.worth(chosen_ttl, beta)


def _survival(document: dict[str, Any]) -> list[dict[str, float]]:
    found: list[dict[str, float]] = document["explain"]["survival"]
    return found


def _best_by_value(curve: list[tuple[float, float]], beta: float, grid: np.ndarray) -> float:
    """The TTL that the estimated survival calls best at that break-even time."""
    times, left = np.array(curve).T
    fine = np.arange(0.0, times[-1] + 1.0)
    s = np.exp(np.interp(fine, times, np.log(np.maximum(left, 1e-9))))
    held = np.concatenate(([0.0], np.cumsum((s[1:] + s[:-1]) / 2)))
    value = [
        1 - np.interp(max(0.0, t - EXPIRY_MARGIN_S), fine, s) - np.interp(t, fine, held) / beta
        for t in grid
        if t <= times[-1]
    ]
    return float(grid[int(np.argmax(value))])


def threshold(
    traffic: str, model_name: str, running: int, explore: float, seed: int, duration_s: float
) -> dict[str, Any]:
    """What is said about the threshold where prefill keeps the last prompt, and what following it costs (ms a turn)."""
    model = PRESETS[model_name]
    plans = plan(_traces[traffic], context_limit=model.context_tokens)
    turns = Turns.of(plans, model)
    load = Load(rate_for(turns, 480.0, 0.6 * model.pool_tokens), duration_s, seed=seed)
    deployment = Deployment(model, model.pool_tokens, prefill_cache=True)
    setting, document = policies.suggestion(plans, deployment, load, threshold_tokens=running, explore=explore)
    answers = np.array([t.output_tokens for p in plans for t in p.turns if t.gap_s is not None], dtype=float)

    def cost(tau: float) -> float:
        fetch = model.transfer.base_s + model.transfer.token_s * answers
        return float(np.where(answers >= tau, fetch, model.prefill.token_s * answers).mean())

    best = min(cost(tau) for tau in np.unique(np.concatenate((np.arange(16, 8192, 16), [1e9]))))
    told = {} if "error" in document else document["recommendations"][1]
    return {
        "model": model_name, "running": running, "explore": explore, "status": told.get("status", "error"),
        "reason": told.get("reason_code"), "recommended": setting.threshold_tokens,
        "retry_after_s": told.get("retry_after"),
        "regret_ms": 1000 * (cost(setting.threshold_tokens) - best), "running_regret_ms": 1000 * (cost(running) - best),
    }  # fmt: skip


def quantile(values: Sequence[float], q: float) -> float:
    """A quantile; nan of nothing."""
    return float(np.quantile(values, q)) if values else math.nan


def table(
    worlds: list[dict[str, Any]],
    value: list[float],
    thresholds: list[dict[str, Any]],
    cells: list[list[tuple[float, float, float]]],
) -> list[tuple[str, str, str]]:
    """(quantity, target, reached)."""
    rows = []
    for running in RUNNING:
        mine = [s for w in worlds for s in w["suggestions"] if s["running"] == running]
        regret = [s["regret"] for s in mine]
        cell, harm = (
            [statistics.fmean(s[key] for s in w["suggestions"] if s["running"] == running) for w in worlds]
            for key in ("regret", "harm")
        )
        rows.append(
            (
                f"mean-TTFT regret after one suggestion, running {running:g} s",
                "median <= 3 %, worst cell <= 20 %",
                f"median {100 * quantile(regret, 0.5):.1f} %, P95 {100 * quantile(regret, 0.95):.1f} %, "
                f"worst {100 * max(regret):.1f} %; worst cell {100 * max(cell):.1f} %",
            )
        )
        worst = max(s["harm"] for s in mine)
        rows.append(
            (
                f"harm against the running {running:g} s",
                "never > 5 %",
                f"worst cell {100 * max(harm):.1f} %, worst window {100 * worst:.1f} %",
            )
        )
    default = [w["default_regret"] for w in worlds]
    rows.append(
        (
            "the default's own regret, to compare",
            "-",
            f"median {100 * quantile(default, 0.5):.0f} %, worst {100 * max(default):.0f} %",
        )
    )
    first = [s for w in worlds for s in w["suggestions"] if s["running"] == 480.0 and "again" in s]
    moved = [abs(s["again"] / s["ttl"] - 1) for s in first if s["ttl"]]
    rows.append(
        (
            "asked again at the suggestion: moves, and regret then",
            "converges",
            f"moves in {100 * statistics.fmean(m > 0 for m in moved):.0f} % of worlds, by {100 * max(moved):.0f} % at "
            "most; "
            f"regret median {100 * quantile([s['again_regret'] for s in first], 0.5):.1f} %, "
            f"worst {100 * max(s['again_regret'] for s in first):.1f} %",
        )
    )
    for name, column, target in (("mean", 1, 5), ("P99", 2, 8)):
        errors = [abs(p[column] - 1) for w in worlds for p in w["predictions"]]
        rows.append(
            (
                f"predicted {name} retained tokens, demand within the pool",
                f"within {target} %",
                f"median {100 * quantile(errors, 0.5):.1f} %, P95 {100 * quantile(errors, 0.95):.1f} %, "
                f"worst {100 * max(errors):.1f} %",
            )
        )
    rows.append(
        (
            f"value regret with {FEW} conversations seen",
            "mean <= 1 %, P95 <= 2 %",
            f"mean {100 * statistics.fmean(value):.2f} %, P95 {100 * quantile(value, 0.95):.2f} %" if value else "none",
        )
    )
    # What a window is an estimate of: what windows of the same world say in the middle.
    covered = [
        low <= statistics.median(best for _, _, best in cell) <= high
        for cell in cells if len(cell) >= WINDOWS // 2
        for low, high, _ in cell
    ]  # fmt: skip
    rows.append(
        (
            "90 % interval of the TTL covers what such windows say in the middle",
            "85 to 95 %",
            f"{100 * statistics.fmean(covered):.0f} % of {len(covered)}" if covered else "none given",
        )
    )
    for model, explore, running in sorted({(t["model"], t["explore"], t["running"]) for t in thresholds}):
        mine = [t for t in thresholds if (t["model"], t["explore"], t["running"]) == (model, explore, running)]
        said = [t for t in mine if t["status"] in ("change", "keep")]
        waits = [t["retry_after_s"] / 3600 for t in mine if t["retry_after_s"]]
        exploring = f", exploring {100 * explore:g} %" if explore else ""
        rows.append(
            (
                f"threshold, {model} at {running}{exploring}: regret where it advises",
                "P95 <= 1 ms" if model.startswith("qwen") else "P95 <= 3 ms",
                f"P95 {quantile([t['regret_ms'] for t in said], 0.95):.2f} ms of {len(said)}; "
                f"{len(mine) - len(said)} of {len(mine)} not identifiable"
                + (f" (to be asked again, median {statistics.median(waits):.1f} h)" if waits else ""),
            )
        )
    scarce = [
        s for w in worlds if w["world"]["traffic"] == "chat" and w["world"]["usage"] > 1 for s in w["suggestions"]
        if s["running"] == 480.0
    ]  # fmt: skip
    if scarce:
        good = sum(s["status"] == "off" or s["ttl"] < 480 for s in scarce)
        rows.append(("chat at scarce memory: shorten or off", "always", f"{good} of {len(scarce)}"))
    return rows


def main() -> None:
    """Parse, replay, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agent", type=Path, default=DATA / "agent_turns.csv.gz", help="agent trace")
    parser.add_argument("--chat", type=Path, default=DATA / "chat_intervals.csv.gz", help="chat trace")
    parser.add_argument("--models", default="qwen3-32b,glm-5-fp8")
    parser.add_argument("--usages", default=",".join(map(str, USAGES)))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--hours", type=float, default=2.0, help="watched before each suggestion")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, default=None, help="write every world here")
    given = parser.parse_args()
    traces = {"agent": load_trace(given.agent), "chat": load_trace(given.chat)}
    models, seeds, seconds = given.models.split(","), range(1, given.seeds + 1), 3600 * given.hours
    worlds = [
        World(traffic, model, way, float(usage), tuple(seeds), seconds)
        for usage in given.usages.split(",") for traffic in traces for model in models for way in (0, 1)
    ]  # fmt: skip
    began = time.monotonic()
    with ProcessPoolExecutor(
        given.jobs, mp_context=get_context("spawn"), initializer=_take, initargs=(traces,)
    ) as pool:
        judged = [pool.submit(judge, world) for world in worlds]
        small = [
            pool.submit(few, "agent", model, seed, seconds)
            for model in models
            for seed in range(1, 2 * given.seeds + 1)
        ]
        taus = [
            pool.submit(threshold, "agent", model, running, explore, seed, seconds)
            for model in models for running in (64, 2048) for explore in (0.0, MAX_EXPLORE) for seed in seeds
        ]  # fmt: skip
        several = [
            pool.submit(intervals, World(traffic, model, way, usage, (), seconds), WINDOWS)
            for traffic in traces for model in models for way in (0, 1) for usage in (1.1, 1.4)
        ]  # fmt: skip
        everything = [*judged, *small, *taus, *several]
        end = "\r" if sys.stderr.isatty() else "\n"
        try:
            for number, future in enumerate(as_completed(everything), 1):
                future.result()
                if sys.stderr.isatty() or number % 10 == 0:
                    past = time.monotonic() - began
                    print(f"{number} of {len(everything)} done, {past:.0f} s", end=end, file=sys.stderr, flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        results = [future.result() for future in judged]
        value = [found for future in small if (found := future.result()) is not None]
        thresholds = [future.result() for future in taus]
        cells = [future.result() for future in several]
    rows = table(results, value, thresholds, cells)
    if given.json is not None:
        given.json.write_text(
            json.dumps(
                {"worlds": results, "value": value, "thresholds": thresholds, "cells": cells, "table": rows},
                default=str,
            )
        )
    wide = max(len(row[0]) for row in rows)
    target = max(len(row[1]) for row in rows)
    print(f"simulated; {len(results)} worlds of {given.hours:g} h, {time.monotonic() - began:.0f} s\n")
    for name, wanted, reached in (("quantity", "target", "reached"), *rows):
        print(f"{name:{wide}}  {wanted:{target}}  {reached}")


if __name__ == "__main__":
    main()
