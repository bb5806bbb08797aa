"""Configurations: documented names and defaults, and refusals with a reason."""

import dataclasses
import json
import warnings
from pathlib import Path

import pytest
from transformers import HfArgumentParser

from agentrl import AsyncGRPOConfig, GRPOConfig, RLOOConfig
from agentrl.errors import ConfigurationError
from agentrl.training.argument_checks import REFUSED

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


@pytest.mark.parametrize(("cls", "count"), [(GRPOConfig, 189), (RLOOConfig, 163)])
def test_no_name_is_missing_and_the_additions_are_known(cls, count):
    """Two names are those that transformers itself prefers to `gradient_checkpointing` and its arguments."""
    documented = set(DOCUMENTED[cls.__name__])
    assert len(documented) == count
    added = {field.name for field in dataclasses.fields(cls)} - documented
    own = {
        "freeze_vision_tower",
        "keep_images",
        "drop_repeated_images",
        "max_image_pixels",
        "reasoning",
        "dynamic_sampling_max_rounds",
        *TIMEOUTS,
        "tool_max_failures",
    }
    own |= {"environment_retries", "environment_retry_delay", "max_failure_rate", "failure_window"}
    own |= {"vllm_request_timeout"}
    own |= {"journal", "journal_keep_steps"}
    own |= {"max_tool_calling_iterations"} if cls is RLOOConfig else {"turn_discount"}
    assert added - {"activation_checkpointing", "activation_checkpointing_kwargs"} == own


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


TIMEOUTS = ("rollout_timeout", "tool_timeout", "environment_timeout", "preemption_grace")

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
    ("epsilon_high", -0.1),
    ("sapo_temperature_pos", 0.0),
    ("sapo_temperature_neg", -1.0),
    ("vespo_k_pos", 0.0),
    ("vespo_lambda_neg", 0.0),
    ("top_entropy_quantile", 1.5),
    ("top_entropy_quantile", -0.1),
    ("off_policy_mask_threshold", 0.0),
    ("vllm_importance_sampling_mode", "row_mask"),
    ("vllm_importance_sampling_clip_min", -1.0),
    ("vllm_importance_sampling_clip_max", 0.0),
    *((name, value) for name in TIMEOUTS for value in (float("inf"), float("nan"), 0, -1, "5")),
    ("tool_max_failures", 1),
    ("environment_retries", -1),
    ("environment_retry_delay", -1.0),
    ("max_failure_rate", 1.5),
    ("failure_window", 0),
    ("journal_keep_steps", -1),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_value_is_refused_by_name_F09(name, value, tmp_path):
    with pytest.raises(ConfigurationError, match=rf"^{name}="):
        make(GRPOConfig, tmp_path, **{name: value})


CONTRADICTIONS = [
    ({"delta": 1.2}, "epsilon_high"),
    ({"delta": 1.25, "epsilon_high": 0.28}, "epsilon_high"),
    ({"delta": 4.0, "loss_type": "cispo"}, "loss_type"),
    ({"delta": 4.0, "loss_type": "sapo"}, "loss_type"),
    ({"delta": 4.0, "loss_type": "vespo"}, "loss_type"),
    ({"epsilon": 0.1, "loss_type": "sapo"}, "loss_type"),
    ({"epsilon": 0.1, "loss_type": "cispo"}, "loss_type"),
    ({"epsilon_high": 0.3, "loss_type": "sapo"}, "loss_type"),
    ({"epsilon_high": 0.3, "loss_type": "vespo"}, "loss_type"),
    ({"epsilon_high": 0.0, "loss_type": "cispo"}, "cispo"),
    ({"importance_sampling_level": "sequence", "loss_type": "vespo"}, "loss_type"),
    (
        {"vllm_importance_sampling_clip_min": 3.0, "vllm_importance_sampling_clip_max": 2.0},
        "vllm_importance_sampling_clip_max",
    ),
    (
        {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": None},
        "vllm_importance_sampling_clip_max",
    ),
]


@pytest.mark.parametrize(("given", "other"), CONTRADICTIONS)
def test_arguments_of_the_objective_that_contradict_each_other_are_both_named(given, other, tmp_path):
    with pytest.raises(ConfigurationError, match=rf"^{next(iter(given))}=.*{other}"):
        make(GRPOConfig, tmp_path, **given)


DOUBTFUL = [
    {"loss_type": "luspo"},
    {"loss_type": "dapo", "importance_sampling_level": "sequence"},
    {"loss_type": "bnpo", "importance_sampling_level": "sequence"},
    {"loss_type": "dr_grpo", "importance_sampling_level": "sequence"},
    {"loss_type": "cispo", "importance_sampling_level": "sequence"},
    {"epsilon_high": 0.28, "loss_type": "cispo"},
]


@pytest.mark.parametrize("given", DOUBTFUL)
def test_what_is_probably_not_meant_is_said(given, tmp_path):
    with pytest.warns(UserWarning, match=f"loss_type='{given['loss_type']}'"):
        make(GRPOConfig, tmp_path, **given)


PUBLISHED = [
    {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    {"loss_type": "sapo", "importance_sampling_level": "sequence"},
    {"loss_type": "vespo"},
    {"loss_type": "cispo", "epsilon_high": 5.0},
    {"delta": 1.3, "epsilon_high": 0.28},
    {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_max": None},
]


@pytest.mark.parametrize("given", PUBLISHED)
def test_the_published_objectives_make_no_noise(given, tmp_path):
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        make(GRPOConfig, tmp_path, **given)
    assert [str(warning.message) for warning in heard] == []


def test_the_upper_bound_follows_the_loss_type(tmp_path):
    """The documentation gives epsilon_high=None two meanings: epsilon, and with cispo the weight 5."""
    assert make(GRPOConfig, tmp_path, epsilon=0.1).upper_clip == 0.1
    assert make(GRPOConfig, tmp_path, epsilon_high=0.28).upper_clip == 0.28
    assert make(GRPOConfig, tmp_path, loss_type="cispo").upper_clip == 5.0
    assert make(RLOOConfig, tmp_path, epsilon=0.1).upper_clip == 0.1


def test_the_old_name_of_the_largest_weight_is_mapped_with_a_warning(tmp_path):
    with pytest.warns(FutureWarning, match="vllm_importance_sampling_clip_max"):
        config = make(GRPOConfig, tmp_path, vllm_importance_sampling_cap=2.0)
    assert config.vllm_importance_sampling_clip_max == 2.0


@pytest.mark.parametrize("name", TIMEOUTS)
def test_none_means_no_timeout_F09(name, tmp_path):
    assert getattr(make(GRPOConfig, tmp_path, **{name: None}), name) is None


def test_dr_grpo_needs_a_length_to_divide_by(tmp_path):
    with pytest.raises(ConfigurationError, match="max_completion_length=None"):
        make(GRPOConfig, tmp_path, loss_type="dr_grpo", max_completion_length=None)


OTHER = {
    "use_adaptive_entropy": True,
    "sync_ref_model": True,
    "cast_lm_head_to_fp32": True,
    "batch_eval_metrics": True,
    "dataloader_drop_last": True,
    "average_tokens_across_devices": False,
    "auto_find_batch_size": True,
    "label_names": ["labels"],
    "include_for_metrics": ["loss"],
    "include_num_input_tokens_seen": "all",
    "train_sampling_strategy": "sequential",
    "length_column_name": "size",
    "multi_objective_aggregation": "normalize_then_sum",
    "parallelism_config": object(),
    "ds3_gather_for_generation": False,
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_not_built_is_refused_with_its_reason(name, tmp_path):
    """Invariant 10: no argument is accepted and ignored."""
    value = OTHER.get(name, 0.5)
    with pytest.raises((ConfigurationError, ValueError, ImportError)) as error:
        make(AsyncGRPOConfig, tmp_path, **{name: value})  # has all of GRPOConfig, and some of its own
    if isinstance(error.value, ConfigurationError):
        assert REFUSED[name] in str(error.value)


def test_reward_clip_range_is_a_range(tmp_path):
    with pytest.raises(ConfigurationError, match="reward_clip_range"):
        make(RLOOConfig, tmp_path, reward_clip_range=(1.0, -1.0))


def test_the_deprecated_name_is_mapped_with_a_warning(tmp_path):
    with pytest.warns(FutureWarning, match="use_transformers_continuous_batching"):
        config = make(GRPOConfig, tmp_path, use_transformers_paged=True)
    assert config.use_transformers_continuous_batching


def test_the_deprecated_cap_is_mapped_with_a_warning(tmp_path):
    with pytest.warns(FutureWarning, match="vllm_importance_sampling_clip_max"):
        config = make(GRPOConfig, tmp_path, vllm_importance_sampling_cap=2.0)
    assert config.vllm_importance_sampling_clip_max == 2.0


@pytest.mark.parametrize("cls", CONFIGS)
def test_a_command_line_can_give_every_default(cls, tmp_path):
    """`--name value` for every documented argument that has a plain default, all at once."""
    argv = ["--output_dir", str(tmp_path)]
    specs = {field.name: field for field in dataclasses.fields(cls)}
    plain = [n for n in DOCUMENTED[cls.__name__] if isinstance(specs[n].default, bool | int | float | str)]
    given = [name for name in plain if specs[name].default != "" and name != "local_rank"]
    for name in given:
        argv += [f"--{name}", str(getattr(specs[name].default, "value", specs[name].default))]
    [config] = HfArgumentParser(cls).parse_args_into_dataclasses(argv)
    expected = cls(str(tmp_path))
    assert [n for n in given if getattr(config, n) != getattr(expected, n)] == []
    assert len(given) > 100


TYPED = [
    (GRPOConfig, "pad_to_multiple_of", ["8"], 8),
    (GRPOConfig, "scale_rewards", ["False"], "none"),
    (GRPOConfig, "reward_weights", ["1", "0.5"], [1.0, 0.5]),
    (GRPOConfig, "delta", ["2"], 2.0),
    (GRPOConfig, "generation_kwargs", ['{"top_k": 3}'], {"top_k": 3}),
    (GRPOConfig, "report_to", ["none"], []),
    (RLOOConfig, "reward_clip_range", ["-1", "1"], [-1.0, 1.0]),
]


@pytest.mark.parametrize(("cls", "name", "words", "expected"), TYPED)
def test_a_command_line_gives_values_of_the_right_type(cls, name, words, expected, tmp_path):
    argv = ["--output_dir", str(tmp_path), f"--{name}", *words]
    [config] = HfArgumentParser(cls).parse_args_into_dataclasses(argv)
    value = getattr(config, name)
    assert (value, type(value)) == (expected, type(expected))


def test_options_of_loaders_that_agentrl_does_not_use_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="split_batches"):
        make(GRPOConfig, tmp_path, accelerator_config={"split_batches": True})
    make(GRPOConfig, tmp_path, accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": True}})


def test_fp16_is_refused_where_it_would_do_nothing(tmp_path):
    """accelerate would train in float32 on the CPU without a word."""
    with pytest.raises(ConfigurationError, match=r"fp16=True.*bf16"):
        make(GRPOConfig, tmp_path, fp16=True)
