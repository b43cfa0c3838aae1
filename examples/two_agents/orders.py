"""Two agents that fill orders: a translator encodes an order, and a clerk fetches what the code means.

An order is a colour and a shape, such as ``red ring``. The only feedback is whether the order was filled.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from openai import OpenAI

import agentlightning as agl

COLOURS = ("red", "blue", "green")
SHAPES = ("ring", "cube", "cone")
COLOUR_CODES = ("ba", "do", "fe")
SHAPE_CODES = ("ku", "la", "me")
COLOUR_OF = dict(zip(COLOUR_CODES, COLOURS[::-1], strict=True))
"""The colour that each code means to the clerk; the translator does not know it."""
CODE_OF = dict(zip(SHAPES, SHAPE_CODES[::-1], strict=True))
"""The translator's code for each shape; the clerk does not know it."""

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


def fill_order(task: Mapping[str, str], translator: agl.LLM, clerk: agl.LLM) -> float:
    """Fills one order; the reward is 1 if the clerk fetched what was ordered, else 0."""
    code = ask(translator, task["order"])
    return float(ask(clerk, code) == task["order"])


def ask(llm: agl.LLM, text: str) -> str:
    """Calls the policy of one agent."""
    client = CLIENT.with_options(base_url=llm.get_base_url(), api_key=llm.api_key or "unused")
    completion = client.chat.completions.create(
        model=llm.model, messages=[{"role": "user", "content": text}], **llm.sampling_parameters
    )
    return completion.choices[0].message.content or ""
