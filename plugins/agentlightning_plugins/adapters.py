"""The adapters; among them ``Transition``: model calls as transitions of a Markov decision process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from agentlightning.adapter.adapter import TraceAdapter
from agentlightning.adapter.triplet import TraceToTriplet
from agentlightning.plugin.hookspecs import Component, hookimpl
from agentlightning.semconv import Message
from agentlightning.types import Record, Span, Triplet
from agentlightning_plugins.shared.chat_history import link_calls, read_messages


class Transition(Record):
    """One model call as state, action, observation and reward."""

    state: Any
    """``Triplet.prompt``."""
    action: Any
    """``Triplet.response``."""
    observation: list[Message] = Field(default_factory=list)
    """Messages that the agent added after the answer, such as results of tools; empty at the end of a conversation."""
    reward: float | None = None
    """``Triplet.reward``."""
    next_index: int | None = None
    """Index of the transition that continues this conversation; None for the last one."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """``Triplet.metadata``."""

    @property
    def is_terminal(self) -> bool:
        """Whether the conversation ends with this answer."""
        return self.next_index is None


class TraceToTransitions(TraceAdapter[list[Transition]]):
    """Creates a transition for each triplet, in the order of the calls."""

    def __init__(self, source: TraceToTriplet | dict[str, Any] | None = None) -> None:
        """Takes the adapter that creates the triplets, or its settings."""
        self.source = TraceToTriplet(**source) if isinstance(source, dict) else source or TraceToTriplet()

    def adapt(self, source: Sequence[Span], /) -> list[Transition]:
        """Creates the transitions of one attempt.

        Raises:
            AdapterError: as ``TraceToTriplet.adapt``.
        """
        return triplets_to_transitions(self.source.adapt(source))


def triplets_to_transitions(triplets: Sequence[Triplet]) -> list[Transition]:
    """Converts the triplets of one attempt; calls belong to one conversation if their messages continue each other."""
    following: dict[int, int] = {}
    for position, previous in enumerate(link_calls(triplets)):
        if previous is not None:
            following.setdefault(previous, position)  # the first of several branches
    transitions = []
    for position, triplet in enumerate(triplets):
        next_index = following.get(position)
        observation: Sequence[Message] = ()
        if next_index is not None:
            observation = read_messages(triplets[next_index])[len(read_messages(triplet)) + 1 :]
        transitions.append(
            Transition(
                state=triplet.prompt,
                action=triplet.response,
                observation=list(observation),
                reward=triplet.reward,
                next_index=next_index,
                metadata=triplet.metadata,
            )
        )
    return transitions


@hookimpl
def components() -> list[Component]:
    triplets = "agentlightning.adapter.triplet:TraceToTriplet"
    messages = "agentlightning_plugins.shared.chat_history:TraceToMessages"
    trajectories = "agentlightning_plugins.shared.trajectories:TraceToTrajectories"
    return [
        Component("adapter", "messages", messages, summary="chat histories with tools"),
        Component("adapter", "trajectory", trajectories, summary="tokens with masks, calls joined"),
        Component("adapter", "transition", f"{__name__}:TraceToTransitions", summary="state, action, reward"),
        Component("adapter", "triplet", triplets, summary="prompt, response, reward"),
    ]
