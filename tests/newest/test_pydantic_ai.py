from __future__ import annotations

from typing import Any

import pytest
from openai import AsyncOpenAI
from pydantic_ai import Agent, RunContext
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

import agentlightning as agl
from agentlightning.testing.agent import AGENT_NAME, INSTRUCTIONS, AgentConformance, Answer, Lab, add, answer, ask
from tests.integrations.framework_agent import NOWHERE


def make_model() -> OpenAIChatModel:
    client = AsyncOpenAI(base_url=NOWHERE, api_key="any", max_retries=0)
    return OpenAIChatModel("gpt-5", provider=OpenAIProvider(openai_client=client))


def make_agent(**settings: Any) -> Agent[Any, Any]:
    return Agent(make_model(), name=AGENT_NAME, tools=[add], **settings)


class TestPydanticAI(AgentConformance):
    prompt_path = f"{AGENT_NAME}.instructions"

    @pytest.fixture
    def agent(self) -> Any:
        return make_agent(instructions=INSTRUCTIONS)


class TestSystemPrompt(AgentConformance):
    prompt_path = f"{AGENT_NAME}.system_prompt"

    @pytest.fixture
    def agent(self) -> Any:
        return make_agent(system_prompt=INSTRUCTIONS)


async def test_an_agent_that_a_tool_runs_calls_the_endpoint_of_the_rollout_too() -> None:
    calculator = make_agent(instructions=INSTRUCTIONS)
    desk: Agent[Any, Any] = Agent(make_model(), name="desk", instructions="Pass it on.", model_settings={"top_p": 0.5})

    @desk.tool
    async def ask_calculator(context: RunContext[Any], question: str) -> str:
        return str((await calculator.run(question, usage=context.usage)).output)

    def script(request: Any) -> Answer:
        tools = [tool["function"]["name"] for tool in request.body["tools"]]
        if "ask_calculator" in tools and request.body["messages"][-1]["role"] != "tool":
            return Answer(tool_calls=[("ask_calculator", {"question": ask(2, 3)})])
        return answer(request)

    async with Lab(desk, script) as lab:
        (rollout,) = await lab.run(ask(2, 3))
        triplets = agl.TraceToTriplet().adapt(await lab.spans(rollout))
    assert rollout.status == "succeeded", rollout.attempt.error
    assert [triplet.metadata["agent_name"] for triplet in triplets] == ["desk", AGENT_NAME, AGENT_NAME, "desk"]
    asked = [request.body.get("top_p") for request in lab.server.requests]
    assert asked == [0.5, None, None, 0.5]


def test_texts_that_are_made_by_code_cannot_be_tuned() -> None:
    agent = make_agent(instructions=["a", "b"])
    with pytest.raises(agl.ConfigError, match="instructions"):
        agl.wrap(agent, prompts=[f"{AGENT_NAME}.instructions"])
    with pytest.raises(agl.ConfigError, match="system_prompt"):
        agl.wrap(agent, prompts=[f"{AGENT_NAME}.system_prompt"])
