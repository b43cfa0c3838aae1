"""``agl runs``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from agentlightning.store.protocol import LightningStore
from agentlightning.types import Run
from agentlightning_plugins.commands.terminal import (
    found,
    print_fields,
    print_json,
    print_page,
    show_time,
    to_json,
    with_store,
)

_SCORES = ("best_score", "val_reward", "reward")
"""Metrics that can be the score of a run; the first of them that the run has is its score."""


@click.group("runs")
def runs() -> None:
    """List and show the runs of a store."""


@runs.command("list")
@click.option("--limit", default=50, show_default=True, type=click.IntRange(min=1), help="Show the oldest N.")
@with_store
async def list_runs(store: LightningStore, limit: int, as_json: bool) -> None:
    """List runs, the oldest first; the score is the last value of best_score, val_reward or reward."""
    page = await store.query_runs(limit=limit)
    scored = [run.model_copy(update={"scores": await _read_scores(store, run)}) for run in page]
    rows = [] if as_json else [await _row(store, run) for run in scored]
    columns = ("run", "name", "status", "algorithm", "started", "rollouts", "score")
    print_page(as_json, page.model_copy(update={"items": scored}), columns, rows)


@runs.command("show")
@click.argument("run_id")
@with_store
async def show_run(store: LightningStore, run_id: str, as_json: bool) -> None:
    """Show a run with the last value of each of its metrics."""
    run = found(await store.get_run_by_id(run_id), "run", run_id)
    shown = to_json(run.model_copy(update={"scores": await _read_scores(store, run)}))
    (print_json if as_json else print_fields)(shown)


async def _read_scores(store: LightningStore, run: Run) -> dict[str, float]:
    steps = await store.with_run(run.run_id).query_metrics()
    return {name: value for step in steps for name, value in step.values.items()}


async def _row(store: LightningStore, run: Run) -> tuple[Any, ...]:
    rollouts = await store.with_run(run.run_id).query_rollouts(limit=1)
    algorithm = run.config.get("algorithm")
    name = algorithm.get("name") if isinstance(algorithm, Mapping) else algorithm
    score = next((run.scores[metric] for metric in _SCORES if metric in run.scores), None)
    shown = None if score is None else f"{score:.4g}"
    return run.run_id, run.name, run.status, name, show_time(run.created_at), rollouts.total, shown
