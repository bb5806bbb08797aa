"""A tiny vision-language model learns to walk in a grid world that it only sees: no word says where anything is.

The world is a picture of 3 x 3 cells. The agent is the blue one, the goal the green one; each move is answered with the
next picture. The model is made in place: it imitates a careless player for a minute, so that it calls the tool in the
right form and goes the right way now and then, and then learns from rewards alone.

python examples/grid_world.py
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from typing import Any, Literal

import torch
from demo_report import print_rewards
from PIL import Image

from agentrl import EpisodeDone, GRPOConfig, GRPOTrainer
from agentrl.chat.renderer import Renderer
from agentrl.generation.base import SamplingParams
from agentrl.rollout.engine import RolloutEngine
from agentrl.testing.scripted import ScriptedGenerator
from agentrl.testing.vision import tiny_vision
from agentrl.training.batching import collate
from agentrl.training.scoring import score
from agentrl.types import Task

SIZE, CELL, BUDGET = 3, 8, 4
EPISODES = 400
"""Games of each player that the model reads."""
MOVES = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}
AGENT, GOAL, FLOOR = (40, 60, 230), (40, 220, 60), (245, 245, 245)

WORDS = ['{"name": "go", "arguments": {"to": "', '"}}', *MOVES, "assistant", "user", "tool"]
"""One token each, so that a move is a handful of them."""

# Short, so that the picture is most of what the model reads.
TEMPLATE = """
{%- macro content(message) -%}
    {%- if message.content is string -%}{{- message.content -}}{%- else -%}
        {%- for block in message.content -%}
            {{- '<|vision_start|><|image_pad|><|vision_end|>' if block.type == 'image' else block.text -}}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- for tool in tools or [] -%}
    {{- '<|im_start|>system\\n' + tool.function.name + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' + content(message) -}}
    {%- for call in message.tool_calls or [] -%}
        {{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' -}}
        {{- call.function.arguments | tojson + '}</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{{- '<|im_start|>assistant\\n' if add_generation_prompt else '' -}}
"""


class GridWorld:
    """Walk from the blue cell to the green one."""

    def reset(self, seed: int | None = None, **columns) -> list[dict[str, Any]]:
        """Put agent and goal in two cells; the picture of them is all that the model gets."""
        cells = [(x, y) for x in range(SIZE) for y in range(SIZE)]
        self.agent, self.goal = random.Random(seed).sample(cells, 2)
        self.moves_left = BUDGET
        return [{"type": "image", "image": self._picture()}]

    def go(self, to: Literal["up", "down", "left", "right"]) -> Image.Image:
        """Go one cell.

        Args:
            to: Where to.
        """
        dx, dy = MOVES[to]
        self.agent = tuple(min(max(at + by, 0), SIZE - 1) for at, by in zip(self.agent, (dx, dy), strict=True))
        self.moves_left -= 1
        if self.agent == self.goal:
            raise EpisodeDone("there")
        if self.moves_left == 0:
            raise EpisodeDone("too late")
        return self._picture()

    def get_reward(self) -> float:
        """1 at the goal, else 0."""
        return float(self.agent == self.goal)

    def _picture(self) -> Image.Image:
        picture = Image.new("RGB", (SIZE * CELL, SIZE * CELL), FLOOR)
        for (x, y), colour in ((self.goal, GOAL), (self.agent, AGENT)):
            picture.paste(colour, (x * CELL, y * CELL, (x + 1) * CELL, (y + 1) * CELL))
        return picture


def best_move(picture: Image.Image) -> str:
    """What a player who sees the picture does."""
    at = {picture.getpixel((x * CELL, y * CELL)): (x, y) for x in range(SIZE) for y in range(SIZE)}
    (ax, ay), (gx, gy) = at[AGENT], at[GOAL]
    if ax != gx:
        return "right" if gx > ax else "left"
    return "down" if gy > ay else "up"


def make_agent(
    *, seed: int = 0, good: int = 200, careless: int = 60, blunders: float = 0.6, report: Callable[[str], None] = print
) -> tuple[Any, Any]:
    """Make a model that has imitated a good player for some steps, then a careless one; and its processor."""
    size = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 8}
    model, processor = tiny_vision("qwen2_5_vl", seed=seed, initializer_range=0.08, vocab_size=288, **size)
    processor.chat_template = TEMPLATE
    processor.tokenizer.add_tokens(WORDS)
    for steps, rate in ((good, 0.0), (careless, blunders)):
        rows = played(processor, episodes=EPISODES, blunders=rate, seed=seed)
        imitate(model, processor, rows, steps=steps, seed=seed, report=report)
    return model.eval(), processor


def played(processor: Any, *, episodes: int, blunders: float, seed: int) -> list[Any]:
    """Episodes of a player who blunders now and then, as rows: the engine of training plays them."""
    renderer = Renderer(processor, tools=True)
    worlds: dict[str, GridWorld] = {}

    def move(session: str, ids: list[int], params: SamplingParams) -> list[int]:
        rng = random.Random(f"{seed} {blunders} {session} {len(ids)}")  # whichever episode comes first
        to = best_move(worlds[session]._picture()) if rng.random() >= blunders else rng.choice(list(MOVES))
        call = f'<tool_call>{{"name": "go", "arguments": {{"to": "{to}"}}}}</tool_call><|im_end|>'
        return list(processor.tokenizer(call)["input_ids"])

    class Watched(GridWorld):
        def reset(self, seed: int | None = None, **columns) -> list[dict[str, Any]]:
            worlds[f"1/{columns['number']}/1"] = self
            return super().reset(seed)

    tasks = [Task(str(i), 0, seed * 1_000_003 + i, columns={"number": i}) for i in range(episodes)]
    engine = RolloutEngine(ScriptedGenerator(move), renderer, environments=Watched)
    try:
        rows = engine.run(tasks)
        engine.release(rows)
    finally:
        engine.close()
    return rows


def imitate(model: Any, processor: Any, rows: list[Any], *, steps: int, seed: int, report: Any) -> None:
    """Raise the logprobs of what the player did."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps, pct_start=0.1)
    layout = {"pad_token_id": processor.tokenizer.pad_token_id, "placeholder_id": model.config.image_token_id}
    for step in range(steps):
        batch = collate(rng.sample(rows, 16), **layout)
        loss = -score(model, batch, SamplingParams(max_tokens=1), with_entropy=False).logps_N.mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            report(f"imitation, step {step}: {loss.item():.3f}")


def main(argv: list[str] | None = None) -> GRPOTrainer:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument(
        "--imitation", type=int, nargs=2, default=(200, 60), help="steps with a good and a careless player"
    )
    parser.add_argument("--out", default="runs/grid_world")
    options = parser.parse_args(argv)

    model, processor = make_agent(good=options.imitation[0], careless=options.imitation[1])
    trainer = train(model, processor, steps=options.steps, out=options.out)
    print_rewards(trainer)
    return trainer


def train(model: Any, processor: Any, *, steps: int, out: str, generator: Any = None) -> GRPOTrainer:
    """Let an agent learn from rewards."""
    trainer = GRPOTrainer(
        model=model,
        processing_class=processor,
        environment_factory=GridWorld,
        generator=generator,
        args=GRPOConfig(
            output_dir=out,
            max_steps=steps,
            learning_rate=3e-4,
            per_device_train_batch_size=32,
            num_generations=8,
            max_completion_length=400,
            gradient_checkpointing=False,
            logging_steps=1,
            report_to="none",
        ),
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
