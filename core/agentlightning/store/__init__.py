"""Stores: where algorithm, runners, gateway and dashboards meet."""

from typing import TYPE_CHECKING

from agentlightning.facade import resolve_lazily

if TYPE_CHECKING:
    from agentlightning.store.factory import create_store as create_store
    from agentlightning.store.protocol import LightningStore as LightningStore
    from agentlightning.store.retention import Retention as Retention
    from agentlightning_plugins.memory_store import InMemoryLightningStore as InMemoryLightningStore
    from agentlightning_plugins.postgresql_store import PostgresLightningStore as PostgresLightningStore
    from agentlightning_plugins.sqlite_store import SqliteLightningStore as SqliteLightningStore
    from agentlightning_plugins.store_client import LightningStoreClient as LightningStoreClient
    from agentlightning_plugins.store_server import LightningStoreServer as LightningStoreServer

__all__ = [
    "InMemoryLightningStore",
    "LightningStore",
    "LightningStoreClient",
    "LightningStoreServer",
    "PostgresLightningStore",
    "Retention",
    "SqliteLightningStore",
    "create_store",
]

__getattr__ = resolve_lazily(
    __name__,
    {
        "InMemoryLightningStore": ("store", "memory"),
        "LightningStore": "agentlightning.store.protocol",
        "LightningStoreClient": ("store", "http"),
        "LightningStoreServer": ("server", "store"),
        "Retention": "agentlightning.store.retention",
        "PostgresLightningStore": ("store", "postgresql"),
        "SqliteLightningStore": ("store", "sqlite"),
        "create_store": "agentlightning.store.factory",
    },
)
