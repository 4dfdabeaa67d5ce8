from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune_connector.policy import Offer, Verdict, decide
from kvtune_telemetry.catalogue import DECISION_REASONS
from kvtune_telemetry.vocabulary import Decision, Reason

OFFER = Offer(tokens=1000, verified_tokens=1000, deadline_s=100.0)


def decided(offer: Offer | None = OFFER, **more: Any) -> Verdict:
    return decide(**{"prompt_tokens": 1200, "local_tokens": 0, "offer": offer, "now_s": 0.0, **more})


def test_a_good_offer_is_fetched_whole() -> None:
    assert decided() == Verdict(Decision.FETCH, Reason.NONE, 1000, 1000, 1000, False)


def test_only_what_is_missing_locally_is_fetched() -> None:
    assert decided(local_tokens=640) == Verdict(Decision.FETCH, Reason.NONE, 360, 360, 1000, False)


def test_no_offer() -> None:
    assert decided(None) == Verdict(Decision.RECOMPUTE, Reason.NONE, 0, 0, 0, False)
    assert decided(None, local_tokens=64).decision is Decision.LOCAL_HIT


@pytest.mark.parametrize(
    ("offer", "more", "decision", "reason", "release"),
    [
        (OFFER, {"enabled": False}, Decision.RECOMPUTE, Reason.DISABLED, True),
        (replace(OFFER, read_failed=True), {}, Decision.RECOMPUTE, Reason.READ_FAILED, False),
        (replace(OFFER, consumed=True), {}, Decision.RECOMPUTE, Reason.CONSUMED, False),
        (replace(OFFER, engine_alive=False), {}, Decision.RECOMPUTE, Reason.ENGINE_GONE, False),
        (OFFER, {"now_s": 95.0}, Decision.RECOMPUTE, Reason.EXPIRED, False),
        (OFFER, {"now_s": 94.9}, Decision.FETCH, Reason.NONE, False),
        (replace(OFFER, deadline_s=None), {"now_s": 1e9}, Decision.FETCH, Reason.NONE, False),
        (replace(OFFER, verified_tokens=None), {}, Decision.RECOMPUTE, Reason.UNVERIFIED, True),
        (replace(OFFER, verified_tokens=None), {"require_fingerprint": False}, Decision.FETCH, Reason.NONE, False),
        (replace(OFFER, verified_tokens=0), {}, Decision.RECOMPUTE, Reason.REWRITTEN, True),
        (replace(OFFER, verified_tokens=512), {}, Decision.FETCH, Reason.REWRITTEN, False),
        (replace(OFFER, verified_tokens=512), {"local_tokens": 500}, Decision.RECOMPUTE, Reason.REWRITTEN, True),
        (OFFER, {"local_tokens": 1000}, Decision.LOCAL_HIT, Reason.NONE, True),
        (OFFER, {"local_tokens": 937}, Decision.RECOMPUTE, Reason.BELOW_THRESHOLD, True),
        (OFFER, {"local_tokens": 936}, Decision.FETCH, Reason.NONE, False),
        (OFFER, {"local_tokens": 999, "threshold_tokens": 0}, Decision.FETCH, Reason.NONE, False),
        # with a threshold of 64, exploration goes from 16 to 256 tokens
        (replace(OFFER, explored=True), {"local_tokens": 743}, Decision.FETCH, Reason.NONE, False),
        (replace(OFFER, explored=True), {"local_tokens": 744}, Decision.RECOMPUTE, Reason.EXPLORED, True),
        (replace(OFFER, explored=True), {"local_tokens": 936}, Decision.RECOMPUTE, Reason.EXPLORED, True),
        (replace(OFFER, explored=True), {"local_tokens": 937}, Decision.FETCH, Reason.EXPLORED, False),
        (replace(OFFER, explored=True), {"local_tokens": 984}, Decision.FETCH, Reason.EXPLORED, False),
        (replace(OFFER, explored=True), {"local_tokens": 985}, Decision.RECOMPUTE, Reason.BELOW_THRESHOLD, True),
    ],
)
def test_each_reason(offer: Offer, more: dict[str, Any], decision: Decision, reason: Reason, release: bool) -> None:
    verdict = decided(offer, **more)
    assert (verdict.decision, verdict.reason, verdict.notify_release) == (decision, reason, release)


def test_a_shorter_prompt_takes_no_more_than_itself() -> None:
    verdict = decided(prompt_tokens=300)
    assert (verdict.fetch_tokens, verdict.use_tokens, verdict.reason) == (300, 300, Reason.NONE)


@given(
    st.integers(1, 5000),
    st.integers(0, 5000),
    st.integers(0, 5000),
    st.none() | st.integers(0, 6000),
    st.none() | st.floats(-10, 200),
    st.booleans(),
    st.booleans(),
    st.integers(0, 500),
    st.booleans(),
)
def test_what_is_fetched_is_always_proven_and_in_time(
    prompt: int, local: int, held: int, verified: int | None, deadline: float | None, alive: bool, failed: bool,
    threshold: int, required: bool,
) -> None:  # fmt: skip
    offer = Offer(held, verified, deadline, alive, failed)
    verdict = decide(
        prompt_tokens=prompt, local_tokens=local, offer=offer, now_s=50.0, threshold_tokens=threshold,
        require_fingerprint=required,
    )  # fmt: skip
    assert (verdict.decision.value, verdict.reason.value) in DECISION_REASONS
    if verdict.decision is Decision.FETCH:
        assert alive and not failed
        assert verdict.use_tokens <= min(held, prompt)
        assert verified is None or verdict.use_tokens <= verified
        assert verified is not None or not required
        assert deadline is None or deadline > 55.0
        assert verdict.fetch_tokens == verdict.use_tokens - local >= max(1, threshold)
        assert not verdict.notify_release
    else:
        assert verdict.fetch_tokens == verdict.use_tokens == 0
    if verdict.reason in (Reason.EXPIRED, Reason.ENGINE_GONE, Reason.READ_FAILED):
        assert not verdict.notify_release, "a notification could name blocks that are another request's by now"
