"""Whose a call is: its URL says it, its key, or both."""

from __future__ import annotations

import hmac
import time
from collections.abc import Mapping
from typing import Final, TypeAlias

from agentlightning.errors import LightningError
from agentlightning.run import attempt_token
from agentlightning.store.protocol import LightningStore

Attempt: TypeAlias = tuple[str, str]
"""Rollout and attempt id."""
_MAX_REMEMBERED: Final = 10_000


class KeyRefused(LightningError):
    """A call's key is not good for it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Authenticator:
    """Checks API keys: attempt tokens, signed with the token of the gateway's store."""

    def __init__(self, store: LightningStore, *, is_required: bool) -> None:
        """Prepares to check keys.

        Args:
            store: whose ``token`` signs; it is looked up when it is needed, because a store may be served later.
            is_required: whether calls without a good key are refused, even where a URL names an attempt.
        """
        self.is_required = is_required
        self._store = store
        self._known: dict[str, attempt_token.AttemptToken] = {}

    def authenticate(self, headers: Mapping[str, str], named: Attempt | None) -> Attempt | None:
        """The attempt of a call; None when nobody says: such a call is relayed and not recorded.

        Args:
            headers: of the call: ``Authorization: Bearer``, ``x-api-key`` or ``api-key``.
            named: the attempt in its URL.

        Raises:
            KeyRefused: the key belongs to another attempt, or a key is required and this one is not good.
        """
        key = read_key(headers)
        if key is None or not key.startswith(attempt_token.PREFIX):
            if self.is_required:
                what = "shows no key" if key is None else "shows a key that is none of an attempt"
                raise KeyRefused(401, f"this gateway wants the api_key of the attempt's LLM resource; the call {what}")
            return named
        try:
            claim = self._read(key)
        except ValueError as error:
            if named is not None and not self.is_required:
                return named
            advice = "give the store, its runners and the gateway the same token (AGL_TOKEN)"
            raise KeyRefused(401, f"{error}; {advice}") from None
        attempt = claim.rollout_id, claim.attempt_id
        if named is not None and named != attempt:
            raise KeyRefused(403, f"the key is good for attempt {attempt[1]}, and the URL names {named[1]}")
        return attempt

    def is_operator(self, headers: Mapping[str, str], *, always: bool = False) -> bool:
        """Whether a request shows the store's token; anyone is welcome where none is asked for.

        Args:
            headers: of the request.
            always: ask for it wherever the store has one, not just where keys are required.
        """
        key, token = read_key(headers), self._store.token
        if not self.is_required and (token is None or not always):
            return True
        return key is not None and token is not None and hmac.compare_digest(key.encode(), token.encode())

    def _read(self, key: str) -> attempt_token.AttemptToken:
        claim, now = self._known.get(key), time.time()
        if claim is None or claim.expires_at <= now:
            claim = attempt_token.read(attempt_token.derive_secret(self._store.token), key, now)
            self._known[key] = claim
            if len(self._known) > _MAX_REMEMBERED:
                del self._known[next(iter(self._known))]
        return claim


def read_key(headers: Mapping[str, str]) -> str | None:
    """The API key of a request, as OpenAI's, Anthropic's and Azure's clients send it."""
    bearer = headers.get("Authorization")
    if bearer is not None:
        return bearer.removeprefix("Bearer ").strip()
    return headers.get("x-api-key") or headers.get("api-key")
