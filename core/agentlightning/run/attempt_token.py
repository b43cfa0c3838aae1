"""Tokens for one attempt, which an agent gets instead of the store's token.

The gateway accepts them as API keys, and the store server for the attempt's own spans. They are signed with a secret
derived from the store's token, so they are not stored and every process with the store's token can check them.
"""

from __future__ import annotations

import base64
import hmac
import json
import secrets
from collections.abc import Iterable
from typing import Final, NamedTuple

PREFIX: Final = "agl-"
DEFAULT_LIFETIME_S: Final = 24 * 3600.0
"""Lifetime for attempts without a timeout. The gateway refuses ended attempts; the store marks their spans as late."""
_SLACK_S: Final = 3600.0  # added to an attempt's timeout, for clock differences and attempts that start late
_PROCESS_SECRET: Final = secrets.token_bytes(32)


class AttemptToken(NamedTuple):
    """The content of a token."""

    rollout_id: str
    attempt_id: str
    expires_at: float
    """Unix time at which the token expires."""


def derive_secret(store_token: str | None) -> bytes:
    """Returns the signing secret; without a store token (a store of this process) it is random for each process."""
    if not store_token:
        return _PROCESS_SECRET
    return hmac.digest(store_token.encode(), b"agentlightning attempt token", "sha256")


def mint(secret: bytes, rollout_id: str, attempt_id: str, expires_at: float) -> str:
    """Signs a token that is valid until ``expires_at``, a Unix time."""
    payload = _encode(json.dumps([rollout_id, attempt_id, expires_at], separators=(",", ":")).encode())
    return f"{PREFIX}{payload}.{_sign(secret, payload)}"


def issue(
    store_token: str | None, rollout_id: str, attempt_id: str, now: float, timeout_seconds: float | None = None
) -> str:
    """Signs a token for an attempt that starts now, by the store's clock; a timeout of None means no limit."""
    return mint(derive_secret(store_token), rollout_id, attempt_id, expiry(now, timeout_seconds))


def read(secret: bytes, token: str, now: float) -> AttemptToken:
    """Checks a token and returns its content; raises ValueError, without quoting the token, if it is not valid."""
    payload, _, signature = token.removeprefix(PREFIX).partition(".")
    is_signed = hmac.compare_digest(_sign(secret, payload).encode(), signature.encode())
    if not token.startswith(PREFIX) or not is_signed:
        raise ValueError("the attempt token was not signed by this store's token")
    return decode(token, now)


def read_any(accepted: Iterable[bytes], token: str, now: float) -> AttemptToken:
    """Checks a token that may be signed with any of at least one secret; see ``read``."""
    problem = None
    for secret in accepted:
        try:
            return read(secret, token, now)
        except ValueError as error:
            problem = problem or error
    assert problem is not None
    raise problem


def decode(token: str, now: float) -> AttemptToken:
    """Returns the content of a token without checking its signature; ValueError if it is malformed or expired."""
    payload = token.removeprefix(PREFIX).partition(".")[0]
    try:
        content = AttemptToken(*json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4))))
        is_expired = now >= content.expires_at
    except (TypeError, ValueError, RecursionError):
        raise ValueError("the attempt token is malformed") from None
    if is_expired:
        raise ValueError(f"the attempt token of {content.attempt_id} expired {now - content.expires_at:.0f} s ago")
    return content


def expiry(now: float, timeout_seconds: float | None) -> float:
    """Returns when the token of an attempt that starts at ``now`` expires."""
    return now + (DEFAULT_LIFETIME_S if timeout_seconds is None else timeout_seconds + _SLACK_S)


def _sign(secret: bytes, payload: str) -> str:
    return _encode(hmac.digest(secret, payload.encode(), "sha256"))


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
