"""Creates the tiny model of the RAG example: ``python -m examples.rag.warm_start examples/rag/checkpoint``.

The demonstrations begin with either relation of the question, most often with the one that is named first and has to
be searched last. Many answer after one search, and many others then search for the wrong person or relation. The model
learns how a conversation with the search tool looks; from rewards it learns what to search for, and in which order.
"""

from __future__ import annotations

import random

from examples.rag.agent import INSTRUCTIONS
from examples.rag.problems import FACT, FIRST_NAMES, LAST_NAMES, QUESTIONS, RELATIONS, people, relation_pairs
from examples.tiny_model import Chat, begin, imitate, make_model, make_tokenizer, save

STEPS = 700
SEED = 1
START, THEN = (0.36, 0.52, 0.12), (0.35, 0.55, 0.1)
"""Weights of the question's first relation, of its second one, and of a random one, in the first and second search."""
AGAIN, NEXT = 0.6, (0.75, 0.25)
"""Probability of a second search; weights of the person that was found and of the person in the question."""
FIXED = (
    INSTRUCTIONS,
    '<tool_call>\n{"name": "search", "arguments": {"query": "',
    '"}}\n</tool_call>',
    "Who is the ",
    "Name the ",
    "of the ",
    ": The ",
    *FIRST_NAMES,
    *(f" {name}" for name in LAST_NAMES),
    *(f"{relation} " for relation in RELATIONS),
)


def demonstrate(everyone: list[str], pairs: list[tuple[str, str]], rng: random.Random) -> Chat:
    """Makes a conversation about people with random facts, which often searches for the wrong thing or stops early."""
    (first, second), person = rng.choice(pairs), rng.choice(everyone)
    question = rng.choice(QUESTIONS).format(first=first, second=second, name=person)
    chat: Chat = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": question}]

    def search(name: str, relation: str) -> str:
        found = rng.choice(everyone)
        call = {"function": {"name": "search", "arguments": {"query": f"{relation} {name}"}}}
        chat.append({"role": "assistant", "tool_calls": [call]})
        chat.append({"role": "tool", "content": f"{name}: {FACT.format(relation=relation, name=found)}"})
        return found

    relations = (first, second, rng.choice(RELATIONS))
    answer = search(person, rng.choices(relations, START)[0])
    if rng.random() < AGAIN:
        answer = search(rng.choices((answer, person), NEXT)[0], rng.choices(relations, THEN)[0])
    return [*chat, {"role": "assistant", "content": answer}]


def main() -> None:
    """Creates the checkpoint."""
    directory = begin(__doc__, SEED)
    rng, everyone, pairs = random.Random(SEED), people("train"), sorted(relation_pairs("train"))
    tokenizer = make_tokenizer(["of ", "is ", "nothing found"], FIXED)
    model = make_model(tokenizer, hidden_size=64, layers=3)
    imitate(model, tokenizer, lambda: demonstrate(everyone, pairs, rng), steps=STEPS, answers_only=True)
    save(model, tokenizer, directory)


if __name__ == "__main__":
    main()
