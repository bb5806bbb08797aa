"""Visual question answering: the pictures show what is asked for, and both trainers learn from a dataset's images."""

import random

import pytest
import visual_question_answering as example


def test_a_question_is_answered_by_its_picture():
    """Figures are counted by the cells that are not blank; the colour is the only one."""
    data = example.questions(30, seed=0)
    assert set(data["answer"]) <= {word for words in example.ANSWERS.values() for word in words}
    for row in data:
        question, picture = row["prompt"][0]["content"], row["image"].convert("RGB")
        cells = [
            picture.crop((x, y, x + example.CELL, y + example.CELL)).getcolors()
            for x in range(0, picture.width, example.CELL)
            for y in range(0, picture.height, example.CELL)
        ]
        drawn = [cell for cell in cells if len(cell) > 1]
        assert row["answer"] in example.ANSWERS[question]
        if "many" in question:
            assert len(drawn) == example.ANSWERS[question].index(row["answer"]) + 1
        if "colour" in question:
            channel = example.ANSWERS[question].index(row["answer"])
            [ink] = {colour for cell in drawn for _, colour in cell} - {(255, 255, 255)}
            assert ink.index(max(ink)) == channel


def test_shapes_differ():
    pictures = {example.draw(1, shape, "red", random.Random(0)).tobytes() for shape in ("square", "frame", "cross")}
    assert len(pictures) == 3


def test_only_the_answer_itself_is_right():
    said = [[{"role": "assistant", "content": text}] for text in ("two", "two ", "")]
    assert example.correct(said, answer=["two"] * 3) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("algorithm", ["grpo", pytest.param("rloo", marks=pytest.mark.slow)])
def test_the_example_trains_exactly(algorithm, tmp_path):
    options = ["--algorithm", algorithm, "--steps", "1", "--imitation", "1", "1", "--pictures", "24"]
    trainer = example.main([*options, "--out", str(tmp_path)])
    [logs] = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert logs["sampling/sampling_logp_difference/max"] < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_the_reward_rises(algorithm, tmp_path):
    trainer = example.main(["--algorithm", algorithm, "--steps", "50", "--out", str(tmp_path)])
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert sum(rewards[-6:]) / 6 > sum(rewards[:6]) / 6 + 0.15
