"""The contract of ``LightningStore`` as tests, for authors of stores.

Example::

    class TestMyStore(DurableStoreConformance):     # StoreConformance, if it is not durable
        @pytest.fixture
        async def store(self, tmp_path):
            store = MyStore(tmp_path)               # empty
            yield store
            await store.close()

        @pytest.fixture
        def reopen(self, store, tmp_path):          # for durable stores
            async def reopen():
                await store.close()
                return MyStore(tmp_path)

            return reopen
"""

import pkgutil

import pytest

pytest.register_assert_rewrite(*(f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__)))

from agentlightning.store.protocol import LightningStore  # noqa: E402 # after the registration of what is imported
from agentlightning.testing.store.durable import DurableTests  # noqa: E402 # as above
from agentlightning.testing.store.finding import FindingTests  # noqa: E402 # as above
from agentlightning.testing.store.lifecycle import LifecycleTests  # noqa: E402 # as above
from agentlightning.testing.store.model import Reopen, compare_with_model  # noqa: E402 # as above
from agentlightning.testing.store.queueing import QueueingTests  # noqa: E402 # as above
from agentlightning.testing.store.recording import RecordingTests  # noqa: E402 # as above
from agentlightning.testing.store.tracing import TracingTests  # noqa: E402 # as above
from agentlightning.testing.store.waiting import WaitingTests  # noqa: E402 # as above

__all__ = ["DurableStoreConformance", "StoreConformance"]


@pytest.mark.asyncio
class StoreConformance(
    QueueingTests,
    WaitingTests,
    LifecycleTests,
    TracingTests,
    FindingTests,
    RecordingTests,
):
    """The tests that every store must pass.

    A subclass provides a fixture ``store``: an empty store that enforces deadlines by itself, with a lease of at least
    ten seconds. The tests need ``pytest-asyncio``, in either of its modes, and ``hypothesis``.
    """

    async def test_any_sequence_of_calls_does_what_a_simple_model_does(self, store: LightningStore) -> None:
        await compare_with_model(store)


class DurableStoreConformance(StoreConformance, DurableTests):
    """The tests that a durable store must pass in addition.

    They need a second fixture, ``reopen``: a coroutine function that closes the open store, opens the same database
    again and returns the new store. A test may call it several times; the fixture closes the last store.
    """

    async def test_any_sequence_of_calls_does_what_a_simple_model_does(  # type: ignore[override] # pytest passes it
        self, store: LightningStore, reopen: Reopen
    ) -> None:
        await compare_with_model(store, reopen)
