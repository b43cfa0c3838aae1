"""A key-value cache whose rows are sequences of different lengths.

    S   slots; row i of the batch is in slot i
    n   rows of one forward pass
    T   tokens that each of them adds
    H   key-value heads
    W   positions kept for each slot
    D   size of a head

transformers' caches append the same columns for all rows, so a batch must start and end together. Here a forward pass
writes each row's tokens at that row's own positions, so that rows can join and leave at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from agentlightning.errors import ConfigError
from agentlightning_algorithms.grpo.model.policy import Policy

BLOCK = 16
"""Tokens of a block; widths are multiples of it, so that a slot consists of whole blocks."""


class _ForwardPass(NamedTuple):
    """Where a forward pass writes, and what it may read."""

    first: int
    """Slot of the first row."""
    rows: Tensor | None
    """Slot of each token, ``[n, T]``; None: prompts from their beginning, which read nothing."""
    positions: Tensor
    """Position of each token in its row, ``[n, T]``."""
    width: int
    """Positions that may be read."""


class _SlotLayer(DynamicLayer):
    """One layer's keys and values, ``[S, H, W, D]`` each; allocated by the first forward pass."""

    keys: Tensor
    values: Tensor

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers leaves it unannotated
        self.step: _ForwardPass | None = None
        self.size = (0, 0)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        assert self.step is not None, "begin() or extend() comes before every forward pass"
        if not self.is_initialized:
            self.keys, self.values = (_like(states, *self.size) for states in (key_states, value_states))
            self.is_initialized = True
        first, rows, positions, width = self.step
        end = first + len(key_states)
        if rows is None:
            self.keys[first:end, :, :width] = key_states
            self.values[first:end, :, :width] = value_states
            return key_states, value_states
        self.keys[rows, :, positions] = key_states.transpose(1, 2)
        self.values[rows, :, positions] = value_states.transpose(1, 2)
        return self.keys[first:end, :, :width], self.values[first:end, :, :width]

    def get_seq_length(self) -> int:
        return 0 if self.step is None or self.step.rows is None else self.step.width

    def resize(self, slots: int, width: int) -> None:
        self.size = slots, width
        if self.is_initialized:
            self.keys, self.values = _grown(self.keys, slots, width), _grown(self.values, slots, width)


class SlotCache:
    """The cache of a running batch. It grows by doubling and never shrinks.

    Attributes:
        cache: the model's ``past_key_values`` after :meth:`begin` or :meth:`extend`.
    """

    def __init__(self, n_layers: int, device: torch.device) -> None:
        self._layers = [_SlotLayer() for _ in range(n_layers)]
        self._device = device
        self._slots = self._width = 0
        self.cache = Cache(layers=cast(list[Any], self._layers))

    def begin(self, first: int, n: int, width: int) -> None:
        """Prepares for ``n`` prompts, padded on the right to ``width``, in the slots from ``first`` on.

        They attend only to themselves, so the model's causal attention needs no mask.
        """
        self._reserve(first + n, width)
        self._begin(_ForwardPass(first, None, torch.empty(0), width))

    def extend(self, first: int, lengths: Sequence[int], count: int) -> tuple[Tensor, Tensor]:
        """Prepares for ``count`` more tokens, padding included, in rows of ``lengths`` from slot ``first`` on.

        Returns:
            Position ids ``[n, T]`` and the attention mask ``[n, 1, T, W]``, True where a token may attend.
        """
        width = max(lengths) + count
        self._reserve(first + len(lengths), width)
        starts_n = torch.tensor(lengths, device=self._device)
        positions_nT = starts_n[:, None] + torch.arange(count, device=self._device)
        rows_nT = torch.arange(first, first + len(lengths), device=self._device)[:, None].expand(-1, count)
        self._begin(_ForwardPass(first, rows_nT, positions_nT, width))
        mask = torch.arange(width, device=self._device) <= positions_nT[:, :, None]
        return positions_nT, mask[:, None]

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        """Copies the first ``length`` positions of one slot to others."""
        self._reserve(max(targets) + 1, length)
        where = torch.tensor(targets, device=self._device)
        for layer in self._layers:
            for tensor in (layer.keys, layer.values):
                tensor[where, :, :length] = tensor[source, :, :length].clone()  # source and target overlap

    def blocks(self, slots: int = 0, width: int = 0) -> list[tuple[Tensor, Tensor]]:
        """Makes room, and returns views of each layer's keys and values: ``[S, H, W / BLOCK, BLOCK, D]``.

        Only after the first forward pass.
        """
        self._reserve(slots, width)
        return [(_blocks(layer.keys), _blocks(layer.values)) for layer in self._layers]

    def _begin(self, step: _ForwardPass) -> None:
        for layer in self._layers:
            layer.step = step

    def _reserve(self, slots: int, width: int) -> None:
        if slots > self._slots or width > self._width:
            self._slots = max(self._slots, _power_of_two(slots))
            self._width = max(self._width, BLOCK, _power_of_two(width))
            for layer in self._layers:
                layer.resize(self._slots, self._width)


def check_attention(policy: Policy) -> None:
    """Raises a ConfigError if a layer of the model does not attend to the whole context."""
    config = policy.model.config
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    window = getattr(config, "sliding_window", None)
    if kinds or (window is not None and window < policy.max_length):
        raise ConfigError(
            f"the model {config.model_type!r} has layers that do not attend to the whole context "
            f"({', '.join(sorted(kinds)) or f'sliding window of {window} tokens'}); this sampler needs full attention. "
            "Use another backend, or a model such as Qwen 2.5 or Llama 3."
        )


def _like(states: Tensor, slots: int, width: int) -> Tensor:
    return states.new_zeros(slots, states.shape[1], width, states.shape[3])


def _grown(old: Tensor, slots: int, width: int) -> Tensor:
    new = _like(old, slots, width)
    new[: old.shape[0], :, : old.shape[2]] = old
    return new


def _blocks(tensor: Tensor) -> Tensor:
    slots, heads, width, size = tensor.shape
    return tensor.view(slots, heads, width // BLOCK, BLOCK, size)


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
