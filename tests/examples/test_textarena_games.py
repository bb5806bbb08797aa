"""TextArena's own games for one player, played by scripted models and by a tiny random one."""

import json
import math
import re

import pytest

pytest.importorskip("textarena", reason="make games")

import textarena_games
from textarena_player import games

from agentrl.chat.renderer import Renderer
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.failures import FailurePolicy
from agentrl.testing.invariants import assert_row_invariants
from agentrl.testing.scripted import ScriptedGenerator
from agentrl.testing.tokenizers import qwen_like_tokenizer
from agentrl.types import Outcome, Task

TOKENIZER = qwen_like_tokenizer("compact")
TURN = "<|im_start|>assistant\n"


def played(factory, players):
    """One group: a rollout for each player, who writes a turn, given the text so far."""

    def turn(session, ids, params):
        text = TOKENIZER.decode(ids)
        written = next(player for name, player in players.items() if f"You are {name}." in text)(text)
        return [*TOKENIZER(written, add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id]

    engine = RolloutEngine(
        ScriptedGenerator(turn),
        Renderer(TOKENIZER, tools=True),
        environments=factory,
        failures=FailurePolicy(retries=0, max_rate=1.0),
    )
    prompts = [[{"role": "user", "content": f"You are {name}."}] for name in players]
    try:
        trajectories = engine.run([Task("g", member, 11, prompt, {}) for member, prompt in enumerate(prompts)])
    finally:
        engine.close()
    for trajectory in trajectories:
        assert trajectory.failure is None
        assert_row_invariants(trajectory)
    return dict(zip(players, trajectories, strict=True))


def act(move):
    return f"<tool_call>\n{json.dumps({'name': 'act', 'arguments': {'move': move}})}\n</tool_call>"


def halve(text):
    """Guess the middle of what is still possible."""
    low, high = 1, 30
    for guess, hint in re.findall(r"\[(\d+)\]\"}.*?number is (higher|lower)", text.split(TURN, 1)[1], re.DOTALL):
        low, high = (int(guess) + 1, high) if hint == "higher" else (low, int(guess) - 1)
    return act(f"[{(low + high) // 2}]")


def told(trajectory):
    return [message["content"] for message in trajectory.completion if message["role"] == "tool"]


def test_games_are_won_lost_and_left():
    players = {"clever": halve, "stubborn": lambda text: act("[50]"), "lazy": lambda text: "I give up."}
    group = played(games("GuessTheNumber-v0", max_number=30), players)

    won = group["clever"]
    assert (won.outcome, won.reward) == (Outcome.ENV_DONE, 1.0)
    assert "guess the number between 1 and 30" in won.prompt[-1]["content"], "settings reach the game"
    assert all(text.startswith("The target number is ") for text in told(won)[:-1]), "only what is new is told"
    assert "Congratulations" in told(won)[-1]

    lost = group["stubborn"]
    assert (lost.outcome, lost.reward) == (Outcome.ENV_DONE, 0.0)
    assert "outside the range" in told(lost)[0]
    assert len(told(lost)) == 2, "a second move that is not allowed ends the game"

    assert (group["lazy"].outcome, group["lazy"].reward) == (Outcome.FINISHED, 0.0)


def test_members_of_a_group_play_the_same_game_though_it_draws_as_it_goes():
    """2048 draws a tile at each move, from Python's global random numbers."""

    def cycle(text):
        moves = text.count(TURN) - 1
        return act(f"[{('Up', 'Left', 'Down', 'Right')[moves % 4]}]") if moves < 10 else "Enough."

    one, *others = (told(trajectory) for trajectory in played(games("2048-v0"), dict.fromkeys("abcd", cycle)).values())
    assert len(set(one)) > 5
    assert others == [one] * 3


@pytest.mark.slow
def test_a_random_model_trains(tmp_path):
    trainer = textarena_games.main(["--steps", "1", "--out", str(tmp_path)])
    assert math.isfinite(trainer.state.log_history[-1]["train_loss"])
