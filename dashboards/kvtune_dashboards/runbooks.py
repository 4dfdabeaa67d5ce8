"""Finds what is wrong with the runbooks: pages that are missing, too many or incomplete, and names that lead nowhere.

A page is written for somebody who was woken: what it tells to ask or to set must exist. Queries are examined as the
rules are, and panels, metrics, settings and flags are looked up.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtune_dashboards.alerts import Alert, alerts
from kvtune_dashboards.config import RulesConfig, settings
from kvtune_dashboards.recording import recording_rules
from kvtune_dashboards.rules import Finding
from kvtune_dashboards.semantics import examine, known_series

HEADINGS = ("Meaning", "Impact", "First look", "Causes, likeliest first", "What to turn", "Verify")
"""What every runbook has, in this order."""
_ASKS = ("First look", "Verify")
"""Sections that show a query."""
CONNECTOR_KEYS: Mapping[str, Any] = {
    "kv_connector": None,
    "kv_connector_module_path": None,
    "kv_role": None,
    "kv_load_failure_policy": None,
    "kv_connector_extra_config": {
        "bidirectional_kv_xfer": None,
        "decoder_kv_blocks_ttl": None,
        "kv_recompute_threshold": None,
        "kvtune": {
            "require_fingerprint": None,
            "min_retain_s": None,
            "max_retain_s": None,
            "idle_sleep_ms": None,
            "progress_thread": None,
        },
    },
}
"""Keys of vLLM's `--kv-transfer-config` that a runbook may tell to set."""
_OTHER_FLAGS = frozenset({"--kv-transfer-config", "--config", "--out", "--enable-feature", "--metrics"})
_NAME = re.compile(r"(?:kvtune[_:]|vllm:)[a-z0-9_:]+")
_FLAG = re.compile(r"--[a-z][a-z-]+")
_CONFIG_KEY = re.compile(r"(?<![\w-])(?:windows|advice|ttft_slo|alerts|links)\.[a-z_]+")
_PANEL = re.compile(r"[Pp]anel \"([^\"]+)\" of kvtune / (\w+)")
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SECTION = re.compile(r"^## +(.+?) *$\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`\n]+)`")


@dataclass(frozen=True, slots=True)
class Known:
    """What a runbook may name."""

    panels: Mapping[str, Collection[str]]
    """Titles of the panels, by the board's short name (`reuse`)."""
    flags: Collection[str] | None = None
    """Flags of kvtune's commands; None: not looked up."""
    names: Collection[str] = field(default_factory=frozenset)
    """Metrics and recording rules: families and samples."""
    config: Collection[str] = field(default_factory=frozenset)
    """Settings of the rules' configuration."""


def known(config: RulesConfig, flags: Collection[str] | None = None) -> Known:
    """What there is: boards, metrics, recording rules and settings; `flags` are those of the command line."""
    from kvtune_dashboards.rendering import boards

    panels = {}
    for board in boards():
        rows = [*board["panels"], *(inner for panel in board["panels"] for inner in panel.get("panels", ()))]
        panels[board["uid"].removeprefix("kvtune-")] = {panel["title"] for panel in rows}
    series = known_series()
    names = {*series, *(one.family for one in series.values()), *(rule.name for rule in recording_rules(config))}
    return Known(panels, flags, frozenset(names), frozenset(key for key, _, _ in settings()))


def runbook_findings(config: RulesConfig, directory: Path, flags: Collection[str] | None = None) -> list[Finding]:
    """Alerts without a runbook, runbooks without an alert, and what is wrong in those that are there.

    Args:
        config: Names the alerts.
        directory: Holds a `<alert>.md` each.
        flags: Flags of kvtune's commands, that pages may name; None: not looked up.
    """
    wanted = {alert.name: alert for alert in reversed(alerts(config))}
    pages = {path.stem: path for path in sorted(directory.glob("*.md")) if path.stem != "README"}
    found = [
        Finding(str(directory / f"{name}.md"), "is missing: every alert has a runbook")
        for name in sorted(wanted.keys() - pages.keys())
    ]
    there = known(config, flags)
    for name, path in pages.items():
        if name not in wanted:
            found.append(Finding(str(path), "there is no alert of this name"))
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            found.append(Finding(str(path), f"cannot be read: {error}"))
            continue
        found += [Finding(f"{path}:{line}", said) for line, said in problems(wanted[name], text, there)]
    return found


def problems(alert: Alert, text: str, there: Known) -> list[tuple[int, str]]:
    """What is wrong with the page of an alert: line and message, in order."""
    return sorted({*_structure(alert, text), *_blocks(text, there), *_words(text, there), *_panels(alert, text, there)})


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def _structure(alert: Alert, text: str) -> Iterator[tuple[int, str]]:
    if not text.startswith(f"# {alert.name}\n"):
        yield 1, f"does not begin with `# {alert.name}`"
    headings = re.findall(r"^## +(.+?) *$", text, flags=re.MULTILINE)
    if tuple(headings) != HEADINGS:
        yield 1, f"has the sections {', '.join(headings) or 'none'}; it must have {'; '.join(HEADINGS)}"
    for section in _SECTION.finditer(text):
        heading, body = section.groups()
        at = _line(text, section.start())
        if len(_BLOCK.sub("", body).split()) < 6:
            yield at, f"says nothing under `{heading}`"
        if heading in _ASKS and "```promql" not in body:
            yield at, f"shows no query under `{heading}`: give one in a promql block"


def _blocks(text: str, there: Known) -> Iterator[tuple[int, str]]:
    for block in _BLOCK.finditer(text):
        kind, body = block.group(1), block.group(2)
        at = _line(text, block.start()) + 1
        if kind == "promql":
            for number, line in enumerate(body.splitlines()):
                if line.strip():
                    meaning = examine(line, known_series(), windows=None)
                    yield from ((at + number, problem.message) for problem in meaning.problems)
        elif kind == "json":
            try:
                document = json.loads(body)
            except ValueError as error:
                yield at, f"is no JSON: {error}"
                continue
            yield from ((at, said) for said in _unknown_keys(document, CONNECTOR_KEYS, ""))
        elif kind == "sh":
            yield from ((at, said) for said in _unknown_flags(body, there))
        elif kind not in ("yaml", "text"):
            yield at - 1, f"a block of kind {kind!r}: it is one of promql, json, sh, yaml, text"


def _unknown_keys(document: object, keys: Mapping[str, Any], where: str) -> Iterator[str]:
    if not isinstance(document, dict):
        yield f"{where or 'the block'} is no object"
        return
    for key, value in document.items():
        # A page may begin inside: with the extra config's keys, or kvtune's own.
        inner = keys if key in keys else _level_of(key) if not where else None
        if inner is None or key not in inner:
            yield f"there is no setting `{where}{key}` in vLLM's kv-transfer-config"
        elif inner[key] is not None:
            yield from _unknown_keys(value, inner[key], f"{where}{key}.")


def _level_of(key: str, keys: Mapping[str, Any] = CONNECTOR_KEYS) -> Mapping[str, Any] | None:
    if key in keys:
        return keys
    for inner in keys.values():
        found = _level_of(key, inner) if inner else None
        if found is not None:
            return found
    return None


def _unknown_flags(text: str, there: Known) -> Iterator[str]:
    if there.flags is not None:
        for flag in _FLAG.findall(text):
            if flag not in there.flags and flag not in _OTHER_FLAGS:
                yield f"no command has a flag `{flag}`"


def _words(text: str, there: Known) -> Iterator[tuple[int, str]]:
    """Names in backticks, outside blocks."""
    prose = _BLOCK.sub(lambda block: "\n" * block.group(0).count("\n"), text)
    for span in _INLINE.finditer(prose):
        at = _line(prose, span.start())
        word = span.group(1)
        for name in _NAME.findall(word):
            if name not in there.names:
                yield at, f"`{name}` is in neither the catalogue, the recording rules nor the other series"
        for key in _CONFIG_KEY.findall(word):
            if key not in there.config:
                yield at, f"the rules' configuration has no `{key}`"
        yield from ((at, said) for said in _unknown_flags(word, there))


def _panels(alert: Alert, text: str, there: Known) -> Iterator[tuple[int, str]]:
    named = set()
    for match in _PANEL.finditer(text):
        title, board = match.group(1), match.group(2).lower()
        named.add((board, title))
        if title not in there.panels.get(board, ()):
            yield _line(text, match.start()), f"there is no panel {title!r} on kvtune / {match.group(2)}"
    own = (alert.board.removeprefix("kvtune-"), alert.panel)
    if own not in named:
        yield 1, f'does not lead to the panel "{own[1]}" of kvtune / {own[0].capitalize()}, as the alert does'
