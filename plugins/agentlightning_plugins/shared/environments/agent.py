"""The agent that plays an episode of an environment for each rollout."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from openai.types.chat import ChatCompletionMessage  # first: the recorder of its calls imports openai_client, too

from agentlightning.emitter import agent as named_agent
from agentlightning.environment import Environment
from agentlightning.errors import ConfigError
from agentlightning.plugin.hookspecs import WrapOptions
from agentlightning.plugin.settings import require_least
from agentlightning.resources import LLM
from agentlightning.types import Dataset
from agentlightning_integrations.shared.agent import FrameworkAgent
from agentlightning_integrations.shared.openai_client import async_client
from agentlightning_plugins.shared.environments.episode import EnvironmentEpisode


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
        if llm is None:
            raise ConfigError("an environment needs a model: give the resource llm, or an algorithm that trains one")
        name, output = type(self.agent).__name__, ""
        async with async_client(llm) as client, EnvironmentEpisode(self.agent) as episode:
            with named_agent(name):
                observation = await episode.reset(task)
                tools = await episode.read_tools()
                instructions = texts.get("instructions", self.agent.instructions)
                messages: list[Any] = [{"role": "system", "content": instructions}] if instructions else []
                messages.append({"role": "user", "content": observation})
                options: dict[str, Any] = {**llm.sampling_parameters, **({"tools": tools} if tools else {})}
                for _ in range(self.agent.max_turns):
                    completion = await client.chat.completions.create(model=llm.model, messages=messages, **options)
                    answer: ChatCompletionMessage = completion.choices[0].message
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
