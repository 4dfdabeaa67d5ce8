"""What a push would change, before a server is asked to: states, differences, obstacles, files and addresses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtune_dashboards.push import (
    Change,
    Folder,
    PanelDiff,
    PushError,
    State,
    Stored,
    compare,
    connect,
    describe,
    fingerprint,
    push,
    read_directory,
    where_of,
)
from kvtune_dashboards.rendering import boards

Json = dict[str, Any]
PLACE = Folder("kvtune", "f1")


def board(*panels: Json, **more: Any) -> Json:
    return {"uid": "u", "title": "T", "panels": list(panels), **more}


def panel(title: str, **more: Any) -> Json:
    return {"id": 1, "title": title, "type": "stat", "gridPos": {"x": 0, "y": 0, "w": 1, "h": 1}, **more}


def stored(dashboard: Json, **more: Any) -> Stored:
    given = {"version": 3, "folder_uid": "f1", "folder_title": "kvtune", "updated_by": "ada", "updated": "today",
             "message": "", **more}  # fmt: skip
    return Stored(dashboard={**dashboard, "id": 9, "version": given["version"]}, **given)


def test_the_mark_is_of_what_is_sent_and_of_nothing_grafana_sets() -> None:
    one = board(panel("A"))
    assert fingerprint(one) == fingerprint({**one, "id": 5, "version": 8}) == fingerprint(dict(reversed(one.items())))
    assert fingerprint(one) != fingerprint(board(panel("B")))
    assert len({fingerprint(shipped) for shipped in boards()}) == len(boards())


def test_states() -> None:
    one = board(panel("A"))
    assert compare(one, None, PLACE).state is State.NEW
    assert compare(one, stored(one), PLACE) == Change(one, State.UNCHANGED, version=3)
    pushed = stored(board(panel("Migrated")), message=f"x kvtune:{fingerprint(one)} y")
    assert compare(one, pushed, PLACE).state is State.UNCHANGED
    change = compare(one, stored(board(panel("B")), message="kvtune:0123456789ab"), PLACE)
    assert (change.state, change.obstacles, change.version) == (State.CHANGED, (), 3)


@pytest.mark.parametrize("message", ["", "Restored from version 2", "kvtune:xyz", "notkvtune:0123456789abc"])
def test_a_save_without_the_mark_is_somebody_elses(message: str) -> None:
    change = compare(board(panel("A")), stored(board(panel("B")), message=message), PLACE)
    assert change.obstacles == ("last saved by ada at today, not by a push of kvtune",)
    nobody = stored(board(panel("B")), message=None, updated_by="", updated="")
    assert compare(board(), nobody, PLACE).obstacles == (
        "last saved, not by a push of kvtune (its history cannot be read)",
    )


def test_another_folder_is_an_obstacle_even_where_nothing_else_differs() -> None:
    one = board(panel("A"))
    change = compare(one, stored(one, folder_uid="", folder_title=""), PLACE)
    assert change.state is State.CHANGED and change.other == ("folder",) and change.panels == ()
    assert change.obstacles == ("it is in folder 'General', not in 'kvtune'",)
    absent = compare(one, stored(one), Folder("new", None))
    assert absent.obstacles == ("it is in folder 'kvtune', not in 'new'",)


def test_panels_are_told_apart_by_title_also_in_rows() -> None:
    row = panel("Row", type="row", panels=[panel("In", unit="s"), panel("", type="text")])
    other = panel("Row", type="row", panels=[panel("In", unit="ms"), panel("", type="text")], collapsed=True)
    change = compare(
        board(panel("A"), panel("A", unit="s"), other, tags=["new"]), stored(board(panel("A"), panel("A"), row)), PLACE
    )
    assert change.panels == (
        PanelDiff("A (2)", "changed", ("unit",)),
        PanelDiff("Row", "changed", ("collapsed",)),
        PanelDiff("In", "changed", ("unit",)),
    )
    assert change.other == ("tags",)


def test_ids_do_not_matter_and_places_are_layout() -> None:
    far = panel("A", id=77, gridPos={"x": 9, "y": 9, "w": 1, "h": 1})
    change = compare(board(far), stored(board(panel("A"))), PLACE)
    assert (change.panels, change.other) == ((), ("layout",))
    added = compare(board(far, panel("B")), stored(board(panel("A"))), PLACE)
    assert added.panels == (PanelDiff("B", "added"),) and added.other == (), "what is new moves the rest"


def test_lines_for_people() -> None:
    change = Change(
        board(panel("A"), panel("R", type="row")), State.CHANGED, (PanelDiff("A", "changed", ("targets",)),), ("tags",),
        ("why not",), "never",
    )  # fmt: skip
    assert list(describe(change)) == [
        "changed    u                   T", "    panel changed: A: targets", "    also changed: tags", "    ! why not",
        "    ! never",
    ]  # fmt: skip
    assert list(describe(Change(change.dashboard, State.NEW))) == ["new        u                   T (1 panels)"]


def test_nothing_is_asked_of_a_server_where_nothing_differs() -> None:
    """Not even the folder."""
    unchanged = Change(board(), State.UNCHANGED, version=1)
    assert list(push(None, [unchanged], Folder("new", None), "m")) == []  # type: ignore[arg-type]


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "not JSON"),
        ("[]", "no dashboard"),
        ('{"title": "T", "uid": "u"}', "no dashboard"),
        ('{"panels": [], "uid": "u"}', "no title"),
        ('{"panels": [], "title": " ", "uid": "u"}', "no title"),
        ('{"panels": [], "title": "T"}', "no uid"),
        ('{"panels": [], "title": "T", "uid": "a b"}', "no uid"),
        (json.dumps(board(uid="x" * 41)), "no uid"),
        ('{"apiVersion": "dashboard.grafana.app/v2", "spec": {}}', "v2"),
        ('{"title": "T", "elements": {}, "layout": {}}', "v2"),
    ],
)
def test_files_that_are_no_dashboards_are_named(tmp_path: Path, content: str, why: str) -> None:
    (tmp_path / "a.json").write_text(json.dumps(board(uid="good")))
    (tmp_path / "b.json").write_text(content)
    with pytest.raises(PushError, match=why) as caught:
        read_directory(tmp_path)
    assert str(tmp_path / "b.json") in caught.value.message and caught.value.usage


def test_directories(tmp_path: Path) -> None:
    with pytest.raises(PushError, match="not a directory"):
        read_directory(tmp_path / "missing")
    with pytest.raises(PushError, match=r"no \*\.json files"):
        read_directory(tmp_path)
    for name in ("b", "a"):
        (tmp_path / f"{name}.json").write_text(json.dumps(board(uid=name)))
    assert [one["uid"] for one in read_directory(tmp_path)] == ["a", "b"]
    (tmp_path / "c.json").write_text(json.dumps(board(uid="a")))
    with pytest.raises(PushError, match=r"the same uid as .*a\.json"):
        read_directory(tmp_path)


def test_the_boards_that_are_shipped_can_be_pushed(tmp_path: Path) -> None:
    for shipped in boards():
        (tmp_path / f"{shipped['uid']}.json").write_text(json.dumps(shipped))
    assert {one["uid"] for one in read_directory(tmp_path)} == {one["uid"] for one in boards()}


# --- addresses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "api"),
    [
        ("http://h", "http://h/api"),
        ("https://h:3000/", "https://h:3000/api"),
        ("https://h/grafana", "https://h/grafana/api"),
        ("https://h/a/b//", "https://h/a/b/api"),
        ("http://[::1]:3000/g", "http://[::1]:3000/g/api"),
        ("https://h/ü%20x", "https://h/%C3%BC%20x/api"),
    ],
)
def test_addresses_come_apart_for_grafana_api(url: str, api: str) -> None:
    assert connect(url, "t")._client.api.url == api


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("grafana:3000", "not an http"),
        ("ftp://h", "not an http"),
        ("http://", "not an http"),
        ("http://h:port", "not an http"),
        ("https://me:hunter2@h", "a password in the address of https://h"),
        ("https://h/d/abc?orgId=hunter2", "an address of a page"),
        ("https://h/#hunter2", "an address of a page"),
    ],
)
def test_addresses_that_cannot_be_used(url: str, why: str) -> None:
    with pytest.raises(PushError, match=why) as caught:
        connect(url, "t")
    assert caught.value.usage and "hunter2" not in caught.value.message + caught.value.hint


@pytest.mark.parametrize("token", ["", "a b", "a\nb", "ä"])
def test_tokens_that_would_not_fit_a_header(token: str) -> None:
    with pytest.raises(PushError, match="the token is not one word"):
        connect("http://h", token)


def test_certificates_are_checked_unless_told_otherwise(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    assert connect("https://h", "t")._client.api.verify is True
    assert connect("https://h", "t", verify=False)._client.api.verify is False
    with pytest.raises(PushError, match="no such file"):
        connect("https://h", "t", ca_file=ca)
    ca.write_text("x")
    assert connect("https://h", "t", ca_file=ca)._client.api.verify == str(ca)
    with pytest.raises(PushError, match="--insecure-skip-verify with --ca-file"):
        connect("https://h", "t", ca_file=ca, verify=False)


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "grafana_api.grafana_face", None)
    with pytest.raises(PushError, match="grafana-api is not installed") as caught:
        connect("http://h", "t")
    assert "pip install 'kvtune[grafana]'" in caught.value.hint and not caught.value.usage


def test_addresses_for_messages() -> None:
    assert where_of("https://me:hunter2@h/g/?token=hunter2#x") == "https://h/g"
