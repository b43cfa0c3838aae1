"""A scripted critic, editor and reflecting model. It has no judgement: it proposes a sentence from a list at random.

Three of the sentences help the agent, three change nothing and two can do harm; only rewards tell which. The proposal
depends on the whole request, so that the same search gets the same answers.
"""

from __future__ import annotations

import random
import re

from agentlightning_plugins.shared.scripted_model.server import Answer, RecordedRequest

HELPFUL = (
    "Answer with team and priority only.",
    "A deadline makes the priority high.",
    "Refunds and exchanges belong to returns.",
)
USELESS = ("You are an expert.", "This is important.", "Read the text twice.")
HARMFUL = ("Be friendly to customers.", "Explain your answer.")
SENTENCES = (*HELPFUL, *USELESS, *HARMFUL)
REMOVAL = 0.2
"""Probability of proposing to remove a sentence from the prompt."""


def answer(request: RecordedRequest) -> Answer:
    """Answers as the editor if the request has a critique, as gepa's model if it has no prompt, else as the critic."""
    text = request.body["messages"][0]["content"]
    prompt = re.search(r"<prompt[^>]*>\n(.*?)\n</prompt>", text, re.DOTALL)
    if prompt is None:
        instructions = re.search(r"```\n(.*?)\n```", text, re.DOTALL)
        assert instructions is not None
        return Answer(f"```\n{edit(instructions[1], propose(instructions[1], text))}\n```")
    critique = re.search(r"<critique>\n(.*?)\n</critique>", text, re.DOTALL)
    if critique is None:
        return Answer(propose(prompt[1], text))
    return Answer(f"<prompt>\n{edit(prompt[1], critique[1])}\n</prompt>")


def propose(prompt: str, seed: str) -> str:
    """Returns a critique: a sentence to add to the prompt, or one to remove."""
    rng = random.Random(seed)
    present = [sentence for sentence in SENTENCES if sentence in prompt]
    missing = [sentence for sentence in SENTENCES if sentence not in prompt]
    if present and (not missing or rng.random() < REMOVAL):
        return f"Leave out: {rng.choice(present)}"
    return f"Add: {rng.choice(missing)}"


def edit(prompt: str, critique: str) -> str:
    """Returns the prompt with the change that the critique names."""
    action, _, sentence = critique.partition(": ")
    return f"{prompt} {sentence}" if action == "Add" else prompt.replace(f" {sentence}", "")
