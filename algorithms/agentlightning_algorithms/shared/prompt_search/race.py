"""The engine of ``apo`` and ``gepa``: all results are kept, and each new prompt races against its parent."""

import asyncio
import logging
import statistics
from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Any, Final

from agentlightning.types import Dataset, RolloutMode
from agentlightning_algorithms.shared.prompt_search.candidate import Candidate
from agentlightning_algorithms.shared.prompt_search.results import Gain
from agentlightning_algorithms.shared.prompt_search.search import PromptSearch
from agentlightning_algorithms.shared.prompt_search.trial import TrialResult

logger = logging.getLogger("agentlightning")
_TRAIN_TASKS: Final = 8
"""Training tasks that run with the first prompt."""
_SCREENED: Final = 4
"""Failures of the parent that a new prompt tries before it is validated; also the least that a reflection reads."""
_MAX_TRAIN_TASKS: Final = 32
"""Training tasks on which failures of one prompt are looked for; 4 more after each proposal."""
_PENALTY: Final = 0.01
"""How much less a prompt is worth as a parent after each proposal, with rewards from 0 to 1."""
_MAX_IDLE_ROUNDS: Final = 30
"""Number of consecutive rounds without a rollout that end the search."""
_MAX_FAILED_ROUNDS: Final = 5
"""Number of consecutive rounds in which no proposal could be used that end the search."""


# No ``from __future__ import annotations``: the types of these settings are resolved in the subclasses' modules.
@dataclass(eq=False, repr=False)
class RacingSearch(PromptSearch):
    """A search in rounds: models read failures of good prompts and propose changes, which race against their parents.

    A change first runs on failures of its parent. If it solves none, it is dropped; otherwise it races against its
    parent on the same validation tasks, first on few, then on twice as many, until it has lost or won. A subclass says
    how many changes a round has and makes them.
    """

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Number of parents of a round, and of children of each."""

    @property
    @abstractmethod
    def n_examples(self) -> int:
        """Maximum number of rollouts that a reflection reads."""

    @abstractmethod
    async def make_child(
        self, parent: Candidate, name: str, results: Sequence[TrialResult], sample: int
    ) -> Candidate | None:
        """Makes a child that differs in the prompt ``name``; None if that failed.

        ``sample`` distinguishes the children that are made from the same rollouts.
        """

    def choose_names(self, parent: Candidate, turn: int) -> Sequence[str]:
        """The prompts that one child of ``parent`` edits, by default ``prompts_per_child`` in turn."""
        names = list(parent.prompts)
        return [names[(turn + n) % len(names)] for n in range(min(self.prompts_per_child, len(names)))]

    @property
    def first_rung(self) -> int:
        """Number of validation tasks after which a race is judged for the first time."""
        return 8

    def is_over(self, number: int, rounds_without_gain: int) -> bool:
        """Whether the search ends before round ``number``; sets ``stopped_because``."""
        return self.has_reached_target() or self.is_spent()

    def progress(self, number: int) -> float:
        """The share of the search that is done after round ``number``."""
        return 0.0 if self.max_rollouts is None else min(self.n_rollouts / self.max_rollouts, 1.0)

    async def search(self, seed: Candidate, train: Dataset[Any], val: Dataset[Any]) -> None:
        """Runs rounds until a limit is reached."""
        self._data: dict[RolloutMode, Dataset[Any]] = {"train": train, "val": val}
        self._n_proposals: Counter[str] = Counter()
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._n_raced = self.count_raced(self.max_rollouts)
        modes: tuple[RolloutMode, ...] = ("train", "val")
        for mode in modes:
            self.results.order[mode] = list(range(len(self._data[mode])))
            self.random_for("order", mode).shuffle(self.results.order[mode])
        first_train = min(_TRAIN_TASKS, len(train))
        self.require_rollouts(first_train + self._n_raced + self._child_cost)
        await self._run(0, seed, "train", self.results.order["train"][:first_train])
        if n_first := self.count_first(self.max_rollouts):
            await self._run(0, seed, "val", self.results.order["val"][:n_first])
            await self._finish_round(0, [seed], 0)
        number = idle_rounds = failed_rounds = rounds_without_gain = 0
        while not self.is_over(number + 1, rounds_without_gain):
            if self.left_for_search() < self._child_cost:
                self.stopped_because = "rollouts"
                break
            number += 1
            self.chat.start_round()
            before = self.get_best().candidate_id
            n_before = self.n_rollouts
            made, tried = await self._run_round(number)
            idle_rounds = 0 if self.n_rollouts > n_before else idle_rounds + 1
            failed_rounds = 0 if made else failed_rounds + 1
            if (self.chat.failed and not self.chat.answered) or failed_rounds >= _MAX_FAILED_ROUNDS:
                self.stopped_because = "budget" if self.is_spent() else "model_calls_failed"
                break
            if idle_rounds >= _MAX_IDLE_ROUNDS:
                self.stopped_because = "no_new_prompt"
                break
            rounds_without_gain = 0 if self.get_best().candidate_id != before else rounds_without_gain + 1
            await self._finish_round(number, self._beam(), tried)

    def count_first(self, limit: int | None) -> int:
        return self.count_raced(limit)

    def count_raced(self, limit: int | None) -> int:
        """Number of validation tasks that prompts are compared on, with ``max_rollouts = limit``."""
        return self.n_val if limit is None else min(self.n_val, max(limit // 16, 2 * self.first_rung))

    @property
    def _child_cost(self) -> int:
        """Number of rollouts before a new prompt is judged for the first time on validation tasks."""
        return _SCREENED + min(self.first_rung, self.n_val)

    async def _run_round(self, number: int) -> tuple[int, int]:
        """Makes and races the children of a round; returns the number of proposals, and of tried proposals."""
        beam, (width, branches) = self._beam(), self.shape
        for parent in beam:
            await self._collect_failures(number, parent)
        parents = [parent for parent in (beam * width)[:width] for _ in range(branches)]
        parents = parents[: int(min(len(parents), self.left_for_search() / self._child_cost))]
        known = {candidate.candidate_id: candidate for candidate in self.history}
        shown = [self._choose_examples(number, n, parent) for n, parent in enumerate(parents)]

        async def grow(n: int, parent: Candidate) -> tuple[Candidate, bool | None] | None:
            """Returns a child and, if it is new, whether it may race."""
            child = parent
            for name in self.choose_names(parent, number - 1 + n):
                child = await self.make_child(child, name, shown[n], number * 1000 + n) or child
            if child is parent:
                return None
            child = Candidate.of(child.prompts, parent, critique=child.critique)
            if child.candidate_id not in known:
                child = child.model_copy(update={"round": number})
                return child, await self._screen(number, child, parent, shown[n])
            child, may_race = known[child.candidate_id], None  # it lost before, and may have been unlucky
            if not self.results.scores(child.candidate_id):
                may_race = await self._screen(number, child, parent, shown[n])
            elif child.parent_id is not None and not self._has_won(gain := self.results.compare(child.candidate_id)):
                may_race = True if gain.n_tasks < self._n_raced else None
            return child, may_race

        growing = [asyncio.create_task(grow(n, parent)) for n, parent in enumerate(parents)]
        try:
            made = [each for each in await asyncio.gather(*growing) if each is not None]
        finally:  # after an error the other model calls and rollouts end before their client is closed
            for task in growing:
                task.cancel()
            await asyncio.gather(*growing, return_exceptions=True)
        self._n_proposals.update(parent.candidate_id for parent in parents)
        children: dict[str, Candidate] = {}
        for child, _ in made:  # in the order of parents: two parents may have made the same child
            children.setdefault(child.candidate_id, child)
        racing = {child.candidate_id for child, may_race in made if may_race}
        tried = {child.candidate_id for child, may_race in made if may_race is not None}
        new = [child for child in children.values() if child.candidate_id not in known]
        for child in new:
            self.results.add_parent(child)
        self.history += new
        await self._race(number, [child for each, child in children.items() if each in racing], known)
        for candidate in [*children.values(), *beam]:
            self._rescore(candidate)
        self._best = self.results.best(self.history)
        await self._complete_if_perfect(number)
        return len(made), len(tried)

    async def _screen(self, number: int, child: Candidate, parent: Candidate, shown: Sequence[TrialResult]) -> bool:
        """Runs a child on failures that its proposal was made from, and then on the first tasks of its race.

        Returns whether it may race: it did better on one of them.
        """
        before = self.results.of(parent.candidate_id, "train")
        indices = {each.rollout_id: index for index, each in before.items()}
        failed = [indices[each.rollout_id] for each in shown if self._is_failure(each)][:_SCREENED]
        await self._run(number, child, "train", failed or self.results.order["train"][:_SCREENED])
        after = self.results.of(child.candidate_id, "train")
        if failed and not any(after[index].score > before[index].score for index in failed):
            return False
        await self._run(number, child, "val", self.results.order["val"][: self.first_rung])
        return True

    async def _race(self, number: int, running: list[Candidate], again: Container[str]) -> None:
        """Runs children on more and more tasks, with their parents, until they have lost or won.

        Children in ``again`` have lost before and are judged after further tasks.
        """
        known = {each.candidate_id: each for each in self.history}
        while running:
            wanted, still = dict[str, int](), list[Candidate]()
            for child in sorted(running, key=self._estimate, reverse=True):
                gain = self.results.compare(child.candidate_id)
                has_ended = self._has_lost(gain) and child.candidate_id not in again
                if not has_ended and gain.n_tasks < self._n_raced and not self._has_won(gain):
                    size = min(max(2 * gain.n_tasks, self.first_rung), self._n_raced)
                    more = {
                        each: max(size, wanted.get(each, 0)) for each in (child.candidate_id, child.parent_id or "")
                    }
                    if sum(starmap(self._count_missing, (wanted | more).items())) <= self.left_for_search():
                        wanted |= more
                        still.append(child)
            running, again = still, ()
            order = self.results.order["val"]
            await asyncio.gather(
                *(self._run(number, known[each], "val", order[:size]) for each, size in wanted.items())
            )

    def _estimate(self, candidate: Candidate) -> float:
        return self.results.estimate(candidate.candidate_id)

    def _has_lost(self, gain: Gain) -> bool:
        if gain.n_tasks >= self._n_raced and (gain.mean <= 0 or not gain.is_different):
            return True
        return gain.mean < (0 if gain.n_tasks > self.first_rung else -gain.error / 2)

    def _has_won(self, gain: Gain) -> bool:
        return gain.n_tasks > self.first_rung and gain.is_different and gain.mean > 2.5 * gain.error

    def _beam(self) -> list[Candidate]:
        """The parents of the next round; a prompt that had many children gives way to others."""
        raced = [each for each in self.history if self.results.scores(each.candidate_id)] or self.history[:1]
        penalty = _PENALTY * self.results.spread

        def worth(candidate: Candidate) -> float:
            return self._estimate(candidate) - penalty * self._n_proposals[candidate.candidate_id]

        return sorted(raced, key=worth, reverse=True)[: self.shape[0]]

    async def _collect_failures(self, number: int, parent: Candidate) -> None:
        """Runs a parent on further training tasks if few of its failures are known."""
        n_proposals = self._n_proposals[parent.candidate_id]
        while True:
            found = self.results.of(parent.candidate_id, "train")
            more = self.results.missing(parent.candidate_id, "train", self.results.order["train"])[:_SCREENED]
            has_enough = sum(map(self._is_failure, found.values())) >= _SCREENED + n_proposals
            if has_enough or not more or len(found) >= _MAX_TRAIN_TASKS + _SCREENED * n_proposals:
                return
            if self.left_for_search() < self._child_cost + len(more):
                return
            await self._run(number, parent, "train", more)

    def _is_failure(self, result: TrialResult) -> bool:
        return self.perfect_score is None or result.score < max(self.perfect_score, self._highest)

    def _choose_examples(self, number: int, n: int, parent: Candidate) -> list[TrialResult]:
        """The rollouts that a reflection reads: failures of the parent, and others if these are few."""
        found = self.results.of(parent.candidate_id, "train")
        known = [found[index] for index in sorted(found)]  # whichever came first
        self.random_for("examples", number, n, parent.candidate_id).shuffle(known)
        return sorted(known, key=lambda each: not self._is_failure(each))[: self.n_examples]

    async def _run(self, number: int, candidate: Candidate, mode: RolloutMode, indices: Sequence[int]) -> None:
        """Runs a candidate on the given tasks, except the ones that it has run on."""
        async with self._locks[candidate.candidate_id]:  # two parents may have made the same child
            await self.publish_prompts(candidate)
            missing = self.results.missing(candidate.candidate_id, mode, indices)
            if missing:
                results = await self.run_trial(
                    candidate, self._data[mode], missing, mode, mode, step=number, with_messages=mode == "train"
                )
                self.results.add(candidate.candidate_id, mode, dict(zip(missing, results, strict=True)))

    def _count_missing(self, candidate_id: str, size: int) -> int:
        return len(self.results.missing(candidate_id, "val", self.results.order["val"][:size]))

    async def _complete_if_perfect(self, number: int) -> None:
        """Runs the best candidate on the rest of the validation tasks if it may end the search."""
        best = self.get_best()
        scores = self.results.scores(best.candidate_id).values()
        goals = [goal for goal in (self.target_score, self.perfect_score) if goal is not None]
        is_promising = scores and goals and statistics.fmean(scores) >= min(goals)
        if is_promising and self._count_missing(best.candidate_id, self._n_raced) <= self.left_for_search():
            await self._run(number, best, "val", self.results.order["val"][: self._n_raced])
            self._rescore(best)

    def _rescore(self, candidate: Candidate) -> Candidate:
        """Updates the scores of a candidate from all of its validation results."""
        scores = self.results.scores(candidate.candidate_id)
        mean = statistics.fmean(scores.values()) if scores else None
        is_whole = len(scores) == self._n_raced
        return self.update(
            candidate,
            batch_score=mean,
            full_score=mean if is_whole else None,
            task_scores=tuple(scores[index] for index in sorted(scores)) if is_whole else (),
        )

    async def _finish_round(self, number: int, beam: Sequence[Candidate], n_children: int) -> None:
        """Publishes the candidates and adds the metrics of a round."""
        for candidate in beam:
            self._rescore(candidate)
        await self.publish()
        scores = [self._estimate(candidate) for candidate in beam]
        values = {
            **self.metrics(),
            "beam_score_max": max(scores),
            "beam_score_mean": statistics.fmean(scores),
            "children": float(n_children),
            "failed_model_calls": float(len(self.chat.failed)),
            "progress": self.progress(number),
        }
        await self.get_store().add_metrics(number, values)
        rollouts = f"{self.n_rollouts}" + (f" of {self.max_rollouts}" if self.max_rollouts else "")
        best = self.get_best().score
        logger.info("round %d: %d prompts tried, %s rollouts, best score %s", number, n_children, rollouts, best)
