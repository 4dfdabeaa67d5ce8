"""How to get into a server that wants to know who asks: headers, tokens, certificates. And what PromQL it may add."""

from __future__ import annotations

import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

from kvtune_tuning.errors import UsageError

if TYPE_CHECKING:
    import httpx

_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+)[ \t]*:[ \t]*([\x20-\x7e\t]*)")
_AUTHORITY = re.compile(r"^[^/?#]*://")
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_OPERATOR = re.compile(r"=~|!~|!=|=")
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"|' + r"'(?:[^'\\\n]|\\.)*'|`[^`]*`")


@dataclass(frozen=True, slots=True)
class Access:
    """What is sent along with every request. Values of headers, tokens and passwords are never printed."""

    headers: Sequence[str] = ()
    """`Name: value` each."""
    bearer_token_file: Path | None = None
    ca_file: Path | None = None
    client_cert: Path | None = None
    client_key: Path | None = None
    insecure: bool = False
    timeout_s: float | None = None

    def given(self) -> list[str]:
        """The options that were used, by their names."""
        options = {
            "--header": self.headers,
            "--bearer-token-file": self.bearer_token_file,
            "--ca-file": self.ca_file,
            "--client-cert": self.client_cert,
            "--client-key": self.client_key,
            "--insecure-skip-verify": self.insecure,
            "--timeout": self.timeout_s,
        }
        return [name for name, value in options.items() if value]

    def client_options(self, urls: Sequence[str], timeout_s: float) -> dict[str, Any]:
        """Arguments of an httpx client for `urls`. Raises UsageError where options cannot be read or contradict."""
        headers = dict(_header(text) for text in self.headers)
        named = any(name.lower() == "authorization" for name in headers)
        in_url = any("@" in _AUTHORITY.sub("", url, count=1).partition("/")[0] for url in urls)
        ways = [
            way
            for way, used in (
                ("--bearer-token-file", self.bearer_token_file), ("--header Authorization", named),
                ("user:password@ in the address", in_url),
            )
            if used
        ]  # fmt: skip
        if len(ways) > 1:
            raise UsageError("two_logins", f"both {' and '.join(ways)}", "Give one way to log in.")
        bearer = None if self.bearer_token_file is None else _Bearer(self.bearer_token_file)
        return {"headers": headers, "auth": bearer, "verify": self._verify(), "timeout": self.timeout_s or timeout_s}

    def _verify(self) -> ssl.SSLContext | bool:
        import httpx

        if self.insecure and self.ca_file:
            raise UsageError(
                "contradiction", "--insecure-skip-verify with --ca-file", "Give --ca-file alone: it verifies."
            )
        if self.client_key and not self.client_cert:
            raise UsageError("contradiction", "--client-key without --client-cert", "Give the certificate too.")
        if not (self.insecure or self.ca_file or self.client_cert):
            return True
        if self.ca_file is None:
            context = httpx.create_ssl_context()
        else:
            _readable(self.ca_file, "--ca-file")
            try:
                context = ssl.create_default_context(cafile=self.ca_file)
            except ssl.SSLError:
                raise _unusable("--ca-file", self.ca_file, "no certificates in PEM format") from None
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.client_cert is not None:
            _readable(self.client_cert, "--client-cert")
            if self.client_key is not None:
                _readable(self.client_key, "--client-key")
            try:
                # An encrypted key would ask on the terminal.
                context.load_cert_chain(self.client_cert, self.client_key, password="")
            except (ssl.SSLError, ValueError):
                what = "no certificate with its unencrypted key in PEM format"
                raise _unusable("--client-cert", self.client_cert, what) from None
        return context

    def login_hint(self, answer: str = "") -> str:
        """What to do about a 401 or 403."""
        if "org id" in answer.lower():
            return "Name the tenant: --header 'X-Scope-OrgID: TENANT'."
        used = [name for name in self.given() if name in ("--header", "--bearer-token-file", "--client-cert")]
        if used:
            return f"What {' and '.join(used)} says was not accepted: check that it is right and still valid."
        return (
            "Log in with --bearer-token-file FILE, --header 'Authorization: ...', user:password@ in the address or "
            "--client-cert; a tenant is named with --header 'X-Scope-OrgID: TENANT'."
        )


def without_secrets(url: str) -> str:
    """The address without `user:password@`, for messages and documents."""
    return re.sub(r"(^|//)[^/?#\s]*@", r"\1", url)


def split_address(url: str, example: str) -> SplitResult:
    """The parts of an http(s) address; `host:port` is one too. Raises UsageError for what no request can be sent to."""
    import httpx

    full = url if "://" in url else f"http://{url}"
    why = ""
    try:
        parts = urlsplit(full)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or True)
        if good and parts.hostname:
            # Names that cannot be looked up: empty or too long labels, and punycode that is none.
            httpx.URL(full).host.encode("idna")
            parts.hostname.encode("idna")
    except UnicodeError:
        good, why = False, " (no host can have this name)"
    except (ValueError, httpx.InvalidURL):
        good = False
    if not good:
        raise UsageError("bad_url", f"not an http(s) address{why}: {without_secrets(url)!r}", f"Give e.g. {example}")
    return parts


def connection_hint(said: str, otherwise: str) -> str:
    """What to do about a connection that failed with these words; `otherwise` where they are not of certificates."""
    if "CERTIFICATE_VERIFY_FAILED" in said:
        return "Give the authority that signed its certificate with --ca-file FILE."
    if "certificate required" in said.lower() or "handshake failure" in said.lower():
        return "It may want a certificate of ours: --client-cert FILE --client-key FILE."
    return otherwise


class _Bearer:
    """Puts the token in a file into each request; raises UsageError where there is none.

    It is read anew each time: Kubernetes replaces tokens within the hour, and recordings run for longer.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        _token(path)

    def __call__(self, request: httpx.Request) -> httpx.Request:
        request.headers["Authorization"] = f"Bearer {_token(self.path)}"
        return request


def _header(text: str) -> tuple[str, str]:
    match = _HEADER.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            "bad_header", "--header: not 'Name: value' in printable ASCII", "Write e.g. --header 'X-Scope-OrgID: a'"
        )
    return match[1], match[2]


def _token(path: Path) -> str:
    token = _readable(path, "--bearer-token-file").strip()
    if not re.fullmatch(rb"[\x21-\x7e]+", token):
        why = "not one token in printable ASCII" if token else "it is empty; it must hold one token"
        raise _unusable("--bearer-token-file", path, why)
    return token.decode("ascii")


def _readable(path: Path, option: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unusable(option, path, error.strerror or type(error).__name__) from None


def _unusable(option: str, path: Path, why: str) -> UsageError:
    return UsageError("bad_file", f"{option}: {path}: {why}", "Give a file that can be read and holds that.")


def check_matcher(text: str) -> str:
    """One PromQL label matcher, as it goes into a selector; raises UsageError with the place of a mistake."""
    at = len(text) - len(text.lstrip())
    for what, pattern in (
        ("a label name", _LABEL), ("one of = != =~ !~", _OPERATOR), ("a quoted value", _QUOTED),
    ):  # fmt: skip
        match = pattern.match(text, at)
        if match is None:
            raise _bad_matcher(text, at, f"expected {what}")
        if match.group() == "__name__":
            raise _bad_matcher(text, at, "the names of series are kvtune's own")
        at = match.end()
        at += len(text[at:]) - len(text[at:].lstrip())
    if at != len(text):
        raise _bad_matcher(text, at, "expected the end; repeat --matcher for a second one")
    return text.strip()


def _bad_matcher(text: str, at: int, why: str) -> UsageError:
    return UsageError(
        "bad_matcher",
        f"--matcher: {text!r}: {why} at character {at + 1}",
        """Write e.g. --matcher 'cluster="a"', with the quotes.""",
    )
