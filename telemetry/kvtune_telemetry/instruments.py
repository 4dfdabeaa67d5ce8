"""Turns catalogue entries into `prometheus_client` instruments, with every label set exposed from the start."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.core import Metric as MetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kvtune_telemetry.catalogue import BY_NAME, CONNECTOR_LABELS, Emitter, emitted_by


def without_created() -> None:
    """Expose no `_created` series, which double every counter and histogram and which nothing of ours reads.

    For a process of our own: it holds for every metric in it, and in vLLM's it would take vLLM's away.
    """
    disable_created_metrics()  # type: ignore[no-untyped-call]


class WeightedHistogram(Collector):
    """A histogram whose observations carry a weight; exposed as an ordinary one.

    `_bucket` and `_count` are sums of weights, `_sum` is the sum of weight times value.
    """

    def __init__(self, name: str, documentation: str, buckets: Sequence[float], registry: CollectorRegistry) -> None:
        self._name, self._documentation = name, documentation
        self._edges = tuple(buckets)
        self._weights = [0.0] * (len(self._edges) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float, weight: float) -> None:
        """Add an observation of `value` with `weight`, both non-negative."""
        self._weights[bisect_left(self._edges, value)] += weight
        self._sum += weight * value

    def describe(self) -> Iterable[MetricFamily]:
        """Nothing to check at registration beyond the name."""
        return [HistogramMetricFamily(self._name, self._documentation)]

    def collect(self) -> Iterator[MetricFamily]:
        """The family as it stands."""
        total, cumulative = 0.0, []
        for edge, weight in zip((*self._edges, float("inf")), self._weights, strict=True):
            total += weight
            cumulative.append((floatToGoString(edge), total))  # type: ignore[no-untyped-call]
        yield HistogramMetricFamily(self._name, self._documentation, buckets=cumulative, sum_value=self._sum)


class Families:
    """The metric families of one emitter, registered once on a registry; several engines may share them."""

    def __init__(self, emitter: Emitter, registry: CollectorRegistry) -> None:
        self.emitter: Emitter = emitter
        self.plain: dict[str, Counter | Gauge | Histogram] = {}
        self.weighted: dict[str, WeightedHistogram] = {}
        for metric in emitted_by(emitter):
            names = metric.label_names()
            if metric.kind == "weighted_histogram":
                assert metric.buckets is not None
                self.weighted[metric.name] = WeightedHistogram(metric.name, metric.help, metric.buckets, registry)
            elif metric.kind == "histogram":
                assert metric.buckets is not None
                self.plain[metric.name] = Histogram(
                    metric.name, metric.help, names, buckets=metric.buckets, registry=registry
                )
            elif metric.kind == "counter":
                self.plain[metric.name] = Counter(metric.name, metric.help, names, registry=registry)
            else:
                # Only matters where several API servers share an exposition (PROMETHEUS_MULTIPROC_DIR): amounts are
                # moved up and down by whichever process hears of it, settings are the same in all of them.
                one_for_all = metric.kind == "info" or metric.name.endswith("_setting")
                self.plain[metric.name] = Gauge(
                    metric.name,
                    metric.help,
                    names,
                    registry=registry,
                    multiprocess_mode="max" if one_for_all else "sum",
                )


class Instruments:
    """All instruments of one emitter, for one engine. Children are looked up once and cached by their label values."""

    def __init__(self, families: Families, constant: Sequence[str] = ()) -> None:
        """`constant`: values of the labels every series of the emitter carries (the connector's three)."""
        expected = CONNECTOR_LABELS if families.emitter == "connector" else ()
        if len(constant) != len(expected):
            raise ValueError(f"{families.emitter} series carry {expected}, got values {tuple(constant)}")
        self._constant = tuple(constant)
        self._families = families.plain
        self._weighted = families.weighted
        self._counters: dict[tuple[str, ...], Counter] = {}
        self._gauges: dict[tuple[str, ...], Gauge] = {}
        self._histograms: dict[tuple[str, ...], Histogram] = {}
        for metric in emitted_by(families.emitter):
            for values in metric.initial() if metric.kind != "weighted_histogram" else ():
                # Settings appear when they are set: a 0 nobody set would read as a setting of 0.
                if not metric.name.endswith("_setting"):
                    self._child(metric.name, values)

    def _child(self, name: str, values: tuple[str, ...]) -> Counter | Gauge | Histogram:
        family = self._families[name]
        labels = (*self._constant, *values)
        return family.labels(*labels) if labels else family

    def counter(self, name: str, *values: str) -> Counter:
        """The counter `name` with those label values."""
        key = (name, *values)
        child = self._counters.get(key)
        if child is None:
            found = self._child(name, values)
            assert isinstance(found, Counter), name
            child = self._counters[key] = found
        return child

    def gauge(self, name: str, *values: str) -> Gauge:
        """The gauge `name` with those label values."""
        key = (name, *values)
        child = self._gauges.get(key)
        if child is None:
            found = self._child(name, values)
            assert isinstance(found, Gauge), name
            child = self._gauges[key] = found
        return child

    def histogram(self, name: str, *values: str) -> Histogram:
        """The histogram `name` with those label values."""
        key = (name, *values)
        child = self._histograms.get(key)
        if child is None:
            found = self._child(name, values)
            assert isinstance(found, Histogram), name
            child = self._histograms[key] = found
        return child

    def weighted(self, name: str) -> WeightedHistogram:
        """The weighted histogram `name`."""
        return self._weighted[name]

    def declared(self, name: str, *values: str) -> bool:
        """Whether those label values are among the combinations the catalogue declares."""
        combinations = BY_NAME[name].combinations
        return combinations is None or values in combinations

    def known(self, name: str, label: str, value: str) -> bool:
        """Whether `value` is in the closed set of that label."""
        for declared in BY_NAME[name].labels:
            if declared.name == label:
                return declared.values is None or value in declared.values
        return False
