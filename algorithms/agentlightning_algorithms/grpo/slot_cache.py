"""A key-value cache in which every row is a sequence of its own, at its own length.

    S   slots; row i of the batch lives in slot i
    H   key-value heads
    W   positions kept for each slot
    D   size of a head

transformers' caches append the same columns for all rows, so a batch must start and end together. Here rows come and
go: a decoding step writes one token per row, each at its own position, and a departing row leaves its slot to the
last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer


class _Step(NamedTuple):
    """Where a decoding step writes, and what it may read."""

    rows: Tensor
    positions: Tensor
    width: int


class _SlotLayer(DynamicLayer):
    """One layer's keys and values, ``[S, H, W, D]`` each."""

    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers leaves it unannotated
        self.keys, self.values = keys, values
        self.is_initialized = True
        self.step: _Step | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        assert self.step is not None, "begin_step comes before every forward pass"
        rows, positions, width = self.step
        self.keys[rows, :, positions] = key_states[:, :, 0]
        self.values[rows, :, positions] = value_states[:, :, 0]
        return self.keys[: len(rows), :, :width], self.values[: len(rows), :, :width]

    def get_seq_length(self) -> int:
        return 0 if self.step is None else self.step.width


class SlotCache:
    """The cache of a running batch. Grows as needed, by doubling, and never shrinks.

    Attributes:
        cache: what the model takes as ``past_key_values`` in a decoding step, after :meth:`begin_step`; None before the
            first :meth:`admit`.
    """

    def __init__(self) -> None:
        self._layers: list[_SlotLayer] = []
        self.cache: Cache | None = None

    def admit(self, prefilled: DynamicCache, sources: list[int], slots: list[int], width: int) -> None:
        """Copies prompts into slots: row ``sources[k]`` of ``prefilled``, padded on the right, into ``slots[k]``.

        Args:
            prefilled: cache of a forward pass over prompts.
            sources: rows of it; one prompt may go to several slots.
            slots: where to.
            width: positions of ``prefilled`` worth keeping.
        """
        layers = cast(list[Any], prefilled.layers)
        self._reserve(layers, max(slots) + 1, width)
        source, slot = torch.tensor(sources), torch.tensor(slots)
        for layer, new in zip(self._layers, layers, strict=True):
            layer.keys[slot, :, :width] = new.keys[source, :, :width]
            layer.values[slot, :, :width] = new.values[source, :, :width]

    def begin_step(self, lengths: Tensor) -> Tensor:
        """Readies the cache for one more token in each of the first ``len(lengths)`` slots.

        Args:
            lengths: tokens in each slot so far, ``[n]``, on the cache's device.

        Returns:
            The attention mask of the step, ``[n, 1, 1, width]``, True where a token may look.
        """
        width = int(lengths.max()) + 1
        first = self._layers[0].keys
        if width > first.shape[2]:
            self._resize(first.shape[0], _power_of_two(width))
        step = _Step(torch.arange(len(lengths), device=first.device), lengths, width)
        for layer in self._layers:
            layer.step = step
        return (torch.arange(width, device=first.device) <= lengths[:, None])[:, None, None]

    def move(self, source: int, target: int, length: int) -> None:
        """Copies the first ``length`` positions of one slot over those of another."""
        for layer in self._layers:
            layer.keys[target, :, :length] = layer.keys[source, :, :length]
            layer.values[target, :, :length] = layer.values[source, :, :length]

    def _reserve(self, prefilled: Sequence[Any], slots: int, width: int) -> None:
        if not self._layers:
            for new in prefilled:
                _, heads, _, size = new.keys.shape
                value_size = new.values.shape[-1]
                self._layers.append(
                    _SlotLayer(new.keys.new_zeros(0, heads, 0, size), new.values.new_zeros(0, heads, 0, value_size))
                )
            self.cache = Cache(layers=cast(list[Any], self._layers))
        have_slots, _, have_width, _ = self._layers[0].keys.shape
        if slots > have_slots or width > have_width:
            self._resize(max(have_slots, _power_of_two(slots)), max(have_width, _power_of_two(width)))

    def _resize(self, slots: int, width: int) -> None:
        for layer in self._layers:
            layer.keys = _grown(layer.keys, slots, width)
            layer.values = _grown(layer.values, slots, width)


def _grown(old: Tensor, slots: int, width: int) -> Tensor:
    new = old.new_zeros(slots, old.shape[1], width, old.shape[3])
    new[: old.shape[0], :, : old.shape[2]] = old
    return new


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
