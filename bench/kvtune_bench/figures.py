"""Numbers for the demo's report, from the load's records and scraped expositions. Pure, JSON-safe; None is unknown."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from kvtune_bench.load import TurnRecord
from kvtune_telemetry import buckets
from kvtune_telemetry.vocabulary import Decision, Direction, End, Outcome, Path, Reason, Role

Arm = Literal["on", "off"]

MIN_CLASS_TURNS = 5
"""Turns an arm needs in a size class for the class to take part in the comparison of the arms."""
MIN_AT_RISK = 5
"""With fewer turns at risk, one return moves the survival curve by more than a fifth of what is left."""
RESAMPLES = 400
"""Bootstrap draws for the interval of the comparison; its ends move by about 3 % of its width from seed to seed."""
CUT_FETCH = "fetch/cut_to_proven_prefix"
"""Of a history that was changed further on."""
UNREPORTED = "unreported"
"""Stands for an outcome where the router sent no debug header."""


@dataclass(frozen=True, slots=True)
class Scrape:
    """One exposition as it was served."""

    t_s: float
    """When, in seconds from the start of the load."""
    target: str
    """Whose: any name that stays the same between scrapes."""
    text: str


def quantile(values: Sequence[float], q: float) -> float | None:
    """The nearest-rank quantile: the smallest value that at least a share `q` of the values does not exceed."""
    if not values:
        return None
    ordered = sorted(values)
    return float(ordered[max(0, math.ceil(q * len(ordered)) - 1)])


def stat(values: Sequence[float]) -> dict[str, Any]:
    """`n`, `mean`, `p50`, `p90` (nearest rank), in the values' unit; None where there are none."""
    return {
        "n": len(values),
        "mean": float(np.mean(values)) if values else None,
        "p50": quantile(values, 0.5),
        "p90": quantile(values, 0.9),
    }


def arm_of(record: TurnRecord) -> Arm | None:
    """Which arm of the hold-out a turn was served in: `off` if reuse was disabled for it, `on` with any other outcome.

    None where the router did not say. Turns whose reuse failed stay in `on`: compared is what was served.
    """
    if record.outcome is None:
        return None
    return "off" if record.outcome == Outcome.DISABLED else "on"


def _timed(records: Iterable[TurnRecord]) -> list[TurnRecord]:
    return [record for record in records if record.answered and record.ttft_s is not None]


def _ttfts(records: Iterable[TurnRecord]) -> list[float]:
    return [record.ttft_s for record in records if record.ttft_s is not None]


def ttft(records: Sequence[TurnRecord]) -> dict[str, Any]:
    """Time to first token (s) of answered turns, by arm and by first or follow-up turn."""
    timed = _timed(records)
    arms: tuple[tuple[str, Arm | None], ...] = (("on", "on"), ("off", "off"), (UNREPORTED, None))
    return {
        "unit": "seconds",
        "quantiles": "nearest rank",
        **{
            name: {
                kind: stat(_ttfts(r for r in timed if arm_of(r) == arm and r.followup == followup))
                for kind, followup in (("first", False), ("followup", True))
            }
            for name, arm in arms
        },
    }


def size_step(largest: int, classes: int = 8) -> int:
    """Width (tokens) of equal classes that reach `largest` in at most `classes` steps; a power of two, at least 64."""
    step = 64
    while step * classes < largest:
        step *= 2
    return step


def ttft_by_size(records: Sequence[TurnRecord]) -> list[dict[str, Any]]:
    """Time to first token (s) of answered follow-up turns, by prompt length; empty classes are left out.

    Each class: `from` (exclusive) and `to` (inclusive) in tokens, and for `on` and `off` a `stat` with `mean_tokens`.
    """
    followups = [record for record in _timed(records) if record.followup and arm_of(record) is not None]
    if not followups:
        return []
    step = size_step(max(record.prompt_tokens for record in followups))
    classes: dict[int, dict[str, list[TurnRecord]]] = defaultdict(lambda: {"on": [], "off": []})
    for record in followups:
        classes[_class(record, step)][arm_of(record) or "on"].append(record)
    return [
        {
            "from": index * step,
            "to": (index + 1) * step,
            **{
                arm: {
                    **stat(_ttfts(members)),
                    "mean_tokens": float(np.mean([r.prompt_tokens for r in members])) if members else None,
                }
                for arm, members in classes[index].items()
            },
        }
        for index in sorted(classes)
    ]


def _class(record: TurnRecord, step: int) -> int:
    return max(0, record.prompt_tokens - 1) // step


def comparison(records: Sequence[TurnRecord], seed: int = 0) -> dict[str, Any]:
    """Mean TTFT (s) of follow-up turns with reuse on and off, at equal prompt lengths.

    Both arms' class means are weighted by the class's turns of both arms together, over the classes in which each arm
    has `MIN_CLASS_TURNS`; so a longer prompt here or there is not taken for a gain. `saved_s` = off - on, `ratio` =
    off / on; the intervals are P5 to P95 over bootstrap draws of whole conversations. All None when no class has enough
    of both.
    """
    followups = [record for record in _timed(records) if record.followup and arm_of(record) is not None]
    empty: dict[str, Any] = {
        "n_on": sum(arm_of(r) == "on" for r in followups),
        "n_off": sum(arm_of(r) == "off" for r in followups),
        "on_s": None, "off_s": None, "saved_s": None, "saved_interval_s": None, "ratio": None, "ratio_interval": None,
        "conversations_off": len({r.conversation for r in followups if arm_of(r) == "off"}),
    }  # fmt: skip
    if not followups:
        return empty
    step = size_step(max(record.prompt_tokens for record in followups))
    size = np.array([_class(record, step) for record in followups])
    off = np.array([arm_of(record) == "off" for record in followups])
    seconds = np.array(_ttfts(followups))
    classes = int(size.max()) + 1
    groups = [np.flatnonzero(group) for group in _one_hot([record.conversation for record in followups])]

    def standardised(rows: np.ndarray, least: int) -> tuple[float, float] | None:
        key = size[rows] + classes * off[rows]
        n = np.bincount(key, minlength=2 * classes).astype(float)
        total = np.bincount(key, weights=seconds[rows], minlength=2 * classes)
        use = (n[:classes] >= least) & (n[classes:] >= least)
        if not use.any():
            return None
        weight = (n[:classes] + n[classes:])[use]
        means = [(total[part][use] / n[part][use] * weight).sum() / weight.sum() for part in _halves(classes)]
        return float(means[0]), float(means[1])

    point = standardised(np.arange(len(followups)), MIN_CLASS_TURNS)
    if point is None:
        return empty
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(RESAMPLES):
        chosen = rng.integers(0, len(groups), len(groups))
        result = standardised(np.concatenate([groups[index] for index in chosen]), 1)
        if result is not None:
            drawn.append(result)
    pairs = np.array(drawn)
    saved = np.percentile(pairs[:, 1] - pairs[:, 0], [5, 95])
    # A stand-in clock may yield a mean of zero, whose ratio says nothing.
    positive = pairs[pairs[:, 0] > 0]
    ratio = np.percentile(positive[:, 1] / positive[:, 0], [5, 95]) if len(positive) else None
    return {
        **empty,
        "on_s": point[0],
        "off_s": point[1],
        "saved_s": point[1] - point[0],
        "saved_interval_s": [float(saved[0]), float(saved[1])],
        "ratio": point[1] / point[0] if point[0] > 0 else None,
        "ratio_interval": None if ratio is None else [float(ratio[0]), float(ratio[1])],
    }


def _halves(classes: int) -> tuple[slice, slice]:
    return slice(0, classes), slice(classes, 2 * classes)


def _one_hot(keys: Sequence[int]) -> Iterator[np.ndarray]:
    values = np.array(keys)
    for key in np.unique(values):
        yield values == key


def outcome_name(record: TurnRecord) -> str:
    """The turn's outcome as reported; `error` for a failed turn without one, `unreported` for an answered one."""
    return record.outcome or (UNREPORTED if record.answered else Outcome.ERROR.value)


def outcomes(records: Sequence[TurnRecord], duration_s: float, bins: int = 24) -> dict[str, Any]:
    """Turns by outcome: `total`, and `counts` per time bin of `bin_s` seconds by the turn's start."""
    total = Counter(map(outcome_name, records))
    last = max((record.start_s for record in records), default=0.0)
    width = max(duration_s, last) / bins if max(duration_s, last) > 0 else 1.0
    counts = {name: [0] * bins for name in sorted(total)}
    for record in records:
        counts[outcome_name(record)][max(0, min(bins - 1, int(record.start_s / width)))] += 1
    return {"total": dict(sorted(total.items())), "bin_s": width, "counts": counts}


def ttft_by_outcome(records: Sequence[TurnRecord]) -> dict[str, Any]:
    """Time to first token (s) of answered follow-up turns by reported outcome, `unreported` included."""
    timed = [record for record in _timed(records) if record.followup]
    return {
        name: stat(_ttfts(record for record in timed if outcome_name(record) == name))
        for name in sorted(set(map(outcome_name, timed)))
    }


def gaps(records: Sequence[TurnRecord], end_s: float, points: int = 150) -> dict[str, Any]:
    """Pauses between turns: the Kaplan-Meier share of answered turns whose conversation has not returned after t.

    A conversation that had not returned by `end_s` is right-censored there, whether or not it ever would: that is all
    an operator can know. `points` is [[seconds, share], ...] with falling shares, thinned evenly in log time; `p50`,
    `p90` are the shares' .5 and .1 crossings, None where the curve does not get there. It ends where fewer than
    `MIN_AT_RISK` turns (of few, a tenth) are left to learn from.
    """
    plays: dict[int, list[TurnRecord]] = defaultdict(list)
    for record in records:
        plays[record.conversation].append(record)
    seconds: list[float] = []
    returned: list[bool] = []
    for turns in plays.values():
        turns.sort(key=lambda record: record.start_s)
        for index, record in enumerate(turns):
            ended = record.start_s + record.duration_s
            if not record.answered or ended > end_s:
                continue
            after = turns[index + 1] if index + 1 < len(turns) else None
            seconds.append((end_s if after is None else after.start_s) - ended)
            returned.append(after is not None)
    curve = _kaplan_meier(seconds, returned, min(MIN_AT_RISK, len(seconds) // 10))
    return {
        "n": len(seconds),
        "returned": sum(returned),
        "censored": len(seconds) - sum(returned),
        "points": _thin(curve, points),
        "p50": next((t for t, share in curve if share <= 0.5), None),
        "p90": next((t for t, share in curve if share <= 0.1), None),
    }


def _kaplan_meier(seconds: Sequence[float], returned: Sequence[bool], least: int = 1) -> list[list[float]]:
    at_risk = len(seconds)
    share = 1.0
    curve: list[list[float]] = []
    events: dict[float, list[int]] = defaultdict(lambda: [0, 0])
    for value, event in zip(seconds, returned, strict=True):
        events[max(0.0, value)][0 if event else 1] += 1
    for value in sorted(events):
        if at_risk < least:
            break
        came, lost = events[value]
        if came:
            share *= 1 - came / at_risk
            curve.append([value, share])
        at_risk -= came + lost
    return curve


def _thin(curve: list[list[float]], points: int) -> list[list[float]]:
    """At most about `points` of a falling curve: the last of each cell of equal width in log time."""
    positive = [value for value, _ in curve if value > 0]
    if len(curve) <= points:
        return curve
    low, high = math.log(min(positive)), math.log(max(positive))
    cells: dict[int, list[float]] = {}
    for value, share in curve:
        place = 0.0 if value <= 0 or high <= low else (math.log(value) - low) / (high - low)
        cells[int(place * (points - 1))] = [value, share]
    return [cells[cell] for cell in sorted(cells)]


# --- from expositions ---

Series = dict[str, list[tuple[Mapping[str, str], float]]]


def parse(text: str, prefix: str = "kvtune_") -> Series:
    """The samples whose names begin with `prefix`, but for histogram buckets, by sample name: (labels, value).

    Raises ValueError for a malformed line.
    """
    # Parsing a whole exposition takes tens of milliseconds, and there is one per target per scrape.
    lines = "\n".join(line for line in text.splitlines() if line.startswith(prefix) and "_bucket{" not in line)
    found: Series = defaultdict(list)
    for family in text_string_to_metric_families(lines + "\n"):
        for sample in family.samples:
            found[sample.name].append((sample.labels, float(sample.value)))
    return dict(found)


def _pick(series: Series, name: str, **labels: str) -> Iterator[float]:
    for have, value in series.get(name, ()):
        if all(have.get(key) == want for key, want in labels.items()):
            yield value


def _sum(all_series: Iterable[Series], name: str, **labels: str) -> float | None:
    values = [value for series in all_series for value in _pick(series, name, **labels)]
    return sum(values) if values else None


def latest(scrapes: Iterable[Scrape]) -> list[Series]:
    """The last exposition of each target, parsed."""
    last: dict[str, Scrape] = {}
    for scrape in scrapes:
        if scrape.target not in last or scrape.t_s >= last[scrape.target].t_s:
            last[scrape.target] = scrape
    return [parse(scrape.text) for scrape in last.values()]


def retained(scrapes: Sequence[Scrape]) -> dict[str, Any]:
    """Tokens that all decode engines together retain: `points` [[s, tokens], ...], `pool_tokens`, `peak_share`.

    Targets are scraped one after the other: a point takes each target's latest value, and there is none before every
    target that reports at all has reported once.
    """
    known: dict[str, float] = {}
    timed: list[tuple[float, str, float]] = []
    for scrape in sorted(scrapes, key=lambda one: one.t_s):
        values = list(
            _pick(parse(scrape.text, "kvtune_retained_tokens"), "kvtune_retained_tokens", role=Role.DECODE.value)
        )
        if values:
            timed.append((scrape.t_s, scrape.target, sum(values)))
    targets = {target for _, target, _ in timed}
    points: list[list[float]] = []
    for t, target, value in timed:
        known[target] = value
        if len(known) == len(targets):
            points.append([t, sum(known.values())])
    pool = _sum(latest(scrapes), "kvtune_connector_setting", setting="kv_pool_tokens", role=Role.DECODE.value)
    peak = max((value for _, value in points), default=None)
    return {
        "points": points,
        "pool_tokens": pool,
        "peak_tokens": peak,
        "peak_share": peak / pool if peak is not None and pool else None,
    }


def fit_line(
    n: float, tokens: float, tokens_squared: float, seconds: float, token_seconds: float
) -> dict[str, float] | None:
    """Least squares `seconds = base_s + per_token_s * tokens` from sums over `n` observations; None if undetermined."""
    spread = n * tokens_squared - tokens * tokens
    if n < 3 or spread <= 1e-9 * max(1.0, n * tokens_squared):
        return None
    slope = (n * token_seconds - tokens * seconds) / spread
    return {"base_s": (seconds - slope * tokens) / n, "per_token_s": slope}


def path_costs(scrapes: Sequence[Scrape]) -> dict[str, Any]:
    """What fetching and recomputing cost on prefill engines since they started, from the connector's sums.

    For each of `fetch` and `recompute`: `n`, `classes` [{size, n, mean_tokens, mean_s}] of the fine token-size classes
    that have observations, and `line` (`fit_line` over all).
    """
    all_series = latest(scrapes)
    result: dict[str, Any] = {}
    for path in Path:
        classes = []
        sums = np.zeros(5)
        for size in buckets.size_labels(buckets.SIZE_EDGES):
            row = np.array(
                [
                    _sum(all_series, f"kvtune_path_{name}_total", path=path.value, size=size, role=Role.PREFILL.value)
                    or 0.0
                    for name in ("observations", "tokens", "tokens_squared", "seconds", "token_seconds")
                ]
            )
            if row[0] <= 0:
                continue
            sums += row
            classes.append(
                {
                    "size": size,
                    "n": int(row[0]),
                    "mean_tokens": float(row[1] / row[0]),
                    "mean_s": float(row[3] / row[0]),
                }
            )
        result[path.value] = {
            "n": int(sums[0]),
            "classes": classes,
            "line": fit_line(*(float(value) for value in sums)),
        }
    return result


def _by_label(all_series: Sequence[Series], name: str, label: str, **labels: str) -> dict[str, float]:
    values: dict[str, float] = defaultdict(float)
    for series in all_series:
        for have, value in series.get(name, ()):
            if all(have.get(key) == want for key, want in labels.items()):
                values[have.get(label, "")] += value
    return dict(sorted(values.items()))


def reads(scrapes: Sequence[Scrape]) -> dict[str, Any]:
    """Reads of history (decode to prefill) since the engines started, as both sides booked them; None is not reported.

    `at_prefill` and `released_at_decode` count the same reads at their two ends.
    """
    all_series = latest(scrapes)
    d2p = {"direction": Direction.D2P.value, "role": Role.PREFILL.value}
    return {
        "at_prefill": _sum(all_series, "kvtune_kv_reads_total", **d2p),
        "released_at_decode": _sum(
            all_series, "kvtune_retentions_ended_total", end=End.READ.value, role=Role.DECODE.value
        ),
        "failed": _sum(all_series, "kvtune_kv_reads_failed_total", **d2p),
        "declined": _sum(all_series, "kvtune_kv_reads_declined_total", role=Role.PREFILL.value),
        "tokens": _sum(all_series, "kvtune_kv_read_tokens_total", **d2p),
        "bytes": _sum(all_series, "kvtune_kv_read_bytes_total", **d2p),
        "seconds": _sum(all_series, "kvtune_kv_read_seconds_sum", **d2p),
    }


def holdout(records: Sequence[TurnRecord]) -> dict[str, int]:
    """How much was kept without reuse, of all turns sent: `turns_off`, `conversations_off` and, of those,
    `conversations_off_in_part`: the ones that also had turns with another outcome."""
    plays: dict[int, set[bool]] = defaultdict(set)
    for record in records:
        plays[record.conversation].add(arm_of(record) == "off")
    off = [arms for arms in plays.values() if True in arms]
    return {
        "turns_off": sum(arm_of(record) == "off" for record in records),
        "conversations_off": len(off),
        "conversations_off_in_part": sum(False in arms for arms in off),
    }


def new_to_router(record: TurnRecord) -> bool:
    """A turn that goes on for its client, but came without an id and with a changed history, and was taken for new."""
    changed = record.rewritten or record.compacted
    return record.followup and changed and not record.session and record.outcome == Outcome.FIRST


def decision_name(decision: str, reason: str) -> str:
    """A key for what prefill decided and why: `recompute/expired`.

    A fetch cut to the verified prefix is booked as `fetch` for the reason `rewritten`; its own name here keeps it apart
    from the outcome of that name, which means that nothing was fetched.
    """
    if (decision, reason) == (Decision.FETCH, Reason.REWRITTEN):
        return CUT_FETCH
    return f"{decision}/{reason}"


def summarise(records: Sequence[TurnRecord], scrapes: Sequence[Scrape], *, duration_s: float) -> dict[str, Any]:
    """All figures of a run of `duration_s` seconds (load's clock): what `report.render_report` takes as `figures`."""
    all_series = latest(scrapes)
    decisions: dict[str, float] = defaultdict(float)
    for series in all_series:
        for labels, value in series.get("kvtune_decisions_total", ()):
            if labels.get("role") == Role.PREFILL.value and value:
                decisions[decision_name(labels.get("decision", ""), labels.get("reason", ""))] += value
    return {
        "turns": {
            "sent": len(records),
            "answered": sum(record.answered for record in records),
            "followups": sum(record.followup for record in records),
            "conversations": len({record.conversation for record in records}),
            **holdout(records),
            "recorded_rewrites": sum(record.rewritten for record in records),
            "compacted": sum(record.compacted for record in records),
            "new_to_router": sum(map(new_to_router, records)),
            "judged": sum(record.correct is not None for record in records),
            "wrong": sum(record.correct is False for record in records),
            "mean_prompt_tokens": float(np.mean([r.prompt_tokens for r in records])) if records else None,
        },
        "ttft": ttft(records),
        "ttft_by_size": ttft_by_size(records),
        "ttft_by_outcome": ttft_by_outcome(records),
        "comparison": comparison(records),
        "outcomes": outcomes(records, duration_s),
        "gaps": gaps(records, duration_s),
        "retained": retained(scrapes),
        "costs": path_costs(scrapes),
        "reads": reads(scrapes),
        "prompt_tokens": _by_label(all_series, "kvtune_prompt_tokens_total", "source", role=Role.PREFILL.value),
        "retained_token_seconds": _by_label(
            all_series, "kvtune_retained_token_seconds_total", "end", role=Role.DECODE.value
        ),
        "decisions": dict(sorted(decisions.items())),
    }
