"""Proxies of the environment: not for this machine, but for everything else."""

from __future__ import annotations

import logging
import os
from typing import Final
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

logger = logging.getLogger("agentlightning")
_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")


def bypass_proxies() -> None:
    """Adds the addresses of this machine to NO_PROXY, for agents and our own clients, and logs it.

    The gateway and the store serve agents on loopback, where no proxy can reach them.
    """
    if not getproxies().keys() & {"http", "https", "all"}:
        return
    given = ",".join(os.environ.get(name, "") for name in ("no_proxy", "NO_PROXY"))
    hosts = [host for each in given.split(",") if (host := each.strip())]
    missing = [host for host in _LOOPBACK if host not in hosts]
    if missing and "*" not in hosts:
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(dict.fromkeys([*hosts, *missing]))
        logger.info("the environment has a proxy; calls on this machine do without (NO_PROXY += %s)", ",".join(missing))


def find_proxy(url: str) -> str | None:
    """Returns the HTTP proxy that the environment has for a URL; None for this machine and for hosts in NO_PROXY."""
    parts, proxies = urlsplit(url), getproxies()
    proxy, host = proxies.get(parts.scheme) or proxies.get("all"), parts.hostname or ""
    if not proxy or host in _LOOPBACK or proxy_bypass(host):
        return None
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    return proxy if proxy.startswith(("http://", "https://")) else None
