"""Trajectories: consecutive model calls joined into one sequence of tokens, where the tokens allow it.

When the prompt of a call begins with exactly the prompt and the response of an earlier one, both are one sequence, and
training on it costs one pass where two calls cost two. Tokens are never rewritten: where a conversation goes on but its
tokens do not, a new trajectory begins, and the reason is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from agentlightning.adapter.adapter import TraceAdapter
from agentlightning.adapter.triplet import TraceToTriplet
from agentlightning.types import Span, Triplet
from agentlightning_plugins.chat_history.linking import link_calls
from agentlightning_plugins.trajectories.mismatch import Mismatch, MismatchKind, explain_edit, explain_mismatch

LeftOut: TypeAlias = Literal["no_tokens", "no_logprobs"]
Decode: TypeAlias = Callable[[Sequence[int]], str]
"""The text of tokens, special ones included."""

_CHUNK = 16
"""Tokens that are hashed at a time."""


class Turn(NamedTuple):
    """One model call in its trajectory."""

    triplet: Triplet
    start: int
    """``ids[start:end]`` are its response."""
    end: int


@dataclass(slots=True)
class Trajectory:
    """One sequence of tokens; ``ids``, ``mask`` and ``logprobs`` have the same length."""

    ids: list[int] = field(default_factory=list)
    """The first prompt, and from there on responses and what the agent put between them."""
    mask: list[int] = field(default_factory=list)
    """1 where the model sampled the token, 0 where it was given."""
    logprobs: list[float] = field(default_factory=list)
    """Of the sampled tokens, as the model server told; 0.0 elsewhere."""
    turns: list[Turn] = field(default_factory=list)
    """The calls, in order; ``turn.triplet.reward`` is what each is worth."""

    @property
    def prompt_length(self) -> int:
        """How many tokens come before the first response."""
        return self.turns[0].start if self.turns else 0

    def extend(self, triplet: Triplet) -> None:
        """Adds a call whose prompt begins with ``ids``."""
        given = triplet.prompt["token_ids"][len(self.ids) :]
        response = triplet.response["token_ids"]
        self.ids += given
        start = len(self.ids)
        self.ids += response
        self.mask += [0] * len(given) + [1] * len(response)
        self.logprobs += [0.0] * len(given)
        self.logprobs += triplet.response["logprobs"]
        self.turns.append(Turn(triplet, start, len(self.ids)))


@dataclass(frozen=True, slots=True)
class Trajectories:
    """What the calls of one attempt became."""

    trajectories: list[Trajectory]
    """In the order of their first calls."""
    mismatches: list[Mismatch]
    """Calls that go on with a conversation but not with its tokens."""
    left_out: Mapping[LeftOut, int]
    """Calls that cannot be trained on, by what they lack."""

    @property
    def counts(self) -> dict[MismatchKind, int]:
        """How many mismatches there are of each kind; every kind is there."""
        counts = Counter(mismatch.kind for mismatch in self.mismatches)
        return {"template": counts["template"], "retokenisation": counts["retokenisation"], "other": counts["other"]}


class TraceToTrajectories(TraceAdapter[Trajectories]):
    """Joins the calls of an attempt into trajectories."""

    def __init__(self, source: TraceToTriplet | dict[str, Any] | None = None) -> None:
        """Makes the adapter.

        Args:
            source: makes the triplets; its settings will do.
        """
        self.source = TraceToTriplet(**source) if isinstance(source, dict) else source or TraceToTriplet()

    def adapt(self, source: Sequence[Span], /) -> Trajectories:
        """Makes the trajectories of one attempt.

        Raises:
            AdapterError: as ``TraceToTriplet.adapt``.
        """
        return build_trajectories(self.source.adapt(source))


def build_trajectories(triplets: Sequence[Triplet], *, decode: Decode | None = None) -> Trajectories:
    """Joins the triplets of one attempt, in time linear in their tokens.

    A call goes on with the longest trajectory that its prompt begins with. Of calls that go on from the same point,
    the first takes it, and the others begin trajectories of their own.

    Args:
        triplets: in the order of their calls.
        decode: tells apart the kinds of mismatches by text, exactly; without it they are told by how tokens differ.
    """
    index = _Index()
    trajectories: list[Trajectory] = []
    of_triplet: dict[int, Trajectory] = {}
    mismatches: list[Mismatch] = []
    left_out: Counter[LeftOut] = Counter()
    openings: dict[tuple[Any, str], int] = {}
    for position, (triplet, previous) in enumerate(zip(triplets, link_calls(triplets), strict=True)):
        lacking = _find_lack(triplet)
        if lacking is not None:
            left_out[lacking] += 1
            continue
        trajectory = index.take(triplet.prompt["token_ids"])
        if trajectory is None:
            if previous in of_triplet:
                mismatches.append(explain_mismatch(triplets[previous], triplet, decode))
            elif previous is None:
                mismatches += explain_edit(position, triplets, openings)
            trajectory = Trajectory()
            trajectories.append(trajectory)
        trajectory.extend(triplet)
        of_triplet[position] = trajectory
        index.add(trajectory)
    return Trajectories(trajectories, mismatches, dict(left_out))


def _find_lack(triplet: Triplet) -> LeftOut | None:
    prompt, response = triplet.prompt, triplet.response
    if not prompt.get("token_ids") or not response.get("token_ids"):
        return "no_tokens"
    logprobs = response.get("logprobs")
    return "no_logprobs" if logprobs is None or len(logprobs) != len(response["token_ids"]) else None


class _Index:
    """Open trajectories by what they begin with, so that a prompt is compared with those only that it may continue.

    A sequence is known by the hash of its whole chunks and by the tokens after them; a prompt meets every sequence that
    it can begin with at one of its own chunks. What hashes promise is then compared.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[int, int], dict[tuple[int, ...], list[Trajectory]]] = {}

    def add(self, trajectory: Trajectory) -> None:
        """Opens a trajectory for what comes after it."""
        ids = trajectory.ids
        key = _chunk_keys(ids)[-1]
        self._open.setdefault(key, {}).setdefault(tuple(ids[key[0] * _CHUNK :]), []).append(trajectory)

    def take(self, prompt: Sequence[int]) -> Trajectory | None:
        """Takes out the longest trajectory that a prompt begins with, of several the latest."""
        for key in reversed(_chunk_keys(prompt)):
            by_tail = self._open.get(key)
            if not by_tail:
                continue
            start = key[0] * _CHUNK
            for end in range(min(start + _CHUNK - 1, len(prompt)), start - 1, -1):
                same = by_tail.get(tuple(prompt[start:end]))
                if same and list(prompt[:end]) == same[-1].ids:
                    return same.pop()
        return None


def _chunk_keys(ids: Sequence[int]) -> list[tuple[int, int]]:
    """(how many whole chunks, their hash), from none to all."""
    key = 0
    keys = [(0, key)]
    for number in range(1, len(ids) // _CHUNK + 1):
        key = hash((key, *ids[(number - 1) * _CHUNK : number * _CHUNK]))
        keys.append((number, key))
    return keys
