"""The strategies pass the tests that every strategy must pass."""

from __future__ import annotations

import pytest

from agentlightning.testing.strategy import StrategyConformance
from agentlightning_plugins.shared.processes import supervisor
from agentlightning_plugins.strategies.client_server import ClientServerExecutionStrategy
from agentlightning_plugins.strategies.shared_memory import SharedMemoryExecutionStrategy


class TestSharedMemory(StrategyConformance):
    @pytest.fixture
    def make_strategy(self) -> type[SharedMemoryExecutionStrategy]:
        return SharedMemoryExecutionStrategy


class TestClientServer(StrategyConformance):
    @pytest.fixture
    def make_strategy(self, monkeypatch: pytest.MonkeyPatch) -> type[ClientServerExecutionStrategy]:
        monkeypatch.setattr(supervisor, "_LONGEST_PAUSE_S", 0.0)
        return ClientServerExecutionStrategy
