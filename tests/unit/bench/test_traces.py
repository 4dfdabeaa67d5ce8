"""Traces: what is read, what is refused and how it is said, and what is planned from it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune_bench.traces import Conversation, Plan, PlannedTurn, TraceError, TraceTurn, load_trace, plan

HEADER = "conv,turn,in_tokens,out_tokens,gap_to_next_s,reusable_tokens_next\n"
FULL = Path(__file__).resolve().parents[3] / "bench" / "data" / "agent_turns.csv.gz"


def turns(*rows: tuple[int, int, float | None, int]) -> list[Conversation]:
    return [Conversation(1, tuple(TraceTurn(*row) for row in rows))]


def only(plans: list[Plan]) -> tuple[PlannedTurn, ...]:
    assert len(plans) == 1
    return plans[0].turns


def test_reads_plain_and_gzipped_files_alike(tmp_path: Path) -> None:
    text = HEADER + "7,0,100,10,2.5,110.0\n7,1,140,20,,0\n8,0,50,5,,\n"
    plain, packed = tmp_path / "a.csv", tmp_path / "a.csv.gz"
    plain.write_text(text)
    packed.write_bytes(gzip.compress(text.encode()))
    expected = [
        Conversation(7, (TraceTurn(100, 10, 2.5, 110), TraceTurn(140, 20, None, 0))),
        Conversation(8, (TraceTurn(50, 5, None, 0),)),
    ]
    assert load_trace(plain) == expected
    assert load_trace(str(packed)) == expected


def test_columns_may_come_in_any_order_with_others_between(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("cls,reusable_tokens_next,gap_to_next_s,out_tokens,in_tokens,turn,conv\nhuman,0,,5,50,0,3\n")
    assert load_trace(path) == [Conversation(3, (TraceTurn(50, 5, None, 0),))]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the file is empty"),
        (HEADER, "it has no turns"),
        ("conv,turn,in_tokens\n1,0,5\n", "line 1: column out_tokens, gap_to_next_s, reusable_tokens_next missing"),
        (HEADER + "1,0,many,5,,0\n", "line 2: in_tokens is 'many', not a number"),
        (HEADER + "1,0,0,5,,0\n", "line 2: in_tokens is 0, expected a number of at least 1"),
        (HEADER + "1,0,10,5,-3,0\n", "line 2: gap_to_next_s is -3, expected a number of at least 0"),
        (HEADER + "1,0,10,5,nan,0\n", "line 2: gap_to_next_s is nan"),
        (HEADER + "1,0,10.5,5,,0\n", "line 2: in_tokens is 10.5, not a whole number"),
        (HEADER + "1,0,10,5,1,16\n", "line 2: reusable_tokens_next is 16, more than in_tokens + out_tokens"),
        (HEADER + "1,0,10,5\n", "line 2: 4 values for 6 columns"),
        (HEADER + "1,0,10,5,1,0\n1,2,10,5,,0\n", "line 3: turn 2 where 1 should follow"),
        (HEADER + "1,0,10,5,,0\n2,0,10,5,,0\n1,1,10,5,,0\n", "line 4: conversation 1 is in two places"),
        (HEADER + "1,0,10,5,,0\n1,1,10,5,,0\n", "line 3: a turn follows one whose gap_to_next_s is empty"),
        (HEADER + "1,0,10,5,4,0\n2,0,10,5,,0\n", "conversation 1 ends with a gap_to_next_s"),
        (HEADER + "1,0,10,5,4,0\n", "conversation 1 ends with a gap_to_next_s"),
        (HEADER + " ,0,10,5,,0\n", "line 2: conv is empty"),
        (HEADER + "c0,0,10,5,4,0\n", "conversation c0 ends with a gap_to_next_s"),
    ],
)
def test_says_what_is_wrong_and_where(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(TraceError) as caught:
        load_trace(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such file"):
        load_trace(tmp_path / "none.csv")
    broken = tmp_path / "broken.csv.gz"
    broken.write_bytes(b"not gzip at all")
    with pytest.raises(TraceError, match="cannot be read"):
        load_trace(broken)


@pytest.mark.parametrize(
    ("names", "ids"),
    [
        (("7", "7.0", "8"), [7, 8]),
        (('"c0"', '"c0"', '"c1"'), [0, 1]),
        (('"7"', "7", '"x"'), [0, 1]),
        (("7.5", "7.5", "nan"), [0, 1]),
        (("123456789012345678901", "123456789012345678901", "123456789012345678902"), None),
    ],
)
def test_a_conversation_has_a_number_or_a_name(tmp_path: Path, names: tuple[str, ...], ids: list[int] | None) -> None:
    path = tmp_path / "a.jsonl"
    rest = ((0, 100, 10, "2.5", 110), (1, 140, 20, "null", 0), (0, 50, 5, "null", 0))
    path.write_text(
        "".join(
            f'{{"conv": {conv if conv != "nan" else json.dumps(conv)}, "turn": {turn}, "in_tokens": {prompt}, '
            f'"out_tokens": {out}, "gap_to_next_s": {gap}, "reusable_tokens_next": {reusable}}}\n'
            for conv, (turn, prompt, out, gap, reusable) in zip(names, rest, strict=True)
        )
    )
    first, second = load_trace(path)
    assert (first.turns, second.turns) == (
        (TraceTurn(100, 10, 2.5, 110), TraceTurn(140, 20, None, 0)),
        (TraceTurn(50, 5, None, 0),),
    )
    assert [first.id, second.id] == (ids or [123456789012345678901, 123456789012345678902])


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("conv", [1], "line 1: conv is [1], expected a number or a string"),
        ("conv", True, "line 1: conv is true, expected a number or a string"),
        ("conv", None, "line 1: conv is empty"),
        ("gap_to_next_s", {"a": 1}, 'line 1: gap_to_next_s is {"a": 1}, expected a number'),
        ("in_tokens", False, "line 1: in_tokens is false, expected a number"),
    ],
)
def test_json_values_of_other_kinds_are_named(tmp_path: Path, column: str, value: object, said: str) -> None:
    row = {"conv": 1, "turn": 0, "in_tokens": 9, "out_tokens": 1, "gap_to_next_s": None, "reusable_tokens_next": 0}
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({**row, column: value}))
    with pytest.raises(TraceError) as caught:
        load_trace(path)
    assert said in str(caught.value)


@pytest.mark.parametrize("kind", ["flipped", "cut", "deep"])
def test_a_broken_archive_and_a_deep_line_are_faults_of_the_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.jsonl.gz"
    packed = gzip.compress(b'{"conv": 1}' * 50)
    path.write_bytes(
        {
            "flipped": packed[:10] + b"\xff" * 8 + packed[18:],
            "cut": packed[:20],
            "deep": gzip.compress(b"[" * 100_000 + b"]" * 100_000),
        }[kind]
    )
    with pytest.raises(TraceError, match="nested too deeply" if kind == "deep" else "cannot be read"):
        load_trace(path)


def test_the_packaged_sample_pauses_like_the_full_trace() -> None:
    def shape(conversations: list[Conversation]) -> tuple[list[float], float, float]:
        every = [turn for conversation in conversations for turn in conversation.turns]
        gaps = np.array([turn.gap_s for turn in every if turn.gap_s is not None])
        quantiles = [float(value) for value in np.percentile(gaps, [25, 50, 75, 90])]
        return quantiles, float((gaps > 480).mean()), 1 - len(gaps) / len(every)

    sample = load_trace()
    assert len(sample) == 100
    here, there = shape(sample), shape(load_trace(FULL))
    assert here[0] == pytest.approx(there[0], rel=0.03)
    assert here[1] == pytest.approx(there[1], rel=0.03)
    assert here[2] == pytest.approx(there[2], rel=0.03)


def test_a_growing_history_is_kept_whole() -> None:
    first, second = only(plan(turns((1000, 50, 3.0, 1050), (1200, 60, None, 0)), context_limit=10_000))
    assert first == PlannedTurn(1000, 50, 0, 1000, 3.0, rewritten=False, compacted=False)
    assert second == PlannedTurn(1200, 60, 1050, 150, None, rewritten=False, compacted=False)
    assert first.sequence_tokens == second.keep_tokens


def test_a_recorded_rewrite_keeps_its_prefix() -> None:
    planned = only(plan(turns((1000, 50, 3.0, 400), (1200, 60, 3.0, 0), (900, 5, None, 0)), context_limit=10_000))
    assert [(turn.keep_tokens, turn.new_tokens, turn.rewritten) for turn in planned] == [
        (0, 1000, False),
        (400, 800, True),
        (0, 900, True),
    ]


def test_compacts_at_the_limit_and_goes_on_from_there() -> None:
    planned = only(
        plan(
            turns((9000, 100, 1.0, 9100), (9950, 100, 2.0, 10_050), (10_250, 100, 3.0, 10_350), (10_400, 100, None, 0)),
            context_limit=10_000,
        )
    )
    # The second turn would need 10,050: it starts afresh with 2,000, and 7,950 tokens are gone from what follows.
    assert [(turn.prompt_tokens, turn.keep_tokens, turn.compacted) for turn in planned] == [
        (9000, 0, False),
        (2000, 0, True),
        (2300, 2100, False),
        (2450, 2400, False),
    ]
    assert [turn.gap_s for turn in planned] == [1.0, 2.0, 3.0, None]


def test_a_rewrite_that_reaches_behind_a_compaction_takes_its_recorded_length() -> None:
    planned = only(plan(turns((20_000, 100, 1.0, 3000), (5000, 100, None, 0)), context_limit=10_000))
    assert [(turn.prompt_tokens, turn.keep_tokens) for turn in planned] == [(2000, 0), (5000, 0)]


def test_a_turn_without_new_text_gives_up_some_of_its_prefix() -> None:
    planned = only(plan(turns((1000, 50, 1.0, 1000), (1000, 50, None, 0)), context_limit=10_000, min_new_tokens=16))
    assert (planned[1].keep_tokens, planned[1].new_tokens) == (984, 16)


def test_refuses_a_limit_without_room() -> None:
    with pytest.raises(ValueError, match="context limit 100"):
        plan(turns((10, 5, None, 0)), context_limit=100)


@given(
    rows=st.lists(
        st.tuples(st.integers(1, 300_000), st.integers(0, 20_000), st.floats(0, 1e4), st.floats(0, 1)),
        min_size=1,
        max_size=30,
    ),
    limit=st.integers(1000, 200_000),
)
@settings(max_examples=200, deadline=None)
def test_every_plan_fits_the_model_and_adds_up(rows: list[tuple[int, int, float, float]], limit: int) -> None:
    recorded = [TraceTurn(prompt, output, gap, int((prompt + output) * share)) for prompt, output, gap, share in rows]
    planned = only(plan([Conversation(0, tuple(recorded))], context_limit=limit))
    held = 0
    assert len(planned) == len(recorded)
    for turn in planned:
        assert turn.prompt_tokens + turn.output_tokens <= limit
        assert turn.output_tokens >= 1
        assert turn.keep_tokens + turn.new_tokens == turn.prompt_tokens
        assert turn.new_tokens >= 16
        assert 0 <= turn.keep_tokens <= held
        held = turn.sequence_tokens
