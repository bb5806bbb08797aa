"""Training a vision-language model: dataset images, tool images, adapters, a frozen tower, checkpoints."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from agentrl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from agentrl.errors import ConfigurationError, GenerationError
from agentrl.generation.local import LocalGenerator
from agentrl.testing.models import tiny_model
from agentrl.testing.vision import picture, tiny_vision
from agentrl.training.checkpoints import InFlight, load_in_flight, save_in_flight
from agentrl.training.data import Shape
from agentrl.training.loaders import training_loader
from agentrl.training.scoring import score
from agentrl.training.windows import Window
from agentrl.types import Image
from tests.vision.family_table import played
from tests.vision.helpers import batch_of, forced, hermes, look, own_template, play, question, renderer_sampling

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
        "max_steps": 1,
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
        **{"generator": lambda policy: LocalGenerator(policy, max_cache_tokens=32768)} | options,
    )


@cache
def encoded(text):
    return fresh()[1].tokenizer(f"{text}<|im_end|>")["input_ids"]


def script(session):
    """Members differ; each looks twice, at pictures of its own, but for some that do not look."""
    number = int(session.split("/")[1])
    if number == 3:
        return [encoded("nothing")]
    return [encoded(hermes(number)), encoded("Again.\n" + hermes(number, 5)), encoded("done" * (number % 2 + 1))]


def logs_of(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def weights(trainer):
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def changed(trainer, before):
    """Names of the parameters that training has changed."""
    return {name for name, parameter in trainer.model.named_parameters() if not torch.equal(parameter, before[name])}


class Copy(LocalGenerator):
    """Answers as a generator with weights of its own does."""

    exact = True

    async def probe(self, ids, params, images=()):
        return {"it": await self.sample("probe", ids, params, images)}


class Blind(Copy):
    """Reads every picture as a grey one."""

    async def sample(self, session, ids, params, images=()):
        spans = [replace(span, image=self.grey(span.image)) for span in images]
        return await super().sample(session, ids, params, spans)

    @staticmethod
    def grey(image):
        pixels = {"pixel_values": torch.zeros_like(image.inputs["pixel_values"])}
        return Image("0" * 32, image.text, image.placeholders, {**image.inputs, **pixels})


def test_a_sampler_that_reads_images_otherwise_is_found_out_behind_a_picture(tmp_path):
    """Text is right with both; see `agentrl.training.sampler_check`."""
    short = {"max_completion_length": 8}
    trainer_of(tmp_path, config=short, generator=lambda policy: Copy(policy, max_cache_tokens=4096)).train()
    with pytest.raises(GenerationError, match="behind a picture"):
        trainer_of(tmp_path, config=short, generator=lambda policy: Blind(policy, max_cache_tokens=4096)).train()


@pytest.mark.parametrize("cls", [GRPOTrainer, pytest.param(RLOOTrainer, marks=pytest.mark.slow)])
def test_dataset_images_and_tool_images_are_trained_with_ratio_one(tmp_path, cls):
    trainer = trainer_of(tmp_path, cls=cls, tools=[look], config={"beta": 0.1})
    before = weights(trainer)
    with forced(script):
        trainer.train()
    assert max(logs_of(trainer, "sampling/sampling_logp_difference/max")) < 1e-4
    assert {"model.visual.patch_embed.proj.weight", "lm_head.weight"} <= changed(trainer, before)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_frozen_tower_stays_and_the_rest_is_trained(tmp_path, checkpointing):
    config = {"freeze_vision_tower": True, "gradient_checkpointing": checkpointing}
    trainer = trainer_of(tmp_path, tools=[look], config=config)
    before = weights(trainer)
    with forced(script):
        trainer.train()
    moved = changed(trainer, before)
    assert moved
    assert not any("visual" in name for name in moved)
    assert max(logs_of(trainer, "sampling/sampling_logp_difference/max")) < 1e-4


def test_adapters_of_the_language_layers_are_trained(tmp_path):
    lora = LoraConfig(r=2, target_modules=r".*language_model.*(q_proj|v_proj)")
    trainer = trainer_of(tmp_path, tools=[look], peft_config=lora, config={"beta": 0.1})
    before = weights(trainer)
    with forced(script):
        trainer.train()
    moved = changed(trainer, before)
    assert moved
    assert all("lora" in name and "language_model" in name for name in moved)
    assert max(logs_of(trainer, "sampling/sampling_logp_difference/max")) < 1e-4


def test_a_model_without_a_tower_cannot_freeze_one(tmp_path):
    with pytest.raises(ConfigurationError, match="no vision tower"):
        GRPOTrainer(
            tiny_model("qwen3"),
            by_length,
            GRPOConfig(str(tmp_path), freeze_vision_tower=True),
            rows(),
            processing_class=fresh()[1].tokenizer,
        )


def test_a_window_with_images_is_saved_and_loaded(tmp_path):
    """A checkpoint within a window holds what the vision tower reads."""
    trajectories, _ = play(FAMILY, [question(1), question()], [[hermes(2), "x"], ["y"]])
    batches = [batch_of(FAMILY, trajectories), batch_of(FAMILY, trajectories[1:])]
    shape = Shape(prompts=1, generations=2, steps=2)
    window = Window((0, 0), 2, batches, metrics={}, own_metrics=[], tokens_seen=0)
    save_in_flight(tmp_path, InFlight(window), shape)
    loaded = load_in_flight(tmp_path, shape).window.batches
    assert loaded[1].images == {}
    assert loaded[1].image_types is None
    assert loaded[0].images.keys() == batches[0].images.keys()
    for name, tensor in batches[0].images.items():
        assert torch.equal(loaded[0].images[name], tensor)
    assert torch.equal(loaded[0].image_types, batches[0].image_types)


def test_columns_of_images_stay_when_unused_ones_go(tmp_path):
    data = rows().add_column("other", [1, 2])
    config = GRPOConfig(
        str(tmp_path), remove_unused_columns=True, num_generations=2, per_device_train_batch_size=4, max_steps=1
    )
    [step, *_] = training_loader(data, config)
    assert step.rows[0].keys() == {"prompt", "image"}


def test_a_processor_needs_a_model_that_sees(tmp_path):
    with pytest.raises(ConfigurationError, match="sees no images"):
        trainer_of(tmp_path, model=tiny_model("qwen3", vocab_size=300))


def test_a_model_and_its_processor_are_loaded_by_name(tmp_path):
    """Those of Gemma 3 can be saved and loaded without torchvision."""
    model, processor = tiny_vision("gemma3")
    processor.chat_template = own_template("gemma3")
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    config = GRPOConfig(str(tmp_path), max_steps=1, num_generations=2, per_device_train_batch_size=2)
    trainer = GRPOTrainer(str(tmp_path / "model"), by_length, config, rows())
    assert type(trainer.model) is type(model)
    assert trainer.collector.renderer.sees_images


def gradients(name, model, trajectories):
    """The gradient of the sum of the logprobs, by parameter."""
    batch = batch_of(name, trajectories)
    score(model, batch, renderer_sampling(name)).logps_N.sum().backward()
    found = {key: parameter.grad.clone() for key, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return found


def assert_same(one, other):
    assert one.keys() == other.keys()
    for key, gradient in one.items():
        torch.testing.assert_close(gradient, other[key], rtol=1e-3, atol=1e-4 * float(gradient.abs().max() + 1))


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3"])
def test_gradient_checkpointing_changes_no_gradient_of_rows_with_images(name):
    """Of rows with 0 to 3 images together; the tower is recomputed with the rest."""
    model, trajectories = tiny_vision(name)[0].train(), played(name).trajectories
    plain = gradients(name, model, trajectories)
    assert any("vision" in key or "visual" in key for key in plain)
    model.gradient_checkpointing_enable()
    assert_same(gradients(name, model, trajectories), plain)


def test_rows_with_and_without_images_in_one_micro_batch_are_trained_as_alone():
    model, trajectories = tiny_vision(FAMILY)[0], played(FAMILY).trajectories
    assert [len(trajectory.images) for trajectory in trajectories] == [0, 1, 2, 3]
    total = {}
    for trajectory in trajectories:
        for key, gradient in gradients(FAMILY, model, [trajectory]).items():
            total[key] = total.get(key, 0) + gradient
    assert_same(gradients(FAMILY, model, trajectories), total)
