"""The environment of `textarena_games.py`: any TextArena game for one player.

TextArena's games draw from Python's global random numbers, so each is played in a process of its own: members of a
group, which get the same seed, play the same game whatever runs beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import textarena

from agentrl import EpisodeDone, isolated


class TextArena:
    """One player's games.

    Args:
        game: A game's name in TextArena. Its plain form is made ("-raw"): the wrappers of the others tell the whole
            game again at every move, and a model that acts through tools has it before it.
        settings: What the game's class takes, such as `max_number`.
    """

    def __init__(self, game: str, **settings: Any) -> None:
        self._game = textarena.make(f"{game}-raw", **settings)

    def reset(self, seed: int, **columns: Any) -> str:
        self._game.reset(num_players=1, seed=seed)
        return self._told()

    def act(self, move: str) -> str:
        """Make a move.

        Args:
            move: The move, in the form that the game asks for, for example "[5]".

        Returns:
            What the game says to it.
        """
        done, _ = self._game.step(move)
        if done:
            _, info = self._game.close()
            raise EpisodeDone(f"{self._told()}\n{info[0]['reason']}".strip())
        return self._told()

    def get_reward(self) -> float:
        """What the game gave; nothing for one that was not played to its end."""
        rewards, _ = self._game.close()
        return float(rewards[0]) if rewards else 0.0

    def _told(self) -> str:
        """What is new, without the player's own moves."""
        _, messages = self._game.get_observation()
        return "\n".join(text for sender, text, _ in messages if sender == textarena.GAME_ID)


def games(game: str, **settings: Any) -> Callable[[], Any]:
    """An `environment_factory`; its processes are forked from one that has imported TextArena."""
    return isolated(partial(TextArena, game, **settings), start_method="forkserver")
