"""A request that gets an error instead of an answer."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web
from multidict import CIMultiDict

from agentlightning.errors import LightningError
from agentlightning_plugins.gateway.dialects.dialect import Dialect
from agentlightning_plugins.gateway.dialects.json_text import dump_json


class CallRefused(LightningError):
    """Ends the chain of a model call: the agent gets an error, in the form of its API.

    The error is the gateway's own, or the one that a backend answered.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None,
        headers: Mapping[str, str] | None = None,
        *,
        body: bytes | None = None,
    ) -> None:
        """Creates an error.

        Args:
            status: the HTTP status of the answer.
            message: the message for the agent and for the span of the call.
            code: a word that programs can compare.
            headers: headers of the answer.
            body: the body of the answer; None: an error with the message and the code.
        """
        super().__init__(message)
        self.status, self.code, self.headers, self.body = status, code, headers or {}, body

    def to_response(self, dialect: Dialect) -> web.Response:
        """Returns the answer for an agent that speaks this dialect."""
        headers, body = CIMultiDict(self.headers), self.body
        if body is None:
            headers["Content-Type"] = "application/json"
            body = dump_json(dialect.error_body(self.status, str(self), self.code))
        return web.Response(status=self.status, body=body, headers=headers)
