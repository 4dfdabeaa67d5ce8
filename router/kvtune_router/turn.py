"""Serves one turn: prefill leg, decode leg, relay, and one event that says what became of it.

What P and D did decides what happens next; the rules:

* A reference is handed to P once. After an answer of P it is spent; if P certainly never saw it, it is put back; else
  it is lost, and the turn goes on without it.
* A refusal that is the client's fault (4xx) goes to the client as the engine said it. A fault of an engine is mended on
  another engine, or through D alone, as long as there is one.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from kvtune_connector.wire import Report, has_fingerprint, read_incarnation, read_report, read_ttl_s
from kvtune_router.answers import AnswerError, StreamStripper, ended_at_stop_string, strip_document
from kvtune_router.config import RouterConfig
from kvtune_router.conversations import Arrival, ConversationStore, Reference
from kvtune_router.engines import Engine, Fleet
from kvtune_router.errors import RequestError, error_body
from kvtune_router.identity import Identifier, Identity, IdentityError
from kvtune_router.legs import LEG_ERRORS, Fault, LegFault, Prefilled, fault_of, prefill
from kvtune_router.requests import TurnRequest, decode_body, parse_turn, prefill_body, without_ids
from kvtune_router.resume import Diverged, Resumer
from kvtune_router.upstream import Answer, Upstream
from kvtune_telemetry import events
from kvtune_telemetry.clock import Clock
from kvtune_telemetry.recorder import RouterRecorder
from kvtune_telemetry.tracing import Tracing, TurnTrace
from kvtune_telemetry.vocabulary import Decision, NoReference, Outcome, Phase, Reason, ReferenceEnd, Role

_RESUMABLE_BYTES = 4 * 1024 * 1024
"""Streams longer than this are not kept for resuming."""
_SPENT_STATUS = 500
_MAX_REQUEST_ID = 128
_MAX_MODEL_NAME = 128
_BUSY = (429, 503)
_UNREAD = (400, 401, 403, 404, 405, 413, 415, 422, 429)
"""Refusals before any work: a reference that came with the request was not read."""

_OUTCOME_OF_REASON = {
    Reason.EXPIRED: Outcome.EXPIRED,
    Reason.REWRITTEN: Outcome.REWRITTEN,
    Reason.UNVERIFIED: Outcome.UNVERIFIED,
    Reason.CONSUMED: Outcome.CONSUMED,
    Reason.ENGINE_GONE: Outcome.ENGINE_GONE,
    Reason.READ_FAILED: Outcome.READ_FAILED,
    Reason.DISABLED: Outcome.DISABLED,
    Reason.EXPLORED: Outcome.DISABLED,
}
"""What P's reason for a recompute makes of the turn; a recompute below the threshold is a hit not worth fetching."""


def outcome_of(report: Report | None) -> Outcome:
    """What became of a reference that P answered to. A peer that reports nothing is believed to have used it."""
    if report is None or report.decision is not Decision.RECOMPUTE:
        return Outcome.HIT
    return _OUTCOME_OF_REASON.get(report.reason, Outcome.HIT)


@dataclass(slots=True)
class _Turn:
    """What is known of a turn while it runs."""

    endpoint: str
    path: str
    started_s: float
    trace: TurnTrace
    request_id: str
    request: TurnRequest
    headers: dict[str, str]
    identity: Identity | None = None
    arrival: Arrival | None = None
    held_out: bool = False
    outcome: Outcome = Outcome.NO_IDENTITY
    status: int = 499
    first_byte_s: float | None = None
    phases: dict[Phase, float] = field(default_factory=dict)
    report: Report | None = None
    explored: float | None = None
    """The propensity with which this turn's reference was sent to be explored with; None: it was not."""
    prompt_tokens: int | None = None
    prefill: Engine | None = None
    decode: Engine | None = None
    response: web.StreamResponse | None = None
    relayed: list[bytes] = field(default_factory=list)
    relayed_bytes: int = 0
    answered: bool = False
    left: bool = False
    """The client closed its connection before the end."""
    stopped: bool = False
    """The answer ended at a stop string."""
    lifted: dict[str, Any] | None = None
    error: str | None = None
    tries: int = 0


class TurnServer:
    """Serves turns with one client, one store, one fleet and one recorder."""

    def __init__(
        self,
        *,
        config: RouterConfig,
        upstream: Upstream,
        fleet: Fleet,
        store: ConversationStore,
        identifier: Identifier,
        recorder: RouterRecorder,
        tracing: Tracing,
        clock: Clock,
    ) -> None:
        self._config = config
        self._upstream = upstream
        self._fleet = fleet
        self._store = store
        self._identifier = identifier
        self._recorder = recorder
        self._tracing = tracing
        self._clock = clock

    async def serve(self, request: web.Request, endpoint: str) -> web.StreamResponse:
        """Answer one request to `/v1/chat/completions` (`endpoint` chat) or `/v1/completions` (completions).

        Raises RequestError where nothing has been sent to the client yet.
        """
        if request.content_length is not None and request.content_length > self._config.max_body_mib * 2**20:
            raise web.HTTPRequestEntityTooLarge(self._config.max_body_mib * 2**20, request.content_length)
        raw = await request.read()
        started_s = self._clock.now()
        parsed = parse_turn(raw)
        del raw
        request_id = _request_id(request)
        trace = self._tracing.start_turn(request.headers)
        turn = _Turn(endpoint, request.path, started_s, trace, request_id, parsed, self._headers(request, request_id))
        if parsed.forged:
            self._recorder.record(events.ForgedParameters())
        self._recorder.turn_started()
        try:
            self._arrive(turn, request)
            return await self._run(turn, request)
        except RequestError as error:
            turn.status, turn.error = error.status, error.message
            if turn.response is None:
                turn.outcome = Outcome.ERROR
            raise
        except (asyncio.CancelledError, ConnectionResetError):
            turn.error, turn.left = "the client left", True
            if turn.response is None:
                turn.outcome = Outcome.ERROR
            raise
        except Exception as error:
            turn.status, turn.error = 500, f"internal error ({type(error).__name__})"
            turn.outcome = Outcome.ERROR
            raise
        finally:
            self._finish(turn)

    # --- before the legs --------------------------------------------------------------------------------------------

    def _headers(self, request: web.Request, request_id: str) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "X-Request-Id": request_id, "Accept-Encoding": "identity"}
        for name in ("Authorization", "X-Session-ID"):
            if name in request.headers:
                headers[name] = request.headers[name]
        return headers

    def _arrive(self, turn: _Turn, request: web.Request) -> None:
        body = turn.request.body
        if not turn.request.splittable:
            turn.outcome = Outcome.DISABLED
            without_ids(body)
            return
        try:
            turn.identity = self._identifier.identify(request.headers, body)
        except IdentityError as error:
            raise RequestError(400, str(error), code="invalid_conversation_id") from None
        without_ids(body)
        if turn.identity is None:
            return
        now = self._clock.now()
        arrival = self._store.arrive(turn.identity, now, self._fleet.holds)
        key = arrival.conversation.key
        turn.held_out = int.from_bytes(key[:8], "little") < self._config.holdout * 2**64
        if turn.held_out and arrival.lease is not None:
            arrival.lease.put_back()
        turn.arrival = arrival
        turn.outcome = Outcome.DISABLED if turn.held_out else arrival.outcome
        if "X-Session-ID" not in turn.headers:
            turn.headers["X-Session-ID"] = key.hex()

    # --- the legs ---------------------------------------------------------------------------------------------------

    async def _run(self, turn: _Turn, request: web.Request) -> web.StreamResponse:
        turn.phases[Phase.ROUTE] = self._clock.now() - turn.started_s
        try:
            return await self._legs(turn, request)
        except RequestError as error:
            if turn.response is None:
                raise
            # The answer has begun: there is no status left to send.
            return await self._break_off(turn, error.message)

    async def _legs(self, turn: _Turn, request: web.Request) -> web.StreamResponse:
        excluded: list[Engine] = []
        fault: LegFault | None = None
        alone = False
        handover = await self._prefill(turn)
        while True:
            decode = self._fleet.pick(Role.DECODE, prefer=self._sticky(turn), exclude=excluded)
            if decode is None and fault is not None and fault.fault is Fault.BROKEN and fault.engine.up and not alone:
                # The only engine there is: once more, without anything that could have upset it.
                decode, handover, alone = fault.engine, None, True
                self._recorder.record(events.TurnRetried("decode_alone"))
            elif fault is not None and decode is not None:
                self._recorder.record(events.TurnRetried("resumed" if turn.response is not None else "other_decode"))
                if fault.fault is Fault.BROKEN:
                    # The dead engine may have read P's hand-over, which is single-use: prefill again.
                    if turn.outcome is Outcome.HIT and turn.response is None:
                        turn.outcome = Outcome.ENGINE_GONE
                    handover = await self._prefill(turn)
            if decode is None:
                raise _no_decode(fault)
            turn.decode = decode
            try:
                return await self._decode(turn, request, decode, handover)
            except LegFault as caught:
                fault = caught
                excluded.append(decode)
                if turn.response is not None and not self._can_resume(turn):
                    return await self._break_off(turn, str(fault))

    def _sticky(self, turn: _Turn) -> str | None:
        return turn.arrival.conversation.decode if turn.arrival is not None else None

    async def _prefill(self, turn: _Turn) -> dict[str, Any] | None:
        """P's hand-over for D; None when D is to prefill alone. Raises RequestError for the client's own faults."""
        if not turn.request.splittable:
            return None
        begun = self._clock.now()
        lease = turn.arrival.lease if turn.arrival is not None else None
        excluded: list[Engine] = []
        try:
            while True:
                engine = self._fleet.pick(Role.PREFILL, exclude=excluded)
                if engine is None:
                    self._recorder.record(events.TurnRetried("decode_alone"))
                    if lease is not None and lease.open:
                        lease.put_back()
                        turn.outcome = Outcome.READ_FAILED
                    return None
                reference = lease.reference if lease is not None and lease.open else None
                if reference is not None and not self._may_read(engine, reference):
                    assert lease is not None
                    lease.put_back()
                    reference, turn.outcome = None, Outcome.UNVERIFIED
                try:
                    answer = await self._prefill_leg(turn, engine, reference)
                except LegFault as fault:
                    if fault.fault is Fault.NOT_SENT:
                        self._fleet.went_down(engine)
                    elif reference is not None:
                        assert lease is not None
                        lease.end(ReferenceEnd.LOST)
                        turn.outcome = Outcome.READ_FAILED
                    excluded.append(engine)
                    self._recorder.record(events.TurnRetried("other_prefill"))
                    continue
                if answer.status < 400:
                    if reference is not None:
                        assert lease is not None
                        lease.end(ReferenceEnd.HANDED_OVER)
                    return self._accept(turn, engine, answer, reference is not None)
                if reference is not None and answer.status not in _UNREAD:
                    # An expired or failed read is an HTTP 500 on a stock engine, and what a proxy answers for an engine
                    # tells nothing of what the engine did.
                    assert lease is not None
                    lease.end(ReferenceEnd.LOST)
                    turn.outcome = Outcome.READ_FAILED
                    if answer.status in _BUSY:
                        excluded.append(engine)
                    self._recorder.record(events.TurnRetried("without_reference"))
                    continue
                if answer.status < _SPENT_STATUS and answer.status not in _BUSY:
                    if reference is not None:
                        assert lease is not None
                        lease.put_back()
                    raise _Refused(answer)
                excluded.append(engine)
                self._recorder.record(events.TurnRetried("other_prefill"))
        finally:
            turn.phases[Phase.PREFILL] = turn.phases.get(Phase.PREFILL, 0.0) + self._clock.now() - begun

    def _may_read(self, engine: Engine, reference: Reference) -> bool:
        return self._config.accept_unverified or (engine.verifies and has_fingerprint(reference.params))

    async def _prefill_leg(self, turn: _Turn, engine: Engine, reference: Reference | None) -> Prefilled:
        turn.prefill = engine
        explore = reference is not None and self._config.explore > random.random()
        turn.explored = self._config.explore if explore else None
        body = prefill_body(turn.request.body, reference.params if reference is not None else None, explore=explore)
        turn.tries += 1
        headers = dict(turn.headers)
        if turn.tries > 1:
            headers["X-Request-Id"] = f"{turn.request_id}-p{turn.tries}"
        span = turn.trace.leg("kvtune.prefill", {"server.address": engine.label, "kvtune.engine.role": "prefill"})
        headers.update(span.headers)
        result = "cancelled"
        try:
            answer = await prefill(self._upstream, engine, turn.path, body, headers)
            result = "ok" if answer.status < 400 else "refused"
            return answer
        except LegFault as fault:
            result = "failed"
            span.end(error=str(fault))
            raise
        finally:
            span.end({"kvtune.result": result})
            self._recorder.record(events.LegEnded(engine.label, Role.PREFILL, result))

    def _accept(self, turn: _Turn, engine: Engine, answer: Prefilled, handed_over: bool) -> dict[str, Any] | None:
        params = answer.params
        if params is None:
            # A prefill engine without a connector: D computes by itself.
            if handed_over:
                turn.outcome = Outcome.READ_FAILED
            return None
        incarnation = read_incarnation(params)
        if incarnation is not None:
            self._fleet.saw_incarnation(engine, incarnation)
        report = read_report(params)
        engine.verifies = report is not None
        if report is None and not engine.told and not self._config.accept_unverified:
            engine.told = True
            self._recorder.record(events.EngineProvesNothing(engine.label))
        turn.report = report
        turn.prompt_tokens = _tokens(params)
        if handed_over:
            turn.outcome = outcome_of(report)
        return params

    async def _decode(
        self, turn: _Turn, request: web.Request, engine: Engine, handover: dict[str, Any] | None
    ) -> web.StreamResponse:
        body = decode_body(turn.request.body, handover, retain_s=self._retain_s(turn))
        span = turn.trace.leg("kvtune.decode", {"server.address": engine.label, "kvtune.engine.role": "decode"})
        headers = {**turn.headers, **span.headers}
        result = "cancelled"
        begun = self._clock.now()
        engine.in_flight += 1
        try:
            with await self._upstream.post(engine.url, turn.path, body, headers) as answer:
                del body
                head_s = self._clock.now()
                turn.phases[Phase.HANDOFF] = turn.phases.get(Phase.HANDOFF, 0.0) + head_s - begun
                if answer.status >= 400:
                    result = "refused"
                    await self._refuse(turn, engine, answer)
                streamed = answer.content_type == "text/event-stream"
                relay = self._relay_stream if streamed else self._relay_document
                response = await relay(turn, request, answer, head_s)
                result = "ok"
                return response
        except LEG_ERRORS as error:
            result = "failed"
            fault = fault_of(error, engine)
            span.end(error=str(fault))
            if fault.fault is Fault.NOT_SENT:
                self._fleet.went_down(engine)
            raise fault from None
        except LegFault:
            result = "failed"
            raise
        finally:
            engine.in_flight -= 1
            span.end({"kvtune.result": result})
            self._recorder.record(events.LegEnded(engine.label, Role.DECODE, result))

    def _retain_s(self, turn: _Turn) -> float | None:
        """What to ask of D: nothing kept for what cannot come back or is held out, else the configured time, if any."""
        return 0.0 if turn.held_out or turn.arrival is None else self._config.retain

    async def _refuse(self, turn: _Turn, engine: Engine, answer: Answer) -> None:
        raw = await answer.read()
        refusal = Prefilled(answer.status, raw, answer.content_type, None)
        others = self._fleet.pick(Role.DECODE, exclude=[engine]) is not None
        busy = answer.status in _BUSY
        if turn.response is not None or (busy and others) or (answer.status >= _SPENT_STATUS and not busy):
            raise LegFault(Fault.BROKEN, engine, f"HTTP {answer.status}", refusal)
        raise _Refused(refusal)

    # --- the relay --------------------------------------------------------------------------------------------------

    def _client_headers(self, turn: _Turn) -> dict[str, str]:
        headers = {"X-Request-Id": turn.request_id}
        if self._config.outcome_header:
            headers["X-Kvtune-Outcome"] = turn.outcome.value
        return headers

    async def _relay_document(
        self, turn: _Turn, request: web.Request, answer: Answer, head_s: float
    ) -> web.StreamResponse:
        document, params = strip_document(await answer.read())
        if turn.response is not None:
            raise LegFault(Fault.BROKEN, _engine(turn), "answered a streamed request with a document")
        response = web.Response(
            status=answer.status, body=document, headers=self._client_headers(turn), content_type=answer.content_type
        )
        self._first_byte(turn, head_s)
        turn.response, turn.status = response, answer.status
        try:
            await response.prepare(request)
            await response.write_eof()
        except (ConnectionResetError, OSError):
            turn.status = 499
            raise _ClientGone from None
        turn.lifted, turn.stopped = params, ended_at_stop_string(document)
        turn.answered = True
        return response

    async def _relay_stream(
        self, turn: _Turn, request: web.Request, answer: Answer, head_s: float
    ) -> web.StreamResponse:
        stripper = StreamStripper()
        resumer: Resumer | None = None
        try:
            if turn.response is not None:
                resumer = Resumer(b"".join(turn.relayed))
                if turn.relayed and not turn.relayed[-1].endswith(b"\n\n"):
                    await self._send(turn, request, answer, b"\n", head_s)
            while data := await answer.some():
                lines = stripper.feed(data)
                if stripper.error and turn.response is None:
                    raise LegFault(Fault.BROKEN, _engine(turn), "answered with an error event")
                if lines:
                    await self._send(turn, request, answer, resumer.feed(lines) if resumer else lines, head_s)
            lines = stripper.close()
            if lines:
                await self._send(turn, request, answer, resumer.feed(lines) if resumer else lines, head_s)
        except Diverged:
            return await self._break_off(turn, "the answer could not be carried on after its engine failed")
        if not stripper.done:
            raise LegFault(Fault.BROKEN, _engine(turn), "the stream ended before [DONE]")
        response = turn.response
        assert response is not None
        if stripper.error:
            turn.error = "the engine reported an error in its stream"
        else:
            turn.lifted, turn.stopped = stripper.params, stripper.stopped
            turn.answered = True
        try:
            await response.write_eof()
        except (ConnectionResetError, OSError):
            raise _ClientGone from None
        return response

    async def _send(self, turn: _Turn, request: web.Request, answer: Answer, lines: bytes, head_s: float) -> None:
        if not lines:
            return
        try:
            if turn.response is None:
                headers = self._client_headers(turn)
                headers["Content-Type"] = answer.header(b"content-type", "text/event-stream")
                headers["Cache-Control"] = "no-cache"
                response = web.StreamResponse(status=answer.status, headers=headers)
                await response.prepare(request)
                turn.response, turn.status = response, answer.status
            await turn.response.write(lines)
        except (ConnectionResetError, OSError):
            raise _ClientGone from None
        self._first_byte(turn, head_s)
        turn.relayed_bytes += len(lines)
        if turn.relayed_bytes <= _RESUMABLE_BYTES:
            turn.relayed.append(lines)
        elif turn.relayed:
            turn.relayed.clear()

    def _first_byte(self, turn: _Turn, head_s: float) -> None:
        if turn.first_byte_s is None:
            turn.first_byte_s = self._clock.now()
            turn.phases[Phase.FIRST_TOKEN] = turn.first_byte_s - head_s

    def _can_resume(self, turn: _Turn) -> bool:
        return turn.relayed_bytes <= _RESUMABLE_BYTES

    async def _break_off(self, turn: _Turn, message: str) -> web.StreamResponse:
        """End a stream that cannot go on with an error event: the status is long sent."""
        response = turn.response
        assert response is not None
        turn.error = message
        event = b"\n\ndata: " + error_body(message, kind="server_error", code="stream_broken") + b"\n\ndata: [DONE]\n\n"
        try:
            await response.write(event)
            await response.write_eof()
        except (ConnectionResetError, OSError):
            raise _ClientGone from None
        return response

    # --- the end ----------------------------------------------------------------------------------------------------

    def _reference(self, turn: _Turn, now_s: float) -> Reference | None:
        params, decode = turn.lifted, turn.decode
        if params is None or decode is None:
            return None
        incarnation, tokens = read_incarnation(params), _tokens(params)
        if incarnation is None or tokens is None or not params.get("remote_block_ids"):
            return None
        self._fleet.saw_incarnation(decode, incarnation)
        ttl = read_ttl_s(params)
        life = (ttl if ttl is not None else self._config.ttl) - self._config.margin - self._config.handover
        return Reference(params, decode.label, incarnation, tokens, now_s, now_s + life)

    def _finish(self, turn: _Turn) -> None:
        now = self._clock.now()
        try:
            self._remember(turn, now)
        finally:
            self._record(turn, now)

    def _remember(self, turn: _Turn, now: float) -> None:
        arrival = turn.arrival
        if arrival is not None:
            if arrival.lease is not None and arrival.lease.open:
                # Cancelled, or failed, while P may have been reading.
                if turn.tries:
                    arrival.lease.end(ReferenceEnd.LOST)
                else:
                    arrival.lease.put_back()
            self._store.leave(arrival.conversation)
            reference = self._reference(turn, now) if turn.answered else None
            if reference is None and not turn.held_out:
                self._recorder.record(events.ReferenceMissed(_why_none(turn)))
            if turn.answered and turn.decode is not None and turn.identity is not None:
                self._store.answered(
                    arrival.conversation,
                    now,
                    identity=turn.identity,
                    decode=turn.decode.label,
                    reference=reference,
                    tokens=reference.tokens if reference is not None else turn.prompt_tokens or 0,
                    retained=not turn.held_out,
                )

    def _record(self, turn: _Turn, now: float) -> None:
        arrival, report = turn.arrival, turn.report
        self._recorder.record(
            events.TurnEnded(
                outcome=turn.outcome,
                followup=arrival.followup if arrival is not None else False,
                endpoint=turn.endpoint,
                status=turn.status,
                duration_s=now - turn.started_s,
                ttft_s=turn.first_byte_s - turn.started_s if turn.first_byte_s is not None else None,
                phases=turn.phases,
                streamed=turn.request.stream,
                model=turn.request.model[:_MAX_MODEL_NAME] if turn.request.model is not None else None,
                conversation=arrival.conversation.key.hex()[:16] if arrival is not None else None,
                prefill=turn.prefill.label if turn.prefill is not None else None,
                decode=turn.decode.label if turn.decode is not None else None,
                prompt_tokens=turn.prompt_tokens,
                reused_tokens=report.fetched_tokens + report.local_tokens if report is not None else None,
                decision=report.decision if report is not None else None,
                reason=report.reason if report is not None else None,
                explored=turn.explored,
                reference_age_s=arrival.reference_age_s if arrival is not None else None,
                error=turn.error,
                trace=turn.trace,
            )
        )


def _request_id(request: web.Request) -> str:
    given = request.headers.get("X-Request-Id", "")
    return given if 0 < len(given) <= _MAX_REQUEST_ID and given.isascii() and given.isprintable() else uuid.uuid4().hex


def _tokens(params: dict[str, Any]) -> int | None:
    """vLLM's `remote_num_tokens`, if it is a number of tokens."""
    tokens = params.get("remote_num_tokens")
    return tokens if type(tokens) is int and 0 <= tokens < 2**31 else None


def _why_none(turn: _Turn) -> NoReference:
    if turn.left:
        return NoReference.CLIENT_GONE
    if not turn.answered:
        return NoReference.ERROR
    return NoReference.STOP_STRING if turn.stopped else NoReference.NOT_SENT


def _no_decode(fault: LegFault | None) -> RequestError:
    if fault is None:
        return RequestError(503, "no decode engine is available", kind="server_error", code="no_decode_engine")
    if fault.refusal is not None:
        return _Refused(fault.refusal)
    if fault.fault is Fault.NOT_SENT:
        return RequestError(
            503, f"no decode engine is available: {fault}", kind="server_error", code="no_decode_engine"
        )
    return RequestError(502, f"the decode leg failed: {fault}", kind="server_error", code="decode_failed")


def _engine(turn: _Turn) -> Engine:
    assert turn.decode is not None
    return turn.decode


class _Refused(RequestError):
    """An engine refused the request; its own words go to the client."""

    def __init__(self, answer: Prefilled) -> None:
        super().__init__(answer.status, f"refused by the engine with HTTP {answer.status}")
        self.answer = answer
        self.content_type = answer.content_type

    def body(self) -> bytes:
        try:
            return strip_document(self.answer.body)[0]
        except AnswerError:
            return self.answer.body


class _ClientGone(ConnectionResetError):
    """The client closed its connection."""
