"""Trainings in which verl's own vLLM samples, on a CPU: ``trainer.device=cpu`` with ``rollout.name=vllm``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from conftest import HERE, end, has_begun, job, read, run, save_tiny_model, start, task, wait_for

if TYPE_CHECKING:
    from conftest import Training

pytestmark = [pytest.mark.environment("verl-vllm"), pytest.mark.soak]
ENGINE = "actor_rollout_ref.rollout.engine_kwargs.vllm"
PATIENCE_S = 3600.0
"""A training takes minutes, and more beside other work."""
VLLM = {
    "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.rollout.n": 4,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
    "data.train_batch_size": 4,
    f"{ENGINE}.enable_auto_tool_choice": True,
    f"{ENGINE}.tool_call_parser": "hermes",
}


@pytest.fixture(scope="session")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with heads of 32 dimensions, which vLLM's attention on a CPU needs."""
    directory = tmp_path_factory.mktemp("verl-wide-model")
    save_tiny_model(directory, hidden_size=128, tie_word_embeddings=False, initializer_range=0.1)
    return directory


@pytest.fixture(scope="session")
def sampled_by_vllm(tmp_path_factory: pytest.TempPathFactory, wide_model: Path) -> Training:
    """Three steps; after the second one the sampler does not get the new weights."""
    directory = tmp_path_factory.mktemp("verl-vllm") / "grpo"
    train = [
        *(task("tool", "say a", 3), task("stream", "say b"), task("fresh", "say c", 2), task("stream", "say d", 2)),
        *(task("tool", "say e", 2), task("crash", "say f"), task("tool", "say g"), task("nothing", "say h")),
    ]
    config = {
        **VLLM,
        f"{ENGINE}.worker_extension_cls": "forgetful_extension.ForgetfulExtension",
        "trainer": {"total_training_steps": 3, "test_freq": 3, "val_before_train": True},
    }
    log = directory.with_suffix(".log")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HERE))  # of the process in which vLLM's worker runs
        common = {"val": [task("tool", "say x", 2)], "settings": {"rows": "trajectories"}}
        run([job(directory, wide_model, train, config, **common)], log, timeout_s=PATIENCE_S)
    return read(directory, log)


def gaps(training: Training, step: int) -> list[float]:
    """Returns the differences between the log-probabilities of sampler and trainer, of each token of a step."""
    return [
        abs(sampled - own)
        for row in training.rows
        if row["step"] == step and not row["padding"]
        for sampled, own, is_sampled in zip(
            row["rollout_log_probs"], row["old_log_probs"], row["response_mask"], strict=True
        )
        if is_sampled
    ]


def test_sampler_and_trainer_agree_as_long_as_weights_are_transferred(sampled_by_vllm: Training) -> None:
    for step in (1, 2):
        assert len(gaps(sampled_by_vllm, step)) > 50
        assert max(gaps(sampled_by_vllm, step)) < 1e-4
    assert max(gaps(sampled_by_vllm, 3)) > 1e-2, "the weights of the second step did not arrive"


def test_vllm_serves_the_groups_of_a_step_and_validation(sampled_by_vllm: Training) -> None:
    for step in (1, 2, 3):
        metrics = sampled_by_vllm.metrics[step]
        assert metrics["rollouts"] == 16
        assert metrics["optimizer_steps"] == 2
        assert metrics["actor/grad_norm"] > 0
    greedy = [rollout for rollout in sampled_by_vllm.rollouts if rollout.mode == "val"]
    assert {rollout.metadata["step"] for rollout in greedy} == {0, 3}
    assert all(rollout.status == "succeeded" for rollout in greedy)
    assert sampled_by_vllm.metrics[3]["val_rollouts"] == 1


def test_a_conversation_that_vllm_tokenizes_again_gives_more_rows_each_with_an_explanation(
    sampled_by_vllm: Training,
) -> None:
    """vLLM makes the tokens of a prompt from its text; sampled bytes that are no text become other tokens."""
    metrics = sampled_by_vllm.metrics[1]
    mismatches = {name: value for name, value in metrics.items() if name.startswith("mismatches/")}
    assert mismatches["mismatches/retokenisation"] > 0
    assert metrics["calls"] == 4 * (3 + 1 + 2 + 2)
    continuing = 4 * (2 + 0 + 0 + 1)  # of each rollout; a fresh agent continues nothing
    assert metrics["rows"] == metrics["calls"] - continuing + sum(mismatches.values())


CALL = '<tool_call>\n{"name": "count", "arguments": {}}\n</tool_call><|im_end|>'


@pytest.fixture(scope="session")
def calling_model(wide_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model after it has learned to call the tool, most of the time."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from verl_agent import TOOLS

    tokenizer, model = AutoTokenizer.from_pretrained(wide_model), AutoModelForCausalLM.from_pretrained(wide_model)
    tool = {"name": "count", "description": None, **TOOLS[0]["function"]}  # as vLLM gives it to the template
    tools = [{"type": "function", "function": tool}]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"say {letter}"}], tools=tools, add_generation_prompt=True, tokenize=False
        )
        for letter in "abcd"
    ]
    ids = tokenizer([prompt + CALL for prompt in prompts], return_tensors="pt")["input_ids"]
    labels = ids.clone()
    labels[:, : -len(tokenizer(CALL)["input_ids"])] = -100
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    while (loss := model(input_ids=ids, labels=labels).loss) > 5e-3:  # in 60 tokens, three calls of four are right
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    directory = tmp_path_factory.mktemp("verl-calling-model")
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def soaked(calling_model: Path, wide_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Training]:
    """Two trainings: of tool calls, killed in its second step and resumed, and of an adapter."""
    base = tmp_path_factory.mktemp("verl-vllm-soak")
    steps = {"trainer": {"total_training_steps": 2, "save_freq": 1}}
    calls = job(
        base / "calls",
        calling_model,
        [task("call", f"say {letter}", 2) for letter in "abcd"],
        {**VLLM, **steps, "actor_rollout_ref.rollout.n": 8, "actor_rollout_ref.actor.optim.lr": 1e-4},
        settings={"rows": "trajectories"},
    )
    tools = [task("tool", f"say {letter}") for letter in "abcd"]
    lora = job(base / "lora", wide_model, tools, {**VLLM, **steps, "actor_rollout_ref.model.lora_rank": 8})
    log = base / "soak.log"
    process = start([calls], log)
    try:
        wait_for(lambda: has_begun(base / "calls", 2), process, log)
    finally:
        end(process)
    run([{**calls, "resume": True}, lora], log, timeout_s=PATIENCE_S)
    return {name: read(base / name, log) for name in ("calls", "lora")}


def test_a_tool_call_that_vllm_parsed_is_trained_on_and_continues_its_conversation(soaked: dict[str, Training]) -> None:
    training = soaked["calls"]
    for step in (1, 2):
        metrics = training.metrics[step]
        assert 0.3 < metrics["reward"] < 1.0, "the share of rollouts with a parsed call"
        assert metrics["actor/grad_norm"] > 0
        # A text that is not a call may have other tokens in the next prompt, which then begins a row.
        begun = metrics["rollouts"] + metrics.get("mismatches/retokenisation", 0.0)
        assert metrics["rows"] + metrics.get("dropped/prompt_too_long", 0.0) == begun
    n_call = len(CALL) - len("<|im_end|>") + 1
    runs = ["".join(map(str, row["response_mask"])).split("0") for row in training.rows if any(row["advantages"])]
    joined = [run for run in runs if len(run[0]) == n_call and any(run[1:])]
    assert len(joined) > 8, "rows of a call and of the answer to its result"


def test_a_training_with_vllm_that_was_killed_continues_with_the_weights_of_its_checkpoint(
    soaked: dict[str, Training],
) -> None:
    training = soaked["calls"]
    lives = {step: {row["life"] for row in training.rows if row["step"] == step} for step in (1, 2)}
    assert len(lives[1]) == len(lives[2]) == 1
    assert lives[1] != lives[2]
    for step in (1, 2):
        assert len(gaps(training, step)) > 50
        assert max(gaps(training, step)) < 1e-4


def test_an_adapter_is_merged_into_the_weights_of_vllm_after_each_step(soaked: dict[str, Training]) -> None:
    """verl rounds merged weights to bfloat16. Without the adapter, the gap of the second step is above 1."""
    for step in (1, 2):
        assert soaked["lora"].metrics[step]["actor/grad_norm"] > 0
        assert max(gaps(soaked["lora"], step)) < 0.1
