"""The router's settings: a file, environment variables and flags, checked in one place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from kvtune_connector.policy import DEFAULT_TTL_S, EXPIRY_MARGIN_S
from kvtune_telemetry.clock import clock_from_spec

MAX_EXPLORE = 0.05
"""Of references, at most, are explored with: each costs a user some milliseconds."""


class ConfigError(ValueError):
    """A setting is missing, unknown or out of range; the message names it."""


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """All settings. Times in seconds."""

    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 9400
    ttl: float = DEFAULT_TTL_S
    """Retention assumed where D's reference does not state its TTL; must not exceed `decoder_kv_blocks_ttl`."""
    retain: float | None = None
    """Retention asked of D with each turn, without restarting it; D keeps to its own bounds. None: what D is set to."""
    margin: float = EXPIRY_MARGIN_S
    """P refuses to read within this time of the deadline."""
    handover: float = 1.0
    """Time from the router's look to P's check that a reference must outlive."""
    accept_unverified: bool = False
    """Hand references to prefill engines that cannot prove them equal to the prompt (stock vLLM). Rewritten histories
    then get wrong answers without any error."""
    identity_key: str | None = None
    """Keys the hashes of conversation ids; None: a random one. Routers that must agree on ids share it."""
    holdout: float = 0.0
    """Share (0 to 1) of conversations served without reuse, to measure what reuse is worth."""
    explore: float = 0.0
    """Share (0 to 0.05) of the references for which prefill is asked to take the other path than its threshold says, to
    measure both; it does so only near the threshold."""
    max_conversations: int = 200_000
    forget_after: float = 3600.0
    """A conversation that has not returned for so long is given up."""
    max_body_mib: float = 32.0
    connect_timeout: float = 5.0
    read_timeout: float = 600.0
    """Longest silence of an engine, in a stream or before an answer."""
    drain_timeout: float = 30.0
    outcome_header: bool = False
    """Tell clients each turn's outcome in `X-Kvtune-Outcome`."""
    log_level: str = "INFO"
    log_format: str = "console"
    time_scale: str | None = None
    """For simulations only: the clock that simulated engines share."""

    def __post_init__(self) -> None:
        for name in ("port", "metrics_port"):
            _check(0 <= getattr(self, name) <= 65535, name, getattr(self, name), "a port is 0 (any) to 65535")
        for name in ("ttl", "forget_after", "max_body_mib", "connect_timeout", "read_timeout"):
            value = getattr(self, name)
            _check(math.isfinite(value) and value > 0, name, value, "it must be positive")
        for name in ("margin", "handover", "drain_timeout"):
            value = getattr(self, name)
            _check(math.isfinite(value) and value >= 0, name, value, "it must not be negative")
        _check(
            self.ttl > self.margin + self.handover, "ttl", self.ttl,
            f"it must exceed the margin ({self.margin:g} s) and the hand-over ({self.handover:g} s): "
            "no reference would ever be usable",
        )  # fmt: skip
        if self.retain is not None:
            _check(
                math.isfinite(self.retain) and self.retain > self.margin + self.handover, "retain", self.retain,
                f"it must exceed the margin ({self.margin:g} s) and the hand-over ({self.handover:g} s)",
            )  # fmt: skip
        _check(0 <= self.holdout <= 1, "holdout", self.holdout, "it is a share from 0 to 1")
        _check(0 <= self.explore <= MAX_EXPLORE, "explore", self.explore, f"it is a share from 0 to {MAX_EXPLORE:g}")
        try:
            clock_from_spec(self.time_scale)
        except ValueError as error:
            raise ConfigError(f"time_scale: {error}") from None
        _check(self.max_conversations >= 1, "max_conversations", self.max_conversations, "it must be at least 1")


def _check(good: bool, name: str, value: object, why: str) -> None:
    if not good:
        raise ConfigError(f"{name} = {value}: {why}")


def load_config(path: Path | None, given: Mapping[str, Any]) -> RouterConfig:
    """The settings of a YAML file (if any) overlaid with those given on the command line or in the environment.

    Raises ConfigError with the file, the key and what to do.
    """
    merged: dict[str, Any] = {}
    if path is not None:
        merged.update(_read_file(path))
    merged.update({name: value for name, value in given.items() if value is not None})
    return RouterConfig(**merged)


def _read_file(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold 'key: value' lines")
    known = {field.name: field for field in fields(RouterConfig)}
    out: dict[str, Any] = {}
    for raw, value in data.items():
        name = str(raw).replace("-", "_")
        if name not in known:
            raise ConfigError(f"{path}: unknown key {raw!r}; known are {', '.join(sorted(known))}")
        out[name] = _typed(path, name, value, RouterConfig.__dataclass_fields__[name].default)
    return out


def _typed(path: Path, name: str, value: Any, default: Any) -> Any:
    if isinstance(default, tuple):
        if isinstance(value, str):
            return (value,)
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise ConfigError(f"{path}: {name} must be a list of URLs")
    if isinstance(default, bool):
        if isinstance(value, bool):
            return value
        raise ConfigError(f"{path}: {name} must be true or false")
    if isinstance(default, (int, float)):
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            if isinstance(default, int) and value != int(value):
                raise ConfigError(f"{path}: {name} must be a whole number")
            return type(default)(value)
        raise ConfigError(f"{path}: {name} must be a number")
    if value is None or isinstance(value, str):
        return value
    raise ConfigError(f"{path}: {name} must be text")
