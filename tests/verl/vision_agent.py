"""An agent that shows images to the model that verl trains in the tests."""

from __future__ import annotations

import base64
import io
from typing import Any

import openai
from PIL import Image

import agentlightning as agl


async def agent(task: dict[str, Any], llm: agl.LLM) -> float:
    """Shows an image in each turn of a conversation; the reward is the mean id of the sampled tokens."""
    sampled: list[int] = []
    messages: list[Any] = []
    async with openai.AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key, max_retries=0) as client:
        for size in task["sizes"]:
            messages.append({"role": "user", "content": ask(task["color"], size, task["text"])})
            answer = await client.chat.completions.create(
                model=llm.model, messages=messages, max_tokens=5, temperature=llm.sampling_parameters["temperature"]
            )
            content = answer.choices[0].message.content or ""
            sampled += [int(token) for token in content.split()]
            messages.append({"role": "assistant", "content": content})
    return sum(sampled) / len(sampled) / 1000


def ask(color: str, size: int, text: str = "look") -> list[dict[str, Any]]:
    """Returns the content of a message with an image, or without an image if the size is 0."""
    said: dict[str, Any] = {"type": "text", "text": text}
    return [said, {"type": "image_url", "image_url": {"url": image_url(color, size)}}] if size else [said]


def image_url(color: str, size: int, mode: str = "RGB") -> str:
    """Returns the data URI of a square image: white in the upper half, the color below, so that orientation matters."""
    image = Image.new(mode, (size, size), "white")
    image.paste(Image.new(mode, (size, size), color), (0, size // 2))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
