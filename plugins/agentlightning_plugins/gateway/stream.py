"""Reads a stream of events on its way to the agent."""

from __future__ import annotations

from agentlightning_plugins.gateway.call import Call
from agentlightning_plugins.gateway.json_text import dump_json, parse_json
from agentlightning_plugins.gateway.sse import DONE, EventSplitter, event_data, to_event


class StreamReader:
    """Takes the bytes of a backend, fills ``call.completion`` and gives back what the agent is to see of them."""

    is_done: bool = False
    """Whether the event has passed after which clients stop reading."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._is_recorded = call.attempt is not None
        self._splitter = EventSplitter()

    def feed(self, piece: bytes) -> bytes:
        """What of a piece (and of what was left of earlier ones) the agent can have: whole events."""
        if not self._is_recorded:
            return piece
        return b"".join([self._read(event) for event in self._splitter.feed(piece)])

    def close(self, failure: str | None) -> bytes:
        """Ends the reading, and says in the call whether its answer is complete.

        Args:
            failure: why the backend's stream broke; None when it ended by itself.

        Returns:
            What is left for the agent, an error event included when it would else not notice.
        """
        if self.is_done:
            return b""
        call, last = self._call, b""
        if self._is_recorded and failure is None:
            if self._splitter.rest:
                last = self.feed(b"\n\n")
            if call.error is None and not call.completion.is_finished:
                failure = "the backend ended its answer early"
        call.error = call.error or failure
        call.is_complete = call.error is None
        if failure is not None:
            last += self._error_event(failure)
        return last

    def _read(self, event: bytes) -> bytes:
        data = event_data(event)
        if data is None:
            return event
        call = self._call
        if data == DONE:
            self.is_done = True
            call.is_complete = call.error is None
            return event
        try:
            chunk = parse_json(data)
            if chunk.get("error"):
                call.error = str(chunk["error"])
                return event
            call.dialect.read_chunk(chunk, call.completion)
            is_changed = call.dialect.restore(chunk, call.asked)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            excerpt = data[:200].decode(errors="replace")
            call.error = f"the backend streamed what is no chunk of {call.dialect.path} ({error!r}): {excerpt}"
            return self._error_event(call.error)
        return event.replace(data, dump_json(chunk), 1) if is_changed else event

    def _error_event(self, message: str) -> bytes:
        return to_event(dump_json(self._call.dialect.error_body(502, message, "bad_gateway")))
