"""Questions of two hops over an index of paragraphs, their reward, and the published data set MuSiQue.

For example: "Who is the doctor of the tutor of Ann Reed?" One of the paragraphs about Ann Reed names her tutor, and one
of those about the tutor names the doctor.

A person belongs to one split and knows only people of this split. Two relations that are combined in the questions of
the validation or test split are never combined in those of training.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import sqlite3
import string
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, TypedDict

from agents import RunResult

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")
FIRST_NAMES = (
    "Ann", "Ben", "Cleo", "Dora", "Emil", "Fay", "Gus", "Hans", "Ida", "Jan", "Kai", "Leo",
    "Mia", "Nils", "Olga", "Pia", "Rosa", "Sven", "Tom", "Uma", "Vera", "Will", "Yan", "Zoe",
)  # fmt: skip
LAST_NAMES = (
    "Abel", "Bond", "Cole", "Dunn", "Egan", "Ford", "Gray", "Hall", "Irwin", "Jones", "Kerr", "Lamb",
    "Moss", "Nash", "Owen", "Park", "Quinn", "Reed", "Shaw", "Tate", "Upton", "Voss", "Wood", "York",
)  # fmt: skip
RELATIONS = ("teacher", "doctor", "lawyer", "neighbour", "coach", "tutor", "tailor", "cousin")
FACT = "The {relation} is {name}."
QUESTIONS = ("Who is the {second} of the {first} of {name}?", "Name the {second} of the {first} of {name}.")

Facts = dict[str, str]
"""The names of a person's teacher, doctor and so on, by relation."""


class Problem(TypedDict):
    """One task of the agent; every answer of the list is right."""

    question: str
    answers: list[str]


def split_of(words: tuple[str, str]) -> Split:
    """Assigns a first and last name, or two relations, to a split: about 8 of 10 to train."""
    part = zlib.crc32(" ".join(words).encode()) % 10
    return "test" if part < 1 else "val" if part < 2 else "train"


def people(split: Split) -> list[str]:
    """The people of a split."""
    return [" ".join(pair) for pair in itertools.product(FIRST_NAMES, LAST_NAMES) if split_of(pair) == split]


def relation_pairs(split: Split) -> set[tuple[str, str]]:
    """The relations that a split's questions combine, such as doctor of the tutor: ("tutor", "doctor")."""
    return {pair for pair in itertools.permutations(RELATIONS, 2) if split_of(pair) == split}


def make_world(split: Split) -> dict[str, Facts]:
    """The facts about all people of a split; they are the same on every machine."""
    rng, everyone = random.Random(split), people(split)
    return {person: draw_facts(person, everyone, rng) for person in everyone}


def draw_facts(person: str, everyone: list[str], rng: random.Random) -> Facts:
    """Draws facts about a person."""
    drawn = rng.sample(everyone, len(RELATIONS) + 1)
    return dict(zip(RELATIONS, [name for name in drawn if name != person], strict=False))


def paragraphs(world: Mapping[str, Facts]) -> Iterator[tuple[str, str]]:
    """Title and text of the paragraphs of a world, one for each fact."""
    for person, facts in world.items():
        for relation, name in facts.items():
            yield person, FACT.format(relation=relation, name=name)


def row_stream(split: Split, seed: int) -> Iterator[dict[str, Any]]:
    """Yields an infinite stream of questions as rows of MuSiQue's files: two of four paragraphs support the answer."""
    rng, world = random.Random(f"{split}-{seed}"), make_world(split)
    pairs, names = sorted(relation_pairs(split)), list(world)
    for number in itertools.count():
        (first, second), name = rng.choice(pairs), rng.choice(names)
        middle = world[name][first]
        answer = world[middle][second]
        if answer == name:
            continue
        hops = [(name, first), (middle, second)]
        shown = rng.sample([*hops, (name, second), (middle, first)], 4)
        support = [shown.index(hop) for hop in hops]
        yield {
            "id": f"2hop__{split}_{seed}_{number}",
            "question": rng.choice(QUESTIONS).format(second=second, first=first, name=name),
            "question_decomposition": [
                {"question": f"{name} >> {first}", "answer": middle, "paragraph_support_idx": support[0]},
                {"question": f"#1 >> {second}", "answer": answer, "paragraph_support_idx": support[1]},
            ],
            "answer": answer,
            "answer_aliases": [],
            "answerable": True,
            "paragraphs": [
                {
                    "idx": index,
                    "title": title,
                    "paragraph_text": FACT.format(relation=relation, name=world[title][relation]),
                    "is_supporting": (title, relation) in hops,
                }
                for index, (title, relation) in enumerate(shown)
            ],
        }


def to_problem(row: Mapping[str, Any]) -> Problem:
    """Makes a task from a row of MuSiQue's files."""
    return Problem(question=row["question"], answers=[row["answer"], *row["answer_aliases"]])


def make_problems(split: Split, count: int, seed: int = 0) -> list[Problem]:
    """Returns the first questions of a split, and writes the index; a seed gives the same ones on every machine."""
    write_index(part for each in SPLITS for part in paragraphs(make_world(each)))
    return [to_problem(row) for row in itertools.islice(row_stream(split, seed), count)]


def write_index(contents: Iterable[tuple[str, str]], file: str | Path = "runs/rag-index.sqlite") -> None:
    """Writes titles and texts to an index for full-text search, which replaces an existing file."""
    file = Path(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
        part = Path(scratch) / file.name
        with closing(sqlite3.connect(part)) as connection:
            connection.execute("CREATE VIRTUAL TABLE paragraphs USING fts5(title, text, tokenize='porter unicode61')")
            connection.executemany("INSERT INTO paragraphs VALUES (?, ?)", dict.fromkeys(contents))
            connection.commit()
        part.replace(file)


def train() -> list[Problem]:
    """The training split."""
    return make_problems("train", 3000)


def val() -> list[Problem]:
    """The validation split."""
    return make_problems("val", 96)


def test() -> list[Problem]:
    """The test split."""
    return make_problems("test", 200)


def reward(task: Mapping[str, Any], output: RunResult, rollout: object) -> float:
    """Returns the highest F1 of the words of the agent's answer with those of a right answer."""
    return max(f1(str(output.final_output), answer) for answer in task["answers"])


def f1(answer: str, expected: str) -> float:
    """Harmonic mean of precision and recall of words, as in SQuAD: case, punctuation and articles are ignored."""
    found, right = normalize(answer), normalize(expected)
    shared = sum((Counter(found) & Counter(right)).values())
    return 2 * shared / (len(found) + len(right)) if shared else 0.0


def normalize(text: str) -> list[str]:
    """Returns the words of a text in lower case, without punctuation and articles."""
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def read_musique(split: str, folder: str | Path = "data/musique") -> Iterator[dict[str, Any]]:
    """Reads the rows of MuSiQue-Answerable (Trivedi et al. 2022, arXiv:2108.00573).

    Args:
        split: ``train`` or ``dev``.
        folder: with the files ``musique_ans_v1.0_train.jsonl`` and ``musique_ans_v1.0_dev.jsonl``.

    Raises:
        FileNotFoundError: the folder has no file of the split.
    """
    file = Path(folder) / f"musique_ans_v1.0_{split}.jsonl"
    if not file.exists():
        raise FileNotFoundError(f"{folder} has no {file.name}; see examples/rag/README.md")
    with file.open(encoding="utf-8") as lines:
        yield from (json.loads(line) for line in lines)


def load_musique(split: str, folder: str | Path = "data/musique") -> list[Problem]:
    """Loads questions of MuSiQue; writes the index of the paragraphs of both splits first, unless it exists."""
    index = Path(folder) / "index.sqlite"
    if not index.exists():
        rows = itertools.chain(read_musique("train", folder), read_musique("dev", folder))
        write_index(((part["title"], part["paragraph_text"]) for row in rows for part in row["paragraphs"]), index)
    return [to_problem(row) for row in read_musique(split, folder)]


def musique_train() -> list[Problem]:
    """MuSiQue's training split."""
    return load_musique("train")


def musique_val() -> list[Problem]:
    """The first 256 questions of MuSiQue's development split."""
    return load_musique("dev")[:256]
