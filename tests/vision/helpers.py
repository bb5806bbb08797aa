"""Vision-language models with processors and templates, and episodes in which they really sample what a script says."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.chat.prefix import tool_call
from agentrl.chat.renderer import Renderer
from agentrl.generation import plain, scheduler
from agentrl.generation.factory import make_generator
from agentrl.generation.local import LocalGenerator
from agentrl.generation.plain import PlainGenerator
from agentrl.generation.requests import Request
from agentrl.generation.sampling import process_logits, settings
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.limits import Limits
from agentrl.rollout.tools import make_tools
from agentrl.testing.invariants import assert_row_invariants
from agentrl.testing.vision import picture, tiny_vision
from agentrl.training.batching import MicroBatch, collate
from agentrl.training.scoring import score
from agentrl.types import Task, Trajectory
from tests.chat.members import INTERNVL

_TRL = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"

TEMPLATES = {
    "qwen2_vl": "qwen2_5_vl",
    "qwen2_5_vl": "qwen2_5_vl",
    "qwen3_vl": "qwen3_vl",
    "qwen3_5": "qwen3_5_nothink",
    "gemma3": "gemma3",
    "gemma4": "gemma4_v5",
    "idefics3": "idefics3",
    "smolvlm": "smolvlm",
    "llava_next": "llava_next",
}
"""Each family's own template, by its name in trl (Apache-2.0), a development dependency."""


def own_template(family: str) -> str:
    if family == "internvl":
        return INTERNVL
    return (_TRL / f"{TEMPLATES[family]}.jinja").read_text(encoding="utf-8")


@cache
def family(name: str) -> tuple[Any, Any]:
    """A model and its processor, with the family's own template; shared, so nobody may change them."""
    model, processor = tiny_vision(name, max_position_embeddings=8192)
    processor.chat_template = own_template(name)
    return model, processor


@cache
def renderer_of(name: str) -> Renderer:
    return Renderer(family(name)[1], tools=True)


def look(numbers: list[int]) -> list[dict[str, Any]]:
    """Look at pictures.

    Args:
        numbers: Which ones.
    """
    blocks: list[dict[str, Any]] = [{"type": "text", "text": f"{len(numbers)} pictures: "}]
    return [*blocks, *({"type": "image", "image": picture(number)} for number in numbers)]


SCHEMAS = [tool.schema for tool in make_tools([look]).values()]


def question(*numbers: int) -> list[dict[str, Any]]:
    """A prompt with pictures."""
    pictures = [{"type": "image", "image": picture(number)} for number in numbers]
    return [{"role": "user", "content": [*pictures, {"type": "text", "text": "What is it?"}]}]


def hermes(*numbers: int, count: str = "look") -> str:
    """A call of `look` as Qwen writes it."""
    return f'<tool_call>\n{{"name": "{count}", "arguments": {{"numbers": {list(numbers)}}}}}\n</tool_call>'


def written(name: str, content: str, numbers: Sequence[int] | None = None) -> str:
    """A turn as the family's template writes it, with a call of `look` unless there are no numbers."""
    template = renderer_of(name)._template
    turn: dict[str, Any] = {"role": "assistant", "content": content}
    if numbers is not None:
        turn["tool_calls"] = [tool_call(0, "look", {"numbers": list(numbers)})]
    asked: list[dict[str, Any]] = [{"role": "user", "content": "q"}]
    header, whole = template.render(asked, SCHEMAS, True), template.render([*asked, turn], SCHEMAS, False)
    assert whole.startswith(header)
    return whole[len(header) :].rstrip("\n ")


Script = Sequence[Sequence[int]]
"""The turns of an episode, as ids."""


@contextmanager
def forced(scripts: Callable[[str], Script]) -> Iterator[None]:
    """Local generators draw what a script says, with the logprobs that the model gives it.

    Args:
        scripts: The turns of a session.
    """
    turns: dict[str, int] = {}

    def draw_next(requests: Sequence[Request], logits_RV: Tensor) -> None:
        for request, logits_V in zip(requests, logits_RV, strict=True):
            name = request.session.name
            turn = turns.setdefault(name, 0)
            wanted = scripts(name)[turn]
            token = wanted[len(request.sampled)]
            logprobs_1V = process_logits(logits_V[None], **settings(request.params))
            request.session.row.append(token)
            request.sampled.append(token)
            request.logprobs.append(logprobs_1V[0, token].item())
            if len(request.sampled) == len(wanted):
                turns[name] += 1

    def draw(self: Any, _: Tensor, logits_BV: Tensor) -> Tensor:
        logprobs_BV = logits_BV.float().log_softmax(-1)
        tokens = []
        for row, logprobs_V in zip(self._batch, logprobs_BV, strict=True):
            wanted = scripts(row.name)[turns.setdefault(row.name, 0)] if row.finish is None else [0]
            tokens.append(wanted[len(row.sampled)] if row.finish is None else 0)
            if row.finish is None:
                row.sampled.append(tokens[-1])
                row.logprobs.append(logprobs_V[tokens[-1]].item())
                turns[row.name] += len(row.sampled) == len(wanted)
        return torch.full_like(logits_BV, -torch.inf).scatter_(-1, torch.tensor(tokens)[:, None], 0.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "draw_next", draw_next)
        patch.setattr(plain._Draw, "__call__", draw)
        yield


def play(
    name: str,
    prompts: Sequence[Any],
    scripts: Sequence[Sequence[str]],
    *,
    generator: LocalGenerator | PlainGenerator | None = None,
    limits: Limits | None = None,
    columns: Sequence[dict[str, Any]] | None = None,
    **engine_options: Any,
) -> tuple[list[Trajectory], LocalGenerator | PlainGenerator]:
    """Play episodes, each with a script of turns as text, which end with the template's end of turn.

    Returns:
        The trajectories, and the generator, which is closed.
    """
    model, processor = family(name)
    renderer = engine_options.pop("renderer", None) or renderer_of(name)
    generator = generator or make_generator(model, max_cache_tokens=32768)
    encode = processor.tokenizer
    ends = (renderer.end_of_turn, "<|tool_response>")
    texts = [[turn if turn.endswith(ends) else turn + renderer.end_of_turn for turn in script] for script in scripts]
    turns = [[encode(text, add_special_tokens=False)["input_ids"] for text in script] for script in texts]
    columns = columns or [{} for _ in prompts]
    tasks = [Task(str(i), 0, 7, prompt, given) for i, (prompt, given) in enumerate(zip(prompts, columns, strict=True))]
    engine_options.setdefault("tools", [look])
    engine = RolloutEngine(generator, renderer, limits=limits or Limits(max_context=4096), **engine_options)
    try:
        with forced(lambda session: turns[int(session.split("/")[1])]):
            trajectories = engine.run(tasks)
        engine.release(trajectories)
    finally:
        engine.close()
        generator.close()
    for trajectory in trajectories:
        assert_row_invariants(trajectory)
    return trajectories, generator


def batch_of(name: str, trajectories: Sequence[Trajectory], **options: Any) -> MicroBatch:
    """Rows laid out for a family's model."""
    model, processor = family(name)
    fields = {"pad_token_id": processor.tokenizer.pad_token_id, "placeholder_id": model.config.image_token_id}
    return collate(trajectories, **(fields | options))


def worst_difference(name: str, trajectories: Sequence[Trajectory], model: Any = None) -> float:
    """The largest difference between what sampler and trainer make of a sampled token."""
    batch = batch_of(name, trajectories)
    sampling = renderer_sampling(name)
    with torch.no_grad():
        scores = score(family(name)[0] if model is None else model, batch, sampling)
    assert batch.tokens
    return float((scores.logps_N - batch.sampler_logps_N).abs().max())


def renderer_sampling(name: str) -> Any:
    from agentrl.generation.base import SamplingParams

    return SamplingParams(max_tokens=1, suppress_tokens=renderer_of(name).never_sampled)


def full_render(name: str, trajectory: Trajectory) -> list[int]:
    """The ids of an episode as the processor itself renders and expands the whole conversation."""
    from agentrl.chat.messages import clean_messages
    from agentrl.chat.pictures import take_pictures

    _, processor = family(name)
    messages, pictures = take_pictures([*trajectory.prompt, *trajectory.completion])
    text = renderer_of(name)._template.render(clean_messages(messages), SCHEMAS, False)
    pictures = {"images": [p.convert("RGB") for p in pictures]} if pictures else {}
    bos = processor.tokenizer.bos_token
    adds_bos = bos is not None and not text.startswith(bos)  # as `apply_chat_template` of processors has it
    return list(processor(text=[text], add_special_tokens=adds_bos, **pictures)["input_ids"][0])
