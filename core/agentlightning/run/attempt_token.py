"""Tokens good for one attempt: what an agent gets instead of the token of the store.

The gateway takes one as API key, the store server for the attempt's own spans. Everybody who holds the store's token
can sign and check them, so nothing secret is stored or published and nobody has to be asked.
"""

from __future__ import annotations

import base64
import hmac
import json
import secrets
import time
from typing import Final, NamedTuple

PREFIX: Final = "agl-"
DEFAULT_LIFETIME_S: Final = 24 * 3600.0
"""For attempts without a timeout. Gateway and store also refuse an attempt that is over."""
_SLACK_S: Final = 3600.0
"""Beyond an attempt's timeout: clocks differ, and queued attempts begin late."""
_PROCESS_SECRET: Final = secrets.token_bytes(32)


class AttemptToken(NamedTuple):
    """What a token says."""

    rollout_id: str
    attempt_id: str
    expires_at: float
    """Unix time."""


def derive_secret(store_token: str | None) -> bytes:
    """What attempt tokens are signed with.

    Args:
        store_token: the token of the store. None, for a store that only this process uses, gives a secret that is
            random for each process.
    """
    if not store_token:
        return _PROCESS_SECRET
    return hmac.digest(store_token.encode(), b"agentlightning attempt token", "sha256")


def mint(secret: bytes, rollout_id: str, attempt_id: str, expires_at: float) -> str:
    """Signs a token that is good until ``expires_at``, a Unix time."""
    payload = _encode(json.dumps([rollout_id, attempt_id, expires_at], separators=(",", ":")).encode())
    return f"{PREFIX}{payload}.{_sign(secret, payload)}"


def issue(store_token: str | None, rollout_id: str, attempt_id: str, timeout_seconds: float | None = None) -> str:
    """Signs a token for an attempt that begins now.

    Args:
        store_token: see ``derive_secret``.
        rollout_id: of the attempt.
        attempt_id: the attempt.
        timeout_seconds: how long it may take; None when there is no limit.
    """
    return mint(derive_secret(store_token), rollout_id, attempt_id, expiry(time.time(), timeout_seconds))


def read(secret: bytes, token: str, now: float) -> AttemptToken:
    """Checks a token and says whose it is.

    Raises:
        ValueError: it is not a token, somebody else signed it, or it has expired. The message does not quote it.
    """
    payload, _, signature = token.removeprefix(PREFIX).partition(".")
    is_signed = hmac.compare_digest(_sign(secret, payload).encode(), signature.encode())
    if not token.startswith(PREFIX) or not is_signed:
        raise ValueError("the attempt token was not signed by this store's token")
    rollout_id, attempt_id, expires_at = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    if now >= expires_at:
        raise ValueError(f"the attempt token of {attempt_id} expired {now - expires_at:.0f} s ago")
    return AttemptToken(rollout_id, attempt_id, expires_at)


def expiry(now: float, timeout_seconds: float | None) -> float:
    """When the token of an attempt that begins now should expire."""
    return now + (DEFAULT_LIFETIME_S if timeout_seconds is None else timeout_seconds + _SLACK_S)


def _sign(secret: bytes, payload: str) -> str:
    return _encode(hmac.digest(secret, payload.encode(), "sha256"))


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
