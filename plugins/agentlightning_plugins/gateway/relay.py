"""The step that passes the answer of a backend on to the agent, and reads it for the record."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
from aiohttp import web

from agentlightning.frozen import FrozenNumbers
from agentlightning_plugins.gateway.access import InFlightCall
from agentlightning_plugins.gateway.backends.provider import (
    MAX_ANSWER_BYTES,
    MAX_EVENT_BYTES,
    BackendAnswer,
    describe_error,
    idle_timeout,
)
from agentlightning_plugins.gateway.backends.upstream import Reply, relayed_headers
from agentlightning_plugins.gateway.call import BackendRequest, ModelCall
from agentlightning_plugins.gateway.dialects.dialect import MALFORMED, CallRefused, Completion
from agentlightning_plugins.gateway.dialects.openai import read_version
from agentlightning_plugins.gateway.dialects.wire import (
    DONE,
    EventSplitter,
    dump_json,
    event_data,
    parse_json,
    replace_data,
    split_events,
)
from agentlightning_plugins.gateway.history import put_prompt
from agentlightning_plugins.gateway.recorder import CallRecorder

_ENDED_EARLY: Final = "the backend ended its answer early"


class StreamReader:
    """Reads the bytes from a backend into ``call.completion`` and returns the bytes for the agent."""

    def __init__(self, call: ModelCall, request: BackendRequest) -> None:
        self.is_done = False
        """Whether the event after which clients stop reading has been read."""
        self._call = call
        self._request = request
        self._dialect, self._translation = request.dialect, request.translation
        self._is_read = call.attempt is not None or request.translation is not None
        self._splitter = EventSplitter()
        self._prompt: FrozenNumbers | None = None
        """Token ids that were cut out of the events that are read now."""
        self.size = 0
        """Number of bytes that the backend has sent."""

    def feed(self, piece: bytes) -> bytes:
        """Returns the events that this piece completes, in the agent's dialect."""
        if not self._call.first_time:
            self._call.first_time = self._call.now()
        self.size += len(piece)
        if self.size > MAX_ANSWER_BYTES:
            return self._refuse_size(f"the answer is larger than {MAX_ANSWER_BYTES} bytes")
        if len(self._splitter.rest) > MAX_EVENT_BYTES:
            return self._refuse_size(f"an event of the answer is larger than {MAX_EVENT_BYTES} bytes")
        events, relayed, completion = self._splitter.feed(piece), b"", self._call.completion
        self._prompt = None
        if completion.id is None:  # the first events
            events, self._prompt = _cut_prompt(self._call, self._request, events)
        events = self._request.backend.redactor.redact_answer(events)
        if not self._is_read:
            return events
        if self._translation is None and not self.is_done:
            try:
                relayed, events = self._dialect.relay_events(events, completion, self._request.options)
                put_prompt(completion, self._prompt)
            except MALFORMED as error:
                return self._refuse(events, error)
        return relayed + b"".join([self._read(event) for event in split_events(events)])

    def close(self, failure: str | None) -> bytes:
        """Ends the stream: sets whether the answer is complete and returns the last bytes for the agent.

        ``failure`` explains why the backend's stream broke; None if it ended. The agent gets it as an error event.
        """
        call, last, has_ended = self._call, b"", self._is_read and failure is None
        if self._splitter.rest and not self.is_done:
            if has_ended:
                last = self.feed(b"\n\n")
            elif not self._is_read:
                last = self._request.backend.redactor.redact_answer(self._splitter.rest)
        if self.is_done:
            return last
        call.error = call.error or call.completion.error
        if has_ended and call.error is None and not call.completion.is_finished:
            failure = _ENDED_EARLY
        call.error = call.error or failure
        call.is_complete = call.error is None
        if failure is not None:
            return last + self._error_event(failure)
        return last + self._translation.close() if call.is_complete and self._translation is not None else last

    def _read(self, event: bytes) -> bytes:
        data = event_data(event)
        call, translation = self._call, self._translation
        if self.is_done or data is None:
            return event if translation is None else b""
        if data == DONE:
            return self._end(event)
        try:
            chunk: Any = parse_json(data)
            self._dialect.read_chunk(chunk, call.completion)
            put_prompt(call.completion, self._prompt)
            if call.completion.error is not None:
                is_first, call.error = call.error is None, call.error or call.completion.error
                if translation is not None:
                    return self._error_event(call.error) if is_first else b""
            if translation is not None:
                return translation.feed(chunk if self._prompt is None else chunk | {"prompt_token_ids": self._prompt})
            if self._dialect.is_hidden(chunk, self._request.options):
                return b""
            if self._dialect.strip(chunk, self._request.options):
                event = replace_data(event, dump_json(chunk))
        except MALFORMED as error:
            return self._refuse(data, error)
        return self._end(event) if call.completion.is_ended else event

    def _refuse(self, data: bytes, error: Exception) -> bytes:
        excerpt = self._request.backend.redactor.redact_error(data)[:200].decode(errors="replace")
        self._call.error = f"the backend streamed an invalid chunk of {self._dialect.path} ({error!r}): {excerpt}"
        return self._error_event(self._call.error)

    def _refuse_size(self, message: str) -> bytes:
        self.is_done = True
        self._call.error = message
        return self._error_event(self._call.error)

    def _end(self, event: bytes) -> bytes:
        call = self._call
        self.is_done = True
        has_failed = call.error is not None
        call.error = call.error or call.completion.error or (None if call.completion.is_finished else _ENDED_EARLY)
        call.is_complete = call.error is None
        if self._translation is None:
            return event
        if call.error is None:
            return self._translation.close()
        return b"" if has_failed else self._error_event(call.error)

    def _error_event(self, message: str) -> bytes:
        return self._call.dialect.error_event(502, message, "bad_gateway")


def _cut_prompt(call: ModelCall, request: BackendRequest, text: bytes) -> tuple[bytes, FrozenNumbers | None]:
    """Cuts the token ids of the prompt out of an answer or events, unless the agent gets them."""
    if call.attempt is None or call.history is None or request.options.token_ids:
        return text, None
    return call.history.cut_prompt(call.attempt, text)


_TAIL_S: Final = 0.1
"""How long the rest of a backend's stream may take, after which its connection can be used again."""
_FINAL_WRITE_S: Final = 1.0
"""Limit for writing the last error event of a stream."""


_SILENCE_S: Final = 15.0
"""How long a backend may be silent in a stream before the agent gets a comment."""


@dataclass(frozen=True)
class Relay:
    """Relays answers."""

    recorder: CallRecorder
    read_timeout_s: float
    keeps_answers: bool
    """Whether calls keep the answer as the backend sent it."""

    async def relay(
        self, in_flight: InFlightCall, answer: Reply | BackendAnswer, request: web.BaseRequest
    ) -> web.StreamResponse:
        """Passes an answer on and records the call; raises CallRefused if a whole answer is malformed."""
        if isinstance(answer, Reply):
            response = self._relay_whole(in_flight.call, answer)
            await self.recorder.wait_until_stored(in_flight.call)
            return response
        async with answer:
            return await self._relay_stream(in_flight, answer, request)

    def _relay_whole(self, call: ModelCall, reply: Reply) -> web.Response:
        request, body, ids = call.request, reply.body, None
        assert request is not None  # set by the step before
        if not self.keeps_answers:
            body, ids = _cut_prompt(call, request, body)
        body = request.backend.redactor.redact_answer(body)
        if call.attempt is not None or request.translation is not None:
            call.answer += body if self.keeps_answers else b""
            try:
                answer = parse_json(body)
                request.dialect.read_answer(answer, call.completion)
                put_prompt(call.completion, ids)
                if call.completion.error is not None and request.translation is not None:
                    raise CallRefused(502, call.completion.error, "bad_gateway")
                if request.translation is not None:
                    answer |= {} if ids is None else {"prompt_token_ids": ids}
                    answer, is_changed = request.translation.answer(answer), True
                else:
                    is_changed = request.dialect.strip(answer, request.options)
            except MALFORMED as error:
                call.completion = Completion()
                excerpt = request.backend.redactor.redact_error(body)[:200].decode(errors="replace")
                message = f"the backend's answer is invalid for {request.dialect.path} ({error!r}): {excerpt}"
                raise CallRefused(502, message, "bad_gateway") from None
            _set_version(call, reply.headers, call.gateway_version)
            call.error = call.completion.error
            if is_changed:
                body = dump_json(answer)
            elif ids is not None:
                body = request.backend.redactor.redact_answer(reply.body)
        call.is_complete = call.error is None
        self.recorder.finish(call, reply.status)
        return web.Response(status=reply.status, body=body, headers=reply.headers)

    async def _relay_stream(
        self, in_flight: InFlightCall, upstream: BackendAnswer, request: web.BaseRequest
    ) -> web.StreamResponse:
        call = in_flight.call
        assert call.request is not None  # set by the step before
        response = web.StreamResponse(headers=relayed_headers(upstream.headers, call.request.backend))
        _set_version(call, upstream.headers, None)
        reader, failure, relayed = StreamReader(call, call.request), None, b""
        limit_s = self.read_timeout_s
        try:
            await response.prepare(request)
            call.is_streaming = True
            try:
                async with idle_timeout(limit_s) as keep_alive, _comments(response, reader):
                    while not reader.is_done:
                        try:
                            piece = await upstream.content.readany()
                        except (aiohttp.ClientError, OSError) as error:
                            failure = f"the backend broke off its answer: {describe_error(error)}"
                            break
                        if not piece:
                            break
                        call.answer += piece if self.keeps_answers else b""
                        relayed = reader.feed(piece)
                        if relayed and not reader.is_done:
                            await response.write(relayed)
                        keep_alive()
            except TimeoutError as error:
                failure, limit_s = f"the answer stalled: {error}", _FINAL_WRITE_S
            last = relayed if reader.is_done else reader.close(failure)
            if call.completion.weight_version is None:
                call.completion.weight_version = call.gateway_version
            self.recorder.finish(call, 200 if call.is_complete else 502)
            await self.recorder.wait_until_stored(call)
            await _end_stream(request, response, last, limit_s)
            if not upstream.content.at_eof():  # read the rest, so that the connection can be used again
                with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                    async with asyncio.timeout(_TAIL_S):
                        await upstream.content.readany()
        except ConnectionResetError:
            self.recorder.abandon(call)
        except asyncio.CancelledError:
            refusal, is_open = in_flight.refusal, not call.end_time
            if refusal is None:
                raise
            in_flight.task.uncancel()
            self.recorder.finish(call, refusal.status, str(refusal))
            last = call.dialect.error_event(refusal.status, str(refusal), refusal.code) if is_open else b""
            await _end_stream(request, response, last, _FINAL_WRITE_S)
        return response


@contextlib.asynccontextmanager
async def _comments(response: web.StreamResponse, reader: StreamReader) -> AsyncIterator[None]:
    """Writes a comment to the agent whenever the backend is silent for long, so that no proxy closes the stream."""

    async def write() -> None:
        with contextlib.suppress(ConnectionResetError):
            while True:
                before = reader.size
                await asyncio.sleep(_SILENCE_S)
                if reader.size == before:
                    await response.write(b": the model is still at work\n\n")

    writing = asyncio.create_task(write())
    try:
        yield
    finally:
        writing.cancel()


async def _end_stream(request: web.BaseRequest, response: web.StreamResponse, last: bytes, limit_s: float) -> None:
    """Writes the end of a stream; closes the connection if the agent does not read it in time."""
    try:
        async with asyncio.timeout(limit_s):
            await response.write_eof(last)
    except (TimeoutError, ConnectionResetError, asyncio.CancelledError):  # the last by aiohttp, after a cancelled write
        if request.transport is not None:
            request.transport.abort()


def _set_version(call: ModelCall, headers: Mapping[str, str], version: int | None) -> None:
    """Sets the weight version of an answer: from its body, else from a header, else ``version``."""
    if call.completion.weight_version is None:
        stated = read_version(headers.get("x-weight-version"))
        call.completion.weight_version = version if stated is None else stated
