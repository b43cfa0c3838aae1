"""Reads a stream of events while it is relayed to the agent."""

from __future__ import annotations

import time
from typing import Any, Final

from agentlightning_plugins.gateway.backends.answer import MAX_ANSWER_BYTES
from agentlightning_plugins.gateway.backends.request import BackendRequest
from agentlightning_plugins.gateway.call import ModelCall
from agentlightning_plugins.gateway.dialects.dialect import MALFORMED
from agentlightning_plugins.gateway.dialects.json_text import dump_json, parse_json
from agentlightning_plugins.gateway.dialects.sse import DONE, EventSplitter, event_data, split_events

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
        self._size = 0

    def feed(self, piece: bytes) -> bytes:
        """Returns the events that this piece completes, in the agent's dialect."""
        if not self._call.first_time:
            self._call.first_time = time.time()
        self._size += len(piece)
        if self._size > MAX_ANSWER_BYTES:
            return self._refuse_size()
        events, relayed = self._request.backend.redact_answer(self._splitter.feed(piece)), b""
        if not self._is_read:
            return events
        if self._translation is None and not self.is_done:
            try:
                relayed, events = self._dialect.relay_events(events, self._call.completion, self._request.options)
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
                last = self._request.backend.redact_answer(self._splitter.rest)
        if self.is_done:
            return last
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
            if call.completion.error is not None:
                call.error = call.error or call.completion.error
                return event if translation is None else self._error_event(call.error)
            if translation is not None:
                return translation.feed(chunk)
            if self._dialect.is_hidden(chunk, self._request.options):
                return b""
            if self._dialect.strip(chunk, self._request.options):
                event = event.replace(data, dump_json(chunk), 1)
        except MALFORMED as error:
            return self._refuse(data, error)
        return self._end(event) if call.completion.is_ended else event

    def _refuse(self, data: bytes, error: Exception) -> bytes:
        excerpt = self._call.redact_error(data)[:200].decode(errors="replace")
        self._call.error = f"the backend streamed an invalid chunk of {self._dialect.path} ({error!r}): {excerpt}"
        return self._error_event(self._call.error)

    def _refuse_size(self) -> bytes:
        self.is_done = True
        self._call.error = f"the answer is larger than {MAX_ANSWER_BYTES} bytes"
        return self._error_event(self._call.error)

    def _end(self, event: bytes) -> bytes:
        call = self._call
        self.is_done = True
        call.is_complete = call.error is None
        if self._translation is None:
            return event
        if call.is_complete and not call.completion.is_finished:
            call.error, call.is_complete = _ENDED_EARLY, False
            return self._error_event(_ENDED_EARLY)
        return self._translation.close() if call.is_complete else b""

    def _error_event(self, message: str) -> bytes:
        return self._call.dialect.error_event(502, message, "bad_gateway")
