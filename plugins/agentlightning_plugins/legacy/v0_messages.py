"""The messages of Agent Lightning 0.1."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from agentlightning.types import Triplet


class Task(BaseModel):
    """A claimed rollout."""

    rollout_id: str
    input: Any
    mode: str | None = None
    resources_id: str | None = None
    create_time: float | None = None
    last_claim_time: float | None = None
    num_claims: int | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)


class TaskIfAny(BaseModel):
    """The answer of ``/task``."""

    is_available: bool
    task: Task | None = None


class RolloutLegacy(BaseModel):
    """The report of an agent on a rollout."""

    rollout_id: str
    task: Task | None = None
    final_reward: float | None = None
    triplets: list[Triplet] | None = None
    trace: list[dict[str, Any]] | None = None
    """Spans as ``json.loads(readable_span.to_json())`` of OpenTelemetry, or as our own JSON."""
    logs: list[str] | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
