"""A real training of a tiny Qwen2-VL with images, from the agent's request to verl's update."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Training, job, read, run
from PIL import Image
from vision_agent import image_url
from vision_server import COLLAPSED, model_inputs

from agentlightning_plugins.shared.training_records.record import LEDGER_SPAN, ROW_SPAN, LedgerEntry, TrainedRow

pytestmark = pytest.mark.soak
STEPS, N = (1, 2), 3


def show(color: str, *sizes: int, text: str = "look") -> dict[str, Any]:
    return {"color": color, "sizes": sizes, "text": text}


TASKS = {
    "two": show("red", 16, 24),
    "late": show("blue", 0, 16),
    "text": show("black", 0),
    "long": show("green", 64, 64, 64, 64, 64),
    "collapsed": show("black", 16, text=COLLAPSED),
}
"""Tasks by kind. Images of 16, 24 and 64 pixels have 4, 9 and 64 tokens."""


@pytest.fixture(scope="module")
def trained_on_images(tmp_path_factory: pytest.TempPathFactory, vision_model: Path) -> Training:
    directory = tmp_path_factory.mktemp("verl-vision") / "vision"
    config = {
        "trainer.total_training_steps": len(STEPS),
        "data.train_batch_size": len(TASKS),
        "actor_rollout_ref.rollout.n": N,
        "actor_rollout_ref.actor.ppo_mini_batch_size": len(TASKS),
    }
    log = directory.with_suffix(".log")
    tasks = list(TASKS.values())
    run([job(directory, vision_model, tasks, config, shows_images=True, settings={"rows": "trajectories"})], log)
    return read(directory, log)


@pytest.fixture(scope="module")
def sampler(vision_model: Path) -> tuple[Any, Any]:
    """Processor and model of the first step."""
    from tiny_vision_model import register_processor
    from transformers import AutoProcessor, Qwen2VLForConditionalGeneration

    register_processor()
    model = Qwen2VLForConditionalGeneration.from_pretrained(vision_model)
    return AutoProcessor.from_pretrained(vision_model), model.eval()


def records(training: Training, name: str, step: int, task: str) -> list[Any]:
    """Returns the training records of a task's rollouts."""
    place = list(TASKS).index(task)
    rollouts = [r for r in training.rollouts if r.mode == "train" and r.metadata["task_id"] == place]
    spans = [span for rollout in rollouts for span in training.spans[rollout.rollout_id] if span.name == name]
    kind = TrainedRow if name == ROW_SPAN else LedgerEntry
    return [each for each in map(kind.from_span, spans) if each.step == step]


def logprobs_of(row: TrainedRow, sampler: tuple[Any, Any], urls: list[str]) -> list[float]:
    """Returns the log-probabilities of a row's sampled tokens, by the model of the first step with these images."""
    processor, model = sampler
    ids = [*row.prompt_ids, *row.response_ids]
    images = [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in urls]
    with torch.no_grad():
        scores = model(**model_inputs(processor, ids, images)).logits[0].log_softmax(-1)
    start = len(row.prompt_ids)
    return [float(scores[start + place - 1, ids[start + place]]) for place, kept in enumerate(row.mask) if kept]


def test_sampler_and_trainer_agree_on_every_token_of_rows_with_images(trained_on_images: Training) -> None:
    for step in STEPS:
        for task in ("two", "late"):
            rows = records(trained_on_images, ROW_SPAN, step, task)
            assert len(rows) == N, "both calls of a rollout are in one row"
            for row in rows:
                assert row.trainer_logprobs is not None
                pairs = [pair for *pair, kept in zip(row.logprobs, row.trainer_logprobs, row.mask, strict=True) if kept]
                assert all(sampled == pytest.approx(own, abs=1e-3) for sampled, own in pairs)
        assert trained_on_images.metrics[step]["training/rollout_probs_diff_max"] < 1e-5
        assert trained_on_images.metrics[step]["actor/grad_norm"] > 0


def test_the_trainer_gets_the_images_of_a_row_in_order(trained_on_images: Training, sampler: tuple[Any, Any]) -> None:
    for row in records(trained_on_images, ROW_SPAN, 1, "two"):
        pixels = [image_url("red", 16), image_url("red", 24)]
        own = [value for value, kept in zip(row.trainer_logprobs, row.mask, strict=True) if kept]
        assert logprobs_of(row, sampler, pixels) == pytest.approx(own, abs=1e-3)
        for wrong in ([image_url("blue", 16), pixels[1]], [pixels[0], image_url("blue", 24)]):
            gaps = [abs(a - b) for a, b in zip(logprobs_of(row, sampler, wrong), own, strict=True)]
            assert max(gaps) > 1e-2, "another image of the same size gives other log-probabilities"


def test_tokens_of_an_image_in_a_later_call_are_masked_in_its_row(
    trained_on_images: Training, sampler: tuple[Any, Any]
) -> None:
    pad = sampler[0].image_token_id
    for step in STEPS:
        for task, (first, later) in {"two": (4, 9), "late": (0, 4)}.items():
            for row in records(trained_on_images, ROW_SPAN, step, task):
                places = [place for place, token in enumerate(row.response_ids) if token == pad]
                assert (list(row.prompt_ids).count(pad), len(places)) == (first, later)
                assert not any(row.mask[place] for place in places)
                assert len(row.calls) == 2


def test_the_weights_of_the_vision_encoder_are_trained(trained_on_images: Training, sampler: tuple[Any, Any]) -> None:
    before = sampler[1].state_dict()
    folder = trained_on_images.directory / "checkpoints" / f"global_step_{STEPS[-1]}" / "actor"
    after = torch.load(folder / "model_world_size_1_rank_0.pt", weights_only=False)
    names = [name for name in after if ".visual." in name and name.endswith("weight")]
    assert len(names) > 5
    for name in names:
        weight = after[name].full_tensor() if hasattr(after[name], "full_tensor") else after[name]
        assert not torch.equal(weight, before[name]), name


def test_rows_that_cannot_be_trained_on_are_in_the_ledger_and_other_rows_are_trained_on(
    trained_on_images: Training,
) -> None:
    for step in STEPS:
        metrics = trained_on_images.metrics[step]
        assert (metrics["dropped/image_tokens_differ"], metrics["dropped/image_row_too_long"]) == (N, N)
        for task, outcome in {"long": "too_long", "collapsed": "unusable_images"}.items():
            entries = records(trained_on_images, LEDGER_SPAN, step, task)
            assert [entry.outcome for entry in entries] == [outcome] * N
            assert all(set(entry.calls.values()) == {outcome} for entry in entries)
        assert metrics["rollouts"] == N * len(TASKS)
        assert metrics["rollouts_without_rows"] == 2 * N
    assert trained_on_images.log.count("makes 4 tokens of its 1 images, and the model server reported 1") == len(STEPS)
