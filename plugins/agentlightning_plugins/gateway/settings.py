"""The settings of a gateway server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentlightning_plugins.gateway.backends.health import INTERVAL_S
from agentlightning_plugins.gateway.limits.admission import PAUSE_WAIT_S
from agentlightning_plugins.gateway.limits.usage import UsageLimits

READ_TIMEOUT_S = 600.0
"""The default of the openai client."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Plain values, which can be sent to another process. ``LLMProxy`` documents them."""

    host: str = "127.0.0.1"
    port: int = 0
    num_retries: int = 2
    model_list: Sequence[Mapping[str, Any]] = ()
    require_keys: bool = False
    limits: UsageLimits = field(default_factory=UsageLimits)
    read_timeout_s: float = READ_TIMEOUT_S
    health_interval_s: float = INTERVAL_S
    pause_wait_s: float = PAUSE_WAIT_S
    weight_version: int | None = None
    """Of the weights that the first calls get."""
