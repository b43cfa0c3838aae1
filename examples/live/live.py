"""A service that learns from its own traffic, in a minute and without an API key.

    python examples/live/live.py                     # service and learner, with a temporary store
    python examples/live/live.py serve --store URL   # or in two terminals, with a shared store
    python examples/live/live.py learn --store URL

The service answers questions with an agent whose prompt is tuned; its users rate most answers later. The learner reads
those ratings and proposes prompts. The first one is broken: the check on recorded questions rejects it. The second is
better: a share of the traffic gets it, and it is promoted. The third is worse and is rolled back.
The "model" is simulated, with a realistic delay and an accuracy that depends on its instructions.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import agentlightning as agl
from agentlightning_algorithms.shared.live_resources import read_live_history

FIRST = "Answer the question: {question}"
STEPS = "Think step by step, then answer the question: {question}"
BRIEF = "Answer in one word: {question}"
BROKEN = "Think step by step about {topic}: {question}"


@agl.rollout
async def assistant(task: dict[str, str], prompt: agl.PromptTemplate) -> None:
    """Answers a question; the user rates the answer later."""
    text = prompt.format(question=task["question"])
    agl.emit_message(await ask_model(text))


async def ask_model(text: str) -> str:
    """A stand-in for ``client.chat.completions.create``."""
    await asyncio.sleep(0.03)
    skill = 0.95 if "step by step" in text else 0.25 if "one word" in text else 0.6
    return "a good answer" if random.random() < skill else "a poor answer"


# --- the process that serves ---


class Service:
    """Answers users and prints statistics."""

    def __init__(self, store: agl.LightningStore, live: agl.LiveResources, runner: agl.LitAgentRunner[Any]) -> None:
        self.store = store
        self.live = live
        self.runner = runner
        self.ratings: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=200))
        self.waits_s: deque[float] = deque(maxlen=500)
        self.served: dict[str, int] = defaultdict(int)

    async def user(self, name: str) -> None:
        """Asks questions until it is cancelled, and rates most answers some time later."""
        async with asyncio.TaskGroup() as later:
            for number in itertools.count():
                choice = self.live.pick()
                began = time.perf_counter()
                rollout = await self.runner.step(
                    {"question": f"question {number % 25} of {name}"},
                    resources_id=choice.resources_id,
                    metadata=choice.metadata,
                )
                self.waits_s.append(time.perf_counter() - began)
                self.served[str(choice.resources_id)] += 1
                if random.random() < 0.8:
                    later.create_task(self.rate(rollout, str(choice.resources_id)))
                await asyncio.sleep(random.uniform(0.0, 0.04))

    async def rate(self, rollout: agl.Rollout, version: str) -> None:
        await asyncio.sleep(random.uniform(0.0, 0.5))
        spans = await self.store.query_spans(rollout.rollout_id, name="agentlightning.message")
        rating = float(any("a good answer" in str(span.attributes) for span in spans))
        await self.live.reward(rollout, rating)
        self.ratings[version].append(rating)

    async def report(self, began: float) -> None:
        """Prints versions, ratings and response times, and the learner's notes."""
        said = 0
        while True:
            history = await read_live_history(self.store)
            for state in history[said:]:
                print(f"{time.monotonic() - began:5.1f} s  > {state.note}", flush=True)
            if len(history) == said and len(self.waits_s) > 20:
                trial = self.live.trial
                line = self.describe("stable", self.live.stable)
                if trial is not None:
                    line += self.describe(f"{trial.share:.0%} of traffic", trial.candidate)
                cuts = statistics.quantiles(self.waits_s, n=20)
                times = f"p50 {cuts[9] * 1e3:.0f} ms, p95 {cuts[18] * 1e3:.0f} ms"
                print(f"{time.monotonic() - began:5.1f} s  {line}{times}", flush=True)
            said = len(history)
            await asyncio.sleep(2.0)

    def describe(self, what: str, version: str | None) -> str:
        ratings = self.ratings[str(version)]
        mean = f"{statistics.fmean(ratings):.2f}" if ratings else "-"
        return f"{what} {version}: rated {mean}, served {self.served[str(version)]}; "


async def serve(url: str, learner: list[str] | None, users: int) -> int:
    """Serves until the learner that it starts has ended; without a learner, until it is cancelled."""
    store = agl.create_store(url)
    if await store.get_latest_resources() is None:
        await store.update_resources("assistant", {"prompt": FIRST})
    runner: agl.LitAgentRunner[Any] = agl.LitAgentRunner(agl.OtelTracer())
    with runner.run_context(agent=assistant, store=store):
        async with agl.LiveResources(store, refresh_s=1.0) as live:
            service = Service(store, live, runner)
            work = [asyncio.create_task(service.user(f"user {n}")) for n in range(users)]
            work.append(asyncio.create_task(service.report(time.monotonic())))
            try:
                code = await run_learner(learner) if learner is not None else await asyncio.Event().wait()
                await asyncio.sleep(2.5)  # so that the last version is served and the last note printed
            finally:
                for task in work:
                    task.cancel()
                await asyncio.gather(*work, return_exceptions=True)
            latest = await store.get_latest_resources()
            if latest is not None:
                print(f"latest is {latest.version_id}: {latest.resources['prompt'].model_dump()['template']}")
            for version, count in sorted(service.served.items()):
                print(f"  {version}: served {count} times")
    await store.close()
    return int(code)


async def run_learner(command: list[str]) -> int:
    """Runs the learner in another process, so that the service does not wait for it."""
    process = await asyncio.create_subprocess_exec(*command)
    try:
        return await process.wait()
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


# --- the process that learns ---


def propose(experience: agl.LiveLearning.Experience) -> Mapping[str, str] | None:
    """A stand-in for a model that reads poor answers and edits the prompt, as in ``agl.APO(...).propose``.

    Not all of its proposals are good, which is why there are trials.
    """
    tried = sum("is checked offline" in note for note in experience.notes)
    return {"prompt": (BROKEN, STEPS, BRIEF)[tried % 3]}


def learn(url: str, trials: int, share: float) -> None:
    """Learns from the service that uses the same store; its runner does the offline checks."""
    logging.getLogger("agentlightning").setLevel(logging.WARNING)  # the service prints its notes
    algorithm = agl.LiveLearning(
        propose,
        evidence=40,
        check_tasks=10,
        share=share,
        reward_timeout_s=2.0,  # users rate within half a second, or never
        refresh_s=0.5,
        max_trials=trials,
    )
    store = agl.create_store(url)
    agl.Trainer(algorithm=algorithm, store=store, strategy="shm", trackers=[]).fit(assistant)
    asyncio.run(store.close())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", nargs="?", choices=["both", "serve", "learn"], default="both")
    parser.add_argument("--store", metavar="URL", help="default: a temporary file")
    parser.add_argument("--trials", type=int, default=3, help="number of candidates")
    parser.add_argument("--share", type=float, default=0.05, help="share of the traffic for a candidate")
    parser.add_argument("--users", type=int, default=2, help="concurrent users")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        url = given.store or f"sqlite:///{Path(folder) / 'live.db'}"
        if given.role == "learn":
            learn(url, given.trials, given.share)
            return 0
        command = [sys.executable, __file__, "learn", "--store", url]
        command += ["--trials", str(given.trials), "--share", str(given.share)]
        with suppress(KeyboardInterrupt):
            return asyncio.run(serve(url, command if given.role == "both" else None, given.users))
        return 130


if __name__ == "__main__":
    sys.exit(main())
