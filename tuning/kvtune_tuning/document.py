"""The JSON document of `kvtune suggest`: built from evidence and advice, safe for every JSON parser."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib import resources
from typing import Any

from kvtune_tuning import certainty, missing, stock, threshold, ttl
from kvtune_tuning.errors import NOT_ENOUGH_DATA, TuningError
from kvtune_tuning.evidence import Evidence, Mode
from kvtune_tuning.wording import digits

SCHEMA = "kvtune.suggest/1"
ROUTER_TTL_FLAG = "--ttl"
ROUTER_RETAIN_FLAG = "--retain"
"""The router's flag for the TTL it assumes where decode does not say."""
MOSTLY_BELOW = 0.5
"""Share of fetchable histories below the threshold from which it decides what retention saves."""
_DIGITS = 6


def schema() -> dict[str, Any]:
    """The JSON Schema that every document satisfies, failed ones included."""
    text = resources.files("kvtune_tuning").joinpath("schema.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def plain(value: Any) -> Any:
    """`value` in JSON's own types: numbers rounded to 6 significant digits, NaN and infinities as null."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if value is None or isinstance(value, (bool, str)):
        return value
    number = float(value)
    if not math.isfinite(number):
        return None
    if number == round(number) and abs(number) < 2**53:
        return int(number)
    return float(f"{number:.{_DIGITS}g}")


def failed(error: TuningError, source: dict[str, Any] | None = None) -> dict[str, Any]:
    """The document of a failure."""
    document: dict[str, Any] = {"schema": SCHEMA, "error": error.as_dict()}
    if source is not None:
        document["source"] = source
    return document


def build(
    evidence: Evidence, source: dict[str, Any], *, explain: bool = False, queries: list[str] | None = None
) -> dict[str, Any]:
    """Decide on both settings and write everything down."""
    ttl_advice, threshold_advice = _decide(evidence)
    recommendations = [_ttl(evidence, ttl_advice), _threshold(evidence, threshold_advice)]
    start, end = evidence.start_s, evidence.end_s
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "source": source,
        "window": {
            "start": _iso(start),
            "end": _iso(end),
            "start_unix": start,
            "end_unix": end,
            "seconds": end - start,
            "model_time": evidence.model_time,
        },
        "evidence": evidence.facts,
        "recommendations": recommendations,
        "checks": [asdict(check) for check in evidence.checks],
        "apply": _apply(evidence, recommendations),
        "rollback": _rollback(evidence, recommendations),
    }
    if explain:
        document["explain"] = _explain(evidence, ttl_advice, threshold_advice, queries or [])
    done: dict[str, Any] = plain(document)
    done["window"]["start_unix"], done["window"]["end_unix"] = round(start, 3), round(end, 3)
    return done


def _iso(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _decide(evidence: Evidence) -> tuple[ttl.TtlAdvice, threshold.ThresholdAdvice]:
    """Both settings, by what there is to decide on."""
    bounds = evidence.bounds
    if bounds is not None:
        ttl_advice = stock.advise_ttl(bounds)
        if ttl_advice.status == "change":
            only = "stock series give bounds only"
            ttl_advice = replace(ttl_advice, no_interval=None if ttl_advice.interval else only)
    else:
        ttl_advice = ttl.advise(evidence.ttl)
        if evidence.mode is Mode.ENGINES:
            ttl_advice = _as_far_as_retained(ttl_advice, evidence)
        ttl_advice = certainty.settled(evidence.ttl, _threshold_first(ttl_advice, evidence))
    ended = evidence.ttl.token_rate * evidence.ttl.window_s
    ttl_advice = missing.denied(ttl_advice, evidence.read_back_tokens, ended)
    threshold_advice = (
        stock.advise_threshold(evidence.threshold.current, bounds)
        if evidence.stock_prefill
        else threshold.advise(evidence.threshold)
    )
    return (
        missing.without(ttl_advice, ttl.SETTING, evidence.gaps),
        missing.without(threshold_advice, threshold.SETTING, evidence.gaps),
    )


def _threshold_first(advice: ttl.TtlAdvice, evidence: Evidence) -> ttl.TtlAdvice:
    """Retention is not called useless while the threshold keeps what it holds from being read."""
    below, all_of_them = evidence.threshold.below, evidence.threshold.histories
    if (
        advice.reason_code != "does_not_pay" or evidence.ttl.useful >= ttl.HARDLY_USED
        or below is None or below.count < MOSTLY_BELOW * all_of_them
    ):  # fmt: skip
        return advice
    return replace(
        advice, status="keep", recommended=advice.current, reason_code="threshold_first", clamped_by=(),
        reason=f"keep {digits(advice.current)} s until the threshold is settled: "
        f"{100 * below.count / all_of_them:.0f} % of the histories that could have been fetched lie below "
        f"{digits(evidence.threshold.current)} tokens, so that nothing tells what retention could save",
    )  # fmt: skip


def _as_far_as_retained(advice: ttl.TtlAdvice, evidence: Evidence) -> ttl.TtlAdvice:
    """Without a router nothing is seen of returns after the TTL: no ground to raise it, none to call it enough."""
    now = digits(advice.current)
    if advice.reason_code == "pool_slack" or (advice.recommended is not None and advice.recommended > advice.current):
        usage = 100 * (evidence.ttl.usage_p99 or 0.0)
        return replace(
            advice, status="keep", recommended=advice.current, interval=None, reason_code="pool_slack",
            reason=f"keep {now} s: the pool has room (P99 usage {usage:.0f} %); whether a longer TTL would gain "
            "something is not seen without kvtune's router",
        )  # fmt: skip
    if advice.reason_code == "too_few_gaps" and evidence.ttl.curves.returned >= ttl.gaps_needed(evidence.ttl):
        return replace(
            advice, retry_after_s=None,
            reason=f"cannot tell: decode retained for at least {evidence.ttl.conversations:.0f} conversations at once, "
            f"need {ttl.MIN_CONVERSATIONS}; kvtune's router counts them",
        )  # fmt: skip
    if advice.reason_code == "nobody_returns":
        return replace(
            advice, reason_code="never_read",
            reason=f"switch retention off, or make it useful: nothing that decode retains is read within {now} s; "
            "see whether the router hands the references over",
        )  # fmt: skip
    return advice


def _interval(pair: tuple[float, float] | None) -> list[float] | None:
    return list(pair) if pair is not None else None


def _ttl(evidence: Evidence, advice: ttl.TtlAdvice) -> dict[str, Any]:
    return {
        "setting": ttl.SETTING,
        "unit": "seconds",
        **_advice(advice, evidence.ttl_setting.assumed),
        "model": {
            "memory_ttl_s": advice.memory_s,
            "waiting_ttl_s": advice.waiting_s,
            "value_ttl_s": advice.value_s,
            "break_even_s": advice.break_even_s,
            "scarcity": advice.scarcity,
            "gain_s_per_turn": advice.gain_s,
            "gain_interval_s": _interval(advice.gain_interval),
            "no_interval": advice.no_interval,
            **({} if evidence.bounds is None else {"fits_s": stock.facts(evidence.bounds)["fits_s"]}),
        },
    }


def _advice(advice: ttl.TtlAdvice | threshold.ThresholdAdvice, assumed: bool) -> dict[str, Any]:
    """What both recommendations say in the same words. `assumed`: the current value could not be read."""
    rows = [asdict(row) for row in advice.rows]
    return {
        "status": advice.status,
        "current": advice.current,
        "current_assumed": assumed,
        "recommended": advice.recommended,
        "interval": _interval(advice.interval),
        "uncapped": advice.uncapped,
        "clamped_by": list(advice.clamped_by),
        "reason_code": advice.reason_code,
        "reason": advice.reason,
        "effects": _effects(rows, advice.current, advice.recommended if advice.status == "change" else None),
        "counterfactual": rows,
        "retry_after": advice.retry_after_s,
    }


def _threshold(evidence: Evidence, advice: threshold.ThresholdAdvice) -> dict[str, Any]:
    lines = {"recompute": advice.recompute, "fetch": advice.fetch}
    return {
        "setting": threshold.SETTING,
        "unit": "tokens",
        **_advice(advice, evidence.threshold_setting.assumed),
        "model": {
            **{
                name: None if line is None else {"intercept_s": line.intercept, "us_per_token": 1e6 * line.slope}
                for name, line in lines.items()
            },
            "crossing_tokens": advice.crossing,
            "crossing_interval": _interval(advice.crossing_interval),
            "gain_s_per_turn": advice.gain_s,
            "gain_interval_s": _interval(advice.gain_interval),
        },
    }


def _effects(rows: list[dict[str, Any]], current: float, recommended: float | None) -> dict[str, Any]:
    """Each figure at the value in force and at the recommended one; empty unless a change is advised."""
    at = {row["value"]: row for row in rows}
    before, after = at.get(current), at.get(recommended)
    if recommended is None or before is None or after is None:
        return {}
    return {
        name: {"current": before[name], "recommended": after[name]}
        for name in before
        if name not in ("value", "bound") and before[name] is not None and after[name] is not None
    }


def _extra(role: str, values: dict[str, Any]) -> dict[str, Any]:
    fragment = {"kv_connector_extra_config": values}
    return {
        "role": role,
        "kv_transfer_config": fragment,
        "text": json.dumps(plain(fragment), separators=(", ", ": ")),
    }


def _apply(evidence: Evidence, recommendations: list[dict[str, Any]]) -> dict[str, Any] | None:
    """What to put into `--kv-transfer-config` of which role, and the router's flag; None without a change."""
    ttl_now, tau = recommendations
    if "off" in (ttl_now["status"], tau["status"]):
        off = {"bidirectional_kv_xfer": False}
        return {
            "engines": [_extra(role, off) for role in ("prefill", "decode")],
            "router": None,
            "note": _how_to(engines=True),
        }
    engines = []
    router = None
    if tau["status"] == "change":
        engines.append(_extra("prefill", {"bidirectional_kv_xfer": True, threshold.SETTING: int(tau["recommended"])}))
    if ttl_now["status"] == "change":
        value = int(ttl_now["recommended"])
        if _engines_decide(evidence, ttl_now):
            engines.append(_extra("decode", {"bidirectional_kv_xfer": True, ttl.SETTING: value}))
        router = _router_change(evidence, value)
    if not engines and router is None:
        return None
    own = "" if evidence.has_router or not engines else f" {_OTHER_ROUTER}"
    return {
        "engines": engines,
        "router": router,
        "note": f"{_how_to(bool(engines))}{own} One step per window: ask again after the change has run for as long as "
        "this window.",
    }


def _engines_decide(evidence: Evidence, ttl_now: dict[str, Any]) -> bool:
    """Whether the recommended TTL needs a setting of decode's own: the router asks for none, or for less than that."""
    return evidence.asked is None or ttl_now["recommended"] > evidence.asked.most_s


def _how_to(engines: bool) -> str:
    if engines:
        return "Merge into --kv-transfer-config of every engine of the role, then restart it."
    return "Restart the router with the flag; the engines stay as they are."


_OTHER_ROUTER = (
    "A router of another make keeps a TTL of its own: at least 5 s less than decode's, or it hands over what lapsed."
)


def _router_change(evidence: Evidence, seconds: float) -> str | None:
    """The flag of kvtune's router: one that asks for a retention is told another, else what decode is set to."""
    if not evidence.has_router:
        return None
    return f"{ROUTER_TTL_FLAG if evidence.asked is None else ROUTER_RETAIN_FLAG} {digits(seconds)}"


def _rollback(evidence: Evidence, recommendations: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The same with the values in force now; None without a change."""
    ttl_now, tau = recommendations
    off = "off" in (ttl_now["status"], tau["status"])
    engines = []
    router = None
    if tau["status"] == "change" or off:
        engines.append(_extra("prefill", {"bidirectional_kv_xfer": True, threshold.SETTING: tau["current"]}))
    if off or (ttl_now["status"] == "change" and _engines_decide(evidence, ttl_now)):
        engines.append(_extra("decode", {"bidirectional_kv_xfer": True, ttl.SETTING: ttl_now["current"]}))
    if off or ttl_now["status"] == "change":
        router = _router_change(evidence, ttl_now["current"])
    if not engines and router is None:
        return None
    return {"engines": engines, "router": router, "note": "Puts back what is in force now."}


def _explain(
    evidence: Evidence, ttl_advice: ttl.TtlAdvice, threshold_advice: threshold.ThresholdAdvice, queries: list[str]
) -> dict[str, Any]:
    bounds, curves = evidence.bounds, evidence.ttl.curves
    costs = evidence.threshold if bounds is None else bounds
    return {
        "ttl": _explain_ttl(evidence, ttl_advice) if bounds is None else stock.explain(bounds),
        "survival": [
            {"seconds": float(t), "turns": float(a), "tokens": float(b)}
            for t, a, b in zip(curves.tokens.edges, curves.turns.values, curves.tokens.values, strict=True)
            if bounds is None
        ],
        "threshold": [
            "n* = fetch intercept / (recompute slope - fetch slope); the recompute intercept is paid either way",
            *(
                f"{name}: {1000 * line.intercept:.2f} ms + {1e6 * line.slope:.3g} us per token"
                for name, line in (("recompute", threshold_advice.recompute), ("fetch", threshold_advice.fetch))
                if line is not None
            ),
            _crossing(evidence.threshold, threshold_advice),
            *map(_seen, threshold_advice.pairs),
        ],
        "costs": [
            {
                "path": name,
                "size": p.size,
                "stretch": p.stretch,
                "tokens": p.tokens,
                "seconds": p.seconds,
                "count": p.count,
            }
            for name, points in (("recompute", costs.recompute), ("fetch", costs.fetch))
            for p in points
        ],
        "queries": queries,
    }


def _crossing(inputs: threshold.ThresholdInputs, advice: threshold.ThresholdAdvice) -> str:
    """n*, or what was seen instead."""
    if advice.crossing is not None:
        return f"n* (where both cost the same): {_number(advice.crossing, ' tokens')}"
    seen = []
    for name, points in (("fetched", inputs.fetch), ("computed", inputs.recompute)):
        sizes = sorted(p.tokens for p in points)
        over = f", of {sizes[0]:.0f} to {sizes[-1]:.0f} tokens" if sizes else ""
        seen.append(f"{sum(p.count for p in points):.0f} {name}{over}")
    return f"n* (where both cost the same) was not determined ({advice.reason_code}); seen: {'; '.join(seen)}"


def _seen(pair: threshold.Pair) -> str:
    """What was seen of both paths at one size, beside the lines."""
    return (
        f"near {pair.tokens:.0f} tokens fetching was seen to cost {1000 * pair.seen_s:+.1f} ms against computing "
        f"(standard error {1000 * pair.error_s:.1f} ms); by the lines {1000 * pair.line_s:+.1f} ms"
        f"{': they are contradicted' if pair.contradicts else ''}"
    )


def _explain_ttl(evidence: Evidence, advice: ttl.TtlAdvice) -> list[str]:
    i = evidence.ttl
    kappa = f"{i.kappa:.3g}" if evidence.facts["kappa"] is not None else f"{_UNKNOWN}, 1 is used"
    useful = f"{i.useful:.3g}" if evidence.facts["useful_share"] is not None else f"{_UNKNOWN}, 1 is used"
    memory = advice.memory_s
    return [
        "S(t): share of what ended that has not returned t seconds later; F = 1 - S",
        "mean retained tokens m(T) = kappa x rate of ended tokens x integral of S(t) to T (Little)",
        "variance s2(T) = kappa x rate of ended tokens^2 x the same integral, squared weights (Campbell)",
        f"memory: the longest T with active + m + z x sqrt(s2 + active's variance) <= {ttl.POOL_SHARE} x pool",
        f"z = {ttl.Z_P99}: so many standard deviations (sigma) above the mean is the 99th percentile",
        "kappa: tokens that decode was seen to retain, over what the pauses predict",
        f"kappa {kappa}; rate {i.token_rate:.4g} tokens/s, {i.token_squared_rate:.4g} tokens^2/s on the "
        "tightest decode engine",
        f"pool {_number(i.pool_tokens, ' tokens')}; active {_number(i.active_mean, ' tokens')}, "
        f"sigma {_number(math.sqrt(i.active_variance) if i.active_mean is not None else None, ' tokens')}; "
        f"measured P99 usage {_number(i.usage_p99)}",
        "waiting: the T with the least expected time to first token, room on decode (what does not fit, "
        f"{ttl.WAITS_LONGER:g} x E[(demand - pool)+] / rate) and prefill's queue (M/G/1), time and reads together; "
        "where costs are known it takes the memory form's place",
        _waiting(evidence, advice),
        f"value: the T that maximises useful x F(T - {i.margin_s:g}) - (1/beta) x integral of S",
        "useful: share of the tokens that came back in time that prefill really fetched, and did not hold itself",
        "beta = saving x pool / scarcity: how long a token may be held for what fetching it saves",
        f"useful {useful}; beta {_number(advice.break_even_s, ' s')}",
        f"memory TTL {'unbounded' if memory is not None and math.isinf(memory) else _number(memory, ' s')}; "
        f"value TTL {_number(advice.value_s, ' s')}; reach {ttl.reach_ttl(i):g} s (all but "
        f"{100 * (1 - ttl.ENOUGH):.1g} % of the returns that were seen)",
    ]


def _waiting(evidence: Evidence, advice: ttl.TtlAdvice) -> str:
    costs = evidence.ttl.costs
    if costs is None:
        return "the costs of prefill are not known: the memory form decides"
    return (
        f"{costs.turns_per_s:.3g} turns/s on {costs.prefill_engines} prefill engine(s), {costs.computed_mean:.0f} "
        f"tokens computed a turn; demand is taken to be {evidence.facts['demand_factor']:.2f} times what was served, "
        f"as waiting for room slows conversations; waiting TTL {_number(advice.waiting_s, ' s')}"
    )


_UNKNOWN = "not known yet"


def _number(value: float | None, unit: str = "") -> str:
    return _UNKNOWN if value is None else f"{value:.4g}{unit}"


def exit_code(document: dict[str, Any], *, signal_change: bool = False) -> int:
    """The exit code of a document.

    1 on failure, 3 where there is too little to read or every recommendation is insufficient (but for a threshold that
    stock series never identify), 4 where a change is advised and `signal_change` is set, else 0.
    """
    if "error" in document:
        return 3 if document["error"]["code"] in NOT_ENOUGH_DATA else 1
    states = [r["status"] for r in document["recommendations"]]
    possible = [r["status"] for r in document["recommendations"] if r["reason_code"] != stock.NEVER_IDENTIFIABLE]
    if all(state == "insufficient" for state in possible):
        return 3
    return 4 if signal_change and any(state in ("change", "off") for state in states) else 0
