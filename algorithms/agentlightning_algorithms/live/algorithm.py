"""``live``: learns from the traffic of a serving process, in one guarded trial after another."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import statistics
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, ClassVar, Final, TypeAlias, TypeVar

from agentlightning.algorithm.algorithm import Algorithm
from agentlightning.errors import ConfigError, ConflictError, StoreError
from agentlightning.resources import split_version_id
from agentlightning.types import Dataset, EnqueueRolloutRequest, Rollout, RolloutConfig
from agentlightning_algorithms.live.reward_feed import ResultReader, read_reward
from agentlightning_algorithms.live.settings import LiveSettings, make_candidate
from agentlightning_algorithms.live.trial import (
    CHECK_SHARE,
    Trial,
    Watch,
    describe_missing,
    is_lower,
    make_watch,
    next_margin,
)
from agentlightning_algorithms.shared import live_resources
from agentlightning_algorithms.shared.live_resources import (
    KEY_HASH,
    PERIOD,
    STATE_NAME,
    WATCHED,
    LiveExperience,
    LiveIds,
    LiveState,
    Result,
    read_live_history,
    read_live_state,
)
from agentlightning_algorithms.shared.rollout_result import run_rollouts

logger = logging.getLogger("agentlightning")
T = TypeVar("T")
_HEARTBEAT_S: Final = 5.0
_CLOCKS_S: Final = 60.0
"""Clocks of processes may differ by this much; metadata selects the rollouts of a trial, not the time."""


class LiveLearning(LiveSettings, Algorithm):
    """Improves the resources of a serving process without putting its users at risk.

    The learner repeats these phases: rewards of the stable version come in; the proposer makes a candidate; runners run
    it on tasks that were served before (the offline check); a small share of the traffic gets it, while rewards of both
    versions come in at the same time; a sequential test ends the trial. A candidate that is better is promoted:
    published as the run's latest resources. A worse one is rolled back: its share ends. A promoted version is compared
    with the version before it, which keeps a small share of the traffic; an alarm publishes that version again.

    Serving processes ask ``agl.LiveResources`` for the version of each task. All state is in the store, so a restarted
    learner continues where it was killed; while no learner runs, all tasks get the stable version.

    The arguments are the fields of :class:`~agentlightning_algorithms.live.settings.LiveSettings`.
    """

    Experience: TypeAlias = live_resources.LiveExperience
    Result: TypeAlias = live_resources.Result

    continues_from_latest: ClassVar[bool] = True

    async def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> None:
        """Learns until ``max_trials`` candidates were decided on, or until it is stopped. Datasets are not used.

        Raises:
            ConfigError: no resources were published in the run.
            ConflictError: another learner works on the run.
        """
        if self.context.adapter is not None:
            adapter = type(self.context.adapter).__name__
            logger.warning("the adapter %s has no effect: live learning reads rewards; leave adapter out", adapter)
        self.store = self.get_store()
        self.ids = LiveIds(self.store.run_id)
        self.learner_store = self.store.with_run(self.ids.learner_run_id)
        self.state: LiveState
        self.version = 0
        self._watched: tuple[int, ResultReader, Watch] | None = None
        work = [asyncio.create_task(part) for part in (self._learn(), self._send_heartbeats())]
        try:
            ended, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
        for task in ended:
            task.result()  # raises the error of any part

    async def _learn(self) -> None:
        await self._load_state()
        phases = {"watching": self._watch, "checking": self._check, "trial": self._try, "closing": self._try}
        while True:
            state = self.state
            if state.phase == "watching" and self._has_ended:
                return
            await phases[state.phase]()

    @property
    def _has_ended(self) -> bool:
        """Whether the last of ``max_trials`` candidates was made."""
        return self.max_trials is not None and self.state.trial >= self.max_trials

    async def _send_heartbeats(self) -> None:
        """Shows serving processes that a learner is alive, and at which version of the state."""
        while True:
            stats = {"version": self.version}
            try:
                await self.store.update_worker(self.ids.worker_id, heartbeat_stats=stats)
            except (StoreError, OSError) as error:
                logger.warning("the live learner could not send its heartbeat: %s", error)
            await asyncio.sleep(min(_HEARTBEAT_S, self.refresh_s))

    async def _load_state(self) -> None:
        found = await read_live_state(self.store)
        if found is not None:
            self.state, self.version = found
            logger.info("live learning continues: %s", self.state.note)
            return
        latest = await self.store.get_latest_resources()
        if latest is None:
            raise ConfigError(
                f"live learning has nothing to improve: no resources were published in run {self.store.run_id!r}; "
                "give Trainer(initial_resources=...) or call store.add_resources"
            )
        await self._save(LiveState(phase="watching", since=self.store.now(), stable=latest.version_id, note="began"))

    async def _save(self, state: LiveState) -> None:
        await self._check_alone()  # before the write, which would also stop the other learner
        update = await self.learner_store.update_resources(self.ids.state_id, {STATE_NAME: state})
        self._compare(update.version - 1)  # the other learner may have written since
        self.state, self.version = state, update.version

    async def _check_alone(self) -> None:
        """Raises ConflictError if another learner has changed the state."""
        found = await read_live_state(self.store)
        self._compare(0 if found is None else found[1])

    def _compare(self, version: int) -> None:
        if version != self.version:
            raise ConflictError(
                f"another learner works on run {self.store.run_id!r}: its state is at version {version}, "
                f"not {self.version}; run only one of them"
            )

    async def _enter(self, note: str, **changes: Any) -> None:
        logger.info("live learning: %s", note)
        await self._save(self.state.model_copy(update={"since": self.store.now(), "note": note, **changes}))

    async def _watch_again(self, note: str, **changes: Any) -> None:
        await self._enter(note, phase="watching", candidate=None, share=0.0, **changes)

    async def _is_superseded(self) -> bool:
        """Ends the phase if newer resources were published: from outside, or by this learner before it was killed."""
        latest = await self.store.get_latest_resources()
        state = self.state
        if latest is None or latest.version_id == state.stable:
            return False
        candidate = None if state.candidate is None else await self.store.get_resources_by_id(state.candidate)
        if state.former is not None and state.alarm:
            note = f"{state.alarm}; {latest.version_id} is the stable version"
            await self._watch_again(note, stable=latest.version_id, former=None)
        elif candidate is not None and candidate.resources == latest.resources:
            note = f"candidate {state.trial} is promoted as {latest.version_id}"
            margin = next_margin(self, state)  # upper bound: the verdict was not recorded
            changes = self._begin_watch(latest.version_id, tolerance=margin)
            await self._watch_again(note, margin_spent=state.margin_spent + margin, **changes)
        else:
            note = f"{latest.version_id} was published from outside and is the stable version now"
            await self._watch_again(note, stable=latest.version_id, margin_spent=0.0, former=None)
        return True

    # --- watching: rewards of the stable version ---

    async def _watch(self) -> None:
        reader = self._reader({"stable"}, self.state.since)
        results: list[Result] = []
        while not await self._is_superseded():
            await self._watch_promoted()
            results += (await reader.read_new())[0]
            if len(results) >= self.evidence:
                await self._propose(sorted(results, key=lambda result: result.rollout.start_time))
                return
            await asyncio.sleep(self.refresh_s)

    async def _propose(self, results: Sequence[Result]) -> None:
        number = self.state.trial + 1
        candidate = await self.store.get_resources_by_id(self.ids.candidate_id, number)
        if candidate is None:  # otherwise the learner was killed after the proposer had made it
            stable = await self.store.get_resources_by_id(self.state.stable)
            assert stable is not None, "versions are never removed"
            notes = [state.note for state in await read_live_history(self.store)]
            experience = LiveExperience(stable.resources, results, notes, self.store, self.context.directory)
            try:
                assert callable(self.propose), "load_proposer made it one"
                resources = await self._beside_watch(make_candidate(self.propose, experience))
            except Exception as error:  # isolation point: a failing proposer must not end the learning
                logger.exception("the proposer failed")
                await self._watch_again(f"the proposer failed: {type(error).__name__}: {error}"[:500])
                return
            if resources == dict(stable.resources):
                await self._watch_again("the proposer had nothing new")
                return
            await self._check_alone()
            candidate = await self.learner_store.update_resources(self.ids.candidate_id, resources)
        note = f"candidate {number} is checked offline"
        await self._enter(note, phase="checking", candidate=candidate.version_id, trial=number)

    # --- checking: the candidate on recorded tasks ---

    async def _check(self) -> None:
        if await self._is_superseded():
            return
        state = self.state
        recorded = await self._recorded()
        requests = [
            EnqueueRolloutRequest(
                input=result.rollout.input,
                mode="val",
                resources_id=state.candidate,
                config=RolloutConfig(timeout_seconds=self.check_timeout_s),
                metadata={"group": "check", "step": state.trial},
                rollout_id=_check_id(state, result.rollout),
            )
            for result in recorded
        ]
        ended = await self._beside_watch(run_rollouts(self.store, requests, timeout_s=self.check_timeout_s))
        n_cancelled = sum(rollout.status == "cancelled" for rollout in ended)
        if n_cancelled:
            await self._watch_again(
                f"candidate {state.trial} is rejected: {n_cancelled} of {len(ended)} recorded tasks were not run "
                f"within {self.check_timeout_s:g} s; are there runners?"
            )
            return
        low, high = self.reward_range
        rewards = [await read_reward(self.store, rollout, low) for rollout in ended]
        pairs = zip(rewards, recorded, strict=True)
        differences = [reward - before.reward for reward, before in pairs if reward is not None]  # users rate the rest
        failures = [
            float(result.rollout.status == "failed") - (rollout.status == "failed")
            for rollout, result in zip(ended, recorded, strict=True)
        ]
        change = statistics.fmean(differences) if differences else 0.0
        summary = (
            f"candidate {state.trial} ran on {len(ended)} recorded tasks: "
            f"{sum(rollout.status == 'failed' for rollout in ended)} failed, "
            f"{change:+.3f} on the {len(differences)} with a reward"
        )
        tolerated = self.check_tolerance
        risk = self.risk * CHECK_SHARE / 2  # of each of two tests
        if is_lower(differences, tolerated * (high - low), risk) or is_lower(failures, tolerated, risk):
            await self._watch_again(f"{summary}; rejected by the offline check")
        else:
            await self._enter(
                f"{summary}; gets {self.share:.0%} of the traffic",
                phase="trial",
                share=self.share,
                served_trials=state.served_trials + 1,
            )

    async def _recorded(self) -> list[Result]:
        """The newest different tasks that were served with the stable version, with their rewards."""
        state, limit = self.state, self.check_tasks
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
                reward = await read_reward(self.store, rollout, self.reward_range[0])
                if reward is not None:
                    found[task] = Result(rollout, reward)
        return list(found.values())

    # --- trial: the candidate on a share of the traffic ---

    async def _try(self) -> None:
        state = self.state
        reader = self._reader({"control", "treatment"}, state.since - _CLOCKS_S, step=state.trial)
        trial = Trial(self, state)
        while not await self._is_superseded():
            await self._watch_promoted()
            results, horizon = await reader.read_new()
            trial.add(results, horizon)
            is_complete = horizon >= reader.read_at  # no result is missing
            if trial.verdict is not None or (is_complete and self.state.phase == "closing"):
                await self._end_trial(trial, reader.unrated)
                return
            is_late = self.store.now() - state.since >= self.max_trial_s
            if self.state.phase == "trial" and (is_late or reader.count("treatment") >= self.max_treated):
                note = f"candidate {state.trial} gets no more traffic and waits for its last rewards"
                await self._save(self.state.model_copy(update={"phase": "closing", "note": note}))
                logger.info("live learning: %s", note)
                continue  # the results that are known may be complete
            await asyncio.sleep(self.refresh_s)

    async def _end_trial(self, trial: Trial, unrated: Mapping[str, int]) -> None:
        """Promotes the candidate, or lets the stable version stay."""
        state, verdict, test = self.state, trial.verdict, trial.deciding_test
        low, high = test.interval
        summary = (
            f"candidate {state.trial}: {test.difference:+.3f} [{low:+.3f}, {high:+.3f}] "
            f"after {test.n_treatment} against {test.n_control} rewards"
            f"{describe_missing(test, unrated)}"
        )
        numbers = {
            "live/difference": test.difference,
            "live/low": low,
            "live/high": high,
            "live/treated": test.n_treatment,
            "live/unrated_treatment": unrated.get("treatment", 0),
            "live/unrated_control": unrated.get("control", 0),
            "live/promoted": float(verdict in ("better", "not worse")),
        }
        await self._check_alone()
        await self.store.add_metrics(state.trial, numbers)
        if verdict is None or verdict == "worse":
            end = "rolled back" if verdict == "worse" else "undecided; the stable version stays"
            await self._watch_again(f"{summary}; {end}")
            return
        note = f"candidate {state.trial} is {verdict} and is published"
        await self._save(state.model_copy(update={"phase": "closing", "note": note}))
        candidate = await self.store.get_resources_by_id(state.candidate or "")
        assert candidate is not None, "versions are never removed"
        update = await self.store.update_resources(split_version_id(state.stable)[0], candidate.resources)
        margin = next_margin(self, state) if verdict == "not worse" else 0.0
        note = f"{summary}; promoted as {update.version_id} because it is {verdict}"
        changes = self._begin_watch(update.version_id, tolerance=margin)
        await self._watch_again(note, margin_spent=state.margin_spent + margin, **changes)

    def _reader(self, groups: set[str], since: float, **where: Any) -> ResultReader:
        return ResultReader(
            self.store, groups, since, self.reward_timeout_s, self.rollout_timeout_s,
            where=where, failure_reward=self.reward_range[0],
        )  # fmt: skip

    # --- the watch over a promoted version, beside all phases ---

    def _begin_watch(self, promoted: str, *, tolerance: float) -> dict[str, Any]:
        """Returns the changes of the state with which a promoted version becomes the stable one."""
        is_watched = self.control_share > 0 and not self._has_ended
        return {
            "stable": promoted,
            "former": self.state.stable if is_watched else None,
            "control_share": self.control_share,
            "watched_trial": self.state.trial,
            "promoted_at": self.store.now(),
            "tolerance": tolerance,
            "alarm": "",
        }

    async def _beside_watch(self, work: Awaitable[T]) -> T:
        """Awaits work that may take long."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await self._watch_promoted()
                await asyncio.wait([task], timeout=self.refresh_s)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return task.result()

    async def _watch_promoted(self) -> None:
        """Compares the promoted version with the version before it, and publishes that one again if it was better.

        This ends the phase, as any other publication does.
        """
        state = self.state
        if state.former is None:
            return
        if state.alarm:
            await self._take_back(state.former)
            return
        if self._watched is None or self._watched[0] != state.watched_trial:
            groups = {"stable", "control", "former"}
            reader = self._reader(groups, state.promoted_at - _CLOCKS_S, **{WATCHED: state.watched_trial})
            self._watched = state.watched_trial, reader, make_watch(self, state)
        _, reader, watch = self._watched
        for result in (await reader.read_new())[0]:
            metadata = result.rollout.metadata or {}
            user = f"{metadata.get(KEY_HASH, result.rollout.rollout_id)}/{metadata.get(PERIOD)}"
            watch.add(result.reward, is_promoted=metadata["group"] != "former", unit=user)
        if watch.is_alarming:
            reason = (
                f"the promotion of candidate {state.watched_trial} is taken back: {watch.difference:+.3f} against "
                f"{state.former} of late, after {watch.n_promoted} against {watch.n_former} rewards"
            )
            logger.warning("live learning: %s", reason)
            numbers = {"live/alarm": 1.0, "live/alarm_difference": watch.difference, "live/watched": watch.n_promoted}
            await self._check_alone()
            await self.store.add_metrics(state.watched_trial, numbers)
            await self._save(state.model_copy(update={"alarm": reason, "alarms": state.alarms + 1}))
            await self._take_back(state.former)
        elif self.store.now() - state.promoted_at > self.control_s:
            note = f"candidate {state.watched_trial} is no longer compared with {state.former}"
            await self._save(state.model_copy(update={"former": None, "note": note}))

    async def _take_back(self, former: str) -> None:
        """Publishes the version before the promotion, unless this or another version was published since."""
        latest, before = await self.store.get_latest_resources(), await self.store.get_resources_by_id(former)
        assert before is not None, "versions are never removed"
        if latest is not None and latest.version_id == self.state.stable:
            await self.store.update_resources(split_version_id(self.state.stable)[0], before.resources)


def _check_id(state: LiveState, recorded: Rollout) -> str:
    """The id of a check, which is the same when a restarted learner queues it again."""
    text = f"{state.candidate}/{recorded.rollout_id}"
    return "ro-" + hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
