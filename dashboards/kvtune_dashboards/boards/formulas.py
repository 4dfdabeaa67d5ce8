"""Quantities that take more than one series: most are recording rules, chosen here by job and model."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvtune_dashboards.boards.common import RANGE, engine
from kvtune_dashboards.promql import Expr, Match, Selector, any_of, by, increase, over_time, re_, sum_by
from kvtune_dashboards.recording import TTL_FACTORS, recorded
from kvtune_telemetry.vocabulary import Path

SPEED = "kvtune:kv_read_bytes_per_second:mean"
FACTORS = {f"{factor:g}": words for factor, words in zip(TTL_FACTORS, ("half", "in force", "double"), strict=True)}
"""The factors of the TTL that the rules ask about, and how they are said."""


ROWS_OF_A_HEATMAP = 20
"""As many rows can be told apart on a panel of usual height."""


def rows(edges: Sequence[float]) -> Match:
    """Matches the buckets of a heatmap: of many edges (s) every second or third, of few all; and the last one.

    Prometheus writes 1 as `1` or `1.0`, depending on its version and on who exposes it.
    """
    every = -(-len(edges) // ROWS_OF_A_HEATMAP)
    # From the largest down, so that the row below +Inf is as high as the others.
    shown = [f"{edge:g}" for edge in edges[::-1][::every]][::-1]
    return re_("|".join((*(re.escape(edge) + ("" if "." in edge else "(\\.0)?") for edge in shown), "\\+Inf")))


def of_model(name: str, /, **matchers: str | Match) -> Selector:
    """Series of a rule that keeps job and model of the engines."""
    return recorded(name, job=re_("$job"), model_name=re_("$model"), **matchers)


def of_router(name: str, /, **matchers: str | Match) -> Selector:
    """Series of a rule that keeps the router's job."""
    return recorded(name, job=re_("$job"), **matchers)


def prefill_saved() -> Expr:
    """Seconds of prefill saved a second, now."""
    return sum_by(of_model("kvtune:prefill_seconds_saved:rate"))


def prefill_saved_on_average() -> Expr:
    """The same on average over the time range shown."""
    return sum_by(over_time("avg", of_model("kvtune:prefill_seconds_saved:rate"), RANGE))


def fetch_gain() -> Expr:
    """How many times longer computing the fetched tokens would have taken than fetching them did, in the range."""
    keys = ("job", "model_name")
    tokens = sum_by(increase(engine("kvtune_path_tokens_total", path=Path.FETCH, role="prefill"), RANGE), *keys)
    spent = sum_by(increase(engine("kvtune_path_seconds_total", path=Path.FETCH, role="prefill"), RANGE), *keys)
    computing = tokens * of_model("kvtune:recompute_seconds_per_token:mean")
    # Only models whose cost is known count on either side.
    return sum_by(computing) / sum_by(spent.where(computing)).over(0)


def crossing() -> Expr:
    """Tokens from which on fetching is faster, by model; absent where computing always is."""
    return by("max", of_model("kvtune:threshold_tokens:crossing"), "model_name")


def threshold() -> Expr:
    """`kv_recompute_threshold` in force, tokens, by model."""
    return by("max", of_model("kvtune:threshold_tokens:in_force"), "model_name")


def speed_against_yesterday() -> Expr:
    """Bytes a second of a read, now over the same hour a day ago, at equal sizes, by direction."""
    before = over_time("avg", of_model(SPEED), "1h", "1d")
    return by("avg", of_model(SPEED) / before.over(0), "direction")


def speed() -> Expr:
    """Bytes a second of a read, by direction and size."""
    return by("avg", of_model(SPEED), "direction", "size")


def speed_before() -> Expr:
    """The same in the same hour a day ago."""
    return by("avg", over_time("avg", of_model(SPEED), "1h", "1d"), "direction", "size")


def pool_share() -> Expr:
    """Share of a decode engine's pool that is retained, of several behind one address the highest."""
    return by("max", of_model("kvtune:retained_pool:ratio"), "instance")


def ttl_in_force() -> Expr:
    """Seconds that decode retains a turn."""
    return by("max", recorded("kvtune:ttl_seconds:in_force"))


def ttl_by_factor() -> Expr:
    """Seconds: half, the same and double the TTL, by factor."""
    return by("max", of_router("kvtune:ttl_seconds:factor", factor=any_of(*FACTORS)), "factor")


def returns_in_time() -> Expr:
    """Of the turns that return, the share that would in time, by factor of the TTL."""
    return by("avg", of_router("kvtune:predicted_in_time:ratio"), "factor")


def held_tokens() -> Expr:
    """Tokens that decode would retain on average, by factor of the TTL."""
    return sum_by(of_router("kvtune:predicted_retained_tokens:mean"), "factor")


def held_share() -> Expr:
    """The same as a share of decode's pools."""
    return sum_by(of_router("kvtune:predicted_retained_pool:ratio"), "factor")
