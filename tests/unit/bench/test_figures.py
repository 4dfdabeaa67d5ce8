"""Figures: known numbers in, known numbers out, and None where there is nothing."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune_bench import figures
from kvtune_bench.figures import Scrape
from kvtune_bench.load import TurnRecord

BASE = TurnRecord(
    conversation=0, turn=0, followup=True, start_s=0.0, ttft_s=1.0, duration_s=2.0, prompt_tokens=1000,
    output_tokens=10, keep_tokens=900, gap_s=None, next_gap_s=None, status=200, answered=True, outcome="hit",
    session=True, rewritten=False, compacted=False, answer_sha=None, correct=True, error=None,
)  # fmt: skip


def test_quantiles_are_nearest_rank() -> None:
    values = [4.0, 1.0, 3.0, 2.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0]
    assert figures.stat(values) == {"n": 10, "mean": 5.5, "p50": 5.0, "p90": 9.0}
    assert figures.stat([3.0]) == {"n": 1, "mean": 3.0, "p50": 3.0, "p90": 3.0}
    assert figures.stat([]) == {"n": 0, "mean": None, "p50": None, "p90": None}


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0.01, 1))
def test_a_quantile_is_a_value_that_enough_do_not_exceed(values: list[float], q: float) -> None:
    found = figures.quantile(values, q)
    assert found in values
    assert sum(value <= found for value in values) >= q * len(values) - 1e-6


def test_ttft_is_split_by_arm_and_by_first_or_followup() -> None:
    records = [
        replace(BASE, ttft_s=1.0),
        replace(BASE, ttft_s=3.0, outcome="expired"),
        replace(BASE, ttft_s=8.0, outcome="disabled"),
        replace(BASE, ttft_s=5.0, outcome="first", followup=False),
        replace(BASE, ttft_s=7.0, outcome=None),
        replace(BASE, ttft_s=9.0, answered=False, outcome="error"),
        replace(BASE, ttft_s=None),
    ]
    found = figures.ttft(records)
    assert found["on"]["followup"] == {"n": 2, "mean": 2.0, "p50": 1.0, "p90": 3.0}
    assert found["off"]["followup"]["mean"] == 8.0
    assert found["on"]["first"]["mean"] == 5.0
    assert found["off"]["first"]["n"] == 0
    assert found["unreported"]["followup"]["mean"] == 7.0
    by_outcome = figures.ttft_by_outcome(records)
    assert {name: one["mean"] for name, one in by_outcome.items()} == {
        "disabled": 8.0, "expired": 3.0, "hit": 1.0, "unreported": 7.0,
    }  # fmt: skip


def test_size_classes_have_exclusive_lower_and_inclusive_upper_edges() -> None:
    records = [
        replace(BASE, prompt_tokens=n, ttft_s=s, outcome=outcome)
        for n, s, outcome in ((128, 1.0, "hit"), (129, 2.0, "hit"), (256, 4.0, "disabled"), (1000, 5.0, "disabled"))
    ]
    found = figures.ttft_by_size(records)
    assert [(row["from"], row["to"]) for row in found] == [(0, 128), (128, 256), (896, 1024)]
    assert [row["on"]["mean"] for row in found] == [1.0, 2.0, None]
    assert [row["off"]["mean"] for row in found] == [None, 4.0, 5.0]
    assert found[1]["off"]["mean_tokens"] == 256
    assert found[0]["off"]["mean_tokens"] is None


def test_the_comparison_is_at_equal_prompt_lengths() -> None:
    """Off has mostly long prompts here: the plain means differ 3.6 times, equal prompts 2 times."""
    records = []
    for conversation in range(60):
        off = conversation % 2 == 0
        long = conversation % 10 < (8 if off else 2)
        for _ in range(4):
            seconds = (4.0 if long else 1.0) * (2.0 if off else 1.0)
            records.append(
                replace(
                    BASE, conversation=conversation, prompt_tokens=100_000 if long else 10_000, ttft_s=seconds,
                    outcome="disabled" if off else "hit",
                )
            )  # fmt: skip
    found = figures.comparison(records)
    assert found["ratio"] == pytest.approx(2.0)
    assert found["saved_s"] == pytest.approx(found["on_s"])
    assert found["ratio_interval"] == pytest.approx([2.0, 2.0])
    assert (found["n_on"], found["n_off"], found["conversations_off"]) == (120, 120, 30)
    assert figures.comparison(records) == found


def test_no_comparison_without_enough_of_both_arms() -> None:
    only_on = [replace(BASE, conversation=i) for i in range(20)]
    few_off = [replace(BASE, outcome="disabled")] * (figures.MIN_CLASS_TURNS - 1)
    for records in ([], only_on, only_on + few_off):
        found = figures.comparison(records)
        assert found["ratio"] is None
        assert found["saved_interval_s"] is None
    assert figures.comparison(only_on + few_off)["n_off"] == 4


def test_outcomes_add_up_over_time() -> None:
    records = [
        replace(BASE, start_s=0.0),
        replace(BASE, start_s=49.0, outcome="expired"),
        replace(BASE, start_s=99.9),
        replace(BASE, start_s=100.0, outcome=None),
        replace(BASE, start_s=51.0, outcome=None, answered=False),
    ]
    found = figures.outcomes(records, 100.0, bins=2)
    assert found["total"] == {"error": 1, "expired": 1, "hit": 2, "unreported": 1}
    assert found["bin_s"] == 50.0
    assert found["counts"] == {"error": [0, 1], "expired": [1, 0], "hit": [1, 1], "unreported": [0, 1]}
    assert figures.outcomes([], 0.0, bins=2) == {"total": {}, "bin_s": 1.0, "counts": {}}


def test_gaps_are_a_kaplan_meier_curve() -> None:
    """Pauses 2 and 6 end, 3 is cut by the end of the run: S(2) = 2/3, S(6) = 2/3 * 0 with one left at risk."""
    records = [
        replace(BASE, conversation=1, start_s=0.0, duration_s=1.0),
        replace(BASE, conversation=1, start_s=3.0, duration_s=1.0),
        replace(BASE, conversation=1, start_s=10.0, duration_s=100.0),  # ends after the run: no pause to speak of
        replace(BASE, conversation=2, start_s=16.0, duration_s=1.0),
        replace(BASE, conversation=3, start_s=1.0, duration_s=1.0, answered=False),
    ]
    found = figures.gaps(records, end_s=20.0)
    assert (found["n"], found["returned"], found["censored"]) == (3, 2, 1)
    assert found["points"] == [[2.0, pytest.approx(2 / 3)], [6.0, pytest.approx(0.0)]]
    assert (found["p50"], found["p90"]) == (6.0, 6.0)
    nothing = figures.gaps([], end_s=20.0)
    assert nothing == {"n": 0, "returned": 0, "censored": 0, "points": [], "p50": None, "p90": None}


def test_the_curve_ends_where_too_few_are_left_to_learn_from() -> None:
    records = []
    for conversation in range(50):
        pause = 1.0 + conversation
        records += [
            replace(BASE, conversation=conversation, start_s=0.0, duration_s=1.0),
            replace(BASE, conversation=conversation, start_s=1.0 + pause, duration_s=1000.0),
        ]
    found = figures.gaps(records, end_s=100.0)
    assert found["points"][-1] == [46.0, pytest.approx(4 / 50)]


@given(st.lists(st.tuples(st.floats(0, 1e4), st.booleans()), max_size=400))
def test_a_thinned_curve_still_falls_from_one_to_the_same_end(pauses: list[tuple[float, bool]]) -> None:
    curve = figures._kaplan_meier([value for value, _ in pauses], [event for _, event in pauses])
    thin = figures._thin(curve, 20)
    assert len(thin) <= max(20, 1)
    assert [value for value, _ in thin] == sorted(value for value, _ in thin)
    assert [share for _, share in thin] == sorted((share for _, share in thin), reverse=True)
    assert all(0 <= share <= 1 for _, share in thin)
    if curve:
        assert thin[-1] == curve[-1]


LABELS = 'model_name="m",engine="0"'


def test_retention_adds_up_over_engines_scraped_one_after_the_other() -> None:
    def exposition(tokens: float) -> str:
        return (
            "# TYPE kvtune_retained_tokens gauge\n"
            f'kvtune_retained_tokens{{{LABELS},role="decode"}} {tokens}\n'
            f'kvtune_retained_tokens{{{LABELS},role="prefill"}} 7\n'
            f'kvtune_connector_setting{{{LABELS},role="decode",setting="kv_pool_tokens"}} 1000\n'
        )

    scrapes = [
        Scrape(2.0, "b", exposition(50)), Scrape(1.0, "a", exposition(10)),
        Scrape(3.0, "a", exposition(20)), Scrape(3.0, "router", "up 1\n"),
    ]  # fmt: skip
    found = figures.retained(scrapes)
    assert found["points"] == [[2.0, 60.0], [3.0, 70.0]]
    assert (found["pool_tokens"], found["peak_tokens"], found["peak_share"]) == (2000.0, 70.0, 0.035)
    assert figures.retained([]) == {"points": [], "pool_tokens": None, "peak_tokens": None, "peak_share": None}


def sums(path: str, size: str, points: list[tuple[float, float]], role: str = "prefill") -> str:
    values = {
        "observations": len(points), "tokens": sum(n for n, _ in points),
        "tokens_squared": sum(n * n for n, _ in points),
        "seconds": sum(s for _, s in points), "token_seconds": sum(n * s for n, s in points),
    }  # fmt: skip
    labels = f'{LABELS},role="{role}",path="{path}",size="{size}"'
    return "".join(f"kvtune_path_{name}_total{{{labels}}} {value}\n" for name, value in values.items())


def test_path_costs_recover_the_line_and_ignore_decode_and_older_scrapes() -> None:
    def line(sizes: tuple[int, ...]) -> list[tuple[float, float]]:
        return [(n, 0.02 + 5e-6 * n) for n in sizes]

    now = sums("fetch", "128", line((100, 120))) + sums("fetch", "8192", line((5000, 7000, 8000)))
    now += sums("fetch", "64", [(10, 9.0)], role="decode") + sums("recompute", "64", [(10, 0.1), (10, 0.1), (10, 0.1)])
    found = figures.path_costs([Scrape(1.0, "p", sums("fetch", "64", [(1, 1)])), Scrape(2.0, "p", now)])
    assert found["fetch"]["n"] == 5
    assert [row["size"] for row in found["fetch"]["classes"]] == ["128", "8192"]
    assert found["fetch"]["classes"][0] == {
        "size": "128", "n": 2, "mean_tokens": 110.0, "mean_s": pytest.approx(0.02055),
    }  # fmt: skip
    assert found["fetch"]["line"] == pytest.approx({"base_s": 0.02, "per_token_s": 5e-6})
    assert found["recompute"]["line"] is None  # one size only: no slope
    assert figures.path_costs([])["fetch"] == {"n": 0, "classes": [], "line": None}


def test_reads_are_counted_at_both_ends() -> None:
    prefill = (
        f'kvtune_kv_reads_total{{{LABELS},role="prefill",direction="d2p",size="64"}} 3\n'
        f'kvtune_kv_reads_total{{{LABELS},role="prefill",direction="d2p",size="128"}} 4\n'
        f'kvtune_kv_reads_failed_total{{{LABELS},role="prefill",direction="d2p"}} 1\n'
        f'kvtune_prompt_tokens_total{{{LABELS},role="prefill",source="computed"}} 100\n'
        f'kvtune_decisions_total{{{LABELS},role="prefill",decision="fetch",reason="none"}} 7\n'
        f'kvtune_decisions_total{{{LABELS},role="prefill",decision="recompute",reason="none"}} 0\n'
        f'kvtune_decisions_total{{{LABELS},role="prefill",decision="fetch",reason="rewritten"}} 2\n'
        f'kvtune_decisions_total{{{LABELS},role="prefill",decision="recompute",reason="rewritten"}} 5\n'
    )
    decode = (
        f'kvtune_kv_reads_total{{{LABELS},role="decode",direction="p2d",size="64"}} 99\n'
        f'kvtune_retentions_ended_total{{{LABELS},role="decode",end="read"}} 7\n'
        f'kvtune_retentions_ended_total{{{LABELS},role="decode",end="lapsed"}} 2\n'
    )
    found = figures.summarise([], [Scrape(1.0, "p", prefill), Scrape(1.0, "d", decode)], duration_s=1.0)
    assert found["reads"] == {
        "at_prefill": 7.0, "released_at_decode": 7.0, "failed": 1.0, "declined": None, "tokens": None, "bytes": None,
        "seconds": None,
    }  # fmt: skip
    assert found["prompt_tokens"] == {"computed": 100.0}
    assert found["decisions"] == {"fetch/cut_to_proven_prefix": 2.0, "fetch/none": 7.0, "recompute/rewritten": 5.0}


def test_the_arm_without_reuse_is_counted_in_conversations_and_turns() -> None:
    records = [
        replace(BASE, conversation=1, outcome="first", followup=False),
        replace(BASE, conversation=1),
        replace(BASE, conversation=2, outcome="disabled", followup=False),
        replace(BASE, conversation=3, outcome="disabled"),
        replace(BASE, conversation=3, outcome="first"),
    ]
    assert figures.holdout(records) == {"turns_off": 2, "conversations_off": 2, "conversations_off_in_part": 1}
    assert figures.holdout([]) == {"turns_off": 0, "conversations_off": 0, "conversations_off_in_part": 0}
    turns = figures.summarise(records, [], duration_s=1.0)["turns"]
    assert (turns["turns_off"], turns["conversations_off"], turns["conversations"]) == (2, 2, 3)


def test_recorded_rewrites_are_not_the_outcome_of_that_name() -> None:
    records = [replace(BASE, rewritten=True), replace(BASE, outcome="rewritten"), replace(BASE, rewritten=True)]
    found = figures.summarise(records, [], duration_s=1.0)
    assert found["turns"]["recorded_rewrites"] == 2
    assert "rewritten" not in found["turns"]
    assert found["outcomes"]["total"]["rewritten"] == 1


def test_a_changed_history_without_an_id_is_a_new_conversation_to_the_router() -> None:
    new = replace(BASE, outcome="first", session=False, rewritten=True)
    others = [
        replace(new, session=True),
        replace(new, followup=False),
        replace(new, rewritten=False),
        replace(new, outcome="hit"),
    ]
    records = [new, replace(new, rewritten=False, compacted=True), *others]
    assert figures.summarise(records, [], duration_s=1.0)["turns"]["new_to_router"] == 2


def test_the_summary_is_json_whatever_is_missing() -> None:
    for records in ([], [BASE], [replace(BASE, answered=False, ttft_s=None, status=0, outcome=None)]):
        text = json.dumps(figures.summarise(records, [], duration_s=10.0), allow_nan=False)
        assert json.loads(text)["turns"]["sent"] == len(records)
