from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from agentlightning.errors import StoreError
from agentlightning.store.waiting import deadline_after
from agentlightning.types import (
    UNSET,
    Attempt,
    AttemptedRollout,
    AttemptFailure,
    AttemptStatus,
    EnqueueRolloutRequest,
    FilterLogic,
    PaginatedResult,
    Rollout,
    RolloutConfig,
    RolloutMode,
    RolloutStatus,
    SortOrder,
    TaskInput,
    Unset,
    new_rollout_id,
)
from agentlightning_plugins.stores.http import message
from agentlightning_plugins.stores.http.client.call import (
    StoreCalls,
    frozen,
    given,
    query_string,
    quoted,
    read_page,
    read_rollout,
)
from agentlightning_plugins.stores.http.message import MAX_POLL_S

_RELEASE_S: Final = 2.0


class RolloutCalls(StoreCalls):
    """The part of the client that is about rollouts and their attempts."""

    async def start_rollout(
        self,
        input: TaskInput,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: Mapping[str, Any] | None = None,
        worker_id: str | None = None,
    ) -> AttemptedRollout:
        request = EnqueueRolloutRequest.make(input, mode, resources_id, config, metadata)
        body = request.model_dump(exclude={"rollout_id"}) | {"worker_id": worker_id}
        return AttemptedRollout.model_validate(await self._post("/rollouts", body, repeatable=False))

    async def enqueue_rollout(
        self,
        input: TaskInput,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Rollout:
        request = EnqueueRolloutRequest.make(input, mode, resources_id, config, metadata)
        return (await self.enqueue_many_rollouts([request]))[0]

    async def enqueue_many_rollouts(self, requests: Sequence[EnqueueRolloutRequest]) -> Sequence[Rollout]:
        named = [
            request if request.rollout_id else request.model_copy(update={"rollout_id": new_rollout_id()})
            for request in requests
        ]
        body: message.EnqueueRollouts = {"rollouts": named}
        return [read_rollout(item) for item in await self._post("/queues/rollouts/enqueue", body, repeatable=True)]

    async def dequeue_rollout(self, worker_id: str | None = None, *, timeout: float = 0) -> AttemptedRollout | None:
        claimed = await self.dequeue_many_rollouts(worker_id=worker_id, timeout=timeout)
        return claimed[0] if claimed else None

    async def dequeue_many_rollouts(
        self, *, limit: int = 1, worker_id: str | None = None, timeout: float = 0
    ) -> Sequence[AttemptedRollout]:
        deadline = deadline_after(timeout)
        while True:
            wait_s = min(max(0.0, deadline - time.monotonic()), MAX_POLL_S)
            request_id = os.urandom(8).hex()  # makes it repeatable: the same id gives the same claim again
            body: message.DequeueRollouts = {
                "limit": limit,
                "worker_id": worker_id,
                "timeout": wait_s,
                "request_id": request_id,
            }
            try:
                claimed = await self._post("/queues/rollouts/dequeue", body, repeatable=True, wait_s=wait_s)
            except asyncio.CancelledError:
                await self._release(request_id)
                raise
            if claimed or limit == 0 or time.monotonic() >= deadline:
                return [AttemptedRollout.model_validate(item) for item in claimed]

    async def _release(self, request_id: str) -> None:
        """Gives back what a cancelled request may have claimed; if that fails, its lease does."""
        body: message.ReleaseRollouts = {"request_id": request_id}
        with contextlib.suppress(StoreError, TimeoutError):
            async with asyncio.timeout(_RELEASE_S):
                await self._post("/queues/rollouts/release", body, repeatable=True)

    async def start_attempt(self, rollout_id: str, worker_id: str | None = None) -> AttemptedRollout:
        body: message.StartAttempt = {"worker_id": worker_id}
        path = f"/rollouts/{quoted(rollout_id)}/attempts"
        return AttemptedRollout.model_validate(await self._post(path, body, repeatable=False))

    async def query_rollouts(
        self,
        *,
        status_in: Sequence[RolloutStatus] | None = None,
        rollout_id_in: Sequence[str] | None = None,
        rollout_id_contains: str | None = None,
        filter_logic: FilterLogic = "and",
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
        metadata: Mapping[str, Any] | None = None,
        run_id: str | None = None,
        start_after: float | None = None,
        start_before: float | None = None,
        cursor: str | None = None,
    ) -> PaginatedResult[Rollout]:
        body = {
            "status_in": status_in,
            "rollout_id_in": rollout_id_in,
            "rollout_id_contains": rollout_id_contains,
            "filter_logic": filter_logic,
            "sort_by": sort_by,
            "sort_order": sort_order,
            "limit": limit,
            "offset": offset,
            "metadata": metadata,
            "run_id": run_id,
            "start_after": start_after,
            "start_before": start_before,
            "cursor": cursor,
        }
        page = await self._post("/rollouts/search", body, repeatable=True)
        return read_page(page, [read_rollout(item) for item in page["items"]])

    async def get_rollout_by_id(self, rollout_id: str) -> Rollout | None:
        content = await self._find(f"/rollouts/{quoted(rollout_id)}")
        return None if content is None else read_rollout(content)

    async def update_rollout(
        self,
        rollout_id: str,
        input: TaskInput | Unset = UNSET,
        mode: RolloutMode | Unset | None = UNSET,
        resources_id: str | Unset | None = UNSET,
        status: RolloutStatus | Unset = UNSET,
        config: RolloutConfig | Unset = UNSET,
        metadata: Mapping[str, Any] | Unset | None = UNSET,
    ) -> Rollout:
        body = given(
            input=frozen(input, "input"),
            mode=mode,
            resources_id=resources_id,
            status=status,
            config=config,
            metadata=frozen(metadata, "metadata"),
        )
        return read_rollout(await self._post(f"/rollouts/{quoted(rollout_id)}", body, repeatable=True))

    async def cancel_rollout(self, rollout_id: str) -> Rollout:
        return read_rollout(await self._post(f"/rollouts/{quoted(rollout_id)}/cancel", repeatable=True))

    async def retry_rollout(self, rollout_id: str) -> Rollout:
        return read_rollout(await self._post(f"/rollouts/{quoted(rollout_id)}/retry", repeatable=False))

    async def delete_rollouts(
        self,
        rollout_ids: Sequence[str] | None = None,
        *,
        status_in: Sequence[RolloutStatus] | None = None,
        ended_before: float | None = None,
        keep: int | None = None,
    ) -> int:
        body = {"rollout_ids": rollout_ids, "status_in": status_in, "ended_before": ended_before, "keep": keep}
        answer = await self._post("/rollouts/delete", body, repeatable=True)
        return int(answer["deleted"])

    async def wait_for_rollouts(self, rollout_ids: Sequence[str], timeout: float | None = None) -> Sequence[Rollout]:
        deadline = deadline_after(timeout)
        while True:
            wait_s = min(max(0.0, deadline - time.monotonic()), MAX_POLL_S)
            body: message.WaitForRollouts = {"rollout_ids": list(rollout_ids), "timeout": wait_s}
            ended = await self._post("/waits/rollouts", body, repeatable=True, wait_s=wait_s)
            if len(ended) == len(rollout_ids) or time.monotonic() >= deadline:
                return [read_rollout(item) for item in ended]

    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        content = await self._find(f"/rollouts/{quoted(rollout_id)}/attempts/latest")
        return None if content is None else Attempt.model_validate(content)

    async def query_attempts(
        self,
        rollout_id: str,
        *,
        sort_by: str = "sequence_id",
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[Attempt]:
        query = query_string({"sort_by": sort_by, "sort_order": sort_order, "limit": limit, "offset": offset})
        page = await self._get(f"/rollouts/{quoted(rollout_id)}/attempts?{query}")
        return read_page(page, [Attempt.model_validate(item) for item in page["items"]])

    async def update_attempt(
        self,
        rollout_id: str,
        attempt_id: str | Literal["latest"],
        status: AttemptStatus | Unset = UNSET,
        worker_id: str | Unset = UNSET,
        last_heartbeat_time: float | Unset = UNSET,
        metadata: Mapping[str, Any] | Unset | None = UNSET,
        *,
        error: AttemptFailure | Unset | None = UNSET,
        spans_dropped: int | Unset = UNSET,
        reward: float | Unset | None = UNSET,
    ) -> Attempt:
        body = given(
            status=status,
            worker_id=worker_id,
            last_heartbeat_time=last_heartbeat_time,
            metadata=frozen(metadata, "metadata"),
            error=error,
            spans_dropped=spans_dropped,
            reward=reward,
        )
        path = f"/rollouts/{quoted(rollout_id)}/attempts/{quoted(attempt_id)}"
        return Attempt.model_validate(await self._post(path, body, repeatable=True))

    async def release_attempt(self, rollout_id: str, attempt_id: str) -> Rollout:
        path = f"/rollouts/{quoted(rollout_id)}/attempts/{quoted(attempt_id)}/release"
        return read_rollout(await self._post(path, repeatable=True))
