from __future__ import annotations

import json
from typing import Any

import dspy
import pytest

import agentlightning as agl
from agentlightning.testing.agent import AGENT_NAME, INSTRUCTIONS, AgentConformance, Answer, Lab, add, ask
from tests.integrations.framework_agent import NOWHERE

pytestmark = pytest.mark.filterwarnings("ignore")  # of litellm and its dependencies


class Plain(dspy.Adapter):
    """Sends instructions, question and tool results as plain messages, and takes the whole text as the answer."""

    def __init__(self) -> None:
        super().__init__(use_native_function_calling=True)

    def format(self, signature: Any, demos: Any, inputs: dict[str, Any]) -> list[dict[str, Any]]:
        messages = [{"role": "system", "content": signature.instructions}]
        messages += [{"role": "user", "content": f"For example: {dict(demo)}"} for demo in demos]
        messages.append({"role": "user", "content": inputs["question"]})
        if inputs.get("found"):
            arguments, result = inputs["found"]
            call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": json.dumps(arguments)}}
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": "c1", "content": str(result)})
        return messages

    def parse(self, signature: Any, completion: str) -> dict[str, Any]:
        return {"answer": completion}


class Calculator(dspy.Module):
    def __init__(self) -> None:
        super().__init__()
        self.name = AGENT_NAME
        self.tool = dspy.Tool(add)
        signature = "question, found, tools: list[dspy.Tool] -> answer, tool_calls: dspy.ToolCalls"
        self.step = dspy.Predict(dspy.Signature(signature, INSTRUCTIONS))
        self.step.lm = dspy.LM("openai/gpt-5", api_base=NOWHERE, api_key="any", num_retries=0)

    def forward(self, question: str) -> dspy.Prediction:
        found: Any = None
        with dspy.context(adapter=Plain()):
            while (step := self.step(question=question, found=found, tools=[self.tool])).tool_calls:
                (call,) = step.tool_calls.tool_calls
                found = (call.args, self.tool(**call.args))
        return step


class TestDSPy(AgentConformance):
    prompt_path = "step.instructions"
    records_calls = False

    @pytest.fixture
    def agent(self) -> Any:
        return Calculator()


def show(answer: str) -> Answer:
    return Answer(f"[[ ## answer ## ]]\n{answer}\n\n[[ ## completed ## ]]")


async def test_a_repeated_task_makes_a_call_each_time_and_demos_are_a_prompt() -> None:
    predict = dspy.Predict("question -> answer")
    predict.demos = [dspy.Example(question="1 + 1?", answer="two {2}")]
    task = {"question": ask(2, 3), "expected": 5}
    async with Lab(predict, [show("5")] * 3, reward=lambda *_: 1.0, prompts=["demos"]) as lab:
        for _ in range(2):
            (rollout,) = await lab.run(task)
            assert rollout.status == "succeeded", rollout.attempt.error
        assert all("two {2}" in str(request.body["messages"]) for request in lab.server.requests)
        demos = json.dumps([{"question": "9 + 9?", "answer": "eighteen"}]).replace("{", "{{").replace("}", "}}")
        await lab.run(task, resources={"demos": demos})
        assert "eighteen" in str(lab.server.requests[-1].body["messages"])
        (rollout,) = await lab.run(task, resources={"demos": "no list"})
        assert "prompt 'demos' is not a JSON list" in rollout.attempt.error.message
        assert len(lab.server.requests) == 3


async def test_a_value_for_a_module_with_two_inputs_is_refused() -> None:
    async with Lab(dspy.Predict("question, style -> answer"), [], reward=lambda *_: 1.0) as lab:
        (rollout,) = await lab.run(ask(2, 3))
    assert "takes ['question', 'style']" in rollout.attempt.error.message


def test_a_module_of_dspy_itself_has_the_paths_of_its_predictors() -> None:
    react = dspy.ReAct("question -> answer", tools=[add])
    assert {"react.instructions", "extract.predict.instructions"} <= set(_texts(react))


def _texts(module: dspy.Module) -> list[str]:
    from agentlightning_integrations.dspy.agent import DSPyAgent

    agent = agl.wrap(module)
    while not isinstance(agent, DSPyAgent):
        agent = agent.agent
    return list(agent.texts())


async def test_agents_are_recorded_after_a_run_with_openinference() -> None:
    """Its instrumentor removes DSPy's own decorators from the methods that it restores."""
    for tracer in ("openinference", "otel"):
        async with Lab(Calculator(), reward=lambda *_: 1.0, tracer=tracer) as lab:
            (rollout,) = await lab.run({"question": ask(2, 3)})
            spans = await lab.spans(rollout)
    assert AGENT_NAME in {triplet.metadata["agent_name"] for triplet in agl.TraceToTriplet().adapt(spans)}
