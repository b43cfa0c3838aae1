"""The memory store is a store, and what is its own: flat costs, ordered delivery, no thread left behind."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import AsyncIterator, Sequence

import pytest

from agentlightning.errors import ConfigError
from agentlightning.event import Event, RolloutEnqueued
from agentlightning.store.backend import Condition, Put, Query
from agentlightning.testing.store import StoreConformance
from agentlightning.types import Attempt, EnqueueRolloutRequest, Record, Rollout, Span
from agentlightning_plugins.memory_store import InMemoryLightningStore, MemoryBackend


class TestInMemoryLightningStore(StoreConformance):
    @pytest.fixture
    async def store(self) -> AsyncIterator[InMemoryLightningStore]:
        store = InMemoryLightningStore()
        yield store
        await store.close()
