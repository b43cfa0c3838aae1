"""A reward function that takes an answer's score from a reward model on a server or in this process."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import json
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import aiohttp

from agentlightning.emitter import operation
from agentlightning.errors import ConfigError, PluginImportError, RolloutError
from agentlightning.plugin.settings import require_least
from agentlightning.types import Rollout
from agentlightning_plugins.rewards.judge.text import to_text

Api = Literal["classify", "pooling", "score", "predict"]

_LOADING: Final = threading.Lock()


@dataclass(kw_only=True, repr=False)
class RewardModel:
    """Scores an answer with a model for sequence classification, such as those trained on preferences.

    Each score is a span ``agentlightning.operation`` of the attempt. It is not traced as a model call, so no algorithm
    trains on it.

    Raises:
        ConfigError: a value is out of range.
    """

    model: str
    """With an endpoint, the model's name there; else its directory or hub name, and the model runs in the runner."""
    endpoint: str | None = None
    """The address of the server without a path, such as ``http://127.0.0.1:8001``; None: the model runs locally."""
    api: Api = "classify"
    """The path below the endpoint: ``classify``, ``pooling`` or ``score`` of vLLM, ``predict`` of Hugging Face's text
    embeddings inference."""
    api_key: str | None = None
    task_key: str | None = None
    """The key of a task that holds its text; None: the whole task, as JSON if it is not a text."""
    template: str = "{task}\n\n{answer}"
    """The text to score, for models that take one text. A local model with a chat template and models behind
    ``pooling`` get a conversation instead."""
    label: int = -1
    """The class whose probability is the reward, if the model has several; -1: the last."""
    sigmoid: bool = False
    """Whether to map the score of a model with one class to a reward between 0 and 1."""
    device: str = "cpu"
    """Device of a local model."""
    timeout_s: float = 60.0
    """Timeout of a request."""

    def __post_init__(self) -> None:
        require_least(0.001, timeout_s=self.timeout_s)
        if self.endpoint is None and importlib.util.find_spec("transformers") is None:
            raise PluginImportError(
                f"reward model: {self.model!r} runs in this process, which needs torch and transformers. Install with: "
                "pip install 'lightning[grpo]'; or give the endpoint of a server"
            )
        try:
            text = self.template.format(task="", answer="answer")
        except (KeyError, IndexError, ValueError) as error:
            raise ConfigError(f"reward model: template = {self.template!r} is not a template: {error!r}") from error
        if "answer" not in text:
            raise ConfigError(f"reward model: template = {self.template!r} has no {{answer}}; write where it belongs.")

    def __repr__(self) -> str:
        return f"<RewardModel {self.model}>"

    async def __call__(self, task: Any, output: Any, rollout: Rollout) -> float:
        """Returns the score.

        Raises:
            RolloutError: the server does not answer, or its answer has no score.
            ConfigError: the local model cannot be loaded, or a setting does not fit the task or the model.
        """
        with operation(name="reward_model") as span:
            span.set_input({"task": task, "output": output})
            texts = to_text(self._read_task(task)), to_text(output)
            score = await (asyncio.to_thread(self._score, *texts) if self.endpoint is None else self._ask(*texts))
            reward = 1 / (1 + math.exp(-score)) if self.sigmoid else score
            span.set_output({"model": self.model, "score": score, "reward": reward})
        return reward

    def _read_task(self, task: Any) -> Any:
        if self.task_key is None:
            return task
        if not isinstance(task, Mapping) or self.task_key not in task:
            raise ConfigError(f"reward model: task_key = {self.task_key!r}; the task {task!r:.200} has no such key.")
        return task[self.task_key]

    def _score(self, task: str, answer: str) -> float:
        import torch

        with _LOADING:  # of several calls at the same time, the first one loads the model
            model, tokenizer = _load(self.model, self.device)
        if tokenizer.chat_template:
            tokens = tokenizer.apply_chat_template(_messages(task, answer), return_tensors="pt", return_dict=True)
        else:
            text = self.template.format(task=task, answer=answer)
            tokens = tokenizer(text, return_tensors="pt", truncation=tokenizer.model_max_length < 10**9)
        with torch.inference_mode():
            logits = model(**tokens.to(self.device)).logits[0].float()
        return float(logits[0] if len(logits) == 1 else logits.softmax(-1)[self._place(len(logits))])

    async def _ask(self, task: str, answer: str) -> float:
        text = self.template.format(task=task, answer=answer)
        bodies: dict[str, dict[str, Any]] = {
            "classify": {"model": self.model, "input": text},
            "pooling": {"model": self.model, "messages": _messages(task, answer)},
            "score": {"model": self.model, "text_1": task, "text_2": answer},
            "predict": {"inputs": text, "truncate": True},
        }
        url = f"{(self.endpoint or '').rstrip('/')}/{self.api}"
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self.timeout_s), headers=headers) as session,
                session.post(url, json=bodies[self.api]) as response,
            ):
                reply = await response.text()
                if response.status != 200:
                    raise RolloutError(f"the reward model at {url} answered {response.status}: {reply[:300]}")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise RolloutError(
                f"the reward model at {url} does not answer ({type(error).__name__}: {error})"
            ) from error
        try:
            return self._read(json.loads(reply))
        except ConfigError:  # a wrong setting, which is a ValueError too
            raise
        except (ValueError, LookupError, TypeError) as error:
            raise RolloutError(f"the answer of the reward model at {url} has no score: {reply[:300]}") from error

    def _read(self, reply: Any) -> float:
        if self.api == "predict":
            # One list of classes, the likeliest first. The name of a class ends in its number, as in LABEL_1.
            classes = reply[0] if isinstance(reply[0], list) else reply
            named = {str(each["label"]).rpartition("_")[2]: each["score"] for each in classes}
            values = [named[str(i)] for i in range(len(classes))] if len(classes) > 1 else [classes[0]["score"]]
        elif self.api == "score":
            values = [reply["data"][0]["score"]]
        else:
            found = reply["data"][0]["probs" if self.api == "classify" else "data"]
            while isinstance(found[0], list):  # one list for each token; the last token's list counts
                found = found[-1]
            values = found
        score = values[0] if len(values) == 1 else values[self._place(len(values))]
        if isinstance(score, bool) or not math.isfinite(score):
            raise ValueError(score)
        return float(score)

    def _place(self, classes: int) -> int:
        if not -classes <= self.label < classes:
            raise ConfigError(f"reward model: label = {self.label}; {self.model} has {classes} classes, from 0 up.")
        return self.label


@functools.lru_cache(maxsize=4)
def _load(name: str, device: str) -> tuple[Any, Any]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    try:
        model: Any = AutoModelForSequenceClassification.from_pretrained(name)
        return model.to(device).eval(), AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ConfigError(f"reward model: cannot load a sequence classifier from {name!r}: {error}") from error


def _messages(task: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": task}, {"role": "assistant", "content": answer}]
