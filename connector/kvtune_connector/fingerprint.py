"""Proof that two token sequences begin alike, small enough to travel with every answer.

A sequence is cut into strides of whole KV blocks. `chain[i]` is an 8-byte BLAKE2b hash over `chain[i-1]` and the i-th
stride's token ids, so that one equal link proves (but for a 64-bit collision) that everything before it is equal.
The tokens after the last full stride have a hash of their own: a whole sequence can be proven to its last token.

128k tokens make 2,048 links: 16 KiB, about 22 kB as base64. Longer sequences use longer strides and stay as small.
"""

from __future__ import annotations

import base64
import binascii
import sys
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

LINK_BYTES = 8
MIN_STRIDE_TOKENS = 64
"""Shorter strides cost hash time and bytes; the most a rewritten history loses is one stride less one token."""
MAX_LINKS = 2048
MAX_TOKENS = 1 << 24
_ALGORITHM = "blake2b-64"


class FingerprintError(ValueError):
    """A received fingerprint is malformed."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A token sequence's chain of hashes.

    `tokens`: its length; `stride`: tokens a link; `chain`: `tokens // stride` links of 8 bytes, concatenated; `tail`:
    hash of the last link and the rest, empty when there is no rest.
    """

    tokens: int
    stride: int
    chain: bytes
    tail: bytes

    def to_wire(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "alg": _ALGORITHM,
            "tokens": self.tokens,
            "stride": self.stride,
            "chain": base64.b64encode(self.chain).decode(),
            "tail": self.tail.hex(),
        }

    @classmethod
    def from_wire(cls, data: object) -> Fingerprint:
        """Read `to_wire()`'s data; raises FingerprintError on anything else. Allocates no more than it was sent."""
        if not isinstance(data, Mapping):
            raise FingerprintError("fingerprint is not an object")
        if data.get("alg") != _ALGORITHM:
            raise FingerprintError(f"fingerprint algorithm {str(data.get('alg'))[:32]!r} is not {_ALGORITHM!r}")
        tokens, stride = data.get("tokens"), data.get("stride")
        for name, value, low in (("tokens", tokens, 0), ("stride", stride, 1)):
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= MAX_TOKENS:
                raise FingerprintError(f"fingerprint {name} {str(value)[:32]!r} is not an integer in range")
        assert isinstance(tokens, int) and isinstance(stride, int)
        try:
            chain = base64.b64decode(str(data.get("chain", "")), validate=True)
            tail = bytes.fromhex(str(data.get("tail", "")))
        except (binascii.Error, ValueError) as error:
            raise FingerprintError(f"fingerprint is not readable: {error}") from None
        if len(chain) != tokens // stride * LINK_BYTES:
            raise FingerprintError(f"fingerprint of {tokens} tokens has {len(chain)} bytes of chain")
        if len(tail) != (LINK_BYTES if tokens % stride else 0):
            raise FingerprintError(f"fingerprint of {tokens} tokens has {len(tail)} bytes of tail")
        return cls(tokens, stride, chain, tail)


def stride_for(tokens: int, block_size: int) -> int:
    """Tokens a link: whole blocks, at least `MIN_STRIDE_TOKENS`, and few enough links for `tokens`."""
    if block_size < 1:
        raise ValueError(f"block size must be positive, got {block_size}")
    floor = max(MIN_STRIDE_TOKENS, -(-tokens // MAX_LINKS))
    return -(-floor // block_size) * block_size


def _little_endian(tokens: Iterable[int]) -> memoryview:
    """Token ids as consecutive little-endian unsigned 32-bit integers."""
    if isinstance(tokens, (bytes, memoryview)):
        return memoryview(tokens)
    packed = tokens if isinstance(tokens, array) and tokens.typecode == "I" else array("I", tokens)
    if sys.byteorder == "big":
        packed = array("I", packed)
        packed.byteswap()
    return memoryview(packed).cast("B")


def root_link(seed: bytes) -> bytes:
    """The link before a sequence's first stride."""
    return blake2b(seed, digest_size=LINK_BYTES, person=b"kvtune.fp.root").digest()


def link_of(previous: bytes, tokens: memoryview) -> bytes:
    """The link after `previous` for a stride's (or tail's) little-endian 32-bit token ids."""
    # A keyed hash would cost one more compression a link; concatenation of a fixed-size prefix is unambiguous.
    return blake2b(previous + tokens, digest_size=LINK_BYTES).digest()


def fingerprint(tokens: Iterable[int], *, stride: int, seed: bytes = b"", count: int | None = None) -> Fingerprint:
    """The fingerprint of the first `count` (default: all) `tokens`.

    `tokens`: token ids, or their little-endian 32-bit bytes. `seed`: whatever else the KV depends on (adapter,
    multi-modal content, cache salt); sequences with different seeds have nothing in common.
    """
    data = _little_endian(tokens)
    total = len(data) // 4 if count is None else min(count, len(data) // 4)
    width = stride * 4
    link = root_link(seed)
    links = []
    full = total // stride
    for start in range(0, full * width, width):
        link = link_of(link, data[start : start + width])
        links.append(link)
    tail = link_of(link, data[full * width : total * 4]) if total % stride else b""
    return Fingerprint(total, stride, b"".join(links), tail)


def verified_prefix(held: Fingerprint, tokens: Iterable[int], *, seed: bytes = b"") -> int:
    """How many leading tokens of `tokens` are proven equal to the sequence that `held` was made from.

    All of `held.tokens` when its whole chain and tail match, else a multiple of `held.stride`. Stops at the first
    difference: O(strides compared).
    """
    data = _little_endian(tokens)
    width = held.stride * 4
    link = root_link(seed)
    full = held.tokens // held.stride
    for index in range(min(full, len(data) // width)):
        link = link_of(link, data[index * width : (index + 1) * width])
        if link != held.chain[index * LINK_BYTES : (index + 1) * LINK_BYTES]:
            return index * held.stride
    if full * width > len(data):
        return len(data) // width * held.stride
    if held.tail and len(data) >= held.tokens * 4 and link_of(link, data[full * width : held.tokens * 4]) == held.tail:
        return held.tokens
    return full * held.stride
