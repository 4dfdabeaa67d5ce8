"""Panels of Grafana's classic dashboard JSON, as plain dicts. What they draw is decided by the boards.

A panel made here has everything but its place: `kvtune_dashboards.layout` adds `id` and `gridPos`. Every panel says in
its description what it answers and which metrics it reads; an empty or NaN answer reads "No traffic". Colour means
judgement and comes with `thresholds`; without them a panel is neutral. A word of the vocabulary has one colour on all
boards (`COLOURS`). A line is as thick as it matters: dashed is a setting, a bound or another day, dotted a median.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Panel = dict[str, Any]
"""A panel in Grafana's JSON."""

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
"""The data source of every query: the one the reader chose at the top of the board."""
MIN_STEP = "30s"
"""Least distance of two points, and the scrape interval `$__rate_interval` reckons with: rates are taken over 2 minutes
at least, which holds two samples up to a scrape interval of a minute, whatever the data source is set to."""
NO_TRAFFIC = "No traffic"
NEUTRAL = "blue"
GOOD, FAIR, BAD, QUIET = "green", "orange", "red", "#8e8e8e"
BLANK = "#4d535c"
"""Behind the words of a judged tile that has no answer: nothing to show is no judgement."""
SOFT_MOST: Mapping[str, float] = {
    "reqps": 0.1,
    "ops": 0.1,
    "cps": 0.1,
    "suffix:turns/s": 0.1,
    "suffix:s/s": 0.1,
    "si:tok/s": 10,
    "binBps": 2**20,
    "Bps": 1e6,
    "percentunit": 0.1,
    "short": 4,
    "si:tok": 1000,
}
"""How far an axis reaches at least, by unit: one where all is 0 would reach to 100 of whatever it is."""

COLOURS: Mapping[str, str] = {
    # what became of a turn
    "first": "#8ab8ff",
    "hit": "#37872d",
    "expired": "#ff780a",
    "rewritten": "#a352cc",
    "consumed": "#e0b400",
    "engine_gone": "#c4162a",
    "evicted": "#fade2a",
    "absent": "#9fa7b3",
    "unverified": "#705da0",
    "read_failed": "#f2495c",
    "disabled": "#5a6470",
    "no_identity": "#806eb7",
    "error": "#890f02",
    # where tokens came from, and what prefill did about a history
    "fetched": "#37872d",
    "fetch": "#37872d",
    "local_hit": "#96d98d",
    "computed": "#3274d9",
    "recompute": "#3274d9",
    # how a retention ended
    "read": "#37872d",
    "lapsed": "#ff780a",
    "released": "#9fa7b3",
    "aborted": "#c4162a",
    # which way KV travels
    "d2p": "#37872d",
    "p2d": "#8ab8ff",
    # kinds of turns
    "followup": "#b877d9",
    "miss": "#ff780a",
    # why prefill computed a history again, beside the outcomes of those names
    "below_threshold": "#3274d9",
    "explored": "#8ab8ff",
    # what the time to first token is made of
    "route": "#9fa7b3",
    "prefill": "#3274d9",
    "handoff": "#b877d9",
    "first_token": "#e0b400",
    # why decode retained nothing
    "unwanted": "#9fa7b3",
    # why a turn brought no reference
    "stop_string": "#e0b400",
    "client_gone": "#9fa7b3",
    "not_sent": "#a352cc",
    # how a reference left the router
    "handed_over": "#37872d",
    "superseded": "#8ab8ff",
    "lost": "#890f02",
    "shutdown": "#5a6470",
    # what a router tried again
    "without_reference": "#ff780a",
    "other_prefill": "#8ab8ff",
    "other_decode": "#3274d9",
    "decode_alone": "#a352cc",
    "resumed": "#37872d",
}
"""The colour of a word, on every board."""

WORDS: Mapping[str, str] = {
    "first": "first turn",
    "hit": "reused",
    "expired": "came too late",
    "rewritten": "history rewritten",
    "consumed": "reference used up",
    "engine_gone": "engine gone",
    "evicted": "evicted by router",
    "absent": "no reference",
    "unverified": "not proven equal",
    "read_failed": "read failed",
    "disabled": "reuse off (hold-out)",
    "no_identity": "no conversation id",
    "error": "turn failed",
    "fetched": "fetched from D",
    "fetch": "fetched from D",
    "local_hit": "held by P",
    "computed": "computed",
    "recompute": "computed again",
    "read": "read (useful)",
    "lapsed": "lapsed (TTL ran out)",
    "released": "given back unread",
    "aborted": "dropped by engine",
    "d2p": "D to P (history read back)",
    "p2d": "P to D (hand-over)",
    "below_threshold": "below the threshold",
    "explored": "tried on purpose",
    "route": "routing",
    "prefill": "prefill",
    "handoff": "hand-over",
    "first_token": "first token",
    "unwanted": "router wants none",
    "stop_string": "stop string",
    "client_gone": "client left",
    "not_sent": "engine sent none",
    "handed_over": "handed over (good)",
    "superseded": "replaced by a newer one",
    "lost": "lost on the way",
    "shutdown": "router stopped",
    "without_reference": "without the reference",
    "other_prefill": "other prefill engine",
    "other_decode": "other decode engine",
    "decode_alone": "decode alone",
    "resumed": "resumed",
}
"""How a word is shown, on every board; the vocabulary's own word stays in the legend's place of the query."""

SIZES = (
    "#deeaff", "#a9c7ff", "#6e9fff", "#3274d9", "#5ec4c4", "#37872d", "#96d98d", "#e0b400", "#fade2a", "#ff9830",
    "#ff5705", "#f2495c", "#b877d9",
)  # fmt: skip
"""Colours of size classes, small to large."""


@dataclass(frozen=True, slots=True)
class Target:
    """A query of a panel. `instant` asks for one point at the end of the range (tiles and tables)."""

    expr: str
    legend: str = ""
    """Grafana's legend format; it may name only labels that `expr` leaves."""
    instant: bool = False
    exemplar: bool = False
    """Also ask for exemplars, which lead to traces; for histograms that carry them."""
    format: Literal["time_series", "table", "heatmap"] = "time_series"


@dataclass(frozen=True, slots=True)
class Threshold:
    """From `value` on (None: from minus infinity) the colour is `colour`."""

    value: float | None
    colour: str


@dataclass(frozen=True, slots=True)
class Look:
    """How values are shown, where a panel wants more than its kind's default."""

    decimals: int | None = None
    least: float | None = None
    most: float | None = None
    thresholds: Sequence[Threshold] = ()
    words: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Value -> (text, colour), for values that stand for words."""
    colours: Mapping[str, str] = field(default_factory=dict)
    """Name of a series -> colour, beside `COLOURS`."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Name of a series -> what is shown in its stead."""
    units: Mapping[str, str] = field(default_factory=dict)
    """Name of a series, or of a table's column -> unit."""
    digits: Mapping[str, int] = field(default_factory=dict)
    """Name of a series, or of a table's column -> decimals."""
    soft_most: float | None = None
    """How far the axis of a time series reaches at least; None: as its unit has it in `SOFT_MOST`."""
    links: Sequence[tuple[str, str]] = ()
    """(title, URL) offered at a click on a value."""
    no_value: str = NO_TRAFFIC
    """What is shown where the query has no answer."""
    no_cell: str | None = None
    """What is shown in a table's cell that has no value; None: `no_value`."""


_PLAIN = Look()


def seconds_setting() -> str:
    """The unit of a setting in seconds: the number as it is set, not "8 mins"."""
    return "suffix:s"


def tokens() -> str:
    """The unit of a number of tokens as it is set."""
    return "suffix:tokens"


def stat(
    title: str,
    description: str,
    unit: str,
    targets: Sequence[Target],
    look: Look = _PLAIN,
    *,
    show: Literal["auto", "value", "value_and_name", "name"] = "auto",
    sparkline: bool = False,
) -> Panel:
    """Big numbers. One series shows its value alone, several show their names too (`show` says otherwise).

    `sparkline` draws the history behind the number; its queries must not be instant.
    """
    panel = _panel("stat", title, description, targets)
    judged = bool(look.thresholds or look.words)
    panel["fieldConfig"] = _fields(unit, look, empty=BLANK if judged else QUIET)
    panel["options"] = {
        "colorMode": "background_solid" if judged else "value",
        "graphMode": "area" if sparkline else "none",
        "justifyMode": "auto",
        "orientation": "auto",
        "percentChangeColorMode": "standard",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "showPercentChange": False,
        "textMode": show,
        "wideLayout": True,
    }
    return panel


def bar_gauge(title: str, description: str, unit: str, targets: Sequence[Target], look: Look = _PLAIN) -> Panel:
    """One horizontal bar a series."""
    panel = _panel("bargauge", title, description, targets)
    panel["fieldConfig"] = _fields(unit, replace(look, least=0 if look.least is None else look.least))
    panel["options"] = {
        "displayMode": "basic",
        "maxVizHeight": 300,
        "minVizHeight": 16,
        "minVizWidth": 8,
        "namePlacement": "left",
        "orientation": "horizontal",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "showUnfilled": False,
        "sizing": "auto",
        # A larger name is cut where bars are thin: Grafana reckons its room by their height.
        "text": {"titleSize": 12, "valueSize": 18},
        "valueMode": "text",
        "legend": {"showLegend": False, "displayMode": "list", "placement": "bottom", "calcs": []},
    }
    return panel


def timeseries(
    title: str,
    description: str,
    unit: str,
    targets: Sequence[Target],
    look: Look = _PLAIN,
    *,
    stack: Literal["none", "normal", "percent"] = "none",
    log: bool = False,
    area: bool = False,
    steps: bool = False,
    sparse: bool = False,
    dashed: Sequence[str] = (),
    dotted: Sequence[str] = (),
    legend: Literal["bottom", "right", "table"] = "bottom",
) -> Panel:
    """Lines over time, or stacked areas.

    Args:
        title: What the panel shows.
        description: What it answers, its metrics in backticks.
        unit: A Grafana unit.
        targets: The queries.
        look: Colours, names and bounds. Without bounds the axis begins at 0, or below where a value is.
        stack: "normal" adds the series up, "percent" shows their shares.
        log: Logarithmic axis.
        area: Fill what lies under the lines; for one line, or where they do not cross.
        steps: Steps instead of slopes, for what is counted in the minutes before.
        sparse: Draw a sample that stands alone, as a point no larger than the line is wide.
        dashed: Names of series that are settings, bounds or another day, drawn as dashed lines without filling.
        dotted: Names of series that are medians beside a high percentile, drawn as dotted lines.
        legend: Below, at the right, or below as a table with the last value and the mean of each name.
    """
    panel = _panel("timeseries", title, description, targets)
    fields = _fields(unit, look)
    stacked = stack != "none"
    fields["defaults"]["color"] = {"mode": "palette-classic"}
    custom: dict[str, Any] = {
        "axisPlacement": "auto",
        "drawStyle": "line",
        "fillOpacity": 60 if stacked else 10 if area else 0,
        "gradientMode": "none",
        "lineInterpolation": "stepAfter" if steps else "linear",
        "lineWidth": 1 if stacked else 2,
        "pointSize": 2,
        "scaleDistribution": {"type": "log", "log": 10} if log else {"type": "linear"},
        "showPoints": "auto" if sparse else "never",
        "spanNulls": False,
        "stacking": {"mode": stack, "group": "A"},
        "thresholdsStyle": {"mode": "dashed" if look.thresholds else "off"},
    }
    soft_most = SOFT_MOST.get(unit) if look.soft_most is None else look.soft_most
    if not log and look.least is None:
        custom["axisSoftMin"] = 0
    if not log and look.most is None and soft_most is not None:
        custom["axisSoftMax"] = soft_most
    fields["defaults"]["custom"] = custom
    for name in dashed:
        fields["overrides"].append(
            _override(
                name,
                {
                    "custom.lineStyle": {"fill": "dash", "dash": [8, 8]},
                    "custom.fillOpacity": 0,
                    "custom.stacking": {"mode": "none", "group": "B"},
                },
            )
        )
    for name in dotted:
        fields["overrides"].append(_override(name, {"custom.lineStyle": {"fill": "dot", "dash": [2, 6]}}))
    panel["fieldConfig"] = fields
    panel["options"] = {
        "legend": {
            "showLegend": True,
            "displayMode": "table" if legend == "table" else "list",
            "placement": "right" if legend == "right" else "bottom",
            "calcs": ["lastNotNull", "mean"] if legend == "table" else [],
        },
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return panel


def heatmap(title: str, description: str, unit: str, target: Target) -> Panel:
    """The spread of a classic histogram over time; `target` counts by `le`."""
    panel = _panel("heatmap", title, description, [replace(target, format="heatmap", legend="{{le}}")])
    panel["fieldConfig"] = {
        "defaults": {
            "custom": {
                "hideFrom": {"legend": False, "tooltip": False, "viz": False},
                "scaleDistribution": {"type": "linear"},
            },
            "noValue": NO_TRAFFIC,
        },
        "overrides": [],
    }
    panel["options"] = {
        "calculate": False,
        "cellGap": 1,
        "cellValues": {"unit": "short"},
        "color": {
            "mode": "scheme",
            "scheme": "Blues",
            "fill": "dark-blue",
            "scale": "exponential",
            "exponent": 0.5,
            "steps": 64,
            "reverse": False,
        },
        "exemplars": {"color": "rgba(255,0,255,0.7)"},
        # Empty cells are not drawn: what is idle stays white.
        "filterValues": {"le": 1e-9},
        "legend": {"show": True},
        "rowsFrame": {"layout": "auto"},
        "showValue": "never",
        "tooltip": {"mode": "single", "yHistogram": True, "showColorScale": True},
        "yAxis": {"axisPlacement": "left", "reverse": False, "unit": unit},
    }
    return panel


def table(
    title: str,
    description: str,
    unit: str,
    targets: Sequence[Target],
    look: Look = _PLAIN,
    *,
    key: str | None = None,
    columns: Mapping[str, str] | None = None,
    hide: Sequence[str] = (),
    numeric: str | None = None,
    matrix: tuple[str, str] | None = None,
    widths: Mapping[str, int] | None = None,
    sayings: Mapping[str, Mapping[str, str]] | None = None,
) -> Panel:
    """A row a series, from instant queries.

    Args:
        title: What the panel shows.
        description: What it answers, its metrics in backticks.
        unit: Unit of the values; `look.units` sets it by column.
        targets: The queries; more than one needs `key`.
        look: Colours, words and units; names are those of the columns as shown.
        key: The label by which the answers of several queries are joined to rows.
        columns: Field as Prometheus names it (a label, or `Value #A`) -> head, in the order of the columns.
        hide: Fields that are not shown, beside `Time`.
        numeric: A label that holds numbers, by which the rows are sorted, the largest first.
        matrix: (label, label) whose values become the rows and the columns; one query, no `columns`.
        widths: Head of a column -> its width in pixels; the others share what is left.
        sayings: Head of a column of words -> word -> what is shown in its stead.

    Raises:
        ValueError: for several queries without a `key`.
    """
    asked = [replace(target, instant=True, format="table") for target in targets]
    panel = _panel("table", title, description, asked)
    fields = _fields(unit, look)
    fields["defaults"]["custom"] = {"align": "auto", "cellOptions": {"type": "auto"}, "inspect": False}
    if look.thresholds or look.words:
        coloured = {"custom.cellOptions": {"type": "color-text"}}
        fields["overrides"].append({"matcher": {"id": "byType", "options": "number"}, "properties": _set(coloured)})
    panel["fieldConfig"] = fields
    panel["options"] = {
        "cellHeight": "sm",
        "footer": {"show": False, "reducer": ["sum"], "countRows": False, "fields": ""},
        "frameIndex": 0,
        "showHeader": True,
    }
    panel["transformations"] = list(_shaping(len(targets), key, dict(columns or {}), hide, numeric, matrix))
    if numeric is not None:
        # "inf", the class without an upper edge, is no number.
        larger = {"type": "special", "options": {"match": "null+nan", "result": {"text": "larger", "index": 0}}}
        head = dict(columns or {}).get(numeric, numeric)
        fields["overrides"].append(_override(head, {"unit": "none", "decimals": 0, "mappings": [larger]}))
    for head, width in (widths or {}).items():
        fields["overrides"].append(_override(head, {"custom.width": width}))
    for head, said in (sayings or {}).items():
        options = {word: {"text": shown, "index": index} for index, (word, shown) in enumerate(said.items())}
        fields["overrides"].append(_override(head, {"mappings": [{"type": "value", "options": options}]}))
    return panel


def _shaping(
    count: int,
    key: str | None,
    heads: Mapping[str, str],
    hide: Sequence[str],
    numeric: str | None,
    matrix: tuple[str, str] | None,
) -> Iterator[dict[str, Any]]:
    """What turns the answers of `count` queries into a table."""
    if count > 1 and key is None:
        raise ValueError("a table of several queries needs the label that joins them")
    if matrix is not None:
        options: dict[str, Any] = {"rowField": matrix[0], "columnField": matrix[1], "valueField": "Value"}
        yield {"id": "groupingToMatrix", "options": {**options, "emptyValue": "null"}}
        yield _organized({f"{matrix[0]}\\{matrix[1]}": matrix[0].capitalize()}, ())
        return
    hidden = ["Time", *hide]
    if count > 1:
        hidden += [f"Time {number}" for number in range(1, count + 1)]
        yield {"id": "joinByField", "options": {"byField": key, "mode": "outer"}}
    if numeric is not None:
        conversion = {"targetField": numeric, "destinationType": "number"}
        yield {"id": "convertFieldType", "options": {"conversions": [conversion], "fields": {}}}
        yield {"id": "sortBy", "options": {"fields": {}, "sort": [{"field": numeric, "desc": True}]}}
    yield _organized(heads, hidden)


def _organized(heads: Mapping[str, str], hidden: Sequence[str]) -> dict[str, Any]:
    return {
        "id": "organize",
        "options": {
            "excludeByName": dict.fromkeys(hidden, True),
            "includeByName": {},
            "indexByName": {name: place for place, name in enumerate(heads)},
            "renameByName": dict(heads),
        },
    }


def state_timeline(title: str, description: str, targets: Sequence[Target], look: Look) -> Panel:
    """Words over time, one lane a series; `look.words` says what a value means, and its colour."""
    panel = _panel("state-timeline", title, description, targets)
    fields = _fields("none", look)
    fields["defaults"]["custom"] = {
        "fillOpacity": 80,
        "hideFrom": {"legend": False, "tooltip": False, "viz": False},
        "insertNulls": False,
        "lineWidth": 0,
        "spanNulls": False,
    }
    panel["fieldConfig"] = fields
    panel["options"] = {
        "alignValue": "center",
        "legend": {"showLegend": False, "displayMode": "list", "placement": "bottom", "calcs": []},
        "mergeValues": True,
        "rowHeight": 0.85,
        "showValue": "auto",
        "tooltip": {"mode": "single", "sort": "none"},
    }
    return panel


def text(title: str, description: str, content: str) -> Panel:
    """Markdown, for what a number cannot say."""
    return {
        "type": "text",
        "title": title,
        "description": description,
        "options": {"mode": "markdown", "content": content},
        "transparent": True,
    }


def row(title: str, *, collapsed: bool = False) -> Panel:
    """The head of a section; a collapsed one holds its panels and asks nothing until it is opened."""
    return {"type": "row", "title": title, "collapsed": collapsed, "panels": []}


def metrics_named(description: str) -> tuple[str, ...]:
    """The names in backticks in a panel's description."""
    return tuple(description.split("`")[1::2])


def _panel(kind: str, title: str, description: str, targets: Sequence[Target]) -> Panel:
    if not targets:
        raise ValueError(f"panel {title!r} asks nothing: give it a target")
    return {
        "type": kind,
        "title": title,
        "description": description,
        "datasource": dict(DATASOURCE),
        "interval": MIN_STEP,
        "targets": [_target(number, target) for number, target in enumerate(targets)],
    }


def _target(number: int, target: Target) -> dict[str, Any]:
    made = {
        "refId": chr(ord("A") + number),
        "datasource": dict(DATASOURCE),
        "editorMode": "code",
        "exemplar": target.exemplar,
        "expr": target.expr,
        "format": target.format,
        "instant": target.instant,
        "interval": MIN_STEP,
        "legendFormat": target.legend or "__auto",
        "range": not target.instant,
    }
    return made


def _fields(unit: str, look: Look, *, empty: str = QUIET) -> dict[str, Any]:
    """Unit, words and colours; `empty` is the colour of no answer."""
    steps = [{"color": threshold.colour, "value": threshold.value} for threshold in look.thresholds]
    mappings: list[dict[str, Any]] = [
        {
            "type": "special",
            "options": {
                "match": "null+nan",
                "result": {"text": look.no_cell or look.no_value, "color": empty, "index": 0},
            },
        }
    ]
    if look.words:
        mappings.append(
            {
                "type": "value",
                "options": {
                    value: {"text": shown, "color": colour, "index": index}
                    for index, (value, (shown, colour)) in enumerate(look.words.items(), start=1)
                },
            }
        )
    defaults: dict[str, Any] = {
        "unit": unit,
        "noValue": look.no_value,
        "mappings": mappings,
        "color": {"mode": "thresholds"},
        "thresholds": {"mode": "absolute", "steps": steps or [{"color": NEUTRAL, "value": None}]},
    }
    for name, value in (("decimals", look.decimals), ("min", look.least), ("max", look.most)):
        if value is not None:
            defaults[name] = value
    if look.links:
        defaults["links"] = [{"title": title, "url": url, "targetBlank": True} for title, url in look.links]
    overrides = []
    for name in dict.fromkeys([*look.colours, *look.names, *look.units, *look.digits]):
        change: dict[str, Any] = {}
        if name in look.colours:
            change["color"] = {"mode": "fixed", "fixedColor": look.colours[name]}
        if name in look.names:
            change["displayName"] = look.names[name]
        if name in look.units:
            change["unit"] = look.units[name]
        if name in look.digits:
            change["decimals"] = look.digits[name]
        overrides.append(_override(name, change))
    return {"defaults": defaults, "overrides": overrides}


def _override(name: str, change: Mapping[str, Any]) -> dict[str, Any]:
    """Change the series of this name, or those that match it where it is written `/like this/`."""
    by = "byRegexp" if name.startswith("/") else "byName"
    return {"matcher": {"id": by, "options": name}, "properties": _set(change)}


def _set(change: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"id": name, "value": value} for name, value in change.items()]


def spoken(*words: str) -> Look:
    """A look in which these words of the vocabulary have their colours and are said plainly.

    Raises:
        KeyError: for a word without a colour.
    """
    return Look(
        colours={word: COLOURS[word] for word in words}, names={word: WORDS[word] for word in words if word in WORDS}
    )


def by_size(edges: Sequence[str], said: str, *, before: str = "", colours: Sequence[str] = SIZES) -> Look:
    """A look for series named `{before}{edge}`, edge being a size class: `said` names one, colours go by size.

    Args:
        edges: Labels of the classes, from small to large; `inf` is the class without an upper edge.
        said: How a class is named, with `{}` where `up to 4096` or `larger` goes.
        before: What stands before the edge in the query's legend.
        colours: From small to large; they are spread over the classes.
    """
    last = max(1, len(edges) - 1)
    shades = [colours[round(place * (len(colours) - 1) / last)] for place in range(len(edges))]
    return Look(
        colours={before + edge: shade for edge, shade in zip(edges, shades, strict=True)},
        names={before + edge: said.format("larger" if edge == "inf" else f"up to {edge}") for edge in edges},
    )
