"""In what order a call tries the backends of its model."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Final, Protocol, TypeVar

_HASH_RANGE: Final = float(2**64)


class Weighted(Protocol):
    """What the order depends on."""

    @property
    def identity(self) -> bytes:
        """The same for the same backend in every process and every model list."""
        ...

    @property
    def weight(self) -> float:
        """Its share of the calls, relative to the others; above 0."""
        ...


B = TypeVar("B", bound=Weighted)


def rank(backends: Sequence[B], key: str) -> list[B]:
    """Orders backends for a key by weighted rendezvous hashing.

    Each backend draws a score from the hash of the key and itself, -weight / ln(u) with u uniform in (0, 1), and the
    highest comes first: a backend is first for its share of the keys, and when one is added or leaves, only the keys
    move that it gets or had. (Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998.)
    """
    text = key.encode()
    return sorted(backends, key=lambda backend: _score(text, backend), reverse=True)


def _score(key: bytes, backend: Weighted) -> float:
    digest = hashlib.blake2b(key, digest_size=8, key=backend.identity).digest()
    uniform = (int.from_bytes(digest, "big") + 0.5) / _HASH_RANGE
    return math.inf if uniform >= 1.0 else -backend.weight / math.log(uniform)


class RoundRobin:
    """Weighted round-robin, evenly mixed as in nginx's smooth one."""

    def __init__(self) -> None:
        self._current_weights: dict[bytes, float] = {}

    def order(self, backends: Sequence[B]) -> list[B]:
        """All backends; the first is the one whose turn it is."""
        weights = {
            backend.identity: self._current_weights.get(backend.identity, 0.0) + backend.weight for backend in backends
        }
        order = sorted(backends, key=lambda backend: weights[backend.identity], reverse=True)
        weights[order[0].identity] -= sum(backend.weight for backend in backends)
        self._current_weights = weights
        return order
