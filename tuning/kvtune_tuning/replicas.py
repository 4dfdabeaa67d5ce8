"""Which series are of one target: label sets become targets, and what was read twice becomes one.

Two Prometheus servers that scrape the same targets, behind a store that does not deduplicate, or two jobs that name the
same address, give every series twice. Counting both would double every turn.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from kvtune_telemetry.catalogue import BY_NAME
from kvtune_tuning.series import COUNTER_SUFFIXES, Floats, Labels, in_order

REPLICA_LABELS = ("prometheus_replica", "__replica__", "replica", "prometheus", "thanos_replica", "receive_replica")
"""Labels that Prometheus Operator, Thanos, Cortex and Mimir set-ups tell scraping servers apart by."""
ENGINE_LABELS = frozenset(("model_name", "engine"))
"""vLLM's own on every series of it."""
ALIKE = 0.9
"""Share of points at which two readings of the same counters agree, restarts apart."""
AT_ONCE = 0.1
"""Two that share so much of their times at most are one after the other."""
COMPARED = 40
"""Counters that are compared: enough, and the rest costs time."""
LAG = 0.9
"""A counter that is seen with at least this share of its value elsewhere was read a little earlier, not reset."""

Points = tuple[Floats, Floats]
"""Times (Unix s, ascending) and values of a series, both of shape (n,)."""
Found = dict[tuple[str, Labels], Points]
"""Series by name and labels; the labels are all of them, or those of the metric itself within a target."""

_OWN = {sample: frozenset(m.label_names()) | {"le"} for m in BY_NAME.values() for sample in m.sample_names()}


def own_labels(name: str) -> frozenset[str]:
    """Labels that a metric is exposed with, as far as known; for vLLM's those that all of its have."""
    return _OWN.get(name, ENGINE_LABELS | {"le"})


def as_exposed(name: str, labels: dict[str, str]) -> Labels:
    """Labels with `exported_x` put back to `x`: so a scrape renames a metric's label that its configuration sets."""
    for own in own_labels(name):
        if f"exported_{own}" in labels:
            labels[own] = labels.pop(f"exported_{own}")
    return frozenset(labels.items())


@dataclass(slots=True)
class Target:
    """One scraped process: its name, and its series by name and the metric's own labels."""

    places: list[Labels]
    """The labels it is scraped under, what was read most first."""
    series: Found
    name: str = ""
    times: Floats = field(init=False)
    """Times at which any of its series has a point."""

    def __post_init__(self) -> None:
        self.times = np.unique(np.concatenate([times for times, _ in self.series.values()]))

    def label(self, label: str) -> str:
        """The value of a label of the place it is mostly scraped under, or nothing."""
        return dict(self.places[0]).get(label, "")

    def addresses(self) -> set[tuple[str, str]]:
        """Job and instance of every place."""
        labels = (dict(place) for place in self.places)
        return {(one.get("job", ""), one.get("instance", "")) for one in labels}

    def samples(self) -> int:
        """Points in all series."""
        return sum(len(times) for times, _ in self.series.values())

    def take(self, other: Target) -> None:
        """Add what another reading of the same process has and this one lacks."""
        self.places += other.places
        for key, points in other.series.items():
            mine = self.series.get(key)
            self.series[key] = (
                points if mine is None else filled(mine, points, counter=key[0].endswith(COUNTER_SUFFIXES))
            )
        self.times = np.union1d(self.times, other.times)


@dataclass(frozen=True, slots=True)
class Sorted:
    """All targets, and how to find the one that a label set belongs to."""

    targets: list[Target]
    notes: list[str]
    place_names: frozenset[str]
    stamps: dict[Labels, dict[float, float]]
    """When what stands at a point of the grid was scraped (Unix s), by place, where that is known."""

    def split(self, labels: Labels) -> tuple[Labels, Labels]:
        """The labels of the place and the metric's own."""
        place = frozenset(pair for pair in labels if pair[0] in self.place_names)
        return place, labels - place

    def by_place(self) -> dict[Labels, tuple[Target, int]]:
        """The target of each place, and the place's rank in it."""
        return {place: (target, rank) for target in self.targets for rank, place in enumerate(target.places)}


def sort_targets(
    found: Found, stamps: Found, replica_labels: Sequence[str], *, lag_points: int, fresh_s: float
) -> Sorted:
    """Sort series into targets, each series once; and say what was left out.

    `stamps`: series whose values are the times of scrapes. What is shown `fresh_s` after it was scraped is not a value
    but a gap. `replica_labels`: merged without a look at the values; none for `REPLICA_LABELS`, whose values must
    agree. `lag_points`: points of the grid that two readings of the same counter may be apart.
    """
    done = Sorted([], [], _place_names(found), {})
    for (_, labels), (times, scraped) in stamps.items():
        told = done.stamps.setdefault(done.split(labels)[0], {})
        for at, stamp in zip(times.tolist(), scraped.tolist(), strict=True):
            told[at] = max(stamp, told.get(at, stamp))
    by_place: dict[Labels, Found] = {}
    for (name, labels), (times, values) in found.items():
        place, own = done.split(labels)
        told = done.stamps.get(place, {})
        if told:
            fresh = np.asarray([at - told.get(at, at) <= fresh_s for at in times.tolist()])
            times, values = times[fresh], values[fresh]
        if len(times):
            by_place.setdefault(place, {})[name, own] = times, values
    for place, told in done.stamps.items():
        done.stamps[place] = {at: stamp for at, stamp in told.items() if at - stamp <= fresh_s}
    targets = [Target([place], series) for place, series in by_place.items()]
    known = tuple(replica_labels) or REPLICA_LABELS

    def same(one: Target, two: Target) -> bool:
        return bool(replica_labels) or _agree(one, two, lag_points) is not False

    targets, merged = _merged(targets, lambda target: _without(target.places[0], known), same)
    if merged:
        names = sorted({key for places in merged for key in _differing(places)})
        done.notes.append(
            f"{len(merged)} target(s) were scraped by more than one Prometheus (label {', '.join(names)}): each series "
            "counts once, from the one with the most samples, gaps filled from the others"
        )

    def same_address(one: Target, two: Target) -> bool:
        at_once = bool(np.isin(one.times, two.times).any())
        return one.label("job") != two.label("job") and at_once and _agree(one, two, lag_points) is not False

    targets, merged = _merged(targets, _address, same_address)
    if merged:
        jobs = sorted({" and ".join(sorted({dict(place).get("job", "") for place in places})) for places in merged})
        done.notes.append(
            f"{len(merged)} target(s) were scraped by more than one job ({'; '.join(jobs[:3])}): same address, same "
            "values; each series counts once"
        )
    done.targets.extend(_named(targets, lag_points, done.notes))
    return done


def _place_names(found: Iterable[tuple[str, Labels]]) -> frozenset[str]:
    """Labels that come from where a series was scraped, not from what it counts: all names have them there."""
    by_address: dict[Labels, dict[str, set[str]]] = {}
    for name, labels in found:
        address = frozenset(pair for pair in labels if pair[0] in ("job", "instance"))
        more = by_address.setdefault(address, {}).setdefault(name, set())
        more |= {key for key, _ in labels} - own_labels(name)
    common = (set.intersection(*by_name.values()) for by_name in by_address.values())
    return frozenset({"job", "instance"}.union(*common))


def _without(place: Labels, names: Collection[str]) -> Labels:
    return frozenset(pair for pair in place if pair[0] not in names)


def _address(target: Target) -> Labels:
    """What two jobs that scrape one address have in common; all labels where there is no address."""
    address = frozenset(pair for pair in target.places[0] if pair[0] == "instance")
    return address or target.places[0]


def _differing(places: Iterable[Labels]) -> set[str]:
    """Labels whose values differ between places."""
    sets = list(places)
    return {key for key, _ in frozenset.union(*sets) - frozenset.intersection(*sets)}


def _merged(
    targets: list[Target], key: Callable[[Target], Labels], same: Callable[[Target, Target], bool]
) -> tuple[list[Target], list[list[Labels]]]:
    """Targets with those of equal `key` made one where they are the `same`; and the places of what was merged."""
    groups: dict[Labels, list[Target]] = {}
    for target in sorted(targets, key=lambda t: (-t.samples(), sorted(t.places[0]))):
        groups.setdefault(key(target), []).append(target)
    kept: list[Target] = []
    merged = []
    for group in groups.values():
        bases: list[Target] = []
        for target in group:
            base = next((base for base in bases if same(base, target)), None)
            if base is None:
                bases.append(target)
            else:
                base.take(target)
        kept += bases
        merged += [base.places for base in bases if len(base.places) > 1 and len(group) > len(bases)]
    return kept, merged


def _agree(one: Target, two: Target, lag_points: int) -> bool | None:
    """Whether counters of both tell the same story; None where there is nothing to tell it by.

    The second reading may be a scrape earlier or later: at each point it lies within what the first shows around it.
    """
    compared = good = 0
    for key in sorted(one.series.keys() & two.series.keys(), key=lambda key: (key[0], sorted(key[1]))):
        if not key[0].endswith(COUNTER_SUFFIXES):
            continue
        (times, values), (other_times, other) = one.series[key], two.series[key]
        _, here, there = np.intersect1d(times, other_times, assume_unique=True, return_indices=True)
        mine, theirs = values[here], other[there]
        if len(here) < 2 or not (mine.any() or theirs.any()):
            continue
        padded = np.pad(mine, lag_points, mode="edge")
        around = np.lib.stride_tricks.sliding_window_view(padded, 2 * lag_points + 1)
        # At the edges of what is known a later reading may already be higher.
        close = (theirs >= LAG * around.min(axis=1)) & (LAG * theirs <= around.max(axis=1))
        compared += len(close)
        good += int(close.sum())
        if compared > COMPARED * len(times):
            break
    return None if not compared else good >= ALIKE * compared


def _named(targets: list[Target], lag_points: int, notes: list[str]) -> Iterator[Target]:
    """Name targets by job and instance.

    Those that share both, one after the other, are one target (a pod that got the address of another, or new labels).
    At the same time they are different ones, of two clusters say, and are told apart by what else they carry.
    """

    def base(target: Target) -> str:
        job, instance = target.label("job"), target.label("instance")
        return f"{job}/{instance}" if job and instance else instance or job or "prometheus"

    targets, _ = _merged(
        targets,
        lambda t: frozenset({("name", base(t))}),
        lambda one, two: np.isin(one.times, two.times).sum() <= AT_ONCE * min(len(one.times), len(two.times)),
    )
    for name, group in groupby(sorted(targets, key=lambda t: (base(t), sorted(t.places[0]))), base):
        alike = list(group)
        differing = sorted(_differing(target.places[0] for target in alike))
        if len(alike) > 1 and _agree(alike[0], alike[1], lag_points):
            notes.append(
                f"{name} is there {len(alike)} times with the same values, labels {', '.join(differing)} differ: if "
                f"it was scraped more than once, give --replica-label {differing[0]}"
            )
        for target in alike:
            told = ",".join(f"{key}={target.label(key)}" for key in differing)
            target.name = f"{name}{{{told}}}" if told else name
            yield target


def filled(base: Points, other: Points, *, counter: bool) -> Points:
    """`base` with the points of `other` where it has none.

    Another server's scrape of a counter is a little earlier or later: what it shows is kept between its neighbours, so
    that it does not look like a reset, unless the counter was reset in between by its own account.
    """
    (times, values), (other_times, theirs) = base, other
    new = ~np.isin(other_times, times)
    if counter:
        theirs = theirs.copy()
        gaps = np.searchsorted(times, other_times)
        for gap in np.unique(gaps[new]):
            inside = np.flatnonzero(new & (gaps == gap))
            low = values[gap - 1] if gap else -np.inf
            high = values[gap] if gap < len(values) else np.inf
            before = other[1][inside[0] - 1] if inside[0] else LAG * low
            after = other[1][inside[-1] + 1] if inside[-1] + 1 < len(theirs) else high / LAG
            drops = np.flatnonzero(np.diff(np.concatenate(([before], other[1][inside], [after]))) < 0)
            up_to, since = (drops[0], drops[-1]) if len(drops) else (len(inside), 0)
            theirs[inside[:up_to]] = np.maximum(theirs[inside[:up_to]], low)
            theirs[inside[since:]] = np.minimum(theirs[inside[since:]], high)
    return in_order(np.concatenate((times, other_times[new])), np.concatenate((values, theirs[new])))
