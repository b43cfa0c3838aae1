"""Skills, tool descriptions and code files as tunable texts: `resources: {skill: {file: SKILL.md}}`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.resources import PromptTemplate
from agentlightning_plugins.shared.configuration.assembly import load_resources
from agentlightning_plugins.shared.scripted_model.server import Answer, RecordedRequest
from tests.algorithms.prompt_lab import Server, client

CODE = 'def add(a, b):\n    return {"sum": a - b}\n'


def test_the_braces_of_a_file_are_text_unless_it_has_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("add.py").write_text(CODE)
    Path("prompt.txt").write_text("\ufeffAnswer {question}", encoding="utf-8")
    made: Any = load_resources({"code": {"file": "add.py"}, "prompt": {"file": "prompt.txt", "engine": "f-string"}})
    assert made["code"].format() == CODE
    assert made["prompt"].format(question="it") == "Answer it"
    with pytest.raises(agl.ConfigError, match="resource 'x': none.md cannot be read"):
        load_resources({"x": {"file": "none.md"}})
    with pytest.raises(agl.ConfigError, match="resource 'x': unknown key 'engin'; a text has file and"):
        load_resources({"x": {"file": "add.py", "engin": "jinja"}})


def test_gepa_tunes_a_file_of_code_and_says_what_it_needs_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("add.py").write_text(CODE)
    logged: list[bool] = []
    asked: list[str] = []

    def reflect(request: RecordedRequest) -> Answer:
        asked.append(str(request.body["messages"]))
        return Answer(f"```\n{CODE.replace('-', '+')}```")

    def agent(task: dict[str, int], code: PromptTemplate) -> float:
        logged.append("are needed to try one new prompt" in caplog.text)
        scope: dict[str, Any] = {}
        exec(code.format(), scope)  # the scripted model wrote it
        return float(scope["add"](task["a"], 1) == {"sum": task["a"] + 1})

    tasks = [{"a": number} for number in range(8)]
    with Server(reflect) as server, caplog.at_level("INFO", "agentlightning"):
        gepa = agl.GEPA(client(server), reflection_model="m", max_rollouts=60, confirm_pairs=4)
        resources = load_resources({"code": {"file": "add.py"}})
        trainer = agl.Trainer(algorithm=gepa, strategy="shm", trackers=[], initial_resources=resources)
        assert trainer.fit(agent, tasks, tasks).status == "succeeded"
    assert gepa.get_best_prompt().format() == CODE.replace("-", "+")
    assert "{'sum': a - b}" in asked[0] or '{"sum": a - b}' in asked[0] or '{\\"sum\\": a - b}' in asked[0]
    assert logged[0], "the least number of rollouts is said before the first one"
