"""The attempts whose calls are answered: their keys, their ends, and the seeds of their calls."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import heapq
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import aiohttp

from agentlightning.errors import StoreError
from agentlightning.event import AttemptFinished, Event, RolloutFinished, RolloutStarted
from agentlightning.run import attempt_token
from agentlightning.store.lifecycle import MODEL_ERROR
from agentlightning.store.protocol import LightningStore
from agentlightning.store.span_writer import AttemptKey
from agentlightning.types import LIVE_ATTEMPT
from agentlightning_plugins.gateway.backends.provider import ModelBackend, describe_error
from agentlightning_plugins.gateway.call import ModelCall
from agentlightning_plugins.gateway.dialects.dialect import CallRefused
from agentlightning_plugins.shared.web.request import is_among

T = TypeVar("T")
logger = logging.getLogger("agentlightning")
_MAX_KEYS: Final = 10_000


class Authenticator:
    """Checks API keys: attempt tokens, signed with the token of the gateway's store."""

    def __init__(self, store: LightningStore, *, is_required: bool, operator_key: str, believes_urls: bool) -> None:
        """Checks calls of attempts in a store; ``believes_urls`` attributes calls without a key by their URL alone."""
        self._store, self._operator_key = store, operator_key
        self._is_required, self._believes_urls = is_required, believes_urls
        self._has_warned = False
        self._tokens: Sequence[str] = ()
        self._secrets = [attempt_token.derive_secret(None)]
        self._known: dict[str, attempt_token.AttemptToken] = {}

    def authenticate(self, headers: Mapping[str, str], named: AttemptKey | None) -> AttemptKey | None:
        """Returns the attempt of a call, by its key; without one None, or the attempt ``named`` if URLs are believed.

        Raises CallRefused if the key is for another attempt, forged or expired, or if a required key is missing. If the
        store has no token, keys that other processes issued cannot be verified; they must name the URL's attempt.
        """
        key = _read_key(headers)
        if key is None or not key.startswith(attempt_token.PREFIX):
            if self._is_required:
                problem = "the call has no key" if key is None else "the key of this call was not issued for an attempt"
                raise CallRefused(
                    401, f"this gateway requires the api_key of the attempt's LLM; {problem}", "wrong_key"
                )
            if named is None or self._believes_urls:
                return named
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "a call names attempt %s in its URL without the key of this attempt, so it is relayed and not "
                    "recorded, like all such calls; give the client api_key=llm.api_key, or set require_keys=False",
                    named[1],
                )
            return None
        try:
            claim = self._read(key, can_be_foreign=named is not None and not self._is_required)
        except ValueError as error:
            advice = "give the store, its runners and the gateway the same token (AGL_TOKEN)"
            raise CallRefused(401, f"{error}; {advice}", "wrong_key") from None
        attempt = claim.rollout_id, claim.attempt_id
        if named is not None and named != attempt:
            message = f"the key is for attempt {attempt[1]}, but the URL names {named[1]}"
            raise CallRefused(403, message, "wrong_key")
        return attempt

    def is_operator(self, headers: Mapping[str, str], *, always: bool = False) -> bool:
        """Whether a request may operate the gateway: it needs the store's token or this gateway's operator key.

        If keys are not required, a request needs neither, unless ``always``.
        """
        if not self._is_required and not always:
            return True
        return is_among(_read_key(headers) or "", [*self._store.tokens, self._operator_key])

    def _read(self, key: str, can_be_foreign: bool) -> attempt_token.AttemptToken:
        tokens, now = self._store.tokens, self._store.now()
        if tokens != self._tokens:  # the store is served since the last check, or its file of tokens has changed
            self._tokens, self._known = tokens, {}
            self._secrets = [attempt_token.derive_secret(token) for token in tokens or (None,)]
        claim = self._known.get(key)
        if claim is None or claim.expires_at <= now:
            try:
                claim = attempt_token.read_any(self._secrets, key, now)
            except ValueError:
                if not can_be_foreign or tokens:
                    raise
                return attempt_token.decode(key, now)
            self._known[key] = claim
            if len(self._known) > _MAX_KEYS:
                del self._known[next(iter(self._known))]
        return claim


def _read_key(headers: Mapping[str, str]) -> str | None:
    """Returns the API key of a request of OpenAI's, Anthropic's, Azure's or Google's clients."""
    bearer = headers.get("Authorization")
    if bearer is not None:
        scheme, _, key = bearer.partition(" ")
        return key.strip() if scheme.lower() == "bearer" else bearer
    return headers.get("x-api-key") or headers.get("api-key") or headers.get("x-goog-api-key")


_KINDS: Final = ("rollout_started", "attempt_finished", "rollout_finished")
_MAX_REMEMBERED: Final = 100_000
_RECONNECT_S: Final = 1.0
_ASK_S: Final = 5.0
_TRUST_S: Final = 60.0
"""How long an attempt counts as running without news: events are lost when a server of the store fails."""


@dataclass(slots=True, eq=False)
class InFlightCall:
    """A call and the task that relays it."""

    call: ModelCall
    task: asyncio.Task[object]
    refusal: CallRefused | None = None
    """The error for the agent, if the task was cancelled because the attempt is over or the gateway stops."""


class InFlightCalls:
    """The calls in flight on one event loop, by attempt."""

    def __init__(self) -> None:
        self._by_attempt: dict[AttemptKey | None, set[InFlightCall]] = {}

    @contextlib.contextmanager
    def track(self, call: ModelCall) -> Iterator[InFlightCall]:
        """Tracks a call that the current task relays; raises CallRefused if its attempt ends or the gateway stops."""
        task = asyncio.current_task()
        assert task is not None
        in_flight = InFlightCall(call, task)
        calls = self._by_attempt.setdefault(call.attempt, set())
        calls.add(in_flight)
        try:
            yield in_flight
        except asyncio.CancelledError:
            if in_flight.refusal is None:
                raise
            task.uncancel()
            raise in_flight.refusal from None
        finally:
            calls.discard(in_flight)
            if not calls:
                del self._by_attempt[call.attempt]

    def cancel_attempt(self, attempt: AttemptKey) -> None:
        """Cancels the calls of an attempt."""
        self._cancel(self._by_attempt.get(attempt, ()), attempt_over(attempt))

    def cancel_all(self, refusal: CallRefused) -> None:
        """Cancels all calls; their agents get this error."""
        for calls in self._by_attempt.values():
            self._cancel(calls, refusal)

    def _cancel(self, calls: Iterable[InFlightCall], refusal: CallRefused) -> None:
        for in_flight in calls:
            if in_flight.refusal is None:
                in_flight.refusal = refusal
                in_flight.task.cancel()

    def cancel_rollout(self, rollout_id: str) -> None:
        """Cancels the calls of all attempts of a rollout."""
        for attempt in [key for key in self._by_attempt if key is not None and key[0] == rollout_id]:
            self.cancel_attempt(attempt)

    def __iter__(self) -> Iterator[ModelCall]:
        return (in_flight.call for calls in self._by_attempt.values() for in_flight in calls)


class EndedAttempts:
    """The attempts and rollouts that ended last, up to a limit, according to the store's events.

    If no event has announced the start of an attempt, the store is queried, because the attempt may have ended before
    this gateway started; and again after ``_TRUST_S``. When an attempt ends, its calls in flight are cancelled.
    """

    def __init__(self, in_flight: InFlightCalls, limit: int = _MAX_REMEMBERED) -> None:
        self._in_flight = in_flight
        self._limit = limit
        self._live: dict[AttemptKey, float] = {}
        """Attempts that had not ended according to the latest event or query, and until when that counts."""
        self._asking: dict[AttemptKey, asyncio.Task[None]] = {}
        """Queries in progress, which parallel calls of an attempt share."""
        self._attempts: dict[AttemptKey, None] = {}
        self._rollouts: dict[str, set[str]] = {}
        """Ended rollouts, each with the attempts that began after its end (retries)."""
        self.failing: dict[AttemptKey, bool] = {}
        """Attempts whose last call failed, also in an earlier gateway; True if their metadata is known to say so."""

    def is_over(self, attempt: AttemptKey) -> bool:
        """Whether calls of this attempt must be refused."""
        retries = self._rollouts.get(attempt[0])
        return attempt in self._attempts or (retries is not None and attempt[1] not in retries)

    def refuse(self, attempt: AttemptKey) -> None:
        """Raises CallRefused if an attempt is over."""
        if self.is_over(attempt):
            raise attempt_over(attempt)

    async def ask(self, store: LightningStore, attempt: AttemptKey) -> None:
        """Reads from the store whether an attempt has ended, if that is not known.

        An attempt that the store does not contain, or a store that does not answer, counts as not ended.
        """
        if self._live.get(attempt, 0.0) > time.monotonic() or self.is_over(attempt):
            return
        asking = self._asking.get(attempt)
        if asking is None:
            asking = self._asking[attempt] = asyncio.create_task(self._ask(store, attempt))
            asking.add_done_callback(lambda _: self._asking.pop(attempt))
        await asyncio.shield(asking)

    async def _ask(self, store: LightningStore, attempt: AttemptKey) -> None:
        try:
            async with asyncio.timeout(_ASK_S):
                known = await store.query_attempts(attempt[0])
        except (StoreError, OSError, aiohttp.ClientError) as error:
            logger.warning(
                "the status of attempt %s cannot be read, so its calls continue: %s", attempt[1], describe_error(error)
            )
            return
        asked = next((each for each in known if each.attempt_id == attempt[1]), None)
        if asked is not None and (asked.metadata or {}).get(MODEL_ERROR):
            self._add(self.failing, attempt, True)
        if asked is not None and asked.status not in LIVE_ATTEMPT:
            self._add(self._attempts, attempt, None)
        elif not self.is_over(attempt):  # an event may have ended it during the query
            self._add(self._live, attempt, time.monotonic() + _TRUST_S)

    def _add(self, known: dict[AttemptKey, T], attempt: AttemptKey, value: T) -> None:
        known[attempt] = value
        if len(known) > self._limit:
            del known[next(iter(known))]

    def note(self, event: Event) -> None:
        """Applies an event of the store."""
        match event:
            case AttemptFinished():
                self._live.pop((event.rollout_id, event.attempt_id), None)
                self._add(self._attempts, (event.rollout_id, event.attempt_id), None)
                self._in_flight.cancel_attempt((event.rollout_id, event.attempt_id))
            case RolloutFinished():
                self._rollouts.pop(event.rollout_id, None)
                self._rollouts[event.rollout_id] = set()
                if len(self._rollouts) > self._limit:
                    del self._rollouts[next(iter(self._rollouts))]
                self._in_flight.cancel_rollout(event.rollout_id)
            case RolloutStarted():
                self._add(self._live, (event.rollout_id, event.attempt_id), time.monotonic() + _TRUST_S)
                if event.rollout_id in self._rollouts:
                    self._rollouts[event.rollout_id].add(event.attempt_id)

    async def follow(self, store: LightningStore) -> None:
        """Applies the events of a store until cancelled; subscribes again after an error."""
        has_warned = False
        while True:
            try:
                async for event in store.subscribe(_KINDS, every_run=True):
                    self.note(event)
            except Exception as error:  # isolation point: after any error of the store, later events still count
                if not has_warned:
                    logger.warning(
                        "the gateway lost the store's events (%s) and subscribes again; until then it relays calls of "
                        "ended attempts",
                        error,
                    )
                    has_warned = True
            await asyncio.sleep(_RECONNECT_S)
            self._live.clear()  # the events of their ends may be lost


def attempt_over(attempt: AttemptKey) -> CallRefused:
    """Returns the error of calls of an attempt that has ended."""
    message = f"attempt {attempt[1]} of rollout {attempt[0]} is over; its calls are refused"
    return CallRefused(410, message, "attempt_over")


@dataclass(slots=True)
class _Turn:
    """A request and its repetitions by the client."""

    span_id: str
    """The span of the last try."""
    number: int | None = None
    """Its number among the calls with as many messages, while it has one."""
    n_running: int = 0
    is_answered: bool = False


class CallSeeds:
    """Seeds the calls of each attempt by the rollouts' seeds (``metadata["seed"]``), which it reads from the store.

    All tries of a repeated request are one turn: they have one seed, and each names the previous try.
    """

    def __init__(self, store: LightningStore) -> None:
        self._store = store
        self._known: dict[AttemptKey, tuple[object, defaultdict[int, list[int]]]] = {}
        """For each attempt, the seed of its rollout, and for each turn a heap of the free numbers of its calls."""
        self._turns: dict[tuple[AttemptKey | None, str, int], _Turn] = {}

    @contextlib.asynccontextmanager
    async def seeded(self, call: ModelCall, backends: Iterable[ModelBackend]) -> AsyncIterator[None]:
        """Gives a call its seed during the block, if its rollout has one and a backend seeds calls.

        The seed follows the turn: it depends on the length of the conversation and on the number of the call among the
        completed calls of this length, in order of arrival. A call that fails, or that the agent abandons, gives its
        number back, so that a repeated call, and all later ones, get the seeds that they would have had without it.
        """
        turn = self._join_turn(call)
        seed, turns = await self._find(call, backends)
        length = count_messages(call.body)
        if seed is not None:
            if turn.number is None:
                free = turns[length]
                turn.number = heapq.heappop(free)
                if not free:
                    free.append(turn.number + 1)
            call.seed = derive_seed(seed, length, turn.number)
        turn.n_running += 1
        try:
            yield
        finally:
            turn.n_running -= 1
            turn.is_answered |= call.is_complete
            if turn.number is not None and not turn.n_running and not turn.is_answered:
                heapq.heappush(turns[length], turn.number)
                turn.number = None

    def _join_turn(self, call: ModelCall) -> _Turn:
        """Returns the turn of a call: the turn of the previous try, if the client says that it tries again."""
        if call.attempt is None:
            return _Turn("")
        key = call.attempt, call.dialect.name, call.digest
        turn = self._turns.pop(key, None)
        if turn is None or not call.is_retry:
            turn = _Turn("")
        call.retry_of, turn.span_id = turn.span_id or None, call.trace.span_id
        self._turns[key] = turn
        if len(self._turns) > _MAX_REMEMBERED:
            del self._turns[next(iter(self._turns))]
        return turn

    async def _find(
        self, call: ModelCall, backends: Iterable[ModelBackend]
    ) -> tuple[object, defaultdict[int, list[int]]]:
        attempt, none = call.attempt, (None, defaultdict[int, list[int]](lambda: [0]))
        if attempt is None or not call.generates or not any(backend.seed_calls for backend in backends):
            return none
        if attempt not in self._known:
            try:
                rollout = await self._store.get_rollout_by_id(attempt[0])
            except (StoreError, OSError, aiohttp.ClientError) as error:
                logger.warning(
                    "the seed of rollout %s cannot be read, so a call gets no seed: %s",
                    attempt[0],
                    describe_error(error),
                )
                return none
            seed = None if rollout is None else (rollout.metadata or {}).get("seed")
            self._known.setdefault(attempt, (seed, none[1]))  # another call may have stored it during the read
            if len(self._known) > _MAX_REMEMBERED:
                del self._known[next(iter(self._known))]
        found = self._known[attempt] = self._known.pop(attempt)  # now the newest entry
        return found


def count_messages(body: Mapping[str, Any]) -> int:
    """Returns the length of the conversation of a request in any dialect; 0 if it is a plain text."""
    messages = body.get("messages", body.get("input"))
    return len(messages) if isinstance(messages, list) else 0


def derive_seed(seed: object, length: int, number: int) -> int:
    """Returns the seed of a call, a 53-bit integer, which JSON represents exactly.

    It follows from the seed of its rollout, the number of messages of its conversation, and its number among the calls
    of this length, from 0.
    """
    digest = hashlib.blake2b(f"{seed}/{length}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 11
