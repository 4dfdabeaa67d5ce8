"""The text of `/metrics`: the Prometheus format, or OpenMetrics with exemplars for a scraper that asks for it."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder


def render(registry: CollectorRegistry, accept: str | None = None) -> tuple[bytes, str]:
    """Body and content type of an exposition; `accept` is the scraper's Accept header."""
    encode, content_type = choose_encoder(accept or "")
    return encode(registry), content_type
