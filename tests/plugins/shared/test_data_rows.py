"""Rows of data sets are converted and checked when the set is opened, whatever it is read from."""

from __future__ import annotations

import codecs
import datetime
import decimal
import json
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import agentlightning as agl
from agentlightning_plugins.shared.configuration.assembly import load_data
from agentlightning_plugins.shared.configuration.config import read_config
from agentlightning_plugins.shared.configuration.document import read_document
from agentlightning_plugins.shared.configuration.sources import load_dataset

DEEP = "[" * 200 + "]" * 200
UNUSABLE = {
    "nan": ('{"x": NaN}', "x = nan is not JSON"),
    "overflow": ('{"x": 1e999}', "x = inf is not JSON"),
    "integer": ('{"x": 18446744073709551616}', "x = 18446744073709551616 is not JSON"),
    "surrogate": ('{"x": "\\ud800"}', "is not JSON"),
    "key": ('{"\\ud800": 1}', "has the key"),
    "deep": (f'{{"x": {DEEP}}}', "nested more than 100 deep"),
    "deeper": (f'{{"x": {"[" * 100_000}{"]" * 100_000}}}', "too deeply"),
}


@pytest.mark.parametrize("case", UNUSABLE)
@pytest.mark.parametrize("form", ["jsonl", "json", "module", "fit"])
def test_a_row_that_cannot_be_stored_is_refused_with_its_place_when_the_set_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, case: str
) -> None:
    row, complaint = UNUSABLE[case]
    monkeypatch.chdir(tmp_path)
    if form == "jsonl":
        Path("tasks.jsonl").write_text(f'{{"x": 1}}\n\n{row}\n')
        with pytest.raises(agl.ConfigError, match=rf"tasks.jsonl, line 3: .*{complaint}"):
            load_dataset("tasks.jsonl")
    elif form == "json":
        Path("tasks.json").write_text(f'[{{"x": 1}}, {row}]')
        with pytest.raises(agl.ConfigError, match=rf"tasks.json(, row 2: | cannot be read).*{complaint}"):
            load_dataset("tasks.json")
    elif case != "deeper":  # Python cannot even parse it
        rows = [{"x": 1}, json.loads(row)]
        if form == "module":
            monkeypatch.setattr("tests.plugins.shared.test_data_rows.ROWS", rows)
            with pytest.raises(agl.ConfigError, match=rf"ROWS, row 2: .*{complaint}"):
                load_dataset("tests.plugins.shared.test_data_rows:ROWS")
        else:
            with pytest.raises(agl.ConfigError, match=rf"val_dataset\[1\].*{complaint}"):
                agl.Trainer(algorithm="baseline", strategy="shm").fit(lambda task: 1.0, [0], rows)


ROWS: Any = []
CELLS: dict[str, tuple[Any, Any]] = {
    "timestamp": (datetime.datetime.fromisoformat("2026-01-02T03:04:05"), "2026-01-02T03:04:05"),
    "zoned": (datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.UTC), "2026-01-02T03:00:00+00:00"),
    "date": (datetime.date(2026, 1, 2), "2026-01-02"),
    "time": (datetime.time(3, 4, 5), "03:04:05"),
    "duration": (datetime.timedelta(minutes=1.5), 90.0),
    "decimal": (decimal.Decimal("1.10"), "1.10"),
    "bytes": ("grün".encode(), "grün"),
    "list": ([datetime.date(2026, 1, 2)], ["2026-01-02"]),
    "nested": ({"price": decimal.Decimal("1.10")}, {"price": "1.10"}),
    "missing": (None, None),
}
PYTHON_ONLY: dict[str, tuple[Any, Any]] = {
    "uuid": (uuid.UUID(int=7), "00000000-0000-0000-0000-000000000007"),
    "array": (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
    "scalar": (np.float32(0.5), 0.5),
}


def test_cells_of_parquet_files_lists_and_tables_become_json(tmp_path: Path) -> None:
    import pandas
    import pyarrow
    import pyarrow.parquet

    expected = {name: json_value for name, (_, json_value) in CELLS.items()}
    row = {name: value for name, (value, _) in CELLS.items()}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "tasks.parquet")
    assert load_dataset(str(tmp_path / "tasks.parquet"))[0] == expected
    more = {name: value for name, (value, _) in PYTHON_ONLY.items()}
    seen: list[Any] = []
    trainer = agl.Trainer(algorithm={"name": "baseline", "train_split": 1.0}, strategy="shm", trackers=[])
    trainer.fit(lambda task: seen.append(task) or 1.0, [{**row, **more}])
    assert seen == [expected | {name: json_value for name, (_, json_value) in PYTHON_ONLY.items()}]
    table = pandas.DataFrame({"x": [1.5, None], "when": [pandas.Timestamp("2026-01-02"), pandas.NaT]})
    seen.clear()
    trainer.fit(lambda task: seen.append(task) or 1.0, table)
    assert {json.dumps(task) for task in seen} == {
        '{"x": 1.5, "when": "2026-01-02T00:00:00"}', '{"x": null, "when": null}'
    }  # fmt: skip


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(agl.ConfigError, match=r"train_dataset\[0\].image = b'.*is not JSON"):
        agl.Trainer(algorithm="baseline", strategy="shm").fit(lambda task: 1.0, [{"image": b"\xff\xd8"}])


@pytest.mark.parametrize("line", ["1", "1,2,3", '1,"2', "1,2,"])
def test_a_line_of_csv_that_does_not_fit_the_header_is_refused_with_its_number(tmp_path: Path, line: str) -> None:
    file = tmp_path / "tasks.csv"
    file.write_text(f"a,b\n1,2\n\n{line}\n")
    with pytest.raises(agl.ConfigError, match=r"tasks.csv(, line 4: \d fields, but the header has 2| cannot be read)"):
        load_dataset(str(file))


@pytest.mark.parametrize("name", ["tasks.jsonl", "tasks.json", "tasks.csv", "config.yaml"])
def test_a_byte_order_mark_is_accepted_in_every_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = {"tasks.jsonl": '{"a": "1"}\n', "tasks.json": '[{"a": "1"}]', "tasks.csv": "a\n1\n"}
    text = texts.get(name, "agent: agent.py:agent\ndata: {train: tasks.json}\nalgorithm: baseline\n")
    Path("tasks.json").write_text(texts["tasks.json"])
    Path("agent.py").write_text("def agent(task):\n    return 1.0\n")
    Path(name).write_bytes(codecs.BOM_UTF8 + text.encode())
    if name in texts:
        assert list(load_dataset(name)) == [{"a": "1"}]
    else:
        assert read_document(Path(name)).values["agent"] == "agent.py:agent"


class Streamed(Sequence[Any]):
    """Rows that are read when they are drawn."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: Any) -> Any:
        return {"x": [0, float("nan"), datetime.date(2026, 1, 2), float("inf")][index]}


def streamed() -> Streamed:
    return Streamed()


def test_a_row_of_a_streamed_set_that_cannot_be_stored_is_left_out_counted_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = load_dataset("tests.plugins.shared.test_data_rows:streamed")
    for _ in range(2):
        assert [row["x"] for row in rows] == [0, "2026-01-02", "2026-01-02", 0]
    assert [record.getMessage()[-30:] for record in caplog.records] == [
        "row is left out; so far, 1 are", "row is left out; so far, 2 are"
    ]  # fmt: skip
    assert "test_data_rows:streamed, row 2: task.x = nan is not JSON" in caplog.text
    assert "row 4: task.x = inf" in caplog.text


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_large_file_is_read_row_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    import datasets

    monkeypatch.setattr("agentlightning_plugins.shared.configuration.sources._LARGE", 1)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    file, rows = tmp_path / f"tasks.{form}", [{"n": number, "text": "é" * number} for number in range(5)]
    if form == "jsonl":
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        file.write_bytes(codecs.BOM_UTF8 + "\n\n".join(lines).encode() + b"\n{broken\n")
    else:
        datasets.Dataset.from_list(rows).to_parquet(file)
    tasks = load_dataset(str(file))
    assert [tasks[index] for index in range(5)] == rows
    assert tasks[4] == rows[4], "in any order"
    if form == "jsonl":
        assert tasks[5] == rows[0], "the next row takes the place of one that cannot be read"
        assert type(tasks[0]["n"]) is int
    shuffled = load_dataset(str(file), shuffle_seed=1, limit=3)
    assert len(shuffled) == len(shuffled[-5:]) == 3
    assert shuffled[1:] == [shuffled[1], shuffled[2]], "as a list"
    assert all(shuffled[index] in rows for index in range(3))
    with pytest.raises(IndexError):
        shuffled[3]


def test_the_directory_of_a_saved_data_set_is_a_source(tmp_path: Path) -> None:
    import datasets

    both = {name: datasets.Dataset.from_list([{"n": name}]) for name in ("train", "held_out")}
    datasets.DatasetDict(both).save_to_disk(str(tmp_path / "saved"))
    assert load_dataset(str(tmp_path / "saved"))[0] == {"n": "train"}
    assert load_dataset(str(tmp_path / "saved"), split="held_out")[0] == {"n": "held_out"}
    (tmp_path / "empty").mkdir()
    with pytest.raises(agl.ConfigError, match="empty, split 'train', cannot be loaded"):
        load_dataset(str(tmp_path / "empty"))


def make_frame() -> Any:
    import pandas

    return pandas.DataFrame({"n": [1, 2], "text": ["a", None]})


def test_a_function_may_return_a_data_frame() -> None:
    tasks = load_dataset("tests.plugins.shared.test_data_rows:make_frame")
    assert list(tasks) == [{"n": 1, "text": "a"}, {"n": 2, "text": None}]


def mixed(folder: Path, data: str) -> list[Any]:
    for name, count in (("a", 2), ("b", 6)):
        (folder / f"{name}.jsonl").write_text("".join(f'{{"n": "{name}{number}"}}\n' for number in range(count)))
    (folder / "config.yaml").write_text(f"data: {{train: {data}}}\n")
    document = read_document(folder / "config.yaml")
    config = read_config(document)
    assert config.data.train is not None
    tasks = load_data(config.data.train)
    return [tasks[index]["n"] for index in range(len(tasks))]


def test_sources_are_mixed_by_their_sizes_or_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = mixed(tmp_path, "[a.jsonl, b.jsonl]")
    assert sorted(rows) == ["a0", "a1", "b0", "b1", "b2", "b3", "b4", "b5"], "each row once"
    assert sum(row.startswith("a") for row in rows[:4]) == 1, "each stretch has the shares of the whole"
    rows = mixed(tmp_path, "[{source: a.jsonl, weight: 3}, {source: b.jsonl, weight: 1, limit: 4}]")
    assert rows == ["a0", "a1", "a0", "b0", "a1", "a0"], "a small set begins again"
    assert mixed(tmp_path, "[{source: b.jsonl, limit: 1}]") == ["b0"]


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        ("[{source: a.jsonl, weight: 2}, b.jsonl]", "some sources have a weight and others do not; give each a weight"),
        ("[{source: a.jsonl, weight: 0}]", r"data.train.0.weight = 0: Input should be greater than 0"),
        ("[]", r"data.train = \[\]: List should have at least 1 item"),
        ("[{source: a.jsonl, wieght: 2}]", r"unknown key 'data.train.0.wieght'. Did you mean 'weight'"),
        ("{source: a.jsonl, weight: 2}", "weight = 2.0: a weight is for a list of sources"),
    ],
    ids=["some", "zero", "none", "misspelt", "single"],
)
def test_a_wrong_mixture_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str, complaint: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(agl.ConfigError, match=complaint):
        mixed(tmp_path, data)
