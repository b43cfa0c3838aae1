"""An extension of vLLM's worker that leaves out the transfer of weights after the second step."""

from __future__ import annotations

from typing import Any

from agentlightning_algorithms.verl.inference.vllm_extension import ReloadingExtension

KEPT = 2
"""Transfers that are made: before the first step, and after it."""


class ForgetfulExtension(ReloadingExtension):
    transfers = 0

    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> None:
        self.transfers += 1
        if self.transfers > KEPT:
            self.reload_weights = lambda **_: None  # the worker's own method
        super().update_weights_from_ipc(*args, **kwargs)
