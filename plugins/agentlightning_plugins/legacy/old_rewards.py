"""Reads the rewards that Agent Lightning 0.1 and 0.2 recorded."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from agentlightning import semconv
from agentlightning.records import Span

_OUTPUTS: Final = ("agentops.task.output", "agentops.entity.output")


def _read_reward(span: Span) -> Any:
    for key in _OUTPUTS:  # the JSON that a function decorated with @reward returned
        output = span.attributes.get(key)
        if isinstance(output, str):
            try:
                output = json.loads(output)
            except ValueError:
                continue
        if isinstance(output, Mapping) and output.get("type") == "reward":
            return output.get("value")
    return span.attributes.get("reward") if span.name == semconv.SPAN_REWARD else None


READER: Final[Mapping[str, Callable[[Span], Any]]] = {f"{semconv.REWARD}.0.value": _read_reward}
