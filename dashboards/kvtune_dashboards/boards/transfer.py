"""kvtune / Transfer and decisions: is fetching faster than computing, and does the network do what it did."""

from __future__ import annotations

from typing import Any

from kvtune_dashboards.boards.common import RANGE, STEP, engine, frame, in_range, per_second, router, trace_link
from kvtune_dashboards.boards.formulas import (
    crossing,
    fetch_gain,
    speed,
    speed_against_yesterday,
    speed_before,
    threshold,
)
from kvtune_dashboards.layout import Section, Sized
from kvtune_dashboards.panels import (
    BAD,
    COLOURS,
    FAIR,
    GOOD,
    QUIET,
    Look,
    Target,
    Threshold,
    heatmap,
    spoken,
    stat,
    table,
    timeseries,
    tokens,
)
from kvtune_dashboards.promql import any_of, by, increase, quantile, rate, ratio, re_, sum_by
from kvtune_telemetry.vocabulary import Decision, Direction, Path, Phase, Reason

UID = "kvtune-transfer"
READ = "kvtune_kv_read_seconds"
BACK, OVER = Direction.D2P, Direction.P2D
_CHOSEN: dict[str, Any] = {
    "job": re_("$job"), "model_name": re_("$model"), "engine": re_("$engine"), "role": re_("$role"),
}  # fmt: skip
_DIRECTIONS = spoken(*Direction)


def _tiles() -> list[Sized]:
    failed = in_range(engine("kvtune_kv_reads_failed_total"))
    tried = failed + in_range(engine("kvtune_kv_reads_total"))
    return [
        Sized(
            stat(
                "Fetching a history beats computing it",
                "How many times longer computing the fetched histories would have taken than fetching them did, by the "
                "cost line of the last hours. Below 1 fetching is slower: raise `kv_recompute_threshold`.",
                "suffix: x",
                [Target(str(fetch_gain()), instant=True)],
                Look(decimals=1, thresholds=(Threshold(None, BAD), Threshold(1, FAIR), Threshold(1.5, GOOD))),
            ),
            5, 5,
        ),
        Sized(
            stat(
                "Threshold: in force, and where both cost the same",
                "Histories with fewer tokens to fetch than `kv_recompute_threshold` are computed again. From the "
                "crossing on fetching is faster. *Crossing* is missing while the costs of one path are not known, and "
                "where computing is always faster. With several models chosen the highest are shown.",
                tokens(),
                [
                    Target(str(by("max", threshold())), "in force", instant=True),
                    Target(str(by("max", crossing())), "crossing", instant=True),
                ],
                Look(decimals=0, colours={"in force": QUIET}, no_value="Not known"),
                show="value_and_name",
            ),
            6, 5,
        ),
        Sized(
            stat(
                "Transfer P90",
                "90 % of KV reads took no longer: histories read back to prefill, and hand-overs to decode. Time range "
                "shown.",
                "s",
                [
                    Target(
                        str(quantile(0.9, READ, RANGE, ("direction",), **_CHOSEN)), "{{direction}}", instant=True
                    )
                ],
                _DIRECTIONS,
                show="value_and_name",
            ),
            6, 5,
        ),
        Sized(
            stat(
                "Speed against a day ago",
                "Bytes a second of one read, now over this hour yesterday, at equal sizes. About 100 % is well; a "
                "tenth is "
                "a network that fell back to TCP without telling.",
                "percentunit",
                [
                    Target(str(speed_against_yesterday()), "{{direction}}", instant=True)
                ],
                Look(
                    decimals=0, names=_DIRECTIONS.names, no_value="No day to compare",
                    thresholds=(Threshold(None, BAD), Threshold(0.3, FAIR), Threshold(0.6, GOOD)),
                ),
            ),
            4, 5,
        ),
        Sized(
            stat(
                "Reads that failed",
                "Share of KV reads that failed, both directions. Time range shown.",
                "percentunit",
                [Target(str(ratio(failed, tried)), instant=True)],
                Look(decimals=1, thresholds=(Threshold(None, GOOD), Threshold(0.001, FAIR), Threshold(0.02, BAD))),
            ),
            3, 5,
        ),
    ]  # fmt: skip


def _reads() -> list[Sized]:
    def lines(name: str) -> list[Target]:
        return [Target(str(per_second(engine(name), "direction")), "{{direction}}")]

    by_size = [
        Target(str(quantile(q, READ, STEP, ("size",), **_CHOSEN, direction=BACK)), f"P{100 * q:.0f} up to {{{{size}}}}")
        for q in (0.5, 0.9)
    ]
    return [
        Sized(timeseries("KV reads", "Reads that succeeded, by direction; one request is one read.", "ops",
                         lines("kvtune_kv_reads_total"), _DIRECTIONS, stack="normal"), 8, 8),
        Sized(timeseries("KV bytes", "Bytes read, by direction, all ranks together.", "binBps",
                         lines("kvtune_kv_read_bytes_total"), _DIRECTIONS, stack="normal"), 8, 8),
        Sized(
            timeseries(
                "Speed of a read, and a day before",
                "Bytes a second while a read lasts (mean), by direction and size class (upper edge in tokens). A "
                "fall by "
                "an order at every size is a transport that fell back, for instance from RDMA to TCP.",
                "binBps",
                [
                    Target(str(speed()), "{{direction}} up to {{size}}"),
                    Target(str(speed_before()), "{{direction}} up to {{size}}, a day before"),
                ],
                dashed=["/, a day before$/"],
                log=True,
            ),
            8, 8,
        ),
        Sized(
            timeseries(
                "Speed against a day ago, over time",
                "Bytes a second of a read over those of the same hour yesterday, at equal sizes.",
                "percentunit",
                [Target(str(speed_against_yesterday()), "{{direction}}")],
                Look(colours=_DIRECTIONS.colours, names=_DIRECTIONS.names, no_value="No day to compare"),
            ),
            24, 6,
        ),
        Sized(
            timeseries(
                "Time to read a history back, by size",
                "Median and 90th percentile of the transfer time from decode to prefill, by size class (upper edge in "
                "tokens).",
                "s", by_size, legend="table",
            ),
            8, 9,
        ),
        Sized(
            heatmap(
                "Time to read a history back, spread",
                "How transfer times from decode to prefill are spread.",
                "s",
                Target(str(sum_by(increase(engine(f"{READ}_bucket", direction=BACK), STEP), "le"))),
            ),
            8, 9,
        ),
        Sized(
            heatmap(
                "Time of the hand-over, spread",
                "How transfer times from prefill to decode are spread.",
                "s",
                Target(str(sum_by(increase(engine(f"{READ}_bucket", direction=OVER), STEP), "le"))),
            ),
            8, 9,
        ),
    ]  # fmt: skip


def _decisions() -> list[Sized]:
    def cost(path: Path) -> str:
        seconds = in_range(engine("kvtune_path_seconds_total", path=path), "size")
        return str(ratio(seconds, in_range(engine("kvtune_path_observations_total", path=path), "size")))

    def count(path: Path) -> str:
        return str(in_range(engine("kvtune_path_observations_total", path=path), "size").over(0))

    over_time = [
        Target(
            str(
                ratio(
                    per_second(engine("kvtune_path_seconds_total"), "path", "size"),
                    per_second(engine("kvtune_path_observations_total"), "path", "size"),
                )
            ),
            "{{path}} up to {{size}}",
        )
    ]
    decided = per_second(engine("kvtune_decisions_total", role="prefill"), "decision").over(0)
    why = per_second(
        engine("kvtune_decisions_total", role="prefill", decision=Decision.RECOMPUTE,
               reason=any_of(*(reason for reason in Reason if reason is not Reason.NONE))),
        "reason",
    ).over(0)  # fmt: skip
    skipped = per_second(engine("kvtune_decision_tokens_total", reason=Reason.BELOW_THRESHOLD))
    return [
        Sized(
            table(
                "Fetch or compute, by size",
                "Mean seconds to fetch and to compute a prompt's tokens, by size class (upper edge in tokens), in the "
                "time range shown. Where fetching is shorter, histories of that size are worth fetching: the "
                "threshold belongs at the first such size. Computing includes its fixed part, which is paid either "
                "way.",
                "s",
                [
                    Target(cost(Path.FETCH)), Target(cost(Path.RECOMPUTE)),
                    Target(count(Path.FETCH)), Target(count(Path.RECOMPUTE)),
                ],
                Look(units={"Fetches": "short", "Computations": "short"}, no_value="Not seen"),
                key="size",
                columns={
                    "size": "Tokens up to", "Value #A": "Fetch", "Value #B": "Compute", "Value #C": "Fetches",
                    "Value #D": "Computations",
                },
                numeric="size",
            ),
            8, 10,
        ),
        Sized(
            timeseries(
                "Crossing point and threshold",
                "From the crossing on fetching is faster than computing. The threshold in force (dashed) belongs "
                "there: "
                "above it histories are computed that would be fetched faster, below it the other way about.",
                tokens(),
                [Target(str(crossing()), "crossing {{model_name}}"),
                 Target(str(threshold()), "threshold in force {{model_name}}")],
                Look(colours={"/^crossing/": COLOURS["hit"], "/^threshold/": QUIET}, no_value="Not known"),
                dashed=["/^threshold/"],
            ),
            8, 10,
        ),
        Sized(
            timeseries(
                "Mean cost, by path and size",
                "Seconds to fetch or compute, by size class (upper edge in tokens).",
                "s", over_time, log=True,
            ),
            8, 10,
        ),
        Sized(
            timeseries(
                "What prefill did",
                "Prefills by what was done about the prompt's history. *Computed again* includes first turns, which "
                "have none.",
                "reqps",
                [Target(str(decided), "{{decision}}")],
                spoken(*Decision),
                stack="normal",
            ),
            8, 8,
        ),
        Sized(
            timeseries(
                "Why a history was computed again",
                "Recomputations for a reason. *below_threshold* is the running threshold at work.",
                "reqps",
                [Target(str(why), "{{reason}}")],
                Look(no_value="None"),
                stack="normal",
            ),
            8, 8,
        ),
        Sized(
            timeseries(
                "Tokens computed because of the threshold",
                "Tokens that decode held but that were computed again, because fewer than `kv_recompute_threshold` "
                "could "
                "be fetched.",
                "si:tok/s",
                [Target(str(skipped), "below the threshold")],
                Look(colours={"below the threshold": COLOURS["recompute"]}),
            ),
            8, 8,
        ),
    ]  # fmt: skip


def _waits() -> list[Sized]:
    waits = [
        Target(
            str(quantile(q, "kvtune_kv_wait_seconds", STEP, ("direction",), **_CHOSEN)),
            f"P{100 * q:.0f} {{{{direction}}}}",
        )
        for q in (0.5, 0.9)
    ]
    waiting = by("sum", engine("vllm:num_requests_waiting"), "instance")
    seconds = sum_by(rate(router("kvtune_turn_phase_seconds_sum"), STEP), "phase")
    counts = sum_by(rate(router("kvtune_turn_phase_seconds_count"), STEP), "phase")
    p90 = [Target(str(quantile(0.9, "kvtune_turn_phase_seconds", STEP, ("phase",), job=re_("$job"))), "{{phase}}")]
    return [
        Sized(
            timeseries(
                "Wait for remote KV",
                "How long requests waited for KV from the other side, apart from queueing for compute.",
                "s", waits,
                Look(colours={
                    "P50 d2p": "#73bf69", "P90 d2p": COLOURS["d2p"], "P50 p2d": "#c0d8ff", "P90 p2d": COLOURS["p2d"],
                }),
            ),
            6, 8,
        ),
        Sized(
            timeseries(
                "Requests waiting, by engine",
                "Requests that an engine has not begun. One that never falls while nothing is admitted is stuck.",
                "short",
                [Target(str(waiting), "{{instance}}")],
            ),
            6, 8,
        ),
        Sized(
            timeseries(
                "TTFT by phase, mean",
                f"What the time to first token is made of, as the router sees it: {', '.join(Phase)}.",
                "s",
                [Target(str(ratio(seconds, counts)), "{{phase}}")],
                Look(links=[trace_link()]),
                stack="normal",
            ),
            6, 8,
        ),
        Sized(
            timeseries(
                "TTFT by phase, P90",
                "90th percentile of each phase. They do not add up: each is its own.",
                "s", p90, Look(links=[trace_link()]),
            ),
            6, 8,
        ),
    ]  # fmt: skip


def _failures() -> list[Sized]:
    failed = per_second(engine("kvtune_kv_reads_failed_total"), "direction", "instance")
    lost = per_second(engine("kvtune_decisions_total", reason=Reason.READ_FAILED), "instance")
    nixl = per_second(engine("vllm:nixl_num_failed_transfers_total"), "instance")
    nixl_expired = per_second(engine("vllm:nixl_num_kv_expired_reqs_total"), "instance")
    return [
        Sized(timeseries("KV reads that failed", "Failures by direction and engine.", "ops",
                         [Target(str(failed), "{{direction}} {{instance}}")]), 8, 7),
        Sized(timeseries("Histories computed because the read failed",
                         "Turns that paid for a failed read with a whole prefill.", "reqps",
                         [Target(str(lost), "{{instance}}")]), 8, 7),
        Sized(
            timeseries(
                "NIXL's own count",
                "vLLM's counters of failed transfers and of retentions that expired unread: per rank, without a "
                "direction.",
                "ops",
                [Target(str(nixl), "failed {{instance}}"), Target(str(nixl_expired), "expired {{instance}}")],
            ),
            8, 7,
        ),
    ]  # fmt: skip


def board() -> dict[str, Any]:
    """The dashboard."""
    return frame(
        UID,
        "kvtune / Transfer and decisions",
        "Is fetching faster than computing, where do the two cross, and is the network what it was?",
        [
            Section("", _tiles()),
            Section("Fetch or compute", _decisions()),
            Section("KV reads", _reads()),
            Section("Waiting", _waits()),
            Section("Failures", _failures(), collapsed=True),
        ],
    )
