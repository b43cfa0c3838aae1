"""Tests of the agents of all frameworks, in addition to the conformance tests (``AgentConformance``)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final

import pytest

import agentlightning as agl
from agentlightning import semconv
from agentlightning.testing.agent import INSTRUCTIONS, Lab, answer, ask
from agentlightning_plugins.shared.scripted_model.server import Answer, RecordedRequest
from tests.algorithms.prompt_lab import Server, client, is_critic, prompt_in
from tests.integrations import framework_agent
from tests.integrations.framework_agent import AGENTS, PROMPTS, make_openai_client
from tests.waiting import until

pytestmark = [
    pytest.mark.environment("main"),  # needs all frameworks
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # crewai reads its own deprecated fields
]

TUNABLE: Final[dict[str, Callable[[], Any]]] = {"langchain": AGENTS["langchain"], "openai": make_openai_client}
"""A framework, whose conformance tests show that prompts reach it, like those of all others; and the bare client."""
LESSON: Final = "Say please."


def teach_politeness(request: RecordedRequest) -> Answer:
    """Answers for a calculator that is polite if its prompt asks for it, and for a critic and an editor."""
    if request.body["model"] == "editor":
        return Answer(f"<prompt>\n{prompt_in(request)} {LESSON}\n</prompt>")
    if is_critic(request):
        return Answer("it does not say please")
    said = answer(request)
    if said.content is None and request.body.get("tools"):
        return said
    return Answer("The sum is 5, please." if LESSON in str(request.body["messages"]) else "The sum is 5.")


@pytest.mark.parametrize("framework", TUNABLE)
def test_apo_tunes_a_prompt_of_an_agent_and_of_a_client(framework: str) -> None:
    path = PROMPTS[framework]
    store = agl.create_store("memory://")
    agent = TUNABLE[framework]()
    with Server(teach_politeness) as server:
        apo = agl.APO(
            client(server),
            gradient_model="critic",
            apply_edit_model="editor",
            beam_width=1,
            branch_factor=1,
            beam_rounds=1,
            gradient_batch_size=1,
        )
        trainer = agl.Trainer(
            algorithm=apo,
            store=store,
            strategy="shm",
            trackers=[],
            initial_resources={"llm": agl.LLM(endpoint=server.endpoint, model="m")},
        )
        polite = agl.wrap(
            agent, reward=lambda task, output, _: float("please" in str(output)), prompts={path: INSTRUCTIONS}
        )
        run = trainer.fit(polite, [ask(2, 3)], [ask(2, 3)])
        asked = [request.body["messages"] for request in server.requests if request.body["model"] == "m"]
    assert run.status == "succeeded"
    assert apo.get_best_prompt().template == f"{INSTRUCTIONS} {LESSON}"
    published = asyncio.run(_latest(store))
    assert published[path] == apo.get_best_prompt()
    taught = [LESSON in str(messages) for messages in asked]
    assert set(taught) == {False, True}
    assert all(INSTRUCTIONS in str(messages) for messages in asked)
    assert LESSON not in str(agl.wrap(agent, prompts=[path]).agent.texts())


async def _latest(store: agl.LightningStore) -> agl.NamedResources:
    latest = await store.get_latest_resources()
    await store.close()
    assert latest is not None
    return latest.resources


@pytest.mark.parametrize("framework", [name for name in AGENTS if name != "openai"])
async def test_a_blocking_tool_stops_when_its_rollout_is_cancelled(
    framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks: list[float] = []

    def add(a: int, b: int) -> int:
        """Adds two numbers, in a minute."""
        while len(ticks) < 3000:
            time.sleep(0.02)
            ticks.append(time.time())
        return a + b

    monkeypatch.setattr(framework_agent, "add", add)
    async with Lab(AGENTS[framework]()) as lab:

        async def cancel(ids: list[str]) -> None:
            await until(lambda: ticks)
            await lab.store.cancel_rollout(ids[0])

        (rollout,) = await lab.run(ask(2, 3), meanwhile=cancel)
        assert rollout.status == "cancelled"

        async def has_stopped() -> bool:
            before = len(ticks)
            await asyncio.sleep(0.2)
            return len(ticks) == before

        await until(has_stopped)
    assert len(ticks) < 3000, "the tool continued after its rollout was cancelled"


@pytest.mark.parametrize("framework", [name for name in AGENTS if name != "openai"])
async def test_tasks_in_common_forms_are_accepted_and_other_tasks_are_refused(framework: str) -> None:
    question = ask(2, 3)
    tasks: list[Any] = [{name: question, "answer": 5} for name in ("question", "input", "prompt")]
    tasks += [{"messages": [{"role": "user", "content": question}]}, {"sum": question}, {"question": "", "input": ""}]
    async with Lab(AGENTS[framework](), reward=lambda task, output, rollout: 1.0) as lab:
        *understood, other, several = await lab.run(*tasks)
        assert [rollout.attempt.error for rollout in understood] == [None] * 4
        for rollout in understood:
            first = next(span for span in await lab.spans(rollout) if semconv.is_gateway_call(span))
            (user,) = [m for m in semconv.read_input_messages(first) if m["role"] == "user"]
            assert question in user["content"]
            assert "answer" not in user["content"]
        for rollout, fields in ((other, "'sum'"), (several, "'question', 'input'")):
            assert rollout.attempt.error is not None
            assert f"a mapping with the fields {fields}; exactly one of" in rollout.attempt.error.message
            assert "task_to_input" in rollout.attempt.error.message


def fail_then_add(request: RecordedRequest) -> Answer:
    """Answers with a call that the tool cannot take, then with one that it can, then with text."""
    n_results = sum(message["role"] == "tool" for message in request.body["messages"])
    if n_results == 2:
        return Answer("The sum is 5.")
    return Answer(tool_calls=[("add", {"a": 2, "b": 3 if n_results else "three"})])


@pytest.mark.parametrize("framework", [name for name in AGENTS if name != "openai"])
async def test_intermediate_rewards_find_failed_and_successful_tools_in_the_spans_of_each_framework(
    framework: str,
) -> None:
    async with Lab(AGENTS[framework](), fail_then_add, reward=lambda task, output, rollout: 1.0) as lab:
        (rollout,) = await lab.run(ask(2, 3))
        spans = await lab.spans(rollout)
    assert rollout.attempt.error is None
    rule = {"name": "intermediate", "tool_success": 0.5, "tool_failure": -4.0, "invalid_output": 64.0, "retry": 32.0}
    assert [triplet.reward for triplet in agl.TraceToTriplet(credit=rule).adapt(spans)] == [-3.0, 1.5, 1.0]
