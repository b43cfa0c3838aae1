"""``apo``: automatic prompt optimisation by textual gradients and beam search.

Pryzant et al. 2023, Automatic Prompt Optimization with "Gradient Descent" and Beam Search, arXiv:2305.03495. Its
"gradient" is a critique of the prompt that a model writes from rollouts, its "step" an edit that follows the critique.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from openai import AsyncOpenAI

from agentlightning.errors import LightningError
from agentlightning.plugin.settings import require_least
from agentlightning.resources import PromptTemplate
from agentlightning.types import Dataset, RolloutMode
from agentlightning_algorithms.live_resources import Experience
from agentlightning_algorithms.prompt_search.budget import Budget
from agentlightning_algorithms.prompt_search.candidate import Candidate
from agentlightning_algorithms.prompt_search.critique import (
    EDIT_PROMPTS,
    GRADIENT_PROMPTS,
    read_templates,
    show_rollouts,
)
from agentlightning_algorithms.prompt_search.placeholder import show_placeholders
from agentlightning_algorithms.prompt_search.search import PromptSearch, choose_prompts
from agentlightning_algorithms.prompt_search.trial import RolloutResult, mean_score, read_result

logger = logging.getLogger("agentlightning")


class APO(PromptSearch):
    """Makes prompts better: a critic reads how the agent did, an editor rewrites the prompt, the best survive.

    Each round takes ``beam_width`` parents from the beam and makes ``branch_factor`` children of each; parents and
    children are compared on one validation batch, the best ``beam_width`` of them are the next beam, and its leader is
    tried on the whole validation set. The best prompt ever found there stays the latest resource of the run.
    """

    def __init__(
        self,
        async_openai_client: AsyncOpenAI | None = None,
        *,
        gradient_model: str = "gpt-5-mini",
        apply_edit_model: str = "gpt-4.1-mini",
        diversity_temperature: float = 1.0,
        gradient_batch_size: int = 4,
        val_batch_size: int = 16,
        beam_width: int = 4,
        branch_factor: int = 4,
        beam_rounds: int = 3,
        rollout_batch_timeout: float = 3600.0,
        run_initial_validation: bool = True,
        patience: int | None = None,
        target_score: float | None = None,
        prompts: Sequence[str] | str | None = None,
        gradient_prompts: str | PromptTemplate | Sequence[str | PromptTemplate] | None = None,
        edit_prompts: str | PromptTemplate | Sequence[str | PromptTemplate] | None = None,
        seed: int | None = None,
        llm_attempts: int = 3,
        max_calls: int | None = None,
        max_tokens: int | None = None,
        max_cost: float | None = None,
        prices: Mapping[str, tuple[float, float]] | None = None,
    ) -> None:
        """Sets up the search.

        Args:
            async_openai_client: for critic and editor, of any OpenAI-compatible endpoint; None takes OPENAI_API_KEY and
                OPENAI_BASE_URL.
            gradient_model: the critic.
            apply_edit_model: the editor.
            diversity_temperature: sampling temperature of both.
            gradient_batch_size: rollouts that a critic reads.
            val_batch_size: validation tasks on which the candidates of a round are compared.
            beam_width: candidates that survive a round, and parents in the next.
            branch_factor: children of each parent.
            beam_rounds: rounds.
            rollout_batch_timeout: seconds for the rollouts of one trial; those not done by then count as 0.
            run_initial_validation: whether the prompt to begin with is tried on the whole validation set.
            patience: stop after so many rounds without a better prompt.
            target_score: stop when the best prompt has this mean reward on the whole validation set.
            prompts: names of the prompt resources to tune, all by default. Each child edits one of them, in turn.
            gradient_prompts: instead of our own, what the critic is told: templates with ``{name}``, ``{prompt}``,
                ``{other_prompts}`` and ``{rollouts}``, of which one is drawn each time.
            edit_prompts: what the editor is told, with ``{name}``, ``{prompt}``, ``{critique}`` and ``{placeholders}``.
            seed: of everything that is drawn; default is the run's.
            llm_attempts: how often a model call that fails is tried before it is skipped.
            max_calls: budget in model calls, those of critic, editor and, as far as they are traced, agents. What is
                spent ends the search after the round in which it is; critic and editor stop at once.
            max_tokens: the same in tokens of prompts and answers.
            max_cost: the same in money.
            prices: by model, for a million tokens of prompts and of answers.

        Raises:
            ConfigError: a value out of range, or a ``max_cost`` without the prices of critic and editor.
        """
        require_least(1, gradient_batch_size=gradient_batch_size, val_batch_size=val_batch_size)
        require_least(1, beam_width=beam_width, branch_factor=branch_factor, beam_rounds=beam_rounds, patience=patience)
        super().__init__(
            async_openai_client,
            models=(gradient_model, apply_edit_model),
            prompts=prompts,
            rollout_batch_timeout=rollout_batch_timeout,
            target_score=target_score,
            seed=seed,
            budget=Budget(max_calls, max_tokens, max_cost, prices or {}),
            llm_attempts=llm_attempts,
        )
        self.gradient_model = gradient_model
        self.apply_edit_model = apply_edit_model
        self.diversity_temperature = diversity_temperature
        self.gradient_batch_size = gradient_batch_size
        self.val_batch_size = val_batch_size
        self.beam_width = beam_width
        self.branch_factor = branch_factor
        self.beam_rounds = beam_rounds
        self.run_initial_validation = run_initial_validation
        self.patience = patience
        self.gradient_prompts = read_templates("gradient_prompts", gradient_prompts, GRADIENT_PROMPTS)
        self.edit_prompts = read_templates("edit_prompts", edit_prompts, EDIT_PROMPTS)

    async def search(self, seed: Candidate, train: Dataset[Any], val: Dataset[Any]) -> None:
        """Runs the rounds."""
        if self.run_initial_validation:
            seed = await self._check(0, seed, val)
            await self._finish_round(0, [seed], 0)
        beam, stale = [seed], 0
        for number in range(1, self.beam_rounds + 1):
            if self._is_good_enough() or self.is_spent():
                break
            self.chat.begin()
            beam, n_children = await self._select(number, beam, train, val)
            if self.chat.failed and not self.chat.answered:
                self.stopped_because = "model_calls_failed"
                break
            self._ledger.give_up(self.chat.failed)
            beam[0] = await self._check(number, beam[0], val)
            stale = 0 if self.take_if_better(beam[0]) else stale + 1
            await self._finish_round(number, beam, n_children)
            if self.patience is not None and stale >= self.patience:
                self.stopped_because = "patience"
                break
        if not self._is_good_enough() and self.stopped_because is None:
            self.stopped_because = "rounds"

    async def compute_textual_gradient(
        self, prompt: Candidate, rollout_results: Sequence[RolloutResult], *, name: str | None = None
    ) -> str | None:
        """What is wrong with a prompt, in a critic's words.

        Args:
            prompt: the candidate that the rollouts used.
            rollout_results: what happened, with messages.
            name: which of its prompts is meant, when it has several.

        Returns:
            The critique; None when the model call failed or the budget is spent.
        """
        name = _name(prompt, name)
        place = _place("gradient", prompt, name, rollout_results)
        others = [
            f'<other_prompt name="{other}">\n{template.template}\n</other_prompt>\n'
            for other, template in prompt.prompts.items()
            if other != name
        ]
        template = self._variant(self.gradient_prompts, prompt, name, rollout_results)
        request = template.format(
            name=name,
            prompt=prompt.prompts[name].template,
            other_prompts="\n".join(others),
            rollouts=show_rollouts(rollout_results),
        )
        messages = [{"role": "user", "content": request}]
        return await self.chat.ask(place, self.gradient_model, messages, temperature=self.diversity_temperature)

    async def textual_gradient_and_apply_edit(
        self, prompt: Candidate, rollout_results: Sequence[RolloutResult], *, name: str | None = None
    ) -> Candidate | None:
        """A child: the prompt as an editor rewrites it after the critique.

        Returns:
            None when a model call failed, the budget is spent, or the edit broke a placeholder and its repair too.
        """
        name = _name(prompt, name)
        critique = await self.compute_textual_gradient(prompt, rollout_results, name=name)
        if critique is None:
            return None
        original = prompt.prompts[name]
        place = _place("edit", prompt, name, rollout_results)
        template = self._variant(self.edit_prompts, prompt, name, rollout_results)
        request = template.format(
            name=name, prompt=original.template, critique=critique, placeholders=show_placeholders(original)
        )
        edited = await self.ask_for_edit(
            place, self.apply_edit_model, request, original, temperature=self.diversity_temperature
        )
        return None if edited is None else Candidate.of({**prompt.prompts, name: edited}, prompt, critique=critique)

    async def propose(self, experience: Experience) -> dict[str, PromptTemplate] | None:
        """A child of the prompts that a service uses, for live learning: ``LiveLearning(APO(...).propose)``.

        The critic reads ``gradient_batch_size`` of the rollouts that were served, half of them the worst.

        Returns:
            The prompt that is new; None when the budget is spent or the edit broke a placeholder and its repair too.

        Raises:
            ConfigError: the service uses no prompt that is tuned here.
            LightningError: a model call failed.
        """
        parent = Candidate.of(choose_prompts(experience.resources, self.prompts))
        number = len(experience.notes)
        draw = self.draw("live", number)
        served = sorted(draw.sample(experience.results, len(experience.results)), key=lambda result: result.reward)
        size = min(self.gradient_batch_size, len(served))
        worst = served[: (size + 1) // 2]
        chosen = [*worst, *draw.sample(served[len(worst) :], size - len(worst))]
        adapter = self.message_adapter
        read = await asyncio.gather(*(read_result(experience.store, each.rollout, adapter) for each in chosen))
        self.open_books(experience.directory)
        try:
            name = list(parent.prompts)[number % len(parent.prompts)]
            child = await self.textual_gradient_and_apply_edit(parent, read, name=name)
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
    ) -> tuple[list[RolloutResult], float]:
        """Runs a published candidate on tasks and scores it.

        Args:
            prompt: the candidate.
            dataset: the tasks.
            mode: of the rollouts.
            indices: which tasks; None is all.
            place: which evaluation of the search this is; the same place is run once in the life of a run.

        Returns:
            The results in order, and their mean reward, in which failures and time-outs count as 0.
        """
        chosen = range(len(dataset)) if indices is None else indices
        results = await self.try_on(prompt, dataset, chosen, mode, *place, with_messages=mode == "train")
        return results, mean_score(results)

    async def _select(
        self, number: int, beam: Sequence[Candidate], train: Dataset[Any], val: Dataset[Any]
    ) -> tuple[list[Candidate], int]:
        """Makes the children of a round and compares them with the beam on one batch.

        A child is tried as soon as it is made, while others are still being thought of, so that runners never wait for
        a model; the beam is tried with the first child.

        Returns:
            The best, of equals the older first, and the number of children that were new.
        """
        batch = self._batch(number, val)
        trials: dict[str, asyncio.Task[float]] = {}

        def compare(candidate: Candidate) -> None:
            if candidate.candidate_id not in trials:
                trials[candidate.candidate_id] = asyncio.create_task(self._compare(number, candidate, val, batch))

        async def grow(n: int, parent: Candidate) -> Candidate | None:
            child = await self._make_child(number, n, parent, train)
            if child is None or child.candidate_id in known:
                return None
            for candidate in (child, *beam):
                compare(candidate)
            return child

        known = {candidate.candidate_id for candidate in self.history}
        try:
            made = await asyncio.gather(*(grow(n, parent) for n, parent in enumerate(self._parents(number, beam))))
            await asyncio.gather(*trials.values())
        finally:
            for trial in trials.values():
                trial.cancel()
        children: dict[str, Candidate] = {}
        for child in made:  # by place, not by arrival: the same child may have been made of two parents
            if child is not None:
                children.setdefault(child.candidate_id, child)
        self.history += children.values()
        if not children:
            return list(beam), 0
        scored = [
            self.update(each, batch_score=trials[each.candidate_id].result()) for each in (*beam, *children.values())
        ]
        return sorted(scored, key=lambda each: -(each.batch_score or 0.0))[: self.beam_width], len(children)

    def _parents(self, number: int, beam: Sequence[Candidate]) -> list[Candidate]:
        """The parent of each child of a round."""
        if len(beam) >= self.beam_width:
            parents = self.draw("parents", number).sample(beam, self.beam_width)
        else:
            parents = [beam[slot % len(beam)] for slot in range(self.beam_width)]
        return [parent for parent in parents for _ in range(self.branch_factor)]

    def _batch(self, number: int, val: Dataset[Any]) -> list[int]:
        """The validation tasks of a round."""
        order = list(range(len(val)))
        self.draw("val").shuffle(order)
        size = min(self.val_batch_size, len(order))
        return [order[((number - 1) * size + position) % len(order)] for position in range(size)]

    async def _compare(self, number: int, candidate: Candidate, val: Dataset[Any], batch: Sequence[int]) -> float:
        await self.publish_prompts(candidate)
        _, score = await self.evaluate_prompt_on_batch(candidate, val, indices=batch, place=("val", number))
        return score

    async def _make_child(self, number: int, n: int, parent: Candidate, train: Dataset[Any]) -> Candidate | None:
        size = min(self.gradient_batch_size, len(train))
        indices = self.draw("train", number, n).sample(range(len(train)), size)
        results, _ = await self.evaluate_prompt_on_batch(
            parent, train, "train", indices=indices, place=("train", number, n)
        )
        names = list(parent.prompts)
        name = names[(number - 1 + n) % len(names)]
        child = await self.textual_gradient_and_apply_edit(parent, results, name=name)
        return None if child is None else child.model_copy(update={"round": number})

    async def _check(self, number: int, candidate: Candidate, val: Dataset[Any]) -> Candidate:
        """The candidate with its score on the whole validation set, which is found out once."""
        if candidate.full_score is not None:
            return candidate
        _, score = await self.evaluate_prompt_on_batch(candidate, val, place=("check", number))
        return self.update(candidate, full_score=score)

    async def _finish_round(self, number: int, beam: Sequence[Candidate], n_children: int) -> None:
        await self.publish()
        scores = [candidate.score or 0.0 for candidate in beam]
        values = {
            **self.metrics(),
            "beam_score_max": max(scores),
            "beam_score_mean": sum(scores) / len(scores),
            "children": float(n_children),
            "failed_model_calls": float(len(self.chat.failed)),
            "progress": number / self.beam_rounds,
        }
        await self.get_store().add_metrics(number, values)
        logger.info("round %d: %d children, best score %s", number, n_children, self.get_best().score)

    def _is_good_enough(self) -> bool:
        score = self.get_best().full_score
        if self.target_score is not None and score is not None and score >= self.target_score:
            self.stopped_because = "target_score"
        return self.stopped_because == "target_score"

    def _variant(
        self, templates: Sequence[PromptTemplate], prompt: Candidate, name: str, results: Sequence[RolloutResult]
    ) -> PromptTemplate:
        """One of several ways to ask, which depends on what is asked about and not on the run."""
        return self.draw(prompt.candidate_id, name, repr([result.task for result in results])).choice(templates)


def _name(prompt: Candidate, name: str | None) -> str:
    chosen = prompt.prompt(name)
    return name if name is not None else next(n for n, template in prompt.prompts.items() if template is chosen)


def _place(stage: str, prompt: Candidate, name: str, results: Sequence[RolloutResult]) -> str:
    """Which model call this is. The ids of the rollouts are the same in every life of a run."""
    text = "/".join((prompt.candidate_id, name, *(result.rollout_id for result in results)))
    return f"{stage}/{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"
