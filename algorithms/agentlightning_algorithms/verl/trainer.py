"""verl's trainers: they pause the gateway while weights change and report metrics to the run."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy
import torch
import transfer_queue
from omegaconf import DictConfig
from tensordict import TensorDict
from verl.protocol import DataProto
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions, log_seqlen_unbalance
from verl.workers.utils.padding import response_to_nested

from agentlightning_algorithms.verl.advantage import OF_GROUPS, call_advantages, rollout_advantages, subtract_baselines
from agentlightning_algorithms.verl.agent_loop import AgentLoopManager
from agentlightning_algorithms.verl.batch_row import CREDIT_ESTIMATORS, REMAX, CallCredit
from agentlightning_algorithms.verl.controller import RolloutController
from agentlightning_algorithms.verl.metrics import GPUMonitor
from agentlightning_algorithms.verl.record import make_spans, mean_drift, read_rows
from agentlightning_plugins.shared.training_records.record import TokenTexts

logger = logging.getLogger("agentlightning")


class _NothingToTrainOn(Exception):
    """Ends the step of a batch without any token that the model sampled."""

    def __init__(self, batch: Any) -> None:
        super().__init__()
        self.batch = batch


class _AgentTrainer:
    """A mixin for verl's trainers; it comes before them in the order of bases."""

    controller: RolloutController
    gpu_monitor: GPUMonitor

    def on_init_end(self: Any) -> None:
        super().on_init_end()  # type: ignore[misc] # of verl's trainer
        self.controller.call(self.controller.register(self.llm_server_manager.get_addresses()))
        self.controller.call(self.controller.publish(self.global_steps))
        self.steps = steps = _OptimizerSteps(self)
        _set_mini_batch_size(self.actor_rollout_wg, "update_actor", steps.actor_rows, steps.count)
        if self.use_critic:
            _set_mini_batch_size(self.critic_wg, "train_mini_batch", steps.critic_rows)
        self.token_texts = TokenTexts(self.tokenizer.decode)
        self.outcomes: Counter[str] = Counter()
        self.record_s = self.drift = 0.0

    def on_sample_end(self: Any) -> None:
        self.controller.check()
        self.controller.call(self.controller.pause())
        super().on_sample_end()  # type: ignore[misc] # as above

    def on_step_end(self: Any) -> None:
        super().on_step_end()  # type: ignore[misc] # as above
        self.controller.call(self.controller.publish(self.global_steps))

    def _step_once(self: Any, metrics: dict[str, Any], *args: Any) -> Any:
        """Trains on a batch; skips a batch with nothing to train on, which verl cannot process."""
        self.is_skipped = False
        try:
            batch = super()._step_once(metrics, *args)  # type: ignore[misc] # as above
        except _NothingToTrainOn as nothing:
            self.is_skipped = True
            logger.warning("step %d is skipped: its rollouts have nothing to train on", self.global_steps)
            batch = nothing.batch
        self._record(batch)
        return batch

    def _record(self: Any, batch: Any) -> None:
        """Writes the training records of a batch."""
        started = time.monotonic()
        actor = self.config.actor_rollout_ref.actor
        has_other_loss = actor.use_kl_loss or actor.entropy_coeff != 0 or self.config.algorithm.use_kl_in_reward
        correction = self.config.algorithm.get("rollout_correction", None) or {}
        has_trainer = not correction.get("bypass_mode", False)  # else the trainer uses the sampler's log-probabilities
        rows = read_rows(batch, is_skipped=self.is_skipped, has_trainer=has_trainer)
        spans, outcomes = make_spans(rows, self.global_steps, self.token_texts, trains_flat_groups=bool(has_other_loss))
        others = self.controller.entries
        entries = [others.popleft() for _ in range(len(others))]
        spans += [entry.to_span() for entry in entries]
        self.controller.call(self.controller.store.add_many_spans(spans))
        self.outcomes += outcomes + Counter(entry.outcome for entry in entries)
        self.drift = mean_drift(rows, self.global_steps - 1)
        self.record_s += time.monotonic() - started

    def _balance_batch(self: Any, batch: Any, metrics: dict[str, Any], **kwargs: Any) -> Any:
        masks = transfer_queue.kv_batch_get(batch.keys, batch.partition_id, ["response_mask"])["response_mask"]
        if not any(bool(mask.any()) for mask in masks.unbind()):
            raise _NothingToTrainOn(batch)
        rows = len(batch)
        self.steps.plan(rows)
        metrics["rows_padded"] = self.steps.total - rows
        batch.reorder(sorted(range(rows), key=lambda place: self.controller.place_of(batch.keys[place])))
        padded = upsample_batch_to_divisible_size(batch, self.steps.total, self.tokenizer.eos_token_id)
        lengths = torch.tensor([tag["seq_len"] for tag in padded.tags])
        parts = self.steps.divide(calculate_workload(lengths), rows)
        padded.reorder([place for part in parts for place in part])
        metrics.update(log_seqlen_unbalance(lengths.tolist(), partitions=parts, prefix="global_seqlen"))
        return padded

    def _compute_advantage(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        batch = super()._compute_advantage(batch, metrics)  # type: ignore[misc] # as above
        config = self.config.algorithm
        has_credit = getattr(self.controller.adapter, "credit", None) is not None
        if not has_credit and config.adv_estimator not in (*OF_GROUPS, REMAX):
            return batch
        rewards = "token_level_rewards" if config.use_kl_in_reward else "rm_scores"
        where = {"keys": batch.keys, "partition_id": batch.partition_id}
        is_remax = config.adv_estimator == REMAX
        fields = ["uid", "response_mask", rewards, *(["extra_fields"] if has_credit or is_remax else [])]
        fields += ["advantages"] if is_remax else []
        rows = transfer_queue.kv_batch_get(**where, select_fields=fields)
        mask, extra = rows["response_mask"], rows.pop("extra_fields", None)
        data = DataProto(batch=rows.to_padded_tensor())
        groups = data.batch.pop("uid").tolist()
        if is_remax:
            baselines = torch.tensor([float(row["baseline"]) for row in extra.tolist()])
            advantages = subtract_baselines(data.batch["advantages"], baselines, data.batch["response_mask"])
        elif extra is not None:
            advantages = self._call_advantages(batch, extra.tolist(), data, groups)
        else:
            data.batch["token_level_rewards"] = data.batch[rewards]
            data.non_tensor_batch["uid"] = numpy.array(groups, dtype=object)
            advantages = rollout_advantages(data, batch.keys, config.adv_estimator, config)
        names = ("advantages",) if is_remax else ("advantages", "returns")
        nested = {name: response_to_nested(advantages, mask) for name in names}
        return transfer_queue.kv_batch_put(**where, fields=TensorDict(nested, batch_size=len(batch)))

    def _call_advantages(self: Any, batch: Any, extra: Sequence[Any], data: Any, groups: Sequence[str]) -> Any:
        """Computes the advantages that a credit rule gives; padding gets 0."""
        config = self.config.algorithm
        estimator = CREDIT_ESTIMATORS[config.adv_estimator]
        if estimator == "grpo" and not config.get("norm_adv_by_std_in_grpo", True):
            estimator = "dr_grpo"
        real = [row for row, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]
        mask = data.batch["response_mask"]
        advantages = mask.float() * 0.0
        advantages[real] = call_advantages(
            [[CallCredit(*call) for call in extra[row].get("credit", ())] for row in real],
            data.batch["rm_scores"][real].sum(-1).tolist(),
            [groups[row] for row in real],
            [batch.keys[row] for row in real],
            mask[real],
            estimator,
        )
        return advantages

    def _compute_metrics(self: Any, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        metrics["skipped"] = float(self.is_skipped)
        if self.is_skipped:
            metrics["training/global_step"] = self.global_steps
        else:
            super()._compute_metrics(batch, metrics, *args, **kwargs)  # type: ignore[misc] # as above
        metrics.update(self.controller.metrics.take("train"))
        metrics.update({f"greedy_{name}": value for name, value in self.controller.metrics.take("greedy").items()})
        metrics.update(self.gpu_monitor.take())
        metrics["optimizer_steps"], self.steps.taken = self.steps.taken, 0
        metrics.update({f"outcome/{name}": count for name, count in self.outcomes.items()})
        metrics["record_s"], self.record_s = self.record_s, 0.0
        metrics["drift"] = self.drift
        self.outcomes.clear()
        for name, tokens, phase in (
            ("sample_tokens_per_s", "sampled_tokens", "gen"),
            ("train_tokens_per_s", "perf/total_num_tokens", "update_actor"),
        ):
            seconds = metrics.get(f"timing_s/{phase}", 0.0)
            if seconds > 0:
                metrics[name] = metrics.get(tokens, 0.0) / seconds
        metrics["progress"] = self.global_steps / max(1, self.total_training_steps)
        self._report(metrics)

    def _validate(self: Any) -> dict[str, Any]:
        found: dict[str, Any] = super()._validate()  # type: ignore[misc] # as above
        # verl's own means of rewards count a failed rollout as an answer of the model
        metrics = {name: value for name, value in found.items() if not name.startswith(("val-core/", "val-aux/"))}
        self.controller.check()
        metrics.update({f"val_{name}": value for name, value in self.controller.metrics.take("val").items()})
        self._report(metrics)
        return metrics

    def _report(self: Any, metrics: Mapping[str, Any]) -> None:
        self.controller.call(self.controller.store.add_metrics(self.global_steps, finite_numbers(metrics)))


class SyncTrainer(_AgentTrainer, PPOTrainerSync):  # type: ignore[misc] # verl's classes are untyped
    """Samples, then trains, then samples from the new weights."""


class ColocateAsyncTrainer(_AgentTrainer, PPOTrainerColocateAsync):  # type: ignore[misc] # as above
    """Continues rollouts after the weights have changed: between two turns, never within a turn."""


_POLL_S: Final = 0.5
"""Seconds between checks whether a batch is complete; verl's 2 s are long compared with a short step."""
TRAINERS: Final = {"sync": SyncTrainer, "colocate_async": ColocateAsyncTrainer}


class _OptimizerSteps:
    """Divides the rows of a batch among optimizer steps.

    verl pads the rows to a multiple of the rollouts of a mini batch, so that agents with more turns get more optimizer
    steps. Here a batch gets ``train_batch_size / ppo_mini_batch_size`` steps, however many rows it has, and the loss
    of each step is divided by its number of rollouts, as in verl (``global_batch_size``).
    """

    def __init__(self, trainer: Any) -> None:
        config = trainer.config
        tasks = config.data.train_batch_size // trainer.parameter_sync_step
        actor = config.actor_rollout_ref.actor
        self._actor_steps: int = max(1, tasks // actor.ppo_mini_batch_size)
        self._ranks = max(trainer.actor_rollout_wg._query_dispatch_info("actor")) + 1
        self._critic_steps = max(1, tasks // config.critic.ppo_mini_batch_size) if trainer.use_critic else 1
        # Rows are divided evenly among data-parallel ranks, and then among micro batches where these have a fixed size.
        unit = math.lcm(*_micro_batches(config, trainer)) * self._ranks
        self._unit = math.lcm(unit * self._actor_steps, unit * self._critic_steps)
        self.total = 0
        """Rows of the batch, padding included."""
        self.taken = 0
        """Optimizer steps of the actor on the batch, as reported by its workers."""

    def plan(self, rows: int) -> None:
        self.total = math.ceil(rows / self._unit) * self._unit

    def divide(self, work: torch.Tensor, rows: int) -> list[list[int]]:
        """Divides a batch, of which ``work`` is the cost of each row, evenly among the ranks; padding follows ``rows``.

        verl divides the whole batch, so that the rows of an optimizer step depend on the number of ranks. Here a step
        has the same rows on any number of ranks: an equal share of the batch, in its order.
        """
        parts: list[list[int]] = [[] for _ in range(self._ranks)]
        padding = iter(range(rows, self.total))
        for step in range(self._actor_steps):
            own = list(range(rows * step // self._actor_steps, rows * (step + 1) // self._actor_steps))
            own += itertools.islice(padding, self.actor_rows() - len(own))
            found = get_seqlen_balanced_partitions(work[own], self._ranks, equal_size=True)
            for part, chosen in zip(parts, found, strict=True):
                part += [own[place] for place in chosen]
        return parts

    def actor_rows(self) -> int:
        return self.total // self._actor_steps

    def critic_rows(self) -> int:
        return self.total // self._critic_steps

    def count(self, output: Any) -> None:
        self.taken += len(output["metrics"]["grad_norm"])


def _micro_batches(config: DictConfig, trainer: Any) -> list[int]:
    """Returns the fixed sizes of micro batches, of each role that has them."""
    models = config.actor_rollout_ref
    sizes = [] if models.actor.use_dynamic_bsz else [models.actor.ppo_micro_batch_size_per_gpu]
    sizes += [
        role.log_prob_micro_batch_size_per_gpu
        for role in (models.rollout, *([models.ref] if trainer.use_reference_policy else []))
        if not role.log_prob_use_dynamic_bsz
    ]
    if trainer.use_critic and not config.critic.use_dynamic_bsz:
        sizes += [config.critic.ppo_micro_batch_size_per_gpu, config.critic.forward_micro_batch_size_per_gpu]
    return sizes


def _set_mini_batch_size(
    group: Any, method: str, size: Callable[[], int], on_output: Callable[[Any], None] = lambda _: None
) -> None:
    """Replaces a method of a worker group by one with another ``mini_batch_size``."""
    own = getattr(group, method)

    def update(batch: Any) -> Any:
        batch.extra_info["mini_batch_size"] = size()
        output = own(batch)
        on_output(output)
        return output

    setattr(group, method, update)


def train(config: DictConfig, controller: RolloutController) -> None:
    """Trains, and returns at the end. Ray must be running, and the controller's loop in another thread."""
    if config.algorithm.adv_estimator == "remax":
        config.algorithm.adv_estimator = REMAX
    transfer_queue.init(config.transfer_queue)
    trainer: Any = None
    monitor = GPUMonitor()
    succeeded = False
    try:
        trainer = TRAINERS[config.trainer.v1.trainer_mode](config)
        trainer.controller, trainer.gpu_monitor = controller, monitor
        trainer.replay_buffer.poll_interval = _POLL_S
        trainer.init()
        manager = AgentLoopManager.create(
            config=config,
            llm_client=trainer.get_llm_client(),
            teacher_client=trainer.get_teacher_client(),
            reward_loop_worker_handles=trainer.get_reward_handles(),
        )
        manager.attach(controller)
        try:
            trainer.fit(manager)
        finally:
            manager.cancel()
            controller.withdraw()
        succeeded = True
    finally:
        monitor.stop()
        tracking = getattr(trainer, "logger", None)
        if tracking is not None:
            tracking.finish(exit_code=0 if succeeded else 1)
        transfer_queue.close()


def finite_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns the finite numbers among metrics, as floats."""
    numbers = {}
    for name, value in metrics.items():
        with contextlib.suppress(TypeError, ValueError):
            if not isinstance(value, (str, bytes, bool)) and math.isfinite(number := float(value)):
                numbers[name] = number
    return numbers
