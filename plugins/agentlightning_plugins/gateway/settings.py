"""What a gateway server is started with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentlightning_plugins.gateway.backends.health import INTERVAL_S
from agentlightning_plugins.gateway.limits.admission import PAUSE_WAIT_S
from agentlightning_plugins.gateway.limits.budget import Budget

READ_TIMEOUT_S = 600.0
"""What the openai client allows."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Plain values, which travel to another process."""

    host: str = "127.0.0.1"
    port: int = 0
    num_retries: int = 2
    model_list: list[Mapping[str, Any]] = field(default_factory=list)
    requires_keys: bool = False
    budget: Budget = field(default_factory=Budget)
    read_timeout_s: float = READ_TIMEOUT_S
    """How long a backend may be silent."""
    health_interval_s: float = INTERVAL_S
    pause_wait_s: float = PAUSE_WAIT_S
    """How long a call waits for the end of a pause before it gets 429."""
    weight_version: int | None = None
    """Of the weights that the first calls get."""
