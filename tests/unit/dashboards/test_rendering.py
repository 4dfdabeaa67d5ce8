from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

import kvtune_dashboards.rendering as rendering
from kvtune_dashboards.execute import (
    Answer,
    Prometheus,
    Span,
    chosen,
    expand,
    interval_s,
    matrix,
    rate_interval_s,
    run,
)
from kvtune_dashboards.rendering import DashboardsError, boards, drift, load, panel_list, render, to_json, write

ROOT = Path(__file__).resolve().parents[3]
COMMITTED = ROOT / "dashboards" / "grafana"
FILES = [
    "kvtune-fleet.json", "kvtune-retention.json", "kvtune-reuse.json", "kvtune-transfer.json",
    "provisioning/dashboards.yaml", "provisioning/datasources.yaml",
]  # fmt: skip


def kvtune(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvtune_cli", "dashboards", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_committed_files_are_what_the_code_renders() -> None:
    assert drift(COMMITTED) == [], "run: kvtune dashboards render --out dashboards/grafana"


def test_rendering_is_repeatable_and_sorted() -> None:
    files = render()
    assert sorted(files) == FILES
    assert files == render()
    for name, content in files.items():
        assert content.endswith("\n") and not content.endswith("\n\n"), name
        if name.endswith(".json"):
            assert content == to_json(json.loads(content))


def test_provisioning_says_where_things_are() -> None:
    files = {name: yaml.safe_load(content) for name, content in render().items() if name.endswith(".yaml")}
    prometheus, traces = files["provisioning/datasources.yaml"]["datasources"]
    (destination,) = prometheus["jsonData"]["exemplarTraceIdDestinations"]
    # The recorder names the exemplar's label so, and the link leads to the other source.
    assert (destination["name"], destination["datasourceUid"]) == ("trace_id", traces["uid"])
    (provider,) = files["provisioning/dashboards.yaml"]["providers"]
    assert (provider["type"], provider["allowUiUpdates"], provider["folder"]) == ("file", False, "kvtune")


def test_drift_names_the_file_and_the_first_difference(tmp_path: Path) -> None:
    paths = write(tmp_path)
    assert sorted(str(path.relative_to(tmp_path)) for path in paths) == FILES
    assert drift(tmp_path) == []
    changed = tmp_path / "kvtune-reuse.json"
    text = changed.read_text()
    changed.write_text(text.replace('"refresh": "30s"', '"refresh": "5s"'))
    number = next(n for n, line in enumerate(text.splitlines(), 1) if '"refresh": "30s"' in line)
    (tmp_path / "kvtune-fleet.json").unlink()
    (tmp_path / "kvtune-old.json").write_text("{}")
    with (tmp_path / "kvtune-transfer.json").open("a") as file:
        file.write("\n")
    found = drift(tmp_path)
    assert set(found) == {
        f"{tmp_path / 'kvtune-fleet.json'}: is missing",
        f'{changed}: line {number} is \'"refresh": "5s",\', rendered \'"refresh": "30s",\'',
        f"{tmp_path / 'kvtune-old.json'}: no board of this name is rendered",
        next(line for line in found if "kvtune-transfer" in line),
    }
    assert len(found) == 4


@pytest.mark.parametrize(
    ("content", "says"),
    [("{", "is not JSON"), ("[]", "is not a dashboard"), ('{"title": "x"}', "it has no list of panels")],
)
def test_what_is_no_dashboard_is_named(content: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(DashboardsError, match=says) as caught:
        load(tmp_path)
    assert str(tmp_path / "x.json") in str(caught.value)


def test_a_folder_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(DashboardsError, match="holds no"):
        load(tmp_path)
    with pytest.raises(DashboardsError, match="is no folder"):
        load(tmp_path / "none")
    with pytest.raises(DashboardsError, match="is no folder"):
        drift(tmp_path / "none")


def test_a_board_that_breaks_a_rule_is_not_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    made = boards()
    made[0]["tags"] = []
    monkeypatch.setattr(rendering, "boards", lambda: made)
    with pytest.raises(DashboardsError, match="kvtune-reuse: -: lacks the tag"):
        render()


def test_the_page_lists_every_panel() -> None:
    page = (ROOT / "docs" / "dashboards.md").read_text(encoding="utf-8")
    assert page.endswith("\n" + panel_list()), "run: python -m kvtune_dashboards.rendering"


# --- the commands ----------------------------------------------------------------------------------------------------


def test_render_and_check_from_the_command_line(tmp_path: Path) -> None:
    made = kvtune("render", "--out", str(tmp_path / "a" / "b"))
    assert made.returncode == 0, made.stderr
    assert sorted(made.stdout.split()) == [str(tmp_path / "a" / "b" / name) for name in FILES]
    checked = kvtune("check", str(tmp_path / "a" / "b"))
    assert (checked.returncode, checked.stdout) == (0, "")
    assert "4 dashboards are well" in checked.stderr

    board = json.loads((tmp_path / "a" / "b" / "kvtune-fleet.json").read_text())
    board["panels"][0]["gridPos"]["x"] = 23
    (tmp_path / "a" / "b" / "kvtune-fleet.json").write_text(to_json(board))
    checked = kvtune("check", str(tmp_path / "a" / "b"))
    assert checked.returncode == 1 and "Traceback" not in checked.stderr
    assert "kvtune-fleet: Engines up: reaches column 27 of 24 [grid-overflow]" in checked.stdout
    assert "kvtune-fleet.json: line" in checked.stdout
    assert "findings in 4 dashboards" in checked.stderr


def test_check_alone_looks_at_what_would_be_rendered() -> None:
    assert (kvtune("check").returncode, kvtune("check").stdout) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("check", "/nowhere"), 1, "/nowhere is no folder"),
        (("render",), 2, "--out"),
        (("render", "--out", "/dev/null/x"), 1, "cannot write /dev/null/x"),
    ],
)
def test_bad_input_is_said_without_a_traceback(arguments: tuple[str, ...], code: int, says: str) -> None:
    ran = kvtune(*arguments)
    assert ran.returncode == code and says in ran.stderr and "Traceback" not in ran.stderr
    assert ran.stdout == ""


# --- as Grafana fills it in ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length_s", "least_s", "interval", "scrape_s", "rate_s"),
    [
        (900, 30, 30, 30, 120),  # the least step rules
        (3600, 15, 15, 15, 60),
        (86400, 15, 120, 15, 135),  # the interval rules: 86.4 s, rounded up
        (7 * 86400, 30, 900, 30, 930),
    ],
)
def test_the_windows_follow_the_range(
    length_s: float, least_s: float, interval: float, scrape_s: float, rate_s: float
) -> None:
    assert interval_s(Span(0, length_s), least_s) == interval
    assert rate_interval_s(interval, scrape_s) == rate_s


def test_macros_and_variables_are_filled_in() -> None:
    expr = 'rate(x{job=~"$job",e=~"${engine:regex}"}[$__rate_interval]) / $__range_s + y[$__range] + z[$__interval]'
    assert expand(expr, Span(0, 900), 30, 30, {"job": ".+", "engine": "(a|b)"}) == (
        'rate(x{job=~".+",e=~"(a|b)"}[120000ms]) / 900 + y[900s] + z[30000ms]'
    )
    assert expand('label_replace(a, "b", "$1", "c", "(.*)")', Span(0, 1), 1, 1, {}).count("$1") == 1
    with pytest.raises(DashboardsError, match=r"no value for \$tenant"):
        expand('x{t="$tenant"}', Span(0, 1), 1, 1, {})


def test_all_becomes_its_value_and_several_a_group() -> None:
    board = {"templating": {"list": [{"name": "job", "allValue": ".+"}, {"name": "engine", "allValue": ".+"}]}}
    assert chosen(board) == {"job": ".+", "engine": ".+"}
    assert chosen(board, {"job": ["a.b", "c"], "engine": ["0"]}) == {"job": r"(a\\.b|c)", "engine": "0"}


def answering(handle: Any) -> Prometheus:
    client = httpx.Client(transport=httpx.MockTransport(handle))
    return Prometheus("http://prometheus", 15.0, client)


def board_of(*targets: dict[str, Any]) -> dict[str, Any]:
    panel = {"title": "P", "type": "timeseries", "interval": "30s", "targets": list(targets)}
    return {"uid": "u", "panels": [panel]}


def test_what_is_sent_and_what_is_made_of_the_answer() -> None:
    sent: list[tuple[str, dict[str, str]]] = []

    def handle(request: httpx.Request) -> httpx.Response:
        sent.append((request.url.path, dict(request.url.params)))
        if request.url.path.endswith("query_range"):
            rows = [
                {"metric": {"a": "1"}, "values": [[0, "NaN"], [30, "2"]]},
                {"metric": {"b": "1"}, "values": [[0, "NaN"], [30, "+Inf"]]},
            ]
            data = {"resultType": "matrix", "result": rows}
        else:
            data = {"resultType": "vector", "result": [{"metric": {}, "value": [0, "NaN"]}]}
        return httpx.Response(200, json={"status": "success", "data": data, "warnings": ["careful"]})

    board = board_of(
        {"refId": "A", "expr": "rate(x[$__rate_interval])", "interval": "30s"},
        {"refId": "B", "expr": "sum(increase(x[$__range]))", "interval": "30s", "instant": True},
    )
    first, second = run(board, answering(handle), Span(1000, 1900))
    assert sent == [
        ("/api/v1/query_range", {"query": "rate(x[120000ms])", "start": "990.0", "end": "1890.0", "step": "30.0"}),
        ("/api/v1/query", {"query": "sum(increase(x[900s]))", "time": "1900"}),
    ]
    assert (first.series, first.numbers, first.verdict, first.labels) == (2, 1, "ok", {"a", "b"})
    assert (second.series, second.numbers, second.verdict) == (1, 0, "NaN")
    assert first.warnings == ("careful",)


def test_an_error_is_kept_and_a_stranger_is_refused() -> None:
    def refuse(_: httpx.Request) -> httpx.Response:
        return httpx.Response(400, json={"status": "error", "errorType": "bad_data", "error": "parse error: x"})

    board = board_of({"refId": "A", "expr": "sum(", "instant": True})
    (answer,) = run(board, answering(refuse), Span(0, 900))
    assert (answer.verdict, answer.error) == ("error", "parse error: x")
    with pytest.raises(DashboardsError, match="does not answer as Prometheus does"):
        list(run(board, answering(lambda _: httpx.Response(200, text="<html>")), Span(0, 900)))

    def gone(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    with pytest.raises(DashboardsError, match="is a Prometheus there"):
        list(run(board, answering(gone), Span(0, 900)))


def test_the_matrix_counts_verdicts_by_board() -> None:
    answers = [
        Answer("u", "P", "A", "x", 2, 2),
        Answer("u", "Q", "A", "x"),
        Answer("u", "R", "A", "x", 1, 0),
        Answer("v", "P", "A", "x", error="no"),
    ]
    lines = matrix(answers).splitlines()
    assert lines[-2:] == [
        "u: 3 queries: 1 ok, 1 empty, 1 NaN, 0 error",
        "v: 1 queries: 0 ok, 0 empty, 0 NaN, 1 error",
    ]
    assert lines[4].endswith("error: no")
