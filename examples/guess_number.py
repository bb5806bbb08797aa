"""The demo's environment: find a hidden number by asking.

Copy this file to write an environment of your own. It is a plain class with one tool:

* `reset` starts an episode and returns what the agent is told;
* every other public method is a tool, described to the agent by its type hints and docstring;
* `get_reward` scores the episode that was played.
"""

from __future__ import annotations

import random

from agentrl import EpisodeDone

HIGHEST = 20
BUDGET = 5


class GuessNumber:
    """A number is hidden; each guess is answered with "higher" or "lower", until it is found or no guess is left.

    Halving what is still possible always finds one of 20 numbers within five guesses. Guessing blindly finds it
    in fewer than one episode out of four.
    """

    def reset(self, seed: int | None = None, **columns) -> str:
        """Hide a number. Rollouts that are compared with one another get the same seed, so the same number."""
        self._hidden = random.Random(seed).randint(1, HIGHEST)
        self._left = BUDGET
        self._found = False
        return f"Find the number between 1 and {HIGHEST}. You have {BUDGET} guesses."

    def guess(self, number: int) -> str:
        """Guess the hidden number.

        Args:
            number: The guess.

        Returns:
            Whether the hidden number is higher or lower.
        """
        number = int(number)
        self._left -= 1
        self._found = number == self._hidden
        if self._found:
            raise EpisodeDone("found")  # ends the episode; its text is the tool's answer
        answer = "higher" if self._hidden > number else "lower"
        if self._left == 0:
            raise EpisodeDone(f"{answer}; no guesses left, it was {self._hidden}")
        return answer

    def get_reward(self) -> float:
        """One point for finding the number, none otherwise."""
        return float(self._found)


def guess_blindly(messages: list[dict], rng: random.Random) -> dict:
    """The habit the untrained agent starts with: any number, whatever has been answered so far."""
    return {"name": "guess", "arguments": {"number": rng.randint(1, HIGHEST)}}
