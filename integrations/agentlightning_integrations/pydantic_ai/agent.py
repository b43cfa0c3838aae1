"""Pydantic AI: an ``Agent``, and the agents that its tools run."""

from __future__ import annotations

import copy
import functools
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Final

from pydantic_ai import Agent, AgentRunResult, InstrumentationSettings
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from wrapt import wrap_function_wrapper  # type: ignore[import-untyped] # wrapt has no types

from agentlightning.plugin.hookspecs import WrapOptions
from agentlightning.resources import LLM
from agentlightning_integrations.shared.agent import FrameworkAgent, read_input
from agentlightning_integrations.shared.object_copy import register_reducer
from agentlightning_integrations.shared.openai_client import async_client
from agentlightning_integrations.shared.span_tree import to_text


def wrap_agent(agent: Any, options: WrapOptions) -> PydanticAIAgent | None:
    return PydanticAIAgent(agent, options) if isinstance(agent, Agent) else None


class PydanticAIAgent(FrameworkAgent[Agent[Any, Any]]):
    """Runs an agent on a text or a list of contents; the output is its ``AgentRunResult``.

    Model calls use Chat Completions at the rollout's endpoint, whatever model the agent has. So do model calls of
    agents that its tools run.
    """

    def texts(self) -> Mapping[str, str | None]:
        """``calculator.instructions`` and ``calculator.system_prompt``, as far as they are one fixed text."""
        instructions = [each.instruction for each in self.agent._instructions]
        found = {"instructions": instructions, "system_prompt": list(self.agent._system_prompts)}
        return {
            f"{self.agent.name or 'agent'}.{label}": texts[0] if len(texts) == 1 and isinstance(texts[0], str) else None
            for label, texts in found.items()
            if texts
        }

    async def run_async(self, task: Any, llm: LLM | None, texts: Mapping[str, str]) -> AgentRunResult[Any]:
        _redirect_runs()
        agent, task = self.agent, read_input(task, "an agent of Pydantic AI")
        by_label = {path.rpartition(".")[2]: text for path, text in texts.items()}
        if "system_prompt" in by_label:
            agent = copy.copy(agent)
            agent._system_prompts = (by_label["system_prompt"],)
        tuned = agent.override(instructions=by_label["instructions"]) if "instructions" in by_label else nullcontext()
        async with async_client(llm) if llm is not None else nullcontext() as client:
            of_rollout = None
            if client is not None and llm is not None:
                model = OpenAIChatModel(llm.model, provider=OpenAIProvider(openai_client=client))
                of_rollout = model, llm.sampling_parameters
            token = _of_rollout.set(of_rollout)
            try:
                with tuned:
                    return await agent.run(task if isinstance(task, list) else to_text(task))
            finally:
                _of_rollout.reset(token)


_of_rollout: Final[ContextVar[tuple[OpenAIChatModel, Mapping[str, Any]] | None]] = ContextVar(
    "agentlightning_pydantic_ai", default=None
)
"""The model of the rollout and its parameters."""


@functools.cache
def _redirect_runs() -> None:
    """Makes every run of an agent inside a rollout use the rollout's model."""

    @asynccontextmanager
    async def iterate(
        wrapped: Callable[..., Any], agent: Agent[Any, Any], args: Any, kwargs: Any
    ) -> AsyncIterator[Any]:
        chosen, settings = _of_rollout.get(), kwargs.get("model_settings") or agent.model_settings
        override: Any = nullcontext()
        if chosen is not None:
            own = {} if settings is None or callable(settings) else settings
            override = agent.override(model=chosen[0], model_settings={**own, **chosen[1]})
        with override:
            async with wrapped(*args, **kwargs) as run:
                yield run

    wrap_function_wrapper(Agent, "iter", iterate)


def instrument(tracer_provider: Any) -> Callable[[], None]:
    """Has agents record their own spans, unless the user has chosen how."""
    before = Agent._instrument_default
    if not before:
        Agent.instrument_all(InstrumentationSettings(tracer_provider=tracer_provider))
    return lambda: Agent.instrument_all(before)


register_reducer(ContextVar, lambda variable: (functools.partial(ContextVar, variable.name, default=None), ()))
