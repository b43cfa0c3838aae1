"""Stores: where algorithm, runners, gateway and dashboards meet."""

from agentlightning.store.factory import create_store as create_store
from agentlightning.store.protocol import LightningStore as LightningStore
from agentlightning.store.retention import Retention as Retention
from agentlightning_plugins.stores.http.client import LightningStoreClient as LightningStoreClient
from agentlightning_plugins.stores.http.server import LightningStoreServer as LightningStoreServer
from agentlightning_plugins.stores.memory.store import InMemoryLightningStore as InMemoryLightningStore
from agentlightning_plugins.stores.postgresql.store import PostgresLightningStore as PostgresLightningStore
from agentlightning_plugins.stores.sqlite.store import SqliteLightningStore as SqliteLightningStore
