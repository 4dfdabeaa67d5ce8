"""Reads a client's request once and builds the two legs' bodies from it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from kvtune_connector.wire import KEY, PARAMS, request_extras
from kvtune_router.errors import RequestError
from kvtune_router.identity import ID_FIELDS

FIRST_TURN: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What P gets when there is nothing to read back."""

_NOT_FOR_PREFILL = (
    "max_completion_tokens", "min_tokens", "stream_options", "stop", "logprobs", "top_logprobs", "n", "best_of",
)  # fmt: skip
"""Fields that P's single token needs not; a stop string would even make P drop the KV (upstream aborts the request)."""


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A parsed request body. `body` holds no `kv_transfer_params` and no router-only id field."""

    body: dict[str, Any]
    stream: bool
    forged: bool
    """Whether the client had sent `kv_transfer_params`."""
    splittable: bool
    """Whether prefill and decode can be split for it: one sequence in, one sequence out."""
    model: str | None


def parse_turn(raw: bytes) -> TurnRequest:
    """Read a body; raises RequestError (400) that says what is wrong and where."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestError(400, f"the request body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise RequestError(400, "the request body must be a JSON object", code="invalid_json")
    stream = body.get("stream", False)
    if stream is None:
        stream = False
    if not isinstance(stream, bool):
        raise RequestError(400, "'stream' must be true or false", code="invalid_stream")
    forged = _drop_forged(body)
    model = body.get("model")
    return TurnRequest(body, stream, forged, _splittable(body), model if isinstance(model, str) else None)


def _drop_forged(body: dict[str, Any]) -> bool:
    """Remove what would reach the engine as `kv_transfer_params`: the field, and vLLM's way round it."""
    forged = body.pop(PARAMS, None) is not None
    for field in ("vllm_xargs", "extra_args"):
        extra = body.get(field)
        if isinstance(extra, dict) and PARAMS in extra:
            body[field] = {key: value for key, value in extra.items() if key != PARAMS}
            forged = True
    return forged


def without_ids(body: dict[str, Any]) -> dict[str, Any]:
    """The body without the id fields that only the router reads; strict engines refuse unknown fields."""
    for field in ID_FIELDS:
        body.pop(field, None)
    return body


def _splittable(body: dict[str, Any]) -> bool:
    if any(body.get(field) not in (None, 1) for field in ("n", "best_of")):
        return False
    if body.get("echo") or body.get("use_beam_search") or body.get("prompt_logprobs") is not None:
        return False
    prompt = body.get("prompt")
    if isinstance(prompt, list):
        return bool(prompt) and all(type(token) is int for token in prompt)
    return "messages" in body or isinstance(prompt, str)


def prefill_body(body: dict[str, Any], reference: dict[str, Any] | None, *, explore: bool = False) -> bytes:
    """P's leg: one token, not streamed, with the reference to read back (or the marks of a first turn).

    `explore` asks P for the path that its threshold speaks against, if the history is near the threshold.
    """
    leg = {name: value for name, value in body.items() if name not in _NOT_FOR_PREFILL}
    leg["stream"] = False
    leg["max_tokens"] = 1
    leg[PARAMS] = (
        dict(FIRST_TURN) if reference is None else {**reference, "do_remote_decode": True, "do_remote_prefill": False}
    )
    if explore and reference is not None:
        extras = reference.get(KEY)
        leg[PARAMS][KEY] = {**(extras if isinstance(extras, dict) else {}), **request_extras(explore=True)}
    return dumped(leg)


def dumped(body: dict[str, Any]) -> bytes:
    """The JSON of a leg; raises RequestError (400) for one nested too deeply to write again."""
    try:
        return orjson.dumps(body)
    except TypeError:
        raise RequestError(400, "the request body is nested too deeply", code="invalid_json") from None


def decode_body(body: dict[str, Any], handover: dict[str, Any] | None, *, retain_s: float | None = None) -> bytes:
    """D's leg: the request as it came, with P's hand-over; `retain_s` asks D to keep the KV so long (0: not at all)."""
    if handover is None:
        return dumped(body)
    params = {name: value for name, value in handover.items() if name != KEY}
    if retain_s is not None:
        params[KEY] = request_extras(retain_s=retain_s)
    return dumped({**body, PARAMS: params})
