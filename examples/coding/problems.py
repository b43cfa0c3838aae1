"""Eight repair tasks in many forms: a function in ``program.py`` computes the wrong thing, and ``check.py`` tests it.

For example: "A user reports that compute() in program.py does not return the larger number. Repair it."

A task combines an opening, a phrase for what the function must return, the wrong expression in the program and the
names of its arguments. Each split has texts and bugs of its own, so those of the validation and test split are new to
the model; their words are not.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TypedDict

Split = Literal["train", "val", "test"]
TEXTS: dict[Split, tuple[int, ...]] = {"test": (0,), "val": (1,), "train": (2, 3)}
"""Remainders of opening + phrase, by their places, modulo 4."""
BUGS: dict[Split, tuple[int, ...]] = {"test": (1,), "val": (2,), "train": (3, 4, 5, 6, 7)}
"""Remainders of wrong - right expression, by their places, modulo 8."""

REPAIRS = {
    "sum": "{a} + {b}",
    "difference": "{a} - {b}",
    "product": "{a} * {b}",
    "quotient": "{a} // {b}",
    "remainder": "{a} % {b}",
    "largest": "max({a}, {b})",
    "smallest": "min({a}, {b})",
    "distance": "abs({a} - {b})",
}
"""The right expression of each task."""
PHRASES = {
    "sum": ("the sum", "both numbers together", "the total", "the first number plus the second"),
    "difference": ("the difference", "the first number minus the second", "what the second leaves", "the change"),
    "product": ("the product", "the first number times the second", "the area", "the second number of copies"),
    "quotient": ("the quotient", "the first number over the second", "how often the second fits", "the share of each"),
    "remainder": ("the remainder", "the first number modulo the second", "what a division leaves", "the leftover"),
    "largest": ("the larger number", "the maximum", "the winner of both", "the higher bid"),
    "smallest": ("the smaller number", "the minimum", "the loser of both", "the lower bid"),
    "distance": ("the distance", "the gap", "how far apart they are", "the absolute difference"),
}
"""What a task may call it."""
OPENINGS = (
    "compute() in program.py must return {phrase}. Repair it.",
    "A user reports that compute() in program.py does not return {phrase}. Repair it.",
    "Somebody broke program.py: compute() has to return {phrase}. Repair it.",
    "check.py fails, because compute() in program.py does not give {phrase}. Repair it.",
)
ARGUMENTS = (("a", "b"), ("x", "y"), ("m", "n"), ("left", "right"), ("first", "second"), ("one", "other"))
WORKSPACES = Path(__file__).resolve().parents[2] / "runs" / "coding-workspaces"
NUMBERS = ((7, 3), (3, 8), (4, 4))
CHECK = """import sys
sys.dont_write_bytecode = True  # else a program that is changed within a second may be tested as it was before
from program import compute
sys.exit(any(compute(a, b) != {right} for a, b in {numbers}) and "wrong")
"""


class Problem(TypedDict):
    """One task of the agent; ``name`` is its folder in ``WORKSPACES``."""

    name: str
    text: str


def make_workspace(right: str, wrong: str, arguments: tuple[str, str], folder: Path) -> str:
    """Writes a wrong program and its check, if they are not there; returns the name of their folder."""
    a, b = arguments
    name = f"{right}-{wrong}-{a}-{b}"
    if not (folder / name / "check.py").exists():
        (folder / name).mkdir(parents=True, exist_ok=True)
        program = f"def compute({a}, {b}):\n    return {REPAIRS[wrong].format(a=a, b=b)}\n"
        (folder / name / "program.py").write_text(program, encoding="utf-8")
        check = CHECK.format(right=REPAIRS[right].format(a="a", b="b"), numbers=NUMBERS)
        (folder / name / "check.py").write_text(check, encoding="utf-8")
    return name


def problem_stream(split: Split, seed: int, folder: Path = WORKSPACES) -> Iterator[Problem]:
    """Yields an infinite stream of tasks; the eight repairs are equally frequent."""
    rng = random.Random(f"{split}-{seed}")
    while True:
        for place, (right, phrases) in enumerate(PHRASES.items()):
            phrase, wrong = rng.randrange(len(phrases)), list(REPAIRS)[(place + rng.choice(BUGS[split])) % len(REPAIRS)]
            opening = OPENINGS[(rng.choice(TEXTS[split]) - phrase) % len(OPENINGS)]
            name = make_workspace(right, wrong, rng.choice(ARGUMENTS), folder)
            yield Problem(name=name, text=opening.format(phrase=phrases[phrase]))


def make_problems(split: Split, count: int, seed: int = 0) -> list[Problem]:
    """Returns the first tasks of a split; a seed gives the same tasks on every machine."""
    return list(itertools.islice(problem_stream(split, seed), count))


def train() -> list[Problem]:
    """The training split."""
    return make_problems("train", 2048)


def val() -> list[Problem]:
    """The validation split."""
    return make_problems("val", 32)


def test() -> list[Problem]:
    """The test split."""
    return make_problems("test", 64)
