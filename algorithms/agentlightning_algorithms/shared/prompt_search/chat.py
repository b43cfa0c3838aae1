"""The model calls of a prompt search: cached, counted and retried."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agentlightning.errors import ConfigError
from agentlightning_algorithms.shared.prompt_search.budget import CallUsage, SearchBudget

if TYPE_CHECKING:
    from openai import AsyncOpenAI

logger = logging.getLogger("agentlightning")
FILE_NAME: Final = "llm_calls.jsonl"
_MAX_CONCURRENCY: Final = 16
_ATTEMPTS: Final = 3
"""Attempts for a call before it is skipped."""


@dataclass(frozen=True, kw_only=True)
class CachedCall(CallUsage):
    """A model call with its answer."""

    place: str
    """Identifies the call within the search; a resumed search makes the same call at the same place."""
    answer: str


class CallCache:
    """Answered calls by place. With a file, they survive the process."""

    def __init__(self, file: Path | None = None) -> None:
        """Reads the calls of a file of JSON lines; an incomplete last line is dropped."""
        self.calls: dict[str, CachedCall] = {}
        self._file = file
        if file is not None and file.exists():
            self._load(file)

    def record(self, call: CachedCall) -> None:
        """Adds a call; it is on disk when this returns."""
        self._append(asdict(call))
        self.calls[call.place] = call

    def _append(self, line: object) -> None:
        if self._file is None:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("ab") as stream:
            stream.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
            stream.flush()
            os.fsync(stream.fileno())

    def _load(self, file: Path) -> None:
        whole, newline, incomplete = file.read_bytes().rpartition(b"\n")
        if incomplete:
            os.truncate(file, len(whole) + len(newline))
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                call = CachedCall(**json.loads(line))
            except (TypeError, ValueError) as error:
                raise ConfigError(f"{file}, line {number}: not a record of a model call: {error}") from error
            self.calls[call.place] = call


class CachedChat:
    """Calls chat models within budgets. Every answer is cached before it is used."""

    def __init__(self, client: AsyncOpenAI | None, cache: CallCache, *budgets: SearchBudget) -> None:
        """Counts calls in all ``budgets``; for ``client``, see ``copy_client``."""
        self._given = client
        self._client = copy_client(client)
        self._cache = cache
        self._budgets = budgets
        self._slots = asyncio.Semaphore(_MAX_CONCURRENCY)
        self._counted: set[str] = set()
        self._in_flight = 0
        self.answered = 0
        self.failed: dict[str, str] = {}
        """Reasons for failed calls since ``start_round``, by place."""

    async def close(self) -> None:
        """Closes our connections; a client that the user still holds stays open."""
        if self._client is not self._given:
            await self._client.close()

    def start_round(self) -> None:
        """Resets the records of answered and failed calls."""
        self.answered, self.failed = 0, {}

    async def ask(
        self, place: str, model: str, messages: Sequence[Mapping[str, Any]], *, temperature: float
    ) -> str | None:
        """Makes the call at a place of the search, or takes its answer from the cache."""
        call = self._cache.calls.get(place)
        if call is None:
            async with self._slots:
                if self._is_spent():
                    return None
                self._in_flight += 1
                try:
                    call = await self._call_model(place, model, messages, temperature)
                finally:
                    self._in_flight -= 1
            if call is None:
                return None
        if place not in self._counted:
            self._counted.add(place)
            self._spend(call)
        self.answered += 1
        return call.answer

    def _is_spent(self) -> bool:
        """Whether the budget is spent, counting calls in flight and cached calls that a resumed search will reach."""
        cached = [call for place, call in self._cache.calls.items() if place not in self._counted]
        further = [*cached, *(CallUsage("") for _ in range(self._in_flight))]
        return any(budget.is_spent(further) for budget in self._budgets)

    def _spend(self, call: CachedCall) -> None:
        for budget in self._budgets:
            budget.spend([call])

    async def _call_model(
        self, place: str, model: str, messages: Sequence[Mapping[str, Any]], temperature: float
    ) -> CachedCall | None:
        chat = self._client.with_options(max_retries=_ATTEMPTS - 1).chat
        for _ in range(_ATTEMPTS):
            try:
                reply = await chat.completions.create(
                    model=model,
                    messages=list(messages),  # type: ignore[arg-type] # its TypedDicts are plain mappings
                    temperature=temperature,
                )
                answer = (reply.choices[0].message.content or "").strip() if reply.choices else ""
            except Exception as error:  # isolation point: a call that fails is skipped, and the search goes on
                self.failed[place] = f"{type(error).__name__}: {error}"
                logger.warning("model call %s to %s failed: %s", place, model, self.failed[place])
                return None
            tokens = {
                name: getattr(reply.usage, name, 0) or 0  # some endpoints send no usage
                for name in ("prompt_tokens", "completion_tokens")
            }
            call = CachedCall(place=place, model=model, answer=answer, **tokens)
            if answer:
                self._cache.record(call)
                self.failed.pop(place, None)
                return call
            self._spend(call)
            self.failed[place] = f"{model} gave an empty answer"
        return None


def find_critic(argument: str, given: str | None) -> str:
    """Returns the model that reads rollouts: the one given, else the one that the environment names."""
    model = given or os.environ.get("AGL_CRITIC_MODEL") or os.environ.get("OPENAI_MODEL")
    if not model:
        raise ConfigError(f"{argument} = {given!r}: name a model, or set AGL_CRITIC_MODEL or OPENAI_MODEL")
    return model


def copy_client(client: AsyncOpenAI | None) -> AsyncOpenAI:
    """Returns a client with its own connections, because connections do not outlive their event loop.

    For None, the environment configures it. A client of another class, or with an own ``http_client``, stays the same.
    """
    # A client imports this at its first call: that takes half a second, and deadlocks when two threads do so at once.
    import openai.resources.chat  # noqa: F401 # for the effect
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient, OpenAIError

    if client is None:
        try:
            return AsyncOpenAI(max_retries=0)
        except OpenAIError as error:
            raise ConfigError(
                "a prompt search calls models: set OPENAI_API_KEY (and OPENAI_BASE_URL for an endpoint other than "
                "OpenAI's), or give async_openai_client=AsyncOpenAI(...)"
            ) from error
    if type(getattr(client, "_client", None)).__name__ == "AsyncHttpxClientWrapper":
        return client.copy(http_client=DefaultAsyncHttpxClient())
    return client
