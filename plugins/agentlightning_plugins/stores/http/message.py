"""What store client and store server say to each other: the bodies of requests, error codes and fixed names.

A body is a TypedDict named after the store method it calls; its keys are that method's arguments. An absent key means
that the argument was not given, which is not the same as null.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Required, TypeAlias, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, FiniteFloat, with_config
from typing_extensions import TypedDict  # pydantic refuses typing's before Python 3.12

from agentlightning.errors import ConfigError, ConflictError, LightningError, NotFoundError
from agentlightning.resources import AnyResource
from agentlightning.types import (
    AttemptFailure,
    AttemptStatus,
    EnqueueRolloutRequest,
    FilterLogic,
    JsonObject,
    RolloutConfig,
    RolloutMode,
    RolloutStatus,
    RunStatus,
    SortOrder,
    Span,
    WorkerStatus,
)

PREFIX: Final = "/v1/agl"
RUN_HEADER: Final = "agl-run"
"""Names the run that a request is about; without it, the run ``default``."""
FEATURES_HEADER: Final = "agl-features"
"""On every answer: the capabilities of the store behind the server, separated by commas."""
TOKEN_VARIABLE: Final = "AGL_TOKEN"

MAX_POLL_S: Final = 30.0
"""The longest that one request waits; a client that wants to wait longer asks again."""
MAX_BODY_BYTES: Final = 64 * 2**20
"""Of a request, after decompression."""
MAX_ITEM_BYTES: Final = 8 * 2**20
"""Of one rollout, span, snapshot or other value in a request, as JSON."""
MAX_BATCH: Final = 100_000
"""The most rollouts, spans or ids in one request."""

ErrorCode: TypeAlias = Literal[
    "malformed",
    "unauthorized",
    "forbidden",
    "not_found",
    "no_route",
    "conflict",
    "too_large",
    "invalid",
    "internal",
    "store_failed",
]
ERROR_STATUS: Final[dict[ErrorCode, int]] = {
    "malformed": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "not_found": 404,
    "no_route": 404,
    "conflict": 409,
    "too_large": 413,
    "invalid": 422,
    "internal": 500,
    "store_failed": 503,
}
ERROR_TYPES: Final[dict[str, type[LightningError]]] = {
    "malformed": ConfigError,
    "unauthorized": ConfigError,
    "forbidden": ConfigError,
    "not_found": NotFoundError,
    "conflict": ConflictError,
    "too_large": ConfigError,
    "invalid": ConfigError,
}
"""What the client raises for a code; StoreError for any other."""


class ErrorAnswer(TypedDict):
    """The body of every answer that is an error."""

    code: ErrorCode
    message: str


T = TypeVar("T")
Batch: TypeAlias = Annotated[list[T], Field(max_length=MAX_BATCH)]

Limit: TypeAlias = Annotated[int, Field(ge=-1)]
Offset: TypeAlias = Annotated[int, Field(ge=0)]
Seconds: TypeAlias = Annotated[float, Field(ge=0)]


def _list_to_tuple(value: Any) -> Any:
    """JSON has no tuples, and what was parsed already is not made one by a strict validation."""
    return tuple(value) if isinstance(value, list) else value


_strict = with_config(ConfigDict(extra="forbid"))


@_strict
class StartRollout(TypedDict, total=False):
    input: Required[Any]
    mode: RolloutMode | None
    resources_id: str | None
    config: RolloutConfig | None
    metadata: JsonObject | None
    worker_id: str | None


@_strict
class EnqueueRollouts(TypedDict):
    rollouts: Batch[EnqueueRolloutRequest]


@_strict
class DequeueRollouts(TypedDict, total=False):
    limit: Annotated[int, Field(ge=0)]
    worker_id: str | None
    timeout: Seconds
    request_id: str | None
    """Chosen by the client; asking again with the same id gives the same rollouts, for a minute."""


@_strict
class ReleaseRollouts(TypedDict):
    request_id: str
    """Of a dequeue whose answer nobody waits for any more."""


@_strict
class StartAttempt(TypedDict, total=False):
    worker_id: str | None


@_strict
class MintToken(TypedDict, total=False):
    lifetime_s: Annotated[float, Field(gt=0, le=31_536_000)]
    """Seconds from now; without it, a day."""


@_strict
class QueryRollouts(TypedDict, total=False):
    status_in: list[RolloutStatus] | None
    rollout_id_in: Batch[str] | None
    rollout_id_contains: str | None
    filter_logic: FilterLogic
    sort_by: str | None
    sort_order: SortOrder
    limit: Limit
    offset: Offset
    metadata: JsonObject | None
    run_id: str | None
    start_after: float | None
    start_before: float | None
    cursor: str | None


@_strict
class UpdateRollout(TypedDict, total=False):
    input: Any
    mode: RolloutMode | None
    resources_id: str | None
    status: RolloutStatus
    config: RolloutConfig
    metadata: JsonObject | None


@_strict
class DeleteRollouts(TypedDict, total=False):
    rollout_ids: Batch[str] | None
    status_in: list[RolloutStatus] | None
    ended_before: float | None
    keep: Annotated[int, Field(ge=0)] | None


@_strict
class WaitForRollouts(TypedDict, total=False):
    rollout_ids: Required[Batch[str]]
    timeout: Seconds | None


@_strict
class QueryAttempts(TypedDict, total=False):
    sort_by: str
    sort_order: SortOrder
    limit: Limit
    offset: Offset


@_strict
class UpdateAttempt(TypedDict, total=False):
    status: AttemptStatus
    worker_id: str
    last_heartbeat_time: float
    metadata: JsonObject | None
    error: AttemptFailure | None
    spans_dropped: Annotated[int, Field(ge=0)]
    reward: Annotated[float, Field(allow_inf_nan=False)] | None


@_strict
class AddSpans(TypedDict):
    spans: Batch[Span]


@_strict
class NextSpanId(TypedDict):
    rollout_id: str
    attempt_id: str


@_strict
class NextSpanIds(TypedDict):
    rollout_attempt_ids: Batch[Annotated[tuple[str, str], BeforeValidator(_list_to_tuple)]]


@_strict
class QuerySpans(TypedDict, total=False):
    rollout_id: str | None
    attempt_id: str | None
    trace_id: str | None
    trace_id_contains: str | None
    span_id: str | None
    span_id_contains: str | None
    parent_id: str | None
    parent_id_contains: str | None
    name: str | None
    name_contains: str | None
    filter_logic: FilterLogic
    limit: Limit
    offset: Offset
    sort_by: str | None
    sort_order: SortOrder
    run_id: str | None
    start_after: float | None
    start_before: float | None
    cursor: str | None


@_strict
class PublishResources(TypedDict):
    resources: dict[str, AnyResource]


@_strict
class GetResources(TypedDict, total=False):
    version: int | None


@_strict
class Rollback(TypedDict):
    version: int


@_strict
class QueryResources(TypedDict, total=False):
    resources_id: str | None
    resources_id_contains: str | None
    sort_by: str | None
    sort_order: SortOrder
    limit: Limit
    offset: Offset


@_strict
class QueryWorkers(TypedDict, total=False):
    status_in: list[WorkerStatus] | None
    worker_id_contains: str | None
    filter_logic: FilterLogic
    sort_by: str | None
    sort_order: SortOrder
    limit: Limit
    offset: Offset


@_strict
class UpdateWorker(TypedDict, total=False):
    heartbeat_stats: JsonObject | None
    attempt_ids: Batch[str] | None


@_strict
class CreateRun(TypedDict, total=False):
    name: Required[str]
    run_id: str | None
    config: JsonObject | None
    metadata: JsonObject | None


@_strict
class UpdateRun(TypedDict):
    status: RunStatus


@_strict
class ReadPage(TypedDict, total=False):
    limit: Limit
    offset: Offset


@_strict
class AddMetrics(TypedDict):
    step: int
    values: dict[str, FiniteFloat]


@_strict
class Subscribe(TypedDict, total=False):
    kinds: list[str] | None
    run_id: str
