"""`python -m kvtune_bench.demo_check RESULT.json REPORT.html`: does a demo's result hold together?"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import orjson


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.charts = 0
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.charts += tag == "svg"
        for name, value in attrs:
            loads = name in ("src", "srcset", "data") or (name == "href" and tag == "link")
            if loads and value and not value.startswith(("data:", "#")):
                self.outside.append(value)


def faults(result: dict[str, Any], page: str) -> list[str]:
    """What is wrong with a result and its report, in words; empty when nothing is."""
    found = [f"the books: {name}" for name, good in result["books"]["checks"].items() if not good]
    comparison = result["figures"]["comparison"]
    if not (comparison["saved_s"] or 0) > 0:
        found.append(f"reuse saved nothing: {comparison}")
    ttft = result["figures"]["ttft"]
    on, off = ttft["on"]["followup"]["mean"], ttft["off"]["followup"]["mean"]
    if on is None or off is None or not on < off:
        found.append(f"mean time to first token of follow-up turns: {on} s with reuse, {off} s without")
    suggest = result["suggest"]
    if suggest.get("schema") != "kvtune.suggest/1" or "error" in suggest:
        found.append(f"no advice: {suggest.get('error')}")
    settings = {one["setting"] for one in suggest.get("recommendations", ())}
    if settings != {"decoder_kv_blocks_ttl", "kv_recompute_threshold"}:
        found.append(f"advice on {sorted(settings)}")
    parsed = _Page()
    parsed.feed(page)
    if parsed.charts < 4:
        found.append(f"the report has {parsed.charts} charts")
    if parsed.outside:
        found.append(f"the report loads {parsed.outside[:3]}")
    return found


def main(arguments: list[str]) -> int:
    """Print what is wrong, or the headline; 1 if anything is."""
    if len(arguments) != 2:
        print("usage: python -m kvtune_bench.demo_check RESULT.json REPORT.html", file=sys.stderr)
        return 2
    result = orjson.loads(Path(arguments[0]).read_bytes())
    wrong = faults(result, Path(arguments[1]).read_text(encoding="utf-8"))
    for line in wrong:
        print(line, file=sys.stderr)
    if not wrong:
        comparison = result["figures"]["comparison"]
        print(f"demo: {result['books']['turns']} turns, books balance; {comparison['on_s']:.2f} s against "
              f"{comparison['off_s']:.2f} s to the first token")  # fmt: skip
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
