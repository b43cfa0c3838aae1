"""Quotas: how many spans an attempt and a run may store, and how much memory they may take."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from agentlightning import semconv
from agentlightning.errors import ConfigError, QuotaError
from agentlightning.frozen import FrozenNumbers
from agentlightning.records import Span, SpanContext

_DEFAULTS: Final = {
    "AGL_ATTEMPT_SPANS": 20_000,
    "AGL_ATTEMPT_MIB": 128,
    "AGL_RUN_SPANS": 100_000_000,
    "AGL_RUN_MIB": 256 * 1024,
}
"""The settings, which are environment variables of the process that stores spans, and their defaults."""
_MAX_ATTEMPTS: Final = 100_000
"""Attempts whose usage is remembered; the usage of the oldest is forgotten first."""


class SpanQuota:
    """Counts the spans that this process stores, by attempt and by run, and refuses those above a limit.

    Spans that were stored before the process started count for their attempt (``recall``), but not for their run, and
    their size is not counted.
    """

    def __init__(self) -> None:
        """Reads the limits; raises ConfigError if one is not a number."""
        limits = [_read_limit(name) for name in _DEFAULTS]
        self._attempt_limits, self._run_limits = limits[:2], limits[2:]
        self._attempts: OrderedDict[tuple[str, str], list[int]] = OrderedDict()
        self._runs: dict[str, list[int]] = {}
        self._lock = threading.Lock()

    def reserve(self, spans: Sequence[Span], runs: Mapping[tuple[str, str], str]) -> list[int]:
        """Counts spans that are about to be stored, and returns their sizes. ``runs`` has the run of each attempt.

        Raises:
            QuotaError: an attempt or a run would exceed a limit; nothing is counted.
        """
        taken: dict[tuple[str, str], list[int]] = {}
        sizes = [estimate_bytes(span) for span in spans]
        for span, size in zip(spans, sizes, strict=True):
            if _is_counted(span):
                usage = taken.setdefault((span.rollout_id, span.attempt_id), [0, 0])
                usage[0] += 1
                usage[1] += size
        with self._lock:
            for attempt, usage in taken.items():
                name = f"attempt {attempt[1]!r:.100} of rollout {attempt[0]!r:.100}"
                _check(name, self._attempts.get(attempt, (0, 0)), usage, self._attempt_limits, "ATTEMPT")
                run_id = runs[attempt]
                _check(f"run {run_id!r}", self._runs.get(run_id, (0, 0)), usage, self._run_limits, "RUN")
            self._add(taken, runs, 1)
        return sizes

    def knows(self, attempt: tuple[str, str]) -> bool:
        """Whether spans of an attempt were counted."""
        return attempt in self._attempts

    def recall(self, attempt: tuple[str, str], spans: int) -> None:
        """Counts spans of an attempt that were stored before this process knew it."""
        with self._lock:
            self._attempts.setdefault(attempt, [spans, 0])

    def give_back(self, spans: Sequence[tuple[Span, int]], runs: Mapping[tuple[str, str], str]) -> None:
        """Undoes ``reserve`` for spans, with their sizes, that were not stored."""
        with self._lock:
            for span, size in spans:
                if _is_counted(span):
                    self._add({(span.rollout_id, span.attempt_id): [1, size]}, runs, -1)

    def _add(self, taken: Mapping[tuple[str, str], list[int]], runs: Mapping[tuple[str, str], str], sign: int) -> None:
        for attempt, usage in taken.items():
            for count in (self._attempts.setdefault(attempt, [0, 0]), self._runs.setdefault(runs[attempt], [0, 0])):
                count[0] += sign * usage[0]
                count[1] += sign * usage[1]
        while len(self._attempts) > _MAX_ATTEMPTS:
            self._attempts.popitem(last=False)


def _is_counted(span: Span) -> bool:
    """Whether a span counts. The trainer's records, which agents cannot write, do not: a training must not stop."""
    return not f"{span.name}.".startswith(f"{semconv.TRAINING}.")


def _read_limit(name: str) -> int:
    text = os.environ.get(name) or str(_DEFAULTS[name])
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise ConfigError(f"{name}={text!r:.50}: give a whole number")
    return int(text) * (2**20 if name.endswith("_MIB") else 1)


def _check(name: str, used: Sequence[int], more: Sequence[int], limits: Sequence[int], setting: str) -> None:
    if used[0] + more[0] > limits[0]:
        raise QuotaError(
            f"{name} has stored {used[0]} spans, and {more[0]} more would exceed its limit of {limits[0]}; raise "
            f"AGL_{setting}_SPANS where the store runs if it needs more"
        )
    if used[1] + more[1] > limits[1]:
        raise QuotaError(
            f"{name} has stored spans of {used[1] / 2**20:.1f} MiB, and {more[1] / 2**20:.1f} MiB more would exceed "
            f"its limit of {limits[1] / 2**20:g} MiB; raise AGL_{setting}_MIB where the store runs if it needs more"
        )


def estimate_bytes(span: Span) -> int:
    """Roughly how much memory a span takes: exact enough for a bound, and much cheaper than serializing it."""
    size = 500 + len(span.name) + len(span.trace_id) + len(span.span_id) + len(span.status.description or "")
    size += _estimate(span.attributes) + _estimate(span.resource.attributes) + len(span.resource.schema_url)
    size += _estimate_context(span.context) + _estimate_context(span.parent)
    for event in span.events:
        size += 200 + len(event.name) + _estimate(event.attributes)
    for link in span.links:
        size += 200 + _estimate(link.attributes) + _estimate_context(link.context)
    return size


def _estimate_context(context: SpanContext | None) -> int:
    if context is None:
        return 0
    return 200 + len(context.trace_id) + len(context.span_id) + _estimate(context.trace_state)


_NUMBERS: Final = frozenset({bool, int, float})


def _estimate(value: Any) -> int:
    if not value:
        return 0
    if value.__class__ in _NUMBERS:  # most attributes
        return 8
    if value.__class__ is FrozenNumbers:
        return 8 * len(value)
    if isinstance(value, (str, bytes)):
        return 50 + len(value)
    if isinstance(value, (list, tuple)):
        with contextlib.suppress(TypeError):
            sum(value)  # the fastest way to find that these are numbers only, as token ids are
            return 8 * len(value)
        return sum(60 + _estimate(item) for item in value)
    if isinstance(value, dict):
        size = 0
        for key, item in value.items():
            size += 60 + len(str(key)) + (50 + len(item) if item.__class__ is str else _estimate(item))
        return size
    return 8
