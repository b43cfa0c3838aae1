"""The contract of a store as tests, for authors of stores.

``BackendConformance`` tests the primitives of a ``Backend``; ``StoreConformance`` and ``DurableStoreConformance`` test
them and the ``BackendStore`` over it.

Example::

    class TestMyStore(DurableStoreConformance):     # StoreConformance, if it is not durable
        @pytest.fixture
        async def opened(self):
            stores = []
            yield stores
            await stores[-1].close()

        @pytest.fixture
        async def store(self, tmp_path, opened):
            opened.append(MyStore(tmp_path))        # empty
            return opened[-1]

        @pytest.fixture
        def reopen(self, tmp_path, opened):         # for durable stores
            async def reopen():
                await opened[-1].close()
                opened.append(MyStore(tmp_path))
                return opened[-1]

            return reopen
"""

from __future__ import annotations

from agentlightning.store.protocol import LightningStore
from agentlightning.testing.store.backend import BackendConformance
from agentlightning.testing.store.model import Reopen, compare_with_model

__all__ = ["BackendConformance", "DurableStoreConformance", "StoreConformance"]


class StoreConformance(BackendConformance):
    """The tests that every ``BackendStore`` must pass.

    A subclass provides a fixture ``store``: an empty store that enforces deadlines by itself, with a lease of at least
    ten seconds. The tests need ``pytest-asyncio``, in either of its modes, and ``hypothesis``.
    """

    async def test_any_sequence_of_calls_does_what_a_simple_model_does(self, store: LightningStore) -> None:
        await compare_with_model(store)


class DurableStoreConformance(StoreConformance):
    """The tests of a durable store, which a model compares with one that is opened again and again.

    They need a second fixture, ``reopen``: a coroutine function that closes the open store, opens the same database
    again and returns the new store. A test may call it several times; the fixture closes the last store.
    """

    async def test_any_sequence_of_calls_does_what_a_simple_model_does(  # type: ignore[override] # pytest passes it
        self, store: LightningStore, reopen: Reopen
    ) -> None:
        await compare_with_model(store, reopen)
