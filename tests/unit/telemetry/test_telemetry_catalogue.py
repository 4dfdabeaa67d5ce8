from __future__ import annotations

import re
from itertools import pairwise
from math import isclose

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvtune_telemetry import buckets
from kvtune_telemetry.catalogue import BY_NAME, CATALOGUE, emitted_by
from kvtune_telemetry.recorder import ConnectorRecorder, RouterRecorder
from kvtune_telemetry.vocabulary import Role


def exposed(registry: CollectorRegistry) -> dict[str, tuple[str, set[str], int]]:
    """Per family: type, label names, number of series."""
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        labels = {name for sample in family.samples for name in sample.labels} - {"le"}
        found[family.name + ("_total" if family.type == "counter" else "")] = (family.type, labels, len(family.samples))
    return found


@pytest.fixture
def registries() -> dict[str, CollectorRegistry]:
    router, connector = CollectorRegistry(), CollectorRegistry()
    RouterRecorder(router, version="1").set_setting("margin_seconds", 6)
    recorder = ConnectorRecorder(connector, model_name="m", engine="0", role=Role.DECODE)
    recorder.set_setting("kv_pool_tokens", 1)
    return {"router": router, "connector": connector}


def test_names_are_unique_prefixed_and_in_base_units() -> None:
    assert len(BY_NAME) == len(CATALOGUE)
    for metric in CATALOGUE:
        assert re.fullmatch(r"kvtune_[a-z][a-z0-9_]*", metric.name)
        assert (metric.kind == "counter") == metric.name.endswith("_total"), metric.name
        assert metric.help.endswith("."), metric.name
        assert not re.search(r"_(ms|millis|kb|mb|percent)(_|$)", metric.name), metric.name
        if metric.kind == "histogram":
            assert metric.buckets == tuple(sorted(set(metric.buckets or ()))), metric.name


def test_every_series_of_the_catalogue_is_exposed_and_no_other(registries: dict[str, CollectorRegistry]) -> None:
    for emitter in ("router", "connector"):
        live = exposed(registries[emitter])
        declared = {metric.name for metric in emitted_by(emitter)}
        assert set(live) == declared
        for metric in emitted_by(emitter):
            kind, labels, series = live[metric.name]
            assert kind == metric.as_dict()["type"], metric.name
            if not series:
                assert any(label.values is None for label in metric.labels), f"{metric.name} is not pre-initialised"
                continue
            assert labels == set(metric.label_names()), metric.name
            if not metric.name.endswith(("_setting", "_info")) and metric.kind in ("counter", "gauge"):
                assert series == len(list(metric.initial())), metric.name


def test_labels_cannot_grow_with_traffic() -> None:
    open_labels = {label.name for metric in CATALOGUE for label in metric.labels if label.values is None}
    assert open_labels == {"engine", "version"}


def test_bucket_ratios_keep_a_p90_within_ten_percent() -> None:
    for edges, low, high in ((buckets.TTFT_SECONDS, 0.01, 60.0), (buckets.READ_SECONDS, 0.001, 10.0)):
        assert isclose(edges[0], low) and edges[-1] >= high
        for left, right in pairwise(edges):
            assert right / left <= 1.21


def test_size_classes() -> None:
    assert [buckets.size_label(n) for n in (0, 64, 65, 131072, 131073)] == ["64", "64", "128", "131072", "inf"]
    assert buckets.size_label(257, buckets.COARSE_SIZE_EDGES) == "1024"
    assert set(buckets.COARSE_SIZE_EDGES) <= set(buckets.SIZE_EDGES)


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="'ttl' is not in the catalogue"):
        RouterRecorder(CollectorRegistry(), version="1").set_setting("ttl", 1)
