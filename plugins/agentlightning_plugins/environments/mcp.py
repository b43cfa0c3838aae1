"""``mcp: [command]`` or a URL: the tools of a server of the Model Context Protocol."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Final, TypeVar

from agentlightning.environment import Environment, Observation, StepResult
from agentlightning.errors import ConfigError, RolloutError, suggest
from agentlightning.plugin.hookspecs import Component, hookimpl
from agentlightning_integrations.shared.agent import read_input

T = TypeVar("T")
_CLOSE_S: Final = 4.0
"""Seconds that a server has to end by itself; then its process is ended."""
_SHOWN_CHARS: Final = 2000
"""Characters from the end of a server's stderr that an error quotes."""


@hookimpl
def components() -> list[Component]:
    target = f"{__name__}:McpEnvironment"
    return [Component("environment", "mcp", target, extra="mcp", summary="tools of a Model Context Protocol server")]


class McpEnvironment(Environment):
    """The tools of a server, which the model may call until it answers without a call.

    Each episode has its own server, or its own session with the server of a URL. Tasks come from ``data``, and the
    reward from a reward function, which gets the last answer.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        tools: Sequence[str] | None = None,
    ) -> None:
        """Describes the server.

        Args:
            address: a command and its arguments, whose server speaks on stdin and stdout; or a URL (streamable HTTP).
            env: variables of the command, in addition to the few that it inherits (``PATH``, ``HOME``).
            cwd: working directory of the command.
            tools: names of the tools to offer; default is all.

        Raises:
            ConfigError: the address is neither a command nor a URL.
        """
        is_url = isinstance(address, str) and address.startswith(("http://", "https://"))
        if not is_url and (isinstance(address, str) or not address):
            raise ConfigError(f"mcp = {address!r}: give a list, such as [python, server.py], or a URL with http://")
        self.address = address
        self._env, self._cwd, self._offered = env, cwd, tools

    def tasks(self, split: str) -> None:
        return None

    async def reset(self, task: Any, seed: int) -> Observation:
        question = read_input(task, "an MCP environment")
        if not isinstance(question, str):
            raise ConfigError(f"an MCP environment takes a text, and the task is {question!r:.100}")
        self._closing = asyncio.Event()
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 # close closes it
        self._ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._session = asyncio.create_task(self._keep_session())
        self._session.add_done_callback(lambda task: task.cancelled() or task.exception())  # _ask raises it
        self._client = await self._ask("cannot be used", self._ready)
        await self._list_tools()
        return question

    async def tools(self) -> Sequence[Mapping[str, Any]]:
        return self._tools

    async def call(self, name: str, arguments: Mapping[str, Any]) -> StepResult:
        calling = self._client.call_tool(name, dict(arguments))
        result = await self._ask(f"did not answer the call of {name}", calling)
        parts = [_read_part(part) for part in _dump(result)["content"]]
        if all(part["type"] == "text" for part in parts):
            return "\n".join(part["text"] for part in parts)
        return parts

    async def close(self) -> None:
        if hasattr(self, "_session"):
            self._closing.set()
            try:
                await asyncio.wait([self._session], timeout=_CLOSE_S)
            finally:
                self._session.cancel()
                await asyncio.wait([self._session], timeout=_CLOSE_S)
                self._log.close()

    async def _keep_session(self) -> None:
        """Opens the session, and keeps it until ``close``, in a task of its own: its end cancels only this task."""
        import mcp
        from mcp.client.stdio import stdio_client
        from mcp.client.streamable_http import streamable_http_client

        if isinstance(self.address, str):
            transport: Any = streamable_http_client(self.address)
        else:
            program, *rest = self.address
            server = mcp.StdioServerParameters(command=program, args=rest, env=self._env, cwd=self._cwd)
            transport = stdio_client(server, errlog=self._log)
        async with AsyncExitStack() as stack:
            if hasattr(mcp, "Client"):  # release 2, which speaks the stateless protocol of 2026 and the one of 2025
                client: Any = await stack.enter_async_context(mcp.Client(transport))
            else:
                read, write, *_ = await stack.enter_async_context(transport)
                client = await stack.enter_async_context(mcp.ClientSession(read, write))
                await client.initialize()
            if not self._ready.done():
                self._ready.set_result(client)
                await self._closing.wait()

    async def _ask(self, what: str, answer: Awaitable[T]) -> T:
        """Awaits an answer of the server, as long as the session lasts."""
        asked = asyncio.ensure_future(answer)
        try:
            await asyncio.wait([asked, self._session], return_when=asyncio.FIRST_COMPLETED)
            if not asked.done() and not self._session.cancelled() and (lost := self._session.exception()) is not None:
                raise lost
            if not asked.done():
                raise ConnectionError("the session has ended")
            return asked.result()
        except Exception as error:  # isolation point: the server and its client may raise anything
            raise self._explain(what, error) from error
        finally:
            asked.cancel()

    async def _list_tools(self) -> None:
        found: dict[str, Any] = {}
        more: dict[str, Any] | None = {}
        while more is not None:
            page = _dump(await self._ask("did not list its tools", self._client.list_tools(**more)))
            found |= {tool["name"]: tool for tool in page["tools"]}
            more = {"cursor": page["nextCursor"]} if "nextCursor" in page else None
        for name in self._offered or ():
            if name not in found:
                known = ", ".join(found)
                raise ConfigError(f"{self._shown} has no tool {name!r}.{suggest(name, found)} Its tools: {known}.")
        self._tools = [
            {"name": name, "description": tool.get("description", ""), "parameters": tool["inputSchema"]}
            for name, tool in found.items()
            if self._offered is None or name in self._offered
        ]

    @property
    def _shown(self) -> str:
        return f"the MCP server {self.address if isinstance(self.address, str) else ' '.join(self.address)!r}"

    def _explain(self, what: str, error: Exception) -> RolloutError:
        self._log.seek(0)
        said = self._log.read().strip()[-_SHOWN_CHARS:]
        inner: BaseException = error
        while isinstance(inner, BaseExceptionGroup):
            inner = inner.exceptions[0]
        text = f"{self._shown} {what}: {type(inner).__name__}: {inner}"
        return RolloutError(text + (f"; its stderr ends with:\n{said}" if said else ""))


def _dump(result: Any) -> dict[str, Any]:
    """Returns a result with the names of the protocol; releases of the client name its attributes differently."""
    dumped: dict[str, Any] = result.model_dump(by_alias=True, mode="json", exclude_none=True)
    return dumped


def _read_part(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a part of a result as one of a chat message."""
    if part["type"] == "text":
        return {"type": "text", "text": part["text"]}
    if part["type"] == "image":
        return {"type": "image_url", "image_url": {"url": f"data:{part['mimeType']};base64,{part['data']}"}}
    return {"type": "text", "text": str(part.get("resource", part).get("text", part))}
