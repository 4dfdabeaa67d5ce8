"""What a deployment exposes now: the label sets of series, from live targets or from a Prometheus server."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from kvtune_tuning.access import Access
from kvtune_tuning.errors import TuningError
from kvtune_tuning.exposition import check_known, parse
from kvtune_tuning.promapi import TIMEOUT_S, PrometheusApi
from kvtune_tuning.recording import http_fetch, names_of, without_secrets

LabelSets = dict[str, list[dict[str, str]]]
"""Label sets by sample name."""
NAMES_A_QUERY = 60


@dataclass(frozen=True, slots=True)
class Stored:
    """What a Prometheus server holds now."""

    series: LabelSets
    """Label sets reduced to the labels that were asked for."""
    having: Mapping[str, frozenset[str]]
    """Names with a series that has the label, by label that was only asked about."""
    rules: frozenset[str] | None
    """Names of the rules and alerts that the server evaluates; None where it does not say."""


def exposed(urls: Sequence[str], names: Collection[str], access: Access | None = None) -> LabelSets:
    """Scrape each target once.

    Raises TuningError where one does not answer, or answers with anything but metrics of kvtune or vLLM, and UsageError
    for options that cannot be used.
    """
    targets = names_of(urls)

    async def scrape() -> list[str]:
        async with http_fetch(urls, access) as fetch:
            return list(await asyncio.gather(*(fetch(url) for url in targets.values())))

    found: LabelSets = {}
    for url, text in zip(targets.values(), asyncio.run(scrape()), strict=True):
        check_known(text, without_secrets(url))
        for sample in parse(text, without_secrets(url), names).samples:
            found.setdefault(sample.name, []).append(dict(sample.labels))
    return found


def stored(
    url: str,
    names: Collection[str],
    labels: Collection[str],
    only_whether: Collection[str],
    access: Access | None = None,
) -> Stored:
    """Ask a Prometheus server which series of `names` it has, by `labels`.

    Label sets are grouped by `labels`, so that the answer does not grow with the fleet; of the labels `only_whether`
    it is only asked which names have them. Raises TuningError, as `query_prometheus` does.
    """
    import httpx

    access = access or Access()
    series: LabelSets = {}
    having: dict[str, set[str]] = {label: set() for label in only_whether}
    with httpx.Client(**access.client_options([url], TIMEOUT_S)) as client:
        api = PrometheusApi(url, client, access)
        ordered = sorted(names)
        for start in range(0, len(ordered), NAMES_A_QUERY):
            which = f'__name__=~"{"|".join(ordered[start : start + NAMES_A_QUERY])}"'
            by = ", ".join(("__name__", *sorted(labels)))
            for row in api.instant(f"count by ({by}) ({{{which}}})")["result"]:
                found = dict(row["metric"])
                series.setdefault(found.pop("__name__"), []).append(found)
            for label, known in having.items():
                for row in api.instant(f'count by (__name__) ({{{which},{label}!=""}})')["result"]:
                    known.add(row["metric"]["__name__"])
        try:
            groups = api.rules()["groups"]
            rules = frozenset(str(rule["name"]) for group in groups for rule in group["rules"])
        except (TuningError, KeyError, TypeError):
            # Stores that keep series but evaluate no rules have no such API.
            rules = None
    return Stored(series, {label: frozenset(known) for label, known in having.items()}, rules)
