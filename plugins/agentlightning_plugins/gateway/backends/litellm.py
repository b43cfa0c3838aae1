"""The provider ``litellm``: model servers without a dialect of ours, through the litellm library in this process."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import aiohttp

from agentlightning_plugins.gateway.backends.provider import BackendAnswer, IteratedAnswer, ModelBackend, Provider, once
from agentlightning_plugins.gateway.dialects.wire import DONE, dump_json, parse_json, to_event

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # without it, the import downloads a list of prices

import litellm  # it reads the variable when it is imported

litellm.suppress_debug_info = True

_NOT_PASSED: Final = ("return_token_ids", "metadata")
"""Providers behind litellm refuse the first field; the second one configures litellm's own callbacks."""
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
        self, session: aiohttp.ClientSession, backend: ModelBackend, path: str, body: bytes, headers: Mapping[str, str]
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
        except Exception as error:  # isolation point: each provider behind litellm has its own errors
            status, message = getattr(error, "status_code", 500), _first_line(error, backend.api_key)
            told = {"error": {"message": message, "type": type(error).__name__, "param": None, "code": None}}
            return IteratedAnswer(once(dump_json(told)), status=status if isinstance(status, int) else 500)
        if request.get("stream"):
            return IteratedAnswer(_events(answer, backend.api_key), "text/event-stream", source=answer)
        return IteratedAnswer(once(dump_json(answer.model_dump(mode="json"))))


def _first_line(error: Exception, api_key: str | None) -> str:
    """Returns an error's message without the key, and without the traceback and advice that litellm appends."""
    line = str(getattr(error, "message", None) or error).partition("\n")[0]
    return line.replace(api_key, "***") if api_key else line


async def _events(chunks: Any, api_key: str | None) -> AsyncIterator[bytes]:
    try:
        async for chunk in chunks:
            yield to_event(dump_json(chunk.model_dump(mode="json", exclude_none=True)))
    except Exception as error:  # isolation point: as in LiteLLM.send
        raise aiohttp.ClientPayloadError(_first_line(error, api_key)) from error
    yield to_event(DONE)
