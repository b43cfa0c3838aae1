"""Strands Agents: an ``Agent`` with the agents among its tools, and graphs and swarms of agents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, TypeAlias

from opentelemetry.trace import TracerProvider
from strands import Agent
from strands.agent import AgentResult
from strands.models.openai import OpenAIModel
from strands.multiagent import MultiAgentBase, MultiAgentResult
from strands.telemetry import tracer as tracer_module
from strands.telemetry.tracer import Tracer
from strands.tools._caller import _ToolCaller
from strands.types.tools import AgentTool

from agentlightning.plugin.hookspecs import WrapOptions
from agentlightning.resources import LLM
from agentlightning_integrations.shared.agent import FrameworkAgent, by_path, read_input
from agentlightning_integrations.shared.object_copy import copy_except, register_reducer, walk
from agentlightning_integrations.shared.openai_client import async_client
from agentlightning_integrations.shared.span_tree import to_text

Runnable: TypeAlias = Agent | MultiAgentBase


def wrap_agent(agent: Any, options: WrapOptions) -> StrandsAgent | None:
    return StrandsAgent(agent, options) if isinstance(agent, (Agent, MultiAgentBase)) else None


class StrandsAgent(FrameworkAgent[Runnable]):
    """Runs a copy of an agent, graph or swarm; the output is its ``AgentResult`` or ``MultiAgentResult``.

    Model calls use Chat Completions at the rollout's endpoint, whatever models the agents have. Tools are shared by
    all rollouts, agents among them are copied.
    """

    def texts(self) -> Mapping[str, str | None]:
        """The system prompt of each agent by its name, such as ``writer.system_prompt``."""
        return by_path((f"{agent.name}.system_prompt", agent.system_prompt) for agent in _agents(self.agent))

    async def run_async(self, task: Any, llm: LLM | None, texts: Mapping[str, str]) -> AgentResult | MultiAgentResult:
        """Runs the agent on a text, a list of messages or a list of contents."""
        task = read_input(task, "an agent of Strands")
        async with async_client(llm) if llm is not None else nullcontext() as client:
            model = None
            if llm is not None:
                model = OpenAIModel(client, model_id=llm.model, params=dict(llm.sampling_parameters))
            copied: Any = _copy(self.agent, model, texts)
            result: AgentResult | MultiAgentResult = await copied.invoke_async(
                task if isinstance(task, list) else to_text(task)
            )
            return result


def _children(part: Any) -> Iterable[Any]:
    if isinstance(part, Agent):
        return list(part.tool_registry.registry.values())
    if isinstance(part, AgentTool):
        return (getattr(part, "_agent", None),)
    return vars(part).values() if isinstance(part, MultiAgentBase) or hasattr(part, "executor") else ()


def _agents(root: Runnable) -> Iterator[Agent]:
    return (part for part in walk(root, _children) if isinstance(part, Agent))


def _copy(root: Runnable, model: OpenAIModel | None, texts: Mapping[str, str]) -> Runnable:
    replacements: dict[int, Any] = {}
    for agent in _agents(root):
        tools = [tool for tool in agent.tool_registry.registry.values() if not hasattr(tool, "_agent")]
        replacements |= {id(part): part for part in (*tools, agent.callback_handler, agent.tracer)}
        replacements |= {id(agent.model): model or agent.model, id(agent.tool_caller): None}
    copied = copy_except(root, replacements, getattr(root, "name", None) or type(root).__name__)
    for agent in _agents(copied):
        agent.tool_caller = _ToolCaller(agent)
        agent.system_prompt = texts.get(f"{agent.name}.system_prompt", agent.system_prompt_content)
    return copied


def instrument(tracer_provider: TracerProvider) -> Callable[[], None]:
    """Has agents record arguments and results of tools as attributes of their spans, which go to the store only."""
    tracer = Tracer()
    tracer.tracer_provider, tracer.tracer = tracer_provider, tracer_provider.get_tracer(tracer.service_name)
    tracer.use_latest_genai_conventions = tracer._span_attributes_only = True
    before, tracer_module._tracer_instance = tracer_module._tracer_instance, tracer

    def undo() -> None:
        tracer_module._tracer_instance = before

    return undo


register_reducer(_ToolCaller, lambda caller: (type(None), ()))  # each copy of an agent gets its own
