"""`kvtune rules` as a user runs it."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner, Result

from kvtune_cli import rules

ROOT = Path(__file__).resolve().parents[3]
app = typer.Typer()
app.command("render")(rules.render)
app.command("check")(rules.check)


@pytest.fixture(autouse=True)
def _no_promtool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same with and without one on this machine."""
    monkeypatch.setenv("PATH", str(tmp_path))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(one) for one in arguments])


def test_render_prints_the_paths_that_it_wrote(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    done = run("render", "--out", out)
    assert done.exit_code == 0
    assert [Path(line).name for line in done.stdout.splitlines()] == [
        "kvtune-recording.yaml", "kvtune-alerts.yaml", "kvtune-scrape-example.yaml", "kvtune-prometheusrule.yaml",
    ]  # fmt: skip
    assert all(Path(line).is_file() for line in done.stdout.splitlines())
    crd = run("render", "--out", tmp_path / "c", "--format", "crd")
    assert [Path(line).name for line in crd.stdout.splitlines()] == ["kvtune-prometheusrule.yaml"]


def test_render_takes_thresholds_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("alerts: {failed_ratio: 0.33, failed_for: 7m}\n")
    assert run("render", "--config", file, "--out", tmp_path).exit_code == 0
    (group,) = yaml.safe_load((tmp_path / "kvtune-alerts.yaml").read_text())["groups"]
    alert = next(rule for rule in group["rules"] if rule["alert"] == "KvtuneTransfersFailing")
    assert "kvtune:kv_reads_failed:ratio > 0.33" in alert["expr"]
    assert alert["for"] == "7m"


def test_a_bad_configuration_is_refused_without_a_traceback(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("ttft_slo: {bound: 2s}\n")
    for command in (("render", "--out", tmp_path), ("check", tmp_path)):
        done = run(*command, "--config", file)
        assert done.exit_code == 2
        assert "mine.yaml: ttft_slo.bound: 2 s is no edge of the TTFT histogram" in done.stderr
        assert "Traceback" not in done.output and not done.stdout
    assert run("render", "--config", tmp_path / "none.yaml", "--out", tmp_path).exit_code == 2


def test_render_into_a_file_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run("render", "--out", tmp_path / "file")
    assert done.exit_code == 1
    assert f"cannot write to {tmp_path / 'file'}" in done.stderr


def test_tests_are_made_for_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("alerts: {failed_ratio: 0.33}\n")
    done = run("render", "--tests", "--config", file, "--out", tmp_path)
    assert done.exit_code == 2 and "default thresholds" in done.stderr
    assert run("render", "--tests", "--format", "crd", "--out", tmp_path).exit_code == 2
    done = run("render", "--tests", "--out", tmp_path)
    assert done.exit_code == 0
    assert (tmp_path / "tests" / "quiet.test.yaml").is_file()


def test_what_is_committed_is_well() -> None:
    done = run("check", ROOT / "dashboards" / "prometheus")
    assert done.exit_code == 0, done.output
    assert not done.stdout
    assert "rules, alerts and files agree" in done.stderr
    assert "promtool is not on PATH" in done.stderr


def test_drift_fails_and_is_told(tmp_path: Path) -> None:
    out = tmp_path / "rules"
    assert run("render", "--out", out).exit_code == 0
    assert run("check", out).exit_code == 0
    alerts = out / "kvtune-alerts.yaml"
    alerts.write_text(alerts.read_text().replace("severity: critical", "severity: warning", 1))
    (out / "kvtune-recording.yaml").unlink()
    done = run("check", out)
    assert done.exit_code == 1
    assert "kvtune-recording.yaml: is missing" in done.stdout
    assert "has '        severity: warning'" in done.stdout or "severity: warning" in done.stdout
    assert "2 findings" in done.stderr
    assert run("check", out, "--format", "crd").exit_code == 0


def test_drifted_tests_fail(tmp_path: Path) -> None:
    assert run("render", "--tests", "--out", tmp_path).exit_code == 0
    (tmp_path / "tests" / "quiet.test.yaml").write_text("tests: []\n")
    (tmp_path / "tests" / "old.test.yaml").write_text("")
    done = run("check", tmp_path)
    assert done.exit_code == 1
    assert "quiet.test.yaml:1: has" in done.stdout
    assert "old.test.yaml: is not rendered any more" in done.stdout


def test_runbooks_beside_the_rules_are_checked(tmp_path: Path) -> None:
    out = tmp_path / "prometheus"
    assert run("render", "--out", out).exit_code == 0
    assert "not checked" in run("check", out).stderr
    books = tmp_path / "runbooks"
    books.mkdir()
    for path in (ROOT / "dashboards" / "runbooks").glob("*.md"):
        (books / path.name).write_bytes(path.read_bytes())
    assert run("check", out).exit_code == 0
    page = books / "KvtuneTransferSlow.md"
    page.write_text(page.read_text().replace("`--decode`", "`--decodes`"))
    (books / "KvtuneSettingsDiffer.md").unlink()
    done = run("check", out)
    assert done.exit_code == 1
    assert "no command has a flag `--decodes`" in done.stdout
    assert "KvtuneSettingsDiffer.md: is missing" in done.stdout


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    done = run("check", tmp_path / "nowhere")
    assert done.exit_code == 2
    assert "name the one that `kvtune rules render --out` wrote" in done.stderr
