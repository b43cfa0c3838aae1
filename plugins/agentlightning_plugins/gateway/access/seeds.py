"""Seeds of model calls, derived from the seeds of their rollouts."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from typing import Final

import aiohttp

from agentlightning.errors import StoreError
from agentlightning.store.protocol import LightningStore
from agentlightning.store.span_writer import AttemptKey
from agentlightning_plugins.gateway.backends.provider import ModelBackend

logger = logging.getLogger("agentlightning")
_MAX_REMEMBERED: Final = 100_000


class CallSeeds:
    """Numbers the calls of each attempt, and reads the rollouts' seeds (``metadata["seed"]``) from the store."""

    def __init__(self, store: LightningStore) -> None:
        self._store = store
        self._calls: dict[AttemptKey, int] = {}
        self._seeds: dict[AttemptKey, object] = {}

    async def next(self, attempt: AttemptKey | None, backends: Iterable[ModelBackend]) -> int | None:
        """Returns the seed of the next call of an attempt; None if its rollout has no seed, or no backend seeds calls.

        Calls are numbered from 0 in order of arrival, separately for each attempt, so a repeated attempt gets the same
        seeds. Seeds are 53-bit integers, which JSON represents exactly.
        """
        if attempt is None or not any(backend.seed_calls for backend in backends):
            return None
        number = self._calls.pop(attempt, 0)
        self._calls[attempt] = number + 1  # now the newest entry
        if len(self._calls) > _MAX_REMEMBERED:
            oldest = next(iter(self._calls))
            del self._calls[oldest]
            self._seeds.pop(oldest, None)
        if attempt not in self._seeds:
            try:
                rollout = await self._store.get_rollout_by_id(attempt[0])
            except (StoreError, OSError, aiohttp.ClientError) as error:
                logger.warning("the seed of rollout %s cannot be read, so a call gets no seed: %s", attempt[0], error)
                return None
            self._seeds[attempt] = None if rollout is None else (rollout.metadata or {}).get("seed")
        seed = self._seeds[attempt]
        return None if seed is None else derive_seed(seed, number)


def derive_seed(seed: object, number: int) -> int:
    """Returns the seed of a call, given its rollout's seed and the number of the call."""
    digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 11
