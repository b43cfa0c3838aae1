"""The component kind ``provider``, a kind of model server; the backends, servers of these kinds; and their answers."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import logging
import re
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self, TypeAlias
from urllib.parse import quote

import aiohttp
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from agentlightning.run.proxies import find_proxy
from agentlightning_plugins.gateway.limits import Price

logger = logging.getLogger("agentlightning")
MAX_ANSWER_BYTES: Final = 256 * 2**20
"""Largest size of a whole answer or of a stream."""
MAX_EVENT_BYTES: Final = 8 * 2**20
"""Largest size of one event of a stream, or of an error."""


@contextlib.asynccontextmanager
async def idle_timeout(limit_s: float) -> AsyncIterator[Callable[[], None]]:
    """Raises TimeoutError from its block if the function that it yields is not called for ``limit_s`` seconds.

    The timer is moved only after a hundredth of the limit: a new timer for each piece of a stream, as in aiohttp's
    ``sock_read``, costs noticeable CPU time.
    """
    loop = asyncio.get_running_loop()
    moved_at = loop.time()

    def reset() -> None:
        nonlocal moved_at
        now = loop.time()
        if now > moved_at + limit_s / 100 and not timeout.expired():
            timeout.reschedule(now + limit_s)
            moved_at = now

    try:
        async with asyncio.timeout(limit_s) as timeout:
            yield reset
    except TimeoutError as error:
        if not timeout.expired():
            raise
        raise TimeoutError(f"it was silent for {limit_s:g} s") from error


@dataclass(eq=False)
class IteratedAnswer:
    """An answer from an iterator, which serves as the HTTP response and as its content."""

    pieces: AsyncIterator[bytes]
    content_type: str = "application/json"
    status: int = 200
    source: object = None
    """The stream behind ``pieces``, if it has to be closed too: closing a generator does not close its source."""
    is_over: bool = False
    more_headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def headers(self) -> CIMultiDictProxy[str]:
        headers = CIMultiDict(self.more_headers)
        headers["Content-Type"] = self.content_type
        return CIMultiDictProxy(headers)

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


BackendAnswer: TypeAlias = aiohttp.ClientResponse | IteratedAnswer
"""The answer of a backend, whose status and headers have arrived."""


async def once(body: bytes) -> AsyncIterator[bytes]:
    """Yields a whole body as one piece, for ``IteratedAnswer``."""
    yield body


_STARS: Final = b"***"
_ESCAPES: Final = (b"\\u", b"\\/", b"%", b"&#")
_MIN_SECRET: Final = 12
"""Shorter keys, such as EMPTY for a local server, are words that answers may contain."""


class KeyRedactor:
    """Replaces a key with asterisks: plain, in base64 or hex, and with characters escaped as in JSON, URLs or HTML."""

    def __init__(self, key: str | None) -> None:
        """Prepares a redactor; None means that there is nothing to redact."""
        data = (key or "").encode()
        self._is_secret = len(data) >= _MIN_SECRET
        self._literals = [data] if data else []
        if self._is_secret:
            hexadecimal = data.hex().encode()
            self._literals += [*_in_base64(data), hexadecimal, hexadecimal.upper(), quote(data, safe="").encode()]
            self._literals += [data.decode().encode(encoding) for encoding in ("utf-16-le", "utf-16-be")]
        self._literals = list(dict.fromkeys(self._literals))
        self._escaped = re.compile(b"".join(map(_any_form, data)))

    def redact_error(self, text: bytes) -> bytes:
        """Redacts any key, even one that may be a word."""
        for literal in self._literals:
            if literal in text:
                text = text.replace(literal, _STARS)
        if self._literals and any(escape in text for escape in _ESCAPES):
            text = self._escaped.sub(_STARS, text)
        return text

    def redact_answer(self, text: bytes) -> bytes:
        """Redacts a key that cannot be a word."""
        return self.redact_error(text) if self._is_secret else text


def _in_base64(data: bytes) -> list[bytes]:
    """Returns the base64 encodings of data at any position of a longer text, in both alphabets."""
    found = []
    for offset in range(3):
        encoded = base64.b64encode(b"\0" * offset + data)
        inner = encoded[-(-offset * 8 // 6) : (offset + len(data)) * 8 // 6]  # characters that encode only the data
        found += [inner, inner.translate(bytes.maketrans(b"+/", b"-_"))]
    return found


def _any_form(byte: int) -> bytes:
    """Returns a pattern of a character: itself, or escaped once or several times.

    Texts of agents reach the pattern, so its time must grow linearly: an escape is read from the beginning of its run
    of backslashes only, and never read again in part. Each alternative begins with a literal, which ``re`` finds fast.
    """
    first, second = (b"[%b%b]" % (digit, digit.upper()) for digit in (b"%x" % (byte >> 4), b"%x" % (byte & 15)))
    unicode = b"u00%b%b" % (first, second)
    forms = [
        re.escape(bytes([byte])),
        rb"\\(?<!\\\\)\\*+(?:/|%b)" % unicode if byte == ord("/") else rb"\\(?<!\\\\)\\*+%b" % unicode,
        b"%%(?:25)*+%b%b" % (first, second) if byte != ord("%") else b"%(?:25)++",
        b"&#(?:%d|[xX]%b%b);" % (byte, first, second),
    ]
    return b"(?:%b)" % b"|".join(forms)


_LENGTH_LIMITS: Final = {"max_tokens", "max_completion_tokens"}
"""Two names for the same parameter."""


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
        self, session: aiohttp.ClientSession, backend: ModelBackend, path: str, body: bytes, headers: Mapping[str, str]
    ) -> BackendAnswer:
        """Sends a request and returns its answer, whose status and headers have arrived.

        ``headers`` include what ``authorize`` returned.

        Raises:
            TimeoutError, aiohttp.ClientError, OSError: no answer came; the call is retried, at this or another backend.
        """
        url = backend.url(path)
        return await session.post(url, data=body, headers=headers, allow_redirects=False, proxy=backend.proxy)


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


@dataclass(slots=True)
class ModelBackend:
    """One endpoint of one model. Two are equal if their entries in the model lists are."""

    model: str
    """The name that agents use."""
    served_model: str
    """The name that the endpoint uses."""
    endpoint: str
    """Base URL without a trailing slash, usually ending in ``/v1``; empty if the provider needs none."""
    provider: Provider
    api_key: str | None = field(default=None, repr=False)
    sampling_parameters: Mapping[str, Any] = field(default_factory=dict)
    """Top-level fields that are set in every request, replacing the agent's."""
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Top-level fields that are set in requests without these fields."""
    seed_calls: bool = False
    """Whether each call of an attempt gets a seed derived from its rollout's seed."""
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The whole ``litellm_params``, for providers that read further parameters."""
    weight: float = 1.0
    """The share of the model's calls, relative to the other backends."""
    price: Price | None = None
    refused: frozenset[str] = field(default=frozenset(), compare=False)
    """Capture fields that this endpoint rejected with an error; they are not sent again."""
    retry_at: float = field(default=0.0, compare=False)
    """``time.monotonic()`` until which other endpoints are tried first."""
    failure: str | None = field(default=None, compare=False)
    """Why the backend is down; None if it is up. Backends that are down are tried last."""
    identity: bytes = field(init=False, repr=False)
    """Hash that is the same for the same backend in every process and every model list."""
    label: str = field(init=False, repr=False, compare=False)
    """Label in metrics: the endpoint, followed by ``#2`` for the model's second entry with it, and so on."""
    proxy: str | None = field(init=False, repr=False, compare=False)
    """URL of the proxy that the environment has for this endpoint."""
    redactor: KeyRedactor = field(init=False, repr=False, compare=False)
    """Removes the key from answers and errors of this endpoint."""
    _urls: dict[str, URL] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        text = "\0".join((self.model, self.served_model, self.endpoint, self.provider.name))
        self.identity = hashlib.blake2b(text.encode(), digest_size=16).digest()
        self.label = self.endpoint
        self.proxy = find_proxy(self.endpoint)
        self.redactor = KeyRedactor(self.api_key)

    @property
    def route(self) -> str:
        """The endpoint, and the proxy without its password, for errors."""
        proxy = None if self.proxy is None else URL(self.proxy).with_user(None)
        return self.endpoint if proxy is None else f"{self.endpoint} (through {proxy}, the proxy of the environment)"

    @property
    def is_up(self) -> bool:
        return self.failure is None

    def sampling_fields(self, body: Mapping[str, Any], seed: int | None) -> dict[str, Any]:
        """Returns the fields to set in a request, given the seed of the call."""
        given = {name for name, value in body.items() if value is not None}
        if given & _LENGTH_LIMITS:
            given |= _LENGTH_LIMITS
        fields = {name: value for name, value in self.sampling_defaults.items() if name not in given}
        fields.update(self.sampling_parameters)
        if self.seed_calls and seed is not None:
            fields["seed"] = seed
        return fields

    def mark(self, failure: str | None) -> None:
        """Records why the backend is down, or that it is up (None)."""
        if failure is not None and self.failure is None:
            logger.warning("backend %s of model %r is down: %s", self.endpoint, self.model, failure)
        elif failure is None and self.failure is not None:
            logger.warning("backend %s of model %r is up again", self.endpoint, self.model)
            self.retry_at = 0.0
        self.failure = failure

    def url(self, path: str) -> URL:
        """Returns the URL of a path such as ``chat/completions``; caches it unless the path has a query."""
        url = self._urls.get(path)
        if url is None:
            url = URL(self.provider.url(self.endpoint, path))
            if "?" not in path:
                self._urls[path] = url
        return url

    def authorize(self, headers: Mapping[str, str]) -> Mapping[str, str]:
        """Adds this endpoint's key to headers without one."""
        return headers if self.api_key is None else {**headers, **self.provider.authorize(self.api_key)}


def describe_error(error: Exception) -> str:
    """Describes a connection error in a few words."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
