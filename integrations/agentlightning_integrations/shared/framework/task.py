"""Reads the input of an agent from a task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from agentlightning.errors import ConfigError

_FIELDS: Final = ("question", "input", "prompt", "messages")


def read_input(task: Any, taker: str) -> Any:
    """Returns the text or the list of messages in a task.

    Args:
        task: a mapping with one of the fields ``question``, ``input``, ``prompt`` and ``messages``, whose other fields,
            such as the expected answer, are for the reward function. Anything else is returned unchanged.
        taker: the recipient of the input, named in the error, such as ``an agent of AutoGen``.

    Raises:
        ConfigError: the mapping has none or several of the fields, or the value is neither a text nor a list.
    """
    if not isinstance(task, Mapping):
        return task
    found = [name for name in _FIELDS if name in task]
    if len(found) == 1 and isinstance(task[found[0]], (str, list)):
        return task[found[0]]
    fields = ", ".join(map(repr, task)) or "none"
    raise ConfigError(
        f"{taker} takes a text or messages, but the task is a mapping with the fields {fields}; exactly one of "
        f"{', '.join(_FIELDS)} must be a text or a list. Otherwise use agl.wrap(agent, task_to_input=lambda task: ...)"
    )


def message_text(message: Any) -> tuple[str, str]:
    """Returns role and text of a chat message in OpenAI's format.

    Raises:
        ConfigError: the message has no text.
    """
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, str):
        raise ConfigError(f"message {message!r:.200} has no text; convert the task with task_to_input")
    return str(message.get("role", "user")), content
