from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Final

from aiohttp import web
from pydantic_core import to_json

from agentlightning.event import Event
from agentlightning.store.protocol import LightningStore
from agentlightning_plugins.store_server.polling import Polls

logger = logging.getLogger("agentlightning")

_KEEPALIVE_S: Final = 15.0


async def stream_events(
    request: web.Request, store: LightningStore, kinds: Sequence[str] | None, polls: Polls
) -> web.StreamResponse:
    """Answers with server-sent events: ``event`` is the kind, ``data`` the event as JSON.

    The headers are sent when the subscription stands, so a client that has them misses nothing that happens afterwards.
    """
    events = store.subscribe(kinds)
    coming = asyncio.ensure_future(_next(events))
    try:
        await asyncio.wait({coming}, timeout=0)
        if coming.done():
            coming.result()  # refused, unless something has happened already
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "cache-control": "no-store"})
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):  # the client has left
            await response.write(b": subscribed\n\n")
            while True:
                try:
                    event = await polls.wait(coming, _KEEPALIVE_S)
                except TimeoutError:
                    await response.write(b": still here\n\n")
                    continue
                except Exception:  # isolation point: the headers are out, so all we can do is end the stream
                    logger.exception("a stream of events broke off")
                    break
                if event is None:
                    break
                coming = asyncio.ensure_future(_next(events))
                await response.write(b"event: %s\ndata: %s\n\n" % (event.kind.encode(), to_json(event)))
        return response
    finally:
        coming.cancel()
        await asyncio.wait({coming})
        close = getattr(events, "aclose", None)  # a generator has it, an iterator need not
        if close is not None:
            await close()


async def _next(events: AsyncIterator[Event]) -> Event | None:
    return await anext(events, None)
