"""Tests of several agents that work together: a team, a workflow, a crew."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import pytest

import agentlightning as agl
from agentlightning.testing.agent import AGENT_NAME, Lab, answer, ask, go_on
from agentlightning_plugins.shared.scripted_model.server import Answer, RecordedRequest

WRITER = "You write what the calculator found."
THE_END = "the end"
"""Answer of the writer."""


def names_and_texts(spans: list[agl.Span]) -> list[tuple[str | None, str]]:
    """Returns the agent and the answer of each triplet."""
    triplets = agl.TraceToTriplet().adapt(spans)
    return [(t.metadata["agent_name"], t.response["raw_content"][0]["content"] or "a tool call") for t in triplets]


async def run(lab: Lab, task: Any = None, **more: Any) -> tuple[agl.AttemptedRollout, list[agl.Span]]:
    """Starts a lab for one rollout; returns the rollout and its spans."""
    async with lab:
        (rollout,) = await lab.run(task or ask(2, 3), **more)
        return rollout, await lab.spans(rollout)


class TeamTests:
    """Tests of a team of a calculator and a ``writer``, which continues its answer and ends with ``THE_END``."""

    given: ClassVar[str] = "input.value"
    """Attribute of an agent's span that contains the input; ``said`` is the attribute of its output."""
    said: ClassVar[str] = "output.value"

    @pytest.fixture
    def team(self) -> Any:
        """The team as an object of the framework."""
        raise NotImplementedError

    def task(self, a: int, b: int) -> Any:
        """Returns a task for the team."""
        return ask(a, b)

    def last_words(self, output: Any) -> str:
        """Returns the last text of the framework's result."""
        raise NotImplementedError

    def script(self, request: RecordedRequest) -> Answer:
        """Returns the answer of the scripted model."""
        return Answer(THE_END) if "writ" in str(request.body["messages"][0]["content"]) else answer(request)

    def reward(self, task: Any, output: Any, rollout: agl.Rollout) -> float:
        return float(self.last_words(output) == THE_END)

    async def test_each_agent_of_a_team_has_its_own_triplets(self, team: Any) -> None:
        rollout, spans = await run(Lab(team, self.script, reward=self.reward), self.task(2, 3))
        assert rollout.attempt.error is None
        assert names_and_texts(spans) == [
            (AGENT_NAME, "a tool call"),
            (AGENT_NAME, "The sum is 5."),
            ("writer", THE_END),
        ]
        assert agl.find_final_reward(spans) == 1.0
        assert len(agl.TraceToTriplet(agent_match="^writer$").adapt(spans)) == 1
        by_name = {span.attributes["gen_ai.agent.name"]: span for span in spans if span.name.startswith("invoke_agent")}
        assert "The sum is 5." in by_name["writer"].attributes[self.given]
        assert THE_END in by_name["writer"].attributes[self.said]

    async def test_eight_concurrent_runs_of_a_team_each_start_from_its_initial_state(self, team: Any) -> None:
        async with Lab(team, self.script, reward=self.reward) as lab:
            rollouts = await lab.run(*(self.task(i, i) for i in range(8)))
            for i, rollout in enumerate(rollouts):
                spans = await lab.spans(rollout)
                assert agl.find_final_reward(spans) == 1.0
                assert names_and_texts(spans)[1:] == [(AGENT_NAME, f"The sum is {2 * i}."), ("writer", THE_END)]

    async def test_an_error_inside_a_team_fails_the_attempt_with_its_message(self, team: Any) -> None:
        lab = Lab(team, [Answer(status=400, error="the model has gone home")])
        rollout, _ = await run(lab, self.task(2, 3))
        assert rollout.status == "failed"
        assert rollout.attempt.error is not None
        assert "the model has gone home" in rollout.attempt.error.message
        assert "Traceback" in rollout.attempt.error.traceback

    @pytest.mark.parametrize("by", ["timeout", "cancellation"])
    async def test_a_cancelled_team_stops_immediately(self, team: Any, by: str) -> None:
        called, release = asyncio.Event(), asyncio.Event()

        def hold(request: RecordedRequest) -> Answer:
            called.set()
            return Answer("nothing yet", until=release)

        async with Lab(team, hold) as lab:

            async def cancel(ids: list[str]) -> None:
                await called.wait()
                await lab.store.cancel_rollout(ids[0])

            if by == "timeout":
                (rollout,) = await lab.run(self.task(2, 3), timeout_s=0.2)
                assert rollout.attempt.status == "timeout"
            else:
                (rollout,) = await lab.run(self.task(2, 3), meanwhile=cancel)
                assert rollout.status == "cancelled"
            asked = len(lab.server.requests)
            await go_on(release)
            assert len(lab.server.requests) == asked <= 1
