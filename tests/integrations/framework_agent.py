"""The calculator agent of the conformance tests, built with each framework."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any, Final

import agentlightning as agl
from agentlightning.testing.agent import AGENT_NAME, INSTRUCTIONS, add

NOWHERE: Final = "http://127.0.0.1:9/v1"
"""Endpoint of the agents' own models. It does not answer, so every successful call went to the rollout's endpoint."""


def make_openai_agent(tool: Callable[..., int] = add) -> Any:
    """Returns a function that calls the OpenAI client itself."""
    from openai import AsyncOpenAI

    parameters = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
    schema: Any = {"type": "function", "function": {"name": "add", "parameters": parameters}}

    async def calculator(task: str, llm: agl.LLM) -> str:
        messages: list[Any] = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": task}]
        async with AsyncOpenAI(base_url=llm.get_base_url(), api_key=llm.api_key or "unused") as client:
            while True:
                completion = await client.chat.completions.create(
                    model=llm.model, messages=messages, tools=[schema], **llm.sampling_parameters
                )
                message = completion.choices[0].message
                if not message.tool_calls:
                    return message.content or ""
                messages.append(message)
                for call in message.tool_calls:
                    assert call.type == "function"
                    result = str(tool(**json.loads(call.function.arguments)))
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

    return calculator


def make_openai_client() -> Any:
    """Returns a client, which as an agent makes one call for each task."""
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url=NOWHERE, api_key="any", max_retries=0)


def make_openai_agents_agent() -> Any:
    from agents import Agent, OpenAIChatCompletionsModel, function_tool
    from openai import AsyncOpenAI

    model = OpenAIChatCompletionsModel("gpt-5", AsyncOpenAI(base_url=NOWHERE, api_key="any", max_retries=0))
    return Agent(name=AGENT_NAME, instructions=INSTRUCTIONS, tools=[function_tool(add)], model=model)


def make_langchain_model() -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model="gpt-5", api_key="any", base_url=NOWHERE, max_retries=0)


def make_langchain_agent(model: Any = None, prompt: str | None = INSTRUCTIONS, name: str | None = AGENT_NAME) -> Any:
    """Returns an agent of ``create_agent``, or of ``create_react_agent`` before LangChain 1.0."""
    from langchain import agents

    if not hasattr(agents, "create_agent"):
        return make_react_agent(model, prompt, name)
    return agents.create_agent(model or make_langchain_model(), [add], system_prompt=prompt, name=name)


def make_react_agent(model: Any = None, prompt: str | None = INSTRUCTIONS, name: str | None = AGENT_NAME) -> Any:
    from langgraph.prebuilt import create_react_agent

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated since LangGraph 1.0
        return create_react_agent(model or make_langchain_model(), [add], prompt=prompt, name=name)


def make_autogen_agent() -> Any:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    model = OpenAIChatCompletionClient(model="gpt-4o", api_key="any", base_url=NOWHERE, max_retries=0)
    return AssistantAgent(AGENT_NAME, model, tools=[add], system_message=INSTRUCTIONS, max_tool_iterations=3)


def make_crewai_agent() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about its own imports, one after the other
        from crewai import LLM, Agent
        from crewai.tools import tool

    model = LLM("gpt-4o", base_url=NOWHERE, api_key="any", max_retries=0)
    return Agent(role=AGENT_NAME, goal="Say a sum.", backstory=INSTRUCTIONS, llm=model, tools=[tool(add)])


def make_agent_framework_agent() -> Any:
    from agent_framework import Agent
    from agent_framework.openai import OpenAIChatCompletionClient
    from openai import AsyncOpenAI

    nowhere = AsyncOpenAI(base_url=NOWHERE, api_key="any", max_retries=0)
    model = OpenAIChatCompletionClient("gpt-5", async_client=nowhere)
    return Agent(model, INSTRUCTIONS, name=AGENT_NAME, tools=[add])


AGENTS: Final[dict[str, Callable[[], Any]]] = {
    "agent-framework": make_agent_framework_agent,
    "autogen": make_autogen_agent,
    "crewai": make_crewai_agent,
    "langchain": make_langchain_agent,
    "openai": make_openai_agent,
    "openai-agents": make_openai_agents_agent,
}
"""Functions that create an agent, by name of the extra. ``test_training.py`` trains each for one step of GRPO."""

PROMPTS: Final = {
    "agent-framework": f"{AGENT_NAME}.instructions",
    "autogen": f"{AGENT_NAME}.system_message",
    "crewai": f"{AGENT_NAME}.backstory",
    "langchain": f"{AGENT_NAME}.system_prompt",
    "openai": "instructions",
    "openai-agents": f"{AGENT_NAME}.instructions",
}
"""The path of the text ``INSTRUCTIONS`` in ``prompts``, by framework."""
