"""Compares four ways to improve one agent, each with the same number of rollouts.

    python -m examples.one_agent.compare --out runs/one_agent

Runs `agl compare` with `apo` followed by `grpo`, with `apo`, `gepa` and `grpo` on their own, and without training. The
prompt searches call the tiny model of this example through its policy server, which the script starts. Their critic and
editor are scripted (critic.py).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from examples.one_agent.critic import answer

from agentlightning_algorithms.shared.trained_model import serve_model
from agentlightning_plugins.shared.scripted_model.server import ScriptedOpenAI

FOLDER = Path(__file__).parent
STEP = 16 * 8
EVAL_EVERY = 5
"""Rollouts of a step of ``grpo``, and steps between its validations, as in train.yaml."""
NAMES = ("apo-grpo", "apo", "gepa", "grpo", "none")
SAMPLING = {"temperature": 0.0, "max_tokens": 16}
"""Sampling parameters of the prompt searches and of all tests."""


def apo(budget: int, n_val: int) -> dict[str, Any]:
    """The settings of ``apo``."""
    return {"name": "apo", "max_rollouts": budget, "confirm_pairs": n_val}


def grpo(budget: int, n_val: int) -> dict[str, Any]:
    """The settings of ``grpo`` with as many steps as the budget allows; the learning rate rises as in train.yaml."""
    allowed = (n for n in range(budget // STEP, 1, -1) if n * STEP + (2 + (n - 1) // EVAL_EVERY) * n_val <= budget)
    steps = next(allowed, 1)
    warmup = min(steps, 14)
    update = {"lr": 4.375e-4 * warmup / 14, "betas": [0.9, 0.99], "warmup_updates": warmup, "minibatches": 8}
    return {"name": "grpo", "steps": steps, "update": update}


def algorithms(budget: int, n_val: int) -> dict[str, Any]:
    """The algorithms to compare; the first spends three eighths of its budget on the prompt, the rest on weights."""
    for_prompt = budget * 3 // 8
    return {
        "apo-grpo": [apo(for_prompt, n_val), grpo(budget - for_prompt, n_val)],
        "apo": apo(budget, n_val),
        "gepa": {"name": "gepa", "max_rollouts": budget, "confirm_pairs": n_val},
        "grpo": grpo(budget, n_val),
        "none": [],
    }


def main() -> int:
    """Serves the models and runs the comparison; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="runs/one_agent", help="directory of the runs and of report.html")
    parser.add_argument("--budget", type=int, default=2000, help="rollouts per algorithm, test rollouts excluded")
    parser.add_argument("--seeds", default="0", help="comma-separated")
    parser.add_argument("--val", type=int, default=40, help="number of validation tasks")
    parser.add_argument("--test", default="examples.one_agent.tickets:test", help="source of the test tasks")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=NAMES,
        default=NAMES,
        help="algorithms to run; the others are compared with the first",
    )
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of train.yaml for all")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    with serve_model(str(FOLDER / "checkpoint")) as served, ScriptedOpenAI(answer) as critic:
        llm = {
            "resource_type": "llm",
            "endpoint": served.endpoint,
            "model": served.model,
            "sampling_parameters": SAMPLING,
        }
        val = {"source": "examples.one_agent.tickets:val", "limit": options.val}
        command = [sys.executable, "-m", "agentlightning", "compare", str(FOLDER / "train.yaml")]
        command += [
            f"resources.llm={json.dumps(llm)}",
            f"data.val={json.dumps(val)}",
            *options.set,
            "--test",
            options.test,
        ]
        for name, algorithm in algorithms(options.budget, options.val).items():
            command += ["-a", json.dumps(algorithm)] if name in options.only else []
        command += ["--budget", str(options.budget), "--seeds", options.seeds, "--run-dir", options.out]
        command += ["--json"] * options.json
        print(shlex.join(["agl", *command[3:]]), flush=True)
        scripted = {"OPENAI_BASE_URL": critic.endpoint, "OPENAI_API_KEY": "any", "OPENAI_MODEL": "scripted"}
        return subprocess.run(command, env={**os.environ, **scripted}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
