"""What a dashboard must keep to, checked without a Grafana: layout, ids, units, descriptions, and every query.

Each finding names the board, the panel, the rule and the cause. The rules that look into queries are in
`kvtune_dashboards.semantics`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtune_dashboards.panels import metrics_named
from kvtune_dashboards.semantics import Dimension, Meaning, Series, examine, known_series

COLUMNS = 24
UID = re.compile(r"[a-zA-Z0-9_-]{1,40}")
"""What Grafana takes for a uid."""
TAG = "kvtune"
FILTERS = ("job", "model", "engine", "role")
"""Variables of every board, beside `datasource`."""
REFRESH_ON_TIME_RANGE = 2
RANGE_WINDOWS = frozenset({"$__rate_interval"})
INSTANT_WINDOWS = frozenset({"$__rate_interval", "$__range"})
BUILT_IN = re.compile(r"__\w+|timeFilter")
"""Grafana's own variables."""

UNITS: Mapping[str, Dimension | None] = {
    "s": {"second": 1},
    "ms": {"second": 1},
    "suffix:s": {"second": 1},
    "dtdurations": {"second": 1},
    "bytes": {"byte": 1},
    "decbytes": {"byte": 1},
    "Bps": {"byte": 1, "second": -1},
    "binBps": {"byte": 1, "second": -1},
    "percentunit": {},
    "suffix:s/s": {},
    "suffix:x": {},
    "reqps": {"count": 1, "second": -1},
    "ops": {"count": 1, "second": -1},
    "cps": {"count": 1, "second": -1},
    "suffix:turns/s": {"count": 1, "second": -1},
    "si:tok/s": {"count": 1, "second": -1},
    "suffix:tokens": None,
    "si:tok": None,
    "short": None,
    "locale": None,
    "none": None,
    "dateTimeFromNow": None,
    "bool_yes_no": None,
    "string": None,
}
"""Units the boards use (ids of Grafana's, or its `suffix:` and `si:` forms), and the dimension each is for; None where
the unit says nothing but must not stand for seconds or bytes."""
RATES = frozenset(unit for unit, means in UNITS.items() if means and means.get("second") == -1) | {"suffix:s/s"}
"""Units of what goes on by the second: idle is 0."""
JUDGEMENTS = frozenset({"green", "orange", "red"})
"""Colours that say well, fair or bad."""
SCREEN_PX = 1600
"""Width (px) of the screen on which every title must be readable."""
_LETTERS = {0.29: " .,:;'|!ijl", 0.37: "tfrI()-/1", 0.86: "mwMW%", 0.66: "ABCDEFGHJKLNOPQRSTUVXYZ"}
_LETTER = {letter: width for width, letters in _LETTERS.items() for letter in letters}
"""Widths of Inter's letters, of the size of the type; the others are 0.58."""
PER_COUNT = frozenset({"second", "byte"})
"""Dimensions that a panel must show by a unit of their own."""
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::\w+)?\}|(\w+))")
_LEGEND = re.compile(r"\{\{\s*([^}\s]+)\s*\}\}")


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule that a dashboard breaks."""

    board: str
    """Its uid."""
    panel: str
    """Title of the panel; "-" for the board itself, "variable x" or "annotation x"."""
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.board}: {self.panel}: {self.message} [{self.rule}]"


@dataclass(frozen=True, slots=True)
class Query:
    """A query of a board, wherever it stands."""

    where: str
    """As `Finding.panel`."""
    ref: str
    expr: str
    target: Mapping[str, Any]
    panel: Mapping[str, Any] | None
    """None for a variable's or an annotation's."""


def lint(boards: Sequence[Mapping[str, Any]], known: Mapping[str, Series] | None = None) -> list[Finding]:
    """Everything that is wrong with these dashboards (parsed JSON); empty when nothing is."""
    series = known_series() if known is None else known
    found = [finding for board in boards for finding in lint_board(board, series)]
    uids = Counter(str(board.get("uid")) for board in boards)
    found += [Finding(uid, "-", "uid", f"{times} boards have this uid") for uid, times in uids.items() if times > 1]
    for board in boards:
        for link in board.get("links", ()):
            target = re.match(r"/d/(kvtune-[^/?]+)", str(link.get("url") or ""))
            if target and target[1] not in uids:
                found.append(Finding(str(board.get("uid")), "-", "link", f"no board has the uid {target[1]} it links"))
    return found


def lint_board(board: Mapping[str, Any], known: Mapping[str, Series]) -> list[Finding]:
    """Everything that is wrong with one dashboard by itself."""
    return [Finding(str(board.get("uid")), *rest) for rest in _of_board(board, known)]


def all_panels(board: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Every panel, those in collapsed rows too; rows themselves are none."""
    for panel in board.get("panels", ()):
        if panel.get("type") == "row":
            yield from panel.get("panels", ())
        else:
            yield panel


def queries(board: Mapping[str, Any]) -> Iterator[Query]:
    """Every query of a board: of panels, of annotations; variables have `variables`."""
    for panel in all_panels(board):
        for target in panel.get("targets", ()):
            yield Query(str(panel.get("title")), str(target.get("refId")), str(target.get("expr", "")), target, panel)
    for annotation in board.get("annotations", {}).get("list", ()):
        if not annotation.get("builtIn"):
            expr = str(annotation.get("expr", ""))
            yield Query(f"annotation {annotation.get('name')}", "-", expr, annotation, None)


def title_px(title: str) -> float:
    """How wide (px) a panel's title is in Grafana's type, by and large."""
    return 14 * sum(_LETTER.get(letter, 0.58) for letter in title)


def room_px(columns: int) -> float:
    """How much of a panel's head (px) is left for its title beside the mark of its description."""
    return SCREEN_PX * 0.98 / COLUMNS * columns - 8 - 56


_Found = Iterator[tuple[str, str, str]]
"""(panel, rule, message)."""


def _of_board(board: Mapping[str, Any], known: Mapping[str, Series]) -> _Found:
    uid = board.get("uid")
    if not isinstance(uid, str) or not UID.fullmatch(uid):
        yield "-", "uid", f"uid {uid!r}: Grafana takes up to 40 letters, digits, - and _"
    if TAG not in board.get("tags", ()):
        yield "-", "tag", f"lacks the tag {TAG!r}, by which the boards find each other"
    yield from _of_variables(board, known)
    yield from _of_grid(board)
    panels = list(all_panels(board))
    titles = Counter(str(panel.get("title")) for panel in panels)
    yield from ((title, "title", f"{times} panels have this title") for title, times in titles.items() if times > 1)
    numbered = Counter(panel.get("id") for panel in (*_rows(board), *panels))
    for panel in (*_rows(board), *panels):
        number = panel.get("id")
        if not isinstance(number, int) or number < 1:
            yield str(panel.get("title")), "panel-id", f"id {number!r}: links and alerts need a positive number"
        elif numbered[number] > 1:
            yield str(panel.get("title")), "panel-id", f"id {number} is another panel's too"
    variables = {str(variable.get("name")) for variable in board.get("templating", {}).get("list", ())}
    for panel in panels:
        for rule, message in _of_panel(panel, known, variables):
            yield str(panel.get("title")), rule, message
    for query in queries(board):
        if query.panel is None:
            yield from ((query.where, *rest) for rest in _of_annotation(query, known, variables))


def _rows(board: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [panel for panel in board.get("panels", ()) if panel.get("type") == "row"]


def _of_variables(board: Mapping[str, Any], known: Mapping[str, Series]) -> _Found:
    variables = {str(one.get("name")): one for one in board.get("templating", {}).get("list", ())}
    source = variables.get("datasource")
    if source is None or source.get("type") != "datasource" or source.get("query") != "prometheus":
        yield "variable datasource", "variable", "needs a variable of type datasource that lists Prometheus servers"
    for name in FILTERS:
        variable = variables.get(name)
        if variable is None:
            yield f"variable {name}", "variable", "is missing"
            continue
        wanted = {"multi": True, "includeAll": True, "allValue": ".+", "refresh": REFRESH_ON_TIME_RANGE}
        for key, value in wanted.items():
            if variable.get(key) != value:
                yield f"variable {name}", "variable", f"{key} is {variable.get(key)!r}, must be {value!r}"
    for name, variable in variables.items():
        if variable.get("type") != "query":
            continue
        where = f"variable {name}"
        if variable.get("datasource", {}).get("uid") != "${datasource}":
            yield where, "datasource", "must ask ${datasource}"
        asked = label_values(str(variable.get("query", {}).get("query", "")))
        if asked is None:
            yield where, "variable", "its query is not label_values(series, label)"
            continue
        meaning = examine(asked[0], {n: _as_gauge(s) for n, s in known.items()}, windows=RANGE_WINDOWS)
        yield from ((where, problem.rule, problem.message) for problem in meaning.problems)
        if meaning.shape and asked[1] not in meaning.shape.labels and not meaning.shape.maybe:
            yield where, "label", f"`{asked[0]}` has no label `{asked[1]}`"


def label_values(query: str) -> tuple[str, str] | None:
    """Selector and label of `label_values(selector, label)`; None where it is something else."""
    match = re.fullmatch(r"label_values\((.+),\s*(\w+)\)", query.strip())
    return (match[1].strip(), match[2]) if match else None


def _as_gauge(series: Series) -> Series:
    """A variable asks for names and labels only, so that a counter may be asked for as it is."""
    return Series(series.name, series.family, "gauge", series.labels, series.values, series.dimension)


def _of_grid(board: Mapping[str, Any]) -> _Found:
    top = [panel for panel in board.get("panels", ())]
    for group in (top, *(panel.get("panels", ()) for panel in _rows(board))):
        taken: list[tuple[str, Mapping[str, int]]] = []
        for panel in group:
            title, place = str(panel.get("title")), panel.get("gridPos")
            if not place or any(not isinstance(place.get(side), int) for side in "xywh"):
                yield title, "grid", "has no gridPos of whole x, y, w, h"
                continue
            if place["x"] < 0 or place["y"] < 0 or place["w"] < 1 or place["h"] < 1:
                yield title, "grid", f"gridPos {dict(place)} is not a place"
            if place["x"] + place["w"] > COLUMNS:
                yield title, "grid-overflow", f"reaches column {place['x'] + place['w']} of {COLUMNS}"
            for other, where in taken:
                if all(place[a] < where[a] + where[b] and where[a] < place[a] + place[b] for a, b in ("xw", "yh")):
                    yield title, "grid-overlap", f"lies over {other!r}"
            taken.append((title, place))
    for group in _sections(board):
        yield from _holes(group)


def _sections(board: Mapping[str, Any]) -> Iterator[list[Mapping[str, Any]]]:
    """Panels that stand together: above the first row, and below each."""
    top: list[Mapping[str, Any]] = []
    for panel in board.get("panels", ()):
        if panel.get("type") == "row":
            yield top
            yield list(panel.get("panels", ()))
            top = []
        else:
            top.append(panel)
    yield top


def _holes(panels: Sequence[Mapping[str, Any]]) -> _Found:
    """Empty cells: above them Grafana pulls panels up, and beside them a line looks torn."""
    places = [panel.get("gridPos") or {} for panel in panels]
    if not places or any(not isinstance(place.get(side), int) for place in places for side in "xywh"):
        return
    covered = {
        (x, y)
        for place in places
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    }
    first, last = min(place["y"] for place in places), max(place["y"] + place["h"] for place in places)
    empty = sorted((y, x) for y in range(first, last) for x in range(COLUMNS) if (x, y) not in covered)
    if empty:
        y, x = empty[0]
        # The one above that ends too soon, else the one at its left, else the one it lies before.
        near = max(
            panels,
            key=lambda panel: (
                _at(panel, "x", x) and panel["gridPos"]["y"] + panel["gridPos"]["h"] == y,
                _at(panel, "y", y) and panel["gridPos"]["x"] + panel["gridPos"]["w"] == x,
                _at(panel, "y", y),
            ),
        )
        yield str(near.get("title")), "grid-hole", f"leaves {len(empty)} cells empty, from column {x} of line {y} on"


def _at(panel: Mapping[str, Any], side: str, cell: int) -> bool:
    """Whether the panel stretches over this column (`x`) or line (`y`)."""
    place = panel["gridPos"]
    return bool(place[side] <= cell < place[side] + place["w" if side == "x" else "h"])


def _of_panel(panel: Mapping[str, Any], known: Mapping[str, Series], variables: set[str]) -> Iterator[tuple[str, str]]:
    if not str(panel.get("title") or "").strip():
        yield "title", "has no title"
    description = str(panel.get("description") or "")
    if not description.strip():
        yield "description", "has no description"
    columns, wide = (panel.get("gridPos") or {}).get("w"), title_px(str(panel.get("title") or ""))
    if isinstance(columns, int) and wide > room_px(columns):
        yield "title-width", f"is cut: its title is some {wide:.0f} px, {room_px(columns):.0f} fit"
    if panel.get("type") == "text":
        return
    targets = panel.get("targets") or ()
    if not targets:
        yield "no-targets", "asks nothing"
    if panel.get("datasource", {}).get("uid") != "${datasource}":
        yield "datasource", "must ask ${datasource}, the reader's choice"
    refs = Counter(target.get("refId") for target in targets)
    yield from (("ref-id", f"refId {ref} stands {times} times") for ref, times in refs.items() if times > 1)
    defaults = panel.get("fieldConfig", {}).get("defaults", {})
    yield from _of_values(panel, defaults)
    asked: dict[str, Series] = {}
    for target in targets:
        for rule, message, meaning in _of_target(panel, target, known, variables):
            yield rule, f"{target.get('refId')}: {message}"
            del meaning
        asked |= {s.family: s for s in _meaning(target, known).series}
    named = set(metrics_named(description))
    for family in asked:
        if description.strip() and family not in named:
            yield "description", f"does not name `{family}`, which it reads"
    families = {s.family for s in known.values()}
    for name in sorted(named & families - set(asked)):
        yield "description", f"names `{name}`, which it does not read"
    yield from _of_units(panel, defaults, targets, known)
    if panel.get("type") == "table":
        yield from _of_columns(panel, targets, known)


def _of_values(panel: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if not defaults.get("noValue"):
        yield "no-value", "has no noValue: an empty answer must read in words"
    if panel.get("type") == "heatmap":
        return
    special = [m.get("options", {}) for m in defaults.get("mappings", ()) if m.get("type") == "special"]
    empty = [one.get("result", {}) for one in special if one.get("match") == "null+nan"]
    if not empty:
        yield "no-value", "does not map nothing and NaN (null+nan) to words"
    steps = defaults.get("thresholds", {}).get("steps") or [{}]
    if steps[0].get("color") in JUDGEMENTS and not any(_quiet(one.get("color")) for one in empty):
        yield (
            "no-value-colour",
            f"is {steps[0]['color']} where there is nothing to judge: map null+nan to a quiet colour",
        )
    if panel.get("type") == "timeseries":
        custom = defaults.get("custom", {})
        bounded = defaults.get("max") is not None or custom.get("axisSoftMax") is not None
        if (
            str(defaults.get("unit")) in RATES
            and not bounded
            and custom.get("scaleDistribution", {}).get("type") != "log"
        ):
            yield "axis", "needs axisSoftMax: where all is 0 its axis reaches to 100"


def _quiet(colour: Any) -> bool:
    return bool(colour) and colour not in JUDGEMENTS


def _raw_words(panel: Mapping[str, Any], target: Mapping[str, Any], series: Sequence[Series]) -> Iterator[str]:
    """Words of the vocabulary that a legend would show as they are, with their underscores."""
    legend = re.fullmatch(r"\{\{\s*(\w+)\s*\}\}", str(target.get("legendFormat") or ""))
    if legend is None or target.get("format") == "table":
        return
    renamed = {
        override["matcher"]["options"]
        for override in panel.get("fieldConfig", {}).get("overrides", ())
        if any(change.get("id") == "displayName" for change in override.get("properties", ()))
    }
    words = {word for one in series for word in one.values.get(legend[1], ()) if word}
    shown = {word for word in words if "_" in word and word not in renamed}
    # What the query asks for by name is all that can come.
    chosen = [match[1].split("|") for match in re.finditer(rf'{legend[1]}=~?"([^"]*)"', str(target.get("expr")))]
    asked = {word for words in chosen for word in words}
    yield from sorted(shown & asked if asked else shown)


def _meaning(target: Mapping[str, Any], known: Mapping[str, Series]) -> Meaning:
    windows = INSTANT_WINDOWS if target.get("instant") else RANGE_WINDOWS
    return examine(str(target.get("expr", "")), known, windows=windows)


def _of_target(
    panel: Mapping[str, Any], target: Mapping[str, Any], known: Mapping[str, Series], variables: set[str]
) -> Iterator[tuple[str, str, Meaning]]:
    meaning = _meaning(target, known)
    if target.get("datasource", {}).get("uid") != "${datasource}":
        yield "datasource", "must ask ${datasource}, the reader's choice", meaning
    for problem in meaning.problems:
        yield problem.rule, problem.message, meaning
    for name in _unknown_variables(str(target.get("expr", "")), variables):
        yield "variable", f"uses ${name}, which the board does not have", meaning
    if meaning.shape is None:
        return
    for label in _LEGEND.findall(str(target.get("legendFormat") or "")):
        if label not in meaning.shape.labels and not meaning.shape.maybe:
            yield "legend", f"legend names {label}; the query leaves {_words(meaning.shape.labels)}", meaning
        elif label not in meaning.shape.labels and meaning.shape.maybe and label != "__name__":
            yield "legend", f"legend names {label}, which no series of the query has", meaning
    for word in _raw_words(panel, target, meaning.series):
        yield "raw-word", f"shows the vocabulary's {word!r}: give it a displayName", meaning
    if panel.get("type") == "heatmap":
        if target.get("format") != "heatmap":
            yield "heatmap", "format must be heatmap, or buckets are drawn as they are: cumulated", meaning
        if meaning.shape.labels != {"le"}:
            yield "heatmap", f"must leave le alone; it leaves {_words(meaning.shape.labels)}", meaning
    elif meaning.shape.labels & {"le"}:
        yield "histogram", "leaves le: buckets are cumulated, and mean nothing beside each other", meaning
    if target.get("exemplar") and (
        target.get("instant") or not any(one.name.endswith("_bucket") for one in meaning.series)
    ):
        yield "exemplar", "exemplars come with a range query of a histogram only", meaning


def _of_units(
    panel: Mapping[str, Any],
    defaults: Mapping[str, Any],
    targets: Sequence[Mapping[str, Any]],
    known: Mapping[str, Series],
) -> Iterator[tuple[str, str]]:
    heatmap = panel.get("type") == "heatmap"
    axis = panel.get("options", {}).get("yAxis", {})
    unit = str(axis.get("unit") if heatmap else defaults.get("unit"))
    overrides = [
        change["value"]
        for override in panel.get("fieldConfig", {}).get("overrides", ())
        for change in override.get("properties", ())
        if change.get("id") == "unit"
    ]
    for one in (unit, *overrides):
        if one not in UNITS:
            yield "unit", f"unit {one!r} is not one the boards use: {', '.join(UNITS)}"
    in_words = any(mapping.get("type") == "value" for mapping in defaults.get("mappings", ()))
    if unit not in UNITS or overrides or in_words:
        # Values that stand for words have no dimension, and columns have units of their own.
        return
    means = UNITS[unit]
    for target in targets:
        meaning = _meaning(target, known)
        if meaning.shape is None or meaning.shape.dimension is None or heatmap:
            continue
        is_ = meaning.shape.dimension
        if is_.get("count", 0) < 0:
            # A mean: so much for each.
            is_ = {name: power for name, power in is_.items() if name != "count"}
        fits = is_ == means if means is not None else not PER_COUNT & set(is_)
        # Things a second may go without a unit of their own: "short" with the title saying it.
        if means is None and is_ == {"count": 1, "second": -1}:
            fits = unit == "short"
        if not fits:
            yield "unit", f"{target.get('refId')}: unit {unit!r}, but the query gives {_dimension(is_)}"
    if heatmap:
        buckets = {s.family: s.dimension for t in targets for s in _meaning(t, known).series}
        for family, dimension in buckets.items():
            if dimension is not None and means is not None and dimension != means:
                yield "unit", f"the axis is in {unit!r}, but `{family}` measures {_dimension(dimension)}"


def _of_columns(
    panel: Mapping[str, Any], targets: Sequence[Mapping[str, Any]], known: Mapping[str, Series]
) -> Iterator[tuple[str, str]]:
    there = {"Time", "Value"} | {f"Value #{target.get('refId')}" for target in targets}
    for number, target in enumerate(targets, start=1):
        shape = _meaning(target, known).shape
        if shape is not None:
            there |= {*shape.labels, f"Time {number}"} | {f"{label} {number}" for label in shape.labels}
    for change in panel.get("transformations", ()):
        if change.get("id") == "groupingToMatrix":
            there.add(f"{change['options'].get('rowField')}\\{change['options'].get('columnField')}")
    for change in panel.get("transformations", ()):
        options = change.get("options", {})
        named = [options[key] for key in ("byField", "rowField", "columnField", "valueField") if key in options]
        named += [one["targetField"] for one in options.get("conversions", ())]
        if change.get("id") == "organize":
            named = [*options.get("renameByName", {}), *options.get("excludeByName", {})]
        for name in named:
            if name not in there:
                yield "column", f"{change['id']} names {name!r}; the queries give {_words(frozenset(there))}"


def _of_annotation(query: Query, known: Mapping[str, Series], variables: set[str]) -> Iterator[tuple[str, str]]:
    if query.target.get("datasource", {}).get("uid") != "${datasource}":
        yield "datasource", "must ask ${datasource}, the reader's choice"
    meaning = examine(query.expr, known, windows=RANGE_WINDOWS | {"$__interval"})
    yield from ((problem.rule, problem.message) for problem in meaning.problems)
    yield from (
        ("variable", f"uses ${name}, which the board does not have")
        for name in _unknown_variables(query.expr, variables)
    )
    if meaning.shape is None:
        return
    for key in ("titleFormat", "textFormat"):
        for label in _LEGEND.findall(str(query.target.get(key) or "")):
            if label not in meaning.shape.labels:
                yield "legend", f"{key} names {label}; the query leaves {_words(meaning.shape.labels)}"


def _unknown_variables(expr: str, variables: set[str]) -> list[str]:
    names = [braced or plain for braced, plain in _VARIABLE.findall(expr)]
    # "$1" is label_replace's own.
    return [name for name in names if name not in variables and not BUILT_IN.fullmatch(name) and not name.isdigit()]


def _dimension(dimension: Dimension) -> str:
    words = {"second": "s", "byte": "B", "count": "things"}
    return " ".join(words[name] + (f"^{power}" if power != 1 else "") for name, power in dimension.items()) or "a ratio"


def _words(labels: frozenset[str]) -> str:
    return ", ".join(sorted(labels)) or "no labels"
