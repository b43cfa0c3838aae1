"""An Acme assistant as an agent that Lightning runs, watches and tunes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from acme_agents import Assistant
from openai import AsyncOpenAI

import agentlightning as agl
from agentlightning import LLM
from agentlightning.plugin import FrameworkAgent


class AssistantAgent(FrameworkAgent[Assistant]):
    """Asks the assistant one question for each task; the answer is the output."""

    def texts(self) -> Mapping[str, str]:
        """The texts that ``agl.wrap(..., prompts={"writer.instructions": "prompt"})`` can tune."""
        return {f"{self.agent.name}.instructions": self.agent.instructions}

    def is_async(self) -> bool:
        return True

    async def run_async(self, task: Any, llm: LLM | None, texts: Mapping[str, str]) -> str:
        """Runs a copy: many rollouts run at the same time, each with its own endpoint and texts."""
        changes: dict[str, Any] = {"observers": [*self.agent.observers, _record]}
        changes["instructions"] = texts.get(f"{self.agent.name}.instructions", self.agent.instructions)
        if llm is None:
            return await self._ask(dataclasses.replace(self.agent, **changes), task)
        async with AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key or "none", max_retries=0) as client:
            changes |= {"client": client, "model": llm.model, "settings": dict(llm.sampling_parameters)}
            return await self._ask(dataclasses.replace(self.agent, **changes), task)

    async def _ask(self, assistant: Assistant, task: Any) -> str:
        agent = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": assistant.name}
        tracer = agl.get_active_tracer()
        assert tracer is not None  # an agent runs in a rollout
        with tracer.operation_context(f"invoke_agent {assistant.name}", attributes=agent):
            return await assistant.ask(str(task))


def _record(kind: str, what: dict[str, Any]) -> None:
    """Records a tool call as a span, with the attribute names that the adapter and the credit rules read."""
    attributes = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": what["name"],
        "gen_ai.tool.call.id": what["id"],
        "gen_ai.tool.call.arguments": json.dumps(what["arguments"]),
        "gen_ai.tool.call.result": what["result"],
    }
    tracer = agl.get_active_tracer()
    if tracer is not None:
        tracer.create_span(f"execute_tool {what['name']}", attributes=attributes)
