"""Components of the kind ``schedule``: the decaying share of the learning rate, by progress from 0 to 1."""

from __future__ import annotations

import math


def constant(progress: float) -> float:
    """The component ``constant``."""
    return 1.0


def linear(progress: float) -> float:
    """The component ``linear``."""
    return 1.0 - progress


def cosine(progress: float) -> float:
    """The component ``cosine``: half a period."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))
