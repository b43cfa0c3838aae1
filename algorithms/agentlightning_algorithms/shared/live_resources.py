"""The resources of a serving process while an algorithm learns from it.

The algorithm writes a ``LiveState`` to the store; ``LiveResources`` in each serving process follows it. Candidates are
published in a run of their own, ``<run>.live``, so that the latest resources of the run are always proven ones.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Self, TypeAlias

from agentlightning.emitter import emit_reward
from agentlightning.errors import NotFoundError
from agentlightning.resources import Resource, ResourcesUpdate
from agentlightning.store.capabilities import LIVE_SUFFIX
from agentlightning.store.protocol import LightningStore
from agentlightning.types import AttemptedRollout, Rollout

logger = logging.getLogger("agentlightning")

STATE_NAME: Final = "live"
KEY_HASH: Final = "key_hash"
"""Metadata of a rollout whose version was chosen by a key: a hash of the key."""
WATCHED, PERIOD = "watched", "period"
"""Metadata of a rollout while a promoted version is watched: the numbers of its candidate and of the day."""
_PERIOD_S: Final = 86400
"""The same users get the former version for this long. Users differ, so over time it must meet all of them."""
LivePhase: TypeAlias = Literal["watching", "checking", "trial", "closing"]


class LiveState(Resource):
    """The state of live learning; its stored versions are its history."""

    resource_type: Literal["live_state"] = "live_state"
    phase: LivePhase
    """``watching`` collects rewards of the stable version; ``checking`` runs a candidate on recorded tasks; ``trial``
    serves it; in ``closing`` it gets no more traffic, and waits for its last rewards or is published."""
    since: float
    """Unix time at which the phase began."""
    stable: str
    """The version, as in ``rs-1@3``, that candidates are compared with."""
    candidate: str | None = None
    share: float = 0.0
    """Share of the traffic that the candidate gets, from 0 to 1."""
    trial: int = 0
    """Number of the newest candidate, from 1."""
    served_trials: int = 0
    """Number of candidates that were served to users so far."""
    margin_spent: float = 0.0
    """How much worse the stable version may be than the first one, because of promotions without evidence of a gain."""
    former: str | None = None
    """The version before the last promotion, while the promoted version is compared with it; or None."""
    control_share: float = 0.0
    """Share of the traffic that ``former`` gets, from 0 to 1."""
    watched_trial: int = 0
    """Number of the candidate that was promoted last."""
    promoted_at: float = 0.0
    """Unix time of the last promotion."""
    tolerance: float = 0.0
    """How much lower the promoted version's reward may be than ``former``'s."""
    alarms: int = 0
    """Number of promotions that the learner has taken back."""
    alarm: str = ""
    """Why it took back the last promotion; empty if it did not."""
    note: str = ""
    """The last event, as readable text."""


class LiveIds:
    """The ids in the store that a run's live learning uses."""

    def __init__(self, run_id: str) -> None:
        self.learner_run_id = self.state_id = run_id + LIVE_SUFFIX
        """The run that holds states and candidates, and the snapshot in it whose versions are the states."""
        self.candidate_id = f"{run_id}.candidate"
        """The snapshot whose version n is the candidate of trial n."""
        self.worker_id = f"{run_id}.live-learner"
        """The worker whose heartbeats show that a learner is alive."""


async def read_live_state(store: LightningStore) -> tuple[LiveState, int] | None:
    """Returns the newest state of live learning in the store's run, with its version, or None."""
    update = await store.get_resources_by_id(LiveIds(store.run_id).state_id)
    return None if update is None else (_state_in(update), update.version)


async def read_live_history(store: LightningStore) -> list[LiveState]:
    """Returns every state of live learning in the store's run, oldest first; each note describes an event."""
    ids = LiveIds(store.run_id)
    updates = await store.with_run(ids.learner_run_id).query_resources(resources_id=ids.state_id)
    return [_state_in(update) for update in updates]


def _state_in(update: ResourcesUpdate) -> LiveState:
    state = update.resources[STATE_NAME]
    assert isinstance(state, LiveState)
    return state


@dataclass(frozen=True)
class Result:
    """A served rollout that has ended, with its reward."""

    rollout: Rollout
    reward: float
    """The reward; the lowest possible reward if the rollout failed."""


@dataclass(frozen=True)
class LiveExperience:
    """The input of a proposer."""

    resources: Mapping[str, Resource]
    """The stable version."""
    results: Sequence[Result]
    """Rollouts that were served with the stable version, oldest first, with rewards; their spans are in the store."""
    notes: Sequence[str]
    """The events so far, such as the results of earlier candidates, oldest first."""
    store: LightningStore
    directory: Path | None = None
    """The run's directory, if it has one."""


@dataclass(frozen=True)
class ServedVersion:
    """The version that one task is served with, as arguments for ``runner.step``."""

    resources_id: str | None
    """A version, as in ``rs-1@3``; None while the run has no resources."""
    metadata: Mapping[str, Any]
    """``group`` (stable, control, treatment or former), ``step`` (number of the running trial), ``watched`` (number of
    the promoted candidate) and ``period`` while a promotion is watched, ``key_hash`` (with a key)."""


class LiveResources:
    """Chooses the resources of each task in a serving process, without I/O.

    A candidate is served only while its learner is alive: after ``learner_timeout_s`` without a heartbeat, every task
    gets the stable version. While the store is unreachable, the last known version is served.
    """

    def __init__(
        self, store: LightningStore, *, refresh_s: float = 1.0, learner_timeout_s: float = 30.0, seed: int | None = None
    ) -> None:
        """Use it as ``async with LiveResources(store) as live``.

        Args:
            store: the store of the run that is served.
            refresh_s: seconds between two reads of the newest versions and of the learner's heartbeat.
            learner_timeout_s: seconds without a heartbeat after which the learner counts as stopped.
            seed: makes the choices repeatable.
        """
        self.stable: str | None = None
        self.state: LiveState | None = None
        self._store = store
        self._ids = LiveIds(store.run_id)
        self._refresh_s = refresh_s
        self._learner_timeout_s = learner_timeout_s
        self._draw = random.Random(seed)
        self._heartbeat: float | None = None
        self._alive_at: float | None = None
        """When the heartbeat last changed, on our monotonic clock, because clocks of two machines differ. The first
        heartbeat that is read may be old and does not count."""

    async def __aenter__(self) -> Self:
        await self._read()
        self._task = asyncio.create_task(self._follow())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    @property
    def trial(self) -> LiveState | None:
        """The state while a candidate gets its share of the traffic; None otherwise."""
        state = self._current
        return None if state is None or state.phase != "trial" or state.candidate is None else state

    @property
    def _current(self) -> LiveState | None:
        """The state, if it is about the stable version and a learner is alive."""
        is_alive = self._alive_at is not None and time.monotonic() - self._alive_at <= self._learner_timeout_s
        return self.state if is_alive and self.state is not None and self.state.stable == self.stable else None

    def pick(self, key: str | None = None) -> ServedVersion:
        """Chooses the version for the next task: ``runner.step(task, resources_id=..., metadata=...)``.

        Args:
            key: a user's id, for example; the same key gets the same version throughout a trial, and for a day while a
                promoted version is watched. None draws at random. The metadata has a hash of the key, because
                statistical tests must count users, not their rollouts.
        """
        trial, state = self.trial, self._current
        own: dict[str, Any] = {} if key is None else {KEY_HASH: _hash(f"{self._store.run_id}/{key}").hex()}
        if trial is not None and self._draw_for(f"{trial.candidate}/{key}", key) < trial.share:
            return ServedVersion(trial.candidate, {"group": "treatment", "step": trial.trial, **own})
        if state is not None and state.former is not None:
            period = int(time.time() // _PERIOD_S)
            own |= {WATCHED: state.watched_trial, PERIOD: period}
            if self._draw_for(f"{state.former}/{state.watched_trial}/{period}/{key}", key) < state.control_share:
                return ServedVersion(state.former, {"group": "former", **own})
        if trial is None:
            return ServedVersion(self.stable, {"group": "stable", **own})
        return ServedVersion(self.stable, {"group": "control", "step": trial.trial, **own})

    def _draw_for(self, text: str, key: str | None) -> float:
        """Returns a number from 0 to below 1: a hash of the text if there is a key, otherwise a random one."""
        return self._draw.random() if key is None else int.from_bytes(_hash(text), "big") / 2**64

    async def reward(self, rollout: Rollout | str, reward: float | Mapping[str, float]) -> None:
        """Adds a reward to a rollout, at any time after it ended.

        Args:
            rollout: what ``runner.step`` returned, or its id.
            reward: the argument of ``emit_reward``; one of several rewards must be named ``primary``.

        Raises:
            NotFoundError: the rollout does not exist or has no attempt.
        """
        rollout_id = rollout if isinstance(rollout, str) else rollout.rollout_id
        attempt = rollout.attempt if isinstance(rollout, AttemptedRollout) else None
        attempt = attempt or await self._store.get_latest_attempt(rollout_id)
        if attempt is None:
            raise NotFoundError(f"no rollout {rollout_id!r} with an attempt in this store")
        key = "primary" if isinstance(reward, Mapping) and len(reward) > 1 else None
        span = emit_reward(reward, primary_key=key, propagate=False)
        await self._store.add_span(
            span.model_copy(update={"rollout_id": rollout_id, "attempt_id": attempt.attempt_id, "sequence_id": 0})
        )

    async def _read(self) -> None:
        latest = await self._store.get_latest_resources()
        found = await read_live_state(self._store)
        learner = await self._store.get_worker_by_id(self._ids.worker_id)
        self.stable = None if latest is None else latest.version_id
        self.state = None if found is None else found[0]
        heartbeat = None if learner is None else learner.last_heartbeat_time
        if heartbeat != self._heartbeat:
            if self._heartbeat is not None:
                self._alive_at = time.monotonic()
            self._heartbeat = heartbeat

    async def _follow(self) -> None:
        is_failing = False
        while True:
            try:
                await self._read()
                is_failing = False
            except Exception as error:  # isolation point: whatever a store raises, serving goes on
                if not is_failing:
                    text = "live resources stay the same while they cannot be read (logged once): %s: %s"
                    logger.warning(text, type(error).__name__, error)
                is_failing = True
            await asyncio.sleep(self._refresh_s)


def _hash(text: str) -> bytes:
    """Hashes a text to 8 bytes."""
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
