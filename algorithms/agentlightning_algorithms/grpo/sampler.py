"""Samples from a policy: many requests in one running batch, joined and left at any token.

One thread owns the model. Requests and weight swaps go through one queue, in order: a swap waits until every row
before it has ended, and what comes after it is sampled with the new weights, so that a response has one weight
version.
"""

from __future__ import annotations

import atexit
import logging
import queue
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from agentlightning.errors import ConfigError
from agentlightning_algorithms.grpo.policy import Policy, batch_by_tokens
from agentlightning_algorithms.grpo.sampling import SamplingParams, draw_tokens
from agentlightning_algorithms.grpo.slot_cache import SlotCache

logger = logging.getLogger("agentlightning")

FinishReason = Literal["stop", "length"]
T = TypeVar("T")


class Generation(NamedTuple):
    """A sampled response. The log-probabilities are those of the distribution it was drawn from, filters included."""

    token_ids: list[int]
    """With the stop token, where one ended it."""
    logprobs: list[float]
    top_logprobs: list[list[tuple[int, float]]]
    """Per token, (token id, log-probability), likeliest first; empty unless asked for."""
    finish_reason: FinishReason
    weight_version: int


@dataclass(slots=True, eq=False)
class _Request:
    prompt_ids: Sequence[int]
    params: SamplingParams
    random: random.Random
    future: Future[Generation] = field(default_factory=Future)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)

    @property
    def cached(self) -> int:
        """Positions in the cache: all but the newest token, which the next step feeds."""
        return len(self.prompt_ids) + len(self.token_ids) - 1


@dataclass(slots=True, eq=False)
class _Swap:
    path: Path
    version: int
    future: Future[None] = field(default_factory=Future)


class Sampler:
    """Owns a policy and the thread that runs it.

    Attributes:
        policy: touched by nobody else while the sampler is open.
        weight_version: of the weights in use.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        max_batch_size: int = 64,
        max_prefill_tokens: int = 8192,
        seed: int | None = None,
        weight_version: int = 0,
    ) -> None:
        """Starts the thread.

        Args:
            policy: the model to sample from.
            max_batch_size: rows that run together; further requests wait.
            max_prefill_tokens: prompt tokens, padding included, that pass through the model at once.
            seed: of requests that bring none; with it, the same requests in the same order get the same responses.
            weight_version: of the weights as loaded.

        Raises:
            ConfigError: a model whose attention the running batch cannot hold.
        """
        _check_attention(policy)
        self.policy = policy
        self.weight_version = weight_version
        self._max_batch_size = max_batch_size
        self._max_prefill_tokens = max_prefill_tokens
        self._random = random.Random(seed)
        self._inbox: queue.SimpleQueue[_Request | _Swap | None] = queue.SimpleQueue()
        self._waiting: deque[_Request | _Swap] = deque()
        self._rows: list[_Request] = []  # row i lives in slot i
        self._slots = SlotCache()
        self._thread = threading.Thread(target=self._run, name="agl-sampler", daemon=True)
        self._thread.start()
        # A thread that is inside torch when the interpreter ends brings the process down with an abort.
        atexit.register(self.close)

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams) -> Future[Generation]:
        """Queues a request. Cancelling the future takes it out of the batch at the next token.

        Raises:
            RuntimeError: the sampler is closed.
        """
        if not self.alive:
            raise RuntimeError("the sampler is closed.")
        own = self._random if params.seed is None else random.Random(params.seed)
        request = _Request(prompt_ids, params, own)
        self._inbox.put(request)
        return request.future

    def load_weights(self, path: Path, version: int) -> Future[None]:
        """Queues a swap to the weights in ``path``; if they do not fit, its future fails and nothing has changed."""
        swap = _Swap(path, version)
        self._inbox.put(swap)
        return swap.future

    def close(self) -> None:
        """Ends the thread; what has not finished is cancelled."""
        atexit.unregister(self.close)
        self._inbox.put(None)
        self._thread.join()

    @property
    def alive(self) -> bool:
        """False once closed or broken."""
        return self._thread.is_alive()

    @property
    def running(self) -> int:
        """Rows in the batch."""
        return len(self._rows)

    @property
    def waiting(self) -> int:
        """Requests and swaps not yet begun."""
        return len(self._waiting) + self._inbox.qsize()

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._receive():
                    self._turn()
        finally:
            while not self._inbox.empty():
                item = self._inbox.get()
                if item is not None:
                    self._waiting.append(item)
            for left in [*self._rows, *self._waiting]:
                left.future.cancel()

    def _turn(self) -> None:
        try:
            self._leave(lambda request: request.future.cancelled())
            self._admit()
            if self._rows:
                self._decode()
        # An isolation point: a batch that fails (out of memory, say) must not end the service.
        except Exception as error:
            logger.exception("sampling failed; %d requests are answered with the error", len(self._rows))
            for request in self._rows:
                _settle(request.future, error)
            self._rows = []

    def _receive(self) -> bool:
        """Moves what was submitted to the waiting line, blocking while there is nothing to do; False on close."""
        while True:
            try:
                item = self._inbox.get(block=not self._rows and not self._waiting)
            except queue.Empty:
                return True
            if item is None:
                return False
            self._waiting.append(item)

    def _admit(self) -> None:
        """Lets in who is next in line: swaps when the batch is empty, requests while it has room."""
        admitted: list[_Request] = []
        while self._waiting and len(self._rows) + len(admitted) < self._max_batch_size:
            item = self._waiting[0]
            if isinstance(item, _Swap) and (self._rows or admitted) and not item.future.cancelled():
                break
            self._waiting.popleft()
            if item.future.cancelled():
                continue
            if isinstance(item, _Swap):
                self._swap(item)
            else:
                admitted.append(item)
        if admitted:
            self._prefill(admitted)

    def _swap(self, swap: _Swap) -> None:
        try:
            self.policy.load_weights(swap.path)
        # An isolation point: who asked for the swap is told, and sampling goes on with the weights there are.
        except Exception as error:
            _settle(swap.future, error)
            return
        self.weight_version = swap.version
        _settle(swap.future, None)

    def _prefill(self, admitted: list[_Request]) -> None:
        """Runs the prompts, each distinct one once, and draws the first token of every request."""
        by_prompt: dict[tuple[int, ...], list[_Request]] = {}
        for request in admitted:
            by_prompt.setdefault(tuple(request.prompt_ids), []).append(request)
        prompts = list(by_prompt)
        batches = batch_by_tokens([len(prompt) for prompt in prompts], self._max_prefill_tokens)
        slot = len(self._rows)
        self._rows.extend(request for chosen in batches for i in chosen for request in by_prompt[prompts[i]])
        for chosen in batches:
            width = max(len(prompts[i]) for i in chosen)
            padded = [[*prompts[i]] + [0] * (width - len(prompts[i])) for i in chosen]
            last = [k * width + len(prompts[i]) - 1 for k, i in enumerate(chosen)]
            sources = [k for k, i in enumerate(chosen) for _ in by_prompt[prompts[i]]]
            cache = DynamicCache()
            logits = self.policy.logits(self._tensor(padded), self._tensor(last), past_key_values=cache, use_cache=True)
            self._slots.admit(cache, sources, list(range(slot, slot + len(sources))), width)
            self._draw(logits[self._tensor(sources)], self._rows[slot : slot + len(sources)])
            slot += len(sources)
        self._leave(lambda request: request.future.done())

    def _decode(self) -> None:
        """Draws one more token for every row."""
        lengths = self._tensor([request.cached for request in self._rows])
        newest = self._tensor([request.token_ids[-1] for request in self._rows])
        mask = self._slots.begin_step(lengths)
        logits = self.policy.logits(
            newest[:, None],
            position_ids=lengths[:, None],
            attention_mask=mask,
            past_key_values=self._slots.cache,
            use_cache=True,
        )
        self._draw(logits, self._rows)
        self._leave(lambda request: request.future.done())

    def _draw(self, logits_nV: Tensor, requests: Sequence[_Request]) -> None:
        drawn = draw_tokens(logits_nV, [r.params for r in requests], [r.random.random() for r in requests])
        tops = max(request.params.top_logprobs for request in requests)
        if tops:
            values, tokens = drawn.logprobs_nV.topk(min(tops, logits_nV.shape[-1]))
            likeliest = [list(zip(t, v, strict=True)) for t, v in zip(tokens.tolist(), values.tolist(), strict=True)]
        for i, (request, token, logprob) in enumerate(
            zip(requests, drawn.token_n.tolist(), drawn.logprob_n.tolist(), strict=True)
        ):
            if logprob != logprob:
                message = f"the logits of weights version {self.weight_version} are not finite; load sound weights."
                _settle(request.future, FloatingPointError(message))
                continue
            request.token_ids.append(token)
            request.logprobs.append(logprob)
            if request.params.top_logprobs:
                request.top_logprobs.append(likeliest[i][: request.params.top_logprobs])
            reason = self._finish_reason(request)
            if reason is not None:
                result = Generation(
                    request.token_ids, request.logprobs, request.top_logprobs, reason, self.weight_version
                )
                _settle(request.future, result)

    def _finish_reason(self, request: _Request) -> FinishReason | None:
        if request.token_ids[-1] in self.policy.stop_ids or (request.params.stop and self._says_stop(request)):
            return "stop"
        return "length" if len(request.token_ids) >= request.params.max_tokens else None

    def _says_stop(self, request: _Request) -> bool:
        # A token is at least a byte, so the end of the text holds any stop string that the newest token completed. The
        # spare tokens are for decoders that treat the first one differently.
        reach = max(len(stop.encode()) for stop in request.params.stop) + 4
        text = str(self.policy.tokenizer.decode(request.token_ids[-reach:], skip_special_tokens=True))
        return any(stop in text for stop in request.params.stop)

    def _leave(self, gone: Callable[[_Request], bool]) -> None:
        """Takes rows out of the batch; the last row moves into the slot that became free."""
        rows = self._rows
        i = 0
        while i < len(rows):
            if not gone(rows[i]):
                i += 1
                continue
            last = rows.pop()
            if i < len(rows):
                self._slots.move(len(rows), i, last.cached)
                rows[i] = last

    def _tensor(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, device=self.policy.device)


def _check_attention(policy: Policy) -> None:
    config = policy.model.config
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    window = getattr(config, "sliding_window", None)
    if kinds or (window is not None and window < policy.max_length):
        raise ConfigError(
            f"the model {config.model_type!r} has layers that do not attend to the whole context "
            f"({', '.join(sorted(kinds)) or f'sliding window of {window} tokens'}); this sampler needs full attention. "
            "Serve it with another server, or take a model such as Qwen 2.5 or Llama 3."
        )


def _settle(future: Future[T], outcome: T | Exception) -> None:
    """Answers a future, unless its owner has cancelled it."""
    try:
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
    except InvalidStateError:
        pass
