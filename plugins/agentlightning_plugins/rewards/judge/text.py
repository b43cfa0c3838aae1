"""The text of tasks and answers, for models that rate them."""

from __future__ import annotations

import json
from typing import Any


def to_text(value: Any) -> str:
    """Returns a text as it is, and anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
