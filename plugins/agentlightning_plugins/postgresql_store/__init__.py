"""The store ``postgresql://...``: one database, shared by processes of many machines."""

from agentlightning_plugins.postgresql_store.store import PostgresLightningStore

__all__ = ["PostgresLightningStore"]
