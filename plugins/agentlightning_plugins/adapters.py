"""The adapters; among them ``Transition``: model calls as transitions of a Markov decision process."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from agentlightning.adapter.adapter import TraceAdapter
from agentlightning.adapter.call import find_states
from agentlightning.adapter.triplet import TraceToTriplet
from agentlightning.plugin.hookspecs import Component, hookimpl
from agentlightning.types import Record, Span, Triplet
from agentlightning_plugins.shared.chat_history import link_calls


class Transition(Record):
    """One model call as the paper of Agent Lightning sees it (https://arxiv.org/abs/2508.03680, section 3.1)."""

    state: dict[str, Any] = Field(default_factory=dict)
    """Snapshot of the agent's execution when the call began: its semantic variables by name, from ``emit_state`` or its
    framework."""
    observation: Any
    """The part of the state that the model was given: ``Triplet.prompt``."""
    action: Any
    """The model's whole output: ``Triplet.response``."""
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
    """Creates a transition for each triplet that can be trained on, in the order of the calls."""

    def __init__(self, source: TraceToTriplet | dict[str, Any] | None = None) -> None:
        """Takes the adapter that creates the triplets, or its settings."""
        self.source = TraceToTriplet(**source) if isinstance(source, dict) else source or TraceToTriplet()

    def adapt(self, source: Sequence[Span], /) -> list[Transition]:
        """Creates the transitions of one attempt; raises AdapterError as ``TraceToTriplet.adapt`` does."""
        return triplets_to_transitions(self.source.adapt(source), source)


def triplets_to_transitions(triplets: Sequence[Triplet], spans: Sequence[Span] = ()) -> list[Transition]:
    """Converts the triplets of one attempt; calls belong to one conversation if their messages continue each other.

    Triplets whose metadata say that they are ``unused``, such as side calls, are left out. ``spans`` are all spans of
    the attempt; without them, the states are empty.
    """
    following: dict[int, int] = {}
    triplets = [triplet for triplet in triplets if "unused" not in triplet.metadata]
    for position, previous in enumerate(link_calls(triplets)):
        if previous is not None:
            following.setdefault(previous, position)  # the first of several branches
    states = find_states(spans)
    times = [state.time for state in states]
    starts = {span.span_id: span.start_time or 0.0 for span in spans}
    transitions = []
    for position, triplet in enumerate(triplets):
        n_before = bisect_right(times, starts.get(triplet.metadata.get("span_id", ""), 0.0))
        transitions.append(
            Transition(
                state=states[n_before - 1].variables if n_before else {},
                observation=triplet.prompt,
                action=triplet.response,
                reward=triplet.reward,
                next_index=following.get(position),
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
