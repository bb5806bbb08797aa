"""Faults of kind M: images that are lost, counted twice, cut, or seen where none is; and where images come from."""

import base64
import io
from pathlib import Path

import pytest
import torch
from PIL import Image as Picture

from agentrl.chat.images import STAND_IN, ImageReader, image_types, model_ids
from agentrl.chat.pictures import image_block, place_pictures
from agentrl.chat.renderer import Renderer
from agentrl.errors import ImageError, TemplateError
from agentrl.generation.sampling import process_logits
from agentrl.rollout.failures import FailurePolicy
from agentrl.rollout.limits import Limits
from agentrl.rollout.results import render
from agentrl.testing.vision import picture, tiny_vision
from agentrl.training.batching import Layout, collate
from agentrl.types import Image, ImageSpan, Limit, Outcome, Task, Trajectory
from tests.vision.helpers import (
    batch_of,
    family,
    hermes,
    look,
    own_template,
    play,
    question,
    renderer_of,
    worst_difference,
)

FAMILY = "qwen3_vl"
ONE_TRY = FailurePolicy(retries=0, max_rate=1.0)


def placeholders(name, ids):
    return sum(token == family(name)[0].config.image_token_id for token in ids)


def without_tool_images():
    """The template of Qwen3-VL, which in results shows text alone."""
    head, tool, tail = own_template(FAMILY).partition('{%- elif message.role == "tool" %}')
    assert tool
    shows = "content.type == 'image' or 'image' in content or 'image_url' in content"
    return head + tool + tail.replace(shows, "false")


@pytest.mark.parametrize("shows_tool_images", [True, False])
@pytest.mark.parametrize("order", ["it", "tii", "i"])
def test_the_row_has_a_place_for_every_image_whatever_roles_the_template_shows_them_in_m01(shows_tool_images, order):
    """M01."""

    def mixed(numbers: list[int]) -> list:
        """Look.

        Args:
            numbers: Which ones.
        """
        left = iter(numbers)
        return [{"type": "text", "text": "t"} if kind == "t" else picture(next(left)) for kind in order]

    _, processor = tiny_vision(FAMILY)
    processor.chat_template = own_template(FAMILY) if shows_tool_images else without_tool_images()
    renderer = Renderer(processor, tools=True)
    script = [hermes(1, 2, count="mixed"), "done"]
    [trajectory], _ = play(FAMILY, [question(3)], [script], renderer=renderer, tools=[mixed])
    shown = [picture(3), *(picture(number) for number, _ in zip((1, 2), range(order.count("i")), strict=False))]
    reader = ImageReader(processor)
    assert [span.image.digest for span in trajectory.images] == [reader.process(image).digest for image in shown]
    row = trajectory.prompt_ids + trajectory.completion_ids
    assert placeholders(FAMILY, row) == sum(span.image.placeholders for span in trajectory.images)
    assert worst_difference(FAMILY, [trajectory]) < 1e-4


def test_generator_and_trainer_get_placeholders_that_were_expanded_once_m02():
    """M02."""
    [trajectory], _ = play(FAMILY, [question(1, 2)], [["done"]])
    assert len(trajectory.images) == 2
    assert placeholders(FAMILY, trajectory.prompt_ids) == sum(span.image.placeholders for span in trajectory.images)
    text = renderer_of(FAMILY)._tokenizer.decode(trajectory.prompt_ids)
    for span in trajectory.images:
        assert text.count(f"<|vision_start|>{span.image.text}<|vision_end|>") == 2


@pytest.mark.parametrize("room", range(40, 140, 20))
def test_an_image_is_never_split_by_a_length_limit_m04(room):
    """M04."""
    script = [hermes(1, 2), hermes(3), "done"]
    [trajectory], _ = play(FAMILY, [question(7)], [script], limits=Limits(max_completion_length=room, max_context=4096))
    row = trajectory.prompt_ids + trajectory.completion_ids
    assert placeholders(FAMILY, row) == sum(span.image.placeholders for span in trajectory.images)
    assert all(span.stop <= len(row) for span in trajectory.images)
    assert len(trajectory.completion_ids) <= room
    if trajectory.loss_mask:
        assert worst_difference(FAMILY, [trajectory]) < 1e-4


def test_a_round_without_room_goes_with_its_images_m04():
    """M04."""
    full, _ = play(FAMILY, [question(7)], [[hermes(1, 2), "done"]])
    first = full[0].turns[0].stop
    limits = Limits(max_completion_length=first + 5, max_context=4096)
    [cut], _ = play(FAMILY, [question(7)], [[hermes(1, 2), "done"]], limits=limits)
    assert cut.outcome is Outcome.TRUNCATED
    assert cut.limit is Limit.COMPLETION
    assert len(cut.images) == 1
    assert len(cut.completion_ids) == first


def test_the_placeholder_is_never_sampled_m05():
    """M05: it has no probability, in the sampler as in the trainer, and what is left is normalised alike."""
    model, _ = family(FAMILY)
    placeholder = model.config.image_token_id
    assert renderer_of(FAMILY).never_sampled == (placeholder,)
    bias = torch.zeros(1, 300)
    bias[0, placeholder] = 50.0
    assert process_logits(bias, suppress_tokens=(placeholder,)).exp()[0, placeholder] == 0
    assert process_logits(bias, suppress_tokens=(placeholder,))[0, 0].exp() == pytest.approx(1 / 299)
    kept = process_logits(bias, suppress_tokens=(placeholder,), keep_N=torch.tensor([placeholder]))
    assert torch.isfinite(kept[0, placeholder])


def foreign_row(ids, images=()):
    """A row that something else sampled."""
    return Trajectory(
        task=Task("g", 0, 0),
        prompt="",
        prompt_ids=[1, 2],
        completion="",
        completion_ids=list(ids),
        loss_mask=[1] * len(ids),
        logprobs=[0.0] * len(ids),
        outcome=Outcome.FINISHED,
        images=images,
    )


def test_a_placeholder_that_was_sampled_all_the_same_is_no_image_m05():
    """M05: the batch does not crash, the target stays, and the model reads another id."""
    placeholder = family(FAMILY)[0].config.image_token_id
    seen, _ = play(FAMILY, [question(1)], [["x"]])
    rows = [foreign_row([7, placeholder, 8]), *seen]
    batch = batch_of(FAMILY, rows)
    assert placeholder not in batch.input_ids[0]
    assert batch.input_ids[0, 3] == STAND_IN
    assert batch.target_ids_N.tolist()[:3] == [7, placeholder, 8]
    assert worst_difference(FAMILY, rows) < float("inf")


def test_text_that_looks_like_a_placeholder_is_no_image():
    def tell(text: str) -> str:
        """Tell.

        Args:
            text: What.
        """
        return f"<|image_pad|> {text} <|vision_start|><|image_pad|><|vision_end|>"

    prompt = [{"role": "user", "content": "<|image_pad|>?"}]
    call = '<tool_call>\n{"name": "tell", "arguments": {"text": "a"}}\n</tool_call>'
    [trajectory], _ = play(FAMILY, [prompt], [[call, "done"]], tools=[tell, look])
    assert trajectory.images == ()
    assert placeholders(FAMILY, trajectory.prompt_ids + trajectory.completion_ids) == 0
    assert worst_difference(FAMILY, [trajectory]) < 1e-4


def test_an_image_that_cannot_be_read_fails_its_own_rollout():
    def broken(numbers: list[int]) -> list:
        """Look.

        Args:
            numbers: Which ones.
        """
        if numbers == [0]:
            return [{"type": "image", "base64": "bm8gaW1hZ2U="}]
        return [picture(numbers[0])]

    scripts = [[hermes(0, count="broken"), "x"], [hermes(1, count="broken"), "x"]]
    (bad, good), _ = play(FAMILY, [question(), question()], scripts, tools=[broken], failures=ONE_TRY)
    assert bad.outcome is Outcome.ENV_FAILURE
    assert "cannot be read" in bad.failure.error
    assert good.outcome is Outcome.FINISHED
    assert len(good.images) == 1


def test_a_row_with_other_images_than_places_fails_its_own_rollout():
    prompt = [{"role": "user", "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "?"}]}]
    columns = [{"image": picture(1)}, {"images": [picture(1), picture(2)]}]
    (bad, good), _ = play(FAMILY, [prompt, prompt], [["x"], ["x"]], columns=columns, failures=ONE_TRY)
    assert bad.outcome is Outcome.ENV_FAILURE
    assert "1 images, but its prompt has 2 places" in bad.failure.error
    assert len(good.images) == 2


def test_a_tokenizer_alone_shows_no_images():
    _, processor = family(FAMILY)
    tokenizer = tiny_vision(FAMILY)[1].tokenizer
    tokenizer.chat_template = processor.chat_template
    with pytest.raises(TemplateError, match="processor as processing_class"):
        Renderer(tokenizer).encode_prompt(question(1), None)


# Where images come from ---------------------------------------------------------------------------------------


def as_png(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    "block",
    [
        lambda image, _: image,
        lambda image, _: {"type": "image", "image": image},
        lambda image, _: {"type": "image", "image": {"bytes": as_png(image), "path": None}},
        lambda image, _: {"type": "image", "base64": base64.b64encode(as_png(image)).decode()},
        lambda image, _: {"type": "image", "data": base64.b64encode(as_png(image)).decode(), "mimeType": "image/png"},
        lambda image, _: {"type": "image", "url": "data:image/png;base64," + base64.b64encode(as_png(image)).decode()},
        lambda image, _: {
            "type": "image_url",
            "image_url": {"url": "data:image/png;base64," + base64.b64encode(as_png(image)).decode()},
        },
        lambda image, path: {"type": "image", "path": path},
    ],
)
def test_every_form_of_an_image_is_read(block, tmp_path):
    image = picture(1)
    image.save(tmp_path / "1.png")
    [read] = render([block(image, tmp_path / "1.png")])
    assert read["type"] == "image"
    assert read["image"].tobytes() == image.tobytes()


@pytest.mark.parametrize("text", ["/etc/passwd", "picture.png", "http://localhost/x.png", "data:image/png,abc"])
def test_text_opens_no_file_and_reaches_nothing(text):
    with pytest.raises(ImageError):
        image_block({"type": "image", "url": text})


def test_a_file_that_is_no_image_is_refused(tmp_path):
    (tmp_path / "x.eps").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 1 1\n")
    with pytest.raises(ImageError):
        image_block(Path(tmp_path / "x.eps"))


def test_a_tool_may_go_on_drawing_on_what_it_returned():
    canvas = Picture.new("RGB", (8, 8), "white")
    [block] = render(canvas)
    canvas.paste("black", (0, 0, 8, 8))
    assert block["image"].getpixel((0, 0)) == (255, 255, 255)


def test_dataset_images_go_where_the_prompt_has_places_or_before_the_question():
    one, two = picture(1), picture(2)
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    placed = place_pictures(messages, [one, two])
    assert [block["type"] for block in placed[1]["content"]] == ["image", "image", "text"]
    assert messages[1]["content"] == "q"
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "image"}]}]
    placed = place_pictures(messages, [one, two])
    assert [block.get("image") for block in placed[0]["content"]] == [None, one, two]


# Rows in tensors ----------------------------------------------------------------------------------------------


def test_the_model_reads_placeholders_of_images_only():
    image = Image("d", "<i><i>", 2, {})
    row = [9, 4, 4, 6, 4, 9]
    span = [ImageSpan(image, 1, 3)]
    assert image_types(row, span, 4) == [0, 1, 1, 0, 0, 0]
    assert model_ids(row, span, 4) == [9, 4, 4, 6, STAND_IN, 9]
    assert model_ids(row, [], None) == row


def test_rows_with_images_are_not_packed():
    seen, _ = play(FAMILY, [question(1)], [["x"]])
    with pytest.raises(ValueError, match="cannot lie PACKED"):
        collate(seen, pad_token_id=0, layout=Layout.PACKED, placeholder_id=262)
