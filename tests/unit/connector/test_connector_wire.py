from __future__ import annotations

import pytest

from kvtune_connector import wire
from kvtune_connector.fingerprint import fingerprint
from kvtune_telemetry.vocabulary import Decision, End, Reason


def test_reference_round_trip() -> None:
    made = fingerprint(range(200), stride=64)
    params = {"remote_engine_id": "x", wire.KEY: wire.reference_extras(fingerprint=made, ttl_s=480.0)}
    assert wire.read_fingerprint(params) == made
    assert wire.read_ttl_s(params) == 480.0


def test_report_round_trip() -> None:
    extras = wire.report_extras(decision=Decision.FETCH, reason=Reason.REWRITTEN, fetched=512, local=3, available=512)
    assert wire.read_report({wire.KEY: extras}) == wire.Report(Decision.FETCH, Reason.REWRITTEN, 512, 3)


def test_request_round_trip() -> None:
    assert wire.read_retain_s({wire.KEY: wire.request_extras(retain_s=0.0)}) == 0.0
    assert wire.read_retain_s({wire.KEY: wire.request_extras()}) is None
    assert wire.read_explore({wire.KEY: wire.request_extras(explore=True)}) is True


@pytest.mark.parametrize(
    "params",
    [
        *(None, 7, "x", [], {}, {wire.KEY: None}, {wire.KEY: 7}),
        {wire.KEY: {"fingerprint": {}, "ttl_s": "9", "retain_s": -1}},
        {wire.KEY: {"ttl_s": True, "decision": "guess", "reason": "none"}},
        {wire.KEY: {"ttl_s": float("inf")}},
    ],
)
def test_anything_else_proves_and_asks_nothing(params: object) -> None:
    assert wire.read_fingerprint(params) is None
    assert wire.read_ttl_s(params) is None
    assert wire.read_retain_s(params) is None
    assert wire.read_report(params) is None
    assert wire.read_explore(params) is False


def test_a_release_says_why_and_stock_reads_the_rest() -> None:
    message = wire.marked_release("chatcmpl-x-1f", End.LOCAL_HIT) + ":4"
    assert wire.split_notification(message) == ("chatcmpl-x-1f:4", ("chatcmpl-x-1f", End.LOCAL_HIT))


@pytest.mark.parametrize(
    "message",
    [
        "chatcmpl-x-1f:1",
        "HB:a,b",
        "HB:chatcmpl-A#kvtune-x-11,r1,r2,chatcmpl-B:z-44",
        "HB:a#kvtune-read:1",
        "chatcmpl-a#kvtune-b-1f:1",
        "chatcmpl-a#kvtune-:1",
        "#kvtune-stolen:1",
    ],
)
def test_words_that_clients_put_into_ids_are_theirs(message: str) -> None:
    assert wire.split_notification(message) == (message, None)


def test_a_mark_inside_an_id_stays_when_ours_follows() -> None:
    message = wire.marked_release("a#kvtune-read", End.RELEASED) + ":1"
    assert wire.split_notification(message) == ("a#kvtune-read:1", ("a#kvtune-read", End.RELEASED))
