"""The component kind ``dialect``: an API that the gateway relays and records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from aiohttp import web
from multidict import CIMultiDict

from agentlightning.errors import LightningError
from agentlightning.plugin.registry import get_manager
from agentlightning_plugins.gateway.dialects.wire import dump_json, is_json, to_event

MALFORMED: Final = (AttributeError, KeyError, TypeError, ValueError)
"""Errors that dialects and translations raise for JSON that does not fit their API."""
UNPARSED: Final = "unparsed_arguments"
"""The key of arguments that are not a JSON object, for APIs that take only objects."""


@dataclass(slots=True)
class CompletionToolCall:
    """A tool call of a model."""

    id: str | None = None
    name: str = ""
    arguments: str = ""
    """JSON, as the model wrote it."""


@dataclass(slots=True)
class CompletionChoice:
    """One of the n answers to a call."""

    text: str = ""
    reasoning: str = ""
    refusal: str = ""
    tool_calls: dict[int, CompletionToolCall] = field(default_factory=dict)
    """Tool calls by their position in the answer."""
    finish_reason: str | None = None
    prompt_token_ids: list[int] | None = None
    """Set if the choices have different prompts, as in Completions."""
    token_ids: list[int] | None = None
    """The sampled tokens, including the one that ended the answer; None if the backend did not return them."""
    logprobs: list[float] | None = None
    """Log-probabilities of the sampled tokens."""
    weight_versions: list[int] | None = None
    """Weight versions of the sampled tokens, if the weights changed during the sampling."""
    _positions: dict[tuple[Any, Any], int] = field(default_factory=dict, compare=False)
    """The latest tool call of a stream with an id and an index; either may be None, which stands for any."""

    def add_tool_calls(self, message: Mapping[str, Any], *, is_whole: bool = False) -> Iterator[tuple[int, str]]:
        """Adds the tool calls of a message of Chat Completions, or the pieces of tool calls of a stream's delta.

        A call is known by its id, because some servers give no index, or the same to all calls. A piece without id
        continues the call with its index, else the latest call.

        Yields:
            The position of each call among ``tool_calls``, and the arguments that were added to it.
        """
        pieces = message.get("tool_calls") or ()
        if message.get("function_call"):  # the form before there were tools
            pieces = [*pieces, {"function": message["function_call"]}]
        for number, piece in enumerate(pieces):
            function = piece.get("function") or piece.get("custom") or {}
            call_id, name = piece.get("id") or None, function.get("name") or ""
            arguments = function.get("arguments", function.get("input"))
            if not isinstance(arguments, str):  # some servers send an object
                arguments = "" if arguments is None else dump_json(arguments).decode()
            index = piece.get("index")
            if index is None and len(pieces) > 1:
                index = number
            position = None if is_whole else self._find_call(call_id, index, name, arguments)
            if position is None:
                position = len(self.tool_calls)
                self.tool_calls[position] = CompletionToolCall()
            call = self.tool_calls[position]
            call.id = call.id or call_id
            if name != call.name and not (call.name and call.arguments):
                call.name += name
            call.arguments += arguments
            if not is_whole:
                self._positions.update(
                    dict.fromkeys([(call_id, index), (call_id, None), (None, index), (None, None)], position)
                )
            yield position, arguments

    def _find_call(self, call_id: str | None, index: Any, name: str, arguments: str) -> int | None:
        """Returns the position of the call that a piece continues; None if it begins a call."""
        known = self._positions
        keys = ((call_id, index), (None, index), *([] if name else [(call_id, None)]))
        position = next((known[key] for key in keys if key in known), None)
        if position is None or not name or (call_id and index is not None and (call_id, index) in known):
            return position
        call = self.tool_calls[position]
        if call_id is not None and call.id is not None and call_id != call.id:
            return None
        has_ended = call.name and call.arguments and arguments and (name != call.name or is_json(call.arguments))
        return None if has_ended else position

    def to_message(self) -> dict[str, Any]:
        """Returns this choice as a message of OpenTelemetry's ``gen_ai.output.messages``."""
        texts = (("reasoning", self.reasoning), ("text", self.text), ("refusal", self.refusal))
        parts = [{"type": kind, "content": text} for kind, text in texts if text]
        parts += [tool_call_part(call.id, call.name, call.arguments) for call in self.tool_calls.values()]
        return {"role": "assistant", "parts": parts, "finish_reason": self.finish_reason}


@dataclass(slots=True)
class Completion:
    """The answer of a backend, independent of its API. A stream fills it chunk by chunk."""

    id: str | None = None
    model: str | None = None
    prompt_token_ids: list[int] | None = None
    """Set if all choices have the same prompt."""
    choices: dict[int, CompletionChoice] = field(default_factory=dict)
    """Choices by their index."""
    input_tokens: int | None = None
    output_tokens: int | None = None
    weight_version: int | None = None
    forced_tokens: int | None = None
    """Number of tokens at the end of the prompt that begin the answer and were not sampled."""
    tool_calls_unparsed: int = 0
    """Number of tool calls in the text of the choices."""
    error: str | None = None
    """The error that the backend sent instead of an answer, or instead of the rest of a stream."""
    is_ended: bool = False
    """Whether the final event of a stream has arrived, for APIs that do not end with ``[DONE]``."""

    def choice(self, index: int) -> CompletionChoice:
        """Returns the choice at an index, creating it if needed."""
        choice = self.choices.get(index)
        if choice is None:
            choice = self.choices[index] = CompletionChoice()
        return choice

    @property
    def is_finished(self) -> bool:
        """Whether there are choices, and all of them have a finish reason."""
        return bool(self.choices) and all(choice.finish_reason for choice in self.choices.values())


def tool_call_part(id: str | None, name: str | None, arguments: str | None) -> dict[str, Any]:
    """Returns a tool call as a part of an OpenTelemetry message. The arguments stay text."""
    return {"type": "tool_call", "id": id, "name": name, "arguments": arguments}


def to_tool_call(id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    """Returns a tool call of a chat message."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def read_reasoning(message: Mapping[str, Any]) -> str:
    """Returns the thoughts of a message or a delta, under any of their three names."""
    details = message.get("reasoning_details") or ()  # OpenRouter's: texts, summaries and encrypted data
    listed = "".join(each.get("text") or each.get("summary") or "" for each in details)
    return message.get("reasoning_content") or message.get("reasoning") or listed


def flatten(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a message of a chat answer with a text as its content: some servers list texts and thoughts."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    found = {"text": "", "thinking": read_reasoning(message)}
    for part in content:
        for kind in found.keys() & part.keys():
            value = part[kind]
            found[kind] += value if isinstance(value, str) else "".join(piece["text"] for piece in value)
    return {**message, "content": found["text"], "reasoning_content": found["thinking"]}


class TranslationError(ValueError):
    """A call cannot be expressed in the backend's dialect; the message explains why."""

    def __init__(self, message: str, code: str = "not_translatable") -> None:
        super().__init__(message)
        self.code = code


class TokenOptions(NamedTuple):
    """The token data that the agent requested, and therefore gets."""

    token_ids: bool
    logprobs: bool
    stream_options: Mapping[str, Any] | None = None
    """Options that request the usage at a stream's end, if the agent did not; None if it did, or gets no stream."""


class Translation(Protocol):
    """Translates one call and its answer between an API and Chat Completions."""

    def request(self) -> dict[str, Any]:
        """Returns the request as a body of ``chat/completions``; raises TranslationError or ``MALFORMED``."""

    def answer(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Translates a whole ``chat.completion``."""

    def feed(self, chunk: dict[str, Any]) -> bytes:
        """Translates a ``chat.completion.chunk`` to server-sent events."""

    def close(self) -> bytes:
        """Returns the events that end the stream."""


class Dialect(Protocol):
    """One endpoint of an API. Stateless, and shared by all calls.

    Implement a dialect by inheriting from this class. The defaults fit an API without streaming, tools and token data.
    """

    name: str
    """The name of the component; providers list the dialects that they speak by name."""
    routes: Sequence[str]
    """Paths at which agents call it, such as ``v1/chat/completions``, or ``v1/models/{model}:verb`` with the model."""
    route_fields: Mapping[str, Any] = {}
    """Fields of every request at these paths."""
    path: str
    """Path of the endpoint at a backend, below ``/v1/``."""
    span_name: str
    operation: str
    """OpenTelemetry's ``gen_ai.operation.name``."""
    final_status: int | None = None
    """The status of errors after which a client must not try again; None if clients read ``x-should-retry``."""
    fields: Set[str] | None = None
    """Fields of a request that are passed on; None: all, which lets agents set any option of the backend."""

    def read_token_options(self, body: Mapping[str, Any]) -> TokenOptions:
        """Returns the token data that a request asks for."""
        return TokenOptions(True, True)

    def capture_fields(self, options: TokenOptions) -> Mapping[str, Any]:
        """Returns the fields that make the backend return the token data that the agent did not request."""
        return {}

    def read_messages(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns the input of a request as OpenTelemetry's ``gen_ai.input.messages``; raises ``MALFORMED``."""

    def read_tools(self, body: Mapping[str, Any]) -> Sequence[Any]:
        """Returns the tools as OpenTelemetry's ``gen_ai.tool.definitions``; raises ``MALFORMED``."""
        return ()

    def read_answer(self, answer: Mapping[str, Any], completion: Completion) -> None:
        """Copies a whole answer into ``completion``; raises ``MALFORMED``."""

    def read_chunk(self, chunk: Mapping[str, Any], completion: Completion) -> None:
        """Adds the JSON of one server-sent event to ``completion``; raises ``MALFORMED``."""
        raise ValueError(f"{self.path} does not stream")

    def to_events(self, answer: Mapping[str, Any]) -> bytes:
        """Returns a whole answer as a stream, for servers that ignore ``stream``; raises ``MALFORMED``."""
        raise ValueError(f"{self.path} does not stream")

    def collect(self, chunks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns a stream, the JSON of its events, as a whole answer; raises ``MALFORMED`` if it broke off."""
        raise ValueError(f"{self.path} does not stream")

    def strip(self, answer: dict[str, Any], options: TokenOptions) -> bool:
        """Removes data that only the gateway requested from an answer or chunk. Returns whether it removed anything."""
        return False

    def is_hidden(self, chunk: Mapping[str, Any], options: TokenOptions) -> bool:
        """Whether to withhold a chunk from the agent, because only the gateway requested it."""
        return False

    def relay_events(self, events: bytes, completion: Completion, options: TokenOptions) -> tuple[bytes, bytes]:
        """Does ``read_chunk`` and ``strip`` for several whole events at once, if the dialect has a faster way.

        Returns:
            The events for the agent, and the remaining events, which must be read one by one.
        """
        return b"", events

    def translate(self, body: Mapping[str, Any]) -> Translation | None:
        """Returns a translation of a call to Chat Completions; None if the API cannot be translated."""
        return None

    def error_body(self, status: int, message: str, code: str | None) -> dict[str, Any]:
        """Returns an error of the gateway in the form that clients of this API expect."""

    def error_event(self, status: int, message: str, code: str | None) -> bytes:
        """Returns such an error as the last server-sent event of a stream."""
        return to_event(dump_json(self.error_body(status, message, code)))


def load_dialects() -> dict[str, Dialect]:
    """Creates the dialects of all plugins. Returns them by route."""
    manager = get_manager()
    dialects: list[Dialect] = [manager.create("dialect", name) for name in manager.components("dialect")]
    return {route: dialect for dialect in dialects for route in dialect.routes}


class CallRefused(LightningError):
    """Ends the chain of a model call: the agent gets an error, in the form of its API.

    The error is the gateway's own, or the one that a backend answered.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None,
        headers: Mapping[str, str] | None = None,
        *,
        body: bytes | None = None,
    ) -> None:
        """Creates an error; without a ``body``, the agent gets one with the message and the code."""
        super().__init__(message)
        self.status, self.code, self.headers, self.body = status, code, headers or {}, body

    def to_response(self, dialect: Dialect) -> web.Response:
        """Returns the answer for an agent that speaks this dialect."""
        headers, body, status = CIMultiDict(self.headers), self.body, self.status
        if headers.get("x-should-retry") == "false":
            status = dialect.final_status or status
        if body is None:
            headers["Content-Type"] = "application/json"
            body = dump_json(dialect.error_body(self.status, str(self), self.code))
        return web.Response(status=status, body=body, headers=headers)
