"""The typed events of a run.

The store publishes an event after its change is durable, so every process that can reach the store sees the same
stream. ``store.subscribe``, trackers, plugins and the dashboard read it.
"""

import time
from typing import Annotated, Final, Literal, TypeAlias, get_args

from pydantic import ConfigDict, Field

from agentlightning.records import (
    DEFAULT_RUN_ID,
    AttemptStatus,
    JsonObject,
    Record,
    RolloutMode,
    RolloutStatus,
    RunStatus,
)


class _Event(Record):
    model_config = ConfigDict(extra="ignore")  # a newer server may add fields

    run_id: str = DEFAULT_RUN_ID
    time: float = Field(default_factory=time.time)


class RolloutEnqueued(_Event):
    """A rollout entered the queue, for the first time or again."""

    kind: Literal["rollout_enqueued"] = "rollout_enqueued"
    rollout_id: str


class RolloutStarted(_Event):
    """A worker took a rollout."""

    kind: Literal["rollout_started"] = "rollout_started"
    rollout_id: str
    attempt_id: str
    worker_id: str | None = None


class AttemptFinished(_Event):
    """An attempt ended; the rollout may be tried again."""

    kind: Literal["attempt_finished"] = "attempt_finished"
    rollout_id: str
    attempt_id: str
    status: AttemptStatus
    error: str | None = None
    """Type and message of the error that ended the attempt."""
    reward: float | None = None


class AttemptRevoked(_Event):
    """The store ended an attempt (cancelled, timed out, lost): its worker must stop it."""

    kind: Literal["attempt_revoked"] = "attempt_revoked"
    rollout_id: str
    attempt_id: str
    reason: Literal["cancelled", "timeout", "unresponsive"]


class RolloutFinished(_Event):
    """A rollout ended as succeeded, failed or cancelled."""

    kind: Literal["rollout_finished"] = "rollout_finished"
    rollout_id: str
    status: RolloutStatus
    mode: RolloutMode | None = None


class ResourcesPublished(_Event):
    """A new snapshot, or a new version of a snapshot, was published."""

    kind: Literal["resources_published"] = "resources_published"
    resources_id: str
    version: int


class StepFinished(_Event):
    """An algorithm recorded the metrics of a step."""

    kind: Literal["step_finished"] = "step_finished"
    step: int
    values: JsonObject


class RunStarted(_Event):
    """A run was created."""

    kind: Literal["run_started"] = "run_started"
    name: str


class RunFinished(_Event):
    """A run ended."""

    kind: Literal["run_finished"] = "run_finished"
    status: RunStatus


Event: TypeAlias = Annotated[
    RolloutEnqueued
    | RolloutStarted
    | AttemptFinished
    | AttemptRevoked
    | RolloutFinished
    | ResourcesPublished
    | StepFinished
    | RunStarted
    | RunFinished,
    Field(discriminator="kind"),
]

EVENT_KINDS: Final[tuple[str, ...]] = tuple(kind.model_fields["kind"].default for kind in get_args(get_args(Event)[0]))
