"""The list of models, in the forms of OpenAI and Anthropic."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

_PATH: Final = re.compile(r"(anthropic/)?v1/models(?:/(.+))?")


def list_models(path: str, names: Sequence[str]) -> dict[str, Any] | None:
    """Answers ``v1/models`` and ``v1/models/NAME``, also below ``anthropic/``; None for other paths and names."""
    match = _PATH.fullmatch(path)
    if match is None:
        return None
    form = _anthropic_model if match[1] else _openai_model
    if match[2] is not None:
        return form(match[2]) if match[2] in names else None
    data = [form(name) for name in names]
    if not match[1]:
        return {"object": "list", "data": data}
    first, last = (names[0], names[-1]) if names else (None, None)
    return {"data": data, "has_more": False, "first_id": first, "last_id": last}


def _openai_model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "agentlightning"}


def _anthropic_model(name: str) -> dict[str, Any]:
    return {"id": name, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
