"""The token of a served store: where it comes from, and which ones can be sent."""

from __future__ import annotations

import os
from pathlib import Path

from agentlightning.errors import ConfigError


def check_token(token: str) -> str:
    """Returns a token that can be sent in a header as it is.

    Raises:
        ConfigError: it cannot. The message does not quote the token.
    """
    if not token or not token.isprintable() or token != token.strip():
        raise ConfigError(
            "the token of the store (--token or AGL_TOKEN) is empty, begins or ends with a blank, or has a line end or "
            "another control character, which a header cannot carry; remove it"
        )
    return token


def read_token_file(path: Path) -> list[str]:
    """The tokens in a file, one on each line; at least one.

    Raises:
        ConfigError: it cannot be read, or has no token or a wrong one.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the token file {path} cannot be read: {error}") from error
    tokens = [check_token(line.rstrip("\r")) for line in lines if line.strip()]
    if not tokens:
        raise ConfigError(f"the token file {path} is empty; write a token on its first line")
    return tokens


def find_token() -> str | None:
    """The token in the environment: AGL_TOKEN, or the first in the file AGL_TOKEN_FILE; an empty one is none."""
    token, path = os.environ.get("AGL_TOKEN"), os.environ.get("AGL_TOKEN_FILE")
    return token or (read_token_file(Path(path))[0] if path else None)
