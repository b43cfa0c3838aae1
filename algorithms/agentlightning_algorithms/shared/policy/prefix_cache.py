"""A cache of the keys and values of earlier sequences, for prompts that share a prefix with them.

    B   blocks of the pool
    H   key-value heads
    D   size of a head

A sequence is split into blocks of tokens. A block is looked up by a digest of all tokens up to its end, so that
sequences share their common prefixes: the turns of a rollout, the rollouts of a task, the system prompt. The idea is
that of vLLM's automatic prefix caching (Kwon et al. 2023, arXiv:2309.06180); the running batch itself stays in slots.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import TypeVar

import torch
from torch import Tensor

from agentlightning_algorithms.shared.policy.slot_cache import BLOCK, SlotCache

S = TypeVar("S", bound=Sequence[int])
_WORTH_WAITING = 256
"""Repeated tokens that cost as much as another forward pass of a small model."""


class PrefixCache:
    """An LRU pool of blocks, separate from the caches of the running batch."""

    def __init__(self, max_bytes: int, position_bytes: int) -> None:
        """Takes the maximum memory of the pool, and the memory of one position's keys and values in all layers."""
        self._blocks: OrderedDict[bytes, int] = OrderedDict()  # indices into the pool, least recently used first
        self._free: list[int] = []
        self._pool: list[tuple[Tensor, Tensor]] = []  # keys and values of each layer, [B, H, BLOCK, D]
        self._capacity = max_bytes // (BLOCK * position_bytes)

    def clear(self) -> None:
        """Drops all blocks; required when the weights change."""
        self._free.extend(self._blocks.values())
        self._blocks.clear()

    def match(self, token_ids: Sequence[int]) -> list[int]:
        """Returns the pool indices of the blocks that ``token_ids`` begins with.

        The last token is excluded: it has to be run for its logits.
        """
        digests = list(takewhile(self._blocks.__contains__, _digests(token_ids[:-1])))
        self._touch(digests)
        return [self._blocks[digest] for digest in digests]

    def leaders(self, sequences: Sequence[S]) -> list[S]:
        """Returns the sequences to run first: one of each set of sequences that begin with the same unknown block.

        The rest of the set finds its blocks in the cache afterwards. If that saves little, or the pool cannot hold the
        blocks, all sequences are returned.
        """
        unknown = [[d for d in _digests(token_ids[:-1]) if d not in self._blocks] for token_ids in sequences]
        if len(set().union(*unknown)) > self._capacity:
            return list(sequences)
        by_block: defaultdict[bytes | int, list[int]] = defaultdict(list)
        for i, digests in enumerate(unknown):
            by_block[digests[0] if digests else i].append(i)
        chosen: list[int] = []
        for members in by_block.values():
            n_blocks = sum(len(unknown[i]) for i in members)
            repeated = n_blocks - len(set().union(*(unknown[i] for i in members)))
            chosen += members[:1] if BLOCK * repeated >= _WORTH_WAITING else members
        return [sequences[i] for i in chosen]

    def restore(self, slots: SlotCache, found: Sequence[Sequence[int]], first: int) -> None:
        """Copies blocks into slots: the blocks of row i into slot ``first + i``, from position 0 on."""
        places = [(first + row, at, index) for row, chain in enumerate(found) for at, index in enumerate(chain)]
        if places:
            rows, ats, indices = self._columns(places)
            layers = slots.restore(self._pool, first + len(found), BLOCK * max(map(len, found)))
            for (keys, values), (pool_keys, pool_values) in zip(layers, self._pool, strict=True):
                keys[rows, :, ats] = pool_keys[indices]
                values[rows, :, ats] = pool_values[indices]

    def store(self, slots: SlotCache, rows: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Stores the complete blocks of sequences, each given as its slot and its tokens."""
        if not self._capacity or not rows:
            return
        self._open(slots)
        places: list[tuple[int, int, int]] = []
        used: set[bytes] = set()  # by this call, which must not evict them
        for slot, token_ids in rows:
            digests = []
            for at, digest in enumerate(_digests(token_ids)):
                if digest in self._blocks:
                    self._blocks.move_to_end(digest)
                elif (index := self._allocate(used)) is not None:
                    self._blocks[digest] = index
                    places.append((slot, at, index))
                else:
                    break
                used.add(digest)
                digests.append(digest)
            self._touch(digests)
        if places:
            sources, ats, indices = self._columns(places)
            for (keys, values), (pool_keys, pool_values) in zip(slots.blocks(), self._pool, strict=True):
                pool_keys[indices] = keys[sources, :, ats]
                pool_values[indices] = values[sources, :, ats]

    def _touch(self, digests: Sequence[bytes]) -> None:
        # In reverse: a block is evicted after its successors, which are not found without it.
        for digest in reversed(digests):
            self._blocks.move_to_end(digest)

    def _allocate(self, used: set[bytes]) -> int | None:
        """Returns a free index, after growing the pool or evicting a block that is not in use."""
        if not self._free:
            size = self._pool[0][0].shape[0]
            if size < self._capacity:
                larger = min(self._capacity, max(64, size + size // 4))
                for layer, (keys, values) in enumerate(self._pool):  # one by one, so that little memory is held twice
                    self._pool[layer] = _grown(keys, larger), _grown(values, larger)
                self._free = list(range(larger - 1, size - 1, -1))
            elif self._blocks and next(iter(self._blocks)) not in used:
                self._free.append(self._blocks.popitem(last=False)[1])
        return self._free.pop() if self._free else None

    def _open(self, slots: SlotCache) -> None:
        """Creates the pool, empty, with the shape of the slots' blocks."""
        if not self._pool:
            layers = slots.blocks()
            self._pool = [(keys[:0, :, 0].clone(), values[:0, :, 0].clone()) for keys, values in layers]

    def _columns(self, places: Sequence[tuple[int, int, int]]) -> tuple[Tensor, Tensor, Tensor]:
        columns = torch.tensor(places, device=self._pool[0][0].device).T
        return columns[0], columns[1], columns[2]


def _digests(token_ids: Sequence[int]) -> Iterator[bytes]:
    """Yields, for each whole block, a digest of the tokens up to its end."""
    digest = b""
    for start in range(0, len(token_ids) - BLOCK + 1, BLOCK):
        block = array("I", token_ids[start : start + BLOCK])
        digest = hashlib.blake2b(digest + block.tobytes(), digest_size=16).digest()
        yield digest


def _grown(old: Tensor, size: int) -> Tensor:
    new = old.new_empty(size, *old.shape[1:])
    new[: old.shape[0]] = old
    return new
