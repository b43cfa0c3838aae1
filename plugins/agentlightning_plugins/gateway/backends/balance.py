"""Load balancing: the order in which a call tries the backends of its model."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from agentlightning_plugins.gateway.backends.backend import Backend

_HASH_RANGE: Final = float(2**64)


def rank(backends: Sequence[Backend], key: str) -> list[Backend]:
    """Orders backends for a key by weighted rendezvous hashing.

    The score of a backend is -weight / ln(u), with u uniform in (0, 1) from the hash of key and backend; the highest
    score comes first. So each backend is first for its share of the keys, and a new or removed backend moves only its
    own keys. (Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998.)
    """
    text = key.encode()
    return sorted(backends, key=lambda backend: _score(text, backend), reverse=True)


def _score(key: bytes, backend: Backend) -> float:
    digest = hashlib.blake2b(key, digest_size=8, key=backend.identity).digest()
    uniform = (int.from_bytes(digest, "big") + 0.5) / _HASH_RANGE
    return math.inf if uniform >= 1.0 else -backend.weight / math.log(uniform)


class RoundRobin:
    """Smooth weighted round-robin, as in nginx."""

    def __init__(self) -> None:
        self._current_weights: dict[bytes, float] = {}

    def order(self, backends: Sequence[Backend]) -> list[Backend]:
        """Returns all backends, beginning with the next in turn."""
        weights = {b.identity: self._current_weights.get(b.identity, 0.0) + b.weight for b in backends}
        order = sorted(backends, key=lambda backend: weights[backend.identity], reverse=True)
        weights[order[0].identity] -= sum(backend.weight for backend in backends)
        self._current_weights = weights
        return order
