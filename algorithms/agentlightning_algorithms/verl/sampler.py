"""Sampling from a causal language model on transformers, one answer at a time."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch


class Sample(NamedTuple):
    """One answer: the tokens, and the log-probability of each under the distribution that it was drawn from."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length"]
    weight_version: int | None


class Sampler:
    """A model and its weights, which are replaced between answers and never during one."""

    def __init__(self, model_path: str, *, dtype: str, device: str, trust_remote_code: bool = False) -> None:
        from transformers import AutoModelForCausalLM

        # device moved after loading: device_map would ask for accelerate's hooks
        model: Any = AutoModelForCausalLM.from_pretrained(
            model_path,
            dtype=getattr(torch, dtype),
            attn_implementation="sdpa",
            trust_remote_code=trust_remote_code,
        )
        self._model = model.to(device).eval()
        self._device = device
        self._lock = threading.Lock()
        eos = self._model.generation_config.eos_token_id
        self._stops = frozenset([] if eos is None else [eos] if isinstance(eos, int) else eos)
        self.weight_version: int | None = None
        self.updates = 0

    @torch.no_grad()
    def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = -1,
        generator: torch.Generator | None = None,
    ) -> Sample:
        """Draws an answer of at most ``max_tokens`` tokens; temperature 0 takes the likeliest."""
        token_ids: list[int] = []
        logprobs: list[float] = []
        with self._lock:
            inputs, past = torch.tensor([list(prompt_ids)], device=self._device), None
            for _ in range(max_tokens):
                output = self._model(input_ids=inputs, past_key_values=past, use_cache=True)
                past = output.past_key_values
                logprobs_V = process_logits(output.logits[0, -1].float(), temperature, top_p, top_k)
                if temperature > 0:
                    token = int(torch.multinomial(logprobs_V.exp(), 1, generator=generator))
                else:
                    token = int(logprobs_V.argmax())
                token_ids.append(token)
                logprobs.append(float(logprobs_V[token]))
                if token in self._stops:
                    return Sample(token_ids, logprobs, "stop", self.weight_version)
                inputs = torch.tensor([[token]], device=self._device)
            return Sample(token_ids, logprobs, "length", self.weight_version)

    def load_weights(self, weights: Mapping[str, torch.Tensor], version: int | None) -> None:
        """Replaces all weights, when the answer that is being sampled is complete.

        Raises:
            KeyError: some are missing, or not the model's.
        """
        with self._lock:
            missing, unexpected = self._model.load_state_dict(weights, strict=False)
            tied = set(getattr(self._model, "all_tied_weights_keys", None) or {})
            missing = [name for name in missing if name not in tied]
            if missing or unexpected:
                raise KeyError(f"weights that do not fit the model: missing {missing}, unexpected {unexpected}")
            self.updates += 1
            if version is not None:
                self.weight_version = version


def process_logits(logits_V: torch.Tensor, temperature: float, top_p: float = 1.0, top_k: int = -1) -> torch.Tensor:
    """Log-probabilities after temperature, top-k and top-p, as vLLM's ``processed_logprobs``; 0 leaves temperature out.

    V   vocabulary
    """
    logprobs_V = torch.log_softmax(logits_V / temperature if temperature > 0 else logits_V, -1)
    if top_k > 0 and top_k < len(logprobs_V):
        least = logprobs_V.topk(top_k).values[-1]
        logprobs_V = torch.log_softmax(logprobs_V.masked_fill(logprobs_V < least, -torch.inf), -1)
    if top_p < 1.0:
        sorted_V, order_V = logprobs_V.sort(descending=True)
        before_V = sorted_V.exp().cumsum(-1) - sorted_V.exp()
        gone_V = torch.zeros_like(order_V, dtype=torch.bool).scatter(0, order_V, before_V >= top_p)
        logprobs_V = torch.log_softmax(logprobs_V.masked_fill(gone_V, -torch.inf), -1)
    return logprobs_V
