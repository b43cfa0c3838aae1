"""``Transition``: model calls as steps of a Markov decision process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from agentlightning.adapter.adapter import TraceAdapter
from agentlightning.adapter.triplet import TraceToTriplet
from agentlightning.semconv import Message
from agentlightning.types import Record, Span, Triplet
from agentlightning_plugins.chat_history.linking import link_calls, read_messages


class Transition(Record):
    """One model call: what the model saw, what it did, what came of it."""

    state: Any
    """``Triplet.prompt``: everything the model was given."""
    action: Any
    """``Triplet.response``: what it answered."""
    observation: list[Message] = Field(default_factory=list)
    """What the agent added to the conversation after the answer, such as results of tools; empty at its end."""
    reward: float | None = None
    """``Triplet.reward``."""
    next_index: int | None = None
    """Which transition goes on with this conversation; None for the last one."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """``Triplet.metadata``."""

    @property
    def is_terminal(self) -> bool:
        """Whether the conversation ends with this answer."""
        return self.next_index is None


class TraceToTransitions(TraceAdapter[list[Transition]]):
    """Gives a transition for each triplet, in the order of the calls."""

    def __init__(self, source: TraceToTriplet | dict[str, Any] | None = None) -> None:
        """Makes the adapter.

        Args:
            source: makes the triplets; its settings will do.
        """
        self.source = TraceToTriplet(**source) if isinstance(source, dict) else source or TraceToTriplet()

    def adapt(self, source: Sequence[Span], /) -> list[Transition]:
        """Makes the transitions of one attempt.

        Raises:
            AdapterError: as ``TraceToTriplet.adapt``.
        """
        return triplets_to_transitions(self.source.adapt(source))


def triplets_to_transitions(triplets: Sequence[Triplet]) -> list[Transition]:
    """Views the triplets of one attempt as transitions; which calls belong to one conversation is read off messages."""
    following: dict[int, int] = {}
    for position, previous in enumerate(link_calls(triplets)):
        if previous is not None:
            following.setdefault(previous, position)  # of branches, the first
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
