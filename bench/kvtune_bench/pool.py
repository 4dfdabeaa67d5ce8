"""An engine's KV pool: pages keyed by the chain of hashes, reference counts, LRU of what may be evicted.

Page = the smallest unit here (64 tokens at vLLM's usual block sizes). A page is *in use* (a running or retained request
refers to it), *cached* (nobody does, its content is known and may be reused or evicted) or free. What is retained for
another engine is in use, and therefore never evicted: that is what retention costs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Pages:
    """Pages that one request refers to. `keyed` are known by content; `anonymous` are not (yet, or duplicates)."""

    keyed: list[bytes] = field(default_factory=list)
    anonymous: int = 0
    hit_pages: int = 0
    """Leading pages that were found in the cache."""
    committed: int = 0
    """Leading pages whose content is settled."""

    @property
    def count(self) -> int:
        """Pages in all."""
        return len(self.keyed) + self.anonymous


class Pool:
    """`capacity` pages of `page_tokens` tokens; with `caching` off nothing is ever found again."""

    def __init__(self, capacity: int, page_tokens: int, *, caching: bool = True) -> None:
        if capacity < 1 or page_tokens < 1:
            raise ValueError(f"a pool needs at least one page of one token, got {capacity} of {page_tokens}")
        self.capacity = capacity
        self.page_tokens = page_tokens
        self.caching = caching
        self._users: dict[bytes, int] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        self._anonymous = 0
        self._wrong: set[bytes] = set()
        self.evicted = 0
        """Cached pages evicted so far."""

    @property
    def used(self) -> int:
        """Pages in use."""
        return len(self._users) + self._anonymous

    @property
    def cached(self) -> int:
        """Pages that only the cache holds."""
        return len(self._idle)

    @property
    def usage(self) -> float:
        """Share in use, as vLLM's `kv_cache_usage_perc` (0 to 1)."""
        return self.used / self.capacity

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` tokens occupy."""
        return -(-tokens // self.page_tokens)

    def match(self, links: Sequence[bytes]) -> int:
        """How many leading pages are held."""
        if not self.caching:
            return 0
        users, idle = self._users, self._idle
        for index, link in enumerate(links):
            if link not in users and link not in idle:
                return index
        return len(links)

    def acquire(self, links: Sequence[bytes], pages: int) -> Pages | None:
        """Take `pages` pages, the leading ones from the cache where `links` are held; None if they do not fit now."""
        hits = min(self.match(links), pages)
        users, idle = self._users, self._idle
        idle_hits = sum(1 for link in links[:hits] if link not in users)
        fresh = pages - hits
        if self.used + idle_hits + fresh > self.capacity:
            return None
        keyed = list(links[:hits])
        for link in keyed:
            if link in users:
                users[link] += 1
            else:
                del idle[link]
                users[link] = 1
        self._anonymous += fresh
        while self.used + len(idle) > self.capacity:
            evicted, _ = idle.popitem(last=False)
            self._wrong.discard(evicted)
            self.evicted += 1
        return Pages(keyed, fresh, hits, hits)

    def commit(self, pages: Pages, links: Sequence[bytes], *, wrong: bool = False) -> None:
        """Say what the pages hold: `links`, the chain from the first page on. `wrong`: their KV is of other tokens."""
        if not self.caching:
            return
        users, idle = self._users, self._idle
        new = links[pages.committed :]
        for link in new:
            # Computed twice at the same time: the second copy stays without a name and is dropped when it is free.
            if link in users or link in idle:
                continue
            users[link] = 1
            pages.keyed.append(link)
            pages.anonymous -= 1
            self._anonymous -= 1
            if wrong:
                self._wrong.add(link)
        pages.committed = max(pages.committed, len(links))

    def is_wrong(self, pages: Pages) -> bool:
        """Whether any page holds KV of other tokens than its key says."""
        return bool(self._wrong) and not self._wrong.isdisjoint(pages.keyed)

    def shrink(self, pages: Pages, count: int) -> None:
        """Give back the unnamed pages beyond `count` in all: an answer ended before its budget."""
        surplus = min(pages.anonymous, max(0, pages.count - count))
        pages.anonymous -= surplus
        self._anonymous -= surplus

    def release(self, pages: Pages) -> None:
        """Give all back. Named pages stay cached, the last of a sequence first in line for eviction."""
        users, idle = self._users, self._idle
        for link in reversed(pages.keyed):
            left = users[link] - 1
            if left:
                users[link] = left
            else:
                del users[link]
                idle[link] = None
        self._anonymous -= pages.anonymous
        pages.keyed = []
        pages.anonymous = 0
