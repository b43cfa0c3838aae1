"""The store ``sqlite:///path``: one file, durable, shared by the processes of one machine."""

from agentlightning_plugins.sqlite_store.store import SqliteLightningStore

__all__ = ["SqliteLightningStore"]
