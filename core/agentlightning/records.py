"""The records that algorithms, runners and stores exchange.

Frozen pydantic models; mappings in them are immutable too (see ``frozen``). Instants are Unix time in seconds,
durations are seconds. ``record.model_copy(update={...})`` returns a changed copy.
"""

import functools
import html
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Final, Generic, Literal, Protocol, Self, TypeAlias, TypeVar, overload

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat, model_validator

from agentlightning.errors import ConfigError, format_error, suggest
from agentlightning.frozen import FrozenDict, FrozenList, freeze, freeze_attributes, valid_text

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan as ReadableSpan
else:
    ReadableSpan = object  # the SDK takes long to import

logger = logging.getLogger("agentlightning")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

RolloutStatus: TypeAlias = Literal["queuing", "preparing", "running", "failed", "succeeded", "cancelled", "requeuing"]
AttemptStatus: TypeAlias = Literal["preparing", "running", "failed", "succeeded", "unresponsive", "timeout"]
WorkerStatus: TypeAlias = Literal["idle", "busy", "unknown"]
RolloutMode: TypeAlias = Literal["train", "val", "test"]
RunStatus: TypeAlias = Literal["running", "succeeded", "failed", "interrupted"]
FilterLogic: TypeAlias = Literal["and", "or"]
SortOrder: TypeAlias = Literal["asc", "desc"]
MAX_INT: Final = 2**63 - 1  # the largest integer that every store can hold
Int64: TypeAlias = Annotated[int, Field(ge=-MAX_INT - 1, le=MAX_INT)]
TaskInput: TypeAlias = Any  # one task of a dataset: the agent's first argument

ENDED_ROLLOUT: Final = frozenset({"failed", "succeeded", "cancelled"})
LIVE_ATTEMPT: Final = frozenset({"preparing", "running"})
DEFAULT_RUN_ID: Final = "default"
MAX_SEQUENCE_ID: Final = 2**53 - 1  # of a span that a store accepts, so that the numbers it assigns never overflow


class Unset(Enum):
    """The type of UNSET, the default of arguments for which None is a value."""

    UNSET = "UNSET"


UNSET: Final = Unset.UNSET


def _new_id(prefix: str) -> str:
    return prefix + os.urandom(8).hex()


new_rollout_id: Final = functools.partial(_new_id, "ro-")
new_attempt_id: Final = functools.partial(_new_id, "at-")
new_resources_id: Final = functools.partial(_new_id, "rs-")


def _freeze_list(values: list[Any]) -> FrozenList:
    return FrozenList(values)


def _freeze_dict(values: dict[str, Any]) -> FrozenDict:
    """Makes a FrozenDict; pydantic would spend milliseconds at import to inspect the signature of the class itself."""
    return FrozenDict(values)


JsonObject = Annotated[dict[str, Any], AfterValidator(freeze)]
"""A JSON mapping, frozen on validation; other values are rejected."""
Attributes = Annotated[dict[str, Any], BeforeValidator(freeze_attributes), AfterValidator(_freeze_dict)]
"""Observed values, frozen on validation; values that are not JSON become text, so that the span is not lost."""
SpanTime = Annotated[float, Field(ge=-1e11, le=1e11)]  # Unix time, so that calendars and statistics can take it

Text = Annotated[str, BeforeValidator(lambda text: valid_text(text) if isinstance(text, str) else text)]
"""Observed text; lone surrogates become escapes."""


def keep_finite(values: dict[str, float]) -> FrozenDict:
    """Freezes metrics; leaves NaN and infinities out, with a warning, so that they do not fail the training."""
    finite = {name: value for name, value in values.items() if math.isfinite(value)}
    if len(finite) < len(values):
        logger.warning("metrics that are not finite numbers are left out: %s", ", ".join(values.keys() - finite.keys()))
    return FrozenDict(finite)


class Record(BaseModel):
    """A frozen record that rejects unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")

    @classmethod
    def from_valid(cls, values: dict[str, Any]) -> Self:
        """Makes a record of validated values, one for each field, and takes ownership of ``values``.

        Hot path of the stores: takes a fifth of the time of ``model_construct``.
        """
        record = cls.__new__(cls)
        object.__setattr__(record, "__dict__", values)
        object.__setattr__(record, "__pydantic_fields_set__", _all_fields(cls))
        object.__setattr__(record, "__pydantic_extra__", None)
        object.__setattr__(record, "__pydantic_private__", None)
        return record

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Like pydantic's, in half the time; all fields of a changed copy count as set."""
        if deep or update is None or self.__pydantic_private__ is not None:
            return super().model_copy(update=update, deep=deep)
        return self.from_valid({**self.__dict__, **update})


@functools.cache
def _all_fields(cls: type[BaseModel]) -> set[str]:
    """Returns the names of a class's fields in a set that all its records share; frozen records never change it."""
    return set(cls.model_fields)


class Run(Record):
    """One training or evaluation; rollouts, resources and metrics belong to a run."""

    run_id: str = DEFAULT_RUN_ID
    name: str = DEFAULT_RUN_ID
    created_at: float = Field(default_factory=time.time)
    config: JsonObject = Field(default_factory=FrozenDict)
    status: RunStatus = "running"
    metadata: JsonObject | None = None
    scores: JsonObject = Field(default_factory=FrozenDict)
    """Last value of each metric, set only in the run that ``Trainer.fit`` returns; stores keep these as metrics."""

    def _repr_html_(self) -> str:  # for notebooks
        rows = [f"<tr><td>{html.escape(key)}</td><td>{last:.4g}</td></tr>" for key, last in self.scores.items()]
        return f"<p>Run <b>{html.escape(self.name)}</b>: {self.status}</p><table>{''.join(rows)}</table>"


class RolloutConfig(Record):
    """Timeouts and retries of a rollout."""

    timeout_seconds: FiniteFloat | None = Field(default=None, gt=0)
    """After this time an attempt ends as ``timeout``."""
    unresponsive_seconds: FiniteFloat | None = Field(default=None, gt=0)
    """After this time without a span or heartbeat an attempt ends as ``unresponsive``."""
    max_attempts: int = Field(default=1, ge=1, le=MAX_INT)
    retry_condition: Annotated[list[AttemptStatus], AfterValidator(_freeze_list)] = Field(default_factory=list)
    """The final attempt statuses after which the rollout is queued again, up to ``max_attempts``."""

    if not TYPE_CHECKING:  # type checkers see the fields as parameters

        def __init__(self, **values: Any) -> None:
            known = type(self).model_fields
            for name in values.keys() - known:
                raise ConfigError(f"RolloutConfig has no {name!r}.{suggest(name, known)} It has: {', '.join(known)}")
            super().__init__(**values)


class Rollout(Record):
    """One task to be run by the agent."""

    rollout_id: str
    input: Annotated[Any, AfterValidator(freeze)]
    start_time: float
    """When the rollout was enqueued."""
    end_time: float | None = None
    mode: RolloutMode | None = None
    resources_id: str | None = None
    status: RolloutStatus = "queuing"
    config: RolloutConfig = Field(default_factory=RolloutConfig)
    metadata: JsonObject | None = None
    """Any JSON; every store indexes the keys ``task_id``, ``group`` and ``step``."""
    run_id: str = DEFAULT_RUN_ID
    priority: Int64 = 0


class AttemptFailure(Record):
    """The error of a failed attempt."""

    type: Text
    message: Text
    traceback: Text = ""

    @classmethod
    def from_exception(cls, error: BaseException) -> "AttemptFailure":
        """Keeps type, message and the traceback from the first frame of user code."""
        return cls(type=type(error).__qualname__, message=str(error)[:4000], traceback=format_error(error))


class Attempt(Record):
    """One try of a rollout."""

    rollout_id: str
    attempt_id: str
    sequence_id: int = Field(ge=1, le=MAX_INT)
    """Number of the attempt within its rollout, from 1."""
    start_time: FiniteFloat
    end_time: FiniteFloat | None = None
    status: AttemptStatus = "preparing"
    worker_id: str | None = None
    last_heartbeat_time: FiniteFloat | None = None
    metadata: JsonObject | None = None
    error: AttemptFailure | None = None
    late_status: AttemptStatus | None = None
    """A result that arrived after the attempt had ended; it does not affect the rollout."""
    spans_dropped: int = Field(default=0, ge=0, le=MAX_INT)
    """Number of undelivered spans. Attempts that lost spans are excluded from training data."""
    reward: float | None = Field(default=None, allow_inf_nan=False)
    """The final reward, which the runner sets at the end; None if there is no reward or only the spans have it."""


class AttemptedRollout(Rollout):
    """A rollout with its latest attempt."""

    attempt: Attempt

    @model_validator(mode="after")
    def _same_rollout(self) -> "AttemptedRollout":
        if self.attempt.rollout_id != self.rollout_id:
            raise ValueError(f"attempt belongs to rollout {self.attempt.rollout_id!r}, not to {self.rollout_id!r}")
        return self


class EnqueueRolloutRequest(Record):
    """The arguments of ``enqueue_rollout``, for ``enqueue_many_rollouts``."""

    input: Annotated[Any, AfterValidator(freeze)]
    mode: RolloutMode | None = None
    resources_id: str | None = None
    config: RolloutConfig | None = None
    metadata: JsonObject | None = None
    rollout_id: str | None = Field(default=None, min_length=1, max_length=200, pattern=r"^[A-Za-z0-9._:-]+$")
    """An id that the client chooses; enqueueing it again returns the existing rollout."""
    priority: Int64 = 0
    """Higher ones are claimed first; equal ones in the order in which they were queued."""


class Worker(Record):
    """A process that runs attempts."""

    worker_id: str
    status: WorkerStatus = "unknown"
    heartbeat_stats: JsonObject | None = None
    last_heartbeat_time: float | None = None
    last_dequeue_time: float | None = None
    last_busy_time: float | None = None
    last_idle_time: float | None = None
    current_rollout_id: str | None = None
    current_attempt_id: str | None = None
    attempt_ids: Annotated[list[str], AfterValidator(_freeze_list)] | None = None
    """Live attempts that the worker reported; its heartbeats renew only their leases. None: it does not report them."""
    ended_at: float | None = None
    """When the worker was reported dead; from then on it gets no work."""


class Metrics(Record):
    """The metrics of one step of a run."""

    run_id: str = DEFAULT_RUN_ID
    step: Int64
    time: float
    values: Annotated[dict[str, float], AfterValidator(keep_finite)]


class Triplet(Record):
    """(prompt, response, reward) of one model call: the unit of training data."""

    prompt: Any
    response: Any
    reward: float | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)


class SpanRecord(Record):
    """Base of a span and its parts. Unknown fields of other writers of spans, such as ``kind``, are ignored."""

    model_config = ConfigDict(extra="ignore")


class TraceStatus(SpanRecord):
    """OpenTelemetry's span status."""

    status_code: Literal["UNSET", "OK", "ERROR"] = "UNSET"
    description: Text | None = None


class SpanEvent(SpanRecord):
    """An event during a span, such as an exception."""

    name: Text
    attributes: Attributes = Field(default_factory=FrozenDict)
    timestamp: SpanTime | None = None


class SpanContext(SpanRecord):
    """OpenTelemetry's identification of a span."""

    trace_id: str
    span_id: str
    is_remote: bool = False
    trace_state: JsonObject = Field(default_factory=FrozenDict)


class SpanLink(SpanRecord):
    """A reference from one span to another."""

    context: SpanContext
    attributes: Annotated[Attributes, BeforeValidator(lambda value: {} if value is None else value)] = Field(
        default_factory=FrozenDict
    )
    """None, as Agent Lightning 0.3 sends, is an empty mapping."""


class SpanResource(SpanRecord):
    """OpenTelemetry's resource: the origin of a span."""

    attributes: Attributes = Field(default_factory=FrozenDict)
    schema_url: str = ""


_NO_RESOURCE: Final = SpanResource()
_UNSET_STATUS: Final = TraceStatus()
_NOTHING: Final = FrozenList()
_NO_ENTRIES: Final = FrozenDict()


class Span(SpanRecord):
    """One recorded operation of an attempt."""

    rollout_id: str
    attempt_id: str
    sequence_id: int = Field(default=0, ge=0, le=MAX_INT)
    """Number of the span within its attempt, from 1; 0 lets the store assign the next number on arrival."""
    trace_id: str
    """32 hex digits."""
    span_id: str
    """16 hex digits."""
    parent_id: str | None = None
    name: str
    status: TraceStatus = _UNSET_STATUS
    attributes: Attributes = Field(default_factory=FrozenDict)
    events: Annotated[list[SpanEvent], AfterValidator(_freeze_list)] = Field(default_factory=FrozenList)
    links: Annotated[list[SpanLink], AfterValidator(_freeze_list)] = Field(default_factory=FrozenList)
    start_time: SpanTime | None = None
    end_time: SpanTime | None = None
    context: SpanContext | None = None
    parent: SpanContext | None = None
    resource: SpanResource = _NO_RESOURCE

    @classmethod
    def from_attributes(
        cls,
        *,
        attributes: Mapping[str, Any],
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        sequence_id: int | None = None,
        name: str | None = None,
        trace_id: str | None = None,
        span_id: str | None = None,
        parent_id: str | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
        resource: SpanResource | None = None,
        status: TraceStatus | None = None,
    ) -> "Span":
        """Makes a span from attributes. Defaults: now, random ids, and the name ``agentlightning.virtual``.

        Hot path: arguments are not validated.
        """
        start_time = time.time() if start_time is None else start_time
        return cls.from_valid(
            {
                "rollout_id": rollout_id or "",
                "attempt_id": attempt_id or "",
                "sequence_id": max(sequence_id or 0, 0),
                "trace_id": trace_id or os.urandom(16).hex(),
                "span_id": span_id or os.urandom(8).hex(),
                "parent_id": parent_id,
                "name": valid_text(name) if name else "agentlightning.virtual",
                "status": status or _UNSET_STATUS,
                "attributes": freeze_attributes(attributes),
                "events": _NOTHING,
                "links": _NOTHING,
                "start_time": start_time,
                "end_time": start_time if end_time is None else end_time,
                "context": None,
                "parent": None,
                "resource": resource or _NO_RESOURCE,
            }
        )

    def sealed(self) -> "Span":
        """Returns the span with frozen attributes, in case it was made without validation."""
        if type(self.attributes) is FrozenDict and not (
            self.events and any(type(event.attributes) is not FrozenDict for event in self.events)
        ):
            return self
        events = [event.model_copy(update={"attributes": freeze_attributes(event.attributes)}) for event in self.events]
        return self.model_copy(update={"attributes": freeze_attributes(self.attributes), "events": FrozenList(events)})

    @classmethod
    def from_opentelemetry(
        cls, readable_span: ReadableSpan, rollout_id: str, attempt_id: str, sequence_id: int = 0
    ) -> "Span":
        """Converts a finished OpenTelemetry SDK span (nanoseconds become seconds).

        If the clock was set back during the span, its end is set to its start.
        """
        span: Any = readable_span
        code = span.status.status_code.name
        return cls.model_construct(
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            sequence_id=sequence_id,
            trace_id=f"{span.context.trace_id:032x}",
            span_id=f"{span.context.span_id:016x}",
            parent_id=f"{span.parent.span_id:016x}" if span.parent is not None else None,
            name=valid_text(span.name),
            status=_UNSET_STATUS
            if code == "UNSET"
            else TraceStatus(status_code=code, description=span.status.description),
            attributes=freeze_attributes(span.attributes or {}),
            events=[
                SpanEvent(name=e.name, attributes=dict(e.attributes or {}), timestamp=e.timestamp / 1e9)
                for e in span.events
            ]
            or _NOTHING,
            links=[
                SpanLink(context=_context(link.context), attributes=dict(link.attributes or {})) for link in span.links
            ]
            or _NOTHING,
            start_time=None if span.start_time is None else span.start_time / 1e9,
            end_time=None if span.end_time is None else max(span.start_time or 0, span.end_time) / 1e9,
            context=_context(span.context),
            parent=None if span.parent is None else _context(span.parent),
            resource=_resource(span.resource),
        )


def _context(context: Any) -> SpanContext:
    return SpanContext.model_construct(
        trace_id=f"{context.trace_id:032x}",
        span_id=f"{context.span_id:016x}",
        is_remote=context.is_remote,
        trace_state=FrozenDict(context.trace_state) if context.trace_state else _NO_ENTRIES,
    )


_converted_resource: tuple[Any, SpanResource] = (None, _NO_RESOURCE)


def _resource(resource: Any) -> SpanResource:
    """Converts a resource; caches the last one, because a process has only one or two."""
    global _converted_resource
    seen, converted = _converted_resource
    if seen is not resource:
        converted = SpanResource(attributes=dict(resource.attributes), schema_url=resource.schema_url)
        _converted_resource = resource, converted
    return converted


class PaginatedResult(BaseModel, Sequence[T], Generic[T]):
    """One page of a query, and a Sequence of its items."""

    items: list[T]
    limit: int = -1
    offset: int = 0
    total: int
    """Number of matches without the limit."""
    cursor: str | None = None
    """Argument for the next page, at constant cost; None on the last page, or if the order is not the stored one."""
    truncated: bool = False
    """Whether a search outside the database, as with ``sort_by="input"``, ended at its time limit of 10 s."""

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[T]:  # type: ignore[override] # a Sequence of its items, not of its fields
        return iter(self.items)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        return self.items[index]


class Dataset(Protocol[T_co]):
    """Tasks by position, such as a list or a Hugging Face ``datasets.Dataset``."""

    def __getitem__(self, index: int, /) -> T_co: ...
    def __len__(self) -> int: ...


RolloutRawResult: TypeAlias = float | int | Sequence[Span] | Sequence[ReadableSpan] | None
"""The result of an agent: nothing, its final reward, or its spans."""
