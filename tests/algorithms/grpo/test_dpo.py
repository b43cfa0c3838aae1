"""Preference optimisation on pairs of recorded rollouts and of files."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import agentlightning as agl
from agentlightning.plugin.registry import get_manager
from agentlightning_algorithms.offline.dpo import DPO, LossName
from agentlightning_algorithms.offline.training import make_rows
from agentlightning_algorithms.shared.policy.model import Policy, collate, load_policy
from agentlightning_algorithms.shared.policy.training_row import TrainingRow
from agentlightning_algorithms.shared.policy.updater import Updater
from agentlightning_plugins.shared.chat_history import FineTuningExample, PreferencePair
from agentlightning_plugins.shared.scripted_model.server import Answer, RecordedRequest
from tests.algorithms.glossary import find_unexplained
from tests.algorithms.grpo.test_sft import QUESTION, conversation, likelihood, tune
from tests.algorithms.prompt_lab import Server


def line(preferred: str, other: str) -> str:
    return json.dumps(
        {
            "input": {"messages": [{"role": "user", "content": QUESTION}]},
            "preferred_output": [{"role": "assistant", "content": preferred}],
            "non_preferred_output": [{"role": "assistant", "content": other}],
        }
    )


def test_a_model_learns_the_preferred_answer_and_training_resumes(tmp_path: Path, tiny_model: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join([line("moo", "quack")] * 4))
    run = tmp_path / "runs" / "dpo"
    settings: dict[str, Any] = {"name": "dpo", "batch_size": 2, "lr": 3e-3, "beta": 0.5}
    first = tune(run, tiny_model, file, epochs=3, **settings)
    assert first[0]["pairs"] == 4.0
    assert first[0]["loss"] <= math.log(2)
    assert (first[-1]["accuracy"], first[-1]["loss"] < 0.4) == (1.0, True)
    gain = {
        answer: likelihood(run / "checkpoint", answer) - likelihood(tiny_model, answer) for answer in ("moo", "quack")
    }
    assert gain["moo"] > gain["quack"] + 0.5
    more = tune(run, tiny_model, file, epochs=4, **settings)  # resumes
    assert len(more) == 4
    assert more[-1]["margin"] > first[-1]["margin"], "compared to the initial model, not to the checkpoint"
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(line("quack", "moo"))
    own = {"name": "dpo", "val_source": str(held_out), "lr": 3e-3}
    initial, epoch = tune(tmp_path / "runs" / "other", tiny_model, file, epochs=1, **own)
    unlearned = {"val_loss": pytest.approx(math.log(2)), "val_accuracy": 0.0, "val_margin": 0.0}
    assert initial == unlearned
    assert epoch["val_margin"] < -0.1, "the other order was learned"


@pytest.mark.parametrize(("loss", "smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.1), ("ipo", 0.0), ("hinge", 0.0)])
def test_the_gradient_equals_the_gradient_of_the_published_loss(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, loss: LossName, smoothing: float
) -> None:
    beta = 0.2
    turns = [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"},
    ]  # fmt: skip
    pairs = [
        PreferencePair(
            chosen=[FineTuningExample(messages=turns)], rejected=[FineTuningExample(**conversation("quack quack"))]
        ),
        PreferencePair(
            chosen=[FineTuningExample(**conversation("moo"))], rejected=[FineTuningExample(**conversation("meow"))]
        ),
    ]
    algorithm = DPO(
        model=str(tiny_model), source="unused.jsonl", loss=loss, beta=beta, label_smoothing=smoothing, batch_size=2,
        max_tokens_per_microbatch=40,
    )  # fmt: skip
    algorithm.context = agl.RunContext(store=None)
    policy = load_policy(tiny_model)
    items = algorithm.prepare(policy, pairs)
    updater = Updater(policy, algorithm.update_settings(items))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    expected = published_gradient(policy, load_policy(tiny_model), pairs, loss, beta, smoothing)

    found: list[torch.Tensor] = []
    step = updater.optim_step

    def keep_gradient() -> dict[str, float]:
        found.append(flat_gradient(policy))
        return step()

    monkeypatch.setattr(updater, "optim_step", keep_gradient)
    metrics = algorithm.run_epoch(updater, items, 0)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-6)
    assert metrics["loss"] == pytest.approx(float(expected[1]), rel=1e-4)


def prepare_line(policy: Policy, model: Path, text: str, **settings: Any) -> tuple[DPO, Updater, list[Any]]:
    file = model.with_name("line.jsonl")
    file.write_text(text)
    algorithm = DPO(model=str(model), source=str(file), **settings)
    algorithm.context = agl.RunContext(store=None)
    items = algorithm.prepare(policy, asyncio.run(algorithm.read_examples()))
    return algorithm, Updater(policy, algorithm.update_settings(items), autocast=algorithm.dtype != "float32"), items


def test_assistant_messages_in_the_input_of_a_pair_are_not_compared(tiny_model: Path) -> None:
    policy = load_policy(tiny_model)
    pair = json.loads(line("moo", "quack"))
    pair["input"]["messages"] += [{"role": "assistant", "content": "why?"}, {"role": "user", "content": "say it"}]
    _, _, (found,) = prepare_line(policy, tiny_model, json.dumps(pair), loss="ipo")
    decode = policy.tokenizer.decode
    answers = [[decode(list(row.response_ids)) for row in side] for side in (found.chosen, found.rejected)]
    assert answers == [["moo<|im_end|>"], ["quack<|im_end|>"]]


def test_the_reference_is_computed_in_the_precision_of_the_policy(tiny_model: Path) -> None:
    text = line("moo " * 20, "quack quack")
    algorithm, updater, items = prepare_line(load_policy(tiny_model), tiny_model, text, dtype="bfloat16")
    metrics = algorithm.run_epoch(updater, items, 0)
    assert find_unexplained(metrics) == set()
    assert (metrics["margin"], metrics["loss"]) == (0.0, pytest.approx(math.log(2))), "nothing has been learned yet"


def test_an_epoch_whose_steps_are_all_skipped_has_metrics(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, updater, items = prepare_line(load_policy(tiny_model), tiny_model, line("moo", "quack"))
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_, **__: torch.tensor(math.inf))
    metrics = algorithm.run_epoch(updater, items, 0)
    assert "grad_norm" not in metrics
    assert metrics["loss"] == pytest.approx(math.log(2))


def flat_gradient(policy: Policy) -> torch.Tensor:
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in policy.model.parameters()]
    return torch.cat([grad.flatten() for grad in grads]).clone()


def published_gradient(
    policy: Policy, reference: Policy, pairs: Sequence[PreferencePair], loss: LossName, beta: float, smoothing: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the gradient and the value of the loss as written in the papers, by autograd over whole answers."""

    def log_ratio(examples: Sequence[FineTuningExample]) -> torch.Tensor:
        rows, _ = make_rows(policy, examples)
        tokens = sum(row.n_sampled for row in rows) if loss == "ipo" else 1
        with torch.no_grad():
            old = torch.stack([of_row(reference, row) for row in rows]).sum()
        return (torch.stack([of_row(policy, row) for row in rows]).sum() - old) / tokens

    def of_row(model: Policy, row: TrainingRow) -> torch.Tensor:
        return model.token_logprobs(collate([row], model.device), 1.0)[0].sum()

    losses = []
    for pair in pairs:
        margin = log_ratio(pair.chosen) - log_ratio(pair.rejected)
        if loss == "ipo":
            losses.append((margin - 1 / (2 * beta)) ** 2)
        elif loss == "hinge":
            losses.append(torch.relu(1 - beta * margin))
        else:
            log = torch.nn.functional.logsigmoid
            losses.append(-(1 - smoothing) * log(beta * margin) - smoothing * log(-beta * margin))
    value = torch.stack(losses).mean()
    torch.autograd.backward(value)
    gradient = flat_gradient(policy)
    policy.model.zero_grad(set_to_none=True)
    return gradient, value.detach()


def test_pairs_are_the_best_and_the_worst_rollouts_of_a_task(tmp_path: Path, tiny_model: Path) -> None:
    rewards = {"aaa": 0.9, "bbb": 0.8, "ccc": 0.2, "ddd": 0.7, "eee": 0.7, "fff": 0.3, "ggg": 0.5}
    rewards |= {"hhh": 1.0, "iii": 0.0}  # rewards of the validation tasks
    answers = iter(rewards)

    def model(request: RecordedRequest) -> Answer:
        return Answer(next(answers))

    def agent(task: dict[str, Any], llm: agl.LLM) -> float:
        import openai

        with openai.OpenAI(base_url=llm.endpoint, api_key="any", max_retries=0) as client:
            messages: Any = [{"role": "user", "content": task["name"]}]
            said = client.chat.completions.create(model="m", messages=messages).choices[0].message.content
        return rewards[said or ""]

    tasks = [{"name": name} for name in ("one", "one", "one", "two", "two", "three", "three")]
    recorded = tmp_path / "recorded"
    with Server(model) as server:
        trainer = agl.Trainer(
            algorithm="baseline", strategy="shm", trackers=[], run_dir=recorded, max_concurrency=1,
            initial_resources={"llm": agl.LLM(endpoint=server.endpoint, model="m")},
        )  # fmt: skip
        trainer.fit(agent, tasks, [{"name": "three"}] * 2)

    def chosen(**conditions: Any) -> set[tuple[str, str]]:
        pairs = asyncio.run(DPO(model=str(tiny_model), source=str(recorded), **conditions).read_examples())
        return {(pair.chosen[0].messages[-1]["content"], pair.rejected[0].messages[-1]["content"]) for pair in pairs}

    assert chosen() == {("aaa", "ccc"), ("ggg", "fff")}, "equal rewards make no pair"
    assert chosen(min_gap=0.5) == {("aaa", "ccc")}
    assert chosen(pairs_per_task=None) == {("aaa", "ccc"), ("ggg", "fff")}
    (epoch,) = tune(tmp_path / "dpo", tiny_model, recorded, name="dpo")
    assert epoch["pairs"] == 2.0
    algorithm = get_manager().create(
        "algorithm", {"name": "dpo", "model": str(tiny_model), "source": str(recorded), "min_gap": 5.0}
    )
    with pytest.raises(agl.ConfigError, match=r"no pair to learn from.*not of validation or test.*min_gap = 5"):
        agl.Trainer(algorithm=algorithm, strategy="shm", trackers=[]).fit()


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"loss": "kto"}, "loss = 'kto': Input should be 'sigmoid', 'ipo' or 'hinge'"),
        ({"beta": 0.0}, "beta = 0.0; it must be above 0"),
        ({"label_smoothing": 0.5}, "label_smoothing = 0.5"),
        ({"source": "bad.jsonl"}, r"bad.jsonl:1 is not of the form .*preferred_output"),
    ],
)
def test_an_invalid_setting_or_line_of_a_file_is_refused(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text(json.dumps(conversation("a")))
    algorithm = {"name": "dpo", "model": str(tiny_model), "source": "bad.jsonl", **settings}
    with pytest.raises(agl.ConfigError, match=complaint):
        agl.Trainer(algorithm=algorithm, strategy="shm", trackers=[]).fit()
