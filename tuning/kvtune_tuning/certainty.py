"""What the advice on `decoder_kv_blocks_ttl` is worth: how sure its gain is, and what few returns still tell. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from kvtune_tuning import ttl
from kvtune_tuning.gaps import Survival
from kvtune_tuning.missing import refused
from kvtune_tuning.ttl import TtlAdvice, TtlInputs
from kvtune_tuning.wording import digits

Z_95 = 1.645
"""Standard normal quantile of the 95th percentile."""
RARELY = 0.05
"""Below this share of turns that come back in time, retention is for hardly anybody."""
FEWEST_TURNS = 50.0
"""Turns that ended before it is said how few of them came back."""
BUYS_NOTHING = 0.02
"""Below this share of what comes back in time being read back, retention buys nothing."""
MAY_LOSE = 0.1
"""While requests wait for room, a change may lose on average so much of what it gains on average."""
_DRAWS = 100
_SOON_S = 1e-3


def settled(inputs: TtlInputs, advice: TtlAdvice) -> TtlAdvice:
    """The advice of `ttl.advise`, as far as it is certain, with what it changes."""
    advice = _few_returns(inputs, advice)
    advice = _sure(inputs, advice)
    advice = _what_it_buys(inputs, advice)
    return _with_changes(inputs, advice)


def share_at_most(returned: float, turns: float) -> float:
    """The most (95 %, one side) of turns that come back, where `returned` of `turns` did; 1 without any.

    Wilson's score bound at the effective number of turns, as those of a conversation are alike
    (https://en.wikipedia.org/wiki/Binomial_proportion_confidence_interval).
    """
    n = turns / ttl.DESIGN_EFFECT
    if n <= 0:
        return 1.0
    p, z2 = min(1.0, max(0.0, returned / turns)), Z_95**2
    reach = Z_95 * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return min(1.0, (p + z2 / (2 * n) + reach) / (1 + z2 / n))


def usable_s(inputs: TtlInputs) -> float:
    """How long a reference can be used at the TTL in force (s), as far as pauses are measured at all."""
    return min(max(0.0, inputs.current_s - inputs.margin_s), ttl.MAX_TTL_S)


def exposed(inputs: TtlInputs) -> float:
    """Turns that had the time to come back within the TTL in force; 0 where none was seen for so long."""
    curves, usable = inputs.curves, usable_s(inputs)
    if curves.horizon_s < usable or not len(curves.exposure):
        return 0.0
    index = int(np.searchsorted(curves.turns.edges[1:], usable))
    return float(curves.exposure[min(index, len(curves.exposure) - 1)])


def _few_returns(inputs: TtlInputs, advice: TtlAdvice) -> TtlAdvice:
    """Too few pauses to place a TTL among them may still be few enough of many turns to say that it serves nobody."""
    if advice.reason_code != "too_few_gaps":
        return advice
    turns = exposed(inputs)
    at = np.asarray([usable_s(inputs)])
    back, tokens = (1.0 - float(c.at(at)[0]) for c in (inputs.curves.turns, inputs.curves.tokens))
    most = share_at_most(back * turns, turns) * max(1.0, tokens / back if back > 0 else 1.0)
    pressed = ttl.under_pressure(inputs)
    seen = (
        f"{100 * back:.2g} % of {turns:.0f} turns came back within {at[0]:.0f} s, surely no more than "
        f"{100 * most:.2g} %"
    )
    if inputs.conversations < ttl.MIN_CONVERSATIONS or turns < ttl.MIN_GAPS or most >= RARELY:
        return _next_step(inputs, advice, turns)
    known = replace(advice, retry_after_s=None, rows=_rows(inputs), uncapped=0.0)
    if pressed and _costs_more(inputs, most):
        usage = f"P99 usage {100 * (inputs.usage_p99 or 0):.0f} %"
        short = "requests waited for KV blocks" if inputs.starved else usage
        return replace(
            known, status="off", reason_code="hardly_returns",
            reason=f"switch retention off: the pool is short ({short}), and {seen}: holding costs more than they save",
        )  # fmt: skip
    if most < ttl.NEVER_RETURNS:
        return replace(known, status="off", reason_code="nobody_returns", reason=f"switch retention off: {seen}")
    if not pressed and inputs.usage_p99 is not None:
        return replace(
            known, status="keep", recommended=advice.current, reason_code="hardly_returns", uncapped=None,
            reason=f"keep {digits(advice.current)} s, or switch retention off: {seen}; the pool has room (P99 usage "
            f"{100 * inputs.usage_p99:.0f} %), so that holding costs nothing and saves hardly anything",
        )  # fmt: skip
    return _next_step(inputs, advice, turns)


def _costs_more(inputs: TtlInputs, most: float) -> bool:
    """Whether even the shortest TTL worth having costs more than so many returns save, at the scarcity seen."""
    if inputs.saving_s_per_token is None or inputs.pool_tokens is None:
        return True
    break_even = max(0.0, inputs.saving_s_per_token) * inputs.pool_tokens / ttl.scarcity(inputs)
    return inputs.useful * most * break_even < (1.0 - most) * ttl.MIN_TTL_S


def _next_step(inputs: TtlInputs, advice: TtlAdvice, turns: float) -> TtlAdvice:
    """Where hardly anybody comes back, pauses do not become enough; turns that do not come back do."""
    returned, ends = inputs.curves.returned, inputs.ends
    if ends < FEWEST_TURNS or returned > RARELY * ends or turns >= ttl.MIN_GAPS or inputs.window_s <= 0:
        return advice
    wait = max(0.0, ttl.MIN_GAPS * inputs.window_s / ends + usable_s(inputs) - inputs.window_s)
    if inputs.conversations < ttl.MIN_CONVERSATIONS:
        wait = max(wait, advice.retry_after_s or 0.0)
    return replace(
        advice, retry_after_s=max(1, math.ceil(wait)),
        reason=f"{advice.reason}; {returned:.0f} of {ends:.0f} turns came back. If that goes on, {ttl.MIN_GAPS} turns "
        f"that had {usable_s(inputs):.0f} s to come back settle it; if clients do come back, see whether the router "
        "can tell their conversations (outcome no_identity of kvtune_turns_total)",
    )  # fmt: skip


def _sure(inputs: TtlInputs, advice: TtlAdvice) -> TtlAdvice:
    """A shorter TTL, or none, is advised only where it surely gains: a change that harms is worse than none."""
    lowers = advice.status == "change" and advice.recommended is not None and advice.recommended < advice.current
    ends_it = advice.status == "off" and advice.reason_code in ("does_not_pay", "does_not_fit", "hardly_returns")
    if not lowers and not ends_it:
        return advice
    target = advice.recommended or 0.0
    what = f"{target:g} s instead of {digits(advice.current)} s" if lowers else "switching retention off"
    loses = inputs.saving_s_per_token is not None and inputs.saving_s_per_token <= 0
    needed = min(advice.current, ttl.MAX_TTL_S) + inputs.margin_s

    def cannot(why: str, retry_after_s: float) -> TtlAdvice:
        return replace(
            refused(advice, "gain_not_certain", f"cannot tell yet: {what} {why}"),
            rows=advice.rows, retry_after_s=max(1, math.ceil(retry_after_s)),
        )  # fmt: skip

    if inputs.window_s < needed and not loses and _gain(_all_return_late(inputs), advice.current, target) <= 0:
        return cannot(
            f"would help by what was seen, but the window of {inputs.window_s:.0f} s is shorter than the TTL and its "
            "margin, and it would harm if the turns came back that had no time to",
            needed - inputs.window_s,
        )
    if ends_it:
        return advice
    gain = _gain(inputs, advice.current, target)
    drawn = np.asarray([_gain(draw, advice.current, target) for draw in _draws(inputs)])
    low, high = (float(q) for q in np.quantile(drawn, (0.05, 0.95)))
    # Where requests wait, waiting for certainty costs them more than a small risk does.
    outweighs = np.maximum(-drawn, 0.0).mean() <= MAY_LOSE * np.maximum(drawn, 0.0).mean()
    if low <= 0 < gain and not (inputs.starved and outweighs):
        # an interval shrinks with the root of what was seen
        more = ((gain - low) / gain) ** 2 - 1
        return cannot(
            f"would save {_said(inputs, gain)} by what was seen; with 90 % certainty, anything between losing "
            f"{_said(inputs, -low)} and saving {_said(inputs, high)}",
            more * inputs.window_s,
        )
    if inputs.costs is not None:
        advice = replace(advice, gain_s=gain, gain_interval=(low, high))
    if advice.interval is not None:
        return advice
    few = inputs.conversations < ttl.CONVERSATIONS_FOR_INTERVAL
    why = (
        f"{inputs.conversations:.0f} conversations are too few for one, {ttl.CONVERSATIONS_FOR_INTERVAL} are needed"
        if few
        else f"it is bound by {advice.clamped_by[0] if advice.clamped_by else 'a rule'}, which is not resampled"
    )
    return replace(advice, no_interval=why)


def _gain(inputs: TtlInputs, current_s: float, target_s: float) -> float:
    """What a change saves: seconds of the expected time to first token, or where costs are not known, the tokens beyond
    what may be filled of the pool that it frees (no gain where nothing lies beyond)."""
    at = np.asarray([current_s, target_s])
    if inputs.costs is not None:
        before, after = ttl.expected(inputs, inputs.costs, at)
        return float(before - after)
    beyond = ttl.filled(inputs, at) - ttl.POOL_SHARE * (inputs.pool_tokens or math.inf)
    return float(beyond[0]) if beyond[0] <= 0 else float(beyond[0] - max(0.0, beyond[1]))


def _said(inputs: TtlInputs, gain: float) -> str:
    return f"{1000 * gain:.0f} ms a turn" if inputs.costs is not None else f"{gain:.3g} tokens beyond the pool"


def _all_return_late(inputs: TtlInputs) -> TtlInputs:
    """The worst that is possible for a shorter TTL: all who were not seen to return do so right after the longest pause
    that could be seen."""

    def late(curve: Survival) -> Survival:
        return Survival(np.append(curve.edges, curve.horizon_s + _SOON_S), np.append(curve.values, 0.0))

    c = inputs.curves
    return replace(
        inputs,
        curves=replace(c, turns=late(c.turns), tokens=late(c.tokens), tokens_squared=late(c.tokens_squared)),
    )


def _draws(inputs: TtlInputs) -> Iterator[TtlInputs]:
    """The inputs with bucket counts and the rate of ends resampled at their effective sizes. Seeded."""
    c = inputs.curves
    for factors, rate in ttl.resampled(inputs, _DRAWS, seed=21):
        yield replace(
            inputs,
            curves=replace(
                c,
                turns=ttl.perturbed(c.turns, factors),
                tokens=ttl.perturbed(c.tokens, factors),
                tokens_squared=ttl.perturbed(c.tokens_squared, factors),
            ),
            token_rate=inputs.token_rate * rate,
            token_squared_rate=inputs.token_squared_rate * rate,
        )


def _what_it_buys(inputs: TtlInputs, advice: TtlAdvice) -> TtlAdvice:
    """A TTL that is kept is not said to be good for anything where prefill fetches next to nothing."""
    if advice.status != "keep" or inputs.useful >= BUYS_NOTHING or advice.reason_code == "threshold_first":
        return advice
    fetched = (
        f"retention buys nothing here: prefill fetched {100 * inputs.useful:.2g} % of the tokens that came back in "
        "time (the rest it held itself, or it lay below the threshold)"
    )
    if ttl.under_pressure(inputs):
        return replace(advice, reason=f"{advice.reason}. But {fetched}", uncapped=None, clamped_by=())
    usage = "" if inputs.usage_p99 is None else f" (P99 usage {100 * inputs.usage_p99:.0f} %)"
    return replace(
        advice, uncapped=None, clamped_by=(),
        reason=f"keep {digits(advice.current)} s, or switch retention off: {fetched}; as long as the pool has "
        f"room{usage}, it costs nothing either",
    )  # fmt: skip


def _rows(inputs: TtlInputs) -> tuple[ttl.TtlRow, ...]:
    return tuple(ttl.row(inputs, v) for v in sorted({*ttl.TABLE_S, inputs.current_s}))


def _with_changes(inputs: TtlInputs, advice: TtlAdvice) -> TtlAdvice:
    """The rows with how the time to first token differs from that at the TTL in force, where the model says so."""
    if not advice.rows:
        return advice
    now = next((row.ttft_mean_s for row in advice.rows if row.value == inputs.current_s), None)
    model: list[float | None] = [None] * len(advice.rows)
    if inputs.costs is not None:
        at = np.asarray([*(row.value for row in advice.rows), inputs.current_s])
        seconds = ttl.expected(inputs, inputs.costs, at)
        model = [float(s - seconds[-1]) for s in seconds[:-1]]
    return replace(
        advice,
        rows=tuple(
            replace(
                row,
                ttft_change_s=foretold if now is None or row.ttft_mean_s is None else row.ttft_mean_s - now,
            )
            for row, foretold in zip(advice.rows, model, strict=True)
        ),
    )
