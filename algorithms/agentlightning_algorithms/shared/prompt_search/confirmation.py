"""Compares the first and the best prompt of a search on fresh rollouts."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from agentlightning_algorithms.shared.prompt_search.candidate import Candidate
from agentlightning_plugins.shared.statistics.significance import paired_p_value

LEVEL: Final = 0.05


@dataclass(frozen=True)
class Confirmation:
    """Mean rewards of the first and the best prompt, on rollouts that selected neither."""

    first: float
    best: float
    p_value: float
    """One-sided p-value of the hypothesis that the best prompt is not better on these tasks."""
    pairs: int

    @property
    def is_better(self) -> bool:
        """Whether the best prompt may replace the first."""
        return self.best > self.first and self.p_value <= LEVEL


async def confirm(
    first: Candidate,
    best: Candidate,
    tasks: Sequence[int],
    n_pairs: int,
    score: Callable[[Candidate, Sequence[int], int], Awaitable[Sequence[float]]],
) -> Confirmation:
    """Runs two prompts on the same tasks again, ``n_pairs`` times in all.

    The highest of many scores is too high on average even if all prompts are equal (the winner's curse; Andrews,
    Kitagawa and McCloskey 2024, Inference on winners, QJE 139). Fresh rollouts had no part in the selection. The pairs
    are compared by a permutation test that flips signs, which is exact if both prompts are equally good on each task.

    Args:
        first: the first prompt of the search.
        best: the prompt with the highest score.
        tasks: indices of the tasks, in random order.
        n_pairs: number of rollouts of each prompt.
        score: runs a prompt on some of the tasks and returns their rewards; the last argument numbers the batches.
    """
    batches = [tasks[: n_pairs - start] for start in range(0, n_pairs, len(tasks))]

    async def score_all(candidate: Candidate) -> list[float]:
        found = await asyncio.gather(*(score(candidate, batch, number) for number, batch in enumerate(batches)))
        return [reward for rewards in found for reward in rewards]

    before, after = await asyncio.gather(score_all(first), score_all(best))
    p_value = paired_p_value([new - old for new, old in zip(after, before, strict=True)]) / 2
    return Confirmation(statistics.fmean(before), statistics.fmean(after), p_value, n_pairs)
