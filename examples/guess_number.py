"""The demo's environment: find a hidden number by asking. Copy it to write an environment of your own.

An environment is a plain class:

* `reset` starts an episode and returns what the agent is told;
* every other public method is a tool, described to the agent by its type hints and its docstring;
* `get_reward` scores the episode that was just played.
"""

from __future__ import annotations

import random

from agentrl import EpisodeDone


class GuessNumber:
    """A hidden number has to be found; each guess is answered with "higher" or "lower".

    Who always halves what is still possible finds any of the 15 numbers with four guesses. Who guesses blindly
    finds it in one game out of four.
    """

    highest = 15
    budget = 4

    def reset(self, seed: int | None = None, **columns) -> str:
        """Hide a number. Rollouts that are compared with one another get the same seed, so the same number."""
        self._hidden = random.Random(seed).randint(1, self.highest)
        self._guesses_left = self.budget
        self._found = False
        return f"Find the number between 1 and {self.highest}. You have {self.budget} guesses."

    def guess(self, number: int) -> str:
        """Guess the hidden number.

        Args:
            number: The guess.

        Returns:
            Whether the hidden number is higher or lower.
        """
        self._guesses_left -= 1
        if number == self._hidden:
            self._found = True
            raise EpisodeDone("found")  # ends the episode; the text is what the agent reads
        answer = "higher" if number < self._hidden else "lower"
        if self._guesses_left == 0:
            raise EpisodeDone(f"{answer}, and no guess is left: it was {self._hidden}")
        return answer

    def get_reward(self) -> float:
        """1 when the number was found, else 0."""
        return float(self._found)
