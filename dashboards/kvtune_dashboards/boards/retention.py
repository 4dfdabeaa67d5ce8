"""kvtune / Retention and tuning: what the TTL costs, what another would give, and what to turn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvtune_dashboards.boards.common import (
    RANGE,
    STEP,
    engine,
    frame,
    in_range,
    per_second,
    router,
    suggested,
)
from kvtune_dashboards.boards.formulas import (
    FACTORS,
    held_share,
    held_tokens,
    of_router,
    pool_share,
    returns_in_time,
    rows,
    threshold,
    ttl_by_factor,
    ttl_in_force,
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
    bar_gauge,
    heatmap,
    seconds_setting,
    spoken,
    stat,
    table,
    text,
    timeseries,
    tokens,
)
from kvtune_dashboards.promql import any_of, by, increase, over_time, quantile, ratio, re_, sum_by
from kvtune_telemetry.buckets import GAP_SECONDS
from kvtune_telemetry.vocabulary import End, Missed

UID = "kvtune-retention"
TTL, THRESHOLD = "decoder_kv_blocks_ttl", "kv_recompute_threshold"
USEFUL = (End.READ, End.LOCAL_HIT)
STATUS = {
    "change": ("Change it", "#ff780a"),
    "keep": ("Keep it", "#37872d"),
    "off": ("Do not retain", "#c4162a"),
    "insufficient": ("Too little seen yet", "#9fa7b3"),
    "unidentifiable": ("Cannot be told from this traffic", "#9fa7b3"),
}
"""A status of the advice in words, and its colour."""
_CHOSEN: dict[str, Any] = {
    "job": re_("$job"), "model_name": re_("$model"), "engine": re_("$engine"), "role": re_("$role"),
}  # fmt: skip
AWAY = {
    10: "10 s", 30: "30 s", 60: "1 min", 120: "2 min", 240: "4 min", 475: "8 min", 960: "16 min", 1800: "½ h",
    3600: "1 h",
}  # fmt: skip
"""Pauses at which the share of turns still away is shown, edges (s) of the histogram of pauses, and their names: one is
the longest by far, as Grafana makes room for the first of the longest."""
NO_ADVICE = "No advice yet"
TOO_YOUNG = "Too little seen yet"
"""Where the rules have not seen enough of the traffic to foretell anything."""
SETTINGS = {TTL: f"{TTL}, s", THRESHOLD: f"{THRESHOLD}, tokens"}
"""A setting with its unit."""
_WHAT_TO_TURN = """
**`decoder_kv_blocks_ttl`** (both engine roles; the router's `--retain`, up to what decode allows): how long decode
keeps a finished turn's KV.

* *Came too late* is high on the Reuse board, and the pool has room: **raise** it.
* Requests wait on decode while retained KV fills the pool, or *lapsed* outgrows *read*: **lower** it.
* Hardly any turn returns: **switch retention off** (`bidirectional_kv_xfer: false`).

**`kv_recompute_threshold`** (prefill): how many tokens must be missing before they are fetched.

* The crossing lies above it: **raise** it to the crossing.
* It lies below, and many tokens are computed because of it: **lower** it.

**To what?** To what *Advice* says (`kvtune suggest --watch`).
"""


def _status_tile(setting: str, title: str, description: str) -> Sized:
    in_force = by("max", suggested("kvtune_suggest_status", setting=setting).equal_to(1), "status")
    return Sized(
        stat(
            title,
            description,
            "none",
            [Target(str(in_force), "{{status}}", instant=True)],
            Look(
                colours={status: colour for status, (_, colour) in STATUS.items()},
                names={status: words for status, (words, _) in STATUS.items()},
                no_value=NO_ADVICE,
            ),
            show="name",
        ),
        4, 4,
    )  # fmt: skip


def _setting_tile(setting: str, title: str, description: str, unit: str, in_force: str) -> Sized:
    advised = by("max", suggested("kvtune_suggest_recommended", setting=setting))
    return Sized(
        stat(
            title,
            description,
            unit,
            [Target(in_force, "in force", instant=True), Target(str(advised), "advised", instant=True)],
            Look(decimals=0, colours={"in force": QUIET}, no_value="Not known"),
            show="value_and_name",
        ),
        4, 4,
    )  # fmt: skip


def _tiles() -> list[Sized]:
    held = in_range(engine("kvtune_retained_token_seconds_total"))
    useful = in_range(engine("kvtune_retained_token_seconds_total", end=any_of(*USEFUL)))
    waiting = by("sum", over_time("max", engine("vllm:num_requests_waiting"), RANGE), "instance")
    decodes = by("max", engine("kvtune_connector_build_info", role="decode"), "instance")
    return [
        _status_tile(
            TTL, "TTL: what to do",
            "What `kvtune suggest` says about `decoder_kv_blocks_ttl`. Made by `kvtune suggest --watch` or `--export`.",
        ),
        _setting_tile(
            TTL, "TTL and advice",
            "How long decode keeps a turn (`decoder_kv_blocks_ttl`, or what the router asks for), and the value to "
            "set.",
            seconds_setting(), str(ttl_in_force()),
        ),
        _status_tile(
            THRESHOLD, "Threshold: what to do",
            "What `kvtune suggest` says about `kv_recompute_threshold`. Made by `kvtune suggest --watch` or "
            "`--export`.",
        ),
        _setting_tile(
            THRESHOLD, "Threshold and advice",
            "`kv_recompute_threshold` as prefill runs with it (the highest of the models), and the value to set.",
            tokens(), str(by("max", threshold())),
        ),
        Sized(
            stat(
                "Pool held",
                "Share of decode's KV pool that retained KV takes now, on the engine where it is highest. From a third "
                "on it begins to crowd out requests.",
                "percentunit",
                [Target(str(by("max", pool_share())), instant=True)],
                Look(
                    decimals=0, least=0, most=1,
                    thresholds=(Threshold(None, GOOD), Threshold(0.3, FAIR), Threshold(0.6, BAD)),
                ),
            ),
            3, 4,
        ),
        Sized(
            stat(
                "Held, then used",
                "Of the tokens times seconds that decode held: how much ended in a read, or in prefill not needing "
                "one. "
                "The rest was wasted. Time range shown.",
                "percentunit",
                [Target(str(ratio(useful, held)), instant=True)],
                Look(decimals=0, least=0, most=1),
            ),
            3, 4,
        ),
        Sized(
            stat(
                "Waiting",
                "The most requests that a decode engine had waiting at once, in the time range shown.",
                "short",
                [Target(str(by("max", waiting.where(decodes, ("instance",)))), instant=True)],
                Look(decimals=0),
            ),
            2, 4,
        ),
    ]  # fmt: skip


def _turn() -> list[Sized | Column]:
    age = "time() - " + str(by("max", suggested("kvtune_suggest_timestamp_seconds")))
    advice = [
        Target(str(by("max", suggested(f"kvtune_suggest_{name}"), "setting")))
        for name in ("current", "recommended", "interval_low", "interval_high")
    ]
    what_if = [Target(str(expr)) for expr in (ttl_by_factor(), returns_in_time(), held_tokens(), held_share())]
    advice_tiles = [
        Sized(
            table(
                "Advice",
                "What `kvtune suggest` advises: the value it saw in force, the value to set, and the interval that the "
                "evidence leaves. Seconds for the TTL, tokens for the threshold.",
                "none", advice,
                Look(decimals=0, no_value=NO_ADVICE, no_cell="-"),
                key="setting",
                columns={
                    "setting": "Setting", "Value #A": "In force", "Value #B": "Set to", "Value #C": "From",
                    "Value #D": "To",
                },
                widths={"Setting": 235},
                sayings={"Setting": SETTINGS},
            ),
            10, 5,
        ),
        Sized(
            stat(
                "Advice's age",
                "How long ago `kvtune suggest` last looked. Advice of another day's traffic is none.",
                "s",
                [Target(age, instant=True)],
                Look(
                    decimals=0, no_value=NO_ADVICE,
                    thresholds=(Threshold(None, GOOD), Threshold(2 * 3600, FAIR), Threshold(86400, BAD)),
                ),
            ),
            3, 5,
        ),
        Sized(
            stat(
                "Advice made",
                "Whether the last look of `kvtune suggest` could read its source.",
                "none",
                [Target(str(by("min", suggested("kvtune_suggest_up"))), instant=True)],
                Look(words={"1": ("yes", GOOD), "0": ("failed", BAD)}, no_value=NO_ADVICE),
            ),
            3, 5,
        ),
    ]  # fmt: skip
    what_if_table = Sized(
        table(
            "What another TTL would give",
            "By how pauses between turns were spread in the last hours: of the turns that return, how many would "
            "in time; the tokens decode would hold on average; their share of the pool. Empty until the rules "
            "have seen enough.",
            "percentunit", what_if,
            Look(
                units={"TTL": seconds_setting(), "Tokens held": "si:tok"}, no_value=TOO_YOUNG, no_cell="-",
                digits={"TTL": 0, "Back in time": 1, "Of the pool": 1},
            ),
            key="factor",
            columns={
                "factor": "TTL times", "Value #A": "TTL", "Value #B": "Back in time", "Value #C": "Tokens held",
                "Value #D": "Of the pool",
            },
            sayings={"TTL times": {factor: f"{factor} ({words})" for factor, words in FACTORS.items()}},
        ),
        10, 7,
    )  # fmt: skip
    rules_tiles = [
        Sized(
            stat(
                "Rules' estimate of the TTL",
                "A second opinion, where there is no advice: what the recording rules make of the pauses alone. The "
                "TTL at which all but 2 % of the returns come in time, and the longest whose KV fits the share of the "
                "pool set aside for it; set the lower of the two. `kvtune suggest` weighs more, knows how sure it is, "
                "and counts where it speaks.",
                seconds_setting(),
                [
                    Target(str(by("max", of_router("kvtune:ttl_seconds:reaches_target"))), "reaches the returns",
                           instant=True),
                    Target(str(by("min", of_router("kvtune:ttl_seconds:fits_pool"))), "fits the pool", instant=True),
                ],
                Look(decimals=0, no_value=TOO_YOUNG),
                show="value_and_name",
            ),
            6, 4,
        ),
        Sized(
            stat(
                "The rules have seen",
                "How long the rules have watched what asks to be retained, up to their window (an hour by default). "
                "While that is short, tokens held at other TTLs are a guess, and at TTLs beyond it they are absent.",
                "s",
                [Target(str(by("max", of_router("kvtune:demand_covered_seconds:max"))), instant=True)],
                Look(decimals=0, no_value="Nothing yet"),
            ),
            6, 3,
        ),
    ]  # fmt: skip
    return [
        Sized(text("What to turn", "How to read this board, and which setting answers which finding.", _WHAT_TO_TURN),
              8, 12),
        Column(16, [*advice_tiles, what_if_table, Column(6, rules_tiles)]),
        *_what_if(),
    ]  # fmt: skip


def _what_if() -> list[Sized]:
    names = {factor: f"TTL x {factor} ({words})" for factor, words in FACTORS.items()}
    look = Look(colours={"0.5": "#8ab8ff", "1": "#3274d9", "2": "#b877d9"}, names=names)
    in_force = Target(str(by("sum", engine("kvtune_retained_tokens", role="decode"))), "held now")
    return [
        Sized(
            timeseries(
                "Turns back in time, at other TTLs",
                "Of the turns that return at all, the share that would within half, the same and double the TTL, "
                "less the "
                "margin that is kept before its end.",
                "percentunit",
                [Target(str(returns_in_time()), "{{factor}}")],
                Look(colours=look.colours, names=names, least=0, most=1, no_value=TOO_YOUNG),
            ),
            12, 8,
        ),
        Sized(
            timeseries(
                "Tokens held, at other TTLs",
                "Tokens that decode would hold on average at half, the same and double the TTL, all decode engines "
                "together, beside what it holds now (dashed).",
                "si:tok",
                [Target(str(held_tokens()), "{{factor}}"), in_force],
                Look(colours={**look.colours, "held now": QUIET}, names=names),
                dashed=["held now"],
            ),
            12, 8,
        ),
    ]  # fmt: skip


def _memory() -> list[Sized]:
    retained = by("sum", engine("kvtune_retained_tokens", role="decode"), "instance")
    usage = by("max", engine("vllm:kv_cache_usage_perc"), "instance")
    decodes = by("max", engine("kvtune_connector_build_info", role="decode"), "instance")
    token_seconds = per_second(engine("kvtune_retained_token_seconds_total"), "end").over(0)
    waiting = by("sum", engine("vllm:num_requests_waiting"), "instance").where(decodes, ("instance",))
    return [
        Sized(
            timeseries(
                "Tokens retained", "Tokens that each decode engine holds for turns to come.", "si:tok",
                [Target(str(retained), "{{instance}}")],
            ),
            8, 8,
        ),
        Sized(
            timeseries(
                "Share of the KV pool",
                "Retained KV and all KV in use (dashed), as shares of each decode engine's pool. What lies between the "
                "two serves requests; above 90 % requests begin to wait.",
                "percentunit",
                [
                    Target(str(pool_share()), "retained {{instance}}"),
                    Target(str(usage.where(decodes, ("instance",))), "in use {{instance}}"),
                ],
                Look(least=0, most=1),
                dashed=["/^in use/"],
            ),
            8, 8,
        ),
        Sized(
            timeseries(
                "Requests waiting on decode",
                "Requests that decode has not begun. Together with a full pool: lower the TTL.",
                "short",
                [Target(str(waiting), "{{instance}}")],
            ),
            8, 8,
        ),
        Sized(
            timeseries(
                "Memory held, by how it ended",
                "Token-seconds booked a second: the tokens held on average, by whether holding them was of use. Booked "
                "when a retention ends.",
                "si:tok",
                [Target(str(token_seconds), "{{end}}")],
                spoken(*End),
                stack="normal",
            ),
            12, 8,
        ),
        Sized(
            timeseries(
                "Retentions ended",
                "Finished turns whose retention ended, by how. *Lapsed* is the TTL's doing.",
                "reqps",
                [Target(str(per_second(engine("kvtune_retentions_ended_total"), "end").over(0)), "{{end}}")],
                spoken(*End),
                stack="normal",
            ),
            12, 8,
        ),
    ]  # fmt: skip


def _pauses() -> list[Sized]:
    gaps = [
        Target(str(quantile(q, "kvtune_turn_gap_seconds", STEP, job=re_("$job"))), f"P{100 * q:.0f}")
        for q in (0.5, 0.9, 0.99)
    ]
    ages = [
        Target(str(quantile(q, "kvtune_retention_age_seconds", STEP, **_CHOSEN, end=any_of(*USEFUL))),
               f"P{100 * q:.0f} used")
        for q in (0.5, 0.9)
    ]  # fmt: skip
    ends = in_range(router("kvtune_turn_ends_total"))
    away = [
        Target(
            str(1 - in_range(router("kvtune_turn_gap_seconds_bucket", le=re_(f"{edge}(\\.0)?"))) / ends.over(0)),
            said, instant=True,
        )
        for edge, said in AWAY.items()
    ]  # fmt: skip
    spread = sum_by(increase(router("kvtune_turn_gap_seconds_bucket", le=rows(GAP_SECONDS)), STEP), "le")
    ended = in_range(engine("kvtune_retention_age_seconds_count"), "end").over(0)
    return [
        Sized(
            timeseries(
                "Pauses between turns, against the TTL",
                "How long conversations pause, for pauses that ended. The dashed line is the TTL in force: what lies "
                "above it comes too late.",
                "s",
                [*gaps, Target(str(ttl_in_force()), "TTL in force")],
                Look(colours={"TTL in force": QUIET, "P50": "#c0d8ff", "P90": "#5794f2", "P99": "#b877d9"}),
                dashed=["TTL in force"], dotted=["P50"],
                log=True, sparse=True,
            ),
            8, 9,
        ),
        Sized(
            bar_gauge(
                "Turns still away after a pause",
                "Share of answered turns whose conversation had not returned after so long a pause (time range shown): "
                "where the bars stop falling, a longer TTL catches nobody more. *8 min* is 475 s, the usable life of "
                "the default TTL.",
                "percentunit",
                away,
                Look(decimals=0),
            ),
            8, 9,
        ),
        Sized(
            heatmap(
                "Pauses between turns, spread",
                "How the pauses that ended are spread.",
                "s",
                Target(str(spread)),
            ),
            8, 9,
        ),
        Sized(
            timeseries(
                "Age of retained KV when it was used",
                "How old retained KV was when prefill read it, or said that it needs none, against the TTL in force "
                "(dashed): median (dotted) and 90th percentile. Logarithmic.",
                "s",
                [*ages, Target(str(ttl_in_force()), "TTL in force")],
                Look(colours={"TTL in force": QUIET, "P50 used": "#96d98d", "P90 used": "#56a64b"}),
                dashed=["TTL in force"], dotted=["P50 used"], log=True, sparse=True,
            ),
            12, 7,
        ),
        Sized(
            bar_gauge(
                "Retentions ended, in this range", "How retentions ended in the time range shown.", "locale",
                [Target(f"sort_desc({ended})", "{{end}}", instant=True)],
                replace(spoken(*End), decimals=0),
            ),
            12, 7,
        ),
    ]  # fmt: skip


def _rare() -> list[Sized]:
    missed = per_second(engine("kvtune_retentions_missed_total"), "reason")
    blocks = by("sum", engine("kvtune_retained_blocks", role="decode"), "instance")
    requests = by("sum", engine("kvtune_retained_requests", role="decode"), "instance")
    given_up = per_second(router("kvtune_turns_given_up_total"))
    return [
        Sized(
            timeseries(
                "Finished requests that were not retained", "By why decode kept nothing.", "reqps",
                [Target(str(missed), "{{reason}}")],
                Look(
                    colours={reason: COLOURS[reason] for reason in Missed},
                    names={
                        Missed.ABORTED: "client left, or stop string", Missed.ERROR: "request failed",
                        Missed.UNWANTED: "router wants none", Missed.DISABLED: "retention is off",
                    },
                ),
            ),
            8, 7,
        ),
        Sized(
            timeseries(
                "Requests and blocks retained", "What decode holds, in requests and in blocks.", "short",
                [
                    Target(str(requests), "requests {{instance}}"),
                    Target(str(blocks), "blocks {{instance}}"),
                ],
            ),
            8, 7,
        ),
        Sized(
            timeseries(
                "Conversations that did not return",
                "Turns whose conversation had not returned when the router forgot it.",
                "suffix:turns/s",
                [Target(str(given_up), "given up")],
            ),
            8, 7,
        ),
    ]  # fmt: skip


def board() -> dict[str, Any]:
    """The dashboard."""
    return frame(
        UID,
        "kvtune / Retention and tuning",
        "What retaining KV costs, what another TTL or threshold would give, and what to turn.",
        [
            Section("", _tiles()),
            Section("What to turn", _turn()),
            Section("Memory", _memory()),
            Section("Pauses and ages", _pauses()),
            Section("More", _rare(), collapsed=True),
        ],
    )
