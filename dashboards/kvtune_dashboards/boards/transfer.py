"""kvtune / Transfer and decisions: is fetching faster than computing, and does the network do what it did."""

from __future__ import annotations

from typing import Any

from kvtune_dashboards.boards.common import RANGE, STEP, engine, frame, in_range, per_second, router, trace_link
from kvtune_dashboards.boards.formulas import (
    crossing,
    fetch_gain,
    rows,
    speed,
    speed_against_yesterday,
    speed_before,
    threshold,
)
from kvtune_dashboards.layout import Column, Section, Sized
from kvtune_dashboards.panels import (
    BAD,
    COLOURS,
    FAIR,
    GOOD,
    QUIET,
    Look,
    Target,
    Threshold,
    by_size,
    heatmap,
    spoken,
    stat,
    table,
    timeseries,
    tokens,
)
from kvtune_dashboards.promql import Expr, Selector, any_of, by, increase, quantile, rate, ratio, re_, sum_by
from kvtune_telemetry.buckets import COARSE_SIZE_EDGES, READ_SECONDS, SIZE_EDGES, size_labels
from kvtune_telemetry.vocabulary import Decision, Direction, Path, Phase, Reason

UID = "kvtune-transfer"
READ = "kvtune_kv_read_seconds"
BACK, OVER = Direction.D2P, Direction.P2D
_CHOSEN: dict[str, Any] = {
    "job": re_("$job"), "model_name": re_("$model"), "engine": re_("$engine"), "role": re_("$role"),
}  # fmt: skip
_DIRECTIONS = spoken(*Direction)
_PHASES = spoken(*Phase)
_REASONS = spoken(*(reason for reason in Reason if reason is not Reason.NONE))
_CLASSES = size_labels(COARSE_SIZE_EDGES)
_BY_SIZE = by_size(size_labels(SIZE_EDGES), "{}")
_SPEEDS = [
    by_size(_CLASSES, "D to P, {}", before=f"{Direction.D2P} ", colours=(
        "#c8f2c2", "#96d98d", "#73bf69", "#56a64b", "#37872d", "#19730e")),
    by_size(_CLASSES, "P to D, {}", before=f"{Direction.P2D} ", colours=(
        "#deeaff", "#c0d8ff", "#8ab8ff", "#5794f2", "#3274d9", "#1f60c4")),
]  # fmt: skip
"""One hue a direction, darker for larger reads."""


def _tiles() -> list[Sized]:
    failed = in_range(engine("kvtune_kv_reads_failed_total"))
    tried = failed + in_range(engine("kvtune_kv_reads_total"))
    return [
        Sized(
            stat(
                "Fetch is faster by",
                "How many times longer computing the fetched histories would have taken than fetching them did, by the "
                "cost line of the last hours. Below 1 fetching is slower: raise `kv_recompute_threshold`.",
                "suffix:x",
                [Target(str(fetch_gain()), instant=True)],
                Look(decimals=1, thresholds=(Threshold(None, BAD), Threshold(1, FAIR), Threshold(1.5, GOOD))),
            ),
            5, 5,
        ),
        Sized(
            stat(
                "Threshold and crossing",
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
                Look(colours=_DIRECTIONS.colours, names={BACK: "read back", OVER: "hand-over"}),
                show="value_and_name",
            ),
            5, 5,
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
                    decimals=0, names={BACK: "read back", OVER: "hand-over"}, no_value="No day to compare",
                    thresholds=(Threshold(None, BAD), Threshold(0.3, FAIR), Threshold(0.6, GOOD)),
                ),
            ),
            5, 5,
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

    def read_in(direction: Direction) -> Selector:
        return engine(f"{READ}_bucket", direction=direction, le=rows(READ_SECONDS))

    by_class = [Target(str(quantile(0.9, READ, STEP, ("size",), **_CHOSEN, direction=BACK)), "{{size}}")]
    speeds = Look(
        names={
            name + day: said + day
            for look in _SPEEDS for name, said in look.names.items() for day in ("", ", a day before")
        },
        # The day before has the colour of today.
        colours={f"/^{name}(,|$)/": colour for look in _SPEEDS for name, colour in look.colours.items()},
    )  # fmt: skip
    return [
        Sized(timeseries("KV reads", "Reads that succeeded, by direction; one request is one read.", "ops",
                         lines("kvtune_kv_reads_total"), _DIRECTIONS, stack="normal"), 8, 8),
        Sized(timeseries("KV bytes", "Bytes read, by direction, all ranks together.", "binBps",
                         lines("kvtune_kv_read_bytes_total"), _DIRECTIONS, stack="normal"), 8, 8),
        Sized(
            timeseries(
                "P90 time to read a history back, by size",
                "90 % of the reads from decode to prefill took no longer, by size class (upper edge in tokens).",
                "s", by_class, by_size(_CLASSES, "{}"), sparse=True,
            ),
            8, 8,
        ),
        Sized(
            timeseries(
                "Speed of a read, and a day before",
                "Bytes a second while a read lasts (mean), by direction and size class (upper edge in tokens), and in "
                "the same hour a day before (dashed). A fall by an order at every size is a transport that fell back, "
                "for instance from RDMA to TCP. Logarithmic.",
                "Bps",
                [
                    Target(str(speed()), "{{direction}} {{size}}"),
                    Target(str(speed_before()), "{{direction}} {{size}}, a day before"),
                ],
                speeds,
                dashed=["/, a day before$/"],
                log=True,
                sparse=True,
            ),
            8, 10,
        ),
        Sized(
            heatmap(
                "Time to read a history back, spread",
                "How transfer times from decode to prefill are spread.",
                "s",
                Target(str(sum_by(increase(read_in(BACK), STEP), "le"))),
            ),
            8, 10,
        ),
        Sized(
            heatmap(
                "Time of the hand-over, spread",
                "How transfer times from prefill to decode are spread.",
                "s",
                Target(str(sum_by(increase(read_in(OVER), STEP), "le"))),
            ),
            8, 10,
        ),
    ]  # fmt: skip


def _decisions() -> list[Sized | Column]:
    def cost(path: Path) -> Expr:
        seconds = in_range(engine("kvtune_path_seconds_total", path=path), "size")
        return ratio(seconds, in_range(engine("kvtune_path_observations_total", path=path), "size"))

    def cost_now(path: Path) -> Expr:
        seconds = per_second(engine("kvtune_path_seconds_total", path=path), "size")
        return ratio(seconds, per_second(engine("kvtune_path_observations_total", path=path), "size"))

    def count(path: Path) -> str:
        return str(in_range(engine("kvtune_path_observations_total", path=path), "size").over(0))

    gain = ratio(cost(Path.RECOMPUTE), cost(Path.FETCH))
    gain_now = ratio(cost_now(Path.RECOMPUTE), cost_now(Path.FETCH))
    decided = per_second(engine("kvtune_decisions_total", role="prefill"), "decision").over(0)
    why = per_second(
        engine("kvtune_decisions_total", role="prefill", decision=Decision.RECOMPUTE,
               reason=any_of(*(reason for reason in Reason if reason is not Reason.NONE))),
        "reason",
    ).over(0)  # fmt: skip
    skipped = per_second(engine("kvtune_decision_tokens_total", reason=Reason.BELOW_THRESHOLD))
    beside = [
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
            8, 7,
        ),
        Sized(
            timeseries(
                "Fetch is faster by, at each size",
                "How many times longer computing takes than fetching, by size class (upper edge in tokens), of sizes "
                "that are seen both ways. Below the line at 1 computing is faster: the threshold belongs above that "
                "size. `--explore` on the router sends a few turns the other way, so that both are seen.",
                "suffix:x",
                [Target(str(gain_now), "{{size}}")],
                Look(
                    colours=_BY_SIZE.colours, names=_BY_SIZE.names, no_value="No size seen both ways", soft_most=2,
                    thresholds=(Threshold(None, "transparent"), Threshold(1, QUIET)),
                ),
                sparse=True,
            ),
            8, 7,
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
            5, 7,
        ),
        Sized(
            timeseries(
                "Why a history was computed again",
                "Recomputations for a reason. *Below the threshold* is the running threshold at work.",
                "reqps",
                [Target(str(why), "{{reason}}")],
                Look(colours=_REASONS.colours, names={**_REASONS.names, Reason.DISABLED: "reuse off"}, no_value="None"),
                stack="normal",
            ),
            5, 7,
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
                area=True,
            ),
            6, 7,
        ),
    ]  # fmt: skip
    return [
        Sized(
            table(
                "Fetch or compute, by size",
                "Mean seconds to fetch and to compute a prompt's tokens, by size class (upper edge in tokens), in the "
                "time range shown, and how many times longer computing took. Where that is above 1, histories of that "
                "size are worth fetching: the threshold belongs at the first such size. Computing includes its fixed "
                "part, which is paid either way.",
                "s",
                [
                    Target(str(cost(Path.FETCH))), Target(str(cost(Path.RECOMPUTE))), Target(str(gain)),
                    Target(count(Path.FETCH)), Target(count(Path.RECOMPUTE)),
                ],
                Look(
                    units={"Faster by": "suffix:x", "Fetches": "locale", "Computed": "locale"},
                    digits={"Faster by": 1, "Fetches": 0, "Computed": 0}, no_cell="-",
                ),
                key="size",
                columns={
                    "size": "Up to", "Value #A": "Fetch", "Value #B": "Compute", "Value #C": "Faster by",
                    "Value #D": "Fetches", "Value #E": "Computed",
                },
                numeric="size",
            ),
            8, 14,
        ),
        Column(16, beside),
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
                "How long requests waited for KV from the other side, apart from queueing for compute: median (dotted) "
                "and 90th percentile.",
                "s", waits,
                Look(
                    colours={"P50 d2p": "#96d98d", "P90 d2p": "#56a64b", "P50 p2d": "#c0d8ff", "P90 p2d": "#5794f2"},
                    names={"P50 d2p": "P50 read back", "P90 d2p": "P90 read back", "P50 p2d": "P50 hand-over",
                           "P90 p2d": "P90 hand-over"},
                ),
                dotted=["/^P50/"], sparse=True,
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
                "What the time to first token is made of, as the router sees it: routing, the prefill engine's leg, "
                "the hand-over to decode, and decode's first token.",
                "s",
                [Target(str(ratio(seconds, counts)), "{{phase}}")],
                Look(colours=_PHASES.colours, names=_PHASES.names, links=[trace_link()]),
                stack="normal",
            ),
            6, 8,
        ),
        Sized(
            timeseries(
                "TTFT by phase, P90",
                "90th percentile of each phase. They do not add up: each is its own.",
                "s", p90, Look(colours=_PHASES.colours, names=_PHASES.names, links=[trace_link()]), sparse=True,
            ),
            6, 8,
        ),
    ]  # fmt: skip


def _failures() -> list[Sized]:
    failed = [
        Target(
            str(per_second(engine("kvtune_kv_reads_failed_total", direction=direction), "instance")),
            f"{said} {{{{instance}}}}",
        )
        for direction, said in ((BACK, "read back"), (OVER, "hand-over"))
    ]
    lost = per_second(engine("kvtune_decisions_total", reason=Reason.READ_FAILED), "instance")
    nixl = per_second(engine("vllm:nixl_num_failed_transfers_total"), "instance")
    nixl_expired = per_second(engine("vllm:nixl_num_kv_expired_reqs_total"), "instance")
    return [
        Sized(timeseries("KV reads that failed", "Failures by direction and engine.", "ops",
                         failed), 6, 7),
        Sized(timeseries("Histories computed because the read failed",
                         "Turns that paid for a failed read with a whole prefill.", "reqps",
                         [Target(str(lost), "{{instance}}")]), 6, 7),
        Sized(
            timeseries(
                "NIXL's own count",
                "vLLM's counters of failed transfers and of retentions that expired unread: per rank, without a "
                "direction.",
                "ops",
                [Target(str(nixl), "failed {{instance}}"), Target(str(nixl_expired), "expired {{instance}}")],
            ),
            6, 7,
        ),
        Sized(
            timeseries(
                "Speed against a day ago, over time",
                "Bytes a second of a read over those of the same hour yesterday, at equal sizes.",
                "percentunit",
                [Target(str(speed_against_yesterday()), "{{direction}}")],
                Look(colours=_DIRECTIONS.colours, names=_DIRECTIONS.names, no_value="No day to compare", soft_most=1),
            ),
            6, 7,
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
            Section("Failures, and speed against a day ago", _failures(), collapsed=True),
        ],
    )
