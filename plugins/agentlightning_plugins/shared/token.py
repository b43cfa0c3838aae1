"""The token of a served store: reads it from the environment or a file, and checks that it can be sent."""

from __future__ import annotations

import os
from pathlib import Path

from agentlightning.errors import ConfigError


def check_token(token: str) -> str:
    """Returns a token, after checking that it can be sent in a header as it is.

    Raises:
        ConfigError: the token cannot be sent. The message does not quote it.
    """
    if not token or not token.isprintable() or token != token.strip():
        raise ConfigError(
            "the token of the store (--token or AGL_TOKEN) is empty, begins or ends with a blank, or has a line end or "
            "another control character, which a header cannot carry; remove it"
        )
    return token


def read_token_file(path: Path) -> list[str]:
    """Returns the tokens in a file, which has one on each line; there is at least one.

    Raises:
        ConfigError: the file cannot be read, or has no token or an invalid one.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the token file {path} cannot be read: {error}") from error
    tokens = [check_token(line.rstrip("\r")) for line in lines if line.strip()]
    if not tokens:
        raise ConfigError(f"the token file {path} is empty; write a token on its first line")
    return tokens


def find_token() -> str | None:
    """Returns the token in the environment: AGL_TOKEN if not empty, or the first in the file AGL_TOKEN_FILE."""
    token, path = os.environ.get("AGL_TOKEN"), os.environ.get("AGL_TOKEN_FILE")
    return token or (read_token_file(Path(path))[0] if path else None)
