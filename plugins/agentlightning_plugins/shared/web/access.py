"""Checks of the sender of a request: a program on this machine, or a client with a key."""

from __future__ import annotations

import functools
import hmac
import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from aiohttp import web

from agentlightning_plugins.shared.web.body import RequestRefused


def check_local(request: web.BaseRequest, server: str) -> None:
    """Checks that a request to a server on loopback without keys comes from a program, not from a web page.

    Raises:
        RequestRefused: 403, with a message that begins with ``server``.
    """
    headers = request.headers
    if not is_local_request(headers.get("Host", "localhost"), headers.get("Origin")):
        raise RequestRefused(403, f"{server} answers programs on this machine only, not web pages")


@functools.lru_cache(maxsize=64)
def is_local_request(host: str, origin: str | None) -> bool:
    """Whether the Host and Origin of a request to a loopback server show that it comes from a program on this machine.

    Requests from other sites' web pages do not qualify, whether they are cross-site or use DNS rebinding.
    """
    return is_loopback(_host_name(host)) and (not origin or origin.partition("://")[2] == host)


def is_loopback(host: str) -> bool:
    """Whether a host name or address is a loopback one."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _host_name(host: str) -> str:
    try:
        return urlsplit("//" + host).hostname or ""
    except ValueError:  # an IPv6 address without its closing bracket
        return ""


def is_among(shown: str, secrets: Iterable[str]) -> bool:
    """Whether a key or header that a client sent is one of these, compared in constant time."""
    given = shown.encode(errors="surrogateescape")
    return any(hmac.compare_digest(given, secret.encode(errors="surrogateescape")) for secret in secrets)
