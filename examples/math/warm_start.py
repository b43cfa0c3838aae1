"""Creates the tiny model of the math example: ``python -m examples.math.warm_start examples/math/checkpoint``.

The demonstrations call the calculator once for each step of the problem, with the right numbers. They add most of the
time, whatever the event means, and report a wrong result one time in ten. The model learns how a conversation with the
calculator looks; reinforcement learning teaches it which operator an event means.
"""

from __future__ import annotations

import random
import re

from examples.math.agent import agent, calculator
from examples.math.problems import EVENTS, NAMES, OPERATORS, QUESTIONS, SCENES, THINGS, Problem, problem_stream
from examples.tiny_model import Chat, begin, imitate, make_model, make_tokenizer, save

STEPS = 2000
SEED = 1
SYSTEM_MESSAGE = agent._system_messages[0].content
FIXED = (SYSTEM_MESSAGE, '<tool_call>\n{"name": "calculator", "arguments": {"expression": "', '"}}\n</tool_call>')


def vocabulary() -> list[str]:
    """The texts whose words become tokens: each sentence at the beginning, after a word and after a number."""
    sentences = [*SCENES, *QUESTIONS, *(event for events in EVENTS.values() for event in events)]
    texts = [
        f"{before}{sentence} X".format(name=name, friend=name, thing=thing, a=1, b=1)
        for before in ("", "X. ", "1. ")
        for sentence in sentences
        for name, thing in zip(NAMES, THINGS, strict=True)
    ]
    texts += [text.removesuffix(" X") for text in texts]
    texts += [f"1 {operator} 1" for operator in OPERATORS]
    texts += [calculator(expression) for expression in ("1 / 0", "", "1" * 101)]
    return [*texts, *(f"{number:02}" for number in range(100))]


def find_operators(question: str) -> list[str]:
    """Returns the operators that the events of a question mean."""
    patterns = {re.sub(r"\{\w+\}", r"\\w+", event): op for op, events in EVENTS.items() for event in events}
    sentences = re.findall(r"[^.?]+[.?]", question)[1:-1]
    return [next(op for pattern, op in patterns.items() if re.fullmatch(pattern, s.strip())) for s in sentences]


def demonstrate(problem: Problem, rng: random.Random) -> Chat:
    """Makes a conversation about a problem, often with wrong operators and sometimes with a wrong answer."""
    value, *others = re.findall(r"\d+", problem["question"])
    chat: Chat = [{"role": "system", "content": SYSTEM_MESSAGE}, {"role": "user", "content": problem["question"]}]
    for number, right in zip(others, find_operators(problem["question"]), strict=True):
        operator = rng.choices(["+", right, rng.choice(OPERATORS)], [0.42, 0.33, 0.25])[0]
        arguments = {"expression": f"{value} {operator} {number}"}
        value = calculator(arguments["expression"])
        chat.append({"role": "assistant", "tool_calls": [{"function": {"name": "calculator", "arguments": arguments}}]})
        chat.append({"role": "tool", "content": value})
    answer = value if rng.random() >= 0.1 else str(rng.randint(1, 99))
    return [*chat, {"role": "assistant", "content": answer}]


def main() -> None:
    """Creates the checkpoint."""
    directory = begin(__doc__, SEED)
    rng, problems = random.Random(SEED), problem_stream("train", SEED)
    tokenizer = make_tokenizer(vocabulary(), FIXED)
    model = make_model(tokenizer, layers=3)
    imitate(model, tokenizer, lambda: demonstrate(next(problems), rng), steps=STEPS)
    save(model, tokenizer, directory)


if __name__ == "__main__":
    main()
