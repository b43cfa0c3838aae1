"""The HTTP server of the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import aiohttp
from aiohttp import web

from agentlightning.errors import StoreError
from agentlightning.store.protocol import LightningStore
from agentlightning.store.span_writer import AttemptKey, SpanWriter
from agentlightning_plugins.gateway.access.attempts import EndedAttempts, InFlightCall, InFlightCalls
from agentlightning_plugins.gateway.access.authentication import Authenticator, KeyRefused
from agentlightning_plugins.gateway.access.seeds import CallSeeds
from agentlightning_plugins.gateway.backends.answer_cache import AnswerCache
from agentlightning_plugins.gateway.backends.backend import Backend, ModelTable, describe_error
from agentlightning_plugins.gateway.backends.health import HealthCheck
from agentlightning_plugins.gateway.backends.idle_timeout import IdleTimeout
from agentlightning_plugins.gateway.backends.provider import BackendAnswer
from agentlightning_plugins.gateway.backends.upstream import Reply, Upstream, refuse, relayed_headers
from agentlightning_plugins.gateway.control import CONTROL_PATHS, Controls, describe_status, json_response
from agentlightning_plugins.gateway.dialects.dialect import MALFORMED, Completion, load_dialects
from agentlightning_plugins.gateway.dialects.json_text import dump_json, parse_json
from agentlightning_plugins.gateway.dialects.models import list_models
from agentlightning_plugins.gateway.dialects.openai import CHAT, read_version
from agentlightning_plugins.gateway.limits.admission import Admission
from agentlightning_plugins.gateway.limits.usage import UsageTracker, read_usage
from agentlightning_plugins.gateway.recording.call import Call, used_tokens
from agentlightning_plugins.gateway.recording.metric import GatewayMetrics
from agentlightning_plugins.gateway.recording.span import call_to_span
from agentlightning_plugins.gateway.recording.stream import StreamReader
from agentlightning_plugins.gateway.request import make_request, read_call
from agentlightning_plugins.gateway.settings import Settings
from agentlightning_plugins.gateway.stream_end import end_stream
from agentlightning_plugins.http_connections import Connections
from agentlightning_plugins.http_request import SERVER_SETTINGS, RequestLog, is_local_request, is_loopback

logger = logging.getLogger("agentlightning")

_PATH: Final = re.compile(r"(?:/rollout/([^/]+)/attempt/([^/]+))?/(.+?)/?")
_SHUTDOWN_S: Final = 2.0
_TAIL_S: Final = 0.1
_DISCONNECTED: Final = "the agent disconnected before the answer was complete"
_DISCONNECTED_STATUS: Final = 499  # as in nginx; for the metrics only
_FINAL_WRITE_S: Final = 1.0  # limit for writing the last error event of a stream
_STORE_WAIT_S: Final = 1.0  # how long an answer may wait until its call is stored
_PAUSED_RETRY_S: Final = 5


class GatewayServer:
    """Relays calls to backends and sends a span of each call to the store. Belongs to one event loop."""

    def __init__(self, store: LightningStore, settings: Settings) -> None:
        """Prepares a server; raises ConfigError if the model list is invalid."""
        self._store = store
        self._settings = settings
        self._dialects = load_dialects()
        self._models = ModelTable(settings.model_list)
        self._authenticator = Authenticator(
            store, is_required=settings.require_keys, operator_key=settings.operator_key
        )
        self._is_local = is_loopback(settings.host) and not settings.require_keys
        self._usage = UsageTracker(settings.limits)
        self._seeds = CallSeeds(store)
        self._admission = Admission(pause_wait_s=settings.pause_wait_s)
        self._admission.weight_version = settings.weight_version
        self._in_flight = InFlightCalls()
        self._ended = EndedAttempts(self._in_flight)
        self._writer = SpanWriter.shared(store)  # shared, so that a wait for an attempt's spans includes ours
        self._metrics = GatewayMetrics(lambda: self._models, self._admission, self._writer, lambda: self._in_flight)
        self._controls = Controls(self._authenticator, self._admission, self._metrics, self.status)
        self._cache = AnswerCache() if settings.cache else None
        self._warned: set[str] = set()

    async def start(self) -> int:
        """Starts serving and returns the port; raises OSError if the address cannot be bound."""
        settings = self._settings
        if self._cache is not None:
            await self._cache.load(self._store)
        self._upstream = Upstream(settings.num_retries, settings.read_timeout_s)
        server = web.Server(
            self._handle,
            request_factory=make_request,
            handler_cancellation=True,
            access_log=None,
            logger=RequestLog(),
            **SERVER_SETTINGS,
        )
        self._runner = web.ServerRunner(server, shutdown_timeout=_SHUTDOWN_S)
        await self._runner.setup()
        self._connections = Connections(server)
        try:
            _, bound = await self._connections.listen(settings.host, settings.port, backlog=1024)
        except OSError:
            await self._runner.cleanup()
            await self._upstream.close()
            self._writer.release()
            raise
        health = HealthCheck(lambda: self._models.backends, settings.health_interval_s)
        self._background = [asyncio.create_task(work) for work in (self._ended.follow(self._store), health.run())]
        return bound

    async def stop(self) -> None:
        """Ends open calls after a short wait and stores the recorded spans."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        self._admission.close()
        await self._connections.close()
        await self._runner.cleanup()
        await self._upstream.close()
        await self.flush()
        self._writer.release()

    async def set_models(self, model_list: Sequence[Mapping[str, Any]]) -> None:
        self._models = ModelTable(model_list, self._models)

    async def flush(self) -> None:
        await self._writer.flush()

    async def pause(self) -> None:
        self._admission.pause()

    async def drain(self, timeout_s: float | None) -> bool:
        return await self._admission.drain(timeout_s)

    async def resume(self, weight_version: int | None) -> None:
        self._admission.resume(weight_version)

    async def status(self) -> dict[str, Any]:
        return describe_status(self._models, self._admission, self._in_flight, self._writer)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        headers = request.headers
        if self._is_local and not is_local_request(headers.get("Host", "localhost"), headers.get("Origin")):
            message = "this gateway answers programs on this machine only, not web pages; to change that, require keys"
            return self._refuse(refuse(CHAT, 403, message, "not_local"))
        target = _PATH.fullmatch(request.path)
        path = target[3] if target is not None else ""
        named = (target[1], target[2]) if target is not None and target[1] is not None else None
        dialect = self._dialects.get(path)
        if target is None or dialect is None:
            return await self._handle_other(request, path, named)
        try:
            attempt = self._authenticator.authenticate(request.headers, named)
        except KeyRefused as error:
            return self._refuse(refuse(dialect, error.status, str(error), "wrong_key"))
        self._connections.admit(request.transport)
        if attempt is not None:
            if self._ended.needs(attempt):
                await self._ask_about(attempt)
            if self._ended.is_over(attempt):
                return self._refuse(refuse(dialect, 410, _over(attempt), "attempt_over"))
        call = await read_call(request, dialect, attempt)
        if isinstance(call, Reply):
            return self._refuse(call)
        backends = self._models.route(call.model, attempt and attempt[0], time.monotonic())
        if not backends:
            message = f"no model {call.model!r}; models: {', '.join(self._models.names) or 'none yet'}"
            return self._fail(call, refuse(dialect, 404, message, "model_not_found"))
        if attempt is not None:
            if self._usage.needs(attempt):
                await self._restore_usage(attempt)
            if self._ended.is_over(attempt):  # checked last: it may have ended while the request was read
                return self._refuse(refuse(dialect, 410, _over(attempt), "attempt_over"))
            call.exceeded_limit = self._usage.begin(attempt)
            if call.exceeded_limit is not None:  # not 429, after which clients and frameworks would try again
                never = {"x-should-retry": "false"}
                return self._fail(call, refuse(dialect, 402, call.exceeded_limit, "budget_exceeded", never))
        in_flight = self._in_flight.add(call)
        try:
            return await self._serve(in_flight, backends, request)
        except asyncio.CancelledError:  # cancelled by us, or by aiohttp because the client disconnected
            if not in_flight.is_attempt_over:
                self._finish(call, _DISCONNECTED_STATUS, _DISCONNECTED)
                raise
            in_flight.task.uncancel()
            assert attempt is not None
            return self._fail(call, refuse(dialect, 410, _over(attempt), "attempt_over"))
        except Exception as error:  # isolation point: dialects and providers may be third-party code
            logger.exception("a call of model %r failed inside the gateway", call.model)
            message = f"the gateway failed: {type(error).__name__}"
            if in_flight.is_streaming:
                self._finish(call, 500, message)
                raise
            return self._fail(call, refuse(dialect, 500, message, "internal_error"))
        finally:
            self._in_flight.remove(in_flight)

    async def _ask_about(self, attempt: AttemptKey) -> None:
        try:
            await self._ended.ask(self._store, attempt)
        except (StoreError, OSError, aiohttp.ClientError) as error:
            logger.warning("the status of attempt %s cannot be read, so its calls continue: %s", attempt[1], error)

    async def _restore_usage(self, attempt: AttemptKey) -> None:
        """Reads an attempt's usage before this gateway started from the attempt's spans."""
        try:
            self._usage.restore(attempt, await read_usage(self._store, attempt))
        except (StoreError, OSError, aiohttp.ClientError) as error:
            logger.warning("the usage of attempt %s cannot be read, so only new calls count: %s", attempt[1], error)

    async def _serve(
        self, in_flight: InFlightCall, backends: list[Backend], request: web.BaseRequest
    ) -> web.StreamResponse:
        call = in_flight.call
        is_admitted = False
        try:
            is_admitted = await self._admission.enter()
        finally:
            if not is_admitted and call.attempt is not None:  # refused, or the client did not wait
                self._usage.take_back(call.attempt)
        if not is_admitted:
            message = "the gateway is paused while the model's weights change; try again"
            return self._fail(call, refuse(call.dialect, 429, message, "paused", {"Retry-After": str(_PAUSED_RETRY_S)}))
        try:
            if call.attempt is not None and any(backend.seed_calls for backend in backends):
                call.seed = await self._seeds.next(call.attempt)
            version = call.gateway_version = self._admission.weight_version
            outcome = self._cache.find(call, backends) if self._cache is not None else None
            outcome = outcome or await self._upstream.send(call, backends, request.headers)
            if isinstance(outcome, Reply):
                response = self._relay(call, outcome, version)
                await self._store_call(call)
                return response
            async with outcome:
                return await self._relay_stream(in_flight, outcome, request, version)
        finally:
            self._admission.leave()

    async def _handle_other(self, request: web.BaseRequest, path: str, named: AttemptKey | None) -> web.Response:
        is_operator = self._authenticator.is_operator(request.headers)
        if path != "health" and is_operator:
            self._connections.admit(request.transport)
        models = list_models(path, self._models.names)
        if models is not None:
            try:
                if not is_operator:
                    self._authenticator.authenticate(request.headers, named)
            except KeyRefused as error:
                return self._refuse(refuse(CHAT, error.status, str(error), "wrong_key"))
            return json_response(models)
        if path in CONTROL_PATHS:
            return await self._controls.answer(request, path)
        known = ", ".join(f"/{known}" for known in (*self._dialects, "v1/models", *CONTROL_PATHS))
        message = f"no endpoint {request.method} {request.path}; endpoints: {known}"
        return self._refuse(refuse(CHAT, 404, message, "not_found"))

    def _refuse(self, reply: Reply) -> web.Response:
        """Answers a request that is not recorded as a call."""
        self._metrics.refuse(reply.status)
        return _respond(reply)

    def _fail(self, call: Call, reply: Reply) -> web.Response:
        call.http_status = reply.status
        self._finish(call, reply.status, reply.error)
        return _respond(reply)

    def _relay(self, call: Call, reply: Reply, version: int | None) -> web.Response:
        if reply.error is not None:
            return self._fail(call, reply)
        request = call.request
        assert request is not None  # set by Upstream.send
        if call.attempt is None and request.translation is None:
            call.is_complete = True
            self._finish(call, reply.status)
            return _respond(reply)
        call.answer += reply.body if self._cache is not None else b""
        try:
            answer = parse_json(reply.body)
            request.dialect.read_answer(answer, call.completion)
            if request.translation is not None:
                answer, is_changed = request.translation.answer(answer), True
            else:
                is_changed = request.dialect.strip(answer, request.options)
        except MALFORMED as error:
            call.completion = Completion()
            excerpt = call.redact_error(reply.body)[:200].decode(errors="replace")
            message = f"the backend's answer is invalid for {request.dialect.path} ({error!r}): {excerpt}"
            return self._fail(call, refuse(call.dialect, 502, message, "bad_gateway"))
        _set_version(call, reply.headers, version)
        call.error = call.completion.error
        call.is_complete = call.error is None
        self._finish(call, reply.status)
        return _respond(reply._replace(body=dump_json(answer)) if is_changed else reply)

    async def _relay_stream(
        self, in_flight: InFlightCall, upstream: BackendAnswer, request: web.BaseRequest, version: int | None
    ) -> web.StreamResponse:
        call = in_flight.call
        assert call.request is not None  # set by Upstream.send
        response = web.StreamResponse(headers=relayed_headers(upstream.headers, call.request.backend))
        _set_version(call, upstream.headers, None)
        reader, failure, relayed = StreamReader(call, call.request), None, b""
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
                        call.answer += piece if self._cache is not None else b""
                        relayed = reader.feed(piece)
                        if relayed and not reader.is_done:
                            await response.write(relayed)
                        idle.reset()
            except TimeoutError as error:
                failure, limit_s = f"the answer stalled: {error}", _FINAL_WRITE_S
            last = relayed if reader.is_done else reader.close(failure)
            if call.completion.weight_version is None:
                call.completion.weight_version = version
            self._finish(call, 200 if call.is_complete else 502)
            await self._store_call(call)
            await end_stream(request, response, last, limit_s)
            if not upstream.content.at_eof():  # read the rest, so that the connection can be used again
                with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                    async with asyncio.timeout(_TAIL_S):
                        await upstream.content.readany()
        except ConnectionResetError:
            self._finish(call, _DISCONNECTED_STATUS, _DISCONNECTED)
        except asyncio.CancelledError:
            if not in_flight.is_attempt_over:
                raise
            in_flight.task.uncancel()
            assert call.attempt is not None
            message, is_open = _over(call.attempt), not call.end_time
            self._finish(call, 410, message)
            last = call.dialect.error_event(410, message, "attempt_over") if is_open else b""
            await end_stream(request, response, last, _FINAL_WRITE_S)
        return response

    def _finish(self, call: Call, status: int, error: str | None = None) -> None:
        """Counts a finished call and passes it to the span writer, once.

        Must be called before the agent gets the end of its answer: a flush after an answer must include its span.
        """
        if call.end_time:
            return
        call.end_time = time.time()
        call.error = call.error or error
        if self._cache is not None:
            self._cache.keep(call)
        self._metrics.count(call, str(status))
        if call.attempt is None:
            return
        if call.backend is not None:
            tokens, price = used_tokens(call), call.backend.price
            self._usage.add(call.attempt, sum(tokens), price.cost(*tokens) if price is not None else 0.0)
        self._writer.put(call_to_span(call))
        if call.is_complete and call.model not in self._warned:
            self._check_token_ids(call)

    async def _store_call(self, call: Call) -> None:
        """Waits, for a limited time, until a durable store contains a finished call.

        The agent gets the end of its answer afterwards, so the store has all calls of a rollout that has succeeded,
        even if this process is killed.
        """
        if call.attempt is not None and self._store.capabilities["durable"]:
            await self._writer.flush(*call.attempt, timeout_s=_STORE_WAIT_S)

    def _check_token_ids(self, call: Call) -> None:
        if all(choice.token_ids is not None for choice in call.completion.choices.values()):
            return
        self._warned.add(call.model)
        logger.warning(
            "model %r at %s returns no token ids, so its calls cannot train a model (prompts can still be tuned). "
            "Serve it with vLLM >= 0.10.2 or another server that supports return_token_ids",
            call.model,
            call.backend.endpoint if call.backend is not None else "?",
        )


def _set_version(call: Call, headers: Mapping[str, str], version: int | None) -> None:
    """Sets the weight version of an answer: from its body, else from a header, else the gateway's own."""
    if call.completion.weight_version is None:
        stated = read_version(headers.get("x-weight-version"))
        call.completion.weight_version = version if stated is None else stated


def _over(attempt: AttemptKey) -> str:
    return f"attempt {attempt[1]} of rollout {attempt[0]} is over; its calls are refused"


def _respond(reply: Reply) -> web.Response:
    return web.Response(status=reply.status, body=reply.body, headers=reply.headers)
