"""Training a vision-language model: dataset images, tool images, adapters, a frozen tower, checkpoints."""

import pytest
import torch
from datasets import Dataset

from agentrl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from agentrl.generation.local import LocalGenerator
from agentrl.testing.vision import picture, tiny_vision
from tests.vision.helpers import forced, hermes, look, own_template, renderer_of

FAMILY = "qwen3_vl"


def fresh():
    model, processor = tiny_vision(FAMILY)
    processor.chat_template = own_template(FAMILY)
    return model, processor


def rows(count=2):
    prompts = [[{"role": "user", "content": f"What is it? {i}"}] for i in range(count)]
    return Dataset.from_dict({"prompt": prompts, "image": [picture(i) for i in range(count)]})


def by_length(completion_ids, **_):
    return [float(sum(ids) % 7) for ids in completion_ids]


def trainer_of(tmp_path, *, cls=GRPOTrainer, config=None, **options):
    settings = {
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 400,
        "logging_steps": 1,
        "save_strategy": "no",
        "learning_rate": 1e-3,
        "disable_tqdm": True,
    }
    model, processor = fresh()
    config_class = GRPOConfig if cls is GRPOTrainer else RLOOConfig
    return cls(
        model=options.pop("model", model),
        processing_class=processor,
        reward_funcs=by_length,
        train_dataset=rows(),
        args=config_class(str(tmp_path), **(settings | (config or {}))),
        generator=lambda policy: LocalGenerator(policy, max_cache_tokens=32768),
        **options,
    )


def script(session):
    """Members differ; each looks twice, at pictures of its own."""
    number = int(session.split("/")[1])
    processor = fresh()[1]
    texts = [hermes(number), "Again.\n" + hermes(number, 5), "done" * (number % 2 + 1)]
    return [processor.tokenizer(f"{t}<|im_end|>")["input_ids"] for t in texts]


def logs_of(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


@pytest.mark.parametrize("cls", [GRPOTrainer, RLOOTrainer])
def test_dataset_images_and_tool_images_are_trained_with_ratio_one(tmp_path, cls):
    trainer = trainer_of(tmp_path, cls=cls, tools=[look], config={"beta": 0.1})
    before = trainer.model.model.visual.patch_embed.proj.weight.detach().clone()
    with forced(script):
        trainer.train()
    assert max(logs_of(trainer, "sampling/sampling_logp_difference/max")) < 1e-4
    assert not torch.equal(before, trainer.model.model.visual.patch_embed.proj.weight)
