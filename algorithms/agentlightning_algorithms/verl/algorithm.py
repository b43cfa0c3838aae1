"""``verl``: trains a model's weights on many GPUs, by verl (Ray, FSDP, vLLM); agents roll out as with every algorithm.

    verl's trainer asks for rollouts -> store -> runners -> agents -> gateway -> verl's inference replicas
    spans -> triplets -> rows -> advantages and updates by verl -> new weights in the replicas -> resources published

Hybrid Flow, Sheng et al. 2024, arXiv:2409.19256.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast, get_args

from omegaconf import OmegaConf, open_dict

from agentlightning.adapter.adapter import TraceAdapter
from agentlightning.algorithm.algorithm import Algorithm
from agentlightning.algorithm.context import Gateway
from agentlightning.errors import ConfigError
from agentlightning.plugin.registry import get_manager
from agentlightning.run.thread import run_in_thread
from agentlightning.types import Dataset, Triplet
from agentlightning_algorithms.verl.config import compose_config, dump_config
from agentlightning_algorithms.verl.environment import start_ray
from agentlightning_algorithms.verl.preflight import check_run
from agentlightning_algorithms.verl.rollout.controller import Mode, RolloutController, RolloutSettings, cancel_open
from agentlightning_algorithms.verl.rollout.batch_row import RowKind

if TYPE_CHECKING:
    from omegaconf import DictConfig


_SEEDS: Final = (
    "data.seed",
    "actor_rollout_ref.actor.data_loader_seed",
    "critic.data_loader_seed",
    "actor_rollout_ref.rollout.seed",
)
"""Of the order of tasks, of minibatches, and of sampling. The run's seed takes the place of verl's 42."""


class VERL(Algorithm):
    """Reinforcement learning of the model behind the resource ``llm``, on as many GPUs as verl has.

    Estimators, losses, parallelism and inference engine are verl's own settings. Rollouts that fail count as
    ``failed_reward`` and never stop the run.
    """

    default_adapter: ClassVar[str | None] = "triplet"

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        rows: RowKind = "trajectory",
        failed_reward: float = 0.0,
        rollout_timeout_s: float = 600.0,
        drain_timeout_s: float = 600.0,
        resource_name: str = "llm",
    ) -> None:
        """Composes verl's configuration; the cluster is started when the algorithm runs.

        Args:
            config: verl's settings that differ from our defaults, nested or by dotted key.
            rows: what verl trains on: ``trajectory`` joins the calls of a rollout where their tokens go on exactly,
                ``transition`` makes a row of every call.
            failed_reward: what a rollout counts as that failed, said no reward, or left spans that cannot be used.
            rollout_timeout_s: after which a rollout is stopped and counts as failed.
            drain_timeout_s: how long calls in flight may take to end before weights change; then they break off.
            resource_name: of the resource that agents are given.

        Raises:
            ConfigError: a key that verl does not know, a value out of range, or a verl that is not supported.
        """
        if rows not in get_args(RowKind):
            raise ConfigError(f"rows = {rows!r}; one of: {', '.join(get_args(RowKind))}")
        for name, value in (("rollout_timeout_s", rollout_timeout_s), ("drain_timeout_s", drain_timeout_s)):
            if not value > 0:
                raise ConfigError(f"{name} = {value}: a number above 0 is needed")
        self.config = compose_config(config)
        self.given = dict(config)
        self.rows: RowKind = rows
        self.failed_reward = failed_reward
        self.rollout_timeout_s = rollout_timeout_s
        self.drain_timeout_s = drain_timeout_s
        self.resource_name = resource_name
        self._is_resumed = False

    def print_config(self) -> str:
        """The whole configuration that verl gets, as YAML."""
        return dump_config(self.config)

    def load_state(self, directory: Path) -> None:
        """Continues from the newest checkpoint that verl wrote, or from the beginning when there is none yet."""
        self._is_resumed = True

    async def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> None:
        """Trains for ``trainer.total_training_steps``, or ``trainer.total_epochs``."""
        async with contextlib.AsyncExitStack() as stack:
            if self._is_resumed:
                await cancel_open(self.get_store())  # at once: runners are starting, too
            directory = self.context.directory
            if directory is None:
                directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="agl-verl-")))
            config = self._complete(train_dataset, val_dataset, directory.absolute())
            adapter = cast(TraceAdapter[Sequence[Triplet]], self.get_adapter())
            await asyncio.to_thread(check_run, config)
            gateway = self.get_llm_proxy()
            if gateway is None:
                gateway = cast(Gateway, get_manager().get("gateway", "gateway")(store=self.get_store()))
                await gateway.start()
                stack.push_async_callback(gateway.stop)
            if await asyncio.to_thread(start_ray, config):
                stack.push_async_callback(asyncio.to_thread, _stop_ray)
            from agentlightning_algorithms.verl.training.trainer import train

            controller = RolloutController(
                store=self.get_store(),
                gateway=gateway,
                adapter=adapter,
                tasks={"train": train_dataset or [], "val": val_dataset or []},
                initial_resources=self.context.initial_resources or {},
                settings=self._settings(config),
                loop=asyncio.get_running_loop(),
            )
            await run_in_thread(lambda: train(config, controller), name="verl")

    def _complete(self, train: Dataset[Any] | None, val: Dataset[Any] | None, directory: Path) -> DictConfig:
        """The configuration with what this run adds: its tasks, its directory, where to resume."""
        config = self.config.copy()
        n_train, n_val = len(train or ()), len(val or ())
        batch = config.data.train_batch_size
        if n_train < batch and not config.trainer.val_only:
            raise ConfigError(
                f"train_dataset has {n_train} tasks, and a step needs data.train_batch_size = {batch} different ones"
            )
        with open_dict(config):
            config.data.train_files = f"positions:{n_train}"
            config.data.val_files = f"positions:{n_val}"
            config.data.custom_cls.path = "pkg://agentlightning_algorithms.verl.position_dataset"
            config.data.custom_cls.name = "PositionDataset"
            config.transfer_queue.enable = True
            given = self.given_keys()
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
            if self._is_resumed:
                config.trainer.resume_mode = "auto"
            if not n_val:
                config.data.val_batch_size = 1  # verl makes a loader of the empty set too
                config.trainer.val_before_train, config.trainer.test_freq = False, -1
            elif "trainer.test_freq" not in given:
                config.trainer.test_freq = 10
        return config

    def given_keys(self) -> set[str]:
        """The dotted keys that the user set."""
        keys: set[str] = set()

        def walk(value: Any, path: str) -> None:
            if isinstance(value, Mapping) and value:
                for name, child in value.items():
                    walk(child, f"{path}.{str(name).lstrip('+')}" if path else str(name).lstrip("+"))
            else:
                keys.add(path)

        walk(self.given, "")
        return keys

    def _settings(self, config: DictConfig) -> RolloutSettings:
        rollout = config.actor_rollout_ref.rollout
        plain = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        return RolloutSettings(
            rows=self.rows,
            failed_reward=self.failed_reward,
            rollout_timeout_s=self.rollout_timeout_s,
            drain_timeout_s=self.drain_timeout_s,
            resource_name=self.resource_name,
            max_prompt=config.data.max_prompt_length,
            max_response=config.data.max_response_length,
            token_id=0,
            sampling={
                mode: {"temperature": of.temperature, "top_p": of.top_p, "top_k": of.top_k, **plain}
                for mode, of in cast("dict[Mode, Any]", {"train": rollout, "val": rollout.val_kwargs}).items()
            },
        )


def _stop_ray() -> None:
    import ray

    ray.shutdown()
