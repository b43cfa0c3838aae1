"""Conformance tests for integrations of agent frameworks.

Use them like this::

    class TestMyFramework(AgentConformance):
        prompt_path = "calculator.instructions"

        @pytest.fixture
        def agent(self):
            return MyAgent(name=AGENT_NAME, instructions=INSTRUCTIONS, tools=[add])
"""

import pytest

pytest.register_assert_rewrite(f"{__name__}.conformance", f"{__name__}.lab")

from agentlightning.testing.agent.conformance import AgentConformance  # noqa: E402 # after the registration
from agentlightning.testing.agent.lab import (  # noqa: E402 # as above
    AGENT_NAME,
    INSTRUCTIONS,
    MODEL,
    Lab,
    add,
    answer,
    ask,
    read_sum,
)

__all__ = ["AGENT_NAME", "INSTRUCTIONS", "MODEL", "AgentConformance", "Lab", "add", "answer", "ask", "read_sum"]
