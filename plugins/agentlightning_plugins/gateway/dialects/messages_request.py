"""Requests of Anthropic's Messages as requests of Chat Completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from agentlightning_plugins.gateway.dialects.dialect import Untranslatable, take
from agentlightning_plugins.gateway.dialects.json_text import dump_json

_DROPPED: Final = frozenset(
    # Translated below, or about Anthropic's own servers.
    "messages system tools tool_choice stop_sequences metadata thinking output_config cache_control container "
    "service_tier inference_geo diagnostics speed context_management mcp_servers".split()
)
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}


def to_chat_request(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of ``chat/completions`` that asks for the same.

    Raises:
        Untranslatable: it needs Anthropic's servers.
    """
    if body.get("thread"):  # its client sends the whole conversation when it is told so in these words
        message = "'thread' needs a server that keeps conversations: send all messages with each request"
        raise Untranslatable(message, "thread_unsupported_request")
    for tool in body.get("tools") or ():
        if "input_schema" not in tool:
            raise Untranslatable(
                f"tools of type {tool.get('type')!r} are Anthropic's own, and the model behind this gateway is served "
                "by Chat Completions: give tools with an 'input_schema'"
            )
    chat: dict[str, Any] = {key: value for key, value in body.items() if key not in _DROPPED}
    chat["messages"] = to_chat_messages(body)
    if body.get("tools"):
        chat["tools"] = to_chat_tools(body)
    choice, output = body.get("tool_choice") or {}, body.get("output_config") or {}
    return chat | take(
        stop=body.get("stop_sequences"),
        user=(body.get("metadata") or {}).get("user_id"),
        tool_choice=_to_choice(choice),
        parallel_tool_calls=False if choice.get("disable_parallel_tool_use") else None,
        response_format=_to_format(output.get("format")),
        reasoning_effort=output.get("effort"),
        stream_options={"include_usage": True} if body.get("stream") else None,
    )


def to_chat_messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """System and messages as chat messages; blocks that these have no form for stay as they are."""
    messages: list[dict[str, Any]] = []
    if body.get("system"):
        messages.append({"role": "system", "content": _to_content(body["system"])})
    for message in body.get("messages") or ():
        content = message["content"]
        if isinstance(content, str):
            messages.append({"role": message["role"], "content": content})
        elif message["role"] == "assistant":
            messages.append(_to_assistant(content))
        else:
            messages += _to_others(message["role"], content)
    return messages


def to_chat_tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tools, of which Anthropic's own stay as they are."""
    return [
        {
            "type": "function",
            "function": take(
                name=tool["name"],
                description=tool.get("description"),
                parameters=tool["input_schema"],
                strict=tool.get("strict"),
            ),
        }
        if "input_schema" in tool
        else tool
        for tool in body.get("tools") or ()
    ]


def _to_assistant(blocks: Sequence[Any]) -> dict[str, Any]:
    thoughts = [block["thinking"] for block in blocks if block["type"] == "thinking"]
    calls = [block for block in blocks if block["type"] == "tool_use"]
    others = [block for block in blocks if block["type"] not in ("thinking", "redacted_thinking", "tool_use")]
    message: dict[str, Any] = {"role": "assistant", "content": _to_content(others) if others else None}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = [
            {
                "id": block["id"],
                "type": "function",
                "function": {"name": block["name"], "arguments": dump_json(block["input"]).decode()},
            }
            for block in calls
        ]
    return message


def _to_others(role: str, blocks: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """A user's message: the results of tools are messages of their own, before what the user says."""
    for block in blocks:
        if block["type"] == "tool_result":
            content = block.get("content")
            content = "" if content is None else _to_content(content)
            yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}
    others = [block for block in blocks if block["type"] != "tool_result"]
    if others:
        yield {"role": role, "content": _to_content(others)}


def _to_content(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    parts = list(_to_parts(content))
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _to_parts(blocks: Sequence[Any]) -> Iterator[dict[str, Any]]:
    for block in blocks:
        source = block.get("source") or {}
        if block["type"] == "text":
            yield {"type": "text", "text": block["text"]}
        elif block["type"] == "image" and source.get("type") in ("base64", "url"):
            url = source.get("url") or f"data:{source.get('media_type')};base64,{source.get('data')}"
            yield {"type": "image_url", "image_url": {"url": url}}
        else:
            yield dict(block)


def _to_choice(choice: Mapping[str, Any]) -> Any:
    kind = choice.get("type")
    return {"type": "function", "function": {"name": choice["name"]}} if kind == "tool" else _CHOICES.get(str(kind))


def _to_format(form: Any) -> Any:
    if not form:
        return None
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.get("schema"), "strict": True}}
