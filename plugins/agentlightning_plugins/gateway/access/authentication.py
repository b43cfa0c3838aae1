"""API keys: which attempt a call belongs to, and who may operate the gateway."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from agentlightning.run import attempt_token
from agentlightning.store.protocol import LightningStore
from agentlightning.store.span_writer import AttemptKey
from agentlightning_plugins.gateway.refusal import CallRefused
from agentlightning_plugins.shared.web.access import is_among

_MAX_REMEMBERED: Final = 10_000


class Authenticator:
    """Checks API keys: attempt tokens, signed with the token of the gateway's store."""

    def __init__(self, store: LightningStore, *, is_required: bool, operator_key: str) -> None:
        self._is_required = is_required
        self._operator_key = operator_key
        self._store = store  # its token is read for each check, because a store may be served later
        self._known: dict[str, attempt_token.AttemptToken] = {}

    def authenticate(self, headers: Mapping[str, str], named: AttemptKey | None) -> AttemptKey | None:
        """Returns the attempt of a call, by its key or its URL (``named``); None if neither names one.

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
            return named
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
        known = self._store.token, self._operator_key
        return is_among(_read_key(headers) or "", filter(None, known))

    def _read(self, key: str, can_be_foreign: bool) -> attempt_token.AttemptToken:
        claim, now = self._known.get(key), self._store.now()
        if claim is None or claim.expires_at <= now:
            try:
                claim = attempt_token.read(attempt_token.derive_secret(self._store.token), key, now)
            except ValueError:
                if not can_be_foreign or self._store.token is not None:
                    raise
                return attempt_token.decode(key, now)
            self._known[key] = claim
            if len(self._known) > _MAX_REMEMBERED:
                del self._known[next(iter(self._known))]
        return claim


def _read_key(headers: Mapping[str, str]) -> str | None:
    """Returns the API key of a request of OpenAI's, Anthropic's or Azure's clients."""
    bearer = headers.get("Authorization")
    if bearer is not None:
        scheme, _, key = bearer.partition(" ")
        return key.strip() if scheme.lower() == "bearer" else bearer
    return headers.get("x-api-key") or headers.get("api-key")
