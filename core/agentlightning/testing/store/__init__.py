"""The protocol of ``LightningStore`` as tests, for authors of stores.

A test module of theirs is::

    class TestMyStore(StoreConformance):
        @pytest.fixture
        def store(self):
            return MyStore()        # empty; a generator fixture may close it
"""

import pytest

pytest.register_assert_rewrite(
    f"{__name__}.finding",
    f"{__name__}.lifecycle",
    f"{__name__}.queueing",
    f"{__name__}.recording",
    f"{__name__}.step",
    f"{__name__}.tracing",
    f"{__name__}.waiting",
)

from agentlightning.testing.store.finding import FindingTests  # noqa: E402 # after the registration of what it imports
from agentlightning.testing.store.lifecycle import LifecycleTests  # noqa: E402 # as above
from agentlightning.testing.store.queueing import QueueingTests  # noqa: E402 # as above
from agentlightning.testing.store.recording import RecordingTests  # noqa: E402 # as above
from agentlightning.testing.store.tracing import TracingTests  # noqa: E402 # as above
from agentlightning.testing.store.waiting import WaitingTests  # noqa: E402 # as above

__all__ = ["StoreConformance"]


@pytest.mark.asyncio
class StoreConformance(QueueingTests, WaitingTests, LifecycleTests, TracingTests, FindingTests, RecordingTests):
    """Every store passes these tests; each is a sentence of the protocol.

    A plugin author subclasses this and gives one fixture, ``store``: an empty store that enforces deadlines by itself,
    with a lease of at least ten seconds. Tests are asynchronous and need ``pytest-asyncio``, in either of its modes.
    """
