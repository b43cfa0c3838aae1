"""Requests, and swaps of the weights, as they wait in the sampler's queue."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from agentlightning_algorithms.shared.policy.sampling.draw import Generation, SamplingParams, Token

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
