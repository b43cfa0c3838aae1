"""``agl train --dry-run``: checks a run without starting it."""

from __future__ import annotations

import asyncio
import http.client
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

from agentlightning.errors import LightningError
from agentlightning.resources import LLM, resolve_secrets
from agentlightning.store.factory import create_store
from agentlightning_plugins.shared.configuration.assembly import Parts, check_setup, expand
from agentlightning_plugins.shared.configuration.config import TrainConfig
from agentlightning_plugins.shared.terminal import shorten

_TIMEOUT_S = 5.0


def check_run(config: TrainConfig, parts: Parts, say: Callable[[str], object]) -> bool:
    """Reports one line about each part; returns whether all are valid."""
    say(f"ok    agent        {parts.agent!r}")
    for name, dataset in (("train", parts.train), ("val", parts.val)):
        if dataset is not None:
            say(f"ok    data.{name:<8}{len(dataset)} tasks; the first: {shorten(repr(dataset[0]), 80)}")
    for key, component in parts.components.items():
        several = component if isinstance(component, list) else [component]
        say(f"ok    {key:<13}{', '.join(type(each).__name__ for each in several)}")
    is_fine = True
    for what, problem in _problems(config, parts):
        is_fine &= problem is None
        say(f"ok    {what}" if problem is None else f"WRONG {what}: {problem}")
    return is_fine


def _problems(config: TrainConfig, parts: Parts) -> Iterator[tuple[str, str | None]]:
    if config.store is not None and not config.store.startswith(("memory://", "sqlite://")):
        yield "store", _try_store(expand(config.store))
    for name, resource in resolve_secrets(parts.resources or {}).items():
        if isinstance(resource, LLM):
            yield f"resources.{name:<13}{resource.endpoint}", _try_endpoint(resource.endpoint, resource.api_key)
    try:
        called = check_setup(config, parts)
    except LightningError as error:
        yield "algorithm", str(error)
        return
    for endpoint, key in dict.fromkeys((each.endpoint, each.api_key) for each in called):
        yield f"algorithm    {endpoint}", _try_endpoint(endpoint, key)


def _try_store(url: str) -> str | None:
    async def ask() -> None:
        store = create_store(url)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await store.statistics()
        finally:
            await store.close()

    try:
        asyncio.run(ask())
    except (LightningError, OSError, TimeoutError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _try_endpoint(endpoint: str, key: str | None) -> str | None:
    """Lists the models, a request that costs nothing. Returns the problem, or None if the server answers."""
    request = urllib.request.Request(endpoint.rstrip("/") + "/models")  # noqa: S310 # the user's own endpoint
    if key is not None:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S):  # noqa: S310 # as above
            return None
    except urllib.error.HTTPError as error:
        with error:
            return f"answers {error.code} {error.reason}" if error.code in (401, 403) or error.code >= 500 else None
    except (OSError, ValueError, http.client.HTTPException) as error:
        return f"cannot be reached: {getattr(error, 'reason', error)}"
