"""The protocol of ``LightningStore`` as tests, for authors of stores.

A test module of theirs is::

    class TestMyStore(DurableStoreConformance):     # StoreConformance, if it forgets everything when it is closed
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

import pytest

pytest.register_assert_rewrite(
    *(
        f"{__name__}.{module}"
        for module in (
            "durable",
            "finding",
            "holding",
            "json_value",
            "lifecycle",
            "model",
            "queueing",
            "recording",
            "step",
            "tracing",
            "waiting",
        )
    )
)

from agentlightning.store.protocol import LightningStore  # noqa: E402 # after the registration of what is imported
from agentlightning.testing.store.durable import DurableTests  # noqa: E402 # as above
from agentlightning.testing.store.finding import FindingTests  # noqa: E402 # as above
from agentlightning.testing.store.holding import HoldingTests  # noqa: E402 # as above
from agentlightning.testing.store.json_value import JsonValueTests  # noqa: E402 # as above
from agentlightning.testing.store.lifecycle import LifecycleTests  # noqa: E402 # as above
from agentlightning.testing.store.model import compare_with_model  # noqa: E402 # as above
from agentlightning.testing.store.queueing import QueueingTests  # noqa: E402 # as above
from agentlightning.testing.store.recording import RecordingTests  # noqa: E402 # as above
from agentlightning.testing.store.tracing import TracingTests  # noqa: E402 # as above
from agentlightning.testing.store.waiting import WaitingTests  # noqa: E402 # as above

__all__ = ["DurableStoreConformance", "StoreConformance"]


@pytest.mark.asyncio
class StoreConformance(
    QueueingTests,
    WaitingTests,
    HoldingTests,
    LifecycleTests,
    TracingTests,
    FindingTests,
    RecordingTests,
    JsonValueTests,
):
    """Every store passes these tests; each is a sentence of the protocol.

    A plugin author subclasses this and gives one fixture, ``store``: an empty store that enforces deadlines by itself,
    with a lease of at least ten seconds. Tests are asynchronous and need ``pytest-asyncio``, in either of its modes,
    and ``hypothesis``.
    """

    async def test_any_sequence_of_calls_does_what_a_simple_model_does(self, store: LightningStore) -> None:
        await compare_with_model(store)


class DurableStoreConformance(StoreConformance, DurableTests):
    """What stores pass in addition that keep everything when they are closed.

    They give a second fixture, ``reopen``: a coroutine function that closes the store that is open and opens the same
    database again, returning the new one. It may be called several times in one test; who opened a store closes it.
    """
