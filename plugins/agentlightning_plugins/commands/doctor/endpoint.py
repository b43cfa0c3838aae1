"""The check ``endpoint``, and the answers of the scripted model server."""

from __future__ import annotations

import asyncio
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from agentlightning_plugins.commands.doctor.check import Check, broken, ok, one_line

if TYPE_CHECKING:
    from agentlightning_plugins.shared.scripted_model.server import Answer, RecordedRequest

_TIMEOUT_S: Final = 10.0
_EXAMPLES: Final[dict[str, Any]] = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}


async def check_endpoint(endpoint: str, model: str | None, api_key: str | None) -> tuple[Check, str | None]:
    """Checks a server by listing its models, a request that costs nothing.

    Returns:
        The check and the name of the model to use, which is None if the check failed.
    """
    try:
        models = await asyncio.to_thread(_list_models, endpoint, api_key)
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            said = f"{endpoint} refuses the key ({error.code} {error.reason})"
            return broken("endpoint", said, "give a valid key: --api-key, or OPENAI_API_KEY"), None
        if error.code == 404 and model is not None:  # not every server has a list
            return ok("endpoint", f"{endpoint} answers, but lists no models; using {model}"), model
        said = f"{endpoint}/models answers {error.code} {error.reason}"
        return broken("endpoint", said, _suggest_url(endpoint)), None
    except OSError as error:
        said = f"{endpoint} cannot be reached: {one_line(getattr(error, 'reason', error))}"
        return broken("endpoint", said, "start the model server, or give another --endpoint"), None
    except (ValueError, http.client.HTTPException) as error:
        said = f"{endpoint}/models is not an OpenAI-compatible server: {one_line(error)}"
        return broken("endpoint", said, _suggest_url(endpoint)), None
    if model is None and not models:
        return broken("endpoint", f"{endpoint} serves no model", "load a model there, or name one with --model"), None
    if model is not None and models and model not in models:
        said = f"{endpoint} has no model {model!r}; it has: {', '.join(models[:10])}"
        return broken("endpoint", said, "name one of them with --model"), None
    chosen = model or models[0]
    return ok("endpoint", f"{endpoint} answers; model {chosen}"), chosen


def _suggest_url(endpoint: str) -> str:
    if endpoint.rstrip("/").endswith("/v1"):
        return "give the base URL of an OpenAI-compatible server, such as http://127.0.0.1:8000/v1"
    return "the base URL usually ends in /v1, such as http://127.0.0.1:8000/v1"


def _list_models(endpoint: str, api_key: str | None) -> list[str]:
    request = urllib.request.Request(endpoint.rstrip("/") + "/models")  # noqa: S310 # the user's own endpoint
    if api_key is not None:
        request.add_header("Authorization", f"Bearer {api_key}")
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:  # noqa: S310 # as above
        answer = json.load(response)
    data = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(data, list):
        raise ValueError("the response is not a list of models")
    return [str(item["id"]) for item in data if isinstance(item, dict) and "id" in item]


def answer_request(request: RecordedRequest) -> Answer:
    """Answers as the scripted server: calls the first tool once, with valid arguments, then replies with text."""
    from agentlightning_plugins.shared.scripted_model.server import Answer

    tools = request.body.get("tools") or ()
    messages = request.body.get("messages") or ()
    has_called = any(message.get("role") == "tool" for message in messages)
    functions = [tool["function"] for tool in tools if isinstance(tool.get("function"), Mapping)]
    if functions and not has_called:
        function = functions[0]
        return Answer(tool_calls=[(function["name"], _example(function.get("parameters") or {}))])
    return Answer("This is a scripted answer.")


def _example(schema: Mapping[str, Any]) -> Any:
    """Returns a value that is valid under a JSON schema; supports the keywords that tool parameters use."""
    for key in ("default", "const"):
        if key in schema:
            return schema[key]
    if schema.get("enum"):
        return schema["enum"][0]
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        return _example(options[0])
    kind = schema.get("type", "object" if "properties" in schema else "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        wanted = schema.get("required", list(schema.get("properties") or ()))
        return {name: _example(value) for name, value in (schema.get("properties") or {}).items() if name in wanted}
    return _EXAMPLES.get(kind, "1")
