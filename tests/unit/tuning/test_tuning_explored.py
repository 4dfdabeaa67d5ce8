"""Exploration turns some histories round; what the advice takes for the sizes that occur must not depend on it."""

from __future__ import annotations

import random

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from kvtune_connector.policy import Offer, decide
from kvtune_telemetry import events as ev
from kvtune_telemetry.recorder import ConnectorRecorder, RouterRecorder
from kvtune_telemetry.vocabulary import Decision, Direction, Role
from kvtune_tuning import threshold
from kvtune_tuning.evidence import gather
from kvtune_tuning.lines import Line
from kvtune_tuning.series import Collector, SeriesSet

TAUS = np.array([16.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 4096.0])
LINES = (Line(0.1, 27e-6), Line(0.021, 4.5e-6))


def observed(sizes: list[int], tau: int, share: float, setting: float | None = None) -> SeriesSet:
    """What prefill exposes after deciding about histories of these sizes, a share of them marked by the router."""
    registries = {"p": CollectorRegistry(), "r": CollectorRegistry()}
    prefill = ConnectorRecorder(registries["p"], model_name="m", engine="0", role=Role.PREFILL)
    prefill.set_setting("kv_recompute_threshold", tau)
    router = RouterRecorder(registries["r"], version="t")
    router.set_setting("explore_ratio", share if setting is None else setting)
    collector, rng = Collector(), random.Random(7)

    def scrape(when: float) -> None:
        for target, registry in registries.items():
            samples = [s for family in registry.collect() for s in family.samples]
            collector.scraped(target, when, [(s.name, frozenset(s.labels.items()), s.value) for s in samples])

    scrape(0.0)
    for number, size in enumerate(sizes):
        verdict = decide(
            prompt_tokens=size + 20, local_tokens=0, now_s=0.0, threshold_tokens=tau,
            offer=Offer(size, size, None, explored=rng.random() < share),
        )  # fmt: skip
        fetched = verdict.fetch_tokens
        prefill.record(
            ev.PrefillDecided(verdict.decision, verdict.reason, size + 20, 0, fetched, verdict.available_tokens)
        )
        if verdict.decision is Decision.FETCH:
            prefill.record(ev.KvRead(Direction.D2P, fetched, fetched, 0.02, 0.02))
        prefill.record(ev.PrefillComputed(size + 20 - fetched, 0.1))
        if number % 100 == 99:
            scrape(60.0 * (number // 100 + 1))
    scrape(1e5)
    return collector.collected()


def log_uniform(count: int = 4000) -> list[int]:
    rng = np.random.default_rng(3)
    return [int(n) for n in np.exp(rng.uniform(np.log(20), np.log(8000), count))]


@pytest.mark.parametrize("tau", [64, 100, 256, 700, 2048])
@pytest.mark.parametrize("share", [0.05, 0.6])
def test_the_sizes_that_occur_are_the_same_with_exploration_and_without(tau: int, share: float) -> None:
    sizes = log_uniform()
    plain, explored = (gather(observed(sizes, tau, q)).threshold for q in (0.0, share))
    assert plain.below is not None and explored.below is not None
    assert (explored.below.count, explored.below.mean) == (plain.below.count, pytest.approx(plain.below.mean))
    assert explored.below.count == sum(n < tau for n in sizes)
    assert explored.histories == plain.histories == len(sizes)
    total = [sum(s.count * s.mean for s in one.fetched) for one in (plain, explored)]
    assert total[0] == pytest.approx(total[1]) == pytest.approx(sum(n for n in sizes if n >= tau))
    cost, fetched = threshold.path_cost(explored, *LINES, TAUS)
    cost_before, fetched_before = threshold.path_cost(plain, *LINES, TAUS)
    assert fetched == pytest.approx(fetched_before, abs=0.02 if share == 0.05 else 0.05)
    assert cost == pytest.approx(cost_before, rel=0.02 if share == 0.05 else 0.06)


def test_what_was_explored_enters_the_lines_and_is_counted() -> None:
    sizes = log_uniform()
    evidence = gather(observed(sizes, 256, 0.05))
    turned = {path: count for path, count in evidence.facts["explored"].items()}  # type: ignore[union-attr]
    near = {"fetch": sum(64 <= n < 256 for n in sizes), "recompute": sum(256 <= n <= 1024 for n in sizes)}
    for path, count in turned.items():
        assert count == pytest.approx(0.05 * near[path], abs=20) and count > 20
    assert evidence.threshold.explored == sum(turned.values()) and evidence.facts["explore_ratio"] == 0.05
    small = sum(p.count for p in evidence.threshold.fetch if p.size in ("64", "128", "256"))
    assert small == pytest.approx(turned["fetch"], abs=1), "256 itself is fetched in any case"
    assert all(p.tokens >= 64 for p in evidence.threshold.fetch)


@pytest.mark.parametrize(("share", "setting", "explored"), [(0.0, 0.0, None), (0.0, 0.02, 0.0), (0.3, 0.0, True)])
def test_whether_the_router_explores(share: float, setting: float, explored: float | bool | None) -> None:
    """By its setting now, or by what was turned round in the window."""
    found = gather(observed(log_uniform(500), 256, share, setting)).threshold.explored
    assert found == explored or (explored is True and found is not None and found > 20)
