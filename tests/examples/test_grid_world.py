"""The grid world: what is seen, who wins, and a step of training."""

import grid_world
import pytest
from grid_world import BUDGET, MOVES, GridWorld, best_move

from agentrl import EpisodeDone


def walk(world, choose):
    """Go where the picture says until the episode ends."""
    for _ in range(BUDGET):
        world.go(choose(world._picture()))


def test_who_sees_the_picture_always_gets_there():
    for seed in range(40):
        world = GridWorld()
        [block] = world.reset(seed=seed)
        assert block["image"].tobytes() == world._picture().tobytes()
        with pytest.raises(EpisodeDone, match="there"):
            walk(world, best_move)
        assert world.get_reward() == 1.0


def test_who_walks_away_comes_too_late():
    opposite = dict(zip(MOVES, ["down", "up", "right", "left"], strict=True))
    world = GridWorld()
    world.reset(seed=0)
    with pytest.raises(EpisodeDone, match="too late"):
        walk(world, lambda picture: opposite[best_move(picture)])
    assert world.get_reward() == 0.0


@pytest.mark.slow
def test_the_example_trains_exactly(tmp_path, monkeypatch):
    monkeypatch.setattr(grid_world, "EPISODES", 16)
    trainer = grid_world.main(["--steps", "1", "--imitation", "2", "2", "--out", str(tmp_path)])
    [logs] = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert logs["sampling/sampling_logp_difference/max"] < 1e-4
