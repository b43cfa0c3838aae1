"""Access to the dashboard: sessions in a cookie, bearer tokens of scripts, and protection against other sites."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from aiohttp import web

from agentlightning_plugins.shared.web.request import is_local_request

SESSION_S: Final = 12 * 3600.0
_BEARER: Final = "Bearer "
_REFUSAL_S: Final = 0.5
"""A wrong token is refused after this time, which slows down guessing."""


class SignedIn(NamedTuple):
    """The session of an admitted request."""

    id: str
    """The signed value of the cookie; empty without a cookie."""
    is_script: bool = False
    """Whether the request sent the token in a header, which other sites cannot make a browser do."""


class Access:
    """Checks requests. Without tokens, only programs on this machine are admitted."""

    def __init__(self, tokens: Sequence[str]) -> None:
        """Accepts any of the tokens; a session ends when the token that it was opened with is no longer valid."""
        self._key_without_tokens = secrets.token_bytes(32)
        self.replace_tokens(tokens)

    def replace_tokens(self, tokens: Sequence[str]) -> None:
        """Replaces the accepted tokens."""
        self._tokens = tuple(tokens)
        self._keys = [hashlib.sha256(b"dashboard session\0" + token.encode()).digest() for token in self._tokens]
        # All servers of a store have the same tokens, so each server accepts forms of the other servers.
        self._form_keys = [hashlib.sha256(b"dashboard form\0" + token.encode()).digest() for token in self._tokens]
        self._form_keys = self._form_keys or [self._key_without_tokens]

    @property
    def needs_token(self) -> bool:
        """Whether users have to sign in."""
        return bool(self._tokens)

    def find_session(self, request: web.Request) -> SignedIn | None:
        """Returns the session of a request; None if the client has to sign in, or if another site sent the request."""
        if not self._tokens:
            return SignedIn("") if is_local_request(request.host, request.headers.get("origin")) else None
        given = request.headers.get("authorization", "")
        if given.startswith(_BEARER):
            return SignedIn("", is_script=True) if self._find_token(given.removeprefix(_BEARER)) is not None else None
        cookie = request.cookies.get(_cookie_name(request), "")
        body, _, signature = cookie.rpartition(".")
        expires_at = body.partition(".")[0]
        if not expires_at.isdecimal() or len(expires_at) > 12 or int(expires_at) < time.time():
            return None
        return SignedIn(cookie) if _is_signed(self._keys, body, signature) else None

    async def sign_in(self, request: web.Request, response: web.StreamResponse, token: str) -> bool:
        """Puts the cookie of a new session into the response if the token is right."""
        number = self._find_token(token)
        if number is None:
            await asyncio.sleep(_REFUSAL_S)
            return False
        body = f"{int(time.time() + SESSION_S)}.{secrets.token_hex(8)}"
        value = f"{body}.{_sign(self._keys[number], body)}"
        is_secure = request.secure or request.headers.get("x-forwarded-proto") == "https"
        response.set_cookie(
            _cookie_name(request), value, max_age=int(SESSION_S), httponly=True, samesite="Strict", secure=is_secure
        )
        return True

    def sign_out(self, request: web.Request, response: web.StreamResponse) -> None:
        """Removes the cookie."""
        response.del_cookie(_cookie_name(request), httponly=True, samesite="Strict")

    def form_token(self, session: SignedIn | None) -> str:
        """Returns the value that forms of this session send, which other sites cannot read."""
        return _sign(self._form_keys[0], "" if session is None else session.id)

    def allows_form(self, request: web.Request, session: SignedIn | None, form_token: str) -> bool:
        """Returns whether a form was sent by one of our pages in this session."""
        origin = request.headers.get("origin")
        if origin is not None and origin.partition("://")[2] != request.host:
            return False
        if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return False
        if session is not None and session.is_script:
            return True
        return _is_signed(self._form_keys, "" if session is None else session.id, form_token)

    def _find_token(self, token: str) -> int | None:
        given = token.encode(errors="replace")
        matches = [hmac.compare_digest(given, expected.encode()) for expected in self._tokens]
        return matches.index(True) if any(matches) else None


def _sign(key: bytes, text: str) -> str:
    return hmac.new(key, text.encode(errors="replace"), hashlib.sha256).hexdigest()


def _is_signed(keys: Sequence[bytes], text: str, signature: str) -> bool:
    given = signature.encode(errors="replace")  # may have characters that compare_digest rejects in a string
    return any(hmac.compare_digest(_sign(key, text).encode(), given) for key in keys)


def _cookie_name(request: web.Request) -> str:
    """Returns a name for each port: all ports of a host share cookies, so two dashboards on it need two names."""
    port = request.host.rpartition(":")[2]
    return f"agl_session_{port}" if port.isdecimal() else "agl_session"
