"""Images among tokens: what a processor makes of a picture, and where its tokens stand.

A chat template writes one placeholder for an image. The model reads many tokens in its place, with other tokens around
and between them in some families. What they are is known once the picture is processed, which happens once, when it
arrives: generation, scoring and the reference all read the same tensors. The text is expanded before it is encoded, so
that the ids are those of the processor's own rendering.

A placeholder counts only where it was put for an image. One in the text of a message is written so that it is none, and
one that stands in a row for any other reason (a model sampled it) is fed to the model as `STAND_IN`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakValueDictionary

from PIL import Image as Picture

from agentrl.chat.pictures import pixel_digest
from agentrl.errors import ConfigurationError, ImageError
from agentrl.types import Encoded, Image, ImageSpan

if TYPE_CHECKING:  # torch takes seconds, and processes of environments do without it
    from torch import Tensor
    from transformers import ProcessorMixin

STAND_IN = 0
"""The id that a model reads in place of a placeholder that stands for no image."""

_OF_THE_TEXT = frozenset(
    {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets"}
)
"""What a processor gives back about the text."""


class ImageReader:
    """The images of one processor.

    Args:
        processor: A processor of transformers with an image processor; it is not changed.
        max_pixels: Most pixels of a picture; a larger one is made smaller before the processor gets it. None: no limit.

    Attributes:
        placeholder: What a chat template writes for an image.
        placeholder_id: The id that stands for a feature of an image.

    Raises:
        ConfigurationError: The processor does not say what it writes for an image.
    """

    def __init__(self, processor: ProcessorMixin, max_pixels: int | None = None) -> None:
        self._processor: Any = processor
        self._max_pixels = max_pixels
        placeholder = getattr(processor, "image_token", None)
        if placeholder is None or getattr(processor, "image_processor", None) is None:
            raise ConfigurationError(
                f"processing_class is a {type(processor).__name__} without an image processor or an `image_token`; "
                "pass the processor of a vision-language model, or its tokenizer for text alone."
            )
        self.placeholder: str = placeholder
        self.placeholder_id = cast(int, self._processor.image_token_ids[0])
        tokenizer: Any = self._processor.tokenizer
        self._feature_token = str(tokenizer.convert_ids_to_tokens(self.placeholder_id))
        others = (getattr(processor, "video_token", None), self._feature_token)
        self._reserved = {placeholder, *(token for token in others if token is not None)}
        self._known: WeakValueDictionary[str, Image] = WeakValueDictionary()

    def process(self, picture: Picture.Image) -> Image:
        """Process a picture, or find what was made of the same one before, for as long as anybody holds it.

        Raises:
            ImageError: The processor cannot process it.
        """
        rgb = picture if picture.mode == "RGB" else picture.convert("RGB")
        if self._max_pixels is not None and rgb.width * rgb.height > self._max_pixels:
            share = (self._max_pixels / (rgb.width * rgb.height)) ** 0.5
            rgb = rgb.resize((max(int(rgb.width * share), 1), max(int(rgb.height * share), 1)))
        digest = pixel_digest(rgb)
        image = self._known.get(digest)
        if image is None:
            image = self._known[digest] = self._processed(digest, rgb)
        return image

    def _processed(self, digest: str, picture: Picture.Image) -> Image:
        import torch

        try:
            output = self._processor(
                images=[picture], text=[self.placeholder], return_tensors="pt", return_text_replacement_offsets=True
            )
        except Exception as error:
            raise ImageError(
                f"{type(self._processor).__name__} cannot process an image of {picture.width} x {picture.height} "
                f"pixels: {type(error).__name__}: {error}"
            ) from error
        text: str = output["text_replacement_offsets"][0][0]["replacement"]
        inputs = {name: torch.as_tensor(value) for name, value in output.items() if name not in _OF_THE_TEXT}
        return Image(digest, text, text.count(self._feature_token), inputs)

    def expand(self, text: str, images: Sequence[Image]) -> str:
        """Put the images' own text into a rendered conversation.

        Raises:
            ImageError: The template wrote another number of placeholders than there are images.
        """
        parts = text.split(self.placeholder)
        if len(parts) != len(images) + 1:
            raise ImageError(
                f"the chat template wrote {len(parts) - 1} placeholders {self.placeholder!r} for {len(images)} images; "
                "it does not show images in messages of every role. Set a template that does."
            )
        texts = (part for image, after in zip(images, parts[1:], strict=True) for part in (image.text, after))
        return "".join([parts[0], *texts])

    def locate(self, ids: Sequence[int], images: Sequence[Image]) -> tuple[ImageSpan, ...]:
        """Find images in the ids of an expanded text.

        Raises:
            ImageError: There is another number of placeholder ids than the images have.
        """
        if not images:
            return ()
        places = [index for index, token in enumerate(ids) if token == self.placeholder_id]
        expected = sum(image.placeholders for image in images)
        if len(places) != expected:
            raise ImageError(f"{len(images)} images have {expected} placeholder tokens, but the text has {len(places)}")
        spans, first = [], 0
        for image in images:
            last = first + image.placeholders
            spans.append(ImageSpan(image, places[first], places[last - 1] + 1))
            first = last
        return tuple(spans)

    def disarm(self, text: str) -> str:
        """Write placeholders in the text of a message so that they are none: with a space in them."""
        for token in self._reserved:
            if token in text:
                text = text.replace(token, f"{token[0]} {token[1:]}")
        return text


def encode_with_images(
    reader: ImageReader | None, encode: Callable[[str], list[int]], text: str, images: Sequence[Image]
) -> Encoded:
    """Encode a rendered conversation and find its images in it.

    Raises:
        ImageError: The text has another number of places for images.
    """
    if reader is None:
        return Encoded(encode(text))
    ids = encode(reader.expand(text, images))
    return Encoded(ids, reader.locate(ids, images))


def model_ids(ids: Sequence[int], spans: Sequence[ImageSpan], placeholder_id: int | None) -> list[int]:
    """Give the ids that a model reads: a placeholder that stands for no image becomes `STAND_IN`.

    Args:
        ids: A row.
        spans: Its images, in order.
        placeholder_id: The id that stands for features; None for a model without images.
    """
    if placeholder_id is None or placeholder_id not in ids:
        return list(ids)
    types = image_types(ids, spans, placeholder_id)
    return [STAND_IN if token == placeholder_id and not own else token for token, own in zip(ids, types, strict=True)]


def image_types(ids: Sequence[int], spans: Sequence[ImageSpan], placeholder_id: int) -> list[int]:
    """Say which tokens of a row stand for features of an image: 1 for those, 0 for text."""
    types = [0] * len(ids)
    for span in spans:
        for index in range(span.start, span.stop):
            types[index] = int(ids[index] == placeholder_id)
    return types


def join_inputs(images: Sequence[Image]) -> dict[str, Tensor]:
    """Put the inputs of images together as a processor does for a batch: padded with zeros where sizes differ.

    Returns:
        By name, the tensors end to end along their first dimension; empty without images.
    """
    if not images:
        return {}
    return {name: _concatenate([image.inputs[name] for image in images]) for name in images[0].inputs}


def _concatenate(tensors: Sequence[Tensor]) -> Tensor:
    import torch

    largest = torch.tensor([tensor.shape[1:] for tensor in tensors]).amax(0).tolist() if tensors[0].dim() > 1 else []
    padded = []
    for tensor in tensors:
        missing = [most - size for most, size in zip(largest, tensor.shape[1:], strict=True)]
        widths = [width for size in reversed(missing) for width in (0, size)]
        padded.append(torch.nn.functional.pad(tensor, widths) if any(widths) else tensor)
    return torch.cat(padded)
