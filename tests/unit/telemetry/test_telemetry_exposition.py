"""What `/metrics` looks like to scrapers of different ages."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge

from kvtune_telemetry.exposition import render

PROMETHEUS_2_42 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
LEGACY_3 = "application/openmetrics-text; version=1.0.0; escaping=underscores;q=0.6,*/*;q=0.2"
PLAIN_1 = "text/plain;version=1.0.0;escaping=underscores"


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        (PROMETHEUS_2_42, "application/openmetrics-text"),
        (PROMETHEUS_3, "application/openmetrics-text"),
        (LEGACY_3, "application/openmetrics-text"),
        ("application/openmetrics-text", "application/openmetrics-text"),
        (PLAIN_1, "text/plain"),
        ("text/plain;version=0.0.4", "text/plain"),
        ("*/*", "text/plain"),
        ("", "text/plain"),
        (None, "text/plain"),
    ],
)
def test_names_keep_their_colons(accept: str | None, kind: str) -> None:
    registry = CollectorRegistry()
    Gauge("vllm:num_requests_waiting", "x", ["engine"], registry=registry).labels("0").set(2)
    Counter("vllm:num_preemptions", "x", registry=registry).inc(3)
    body, content_type = render(registry, accept)
    lines = [line for line in body.decode().splitlines() if not line.startswith("#")]
    assert 'vllm:num_requests_waiting{engine="0"} 2.0' in lines and "vllm:num_preemptions_total 3.0" in lines
    assert not any(line.startswith("vllm_") for line in lines)
    assert content_type.partition(";")[0] == kind
    assert ("allow-utf-8" in content_type) == (accept == PROMETHEUS_3), "it is not told of what it did not ask for"
