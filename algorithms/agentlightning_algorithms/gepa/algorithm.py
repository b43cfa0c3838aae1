"""``gepa``: reflective evolution of prompts with a Pareto front, by the package ``gepa``.

Agrawal et al. 2025, GEPA: Reflective Prompt Evolution Can Outperform Reinforcement Learning, arXiv:2507.19457.
The package decides which candidate is changed next and which survive; rollouts, model calls, budget and results are as
in ``apo``.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from gepa.api import optimize
from gepa.core.adapter import EvaluationBatch, ProposalFn
from gepa.strategies.instruction_proposal import InstructionProposalSignature
from openai import AsyncOpenAI

from agentlightning.errors import ConfigError
from agentlightning.plugin.settings import require_least
from agentlightning.resources import PromptTemplate
from agentlightning.run.thread import run_in_thread
from agentlightning.types import Dataset
from agentlightning_algorithms.prompt_search.budget import Budget
from agentlightning_algorithms.prompt_search.candidate import Candidate
from agentlightning_algorithms.prompt_search.critique import ROLLOUT_CHARS, shorten_middle, show_messages
from agentlightning_algorithms.prompt_search.placeholder import show_placeholders
from agentlightning_algorithms.prompt_search.search import PromptSearch
from agentlightning_algorithms.prompt_search.trial import RolloutResult, mean_score

logger = logging.getLogger("agentlightning")
_FAILED_IN_A_ROW: Final = 5
"""Proposals without an answer, after which the model is taken for dead."""


class GEPA(PromptSearch):
    """Makes prompts better by reflection on few rollouts, and keeps every candidate that is best on some task."""

    def __init__(
        self,
        async_openai_client: AsyncOpenAI | None = None,
        *,
        reflection_model: str = "gpt-5-mini",
        temperature: float = 1.0,
        minibatch_size: int = 3,
        max_rollouts: int = 500,
        candidate_selection: Literal["pareto", "current_best", "epsilon_greedy", "top_k_pareto"] = "pareto",
        use_merge: bool = False,
        perfect_score: float | None = 1.0,
        reflection_prompt: str | None = None,
        rollout_batch_timeout: float = 3600.0,
        target_score: float | None = None,
        prompts: Sequence[str] | str | None = None,
        seed: int | None = None,
        llm_attempts: int = 3,
        max_calls: int | None = None,
        max_tokens: int | None = None,
        max_cost: float | None = None,
        prices: Mapping[str, tuple[float, float]] | None = None,
    ) -> None:
        """Sets up the search. What is not said here is as in ``APO``.

        Args:
            async_openai_client: for reflection, of any OpenAI-compatible endpoint; None takes it from the environment.
            reflection_model: rewrites prompts.
            temperature: of its sampling.
            minibatch_size: training rollouts that it reflects on.
            max_rollouts: of training and validation together; the search ends when they are used up.
            candidate_selection: which candidate is changed next.
            use_merge: whether to combine candidates that tune different prompts.
            perfect_score: a candidate with this reward on a whole minibatch is not reflected on; None reflects always.
            reflection_prompt: instead of gepa's own, with ``<curr_param>`` and ``<side_info>``.
            rollout_batch_timeout: seconds for the rollouts of one trial.
            target_score: stop when the best has this mean reward on the whole validation set.
            prompts: names of the prompt resources to tune, all by default; they are changed in turn.
            seed: of everything that is drawn; default is the run's.
            llm_attempts: how often a model call that fails is tried before it is skipped.
            max_calls: budget in model calls.
            max_tokens: the same in tokens.
            max_cost: the same in money.
            prices: by model, for a million tokens of prompts and of answers.

        Raises:
            ConfigError: a value out of range.
        """
        require_least(1, minibatch_size=minibatch_size, max_rollouts=max_rollouts)
        super().__init__(
            async_openai_client,
            models=(reflection_model,),
            prompts=prompts,
            rollout_batch_timeout=rollout_batch_timeout,
            target_score=target_score,
            seed=seed,
            budget=Budget(max_calls, max_tokens, max_cost, prices or {}),
            llm_attempts=llm_attempts,
        )
        try:
            InstructionProposalSignature.validate_prompt_template(reflection_prompt)
        except ValueError as error:
            raise ConfigError(f"reflection_prompt: {error}") from error
        self.reflection_model = reflection_model
        self.temperature = temperature
        self.minibatch_size = minibatch_size
        self.max_rollouts = max_rollouts
        self.candidate_selection = candidate_selection
        self.use_merge = use_merge
        self.perfect_score = perfect_score
        self.reflection_prompt = reflection_prompt

    async def search(self, seed: Candidate, train: Dataset[Any], val: Dataset[Any]) -> None:
        """Lets gepa evolve the seed."""
        evolution = _Evolution(self, train, val, asyncio.get_running_loop())
        drawn = self.context.seed if self.seed is None else self.seed

        def evolve() -> None:
            optimize(
                {name: prompt.template for name, prompt in seed.prompts.items()},
                [("train", index) for index in range(len(train))],
                [("val", index) for index in range(len(val))],
                adapter=evolution,
                candidate_selection_strategy=self.candidate_selection,
                skip_perfect_score=self.perfect_score is not None,
                perfect_score=self.perfect_score,  # type: ignore[arg-type] # None where it is not looked at
                reflection_minibatch_size=self.minibatch_size,
                use_merge=self.use_merge,
                max_metric_calls=self.max_rollouts,
                stop_callbacks=evolution.should_stop,
                logger=_Log(),
                seed=drawn,
            )

        await run_in_thread(evolve, name="gepa")
        await self.publish()
        self.stopped_because = self.stopped_because or "rollouts"

    async def reflect(self, parent: Candidate, name: str, results: Sequence[RolloutResult]) -> Candidate | None:
        """A child of ``parent`` whose prompt ``name`` is rewritten after these rollouts; None when that failed."""
        original = parent.prompts[name]
        request = InstructionProposalSignature.prompt_renderer(
            {
                "current_instruction_doc": original.template,
                "dataset_with_feedback": [_to_record(result) for result in results],
                "prompt_template": self.reflection_prompt,
            }
        )
        text = "/".join((parent.candidate_id, name, *(result.rollout_id for result in results)))
        edited = await self.ask_for_edit(
            f"reflect/{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}",
            self.reflection_model,
            f"{request}\n\nKeep the placeholders as they are, and add no others: {show_placeholders(original)}.",
            original,
            temperature=self.temperature,
            read=lambda answer: InstructionProposalSignature.output_extractor(answer)["new_instruction"],
        )
        if edited is None:
            return None
        self._ledger.give_up(self.chat.failed)
        return Candidate.of({**parent.prompts, name: edited}, parent)


class _Evolution:
    """What gepa asks of the system it tunes. It is synchronous and has a thread; the work is done in the run's loop."""

    def __init__(self, search: GEPA, train: Dataset[Any], val: Dataset[Any], loop: asyncio.AbstractEventLoop) -> None:
        self._search = search
        self._data = {"train": train, "val": val}
        self._loop = loop
        self._trials = 0
        self._failed_in_a_row = 0
        self._children: dict[str, Candidate] = {}
        self.propose_new_texts: ProposalFn | None = self._propose

    def evaluate(
        self, batch: list[tuple[str, int]], candidate: dict[str, str], capture_traces: bool = False
    ) -> EvaluationBatch[Any, Any]:
        future = asyncio.run_coroutine_threadsafe(self._evaluate(batch, candidate), self._loop)
        results = future.result()
        return EvaluationBatch(
            outputs=[result.rollout_id for result in results],
            scores=[result.score for result in results],
            trajectories=list(results) if capture_traces else None,
        )

    def make_reflective_dataset(
        self,
        candidate: dict[str, str],
        eval_batch: EvaluationBatch[Any, Any],
        components_to_update: list[str],
    ) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        records = [{"result": result} for result in eval_batch.trajectories or ()]
        return dict.fromkeys(components_to_update, records)

    def should_stop(self, gepa_state: object) -> bool:
        search = self._search
        score = search.get_best().full_score
        if search.target_score is not None and score is not None and score >= search.target_score:
            search.stopped_because = "target_score"
        elif self._failed_in_a_row >= _FAILED_IN_A_ROW:
            search.stopped_because = "model_calls_failed"
        return search.is_spent() or search.stopped_because is not None

    def _propose(
        self,
        candidate: dict[str, str],
        reflective_dataset: Mapping[str, Sequence[Mapping[str, Any]]],
        components_to_update: list[str],
    ) -> dict[str, str]:
        proposed = {}
        for name in components_to_update:
            results = [record["result"] for record in reflective_dataset[name]]
            parent = self._candidate(candidate)
            future = asyncio.run_coroutine_threadsafe(self._search.reflect(parent, name, results), self._loop)
            child = future.result()
            self._failed_in_a_row = 0 if child is not None else self._failed_in_a_row + 1
            if child is not None:
                self._children[child.candidate_id] = child.model_copy(update={"round": self._trials})
                proposed[name] = child.prompts[name].template
        return proposed

    def _candidate(self, texts: Mapping[str, str]) -> Candidate:
        search = self._search
        seed = search.history[0]
        found = Candidate.of(
            {name: PromptTemplate(text, seed.prompts[name].engine) for name, text in texts.items()}, round=self._trials
        )
        known = {candidate.candidate_id: candidate for candidate in search.history}
        return known.get(found.candidate_id) or self._children.get(found.candidate_id) or found

    async def _evaluate(self, batch: Sequence[tuple[str, int]], texts: Mapping[str, str]) -> list[RolloutResult]:
        search, candidate = self._search, self._candidate(texts)
        self._trials += 1
        if candidate.candidate_id not in {known.candidate_id for known in search.history}:
            search.history.append(candidate)
            await search.publish()
        mode: Any = batch[0][0]
        data, indices = self._data[mode], [index for _, index in batch]
        results = await search.try_on(
            candidate, data, indices, mode, "gepa", self._trials, with_messages=mode == "train"
        )
        if mode == "val" and len(batch) == len(data):
            search.take_if_better(search.update(candidate, full_score=mean_score(results)))
            await search.publish()
            await search.get_store().add_metrics(self._trials, search.metrics())
        else:
            search.update(candidate, batch_score=mean_score(results))
        return results


class _Log:
    def log(self, message: str) -> None:
        logger.debug("gepa: %s", message)


def _to_record(result: RolloutResult) -> dict[str, Any]:
    reward = "none" if result.reward is None else f"{result.reward:g}"
    feedback = f"status {result.status}, reward {reward} (more is better)"
    if result.error is not None:
        feedback += f", error {result.error}"
    return {
        "Inputs": shorten_middle(str(result.task), ROLLOUT_CHARS // 3),
        "Generated Outputs": shorten_middle(show_messages(result.messages), ROLLOUT_CHARS),
        "Feedback": feedback,
    }
