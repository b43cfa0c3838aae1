"""The request of one try: a call in the form that one backend understands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from agentlightning.frozen import FrozenDict
from agentlightning_plugins.gateway.backends.provider import ModelBackend
from agentlightning_plugins.gateway.dialects.dialect import Dialect, TokenOptions, Translation
from agentlightning_plugins.gateway.dialects.json_text import dump_json


class BackendRequest(NamedTuple):
    """One try of a call. Immutable: each try, at the same or another backend, has its own request."""

    backend: ModelBackend
    dialect: Dialect
    """The dialect of the request: the agent's, or Chat Completions with a ``translation``."""
    path: str
    """Path below ``/v1/`` of the backend, with the query of the agent's URL."""
    body: Mapping[str, Any]
    options: TokenOptions
    """The token data that the agent gets; the gateway keeps the rest for itself."""
    translation: Translation | None = None
    sampling: Mapping[str, Any] = FrozenDict()
    """Fields that the backend's entry in the model list sets."""

    def encode(self, fields: Mapping[str, Any]) -> bytes:
        """Returns the body with some fields set."""
        return dump_json({**self.body, **fields})
