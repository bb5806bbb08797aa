"""Let a model play episodes of an environment, to see how it does before and after training.

The engine that plays the rollouts of training plays these too, so what is measured is what was trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentrl.chat.renderer import Renderer
from agentrl.generation.local import LocalGenerator
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.limits import Limits
from agentrl.types import Task, Trajectory


def play(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    make_environment: Callable[[], Any],
    seeds: Sequence[int],
    *,
    max_completion_length: int = 400,
) -> list[Trajectory]:
    """Play one episode a seed, all side by side, sampling at temperature 1.

    The same model and seeds give the same episodes again.
    """
    generator = LocalGenerator(model)
    limits = Limits(max_completion_length=max_completion_length, max_context=generator.max_context)
    engine = RolloutEngine(generator, Renderer(tokenizer, tools=True), environments=make_environment, limits=limits)
    try:
        episodes = engine.run([Task(group=str(seed), member=0, seed=seed) for seed in seeds])
        engine.release(episodes)
    finally:
        engine.close()
        generator.close()
    return episodes
