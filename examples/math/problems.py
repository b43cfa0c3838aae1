"""Word problems of one or two steps, their reward, and the published data set Calc-X.

For example: "Ann has 23 apples. Ben brings 14 more. Soon there are 2 times as many. How many are there now?"

A template is a scene, one or two events and a closing question. Neighbouring sentences that occur together in the
validation or test split never occur together in training, so every template of those splits is new to the model.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict

from autogen_agentchat.base import TaskResult
from autogen_agentchat.messages import TextMessage

Split = Literal["train", "val", "test"]
Operator = Literal["+", "-", "*", "/"]
OPERATORS: tuple[Operator, ...] = ("+", "-", "*", "/")

NAMES = ("Ann", "Ben", "Eva", "Ida", "Leo", "Max", "Mia", "Tom")
THINGS = ("apples", "books", "cards", "coins", "eggs", "pens", "shells", "stamps")
SCENES = (
    "{name} has {a} {thing}.",
    "There are {a} {thing} here.",
    "{name} finds {a} {thing}.",
    "A shop keeps {a} {thing}.",
    "{name} counts {a} {thing}.",
    "The table holds {a} {thing}.",
    "We start with {a} {thing}.",
    "On Monday {name} owned {a} {thing}.",
    "{a} {thing} lie on the floor.",
    "{a} {thing} belong to {name}.",
    "In a box there were {a} {thing}.",
    "At first {a} {thing} stand outside.",
    "Today {name} carries {a} {thing}.",
    "A truck with {a} {thing} stops.",
    "{name} and a sister share {a} {thing}.",
    "Of all {thing} we see {a} only.",
)
EVENTS: dict[Operator, tuple[str, ...]] = {
    "+": ("{friend} brings {b} more.", "Then another {b} arrive.", "{friend} adds {b}.", "{b} extra ones appear."),
    "-": ("{friend} takes {b} away.", "Then {b} get lost.", "{friend} sells {b}.", "{b} old ones break."),
    "*": (
        "Soon it is {b} times that.",
        "{friend} owns {b} times as many.",
        "A machine multiplies by {b}.",
        "All grow {b} fold.",
    ),
    "/": (
        "They are shared by {b} friends.",
        "{friend} splits them into {b} parts.",
        "They fill {b} equal bags.",
        "Each of {b} people gets some.",
    ),
}
QUESTIONS = ("How many now?", "What is the number?", "How many in the end?", "What is the result?")
LARGEST = 99


class Problem(TypedDict):
    """One task of the agent."""

    question: str
    answer: str


class Template(NamedTuple):
    """Indices of the scene and the question, and operator and index of each event."""

    scene: int
    events: tuple[tuple[Operator, int], ...]
    question: int


def split_of(*neighbours: object) -> Split:
    """Assigns two neighbouring sentences to a split: about 6 of 10 pairs to train, 2 to val and 2 to test."""
    part = zlib.crc32(repr(neighbours).encode()) % 10
    return "test" if part < 2 else "val" if part < 4 else "train"


def templates(split: Split, steps: int) -> list[Template]:
    """Returns all templates with ``steps`` events whose pairs of neighbours belong to the split, in a fixed order."""
    events = [(op, index) for op in OPERATORS for index in range(len(EVENTS[op]))]
    return [
        Template(scene, chosen, question)
        for scene in range(len(SCENES))
        for chosen in itertools.product(events, repeat=steps)
        if all(split_of(*pair) == split for pair in itertools.pairwise((scene, *chosen)))
        for question in range(len(QUESTIONS))
    ]


def apply(op: Operator, a: int, b: int) -> int | None:
    """Returns `a op b`; None if that is not a whole number from 1 to 99."""
    value = a + b if op == "+" else a - b if op == "-" else a * b if op == "*" else a // b
    return value if 1 <= value <= LARGEST and (op != "/" or a % b == 0) else None


def numbers(ops: tuple[Operator, ...], rng: random.Random) -> tuple[list[int], int]:
    """Draws the numbers of a problem, each from 2 to 99, and returns them with the answer."""
    while True:
        drawn = [rng.randint(2, LARGEST)]
        value: int | None = drawn[0]
        for op in ops:
            assert value is not None
            fitting = [b for b in range(2, LARGEST + 1) if apply(op, value, b) is not None]
            if not fitting:
                break
            drawn.append(rng.choice(fitting))
            value = apply(op, value, drawn[-1])
        else:
            assert value is not None
            return drawn, value


def problem_stream(split: Split, seed: int) -> Iterator[Problem]:
    """Yields an infinite stream of problems, alternately of one and two steps; all operators are equally frequent."""
    rng = random.Random(f"{split}-{seed}")
    found: dict[tuple[Operator, ...], list[Template]] = {}
    for steps in (1, 2):
        for template in templates(split, steps):
            found.setdefault(tuple(op for op, _ in template.events), []).append(template)
    kinds = [[ops for ops in found if len(ops) == steps] for steps in (1, 2)]
    while True:
        for ops in (rng.choice(kinds[0]), rng.choice(kinds[1])):
            template = rng.choice(found[ops])
            (first, *others), answer = numbers(ops, rng)
            names = rng.sample(NAMES, 2)
            sentences = [SCENES[template.scene].format(name=names[0], a=first, thing=rng.choice(THINGS))]
            for (op, index), b in zip(template.events, others, strict=True):
                sentences.append(EVENTS[op][index].format(friend=names[1], b=b))
            yield Problem(question=" ".join([*sentences, QUESTIONS[template.question]]), answer=str(answer))


def make_problems(split: Split, count: int, seed: int = 0) -> list[Problem]:
    """Returns the first problems of a split; a seed gives the same problems on every machine."""
    return list(itertools.islice(problem_stream(split, seed), count))


def train() -> list[Problem]:
    """The training split."""
    return make_problems("train", 4096)


def val() -> list[Problem]:
    """The validation split."""
    return make_problems("val", 96)


def test() -> list[Problem]:
    """The test split."""
    return make_problems("test", 200)


def reward(task: Mapping[str, Any], output: TaskResult, rollout: object) -> float:
    """Returns 1 if the agent's last message is the right number, else 0. A tool's result is not an answer."""
    last = output.messages[-1]
    return float(isinstance(last, TextMessage) and normalize(last.content) == normalize(task["answer"]))


def normalize(text: str) -> str:
    """Returns a number in one spelling: without thousands separators, currency, unit signs and trailing zeros."""
    text = re.sub(r"[\s,$%]", "", text).rstrip(".")
    try:
        return f"{float(text):.4f}"
    except ValueError:
        return text


def load_calc_x(split: str, folder: str | Path = "data/calc_x") -> list[Problem]:
    """Loads problems of Calc-X (Kadlčík et al. 2023, arXiv:2305.15017) from its files.

    Args:
        split: ``train``, ``validation`` or ``test``.
        folder: the folder with files of one or several of Calc-X's data sets, such as ``train-00000-of-00001.parquet``.
            Their columns ``question`` and ``result`` are read; a problem whose result is not a number is skipped.

    Raises:
        FileNotFoundError: the folder has no .parquet or .jsonl file of the split.
    """
    rows: list[dict[str, Any]] = []
    files = sorted(path for path in Path(folder).rglob(f"{split}*") if path.suffix in (".parquet", ".jsonl"))
    for path in files:
        if path.suffix == ".parquet":
            import pyarrow.parquet as parquet

            rows += parquet.read_table(path, columns=["question", "result"]).to_pylist()
        else:
            rows += [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not files:
        raise FileNotFoundError(f"{folder} has no {split}*.parquet and no {split}*.jsonl; see examples/math/README.md")
    problems = [Problem(question=row["question"], answer=str(row["result"])) for row in rows]
    return [problem for problem in problems if re.fullmatch(r"-?\d+\.\d{4}", normalize(problem["answer"]))]


def calc_x_train() -> list[Problem]:
    """Calc-X's training split."""
    return load_calc_x("train")


def calc_x_val() -> list[Problem]:
    """The first 256 problems of Calc-X's validation split."""
    return load_calc_x("validation")[:256]
