"""The rewards of served rollouts, as they become known."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from typing import Final

from agentlightning.errors import StoreError
from agentlightning.event import RolloutFinished
from agentlightning.reward import read_final_reward
from agentlightning.store.protocol import LightningStore
from agentlightning.types import Rollout
from agentlightning_algorithms.live_resources import Result

logger = logging.getLogger("agentlightning")

_BATCH: Final = 100
_RESYNC_S: Final = 30.0
_OVERLAP_S: Final = 600.0
"""How far back a regular look goes: a rollout that takes longer and whose end was missed is not counted."""
_GATHER_S: Final = 0.2
"""How long news are gathered, so that much traffic means few questions to the store that serves it too."""
_LATE_AT_ONCE: Final = 200
"""Rollouts without a reward that are asked for it again in one round."""


async def read_reward(store: LightningStore, rollout: Rollout) -> float | None:
    """The reward of a rollout that has ended: 0 if it failed, None while nobody has said one."""
    if rollout.status != "succeeded":
        return 0.0
    return await read_final_reward(store, rollout)


class Feed:
    """The ends of rollouts in a run, from its event stream.

    While the stream is broken events are lost, so a reader looks for itself whenever ``gaps`` has grown.
    """

    def __init__(self, store: LightningStore) -> None:
        self.gaps = 0
        self._store = store
        self._finished: list[str] = []
        self._bell = asyncio.Event()

    async def follow(self, pause_s: float = 1.0) -> None:
        """Listens until it is cancelled."""
        while True:
            try:
                async for event in self._store.subscribe(["rollout_finished", "resources_published"]):
                    if isinstance(event, RolloutFinished):
                        self._finished.append(event.rollout_id)
                    self._bell.set()
            except (StoreError, OSError) as error:
                logger.warning("live learning does not hear the store, and tries again: %s", error)
            await asyncio.sleep(pause_s)
            self.gaps += 1
            self._bell.set()

    async def wait(self, timeout_s: float) -> None:
        """Returns when there is news, or after ``timeout_s``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):  # wait_for of Python 3.11 loses a cancellation that comes with news
                await self._bell.wait()
            await asyncio.sleep(min(timeout_s, _GATHER_S))
        self._bell.clear()

    def take(self) -> list[str]:
        """The rollouts that have ended since the last call."""
        taken, self._finished = self._finished, []
        return taken


class Results:
    """The results of one phase: of rollouts that began in it, in certain groups. Each is given once.

    A rollout counts with the reward it has when it is first seen to have one; a later one changes nothing.
    """

    def __init__(
        self,
        store: LightningStore,
        feed: Feed,
        *,
        groups: Collection[str],
        since: float,
        step: int | None = None,
        reward_timeout_s: float,
    ) -> None:
        """Has given nothing yet.

        Args:
            store: of the run.
            feed: its events.
            groups: values of ``group`` in the metadata.
            since: Unix time.
            step: value of ``step`` in the metadata; None means any.
            reward_timeout_s: seconds after the end of a rollout until which its reward is waited for.
        """
        self.unrated = 0
        """Rollouts whose reward never came."""
        self._store = store
        self._feed = feed
        self._groups = groups
        self._since = since
        self._step = step
        self._reward_timeout_s = reward_timeout_s
        self._known: set[str] = set()
        self._waiting: dict[str, Rollout] = {}
        self._gaps = -1
        self._looked_at = 0.0

    async def more(self) -> list[Result]:
        """What is new since the last call, without waiting for anything to happen."""
        # What has ended while a look was on its way is in the feed: read that first, then look.
        named = self._feed.take()
        if self._gaps != self._feed.gaps or time.monotonic() - self._looked_at > _RESYNC_S:
            ended = await self._look()
        else:
            ended = [rollout async for rollout in self._fetch(named)]
        new = [rollout for rollout in ended if rollout.rollout_id not in self._known and self._belongs(rollout)]
        self._known.update(rollout.rollout_id for rollout in new)
        late = list(self._waiting.values())[:_LATE_AT_ONCE]
        return [*await self._rate(new), *await self._rate(late)]

    def _belongs(self, rollout: Rollout) -> bool:
        metadata = rollout.metadata or {}
        return (
            rollout.start_time >= self._since
            and rollout.status in ("succeeded", "failed")
            and metadata.get("group") in self._groups
            and (self._step is None or metadata.get("step") == self._step)
        )

    async def _fetch(self, rollout_ids: Sequence[str]) -> AsyncIterator[Rollout]:
        for start in range(0, len(rollout_ids), _BATCH):
            for rollout in await self._store.query_rollouts(rollout_id_in=rollout_ids[start : start + _BATCH]):
                yield rollout

    async def _look(self) -> list[Rollout]:
        is_first, gaps, now = self._gaps < 0, self._feed.gaps, time.monotonic()
        since = self._since if is_first else max(self._since, time.time() - _OVERLAP_S)
        found: list[Rollout] = []
        for group in self._groups:
            metadata = {"group": group} if self._step is None else {"group": group, "step": self._step}
            cursor = None
            while True:
                page = await self._store.query_rollouts(
                    status_in=["succeeded", "failed"], metadata=metadata, start_after=since, limit=500, cursor=cursor
                )
                found += page
                cursor = page.cursor
                if cursor is None:
                    break
        self._gaps, self._looked_at = gaps, now
        return found

    async def _rate(self, rollouts: Iterable[Rollout]) -> list[Result]:
        results = []
        for rollout in rollouts:
            self._waiting.pop(rollout.rollout_id, None)  # those that still wait go to the end of the line
            reward = await read_reward(self._store, rollout)
            if reward is not None:
                results.append(Result(rollout, reward))
            elif time.time() - (rollout.end_time or rollout.start_time) < self._reward_timeout_s:
                self._waiting[rollout.rollout_id] = rollout
            else:
                self.unrated += 1
        return results
