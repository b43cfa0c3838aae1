"""Conformance tests for environments.

Use them like this::

    class TestMyGame(EnvironmentConformance):
        actions = ["take 3", "take 2"]

        @pytest.fixture
        def environment(self):
            return MyGame()
"""

from agentlightning.plugin.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__, __file__)
