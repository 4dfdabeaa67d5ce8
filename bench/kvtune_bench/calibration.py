"""Times and sizes of the simulated engines: straight lines through published measurements, or from a file."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_P5EN = (
    "straight lines through the two published points per curve (about 2k and 20k to 24k prompt tokens) of prefill "
    "time, time to first token and NIXL transfer time on AWS p5en, tensor parallel size 8, without reuse; "
    "decode 15.8 ms per token is the slope used for coding-agent calls in the kv-cache-tester traces"
)


_KEYS = ("name", "source", "prefill", "transfer", "decode_token_s", "bytes_per_token", "pool_tokens", "context_tokens")
"""What a calibration file must have."""
_OPTIONAL = ("handoff", "descriptors_per_block")
_LARGEST = 1e15
"""Numbers of a file are below this: whole ones are exact then."""


class CalibrationError(ValueError):
    """A calibration that cannot be used; the message says why and what is allowed."""


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds for `n` tokens: `base_s + token_s * n`, never below `floor_s`."""

    base_s: float
    token_s: float
    floor_s: float = 0.0

    def at(self, tokens: int) -> float:
        """Seconds for `tokens` tokens; 0 for none."""
        return max(self.floor_s, self.base_s + self.token_s * tokens) if tokens > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Calibration:
    """How long a simulated engine takes, and how much it can hold."""

    name: str
    source: str
    """Where the figures come from."""
    prefill: Line
    """Compute time of a prompt's tokens that no cache holds."""
    transfer: Line
    """Reading KV from another engine."""
    handoff: Line
    """From D's admission to its first token, the pull of the prompt's KV included: what the published time to first
    token has beyond the prefill time."""
    decode_token_s: float
    bytes_per_token: int
    """KV bytes of one token, summed over ranks."""
    pool_tokens: int
    """KV pool of one engine."""
    context_tokens: int
    """The model's limit, prompt and answer together."""
    descriptors_per_block: int = 64
    """NIXL descriptors a KV block: one a layer."""

    def pull_s(self, missing_tokens: int, prompt_tokens: int) -> float:
        """Seconds of the read of `missing_tokens` from P: as long as a read takes, but no longer than the hand-off."""
        return min(self.transfer.at(missing_tokens), self.handoff.at(prompt_tokens))


PRESETS: dict[str, Calibration] = {
    "qwen3-32b": Calibration(
        name="qwen3-32b",
        source=_P5EN,
        prefill=Line(0.0993, 26.9e-6),
        transfer=Line(0.0209, 4.55e-6),
        handoff=Line(0.1016 - 0.0993, (28.2 - 26.9) * 1e-6),
        decode_token_s=0.0158,
        bytes_per_token=262_144,  # 64 layers, 8 KV heads of 128, K and V, 2 bytes each
        pool_tokens=3_500_000,
        context_tokens=131_072,
    ),
    "glm-5-fp8": Calibration(
        name="glm-5-fp8",
        source=_P5EN,
        prefill=Line(0.2966, 101.7e-6),
        transfer=Line(0.0200, 4.50e-6),
        # The two fitted lines cross near 2k tokens; a hand-off takes at least 1 ms.
        handoff=Line(0.2962 - 0.2966, (101.9 - 101.7) * 1e-6, floor_s=0.001),
        decode_token_s=0.0158,
        bytes_per_token=100_000,
        pool_tokens=2_500_000,
        context_tokens=200_000,
    ),
}


class Noise:
    """Seeded multiplicative log-normal noise with mean 1; `sigma` 0 gives exactly 1."""

    def __init__(self, sigma: float, seed: int) -> None:
        if not sigma >= 0:
            raise ValueError(f"noise must not be negative, got {sigma}")
        self._sigma = sigma
        self._random = random.Random(seed)

    def factor(self) -> float:
        """The next factor."""
        if self._sigma == 0:
            return 1.0
        return math.exp(self._random.gauss(0.0, self._sigma) - self._sigma * self._sigma / 2)


def calibration(name_or_path: str) -> Calibration:
    """A preset by name, or a calibration from a JSON file. Raises CalibrationError."""
    if name_or_path in PRESETS:
        return PRESETS[name_or_path]
    path = Path(name_or_path)
    if not path.is_file():
        raise CalibrationError(f"model {name_or_path!r} is neither one of {', '.join(sorted(PRESETS))} nor a JSON file")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CalibrationError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CalibrationError(f"{path}: not JSON: {error}") from None
    except RecursionError:
        raise CalibrationError(f"{path}: not a calibration: nested too deeply") from None
    try:
        return from_dict(data)
    except CalibrationError as error:
        raise CalibrationError(f"{path}: {error}") from None


def from_dict(data: object) -> Calibration:
    """Read `to_dict`'s data. `handoff` and `descriptors_per_block` may be left out. Raises CalibrationError."""
    if not isinstance(data, Mapping):
        raise CalibrationError("a calibration is an object")
    unknown = sorted(set(data) - {*_KEYS, *_OPTIONAL})
    if unknown:
        names = ", ".join(map(repr, unknown))
        raise CalibrationError(f"unknown key {names}; known: {', '.join(sorted((*_KEYS, *_OPTIONAL)))}")
    missing = [key for key in _KEYS if key not in data]
    for key in ("prefill", "transfer", "handoff"):
        if isinstance(data.get(key), Mapping):
            missing += [f"{key}.{part}" for part in ("base_s", "token_s") if part not in data[key]]
            odd = sorted(set(data[key]) - {"base_s", "token_s", "floor_s"})
            if odd:
                raise CalibrationError(f"unknown key {key}.{odd[0]}; {key} has base_s, token_s and perhaps floor_s")
    if missing:
        raise CalibrationError(f"missing: {', '.join(missing)}; docs/simulate.md has an example of the whole file")

    def text(key: str) -> str:
        value = data.get(key)
        if not isinstance(value, str) or not value:
            raise CalibrationError(f"{key} must be a non-empty string")
        return value

    def number(source: Mapping[str, Any], key: str, where: str, *, default: float | None = None) -> float:
        value = source.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < _LARGEST:
            raise CalibrationError(f"{where}{key} must be a number, got {json.dumps(value, default=str)[:60]}")
        return float(value)

    def positive(key: str, *, default: int | None = None) -> int:
        value = number(data, key, "", default=default)
        if value < 1 or value != int(value):
            raise CalibrationError(f"{key} must be a positive whole number, got {value!r}")
        return int(value)

    def line(key: str, default: Line | None = None) -> Line:
        value = data.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, Mapping):
            raise CalibrationError(f"{key} must be an object with base_s and token_s")
        result = Line(
            number(value, "base_s", f"{key}."),
            number(value, "token_s", f"{key}."),
            number(value, "floor_s", f"{key}.", default=0.0),
        )
        if result.token_s < 0 or result.floor_s < 0:
            raise CalibrationError(f"{key}: token_s and floor_s must not be negative")
        return result

    decode = number(data, "decode_token_s", "")
    if decode < 0:
        raise CalibrationError("decode_token_s must not be negative")
    return Calibration(
        name=text("name"),
        source=text("source"),
        prefill=line("prefill"),
        transfer=line("transfer"),
        handoff=line("handoff", line("transfer")),
        decode_token_s=decode,
        bytes_per_token=positive("bytes_per_token"),
        pool_tokens=positive("pool_tokens"),
        context_tokens=positive("context_tokens"),
        descriptors_per_block=positive("descriptors_per_block", default=64),
    )


def to_dict(calibration: Calibration) -> dict[str, Any]:
    """Plain data for a calibration file."""

    def line(value: Line) -> dict[str, float]:
        return {"base_s": value.base_s, "token_s": value.token_s, "floor_s": value.floor_s}

    return {
        "name": calibration.name,
        "source": calibration.source,
        "prefill": line(calibration.prefill),
        "transfer": line(calibration.transfer),
        "handoff": line(calibration.handoff),
        "decode_token_s": calibration.decode_token_s,
        "bytes_per_token": calibration.bytes_per_token,
        "pool_tokens": calibration.pool_tokens,
        "context_tokens": calibration.context_tokens,
        "descriptors_per_block": calibration.descriptors_per_block,
    }
