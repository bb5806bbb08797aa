"""The demo's environment: limits of the game, the group's shared number, the reward."""

import random

import pytest
from guess_number import GuessNumber

from agentrl import EpisodeDone


def started(hidden):
    """A game with a known hidden number."""
    game = GuessNumber()
    for seed in range(1000):
        game.reset(seed=seed)
        if game._hidden == hidden:
            return game
    raise AssertionError(f"no seed hides {hidden}")


def test_members_of_a_group_look_for_the_same_number():
    one, other = GuessNumber(), GuessNumber()
    for seed in (0, 7, 2**62):
        assert one.reset(seed=seed) == other.reset(seed=seed)
        assert one._hidden == other._hidden


def test_every_number_is_hidden_now_and_then():
    game = GuessNumber()
    hidden = set()
    for seed in range(500):
        game.reset(seed=seed)
        hidden.add(game._hidden)
    assert hidden == set(range(1, game.highest + 1))


@pytest.mark.parametrize("hidden", [1, 8, 15])
def test_answers_point_to_the_hidden_number(hidden):
    for number in range(1, 16):
        if number == hidden:
            continue
        game = started(hidden)
        assert game.guess(number) == ("higher" if number < hidden else "lower")


def test_finding_the_number_ends_the_game_with_reward_one():
    game = started(11)
    with pytest.raises(EpisodeDone, match="found"):
        game.guess(11)
    assert game.get_reward() == 1.0


def test_the_last_wrong_guess_ends_the_game_with_reward_zero():
    game = started(11)
    for _ in range(game.budget - 1):
        assert game.guess(3) == "higher"
        assert game.get_reward() == 0.0
    with pytest.raises(EpisodeDone, match="it was 11"):
        game.guess(3)
    assert game.get_reward() == 0.0


def test_the_last_guess_can_be_the_right_one():
    game = started(2)
    for number in (8, 4, 3):
        assert game.guess(number) == "lower"
    with pytest.raises(EpisodeDone, match="found"):
        game.guess(2)
    assert game.get_reward() == 1.0


def test_reset_clears_what_the_last_game_left():
    game = started(11)
    with pytest.raises(EpisodeDone):
        game.guess(11)
    game.reset(seed=3)
    assert game.get_reward() == 0.0
    for _ in range(game.budget - 1):
        game.guess(100)


def test_halving_always_wins_and_guessing_blindly_seldom_does():
    def wins(choose):
        won = 0
        for seed in range(300):
            game, rng = GuessNumber(), random.Random(f"player {seed}")
            game.reset(seed=seed)
            low, high = 1, game.highest
            try:
                while True:
                    number = choose(low, high, rng)
                    if game.guess(number) == "higher":
                        low = max(low, number + 1)
                    else:
                        high = min(high, number - 1)
            except EpisodeDone:
                won += game.get_reward()
        return won / 300

    assert wins(lambda low, high, rng: (low + high) // 2) == 1.0
    assert wins(lambda low, high, rng: rng.randint(1, 15)) < 0.35
