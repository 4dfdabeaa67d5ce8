"""The files that Grafana reads: the boards' JSON, and what provisions them.

Rendering is pure and repeatable, so that the committed files can be compared with what the code makes of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from kvtune_dashboards.boards import BOARDS
from kvtune_dashboards.lint import all_panels, lint
from kvtune_dashboards.panels import metrics_named

PROVISIONING = "provisioning"
"""Folder of the provisioning files beside the boards."""
FOLDER = "kvtune"
"""Folder of the boards in Grafana."""

_DATASOURCES = """\
# Where Grafana finds the metrics. Copy to /etc/grafana/provisioning/datasources/ and set the two URLs, or leave it out
# where Grafana has a Prometheus already: the boards let the reader choose.
apiVersion: 1
datasources:
  - name: Prometheus
    uid: prometheus
    type: prometheus
    access: proxy
    url: http://prometheus:9090
    jsonData:
      httpMethod: POST
      # The scrape_interval of Prometheus.
      timeInterval: 15s
      # Exemplars of TTFT carry the trace's id: their dots on the boards lead to the trace.
      exemplarTraceIdDestinations:
        - name: trace_id
          datasourceUid: traces
          urlDisplayLabel: Trace of this turn
  # Without traces, remove this and exemplarTraceIdDestinations.
  - name: Traces
    uid: traces
    type: tempo
    access: proxy
    url: http://tempo:3200
"""
_PROVIDER = f"""\
# Where Grafana finds the boards. Copy to /etc/grafana/provisioning/dashboards/ and mount the *.json files at `path`.
apiVersion: 1
providers:
  - name: kvtune
    folder: {FOLDER}
    type: file
    disableDeletion: false
    allowUiUpdates: false
    updateIntervalSeconds: 60
    options:
      path: /var/lib/grafana/dashboards/kvtune
      foldersFromFilesStructure: false
"""


class DashboardsError(Exception):
    """Dashboards that cannot be rendered, read or trusted; the message says what, where and what to do."""


def boards() -> list[dict[str, Any]]:
    """Every board as data, in the order a reader takes them."""
    return [make() for make in BOARDS.values()]


def to_json(board: Mapping[str, Any]) -> str:
    """A board's file: stable order of keys, a newline at the end."""
    return json.dumps(board, indent=2, ensure_ascii=False, sort_keys=True) + "\n"


def render() -> dict[str, str]:
    """Every file by its path below the output folder.

    Raises:
        DashboardsError: when a board breaks a rule of the lint; all findings are in the message.
    """
    made = boards()
    findings = lint(made)
    if findings:
        raise DashboardsError("the boards break rules:\n" + "\n".join(f"  {finding}" for finding in findings))
    files = {f"{board['uid']}.json": to_json(board) for board in made}
    files[f"{PROVISIONING}/datasources.yaml"] = _DATASOURCES
    files[f"{PROVISIONING}/dashboards.yaml"] = _PROVIDER
    return files


def write(directory: Path) -> list[Path]:
    """Write every file below `directory`, which is made if need be; returns their paths.

    Raises:
        DashboardsError: when a board is wrong or a file cannot be written.
    """
    written = []
    for name, content in render().items():
        path = directory / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
        except OSError as error:
            raise DashboardsError(f"cannot write {path}: {error.strerror}") from error
        written.append(path)
    return written


def drift(directory: Path) -> list[str]:
    """What differs between the files below `directory` and what the code renders: a line a file; empty when nothing.

    Raises:
        DashboardsError: when a board is wrong, the folder is missing or a file cannot be read.
    """
    if not directory.is_dir():
        raise DashboardsError(f"{directory} is no folder; write the files first: kvtune dashboards render --out DIR")
    wanted = render()
    found = []
    for name, content in wanted.items():
        path = directory / name
        if not path.exists():
            found.append(f"{path}: is missing")
            continue
        there = _read(path)
        if there != content:
            found.append(f"{path}: {_first_difference(there, content)}")
    strangers = sorted(path for path in directory.glob("kvtune-*.json") if path.name not in wanted)
    return found + [f"{path}: no board of this name is rendered" for path in strangers]


def load(directory: Path) -> list[dict[str, Any]]:
    """The boards in `directory` (its `*.json`), parsed.

    Raises:
        DashboardsError: when there is none, or one is not the JSON of a dashboard.
    """
    if not directory.is_dir():
        raise DashboardsError(f"{directory} is no folder; name one that holds dashboards as *.json")
    found = []
    for path in sorted(directory.glob("*.json")):
        try:
            board = json.loads(_read(path))
        except ValueError as error:
            raise DashboardsError(f"{path}: is not JSON: {error}") from error
        if not isinstance(board, dict) or not isinstance(board.get("panels"), list):
            raise DashboardsError(f"{path}: is not a dashboard: it has no list of panels")
        found.append(board)
    if not found:
        raise DashboardsError(f"{directory} holds no *.json")
    return found


def panel_list() -> str:
    """The boards and their panels as Markdown, for the documentation."""
    lines = []
    for board in boards():
        lines += [f"### {board['title']}", "", f"`{board['uid']}`. {board['description']}", ""]
        lines += ["| Panel | Kind | What it answers | Reads |", "|---|---|---|---|"]
        for panel in all_panels(board):
            answer, _, reads = panel["description"].partition("\n\nReads ")
            names = ", ".join(f"`{name}`" for name in metrics_named(reads)) or "-"
            lines.append(f"| {panel['title']} | {panel['type']} | {_cell(answer)} | {names} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DashboardsError(f"cannot read {path}: {error}") from error


def _first_difference(there: str, wanted: str) -> str:
    for number, (old, new) in enumerate(zip_longest(there.splitlines(), wanted.splitlines()), start=1):
        if old != new:
            was = "nothing" if old is None else old.strip()
            now = "nothing" if new is None else new.strip()
            return f"line {number} is {was!r}, rendered {now!r}"
    return "its end of file differs"


if __name__ == "__main__":
    print(panel_list(), end="")
