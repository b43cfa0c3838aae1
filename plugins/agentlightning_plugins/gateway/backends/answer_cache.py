"""A cache of answers, which the store keeps in the spans of calls."""

from __future__ import annotations

import hashlib
import json
import logging
from typing import Final

import aiohttp

from agentlightning.errors import StoreError
from agentlightning.store.protocol import LightningStore
from agentlightning.types import DEFAULT_RUN_ID
from agentlightning_plugins.gateway.backends.provider import BackendAnswer, IteratedAnswer, ModelBackend, once
from agentlightning_plugins.gateway.backends.upstream import Reply
from agentlightning_plugins.gateway.call import BackendRequest, ModelCall
from agentlightning_plugins.gateway.dialects.dialect import MALFORMED
from agentlightning_plugins.shared.paging import every

logger = logging.getLogger("agentlightning")
CACHE_KEY: Final = "agentlightning.gateway.cache_key"
CACHE_ANSWER: Final = "agentlightning.gateway.cache_answer"
"""Span attribute: the answer as the backend sent it, on calls whose answer the cache keeps."""
_MAX_BYTES: Final = 256 * 2**20
"""Limit on the size of all answers in memory; the oldest answers are dropped."""
_MAX_ANSWER_BYTES: Final = 4 * 2**20


class AnswerCache:
    """Answers of successful calls by request. Includes only recorded calls at temperature 0 or with a seed."""

    def __init__(self) -> None:
        self._answers: dict[str, bytes] = {}
        self._size = 0

    async def load(self, store: LightningStore) -> None:
        """Reads the answers that the spans of all runs of a store contain."""
        try:
            listed = [run.run_id for run in await store.query_runs()]
            for run_id in dict.fromkeys([DEFAULT_RUN_ID, *listed, store.run_id]):  # the default run has no record
                async for span in every(store.query_spans, None, run_id=run_id):
                    key, answer = (span.attributes.get(name) for name in (CACHE_KEY, CACHE_ANSWER))
                    if isinstance(key, str) and isinstance(answer, str):
                        self._add(key, answer.encode())
        except (StoreError, OSError, aiohttp.ClientError) as error:
            logger.warning("the cached answers of earlier runs cannot be read, so they are not used: %s", error)

    def find(self, call: ModelCall, backends: list[ModelBackend]) -> Reply | BackendAnswer | None:
        """Returns the answer that one of the backends gave to the same request; sets the call's backend and request."""
        if call.attempt is None:
            return None
        for backend in backends:
            try:
                request = call.prepare(backend)
            except MALFORMED:  # TranslationError is a ValueError
                continue
            key = _make_key(request, call.gateway_version)
            answer = self._answers.get(key) if key is not None else None
            if answer is not None:
                call.backend, call.request, call.is_cached = backend, request, True
                is_stream = bool(request.body.get("stream"))
                if is_stream:
                    return IteratedAnswer(once(answer), "text/event-stream")
                return Reply(200, answer, {"Content-Type": "application/json"})
        return None

    def keep(self, call: ModelCall) -> None:
        """Keeps the answer of a finished call, if it is complete and may be reused; the call's span will contain it."""
        if call.request is None or call.is_cached or not call.is_complete or call.attempt is None:
            return
        if len(call.answer) > _MAX_ANSWER_BYTES:
            return
        call.cache_key = _make_key(call.request, call.gateway_version)
        if call.cache_key is not None:
            answer = bytes(call.answer)
            if call.request.body.get("stream"):  # whole answers are redacted already
                answer = call.request.backend.redactor.redact_answer(answer)
            call.answer = bytearray(answer.decode(errors="replace").encode())
            self._add(call.cache_key, bytes(call.answer))

    def _add(self, key: str, answer: bytes) -> None:
        self._size += len(answer) - len(self._answers.pop(key, b""))
        self._answers[key] = answer
        while self._size > _MAX_BYTES:
            self._size -= len(self._answers.pop(next(iter(self._answers))))


def _make_key(request: BackendRequest, version: int | None) -> str | None:
    """Returns the cache key of a request; None if another try may give a different answer."""
    fields = {**request.body, **request.sampling}
    if fields.get("temperature") != 0 and fields.get("seed") is None:
        return None
    identity = [request.backend.endpoint, request.backend.served_model, request.path, version, fields]
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
