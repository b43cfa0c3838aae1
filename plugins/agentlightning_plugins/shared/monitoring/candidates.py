"""Candidates of a prompt search: the best one, and the distributions of scores and of the rewards of tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from agentlightning.resources import ResourcesUpdate

CANDIDATE: Final = "prompt_candidate"
"""Name of the resource that holds a candidate of a prompt search."""


def read_candidate(update: ResourcesUpdate | None) -> dict[str, Any]:
    """Returns the fields of the candidate in a version of resources; empty without a candidate."""
    candidate = None if update is None else update.resources.get(CANDIDATE)
    return {} if candidate is None else candidate.model_dump(mode="json")


def find_best(candidates: Sequence[Mapping[str, Any]], published: Mapping[str, str]) -> Mapping[str, Any]:
    """Returns the candidate with the highest score over the whole validation set; without such scores, the first.

    If several candidates have this score, the published one is returned.

    Args:
        candidates: the fields of each candidate with its latest scores, oldest candidate first; at least one.
        published: the templates of the latest prompts, by name.
    """
    scored = [each for each in candidates if each.get("full_score") is not None]
    return max(
        scored,
        key=lambda each: (float(each["full_score"]), is_published(each, published)),
        default=candidates[0],
    )


def is_published(candidate: Mapping[str, Any], published: Mapping[str, str]) -> bool:
    """Whether all prompts of a candidate are published; ``published`` has the published templates by name."""
    return all(published.get(name) == prompt["template"] for name, prompt in candidate["prompts"].items())


def list_distributions(candidates: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the scores of all candidates and the task rewards of the seed and the best, each as ``name``, ``values``.

    Args:
        candidates: the fields of each candidate with its latest scores, oldest candidate first.
    """
    scores = [_score(each) for each in candidates]
    found = [{"name": "scores of the candidates", "values": [score for score in scores if score is not None]}]
    tested = [each for each in candidates if each.get("task_scores")]
    scored = [each for each in tested if each.get("full_score") is not None]
    best = max(scored, key=lambda each: float(each["full_score"]), default=tested[0] if tested else None)
    seed = next((each for each in tested if not each.get("parent_id")), None)
    if seed is not None and seed is not best:
        found.append({"name": "task rewards of the seed", "values": list(seed["task_scores"])})
    if best is not None:
        found.append({"name": "task rewards of the best candidate", "values": list(best["task_scores"])})
    return [each for each in found if len(each["values"]) > 1]


def _score(candidate: Mapping[str, Any]) -> float | None:
    """Returns the mean reward on the whole validation set or, if there is none, on a batch of it."""
    full: float | None = candidate.get("full_score")
    return candidate.get("batch_score") if full is None else full
