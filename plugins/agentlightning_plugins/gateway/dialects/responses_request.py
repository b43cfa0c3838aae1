"""Requests of OpenAI's Responses as requests of Chat Completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from agentlightning_plugins.gateway.dialects.dialect import Untranslatable, take

_STATEFUL: Final = ("previous_response_id", "conversation", "prompt", "background")
_DROPPED: Final = frozenset(
    # Translated below, or without meaning where nothing is stored and no tool is hosted.
    "input instructions tools tool_choice text max_output_tokens reasoning include truncation store stream_options "
    "max_tool_calls context_management prompt_cache_options prompt_cache_retention moderation".split()
).union(_STATEFUL)
_ITEMS: Final = frozenset({"message", "function_call", "function_call_output", "reasoning"})
_LOGPROBS: Final = "message.output_text.logprobs"


def wants_logprobs(body: Mapping[str, Any]) -> bool:
    """Whether the agent asked for log-probabilities."""
    return _LOGPROBS in (body.get("include") or ()) or bool(body.get("top_logprobs"))


def to_chat_request(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of ``chat/completions`` that asks for the same.

    Raises:
        Untranslatable: it needs what Chat Completions does not have: state at the server, or tools that run there.
    """
    _check(body)
    text, reasoning = body.get("text") or {}, body.get("reasoning") or {}
    chat: dict[str, Any] = {key: value for key, value in body.items() if key not in _DROPPED}
    chat["messages"] = to_chat_messages(body)
    if body.get("tools"):
        chat["tools"] = to_chat_tools(body)
    chat |= take(
        max_completion_tokens=body.get("max_output_tokens"),
        tool_choice=_to_choice(body.get("tool_choice")),
        response_format=_to_format(text.get("format")),
        verbosity=text.get("verbosity"),
        reasoning_effort=reasoning.get("effort"),
        logprobs=wants_logprobs(body) or None,
        stream_options={"include_usage": True} if body.get("stream") else None,
    )
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = {tool.get("name") for tool in choice.get("tools") or ()}
        chat["tools"] = [tool for tool in chat.get("tools") or () if tool["function"]["name"] in allowed]
    return chat


def to_chat_messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The input as chat messages; items that these have no form for become parts of a user's message."""
    messages: list[dict[str, Any]] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    items = body.get("input")
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    for item in items or ():
        _add_item(item, messages)
    return messages


def to_chat_tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tools, of which those that are no functions stay as they are."""
    return [
        {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
        if tool.get("type") == "function"
        else tool
        for tool in body.get("tools") or ()
    ]


def _check(body: Mapping[str, Any]) -> None:
    for key in _STATEFUL:
        if body.get(key):
            raise Untranslatable(
                f"{key!r} needs a server that keeps responses, and the model behind this gateway is served by Chat "
                "Completions: send the whole input with each request"
            )
    for tool in body.get("tools") or ():
        if tool.get("type") != "function":
            raise Untranslatable(
                f"tools of type {tool.get('type')!r} run at OpenAI, and the model behind this gateway is served by "
                "Chat Completions: give tools of type 'function'"
            )
    items = body.get("input")
    if not isinstance(items, (str, list)):
        raise Untranslatable(f"'input' is {items!r}; give a text or a list of items")
    for item in () if isinstance(items, str) else items:
        if item.get("type", "message") not in _ITEMS:
            raise Untranslatable(
                f"input items of type {item.get('type')!r} have no form in Chat Completions, which serves the model "
                f"behind this gateway; there is {', '.join(sorted(_ITEMS))}"
            )


def _add_item(item: Mapping[str, Any], messages: list[dict[str, Any]]) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if role == "assistant":
            _assistant(messages, "content", "tool_calls")["content"] = _to_content(item.get("content"))
        else:
            messages.append(
                {"role": "system" if role == "developer" else role, "content": _to_content(item.get("content"))}
            )
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or ()
        text = "".join(part.get("text") or "" for part in parts)
        if text:
            message = _assistant(messages, "content", "tool_calls")
            message["reasoning_content"] = message.get("reasoning_content", "") + text
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        _assistant(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        content = _to_content(item.get("output"))
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
    else:
        messages.append({"role": "user", "content": [dict(item)]})


def _assistant(messages: list[dict[str, Any]], *before: str) -> dict[str, Any]:
    """The assistant's message that an item belongs to: the last one, unless that has what only comes after the item."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(last.get(key) for key in before):
        last = {"role": "assistant", "content": None}
        messages.append(last)
    return last


def _to_content(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    parts = list(_to_parts(content))
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _to_parts(content: Sequence[Any]) -> Iterator[dict[str, Any]]:
    for part in content:
        match part.get("type"):
            case "input_text" | "output_text" | "text":
                yield {"type": "text", "text": part.get("text")}
            case "refusal":
                yield {"type": "text", "text": part.get("refusal")}
            case "input_image":
                yield {"type": "image_url", "image_url": take(url=part.get("image_url"), detail=part.get("detail"))}
            case "input_file":
                yield {"type": "file", "file": {key: value for key, value in part.items() if key != "type"}}
            case _:
                yield dict(part)


def _to_choice(choice: Any) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools":
        return choice.get("mode") or "auto"
    return {"type": "function", "function": {"name": choice.get("name")}}


def _to_format(form: Any) -> Any:
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        return None if form is None or form.get("type") == "text" else form
    return {"type": "json_schema", "json_schema": {key: value for key, value in form.items() if key != "type"}}
