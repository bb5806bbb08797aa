"""What is said to vLLM and how its answers are read."""

from __future__ import annotations

import base64
import dataclasses

import msgspec
import pytest
import torch

from agentrl.chat.images import ImageReader, encode_with_images
from agentrl.errors import ConfigurationError, GenerationError
from agentrl.generation.base import SamplingParams
from agentrl.generation.vllm_images import items
from agentrl.generation.vllm_protocol import check_sampling, read_turn, turn_request
from agentrl.testing.vision import TINY_VISION_FAMILIES, picture, tiny_vision
from agentrl.types import FinishReason, Image, ImageSpan

PARAMS = SamplingParams(max_tokens=4, stop_ids=frozenset({9, 7}), temperature=0.5, top_k=3, seed=2**62)
# Recorded from vLLM 0.32 (fields that nobody reads are left out).
COMPLETION = {
    "index": 0,
    "text": "O?0",
    "logprobs": {"text_offset": [0, 1, 2], "token_logprobs": [-6.25, -5.5, -4.25], "tokens": ["O", "?", "0"]},
    "finish_reason": "stop",
    "stop_reason": 9,
    "token_ids": [46, 30, 9],
    "prompt_token_ids": [5, 6],
}
GENERATED = {
    "index": 0,
    "finish_reason": "length",
    "token_ids": [1, 2, 3, 4],
    "weight_versions": [
        {"version": "3", "start": 0, "end": 1},
        {"version": "4", "start": 1, "end": 4},
    ],
    "logprobs": {"content": [{"token_id": i, "logprob": -0.5 * i, "rank": 1} for i in (1, 2, 3, 4)]},
}


def reply(choice, **changes):
    return {"choices": [{**choice, **changes}]}


def test_a_request_says_everything_that_a_checkpoint_could_say_otherwise():
    """vLLM fills in temperature, top-p, penalties and EOS from generation_config.json."""
    path, body = turn_request("m", [5, 6], PARAMS, {"min_tokens": 2}, "a+")
    assert path == "/v1/completions"
    expected = {
        "model": "m",
        "prompt": [5, 6],
        "return_token_ids": True,
        "max_tokens": 4,
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": 3,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": 2**62,
        "logprobs": 0,
        "stop_token_ids": [7, 9],
        "ignore_eos": True,
        "min_tokens": 2,
        "structured_outputs": {"regex": "a+"},
    }
    assert body == expected
    path, body = turn_request("m", [5, 6], PARAMS, {}, generates=True)
    assert path == "/inference/v1/generate"
    assert body["token_ids"] == [5, 6]
    assert body["sampling_params"]["stop_token_ids"] == [7, 9]


def test_a_turn_is_read_with_its_stop_token():
    sample = read_turn(reply(COMPLETION), [5, 6], PARAMS, 8)
    assert (sample.ids, sample.logprobs) == ([46, 30, 9], [-6.25, -5.5, -4.25])
    assert (sample.finish, sample.weights_version, sample.updates) == (FinishReason.STOP, 8, ())


def test_a_turn_that_outlived_an_update_says_which_weights_drew_which_token():
    sample = read_turn(reply(GENERATED), [5], PARAMS, 8)
    assert (sample.weights_version, sample.updates) == (3, ((1, 4),))
    assert sample.finish is FinishReason.LENGTH
    unnamed = reply(GENERATED, weight_versions=[{"version": "default", "start": 0, "end": 4}])
    assert read_turn(unnamed, [5], PARAMS, 0).weights_version == 0


BROKEN = {
    "no choices": {"choices": []},
    "null choices": {"choices": None},
    "no object": None,
    "null ids": reply(COMPLETION, token_ids=None),
    "null logprobs": reply(COMPLETION, logprobs=None),
    "null entries": reply(COMPLETION, logprobs={"token_logprobs": None}),
    "one null logprob": reply(COMPLETION, logprobs={"token_logprobs": [-1.0, None, -1.0]}),
    "too few logprobs": reply(COMPLETION, logprobs={"token_logprobs": [-1.0]}),
    "no token": reply(COMPLETION, token_ids=[], logprobs={"token_logprobs": []}),
    "too many tokens": reply(COMPLETION, token_ids=[1] * 5, logprobs={"token_logprobs": [-1.0] * 5}),
    "another prompt": reply(COMPLETION, prompt_token_ids=[5, 7]),
    "aborted": reply(COMPLETION, token_ids=[1], logprobs={"token_logprobs": [-1.0]}, finish_reason="abort"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_j04_a_reply_with_holes_is_an_error_in_words(name):
    with pytest.raises(GenerationError, match="vLLM"):
        read_turn(BROKEN[name], [5, 6], PARAMS, 0)


@pytest.mark.parametrize(
    ("params", "extras", "words"),
    [
        ({"temperature": 0.001}, {}, "temperature=0.001"),
        ({"top_p": 0.9, "min_p": 0.1}, {}, "before top-p"),
        ({}, {"num_beams": 4}, "num_beams"),
        ({}, {"n": 2}, "'n'"),
        ({}, {"stop": ["x"]}, "stop"),
    ],
)
def test_what_vllm_would_sample_otherwise_or_ignore_is_refused(params, extras, words):
    """J02: both sides score the same distribution, or the setting is refused."""
    with pytest.raises(ConfigurationError, match=words):
        check_sampling(SamplingParams(max_tokens=1, **params), extras)
    check_sampling(SamplingParams(max_tokens=1, top_p=0.9, top_k=5, repetition_penalty=1.2), {"min_tokens": 2})


def image_at(start: int, digest: str) -> ImageSpan:
    pixels, grid = torch.arange(32.0).view(8, 4), torch.tensor([[1, 4, 2]])
    return ImageSpan(Image(digest, "", 2, {"pixel_values": pixels, "image_grid_thw": grid}), start, start + 2)


def test_images_go_with_the_trainers_own_ids_and_pixels():
    """The layout is that of vLLM's `MultiModalFeatures`; the tests marked vllm have vLLM read it."""
    images = [image_at(1, "a"), image_at(4, "b")]
    path, body = turn_request("m", [5, 3, 3, 6, 3, 3, 7], PARAMS, {}, images=images, generates=True)
    assert path == "/inference/v1/generate"
    assert body["token_ids"] == [5, 3, 3, 6, 3, 3, 7]
    features = body["features"]
    assert features["mm_hashes"] == {"image": ["a", "b"]}
    assert features["mm_placeholders"] == {"image": [{"offset": 1, "length": 2}, {"offset": 4, "length": 2}]}
    first, second = (msgspec.msgpack.decode(base64.b64decode(item)) for item in features["kwargs_data"]["image"])
    assert first == second
    dtype, shape, data = first["pixel_values"]["data"]
    assert (dtype, shape, data.code) == ("float32", [8, 4], 3)
    assert torch.frombuffer(bytearray(data.data), dtype=torch.float32).tolist() == list(range(32))
    assert first["pixel_values"]["field"] == ["flat", {"slices": [[0, 8, None]], "dim": 0, "keep_on_cpu": False}]
    assert first["image_grid_thw"]["data"][:2] == ["int64", [3]]
    assert first["image_grid_thw"]["field"] == ["batched", {"keep_on_cpu": True}]


@pytest.mark.parametrize("name", TINY_VISION_FAMILIES)
def test_every_placeholder_of_a_row_is_in_one_item_with_what_its_features_are_made_of(name):
    """vLLM's item is one run of placeholders; an image with text between its tiles is handed over tile by tile."""
    _, processor = tiny_vision(name)
    reader = ImageReader(processor)
    pictures = [reader.process(picture(number, 32, 24)) for number in (1, 2, 1)]
    text = f"a{reader.placeholder}b{reader.placeholder}{reader.placeholder}c"
    row = encode_with_images(reader, lambda text: processor.tokenizer(text)["input_ids"], text, pictures)
    found = items(row.ids, row.images)
    covered = [place for item in found for place in range(item.offset, item.offset + item.length)]
    assert covered == [place for place, token in enumerate(row.ids) if token == reader.placeholder_id]
    pixels = {item.digest: item.fields["pixel_values"].tensor for item in found}
    each = len(found) // 3
    assert len(pixels) == 2 * each, "the same picture has the same names"
    assert each == (5 if name in ("idefics3", "smolvlm") else 1)
    for image, own in zip(pictures, (found[:each], found[each : 2 * each]), strict=False):
        seen = torch.cat([pixels[item.digest].flatten() for item in own])
        assert seen.equal(image.inputs["pixel_values"].flatten())


@pytest.mark.parametrize(
    ("ids", "inputs", "words"),
    [
        ([5, 3, 4, 6], {}, "does not have the 2 placeholders"),
        ([5, 3, 4, 3, 6], {}, "2 runs of placeholders and 1 parts"),
        ([5, 3, 3, 6], {"thumbnail": torch.zeros(1)}, "comes as pixel_values, image_grid_thw, thumbnail"),
    ],
)
def test_an_image_that_vllm_cannot_be_told_of_is_refused(ids, inputs, words):
    image = image_at(1, "a").image
    span = ImageSpan(Image("a", "", 2, {**image.inputs, **inputs}), 1, len(ids) - 1)
    with pytest.raises(GenerationError, match=words):
        turn_request("m", ids, PARAMS, {}, images=[span], generates=True)


def test_ids_that_are_never_drawn_get_the_lowest_bias_besides_other_ones():
    never = dataclasses.replace(PARAMS, suppress_tokens=(3,))
    _, body = turn_request("m", [5], never, {"logit_bias": {"8": 1.5}})
    assert body["logit_bias"] == {8: 1.5, 3: -100.0}
