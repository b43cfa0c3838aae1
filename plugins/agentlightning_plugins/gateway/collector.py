"""The garbage collector of a process that does nothing but relay calls."""

from __future__ import annotations

import gc
from typing import Final

_YOUNG: Final = 20_000


def relax_collector() -> None:
    """Makes the collector run less often; for processes of our own only, since it is the whole process's.

    An answer with log-probabilities is hundreds of small objects that reference counting frees. At the default of 700
    of them, the collector runs every few calls and finds nothing: a tenth of the gateway's CPU time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, 20, 20)
