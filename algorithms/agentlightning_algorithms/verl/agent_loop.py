"""verl's agent loop and dataset: hand the indices of tasks to the rollout controller.

The manager has one worker, in the trainer's own process. verl's worker groups sessions and writes rows to
TransferQueue; it computes nothing, so Ray processes would gain nothing, and they could not reach store and gateway.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from tensordict import TensorDict
from torch.utils.data import Dataset
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from agentlightning_algorithms.verl.batch_row import REMAX, weight_range
from agentlightning_algorithms.verl.controller import Mode, RolloutController, VerlEpisode
from agentlightning_algorithms.verl.images import ImageLoader

_Worker: Any = AgentLoopWorkerTQ.__ray_metadata__.modified_class.__ray_actor_class__
"""verl's worker class without Ray's wrapper, found in the same way as in verl's ``single_controller``."""


class AgentLoopWorker(_Worker):  # type: ignore[misc] # verl's classes are untyped
    """Runs each session of a prompt as one rollout."""

    controller: RolloutController

    async def _run_agent_loop(
        self, sampling_params: dict[str, Any], trajectory: dict[str, Any], *, trace: bool = True, **kwargs: Any
    ) -> None:
        mode: Mode = "val" if trajectory["validate"] else "train"
        step = int(kwargs["global_steps"])
        place = int(kwargs["index"]), str(kwargs["uid"]), step
        has_baseline = mode == "train" and self.config.algorithm.adv_estimator == REMAX
        greedy = self.controller.begin_greedy(*place) if has_baseline else None
        episode = await self.controller.roll_out(mode, *place)
        outputs = episode_to_outputs(episode, step if mode == "val" else step - 1)
        if greedy is not None:
            found = await greedy
            has_baseline = found.record["rollout"]["reward"] is not None  # otherwise the advantage is 0
            for output in outputs:
                output.extra_fields["baseline"] = found.reward if has_baseline else episode.reward
        if outputs:
            await self._agent_loop_postprocess(outputs, trajectory["validate"], **kwargs)


class AgentLoopManager(AgentLoopManagerTQ):  # type: ignore[misc] # verl's classes are untyped
    """Hands prompts to the worker, on the event loop of store and gateway."""

    controller: RolloutController

    async def _init_agent_loop_workers(self) -> None:
        """Does nothing: ``attach`` makes the only worker."""

    def attach(self, controller: RolloutController) -> None:
        """Makes the worker; called once, before prompts arrive."""
        self.controller = controller
        self.worker = AgentLoopWorker(
            self.config, self.llm_client, self.teacher_client, self.reward_loop_worker_handles
        )
        self.worker.controller = controller
        controller.images = ImageLoader(
            self.worker.processor, self.config.actor_rollout_ref.model.path, self.worker.mm_processor_kwargs
        )

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Starts the rollouts of a batch of prompts and returns."""
        self.controller.order([str(group) for group in prompts["uid"]])
        self.controller.call(self.worker.generate_sequences(prompts))

    def cancel(self) -> None:
        """Cancels the rollouts that are still running."""
        for task in list(self.worker.background_tasks):
            self.controller.loop.call_soon_threadsafe(cast("asyncio.Task[None]", task).cancel)


def episode_to_outputs(episode: VerlEpisode, current: int) -> list[AgentLoopOutput]:
    """Converts an episode to the outputs of verl's agent loops; ``current`` is the version if nothing was sampled."""
    oldest, newest = weight_range(episode.rows, current)
    return [
        AgentLoopOutput(
            prompt_ids=row.prompt_ids,
            response_ids=row.response_ids,
            response_mask=row.response_mask,
            response_logprobs=row.response_logprobs,
            reward_score=episode.reward,
            num_turns=episode.calls,
            metrics=AgentLoopMetrics(),
            multi_modal_data={"images": row.images} if row.images else None,
            extra_fields={
                "reward_extra_info": {},  # required where a rollout has several rows
                "credit": row.credit,
                "calls": row.calls,
                "record": episode.record,
                "min_global_steps": oldest,
                "max_global_steps": newest,
            },
        )
        for row in episode.rows
    ]


class IndexDataset(Dataset[dict[str, Any]]):  # type: ignore[misc] # mypy does not read torch
    """One item per task: its ``index``, and the other fields that verl reads of every item."""

    def __init__(self, data_files: Any, **_: Any) -> None:
        """Called by verl; ``data_files`` is ``indices:N`` for N tasks."""
        text = str(data_files if isinstance(data_files, str) else data_files[0])
        self._size = int(text.removeprefix("indices:"))

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "index": index,
            "raw_prompt": [{"role": "user", "content": str(index)}],
            "data_source": "tasks",
            "reward_model": {"style": "agent", "ground_truth": ""},
            "extra_info": {"index": index},
        }
