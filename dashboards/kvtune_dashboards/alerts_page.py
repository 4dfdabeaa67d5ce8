"""The tables of `docs/alerts.md`: alerts, recording rules and settings, made from the rules themselves.

`python -m kvtune_dashboards.alerts_page docs/alerts.md` writes them between the page's marks.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from pathlib import Path

from kvtune_dashboards.alerts import alerts
from kvtune_dashboards.config import RulesConfig, duration, settings
from kvtune_dashboards.recording import recording_rules


def alerts_table(config: RulesConfig) -> str:
    """One row for each alert; of one with several rules, what differs is listed."""
    rows = ["| Alert | Severity | For | What it means | Its value | Silent below |", "|---|---|---|---|---|---|"]
    for name, group in groupby(alerts(config), key=lambda alert: alert.name):
        same = list(group)
        first = same[0]
        severity = ", ".join(dict.fromkeys(alert.severity for alert in same))
        hold = ", ".join(dict.fromkeys(duration(alert.hold) for alert in same))
        value = ", ".join(dict.fromkeys(alert.value for alert in same))
        link = f"[{name}](../dashboards/runbooks/{name}.md)"
        rows.append(f"| {link} | {severity} | {hold} | {first.summary} | {value} | {_coded(first.floor)} |")
    return "\n".join(rows)


def _coded(text: str) -> str:
    return re.sub(r"\b(?:alerts|ttft_slo)\.[a-z_]+", lambda match: f"`{match.group(0)}`", text)


def recording_table(config: RulesConfig) -> str:
    """One row for each name that is recorded."""
    rows = ["| Recorded | Unit | Labels | What |", "|---|---|---|---|"]
    seen: dict[str, str] = {}
    for rule in recording_rules(config):
        labels = ", ".join(f"`{label}`" for label in rule.all_labels())
        seen.setdefault(rule.name, f"| `{rule.name}` | {rule.unit} | {labels} | {rule.help} |")
    return "\n".join([*rows, *seen.values()])


def settings_table(_: RulesConfig) -> str:
    """One row for each setting, with its default and the reason for it."""
    rows = ["| Setting | Default | Why |", "|---|---|---|"]
    for name, default, why in settings():
        if name == "ttft_slo.burns":
            shown = "; ".join(f"{b['severity']} {b['long']}/{b['short']} x{b['factor']:g}" for b in default)
        elif isinstance(default, list):
            shown = ", ".join(default) or "none"
        else:
            shown = f"{default}"
        rows.append(f"| `{name}` | {shown} | {why} |")
    return "\n".join(rows)


TABLES: Mapping[str, Callable[[RulesConfig], str]] = {
    "alerts": alerts_table,
    "recording": recording_table,
    "settings": settings_table,
}


def page(text: str, config: RulesConfig) -> str:
    """The page with its tables as they are now. Raises ValueError for a page that lacks a table's marks."""
    for name, table in TABLES.items():
        mark = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- end of {name} -->)", re.DOTALL)
        found = mark.search(text)
        if found is None:
            raise ValueError(f"the page has no marks `<!-- {name} -->` and `<!-- end of {name} -->`")
        text = f"{text[: found.start()]}\n{table(config)}\n\n{text[found.end() :]}"
    return text


def blocks(text: str, kind: str) -> Iterator[str]:
    """The page's code blocks of a kind."""
    yield from re.findall(rf"^```{kind}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def main(path: str) -> None:
    """Bring a page up to date."""
    file = Path(path)
    file.write_text(page(file.read_text(encoding="utf-8"), RulesConfig()), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
