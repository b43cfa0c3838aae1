"""The two halves of a run, which an execution strategy executes: the algorithm's and a runner's."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from agentlightning.algorithm.algorithm import CHECKPOINT, Algorithm, RunContext, model_resources
from agentlightning.errors import ConfigError, LightningError
from agentlightning.execution import RUNNERS_FAILED
from agentlightning.litagent import LitAgent
from agentlightning.plugin.registry import get_manager
from agentlightning.resources import LLM
from agentlightning.run.directory import recover_directory
from agentlightning.run.thread import StopEvent, run_in_thread
from agentlightning.run.tracker import Tracker, follow
from agentlightning.runner import Hook, LitAgentRunner, Runner
from agentlightning.store.protocol import LightningStore
from agentlightning.tracer.tracer import Tracer

Spec: TypeAlias = str | Mapping[str, Any]
"""A component by its registered name or the path of its class, or ``{"name": ..., **settings}``."""

DEFAULT_CONCURRENCY = 16

logger = logging.getLogger("agentlightning")


def component(kind: Any, given: Any) -> Any:
    """Returns a component that is given as an instance, a class, a name or settings."""
    return get_manager().create(kind, given) if isinstance(given, (str, type, Mapping)) else given


@dataclass
class TrainerJob:
    """The algorithm's half of a run."""

    algorithm: Algorithm
    context: RunContext
    trackers: Sequence[Tracker]
    resume: bool = False

    def __getstate__(self) -> dict[str, Any]:
        """Omits the store and the trainer, which cannot be sent to another process."""
        context = dataclasses.replace(self.context, store=None, trainer=None)
        return {**self.__dict__, "context": context}

    async def __call__(self, store: LightningStore) -> None:
        """Runs the algorithm and the trackers, and stores the final status of the run."""
        algorithm, context = self.algorithm, self.context
        context.store = store
        directory = context.directory
        name = directory.resolve().name if directory is not None else store.run_id
        context.run = await store.create_run(name, config=context.run.config)
        if context.run.status != "running":  # it is resumed, or the store was used before
            context.run = await store.update_run(context.run.run_id, "running")
        algorithm.context = context
        following = asyncio.create_task(follow(store, context.run, self.trackers, directory))
        await asyncio.sleep(0)  # lets the trackers subscribe before the first event
        status: Any = "failed"
        gateway = context.llm_proxy
        try:
            if gateway is not None:
                if gateway.store is None:
                    gateway.store = store
                await gateway.start()
                given = context.initial_resources or {}
                if not any(isinstance(resource, LLM) for resource in given.values()):
                    context.initial_resources = {**model_resources(gateway), **given}
            await self._publish_initial(store)
            if self.resume and directory is not None:
                _load_state(algorithm, recover_directory(directory / CHECKPOINT))
            await self._run_algorithm()
            await context.flush()
            status = "failed" if await _has_only_failed(store) else "succeeded"
        except (asyncio.CancelledError, KeyboardInterrupt) as stop:
            if RUNNERS_FAILED not in stop.args:
                status = "interrupted"
            raise
        finally:
            try:
                if gateway is not None:
                    await gateway.stop()
            finally:
                context.run = await store.update_run(context.run.run_id, status)
            await asyncio.wait([following], timeout=60.0)
            if following.done() and (error := following.exception()) is not None:
                logger.error("the trackers missed the end of the run: %s", error)
            following.cancel()
            if directory is not None:
                await _write_reports(store, directory)

    async def _publish_initial(self, store: LightningStore) -> None:
        """Publishes the initial resources, unless the run continues from the latest resources of its store."""
        given, latest = self.context.initial_resources, await store.get_latest_resources()
        if self.resume and latest is not None:
            (first,) = await store.query_resources(limit=1)
            self.context.initial_resources = {**first.resources, **(given or {})}
        if latest is None or (given and not self.resume and not self.algorithm.continues_from_latest):
            if given and (latest is None or dict(latest.resources) != dict(given)):
                await store.add_resources(given)
        elif not self.resume:
            why = "its algorithm continues from them" if given else "it has no initial_resources"
            logger.warning("the run starts from the latest resources of its store, %s: %s", latest.version_id, why)

    async def _run_algorithm(self) -> None:
        algorithm, context = self.algorithm, self.context
        run = functools.partial(algorithm.run, train_dataset=context.train_dataset, val_dataset=context.val_dataset)
        if algorithm.is_async():
            work = run()
            if work is not None:
                await work
        else:
            await run_in_thread(run, name="algorithm")


def _load_state(algorithm: Algorithm, directory: Path) -> None:
    if not directory.is_dir():
        if type(algorithm).save_state is not Algorithm.save_state:
            logger.warning("there is no %s yet; %s starts from the beginning", directory, type(algorithm).__name__)
        return
    try:
        algorithm.load_state(directory)
    except LightningError:
        raise
    except Exception as error:  # isolation point: reading a damaged file may raise anything
        raise ConfigError(
            f"the state of {type(algorithm).__name__} in {directory} cannot be loaded "
            f"({type(error).__name__}: {error}); restore its files from a copy, or start a new run"
        ) from error


async def _write_reports(store: LightningStore, directory: Path) -> None:
    manager = get_manager()
    for name in manager.components("report"):
        try:
            await manager.get("report", name)(store, directory)
        except Exception as error:  # isolation point: a missing report must not change the result of the run
            why = f"{type(error).__name__}: {error}"
            logger.warning("the report %r of %s could not be written: %s", name, directory, why)


async def _has_only_failed(store: LightningStore) -> bool:
    """Whether rollouts were run and all of them failed."""
    if (await store.query_rollouts(status_in=["succeeded"], limit=1)).total:
        return False
    return (await store.query_rollouts(status_in=["failed"], limit=1)).total > 0


@dataclass(frozen=True)
class LitAgentRunnerJob:
    """A runner's half of a run; it is sent to runner processes."""

    agent: LitAgent[Any]
    tracer: Tracer | Spec
    runner: Runner[Any] | type[LitAgentRunner[Any]] | None = None
    max_rollouts: int | None = None
    max_concurrency: int = DEFAULT_CONCURRENCY
    hooks: Sequence[Hook] = field(default=())
    trainer: Any = None
    """The ``Trainer``; in another process it has only its settings."""

    async def __call__(self, store: LightningStore, worker_id: str, stop: StopEvent) -> bool:
        """Runs rollouts until ``stop`` is set; returns False if its process should be replaced."""
        runner = self.runner
        if runner is None or isinstance(runner, type):
            cls = LitAgentRunner if runner is None else runner
            tracer = component("tracer", self.tracer)
            runner = cls(tracer, self.max_rollouts, max_concurrency=self.max_concurrency)
        if isinstance(runner, LitAgentRunner):
            runner.trainer = self.trainer
        with runner.run_context(agent=self.agent, store=store, hooks=self.hooks, worker_id=worker_id):
            await runner.iter(stop)
        return not (isinstance(runner, LitAgentRunner) and runner.is_worn_out)
