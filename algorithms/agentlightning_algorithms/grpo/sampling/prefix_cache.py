"""A cache of the keys and values of earlier sequences, for prompts that share a prefix with them.

    B   blocks of the pool
    H   key-value heads
    D   size of a head

A sequence is split into blocks of tokens. A block is looked up by its own tokens and the block before it, so that
sequences share their common prefixes: the turns of a rollout, the rollouts of a task, the system prompt. The idea is
that of vLLM's automatic prefix caching (Kwon et al. 2023, arXiv:2309.06180); the running batch itself stays in slots.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentlightning_algorithms.grpo.sampling.slot_cache import BLOCK, SlotCache

_Key = tuple[int, tuple[int, ...]]
"""Serial number of the previous block (0: none) and the block's own tokens."""


@dataclass(slots=True)
class _Block:
    serial: int
    """Never reused, so that the successors of an evicted block are not found under another."""
    index: int
    """Position in the pool."""


class PrefixCache:
    """An LRU pool of blocks beside a :class:`SlotCache`, of at most ``max_bytes``."""

    def __init__(self, slots: SlotCache, max_bytes: int) -> None:
        self._slots = slots
        self._max_bytes = max_bytes
        self._blocks: OrderedDict[_Key, _Block] = OrderedDict()  # least recently used first
        self._serial = 0
        self._free: list[int] = []
        self._pool: list[tuple[Tensor, Tensor]] = []  # keys and values of each layer, [B, H, BLOCK, D]
        self._capacity = 0

    def clear(self) -> None:
        """Drops all blocks; required when the weights change."""
        self._free.extend(block.index for block in self._blocks.values())
        self._blocks.clear()

    def match(self, token_ids: Sequence[int]) -> list[int]:
        """Returns the pool positions of the blocks that ``token_ids`` begins with.

        The last token is excluded: it has to be run for its logits.
        """
        chain = self._chain(token_ids[:-1])
        self._touch([key for key, _ in chain])
        return [block.index for _, block in chain]

    def restore(self, found: Sequence[Sequence[int]], first: int) -> None:
        """Copies blocks into slots: those of row i into slot ``first + i``, from position 0 on."""
        places = [(first + row, at, index) for row, chain in enumerate(found) for at, index in enumerate(chain)]
        if places:
            slots, ats, indices = self._tensors(places)
            width = BLOCK * max(len(chain) for chain in found)
            layers = self._slots.blocks(first + len(found), width)
            for (keys, values), (pool_keys, pool_values) in zip(layers, self._pool, strict=True):
                keys[slots, :, ats] = pool_keys[indices]
                values[slots, :, ats] = pool_values[indices]

    def store(self, rows: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Stores the whole blocks of sequences, given as slot and its tokens."""
        if not self._max_bytes or not rows:
            return
        self._open()
        places: list[tuple[int, int, int]] = []
        taken: set[int] = set()  # blocks used by this call, which must not be evicted
        for slot, token_ids in rows:
            chain = self._chain(token_ids)
            keys = [key for key, _ in chain]
            taken.update(block.serial for _, block in chain)
            self._touch(keys)
            before = chain[-1][1].serial if chain else 0
            for at in range(len(chain), len(token_ids) // BLOCK):
                index = self._place(taken)
                if index is None:
                    break
                self._serial += 1
                key = (before, tuple(token_ids[at * BLOCK : (at + 1) * BLOCK]))
                self._blocks[key] = _Block(self._serial, index)
                taken.add(self._serial)
                keys.append(key)
                places.append((slot, at, index))
                before = self._serial
            self._touch(keys)
        if places:
            slots, ats, indices = self._tensors(places)
            for (keys_, values), (pool_keys, pool_values) in zip(self._slots.blocks(), self._pool, strict=True):
                pool_keys[indices] = keys_[slots, :, ats]
                pool_values[indices] = values[slots, :, ats]

    def _chain(self, token_ids: Sequence[int]) -> list[tuple[_Key, _Block]]:
        chain: list[tuple[_Key, _Block]] = []
        before = 0
        for start in range(0, len(token_ids) - BLOCK + 1, BLOCK):
            key = (before, tuple(token_ids[start : start + BLOCK]))
            block = self._blocks.get(key)
            if block is None:
                break
            chain.append((key, block))
            before = block.serial
        return chain

    def _touch(self, keys: Sequence[_Key]) -> None:
        # In reverse: a block is evicted after its successors, which cannot be found without it.
        for key in reversed(keys):
            self._blocks.move_to_end(key)

    def _place(self, taken: set[int]) -> int | None:
        if self._free:
            return self._free.pop()
        have = self._pool[0][0].shape[0]
        if have < self._capacity:
            size = min(self._capacity, max(64, 2 * have))
            self._pool = [(_grown(keys, size), _grown(values, size)) for keys, values in self._pool]
            self._free = list(range(size - 1, have - 1, -1))
            return self._free.pop()
        oldest = next(iter(self._blocks), None)
        if oldest is None or self._blocks[oldest].serial in taken:
            return None
        return self._blocks.pop(oldest).index

    def _open(self) -> None:
        """Creates the pool, empty, with the shape of the slots' blocks."""
        if not self._pool:
            layers = self._slots.blocks()
            self._pool = [(keys[:0, :, 0].clone(), values[:0, :, 0].clone()) for keys, values in layers]
            block_bytes = sum(t[0, :, 0].numel() * t.element_size() for layer in layers for t in layer)
            self._capacity = self._max_bytes // block_bytes

    def _tensors(self, places: Sequence[tuple[int, int, int]]) -> tuple[Tensor, Tensor, Tensor]:
        columns = torch.tensor(places, device=self._pool[0][0].device).T
        return columns[0], columns[1], columns[2]


def _grown(old: Tensor, size: int) -> Tensor:
    new = old.new_empty(size, *old.shape[1:])
    new[: old.shape[0]] = old
    return new
