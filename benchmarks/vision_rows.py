"""Padded or packed: what it costs to train rows with and without images.

A window of rows of very different lengths, with 0 to 3 images each, is scored and differentiated

- padded, micro-batches as the rows were played,
- padded, rows of about the same length together, as the trainer does,
- packed, the same number of rows end to end, with positions of their own and a mask that keeps them apart,

all on the same model (Qwen2.5-VL's architecture) in turn. Packing has no padding, but attention on the CPU looks at all
pairs of positions of a micro-batch, of other rows too. Printed are CPU seconds (the least of the repeats), the share of
padding, and the largest difference to the logprobs of the first way, which must stay below 1e-4.

    python benchmarks/vision_rows.py [--rows 32] [--micro-batch 8] [--hidden 64] [--layers 2] [--repeats 5] [--quick]
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from agentrl.chat.images import ImageReader, image_types
from agentrl.generation.base import GenerationStats, SamplingParams
from agentrl.generation.vision import VisionModel
from agentrl.testing.vision import picture, tiny_vision
from agentrl.training.balance import Costs, RowSize, plan_window
from agentrl.training.batching import Layout, MicroBatch, collate, split
from agentrl.training.scoring import score
from agentrl.types import Outcome, Task, Trajectory

SAMPLING = SamplingParams(max_tokens=1)


def make_rows(processor: Any, count: int, shortest: int, longest: int, seed: int = 0) -> list[Trajectory]:
    """Rows of random text, lengths spread evenly on a logarithmic scale, with 0 to 3 images between."""
    rng = random.Random(seed)
    reader = ImageReader(processor)
    rows = []
    for number in range(count):
        images = [reader.process(picture(10 * number + i, 32, 32)) for i in range(rng.randrange(4))]
        length = round(shortest * (longest / shortest) ** rng.random()) // (len(images) + 1)
        words = [[rng.randrange(10, 200) for _ in range(length)] for _ in range(len(images) + 1)]
        ids = list(words[0])
        for image, after in zip(images, words[1:], strict=True):
            ids += processor.tokenizer(f"<|vision_start|>{image.text}<|vision_end|>")["input_ids"] + after
        sampled = length // 2
        rows.append(
            Trajectory(
                task=Task(str(number), 0, 0),
                prompt="",
                prompt_ids=ids[:-sampled],
                completion="",
                completion_ids=ids[-sampled:],
                loss_mask=[1] * sampled,
                logprobs=[0.0] * sampled,
                outcome=Outcome.FINISHED,
                images=reader.locate(ids, images),
            )
        )
    return rows


def padded(model: Any, rows: Sequence[Trajectory]) -> MicroBatch:
    return collate(rows, pad_token_id=0, placeholder_id=model.config.image_token_id)


def packed(model: Any, rows: Sequence[Trajectory]) -> MicroBatch:
    """The rows end to end: their text as `collate` packs it, their images and positions as each row has them alone."""
    placeholder = model.config.image_token_id
    side_by_side = padded(model, rows)
    text = collate([replace(row, images=()) for row in rows], pad_token_id=0, layout=Layout.PACKED)
    vision = VisionModel(model, GenerationStats())
    types, positions = [], []
    for row in rows:
        ids = row.prompt_ids + row.completion_ids
        plain = torch.arange(len(ids))
        seen = vision.positions(ids, row.images)
        types += image_types(ids, row.images, placeholder)
        positions.append(torch.cat([plain[None], plain.expand(3, -1) if seen is None else seen]))
    return replace(
        text,
        position_ids=torch.cat(positions, 1)[:, None],
        image_types=None if side_by_side.image_types is None else torch.tensor([types]),
        images=side_by_side.images,
    )


def plan(model: Any, rows: Sequence[Trajectory], size: int, layout: Layout) -> list[list[int]]:
    """Micro-batches of the window as the trainer would make them."""
    sizes = [RowSize(r.task.group, len(r.prompt_ids), len(r.completion_ids), len(r.logprobs)) for r in rows]
    batches = len(rows) // size
    [parts] = plan_window(sizes, Costs.of(model, layout), processes=1, batches=batches, size=size, together=batches)
    return parts


def run(model: Any, batches: Sequence[MicroBatch]) -> tuple[float, list[torch.Tensor]]:
    """CPU seconds of all micro-batches, forward and backward, and the logprobs."""
    logps = []
    start = time.process_time()
    for batch in batches:
        scores = score(model, batch, SAMPLING, with_entropy=False)
        scores.logps_N.sum().backward()
        logps.append(scores.logps_N.detach())
    taken = time.process_time() - start
    model.zero_grad()
    return taken, logps


def by_row(parts: Sequence[Sequence[int]], batches: Sequence[MicroBatch], logps: Sequence[torch.Tensor]) -> Any:
    """Logprobs in the order of the window."""
    pairs = zip(parts, batches, logps, strict=True)
    rows = {number: values[batch.row_N == r] for part, batch, values in pairs for r, number in enumerate(part)}
    return torch.cat([rows[number] for number in sorted(rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--shortest", type=int, default=60)
    parser.add_argument("--longest", type=int, default=600)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.micro_batch, options.longest, options.repeats = 4, 2, 90, 1
    text = {"hidden_size": options.hidden, "intermediate_size": 2 * options.hidden, "num_attention_heads": 8}
    scale = {"initializer_range": 0.08, "num_key_value_heads": 8, "num_hidden_layers": options.layers}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    half = options.hidden // 16
    rope["rope_parameters"]["mrope_section"] = [half // 4, half // 4, half - half // 4 * 2]  # type: ignore[assignment]
    model, processor = tiny_vision("qwen2_5_vl", **text, **scale, **rope)
    rows = make_rows(processor, options.rows, options.shortest, options.longest)

    played = [list(part) for part in split(range(len(rows)), options.micro_batch)]
    ways = {
        "padded, as played": (played, padded),
        "padded, by length": (plan(model, rows, options.micro_batch, Layout.PADDED), padded),
        "packed": (plan(model, rows, options.micro_batch, Layout.PACKED), packed),
    }
    batches = {name: [lay(model, [rows[r] for r in part]) for part in parts] for name, (parts, lay) in ways.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    logps = {}
    for _ in range(options.repeats):
        for name in ways:
            taken, found = run(model, batches[name])
            seconds[name].append(taken)
            logps[name] = by_row(ways[name][0], batches[name], found)
    used = sum(len(row.prompt_ids) + len(row.completion_ids) for row in rows)
    worst = 0.0
    print(f"{len(rows)} rows, {used} tokens, {sum(len(row.images) for row in rows)} images")
    for name in ways:
        difference = float((logps[name] - logps["padded, as played"]).abs().max())
        worst = max(worst, difference)
        padding = 1 - used / sum(batch.input_ids.numel() for batch in batches[name])
        print(f"{name:18} {min(seconds[name]):7.3f} CPU s   {padding:5.1%} padding   difference {difference:.1e}")
    sys.exit(worst > 1e-4)


if __name__ == "__main__":
    main()
