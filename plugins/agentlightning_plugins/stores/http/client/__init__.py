"""The client of a served store: ``LightningStore`` over HTTP."""

from agentlightning_plugins.stores.http.client.client import LightningStoreClient

__all__ = ["LightningStoreClient"]
