"""Proposers: what makes a candidate from the experience with the stable version."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any, TypeAlias

from agentlightning.errors import ConfigError
from agentlightning.resources import Resource, read_resources
from agentlightning.store.protocol import LightningStore
from agentlightning_algorithms.live.result import Result


@dataclass(frozen=True)
class Experience:
    """What a proposer learns from."""

    resources: Mapping[str, Resource]
    """The stable version."""
    results: Sequence[Result]
    """Rollouts that were served with it, oldest first, with their rewards; their spans are in the store."""
    notes: Sequence[str]
    """What happened so far, such as what became of earlier candidates, oldest first."""
    store: LightningStore


Proposal: TypeAlias = Mapping[str, Resource | str] | None
Proposer: TypeAlias = Callable[[Experience], Proposal | Awaitable[Proposal]]
"""Makes better resources, those that change by name; None when it has no idea. A plain str is a prompt."""


def load_proposer(target: str) -> Proposer:
    """The function at ``"module:function"``.

    Raises:
        ConfigError: there is none.
    """
    try:
        found: Proposer = EntryPoint("propose", target, "agentlightning").load()
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"propose = {target!r}: nothing to import, as in 'module:function': {error}") from error
    return found


async def make_candidate(propose: Callable[[Experience], Any], experience: Experience) -> dict[str, Resource]:
    """The resources that a proposer wants: all of them, changed or not. A synchronous one gets a thread.

    Raises:
        ConfigError: it proposed something that is no resource, or under a name that the stable version does not have.
        Exception: whatever the proposer raised.
    """
    if inspect.iscoroutinefunction(propose):
        answer = propose(experience)
    else:  # it may take long, and the heartbeats must go on
        answer = await asyncio.to_thread(propose, experience)
    proposal: Proposal = await answer if inspect.isawaitable(answer) else answer
    changes = {} if proposal is None else read_resources(proposal)
    if unknown := changes.keys() - experience.resources.keys():
        raise ConfigError(f"proposed {', '.join(sorted(unknown))}; there are: {', '.join(experience.resources)}")
    return {**experience.resources, **changes}
