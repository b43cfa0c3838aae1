"""Conformance tests for integrations of agent frameworks.

Use them like this::

    class TestMyFramework(AgentConformance):
        prompt_path = "calculator.instructions"

        @pytest.fixture
        def agent(self):
            return MyAgent(name=AGENT_NAME, instructions=INSTRUCTIONS, tools=[add])
"""

from agentlightning.plugin.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
