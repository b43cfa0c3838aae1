from __future__ import annotations

from typing import Any

import pytest
from strands import Agent, tool
from strands.models.openai import OpenAIModel
from strands.multiagent import GraphBuilder

import agentlightning as agl
from agentlightning.testing.agent import AGENT_NAME, INSTRUCTIONS, AgentConformance, Answer, Lab, add, answer, ask
from tests.integrations.framework_agent import NOWHERE

pytestmark = pytest.mark.filterwarnings("ignore")  # of Strands and its dependencies


def make_agent(**settings: Any) -> Agent:
    model = OpenAIModel(client_args={"base_url": NOWHERE, "api_key": "any", "max_retries": 0}, model_id="gpt-5")
    given = {"name": AGENT_NAME, "system_prompt": INSTRUCTIONS, "tools": [tool(add)], "callback_handler": None}
    return Agent(model=model, **{**given, **settings})


class TestStrands(AgentConformance):
    prompt_path = f"{AGENT_NAME}.system_prompt"

    @pytest.fixture
    def agent(self) -> Any:
        return make_agent()


def script(request: Any) -> Answer:
    tools = [tool["function"]["name"] for tool in request.body.get("tools") or ()]
    if AGENT_NAME in tools and request.body["messages"][-1]["role"] != "tool":
        return Answer(tool_calls=[(AGENT_NAME, {"input": ask(2, 3)})])
    return answer(request) if tools else Answer("The sum is 5.")


async def test_agents_among_tools_and_in_graphs_call_the_endpoint_of_the_rollout_with_their_prompts() -> None:
    desk = make_agent(name="desk", system_prompt="Pass it on.", tools=[make_agent().as_tool(name=AGENT_NAME)])
    graph = GraphBuilder()
    graph.add_node(desk, "desk")
    graph.add_node(make_agent(name="judge", system_prompt="Judge it.", tools=[]), "judge")
    graph.add_edge("desk", "judge")
    graph.set_entry_point("desk")
    paths = [f"{name}.system_prompt" for name in ("desk", AGENT_NAME, "judge")]
    async with Lab(graph.build(), script, prompts=paths) as lab:
        (rollout,) = await lab.run(ask(2, 3), resources={path: f"Do {path}!" for path in paths})
        triplets = agl.TraceToTriplet().adapt(await lab.spans(rollout))
    assert rollout.status == "succeeded", rollout.attempt.error
    assert [triplet.metadata["agent_name"] for triplet in triplets] == ["desk", AGENT_NAME, AGENT_NAME, "desk", "judge"]
    asked = str([request.body["messages"][0]["content"] for request in lab.server.requests])
    assert all(f"Do {path}!" in asked for path in paths)
