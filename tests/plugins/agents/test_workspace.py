"""Workspaces and homes of command agents: copied for each attempt, compared afterwards, rated by a command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import agentlightning as agl
from agentlightning.errors import ConfigError
from agentlightning_plugins.agents.command.workspace import Workspace, restore
from tests.plugins.agents.command_lab import command_span, printed, python, run, run_all, shell, store, tracer

__all__ = ["store", "tracer"]
CHECK = "from calc import add; assert add(1, 2) == 3, 'add(1, 2) is not 3'"


@pytest.fixture
def template(tmp_path: Path) -> Path:
    folder = tmp_path / "template"
    (folder / "tests").mkdir(parents=True)
    (folder / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    (folder / "tests" / "check.py").write_text(CHECK)
    return folder


def diff(spans: list[agl.Span]) -> str:
    return str(command_span(spans).attributes["agentlightning.command.diff"])


async def test_each_attempt_works_in_its_own_copy_and_the_span_has_the_diff(
    store: agl.LightningStore, template: Path
) -> None:
    code = "import pathlib; path = pathlib.Path('calc.py'); print(path.read_text()); path.write_text('broken')"
    agent = agl.CommandAgent(python(code), workspace=template)
    for _, spans in await run_all(store, agent, ["a", "b"]):
        assert printed(spans).startswith("def add")
        assert (
            diff(spans) == "--- a/calc.py\n+++ b/calc.py\n@@ -1,2 +1 @@\n-def add(a, b):\n-    return a - b\n+broken\n"
        )
    assert (template / "calc.py").read_text().startswith("def add")


async def test_new_removed_and_linked_files_are_in_the_diff_and_folders_of_tools_are_not(
    store: agl.LightningStore, template: Path
) -> None:
    code = "rm calc.py; echo new > new.txt; ln -s /dev/zero tests/zero; mkfifo pipe; mkdir .git; echo x > .git/config"
    _, spans = await run(store, agl.CommandAgent(shell(code), workspace=template))
    lines = diff(spans).splitlines()
    assert [line for line in lines if line.startswith(("+++", "---"))] == [
        "--- a/calc.py", "+++ /dev/null", "--- /dev/null", "+++ b/new.txt", "--- /dev/null", "+++ b/pipe",
        "--- /dev/null", "+++ b/tests/zero",
    ]  # fmt: skip
    assert lines.count("(not a text of at most 2000 lines)") == 2


async def test_a_diff_has_a_limit(store: agl.LightningStore, template: Path) -> None:
    code = "for i in range(50): open(f'{i:02}', 'w').write(('x' * 99 + '\\n') * 100)"
    _, spans = await run(store, agl.CommandAgent(python(code), workspace=template))
    assert 64 * 1024 < len(diff(spans)) < 65 * 1024
    assert diff(spans).endswith("more files\n")


async def test_a_workspace_is_chosen_by_a_field_of_the_task(store: agl.LightningStore, tmp_path: Path) -> None:
    for name in ("red", "blue"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "colour").write_text(name)
    agent = agl.CommandAgent(shell("cat colour"), workspace=tmp_path / "{name}")
    ended = await run_all(store, agent, [{"name": "red"}, {"name": "blue"}, {"name": "none"}, "text"])
    assert [printed(spans) for _, spans in ended[:2]] == ["red", "blue"]
    missing, fieldless = (rollout.attempt.error.message for rollout, _ in ended[2:] if rollout.attempt.error)
    assert "there is no such folder" in missing
    assert "the task has no field for it: 'name'" in fieldless


async def test_a_workspace_is_a_commit_of_a_repository_without_its_history(
    store: agl.LightningStore, template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    identity = {f"GIT_{who}_{what}": "me@here" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(template), *arguments]
        return subprocess.run(
            command, env={**os.environ, **identity}, check=True, capture_output=True, text=True
        ).stdout

    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "-m", "broken")
    broken = git("rev-parse", "HEAD").strip()
    (template / "calc.py").write_text("def add(a, b):\n    return a + b\n")
    git("commit", "--quiet", "-am", "the solution")
    git("config", "uploadpack.allowAnySHA1InWant", "true")
    code = "cat calc.py; git log --format=%s"
    agent = agl.CommandAgent(shell(code), workspace=f"git+file://{template}@{{commit}}")
    ended = await run_all(store, agent, [{"commit": broken}, {"commit": broken}, {"commit": "no-such-branch"}])
    assert [printed(spans) for _, spans in ended[:2]] == ["def add(a, b):\n    return a - b\nbroken\n"] * 2
    assert ended[2][0].attempt.error is not None
    assert "no-such-branch" in ended[2][0].attempt.error.message
    assert len(list((tmp_path / "cache/agentlightning/workspaces").glob("?" * 32))) == 1


@pytest.mark.parametrize(
    ("code", "reward", "feedback"),
    [
        ("sed -i s/-/+/ calc.py", 1.0, ""),
        ("true", 0.0, "add(1, 2) is not 3"),
        ("echo > tests/check.py; echo 'exit(0)' > tests/sitecustomize.py", 0.0, "add(1, 2) is not 3"),
        ("rm -r tests; ln -s /tmp tests", 0.0, "add(1, 2) is not 3"),
    ],
    ids=["solved", "not solved", "tests overwritten", "tests linked away"],
)
async def test_a_reward_command_runs_tests_that_the_agent_cannot_change(
    store: agl.LightningStore, template: Path, code: str, reward: float, feedback: str
) -> None:
    check = [sys.executable, "-c", "import runpy, sys; sys.path[:0] = ['.', 'tests']; runpy.run_path('tests/check.py')"]
    agent = agl.CommandAgent(shell(code), check, workspace=template, restore=["tests/*"])
    rollout, spans = await run(store, agent)
    assert rollout.attempt.reward == reward
    assert any(feedback in str(span.attributes) for span in spans)


@pytest.mark.parametrize(
    ("code", "reward"),
    [("echo 0.25", 0.25), ('echo \'{"reward": 0.5, "style": 1}\'', 0.5), ("echo passed", 1.0), ("echo 7; exit 3", 0.0)],
    ids=["number", "object", "text", "failure"],
)
async def test_a_reward_command_gives_a_number_or_its_exit_code(
    store: agl.LightningStore, template: Path, code: str, reward: float
) -> None:
    rollout, _ = await run(store, agl.CommandAgent(shell("true"), ["sh", "-c", code], workspace=template))
    assert rollout.attempt.reward == reward


async def test_a_reward_function_may_read_the_workspace(store: agl.LightningStore, template: Path) -> None:
    def reward(task: str, output: str, rollout: agl.Rollout, workspace: Path) -> float:
        return float((workspace / "answer").read_text())

    rollout, _ = await run(store, agl.CommandAgent(shell("echo 0.75 > answer"), reward, workspace=template))
    assert rollout.attempt.reward == 0.75


async def test_reset_prepares_the_workspace_and_knows_no_key(
    store: agl.LightningStore, template: Path, tmp_path: Path
) -> None:
    reset = shell('echo "prepared [$OPENAI_API_KEY]" > state; test ! -e fail')
    llm = agl.LLM(endpoint="http://127.0.0.1:1/v1", model="m", api_key="secret-key-of-this-run")
    agent = agl.CommandAgent(shell("cat state"), workspace=template, reset=reset, keep=tmp_path / "kept")
    rollout, spans = await run(store, agent, resources={"llm": llm})
    assert printed(spans) == "prepared []\n"
    assert diff(spans) == "", "what reset changed is not the agent's"
    assert (tmp_path / "kept" / rollout.attempt.attempt_id / "state").read_text() == "prepared []\n"
    failing = agl.CommandAgent(shell("echo so far > state; exit 1"), workspace=template, keep=tmp_path / "kept")
    rollout, _ = await run(store, failing, resources={"llm": llm})
    assert rollout.status == "failed"
    assert (tmp_path / "kept" / rollout.attempt.attempt_id / "state").read_text() == "so far\n"
    (template / "fail").touch()
    rollout, _ = await run(store, agent, resources={"llm": llm})
    assert rollout.attempt.error is not None
    assert "the command reset exited with code 1" in rollout.attempt.error.message


async def test_each_attempt_has_a_home_and_temporary_files_of_its_own(
    store: agl.LightningStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".tool").write_text("mine")
    code = shell('ls -A "$HOME"; echo "$HOME $TMPDIR"; touch "$HOME/left" "$TMPDIR/left"')
    ended = await run_all(store, agl.CommandAgent(code), ["a", "b"])
    places = [place for _, spans in ended for place in printed(spans).split()]
    assert len(set(places)) == 4
    assert not any(map(os.path.exists, places))
    for home in ("inherit", str(tmp_path)):
        _, spans = await run(store, agl.CommandAgent(shell('cat "$HOME/.tool"'), home=home))
        assert printed(spans) == "mine"


async def test_a_task_in_a_file_may_be_long_and_begin_with_a_dash(store: agl.LightningStore) -> None:
    task = "--help " + "x" * 1_000_000
    for command in (shell('wc -c < "$1"', "{task_file}"), shell('wc -c < "$AGL_TASK_FILE"')):
        _, spans = await run(store, agl.CommandAgent(command, task_via="file"), task)
        assert int(printed(spans)) == len(task)


async def test_a_prompt_with_the_fields_of_the_task_is_what_the_command_gets_and_is_tunable(
    store: agl.LightningStore,
) -> None:
    agent = agl.CommandAgent(["cat"], prompt="Fix {what}, quickly.")
    assert agent.initial_prompts()["prompt"].template == "Fix {what}, quickly."
    _, spans = await run(store, agent, {"what": "it", "id": 3})
    assert printed(spans) == "Fix it, quickly."
    tuned = agl.PromptTemplate(template="Repair {what} with care.")
    _, spans = await run(store, agent, {"what": "it", "id": 3}, resources={"prompt": tuned})
    assert printed(spans) == "Repair it with care."
    said = agl.PromptTemplate(template="Say {task}")
    _, spans = await run(store, agent, "hello", resources={"prompt": said})
    assert printed(spans) == "Say hello"


def test_restoring_follows_no_link_that_the_agent_made(template: Path, tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "work"
    outside.mkdir()
    (outside / "check.py").write_text("precious")
    folder.mkdir()
    (folder / "tests").symlink_to(outside)
    restore(template, folder, ["tests/*"])
    assert (outside / "check.py").read_text() == "precious"
    assert (folder / "tests" / "check.py").read_text() == CHECK


def test_a_change_that_keeps_size_and_time_is_found(template: Path, tmp_path: Path) -> None:
    workspace, folder = Workspace(str(template)), tmp_path / "work"
    folder.mkdir()
    source, before = workspace.make("task", folder)
    info = (folder / "calc.py").stat()
    (folder / "calc.py").write_text((folder / "calc.py").read_text().replace("-", "+"))
    os.utime(folder / "calc.py", ns=(info.st_atime_ns, info.st_mtime_ns))
    assert "+    return a + b" in workspace.diff(source, before, folder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reset": ["true"]}, "reset needs a workspace"),
        ({"reward": ["pytest"]}, "a reward command needs a workspace"),
        ({"workspace": ".", "cwd": "."}, "leave one of them out"),
        ({"workspace": ".", "reset": "make"}, "give a list of strings"),
        ({"preset": "claud-code"}, "Did you mean 'claude-code'"),
        ({"sandbox": "subproces"}, "Did you mean 'subprocess'"),
        ({"sandbox": {"name": "subprocess", "processes": 0}}, "processes = 0"),
        ({"task_via": "file", "argv": ["cat", "{task}"]}, "leave one of them out"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(agl.LightningError, match=message):
        agl.CommandAgent(**{"argv": None if "preset" in settings else ["true"], **settings})
    assert issubclass(ConfigError, agl.LightningError)
