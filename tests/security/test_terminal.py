"""No command prints escape sequences from texts of agents and models to the terminal."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

import agentlightning as agl
from agentlightning.cli import cli, printable
from agentlightning.plugin.registry import get_manager
from agentlightning.types import Span
from tests.plugins.commands.agl_here import Said, run_here

EVIL = "\x1b[2J\x1b]0;owned\x07\x9b31m\r\x08\u202e"
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")
AGENT = f"""
from agentlightning import emit_annotation
EVIL = {EVIL!r}

def agent(task):
    emit_annotation({{"seen": EVIL}})
    if task["n"] == 1:
        raise type(EVIL, (ValueError,), {{}})(EVIL)
    return task["n"] / 10
"""
CONFIG = {
    "agent": "my_agents:agent",
    "data": {"train": "tasks.jsonl", "val": "tasks.jsonl"},
    "algorithm": {"name": "baseline"},
    "resources": {"prompt": EVIL},
    "strategy": "shm",
}
UNTRUSTED = (
    "compare doctor eval replay report train resources-list resources-show resources-export rollouts-list "
    "rollouts-show rollouts-cancel rollouts-retry rollouts-delete rollouts-export runs-list runs-show spans-list "
    "spans-show spans-export ledger tokens workers-list workers-show workers-export workers-end resources-promote "
    "resources-rollback top"
).split()
OTHERS = (
    "completion config-schema dashboard demo export gateway-pause gateway-resume gateway-status import "
    "new-agent new-plugin plugins resources-follow rollouts-follow spans-follow workers-follow runner serve "
    "skill-install store-compact trace"
).split()
"""Commands that print no text of agents, or print it with the same functions as the tested commands."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a configuration, and a store in which every text has escapes."""
    folder = tmp_path_factory.mktemp("terminal")
    (folder / "my_agents.py").write_text(AGENT)
    (folder / "tasks.jsonl").write_text("".join(json.dumps({"n": n, "evil": EVIL}) + "\n" for n in range(4)))
    (folder / "config.yaml").write_text(json.dumps(CONFIG))

    async def fill() -> None:
        store = agl.create_store(f"sqlite:///{folder / 'agl.db'}")
        await store.add_resources({"prompt": EVIL})
        for group in ("a", "b"):
            for _ in range(3):
                rollout = await store.start_rollout(
                    {"n": 1, "evil": EVIL}, worker_id=f"w{EVIL}", metadata={"group": group}
                )
                ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
                said = [{"role": "assistant", "parts": [{"type": "text", "content": EVIL}]}]
                chat = {"gen_ai.operation.name": "chat", "gen_ai.output.messages": json.dumps(said), "a": EVIL}
                await store.add_span(Span.from_attributes(attributes=chat, name=f"chat {EVIL}", **ids))
                error = agl.types.AttemptFailure(type=EVIL, message=EVIL, traceback=f"Traceback: {EVIL}")
                await store.update_attempt(*ids.values(), status="failed", error=error)
        await store.close()

    asyncio.run(fill())
    return folder


def check(said: Said, *, shows: bool = True) -> Said:
    for text in said[1:]:
        assert UNPRINTABLE.findall(text) == [], text[:3000]
    if shows:
        assert re.search(r"\\(u001b|x1b)\[2J", said.stdout + said.stderr), said
    return said


def leaves(command: click.Command, name: str = "") -> Iterator[str]:
    if isinstance(command, click.Group):
        context = click.Context(command)
        for each in command.list_commands(context):
            found = command.get_command(context, each)
            assert found is not None
            yield from leaves(found, f"{name}-{each}".lstrip("-"))
    else:
        yield name


def test_no_text_of_an_agent_is_printed_as_a_terminal_escape(folder: Path) -> None:
    for implementation in get_manager().hook.add_commands.get_hookimpls():
        implementation.function(cli)
    assert set(leaves(cli)) == {*UNTRUSTED, *OTHERS}, (
        "add a new command to UNTRUSTED if it prints texts of agents, otherwise to OTHERS"
    )

    def agl_here(*arguments: str, shows: bool = True) -> Said:
        return check(run_here(folder, *arguments), shows=shows)

    assert agl_here("train", "config.yaml", "--run-dir", "run").code == 0
    for form in ([], ["--json"]):
        agl_here("report", "run", *form)
        agl_here("eval", "config.yaml", *form)
    agl_here("compare", "config.yaml", "-a", "baseline", "-a", "baseline", shows=False)
    agl_here("doctor", "my_agents:agent", "--task", json.dumps({"n": 1}))
    listed: list[Any] = json.loads(agl_here("rollouts", "list", "--json").stdout)
    rollout_id = listed[0]["rollout_id"]
    resources_id = json.loads(agl_here("resources", "list", "--json", shows=False).stdout)[0]["resources_id"]
    spans: list[Any] = json.loads(agl_here("spans", "list", rollout_id, "--json").stdout)
    assert spans[-1]["attributes"]["a"] == EVIL, "JSON keeps the text"
    for form in ([], ["--json"]):
        agl_here("rollouts", "list", *form)
        agl_here("rollouts", "show", rollout_id, *form)
        agl_here("spans", "list", rollout_id, *form)
        agl_here("spans", "show", rollout_id, spans[-1]["span_id"], *form)
        agl_here("resources", "list", *form, shows=False)
        agl_here("resources", "show", resources_id, *form)
        agl_here("workers", "list", *form)
        agl_here("workers", "show", f"w{EVIL}", *form)
        agl_here("runs", "list", *form, shows=False)
        agl_here("compare", "a", "b", *form, shows=False)
        agl_here("ledger", *form, shows=False)
        agl_here("tokens", rollout_id, *form, shows=False)
        agl_here("top", "--once", *form)
    agl_here("runs", "show", EVIL)
    agl_here("rollouts", "cancel", EVIL)
    agl_here("rollouts", "retry", EVIL)
    agl_here("resources", "show", EVIL)
    agl_here("resources", "promote", EVIL)
    agl_here("resources", "rollback", EVIL, "1")
    agl_here("workers", "end", EVIL)
    agl_here("replay", "my_agents:agent", rollout_id)
    for what in ("rollouts", "workers", "resources"):
        agl_here(what, "export", f"{EVIL}.txt")
    agl_here("spans", "export", f"{EVIL}.txt")
    agl_here("rollouts", "delete", "--yes", shows=False)


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a\tb\nc", "a\tb\nc"), ("a\r\nb", "a\nb"), ("\r", "\\u000d"), ("\x9b", "\\u009b"), ("\ud800", "\\ud800")],
)
def test_control_characters_are_printed_in_escaped_form(text: str, shown: str) -> None:
    assert printable(text) == shown
