"""Google's ``generateContent``, translated to Chat Completions. Model and streaming are in the path of a request."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from agentlightning_plugins.gateway.dialects.chat_part import Part, PartTranslation, parse_arguments, take, to_content
from agentlightning_plugins.gateway.dialects.dialect import Completion, Dialect, Translation, to_tool_call
from agentlightning_plugins.gateway.dialects.fields import GOOGLE_FIELDS
from agentlightning_plugins.gateway.dialects.openai import CHAT
from agentlightning_plugins.gateway.dialects.wire import dump_json, to_event

_STATUSES: Final = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
_REASONS: Final = {"stop": "STOP", "tool_calls": "STOP", "length": "MAX_TOKENS", "content_filter": "SAFETY"}
_MODES: Final = {"AUTO": "auto", "ANY": "required", "VALIDATED": "auto", "NONE": "none"}
_SAMPLING: Final = {
    "temperature": "temperature",
    "topP": "top_p",
    "topK": "top_k",
    "maxOutputTokens": "max_tokens",
    "stopSequences": "stop",
    "seed": "seed",
    "presencePenalty": "presence_penalty",
    "frequencyPenalty": "frequency_penalty",
}
_WORD: Final = re.compile(r"_([a-z])")
_FREE: Final = frozenset({"args", "response", "parameters", "parametersJsonSchema", "responseSchema"})
"""Fields whose keys are the user's."""


def _paths(verb: str) -> Sequence[str]:
    return [f"{version}/models/{{model}}:{verb}" for version in ("v1beta", "v1", "v1alpha")]


class GenerateContent(Dialect):
    """Google's ``generateContent``; only translated."""

    name = "google-generate-content"
    routes = _paths("generateContent")
    path = "models:generateContent"
    span_name = "generate_content"
    operation = "chat"
    fields = GOOGLE_FIELDS

    def read_messages(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        return CHAT.read_messages(to_chat_request(body))

    def read_tools(self, body: Mapping[str, Any]) -> Sequence[Any]:
        return CHAT.read_tools(to_chat_request(body))

    def read_answer(self, answer: Mapping[str, Any], completion: Completion) -> None:
        raise ValueError("answers of Google's own servers are not read")

    def translate(self, body: Mapping[str, Any]) -> Translation | None:
        return GoogleTranslation(body)

    def error_body(self, status: int, message: str, code: str | None) -> dict[str, Any]:
        kind = _STATUSES.get(status) or ("INTERNAL" if status >= 500 else "FAILED_PRECONDITION")
        details = {} if code is None else {"details": [{"reason": code}]}
        return {"error": {"code": status, "message": message, "status": kind, **details}}


class StreamGenerateContent(GenerateContent):
    """The same as a stream of server-sent events."""

    name = "google-stream-generate-content"
    routes = _paths("streamGenerateContent")
    path = "models:streamGenerateContent"
    route_fields: Mapping[str, Any] = {"stream": True}


class GoogleCountTokens(GenerateContent):
    """Counts the tokens of a request."""

    name = "google-count-tokens"
    routes = _paths("countTokens")
    path = "models:countTokens"
    span_name = "count_tokens"
    operation = "count_tokens"

    def translate(self, body: Mapping[str, Any]) -> Translation | None:
        return GoogleCountTranslation(body)


class GoogleTranslation(PartTranslation):
    """Translates one call. Each part of the answer becomes a part of the candidate; a tool call is sent whole."""

    left_out_tools: Sequence[str] = ()

    def request(self) -> dict[str, Any]:
        tools = [name for tool in _camel(self._body).get("tools") or () for name in tool]
        self.left_out_tools = [name for name in tools if name != "functionDeclarations"]
        return to_chat_request(self._body)

    def answer(self, answer: dict[str, Any]) -> dict[str, Any]:
        self._read_whole(answer)
        return self._response([_to_part(part) for part in self._parts], is_last=True)

    def close(self) -> bytes:
        return self._end_parts() + to_event(dump_json(self._response([], is_last=True)))

    def _add(self, part: Part, text: str, logprobs: Sequence[Any]) -> bytes:
        if part.kind == "tool_call":
            return b""
        return to_event(dump_json(self._response([_to_text(part.kind, text)])))

    def _stop(self, part: Part) -> bytes:
        return to_event(dump_json(self._response([_to_part(part)]))) if part.kind == "tool_call" else b""

    def _response(self, parts: Sequence[Mapping[str, Any]], *, is_last: bool = False) -> dict[str, Any]:
        candidate: dict[str, Any] = {"index": 0, "content": {"role": "model", "parts": parts}}
        response = {"candidates": [candidate], "modelVersion": self._model, "responseId": self._id}
        if not is_last:
            return response
        reason = self._finish_reason or "stop"
        candidate["finishReason"] = _REASONS.get(reason, "OTHER")
        if any(part.kind == "refusal" for part in self._parts):
            candidate["finishReason"] = "SAFETY"
        written = self._usage.get("completion_tokens") or 0
        cached = (self._usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        return response | {
            "usageMetadata": take(
                promptTokenCount=self._prompt_tokens,
                candidatesTokenCount=written,
                totalTokenCount=self._prompt_tokens + written,
                cachedContentTokenCount=cached,
            )
        }


class GoogleCountTranslation(GoogleTranslation):
    """Requests one token from a chat server and reads the usage in its answer."""

    def request(self) -> dict[str, Any]:
        return to_chat_request(self._body.get("generateContentRequest") or self._body) | {
            "model": self._body["model"],
            "max_tokens": 1,
        }

    def answer(self, answer: dict[str, Any]) -> dict[str, Any]:
        return {"totalTokens": answer["usage"]["prompt_tokens"]}


def to_chat_request(body: Mapping[str, Any]) -> dict[str, Any]:
    """Translates a request; both spellings of names, ``topP`` and ``top_p``, are read."""
    body = _camel(body)
    config = body.get("generationConfig") or {}
    thinking = config.get("thinkingConfig") or {}
    choice = (body.get("toolConfig") or {}).get("functionCallingConfig") or {}
    declared = [each for tool in body.get("tools") or () for each in tool.get("functionDeclarations") or ()]
    allowed = choice.get("allowedFunctionNames")
    tools = [_to_tool(each) for each in declared if not allowed or each["name"] in allowed]
    chat = {name: value for name, value in body.items() if name in ("model", "stream")}
    chat["messages"] = list(_to_messages(body))
    chat |= {target: config[name] for name, target in _SAMPLING.items() if config.get(name) is not None}
    return chat | take(
        n=config.get("candidateCount") if config.get("candidateCount") != 1 else None,
        tools=tools or None,
        tool_choice=_MODES.get(str(choice.get("mode"))) if tools else None,
        response_format=_to_format(config),
        reasoning_effort=str(thinking["thinkingLevel"]).lower() if thinking.get("thinkingLevel") else None,
        stream_options={"include_usage": True} if body.get("stream") else None,
    )


def _to_messages(body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if body.get("systemInstruction"):
        yield {"role": "system", "content": to_content(_parts_of(body["systemInstruction"]), _to_chat_part)}
    calls: list[tuple[str, str]] = []
    """Name and id of each call; clients may leave out the ids."""
    answered: set[str] = set()
    for role, parts in _turns(body.get("contents") or ()):
        if role == "model":
            made = [each["functionCall"] for each in parts if each.get("functionCall")]
            named = [(each["name"], each.get("id") or f"call_{len(calls) + n}") for n, each in enumerate(made, start=1)]
            calls += named
            asked = [
                to_tool_call(call_id, name, dump_json(each.get("args") or {}).decode())
                for (name, call_id), each in zip(named, made, strict=True)
            ]
            thoughts = "".join(each.get("text") or "" for each in parts if each.get("thought"))
            text = "".join(each.get("text") or "" for each in parts if not each.get("thought"))
            message = {"role": "assistant", "content": text or None}
            yield message | take(reasoning_content=thoughts or None, tool_calls=asked or None)
            continue
        for part in parts:
            if result := part.get("functionResponse"):
                open_ids = [call_id for name, call_id in calls if name == result["name"] and call_id not in answered]
                call_id = result.get("id") or next(iter(open_ids), "")
                answered.add(call_id)
                yield {"role": "tool", "tool_call_id": call_id, "content": _to_result(result.get("response"))}
        if others := [part for part in parts if not part.get("functionResponse")]:
            yield {"role": "user", "content": to_content(others, _to_chat_part)}


def _turns(contents: Any) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """Yields role and parts; what the model said in several contents, as clients keep a stream, is one turn."""
    turns = [
        (content.get("role") or "user" if isinstance(content, Mapping) else "user", _parts_of(content))
        for content in ([contents] if isinstance(contents, (str, Mapping)) else contents)
    ]
    for key, group in itertools.groupby(
        enumerate(turns), key=lambda item: "model" if item[1][0] == "model" else item[0]
    ):
        if parts := [part for _, (_, each) in group for part in each]:
            yield "model" if key == "model" else "user", parts


def _parts_of(content: Any) -> Sequence[Mapping[str, Any]]:
    if isinstance(content, str):
        return [{"text": content}]
    parts = content.get("parts") or ()
    return [parts] if isinstance(parts, Mapping) else parts


def _to_chat_part(part: Mapping[str, Any]) -> dict[str, Any]:
    if "text" in part:
        return {"type": "text", "text": part["text"]}
    if data := part.get("inlineData"):
        return {"type": "image_url", "image_url": {"url": f"data:{data['mimeType']};base64,{data['data']}"}}
    if file := part.get("fileData"):
        return {"type": "image_url", "image_url": {"url": file["fileUri"]}}
    return {"type": "text", "text": dump_json(part).decode()}


def _to_result(response: Any) -> str:
    """Returns the text of a result; Google's clients put a value under ``result`` or ``output``."""
    if isinstance(response, Mapping) and len(response) == 1 and (found := {*response} & {"result", "output"}):
        response = response[found.pop()]
    return response if isinstance(response, str) else dump_json(response).decode()


def _to_tool(declared: Mapping[str, Any]) -> dict[str, Any]:
    schema = declared.get("parametersJsonSchema") or _to_schema(declared.get("parameters"))
    function = take(name=declared["name"], description=declared.get("description"), parameters=schema)
    return {"type": "function", "function": function}


def _to_schema(schema: Any) -> Any:
    """Returns a JSON schema: Google writes the types in capitals, and whether null is allowed apart."""
    if isinstance(schema, list):
        return [_to_schema(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    kind, nullable = schema.get("type"), schema.get("nullable")
    found = {name: _to_schema(value) for name, value in schema.items() if name not in ("type", "nullable")}
    if not isinstance(kind, str):
        return {name: value for name, value in {"type": _to_schema(kind), **found}.items() if value is not None}
    return {"type": [kind.lower(), "null"] if nullable else kind.lower(), **found}


def _to_format(config: Mapping[str, Any]) -> Any:
    if config.get("responseMimeType") != "application/json":
        return None
    schema = config.get("responseJsonSchema") or _to_schema(config.get("responseSchema"))
    if not schema:
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def _to_part(part: Part) -> dict[str, Any]:
    if part.kind != "tool_call":
        return _to_text(part.kind, part.text)
    return {"functionCall": {"id": part.call_id, "name": part.name, "args": parse_arguments(part.text)}}


def _to_text(kind: str, text: str) -> dict[str, Any]:
    return {"text": text, "thought": True} if kind == "reasoning" else {"text": text}


def _camel(value: Any) -> Any:
    """Returns a request with names such as ``topP``; Google's servers read ``top_p`` too."""
    if isinstance(value, list):
        return [_camel(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    names = {name: _WORD.sub(lambda found: found[1].upper(), name) for name in value}
    return {names[name]: each if names[name] in _FREE else _camel(each) for name, each in value.items()}
