"""Python's garbage collector, made to run less often."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Final

_YOUNG: Final = 20_000
"""New objects after which it looks for garbage.

Spans, JSON and log-probabilities are hundreds of small objects a rollout, which reference counting frees. At the
default of 700 the collector takes a third of a runner's CPU time and finds nothing.
"""


@contextlib.contextmanager
def relaxed_collector() -> Iterator[None]:
    """For the time of a block, in a process that is not ours alone."""
    before = gc.get_threshold()
    if 0 < before[0] < _YOUNG:  # 0: somebody has switched it off
        gc.set_threshold(_YOUNG, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def relax_collector() -> None:
    """For good, in a process of our own: what was loaded until now is not looked at again either."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, 20, 20)
