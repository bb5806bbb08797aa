"""Configurations: documented names and defaults, and refusals with a reason."""

import dataclasses
import json
import warnings
from pathlib import Path

import pytest
from transformers import HfArgumentParser

from agentrl import GRPOConfig, RLOOConfig
from agentrl.errors import ConfigurationError
from agentrl.training.arguments import REFUSED

CONFIGS = [GRPOConfig, RLOOConfig]
DOCUMENTED = json.loads((Path(__file__).parent / "documented_defaults.json").read_text())


def make(cls, tmp_path, **kwargs):
    return cls(str(tmp_path), **kwargs)


@pytest.mark.parametrize("cls", CONFIGS)
def test_names_and_defaults_are_the_documented_ones(cls):
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for name, default in DOCUMENTED[cls.__name__].items():
        spec = fields[name]
        actual = "<factory>" if spec.default is dataclasses.MISSING else repr(spec.default)
        assert actual == default, name


@pytest.mark.parametrize("cls", CONFIGS)
def test_a_default_configuration_makes_no_noise(cls, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = make(cls, tmp_path)
    assert config.gradient_checkpointing is True
    assert config.bf16 is False, "this device only emulates bf16"


@pytest.mark.parametrize("cls", CONFIGS)
def test_it_parses_from_a_command_line(cls, tmp_path):
    argv = [
        "--output_dir",
        str(tmp_path),
        "--num_generations",
        "4",
        "--chat_template_kwargs",
        '{"enable_thinking": false}',
    ]
    [config] = HfArgumentParser(cls).parse_args_into_dataclasses(argv)
    assert config.num_generations == 4
    assert config.chat_template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, (8, 4)), ({"generation_batch_size": 16}, (16, 8)), ({"steps_per_generation": 2}, (4, 2))],
)
def test_batch_sizes_are_derived_L08(given, expected, tmp_path):
    config = make(
        GRPOConfig, tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4, num_generations=2, **given
    )
    assert (config.generation_batch_size, config.steps_per_generation) == expected


@pytest.mark.parametrize(
    "given", [{"generation_batch_size": 16, "steps_per_generation": 8}, {"generation_batch_size": 7}]
)
def test_contradicting_batch_sizes_are_refused_L08(given, tmp_path):
    with pytest.raises(ConfigurationError, match="generation_batch_size"):
        make(GRPOConfig, tmp_path, per_device_train_batch_size=2, num_generations=2, **given)


def test_generations_that_do_not_divide_the_batch_come_with_those_that_would(tmp_path):
    with pytest.raises(ConfigurationError, match=r"num_generations=3 .* could be 2, 4, 8"):
        make(GRPOConfig, tmp_path, num_generations=3)


@pytest.mark.parametrize(
    ("generations", "batch", "fine"),
    [(2, 2, True), (2, 3, False), (None, 8, True), (None, 4, False), (1, 1, True)],
)
def test_the_evaluation_batch_is_checked_with_its_own_generations_L05(generations, batch, fine, tmp_path):
    given = {"num_generations_eval": generations, "per_device_eval_batch_size": batch, "num_generations": 8}
    if fine:
        make(GRPOConfig, tmp_path, eval_strategy="steps", **given)
    else:
        with pytest.raises(ConfigurationError, match="evaluation batch"):
            make(GRPOConfig, tmp_path, eval_strategy="steps", **given)
        make(GRPOConfig, tmp_path, **given)  # not checked while evaluation is off


def test_a_group_of_one_is_refused_L05(tmp_path):
    with pytest.raises(ConfigurationError, match="at least 2"):
        make(GRPOConfig, tmp_path, num_generations=1)


@pytest.mark.parametrize("value", [True, False, "group", "batch", "none"])
def test_scale_rewards_takes_booleans_too(value, tmp_path):
    expected = {True: "group", False: "none"}.get(value, value)
    assert make(GRPOConfig, tmp_path, scale_rewards=value).scale_rewards == expected


TIMEOUTS = ("rollout_timeout", "tool_timeout", "environment_timeout")

WRONG = [
    ("temperature", 0.0),
    ("temperature", float("nan")),
    ("top_p", 0.0),
    ("top_p", 1.5),
    ("top_k", -1),
    ("min_p", 2.0),
    ("repetition_penalty", 0.0),
    ("loss_type", "ppo"),
    ("scale_rewards", "row"),
    ("importance_sampling_level", "row"),
    ("num_iterations", 0),
    ("max_completion_length", 0),
    ("max_tool_calling_iterations", -1),
    ("pad_to_multiple_of", "some"),
    ("beta", -1.0),
    *((name, value) for name in TIMEOUTS for value in (float("inf"), float("nan"), 0, -1, "5")),
    ("tool_max_failures", 1),
    ("environment_retries", -1),
    ("environment_retry_delay", -1.0),
    ("max_failure_rate", 1.5),
    ("failure_window", 0),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_value_is_refused_by_name_F09(name, value, tmp_path):
    with pytest.raises(ConfigurationError, match=rf"^{name}="):
        make(GRPOConfig, tmp_path, **{name: value})


@pytest.mark.parametrize("name", TIMEOUTS)
def test_none_means_no_timeout_F09(name, tmp_path):
    assert getattr(make(GRPOConfig, tmp_path, **{name: None}), name) is None


def test_dr_grpo_needs_a_length_to_divide_by(tmp_path):
    with pytest.raises(ConfigurationError, match="max_completion_length=None"):
        make(GRPOConfig, tmp_path, loss_type="dr_grpo", max_completion_length=None)


OTHER = {
    "use_vllm": True,
    "use_adaptive_entropy": True,
    "sync_ref_model": True,
    "cast_lm_head_to_fp32": True,
    "batch_eval_metrics": True,
    "auto_find_batch_size": True,
    "label_names": ["labels"],
    "include_for_metrics": ["loss"],
    "include_num_input_tokens_seen": "all",
    "train_sampling_strategy": "sequential",
    "length_column_name": "size",
    "multi_objective_aggregation": "normalize_then_sum",
    "vllm_structured_outputs_regex": ".*",
    "log_completions_hub_repo": "me/repo",
    "parallelism_config": object(),
    "fsdp": "full_shard",
    "deepspeed": {"zero_optimization": {"stage": 2}},
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_not_built_is_refused_with_its_reason(name, tmp_path):
    """Invariant 10: no argument is accepted and ignored."""
    value = OTHER.get(name, 0.5)
    with pytest.raises((ConfigurationError, ValueError, ImportError)) as error:
        make(GRPOConfig, tmp_path, **{name: value})
    if isinstance(error.value, ConfigurationError):
        assert REFUSED[name] in str(error.value)


def test_reward_clip_range_is_a_range(tmp_path):
    with pytest.raises(ConfigurationError, match="reward_clip_range"):
        make(RLOOConfig, tmp_path, reward_clip_range=(1.0, -1.0))


def test_the_deprecated_name_is_mapped_with_a_warning(tmp_path):
    with pytest.warns(FutureWarning, match="use_transformers_continuous_batching"):
        config = make(GRPOConfig, tmp_path, use_transformers_paged=True)
    assert config.use_transformers_continuous_batching
