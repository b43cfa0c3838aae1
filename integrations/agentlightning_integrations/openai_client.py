"""Clients of ``openai`` that call one attempt's endpoint; they share TLS settings, so that one costs a millisecond."""

from __future__ import annotations

import contextlib
import functools
import importlib
import ssl
from collections.abc import AsyncIterator, Iterator
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient, DefaultHttpxClient, OpenAI

from agentlightning.litagent.pickling import register_reducer
from agentlightning.resources import LLM


@contextlib.asynccontextmanager
async def async_client(llm: LLM) -> AsyncIterator[AsyncOpenAI]:
    """A client for one rollout, closed with it: connections belong to the event loop that opened them."""
    transport = DefaultAsyncHttpxClient(verify=_tls())
    async with AsyncOpenAI(
        base_url=llm.get_base_url(), api_key=llm.api_key or "unused", http_client=transport
    ) as client:
        yield client


@contextlib.asynccontextmanager
async def optional_client(llm: LLM | None) -> AsyncIterator[AsyncOpenAI | None]:
    """As ``async_client``; None where the framework's object keeps its own."""
    if llm is None:
        yield None
        return
    async with async_client(llm) as client:
        yield client


@contextlib.contextmanager
def sync_client(llm: LLM) -> Iterator[OpenAI]:
    """As ``async_client``, for code that does not await; threads may share it."""
    transport = DefaultHttpxClient(verify=_tls())
    with OpenAI(base_url=llm.get_base_url(), api_key=llm.api_key or "unused", http_client=transport) as client:
        yield client


@functools.cache
def _tls() -> ssl.SSLContext:
    package = DefaultHttpxClient.__mro__[1].__module__.partition(".")[0]  # httpx, or httpx2 from openai 3 on
    context: ssl.SSLContext = importlib.import_module(package).create_ssl_context()
    return context


def carry_clients() -> None:
    """Lets the clients that a framework's object holds travel to runner processes, without their connections."""
    for cls in (OpenAI, AsyncOpenAI):
        register_reducer(cls, _reduce)


def _reduce(client: Any) -> tuple[Any, tuple[Any, ...]]:
    settings = {
        "api_key": client.api_key,
        "organization": client.organization,
        "project": client.project,
        "base_url": str(client.base_url),
        "timeout": client.timeout,
        "max_retries": client.max_retries,
        "default_headers": dict(client._custom_headers),
        "default_query": dict(client._custom_query),
    }
    if hasattr(client, "_api_version"):  # of Azure
        settings["api_version"] = client._api_version
    return _make, (type(client), settings)


def _make(cls: type[Any], settings: dict[str, Any]) -> Any:
    return cls(**settings)
