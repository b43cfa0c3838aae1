"""Who may ask: holders of the full token for everything, holders of an attempt's token for that attempt's records."""

from __future__ import annotations

import functools
import hmac
import ipaddress
import time
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web

from agentlightning.errors import ConflictError
from agentlightning.run import attempt_token
from agentlightning.run.attempt_token import AttemptToken
from agentlightning_plugins.stores.http.message import PREFIX
from agentlightning_plugins.stores.http.route import AttemptIds
from agentlightning_plugins.stores.http.server.answer import RefusedError

_BEARER: Final = "Bearer "


class Access:
    """Decides over requests. Without a token it lets in every program on this machine, but no page in a browser."""

    def __init__(self, token: str | None) -> None:
        self._expected = None if token is None else (_BEARER + token).encode(errors="surrogateescape")
        self._secret = None if token is None else attempt_token.derive_secret(token)

    def admit(self, request: web.Request) -> AttemptToken | None:
        """The attempt that the request may be about; None: it may be about anything.

        Raises:
            RefusedError: the request comes from a stranger.
        """
        if self._expected is None or self._secret is None:
            _refuse_web_pages(request.host, request.headers.get("origin"))
            return None
        shown = request.headers.get("authorization", "")
        if hmac.compare_digest(shown.encode(errors="surrogateescape"), self._expected):
            return None
        if shown.startswith(_BEARER + attempt_token.PREFIX):
            try:
                return attempt_token.read(self._secret, shown.removeprefix(_BEARER), time.time())
            except ValueError as error:
                raise RefusedError("unauthorized", str(error)) from error
        if request.path == PREFIX + "/health":
            return None
        raise RefusedError("unauthorized", "no token or a wrong one; give the token that the store was started with")

    def mint(self, rollout_id: str, attempt_id: str, lifetime_s: float) -> tuple[str, float]:
        """A token for one attempt, and when it expires (Unix time).

        Raises:
            ConflictError: the store asks nobody for a token.
        """
        if self._secret is None:
            raise ConflictError("this store was started without a token and asks nobody for one; start it with --token")
        expires_at = time.time() + lifetime_s
        return attempt_token.mint(self._secret, rollout_id, attempt_id, expires_at), expires_at


def refuse_others(token: AttemptToken, about: Iterable[AttemptIds] | None) -> None:
    """Keeps the holder of an attempt's token to that attempt.

    Args:
        token: what was shown.
        about: the attempts that the request is about; None: it is not for such tokens.

    Raises:
        RefusedError: the request is about something else.
    """
    if about is None:
        raise RefusedError(
            "forbidden", "a token of an attempt may write that attempt's spans and read its rollout; nothing else"
        )
    own = (token.rollout_id, token.attempt_id)
    for ids in about:
        if ids not in (own, (token.rollout_id, None)):
            raise RefusedError("forbidden", f"this token is for attempt {token.attempt_id} only, not for {ids}")


@functools.lru_cache(maxsize=64)
def _refuse_web_pages(host: str, origin: str | None) -> None:
    """Without a token, a page in the user's browser must not reach the store, neither across sites nor by rebinding."""
    if not is_loopback(_host_name(host)) or (origin and urlsplit(origin).netloc != host):
        raise RefusedError(
            "forbidden", f"without a token the store answers programs on this machine only, not {origin or host!r}"
        )


def _host_name(host: str) -> str:
    try:
        return urlsplit("//" + host).hostname or ""
    except ValueError:  # an unfinished bracket
        return ""


def is_loopback(host: str) -> bool:
    """Whether a host name or address means this machine, as seen from itself."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
