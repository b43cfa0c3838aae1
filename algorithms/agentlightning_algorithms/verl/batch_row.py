"""Converts the model calls of a rollout into rows of verl's training batch.

A row is a prompt, a response, and a mask that is 1 on the tokens that the model sampled. A rollout gives one row per
call or, where a call's prompt continues exactly the tokens and images before it, one row per chain of calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

from agentlightning.types import Triplet
from agentlightning_algorithms.shared.advantage import Estimator, read_credit
from agentlightning_plugins.shared.training_records.record import Outcome, call_keys, explain_unused, read_version
from agentlightning_plugins.shared.trajectories import Mismatch, Trajectory, build_trajectories

if TYPE_CHECKING:
    from PIL.Image import Image

RowKind: TypeAlias = Literal["transitions", "trajectories"]
CREDIT_ESTIMATORS: Final[Mapping[str, Estimator]] = {
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "opo": "opo",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
}
"""verl's estimators that also exist for single calls, with our estimator for each."""
REMAX: Final = "remax_without_baseline"
"""Takes the place of verl's ``remax``, because verl's V1 trainer passes no baselines to its estimators."""


class CallCredit(NamedTuple):
    """The credit of one call of a row."""

    start: int
    """``response_ids[start:end]`` are its tokens."""
    end: int
    value: float
    turn: str | int | None


class RowCall(NamedTuple):
    """One call of a row."""

    name: str
    """The call's response id, or its position among the calls of the rollout."""
    start: int
    """``response_ids[start:end]`` are its tokens."""
    end: int
    weight_version: int | None


@dataclass
class BatchRow:
    """One sequence of tokens; response, mask and logprobs have the same length."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float]
    calls: list[RowCall] = field(default_factory=list)
    """The calls of which the row has tokens."""
    credit: list[CallCredit] = field(default_factory=list)
    """Credit of each call, if the adapter has a credit rule; otherwise calls get the advantage of their rollout."""
    image_urls: list[str] = field(default_factory=list)
    """URLs of the row's images, in the order of their tokens."""
    images: list[Image] = field(default_factory=list)
    """The images of ``image_urls``, once ``ImageLoader`` has loaded them."""


@dataclass
class BuiltRows:
    """The rows of one rollout."""

    rows: list[BatchRow] = field(default_factory=list)
    calls: int = 0
    left_out: dict[str, Outcome] = field(default_factory=dict)
    """Reason for each call that is in no row, by the call's name."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Calls and rows that cannot be trained on, by reason; a row that was cut to fit counts as ``response_cut``."""
    mismatches: list[Mismatch] = field(default_factory=list)
    """Calls that continue a conversation but not its tokens."""

    def drop(self, row: BatchRow, reason: str, outcome: Outcome) -> None:
        """Removes a row; its calls get the outcome."""
        self.rows = [other for other in self.rows if other is not row]
        self.dropped[reason] += 1
        self.left_out.update((call.name, outcome) for call in row.calls)


def build_rows(
    triplets: Sequence[Triplet],
    *,
    kind: RowKind,
    max_prompt: int,
    max_response: int,
    reward: float | None = None,
    failed_reward: float = 0.0,
) -> BuiltRows:
    """Makes the rows of one rollout from its triplets and its reward, in the order of the calls.

    A row with more than ``max_prompt`` tokens before the first response is dropped. A row with more than ``max_prompt +
    max_response`` tokens in total is cut at the end, or dropped if it has images.
    """
    names = {id(triplet): name for triplet, name in zip(triplets, call_keys(triplets), strict=True)}
    built = BuiltRows(calls=len(triplets), left_out={names[id(each)]: explain_unused(each) for each in triplets})
    for part in [triplets] if kind == "trajectories" else [[triplet] for triplet in triplets]:
        found = build_trajectories(part)
        built.dropped.update(found.left_out)
        if kind == "trajectories":
            built.mismatches += found.mismatches
        for trajectory in _split_where_images_change(found.trajectories):
            start = trajectory.prompt_length
            calls = [turn.triplet for turn in trajectory.turns]
            built.left_out.update((names[id(call)], "too_long") for call in calls)
            if start > max_prompt:
                built.dropped["prompt_too_long"] += 1
                continue
            row = BatchRow(
                trajectory.ids[:start],
                trajectory.ids[start:],
                trajectory.mask[start:],
                trajectory.logprobs[start:],
                [
                    RowCall(names[id(turn.triplet)], turn.start - start, turn.end - start, read_version(turn.triplet))
                    for turn in trajectory.turns
                ],
                [
                    CallCredit(turn.start - start, turn.end - start, *read_credit(turn.triplet, reward, failed_reward))
                    for turn in trajectory.turns
                    if "credit" in turn.triplet.metadata
                ],
                _image_urls(calls[-1]),
            )
            if row.image_urls and len(trajectory.ids) > max_prompt + max_response:
                built.dropped["image_row_too_long"] += 1  # a cut could separate an image from its tokens
                continue
            if cut_row(row, max_prompt + max_response - start):
                built.dropped["response_cut"] += 1
            for row_call in row.calls:
                built.left_out.pop(row_call.name, None)
            built.rows.append(row)
    return built


def _split_where_images_change(trajectories: Sequence[Trajectory]) -> Iterator[Trajectory]:
    """Splits trajectories whose calls continue the tokens but not the images before them.

    Images of one size have the same tokens, so only this comparison finds a new screenshot in place of an old one.
    """
    for trajectory in trajectories:
        images = [_image_urls(turn.triplet) for turn in trajectory.turns]
        if all(after[: len(before)] == before for before, after in pairwise(images)):
            yield trajectory
        else:
            for turn in trajectory.turns:
                yield from build_trajectories([turn.triplet]).trajectories


def _image_urls(call: Triplet) -> list[str]:
    return list(call.prompt.get("image_urls") or ())


def cut_row(row: BatchRow, max_response: int) -> bool:
    """Cuts a response of more than ``max_response`` tokens after a sampled token; returns whether it was cut."""
    if len(row.response_ids) <= max_response:
        return False
    end = max_response
    while end > 0 and not row.response_mask[end - 1]:
        end -= 1
    del row.response_ids[end:], row.response_mask[end:], row.response_logprobs[end:]
    row.calls = [call._replace(end=min(call.end, end)) for call in row.calls if call.start < end]
    return True


def placeholder_row(token_id: int = 0) -> BatchRow:
    """Returns a row whose mask is 0, for a rollout that has nothing to train on and still counts in its group."""
    return BatchRow([token_id], [token_id], [0], [0.0])


def weight_range(rows: Sequence[BatchRow], fallback: int) -> tuple[int, int]:
    """Returns the oldest and the newest version of the weights that sampled a rollout."""
    versions = [call.weight_version for row in rows for call in row.calls if call.weight_version is not None]
    return min(versions, default=fallback), max(versions, default=fallback)
