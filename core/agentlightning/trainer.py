"""``Trainer``: runs an algorithm with an agent, a store and runners."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentlightning.adapter.adapter import TraceAdapter
from agentlightning.algorithm.algorithm import Algorithm, FastAlgorithm, Gateway, RunContext
from agentlightning.errors import ConfigError
from agentlightning.execution import ExecutionStrategy
from agentlightning.frozen import FrozenDict, freeze, freeze_row
from agentlightning.litagent import LitAgent, RewardSpec, wrap
from agentlightning.litagent.function import first_resources
from agentlightning.plugin.registry import get_manager
from agentlightning.plugin.settings import require_least
from agentlightning.records import Dataset, Run
from agentlightning.resources import Resource, read_resources
from agentlightning.run.directory import open_directory
from agentlightning.run.job import DEFAULT_CONCURRENCY, LitAgentRunnerJob, Spec, TrainerJob, component
from agentlightning.run.proxies import bypass_proxies
from agentlightning.run.thread import run_beside_loop
from agentlightning.run.tracker import Tracker
from agentlightning.runner import Hook, LitAgentRunner, Runner
from agentlightning.store.factory import create_store
from agentlightning.store.protocol import LightningStore
from agentlightning.tracer.tracer import Tracer

logger = logging.getLogger("agentlightning")


class Trainer:
    """Runs an algorithm over an agent.

    Every component is an instance, a class, a registered name (``agl plugins`` lists them), the path of a class such as
    ``my_package.module:MyClass``, or ``{"name": ..., **settings}`` with such a name or path.
    """

    def __init__(
        self,
        *,
        algorithm: Algorithm | type[Algorithm] | Spec | None = None,
        store: LightningStore | type[LightningStore] | Spec | None = None,
        tracer: Tracer | type[Tracer] | Spec | None = None,
        adapter: TraceAdapter[Any] | type[TraceAdapter[Any]] | Spec | None = None,
        strategy: ExecutionStrategy | type[ExecutionStrategy] | Spec | None = None,
        runner: Runner[Any] | type[LitAgentRunner[Any]] | None = None,
        llm_proxy: Gateway | Spec | None = None,
        n_runners: int = 1,
        max_rollouts: int | None = None,
        initial_resources: Mapping[str, Resource | str] | None = None,
        hooks: Hook | Sequence[Hook] | None = None,
        port: int | None = None,
        trackers: Sequence[Tracker | Spec] | Tracker | Spec | None = None,
        run_dir: str | Path | None = None,
        resume: bool = False,
        max_concurrency: int | None = None,
        seed: int = 0,
    ) -> None:
        """Selects the components of a run.

        Args:
            algorithm: ``fit`` requires it, ``dev`` defaults to ``baseline``.
            store: an instance, a class or a URL; default ``store.db`` in ``run_dir`` (SQLite), or else ``memory://``.
            tracer: default ``otel``.
            adapter: default is the algorithm's ``default_adapter``; a mapping without ``name`` has settings for it.
            strategy: default ``cs``, runner processes; ``shm`` runs everything as threads.
            runner: an instance, which must be picklable for ``cs`` and the only runner for ``shm``, or a class; default
                is ``LitAgentRunner``.
            llm_proxy: the gateway; algorithms that need one create it by default. Its model is the resource ``llm``
                unless ``initial_resources`` has a model; several models have their own names.
            n_runners: runner processes (``cs``) or threads (``shm``).
            max_rollouts: each runner ends after this many rollouts.
            initial_resources: the agent's resources before training; a plain str is a prompt. They become the latest
                resources of the run, even in a store that was used before, unless the run is resumed.
            hooks: called around every rollout, in the runner's process.
            port: port of the served store; default is a free port.
            trackers: where metrics go; default ``console``, and ``jsonl`` with a ``run_dir``.
            run_dir: directory for store, metrics, checkpoints and report, used by one run only; default is none. The
                run is named after it, even in a shared store.
            resume: continue the interrupted or killed run in ``run_dir``; initial resources that are not given come
                from the run.
            max_concurrency: concurrent rollouts in each runner; default is what the algorithm proposes (``grpo``: 64
                over all runners), else 16.
            seed: for algorithms without a seed of their own; a resumed run keeps its seed.

        Raises:
            ConfigError: two values exclude each other.
            PluginError: no plugin offers a given name.
        """
        require_least(1, n_runners=n_runners, max_concurrency=max_concurrency)
        if resume and run_dir is None:
            raise ConfigError("resume=True needs run_dir, the directory of the run to continue")
        self.algorithm: Algorithm | None = component("algorithm", algorithm)
        self.run_dir = None if run_dir is None else Path(run_dir)
        run = None if self.run_dir is None else self.run_dir.resolve().name
        opened = create_store(store, run=run) if isinstance(store, str) else component("store", store)
        self.store: LightningStore | None = opened
        if isinstance(tracer, type):
            tracer = tracer()
        self.tracer: Tracer | Spec = tracer if tracer is not None else "otel"
        if isinstance(self.tracer, (str, Mapping)):
            get_manager().check("tracer", self.tracer)  # created in the runners' processes, but checked here
        if isinstance(adapter, Mapping) and not {"name", "type"} & set(adapter):
            default = self.algorithm.default_adapter if self.algorithm is not None else None
            adapter = {"name": default or "triplet", **adapter}
        self.adapter: TraceAdapter[Any] | None = component("adapter", adapter)
        self.llm_proxy: Gateway | None = component("gateway", llm_proxy)
        self.runner = runner
        self.n_runners = n_runners
        self.max_rollouts = max_rollouts
        self.initial_resources = None if initial_resources is None else read_resources(initial_resources)
        self.hooks: Sequence[Hook] = [hooks] if isinstance(hooks, Hook) else list(hooks or ())
        self.resume = resume
        self.seed = seed
        self.strategy = self._choose_strategy(strategy, port)
        if isinstance(runner, LitAgentRunner) and self.strategy.shares_process and self.strategy.n_runners > 1:
            raise ConfigError(
                f"{self.strategy.n_runners} runners in one process cannot share one object; give the class, as in "
                f"runner={type(runner).__name__}, or n_runners=1, which runs max_concurrency rollouts at once"
            )
        at_once = None if self.algorithm is None else self.algorithm.rollouts_at_once
        default_concurrency = DEFAULT_CONCURRENCY if at_once is None else math.ceil(at_once / self.strategy.n_runners)
        self.max_concurrency = default_concurrency if max_concurrency is None else max_concurrency
        self.run_config: Mapping[str, Any] = {}
        """Configuration to store in the run's record, in addition to the algorithm's name."""
        if trackers is None:
            trackers = ["console"] if self.run_dir is None else ["console", "jsonl"]
        several = trackers if isinstance(trackers, Sequence) and not isinstance(trackers, str) else [trackers]
        self.trackers: list[Tracker] = [component("tracker", tracker) for tracker in several]

    def __getstate__(self) -> dict[str, Any]:
        """Pickles only the settings, for ``LitAgent.trainer`` in a runner process; components stay in this process."""
        components = ("algorithm", "store", "adapter", "llm_proxy", "strategy", "runner", "trackers", "hooks")
        return {**self.__dict__, **dict.fromkeys(components)}

    def fit(
        self,
        agent: Any = None,
        train_dataset: Dataset[Any] | None = None,
        val_dataset: Dataset[Any] | None = None,
        *,
        reward: RewardSpec | None = None,
    ) -> Run:
        """Trains until the algorithm is done.

        Args:
            agent: a function, decorated or plain, a LitAgent, an Environment, or an object of a framework that a plugin
                supports. None for an algorithm that runs no agent, such as ``sft``.
            train_dataset: tasks to learn from: a sequence, or a DataFrame, whose rows become dicts. Without any tasks,
                an Environment's own.
            val_dataset: tasks to evaluate with.
            reward: ``reward(task, output, rollout)``, or a component such as ``judge``, for agents that do not emit
                their reward themselves.

        Returns:
            The run, with its final status.

        Raises:
            ConfigError: the algorithm is missing, a dataset is invalid, or the algorithm cannot work with the setup.
            Exception: any error of the algorithm. Errors of the agent are only stored on their attempts; a run in which
                every rollout failed has the status ``failed``.
        """
        if self.algorithm is None:
            names = ", ".join(get_manager().components("algorithm"))
            raise ConfigError(f"fit needs an algorithm, as in Trainer(algorithm='baseline'); installed: {names}")
        if agent is None and self.algorithm.runs_agent:
            raise ConfigError(
                f"{type(self.algorithm).__name__} runs an agent; give it, as in fit(agent, train_dataset)"
            )
        agent = wrap(never_called if agent is None else agent, reward)
        return self._run(self.algorithm, agent, train_dataset, val_dataset)

    def dev(
        self,
        agent: Any,
        train_dataset: Dataset[Any] | None = None,
        val_dataset: Dataset[Any] | None = None,
        *,
        reward: RewardSpec | None = None,
    ) -> Run:
        """Does a dry run: ``fit`` with a FastAlgorithm, by default ``baseline``; raises ConfigError for others."""
        algorithm = self.algorithm if self.algorithm is not None else get_manager().create("algorithm", "baseline")
        if not isinstance(algorithm, FastAlgorithm):
            raise ConfigError(
                f"dev is a dry run and needs a FastAlgorithm, but the trainer has {type(algorithm).__name__}; "
                "use fit, or Trainer(algorithm='baseline')"
            )
        return self._run(algorithm, wrap(agent, reward), train_dataset, val_dataset)

    def _choose_strategy(
        self, strategy: ExecutionStrategy | type[ExecutionStrategy] | Spec | None, port: int | None
    ) -> ExecutionStrategy:
        if isinstance(strategy, ExecutionStrategy):
            if self.n_runners not in (1, strategy.n_runners):
                logger.warning(
                    "n_runners = %d has no effect: the given strategy has %d", self.n_runners, strategy.n_runners
                )
            _check_port(port, getattr(strategy, "server_port", None))
            return strategy
        spec: dict[str, Any] = dict(strategy) if isinstance(strategy, Mapping) else {"name": strategy or "cs"}
        spec.setdefault("n_runners", self.n_runners)
        if port is not None:
            _check_port(port, spec.setdefault("server_port", port))
        chosen: ExecutionStrategy = get_manager().create("strategy", spec)
        return chosen

    def _run(
        self,
        algorithm: Algorithm,
        agent: LitAgent[Any],
        train_dataset: Dataset[Any] | None,
        val_dataset: Dataset[Any] | None,
    ) -> Run:
        if train_dataset is None and val_dataset is None:
            train_dataset, val_dataset = agent.own_tasks("train"), agent.own_tasks("val")
        train_dataset, val_dataset = to_rows(train_dataset, "train_dataset"), to_rows(val_dataset, "val_dataset")
        _check_datasets(train_dataset=train_dataset, val_dataset=val_dataset)
        adapter = self.adapter
        if adapter is None and algorithm.default_adapter is not None:
            adapter = get_manager().create("adapter", algorithm.default_adapter)
        context = RunContext(
            store=self.store,
            adapter=adapter,
            llm_proxy=self.llm_proxy,
            train_dataset=train_dataset,
            val_dataset=val_dataset,
            initial_resources=first_resources(agent, self.initial_resources),
            trainer=self,
            directory=self.run_dir,
            seed=self.seed,
            is_resumed=self.resume,
        )
        return run_beside_loop(functools.partial(self._execute, algorithm, agent, context))

    def _execute(self, algorithm: Algorithm, agent: LitAgent[Any], context: RunContext) -> Run:
        bypass_proxies()  # processes that the strategy starts inherit it
        if self.strategy.role != "runner":
            get_manager().require(*(f"{cls.__module__}:{cls.__qualname__}" for cls in type(algorithm).__mro__))
            algorithm.check_setup(context)
        with contextlib.ExitStack() as stack:
            if self.run_dir is not None:
                record = stack.enter_context(open_directory(self.run_dir, resume=self.resume, seed=self.seed))
                context.key, context.seed = record["key"], record.get("seed", 0)
            store = self._open_store(context)
            if context.store is None:
                stack.callback(lambda: asyncio.run(store.close()))
            context.run = Run(config={**self.run_config, "algorithm": type(algorithm).__name__})
            job = TrainerJob(algorithm, context, self.trackers, self.resume)
            runner_job = LitAgentRunnerJob(
                agent, self.tracer, self.runner, self.max_rollouts, self.max_concurrency, tuple(self.hooks), self
            )
            if self.strategy.role != "runner":
                asyncio.run(store.get_run_by_id(store.run_id))  # a client learns the server's time from its responses
            began = store.now()
            self.strategy.execute(job, runner_job, store)
            if context.run.status == "running":  # the algorithm ran in another process
                context.run = asyncio.run(store.get_run_by_id(store.run_id)) or context.run
            if self.strategy.role == "runner":
                return context.run
            steps = [step for step in asyncio.run(store.query_metrics()) if step.time >= began]
            scores = {name: value for step in steps for name, value in step.values.items()}
            return context.run.model_copy(update={"scores": FrozenDict(scores)})

    def _open_store(self, context: RunContext) -> LightningStore:
        """Returns the store of this run. A store that already has another run is scoped to the directory's name."""
        if context.store is None:
            own = self.run_dir is not None and self.strategy.role != "runner"
            return create_store(f"sqlite:///{self.run_dir}/store.db" if own else "memory://")
        if self.run_dir is None or self.strategy.role != "both":
            return context.store
        name, known = self.run_dir.resolve().name, asyncio.run(context.store.get_run_by_id(context.store.run_id))
        if known is None or known.name == name:
            return context.store
        logger.warning("the store already has the run %r: this run is in store.with_run(%r)", known.name, name)
        return context.store.with_run(name)


def never_called(task: Any) -> float:
    """The agent of a run whose algorithm runs none."""
    raise ConfigError("the run has no agent; give it, as in fit(agent, tasks)")


def _check_port(port: int | None, of_strategy: int | None) -> None:
    if port not in (None, of_strategy):
        own = "" if of_strategy is None else f", which has server_port = {of_strategy}"
        fix = "if it serves the store, set its server_port"
        raise ConfigError(f"port = {port} does not apply to the given strategy{own}; {fix}")


def to_rows(dataset: Any, name: str) -> Any:
    """Returns the rows of a DataFrame, or of a list that is not JSON, as frozen JSON, and anything else unchanged."""
    if hasattr(dataset, "to_dicts"):
        dataset = dataset.to_dicts()
    elif hasattr(dataset, "iloc") and hasattr(dataset, "columns"):  # pandas, where NaN means that a value is missing
        dataset = dataset.astype(object).where(dataset.notna(), None).to_dict(orient="records")
    if not isinstance(dataset, (list, tuple)):
        return dataset
    with contextlib.suppress(ConfigError):
        freeze(list(dataset))
        return dataset
    return [freeze_row(row, f"{name}[{position}]") for position, row in enumerate(dataset)]


def _check_datasets(**datasets: Any) -> None:
    given = {name: dataset for name, dataset in datasets.items() if dataset is not None}
    for name, dataset in given.items():
        if isinstance(dataset, (str, bytes, Mapping)) or not (
            hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        ):
            raise ConfigError(
                f"{name} is a {type(dataset).__name__}: a sequence of tasks is needed, with len() and indexing, such "
                "as a list; read files first, or name them in a configuration for `agl train`"
            )
    if given and not any(len(dataset) for dataset in given.values()):
        raise ConfigError(f"{' and '.join(given)} hold{'s' * (len(given) == 1)} no task")
