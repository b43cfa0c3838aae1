"""Access control: the store's token allows everything, an attempt's token the records of that attempt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from aiohttp import web

from agentlightning import semconv
from agentlightning.errors import ConflictError
from agentlightning.run import attempt_token
from agentlightning.run.attempt_token import AttemptToken
from agentlightning.store.protocol import LightningStore
from agentlightning.types import LIVE_ATTEMPT, Span
from agentlightning_plugins.shared.training_records.record import RECORDS
from agentlightning_plugins.shared.web.request import RequestRefused, check_local, is_among
from agentlightning_plugins.stores.http.message import PREFIX
from agentlightning_plugins.stores.http.server.answer import RefusedError


async def screen_spans(
    store: LightningStore, token: AttemptToken | None, spans: Sequence[Span]
) -> tuple[list[Span], list[str]]:
    """Decides which spans of a request are stored; every entrance calls it.

    Training records must be readable. Spans that come with an attempt's token are marked as not trusted and, if the
    attempt has ended, as late, so that they cannot change its reward.

    Args:
        store: the store that has the attempts.
        token: the token of an attempt, whose spans they are; None if the request may do everything.
        spans: new spans.

    Returns:
        The spans to store, and the reasons why others are refused.
    """
    if token is None:
        if not any(span.name in RECORDS for span in spans):
            return list(spans), []
        problems = await asyncio.to_thread(lambda: list(map(_find_problem, spans)))
        admitted = [span for span, problem in zip(spans, problems, strict=True) if problem is None]
        return admitted, [problem for problem in problems if problem is not None]
    attempts = [each for each in await store.query_attempts(token.rollout_id) if each.attempt_id == token.attempt_id]
    marks = {} if all(attempt.status in LIVE_ATTEMPT for attempt in attempts) else {semconv.LATE: True}
    admitted, reasons = list[Span](), list[str]()
    for span in spans:
        marked = semconv.distrust(span)
        if removed := marked.attributes[semconv.UNTRUSTED]:
            names = ", ".join(removed[:3])
            reasons.append(
                f"span {span.name:.100}: the token of an attempt does not allow {names:.300}; only the gateway, the "
                "trainer and its runners write that, because weights are trained on it"
            )
        elif marks:
            attributes = {**marked.attributes, **marks}
            admitted.append(marked.model_copy(update={"attributes": attributes}).sealed())
        else:
            admitted.append(marked)
    return admitted, reasons


def _find_problem(span: Span) -> str | None:
    """Returns why a training record cannot be read; None if it can, or for any other span."""
    try:
        if (kind := RECORDS.get(span.name)) is not None:
            kind.from_span(span)
    except ValueError as error:
        return f"span {span.span_id}: not a training record: {error}"
    return None


async def count_refused(store: LightningStore, rollout_id: str, attempt_id: str, number: int) -> None:
    """Adds spans above the quota of an attempt to its ``spans_dropped``: what remains is not the whole trace."""
    for attempt in await store.query_attempts(rollout_id):
        if attempt.attempt_id == attempt_id:
            await store.update_attempt(rollout_id, attempt_id, spans_dropped=attempt.spans_dropped + number)


HEALTH_PATH: Final = PREFIX + "/health"
OPEN_PATHS: Final = frozenset({"/livez", "/readyz"})
"""Probes, which need no token because their answers contain no records."""
_BEARER: Final = "Bearer "


class StoreAccess:
    """Checks tokens. If there are none, programs on this machine are admitted, but pages in a browser are not."""

    def __init__(self, tokens: Sequence[str], now: Callable[[], float]) -> None:
        """Accepts any of the tokens, so that one can replace another; the first signs attempt tokens."""
        self._now = now
        self.replace_tokens(tokens)

    def replace_tokens(self, tokens: Sequence[str]) -> None:
        """Accepts these tokens from now on."""
        self._expected = [_BEARER + token for token in tokens]
        self._secrets = [attempt_token.derive_secret(token) for token in tokens]

    def admit(self, request: web.Request) -> AttemptToken | None:
        """Returns the attempt token of a request; None if the request may do everything.

        Raises:
            RefusedError or RequestRefused: no token, or a wrong one.
        """
        if request.path in OPEN_PATHS:
            return None
        if not self._expected:
            check_local(request, "a store without a token")
            return None
        shown = request.headers.get("authorization", "")
        if is_among(shown, self._expected):
            return None
        if shown.startswith(_BEARER + attempt_token.PREFIX):
            try:
                return attempt_token.read_any(self._secrets, shown.removeprefix(_BEARER), self._now())
            except ValueError as error:
                raise RefusedError("unauthorized", str(error)) from error
        if request.path == HEALTH_PATH:
            return None
        raise RefusedError("unauthorized", "no token or a wrong one; give the token that the store was started with")

    def admits(self, request: web.Request) -> bool:
        """Whether a request would be admitted."""
        try:
            self.admit(request)
        except (RefusedError, RequestRefused):
            return False
        return True

    def mint(self, rollout_id: str, attempt_id: str, lifetime_s: float) -> tuple[str, float]:
        """Makes a token for one attempt; returns it with its expiry (Unix time).

        Raises:
            ConflictError: the store has no token.
        """
        if not self._secrets:
            raise ConflictError("this store has no token to sign attempt tokens with; start it with --token")
        expires_at = self._now() + lifetime_s
        return attempt_token.mint(self._secrets[0], rollout_id, attempt_id, expires_at), expires_at


def check_attempt(token: AttemptToken, arguments: Mapping[str, Any] | None) -> None:
    """Checks that a request with an attempt's token is about that attempt.

    Args:
        token: the token of the request.
        arguments: the validated arguments of the request; None: its route is closed to attempt tokens.

    Raises:
        RefusedError: the request is about something else.
    """
    if arguments is None:
        raise RefusedError("forbidden", "an attempt's token allows writing its spans and reading its rollout only")
    for ids in _attempts_of(arguments):
        if ids not in ((token.rollout_id, token.attempt_id), (token.rollout_id, None)):
            raise RefusedError("forbidden", f"this token is for attempt {token.attempt_id} only, not for {ids}")


def spans_of(arguments: Mapping[str, Any]) -> Sequence[Span] | None:
    """Returns the spans in the arguments of a request; None if it stores no spans."""
    spans: Sequence[Span] | None = arguments.get("spans", [arguments["record"]] if "record" in arguments else None)
    return spans


def _attempts_of(arguments: Mapping[str, Any]) -> Iterable[tuple[str, str | None]]:
    """Returns the rollout and attempt ids in a request's arguments; an attempt id of None stands for the rollout."""
    if "rollout_attempt_ids" in arguments:
        return set(arguments["rollout_attempt_ids"])
    spans = spans_of(arguments)
    if spans is not None:
        return {(span.rollout_id, span.attempt_id) for span in spans}
    return [(arguments["rollout_id"], arguments.get("attempt_id"))]
