"""Commands that read the directory of a run which someone else made."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

import agentlightning as agl
from agentlightning_algorithms.grpo.command import write_model_card
from agentlightning_algorithms.shared.trained_model import TrainingRecord, find_checkpoint
from agentlightning_plugins.commands.report.report import Report
from agentlightning_plugins.shared.configuration.document import read_document
from tests.plugins.commands.agl_here import run_here


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The directory of a run that trained weights, and next to it a file of the user."""
    run = tmp_path / "run"
    (run / "best").mkdir(parents=True)
    (run / "best" / "config.json").write_text("{}")
    (run / "run.json").write_text('{"key": "k"}')
    (run / "training.json").write_text(json.dumps({"algorithm": "grpo", "base": "tiny"}))
    (tmp_path / "secret").write_text("the user's own")
    return run


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


def test_a_report_expands_no_variable_and_asks_no_store_that_the_directory_names(
    run: Path, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "the-users-key")
    monkeypatch.setenv("AGL_TOKEN", "the-users-token")
    store = f"http://127.0.0.1:{listener.getsockname()[1]}/${{OPENAI_API_KEY}}"
    (run / "config.yaml").write_text(json.dumps({"agent": "a:b", "store": store}))
    for options in ([], ["--json"], ["--html", "page.html"]):
        said = run_here(run.parent, "report", "run", *options)
        assert said.code == 2
        assert "name the store: agl report run --store URL" in said.stderr
        with pytest.raises(BlockingIOError):
            listener.accept()


@pytest.mark.parametrize("suffix", ["", "-wal", "-journal"])
@pytest.mark.parametrize(
    "command", ["report run", "top run --once", "dashboard run", "rollouts list --store run", "ledger --store run"]
)
def test_no_command_opens_a_database_through_a_link(run: Path, command: str, suffix: str) -> None:
    if suffix:
        asyncio.run(agl.create_store(f"sqlite:///{run}/store.db").close())
        (run / f"store.db{suffix}").unlink(missing_ok=True)
    (run / f"store.db{suffix}").symlink_to(run.parent / "secret")
    said = run_here(run.parent, *command.split())
    assert said.code == 2
    assert f"store.db{suffix} leads out of run, so it is not opened" in said.stderr
    assert (run.parent / "secret").read_text() == "the user's own"


def test_texts_of_agents_and_of_the_directory_are_no_html_in_a_report_and_a_model_card(run: Path) -> None:
    tag, fence = "<img src=x onerror=alert(1)>", "a\n```\n<script>x</script>\n```"
    candidate = {"candidate_id": tag, "critique": tag, "prompts": {}}
    report = Report(
        agl.types.Run(name=tag), {}, {}, {f"ValueError: {tag}": 1}, 0, {}, {f"prompt {tag}": fence}, 0, [candidate]
    )
    settings = {"prompt": fence}
    TrainingRecord(algorithm="grpo", base=tag, settings=settings).write(run)
    (run / "run.json").write_text(json.dumps({"key": "k", "seed": tag, "versions": {tag: tag}}))
    write_model_card(run, run, "best")
    for text in (report.to_markdown(), (run / "README.md").read_text()):
        outside = re.sub(r"^(`{3,}).*?^\1$", "", text, flags=re.DOTALL | re.MULTILINE)
        head, _, rest = outside.partition("\n---\n")
        assert "<" not in (rest or head)


def _aliases(levels: int) -> str:
    lines = [f"a{level}: &a{level} [*a{level - 1}, *a{level - 1}]" for level in range(1, levels)]
    return "\n".join(["a0: &a0 [x, x]", *lines])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (_aliases(60), "its aliases repeat more than"),
        ("a: &a [*a]", "its aliases repeat more than"),
        ("agent: " + "[" * 50_000, "nested too deep"),
    ],
    ids=["aliases", "a list in itself", "deep"],
)
def test_a_configuration_with_many_aliases_or_levels_is_refused(run: Path, text: str, problem: str) -> None:
    (run / "config.yaml").write_text(text)
    with pytest.raises(agl.ConfigError, match=problem):
        read_document(run / "config.yaml")


def test_a_database_with_views_and_a_pipe_are_not_opened(run: Path) -> None:
    file = run / "store.db"
    asyncio.run(agl.create_store(f"sqlite:///{file}").close())
    endless = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x AS run_id FROM c"
    with sqlite3.connect(file) as connection:
        connection.executescript(f"ALTER TABLE run RENAME TO old; CREATE VIEW run AS {endless};")
    connection.close()
    for command in ("report run", "top run --once", "rollouts list --store run"):
        said = run_here(run.parent, *command.split())
        assert said.code == 2
        assert "has 1 views or triggers" in said.stderr
    file.unlink()
    os.mkfifo(file)
    os.mkfifo(run / "metrics.jsonl")
    for command in ("report run", "rollouts list --store run"):
        said = run_here(run.parent, *command.split())
        assert said.code == 2, said


@pytest.mark.parametrize("linked", ["best/config.json", "best/more", "best", "training.json", "run.json"])
def test_export_and_serve_follow_no_link_out_of_the_directory(run: Path, linked: str) -> None:
    place, target = run / linked, run.parent / "elsewhere"
    target.mkdir()
    if place.is_dir():
        place.rename(target / "old")
    place.unlink(missing_ok=True)
    place.symlink_to(target if linked in ("best", "best/more") else run.parent / "secret")
    commands = [["report", "run"]] if linked == "run.json" else [["export", "run", "out"], ["serve", "run"]]
    for command in commands:
        said = run_here(run.parent, *command)
        assert said.code == 2
        assert f"{linked} leads out of run" in said.stderr
    assert not (run.parent / "out").exists()


def test_export_and_serve_load_no_pickle_and_no_model_outside_without_trust(run: Path) -> None:
    shards = run / "best" / "model_world_size_1_rank_0.pt"
    shards.write_bytes(b"a pickle")
    for command in (["export", "run", "out"], ["serve", "run"], ["serve", "run", "--command", "echo {model}"]):
        said = run_here(run.parent, *command)
        assert said.code == 2
        assert "has shards, which can run code when they are read; add --trust if it is yours" in said.stderr
    outside = run.parent / "elsewhere" / "global_step_1" / "actor"
    outside.mkdir(parents=True)
    record = {"algorithm": "verl", "base": "tiny", "checkpoints": str(run.parent / "elsewhere")}
    (run / "training.json").write_text(json.dumps(record))
    assert find_checkpoint(run, "1", trust=True) == ("1", outside)
    with pytest.raises(agl.ConfigError, match="actor leads out of"):
        find_checkpoint(run, "1")
