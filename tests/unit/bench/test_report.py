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
    assert "turns back in time 90.2 % 94.5 %" in text
    assert "1,911 pauses that ended, 812 timed fetches, 604 timed recomputes." in text
    assert "router --ttl 240" in text
    assert "64 tokens keep" in text
    assert f"turns sent {len(result['turns']):,}" in text
    assert "histories read, as prefill counts 1,204 released as read, as decode counts 1,204" in text
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
    assert "histories read, as prefill counts 1,204 released as read, as decode counts 1,200" in text
    assert "violations foreign kv: 1" in text
    assert "✗ turns answered = turns sent" in text
    assert "1 of 2 checks fail: see" in text
    assert "2 wrong" in text
    assert "120 s → off" in text
    assert "cannot be told from this traffic" in text


@pytest.fixture
def no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no chart is looked at: drawing them is most of the work."""
    monkeypatch.setattr(report, "all_charts", lambda *args, **more: [])


def plain(result: dict[str, Any]) -> str:
    return text_of(render_report(result)).replace("\u00a0", " ")


@pytest.mark.usefixtures("no_charts")
def test_the_arm_without_reuse_is_told_in_conversations_and_turns(result: dict[str, Any]) -> None:
    result["figures"]["turns"] |= {
        "sent": 100, "conversations": 86, "turns_off": 33, "conversations_off": 25, "conversations_off_in_part": 0,
    }  # fmt: skip
    said = "25 of 86 conversations, 33 % of turns, were kept without reuse to compare with"
    assert f"{said}. The load played" in plain(result)
    result["figures"]["turns"]["conversations_off_in_part"] = 2
    assert f"{said} (2 of them had other turns too)." in plain(result)
    result["figures"]["turns"]["turns_off"] = 0
    assert "were kept without reuse" not in plain(result)


@pytest.mark.usefixtures("no_charts")
def test_the_two_populations_of_conversations_are_named(result: dict[str, Any]) -> None:
    result["figures"]["turns"] |= {"conversations": 86, "new_to_router": 5}
    evidence = result["suggest"]["evidence"]
    evidence["conversations"] = 91
    text = plain(result)
    assert "91 conversations as the router saw them" in text
    assert (
        "The load played 86 conversations; the router saw 91. A compacted or rewritten history that comes without an "
        "id counts as a new conversation there: 5 turns here."
    ) in text
    evidence["conversations"] = 80
    text = plain(result)
    assert "the router saw 80. The window need not cover the whole load." in text
    assert "counts as a new" not in text
    evidence["conversations"] = 86
    assert "The load played 86 conversations;" not in plain(result)


@pytest.mark.usefixtures("no_charts")
def test_three_kinds_of_rewritten_are_told_apart(result: dict[str, Any]) -> None:
    result["figures"]["turns"]["recorded_rewrites"] = 240
    result["figures"]["outcomes"]["total"]["rewritten"] = 8
    result["figures"]["decisions"] = {
        "fetch/none": 757.0, "fetch/cut_to_proven_prefix": 156.0, "recompute/none": 476.0, "recompute/rewritten": 8.0,
        "recompute/below_threshold": 3.0, "recompute/expired": 0.0,
    }  # fmt: skip
    text = plain(result)
    assert "fetch, cut to the proven prefix 156 11.1 %" in text
    assert "recompute: too little proven equal 8 0.6 %" in text
    assert "recompute: below threshold 3" in text
    assert "recompute: expired" not in text
    for words in ("Recorded rewrites: 240 turns", "cut to the proven prefix: 156,", "Outcome “rewritten”: 8 turns"):
        assert words in text


@pytest.mark.usefixtures("no_charts")
def test_shares_counts_and_settings_have_one_form_each(result: dict[str, Any]) -> None:
    result["settings"] |= {"ttl_s": 1800.0, "holdout": 0.25, "threshold_tokens": 8192, "time_scale": 20.0}
    result["settings"] |= {"pool_tokens": None, "trace": None}
    result["suggest"]["evidence"] |= {
        "kv_usage_p99": 0.918567,
        "cost_observations": {"fetch": 847.9, "recompute": 12.4},
        "settings": {
            "decoder_kv_blocks_ttl": {"value": 1800, "assumed": True},
            "kv_recompute_threshold": {"value": 8192, "assumed": False},
        },
    }
    ttl = result["suggest"]["recommendations"][0]
    ttl["current"] = 1800.0
    for row, returning in zip(ttl["counterfactual"], (0.5977, 0.7923, 0.9894, 0.9963, 1), strict=True):
        row["hit_ratio_returning"] = returning
        row["prefill_saved_s_per_turn"] = 0.8478 + row["value"] / 400
    text = plain(result)
    assert "TTL 1800 s" in text
    assert "1800 s → 240 s" in text
    assert "decoder kv blocks ttl: 1800 s (assumed); kv recompute threshold: 8192 tokens" in text
    assert "threshold 8192 tokens" in text
    assert "30 min" not in text
    assert "conversations to keep without reuse 25 %" in text
    assert "KV pool of each engine as calibrated" in text
    assert "KV pool in use, P99 92 %" in text
    for share in ("59.8 %", "79.2 %", "98.9 %", "99.6 %", "100 %"):
        assert share in text
    assert "about 848 timed fetches, about 12 timed recomputes" in text
    assert "fetch: 848; recompute: 12" in text
    for number in ("0.92 s", "1.00 s", "1.15 s", "1.45 s", "2.05 s"):
        assert number in text


@pytest.mark.usefixtures("no_charts")
def test_only_rows_that_are_bounds_are_marked(result: dict[str, Any]) -> None:
    rows = result["suggest"]["recommendations"][0]["counterfactual"]
    assert "†" not in plain(result)
    assert "bound only" not in plain(result)
    rows[-1]["bound"] = True
    text = plain(result)
    assert "480 s †" in text
    assert text.count("†") == 2  # the row and its explanation
    assert "bound only" not in text


@pytest.mark.usefixtures("no_charts")
@pytest.mark.parametrize("checks", [{}, {"a = b": True}, {"a = b": True, "c < d": False, "new <check>": True}])
def test_exactly_the_checks_of_the_books_are_shown(result: dict[str, Any], checks: dict[str, bool]) -> None:
    result["books"] |= {"checks": checks, "ok": all(checks.values())}
    items = re.findall(r"<li class=\"\w*\">([✓✗] [^<]*)</li>", render_report(result))
    assert sorted(items) == sorted(
        f"{'✓' if good else '✗'} {name.replace('<', '&lt;').replace('>', '&gt;')}" for name, good in checks.items()
    )


@pytest.mark.usefixtures("no_charts")
def test_every_mean_names_its_turns(result: dict[str, Any]) -> None:
    result["suggest"]["evidence"]["ttft_followup_mean_s"] = 2.87
    text = plain(result)
    assert "means over follow-up turns at equal prompt lengths" in text
    assert "mean time to first token, reuse on vs off: follow-up turns at equal prompt lengths" in text
    assert "All answered turns of each kind; prompts differ" in text
    assert "TTFT, mean of all answered follow-up turns, with and without reuse, whatever their prompt lengths" in text
    assert "TTFT is over all answered follow-up turns, with and without reuse" in text
    assert "These means are not the headline’s" in text
    assert "follow-up, outcome hit" in text
    result["figures"]["comparison"] = {}
    assert "not the headline’s" not in plain(result)


@pytest.mark.usefixtures("no_charts")
def test_turns_that_were_not_answered_are_told_first(result: dict[str, Any]) -> None:
    assert "not answered" not in plain(result)
    for turn, error in zip(result["turns"][5:8], ("<503> no engine", "later", "later"), strict=True):
        turn |= {"answered": False, "error": error}
    sent = len(result["turns"])
    text = plain(result)
    said = f"3 of {sent:,} turns were not answered. The first failed with: <503> no engine"
    assert said in text
    assert text.index(said) < text.index("all correct")
    for turn in result["turns"][6:8]:
        turn["answered"] = True
    result["turns"][5] |= {"error": None, "status": 502}
    assert f"1 of {sent:,} turns was not answered. The first failed with: HTTP status 502" in plain(result)
    result["turns"][5] |= {"error": "x" * 999}
    assert "x" * 300 + "…" in plain(result)
    result["turns"] = []
    result["figures"]["turns"] |= {"sent": 10, "answered": 8}
    assert "2 of 10 turns were not answered." in plain(result)


def test_refuses_another_schema() -> None:
    with pytest.raises(ValueError, match=r"kvtune\.demo/1"):
        render_report({"schema": "kvtune.demo/2"})


def test_every_outcome_is_explained() -> None:
    assert set(OUTCOMES) == {outcome.value for outcome in Outcome} | {"unreported"}
