"""The agent that plays an episode of an environment for each rollout."""

from __future__ import annotations

import importlib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Literal

from agentlightning.emitter import agent as named_agent
from agentlightning.environment import Environment
from agentlightning.errors import ConfigError, suggest
from agentlightning.plugin.hookspecs import Component, WrapOptions, hookimpl
from agentlightning.plugin.registry import get_manager
from agentlightning.plugin.settings import bind_settings, require_least
from agentlightning.resources import LLM
from agentlightning.types import Dataset
from agentlightning_integrations.shared.agent import FrameworkAgent
from agentlightning_plugins.shared.configuration.sources import load_attribute
from agentlightning_plugins.shared.environments.episode import Episode

_OF_LOOP: Final = ("action", "instructions", "max_turns", "seeds", "timeout_s")
"""The settings of every environment."""


@hookimpl
def components() -> list[Component]:
    target = f"{__name__}:make_agent"
    return [Component("agent", "environment", target, extra="openai", summary="plays episodes of an environment")]


@hookimpl
def wrap_agent(agent: Any, options: WrapOptions) -> Any:
    if not isinstance(agent, Environment):
        return None
    get_manager().get("agent", "environment")  # its extra is installed
    return EnvironmentAgent(agent, options)


def make_agent(
    environment: Environment | str | Mapping[str, Any], *, prompts: Sequence[str] | Mapping[str, str | None] = ()
) -> EnvironmentAgent:
    """Makes the agent of an environment.

    Args:
        environment: the environment; the name of a kind and its address, such as ``gymnasium:FrozenLake-v1``;
            ``module:attribute`` of an Environment; or a mapping of one kind to its address (``{"mcp": ["my-server"]}``)
            with settings of this kind, and ``action``, ``instructions``, ``max_turns``, ``seeds`` and ``timeout_s`` of
            any (see ``agl.Environment``).
        prompts: as in ``agl.wrap``; the only text is ``instructions``.

    Raises:
        ConfigError: there is no such kind, or a setting is invalid.
    """
    if not isinstance(environment, Environment):
        given = dict(environment) if isinstance(environment, Mapping) else {}
        prompts = given.pop("prompts", prompts)
        environment = make_environment(given or environment)
    named = prompts if isinstance(prompts, Mapping) else dict.fromkeys(prompts)
    return EnvironmentAgent(environment, WrapOptions(named))


def make_environment(spec: str | Mapping[str, Any]) -> Environment:
    """Makes an environment from its address, alone or with settings, as in ``make_agent``."""
    manager = get_manager()
    kinds = manager.components("environment")
    settings = dict(spec) if isinstance(spec, Mapping) else {}
    of_loop = {key: settings.pop(key) for key in _OF_LOOP if key in settings}
    (name, address), *_ = [(key, settings[key]) for key in ("target", *kinds) if key in settings] or [("", None)]
    settings.pop(name, None)
    if isinstance(spec, str):
        name, _, address = spec.partition(":")
        name, address = (name, address) if name in kinds and address else ("target", spec)
    if not name:
        raise ConfigError(
            f"environment = {spec!r}: name a kind with its address; the kinds: {', '.join(kinds)}; or a target"
        )
    if name != "target":
        environment: Environment = manager.create("environment", {"name": name, "address": address, **settings})
    else:
        environment = _load(address, settings, kinds)
    for key, value in of_loop.items():
        setattr(environment, key, value)
    return environment


def _load(target: Any, settings: Mapping[str, Any], kinds: Collection[str]) -> Environment:
    """Returns the environment ``module:attribute``, or one of this class."""
    try:
        found = load_attribute(str(target))
    except ConfigError as error:
        hint = suggest(str(target).partition(":")[0], kinds)
        raise ConfigError(f"environment = {error}.{hint} Kinds of environments: {', '.join(kinds)}.") from error
    if callable(found):
        found = found(**bind_settings(found, settings, f"the environment {target!r}"))
    elif settings:
        given = ", ".join(settings)
        raise ConfigError(f"the environment {target!r} is an object and takes no settings; remove {given}")
    if not isinstance(found, Environment):
        raise ConfigError(f"{target!r} is a {type(found).__name__}, not an agl.Environment")
    return found


class EnvironmentAgent(FrameworkAgent[Environment]):
    """Plays an episode for each rollout; the output is the last answer of the model."""

    def __init__(self, agent: Environment, options: WrapOptions) -> None:
        what = type(agent).__name__
        require_least(1, max_turns=agent.max_turns, seeds=agent.seeds)
        if not agent.timeout_s > 0:
            raise ConfigError(f"{what}: timeout_s = {agent.timeout_s}; a number of seconds above 0 is needed")
        try:
            re.compile(agent.action or "")
        except re.error as error:
            raise ConfigError(f"{what}: action = {agent.action!r} is not a regular expression: {error}") from error
        super().__init__(agent, options)

    def texts(self) -> Mapping[str, str]:
        return {} if self.agent.instructions is None else {"instructions": self.agent.instructions}

    def own_tasks(self, split: Literal["train", "val"]) -> Dataset[Any] | None:
        return self.agent.tasks(split)

    async def run_async(self, task: Any, llm: LLM | None, texts: Mapping[str, str]) -> str:
        """Plays the episode.

        Raises:
            ConfigError: the rollout has no model.
            RolloutError: the environment broke a rule of its class, or took too long.
        """
        importlib.import_module("openai")  # first: what records its calls imports the next module, too
        from agentlightning_integrations.shared.openai_client import async_client

        if llm is None:
            raise ConfigError("an environment needs a model: give the resource llm, or an algorithm that trains one")
        name, output = type(self.agent).__name__, ""
        async with async_client(llm) as client, Episode(self.agent) as episode:
            with named_agent(name):
                observation = await episode.reset(task)
                tools = await episode.read_tools()
                instructions = texts.get("instructions", self.agent.instructions)
                messages: list[Any] = [{"role": "system", "content": instructions}] if instructions else []
                messages.append({"role": "user", "content": observation})
                options: dict[str, Any] = {**llm.sampling_parameters, **({"tools": tools} if tools else {})}
                for _ in range(self.agent.max_turns):
                    completion = await client.chat.completions.create(model=llm.model, messages=messages, **options)
                    answer = completion.choices[0].message
                    output = answer.content or ""
                    messages.append(answer)
                    for call in answer.tool_calls or ():
                        if not episode.done and call.type == "function":
                            observation = await episode.call(call.function.name, call.function.arguments)
                            messages.append({"role": "tool", "tool_call_id": call.id, "content": observation})
                    if not answer.tool_calls and (episode.takes_answers or not tools):
                        messages.append({"role": "user", "content": await episode.step(output)})
                    elif not answer.tool_calls:
                        break
                    if episode.done:
                        break
                await episode.finish(task, output)
        return output
