"""Reading Prometheus: increments, replicas, budgets, and how servers of its kind refuse. Against a server in here."""

from __future__ import annotations

import contextlib
import gzip
import http.server
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import httpx
import jsonschema
import numpy as np
import orjson
import pytest

from kvtune_tuning.access import Access, check_matcher
from kvtune_tuning.api import suggest_series, suggest_snapshots
from kvtune_tuning.document import schema
from kvtune_tuning.errors import NOT_ENOUGH_DATA, TuningError, UsageError
from kvtune_tuning.promapi import TRIES
from kvtune_tuning.prometheus import query_prometheus
from kvtune_tuning.replicas import filled
from kvtune_tuning.series import SeriesSet
from kvtune_tuning.sources import read_snapshots

Snapshots = Callable[..., Path]
NOW = 1_700_000_000.0
DAY = 86_400.0
TURNS = "kvtune_turns_total"
ENDS = "kvtune_turn_ends_total"
Floats = np.ndarray[Any, np.dtype[np.float64]]


# --- a server -------------------------------------------------------------------------------------------------------


@dataclass
class Server:
    """A Prometheus over raw samples, as far as PromQL is used here. `fault` may answer in its stead."""

    rows: list[tuple[dict[str, str], Floats, Floats]] = field(default_factory=list)
    now: float = NOW
    prefix: str = ""
    fault: Callable[[str, dict[str, str]], httpx.Response | Exception | None] | None = None
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    requests: list[httpx.Request] = field(default_factory=list)
    returned: list[int] = field(default_factory=list)
    """Points of each answer."""

    def add(self, name: str, times: Any, values: Any, job: str = "router", instance: str = "r:1", **more: str) -> None:
        labels = {"__name__": name, "job": job, "instance": instance, **more}
        self.rows.append((labels, np.asarray(times, float), np.asarray(values, float)))

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        sent = request.content.decode() if request.method == "POST" else request.url.query.decode()
        form = {key: values[0] for key, values in parse_qs(sent).items()}
        kind = request.url.path.removeprefix(f"{self.prefix}/api/v1/")
        assert kind in ("query", "query_range"), request.url
        self.asked.append((kind, form))
        answer = self.fault(kind, form) if self.fault is not None else None
        if isinstance(answer, Exception):
            raise answer
        return answer or self.answer(kind, form)

    def answer(self, kind: str, form: dict[str, str]) -> httpx.Response:
        query, points = form["query"], 1
        if kind == "query_range":
            start, end, step = (float(form[name]) for name in ("start", "end", "step"))
            times = start + step * np.arange(int((end - start) / step + 1e-6) + 1)
            assert len(times) <= 11_000
        else:
            times = np.asarray([float(form.get("time", self.now))])
        if query == "time()":
            data: dict[str, Any] = {"resultType": "scalar", "result": [float(times[0]), str(times[0])]}
        elif raw := re.fullmatch(r"(.*)\[(\d+m?s)\]", query):
            rows = []
            for labels, at, values in self.selected(raw[1]):
                inside = (at >= times[0] - seconds(raw[2])) & (at <= times[0])
                if inside.any():
                    rows.append((labels, at[inside], values[inside]))
            data = matrix(rows)
            points = sum(len(at) for _, at, _ in rows)
        else:
            found = [
                (labels, times[~np.isnan(v)], v[~np.isnan(v)])
                for labels, v in self.evaluated(query, times)
                if not np.isnan(v).all()
            ]
            data = matrix(found)
            points = sum(len(at) for _, at, _ in found)
            if kind == "query":
                result = [{"metric": labels, "value": [float(times[0]), repr(float(v[-1]))]} for labels, _, v in found]
                data = {"resultType": "vector", "result": result}
        self.returned.append(points)
        return httpx.Response(200, content=orjson.dumps({"status": "success", "data": data}))

    def selected(self, selector: str) -> Iterator[tuple[dict[str, str], Floats, Floats]]:
        name, matchers = re.fullmatch(r"([a-zA-Z_:]*)(?:\{(.*)\})?", selector).groups()  # type: ignore[union-attr]
        wanted = [("__name__", "=", name)] if name else []
        wanted += re.findall(r'(\w+)(=~|!=|!~|=)"((?:[^"\\]|\\.)*)"', matchers or "")
        for labels, times, values in self.rows:
            for key, operator, value in wanted:
                text = value.replace("\\\\", "\\")
                hit = re.fullmatch(text, labels.get(key, "")) if "~" in operator else labels.get(key, "") == text
                if bool(hit) == operator.startswith("!"):
                    break
            else:
                yield labels, times, values

    def evaluated(self, query: str, times: Floats) -> list[tuple[dict[str, str], Floats]]:
        if " or " in query or " > 0" in query:
            parts = [
                self.evaluated(part.removeprefix("(").removesuffix(" > 0)"), times) for part in query.split(" or ")
            ]
            return grouped(
                [(labels, np.where(v > 0, v, np.nan)) for part in parts for labels, v in part], None, np.fmax
            )
        if by := re.fullmatch(r"(count|max|min) (?:by \((.*?)\) )?\((.*)\)", query) or re.fullmatch(
            r"(max)()\((.*)\)", query
        ):
            inner = self.evaluated(by[3], times)
            labels = [name.strip() for name in (by[2] or "").split(",") if name]
            if by[1] == "count":
                inner = [(labels, np.where(np.isnan(v), np.nan, 1.0)) for labels, v in inner]
            join = {"count": lambda a, b: np.nansum([a, b], axis=0), "max": np.fmax, "min": np.fmin}[by[1]]
            return grouped(inner, labels, join)
        if over := re.fullmatch(r"(\w+)\((.*)\[(\d+m?s)\]\)", query):
            return [
                (
                    labels if over[1] == "last_over_time" else nameless(labels),
                    self.over(over[1], *points, times, over[3]),
                )
                for labels, *points in self.selected(over[2])
            ]
        if stamp := re.fullmatch(r"timestamp\((.*)\)", query):
            return [(nameless(labels), now(at, at, times)) for labels, at, _ in self.selected(stamp[1])]
        return [(labels, now(at, values, times)) for labels, at, values in self.selected(query)]

    def over(self, function: str, at: Floats, values: Floats, times: Floats, length: str) -> Floats:
        first = np.searchsorted(at, times - seconds(length) - 1e-6)
        last = np.searchsorted(at, times + 1e-6)
        if function == "last_over_time":
            return np.where(last > first, values[np.maximum(last - 1, 0)], np.nan)
        if function == "count_over_time":
            return np.where(last > first, (last - first).astype(float), np.nan)
        if function == "resets":
            drops = np.concatenate(([0, 0], np.cumsum(np.diff(values) < 0)))
            return np.where(last > first, (drops[last] - drops[np.minimum(first + 1, len(at))]).astype(float), np.nan)
        assert function == "min_over_time"
        return np.asarray([values[i:j].min() if j > i else np.nan for i, j in zip(first, last, strict=True)])


def seconds(text: str) -> float:
    return float(text[:-2]) / 1000 if text.endswith("ms") else float(text[:-1])


def now(at: Floats, values: Floats, times: Floats) -> Floats:
    """The last value at each time, as an instant selector shows it for five minutes."""
    last = np.searchsorted(at, times + 1e-6) - 1
    fresh = (last >= 0) & (times - at[np.maximum(last, 0)] < 300)
    return np.where(fresh, values[np.maximum(last, 0)], np.nan)


def nameless(labels: dict[str, str]) -> dict[str, str]:
    return {key: value for key, value in labels.items() if key != "__name__"}


def grouped(
    rows: list[Any], names: list[str] | None, join: Callable[..., Floats]
) -> list[tuple[dict[str, str], Floats]]:
    found: dict[tuple[tuple[str, str], ...], Floats] = {}
    for labels, values in rows:
        kept = labels if names is None else {key: labels[key] for key in names if key in labels}
        key = tuple(sorted(kept.items()))
        found[key] = join(found[key], values) if key in found else values
    return [(dict(key), values) for key, values in found.items()]


def matrix(rows: list[tuple[dict[str, str], Floats, Floats]]) -> dict[str, Any]:
    """As JSON has it; equal points are written once, there are many in a fleet."""
    written: dict[bytes, orjson.Fragment] = {}
    result = []
    for labels, times, values in rows:
        key = times.tobytes() + values.tobytes()
        if key not in written:
            pairs = [[t, repr(v)] for t, v in zip(times.tolist(), values.tolist(), strict=True)]
            written[key] = orjson.Fragment(orjson.dumps(pairs))
        result.append({"metric": labels, "values": written[key]})
    return {"resultType": "matrix", "result": result}


def read(server: Server, url: str = "http://p", **options: Any) -> tuple[SeriesSet, list[str]]:
    options.setdefault("sleep", lambda _: None)
    options.setdefault("wall", lambda: server.now)
    with httpx.Client(transport=httpx.MockTransport(server)) as client:
        return query_prometheus(url, client=client, **options)


def refused(server: Server, url: str = "http://p", **options: Any) -> TuningError:
    with pytest.raises(TuningError) as caught:
        read(server, url, **{"window_s": 600, **options})
    assert caught.value.hint
    return caught.value


def steadily(per_scrape: float, first: float, until: float, every: float = 60.0, start: float = 0.0) -> tuple[Any, Any]:
    """Times and values of a counter that grows evenly."""
    times = np.arange(first, until + 1e-6, every)
    return times, start + per_scrape * np.arange(len(times))


def small(**more: Any) -> Server:
    """One router, an hour of scrapes each 15 s, a turn each."""
    server = Server(**more)
    server.add(TURNS, *steadily(1, NOW - 3600, NOW, 15.0), outcome="hit")
    server.add("kvtune_router_setting", *steadily(0, NOW - 3600, NOW, 15.0, 480.0), setting="default_ttl_seconds")
    return server


# --- what is read ---------------------------------------------------------------------------------------------------


def test_prometheus_gives_the_advice_that_its_snapshots_give(snapshots: Snapshots) -> None:
    directory = snapshots(pool=1_500_000, interval=120.0)
    recorded = read_snapshots(directory)
    server = Server(prefix="/prom", now=recorded.window()[1])
    for one in recorded.series:
        server.add(one.name, one.times, one.values, "kvtune", one.target, **dict(one.labels))
    series, queries = read(server, "http://p/prom/", window_s=3600, max_points=25)
    document = suggest_series(series, {"kind": "prometheus", "where": ["http://p"]}, queries=queries, explain=True)
    jsonschema.validate(document, schema())
    direct = suggest_snapshots(directory)
    assert document["recommendations"][0]["recommended"] == pytest.approx(
        direct["recommendations"][0]["recommended"], abs=10
    )
    assert document["evidence"]["turns"] == direct["evidence"]["turns"]
    assert document["evidence"]["targets"]["router"] == ["kvtune/router0"]
    assert document["explain"]["queries"] == queries
    ranges = [form for kind, form in server.asked if kind == "query_range"]
    assert all((float(f["end"]) - float(f["start"])) / float(f["step"]) < 25 for f in ranges)


def test_the_window_ends_by_the_servers_clock() -> None:
    series, _ = read(small(), window_s=600, wall=lambda: NOW + 7200)
    assert series.window() == (NOW - 600, NOW)
    assert series.increase(TURNS) == 40
    assert "this machine's clock is 7200 s ahead of Prometheus', which was used" in series.notes

    def no_instants(kind: str, form: dict[str, str]) -> httpx.Response | None:
        if kind == "query":
            body = {"status": "error", "errorType": "bad_data", "error": "no"}
            return httpx.Response(400, json=body, headers={"date": "Tue, 14 Nov 2023 22:13:20 GMT"})
        return None

    series, _ = read(small(fault=no_instants), window_s=600, wall=lambda: NOW + 7200)
    assert series.window()[1] == NOW, "the Date header tells too"


def test_one_scrape_is_too_few() -> None:
    server = small()
    assert read(server, window_s=10)[0].increase(TURNS) == 1, "the scrape before the window shows what it began with"
    server = Server()
    for name in (TURNS, "kvtune_router_setting"):
        server.add(name, *steadily(1, NOW - 3600, NOW - 20))
    error = refused(server, window_s=30)
    assert error.code == "window_too_short"
    assert error.message == (
        "http://p: a window of 30 s holds only one scrape: counters need two, and targets are scraped each 60 s"
    )
    assert error.hint == "Give a longer --window, 1200s at least."


@pytest.mark.parametrize("every", [15.0, 30.0, 60.0])
def test_the_scrape_interval_decides_on_the_grid(every: float) -> None:
    server = Server()
    server.add(TURNS, *steadily(1, NOW - DAY, NOW, every), outcome="hit")
    server.add("kvtune_router_setting", *steadily(0, NOW - DAY, NOW, every, 1.0), setting="x")
    series, _ = read(server, window_s=3 * 3600)
    assert np.median(np.diff(series.scrapes["router/r:1"])) == every
    assert series.increase(TURNS) == 3 * 3600 / every


# --- increments -----------------------------------------------------------------------------------------------------


def month(*stretches: tuple[float, float], per_scrape: float = 3.0) -> tuple[Any, Any, float]:
    """A counter over 30 days that begins from zero at the start of each stretch (days before the end), and its growth.

    It is scraped each minute; the first stretch begins before the window.
    """
    parts = [steadily(per_scrape, NOW - begin * DAY, NOW - end * DAY) for begin, end in stretches]
    grown = sum(per_scrape * (len(times) - 1) for times, _ in parts)
    return np.concatenate([t for t, _ in parts]), np.concatenate([v for _, v in parts]), grown


def test_nothing_is_lost_at_restarts_that_a_coarse_grid_does_not_see() -> None:
    """Restarts half a step after a point, and one after which the counter overtakes what it was."""
    server = Server()
    half = 0.5 / 24
    times, values, grown = month((30, 20 + half), (20 + half - 1 / 1440, 10 + half), (10 + half - 1 / 1440, 0))
    server.add(TURNS, times, values, outcome="hit")
    server.add(ENDS, times, values)
    server.add("kvtune_router_setting", times, np.ones(len(times)), setting="x")
    series, queries = read(server, window_s=30 * DAY)
    step = float(np.median(np.diff(series.scrapes["router/r:1"])))
    assert step == 3600
    assert series.increase(TURNS) == series.increase(ENDS) == grown
    assert [len(s.resets()) for s in series.named(TURNS)] == [2]
    assert sum(server.returned) < 3 * 721 * 2, "no finer where nothing happens"
    raw = [query for query in queries if query.partition("  #")[0].endswith("]")]
    assert len(raw) == 2


def test_a_counter_that_overtakes_what_it_was_within_a_step_was_still_reset() -> None:
    server = Server()
    times = np.arange(NOW - 10 * DAY, NOW + 1, 60.0)
    values = np.where(times < NOW - 5 * DAY + 1200, 10.0, 10_000.0)
    values[np.searchsorted(times, NOW - 5 * DAY + 1200)] = 2.0
    server.add(TURNS, times, values, outcome="hit")
    server.add("kvtune_router_setting", times, np.ones(len(times)), setting="x")
    series, _ = read(server, window_s=10 * DAY, step_s=3600.0)
    assert series.increase(TURNS) == 2 + 9998


def test_pods_that_come_and_go_count_what_was_seen_of_them() -> None:
    """One ends, one comes from nowhere with a history, one is born, one lives within a step of the grid."""
    server = Server()
    lives = {
        "old:1": (NOW - 40 * DAY, NOW - 15.013 * DAY, 0.0, None),
        "history:1": (NOW - 12.017 * DAY, NOW, 5000.0, NOW - 50 * DAY),
        "born:1": (NOW - 10.02 * DAY, NOW, 7.0, NOW - 10.02 * DAY - 45),
        "unknown:1": (NOW - 9.02 * DAY, NOW, 9.0, None),
        "brief:1": (NOW - 5.03 * DAY, NOW - 5.03 * DAY + 1200, 4.0, None),
    }
    expected = {}
    for instance, (first, last, start, began) in lives.items():
        times, values = steadily(1, first, last, start=start)
        server.add(TURNS, times, values, instance=instance, outcome="hit")
        server.add("kvtune_router_setting", times, np.ones(len(times)), instance=instance, setting="x")
        if began is not None:
            server.add("process_start_time_seconds", times, np.full(len(times), began), instance=instance)
        since = max(first, NOW - 30 * DAY)
        expected[f"router/{instance}"] = np.floor((last - since) / 60)
    expected["router/born:1"] += 7
    series, _ = read(server, window_s=30 * DAY)
    found = {target: series.increase(TURNS, lambda s, t=target: s.target == t) for target in expected}
    assert found == pytest.approx(expected, abs=1), "of `old` the first sample of the window may be a minute late"
    assert found["router/history:1"] < 20_000


def test_a_rolling_restart_of_a_fleet_is_narrowed_down() -> None:
    """Two hundred engines restart within an hour, in a grid of hours: raw samples of minutes are enough."""
    server = Server()
    expected = 0.0
    for number in range(200):
        since = NOW - 5 * DAY + 18 * number
        times = np.arange(NOW - 10 * DAY, NOW + 1, 60.0)
        ran = np.where(times < since, times - times[0], times - since) // 60
        for k in range(5):
            server.add(TURNS, times, ran * (k + 1), "decode", f"d{number}:1", outcome=str(k))
            expected += (k + 1) * (ran[times < since][-1] + ran[-1])
    server.add("kvtune_router_setting", times, times * 0 + 1, setting="x")
    series, queries = read(server, window_s=10 * DAY, step_s=6 * 3600.0)
    assert series.increase(TURNS) == expected
    raw = [query for query in queries if query.partition("  #")[0].endswith("s]")][1:]
    assert 0 < len(raw) < 30
    points = [int(re.search(r"([\d,]+) points", query)[1].replace(",", "")) for query in raw]  # type: ignore[index]
    assert sum(points) < 30 * 1000 and series.notes == ()


def test_a_child_that_comes_within_the_life_of_its_target_began_from_zero() -> None:
    server = small()
    server.add(TURNS, *steadily(0, NOW - 300, NOW, 15.0, 6.0), outcome="error")
    series, _ = read(server, window_s=1800)
    assert series.increase(TURNS, outcome="error") == 6


# --- read twice -----------------------------------------------------------------------------------------------------


def engine(server: Server, instance: str = "d:1", *, lag: float = 0.0, gaps: tuple[tuple[float, float], ...] = (),
           rate: float = 10.0, **more: str) -> None:  # fmt: skip
    """An engine that is scraped each 30 s for six hours, `lag` seconds after the full ones, but not in `gaps`."""
    times = np.arange(NOW - 6 * 3600, NOW + 1, 30.0) + lag
    times = times[times <= NOW]
    kept = np.ones(len(times), bool)
    for begin, end in gaps:
        kept &= ~((times >= NOW - begin) & (times < NOW - end))
    own = {"model_name": "m", "engine": "0", "role": "decode", **more}
    since = times - (NOW - 6 * 3600)
    values = np.floor(np.where(times < NOW - 3 * 3600, since, times - (NOW - 3 * 3600)) * rate)
    server.add("kvtune_retention_tokens_total", times[kept], values[kept], "decode", instance, **own)
    settings = np.full(int(kept.sum()), 480.0)
    server.add("kvtune_connector_setting", times[kept], settings, "decode", instance, **own, setting="ttl")


TOKENS = "kvtune_retention_tokens_total"
GROWN = (3 * 3600 - 30 + 3 * 3600) * 10.0
"""By an engine in six hours: it restarts halfway, and what it did since its last scrape before that nobody saw."""


@pytest.mark.parametrize("window_s", [6 * 3600, 5.5 * 3600])
def test_replicas_of_prometheus_count_once(window_s: float) -> None:
    server = Server()
    engine(server, prometheus_replica="a", gaps=((5 * 3600, 4 * 3600),))
    engine(server, prometheus_replica="b", lag=11.0, gaps=((2 * 3600, 3600), (600, 500)))
    series, _ = read(server, window_s=window_s)
    assert list(series.scrapes) == ["decode/d:1"]
    assert series.increase(TOKENS) == pytest.approx(GROWN - 10 * (6 * 3600 - window_s), abs=300)
    assert [len(s.resets()) for s in series.named(TOKENS)] == [1]
    longest = float(np.max(np.diff(series.scrapes["decode/d:1"])))
    assert longest <= 120, "gaps are filled from the other"
    assert series.notes == (
        "1 target(s) were scraped by more than one Prometheus (label prometheus_replica): each series counts once, "
        "from the one with the most samples, gaps filled from the others",
    )


def test_a_label_can_be_named_as_that_of_replicas() -> None:
    server = Server()
    engine(server, scraper="a")
    engine(server, scraper="b", lag=7.0)
    series, _ = read(server, window_s=6 * 3600)
    assert sorted(series.scrapes) == ["decode/d:1{scraper=a}", "decode/d:1{scraper=b}"]
    assert any("--replica-label scraper" in note for note in series.notes)
    series, _ = read(server, window_s=6 * 3600, replica_labels=["scraper"])
    assert list(series.scrapes) == ["decode/d:1"] and series.increase(TOKENS) == pytest.approx(GROWN, abs=300)


def test_the_same_address_in_two_clusters_is_two_engines() -> None:
    """Also where only a label tells them apart that usually marks replicas."""
    for label in ("cluster", "prometheus"):
        server = Server()
        engine(server, rate=10.0, **{label: "east"})
        engine(server, rate=90.0, **{label: "west"})
        series, _ = read(server, window_s=6 * 3600)
        assert sorted(series.scrapes) == [f"decode/d:1{{{label}={where}}}" for where in ("east", "west")]
        assert series.increase(TOKENS) == pytest.approx(10 * GROWN, rel=0.01) and series.notes == ()


def test_a_target_under_two_jobs_counts_once() -> None:
    server = Server()
    engine(server)
    twice = Server()
    engine(twice, lag=4.0)
    for labels, times, values in twice.rows:
        server.rows.append(({**labels, "job": "podmonitor", "pod": "d-0"}, times, values))
    engine(server, "d:2")
    series, _ = read(server, window_s=6 * 3600)
    assert sorted(series.scrapes) == ["decode/d:1", "decode/d:2"]
    assert series.increase(TOKENS) == pytest.approx(2 * GROWN, abs=600)
    assert series.notes == (
        "1 target(s) were scraped by more than one job (decode and podmonitor): same address, same values; each series "
        "counts once",
    )


def test_new_labels_of_a_pod_are_no_new_engine() -> None:
    server = Server()
    engine(server, gaps=((3 * 3600 + 600, -1),), node="a")
    engine(server, gaps=((6 * 3600 + 1, 3 * 3600 + 600),), node="b")
    series, _ = read(server, window_s=6 * 3600)
    assert list(series.scrapes) == ["decode/d:1"] and series.increase(TOKENS) == GROWN


def test_labels_that_a_scrape_renamed_are_found() -> None:
    server = Server()
    engine(server, exported_role="decode", role="gpu")
    series, _ = read(server, window_s=3600)
    assert {one.label("role") for one in series.series} == {"decode"}


@pytest.mark.parametrize(
    ("base", "other", "merged"),
    [
        ([(0, 10), (40, 50)], [(20, 29), (30, 38)], [10, 29, 38, 50]),
        ([(0, 10), (40, 50)], [(0, 9), (20, 9.5)], [10, 10, 50]),
        ([(0, 10), (40, 50)], [(20, 51)], [10, 50, 50]),
        ([(0, 100), (40, 50)], [(10, 120), (20, 130), (30, 5)], [100, 120, 130, 5, 50]),
        ([(0, 100), (40, 150)], [(0, 99), (10, 120), (20, 3), (30, 40)], [100, 120, 3, 40, 150]),
        ([(0, 100)], [(0, 99), (10, 99.5), (20, 130)], [100, 100, 130]),
        ([(20, 100)], [(0, 70), (10, 101)], [70, 100, 100]),
        ([(20, 3), (30, 5)], [(0, 70), (10, 80)], [70, 80, 3, 5]),
    ],
)  # fmt: skip
def test_gaps_are_filled_without_a_reset_that_was_none(base: Any, other: Any, merged: list[float]) -> None:
    points = [tuple(np.asarray(pairs, float).T) for pairs in (base, other)]
    _, values = filled(points[0], points[1], counter=True)  # type: ignore[arg-type]
    assert values.tolist() == merged


# --- what is not as it should be ------------------------------------------------------------------------------------


def test_a_gauge_that_is_named_like_a_counter_is_left_out() -> None:
    server = small()
    wave = 100 + 30 * np.sin(np.arange(241))
    server.add(ENDS, np.arange(NOW - 3600, NOW + 1, 15.0), wave)
    series, _ = read(server, window_s=3600)
    assert series.named(ENDS) == [] and series.increase(TURNS) == 240
    assert f"1 series of {ENDS} go up and down, no counter does; they were left out" in series.notes


def test_histograms_without_buckets_are_named() -> None:
    server = small()
    server.add(ENDS, *steadily(1, NOW - 3600, NOW, 15.0))
    series, _ = read(server, window_s=3600)
    assert any("kvtune_turn_gap_seconds_bucket is missing" in note for note in series.notes)


def test_native_histograms_are_named() -> None:
    def native(kind: str, form: dict[str, str]) -> httpx.Response | None:
        if kind != "query_range" or "__name__" not in form["query"] or "count by" in form["query"]:
            return None
        body = json.loads(server.answer(kind, form).content)
        metric = {"__name__": "kvtune_turn_ttft_seconds_count", "job": "router", "instance": "r:1"}
        body["data"]["result"].append({"metric": metric, "histograms": [[NOW, {"count": "3"}]]})
        return httpx.Response(200, json=body)

    server = small(fault=native)
    series, _ = read(server, window_s=3600)
    assert series.increase(TURNS) == 240
    assert any("kvtune_turn_ttft_seconds_count is a native histogram" in note for note in series.notes)


def test_values_that_are_no_numbers_are_dropped() -> None:
    server = small()
    times, values = steadily(1, NOW - 3600, NOW, 15.0)
    values[[3, 8]] = np.nan
    values[20] = np.inf
    server.add(ENDS, times, values)
    read(server, window_s=3600)

    def odd(kind: str, form: dict[str, str]) -> httpx.Response:
        if "timestamp" in form["query"]:
            return error_of(400, "no")
        rows = [{"metric": {"instance": "a"}, "values": [[NOW - 31, "NaN"], [NOW - 16, "+Inf"], [NOW - 1, "3"],
                                                         [NOW, "3"]]}]  # fmt: skip
        return httpx.Response(200, json={"status": "success", "data": {"resultType": "matrix", "result": rows}})

    series, _ = read(Server(fault=odd), window_s=60, end_unix_s=NOW)
    assert series.not_finite > 0
    assert all(np.isfinite(s.values).all() for s in series.series)


# --- budgets --------------------------------------------------------------------------------------------------------


def fleet(engines: int, per_engine: int, days: float = 30.0, every: float = 3600.0) -> Server:
    """Counters of a fleet: `per_engine` series each."""
    server = Server()
    times, values = steadily(5, NOW - days * DAY, NOW, every)
    for number in range(engines):
        for k in range(per_engine):
            server.add(
                TOKENS, times, values, "decode", f"d{number}:1", model_name="m", engine=str(k), role="decode",
            )  # fmt: skip
    return server


def test_a_large_fleet_is_read_within_the_budget() -> None:
    """3000 series over 30 days, 720 points each."""
    server = fleet(200, 15)
    series, queries = read(server, window_s=30 * DAY)
    assert len(series.series) == 3000 and len(series.scrapes) == 200
    assert series.samples() == 3000 * 721
    assert series.increase(TOKENS) == 3000 * 720 * 5
    kinds = [form["query"].split("(")[0] for _, form in server.asked]
    assert len(server.asked) <= 20, kinds
    assert max(server.returned) <= 250_000
    assert sum(server.returned) <= 3000 * 721 + 3000 * 25
    assert re.search(r"in all \d+ requests, 2,163,0\d\d points of at most 10,000,000, one each 3600 s", queries[0])


def test_a_larger_one_is_read_more_coarsely_and_too_large_a_one_refused() -> None:
    server = fleet(50, 20, days=2.0, every=120.0)
    series, _ = read(server, window_s=2 * DAY, max_total=400_000)
    assert 100 < len(series.series[0].times) <= 201
    assert sum(server.returned) <= 400_000
    assert series.increase(TOKENS) == 1000 * 1440 * 5
    error = refused(server, window_s=2 * DAY, max_total=50_000)
    assert error.code == "too_many_samples" and "50,000" in error.message and "--matcher" in error.hint
    assert error.message == "http://p: 60,000 samples, more than the 50,000 that are read at once"


def test_a_server_that_cannot_be_planned_with_is_still_stopped_at_the_budget() -> None:
    server = fleet(50, 20, days=1.0, every=300.0)
    server.fault = lambda kind, form: error_of(400, "no such function") if "count by" in form["query"] else None
    assert refused(server, window_s=DAY, max_total=100_000).code == "too_many_samples"


def test_several_names_come_in_one_answer_and_alone_where_they_may_not() -> None:
    server = small()
    read(server, window_s=3600)
    together = [form["query"] for kind, form in server.asked if kind == "query_range" and form["query"][0] == "{"]
    assert together == ['{__name__=~"kvtune_router_setting|kvtune_turns_total"}']

    def no_regex(_: str, form: dict[str, str]) -> httpx.Response | None:
        return error_of(400, "regular expressions on __name__ are disabled") if "=~" in form["query"] else None

    for fault in (no_regex, strip_names):
        server = small(fault=fault)
        if fault is strip_names:
            server.fault = lambda kind, form, server=server: strip_names(server, kind, form)
        series, _ = read(server, window_s=3600, end_unix_s=NOW)
        assert series.increase(TURNS) == 240


def strip_names(server: Server, kind: str, form: dict[str, str]) -> httpx.Response:
    """What a server does that drops the names of what several are asked for."""
    body = json.loads(server.answer(kind, form).content)
    if form["query"].startswith("{__name__=~"):
        for row in body["data"]["result"]:
            row["metric"].pop("__name__")
    return httpx.Response(200, json=body)


def error_of(status: int, words: str, kind: str = "execution") -> httpx.Response:
    return httpx.Response(status, json={"status": "error", "errorType": kind, "error": words})


@pytest.mark.parametrize(
    "refusal",
    [
        error_of(422, "query processing would load too many samples into memory in query execution"),
        error_of(400, "exceeded maximum resolution of 11,000 points per timeseries", "bad_data"),
        error_of(503, "query timed out in expression evaluation", "timeout"),
        httpx.Response(504, text="<html>gateway</html>"),
        httpx.Response(413, text="too large"),
    ],
    ids=["422", "400", "503", "504", "413"],
)
def test_what_is_too_much_at_once_is_asked_for_in_parts(refusal: httpx.Response) -> None:
    def most(kind: str, form: dict[str, str]) -> httpx.Response | None:
        if kind != "query_range" or "count by" in form["query"]:
            return None
        points = (float(form["end"]) - float(form["start"])) / float(form["step"]) + 1
        return refusal if points > 100 else None

    server = small(fault=most)
    series, _ = read(server, window_s=3600)
    assert series.increase(TURNS) == 240
    refusals = sum(most(kind, form) is not None for kind, form in server.asked)
    assert refusals <= 4, "what was learnt is kept to"


def test_there_is_a_floor_to_asking_for_less() -> None:
    def never(kind: str, form: dict[str, str]) -> httpx.Response | None:
        return None if form["query"] == "time()" else error_of(422, "too many samples")

    server = small(fault=never)
    error = refused(server)
    assert error.code == "prometheus_error" and "execution: too many samples" in error.message
    assert "--matcher" in error.hint and len(server.asked) < 20


def test_an_answer_without_end_is_not_read_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtune_tuning.promapi.MAX_ANSWER_BYTES", 2**20)

    def bomb(kind: str, form: dict[str, str]) -> httpx.Response:
        return httpx.Response(200, content=gzip.compress(b" " * 2**22), headers={"content-encoding": "gzip"})

    server = small(fault=bomb)
    error = refused(server, end_unix_s=NOW)
    assert error.code == "answer_too_large" and "more than 1 MiB" in error.message


# --- dialects and refusals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("p:9090", "/api/v1/query"),
        ("http://p/", "/api/v1/query"),
        ("https://m/prometheus", "/prometheus/api/v1/query"),
        ("https://m/prometheus/api/v1", "/prometheus/api/v1/query"),
        ("https://m/prometheus/api/v1/", "/prometheus/api/v1/query"),
        ("http://vm/select/0/prometheus?extra_label=a%3Db&extra_label=c%3Dd", "/select/0/prometheus/api/v1/query"),
    ],
)
def test_addresses(url: str, path: str) -> None:
    server = small(prefix=path.removesuffix("/api/v1/query"))
    series, _ = read(server, url, window_s=600)
    assert series.increase(TURNS) == 40
    assert server.requests[0].url.path == path
    if "?" in url:
        sent = [parse_qs(request.content.decode()).get("extra_label") for request in server.requests]
        assert sent == [["a=b", "c=d"]] * len(sent)


@pytest.mark.parametrize("url", [
    "", "ftp://p", "http://", "http://p:port", "file:///etc/passwd", "http://u:pw@", "http://[::1", "http://u:pw@[bad",
    "http://a..b", "http://.foo", f"http://{70 * 'a'}", "http://xn--a", "[::1",
])  # fmt: skip
def test_what_is_no_address(url: str) -> None:
    error = refused(small(), url)
    assert isinstance(error, UsageError) and error.code == "bad_url" and "pw" not in error.message


def test_everything_that_logs_in_is_sent_and_nothing_of_it_is_said(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    server = small()
    read(server, window_s=600, access=Access(headers=["X-Scope-OrgID: team-a", "X-Empty:"]))
    assert {r.headers["x-scope-orgid"] for r in server.requests} == {"team-a"}
    server = small()
    read(server, window_s=600, access=Access(bearer_token_file=tmp_path / "token"))
    assert {r.headers["authorization"] for r in server.requests} == {"Bearer s3cret"}
    server = small()
    series, queries = read(server, "http://me:p%40ss@p", window_s=600)
    assert {r.headers["authorization"] for r in server.requests} == {"Basic bWU6cEBzcw=="}
    assert "p@ss" not in str((series.notes, queries)) and "p%40ss" not in str((series.notes, queries))
    error = refused(Server(fault=lambda *_: httpx.Response(401)), "http://me:hunter2@p")
    assert "hunter2" not in error.message + error.hint


@pytest.mark.parametrize(
    ("access", "url", "code", "words"),
    [
        ({"headers": ["X-Scope-OrgID team"]}, "http://p", "bad_header", "'Name: value'"),
        ({"headers": ["A: b\r\nC: d"]}, "http://p", "bad_header", "printable ASCII"),
        ({"headers": [": s3cret"]}, "http://p", "bad_header", "'Name: value'"),
        ({"bearer_token_file": "none"}, "http://p", "bad_file", "none: No such file"),
        ({"bearer_token_file": "empty"}, "http://p", "bad_file", "empty: it is empty; it must hold one token"),
        ({"bearer_token_file": "token"}, "http://u:s3cret@p", "two_logins", "--bearer-token-file and user:password"),
        ({"headers": ["authorization: s3cret"]}, "u:s3cret@p", "two_logins", "--header Authorization and user"),
        ({"ca_file": "token"}, "https://p", "bad_file", "--ca-file"),
        ({"ca_file": "none"}, "https://p", "bad_file", "No such file"),
        ({"client_cert": "token"}, "https://p", "bad_file", "--client-cert"),
        ({"client_key": "token"}, "https://p", "contradiction", "--client-key without --client-cert"),
        ({"insecure": True, "ca_file": "token"}, "https://p", "contradiction", "--insecure-skip-verify"),
    ],
)
def test_options_that_cannot_be_used(tmp_path: Path, access: dict[str, Any], url: str, code: str, words: str) -> None:
    (tmp_path / "token").write_text("s3cret")
    (tmp_path / "empty").write_text(" \n")
    paths = {key: tmp_path / value if isinstance(value, str) else value for key, value in access.items()}
    error = refused(small(), url, access=Access(**paths))
    assert isinstance(error, UsageError) and error.code == code and words in error.message
    assert "s3cret" not in error.message + error.hint


@pytest.mark.parametrize(
    ("answer", "code", "words", "hint"),
    [
        (httpx.Response(401, text="no org id"), "http_status", "HTTP 401", "X-Scope-OrgID"),
        (httpx.Response(401, text="<html>sign in</html>"), "http_status", "HTTP 401", "--bearer-token-file"),
        (httpx.Response(403, text="no"), "http_status", "HTTP 403 (not allowed)", "--header"),
        (httpx.Response(404, text="404 page not found"), "http_status", "HTTP 404", "/prometheus"),
        (httpx.Response(500, text="oops"), "http_status", "HTTP 500", "HTTP API"),
        (httpx.Response(200, text="<!doctype html><html>"), "bad_answer", "web page", "log in"),
        (httpx.Response(200, text="{}"), "bad_answer", "not Prometheus' JSON", "path prefix"),
        (httpx.Response(200, json={"status": "success"}), "bad_answer", "shape", "Prometheus"),
        (httpx.Response(200, json={"status": "success", "data": {"resultType": "vector", "result": []}}),
         "bad_answer", "shape", "Prometheus"),
        (httpx.Response(200, json={"status": "success", "data": {"resultType": "matrix", "result": [{"metric": 3}]}}),
         "bad_answer", "shape", "Prometheus"),
        (httpx.Response(200, json={"status": "success", "data": {"resultType": "matrix", "result": []}}),
         "no_series", "none of the needed series in the last 600 s", "--window"),
        (error_of(400, "boom", "bad_data"), "prometheus_error", "bad_data: boom", "refused"),
        (httpx.Response(302, headers={"location": "https://sso/login?next=x"}), "redirected",
         "redirects to https://sso/login", "login page"),
        (httpx.Response(302, headers={"location": "/login"}), "redirected", "redirects to http://p/login", "log in"),
        (httpx.Response(307, headers={"location": "http://evil/api/v1/query"}), "redirected", "http://evil", "server"),
        (httpx.Response(302), "http_status", "HTTP 302", "HTTP API"),
        (httpx.Response(304), "http_status", "HTTP 304", "HTTP API"),
        (httpx.Response(302, headers={"location": "http://[bad/api/v1/query"}), "redirected", "no address", "API"),
        (httpx.Response(429, headers={"retry-after": b"\xb2"}), "busy", "HTTP 429", "later"),
        (httpx.Response(429, headers={"retry-after": 5000 * "9"}), "busy", "HTTP 429", "later"),
        (httpx.Response(429, headers={"retry-after": "Mon, 99 Jan 999999999999 00:00:00 GMT"}), "busy", "429", "later"),
        (httpx.Response(500, headers={"date": "Mon, 99 Jan 99999999 99:00:00 GMT"}), "http_status", "HTTP 500", "API"),
        (UnicodeError("label too long"), "unreachable", "label too long", "up"),
        (httpx.ConnectError("refused"), "unreachable", "refused", "up"),
        (httpx.ConnectTimeout("slow"), "unreachable", "slow", "up"),
        (httpx.ReadTimeout("slow"), "timeout", "no answer in time (slow)", "--timeout"),
        (httpx.ReadTimeout(""), "timeout", "no answer in time (ReadTimeout)", "--timeout"),
        (httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] x"), "unreachable", "VERIFY", "--ca-file"),
        (httpx.ReadError("tlsv13 alert certificate required"), "unreachable", "certificate required", "--client-cert"),
    ],
)  # fmt: skip
def test_refusals_say_what_to_do(answer: httpx.Response | Exception, code: str, words: str, hint: str) -> None:
    error = refused(Server(fault=lambda *_: answer))
    assert (error.code, error.message.startswith("http://p: ")) == (code, True)
    assert words in error.message and hint in error.hint


def test_a_redirect_on_the_same_host_is_followed_with_all_that_was_sent() -> None:
    def to_https(request: httpx.Request) -> httpx.Response:
        if request.url.scheme == "http":
            return httpx.Response(301, headers={"location": str(request.url.copy_with(scheme="https"))})
        return server(request)

    server = small()
    with httpx.Client(transport=httpx.MockTransport(to_https)) as client:
        series, _ = query_prometheus(
            "http://me:pw@p", window_s=600, client=client, access=Access(headers=["X-Scope-OrgID: a"])
        )
    assert series.increase(TURNS) == 40
    assert {(r.method, r.headers["x-scope-orgid"], r.headers["authorization"][:5]) for r in server.requests} == {
        ("POST", "a", "Basic")
    }


def test_a_server_that_only_takes_gets_gets_gets() -> None:
    def no_post(request: httpx.Request) -> httpx.Response:
        return httpx.Response(405) if request.method == "POST" else server(request)

    server = small()
    with httpx.Client(transport=httpx.MockTransport(no_post)) as client:
        series, _ = query_prometheus("http://p", window_s=600, client=client)
    assert series.increase(TURNS) == 40
    assert {form.get("nocache") for kind, form in server.asked if kind == "query_range"} == {"1"}, "VictoriaMetrics"


@pytest.mark.parametrize("status", [429, 502, 503])
def test_a_busy_server_is_asked_again_but_not_for_ever(status: int) -> None:
    waits: list[float] = []
    calls = 0

    def busy(kind: str, form: dict[str, str]) -> httpx.Response | None:
        nonlocal calls
        calls += 1
        return httpx.Response(status, headers={"retry-after": "7"} if calls == 1 else {}) if calls < 3 else None

    series, _ = read(small(fault=busy), window_s=600, sleep=waits.append)
    assert series.increase(TURNS) == 40 and waits == [7.0, 1.0]
    waits.clear()
    error = refused(Server(fault=lambda *_: httpx.Response(status)), sleep=waits.append)
    assert error.code == "busy" and f"HTTP {status}" in error.message and len(waits) == TRIES - 1 and sum(waits) < 10
    waits.clear()
    slow = httpx.Response(status, headers={"retry-after": "3600"})
    error = refused(Server(fault=lambda *_: slow), sleep=waits.append)
    assert error.code == "busy" and "asked again after 3600" in error.message and waits == []


def test_a_connection_that_breaks_off_is_taken_up_again() -> None:
    calls = 0

    def breaks(kind: str, form: dict[str, str]) -> Exception | None:
        nonlocal calls
        calls += 1
        return httpx.RemoteProtocolError("peer closed") if calls == 3 else None

    series, _ = read(small(fault=breaks), window_s=600)
    assert series.increase(TURNS) == 40


def test_warnings_and_partial_answers_are_said_once() -> None:
    def partly(kind: str, form: dict[str, str]) -> httpx.Response:
        body = json.loads(server.answer(kind, form).content)
        return httpx.Response(200, json={**body, "isPartial": True, "warnings": ["store x is down"], "infos": None})

    server = small(fault=partly)
    series, _ = read(server, window_s=600)
    assert series.notes[0] == "Prometheus: store x is down" and "partial" in series.notes[1] and len(series.notes) == 2


@pytest.mark.parametrize(("said", "note"), [(5, None), (True, None), ("abc", "Prometheus: abc"), ({"a": 1}, None)])
def test_warnings_that_are_no_list(said: Any, note: str | None) -> None:
    def odd(kind: str, form: dict[str, str]) -> httpx.Response:
        return httpx.Response(200, json={**json.loads(server.answer(kind, form).content), "warnings": said})

    server = small(fault=odd)
    series, _ = read(server, window_s=600)
    assert series.increase(TURNS) == 40 and series.notes == ((note,) if note else ())


@pytest.mark.parametrize("count", ["NaN", "+Inf", "-Inf", "x"])
def test_counts_that_are_no_numbers_are_not_planned_with(count: str) -> None:
    def odd(kind: str, form: dict[str, str]) -> httpx.Response | None:
        if not form["query"].startswith("count by"):
            return None
        row = {"metric": {"__name__": TURNS}, "values": [[NOW, count]]}
        return httpx.Response(200, json={"status": "success", "data": {"resultType": "matrix", "result": [row]}})

    assert read(small(fault=odd), window_s=600)[0].increase(TURNS) == 40


@pytest.mark.parametrize("told", ["NaN", "1e300", "-5", "Infinity"])
def test_a_server_without_a_sane_clock_is_read_by_our_own(told: str) -> None:
    def odd(kind: str, form: dict[str, str]) -> httpx.Response | None:
        if form["query"] != "time()":
            return None
        return httpx.Response(200, json={"status": "success", "data": {"resultType": "scalar", "result": [told, told]}})

    assert read(small(fault=odd), window_s=600)[0].window() == (NOW - 600, NOW)


def test_samples_of_no_time_are_no_answer() -> None:
    server = Server()
    server.add(TURNS, [NOW - 30, NOW], [1, 2])

    def odd(kind: str, form: dict[str, str]) -> httpx.Response:
        row = {"metric": {"__name__": TURNS}, "values": [[1e300, "1"]]}
        return httpx.Response(200, json={"status": "success", "data": {"resultType": "matrix", "result": [row]}})

    server.fault = odd
    assert refused(server).code == "bad_answer"


# --- a body that does not end ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("headers", [True, False])
def test_a_body_that_drips_is_given_up(headers: bool) -> None:
    """Each byte comes in time, the whole never does; also where a connection is used again."""
    stopped = threading.Event()

    class Drip(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        asked = 0

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            Drip.asked += 1
            if Drip.asked == 1:
                body = b'{"status":"success","data":{"resultType":"scalar","result":[1700000000,"1700000000"]}}'
                self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
                return
            self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n" + (b"\r\n" if headers else b"x: "))
            with contextlib.suppress(OSError):
                while not stopped.wait(0.02):
                    self.wfile.write(b" ")
            self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Drip) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with pytest.raises(TuningError) as caught:
                query_prometheus(
                    f"http://127.0.0.1:{server.server_port}",
                    window_s=600,
                    access=Access(timeout_s=0.2),
                    wall=lambda: NOW,
                )
        finally:
            stopped.set()
            server.shutdown()
    assert (caught.value.code, caught.value.message.partition(": ")[2]) == (
        "timeout", "no answer in time (no whole answer within 0.2 s)",
    )  # fmt: skip


# --- both spellings of vLLM's names ---------------------------------------------------------------------------------

PROMPTS = "vllm:prompt_tokens_total"
WAITING = "vllm:num_requests_waiting"


def stock(*spelt: Callable[[str], str], restart: bool = False, days: float = 0.25) -> Server:
    """An engine whose names are stored as each of `spelt` says, all of the time; ten tokens a scrape."""
    server = Server()
    times, values = steadily(10, NOW - days * DAY, NOW, 30.0)
    if restart:
        half = len(times) // 2
        values = np.concatenate((values[:half], values[: len(values) - half]))
    own = {"model_name": "m", "engine": "0"}
    for how in spelt:
        server.add(how(PROMPTS), times, values, "vllm", "d:1", **own)
        server.add(how(WAITING), times, np.ones(len(times)), "vllm", "d:1", **own)
    return server


def as_is(name: str) -> str:
    return name


def underscored(name: str) -> str:
    return name.replace(":", "_")


@pytest.mark.parametrize("spelt", [(as_is,), (underscored,), (as_is, underscored)])
@pytest.mark.parametrize("window_s", [3600.0, 5 * DAY])
@pytest.mark.parametrize("restart", [False, True])
def test_names_without_their_colon_are_the_same_series(spelt: Any, window_s: float, restart: bool) -> None:
    days = 6.0 if window_s > DAY else 0.25
    series, _ = read(stock(*spelt, restart=restart and window_s > DAY, days=days), window_s=window_s)
    assert {s.name for s in series.series} == {PROMPTS, WAITING}
    assert len(series.named(PROMPTS)) == 1 and list(series.scrapes) == ["vllm/d:1"]
    lost = 10 if restart and window_s > DAY else 0
    assert series.increase(PROMPTS) == 10 * window_s / 30 - lost


def test_an_upgrade_that_changes_the_spelling_is_no_new_engine() -> None:
    server = stock(as_is)
    old = [(labels, times[times < NOW - 1800], values[times < NOW - 1800]) for labels, times, values in server.rows]
    new = [
        (
            {**labels, "__name__": underscored(labels["__name__"])},
            times[times >= NOW - 1800],
            values[times >= NOW - 1800],
        )
        for labels, times, values in server.rows
    ]
    server.rows = old + new
    series, _ = read(server, window_s=3600)
    assert series.increase(PROMPTS) == 1200 and len(series.named(PROMPTS)) == 1


# --- windows that are not filled ------------------------------------------------------------------------------------


def recent(hours: float, ended_s: float = 0.0) -> Server:
    """A router that was first scraped some hours ago, and last `ended_s` ago."""
    server = Server()
    at = steadily(1, NOW - hours * 3600, NOW - ended_s, 15.0)
    server.add(TURNS, *at, outcome="hit")
    server.add("kvtune_router_setting", at[0], np.full(len(at[0]), 480.0), setting="default_ttl_seconds")
    return server


@pytest.mark.parametrize(("window_s", "asked"), [(DAY, "24 h"), (7 * DAY, "7 d"), (30 * DAY, "30 d")])
def test_a_window_that_is_not_filled_is_read_as_finely_as_what_there_is(window_s: float, asked: str) -> None:
    shorter, _ = read(recent(4), window_s=4 * 3600)
    series, _ = read(recent(4), window_s=window_s)
    assert shorter.notes == () and series.notes == (f"data covers 4 h of the {asked} asked for",)
    assert series.increase(TURNS) == shorter.increase(TURNS) == 960
    assert series.window() == shorter.window() == (NOW - 4 * 3600, NOW)
    assert series.samples() == shorter.samples() == 2 * 961


def test_kvtune_that_is_newer_than_the_engines_decides_on_the_grid() -> None:
    server = recent(4)
    server.rows += stock(as_is, days=30).rows
    series, _ = read(server, window_s=30 * DAY)
    assert series.increase(TURNS) == 960 and series.notes == ("data covers 4 h of the 30 d asked for",)


def test_data_that_ends_before_the_window_is_said_to() -> None:
    series, _ = read(recent(4, 450), window_s=3600)
    assert series.notes == ("data covers 52.5 min of the 1 h asked for", "the newest sample is 7.5 min old: are "
                            "targets still scraped?")  # fmt: skip
    assert series.window()[1] == NOW - 450 and series.increase(TURNS) == 210
    assert read(recent(4, 30), window_s=3600)[0].notes == ()
    router_gone = recent(4, 900)
    router_gone.rows += stock(as_is).rows
    series, _ = read(router_gone, window_s=3600)
    assert series.notes[1] == "the newest sample of kvtune's own series is 15 min old: are targets still scraped?"


@pytest.mark.parametrize(("ended_s", "old"), [(310, "5.2 min"), (420, "7 min"), (3 * 3600, "3 h")])
def test_a_window_after_the_newest_sample_has_no_series(ended_s: float, old: str) -> None:
    error = refused(recent(6, ended_s), window_s=300)
    assert error.code == "no_series" and error.code in NOT_ENOUGH_DATA
    said = re.search(r"the newest sample is ([0-9.]+) (min|h) old", error.message)
    assert said is not None and float(said[1]) == pytest.approx(float(old.split()[0]), abs=0.3)
    assert said[2] == old.split()[1]


def test_what_only_makes_it_more_exact_may_fail() -> None:
    def only_values(kind: str, form: dict[str, str]) -> httpx.Response | None:
        extra = kind == "query" or "timestamp" in form["query"] or "resets" in form["query"]
        return error_of(400, "no") if extra or "count by" in form["query"] else None

    series, _ = read(small(fault=only_values), window_s=600, end_unix_s=NOW)
    assert series.increase(TURNS) == 40
    assert [note.split(" (")[0] for note in series.notes] == [
        "when targets were scraped is not known, times are those of the queries",
        "what was counted just before a restart may be missing",
    ]


# --- matchers -------------------------------------------------------------------------------------------------------


def test_matchers_are_in_every_selector() -> None:
    server = small()
    engine(server, cluster="a")
    engine(server, "d:2", cluster="b")
    for labels, _, _ in server.rows[:2]:
        labels["cluster"] = "a"
    series, queries = read(server, window_s=3600, matchers=['cluster="a"', 'job!~"x|y"'])
    assert sorted(series.scrapes) == ["decode/d:1", "router/r:1"]
    assert all('cluster="a",job!~"x|y"' in query for query in queries[1:])
    error = refused(server, matchers=['cluster="c"'])
    assert error.code == "no_series" and 'matching cluster="c"' in error.message and "--matcher" in error.hint


@pytest.mark.parametrize("text", ['a="b"', " a = 'b' ", 'a=~"b|c\\\\.d"', "a!~`x`", '_a1!=""', 'a="\\"}"'])
def test_matchers(text: str) -> None:
    assert check_matcher(text) == text.strip()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cluster=a", "expected a quoted value at character 9"),
        ('cluster"a"', "expected one of = != =~ !~ at character 8"),
        ('="a"', "expected a label name at character 1"),
        ("", "expected a label name at character 1"),
        ('a="b', "expected a quoted value at character 3"),
        ('a=="b"', "expected a quoted value at character 3"),
        ('a="b",c="d"', "expected the end; repeat --matcher for a second one at character 6"),
        ('a="b"} or vector(1)', "expected the end"),
        ('{a="b"}', "expected a label name at character 1"),
        ('__name__="up"', "the names of series are kvtune's own at character 1"),
        ('a-b="c"', "at character 2"),
    ],
)
def test_what_is_no_matcher(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_matcher(text)
    assert caught.value.code == "bad_matcher" and words in caught.value.message
