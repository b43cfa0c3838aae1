"""The demo's task, agent and checkpoint: what the training builds on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import agentlightning_plugins.demo
from agentlightning.resources import LLM
from agentlightning_plugins.demo.agent import CALCULATOR, SYSTEM_PROMPT, calculate, calculator_agent
from agentlightning_plugins.demo.task import SPLITS, TEMPLATES, Problem, apply, make_problems, number_pairs
from agentlightning_plugins.demo.warm_start import demonstrate, make_tokenizer

CHECKPOINT = Path(agentlightning_plugins.demo.__file__).with_name("checkpoint")
PROBLEM = Problem(question="Ann has 23 apples and buys 14 more. How many apples now?", answer=37)


# --- task


def numbers_of(problem: Problem) -> frozenset[int]:
    return frozenset(int(word.strip(".,")) for word in problem["question"].split() if word.strip(".,").isdigit())


def test_splits_share_no_pair_of_numbers() -> None:
    pairs = {split: {numbers_of(problem) for problem in make_problems(split, 2000)} for split in SPLITS}
    assert all(len(found) > 100 for found in pairs.values())
    assert pairs["train"].isdisjoint(pairs["val"] | pairs["test"])
    assert pairs["val"].isdisjoint(pairs["test"])


def test_every_operation_has_tasks_in_every_split() -> None:
    for operation in "+-*/":
        for split in SPLITS:
            assert len(number_pairs(operation, split)) >= 20


def test_problems_depend_on_split_and_seed_only() -> None:
    assert make_problems("train", 50) == make_problems("train", 60)[:50]
    assert make_problems("train", 50) != make_problems("train", 50, seed=1)
    assert make_problems("test", 1) == [FIRST_TEST_PROBLEM], "the reported figures were measured on other problems"


FIRST_TEST_PROBLEM: Problem = make_problems("test", 1)[0]


def test_every_problem_is_solved_by_the_operation_of_its_template_and_by_no_other_order() -> None:
    for template in TEMPLATES:
        assert template.text.index("{a}") < template.text.index("{b}")
        for split in SPLITS:
            for a, b in number_pairs(template.operator, split):
                assert 1 <= (apply(template.operator, a, b) or 0) <= 99


# --- calculator


def ask(expression: Any) -> str:
    return calculate(json.dumps({"expression": expression}))


@pytest.mark.parametrize(
    ("expression", "result"),
    [("23 + 14", "37"), ("7 - 9", "-2"), ("6*7", "42"), ("84 / 7", "12"), ("7 / 2", "3.5"), ("2 / 3", "0.67"), ("-(1 + 2) * 4", "-12")],
)
def test_the_calculator_calculates(expression: str, result: str) -> None:
    assert ask(expression) == result


def test_a_division_by_zero_is_a_message_to_the_model() -> None:
    assert ask("1 / (2 - 2)") == "error: division by zero"


def test_the_calculator_never_runs_code(tmp_path: Path) -> None:
    target = tmp_path / "touched"
    attacks: list[Any] = [
        f"open({str(target)!r}, 'w')",
        "__import__('os').getpid()",
        "(1).__class__",
        "[1 for _ in '1']",
        "lambda: 1",
        "'a' * 3",
        "9 ** 9 ** 9",
        "1 if 1 else 2",
        "x",
        "",
        "1 +",
        "(" * 60,
        "\0",
        5,
        None,
        ["1"],
    ]
    for attack in attacks:
        assert ask(attack) == "error: not an arithmetic expression", attack
    assert ask("1" * 101) == "error: the expression is too long"
    assert not target.exists()


@pytest.mark.parametrize("arguments", ["", "{", "[]", "null", '"1 + 1"', '{"formula": "1 + 1"}'])
def test_arguments_of_the_wrong_shape_are_a_message_to_the_model(arguments: str) -> None:
    assert calculate(arguments) == "error: not an arithmetic expression"
