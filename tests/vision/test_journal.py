"""Episodes with images that were recorded: what a resumed run reads back is what was played."""

import pytest

from agentrl.chat.renderer import Renderer
from agentrl.rollout.journal.journal import Journal
from agentrl.rollout.journal.reading import Records
from tests.vision.helpers import family, play, question, worst_difference, written

FAMILY = "qwen3_vl"
TURNS = [("", [1, 2]), ("", []), ("", [3]), ("Done.", None)]


@pytest.mark.parametrize("keep_images", [None, 2])
def test_the_images_of_a_recorded_episode_are_found_again_in_its_rows(tmp_path, keep_images):
    renderer = Renderer(family(FAMILY)[1], tools=True, keep_images=keep_images)
    journal = Journal(tmp_path)
    scripts = [[written(FAMILY, *turn) for turn in TURNS], [written(FAMILY, "No.")]]
    played, _ = play(FAMILY, [question(7), question()], scripts, renderer=renderer, journal=journal)
    journal.close()
    assert [len(trajectory.rows) for trajectory in played] == [1 if keep_images is None else 3, 1]
    with Records(tmp_path) as records:
        for trajectory in played:
            again = records.rollout(trajectory.record).trajectory(renderer.locate_images)
            for row, read in zip(trajectory.rows, again.rows, strict=True):
                assert (read.prompt_ids, read.completion_ids) == (row.prompt_ids, row.completion_ids)
                assert places(read) == places(row)
            assert worst_difference(FAMILY, [again]) < 1e-4


def places(row):
    return [(span.image.digest, span.start, span.stop) for span in row.images]
