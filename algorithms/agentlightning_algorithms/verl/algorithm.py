"""``verl``: trains a model's weights on many GPUs with verl (Ray, FSDP, vLLM).

    verl's trainer requests rollouts -> store -> runners -> agents -> gateway -> verl's inference replicas
    spans -> triplets -> rows -> advantages and updates by verl -> new weights in the replicas -> resources published

Hybrid Flow, Sheng et al. 2024, arXiv:2409.19256.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

from agentlightning.adapter.adapter import TraceAdapter
from agentlightning.algorithm.algorithm import Algorithm, Gateway
from agentlightning.errors import ConfigError
from agentlightning.plugin.registry import get_manager
from agentlightning.run.thread import run_in_thread
from agentlightning.store.protocol import LightningStore
from agentlightning.types import Dataset, Triplet
from agentlightning_algorithms.shared.trained_model import TrainingRecord, find_model
from agentlightning_algorithms.verl.config import compose_config, compose_without_verl, dump_config, flatten
from agentlightning_algorithms.verl.controller import RolloutController, RolloutSettings, cancel_open
from agentlightning_algorithms.verl.environment import check_release, check_run, start_ray

if TYPE_CHECKING:
    from omegaconf import DictConfig


_SEEDS: Final = (
    "data.seed",
    "actor_rollout_ref.actor.data_loader_seed",
    "critic.data_loader_seed",
    "actor_rollout_ref.rollout.seed",
)
"""Seeds of the order of tasks, of minibatches and of sampling. The run's seed replaces verl's 42."""


@dataclass(eq=False, repr=False)
class VERL(RolloutSettings, Algorithm):
    """Reinforcement learning of the model behind the resource ``llm``, on as many GPUs as verl has.

    Estimators, losses, parallelism and inference engine are verl's own settings. The configuration is composed here;
    the Ray cluster starts when the algorithm runs. On a machine without verl, the configuration consists of the given
    settings and our defaults, and verl's own keys cannot be checked.

    Raises:
        ConfigError: verl has no such key, a value is out of range, or the release of verl is not supported.
    """

    default_adapter: ClassVar[str | None] = "triplet"

    config: Mapping[str, Any]
    """verl's settings that differ from our defaults, nested or by dotted key. Once the object is made, it is verl's
    whole configuration, a ``DictConfig`` of OmegaConf, if verl is installed."""
    model: str | None = field(default=None, kw_only=True)
    """Directory or hub name of the model, or directory of a run that trained one, such as a run of ``sft``
    or ``grpo``. Replaces ``actor_rollout_ref.model.path``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model is not None:
            self.config = {**self.config, "actor_rollout_ref.model.path": find_model(self.model)}
        self.given = self.config
        """The settings that differ from our defaults."""
        self.composed: DictConfig | None = None
        """The composed configuration; None on a machine without verl."""
        if importlib.util.find_spec("verl") is None:
            compose_without_verl(self.config)
        else:
            self.config = self.composed = compose_config(self.config)

    def get_client(self) -> LightningStore:
        """Returns the store of the run, as ``get_store``; programs for Agent Lightning 0.3 use this name."""
        return self.get_store()

    def print_config(self) -> str:
        """Returns verl's whole configuration as YAML; without verl installed, only given settings and our defaults."""
        if self.composed is None:
            import yaml

            composed = yaml.safe_dump(compose_without_verl(self.given), sort_keys=False)
            return f"# verl is not installed here: its own defaults are not shown.\n{composed}"
        return dump_config(self.composed)

    async def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> None:
        """Trains for ``trainer.total_training_steps``, or ``trainer.total_epochs``."""
        check_release()
        assert self.composed is not None
        adapter = cast(TraceAdapter[Sequence[Triplet]], self.get_adapter())
        _check_credit(adapter, self.composed)
        async with contextlib.AsyncExitStack() as stack:
            if self.context.is_resumed:
                await cancel_open(self.get_store())  # first, because runners start at the same time
            directory = self.context.directory
            if directory is None:
                directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="agl-verl-")))
            config = self._complete(train_dataset, val_dataset, directory.absolute())
            await asyncio.to_thread(check_run, config)
            if self.context.directory is not None:
                self._describe(config, train_dataset, val_dataset).write(self.context.directory)
            gateway = self.get_llm_proxy()
            if gateway is None:
                gateway = cast(Gateway, get_manager().get("gateway", "gateway")(store=self.get_store()))
                await gateway.start()
                stack.push_async_callback(gateway.stop)
            if await asyncio.to_thread(start_ray, config):
                import ray

                stack.push_async_callback(asyncio.to_thread, ray.shutdown)
            from agentlightning_algorithms.verl.trainer import train

            controller = RolloutController(
                store=self.get_store(),
                gateway=gateway,
                adapter=adapter,
                tasks={"train": train_dataset or [], "val": val_dataset or []},
                initial_resources=self.context.initial_resources or {},
                settings=self,
                config=config,
                loop=asyncio.get_running_loop(),
            )
            await run_in_thread(lambda: train(config, controller), name="verl")

    def _describe(self, config: DictConfig, train: Dataset[Any] | None, val: Dataset[Any] | None) -> TrainingRecord:
        """Returns the record that serving and exporting the trained model need."""
        rollout = config.actor_rollout_ref.rollout
        return TrainingRecord(
            algorithm="verl",
            base=config.actor_rollout_ref.model.path,
            resource_name=self.resource_name,
            sampling={"temperature": rollout.val_kwargs.temperature, "top_p": rollout.val_kwargs.top_p},
            device=config.trainer.device,
            dtype=rollout.dtype,
            train_tasks=len(train or ()),
            val_tasks=len(val or ()),
            settings=self.given,
            checkpoints=str(config.trainer.default_local_dir),
        )

    def _complete(self, train: Dataset[Any] | None, val: Dataset[Any] | None, directory: Path) -> DictConfig:
        """Adds the run's tasks, seed, directory and checkpoint to the configuration."""
        from omegaconf import OmegaConf, open_dict

        assert self.composed is not None
        config = self.composed.copy()
        n_train, n_val = len(train or ()), len(val or ())
        batch = config.data.train_batch_size
        if n_train < batch and not config.trainer.val_only:
            raise ConfigError(
                f"train_dataset has {n_train} tasks, but a step needs data.train_batch_size = {batch} different tasks"
            )
        with open_dict(config):
            config.data.train_files = f"indices:{n_train}"
            config.data.val_files = f"indices:{n_val}"
            config.data.custom_cls.path = "pkg://agentlightning_algorithms.verl.agent_loop"
            config.data.custom_cls.name = "IndexDataset"
            config.transfer_queue.enable = True
            given = {setting.key: setting.value for setting in flatten(self.given)}
            if "trainer.default_local_dir" not in given:
                config.trainer.default_local_dir = str(directory / "checkpoints")
            if self.context.directory is not None:
                if "trainer.save_freq" not in given:
                    config.trainer.save_freq = 10
                if "trainer.max_actor_ckpt_to_keep" not in given:
                    config.trainer.max_actor_ckpt_to_keep = config.trainer.max_critic_ckpt_to_keep = 2
            for seed in _SEEDS:
                if seed not in given:
                    OmegaConf.update(config, seed, self.context.seed)
            if self.context.is_resumed:
                config.trainer.resume_mode = "auto"
            if not n_val:
                for key in ("trainer.test_freq", "trainer.val_before_train", "trainer.val_only"):
                    if (value := given.get(key)) is True or (value or -1) > 0:
                        raise ConfigError(f"verl's {key} = {value} needs a val_dataset, and there is none")
                config.data.val_batch_size = 1  # verl makes a loader even of an empty set
                config.trainer.val_before_train, config.trainer.test_freq = False, -1
            elif "trainer.test_freq" not in given:
                config.trainer.test_freq = 10
        return config


def _check_credit(adapter: object, config: DictConfig) -> None:
    """Refuses a credit rule if the settings compute the rewards or advantages of whole rollouts."""
    from agentlightning_algorithms.verl.batch_row import CREDIT_ESTIMATORS

    estimator = config.algorithm.adv_estimator
    if getattr(adapter, "credit", None) is None:
        return
    if estimator not in CREDIT_ESTIMATORS:
        raise ConfigError(
            f"verl's algorithm.adv_estimator = {estimator!r} does not compare single calls, which the adapter's credit "
            f"rule needs; use one of: {', '.join(CREDIT_ESTIMATORS)}, or leave credit out"
        )
    if config.algorithm.use_kl_in_reward:
        raise ConfigError(
            "verl's algorithm.use_kl_in_reward changes the rewards of whole rollouts, but the adapter's credit rule "
            "assigns rewards to calls; use actor_rollout_ref.actor.use_kl_loss, or leave credit out"
        )
