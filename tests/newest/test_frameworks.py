"""Frameworks with the newest openai: what depends on its client; ``main`` runs all conformance tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agentlightning.testing.agent import AgentConformance
from tests.integrations.framework_agent import AGENTS


@pytest.mark.parametrize("framework", ["agent-framework", "autogen", "langchain"])
@pytest.mark.parametrize(
    "test",
    [
        AgentConformance.test_each_model_call_is_a_triplet_with_tokens_agent_and_reward,
        AgentConformance.test_each_model_call_has_its_messages_and_token_counts,
        AgentConformance.test_it_calls_the_model_of_its_rollout_with_the_resources_parameters,
        AgentConformance.test_an_error_of_the_model_fails_the_attempt_with_type_message_and_traceback,
        AgentConformance.test_a_cancelled_rollout_stops_the_agent,
        AgentConformance.test_it_can_be_sent_to_a_runner_process,
    ],
    ids=lambda test: test.__name__,
)
async def test_an_agent_of_a_framework_passes_a_conformance_test(framework: str, test: Callable[..., Any]) -> None:
    await test(AgentConformance(), AGENTS[framework]())
