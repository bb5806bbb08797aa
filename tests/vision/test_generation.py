"""The generators with images: what is shared, cut into chunks, evicted and encoded, and comes out all the same."""

import asyncio
from dataclasses import replace

import pytest
import torch

from agentrl.errors import GenerationError
from agentrl.generation import vision
from agentrl.generation.base import SamplingParams
from agentrl.generation.continuous import ContinuousGenerator
from agentrl.generation.local import LocalGenerator
from agentrl.generation.plain import PlainGenerator
from agentrl.testing.models import tiny_model
from agentrl.testing.vision import TINY_VISION_FAMILIES
from agentrl.training.scoring import score
from agentrl.types import Outcome, Task, Trajectory
from tests.vision.helpers import batch_of, family, question, renderer_of, renderer_sampling

FAMILY = "qwen3_vl"


def sample(name, generator, prompts, tokens=6, sessions=None, **settings):
    """Sample one turn after each prompt, all at once; gives rows."""
    renderer = renderer_of(name)
    encoded = [renderer.encode_prompt(prompt, None) for prompt in prompts]
    params = [
        SamplingParams(max_tokens=tokens, seed=index, suppress_tokens=renderer.never_sampled, **settings)
        for index in range(len(prompts))
    ]
    sessions = sessions or [str(index) for index in range(len(prompts))]

    async def all_of_them():
        turns = zip(sessions, encoded, params, strict=True)
        return await asyncio.gather(*(generator.sample(s, e.ids, p, e.images) for s, e, p in turns))

    samples = asyncio.run(all_of_them())
    return [
        Trajectory(
            task=Task("g", index, 0),
            prompt="",
            prompt_ids=e.ids,
            completion="",
            completion_ids=s.ids,
            loss_mask=[1] * len(s.ids),
            logprobs=s.logprobs,
            outcome=Outcome.FINISHED,
            images=e.images,
        )
        for index, (e, s) in enumerate(zip(encoded, samples, strict=True))
    ]


def worst(name, rows, **settings):
    batch = batch_of(name, rows)
    with torch.no_grad():
        scores = score(family(name)[0], batch, replace(renderer_sampling(name), **settings))
    return float((scores.logps_N - batch.sampler_logps_N).abs().max())


PROMPTS = [question(1), question(), question(1, 2), question(3), question(1)]


@pytest.mark.parametrize("name", TINY_VISION_FAMILIES)
def test_plain_generation_agrees_with_the_trainer(name):
    generator = PlainGenerator(family(name)[0])
    rows = sample(name, generator, PROMPTS)
    generator.close()
    assert worst(name, rows) < 1e-4
    assert generator.stats.images_encoded == 3


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3", "idefics3"])
def test_prefilling_in_chunks_cuts_no_image(name):
    generator = LocalGenerator(family(name)[0], max_cache_tokens=8192, max_batch_tokens=7)
    rows = sample(name, generator, PROMPTS)
    generator.close()
    assert worst(name, rows) < 1e-4
    assert generator.stats.images_encoded == 3


@pytest.mark.parametrize("settings", [{"repetition_penalty": 1.5}, {"top_k": 20, "temperature": 0.7}], ids=str)
@pytest.mark.parametrize("make", [LocalGenerator, PlainGenerator])
def test_both_sides_process_logits_alike(make, settings):
    """A repetition penalty sees the placeholders of images as any other id."""
    generator = make(family(FAMILY)[0])
    rows = sample(FAMILY, generator, PROMPTS, **settings)
    generator.close()
    assert worst(FAMILY, rows, **settings) < 1e-4


def test_transformers_continuous_batching_serves_no_images():
    generator = ContinuousGenerator(tiny_model("qwen3", vocab_size=300))
    with pytest.raises(GenerationError, match="serves text only"):
        sample(FAMILY, generator, [question(1)])
    generator.close()


def test_a_text_model_serves_no_images():
    for make in (LocalGenerator, PlainGenerator):
        generator = make(tiny_model("qwen3", vocab_size=300))
        with pytest.raises(GenerationError, match="sees none"):
            sample(FAMILY, generator, [question(1)])
        generator.close()


def test_rows_with_other_pictures_share_only_the_text_before_them():
    generator = LocalGenerator(family(FAMILY)[0], max_cache_tokens=8192)
    first = sample(FAMILY, generator, [question(1)])
    second = sample(FAMILY, generator, [question(2)], sessions=["other"])
    generator.close()
    assert first[0].prompt_ids == second[0].prompt_ids
    assert worst(FAMILY, [*first, *second]) < 1e-4


def test_a_group_encodes_and_prefills_its_image_once():
    generator = LocalGenerator(family(FAMILY)[0], max_cache_tokens=8192)
    rows = sample(FAMILY, generator, [question(1, 2)] * 8)
    generator.close()
    assert generator.stats.images_encoded == 2
    assert generator.stats.prefilled_tokens <= len(rows[0].prompt_ids) + 8
    assert worst(FAMILY, rows) < 1e-4


def test_a_session_that_lost_its_cache_does_not_encode_again():
    """Rows that are prefilled again find the features of their images."""
    rows = [question(number, number + 1) for number in range(4)]
    generator = LocalGenerator(family(FAMILY)[0], max_cache_tokens=90)
    played = sample(FAMILY, generator, rows)
    again = sample(FAMILY, generator, rows)
    generator.close()
    assert generator.stats.images_encoded == 5
    assert generator.stats.evictions
    assert worst(FAMILY, [*played, *again]) < 1e-4


@pytest.mark.parametrize("make", [LocalGenerator, PlainGenerator])
def test_new_weights_encode_anew(make):
    generator = make(family(FAMILY)[0])
    sample(FAMILY, generator, [question(1)])
    generator.sync(1)
    sample(FAMILY, generator, [question(1)])
    generator.close()
    assert generator.stats.images_encoded == 2


def test_features_of_a_session_stay_while_it_is_played_and_others_as_far_as_there_is_room(monkeypatch):
    """`model.generate` asks for a row's images in every turn, more of them than are kept for nobody."""
    monkeypatch.setattr(vision, "_KEPT_BYTES", 0)
    generator = PlainGenerator(family(FAMILY)[0])
    for _ in range(3):
        rows = sample(FAMILY, generator, [question(1, 2), question(3)])
    assert generator.stats.images_encoded == 3
    generator.release("0")
    generator.release("1")
    again = [row for number in (4, 1) for row in sample(FAMILY, generator, [question(number)], sessions=["other"])]
    generator.close()
    assert generator.stats.images_encoded == 3 + 2, "the third one took the place of the first"
    assert worst(FAMILY, [*rows, *again]) < 1e-4


def test_scoring_reads_the_pixels_that_sampling_read(monkeypatch):
    """The tensors that reach the vision tower are the same, picture by picture."""
    model, _ = family(FAMILY)
    seen = []
    tower = model.model.visual.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((args or (kwargs["hidden_states"],))[0].clone()), with_kwargs=True
    )
    generator = LocalGenerator(model, max_cache_tokens=8192)
    rows = sample(FAMILY, generator, [question(1), question(), question(2, 3)])
    generator.close()
    sampled, seen[:] = {t.numpy().tobytes() for t in seen}, []
    worst(FAMILY, rows)
    tower.remove()
    [scored] = seen
    sizes = [span.image.inputs["pixel_values"].shape[0] for row in rows for span in row.images]
    assert {part.numpy().tobytes() for part in scored.split(sizes)} == sampled
