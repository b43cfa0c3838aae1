"""Pages that plugins add to the server of a store: components of the kind ``pages``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from aiohttp import web


class Pages(Protocol):
    """HTML pages. They check access themselves, because a browser sends a cookie and not the store's token."""

    def routes(self) -> Iterable[web.RouteDef]:
        """Returns the routes, outside of ``/v1``. Their handlers also answer requests that are not admitted."""
        ...

    def admits(self, request: web.Request) -> bool:
        """Whether a request comes from a client that has signed in; others keep their connection only briefly."""
        ...

    def replace_tokens(self, tokens: Sequence[str]) -> None:
        """Accepts these tokens of the store from now on."""
        ...

    async def stop(self) -> None:
        """Ends open-ended answers, such as streams."""
        ...
