"""Let a model play episodes of an environment, to see how it does before and after training.

This is a plain loop over `model.generate` that needs nothing of the framework. It knows no more than the
trainer's rollouts do: a turn is sampled, its tool calls are run, their answers are appended, and so on until
the environment ends the episode or the model answers without a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tiny_agent.transcripts import Message, call_tool, tools_of


@dataclass
class Episode:
    """One episode as it was played."""

    environment: Any
    messages: list[Message]
    reward: float = 0.0
    unreadable: int = 0
    """How many turns held a call that could not be read."""
    over: bool = field(default=False, repr=False)


def play(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    make_environment: Callable[[], Any],
    seeds: Sequence[int],
    *,
    max_turns: int = 16,
    max_new_tokens: int = 64,
) -> list[Episode]:
    """Play one episode a seed, all side by side, sampling at temperature 1.

    The same model and seeds give the same episodes again.
    """
    episodes = []
    for seed in seeds:
        environment = make_environment()
        episodes.append(Episode(environment, [{"role": "user", "content": environment.reset(seed=seed)}]))

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for _ in range(max_turns):
            running = [episode for episode in episodes if not episode.over]
            if not running:
                break
            for episode, text in zip(running, _sample(model, tokenizer, running, max_new_tokens), strict=True):
                _take_turn(tokenizer, episode, text)

    for episode in episodes:
        episode.reward = float(episode.environment.get_reward())
    return episodes


def _sample(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, episodes: list[Episode], max_new_tokens: int
) -> list[str]:
    prompts = [
        tokenizer.apply_chat_template(
            episode.messages,
            tools=tools_of(episode.environment),
            add_generation_prompt=True,
            tokenize=False,
        )
        for episode in episodes
    ]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    inputs = inputs.to(model.device)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        ids = model.generate(
            **inputs, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=max_new_tokens
        )
    model.train(was_training)
    return tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :])


def _take_turn(tokenizer: PreTrainedTokenizerBase, episode: Episode, text: str) -> None:
    text = text.replace(tokenizer.pad_token, "")
    try:
        message = tokenizer.parse_response(text, prefix="")
        calls = [call["function"] for call in message.get("tool_calls", [])]
        if not all(isinstance(call, dict) and isinstance(call.get("arguments"), dict) for call in calls):
            raise ValueError("a tool call is a JSON object with a name and arguments")
    except ValueError as error:
        episode.unreadable += 1
        episode.messages += [
            {"role": "assistant", "content": text.removesuffix(tokenizer.eos_token)},
            {"role": "tool", "content": f"error: {error}"},
        ]
        return

    episode.messages.append(message)
    episode.over = not calls
    for call in calls:
        answer, ended = call_tool(episode.environment, call)
        episode.messages.append({"role": "tool", "name": call["name"], "content": answer})
        episode.over = episode.over or ended
