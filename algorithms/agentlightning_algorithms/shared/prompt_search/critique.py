"""The prompts of critic and editor, and how rollouts are shown to them. Users can replace each prompt."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

from agentlightning.adapter.call import State
from agentlightning.errors import ConfigError
from agentlightning.resources import PromptTemplate
from agentlightning_algorithms.shared.prompt_search.trial import TrialResult
from agentlightning_plugins.shared.chat_history import ChatHistory, drop_prefixes

ROLLOUT_CHARS: Final = 6000
"""Maximum number of characters of a rollout that a critic reads; longer texts are shortened in the middle."""
FEEDBACK_CHARS: Final = 3000
"""Maximum number of characters of the feedback on a rollout, which is not part of ``ROLLOUT_CHARS``."""

GRADIENT_PROMPTS: Final = (
    PromptTemplate(
        """You review the prompt of an AI agent. Below are the prompt and what happened when the agent used it on some \
tasks. The reward of a rollout says how well it went; more is better. Its feedback, if there is any, says why.

<prompt name="{name}">
{prompt}
</prompt>
{other_prompts}
{rollouts}

Find out why rollouts failed or earned less than others, as far as the prompt is the reason. Compare good ones with \
bad ones. Then write a short critique of the prompt: what it fails to say, says wrongly or says unclearly, and what it \
should say instead. Be concrete, and general enough for tasks that are not shown. Name at most five points, the \
weightiest first. Do not write the new prompt."""
    ),
    PromptTemplate(
        """The text below instructs an AI agent. The rollouts after it show how the agent did: its task, what was \
said, whether it failed, the reward it got, where more is better, and feedback if there is any.

<prompt name="{name}">
{prompt}
</prompt>
{other_prompts}
{rollouts}

Assume that the instructions can be made better by a different way of thinking about the task, not by polishing words. \
From the rollouts, infer what earns reward here: knowledge about the tasks, steps to take, the form of the answer. Say \
which of it the instructions lack, and which of their parts do harm. Give at most five points. Do not write the new \
instructions."""
    ),
)
"""Each child draws one of them: different questions find different faults."""

EDIT_PROMPTS: Final = (
    PromptTemplate(
        """Rewrite the prompt of an AI agent so that it meets a critique.

<prompt name="{name}">
{prompt}
</prompt>

<critique>
{critique}
</critique>

Keep what the critique does not touch. Keep every placeholder exactly as it is written, and add no others: \
{placeholders}. Answer with the whole new prompt between <prompt> and </prompt>, and nothing else."""
    ),
)

REPAIR_PROMPT: Final = PromptTemplate(
    """The new prompt cannot be used: {problem}. The placeholders are filled by a program; each must be there exactly \
as written, and no others: {placeholders}. Answer in the same form as before, with the whole corrected prompt and \
nothing else."""
)


Templates: TypeAlias = str | PromptTemplate | Sequence[str | PromptTemplate] | None


def read_prompt(answer: str) -> str:
    """Returns the prompt in an editor's answer: the text between its tags, or else all text without its code fence."""
    inner = answer.rpartition("</prompt>")[0]
    tag = re.search(r"<prompt[^<>]*>", inner)
    if tag is not None:
        return inner[tag.end() :].strip()
    fenced = re.fullmatch(r"\s*```\w*\n(.*?)\n?```\s*", answer, re.DOTALL)
    return (answer if fenced is None else fenced[1]).strip()


def show_rollouts(results: Sequence[TrialResult], name: str) -> str:
    """Formats rollouts for a critic of the prompt ``name``."""
    return "\n\n".join(_show_rollout(number, result, name) for number, result in enumerate(results, 1))


def show_feedback(result: TrialResult, name: str) -> str:
    """Returns the feedback on a rollout that is about the prompt ``name`` or about all prompts; empty if none is."""
    texts = [feedback.text for feedback in result.feedback if feedback.prompt in (None, name)]
    return shorten_middle("\n".join(texts), FEEDBACK_CHARS)


def show_messages(histories: Sequence[ChatHistory]) -> str:
    """Formats chats, each conversation once."""
    return "\n---\n".join("\n".join(map(_show_message, each["messages"])) for each in drop_prefixes(histories))


def show_states(states: Sequence[State]) -> str:
    """Formats the semantic variables of an agent: of each state, only the new and the changed ones."""
    changes = ((number, change) for number, state in enumerate(states, 1) for change in state.changed.items())
    return "\n".join(f"{number}. {name} = {_to_text(value)}" for number, (name, value) in changes)


def shorten_middle(text: str, length: int) -> str:
    """Removes the middle of a text that is longer than ``length``."""
    if len(text) <= length:
        return text
    head = length // 2
    return f"{text[:head]}\n[{len(text) - length} characters left out]\n{text[head - length :]}"


def _show_rollout(number: int, result: TrialResult, name: str) -> str:
    reward = "none" if result.reward is None else f"{result.reward:g}"
    parts = [f"<task>{_to_text(result.task)}</task>"]
    if result.states:
        parts.append(f"<states>\n{show_states(result.states)}\n</states>")
    if result.messages:
        parts.append(f"<messages>\n{show_messages(result.messages)}\n</messages>")
    if result.output is not None:
        parts.append(f"<output>{result.output.strip()}</output>")
    if result.error is not None:
        parts.append(f"<error>{result.error}</error>")
    body = shorten_middle("\n".join(parts), ROLLOUT_CHARS)
    if feedback := show_feedback(result, name):
        body += f"\n<feedback>\n{feedback}\n</feedback>"
    return f'<rollout number="{number}" status="{result.status}" reward="{reward}">\n{body}\n</rollout>'


def _show_message(message: dict[str, Any]) -> str:
    shown = f"[{message.get('role')}] {_to_text(message.get('content') or '')}"
    for call in message.get("tool_calls") or ():
        function = call.get("function", {})
        shown += f"\n  calls {function.get('name')}({_to_text(function.get('arguments', ''))})"
    return shown


def _to_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def read_templates(name: str, given: Templates, default: Sequence[PromptTemplate]) -> tuple[PromptTemplate, ...]:
    """Returns the user's prompts or, for None, the default; a plain str is an f-string template."""
    if given is None:
        return tuple(default)
    several = [given] if isinstance(given, (str, PromptTemplate)) else list(given)
    if not several or not all(isinstance(each, (str, PromptTemplate)) for each in several):
        raise ConfigError(f"{name} = {given!r}: give a prompt template or several, of which each call draws one")
    return tuple(PromptTemplate(each) if isinstance(each, str) else each for each in several)
