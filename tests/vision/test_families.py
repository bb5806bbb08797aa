"""Every family: episodes with images in different turns, sampled and scored; rows as the processor renders them."""

import pytest

from agentrl.generation.local import LocalGenerator
from agentrl.testing.vision import TINY_VISION_FAMILIES
from tests.vision.helpers import family, full_render, play, question, worst_difference, written

TURNS = [
    [("", []), ("So.", []), ("It is nothing.", None)],
    [("", []), ("", []), ("One.", None)],
    [("", [1]), ("And", [2]), ("Two.", None)],
    [("", [2, 3]), ("", []), ("Three.", None)],
]
"""Content of each turn, and the pictures that it looks at."""
PROMPTS = [question(), question(7), question(), question(8)]


@pytest.fixture(scope="module", params=TINY_VISION_FAMILIES)
def played(request):
    scripts = [[written(request.param, *turn) for turn in turns] for turns in TURNS]
    trajectories, generator = play(request.param, PROMPTS, scripts)
    return request.param, trajectories, generator


def test_sampler_and_trainer_agree_on_rows_with_no_image_one_two_and_three(played):
    name, trajectories, _ = played
    assert [len(t.images) for t in trajectories] == [0, 1, 2, 3]
    assert all(len(t.turns) == 3 for t in trajectories)
    assert worst_difference(name, trajectories) < 1e-4
    for trajectory in trajectories:
        assert worst_difference(name, [trajectory]) < 1e-4


def test_a_row_is_what_the_processor_renders_of_the_whole_conversation(played):
    name, trajectories, _ = played
    for trajectory in trajectories:
        row = trajectory.prompt_ids + trajectory.completion_ids
        full = full_render(name, trajectory)
        assert full[: len(row)] == row
        assert len(full) - len(row) <= 1  # the newline behind the last turn


def test_every_picture_is_encoded_once(played):
    _, trajectories, generator = played
    unique = {span.image.digest for t in trajectories for span in t.images}
    assert len(unique) == 5
    if isinstance(generator, LocalGenerator):  # the other one keeps nothing between turns
        assert generator.stats.images_encoded == 5


def test_placeholders_of_a_row_are_those_of_its_images(played):
    name, trajectories, _ = played
    placeholder = family(name)[0].config.image_token_id
    for trajectory in trajectories:
        row = trajectory.prompt_ids + trajectory.completion_ids
        places = {index for index, token in enumerate(row) if token == placeholder}
        spans = [
            index for span in trajectory.images for index in range(span.start, span.stop) if row[index] == placeholder
        ]
        assert set(spans) == places
        assert len(spans) == sum(span.image.placeholders for span in trajectory.images)
