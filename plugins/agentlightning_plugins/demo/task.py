"""The demo's data: word problems with one operation.

For example: "Ann has 23 apples and buys 14 more. How many apples now?"

Every number that a problem mentions, its answer included, is between 1 and 99. The three splits use disjoint pairs of
numbers: a pair that the test split asks about, in either order and with any operation, occurs in no other split.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, TypedDict

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")
Operator = Literal["+", "-", "*", "/"]

LARGEST = 99
NAMES = ("Ann", "Ben", "Eva", "Ida", "Leo", "Max", "Mia", "Tom")
THINGS = ("apples", "books", "cards", "coins", "eggs", "pens", "shells", "stamps")


class Problem(TypedDict):
    """One task of the demo's agent."""

    question: str
    answer: int


class Template(NamedTuple):
    """A sentence whose answer is `a operator b`."""

    operator: Operator
    text: str


TEMPLATES = (
    Template("+", "{name} has {a} {thing} and buys {b} more. How many {thing} now?"),
    Template("+", "{name} finds {a} {thing} and then another {b}. How many in total?"),
    Template("+", "{name} puts {a} {thing} next to {b} old ones. How many altogether?"),
    Template("-", "{name} has {a} {thing} and sells {b}. How many are left?"),
    Template("-", "{name} had {a} {thing} but lost {b}. How many remain?"),
    Template("-", "Of {a} {thing} {name} gives away {b}. How many does {name} keep?"),
    Template("*", "{name} buys {a} boxes of {b} {thing}. How many {thing} is that?"),
    Template("*", "{name} fills {a} bags with {b} {thing} each. How many are inside?"),
    Template("*", "{name} lays {a} rows of {b} {thing}. How many lie there?"),
    Template("/", "{name} shares {a} {thing} among {b} friends. How many does each get?"),
    Template("/", "{name} splits {a} {thing} into {b} equal piles. How many per pile?"),
    Template("/", "{name} packs {a} {thing} evenly in {b} bags. How many per bag?"),
)


def number_pairs(operator: Operator, split: Split) -> list[tuple[int, int]]:
    """Returns a split's pairs `(a, b)` from 2 to 99 whose `a operator b` is a whole number from 1 to 99, in order."""
    pairs = ((a, b) for a in range(2, LARGEST + 1) for b in range(2, LARGEST + 1))
    return [pair for pair in pairs if split_of(*pair) == split and 1 <= (apply(operator, *pair) or 0) <= LARGEST]


def split_of(a: int, b: int) -> Split:
    """Assigns a pair of numbers, in either order, to a split: about 8 of 10 pairs to train, 1 each to val and test."""
    part = zlib.crc32(f"{min(a, b)} {max(a, b)}".encode()) % 10
    return "test" if part == 0 else "val" if part == 1 else "train"


def apply(operator: Operator, a: int, b: int) -> int | None:
    """Returns `a operator b`, or None if a division leaves a remainder."""
    if operator == "+":
        return a + b
    if operator == "-":
        return a - b
    if operator == "*":
        return a * b
    return a // b if a % b == 0 else None


def make_problems(split: Split, count: int, seed: int = 0) -> list[Problem]:
    """Returns the first `count` problems of a split; a seed gives the same ones on every machine and Python version."""
    stream = problem_stream(split, seed)
    return [next(stream) for _ in range(count)]


def problem_stream(split: Split, seed: int) -> Iterator[Problem]:
    """Yields an infinite stream of problems; each block of `len(TEMPLATES)` uses every template once."""
    rng = random.Random(f"{split}-{seed}")
    pairs: dict[Operator, Sequence[tuple[int, int]]] = {t.operator: number_pairs(t.operator, split) for t in TEMPLATES}
    while True:
        for template in rng.sample(TEMPLATES, len(TEMPLATES)):
            a, b = rng.choice(pairs[template.operator])
            question = template.text.format(name=rng.choice(NAMES), thing=rng.choice(THINGS), a=a, b=b)
            answer = apply(template.operator, a, b)
            assert answer is not None
            yield Problem(question=question, answer=answer)
