"""One request to one engine: what can come of it, in words the turn can decide on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kvtune_router.answers import AnswerError, strip_document
from kvtune_router.engines import Engine
from kvtune_router.upstream import NotSent, Upstream, UpstreamError


class Fault(Enum):
    """Why an engine gave no HTTP answer."""

    NOT_SENT = "not_sent"
    """The connection was refused: the engine certainly did nothing."""
    BROKEN = "broken"
    """The connection broke, timed out, or brought no valid answer: the engine may have done anything."""


class LegFault(Exception):
    """A leg without a usable answer."""

    def __init__(self, fault: Fault, engine: Engine, detail: str, refusal: Prefilled | None = None) -> None:
        super().__init__(f"{engine.role.value} engine {engine.label}: {detail}")
        self.fault = fault
        self.engine = engine
        self.refusal = refusal
        """What the engine answered, where it answered with an error."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """P's answer to its leg."""

    status: int
    body: bytes
    content_type: str
    params: dict[str, Any] | None
    """P's `kv_transfer_params` for D."""


def fault_of(error: BaseException, engine: Engine) -> LegFault:
    """Sort what a leg raised."""
    return LegFault(Fault.NOT_SENT if isinstance(error, NotSent) else Fault.BROKEN, engine, str(error))


LEG_ERRORS = (UpstreamError, AnswerError)
"""What a leg can raise besides cancellation."""


async def prefill(upstream: Upstream, engine: Engine, path: str, body: bytes, headers: Mapping[str, str]) -> Prefilled:
    """Send P's leg and read its answer. Raises LegFault."""
    engine.in_flight += 1
    try:
        with await upstream.post(engine.url, path, body, headers) as answer:
            raw = await answer.read()
            params = None
            if answer.status < 400:
                _, params = strip_document(raw)
            return Prefilled(answer.status, raw, answer.content_type, params)
    except LEG_ERRORS as error:
        raise fault_of(error, engine) from None
    finally:
        engine.in_flight -= 1
