"""Confirms on fresh rollouts that the best prompt of a search is better than the first."""

from __future__ import annotations

import asyncio
import logging
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from agentlightning.types import Dataset
from agentlightning_plugins.statistics.significance import paired_p_value

if TYPE_CHECKING:
    from agentlightning_algorithms.prompt_search.search import PromptSearch

logger = logging.getLogger("agentlightning")

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


async def confirm(search: PromptSearch, val: Dataset[Any]) -> bool:
    """Runs the first and the best prompt on the same validation tasks again, and sets ``search.confirmation``.

    The highest of many scores is too high on average even if all prompts are equal (the winner's curse; Andrews,
    Kitagawa and McCloskey 2024, Inference on winners, QJE 139). Fresh rollouts had no part in the selection. The pairs
    are compared by a permutation test that flips signs, which is exact if both prompts are equally good on each task.

    Returns:
        Whether the best prompt may be published: it is better on fresh rollouts, it is the first, or no pairs are set.
    """
    first, best = search.history[0], search.get_best()
    n_pairs = search.count_confirmations(len(val))
    if best.candidate_id == first.candidate_id or not n_pairs:
        return True
    order = list(range(len(val)))
    search.random_for("confirm").shuffle(order)
    batches = [order[: n_pairs - start] for start in range(0, n_pairs, len(order))]

    async def score(candidate: Any) -> Sequence[float]:
        trials = [
            search.run_trial(candidate, val, batch, "val", "confirm", number) for number, batch in enumerate(batches)
        ]
        return [result.score for results in await asyncio.gather(*trials) for result in results]

    before, after = await asyncio.gather(score(first), score(best))
    p_value = paired_p_value([new - old for new, old in zip(after, before, strict=True)]) / 2
    found = Confirmation(statistics.fmean(before), statistics.fmean(after), p_value, n_pairs)
    logger.info(
        "fresh rollouts: %.3f -> %.3f in %d pairs, p = %.2g (the search found %s -> %s); %s",
        found.first,
        found.best,
        n_pairs,
        p_value,
        first.score,
        best.score,
        "the best prompt is published" if found.is_better else "no evidence of a gain, so the first prompt stays",
    )
    numbers = {"confirmed_first": found.first, "confirmed_best": found.best, "confirmed_p": p_value}
    metrics = (await search.get_store().query_metrics()).items
    await search.get_store().add_metrics(metrics[-1].step if metrics else 0, numbers)
    search.confirmation = found
    return found.is_better
