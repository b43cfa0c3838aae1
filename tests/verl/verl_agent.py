"""Agents that verl trains in the tests."""

from __future__ import annotations

import itertools
import zlib
from collections import defaultdict
from typing import Any

import openai

import agentlightning as agl

TOOLS: Any = [{"type": "function", "function": {"name": "count", "parameters": {"type": "object", "properties": {}}}}]
SEEDS: Any = defaultdict(itertools.count)


async def agent(task: dict[str, Any], llm: agl.LLM) -> float | None:
    """Calls the model several times with tool results in between; the reward is the share of ASCII characters.

    The reward of the kind ``call`` is whether the first answer is a tool call.
    """
    kind = task["kind"]
    if kind == "nothing":
        return None
    said = ""
    if kind == "seeded":  # the rollouts of a task are alike, so each takes the next seed
        seed = zlib.crc32(task["text"].encode()) % 100_000 * 100 + next(SEEDS[task["text"]])
        llm = llm.model_copy(update={"sampling_parameters": {**llm.sampling_parameters, "seed": seed}})
    async with openai.AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key, max_retries=0) as client:
        prompt = task["text"] * {"overlong": 25}.get(kind, 1)
        messages: list[Any] = [{"role": "user", "content": prompt}]
        for turn in range(task["turns"]):
            length = 70 if kind == "call" and turn == 0 else 6
            message = await ask(client, llm, messages, stream=kind == "stream", max_tokens=length)
            said += message.get("content") or ""
            if turn == 0:
                n_calls = len(message.get("tool_calls") or ())
            if kind != "fresh":  # a fresh agent starts a new conversation with every call
                messages += [message, {"role": "tool", "content": f"plain = {count_plain(said)}"}]
            if kind == "crash":
                raise ZeroDivisionError("the agent fell over")
        if kind == "overlong":  # the first prompt is too long for training, and this one is too long for the model
            await ask(client, llm, [{"role": "user", "content": prompt * 9}])
    return float(n_calls == 1) if kind == "call" else count_plain(said) / max(1, len(said))


async def ask(
    client: openai.AsyncOpenAI, llm: agl.LLM, messages: list[Any], *, stream: bool = False, max_tokens: int = 6
) -> dict[str, Any]:
    """Returns one answer as a message of the conversation."""
    request = {
        "model": llm.model, "messages": messages, "tools": TOOLS, "max_tokens": max_tokens, **llm.sampling_parameters
    }  # fmt: skip
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
