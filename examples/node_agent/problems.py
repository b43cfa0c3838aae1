"""The problems of the Node agent: the word problems of ``agl demo``, as plain texts."""

from __future__ import annotations

from agentlightning import Rollout
from agentlightning_plugins.demo.task import Split, make_problems

N_PROBLEMS: dict[Split, int] = {"train": 2048, "val": 96, "test": 200}
ANSWERS = {
    problem["question"]: problem["answer"]
    for split, size in N_PROBLEMS.items()
    for problem in make_problems(split, size)
}


def train() -> list[str]:
    """Problems to learn from."""
    return [problem["question"] for problem in make_problems("train", N_PROBLEMS["train"])]


def val() -> list[str]:
    """Problems to evaluate with; their pairs of numbers occur in no other split."""
    return [problem["question"] for problem in make_problems("val", N_PROBLEMS["val"])]


def test() -> list[str]:
    """Problems for the test at the end of training."""
    return [problem["question"] for problem in make_problems("test", N_PROBLEMS["test"])]


def reward(task: str, output: str, rollout: Rollout) -> float:
    """1 if the last line of standard output is the right number, else 0."""
    return float(output.strip().rpartition("\n")[2].strip() == str(ANSWERS[task]))
