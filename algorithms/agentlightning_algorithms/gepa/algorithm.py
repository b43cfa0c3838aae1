"""``gepa``: reflective evolution of prompts with a Pareto front, by the package ``gepa``.

Agrawal et al. 2025, GEPA: Reflective Prompt Evolution Can Outperform Reinforcement Learning, arXiv:2507.19457.
The package selects the next candidate to change and the candidates that survive; the rest works as in ``apo``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from types import SimpleNamespace
from typing import Any, Final, Literal

from gepa.api import optimize
from gepa.core.adapter import EvaluationBatch, ProposalFn
from gepa.strategies.instruction_proposal import InstructionProposalSignature

from agentlightning.errors import ConfigError
from agentlightning.plugin.settings import require_least
from agentlightning.resources import PromptTemplate
from agentlightning.run.thread import run_in_thread
from agentlightning.types import Dataset
from agentlightning_algorithms.shared.prompt_search.candidate import Candidate, show_placeholders, show_text
from agentlightning_algorithms.shared.prompt_search.chat import find_critic
from agentlightning_algorithms.shared.prompt_search.critique import (
    ROLLOUT_CHARS,
    shorten_middle,
    show_feedback,
    show_messages,
)
from agentlightning_algorithms.shared.prompt_search.search import PromptSearch
from agentlightning_algorithms.shared.prompt_search.trial import TrialResult, call_place, mean_score

logger = logging.getLogger("agentlightning")
_MAX_FAILED_PROPOSALS: Final = 5
"""Number of consecutive failed proposals that end the search."""


@dataclass(eq=False, repr=False, kw_only=True)
class GEPA(PromptSearch):
    """Improves prompts by reflection on few rollouts, and keeps every candidate that is best on some task."""

    reflection_model: str | None = None
    """The model that rewrites prompts. None: the one that ``AGL_CRITIC_MODEL``, else ``OPENAI_MODEL``, names."""
    temperature: float = 1.0
    """Sampling temperature of the reflection model."""
    minibatch_size: int = 3
    """Number of training rollouts that one reflection reads."""
    max_rollouts: int | None = 500
    candidate_selection: Literal["pareto", "current_best", "epsilon_greedy", "top_k_pareto"] = "pareto"
    """How the candidate to change next is selected."""
    use_merge: bool = False
    """Whether to combine candidates that tune different prompts."""
    reflection_prompt: str | None = None
    """Replacement for gepa's reflection prompt, with ``<curr_param>`` and ``<side_info>``."""

    def __post_init__(self) -> None:
        require_least(1, minibatch_size=self.minibatch_size)
        if self.max_rollouts is None:
            raise ConfigError("max_rollouts = None: gepa ends when its rollouts are spent; give a number")
        super().__post_init__()
        try:
            InstructionProposalSignature.validate_prompt_template(self.reflection_prompt)
        except ValueError as error:
            raise ConfigError(f"reflection_prompt: {error}") from error

    @property
    def models(self) -> Sequence[str]:
        """The model that reflects; raises ConfigError if nothing names it."""
        return (find_critic("reflection_model", self.reflection_model),)

    async def search(self, seed: Candidate, train: Dataset[Any], val: Dataset[Any]) -> None:
        """Runs gepa from the seed."""
        self.require_rollouts(2 * (len(val) + min(self.minibatch_size, len(train))))
        limit = int(self.left_for_search())
        adapter = _GEPAAdapter(self, train, val, asyncio.get_running_loop(), limit)

        to_debug_log: Any = SimpleNamespace(log=logger.debug)

        def run_gepa() -> None:
            optimize(
                {name: prompt.template for name, prompt in seed.prompts.items()},
                [("train", index) for index in range(len(train))],
                [("val", index) for index in range(len(val))],
                adapter=adapter,
                candidate_selection_strategy=self.candidate_selection,
                skip_perfect_score=self.perfect_score is not None,
                perfect_score=self.perfect_score,
                reflection_minibatch_size=self.minibatch_size,
                use_merge=self.use_merge,
                max_metric_calls=limit,
                stop_callbacks=adapter.should_stop,
                logger=to_debug_log,
                seed=self.context.seed if self.seed is None else self.seed,
            )

        with contextlib.suppress(_RolloutsSpentError):
            await run_in_thread(run_gepa, name="gepa")
        await self.publish()
        self.stopped_because = self.stopped_because or "rollouts"

    async def reflect(self, parent: Candidate, name: str, results: Sequence[TrialResult]) -> Candidate | None:
        """Makes a child by rewriting the prompt ``name`` based on these rollouts; returns None if that failed."""
        original = parent.prompts[name]
        request = InstructionProposalSignature.prompt_renderer(
            {
                "current_instruction_doc": show_text(original),
                "dataset_with_feedback": [_to_record(result, name) for result in results],
                "prompt_template": self.reflection_prompt,
            }
        )
        edited = await self.ask_for_edit(
            call_place("reflect", parent, name, results),
            self.models[0],
            f"{request}\n\nKeep the placeholders as they are, and add no others: {show_placeholders(original)}.",
            original,
            temperature=self.temperature,
            read=lambda answer: InstructionProposalSignature.output_extractor(answer)["new_instruction"],
        )
        return None if edited is None else Candidate.of({**parent.prompts, name: edited}, parent)


class _RolloutsSpentError(Exception):
    """The next trial of a search would need more rollouts than are left."""


class _GEPAAdapter:
    """Implements gepa's adapter. gepa is synchronous and runs in a thread; the work is done in the run's event loop."""

    def __init__(
        self, search: GEPA, train: Dataset[Any], val: Dataset[Any], loop: asyncio.AbstractEventLoop, limit: int
    ) -> None:
        self._search = search
        self._limit = self._left = limit
        """Rollouts that the search may still run."""
        self._data = {"train": train, "val": val}
        self._loop = loop
        self._trials = 0
        self._failed_proposals = 0
        """Number of consecutive failed proposals."""
        self._children: dict[str, Candidate] = {}
        self.propose_new_texts: ProposalFn | None = self._propose

    def evaluate(
        self, batch: list[tuple[str, int]], candidate: dict[str, str], capture_traces: bool = False
    ) -> EvaluationBatch[Any, Any]:
        self._left -= len(batch)
        if self._left < 0:
            raise _RolloutsSpentError
        results = asyncio.run_coroutine_threadsafe(self._evaluate(batch, candidate), self._loop).result()
        return EvaluationBatch(
            outputs=[result.rollout_id for result in results],
            scores=[result.score for result in results],
            trajectories=list(results) if capture_traces else None,
        )

    def make_reflective_dataset(
        self, candidate: dict[str, str], eval_batch: EvaluationBatch[Any, Any], components_to_update: list[str]
    ) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        records = [{"result": result} for result in eval_batch.trajectories or ()]
        return dict.fromkeys(components_to_update, records)

    def should_stop(self, gepa_state: object) -> bool:
        search = self._search
        if not search.has_reached_target() and self._failed_proposals >= _MAX_FAILED_PROPOSALS:
            search.stopped_because = "model_calls_failed"
        return search.is_spent() or search.has_reached_target() or search.stopped_because is not None

    def _propose(
        self,
        candidate: dict[str, str],
        reflective_dataset: Mapping[str, Sequence[Mapping[str, Any]]],
        components_to_update: list[str],
    ) -> dict[str, str]:
        proposed = {}
        for name in components_to_update:
            results = [record["result"] for record in reflective_dataset[name]]
            reflection = self._search.reflect(self._candidate(candidate), name, results)
            child = asyncio.run_coroutine_threadsafe(reflection, self._loop).result()
            self._failed_proposals = 0 if child is not None else self._failed_proposals + 1
            if child is not None:
                self._children[child.candidate_id] = child.model_copy(update={"round": self._trials})
                proposed[name] = child.prompts[name].template
        return proposed

    def _candidate(self, texts: Mapping[str, str]) -> Candidate:
        history = self._search.history
        found = Candidate.of(
            {name: PromptTemplate(text, history[0].prompts[name].engine) for name, text in texts.items()},
            round=self._trials,
        )
        known = {candidate.candidate_id: candidate for candidate in history}
        return known.get(found.candidate_id) or self._children.get(found.candidate_id) or found

    async def _evaluate(self, batch: Sequence[tuple[str, int]], texts: Mapping[str, str]) -> list[TrialResult]:
        search, candidate = self._search, self._candidate(texts)
        self._trials += 1
        if candidate.candidate_id not in {known.candidate_id for known in search.history}:
            search.history.append(candidate)
            await search.publish()
        mode: Any = batch[0][0]
        data, indices = self._data[mode], [index for _, index in batch]
        results = await search.run_trial(
            candidate, data, indices, mode, "gepa", self._trials, with_messages=mode == "train"
        )
        if mode == "val" and len(batch) == len(data):
            scores = tuple(result.score for _, result in sorted(zip(indices, results, strict=True), key=itemgetter(0)))
            scored = search.update(candidate, full_score=mean_score(results), task_scores=scores)
            search.take_if_better(scored)
            await search.publish()
            values = {**search.metrics(), "progress": 1.0 - self._left / self._limit}
            await search.get_store().add_metrics(self._trials, values)
        else:
            search.update(candidate, batch_score=mean_score(results))
        return results


def _to_record(result: TrialResult, name: str) -> dict[str, Any]:
    reward = "none" if result.reward is None else f"{result.reward:g}"
    feedback = f"status {result.status}, reward {reward} (more is better)"
    if result.error is not None:
        feedback += f", error {result.error}"
    if given := show_feedback(result, name):
        feedback += f"\n{given}"
    return {
        "Inputs": shorten_middle(str(result.task), ROLLOUT_CHARS // 3),
        "Generated Outputs": shorten_middle(
            "\n".join(filter(None, (show_messages(result.messages), result.output))), ROLLOUT_CHARS
        ),
        "Feedback": feedback,
    }
