"""The rules a suggestion is compared with. Each is a TTL, but for the clairvoyant one. Seconds, tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvtune_bench.calibration import Calibration
from kvtune_bench.replay.model import Deployment, Load, Setting
from kvtune_bench.replay.observe import InMemory, ObservedDeployment
from kvtune_bench.replay.simulator import Replay
from kvtune_bench.traces import Plan, PlannedTurn
from kvtune_connector.policy import DEFAULT_THRESHOLD_TOKENS, DEFAULT_TTL_S
from kvtune_tuning.api import suggest_series
from kvtune_tuning.errors import TuningError

TICK_S = 60.0
"""Between the scrapes a suggestion is made from."""
KEEP_ALIVE_MARGIN = 1.1
"""Serverless in the Wild keeps alive to the 99th percentile of idle times, and a tenth longer."""
SWEEP_S = (0.0, 15.0, 30.0, 60.0, 90.0, 120.0, 180.0, 240.0, 360.0, 480.0, 720.0, 960.0, 1440.0, 1920.0)
"""Fixed TTLs the best in hindsight is taken from."""


@dataclass(frozen=True, slots=True)
class Foresight:
    """Hold until the return if it comes within `cutoff_s`, else not at all. Needs to know the future."""

    cutoff_s: float

    def __call__(self, turn: PlannedTurn) -> float:
        """Seconds to hold."""
        # The read waits for its turn in prefill's queue: no read is lost to that here.
        return math.inf if turn.gap_s is not None and turn.gap_s <= self.cutoff_s else 0.0


def gaps_of(plans: Sequence[Plan]) -> tuple[np.ndarray[Any, Any], int]:
    """Pauses of the turns that return, and the number of those that never do."""
    gaps = [turn.gap_s for plan in plans for turn in plan.turns]
    return np.sort(np.array([gap for gap in gaps if gap is not None])), sum(gap is None for gap in gaps)


def mean_sequence(plans: Sequence[Plan]) -> float:
    """Mean tokens at the end of a turn."""
    turns = [turn.sequence_tokens for plan in plans for turn in plan.turns]
    return sum(turns) / len(turns)


def ski_rental_ttl(plans: Sequence[Plan], deployment: Deployment) -> float:
    """Hold for as long as holding has cost no more than recomputing would: the break-even at full scarcity."""
    calibration = deployment.calibration
    tokens = mean_sequence(plans)
    saving = calibration.prefill.token_s * tokens - calibration.transfer.at(int(tokens))
    return max(0.0, saving / tokens * deployment.pool_tokens)


def keep_alive_ttl(plans: Sequence[Plan]) -> float:
    """The 99th percentile of the pauses that ended, and a tenth."""
    gaps, _ = gaps_of(plans)
    return float(np.quantile(gaps, 0.99)) * KEEP_ALIVE_MARGIN if len(gaps) else 0.0


def continuum_ttl(plans: Sequence[Plan], calibration: Calibration, queueing_s: float) -> float:
    """Continuum's utility (arXiv 2511.02230): the pause that maximises P(pause) x (queueing x eta + reload) - pause.

    `queueing_s`: mean wait of a request for room. eta, "memoryfulness", is minus the correlation of turns done with
    turns to come.
    """
    gaps, never = gaps_of(plans)
    if not len(gaps):
        return 0.0
    done = [(k, len(plan.turns) - k) for plan in plans for k in range(len(plan.turns))]
    correlation = np.corrcoef(np.array(done, dtype=float).T)[0, 1] if len({k for k, _ in done}) > 1 else 0.0
    eta = float(np.clip(-np.nan_to_num(correlation), 0.0, 1.0))
    worth = queueing_s * eta + calibration.prefill.at(int(mean_sequence(plans)))
    share = np.arange(1, len(gaps) + 1) / (len(gaps) + never)
    utility = share * worth - gaps
    best = int(np.argmax(utility))
    return float(gaps[best]) if utility[best] > 0 else 0.0


def suggestion(
    plans: Sequence[Plan],
    deployment: Deployment,
    load: Load,
    *,
    ttl_s: float = DEFAULT_TTL_S,
    threshold_tokens: int = DEFAULT_THRESHOLD_TOKENS,
    explore: float = 0.0,
    stock: bool = False,
    ranks: int = 1,
) -> tuple[Setting, dict[str, Any]]:
    """What `kvtune suggest` says after watching a replay at the setting in force, by its scrapes alone; the document.

    `keep` and `insufficient` leave the setting as it is.
    """
    before = Setting(ttl_s, threshold_tokens, explore=explore)
    memory = InMemory()
    observed = ObservedDeployment(deployment, before, memory, stock=stock, ranks=ranks)
    Replay(plans, deployment, before, load, observer=observed, tick_s=TICK_S).run()
    try:
        document = suggest_series(memory.series(), {"kind": "replay", "where": []}, explain=True)
    except TuningError as error:
        return before, {"error": error.as_dict()}
    told = {one["setting"]: one for one in document["recommendations"]}
    ttl, threshold = told["decoder_kv_blocks_ttl"], told["kv_recompute_threshold"]
    if "off" in (ttl["status"], threshold["status"]):
        return replace(before, ttl_s=0.0), document
    return (
        replace(
            before,
            ttl_s=ttl["recommended"] if ttl["status"] == "change" else ttl_s,
            threshold_tokens=int(threshold["recommended"]) if threshold["status"] == "change" else threshold_tokens,
        ),
        document,
    )
