"""The tutorials and how-to pages from end to end; test_docs.py runs the Python blocks of the Markdown pages."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

from agentlightning_plugins.shared.scripted_model.server import Answer, ScriptedOpenAI
from tests.pages import blocks, run_shell, search_path
from tests.port import reserve_port
from tests.source import REPO, source_files

DOCS = REPO / "docs"
IN_THREADS = {"word-adder/config.yaml": "word-adder/config.yaml strategy=shm"}
FASTER = {"regression-gate": IN_THREADS, "export-and-serve": IN_THREADS}
"""Texts that a test replaces in the commands of a page, because processes of runners take seconds to start."""
ELSEWHERE = {"verl.md"}
"""Pages whose commands tests of other environments run."""
SHELL = [
    page
    for folder in ("tutorials", "how-to")
    for page in sorted((DOCS / folder).glob("*.md"))
    if page.name not in ELSEWHERE and any(block.language == "sh" for block in blocks(page))
]


def run_notebook(name: str, folder: Path, **smaller: int) -> list[str]:
    """Runs a notebook in a folder, with smaller values of variables in its cells; returns what it prints."""
    notebook: Any = nbformat.read(DOCS / "tutorials" / f"{name}.ipynb", as_version=4)
    for variable, value in smaller.items():
        (cell,) = (cell for cell in notebook.cells if f"\n{variable} = " in f"\n{cell.source}")
        lines = [
            f"{variable} = {value}" if line.startswith(f"{variable} = ") else line for line in cell.source.split("\n")
        ]
        cell.source = "\n".join(lines)
    client = nbclient.NotebookClient(notebook, timeout=None, resources={"metadata": {"path": str(folder)}})
    client.execute(env={**os.environ, "PATH": search_path()})
    outputs = (output for cell in notebook.cells for output in cell.get("outputs", ()))
    return [output["text"] for output in outputs if output.get("name") == "stdout"]


@pytest.mark.slow
def test_the_first_notebook_finds_both_rules_and_confirms_the_gain(tmp_path: Path) -> None:
    said = run_notebook("first-prompt", tmp_path)
    assert said[0].startswith("0.0 ")
    assert "Money that goes back belongs to returns." in said[-1]
    assert "Answer with the team only." in said[-1]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the second notebook has run, with two steps instead of sixteen."""
    folder = tmp_path_factory.mktemp("first-weights")
    (folder / "said").write_text("".join(run_notebook("first-weights", folder, STEPS=2, TASKS=4, N_VAL=4, N_TEST=4)))
    return folder


@pytest.mark.slow
def test_the_second_notebook_trains_and_shows_each_step(trained: Path) -> None:
    said = (trained / "said").read_text()
    assert "'step': 2, 'reward': " in said
    assert said.count("'test_reward': ") == 2
    assert re.findall(r"^(\d) +(\d+) +\d+% ", said, re.MULTILINE) == [("1", "32"), ("2", "32")]  # steps of the ledger


@pytest.mark.slow
@pytest.mark.parametrize("page", SHELL, ids=lambda page: page.stem)
def test_the_commands_of_a_page_work_in_their_order(page: Path, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    ports = {port: str(reserve_port()) for port in ("4747", "4748") if port in page.read_text(encoding="utf-8")}
    if page.stem == "dashboard":
        (tmp_path / "runs").symlink_to(request.getfixturevalue("trained") / "runs")
    with ScriptedOpenAI([Answer("3")]) as server:
        said = run_shell(
            page,
            tmp_path,
            {**ports, **FASTER.get(page.stem, {})},
            OPENAI_BASE_URL=server.endpoint,
            OPENAI_API_KEY="any",
            OPENAI_MODEL="scripted",
        )
    assert "Traceback" not in said, said


def test_the_page_about_symptoms_names_metrics_that_exist() -> None:
    rows = re.findall(r"^\|[^|]*\|([^|]*)\|", (DOCS / "how-to" / "nothing-learns.md").read_text("utf-8"), re.MULTILINE)
    named = {name for cell in rows for name in re.findall(r"`([a-z_]+(?:/[a-z_]+)?)`", cell)}
    assert len(named) > 15
    recorded = {name for file in source_files() for name in re.findall(r'"([a-z_]+(?:/[a-z_]+)?)"', file.text)}
    assert named - recorded == set()
