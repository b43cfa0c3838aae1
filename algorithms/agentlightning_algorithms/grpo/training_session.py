"""``TrainingSession``: the building blocks of weight training, for ``grpo`` and for custom algorithms."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import resource
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import torch

from agentlightning.algorithm.algorithm import CHECKPOINT, Gateway, RunContext
from agentlightning.errors import ConfigError
from agentlightning.plugin.registry import get_manager
from agentlightning.reward import count_failed
from agentlightning.run.directory import atomic_directory, recover_directory
from agentlightning.types import Dataset, RolloutMode
from agentlightning_algorithms.grpo.batches import make_batches
from agentlightning_algorithms.grpo.collector import RolloutCollector, model_entries
from agentlightning_algorithms.grpo.episode import Episode, count_staleness, describe_episodes, pass_at_k
from agentlightning_algorithms.grpo.experience import estimate_advantages, training_spans, transition_rows
from agentlightning_algorithms.grpo.sampling import Sample, flatten, sample_answers
from agentlightning_algorithms.grpo.settings import GRPOSettings
from agentlightning_algorithms.grpo.teacher import Teacher
from agentlightning_algorithms.grpo.trained_policy import (
    MODEL_NAMES,
    CheckpointWriter,
    PolicySet,
    copy_plain,
    join_experience,
    join_metrics,
)
from agentlightning_algorithms.shared.advantage import Scored
from agentlightning_algorithms.shared.policy.settings import load_part
from agentlightning_algorithms.shared.policy.training_row import TrainingRow
from agentlightning_algorithms.shared.policy.updater import Objective
from agentlightning_algorithms.shared.policy_backend import PolicyBackend, PolicySetup, serve_models
from agentlightning_plugins.shared.training_records.record import LEDGER_SPAN, LedgerEntry

logger = logging.getLogger("agentlightning")
T = TypeVar("T")

_EVALUATED: Final = ("reward", "success_rate", "failure_rate")
"""Metrics of evaluations, in addition to those with a prefix of ``_EVALUATED_BY_NAME``."""
_EVALUATED_BY_NAME: Final = ("reward/", "rewards/", "pass@")


class TrainingSession:
    """A training whose steps are written by the algorithm; :meth:`open` starts the training.

    ``grpo`` itself is this loop::

        async with TrainingSession.open(context, settings, train_dataset, val_dataset) as session:
            async for _ in session.steps():
                await session.learn(await session.rollouts())

    Attributes:
        settings: the settings of ``grpo``.
        collector: rolls out tasks.
        policies: the trained policies with their optimizers; one, unless the setting ``policies`` names several.
        own_state: state of the loop's own, which every checkpoint stores and a resumed session has again: plain values,
            lists, dicts and tensors.
    """

    def __init__(
        self,
        collector: RolloutCollector,
        train: Dataset[Any] | None = None,
        val: Dataset[Any] | None = None,
        *,
        teacher: Teacher | None = None,
        best_reward: float | None = None,
    ) -> None:
        self.settings = collector.settings
        self.collector = collector
        self.policies = collector.policies
        self.own_state: dict[str, Any] = {}
        self._teacher = teacher
        self._train = train
        self._val = val
        self._batches = make_batches(collector, train) if train is not None and len(train) else None
        self._position = collector.position
        self._writer = CheckpointWriter(self.policies, collector.context.directory, self.settings.checkpoints)
        self._best_reward = best_reward
        """Best reward on the validation set so far."""
        self._metrics: dict[str, float] = {}
        self._waited_s = 0.0
        """How long this step has waited for rollouts."""

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls,
        context: RunContext,
        settings: GRPOSettings,
        train_dataset: Dataset[Any] | None = None,
        val_dataset: Dataset[Any] | None = None,
        *,
        resume_from: Path | None = None,
    ) -> AsyncIterator[TrainingSession]:
        """Starts the policy server and loads the model; continues from a checkpoint, by default the run's.

        Raises:
            ConfigError: the model does not exist, or the checkpoint is of another model.
        """
        store = context.store
        if store is None:
            raise ConfigError("the training has no store; run it through a Trainer")
        if settings.train_threads is not None:
            torch.set_num_threads(settings.train_threads)
        if resume_from is None and context.directory is not None:
            resume_from = recover_directory(context.directory / CHECKPOINT)
        assert settings.update is not None, "set by __post_init__"
        seed = context.seed if settings.seed is None else settings.seed
        adapter = context.adapter or get_manager().create("adapter", "triplet")
        async with contextlib.AsyncExitStack() as stack:
            directory = context.directory
            if directory is None:
                directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="agl-grpo-")))
            directory.mkdir(parents=True, exist_ok=True)
            backend = cast(PolicyBackend, get_manager().create("policy_backend", settings.backend))
            setup = PolicySetup(
                model=settings.model,
                model_name=MODEL_NAMES["train"],
                directory=directory,
                dtype=settings.dtype,
                device=settings.device,
                threads=settings.sample_threads,
                max_batch_size=settings.max_batch_size,
                seed=seed,
                swap_in_flight=settings.is_asynchronous,
            )
            stack.push_async_callback(backend.stop)
            # Both import torch and read the weights.
            loading = asyncio.to_thread(PolicySet.load, settings, replace(settings.update, seed=seed))
            policies, _ = await asyncio.gather(loading, backend.start(setup))
            gateway = context.llm_proxy
            if gateway is None:
                gateway = cast(Gateway, get_manager().get("gateway", "gateway")(store=store))
                await gateway.start()
                stack.push_async_callback(gateway.stop)
            serve_models(gateway, model_entries(backend.model_entry, settings, policies))
            collector = RolloutCollector(settings, context, store, adapter, gateway, backend, policies, directory)
            teacher = None
            if settings.teacher is not None:
                student = policies.first.updater.policy
                teacher = await asyncio.to_thread(Teacher.load, settings.teacher, student, dtype=settings.dtype)
            best_reward, own_state = None, dict[str, Any]()
            if resume_from is not None and resume_from.is_dir():
                state = await asyncio.to_thread(policies.read, resume_from)
                collector.restore(state)
                best_reward, own_state = state["best_reward"], state["own_state"]
            session = cls(collector, train_dataset, val_dataset, teacher=teacher, best_reward=best_reward)
            session.own_state |= own_state
            session.try_parts()
            has_ended = False
            try:
                yield session
                has_ended = True
            finally:
                if session._batches is not None:
                    await session._batches.close(has_ended=has_ended)
                await session._writer.wait()

    def try_parts(self) -> None:
        """Calls estimator and task sampler once, so that a mistake shows before the first rollout.

        Raises:
            ConfigError: naming the part that failed.
        """
        made = [Scored(value, "made", rollout) for rollout, value in enumerate((1.0, 0.0))]
        estimate_advantages(made, self.settings.experience)
        if self._train is not None and len(self._train):
            self.collector.choose_tasks(self._train, self.settings.tasks_per_step, self.collector.position)

    @property
    def step(self) -> int:
        """Updates made so far; also the version of the weights."""
        return self.collector.step

    async def steps(self) -> AsyncIterator[int]:
        """Yields the number of each step until ``steps`` or ``target_reward`` is reached.

        The weights are published before each step and evaluated every ``eval_every`` steps. Each step ends with metrics
        and, when due, a checkpoint, which is written during the next step. A step in which the algorithm makes no
        update counts as an update without effect.
        """
        settings = self.settings
        await self.publish()
        reached = False
        if self.step == 0:
            self.log({**await self.evaluate(), **await self._test()})
            await self._report()
        elif settings.target_reward is not None:  # the run may have been stopped after it reached its target
            reached = self._is_reached(await self.evaluate())
        while self.step < settings.steps and not reached:
            number, started = self.step, time.monotonic()
            yield number
            if self.step == number:
                await self.optim_step()
            learned = time.monotonic()
            if self._batches is not None:
                await self._batches.settle()
            published = time.monotonic()
            await self.publish()
            now, waited_s = time.monotonic(), self._waited_s + published - learned
            self._waited_s = 0.0
            self.log({"wait_s": waited_s, "publish_s": now - published, "seconds": now - started})
            is_last = self.step >= settings.steps
            if is_last or (settings.eval_every and self.step % settings.eval_every == 0):
                self.log(await self.evaluate())
                reached = self._is_reached(self._metrics)
            if is_last or reached:
                self.log(await self._test())
            self.log({"progress": 1.0 if reached else self.step / settings.steps})
            await self._report()
            is_due = self._writer.is_due(self.step) or is_last or reached
            await self._writer.begin(self.state() if is_due else None, self.step)

    def log(self, metrics: Mapping[str, float]) -> None:
        """Adds metrics to the current step."""
        self._metrics.update(metrics)

    async def rollouts(self) -> list[list[Episode]]:
        """Rolls out the next ``tasks_per_step`` tasks, ``rollouts_per_task`` times each; returns one list per task."""
        if self._batches is None:
            raise ConfigError("rollouts need a train_dataset with at least one task; give one to TrainingSession.open")
        started = time.monotonic()
        batch = await self._batches.take()
        self._waited_s += time.monotonic() - started
        self._position = batch.position
        tokens = sum(len(call.response.get("token_ids") or ()) for e in batch.episodes for call in e.triplets)
        self.log(
            {
                **self._describe(batch.episodes),
                **count_staleness(batch.episodes, self.step),
                **batch.metrics,
                "tokens_per_s": tokens / max(batch.seconds, 1e-9),
                "sampled_tokens": float(tokens),
                "staleness": float(self.step - batch.version),
                "sample_s": batch.seconds,
            }
        )
        groups: dict[str, list[Episode]] = {}
        for episode in batch.episodes:
            groups.setdefault(episode.group, []).append(episode)
        return list(groups.values())

    async def learn(self, groups: Sequence[Sequence[Episode]]) -> None:
        """Updates the weights once as ``grpo`` does, logs metrics, and records each rollout's use in the store.

        Rollouts are compared within their groups. The settings of the ``experience`` choose the rows and their
        advantages; several policies and a ``teacher`` are trained with, too.
        """
        await self._begin_update()
        started = time.monotonic()
        settings, collector = self.settings, self.collector
        everything = [episode for group in groups for episode in group]
        episodes, oldest = await collector.shape(everything), self.step - settings.staleness
        compared = {episode.rollout.rollout_id: episode for episode in episodes}
        updates, parts, by_policy = [], [], dict[str, float]()
        for policy in self.policies:
            learn = functools.partial(policy.learn, episodes, settings, self._teacher, oldest)
            if self.step == settings.profile_step and collector.context.directory is not None:
                learn = functools.partial(_profile, learn, collector.context.directory, policy.name)
            experience, found = await asyncio.to_thread(learn)
            parts.append((experience, policy.updater.uses))
            updates.append(found)
            by_policy |= {f"{policy.prefix}{name}": value for name, value in found.items() if name != "seconds"}
        joined = join_metrics(updates)
        train_s = joined.pop("seconds")
        collector.step, collector.position = self.policies.first.updater.updates, self._position
        recording = time.monotonic()
        whole, uses = join_experience(parts)
        removed = [episode for episode in everything if episode.rollout.rollout_id not in compared]
        whole.left_out.update((id(call), "filtered") for episode in removed for call in episode.triplets)
        records = await asyncio.to_thread(
            training_spans,
            whole,
            self.step,
            episodes=[compared.get(episode.rollout.rollout_id, episode) for episode in everything],
            uses=uses,
            failed_reward=settings.experience.failed_reward,
            decode=self.policies.first.decode,
        )
        await collector.store.add_many_spans(records)
        outcomes = Counter(LedgerEntry.from_span(span).outcome for span in records if span.name == LEDGER_SPAN)
        record_s = time.monotonic() - recording
        is_shaped = settings.experience.reward_shaping is not None
        shaped = [episode.reward for episode in episodes if is_shaped and episode.reward is not None]
        await collector.delete_old_rollouts()
        self._metrics = {**joined, **self._metrics, **by_policy}  # rollouts() logged the lengths of all calls
        self.log(
            {
                "train_s": train_s,
                "prepare_s": time.monotonic() - started - train_s - record_s,
                "record_s": record_s,
                **({"shaped_reward": statistics.fmean(shaped)} if shaped else {}),
                **{f"outcome/{name}": float(count) for name, count in outcomes.items()},
                **_measure_memory(settings.device),
            }
        )

    def rows(self, episodes: Iterable[Episode], advantage: float = 1.0) -> list[TrainingRow]:
        """Returns a row with this advantage for each model call of the episodes that can be trained on."""
        self._check_own_steps()
        policy, forced = self.policies.first.updater.policy, self.settings.distribution
        found = (row for episode in episodes for row in transition_rows(episode, advantage, forced))
        return [row for row in found if row.is_within(policy.max_length, policy.vocabulary)]

    async def sample(self, messages: Sequence[Mapping[str, Any]], n: int = 1, **sampling: Any) -> list[Sample]:
        """Samples ``n`` answers to a conversation from the published weights, without a rollout.

        ``sampling`` are parameters of a chat completion; default: the ``sampling`` of the settings.
        """
        entry, settings = self.collector.backend.model_entry, self.settings
        given = {**flatten(settings.sampling or {}), **sampling, "n": n}
        return await sample_answers(entry, messages, given, settings.distribution, self.step)

    async def forward_backward(
        self, rows: Sequence[TrainingRow], loss: str | Objective | None = None
    ) -> Mapping[str, float]:
        """Adds the gradient of a loss over rows; see :meth:`Updater.forward_backward`.

        ``loss`` is a function with the signature of a ``policy_loss`` component, or the name of a component, such as
        ``cross_entropy``; default: ``objective``.

        Raises:
            ConfigError: a setting that only :meth:`learn` uses.
        """
        self._check_own_steps()
        await self._finish_checkpoint()  # the reference model takes the place of the weights for a moment
        return await asyncio.to_thread(self.policies.first.updater.forward_backward, rows, loss)

    async def optim_step(self) -> dict[str, float]:
        """Updates the weights with the gradients added since the last step; returns and logs metrics."""
        await self._begin_update()
        metrics, *_ = [await asyncio.to_thread(policy.updater.optim_step) for policy in self.policies]
        metrics["train_s"] = metrics.pop("seconds")
        self.collector.step, self.collector.position = self.policies.first.updater.updates, self._position
        await self.collector.delete_old_rollouts()
        self.log(metrics)
        return metrics

    async def publish(self) -> None:
        """Makes agents' calls and :meth:`sample` use the newest weights."""
        await self.collector.publish()

    async def evaluate(self, dataset: Dataset[Any] | None = None, mode: RolloutMode = "val") -> dict[str, float]:
        """Evaluates the published weights, by default on the validation set; the best are kept in ``best``."""
        dataset = self._val if dataset is None else dataset
        if dataset is None or not len(dataset):
            return {}
        started = time.monotonic()
        episodes = await self.collector.roll_out_all(dataset, mode)
        found = self._describe(episodes)
        reward = found.get("reward")  # missing if every rollout failed and failed_reward is None
        if mode == "val" and reward is not None and (self._best_reward is None or reward > self._best_reward):
            self._best_reward = reward
            if self.collector.context.directory is not None:
                await asyncio.to_thread(self._save_best, self.collector.context.directory)
        if self.settings.eval_rollouts > 1:
            found |= pass_at_k(episodes, self.settings.success_threshold)
        kept = {name: found[name] for name in found if name in _EVALUATED or name.startswith(_EVALUATED_BY_NAME)}
        return {**{f"{mode}_{name}": value for name, value in kept.items()}, f"{mode}_s": time.monotonic() - started}

    async def checkpoint(self) -> None:
        """Begins to write all that a resumed run needs to the run's directory; does nothing without a directory.

        The checkpoint replaces the previous one when it is complete. The next update waits for it.

        Raises:
            ConfigError: ``own_state`` has something that a checkpoint cannot hold.
        """
        await self._writer.begin(self.state(), self.step)

    def state(self) -> dict[str, dict[str, Any]]:
        """Returns the state that a checkpoint stores, by policy name."""
        own = {**self.collector.state(), "best_reward": self._best_reward, "own_state": copy_plain(self.own_state)}
        return {p.name: p.updater.state({**own, "watch": p.monitor.state()}) for p in self.policies}

    def _check_own_steps(self) -> None:
        """Refuses settings that steps without :meth:`learn` would ignore."""
        settings, experience = self.settings, self.settings.experience
        unused = [name for name in ("policies", "teacher") if getattr(settings, name) is not None]
        assert settings.update is not None, "set by GRPOSettings"
        unused += [f"update.{name}" for name in ("minibatches", "epochs") if getattr(settings.update, name) > 1]
        unused += [
            f"experience.{field.name}"
            for field in fields(experience)
            if field.name != "failed_reward" and getattr(experience, field.name) != field.default
        ]
        if unused:
            raise ConfigError(f"only TrainingSession.learn uses {unused[0]}; leave it out, or train with learn")

    async def _begin_update(self) -> None:
        """Begins the rollouts that run during an update, and waits until the weights may change."""
        if self._batches is not None:
            await self._batches.begin_next()
        await self._finish_checkpoint()

    async def _finish_checkpoint(self) -> None:
        """Waits until the last checkpoint is written, and logs how long that took."""
        before_s = self._writer.waited_s
        await self._writer.wait()
        if self._writer.seconds is not None:
            wait_s = self._writer.waited_s - before_s
            self.log({"checkpoint_s": self._writer.seconds, "checkpoint_wait_s": wait_s})

    async def _test(self) -> dict[str, float]:
        dataset = self.settings.test_dataset
        return {} if dataset is None else await self.evaluate(dataset, "test")

    def _save_best(self, directory: Path) -> None:
        with atomic_directory(directory / "best") as scratch:
            self.policies.save(scratch)

    def _describe(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """Returns rewards, lengths and durations of episodes."""
        threshold, failed_reward = self.settings.success_threshold, self.settings.experience.failed_reward
        if failed_reward is not None:  # an evaluation in which most rollouts fail must not be the best of the run
            failed_reward = count_failed([self.collector.reward_check.lowest], failed_reward)
        found = describe_episodes(episodes, success_threshold=threshold, failed_reward=failed_reward)
        for name in self.settings.extra_metrics:
            found |= load_part("training_metrics", name)(episodes)
        return found

    def _is_reached(self, metrics: Mapping[str, float]) -> bool:
        target = self.settings.target_reward
        return target is not None and metrics.get("val_reward", -math.inf) >= target

    async def _report(self) -> None:
        """Records the metrics of the step and logs the warnings that they cause."""
        metrics, self._metrics = self._metrics, {}
        hint = self.policies.first.monitor.idle_hint(metrics)
        if hint is not None:
            logger.info("step %d: %s", self.step, hint)
        for warning in self.policies.observe(metrics) if self.step else ():
            logger.warning("step %d: %s", self.step, warning)
        active = sum(policy.monitor.active for policy in self.policies)
        await self.collector.store.add_metrics(self.step, {**metrics, "warnings": float(active)})


def _profile(learn: Callable[[], T], directory: Path, name: str) -> T:
    """Returns what ``learn`` returns, and writes where its time went: a table, and a trace for chrome://tracing."""
    with torch.profiler.profile() as profiler:
        found = learn()
    stem = f"profile-{name}" if name else "profile"
    profiler.export_chrome_trace(str(directory / f"{stem}.json"))
    table = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=40)
    (directory / f"{stem}.txt").write_text(table, encoding="utf-8")
    return found


def _measure_memory(device: str) -> dict[str, float]:
    """Returns peak memory in GB: of this process, and of the GPU since the last step."""
    unit = 1 if sys.platform == "darwin" else 1024
    memory = {"memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9}
    if device.startswith("cuda"):
        memory["gpu_memory_gb"] = torch.cuda.max_memory_allocated(device) / 1e9
        torch.cuda.reset_peak_memory_stats(device)
    return memory
