"""Series that should be there and are not, or that contradict each other: what each keeps from being said. Pure.

Every counter and histogram of kvtune's is exposed from the start, at zero. One that is absent where the others of its
emitter are there is missing, not zero: a relabelling dropped it, a scrape was cut, a version does not have it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from kvtune_telemetry.vocabulary import Decision, Outcome, Role
from kvtune_tuning import threshold, ttl
from kvtune_tuning.series import Labels, SeriesSet

ROUTER_NAMES = (
    "kvtune_turns_total",
    "kvtune_turn_ends_total",
    "kvtune_turn_end_tokens_total",
    "kvtune_turn_gap_seconds_bucket",
    "kvtune_turn_gap_seconds_count",
    "kvtune_conversations_total",
    "kvtune_router_setting",
)
"""Any of these tells a router's target."""
MISSING, CONTRADICTING = "missing_series", "contradicting_series"
APART = 0.1
"""Counts of the same thing may differ by this share, and by `FEW`: scrapes are not of one moment."""
FEW = 20.0
FEWEST_TOKENS = 0.02
"""Conversations that return hold at least this share of the mean tokens, or weights and counts are not of the same."""

_A = TypeVar("_A", ttl.TtlAdvice, threshold.ThresholdAdvice)


@dataclass(frozen=True, slots=True)
class Gap:
    """A quantity that is not known."""

    what: str
    """The series, and where they are missing; or the contradiction."""
    effect: str
    refuses: tuple[str, ...] = ()
    """Settings about which nothing can be said without it."""
    weakens: tuple[str, ...] = ()
    """Settings whose advice has to do without it."""
    code: str = MISSING

    @property
    def message(self) -> str:
        """What is said among the checks."""
        return f"{self.what}: {self.effect}"


_TTL, _TAU, _BOTH = (ttl.SETTING,), (threshold.SETTING,), (ttl.SETTING, threshold.SETTING)
_Rule = tuple[tuple[str, ...], str, tuple[str, ...], tuple[str, ...]]
"""Names, what their absence means, the settings it refuses and those it weakens."""
_RETURNS = "when, and with how much, conversations return is not known"


def exposing(series: SeriesSet, name: str) -> set[str]:
    """Targets that expose a series, and, of a histogram's buckets, one with an edge that is a number."""
    return {s.target for s in series.named(name) if not name.endswith("_bucket") or _edge(s.label("le"))}


def _edge(text: str | None) -> bool:
    try:
        return text is not None and math.isfinite(float(text))
    except ValueError:
        return False


def routers(series: SeriesSet) -> list[str]:
    """Targets that are kvtune's router, whichever of its series is missing."""
    return sorted({s.target for name in ROUTER_NAMES for s in series.named(name)})


def absent(series: SeriesSet, names: Sequence[str], targets: Collection[str]) -> str:
    """The names that some of the targets do not expose, with those targets where others do; empty if none."""
    found = []
    for name in names:
        without = sorted(set(targets) - exposing(series, name))
        if without:
            found.append(name + (f" (of {', '.join(without)})" if len(without) < len(targets) else ""))
    return ", ".join(found)


def of_routers(series: SeriesSet, targets: Collection[str], *, starved: bool) -> list[Gap]:
    """What is missing of kvtune's routers. `starved`: requests waited for room on decode."""
    rules: list[_Rule] = [
        (
            ("kvtune_turn_ends_total", "kvtune_turn_end_tokens_total", "kvtune_turn_end_tokens_squared_total",
             "kvtune_turn_gap_seconds_bucket", "kvtune_turn_gap_tokens_bucket",
             "kvtune_turn_gap_tokens_squared_bucket"),
            _RETURNS, _TTL, (),
        ),
        (("kvtune_conversations_total",), "how many conversations were seen is not known", _TTL, ()),
        (("kvtune_conversations_remembered",),
         "conversations that were going on when the window began are not counted", (), _TTL),
        (("kvtune_turn_ttft_seconds_sum", "kvtune_turn_ttft_seconds_count"),
         "what turns waited is not known: demand is taken to be what was served, and gains are no share of the time to "
         "first token", (), _BOTH),
        (("kvtune_turns_total",), "outcomes of turns are not known", (), ()),
        (("kvtune_turns_given_up_total",), "turns that were given up are not counted", (), ()),
    ]  # fmt: skip
    if starved:
        rules.append((("kvtune_turn_gap_seconds_sum",),
                      "the mean pause is not known: demand is taken to be what was served", (), _TTL))  # fmt: skip
    if series.named("kvtune_connector_setting", setting="max_retain_seconds"):
        rules.append((("kvtune_router_setting",),
                      "whether the router asks decode for a retention of its own is not known", _TTL, ()))  # fmt: skip
    return _gaps(series, rules, targets)


def of_prefill(series: SeriesSet, targets: Collection[str]) -> list[Gap]:
    """What is missing of prefill engines with kvtune's connector."""
    rules: list[_Rule] = [
        (("kvtune_path_observations_total", "kvtune_path_tokens_total", "kvtune_path_seconds_total"),
         "what fetching and computing cost is not known: the TTL is judged by what fits alone", _TAU, _TTL),
        (("kvtune_path_tokens_squared_total",),
         "how prefill queues is not known: the TTL is judged by what fits alone", (), _TTL),
        (("kvtune_decisions_total",), "how many histories lie below the threshold is not known", _TAU, _TTL),
        (("kvtune_decision_tokens_total",), "how much of what returns is read back is not known", _BOTH, ()),
        (("kvtune_kv_reads_declined_total", "kvtune_kv_reads_failed_total"), "reads that failed are not seen", (), ()),
    ]  # fmt: skip
    return [*_gaps(series, rules, targets), *_children(series, targets)]


def of_decode(
    series: SeriesSet, targets: Collection[str], *, has_router: bool, could_be_short: bool, pressed: bool
) -> list[Gap]:
    """What is missing of decode engines with kvtune's connector.

    `could_be_short`: the pool was so full at times that requests may have waited; `pressed`: it was seen to be short.
    """
    rules: list[_Rule] = [
        (("kvtune_retained_tokens",), "what is retained cannot be told from what active requests hold", _TTL, ()),
        (("kvtune_kv_late_notifications_total",), "reads of freed KV are not seen", (), ()),
        (("vllm:num_preemptions_total",), "whether requests were preempted is not known", (), _TTL),
    ]  # fmt: skip
    if has_router:
        rules.append((("kvtune_retained_requests",),
                      "conversations that were going on when the window began are not counted", (), _TTL))  # fmt: skip
        if len(targets) > 1:
            rules.append((("kvtune_retention_tokens_total",),
                          "how decode engines share retention is not known", (), _TTL))  # fmt: skip
    else:
        rules.append((("kvtune_retentions_total", "kvtune_retention_tokens_total", "kvtune_retained_requests",
                       "kvtune_retention_age_seconds_bucket"), _RETURNS, _TTL, ()))  # fmt: skip
    if pressed or could_be_short:
        rules.append((("vllm:num_requests_waiting",), "whether requests waited for room is not known",
                      () if pressed else _TTL, _TTL if pressed else ()))  # fmt: skip
    found = _gaps(series, rules, targets)
    # Where no engine shows its usage, the decision itself says so.
    if exposing(series, "vllm:kv_cache_usage_perc") & set(targets):
        rule: _Rule = (("vllm:kv_cache_usage_perc",), "how full that pool is, is not known", (), _TTL)
        found += _gaps(series, [rule], targets)
    return found


def of_stock(series: SeriesSet, decode: Collection[str], prefill: Collection[str]) -> list[Gap]:
    """What is missing of engines without kvtune's connector where no router tells when conversations return."""
    lapses = ("vllm:nixl_num_kv_expired_reqs_total",)
    lengths = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
    return [
        *_gaps(series, [
            (lapses, "how much lapses is not known", _TTL, ()),
            (lengths, "how much a turn holds is not known", _TTL, ()),
            (("vllm:num_requests_waiting", "vllm:num_preemptions_total"),
             "whether requests waited for room is not known", (), _TTL),
        ], decode),
        *_gaps(series, [
            (("vllm:nixl_xfer_time_seconds_count",), "how much is read back is not known", _TTL, ()),
        ], prefill),
    ]  # fmt: skip


def _gaps(series: SeriesSet, rules: Sequence[_Rule], targets: Collection[str]) -> list[Gap]:
    found = []
    for names, effect, refuses, weakens in rules:
        if targets and (what := absent(series, names, targets)):
            found.append(Gap(f"missing: {what}", effect, refuses, weakens))
    return found


_PATH = ("kvtune_path_observations_total", "kvtune_path_tokens_total", "kvtune_path_seconds_total")
_DECIDED = ("kvtune_decisions_total", "kvtune_decision_tokens_total")


def _children(series: SeriesSet, targets: Collection[str]) -> list[Gap]:
    """Label sets that one series of a family has and its siblings lack: costs and sizes are quotients of the two."""
    found = []
    for family, effect, weakens in (
        (_PATH, "those sizes are left out", _BOTH),
        (_DECIDED, "what prefill decided is not known in full", _BOTH),
    ):
        sets: dict[str, dict[str, set[Labels]]] = {}
        grown: dict[str, set[Labels]] = {}
        for name in family:
            for one in series.named(name):
                sets.setdefault(one.target, {}).setdefault(name, set()).add(one.labels)
                if one.target in targets and one.increase() > 0:
                    grown.setdefault(one.target, set()).add(one.labels)
        for target, labels in sorted(grown.items()):
            of = sets[target]
            lacking = [name for name in family if labels - of.get(name, labels)]
            if lacking:
                found.append(Gap(f"missing: some series of {', '.join(lacking)} (of {target})", effect, (), weakens))
    return found


def contradictions(
    series: SeriesSet, *, returned: float, returned_tokens: float, ends: float, mean_tokens: float, going_on: float
) -> list[Gap]:
    """Counts of the router's that cannot all be right.

    `returned`: pauses in the buckets; `returned_tokens`: the tokens held over them; `ends`: turns that ended;
    `going_on`: conversations at the window's begin.
    """
    found = []
    hits = series.increase("kvtune_turns_total", outcome=Outcome.HIT.value) or 0.0
    counted = series.increase("kvtune_turn_gap_seconds_count")
    if hits > (1 + APART) * returned + FEW:
        found.append(f"{hits:.0f} turns were hits, but kvtune_turn_gap_seconds_bucket shows {returned:.0f} pauses only")
    if counted is not None and abs(counted - returned) > APART * max(counted, returned) + FEW:
        found.append(
            f"kvtune_turn_gap_seconds_count counts {counted:.0f} pauses, its buckets (kvtune_turn_gap_seconds_bucket) "
            f"{returned:.0f}"
        )
    if returned > (1 + APART) * (ends + going_on) + FEW:
        found.append(
            f"{returned:.0f} pauses ended (kvtune_turn_gap_seconds_bucket) after {ends:.0f} turns "
            "(kvtune_turn_ends_total)"
        )
    if returned > 5 * FEW and mean_tokens > 0:
        share = returned_tokens / (returned * mean_tokens)
        if not FEWEST_TOKENS <= share <= 1 / FEWEST_TOKENS:
            found.append(
                f"a conversation that returns holds {returned_tokens / returned:.3g} tokens (kvtune_turn_gap_tokens_"
                f"bucket), a turn that ends {mean_tokens:.3g} (kvtune_turn_end_tokens_total)"
            )
    return [Gap(f"contradiction: {one}", "one of them is wrong", _TTL, (), CONTRADICTING) for one in found]


def read_back(series: SeriesSet) -> float:
    """Tokens that prefill read back from decode, by its own count."""
    return series.increase("kvtune_decision_tokens_total", decision=Decision.FETCH.value) or 0.0


def denied(advice: ttl.TtlAdvice, read_tokens: float, ended_tokens: float) -> ttl.TtlAdvice:
    """Nobody returns, says the router (or decode), but prefill reads back: then somebody's series are not read."""
    if advice.status != "off" or advice.reason_code not in ("nobody_returns", "hardly_returns", "never_read"):
        return advice
    if read_tokens <= 4 * ttl.NEVER_RETURNS * ended_tokens:
        return advice
    return refused(
        advice, CONTRADICTING,
        f"cannot tell: hardly anybody is seen to return, but prefill read back {read_tokens:.3g} tokens "
        f"(kvtune_decision_tokens_total) of {ended_tokens:.3g} that ended: is a router or a decode engine missing "
        "among the targets?",
    )  # fmt: skip


def refused(advice: _A, code: str, reason: str) -> _A:
    """The advice turned into a refusal; its rows rest on what is not known and go with it."""
    changes: dict[str, Any] = {
        "status": "insufficient", "recommended": None, "interval": None, "uncapped": None, "clamped_by": (), "rows": (),
        "reason_code": code, "reason": reason, "retry_after_s": None,
    }  # fmt: skip
    done: _A = replace(advice, **changes)
    return done


def without(advice: _A, setting: str, gaps: Sequence[Gap]) -> _A:
    """The advice as far as it holds without what is missing: refused, or said to do without it.

    An advice to switch something off never rests on what could not be seen.
    """
    fatal = [g for g in gaps if setting in g.refuses]
    weak = [g for g in gaps if setting in g.weakens]
    if not fatal and advice.status == "off":
        fatal = weak
    if advice.reason_code == MISSING:
        return advice
    if fatal:
        return refused(advice, fatal[0].code, f"cannot tell: {'; '.join(g.message for g in fatal)}")
    if not weak:
        return advice
    names = "; ".join(g.message for g in weak)
    done: _A = replace(advice, reason=f"{advice.reason} ({names})")
    return done


def prefills(roles: dict[str, str], labelled: dict[str, str], role: Role) -> list[str]:
    """Targets of a role that run kvtune's connector."""
    return sorted(t for t, r in roles.items() if r == role and t in labelled)
