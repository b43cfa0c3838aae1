"""What a live learner does from its start to its end; its state is in the store after each step."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from agentlightning.errors import ConfigError, ConflictError, StoreError
from agentlightning.resources import split_version_id
from agentlightning.store.protocol import LightningStore
from agentlightning.types import EnqueueRolloutRequest, Rollout, RolloutConfig
from agentlightning_algorithms.live.proposal import make_candidate
from agentlightning_algorithms.live.result import Feed, Results, read_reward
from agentlightning_algorithms.live.sequential import SequentialTest
from agentlightning_algorithms.live_resources import (
    STATE_NAME,
    Experience,
    LivePlace,
    LiveState,
    Result,
    read_live_history,
    read_live_state,
)

if TYPE_CHECKING:
    from agentlightning_algorithms.live.algorithm import LiveLearning

logger = logging.getLogger("agentlightning")

_HEARTBEAT_S: Final = 5.0


class Session:
    """One life of a learner."""

    def __init__(self, settings: LiveLearning, store: LightningStore) -> None:
        self.settings = settings
        self.store = store
        self.place = LivePlace(store.run_id)
        self.desk = store.with_run(self.place.desk_run_id)
        self.feed = Feed(store)
        self.state: LiveState
        self.version = 0

    async def learn(self) -> None:
        await self._take_up()
        steps = {"watching": self._watch, "checking": self._check, "trial": self._try}
        while True:
            state = self.state
            if state.phase == "watching" and state.trial >= (self.settings.max_trials or state.trial + 1):
                return
            await steps[state.phase]()

    async def beat(self) -> None:
        """Says to serving processes that somebody watches, and to people in what state it is."""
        while True:
            stats = {"version": self.version}
            try:
                await self.store.update_worker(self.place.worker_id, heartbeat_stats=stats)
            except (StoreError, OSError) as error:
                logger.warning("the live learner could not send its heartbeat: %s", error)
            await asyncio.sleep(min(_HEARTBEAT_S, self.settings.refresh_s))

    async def _take_up(self) -> None:
        found = await read_live_state(self.store)
        if found is not None:
            self.state, self.version = found
            logger.info("live learning goes on: %s", self.state.note)
            return
        latest = await self.store.get_latest_resources()
        if latest is None:
            raise ConfigError(
                f"live learning has nothing to improve: no resources were published in run {self.store.run_id!r}; "
                "give Trainer(initial_resources=...) or call store.add_resources"
            )
        await self._save(LiveState(phase="watching", since=time.time(), stable=latest.version_id, note="began"))

    async def _save(self, state: LiveState) -> None:
        update = await self.desk.update_resources(self.place.state_id, {STATE_NAME: state})
        if update.version != self.version + 1:
            raise ConflictError(
                f"another learner works on run {self.store.run_id!r}: its state is at version {update.version}, "
                f"not {self.version + 1}; let only one of them run"
            )
        self.state, self.version = state, update.version

    async def _move(self, note: str, **changes: Any) -> None:
        logger.info("live learning: %s", note)
        await self._save(self.state.model_copy(update={"since": time.time(), "note": note, **changes}))

    async def _give_up(self, note: str) -> None:
        await self._move(note, phase="watching", candidate=None, share=0.0)

    async def _heed_others(self) -> bool:
        """Whether the phase is over because the latest resources are not those that it began with.

        Somebody published others; or it was this learner, which was killed before it could write down that it promoted.
        """
        latest = await self.store.get_latest_resources()
        state = self.state
        if latest is None or latest.version_id == state.stable:
            return False
        candidate = None if state.candidate is None else await self.store.get_resources_by_id(state.candidate)
        if candidate is not None and candidate.resources == latest.resources:
            note = f"candidate {state.trial} is promoted as {latest.version_id}"
        else:
            note = f"{latest.version_id} was published by somebody else and is the stable version now"
        await self._move(note, phase="watching", stable=latest.version_id, candidate=None, share=0.0)
        return True

    # --- gathering evidence ---

    async def _watch(self) -> None:
        results = self._results({"stable"}, self.state.since)
        seen: list[Result] = []
        while not await self._heed_others():
            seen += await results.more()
            if len(seen) >= self.settings.evidence:
                await self._ask(sorted(seen, key=lambda result: result.rollout.start_time))
                return
            await self.feed.wait(self.settings.refresh_s)

    async def _ask(self, results: Sequence[Result]) -> None:
        number = self.state.trial + 1
        candidate = await self.store.get_resources_by_id(self.place.candidate_id, number)
        if candidate is None:  # otherwise the learner was killed after it had paid for this one
            stable = await self.store.get_resources_by_id(self.state.stable)
            assert stable is not None, "versions are never removed"
            notes = [state.note for state in await read_live_history(self.store)]
            directory = self.settings.context.directory
            experience = Experience(stable.resources, results, notes, self.store, directory)
            try:
                resources = await make_candidate(self.settings.propose, experience)
            except Exception as error:  # isolation point: a proposer's bad day must not end the learning
                logger.exception("the proposer failed")
                await self._give_up(f"the proposer failed: {type(error).__name__}: {error}"[:500])
                return
            if resources == dict(stable.resources):
                await self._give_up("the proposer had nothing new")
                return
            candidate = await self.desk.update_resources(self.place.candidate_id, resources)
        await self._move(
            f"candidate {number} is checked offline", phase="checking", candidate=candidate.version_id, trial=number
        )

    # --- the offline check ---

    async def _check(self) -> None:
        if await self._heed_others():
            return
        state, settings = self.state, self.settings
        assert state.candidate is not None, "the phase says so"
        recorded = await self._recorded()
        config = RolloutConfig(timeout_seconds=settings.check_timeout_s)
        requests = [
            EnqueueRolloutRequest(
                input=result.rollout.input,
                mode="val",
                resources_id=state.candidate,
                config=config,
                metadata={"group": "check", "step": state.trial},
                rollout_id=_check_id(state, result.rollout),
            )
            for result in recorded
        ]
        queued = await self.store.enqueue_many_rollouts(requests)
        wanted = [rollout.rollout_id for rollout in queued]
        left_s = max(state.since + settings.check_timeout_s - time.time(), 1.0)
        ended = await self.store.wait_for_rollouts(wanted, timeout=left_s) if wanted else []
        if len(ended) < len(wanted):
            missing = set(wanted) - {rollout.rollout_id for rollout in ended}
            for rollout_id in missing:
                await self.store.cancel_rollout(rollout_id)
            await self._give_up(
                f"candidate {state.trial} is rejected: {len(missing)} of {len(wanted)} recorded tasks were not run "
                f"within {settings.check_timeout_s:g} s; are there runners?"
            )
            return
        differences = []
        for before, after in zip(recorded, ended, strict=True):
            reward = await read_reward(self.store, after)
            if reward is not None:  # it ran, and nobody says how well: that comes from users
                differences.append(reward - before.reward)
        change = statistics.fmean(differences) if differences else 0.0
        failed, failed_before = (
            sum(rollout.status == "failed" for rollout in rollouts)
            for rollouts in (ended, [result.rollout for result in recorded])
        )
        what = (
            f"candidate {state.trial} ran on {len(ended)} recorded tasks: {failed} failed, "
            f"{change:+.3f} on the {len(differences)} with a reward"
        )
        least, most = settings.reward_range
        is_poor = change < -settings.check_tolerance * (most - least)
        if is_poor or failed - failed_before > settings.check_tolerance * len(recorded):
            await self._give_up(f"{what}; rejected by the offline check")
        else:
            await self._move(f"{what}; gets {settings.share:.0%} of the traffic", phase="trial", share=settings.share)

    async def _recorded(self) -> list[Result]:
        """The newest different tasks that were served with the stable version, with their rewards."""
        state, limit = self.state, self.settings.check_tasks
        served: list[Rollout] = []
        for group in ("stable", "control"):
            served += await self.store.query_rollouts(
                status_in=["succeeded", "failed"],
                metadata={"group": group},
                start_before=state.since,
                sort_by="start_time",
                sort_order="desc",
                limit=max(4 * limit, 1),
            )
        found: dict[str, Result] = {}
        for rollout in sorted(served, key=lambda rollout: rollout.start_time, reverse=True):
            task = json.dumps(rollout.input, sort_keys=True)
            if len(found) == limit:
                break
            if rollout.resources_id == state.stable and task not in found:
                reward = await read_reward(self.store, rollout)
                if reward is not None:
                    found[task] = Result(rollout, reward)
        return list(found.values())

    # --- the trial ---

    async def _try(self) -> None:
        settings, state = self.settings, self.state
        # Step and group tell which rollouts count; a minute allows for clocks that differ.
        results = self._results({"control", "treatment"}, state.since - 60.0, state.trial)
        test = SequentialTest(risk=settings.risk, margin=settings.margin, reward_range=settings.reward_range)
        while not await self._heed_others():
            for result in await results.more():
                group = (result.rollout.metadata or {})["group"]
                test.add(result.reward, is_treatment=group == "treatment")
                if await self._judge(test):
                    return
            await self.feed.wait(settings.refresh_s)

    async def _judge(self, test: SequentialTest) -> bool:
        """Ends the trial if it can be decided; returns whether it was."""
        verdict, treated, state = test.verdict, test.treatment.n, self.state
        if verdict is None and treated >= self.settings.max_treated:
            verdict = "not worse" if test.difference >= 0 else "worse"
        if verdict is None:
            return False
        low, high = test.interval
        what = (
            f"candidate {state.trial}: {test.difference:+.3f} [{low:+.3f}, {high:+.3f}] "
            f"after {treated} against {test.control.n} rewards"
        )
        numbers = {"live/difference": test.difference, "live/low": low, "live/high": high, "live/treated": treated}
        await self.store.add_metrics(state.trial, {**numbers, "live/promoted": float(verdict == "not worse")})
        if verdict == "worse":
            await self._give_up(f"{what}; rolled back")
            return True
        assert state.candidate is not None, "the phase says so"
        candidate = await self.store.get_resources_by_id(state.candidate)
        assert candidate is not None, "versions are never removed"
        update = await self.store.update_resources(split_version_id(state.stable)[0], candidate.resources)
        note = f"{what}; promoted as {update.version_id}"
        await self._move(note, phase="watching", stable=update.version_id, candidate=None, share=0.0)
        return True

    def _results(self, groups: set[str], since: float, step: int | None = None) -> Results:
        return Results(
            self.store,
            self.feed,
            groups=groups,
            since=since,
            step=step,
            reward_timeout_s=self.settings.reward_timeout_s,
        )


def _check_id(state: LiveState, recorded: Rollout) -> str:
    """The same again when a learner that was killed queues its check once more."""
    text = f"{state.candidate}/{recorded.rollout_id}"
    return "ro-" + hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
