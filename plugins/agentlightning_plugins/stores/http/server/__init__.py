"""The served store: any thread-safe ``LightningStore`` behind REST and server-sent events."""

from agentlightning_plugins.stores.http.server.server import LightningStoreServer

__all__ = ["LightningStoreServer"]
