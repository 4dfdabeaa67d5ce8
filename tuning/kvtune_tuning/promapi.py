"""The HTTP API of Prometheus, and of what speaks like it: Thanos, Mimir, Cortex, VictoriaMetrics, hosted ones."""

from __future__ import annotations

import contextlib
import email.utils
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urljoin, urlsplit

import orjson

from kvtune_tuning.access import Access, connection_hint, split_address
from kvtune_tuning.errors import TuningError
from kvtune_tuning.frames import LATEST_S

if TYPE_CHECKING:
    import httpx

TIMEOUT_S = 60.0
"""Wall seconds for one answer, unless --timeout says otherwise."""
BUSY = (429, 502, 503)
"""Statuses that may pass."""
TRIES = 5
"""Of one request, where the server is busy."""
LONGEST_WAIT_S = 60.0
"""What a server may ask us to wait for, and how long all waits together may take."""
MAX_ANSWER_BYTES = 256 * 2**20
"""Decompressed; one that is larger is not read to its end."""
MAX_TIMEOUTS = 4
"""Each is answered by asking for half; after so many the server is too slow."""
MAX_REDIRECTS = 3
_TOO_LARGE = re.compile(
    r"too many|exceed|maximum resolution|larger than|too large|limit|timed out|timeout|-search\.max", re.IGNORECASE
)


_SECONDS = re.compile(r"[0-9]+")


class TooLarge(TuningError):
    """The server could not answer so much at once; half of it may do."""


class Refused(TuningError):
    """The server does not take this query."""


@dataclass(slots=True)
class PrometheusApi:
    """One server: where it is, what it was asked, what its refusals mean."""

    url: str
    client: httpx.Client
    access: Access = field(default_factory=Access)
    sleep: Callable[[float], None] = time.sleep
    requests: int = 0
    shown: str = field(init=False)
    """The address without secrets."""
    date_s: float | None = None
    """The server's own time by its last answer's Date header (Unix s)."""
    notes: list[str] = field(default_factory=list)
    _base: str = field(init=False)
    _login: tuple[str, str] | None = field(init=False)
    _more: dict[str, list[str]] = field(init=False)
    """Parameters of the address, sent with every request."""
    _method: str = "POST"
    _waited_s: float = 0.0
    _timeouts: int = 0
    _streams: list[Any] = field(default_factory=list)
    """Open connections, which are used again."""
    _answered: bool = False

    def __post_init__(self) -> None:
        parts = split_address(self.url, "--prometheus http://host:9090")
        host = parts.netloc.rpartition("@")[2]
        path = parts.path.rstrip("/").removesuffix("/api/v1").rstrip("/")
        self.shown = f"{parts.scheme}://{host}{path}"
        self._base = self.shown
        self._login = (unquote(parts.username), unquote(parts.password or "")) if parts.username else None
        self._more = parse_qs(parts.query, keep_blank_values=True)

    def instant(self, query: str, at: float | None = None) -> Any:
        """`data` of an instant query, at the server's own time where no other (Unix s) is given."""
        return self._ask("query", {"query": query} | ({} if at is None else {"time": f"{at:.3f}"}))

    def over_range(self, query: str, start: float, end: float, step: float) -> Any:
        """`data` of a range query; times are Unix s."""
        form = {"query": query, "start": f"{start:.3f}", "end": f"{end:.3f}", "step": f"{step:.3f}"}
        # Without it VictoriaMetrics moves the points to multiples of the step, up to a step back; others ignore it.
        form["nocache"] = "1"
        return self._ask("query_range", form)

    def rules(self) -> Any:
        """`data` of the rules that the server evaluates itself. Raises TuningError where it has no such API."""
        method, self._method = self._method, "GET"
        try:
            return self._ask("rules", {"query": ""})
        finally:
            self._method = method

    def _ask(self, path: str, form: dict[str, str]) -> Any:
        import httpx

        for attempt in range(TRIES):
            try:
                status, headers, content = self._send(path, form)
            except httpx.ConnectTimeout as error:
                raise self._unreachable(error) from None
            except httpx.TimeoutException as error:
                raise self._too_slow(f"no answer in time ({str(error) or type(error).__name__})") from None
            except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
                # One that has answered before may be back in a moment.
                if not self._answered or not self._pause(attempt, None):
                    raise self._unreachable(error) from None
                continue
            self._answered = True
            busy = status in BUSY and not _TOO_LARGE.search(_error_of(content))
            if busy and self._pause(attempt, headers.get("retry-after")):
                continue
            return self._body(status, headers, content, form["query"])
        raise AssertionError("unreachable")

    def _send(self, path: str, form: dict[str, str]) -> tuple[int, httpx.Headers, bytes]:
        """One exchange, and those that a redirect within the same host or a refused POST make of it."""
        where = f"{self._base}/api/v1/{path}"
        for _ in range(MAX_REDIRECTS + 1):
            sent: dict[str, Any] = self._more | form
            how: dict[str, Any] = {"data": sent} if self._method == "POST" else {"params": sent}
            if self._login is not None:
                how["auth"] = self._login
            self.requests += 1
            with (
                _Deadline(self.access.timeout_s or TIMEOUT_S, self._streams) as deadline,
                self.client.stream(
                    self._method, where, follow_redirects=False, extensions={"trace": deadline.trace}, **how
                ) as answer,
            ):
                self.date_s = _http_date(answer.headers.get("date", "")) or self.date_s
                if answer.status_code == 405 and self._method == "POST":
                    self._method = "GET"
                    continue
                if answer.has_redirect_location:
                    where = self._followed(where, answer.headers["location"], path)
                    continue
                content = bytearray()
                for part in answer.iter_bytes():
                    content += part
                    deadline.check()
                    if len(content) > MAX_ANSWER_BYTES:
                        raise TooLarge(
                            "answer_too_large",
                            f"{self.shown}: an answer of more than {MAX_ANSWER_BYTES // 2**20} MiB to {form['query']}",
                            "Give --matcher to read a part of the fleet, or a shorter --window.",
                        )
                return answer.status_code, answer.headers, bytes(content)
        raise TuningError("redirected", f"{self.shown}: redirects in a circle", "Give the address it ends at.")

    def _followed(self, where: str, location: str, path: str) -> str:
        """Where a redirect leads, if that is the same API on the same host; elsewhere no secret is sent."""
        try:
            target = urlsplit(urljoin(where, location))
        except ValueError:
            raise TuningError(
                "redirected",
                f"{self.shown}: redirects to what is no address",
                "Give the address of the API itself.",
            ) from None
        before = urlsplit(where)
        same = target.hostname == before.hostname and (target.scheme, before.scheme) != ("http", "https")
        ending = f"/api/v1/{path}"
        if not same or not target.path.endswith(ending) or target.scheme not in ("http", "https"):
            raise TuningError(
                "redirected",
                f"{self.shown}: redirects to {target.scheme}://{target.netloc.rpartition('@')[2]}{target.path}",
                "That looks like a login page or another server: log in with --header or --bearer-token-file, or give "
                "the address of the API itself.",
            )
        self._base = f"{target.scheme}://{target.netloc.rpartition('@')[2]}{target.path.removesuffix(ending)}"
        return f"{self._base}{ending}"

    def _pause(self, attempt: int, retry_after: str | None) -> bool:
        """Wait before the next attempt; False where there is none left."""
        wait = 0.5 * 2**attempt
        if retry_after:
            date = _http_date(retry_after)
            if _SECONDS.fullmatch(retry_after.strip()):
                wait = max(wait, float(retry_after))
            elif date is not None:
                wait = max(wait, date - (self.date_s or time.time()))
        if attempt + 1 >= TRIES or self._waited_s + wait > LONGEST_WAIT_S:
            return False
        self._waited_s += wait
        self.sleep(wait)
        return True

    def _body(self, status: int, headers: httpx.Headers, content: bytes, query: str) -> Any:
        try:
            body = orjson.loads(content)
        except ValueError:
            body = None
        failed = isinstance(body, dict) and body.get("status") == "error"
        said = _error_of(content) if failed or status != 200 else ""
        if status in (401, 403):
            # Before anything else: proxies say so in pages of their own.
            word = "who asks is not known" if status == 401 else "not allowed"
            raise TuningError("http_status", f"{self.shown}: HTTP {status} ({word})", self.access.login_hint(said))
        if status in (413, 422, 504) or (failed and _TOO_LARGE.search(said)):
            what = f"{self.shown}: {query}: {said or f'HTTP {status}'}"
            if status in (503, 504) or "time" in said.lower():
                raise self._too_slow(what.removeprefix(f"{self.shown}: "))
            raise TooLarge(
                "prometheus_error",
                what,
                "The server refuses even a small part of the window: give --matcher to read a part of the fleet, or "
                "raise its limits.",
            )
        if failed:
            raise Refused("prometheus_error", f"{self.shown}: {query}: {said}", "Prometheus refused the query.")
        if status != 200:
            raise self._bad_status(status, headers)
        if not isinstance(body, dict) or body.get("status") != "success":
            page = " but a web page: a login page, or the user interface" if b"<html" in content[:1000].lower() else ""
            raise TuningError(
                "bad_answer",
                f"{self.shown}: the answer is not Prometheus' JSON{page}",
                "Check that the address is a Prometheus server's, with its path prefix, and log in if it asks to.",
            )
        for warning in (*_texts(body.get("warnings")), *_texts(body.get("infos"))):
            self.note(f"Prometheus: {warning}")
        if body.get("isPartial"):
            self.note("Prometheus: the answer is partial, some of its storage could not be read; increments may miss")
        return body.get("data")

    def _bad_status(self, status: int, headers: httpx.Headers) -> TuningError:
        if status in BUSY:
            after = f", to be asked again after {headers['retry-after'][:40]}" if "retry-after" in headers else ""
            return TuningError(
                "busy", f"{self.shown}: HTTP {status}{after}, also when asked again", "Try later or a shorter --window."
            )
        hint = "Check the address: it must be Prometheus itself, or something that serves its HTTP API."
        if status == 404:
            hint = (
                f"No API at {self.shown}/api/v1: is a path prefix missing or wrong? Mimir and Cortex serve under "
                "/prometheus, a VictoriaMetrics cluster under /select/0/prometheus."
            )
        return TuningError("http_status", f"{self.shown}: HTTP {status}", hint)

    def _too_slow(self, what: str) -> TuningError:
        self._timeouts += 1
        kind = TuningError if self._timeouts > MAX_TIMEOUTS else TooLarge
        return kind(
            "timeout",
            f"{self.shown}: {what}",
            "Give a longer --timeout, or a shorter --window or a --matcher to read less.",
        )

    def _unreachable(self, error: Exception) -> TuningError:
        said = str(error) or type(error).__name__
        hint = connection_hint(said, "Check the address and that Prometheus is up.")
        return TuningError("unreachable", f"{self.shown}: {said}", hint)

    def note(self, text: str) -> None:
        """Something the reader of the advice should know; the same is said once."""
        if text not in self.notes:
            self.notes.append(text)


class _Deadline:
    """So many wall seconds for one exchange, however its answer drips: httpx' own timeouts are for each read alone.

    Used as a context around the exchange; `trace` is its httpx extension and keeps `streams` up to date. What was too
    late raises `httpx.ReadTimeout`.
    """

    def __init__(self, seconds: float, streams: list[Any]) -> None:
        self.late = False
        self._seconds = seconds
        self._timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), self._end)
        self._timer.daemon = True
        self._streams = streams

    def trace(self, event: str, info: dict[str, Any]) -> None:
        """Remember the connection that a request takes; called by httpx."""
        if event.endswith((".connect_tcp.complete", ".start_tls.complete")):
            self._streams[:] = [one for one in self._streams if _is_open(one)]
            self._streams.append(info["return_value"])
            if self.late:
                self._end()

    def check(self) -> None:
        """Raise where the time is over."""
        if self.late:
            import httpx

            raise httpx.ReadTimeout(f"no whole answer within {self._seconds:g} s")

    def _end(self) -> None:
        self.late = True
        for stream in self._streams:
            taken = stream.get_extra_info("socket")
            with contextlib.suppress(OSError, AttributeError, ValueError):
                # The plain one's, which leaves the state of TLS alone: whoever reads meanwhile sees the end.
                socket.socket.shutdown(taken, socket.SHUT_RDWR)

    def __enter__(self) -> _Deadline:
        self._timer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._timer.cancel()
        if kind is None or issubclass(kind, Exception):
            self.check()


def _is_open(stream: Any) -> bool:
    taken = stream.get_extra_info("socket")
    return taken is not None and taken.fileno() >= 0


def _http_date(text: str) -> float | None:
    """Unix s of an HTTP date; None for what is none, or of no clock."""
    with contextlib.suppress(ValueError, OverflowError, TypeError, IndexError):
        stated = email.utils.parsedate_tz(text)
        if stated is not None and 0 < (at := float(email.utils.mktime_tz(stated))) < LATEST_S:
            return at
    return None


def _texts(said: Any) -> list[str]:
    """Warnings of an answer: a list of texts, or what a server made of it."""
    if isinstance(said, str):
        return [said]
    return [str(one) for one in said] if isinstance(said, list) else []


def _error_of(content: bytes) -> str:
    """The server's own words about what went wrong: of its JSON, else the beginning of its text."""
    try:
        body = orjson.loads(content)
    except ValueError:
        text = content[:300].decode("utf-8", "replace").strip()
        return "" if text.startswith("<") else " ".join(text.split())
    if not isinstance(body, dict) or body.get("status") != "error":
        return ""
    return f"{body.get('errorType', 'error')}: {body.get('error', '')}"
