"""Requests of operators to a gateway, and the key of a gateway on this machine."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any, Final
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from agentlightning.errors import ConfigError, StoreError
from agentlightning_plugins.shared.token import find_token

DEFAULT_PORT: Final = 4000
_ANSWER_S: Final = 10.0


def ask_gateway(url: str, token: str | None, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Sends a request to an endpoint for operators: a POST with ``body``, or a GET.

    Raises:
        ConfigError: ``url`` is not an http(s) URL.
        StoreError: the gateway cannot be reached or answers with an error.
    """
    root = url.rstrip("/").removesuffix("/v1")
    if not root.startswith(("http://", "https://")):
        raise ConfigError(f"gateway {url!r} is not a URL; write http://127.0.0.1:{DEFAULT_PORT}")
    if token is None:
        token = find_token() or _find_key(root)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    data = None if body is None else json.dumps(body).encode()
    timeout_s = _ANSWER_S + (body or {}).get("timeout_s", 0.0)
    try:
        request = Request(f"{root}/{path}", data, headers)  # noqa: S310 # the scheme is checked above
        with urlopen(request, timeout=timeout_s) as response:  # noqa: S310 # the request above
            answer: dict[str, Any] = json.load(response)
    except HTTPError as error:
        with error:  # closes the connection
            advice = "; set --token or AGL_TOKEN" if error.code in (401, 403) else ""
        raise StoreError(f"the gateway at {root} refused /{path}: {error}{advice}") from error
    except (URLError, OSError, ValueError) as error:
        raise StoreError(f"no gateway answers at {root}: {error}") from error
    return answer


def _find_key(root: str) -> str | None:
    """Returns the operator's key of a gateway on this machine that ``agl gateway`` serves."""
    from agentlightning_plugins.shared.web.request import client_url, is_loopback

    with contextlib.suppress(ValueError, OSError):  # the port is not a number, or there is no key
        parts = urlsplit(root)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        own = [client_url(every, port) for every in ("0.0.0.0", "::")]  # noqa: S104 # not bound to
        if is_loopback(parts.hostname or "") or root in own:
            return _path(port).read_text(encoding="utf-8")
    return None


def write_key(port: int, key: str) -> Path:
    """Writes the key of the gateway at a port, and returns the file."""
    path = _path(port)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(key)
    return path


def _path(port: int) -> Path:
    directory = os.environ.get("XDG_RUNTIME_DIR") or Path.home() / ".cache"
    return Path(directory) / "agentlightning" / f"gateway-{port}.key"
