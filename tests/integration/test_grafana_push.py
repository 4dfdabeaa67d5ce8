"""`kvtune dashboards push` with the real grafana-api package, against a stand-in for Grafana on loopback.

The stand-in answers as Grafana's HTTP API is documented to: folders, dashboards by uid, saves with their 400, 401, 403,
404 and 412, the history in the shape of older and of newer servers. It is not Grafana.
"""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import typer
from typer.testing import CliRunner

from kvtune_cli.push import push
from kvtune_dashboards.push import GrafanaApi, Json, fingerprint

TOKEN = "glsa_hunter2-editor"
VIEWER = "glsa_hunter2-viewer"
app = typer.Typer()
app.command()(push)

Answer = tuple[int, Any] | tuple[int, Any, dict[str, str]]


def said(message: str, **more: str) -> dict[str, str]:
    return {"message": message, "traceID": "", **more}


@dataclass
class Save:
    """One version of a dashboard."""

    dashboard: Json
    folder: str
    message: str
    by: str


@dataclass
class Grafana:
    """The stand-in's state. `fault` may answer in its stead; `before_save` runs between a push's look and its save."""

    url: str = ""
    prefix: str = ""
    old: bool = False
    """Gives the history as a list, as Grafana did until version 11."""
    folders: dict[str, str] = field(default_factory=dict)
    dashboards: dict[str, list[Save]] = field(default_factory=dict)
    provisioned: dict[str, str] = field(default_factory=dict)
    fault: Callable[[str, str], Answer | None] = lambda method, path: None
    before_save: Callable[[], None] = lambda: None
    asked: list[tuple[str, str]] = field(default_factory=list)
    bodies: list[Json] = field(default_factory=list)
    tokens: dict[str, str] = field(default_factory=lambda: {TOKEN: "sa-1-kvtune", VIEWER: "sa-2-viewer"})

    def save(self, dashboard: Json, *, folder: str = "", message: str = "", by: str = "ada") -> int:
        versions = self.dashboards.setdefault(dashboard["uid"], [])
        stored = {**dashboard, "id": 7, "version": len(versions) + 1}
        versions.append(Save(stored, folder, message, by))
        return len(versions)

    def answer(self, method: str, path: str, headers: Any, body: Any) -> Answer:
        self.asked.append((method, path))
        fault = self.fault(method, path)
        if fault is not None:
            return fault
        if not path.startswith(f"{self.prefix}/api/"):
            return 404, "<html><body>nginx: not found</body></html>"
        path = path.removeprefix(f"{self.prefix}/api")
        if (method, path) == ("GET", "/health"):
            return 200, {"database": "ok", "version": "10.4.2" if self.old else "12.1.0", "commit": "abc"}
        who = self.tokens.get(headers.get("authorization", "").removeprefix("Bearer "))
        if who is None:
            return 401, said("Invalid API key", messageId="api-key.invalid")
        if (method, path) == ("GET", "/folders"):
            return 200, [{"id": n, "uid": uid, "title": title} for n, (uid, title) in enumerate(self.folders.items())]
        if (method, path) == ("POST", "/folders"):
            return self.make_folder(who, body)
        if (method, path) == ("POST", "/dashboards/db"):
            return self.store(who, body)
        match = re.fullmatch(r"/dashboards/uid/([^/?]+)(/versions\?limit=1)?", path)
        assert match is not None and method == "GET", (method, path)
        return self.history(who, match[1]) if match[2] else self.read(match[1])

    @staticmethod
    def denied(action: str) -> Answer:
        message = f"You'll need additional permissions to perform this action. Permissions needed: {action}"
        return 403, said(message, accessErrorId="ACE0", title="Access denied")

    def make_folder(self, who: str, body: Json) -> Answer:
        if who == "sa-2-viewer":
            return self.denied("folders:create")
        uid = f"f{len(self.folders) + 1}"
        self.folders[uid] = body["title"]
        return 200, {"id": 1, "uid": uid, "title": body["title"]}

    def read(self, uid: str) -> Answer:
        if uid not in self.dashboards:
            return 404, said("Dashboard not found")
        save = self.dashboards[uid][-1]
        meta = {
            "version": len(self.dashboards[uid]), "folderUid": save.folder,
            "folderTitle": self.folders.get(save.folder, ""),
            "updatedBy": save.by, "updated": "2026-01-02T03:04:05Z", "provisioned": uid in self.provisioned,
            "provisionedExternalId": self.provisioned.get(uid, ""),
        }  # fmt: skip
        return 200, {"meta": meta, "dashboard": save.dashboard}

    def history(self, who: str, uid: str) -> Answer:
        if who == "sa-2-viewer":
            return self.denied("dashboards:write")
        versions = self.dashboards[uid]
        rows = [{"version": len(versions), "createdBy": versions[-1].by, "message": versions[-1].message}]
        return 200, rows if self.old else {"continueToken": "", "versions": rows}

    def store(self, who: str, body: Json) -> Answer:
        self.bodies.append(body)
        dashboard, folder = body["dashboard"], body.get("folderUid", "")
        self.before_save()
        if who == "sa-2-viewer":
            return self.denied("dashboards:create")
        if not dashboard.get("title"):
            return 400, said("Dashboard title cannot be empty", status="empty-name")
        if folder and folder not in self.folders:
            return 404, said("folder not found")
        if dashboard["uid"] in self.provisioned:
            return 400, said("Cannot save provisioned dashboard")
        versions = self.dashboards.get(dashboard["uid"], [])
        if versions and dashboard.get("version", 0) != len(versions) and not body.get("overwrite"):
            return 412, said("The dashboard has been changed by someone else", status="version-mismatch")
        for uid, other in self.dashboards.items():
            same = (other[-1].dashboard["title"], other[-1].folder) == (dashboard["title"], folder)
            if uid != dashboard["uid"] and same:
                return 412, said("A dashboard with the same name in the folder already exists", status="name-exists")
        version = self.save(dashboard, folder=folder, message=body.get("message", ""), by=who)
        path = f"{self.prefix}/d/{dashboard['uid']}"
        return 200, {"id": 7, "uid": dashboard["uid"], "url": path, "status": "success", "version": version}

    def writes(self) -> list[str]:
        return [path for method, path in self.asked if method != "GET"]


@pytest.fixture
def grafana() -> Iterator[Grafana]:
    state = Grafana()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            status, answer, *more = state.answer(self.command, self.path, self.headers, body)
            page = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header(
                "content-type", "text/html; charset=utf-8" if isinstance(answer, str) else "application/json"
            )
            self.send_header("content-length", str(len(page)))
            for name, value in (more[0] if more else {}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(page)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    yield state
    server.shutdown()
    server.server_close()


def board(uid: str, title: str, *panels: str, **more: Any) -> Json:
    return {
        "id": None, "uid": uid, "title": title, "schemaVersion": 39, "tags": ["kvtune"],
        "panels": [
            {
                "id": n, "type": "stat", "title": name, "gridPos": {"x": 0, "y": n, "w": 6, "h": 4},
                "targets": [{"expr": name}],
            }
            for n, name in enumerate(panels, 1)
        ], **more,
    }  # fmt: skip


REUSE = board("kvtune-reuse", "kvtune / Reuse", "Hits", "Misses")
FLEET = board("kvtune-fleet", "kvtune / Fleet", "Engines")


@pytest.fixture
def boards(tmp_path: Path) -> Path:
    directory = tmp_path / "boards"
    directory.mkdir()
    for one in (REUSE, FLEET):
        (directory / f"{one['uid']}.json").write_text(json.dumps(one))
    return directory


def run(grafana: Grafana, boards: Path, *more: str, token: str = TOKEN, url: str | None = None) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a push; the token is in neither."""
    result = CliRunner().invoke(
        app, ["--url", grafana.url if url is None else url, "--dir", str(boards), *more], env={"GRAFANA_TOKEN": token}
    )
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "hunter2" not in result.stdout + result.stderr
    return result.exit_code, result.stdout, result.stderr


def change(boards: Path, one: Json) -> None:
    (boards / f"{one['uid']}.json").write_text(json.dumps(one))


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("prefix", ["", "/grafana", "/a/b"])
def test_a_first_push_makes_the_folder_and_a_second_one_changes_nothing(
    grafana: Grafana, boards: Path, old: bool, prefix: str
) -> None:
    grafana.old, grafana.prefix = old, prefix
    code, out, err = run(grafana, boards, "--message", "commit 1234567", url=f"{grafana.url}{prefix}/")
    assert code == 0, err
    assert out.splitlines() == [
        "new        kvtune-fleet        kvtune / Fleet (1 panels)",
        "new        kvtune-reuse        kvtune / Reuse (2 panels)",
    ]
    assert "folder 'kvtune' (to be made)" in err and "2 saved, 0 unchanged" in err
    assert grafana.folders == {"f1": "kvtune"}
    for body in grafana.bodies:
        assert "id" not in body["dashboard"] and body["folderUid"] == "f1" and body["overwrite"] is False
        assert "folderId" not in body
    stored = grafana.dashboards["kvtune-reuse"][0]
    assert stored.message == f"commit 1234567 kvtune:{fingerprint(REUSE)}" and stored.folder == "f1"
    assert stored.dashboard["panels"] == REUSE["panels"]

    grafana.asked.clear()
    code, out, err = run(grafana, boards, url=f"{grafana.url}{prefix}")
    assert code == 0 and [line.split()[0] for line in out.splitlines()] == ["unchanged", "unchanged"]
    assert "0 saved, 2 unchanged" in err and grafana.writes() == []


def test_what_a_push_saved_is_replaced_by_the_next_one_and_the_panels_are_named(grafana: Grafana, boards: Path) -> None:
    assert run(grafana, boards)[0] == 0
    newer = board("kvtune-reuse", "kvtune / Reuse", "Hits", "Reasons", refresh="1m")
    newer["panels"][0]["targets"] = [{"expr": "other"}]
    newer["panels"][0]["unit"] = "s"
    change(boards, newer)
    code, out, _ = run(grafana, boards)
    assert code == 0
    assert out.splitlines() == [
        "unchanged  kvtune-fleet        kvtune / Fleet",
        "changed    kvtune-reuse        kvtune / Reuse",
        "    panel changed: Hits: targets, unit",
        "    panel added: Reasons",
        "    panel removed: Misses",
        "    also changed: refresh",
    ]
    assert [save.dashboard["version"] for save in grafana.dashboards["kvtune-reuse"]] == [1, 2]
    assert grafana.bodies[-1]["dashboard"]["version"] == 1, "the version that was compared with"


def test_a_server_that_migrates_what_it_stores_does_not_make_a_difference(grafana: Grafana, boards: Path) -> None:
    assert run(grafana, boards)[0] == 0
    for saves in grafana.dashboards.values():
        saves[-1].dashboard = {**saves[-1].dashboard, "schemaVersion": 42, "preload": False}
    grafana.asked.clear()
    code, out, _ = run(grafana, boards)
    assert code == 0 and out.count("unchanged") == 2 and grafana.writes() == []


def test_panels_that_only_move_are_a_matter_of_layout(grafana: Grafana, boards: Path) -> None:
    assert run(grafana, boards)[0] == 0
    moved = board("kvtune-reuse", "kvtune / Reuse", "Misses", "Hits")
    change(boards, moved)
    code, out, _ = run(grafana, boards, "--dry-run")
    assert code == 0 and out.splitlines()[1:] == [
        "changed    kvtune-reuse        kvtune / Reuse",
        "    also changed: layout",
    ]


def test_a_dry_run_shows_and_writes_nothing(grafana: Grafana, boards: Path) -> None:
    code, out, err = run(grafana, boards, "--dry-run")
    assert code == 0 and out.count("new ") == 2 and "nothing was written" in err
    assert grafana.writes() == [] and grafana.folders == {}


# --- surprises ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("old", [False, True])
def test_what_was_edited_by_hand_is_not_overwritten_unasked(grafana: Grafana, boards: Path, old: bool) -> None:
    grafana.old = old
    assert run(grafana, boards)[0] == 0
    edited = board("kvtune-reuse", "kvtune / Reuse", "Hits", "Misses", "Ada's panel")
    grafana.save(edited, folder="f1", by="ada")
    change(boards, board("kvtune-fleet", "kvtune / Fleet", "Engines", "Restarts"))
    grafana.asked.clear()
    for more in ((), ("--dry-run",)):
        code, out, err = run(grafana, boards, *more)
        assert code == 1
        assert "    panel removed: Ada's panel\n" in out
        assert "    ! last saved by ada at 2026-01-02T03:04:05Z, not by a push of kvtune\n" in out
        assert err.endswith(
            "kvtune: kvtune-reuse: not as a push of kvtune left it; nothing was written. Ask whoever saved it, or "
            "replace it with --overwrite.\n"
        )
    assert grafana.writes() == [], "the other one that could be saved is not saved either"
    code, _, err = run(grafana, boards, "--overwrite")
    assert code == 0 and "saved kvtune-reuse as version 3" in err
    assert len(grafana.dashboards["kvtune-reuse"][-1].dashboard["panels"]) == 2
    assert all(body["overwrite"] is False for body in grafana.bodies), "no version is replaced that was not read"


def test_a_dashboard_of_the_same_content_needs_no_push_whoever_saved_it(grafana: Grafana, boards: Path) -> None:
    grafana.folders["f1"] = "kvtune"
    for one in (REUSE, FLEET):
        grafana.save(one, folder="f1", by="ada")
    code, out, _ = run(grafana, boards)
    assert code == 0 and out.count("unchanged") == 2 and grafana.writes() == []


@pytest.mark.parametrize("overwrite", [(), ("--overwrite",)])
def test_a_save_in_between_is_a_412_that_names_who(grafana: Grafana, boards: Path, overwrite: tuple[str, ...]) -> None:
    assert run(grafana, boards)[0] == 0
    change(boards, board("kvtune-reuse", "kvtune / Reuse", "Hits"))
    grafana.before_save = lambda: grafana.save(REUSE, folder="f1", by="grace")
    code, _, err = run(grafana, boards, *overwrite)
    assert code == 1
    assert "saving dashboard kvtune-reuse: HTTP 412: The dashboard has been changed by someone else" in err
    assert "saved by grace at 2026-01-02T03:04:05Z while this ran. Ask them" in err and "--overwrite" in err
    assert grafana.dashboards["kvtune-reuse"][-1].by == "grace"


def test_one_in_another_folder_is_moved_only_when_asked(grafana: Grafana, boards: Path) -> None:
    grafana.folders.update(f1="kvtune", f2="Ada's")
    for one in (REUSE, FLEET):
        grafana.save(one, folder="f2", message=f"kvtune:{fingerprint(one)}")
    code, out, _ = run(grafana, boards)
    assert code == 1 and out.count("    ! it is in folder \"Ada's\", not in 'kvtune'\n") == 2 and grafana.writes() == []
    assert run(grafana, boards, "--folder", "f2")[0] == 0 and grafana.writes() == [], "by its uid"
    assert run(grafana, boards, "--overwrite")[0] == 0
    assert {saves[-1].folder for saves in grafana.dashboards.values()} == {"f1"}


def test_the_top_level_is_a_place_too(grafana: Grafana, boards: Path) -> None:
    assert run(grafana, boards, "--folder", "General")[0] == 0
    assert {body["folderUid"] for body in grafana.bodies} == {""} and grafana.folders == {}
    assert run(grafana, boards, "--folder", "General")[1].count("unchanged") == 2


def test_two_folders_of_a_name_are_told_apart_by_uid(grafana: Grafana, boards: Path) -> None:
    grafana.folders.update(f1="kvtune", f2="kvtune")
    code, _, err = run(grafana, boards)
    assert code == 1 and "has 2 folders 'kvtune'" in err and "by its uid: f1, f2" in err
    assert run(grafana, boards, "--folder", "f2")[0] == 0
    assert {body["folderUid"] for body in grafana.bodies} == {"f2"}


def test_a_name_that_is_taken_is_a_412_of_its_own(grafana: Grafana, boards: Path) -> None:
    """With `overwrite`, older servers would replace that other dashboard."""
    grafana.folders["f1"] = "kvtune"
    grafana.save(board("other", "kvtune / Reuse"), folder="f1")
    for more in ((), ("--overwrite",)):
        code, _, err = run(grafana, boards, *more)
        assert code == 1 and "HTTP 412: A dashboard with the same name" in err
        assert "Another one there is called 'kvtune / Reuse'" in err
    assert "kvtune-reuse" not in grafana.dashboards and len(grafana.dashboards["other"]) == 1


def test_one_that_is_provisioned_cannot_be_pushed(grafana: Grafana, boards: Path) -> None:
    grafana.folders["f1"] = "kvtune"
    grafana.save(board("kvtune-reuse", "kvtune / Reuse"), folder="f1")
    grafana.provisioned["kvtune-reuse"] = "kvtune/reuse.json"
    code, out, err = run(grafana, boards, "--overwrite")
    assert code == 1 and "    ! it is provisioned from kvtune/reuse.json" in out
    assert "Change the files instead" in err and grafana.writes() == []


# --- refusals -------------------------------------------------------------------------------------------------------


def test_a_wrong_token_is_a_401(grafana: Grafana, boards: Path) -> None:
    code, out, err = run(grafana, boards, token="glsa_hunter2-wrong")
    assert code == 1 and out == ""
    assert f"kvtune: {grafana.url}, GET /api/folders: HTTP 401" in err and "The token was not accepted" in err


def test_a_token_that_may_only_look_is_a_403_that_says_what_it_needs(grafana: Grafana, boards: Path) -> None:
    code, out, err = run(grafana, boards, token=VIEWER)
    assert code == 1 and out.count("new ") == 2
    assert "HTTP 403" in err or "Permissions needed: folders:create" in err
    assert "Permissions needed: folders:create" in err and "folders:read and :create" in err
    assert run(grafana, boards, "--dry-run", token=VIEWER)[0] == 0


def test_where_the_history_is_not_to_be_read_nothing_is_taken_for_ours(grafana: Grafana, boards: Path) -> None:
    assert run(grafana, boards)[0] == 0
    change(boards, board("kvtune-reuse", "kvtune / Reuse", "Hits"))
    code, out, _ = run(grafana, boards, token=VIEWER)
    assert code == 1 and "not by a push of kvtune (its history cannot be read)" in out


def only(path: str, answer: Answer) -> Callable[[str, str], Answer | None]:
    return lambda method, asked: answer if asked.startswith(path) else None


PAGE = "<html><title>Grafana</title>Log in. A message for you.</html>"


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (only("/api/health", (200, PAGE)), "HTTP 200 with text/html instead of JSON"),
        (only("/api/health", (404, PAGE)), "HTTP 404 with text/html instead of JSON"),
        (only("/api/health", (502, PAGE)), "Something before Grafana answers for it"),
        (only("/api/health", (200, {"status": "ok"})), "answers, but not as Grafana does"),
        (only("/api/health", (200, ["ok"])), "answers, but not as Grafana does"),
        (only("/api/health", (503, {"database": "failing"})), "GET /api/health: HTTP 503"),
        (only("/api", (302, "", {"location": "https://sso.example/login?state=x"})), "redirects to https://sso.example/login\n"),
        (only("/api/folders", (200, {"folders": []})), "GET /api/folders: an answer that is not Grafana's"),
        (only("/api/folders", (500, said("internal error"))), "HTTP 500: internal error"),
        (only("/api/folders", (429, said("slow down"))), "HTTP 429: slow down"),
        (only("/api/folders", (404, said("Not found"))), "HTTP 404: Not found"),
        (only("/api/folders", (500, "null")), "an answer that is not Grafana's"),
        (only("/api/folders", (400, said(f"who is {TOKEN}?"))), "who is ***?"),
        (only("/api/dashboards/uid", (200, PAGE)), "HTTP 200 with text/html"),
        (only("/api/dashboards/uid", (200, {"meta": {}})), "reading dashboard kvtune-fleet: an answer that is not"),
        (only("/api/dashboards/db", (400, said("bad request data"))), "HTTP 400: bad request data"),
        (only("/api/dashboards/db", (404, said("folder not found"))), "The folder is gone"),
        (only("/api/dashboards/db", (412, said("x", status="plugin-dashboard"))), "It belongs to a plug-in"),
        (only("/api/dashboards/db", (504, said("timeout"))), "HTTP 504: timeout"),
    ],
)  # fmt: skip
def test_answers_that_are_no_use_are_explained(grafana: Grafana, boards: Path, fault: Any, why: str) -> None:
    grafana.folders["f1"] = "kvtune"
    grafana.fault = fault
    code, _, err = run(grafana, boards)
    assert code == 1 and why in err, err
    message, hint = err.splitlines()[-2:]
    assert message.startswith(f"kvtune: {grafana.url}") and hint and "Traceback" not in err
    assert "state=x" not in err


def test_a_folder_that_only_others_see_is_said_to_be_there(grafana: Grafana, boards: Path) -> None:
    grafana.fault = lambda method, path: (
        (409, said("name taken")) if (method, path) == ("POST", "/api/folders") else None
    )
    code, _, err = run(grafana, boards)
    assert code == 1 and "making folder 'kvtune': HTTP 409: name taken" in err and "cannot see" in err


def test_a_server_that_is_not_there_or_does_not_answer(grafana: Grafana, boards: Path) -> None:
    code, _, err = run(grafana, boards, url="http://127.0.0.1:1")
    assert code == 1 and "kvtune: http://127.0.0.1:1, GET /api/health: Connection refused\n" in err
    with socket.create_server(("127.0.0.1", 0)) as silent:
        code, _, err = run(grafana, boards, "--timeout", "200ms", url=f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert code == 1 and "no answer in time" in err and "--timeout" in err
    code, _, err = run(grafana, boards, url=grafana.url.replace("http://", "https://"))
    assert code == 1 and "--ca-file" in err and "SSL" in err and grafana.asked == []


def test_a_sub_path_that_is_missing_is_said(grafana: Grafana, boards: Path) -> None:
    grafana.prefix = "/grafana"
    code, _, err = run(grafana, boards)
    assert code == 1 and "HTTP 404 with text/html" in err and "sub-path" in err


def test_saves_before_a_failure_stay_and_are_told(grafana: Grafana, boards: Path) -> None:
    seen: list[str] = []

    def second(method: str, path: str) -> Answer | None:
        if path == "/api/dashboards/db":
            seen.append(path)
        return (500, said("disk full")) if len(seen) == 2 else None

    grafana.fault = second
    code, _, err = run(grafana, boards)
    assert code == 1 and "saved kvtune-fleet as version 1\n" in err and "saving dashboard kvtune-reuse: HTTP 500" in err
    grafana.fault = lambda method, path: None
    code, out, _ = run(grafana, boards)
    assert code == 0 and [line.split()[0] for line in out.splitlines()] == ["unchanged", "new"]


@pytest.mark.parametrize("raw", ["api", "client"])
def test_a_client_of_ones_own_can_be_handed_in(raw: str) -> None:
    """With the calls of grafana-api, which its successor kept but for one name."""

    class Calls:
        def __init__(self, **calls: Any) -> None:
            self.__dict__.update(calls)

    class Error(Exception):
        status_code, response = 404, {"message": "Dashboard not found"}

    def absent(uid: str) -> Any:
        raise Error

    sent = []
    client = Calls(
        **{raw: Calls(GET=lambda path: {"database": "ok", "version": "13.2.0"})},
        folder=Calls(get_all_folders=lambda: [{"uid": "f1", "title": "kvtune"}]),
        dashboard=Calls(
            get_dashboard=absent, update_dashboard=lambda body: sent.append(body) or {"version": 1, "url": "/d/x"}
        ),
    )
    target = GrafanaApi(client, "https://grafana.example")
    assert target.health() == "13.2.0" and target.get_dashboard("kvtune-reuse") is None
    folder = target.ensure_folder("kvtune", create=True)
    saved = target.upsert_dashboard(REUSE, folder_uid=folder.uid or "", version=None, message="m")
    assert (
        (saved.version, saved.path) == (1, "/d/x") and sent[0]["folderUid"] == "f1" and "id" not in sent[0]["dashboard"]
    )


def test_the_server_is_named_without_what_logs_in(grafana: Grafana, boards: Path) -> None:
    parts = urlsplit(grafana.url)
    code, _, err = run(grafana, boards, url=f"http://me:hunter2@{parts.netloc}")
    assert code == 2 and "a password in the address" in err and grafana.asked == []
