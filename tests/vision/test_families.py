"""Every family: episodes with images in different turns, sampled and scored; rows as the processor renders them."""

import re

import pytest

from agentrl.chat.renderer import Renderer
from agentrl.errors import TemplateError
from agentrl.testing.vision import TINY_VISION_FAMILIES
from tests.docs import tables
from tests.vision.family_table import BEGIN, DOCS, END, played, rows_are_renders, table
from tests.vision.helpers import family, worst_difference

families = pytest.mark.parametrize("name", TINY_VISION_FAMILIES)


@families
def test_sampler_and_trainer_agree_on_rows_with_no_image_one_two_and_three(name):
    found = played(name)
    assert [len(t.images) for t in found.trajectories] == [0, 1, 2, 3]
    assert all(len(t.turns) == 3 for t in found.trajectories)
    assert max(found.differences) < 1e-4
    assert worst_difference(name, found.trajectories) < 1e-4, "together in one micro-batch"


@families
def test_a_row_is_what_the_processor_renders_of_the_whole_conversation(name):
    assert rows_are_renders(name, played(name).trajectories)


@families
def test_scoring_sees_the_pixels_that_sampling_saw_and_the_processor_made(name):
    found = played(name)
    assert found.processed
    assert found.sampled == found.scored == found.processed


@families
def test_every_picture_is_encoded_once(name):
    """In three turns of four episodes: by the generator's count, and by the calls of the vision tower."""
    found = played(name)
    assert found.different_images == 5
    assert found.encoded == found.encodings == 5


@families
def test_placeholders_of_a_row_are_those_of_its_images(name):
    placeholder = family(name)[0].config.image_token_id
    for trajectory in played(name).trajectories:
        row = trajectory.prompt_ids + trajectory.completion_ids
        places = {index for index, token in enumerate(row) if token == placeholder}
        spans = [
            index for span in trajectory.images for index in range(span.start, span.stop) if row[index] == placeholder
        ]
        assert set(spans) == places
        assert len(spans) == sum(span.image.placeholders for span in trajectory.images)


@pytest.mark.parametrize("name", ["idefics3", "smolvlm"])
def test_images_are_split_into_rows_and_columns_as_the_processor_lays_them_out(name):
    """Each tile has its mark, the whole picture comes last."""
    [image] = [span.image for span in played(name).trajectories[1].images]
    marks = re.findall(r"<row_\d_col_\d>|<global-img>", image.text)
    assert marks == ["<row_1_col_1>", "<row_1_col_2>", "<row_2_col_1>", "<row_2_col_2>", "<global-img>"]
    assert image.inputs["pixel_values"].shape[1] == len(marks)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_templates_that_number_pictures_through_the_conversation_are_refused(name):
    """What follows a turn would depend on how many pictures came before it; the proof plays images too."""
    with pytest.raises(TemplateError, match=r"Picture 1: "):
        Renderer(family(name)[1], tools=True, template_kwargs={"add_vision_id": True})


def test_the_table_of_the_documentation_is_current():
    """Differences are of the machine that wrote it; all else is the same everywhere."""
    known = tables.split(DOCS.read_text(encoding="utf-8"), BEGIN, END)[1].strip()
    assert _without_differences(known) == _without_differences(table().strip())


def _without_differences(text):
    return re.sub(r"\d\.\de[-+]\d+", "#", text)
