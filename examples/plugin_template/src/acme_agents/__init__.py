"""Stands for an agent framework: an assistant with a name, instructions and tools, and a loop that runs it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from openai import AsyncOpenAI


@dataclass
class Assistant:
    """Answers questions and may call functions of two integers on the way."""

    name: str
    instructions: str
    tools: Sequence[Callable[[int, int], int]] = ()
    model: str = "acme-1"
    client: AsyncOpenAI | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of each model call, such as ``temperature``."""
    observers: list[Callable[[str, dict[str, Any]], None]] = field(default_factory=list)
    """Functions that are called after each ``tool`` call, like the callbacks of frameworks."""

    async def ask(self, question: str) -> str:
        """Runs the loop of model calls and tool calls until the model answers."""
        client = self.client or AsyncOpenAI()
        tools = {tool.__name__: tool for tool in self.tools}
        messages: list[Any] = [{"role": "system", "content": self.instructions}, {"role": "user", "content": question}]
        while True:
            done = await client.chat.completions.create(
                model=self.model, messages=messages, tools=[_describe(tool) for tool in self.tools], **self.settings
            )
            reply = done.choices[0].message
            if not reply.tool_calls:
                return reply.content or ""
            messages.append(reply.model_dump(exclude_none=True))
            for call in reply.tool_calls:
                assert call.type == "function"  # nothing else is offered
                name, arguments = call.function.name, json.loads(call.function.arguments)
                result = str(tools[name](arguments["a"], arguments["b"]))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
                for observe in self.observers:
                    observe("tool", {"name": name, "arguments": arguments, "result": result, "id": call.id})


def _describe(tool: Callable[[int, int], int]) -> Any:
    numbers = {name: {"type": "integer"} for name in ("a", "b")}
    parameters = {"type": "object", "properties": numbers, "required": ["a", "b"]}
    function = {"name": tool.__name__, "description": tool.__doc__ or "", "parameters": parameters}
    return {"type": "function", "function": function}
