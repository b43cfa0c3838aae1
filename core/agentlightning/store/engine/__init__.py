"""The engine: implements ``LightningStore`` over any ``Backend``."""

from agentlightning.store.engine.store import BackendStore as BackendStore
