"""The images of rows: read from the recorded calls and compared with the tokens that the model server made of them."""

from __future__ import annotations

import base64
import copy
import io
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agentlightning.errors import ConfigError
from agentlightning_algorithms.verl.batch_row import BatchRow, BuiltRows

if TYPE_CHECKING:
    from PIL.Image import Image


class ImageLoader:
    """Gives rows the images from which verl computes the inputs of a vision-language model.

    The trainer and the model server process an image separately. The number of its tokens is all that is known of
    the server's result, so a row is dropped if the trainer's processor makes a different number.
    """

    def __init__(self, processor: Any = None, model: str = "", options: Mapping[str, Any] | None = None) -> None:
        """Creates a loader for one model."""
        self._processor = copy.deepcopy(processor)  # verl uses its own in another thread; tokenizers do not allow that
        self._lock = threading.Lock()
        self._model = model
        self._options = options

    def load(self, built: BuiltRows, rollout_id: str) -> list[str]:
        """Loads the images of all rows of a rollout, drops rows that cannot be trained on, and returns the reasons."""
        known: dict[str, Image] = {}
        explanations = []
        for row in list(built.rows):
            if row.image_urls:
                self._check_supported(row, rollout_id)
            elif self._processor is None:
                continue
            try:
                row.images = [
                    known[url] if url in known else known.setdefault(url, _read(url)) for url in row.image_urls
                ]
            except ValueError as error:
                reason, explanation = "image_unreadable", str(error)
            else:
                with self._lock:
                    reason, explanation = self._compare(row)
            if reason:
                built.drop(row, reason, "unusable_images")
                explanations.append(explanation)
        return explanations

    def _check_supported(self, row: BatchRow, rollout_id: str) -> None:
        if self._processor is None:
            raise ConfigError(
                f"rollout {rollout_id} sent images to the model, but {self._model or 'the model'} has no processor of "
                "images: use a vision-language model, or agents that send text. If it is such a model, transformers "
                "could not load its processor: verl's warning above says why; Qwen's need Pillow and torchvision"
            )
        for url in row.image_urls:
            if not url.startswith("data:"):
                raise ConfigError(
                    f"rollout {rollout_id} sent the image {url[:80]!r} to the model by its URL, but the trainer does "
                    "not fetch URLs: send images as data URIs (data:image/png;base64,...)"
                )

    def _compare(self, row: BatchRow) -> tuple[str, str]:
        """Returns a reason to drop a row and its explanation; both are empty if it has the right number of tokens."""
        from verl.utils.tokenizer import build_multimodal_processor_inputs, get_processor_token_id

        ids = {get_processor_token_id(self._processor, name) for name in ("image", "video")} - {None}
        sampled = [token for token, kept in zip(row.response_ids, row.response_mask, strict=True) if kept]
        if number := sum(token in ids for token in sampled):
            return "image_tokens_sampled", f"the model sampled {number} tokens that stand for images or videos"
        found = sum(token in ids for token in (*row.prompt_ids, *row.response_ids))
        expected = 0
        if row.images:
            made = build_multimodal_processor_inputs(
                self._processor,
                text=[self._processor.image_token * len(row.images)],
                images=row.images,
                mm_processor_kwargs=self._options,
            )
            expected = sum(token in ids for token in made["input_ids"].flatten().tolist())
        if found == expected:
            return "", ""
        return "image_tokens_differ", (
            f"the trainer's processor makes {expected} tokens of its {len(row.images)} images, and the model server "
            f"reported {found}: the server must report prompts with all tokens of every image and process images as "
            "the trainer does (for vLLM, the same values of actor_rollout_ref.rollout.engine_kwargs.vllm."
            "mm_processor_kwargs and data.mm_processor_kwargs), and images must be in messages of the user"
        )


def _read(url: str) -> Image:
    """Decodes a data URI to RGB as vLLM does: transparent pixels become white."""
    from PIL import Image

    head, _, body = url.partition(",")
    try:
        image = Image.open(io.BytesIO(base64.b64decode(body, validate=True)))
        image.load()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"an image ({head[:40]!r}) cannot be read: {error}") from error
    if image.mode == "RGBA":
        white = Image.new("RGB", image.size, "white")
        white.paste(image, mask=image.getchannel("A"))
        return white
    return image.convert("RGB")
