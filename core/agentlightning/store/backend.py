"""``Backend``: the primitives that a database implements, without any rules of the lifecycle.

``engine.BackendStore`` implements ``LightningStore`` on a ``Backend``. Records are the frozen models of ``records``: a
backend may keep the objects themselves (memory) or their JSON (SQL).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

from agentlightning.event import Event
from agentlightning.records import Attempt, Metrics, Record, Rollout, Run, Span, Worker
from agentlightning.resources import ResourcesUpdate

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
    """Returns the key of a record: the values of its identifying fields, in order."""
    key = _KEY_READERS[type(record)](record)
    return key if type(key) is tuple else (key,)


class Row(NamedTuple, Generic[R]):
    """A stored record with the revision that guards compare: 1 when inserted, increased by each ``Put``."""

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
    """Holds if the record with this key is at this revision; revision 0 means that there is no such record."""

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

    All of ``where`` must hold, and at least one of ``any_of`` if it is not empty. Without ``sort_by`` records are in
    insertion order, which replacing a record does not change. None sorts first. ``descending`` reverses either order,
    except that ties of a sort keep insertion order. ``after`` excludes ``sort_by`` and ``descending``.
    """

    kind: type[R]
    where: tuple[Condition, ...] = ()
    any_of: tuple[Condition, ...] = ()
    sort_by: str | None = None
    descending: bool = False
    limit: int = -1
    offset: int = 0
    after: int | None = None
    """Selects only rows inserted after this position (``Page.position``), for the next page at constant cost."""
    seen: str | None = None
    """Set in a poll for the spans of a run, with ``after``: the last ``Page.seen`` (empty at first). A backend whose
    transactions do not commit in the order of positions reads the spans that were committed since then."""
    count: bool = False
    """Whether to set ``Page.total``; counting may cost a scan."""


class Page(NamedTuple, Generic[R]):
    """The rows of a query."""

    rows: Sequence[Row[R]]
    total: int | None
    """Number of matches without limit and offset, if the query has ``count``."""
    position: int | None
    """Insertion position of the last row, for ``Query.after``; None if the page is empty or sorted by a field."""
    truncated: bool = False
    """Whether the backend ended the search before it had examined every record."""
    seen: str = ""
    """The next ``Query.seen`` of a poll; empty if transactions commit in the order of positions."""


Claim: TypeAlias = Callable[[Sequence[tuple[Row[Rollout], int]]], tuple[Sequence[Write], Sequence[Event]]]
"""Maps the locked rollouts, each with the number of its attempts so far, to the writes and events of a claim.

It may be called again when a transaction is repeated; only the last result is written, and nothing is written if
``claim`` returns no rollouts."""


class Backend(Protocol):
    """A database. Every method is atomic and returns after its effect is durable, if the database is durable.

    Methods may be called from several threads and event loops at once, and do not block them while they wait for a disk
    or a server. A backend holds one open database, which may contain many runs.
    """

    durable: bool
    """Whether acknowledged writes survive the process."""

    def now(self) -> float:
        """Returns the Unix time of a clock shared by all processes that use this database, for leases and deadlines."""

    async def commit(self, writes: Sequence[Write], guards: Sequence[Guard] = (), events: Sequence[Event] = ()) -> bool:
        """Applies all writes in one transaction, then hands ``events`` to all watchers; False if a guard fails."""

    async def claim(self, run_id: str, limit: int, decide: Claim) -> Sequence[Rollout]:
        """Locks up to ``limit`` queued rollouts of a run: the highest ``priority`` first, then first in, first out.

        The result of ``decide`` is written in the same transaction. No rollout is handed to two callers. A rollout
        enters the queue when a ``Put`` changes its status from any other to queuing or requeuing. Returns the locked
        rollouts as they were before; if there are none, ``decide`` is not called.
        """

    async def select(self, query: Query[R]) -> Page[R]:
        """Reads committed records: all writes of a commit or none, but a long scan may see commits made during it."""

    async def append_spans(self, spans: Sequence[Span], now: float) -> Sequence[Span | None]:
        """Appends spans to attempts, all or none; NotFoundError if an attempt is not stored.

        A span whose key is already stored, or occurs earlier in ``spans``, is skipped and returned as None.
        ``sequence_id`` 0 is replaced with the attempt's next number; greater numbers advance the attempt's counter.
        Live attempts (preparing, running) get ``last_heartbeat_time = now`` without a new revision.
        """

    async def next_sequence_ids(self, attempts: Sequence[tuple[str, str]]) -> Sequence[int]:
        """Reserves the next span number of each (rollout_id, attempt_id); NotFoundError if an attempt is not stored."""

    async def count(self) -> dict[str, int]:
        """Returns the numbers of stored rollouts, attempts, spans, resources and workers by name, at constant cost."""

    def watch(self, listener: Listener) -> Callable[[], None]:
        """Calls ``listener``, which must not block, with each commit's events in order, once their change can be read.

        Returns a function that stops the calls; calling it twice is harmless.
        """

    async def close(self) -> None:
        """Releases the backend's resources; calling it twice is harmless."""
