"""P's decision about a prompt's history: read it from D, or compute it again, and why. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvtune_telemetry.vocabulary import Decision, Reason

EXPIRY_MARGIN_S = 5.0
"""vLLM's reader declines a read that starts within 5 s of the deadline (`_KV_BLOCKS_EXPIRY_SAFETY_MARGIN`, 0.32)."""
DEFAULT_THRESHOLD_TOKENS = 64
"""vLLM's default `kv_recompute_threshold`."""
DEFAULT_TTL_S = 480.0
"""vLLM's default `decoder_kv_blocks_ttl`."""

EXPLORE_FACTOR = 4.0
"""Histories within this factor of the threshold are explored with: there either path costs about as much."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What D says it holds, as far as P could check it."""

    tokens: int
    """Tokens D holds (vLLM's `remote_num_tokens`)."""
    verified_tokens: int | None
    """Leading tokens proven equal to the prompt; None when the offer carries no usable fingerprint."""
    deadline_s: float | None
    """When D frees it, in P's clock; None when unknown."""
    engine_alive: bool = True
    """False when the engine is known to be gone or to be another incarnation."""
    read_failed: bool = False
    """True after a read of this offer failed: never try again."""
    consumed: bool = False
    """True when this reader has used the reference before: the blocks may hold anything by now, whatever its
    fingerprint says of what they held."""
    explored: bool = False
    """The router asks for the other path than the threshold says, to measure both; done near the threshold only."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision. Tokens are counted from the prompt's start unless said otherwise."""

    decision: Decision
    reason: Reason
    fetch_tokens: int
    """Tokens to read beyond the local hit; 0 unless `decision` is fetch."""
    available_tokens: int
    """Usable tokens beyond the local hit that the offer had."""
    use_tokens: int
    """Cut D's sequence to this many tokens before reading (0 unless fetch)."""
    notify_release: bool
    """Tell D that it may free the blocks: it still holds them and nobody will read them."""


def decide(
    *,
    prompt_tokens: int,
    local_tokens: int,
    offer: Offer | None,
    now_s: float,
    threshold_tokens: int = DEFAULT_THRESHOLD_TOKENS,
    margin_s: float = EXPIRY_MARGIN_S,
    require_fingerprint: bool = True,
    enabled: bool = True,
) -> Verdict:
    """Decide about one prompt.

    `prompt_tokens`: its length; `local_tokens`: what P's prefix cache holds; `now_s`: P's clock, the one
    `offer.deadline_s` is in. The order of the checks is the order of safety: what cannot be read safely is refused
    before what is worth reading is weighed. A fetch never reaches beyond the verified prefix; with reason `rewritten`
    it was cut to it.
    """
    if offer is None:
        return _recompute(Reason.NONE) if local_tokens == 0 else _local()
    if not enabled:
        return _recompute(Reason.DISABLED, release=True)
    if offer.read_failed:
        return _recompute(Reason.READ_FAILED)
    if offer.consumed:
        return _recompute(Reason.CONSUMED)
    if not offer.engine_alive:
        return _recompute(Reason.ENGINE_GONE)
    if offer.deadline_s is not None and now_s + margin_s >= offer.deadline_s:
        # D frees the blocks itself; a notification now could name blocks that are already another request's.
        return _recompute(Reason.EXPIRED)
    if offer.verified_tokens is None and require_fingerprint:
        return _recompute(Reason.UNVERIFIED, release=True)
    proven = offer.tokens if offer.verified_tokens is None else min(offer.verified_tokens, offer.tokens)
    usable = min(proven, prompt_tokens)
    if usable <= 0:
        return _recompute(Reason.REWRITTEN, release=True)
    available = usable - local_tokens
    if available <= 0:
        return _local(release=True)
    if offer.explored and threshold_tokens / EXPLORE_FACTOR <= available <= threshold_tokens * EXPLORE_FACTOR:
        if available >= threshold_tokens:
            return _recompute(Reason.EXPLORED, available, release=True)
        return Verdict(Decision.FETCH, Reason.EXPLORED, available, available, usable, False)
    cut = proven < min(offer.tokens, prompt_tokens)
    if available < threshold_tokens:
        return _recompute(Reason.REWRITTEN if cut else Reason.BELOW_THRESHOLD, available, release=True)
    return Verdict(Decision.FETCH, Reason.REWRITTEN if cut else Reason.NONE, available, available, usable, False)


def _recompute(reason: Reason, available: int = 0, *, release: bool = False) -> Verdict:
    return Verdict(Decision.RECOMPUTE, reason, 0, available, 0, release)


def _local(*, release: bool = False) -> Verdict:
    return Verdict(Decision.LOCAL_HIT, Reason.NONE, 0, 0, 0, release)
