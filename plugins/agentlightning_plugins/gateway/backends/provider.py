"""The component kind ``provider``: a kind of model server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Final, Protocol, Self

import aiohttp
from multidict import CIMultiDict, CIMultiDictProxy

if TYPE_CHECKING:
    from agentlightning_plugins.gateway.backends.backend import Backend


MAX_ANSWER_BYTES: Final = 256 * 2**20
"""Largest size of a whole answer or of a stream."""


class BackendContent(Protocol):
    """The body of an answer while it arrives."""

    async def readany(self) -> bytes:
        """Waits for data and returns all that has arrived; empty at the end."""

    def at_eof(self) -> bool:
        """Whether everything has been read."""


class BackendAnswer(Protocol):
    """The answer of a backend, such as an ``aiohttp.ClientResponse``."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> CIMultiDictProxy[str]: ...

    @property
    def content_type(self) -> str:
        """``text/event-stream`` for a stream."""

    @property
    def content(self) -> BackendContent: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@dataclass(eq=False)
class IteratedAnswer:
    """An answer from an iterator, which serves as the HTTP response and as its content."""

    pieces: AsyncIterator[bytes]
    content_type: str = "application/json"
    status: int = 200
    source: object = None
    """The stream behind ``pieces``, if it has to be closed too: closing a generator does not close its source."""
    is_over: bool = False

    @property
    def headers(self) -> CIMultiDictProxy[str]:
        return CIMultiDictProxy(CIMultiDict({"Content-Type": self.content_type}))

    @property
    def content(self) -> Self:
        return self

    async def readany(self) -> bytes:
        try:
            return await anext(self.pieces)
        except StopAsyncIteration:
            self.is_over = True
            return b""

    def at_eof(self) -> bool:
        return self.is_over

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in (self.pieces, self.source):
            close = getattr(stream, "aclose", None)
            if close is not None:
                await close()


async def once(body: bytes) -> AsyncIterator[bytes]:
    """Yields a whole body as one piece, for ``IteratedAnswer``."""
    yield body


class Provider:
    """A kind of model server with an HTTP API. Created once, without arguments, and shared by all its backends."""

    name: str = "openai"
    """OpenTelemetry's ``gen_ai.provider.name``."""
    endpoint: str | None = None
    """The default endpoint; None if the model list must state one."""
    dialects: frozenset[str] = frozenset({"openai-chat", "openai-completions", "openai-embeddings"})
    """Names of the dialects that the server speaks. Others are translated to ``openai-chat``, if that is included."""

    def url(self, endpoint: str, path: str) -> str:
        """Returns the URL of a path such as ``chat/completions``, below an endpoint without a trailing slash."""
        return f"{endpoint}/{path}"

    def authorize(self, api_key: str) -> Mapping[str, str]:
        """Returns the headers that carry a key."""
        return {"Authorization": f"Bearer {api_key}"}

    async def send(
        self, session: aiohttp.ClientSession, backend: Backend, path: str, body: bytes, headers: Mapping[str, str]
    ) -> BackendAnswer:
        """Sends a request and returns its answer, whose status and headers have arrived.

        ``headers`` include those of ``authorize``.

        Raises:
            TimeoutError, aiohttp.ClientError, OSError: no answer came; the call is retried, at this or another backend.
        """
        return await session.post(backend.url(path), data=body, headers=headers, allow_redirects=False)


class OpenAICompatible(Provider):
    """A server with OpenAI's Chat Completions, Completions and Embeddings."""


class VLLM(OpenAICompatible):
    """vLLM. Its own Responses and Messages APIs return no token ids, so calls of these are translated."""

    name = "vllm"


class OpenAI(Provider):
    """OpenAI."""

    endpoint = "https://api.openai.com/v1"
    dialects = Provider.dialects | {"openai-responses"}


class Anthropic(Provider):
    """Anthropic, and servers that speak its Messages API."""

    name = "anthropic"
    endpoint = "https://api.anthropic.com"
    dialects = frozenset({"anthropic-messages", "anthropic-count-tokens"})

    def url(self, endpoint: str, path: str) -> str:
        return f"{endpoint.removesuffix('/v1')}/v1/{path}"

    def authorize(self, api_key: str) -> Mapping[str, str]:
        return {"x-api-key": api_key}
