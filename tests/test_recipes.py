"""The recipes of CONTRIBUTING.md: each test follows one to write a temporary plugin, installs it and uses it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


class Site:
    """A folder on ``sys.path`` with one installed distribution, ``lightning-acme``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def install(self, plugin: str, **modules: str) -> None:
        """Writes the package ``acme`` and the entry point that names its module ``plugin``."""
        package, info = self._folder / "acme", self._folder / "lightning_acme-1.0.dist-info"
        for folder in (package, info):
            folder.mkdir()
        for name, code in {"__init__": "", "plugin": plugin, **modules}.items():
            (package / f"{name}.py").write_text(code, encoding="utf-8")
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lightning-acme\nVersion: 1.0\n", encoding="utf-8")
        (info / "entry_points.txt").write_text("[agentlightning]\nacme = acme.plugin\n", encoding="utf-8")

    def run(self, *arguments: str) -> str:
        """Runs this Python with the distribution installed."""
        path = os.pathsep.join([str(self._folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self._folder,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def offers(self) -> list[tuple[str, str]]:
        """Returns the plugin's components that ``agl plugins`` lists, as (kind, name)."""
        plugins = json.loads(self.run("-m", "agentlightning", "plugins", "--json"))
        (acme,) = [plugin for plugin in plugins if plugin["plugin"] == "acme"]
        assert acme["state"] == "loaded", acme["error"]
        return [(offer["kind"], offer["name"]) for offer in acme["offers"]]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def offer(kind: str, name: str, target: str) -> str:
    return f"""
from agentlightning import Component, hookimpl

@hookimpl
def components():
    return [Component({kind!r}, {name!r}, {target!r}, summary="thrown away")]
"""


def test_the_recipe_for_a_tracker_works(site: Site) -> None:
    site.install(
        offer("tracker", "file", "acme.tracker:FileTracker"),
        tracker="""
class FileTracker:
    def __init__(self, file):
        self._file = open(file, "w")

    def start(self, run, directory):
        self._file.write(f"{run.status}\\n")

    def on_event(self, event):
        self._file.write(f"{type(event).__name__}\\n")

    def close(self):
        self._file.close()
""",
    )
    assert site.offers() == [("tracker", "file")]
    seen = site.run(
        "-c",
        """
import agentlightning as agl

trackers = [{"name": "file", "file": "events.txt"}]
agl.Trainer(algorithm="baseline", strategy="shm", trackers=trackers).fit(lambda task: 1.0, ["a task"])
print(open("events.txt").read())
""",
    ).split()
    assert seen[0] == "running"
    assert {"RolloutStarted", "RolloutFinished", "RunFinished"} <= set(seen)


def test_the_recipe_for_a_store_works(site: Site) -> None:
    site.install(
        offer("store", "folder", "acme.store:FolderStore"),
        store="""
import agentlightning as agl

class FolderStore(agl.InMemoryLightningStore):
    @classmethod
    def from_url(cls, url, *, run_id, token):
        store = cls().with_run(run_id)
        store.folder = url.removeprefix("folder://")
        return store
""",
    )
    assert site.offers() == [("store", "folder")]
    site.run(
        "-c",
        """
import agentlightning as agl

store = agl.create_store("folder://here")
assert store.folder == "here"
run = agl.Trainer(algorithm="baseline", strategy="shm", store=store, trackers=[]).fit(lambda task: 1.0, ["a task"])
assert run.status == "succeeded"
""",
    )


def test_the_recipe_for_a_framework_works(site: Site) -> None:
    site.install(
        """
import sys
from agentlightning import hookimpl

@hookimpl
def wrap_agent(agent, options):
    framework = sys.modules.get("acme.framework")
    if framework is None or not isinstance(agent, framework.Parrot):
        return None
    from acme.integration import ParrotAgent

    return ParrotAgent(agent, options)
""",
        framework="""
class Parrot:
    greeting = "Hello"
""",
        integration="""
from agentlightning_integrations.shared.agent import FrameworkAgent

class ParrotAgent(FrameworkAgent):
    def texts(self):
        return {"greeting": self.agent.greeting}

    def run(self, task, llm, texts):
        return f"{texts.get('greeting', self.agent.greeting)} {task}"
""",
    )
    assert site.offers() == []
    site.run(
        "-c",
        """
import agentlightning as agl
from acme.framework import Parrot

def score(task, output, rollout):
    return float(output == "Good day Ada")

agent = agl.wrap(Parrot(), reward=score, prompts={"greeting": "greeting"})
store = agl.create_store("memory://")
trainer = agl.Trainer(
    algorithm="baseline", strategy="shm", store=store, trackers=[], initial_resources={"greeting": "Good day"}
)
trainer.fit(agent, ["Ada"])

import asyncio
(rollout,) = asyncio.run(store.query_rollouts())
spans = asyncio.run(store.query_spans(rollout.rollout_id))
assert agl.find_final_reward(spans) == 1.0
""",
    )


def test_the_recipe_for_an_algorithm_works(site: Site) -> None:
    site.install(
        offer("algorithm", "shout", "acme.algorithm:Shout"),
        algorithm="""
from agentlightning.algorithm import Algorithm

class Shout(Algorithm):
    def __init__(self, *, mark: str = "!") -> None:
        super().__init__()
        self.mark = mark

    async def run(self, train_dataset=None, val_dataset=None):
        store = self.get_store()
        await store.add_resources({"prompt": "Answer {question}" + self.mark})
        rollouts = [await store.enqueue_rollout(task, mode="train") for task in train_dataset]
        await store.wait_for_rollouts([rollout.rollout_id for rollout in rollouts])
""",
    )
    assert site.offers() == [("algorithm", "shout")]
    site.run(
        "-c",
        """
import asyncio
import agentlightning as agl

def agent(task, prompt: agl.PromptTemplate) -> float:
    return float(prompt.format(question=task).endswith("?!?"))

store = agl.create_store("memory://")
trainer = agl.Trainer(algorithm={"name": "shout", "mark": "?!?"}, strategy="shm", store=store, trackers=[])
trainer.fit(agent, ["a question"])
(rollout,) = asyncio.run(store.query_rollouts())
assert rollout.status == "succeeded"
assert agl.find_final_reward(asyncio.run(store.query_spans(rollout.rollout_id))) == 1.0
""",
    )


def test_a_misspelt_setting_of_a_plugin_is_refused_with_a_suggestion(site: Site) -> None:
    site.install(
        offer("tracker", "file", "acme.tracker:FileTracker"),
        tracker="""
class FileTracker:
    def __init__(self, *, file: str = "events.txt") -> None: ...
""",
    )
    message = site.run(
        "-c",
        """
import agentlightning as agl

try:
    agl.Trainer(algorithm="baseline", trackers=[{"name": "file", "fille": "x"}])
except agl.ConfigError as error:
    print(error)
""",
    )
    assert "fille" in message
    assert "Did you mean 'file'?" in message
