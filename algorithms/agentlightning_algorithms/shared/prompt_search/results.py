"""All results of a search, and what they say about each prompt."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from agentlightning.types import RolloutMode
from agentlightning_algorithms.shared.prompt_search.candidate import Candidate
from agentlightning_algorithms.shared.prompt_search.trial import TrialResult
from agentlightning_plugins.shared.statistics.interval import variance

_PRIOR_VARIANCE: Final = 0.01
"""Variance of the gains of new prompts before they are tried, with rewards from 0 to 1."""


class Gain(NamedTuple):
    """The lead of a prompt over its parent on the validation tasks that both ran on."""

    n_tasks: int
    mean: float
    error: float
    """Standard error of the mean."""
    is_different: bool
    """Whether any task earned another reward."""


class ResultPool:
    """The results of each candidate by task, and estimates of the candidates from all of them."""

    def __init__(self) -> None:
        self.order: dict[RolloutMode, list[int]] = {"train": [], "val": []}
        """The order in which the tasks of each dataset are run."""
        self.lowest, self.highest = math.inf, -math.inf
        self._results: defaultdict[tuple[str, RolloutMode], dict[int, TrialResult]] = defaultdict(dict)
        self._parents: dict[str, str | None] = {}
        self._estimates: dict[str, float] = {}

    def add(self, candidate_id: str, mode: RolloutMode, results: Mapping[int, TrialResult]) -> None:
        """Adds results of a candidate by task."""
        self._results[candidate_id, mode].update(results)
        scores = [result.score for result in results.values()]
        self.lowest, self.highest = min([self.lowest, *scores]), max([self.highest, *scores])
        self._estimates.clear()

    def add_parent(self, candidate: Candidate) -> None:
        """Adds the lineage of a candidate; it is estimated by its first parent."""
        self._parents.setdefault(candidate.candidate_id, candidate.parent_id)

    def of(self, candidate_id: str, mode: RolloutMode) -> Mapping[int, TrialResult]:
        """The results of a candidate by task."""
        return self._results[candidate_id, mode]

    def scores(self, candidate_id: str) -> dict[int, float]:
        """The scores of a candidate by validation task."""
        return {index: result.score for index, result in self._results[candidate_id, "val"].items()}

    def missing(self, candidate_id: str, mode: RolloutMode, indices: Iterable[int]) -> list[int]:
        """The tasks among ``indices`` that a candidate has not run on."""
        return [index for index in indices if index not in self._results[candidate_id, mode]]

    @property
    def spread(self) -> float:
        """The highest minus the lowest score."""
        spread = self.highest - self.lowest
        return spread if 0 < spread < math.inf else 1.0

    def estimate(self, candidate_id: str) -> float:
        """The mean reward to expect of a candidate; 0 if it has no validation result.

        It is the estimate of an ancestor plus the measured gain, which counts less the less certain it is. The ancestor
        is the nearest one that ran on the same tasks, else the first prompt.
        """
        scores = self.scores(candidate_id)
        if not scores:
            return 0.0
        if candidate_id not in self._estimates:
            found, reference, prior = statistics.fmean(scores.values()), self._parents[candidate_id], 0.0
            while reference is not None:
                prior += _PRIOR_VARIANCE * self.spread**2
                further = self._parents[reference]
                if further is None or not self.missing(reference, "val", scores):
                    gain = self.compare(candidate_id, reference)
                    found = self.estimate(reference) + gain.mean * prior / (prior + gain.error**2)
                    break
                reference = further
            self._estimates[candidate_id] = found
        return self._estimates[candidate_id]

    def compare(self, candidate_id: str, ancestor_id: str | None = None) -> Gain:
        """How much better a candidate is than an ancestor, by default its parent.

        An ancestor was chosen because its results were good, which makes them too high on average. Its estimate is not,
        so the gain is corrected by that difference.
        """
        ancestor_id = ancestor_id or self._parents[candidate_id] or candidate_id
        before, after = self.scores(ancestor_id), self.scores(candidate_id)
        pairs = [(before[index], score) for index, score in after.items() if index in before]
        if not pairs:
            return Gain(0, 0.0, math.inf, True)
        n, differences = len(pairs), [new - old for old, new in pairs]
        if n == 1:
            return Gain(1, differences[0], self.spread, any(differences))
        luck = statistics.fmean(before.values()) - self.estimate(ancestor_id)
        return Gain(n, statistics.fmean(differences) + luck, math.sqrt(variance(differences) / n), any(differences))

    def best(self, candidates: Sequence[Candidate]) -> Candidate:
        """The candidate with the highest estimate, the first one if none has a result."""
        tried = [each for each in candidates if self.scores(each.candidate_id)]
        return max(tried or candidates[:1], key=lambda each: self.estimate(each.candidate_id))
