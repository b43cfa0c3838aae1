"""``Backend``: the primitives that a database implements; it knows nothing of lifecycles.

``engine.BackendStore`` implements ``LightningStore`` on a ``Backend``. Records are the frozen models of ``types``: a
backend may keep the objects themselves (memory) or their JSON (SQL).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

from agentlightning.event import Event
from agentlightning.resources import ResourcesUpdate
from agentlightning.types import Attempt, Metrics, Record, Rollout, Run, Span, Worker

R = TypeVar("R", bound=Record)

Key: TypeAlias = tuple[str | int, ...]
Operator: TypeAlias = Literal["eq", "in", "contains", "ge", "le"]
Listener: TypeAlias = Callable[[Sequence[Event]], None]

KEYS: dict[type[Record], tuple[str, ...]] = {
    Run: ("run_id",),
    Rollout: ("rollout_id",),
    Attempt: ("rollout_id", "attempt_id"),
    Span: ("rollout_id", "attempt_id", "span_id"),
    ResourcesUpdate: ("resources_id", "version"),
    Worker: ("worker_id",),
    Metrics: ("run_id", "step"),
}
"""The fields that identify a record of each kind."""


_KEY_READERS = {kind: attrgetter(*fields) for kind, fields in KEYS.items()}


def key_of(record: Record) -> Key:
    """The key of a record: the values of its identifying fields, in order."""
    key = _KEY_READERS[type(record)](record)
    return key if type(key) is tuple else (key,)


class Row(NamedTuple, Generic[R]):
    """A stored record with the revision that a guard compares: 1 when inserted, one more at each ``Put``."""

    record: R
    revision: int


class Put(NamedTuple):
    """Inserts or replaces the record with the same key."""

    record: Record


class Delete(NamedTuple):
    """Removes a record; deleting a rollout removes its attempts and spans too."""

    kind: type[Record]
    key: Key


Write: TypeAlias = Put | Delete


class Guard(NamedTuple):
    """Holds while the record with this key is at this revision; revision 0 means that there is none."""

    kind: type[Record]
    key: Key
    revision: int


class Condition(NamedTuple):
    """One test of a field; ``field`` may reach into a JSON mapping, as in ``metadata.group`` (the rest is one key).

    ``contains`` is a case-sensitive substring test. A field that is None satisfies only ``eq None``; nothing satisfies
    ``in ()``. Conditions on spans may use ``run_id``, the run of their rollout, as a field.
    """

    field: str
    op: Operator
    value: Any


@dataclass(slots=True)  # not frozen: that doubles the cost of making one, and nearly every call makes several
class Query(Generic[R]):
    """Selects and orders records of one kind.

    All of ``where`` must hold, and at least one of ``any_of`` if it is not empty. Without ``sort_by`` the order is
    that of insertion, which replacing a record does not change. None sorts first. ``descending`` reverses either order,
    except that ties of a sort keep the order of insertion. ``after`` cannot be combined with either.
    """

    kind: type[R]
    where: tuple[Condition, ...] = ()
    any_of: tuple[Condition, ...] = ()
    sort_by: str | None = None
    descending: bool = False
    limit: int = -1
    offset: int = 0
    after: int | None = None
    """Only rows inserted after this position (``Page.position``), to read the next page at constant cost."""
    count: bool = False
    """Whether ``Page.total`` is wanted; counting may cost a scan."""


class Page(NamedTuple, Generic[R]):
    """The rows of a query."""

    rows: Sequence[Row[R]]
    total: int | None
    """How many match without limit and offset, when the query asked."""
    position: int | None
    """Insertion position of the last row, for ``Query.after``; None when empty or sorted by a field."""


Claim: TypeAlias = Callable[[Sequence[tuple[Row[Rollout], int]]], tuple[Sequence[Write], Sequence[Event]]]
"""Maps the locked rollouts, each with the number of its attempts so far, to the writes and events of a claim.

It may be called again when a transaction is repeated; only the last result is written, and nothing if ``claim``
returns nothing."""


class Backend(Protocol):
    """A database. Every method is atomic and returns after its effect is durable, as far as the database is durable.

    Methods may be called from several threads and event loops at once. A backend holds one open database, which may
    contain many runs.
    """

    durable: bool
    """Whether acknowledged writes survive the process."""

    def now(self) -> float:
        """Unix time by a clock that all processes with this database open share; leases and deadlines use it."""

    async def commit(self, writes: Sequence[Write], guards: Sequence[Guard] = (), events: Sequence[Event] = ()) -> bool:
        """Applies all writes in one transaction, then hands ``events`` to every watcher; False if a guard fails."""

    async def claim(self, run_id: str, limit: int, decide: Claim) -> Sequence[Rollout]:
        """Locks up to ``limit`` queuing or requeuing rollouts of a run, oldest entry into the queue first.

        Whatever ``decide`` says about them is written in the same transaction. No rollout is handed to two callers. A
        rollout enters the queue when a ``Put`` makes its status queuing or requeuing from anything else. Returns the
        locked rollouts as they were before; when there is none, ``decide`` is not called.
        """

    async def select(self, query: Query[R]) -> Page[R]:
        """Reads committed records."""

    async def append_spans(self, spans: Sequence[Span], now: float) -> Sequence[Span | None]:
        """Appends spans to attempts, all or none; NotFoundError if an attempt is not stored.

        A span whose key is stored already (or stands earlier in ``spans``) is left out: None instead of the stored
        span. ``sequence_id`` 0 is replaced by the attempt's next number; greater numbers move its counter forward. Live
        attempts (preparing, running) get ``last_heartbeat_time = now`` without a new revision.
        """

    async def next_sequence_ids(self, attempts: Sequence[tuple[str, str]]) -> Sequence[int]:
        """Takes the next, greater span number of each (rollout_id, attempt_id); NotFoundError if one is not stored."""

    async def count(self) -> dict[str, int]:
        """The numbers of stored rollouts, attempts, spans, resources and workers, by these names, at constant cost."""

    def watch(self, listener: Listener) -> Callable[[], None]:
        """Calls ``listener``, which must not block, with the events of each commit, in order; returns what stops it."""

    async def close(self) -> None:
        """Releases what the backend holds; calling it twice is harmless."""
