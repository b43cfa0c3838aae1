"""The key of the operator, in a file that only the user of the gateway can read."""

from __future__ import annotations

import os
from pathlib import Path


def write_key(port: int, key: str) -> Path:
    """Writes the key of the gateway at a port, and returns the file."""
    path = _path(port)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(key)
    return path


def read_key(port: int) -> str | None:
    """Reads the key of the gateway at a port of this machine; None if there is none."""
    try:
        return _path(port).read_text(encoding="utf-8")
    except OSError:
        return None


def _path(port: int) -> Path:
    directory = os.environ.get("XDG_RUNTIME_DIR") or Path.home() / ".cache"
    return Path(directory) / "agentlightning" / f"gateway-{port}.key"
