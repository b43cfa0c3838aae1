"""``openenv:http://...``: environments that a server of OpenEnv has."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from agentlightning.environment import Environment, Observation, StepResult
from agentlightning.errors import ConfigError, RolloutError
from agentlightning.plugin.hookspecs import Component, hookimpl

_FULL: Final = "CAPACITY_REACHED"
_PAUSE_S: Final = 0.2
"""Seconds between two tries to get a session of a server that is full."""


@hookimpl
def components() -> list[Component]:
    target = f"{__name__}:OpenEnvEnvironment"
    return [Component("environment", "openenv", target, summary="environments on a server of OpenEnv")]


class OpenEnvEnvironment(Environment):
    """An environment on a server; each episode has its own session, which waits while the server is full.

    If an action has a single field, a text, the answer of the model is the action; other actions are calls of the tool
    ``act``, with the server's schema. The fields of a task are the arguments of the server's ``reset``.
    """

    def __init__(self, address: str, headers: Mapping[str, str] | None = None) -> None:
        """Describes the server.

        Args:
            address: URL of the server.
            headers: headers of the connection, such as ``Authorization``.

        Raises:
            ConfigError: the address is not a URL.
        """
        if not address.startswith(("http://", "https://")):
            raise ConfigError(f"openenv = {address!r}: give the URL of the server, as in openenv:http://127.0.0.1:8000")
        self.address, self._headers = address.rstrip("/"), dict(headers or {})
        self._field: str | None = None

    async def reset(self, task: Any, seed: int) -> Observation:
        import aiohttp

        self._http = aiohttp.ClientSession(headers=self._headers, timeout=aiohttp.ClientTimeout(self.timeout_s))
        try:
            async with self._http.get(f"{self.address}/schema", raise_for_status=True) as response:
                self._schema = (await response.json())["action"]
        except (aiohttp.ClientError, ValueError, KeyError) as error:
            raise RolloutError(f"{self.address} does not answer as a server of OpenEnv: {error}") from error
        fields = {key: field for key, field in self._schema.get("properties", {}).items() if key != "metadata"}
        if [field.get("type") for field in fields.values()] == ["string"]:
            self._field = next(iter(fields))
        arguments = {**(task if isinstance(task, Mapping) else {}), "seed": seed}
        while (answer := await self._connect(arguments)).get("code") == _FULL:
            await self._socket.close()
            await asyncio.sleep(_PAUSE_S)
        return self._read(answer)[0]

    async def tools(self) -> Sequence[Mapping[str, Any]]:
        if self._field is not None:
            return ()
        properties = {key: field for key, field in self._schema.get("properties", {}).items() if key != "metadata"}
        schema = {**self._schema, "properties": properties}
        return [{"name": "act", "description": self._schema.get("description", ""), "parameters": schema}]

    async def step(self, action: str) -> StepResult:
        if self._field is None:
            return "error: act by a call of the tool act"
        return await self.call("act", {self._field: action})

    async def call(self, name: str, arguments: Mapping[str, Any]) -> StepResult:
        answer = await self._ask({"type": "step", "data": dict(arguments)})
        if answer.get("code") == "VALIDATION_ERROR":
            return f"error: {json.dumps(answer.get('errors', answer['message']), default=str)[:1000]}"
        return self._read(answer)

    async def close(self) -> None:
        if hasattr(self, "_socket"):
            await self._socket.close()
        if hasattr(self, "_http"):
            await self._http.close()

    async def _connect(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Opens a session and resets its environment; returns the answer."""
        import aiohttp

        try:
            self._socket = await self._http.ws_connect(f"{self.address}/ws", max_msg_size=0)
        except aiohttp.ClientError as error:
            raise RolloutError(f"{self.address} gives no session: {error}") from error
        return await self._ask({"type": "reset", "data": dict(arguments)})

    async def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Sends a message; returns the data of the answer."""
        import aiohttp

        with contextlib.suppress(aiohttp.ClientError, ConnectionError):  # the server may have said why
            await self._socket.send_json(message)
        answer = await self._socket.receive()
        if answer.type is not aiohttp.WSMsgType.TEXT:
            raise RolloutError(f"the session with {self.address} has ended ({answer.type.name})")
        data: dict[str, Any] = json.loads(answer.data)["data"]
        return data

    def _read(self, answer: Mapping[str, Any]) -> tuple[str, float | None, bool]:
        if "observation" not in answer:
            raise RolloutError(f"{self.address} failed: {answer.get('message', answer)}")
        fields = {key: value for key, value in answer["observation"].items() if key != "metadata" and value is not None}
        texts = list(fields.values())
        is_text = len(texts) == 1 and isinstance(texts[0], str)
        reward = answer.get("reward")
        shown = texts[0] if is_text else json.dumps(fields, ensure_ascii=False)
        return shown, None if reward is None else float(reward), bool(answer["done"])
