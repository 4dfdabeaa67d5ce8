from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1].parent


def kvtune(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "kvtune_cli", *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def test_the_page_of_metrics_is_the_catalogue() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert page.endswith("\n" + kvtune("metrics", "--format", "md")), "run: kvtune metrics --format md"


def test_every_command_and_flag_in_the_readme_exists() -> None:
    text = re.sub(r"\\\n\s*", " ", (ROOT / "README.md").read_text(encoding="utf-8"))
    uses = re.findall(r"kvtune (demo|router|suggest|record|metrics|bench engine)\b([^\n`]*)", text)
    assert {command for command, _ in uses} >= {"demo", "router", "suggest", "record", "metrics"}
    for command, rest in uses:
        known = kvtune(*command.split(), "--help")
        for flag in re.findall(r"--[a-z][a-z-]+", rest):
            assert flag in known, f"kvtune {command} has no {flag}"


def test_linked_files_exist() -> None:
    for page in ("README.md", "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text(encoding="utf-8")):
            assert (ROOT / target).exists(), f"{page} links {target}"
