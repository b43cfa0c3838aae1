"""The tasks and rollouts that importers find in files of other tools, and the items that they could not map."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agentlightning import semconv
from agentlightning.errors import ConfigError
from agentlightning.frozen import freeze_row, parse_lenient
from agentlightning.records import AttemptFailure, TraceStatus
from agentlightning.store.protocol import LightningStore
from agentlightning.types import AttemptedRollout, AttemptStatus, Span
from agentlightning_plugins.shared.configuration.sources import read_parquet
from agentlightning_plugins.shared.paging import every


@dataclass
class ImportedRollout:
    """One run of an agent that was recorded elsewhere."""

    source_id: str
    """Its id in the other tool; a rollout with a known id is not imported again."""
    task: Any = None
    spans: list[Span] = field(default_factory=list)
    ratings: dict[str, list[float]] = field(default_factory=dict)
    """Its scores, by name."""
    metadata: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    """Why it failed."""

    def add(
        self,
        key: str,
        name: str,
        attributes: dict[str, Any],
        parent: str | None = None,
        start: Any = None,
        end: Any = None,
        error: str | None = None,
    ) -> None:
        """Adds a span; ``key`` and ``parent`` are names within the rollout, times are of any form of ``to_time``."""
        ids = [None if each is None else digest(f"{self.source_id} {each}", 8) for each in (key, parent)]
        span = Span.from_attributes(
            attributes={name: value for name, value in attributes.items() if value is not None},
            name=name,
            trace_id=digest(self.source_id, 16),
            span_id=ids[0],
            parent_id=ids[1],
            start_time=to_time(start),
            end_time=to_time(end),
            status=TraceStatus(status_code="OK" if error is None else "ERROR", description=error),
        )
        self.spans.append(span)

    def add_call(
        self,
        key: str,
        messages: Sequence[dict[str, Any]],
        answers: Sequence[dict[str, Any]],
        model: str | None,
        tools: Any,
        attributes: dict[str, Any],
        **others: Any,
    ) -> None:
        """Adds a model call; messages, answers (one for each choice) and tools are in the format of chat completions.

        The messages of the first call are the task, unless there is one.
        """
        known = {
            semconv.GEN_AI_OPERATION_NAME: "chat",
            semconv.GEN_AI_REQUEST_MODEL: model,
            semconv.GEN_AI_INPUT_MESSAGES: json.dumps(messages),
            semconv.GEN_AI_OUTPUT_MESSAGES: json.dumps(answers) if answers else None,
            semconv.GEN_AI_TOOL_DEFINITIONS: json.dumps(tools) if tools else None,
        }
        self.add(key, "chat", {**known, **attributes}, **others)
        self.task = {"messages": list(messages)} if self.task is None else self.task

    @property
    def scores(self) -> dict[str, float]:
        """The mean score of each name; one of them may become the reward."""
        return {name: sum(given) / len(given) for name, given in self.ratings.items()}

    def rate(self, name: str, score: float) -> None:
        """Adds a score."""
        self.ratings.setdefault(name, []).append(score)

    def add_feedback(self, text: str | None) -> None:
        """Adds the reason for a score."""
        if text:
            self.add(f"feedback {text}", semconv.SPAN_FEEDBACK, {semconv.FEEDBACK_TEXT: text})


@dataclass
class Imported:
    """The result of an importer."""

    tasks: list[Any] = field(default_factory=list)
    """Tasks that have no rollout."""
    rollouts: list[ImportedRollout] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)
    """Names of the items that could not be mapped, by reason."""
    configuration: dict[str, Any] = field(default_factory=dict)
    """Keys of a configuration that use what was imported."""
    files: dict[str, str] = field(default_factory=dict)
    """Texts of files that the configuration names; they are written beside the tasks."""

    def leave_out(self, reason: str, name: object) -> None:
        """Notes that an item cannot be mapped."""
        self.left_out.setdefault(reason, []).append(str(name))

    def leave_out_trace(self, name: str, task: Any) -> None:
        """Notes that a trace has no model call; its input is a task, unless it is None."""
        self.leave_out("a trace without a model call" + ("" if task is None else " (its input is a task)"), name)
        self.tasks += [] if task is None else [task]

    @contextlib.contextmanager
    def reading(self, name: object) -> Iterator[None]:
        """Leaves an item out if the code inside finds that it has another form."""
        try:
            yield
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            self.leave_out(f"not of the known form ({type(error).__name__}: {error})"[:200], name)

    def read(self, paths: Sequence[Path]) -> list[tuple[str, dict[str, Any]]]:
        """Returns the records of .jsonl, .json and .parquet files with their places; other lines are left out.

        Each element of a list in a .json file is a record, and so is each of a page of an API (``data``, ``items``).
        Raises ConfigError if a file cannot be read.
        """
        items = []
        for path in paths:
            try:
                for number, value in enumerate(_read_file(path), 1):
                    with self.reading(f"{path}:{number}"):
                        value = parse_lenient(value) if isinstance(value, str) else value
                        items.append((f"{path}:{number}", dict(value.items())))
            except (OSError, ValueError) as error:
                raise ConfigError(f"{path} cannot be read: {error}") from error
        return items

    async def write(self, store: LightningStore, importer: str, rewards: Sequence[float | None]) -> tuple[int, int]:
        """Writes the rollouts; returns how many are new, and how many were there already.

        It finishes what a stopped import left unfinished. A new reward replaces the reward of an earlier import.
        """
        query = every(store.query_rollouts, metadata={"importer": importer})
        known = {(each.metadata or {}).get("source_id"): each async for each in query}
        seen: set[str] = set()
        n_new = n_known = 0
        for rollout, reward in zip(self.rollouts, rewards, strict=True):
            stored = known.get(rollout.source_id)
            try:
                task = freeze_row(rollout.task, "task")
            except ConfigError as error:
                self.leave_out(str(error), rollout.source_id)
                continue
            if rollout.source_id in seen:
                self.leave_out("more than once in these files", rollout.source_id)
                continue
            seen.add(rollout.source_id)
            if stored is None:
                about = {**rollout.metadata, "importer": importer, "source_id": rollout.source_id}
                stored = await store.start_rollout(task, metadata=about)
                n_new += 1
            else:
                n_known += 1
            assert isinstance(stored, AttemptedRollout)
            ids = stored.rollout_id, stored.attempt.attempt_id
            if stored.status not in ("succeeded", "failed", "cancelled"):
                if reward is not None:
                    rated = {f"{semconv.REWARD}.0.name": "primary", f"{semconv.REWARD}.0.value": reward}
                    rollout.add("reward", semconv.SPAN_REWARD, rated)
                about = dict(zip(("rollout_id", "attempt_id"), ids, strict=True))
                await store.add_many_spans([span.model_copy(update=about) for span in rollout.spans])
                failure = None if rollout.error is None else AttemptFailure(type="Imported", message=rollout.error)
                status: AttemptStatus = "succeeded" if failure is None else "failed"
                await store.update_attempt(*ids, status=status, error=failure, reward=reward)
            elif reward not in (None, stored.attempt.reward):
                await store.update_attempt(*ids, reward=reward)
        return n_new, n_known


def _read_file(path: Path) -> Iterator[Any]:
    if path.suffix == ".parquet":
        yield from read_parquet(path)
    elif path.suffix == ".jsonl":
        yield from filter(str.strip, path.read_text(encoding="utf-8-sig").split("\n"))
    elif path.suffix == ".json":
        value = parse_lenient(path.read_text(encoding="utf-8-sig"))
        pages = [
            value[key] for key in ("data", "items") if isinstance(value, dict) and isinstance(value.get(key), list)
        ]
        yield from value if isinstance(value, list) else pages[0] if pages else [value]
    else:
        raise ConfigError(f"{path}: a file to import ends in .json, .jsonl or .parquet")


def to_messages(value: Any) -> list[dict[str, Any]] | None:
    """Reads chat messages as tracing libraries write them: a text, a message, a list, or a request with messages.

    Items of OpenAI's Responses are read too. Returns None if there are no messages, or others beside them.
    """
    parsed = semconv.parse_json(value, value)
    if isinstance(parsed, dict):
        given = next((parsed[key] for key in ("messages", "input") if key in parsed), None)
        return _read_items([parsed]) if given is None else to_messages(given)
    if isinstance(parsed, list):
        return _read_items(parsed)
    return [{"role": "user", "content": value}] if isinstance(value, str) and value else None


def _read_items(items: list[Any]) -> list[dict[str, Any]] | None:
    """Reads messages and items of Responses, whose function calls become part of the answer before them."""
    messages: list[dict[str, Any]] = []
    for item in items:
        kind = item.get("type") if isinstance(item, dict) else None
        if kind == "function_call":
            call = semconv.make_tool_call(item.get("call_id"), item.get("name"), item.get("arguments"))
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1] = {**messages[-1], "tool_calls": [*messages[-1].get("tool_calls", ()), call]}
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        elif isinstance(item, dict) and "role" in item:
            messages.append({**item, "content": _read_content(item.get("content"))})
        elif kind != "reasoning":
            return None
    return messages or None


def _read_content(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    texts = ("input_text", "output_text")  # of Responses
    return semconv.join_texts(
        [{**part, "type": "text"} if isinstance(part, dict) and part.get("type") in texts else part for part in content]
    )


def to_answers(value: Any) -> list[dict[str, Any]]:
    """Reads the answers of a model call: a message, messages, an answer of an API with choices, or any text or JSON."""
    parsed = semconv.parse_json(value, value)
    if isinstance(parsed, dict) and isinstance(parsed.get("choices"), list):
        return [choice["message"] for choice in parsed["choices"]]
    if isinstance(parsed, dict) and {"content", "tool_calls"} & parsed.keys():
        parsed = {"role": "assistant", **parsed}
    found = to_messages(parsed) if isinstance(parsed, (dict, list)) else None
    if found is None and value not in (None, "", []):
        found = [{"content": value if isinstance(value, str) else json.dumps(value)}]
    return [{**message, "role": "assistant"} for message in found or ()]


def to_time(value: Any) -> float | None:
    """Reads an instant: a datetime, ISO text, which is UTC unless it says otherwise, or seconds since 1970.

    Numbers above 1e11, in which pandas writes JSON, are milliseconds.
    """
    if isinstance(value, str) and value:
        value = datetime.fromisoformat(value.replace("Z", "+00:00"))
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    return float(value) / (1000 if value > 1e11 else 1) if isinstance(value, (int, float)) else None


def snake_case(record: dict[str, Any]) -> dict[str, Any]:
    """Returns a record with its own keys in snake case: APIs and exports of one tool differ in this."""
    return {re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).lower(): value for key, value in record.items()}


def digest(text: str, size: int) -> str:
    """Returns a hash of a text in hexadecimal, two characters for each of ``size`` bytes."""
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=size).hexdigest()
