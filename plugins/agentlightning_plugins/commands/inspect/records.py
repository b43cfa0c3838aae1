"""``agl runs``, ``spans``, ``resources``, ``workers``, ``ledger`` and ``tokens``: the records beside rollouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, get_args

import click

from agentlightning.cli import echo
from agentlightning.event import AttemptFinished, ResourcesPublished, RolloutStarted
from agentlightning.resources import LLM, ResourcesUpdate
from agentlightning.store.protocol import LightningStore
from agentlightning.types import Run, Worker, WorkerStatus
from agentlightning_plugins.commands.inspect.export import export, export_path
from agentlightning_plugins.shared.monitoring.evaluation import read_confirmation
from agentlightning_plugins.shared.monitoring.fleet import find_state
from agentlightning_plugins.shared.monitoring.runs import describe_run
from agentlightning_plugins.shared.paging import every
from agentlightning_plugins.shared.rendering.text import print_table
from agentlightning_plugins.shared.terminal import (
    StoreCommand,
    StoreGroup,
    found,
    limit_option,
    print_event,
    print_fields,
    print_json,
    print_page,
    print_record,
    print_result,
    shorten,
    show_time,
    to_json,
    with_store,
)
from agentlightning_plugins.shared.training_records.query import count_outcomes, read_ledger, read_rows
from agentlightning_plugins.shared.training_records.record import Outcome

_SCORES: Final = ("best_score", "val_reward", "reward")
"""Metrics that can be the score of a run; the first of them that the run has is its score."""


@click.group("runs", cls=StoreGroup)
def runs() -> None:
    """List and show the runs of a store."""


@runs.command("list")
@limit_option(50, "Show the oldest N.")
@with_store
async def list_runs(store: LightningStore, limit: int, as_json: bool) -> None:
    """List runs, the oldest first; the score is the last value of best_score, val_reward or reward."""
    page = await store.query_runs(limit=limit)
    scored = [await _with_scores(store, run) for run in page]
    rows = [] if as_json else [await _run_row(store, run) for run in scored]
    columns = ("run", "name", "status", "algorithm", "started", "rollouts", "score")
    print_page(as_json, page.model_copy(update={"items": scored}), columns, rows, optional=("name", "started"))


@runs.command("show")
@click.argument("run_id")
@with_store
async def show_run(store: LightningStore, run_id: str, as_json: bool) -> None:
    """Show a run with the last value of each of its metrics."""
    run = found(await store.get_run_by_id(run_id), "run", run_id)
    print_record(as_json, to_json(await _with_scores(store, run)))


async def _with_scores(store: LightningStore, run: Run) -> Run:
    steps = await store.with_run(run.run_id).query_metrics()
    return run.model_copy(update={"scores": {name: value for step in steps for name, value in step.values.items()}})


async def _run_row(store: LightningStore, run: Run) -> tuple[Any, ...]:
    rollouts = await store.with_run(run.run_id).query_rollouts(limit=1)
    score = next((f"{run.scores[metric]:.4g}" for metric in _SCORES if metric in run.scores), None)
    if "confirmed_p" in run.scores:
        score = f"{score}, {read_confirmation(run.scores)['verdict']}"
    algorithm = describe_run(run)["algorithm"]
    return run.run_id, run.name, run.status, algorithm, show_time(run.created_at), rollouts.total, score


@click.group("spans", cls=StoreGroup)
def spans() -> None:
    """List, show, follow and export spans."""


@spans.command("list")
@click.argument("rollout_id", required=False)
@click.option("--attempt", metavar="ID", help="Only spans of this attempt; `latest` for the newest.")
@click.option("--name", help="Only spans whose name contains this.")
@limit_option(50, "Show at most N.")
@with_store
async def list_spans(
    store: LightningStore, rollout_id: str | None, attempt: str | None, name: str | None, limit: int, as_json: bool
) -> None:
    """List the spans of ROLLOUT_ID, or of all rollouts."""
    if rollout_id is not None:
        found(await store.get_rollout_by_id(rollout_id), "rollout", rollout_id)
    page = await store.query_spans(rollout_id, attempt, name_contains=name, limit=limit)
    rows = [
        (s.rollout_id, s.sequence_id, s.name, s.status.status_code, s.span_id, shorten(dict(s.attributes)))
        for s in page
    ]
    print_page(as_json, page, ("rollout", "", "span", "status", "id", "attributes"), rows, optional=("rollout", "id"))


@spans.command("show")
@click.argument("rollout_id")
@click.argument("span_id")
@with_store
async def show_span(store: LightningStore, rollout_id: str, span_id: str, as_json: bool) -> None:
    """Show one span of a rollout with all its attributes."""
    page = await store.query_spans(rollout_id, span_id=span_id)
    span = to_json(found(page.items[0] if page.items else None, "span", span_id))
    if as_json:
        print_record(as_json, span)
        return
    attributes = span.pop("attributes")
    print_fields(span)
    print_fields({f"  {name}": value for name, value in attributes.items()})


@spans.command("follow")
@click.argument("rollout_id", required=False)
@with_store
async def follow_spans(store: LightningStore, rollout_id: str | None, as_json: bool) -> None:
    """Print the spans of each attempt of ROLLOUT_ID, or of all rollouts, when it ends, until Ctrl-C."""
    async for event in store.subscribe(["attempt_finished"]):
        if event.kind != "attempt_finished" or rollout_id not in (None, event.rollout_id):
            continue
        async for span in every(store.query_spans, event.rollout_id, event.attempt_id):
            shown = shorten(dict(span.attributes), 100)
            text = f"{show_time(span.end_time)} {span.rollout_id} {span.sequence_id} {span.name} {shown}"
            print_event(as_json, to_json(span), text)


@spans.command("export")
@export_path
@click.option("--rollout", "rollout_id", metavar="ID", help="Only spans of this rollout; default is all.")
@with_store
async def export_spans(store: LightningStore, path: Path, rollout_id: str | None, as_json: bool) -> None:
    """Write spans to PATH (.jsonl or .parquet)."""
    await export(every(store.query_spans, rollout_id), path, "spans", as_json)


@click.group("resources", cls=StoreGroup)
def resources() -> None:
    """List, show, follow, promote, roll back and export published resources."""


@resources.command("list")
@limit_option(20, "Show the newest N.")
@with_store
async def list_resources(store: LightningStore, limit: int, as_json: bool) -> None:
    """List all versions of all snapshots, the newest first."""
    page = await store.query_resources(sort_by="update_time", sort_order="desc", limit=limit)
    latest = await store.get_latest_resources()
    rows = [
        (
            update.resources_id,
            update.version,
            show_time(update.update_time),
            "latest" if latest is not None and update.resources_id == latest.resources_id else "",
            ", ".join(f"{name} ({kind['resource_type']})" for name, kind in _plain(update)["resources"].items()),
        )
        for update in page
    ]
    print_page(as_json, page, ("resources", "version", "updated", "", "contents"), rows, _plain)


@resources.command("show")
@click.argument("resources_id", default="latest")
@click.option("--version", type=click.IntRange(min=1), help="Version; default is the newest.")
@with_store
async def show_resources(store: LightningStore, resources_id: str, version: int | None, as_json: bool) -> None:
    """Show a snapshot: RESOURCES_ID, or the latest."""
    shown = _plain(await _find_resources(store, resources_id, version))
    if as_json:
        print_record(as_json, shown)
        return
    contents = shown.pop("resources")
    print_fields(shown)
    for name, resource in contents.items():
        echo(f"\n{name}")
        print_fields(resource)


@resources.command("follow")
@with_store
async def follow_resources(store: LightningStore, as_json: bool) -> None:
    """Print resources as they are published, until Ctrl-C."""
    async for event in store.subscribe(["resources_published"]):
        if isinstance(event, ResourcesPublished):
            update = await store.get_resources_by_id(event.resources_id, event.version)
            if update is not None:
                shown = _plain(update)
                contents = shorten(shown["resources"], 120)
                text = f"{show_time(event.time)} {event.resources_id} {event.version} {contents}"
                print_event(as_json, shown, text)


@resources.command("promote")
@click.argument("resources_id")
@with_store
async def promote_resources(store: LightningStore, resources_id: str, as_json: bool) -> None:
    """Make RESOURCES_ID, a snapshot or one version of it (rs-1@3), the latest resources of the run."""
    update = await store.promote(resources_id)
    print_result(as_json, _plain(update), f"{resources_id} is now the latest, as {update.version_id}")


@resources.command("rollback")
@click.argument("resources_id")
@click.argument("version", type=click.IntRange(min=1))
@with_store
async def rollback_resources(store: LightningStore, resources_id: str, version: int, as_json: bool) -> None:
    """Publish an earlier VERSION of a snapshot again, as its newest version."""
    update = await store.rollback(resources_id, version)
    print_result(as_json, _plain(update), f"{resources_id}: version {update.version} equals version {version}")


@resources.command("export")
@export_path
@with_store
async def export_resources(store: LightningStore, path: Path, as_json: bool) -> None:
    """Write all versions of all snapshots, without keys, to PATH (.jsonl or .parquet)."""
    await export((_without_keys(update) async for update in every(store.query_resources)), path, "snapshots", as_json)


def _without_keys(update: ResourcesUpdate) -> ResourcesUpdate:
    """Returns a copy of a snapshot without the API keys, which must not be printed or written to a file."""
    contents = {
        name: resource.model_copy(update={"api_key": None}) if isinstance(resource, LLM) else resource
        for name, resource in update.resources.items()
    }
    return update.model_copy(update={"resources": contents})


def _plain(update: ResourcesUpdate) -> dict[str, Any]:
    shown: dict[str, Any] = to_json(_without_keys(update))
    return shown


async def _find_resources(store: LightningStore, resources_id: str, version: int | None) -> ResourcesUpdate:
    if resources_id != "latest":
        return found(await store.get_resources_by_id(resources_id, version), "resources", resources_id)
    latest = found(await store.get_latest_resources(), "resources", "latest")
    if version is None:
        return latest
    return found(await store.get_resources_by_id(latest.resources_id, version), "version", str(version))


@click.group("workers", cls=StoreGroup)
def workers() -> None:
    """List, show, follow, end and export workers."""


@workers.command("list")
@click.option("--status", multiple=True, type=click.Choice(get_args(WorkerStatus)), help="Only these; may be repeated.")
@click.option("--contains", metavar="TEXT", help="Only workers whose id contains this.")
@click.option("--limit", default=50, show_default=True, type=click.IntRange(-1), help="-1 for all.")
@with_store
async def list_workers(
    store: LightningStore, status: tuple[WorkerStatus, ...], contains: str | None, limit: int, as_json: bool
) -> None:
    """List workers, sorted by their last heartbeat."""
    page = await store.query_workers(
        status_in=status or None,
        worker_id_contains=contains,
        sort_by="last_heartbeat_time",
        sort_order="desc",
        limit=limit,
    )
    rows = [
        (w.worker_id, find_state(w, store.now()), _ago(w.last_heartbeat_time, store.now()), _rollouts(w)) for w in page
    ]
    print_page(as_json, page, ("worker", "state", "last heartbeat", "rollouts"), rows)


@workers.command("show")
@click.argument("worker_id")
@with_store
async def show_worker(store: LightningStore, worker_id: str, as_json: bool) -> None:
    """Show a worker."""
    print_record(as_json, to_json(found(await store.get_worker_by_id(worker_id), "worker", worker_id)))


@workers.command("follow")
@with_store
async def follow_workers(store: LightningStore, as_json: bool) -> None:
    """Print each worker that starts or finishes an attempt, until Ctrl-C."""
    async for event in store.subscribe(["rollout_started", "attempt_finished"]):
        if not isinstance(event, RolloutStarted | AttemptFinished):
            continue
        attempt = await store.get_latest_attempt(event.rollout_id)
        if attempt is None or attempt.worker_id is None:
            continue
        worker = await store.get_worker_by_id(attempt.worker_id)
        if worker is not None:
            text = f"{show_time(event.time)} {worker.worker_id} {worker.status} {worker.current_rollout_id or ''}"
            print_event(as_json, to_json(worker), text)


@workers.command("end")
@click.argument("worker_id")
@with_store
async def end_worker(store: LightningStore, worker_id: str, as_json: bool) -> None:
    """Declare a worker dead: its attempts end immediately instead of when their lease expires."""
    found(await store.get_worker_by_id(worker_id), "worker", worker_id)
    ended = await store.end_worker(worker_id)
    print_result(as_json, {"ended": ended}, f"{ended} attempts ended")


@workers.command("export")
@export_path
@with_store
async def export_workers(store: LightningStore, path: Path, as_json: bool) -> None:
    """Write workers to PATH (.jsonl or .parquet)."""
    await export(every(store.query_workers), path, "workers", as_json)


def _ago(instant: float | None, now: float) -> str:
    return "never" if instant is None else f"{max(now - instant, 0):.0f} s ago"


def _rollouts(worker: Worker) -> str:
    """Returns the newest rollout that a worker runs, and the number of its other rollouts."""
    others = len(worker.attempt_ids or ()) - 1
    return f"{worker.current_rollout_id or ''}{f' and {others} more' if others > 0 else ''}"


@click.command("ledger", cls=StoreCommand)
@click.option("--step", type=click.IntRange(min=1), help="List the rollouts of one step; default: counts of all steps.")
@with_store
async def ledger(store: LightningStore, step: int | None, as_json: bool) -> None:
    """Show which training rollouts were trained on, and why the others were not."""
    entries = await read_ledger(store, step)
    if as_json:
        print_json([entry.to_json() for entry in entries])
        return
    if step is None:
        rows = [
            (of_step, sum(counts.values()), f"{counts['trained'] / sum(counts.values()):.0%}", _show_outcomes(counts))
            for of_step, counts in count_outcomes(entries).items()
        ]
        print_table(("step", "rollouts", "trained", "outcomes"), rows)
        return
    print_table(
        ("rollout", "group", "reward", "outcome", "calls"),
        [
            (each.rollout_id, each.group, each.reward, each.outcome, _show_outcomes(Counter(each.calls.values())))
            for each in entries
        ],
    )
    if entries:
        echo(f"{len(entries)} rollouts: {_show_outcomes(Counter(entry.outcome for entry in entries))}", err=True)


@click.command("tokens", cls=StoreCommand)
@click.argument("rollout_id")
@with_store
async def tokens(store: LightningStore, rollout_id: str, as_json: bool) -> None:
    """Show each token of the trained rows of ROLLOUT_ID: mask, both log-probabilities and advantage."""
    found(await store.get_rollout_by_id(rollout_id), "rollout", rollout_id)
    rows = await read_rows(store, rollout_id)
    if as_json:
        print_json([row.to_json() for row in rows])
        return
    if not rows:
        echo(f"{rollout_id} was not trained on; for the reason see: agl ledger", err=True)
    for row in rows:
        calls = ", ".join(call.response_id for call in row.calls)
        echo(f"step {row.step}, reward {row.reward}, {len(row.prompt_ids)} prompt tokens, {row.outcome}: {calls}")
        trainer: Sequence[float | None] = row.trainer_logprobs or [None] * len(row.response_ids)
        fields = zip(row.response_ids, row.mask, row.logprobs, trainer, row.advantages, strict=True)
        print_table(
            ("token", "text", "mask", "sampler", "trainer", "gap", "advantage"),
            [
                (
                    token,
                    repr(row.texts[token]) if token in row.texts else "",
                    mask,
                    f"{sampler:.4f}" if mask else "",
                    f"{theirs:.4f}" if mask and theirs is not None else "",
                    f"{theirs - sampler:+.1e}" if mask and theirs is not None else "",
                    f"{advantage:+.3f}" if mask else "",
                )
                for token, mask, sampler, theirs, advantage in fields
            ],
        )


def _show_outcomes(counts: Counter[Outcome]) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
