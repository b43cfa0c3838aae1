"""What the gateway must know of an API to relay and record it: the component kind ``dialect``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from agentlightning.plugin.registry import get_manager
from agentlightning_plugins.gateway.dialects.json_text import dump_json
from agentlightning_plugins.gateway.dialects.sse import to_event


@dataclass(slots=True)
class ToolCall:
    """A tool call of a model."""

    id: str | None = None
    name: str = ""
    arguments: str = ""
    """JSON, as the model wrote it."""


@dataclass(slots=True)
class Choice:
    """One of the n answers to a call."""

    text: str = ""
    reasoning: str = ""
    refusal: str = ""
    tool_calls: dict[int, ToolCall] = field(default_factory=dict)
    """By their position in the answer."""
    finish_reason: str | None = None
    prompt_token_ids: list[int] | None = None
    """Where prompts differ between choices: Completions take several."""
    token_ids: list[int] | None = None
    """The sampled tokens, the one that ended the answer included; None when the backend did not say."""
    logprobs: list[float] | None = None
    """Of the sampled tokens."""

    def to_message(self) -> dict[str, Any]:
        """This choice as a message of OpenTelemetry's ``gen_ai.output.messages``."""
        parts: list[dict[str, Any]] = []
        if self.reasoning:
            parts.append({"type": "reasoning", "content": self.reasoning})
        if self.text:
            parts.append({"type": "text", "content": self.text})
        if self.refusal:
            parts.append({"type": "refusal", "content": self.refusal})
        parts += (tool_call_part(call.id, call.name, call.arguments) for call in self.tool_calls.values())
        return {"role": "assistant", "parts": parts, "finish_reason": self.finish_reason}


@dataclass(slots=True)
class Completion:
    """What a backend answered, in no API's form; a stream fills it chunk by chunk."""

    id: str | None = None
    model: str | None = None
    prompt_token_ids: list[int] | None = None
    """Where all choices have the same."""
    choices: dict[int, Choice] = field(default_factory=dict)
    """By their index."""
    input_tokens: int | None = None
    output_tokens: int | None = None
    weight_version: int | None = None
    error: str | None = None
    """What the backend told instead of an answer, or of the rest of a stream."""
    is_ended: bool = False
    """Whether the event has come with which this API ends its streams; those of OpenAI's older ones end with DONE."""

    def choice(self, index: int) -> Choice:
        """The choice at an index, made when it is new."""
        choice = self.choices.get(index)
        if choice is None:
            choice = self.choices[index] = Choice()
        return choice

    @property
    def is_finished(self) -> bool:
        """Whether there are choices, and all of them say why they ended."""
        return bool(self.choices) and all(choice.finish_reason for choice in self.choices.values())


def tool_call_part(id: str | None, name: str | None, arguments: str | None) -> dict[str, Any]:
    """A tool call as a part of an OpenTelemetry message; the arguments stay text, to the blank."""
    return {"type": "tool_call", "id": id, "name": name, "arguments": arguments}


def take(**fields: Any) -> dict[str, Any]:
    """The fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


class Untranslatable(ValueError):
    """A call asks for what the dialect that it is to be translated to cannot say; the message tells the agent what."""

    def __init__(self, message: str, code: str = "not_translatable") -> None:
        super().__init__(message)
        self.code = code


class Asked(NamedTuple):
    """What the agent itself asked for, and therefore gets."""

    token_ids: bool
    logprobs: bool


class Translation(Protocol):
    """One call of an API, carried over Chat Completions to a backend that does not speak the API itself."""

    def request(self) -> dict[str, Any]:
        """The request as a body of ``chat/completions``.

        Raises:
            Untranslatable: the call asks for something that Chat Completions cannot say.
            AttributeError, KeyError, TypeError: it is malformed.
        """
        ...

    def answer(self, answer: dict[str, Any]) -> dict[str, Any]:
        """A whole ``chat.completion`` in the form of the API."""
        ...

    def feed(self, chunk: dict[str, Any]) -> bytes:
        """The server-sent events that one ``chat.completion.chunk`` makes, as they go to the agent."""
        ...

    def close(self) -> bytes:
        """The events that end a stream which the backend has ended."""
        ...


class Dialect(Protocol):
    """One endpoint of an API. Stateless, shared by all calls.

    Implement it by inheriting: what has a body here is what an API needs that neither streams, knows tools, nor tells
    tokens.
    """

    @property
    def name(self) -> str:
        """The name of its component, by which providers say that they speak it."""
        ...

    @property
    def routes(self) -> Sequence[str]:
        """Where agents call it, such as ``v1/chat/completions``, below the gateway's address and that of an attempt."""
        ...

    @property
    def path(self) -> str:
        """Where it is at a backend, below ``/v1/``."""
        ...

    @property
    def span_name(self) -> str:
        """Of the spans of its calls."""
        ...

    @property
    def operation(self) -> str:
        """OpenTelemetry's ``gen_ai.operation.name``."""
        ...

    def read_asked(self, body: Mapping[str, Any]) -> Asked:
        """What a request asks for by itself."""
        return Asked(True, True)

    def fields_to_ask(self, asked: Asked) -> Mapping[str, Any]:
        """What to set in a request so that the backend tells what the agent has not asked for."""
        return {}

    def read_messages(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The input of a request as OpenTelemetry's ``gen_ai.input.messages``: role and parts; raises as below."""
        ...

    def read_tools(self, body: Mapping[str, Any]) -> Sequence[Any]:
        """The tools of a request as OpenTelemetry's ``gen_ai.tool.definitions``; raises as below."""
        return ()

    def read_answer(self, answer: Mapping[str, Any], completion: Completion) -> None:
        """Copies a whole answer into ``completion``.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: it is not an answer of this API.
        """
        ...

    def read_chunk(self, chunk: Mapping[str, Any], completion: Completion) -> None:
        """Adds the JSON of one server-sent event to ``completion``; raises as ``read_answer``."""
        raise ValueError(f"{self.path} does not stream")

    def restore(self, answer: dict[str, Any], asked: Asked) -> bool:
        """Removes from an answer or chunk what only the gateway asked for; False when there was nothing to remove."""
        return False

    def relay_events(self, events: bytes, completion: Completion, asked: Asked) -> tuple[bytes, bytes]:
        """Does ``read_chunk`` and ``restore`` to several events at once, where a dialect has a quicker way.

        Args:
            events: whole server-sent events.
            completion: is added to.
            asked: see ``restore``.

        Returns:
            What the agent gets of those that were read, and the rest, which are still to be read one by one.
        """
        return b"", events

    def translate(self, body: Mapping[str, Any]) -> Translation | None:
        """How to carry a call over Chat Completions; None for what cannot be carried."""
        return None

    def error_body(self, status: int, message: str, code: str | None) -> dict[str, Any]:
        """An error of the gateway in the form that clients of this API understand."""
        ...

    def error_event(self, status: int, message: str, code: str | None) -> bytes:
        """The same as a server-sent event, after which a stream ends."""
        return to_event(dump_json(self.error_body(status, message, code)))


def load_dialects() -> dict[str, Dialect]:
    """The dialects of all plugins, one of each, by their routes."""
    manager = get_manager()
    dialects: list[Dialect] = [manager.create("dialect", name) for name in manager.components("dialect")]
    return {route: dialect for dialect in dialects for route in dialect.routes}
