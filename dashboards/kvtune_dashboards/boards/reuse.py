"""kvtune / Reuse: does multi-turn reuse work, and if not, why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvtune_dashboards.boards.common import (
    NOT_REUSED,
    RANGE,
    REUSED,
    STEP,
    UNTRIED,
    engine,
    frame,
    in_range,
    per_second,
    router,
    trace_link,
    turns,
)
from kvtune_dashboards.boards.formulas import of_router, prefill_saved, prefill_saved_on_average, rows
from kvtune_dashboards.layout import Section, Sized
from kvtune_dashboards.panels import (
    BAD,
    COLOURS,
    FAIR,
    GOOD,
    QUIET,
    WORDS,
    Look,
    Target,
    Threshold,
    bar_gauge,
    heatmap,
    spoken,
    stat,
    table,
    timeseries,
)
from kvtune_dashboards.promql import Expr, any_of, by, increase, over_time, quantile, rate, ratio, re_, sum_by
from kvtune_telemetry.buckets import TTFT_SECONDS
from kvtune_telemetry.vocabulary import Decision, NoReference, Outcome, Reason, ReferenceEnd

UID = "kvtune-reuse"
OUTCOMES = spoken(*Outcome)
TTFT = "kvtune_turn_ttft_seconds"
GUARD: dict[str, tuple[str, str]] = {
    f"{decision}, {reason}": (said, colour)
    for decision, reason, said, colour in (
        (Decision.FETCH, Reason.REWRITTEN, "proven part read", "#37872d"),
        (Decision.RECOMPUTE, Reason.REWRITTEN, "computed: history rewritten", COLOURS["rewritten"]),
        (Decision.RECOMPUTE, Reason.UNVERIFIED, "computed: not proven equal", "#8ab8ff"),
        (Decision.RECOMPUTE, Reason.CONSUMED, "computed: reference used up", COLOURS["consumed"]),
        (Decision.RECOMPUTE, Reason.ENGINE_GONE, "computed: engine gone", COLOURS["engine_gone"]),
    )
}
"""Decision and reason where reading all of a reference would not have been safe -> how it is said, its colour."""


def reused_share(window: str = STEP) -> Expr:
    """Follow-up turns that were reused, of those that reuse was meant for."""
    return ratio(turns(REUSED, window=window), turns(REUSED, *NOT_REUSED, window=window))


def _ttft(q: float, window: str, *labels: str, **matchers: Any) -> Expr:
    return quantile(q, TTFT, window, labels, job=re_("$job"), **matchers)


def _tiles() -> list[Sized]:
    lost = sum_by(increase(router("kvtune_turns_total", outcome=any_of(*NOT_REUSED)), RANGE), "outcome").over(0)
    sources = engine("kvtune_prompt_tokens_total", role="prefill")
    saved = engine("kvtune_prompt_tokens_total", role="prefill", source="fetched")
    late = in_range(engine("kvtune_kv_late_notifications_total"))
    followup: dict[str, Any] = {"turn": "followup"}
    return [
        Sized(
            stat(
                "Follow-up turns reused",
                "Of the turns that continue a known conversation and that reuse was meant for: how many found their "
                "history on decode (outcome `hit`). Time range shown. Below 20 % reuse hardly works: the tile beside "
                "says why. Pauses longer than the TTL can explain a low share.",
                "percentunit",
                [Target(str(reused_share(RANGE)), instant=True)],
                Look(
                    decimals=0, least=0, most=1,
                    thresholds=(Threshold(None, BAD), Threshold(0.2, FAIR), Threshold(0.5, GOOD)),
                ),
            ),
            4, 5,
        ),
        Sized(
            stat(
                "Most lost to",
                "The most frequent reason why a follow-up turn was not reused, in the time range shown.",
                "none",
                [Target(f"topk(1, {lost})", "{{outcome}}", instant=True)],
                replace(OUTCOMES, no_value="Nothing"),
                show="name",
            ),
            4, 5,
        ),
        Sized(
            stat(
                "TTFT P90, follow-up turns",
                "90 % of follow-up turns had their first token within this time: those that were reused, and those "
                "that were not. Time range shown. The two may have prompts of different lengths: only a hold-out "
                "(`--holdout`) compares like with like.",
                "s",
                [
                    Target(str(_ttft(0.9, RANGE, outcome=REUSED, **followup)), "reused", instant=True),
                    Target(str(_ttft(0.9, RANGE, outcome=any_of(*NOT_REUSED), **followup)), "not reused", instant=True),
                ],
                Look(decimals=2, colours={"reused": COLOURS["hit"], "not reused": COLOURS["miss"]}),
                show="value_and_name",
            ),
            5, 5,
        ),
        Sized(
            stat(
                "Prefill saved",
                "Seconds of prefill computation that fetching saved in each second, all prefill engines together: 1 is "
                "one engine's whole time. What computing the fetched tokens would have cost, by the cost line seen in "
                "the last hours, less the time the reads took. Below 0 fetching costs more than it saves.",
                "suffix:s/s",
                [Target(str(prefill_saved_on_average()), instant=True)],
                Look(decimals=2, thresholds=(Threshold(None, BAD), Threshold(0, GOOD))),
            ),
            4, 5,
        ),
        Sized(
            stat(
                "Prompt tokens fetched",
                "Share of all prompt tokens whose KV came from decode instead of being computed again. Time range "
                "shown.",
                "percentunit",
                [Target(str(ratio(in_range(saved), in_range(sources))), instant=True)],
                Look(decimals=0, least=0, most=1),
            ),
            4, 5,
        ),
        Sized(
            stat(
                "Answers at risk",
                "Reads of KV that decode had freed already: what was read may have been another request's. Anything "
                "but "
                "0 is a fault. Time range shown.",
                "short",
                [Target(str(late), instant=True)],
                Look(decimals=0, thresholds=(Threshold(None, GOOD), Threshold(0.5, BAD))),
            ),
            3, 5,
        ),
    ]  # fmt: skip


def _turns() -> list[Sized]:
    reasons = [*NOT_REUSED, *UNTRIED]
    by_outcome = per_second(router("kvtune_turns_total"), "outcome").over(0)
    lost = per_second(router("kvtune_turns_total", outcome=any_of(*reasons)), "outcome").over(0)
    share = ratio(
        per_second(router("kvtune_turns_total", outcome=REUSED), "job"),
        per_second(router("kvtune_turns_total", outcome=any_of(REUSED, *NOT_REUSED)), "job"),
    )
    before = over_time("avg", of_router("kvtune:followup_turns_reused:ratio"), "1h", "1d")
    counted = in_range(router("kvtune_turns_total", outcome=any_of(*NOT_REUSED)), "outcome").over(0)
    return [
        Sized(
            timeseries(
                "Turns by outcome",
                "Every turn, by what became of the reference to its history; each turn once.",
                "suffix:turns/s",
                [Target(str(by_outcome), "{{outcome}}")],
                OUTCOMES,
                stack="normal",
            ),
            12, 8,
        ),
        Sized(
            timeseries(
                "Why turns were not reused",
                "The turns that could not reuse, or were not tried, by why. *Came too late*: raise the TTL. *No "
                "reference*: the turn before ended at a stop string, or its stream carries none. *No conversation id*: "
                "clients send none and the history tells nothing.",
                "suffix:turns/s",
                [Target(str(lost), "{{outcome}}")],
                replace(OUTCOMES, no_value="No such turn"),
                stack="normal",
            ),
            12, 8,
        ),
        Sized(
            timeseries(
                "Follow-up turns reused, over time",
                "The first tile over time, a line a job, against the same hour a day before (dashed).",
                "percentunit",
                [Target(str(share), "{{job}}"), Target(str(before), "{{job}}, a day before")],
                Look(least=0, most=1),
                dashed=["/, a day before$/"],
            ),
            12, 7,
        ),
        Sized(
            bar_gauge(
                "Follow-up turns not reused, in this range",
                "Of the turns that reuse was meant for: why they were not reused, by number of turns in the time range "
                "shown. Turns that reuse was not tried for (first, hold-out, no conversation id) are not among them.",
                "locale",
                [Target(f"sort_desc({counted})", "{{outcome}}", instant=True)],
                replace(OUTCOMES, decimals=0, no_value="No such turn"),
            ),
            12, 7,
        ),
    ]  # fmt: skip


def _ttft_panels() -> list[Sized]:
    kinds = [
        Target(str(_ttft(q, STEP, turn=turn)), f"P{100 * q:.0f} {name}", exemplar=q == 0.9)
        for turn, name in (("first", "first turns"), ("followup", "follow-ups"))
        for q in (0.5, 0.9)
    ]
    outcomes = [
        Target(str(_ttft(q, STEP, turn="followup", outcome=outcome)), f"P{100 * q:.0f} {name}", exemplar=q == 0.9)
        for outcome, name in ((REUSED.value, "reused"), (any_of(*NOT_REUSED), "not reused"))
        for q in (0.5, 0.9)
    ]
    look = Look(
        links=[trace_link()],
        colours={
            "P50 first turns": "#8ab8ff", "P90 first turns": "#3274d9",
            "P50 follow-ups": "#d9b3f0", "P90 follow-ups": "#b877d9",
            "P50 reused": "#96d98d", "P90 reused": "#56a64b",
            "P50 not reused": "#ffb357", "P90 not reused": "#ff780a",
        },
    )  # fmt: skip
    spread = sum_by(increase(router(f"{TTFT}_bucket", turn="followup", le=rows(TTFT_SECONDS)), STEP), "le")
    return [
        Sized(
            timeseries(
                "TTFT, first and follow-up turns",
                "Time to first token as the client sees it, median (dotted) and 90th percentile of the last "
                "minutes. Dots lead to traces.",
                "s", kinds, look, dotted=["/^P50/"], sparse=True,
            ),
            8, 9,
        ),
        Sized(
            timeseries(
                "TTFT of follow-up turns, reused and not",
                "Time to first token of follow-up turns by whether their history was reused: median (dotted) and "
                "90th percentile of the last minutes, where the tile above has the whole range. Dots lead to traces.",
                "s", outcomes, look, dotted=["/^P50/"], sparse=True,
            ),
            8, 9,
        ),
        Sized(
            heatmap(
                "TTFT of follow-up turns, spread",
                "How the time to first token of follow-up turns is spread. Two bands are two populations: reused above "
                "not reused, or long prompts above short ones.",
                "s",
                Target(str(spread), exemplar=True),
            ),
            8, 9,
        ),
    ]  # fmt: skip


def _work() -> list[Sized]:
    saved = prefill_saved()
    by_source = per_second(engine("kvtune_prompt_tokens_total", role="prefill"), "source").over(0)
    history = per_second(engine("kvtune_decision_tokens_total", role="prefill"), "decision").over(0)
    return [
        Sized(
            timeseries(
                "Seconds of prefill saved per second",
                "What computing the fetched tokens would have cost less what fetching them took. Needs costs of both "
                "paths; without any computation in the last hours it is not known.",
                "suffix:s/s",
                [Target(str(saved), "saved")],
                Look(colours={"saved": OUTCOMES.colours["hit"]}),
                area=True,
            ),
            8, 8,
        ),
        Sized(
            timeseries(
                "Prompt tokens by source",
                "Where the KV of prompts came from: fetched from decode, held in prefill's own cache, computed.",
                "si:tok/s",
                [Target(str(by_source), "{{source}}")],
                spoken("fetched", "local_hit", "computed"),
                stack="normal",
            ),
            8, 8,
        ),
        Sized(
            timeseries(
                "History: fetched or computed again",
                "Tokens of histories that decode held, by what prefill did about them. *Computed again* is what reuse "
                "missed although the KV was there.",
                "si:tok/s",
                [Target(str(history), "{{decision}}")],
                spoken(*Decision),
                stack="normal",
            ),
            8, 8,
        ),
    ]  # fmt: skip


def _late() -> list[Sized]:
    meant = any_of(REUSED, *NOT_REUSED)
    expired = ratio(turns(Outcome.EXPIRED), sum_by(rate(router("kvtune_turns_total", outcome=meant), STEP)))
    ages = [
        Target(
            str(quantile(q, "kvtune_reference_age_seconds", STEP, job=re_("$job"), outcome=outcome)),
            f"P{100 * q:.0f} {name}",
        )
        for outcome, name in (("hit", "reused"), ("expired", "came too late"))
        for q in (0.5, 0.9)
    ]
    ttl = by("min", engine("kvtune_connector_setting", setting="decoder_kv_blocks_ttl", role="decode"))
    declined = per_second(engine("kvtune_kv_reads_declined_total"), "instance")
    return [
        Sized(
            timeseries(
                "Follow-up turns that came too late",
                "Share of follow-up turns whose history had expired. A longer TTL catches them, and holds more memory: "
                "see Retention and tuning.",
                "percentunit",
                [Target(str(expired), "came too late")],
                Look(least=0, soft_most=0.1, colours={"came too late": OUTCOMES.colours["expired"]}),
                area=True,
            ),
            8, 8,
        ),
        Sized(
            timeseries(
                "Age of the reference when the turn came",
                "How long after its turn a reference was asked for, against the time to live on decode (dashed; the "
                "shortest of the engines): median (dotted) and 90th percentile. Logarithmic.",
                "s",
                [*ages, Target(str(ttl), "TTL in force")],
                Look(
                    colours={
                        "P50 reused": "#96d98d", "P90 reused": "#56a64b", "P50 came too late": "#ffb357",
                        "P90 came too late": "#ff780a", "TTL in force": QUIET,
                    }
                ),
                dashed=["TTL in force"], dotted=["/^P50/"], log=True, sparse=True,
            ),
            8, 8,
        ),
        Sized(
            timeseries(
                "Expired reads declined",
                "Reads that an engine did not start because the retention had run out, or would before the read was "
                "safe.",
                "ops",
                [Target(str(declined), "{{instance}}")],
            ),
            8, 8,
        ),
    ]  # fmt: skip


def _guard() -> list[Sized]:
    caught = per_second(router("kvtune_turns_total", outcome=Outcome.REWRITTEN))
    guarded = (Reason.REWRITTEN, Reason.UNVERIFIED, Reason.CONSUMED, Reason.ENGINE_GONE)
    decided = per_second(engine("kvtune_decisions_total", reason=any_of(*guarded)), "decision", "reason").over(0)
    late = per_second(engine("kvtune_kv_late_notifications_total"), "instance")
    forged = per_second(router("kvtune_forged_parameters_total"))
    return [
        Sized(
            timeseries(
                "Rewritten histories caught",
                "Turns whose history no longer began with what decode holds: found out, and computed instead of being "
                "answered from the wrong KV.",
                "suffix:turns/s",
                [Target(str(caught), "caught")],
                Look(colours={"caught": OUTCOMES.colours["rewritten"]}),
                area=True,
            ),
            6, 7,
        ),
        Sized(
            timeseries(
                "Guard decisions of prefill",
                "What prefill did where reading all of the reference would not have been safe. *Proven part read*: the "
                "history was rewritten, and only the prefix that is proven equal is read.",
                "reqps",
                [Target(str(decided), "{{decision}}, {{reason}}")],
                Look(
                    names={name: said for name, (said, _) in GUARD.items()},
                    colours={name: colour for name, (_, colour) in GUARD.items()},
                ),
                stack="normal",
            ),
            6, 7,
        ),
        Sized(
            timeseries(
                "KV read after it was freed",
                "Readers that reported a read of KV already freed. Must stay 0: answers may have been wrong.",
                "ops",
                [Target(str(late), "{{instance}}")],
            ),
            6, 7,
        ),
        Sized(
            timeseries(
                "Forged transfer parameters",
                "Requests whose client sent kv_transfer_params; the router dropped them.",
                "reqps",
                [Target(str(forged), "dropped")],
            ),
            6, 7,
        ),
    ]  # fmt: skip


def _rare() -> list[Sized]:
    ended = per_second(router("kvtune_references_ended_total"), "end").over(0)
    missed = per_second(router("kvtune_references_missed_total"), "reason")
    held_out = [
        Target(str(_ttft(0.9, STEP, turn="followup", outcome="disabled")), "P90 held out"),
        Target(str(_ttft(0.9, STEP, turn="followup", outcome=any_of(REUSED, *NOT_REUSED))), "P90 served with reuse"),
    ]
    return [
        Sized(
            timeseries(
                "References that left the router",
                "How references ended: handed over to prefill is the good end.",
                "ops",
                [Target(str(ended), "{{end}}")],
                spoken(*ReferenceEnd),
                stack="normal",
            ),
            8, 8,
        ),
        Sized(
            timeseries(
                "Turns that brought no reference",
                "Identified conversations' turns after which the next one cannot reuse, by why.",
                "suffix:turns/s",
                [Target(str(missed), "{{reason}}")],
                spoken(*NoReference),
            ),
            8, 8,
        ),
        Sized(
            timeseries(
                "Held-out conversations, for comparison",
                "TTFT P90 of follow-up turns with reuse switched off (`--holdout`) and of all with reuse on, whatever "
                "became of them: the honest measure of what reuse is worth.",
                "s",
                held_out,
                Look(
                    colours={"P90 held out": QUIET, "P90 served with reuse": "#37872d"},
                    no_value="Nothing held out",
                ),
                sparse=True,
            ),
            8, 8,
        ),
        Sized(
            table(
                "Outcomes in numbers",
                "Turns of the time range shown, by outcome.",
                "locale",
                [Target(f"sort_desc({in_range(router('kvtune_turns_total'), 'outcome')})")],
                Look(decimals=0),
                columns={"outcome": "Outcome", "Value": "Turns"},
                sayings={"Outcome": {word: WORDS[word] for word in Outcome}},
            ),
            24, 9,
        ),
    ]  # fmt: skip


def board() -> dict[str, Any]:
    """The dashboard."""
    return frame(
        UID,
        "kvtune / Reuse",
        "Does multi-turn KV reuse work? Follow-up turns reused, why the rest were not, and what it saves.",
        [
            Section("", _tiles()),
            Section("What became of the turns", _turns()),
            Section("Time to first token", _ttft_panels()),
            Section("Work saved", _work()),
            Section("Too late", _late()),
            Section("Correctness guard", _guard()),
            Section("References and hold-out", _rare(), collapsed=True),
        ],
    )
