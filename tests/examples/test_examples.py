"""Every example runs: a step or two with an agent that has barely been fitted."""

import importlib
import math

import demo
import demo_report
import pytest
import tiny_agent.agents
from tiny_agent import Lesson, Recipe, make_tiny_agent
from transformers import AutoModelForCausalLM, AutoTokenizer

EXACT = 1e-4


@pytest.fixture(autouse=True)
def barely_fitted(monkeypatch, tmp_path):
    """Make agents in moments: same tokenizer and template, next to no practice."""

    def quickly(lessons):
        short = [Lesson(lesson.transcripts[:20], steps=2) for lesson in lessons]
        return make_tiny_agent(short, Recipe(hidden_size=32, layers=1, heads=1), cache=tmp_path / "agents")

    monkeypatch.setattr(tiny_agent.agents, "make_tiny_agent", quickly)


@pytest.mark.parametrize("name", ["counter", "two_environments", "plain_tools", "frozen_lake"])
def test_example_trains(name, tmp_path):
    example = importlib.import_module(name)
    trainer = example.main(["--steps", "1", "--out", str(tmp_path / "out")])
    assert trainer.state.global_step == 1
    assert math.isfinite(trainer.state.log_history[-1]["train_loss"])


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_demo_shows_before_and_after_and_saves_the_agent(algorithm, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "TEST_GAMES", range(3))
    demo.main(["--algorithm", algorithm, "--steps", "2", "--out", str(tmp_path)])

    shown = capsys.readouterr().out
    for expected in ("Before training", "After training", "before,", "Sampler against trainer", algorithm.upper()):
        assert expected in shown
    assert (tmp_path / "reward.png").stat().st_size > 1000
    assert AutoTokenizer.from_pretrained(tmp_path / "model").response_template
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")


def test_demo_trains_token_exactly(tmp_path):
    trainer, rewards = demo.train(
        tiny_agent.agents.guessing_agent(demo.GuessNumber), "grpo", seed=0, steps=2, out=tmp_path
    )
    assert len(rewards) == 2
    assert 0 < demo.largest_difference(trainer) < EXACT


def test_plain_tools_rewards_the_last_words():
    from plain_tools import correct

    answers = [{"role": "assistant", "content": " 12 "}], [{"role": "assistant", "tool_calls": []}]
    assert correct(list(answers), answer=["12", "12"]) == [1.0, 0.0]


# The demo's report -----------------------------------------------------------------------------------------


def test_the_curve_has_one_column_a_value_and_fills_to_its_height():
    lines = demo_report.draw_curve([0.0, 0.5, 1.0], height=4).splitlines()
    plot = [line.split("│")[1] for line in lines[:4]]
    assert plot == ["  █", "  █", " ██", " ██"]
    assert lines[0].startswith("  1.0")
    assert "step 3" in lines[-1]


@pytest.mark.parametrize("count", [1, 59, 60, 61, 1000])
def test_a_long_curve_fits_the_width(count):
    lines = demo_report.draw_curve([0.7] * count).splitlines()
    columns = min(count, 60)
    assert all(len(line.split("│")[1]) == columns for line in lines[:10])
    assert lines[9].split("│")[1] == "█" * columns


def test_values_outside_the_range_stay_inside_the_plot():
    plot = [line.split("│")[1] for line in demo_report.draw_curve([-1.0, 2.0], height=2).splitlines()[:2]]
    assert plot == [" █", " █"]
