"""Task folders of Harbor, which the tests make."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import ClassVar

import pytest

from agentlightning.environment import Environment
from agentlightning.errors import ConfigError, RolloutError
from agentlightning.testing.environment import EnvironmentConformance, EnvironmentEpisode
from agentlightning_plugins.environments.harbor import HarborEnvironment

GRADE = "grep -qx 4 /app/answer.txt && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n"


def write_task(root: Path, name: str, *, docker: str = "FROM any\nWORKDIR /app\n", test: str = GRADE) -> Path:
    folder = root / name
    for place in ("environment", "tests", "solution"):
        (folder / place).mkdir(parents=True)
    (folder / "task.toml").write_text('schema_version = "1.1"\n[verifier]\ntimeout_sec = 60.0\n')
    (folder / "instruction.md").write_text(f"Task {name}: write the result to answer.txt.")
    (folder / "environment" / "Dockerfile").write_text(docker)
    (folder / "environment" / "input.txt").write_text(f"2 + 2 ({name})\n")
    (folder / "tests" / "test.sh").write_text(test)
    return folder


class TestHarbor(EnvironmentConformance):
    tasks: ClassVar = ({"task": "one"}, {"task": "two"})
    actions: ClassVar = [("shell", {"command": "ls /app; cat input.txt; echo 4 > answer.txt"}), "done"]
    ends: ClassVar = False
    at_once: ClassVar = 8

    @pytest.fixture
    def environment(self, tmp_path: Path) -> Environment:
        for name in ("one", "two"):
            write_task(tmp_path, name, docker="FROM any\nWORKDIR /app\nCOPY input.txt .\nENV COLOR=red\n")
        return HarborEnvironment(str(tmp_path))


async def run(folder: Path, *commands: str) -> tuple[list[str], float]:
    environment = HarborEnvironment(str(folder))
    async with EnvironmentEpisode(environment) as episode:
        await episode.reset({"task": folder.name})
        own = episode.environment
        said = [str(await own.call("shell", {"command": command})) for command in commands]
        reward = await own.reward(None, "")
        assert reward is not None
        return said, reward


async def test_the_tests_give_the_reward_and_the_model_cannot_see_them_or_write_elsewhere(tmp_path: Path) -> None:
    folder = write_task(tmp_path, "one")
    said, reward = await run(folder, f"ls /tests {folder}/tests; pwd", "touch /usr/x", "exit 3", "echo 4 > answer.txt")
    assert "test.sh" not in said[0]
    assert "/app" in said[0]
    assert "Read-only" in said[1]
    assert said[2:] == ["(exit code 3)", ""]
    assert reward == 1.0
    assert (await run(folder, "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt"))[1] == 0.0


@pytest.mark.parametrize(
    ("written", "expected"), [('{"reward": 0.25, "style": 1}', 0.25), ('{"speed": 0.5}', 0.5)], ids=["named", "single"]
)
async def test_a_reward_may_be_json(tmp_path: Path, written: str, expected: float) -> None:
    folder = write_task(tmp_path, "one", test=f"echo '{written}' > /logs/verifier/reward.json")
    assert (await run(folder))[1] == expected


@pytest.mark.parametrize(
    ("test", "match"),
    [
        ("echo lost; exit 2", "exit code 2 and the output:\nlost"),
        ("echo good > /logs/verifier/reward.txt", "'good' to reward.txt; a number"),
        ('echo \'{"a": 1, "b": 2}\' > /logs/verifier/reward.json', "the key reward"),
    ],
    ids=["none", "no-number", "many"],
)
async def test_tests_without_a_reward_fail_the_attempt(tmp_path: Path, test: str, match: str) -> None:
    with pytest.raises(RolloutError, match=match):
        await run(write_task(tmp_path, "one", test=test))


def test_a_task_that_needs_a_container_is_skipped_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_task(tmp_path, "installs", docker="FROM any\nRUN apt-get install \\\n  jq\n")
    with pytest.raises(ConfigError, match="such as 'Dockerfile: RUN apt-get"):
        HarborEnvironment(str(tmp_path))
    write_task(tmp_path, "plain")
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert HarborEnvironment(str(tmp_path)).tasks("train") == [{"task": "plain"}]
    assert "installs is skipped" in caplog.text
    assert "RUN apt-get install" in caplog.text
    write_task(tmp_path, "home", docker="FROM any\nWORKDIR /root\nCOPY input.txt /etc/\n")
    (write_task(tmp_path, "steps") / "instruction.md").rename(tmp_path / "steps" / "steps")
    assert len(HarborEnvironment(str(tmp_path), run_as_is=True).tasks("train") or ()) == 3


def test_a_folder_without_tasks_and_an_unknown_task_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"task\.toml"):
        HarborEnvironment(str(tmp_path))
    write_task(tmp_path, "one")
    with pytest.raises(ConfigError, match="no task 'on' that can run"):
        HarborEnvironment(str(tmp_path)).reset({"task": "on"}, 0)
