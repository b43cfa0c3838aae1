"""The report of a run: as Markdown, as JSON, and as ``report.html``, the dashboard's page of a run in one file."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from agentlightning import semconv
from agentlightning.resources import LLM, PromptTemplate, hide_secrets
from agentlightning.run.directory import RECORD_NAME, read_record
from agentlightning.store.protocol import LightningStore
from agentlightning.types import AttemptedRollout, Metrics, Run
from agentlightning_plugins.shared.monitoring.evaluation import (
    compare_first_and_last,
    describe_outcome,
    find_published_prompts,
    list_distributions,
    read_candidates,
    read_confirmation,
    read_rewards,
)
from agentlightning_plugins.shared.monitoring.metrics import make_series
from agentlightning_plugins.shared.monitoring.runs import count_rollouts, describe_run, read_result
from agentlightning_plugins.shared.rendering.page import write_page
from agentlightning_plugins.shared.rendering.text import show_error, to_code_block, to_markdown, without_html
from agentlightning_plugins.shared.statistics.interval import mean_interval
from agentlightning_plugins.shared.training_records.query import count_outcomes, read_ledger
from agentlightning_plugins.shared.training_records.record import LEDGER_SPAN

REPORT_NAME: Final = "report.md"
CANDIDATE_COLUMNS: Final = ("candidate", "round", "score", "on a batch", "parent", "critique")
_MAX_ERRORS: Final = 10
_MAX_FAILED: Final = 1000
"""Number of the newest failed rollouts whose errors are counted."""


class Report(NamedTuple):
    """The contents of a report."""

    run: Run
    record: Mapping[str, Any]
    """Contents of ``run.json``; empty if the directory of the run is elsewhere."""
    rollouts: Mapping[str, int]
    """Number of rollouts by status."""
    errors: Mapping[str, int]
    """Number of failed rollouts by error."""
    step: int | None
    """The last step that recorded metrics."""
    metrics: Mapping[str, Mapping[str, float]]
    """First, last, lowest and highest value of each metric."""
    learned: Mapping[str, str]
    """The latest resources as text, without API keys."""
    cached_calls: int = 0
    """Number of model calls that the gateway answered from its cache."""
    candidates: Sequence[Mapping[str, Any]] = ()
    """The prompts that a search tried, in the order of creation: ``candidate_id``, ``round``, ``full_score``,
    ``batch_score``, ``parent_id``, ``edited``, ``critique`` and ``prompts``."""

    def to_json(self) -> dict[str, Any]:
        """Converts to plain JSON values."""
        return {**self._asdict(), "run": self.run.model_dump(mode="json")}

    def to_markdown(self) -> str:
        """Converts to Markdown."""
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.run.created_at))
        resumed = len(self.record.get("resumed_at", ()))
        total = sum(self.rollouts.values())
        counts = ", ".join(f"{count} {status}" for status, count in self.rollouts.items() if count)
        versions = self.record.get("versions", {})
        shown = ", ".join(f"{name} {versions[name]}" for name in ("lightning", "python") if name in versions)
        lines = [
            f"# {without_html(self.run.name)}: {self.run.status}\n",
            f"- algorithm: {describe_run(self.run)['algorithm']}",
            f"- started: {started}" + f", resumed {'once' if resumed == 1 else f'{resumed} times'}" * bool(resumed),
            f"- rollouts: {total}" + f" ({counts})" * bool(counts),
            f"- step: {'none' if self.step is None else self.step}",
        ]
        if self.record:
            lines += [f"- seed: {self.record.get('seed', 0)}", f"- versions: {shown}; more in {RECORD_NAME}"]
        if self.cached_calls:
            lines.append(f"- model calls that the gateway's cache answered: {self.cached_calls}")
        if self.metrics:
            rows = [(name, *map(float, summary.values())) for name, summary in self.metrics.items()]
            lines += ["\n## Metrics\n", *to_markdown(("", "first", "last", "lowest", "highest"), rows)]
        if self.candidates:
            found = read_confirmation({name: summary["last"] for name, summary in self.metrics.items()})
            if "p" in found:
                means = f"{found['first']:.3f} with the first prompt, {found['best']:.3f} with the best"
                lines.insert(5, f"- fresh rollouts: {means} (one-sided p = {found['p']:.2g}): {found['verdict']}")
            elif find_published_prompts(self.candidates, self.learned) != find_published_prompts(
                self.candidates[:1], {}
            ):
                lines.insert(5, "- best prompt: not confirmed, no fresh rollouts compared it with the first")
            lines += ["\n## Candidates\n", *to_markdown(CANDIDATE_COLUMNS, map(candidate_row, self.candidates))]
        if self.errors:
            lines += ["\n## Errors\n", *(f"- {count} x {without_html(error)}" for error, count in self.errors.items())]
        if self.learned:
            lines += ["\n## Latest resources"]
            lines += [f"\n### {without_html(name)}\n\n{to_code_block(text)}" for name, text in self.learned.items()]
        return "\n".join(lines) + "\n"


async def read_report(store: LightningStore, directory: Path | None) -> Report:
    """Builds the report of a store's run from the records that exist now; the directory has ``run.json``."""
    run = await store.get_run_by_id(store.run_id)
    failed = await store.query_rollouts(
        status_in=["failed"], sort_by="start_time", sort_order="desc", limit=_MAX_FAILED
    )
    errors = Counter(
        show_error(f"{rollout.attempt.error.type}: {rollout.attempt.error.message}")
        for rollout in failed
        if isinstance(rollout, AttemptedRollout) and rollout.attempt.error is not None
    )
    cached = await store.query_spans(None, name_contains=semconv.CACHED_SUFFIX, limit=1)
    metrics = (await store.query_metrics()).items
    latest = await store.get_latest_resources()
    return Report(
        run=run or Run(),
        record={} if directory is None else read_record(directory),
        rollouts=await count_rollouts(store),
        errors=dict(errors.most_common(_MAX_ERRORS)),
        step=metrics[-1].step if metrics else None,
        metrics=_summarize(metrics),
        learned={} if latest is None else {name: _describe(value) for name, value in latest.resources.items()},
        cached_calls=cached.total,
        candidates=await read_candidates(store),
    )


async def write_report(store: LightningStore, directory: Path) -> Path:
    """Writes the report into the directory of its run, and the best prompts of a search as plain files next to it."""
    file, report = directory / REPORT_NAME, await read_report(store, directory)
    file.write_text(report.to_markdown(), encoding="utf-8")
    for name, text in find_published_prompts(report.candidates, report.learned).items():
        prompt = directory / "prompts" / (re.sub(r"[^\w.-]", "_", name) + ".txt")
        prompt.parent.mkdir(exist_ok=True)
        prompt.write_text(text, encoding="utf-8")
    return file


def candidate_row(candidate: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns the cells of a candidate, for ``CANDIDATE_COLUMNS``."""
    return tuple(map(candidate.get, ("candidate_id", "round", "full_score", "batch_score", "parent_id", "critique")))


def _summarize(metrics: Sequence[Metrics]) -> dict[str, dict[str, float]]:
    by_name: dict[str, list[float]] = {}
    for entry in metrics:
        for name, value in entry.values.items():
            by_name.setdefault(name, []).append(value)
    return {
        name: {"first": values[0], "last": values[-1], "lowest": min(values), "highest": max(values)}
        for name, values in sorted(by_name.items())
    }


def _describe(resource: Any) -> str:
    if isinstance(resource, PromptTemplate):
        return resource.template
    if isinstance(resource, LLM):
        return f"{resource.model} at {resource.endpoint}"
    return json.dumps(hide_secrets(resource.model_dump(mode="json")))


HTML_NAME: Final = "report.html"
_MAX_INTERVALS: Final = 30
"""Maximum number of evaluations whose intervals are computed from their rollouts."""


async def write_html(store: LightningStore, directory: Path | None, file: Path | None = None) -> Path:
    """Writes the page into ``file``, or into the directory of the run; one of both is given."""
    report = await read_report(store, directory)
    metrics = (await store.query_metrics()).items
    published = find_published_prompts(report.candidates, report.learned)
    comparison = await compare_first_and_last(store, metrics, report.candidates, published)
    has_ledger = bool((await store.query_spans(None, name=LEDGER_SPAN, limit=1)).items)
    data = await read_result(store)
    return write_page(
        Path(__file__).with_name("report.html.jinja"),
        file or Path(directory or "", HTML_NAME),
        data={**data, "reward": await _with_intervals(store, metrics, data["reward"])},
        report=report,
        comparison=comparison,
        outcome=describe_outcome(comparison, metrics, published),
        candidate_columns=CANDIDATE_COLUMNS,
        candidates=[candidate_row(each) for each in report.candidates],
        distributions=list_distributions(report.candidates),
        ledger=count_outcomes(await read_ledger(store)) if has_ledger else {},
    )


async def _with_intervals(
    store: LightningStore, metrics: Sequence[Metrics], reward: Mapping[str, Sequence[Mapping[str, float]]]
) -> dict[str, Sequence[Mapping[str, float]]]:
    """Adds the best score of a prompt search, and the intervals of evaluations, from the rewards of their rollouts."""
    series = {**reward, "best_score": make_series(metrics, "best_score")}
    for name in ("val_reward", "test_reward"):
        points = []
        for point in series.get(name, ()) if len(series.get(name, ())) <= _MAX_INTERVALS else ():
            rewards = await read_rewards(store, int(point["step"]), name.removesuffix("_reward"))
            low, high = mean_interval(list(rewards.values())) or (None, None)
            points.append({**point, **({} if low is None or high is None else {"low": low, "high": high})})
        series[name] = points or series.get(name, ())
    return {name: points for name, points in series.items() if points}
