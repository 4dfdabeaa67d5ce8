"""Every field of a document is in docs/suggest.md, and every field there occurs in some document."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvtune_tuning.api import suggest_snapshots

Snapshots = Callable[..., Path]
PAGE = Path(__file__).parents[3] / "docs" / "suggest.md"


def paths(value: Any, at: str = "") -> Iterator[str]:
    """Paths of all fields, `[]` for the elements of a list of objects."""
    if isinstance(value, dict):
        if not value:
            yield at
        for key, inner in value.items():
            yield from paths(inner, f"{at}.{key}" if at else key)
    elif isinstance(value, list) and any(isinstance(one, dict) for one in value):
        for one in value:
            yield from paths(one, f"{at}[]")
    else:
        yield at


def documented() -> set[str]:
    section = PAGE.read_text(encoding="utf-8").split("\n## The document\n")[1].split("\n## ")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| `")]
    assert all(len(row) == 5 and (row[2].strip() or row[3].strip() or "`" in row[1]) for row in rows)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row[1])}


def matches(pattern: str, path: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.\[\]]+"), path) is not None


def test_every_field_is_documented(snapshots: Snapshots, small_answers: dict[str, object], tmp_path: Path) -> None:
    pressed = snapshots(pool=1_500_000, interval=120.0)
    for file in pressed.glob("*-d.prom"):
        lines = [line for line in file.read_text().splitlines() if line.startswith("vllm:")]
        total = int(file.name[:10]) - 1_700_000_000
        lines += [
            f'vllm:request_success_total{{engine="0",finished_reason="stop",model_name="m"}} {total}',
            f'vllm:generation_tokens_total{{engine="0",model_name="m"}} {200 * total}',
            f'vllm:prompt_tokens_total{{engine="0",model_name="m"}} {2000 * total}',
            f'vllm:nixl_xfer_time_seconds_count{{engine="0",model_name="m"}} {total}',
            f'vllm:nixl_num_kv_expired_reqs_total{{engine="0",model_name="m"}} {total // 3}',
        ]
        (tmp_path / file.name).write_text("\n".join(lines) + "\n")
    documents = [
        suggest_snapshots(pressed, explain=True),
        suggest_snapshots(snapshots(**small_answers), explain=True),
        suggest_snapshots(snapshots(conversations_per_s=0.0), explain=True),
        suggest_snapshots(tmp_path, explain=True),
        suggest_snapshots(tmp_path / "none"),
    ]
    assert [d["evidence"]["mode"] for d in documents[:4]] == ["kvtune", "kvtune", "kvtune", "stock"]
    found = {path for one in documents for path in paths(one)}
    known = documented()
    assert sorted(path for path in found if not any(matches(pattern, path) for pattern in known)) == []
    # containers are named where they may be empty or null
    unused = {p for p in known if not any(matches(p, path) or path.startswith((p + ".", p + "[")) for path in found)}
    assert unused <= {"evidence.scrape_gaps.*", "evidence.restarts.*"}, unused
