"""Reads the Prometheus text exposition, keeping only the series the advice needs."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

from prometheus_client.parser import text_string_to_metric_families

from kvtune_tuning.errors import TuningError
from kvtune_tuning.names import NEEDED, exposed_name

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_KNOWN = re.compile(r"^[ \t]*(?:kvtune_|vllm[:_])", re.MULTILINE)
KNOWN_HINT = "Give the router's metrics port (http://router:9400/metrics) or an engine's /metrics."
_EXEMPLAR = re.compile(r"\s#\s*\{.*$")
_SAMPLE = re.compile(r"^(?P<key>[a-zA-Z_:][a-zA-Z0-9_:]*\s*(?:\{.*\})?)\s*(?<=[\s}])(?P<value>\S+)(?:\s+\S+)?$")


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of one series at the time of the scrape."""

    name: str
    labels: frozenset[tuple[str, str]]
    value: float


@dataclass(frozen=True, slots=True)
class Parsed:
    """The needed samples of one exposition, and how many of them were NaN or infinite (and were dropped)."""

    samples: tuple[Sample, ...]
    not_finite: int


def parse(text: str, where: str, needed: Collection[str] = NEEDED) -> Parsed:
    """Parse one exposition, classic or OpenMetrics text. `where` names it in errors.

    `vllm_x`, as prometheus_client writes it in OpenMetrics, is `vllm:x`.

    Lines of series that are not needed are skipped unread: vLLM exposes thousands. Raises TuningError
    (`not_an_exposition`) where a needed line is malformed, or where nothing in the text looks like a sample.
    """
    samples: list[Sample] = []
    respelt: list[Sample] = []
    not_finite = 0
    alien: int | None = None
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        name = _NAME.match(line)
        meant = None if name is None else _meant(name.group(), needed)
        if meant is None:
            if alien is None and not (samples or respelt) and not _SAMPLE.match(_EXEMPLAR.sub("", line)):
                alien = number
            continue
        # An exemplar's syntax belongs to OpenMetrics; its content is of no use here.
        sample = _SAMPLE.match(_EXEMPLAR.sub("", line))
        if sample is None:
            raise _malformed(where, number, "not a sample")
        try:
            labels = _labels(sample["key"])
            value = float(sample["value"])
        except ValueError as error:
            raise _malformed(where, number, str(error)) from None
        if math.isfinite(value):
            (samples if line.startswith(meant) else respelt).append(Sample(meant, labels, value))
        else:
            not_finite += 1
    if alien is not None and not (samples or respelt):
        raise _malformed(where, alien, "not a sample")
    if respelt:
        # Where both spellings are there they are one series.
        there = {(one.name, one.labels) for one in samples}
        samples += [one for one in respelt if (one.name, one.labels) not in there]
    return Parsed(tuple(samples), not_finite)


def _meant(name: str, needed: Collection[str]) -> str | None:
    """Which of the needed names this is, in either spelling of vLLM's; None for any other."""
    if name in needed:
        return name
    meant = exposed_name(name)
    return meant if meant in needed else None


def check_known(text: str, where: str, *, thoroughly: bool = True) -> None:
    """Refuse what is no exposition of a router or an engine. `thoroughly`: read the needed lines too.

    Raises TuningError: `not_an_exposition`, or `no_known_series` where no series of kvtune or vLLM is in it.
    """
    if thoroughly:
        parse(text, where)
    if not _KNOWN.search(text):
        what = "an exposition without kvtune_ or vllm: series" if text.strip() else "an empty page, not metrics"
        raise TuningError("no_known_series", f"{where}: {what}", KNOWN_HINT)


@lru_cache(maxsize=65536)
def _labels(key: str) -> frozenset[tuple[str, str]]:
    """The labels of `name{...}`; the same series comes in every scrape, so each is parsed once."""
    (family,) = text_string_to_metric_families(f"{key} 0\n")
    return frozenset(family.samples[0].labels.items())


def _malformed(where: str, line: int, why: str) -> TuningError:
    return TuningError(
        "not_an_exposition",
        f"{where}, line {line}: not a Prometheus exposition ({why})",
        "Give the address of a /metrics page, the router's is on port 9400, or a directory of `kvtune record`.",
    )
