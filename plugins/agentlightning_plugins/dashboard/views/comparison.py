"""Two runs side by side: curves, last values, and the difference between their configurations."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from agentlightning.store.check import check_run_id
from agentlightning_plugins.dashboard.page import Visit
from agentlightning_plugins.dashboard.views.tasks import compare_tasks
from agentlightning_plugins.shared.monitoring import metrics as numbers
from agentlightning_plugins.shared.monitoring.runs import describe_run, find_run
from agentlightning_plugins.shared.rendering.text import dump, find_difference

_MAX_CHOICES: Final = 100


async def compare(visit: Visit) -> dict[str, Any]:
    """Compares the runs ``a`` and ``b`` of the query, or else the newest two runs."""
    store = visit.store
    total = (await store.query_runs(limit=0)).total
    known = [run.run_id for run in await store.query_runs(offset=max(0, total - _MAX_CHOICES))][::-1]
    chosen = [check_run_id(visit.query[name]) for name in ("a", "b") if visit.query.get(name)]
    if len(chosen) < 2:
        chosen = known[:2][::-1]
    sides, recorded = [], []
    for run_id in chosen:
        view = store.with_run(run_id)
        steps = await numbers.read_metrics(view)
        recorded.append((view, steps))
        last: dict[str, float] = {}
        for each in steps:
            last |= each.values
        run = await find_run(view)
        curves = {name: numbers.make_series(steps, name) for name in ("reward", "val_reward")}
        described: dict[str, Any] = {
            "run_id": run_id,
            "name": run_id,
            "status": "unknown",
            "config": {},
            "algorithm": "",
        }
        sides.append({**(described if run is None else describe_run(run)), "last": last, "curves": curves})
    names = sorted({name for side in sides for name in side["last"]}) if len(sides) == 2 else []
    texts = [dump(side["config"]) for side in sides]
    return {
        "choices": known,
        "runs": sides,
        "metrics": [{"name": name, "values": [side["last"].get(name) for side in sides]} for name in names],
        "tasks": await compare_tasks(recorded) if len(sides) == 2 else None,
        "configuration": await asyncio.to_thread(find_difference, *texts) if len(sides) == 2 else [],
    }
