from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune_router.answers import MAX_LINE_BYTES, AnswerError, StreamStripper, strip_document

json_st = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=12) | st.just('"kv_transfer_params":1'),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=6) | st.just("kv_transfer_params"), inner, max_size=3)
    ),
    max_leaves=12,
)
PARAMS = {"remote_engine_id": "e", "kvtune": {"fingerprint": {"chain": "é€\n"}}, "kv_transfer_params": [1, {"a": None}]}


@given(
    st.dictionaries(st.text(max_size=6), json_st, max_size=4),
    st.integers(0, 4),
    st.sampled_from([0, orjson.OPT_INDENT_2]),
)
def test_only_the_top_level_member_goes_and_every_other_byte_stays(
    rest: dict[str, object], at: int, option: int
) -> None:
    rest.pop("kv_transfer_params", None)
    items = list(rest.items())
    items.insert(min(at, len(items)), ("kv_transfer_params", PARAMS))
    stripped, params = strip_document(orjson.dumps(dict(items), option=option))
    assert params == PARAMS
    assert orjson.loads(stripped) == rest
    assert stripped.replace(b" ", b"").replace(b"\n", b"") == orjson.dumps(rest).replace(b" ", b"").replace(b"\n", b"")


@pytest.mark.parametrize(
    ("document", "left", "params"),
    [
        (b'{"a":1.0,"kv_transfer_params":{"x":1},"b":1e2}', b'{"a":1.0,"b":1e2}', {"x": 1}),
        (b'{"a":1, "kv_transfer_params" : {"x":1} }', b'{"a":1}', {"x": 1}),
        (b'{"kv_transfer_params":null,"b":2}', b'{"b":2}', None),
        (b'{"kv_transfer_params":{"x":1}}', b"{}", {"x": 1}),
        (b'{"text":"say \\"kv_transfer_params\\": {}"}', b'{"text":"say \\"kv_transfer_params\\": {}"}', None),
        (b'{"deep":{"kv_transfer_params":{"x":1}}}', b'{"deep":{"kv_transfer_params":{"x":1}}}', None),
        (b'[{"kv_transfer_params":1}]', b'[{"kv_transfer_params":1}]', None),
        (b'{"kv\\u005ftransfer_params":{"x":1},"a":"kv_transfer_params"}', b'{"a":"kv_transfer_params"}', {"x": 1}),
    ],
)
def test_examples(document: bytes, left: bytes, params: object) -> None:
    assert strip_document(document) == (left, params)


def test_a_document_that_is_not_json_is_an_error() -> None:
    with pytest.raises(AnswerError, match="not JSON"):
        strip_document(b'{"kv_transfer_params": ')


FINAL = orjson.dumps({"choices": [{"delta": {}, "finish_reason": "stop"}], "kv_transfer_params": PARAMS})
STREAM = (
    b'data: {"choices":[{"delta":{"content":"h\xc3\xa9"}}]}\n\n'
    b": keep-alive\n\ndata:" + FINAL + b'\n\ndata: {"choices":[],"usage":{"x":1}}\r\n\r\ndata: [DONE]\n\n'
)
RELAYED = STREAM.replace(FINAL, b'{"choices":[{"delta":{},"finish_reason":"stop"}]}')


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_a_stream_cut_anywhere_comes_out_the_same(cuts: list[int]) -> None:
    stripper, out, last = StreamStripper(), b"", 0
    for cut in [*sorted(cuts), len(STREAM)]:
        piece = stripper.feed(STREAM[last:cut])
        assert not piece or piece.endswith(b"\n"), "only whole lines go on"
        out += piece
        last = cut
    assert out + stripper.close() == RELAYED
    assert stripper.params == PARAMS
    assert stripper.done


def test_an_unfinished_line_with_the_field_never_leaks() -> None:
    stripper = StreamStripper()
    assert stripper.feed(b'data: {"kv_transfer_params":{"remote_host":"10.0.0.1"') == b""
    assert b"10.0.0.1" not in stripper.close()
    assert not stripper.done


def test_a_line_without_end_is_an_error() -> None:
    stripper = StreamStripper()
    with pytest.raises(AnswerError, match="longer than"):
        for _ in range(MAX_LINE_BYTES // 2**20 + 1):
            stripper.feed(b"x" * 2**20)
