"""Names, limits and error codes that store client and store server share."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

from typing_extensions import TypedDict  # pydantic refuses typing's before Python 3.12

from agentlightning.errors import (
    ConfigError,
    ConflictError,
    LightningError,
    NotFoundError,
    QuotaError,
    StorageFullError,
    StoreError,
)

PREFIX: Final = "/v1/agl"
RUN_HEADER: Final = "agl-run"
"""The run that a request is about; without this header, the run is ``default``."""
FEATURES_HEADER: Final = "agl-features"
"""Sent with every answer: the capabilities of the store behind the server, separated by commas."""
TIME_HEADER: Final = "agl-time"
"""Sent with every answer: Unix time by the clock of the store."""

MAX_POLL_S: Final = 30.0
"""The longest wait of one request; a client that waits longer sends another request."""
MAX_BODY_BYTES: Final = 64 * 2**20
"""Maximum size of a request, after decompression."""
MAX_ITEM_BYTES: Final = 8 * 2**20
"""Maximum size of one rollout, span, snapshot or other value in a request, as JSON."""

# fmt: off
ErrorCode: TypeAlias = Literal[
    "malformed", "unauthorized", "forbidden", "not_found", "no_route",
    "conflict", "too_large", "over_quota", "invalid", "internal", "store_failed",
    "storage_full",
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
    "over_quota": (413, QuotaError),
    "invalid": (422, ConfigError),
    "internal": (500, StoreError),
    "store_failed": (503, StoreError),
    "storage_full": (503, StorageFullError),
}
"""The HTTP status of each code, and the error that the client raises for it."""


class ErrorAnswer(TypedDict):
    """The body of every answer that is an error."""

    code: ErrorCode
    message: str
