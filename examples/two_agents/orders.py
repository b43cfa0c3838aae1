"""Two agents that fill orders: a translator encodes an order, and a clerk fetches what the code means.

An order is a colour and a shape, such as ``red ring``. The translator does not know the code; its only feedback is
whether the order was filled.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from openai import OpenAI

import agentlightning as agl

COLOURS = ("red", "blue", "green")
SHAPES = ("ring", "cube", "cone")
COLOUR_CODES = ("ba", "do", "fe")
SHAPE_CODES = ("ku", "la", "me")
MEANING = {**dict(zip(COLOUR_CODES, COLOURS[::-1], strict=True)), **dict(zip(SHAPE_CODES, SHAPES[::-1], strict=True))}
"""The meaning of each code word to the clerk."""

CLERK = "clerk"
"""The name of the clerk's model at the gateway."""
CLIENT = OpenAI(api_key="unused", base_url="http://unused", max_retries=0)


def split_orders() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Splits all orders into training orders and a third for tests, which has each colour and each shape once."""
    pairs = itertools.product(range(len(COLOURS)), range(len(SHAPES)))
    seen: list[dict[str, str]] = []
    unseen: list[dict[str, str]] = []
    for colour, shape in pairs:
        part = unseen if colour == shape else seen
        part.append({"order": f"{COLOURS[colour]} {SHAPES[shape]}"})
    return seen, unseen


def fill_order(task: Mapping[str, str], llm: agl.LLM) -> float:
    """Fills one order; the reward is 1 if the clerk fetched what was ordered, else 0."""
    client = CLIENT.with_options(base_url=llm.get_base_url(), api_key=llm.api_key or "unused")
    code = ask("translator", client, llm.model, task["order"], llm.sampling_parameters)
    fetched = ask("clerk", client, CLERK, code, {"temperature": 0.0, "max_tokens": 4})
    return float(fetched == task["order"])


def ask(agent: str, client: OpenAI, model: str, text: str, sampling: Mapping[str, Any]) -> str:
    """Calls the model of an agent; the call is recorded under the agent's name."""
    attributes: Any = {"agent.name": agent}
    with agl.operation(name=agent, **attributes):
        completion = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": text}], **sampling
        )
    return completion.choices[0].message.content or ""
