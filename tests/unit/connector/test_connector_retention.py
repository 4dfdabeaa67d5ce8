from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune_connector.retention import RetentionLedger
from kvtune_telemetry.events import RetentionEnded, RetentionStarted
from kvtune_telemetry.vocabulary import End


def test_start_end_and_sums() -> None:
    ledger = RetentionLedger()
    assert ledger.start("a", tokens=100, blocks=7, now_s=10.0, ttl_s=480.0) == RetentionStarted(100, 7)
    ledger.start("b", tokens=50, blocks=4, now_s=20.0, ttl_s=30.0)
    assert (len(ledger), ledger.tokens, ledger.blocks) == (2, 150, 11)
    assert ledger.next_deadline_s() == 50.0
    assert ledger.due(49.9) == [] and ledger.due(50.0) == ["b"]
    assert ledger.end("b", End.LAPSED, 50.0) == RetentionEnded(End.LAPSED, 50, 4, 30.0)
    assert ledger.end("b", End.READ, 51.0) is None
    assert ledger.end("nobody", End.READ, 51.0) is None
    assert (len(ledger), ledger.tokens, ledger.blocks) == (1, 100, 7)
    assert list(ledger.drain(End.ABORTED, 60.0)) == [RetentionEnded(End.ABORTED, 100, 7, 50.0)]
    assert (len(ledger), ledger.tokens, ledger.next_deadline_s()) == (0, 0, None)


def test_a_key_is_retained_once() -> None:
    ledger = RetentionLedger()
    ledger.start("a", tokens=1, blocks=1, now_s=0.0, ttl_s=1.0)
    with pytest.raises(ValueError, match="request a is retained already"):
        ledger.start("a", tokens=1, blocks=1, now_s=0.0, ttl_s=1.0)


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans(), st.integers(0, 1000)), max_size=60))
def test_what_starts_ends_once_and_the_sums_follow(steps: list[tuple[str, bool, int]]) -> None:
    ledger, held, started, ended = RetentionLedger(), {}, 0, 0
    for key, begin, tokens in steps:
        if begin and key not in held:
            ledger.start(key, tokens=tokens, blocks=tokens // 16, now_s=0.0, ttl_s=9.0)
            held[key] = tokens
            started += 1
        elif not begin:
            event = ledger.end(key, End.READ, 1.0)
            assert (event is not None) == (key in held)
            ended += held.pop(key, None) is not None
        assert ledger.tokens == sum(held.values())
        assert len(ledger) == started - ended == len(held)
