"""The reward ``graders``: the mean of several graders in the form of OpenAI's Evals, and of other rewards."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from agentlightning.errors import ConfigError
from agentlightning.plugin.hookspecs import Component, hookimpl
from agentlightning.plugin.registry import get_manager
from agentlightning.types import Rollout
from agentlightning_plugins.shared.configuration.sources import load_attribute


@hookimpl
def components() -> list[Component]:
    return [Component("reward", "graders", f"{__name__}:Graders", summary="the mean of graders of OpenAI's Evals")]


class Graders:
    """The mean of graders; one with a ``pass_threshold`` gives 1 or 0."""

    def __init__(self, graders: Sequence[str | dict[str, Any]]) -> None:
        """Checks the graders.

        Args:
            graders: ``{type: string_check, input, operation, reference}`` with ``eq``, ``ne``, ``like`` or ``ilike``;
                ``{type: text_similarity, input, evaluation_metric: fuzzy_match, reference}``; or another reward: its
                name, ``module:attribute``, or a mapping with its ``name`` and settings. Texts may have
                ``{{item.KEY}}``, a field of the task, and ``{{sample.output_text}}``, the answer.

        Raises:
            ConfigError: a grader is unknown or incomplete.
        """
        if not graders:
            raise ConfigError("graders is empty; give at least one grader")
        given = [{"name": each} if isinstance(each, str) else dict(each) for each in graders]
        self._graders = [(each.pop("pass_threshold", None), _make(each)) for each in given]

    async def __call__(self, task: Any, output: Any, rollout: Rollout) -> tuple[float, str]:
        """Returns the mean, and the feedback of those graders that give one."""
        total, said = 0.0, []
        for threshold, grader in self._graders:
            value = grader(task, output, rollout)
            value = await value if inspect.isawaitable(value) else value
            score, feedback = value if isinstance(value, tuple) else (value, "")
            said += [feedback] if feedback else []
            total += float(score if threshold is None else score >= threshold)
        return total / len(self._graders), "\n".join(said)


def _make(spec: dict[str, Any]) -> Any:
    if "type" not in spec:
        name = str(spec.get("name", ""))
        return load_attribute(name) if ":" in name else get_manager().create("reward", spec)
    operation = spec.get("operation", spec.get("evaluation_metric"))
    if operation not in _OPERATIONS or not {"input", "reference"} <= spec.keys():
        raise ConfigError(f"graders: {spec!r:.200} needs input, reference, and one of {', '.join(_OPERATIONS)}")
    return lambda task, output, rollout: _OPERATIONS[operation](
        _fill(spec["input"], task, output), _fill(spec["reference"], task, output)
    )


def _fill(template: str, task: Any, output: Any) -> str:
    def find(match: re.Match[str]) -> str:
        value: Any = {"item": task, "sample": {"output_text": output}}
        for part in match[1].split("."):
            if not isinstance(value, Mapping) or part not in value:
                raise ConfigError(f"graders: {match[0]} in {template!r:.100}: there is no {part!r} in {value!r:.100}")
            value = value[part]
        return str(value)

    return re.sub(r"\{\{\s*([\w.]+)\s*\}\}", find, template)


def _compare(first: str, second: str) -> float:
    """Returns RapidFuzz's ratio, as OpenAI: 2 · length of the longest common subsequence / length of both texts."""
    row = [0] * (len(second) + 1)
    for item in first:
        before = 0
        for place, other in enumerate(second, 1):
            before, row[place] = row[place], before + 1 if item == other else max(row[place], row[place - 1])
    return 2 * row[-1] / (len(first) + len(second)) if first or second else 1.0


_OPERATIONS: Final = {
    "eq": lambda text, reference: text == reference,
    "ne": lambda text, reference: text != reference,
    "like": lambda text, reference: reference in text,
    "ilike": lambda text, reference: reference.lower() in text.lower(),
    "fuzzy_match": _compare,
}
