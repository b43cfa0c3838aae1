"""Images of model calls in the rows of a batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vision_agent import ask, image_url

import agentlightning as agl
from agentlightning_algorithms.verl.batch_row import BatchRow, BuiltRows, build_rows
from agentlightning_algorithms.verl.controller import RolloutController, VerlEpisode
from agentlightning_algorithms.verl.images import ImageLoader

pytestmark = pytest.mark.filterwarnings("ignore")  # of verl's imports

RED, BLUE, GREEN = image_url("red", 16), image_url("blue", 16), image_url("green", 24)
"""Images with 4, 4 and 9 tokens."""


@pytest.fixture(scope="module")
def processor(vision_model: Path) -> Any:
    from tiny_vision_model import register_processor
    from verl.utils.tokenizer import hf_processor

    register_processor()
    return hf_processor(str(vision_model))


@pytest.fixture(scope="module")
def loader(processor: Any) -> ImageLoader:
    return ImageLoader(processor, "tiny")


def call(prompt: list[int], response: list[int], *images: str) -> agl.Triplet:
    return agl.Triplet(
        prompt={"token_ids": prompt, "raw_content": [], "image_urls": list(images)},
        response={"token_ids": response, "raw_content": [], "logprobs": [-0.5] * len(response)},
        metadata={"response_id": str(len(prompt)), "weight_version": 0},
    )


def rows_of(*calls: agl.Triplet, limit: int = 99) -> BuiltRows:
    return build_rows(calls, kind="trajectories", max_prompt=limit, max_response=limit)


def with_images(processor: Any, sizes: list[int], urls: list[str]) -> BuiltRows:
    """Returns one row whose prompt has runs of image tokens of these lengths."""
    prompt = [token for size in sizes for token in [1, *[processor.image_token_id] * size]]
    return rows_of(call([*prompt, 1], [2], *urls))


def test_each_image_of_a_conversation_is_in_its_row_once_and_in_order() -> None:
    first, second = call([1, 2], [3], RED), call([1, 2, 3, 4, 5], [6], RED, GREEN)
    (row,) = rows_of(first, second).rows
    assert row.image_urls == [RED, GREEN]
    assert [turn.end - turn.start for turn in row.calls] == [1, 1]


def test_calls_whose_earlier_image_changed_become_separate_rows() -> None:
    first, second = call([1, 2], [3], RED), call([1, 2, 3, 4, 5], [6], BLUE)
    assert [row.image_urls for row in rows_of(first, second).rows] == [[RED], [BLUE]]


def test_a_row_that_is_too_long_is_dropped_if_it_has_images_and_cut_if_it_has_none() -> None:
    calls = [call([1, 2], [3]), call([1, 2, 3, 4, 5], [6])]
    assert [row.response_ids for row in rows_of(*calls, limit=2).rows] == [[3]]
    calls = [call([1, 2], [3], RED), call([1, 2, 3, 4, 5], [6], RED)]
    built = rows_of(*calls, limit=2)
    assert (built.rows, built.dropped) == ([], {"image_row_too_long": 1})
    assert built.left_out == {"2": "too_long", "5": "too_long"}


def test_verl_gets_the_images_of_a_row_in_the_order_of_its_prompt(processor: Any, loader: ImageLoader) -> None:
    from agentlightning_algorithms.verl.agent_loop import episode_to_outputs

    built = with_images(processor, [9, 4, 4], [GREEN, RED, BLUE])
    built.rows += rows_of(call([1], [2])).rows
    assert loader.load(built, "ro-1") == []
    seen, text = episode_to_outputs(VerlEpisode(built.rows, reward=1.0, calls=1), current=0)
    assert seen.multi_modal_data is not None
    images = seen.multi_modal_data["images"]
    assert [image.size for image in images] == [(24, 24), (16, 16), (16, 16)]
    assert [image.getpixel((0, 15)) for image in images] == [(0, 128, 0), (255, 0, 0), (0, 0, 255)]
    assert text.multi_modal_data is None


def test_a_transparent_image_gets_a_white_background(processor: Any, loader: ImageLoader) -> None:
    built = with_images(processor, [4], [image_url("#ff000080", 16, mode="RGBA")])
    assert loader.load(built, "ro-1") == []
    (image,) = built.rows[0].images
    assert (image.mode, image.getpixel((0, 15))) == ("RGB", (255, 127, 127))


def test_rows_whose_images_have_another_number_of_tokens_at_the_server_are_dropped(
    processor: Any, loader: ImageLoader
) -> None:
    for reported in ([1, 9], [4, 1], [4, 9, 1]):
        built = with_images(processor, reported, [RED, GREEN])
        (explanation,) = loader.load(built, "ro-1")
        assert f"makes 13 tokens of its 2 images, and the model server reported {sum(reported)}" in explanation
        assert (built.rows, built.dropped) == ([], {"image_tokens_differ": 1})
        assert set(built.left_out.values()) == {"unusable_images"}


def test_image_settings_of_the_processor_are_used_as_in_verl(processor: Any) -> None:
    smaller = ImageLoader(processor, "tiny", {"min_pixels": 64, "max_pixels": 64})
    assert smaller.load(with_images(processor, [1, 1], [RED, GREEN]), "ro-1") == []
    assert len(smaller.load(with_images(processor, [4, 9], [RED, GREEN]), "ro-1")) == 1


def test_rows_with_sampled_image_or_video_tokens_are_dropped(processor: Any, loader: ImageLoader) -> None:
    for token in (processor.image_token_id, processor.video_token_id):
        built = rows_of(call([1], [token]), call([1, 3], [2]))
        assert loader.load(built, "ro-1") == ["the model sampled 1 tokens that stand for images or videos"]
        assert [row.response_ids for row in built.rows] == [[2]]
        assert built.dropped == {"image_tokens_sampled": 1}


def test_rows_with_an_image_that_cannot_be_read_are_dropped(processor: Any, loader: ImageLoader) -> None:
    for broken in ("data:image/png;base64,%%%", "data:image/png;base64,AAAA", RED[:80], "data:image/png"):
        built = with_images(processor, [4], [broken])
        (explanation,) = loader.load(built, "ro-1")
        assert "cannot be read" in explanation
        assert (built.rows, built.dropped) == ([], {"image_unreadable": 1})


def test_a_text_model_refuses_images_and_keeps_rows_of_text() -> None:
    loader = ImageLoader(None, "tiny-text")
    built = rows_of(call([1], [2]))
    assert loader.load(built, "ro-1") == []
    assert len(built.rows) == 1
    with pytest.raises(agl.errors.ConfigError, match="ro-1 sent images to the model, but tiny-text has no processor"):
        loader.load(rows_of(call([1], [2], RED)), "ro-1")


async def test_the_error_about_an_image_that_is_not_a_data_uri_names_rollout_and_image(loader: ImageLoader) -> None:
    from omegaconf import OmegaConf

    from agentlightning_algorithms.shared.rollout_result import read_result
    from agentlightning_algorithms.verl.controller import RolloutSettings

    store = agl.InMemoryLightningStore()
    (queued,) = await store.enqueue_many_rollouts([agl.EnqueueRolloutRequest(input=1, mode="train")])
    claimed = await store.dequeue_rollout("worker")
    assert claimed is not None
    content = [*ask("red", 16), {"type": "image_url", "image_url": {"url": "https://images/cat.png"}}]
    attributes = {
        "gen_ai.operation.name": "chat", "gen_ai.response.id": "r", "gen_ai.request.model": "policy",
        "gen_ai.input.messages": json.dumps([{"role": "user", "content": content}]),
        "prompt_token_ids": [1], "response_token_ids": [2], "logprobs": [-0.5],
    }  # fmt: skip
    await store.add_span(
        agl.types.Span.from_attributes(
            attributes=attributes, rollout_id=queued.rollout_id, attempt_id=claimed.attempt.attempt_id, name="chat"
        )
    )
    ended = await store.update_attempt(queued.rollout_id, claimed.attempt.attempt_id, status="succeeded", reward=1.0)
    assert ended is not None
    rollout = await store.get_rollout_by_id(queued.rollout_id)
    assert rollout is not None
    config = OmegaConf.create({"data": {"max_prompt_length": 9, "max_response_length": 9}})
    controller = RolloutController(
        store=store, gateway=None, adapter=agl.TraceToTriplet(), tasks={}, initial_resources={},
        settings=RolloutSettings(), config=config, images=loader,
        loop=None,
    )  # fmt: skip
    named = rf"rollout {queued.rollout_id} sent the image 'https://images/cat.png' .* data URIs"
    with pytest.raises(agl.errors.ConfigError, match=named):
        controller._to_episode("train", await read_result(store, rollout), 0.0)
    await store.close()


def test_dropping_one_of_two_equal_rows_keeps_the_other() -> None:
    row, other = BatchRow([1], [2], [1], [0.0]), BatchRow([1], [2], [1], [0.0])
    built = BuiltRows([row, other])
    built.drop(other, "image_unreadable", "unusable_images")
    assert built.rows[0] is row
    assert len(built.rows) == 1
