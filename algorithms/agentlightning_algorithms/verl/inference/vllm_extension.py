"""The extension of vLLM's worker that receives verl's weights in vLLM's CPU build.

vLLM's CPU kernels repack the weights of linear layers when a model is loaded and drop the originals, so that verl's own
extension finds parameters without elements. vLLM's ``reload_weights`` restores, loads and repacks layer by layer.
"""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension


class ReloadingExtension(vLLMColocateWorkerExtension):  # type: ignore[misc] # verl's classes are untyped
    """Collects all weights and reloads the model; an adapter is loaded as in verl."""

    def update_weights_from_ipc(
        self, peft_config: dict[str, Any] | None = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        if peft_config and base_sync_done:  # vLLM keeps the adapter apart from the base weights
            super().update_weights_from_ipc(peft_config, base_sync_done, use_shm)
            return
        weights: list[tuple[str, Any]] = []

        def keep(bucket: list[tuple[str, Any]], is_last: bool) -> None:
            weights.extend((name, tensor.clone()) for name, tensor in bucket)  # the next bucket takes its memory

        receiver = BucketedWeightReceiver(zmq_handle=self._get_zmq_handle(), device=self.device, use_shm=use_shm)
        receiver.receive_weights(on_bucket_received=keep)
        self.reload_weights(weights_iterator=iter(weights))
