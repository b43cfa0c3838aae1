import pytest
from agentlightning.testing.store import StoreConformance
from agentlightning_plugins.sqlite_store import SqliteLightningStore
class TestSqlite(StoreConformance):
    @pytest.fixture
    async def store(self, tmp_path):
        s = SqliteLightningStore(tmp_path/"s.db")
        yield s
        await s.close()
