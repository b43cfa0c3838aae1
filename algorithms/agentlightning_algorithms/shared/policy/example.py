"""Conversations to learn from, and the rows of tokens that a model trains on."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from agentlightning.errors import ConfigError
from agentlightning.store.factory import create_store
from agentlightning.store.protocol import LightningStore
from agentlightning.store.url import hide_password
from agentlightning_algorithms.shared.policy.model.policy import Policy
from agentlightning_algorithms.shared.policy.server.reply import restore_arguments
from agentlightning_algorithms.shared.policy.training_row import TrainingRow
from agentlightning_plugins.shared.chat_history import FineTuningExample, select_examples

Line = TypeVar("Line", bound=BaseModel)


async def read_examples(source: str, min_reward: float | None, best_of: int | None) -> list[FineTuningExample]:
    """Reads conversations from a .jsonl file, or selects them from the rollouts of a run or store.

    Raises:
        ConfigError: there is no such source, a line is not a conversation, or no rollout is good enough.
    """
    if source.endswith(".jsonl"):
        if min_reward is not None or best_of is not None:
            raise ConfigError(
                f"min_reward and best_of select rollouts, but source = {source!r} is a file; leave them out"
            )
        found = read_lines(source, FineTuningExample, '{"messages": [{"role": "user", "content": "..."}, ...]}')
    else:
        async with open_source(source) as store:
            found = [example async for example in select_examples(store, min_reward, best_of)]
    if not found:
        raise ConfigError(
            f"source = {hide_password(source)!r} has no conversation to learn from; a rollout counts if it succeeded, "
            f"has a reward of at least min_reward = {min_reward}, called a model, and is not one of validation or test"
        )
    return found


@asynccontextmanager
async def open_source(source: str) -> AsyncIterator[LightningStore]:
    """Opens the store of a run's directory, or of a URL.

    Raises:
        ConfigError: the directory has no store.
    """
    url = source
    if "://" not in source:
        file = Path(source) / "store.db"
        if not file.is_file():
            raise ConfigError(f"source = {source!r}: give a .jsonl file, the directory of a run, or a store's URL")
        url = f"sqlite:///{file}"
    store = create_store(url)
    try:
        yield store
    finally:
        await store.close()


def read_lines(source: str, kind: type[Line], form: str) -> list[Line]:
    """Reads a .jsonl file.

    Raises:
        ConfigError: the file cannot be read, or a line is not of this form.
    """
    found = []
    try:
        # Not splitlines(): a JSON string may contain other line separators, such as U+2028.
        for number, line in enumerate(Path(source).read_text(encoding="utf-8").split("\n"), 1):
            if line.strip():
                try:
                    found.append(kind.model_validate(json.loads(line)))
                except (ValueError, ValidationError) as error:
                    raise ConfigError(f"{source}:{number} is not of the form {form}: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"source = {source!r} cannot be read: {why or error}") from error
    return found


def make_rows(policy: Policy, examples: Sequence[FineTuningExample]) -> tuple[list[TrainingRow], int]:
    """Returns a row for each assistant message, and the number of messages that are too long for the model.

    Messages with a ``weight`` of 0 are not learned, as in OpenAI's fine-tuning.
    The prompt is what the model would receive at that point, so its tokens are the same as in sampling.
    """
    rows: list[TrainingRow] = []
    too_long = 0
    for example in examples:
        for prompt_ids, response_ids in _tokenize(policy, example):
            if len(prompt_ids) + len(response_ids) > policy.max_length:
                too_long += 1
            else:
                rows.append(TrainingRow(prompt_ids, response_ids, [0.0] * len(response_ids), 1.0))
    return rows, too_long


def _tokenize(policy: Policy, example: FineTuningExample) -> Iterator[tuple[list[int], list[int]]]:
    messages = [restore_arguments({**message, "content": message.get("content") or ""}) for message in example.messages]

    def render(count: int, *, generate: bool) -> str:
        tools: Any = list(example.tools or ()) or None
        return str(
            policy.tokenizer.apply_chat_template(
                messages[:count], tools=tools, add_generation_prompt=generate, tokenize=False
            )
        )

    def encode(text: str) -> list[int]:
        ids: list[int] = policy.tokenizer.encode(text, add_special_tokens=False)
        return ids

    for position, message in enumerate(messages):
        if message.get("role") != "assistant" or message.get("weight") == 0:
            continue
        prompt, whole = render(position, generate=True), render(position + 1, generate=False)
        if not whole.startswith(prompt):  # the template adds something before answers that this message lacks
            continue
        response_ids = encode(whole[len(prompt) :])
        ends = [place for place, token in enumerate(response_ids) if token in policy.stop_ids]
        prompt_ids, response_ids = encode(prompt), response_ids[: ends[-1] + 1] if ends else response_ids
        if prompt_ids and response_ids:
            yield prompt_ids, response_ids
