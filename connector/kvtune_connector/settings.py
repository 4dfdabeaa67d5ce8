"""What the connector is told in `kv_connector_extra_config`, checked at start. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvtune_connector.policy import DEFAULT_THRESHOLD_TOKENS, DEFAULT_TTL_S, EXPIRY_MARGIN_S

TESTED_VLLM = ("0.32.0",)
VERSION_OVERRIDE = "KVTUNE_ALLOW_UNTESTED_VLLM"


class SettingsError(ValueError):
    """A setting cannot be followed; the message names it and says why."""


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """Settings in force. The first three are vLLM's own keys; the others stand under the key `kvtune`."""

    bidirectional: bool = False
    ttl_s: float = DEFAULT_TTL_S
    """`decoder_kv_blocks_ttl`"""
    threshold_tokens: int = DEFAULT_THRESHOLD_TOKENS
    """`kv_recompute_threshold`"""
    require_fingerprint: bool = True
    """Refuse references that carry no proof (a stock decode peer's)."""
    min_retain_s: float = EXPIRY_MARGIN_S + 1.0
    max_retain_s: float | None = None
    """Bounds of what a router may ask for one request; None: the TTL."""
    idle_sleep_ms: float = 10.0
    """Longest rest of an engine step that has nothing to do but hold blocks; 0 spins as stock does."""
    progress_thread: bool | None = None
    """NIXL's progress thread; None: as vLLM does, except on the CPU platform, where it spins a core per worker."""

    @property
    def longest_retain_s(self) -> float:
        """The longest retention a router may ask for."""
        return self.ttl_s if self.max_retain_s is None else self.max_retain_s

    def in_force(self, pool_tokens: int | None) -> dict[str, float]:
        """What `kvtune_connector_setting` shows of an engine with such a KV pool (None: not known)."""
        shown = {
            "decoder_kv_blocks_ttl": self.ttl_s,
            "kv_recompute_threshold": float(self.threshold_tokens),
            "expiry_margin_seconds": EXPIRY_MARGIN_S,
            "bidirectional_kv_xfer": float(self.bidirectional),
            "max_retain_seconds": self.longest_retain_s,
            "require_fingerprint": float(self.require_fingerprint),
        }
        return shown if pool_tokens is None else {**shown, "kv_pool_tokens": float(pool_tokens)}

    def retention_s(self, asked_s: float | None) -> float:
        """Seconds to retain a request: what was asked within the bounds, 0 if it was asked not to, else the TTL."""
        if asked_s is None:
            return self.ttl_s
        if asked_s == 0:
            return 0.0
        return min(max(asked_s, self.min_retain_s), self.longest_retain_s)


_OWN = {field.name for field in fields(ConnectorSettings)} - {"bidirectional", "ttl_s", "threshold_tokens"}


def read_settings(extra: Mapping[str, Any]) -> ConnectorSettings:
    """Settings from vLLM's `kv_connector_extra_config`. Raises SettingsError."""
    own = extra.get("kvtune", {})
    if not isinstance(own, Mapping):
        raise SettingsError("kv_connector_extra_config.kvtune must be an object")
    for key in own:
        if key not in _OWN:
            raise SettingsError(f"unknown key {key!r} under kvtune; known are {', '.join(sorted(_OWN))}")
    bidirectional = _flag(extra, "bidirectional_kv_xfer", False)
    ttl = _number(extra, "decoder_kv_blocks_ttl", DEFAULT_TTL_S)
    threshold = _number(extra, "kv_recompute_threshold", DEFAULT_THRESHOLD_TOKENS)
    if bidirectional and ttl <= EXPIRY_MARGIN_S:
        raise SettingsError(
            f"decoder_kv_blocks_ttl = {ttl:g}: the reader refuses to read within {EXPIRY_MARGIN_S:g} s of the "
            "deadline, so nothing would ever be reused; set more, or switch bidirectional_kv_xfer off"
        )
    if threshold < 0 or threshold != int(threshold):
        raise SettingsError(f"kv_recompute_threshold = {threshold:g}: it is a number of tokens, 0 or more")
    progress = own.get("progress_thread")
    if progress is not None and not isinstance(progress, bool):
        raise SettingsError(f"kvtune.progress_thread = {progress!r}: it must be true, false or null")
    longest = _number(own, "max_retain_s", None)
    settings = ConnectorSettings(
        bidirectional=bidirectional,
        ttl_s=ttl,
        threshold_tokens=int(threshold),
        require_fingerprint=_flag(own, "require_fingerprint", True),
        min_retain_s=_number(own, "min_retain_s", min(EXPIRY_MARGIN_S + 1.0, ttl if longest is None else longest)),
        max_retain_s=longest,
        idle_sleep_ms=_number(own, "idle_sleep_ms", 10.0),
        progress_thread=progress,
    )
    if settings.idle_sleep_ms < 0 or settings.idle_sleep_ms > 100:
        raise SettingsError(f"kvtune.idle_sleep_ms = {settings.idle_sleep_ms:g}: it must be 0 to 100")
    if bidirectional and not 0 < settings.min_retain_s <= settings.longest_retain_s:
        raise SettingsError(
            f"kvtune.min_retain_s = {settings.min_retain_s:g} must be positive and no more than "
            f"max_retain_s = {settings.longest_retain_s:g}"
        )
    return settings


def check_version(version: str, override: str | None) -> None:
    """Raises SettingsError for a vLLM the binding was not tested with, unless `override` is that very version."""
    if version.split("+")[0] in TESTED_VLLM or override == version:
        return
    raise SettingsError(
        f"kvtune's connector binds to vLLM's internals and was tested with {', '.join(TESTED_VLLM)}, not {version}; "
        f"set {VERSION_OVERRIDE}={version} to use it all the same"
    )


def _flag(source: Mapping[str, Any], key: str, default: bool) -> bool:
    value = source.get(key, default)
    if not isinstance(value, bool):
        raise SettingsError(f"{key} = {value!r}: it must be true or false")
    return value


def _number(source: Mapping[str, Any], key: str, default: Any) -> Any:
    value = source.get(key, default)
    if value is None and default is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise SettingsError(f"{key} = {value!r}: it must be a number")
    return float(value)
