"""Keys and values of the running rows, which differ in length, and of earlier sequences.

    S   slots; row i of the batch is in slot i
    n   rows of one forward pass
    T   tokens that each of them adds
    H   key-value heads
    W   positions kept for each slot
    D   size of a head
    B   blocks of the pool of earlier sequences

transformers' caches append the same columns for all rows, so all rows must start and end together. Here a forward pass
writes each row's tokens at that row's own positions, so that rows can join and leave at any time.

An earlier sequence is split into blocks of tokens. A block is looked up by a digest of all tokens up to its end, so
that sequences share their common prefixes: the turns of a rollout, the rollouts of a task, the system prompt. The idea
comes from vLLM's automatic prefix caching (Kwon et al. 2023, arXiv:2309.06180).
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from agentlightning.errors import ConfigError
from agentlightning_algorithms.shared.policy.model import Policy

BLOCK = 16
"""Tokens of a block; widths are multiples of it, so that a slot consists of whole blocks."""
_GROWTH = 8
"""A cache that is too small grows by at least 1 / _GROWTH of its size."""
SPARE = (1 + 1 / _GROWTH) ** 2
"""Largest ratio of memory to what is needed after such growth."""


class _SlotLayer(DynamicLayer):  # type: ignore[misc] # mypy does not read transformers
    """One layer's keys and values, ``[S, H, W, D]`` each; allocated by the first forward pass."""

    keys: Tensor
    values: Tensor
    is_initialized: bool

    def __init__(self, slots: SlotCache) -> None:
        super().__init__()
        self._slots = slots

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.open(key_states, value_states)
        first, rows, positions, width = self._slots.forward_pass
        end = first + len(key_states)
        if rows is None:
            self.keys[first:end, :, :width] = key_states
            self.values[first:end, :, :width] = value_states
            return key_states, value_states
        self.keys[rows, :, positions] = key_states.transpose(1, 2)
        self.values[rows, :, positions] = value_states.transpose(1, 2)
        return self.keys[first:end, :, :width], self.values[first:end, :, :width]

    def get_seq_length(self) -> int:
        _, rows, _, width = self._slots.forward_pass
        return 0 if rows is None else width

    def open(self, keys: Tensor, values: Tensor) -> None:
        """Allocates memory for keys and values like these, if there is none yet."""
        if not self.is_initialized:
            shape = self._slots.n_slots, self._slots.width
            self.keys, self.values = _like(keys, *shape), _like(values, *shape)
            self.is_initialized = True

    def resize(self, slots: int, width: int) -> None:
        if self.is_initialized:
            self.keys = _resized(self.keys, slots, width)
            self.values = _resized(self.values, slots, width)

    def take(self, other: _SlotLayer, sources: Tensor, first: int, width: int) -> None:
        self.open(other.keys, other.values)
        end = first + len(sources)
        self.keys[first:end, :, :width] = other.keys[sources, :, :width]
        self.values[first:end, :, :width] = other.values[sources, :, :width]


class _ForwardPass(NamedTuple):
    """Write positions and attention mask of a forward pass."""

    first: int
    """Slot of the first row."""
    rows: Tensor | None
    """Slot of each token, ``[n, T]``; None: prompts from their beginning, which read nothing earlier."""
    positions: Tensor | None
    """Position of each token in its row, ``[n, T]``."""
    width: int
    """Positions that may be read."""


class SlotCache:
    """The cache of rows that are run together. It grows in steps of an eighth; :meth:`fit` releases memory.

    Attributes:
        cache: the model's ``past_key_values`` after :meth:`begin` or :meth:`extend`.
        n_moves: how often keys and values got other memory.
    """

    def __init__(self, n_layers: int, device: torch.device) -> None:
        self.n_slots = self.width = self.n_moves = 0
        self.forward_pass = _ForwardPass(0, None, None, 0)
        self._device = device
        self._layers = [_SlotLayer(self) for _ in range(n_layers)]
        self.cache = Cache(layers=cast(list[Any], self._layers))

    def begin(self, first: int, n: int, width: int) -> None:
        """Prepares for ``n`` prompts, padded on the right to ``width``, in the slots from ``first`` on.

        The prompts attend only to themselves, so the model's causal attention needs no mask.
        """
        self.reserve(first + n, width)
        self.forward_pass = _ForwardPass(first, None, None, width)

    def extend(self, first: int, lengths: Sequence[int], count: int) -> tuple[Tensor, Tensor]:
        """Prepares for ``count`` more tokens, padding included, in rows of ``lengths`` from slot ``first`` on.

        Returns:
            Position ids ``[n, T]`` and the attention mask ``[n, 1, T, W]``, True where a token may attend.
        """
        width = max(lengths) + count
        self.reserve(first + len(lengths), width)
        starts_n = torch.tensor(lengths, device=self._device)
        positions_nT = starts_n[:, None] + torch.arange(count, device=self._device)
        rows_nT = torch.arange(first, first + len(lengths), device=self._device)[:, None].expand(-1, count)
        self.forward_pass = _ForwardPass(first, rows_nT, positions_nT, width)
        mask = torch.arange(width, device=self._device) <= positions_nT[:, :, None]
        return positions_nT, mask[:, None]

    def extend_all(self, starts_S: Tensor) -> tuple[Tensor, Tensor]:
        """Prepares as :meth:`extend` does, for one more token in each slot and for the whole width.

        The tensors of the forward pass depend on ``starts_S`` alone, so that it can be recorded.
        """
        rows_S1 = torch.arange(self.n_slots, device=self._device)[:, None]
        positions_S1 = starts_S[:, None]
        self.forward_pass = _ForwardPass(0, rows_S1, positions_S1, self.width)
        return positions_S1, (torch.arange(self.width, device=self._device) <= positions_S1)[:, None, None]

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copies the first ``length`` positions of each source to its target, or of the only source to all targets."""
        self.reserve(max(targets) + 1, length)
        origin, place = (torch.tensor(slots, device=self._device) for slots in (sources, targets))
        for layer in self._layers:
            for tensor in (layer.keys, layer.values):
                tensor[place, :, :length] = tensor[origin, :, :length]

    def take(self, other: SlotCache, sources: Sequence[int], first: int, length: int) -> None:
        """Copies the first ``length`` positions of another cache's slots into the slots from ``first`` on."""
        self.reserve(first + len(sources), length)
        where = torch.tensor(sources, device=self._device)
        for mine, theirs in zip(self._layers, other._layers, strict=True):
            mine.take(theirs, where, first, length)

    def fit(self, slots: int, width: int, *, spare: float = SPARE) -> None:
        """Releases memory if there is more than ``spare`` times what ``slots`` slots of ``width`` positions need."""
        width = whole_blocks(width)
        if self.n_slots * self.width > spare * slots * width:
            self._resize(slots, width)

    def size_with(self, slots: int, width: int) -> int:
        """Returns the positions of all slots after growth to at least ``slots`` slots of ``width`` positions."""
        n_slots, n_positions = self._grown(slots, width)
        return n_slots * n_positions

    @property
    def n_bytes(self) -> int:
        """Memory of keys and values."""
        tensors = [t for layer in self._layers if layer.is_initialized for t in (layer.keys, layer.values)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def restore(self, layers: Sequence[tuple[Tensor, Tensor]], slots: int, width: int) -> list[tuple[Tensor, Tensor]]:
        """Makes room for keys and values of the type and shape of ``layers``, and returns :meth:`blocks`."""
        self.reserve(slots, width)
        for layer, (keys, values) in zip(self._layers, layers, strict=True):
            layer.open(keys, values)
        return self.blocks()

    def blocks(self) -> list[tuple[Tensor, Tensor]]:
        """Returns views of each layer's keys and values, ``[S, H, W / BLOCK, BLOCK, D]``, once allocated."""
        return [
            (layer.keys.unflatten(2, (-1, BLOCK)), layer.values.unflatten(2, (-1, BLOCK))) for layer in self._layers
        ]

    def reserve(self, slots: int, width: int) -> None:
        """Grows to at least ``slots`` slots of ``width`` positions."""
        if slots > self.n_slots or width > self.width:
            self._resize(*self._grown(slots, width))

    def _grown(self, slots: int, width: int) -> tuple[int, int]:
        n_slots, n_positions = self.n_slots, self.width
        if slots > n_slots:
            n_slots = max(slots, n_slots + n_slots // _GROWTH)
        if width > n_positions:
            n_positions = max(whole_blocks(width), (n_positions + n_positions // _GROWTH) // BLOCK * BLOCK)
        return n_slots, n_positions

    def _resize(self, slots: int, width: int) -> None:
        self.n_slots, self.width = slots, width
        self.n_moves += 1
        for layer in self._layers:
            layer.resize(slots, width)


def check_attention(policy: Policy) -> None:
    """Raises a ConfigError if a layer of the model does not attend to the whole context."""
    config = policy.model.config
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    window = getattr(config, "sliding_window", None)
    if kinds or (window is not None and window < policy.max_length):
        raise ConfigError(
            f"the model {config.model_type!r} has layers that do not attend to the whole context "
            f"({', '.join(sorted(kinds)) or f'sliding window of {window} tokens'}); this sampler needs full attention. "
            "Use the backend vllm, or a model such as Qwen 2.5, Qwen 3 or Llama 3."
        )


def position_bytes(policy: Policy) -> int:
    """Returns the memory that keys and values of one token take in all layers."""
    config: Any = policy.model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * size * policy.model.dtype.itemsize)


def _like(states: Tensor, slots: int, width: int) -> Tensor:
    return states.new_zeros(slots, states.shape[1], width, states.shape[3])


def _resized(old: Tensor, slots: int, width: int) -> Tensor:
    new = _like(old, slots, width)
    slots, width = min(slots, old.shape[0]), min(width, old.shape[2])
    new[:slots, :, :width] = old[:slots, :, :width]
    return new


def whole_blocks(width: int) -> int:
    """Rounds up to a multiple of ``BLOCK``."""
    return -(-width // BLOCK) * BLOCK


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
                larger = min(self._capacity, max(64, 2 * size))  # a GPU takes a millisecond to allocate each tensor
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
