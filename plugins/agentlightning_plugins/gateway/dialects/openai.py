"""OpenAI's Chat Completions, Completions and Embeddings, with vLLM's token ids (``return_token_ids``).

vLLM puts ``token_ids`` on each choice, and ``prompt_token_ids`` on the answer (chat) or on each choice (completions).
In a stream the first chunk has the prompt's ids, and every chunk has the ids of its own tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from operator import itemgetter
from typing import Any, Final, NamedTuple, Protocol

from orjson import JSONDecodeError, dumps, loads

from agentlightning_plugins.gateway.dialects.dialect import (
    Completion,
    CompletionChoice,
    Dialect,
    TokenOptions,
    flatten,
    read_reasoning,
    to_tool_call,
    tool_call_part,
)
from agentlightning_plugins.gateway.dialects.fields import CHAT_FIELDS, COMPLETION_FIELDS, EMBEDDING_FIELDS
from agentlightning_plugins.gateway.dialects.wire import DONE, dump_json, to_event

_DATA: Final = b"data: "
_HEAD: Final = _DATA + b"{"
_CHOICES: Final = b'"choices":['
_END: Final = b"\n\n"


class ChunkRun(NamedTuple):
    """One event of an OpenAI stream, or several that differ only in their single choice.

    The bytes around the choices are the same in each event, so a run is parsed as one chunk with many choices, and
    these bytes are copied when it is written. This saves most of the JSON work of a stream.
    """

    chunk: dict[str, Any]
    """The choices of all events in order, and the fields that are the same in all."""
    rest: bytes
    """The events after the run."""
    around: tuple[bytes, bytes] | None = None
    """The bytes before and after the choice of each event; None for a single event."""

    def write(self, *, as_around: bool) -> bytes:
        """Writes the events with the current ``chunk``; ``as_around`` means that only its choices have changed."""
        if self.around is None:
            return to_event(dumps(self.chunk))
        choices = self.chunk["choices"]
        if not as_around:
            return b"".join([to_event(dumps(self.chunk | {"choices": [choice]})) for choice in choices])
        head, tail = self.around
        return b"%b%b%b" % (head, (tail + head).join(map(dumps, choices)), tail)


def find_run(events: bytes, *, is_alone: bool) -> ChunkRun | None:
    """Finds the run at the start of whole server-sent events; None if the first event has another form.

    With ``is_alone``, the run is one event: the first event of a stream has other fields than the following ones.
    """
    if not events.startswith(_HEAD):
        return None
    end = events.find(_END) + len(_END)
    if not is_alone and end < len(events):
        run = _find_several(events, end)
        if run is not None:
            return run
    try:
        chunk = loads(events[len(_DATA) : end])
    except JSONDecodeError:  # several lines, NaN, or not JSON
        return None
    return None if "error" in chunk else ChunkRun(chunk, events[end:])


def _find_several(events: bytes, end: int) -> ChunkRun | None:
    """Finds the events with the same bytes around their choice as the first, which ends at ``end``."""
    start = events.find(_CHOICES, 0, end) + len(_CHOICES)
    head, tail = events[:start], events[events.rfind(b"]", 0, end) : end]
    *choices, last = events[start:].split(tail + head)
    end = last.find(_END) + len(_END)
    if last.endswith(tail, 0, end):
        choices.append(last[: end - len(tail)])
        rest = last[end:]
    else:
        rest = head + last
    try:  # both texts are valid JSON only if the events were split at the right places
        found, chunk = loads(b"[%b]" % b",".join(choices)), loads(head[len(_DATA) :] + tail)
    except JSONDecodeError:
        return None
    if len(choices) < 2 or len(found) != len(choices) or chunk.get("choices") != [] or "error" in chunk:
        return None
    chunk["choices"] = found
    return ChunkRun(chunk, rest, (head, tail))


_ABSENT: Final = object()
_MAX_RUNS: Final = 3
"""Runs in events that arrive together: the first chunk, chunks of one token each, the last. More do not pay off."""
_LOGPROB: Final = itemgetter("logprob")


class OpenAIDialect(Dialect, Protocol):
    """The error format of OpenAI's APIs."""

    def error_body(self, status: int, message: str, code: str | None) -> dict[str, Any]:
        kind = "invalid_request_error" if status < 500 else "server_error"
        return {"error": {"message": message, "type": kind, "param": None, "code": code}}


class ChatCompletions(OpenAIDialect):
    """OpenAI's Chat Completions, to which other dialects are translated."""

    name = "openai-chat"
    routes: Sequence[str] = ("v1/chat/completions",)
    path = "chat/completions"
    span_name = "chat.completions"
    operation = "chat"
    fields: Set[str] | None = CHAT_FIELDS
    ask_logprobs: bool | int = True
    """The value of ``logprobs`` that requests the log-probabilities of the sampled tokens."""

    def read_token_options(self, body: Mapping[str, Any]) -> TokenOptions:
        logprobs = body.get("logprobs")  # a bool in chat; a number in completions, where 0 requests them too
        asked = body.get("return_token_ids") is True, logprobs is not None and logprobs is not False
        if not body.get("stream"):
            return TokenOptions(*asked)
        stream_options = body.get("stream_options") or {}
        hides_usage = not stream_options.get("include_usage")
        return TokenOptions(*asked, {**stream_options, "include_usage": True} if hides_usage else None)

    def capture_fields(self, options: TokenOptions) -> Mapping[str, Any]:
        fields: dict[str, Any] = {} if options.token_ids else {"return_token_ids": True}
        if not options.logprobs:
            fields["logprobs"] = self.ask_logprobs
        if options.stream_options is not None:
            fields["stream_options"] = options.stream_options
        return fields

    def read_messages(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        if "messages" in body:
            return [_read_message(message) for message in body["messages"]]
        return _read_texts(body.get("prompt"))

    def read_tools(self, body: Mapping[str, Any]) -> Sequence[Any]:
        tools = body.get("tools") or ()
        return [{"type": tool["type"], **tool[tool["type"]]} if tool.get("type") in tool else tool for tool in tools]

    def read_answer(self, answer: Mapping[str, Any], completion: Completion) -> None:
        _read_envelope(answer, completion)
        _take_choices(answer["choices"], completion, True, True)
        if not completion.choices:
            completion.error = "the answer has no choices"

    def read_chunk(self, chunk: Mapping[str, Any], completion: Completion) -> None:
        error = chunk.get("error")
        if error:
            completion.error = str(error)
            return
        _read_envelope(chunk, completion)
        _take_choices(chunk.get("choices") or (), completion, True, True)

    def relay_events(self, events: bytes, completion: Completion, options: TokenOptions) -> tuple[bytes, bytes]:
        """Reads each run of events that differ only in their single choice as one chunk with many choices."""
        relayed: list[bytes] = []
        wants_ids, wants_logprobs, _ = options
        for _ in range(_MAX_RUNS):
            run = find_run(events, is_alone=completion.id is None)
            if run is None:
                break
            chunk, choices, size = run.chunk, run.chunk.get("choices") or (), len(run.chunk)
            _read_envelope(chunk, completion)
            is_changed = _take_choices(choices, completion, wants_ids, wants_logprobs)
            if not wants_ids:
                chunk.pop("prompt_token_ids", None)
            if not choices and self.is_hidden(chunk, options):
                pass
            elif len(chunk) < size or is_changed:
                relayed.append(run.write(as_around=len(chunk) == size))
            else:
                relayed.append(events[: len(events) - len(run.rest)])
            events = run.rest
        return b"".join(relayed), events

    def to_events(self, answer: Mapping[str, Any]) -> bytes:
        chunk = {name: value for name, value in to_chunk(answer).items() if name != "usage"}
        usage = [{**chunk, "choices": [], "usage": answer["usage"]}] if answer.get("usage") else []
        return b"".join([to_event(dump_json(event)) for event in (chunk, *usage)]) + to_event(DONE)

    def collect(self, chunks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        completion, answer = Completion(), dict[str, Any]()
        choices: dict[int, dict[str, Any]] = {}
        for chunk in chunks:
            self.read_chunk(chunk, completion)
            answer |= {name: value for name, value in chunk.items() if value is not None}
            for part in chunk.get("choices") or ():
                choice = choices.setdefault(part.get("index") or 0, {"logprobs": {}})
                for name, values in (part.get("logprobs") or {}).items():
                    choice["logprobs"][name] = [*choice["logprobs"].get(name, ()), *(values or ())]
                others = part.keys() - {"delta", "logprobs"}
                choice |= {name: part[name] for name in others if part[name] is not None}
        if completion.error or not completion.is_finished:
            raise ValueError(completion.error or "the stream ended early")
        for index, choice in choices.items():
            read = completion.choices[index]
            choice |= {"index": index, "logprobs": choice["logprobs"] or None}
            if read.token_ids is not None:
                choice["token_ids"] = read.token_ids
            if self.operation == "chat":
                choice["message"] = to_message(read)
            else:
                choice["text"] = read.text
        kind = str(answer.get("object", "")).removesuffix(".chunk")
        return {**answer, "object": kind, "choices": list(choices.values())}

    def is_hidden(self, chunk: Mapping[str, Any], options: TokenOptions) -> bool:
        return options.stream_options is not None and not chunk.get("choices") and bool(chunk.get("usage"))

    def strip(self, answer: dict[str, Any], options: TokenOptions) -> bool:
        changed = not options.token_ids and answer.pop("prompt_token_ids", _ABSENT) is not _ABSENT
        for choice in answer.get("choices") or ():
            if not options.token_ids:
                changed |= choice.pop("token_ids", _ABSENT) is not _ABSENT
                changed |= choice.pop("prompt_token_ids", _ABSENT) is not _ABSENT
            if not options.logprobs and choice.get("logprobs") is not None:
                choice["logprobs"] = None  # as in answers of OpenAI and vLLM to requests without logprobs
                changed = True
        return changed


class TextCompletions(ChatCompletions):
    """OpenAI's Completions, which differ from Chat Completions in the keys of their content."""

    name = "openai-completions"
    routes = ("v1/completions",)
    path = "completions"
    span_name = "completions"
    operation = "text_completion"
    fields = COMPLETION_FIELDS
    ask_logprobs = 1


class Embeddings(OpenAIDialect):
    """OpenAI's Embeddings. Their vectors are not recorded."""

    name = "openai-embeddings"
    routes = ("v1/embeddings",)
    path = "embeddings"
    span_name = "embeddings"
    operation = "embeddings"
    fields = EMBEDDING_FIELDS

    def read_messages(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        return _read_texts(body["input"])

    def read_answer(self, answer: Mapping[str, Any], completion: Completion) -> None:
        answer["data"]  # raises KeyError: every valid answer has it
        completion.model = answer.get("model")
        completion.input_tokens = (answer.get("usage") or {}).get("prompt_tokens")


CHAT: Final[Dialect] = ChatCompletions()


def read_version(value: object) -> int | None:
    """Reads the weight version that a backend states: a number or decimal digits; None for anything else."""
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def to_chunk(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a whole answer as the only chunk of a stream."""
    choices = []
    for choice in answer["choices"]:
        message = choice.get("message")
        if message is not None:
            calls = [{**call, "index": index} for index, call in enumerate(message.get("tool_calls") or ())]
            choice = {**choice, "delta": {**message, **({"tool_calls": calls} if calls else {})}}
            del choice["message"]
        choices.append(choice)
    kind = "chat.completion.chunk" if answer.get("object") == "chat.completion" else answer.get("object")
    return {**answer, "object": kind, "choices": choices}


def to_message(choice: CompletionChoice) -> dict[str, Any]:
    """Returns a choice as a message of Chat Completions."""
    calls = [to_tool_call(call.id, call.name, call.arguments) for call in choice.tool_calls.values()]
    more = {"reasoning_content": choice.reasoning, "refusal": choice.refusal, "tool_calls": calls}
    content = choice.text or (None if calls else "")
    return {"role": "assistant", "content": content, **{name: value for name, value in more.items() if value}}


def _read_texts(value: Any) -> list[dict[str, Any]]:
    """Returns one or several texts, or one or several lists of token ids, as messages of a user."""
    several = value if isinstance(value, list) and value and not isinstance(value[0], int) else [value]
    texts = [text if isinstance(text, str) else dump_json(text).decode() for text in several]
    return [{"role": "user", "parts": [{"type": "text", "content": text}]} for text in texts]


def _read_envelope(answer: Mapping[str, Any], completion: Completion) -> None:
    if completion.id is None:
        completion.id, completion.model = answer.get("id"), answer.get("model")
    if completion.prompt_token_ids is None:
        completion.prompt_token_ids = _read_ids(answer.get("prompt_token_ids"))
    if completion.weight_version is None:
        completion.weight_version = read_version(answer.get("weight_version"))
    if "forced_tokens" in answer:  # our extension
        completion.forced_tokens = read_version(answer["forced_tokens"])
    usage = answer.get("usage")
    if usage:
        completion.input_tokens = usage.get("prompt_tokens")
        completion.output_tokens = usage.get("completion_tokens")


def _read_ids(value: Any) -> list[int] | None:
    if value is not None and not isinstance(value, list):
        raise TypeError(f"prompt_token_ids is {value!r}, not a list")
    return value


def _take_choices(
    choices: Iterable[dict[str, Any]], completion: Completion, wants_ids: bool, wants_logprobs: bool
) -> bool:
    """Adds choices or their chunks; removes token data that the agent did not request. Returns whether it removed any.

    Hot path, one iteration for each token of a stream: one loop without function calls.
    """
    is_changed = False
    for data in choices:
        index = data.get("index") or 0
        choice = completion.choices.get(index) or completion.choice(index)
        if "token_ids" in data:
            token_ids = data["token_ids"]
            if token_ids is not None:
                if choice.token_ids is None:
                    choice.token_ids = [*token_ids]  # a copy: the list itself may be sent to the agent
                else:
                    choice.token_ids += token_ids
            if not wants_ids:
                del data["token_ids"]
                is_changed = True
        logprobs = data.get("logprobs")
        if logprobs is not None:
            if choice.logprobs is None:
                choice.logprobs = []
            sampled = logprobs.get("content") or logprobs.get("refusal")
            choice.logprobs += map(_LOGPROB, sampled) if sampled else logprobs.get("token_logprobs") or ()
            if not wants_logprobs:
                data["logprobs"] = None  # as in answers of OpenAI and vLLM to requests without logprobs
                is_changed = True
        finish_reason = data.get("finish_reason")
        if finish_reason == "error" or data.get("error"):
            completion.error = completion.error or str(data.get("error") or "the backend failed during its answer")
        if finish_reason:
            choice.finish_reason = finish_reason
            if "weight_versions" in data:  # our extension: the weights changed during the answer
                choice.weight_versions = [*data["weight_versions"]]
            completion.tool_calls_unparsed += read_version(data.get("tool_calls_unparsed")) or 0
        if "prompt_token_ids" in data:
            choice.prompt_token_ids = choice.prompt_token_ids or _read_ids(data["prompt_token_ids"])
            if not wants_ids:
                del data["prompt_token_ids"]
                is_changed = True
        message = data.get("delta") or data.get("message")
        if message is None:
            choice.text += data.get("text") or ""
            continue
        content = message.get("content")
        if content.__class__ is list:
            message = flatten(message)
            content = message["content"]
        if content:
            choice.text += content
        if not content or len(message) > 1 + ("role" in message):  # rare in chunks of a stream
            _read_more(message, choice, is_whole="message" in data)
    return is_changed


def _read_more(message: Mapping[str, Any], choice: CompletionChoice, *, is_whole: bool) -> None:
    """Adds the reasoning, refusal and tool calls of a message."""
    choice.reasoning += read_reasoning(message)
    choice.refusal += message.get("refusal") or ""
    for _ in choice.add_tool_calls(message, is_whole=is_whole):
        pass


def _read_message(message: Mapping[str, Any]) -> dict[str, Any]:
    role, content = message.get("role"), message.get("content")
    if role in ("tool", "function"):
        return {
            "role": "tool",
            "parts": [{"type": "tool_call_response", "id": message.get("tool_call_id"), "response": content}],
        }
    reasoning = read_reasoning(message)
    parts: list[dict[str, Any]] = [{"type": "reasoning", "content": reasoning}] if reasoning else []
    if isinstance(content, str):
        parts.append({"type": "text", "content": content})
    else:
        parts += (_read_part(part) for part in content or ())
    if message.get("tool_calls") or message.get("function_call"):
        choice = CompletionChoice()
        for position, _ in choice.add_tool_calls(message, is_whole=True):
            call = choice.tool_calls[position]
            parts.append(tool_call_part(call.id, call.name, call.arguments))
    return {"role": role, "parts": parts}


def _read_part(part: Mapping[str, Any] | str) -> dict[str, Any]:
    if isinstance(part, str):  # not part of the API, but some servers accept it
        return {"type": "text", "content": part}
    kind = part.get("type")
    if kind == "text":
        return {"type": "text", "content": part.get("text")}
    if kind == "image_url":
        image = part["image_url"]
        url = image if isinstance(image, str) else image["url"]  # a string: see above
        if not url.startswith("data:"):
            return {"type": "uri", "modality": "image", "uri": url}
        head, _, content = url.partition(",")
        mime_type = head.removeprefix("data:").partition(";")[0]
        return {"type": "blob", "modality": "image", "mime_type": mime_type, "content": content}
    return dict(part)
