"""OpenAI's API in front of a simulated engine, in vLLM's words: fields, ids, chunk order, error shape.

`python -m kvtune_bench.engine_server JSON` runs one engine with the `EngineConfig` given as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import orjson
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import StreamReader
from aiohttp.web_protocol import RequestHandler
from loguru import logger

from kvtune_bench import tokens
from kvtune_bench.calibration import Calibration, CalibrationError
from kvtune_bench.engine import Engine, EngineConfig, EngineError, Job, Reference
from kvtune_bench.faults import FaultError
from kvtune_telemetry.clock import Clock
from kvtune_telemetry.exposition import render
from kvtune_telemetry.logs import setup_logging

Endpoint = Literal["chat", "completions"]

DEFAULT_MAX_TOKENS = 16
MAX_BODY_BYTES = 64 << 20
MAX_CHUNKS = 32
"""Chunks an answer is cut into when no chunk size is set."""
MAX_CHOICES = 128
_WRONG_KV_SEED = 0x5EED
_SHUTDOWN_S = 0.2
_JSON = "application/json"
_SSE_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
_DONE = b"data: [DONE]\n\n"
_PLAIN: dict[Endpoint, bytes] = {
    "chat": b'%d,"delta":{"content":"%b"},"logprobs":null,"finish_reason":null,"token_ids":null}]',
    "completions": b'%d,"text":"%b","logprobs":null,"finish_reason":null,"stop_reason":null,"token_ids":null}]',
}
_ERROR_TYPES = {400: "BadRequestError", 404: "NotFoundError", 405: "BadRequestError", 413: "BadRequestError"}

OBJECTS: dict[tuple[Endpoint, bool], str] = {
    ("chat", False): "chat.completion",
    ("chat", True): "chat.completion.chunk",
    ("completions", False): "text_completion",
    ("completions", True): "text_completion",
}
"""The `object` field, by endpoint and whether it streams."""


class _Refusal(Exception):
    """An error answer in OpenAI's shape."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param

    def response(self) -> web.Response:
        error = {
            "message": self.message,
            "type": _ERROR_TYPES.get(self.status, "InternalServerError"),
            "param": self.param,
            "code": self.status,
        }
        return web.Response(body=orjson.dumps({"error": error}), status=self.status, content_type=_JSON)


@dataclass(slots=True)
class _Ask:
    """A checked request."""

    endpoint: Endpoint
    reply_id: str
    prompts: list[bytes]
    """One prompt, or several of a batch; only the first one's KV is simulated."""
    max_tokens: int
    choices: int
    stream: bool
    include_usage: bool
    logprobs: int | None
    stop: tuple[str, ...]
    params: Mapping[str, Any] | None
    salt: bytes
    reasoning: bool
    tool_call: bool
    finish: Literal["length", "stop"]


@dataclass(slots=True)
class _Choice:
    """One answer, in the pieces it is streamed in."""

    index: int
    answer: tokens.Answer
    tokens: int
    finish_reason: str
    aborted: bool = False
    plain: bytes | None = None
    """The text, if there is nothing else."""
    parts: list[tuple[str, str, int, int]] = field(default_factory=list)
    """(delta field, text, first token, last token + 1)."""

    def __post_init__(self) -> None:
        answer, start = self.answer, 0
        if answer.reasoning is not None:
            start = len(answer.reasoning) // tokens.TOKEN_BYTES
            self.parts.append(("reasoning_content", answer.reasoning, 0, start))
        if answer.tool_calls:
            self.parts.append(("tool_calls", answer.tool_calls[0]["function"]["arguments"], start, self.tokens))
        elif answer.content is not None:
            self.parts.append(("content", answer.content, start, self.tokens))
            if start == 0:
                self.plain = answer.content.encode()


class EngineServer:
    """One simulated engine behind HTTP."""

    def __init__(self, config: EngineConfig, *, clock: Clock | None = None, model: Calibration | None = None) -> None:
        """Raises CalibrationError or ValueError for settings that make no sense."""
        self.config = config
        self.engine = Engine(config, clock=clock, model=model)
        self.url = ""
        """`http://HOST:PORT`, once started."""
        self._web: web.Server | None = None
        self._listener: asyncio.Server | None = None
        self._routes: dict[str, dict[str, Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]]] = {
            "/v1/chat/completions": {"POST": self._chat},
            "/v1/completions": {"POST": self._completions},
            "/v1/models": {"GET": self._models},
            "/health": {"GET": self._health},
            "/metrics": {"GET": self._metrics},
            "/sim/faults": {"GET": self._get_faults, "POST": self._set_faults},
            "/sim/state": {"GET": self._state},
        }

    async def start(self) -> None:
        """Listen. Raises OSError if a port is taken."""
        loop = asyncio.get_running_loop()
        await self.engine.serve()
        server = web.Server(
            self._handle, request_factory=_request, handler_cancellation=True, access_log=None, tcp_keepalive=True
        )
        try:
            self._listener = await loop.create_server(server, self.config.host, self.config.port, backlog=1024)
        except OSError:
            await self.engine.close()
            raise
        self._web = server
        host, port = self._listener.sockets[0].getsockname()[:2]
        self.url = f"http://{host}:{port}"

    async def close(self) -> None:
        """Stop at once: requests in flight are dropped, retentions end as aborted."""
        if self._listener is not None:
            self._listener.close()
        if self._web is not None:
            await self._web.shutdown(_SHUTDOWN_S)
        await self.engine.close()

    # --- dispatch ---------------------------------------------------------------------------------------------------

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        methods = self._routes.get(request.path)
        if methods is None:
            return _Refusal(404, f"Not Found: {request.path}").response()
        handler = methods.get(request.method)
        if handler is None:
            return _Refusal(405, f"Method Not Allowed: use {' or '.join(methods)}").response()
        try:
            return await handler(request)
        except _Refusal as refusal:
            return refusal.response()
        except EngineError as error:
            return _Refusal(error.status, str(error)).response()
        except web.HTTPRequestEntityTooLarge:
            return _Refusal(413, f"request body is larger than {MAX_BODY_BYTES} bytes").response()

    async def _health(self, _: web.BaseRequest) -> web.Response:
        return web.Response()

    async def _models(self, _: web.BaseRequest) -> web.Response:
        card = {
            "id": self.engine.model_name,
            "object": "model",
            "created": int(self.engine.clock.unix()),
            "owned_by": "vllm",
            "root": self.engine.model.name,
            "parent": None,
            "max_model_len": self.engine.model.context_tokens,
            "permission": [],
        }
        return _json({"object": "list", "data": [card]})

    async def _metrics(self, request: web.BaseRequest) -> web.Response:
        body, content_type = render(self.engine.registry, request.headers.get("Accept"))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _state(self, _: web.BaseRequest) -> web.Response:
        return _json(self.engine.state())

    async def _get_faults(self, _: web.BaseRequest) -> web.Response:
        return _json(self.engine.faults.as_dict())

    async def _set_faults(self, request: web.BaseRequest) -> web.Response:
        try:
            self.engine.faults = self.engine.faults.merged(_load(await request.read()))
        except FaultError as error:
            raise _Refusal(400, str(error)) from None
        return _json(self.engine.faults.as_dict())

    async def _chat(self, request: web.BaseRequest) -> web.StreamResponse:
        body = self._body(await request.read())
        logprobs = None
        if body.get("logprobs"):
            logprobs = _whole(body, "top_logprobs", 0, low=0, high=20)
        try:
            prompt = tokens.render_chat(
                body.get("messages", ()),
                body.get("add_generation_prompt", True) is not False,
                tools=body.get("tools") if isinstance(body.get("tools"), list) else None,
            )
        except tokens.PromptError as error:
            raise _Refusal(400, str(error), "messages") from None
        limit = body.get("max_completion_tokens")
        name = "max_completion_tokens" if limit is not None else "max_tokens"
        return await self._answer(request, _ask("chat", request, body, [prompt], name, logprobs))

    async def _completions(self, request: web.BaseRequest) -> web.StreamResponse:
        body = self._body(await request.read())
        logprobs = None if body.get("logprobs") is None else _whole(body, "logprobs", 0, low=0, high=20)
        prompt = body.get("prompt")
        batch = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], (str, list))
        items: list[Any] = prompt if batch else [prompt]  # type: ignore[assignment]
        try:
            prompts = [tokens.render_completion(item) for item in items]
        except tokens.PromptError as error:
            raise _Refusal(400, str(error), "prompt") from None
        return await self._answer(request, _ask("completions", request, body, prompts, "max_tokens", logprobs))

    def _body(self, raw: bytes) -> dict[str, Any]:
        body = _load(raw)
        if not isinstance(body, dict):
            raise _Refusal(400, "the request body must be a JSON object")
        model = body.get("model", self.engine.model_name)
        if model != self.engine.model_name:
            raise _Refusal(404, f"The model `{model}` does not exist.", "model")
        return body

    # --- answering --------------------------------------------------------------------------------------------------

    async def _answer(self, request: web.BaseRequest, ask: _Ask) -> web.StreamResponse:
        engine, faults = self.engine, self.engine.faults
        if faults.http_500_rate and engine.random.random() < faults.http_500_rate:
            raise _Refusal(500, "Internal server error")
        if faults.hang:
            await asyncio.get_running_loop().create_future()
        refuses = faults.prefill_500_with_reference and ask.params and ask.params.get("do_remote_decode")
        if refuses and Reference.parse(ask.params or {}) is not None:
            raise _Refusal(500, "Internal server error")
        suffix = "-0" if ask.endpoint == "completions" else ""
        request_id = f"{ask.reply_id}{suffix}-{uuid.uuid4().hex[:8]}"
        job = engine.job(request_id, ask.prompts[0], ask.max_tokens, ask.params, ask.salt)
        await engine.start(job)
        try:
            choices = self._choices(ask, job)
            if faults.delay_first_byte_s:
                await engine.clock.sleep(faults.delay_first_byte_s)
            if ask.stream:
                return await self._stream(request, ask, job, choices)
            await engine.until(engine.token_s(job, choices[0].tokens))
            return _json(_whole_reply(ask, self._head(ask), choices, self._finish(job, ask, choices)))
        finally:
            # After `finish` this changes nothing; before it, the client left or the stream was cut.
            engine.abandon(job)

    def _choices(self, ask: _Ask, job: Job) -> list[_Choice]:
        made: list[_Choice] = []
        for prompt in ask.prompts:
            for choice in range(ask.choices):
                seed = tokens.answer_seed(prompt, choice) ^ (_WRONG_KV_SEED if job.wrong else 0)
                answer = tokens.answer(seed, ask.max_tokens, reasoning=ask.reasoning, tool_call=ask.tool_call)
                made.append(_stopped(len(made), answer, ask))
        return made

    def _finish(self, job: Job, ask: _Ask, choices: list[_Choice]) -> dict[str, Any] | None:
        first = choices[0]
        extra = sum(choice.tokens for choice in choices[1:])
        return self.engine.finish(
            job, first.answer.tokens, reason=ask.finish, aborted=first.aborted, extra_tokens=extra
        )

    def _head(self, ask: _Ask) -> dict[str, Any]:
        return {
            "id": ask.reply_id,
            "object": OBJECTS[ask.endpoint, ask.stream],
            "created": int(self.engine.clock.unix()),
            "model": self.engine.model_name,
        }

    async def _stream(
        self, request: web.BaseRequest, ask: _Ask, job: Job, choices: list[_Choice]
    ) -> web.StreamResponse:
        engine = self.engine
        cut_after = engine.faults.cut_stream_after_chunks
        # Without delays a whole answer is one write, unless a chunk size was asked for: then each chunk is its own.
        at_once = self.config.instant and self.config.chunk_tokens is None and cut_after is None
        response = web.StreamResponse(headers=_SSE_HEADERS)
        pending: list[bytes] = []
        written = 0
        try:
            await response.prepare(request)
            async for chunk in self._chunks(ask, job, choices):
                if at_once:
                    pending.append(chunk)
                    continue
                if cut_after is not None and written >= cut_after:
                    if request.transport is not None:
                        request.transport.close()
                    return response
                await response.write(chunk)
                written += 1
                if self.config.instant:
                    await asyncio.sleep(0)
            if pending:
                await response.write(b"".join(pending))
            await response.write_eof()
        except ConnectionError:
            logger.debug("client of {} left", ask.reply_id)
        return response

    async def _chunks(self, ask: _Ask, job: Job, choices: list[_Choice]) -> AsyncIterator[bytes]:
        engine = self.engine
        chat = ask.endpoint == "chat"
        head = self._head(ask)
        prefix = b"data: " + orjson.dumps(head)[:-1] + b',"choices":[{"index":'
        if chat:
            for choice in choices:
                yield prefix + (
                    b'%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],'
                    b'"prompt_token_ids":null}\n\n' % choice.index
                )
        longest = max(choices, key=lambda choice: choice.tokens)
        steps = _steps(longest, self.config.chunk_tokens)
        params: dict[str, Any] | None = None
        for low, high in steps:
            await engine.until(engine.token_s(job, high))
            if high == longest.tokens:
                params = self._finish(job, ask, choices)
            for choice in choices:
                if low >= choice.tokens:
                    continue
                last = high >= choice.tokens
                end = b"}\n\n"
                if last and choice is choices[-1] and params is not None and self.config.stream_params:
                    end = b',"kv_transfer_params":' + orjson.dumps(params) + end
                yield prefix + _piece(ask, choice, low, min(high, choice.tokens), last) + end
        if ask.include_usage:
            yield b"data: " + orjson.dumps({**head, "choices": [], "usage": _usage(ask, choices)}) + b"\n\n"
        yield _DONE


def _steps(choice: _Choice, chunk_tokens: int | None) -> list[tuple[int, int]]:
    """Token ranges of the chunks: the first token alone, then `chunk_tokens` each, never across parts of the answer."""
    total = choice.tokens
    size = chunk_tokens or -(-(total - 1) // (MAX_CHUNKS - 1)) or 1
    edges = {0, *range(1, total, size), total}
    edges.update(start for _, _, start, _ in choice.parts)
    ordered = sorted(edges)
    return list(pairwise(ordered))


def _piece(ask: _Ask, choice: _Choice, low: int, high: int, last: bool) -> bytes:
    """The choice object of a chunk, from after `"index":` to the end of `choices`."""
    if choice.plain is not None and not last and ask.logprobs is None:
        # Nearly every chunk: plain ASCII text that needs no escaping.
        text_bytes = choice.plain[low * tokens.TOKEN_BYTES : high * tokens.TOKEN_BYTES]
        return _PLAIN[ask.endpoint] % (choice.index, text_bytes)
    kind, text, start, end = next(part for part in choice.parts if part[2] <= low < part[3])
    if kind == "tool_calls":
        # The arguments are not one character in four a token: spread over the tokens of the whole call.
        cuts = (len(text) * (edge - start) // (end - start) for edge in (low, high))
    else:
        cuts = ((edge - start) * tokens.TOKEN_BYTES for edge in (low, high))
    piece = text[next(cuts) : next(cuts)]
    quoted = orjson.dumps(piece)
    if ask.endpoint == "completions":
        body = b'"text":' + quoted
    elif kind == "tool_calls":
        call = choice.answer.tool_calls[0]
        opening = b""
        if low == start:
            opening = b'"id":%b,"type":"function",' % orjson.dumps(call["id"])
            quoted = b'%b,"name":%b' % (quoted, orjson.dumps(call["function"]["name"]))
        body = b'"delta":{"tool_calls":[{"index":0,%b"function":{"arguments":%b}}]}' % (opening, quoted)
    else:
        body = b'"delta":{"%b":%b}' % (kind.encode(), quoted)
    logprobs = b"null" if ask.logprobs is None else orjson.dumps(_logprobs(ask, piece, low))
    finish = orjson.dumps(choice.finish_reason if last else None)
    reason = b',"stop_reason":null' if last or ask.endpoint == "completions" else b""
    return b'%d,%b,"logprobs":%b,"finish_reason":%b%b,"token_ids":null}]' % (
        choice.index, body, logprobs, finish, reason,
    )  # fmt: skip


def _stopped(index: int, answer: tokens.Answer, ask: _Ask) -> _Choice:
    """The choice, cut before the first stop string in it."""
    reason = "tool_calls" if answer.tool_calls else ask.finish
    if ask.stop and answer.content is not None and answer.reasoning is None:
        places = [place for text in ask.stop if (place := answer.content.find(text)) >= 0]
        if places:
            place = min(places)
            used = place // tokens.TOKEN_BYTES + 1
            size = used * tokens.TOKEN_BYTES
            cut = tokens.Answer(answer.tokens[:size], answer.content[:place])
            return _Choice(index, cut, used, "stop", aborted=True)
    return _Choice(index, answer, ask.max_tokens, reason)


def _whole_reply(
    ask: _Ask, head: dict[str, Any], choices: list[_Choice], params: dict[str, Any] | None
) -> dict[str, Any]:
    """The answer in one piece."""
    rendered = []
    for choice in choices:
        answer = choice.answer
        text = answer.content or ""
        common = {
            "index": choice.index,
            "logprobs": None if ask.logprobs is None else _logprobs(ask, text, 0),
            "finish_reason": choice.finish_reason,
            "stop_reason": None,
            "token_ids": None,
        }
        if ask.endpoint == "completions":
            rendered.append({**common, "text": text, "prompt_logprobs": None, "prompt_token_ids": None})
            continue
        message = {
            "role": "assistant",
            "content": answer.content,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "tool_calls": list(answer.tool_calls),
            "reasoning_content": answer.reasoning,
        }
        rendered.append({**common, "message": message})
    reply = {
        **head,
        "choices": rendered,
        "service_tier": None,
        "system_fingerprint": None,
        "usage": _usage(ask, choices),
        "kv_transfer_params": params,
    }
    if ask.endpoint == "chat":
        reply |= {"prompt_logprobs": None, "prompt_token_ids": None}
    return reply


def _usage(ask: _Ask, choices: list[_Choice]) -> dict[str, Any]:
    prompt = sum(len(item) for item in ask.prompts) // tokens.TOKEN_BYTES
    completion = sum(choice.tokens for choice in choices)
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": None,
    }


def _logprobs(ask: _Ask, text: str, first: int) -> dict[str, Any]:
    pieces = [text[at : at + tokens.TOKEN_BYTES] for at in range(0, len(text), tokens.TOKEN_BYTES)]
    values = [-((first + index) % 7 + 1) / 8 for index in range(len(pieces))]
    top = ask.logprobs or 0
    if ask.endpoint == "chat":
        content = []
        for piece, value in zip(pieces, values, strict=True):
            entry = {"token": piece, "logprob": value, "bytes": list(piece.encode())}
            content.append({**entry, "top_logprobs": [entry] * min(1, top)})
        return {"content": content}
    return {
        "text_offset": [first * tokens.TOKEN_BYTES + index * tokens.TOKEN_BYTES for index in range(len(pieces))],
        "token_logprobs": values,
        "tokens": pieces,
        "top_logprobs": [{piece: value} for piece, value in zip(pieces, values, strict=True)] if top else [],
    }


# --- reading requests -----------------------------------------------------------------------------------------------


def _request(
    message: RawRequestMessage,
    payload: StreamReader,
    protocol: RequestHandler,
    writer: AbstractStreamWriter,
    task: asyncio.Task[None],
) -> web.BaseRequest:
    loop = asyncio.get_running_loop()
    return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=MAX_BODY_BYTES)


def _load(raw: bytes) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise _Refusal(400, f"the request body is not valid JSON: {error}") from None


def _whole(body: Mapping[str, Any], name: str, default: int, *, low: int, high: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _Refusal(400, f"{name} must be an integer between {low} and {high}, got {value!r}", name)
    return value


def _ask(
    endpoint: Endpoint,
    request: web.BaseRequest,
    body: Mapping[str, Any],
    prompts: list[bytes],
    limit_name: str,
    logprobs: int | None,
) -> _Ask:
    params = body.get("kv_transfer_params")
    if params is not None and not isinstance(params, dict):
        raise _Refusal(400, "kv_transfer_params must be an object", "kv_transfer_params")
    stop = body.get("stop") or []
    stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list) else None
    if stops is None or not all(isinstance(text, str) and text for text in stops):
        raise _Refusal(400, "stop must be a string or a list of strings", "stop")
    options = body.get("stream_options")
    salt = body.get("cache_salt")
    if salt is not None and not isinstance(salt, str):
        raise _Refusal(400, "cache_salt must be a string", "cache_salt")
    sim = body.get("sim") or {}
    if not isinstance(sim, dict) or sim.get("finish", "length") not in ("length", "stop"):
        raise _Refusal(400, 'sim must be an object; its "finish" is "length" or "stop"', "sim")
    base = request.headers.get("X-Request-Id") or uuid.uuid4().hex
    ask = _Ask(
        endpoint=endpoint,
        reply_id=f"{'chatcmpl' if endpoint == 'chat' else 'cmpl'}-{base}",
        prompts=prompts,
        max_tokens=_whole(body, limit_name, DEFAULT_MAX_TOKENS, low=1, high=1 << 24),
        choices=_whole(body, "n", 1, low=1, high=MAX_CHOICES),
        stream=body.get("stream") is True,
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        logprobs=logprobs,
        stop=stops,
        params=params,
        salt=(salt or "").encode(),
        reasoning=endpoint == "chat" and sim.get("reasoning") is True,
        tool_call=endpoint == "chat" and sim.get("tool_call") is True,
        finish=sim.get("finish", "length"),
    )
    if ask.tool_call:
        try:
            tokens.answer(0, ask.max_tokens, reasoning=ask.reasoning, tool_call=True)
        except tokens.PromptError as error:
            raise _Refusal(400, str(error), limit_name) from None
    return ask


def _json(data: Any) -> web.Response:
    return web.Response(body=orjson.dumps(data), content_type=_JSON)


# --- running --------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def running_engine(
    config: EngineConfig, *, clock: Clock | None = None, model: Calibration | None = None
) -> AsyncIterator[EngineServer]:
    """An engine that serves inside this event loop while the block runs."""
    server = EngineServer(config, clock=clock, model=model)
    await server.start()
    try:
        yield server
    finally:
        await server.close()


async def _serve(config: EngineConfig) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        server = EngineServer(config)
    except (CalibrationError, ValueError) as error:
        print(f"kvtune bench engine: {error}", file=sys.stderr)
        return 2
    try:
        await server.start()
    except OSError as error:
        where = f"{config.host}:{config.port} (side channel {config.side_channel_port})"
        print(f"kvtune bench engine: cannot listen on {where}: {error.strerror or error}", file=sys.stderr)
        return 1
    logger.info("{} {} engine {} on {}", config.connector, config.role, server.engine.engine_id, server.url)
    try:
        print(f"ready {server.url}", flush=True)
        await stop.wait()
    finally:
        await server.close()
    return 0


def run_engine(config: EngineConfig, *, log_level: str = "WARNING") -> int:
    """Run an engine until SIGTERM or SIGINT; the exit status. Prints one line `ready URL` on stdout when it serves."""
    import uvloop

    setup_logging(level=log_level)
    with contextlib.suppress(KeyboardInterrupt):
        return int(uvloop.run(_serve(config)))
    return 0


if __name__ == "__main__":
    sys.exit(run_engine(EngineConfig(**json.loads(sys.argv[1]))))
