"""A tiny agent for the examples: half a million parameters, made in place in seconds, no downloads.

It has a tokenizer and a chat template of its own, and has read enough recorded episodes to call tools in the
right form. What it has not learned is to choose well: that is left to reinforcement learning. Use a real model
in its place by passing that model's name to the trainer.
"""

from tiny_agent.play import play
from tiny_agent.transcripts import Transcript, record
from tiny_agent.warm_start import Lesson, Recipe, make_tiny_agent

__all__ = ["Lesson", "Recipe", "Transcript", "make_tiny_agent", "play", "record"]
