from __future__ import annotations

from enum import StrEnum

import pytest

from kvtune_telemetry.catalogue import CATALOGUE
from kvtune_telemetry.vocabulary import Direction, meanings

WORDS = sorted(
    {label.words for metric in CATALOGUE for label in metric.labels if label.words}, key=lambda w: w.__name__
)


def test_there_are_words() -> None:
    assert len(WORDS) >= 9


@pytest.mark.parametrize("words", WORDS)
def test_every_word_is_explained(words: type[StrEnum]) -> None:
    assert [word for word, meaning in meanings(words).items() if not meaning] == []


def test_a_meaning_is_what_stands_below_its_word() -> None:
    assert meanings(Direction) == {
        "d2p": "A follow-up turn's history, read back by prefill.",
        "p2d": "The ordinary hand-over after prefill.",
    }
