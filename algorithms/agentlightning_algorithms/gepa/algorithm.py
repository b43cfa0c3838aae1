"""``gepa``: reflective evolution of prompts, with the reflection prompt of the package ``gepa``.

Agrawal et al. 2025, GEPA: Reflective Prompt Evolution Can Outperform Reinforcement Learning, arXiv:2507.19457.
Parents and survivors are chosen by races instead of a Pareto front, which learned less from noisy rewards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gepa.strategies.instruction_proposal import InstructionProposalSignature

from agentlightning.errors import ConfigError
from agentlightning.plugin.settings import require_least
from agentlightning_algorithms.shared.prompt_search.candidate import Candidate, show_placeholders, show_text
from agentlightning_algorithms.shared.prompt_search.chat import find_critic
from agentlightning_algorithms.shared.prompt_search.critique import (
    ROLLOUT_CHARS,
    shorten_middle,
    show_feedback,
    show_messages,
)
from agentlightning_algorithms.shared.prompt_search.race import RacingSearch
from agentlightning_algorithms.shared.prompt_search.trial import TrialResult, call_place


@dataclass(eq=False, repr=False, kw_only=True)
class GEPA(RacingSearch):
    """Improves prompts by reflection on failures: one child at a time, which races against its parent."""

    reflection_model: str | None = None
    """The model that rewrites prompts. None: the one that ``AGL_CRITIC_MODEL``, else ``OPENAI_MODEL``, names."""
    temperature: float = 1.0
    """Sampling temperature of the reflection model."""
    minibatch_size: int = 8
    """Maximum number of rollouts that one reflection reads; failures come first."""
    max_rollouts: int | None = 500
    reflection_prompt: str | Mapping[str, str] | None = None
    """Replacement for gepa's reflection prompt, with ``<curr_param>`` and ``<side_info>``; one for each prompt by name,
    or one for all."""

    def __post_init__(self) -> None:
        require_least(1, minibatch_size=self.minibatch_size)
        if self.max_rollouts is None:
            raise ConfigError("max_rollouts = None: gepa ends when its rollouts are spent; give a number")
        super().__post_init__()
        given = self.reflection_prompt
        try:
            for template in given.values() if isinstance(given, Mapping) else (given,):
                InstructionProposalSignature.validate_prompt_template(template)
        except ValueError as error:
            raise ConfigError(f"reflection_prompt: {error}") from error

    @property
    def models(self) -> Sequence[str]:
        """The model that reflects; raises ConfigError if nothing names it."""
        return (find_critic("reflection_model", self.reflection_model),)

    @property
    def shape(self) -> tuple[int, int]:
        return 1, 1

    @property
    def n_examples(self) -> int:
        return self.minibatch_size

    async def make_child(
        self, parent: Candidate, name: str, results: Sequence[TrialResult], sample: int
    ) -> Candidate | None:
        """Makes a child by rewriting the prompt ``name`` based on these rollouts; returns None if that failed."""
        original, template = parent.prompts[name], self.reflection_prompt
        if isinstance(template, Mapping):
            template = template.get(name)
        request = InstructionProposalSignature.prompt_renderer(
            {
                "current_instruction_doc": show_text(original),
                "dataset_with_feedback": [_to_record(result, name) for result in results],
                "prompt_template": template,
            }
        )
        edited = await self.ask_for_edit(
            call_place("reflect", parent, name, results, sample),
            self.models[0],
            f"{request}\n\nKeep the placeholders as they are, and add no others: {show_placeholders(original)}.",
            original,
            temperature=self.temperature,
            read=lambda answer: InstructionProposalSignature.output_extractor(answer)["new_instruction"],
        )
        return None if edited is None else Candidate.of({**parent.prompts, name: edited}, parent)


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
