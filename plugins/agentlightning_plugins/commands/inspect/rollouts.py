"""``agl rollouts``."""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import click
from pydantic import BaseModel

from agentlightning.cli import echo
from agentlightning.errors import AdapterError, StoreError
from agentlightning.plugin.registry import get_manager
from agentlightning.reward import find_feedback, find_final_reward
from agentlightning.store.protocol import LightningStore
from agentlightning.types import Attempt, AttemptedRollout, Rollout, RolloutStatus, Span
from agentlightning_plugins.commands.inspect.export import export, export_path
from agentlightning_plugins.shared.chat_history import read_conversations
from agentlightning_plugins.shared.paging import every
from agentlightning_plugins.shared.rendering.text import print_table, show_number, show_task
from agentlightning_plugins.shared.terminal import (
    StoreGroup,
    found,
    limit_option,
    print_event,
    print_fields,
    print_json,
    print_page,
    print_result,
    shorten,
    show_time,
    to_json,
    with_store,
)

_DELETED_AT_ONCE = 1000  # rollouts in one request, which is short, however many match
_STATUS = click.Choice(get_args(RolloutStatus))


@click.group("rollouts", cls=StoreGroup)
def rollouts() -> None:
    """List, show, follow, cancel, retry, delete and export rollouts."""


@rollouts.command("list")
@click.option("--status", multiple=True, type=_STATUS, help="Only these; may be repeated.")
@click.option("--step", type=int, help="Only rollouts of this step of the algorithm.")
@limit_option(20, "Show the newest N.")
@with_store
async def list_rollouts(
    store: LightningStore, status: tuple[RolloutStatus, ...], step: int | None, limit: int, as_json: bool
) -> None:
    """List rollouts, the newest first."""
    page = await store.query_rollouts(
        status_in=status or None,
        metadata=None if step is None else {"step": step},
        sort_by="start_time",
        sort_order="desc",
        limit=limit,
    )
    rows = [] if as_json else [await _row(store, rollout) for rollout in page]
    columns = ("rollout", "status", "mode", "attempt", "reward", "started", "seconds", "input")
    print_page(as_json, page, columns, rows, optional=("mode", "attempt", "seconds"))


@rollouts.command("show")
@click.argument("rollout_id")
@with_store
async def show_rollout(store: LightningStore, rollout_id: str, as_json: bool) -> None:
    """Show a rollout with its attempts: reward, feedback, error, conversations and spans."""
    rollout = found(await store.get_rollout_by_id(rollout_id), "rollout", rollout_id)
    attempts = (await store.query_attempts(rollout_id)).items
    spans = (await store.query_spans(rollout_id)).items
    if as_json:
        shown = [
            {
                **to_json(attempt),
                "reward": _reward(attempt, spans),
                "feedback": [feedback._asdict() for feedback in find_feedback(_own(attempt, spans))],
                "conversations": read_conversations(_own(attempt, spans)),
            }
            for attempt in attempts
        ]
        print_json({**to_json(rollout), "attempts": shown, "spans": [to_json(span) for span in spans]})
        return
    print_fields({key: value for key, value in to_json(rollout).items() if key != "attempt"})
    for attempt in attempts:
        number, worker = attempt.sequence_id, attempt.worker_id
        echo(f"\nattempt {number} {attempt.attempt_id}: {attempt.status}, worker {worker}")
        if attempt.error is not None:
            echo(attempt.error.traceback.rstrip() or f"{attempt.error.type}: {attempt.error.message}")
        reward = _reward(attempt, spans)
        echo(f"reward {'none' if reward is None else f'{reward:g}'}")
        for feedback in find_feedback(_own(attempt, spans)):
            echo(f"feedback{'' if feedback.prompt is None else f' on {feedback.prompt}'}: {feedback.text}")
        for conversation in read_conversations(_own(attempt, spans)):
            echo("\n" + "\n".join(map(_show_message, conversation["messages"])))
        echo()
        rows = [
            (s.sequence_id, s.name, s.status.status_code, _milliseconds(s), s.span_id, s.parent_id)
            for s in _own(attempt, spans)
        ]
        print_table(("", "span", "status", "ms", "id", "parent"), rows)


@rollouts.command("follow")
@with_store
async def follow_rollouts(store: LightningStore, as_json: bool) -> None:
    """Print the events of the run as they happen, until Ctrl-C."""
    async for event in store.subscribe():
        record = to_json(event)
        values = {key: value for key, value in record.items() if key not in ("run_id", "time", "kind")}
        shown = " ".join(f"{key}={shorten(value)}" for key, value in values.items() if value is not None)
        print_event(as_json, record, f"{show_time(event.time)} {event.kind:<20} {shown}")


@rollouts.command("cancel")
@click.argument("rollout_ids", nargs=-1, required=True)
@with_store
async def cancel_rollouts(store: LightningStore, rollout_ids: tuple[str, ...], as_json: bool) -> None:
    """Cancel rollouts; running rollouts are stopped."""
    await _each(store.cancel_rollout, rollout_ids, as_json)


@rollouts.command("retry")
@click.argument("rollout_ids", nargs=-1, required=True)
@with_store
async def retry_rollouts(store: LightningStore, rollout_ids: tuple[str, ...], as_json: bool) -> None:
    """Queue failed or cancelled rollouts again."""
    await _each(store.retry_rollout, rollout_ids, as_json)


@rollouts.command("delete")
@click.argument("rollout_ids", nargs=-1)
@click.option("--status", multiple=True, type=click.Choice(["succeeded", "failed", "cancelled"]), help="Only these.")
@click.option(
    "--older-than",
    type=click.FloatRange(min=0),
    metavar="DAYS",
    help="Only rollouts that ended more than DAYS days ago.",
)
@click.option("--keep", type=click.IntRange(min=0), metavar="N", help="Keep the newest N.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@with_store
async def delete_rollouts(
    store: LightningStore,
    rollout_ids: tuple[str, ...],
    status: tuple[RolloutStatus, ...],
    older_than: float | None,
    keep: int | None,
    yes: bool,
    as_json: bool,
) -> None:
    """Delete rollouts that have ended, with their attempts and spans."""
    if not yes:
        what = f"{len(rollout_ids)} rollouts" if rollout_ids else "all matching rollouts"
        click.confirm(f"Delete {what} with their attempts and spans?", abort=True, err=as_json)
    before = None if older_than is None else time.time() - older_than * 86400
    remove = functools.partial(store.delete_rollouts, status_in=status or None, ended_before=before, keep=keep)
    deleted = await remove(list(rollout_ids)) if rollout_ids else 0
    while not rollout_ids and (number := await remove(limit=_DELETED_AT_ONCE)):
        deleted += number
        if deleted > _DELETED_AT_ONCE:
            echo(f"{deleted} deleted so far", err=True)
    print_result(as_json, {"deleted": deleted}, f"{deleted} deleted")


@rollouts.command("export")
@export_path
@click.option("--status", multiple=True, type=_STATUS, help="Only these; may be repeated.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["records", "atif", "openai-sft", "transitions"]),
    default="records",
    show_default=True,
    help="atif: trajectories of Harbor. openai-sft: the conversations of rollouts that succeeded, for fine-tuning. "
    "transitions: the state, observation, action and reward of each model call.",
)
@click.option("--min-reward", default=1.0, show_default=True, help="With openai-sft: minimum reward of a rollout.")
@click.option(
    "--best-of", type=click.IntRange(min=1), metavar="N", help="With openai-sft: only the best N rollouts of each task."
)
@with_store
async def export_rollouts(
    store: LightningStore,
    path: Path,
    status: tuple[RolloutStatus, ...],
    form: str,
    min_reward: float,
    best_of: int | None,
    as_json: bool,
) -> None:
    """Write rollouts, each with its latest attempt, to PATH (.jsonl or .parquet)."""
    if form == "openai-sft":
        from agentlightning_plugins.shared.chat_history import select_examples

        if status or path.suffix != ".jsonl":
            raise click.UsageError("--format openai-sft accepts no --status and writes only .jsonl files")
        await export(select_examples(store, min_reward, best_of), path, "conversations", as_json)
        return
    chosen = every(store.query_rollouts, status_in=status or None)
    if form in ("atif", "transitions"):
        if path.suffix != ".jsonl":
            raise click.UsageError(f"--format {form} writes only .jsonl files")
        if form == "transitions":
            await export(_read_transitions(store, chosen), path, "transitions", as_json)
        else:
            from agentlightning_plugins.commands.inspect.atif import read_trajectories

            await export(read_trajectories(store, chosen), path, "trajectories", as_json)
        return
    await export(chosen, path, "rollouts", as_json)


async def _read_transitions(store: LightningStore, rollouts: AsyncIterator[Rollout]) -> AsyncIterator[BaseModel]:
    """Yields the transitions of each latest attempt, with its ids in ``metadata``."""
    adapter = get_manager().create("adapter", "transition")
    async for rollout in rollouts:
        if isinstance(rollout, AttemptedRollout):
            ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
            spans = (await store.query_spans(rollout.rollout_id, rollout.attempt.attempt_id)).items
            try:
                transitions = await asyncio.to_thread(adapter.adapt_attempt, rollout.attempt, spans)
            except AdapterError as error:
                echo(f"left out: {error}", err=True)
                continue
            for transition in transitions or ():
                yield transition.model_copy(update={"metadata": {**transition.metadata, **ids}})


async def _each(action: Any, rollout_ids: tuple[str, ...], as_json: bool) -> None:
    outcomes: list[dict[str, str]] = []
    for rollout_id in rollout_ids:
        try:
            rollout: Rollout = await action(rollout_id)
        except StoreError as error:
            outcomes.append({"rollout_id": rollout_id, "error": str(error)})
        else:
            outcomes.append({"rollout_id": rollout_id, "status": rollout.status})
        if not as_json:
            rollout_id, outcome = outcomes[-1].values()
            echo(f"{rollout_id}: {outcome}", err="error" in outcomes[-1])
    if as_json:
        print_json(outcomes)
    if any("error" in outcome for outcome in outcomes):
        raise SystemExit(1)


def _own(attempt: Attempt, spans: Sequence[Span]) -> list[Span]:
    return [span for span in spans if span.attempt_id == attempt.attempt_id]


def _reward(attempt: Attempt, spans: Sequence[Span]) -> float | None:
    return attempt.reward if attempt.reward is not None else find_final_reward(_own(attempt, spans))


def _show_message(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    lines = [f"[{message.get('role')}] {content if isinstance(content, str) else json.dumps(content)}"]
    for call in message.get("tool_calls") or ():
        function = call.get("function", {})
        lines.append(f"  calls {function.get('name')}({function.get('arguments', '')})")
    return "\n".join(lines)


async def _row(store: LightningStore, rollout: Rollout) -> tuple[Any, ...]:
    attempt = rollout.attempt if isinstance(rollout, AttemptedRollout) else None
    number = reward = None
    if attempt is not None:
        number, reward = attempt.sequence_id, attempt.reward
        if reward is None:
            spans = await store.query_spans(rollout.rollout_id, "latest", name_contains="agentlightning.")
            reward = find_final_reward(spans.items)
    shown = None if reward is None else show_number(reward)
    seconds = None if rollout.end_time is None else f"{rollout.end_time - rollout.start_time:.1f}"
    about = rollout.rollout_id, rollout.status, rollout.mode, number, shown
    return *about, show_time(rollout.start_time), seconds, shorten(show_task(rollout.input))


def _milliseconds(span: Span) -> str:
    known = span.start_time is not None and span.end_time is not None
    return f"{((span.end_time or 0.0) - (span.start_time or 0.0)) * 1e3:.1f}" if known else ""
