"""``LLMProxy``: the gateway as users and algorithms hold it."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, get_args

from agentlightning.errors import ConfigError, ConflictError, suggest
from agentlightning.resources import ATTEMPT_KEY, LLM, ProxyLLM
from agentlightning.run import attempt_token
from agentlightning.store.protocol import LightningStore
from agentlightning_plugins.gateway.backends.backend import ModelTable
from agentlightning_plugins.gateway.backends.health import INTERVAL_S
from agentlightning_plugins.gateway.launch import ServerHandle, ServerProcess, ServerThread
from agentlightning_plugins.gateway.limits.admission import PAUSE_WAIT_S
from agentlightning_plugins.gateway.limits.budget import Budget, read_budget
from agentlightning_plugins.gateway.settings import READ_TIMEOUT_S, Settings

LaunchMode = Literal["thread", "process"]
_DRAIN_SLICE_S: Final = 0.5  # a server's process answers one question at a time, and must hear others meanwhile


class LLMProxy:
    """An OpenAI-compatible reverse proxy between agents and model servers, which records every call as a span.

    The URL of a call says whose it is: ``/rollout/{rollout_id}/attempt/{attempt_id}/v1``, which agents get by their
    ``ProxyLLM`` resource; the key that they get with it says it too, and is good for this attempt only. Recorded calls
    carry the token ids and log-probabilities that training needs; the agent sees only what it asked for. Calls to plain
    ``/v1`` without such a key are relayed and not recorded, or refused where keys are required.
    """

    store: LightningStore | None
    """Where calls are recorded. May be set until ``start``."""

    def __init__(
        self,
        port: int | None = None,
        model_list: Sequence[Mapping[str, Any]] | None = None,
        store: LightningStore | None = None,
        host: str | None = None,
        num_retries: int = 2,
        launch_mode: LaunchMode = "thread",
        *,
        require_keys: bool | None = None,
        budget: Mapping[str, Any] | Budget | None = None,
        read_timeout_s: float = READ_TIMEOUT_S,
        health_interval_s: float = INTERVAL_S,
        pause_wait_s: float = PAUSE_WAIT_S,
    ) -> None:
        """Prepares the gateway; ``start`` opens it.

        Args:
            port: to listen on; None takes a free one.
            model_list: for each backend ``{"model_name": ..., "litellm_params": {"model": "hosted_vllm/<name>",
                "api_base": ..., "api_key": ...}}`` or ``{"model": ..., "endpoint": ..., "api_key": ...}``. Entries of
                one name are backends of one model. ``api_key`` may be ``os.environ/NAME``. Each may have
                ``sampling_parameters``, which replace those of every request; ``weight``, its share of the calls;
                ``price``, with ``input_per_million`` and ``output_per_million``; and ``provider``.
            store: where calls are recorded.
            host: address to listen on; None means 127.0.0.1.
            num_retries: how often a call goes round its model's backends again after connect errors and statuses 408,
                409, 429 and 5xx.
            launch_mode: ``thread`` serves from a thread of this process, ``process`` from a process of its own, which
                needs a store that is served.
            require_keys: whether calls need the key of their attempt; None: on any address but loopback.
            budget: what each attempt may spend: any of ``calls``, ``tokens``, and ``cost`` by the models' prices.
            read_timeout_s: how long a backend may be silent.
            health_interval_s: between two looks at each backend.
            pause_wait_s: how long a call waits while the gateway is paused, before it gets status 429 with Retry-After;
                0 answers so at once.

        Raises:
            ConfigError: an entry of ``model_list`` or another value is not understood.
        """
        if launch_mode not in get_args(LaunchMode):
            raise ConfigError(f"launch_mode = {launch_mode!r}; modes: {', '.join(get_args(LaunchMode))}")
        if num_retries < 0:
            raise ConfigError(f"num_retries is {num_retries}; give 0 or more")
        for name, value in (("read_timeout_s", read_timeout_s), ("health_interval_s", health_interval_s)):
            if not value > 0:
                raise ConfigError(f"{name} is {value}; give a number above 0")
        if not pause_wait_s >= 0:
            raise ConfigError(f"pause_wait_s is {pause_wait_s}; give 0 or more")
        self.store = store
        self._bind_host = host or "127.0.0.1"
        self._port = port
        self._num_retries = num_retries
        self._launch_mode = launch_mode
        self._requires_keys = not _is_loopback(self._bind_host) if require_keys is None else require_keys
        self._budget = read_budget(budget)
        self._read_timeout_s = read_timeout_s
        self._health_interval_s = health_interval_s
        self._pause_wait_s = pause_wait_s
        self._weight_version: int | None = None
        self._model_list: list[Mapping[str, Any]] = []
        self._launched: ServerHandle | None = None
        self.update_model_list(model_list or [])

    @property
    def is_running(self) -> bool:
        """Whether it serves."""
        return self._launched is not None and self._launched.is_alive

    @property
    def models(self) -> list[str]:
        """The names that agents can ask for."""
        return list(self._names)

    @property
    def model_list(self) -> Sequence[Mapping[str, Any]]:
        """The models and backends that it serves, as ``update_model_list`` takes them."""
        return tuple(self._model_list)

    @property
    def endpoint(self) -> str:
        """Base URL that records nothing, as the ``openai`` client takes it; known before the start if the port is.

        Raises:
            ConfigError: the port is to be a free one, and the gateway has not been started.
        """
        if not self._port:
            raise ConfigError("the gateway has no port yet: start it first, or give it a port")
        host = _reachable_host(self._bind_host)
        return f"http://[{host}]:{self._port}/v1" if ":" in host else f"http://{host}:{self._port}/v1"

    async def start(self) -> None:
        """Begins to serve; harmless when it does.

        Raises:
            ConfigError: there is no store, the store cannot be reached from where the gateway is to run, or the address
                cannot be bound.
        """
        if self._launched is not None:
            return
        if self.store is None:
            raise ConfigError("the gateway has no store to record calls in; give LLMProxy(store=...)")
        settings = Settings(
            host=self._bind_host,
            port=self._port or 0,
            num_retries=self._num_retries,
            model_list=self._model_list,
            requires_keys=self._requires_keys,
            budget=self._budget,
            read_timeout_s=self._read_timeout_s,
            health_interval_s=self._health_interval_s,
            pause_wait_s=self._pause_wait_s,
            weight_version=self._weight_version,
        )
        launch = ServerThread if self._launch_mode == "thread" else ServerProcess
        launched: ServerHandle = launch(self.store, settings)
        try:
            self._port = await asyncio.to_thread(launched.start)
        except OSError as error:
            raise ConfigError(f"the gateway cannot listen on {self._bind_host}:{self._port or 0}: {error}") from error
        self._launched = launched

    async def stop(self) -> None:
        """Stops serving, after what it recorded is stored; harmless when it does not serve."""
        launched, self._launched = self._launched, None
        if launched is not None:
            await asyncio.to_thread(launched.stop)

    async def flush(self) -> None:
        """Returns when every call that has been answered is in the store; at once when the gateway does not serve."""
        if self._launched is not None:
            await self._ask("flush")

    async def pause(self) -> None:
        """Makes new calls wait, so that the weights of the models can change; calls in flight go on.

        A call waits for up to ``pause_wait_s``, with ten thousand others; beyond that it gets status 429 with
        Retry-After.

        Raises:
            ConflictError: the gateway does not serve.
        """
        await self._ask("pause")

    async def drain(self, timeout: float | None = None) -> bool:
        """Waits until no call is in flight, for up to ``timeout`` seconds; False when the time ran out.

        Pause first, else new calls take the place of those that end.

        Raises:
            ConflictError: the gateway does not serve.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left_s = _DRAIN_SLICE_S if deadline is None else min(_DRAIN_SLICE_S, deadline - time.monotonic())
            if await self._ask("drain", max(0.0, left_s)):
                return True
            if left_s <= 0:
                return False

    async def resume(self, weight_version: int | None = None) -> None:
        """Lets calls go on.

        Args:
            weight_version: of the weights from now on. It is recorded with the calls of backends that do not tell
                theirs. None leaves it as it is.

        Raises:
            ConflictError: the gateway does not serve.
        """
        await self._ask("resume", weight_version)
        if weight_version is not None:
            self._weight_version = weight_version

    async def status(self) -> dict[str, Any]:
        """Backends and their health, calls in flight and waiting, and the weight version; what ``/status`` tells.

        Raises:
            ConflictError: the gateway does not serve.
        """
        status: dict[str, Any] = await self._ask("status")
        return status

    def update_model_list(self, model_list: Sequence[Mapping[str, Any]]) -> None:
        """Replaces models and backends from the next call on; calls in flight go on where they are.

        Raises:
            ConfigError: an entry is not understood; nothing changes.
        """
        names = ModelTable(model_list).names
        if self._launched is not None:
            self._launched.ask("set_models", list(model_list))
        self._names, self._model_list = names, list(model_list)

    def as_resource(
        self,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        model: str | None = None,
        sampling_parameters: Mapping[str, Any] | None = None,
    ) -> LLM | ProxyLLM:
        """The resource that agents call the gateway by.

        Args:
            rollout_id: with ``attempt_id`` gives an LLM whose calls belong to this attempt; without both the result is
                a ProxyLLM, which becomes such an LLM when an agent gets it.
            attempt_id: see ``rollout_id``.
            model: None means the only one of the model list.
            sampling_parameters: for the agent to use.

        Raises:
            ConfigError: the model is unknown, or there are several and none was named.
            ValueError: one id was given without the other.
        """
        known = ", ".join(self._names) or "none yet"
        if model is None:
            if len(self._names) != 1:
                raise ConfigError(f"say which model the resource is for: as_resource(model=...). Models: {known}")
            model = self._names[0]
        elif model not in self._names:
            raise ConfigError(f"no model {model!r}.{suggest(model, self._names)} Models: {known}")
        resource = ProxyLLM(
            endpoint=self.endpoint,
            model=model,
            api_key=ATTEMPT_KEY,
            sampling_parameters=dict(sampling_parameters or {}),
        )
        endpoint = resource.get_base_url(rollout_id, attempt_id)
        if rollout_id is None or attempt_id is None:
            return resource
        store_token = self.store.token if self.store is not None else None
        return LLM(
            endpoint=endpoint,
            model=model,
            api_key=attempt_token.issue(store_token, rollout_id, attempt_id),
            sampling_parameters=resource.sampling_parameters,
        )

    async def _ask(self, command: str, *arguments: Any) -> Any:
        if self._launched is None:
            raise ConflictError(f"the gateway does not serve, so there is nothing to {command}; start it first")
        return await asyncio.to_thread(self._launched.ask, command, *arguments)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _reachable_host(host: str) -> str:
    """The address by which others reach a server that listens on ``host``: a wildcard is no address."""
    if host not in ("0.0.0.0", "::"):  # noqa: S104 # compared with, not bound to
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a documentation address: picks the outward interface, sends nothing
        except OSError:
            return "127.0.0.1"
        address: str = probe.getsockname()[0]
        return address
