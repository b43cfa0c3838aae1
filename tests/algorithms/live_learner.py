"""A learner in its own process: ``python -m tests.algorithms.live_learner URL PROMPT [SETTING=NUMBER]...``."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import agentlightning as agl
from tests.algorithms.live_service import answer

SETTINGS: dict[str, Any] = {
    "evidence": 10,
    "check_tasks": 4,
    "check_tolerance": 1.0,
    "share": 0.3,
    "margin": 0.2,
    "refresh_s": 0.2,
    "max_trials": 1,
}


def main(url: str, prompt: str, *settings: str) -> None:
    given = {name: float(value) for name, value in (setting.split("=") for setting in settings)}
    algorithm = agl.LiveLearning(lambda experience: {"prompt": prompt}, **{**SETTINGS, **given})
    store = agl.create_store(url)
    agl.Trainer(algorithm=algorithm, store=store, strategy="shm", tracer="dummy", trackers=[]).fit(answer)
    asyncio.run(store.close())


if __name__ == "__main__":
    main(*sys.argv[1:])
