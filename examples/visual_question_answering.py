"""Visual question answering: a tiny model is asked about pictures of a dataset and rewarded for right answers.

A picture shows one to three figures of one shape and one colour. The column `image` has it, `prompt` asks for their
number, their shape or their colour, `answer` is what the reward function compares with. The model is made in place: it
imitates somebody who looks, then somebody who mostly guesses, and then learns from rewards alone, by GRPO or RLOO.

    python examples/visual_question_answering.py --algorithm rloo
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from typing import Any

from datasets import Dataset
from demo_report import print_rewards
from grid_world import TEMPLATE, imitate
from PIL import Image, ImageDraw

from agentrl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from agentrl.chat.renderer import Renderer
from agentrl.rollout.engine import RolloutEngine
from agentrl.testing.scripted import ScriptedGenerator
from agentrl.testing.vision import tiny_vision
from agentrl.types import Task

CELLS, CELL = 3, 8
ANSWERS = {
    "How many are there?": ["one", "two", "three"],
    "Which shape do they have?": ["square", "frame", "cross"],
    "Which colour do they have?": ["red", "green", "blue"],
}
TRAINERS = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}


def draw(number: int, shape: str, colour: str, rng: random.Random) -> Image.Image:
    """A picture of some figures in cells of their own."""
    picture = Image.new("RGB", (CELLS * CELL, CELLS * CELL), "white")
    pen = ImageDraw.Draw(picture)
    for cell in rng.sample(range(CELLS * CELLS), number):
        left, top = CELL * (cell % CELLS) + 1, CELL * (cell // CELLS) + 1
        right, bottom = left + CELL - 3, top + CELL - 3
        if shape == "cross":
            pen.line([(left, top), (right, bottom)], fill=colour)
            pen.line([(left, bottom), (right, top)], fill=colour)
        else:
            pen.rectangle([(left, top), (right, bottom)], fill=colour if shape == "square" else None, outline=colour)
    return picture


def questions(count: int, seed: int) -> Dataset:
    """Pictures with a question and its answer: columns `prompt`, `image` and `answer`."""
    rng = random.Random(seed)
    rows = []
    for number in range(count):
        facts = [rng.choice(words) for words in ANSWERS.values()]
        numbers, shape, colour = facts
        picture = draw(next(iter(ANSWERS.values())).index(numbers) + 1, shape, colour, rng)
        question = list(ANSWERS)[number % len(ANSWERS)]
        prompt = [{"role": "user", "content": question}]
        rows.append({"prompt": prompt, "image": picture, "answer": facts[number % len(ANSWERS)]})
    return Dataset.from_list(rows)


def correct(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """1 for the answer and nothing else."""
    return [float(completion[-1]["content"] == right) for completion, right in zip(completions, answer, strict=True)]


def make_model(data: Dataset, *, looking: int, guessing: int, seed: int = 0) -> tuple[Any, Any]:
    """Make a model that has imitated somebody who looks, then somebody who guesses; and its processor."""
    size = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 8}
    model, processor = tiny_vision("qwen2_5_vl", seed=seed, initializer_range=0.08, vocab_size=304, **size)
    processor.chat_template = TEMPLATE
    processor.tokenizer.add_tokens([*ANSWERS, *(word for words in ANSWERS.values() for word in words)])
    for steps, looks in ((looking, 1.0), (guessing, 0.2)):
        imitate(model, processor, answered(processor, data, looks, seed), steps=steps, seed=seed, report=print)
    return model.eval(), processor


def answered(processor: Any, data: Dataset, looks: float, seed: int) -> list[Any]:
    """Answers of somebody who looks with a probability and guesses otherwise, as rows: the engine asks him."""
    rng = random.Random(seed)
    rows = list(data)

    def answer(session: str, ids: list[int], params: Any) -> list[int]:
        row = rows[int(session.split("/")[1])]
        word = row["answer"] if rng.random() < looks else rng.choice(ANSWERS[row["prompt"][0]["content"]])
        return list(processor.tokenizer(f"{word}<|im_end|>")["input_ids"])

    tasks = [Task(str(number), 0, number, row["prompt"], row) for number, row in enumerate(rows)]
    engine = RolloutEngine(ScriptedGenerator(answer), Renderer(processor))
    try:
        played = engine.run(tasks)
        engine.release(played)
    finally:
        engine.close()
    return played


def main(argv: Sequence[str] | None = None) -> GRPOTrainer | RLOOTrainer:
    """Train, and print the reward of the first and of the last tenth of the steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", choices=TRAINERS, default="grpo")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--imitation", type=int, nargs=2, default=(300, 40), help="steps with who looks, who guesses")
    parser.add_argument("--pictures", type=int, default=600)
    parser.add_argument("--out", default="runs/visual-question-answering")
    options = parser.parse_args(argv)

    looking, guessing = options.imitation
    model, processor = make_model(questions(options.pictures, seed=1), looking=looking, guessing=guessing)
    trainer_class, config_class = TRAINERS[options.algorithm]
    trainer = trainer_class(
        model=model,
        processing_class=processor,
        reward_funcs=correct,
        train_dataset=questions(options.pictures, seed=2),
        args=config_class(
            options.out,
            max_steps=options.steps,
            learning_rate=1e-3,
            per_device_train_batch_size=96,
            num_generations=8,
            max_completion_length=4,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
        ),
    )
    trainer.train()
    print_rewards(trainer)
    return trainer


if __name__ == "__main__":
    main()
