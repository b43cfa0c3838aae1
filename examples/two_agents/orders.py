"""Two agents that fill orders: a translator puts an order in a code, a clerk fetches what the code says.

An order is a colour and a shape, such as ``red ring``. Nobody tells the translator which word of the code stands for
what; all it gets is whether the order was filled.
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
"""What the clerk takes each word of the code for."""

CLERK = "clerk"
"""What the gateway calls the clerk's model."""
CLIENT = OpenAI(api_key="unused", base_url="http://unused", max_retries=0)


def split_orders() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """All orders: those to train on, and a third for tests alone, with each colour and each shape once."""
    pairs = itertools.product(range(len(COLOURS)), range(len(SHAPES)))
    seen: list[dict[str, str]] = []
    unseen: list[dict[str, str]] = []
    for colour, shape in pairs:
        part = unseen if colour == shape else seen
        part.append({"order": f"{COLOURS[colour]} {SHAPES[shape]}"})
    return seen, unseen


def fill_order(task: Mapping[str, str], llm: agl.LLM) -> float:
    """Works on one order; the reward is 1 if the clerk fetched what was ordered, and 0 otherwise."""
    client = CLIENT.with_options(base_url=llm.get_base_url(), api_key=llm.api_key or "unused")
    code = ask("translator", client, llm.model, task["order"], llm.sampling_parameters)
    fetched = ask("clerk", client, CLERK, code, {"temperature": 0.0, "max_tokens": 4})
    return float(fetched == task["order"])


def ask(agent: str, client: OpenAI, model: str, text: str, sampling: Mapping[str, Any]) -> str:
    """Lets one of the agents answer; its calls are recorded under its name."""
    attributes: Any = {"agent.name": agent}
    with agl.operation(name=agent, **attributes):
        completion = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": text}], **sampling
        )
    return completion.choices[0].message.content or ""
