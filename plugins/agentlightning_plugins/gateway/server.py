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

from agentlightning.errors import StoreError
from agentlightning.store.protocol import LightningStore
from agentlightning.store.span_writer import SpanWriter
from agentlightning_plugins.gateway.backends.backend import Backend, ModelTable, describe_error
from agentlightning_plugins.gateway.backends.health import HealthCheck
from agentlightning_plugins.gateway.backends.idle_timeout import IdleTimeout
from agentlightning_plugins.gateway.backends.provider import BackendAnswer
from agentlightning_plugins.gateway.backends.upstream import Reply, Upstream, refuse, relayed_headers
from agentlightning_plugins.gateway.control import PATHS as CONTROLS
from agentlightning_plugins.gateway.control import Controls, json_response
from agentlightning_plugins.gateway.dialects.dialect import Completion, Dialect, load_dialects
from agentlightning_plugins.gateway.dialects.json_text import dump_json, parse_json
from agentlightning_plugins.gateway.dialects.model_list import list_models
from agentlightning_plugins.gateway.dialects.openai import CHAT, read_version
from agentlightning_plugins.gateway.limits.admission import Admission
from agentlightning_plugins.gateway.limits.budget import BudgetLedger, read_usage
from agentlightning_plugins.gateway.limits.ended_attempt import EndedAttempts
from agentlightning_plugins.gateway.limits.in_flight import InFlightCall, InFlightCalls
from agentlightning_plugins.gateway.limits.key import Attempt, Authenticator, KeyRefused
from agentlightning_plugins.gateway.recording.call import Call, call_to_span, used_tokens
from agentlightning_plugins.gateway.recording.metric import GatewayMetrics
from agentlightning_plugins.gateway.recording.status import describe
from agentlightning_plugins.gateway.recording.stream import StreamReader
from agentlightning_plugins.gateway.request import make_request, read_call
from agentlightning_plugins.gateway.settings import Settings

logger = logging.getLogger("agentlightning")

_PATH: Final = re.compile(r"(?:/rollout/([^/]+)/attempt/([^/]+))?/(.+?)/?")
_SHUTDOWN_S: Final = 2.0
_TAIL_S: Final = 0.1
_GONE: Final = "the agent disconnected before the answer was complete"
_GONE_STATUS: Final = 499  # nginx's; for the metrics, since nobody is there to see it
_LAST_WORD_S: Final = 1.0  # how long it may take to tell an agent that its stream is over
_PAUSED_RETRY_S: Final = 5
_UNREAD: Final = (AttributeError, KeyError, TypeError, ValueError)  # what reading a wrong answer raises


class GatewayServer:
    """Relays calls to backends and hands a span of each to the store. Every method belongs to one event loop."""

    def __init__(self, store: LightningStore, settings: Settings) -> None:
        """Prepares a server.

        Raises:
            ConfigError: the model list of the settings is not understood.
        """
        self._store = store
        self._settings = settings
        self._dialects = load_dialects()
        self._models = ModelTable(settings.model_list)
        self._authenticator = Authenticator(store, is_required=settings.requires_keys)
        self._ledger = BudgetLedger(settings.budget)
        self._admission = Admission(pause_wait_s=settings.pause_wait_s)
        self._admission.weight_version = settings.weight_version
        self._in_flight = InFlightCalls()
        self._ended = EndedAttempts(
            on_attempt=self._in_flight.cancel_attempt, on_rollout=self._in_flight.cancel_rollout
        )
        self._writer = SpanWriter.shared(store)  # so that whoever waits for an attempt's spans waits for ours too
        self._metrics = GatewayMetrics(lambda: self._models, self._admission, self._writer, lambda: self._in_flight)
        self._controls = Controls(self._authenticator, self._admission, self._metrics, self.status)
        self._warned: set[str] = set()

    async def start(self) -> int:
        """Begins to serve; returns the port, which is the one of the settings unless that was 0.

        Raises:
            OSError: the address cannot be bound.
        """
        settings = self._settings
        self._upstream = Upstream(settings.num_retries, settings.read_timeout_s)
        server = web.Server(self._handle, request_factory=make_request, handler_cancellation=True, access_log=None)
        self._runner = web.ServerRunner(server, shutdown_timeout=_SHUTDOWN_S)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, settings.host, settings.port, backlog=1024).start()
        except OSError:
            await self._runner.cleanup()
            await self._upstream.close()
            self._writer.release()
            raise
        health = HealthCheck(lambda: self._models.backends, settings.health_interval_s)
        self._background = [asyncio.create_task(work) for work in (self._ended.follow(self._store), health.run())]
        bound: int = self._runner.addresses[0][1]
        return bound

    async def stop(self) -> None:
        """Ends open calls after a short wait and stores what was recorded."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        self._admission.close()
        await self._runner.cleanup()
        await self._upstream.close()
        await self.flush()
        self._writer.release()

    async def set_models(self, model_list: list[Mapping[str, Any]]) -> None:
        """Replaces models and backends from the next call on."""
        self._models = ModelTable(model_list, self._models)

    async def flush(self) -> None:
        """Returns when every call answered so far is in the store."""
        await self._writer.flush()

    async def pause(self) -> None:
        """Makes new calls wait; those in flight go on."""
        self._admission.pause()

    async def drain(self, timeout_s: float | None) -> bool:
        """Waits until no call is in flight; False when the time ran out."""
        return await self._admission.drain(timeout_s)

    async def resume(self, weight_version: int | None) -> None:
        """Lets calls go on, with the version of the weights that they get from now on."""
        self._admission.resume(weight_version)

    async def status(self) -> dict[str, Any]:
        """How the gateway does: plain JSON."""
        return describe(self._models, self._admission, self._in_flight, self._writer)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        target = _PATH.fullmatch(request.path)
        path = target[3] if target is not None else ""
        dialect = self._dialects.get(path)
        if target is None or dialect is None:
            return await self._handle_other(request, path)
        named = (target[1], target[2]) if target[1] is not None else None
        try:
            attempt = self._authenticator.authenticate(request.headers, named)
        except KeyRefused as error:
            return self._refuse(dialect, error.status, str(error), "wrong_key")
        call = await read_call(request, dialect, attempt)
        if isinstance(call, Reply):
            self._metrics.refuse(call.status)
            return _respond(call)
        backends = self._models.route(call.model, attempt and attempt[0], time.monotonic())
        if not backends:
            message = f"no model {call.model!r}; models: {', '.join(self._models.names) or 'none yet'}"
            return self._fail(call, refuse(dialect, 404, message, "model_not_found"))
        if attempt is not None:
            if self._ledger.is_limited and not self._ledger.knows(attempt):
                await self._recall(attempt)
            if self._ended.is_over(attempt):  # asked last: it may have ended while the request was read
                return self._refuse(dialect, 410, _over(attempt), "attempt_over")
            call.exceeded_budget = self._ledger.begin(attempt)
            if call.exceeded_budget is not None:  # not 429: clients, and frameworks around them, would try again
                never = {"x-should-retry": "false"}
                return self._fail(call, refuse(dialect, 402, call.exceeded_budget, "budget_exceeded", never))
        in_flight = self._in_flight.add(call)
        try:
            return await self._serve(call, backends, request, in_flight)
        except asyncio.CancelledError:  # what the server does to a handler whose client is gone
            if not in_flight.is_attempt_over:
                self._finish(call, _GONE_STATUS, _GONE)
                raise
            in_flight.task.uncancel()
            assert attempt is not None
            return self._fail(call, refuse(dialect, 410, _over(attempt), "attempt_over"))
        except Exception as error:  # isolation point: a dialect or provider may be somebody else's code
            logger.exception("a call of model %r failed inside the gateway", call.model)
            message = f"the gateway failed: {type(error).__name__}"
            if in_flight.is_streaming:
                self._finish(call, 500, message)
                raise
            return self._fail(call, refuse(dialect, 500, message, "internal_error"))
        finally:
            self._in_flight.remove(in_flight)

    async def _recall(self, attempt: Attempt) -> None:
        """Learns what an attempt spent before this gateway began."""
        try:
            self._ledger.recall(attempt, await read_usage(self._store, attempt))
        except (StoreError, OSError, aiohttp.ClientError) as error:
            logger.warning("what attempt %s has spent cannot be read, so it counts from now on: %s", attempt[1], error)

    async def _serve(
        self, call: Call, backends: list[Backend], request: web.BaseRequest, in_flight: InFlightCall
    ) -> web.StreamResponse:
        if not await self._admission.enter():
            message = "the gateway is paused while the model's weights change; try again"
            retry = {"Retry-After": str(_PAUSED_RETRY_S)}
            return self._fail(call, refuse(call.dialect, 429, message, "paused", retry))
        try:
            version = self._admission.weight_version
            outcome = await self._upstream.send(call, backends, request.headers)
            if isinstance(outcome, Reply):
                return self._relay(call, outcome, version)
            async with outcome:
                return await self._relay_stream(call, outcome, request, version, in_flight)
        finally:
            self._admission.leave()

    async def _handle_other(self, request: web.BaseRequest, path: str) -> web.Response:
        models = list_models(path, self._models.names)
        if models is not None:
            return json_response(models)
        if path in CONTROLS:
            return await self._controls.answer(request, path)
        known = ", ".join(f"/{known}" for known in (*self._dialects, "v1/models", *CONTROLS))
        return self._refuse(CHAT, 404, f"no {request.method} {request.path} here; there is {known}", "not_found")

    def _refuse(self, dialect: Dialect, status: int, message: str, code: str) -> web.Response:
        """Answers what never becomes a call."""
        self._metrics.refuse(status)
        return _respond(refuse(dialect, status, message, code))

    def _fail(self, call: Call, reply: Reply) -> web.Response:
        call.http_status = reply.status
        self._finish(call, reply.status, reply.error)
        return _respond(reply)

    def _relay(self, call: Call, reply: Reply, version: int | None) -> web.Response:
        if reply.error is not None:
            return self._fail(call, reply)
        if call.attempt is None and call.translation is None:
            call.is_complete = True
            self._finish(call, reply.status)
            return _respond(reply)
        try:
            answer = parse_json(reply.body)
            call.wire.read_answer(answer, call.completion)
            if call.translation is not None:
                answer, is_changed = call.translation.answer(answer), True
            else:
                is_changed = call.wire.restore(answer, call.asked)
        except _UNREAD as error:
            call.completion = Completion()
            excerpt = call.redact_key(reply.body)[:200].decode(errors="replace")
            message = f"the backend's answer is not one of {call.wire.path} ({error!r}): {excerpt}"
            return self._fail(call, refuse(call.dialect, 502, message, "bad_gateway"))
        _read_version(call, reply.headers, version)
        call.error = call.completion.error
        call.is_complete = call.error is None
        self._finish(call, reply.status)
        return _respond(reply._replace(body=dump_json(answer)) if is_changed else reply)

    async def _relay_stream(
        self,
        call: Call,
        upstream: BackendAnswer,
        request: web.BaseRequest,
        version: int | None,
        in_flight: InFlightCall,
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers=relayed_headers(upstream.headers))
        _read_version(call, upstream.headers, None)
        reader, failure, shown = StreamReader(call), None, b""
        limit_s = self._settings.read_timeout_s
        try:
            await response.prepare(request)
            in_flight.is_streaming = True
            try:
                with IdleTimeout(limit_s) as idle:
                    while not reader.is_done:
                        try:
                            piece = await upstream.content.readany()
                        except (aiohttp.ClientError, OSError) as error:
                            failure = f"the backend broke off its answer: {describe_error(error)}"
                            break
                        if not piece:
                            break
                        shown = reader.feed(piece)
                        if call.error is not None:
                            shown = _redact_key(call, shown)
                        if shown and not reader.is_done:
                            await response.write(shown)
                        idle.reset()
            except TimeoutError as error:
                failure, limit_s = f"the answer stood still: {error}", _LAST_WORD_S
            last = shown if reader.is_done else reader.close(failure)
            if call.error is not None:
                last = _redact_key(call, last)
            if call.completion.weight_version is None:
                call.completion.weight_version = version
            self._finish(call, 200 if call.is_complete else 502)
            await _end_stream(request, response, last, limit_s)
            if not upstream.content.at_eof():  # else the connection could not be used again
                with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                    async with asyncio.timeout(_TAIL_S):
                        await upstream.content.readany()
        except ConnectionResetError:
            self._finish(call, _GONE_STATUS, _GONE)
        except asyncio.CancelledError:
            if not in_flight.is_attempt_over:
                raise
            in_flight.task.uncancel()
            assert call.attempt is not None
            message, is_open = _over(call.attempt), not call.end_time
            self._finish(call, 410, message)
            last = call.dialect.error_event(410, message, "attempt_over") if is_open else b""
            await _end_stream(request, response, last, _LAST_WORD_S)
        return response

    def _finish(self, call: Call, status: int, error: str | None = None) -> None:
        """Counts a finished call and hands it to the span writer, once.

        Always before the agent sees the end of its answer: whoever has an answer may rely on a flush, ours or the
        writer's, to bring its span to the store.
        """
        if call.end_time:
            return
        call.end_time = time.time()
        call.error = call.error or error
        self._metrics.count(call, str(status))
        if call.attempt is None:
            return
        if self._ledger.is_limited and call.backend is not None:
            used, price = used_tokens(call), call.backend.price
            self._ledger.charge(call.attempt, sum(used), price.cost(*used) if price is not None else 0.0)
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


def _read_version(call: Call, headers: Mapping[str, str], version: int | None) -> None:
    """The version of the weights that answered: the body says it, else a header, else whoever owns the gateway."""
    if call.completion.weight_version is None:
        stated = read_version(headers.get("x-weight-version"))
        call.completion.weight_version = version if stated is None else stated


def _redact_key(call: Call, shown: bytes) -> bytes:
    """Blacks out the backend's key in the error that its stream told, and in what the agent sees of it."""
    call.error = call.redact_key((call.error or "").encode()).decode()
    return call.redact_key(shown)


async def _end_stream(request: web.BaseRequest, response: web.StreamResponse, last: bytes, limit_s: float) -> None:
    """Writes the end of a stream; an agent that does not read it in time loses its connection, and holds up nobody."""
    try:
        async with asyncio.timeout(limit_s):
            await response.write_eof(last)
    except (TimeoutError, ConnectionResetError, asyncio.CancelledError):  # aiohttp's, after a write that was cancelled
        if request.transport is not None:
            request.transport.abort()


def _over(attempt: Attempt) -> str:
    return f"attempt {attempt[1]} of rollout {attempt[0]} is over; its calls are refused"


def _respond(reply: Reply) -> web.Response:
    return web.Response(status=reply.status, body=reply.body, headers=reply.headers)
