"""Dashboards into a Grafana server: what a push would change, and the writing of it.

Nothing is overwritten that was not shown. Each save carries a mark (`kvtune:` and a hash of what was sent) in its
message, which Grafana keeps in the dashboard's history: where the newest save has none, somebody else made it, and that
is an obstacle. A save is always of the version that was read (`overwrite` stays false), so that Grafana itself refuses
it where somebody saved in between.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import quote, urlsplit

Json = dict[str, Any]
T = TypeVar("T")

DEFAULT_TIMEOUT_S = 10.0
ROOT_FOLDER = "General"
"""What Grafana called its top level; it has no uid."""
_MARK = re.compile(r"\bkvtune:([0-9a-f]{12})\b")
_SERVER_OWN = ("id", "version")
"""Keys that Grafana sets itself."""
_PLACE = ("id", "gridPos")
"""Keys of a panel that say where it is, not what."""
_UID = re.compile(r"[A-Za-z0-9_-]{1,40}")
_SAID = 300


class PushError(Exception):
    """A push that cannot go on: `message` says what and where, `hint` what to do. `usage`: the options are wrong."""

    def __init__(self, message: str, hint: str, *, usage: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.usage = usage


# --- what is there, and what would change ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder of Grafana. `uid` is None where it is not there yet, and empty for the top level."""

    title: str
    uid: str | None


@dataclass(frozen=True, slots=True)
class Stored:
    """A dashboard as Grafana holds it."""

    dashboard: Json
    version: int
    folder_uid: str
    folder_title: str
    updated_by: str
    updated: str
    """When it was last saved, as Grafana says it; who and when may be empty."""
    message: str | None
    """What its newest save said; None where the history cannot be read."""
    provisioned_from: str | None = None
    """The file it is provisioned from."""


@dataclass(frozen=True, slots=True)
class Saved:
    """What Grafana says of a save."""

    version: int
    path: str
    """Of the dashboard's page, from the server's root; empty where Grafana did not say."""


class GrafanaTarget(Protocol):
    """What a push needs of a Grafana server. Each raises PushError where the server does not do it."""

    def health(self) -> str:
        """The server's version, `unknown` where it hides that."""
        ...

    def ensure_folder(self, title: str, *, create: bool) -> Folder:
        """The folder of that title (or uid); made where it is absent, if `create`."""
        ...

    def get_dashboard(self, uid: str) -> Stored | None:
        """The dashboard of that uid; None where there is none."""
        ...

    def upsert_dashboard(self, dashboard: Json, *, folder_uid: str, version: int | None, message: str) -> Saved:
        """Save it: a new one, or a newer one than `version`, which must still be the newest."""
        ...


class State(StrEnum):
    """How a dashboard compares with the one of the same uid in Grafana."""

    NEW = "new"
    CHANGED = "changed"
    UNCHANGED = "unchanged"


@dataclass(frozen=True, slots=True)
class PanelDiff:
    """One panel that differs: `what` is added, removed or changed (then `keys` names its parts)."""

    title: str
    what: str
    keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Change:
    """What a push would do about one dashboard."""

    dashboard: Json
    state: State
    panels: tuple[PanelDiff, ...] = ()
    other: tuple[str, ...] = ()
    """What differs beside the panels, by key of the dashboard; `layout` and `folder` among them."""
    obstacles: tuple[str, ...] = ()
    """Why it is not to be overwritten unasked."""
    forbidden: str = ""
    """Why Grafana would not let it be saved at all."""
    version: int | None = None
    """The stored version it was compared with."""

    @property
    def uid(self) -> str:
        """The dashboard's uid."""
        return str(self.dashboard["uid"])

    @property
    def title(self) -> str:
        """The dashboard's title."""
        return str(self.dashboard["title"])


def fingerprint(dashboard: Json) -> str:
    """12 hex digits that tell what was pushed; what Grafana sets itself is left out."""
    text = json.dumps(_content(dashboard), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _content(dashboard: Json) -> Json:
    return {key: value for key, value in dashboard.items() if key not in _SERVER_OWN}


def compare(dashboard: Json, stored: Stored | None, folder: Folder) -> Change:
    """What pushing `dashboard` into `folder` would change, against what is `stored` under its uid."""
    if stored is None:
        return Change(dashboard, State.NEW)
    mark = _MARK.search(stored.message or "")
    # Newer servers migrate what they store: what they give back need not be equal to what was sent.
    same = (mark is not None and mark[1] == fingerprint(dashboard)) or _content(stored.dashboard) == _content(dashboard)
    moved = stored.folder_uid != folder.uid
    if same and not moved:
        return Change(dashboard, State.UNCHANGED, version=stored.version)
    panels, other = ((), ()) if same else _differences(stored.dashboard, dashboard)
    obstacles = []
    if not same and mark is None:
        by = f" by {stored.updated_by}" if stored.updated_by else ""
        at = f" at {stored.updated}" if stored.updated else ""
        unknown = " (its history cannot be read)" if stored.message is None else ""
        obstacles.append(f"last saved{by}{at}, not by a push of kvtune{unknown}")
    if moved:
        obstacles.append(f"it is in folder {stored.folder_title or ROOT_FOLDER!r}, not in {folder.title!r}")
    origin = stored.provisioned_from
    return Change(
        dashboard, State.CHANGED, panels, (*other, *(("folder",) if moved else ())), tuple(obstacles),
        "" if origin is None else f"it is provisioned from {origin or 'a file'}, and Grafana saves no such dashboard",
        stored.version,
    )  # fmt: skip


def _differences(old: Json, new: Json) -> tuple[tuple[PanelDiff, ...], tuple[str, ...]]:
    before, after = _panels(old), _panels(new)
    found = [
        PanelDiff(name, "changed", keys)
        for name, panel in after.items()
        if name in before and (keys := _keys(before[name], panel, _PLACE))
    ]
    found += [PanelDiff(name, "added") for name in after if name not in before]
    found += [PanelDiff(name, "removed") for name in before if name not in after]
    other = _keys(old, new, ("panels", *_SERVER_OWN))
    placed = [[(name, panel.get("gridPos")) for name, panel in some.items()] for some in (before, after)]
    if placed[0] != placed[1] and set(before) == set(after):
        other = (*other, "layout")
    return tuple(found), other


def _keys(old: Mapping[str, Any], new: Mapping[str, Any], without: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted(key for key in {*old, *new} if key not in without and old.get(key) != new.get(key)))


def _panels(dashboard: Json) -> dict[str, Json]:
    """Panels by title, those in collapsed rows too; one of a title that was there before gets a number."""
    found: dict[str, Json] = {}

    def take(panels: Any) -> None:
        for panel in panels if isinstance(panels, list) else ():
            if not isinstance(panel, dict):
                continue
            title = str(panel.get("title") or f"({panel.get('type', 'panel')} without a title)")
            name, number = title, 2
            while name in found:
                name, number = f"{title} ({number})", number + 1
            found[name] = {key: value for key, value in panel.items() if key != "panels"}
            take(panel.get("panels"))

    take(dashboard.get("panels"))
    return found


def plan(target: GrafanaTarget, dashboards: Sequence[Json], folder: Folder) -> list[Change]:
    """What pushing all of them would change. Reads only."""
    return [compare(dashboard, target.get_dashboard(str(dashboard["uid"])), folder) for dashboard in dashboards]


def push(
    target: GrafanaTarget, changes: Sequence[Change], folder: Folder, message: str
) -> Iterator[tuple[Change, Saved]]:
    """Save what differs, one by one, into `folder`, which is made first where it is absent.

    Overcoming obstacles is the caller's decision: what is handed in is saved. Raises PushError where a save fails;
    those before it stay.
    """
    pending = [change for change in changes if change.state is not State.UNCHANGED]
    if pending and folder.uid is None:
        folder = target.ensure_folder(folder.title, create=True)
    for change in pending:
        marked = f"{message} kvtune:{fingerprint(change.dashboard)}".strip()
        assert folder.uid is not None
        yield (
            change,
            target.upsert_dashboard(change.dashboard, folder_uid=folder.uid, version=change.version, message=marked),
        )


def describe(change: Change) -> Iterator[str]:
    """The change in lines of text, the first one of the dashboard as a whole."""
    count = len([panel for panel in _panels(change.dashboard).values() if panel.get("type") != "row"])
    more = f" ({count} panels)" if change.state is State.NEW else ""
    yield f"{change.state:<9}  {change.uid:<18}  {change.title}{more}"
    for panel in change.panels:
        yield f"    panel {panel.what}: {panel.title}{': ' + ', '.join(panel.keys) if panel.keys else ''}"
    if change.other:
        yield f"    also changed: {', '.join(change.other)}"
    for obstacle in (*change.obstacles, *((change.forbidden,) if change.forbidden else ())):
        yield f"    ! {obstacle}"


# --- what is pushed -------------------------------------------------------------------------------------------------


def read_directory(directory: Path) -> list[Json]:
    """The dashboards in the `*.json` files of a directory, by name. Raises PushError that names the file."""
    if not directory.is_dir():
        raise _wrong(f"--dir: {directory}: not a directory", "Give one that holds dashboards as *.json.")
    files = sorted(directory.glob("*.json"))
    if not files:
        raise _wrong(f"--dir: {directory}: no *.json files", "Write some: kvtune dashboards render --out DIR.")
    found: dict[str, Path] = {}
    dashboards = []
    for file in files:
        try:
            dashboard = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise _wrong(f"{file}: {error.strerror}", "Give files that can be read.") from None
        except ValueError as error:
            raise _wrong(f"{file}: not JSON: {error}", "Give Grafana dashboards in classic JSON.") from None
        why = _not_a_dashboard(dashboard)
        if why:
            raise _wrong(f"{file}: {why}", "Give Grafana dashboards in classic JSON, with uid, title and panels.")
        if dashboard["uid"] in found:
            raise _wrong(f"{file}: the same uid as {found[dashboard['uid']]}", "Give each dashboard a uid of its own.")
        found[dashboard["uid"]] = file
        dashboards.append(dashboard)
    return dashboards


def _not_a_dashboard(found: Any) -> str:
    if isinstance(found, dict) and ("spec" in found or "elements" in found):
        return "a dashboard of the v2 or resource schema, which the API of old and new servers does not take"
    if not isinstance(found, dict) or not isinstance(found.get("panels"), list):
        return "no dashboard: an object with a list of panels is wanted"
    if not isinstance(found.get("title"), str) or not found["title"].strip():
        return "no title"
    if not isinstance(found.get("uid"), str) or not _UID.fullmatch(found["uid"]):
        return "no uid of 1 to 40 letters, digits, - and _"
    return ""


def _wrong(message: str, hint: str) -> PushError:
    return PushError(message, hint, usage=True)


# --- Grafana's HTTP API, over grafana-api ---------------------------------------------------------------------------


def connect(
    url: str, token: str, *, verify: bool = True, ca_file: Path | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
) -> GrafanaApi:
    """A Grafana server at `url` (its path prefix included), asked with a service account's `token`.

    Needs grafana-api, the extra `kvtune[grafana]`. Raises PushError where something of this cannot be used; nothing is
    sent yet.
    """
    address = _address(url)
    if not re.fullmatch(r"[\x21-\x7e]+", token):
        raise _wrong("the token is not one word of printable ASCII", "Give a service account's token, and only that.")
    if ca_file is not None:
        if not verify:
            raise _wrong("--insecure-skip-verify with --ca-file", "Give --ca-file alone: it verifies.")
        if not ca_file.is_file():
            raise _wrong(f"--ca-file: {ca_file}: no such file", "Give the authorities' certificates in PEM format.")
    try:
        from grafana_api.grafana_face import GrafanaFace
    except ImportError:
        raise PushError(
            "the package grafana-api is not installed",
            "Install it: pip install 'kvtune[grafana]'. Or have Grafana read files: kvtune dashboards render.",
        ) from None
    if not verify:
        warnings.filterwarnings("ignore", message="Unverified HTTPS request")
    client = GrafanaFace(
        auth=token, host=address.host, port=address.port, url_path_prefix=address.prefix, protocol=address.scheme,
        verify=verify if ca_file is None else str(ca_file), timeout=timeout_s,
    )  # fmt: skip
    # grafana-api would follow a redirect of a POST as a GET, and take any page for an answer.
    client.api.s.hooks["response"].append(lambda response, *_, **__: _refuse_pages(response, where_of(url)))
    return GrafanaApi(client, where_of(url), secret=token)


@dataclass(frozen=True, slots=True)
class _Address:
    scheme: str
    host: str
    port: int | None
    prefix: str


def _address(url: str) -> _Address:
    """The parts of a URL that grafana-api wants apart. Raises PushError."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = None
    if not host or parts.scheme not in ("http", "https"):
        raise _wrong(
            f"--url: not an http(s) address: {where_of(url)!r}", "Give e.g. --url https://grafana.example.org/grafana"
        )
    if "@" in parts.netloc:
        raise _wrong(
            f"--url: a password in the address of {where_of(url)}",
            "Give a service account's token in --token-file or GRAFANA_TOKEN instead.",
        )
    if parts.query or parts.fragment:
        raise _wrong(f"--url: {where_of(url)}: an address of a page", "Give the server's root, with its sub-path.")
    path = quote(parts.path.strip("/"), safe="/%")
    return _Address(parts.scheme, f"[{host}]" if ":" in host else host, port, f"{path}/" if path else "")


def where_of(url: str) -> str:
    """The address for messages: without what logs in, and without parameters."""
    return re.sub(r"(^|//)[^/?#\s]*@", r"\1", re.split(r"[?#]", url, maxsplit=1)[0]).rstrip("/")


def _refuse_pages(response: Any, where: str) -> None:
    """Refuse what is not an answer of an API: a redirect, or a page."""
    status = int(response.status_code)
    if 300 <= status < 400:
        to = where_of(str(response.headers.get("location", "")))
        raise PushError(
            f"{where} redirects to {to or 'nowhere'}",
            "Give --url as Grafana's root_url says it (https, sub-path); behind a log-in proxy, its inner address.",
        )
    try:
        json.loads(response.content)
    except ValueError:
        kind = str(response.headers.get("content-type", "")).partition(";")[0] or "no content type"
        raise PushError(
            f"{where}: HTTP {status} with {kind} instead of JSON",
            "Check --url: it must be Grafana's own root with its sub-path, and no log-in page or proxy before it."
            if status < 500
            else "Something before Grafana answers for it: see whether it runs.",
        ) from None


class GrafanaApi:
    """A GrafanaTarget over a client of grafana-api (`GrafanaFace`), or one with the same calls."""

    def __init__(self, client: Any, where: str, *, secret: str = "") -> None:
        """`where` names the server in messages; `secret` never appears in them."""
        self._client = client
        # What sends requests as they are: `api` in grafana-api, `client` in grafana-client.
        self._http = client.api if hasattr(client, "api") else client.client
        self._where = where
        self._secret = secret

    def health(self) -> str:
        """See GrafanaTarget."""
        answer = self._call("GET /api/health", lambda: self._http.GET("/health"))
        if not isinstance(answer, dict) or "database" not in answer:
            raise PushError(
                f"{self._where} answers, but not as Grafana does",
                "Check --url: the root of Grafana, with its sub-path.",
            )
        return str(answer.get("version") or "unknown")

    def ensure_folder(self, title: str, *, create: bool) -> Folder:
        """See GrafanaTarget."""
        if title == ROOT_FOLDER:
            return Folder(title, "")
        there = self._call(
            "GET /api/folders",
            lambda: [Folder(str(one["title"]), str(one["uid"])) for one in self._client.folder.get_all_folders()],
        )
        matching = [one for one in there if one.title == title] or [one for one in there if one.uid == title]
        if len(matching) > 1:
            uids = ", ".join(str(one.uid) for one in matching)
            raise PushError(f"{self._where} has {len(matching)} folders {title!r}", f"Name one by its uid: {uids}.")
        if matching:
            return matching[0]
        if not create:
            return Folder(title, None)
        return self._call(
            f"making folder {title!r}", lambda: Folder(title, str(self._client.folder.create_folder(title)["uid"]))
        )

    def get_dashboard(self, uid: str) -> Stored | None:
        """See GrafanaTarget."""
        found = self._call_or_none(
            f"reading dashboard {uid}", lambda: _stored(self._client.dashboard.get_dashboard(uid))
        )
        return None if found is None else replace(found, message=self._newest_message(uid))

    def _newest_message(self, uid: str) -> str | None:
        """What the newest save said; None where the history is not there or not to be read."""
        try:
            return self._call_or_none(
                f"reading the history of {uid}",
                lambda: _newest(self._http.GET(f"/dashboards/uid/{uid}/versions?limit=1")),
            )
        except _Denied:
            return None

    def upsert_dashboard(self, dashboard: Json, *, folder_uid: str, version: int | None, message: str) -> Saved:
        """See GrafanaTarget."""
        body = {
            "dashboard": {**_content(dashboard), **({} if version is None else {"version": version})},
            "folderUid": folder_uid,
            "message": message,
            "overwrite": False,
        }
        uid = str(dashboard["uid"])

        def save() -> Saved:
            answer = self._client.dashboard.update_dashboard(body)
            return Saved(int(answer["version"]), str(answer.get("url") or ""))

        return self._call(f"saving dashboard {uid}", save, saving=dashboard)

    def _call_or_none(self, what: str, ask: Callable[[], T]) -> T | None:
        """The answer; None for a 404."""
        try:
            return self._call(what, ask)
        except _Absent:
            return None

    def _call(self, what: str, ask: Callable[[], T], *, saving: Json | None = None) -> T:
        """What `ask` makes of the answer. Raises PushError that explains a refusal, silence, or an answer of no use."""
        try:
            return ask()
        except PushError:
            raise
        except Exception as error:
            status = getattr(error, "status_code", None)
            if isinstance(status, int):
                told = self._refused(what, status, getattr(error, "response", None), saving)
            else:
                told = self._unanswered(what, error)
            # The cause is cut off: it may quote a request with what logs in.
            raise told from None

    def _refused(self, what: str, status: int, response: Any, saving: Json | None) -> PushError:
        answer = response if isinstance(response, dict) else {}
        said = self._clean(str(answer.get("message") or ""))
        at = f"{self._where}, {what}: HTTP {status}{': ' + said if said else ''}"
        if status == 401:
            return PushError(at, "The token was not accepted: it may be wrong, expired, or of another Grafana.")
        if status == 403:
            return _Denied(
                at,
                "The token may not do that. It needs dashboards:read, :create and :write, folders:read and :create "
                "(a service account with the role Editor has them); on a folder of its own, Edit there.",
            )
        if status == 412 and saving is not None:
            return self._conflict(at, str(answer.get("status") or ""), saving)
        if status == 404 and saving is not None:
            return PushError(
                at, "The folder is gone, or not this token's to see: push again, or name another --folder."
            )
        if status in (409, 412):
            return PushError(
                at, "There is one of that name that the token cannot see: name another --folder, or let it."
            )
        if status == 404:
            return _Absent(at, "Check --url: it must be Grafana's root, with its sub-path.")
        if status == 400:
            return PushError(at, "Grafana does not take that: see its message, and whether it is 10.4 or newer.")
        if status == 429 or status >= 500:
            return PushError(at, "Grafana, or what it needs, is in trouble: see its log, and push again.")
        return PushError(at, "See Grafana's message.")

    def _conflict(self, at: str, kind: str, saving: Json) -> PushError:
        """A 412: somebody saved in between, or another dashboard has the name."""
        if kind == "name-exists":
            return PushError(
                at,
                f"Another one there is called {saving['title']!r}: rename or delete it, or give another --folder.",
            )
        if kind == "plugin-dashboard":
            return PushError(at, "It belongs to a plug-in: remove that dashboard first.")
        try:
            stored = self.get_dashboard(str(saving["uid"]))
        except PushError:
            stored = None
        by = f"{stored.updated_by or 'somebody'} at {stored.updated}" if stored is not None else "somebody"
        return PushError(
            at,
            f"It was saved by {by} while this ran. Ask them, look at the difference with --dry-run, and replace "
            "their version with --overwrite.",
        )

    def _unanswered(self, what: str, error: Exception) -> PushError:
        """What to say where there is no status: the HTTP library's own exceptions, and answers of another shape."""
        at = f"{self._where}, {what}: "
        kinds = {kind.__name__ for kind in type(error).__mro__}
        # By name: requests' own, and those of a client that uses another library of its kind.
        if "SSLError" in kinds:
            return PushError(
                f"{at}{self._clean(_innermost(error))}",
                "Give the authority that signed its certificate with --ca-file FILE; is it https at all?",
            )
        if "Timeout" in kinds:
            return PushError(f"{at}no answer in time", "See whether Grafana is up; --timeout waits longer.")
        if "ConnectionError" in kinds:
            return PushError(
                f"{at}{self._clean(_innermost(error))}", "Check --url, and that Grafana is up and reachable."
            )
        if isinstance(error, OSError):
            return PushError(f"{at}{type(error).__name__}", "Check --url and --ca-file.")
        return PushError(
            f"{at}an answer that is not Grafana's ({type(error).__name__})",
            "Check --url: is this Grafana, and nothing before it?",
        )

    def _clean(self, text: str) -> str:
        """Foreign text for a message: one line, not too long, without the token."""
        line = " ".join(text.split())
        return (line.replace(self._secret, "***") if self._secret else line)[:_SAID]


class _Denied(PushError):
    """A 403."""


class _Absent(PushError):
    """A 404."""


def _stored(answer: Json) -> Stored:
    """What Grafana says of a dashboard, without what its history says."""
    dashboard, meta = answer["dashboard"], answer["meta"]
    return Stored(
        dashboard=dict(dashboard),
        version=int(meta.get("version") or dashboard["version"]),
        folder_uid=str(meta.get("folderUid") or ""),
        folder_title=str(meta.get("folderTitle") or ""),
        updated_by=str(meta.get("updatedBy") or ""),
        updated=str(meta.get("updated") or ""),
        message=None,
        provisioned_from=str(meta.get("provisionedExternalId") or "") if meta.get("provisioned") else None,
    )


def _newest(answer: Any) -> str:
    """The message of the newest save: from a list until Grafana 11, from an object with the list since."""
    rows = answer["versions"] if isinstance(answer, dict) else answer
    return str(rows[0].get("message") or "") if rows else ""


def _innermost(error: BaseException) -> str:
    """What the operating system or TLS said, without the layers of libraries around it."""
    seen: BaseException = error
    while True:
        inner = seen.args[0] if seen.args and isinstance(seen.args[0], BaseException) else None
        inner = inner or getattr(seen, "reason", None)
        if not isinstance(inner, BaseException):
            break
        seen = inner
    text = getattr(seen, "strerror", None) or str(seen)
    # The libraries put the object and the host before what the system said.
    system = re.search(r"\[Errno -?\d+\] (.+)", str(text))
    return system[1] if system else str(text)
