"""`agl train`: from a configuration file to a run, with errors that name the place."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import yaml
from click.testing import CliRunner

import agentlightning as agl
from agentlightning.errors import StoreError
from agentlightning.plugin.registry import get_manager
from agentlightning_plugins.commands.runner import command as runner_command
from agentlightning_plugins.commands.train import command
from agentlightning_plugins.shared.configuration import assembly
from agentlightning_plugins.shared.configuration.config import read_config
from agentlightning_plugins.shared.configuration.document import read_document
from agentlightning_plugins.shared.configuration.run_directory import choose_directory
from agentlightning_plugins.shared.scripted_model.server import Answer
from tests.algorithms import prompt_lab
from tests.plugins.commands.agl_here import run_here
from tests.process import wait_for
from tests.waiting import LIMIT_S

AGENT = """
import os, time
from pathlib import Path

def agent(task):
    while task.get("waits") and not Path("killed").exists():
        time.sleep(0.01)
    with open("ran.txt", "a") as file:
        file.write(f"{task['n']}\\n")
    return task["n"] / 10

def score(task, output, rollout):
    return 1.0

class Quiet(__import__("agentlightning").Hook):
    pass

TASKS = [{"n": 1}, {"n": 2}]
"""
CONFIG: dict[str, Any] = {
    "agent": "my_agents:agent",
    "data": {"train": "tasks.jsonl"},
    "algorithm": {"name": "baseline", "train_split": 1.0},
    "strategy": "shm",
    "tracer": "dummy",
    "trackers": ["jsonl"],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_agents.py").write_text(AGENT)
    (tmp_path / "tasks.jsonl").write_text('{"n": 1}\n{"n": 2}\n\n{"n": 3}\n')
    return tmp_path


def write(folder: Path, changes: dict[str, Any] | None = None, name: str = "config.yaml") -> Path:
    path = folder / name
    path.write_text(yaml.safe_dump({**CONFIG, **(changes or {})}, sort_keys=False))
    return path


def refused(folder: Path, *arguments: str) -> str:
    code, _, said = run_here(folder, "train", *arguments)
    assert code == 2, said
    assert "Traceback" not in said
    assert not (folder / "runs").exists()
    return said


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_each_run_from_a_file_and_overrides_gets_its_own_directory(folder: Path) -> None:
    write(folder)
    for number in ("config", "config-2"):
        result = run_here(folder, "train", "config.yaml", "algorithm.n_epochs=2")
        assert result.code == 0, result.stderr
        assert "INFO agentlightning: epoch 2 of 2: " in result.stderr
        assert "agentlightning.access" not in result.stderr  # a line for each request of the run's own store
        *epochs, last = metrics(folder / "runs" / number)
        assert [line["reward"] for line in epochs] == pytest.approx([0.2, 0.2])
        assert last["status"] == "succeeded"
        kept = yaml.safe_load((folder / "runs" / number / "config.yaml").read_text())
        assert kept["algorithm"] == {"name": "baseline", "train_split": 1.0, "n_epochs": 2}
    assert (folder / "runs" / "config" / "store.db").is_file()


OWN_PLUGIN = """
from dataclasses import dataclass
from pathlib import Path
import agentlightning as agl
from agentlightning.plugin import Component, hookimpl

@dataclass
class Settings:
    file: str
    every: int = 1

@hookimpl
def observe_rollout(rollout, spans, settings):
    with open(settings.file, "a") as file:
        print(rollout.input, len(spans), settings.every, file=file)

class Lines:
    def start(self, run, directory):
        self.file = Path("events.txt").open("w")
    def on_event(self, event):
        print(event.kind, file=self.file, flush=True)
    def close(self):
        self.file.close()

class Parrot(agl.LitAgent):
    returns_output = True
    def __init__(self, *, times: int = 1):
        self.times = times
    def rollout(self, task, resources, rollout):
        return task * self.times

def twice(task, output, rollout, *, factor: float = 2.0):
    return output * factor

def read_numbers(source, *, scale: float = 1.0):
    return [float(number) * scale for number in Path(source).read_text().split()]

@hookimpl
def components():
    return [
        Component("tracker", "lines", f"{__name__}:Lines"),
        Component("agent", "parrot", f"{__name__}:Parrot"),
        Component("dataset", "numbers", f"{__name__}:read_numbers"),
        Component("reward", "twice", f"{__name__}:twice"),
    ]
"""


@pytest.fixture
def own_parts(folder: Path) -> dict[str, Any]:
    """A configuration whose agent, data, reward and tracker come from a plugin that is a file."""
    (folder / "parts").mkdir()
    (folder / "parts" / "mine.py").write_text(OWN_PLUGIN)
    (folder / "tasks.numbers").write_text("1 2 3")
    return {
        "plugins": ["parts/mine.py"],
        "disabled_plugins": ["trackers.jsonl"],
        "plugin_settings": {"mine": {"file": "rollouts.txt"}},
        "trackers": ["lines"],
        "agent": {"name": "parrot", "times": 2, "reward": {"name": "twice", "factor": 3}},
        "data": {"train": "tasks.numbers"},
    }


@pytest.fixture
def own_manager() -> Iterator[None]:
    """The command gets a plugin manager of its own, as in a new process."""
    get_manager.cache_clear()
    yield
    get_manager.cache_clear()


@pytest.mark.slow
def test_a_file_is_a_plugin_in_all_processes_of_a_run_and_others_are_switched_off(
    folder: Path, own_parts: dict[str, Any]
) -> None:
    write(folder, {**own_parts, "strategy": "cs"})
    command = [sys.executable, "-m", "agentlightning", "train", "config.yaml"]
    done = subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    events = (folder / "events.txt").read_text().split()
    assert events.count("rollout_finished") == 3
    store = agl.create_store(f"sqlite:///{folder}/runs/config/store.db")
    (run,) = asyncio.run(store.query_runs())
    rollouts = asyncio.run(store.query_rollouts(run_id=run.run_id))
    assert sorted(rollout.attempt.reward for rollout in rollouts) == pytest.approx([6, 12, 18])
    observed = {rollout.input: len(asyncio.run(store.query_spans(rollout.rollout_id))) for rollout in rollouts}
    lines = [line.split() for line in (folder / "rollouts.txt").read_text().splitlines()]
    assert {float(task): int(spans) for task, spans, _ in lines} == observed
    asyncio.run(store.close())
    said = subprocess.run([*command, "trackers=[jsonl]"], check=False, cwd=folder, capture_output=True, text=True)
    assert said.returncode == 2
    assert "no tracker named 'jsonl'" in said.stderr
    assert "jsonl@lightning (switched off by the configuration)" in said.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"agent": {"name": "parot"}}, "no agent named 'parot'. Did you mean 'parrot'?"),
        ({"agent": {"name": "parrot", "time": 2}}, "agent 'parrot' has no setting 'time'. Did you mean 'times'?"),
        (
            {"data": {"train": {"source": "tasks.numbers", "reader": "number"}}},
            "no dataset named 'number'. Did you mean",
        ),
        (
            {"data": {"train": {"source": "tasks.numbers", "reader": {"name": "numbers", "scale": "x"}}}},
            "dataset 'numbers': scale = 'x'",
        ),
        ({"plugin_settings": {"mne": {}}}, "settings of plugin 'mne': it is not installed. Did you mean 'mine'?"),
        ({"plugin_settings": {"mine": {"fil": "x"}}}, "plugin 'mine' has no setting 'fil'. Did you mean 'file'?"),
        ({"plugin_settings": {"mine": {"every": 2}}}, "plugin 'mine' needs the setting file."),
        ({"plugin_settings": {"trackers.jsonl": {}}}, "plugin trackers.jsonl"),
    ],
    ids=["agent", "its setting", "reader", "setting of a reader", "plugin", "its settings", "missing", "has none"],
)
def test_a_mistake_in_the_parts_of_a_plugin_is_found_before_the_run(
    folder: Path, own_parts: dict[str, Any], change: dict[str, Any], message: str, own_manager: None
) -> None:
    write(folder, {**own_parts, **change})
    said = run_here(folder, "train", "config.yaml", "--dry-run", module="mine")
    assert message in said.stderr + said.stdout
    assert said.code == 2


def test_a_failed_run_and_a_refused_run_have_different_exit_codes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder)
    for error, code in ((StoreError("gone"), 1), (agl.ConfigError("taken"), 2)):
        monkeypatch.setattr(assembly, "fit", Mock(side_effect=error))
        said = run_here(folder, "train", "config.yaml")
        assert (said.code, "Traceback" in said.stderr, str(error) in said.stderr) == (code, False, True)
        assert "Traceback" in run_here(folder, "--debug", "train", "config.yaml").stderr


PARTS = """
from pathlib import Path
import agentlightning as agl

class Mine(agl.Algorithm):
    def __init__(self, *, rounds: int):
        self.rounds = rounds

    async def run(self, train_dataset=None, val_dataset=None):
        store = self.get_store()
        for number in range(self.rounds):
            rollout = await store.enqueue_rollout(train_dataset[0], mode="train")
            await store.wait_for_rollouts([rollout.rollout_id])
            await store.add_metrics(number + 1, {"worth": self.get_adapter().adapt([])})

class Adapter(agl.TraceAdapter):
    def __init__(self, worth: float = 0.0):
        self.worth = worth

    def adapt(self, source):
        return self.worth

class Tracker:
    def __init__(self, path: str):
        self.path = Path(path)

    def start(self, run, directory):
        self.path.write_text("")

    def on_event(self, event):
        if isinstance(event, agl.event.StepFinished):
            with self.path.open("a") as file:
                file.write(f"{event.values['worth']} ")

    def close(self):
        pass

class Counting(agl.Hook):
    async def on_rollout_end(self, **kwargs):
        with open("counted.txt", "a") as file:
            file.write("x")
"""


@pytest.mark.parametrize("module", ["parts", "parts.py"])
def test_algorithm_adapter_tracker_and_hook_can_be_classes_in_the_users_files(folder: Path, module: str) -> None:
    (folder / "parts.py").write_text(PARTS)
    write(
        folder,
        {
            "algorithm": {"name": f"{module}:Mine", "rounds": 2},
            "adapter": {"name": f"{module}:Adapter", "worth": 0.5},
            "trackers": [{"name": f"{module}:Tracker", "path": "told.txt"}],
            "hooks": [f"{module}:Counting"],
        },
    )
    said = run_here(folder, "train", "config.yaml", module="parts")
    assert said.code == 0, said.stderr
    assert (folder / "told.txt").read_text() == "0.5 0.5 "
    assert (folder / "counted.txt").read_text() == "xx"
    write(folder, {"algorithm": {"name": f"{module}:Mine", "round": 2}})
    said = run_here(folder, "train", "config.yaml", module="parts")
    assert (said.code, "has no setting 'round'. Did you mean 'rounds'?" in said.stderr) == (2, True)


def test_a_run_fails_if_every_rollout_fails(folder: Path) -> None:
    (folder / "my_agents.py").write_text("def agent(task):\n    return task['missing']\n")
    write(folder)
    said = run_here(folder, "train", "config.yaml", "--run-dir", "r")
    assert said.code == 1
    assert "failed: no rollout of r succeeded; agl report r lists the errors" in said.stderr
    report = (folder / "r" / "report.md").read_text()
    assert report.startswith("# r: failed\n")
    assert "- 3 x KeyError: 'missing'" in report
    (folder / "my_agents.py").write_text("def agent(task):\n    return 1 / (task['n'] - 2)\n")
    assert run_here(folder, "train", "config.yaml", "--run-dir", "s").code == 0, "two of three succeeded"


def test_what_an_algorithm_needs_is_checked_before_a_run_directory_is_created(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_MODEL", "AGL_CRITIC_MODEL"):
        monkeypatch.delenv(name, raising=False)
    write(folder, {"data": {}})
    assert "baseline needs a train_dataset or a val_dataset" in refused(folder, "config.yaml")
    write(folder, {"algorithm": "apo"})
    assert "there is no prompt to tune" in refused(folder, "config.yaml")
    write(folder, {"algorithm": "apo", "resources": {"prompt": "Say {n}."}})
    assert "set OPENAI_API_KEY" in refused(folder, "config.yaml")
    dry = run_here(folder, "train", "config.yaml", "--dry-run")
    assert (dry.code, "WRONG algorithm: " in dry.stdout, "set OPENAI_API_KEY" in dry.stdout) == (2, True, True)
    monkeypatch.setenv("OPENAI_API_KEY", "any")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    assert "gradient_model = None: name a model" in refused(folder, "config.yaml")
    monkeypatch.setenv("OPENAI_MODEL", "not-this-one")
    monkeypatch.setenv("AGL_CRITIC_MODEL", "my-critic")
    dry = run_here(folder, "train", "config.yaml", "--dry-run")
    assert dry.code == 2
    assert "WRONG algorithm    my-critic at http://127.0.0.1:9/v1/: cannot be reached" in dry.stdout
    assert not (folder / "runs").exists()


def test_only_an_algorithm_that_runs_no_agent_needs_none(folder: Path) -> None:
    (folder / "mine.py").write_text(
        "import agentlightning as agl\n"
        "class Reads(agl.Algorithm):\n"
        "    runs_agent = False\n"
        "    async def run(self, train_dataset=None, val_dataset=None):\n"
        "        await self.context.log(1, {'rows': 3.0})\n"
    )
    config = {"algorithm": "mine.py:Reads", "strategy": "shm", "trackers": ["jsonl"]}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    assert run_here(folder, "train", "config.yaml", "--dry-run").code == 0
    assert run_here(folder, "train", "config.yaml").code == 0
    assert '"rows":3.0' in (folder / "runs/config/metrics.jsonl").read_text()
    (folder / "config.yaml").write_text(yaml.safe_dump({**config, "algorithm": "baseline"}))
    for name in ("train", "eval", "doctor", "runner"):
        refusal = run_here(folder, name, "config.yaml")
        assert refusal.code != 0, name
        assert "agent is missing" in refusal.stdout + refusal.stderr, name


def test_an_adapter_that_has_no_effect_is_reported(folder: Path) -> None:
    write(folder, {"adapter": "triplet"})
    said = run_here(folder, "train", "config.yaml")
    assert said.code == 0
    assert "the adapter TraceToTriplet has no effect: baseline learns nothing; leave adapter out" in said.stderr


def test_a_run_writes_a_report_and_agl_report_prints_the_report_of_any_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    agent = "\n".join(["def agent(task, prompt_template):", "    return 1.0 / (task['n'] - 2)"])
    (folder / "my_agents.py").write_text(agent)
    write(folder, {"resources": {"prompt": "Say {n}."}, "seed": 5})
    assert run_here(folder, "train", "config.yaml", "--run-dir", "r").code == 0
    written = (folder / "r" / "report.md").read_text()
    assert written.startswith("# r: succeeded\n")
    for line in ("- rollouts: 3 (1 failed, 2 succeeded)", "- seed: 5", "- 1 x ZeroDivisionError: float division by"):
        assert line in written
    assert "| failure_rate | 0.3333 | 0.3333 | 0.3333 | 0.3333 |" in written
    assert written.endswith("### prompt\n\n```\nSay {n}.\n```\n")
    assert run_here(folder, "report", "r").stdout == written
    said = json.loads(run_here(folder, "report", "r", "--json").stdout)
    assert (said["run"]["status"], said["rollouts"]["failed"], said["metrics"]["rollouts"]["last"]) == (
        "succeeded",
        1,
        3,
    )
    assert "nowhere holds no run" in run_here(folder, "report", "nowhere").stderr
    (folder / "r" / "store.db").unlink()
    assert "has no store; see r/report.md" in run_here(folder, "report", "r").stderr
    write(folder / "r", {"store": "http://127.0.0.1:9"})
    monkeypatch.setitem(agl.LightningStoreClient.__init__.__kwdefaults__, "retry_s", 1.5)
    late = run_here(folder, "report", "r", "--store", "http://127.0.0.1:9")
    assert (late.stdout, "cannot reach a store" in late.stderr) == (written, True)
    assert "Trying again for 1.5 s" in caplog.text


@pytest.mark.parametrize(("store", "run"), [("http://127.0.0.1:1", "mine"), (None, "default")])
def test_a_process_with_only_the_algorithm_prints_how_to_start_its_runners(
    folder: Path, monkeypatch: pytest.MonkeyPatch, store: str | None, run: str
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(assembly, "fit", lambda trainer, parts: agl.Run())
    strategy = {"name": "cs", "role": "algorithm", "server_port": 4750}
    write(folder, {"agent": "my_agents.py:agent", "strategy": strategy} | ({"store": store} if store else {}))
    said = CliRunner().invoke(command, ["config.yaml", "--run-dir", "runs/mine"], catch_exceptions=False).stderr
    (line,) = (line.split() for line in said.splitlines() if line.startswith("    agl runner"))
    asked = runner_command.make_context("runner", line[2:]).params
    assert asked["agent"] == "config.yaml"
    assert asked["where"] == (store or "http://127.0.0.1:4750")
    assert (asked["run"] or "default") == run


def test_runners_and_port_reach_the_strategy_however_the_strategy_is_given(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    for strategy in ("cs", {"name": "cs", "server_host": "127.0.0.2"}, None):
        changes = {"agent": "my_agents.py:agent", "n_runners": 3, "port": 5000, "strategy": strategy}
        document = read_document(write(folder, changes))
        checked = read_config(document)
        trainer = assembly.make_trainer(checked, assembly.load_parts(checked, document), folder / "run", resume=False)
        assert isinstance(trainer.strategy, agl.ClientServerExecutionStrategy)
        assert (trainer.strategy.n_runners, trainer.strategy.server_port) == (3, 5000)
        assert trainer.store is not None
        asyncio.run(trainer.store.close())


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"agents": 1}, "config.yaml, line 11: unknown key 'agents'. Did you mean 'agent'?"),
        ({"data": {"trian": "x"}}, "line 3: unknown key 'data.trian'. Did you mean 'train'?"),
        ({"data": {"train": {"source": "tasks.jsonl", "limt": 1}}}, "line 5: unknown key 'data.train.limt'"),
        ({"data": {"train": {"source": "tasks.jsonl", "limit": 0}}}, "data.train.limit = 0: Input should be greater"),
        ({"data": {"train": "task.jsonl"}}, "line 3: task.jsonl does not exist"),
        ({"data": {"train": "my_agents:TASK"}}, "my_agents has no TASK. Did you mean 'TASKS'?"),
        ({"data": {"train": "hf:no-such-folder-or-dataset"}}, "hf:no-such-folder-or-dataset, split 'train'"),
        ({"agent": "my_agents"}, "line 1: 'my_agents': write module:attribute"),
        ({"agent": "my_agent:agent"}, "importing my_agent failed: ModuleNotFoundError"),
        ({"agent": {"targt": "my_agents:agent"}}, "unknown key 'agent.targt'. Did you mean 'target'?"),
        ({"algorithm": "baselin"}, "no algorithm named 'baselin'. Did you mean 'baseline'?"),
        ({"algorithm": {"n_epochs": 2}}, "a component with settings needs the key 'name'"),
        ({"algorithm": {"name": "baseline", "n_epochs": "two"}}, "algorithm 'baseline': n_epochs = 'two'"),
        ({"trackers": ["jsonl", "consol"]}, "line 11: no tracker named 'consol'"),
        ({"hooks": ["my_agents:agent"]}, "is a function, not an agl.Hook"),
        ({"n_runners": 0}, "n_runners = 0"),
        ({"n_runners": 2, "strategy": {"name": "cs", "n_runners": 3}}, "n_runners is given twice; the strategy has"),
        ({"port": 5000}, "config.yaml, line 11: the strategy 'shm' has no setting server_port; remove port"),
        ({"name": "../up"}, "name = '../up'"),
        ({"resources": {"llm": {"resource_type": "lm"}}}, "line 11: resource 'llm': unknown resource_type 'lm'"),
        ({"gateway": {"name": "gateway", "model_list": [{"model": "m", "api_key": "sk-secret-1"}]}}, "holds a secret"),
        ({"algorithm": {"name": "verl", "config": {"+rollout.vllm.api_key": "sk-secret-1"}}}, "holds a secret"),
        ({"algorithm": {"name": "verl", "config": {"env_vars": {"HF_TOKEN": "hunter2"}}}}, "holds a secret"),
        ({"store": "postgresql://me:hunter2@host/db"}, "holds a secret"),
        ({"store": "postgresql://me:${DB_PASSWORD}@host/db"}, "environment variable DB_PASSWORD is not set"),
    ],
)
def test_an_error_names_file_line_key_and_closest_match(folder: Path, changes: dict[str, Any], complaint: str) -> None:
    write(folder, changes)
    said = refused(folder, "config.yaml")
    assert complaint in said
    assert "hunter2" not in said
    assert "sk-secret" not in said


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "give a configuration file"),
        (("missing.yaml",), "missing.yaml does not exist (working directory: "),
        (("my_agents.py",), "ends in .yaml or .yml"),
        (("config.yaml", "algorithm"), "written key=value"),
        (("config.yaml", "n_runners.x=1"), "command line, n_runners.x=1"),
        (("config.yaml", "algorithm.n_epoch=1"), "command line, algorithm.n_epoch=1"),
        (("--resume", "nowhere"), "holds no run"),
        (("--resume", "config.yaml"), "config.yaml is a file; name the directory of a run"),
    ],
)
def test_wrong_arguments_are_refused(folder: Path, arguments: tuple[str, ...], complaint: str) -> None:
    write(folder, {"n_runners": 1})
    assert complaint in refused(folder, *arguments)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a: [", "line 1: not YAML"),
        ("- a", "a mapping of settings"),
        ("agent: a\nagent: b", "line 2: agent is given twice"),
    ],
)
def test_a_file_that_is_not_a_configuration_is_refused(folder: Path, text: str, complaint: str) -> None:
    (folder / "config.yaml").write_text(text)
    assert complaint in refused(folder, "config.yaml")


def test_print_config_shows_the_overrides_and_never_a_secret(folder: Path) -> None:
    write(folder, {"store": "http://host:1/${SECRET}"})
    code, shown, _ = run_here(folder, "train", "config.yaml", "algorithm.n_epochs=1e0", "--profile", "--print-config")
    assert code == 0
    printed = yaml.safe_load(shown)
    assert (printed["algorithm"]["n_epochs"], printed["algorithm"]["profile_step"]) == (1.0, 1)
    assert printed["store"] == "http://host:1/${SECRET}"


def test_a_key_reaches_the_agent_but_no_file_of_the_run_and_only_the_user_may_read_these_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "my_agents.py").write_text(
        "from pathlib import Path\n\n"
        "def agent(task, llm):\n"
        "    said = f'{llm.api_key} {llm.endpoint} {llm.sampling_parameters}'\n"
        "    Path('seen.txt').write_text(said)\n"
        "    return 1.0\n"
    )
    monkeypatch.setenv("MODEL_KEY", "hunter2-of-the-provider")
    monkeypatch.setenv("MODEL_HOST", "models.example")
    nested = {"extra_body": {"MY_TOKEN": "${MODEL_KEY}", "tools": [{"password": "${MODEL_KEY}"}]}}
    llm = {"resource_type": "llm", "endpoint": "http://${MODEL_HOST}/v1", "model": "m", "api_key": "${MODEL_KEY}"}
    write(folder, {"resources": {"llm": {**llm, "sampling_parameters": nested}}, "strategy": "cs"})
    done = run_here(folder, "train", "config.yaml")
    assert done.code == 0, done.stderr
    key = "hunter2-of-the-provider"
    seen = {"extra_body": {"MY_TOKEN": key, "tools": [{"password": key}]}}
    assert (folder / "seen.txt").read_text() == f"{key} http://models.example/v1 {seen}"
    files = [path for path in (folder / "runs").rglob("*") if path.is_file()]
    assert {"store.db", "run.json", "config.yaml"} <= {path.name for path in files}
    assert [path for path in files if b"hunter2" in path.read_bytes()] == []
    run = folder / "runs" / "config"
    assert run.stat().st_mode & 0o777 == 0o700
    assert (run / "store.db").stat().st_mode & 0o777 == 0o600


def test_a_password_in_the_url_of_a_resource_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PASSWORD", "hunter2")
    llm = {"resource_type": "llm", "endpoint": "http://me:${PASSWORD}@host/v1", "model": "m"}
    write(folder, {"resources": {"llm": llm}})
    said = refused(folder, "config.yaml")
    assert "config.yaml, line" in said
    assert "a URL of a resource has a password, which the store would keep; use api_key" in said


def test_a_key_that_is_not_set_is_refused(folder: Path) -> None:
    llm = {"resource_type": "llm", "endpoint": "http://host/v1", "model": "m", "api_key": "${NOT_SET_ANYWHERE}"}
    write(folder, {"resources": {"llm": llm}})
    assert "api_key is ${NOT_SET_ANYWHERE}, but the environment variable NOT_SET_ANYWHERE is not set" in refused(
        folder, "config.yaml"
    )


def test_print_config_shows_what_an_algorithm_composes_from_its_settings(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Composing(agl.Algorithm):
        def __init__(self, config: dict[str, Any]) -> None:
            self.config = {"lr": 0.1, **config, "url": f"https://{config['key']}@host"}

        def print_config(self) -> str:
            return yaml.safe_dump(self.config)

    monkeypatch.setattr(get_manager(), "get", lambda kind, name: Composing)
    monkeypatch.setenv("SECRET", "hunter2")
    write(folder, {"algorithm": {"name": "composing", "config": {"key": "${SECRET}"}}})
    _, shown, _ = run_here(folder, "train", "config.yaml", "algorithm.config.steps=3", "--print-config")
    given, composed = yaml.safe_load_all(shown)
    assert given["algorithm"]["config"] == {"key": "${SECRET}", "steps": 3}
    assert composed == {"lr": 0.1, "steps": 3, "key": "${SECRET}", "url": "https://${SECRET}@host"}
    assert "hunter2" not in shown


def test_print_config_resolves_the_file_without_the_packages_of_the_algorithm(folder: Path) -> None:
    write(folder, {"algorithm": {"name": "verl", "config": {"trainer.device": "cpu"}}})
    with patch.object(get_manager(), "missing_requirements", lambda kind, name: ["verl"]):
        code, shown, error = run_here(folder, "train", "config.yaml", "algorithm.config.x=3", "--print-config")
    assert code == 0
    assert yaml.safe_load(shown)["algorithm"]["config"] == {"trainer.device": "cpu", "x": 3}
    assert "own defaults are not shown" in error
    assert "the algorithm 'verl' needs verl. Install with: pip install" in error


def test_an_override_below_a_short_form_sets_a_key_of_the_long_form(folder: Path) -> None:
    (folder / "my_agents.py").write_text(AGENT + "\ndef rate(task, output, rollout):\n    return 1.0\n")
    write(folder, {"agent": "my_agents:agent", "data": {"train": "tasks.jsonl", "val": "tasks.jsonl"}})
    overrides = ("data.train.limit=1", "data.val.limit=2", "agent.reward=my_agents:rate", "algorithm.n_epochs=2")
    code, said, error = run_here(folder, "train", "config.yaml", *overrides, "--dry-run")
    assert code == 0, said + error
    assert "ok    data.train   1 tasks" in said
    assert "ok    data.val     2 tasks" in said


def test_an_override_below_a_short_prompt_sets_a_field_of_the_prompt(folder: Path) -> None:
    write(folder, {"resources": {"prompt": "Say {{ n }}."}})
    code, said, error = run_here(folder, "train", "config.yaml", "resources.prompt.engine=jinja", "--print-config")
    assert code == 0, said + error
    prompt = {"resource_type": "prompt_template", "template": "Say {{ n }}.", "engine": "jinja"}
    assert yaml.safe_load(said)["resources"]["prompt"] == prompt


def test_a_dry_run_checks_endpoints_and_writes_nothing(folder: Path) -> None:
    for endpoint in ("http://127.0.0.1:9/v1", "http://127.0.0.1:80x/v1"):
        write(folder, {"resources": {"llm": {"resource_type": "llm", "endpoint": endpoint, "model": "m"}}})
        code, said, _ = run_here(folder, "train", "config.yaml", "--dry-run")
        assert code == 2
        assert "ok    data.train   3 tasks; the first: {'n': 1}" in said
        assert "WRONG resources.llm" in said
        assert "cannot be reached" in said
    write(folder)
    assert run_here(folder, "train", "config.yaml", "--dry-run")[0] == 0
    assert not (folder / "runs").exists()
    assert not (folder / "ran.txt").exists()


ASKING = """
import agentlightning as agl

@agl.rollout
def asks(task, prompt: agl.PromptTemplate, llm: agl.LLM):
    return 0.0

def forgets(task):
    async def later():
        return 1.0
    return later()
"""


def test_a_dry_run_finds_missing_resources_unlisted_models_and_doubtful_placeholders(folder: Path) -> None:
    (folder / "my_agents.py").write_text(ASKING)
    with prompt_lab.Server(Answer("hi")) as server:
        llm = {"resource_type": "llm", "endpoint": server.endpoint, "model": "gpt-9"}
        write(folder, {"agent": "my_agents:asks", "resources": {"llm": llm, "prompt": "Say {n} and {m}."}})
        said = run_here(folder, "train", "config.yaml", "--dry-run")
        assert (said.code, "no model 'gpt-9'; it has scripted" in said.stdout) == (2, True), said.stdout
        assert "note  resources.prompt: the agent has to fill {m}: the tasks have only n" in said.stdout
        fine = ("resources.llm.model=scripted", "resources.prompt=Say it.")
        said = run_here(folder, "train", "config.yaml", *fine, "--dry-run")
        assert (said.code, "note  resources.prompt: no placeholder, so" in said.stdout) == (0, True), said.stdout
        said = run_here(folder, "train", "config.yaml", "resources={}", "--dry-run")
        assert (said.code, "asks for 'prompt' but no resource has this name" in said.stdout) == (2, True)


@pytest.mark.parametrize("text", ["{question} and 1", "{question}", "{a: 1} b", "12", "say: {x}"])
def test_the_text_of_a_prompt_on_the_command_line_is_not_read_as_yaml(folder: Path, text: str) -> None:
    write(folder)
    for setting in (f"resources.prompt={text}", f"resources.prompt='{text}'", f"resources.prompt.template={text}"):
        said = run_here(folder, "train", "config.yaml", setting, "--print-config")
        found = yaml.safe_load(said.stdout)["resources"]["prompt"]
        assert (found["template"] if isinstance(found, dict) else found) == text


def test_a_coroutine_of_a_synchronous_agent_is_one_error_that_says_what_to_do(folder: Path) -> None:
    (folder / "my_agents.py").write_text(ASKING)
    write(folder, {"agent": "my_agents:forgets", "algorithm": "baseline"})
    said = run_here(folder, "train", "config.yaml", "trackers=[console]")
    assert "3 of 3 rollouts: RolloutError: <agent forgets> returned a coroutine: define the function" in said.stderr


def test_a_runner_joins_the_run_and_the_store_that_the_configuration_names(folder: Path) -> None:
    (folder / "project").mkdir()
    (folder / "my_agents.py").rename(folder / "project" / "my_agents.py")
    write(folder / "project", {"name": "joined", "store": "sqlite:///all.db"})

    async def queue() -> agl.Rollout:
        store = agl.create_store(f"sqlite:///{folder}/project/all.db", run="joined")
        found = await store.query_rollouts()
        rollout = found[0] if found else await store.enqueue_rollout({"n": 4}, mode="train")
        await store.close()
        return rollout

    asyncio.run(queue())
    command = [sys.executable, "-m", "agentlightning", "runner", "project/config.yaml", "--max-rollouts", "1"]
    done = subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert f"run joined of sqlite:///{folder}/project/all.db" in done.stdout
    assert asyncio.run(queue()).status == "succeeded"
    assert (folder / "project" / "ran.txt").read_text() == "4\n"


@pytest.mark.parametrize(
    ("name", "content"),
    [("t.json", '[{"n": 1}, {"n": 2}]'), ("t.csv", "n,text\n1,a\n2,b\n"), ("t.jsonl", '{"n": 1}\n{"n": 2}\n')],
)
def test_tasks_come_from_files(tmp_path: Path, name: str, content: str) -> None:
    from agentlightning_plugins.shared.configuration.sources import load_dataset

    (tmp_path / name).write_text(content)
    tasks = load_dataset(str(tmp_path / name))
    assert [int(task["n"]) for task in (tasks[0], tasks[1])] == [1, 2]


def test_tasks_come_from_parquet_and_hugging_face_folders(tmp_path: Path) -> None:
    import datasets
    import pyarrow
    import pyarrow.parquet

    from agentlightning_plugins.shared.configuration.sources import load_dataset

    rows = [{"n": number} for number in range(10)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "t.parquet")
    assert list(load_dataset(str(tmp_path / "t.parquet"))) == rows
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    assert load_dataset(f"hf:{tmp_path / 'saved'}")[3] == {"n": 3}
    some = load_dataset(str(tmp_path / "t.parquet"), limit=4, shuffle_seed=1)
    again = load_dataset(str(tmp_path / "t.parquet"), limit=4, shuffle_seed=1)
    assert len(some) == 4
    assert [some[i] for i in range(4)] == [again[i] for i in range(4)] != rows[:4]


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("t.jsonl", '{"n": 1}\n{"n"\n', "line 2: not JSON"),
        ("t.json", '{"n": 1}', "a list of tasks is needed"),
        ("t.jsonl", "\n", "contains no tasks"),
        ("t.parquet", "no", "not a Parquet file"),
    ],
)
def test_damaged_task_files_are_refused(tmp_path: Path, name: str, content: str, complaint: str) -> None:
    from agentlightning_plugins.shared.configuration.sources import load_dataset

    (tmp_path / name).write_text(content)
    with pytest.raises(agl.ConfigError, match=complaint):
        load_dataset(str(tmp_path / name))


@pytest.mark.slow
def test_a_killed_run_is_resumed_without_running_a_finished_task_again(folder: Path) -> None:
    tasks = [{"n": n, "waits": n >= 20} for n in range(40)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    write(folder, {"strategy": {"name": "cs"}, "algorithm": {"name": "baseline", "train_split": 1.0}})
    ran, log = folder / "ran.txt", folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "agentlightning", "train", "config.yaml"],
            cwd=folder, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    wait_for(lambda: ran.exists() and len(ran.read_text().split()) == 20, process, log)
    os.killpg(process.pid, signal.SIGKILL)  # the trainer with its store; the runner is in a separate session
    process.wait()
    (folder / "killed").touch()
    result = run_here(folder, "train", "--resume", "runs/config")
    assert result.code == 0, result.stderr
    lines = metrics(folder / "runs" / "config")
    assert lines[-1]["status"] == "succeeded"
    assert [line["rollouts"] for line in lines if "rollouts" in line] == [40.0]
    assert lines[-2]["reward"] == pytest.approx(sum(n / 10 for n in range(40)) / 40)
    counts = {str(n): ran.read_text().split().count(str(n)) for n in range(40)}
    assert min(counts.values()) == 1
    again = [n for n, count in counts.items() if count > 1]
    assert len(again) <= 16 + 4  # tasks that were running, or had run but could not report it any more
    assert run_here(folder, "train", "--resume", "runs/config").code == 0
    assert len(ran.read_text().split()) == sum(counts.values())


def test_the_schema_accepts_what_the_command_accepts(folder: Path) -> None:
    import jsonschema

    schema = json.loads(run_here(folder, "config", "schema")[1])
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(CONFIG, schema)
    for wrong in ({"agents": 1}, {"algorithm": {"name": "baseline", "n_epoch": 1}}, {"algorithm": "baselin"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**CONFIG, **wrong}, schema)


def test_runs_started_together_never_choose_the_same_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with ThreadPoolExecutor(8) as threads:
        chosen = list(threads.map(lambda _: choose_directory(None, "demo", str), range(24)))
    assert len(set(chosen)) == 24


def test_a_file_in_place_of_the_run_directory_is_reported_in_one_sentence(folder: Path) -> None:
    (folder / "taken").touch()
    said = refused(folder, str(write(folder)), "--run-dir", "taken/run")
    assert "taken/run cannot be the directory of a run: Not a directory" in said


CLASHING = """
import distro, sniffio
import agentlightning as agl

def agent(task):
    assert sniffio.current_async_library and distro.id, "the installed packages"
    from helper import REWARD
    return REWARD

def score(task, output, rollout):
    return 1.0
"""


@pytest.mark.parametrize("target", ["sniffio.py:agent", "sniffio:agent"])
def test_user_files_named_like_installed_packages_do_not_replace_the_packages(folder: Path, target: str) -> None:
    (folder / "sniffio.py").write_text(CLASHING)
    (folder / "distro.py").write_text("raise RuntimeError('not the package')\n")
    (folder / "helper.py").write_text("REWARD = 0.5\n")
    write(folder, {"agent": target, "strategy": "cs", "tracer": "otel", "n_runners": 1})
    done = subprocess.run(
        [sys.executable, "-m", "agentlightning", "train", "config.yaml", "--run-dir", "r"],
        check=False, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert metrics(folder / "r")[0]["reward"] == 0.5


def test_the_prompts_of_an_agent_may_be_a_list_or_have_null_values_as_in_python(folder: Path) -> None:
    (folder / "team.py").write_text(
        "from agents import Agent\n\nwriter = Agent(name='writer', instructions='Write.')\n\n"
        "def score(task, output, rollout):\n    return 1.0\n"
    )
    for prompts in (["writer.instructions"], {"writer.instructions": None}, {"writer.instructions": "text"}, None):
        agent = {"target": "team:writer", "reward": "team:score", "prompts": prompts}
        path = write(folder, {"agent": agent})
        config = read_config(read_document(path))
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            loaded = assembly.load_agent(config.agent)
        assert len(loaded.initial_prompts()) == (prompts is not None)
    wrong = write(folder, {"agent": {"target": "team:writer", "prompts": 3}})
    with pytest.raises(agl.ConfigError, match=r"line \d+: agent.prompts = 3: Input should be a valid dictionary"):
        read_config(read_document(wrong))


def test_the_reward_of_a_command_is_read_from_the_source_in_the_configuration(folder: Path) -> None:
    command = [sys.executable, "-c", "print('hi'); print(0.25)"]
    write(folder, {"agent": {"command": command, "reward": "stdout"}})
    assert run_here(folder, "train", "config.yaml", "--run-dir", "r").code == 0
    assert metrics(folder / "r")[0]["reward"] == 0.25
    write(folder, {"agent": {"command": command, "reward": "stdin"}})
    said = run_here(folder, "train", "config.yaml", "--run-dir", "s")
    assert said.code == 2
    assert "config.yaml, line 1: reward = 'stdin': give a function" in said.stderr
    assert "one of: stdout, exit_code, file" in said.stderr


ELSEWHERE = """
from pathlib import Path

class Noted:
    def __init__(self, path: str):
        self.path = path
    def start(self, run, directory):
        Path(self.path).write_text(run.name)
    def on_event(self, event):
        pass
    def close(self):
        pass

def score(task, output, rollout):
    return float(Path("weight.txt").read_text()) if output == "ours\\n" else 0.0
"""
THEIRS = "def agent(task):\n    return 0.0\n\nscore = agent\nraise RuntimeError('a neighbour')\n"


def test_paths_in_a_configuration_start_at_its_folder_and_those_of_the_command_line_do_not(folder: Path) -> None:
    project, agl_here = folder / "project", functools.partial(run_here, folder, module="parts")
    project.mkdir()
    for name, text in (("parts.py", ELSEWHERE), ("weight.txt", "0.75"), ("say.sh", "echo ours"), ("own.py", "")):
        (project / name).write_text(text)
        (folder / name).write_text(THEIRS)
    (project / "tasks.jsonl").write_text('{"n": 7}\n')
    agent = {"command": ["sh", "say.sh"], "reward": "parts:score"}
    changes = {"agent": agent, "plugins": ["own.py"], "trackers": ["jsonl", {"name": "parts.py:Noted", "path": "n"}]}
    write(project, changes | {"store": "sqlite:///all.db", "data": {"train": "tasks.jsonl", "val": "tasks.jsonl"}})
    done = agl_here("train", "project/config.yaml")
    assert done.code == 0, done.stderr
    assert metrics(folder / "runs" / "config")[0]["reward"] == 0.75
    assert (project / "n").is_file()
    assert (project / "all.db").is_file()
    assert not (project / "runs").exists()
    assert not (folder / "all.db").exists()

    for file in ("project/config.yaml", "runs/config/config.yaml"):  # the copy belongs to the same folder
        done = agl_here("eval", file, "--json", "store=null")
        assert json.loads(done.stdout)["reward"] == 0.75, done.stderr
    done = agl_here("eval", "project/config.yaml", "--data", "tasks.jsonl", "--run-dir", "kept", "--json", "store=null")
    assert json.loads(done.stdout)["rollouts"] == 3
    assert (folder / "kept" / "store.db").is_file()
    (folder / "more.jsonl").write_text('{"n": 8}\n{"n": 9}\n')
    done = agl_here("compare", "project/config.yaml", "-a", "[]", "--test", "more.jsonl", "--json", "store=null")
    assert json.loads(done.stdout)[0]["reward"] == 0.75, done.stderr
    assert (folder / "runs" / "compare" / "report.html").is_file()
    done = agl_here("doctor", "project/config.yaml", "--tunes", "prompts", "--json")
    assert [check["state"] for check in json.loads(done.stdout)["checks"] if check["name"] == "rollout"] == ["ok"]


@pytest.mark.parametrize("what", ["missing", "empty"])
def test_resuming_without_the_runs_store_is_refused_unless_a_new_store_is_requested(folder: Path, what: str) -> None:
    write(folder)
    assert run_here(folder, "train", "config.yaml")[0] == 0
    store = folder / "runs" / "config" / "store.db"
    for file in store.parent.glob("store.db*"):
        file.unlink()
    if what == "empty":
        store.touch()
    code, _, said = run_here(folder, "train", "--resume", "runs/config")
    assert code == 2
    assert f"store.db is {what}, so finished rollouts would run again" in said
    assert "--new-store" in said
    code, _, said = run_here(folder, "train", "--resume", "runs/config", "--new-store")
    assert code == 0, said


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("store.db", b"no database " * 100),
        ("run.json", b"{"),
        ("run.json", b'{"key": 3}'),
        ("run.json", b'{"key": "k", "resumed_at": "then"}'),
    ],
)
def test_a_damaged_file_of_a_run_is_reported_in_one_sentence(folder: Path, name: str, content: bytes) -> None:
    write(folder)
    assert run_here(folder, "train", "config.yaml")[0] == 0
    (folder / "runs" / "config" / name).write_bytes(content)
    done = run_here(folder, "train", "--resume", "runs/config")
    assert done.code == 2
    assert done.stderr.count("\n") == 1
    assert name in done.stderr


def test_a_line_break_in_the_token_is_reported_in_one_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_TOKEN", "hunter2\r\n")
    for arguments in (["rollouts", "list", "--store", "http://127.0.0.1:9"], ["store", "--port", "0"]):
        done = run_here(folder, *arguments)
        assert done.code == 2
        assert done.stderr.count("\n") == 1
        assert "has a line end" in done.stderr
        assert "hunter2" not in done.stderr


def test_the_end_of_a_commands_stderr_is_shown_and_tracebacks_only_with_debug(folder: Path) -> None:
    code = "import sys; print('starting', file=sys.stderr); sys.exit('KeyError: no such tool')"
    write(folder, {"agent": {"command": [sys.executable, "-c", code], "reward": "stdout"}, "algorithm": "baseline"})
    said = run_here(folder, "train", "config.yaml", "run_dir=failing")
    assert said.code == 1
    end = "its stderr ends with: starting / KeyError: no such tool"
    assert end in said.stdout + said.stderr
    assert end in (folder / "failing" / "report.md").read_text()
    assert end in run_here(folder, "doctor", "config.yaml", "--tunes", "prompts").stdout
    assert end.removesuffix(" no such tool") in run_here(folder, "top", "failing", "--once").stdout
    assert "Traceback" not in said.stdout + said.stderr
    wrong = "train", "config.yaml", "algorithm=basline"
    assert "Traceback" not in run_here(folder, *wrong).stderr
    assert "Traceback" in run_here(folder, "--debug", *wrong).stderr
