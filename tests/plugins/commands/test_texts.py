"""Texts in configurations are kept as they are written, and those of agents are printed on every terminal."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

import agentlightning as agl
from agentlightning.cli import cli
from agentlightning_plugins.shared.configuration.document import read_with_overrides
from tests.plugins.commands.agl_here import run_here

NUMBERS: dict[str, Any] = {
    "1e3": 1000.0, "-1.5E-3": -0.0015, "+2.e+1": 20.0, "1e3 {question}": "1e3 {question}", "1e5-run": "1e5-run",
    "1e3x": "1e3x", "1.5e3.5": "1.5e3.5", "2e1,000": "2e1,000",
}  # fmt: skip


@pytest.mark.parametrize("text", NUMBERS)
@pytest.mark.parametrize("place", ["file", "override"])
def test_only_a_whole_number_is_read_as_a_number(tmp_path: Path, text: str, place: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"name: {text if place == 'file' else 'x'}\n")
    overrides = [f"name={text}"] if place == "override" else []
    assert read_with_overrides(file, overrides).values == {"name": NUMBERS[text]}


AGENT = """
import json
from pathlib import Path

def agent(task, prompt, other, factor=None):
    Path("seen.json").write_text(json.dumps([prompt.template, other.template]))
    return 1.0

def rate(task, output, rollout, *, text):
    Path("rated.txt").write_text(text)
    return 1.0
"""


@pytest.mark.parametrize("overridden", [False, True])
def test_texts_of_prompts_are_never_expanded_and_a_doubled_dollar_is_a_literal_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overridden: bool
) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "tasks.json").write_text("[1]")
    plugin = f"texts_{overridden}.py".lower()  # names of plugins are taken once in a process
    (tmp_path / plugin).write_text(
        "from agentlightning.plugin import Component, hookimpl\n\n@hookimpl\ndef components():\n"
        "    return [Component('reward', 'rated', 'agent:rate', summary='s')]\n"
    )
    texts = ["Say ${SECRET} and $${SECRET}: {{x}}", "1e3 ${SECRET}"]
    other = {"resource_type": "prompt_template", "template": texts[1], "engine": "f-string"}
    config = {
        "agent": {"target": "agent.py:agent", "reward": {"name": "rated", "text": "$${SECRET} is ${SECRET}"}},
        "plugins": [plugin], "data": {"train": "tasks.json"}, "algorithm": {"name": "baseline", "train_split": 1.0},
        "resources": {"prompt": "x" if overridden else texts[0], "other": other},
    }  # fmt: skip
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    more = [f"resources.prompt={json.dumps(texts[0])}"] if overridden else []
    done = run_here(tmp_path, "train", "config.yaml", *more, module="agent")
    assert done.code == 0, done.stderr
    assert json.loads((tmp_path / "seen.json").read_text()) == texts
    assert (tmp_path / "rated.txt").read_text() == "${SECRET} is hunter2"
    files = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert [path for path in files if b"hunter2" in path.read_bytes()] == []


def test_records_are_printed_on_a_terminal_without_unicode(tmp_path: Path) -> None:
    async def fill() -> None:
        store = agl.create_store(f"sqlite:///{tmp_path}/store.db")
        rollout = await store.enqueue_rollout({"question": "gr\u00fcn \u65e5\u672c", "n": 1})
        await store.close()
        names.append(rollout.rollout_id)

    names: list[str] = []
    asyncio.run(fill())
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environment.pop("PYTHONIOENCODING", None)
    for arguments in (["list"], ["show", names[0]], ["list", "--json"]):
        command = [sys.executable, "-m", "agentlightning", "rollouts", *arguments, "--store", f"{tmp_path}"]
        done = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=100)
        assert (done.returncode, done.stderr) == (0, b"")
        assert b"question" in done.stdout


def test_the_help_lists_the_commands_by_section_and_those_of_other_plugins_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = run_here(tmp_path, "--help").stdout
    assert "Other plugins" not in said
    places = [said.index(each) for each in ("Begin:", "\n  new ", "Run agents:", "\n  train ", "Look at", "Serve:")]
    assert places == sorted(places)
    monkeypatch.setitem(cli.commands, "acme", click.Command("acme", help="Does it."))
    assert run_here(tmp_path, "--help").stdout.endswith("Other plugins:\n  acme  Does it.\n")
