"""The tasks of `agl demo` as functions, for train.yaml and examples/evidence.py."""

from __future__ import annotations

from agentlightning_plugins.demo.task import Problem, make_problems
from agentlightning_plugins.demo.training import N_TEST, N_VAL


def train() -> list[Problem]:
    """Returns the training problems."""
    return make_problems("train", 4096)


def val() -> list[Problem]:
    """Returns the validation problems."""
    return make_problems("val", N_VAL)


def test() -> list[Problem]:
    """Returns the test problems, whose pairs of numbers occur in no other split."""
    return make_problems("test", N_TEST)
