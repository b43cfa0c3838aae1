"""Objects of Deep Agents: the texts of their sub-agents are prompts, and sub-agents call the rollout's model."""

from __future__ import annotations

import pytest
from deepagents import create_deep_agent
from langchain_openai import ChatOpenAI

from agentlightning.testing.agent import Answer, Lab, add, answer, ask
from agentlightning_plugins.shared.scripted_model.server import RecordedRequest
from tests.integrations.framework_agent import NOWHERE

pytestmark = pytest.mark.filterwarnings("ignore")  # of the framework's dependencies
HELPER = "You are a helper."


def delegate(request: RecordedRequest) -> Answer:
    """Gives the task to the sub-agent, which adds the numbers."""
    messages = request.body["messages"]
    if "task" in {tool["function"]["name"] for tool in request.body["tools"]} and messages[-1]["role"] != "tool":
        return Answer(tool_calls=[("task", {"description": ask(2, 3), "subagent_type": "helper"})])
    return answer(request)


async def test_the_text_of_a_sub_agent_is_a_prompt_and_its_calls_are_recorded() -> None:
    model = ChatOpenAI(model="own", base_url=NOWHERE, api_key="own")
    helper = {"name": "helper", "description": "Adds numbers.", "system_prompt": HELPER, "tools": [add]}
    made = create_deep_agent(model=model, name="calculator", system_prompt="Be brief.", subagents=[helper])
    async with Lab(made, delegate, prompts=["calculator.system_prompt", "helper.system_prompt"]) as lab:
        (rollout,) = await lab.run(ask(2, 3), resources={"helper.system_prompt": "Count on your fingers."})
        spans = await lab.spans(rollout)
    assert rollout.status == "succeeded", rollout.attempt.error
    assert rollout.attempt.reward == 1.0
    systems = [str(request.body["messages"][0]["content"]) for request in lab.server.requests]
    own = ["Be brief." in text for text in systems]
    assert own == [True, False, False, True]
    assert [text.count("Count on your fingers.") for text in systems] == [0, 1, 1, 0]
    assert not any(HELPER in text for text in systems)
    assert len([span for span in spans if "response_token_ids" in span.attributes]) == 4
