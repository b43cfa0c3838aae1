"""Quality of prompt searches: ``python tests/benchmarks/bench_prompts.py [gepa apo ...] [--seeds N] [--world 2]``.

A synthetic world: each kind of task is solved by one rule in the prompt; two rules conflict, some rules break a kind. A
scripted model reads failed tasks and adds a rule for one of them, or a wrong one, or removes a rule. Rewards are 1 or
0; with noise a solved kind earns 1 less often, and an unsolved kind sometimes. The figure is the exact expected
accuracy of the published prompt on new tasks, its mean over seeds with the standard error.

Runners and the models' server are replaced, everything else is real, so that thousands of rollouts take a second.
``package`` runs the package ``gepa`` and ``dspy`` DSPy's GEPA, with the same world, models and budgets. DSPy
needs an environment of its own: ``uv venv /tmp/dspy; uv pip install --python /tmp/dspy/bin/python dspy -e '.[apo]'``.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple
from unittest import mock

from gepa.api import optimize
from gepa.core.adapter import EvaluationBatch

import agentlightning as agl
from agentlightning_algorithms.shared.prompt_search import chat, search
from agentlightning_algorithms.shared.prompt_search.chat import CachedCall
from agentlightning_algorithms.shared.prompt_search.trial import TrialResult


class Rules(NamedTuple):
    """The effects of the rules of a world; the first ones solve a kind of task each."""

    shares: tuple[float, ...] = (0.22, 0.18, 0.16, 0.14, 0.12, 0.10, 0.08)
    """Share of each kind among the tasks."""
    conflict: frozenset[int] = frozenset({1, 4})
    """With both of these rules in the prompt, neither kind is solved."""
    harm: Mapping[int, int] = {7: 0, 8: 2, 9: 5}
    """The kind that each harmful rule breaks."""
    n_tasks: int = 60
    skill: float = 0.7
    """How often the model adds the rule that a failed task needs, rather than any rule."""


WORLDS: Final = (
    Rules(),
    Rules((0.1,) * 10, frozenset({0, 1}), {10: 2, 11: 3, 12: 4, 13: 5, 14: 6}, n_tasks=40, skill=0.5),
)
"""The settings were chosen with the first world, and checked with the second."""
FIRST: Final = "Answer: {question}"
BUDGETS: Final = (150, 400, 1000)
NOISES: Final = ((1.0, 0.0), (0.85, 0.25), (0.6, 0.4))
"""Probabilities of a reward of 1 for a solved and for an unsolved kind."""


class World:
    """The tasks, the agent and the models of one seed."""

    def __init__(self, seed: int, noise: tuple[float, float], rules: Rules = WORLDS[0]) -> None:
        self.noise, self.rules = noise, rules
        self.calls = 0
        self._random = random.Random(f"world {seed}")
        self.train, self.val = self._draw_tasks("train"), self._draw_tasks("val")

    def _draw_tasks(self, name: str) -> list[str]:
        kinds = self._random.choices(range(len(self.rules.shares)), self.rules.shares, k=self.rules.n_tasks)
        return [f"{name} {number} of kind {kind}" for number, kind in enumerate(kinds)]

    def rate(self, task: str, prompt: str) -> float:
        """Runs the agent once."""
        self.calls += 1
        kind = int(task.rpartition(" ")[2])
        return float(self._random.random() < self.noise[kind not in self._solved(prompt)])

    def _solved(self, prompt: str) -> set[int]:
        rules, (_, conflict, harm, *_) = _rules(prompt), self.rules
        solved = rules - {harm[rule] for rule in rules if rule in harm}
        return solved - conflict if rules >= conflict else solved

    def reflect(self, request: str) -> str:
        """Returns a changed prompt for a request that shows the prompt and rollouts with their tasks and rewards."""
        text = re.search(r"Answer: \{question\}[^`<]*", request)
        assert text is not None
        rules = _rules(text[0])
        shown = re.findall(r"of kind (\d).*?reward ([\d.]+)", request, re.DOTALL) or [
            (kind, reward) for reward, kind in re.findall(r'reward="([\d.]+)">.*?of kind (\d)', request, re.DOTALL)
        ]
        assert shown
        known = range(len(self.rules.shares) + len(self.rules.harm))
        failed = [int(kind) for kind, reward in shown if float(reward) < 1]
        missing = [kind for kind in failed if kind not in rules]
        if rules and self._random.random() < 0.15:
            rules.discard(self._random.choice(sorted(rules)))
        elif missing and self._random.random() < self.rules.skill:
            rules.add(self._random.choice(missing))
        else:
            rules.add(self._random.choice([rule for rule in known if rule not in rules] or [0]))
        return FIRST + "".join(f"\nRULE-{rule}" for rule in sorted(rules))

    def measure(self, prompt: str) -> float:
        """Returns the expected accuracy of a prompt."""
        solved = self._solved(prompt)
        return sum(share * self.noise[kind not in solved] for kind, share in enumerate(self.rules.shares))


def _rules(prompt: str) -> set[int]:
    return set(map(int, re.findall(r"RULE-(\d+)", prompt)))


def run_ours(world: World, algorithm: Any, seed: int) -> str:
    """Runs a search of ours and returns its prompt."""

    async def run_rollouts(store: Any, requests: Sequence[Any], **settings: Any) -> list[agl.Rollout]:
        return [
            agl.Rollout(
                rollout_id=request.rollout_id,
                input=request.input,
                start_time=0.0,
                status="succeeded",
                resources_id=request.resources_id,
            )
            for request in requests
        ]

    async def read_trial_result(store: Any, rollout: agl.Rollout, adapter: Any) -> TrialResult:
        found = await store.get_resources_by_id(rollout.resources_id)
        return TrialResult(rollout, [], world.rate(str(rollout.input), found.resources["prompt"].template))

    async def call_model(self: Any, place: str, model: str, messages: Any, temperature: float) -> CachedCall:
        request = messages[0]["content"]
        if model == "editor":
            answer = request.partition("<critique>\n")[2].partition("\n</critique>")[0]
        else:
            answer = world.reflect(request)
        return CachedCall(place=place, model=model, answer=answer if model == "critic" else f"```\n{answer}\n```")

    algorithm.context.initial_resources = {"prompt": agl.PromptTemplate(FIRST)}
    algorithm.context.seed, algorithm.context.key = seed, str(seed)
    algorithm.set_store(agl.InMemoryLightningStore())
    with (
        mock.patch.object(search, "run_rollouts", run_rollouts),
        mock.patch.object(search, "read_trial_result", read_trial_result),
        mock.patch.object(chat.CachedChat, "_call_model", call_model),
    ):
        asyncio.run(algorithm.run(world.train, world.val))
    return str(algorithm.get_best_prompt().template)


class _Adapter:
    """The world as an adapter of the package ``gepa``."""

    propose_new_texts = None

    def __init__(self, world: World) -> None:
        self._world = world

    def evaluate(self, batch: list[str], candidate: dict[str, str], capture_traces: bool = False) -> Any:
        rewards = [self._world.rate(task, candidate["prompt"]) for task in batch]
        shown = list(zip(batch, rewards, strict=True)) if capture_traces else None
        return EvaluationBatch(outputs=rewards, scores=rewards, trajectories=shown)

    def make_reflective_dataset(self, candidate: Any, batch: Any, names: list[str]) -> Mapping[str, Any]:
        records = [{"Inputs": task, "Feedback": f"reward {reward:g}"} for task, reward in batch.trajectories]
        return dict.fromkeys(names, records)


def run_package(world: World, budget: int, seed: int) -> str:
    """Runs the package ``gepa`` and returns its prompt."""
    found = optimize(
        {"prompt": FIRST},
        world.train,
        world.val,
        adapter=_Adapter(world),
        reflection_lm=lambda request: f"```\n{world.reflect(str(request))}\n```",
        max_metric_calls=budget,
        logger=mock.Mock(),
        seed=seed,
    )
    return str(found.best_candidate["prompt"])


def run_dspy(world: World, budget: int, seed: int) -> str:
    """Runs DSPy's GEPA and returns its prompt."""
    import dspy

    class Program(dspy.Module):
        def __init__(self) -> None:
            super().__init__()
            self.predict = dspy.Predict(dspy.Signature("question -> answer", FIRST))

        def forward(self, question: str) -> Any:
            found = dspy.Prediction(answer=world.rate(question, self.predict.signature.instructions))
            if dspy.settings.trace is not None:  # as a predictor does that calls a model
                dspy.settings.trace.append((self.predict, {"question": question}, found))
            return found

    def rate(gold: Any, pred: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
        return dspy.Prediction(score=pred.answer, feedback=f"reward {pred.answer:g}")

    def propose(candidate: Any, reflective_dataset: Any, components_to_update: Any) -> dict[str, str]:
        shown = {name: f"{candidate[name]}<{reflective_dataset[name]}" for name in components_to_update}
        return {name: world.reflect(request) for name, request in shown.items()}

    search = dspy.GEPA(rate, max_metric_calls=budget, instruction_proposer=propose, num_threads=1, seed=seed)
    tasks = [
        [dspy.Example(question=task).with_inputs("question") for task in part] for part in (world.train, world.val)
    ]
    found = search.compile(Program(), trainset=tasks[0], valset=tasks[1])
    return str(found.predict.signature.instructions)


def make(name: str, budget: int) -> Any:
    """Returns a search that runs at most ``budget`` rollouts, with its other settings at their defaults."""
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url="http://127.0.0.1:1", api_key="any")
    if name == "gepa":
        return agl.GEPA(client, reflection_model="critic-and-editor", max_rollouts=budget)
    settings: dict[str, Any] = {"beam_width": 4, "branch_factor": 4} if name == "apo 4/4" else {}
    return agl.APO(client, gradient_model="critic", apply_edit_model="editor", max_rollouts=budget, **settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("names", nargs="*", default=["gepa", "apo"], help="gepa, apo, apo 4/4, package, dspy")
    parser.add_argument("--world", type=int, choices=range(1, len(WORLDS) + 1), default=1)
    given = parser.parse_args()
    names, rules = given.names, WORLDS[given.world - 1]
    logging.disable()
    print("| noise | budget | " + " | ".join(names) + " |\n|---|---|" + "---|" * len(names))
    for noise in NOISES:
        for budget in BUDGETS:
            cells = [measure(name, noise, budget, given.seeds, rules) for name in names]
            print(f"| {noise[0]:g} or {noise[1]:g} | {budget:,} | " + " | ".join(cells) + " |", flush=True)


def measure(name: str, noise: tuple[float, float], budget: int, seeds: int, rules: Rules = WORLDS[0]) -> str:
    """Returns mean and standard error of the accuracy, and the largest number of rollouts."""
    found, calls, why = [], [], Counter[str]()
    for seed in range(seeds):
        world = World(seed, noise, rules)
        try:
            others = {"package": run_package, "dspy": run_dspy}
            prompt = others[name](world, budget, seed) if name in others else run_ours(world, make(name, budget), seed)
        except agl.ConfigError as error:
            why[str(error)[:40]] += 1
            continue
        found.append(world.measure(prompt))
        calls.append(world.calls)
    if why:
        return "refused"
    return f"{statistics.fmean(found):.3f} ± {statistics.stdev(found) / seeds**0.5:.3f} ({max(calls):,})"


if __name__ == "__main__":
    main()
