"""A server of OpenEnv: ``python openenv_server.py PORT SESSIONS``, in the environment ``openenv``."""

from __future__ import annotations

import os
import random
import sys
import time

import uvicorn
from openenv.core.env_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    text: str


class Count(Action):
    guess: int
    step: int


class Hint(Observation):
    hint: str


class GuessTheNumber(Environment[Guess, Hint, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._number = 0

    def reset(self, seed: int | None = None, highest: int = 9, **more: object) -> Hint:
        self._number = random.Random(seed).randint(0, highest)
        return Hint(hint=f"a number from 0 to {highest}")

    def step(self, action: Guess, **more: object) -> Hint:
        if action.text == "die":
            os._exit(3)
        if action.text == "hang":
            time.sleep(3600)
        guess = int(action.text)
        if guess == self._number:
            return Hint(hint="right", reward=1.0, done=True)
        return Hint(hint="higher" if guess < self._number else "lower", reward=0.0)

    @property
    def state(self) -> State:
        return State()


class Counting(GuessTheNumber):
    def step(self, action: Count, **more: object) -> Hint:
        return super().step(Guess(text=str(action.guess * action.step)))


if __name__ == "__main__":
    limits = {"max_concurrent_envs": int(sys.argv[2])}
    app = create_app(GuessTheNumber, Guess, Hint, env_name="guess", **limits)
    app.mount("/counting", create_app(Counting, Count, Hint, env_name="counting", **limits))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
