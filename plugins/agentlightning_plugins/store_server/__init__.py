"""The served store: any thread-safe ``LightningStore`` behind REST and server-sent events."""

from agentlightning_plugins.store_server.server import LightningStoreServer

__all__ = ["LightningStoreServer"]
