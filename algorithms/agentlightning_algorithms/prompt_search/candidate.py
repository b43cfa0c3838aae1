"""A candidate: prompts that were tried, where they came from and what they earned."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field

from agentlightning.errors import ConfigError
from agentlightning.frozen import FrozenDict
from agentlightning.resources import PromptTemplate, Resource

CANDIDATE_NAME: Final = "prompt_candidate"
"""The name of this record among the resources of a candidate's snapshot."""


class Candidate(Resource):
    """One set of prompts, with its lineage and scores. It is stored beside them in its snapshot of resources."""

    resource_type: Literal["prompt_candidate"] = "prompt_candidate"
    candidate_id: str
    """A hash of the prompts."""
    prompts: Annotated[dict[str, PromptTemplate], AfterValidator(FrozenDict)] = Field(repr=False)
    """The prompts that are tuned, by the name of their resource."""
    round: int = 0
    """In which it was made; the seed's is 0."""
    parent_id: str | None = None
    """The candidate it is an edit of."""
    edited: tuple[str, ...] = ()
    """The names of the prompts that differ from the parent's."""
    critique: str | None = Field(default=None, repr=False)
    """What the edit was made for."""
    batch_score: float | None = None
    """Mean reward over the validation batch that it was last compared on; failures and time-outs count as 0."""
    full_score: float | None = None
    """Mean reward over the whole validation set, where it was tried on it."""

    @classmethod
    def of(cls, prompts: Mapping[str, PromptTemplate], parent: Candidate | None = None, **fields: object) -> Candidate:
        """A candidate of these prompts."""
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
        """The best that is known: over the whole validation set, else over a batch of it."""
        return self.batch_score if self.full_score is None else self.full_score

    def prompt(self, name: str | None = None) -> PromptTemplate:
        """One of the prompts; without a name, the only one.

        Raises:
            ConfigError: there is none of this name, or there are several and none is named.
        """
        names = ", ".join(sorted(self.prompts))
        if name is None and len(self.prompts) > 1:
            raise ConfigError(f"{len(self.prompts)} prompts are tuned; name one of: {names}")
        if name is not None and name not in self.prompts:
            raise ConfigError(f"no prompt {name!r} is tuned; tuned: {names}")
        return self.prompts[name] if name is not None else next(iter(self.prompts.values()))

    def diff(self, older: Candidate) -> str:
        """What changed since an older candidate, prompt by prompt, as a unified diff; empty when nothing did."""
        changes: list[str] = []
        for name, prompt in self.prompts.items():
            before, after = older.prompts[name].template.splitlines(), prompt.template.splitlines()
            labels = f"{name} ({older.candidate_id})", f"{name} ({self.candidate_id})"
            changes += difflib.unified_diff(before, after, *labels, lineterm="", n=99)
        return "\n".join(changes)
