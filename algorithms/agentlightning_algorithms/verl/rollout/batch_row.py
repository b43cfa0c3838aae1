"""From the model calls of one rollout to the rows that verl trains on.

A row is a prompt, a response, and a mask that is 1 on the tokens that the model sampled. A rollout gives one row per
call, or, where a call's prompt goes on with exactly the tokens before it, one per chain of calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from agentlightning.types import Triplet
from agentlightning_plugins.trajectories.trajectory import build_trajectories

RowKind: TypeAlias = Literal["transition", "trajectory"]


@dataclass
class Row:
    """One sequence of tokens; ``response_ids``, ``mask`` and ``logprobs`` have the same length."""

    prompt_ids: list[int]
    response_ids: list[int]
    mask: list[int]
    logprobs: list[float]
    versions: list[int] = field(default_factory=list)
    """Of the weights that each call was sampled from."""
    rewards: list[float | None] = field(default_factory=list)
    """What the agent said of each call itself; for people, verl trains on the rollout's."""


@dataclass
class Rows:
    """What a rollout became."""

    rows: list[Row]
    calls: int
    dropped: Counter[str]
    """Calls and rows that cannot be trained on, by reason; a row that was cut to fit counts as ``response_cut``."""
    mismatches: Counter[str]
    """Calls that go on with a conversation but not with its tokens, by kind."""


def build_rows(triplets: Sequence[Triplet], *, kind: RowKind, max_prompt: int, max_response: int) -> Rows:
    """Makes the rows of one rollout.

    Args:
        triplets: in the order of their calls.
        kind: ``transition`` for one row per call, ``trajectory`` to join calls where the tokens allow it.
        max_prompt: tokens before the first response; a longer row is dropped.
        max_response: with ``max_prompt`` the most tokens of a whole row; a longer one is cut at the end.
    """
    dropped: Counter[str] = Counter()
    mismatches: Counter[str] = Counter()
    rows = []
    if kind == "trajectory":
        built = build_trajectories(triplets)
        dropped.update(built.left_out)
        mismatches.update({name: count for name, count in built.counts.items() if count})
        trajectories = built.trajectories
    else:
        trajectories = []
        for triplet in triplets:
            alone = build_trajectories([triplet])
            dropped.update(alone.left_out)
            trajectories += alone.trajectories
    for trajectory in trajectories:
        start = trajectory.prompt_length
        calls = [turn.triplet for turn in trajectory.turns]
        row = Row(
            trajectory.ids[:start],
            trajectory.ids[start:],
            trajectory.mask[start:],
            trajectory.logprobs[start:],
            [int(v) for call in calls if (v := call.metadata.get("weight_version")) is not None],
            [call.reward for call in calls],
        )
        if len(row.prompt_ids) > max_prompt:
            dropped["prompt_too_long"] += 1
            continue
        if cut_row(row, max_prompt + max_response - start):
            dropped["response_cut"] += 1
        rows.append(row)
    return Rows(rows, len(triplets), dropped, mismatches)


def cut_row(row: Row, max_response: int) -> bool:
    """Cuts a response to its first ``max_response`` tokens, and what then ends in no sampled token; whether it did."""
    if len(row.response_ids) <= max_response:
        return False
    end = max_response
    while end > 0 and not row.mask[end - 1]:
        end -= 1
    del row.response_ids[end:], row.mask[end:], row.logprobs[end:]
    return True


def placeholder_row(token_id: int) -> Row:
    """The row of a rollout with nothing to train on, which still counts in its group: no token is the model's."""
    return Row([token_id], [token_id], [0], [0.0])


def weight_range(rows: Sequence[Row], fallback: int) -> tuple[int, int]:
    """The oldest and the newest weights that a rollout was sampled from."""
    versions = [version for row in rows for version in row.versions] or [fallback]
    return min(versions), max(versions)


def drift(rows: Sequence[Row], current: int) -> float:
    """How many versions behind ``current`` the calls were, on average."""
    versions = [version for row in rows for version in row.versions]
    return sum(current - version for version in versions) / len(versions) if versions else 0.0


def row_to_fields(row: Row) -> dict[str, Any]:
    """The arguments of verl's ``AgentLoopOutput`` that a row determines."""
    return {
        "prompt_ids": row.prompt_ids,
        "response_ids": row.response_ids,
        "response_mask": row.mask,
        "response_logprobs": row.logprobs,
    }
