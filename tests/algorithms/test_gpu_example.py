"""The measurements of examples/gpu, with a toy model on a machine without a GPU."""

from __future__ import annotations

import importlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.algorithms.server_thread import threads_for_servers

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpu"
PARTS = ["update", "sample", "long", "learn", "async"]
DEVICES = ["cpu", pytest.param("cuda:0", marks=[pytest.mark.gpu, pytest.mark.soak])]


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXAMPLE)
    return importlib.import_module("measure")


def read(out: Path) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in map(json.loads, (out / "measured.jsonl").read_text().splitlines())}


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_every_part_measures_each_row_once(measure: Any, tmp_path: Path, device: str) -> None:
    arguments = ["--out", str(tmp_path), "--tiny", "--device", device, "--minutes", "20", "--part", *PARTS]
    with threads_for_servers():
        measure.main(arguments)
    found = read(tmp_path)
    table = (tmp_path / "measured.md").read_text()
    assert {name.partition(",")[0] for name in found} == {*PARTS, "warm start"}
    assert all(entry["complete"] and f"| {name} | " in table for name, entry in found.items())
    for name in found:
        if name.startswith(("update", "sample")) and "conversations" not in name:
            assert found[name]["figures"]["tokens/s"] > 0, found[name]
    reused, again = (found[name]["figures"] for name in found if name.startswith("long"))
    assert reused["training rows"] == 1
    assert reused["drift_tokens"] == measure.SHAPES["tiny"]["long"]["turns"] - 1  # so tokenizing again breaks each turn
    assert again["training rows"] == measure.SHAPES["tiny"]["long"]["turns"]
    for name in ("learn, random rewards", "async, staleness 4"):
        assert 0 < found[name]["figures"]["largest gap"] < 0.5  # the gap is only rounding of bfloat16
    measure.main(arguments)
    assert (tmp_path / "measured.md").read_text() == table


def test_a_killed_call_leaves_rows_that_the_next_one_reads(measure: Any, tmp_path: Path) -> None:
    sheet = measure.Sheet(tmp_path, {"gpu": "none"})
    sheet.add("one", {"tokens/s": 12345.6})
    sheet.add("two", {"steps": 3.0}, complete=False)
    with (tmp_path / "measured.jsonl").open("a") as file:
        file.write('{"name": "three", "comp')  # the kill came while this was written
    again = measure.Sheet(tmp_path, {"gpu": "none"})
    assert again.done == {"one"}
    again.add("two", {"steps": 5.0})
    assert measure.Sheet(tmp_path, {"gpu": "none"}).done == {"one", "two"}
    assert (tmp_path / "measured.md").read_text().splitlines()[2:] == [
        "| one | tokens/s 1.235e+04 | none |",
        "| two (stopped) | steps 3 | none |",
        "| two | steps 5 | none |",
    ]


def test_a_part_ends_when_its_minutes_are_over(
    measure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(measure.PARTS, "long", lambda bench: threading.Event().wait(600))
    measure.main(["--out", str(tmp_path), "--tiny", "--device", "cpu", "--minutes", "0.1", "--part", "long"])
    assert "stopped after 0.1 minutes; the same command measures what is missing" in capsys.readouterr().out
