"""The state of a store at one moment, and its picture for a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from agentlightning.cli import printable
from agentlightning.store.protocol import LightningStore
from agentlightning_plugins.shared.monitoring.fleet import read_activity, read_backends, read_queue, read_workers
from agentlightning_plugins.shared.monitoring.metrics import estimate_left, judge, read_metrics
from agentlightning_plugins.shared.monitoring.runs import describe_run, find_curve, find_newest_runs, find_run
from agentlightning_plugins.shared.rendering.text import show_error, show_span
from agentlightning_plugins.shared.terminal import found

_READ_WORKERS: Final = 50
_STEPS: Final = 60


async def read_snapshot(store: LightningStore, run_id: str | None) -> dict[str, Any]:
    """Reads the state of a run and the workers of its store; by default of the newest run, preferably in progress."""
    if run_id is not None:
        run = found(await find_run(store.with_run(run_id)), "run", run_id)
    else:
        runs = await find_newest_runs(store)
        if not runs:
            return {"time": store.now(), "run": None, **await _read_fleet(store)}
        run = runs[0]
    view = store.with_run(run.run_id)
    steps = await read_metrics(view, _STEPS)
    last = {name: value for step in steps[-5:] for name, value in step.values.items()}
    curve = find_curve(steps)
    return {
        "time": store.now(),
        "run": describe_run(run),
        "step": steps[-1].step if steps else None,
        "progress": estimate_left(run, steps, store.now()),
        "reward": curve[-1]["value"] if curve else None,
        "val_reward": last.get("val_reward"),
        "curve": [point["value"] for point in curve],
        "tokens_per_s": last.get("tokens_per_s", last.get("sample_tokens_per_s")),
        "seconds_per_step": last.get("seconds"),
        "health": [health._asdict() for health in judge(steps) if health.level != "good"],
        **await read_queue(view),
        "activity": await read_activity(view),
        "backends": await read_backends(view),
        **await _read_fleet(store),
    }


async def _read_fleet(store: LightningStore) -> dict[str, Any]:
    workers, total = await read_workers(store, _READ_WORKERS)
    return {"workers": workers, "n_workers": total}


_BARS: Final = "▁▂▃▄▅▆▇█"
_STYLES: Final = {
    "busy": "green", "idle": "dim", "lost": "red", "ended": "dim", "ok": "green", "failing": "yellow", "down": "red",
    "watch": "yellow", "bad": "red", "running": "green", "succeeded": "green", "failed": "red",
}  # fmt: skip
_OPEN: Final = ("queuing", "requeuing", "preparing", "running")
_ENDED: Final = ("succeeded", "failed", "cancelled")
_SHOWN_WORKERS: Final = 12
_BACKEND_COLUMNS: Final = ("backend", "state", "calls", "latency, 95 %", "tokens in/out", "cost")
_WORKER_COLUMNS: Final = ("worker", "state", "heartbeat", "works on")


def draw(snapshot: Mapping[str, Any]) -> Group:
    """Draws a snapshot: the run, its rollouts and rewards, backends, workers and errors."""
    parts: list[RenderableType] = [_title(snapshot)]
    if snapshot["run"] is not None:
        parts.append(_figures(snapshot))
        parts += [Text(f"{each['name']}: {each['words']}", style=_STYLES[each["level"]]) for each in snapshot["health"]]
        parts += _section("backends", _BACKEND_COLUMNS, map(_backend_row, snapshot["backends"]))
    workers, total = snapshot["workers"][:_SHOWN_WORKERS], snapshot["n_workers"]
    parts += _section(f"workers ({total})", _WORKER_COLUMNS, map(_worker_row, workers))
    if total > len(workers):
        parts.append(Text(f"and {total - len(workers)} more; agl workers list shows them", style="dim"))
    if snapshot["run"] is not None:
        activity = snapshot["activity"]
        title = f"errors of the newest {activity['searched']:,} rollouts"
        parts += _section(title, ("count", "error", "last message"), map(_error_row, activity["errors"]))
    return Group(*parts)


def sparkline(values: Sequence[float]) -> str:
    """Draws the last values as bars of eight heights."""
    shown = values[-40:]
    if len(shown) < 2:
        return ""
    low, high = min(shown), max(shown)
    return "".join(_BARS[round(7 * (value - low) / (high - low))] if high > low else _BARS[3] for value in shown)


def _title(snapshot: Mapping[str, Any]) -> Text:
    run, clock = snapshot["run"], time.strftime("%H:%M:%S", time.localtime(snapshot["time"]))
    if run is None:
        return Text(f"no runs yet · {clock}", style="bold")
    title = Text(printable(run["name"] or run["run_id"]), style="bold")
    title.append(f" ({printable(run['run_id'])})" if run["name"] not in ("", run["run_id"]) else "", style="dim")
    title.append(" · ").append(run["status"], style=_STYLES.get(run["status"], ""))
    title.append(f" · {printable(run['algorithm'])}" if run["algorithm"] else "")
    title.append(f" · {clock}", style="dim")
    return title


def _figures(snapshot: Mapping[str, Any]) -> Table:
    counts, activity = snapshot["rollouts"], snapshot["activity"]
    waits = f", the oldest for {show_span(snapshot['time'] - snapshot['oldest'])}" if snapshot["oldest"] else ""
    waits += f", the highest priority {snapshot['priority']}" if snapshot["priority"] else ""
    speed = f"{60 * activity['ended'] / activity['window_s']:.0f} rollouts/min"
    if activity["ended"]:
        speed += f" ({activity['failed']} failed)"
    if snapshot["tokens_per_s"] is not None:
        speed += f", {snapshot['tokens_per_s']:,.0f} tokens/s"
    if snapshot["seconds_per_step"] is not None:
        speed += f", {show_span(snapshot['seconds_per_step'])} per step"
    rows = [
        ("queue", f"{snapshot['waiting']:,} waiting{waits}; {_counts(counts, _OPEN[2:]) or '0 running'}"),
        ("rollouts", _counts(counts, _ENDED) or "none ended yet"),
        ("throughput", speed),
    ]
    if snapshot["step"] is not None:
        progress = snapshot["progress"] or {}
        of = f" of {progress['steps']}" if progress.get("steps") else ""
        share = f", {progress['share']:.0%}" if progress else ""
        left = f", about {show_span(progress['seconds_left'])} left" if progress.get("seconds_left") else ""
        rows.append(("step", f"{snapshot['step']}{of}{share}{left}"))
    if snapshot["reward"] is not None:
        validated = "" if snapshot["val_reward"] is None else f"   validation {snapshot['val_reward']:.3f}"
        rows.append(("reward", f"{snapshot['reward']:.3f}  {sparkline(snapshot['curve'])}{validated}"))
    return _table(("", ""), rows)


def _backend_row(backend: Mapping[str, Any]) -> tuple[str | Text, ...]:
    return (
        printable(f"{backend['model']}\n{backend['endpoint']}"),
        Text(backend["state"], style=_STYLES[backend["state"]]),
        f"{backend['calls']:,}" + (f"\n{backend['failed']:,} failed" if backend["failed"] else ""),
        f"{show_span(backend['latency_s'])}, {show_span(backend['latency_p95_s'])}",
        f"{backend['input_tokens']:,}/{backend['output_tokens']:,}",
        "–" if backend["cost"] is None else f"{backend['cost']:.4g}",
    )


def _worker_row(worker: Mapping[str, Any]) -> tuple[str | Text, ...]:
    silent_s, work, others = worker["silent_s"], worker["current_rollout_id"], len(worker["attempt_ids"] or ()) - 1
    does = []
    if worker["state"] == "busy" and work:
        does.append(f"{work} and {others} more" if others > 0 else work)
    if worker["heartbeat_stats"]:
        does.append(", ".join(f"{name} {_number(value)}" for name, value in worker["heartbeat_stats"].items())[:60])
    return (
        printable(worker["worker_id"]),
        Text(worker["state"], style=_STYLES.get(worker["state"], "")),
        "never" if silent_s is None else f"{show_span(int(silent_s))} ago",
        printable("\n".join(does)),
    )


def _error_row(error: Mapping[str, Any]) -> tuple[str | Text, ...]:
    said = printable(show_error(error["message"], 120))
    return f"{error['count']:,}", Text(printable(error["type"]), style="red"), said


def _section(title: str, columns: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> list[RenderableType]:
    table = _table(columns, rows)
    return [Text(), Text(title, style="bold"), table if table.row_count else Text("none", style="dim")]


def _table(columns: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0), show_header=any(columns))
    for column in columns:  # a narrow terminal folds the first and the last one
        table.add_column(column, no_wrap=column not in (columns[0], columns[-1]), overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _counts(counts: Mapping[str, int], names: Sequence[str]) -> str:
    return ", ".join(f"{counts[name]:,} {name}" for name in names if counts.get(name))


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
