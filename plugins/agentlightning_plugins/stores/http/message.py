"""Names, limits and error codes that store client and store server share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, Literal, TypeAlias

from typing_extensions import TypedDict  # pydantic refuses typing's before Python 3.12

from agentlightning.errors import ConfigError, ConflictError, LightningError, NotFoundError, StoreError

PREFIX: Final = "/v1/agl"
RUN_HEADER: Final = "agl-run"
"""The run that a request is about; ``default`` without it."""
FEATURES_HEADER: Final = "agl-features"
"""On every answer: the capabilities of the store behind the server, separated by commas."""
TIME_HEADER: Final = "agl-time"
"""On every answer: Unix time by the clock of the store."""
TOKEN_VARIABLE: Final = "AGL_TOKEN"

MAX_POLL_S: Final = 30.0
"""The longest wait of one request; a client that waits longer sends another."""
MAX_BODY_BYTES: Final = 64 * 2**20
"""Of a request, after decompression."""
MAX_ITEM_BYTES: Final = 8 * 2**20
"""Of one rollout, span, snapshot or other value in a request, as JSON."""

# fmt: off
ErrorCode: TypeAlias = Literal[
    "malformed", "unauthorized", "forbidden", "not_found", "no_route",
    "conflict", "too_large", "invalid", "internal", "store_failed",
]
# fmt: on
ERRORS: Final[dict[ErrorCode, tuple[int, type[LightningError]]]] = {
    "malformed": (400, ConfigError),
    "unauthorized": (401, ConfigError),
    "forbidden": (403, ConfigError),
    "not_found": (404, NotFoundError),
    "no_route": (404, StoreError),
    "conflict": (409, ConflictError),
    "too_large": (413, ConfigError),
    "invalid": (422, ConfigError),
    "internal": (500, StoreError),
    "store_failed": (503, StoreError),
}
"""The HTTP status of each code, and the error that the client raises for it."""


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
    token, path = os.environ.get(TOKEN_VARIABLE), os.environ.get(f"{TOKEN_VARIABLE}_FILE")
    return token or (read_token_file(Path(path))[0] if path else None)


class ErrorAnswer(TypedDict):
    """The body of every answer that is an error."""

    code: ErrorCode
    message: str
