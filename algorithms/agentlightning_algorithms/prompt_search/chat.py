"""Model calls that a search pays for: retried, counted, and never made twice."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

# A client imports this when it is used first: half a second within a round, and in two threads at once a deadlock.
import openai.resources.chat  # noqa: F401 # for the effect
from openai import AsyncOpenAI, DefaultAsyncHttpxClient, OpenAIError

from agentlightning.errors import ConfigError
from agentlightning_algorithms.prompt_search.budget import Budget, Usage
from agentlightning_algorithms.prompt_search.ledger import Ledger, PaidCall

logger = logging.getLogger("agentlightning")
_RETRIED_STATUS: Final = frozenset({408, 409, 429})


class PaidChat:
    """Asks chat models, within a budget. An answer is in the ledger before anybody uses it."""

    def __init__(
        self,
        client: AsyncOpenAI | None,
        ledger: Ledger,
        budget: Budget,
        *,
        attempts: int = 3,
        backoff_s: float = 1.0,
        max_concurrency: int = 16,
    ) -> None:
        """Sets up the calls.

        Args:
            client: of any OpenAI-compatible endpoint; None takes it from the environment.
            ledger: what has been paid for already.
            budget: what may be spent; counts the answers that this object gives.
            attempts: how often a call that fails is tried.
            backoff_s: before the second try; doubled before each further one.
            max_concurrency: calls at once.

        Raises:
            ConfigError: there is no key in the environment.
        """
        self._given = client
        self._client = private_copy(client)
        self._ledger = ledger
        self._budget = budget
        self._attempts = attempts
        self._backoff_s = backoff_s
        self._gate = asyncio.Semaphore(max_concurrency)
        self._counted: set[str] = set()
        self._in_flight = 0
        self.answered = 0
        self.failed: dict[str, str] = {}
        """Why a call failed, by its place, since ``begin``."""

    async def close(self) -> None:
        """Closes the connections, those of a client that the user still holds excepted."""
        if self._client is not self._given:
            await self._client.close()

    def begin(self) -> None:
        """Forgets what happened so far; called when a round begins."""
        self.answered = 0
        self.failed = {}

    async def ask(
        self, place: str, model: str, messages: Sequence[Mapping[str, Any]], *, temperature: float
    ) -> str | None:
        """The answer to a call; None when it failed or there is no budget for it.

        Args:
            place: which call of the search this is. The same place is asked once in the life of a run.
            model: as the endpoint names it.
            messages: the chat.
            temperature: of the sampling.
        """
        call = self._ledger.calls.get(place)
        if call is None:
            if place in self._ledger.skipped:
                return None
            async with self._gate:
                if self._is_spent():
                    return None
                self._in_flight += 1
                try:
                    call = await self._pay(place, model, messages, temperature)
                finally:
                    self._in_flight -= 1
            if call is None:
                return None
        if place not in self._counted:
            self._counted.add(place)
            self._budget.spend([_usage(call)])
        self.answered += 1
        return call.answer

    def _is_spent(self) -> bool:
        """What is recorded, but not asked for yet in this life of the run, is paid for as well."""
        waiting = [_usage(call) for place, call in self._ledger.calls.items() if place not in self._counted]
        return self._budget.is_spent([*waiting, *(Usage("") for _ in range(self._in_flight))])

    async def _pay(
        self, place: str, model: str, messages: Sequence[Mapping[str, Any]], temperature: float
    ) -> PaidCall | None:
        for attempt in range(self._attempts):
            if attempt:
                await asyncio.sleep(self._backoff_s * 2 ** (attempt - 1))
            try:
                reply = await self._client.chat.completions.create(
                    model=model,
                    messages=list(messages),  # type: ignore[arg-type] # plain mappings are what they are
                    temperature=temperature,
                )
                answer = (reply.choices[0].message.content or "").strip() if reply.choices else ""
            except Exception as error:  # isolation point: a call that fails is skipped, and the search goes on
                self.failed[place] = f"{type(error).__name__}: {error}"
                logger.warning("model call %s to %s failed: %s", place, model, self.failed[place])
                if not _is_worth_retrying(error):
                    return None
                continue
            usage = reply.usage
            call = PaidCall(
                place,
                model,
                answer,
                getattr(usage, "prompt_tokens", 0) or 0,
                getattr(usage, "completion_tokens", 0) or 0,
            )
            if answer:
                self._ledger.record(call)
                self.failed.pop(place, None)
                return call
            self._budget.spend([_usage(call)])
            self.failed[place] = f"{model} answered nothing"
        return None


def private_copy(client: AsyncOpenAI | None) -> AsyncOpenAI:
    """A client for one event loop, with connections of its own; None takes it from the environment.

    A run has a loop of its own, and connections do not outlive their loop. A client with the user's own
    ``http_client``, or of another class, is used as it is.

    Raises:
        ConfigError: there is no key in the environment.
    """
    if client is None:
        try:
            return AsyncOpenAI(max_retries=0)
        except OpenAIError as error:
            raise ConfigError(
                "a search for prompts asks a model for better ones: set OPENAI_API_KEY (and OPENAI_BASE_URL for "
                "another endpoint than OpenAI's), or give async_openai_client=AsyncOpenAI(...)"
            ) from error
    if type(getattr(client, "_client", None)).__name__ == "AsyncHttpxClientWrapper":
        return client.copy(http_client=DefaultAsyncHttpxClient())
    return client


def _usage(call: PaidCall) -> Usage:
    return Usage(call.model, call.prompt_tokens, call.completion_tokens)


def _is_worth_retrying(error: Exception) -> bool:
    status = getattr(error, "status_code", None)
    return not isinstance(status, int) or status in _RETRIED_STATUS or status >= 500
