"""The report: it says what was found, escapes what it is given, loads nothing, and survives missing parts."""

from __future__ import annotations

import copy
import random
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from kvtune_bench import figures, report
from kvtune_bench.load import TurnRecord
from kvtune_bench.report import OUTCOMES, render_report
from kvtune_bench.traces import load_trace, plan
from kvtune_telemetry.vocabulary import Outcome

DURATION_S = 2400.0
LABELS = 'model_name="sim",engine="0"'


def synthetic_records() -> list[TurnRecord]:
    """The packaged conversations played by a model of the engines: fetch 20.9 ms + 4.55 us, compute 99 ms + 26.9 us."""
    rng = random.Random(3)
    records: list[TurnRecord] = []
    for number, planned in enumerate(plan(load_trace(), context_limit=131_072)):
        off = rng.random() < 0.2
        now = rng.uniform(0, 600)
        start_at = rng.randrange(max(1, len(planned.turns) - 1))
        ended: float | None = None
        for index, turn in enumerate(planned.turns[start_at:], start_at):
            before = planned.turns[index - 1].gap_s if ended is not None else None
            if ended is not None:
                now = ended + (before or 0.0)
            if now > DURATION_S:
                break
            expired = before is not None and before > 115
            lost = rng.random() < 0.01
            outcome = (
                "first" if ended is None
                else "disabled" if off
                else "expired" if expired
                else "consumed" if lost
                else "rewritten" if turn.keep_tokens < 0.5 * turn.prompt_tokens
                else "hit"
            )  # fmt: skip
            kept = turn.keep_tokens if outcome == "hit" else 0
            new = turn.prompt_tokens - kept
            ttft = (0.0993 + 26.9e-6 * new + (0.0209 + 4.55e-6 * kept if kept else 0)) * rng.lognormvariate(0, 0.15)
            ttft += rng.expovariate(1 / 0.25)
            length = ttft + 0.0158 * turn.output_tokens
            records.append(
                TurnRecord(
                    conversation=number, turn=index, followup=ended is not None, start_s=now, ttft_s=ttft,
                    duration_s=length, prompt_tokens=turn.prompt_tokens, output_tokens=turn.output_tokens,
                    keep_tokens=turn.keep_tokens if ended is not None else 0, gap_s=before, next_gap_s=turn.gap_s,
                    status=200, answered=True, outcome=outcome, session=True, rewritten=turn.rewritten,
                    compacted=turn.compacted, answer_sha="0" * 16, correct=True, error=None,
                )
            )  # fmt: skip
            ended = now + length
    records.sort(key=lambda record: record.start_s + record.duration_s)
    return records


def synthetic_scrapes() -> list[figures.Scrape]:
    """Decode's gauge over time, and prefill's sums of both paths at the end."""
    rng = random.Random(5)
    scrapes = []
    for index in range(81):
        t = index * DURATION_S / 80
        held = 1.9e6 * (1 - 2.718 ** (-t / 400)) + rng.gauss(0, 6e4) * (index > 0)
        text = (
            f'kvtune_retained_tokens{{{LABELS},role="decode"}} {max(0.0, held)}\n'
            f'kvtune_connector_setting{{{LABELS},role="decode",setting="kv_pool_tokens"}} 3.5e6\n'
            f'kvtune_retentions_ended_total{{{LABELS},role="decode",end="read"}} 1204\n'
        )
        scrapes.append(figures.Scrape(t, "decode-0", text))
    lines = [
        f'kvtune_kv_reads_total{{{LABELS},role="prefill",direction="d2p",size="65536"}} 1204',
        f'kvtune_prompt_tokens_total{{{LABELS},role="prefill",source="computed"}} 3.1e7',
        f'kvtune_prompt_tokens_total{{{LABELS},role="prefill",source="fetched"}} 8.4e7',
        f'kvtune_prompt_tokens_total{{{LABELS},role="prefill",source="local_hit"}} 1.2e7',
    ]
    for path, base, slope, sizes in (
        ("fetch", 0.0209, 4.55e-6, (128, 256, 512, 2048, 8192, 32768, 65536, 131072)),
        ("recompute", 0.0993, 26.9e-6, (64, 256, 1024, 4096, 16384, 32768, 65536, 131072)),
    ):
        for size in sizes:
            sums = [0.0] * 5
            for _ in range(rng.randrange(5, 200)):
                n = rng.uniform(0.55, 1) * size
                s = (base + slope * n) * rng.lognormvariate(0, 0.1)
                sums = [a + b for a, b in zip(sums, (1, n, n * n, s, n * s), strict=True)]
            names = ("observations", "tokens", "tokens_squared", "seconds", "token_seconds")
            for name, value in zip(names, sums, strict=True):
                labels = f'{LABELS},role="prefill",path="{path}",size="{size}"'
                lines.append(f"kvtune_path_{name}_total{{{labels}}} {value}")
    scrapes.append(figures.Scrape(DURATION_S, "prefill-0", "\n".join(lines) + "\n"))
    return scrapes


def synthetic_result() -> dict[str, Any]:
    records = synthetic_records()
    summary = figures.summarise(records, synthetic_scrapes(), duration_s=DURATION_S)
    hit = {30: 0.789, 60: 0.853, 120: 0.902, 240: 0.945, 480: 0.966}
    return {
        "schema": "kvtune.demo/1",
        "simulated": {
            "model": "qwen3-32b",
            "statement": "The engines are simulated; no GPU was used. Router, connector policy, metrics and advice are "
            "the real ones.",
            "calibration": {
                "name": "qwen3-32b",
                "source": "straight lines through two published points per curve on AWS p5en, tensor parallel size 8",
                "prefill": {"base_s": 0.0993, "token_s": 26.9e-6},
                "transfer": {"base_s": 0.0209, "token_s": 4.55e-6},
                "pool_tokens": 3_500_000,
            },
            "time_scale": 40.0,
        },
        "settings": {"concurrency": 32, "holdout_ratio": 0.2, "seed": 0, "prefill_engines": 1, "decode_engines": 1},
        "duration_s": DURATION_S,
        "turns": [record.as_dict() for record in records],
        "figures": summary,
        "books": {
            "turns": len(records),
            "outcomes": summary["outcomes"]["total"],
            "reads_at_prefill": 1204,
            "reads_released_at_decode": 1204,
            "violations": {"late_read": 0},
            "references": {"received": 1700, "ended": 1650, "held": 50},
            "checks": {"references received = ended + held": True},
            "ok": True,
        },
        "suggest": {
            "schema": "kvtune.suggest/1",
            "source": {"kind": "scrape", "targets": ["router", "prefill-0", "decode-0"]},
            "window": {"start": "2025-01-01T00:00:00Z", "seconds": 2400.0},
            "evidence": {"turns": len(records), "gaps": 1911, "cost_observations": {"fetch": 812, "recompute": 604}},
            "recommendations": [
                {
                    "setting": "decoder_kv_blocks_ttl",
                    "status": "change",
                    "current": 120.0,
                    "recommended": 240.0,
                    "interval": [180.0, 480.0],
                    "uncapped": 640.0,
                    "clamped_by": ["memory"],
                    "reason_code": "room_to_hold_longer",
                    "reason": "6 % of the turns come back between 120 s and 240 s, and the pool has room.",
                    "effects": {"hit_ratio": {"current": 0.902, "recommended": 0.945}},
                    "counterfactual": [
                        {
                            "value": float(value),
                            "hit_ratio": ratio,
                            "pinned_tokens_mean": 12_000.0 * value**0.5 * 8,
                            "pinned_tokens_p99": 15_000.0 * value**0.5 * 8,
                            "ttft_mean_s": 2.1 - 1.7 * ratio,
                            "pool_share_p99": None,
                            "bound": False,
                        }
                        for value, ratio in hit.items()
                    ],
                },
                {
                    "setting": "kv_recompute_threshold",
                    "status": "keep",
                    "current": 64,
                    "recommended": 64,
                    "interval": [16, 480],
                    "uncapped": 310,
                    "clamped_by": [],
                    "reason_code": "gain_too_small",
                    "reason": "Both paths cost the same at about 310 tokens; moving there saves under 2 ms a turn.",
                    "effects": {},
                    "counterfactual": [
                        {"value": value, "fetched_share": share, "extra_mean_s": cost, "ttft_mean_s": 0.47 + cost / 10}
                        for value, share, cost in ((64, 0.99, 0.2431), (256, 0.9, 0.2428), (1024, 0.84, 0.2461))
                    ],
                },
            ],
            "checks": [
                {"code": "margin", "level": "info", "message": "Prefill keeps 5 s: a TTL of 240 s serves 235 s."},
                {"code": "short", "level": "warning", "message": "The window is short: pauses end at 40 min."},
            ],
            "apply": {
                "engines": [{"role": "decode", "text": '{"kv_connector_extra_config": {}}'}],
                "router": "--ttl 240",
                "note": "Merge into --kv-transfer-config of every engine of the role, then restart it.",
            },
            "rollback": {"decode": '{"kv_connector_extra_config": {"decoder_kv_blocks_ttl": 120}}'},
        },
    }  # fmt: skip


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    return synthetic_result()


@pytest.fixture
def result(whole: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy(whole)


def text_of(page: str) -> str:
    """What a reader reads: no markup, blanks folded."""
    texts: list[str] = []
    skipping = 0

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            nonlocal skipping
            skipping += tag == "style"

        def handle_endtag(self, tag: str) -> None:
            nonlocal skipping
            skipping -= tag == "style"

        def handle_data(self, data: str) -> None:
            if not skipping:
                texts.append(data)

    Reader().feed(page)
    return re.sub(r"\s+", " ", " ".join(texts))


def test_says_what_was_found(result: dict[str, Any]) -> None:
    text = text_of(render_report(result))
    ratio = result["figures"]["comparison"]["ratio"]
    assert ratio > 1.5
    assert f"With KV reuse, follow-up turns got their first token {ratio:.1f}× sooner" in text
    assert "The engines are simulated; no GPU was used." in text
    assert "Calibration: qwen3-32b ; straight lines through two published points" in text
    assert "Time ran 40 times faster than on the wall" in text
    assert "120 s → 240 s" in text
    assert "90 % interval: 180 s to 480 s" in text
    assert "bounded by: memory (without: 640 s)" in text
    assert "turns back in time 90 % 94 %" in text
    assert "1,911 pauses that ended, 812 timed fetches, 604 timed recomputes." in text
    assert "router --ttl 240" in text
    assert "64 tokens keep" in text
    assert f"{len(result['turns']):,} turns sent = {len(result['turns']):,} outcomes booked" in text
    assert "1,204 histories read, as prefill counts = 1,204 released as read, as decode counts" in text
    assert "✓ no invariant violated" in text
    assert "✓ references received = ended + held" in text
    assert "✗" not in text
    assert "they balance" in text
    assert "all correct" in text
    assert "The window is short" in text
    assert "kvtune suggest --prometheus" in text
    assert "no data" not in text


def test_loads_nothing_from_anywhere(result: dict[str, Any]) -> None:
    page = render_report(result)
    assert "<script" not in page
    assert "@import" not in page
    assert not re.search(r"\b(?:src|srcset|action|poster)\s*=", page)
    assert all(target.startswith(("#", "data:,")) for target in re.findall(r'href="([^"]*)"', page))
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", page))
    names = re.findall(r'"(https?://[^"]*)"', page)
    assert all(name.startswith("http://www.w3.org/") for name in names)  # XML names, not requests


def test_ids_are_unique_and_references_resolve(result: dict[str, Any]) -> None:
    page = render_report(result)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'href="#([^"]+)"', page)) | set(re.findall(r"url\(#([^)]+)\)", page))
    assert used
    assert used <= set(ids)


def test_markup_is_balanced(result: dict[str, Any]) -> None:
    void = {"meta", "link", "br", "hr"}
    stack: list[str] = []

    class Balance(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            if tag not in void:
                stack.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert stack.pop() == tag

    Balance().feed(render_report(result))
    assert stack == []


def test_equal_results_give_equal_bytes(result: dict[str, Any]) -> None:
    assert render_report(result) == render_report(copy.deepcopy(result))


def test_every_string_is_escaped(result: dict[str, Any]) -> None:
    """A mark in every string of the input, keys of free tables included, must come out as text."""
    bad = "<img src=x onerror=alert(1)>&\"'"

    def poison(value: Any, keep: frozenset[str]) -> Any:
        if isinstance(value, dict):
            return {
                (key if key in known else key + bad): item if key in keep else poison(item, keep)
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [poison(item, keep) for item in value]
        return value + bad if isinstance(value, str) else value

    free = {"concurrency", "holdout_ratio", "seed", "gaps", "late_read", "hit", "expired", "decode"}
    known: set[str] = set()

    def collect(value: Any) -> None:
        if isinstance(value, dict):
            known.update(key for key in value if key not in free)
            for item in value.values():
                collect(item)
        elif isinstance(value, list):
            for item in value:
                collect(item)

    collect(result)
    known |= {"hit"}  # the figures are keyed by it
    poisoned = poison(result, frozenset({"schema", "figures", "turns", "setting"}))
    poisoned["next"] = [{"text": bad, "command": bad}]
    page = render_report(poisoned)
    assert "<img" not in page
    assert page.count("&lt;img src=x onerror=alert(1)&gt;&amp;&quot;&#x27;") > 25


@pytest.mark.parametrize(
    "missing",
    ["simulated", "settings", "duration_s", "turns", "figures", "books", "suggest"],
)
@pytest.mark.parametrize("how", ["absent", "none", "empty"])
def test_any_part_may_be_missing(
    result: dict[str, Any], missing: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing not in ("turns", "figures", "suggest"):
        # No chart depends on it, and drawing them is most of the work.
        monkeypatch.setattr(report, "all_charts", lambda *args, **more: [])
    if how == "absent":
        del result[missing]
    else:
        result[missing] = None if how == "none" else type(result[missing])()
    page = render_report(result)
    assert page.endswith("</html>\n")
    assert "None" not in text_of(page)
    assert "nan" not in text_of(page).split()


def test_an_empty_run_is_a_page_that_says_so() -> None:
    page = text_of(
        render_report(
            {
                "schema": "kvtune.demo/1",
                "figures": figures.summarise([], [], duration_s=10.0),
                "suggest": {"schema": "kvtune.suggest/1", "error": {"code": "x", "message": "only one scrape so far"}},
            }
        )
    )
    assert page.count("no data") == 5
    assert "What KV reuse did for these conversations" in page
    assert "only one scrape so far" in page


def test_bad_news_is_told_as_plainly(result: dict[str, Any]) -> None:
    result["books"] |= {"ok": False, "reads_released_at_decode": 1200, "violations": {"foreign_kv": 1}}
    result["books"]["checks"]["turns answered = turns sent"] = False
    result["figures"]["turns"]["wrong"] = 2
    result["figures"]["comparison"] |= {"ratio": 0.8, "on_s": 1.0, "off_s": 0.8}
    recommendation = result["suggest"]["recommendations"][0]
    recommendation |= {"status": "off", "recommended": 0.0, "reason": "nobody comes back", "interval": None}
    result["suggest"]["recommendations"][1] |= {"status": "unidentifiable", "recommended": None}
    text = text_of(render_report(result))
    assert "KV reuse made follow-up turns slower to start here" in text
    assert "they do not" in text
    assert "1,204 histories read, as prefill counts ≠ 1,200 released" in text
    assert "✗ foreign kv: 1" in text
    assert "✗ turns answered = turns sent" in text
    assert "no invariant violated" not in text
    assert "2 wrong" in text
    assert "120 s → off" in text
    assert "cannot be told from this traffic" in text


def test_refuses_another_schema() -> None:
    with pytest.raises(ValueError, match=r"kvtune\.demo/1"):
        render_report({"schema": "kvtune.demo/2"})


def test_every_outcome_is_explained() -> None:
    assert set(OUTCOMES) == {outcome.value for outcome in Outcome} | {"unreported"}
