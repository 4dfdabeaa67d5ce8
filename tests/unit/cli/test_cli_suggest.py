"""`kvtune suggest --export` and `--watch` as a user runs them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kvtune_cli.suggest import suggest

app = typer.Typer()
app.command()(suggest)


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def empty_prometheus() -> Iterator[str]:
    """A server that is well and knows no series."""

    class Api(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            form = self.rfile.read(int(self.headers["content-length"])).decode()
            kind, result = ("scalar", [1.7e9, "1700000000"]) if "time%28%29" in form else ("matrix", [])
            body = json.dumps({"status": "success", "data": {"resultType": kind, "result": result}}).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Api)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_the_file_is_written_beside_the_normal_output(empty_prometheus: str, tmp_path: Path) -> None:
    path = tmp_path / "k.prom"
    code, out, _ = run("--prometheus", empty_prometheus, "--export", str(path), "--format", "json")
    assert code == 3 and json.loads(out)["error"]["code"] == "no_series"
    page = path.read_text()
    assert "\nkvtune_suggest_up 1.0\n" in page
    assert '\nkvtune_suggest_status{setting="decoder_kv_blocks_ttl",status="insufficient"} 1.0\n' in page
    assert "\nkvtune_suggest_recommended{" not in page


def test_a_failure_replaces_what_was_advised_before(tmp_path: Path) -> None:
    path = tmp_path / "k.prom"
    path.write_text('kvtune_suggest_recommended{setting="decoder_kv_blocks_ttl"} 360\nkvtune_suggest_up 1\n')
    code, _, err = run("--prometheus", "http://127.0.0.1:1", "--export", str(path))
    assert code == 1 and "127.0.0.1:1" in err
    page = path.read_text()
    assert "\nkvtune_suggest_up 0.0\n" in page and "\nkvtune_suggest_recommended{" not in page


def test_a_file_that_cannot_be_one_is_refused_before_the_work(tmp_path: Path) -> None:
    for name, why in (("k.txt", "does not end in .prom"), ("no/k.prom", "no such directory")):
        code, out, err = run("--prometheus", "http://127.0.0.1:1", "--export", str(tmp_path / name), "--format", "json")
        assert code == 2 and json.loads(out)["error"]["code"] == "bad_export"
        assert why in err and "unreachable" not in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--every", "5m", "--port", "1"), "--every and --port without --watch"),
        (("--log-format", "json"), "--log-format without --watch"),
        (("--watch", "--format", "json", "--exit-code"), "--format and --exit-code with --watch"),
        (("--watch", "--explain"), "--explain with --watch"),
    ],
)
def test_options_that_say_nothing_are_refused(arguments: tuple[str, ...], why: str) -> None:
    code, out, err = run("--prometheus", "http://127.0.0.1:1", *arguments)
    assert code == 2 and out == "" and why in err


def test_a_watch_wants_a_server(tmp_path: Path) -> None:
    code, out, err = run("--watch", "--scrape", "h:1")
    assert code == 2 and out == "" and "--watch with --scrape" in err and "--prometheus URL" in err
    assert run("--watch", "--snapshot", str(tmp_path))[0] == 2


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("up", [True, False])
def test_a_signal_ends_a_watch_cleanly(empty_prometheus: str, tmp_path: Path, sig: signal.Signals, up: bool) -> None:
    """While it waits for its next round, of a server that answers and of one that is down."""
    url = empty_prometheus if up else "http://127.0.0.1:1"
    process = subprocess.Popen(
        [sys.executable, "-m", "kvtune_cli", "suggest", "--watch", "--prometheus", url, "--port", "0"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
    )  # fmt: skip
    try:
        assert process.stdout is not None and process.stderr is not None
        address = json.loads(process.stdout.readline())["metrics"]
        line = process.stderr.readline()
        with urllib.request.urlopen(address) as page:
            text = page.read().decode()
        process.send_signal(sig)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, out, err) == (0, "", "")
    assert "no advice: " in line and (" INFO " in line) is up
    assert f"\nkvtune_suggest_up {float(up)}\n" in text


def test_a_signal_ends_a_round_that_hangs(tmp_path: Path) -> None:
    """A server that accepts and never answers holds nobody up."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvtune_cli", "suggest", "--watch", "--port", "0",
             "--prometheus", f"http://127.0.0.1:{silent.getsockname()[1]}"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        )  # fmt: skip
        try:
            connection, _ = silent.accept()
            with connection:
                process.send_signal(signal.SIGTERM)
                out, err = process.communicate(timeout=60)
        finally:
            process.kill()
            process.wait()
    assert process.returncode == 0 and err == "" and "metrics" in json.loads(out)
