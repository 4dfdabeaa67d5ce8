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


# --- what an engine may believe --------------------------------------------------------------------------------------

REMOTE = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": "d", "remote_request_id": "r",
    "remote_host": "127.0.0.1", "remote_port": 5600, "remote_block_ids": [[1, 2]], "remote_num_tokens": 200,
    "remote_blocks_expiry_time": 12.5, "tp_size": 2,
}  # fmt: skip


def test_sound_parameters_stay_as_they_are() -> None:
    assert wire.sanitized(REMOTE) == REMOTE
    handover = {**REMOTE, "do_remote_decode": False, "do_remote_prefill": True, "remote_block_ids": ((1, 2), (3,))}
    assert wire.sanitized(handover) == handover
    first = {**FIRST, "kvtune": {"retain_s": 3}}
    assert wire.sanitized(first) == first


FIRST = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("remote_engine_id", bad) for bad in (["d"], {}, "", 3)),
        *(("remote_request_id", bad) for bad in (["r"], {"a": 1}, None)),
        *(("remote_host", bad) for bad in (7, None)),
        *(("remote_port", bad) for bad in ("5600", 0, 70000, True, 1.5)),
        *(("remote_num_tokens", bad) for bad in ("480", -1, 1.5, [3], 2**40, True)),
        *(("remote_blocks_expiry_time", bad) for bad in ("soon", [1], float("nan"), float("inf"), True)),
        *(("remote_block_ids", bad) for bad in (5, True, [1, 2], [None], "abc", {"a": 1}, [["a"]], [[-1]], [[1.5]])),
        *(("tp_size", bad) for bad in (0, 2_000_000_000, "2", None)),
    ],
)
@pytest.mark.parametrize("leg", ["read_back", "pull"])
def test_malformed_parameters_ask_for_nothing_that_is_remote(name: str, value: object, leg: str) -> None:
    asked = {**REMOTE, name: value}
    if leg == "pull":
        asked |= {"do_remote_decode": False, "do_remote_prefill": True}
    found = wire.sanitized(asked)
    assert found is not None and found["remote_block_ids"] is None and found["do_remote_prefill"] is False


@pytest.mark.parametrize("params", ["text", [1], 5, True])
def test_parameters_that_are_no_object_are_none(params: object) -> None:
    assert wire.sanitized(params) is None


def test_vllms_own_marks_are_not_a_clients_to_set() -> None:
    found = wire.sanitized({"_remote_blocks_processed": True, "_p_side_truncated": True, "do_remote_decode": True})
    assert found == {"do_remote_decode": True}


def test_a_pull_of_nothing_is_no_pull() -> None:
    found = wire.sanitized({"do_remote_prefill": True})
    assert found == {"do_remote_prefill": False}
