"""The request of one try: a call in the form that one backend understands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from agentlightning.frozen import FrozenDict
from agentlightning_plugins.gateway.backends.backend import Backend
from agentlightning_plugins.gateway.dialects.dialect import Dialect, TokenOptions, Translation, TranslationError
from agentlightning_plugins.gateway.dialects.fields import CHAT_FIELDS
from agentlightning_plugins.gateway.dialects.json_text import dump_json
from agentlightning_plugins.gateway.dialects.openai import CHAT
from agentlightning_plugins.gateway.recording.call import Call


class BackendRequest(NamedTuple):
    """One try of a call. Immutable: each try, at the same or another backend, has its own request."""

    backend: Backend
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


def prepare(call: Call, backend: Backend) -> BackendRequest:
    """Prepares a call for a backend, with the backend's sampling parameters.

    Raises:
        TranslationError: the backend speaks neither the agent's dialect nor one that the call can be translated to.
        Exception: one of ``MALFORMED``, if the request is malformed.
    """
    spoken, dialect = backend.provider.dialects, call.dialect
    if dialect.name in spoken:
        path = f"{dialect.path}?{call.query}" if call.query else dialect.path
        sampling = backend.sampling_fields(call.body, call.seed)
        return BackendRequest(backend, dialect, path, call.body, _options(call, dialect, call.body), None, sampling)
    translation = dialect.translate(call.body) if CHAT.name in spoken else None
    if translation is None:
        raise TranslationError(
            f"{backend.endpoint} of model {call.model!r} does not speak {dialect.name}, only "
            f"{', '.join(sorted(spoken))}; set the entry's 'provider' if it does, or to 'litellm'"
        )
    body = {name: value for name, value in translation.request().items() if name in CHAT_FIELDS}
    sampling = backend.sampling_fields(body, call.seed)
    return BackendRequest(backend, CHAT, CHAT.path, body, _options(call, CHAT, body), translation, sampling)


def _options(call: Call, dialect: Dialect, body: Mapping[str, Any]) -> TokenOptions:
    """Returns the token options of a request; the answers to calls that are not recorded pass unchanged."""
    return TokenOptions(True, True) if call.attempt is None else dialect.read_token_options(body)
