"""The HTTP server of the gateway; it lives on one event loop, in a thread or process that ``proxy`` gives it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Mapping
from typing import Any, Final

import aiohttp
from aiohttp import web

from agentlightning.store.protocol import LightningStore
from agentlightning.store.span_writer import SpanWriter
from agentlightning_plugins.gateway.backend import ModelTable
from agentlightning_plugins.gateway.call import Call, Trace, call_to_span
from agentlightning_plugins.gateway.dialect import Asked, Completion, Dialect
from agentlightning_plugins.gateway.ended import EndedAttempts
from agentlightning_plugins.gateway.json_text import dump_json, parse_json
from agentlightning_plugins.gateway.openai_dialect import CHAT, COMPLETIONS, read_version
from agentlightning_plugins.gateway.stream import StreamReader
from agentlightning_plugins.gateway.upstream import Reply, Upstream, refuse, relayed_headers

logger = logging.getLogger("agentlightning")

_PATH: Final = re.compile(r"(?:/rollout/([^/]+)/attempt/([^/]+))?/v1/(.+?)/?")
_DIALECTS: Final[dict[str, Dialect]] = {dialect.path: dialect for dialect in (CHAT, COMPLETIONS)}
_MAX_BODY_BYTES: Final = 1 << 28
_SHUTDOWN_S: Final = 2.0
_TAIL_S: Final = 0.1
_GONE: Final = "the agent disconnected before the answer was complete"
_UNREAD: Final = (AttributeError, KeyError, TypeError, ValueError)  # what reading a wrong answer raises


class GatewayServer:
    """Relays calls to backends and hands a span of each to the store. Every method belongs to one event loop."""

    models: ModelTable
    """Whoever replaces it changes what the next call is offered."""

    def __init__(self, store: LightningStore, models: ModelTable, num_retries: int) -> None:
        self.models = models
        self._store = store
        self._num_retries = num_retries
        self._ended = EndedAttempts()
        self._warned: set[str] = set()

    async def start(self, host: str, port: int) -> int:
        """Begins to serve; returns the port, which is the one asked for unless that was 0.

        Raises:
            OSError: the address cannot be bound.
        """
        self._upstream = Upstream(self._num_retries)
        server = web.Server(self._handle, request_factory=_make_request, handler_cancellation=True, access_log=None)
        self._runner = web.ServerRunner(server, shutdown_timeout=_SHUTDOWN_S)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port, backlog=1024).start()
        except OSError:
            await self._runner.cleanup()
            await self._upstream.close()
            raise
        self._writer = SpanWriter.shared(self._store)  # so that whoever waits for an attempt's spans waits for ours too
        self._following = asyncio.create_task(self._ended.follow(self._store))
        bound: int = self._runner.addresses[0][1]
        return bound

    async def stop(self) -> None:
        """Ends open calls after a short wait and stores what was recorded."""
        self._following.cancel()
        await self._runner.cleanup()
        await self._upstream.close()
        await self.flush()
        self._writer.release()

    async def flush(self) -> None:
        """Returns when every call answered so far is in the store."""
        await self._writer.flush()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        target = _PATH.fullmatch(request.path)
        path = target[3] if target is not None else ""
        dialect = _DIALECTS.get(path)
        if target is None or dialect is None:
            return self._handle_other(request, path)
        attempt = (target[1], target[2]) if target[1] is not None else None
        if attempt is not None and self._ended.is_over(attempt):
            message = f"attempt {attempt[1]} of rollout {attempt[0]} is over; its calls are refused"
            return _respond(refuse(dialect, 410, message, "attempt_over"))
        call = await _read_call(request, dialect, attempt)
        if isinstance(call, Reply):
            return _respond(call)
        backends = self.models.route(call.model, attempt and attempt[0], time.monotonic())
        if not backends:
            message = f"no model {call.model!r}; models: {', '.join(self.models.names) or 'none yet'}"
            return self._fail(call, refuse(dialect, 404, message, "model_not_found"))
        try:
            outcome = await self._upstream.send(call, backends, request.headers)
            if isinstance(outcome, Reply):
                return self._relay(call, outcome)
            async with outcome:
                return await self._relay_stream(call, outcome, request)
        except asyncio.CancelledError:  # what the server does to a handler whose client is gone
            self._record(call, error=_GONE)
            raise

    def _handle_other(self, request: web.BaseRequest, path: str) -> web.Response:
        names = self.models.names
        models = [{"id": name, "object": "model", "created": 0, "owned_by": "agentlightning"} for name in names]
        if path == "models":
            return web.Response(body=dump_json({"object": "list", "data": models}), content_type="application/json")
        if path.startswith("models/") and path.removeprefix("models/") in names:
            model = models[names.index(path.removeprefix("models/"))]
            return web.Response(body=dump_json(model), content_type="application/json")
        known = ", ".join(f"/v1/{known}" for known in (*_DIALECTS, "models"))
        return _respond(refuse(CHAT, 404, f"no {request.method} {request.path} here; there is {known}", "not_found"))

    def _fail(self, call: Call, reply: Reply) -> web.Response:
        call.http_status = reply.status
        self._record(call, error=reply.error)
        return _respond(reply)

    def _relay(self, call: Call, reply: Reply) -> web.Response:
        if reply.error is not None:
            return self._fail(call, reply)
        if call.attempt is None:
            return _respond(reply)
        try:
            answer = parse_json(reply.body)
            call.dialect.read_answer(answer, call.completion)
            is_changed = call.dialect.restore(answer, call.asked)
        except _UNREAD as error:
            call.completion = Completion()
            excerpt = reply.body[:200].decode(errors="replace")
            message = f"the backend's answer is not one of {call.dialect.path} ({error!r}): {excerpt}"
            return self._fail(call, refuse(call.dialect, 502, message, "bad_gateway"))
        self._read_version(call, reply.headers)
        call.is_complete = True
        self._record(call)
        return _respond(reply._replace(body=dump_json(answer)) if is_changed else reply)

    async def _relay_stream(
        self, call: Call, upstream: aiohttp.ClientResponse, request: web.BaseRequest
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers=relayed_headers(upstream.headers))
        await response.prepare(request)
        self._read_version(call, upstream.headers)
        reader, failure, shown = StreamReader(call), None, b""
        try:
            while not reader.is_done:
                try:
                    piece = await upstream.content.readany()
                except (aiohttp.ClientError, TimeoutError, OSError) as error:
                    failure = f"the backend broke off its answer: {error!r}"
                    break
                if not piece:
                    break
                shown = reader.feed(piece)
                if shown and not reader.is_done:
                    await response.write(shown)
            last = shown if reader.is_done else reader.close(failure)
            self._record(call)
            await response.write_eof(last)
        except ConnectionResetError:
            self._record(call, error=_GONE)
            return response
        if not upstream.content.at_eof():  # else the connection could not be used again
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                async with asyncio.timeout(_TAIL_S):
                    await upstream.content.readany()
        return response

    def _read_version(self, call: Call, headers: Mapping[str, str]) -> None:
        if call.completion.weight_version is None:
            call.completion.weight_version = read_version(headers.get("x-weight-version"))

    def _record(self, call: Call, error: str | None = None) -> None:
        """Hands a finished call to the span writer, once.

        Always before the agent sees the end of its answer: whoever has an answer may rely on a flush, ours or the
        writer's, to bring its span to the store.
        """
        if call.attempt is None or call.end_time:
            return
        call.end_time = time.time()
        call.error = call.error or error
        self._writer.put(call_to_span(call))
        if call.is_complete and call.model not in self._warned:
            self._check_token_ids(call)

    def _check_token_ids(self, call: Call) -> None:
        if all(choice.token_ids is not None for choice in call.completion.choices.values()):
            return
        self._warned.add(call.model)
        logger.warning(
            "model %r at %s gives no token ids, so its calls cannot train a model (prompts can still be tuned). "
            "Serve it with vLLM >= 0.10.2 or another server that understands return_token_ids",
            call.model,
            call.backend.endpoint if call.backend is not None else "?",
        )


async def _read_call(request: web.BaseRequest, dialect: Dialect, attempt: tuple[str, str] | None) -> Call | Reply:
    if request.method != "POST":
        return refuse(dialect, 405, f"{request.path} takes POST, not {request.method}", "method_not_allowed")
    text = await request.read()
    try:
        body = parse_json(text)
    except ValueError as error:
        return refuse(dialect, 400, f"the request is not JSON: {error}", "invalid_json")
    model = body.get("model") if isinstance(body, dict) else None
    if not isinstance(model, str):
        return refuse(dialect, 400, "the request is not an object with a 'model'", "invalid_request")
    return Call(
        attempt=attempt,
        dialect=dialect,
        text=text,
        body=body,
        model=model,
        asked=Asked(True, True) if attempt is None else dialect.read_asked(body),
        trace=Trace.from_header(request.headers.get("traceparent")),
    )


def _make_request(message: Any, payload: Any, protocol: Any, writer: Any, task: asyncio.Task[None]) -> web.BaseRequest:
    loop = asyncio.get_running_loop()
    return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=_MAX_BODY_BYTES)


def _respond(reply: Reply) -> web.Response:
    return web.Response(status=reply.status, body=reply.body, headers=reply.headers)
