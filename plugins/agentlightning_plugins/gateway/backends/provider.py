"""How kinds of model servers are spoken to: the component kind ``provider``."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

import aiohttp
from multidict import CIMultiDictProxy

if TYPE_CHECKING:
    from agentlightning_plugins.gateway.backends.backend import Backend


class BackendContent(Protocol):
    """The body of an answer, as it arrives."""

    async def readany(self) -> bytes:
        """What has arrived, waiting for something if nothing has; nothing at the end."""
        ...

    def at_eof(self) -> bool:
        """Whether all has been read."""
        ...


class BackendAnswer(Protocol):
    """What a backend answered; an ``aiohttp.ClientResponse`` is one."""

    @property
    def status(self) -> int:
        """As in HTTP."""
        ...

    @property
    def headers(self) -> CIMultiDictProxy[str]:
        """As in HTTP."""
        ...

    @property
    def content_type(self) -> str:
        """``text/event-stream`` makes it a stream."""
        ...

    @property
    def content(self) -> BackendContent:
        """To read a stream by."""
        ...

    async def read(self) -> bytes:
        """The whole body."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Provider(Protocol):
    """A kind of model server. Made once, without arguments, and shared by all its backends."""

    @property
    def name(self) -> str:
        """OpenTelemetry's ``gen_ai.provider.name``."""
        ...

    @property
    def dialects(self) -> frozenset[str]:
        """The names of the dialects that it speaks itself. Others are translated to ``openai-chat`` if that is one."""
        ...

    @property
    def endpoint(self) -> str | None:
        """Where it is when a model list does not say; None when it must say."""
        ...

    def url(self, endpoint: str, path: str) -> str:
        """The URL of a dialect's path.

        Args:
            endpoint: as in the model list, without a trailing slash.
            path: such as ``chat/completions``.
        """
        ...

    def authorize(self, api_key: str) -> Mapping[str, str]:
        """The headers that carry a key."""
        ...

    async def send(
        self, session: aiohttp.ClientSession, backend: Backend, path: str, body: bytes, headers: Mapping[str, str]
    ) -> BackendAnswer:
        """Sends a request and returns its answer, of which status and headers have arrived.

        Args:
            session: the gateway's connections.
            backend: to whom.
            path: of one of ``dialects``, such as ``chat/completions``.
            body: JSON.
            headers: those of the agent that may go on, with those of ``authorize``.

        Raises:
            TimeoutError, aiohttp.ClientError, OSError: there is no answer; the call is tried again, or elsewhere.
        """
        ...


class HttpProvider(Provider):
    """A kind of model server that is spoken to over HTTP, with its key in a header."""

    name: str = "openai"
    endpoint: str | None = None
    dialects: frozenset[str] = frozenset({"openai-chat", "openai-completions", "openai-embeddings"})

    def url(self, endpoint: str, path: str) -> str:
        return f"{endpoint}/{path}"

    def authorize(self, api_key: str) -> Mapping[str, str]:
        return {"Authorization": f"Bearer {api_key}"}

    async def send(
        self, session: aiohttp.ClientSession, backend: Backend, path: str, body: bytes, headers: Mapping[str, str]
    ) -> BackendAnswer:
        return await session.post(backend.url(path), data=body, headers=headers, allow_redirects=False)


class OpenAICompatible(HttpProvider):
    """A server that speaks Chat Completions, Completions and Embeddings as OpenAI does."""


class VLLM(OpenAICompatible):
    """vLLM. Its own Responses and Messages tell no token ids, so those are translated."""

    name = "vllm"


class OpenAI(HttpProvider):
    """OpenAI itself."""

    endpoint = "https://api.openai.com/v1"
    dialects = HttpProvider.dialects | {"openai-responses"}


class Anthropic(HttpProvider):
    """Anthropic itself, and servers that speak its Messages."""

    name = "anthropic"
    endpoint = "https://api.anthropic.com"
    dialects = frozenset({"anthropic-messages", "anthropic-count-tokens"})

    def url(self, endpoint: str, path: str) -> str:
        return f"{endpoint.removesuffix('/v1')}/v1/{path}"

    def authorize(self, api_key: str) -> Mapping[str, str]:
        return {"x-api-key": api_key}
