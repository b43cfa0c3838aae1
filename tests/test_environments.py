"""Clean environments: a runner with older versions than its trainer, each single extra, other versions of Python."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import re
import resource
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import agentlightning as agl
import environments
from agentlightning.store import LightningStoreServer
from agentlightning_plugins.shared.scripted_model.server import Answer, ScriptedOpenAI
from tests.process import wait_for
from tests.source import REPO, pyproject, run_python
from tests.waiting import LIMIT_S

EXTRAS = list(pyproject()["project"]["optional-dependencies"])
NO_FEATURES = {"all", "demo", "docs"}
HEAVY = {"verl"}  # `make test` has an environment for it
IN_CI = {"openai", "postgresql"}

RUN = """
import agentlightning as agl
from agentlightning.plugin.registry import get_manager
from agentlightning_plugins.shared.scripted_model.server import Answer, ScriptedOpenAI

# Every component of the extra can be imported, and every component that needs no extra.
for plugin in get_manager().plugins.values():
    assert plugin.state == "loaded", plugin
    for component in plugin.offers:
        if component.extra in (None, EXTRA):
            get_manager().get(component.kind, component.name)

MAKE_AGENT
with ScriptedOpenAI([Answer("The sum is 5.")]) as server:
    model = agl.LLM(endpoint=server.endpoint, model="stand-in", api_key="any")
    trainer = agl.Trainer(strategy="shm", trackers=[], initial_resources={"llm": model})
    run = trainer.dev(agent, ["2 + 3?"], reward=lambda task, output, rollout: 1.0)
    assert (run.status, len(server.requests)) == ("succeeded", CALLS), (run, server.requests)
"""

AGENTS = {
    "openai": "import openai\nagent = openai.OpenAI(api_key='mine')",
    "openai-agents": "import agents\nagent = agents.Agent(name='adder', instructions='Add.')",
    "langchain": (
        "from langchain.agents import create_agent\nfrom langchain_openai import ChatOpenAI\n"
        "agent = create_agent(ChatOpenAI(model='gpt-5', api_key='mine'), system_prompt='Add.')"
    ),
    "autogen": (
        "from autogen_agentchat.agents import AssistantAgent\n"
        "from autogen_ext.models.openai import OpenAIChatCompletionClient\n"
        "agent = AssistantAgent('adder', OpenAIChatCompletionClient(model='gpt-4o', api_key='mine'))"
    ),
    "crewai": (
        "from crewai import LLM, Agent, Crew, Task\n"
        "adder = Agent(role='adder', goal='Add.', backstory='', llm=LLM('gpt-4o', api_key='mine'))\n"
        "agent = Crew(agents=[adder], tasks=[Task(description='{task}', expected_output='a number', agent=adder)])"
    ),
    "agent-framework": (
        "from agent_framework import Agent\nfrom agent_framework.openai import OpenAIChatCompletionClient\n"
        "agent = Agent(OpenAIChatCompletionClient('gpt-5', api_key='mine'), 'Add.', name='adder')"
    ),
    "pydantic-ai": "from pydantic_ai import Agent\nagent = Agent(name='adder', instructions='Add.')",
    "google-adk": (
        "from google.adk.agents import LlmAgent\nagent = LlmAgent(name='adder', model='any', instruction='Add.')"
    ),
    "strands-agents": (
        "from strands import Agent\nfrom strands.models.openai import OpenAIModel\n"
        "agent = Agent(OpenAIModel(client_args={'api_key': 'mine'}, model_id='any'), callback_handler=None)"
    ),
    "dspy": (
        "import dspy\nclass Adder(dspy.Module):\n    def forward(self, question):\n"
        "        return dspy.settings.lm(question)\nagent = Adder()"
    ),
}
IMPORTS = {
    "agentops": "agentops",
    "apo": "openai",
    "datasets": "datasets, pyarrow",
    "gepa": "gepa",
    "gymnasium": "gymnasium",
    "grpo": "peft, torch, transformers",
    "litellm": "litellm",
    "mcp": "mcp",
    "mlflow": "mlflow",
    "openinference": "openinference.instrumentation.openai",
    "otlp": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "poml": "poml",
    "postgresql": "asyncpg",
    "ray": "ray",
    "tensorboard": "tensorboard",
    "textarena": "textarena",
    "trackio": "trackio",
    "wandb": "wandb",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the wheel of this checkout."""
    folder = tmp_path_factory.mktemp("dist")
    run_python("-m", "hatchling", "build", "-t", "wheel", "-d", str(folder))
    (built,) = folder.glob("lightning-*.whl")
    return built


def run(*command: str | Path, cwd: Path = REPO) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def make_environment(folder: Path, wheel: Path, extra: str = "", constraints: str = "main", python: str = "") -> Path:
    """Installs the wheel in a new environment, with uv if it is available, and returns the environment's Python."""
    what = f"lightning{f'[{extra}]' * bool(extra)} @ {wheel.as_uri()}"
    pins = ["--constraint", str(REPO / "constraints" / f"{constraints}.txt")] if constraints else []
    uv = environments.uv()
    create = [uv, "venv", "--quiet", "--python"] if uv else []
    run(*create, python or sys.executable, *([] if uv else ["-m", "venv"]), folder)
    environments.Installer(folder).install(*pins, what)
    return folder / "bin" / "python"


def smoke_test(python: Path, extra: str, folder: Path) -> None:
    """Runs an agent in an environment, after importing everything that the extra offers."""
    make_agent = AGENTS.get(extra, f"import {IMPORTS[extra]}" if extra in IMPORTS else "")
    agent = "" if extra in AGENTS else "\ndef agent(task):\n    return 1.0\n"
    program = RUN.replace("EXTRA", repr(extra)).replace("MAKE_AGENT", make_agent + agent)
    (folder / "smoke.py").write_text(program.replace("CALLS", str(int(extra in AGENTS))))
    run(python, "smoke.py", cwd=folder)


AGENT = """
import importlib.metadata
import agentlightning as agl
import openai

def agent(task, llm: agl.LLM) -> float:
    agl.emit_annotation({name: importlib.metadata.version(name) for name in ("openai", "pydantic")})
    with openai.OpenAI(base_url=llm.endpoint, api_key=llm.api_key) as client:
        reply = client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": task}])
    return float(reply.choices[0].message.content == "5")
"""


def start_runner(python: Path, store: str, folder: Path, log: Path) -> subprocess.Popen[bytes]:
    command = [str(python), "-m", "agentlightning", "runner", "agent.py:agent", "--store", store]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with log.open("wb") as output:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)


async def test_a_runner_with_old_versions_of_libraries_works_for_this_trainer(tmp_path: Path, wheel: Path) -> None:
    python = await asyncio.to_thread(make_environment, tmp_path / "old", wheel, "openai", "oldest")
    (tmp_path / "agent.py").write_text(AGENT)
    store = agl.create_store("memory://")
    log = tmp_path / "runner.log"
    async with LightningStoreServer(store, port=0) as server, ScriptedOpenAI([Answer("5")]) as model:
        runner = start_runner(python, server.endpoint, tmp_path, log)
        try:
            await asyncio.to_thread(wait_for, lambda: b"concurrent rollouts" in log.read_bytes(), runner, log)
            proxy = agl.LLMProxy(model_list=[{"model": "m", "endpoint": model.endpoint, "api_key": "any"}], store=store)
            await proxy.start()
            await store.add_resources({"llm": proxy.as_resource(model="m")})
            rollouts = [await store.enqueue_rollout(task) for task in ("2 + 3?", "1 + 4?")]
            ended = await store.wait_for_rollouts([rollout.rollout_id for rollout in rollouts], timeout=LIMIT_S)
            await proxy.stop()
        finally:
            runner.terminate()
            await asyncio.to_thread(runner.wait, LIMIT_S)
    assert [rollout.status for rollout in ended] == ["succeeded"] * 2, log.read_text()
    for rollout in ended:
        spans = (await store.query_spans(rollout.rollout_id)).items
        (triplet,) = agl.TraceToTriplet().adapt(spans)
        assert (triplet.reward, bool(triplet.response["token_ids"])) == (1.0, True)
        (versions,) = [span.attributes for span in spans if span.name == "agentlightning.annotation"]
        for name in ("openai", "pydantic"):
            assert versions[name] != importlib.metadata.version(name)
    await store.close()


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param(extra, marks=[] if extra in IN_CI else pytest.mark.soak)
        for extra in sorted({*EXTRAS} - NO_FEATURES - HEAVY)
    ],
)
def test_each_extra_works_without_other_extras(extra: str, tmp_path: Path, wheel: Path) -> None:
    of_frameworks = dict.fromkeys(("dspy", "google-adk", "strands-agents"), "frameworks")
    constraints = {"agentops": "newest", "poml": "", "pydantic-ai": "newest", **of_frameworks}.get(extra, "main")
    python = make_environment(tmp_path / "alone", wheel, extra, constraints)
    smoke_test(python, extra, tmp_path)


RAY_PROGRAM = """
import asyncio
import importlib.util
import agentlightning as agl

def agent(task):
    import guest, sent_module
    return guest.NUMBER + sent_module.NUMBER

assert not importlib.util.find_spec("guest"), "the actors' package is in the environment of the trainer"
store = agl.InMemoryLightningStore()
environment = {"working_dir": "sent", "pip": ["WHEEL"]}
trainer = agl.Trainer(store=store, strategy={"name": "ray", "runtime_env": environment}, n_runners=2, trackers=[])
assert trainer.dev(agent, ["a", "b"]).status == "succeeded"

async def rewards():
    return [
        attempt.reward
        for rollout in await store.query_rollouts()
        for attempt in await store.query_attempts(rollout.rollout_id)
    ]

assert set(asyncio.run(rewards())) == {42.0}, asyncio.run(rewards())
"""


def make_tiny_wheel(folder: Path) -> Path:
    """Writes a wheel of one module without requirements."""
    path = folder / "guest-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("guest.py", "NUMBER = 40.0\n")
        archive.writestr("guest-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: guest\nVersion: 1.0\n")
        archive.writestr(
            "guest-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr("guest-1.0.dist-info/RECORD", "")
    return path


@pytest.mark.soak
def test_ray_actors_get_a_folder_and_a_package_that_the_trainer_does_not_have(tmp_path: Path, wheel: Path) -> None:
    python = make_environment(tmp_path / "cluster", wheel, "ray")
    run(python, "-m", "ensurepip")
    run(python, "-m", "pip", "install", "--quiet", "virtualenv")  # Ray needs it for `pip`
    (tmp_path / "sent").mkdir()
    (tmp_path / "sent" / "sent_module.py").write_text("NUMBER = 2.0\n")
    (tmp_path / "program.py").write_text(RAY_PROGRAM.replace("WHEEL", str(make_tiny_wheel(tmp_path))))
    run(python, "program.py", cwd=tmp_path)


@pytest.mark.soak
def test_the_package_runs_with_every_python_version_on_this_machine(tmp_path: Path, wheel: Path) -> None:
    declared = [re.search(r"3\.(\d+)$", line) for line in pyproject()["project"]["classifiers"]]
    minors = {int(found[1]) for found in declared if found}
    interpreters = {sys.version_info.minor: sys.executable}
    for minor in minors - {sys.version_info.minor}:
        of_pyenv = sorted((Path.home() / ".pyenv" / "versions").glob(f"3.{minor}.*/bin/python"))
        if path := of_pyenv[0] if of_pyenv else shutil.which(f"python3.{minor}"):
            interpreters[minor] = str(path)
    for minor, path in interpreters.items():
        folder = tmp_path / str(minor)
        python = make_environment(folder, wheel, "openai", "main", path)
        smoke_test(python, "openai", folder)
    print("not on this machine:", ", ".join(f"3.{minor}" for minor in sorted(minors - interpreters.keys())) or "none")


@pytest.mark.soak
def test_pip_resolves_all_extras_from_a_clean_cache_in_three_minutes_of_cpu_time(tmp_path: Path, wheel: Path) -> None:
    run(sys.executable, "-m", "venv", tmp_path / "clean")
    python = tmp_path / "clean" / "bin" / "python"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run(
        python, "-m", "pip", "install", "--quiet", "--upgrade", "pip"
    )  # the pip of an old Python backtracks for a long time
    run(python, "-m", "pip", "install", "--dry-run", "--no-cache-dir", "--quiet", f"lightning[all] @ {wheel.as_uri()}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # CPU time measures a resolver that backtracks, and excludes the download and other work of the machine.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 180
