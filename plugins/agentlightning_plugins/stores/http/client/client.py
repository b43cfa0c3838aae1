from __future__ import annotations

import copy
import os
import time
from typing import Any

from agentlightning.run import attempt_token
from agentlightning.store.protocol import LightningStore, StoreCapabilities
from agentlightning.types import DEFAULT_RUN_ID
from agentlightning_plugins.stores.http.client.connection import StoreConnection
from agentlightning_plugins.stores.http.client.resources import ResourcesCalls, Versions
from agentlightning_plugins.stores.http.client.rollout import RolloutCalls
from agentlightning_plugins.stores.http.client.run import RunCalls
from agentlightning_plugins.stores.http.client.span import SpanCalls
from agentlightning_plugins.stores.http.message import TOKEN_VARIABLE


class LightningStoreClient(RolloutCalls, SpanCalls, ResourcesCalls, RunCalls, LightningStore):
    """A store that is served somewhere else.

    May be used from several threads, event loops and processes: it pickles as URL, token and run. A request whose
    answer was lost is repeated where that is harmless; the others raise StoreError, as does an unreachable server.
    """

    def __init__(
        self, url: str, token: str | None = None, *, run_id: str = DEFAULT_RUN_ID, retry_s: float = 30.0
    ) -> None:
        """Opens nothing yet.

        Args:
            url: of the server, as in ``http://127.0.0.1:4747``.
            token: what the server was started with; None takes the environment's AGL_TOKEN.
            run_id: the run whose queue, latest resources and metrics this object sees.
            retry_s: how long a server may be unreachable, as while it restarts, before a call raises StoreError.

        Raises:
            ConfigError: not an http(s) URL.
        """
        self.run_id = run_id
        self.token = token or os.environ.get(TOKEN_VARIABLE) or None
        self._connection = StoreConnection(url, self.token, retry_s)
        self._versions = Versions()

    @classmethod
    def from_url(cls, url: str, *, run_id: str, token: str | None) -> LightningStoreClient:
        """What ``create_store`` calls for ``http://`` and ``https://``."""
        return cls(url, token, run_id=run_id)

    def __reduce__(self) -> tuple[Any, ...]:
        connection = self._connection
        return _reconnect, (connection.url, connection.token, self.run_id, connection.retry_s)

    def with_run(self, run_id: str) -> LightningStoreClient:
        """The same store as seen from another run; the two share their connections."""
        view = copy.copy(self)
        view.run_id = run_id
        return view

    @property
    def capabilities(self) -> StoreCapabilities:
        """What the store behind the server can do; ``durable`` is False until the server has answered once."""
        features = self._connection.features or frozenset()
        return {"thread_safe": True, "durable": "durable" in features, "otlp_traces": True}

    @property
    def url(self) -> str:
        """Of the server, without a path."""
        return self._connection.url

    def otlp_traces_endpoint(self) -> str:
        """The URL of the server that takes OTLP/HTTP traces, with the token of the store or of an attempt."""
        return f"{self.url}/v1/traces"

    def attempt_token(
        self, rollout_id: str, attempt_id: str, *, lifetime_s: float = attempt_token.DEFAULT_LIFETIME_S
    ) -> str | None:
        """What to give an agent instead of the token of the store: good for the spans of this attempt, nothing else.

        Asks nobody. None when the store has no token, and the agent needs none either.
        """
        if self.token is None or self.token.startswith(attempt_token.PREFIX):
            return self.token  # whoever has been given the token of an attempt can give no other one
        secret = attempt_token.derive_secret(self.token)
        return attempt_token.mint(secret, rollout_id, attempt_id, time.time() + lifetime_s)

    async def statistics(self) -> dict[str, float]:
        statistics: dict[str, float] = await self._get("/statistics")
        return statistics

    async def close(self) -> None:
        """Closes the connections of all loops; the served store stays as it is."""
        await self._connection.close()


def _reconnect(url: str, token: str | None, run_id: str, retry_s: float) -> LightningStoreClient:
    return LightningStoreClient(url, token, run_id=run_id, retry_s=retry_s)
