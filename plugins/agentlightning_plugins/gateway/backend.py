"""Which endpoints serve which model, and in what order a call tries them."""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from yarl import URL

from agentlightning.errors import ConfigError, suggest

_PROVIDERS: Final = {"hosted_vllm": "vllm", "vllm": "vllm", "openai": "openai", "openai_like": "openai"}
"""LiteLLM's prefixes for OpenAI-compatible endpoints, and OpenTelemetry's ``gen_ai.provider.name`` for each."""
_OPENAI_ENDPOINT: Final = "https://api.openai.com/v1"
_ENTRY_KEYS: Final = ("model_name", "litellm_params", "sampling_parameters")
_PLAIN_KEYS: Final = ("model_name", "model", "endpoint", "api_key", "sampling_parameters")
_LITELLM_KEYS: Final = ("model", "api_base", "api_key")


@dataclass(slots=True, eq=False)
class Backend:
    """One OpenAI-compatible endpoint of one model."""

    model: str
    """The name that agents use."""
    served_model: str
    """The name that the endpoint knows it by."""
    endpoint: str
    """Base URL without a trailing slash, usually ending in ``/v1``."""
    provider: str = "openai"
    api_key: str | None = field(default=None, repr=False)
    sampling_parameters: Mapping[str, Any] = field(default_factory=dict)
    """Top-level fields that replace those of every request."""
    refused: frozenset[str] = frozenset()
    """Fields of ours that this endpoint answered with an error; they are not sent again."""
    retry_at: float = 0.0
    """``time.monotonic()`` before which other endpoints are tried first."""
    _urls: dict[str, URL] = field(default_factory=dict, repr=False)

    def url(self, path: str) -> URL:
        """The URL of ``chat/completions`` and the like; parsed once."""
        url = self._urls.get(path)
        if url is None:
            url = self._urls[path] = URL(f"{self.endpoint}/{path}")
        return url

    def authorize(self, headers: Mapping[str, str]) -> Mapping[str, str]:
        """Adds this endpoint's own key to headers that have none."""
        return headers if self.api_key is None else {**headers, "Authorization": f"Bearer {self.api_key}"}


class ModelTable:
    """The models of one ``model_list``. Several entries of one name are several backends of that model."""

    def __init__(self, model_list: Sequence[Mapping[str, Any]]) -> None:
        """Reads a model list.

        Raises:
            ConfigError: an entry with an unknown or missing key.
        """
        self._backends: dict[str, list[Backend]] = {}
        self._turn = itertools.count()
        for position, entry in enumerate(model_list):
            backend = _read_entry(entry, f"model_list[{position}]")
            self._backends.setdefault(backend.model, []).append(backend)

    @property
    def names(self) -> list[str]:
        """The models that agents can ask for, in the order of the list."""
        return list(self._backends)

    def route(self, model: str, rollout_id: str | None, now: float) -> list[Backend]:
        """The backends of a model in the order in which to try them.

        Calls of one rollout begin at the same backend, so that its prefix cache helps; calls without a rollout take
        turns. Backends that failed a moment ago come last.

        Args:
            model: as the agent named it; unknown gives an empty list.
            rollout_id: whose call it is.
            now: ``time.monotonic()``.
        """
        backends = self._backends.get(model)
        if backends is None or len(backends) == 1:
            return backends or []
        start = next(self._turn) if rollout_id is None else zlib.crc32(rollout_id.encode())
        start %= len(backends)
        order = backends[start:] + backends[:start]
        return sorted(order, key=lambda backend: backend.retry_at > now)


def _read_entry(entry: Mapping[str, Any], where: str) -> Backend:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where} is {entry!r}; give a mapping with 'model' and 'endpoint'")
    if "litellm_params" in entry:
        _check_keys(entry, _ENTRY_KEYS, where)
        params, where = entry["litellm_params"], f"{where}['litellm_params']"
        if not isinstance(params, Mapping):
            raise ConfigError(f"{where} is {params!r}; give a mapping with 'model' and 'api_base'")
        _check_keys(params, _LITELLM_KEYS, where)
        prefix, _, rest = _text(params, "model", where).partition("/")
        provider = _PROVIDERS.get(prefix) if rest else None
        served = rest if provider is not None else _text(params, "model", where)
        endpoint, key, model = params.get("api_base"), params.get("api_key"), entry.get("model_name")
        if endpoint is None and prefix == "openai":
            endpoint = os.environ.get("OPENAI_BASE_URL") or _OPENAI_ENDPOINT
            key = key or os.environ.get("OPENAI_API_KEY")
        if endpoint is None:
            raise ConfigError(f"{where} needs 'api_base', the base URL of an OpenAI-compatible endpoint of {served!r}")
    else:
        _check_keys(entry, _PLAIN_KEYS, where)
        served, provider = _text(entry, "model", where), None
        endpoint, key, model = _text(entry, "endpoint", where), entry.get("api_key"), entry.get("model_name")
    return Backend(
        model=model or served,
        served_model=served,
        endpoint=_read_endpoint(endpoint, where),
        provider=provider or "openai",
        api_key=_read_key(key, where),
        sampling_parameters=dict(entry.get("sampling_parameters") or {}),
    )


def _check_keys(entry: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in entry:
        if key not in known:
            raise ConfigError(f"{where} has no key {key!r}.{suggest(str(key), known)} Keys: {', '.join(known)}.")


def _text(entry: Mapping[str, Any], key: str, where: str) -> str:
    value = entry.get(key)
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{where} needs {key!r}, got {value!r}")
    return value


def _read_endpoint(endpoint: Any, where: str) -> str:
    try:
        url = URL(endpoint)
    except (TypeError, ValueError):
        url = URL()
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"{where}: the endpoint {endpoint!r} is not an http(s) URL such as http://127.0.0.1:8000/v1")
    if url.user or url.password:
        raise ConfigError(f"{where}: the endpoint of {url.host} carries credentials; give them as api_key")
    return str(endpoint).rstrip("/")


def _read_key(key: Any, where: str) -> str | None:
    if key is None or key == "":
        return None
    if not isinstance(key, str):
        raise ConfigError(f"{where}: api_key is a {type(key).__name__}; give a string")
    prefix = "os.environ/"  # LiteLLM's way to keep keys out of files
    if key.startswith(prefix):
        name = key.removeprefix(prefix)
        if name not in os.environ:
            raise ConfigError(f"{where}: api_key names the environment variable {name}, which is not set")
        return os.environ[name]
    return key
