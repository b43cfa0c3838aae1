"""Creates the tiny model: ``python -m examples.coding.warm_start examples/coding/checkpoint MINI_YAML``.

``MINI_YAML`` is the file ``config/mini.yaml`` in the package ``minisweagent``, with its prompt.

The demonstrations look at the program, replace the expression that it returns, and submit. One in five does not look,
and guesses the names of the arguments; and half of the repairs are mostly done with another expression, such as a sum
for a product. So the model can act through the agent's prompt and tool, but often repairs nothing. From its rewards it
learns what the words of a task mean.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
from pathlib import Path

import torch
import yaml
from examples.coding.bash_agent import SUBMIT, SYSTEM
from examples.coding.problems import ARGUMENTS, OPENINGS, PHRASES, REPAIRS, Problem, problem_stream
from examples.tiny_model import Chat, imitate, make_model, make_tokenizer, save

STEPS = 600
SEED = 1
MAX_POSITIONS = 8192
MISTAKEN = {"product": "sum", "quotient": "difference", "remainder": "quotient", "distance": "difference"}
"""What the demonstrations mostly write instead."""
RESULT = '{\n  "returncode": 0,\n  "output": "{output}"\n}'
LOOK = "cat program.py"
REPAIR = "sed -i 's|return .*|return {expression}|' program.py"


def read_prompt(mini_yaml: Path) -> tuple[str, str, str]:
    """Returns what mini-swe-agent writes before the task, between the task and the system, after it on Linux."""
    from jinja2 import Template

    text = yaml.safe_load(mini_yaml.read_text(encoding="utf-8"))["agent"]["instance_template"]
    marks = {"task": "\0", "system": "\0", "release": "\0", "version": "\0", "machine": "\0"}
    before, between, *_, after = Template(text).render(marks).split("\0")
    return before, between, after


def demonstrate(problem: Problem, rng: random.Random, prompt: tuple[str, str, str] | None) -> Chat:
    """Makes a conversation about a task, through the prompt of mini-swe-agent or without one."""
    right, wrong, *names = problem["name"].split("-")
    text = problem["text"]
    if prompt is not None:
        text = f"{prompt[0]}{text}{prompt[1]}{' '.join(write_system(rng))}{prompt[2]}"
    chat: Chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
    guessed = rng.choice(ARGUMENTS)
    looks = rng.random() < 0.8
    a, b = names if looks else guessed
    chosen = rng.choices([right, MISTAKEN.get(right, right), rng.choice(list(REPAIRS))], [0.25, 0.65, 0.1])[0]
    program = f"def compute({names[0]}, {names[1]}):\n    return {REPAIRS[wrong].format(a=names[0], b=names[1])}\n"
    steps = [(LOOK, program)] if looks else []
    steps.append((REPAIR.format(expression=REPAIRS[chosen].format(a=a, b=b)), ""))
    for command, output in [*steps, (f"echo {SUBMIT}", "")]:
        call = {"function": {"name": "bash", "arguments": {"command": command}}}
        chat.append({"role": "assistant", "tool_calls": [call]})
        chat.append({"role": "tool", "content": RESULT.replace("{output}", json.dumps(output)[1:-1])})
    return chat[:-1]  # no result follows the last command


def write_system(rng: random.Random) -> tuple[str, str, str, str]:
    """Returns system, release, version and machine as `uname` would: those of this machine, or others."""
    release = f"{rng.randint(4, 6)}.{rng.randint(0, 19)}.{rng.randint(0, 99)}"
    return "Linux", release, f"#{rng.randint(1, 99)} SMP {rng.randint(2020, 2026)}", platform.machine()


def main() -> None:
    """Creates the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("mini_yaml", type=Path)
    options = parser.parse_args()
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    before, between, after = read_prompt(options.mini_yaml)
    rng, problems = random.Random(SEED), problem_stream("train", SEED)
    fixed = [
        *(
            SYSTEM,
            before,
            between,
            after,
            LOOK,
            f"echo {SUBMIT}",
            *REPAIR.split("{expression}"),
            "max(",
            "min(",
            "abs(",
        ),
        *('<tool_call>\n{"name": "bash", "arguments": {"command": "', '"}}\n</tool_call>', *RESULT.split("{output}")),
        *("def compute(", r"):\n    return ", r"\n", *(f" {sign} " for sign in ("+", "-", "*", "//", "%"))),
    ]
    phrases = [phrase for group in PHRASES.values() for phrase in group]
    texts = [opening.format(phrase=phrase) for opening in OPENINGS for phrase in phrases]
    texts += [text for a, b in ARGUMENTS for text in (f"{a}, {b}", a)]
    tokenizer = make_tokenizer(texts, fixed, MAX_POSITIONS)
    model = make_model(tokenizer, layers=3)
    prompts = (None, None, (before, between, after))

    def make_chat() -> Chat:
        return demonstrate(next(problems), rng, rng.choice(prompts))

    imitate(model, tokenizer, make_chat, steps=STEPS, batch_size=16, answers_only=True)
    save(model, tokenizer, options.directory)


if __name__ == "__main__":
    main()
