"""Tracker ``console``: a line for each step; in a terminal also a live line, in a notebook only that one."""

from __future__ import annotations

import importlib
import io
import time
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from agentlightning.cli import printable
from agentlightning.event import AttemptFinished, Event, ResourcesPublished, RolloutFinished, RunFinished, StepFinished
from agentlightning.types import Run
from agentlightning_plugins.shared.rendering.text import show_error, show_number, show_span

_SHOWN = ("reward", "val_reward", "success_rate", "tokens_per_s", "seconds")
_MAX_ERRORS = 8
"""Limit on the number of distinct errors shown, because messages may differ in every rollout."""


class ConsoleTracker:
    """Shows step, reward, tokens per second, the number of rollouts and the time left.

    The time left is estimated from the metric ``progress`` (0 to 1), from the second step on: the time before the first
    step, for example for loading a model, and the steps before a resume do not count.
    """

    def __init__(self, console: Console | None = None, *, brief: bool = False) -> None:
        """Configures the output.

        Args:
            console: default is stderr.
            brief: show only the live line and errors, for commands that print the result themselves.
        """
        self._brief = brief
        self._console = console or Console(stderr=True)
        self._live: Live | NotebookLine | None = None
        self._started = time.monotonic()
        self._finished = self._failed = 0
        self._without_reward = 0.0
        self._errors: dict[str, int] = {}
        self._last_errors: dict[str, str] = {}
        """The error of the last attempt of each rollout that has not ended: a later attempt may succeed."""
        self._has_advised = self._has_resources = False
        self._line = Text("waiting for the first step", style="dim")
        self._left = ""
        self._first_progress: tuple[float, float] | None = None
        """Monotonic time and progress of the first step of this process."""

    def start(self, run: Run, directory: Path | None) -> None:
        self._started = time.monotonic()
        where = f", files in {directory}" if directory is not None else ""
        if not self._brief:
            self._say(Text.assemble("run ", (run.name, "bold"), where))
        if self._console.is_terminal:
            self._live = Live(self._render(), console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        elif self._console.is_jupyter:
            self._live = NotebookLine(self._render())

    def on_event(self, event: Event) -> None:
        if isinstance(event, AttemptFinished) and event.error is not None:
            self._last_errors[event.rollout_id] = event.error
        elif isinstance(event, RolloutFinished):
            self._finished += 1
            self._failed += event.status == "failed"
            error = self._last_errors.pop(event.rollout_id, None)
            if error is not None and event.status == "failed":
                self._show_error(event.rollout_id, error)
        elif isinstance(event, ResourcesPublished):
            if not self._has_resources and not self._brief:
                self._say(Text(f"first resources: {event.resources_id}, version {event.version}"))
            self._has_resources = True
        elif isinstance(event, StepFinished):
            self._show_step(event)
        elif isinstance(event, RunFinished):
            for error, count in self._errors.items():
                self._say(Text(f"{count} of {self._finished} rollouts: {error}"))
            if self._failed == self._finished > 0:
                self._say(Text("no rollout succeeded; `agl doctor AGENT` runs one and reports the cause"))
            if not self._brief:
                self._say(Text(f"run {event.status}"))
        if self._live is not None:
            self._live.update(self._render())

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()

    def _show_error(self, rollout_id: str, error: str) -> None:
        """Shows each distinct error once; the attempt contains its traceback."""
        line = show_error(error)
        if line not in self._errors and len(self._errors) < _MAX_ERRORS:
            self._say(Text(f"rollout {rollout_id} failed: {line}"))
            self._errors[line] = 0
        if line in self._errors:
            self._errors[line] += 1

    def _show_step(self, event: StepFinished) -> None:
        values = event.values
        self._without_reward += values.get("rollouts_without_reward", 0)  # failed ones included
        unrewarded = self._without_reward - self._failed
        if unrewarded > 0 and not self._has_advised:
            self._has_advised = True
            advice = "return a number from the agent, or call agl.emit_reward"
            noun = "rollout has" if unrewarded == 1 else "rollouts have"
            self._say(Text(f"{unrewarded:.0f} {noun} no reward, which counts as 0: {advice}"))
        text = Text(f"step {event.step:>4}")
        for name in _SHOWN:
            if name in values:
                text.append(f"  {name} ", style="dim").append(show_number(values[name]), style="bold")
        if values.get("progress", 0.0) > 0:
            self._left = self._estimate_left(values["progress"])
        if self._brief or self._console.is_jupyter:
            self._line = text
        else:
            self._line = Text()
            self._say(text if self._live is not None else text.append(f"  {self._left}"))

    def _estimate_left(self, progress: float) -> str:
        now = time.monotonic()
        if self._first_progress is None:
            self._first_progress = now, progress
        began, first = self._first_progress
        if progress <= first or progress >= 1:
            return ""
        return f"about {show_span((now - began) * (1 - progress) / (progress - first))} left"

    def _say(self, text: Text) -> None:
        text.plain = printable(text.plain)
        # A pipe or a file has no width: lines are not wrapped there.
        self._console.print(text, soft_wrap=not self._console.is_terminal)

    def _render(self) -> Table:
        grid = Table.grid(padding=(0, 2))
        failed = f", {self._failed} failed" if self._failed else ""
        elapsed = show_span(time.monotonic() - self._started)
        if self._line:
            grid.add_row(self._line)
        counts = f"{self._finished} rollouts{failed}, {elapsed} elapsed, {self._left}".rstrip(", ")
        grid.add_row(Text(counts, style="dim"))
        return grid


class NotebookLine:
    """A line in the output of a notebook's cell that changes in place, at most four times a second."""

    def __init__(self, renderable: RenderableType) -> None:
        notebook: Any = importlib.import_module("IPython.display")  # part of every notebook, not a dependency of ours
        self._latest = renderable
        self._shown_at = time.monotonic()
        self._handle = notebook.display({"text/plain": _to_text(renderable)}, raw=True, display_id=True)

    def update(self, renderable: RenderableType) -> None:
        self._latest = renderable
        if time.monotonic() - self._shown_at >= 0.25:
            self._show()

    def stop(self) -> None:
        """Shows the latest state."""
        self._show()

    def _show(self) -> None:
        self._shown_at = time.monotonic()
        self._handle.update({"text/plain": _to_text(self._latest)}, raw=True)


def _to_text(renderable: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=120, force_jupyter=False)
    with console.capture() as captured:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())
