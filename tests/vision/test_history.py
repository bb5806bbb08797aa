"""Long episodes: what the model still sees of earlier screenshots, and how large they are."""

import pytest
from datasets import Dataset

from agentrl import GRPOConfig, GRPOTrainer
from agentrl.chat.images import ImageReader
from agentrl.chat.messages import clean_messages
from agentrl.chat.pictures import FORGOTTEN, REPEATED, count_images, forget_pictures, take_pictures
from agentrl.chat.renderer import Renderer
from agentrl.errors import ConfigurationError
from agentrl.rollout.journal.journal import Journal
from agentrl.rollout.journal.reading import Records
from agentrl.testing.models import tiny_model
from agentrl.testing.vision import picture
from tests.vision.helpers import SCHEMAS, family, play, question, worst_difference, written

FAMILY = "qwen3_vl"


@pytest.mark.parametrize(
    ("reasoning", "keep", "rows"), [("keep", 1, 4), ("keep", 2, 3), ("fork", 2, 3), ("keep", 9, 1)]
)
def test_the_last_images_are_kept_and_the_episode_goes_on_in_a_new_row(reasoning, keep, rows):
    """Each row is the render of a conversation without the earlier images; every sampled token is in one row."""
    _, processor = family(FAMILY)
    renderer = Renderer(processor, tools=True, keep_images=keep, reasoning=reasoning)
    turns = [("", [1]), ("", []), ("", [2]), ("", [3]), ("Done.", None)]
    scripts = [[written(FAMILY, *turn) for turn in turns]]
    [trajectory], generator = play(FAMILY, [question(7)], scripts, renderer=renderer)
    assert len(trajectory.rows) == rows
    assert [turn.row for turn in trajectory.turns][-1] == rows - 1
    assert all(len(row.images) <= keep for row in trajectory.rows)
    assert generator.stats.images_encoded == 4
    assert trajectory.sampled_length == sum(turn.stop - turn.start for turn in trajectory.turns)
    assert worst_difference(FAMILY, [trajectory]) < 1e-4
    messages = forget_pictures([*trajectory.prompt, *trajectory.completion[:-1]], keep)
    messages, pictures = take_pictures(messages)
    text = renderer._template.render(clean_messages(messages), SCHEMAS, True)
    last = trajectory.rows[-1]
    given = last.prompt_ids + last.completion_ids[: trajectory.turns[-1].start]
    assert given == list(processor(text=[text], images=pictures)["input_ids"][0])
    assert (FORGOTTEN in text) == (keep < 4)


def test_a_prompt_with_too_many_images_shows_the_last():
    renderer = Renderer(family(FAMILY)[1], keep_images=1)
    encoded = renderer.encode_prompt(question(1, 2), None)
    [span] = encoded.images
    assert span.image.digest == ImageReader(family(FAMILY)[1]).process(picture(2)).digest


@pytest.mark.parametrize(("keep", "rows"), [(None, 1), (1, 2), (2, 1)])
def test_an_image_that_is_the_same_as_the_one_before_is_told_in_words(tmp_path, keep, rows):
    """The row is the render of the conversation with the note; a picture that comes back later is shown again."""
    _, processor = family(FAMILY)
    renderer = Renderer(processor, tools=True, keep_images=keep, drop_repeated_images=True)
    turns = [("", [7]), ("", [7, 1, 1]), ("", [1]), ("Done.", None)]
    journal = Journal(tmp_path)
    scripts = [[written(FAMILY, *turn) for turn in turns]]
    [trajectory], generator = play(FAMILY, [question(7)], scripts, renderer=renderer, journal=journal)
    journal.close()
    assert len(trajectory.rows) == rows
    assert generator.stats.images_encoded == 2
    assert worst_difference(FAMILY, [trajectory]) < 1e-4
    assert sum(count_images([message]) for message in trajectory.completion) == 5, "the transcript has the images"

    kept = [[7], [REPEATED], [REPEATED, 1, REPEATED], [REPEATED]]
    blocks = iter(block for shown in kept for block in shown)

    def by_hand(message):
        content = message.get("content")
        if not isinstance(content, list):
            return message
        shown = [block if block["type"] == "text" else next(blocks) for block in content]
        shown = [{"type": "image", "image": picture(b)} if isinstance(b, int) else b for b in shown]
        return {**message, "content": [{"type": "text", "text": b} if isinstance(b, str) else b for b in shown]}

    messages = [by_hand(message) for message in [*trajectory.prompt, *trajectory.completion[:-1]]]
    messages, pictures = take_pictures(messages if keep is None else forget_pictures(messages, keep))
    text = renderer._template.render(clean_messages(messages), SCHEMAS, True)
    last = trajectory.rows[-1]
    given = last.prompt_ids + last.completion_ids[: trajectory.turns[-1].start]
    assert given == list(processor(text=[text], images=pictures)["input_ids"][0])

    with Records(tmp_path) as records:
        again = records.rollout(trajectory.record).trajectory(renderer.locate_images)
    assert [row.images for row in again.rows] == [row.images for row in trajectory.rows]


def test_a_picture_that_comes_back_later_is_shown_again():
    renderer = Renderer(family(FAMILY)[1], tools=True, drop_repeated_images=True)
    turns = [("", [1]), ("", [7]), ("Done.", None)]
    [trajectory], generator = play(
        FAMILY, [question(7)], [[written(FAMILY, *turn) for turn in turns]], renderer=renderer
    )
    assert len(trajectory.images) == 3
    assert generator.stats.images_encoded == 2


def test_large_images_are_made_smaller_before_they_are_processed():
    large, reader = picture(1, 64, 32), ImageReader(family(FAMILY)[1], max_pixels=24 * 16)
    image = reader.process(large)
    assert image.placeholders < ImageReader(family(FAMILY)[1]).process(large).placeholders
    assert image.digest == ImageReader(family(FAMILY)[1]).process(large.resize((27, 13))).digest
    small = picture(1)
    assert reader.process(small).digest == ImageReader(family(FAMILY)[1]).process(small).digest


@pytest.mark.parametrize("name", ["keep_images", "max_image_pixels"])
def test_a_limit_of_images_is_at_least_one(name, tmp_path):
    with pytest.raises(ConfigurationError, match=name):
        GRPOConfig(str(tmp_path), **{name: 0})


@pytest.mark.parametrize("name", ["keep_images", "drop_repeated_images", "max_image_pixels"])
def test_settings_of_images_need_a_model_that_sees(name, tmp_path):
    tokenizer = family(FAMILY)[1].tokenizer
    with pytest.raises(ConfigurationError, match="vision-language"):
        GRPOTrainer(
            tiny_model("qwen3", vocab_size=300),
            lambda completions, **_: [0.0] * len(completions),
            GRPOConfig(str(tmp_path), **{name: 1}, per_device_train_batch_size=2, num_generations=2),
            Dataset.from_dict({"prompt": ["x"] * 4}),
            processing_class=tokenizer,
        )
