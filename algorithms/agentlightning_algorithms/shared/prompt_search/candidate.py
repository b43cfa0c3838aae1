"""Candidates: sets of prompts with their lineage and scores."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field

from agentlightning.errors import ConfigError
from agentlightning.frozen import FrozenDict
from agentlightning.resources import PromptTemplate, Resource
from agentlightning_algorithms.shared.prompt_search.placeholder import find_placeholders

CANDIDATE_NAME: Final = "prompt_candidate"
"""The resource name of this record in a candidate's snapshot."""


class Candidate(Resource):
    """One set of prompts with its lineage and scores, stored next to the prompts in a snapshot of resources."""

    resource_type: Literal["prompt_candidate"] = "prompt_candidate"
    candidate_id: str
    """A hash of the prompts."""
    prompts: Annotated[dict[str, PromptTemplate], AfterValidator(FrozenDict)] = Field(repr=False)
    """The tuned prompts by resource name."""
    round: int = 0
    """The round that made it; 0 for the seed."""
    parent_id: str | None = None
    """The candidate that was edited."""
    edited: tuple[str, ...] = ()
    """The names of the prompts that differ from the parent's."""
    critique: str | None = Field(default=None, repr=False)
    """The critique that the edit answers."""
    batch_score: float | None = None
    """Mean reward over its last validation batch; failures and timeouts count as 0."""
    full_score: float | None = None
    """Mean reward over the whole validation set; None if the candidate was not run on all of it."""
    task_scores: tuple[float, ...] = Field(default=(), repr=False)
    """The rewards behind ``full_score``, in the order of the validation set."""

    @classmethod
    def of(cls, prompts: Mapping[str, PromptTemplate], parent: Candidate | None = None, **fields: object) -> Candidate:
        """Makes a candidate of these prompts."""
        text = json.dumps({name: [prompt.engine, prompt.template] for name, prompt in sorted(prompts.items())})
        edited = () if parent is None else tuple(n for n, prompt in prompts.items() if prompt != parent.prompts[n])
        data = {
            "candidate_id": hashlib.blake2b(text.encode(), digest_size=6).hexdigest(),
            "prompts": dict(prompts),
            "parent_id": None if parent is None else parent.candidate_id,
            "edited": edited,
            **fields,
        }
        return cls.model_validate(data)

    @property
    def score(self) -> float | None:
        """The score over the whole validation set, else over a batch of it."""
        return self.batch_score if self.full_score is None else self.full_score

    def prompt_name(self, name: str | None = None) -> str:
        """Returns the name of a prompt; ``name`` may be None if there is only one prompt.

        Raises:
            ConfigError: there is no prompt of this name, or there are several and ``name`` is None.
        """
        names = ", ".join(sorted(self.prompts))
        if name is None and len(self.prompts) > 1:
            raise ConfigError(f"{len(self.prompts)} prompts are tuned; name one of: {names}")
        if name is not None and name not in self.prompts:
            raise ConfigError(f"no prompt {name!r} is tuned; the tuned prompts are {names}")
        return name if name is not None else next(iter(self.prompts))

    def prompt(self, name: str | None = None) -> PromptTemplate:
        """Returns a prompt by its name, which may be None if there is only one."""
        return self.prompts[self.prompt_name(name)]

    def diff(self, older: Candidate) -> str:
        """A unified diff of every prompt from an older candidate; empty when they are equal."""
        changes: list[str] = []
        for name, prompt in self.prompts.items():
            before, after = older.prompts[name].template.splitlines(), prompt.template.splitlines()
            labels = f"{name} ({older.candidate_id})", f"{name} ({self.candidate_id})"
            changes += difflib.unified_diff(before, after, *labels, lineterm="", n=99)
        return "\n".join(changes)


def choose_prompts(
    resources: Mapping[str, Resource], wanted: Sequence[str] | None, *, skip_untunable: bool = False
) -> dict[str, PromptTemplate]:
    """Returns the prompts to tune: all prompts, or those named in ``wanted``.

    With ``skip_untunable``, prompts that cannot be tuned are skipped if others remain.

    Raises:
        ConfigError: there is no prompt, a wanted prompt does not exist, or a prompt cannot be tuned.
    """
    known = {name: value for name, value in resources.items() if isinstance(value, PromptTemplate)}
    if not known:
        raise ConfigError(
            "there is no prompt to tune: give one as in Trainer(initial_resources={'prompt': 'Answer: {question}'}); "
            f"resources: {', '.join(sorted(resources)) or 'none'}"
        )
    if wanted is not None and (not wanted or any(name not in known for name in wanted)):
        raise ConfigError(f"prompts = {list(wanted)}: the prompts of this run are {', '.join(sorted(known))}")
    chosen = {name: known[name] for name in (sorted(known) if wanted is None else wanted)}
    errors: dict[str, ConfigError] = {}
    for name, prompt in chosen.items():
        try:
            find_placeholders(prompt)
        except ConfigError as error:
            errors[name] = error
    if errors and (not skip_untunable or len(errors) == len(chosen)):
        name, cause = next(iter(errors.items()))
        raise ConfigError(f"prompt {name!r}: {cause}") from cause
    return {name: prompt for name, prompt in chosen.items() if name not in errors}
