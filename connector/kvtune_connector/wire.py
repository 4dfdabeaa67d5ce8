"""The `kvtune` part of `kv_transfer_params`: what D adds to a reference, what the router asks, what P reports back.

vLLM ignores keys it does not know, so a stock peer on either side is unaffected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtune_connector.fingerprint import Fingerprint, FingerprintError
from kvtune_telemetry.vocabulary import Decision, End, Reason

KEY = "kvtune"
"""The one key that kvtune adds inside `kv_transfer_params`."""
PARAMS = "kv_transfer_params"
"""vLLM's name of the field in requests and answers."""


def reference_extras(
    *, fingerprint: Fingerprint, ttl_s: float, block_size: int | None = None, incarnation: str | None = None
) -> dict[str, Any]:
    """What D adds to the reference it exports: proof of its tokens, and the TTL (s) it grants.

    `block_size`: tokens a block of its `remote_block_ids`; `incarnation`: names this process, where the engine id is
    configured and survives a restart.
    """
    extras: dict[str, Any] = {"v": 1, "fingerprint": fingerprint.to_wire(), "ttl_s": ttl_s}
    if block_size is not None:
        extras["block_size"] = block_size
    if incarnation is not None:
        extras["incarnation"] = incarnation
    return extras


def report_extras(*, decision: Decision, reason: Reason, fetched: int, local: int, available: int) -> dict[str, Any]:
    """What P adds to its answer: the decision it took (tokens)."""
    return {
        "v": 1,
        "decision": decision.value,
        "reason": reason.value,
        "fetched_tokens": fetched,
        "local_tokens": local,
        "available_tokens": available,
    }


def request_extras(*, retain_s: float | None = None, explore: bool = False) -> dict[str, Any]:
    """What the router asks of an engine: keep the KV so long (D; 0 = not at all), take the path that the
    threshold speaks against, to measure it (P)."""
    extras: dict[str, Any] = {"v": 1}
    if retain_s is not None:
        extras["retain_s"] = retain_s
    if explore:
        extras["explore"] = True
    return extras


_NAMES = ("remote_engine_id", "remote_request_id", "remote_host")
_MARK = "#kvtune-"
_ENDS = {end.value for end in End}


def marked_release(remote_request_id: str, end: End) -> str:
    """The request id that a reader which gives a reference back unread puts into its notification to D."""
    return f"{remote_request_id}{_MARK}{end.value}"


def split_notification(message: str) -> tuple[str, tuple[str, End] | None]:
    """A notification `<request id>:<consumers>` as stock vLLM reads it, and the (request id, end) that a reader gave.

    Request ids hold what clients send: only our own words at the end count, and never a heartbeat (`HB:`).
    """
    told, mark, rest = message.rpartition(_MARK)
    reason, _, consumers = rest.rpartition(":")
    if not mark or reason not in _ENDS or message.startswith("HB:"):
        return message, None
    return f"{told}:{consumers}", (told, End(reason))


@dataclass(frozen=True, slots=True)
class Report:
    """P's decision as the router reads it."""

    decision: Decision
    reason: Reason
    fetched_tokens: int
    local_tokens: int


def _extras(params: object) -> Mapping[str, Any] | None:
    extras = params.get(KEY) if isinstance(params, Mapping) else None
    return extras if isinstance(extras, Mapping) else None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        return None
    return float(value)


READ_MARK = "_remote_blocks_processed"
"""vLLM's own mark that a request's remote blocks were read, or given back: once a request."""
_OWN_MARKS = (READ_MARK, "_p_side_truncated")
"""vLLM's own notes in the parameters; a client's would be believed."""
_MAX_RANKS = 4096


def _whole(value: object, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high


def sound(params: Mapping[str, Any]) -> bool:
    """Whether what names a remote's blocks has the types and ranges that vLLM relies on without a look."""
    if not all(isinstance(params.get(name), str) and params[name] for name in _NAMES):
        return False
    if not _whole(params.get("remote_port"), 1, 65535):
        return False
    if not all(_whole(params.get(name, 1), 1, _MAX_RANKS) for name in ("tp_size", "dcp_size", "pp_size")):
        return False
    tokens, expiry, groups = (
        params.get(name) for name in ("remote_num_tokens", "remote_blocks_expiry_time", "remote_block_ids")
    )
    if tokens is not None and not _whole(tokens, 0, 2**31):
        return False
    if expiry is not None and (
        isinstance(expiry, bool) or not isinstance(expiry, (int, float)) or not abs(expiry) < 2**62
    ):
        return False
    return isinstance(groups, (list, tuple)) and all(
        isinstance(group, (list, tuple)) and all(_whole(one, 0, 2**31) for one in group) for group in groups
    )


def sanitized(params: object) -> dict[str, Any] | None:
    """A request's parameters as an engine may believe them: malformed ones ask for nothing that is remote."""
    if not isinstance(params, Mapping):
        return None
    kept = {name: value for name, value in params.items() if name not in _OWN_MARKS}
    # A long list of blocks is looked through once.
    named = bool(kept.get("remote_block_ids"))
    good = named and sound(kept)
    if kept.get("do_remote_prefill") and not good:
        kept["do_remote_prefill"] = False
    if named and not good:
        kept["remote_block_ids"] = None
    return kept


def read_block_size(params: object) -> int | None:
    """Tokens a block of the reference's block ids, if D says so."""
    extras = _extras(params)
    value = extras.get("block_size") if extras else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def read_incarnation(params: object) -> str | None:
    """Which process answered: its incarnation if it says so, else its engine id."""
    extras = _extras(params)
    told = extras.get("incarnation") if extras else None
    if not isinstance(told, str):
        told = params.get("remote_engine_id") if isinstance(params, Mapping) else None
    return told if isinstance(told, str) and told else None


def has_fingerprint(params: object) -> bool:
    """Whether a reference claims to carry a fingerprint; reading and checking it is the reader's job."""
    extras = _extras(params)
    return extras is not None and isinstance(extras.get("fingerprint"), Mapping)


def read_fingerprint(params: object) -> Fingerprint | None:
    """The fingerprint in a reference; None when it carries none, or a malformed one (then nothing is proven)."""
    extras = _extras(params)
    if extras is None or "fingerprint" not in extras:
        return None
    try:
        return Fingerprint.from_wire(extras["fingerprint"])
    except FingerprintError:
        return None


def read_ttl_s(params: object) -> float | None:
    """The TTL D granted (s), if it says so."""
    extras = _extras(params)
    return _number(extras.get("ttl_s")) if extras else None


def read_retain_s(params: object) -> float | None:
    """How long the router asks D to keep the KV (s), if it asks."""
    extras = _extras(params)
    return _number(extras.get("retain_s")) if extras else None


def read_explore(params: object) -> bool:
    """Whether the router asks P for the path that its threshold speaks against."""
    extras = _extras(params)
    return bool(extras and extras.get("explore") is True)


def read_report(params: object) -> Report | None:
    """P's decision, if P is a kvtune connector and says so in words we know."""
    extras = _extras(params)
    if extras is None:
        return None
    try:
        decision, reason = Decision(str(extras.get("decision"))), Reason(str(extras.get("reason")))
    except ValueError:
        return None
    fetched, local = _number(extras.get("fetched_tokens")), _number(extras.get("local_tokens"))
    return Report(decision, reason, int(fetched or 0), int(local or 0))
