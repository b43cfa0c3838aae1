"""The tools of OpenAI's Responses as functions of Chat Completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from agentlightning_plugins.gateway.dialects.chat_part import Part, take
from agentlightning_plugins.gateway.dialects.dialect import MALFORMED, TranslationError
from agentlightning_plugins.gateway.dialects.wire import dump_json, parse_json

_HOSTED: Final = frozenset(
    "code_interpreter computer computer_use_preview file_search image_generation mcp programmatic_tool_calling "
    "tool_search web_search web_search_2025_08_26 web_search_preview web_search_preview_2025_03_11".split()
)
"""Tools that OpenAI runs. No other server does, so a translated request is sent without them."""


class FunctionTools:
    """The tools of a request as functions: the name of a namespace goes in front, custom tools take one text."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.functions: list[dict[str, Any]] = []
        self.left_out: list[str] = []
        """Types of the tools that are left out."""
        self._origins: dict[str, tuple[str | None, str, bool]] = {}
        """For each function: its namespace, its name there, and whether it is custom."""
        self._add(body.get("tools") or ())
        for item in body["input"] if isinstance(body.get("input"), list) else ():
            if item.get("type") == "additional_tools":
                self._add(item["tools"])

    def _add(self, tools: Sequence[Mapping[str, Any]], namespace: str | None = None) -> None:
        for tool in tools:
            kind = tool.get("type")
            if kind == "namespace" and namespace is None:
                self._add(tool["tools"], tool["name"])
            elif kind in ("function", "custom"):
                name = function_name(tool["name"], namespace)
                self._origins[name] = namespace, tool["name"], kind == "custom"
                function = _to_function(tool) if kind == "custom" else without_type(tool)
                self.functions.append({"type": "function", "function": {**function, "name": name}})
            elif kind in _HOSTED:
                self.left_out.append(kind)
            else:
                raise TranslationError(
                    f"tools of type {kind!r} have no form in Chat Completions, which serves the model behind this "
                    "gateway: give tools of type 'function', 'custom' or 'namespace'"
                )

    def is_custom(self, part: Part) -> bool:
        """Whether a part is a call of a custom tool."""
        return part.kind == "tool_call" and self._origins.get(part.name, (None, "", False))[2]

    def to_item(self, part: Part) -> dict[str, Any]:
        """Returns a call of a function as the call of its tool."""
        namespace, name, is_custom = self._origins.get(part.name, (None, part.name, False))
        call = {"call_id": part.call_id, "name": name, **take(namespace=namespace)}
        if not is_custom:
            return {"type": "function_call", **call, "arguments": part.text}
        try:
            text = parse_json(part.text.encode())["input"]
        except MALFORMED:
            text = part.text
        return {"type": "custom_tool_call", **call, "input": text if isinstance(text, str) else part.text}


def function_name(name: str, namespace: str | None) -> str:
    """Returns the name of the function for a tool."""
    return name if namespace is None else f"{namespace}__{name}"


def _to_function(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a custom tool as a function that takes its text."""
    form, description = tool.get("format") or {}, tool.get("description") or ""
    if form.get("type") == "grammar":
        description += f"\n\nThe input follows this {form.get('syntax')} grammar:\n{form.get('definition')}"
    schema = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    return {"description": description, "parameters": schema}


def to_known_item(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns an item in which a call of a custom tool is the call of a function that the model sees."""
    match item.get("type"):
        case "custom_tool_call":
            name, text = function_name(item["name"], item.get("namespace")), dump_json({"input": item["input"]})
            return {"type": "function_call", "call_id": item["call_id"], "name": name, "arguments": text.decode()}
        case "function_call":
            return {**item, "name": function_name(item["name"], item.get("namespace"))}
        case "agent_message":
            return {"role": "user", "content": item["content"]}
        case _:
            return item


def without_type(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of an object without its type, which Chat Completions gives to the object around it."""
    return {key: value for key, value in fields.items() if key != "type"}
