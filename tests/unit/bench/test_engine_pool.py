from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvtune_bench.pool import Pages, Pool

CAPACITY = 12


def links(family: int, count: int) -> list[bytes]:
    return [bytes([family, index]) for index in range(count)]


class PoolMachine(RuleBasedStateMachine):
    """Whatever requests do, pages are neither lost nor counted twice, and what is in use is never evicted."""

    taken = Bundle("taken")

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(CAPACITY, 64)
        self.live: list[tuple[Pages, list[bytes]]] = []

    @rule(target=taken, family=st.integers(0, 3), known=st.integers(0, 6), more=st.integers(0, 4))
    def acquire(self, family: int, known: int, more: int) -> object:
        chain = links(family, known)
        hits = self.pool.match(chain)
        before = self.pool.used
        pages = self.pool.acquire(chain, known + more)
        if pages is None:
            assert self.pool.used == before
            return None
        assert pages.count == known + more
        assert pages.hit_pages == hits
        entry = (pages, chain)
        self.live.append(entry)
        return entry

    @rule(entry=taken)
    def commit(self, entry: tuple[Pages, list[bytes]] | None) -> None:
        if entry is not None and entry in self.live:
            self.pool.commit(entry[0], entry[1])
            assert self.pool.match(entry[1]) == len(entry[1])

    @rule(entry=taken, count=st.integers(0, 10))
    def shrink(self, entry: tuple[Pages, list[bytes]] | None, count: int) -> None:
        if entry is not None and entry in self.live and entry[0].committed == len(entry[1]):
            self.pool.shrink(entry[0], max(count, len(entry[1])))

    @rule(entry=consumes(taken))
    def release(self, entry: tuple[Pages, list[bytes]] | None) -> None:
        if entry is not None and entry in self.live:
            self.live.remove(entry)
            self.pool.release(entry[0])

    @invariant()
    def accounts_balance(self) -> None:
        keyed = {link for pages, _ in self.live for link in pages.keyed}
        anonymous = sum(pages.anonymous for pages, _ in self.live)
        assert self.pool.used == len(keyed) + anonymous
        assert 0 <= self.pool.used + self.pool.cached <= CAPACITY
        for pages, _ in self.live:
            assert self.pool.match(pages.keyed) == len(pages.keyed)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_pinned_pages_are_not_evicted_and_cached_ones_are() -> None:
    pool = Pool(4, 64)
    pinned, cached = links(1, 2), links(2, 2)
    held = pool.acquire(pinned, 2)
    passing = pool.acquire(cached, 2)
    assert held is not None and passing is not None
    pool.commit(held, pinned)
    pool.commit(passing, cached)
    pool.release(passing)
    assert (pool.used, pool.cached, pool.usage) == (2, 2, 0.5)
    assert pool.acquire(links(3, 3), 3) is None
    assert pool.acquire(links(3, 1), 1) is not None
    assert pool.match(cached) == 1  # the end of a sequence goes first: its beginning is of use to more prompts
    assert pool.match(pinned) == 2
    assert pool.evicted == 1


def test_hits_need_no_new_room() -> None:
    pool = Pool(3, 64)
    first = pool.acquire(links(1, 2), 2)
    assert first is not None
    pool.commit(first, links(1, 2))
    second = pool.acquire(links(1, 2), 3)
    assert second is not None and second.hit_pages == 2
    assert pool.used == 3
    pool.release(first)
    assert pool.used == 3


def test_without_caching_nothing_is_found() -> None:
    pool = Pool(4, 64, caching=False)
    pages = pool.acquire(links(1, 2), 2)
    assert pages is not None
    pool.commit(pages, links(1, 2))
    pool.release(pages)
    assert (pool.match(links(1, 2)), pool.used, pool.cached) == (0, 0, 0)


def test_wrong_pages_are_known_until_evicted() -> None:
    pool = Pool(2, 64)
    pages = pool.acquire(links(1, 1), 1)
    assert pages is not None
    pool.commit(pages, links(1, 1), wrong=True)
    pool.release(pages)
    again = pool.acquire(links(1, 1), 1)
    assert again is not None and pool.is_wrong(again)
    pool.release(again)
    other = pool.acquire(links(2, 2), 2)
    assert other is not None
    pool.release(other)
    fresh = pool.acquire(links(1, 1), 1)
    assert fresh is not None and not pool.is_wrong(fresh)


@pytest.mark.parametrize(("capacity", "page"), [(0, 64), (4, 0)])
def test_impossible_pools(capacity: int, page: int) -> None:
    with pytest.raises(ValueError, match="at least one page"):
        Pool(capacity, page)
