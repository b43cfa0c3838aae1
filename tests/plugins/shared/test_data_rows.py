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
