from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from kvtune_connector.wire import Report
from kvtune_router.config import ConfigError, RouterConfig, load_config
from kvtune_router.engines import EngineAddressError, Fleet, engine_from_url
from kvtune_router.errors import RequestError
from kvtune_router.requests import FIRST_TURN, decode_body, parse_turn, prefill_body
from kvtune_router.resume import Diverged, Resumer
from kvtune_router.turn import outcome_of
from kvtune_telemetry import events
from kvtune_telemetry.vocabulary import Decision, Outcome, Reason, Role

# --- requests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"{", "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b'{"a":"\xff"}', "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b'{"stream":"yes"}', "'stream' must be true or false"),
        (b'{"a":' + b"[" * 100_000, "not valid JSON"),
    ],
)
def test_bad_bodies_are_400s(raw: bytes, says: str) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        parse_turn(raw)
    assert caught.value.status == 400


def test_forged_parameters_are_dropped_wherever_they_stand() -> None:
    parsed = parse_turn(b'{"kv_transfer_params":{"remote_host":"evil"},"prompt":"x","kv_transfer_params":{"a":1}}')
    assert parsed.forged and parsed.body == {"prompt": "x"}


def test_forged_parameters_do_not_go_round_the_back() -> None:
    parsed = parse_turn(b'{"vllm_xargs":{"kv_transfer_params":"x","a":1},"n":2}')
    assert parsed.forged and parsed.body == {"vllm_xargs": {"a": 1}, "n": 2}


def test_what_can_be_read_but_not_written_is_a_400() -> None:
    deep = parse_turn(b'{"a":' + b"[" * 600 + b"]" * 600 + b"}")
    with pytest.raises(RequestError, match="nested too deeply"):
        decode_body(deep.body, None)


@pytest.mark.parametrize(
    ("body", "splittable"),
    [
        ({"messages": [{}]}, True),
        ({"messages": [{}], "n": 1}, True),
        ({"messages": [{}], "n": 2}, False),
        ({"prompt": "x"}, True),
        ({"prompt": [1, 2]}, True),
        ({"prompt": ["a", "b"]}, False),
        ({"prompt": [[1], [2]]}, False),
        ({"prompt": "x", "best_of": 3}, False),
        ({"prompt": "x", "echo": True}, False),
        ({"prompt": "x", "prompt_logprobs": 0}, False),
        ({}, False),
    ],
)
def test_what_can_be_split(body: dict[str, Any], splittable: bool) -> None:
    assert parse_turn(orjson.dumps(body)).splittable is splittable


def test_legs() -> None:
    body = {
        "messages": [],
        "max_completion_tokens": 9,
        "stop": ["x"],
        "stream": True,
        "temperature": 0,
        "logprobs": True,
    }
    prefill = orjson.loads(prefill_body(body, None))
    assert prefill == {
        "messages": [], "temperature": 0, "stream": False, "max_tokens": 1, "kv_transfer_params": FIRST_TURN,
    }  # fmt: skip
    reference = {"remote_engine_id": "e", "do_remote_prefill": True, "remote_blocks_expiry_time": 1.5}
    assert orjson.loads(prefill_body(body, reference))["kv_transfer_params"] == {
        **reference, "do_remote_decode": True, "do_remote_prefill": False,
    }  # fmt: skip
    decode = orjson.loads(decode_body(body, {"do_remote_prefill": True, "kvtune": {"decision": "fetch"}}, retain_s=0.0))
    assert decode == {**body, "kv_transfer_params": {"do_remote_prefill": True, "kvtune": {"v": 1, "retain_s": 0.0}}}
    assert orjson.loads(decode_body(body, None)) == body


# --- outcomes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("decision", "reason", "outcome"),
    [
        (Decision.FETCH, Reason.NONE, Outcome.HIT),
        (Decision.FETCH, Reason.REWRITTEN, Outcome.HIT),
        (Decision.LOCAL_HIT, Reason.NONE, Outcome.HIT),
        (Decision.RECOMPUTE, Reason.BELOW_THRESHOLD, Outcome.HIT),
        (Decision.RECOMPUTE, Reason.EXPIRED, Outcome.EXPIRED),
        (Decision.RECOMPUTE, Reason.REWRITTEN, Outcome.REWRITTEN),
        (Decision.RECOMPUTE, Reason.UNVERIFIED, Outcome.UNVERIFIED),
        (Decision.RECOMPUTE, Reason.CONSUMED, Outcome.CONSUMED),
        (Decision.RECOMPUTE, Reason.ENGINE_GONE, Outcome.ENGINE_GONE),
        (Decision.RECOMPUTE, Reason.READ_FAILED, Outcome.READ_FAILED),
        (Decision.RECOMPUTE, Reason.DISABLED, Outcome.DISABLED),
    ],
)
def test_what_p_reports_is_the_outcome(decision: Decision, reason: Reason, outcome: Outcome) -> None:
    assert outcome_of(Report(decision, reason, 0, 0)) is outcome


def test_a_peer_that_reports_nothing_is_believed() -> None:
    assert outcome_of(None) is Outcome.HIT


# --- engines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "label"),
    [("http://h:8100", "h:8100"), ("h:1", "h:1"), ("https://h", "h:443"), ("http://[::1]:9/x/", "[::1]:9")],
)
def test_addresses(url: str, label: str) -> None:
    assert engine_from_url(url, Role.PREFILL).label == label


@pytest.mark.parametrize("url", ["ftp://h:1", "http://", "http://h:99999", "http://u:p@h:1", "http://h:1?x"])
def test_bad_addresses_are_named(url: str) -> None:
    with pytest.raises(EngineAddressError, match="prefill engine"):
        engine_from_url(url, Role.PREFILL)


def fleet() -> tuple[Fleet, list[events.RouterEvent]]:
    seen: list[events.RouterEvent] = []
    made = Fleet(["p:1"], ["d:1", "d:2"], seen.append)
    for engine in made.engines():
        made.came_up(engine)
    return made, seen


def test_picks_the_preferred_then_the_least_busy_that_is_up() -> None:
    made, _ = fleet()
    one, two = made.decode
    one.in_flight = 3
    assert made.pick(Role.DECODE) is two
    assert made.pick(Role.DECODE, prefer="d:1") is one
    made.went_down(one)
    assert made.pick(Role.DECODE, prefer="d:1") is two
    assert made.pick(Role.DECODE, exclude=[two]) is None


def test_incarnations() -> None:
    made, seen = fleet()
    one = made.decode[0]
    assert made.holds("d:1", "e1")
    made.saw_incarnation(one, "e1")
    made.saw_incarnation(one, "e2")
    assert made.holds("d:1", "e2") and not made.holds("d:1", "e1")
    one.verifies = True
    made.saw_incarnation(one, "e1")  # an old answer that arrives late changes nothing
    assert made.holds("d:1", "e2")
    assert sum(isinstance(event, events.EngineRestarted) for event in seen) == 1
    made.went_down(one)
    assert not made.holds("d:1", "e2") and not made.holds("elsewhere:1", "e2")
    assert not one.verifies, "what comes back may be another build"


@pytest.mark.parametrize("suffix", ["", ":p{}"])
def test_data_parallel_ranks_behind_one_address_are_no_restarts(suffix: str) -> None:
    made, seen = fleet()
    one = made.decode[0]
    ranks = ["base_dp0" + suffix.format(1), "base_dp1" + suffix.format(2)]
    for _ in range(3):
        for rank in ranks:
            made.saw_incarnation(one, rank)
    assert all(made.holds("d:1", rank) for rank in ranks)
    assert not any(isinstance(event, events.EngineRestarted) for event in seen)
    made.saw_incarnation(one, "other_dp0")
    assert not any(made.holds("d:1", rank) for rank in ranks)
    assert sum(isinstance(event, events.EngineRestarted) for event in seen) == 1


def test_a_configured_engine_id_that_survives_a_restart() -> None:
    made, seen = fleet()
    made.saw_incarnation(made.decode[0], "fixed:aaa")
    made.saw_incarnation(made.decode[0], "fixed:bbb")
    assert made.holds("d:1", "fixed:bbb") and not made.holds("d:1", "fixed:aaa")
    assert sum(isinstance(event, events.EngineRestarted) for event in seen) == 1


def test_engines_told_apart_by_their_path() -> None:
    made = Fleet(["p:1"], ["h:1/a", "h:1/b"], lambda _: None)
    assert [engine.label for engine in made.decode] == ["h:1/a", "h:1/b"]


@pytest.mark.parametrize(
    ("prefill", "decode", "says"),
    [([], ["d"], "no prefill engine"), (["p"], [], "no decode engine"), (["p"], ["d", "d"], "given twice")],
)
def test_a_fleet_needs_both_roles(prefill: list[str], decode: list[str], says: str) -> None:
    with pytest.raises(EngineAddressError, match=says):
        Fleet(prefill, decode, lambda _: None)


# --- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"port": 70000}, "port = 70000"),
        ({"ttl": 5.0}, "ttl = 5.0: it must exceed the margin"),
        ({"ttl": float("nan")}, "ttl = nan"),
        ({"holdout": 1.5}, "holdout = 1.5"),
        ({"retain": 6.0}, "retain = 6.0: it must exceed the margin"),
        ({"retain": float("inf")}, "retain = inf"),
        ({"max_conversations": 0}, "max_conversations = 0"),
        ({"time_scale": "fast"}, "time_scale: time scale must be"),
    ],
)
def test_bad_settings_are_named(bad: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        RouterConfig(**bad)


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("prefill: [http://p:1]\ndecode: http://d:1\nttl: 300\nmax-body-mib: 8\n")
    got = load_config(file, {"ttl": 200.0, "host": None})
    assert (got.prefill, got.decode, got.ttl, got.max_body_mib) == (("http://p:1",), ("http://d:1",), 200.0, 8.0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tll: 3\n", "unknown key 'tll'; known are .*ttl"),
        ("ttl: long\n", "ttl must be a number"),
        ("port: 1.5\n", "port must be a whole number"),
        ("outcome_header: 1\n", "outcome_header must be true or false"),
        ("prefill: {a: b}\n", "prefill must be a list of URLs"),
        ("a: [\n", "not valid YAML"),
        ("- a\n", "must hold 'key: value' lines"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "router.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says) as caught:
        load_config(file, {})
    assert str(file) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere\.yaml"):
        load_config(tmp_path / "nowhere.yaml", {})


# --- resuming -------------------------------------------------------------------------------------------------------


def chunk(text: str, finish: str | None = None) -> bytes:
    event = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]}
    return b"data: " + orjson.dumps(event) + b"\n\n"


def text_of(stream: bytes) -> str:
    out = ""
    for line in stream.splitlines():
        if line.startswith(b"data: {"):
            for choice in orjson.loads(line[6:])["choices"]:
                out += choice["delta"].get("content") or ""
    return out


@pytest.mark.parametrize("cuts", [["abc", "def", "ghi"], ["abcdefghi"], ["a", "bcd", "e", "fghi"], ["abcd", "efghi"]])
def test_a_stream_carries_on_where_it_broke(cuts: list[str]) -> None:
    delivered = chunk("ab") + chunk("cd")
    resumer = Resumer(delivered)
    second = b"".join(chunk(piece) for piece in cuts) + chunk("", "stop") + b"data: [DONE]\n\n"
    rest = b"".join(resumer.feed(line) for line in second.splitlines(keepends=True))
    assert text_of(delivered + rest) == "abcdefghi"
    assert rest.endswith(b"data: [DONE]\n\n") and rest.count(b'"stop"') == 1


@pytest.mark.parametrize(
    "second",
    [
        chunk("xy"),
        chunk("abx"),
        chunk("a") + chunk("", "stop"),
        b"data: [DONE]\n\n",
        b'data: {"error":{}}\n\n',
        b'data: {"choices":5}\n\n',
        b'data: {"choices":[{"index":null,"delta":{"content":"abcd"}}]}\n\n',
        b'data: {"choices":[{"index":0,"delta":{"content":"abcde"},"logprobs":{"content":[1]}}]}\n\n',
        b"data: nonsense\n\n",
    ],
)
def test_another_answer_is_not_glued_on(second: bytes) -> None:
    resumer = Resumer(chunk("ab") + chunk("cd"))
    with pytest.raises(Diverged):
        resumer.feed(second)


@pytest.mark.parametrize(
    "delivered",
    [
        b'data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0}]}}]}\n\n',
        b'data: {"choices":[{"index":0,"delta":{"refusal":"no"}}]}\n\n',
        b'data: {"choices":[{"index":0,"delta":{"content":"a"},"logprobs":{"content":[1]}}]}\n\n',
        b'data: {"choices":[7]}\n\n',
        b'data: {"choices":[{"index":0,"delta":{"content":7}}]}\n\n',
        b"data: {\n\n",
    ],
)
def test_what_cannot_be_compared_cannot_be_resumed(delivered: bytes) -> None:
    with pytest.raises(Diverged):
        Resumer(delivered)


ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"total_tokens":3}}\n\n'
DONE = b"data: [DONE]\n\n"
WHOLE = ROLE + chunk("ab") + chunk("cd") + chunk("", "stop") + USAGE + DONE


@pytest.mark.parametrize(
    "cut", [len(ROLE), len(ROLE + chunk("ab")), len(WHOLE) - len(USAGE + DONE), len(WHOLE) - len(DONE)]
)
def test_nothing_is_said_twice_wherever_it_broke(cut: int) -> None:
    rest = Resumer(WHOLE[:cut]).feed(WHOLE)
    assert WHOLE[:cut] + rest == WHOLE


def test_exploration_is_asked_for_beside_what_the_reference_says() -> None:
    reference = {"remote_engine_id": "d", "kvtune": {"v": 1, "fingerprint": "x"}}
    leg = orjson.loads(prefill_body({"model": "m", "prompt": "p"}, reference, explore=True))
    assert leg["kv_transfer_params"]["kvtune"] == {"v": 1, "fingerprint": "x", "explore": True}
    assert "explore" not in reference["kvtune"]
    plain = orjson.loads(prefill_body({"model": "m", "prompt": "p"}, None, explore=True))
    assert "kvtune" not in plain["kv_transfer_params"]


@pytest.mark.parametrize("share", [-0.01, 0.051, float("nan")])
def test_exploration_is_bounded(share: float) -> None:
    with pytest.raises(ConfigError, match=r"explore = .*: it is a share from 0 to 0\.05"):
        RouterConfig(explore=share)
