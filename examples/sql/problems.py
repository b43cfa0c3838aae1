"""Questions about small SQLite databases, their reward, and the published data set Spider.

For example: "How many pilot rows have height above 36?"

A table has two columns of numbers and two of places. Two columns that are together in the validation or test split are
never together in training, so every schema of those splits is new to the model. Which of the two columns contains a
place is not in the schema; the agent can find out by running a query.
"""

from __future__ import annotations

import itertools
import json
import random
import sqlite3
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict

from examples.sql.agent import open_database

Split = Literal["train", "val", "test"]
TABLES = (
    "singer", "driver", "farmer", "pilot", "player", "doctor", "lawyer", "painter",
    "sailor", "teacher", "baker", "banker", "miner", "hunter", "runner", "dancer",
)  # fmt: skip
NUMBERS = (
    "age", "height", "weight", "length", "width", "price", "rank", "score",
    "size", "speed", "depth", "level", "salary", "volume", "power", "debt",
)  # fmt: skip
PLACES = (
    "home", "birthplace", "origin", "office", "harbour", "capital", "base", "region",
    "district", "town", "venue", "address", "market", "station", "branch", "club",
)  # fmt: skip
PLACE_NAMES = (
    "Bern", "Bonn", "Cairo", "Delhi", "Genoa", "Kyoto", "Lagos", "Lima",
    "Malta", "Milan", "Oslo", "Paris", "Porto", "Quito", "Rome", "Seoul",
)  # fmt: skip
NAMES = ("Ann", "Ben", "Eva", "Ida", "Leo", "Max", "Mia", "Tom", "Una", "Zoe")
ROWS = 8
DATABASES = {"train": 400, "val": 60, "test": 60}

Kind = Literal["count", "list", "extreme", "count place", "list place"]
STARTS = {
    "count": ("How many {table} rows have", "Count {table} rows with", "What number of {table} rows has"),
    "list": ("Which {table} rows have", "List {table} rows with", "Name {table} rows that have"),
}
COMPARISONS = {
    ">": ("{column} above {value}?", "{column} over {value}?", "{column} beyond {value}?"),
    "<": ("{column} below {value}?", "{column} under {value}?", "{column} short of {value}?"),
}
EXTREMES = {
    "DESC": ("Which {table} has the highest {column} of all?", "Name the {table} with most {column} here?"),
    "ASC": ("Which {table} has the lowest {column} of all?", "Name the {table} with least {column} here?"),
}
MENTIONS = ("a link to {value}?", "something from {value}?", "a note about {value}?")
SELECTED = {"count": "COUNT(*)", "list": "name"}


class Problem(TypedDict):
    """One task of the agent: a question, the file of the database, and a right query."""

    question: str
    database: str
    gold: str


class Schema(NamedTuple):
    """A table with a name, two columns of numbers and two of places."""

    table: str
    numbers: tuple[str, str]
    places: tuple[str, str]


def pairs(columns: tuple[str, ...], split: Split) -> list[tuple[str, str]]:
    """The pairs of columns that may be in one table: about 6 of 10 are for train, 2 for val and 2 for test."""
    parts = {"test": range(2), "val": range(2, 4), "train": range(4, 10)}[split]
    return [pair for pair in itertools.combinations(columns, 2) if zlib.crc32(" ".join(pair).encode()) % 10 in parts]


def schemas(split: Split) -> list[Schema]:
    """The schemas of a split, with columns in any order."""
    rng = random.Random(split)

    def two(columns: tuple[str, ...]) -> tuple[str, str]:
        first, second = rng.sample(rng.choice(pairs(columns, split)), 2)
        return first, second

    return [Schema(rng.choice(TABLES), two(NUMBERS), two(PLACES)) for _ in range(DATABASES[split])]


def make_database(schema: Schema, folder: Path) -> Path:
    """Writes the SQLite file of a schema, with random rows, unless it exists. Each place is in one column only."""
    file = folder / f"{'-'.join((schema.table, *schema.numbers, *schema.places))}.sqlite"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        rng = random.Random(file.name)
        places = rng.sample(PLACE_NAMES, 8)
        values = [
            rng.sample(NAMES, ROWS),
            *(rng.sample(range(10, 100), ROWS) for _ in schema.numbers),
            *([*chosen, *rng.choices(chosen, k=ROWS - 4)] for chosen in (places[:4], places[4:])),
        ]
        columns = [
            "name TEXT",
            *(f"{name} INT" for name in schema.numbers),
            *(f"{name} TEXT" for name in schema.places),
        ]
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            part = Path(scratch) / file.name
            with closing(sqlite3.connect(part)) as connection:
                connection.execute("PRAGMA synchronous = OFF")  # the files can be made again
                connection.execute(f"CREATE TABLE {schema.table} ({', '.join(columns)})")
                connection.executemany(
                    f"INSERT INTO {schema.table} VALUES (?, ?, ?, ?, ?)", list(zip(*values, strict=True))
                )
                connection.commit()
            part.replace(file)
    return file


def make_problem(kind: Kind, schema: Schema, file: Path, rng: random.Random) -> Problem:
    """Draws a question of a kind about a database."""

    def column_of(name: str) -> list[Any]:
        with open_database(str(file)) as connection:
            return [row[0] for row in connection.execute(f"SELECT {name} FROM {schema.table} ORDER BY {name}")]

    words: dict[str, object] = {"table": schema.table}
    if kind == "extreme":
        direction = rng.choice(list(EXTREMES))
        words["column"] = rng.choice(schema.numbers)
        text = rng.choice(EXTREMES[direction])
        gold = f"SELECT name FROM {schema.table} ORDER BY {words['column']} {direction} LIMIT 1"
    else:
        action, _, is_place = kind.partition(" ")
        if is_place:
            column, sign = rng.choice(schema.places), "="
            words["value"] = rng.choice(column_of(column))
            text, value = rng.choice(MENTIONS), f"'{words['value']}'"
        else:
            column, sign = rng.choice(schema.numbers), rng.choice(list(COMPARISONS))
            words |= {"column": column, "value": column_of(column)[rng.choice([1, 2, 4, 5])]}
            text, value = rng.choice(COMPARISONS[sign]), str(words["value"])
        text = f"{rng.choice(STARTS[action])} {text}"
        gold = f"SELECT {SELECTED[action]} FROM {schema.table} WHERE {column} {sign} {value}"
    return Problem(question=text.format_map(words), database=str(file), gold=gold)


def problem_stream(split: Split, seed: int, folder: Path) -> Iterator[Problem]:
    """Yields an infinite stream of problems; each block of five has one of each kind."""
    rng = random.Random(f"{split}-{seed}")
    files = {schema: make_database(schema, folder).resolve() for schema in schemas(split)}
    kinds: tuple[Kind, ...] = ("count", "list", "extreme", "count place", "list place")
    while True:
        for kind in kinds:
            schema = rng.choice(list(files))
            yield make_problem(kind, schema, files[schema], rng)


def make_problems(split: Split, count: int, seed: int = 0, folder: Path = Path("runs/sql-databases")) -> list[Problem]:
    """Returns the first problems of a split; a seed gives the same problems on every machine."""
    return list(itertools.islice(problem_stream(split, seed, folder), count))


def train() -> list[Problem]:
    """The training split."""
    return make_problems("train", 3000)


def val() -> list[Problem]:
    """The validation split."""
    return make_problems("val", 95)


def test() -> list[Problem]:
    """The test split."""
    return make_problems("test", 200)


def reward(task: Mapping[str, Any], output: Mapping[str, Any], rollout: object) -> float:
    """Returns 1 if the last query gives the right query's rows, else 0. Their order counts if the right query sorts."""
    with open_database(task["database"]) as connection:
        expected = connection.execute(task["gold"]).fetchall()
    try:
        with open_database(task["database"]) as connection:
            found = connection.execute(output["query"]).fetchmany(len(expected) + 1)
    except (sqlite3.Error, sqlite3.Warning):
        return 0.0
    return float(found == expected if "order by" in task["gold"].lower() else Counter(found) == Counter(expected))


def load_spider(split: str, folder: str | Path = "data/spider") -> list[Problem]:
    """Loads Spider (Yu et al. 2018, arXiv:1809.08887) from its folder.

    Args:
        split: ``train`` (train_spider.json) or ``dev`` (dev.json).
        folder: the folder with these files and ``database/NAME/NAME.sqlite``.

    Raises:
        FileNotFoundError: the folder has no file of the split.
    """
    folder = Path(folder).resolve()
    file = folder / {"train": "train_spider.json", "dev": "dev.json"}[split]
    if not file.exists():
        raise FileNotFoundError(f"{folder} has no {file.name}; see examples/sql/README.md")
    return [
        Problem(
            question=row["question"],
            database=str(folder / "database" / row["db_id"] / f"{row['db_id']}.sqlite"),
            gold=row["query"],
        )
        for row in json.loads(file.read_text(encoding="utf-8"))
    ]


def spider_train() -> list[Problem]:
    """Spider's training split."""
    return load_spider("train")


def spider_val() -> list[Problem]:
    """The first 256 problems of Spider's development split."""
    return load_spider("dev")[:256]
