from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import os
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final, TypeVar
from urllib.parse import urlencode
from weakref import WeakKeyDictionary

from pydantic import ConfigDict, TypeAdapter
from pydantic_core import from_json

from agentlightning.errors import NotFoundError, StoreError
from agentlightning.event import EVENT_KINDS, Event
from agentlightning.resources import Resource, ResourcesUpdate, split_version_id
from agentlightning.run import attempt_token
from agentlightning.store.capabilities import StoreCapabilities
from agentlightning.store.check import check_run_id, check_span
from agentlightning.store.waiting import deadline_after
from agentlightning.types import (
    DEFAULT_RUN_ID,
    AttemptedRollout,
    EnqueueRolloutRequest,
    PaginatedResult,
    Rollout,
    Span,
    new_rollout_id,
)
from agentlightning_plugins.shared.paging import every
from agentlightning_plugins.stores.http.client.connection import StoreConnection
from agentlightning_plugins.stores.http.message import MAX_POLL_S
from agentlightning_plugins.stores.http.methods import RemoteMethods
from agentlightning_plugins.stores.http.route import Route, read_record, read_rollout

_EVENT: Final[TypeAdapter[Event]] = TypeAdapter(Event, config=ConfigDict(defer_build=True))
_RELEASE_S: Final = 2.0
_CACHED_VERSIONS: Final = 64
_DELETED_AT_ONCE: Final = 500

U = TypeVar("U", ResourcesUpdate, ResourcesUpdate | None)


class LightningStoreClient(RemoteMethods):
    """A store that is served by this or another machine.

    May be used from several threads, event loops and processes: it pickles as URL, token and run. A request whose
    answer was lost is repeated if that is harmless, and raises StoreError otherwise, as does an unreachable server.
    """

    def __init__(
        self, url: str, token: str | None = None, *, run_id: str = DEFAULT_RUN_ID, retry_s: float = 30.0
    ) -> None:
        """Connects at the first request.

        Args:
            url: URL of the server, such as ``http://127.0.0.1:4747``, or URLs of several servers of the same store,
                separated by commas: a client uses one of them, and the next when that fails.
            token: the token that the server was started with; None takes AGL_TOKEN, or the first line of the
                file AGL_TOKEN_FILE, from the environment. The file may change at any time.
            run_id: the run whose queue, latest resources and metrics this object sees.
            retry_s: how long a server may be unreachable, such as during a restart, before a call raises StoreError.

        Raises:
            ConfigError: not an http(s) URL.
        """
        self.run_id = check_run_id(run_id)
        self._connection = StoreConnection(url, token, retry_s)
        self._versions = _VersionCache()
        self._reads: dict[tuple[asyncio.AbstractEventLoop, str], asyncio.Task[ResourcesUpdate | None]] = {}
        """Reads of the newest version of a snapshot that are not sent yet."""

    @classmethod
    def from_url(cls, url: str, *, run_id: str, token: str | None) -> LightningStoreClient:
        """Called by ``create_store`` for ``http://`` and ``https://``."""
        return cls(url, token, run_id=run_id)

    def __reduce__(self) -> tuple[Any, ...]:
        connection = self._connection
        connect = functools.partial(LightningStoreClient, run_id=self.run_id, retry_s=connection.retry_s)
        return connect, (self.urls, self.token)

    def with_run(self, run_id: str) -> LightningStoreClient:
        """Returns the same store as seen from another run; both objects share their connections."""
        view = copy.copy(self)
        view.run_id = run_id
        return view

    @property
    def capabilities(self) -> StoreCapabilities:
        """Capabilities of the store behind the server; ``durable`` is False until the server has answered once."""
        features = self._connection.features or frozenset()
        return {"thread_safe": True, "durable": "durable" in features, "otlp_traces": True}

    @property
    def url(self) -> str:
        """URL of the server, without a path."""
        return self._connection.url

    @property
    def token(self) -> str | None:
        """The token in use."""
        return next(iter(self._connection.tokens), None)

    @token.setter
    def token(self, token: str | None) -> None:
        self._connection.tokens = (token,) if token else ()

    @property
    def tokens(self) -> Sequence[str]:
        return self._connection.tokens

    @property
    def given_token(self) -> str | None:
        """The token that was given to the constructor; None: the token follows the environment."""
        return self._connection.given_token

    @property
    def urls(self) -> str:
        """The URLs of all servers, separated by commas."""
        return ",".join(self._connection.urls)

    def now(self) -> float:
        return self._connection.clock.now()

    def otlp_traces_endpoint(self) -> str:
        """Returns the server's URL for OTLP/HTTP traces, to be sent with the token of the store or of an attempt."""
        return f"{self.url}/v1/traces"

    def attempt_token(
        self, rollout_id: str, attempt_id: str, *, lifetime_s: float = attempt_token.DEFAULT_LIFETIME_S
    ) -> str | None:
        """Makes a token with which an agent can only write this attempt's spans and read its rollout.

        Sends no request. Returns None if the store has no token; then the agent needs none either.
        """
        if self.token is None or self.token.startswith(attempt_token.PREFIX):
            return self.token  # an attempt's token cannot sign other tokens
        secret = attempt_token.derive_secret(self.token)
        return attempt_token.mint(secret, rollout_id, attempt_id, self.now() + lifetime_s)

    async def close(self) -> None:
        """Closes the connections of all loops; the served store stays open."""
        await self._connection.close()

    async def _send(self, route: Route, arguments: Mapping[str, Any]) -> Any:
        path, body = route.encode(arguments, self.run_id)
        try:
            content = await self._connection.request(
                route.method, path, body, run_id=self.run_id, repeatable=route.repeatable
            )
        except NotFoundError:
            if route.missing:
                return None
            raise
        return route.read_result(content)

    async def _post(self, path: str, body: dict[str, Any], wait_s: float = 0.0) -> Any:
        return await self._connection.request("POST", path, body, run_id=self.run_id, repeatable=True, wait_s=wait_s)

    # --- rollouts ---

    async def enqueue_many_rollouts(self, requests: Sequence[EnqueueRolloutRequest]) -> Sequence[Rollout]:
        rollouts = [  # with ids, so that the request can be repeated
            request if request.rollout_id else request.model_copy(update={"rollout_id": new_rollout_id()})
            for request in requests
        ]
        return [read_rollout(item) for item in await self._post("/queues/rollouts/enqueue", {"rollouts": rollouts})]

    async def dequeue_many_rollouts(
        self, *, limit: int = 1, worker_id: str | None = None, timeout: float = 0
    ) -> Sequence[AttemptedRollout]:
        deadline = deadline_after(timeout)
        while True:
            wait_s = min(max(0.0, deadline - time.monotonic()), MAX_POLL_S)
            request_id = os.urandom(8).hex()  # the same id gives the same claim, so the request can be repeated
            body = {"limit": limit, "worker_id": worker_id, "timeout": wait_s, "request_id": request_id}
            try:
                claimed = await self._post("/queues/rollouts/dequeue", body, wait_s)
            except asyncio.CancelledError:
                await self._release(request_id)
                raise
            if claimed or limit == 0 or time.monotonic() >= deadline:
                return [read_record(AttemptedRollout, item) for item in claimed]

    async def delete_rollouts(self, rollout_ids: Sequence[str] | None = None, **conditions: Any) -> int:
        """Deletes page by page, so that each request is short, however many rollouts match."""
        if rollout_ids is not None or conditions.get("limit") is not None:
            return await super().delete_rollouts(rollout_ids, **conditions)
        total = 0
        while deleted := await super().delete_rollouts(**{**conditions, "limit": _DELETED_AT_ONCE}):
            total += deleted
        return total

    async def _release(self, request_id: str) -> None:
        """Releases the claims of a cancelled request; if that fails, their leases run out."""
        with contextlib.suppress(StoreError, TimeoutError):
            async with asyncio.timeout(_RELEASE_S):
                await self._post("/queues/rollouts/release", {"request_id": request_id})

    async def wait_for_rollouts(self, rollout_ids: Sequence[str], timeout: float | None = None) -> Sequence[Rollout]:
        deadline = deadline_after(timeout)
        known: Sequence[str] = ()
        while True:
            wait_s = min(max(0.0, deadline - time.monotonic()), MAX_POLL_S)
            try:
                ended = await self._post("/waits/rollouts", {"rollout_ids": rollout_ids, "timeout": wait_s}, wait_s)
            except NotFoundError:
                if not known:
                    raise
                # The store has deleted rollouts that ended: they existed at the previous request.
                stored = {rollout.rollout_id for rollout in await self.query_rollouts(rollout_id_in=known)}
                stored |= {other for other in set(known) - stored if await self.get_rollout_by_id(other)}  # of any run
                rollout_ids = known = [rollout_id for rollout_id in known if rollout_id in stored]
                continue
            if len(ended) == len(rollout_ids) or time.monotonic() >= deadline:
                return [read_rollout(item) for item in ended]
            known = rollout_ids

    # --- spans ---

    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        if not spans:
            return []
        spans = [span.sealed() for span in spans]
        for span in spans:
            check_span(span)
        answer = await self._post("/spans/batch", {"spans": spans})
        return [
            span if number == span.sequence_id else span.model_copy(update={"sequence_id": number})
            for span, number in zip(spans, answer["sequence_ids"], strict=True)
            if number is not None
        ]

    async def query_spans(
        self,
        rollout_id: str | None,
        attempt_id: str | None = None,
        *,
        limit: int = -1,
        offset: int = 0,
        cursor: str | None = None,
        **conditions: Any,
    ) -> PaginatedResult[Span]:
        """Reads all spans page by page, so that the server never has to answer with everything that an agent wrote."""
        query = functools.partial(super().query_spans, rollout_id, attempt_id, **conditions)
        if limit != -1 or offset or cursor is not None:
            return await query(limit=limit, offset=offset, cursor=cursor)
        spans = [span async for span in every(query)]
        return PaginatedResult[Span].model_construct(items=spans, total=len(spans))

    # --- resources ---

    async def add_resources(self, resources: Mapping[str, Resource | str]) -> ResourcesUpdate:
        return self._versions.add(await super().add_resources(resources))

    async def update_resources(self, resources_id: str, resources: Mapping[str, Resource | str]) -> ResourcesUpdate:
        return self._versions.add(await super().update_resources(resources_id, resources))

    async def get_resources_by_id(self, resources_id: str, version: int | None = None) -> ResourcesUpdate | None:
        """Returns a snapshot at a version; versions never change, so a cached one costs no request.

        Many rollouts may begin with a new version at the same time: the first one requests it, and the others wait.
        """
        resources_id, version = split_version_id(resources_id, version)
        if version is None:
            return await self._read_newest(resources_id)
        if (cached := self._versions.get(resources_id, version)) is not None:
            return cached
        async with self._versions.turn():
            cached = self._versions.get(resources_id, version)
            return cached or self._versions.add(await super().get_resources_by_id(resources_id, version))

    async def _read_newest(self, resources_id: str) -> ResourcesUpdate | None:
        """Returns the newest version of a snapshot. Callers in one iteration of the event loop share a request."""
        key = (asyncio.get_running_loop(), resources_id)

        async def read() -> ResourcesUpdate | None:
            del self._reads[key]  # later callers may expect a version that is published from now on
            return self._versions.add(await RemoteMethods.get_resources_by_id(self, resources_id, None))

        task = self._reads.get(key)
        if task is None or task.done():  # cancelled before it began
            task = self._reads[key] = asyncio.create_task(read())
        return await asyncio.shield(task)

    async def get_latest_resources(self) -> ResourcesUpdate | None:
        return self._versions.add(await super().get_latest_resources())

    # --- events ---

    async def subscribe(self, kinds: Sequence[str] | None = None, *, every_run: bool = False) -> AsyncIterator[Event]:
        """Yields the events of this run, or of every run, that happen after the first ``anext`` has reached the server.

        The stream survives a restart of the server, but misses the events that happen during the restart.
        """
        query = urlencode([*(("kinds", kind) for kind in kinds or ()), *([("every_run", "true")] if every_run else [])])
        async for data in self._connection.events(f"/events?{query}", run_id=self.run_id):
            content = from_json(data)
            if content.get("kind") in EVENT_KINDS:  # a newer server may have others
                yield _EVENT.validate_python(content)


class _VersionCache:
    """The versions of resources that were received most recently."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._versions: dict[tuple[str, int], ResourcesUpdate] = {}
        self._turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()

    def turn(self) -> asyncio.Lock:
        """Returns the lock to hold while a version is read, one for each event loop."""
        with self._lock:
            return self._turns.setdefault(asyncio.get_running_loop(), asyncio.Lock())

    def get(self, resources_id: str, version: int) -> ResourcesUpdate | None:
        return self._versions.get((resources_id, version))

    def add(self, update: U) -> U:
        if update is not None:
            with self._lock:
                self._versions[update.resources_id, update.version] = update
                if len(self._versions) > _CACHED_VERSIONS:
                    del self._versions[next(iter(self._versions))]
        return update
