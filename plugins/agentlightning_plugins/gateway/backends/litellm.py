"""The provider ``litellm``: model servers without a dialect of ours, through the litellm library in this process."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

import aiohttp
from multidict import CIMultiDict, CIMultiDictProxy

from agentlightning_plugins.gateway.backends.provider import BackendAnswer, Provider
from agentlightning_plugins.gateway.dialects.json_text import dump_json, parse_json
from agentlightning_plugins.gateway.dialects.sse import DONE, to_event

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # without it, the import downloads a list of prices

import litellm  # it reads the variable when it is imported

if TYPE_CHECKING:
    from agentlightning_plugins.gateway.backends.backend import Backend

litellm.suppress_debug_info = True

_NOT_PASSED: Final = ("return_token_ids", "metadata")
"""The providers behind it do not know the first and refuse it; the second configures litellm's own callbacks."""
_NO_MCP: Final = {"_skip_mcp_handler": True}  # the tools are the agent's; litellm's own need another version of mcp
_OWN: Final = ("model", "api_base", "api_key")


class LiteLLM(Provider):
    """Any provider that ``litellm`` supports: the entry's ``model`` has its prefix, as in ``bedrock/...``."""

    name = "litellm"
    dialects = frozenset({"openai-chat", "openai-embeddings"})
    endpoint = ""

    def url(self, endpoint: str, path: str) -> str:
        return f"{endpoint or 'litellm:'}/{path}"

    def authorize(self, api_key: str) -> Mapping[str, str]:
        return {}

    async def send(
        self, session: aiohttp.ClientSession, backend: Backend, path: str, body: bytes, headers: Mapping[str, str]
    ) -> BackendAnswer:
        request = {key: value for key, value in parse_json(body).items() if key not in _NOT_PASSED}
        settings = {key: value for key, value in backend.settings.items() if key not in _OWN}
        options = {
            **request,
            "drop_params": True,
            **settings,
            "api_base": backend.endpoint or None,
            "api_key": backend.api_key,
            "num_retries": 0,  # the gateway retries
            "max_retries": 0,
            **(_NO_MCP if path == "chat/completions" else {}),
        }
        call = litellm.aembedding if path == "embeddings" else litellm.acompletion
        try:
            answer = await call(**options)
        except litellm.exceptions.APIConnectionError as error:
            raise aiohttp.ClientConnectionError(_first_line(error, backend.api_key)) from error
        except Exception as error:  # isolation point: each provider behind litellm has errors of its own
            status, message = getattr(error, "status_code", 500), _first_line(error, backend.api_key)
            told = {"error": {"message": message, "type": type(error).__name__, "param": None, "code": None}}
            return _Answer(status if isinstance(status, int) else 500, _once(dump_json(told)))
        if request.get("stream"):
            return _Answer(200, _events(answer), "text/event-stream", backend.api_key, answer)
        return _Answer(200, _once(dump_json(answer.model_dump(mode="json"))))


@dataclass(eq=False)
class _Answer:
    """An answer of litellm in the form of an HTTP response."""

    status: int
    pieces: AsyncIterator[bytes]
    content_type: str = "application/json"
    api_key: str | None = None
    source: object = None
    """The stream behind ``pieces``: closing a generator does not close its source."""
    is_over: bool = False

    @property
    def headers(self) -> CIMultiDictProxy[str]:
        return CIMultiDictProxy(CIMultiDict({"Content-Type": self.content_type}))

    @property
    def content(self) -> Self:
        return self

    async def readany(self) -> bytes:
        try:
            return await anext(self.pieces)
        except StopAsyncIteration:
            self.is_over = True
            return b""
        except Exception as error:  # isolation point: as in LiteLLM.send
            self.is_over = True
            raise aiohttp.ClientPayloadError(_first_line(error, self.api_key)) from error

    def at_eof(self) -> bool:
        return self.is_over

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for stream in (self.pieces, self.source):
            close = getattr(stream, "aclose", None)
            if close is not None:
                await close()


def _first_line(error: Exception, api_key: str | None) -> str:
    """Returns an error's message without the key, and without the traceback and advice that litellm appends."""
    line = str(getattr(error, "message", None) or error).partition("\n")[0]
    return line.replace(api_key, "***") if api_key else line


async def _once(body: bytes) -> AsyncIterator[bytes]:
    yield body


async def _events(chunks: Any) -> AsyncIterator[bytes]:
    async for chunk in chunks:
        yield to_event(dump_json(chunk.model_dump(mode="json", exclude_none=True)))
    yield to_event(DONE)
