"""``LLMProxy``: the gateway for users and algorithms."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal, get_args

from agentlightning.errors import ConfigError, ConflictError
from agentlightning.plugin.settings import require_least
from agentlightning.store.protocol import LightningStore
from agentlightning_plugins.gateway.backends.model_table import ModelTable
from agentlightning_plugins.gateway.backends.upstream import INTERVAL_S
from agentlightning_plugins.gateway.history import LateSystem
from agentlightning_plugins.gateway.launch import ServerProcess, ServerThread
from agentlightning_plugins.gateway.limits import PAUSE_WAIT_S, UsageLimits, read_limits
from agentlightning_plugins.gateway.remote import BaseGateway
from agentlightning_plugins.gateway.server import Settings
from agentlightning_plugins.shared.web.request import client_url, is_loopback

LaunchMode = Literal["thread", "process"]
_READ_TIMEOUT_S: Final = 600.0  # as in the openai client


class LLMProxy(BaseGateway):
    """A reverse proxy between agents and model servers, which records every call as a span.

    The URL of a call names its attempt: ``/rollout/{rollout_id}/attempt/{attempt_id}/v1``. Agents get this URL from
    their ``ProxyLLM`` resource, with a key that is valid for this attempt only and also names it. Recorded calls have
    the token ids and log-probabilities that training needs; the agent gets only what it requested. Calls without such
    a key are relayed but not recorded, or refused if keys are required.

    ``pause``, ``drain``, ``resume`` and ``status`` raise ConflictError if the gateway is not running. While it is
    paused, up to ten thousand calls wait, each up to ``pause_wait_s``; further calls get 429 with Retry-After.
    """

    _drain_s = 0.5  # a server in a process executes one command at a time, so other commands must get turns
    store: LightningStore | None
    """Store that records the calls; may be set before ``start``."""

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
        admit_strangers: bool = False,
        budget: Mapping[str, Any] | UsageLimits | None = None,
        read_timeout_s: float = _READ_TIMEOUT_S,
        health_interval_s: float = INTERVAL_S,
        pause_wait_s: float = PAUSE_WAIT_S,
        cache: bool = False,
        late_system: LateSystem = "keep",
        fail_attempts: bool = True,
        finish_s: float = 2.0,
    ) -> None:
        """Prepares the gateway; ``start`` opens it.

        Args:
            port: port to listen on; None chooses a free port.
            model_list: for each backend ``{"model_name": ..., "litellm_params": {"model": "hosted_vllm/<name>",
                "api_base": ..., "api_key": ...}}`` or ``{"model": ..., "endpoint": ..., "api_key": ...}``. Entries with
                the same name are backends of one model. ``api_key`` may be ``os.environ/NAME``, ``${NAME}`` or
                ``file:PATH``, whose file is read again when it changes. Each may have ``sampling_parameters``, which
                replace the parameters of every request; ``sampling_defaults``, for requests without these parameters;
                ``seed_calls``, to give each call a seed derived from ``metadata["seed"]`` of its rollout and the turn;
                ``weight``, its share of the calls; ``price``, with ``input_per_million`` and
                ``output_per_million``; and ``provider``.
            store: store that records the calls.
            host: address to listen on; None means 127.0.0.1.
            num_retries: how many times a call tries all backends of its model again after connect errors and statuses
                408, 409, 429, 500, 502, 503, 504 and 529.
            launch_mode: ``thread`` serves from a thread of this process, ``process`` from a separate process,
                for which the store must be served.
            require_keys: True: calls need the key of their attempt. False: a call without a key belongs to the attempt
                that its URL names. None: True, but on loopback, calls without a key are relayed and not recorded.
            admit_strangers: allows ``require_keys=False`` on an address that other machines reach.
            budget: limits of each attempt: any of ``calls``, ``tokens``, and ``cost`` by the models' prices.
            read_timeout_s: how long a backend may be silent.
            health_interval_s: seconds between two health checks of each backend.
            pause_wait_s: how long a call waits while the gateway is paused, before it gets status 429 with Retry-After;
                0 answers immediately.
            cache: whether a request at temperature 0 or with a seed gets the answer of an earlier call with the same
                request, if the store contains one. For prompt search and evaluation.
            late_system: ``user`` passes system messages after the first other message on as the user's, for chat
                templates that refuse them; ``keep`` passes them on unchanged.
            fail_attempts: whether an attempt fails if its last model call failed, even if its agent returns a reward.
            finish_s: how long calls in flight may take to end when the gateway stops; then they get an error.

        Raises:
            ConfigError: an entry of ``model_list`` or another value is invalid.
        """
        if launch_mode not in get_args(LaunchMode):
            raise ConfigError(f"launch_mode = {launch_mode!r}; modes: {', '.join(get_args(LaunchMode))}")
        if late_system not in get_args(LateSystem):
            raise ConfigError(f"late_system = {late_system!r}; give one of: {', '.join(get_args(LateSystem))}")
        require_least(0, num_retries=num_retries, pause_wait_s=pause_wait_s, finish_s=finish_s)
        require_least(0.001, read_timeout_s=read_timeout_s, health_interval_s=health_interval_s)
        host = host or "127.0.0.1"
        if require_keys is False and not is_loopback(host) and not admit_strangers:
            raise ConfigError(
                f"host = {host!r} lets other machines in, and require_keys is false: anyone could use the providers' "
                "keys; leave require_keys out, or set admit_strangers too"
            )
        self.store = store
        self._launch_mode = launch_mode
        self._settings = Settings(
            host=host,
            port=port or 0,
            num_retries=num_retries,
            require_keys=not is_loopback(host) if require_keys is None else require_keys,
            believe_urls=require_keys is False,
            limits=read_limits(budget),
            read_timeout_s=read_timeout_s,
            health_interval_s=health_interval_s,
            pause_wait_s=pause_wait_s,
            cache=cache,
            late_system=late_system,
            fails_attempts=fail_attempts,
            finish_s=finish_s,
            operator_key=secrets.token_urlsafe(32),
        )
        self._launched: ServerThread | ServerProcess | None = None
        self.update_model_list(model_list or [])

    @property
    def is_running(self) -> bool:
        return self._launched is not None and self._launched.is_alive

    @property
    def model_list(self) -> Sequence[Mapping[str, Any]]:
        """The models and backends, as in ``update_model_list``."""
        return tuple(self._settings.model_list)

    @property
    def operator_key(self) -> str:
        """Key that lets HTTP requests control this gateway, like its store's token; new for each object."""
        return self._settings.operator_key

    @property
    def endpoint(self) -> str:
        """Base URL for calls that are not recorded; known before ``start`` if the port is set.

        Raises:
            ConfigError: no port was given, and the gateway has not been started.
        """
        if not self._settings.port:
            raise ConfigError("the gateway has no port yet: start it first, or give it a port")
        return client_url(self._settings.host, self._settings.port) + "/v1"

    async def start(self) -> None:
        """Starts serving; does nothing if the gateway is already running.

        Raises:
            ConfigError: there is no store, a server process could not reach it, or the address cannot be bound.
        """
        if self._launched is not None:
            return
        if self.store is None:
            raise ConfigError("the gateway has no store to record calls in; give LLMProxy(store=...)")
        launch = ServerThread if self._launch_mode == "thread" else ServerProcess
        launched: ServerThread | ServerProcess = launch(self.store, self._settings)
        port = await asyncio.to_thread(launched.start)
        self._settings = replace(self._settings, port=port)
        self._launched = launched

    async def stop(self) -> None:
        """Stops serving and stores the recorded spans; does nothing if the gateway is not running."""
        launched, self._launched = self._launched, None
        if launched is not None:
            await asyncio.to_thread(launched.stop)

    async def flush(self) -> None:
        """Waits until every answered call is in the store; does nothing if the gateway is not running."""
        if self._launched is not None:
            await asyncio.to_thread(self._launched.call, "flush")

    async def resume(self, weight_version: int | None = None) -> None:
        await super().resume(weight_version)
        if weight_version is not None:  # for the next start
            self._settings = replace(self._settings, weight_version=weight_version)

    def update_model_list(self, model_list: Sequence[Mapping[str, Any]]) -> None:
        """Replaces models and backends from the next call on; calls in flight keep their backends.

        Raises:
            ConfigError: an entry is invalid; nothing changes.
        """
        names = ModelTable(model_list).names
        if self._launched is not None:
            self._launched.call("set_models", list(model_list))
        self._names, self._settings = names, replace(self._settings, model_list=list(model_list))

    async def _ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        if self._launched is None:
            raise ConflictError(f"the gateway is not running, so {path}() is not possible; start it first")
        answer: dict[str, Any] = await asyncio.to_thread(self._launched.call, "execute", path, body or {})
        return answer
