"""Continuous batching: samples many requests in one batch that they join and leave at any token.

One thread owns the model. Requests and weight swaps go through one queue, in order: a swap waits until every earlier
row has ended, and later requests are sampled with the new weights, so that a response has one weight version. New
weights are read from disk while the earlier rows finish. With ``swap_in_flight`` a swap does not wait: running rows
go on with the new weights, after their keys and values have been computed again (AReaL, arXiv:2505.24298), so each
token's log-probability is exact for its weight version.

A prompt that shares a prefix with a sequence sampled since the last swap reuses that sequence's keys and values. If the
rows outgrow the memory for keys and values, the newest rows wait and are later run again up to their last token.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentlightning_algorithms.shared.policy.decode import Decoder
from agentlightning_algorithms.shared.policy.draw import FinishReason, Generation, SamplingParams, Token, draw_tokens
from agentlightning_algorithms.shared.policy.kv_cache import (
    BLOCK,
    PrefixCache,
    SlotCache,
    check_attention,
    position_bytes,
)
from agentlightning_algorithms.shared.policy.model import Policy, batch_by_tokens
from agentlightning_algorithms.shared.policy.running_batch import Bank, RunningBatch, SamplingRequest, Swap, settle

logger = logging.getLogger("agentlightning")

_TOTALS = (
    "requests", "prompt_tokens", "reused_tokens", "sampled_tokens", "decode_steps", "decode_rows", "preempted", "swaps",
    "swapped_rows", "busy_s",
)  # fmt: skip


_MAX_PREFILL_TOKENS = 8192
"""Prompt tokens, padding included, that pass through the model at a time."""


class Sampler:
    """Owns a policy, exclusively until the sampler is closed, and the thread that runs the policy."""

    def __init__(
        self,
        policy: Policy,
        *,
        max_batch_size: int = 64,
        prefix_cache_bytes: int = 512 * 2**20,
        kv_cache_bytes: int = 4096 * 2**20,
        seed: int | None = None,
        weight_version: int = 0,
        swap_in_flight: bool = False,
        cuda_graphs: bool = True,
    ) -> None:
        """Starts the thread.

        Args:
            policy: the model to sample from.
            max_batch_size: rows that run together; further requests wait.
            prefix_cache_bytes: memory for the keys and values of earlier sequences; allocated on demand.
            kv_cache_bytes: memory for the keys and values of running rows; further requests wait. A row that needs more
                runs on its own.
            seed: seed of requests without one; with it, the same requests in the same order get the same responses.
                The random numbers start over with every version of the weights.
            weight_version: version of the initial weights.
            swap_in_flight: swaps do not wait for running rows, which go on with the new weights.
            cuda_graphs: on a GPU, launch all kernels of a step at once.

        Raises:
            ConfigError: the model has layers that do not attend to the whole context.
        """
        check_attention(policy)
        self.policy = policy
        self.weight_version = weight_version
        self._max_batch_size = max_batch_size
        self._decoder = Decoder(policy, cuda_graphs=cuda_graphs)
        self._seed = seed
        self._swap_in_flight = swap_in_flight
        self._numbers = itertools.count(1)
        self._random = _generator(seed, weight_version)
        self._inbox: queue.SimpleQueue[SamplingRequest | Swap | None] = queue.SimpleQueue()  # None: close
        self._waiting: deque[SamplingRequest | Swap] = deque()
        self._max_bytes = kv_cache_bytes
        self._is_full = False  # from a preemption until a row leaves
        self._rows = self._new_batch()
        self._entering: list[SamplingRequest] = []
        self._prefixes = PrefixCache(prefix_cache_bytes, position_bytes(policy))
        self._totals = dict.fromkeys(_TOTALS, 0.0)
        self._reader = ThreadPoolExecutor(1, "agl-weights")
        self._thread = threading.Thread(target=self._run, name="agl-sampler", daemon=True)
        self._thread.start()
        # A thread that is inside torch when the interpreter exits aborts the process.
        atexit.register(self.close)

    def submit(
        self, prompt_ids: Sequence[int], params: SamplingParams, on_token: Callable[[Token], None] | None = None
    ) -> Future[Generation]:
        """Queues a request with at least one prompt token; cancelling its future removes it at the next token.

        ``on_token`` is called in the sampler's thread with every token, before the future is done; it must be quick.

        Raises:
            RuntimeError: the sampler is closed.
        """
        if not self.alive:
            raise RuntimeError("the sampler is closed.")
        request = SamplingRequest(
            prompt_ids, params, None if params.seed is None else random.Random(params.seed), on_token
        )
        self._inbox.put(request)
        return request.future

    def load_weights(self, path: Path, version: int) -> Future[None]:
        """Queues a swap to the weights in ``path``; if they do not fit, its future fails and nothing changes."""
        swap = Swap(self._reader.submit(self.policy.read_weights, path), version)
        if self._swap_in_flight:  # rows continue until the weights are read
            swap.weights.add_done_callback(lambda _: self._inbox.put(swap))
        else:
            self._inbox.put(swap)
        return swap.future

    def close(self) -> None:
        """Ends the thread and cancels unfinished requests."""
        atexit.unregister(self.close)
        self._inbox.put(None)
        self._thread.join()
        self._reader.shutdown(cancel_futures=True)

    def _new_batch(self) -> RunningBatch:
        policy = self.policy
        n_layers = int(policy.model.config.num_hidden_layers)
        n_bytes = sum(weight.nbytes for weight in policy.model.parameters())
        return RunningBatch(
            lambda: SlotCache(n_layers, policy.device), position_bytes(policy), self._max_bytes, n_bytes
        )

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def running(self) -> int:
        """Rows in the batch."""
        return len(self._rows)

    @property
    def kv_cache_bytes(self) -> int:
        """Memory that keys and values of the rows take now."""
        return self._rows.n_bytes

    @property
    def waiting(self) -> int:
        """Requests and swaps not yet begun."""
        return len(self._waiting) + self._inbox.qsize()

    @property
    def statistics(self) -> Mapping[str, float]:
        """Totals so far; ``reused_tokens`` counts the ``prompt_tokens`` that were not run."""
        return dict(self._totals)

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._receive():
                    self._turn()
        finally:
            while not self._inbox.empty():
                if (item := self._inbox.get()) is not None:
                    self._waiting.append(item)
            for unfinished in [*self._rows, *self._waiting]:
                unfinished.future.cancel()

    def _turn(self) -> None:
        started = time.monotonic()
        try:
            self._leave(lambda request: request.future.cancelled())
            self._admit()
            self._preempt()
            for bank in [*self._rows.banks]:
                self._decode(bank)
            self._leave(lambda request: request.future.done())
        # An isolation point: a batch that fails, such as by lack of memory, must not end the service.
        except Exception as error:
            failed = {*self._rows, *self._entering}
            logger.exception("sampling failed; %d requests fail with this error", len(failed))
            for request in failed:
                settle(request.future, error)
            self._rows, self._entering = self._new_batch(), []
            self._prefixes.clear()
        self._totals["busy_s"] += time.monotonic() - started

    def _receive(self) -> bool:
        """Moves submitted items to the waiting queue; blocks while there is nothing to do; False on close."""
        while True:
            try:
                item = self._inbox.get(block=not self._rows and not self._waiting)
            except queue.Empty:
                return True
            if item is None:
                return False
            if isinstance(item, Swap) and self._swap_in_flight:
                self._waiting.appendleft(item)
            else:
                self._waiting.append(item)

    def _admit(self) -> None:
        """Takes items from the waiting queue: swaps when the batch is empty, requests while it has room."""
        admitted: list[SamplingRequest] = []
        lengths: list[int] = []
        if self._swap_in_flight and self._waiting and isinstance(self._waiting[0], Swap):
            self._interrupt(self._waiting[0])
        while self._waiting and len(self._rows) + len(admitted) < self._max_batch_size:
            item = self._waiting[0]
            if isinstance(item, Swap) and (self._rows or admitted) and item.has_to_wait:
                break
            if isinstance(item, SamplingRequest) and not item.future.cancelled():
                lengths.append(item.cached + 1)
                has_room = not self._is_full and self._rows.bytes_with(lengths) <= self._max_bytes
                if (self._rows or admitted) and not has_room:
                    break
            self._waiting.popleft()
            if item.future.cancelled():
                continue
            if isinstance(item, Swap):
                self._swap(item)
            else:
                item.number = item.number or next(self._numbers)
                admitted.append(item)
        if admitted:
            self._prefill(admitted)

    def _interrupt(self, swap: Swap) -> None:
        """Puts all rows back into the queue, behind the swap at its head, unless the swap cannot happen."""
        if not swap.has_to_wait:
            return
        rows = sorted(self._rows, key=lambda request: request.number, reverse=True)
        self._waiting.popleft()
        self._waiting.extendleft([*rows, swap])
        self._rows.remove(lambda request: True)
        self._is_full = False
        self._totals["swapped_rows"] += len(rows)

    def _preempt(self) -> None:
        """Puts the newest rows back into the queue until each remaining row can have one more token."""
        leaving: list[SamplingRequest] = []
        rows = sorted(self._rows, key=lambda request: request.number)
        while len(rows) > 1 and self._rows.bytes_with([]) > self._max_bytes:
            leaving.append(rows.pop())
            self._store_prefixes({id(leaving[-1])})
            self._rows.remove(lambda request: request is leaving[-1], spare=1.0)
        if leaving:
            self._is_full = True
            self._waiting.extendleft(leaving)
            self._totals["preempted"] += len(leaving)

    def _swap(self, swap: Swap) -> None:
        try:
            self.policy.copy_weights(swap.weights.result())
        # An isolation point: the caller gets the error, and sampling continues with the current weights.
        except Exception as error:
            settle(swap.future, error)
            return
        self.weight_version = swap.version
        self._random = _generator(self._seed, swap.version)
        self._prefixes.clear()
        self._totals["swaps"] += 1
        settle(swap.future, None)

    def _prefill(self, admitted: list[SamplingRequest]) -> None:
        """Runs each distinct sequence and each shared prefix once, and draws the next token."""
        self._entering = admitted
        by_sequence: dict[tuple[int, ...], list[SamplingRequest]] = {}
        for request in admitted:
            by_sequence.setdefault(tuple(request.sequence), []).append(request)
        while by_sequence:
            self._prefill_groups([by_sequence.pop(each) for each in self._prefixes.leaders(list(by_sequence))])
        self._entering = []
        self._leave(lambda request: request.future.done())
        self._rows.arrange()

    def _prefill_groups(self, groups: Sequence[list[SamplingRequest]]) -> None:
        known = [(self._prefixes.match(group[0].sequence), group) for group in groups]
        for with_prefix in (False, True):
            chosen = [(blocks, group) for blocks, group in known if bool(blocks) == with_prefix]
            lengths = [len(group[0].sequence) - BLOCK * len(blocks) for blocks, group in chosen]
            for batch in batch_by_tokens(lengths, _MAX_PREFILL_TOKENS):
                self._prefill_batch([chosen[i][1] for i in batch], [chosen[i][0] for i in batch])
        # Only now: storing may evict a prefix that another batch of this call begins with.
        self._store_prefixes({id(group[0]) for _, group in known})

    def _prefill_batch(self, groups: Sequence[list[SamplingRequest]], known: Sequence[list[int]]) -> None:
        """Runs one sequence per group in its own slot, and copies the result to the other requests of the group."""
        sequences = [group[0].sequence for group in groups]
        bank = self._rows.choose(
            [len(sequence) for sequence, group in zip(sequences, groups, strict=True) for _ in group]
        )
        slots, first = bank.slots, len(bank.rows)
        starts = [BLOCK * len(blocks) for blocks in known]
        rests = [sequence[start:] for sequence, start in zip(sequences, starts, strict=True)]
        width = max(map(len, rests))
        tokens_nT = self._tensor([rest + [0] * (width - len(rest)) for rest in rests])
        last_n = self._tensor([row * width + len(rest) - 1 for row, rest in enumerate(rests)])
        options: dict[str, Any] = {}
        if any(starts):
            self._prefixes.restore(slots, known, first)
            options["position_ids"], options["attention_mask"] = slots.extend(first, starts, width)
        else:
            slots.begin(first, len(rests), width)
        logits = self.policy.logits(tokens_nT, last_n, past_key_values=slots.cache, use_cache=True, **options)
        bank.rows.extend(group[0] for group in groups)
        for row, (group, start) in enumerate(zip(groups, starts, strict=True)):
            length = len(sequences[row])
            if len(group) > 1:
                end = len(bank.rows)
                slots.copy([first + row], range(end, end + len(group) - 1), length)
                bank.rows.extend(group[1:])
            for place, request in enumerate(group):
                if not request.tokens:  # else the request ran before
                    request.reused = length if place else start
                    self._totals["reused_tokens"] += request.reused
                    self._totals["prompt_tokens"] += length
                    self._totals["requests"] += 1
        sources = [*range(len(groups)), *(row for row, group in enumerate(groups) for _ in group[1:])]
        self._draw(logits[self._tensor(sources)], bank.rows[first:])

    def _decode(self, bank: Bank) -> None:
        """Draws one more token for every row of a bank."""
        tokens = [request.tokens[-1].token_id for request in bank.rows]
        logits = self._decoder.step(bank.slots, tokens, [request.cached for request in bank.rows])
        self._totals["decode_steps"] += 1
        self._totals["decode_rows"] += len(bank.rows)
        self._draw(logits, bank.rows)

    def _draw(self, logits_nV: Tensor, requests: Sequence[SamplingRequest]) -> None:
        shared = self._random  # not used by greedy rows: evaluation must not change what is sampled later
        uniform_n = [(r.random or shared).random() if r.params.temperature else 0.0 for r in requests]
        drawn = draw_tokens(logits_nV, [r.params for r in requests], uniform_n)
        tops = max(request.params.top_logprobs for request in requests)
        if tops:
            values, tokens = drawn.logprobs_nV.topk(min(tops, logits_nV.shape[-1]))
            likeliest = [list(zip(t, v, strict=True)) for t, v in zip(tokens.tolist(), values.tolist(), strict=True)]
        for i, (request, token, logprob) in enumerate(
            zip(requests, drawn.token_n.tolist(), drawn.logprob_n.tolist(), strict=True)
        ):
            if logprob != logprob:
                message = f"the logits of weights version {self.weight_version} are not finite; load other weights."
                settle(request.future, FloatingPointError(message))
                continue
            n = request.params.top_logprobs
            request.tokens.append(Token(token, logprob, likeliest[i][:n] if n else (), self.weight_version))
            if request.on_token is not None:
                request.on_token(request.tokens[-1])
            reason = self._finish_reason(request)
            if reason is not None:
                settle(request.future, Generation(request.tokens, reason, request.reused))
        self._totals["sampled_tokens"] += len(requests)

    def _finish_reason(self, request: SamplingRequest) -> FinishReason | None:
        newest = request.tokens[-1].token_id
        if newest in self.policy.stop_ids or (request.params.stop and self._has_stop_string(request)):
            return "stop"
        return "length" if len(request.tokens) >= request.params.max_tokens else None

    def _has_stop_string(self, request: SamplingRequest) -> bool:
        # A token is at least a byte, so this many tokens contain any stop string that the newest one completed. Four
        # more are for decoders that treat the first token differently.
        reach = max(len(stop.encode()) for stop in request.params.stop) + 4
        token_ids = [token.token_id for token in request.tokens[-reach:]]
        text = str(self.policy.tokenizer.decode(token_ids, skip_special_tokens=True))
        return any(stop in text for stop in request.params.stop)

    def _leave(self, gone: Callable[[SamplingRequest], bool]) -> None:
        """Removes rows from the batch, and keeps their keys and values as prefixes."""
        leaving = {id(request) for request in self._rows if gone(request)}
        if leaving:
            self._store_prefixes(leaving)
            self._rows.remove(lambda request: id(request) in leaving)
            self._is_full = False

    def _store_prefixes(self, rows: set[int]) -> None:
        """Keeps the keys and values of rows, given by ``id``, for prompts that begin like them."""
        for bank in self._rows.banks:
            found = [(slot, request) for slot, request in enumerate(bank.rows) if id(request) in rows]
            self._prefixes.store(bank.slots, [(slot, request.sequence[: request.cached]) for slot, request in found])

    def _tensor(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, device=self.policy.device)


def _generator(seed: int | None, weight_version: int) -> random.Random:
    """Returns the generator of requests without a seed while the weights have this version."""
    return random.Random() if seed is None else random.Random(f"{seed}/{weight_version}")
