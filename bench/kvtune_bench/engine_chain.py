"""One request's chain of hashes, computed once and extended as the answer grows."""

from __future__ import annotations

from kvtune_connector.fingerprint import (
    LINK_BYTES,
    Fingerprint,
    fingerprint,
    link_of,
    root_link,
    stride_for,
    verified_prefix,
)


class Chain:
    """The chain of `fingerprint()` over a growing token sequence, with a link a KV page of `stride` tokens.

    The same links prove a prefix to another engine and key this engine's cached pages.
    """

    __slots__ = ("_data", "_seed", "links", "stride")

    def __init__(self, tokens: bytes, stride: int, seed: bytes = b"") -> None:
        """`tokens`: ids as little-endian 32-bit bytes; `seed`: as in `fingerprint()`."""
        self.stride = stride
        self._seed = seed
        self._data = b""
        self.links: list[bytes] = []
        """One link a full stride."""
        self.extend(tokens)

    @property
    def tokens(self) -> int:
        """Length of the sequence."""
        return len(self._data) // 4

    def extend(self, tokens: bytes) -> None:
        """Append tokens; only they (and the stride they complete) are hashed."""
        self._data = self._data + tokens if self._data else tokens
        data = memoryview(self._data)
        width = self.stride * 4
        links = self.links
        link = links[-1] if links else root_link(self._seed)
        for start in range(len(links) * width, len(data) // width * width, width):
            link = link_of(link, data[start : start + width])
            links.append(link)

    def cut(self, tokens: int) -> bytes:
        """The hash that stands for the first `tokens` tokens: equal iff they are equal."""
        width = self.stride * 4
        full = min(tokens, self.tokens) // self.stride
        link = self.links[full - 1] if full else root_link(self._seed)
        rest = memoryview(self._data)[full * width : tokens * 4]
        return link_of(link, rest) if rest else link

    def fingerprint(self, block_size: int) -> Fingerprint:
        """The fingerprint D exports. Hashes again only if the sequence is so long that it needs a longer stride."""
        stride = stride_for(self.tokens, block_size)
        if stride != self.stride:
            return fingerprint(self._data, stride=stride, seed=self._seed)
        tail = self.cut(self.tokens) if self.tokens % stride else b""
        return Fingerprint(self.tokens, stride, b"".join(self.links), tail)

    def verified_prefix(self, held: Fingerprint) -> int:
        """What `fingerprint.verified_prefix(held, these tokens)` gives, from the links computed already."""
        if held.stride != self.stride:
            return verified_prefix(held, self._data, seed=self._seed)
        full = held.tokens // self.stride
        low, high = 0, min(full, len(self.links))
        # Each link covers all before it: equal up to some point and different from there on, so bisection finds it.
        while low < high:
            middle = (low + high + 1) // 2
            if held.chain[(middle - 1) * LINK_BYTES : middle * LINK_BYTES] == self.links[middle - 1]:
                low = middle
            else:
                high = middle - 1
        whole = low == full and bool(held.tail) and held.tokens <= self.tokens and self.cut(held.tokens) == held.tail
        return held.tokens if whole else low * self.stride
