"""`agl skill`: the skill is installed as coding agents expect it, and every command in it works."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from agentlightning_plugins.shared.scripted_model.server import Answer, RecordedRequest, ScriptedOpenAI
from tests.plugins.commands.agl_here import run_here


def installed(folder: Path) -> str:
    said = run_here(folder, "skill", "install", "skills")
    assert (said.code, said.stdout) == (0, "Wrote skills/lightning/SKILL.md\n"), said.stderr
    return (folder / "skills" / "lightning" / "SKILL.md").read_text(encoding="utf-8")


def commands(text: str) -> Iterator[list[str]]:
    for block in re.findall(r"^```console\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield from map(shlex.split, block.splitlines())


def test_the_skill_has_the_name_of_its_folder_and_a_short_text(tmp_path: Path) -> None:
    _, head, body = installed(tmp_path).split("---\n", 2)
    fields = yaml.safe_load(head)
    assert fields["name"] == "lightning"
    assert set(fields) == {"name", "description"}
    assert len(fields["description"]) <= 1024  # the format's limit
    assert len(body.splitlines()) <= 120
    (tmp_path / "file").touch()
    refused = run_here(tmp_path, "skill", "install", "file/skills")
    assert (refused.code, "cannot be written: Not a directory; choose another" in refused.stderr) == (2, True)
    installed(tmp_path)  # replaces the first one


def test_every_command_of_the_skill_works_in_its_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(request: RecordedRequest) -> Answer:
        asked = request.body["messages"][0]["content"]
        if request.body["model"] == "small":  # the agent
            first, second, *_ = map(int, [*re.findall(r"\d+", asked), "0", "0"])
            return Answer(str(first - second if "less" in asked else first + second) if "Add" in asked else "no idea")
        return Answer("<prompt>\nAdd or subtract. {question}\n</prompt>")  # critic and editor

    folder, done = tmp_path, []
    with ScriptedOpenAI(answer, models=["small", "large"]) as server:
        for name, value in (("API_KEY", "any"), ("BASE_URL", server.endpoint), ("MODEL", "small")):
            monkeypatch.setenv(f"OPENAI_{name}", value)
        monkeypatch.setenv("AGL_CRITIC_MODEL", "large")
        for program, *arguments in commands(installed(tmp_path)):
            if program == "cd":
                folder /= arguments[0]
                (folder / "test.jsonl").write_text('{"question": "What is 8 less 1?", "answer": "7"}\n')  # the user's
                config = folder / "config.yaml"
                config.write_text(config.read_text(encoding="utf-8") + "strategy: shm\n", encoding="utf-8")
                continue
            assert program == "agl"
            said = run_here(folder, *arguments, module="agent")
            assert said.code == 0, f"{arguments}: {said.stdout}{said.stderr}"
            done.append(" ".join(arguments[:1]))
            if arguments[:1] == ["eval"]:
                assert ("1.000" if "--resources" in arguments else "0.000") in said.stdout, said.stdout
    assert done == "new doctor train eval train report eval compare rollouts plugins".split()
