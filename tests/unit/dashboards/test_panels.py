from __future__ import annotations

from typing import Any

import pytest

from kvtune_dashboards.layout import Column, Section, Sized, panel_id, place
from kvtune_dashboards.panels import (
    BLANK,
    COLOURS,
    NEUTRAL,
    QUIET,
    SIZES,
    SOFT_MOST,
    WORDS,
    Look,
    Target,
    Threshold,
    bar_gauge,
    by_size,
    heatmap,
    metrics_named,
    spoken,
    stat,
    state_timeline,
    table,
    text,
    timeseries,
)
from kvtune_telemetry.buckets import SIZE_EDGES, size_labels
from kvtune_telemetry.vocabulary import Decision, Direction, End, NoReference, Outcome, Phase, ReferenceEnd

ONE = [Target("up", "{{job}}")]


def override(panel: dict[str, Any], name: str) -> dict[str, Any]:
    """What is changed for the series of this name."""
    (found,) = (one for one in panel["fieldConfig"]["overrides"] if one["matcher"]["options"] == name)
    return {change["id"]: change["value"] for change in found["properties"]}


@pytest.mark.parametrize(
    "panel",
    [
        stat("T", "D", "s", ONE),
        bar_gauge("T", "D", "s", ONE),
        timeseries("T", "D", "s", ONE),
        heatmap("T", "D", "s", ONE[0]),
        table("T", "D", "s", ONE),
        state_timeline("T", "D", ONE, Look(words={"1": ("up", "green")})),
    ],
    ids=lambda panel: panel["type"],
)
def test_what_every_panel_has(panel: dict[str, Any]) -> None:
    assert (panel["title"], panel["description"]) == ("T", "D")
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert panel["interval"] == "30s"
    (target,) = panel["targets"]
    assert target["datasource"] == panel["datasource"]
    assert (target["refId"], target["expr"], target["interval"]) == ("A", "up", "30s")
    assert panel["fieldConfig"]["defaults"]["noValue"] == "No traffic"
    if panel["type"] != "heatmap":
        nan = panel["fieldConfig"]["defaults"]["mappings"][0]
        assert nan["options"]["match"] == "null+nan" and nan["options"]["result"]["text"] == "No traffic"


def test_a_panel_without_a_query_is_refused() -> None:
    with pytest.raises(ValueError, match="panel 'Empty' asks nothing"):
        stat("Empty", "D", "s", [])


def test_refs_count_up_and_instant_queries_are_no_range() -> None:
    panel = timeseries("T", "D", "s", [Target("a"), Target("b", instant=True), Target("c", exemplar=True)])
    assert [target["refId"] for target in panel["targets"]] == ["A", "B", "C"]
    assert [(target["instant"], target["range"]) for target in panel["targets"]] == [
        (False, True), (True, False), (False, True),
    ]  # fmt: skip
    assert [target["exemplar"] for target in panel["targets"]] == [False, False, True]


def test_colour_comes_with_a_judgement_only() -> None:
    plain = stat("T", "D", "s", ONE)
    assert plain["fieldConfig"]["defaults"]["thresholds"]["steps"] == [{"color": NEUTRAL, "value": None}]
    assert plain["options"]["colorMode"] == "value"
    assert plain["fieldConfig"]["defaults"]["mappings"][0]["options"]["result"]["color"] == QUIET
    judged = stat("T", "D", "s", ONE, Look(thresholds=(Threshold(None, "red"), Threshold(0.5, "green"))))
    assert judged["fieldConfig"]["defaults"]["thresholds"]["steps"] == [
        {"color": "red", "value": None}, {"color": "green", "value": 0.5},
    ]  # fmt: skip
    assert judged["options"]["colorMode"] == "background_solid"
    # Where there is nothing, no colour says that it is bad.
    assert judged["fieldConfig"]["defaults"]["mappings"][0]["options"]["result"]["color"] == BLANK


def test_a_word_has_its_colour_and_is_said_plainly() -> None:
    panel = timeseries("T", "D", "s", ONE, spoken("hit", "expired"))
    assert override(panel, "hit") == {
        "color": {"mode": "fixed", "fixedColor": COLOURS["hit"]}, "displayName": "reused",
    }  # fmt: skip
    assert override(panel, "expired")["displayName"] == "came too late"
    with pytest.raises(KeyError):
        spoken("no such word")


@pytest.mark.parametrize("words", [Outcome, Decision, Direction, End, NoReference, Phase, ReferenceEnd])
def test_every_word_of_the_vocabulary_has_a_colour_and_a_saying(words: Any) -> None:
    assert {word.value for word in words} <= set(COLOURS) & set(WORDS)


def test_outcomes_are_told_apart_by_colour() -> None:
    colours = [COLOURS[outcome] for outcome in Outcome]
    assert len(set(colours)) == len(colours)


def test_dashed_lines_do_not_stack_and_patterns_match_by_pattern() -> None:
    panel = timeseries("T", "D", "s", ONE, stack="normal", dashed=["TTL", "/^in use/"])
    assert panel["fieldConfig"]["defaults"]["custom"]["stacking"]["mode"] == "normal"
    assert override(panel, "TTL")["custom.stacking"]["mode"] == "none"
    assert override(panel, "TTL")["custom.lineStyle"]["fill"] == "dash"
    matchers = [one["matcher"]["id"] for one in panel["fieldConfig"]["overrides"]]
    assert matchers == ["byName", "byRegexp"]


def axis(panel: dict[str, Any]) -> tuple[Any, ...]:
    """Hard and soft bounds of a time series."""
    defaults = panel["fieldConfig"]["defaults"]
    soft = defaults["custom"]
    return defaults.get("min"), defaults.get("max"), soft.get("axisSoftMin"), soft.get("axisSoftMax")


def test_an_axis_begins_at_nought_and_is_no_hundred_high_where_all_is_nought() -> None:
    # Soft: a value below 0 is still drawn.
    assert axis(timeseries("T", "D", "ops", ONE)) == (None, None, 0, SOFT_MOST["ops"])
    assert axis(timeseries("T", "D", "s", ONE)) == (None, None, 0, None)
    assert axis(timeseries("T", "D", "ops", ONE, Look(soft_most=3))) == (None, None, 0, 3)
    assert axis(timeseries("T", "D", "percentunit", ONE, Look(least=0, most=1))) == (0, 1, None, None)
    assert axis(timeseries("T", "D", "Bps", ONE, log=True)) == (None, None, None, None)


def test_lines_are_bare_and_only_areas_are_filled() -> None:
    def drawn(**how: Any) -> tuple[Any, ...]:
        custom = timeseries("T", "D", "ops", ONE, **how)["fieldConfig"]["defaults"]["custom"]
        return custom["fillOpacity"], custom["showPoints"], custom["lineInterpolation"]

    assert drawn() == (0, "never", "linear")
    assert drawn(area=True) == (10, "never", "linear")
    assert drawn(stack="normal") == (60, "never", "linear")
    assert drawn(sparse=True, steps=True) == (0, "auto", "stepAfter")


def test_medians_are_dotted_and_legends_stand_where_they_are_wanted() -> None:
    panel = timeseries("T", "D", "s", ONE, dotted=["/^P50/"])
    assert override(panel, "/^P50/")["custom.lineStyle"]["fill"] == "dot"
    legends = [
        timeseries("T", "D", "s", ONE, legend=kind)["options"]["legend"] for kind in ("bottom", "right", "table")
    ]
    assert [(one["displayMode"], one["placement"], one["calcs"]) for one in legends] == [
        ("list", "bottom", []), ("list", "right", []), ("table", "bottom", ["lastNotNull", "mean"]),
    ]  # fmt: skip


def test_sizes_have_names_and_colours_from_small_to_large() -> None:
    look = by_size(["256", "1024", "inf"], "D to P, {}", before="d2p ", colours=["a", "b", "c", "d", "e"])
    assert look.names == {"d2p 256": "D to P, up to 256", "d2p 1024": "D to P, up to 1024", "d2p inf": "D to P, larger"}
    assert look.colours == {"d2p 256": "a", "d2p 1024": "c", "d2p inf": "e"}
    assert by_size(["inf"], "{}").colours == {"inf": SIZES[0]}
    every = size_labels(SIZE_EDGES)
    assert len(set(by_size(every, "{}").colours.values())) == len(every)


def test_a_heatmap_draws_buckets_as_they_come() -> None:
    panel = heatmap("T", "D", "s", Target("sum by (le) (x)", "ignored"))
    assert panel["options"]["calculate"] is False
    assert panel["options"]["yAxis"]["unit"] == "s"
    assert (panel["targets"][0]["format"], panel["targets"][0]["legendFormat"]) == ("heatmap", "{{le}}")


def shaping(panel: dict[str, Any]) -> dict[str, Any]:
    return {change["id"]: change["options"] for change in panel["transformations"]}


def test_a_table_joins_its_queries_and_names_its_columns() -> None:
    with pytest.raises(ValueError, match="needs the label that joins them"):
        table("T", "D", "s", [Target("a"), Target("b")])
    columns = {"size": "Size", "Value #A": "Fetch", "Value #B": "Compute"}
    panel = table("T", "D", "s", [Target("a"), Target("b")], key="size", columns=columns, numeric="size")
    assert [(t["instant"], t["format"]) for t in panel["targets"]] == [(True, "table")] * 2
    changes = shaping(panel)
    assert list(changes) == ["joinByField", "convertFieldType", "sortBy", "organize"]
    assert changes["joinByField"] == {"byField": "size", "mode": "outer"}
    assert changes["organize"]["renameByName"] == columns
    assert changes["organize"]["excludeByName"] == {"Time": True, "Time 1": True, "Time 2": True}
    assert override(panel, "Size")["mappings"][0]["options"]["result"]["text"] == "larger"
    assert changes["sortBy"]["sort"] == [{"field": "size", "desc": True}]


def test_a_table_says_words_and_units_and_what_is_not_there() -> None:
    panel = table(
        "T", "D", "none", ONE, Look(no_value="No advice", no_cell="-", digits={"To": 1}),
        columns={"setting": "Setting", "Value": "To"}, widths={"Setting": 200}, sayings={"Setting": {"ttl": "TTL, s"}},
    )  # fmt: skip
    changes = {
        change["id"]: change["value"]
        for one in panel["fieldConfig"]["overrides"]
        if one["matcher"]["options"] == "Setting"
        for change in one["properties"]
    }
    assert changes["custom.width"] == 200
    assert changes["mappings"][0]["options"] == {"ttl": {"text": "TTL, s", "index": 0}}
    assert override(panel, "To") == {"decimals": 1}
    defaults = panel["fieldConfig"]["defaults"]
    assert (defaults["noValue"], defaults["mappings"][0]["options"]["result"]["text"]) == ("No advice", "-")


def test_a_matrix_has_a_column_a_setting() -> None:
    changes = shaping(table("T", "D", "none", ONE, matrix=("instance", "setting")))
    assert changes["groupingToMatrix"]["rowField"] == "instance"
    assert changes["groupingToMatrix"]["columnField"] == "setting"
    assert changes["organize"]["renameByName"] == {"instance\\setting": "Instance"}


def test_the_names_in_a_description() -> None:
    assert metrics_named("Reads `a_total` and `b`.") == ("a_total", "b")
    assert metrics_named("Reads nothing.") == ()


# --- layout ----------------------------------------------------------------------------------------------------------


def sized(title: str, width: int = 8, height: int = 4) -> Sized:
    return Sized(text(title, "D", "x"), width, height)


def where(panel: dict[str, Any]) -> tuple[int, int, int, int]:
    place = panel["gridPos"]
    return place["x"], place["y"], place["w"], place["h"]


def test_panels_flow_and_wrap_below_the_highest() -> None:
    placed = place([Section("", [sized("a", 12, 4), sized("b", 6, 7), sized("c", 12, 3)])])
    assert [where(panel) for panel in placed] == [(0, 0, 12, 4), (12, 0, 6, 7), (0, 7, 12, 3)]


def test_a_column_stands_beside_and_is_as_high_as_what_is_in_it() -> None:
    inside = [sized("b", 10, 5), sized("c", 6, 5), sized("d", 10, 7), Column(6, [sized("e", 6, 4), sized("f", 6, 3)])]
    placed = place([Section("", [sized("a", 8, 12), Column(16, inside), sized("g", 24, 3)])])
    assert [(panel["title"], where(panel)) for panel in placed] == [
        ("a", (0, 0, 8, 12)), ("b", (8, 0, 10, 5)), ("c", (18, 0, 6, 5)), ("d", (8, 5, 10, 7)), ("e", (18, 5, 6, 4)),
        ("f", (18, 9, 6, 3)), ("g", (0, 12, 24, 3)),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="'b' is 10 by 4; the grid is 8 wide"):
        place([Section("", [Column(8, [sized("b", 10)])])])
    with pytest.raises(ValueError, match="a column of panels is 25 by 1"):
        place([Section("", [Column(25, [sized("b")])])])


def test_a_collapsed_row_holds_its_panels_and_takes_one_line() -> None:
    placed = place(
        [
            Section("", [sized("a")]),
            Section("Rare", [sized("b")], collapsed=True),
            Section("Open", [sized("c")]),
        ]
    )
    assert [(panel["type"], where(panel)) for panel in placed] == [
        ("text", (0, 0, 8, 4)), ("row", (0, 4, 24, 1)), ("row", (0, 5, 24, 1)), ("text", (0, 6, 8, 4)),
    ]  # fmt: skip
    assert [panel["title"] for panel in placed[1]["panels"]] == ["b"]
    assert where(placed[1]["panels"][0]) == (0, 5, 8, 4)
    assert placed[2]["panels"] == []


def test_an_id_is_its_titles_and_outlives_a_move() -> None:
    before = place([Section("", [sized("a"), sized("b")])])
    after = place([Section("", [sized("new"), sized("b"), sized("a")])])
    ids = {panel["title"]: panel["id"] for panel in after}
    assert {panel["title"]: panel["id"] for panel in before} == {"a": ids["a"], "b": ids["b"]}
    assert ids["a"] == panel_id("a") and 1 <= ids["a"] <= 2**20


@pytest.mark.parametrize("width", [0, 25])
def test_a_panel_wider_than_the_grid_is_refused(width: int) -> None:
    with pytest.raises(ValueError, match=f"'a' is {width} by 4; the grid is 24 wide"):
        place([Section("", [sized("a", width)])])


def test_two_panels_of_one_title_are_refused() -> None:
    with pytest.raises(ValueError, match="'a' and 'a' have the same id"):
        place([Section("", [sized("a"), sized("a")])])
    with pytest.raises(ValueError, match="must be the first"):
        place([Section("x", [sized("a")]), Section("", [sized("b")])])
