"""OpenAI's Chat Completions and Completions, with the token ids of vLLM (``return_token_ids``).

vLLM puts ``token_ids`` on each choice and ``prompt_token_ids`` on the answer (chat) or on each choice (completions). In
a stream the prompt comes with the first chunk, and every chunk has the ids of its own tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from agentlightning_plugins.gateway.dialect import Asked, Completion, Dialect, ToolCall, tool_call_part
from agentlightning_plugins.gateway.json_text import dump_json

_ABSENT: Final = object()


class OpenAIError(Dialect, Protocol):
    """How OpenAI's APIs tell errors."""

    def error_body(self, status: int, message: str, code: str | None) -> dict[str, Any]:
        kind = "invalid_request_error" if status < 500 else "server_error"
        return {"error": {"message": message, "type": kind, "param": None, "code": code}}


class _Sampled(OpenAIError, Protocol):
    """Both endpoints: they differ in where the content is, which the keys tell."""

    ask_logprobs: bool | int
    """What asks for the log-probabilities of the sampled tokens here."""

    def read_asked(self, body: Mapping[str, Any]) -> Asked:
        logprobs = body.get("logprobs")  # a bool in chat; in completions a number, of which 0 asks too
        return Asked(body.get("return_token_ids") is True, logprobs is not None and logprobs is not False)

    def fields_to_ask(self, asked: Asked) -> Mapping[str, Any]:
        fields: dict[str, Any] = {}
        if not asked.token_ids:
            fields["return_token_ids"] = True
        if not asked.logprobs:
            fields["logprobs"] = self.ask_logprobs
        return fields

    def read_messages(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        if "messages" in body:
            return [_read_message(message) for message in body["messages"]]
        return read_texts(body.get("prompt"))

    def read_tools(self, body: Mapping[str, Any]) -> Sequence[Any]:
        tools = body.get("tools") or ()
        return [{"type": tool["type"], **tool[tool["type"]]} if tool.get("type") in tool else tool for tool in tools]

    def read_answer(self, answer: Mapping[str, Any], completion: Completion) -> None:
        _read_envelope(answer, completion)
        for choice in answer["choices"]:
            _read_choice(choice, completion)

    def read_chunk(self, chunk: Mapping[str, Any], completion: Completion) -> None:
        error = chunk.get("error")
        if error:
            completion.error = str(error)
            return
        _read_envelope(chunk, completion)
        for choice in chunk.get("choices") or ():
            _read_choice(choice, completion)

    def restore(self, answer: dict[str, Any], asked: Asked) -> bool:
        changed = not asked.token_ids and answer.pop("prompt_token_ids", _ABSENT) is not _ABSENT
        for choice in answer.get("choices") or ():
            if not asked.token_ids:
                changed |= choice.pop("token_ids", _ABSENT) is not _ABSENT
                changed |= choice.pop("prompt_token_ids", _ABSENT) is not _ABSENT
            if not asked.logprobs and choice.get("logprobs") is not None:
                choice["logprobs"] = None  # what OpenAI and vLLM answer when nobody asked
                changed = True
        return changed


class ChatCompletions(_Sampled):
    """OpenAI's Chat Completions; what other dialects are translated to."""

    name = "openai-chat"
    routes = ("v1/chat/completions",)
    path = "chat/completions"
    span_name = "chat.completions"
    operation = "chat"
    ask_logprobs = True


class Completions(_Sampled):
    """OpenAI's Completions."""

    name = "openai-completions"
    routes = ("v1/completions",)
    path = "completions"
    span_name = "completions"
    operation = "text_completion"
    ask_logprobs = 1


CHAT: Final[Dialect] = ChatCompletions()


def read_version(value: object) -> int | None:
    """A weight version as a backend tells it: a number, or one in digits; anything else is None."""
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def read_texts(value: Any) -> list[dict[str, Any]]:
    """A text, several texts, token ids, or several lists of them, as messages of a user."""
    several = value if isinstance(value, list) and value and not isinstance(value[0], int) else [value]
    texts = [text if isinstance(text, str) else dump_json(text).decode() for text in several]
    return [{"role": "user", "parts": [{"type": "text", "content": text}]} for text in texts]


def _read_envelope(answer: Mapping[str, Any], completion: Completion) -> None:
    if completion.id is None:
        completion.id, completion.model = answer.get("id"), answer.get("model")
    if completion.prompt_token_ids is None:
        completion.prompt_token_ids = answer.get("prompt_token_ids")
    if completion.weight_version is None:
        completion.weight_version = read_version(answer.get("weight_version"))
    usage = answer.get("usage")
    if usage:
        completion.input_tokens = usage.get("prompt_tokens")
        completion.output_tokens = usage.get("completion_tokens")


def _read_choice(data: Mapping[str, Any], completion: Completion) -> None:
    choice = completion.choice(data.get("index") or 0)
    if data.get("finish_reason"):
        choice.finish_reason = data["finish_reason"]
    prompt_token_ids, token_ids = data.get("prompt_token_ids"), data.get("token_ids")
    if prompt_token_ids is not None and choice.prompt_token_ids is None:
        choice.prompt_token_ids = prompt_token_ids
    if token_ids is not None:
        if choice.token_ids is None:
            choice.token_ids = token_ids
        else:
            choice.token_ids += token_ids
    logprobs = data.get("logprobs")
    if logprobs is not None:
        read = _read_logprobs(logprobs)
        if choice.logprobs is None:
            choice.logprobs = read
        else:
            choice.logprobs += read
    message = data.get("delta") or data.get("message")
    if message is None:
        choice.text += data.get("text") or ""
        return
    content = message.get("content")
    if content:
        choice.text += content
        if len(message) == 1:  # a chunk of a stream rarely says more
            return
    choice.reasoning += message.get("reasoning_content") or message.get("reasoning") or ""
    choice.refusal += message.get("refusal") or ""
    for position, part in enumerate(message.get("tool_calls") or ()):
        call = choice.tool_calls.setdefault(part.get("index", position), ToolCall())
        function = part.get("function") or {}
        call.id = part.get("id") or call.id
        call.name += function.get("name") or ""
        call.arguments += function.get("arguments") or ""


def _read_logprobs(logprobs: Mapping[str, Any]) -> list[float]:
    values = logprobs.get("token_logprobs")
    if values is not None:
        return list(values)
    return [token["logprob"] for token in logprobs.get("content") or logprobs.get("refusal") or ()]


def _read_message(message: Mapping[str, Any]) -> dict[str, Any]:
    role, content = message.get("role"), message.get("content")
    if role == "tool":
        return {
            "role": role,
            "parts": [{"type": "tool_call_response", "id": message.get("tool_call_id"), "response": content}],
        }
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    parts: list[dict[str, Any]] = [{"type": "reasoning", "content": reasoning}] if reasoning else []
    if isinstance(content, str):
        parts.append({"type": "text", "content": content})
    else:
        parts += (_read_part(part) for part in content or ())
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        parts.append(tool_call_part(call.get("id"), function.get("name"), function.get("arguments")))
    return {"role": role, "parts": parts}


def _read_part(part: Mapping[str, Any]) -> dict[str, Any]:
    kind = part.get("type")
    if kind == "text":
        return {"type": "text", "content": part.get("text")}
    if kind == "image_url":
        url = part["image_url"]["url"]
        if not url.startswith("data:"):
            return {"type": "uri", "modality": "image", "uri": url}
        head, _, content = url.partition(",")
        mime_type = head.removeprefix("data:").partition(";")[0]
        return {"type": "blob", "modality": "image", "mime_type": mime_type, "content": content}
    return dict(part)
