"""Redirects the model calls of this process to another server, regardless of the client that makes them."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import urlsplit

from agentlightning.errors import ConfigError
from agentlightning_plugins.shared.instrumentation import Patches

_CALLS: Final = ("/chat/completions", "/completions", "/responses", "/messages", "/embeddings")
_OTHER_APIS: Final = (":generateContent", ":streamGenerateContent", "/api/chat", "/api/generate", "/v2/chat")


@contextlib.contextmanager
def redirected(endpoint: str) -> Iterator[None]:
    """Redirects model calls of httpx, requests and aiohttp to ``endpoint``; calls to unsupported APIs raise."""

    def httpx_send(wrapped: Any, client: Any, args: Any, kwargs: Any) -> Any:
        request = args[0] if args else kwargs["request"]
        url = _find_url(request.method, str(request.url), getattr(request, "_content", b""), endpoint)
        if url is not None:
            request.url = type(request.url)(url)
            request.headers["Host"] = request.url.netloc.decode("ascii")
        return wrapped(*args, **kwargs)

    def requests_send(wrapped: Any, session: Any, args: Any, kwargs: Any) -> Any:
        request = args[0] if args else kwargs["request"]
        request.url = _find_url(request.method, request.url, request.body, endpoint) or request.url
        return wrapped(*args, **kwargs)

    def aiohttp_request(wrapped: Any, session: Any, args: Any, kwargs: Any) -> Any:
        method, url, *rest = args
        body = kwargs.get("json") or kwargs.get("data")
        return wrapped(method, _find_url(method, str(url), body, endpoint) or url, *rest, **kwargs)

    patches = Patches()
    for package, classes, method, wrapper in (
        ("httpx", ("Client", "AsyncClient"), "send", httpx_send),
        ("httpx2", ("Client", "AsyncClient"), "send", httpx_send),
        ("requests", ("Session",), "send", requests_send),
        ("aiohttp", ("ClientSession",), "_request", aiohttp_request),
    ):
        if importlib.util.find_spec(package) is not None:
            module = importlib.import_module(package)
            for name in classes:
                patches.wrap(getattr(module, name), method, wrapper)
    try:
        yield
    finally:
        patches.undo()


def _find_url(method: str, url: str, body: Any, endpoint: str) -> str | None:
    """Returns the URL of the same call at the endpoint, or None if the request is not a model call."""
    path = urlsplit(url).path
    if method.upper() != "POST":
        return None
    if path.endswith(_OTHER_APIS):
        raise ConfigError(f"{url} cannot be replayed: its API is neither OpenAI's nor Anthropic's; stub this call")
    call = next((call for call in _CALLS if path.endswith(call)), None)
    return None if call is None or not _names_a_model(body) else endpoint + call


def _names_a_model(body: Any) -> bool:
    if isinstance(body, str | bytes):
        try:
            body = json.loads(body)
        except ValueError:
            return False
    return isinstance(body, dict) and "model" in body
