"""The table of models and their backends: reading a model list, and load balancing."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import os
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from yarl import URL

from agentlightning.errors import ConfigError, PluginError, suggest
from agentlightning.plugin.registry import get_manager
from agentlightning_plugins.gateway.backends.provider import ModelBackend, Provider
from agentlightning_plugins.gateway.dialects.dialect import CallRefused
from agentlightning_plugins.gateway.limits import read_price
from agentlightning_plugins.shared.token import READ_S, is_key_file, read_key

logger = logging.getLogger("agentlightning")
_PREFIXES: Final = {
    "hosted_vllm": "vllm",
    "vllm": "vllm",
    "openai": "openai",
    "openai_like": "openai-compatible",
    "anthropic": "anthropic",
}
"""Our provider for each of LiteLLM's prefixes."""
_HOSTS: Final = {"api.openai.com": "openai", "api.anthropic.com": "anthropic"}
_ENVIRONMENT: Final = {"openai": "OPENAI", "anthropic": "ANTHROPIC"}
"""Prefixes of the variables ``_BASE_URL`` and ``_API_KEY`` that are used if an entry has no endpoint."""
_COMMON_KEYS: Final = ("sampling_parameters", "sampling_defaults", "seed_calls", "provider", "weight", "price")
_ENTRY_KEYS: Final = ("model_name", "litellm_params", *_COMMON_KEYS)
_PLAIN_KEYS: Final = ("model_name", "model", "endpoint", "api_key", *_COMMON_KEYS)
_LITELLM_KEYS: Final = ("model", "api_base", "api_key")
_HASH_RANGE: Final = float(2**64)
_FROM_ENVIRONMENT: Final = re.compile(r"os\.environ/(.+)|\$\{(\w+)\}")
"""A reference to an environment variable, as in LiteLLM or in configurations of ``agl train``."""
_providers: Final[dict[Any, Provider]] = {}
"""One provider of each kind. Providers have no state that depends on a model list."""


def _rank(backends: Sequence[ModelBackend], key: str) -> list[ModelBackend]:
    """Orders backends for a key by weighted rendezvous hashing.

    The score of a backend is -weight / ln(u), with u uniform in (0, 1) from the hash of key and backend; the highest
    score comes first. So each backend is first for its share of the keys, and a new or removed backend moves only its
    own keys. (Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998.)
    """

    def score(backend: ModelBackend) -> float:
        digest = hashlib.blake2b(key.encode(), digest_size=8, key=backend.identity).digest()
        uniform = (int.from_bytes(digest, "big") + 0.5) / _HASH_RANGE
        return math.inf if uniform >= 1.0 else -backend.weight / math.log(uniform)

    return sorted(backends, key=score, reverse=True)


class ModelTable:
    """The models of one ``model_list``. Entries with the same name are backends of one model."""

    def __init__(self, model_list: Sequence[Mapping[str, Any]]) -> None:
        """Reads a model list; raises ConfigError for an invalid entry."""
        self._backends: dict[str, list[ModelBackend]] = {}
        self._entries: Sequence[Mapping[str, Any]] = ()
        self.update(model_list)

    def update(self, model_list: Sequence[Mapping[str, Any]]) -> None:
        """Replaces the models; backends that have not changed remain the same objects and keep their health.

        Raises ConfigError if an entry is invalid; then nothing changes.
        """
        updated: dict[str, list[ModelBackend]] = {}
        known = {backend.identity: backend for backend in self.backends}
        seen: Counter[bytes | tuple[str, str]] = Counter()
        labels: list[tuple[ModelBackend, str]] = []
        for position, entry in enumerate(model_list):
            backend = _read_entry(entry, f"model_list[{position}]")
            _distinguish(backend, seen)
            same = known.get(backend.identity)
            if same == backend:
                labels.append((same, backend.label))  # which contains the number of the entry in this list
                backend = same
            updated.setdefault(backend.model, []).append(backend)
        self._backends, self._entries = updated, model_list
        for same, label in labels:
            same.label = label

    async def follow_keys(self) -> None:
        """Reads keys from their files again, until cancelled; if one cannot be read, no key changes."""
        problem = ""
        while True:
            await asyncio.sleep(READ_S)
            if any(is_key_file(_source(entry).get("api_key")) for entry in self._entries):
                try:
                    self.update(self._entries)
                    problem = ""
                except ConfigError as error:
                    if str(error) != problem:
                        problem = str(error)
                        logger.warning("%s; the keys stay as they were", problem)

    @property
    def names(self) -> list[str]:
        """The models that agents can use, in the order of the list."""
        return list(self._backends)

    @property
    def backends(self) -> list[ModelBackend]:
        """The backends of all models, model by model."""
        return [backend for backends in self._backends.values() for backend in backends]

    def route(self, model: str, rollout_id: str | None, now: float) -> list[ModelBackend]:
        """Returns the backends of a model in the order in which to try them; raises CallRefused for an unknown model.

        All calls of a rollout start at the same backend, for its prefix cache; other calls are distributed at random.
        Backends that are down, or failed a moment before ``now`` (``time.monotonic()``), come last.
        """
        backends = self._backends.get(model)
        if backends is None:
            known = ", ".join(self.names) or "none yet"
            raise CallRefused(404, f"no model {model!r}; models: {known}", "model_not_found")
        if len(backends) == 1:
            return backends
        order = _rank(backends, rollout_id or f"{random.getrandbits(64)}")
        return sorted(order, key=lambda backend: not backend.is_up or backend.retry_at > now)


def _source(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the mapping that has the model, the endpoint and the key of a valid entry."""
    source: Mapping[str, Any] = entry.get("litellm_params", entry)
    return source


def _distinguish(backend: ModelBackend, seen: Counter[bytes | tuple[str, str]]) -> None:
    """Numbers a backend that differs from an earlier one only in its key or settings, such as the region."""
    identity, place = backend.identity, (backend.model, backend.endpoint)
    seen.update((identity, place))
    if seen[identity] > 1:
        backend.identity = hashlib.blake2b(identity + b"%d" % seen[identity], digest_size=16).digest()
    if seen[place] > 1:
        backend.label += f"#{seen[place]}"


def _read_entry(entry: Mapping[str, Any], where: str) -> ModelBackend:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where} is {entry!r}; give a mapping with 'model' and 'endpoint'")
    kind, source, endpoint_key = entry.get("provider"), entry, "endpoint"
    is_litellm_form = "litellm_params" in entry
    _check_keys(entry, _ENTRY_KEYS if is_litellm_form else _PLAIN_KEYS, where)
    if is_litellm_form:
        source, where, endpoint_key = entry["litellm_params"], f"{where}['litellm_params']", "api_base"
        if not isinstance(source, Mapping):
            raise ConfigError(f"{where} is {source!r}; give a mapping with 'model' and 'api_base'")
        if kind != "litellm":
            _check_keys(source, _LITELLM_KEYS, where)
    served, endpoint, key = source.get("model"), source.get(endpoint_key), source.get("api_key")
    if not isinstance(served, str) or not served:
        raise ConfigError(f"{where} needs 'model', got {served!r}")
    prefix, _, rest = served.partition("/")
    if is_litellm_form and kind != "litellm" and rest and prefix in _PREFIXES:
        served, kind = rest, kind or _PREFIXES[prefix]
        if kind == "openai" and endpoint is not None:  # LiteLLM uses this prefix for OpenAI-compatible servers too
            kind = None
    host = urlsplit(endpoint).hostname if isinstance(endpoint, str) else None
    provider = _find_provider(kind or _HOSTS.get(host or "", "openai-compatible"), where)
    if not endpoint:
        environment = _ENVIRONMENT.get(kind or "")
        if environment is not None:
            endpoint = os.environ.get(f"{environment}_BASE_URL")
            key = key or os.environ.get(f"{environment}_API_KEY")
        endpoint = endpoint or provider.endpoint
    if endpoint is None:
        raise ConfigError(
            f"{where} needs {endpoint_key!r}, the base URL of an OpenAI-compatible endpoint of {served!r}, "
            "or a 'provider'"
        )
    return ModelBackend(
        model=entry.get("model_name") or served,
        served_model=served,
        endpoint=_read_endpoint(endpoint, where) if endpoint else "",
        provider=provider,
        api_key=_read_key(key, where),
        sampling_parameters=dict(entry.get("sampling_parameters") or {}),
        sampling_defaults=dict(entry.get("sampling_defaults") or {}),
        seed_calls=bool(entry.get("seed_calls")),
        settings=dict(source) if is_litellm_form else {},
        weight=_read_weight(entry.get("weight", 1.0), where),
        price=read_price(entry.get("price"), where),
    )


def _check_keys(given: Iterable[object], known: Sequence[str], where: str) -> None:
    for key in given:
        if key not in known:
            raise ConfigError(f"{where} has no key {key!r}.{suggest(str(key), known)} Keys: {', '.join(known)}.")


def _find_provider(kind: Any, where: str) -> Provider:
    if kind not in _providers:
        try:
            _providers[kind] = get_manager().create("provider", kind)
        except PluginError as error:
            raise ConfigError(f"{where}: {error}") from error
    return _providers[kind]


def _read_endpoint(endpoint: Any, where: str) -> str:
    try:
        url = URL(endpoint)
    except (TypeError, ValueError):
        url = URL()
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"{where}: the endpoint {endpoint!r} is not an http(s) URL such as http://127.0.0.1:8000/v1")
    if url.user or url.password:
        raise ConfigError(f"{where}: the endpoint of {url.host} contains credentials; give them as api_key")
    return str(endpoint).rstrip("/")


def _read_weight(weight: Any, where: str) -> float:
    if not isinstance(weight, (int, float)) or not 0 < weight < math.inf:
        raise ConfigError(f"{where}: weight is {weight!r}; give a number above 0")
    return float(weight)


def _read_key(key: Any, where: str) -> str | None:
    if key is None or key == "":
        return None
    if not isinstance(key, str):
        raise ConfigError(f"{where}: api_key is a {type(key).__name__}; give a string")
    try:
        secret = read_key(key) or ""
    except ConfigError as error:
        raise ConfigError(f"{where}: api_key: {error}") from error
    found = _FROM_ENVIRONMENT.fullmatch(secret)
    if found is None:
        return secret
    name = found[1] or found[2]
    if name not in os.environ:
        raise ConfigError(f"{where}: api_key names the environment variable {name}, which is not set")
    return os.environ[name] or None
