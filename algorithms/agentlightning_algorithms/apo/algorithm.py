"""``apo``: automatic prompt optimisation by textual gradients and beam search.

Pryzant et al. 2023, Automatic Prompt Optimization with "Gradient Descent" and Beam Search, arXiv:2305.03495. A
"gradient" is a critique of the prompt that a model writes from rollouts, a "step" an edit that follows the critique.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from agentlightning.errors import LightningError
from agentlightning.plugin.settings import require_least
from agentlightning.resources import PromptTemplate
from agentlightning.types import Dataset, RolloutMode
from agentlightning_algorithms.shared.live_resources import LiveExperience
from agentlightning_algorithms.shared.prompt_search.candidate import (
    Candidate,
    choose_prompts,
    show_placeholders,
    show_text,
)
from agentlightning_algorithms.shared.prompt_search.chat import find_critic
from agentlightning_algorithms.shared.prompt_search.critique import (
    EDIT_PROMPTS,
    GRADIENT_PROMPTS,
    Templates,
    read_templates,
    show_rollouts,
)
from agentlightning_algorithms.shared.prompt_search.search import PromptSearch
from agentlightning_algorithms.shared.prompt_search.trial import TrialResult, call_place, mean_score, read_trial_result

logger = logging.getLogger("agentlightning")
_ROUNDS: Final = 5
"""Rounds of a search without a limit."""


@dataclass(eq=False, repr=False, kw_only=True)
class APO(PromptSearch):
    """Improves prompts: a critic reads rollouts, an editor rewrites the prompt, the best candidates survive.

    Each round takes ``beam_width`` parents from the beam and makes ``branch_factor`` children of each. Parents and
    children are compared on one validation batch. The best ``beam_width`` of them form the next beam, and the first of
    these is run on the whole validation set. The best prompt found there is published as the run's latest resource.

    Raises:
        ConfigError: a value is out of range, or ``max_cost`` is set without the prices of critic and editor.
    """

    gradient_model: str | None = None
    """The critic. None: the model that ``AGL_CRITIC_MODEL``, else ``OPENAI_MODEL``, names."""
    apply_edit_model: str | None = None
    """The editor. None: the critic."""
    diversity_temperature: float = 1.0
    """Sampling temperature of the critic and of the editor."""
    gradient_batch_size: int = 4
    """Number of rollouts that the critic reads for one critique."""
    val_batch_size: int = 16
    """Number of validation tasks on which the candidates of a round are compared."""
    beam_width: int = 2
    """Number of candidates that survive a round, and of parents in the next round."""
    branch_factor: int = 2
    """Number of children of each parent."""
    beam_rounds: int | None = None
    """Maximum number of rounds. None: as many as ``max_rollouts`` allows, or 5 without that limit."""
    run_initial_validation: bool = True
    """Whether the seed is run on the whole validation set first."""
    patience: int | None = None
    """Number of consecutive rounds without a better prompt after which the search stops; None: no limit."""
    gradient_prompts: Templates = None
    """The critic's prompts, with ``{name}``, ``{prompt}``, ``{other_prompts}`` and ``{rollouts}``; a call draws one."""
    edit_prompts: Templates = None
    """The editor's prompts, with ``{name}``, ``{prompt}``, ``{critique}`` and ``{placeholders}``."""

    def __post_init__(self) -> None:
        names = ("gradient_batch_size", "val_batch_size", "beam_width", "branch_factor", "beam_rounds", "patience")
        require_least(1, **{name: getattr(self, name) for name in names})
        super().__post_init__()
        self._gradient_templates = read_templates("gradient_prompts", self.gradient_prompts, GRADIENT_PROMPTS)
        self._edit_templates = read_templates("edit_prompts", self.edit_prompts, EDIT_PROMPTS)

    @property
    def models(self) -> Sequence[str]:
        """Critic and editor; raises ConfigError if nothing names the critic."""
        critic = find_critic("gradient_model", self.gradient_model)
        return critic, self.apply_edit_model or critic

    async def search(self, seed: Candidate, train: Dataset[Any], val: Dataset[Any]) -> None:
        """Runs the rounds."""
        first_round = self._count_round(len(val), len(train))
        self.require_rollouts(first_round + (len(val) if self.run_initial_validation else 0))
        if self.run_initial_validation:
            seed = await self._validate(0, seed, val)
            await self._finish_round(0, [seed], 0)
        beam, rounds_without_gain = [seed], 0
        for number in itertools.count(1):
            if number > self.max_rounds or self.has_reached_target() or self.is_spent():
                break
            if self.left_for_search() < self._count_round(len(val), len(train)):
                self.stopped_because = "rollouts"
                break
            self.chat.start_round()
            beam, n_children = await self._expand(number, beam, train, val)
            if self.chat.failed and not self.chat.answered:
                self.stopped_because = "model_calls_failed"
                break
            beam[0] = await self._validate(number, beam[0], val)
            rounds_without_gain = 0 if self.take_if_better(beam[0]) else rounds_without_gain + 1
            await self._finish_round(number, beam, n_children)
            if self.patience is not None and rounds_without_gain >= self.patience:
                self.stopped_because = "patience"
                break
        if not self.has_reached_target() and self.stopped_because is None:
            self.stopped_because = "rounds"

    async def compute_textual_gradient(
        self, prompt: Candidate, rollout_results: Sequence[TrialResult], *, name: str | None = None
    ) -> str | None:
        """Asks the critic what is wrong with a prompt.

        ``rollout_results`` are rollouts of the candidate ``prompt``, with messages; ``name`` is the prompt to
        criticize, needed if the candidate has several. Returns None when the call failed or the budget is spent.
        """
        name = prompt.prompt_name(name)
        others = [
            f'<other_prompt name="{other}">\n{show_text(template)}\n</other_prompt>\n'
            for other, template in prompt.prompts.items()
            if other != name
        ]
        template = self._draw_template(self._gradient_templates, prompt, name, rollout_results)
        request = template.format(
            name=name,
            prompt=show_text(prompt.prompts[name]),
            other_prompts="\n".join(others),
            rollouts=show_rollouts(rollout_results, name),
        )
        return await self.chat.ask(
            call_place("gradient", prompt, name, rollout_results),
            self.models[0],
            [{"role": "user", "content": request}],
            temperature=self.diversity_temperature,
        )

    async def textual_gradient_and_apply_edit(
        self, prompt: Candidate, rollout_results: Sequence[TrialResult], *, name: str | None = None
    ) -> Candidate | None:
        """Makes a child: the editor rewrites the prompt to address the critique.

        Returns None when a model call failed, the budget is spent, or edit and repair both broke a placeholder.
        """
        name = prompt.prompt_name(name)
        critique = await self.compute_textual_gradient(prompt, rollout_results, name=name)
        if critique is None:
            return None
        original = prompt.prompts[name]
        template = self._draw_template(self._edit_templates, prompt, name, rollout_results)
        request = template.format(
            name=name, prompt=show_text(original), critique=critique, placeholders=show_placeholders(original)
        )
        place = call_place("edit", prompt, name, rollout_results)
        edited = await self.ask_for_edit(
            place, self.models[1], request, original, temperature=self.diversity_temperature
        )
        return None if edited is None else Candidate.of({**prompt.prompts, name: edited}, prompt, critique=critique)

    async def propose(self, experience: LiveExperience) -> dict[str, PromptTemplate] | None:
        """Makes a child of a service's prompts, for live learning: ``LiveLearning(APO(...).propose)``.

        The critic reads ``gradient_batch_size`` served rollouts: half are the worst, the others are drawn at random.
        Returns None when the budget is spent, or edit and repair both broke a placeholder.

        Raises:
            ConfigError: the service uses none of the prompts to tune.
            LightningError: a model call failed.
        """
        parent = Candidate.of(choose_prompts(experience.resources, self.prompts, skip_untunable=self.prompts is None))
        number = len(experience.notes)
        random = self.random_for("live", number)
        served = sorted(random.sample(experience.results, len(experience.results)), key=lambda result: result.reward)
        size = min(self.gradient_batch_size, len(served))
        worst = served[: (size + 1) // 2]
        chosen = [*worst, *random.sample(served[len(worst) :], size - len(worst))]
        store, adapter = experience.store, self.message_adapter
        results = await asyncio.gather(*(read_trial_result(store, each.rollout, adapter) for each in chosen))
        self.open_chat(experience.directory)
        try:
            name = list(parent.prompts)[number % len(parent.prompts)]
            child = await self.textual_gradient_and_apply_edit(parent, results, name=name)
            if child is None and self.chat.failed:
                raise LightningError(next(iter(self.chat.failed.values())))
        finally:
            await self.close_chat()
        return None if child is None else {name: child.prompts[name]}

    async def evaluate_prompt_on_batch(
        self,
        prompt: Candidate,
        dataset: Dataset[Any],
        mode: RolloutMode = "val",
        *,
        indices: Sequence[int] | None = None,
        place: Sequence[str | int] = ("evaluate",),
    ) -> tuple[list[TrialResult], float]:
        """Runs a published candidate on the tasks at ``indices``, by default all of them.

        ``place`` identifies the evaluation within the search: a resumed search does not run it again. Returns the
        results in order, and their mean score.
        """
        chosen = range(len(dataset)) if indices is None else indices
        results = await self.run_trial(prompt, dataset, chosen, mode, *place, with_messages=mode == "train")
        return results, mean_score(results)

    async def _expand(
        self, number: int, beam: Sequence[Candidate], train: Dataset[Any], val: Dataset[Any]
    ) -> tuple[list[Candidate], int]:
        """Makes the children of a round and compares them with the beam on one batch.

        Each child is run as soon as it is made, without waiting for the other children, so that runners are not idle.
        Returns the best candidates, the older first among equal scores, and the number of new children.
        """
        batch = self._batch(number, val)
        trials: dict[str, asyncio.Task[float]] = {}
        known = {candidate.candidate_id for candidate in self.history}

        async def grow(n: int, parent: Candidate) -> Candidate | None:
            child = await self._make_child(number, n, parent, train)
            if child is None or child.candidate_id in known:
                return None
            for candidate in (child, *beam):
                if candidate.candidate_id not in trials:
                    comparison = self._compare(number, candidate, val, batch)
                    trials[candidate.candidate_id] = asyncio.create_task(comparison)
            return child

        growing = [asyncio.create_task(grow(n, parent)) for n, parent in enumerate(self._parents(number, beam))]
        try:
            made = await asyncio.gather(*growing)
            await asyncio.gather(*trials.values())
        finally:  # after an error the other model calls and rollouts end before their client is closed
            for task in growing:
                task.cancel()
            await asyncio.gather(*growing, return_exceptions=True)
            for trial in trials.values():
                trial.cancel()
            await asyncio.gather(*trials.values(), return_exceptions=True)
        children: dict[str, Candidate] = {}
        for child in made:  # in the order of parents: two parents may have made the same child
            if child is not None:
                children.setdefault(child.candidate_id, child)
        self.history += children.values()
        if not children:
            return list(beam), 0
        rated = (*beam, *children.values())
        found = {each.candidate_id: trials[each.candidate_id].result() for each in rated}
        scored = [self.update(each, batch_score=found[each.candidate_id]) for each in rated]
        return sorted(scored, key=lambda each: -found[each.candidate_id])[: self.beam_width], len(children)

    def _parents(self, number: int, beam: Sequence[Candidate]) -> list[Candidate]:
        """The parent of each child of a round."""
        if len(beam) >= self.beam_width:
            parents = self.random_for("parents", number).sample(beam, self.beam_width)
        else:
            parents = [beam[slot % len(beam)] for slot in range(self.beam_width)]
        return [parent for parent in parents for _ in range(self.branch_factor)]

    def _batch(self, number: int, val: Dataset[Any]) -> list[int]:
        """The validation tasks of a round."""
        order = list(range(len(val)))
        self.random_for("val").shuffle(order)
        size = min(self.val_batch_size, len(order))
        return [order[((number - 1) * size + position) % len(order)] for position in range(size)]

    async def _compare(self, number: int, candidate: Candidate, val: Dataset[Any], batch: Sequence[int]) -> float:
        await self.publish_prompts(candidate)
        _, score = await self.evaluate_prompt_on_batch(candidate, val, indices=batch, place=("val", number))
        return score

    async def _make_child(self, number: int, n: int, parent: Candidate, train: Dataset[Any]) -> Candidate | None:
        size = min(self.gradient_batch_size, len(train))
        indices = self.random_for("train", number, n).sample(range(len(train)), size)
        place = ("train", number, n)
        results, _ = await self.evaluate_prompt_on_batch(parent, train, "train", indices=indices, place=place)
        names = list(parent.prompts)
        name = names[(number - 1 + n) % len(names)]
        child = await self.textual_gradient_and_apply_edit(parent, results, name=name)
        return None if child is None else child.model_copy(update={"round": number})

    async def _validate(self, number: int, candidate: Candidate, val: Dataset[Any]) -> Candidate:
        """Scores a candidate on the whole validation set, unless that was done before."""
        if candidate.full_score is not None:
            return candidate
        results, score = await self.evaluate_prompt_on_batch(candidate, val, place=("check", number))
        return self.update(candidate, full_score=score, task_scores=tuple(result.score for result in results))

    async def _finish_round(self, number: int, beam: Sequence[Candidate], n_children: int) -> None:
        await self.publish()
        scores = [candidate.score for candidate in beam if candidate.score is not None]
        beam_scores = {"beam_score_max": max(scores), "beam_score_mean": statistics.fmean(scores)} if scores else {}
        counts = {"children": float(n_children), "failed_model_calls": float(len(self.chat.failed))}
        values = {**self.metrics(), **beam_scores, **counts, "progress": self._progress(number)}
        await self.get_store().add_metrics(number, values)
        logger.info("round %d: %d children, best score %s", number, n_children, self.get_best().score)

    @property
    def max_rounds(self) -> float:
        """Maximum number of rounds; infinite if only ``max_rollouts`` ends the search."""
        if self.beam_rounds is not None:
            return self.beam_rounds
        return _ROUNDS if self.max_rollouts is None else math.inf

    @property
    def _validates_first(self) -> bool:
        return self.run_initial_validation

    def _count_round(self, n_val: int, n_train: int) -> int:
        """Largest number of rollouts of a round."""
        children = self.beam_width * self.branch_factor
        compared = (self.beam_width + children) * min(self.val_batch_size, n_val)
        return children * min(self.gradient_batch_size, n_train) + compared + n_val

    def _progress(self, number: int) -> float:
        share = 0.0 if self.max_rollouts is None else self.n_rollouts / self.max_rollouts
        return min(max(number / self.max_rounds, share), 1.0)

    def _draw_template(
        self, templates: Sequence[PromptTemplate], prompt: Candidate, name: str, results: Sequence[TrialResult]
    ) -> PromptTemplate:
        """Draws a template; the choice depends on the prompt and the tasks, not on the run."""
        return self.random_for(prompt.candidate_id, name, repr([result.task for result in results])).choice(templates)
