"""The policy: a causal language model with its tokenizer, and the log-probabilities of tokens.

    B   rows of a batch
    L   tokens of a row, prompt and response, padded on the right to the longest
    T   sampled tokens of a row, padded on the right to the longest
    N   sampled tokens of all rows, without padding
    V   vocabulary

Log-probabilities are natural, in float32 whatever the dtype of the weights.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from agentlightning.errors import ConfigError
from agentlightning_algorithms.shared.policy.draw import filter_logits
from agentlightning_algorithms.shared.policy.settings import PEFT_PATTERNS
from agentlightning_algorithms.shared.policy.training_row import TrainingRow

_LOADING = threading.Lock()
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CHUNK_ELEMENTS = 2**24
"""Logits that are in memory at once when rows are scored: 64 MiB in float32; on a GPU 8 times as many, because each
chunk reads the whole output layer and adds to its whole gradient."""
_LEAST_LOGPROB = -1e4


class TokenBatch(NamedTuple):
    """Rows as tensors, padded on the right.

    With causal attention, padding on the right needs neither attention mask nor position ids, and the fastest
    attention kernel applies. The output at padding is never read.
    """

    input_BL: Tensor
    predictor_N: Tensor
    """Index, in the flattened ``input_BL``, of the token before each sampled token."""
    target_N: Tensor
    """The sampled tokens, row by row."""
    mask_BT: Tensor
    """True on sampled tokens, which are packed to the left."""
    drawn_N3: Tensor | None = None
    """Temperature (NaN: the trainer's), top_p and top_k of each sampled token; None: all have the trainer's."""


class Policy:
    """A causal language model and its tokenizer.

    Attributes:
        model: always in eval mode, also in training: dropout would train a policy other than the one that sampled.
        max_length: the model's positions, for prompt and response together.
        vocabulary: number of token ids that the model can embed.
        stop_ids: tokens that end a response.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        config = model.config
        if getattr(config, "is_encoder_decoder", False):
            raise ConfigError(f"{config.model_type!r} is an encoder-decoder; a policy must be a causal language model.")
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.max_length = int(getattr(config, "max_position_embeddings", None) or 2**20)
        self.vocabulary = int(model.get_input_embeddings().num_embeddings)
        self.stop_ids = _stop_ids(model, tokenizer)
        self._has_plain_head = _has_plain_head(model)

    @property
    def device(self) -> torch.device:
        return cast(torch.device, self.model.device)

    @property
    def has_lora(self) -> bool:
        """Whether the model has LoRA adapters; if so, only they are trained."""
        return bool(getattr(self.model, "_hf_peft_config_loaded", False))

    def logits(self, input_BL: Tensor, positions: Tensor | None = None, **options: Any) -> Tensor:
        """Returns logits ``[N, V]`` in float32, at ``positions`` of ``input_BL.flatten()`` or at all of them.

        Only these positions pass through the output layer, by far the widest of a small model. ``options`` are
        further arguments of the decoder: cache, mask, position ids.
        """
        return self._read_out(self._run(input_BL, positions, **options))

    def _run(self, input_BL: Tensor, positions: Tensor | None, **options: Any) -> Tensor:
        """Returns the output layer's input, or the logits if the model transforms the output layer's result."""
        if self._has_plain_head:
            states = self.model.base_model(input_ids=input_BL, **options).last_hidden_state.flatten(0, 1)
        else:
            states = self.model(input_ids=input_BL, **options).logits.flatten(0, 1)
        return cast(Tensor, states if positions is None else states.index_select(0, positions))

    def _read_out(self, states: Tensor) -> Tensor:
        # The layer is looked up each time: LoRA may have wrapped it.
        return cast(Tensor, (self.model.get_output_embeddings()(states) if self._has_plain_head else states).float())

    def token_logprobs(
        self, batch: TokenBatch, temperature: float = 1.0, *, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Returns log-probabilities (with gradient) and entropies of the sampled tokens, each ``[B, T]``.

        Both are of the distribution after ``temperature``, where 0 (greedy) counts as 1, as in the sampler, or of the
        row's own distribution if it has one. With ``entropy_gradient``, the entropies have a gradient, too.

        Logits are computed for as many tokens at a time as ``_CHUNK_ELEMENTS`` allows, and computed again for the
        gradient, so that memory does not grow with tokens times vocabulary.
        """
        states = self._run(batch.input_BL, batch.predictor_N, use_cache=False)

        def score(states: Tensor, target_n: Tensor, drawn_n3: Tensor | None) -> tuple[Tensor, Tensor]:
            logits_nV = self._read_out(states)
            if drawn_n3 is None:
                logits_nV = logits_nV / (temperature or 1.0)
            else:
                logits_nV = _apply_distribution(logits_nV, target_n, drawn_n3, temperature)
            logprobs_nV = torch.log_softmax(logits_nV, dim=-1)
            logprob_n = logprobs_nV.gather(1, target_n[:, None]).squeeze(1)
            with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
                finite_nV = logprobs_nV if drawn_n3 is None else logprobs_nV.clamp(min=_LEAST_LOGPROB)
                entropy_n = -(logprobs_nV.exp() * finite_nV).sum(-1)
            return logprob_n, entropy_n

        elements = _CHUNK_ELEMENTS * (1 if self.device.type == "cpu" else 8)
        size = max(1, elements // int(self.model.config.vocab_size))
        parts = []
        for start in range(0, len(states), size):
            place = slice(start, start + size)
            inputs = states[place], batch.target_N[place], None if batch.drawn_N3 is None else batch.drawn_N3[place]
            if len(states) > size and torch.is_grad_enabled():
                parts.append(checkpoint(score, *inputs, use_reentrant=False, preserve_rng_state=False))
            else:
                parts.append(score(*inputs))
        logprob_N, entropy_N = (torch.cat(values) for values in zip(*parts, strict=True))
        empty_BT = torch.zeros(batch.mask_BT.shape, dtype=logprob_N.dtype, device=logprob_N.device)
        return empty_BT.masked_scatter(batch.mask_BT, logprob_N), empty_BT.masked_scatter(batch.mask_BT, entropy_N)

    def score(
        self, rows: Sequence[TrainingRow], temperature: float = 1.0, *, max_tokens: int = 8192
    ) -> list[list[float]]:
        """Returns the log-probability of every response token, without gradient; 0 where the token was given."""
        scores: list[list[float]] = [[] for _ in rows]
        with torch.inference_mode():
            for indices in batch_by_tokens([row.n_tokens for row in rows], max_tokens):
                batch = collate([rows[i] for i in indices], self.device)
                logprob_BT, _ = self.token_logprobs(batch, temperature)
                for i, values in zip(indices, logprob_BT.tolist(), strict=True):
                    remaining = iter(values)
                    mask = rows[i].mask or [1] * len(rows[i].response_ids)
                    scores[i] = [next(remaining) if sampled else 0.0 for sampled in mask]
        return scores

    def save(self, directory: Path, *, merge: bool = True, dtype: str | None = None) -> None:
        """Writes model and tokenizer for ``from_pretrained``; with LoRA, merged weights or only the adapters.

        ``dtype`` is the type of the written weights, without LoRA; None: the model's.
        """
        model, state = self.model, None
        if self.has_lora and merge:
            from agentlightning_algorithms.shared.policy.lora import merge_state  # peft takes seconds

            state = merge_state(model)
            with torch.device("meta"):  # only its class and configuration are used
                model = type(model)(model.config)
            model.generation_config = self.model.generation_config
        if dtype is not None and not self.has_lora and _DTYPES[dtype] != model.dtype:
            converted: dict[Any, Tensor] = {}  # by address: tied weights stay tied
            state = {}
            for name, value in model.state_dict().items():
                key = value.data_ptr(), value.shape
                if key not in converted:
                    converted[key] = value.to(_DTYPES[dtype]) if value.is_floating_point() else value
                state[name] = converted[key]
        with _loading():
            model.save_pretrained(directory, state_dict=state)
        self.tokenizer.save_pretrained(str(directory))

    def read_weights(self, directory: Path) -> dict[str, Tensor]:
        """Reads the weights in ``directory`` (with LoRA, only the adapters), without changing the model's.

        Raises:
            ConfigError: the directory has no safetensors, or they belong to another model or other LoRA settings.
        """
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise ConfigError(f"no *.safetensors in {str(directory)!r}; give a directory written by save_pretrained.")
        loaded: dict[str, Tensor] = {}
        for file in files:
            try:
                loaded |= {name.removeprefix("base_model.model."): value for name, value in load_file(file).items()}
            except SafetensorError as error:
                raise ConfigError(f"{str(file)!r} is damaged: {error}.") from error
        own = self._own_weights()
        if not self.has_lora and not loaded.keys() <= own.keys() and (directory / "config.json").is_file():
            # A file has each expert of a mixture on its own; transformers stacks them.
            with _loading():
                stacked = type(self.model).from_pretrained(directory, dtype=self.model.dtype, local_files_only=True)
            loaded = dict(stacked.state_dict())
        # Tied weights share storage under several names, of which a file has only one.
        covered = {own[name].data_ptr() for name in loaded if name in own}
        wrong = [name for name in loaded if name not in own or own[name].shape != loaded[name].shape]
        missing = [name for name, value in own.items() if value.data_ptr() not in covered]
        if wrong or missing:
            raise ConfigError(
                f"the weights in {str(directory)!r} are not this model's: unknown or of another shape {wrong[:3]}, "
                f"missing {missing[:3]}{'; resume with the same lora settings' if self.has_lora else ''}."
            )
        return loaded

    def copy_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replaces the weights with those that :meth:`read_weights` returned."""
        own = self._own_weights()
        with torch.no_grad():
            for name, value in weights.items():
                own[name].copy_(value)

    def _own_weights(self) -> dict[str, Tensor]:
        """Returns the trained weights by the names that they have in files."""
        own: dict[str, Tensor] = self.model.state_dict()
        if not self.has_lora:
            return own
        return {name.replace(".default.", "."): value for name, value in own.items() if ".lora_" in name}

    def load_weights(self, directory: Path) -> None:
        """Replaces the weights with those in ``directory``; changes nothing if :meth:`read_weights` raises."""
        self.copy_weights(self.read_weights(directory))


def open_adapter(base: Policy, directory: Path) -> Policy:
    """Returns a policy that shares the memory of the weights, with LoRA adapters like those in ``directory``.

    The adapters are not loaded yet.

    Raises:
        ConfigError: the directory has no adapters, or they belong to another model.
    """
    from agentlightning_algorithms.shared.policy.lora import add_saved_adapter, share_weights  # peft

    model = share_weights(base.model)
    add_saved_adapter(model, directory)
    return Policy(model, base.tokenizer)


def load_policy(path: str | Path, *, dtype: str = "float32", device: str = "cpu") -> Policy:
    """Loads a model and its tokenizer from a directory, or else by its name on the hub; converts it to ``dtype``.

    Raises:
        ConfigError: the dtype is unknown, or the model does not exist or is not a causal language model.
    """
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype = {dtype!r}; allowed: {', '.join(_DTYPES)}.")
    local = Path(path).is_dir()
    try:
        with _loading():
            model = AutoModelForCausalLM.from_pretrained(
                str(path), dtype=_DTYPES[dtype], attn_implementation="sdpa", local_files_only=local
            )
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=local)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load a causal language model from {str(path)!r}: {error}") from error
    return Policy(cast(PreTrainedModel, cast(Any, model).to(device)), cast(PreTrainedTokenizerBase, tokenizer))


def batch_by_tokens(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Splits items into batches of similar length: at most ``max_tokens`` tokens each, padding included.

    Padding is at most a tenth of a batch, or 256 tokens, which cost as much as another batch of a small model.

    Returns:
        Indices into ``lengths``, the longest items first. An item longer than ``max_tokens`` gets its own batch.
    """
    batches: list[list[int]] = []
    width = padding = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        padding += width - lengths[i]
        size = (len(batches[-1]) + 1) * width if batches else 0
        if not batches or padding > max(256, size // 10) or size > max_tokens:
            batches.append([])
            width, padding = lengths[i], 0
        batches[-1].append(i)
    return batches


def collate(rows: Sequence[TrainingRow], device: torch.device | str = "cpu") -> TokenBatch:
    lengths = [row.n_tokens for row in rows]
    width = max(lengths)
    padded = [[*row.prompt_ids, *row.response_ids] + [0] * (width - n) for row, n in zip(rows, lengths, strict=True)]
    predictors: list[int] = []
    targets: list[int] = []
    counts: list[int] = []
    drawn: list[tuple[float, float, float]] = []
    for i, row in enumerate(rows):
        first = i * width + len(row.prompt_ids) - 1
        positions: Sequence[int] = range(first, first + len(row.response_ids))
        sampled = row.response_ids
        if row.mask is not None:
            positions, sampled = list(compress(positions, row.mask)), list(compress(sampled, row.mask))
        predictors.extend(positions)
        targets.extend(sampled)
        counts.append(len(sampled))
        drawn += [row.distribution or (math.nan, 1.0, 0.0)] * len(sampled)
    return TokenBatch(
        input_BL=torch.tensor(padded).to(device),
        predictor_N=torch.tensor(predictors).to(device),
        target_N=torch.tensor(targets).to(device),
        mask_BT=(torch.arange(max(counts)) < torch.tensor(counts)[:, None]).to(device),
        drawn_N3=torch.tensor(drawn).to(device) if any(row.distribution is not None for row in rows) else None,
    )


def _apply_distribution(logits_nV: Tensor, target_n: Tensor, drawn_n3: Tensor, temperature: float) -> Tensor:
    """Applies temperature, top_k and top_p of each token as the sampler does."""
    temperature_n, top_p_n, top_k_n = drawn_n3.unbind(-1)
    temperature_n = temperature_n.nan_to_num(nan=temperature)
    is_greedy_n = temperature_n == 0
    logits_nV = logits_nV / torch.where(is_greedy_n, 1.0, temperature_n)[:, None]
    rows = (((top_p_n < 1.0) | (top_k_n > 0)) & ~is_greedy_n).nonzero().squeeze(1)
    if len(rows) == 0:
        return logits_nV
    chosen_nV = logits_nV[rows]
    out_nV = filter_logits(chosen_nV.detach(), top_k_n[rows].long(), top_p_n[rows]).isneginf()
    # Rounding may exclude a token at the edge; the token was drawn, so the sampler included it.
    out_nV = out_nV.scatter(1, target_n[rows][:, None], False)
    return logits_nV.index_copy(0, rows, chosen_nV.masked_fill(out_nV, -torch.inf))


def _stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    generation_config = getattr(model, "generation_config", None)
    found: set[int] = set()
    for value in (getattr(generation_config, "eos_token_id", None), tokenizer.eos_token_id):
        found.update(value if isinstance(value, Iterable) else () if value is None else (value,))
    return frozenset(found)


def _has_plain_head(model: PreTrainedModel) -> bool:
    """Whether the output layer returns the logits; some models transform its result, for example by a scale or a cap.

    The difference shows on any input, so one input is tested.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Module):
        return False
    with torch.inference_mode():
        tokens = torch.tensor([[0, 1, 2]], device=model.device) % int(model.config.vocab_size)
        whole = model(input_ids=tokens, use_cache=False).logits
        parts = head(model.base_model(input_ids=tokens, use_cache=False).last_hidden_state)
    return bool(torch.equal(whole, parts))


@contextmanager
def _loading() -> Iterator[None]:
    """Disables transformers' progress bars; one thread loads at a time, since loading changes torch's global state."""
    with _LOADING:
        shown = transformers_logging.is_progress_bar_enabled()
        transformers_logging.disable_progress_bar()
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", PEFT_PATTERNS)
                yield
        finally:
            if shown:
                transformers_logging.enable_progress_bar()
