"""Converts the model calls of a rollout into rows of verl's training batch.

A row is a prompt, a response, and a mask that is 1 on the tokens that the model sampled. A rollout gives one row per
call or, where a call's prompt continues exactly the tokens before it, one row per chain of calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, TypeAlias

from agentlightning.types import Triplet
from agentlightning_algorithms.advantage import Estimator, read_credit
from agentlightning_plugins.trajectories.trajectory import build_trajectories

RowKind: TypeAlias = Literal["transition", "trajectory"]
CREDIT_ESTIMATORS: Final[Mapping[str, Estimator]] = {
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "opo": "opo",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
}
"""verl's estimators that have a form for single calls, and ours for each."""


class CallCredit(NamedTuple):
    """The credit of one call of a row; see :mod:`~agentlightning_algorithms.advantage`."""

    start: int
    """``response_ids[start:end]`` are its tokens."""
    end: int
    value: float
    turn: str | int | None


@dataclass
class BatchRow:
    """One sequence of tokens; response, mask and logprobs have the same length."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float]
    weight_versions: list[int] = field(default_factory=list)
    """Of the weights that sampled each call."""
    rewards: list[float | None] = field(default_factory=list)
    """Rewards of each call: assigned by the adapter's credit rule, or else emitted by the agent."""
    credit: list[CallCredit] = field(default_factory=list)
    """Of each call, where the adapter has a credit rule; empty: the calls get the advantage of their rollout."""


@dataclass
class BuiltRows:
    """The rows of one rollout."""

    rows: list[BatchRow] = field(default_factory=list)
    calls: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """Calls and rows that cannot be trained on, by reason; a row that was cut to fit counts as ``response_cut``."""
    mismatches: Counter[str] = field(default_factory=Counter)
    """Calls that continue a conversation but not its tokens, by kind."""


def build_rows(
    triplets: Sequence[Triplet],
    *,
    kind: RowKind,
    max_prompt: int,
    max_response: int,
    reward: float | None = None,
    failed_reward: float = 0.0,
) -> BuiltRows:
    """Makes the rows of one rollout with this reward from its triplets, in the order of their calls.

    A row with more than ``max_prompt`` tokens before the first response is dropped; one with more than ``max_prompt +
    max_response`` tokens is cut at the end.
    """
    built = BuiltRows(calls=len(triplets))
    for part in [triplets] if kind == "trajectory" else [[triplet] for triplet in triplets]:
        found = build_trajectories(part)
        built.dropped.update(found.left_out)
        if kind == "trajectory":
            built.mismatches.update(mismatch.kind for mismatch in found.mismatches)
        for trajectory in found.trajectories:
            start = trajectory.prompt_length
            if start > max_prompt:
                built.dropped["prompt_too_long"] += 1
                continue
            calls = [turn.triplet for turn in trajectory.turns]
            row = BatchRow(
                trajectory.ids[:start],
                trajectory.ids[start:],
                trajectory.mask[start:],
                trajectory.logprobs[start:],
                [int(v) for call in calls if (v := call.metadata.get("weight_version")) is not None],
                [call.reward for call in calls],
                [
                    CallCredit(turn.start - start, turn.end - start, *read_credit(turn.triplet, reward, failed_reward))
                    for turn in trajectory.turns
                    if "credit" in turn.triplet.metadata
                ],
            )
            if cut_row(row, max_prompt + max_response - start):
                built.dropped["response_cut"] += 1
            built.rows.append(row)
    return built


def cut_row(row: BatchRow, max_response: int) -> bool:
    """Cuts a response so that it ends with a sampled token; False when it has at most ``max_response`` tokens."""
    if len(row.response_ids) <= max_response:
        return False
    end = max_response
    while end > 0 and not row.response_mask[end - 1]:
        end -= 1
    del row.response_ids[end:], row.response_mask[end:], row.response_logprobs[end:]
    return True


def placeholder_row(token_id: int = 0) -> BatchRow:
    """The row of a rollout with nothing to train on, which still counts in its group: its mask is 0."""
    return BatchRow([token_id], [token_id], [0], [0.0])


def weight_range(rows: Sequence[BatchRow], fallback: int) -> tuple[int, int]:
    """The oldest and the newest weights that a rollout was sampled from."""
    versions = [version for row in rows for version in row.weight_versions] or [fallback]
    return min(versions), max(versions)


def drift(rows: Sequence[BatchRow], current: int) -> float:
    """Mean number of versions that the weights of the calls were behind ``current``."""
    versions = [version for row in rows for version in row.weight_versions]
    return sum(current - version for version in versions) / len(versions) if versions else 0.0
