"""Google ADK: a ``BaseAgent``, with its sub-agents and the agents among its tools."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # without it, litellm downloads a list of prices

from google.adk.agents import BaseAgent, LlmAgent, RunConfig
from google.adk.events import Event
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.adk.telemetry import ContentCapturingMode, TelemetryConfig
from google.adk.tools.agent_tool import AgentTool
from google.genai.types import Content, UserContent

from agentlightning.plugin.hookspecs import WrapOptions
from agentlightning.resources import LLM
from agentlightning_integrations.shared.agent import FrameworkAgent, by_path, read_input
from agentlightning_integrations.shared.span_tree import to_text

_TELEMETRY: Final = TelemetryConfig(
    genai_semconv_stability_opt_in="experimental", capture_message_content=ContentCapturingMode.SPAN_ONLY
)
"""Arguments and results of tools in the spans, which go to the store only."""


def wrap_agent(agent: Any, options: WrapOptions) -> GoogleADKAgent | None:
    return GoogleADKAgent(agent, options) if isinstance(agent, BaseAgent) else None


class GoogleADKAgent(FrameworkAgent[BaseAgent]):
    """Runs a copy of an agent in a session of its own; the output is the list of its events.

    Agents call the rollout's endpoint through litellm, whatever models they have. Tools are shared by all rollouts.
    """

    def texts(self) -> Mapping[str, str | None]:
        """The instruction of each agent by its name, such as ``writer.instruction``."""
        return by_path(
            (f"{agent.name}.instruction", agent.instruction if isinstance(agent.instruction, str) else None)
            for agent in _agents(self.agent)
            if agent.instruction
        )

    async def run_async(self, task: Any, llm: LLM | None, texts: Mapping[str, str]) -> list[Event]:
        """Runs the agent on a text or a ``Content``."""
        given = read_input(task, "an agent of Google ADK")
        message = (
            given if isinstance(given, Content) else UserContent(given if isinstance(given, list) else to_text(given))
        )
        model = None
        if llm is not None:
            settings = {"api_base": llm.get_base_url(), "api_key": llm.api_key or "unused", **llm.sampling_parameters}
            model = LiteLlm(f"openai/{llm.model}", num_retries=0, **settings)
        runner = InMemoryRunner(_copy(self.agent, model, texts))
        try:
            session = await runner.session_service.create_session(app_name=runner.app_name, user_id="user")
            config = RunConfig(telemetry=_TELEMETRY)
            events = runner.run_async(user_id="user", session_id=session.id, new_message=message, run_config=config)
            return [event async for event in events]
        finally:
            await runner.close()


def _agents(root: BaseAgent) -> Iterator[LlmAgent]:
    tools = getattr(root, "tools", ())
    if isinstance(root, LlmAgent):
        yield root
    for agent in (*root.sub_agents, *(tool.agent for tool in tools if isinstance(tool, AgentTool))):
        yield from _agents(agent)


def _copy(root: BaseAgent, model: LiteLlm | None, texts: Mapping[str, str]) -> BaseAgent:
    copied = root.clone({"sub_agents": [_copy(agent, model, texts) for agent in root.sub_agents]})
    if isinstance(copied, LlmAgent):
        copied.model = model or copied.model
        copied.tools = [
            _copy_tool(tool, model, texts) if isinstance(tool, AgentTool) else tool for tool in copied.tools
        ]
        text = texts.get(f"{copied.name}.instruction")
        if text is not None:
            copied.instruction = lambda context: text  # ADK would fill braces of a text from the session's state
    return copied


def _copy_tool(tool: Any, model: LiteLlm | None, texts: Mapping[str, str]) -> Any:
    if not isinstance(tool, AgentTool):
        return tool
    copied = copy.copy(tool)
    copied.agent = _copy(tool.agent, model, texts)
    return copied


def instrument(tracer_provider: Any) -> Callable[[], None]:
    """Does nothing: ADK records its own spans with the global provider."""
    return lambda: None
