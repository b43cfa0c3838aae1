"""``verifiers:NAME``: environments of verifiers, each attempt in a process of their own Python."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

import agentlightning as agl
from agentlightning.environment import Environment
from agentlightning.errors import ConfigError
from agentlightning.litagent import LitAgent
from agentlightning.plugin.hookspecs import Component, WrapOptions, hookimpl
from agentlightning.resources import NamedResources
from agentlightning.types import Rollout

_LIST_S: Final = 600.0
"""Seconds that reading the tasks may take; an environment may download them."""
_PROGRAM: Final = """
import asyncio, itertools, json, os, pathlib, sys
import verifiers.v1 as vf

environment = vf.load_environment(vf.resolve_env_config(json.loads(sys.argv[1])))


async def play(index):
    [task] = environment.taskset.include(idx=index)
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    sampling = vf.SamplingConfig(**json.loads(os.environ["AGL_SAMPLING_PARAMETERS"]))
    context = vf.ModelContext(client=client, model=os.environ["OPENAI_MODEL"], sampling=sampling)
    async with environment.serving():
        episode = await environment.run_episode(task, context)
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        sys.exit("\\n".join(f"{error.type}: {error.message}" for error in errors))
    if len(episode.traces) > 1:
        sys.exit("the environment plays several agents in an episode, and an attempt has the reward of one")
    [trace] = episode.traces
    scores = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    reward = json.dumps({**scores, "reward": trace.reward})
    pathlib.Path(os.environ["AGL_REWARD_FILE"]).write_text(reward)


if len(sys.argv) > 2:
    tasks = itertools.islice(environment.taskset, int(sys.argv[2]))
    print("\\n" + json.dumps([{"index": task.data.idx, "prompt": task.data.prompt_text} for task in tasks]))
else:
    asyncio.run(play(json.load(sys.stdin)["index"]))
"""
"""Plays the task on stdin, or lists as many tasks as the second argument says; the first is the configuration."""


@hookimpl
def components() -> list[Component]:
    target = f"{__name__}:VerifiersEnvironment"
    return [Component("environment", "verifiers", target, summary="environments of verifiers, in their own Python")]


@hookimpl(tryfirst=True)
def wrap_agent(agent: Any, options: WrapOptions) -> Any:
    if not isinstance(agent, VerifiersEnvironment):
        return None
    if ignored := sorted({"action", "instructions", "max_turns", "timeout_s"} & vars(agent).keys()):
        raise ConfigError(
            f"verifiers:{agent.address}: {ignored[0]} is of no use, because verifiers plays the episodes; give what "
            "vf-eval takes under env in config, such as {'agent': {'max_turns': 10}}"
        )
    if options.prompts:
        raise ConfigError(
            f"prompts = {list(options.prompts)}: verifiers:{agent.address} has no text to tune; remove it"
        )
    return _Player(agent)


class VerifiersEnvironment(Environment):
    """An environment of verifiers, which plays its episodes itself: of Environment's methods, it only has ``tasks``."""

    def __init__(
        self,
        address: str,
        python: str = ".venvs/verifiers/bin/python",
        config: Mapping[str, Any] | None = None,
        sandbox: str | dict[str, Any] = "subprocess",
    ) -> None:
        """Describes the environment.

        Args:
            address: id of the taskset, as ``vf-eval`` takes it.
            python: interpreter of a virtual environment that has verifiers and the environment.
            config: what ``vf-eval`` takes under ``env``, such as ``{"taskset": {"num_tasks": 10}}``.
            sandbox: limits of an attempt, as of a command agent.

        Raises:
            ConfigError: there is no such interpreter.
        """
        self.address, self.sandbox = address, sandbox
        self.python = str(Path(python).expanduser().absolute())  # its target would not know the virtual environment
        if not os.access(self.python, os.X_OK):
            raise ConfigError(
                f"verifiers:{address}: python = {python!r} is not a program; make a virtual environment for verifiers, "
                "as in `uv venv .venvs/verifiers` and `uv pip install --python .venvs/verifiers verifiers`"
            )
        given = dict(config or {})
        agent = {"runtime": {"type": "subprocess"}, **given.get("agent", {})}
        seats = {} if "id" in given else {"agent": agent}
        self.config = {**given, **seats, "taskset": {**given.get("taskset", {}), "id": address}}

    def tasks(self, split: Literal["train", "val"]) -> list[dict[str, Any]] | None:
        """Returns the first ``seeds`` tasks of the environment.

        Raises:
            ConfigError: there is no such environment, or its tasks cannot be read.
        """
        if split == "val":
            return None
        command = [self.python, "-c", _PROGRAM, json.dumps(self.config), str(self.seeds)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIST_S, check=False)
        if done.returncode:
            raise ConfigError(f"verifiers:{self.address} has no tasks to read: {done.stderr.strip()[-2000:]}")
        tasks: list[dict[str, Any]] = json.loads(done.stdout.rstrip().rpartition("\n")[2])
        return tasks


class _Player(LitAgent[Any]):
    """Plays a task of the environment in a process of its Python."""

    returns_output: ClassVar[bool] = True

    def __init__(self, environment: VerifiersEnvironment) -> None:
        self._environment = environment
        self._command = agl.CommandAgent(
            [environment.python, "-c", _PROGRAM, json.dumps(environment.config)],
            reward="file",
            task_via="stdin",
            home="inherit",  # with the caches of uv and verifiers
            env={"PATH": f"{Path(environment.python).parent}{os.pathsep}{os.environ.get('PATH', '')}"},
            inherit_env=["UV_*"],
            name=environment.address,
            sandbox=environment.sandbox,
        )

    def own_tasks(self, split: Literal["train", "val"]) -> list[dict[str, Any]] | None:
        return self._environment.tasks(split)

    async def rollout_async(self, task: Any, resources: NamedResources, rollout: Rollout) -> Any:
        return await self._command.rollout_async(task, resources, rollout)
