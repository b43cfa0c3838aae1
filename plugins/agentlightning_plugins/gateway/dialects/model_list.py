"""Which models there are, as the clients of OpenAI and of Anthropic ask for them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

_PATH: Final = re.compile(r"(anthropic/)?v1/models(?:/(.+))?")


def list_models(path: str, names: Sequence[str]) -> dict[str, Any] | None:
    """The answer to a request for the models or for one of them; None when the path asks for neither.

    Args:
        path: such as ``v1/models``, ``v1/models/NAME`` and the same below ``anthropic/``.
        names: of all models.
    """
    match = _PATH.fullmatch(path)
    if match is None:
        return None
    form = _of_anthropic if match[1] else _of_openai
    if match[2] is not None:
        return form(match[2]) if match[2] in names else None
    listed: dict[str, Any] = {"object": "list", "data": [form(name) for name in names]}
    if match[1]:
        ends = {"first_id": names[0], "last_id": names[-1]} if names else {"first_id": None, "last_id": None}
        listed = {"data": listed["data"], "has_more": False, **ends}
    return listed


def _of_openai(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "agentlightning"}


def _of_anthropic(name: str) -> dict[str, Any]:
    return {"id": name, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
