"""Where output cannot be written, and who asked for a document: every command, as a process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvtune_cli.errors import SCHEMAS, schema_asked

FULL = "cannot write the output: No space left on device"
CLOSED = "cannot write the output: Bad file descriptor"
KVTUNE = f"{sys.executable} -m kvtune_cli"


def shell(line: str) -> tuple[int, str, str]:
    done = subprocess.run(["bash", "-o", "pipefail", "-c", line], capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "t.csv"
    path.write_text("conv,turn,in_tokens,out_tokens,gap_to_next_s,reusable_tokens_next\na,0,100,10,,0\n")
    return path


COMMANDS = (
    "metrics", "metrics --format json", "suggest --help", "--version", "rules --help",
    "suggest --snapshot /nowhere --format json", "suggest --nosuch --format json",
    "simulate TRACE --ttl 60 --policies none --duration 60s --warmup 1s --jobs 1 --format FORMAT",
)  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("target", "says"), [(">/dev/full", FULL), (">&-", CLOSED)])
def test_output_that_cannot_be_written_is_one_line_and_exit_1(
    command: str, target: str, says: str, trace: Path
) -> None:
    for form in ("table", "json") if "FORMAT" in command else ("",):
        code, out, err = shell(f"{KVTUNE} {command.replace('TRACE', str(trace)).replace('FORMAT', form)} {target}")
        assert (code, out) == (1, "") and f"kvtune: {says}\n" in err
        assert "Traceback" not in err and "Exception ignored" not in err


@pytest.mark.parametrize("command", ["metrics", "metrics --format md", "--help", "suggest --nosuch --format json"])
def test_a_reader_that_goes_away_is_no_error(command: str) -> None:
    code, out, err = shell(f"{{ sleep 0.2; {KVTUNE} {command}; }} 2>/dev/null | true; echo ${{PIPESTATUS[0]}}")
    assert (code, out, err) == (0, "0\n", "")
    code, _, err = shell(f"{KVTUNE} {command} | true")
    assert "Traceback" not in err and "Exception ignored" not in err and "Broken pipe" not in err


def test_nothing_for_a_closed_stderr_goes_to_stdout() -> None:
    code, out, _ = shell(f"{KVTUNE} suggest --snapshot /nowhere --format json 2>&-")
    assert code == 1 and json.loads(out)["error"]["code"] == "no_such_directory"


@pytest.mark.parametrize(
    ("command", "bad", "says"),
    [
        ("suggest", "--tp abc", "--tp"),
        ("suggest", "--nosuch", "--nosuch"),
        ("suggest", "--port 1", "--port without --watch"),
        ("record", "--nosuch", "--nosuch"),
        ("record", "--out /tmp/x", "--scrape"),
        ("simulate", "--noise 9", "--noise"),
        ("simulate", "--seed", "--seed"),
        ("simulate", "--ttl x", "--ttl: 'x' is not a number"),
        ("metrics", "extra", "extra"),
        ("check", "--nosuch", "--nosuch"),
    ],
)
@pytest.mark.parametrize("asking", ["--format json {}", "--format=json {}"])
def test_usage_errors_are_a_document_where_one_was_asked_for(command: str, bad: str, says: str, asking: str) -> None:
    code, out, err = shell(f"{KVTUNE} {command} {asking.format(bad)}")
    document = json.loads(out)
    assert (code, document["schema"], document["error"]["code"]) == (2, SCHEMAS[command], "usage")
    assert says in document["error"]["message"] and says in err and document.keys() == {"schema", "error"}
    assert document["error"].keys() == {"code", "message", "hint"}
    code, out, err = shell(f"{KVTUNE} {command} {bad}")
    assert (code, out) == (2, "") and says in err


@pytest.mark.parametrize(
    ("line", "schema"),
    [
        ("suggest --format json", "kvtune.suggest/1"),
        ("suggest --format yaml", "kvtune.suggest/1"),
        ("simulate --format yaml", None),
        ("suggest --format json --format table", None),
        ("suggest -- --format json", None),
        ("suggest --format", None),
        ("router --format json", None),
        ("--version", None),
        ("", None),
    ],
)
def test_which_document_was_asked_for(line: str, schema: str | None) -> None:
    assert schema_asked(line.split()) == schema
