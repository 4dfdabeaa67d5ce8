"""Every dashboard drawn with Grafana's own panel libraries, in headless Chromium, against a live system."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
import pytest_asyncio

from kvtune_bench.process import ChildProcess, tail

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

ROOT = Path(__file__).resolve().parents[2]
PREVIEW = ROOT / "dashboards" / "preview"
BOARDS = sorted((ROOT / "dashboards" / "grafana").glob("*.json"))
PICTURES = ROOT / "build" / "preview"
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")
WAIT_S = 600.0
"""A busy machine draws slowly; an idle one needs a twentieth."""
TURNS = 60
RANGE = "now-5m"


async def ran(*command: str, cwd: Path = ROOT) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a finished command."""
    process = await asyncio.create_subprocess_exec(
        *command, cwd=cwd, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        out, err = await asyncio.wait_for(process.communicate(), WAIT_S)
    except BaseException:
        process.kill()
        await process.wait()
        raise
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bundle() -> None:
    """The libraries as the lock file has them, and the page built from them."""
    assert shutil.which("npm"), "no npm on PATH; install it: apt-get install -y --no-install-recommends nodejs npm"
    assert CHROMIUM, "no chromium on PATH; install it: apt-get install -y --no-install-recommends chromium"
    installed, lock = PREVIEW / "node_modules" / ".package-lock.json", PREVIEW / "package-lock.json"
    if not installed.exists() or installed.stat().st_mtime < lock.stat().st_mtime:
        code, out, err = await ran("npm", "ci", cwd=PREVIEW)
        assert code == 0, (out, err)
    code, out, err = await ran("node", "build.mjs", cwd=PREVIEW)
    assert code == 0, (out, err)


@dataclass(frozen=True)
class Live:
    """The addresses `live.py` printed."""

    prometheus: str
    engines: dict[str, str]


async def increase(session: aiohttp.ClientSession, prometheus: str, query: str) -> float:
    async with session.get(f"{prometheus}/api/v1/query", params={"query": query}) as answer:
        result = orjson.loads(await answer.read())["data"]["result"]
    return float(result[0]["value"][1]) if result else 0.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def live(bundle: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Live]:
    """A system with traffic, once first and follow-up turns were counted and the slowest rule has been evaluated."""
    log = tmp_path_factory.mktemp("live") / "log"
    child = await ChildProcess.start(
        "live", [sys.executable, str(PREVIEW / "live.py"), "--minutes", "30", "--scrape", "2", "--hold"], log
    )
    try:
        addresses = orjson.loads(child.ready)
        wanted = {
            "turns reused": (f'sum(kvtune_turns_total{{outcome="hit"}}) >= bool {TURNS}', 1.0),
            "recording rules evaluated": ("count(kvtune:followup_turns_reused:ratio) >= bool 1", 1.0),
            "advice": ("count(kvtune_suggest_timestamp_seconds) >= bool 1", 1.0),
        }
        began = time.monotonic()
        async with aiohttp.ClientSession() as session:
            for what, (query, value) in wanted.items():
                while await increase(session, addresses["prometheus"], query) != value:
                    assert child.returncode is None, tail(log)
                    assert time.monotonic() - began < WAIT_S, f"waited in vain: {what}; {tail(log)}"
                    await asyncio.sleep(1)
        yield Live(addresses["prometheus"], addresses["engines"])
    finally:
        assert await child.stop() == 0, tail(log)


def drawn(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """All panels, those in collapsed rows too."""
    found = []
    for panel in dashboard["panels"]:
        found += panel["panels"] if panel["type"] == "row" and panel.get("panels") else []
        found += [panel] if panel["type"] != "row" else []
    return found


def shot(board: Path, prometheus: str, out: Path, *more: str) -> tuple[str, ...]:
    return (
        "node", str(PREVIEW / "shot.mjs"), "--dashboard", str(board), "--prometheus", prometheus, "--out", str(out),
        "--from", RANGE, "--scrape", "2", "--chromium", str(CHROMIUM), *more,
    )  # fmt: skip


def boards() -> dict[str, dict[str, Any]]:
    return {board.stem: orjson.loads(board.read_bytes()) for board in BOARDS}


async def test_there_are_four_boards() -> None:
    assert len(boards()) == 4


async def test_the_lock_file_pins_all_and_names_no_registry() -> None:
    packages = orjson.loads((PREVIEW / "package-lock.json").read_bytes())["packages"]
    assert not [name for name, package in packages.items() if "resolved" in package]
    assert not [name for name, package in packages.items() if name and "integrity" not in package]


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.stem)
async def test_every_panel_is_drawn_and_none_shows_an_error(live: Live, board: Path) -> None:
    out = PICTURES / f"{board.stem}.png"
    code, stdout, stderr = await ran(*shot(board, live.prometheus, out, "--expand"))
    assert code == 0, (stdout, stderr)
    panels = [orjson.loads(line) for line in stdout.splitlines()]
    wanted = drawn(boards()[board.stem])
    assert sorted(panel["title"] for panel in panels) == sorted(panel["title"] for panel in wanted)
    states = {panel["title"]: panel["state"] for panel in panels}
    assert set(states.values()) <= {"data", "empty", "static"}, states
    with_data = [title for title, state in states.items() if state == "data"]
    assert len(with_data) >= len(states) // 2, states
    said = {panel["title"]: panel["text"] for panel in panels if panel["state"] == "empty"}
    asking = [panel for panel in wanted if "targets" in panel]
    no_value = {panel["title"]: panel["fieldConfig"]["defaults"].get("noValue") for panel in asking}
    assert all(text == no_value[title] for title, text in said.items()), said
    words = {panel["title"]: panel["words"] for panel in panels}
    assert not [title for title, text in said.items() if text not in words[title]], words
    assert not [title for title, shown in words.items() if "Value #" in shown], words


def one(kind: str, *exprs: str, target: dict[str, Any] | None = None, **panel: Any) -> dict[str, Any]:
    """A panel without a title and a place yet."""
    targets = [
        {"refId": chr(65 + number), "expr": expr, "range": True, **(target or {})} for number, expr in enumerate(exprs)
    ]
    return {"type": kind, "targets": targets, **panel}


def number(expr: str, name: str = "n", interval: str | None = None, **panel: Any) -> dict[str, Any]:
    """A tile with the value of an expression, `interval` being the query's own."""
    return one("stat", expr, target={"legendFormat": name, "interval": interval}, **panel)


def position(place: int) -> dict[str, int]:
    """Two panels a line."""
    return {"x": 12 * (place % 2), "y": 8 * (place // 2), "w": 12, "h": 8}


def fields(**defaults: Any) -> dict[str, Any]:
    return {"defaults": defaults, "overrides": []}


def labelled(value: float, label: str, text: str) -> str:
    return f'label_replace(vector({value:g}), "{label}", "{text}", "", "")'


INSTANT = {"instant": True, "range": False}
UP = [{"type": "value", "options": {"1": {"text": "well", "color": "green"}}}]
LONG = [{"id": "unit", "value": "s"}, {"id": "displayName", "value": "long"}]
NAMES = {"Value #A": "Much", "size": "Size"}
RENAMED = [
    {"id": "merge", "options": {}},
    {"id": "organize", "options": {"excludeByName": {"Time": True}, "renameByName": NAMES}},
]
BUCKETS = " or ".join(labelled(count, "le", le) for le, count in (("+Inf", 9), ("1", 3), ("2.5", 7)))
AS_GRAFANA: dict[str, tuple[dict[str, Any], str]] = {
    "unit": (number("vector(0.25)", fieldConfig=fields(unit="percentunit")), "n=25%"),
    "binary unit": (number("vector(1.5e9)", fieldConfig=fields(unit="bytes")), "n=1.40 GiB"),
    "mapping": (one("state-timeline", "vector(1)", fieldConfig=fields(mappings=UP)), "=well"),
    "legend": (
        one("timeseries", labelled(2, "role", "decode"), target={"legendFormat": "as {{role}}"}),
        "as decode=2",
    ),
    "override": (
        one(
            "bargauge",
            "vector(3)",
            target={"legendFormat": "three", **INSTANT},
            fieldConfig={
                "defaults": {},
                "overrides": [{"matcher": {"id": "byName", "options": "three"}, "properties": LONG}],
            },
        ),
        "long=3 s",
    ),
    "buckets": (one("heatmap", BUCKETS, target={"format": "heatmap", "legendFormat": "{{le}}"}), "1=3, 2.5=4, +Inf=2"),
    "table": (
        one(
            "table",
            labelled(5, "size", "64"),
            labelled(6, "size", "64"),
            target={"format": "table", **INSTANT},
            transformations=RENAMED,
        ),
        "Much=5, Value #B=6",
    ),
    "range": (number("vector($__range_s)"), "n=300"),
    # Twelve columns are some 770 pixels, five minutes 0.5 s a pixel: the scrape interval is the longer one.
    "interval": (number("vector($__interval_ms)"), "n=2000"),
    "rate interval": (number("vector($__rate_interval_ms)"), "n=8000"),
    "rate interval, step of the panel": (number("vector($__rate_interval_ms)") | {"interval": "30s"}, "n=32000"),
    "rate interval, step of the query": (number("vector(${__rate_interval_ms})", interval="30s"), "n=120000"),
    "chosen": (number('count(up{job=~"$job"})'), "n=2"),
    "all": (number('count(up{job=~"$every"}) - count(up)'), "n=0"),
}
"""Panel by title, and how what it shows ends."""


async def test_values_are_asked_for_and_shown_as_grafana_does(live: Live, tmp_path: Path) -> None:
    def chooser(name: str) -> dict[str, Any]:
        query = {"query": "label_values(up, job)", "refId": "v"}
        shared = {"type": "query", "multi": True, "includeAll": True, "allValue": ".+", "refresh": 2}
        return {"name": name, "query": query, **shared}

    panels = [
        {"title": title, "id": place + 1, "gridPos": position(place), **panel}
        for place, (title, (panel, _)) in enumerate(AS_GRAFANA.items())
    ]
    board = tmp_path / "board.json"
    board.write_text(
        json.dumps({"title": "t", "panels": panels, "templating": {"list": [chooser("job"), chooser("every")]}})
    )
    jobs = ("--var", "job=kvtune-router", "--var", "job=kvtune-prefill")
    code, stdout, stderr = await ran(*shot(board, live.prometheus, tmp_path / "out.png", *jobs))
    assert code == 0, (stdout, stderr)
    rows = {row["title"]: row for row in map(orjson.loads, stdout.splitlines())}
    found = {title: row["text"] for title, row in rows.items()}
    wrong = {title: found[title] for title, (_, end) in AS_GRAFANA.items() if not found[title].endswith(end)}
    assert not wrong
    # And so it stands on the page.
    words = {title: row["words"] for title, row in rows.items()}
    assert words["table"] == "table Size Much Value #B 64 5 6"
    assert words["unit"].replace(" ", "") == "unit25%" and words["override"] == "override long 3 s"
    assert words["legend"].endswith("as decode")


async def test_what_cannot_be_drawn_fails_and_says_why(live: Live, tmp_path: Path) -> None:
    def panel(place: int, kind: str, title: str, expr: str) -> dict[str, Any]:
        return {"title": title, "id": place + 1, "gridPos": position(place), **one(kind, expr)}

    panels = [
        panel(0, "timeseries", "Sound", "up"),
        panel(1, "timeseries", "Unparsable", "sum(up"),
        panel(2, "xychart", "Unknown kind", "up"),
        panel(3, "stat", "Nothing there", "no_such_series"),
    ]
    board = tmp_path / "board.json"
    board.write_text(json.dumps({"title": "t", "panels": panels}))
    code, stdout, stderr = await ran(*shot(board, live.prometheus, tmp_path / "out.png"))
    found = {row["title"]: row for row in map(orjson.loads, stdout.splitlines())}
    assert code == 1
    assert {title: row["state"] for title, row in found.items()} == {
        "Sound": "data", "Unparsable": "error", "Unknown kind": "error", "Nothing there": "empty",
    }  # fmt: skip
    assert "parse error" in found["Unparsable"]["text"] and "xychart" in found["Unknown kind"]["text"]
    assert 'panel "Unparsable"' in stderr and 'panel "Unknown kind"' in stderr
    # Routers, engines and `suggest` are one series each.
    assert found["Sound"]["series"] == len(live.engines) + 2


async def test_a_prometheus_that_is_not_there_is_an_error(bundle: None, tmp_path: Path) -> None:
    code, stdout, stderr = await ran(*shot(BOARDS[0], "http://127.0.0.1:9", tmp_path / "out.png"))
    assert code == 1
    assert "http://127.0.0.1:9" in stderr and "error" in {orjson.loads(line)["state"] for line in stdout.splitlines()}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--out", "x.png"), "--dashboard is missing"),
        (("--dashboard", "none.json", "--prometheus", "http://x", "--out", "x.png"), "none.json: no such file"),
        (("--dashbord", "x"), "--dashbord"),
    ],
)
async def test_a_command_line_that_makes_no_sense(bundle: None, arguments: tuple[str, ...], said: str) -> None:
    code, stdout, stderr = await ran("node", str(PREVIEW / "shot.mjs"), *arguments)
    assert (code, stdout) == (2, "") and said in stderr
