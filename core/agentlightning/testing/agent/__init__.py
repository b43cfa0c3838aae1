"""Conformance tests for integrations of agent frameworks.

Use them like this::

    class TestMyFramework(AgentConformance):
        prompt_path = "calculator.instructions"

        @pytest.fixture
        def agent(self):
            return MyAgent(name=AGENT_NAME, instructions=INSTRUCTIONS, tools=[add])
"""

import pytest

from agentlightning.plugin.lazy_names import lazy_names

pytest.register_assert_rewrite("agentlightning_plugins.shared.agent_testing")

__all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
