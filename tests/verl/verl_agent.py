"""The agents that verl trains in the tests."""

from __future__ import annotations

import asyncio
from typing import Any

import openai

import agentlightning as agl

EARLY = frozenset("abcdefghijklm")
TIMEOUT_S = 20.0
"""What the tests give a rollout: long for one that works, short for one that hangs."""


async def agent(task: dict[str, Any], llm: agl.LLM) -> float | None:
    """Asks several times, lets a tool count between, and is paid for letters of the alphabet's first half."""
    kind = task["kind"]
    if kind == "nothing":
        return None
    async with openai.AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key, max_retries=0) as client:
        prompt = task["text"] * (400 if kind == "overlong" else 1)
        messages: list[Any] = [{"role": "user", "content": prompt}]
        said = ""
        for _ in range(task["turns"]):
            answer = await client.chat.completions.create(model=llm.model, messages=messages, max_tokens=6)
            text = answer.choices[0].message.content or ""
            said += text
            count = sum(letter in EARLY for letter in text)
            messages += [{"role": "assistant", "content": text}, {"role": "tool", "content": f"early = {count}"}]
            if kind == "crash":
                raise ZeroDivisionError("the agent fell over")
            if kind == "hang":
                await asyncio.sleep(3600)
    return sum(letter in EARLY for letter in said) / max(1, len(said))
