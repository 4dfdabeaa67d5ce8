"""The text of `/metrics`: the Prometheus format, or OpenMetrics with exemplars for a scraper that asks for it."""

from __future__ import annotations

import re

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

_ESCAPING = re.compile(r";\s*escaping\s*=\s*([^;\s]*)", re.IGNORECASE)

_VERSION = re.compile(r";\s*version\s*=", re.IGNORECASE)


def render(registry: CollectorRegistry, accept: str | None = None) -> tuple[bytes, str]:
    """Body and content type of an exposition; `accept` is the scraper's Accept header.

    Names keep their colons, which are legal in every version of the format: prometheus_client from 0.22 on would write
    `vllm_x` for `vllm:x` to a scraper that does not ask for `allow-utf-8`, as Prometheus 2 does not.
    """
    ranges = [_keeping_colons(one) for one in (accept or "").split(",")]
    encode, content_type = choose_encoder(",".join(ranges))
    if "allow-utf-8" not in (accept or ""):
        # What it would have answered: the names are as legal under that.
        content_type = content_type.replace("escaping=allow-utf-8", "escaping=underscores")
    return encode(registry), content_type


def _keeping_colons(accepted: str) -> str:
    """One media range of an Accept header, asking for names as they are where it asked for underscores or nothing."""
    escaping = _ESCAPING.search(accepted)
    if not accepted.strip() or (escaping is not None and escaping[1].lower() != "underscores"):
        return accepted
    # Without a version prometheus_client heeds no escaping; 1.0.0 is what it answers with then.
    openmetrics = accepted.split(";")[0].strip() == "application/openmetrics-text"
    version = ";version=1.0.0" if openmetrics and not _VERSION.search(accepted) else ""
    return f"{_ESCAPING.sub('', accepted)}{version};escaping=allow-utf-8"
