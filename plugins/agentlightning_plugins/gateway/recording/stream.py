"""Reads a stream of events on its way to the agent."""

from __future__ import annotations

import time
from typing import Any, Final

from agentlightning_plugins.gateway.dialects.json_text import dump_json, parse_json
from agentlightning_plugins.gateway.dialects.sse import DONE, EventSplitter, event_data, split_events
from agentlightning_plugins.gateway.recording.call import Call

_UNREAD: Final = (AttributeError, KeyError, TypeError, ValueError)  # what reading a wrong chunk raises


class StreamReader:
    """Takes the bytes of a backend, fills ``call.completion`` and gives back what the agent is to see of them."""

    is_done: bool = False
    """Whether the event has passed after which clients stop reading."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._is_read = call.attempt is not None or call.translation is not None
        self._splitter = EventSplitter()

    def feed(self, piece: bytes) -> bytes:
        """What of a piece (and of what was left of earlier ones) the agent can have: whole events."""
        if not self._call.first_time:
            self._call.first_time = time.time()
        if not self._is_read:
            return piece
        events, shown = self._splitter.feed(piece), b""
        if self._call.translation is None and not self.is_done:
            try:
                shown, events = self._call.wire.relay_events(events, self._call.completion, self._call.asked)
            except _UNREAD as error:
                return self._refuse(events, error)
        return shown + b"".join([self._read(event) for event in split_events(events)])

    def close(self, failure: str | None) -> bytes:
        """Ends the reading, and says in the call whether its answer is complete.

        Args:
            failure: why the backend's stream broke; None when it ended by itself.

        Returns:
            What is left for the agent, an error event included when it would else not notice.
        """
        return b"" if self.is_done else self._close(failure)

    def _close(self, failure: str | None) -> bytes:
        call, last = self._call, b""
        if self._is_read and failure is None:
            if self._splitter.rest:
                last = self.feed(b"\n\n")
            if self.is_done:
                return last
            if call.error is None and not call.completion.is_finished:
                failure = "the backend ended its answer early"
        call.error = call.error or failure
        call.is_complete = call.error is None
        if failure is not None:
            last += self._error_event(failure)
        elif call.error is None and call.translation is not None:
            last += call.translation.close()
        return last

    def _read(self, event: bytes) -> bytes:
        data = event_data(event)
        call = self._call
        if self.is_done or data is None:
            return event if call.translation is None else b""
        if data == DONE:
            return self._end(event)
        try:
            chunk: Any = parse_json(data)
            call.wire.read_chunk(chunk, call.completion)
            if call.completion.error is not None:
                return self._after(event)
            if call.translation is not None:
                return call.translation.feed(chunk)
            if call.wire.restore(chunk, call.asked):
                event = event.replace(data, dump_json(chunk), 1)
        except _UNREAD as error:
            return self._refuse(data, error)
        return self._after(event)

    def _after(self, event: bytes) -> bytes:
        """What the agent gets of an event that has been read, of which there may be no next."""
        call = self._call
        if call.completion.error is not None:
            call.error = call.error or call.completion.error
            return event if call.translation is None else self._error_event(call.error)
        return self._end(event) if call.completion.is_ended else event

    def _refuse(self, data: bytes, error: Exception) -> bytes:
        call = self._call
        excerpt = call.redact_key(data)[:200].decode(errors="replace")
        call.error = f"the backend streamed what is no chunk of {call.wire.path} ({error!r}): {excerpt}"
        return self._error_event(call.error)

    def _end(self, event: bytes) -> bytes:
        call = self._call
        self.is_done = True
        call.is_complete = call.error is None
        if call.translation is None:
            return event
        if call.is_complete and not call.completion.is_finished:
            call.error, call.is_complete = "the backend ended its answer early", False
            return self._error_event(call.error)
        return call.translation.close() if call.is_complete else b""

    def _error_event(self, message: str) -> bytes:
        return self._call.dialect.error_event(502, message, "bad_gateway")
