"""The shipped configurations of accelerate say what their names say, as accelerate itself reads them."""

from __future__ import annotations

import importlib.util

import pytest
from accelerate.utils import FullyShardedDataParallelPlugin

from tests.training.shards import CONFIGS, launched_environment

NAMES = {"ddp", "fsdp2", "zero1", "zero2", "zero3"}


def test_there_is_one_configuration_for_each_way():
    assert {path.stem for path in CONFIGS.iterdir()} == NAMES


@pytest.mark.parametrize("name", sorted(NAMES))
def test_accelerate_launches_with_it(name, monkeypatch):
    environment = launched_environment(name)
    assert (environment.get("ACCELERATE_USE_FSDP") == "true") == (name == "fsdp2")
    assert (environment.get("ACCELERATE_USE_DEEPSPEED") == "true") == name.startswith("zero")
    assert environment["ACCELERATE_MIXED_PRECISION"] == "no", "bf16 and fp16 are said by the trainer's arguments"
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    if name == "fsdp2":
        plugin = FullyShardedDataParallelPlugin()
        assert plugin.fsdp_version == 2
        assert plugin.reshard_after_forward
        assert not plugin.activation_checkpointing, "gradient_checkpointing is the trainer's argument"
    if name.startswith("zero"):
        assert environment["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == name[-1]


@pytest.mark.parametrize("stage", ["1", "2", "3"])
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs the extra `deepspeed`")
def test_deepspeed_reads_the_stage(stage, monkeypatch):
    from accelerate.utils import DeepSpeedPlugin

    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    for key, value in launched_environment(f"zero{stage}").items():
        monkeypatch.setenv(key, value)
    plugin = DeepSpeedPlugin()
    assert plugin.zero_stage == int(stage)
    assert plugin.zero3_save_16bit_model == (stage == "3"), "else save_model would write pieces"
