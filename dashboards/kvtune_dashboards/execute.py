"""Runs every query of the dashboards against a Prometheus, as Grafana would: `python -m kvtune_dashboards.execute`.

Grafana's macros and variables are filled in by its own rules; what cannot be told from a query's text (that it finds
anything, that its answer is a number) is found out here.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from kvtune_dashboards.lint import label_values, queries
from kvtune_dashboards.rendering import DashboardsError, boards, load

ALL = "$__all"
MAX_POINTS = 1000
"""Points of a range query: a panel's width in pixels, about."""
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_STEPS_S = (
    1, 2, 5, 10, 15, 20, 30, 60, 120, 300, 600, 900, 1200, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 604800,
)  # fmt: skip
"""Lengths that Grafana rounds an interval to."""


@dataclass(frozen=True, slots=True)
class Span:
    """The time range shown, unix seconds."""

    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        """Its length in seconds."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one query of a board."""

    board: str
    where: str
    """Panel, `variable x` or `annotation x`."""
    ref: str
    expr: str
    """As it was sent."""
    series: int = 0
    numbers: int = 0
    """Series with at least one value that is a number."""
    error: str = ""
    warnings: tuple[str, ...] = ()
    labels: frozenset[str] = frozenset()
    """Labels seen on its series."""

    @property
    def verdict(self) -> str:
        """error, empty, NaN (series, but no number in any) or ok."""
        if self.error:
            return "error"
        if not self.series:
            return "empty"
        return "ok" if self.numbers else "NaN"


@dataclass(slots=True)
class Prometheus:
    """The HTTP API of a Prometheus, and how often it scrapes."""

    url: str
    scrape_s: float = 15.0
    """What Grafana's data source is told, where a query has no step of its own."""
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=30))

    def get(self, path: str, **parameters: str | float) -> tuple[Any, str, tuple[str, ...]]:
        """`data`, the error's text (empty for none) and the warnings of an API answer."""
        try:
            answer = self.client.get(f"{self.url.rstrip('/')}/api/v1/{path}", params=parameters)
            body = answer.json()
            if not isinstance(body, dict) or "status" not in body:
                raise ValueError("no status")
        except httpx.HTTPError as error:
            raise DashboardsError(f"{self.url} does not answer: {error}; is a Prometheus there?") from error
        except ValueError as error:
            raise DashboardsError(f"{self.url} does not answer as Prometheus does ({error})") from error
        refusal = "" if body["status"] == "success" else str(body.get("error", "failed"))
        return body.get("data"), refusal, tuple(body.get("warnings", ()))


def interval_s(span: Span, least_s: float, points: int = MAX_POINTS) -> float:
    """`$__interval`: the range over its points, rounded as Grafana does, at least `least_s`."""
    raw = span.length_s / points
    rounded = next((step for step in _STEPS_S if step >= raw), _STEPS_S[-1])
    return max(float(rounded), least_s)


def rate_interval_s(interval: float, scrape_s: float) -> float:
    """`$__rate_interval`: long enough for two scrapes wherever the window falls."""
    return max(interval + scrape_s, 4 * scrape_s)


def expand(expr: str, span: Span, interval: float, scrape_s: float, variables: Mapping[str, str]) -> str:
    """The expression as Grafana sends it: macros, then variables.

    Raises:
        DashboardsError: for a variable that the board does not have.
    """
    macros = {
        "__rate_interval": f"{_milliseconds(rate_interval_s(interval, scrape_s))}ms",
        "__interval_ms": str(_milliseconds(interval)),
        "__interval": f"{_milliseconds(interval)}ms",
        "__range_ms": str(_milliseconds(span.length_s)),
        "__range_s": f"{math.ceil(span.length_s)}",
        "__range": f"{math.ceil(span.length_s)}s",
    }
    known = {**variables, **macros}

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name.isdigit():
            return match[0]
        if name not in known:
            raise DashboardsError(f"no value for ${name} in {expr}")
        return known[name]

    return re.sub(r"\$(?:\{(\w+)(?::\w+)?\}|(\w+))", value, expr)


def chosen(board: Mapping[str, Any], choice: Mapping[str, Sequence[str]] | None = None) -> dict[str, str]:
    """The text of each variable in a query: All becomes its `allValue`, several become `(a|b)`, escaped."""
    found = {}
    for variable in board.get("templating", {}).get("list", ()):
        name = str(variable["name"])
        values = (choice or {}).get(name)
        if values:
            escaped = [re.sub(r"([\\^$.*+?()\[\]{}|])", r"\\\\\1", value) for value in values]
            found[name] = escaped[0] if len(escaped) == 1 else f"({'|'.join(escaped)})"
        else:
            found[name] = str(variable.get("allValue") or "")
    return found


def run(
    board: Mapping[str, Any],
    prometheus: Prometheus,
    span: Span,
    choice: Mapping[str, Sequence[str]] | None = None,
) -> Iterator[Answer]:
    """Run every query of a board: its panels', its annotations' and its variables'."""
    uid = str(board["uid"])
    variables = chosen(board, choice)
    for variable in board.get("templating", {}).get("list", ()):
        if variable.get("type") == "query":
            yield _variable(uid, variable, prometheus, span, variables)
    for query in queries(board):
        target = query.target
        own = target.get("interval") or target.get("step")
        least = max(_length_s(own) if own else prometheus.scrape_s, _least_s(query.panel))
        # Grafana reckons with the query's own step where it has one, else with the data source's.
        scrape = _length_s(own) if own else prometheus.scrape_s
        step = interval_s(span, least)
        expr = expand(query.expr, span, step, scrape, variables)
        if target.get("instant"):
            answer = prometheus.get("query", query=expr, time=span.end_s)
        else:
            # Grafana aligns ranges to the step.
            start, end = (math.floor(edge / step) * step for edge in (span.start_s, span.end_s))
            answer = prometheus.get("query_range", query=expr, start=start, end=end, step=step)
        yield _answered(Answer(uid, query.where, query.ref, expr), *answer)


def _variable(
    uid: str, variable: Mapping[str, Any], prometheus: Prometheus, span: Span, variables: Mapping[str, str]
) -> Answer:
    asked = label_values(str(variable["query"]["query"]))
    where = f"variable {variable['name']}"
    if asked is None:
        raise DashboardsError(f"{uid}: {where} is not label_values(series, label)")
    selector = expand(asked[0], span, prometheus.scrape_s, prometheus.scrape_s, variables)
    wanted: dict[str, str | float] = {"match[]": selector, "start": span.start_s, "end": span.end_s}
    data, error, warnings = prometheus.get(f"label/{asked[1]}/values", **wanted)
    count = len(data or ())
    return Answer(uid, where, asked[1], selector, count, count, error, warnings)


def _answered(asked: Answer, data: Any, error: str, warnings: tuple[str, ...]) -> Answer:
    rows = (data or {}).get("result", ())
    if (data or {}).get("resultType") == "scalar":
        rows = [{"metric": {}, "value": rows}]
    numbers = 0
    labels: set[str] = set()
    for row in rows:
        labels |= set(row["metric"])
        points = row.get("values") or [row["value"]]
        numbers += any(math.isfinite(float(value)) for _, value in points)
    return Answer(
        asked.board, asked.where, asked.ref, asked.expr, len(rows), numbers, error, warnings, frozenset(labels)
    )


def matrix(answers: Sequence[Answer]) -> str:
    """A line a query, and how many of each board ended how."""
    lines = [f"{'board':17} {'panel':52} ref {'series':>6} {'numbers':>7} verdict"]
    for one in answers:
        lines.append(
            f"{one.board:17} {one.where[:52]:52} {one.ref[:3]:3} {one.series:6} {one.numbers:7} {one.verdict}"
            + (f": {one.error}" if one.error else "")
        )
    for uid in dict.fromkeys(one.board for one in answers):
        verdicts = [one.verdict for one in answers if one.board == uid]
        counts = ", ".join(f"{verdicts.count(word)} {word}" for word in ("ok", "empty", "NaN", "error"))
        lines.append(f"{uid}: {len(verdicts)} queries: {counts}")
    return "\n".join(lines)


def _milliseconds(seconds: float) -> int:
    return round(1000 * seconds)


def _length_s(text: str) -> float:
    match = re.fullmatch(r">?(\d+(?:\.\d+)?)(ms|[smhd])", text)
    if match is None:
        raise DashboardsError(f"{text!r} is no length of time; write it like 30s")
    return float(match[1]) * _SECONDS[match[2]]


def _least_s(panel: Mapping[str, Any] | None) -> float:
    own = (panel or {}).get("interval")
    return _length_s(own) if own else 0.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all boards against a Prometheus and print the matrix; 1 if a query errs or gives only NaN."""
    parser = argparse.ArgumentParser(prog="python -m kvtune_dashboards.execute", description=(__doc__ or "").strip())
    parser.add_argument("--prometheus", required=True, metavar="URL", help="address of the Prometheus server")
    parser.add_argument("--range", default="1h", metavar="LENGTH", help="time range shown, up to now [1h]")
    parser.add_argument("--scrape-interval", default="15s", metavar="LENGTH", help="of the data source [15s]")
    parser.add_argument("--boards", type=Path, metavar="DIR", help="folder of *.json [what the code renders]")
    parser.add_argument("--json", action="store_true", help="the answers as JSON instead")
    options = parser.parse_args(arguments)
    url = options.prometheus if "://" in options.prometheus else f"http://{options.prometheus}"
    try:
        shown = boards() if options.boards is None else load(options.boards)
        end = time.time()
        span = Span(end - _length_s(options.range), end)
        prometheus = Prometheus(url, _length_s(options.scrape_interval))
        answers = [answer for board in shown for answer in run(board, prometheus, span)]
    except DashboardsError as error:
        print(f"kvtune dashboards: {error}", file=sys.stderr)
        return 1
    if options.json:
        rows = [
            {
                "board": a.board, "where": a.where, "ref": a.ref, "expr": a.expr, "series": a.series,
                "numbers": a.numbers, "verdict": a.verdict, "error": a.error, "warnings": list(a.warnings),
            }
            for a in answers
        ]  # fmt: skip
        print(json.dumps(rows, indent=2))
    else:
        print(matrix(answers))
    return int(any(answer.verdict in ("error", "NaN") for answer in answers))


if __name__ == "__main__":
    sys.exit(main())
