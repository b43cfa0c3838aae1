"""The rows of the running batch, in banks of similar length, so that short rows need less memory than the longest.

A bank is a :class:`SlotCache` and is run by its own forward passes. Rows of different lengths share one if that costs
little memory, because each additional bank costs a forward pass for each token.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from itertools import combinations
from typing import TypeVar

from torch import Tensor

from agentlightning_algorithms.shared.policy.draw import Generation, SamplingParams, Token
from agentlightning_algorithms.shared.policy.kv_cache import SPARE, SlotCache, whole_blocks

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class SamplingRequest:
    """A response to sample, and its tokens so far."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    random: random.Random | None
    """Set if the request has a seed."""
    on_token: Callable[[Token], None] | None
    future: Future[Generation] = field(default_factory=Future)
    tokens: list[Token] = field(default_factory=list)
    reused: int = 0
    """Prompt tokens whose keys and values were reused."""
    number: int = 0
    """Sequence number of the request's first admission."""

    @property
    def sequence(self) -> list[int]:
        """Prompt and response so far."""
        return [*self.prompt_ids, *(token.token_id for token in self.tokens)]

    @property
    def cached(self) -> int:
        """Positions in the key-value cache: all but the newest token, which the next step feeds."""
        return len(self.prompt_ids) + len(self.tokens) - 1


@dataclass(slots=True, eq=False)
class Swap:
    """New weights that are being read or wait for earlier rows."""

    weights: Future[dict[str, Tensor]]
    version: int
    future: Future[None] = field(default_factory=Future)

    @property
    def has_to_wait(self) -> bool:
        """False if the swap is cancelled or its weights could not be read."""
        return not self.future.cancelled() and (not self.weights.done() or self.weights.exception() is None)


def settle(future: Future[T], outcome: T | Exception) -> None:
    """Sets the result, or the error, of a future unless its owner has cancelled it."""
    with contextlib.suppress(InvalidStateError):
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


_ENTER, _MERGE, _SPLIT = 1.2, 1.1, 1.3
"""Limits of the ratio of positions in all banks to tokens: for adding a row to an existing bank, for merging two banks,
and for leaving a bank unsplit."""
_SLACK_BYTES = 16 * 2**20
"""Memory that is not worth another forward pass to save; in a model with larger weights, the size of the weights."""


@dataclass(eq=False)
class Bank:
    """Rows that are run together; row i is in slot i."""

    slots: SlotCache
    rows: list[SamplingRequest] = field(default_factory=list)

    @property
    def width(self) -> int:
        """Positions that each row of the bank takes."""
        return whole_blocks(1 + max((row.cached for row in self.rows), default=0))

    @property
    def positions(self) -> int:
        return len(self.rows) * self.width

    def cost(self, n: int, width: int) -> int:
        """Returns how many positions ``n`` more rows of ``width`` take here."""
        return (len(self.rows) + n) * max(self.width, whole_blocks(width)) - self.positions

    def remove(self, gone: Callable[[SamplingRequest], bool]) -> None:
        """Removes rows; the last rows move into the free slots."""
        staying = [i for i, row in enumerate(self.rows) if not gone(row)]
        free = sorted(set(range(len(staying))) - set(staying))
        moving = staying[len(staying) - len(free) :]
        if moving:
            self.slots.copy(moving, free, max(self.rows[i].cached for i in moving))
        rows = dict(zip(free, moving, strict=True))
        self.rows = [self.rows[rows.get(i, i)] for i in range(len(staying))]


class RunningBatch:
    """Banks of rows; iterating yields the rows."""

    def __init__(
        self, new_slots: Callable[[], SlotCache], position_bytes: int, max_bytes: int, weight_bytes: int = 0
    ) -> None:
        """Takes a function that makes a cache, and bytes: of a position's keys and values, of all, of the weights."""
        self.banks: list[Bank] = []
        self._new_slots = new_slots
        self._position_bytes = position_bytes
        self._slack = min(max(_SLACK_BYTES, weight_bytes), max_bytes // 8) // position_bytes

    def __iter__(self) -> Iterator[SamplingRequest]:
        return (row for bank in self.banks for row in bank.rows)

    def __len__(self) -> int:
        return sum(len(bank.rows) for bank in self.banks)

    @property
    def n_bytes(self) -> int:
        """Memory of keys and values."""
        return sum(bank.slots.n_bytes for bank in self.banks)

    def bytes_with(self, lengths: Sequence[int]) -> int:
        """Returns a bound on memory once rows of ``lengths`` have joined; without lengths, after one more token."""
        if not lengths:
            sizes = (bank.slots.size_with(len(bank.rows), bank.width) for bank in self.banks)
            return sum(sizes) * self._position_bytes
        widths = [whole_blocks(length + 1) for length in lengths]
        widest = max(widths + [bank.width for bank in self.banks])
        apart = self._positions + sum(widths)
        together = _ENTER * (self._tokens + sum(lengths)) + self._slack / 2
        positions = min((len(self) + len(lengths)) * widest, max(apart, together))
        return int(positions * self._position_bytes * SPARE)

    def choose(self, lengths: Sequence[int]) -> Bank:
        """Returns the bank for rows of these lengths that are about to be run; a new bank if that saves memory."""
        n, width = len(lengths), max(lengths) + 1
        best = min(self.banks, key=lambda bank: bank.cost(n, width), default=None)
        if best is not None:
            padded = self._positions + best.cost(n, width)
            if padded <= _ENTER * (self._tokens + sum(lengths)) + self._slack / 2:
                return best
        return self._open()

    def remove(self, gone: Callable[[SamplingRequest], bool], *, spare: float = SPARE) -> None:
        """Removes rows and releases memory beyond ``spare`` times what is needed."""
        for bank in self.banks:
            bank.remove(gone)
        self.arrange(spare=spare)

    def arrange(self, *, spare: float = SPARE) -> None:
        """Drops empty banks, splits banks that waste memory, and merges banks if that wastes little."""
        self.banks = [bank for bank in self.banks if bank.rows]
        while self._positions > _SPLIT * self._tokens + self._slack and self._split():
            pass
        while len(self.banks) > 1:
            one, other = min(combinations(self.banks, 2), key=lambda pair: _waste(*pair))
            if self._positions + _waste(one, other) > _MERGE * self._tokens + self._slack / 2:
                break
            small, large = sorted((one, other), key=lambda bank: bank.positions)
            _move(small, small.rows, large)
            self.banks.remove(small)
        for bank in self.banks:
            bank.slots.fit(len(bank.rows), bank.width, spare=spare)

    def _split(self) -> bool:
        """Moves the shorter or longer rows of one bank to a new bank, where that saves most; False if nothing does."""
        best: tuple[int, Bank | None, int] = (0, None, 0)
        for bank in self.banks:
            lengths = sorted((whole_blocks(row.cached + 1) for row in bank.rows), reverse=True)
            for k in range(1, len(lengths)):
                saved = (len(lengths) - k) * (lengths[0] - lengths[k])
                best = max(best, (saved, bank, lengths[k]), key=lambda found: found[0])
        _, source, width = best
        if source is None:
            return False
        short = [row for row in source.rows if whole_blocks(row.cached + 1) <= width]
        long = [row for row in source.rows if whole_blocks(row.cached + 1) > width]
        moving = short if len(short) * width < len(long) * source.width else long
        _move(source, moving, self._open())
        return True

    def _open(self) -> Bank:
        bank = Bank(self._new_slots())
        self.banks.append(bank)
        return bank

    @property
    def _positions(self) -> int:
        return sum(bank.positions for bank in self.banks)

    @property
    def _tokens(self) -> int:
        return sum(row.cached + 1 for row in self)


def _waste(one: Bank, other: Bank) -> int:
    """Returns how many more positions two banks take once merged."""
    return other.cost(len(one.rows), one.width) - one.positions


def _move(source: Bank, rows: Sequence[SamplingRequest], target: Bank) -> None:
    rows = list(rows)
    places = [source.rows.index(row) for row in rows]
    target.slots.take(source.slots, places, len(target.rows), max(row.cached for row in rows))
    target.rows += rows
    moved = set(map(id, rows))
    source.remove(lambda row: id(row) in moved)
