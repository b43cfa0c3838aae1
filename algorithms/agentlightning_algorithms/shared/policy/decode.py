"""One more token for every row of a cache, on a GPU by a CUDA graph while the cache keeps its memory.

A step of a small model launches hundreds of kernels, and Python needs longer to launch them than the GPU to run them.
A CUDA graph launches all of them at once (https://pytorch.org/blog/accelerating-pytorch-with-cuda-graphs). Its shapes
and addresses are fixed, so it runs all slots of the cache at their whole width, whichever of them hold rows.

    S   slots of the cache
    n   rows; row i is in slot i
    V   vocabulary
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from agentlightning_algorithms.shared.policy.kv_cache import SlotCache
from agentlightning_algorithms.shared.policy.model import Policy

logger = logging.getLogger("agentlightning")

_RECORDED = ("cuda",)
_WORTH_RECORDING = 2
"""Steps that a cache keeps its memory before it is recorded: a recording takes as long as one or two steps."""


class Decoder:
    """Runs the steps of a policy's caches, in one thread."""

    def __init__(self, policy: Policy, *, cuda_graphs: bool = True) -> None:
        """Takes a policy; ``cuda_graphs`` has no effect on other devices than CUDA's."""
        self._policy = policy
        self._records = cuda_graphs and policy.device.type in _RECORDED
        self._stream: Any = None
        self._latest: Any = None  # graphs share the memory of their intermediate results, which needs one of them
        self._steps: WeakKeyDictionary[SlotCache, _Steps] = WeakKeyDictionary()

    def step(self, slots: SlotCache, tokens: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Adds a token to rows of ``lengths`` positions, and returns the logits ``[n, V]`` of the tokens after them.

        The logits are valid until the next step.
        """
        slots.reserve(len(lengths), max(lengths) + 1)
        if self._records:
            steps = self._steps.get(slots)
            if steps is None or steps.n_moves != slots.n_moves:
                steps = self._steps[slots] = _Steps(slots.n_moves)
            steps.count += 1
            if steps.count > _WORTH_RECORDING:
                steps.recorded = steps.recorded or self._record(slots, tokens, lengths)
            if steps.recorded is not None:
                return steps.recorded(tokens, lengths)
        newest = torch.tensor(tokens, device=self._policy.device)
        return self._logits(slots, newest, *slots.extend(0, lengths, 1))

    def _logits(self, slots: SlotCache, tokens_n: Tensor, positions_n1: Tensor, mask: Tensor) -> Tensor:
        return self._policy.logits(
            tokens_n[:, None],
            past_key_values=slots.cache,
            use_cache=True,
            position_ids=positions_n1,
            attention_mask=mask,
        )

    def _record(
        self, slots: SlotCache, tokens: Sequence[int], lengths: Sequence[int]
    ) -> Callable[[Sequence[int], Sequence[int]], Tensor] | None:
        """Records a step of all slots, and may run this one; None, now and later, if the model cannot be recorded."""
        inputs_2S = torch.zeros(2, slots.n_slots, dtype=torch.long, device=self._policy.device)
        inputs_2S[:, : len(tokens)] = torch.tensor([tokens, lengths])

        def run() -> Tensor:
            return self._logits(slots, inputs_2S[0], *slots.extend_all(inputs_2S[1]))

        try:
            logits_SV, replay = self._capture(run)
        # An isolation point: models that wait for the GPU within a step, as some experts and rotations do.
        except Exception as error:
            logger.info("sampling goes on without CUDA graphs: %s", error, exc_info=True)
            self._records = False
            return None

        def recorded(tokens: Sequence[int], lengths: Sequence[int]) -> Tensor:
            inputs_2S[:, : len(tokens)] = torch.tensor([tokens, lengths])
            replay()
            return logits_SV[: len(tokens)]

        return recorded

    def _capture(self, run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """Returns the tensor that ``run`` returns, and a function that writes it again from the present inputs."""
        if self._stream is None:  # libraries allocate memory at their first call on a stream
            device = self._policy.device
            self._stream = torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))  # which writes the inputs
            with torch.cuda.stream(self._stream):
                run()
            torch.cuda.current_stream(device).wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        pool = None if self._latest is None else self._latest.pool()
        # Another thread may read new weights during the capture.
        with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
            logits_SV = run()
        self._latest = graph
        return logits_SV, graph.replay


class _Steps:
    """The steps of one cache since it got its memory."""

    def __init__(self, n_moves: int) -> None:
        self.n_moves = n_moves
        self.count = 0
        self.recorded: Callable[[Sequence[int], Sequence[int]], Tensor] | None = None
