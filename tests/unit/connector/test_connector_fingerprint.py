from __future__ import annotations

from array import array

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune_connector.fingerprint import (
    LINK_BYTES,
    MAX_LINKS,
    Fingerprint,
    FingerprintError,
    fingerprint,
    stride_for,
    verified_prefix,
)

tokens_st = st.lists(st.integers(0, 2**32 - 1), max_size=300)


@given(tokens_st, st.integers(1, 70))
def test_a_sequence_proves_itself_and_its_extensions_whole(tokens: list[int], stride: int) -> None:
    held = fingerprint(tokens, stride=stride)
    assert verified_prefix(held, tokens) == len(tokens)
    assert verified_prefix(held, [*tokens, 1, 2, 3]) == len(tokens)


@given(tokens_st.filter(bool), st.integers(1, 70), st.data())
def test_a_changed_token_cuts_at_the_stride_before_it(tokens: list[int], stride: int, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(tokens) - 1))
    changed = list(tokens)
    changed[at] ^= 1
    assert verified_prefix(fingerprint(tokens, stride=stride), changed) == at // stride * stride


@given(tokens_st, st.integers(1, 70), st.integers(0, 300))
def test_a_truncated_history_keeps_whole_strides(tokens: list[int], stride: int, keep: int) -> None:
    keep = min(keep, len(tokens))
    got = verified_prefix(fingerprint(tokens, stride=stride), tokens[:keep])
    assert got == (keep if keep == len(tokens) else keep // stride * stride)


def test_other_seeds_have_nothing_in_common() -> None:
    tokens = list(range(640))
    held = fingerprint(tokens, stride=64, seed=b"adapter-1")
    assert verified_prefix(held, tokens, seed=b"adapter-1") == 640
    assert verified_prefix(held, tokens) == 0


def test_a_later_stride_that_is_equal_proves_nothing_by_itself() -> None:
    """The chain, unlike a list of block hashes, depends on everything before."""
    held = fingerprint([1] * 64 + [2] * 64, stride=64)
    assert verified_prefix(held, [9] * 64 + [2] * 64) == 0


def test_known_value_pins_the_wire_format() -> None:
    made = fingerprint([1, 2, 3, 4, 5], stride=2)
    assert made.to_wire() == {
        "alg": "blake2b-64",
        "tokens": 5,
        "stride": 2,
        "chain": fingerprint([1, 2, 3, 4], stride=2).to_wire()["chain"],
        "tail": made.tail.hex(),
    }
    assert len(made.chain) == 2 * LINK_BYTES and len(made.tail) == LINK_BYTES


def test_arrays_lists_and_bytes_of_the_same_tokens_agree() -> None:
    tokens = [0, 1, 2**31, 2**32 - 1] * 40
    packed = b"".join(token.to_bytes(4, "little") for token in tokens)
    assert (
        fingerprint(tokens, stride=64) == fingerprint(array("I", tokens), stride=64) == fingerprint(packed, stride=64)
    )
    assert fingerprint(tokens, stride=64, count=100) == fingerprint(tokens[:100], stride=64)


@given(tokens_st, st.integers(1, 70))
def test_wire_round_trip_through_json(tokens: list[int], stride: int) -> None:
    made = fingerprint(tokens, stride=stride)
    assert Fingerprint.from_wire(orjson.loads(orjson.dumps(made.to_wire()))) == made


def test_128k_tokens_travel_in_a_few_tens_of_kilobytes() -> None:
    stride = stride_for(131072, 16)
    assert stride == 64
    assert len(orjson.dumps(fingerprint(range(131072), stride=stride).to_wire())) < 24_000


@pytest.mark.parametrize(
    ("tokens", "block", "stride"),
    [(100, 16, 64), (100, 128, 128), (100, 48, 96), (131072, 16, 64), (1_000_000, 16, 496), (1_000_000, 128, 512)],
)
def test_strides_are_whole_blocks_and_few(tokens: int, block: int, stride: int) -> None:
    assert stride_for(tokens, block) == stride
    assert stride % block == 0 and tokens // stride <= MAX_LINKS


def test_block_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="block size must be positive, got 0"):
        stride_for(10, 0)


_GOOD = fingerprint(range(130), stride=64).to_wire()


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (None, "not an object"),
        ([], "not an object"),
        ({**_GOOD, "alg": "md5"}, "algorithm 'md5'"),
        ({**_GOOD, "tokens": -1}, "tokens '-1'"),
        ({**_GOOD, "tokens": True}, "tokens 'True'"),
        ({**_GOOD, "tokens": 10**12}, "tokens"),
        ({**_GOOD, "stride": 0}, "stride '0'"),
        ({**_GOOD, "tokens": 64}, "bytes of chain"),
        ({**_GOOD, "chain": "%%%"}, "not readable"),
        ({**_GOOD, "tail": "zz"}, "not readable"),
        ({**_GOOD, "tail": ""}, "bytes of tail"),
    ],
)
def test_malformed_fingerprints_are_refused(broken: object, says: str) -> None:
    with pytest.raises(FingerprintError, match=says):
        Fingerprint.from_wire(broken)
