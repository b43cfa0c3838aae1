"""Creates the tiny model of the SQL example: ``python -m examples.sql.warm_start examples/sql/checkpoint``.

The demonstrations have queries of the right form, but with habits: most of them select names and compare with ``>``,
and often use a wrong column, sometimes one that the table does not have. A check says yes unless the query failed or
found nothing. The model learns how the parts of a query are written; reinforcement learning teaches it what the
words of a question mean, and which column to try after a query that found nothing.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path

from examples.sql.agent import CHECK, REWRITE, WRITE, read_schema, run_query
from examples.sql.problems import (
    COMPARISONS,
    EXTREMES,
    MENTIONS,
    NAMES,
    NUMBERS,
    PLACE_NAMES,
    PLACES,
    SELECTED,
    STARTS,
    TABLES,
    Problem,
    problem_stream,
)
from examples.tiny_model import Chat, begin, imitate, make_model, make_tokenizer, save

STEPS = 2000
SEED = 1
FIXED = (
    WRITE,
    CHECK,
    REWRITE,
    "CREATE TABLE ",
    " (name TEXT, ",
    "SELECT COUNT(*) FROM ",
    "SELECT name FROM ",
    " ORDER BY ",
    " ASC LIMIT 1",
    " DESC LIMIT 1",
    " = '",
    "error: no such column: ",
    *TABLES,
    *NUMBERS,
    *PLACES,
    *PLACE_NAMES,
)


def vocabulary() -> list[str]:
    """The texts whose words become tokens."""
    texts = [" INT, ", " TEXT, ", " TEXT)", " WHERE ", " > ", " < ", "yes", "no", "no rows"]
    texts += [", ".join([name, name]) for name in NAMES]
    phrases = [*STARTS.values(), *COMPARISONS.values(), *EXTREMES.values(), MENTIONS]
    for phrase in (phrase for group in phrases for phrase in group):
        texts += re.split(r"\{\w+\}|(?<= )(?=\{)", f"{phrase} " if phrase in sum(STARTS.values(), ()) else phrase)
    return [*texts, *(f"{number:02}" for number in range(100)), *"0123456789"]


def write_query(problem: Problem, rng: random.Random) -> str:
    """Writes a query with some parts of the right query; the other parts follow a habit or are drawn at random."""

    def choose(right: str, habit: str, others: Sequence[str]) -> str:
        return rng.choices([right, habit, rng.choice(others)], [0.33, 0.42, 0.25])[0]

    gold = problem["gold"].split()
    schema = read_schema(problem["database"])
    numbers, places = re.findall(r"(\w+) INT", schema), re.findall(r"(\w+) TEXT", schema)[1:]
    table, is_extreme = gold[3], "ORDER" in gold
    if gold[-2] == "=":
        columns = [rng.choice(places), rng.choice(places), rng.choice(PLACES)]
    else:
        columns = [gold[6 if is_extreme else 5], rng.choice(numbers), rng.choice(NUMBERS)]
    column = rng.choices(columns, [0.6, 0.28, 0.12])[0]
    kinds = [*SELECTED.values()] if gold[-2] == "=" else [*SELECTED.values(), "extreme"]
    kind = choose("extreme" if is_extreme else gold[1], "name", kinds)
    if kind == "extreme":
        direction = choose(gold[7] if is_extreme else "DESC", "DESC", list(EXTREMES))
        return f"SELECT name FROM {table} ORDER BY {column} {direction} LIMIT 1"
    sign = "=" if gold[-2] == "=" else choose(">" if is_extreme else gold[-2], ">", list(COMPARISONS))
    return f"SELECT {kind} FROM {table} WHERE {column} {sign} {rng.randint(10, 99) if is_extreme else gold[-1]}"


def demonstrate(problem: Problem, rng: random.Random) -> Chat:
    """Makes a conversation of one of the agent's three nodes that call the model."""
    schema, question = read_schema(problem["database"]), problem["question"]
    query = write_query(problem, rng)
    result = run_query(problem["database"], query)
    verdict = "no" if result.startswith("error") or result in ("no rows", "0") else "yes"
    node = rng.choices(["write", "check", "rewrite"], [0.5, 0.2, 0.3])[0]
    if node == "write":
        instruction, parts, answer = WRITE, [schema, question], query
    elif node == "check":
        instruction, parts, answer = CHECK, [question, query, result], verdict
    else:
        instruction, parts, answer = REWRITE, [schema, question, query, result], write_query(problem, rng)
    return [
        {"role": "system", "content": instruction},
        {"role": "user", "content": "\n".join(parts)},
        {"role": "assistant", "content": answer},
    ]


def main() -> None:
    """Creates the checkpoint."""
    directory = begin(__doc__, SEED)
    rng, problems = random.Random(SEED), problem_stream("train", SEED, Path("runs/sql-databases"))
    tokenizer = make_tokenizer(vocabulary(), FIXED)
    model = make_model(tokenizer, layers=3)
    imitate(model, tokenizer, lambda: demonstrate(next(problems), rng), steps=STEPS)
    save(model, tokenizer, directory)


if __name__ == "__main__":
    main()
