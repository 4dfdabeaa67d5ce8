"""`kvtune suggest` and `kvtune record` as commands: what goes where, and with which exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import jsonschema
import pytest
import typer
import yaml
from typer.testing import CliRunner

from kvtune_cli.panels import Panels
from kvtune_cli.record import record
from kvtune_cli.suggest import suggest
from kvtune_tuning.access import Access
from kvtune_tuning.document import schema
from kvtune_tuning.errors import TuningError, UsageError
from kvtune_tuning.recording import http_fetch
from kvtune_tuning.run import seconds

Snapshots = Callable[..., Path]
app = typer.Typer()
app.command()(suggest)
app.command()(record)


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(scope="module")
def pressed(snapshots: Snapshots) -> str:
    return str(snapshots(pool=1_500_000, interval=120.0))


PAGES = {
    "/health": b'{"status": "ok"}',
    "/empty": b"",
    "/html": b"<html><body>hello</body></html>",
    "/node": b"# TYPE node_load1 gauge\nnode_load1 0.3\ngo_goroutines 12\n",
    "/comments": b"# HELP kvtune_turns_total Turns.\n# TYPE kvtune_turns_total counter\n",
    "/broken": b"kvtune_turns_total many\n",
}
"""What answers with 200 and is no page of ours."""


@pytest.fixture
def target() -> Iterator[str]:
    """A live target whose counters grow."""

    class Page(BaseHTTPRequestHandler):
        count = 0

        def do_GET(self) -> None:
            Page.count += 1
            body = f'kvtune_turns_total{{outcome="hit"}} {Page.count}\nkvtune_turn_ends_total {Page.count}\n'.encode()
            body = PAGES.get(self.path, body)
            allowed = self.headers["authorization"] == "Bearer hunter2" and self.headers["x-tenant"] == "a"
            denied = self.path == "/private" and not allowed
            self.send_response(404 if self.path == "/nothing" else 401 if denied else 200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_json_is_all_there_is_on_stdout(pressed: str) -> None:
    code, out, err = run("suggest", "--snapshot", pressed, "--format", "json")
    document = json.loads(out)
    jsonschema.validate(document, schema())
    assert code == 0 and err == ""
    assert document["source"] == {"kind": "snapshot", "where": [pressed]}


def test_yaml_is_the_same_document(pressed: str) -> None:
    _, as_json, _ = run("suggest", "--snapshot", pressed, "--format", "json")
    code, as_yaml, _ = run("suggest", "--snapshot", pressed, "--format", "yaml")
    assert code == 0 and yaml.safe_load(as_yaml) == json.loads(as_json)


def test_the_table_and_its_explanation(pressed: str) -> None:
    code, out, err = run("suggest", "--snapshot", pressed)
    assert code == 0 and err == "" and "CHANGE" in out and "rollback" in out and "Campbell" not in out
    code, out, _ = run("suggest", "--snapshot", pressed, "--explain", "--window", "50m")
    assert code == 0 and "Campbell" in out
    to_copy = ('{"kv_connector', "kvtune router", "  query ")
    prose = [line for line in out.splitlines() if not any(part in line for part in to_copy)]
    assert [line for line in prose if len(line) > 100] == []


def test_exit_code_4_only_when_asked_for(pressed: str) -> None:
    assert run("suggest", "--snapshot", pressed)[0] == 0
    assert run("suggest", "--snapshot", pressed, "--exit-code")[0] == 4


def test_exit_code_3_when_nothing_can_be_said(snapshots: Snapshots) -> None:
    quiet = str(snapshots(conversations_per_s=0.0, duration=600.0, interval=60.0))
    assert run("suggest", "--snapshot", quiet)[0] == 3
    code, out, _ = run("suggest", "--snapshot", quiet, "--format", "json")
    assert code == 3 and json.loads(out)["recommendations"]


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        ((), 2, "one_source"),
        (("--snapshot", "x", "--scrape", "h:1"), 2, "one_source"),
        (("--snapshot", "/nonexistent"), 1, "no_such_directory"),
        (("--snapshot", "/nonexistent", "--window", "soon"), 2, "bad_duration"),
        (("--scrape", "ftp://h"), 2, "bad_url"),
        (("--scrape", "127.0.0.1:1"), 1, "unreachable"),
        (("--scrape", "127.0.0.1:1", "--interval", "0"), 2, "bad_duration"),
        (("--scrape", "127.0.0.1:1", "--duration=-5s"), 2, "bad_duration"),
        (("--prometheus", "http://127.0.0.1:1"), 1, "unreachable"),
        (("--prometheus", "ftp://h"), 2, "bad_url"),
        (("--snapshot", "x", "--interval", "5s"), 2, "only_for_scrape"),
        (("--snapshot", "x", "--duration", "5s"), 2, "only_for_scrape"),
        (("--prometheus", "h:1", "--interval", "5s"), 2, "only_for_scrape"),
        (("--prometheus", "h:1", "--duration", "1h", "--interval", "1m"), 2, "only_for_scrape"),
        (("--scrape", "h:1", "--duration", "1s", "--interval", "2s"), 2, "interval_too_long"),
        (("--scrape", "h:1", "--interval", "2m"), 2, "interval_too_long"),
        (("--scrape", "h:1", "--matcher", 'a="b"'), 2, "only_for_prometheus"),
        (("--snapshot", "x", "--replica-label", "r", "--max-points", "9"), 2, "only_for_prometheus"),
        (("--snapshot", "x", "--header", "a: b"), 2, "only_for_servers"),
        (("--snapshot", "x", "--timeout", "5s"), 2, "only_for_servers"),
        (("--prometheus", "h:1", "--timeout", "soon"), 2, "bad_duration"),
        (("--prometheus", "h:1", "--max-points", "1"), 2, "bad_max_points"),
        (("--prometheus", "h:1", "--matcher", "cluster=a"), 2, "bad_matcher"),
        (("--prometheus", "h:1", "--header", "token"), 2, "bad_header"),
        (("--prometheus", "https://h:1", "--client-key", "/nonexistent"), 2, "contradiction"),
    ],
)
def test_failures_are_json_too(arguments: tuple[str, ...], code: int, error: str) -> None:
    got, out, err = run("suggest", "--format", "json", *arguments)
    document = json.loads(out)
    jsonschema.validate(document, schema())
    assert (got, document["error"]["code"]) == (code, error)
    assert told(err) == [f"kvtune: {document['error']['message']}", document["error"]["hint"]]
    got, out, err = run("suggest", *arguments)
    assert got == code and out == ""
    assert told(err) == [f"kvtune: {document['error']['message']}", document["error"]["hint"]]


def told(err: str) -> list[str]:
    """The message of a failure and its hint: what comes last on stderr."""
    return err.splitlines()[-2:]


def test_an_unknown_format_is_a_usage_error(pressed: str) -> None:
    code, out, err = run("suggest", "--snapshot", pressed, "--format", "xml")
    assert code == 2 and out == "" and told(err)[0] == "kvtune: --format: unknown format 'xml'"


def test_secrets_in_addresses_are_not_printed() -> None:
    _, out, err = run("suggest", "--prometheus", "http://me:hunter2@127.0.0.1:1", "--format", "json")
    assert "hunter2" not in out + err
    _, out, err = run("suggest", "--scrape", "http://me:hunter2@127.0.0.1:1", "--format", "json")
    assert "hunter2" not in out + err


@pytest.mark.parametrize(("command", "done"), [("suggest", 3), ("record", 0)])
def test_what_logs_in_is_sent_to_targets_too(target: str, tmp_path: Path, command: str, done: int) -> None:
    (tmp_path / "token").write_text("hunter2")
    login = ("--bearer-token-file", str(tmp_path / "token"), "--header", "X-Tenant: a")
    place = tmp_path / "snapshots"
    more = ("--interval", "100ms", "--duration", "200ms", *(("--out", str(place)) if command == "record" else ()))
    code, out, err = run(command, "--scrape", f"{target}/private", *more)
    assert code == 1 and out == ""
    assert told(err)[0] == f"kvtune: http://{target}/private: HTTP 401" and "--bearer-token-file FILE" in told(err)[1]
    code, _, err = run(command, "--scrape", f"me:hunter2@{target}/private", *more)
    assert code == 1 and "hunter2" not in err
    assert run(command, "--scrape", f"me:hunter2@{target}", *more, *login)[0] == 2
    assert not list(tmp_path.glob("snapshots/*")), "a refusal is no snapshot"
    code, out, err = run(command, "--scrape", f"{target}/private", *more, *login)
    assert code == done and "hunter2" not in out + err
    for file in tmp_path.glob("snapshots/*"):
        assert "kvtune_turns_total" in file.read_text() and "hunter2" not in file.name + file.read_text()
    assert len(list(tmp_path.glob("snapshots/*"))) >= (2 if command == "record" else 0)


async def test_a_token_that_is_replaced_is_read_again(target: str, tmp_path: Path) -> None:
    """Kubernetes does so within the hour, and a recording may run for days."""
    token, url = tmp_path / "token", f"http://{target}/private"
    token.write_text("old")
    async with http_fetch([url], Access(headers=["X-Tenant: a"], bearer_token_file=token)) as fetch:
        with pytest.raises(TuningError, match="HTTP 401"):
            await fetch(url)
        token.write_text("hunter2\n")
        assert "kvtune_turns_total" in await fetch(url)
        token.unlink()
        with pytest.raises(UsageError, match="No such file"):
            await fetch(url)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--header", "token"), "bad_header"),
        (("--bearer-token-file", "/nonexistent"), "bad_file"),
        (("--ca-file", "/nonexistent"), "bad_file"),
        (("--client-cert", "/nonexistent"), "bad_file"),
        (("--client-key", "/nonexistent"), "contradiction"),
        (("--insecure-skip-verify", "--ca-file", "/nonexistent"), "contradiction"),
        (("--timeout", "soon"), "bad_duration"),
    ],
)
def test_access_is_refused_alike_by_both_commands(tmp_path: Path, options: tuple[str, ...], error: str) -> None:
    """By each option of `Access`, and before anything is asked or written."""
    where = ("--scrape", "https://127.0.0.1:1", "--format", "json", *options)
    place = tmp_path / "snapshots"
    answers = [run("suggest", *where), run("record", "--out", str(place), *where)]
    for code, out, err in answers:
        refusal = json.loads(out)["error"]
        assert (code, refusal["code"]) == (2, error)
        assert told(err) == [f"kvtune: {refusal['message']}", refusal["hint"]] and all(told(err))
    assert told(answers[0][2]) == told(answers[1][2]) and not place.exists()


def test_an_address_in_the_environment_is_read_where_no_other_source_is_given(
    pressed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTUNE_PROMETHEUS_URL", "http://me:p@ss@127.0.0.1:1/x?token=hunter2")
    code, out, err = run("suggest", "--format", "json")
    document = json.loads(out)
    assert code == 1 and document["error"]["code"] == "unreachable"
    assert document["source"] == {"kind": "prometheus", "where": ["http://127.0.0.1:1/x"]}
    assert "hunter2" not in out + err and "ss@" not in out + err
    assert run("suggest", "--snapshot", pressed)[0] == 0


def test_nothing_to_read_is_too_little_data_and_no_failure(tmp_path: Path) -> None:
    for ms in (1000, 2000):
        (tmp_path / f"{ms}-x.prom").write_text("up 1\n")
    code, out, err = run("suggest", "--snapshot", str(tmp_path), "--format", "json")
    document = json.loads(out)
    jsonschema.validate(document, schema())
    assert (code, document["error"]["code"]) == (3, "no_kvtune_series")
    assert told(err)[0] == f"kvtune: {document['error']['message']}"


def test_help_groups_its_options() -> None:
    grouped = typer.Typer(rich_markup_mode=None)
    grouped.command(cls=Panels)(suggest)
    shown = CliRunner().invoke(grouped, ["--help"], env={"COLUMNS": "80"}).stdout
    titles = [line for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles == [
        "Options:", "The advice as gauges:", "Reading Prometheus:", "What engines without kvtune do not say:",
        "Access to servers and targets:", "Live scrapes:",
    ]  # fmt: skip
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.index("--samples") < shown.index("--matcher") < shown.index("--ca-file") < shown.index("--interval")


def test_live_scrapes_report_progress_on_stderr(target: str) -> None:
    code, out, err = run("suggest", "--scrape", target, "--interval", "200ms", "--duration", "1s", "--format", "json")
    document = json.loads(out)
    jsonschema.validate(document, schema())
    assert code == 3 and "scraping 1 target" in err
    # rounds that a busy machine is late for are skipped
    assert document["evidence"]["scrapes"] >= 2 and document["evidence"]["turns"] >= 1


def test_recorded_snapshots_can_be_read(target: str, tmp_path: Path) -> None:
    out_dir = tmp_path / "snaps"
    code, out, err = run("record", "--scrape", target, "--out", str(out_dir), "--interval", "200ms", "--duration", "1s")
    assert code == 0 and "snapshots of 1 target(s)" in out and "recording" in err
    files = sorted(out_dir.iterdir())
    assert len(files) >= 2
    assert all(f.name.endswith(f"-{target.replace(':', '_')}.prom") for f in files)
    code, out, _ = run("suggest", "--snapshot", str(out_dir), "--format", "json")
    assert code == 3 and json.loads(out)["evidence"]["scrapes"] == len(files)


def test_record_says_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, out, err = run("record", "--scrape", "127.0.0.1:1", "--out", str(tmp_path / "file"))
    assert code == 1 and out == "" and told(err)[0].startswith(f"kvtune: {tmp_path / 'file'}: ")
    code, out, err = run("record", "--scrape", "127.0.0.1:1", "--out", str(tmp_path / "d"), "--format", "json")
    error = json.loads(out)["error"]
    assert code == 1 and error["code"] == "unreachable"
    assert told(err) == [f"kvtune: {error['message']}", error["hint"]], "stderr says it, whatever goes to stdout"
    code, out, err = run(
        "record", "--scrape", "h:1", "--out", str(tmp_path / "d"), "--interval", "2s", "--duration", "1s"
    )
    assert code == 2 and told(err)[0] == "kvtune: --interval 2 s is longer than --duration 1 s"
    assert run("record", "--scrape", "h:1", "--out", str(tmp_path / "d"), "--interval", "never")[0] == 2
    assert run("record", "--out", str(tmp_path / "d"))[0] == 2


@pytest.mark.parametrize("path", sorted(PAGES))
@pytest.mark.parametrize("command", ["record", "suggest"])
def test_what_is_no_page_of_ours_is_refused_at_once(target: str, tmp_path: Path, command: str, path: str) -> None:
    """Also beside a target that is one."""
    timing = ("--interval", "100ms", "--duration", "300s")
    place = ("--out", str(tmp_path)) if command == "record" else ()
    for beside in ((), ("--scrape", target)):
        code, out, err = run(command, *beside, "--scrape", f"{target}{path}", *place, *timing)
        assert code == 1 and out == ""
        message, hint = told(err)
        assert message.startswith(f"kvtune: http://{target}{path}") and "9400" in hint
        assert err.count(message.removeprefix("kvtune: ")) == 1, "said once"
    assert not list(tmp_path.glob(f"*{path[1:]}*.prom"))


@pytest.mark.parametrize(("option", "every"), [((), "0.2"), (("--interval", "100ms"), "0.1")])
def test_a_default_interval_fits_into_a_short_duration(
    target: str, tmp_path: Path, option: tuple[str, ...], every: str
) -> None:
    for command, where in (("record", ("--out", str(tmp_path))), ("suggest", ())):
        code, _, err = run(command, "--scrape", target, "--duration", "200ms", *option, *where)
        assert code in (0, 3) and f"every {every} s" in err


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_recording_cleanly(target: str, tmp_path: Path, sig: signal.Signals) -> None:
    program = "import typer; from kvtune_cli.record import record; typer.run(record)"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "--scrape", target, "--out", str(tmp_path), "--interval", "60s"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "NO_COLOR": "1"},
    )  # fmt: skip
    deadline = time.monotonic() + 20
    while not list(tmp_path.glob("*.prom")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(sig)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 0, err
    assert "2 snapshots" in out, "the last round is taken at the end"
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("text", "value"),
    [("90", 90), ("90s", 90), ("1h30m", 5400), ("500ms", 0.5), ("7d", 604800), (" 2m ", 120), ("1.5h", 5400)],
)
def test_durations(text: str, value: float) -> None:
    assert seconds(text, "--window") == value


@pytest.mark.parametrize("text", ["", "0", "-1", "1x", "h", "1h 30m x", "1e3", "nan", "99999999d"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(UsageError):
        seconds(text, "--window")


def test_importing_the_commands_is_cheap() -> None:
    program = (
        "import sys, kvtune_cli.suggest, kvtune_cli.record;"
        "print([m for m in ('numpy', 'pandas', 'httpx', 'prometheus_client', 'rich.table') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    heavy = set(json.loads(done.stdout.replace("'", '"')))
    assert not heavy & {"numpy", "pandas", "httpx", "prometheus_client"}
