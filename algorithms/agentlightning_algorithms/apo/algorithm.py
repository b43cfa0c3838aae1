"""``apo``: automatic prompt optimisation by textual gradients and beam search.

Pryzant et al. 2023, Automatic Prompt Optimization with "Gradient Descent" and Beam Search, arXiv:2305.03495. A
"gradient" is a critique of the prompt that a model writes from rollouts, a "step" an edit that follows the critique.
"""

from __future__ import annotations

import asyncio
import math
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
from agentlightning_algorithms.shared.prompt_search.race import RacingSearch
from agentlightning_algorithms.shared.prompt_search.trial import TrialResult, call_place, mean_score, read_trial_result

_ROUNDS: Final = 10
"""Rounds of a search without a limit."""


@dataclass(eq=False, repr=False, kw_only=True)
class APO(RacingSearch):
    """Improves prompts: a critic reads rollouts, an editor rewrites the prompt, the best candidates survive.

    Each round takes the ``beam_width`` best prompts and makes ``branch_factor`` children of each, which race against
    their parents on the same validation tasks. The best prompt is published as the run's latest resource.

    Raises:
        ConfigError: a value is out of range, or ``max_cost`` is set without the prices of critic and editor.
    """

    gradient_model: str | None = None
    """The critic. None: the model that ``AGL_CRITIC_MODEL``, else ``OPENAI_MODEL``, names."""
    apply_edit_model: str | None = None
    """The editor. None: the critic."""
    diversity_temperature: float = 1.0
    """Sampling temperature of the critic and of the editor."""
    gradient_batch_size: int = 8
    """Maximum number of rollouts that the critic reads for one critique; failures come first."""
    val_batch_size: int = 8
    """Number of validation tasks after which a race is judged for the first time; the number then doubles."""
    beam_width: int = 1
    """Number of parents of a round."""
    branch_factor: int = 2
    """Number of children of each parent."""
    beam_rounds: int | None = None
    """Maximum number of rounds. None: as many as ``max_rollouts`` allows, or 10 without that limit."""
    run_initial_validation: bool = True
    """Whether the seed is run on the validation tasks first."""
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

    @property
    def shape(self) -> tuple[int, int]:
        return self.beam_width, self.branch_factor

    @property
    def n_examples(self) -> int:
        return self.gradient_batch_size

    @property
    def first_rung(self) -> int:
        return self.val_batch_size

    def count_first(self, limit: int | None) -> int:
        return super().count_first(limit) if self.run_initial_validation else 0

    async def make_child(
        self, parent: Candidate, name: str, results: Sequence[TrialResult], sample: int
    ) -> Candidate | None:
        return await self.textual_gradient_and_apply_edit(parent, results, name=name, sample=sample)

    def is_over(self, number: int, rounds_without_gain: int) -> bool:
        if super().is_over(number, rounds_without_gain):
            return True
        if self.patience is not None and rounds_without_gain >= self.patience:
            self.stopped_because = "patience"
        elif number > self.max_rounds:
            self.stopped_because = "rounds"
        return self.stopped_because is not None

    async def compute_textual_gradient(
        self, prompt: Candidate, rollout_results: Sequence[TrialResult], *, name: str | None = None, sample: int = 0
    ) -> str | None:
        """Asks the critic what is wrong with a prompt.

        ``rollout_results`` are rollouts of the candidate ``prompt``, with messages; ``name`` is the prompt to
        criticize, needed if the candidate has several; ``sample`` numbers the calls about the same rollouts. Returns
        None when the call failed or the budget is spent.
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
            call_place("gradient", prompt, name, rollout_results, sample),
            self.models[0],
            [{"role": "user", "content": request}],
            temperature=self.diversity_temperature,
        )

    async def textual_gradient_and_apply_edit(
        self, prompt: Candidate, rollout_results: Sequence[TrialResult], *, name: str | None = None, sample: int = 0
    ) -> Candidate | None:
        """Makes a child: the editor rewrites the prompt to address the critique.

        Returns None when a model call failed, the budget is spent, or edit and repair both broke a placeholder.
        """
        name = prompt.prompt_name(name)
        critique = await self.compute_textual_gradient(prompt, rollout_results, name=name, sample=sample)
        if critique is None:
            return None
        original = prompt.prompts[name]
        template = self._draw_template(self._edit_templates, prompt, name, rollout_results)
        request = template.format(
            name=name, prompt=show_text(original), critique=critique, placeholders=show_placeholders(original)
        )
        place = call_place("edit", prompt, name, rollout_results, sample)
        edited = await self.ask_for_edit(
            place, self.models[1], request, original, temperature=self.diversity_temperature
        )
        return None if edited is None else Candidate.of({**prompt.prompts, name: edited}, prompt, critique=critique)

    async def propose(self, experience: LiveExperience) -> dict[str, PromptTemplate] | None:
        """Makes a child of a service's prompts, for live learning: ``LiveLearning(APO(...).propose)``.

        The critic reads ``gradient_batch_size`` served rollouts: half of them the worst, the rest drawn at random.
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

    @property
    def max_rounds(self) -> float:
        """Maximum number of rounds; infinite if only ``max_rollouts`` ends the search."""
        if self.beam_rounds is not None:
            return self.beam_rounds
        return _ROUNDS if self.max_rollouts is None else math.inf

    def progress(self, number: int) -> float:
        return min(max(number / self.max_rounds, super().progress(number)), 1.0)

    def _draw_template(
        self, templates: Sequence[PromptTemplate], prompt: Candidate, name: str, results: Sequence[TrialResult]
    ) -> PromptTemplate:
        """Draws a template; the choice depends on the prompt and the tasks, not on the run."""
        return self.random_for(prompt.candidate_id, name, repr([result.task for result in results])).choice(templates)
