"""The settings of a gateway server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentlightning_plugins.gateway.limits.usage import UsageLimits


@dataclass(frozen=True, slots=True)
class Settings:
    """Plain values, which can be sent to another process. ``LLMProxy`` documents them."""

    host: str
    port: int
    num_retries: int
    require_keys: bool
    limits: UsageLimits
    read_timeout_s: float
    health_interval_s: float
    pause_wait_s: float
    cache: bool
    operator_key: str = field(repr=False)
    """Key whose holder may operate the gateway, as with the store's token."""
    model_list: Sequence[Mapping[str, Any]] = ()
    weight_version: int | None = None
    """Version of the weights that serve the first calls."""
