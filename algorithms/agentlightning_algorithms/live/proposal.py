"""Proposers make a candidate from the experience with the stable version."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from importlib.metadata import EntryPoint
from typing import Any, TypeAlias

from agentlightning.errors import ConfigError
from agentlightning.plugin.registry import get_manager
from agentlightning.resources import Resource, read_resources
from agentlightning.run.thread import run_in_thread
from agentlightning_algorithms.shared.live_resources import LiveExperience

Proposal: TypeAlias = Mapping[str, Resource | str] | None
Proposer: TypeAlias = Callable[[LiveExperience], Proposal | Awaitable[Proposal]]
"""Returns the resources to change, by name; None for no change. A plain str is a prompt."""


def load_proposer(given: Proposer | str | Mapping[str, Any]) -> Proposer:
    """Resolves the ``propose`` setting.

    Args:
        given: a function; ``"module:function"``; or an algorithm that has ``propose(experience)``, by its name or as
            ``{"name": "apo", **settings}``.

    Raises:
        ConfigError: it does not exist, or the algorithm has no ``propose``.
        PluginError: there is no algorithm of this name.
    """
    if callable(given):
        return given
    if isinstance(given, str) and ":" in given:
        try:
            found: Proposer = EntryPoint("propose", given, "agentlightning").load()
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(f"propose = {given!r} cannot be imported as 'module:function': {error}") from error
        return found
    algorithm = get_manager().create("algorithm", given)
    propose: Proposer | None = getattr(algorithm, "propose", None)
    if propose is None:
        raise ConfigError(f"propose = {given!r}: {type(algorithm).__name__} has no propose(experience), as apo has")
    return propose


async def make_candidate(propose: Callable[[LiveExperience], Any], experience: LiveExperience) -> dict[str, Resource]:
    """Calls a proposer and returns all resources, changed or not. A synchronous proposer gets a thread.

    Raises:
        ConfigError: it proposed something other than resources, or a name that the stable version does not have.
        Exception: the proposer's own.
    """
    if inspect.iscoroutinefunction(propose):
        answer = propose(experience)
    else:  # in a thread, because heartbeats must go on; the learner can stop while it works
        answer = await run_in_thread(lambda: propose(experience), name="proposer")
    proposal: Proposal = await answer if inspect.isawaitable(answer) else answer
    changes = {} if proposal is None else read_resources(proposal)
    if unknown := changes.keys() - experience.resources.keys():
        raise ConfigError(f"proposed {', '.join(sorted(unknown))}; there are: {', '.join(experience.resources)}")
    return {**experience.resources, **changes}
