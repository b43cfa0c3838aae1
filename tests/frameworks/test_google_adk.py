from __future__ import annotations

from typing import Any

import pytest
from google.adk.agents import LlmAgent, SequentialAgent
from google.adk.models.lite_llm import LiteLlm
from google.adk.tools.agent_tool import AgentTool

import agentlightning as agl
from agentlightning.testing.agent import AGENT_NAME, INSTRUCTIONS, AgentConformance, Answer, Lab, add, answer, ask
from tests.integrations.framework_agent import NOWHERE

pytestmark = pytest.mark.filterwarnings("ignore")  # of ADK and litellm


def make_agent(**settings: Any) -> LlmAgent:
    model = LiteLlm("openai/gpt-5", api_base=NOWHERE, api_key="any", num_retries=0)
    return LlmAgent(**{"name": AGENT_NAME, "model": model, "instruction": INSTRUCTIONS, "tools": [add], **settings})


class TestGoogleADK(AgentConformance):
    prompt_path = f"{AGENT_NAME}.instruction"
    records_calls = False

    @pytest.fixture
    def agent(self) -> Any:
        return make_agent()


async def test_sub_agents_and_agents_among_tools_call_the_endpoint_of_the_rollout_with_their_prompts() -> None:
    desk = make_agent(name="desk", instruction="Pass it on.", tools=[AgentTool(make_agent())])
    team = SequentialAgent(name="team", sub_agents=[desk, make_agent(name="judge", instruction="Judge it.", tools=[])])

    def script(request: Any) -> Answer:
        tools = [tool["function"]["name"] for tool in request.body.get("tools") or ()]
        last = request.body["messages"][-1]
        if AGENT_NAME in tools and last["role"] != "tool":
            return Answer(tool_calls=[(AGENT_NAME, {"request": ask(2, 3)})])
        return answer(request) if tools else Answer("The sum is 5.")

    paths = [f"{name}.instruction" for name in ("desk", AGENT_NAME, "judge")]
    async with Lab(team, script, prompts=paths) as lab:
        (rollout,) = await lab.run(ask(2, 3), resources={path: f"Do {path}!" for path in paths})
        triplets = agl.TraceToTriplet().adapt(await lab.spans(rollout))
    assert rollout.status == "succeeded", rollout.attempt.error
    assert [triplet.metadata["agent_name"] for triplet in triplets] == ["desk", AGENT_NAME, AGENT_NAME, "desk", "judge"]
    asked = [request.body["messages"][0]["content"] for request in lab.server.requests]
    assert all(f"Do {path}!" in str(asked) for path in paths)
