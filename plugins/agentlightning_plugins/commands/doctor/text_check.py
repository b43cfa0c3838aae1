"""The checks ``task`` and ``prompts``: the texts of the rollout's task and prompts reach a model."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from agentlightning import semconv
from agentlightning.resources import PromptTemplate
from agentlightning.types import Span
from agentlightning_plugins.commands.doctor.check import Check, broken, ok, one_line, unchecked

_MIN_LINE_CHARS: Final = 8
"""A text is found if one of its lines of at least this length is found, because agents may send only a part of it."""
_JINJA: Final = re.compile(r"\{\{.*?\}\}|\{%.*?%\}|\{#.*?#\}", re.DOTALL)


def check_task(task: Any, calls: Sequence[Span]) -> Check:
    """Checks that a text or number of the task occurs in the input of a model call."""
    wanted = [text for text in _leaves(task) if text.strip()]
    if not calls or not wanted:
        return unchecked("task", "no model call is recorded" if wanted else "the task has no text")
    sent = _sent(calls)
    if any(_occurs(text, sent) for text in wanted):
        return ok("task", "a model call contains the task")
    fix = "pass the task to the model: use the agent's first parameter, or task_to_input of agl.wrap"
    return broken("task", f"no model call contains any part of the task {one_line(repr(task), 80)}", fix)


def check_prompts(prompts: Mapping[str, PromptTemplate], calls: Sequence[Span]) -> Check:
    """Checks that the fixed text of each prompt occurs in the input of a model call."""
    fixed = {name: text for name, prompt in prompts.items() if (text := _longest_text(prompt))}
    if not calls or not fixed:
        return unchecked("prompts", "no model call is recorded" if fixed else "no prompt has fixed text to search for")
    sent = _sent(calls)
    unused = [name for name, text in fixed.items() if not _occurs(text, sent)]
    if not unused:
        return ok("prompts", f"model calls contain {', '.join(fixed)}")
    fix = "use the prompt that the agent gets as a parameter of this name; training changes no other text"
    return broken("prompts", f"no model call contains the text of {', '.join(unused)}", fix)


def _sent(calls: Iterable[Span]) -> str:
    """Returns the input of all calls as one text."""
    texts: list[str] = []
    for span in calls:
        texts += _leaves(semconv.read_input_messages(span))
        texts += _leaves(span.attributes.get(semconv.GEN_AI_SYSTEM_INSTRUCTIONS))
    return _normalize("\n".join(texts).replace("\\n", "\n").replace('\\"', '"'))  # texts may be in JSON


def _leaves(value: Any) -> Iterator[str]:
    """Yields the texts and numbers in nested lists and mappings."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for child in value:
            yield from _leaves(child)
    elif value is not None and not isinstance(value, bool):
        yield str(value)


def _occurs(text: str, sent: str) -> bool:
    lines = [line for line in text.splitlines() if len(line.strip()) >= _MIN_LINE_CHARS]
    return any(re.search(rf"(?<!\w){re.escape(_normalize(part))}(?!\w)", sent) for part in (text, *lines))


def _longest_text(prompt: PromptTemplate) -> str:
    if prompt.engine == "f-string":
        parts = [literal for literal, *_ in string.Formatter().parse(prompt.template)]
    elif prompt.engine == "jinja":
        parts = _JINJA.split(prompt.template)
    else:  # with other engines, the template may not contain the text that is sent
        return ""
    return max((part.strip() for part in parts if re.search(r"\w", part)), key=len, default="")


def _normalize(text: str) -> str:
    return " ".join(text.split()).casefold()
