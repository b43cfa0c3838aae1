"""Agents that verl trains in the tests."""

from __future__ import annotations

from typing import Any

import openai

import agentlightning as agl

TOOLS: Any = [{"type": "function", "function": {"name": "count", "parameters": {"type": "object", "properties": {}}}}]


async def agent(task: dict[str, Any], llm: agl.LLM) -> float | None:
    """Calls the model several times with tool results in between; the reward is the share of ASCII characters."""
    kind = task["kind"]
    if kind == "nothing":
        return None
    said = ""
    async with openai.AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key, max_retries=0) as client:
        prompt = task["text"] * {"overlong": 25}.get(kind, 1)
        messages: list[Any] = [{"role": "user", "content": prompt}]
        for _ in range(task["turns"]):
            message = await ask(client, llm, messages, stream=kind == "stream")
            said += message.get("content") or ""
            if kind != "fresh":  # a fresh agent starts a new conversation with every call
                messages += [message, {"role": "tool", "content": f"plain = {count_plain(said)}"}]
            if kind == "crash":
                raise ZeroDivisionError("the agent fell over")
        if kind == "overlong":  # the first prompt is too long for training, and this one is too long for the model
            await ask(client, llm, [{"role": "user", "content": prompt * 9}])
    return count_plain(said) / max(1, len(said))


async def ask(client: openai.AsyncOpenAI, llm: agl.LLM, messages: list[Any], *, stream: bool = False) -> dict[str, Any]:
    """Returns one answer as a message of the conversation."""
    request = {"model": llm.model, "messages": messages, "tools": TOOLS, "max_tokens": 6, **llm.sampling_parameters}
    if not stream:
        answer = await client.chat.completions.create(**request)
        return answer.choices[0].message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})
    content = ""
    async for chunk in await client.chat.completions.create(**request, stream=True):
        for choice in chunk.choices:
            content += choice.delta.content or ""
    return {"role": "assistant", "content": content}


def count_plain(text: str) -> int:
    return sum(letter.isascii() for letter in text)
