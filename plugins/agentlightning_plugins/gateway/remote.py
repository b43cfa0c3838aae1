"""A gateway that ``agl gateway`` serves elsewhere, and what it has in common with one that this process serves."""

from __future__ import annotations

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from agentlightning.errors import ConfigError, suggest
from agentlightning.resources import ATTEMPT_KEY, LLM, ProxyLLM
from agentlightning.run import attempt_token
from agentlightning.store.protocol import LightningStore
from agentlightning_plugins.gateway.operation import ask_gateway


class BaseGateway(ABC):
    """The models of a gateway, as agents see them, and what its operators can do."""

    store: LightningStore | None
    """The store that records the calls."""
    _names: Sequence[str]
    _drain_s = 600.0
    """Seconds that a gateway may wait for its calls until it answers ``drain``."""

    @property
    @abstractmethod
    def endpoint(self) -> str:
        """Base URL for calls that are not recorded."""

    @property
    def models(self) -> list[str]:
        """The names that agents can use."""
        return list(self._names)

    def as_resource(
        self,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        model: str | None = None,
        sampling_parameters: Mapping[str, Any] | None = None,
    ) -> LLM | ProxyLLM:
        """Returns the resource with which agents call the gateway.

        Args:
            rollout_id: with ``attempt_id``, the result is an LLM whose calls belong to this attempt; without both, a
                ProxyLLM, from which each agent gets such an LLM.
            attempt_id: see ``rollout_id``.
            model: name of the model; None means the only one in the model list.
            sampling_parameters: sampling parameters for the agent.

        Raises:
            ConfigError: the model is unknown, or there are several and ``model`` is None.
            ValueError: one id was given without the other.
        """
        known = ", ".join(self._names) or "none yet"
        if model is None:
            if len(self._names) != 1:
                raise ConfigError(f"name the model that the resource is for: as_resource(model=...). Models: {known}")
            model = self._names[0]
        elif model not in self._names:
            raise ConfigError(f"no model {model!r}.{suggest(model, self._names)} Models: {known}")
        sampling = dict(sampling_parameters or {})
        resource = ProxyLLM(endpoint=self.endpoint, model=model, api_key=ATTEMPT_KEY, sampling_parameters=sampling)
        endpoint = resource.get_base_url(rollout_id, attempt_id)
        if rollout_id is None or attempt_id is None:
            return resource
        store_token, now = (None, time.time()) if self.store is None else (self.store.token, self.store.now())
        key = attempt_token.issue(store_token, rollout_id, attempt_id, now)
        return LLM(endpoint=endpoint, model=model, api_key=key, sampling_parameters=sampling)

    @abstractmethod
    async def _ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Sends a request of an operator, and returns the answer."""

    async def pause(self) -> None:
        """Makes new calls of all runs wait, so that weights can change; calls in flight continue."""
        await self._ask("pause", {})

    async def drain(self, timeout: float | None = None) -> bool:
        """Waits until no call is in flight; returns False after ``timeout`` seconds.

        Pause first, or new calls take the place of those that end.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            left_s = max(0.0, min(self._drain_s, deadline - time.monotonic()))
            if (await self._ask("drain", {"timeout_s": left_s}))["drained"]:
                return True
            if not left_s:
                return False

    async def resume(self, weight_version: int | None = None) -> None:
        """Lets calls continue.

        ``weight_version`` is recorded with calls whose backend does not state its own; None keeps the current version.
        """
        await self._ask("resume", {"weight_version": weight_version})

    async def status(self) -> dict[str, Any]:
        """Returns backends with their health, calls in flight and waiting, and the weight version, like ``/status``."""
        return await self._ask("status")


class RemoteGateway(BaseGateway):
    """A gateway that ``agl gateway`` serves, over the same store as the run; its operator chooses the models."""

    def __init__(self, url: str) -> None:
        """Connects at ``start``; raises ConfigError if ``url`` is not the http(s) URL of a gateway."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"gateway {url!r}: give the URL of an `agl gateway`, as in http://127.0.0.1:4000")
        self.store = None
        self._root = url.rstrip("/").removesuffix("/v1")
        self._names = []

    @property
    def endpoint(self) -> str:
        return f"{self._root}/v1"

    @property
    def model_list(self) -> Sequence[Mapping[str, Any]]:
        """The models, without their backends."""
        return [{"model": name, "endpoint": self.endpoint} for name in self._names]

    async def start(self) -> None:
        """Reads the names of the models.

        Raises:
            ConfigError: the run's store exists in this process only.
            StoreError: the gateway does not answer, or refuses the token of the store.
        """
        if self.store is not None and not self.store.capabilities["durable"] and not self.store.otlp_traces_endpoint():
            raise ConfigError(
                f"the gateway at {self._root} cannot record in a store of this process; give the store that it records "
                "in: Trainer(store=create_store('http://...'))"
            )
        status = await self.status()
        self._names = list(dict.fromkeys(backend["model"] for backend in status["backends"]))

    async def stop(self) -> None:
        """Does nothing: the gateway serves other runs too."""

    async def flush(self) -> None:
        """Does nothing: with a durable store, a call is stored before its agent gets the end of the answer."""

    def update_model_list(self, model_list: Sequence[Mapping[str, Any]]) -> None:
        """Raises ConfigError: the gateway's own configuration names the models."""
        raise ConfigError(
            f"the gateway at {self._root} serves the models of its own --config, and this algorithm has to serve its "
            "own model; leave `gateway` (llm_proxy) out, and the algorithm serves a gateway of the run"
        )

    async def _ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        token = None if self.store is None else self.store.token
        return await asyncio.to_thread(ask_gateway, self._root, token, path, body)
