"""Reward functions, reward models and environment-owned rewards."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    TrainerState,
)

from agentrl.errors import ConfigurationError, RewardError
from agentrl.objectives.advantages import combine_rewards
from agentrl.training.reward_functions import RewardFunction, distinct_names
from agentrl.training.reward_models import RewardModel
from agentrl.training.rewards import RewardSet
from agentrl.types import Outcome, Task, Trajectory
from tests.waiting import LONG

USER = [{"role": "user", "content": "a"}]


def trajectory(index: int = 0, *, outcome: Outcome = Outcome.FINISHED, **options: Any) -> Trajectory:
    task = Task(
        "g",
        index,
        0,
        prompt="task prompt",
        columns=options.pop("columns", {}),
        environment=options.pop("name", None),
    )
    return Trajectory(
        task,
        prompt=options.pop("prompt", f"p{index}"),
        prompt_ids=[1],
        completion=options.pop("completion", f"c{index}"),
        completion_ids=[5] * index,
        loss_mask=[1] * index,
        logprobs=[0.0] * index,
        outcome=outcome,
        **options,
    )


def totals(rewards: RewardSet, table: list[list[float | None]]) -> list[float | None]:
    """The weighted sums, as the trainer computes them."""
    matrix = torch.tensor([[math.nan if value is None else value for value in row] for row in table])
    summed = combine_rewards(matrix, torch.tensor(rewards.weights))
    return [None if math.isnan(total) else pytest.approx(total) for total in summed.tolist()]


ROWS = [trajectory(index) for index in range(4)]


def constant(value: float) -> Callable[..., list[float]]:
    def function(completions: list[str]) -> list[float]:
        return [value] * len(completions)

    return function


# What functions get


def test_functions_get_the_documented_keywords() -> None:
    seen: dict[str, Any] = {}

    def reward(**kwargs: Any) -> list[float]:
        seen.update(kwargs)
        return [0.0, 0.0]

    state, metric = TrainerState(), print
    rows = [
        trajectory(1, columns={"answer": "1", "prompt": "never"}, extra={"score": 2}, environment="E1", name="a"),
        trajectory(2, columns={"answer": None, "level": 3}, environment="E2", name="b"),
    ]
    rewards = RewardSet(reward, environments={})
    rewards.compute(rows, trainer_state=state, log_extra=lambda column, values: None, log_metric=metric)
    assert callable(seen.pop("log_extra"))
    assert seen == {
        "prompts": ["p1", "p2"],
        "completions": ["c1", "c2"],
        "completion_ids": [[5], [5, 5]],
        "answer": ["1", None],
        "level": [None, 3],
        "score": [2, None],
        "environment": ["a", "b"],
        "environments": ["E1", "E2"],
        "trainer_state": state,
        "log_metric": metric,
    }


def test_functions_get_only_what_their_signature_takes() -> None:
    def reward(completions: list[str], *, answer: list[str] | None = None) -> list[float]:
        return [float(a == c) for a, c in zip(answer or [], completions, strict=True)]

    rows = [trajectory(1, columns={"answer": "c1", "other": 1})]
    assert RewardSet(reward).compute(rows) == [[1.0]]


def test_environments_are_passed_only_where_there_are_any() -> None:
    seen: list[str] = []

    def reward(**kwargs: Any) -> list[float]:
        seen.extend(kwargs)
        return [0.0] * 4

    RewardSet(reward).compute(ROWS)
    assert "environments" not in seen


def test_g05_functions_read_the_environment_that_played() -> None:
    class Env:
        def __init__(self, score: int) -> None:
            self.score = score

    def reward(completions: list[str], environments: list[Env], **kwargs: Any) -> list[int]:
        return [env.score for env in environments]

    rows = [trajectory(environment=Env(score)) for score in (1, 2, 3)]
    assert RewardSet(reward, environments={}).compute(rows) == [[1.0], [2.0], [3.0]]


def test_functions_cannot_disturb_each_other() -> None:
    def greedy(completions: list[str]) -> list[float]:
        values = [0.0] * len(completions)
        completions.clear()
        return values

    assert RewardSet([greedy, constant(1.0)]).compute(ROWS) == [[0.0, 1.0]] * 4


def test_documented_examples_run() -> None:
    def longest(completion_ids, **kwargs):  # type: ignore[no-untyped-def]
        return [float(len(ids)) for ids in completion_ids]

    async def non_empty(prompts, completions, **kwargs):  # type: ignore[no-untyped-def]
        await asyncio.sleep(0)
        return [1.0 if completion else 0.0 for completion in completions]

    extra: dict[str, list[Any]] = {}
    metrics: dict[str, float] = {}

    def logging_reward(completions, ground_truth, log_extra=None, log_metric=None, **kwargs):  # type: ignore[no-untyped-def]
        log_extra("golden_answer", list(ground_truth))
        log_metric("accuracy", 0.5)
        return [1.0] * len(completions)

    rows = [trajectory(index, columns={"ground_truth": index}) for index in (1, 2)]
    rewards = RewardSet([longest, non_empty, logging_reward], columns=["prompt", "ground_truth"])
    assert rewards.compute(rows, log_extra=extra.__setitem__, log_metric=metrics.__setitem__) == [
        [1.0, 1.0, 1.0],
        [2.0, 1.0, 1.0],
    ]
    assert (extra, metrics) == ({"golden_answer": [1, 2]}, {"accuracy": 0.5})


# How they run


def test_f01_async_functions_of_any_kind_are_awaited_together() -> None:
    meeting: list[asyncio.Event] = []

    async def first(completions: list[str]) -> list[float]:
        meeting.append(asyncio.Event())
        await asyncio.wait_for(meeting[0].wait(), LONG)
        return [1.0] * len(completions)

    class Second:
        async def __call__(self, completions: list[str], value: float) -> list[float]:
            meeting[0].set()  # `first` waits for this: one after the other would never end
            return [value] * len(completions)

    rewards = RewardSet([first, functools.partial(Second(), value=2.0), constant(3.0)])
    assert rewards.compute(ROWS) == [[1.0, 2.0, 3.0]] * 4


def test_f07_sync_functions_run_in_the_calling_thread() -> None:
    seen: list[threading.Thread] = []

    def reward(completions: list[str]) -> list[float]:
        seen.append(threading.current_thread())
        return [0.0] * len(completions)

    RewardSet([reward, reward]).compute(ROWS)
    assert seen == [threading.current_thread()] * 2


def test_async_functions_run_where_the_caller_says() -> None:
    loops: list[Any] = []

    async def reward(completions: list[str]) -> list[float]:
        loops.append(asyncio.get_running_loop())
        return [0.0] * len(completions)

    loop = asyncio.new_event_loop()
    rewards = RewardSet(reward)
    for _ in range(2):
        rewards.compute(ROWS, run=loop.run_until_complete)
    loop.close()
    assert loops == [loop, loop]


def test_an_error_in_an_async_function_is_raised_when_the_others_have_ended() -> None:
    ended: list[bool] = []

    async def fails(completions: list[str]) -> list[float]:
        raise KeyError("mine")

    async def slow(completions: list[str]) -> list[float]:
        await asyncio.sleep(0.01)
        ended.append(True)
        return [0.0] * len(completions)

    with pytest.raises(KeyError, match="mine"):
        RewardSet([fails, slow]).compute(ROWS)
    assert ended == [True]


# What they may return


@pytest.mark.parametrize(
    "returned",
    [
        [1, 2, 3, 4],
        (1.0, 2.0, 3.0, 4.0),
        torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True),
        torch.tensor([1, 2, 3, 4], dtype=torch.bfloat16),
        np.array([1, 2, 3, 4]),
        [np.float32(1), np.int64(2), torch.tensor(3), 4],
    ],
)
def test_h04_one_number_per_completion_is_accepted(returned: Any) -> None:
    assert RewardSet(lambda completions: returned).compute(ROWS) == [[1.0], [2.0], [3.0], [4.0]]


@pytest.mark.parametrize(
    ("returned", "came"),
    [
        ([1.0], "1 entries"),
        ([1, 2, 3], "3 entries"),
        (5.0, "float 5.0"),
        ("good", "str 'good'"),
        (None, "NoneType None"),
        (torch.ones(1), r"a Tensor of shape \(1,\)"),
        (torch.ones(4, 1), r"a Tensor of shape \(4, 1\)"),
        (np.float32(1), r"a float32 of shape \(\)"),
        ((x for x in range(4)), "generator"),
        ({1, 2, 3, 4}, "set"),
    ],
)
def test_h04_a_wrong_count_is_refused_and_never_broadcast(returned: Any, came: str) -> None:
    def mine(completions: list[str]) -> Any:
        return returned

    with pytest.raises(RewardError, match=f"'mine' must return a list of 4 numbers.*but returned {came}"):
        RewardSet([mine]).compute(ROWS)


@pytest.mark.parametrize("entry", ["1", [1.0], math.inf, -math.inf, torch.ones(1), 1j])
def test_h04_a_wrong_entry_is_refused_naming_it(entry: Any) -> None:
    def mine(completions: list[str]) -> Any:
        return [0.0, 0.0, entry, 0.0]

    with pytest.raises(RewardError, match="'mine' must return a list of 4 finite numbers or None, but entry 2 is"):
        RewardSet([mine]).compute(ROWS)


def test_h01_none_and_nan_mean_no_reward_and_nan_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    rewards = RewardSet([lambda completions: [1.0, None, math.nan, 0.0], constant(2.0)])
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert rewards.compute(ROWS) == [[1.0, 2.0], [None, 2.0], [None, 2.0], [0.0, 2.0]]
    assert caplog.text.count("returned NaN") == 1


def test_h01_the_mean_is_over_the_rows_that_were_scored() -> None:
    rewards = RewardSet(constant(0.0))
    table = [[1.0], [0.0], [None], [1.0]]
    assert rewards.metrics(table)["rewards/function/mean"] == pytest.approx(2 / 3)
    assert totals(rewards, table) == [1.0, 0.0, None, 1.0]


# Names, weights, columns


def test_h05_every_callable_gets_a_distinct_name() -> None:
    class Scorer:
        def __call__(self, completions: list[str]) -> list[float]:
            return [0.0] * len(completions)

    def scale(completions: list[str], k: float) -> list[float]:
        return [k] * len(completions)

    functions = [
        functools.partial(scale, k=1),
        Scorer(),
        lambda completions: [3.0] * 4,
        functools.partial(scale, k=2),
    ]
    rewards = RewardSet(functions, environments={None: "Scorer"})
    assert rewards.names == ["scale", "Scorer_2", "<lambda>", "scale_2", "Scorer"]
    assert rewards.compute(ROWS) == [[1.0, 0.0, 3.0, 2.0, None]] * 4


def test_distinct_names_never_collide_with_names_given() -> None:
    assert distinct_names(["f", "f", "f_2"]) == ["f", "f_2", "f_2_2"]


def test_h03_totals_are_weighted() -> None:
    rewards = RewardSet([constant(1.0), constant(0.0)], weights=[0.7, 0.3])
    table = rewards.compute(ROWS)
    assert totals(rewards, table) == [0.7] * 4
    metrics = rewards.metrics(table)
    assert (metrics["rewards/function/mean"], metrics["rewards/function_2/mean"]) == (1.0, 0.0)


def test_h07_wrong_number_of_weights_is_refused_naming_both() -> None:
    with pytest.raises(ConfigurationError, match="`reward_weights` has 2 entries for 3 reward functions"):
        RewardSet([constant(1.0)] * 3, weights=[1.0, 1.0])
    with pytest.raises(ConfigurationError, match="`reward_weights` has 1 entries for 0 reward functions"):
        RewardSet(None, weights=[1.0], environments={None: "Env"})


def test_weights_must_be_finite() -> None:
    with pytest.raises(ConfigurationError, match="must be finite"):
        RewardSet(constant(1.0), weights=[math.nan])


def test_h06_without_any_source_of_reward_is_refused() -> None:
    for functions in (None, []):
        with pytest.raises(ConfigurationError, match="nothing gives a reward"):
            RewardSet(functions, environments={})


def test_what_is_no_source_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="`reward_funcs` holds 3"):
        RewardSet([3])  # type: ignore[list-item]


def test_h08_a_null_column_gives_lists_of_equal_length() -> None:
    def lenient(completions: list[str], answer: list[str] | None = None, **kwargs: Any) -> list[float]:
        assert answer is None or len(answer) == len(completions)
        return [float(answer is not None and a == "1") for a in answer or completions]

    rows = [trajectory(columns={"answer": "1"}), trajectory(columns={"answer": None}), trajectory()]
    assert RewardSet(lenient, columns=["prompt", "answer"]).compute(rows) == [[1.0], [0.0], [0.0]]
    assert RewardSet(lenient, columns=["prompt"]).compute([trajectory()]) == [[0.0]]


def test_h08_a_missing_column_is_refused_before_any_generation() -> None:
    def strict(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
        return [0.0] * len(completions)

    with pytest.raises(ConfigurationError, match=r"'strict' needs \['answer'\].*dataset column \(\['prompt'\]\)"):
        RewardSet(strict, columns=["prompt"])
    RewardSet(strict, columns=["prompt", "answer"])
    RewardSet(strict, columns=None)


def test_h08_the_prompt_column_and_missing_environments_are_no_columns() -> None:
    def wants_prompt(prompt: list[str]) -> list[float]:
        return [0.0] * len(prompt)

    def wants_environments(environments: list[Any]) -> list[float]:
        return [0.0] * len(environments)

    with pytest.raises(ConfigurationError, match=r"'wants_prompt' needs \['prompt'\]"):
        RewardSet(wants_prompt, columns=["prompt"])
    with pytest.raises(ConfigurationError, match=r"'wants_environments' needs \['environments'\]"):
        RewardSet(wants_environments, columns=["prompt"])
    RewardSet(wants_environments, columns=["prompt"], environments={})


# Environments


def test_h06_environments_alone_give_the_reward(caplog: pytest.LogCaptureFixture) -> None:
    rewards = RewardSet(None, environments={None: "Env"})
    rows = [trajectory(reward=1.0, name="whatever"), trajectory(reward=None)]
    with caplog.at_level(logging.WARNING):
        assert rewards.compute(rows) == [[1.0], [None]]
    assert (rewards.names, rewards.weights) == (["Env"], [1.0])
    assert "1 of 2 rollouts got a reward from none of ['Env']" in caplog.text


def test_each_environment_class_has_a_column_of_weight_one() -> None:
    owners: dict[str | None, str] = {"easy": "Game", "hard": "Game", "code": "Coding"}
    rewards = RewardSet(constant(5.0), weights=[2.0], environments=owners)
    rows = [trajectory(name=name, reward=1.0) for name in ("easy", "hard", "code", "chat")]
    table = rewards.compute(rows)
    assert (rewards.names, rewards.weights) == (["function", "Game", "Coding"], [2.0, 1.0, 1.0])
    assert table == [[5.0, 1.0, None], [5.0, 1.0, None], [5.0, None, 1.0], [5.0, None, None]]
    assert totals(rewards, table) == [11.0, 11.0, 11.0, 10.0]


def test_rollouts_whose_environment_failed_are_not_scored(caplog: pytest.LogCaptureFixture) -> None:
    extra: dict[str, list[Any]] = {}

    def reward(completions: list[str], environments: list[Any], log_extra: Any) -> list[float]:
        assert None not in environments
        log_extra("seen", list(completions))
        return [1.0] * len(completions)

    rows = [
        trajectory(0, outcome=Outcome.ENV_FAILURE),
        trajectory(1, environment="E"),
        trajectory(2, outcome=Outcome.ENV_FAILURE),
    ]
    rewards = RewardSet(reward, environments={})
    with caplog.at_level(logging.WARNING):
        assert rewards.compute(rows, log_extra=extra.__setitem__) == [[None], [1.0], [None]]
        assert rewards.compute(rows[:1]) == [[None]]
    assert extra == {"seen": [None, "c1", None]}
    assert not caplog.text


def test_log_extra_takes_one_value_per_completion() -> None:
    def reward(completions: list[str], log_extra: Any) -> list[float]:
        log_extra("column", [1])
        return [0.0] * len(completions)

    with pytest.raises(RewardError, match=r"log_extra\('column', \.\.\.\) got 1 values for 4 completions"):
        RewardSet(reward).compute(ROWS, log_extra=lambda column, values: None)


# Metrics


def test_h16_metrics_are_over_the_rows_that_have_them() -> None:
    rewards = RewardSet([constant(0.0)] * 3)
    table = [[1.0, 2.0, None], [3.0, None, None], [None, None, 5.0]]
    metrics = rewards.metrics(table)
    assert metrics == rewards.metrics(table[::-1])
    assert metrics == {
        "rewards/function/mean": 2.0,
        "rewards/function/std": pytest.approx(math.sqrt(2)),
        "rewards/function_2/mean": 2.0,
        "rewards/function_2/std": 0.0,
        "rewards/function_3/mean": 5.0,
        "rewards/function_3/std": 0.0,
    }


def test_k04_a_source_that_never_applied_logs_nothing_rather_than_nan() -> None:
    rewards = RewardSet([lambda completions: [np.float32(1), None, None, None], lambda completions: [None] * 4])
    metrics = rewards.metrics(rewards.compute(ROWS))
    assert set(metrics) == {"rewards/<lambda>/mean", "rewards/<lambda>/std"}
    assert all(type(value) is float for value in metrics.values())


# Reward models


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<e>", "<u>", *"abcdefgh", "user", "assistant", "tool", "<s>"]
    raw = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<u>"))
    raw.pre_tokenizer = WhitespaceSplit()
    raw.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", words.index("<s>"))])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<e>", unk_token="<u>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' <e> ' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant{% endif %}"
    )
    return tokenizer


def classifier(seed: int = 0, **options: Any) -> LlamaForSequenceClassification:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        **options,
    )
    return LlamaForSequenceClassification(config)


def score(model: LlamaForSequenceClassification, tokenizer: PreTrainedTokenizerFast, text: str) -> float:
    """The score of one text, unpadded, read by hand at the last token that is not padding."""
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    with torch.no_grad():
        scores = model.score(model.model(ids).last_hidden_state)[0, :, 0]
    last = max(i for i, token in enumerate(ids[0].tolist()) if token != tokenizer.pad_token_id)
    return scores[last].item()


def test_a_reward_model_scores_prompt_and_completion(tokenizer: PreTrainedTokenizerFast) -> None:
    model = classifier(num_labels=1)
    rows = [
        trajectory(prompt="a ", completion="b c d"),
        trajectory(prompt="e ", completion="f"),
        *(trajectory(prompt="a ", completion=" ".join("abcdefgh"[: n % 8 + 1])) for n in range(20)),
    ]
    rewards = RewardSet(model, processing_classes=tokenizer)
    table = rewards.compute(rows)
    expected = [score(model, tokenizer, row.prompt + row.completion) for row in rows]  # type: ignore[operator]
    assert [value for (value,) in table] == pytest.approx(expected, abs=1e-5)
    assert rewards.names == ["LlamaForSequenceClassification"]
    assert model.config.pad_token_id == tokenizer.eos_token_id


def test_a_reward_model_scores_the_chat_templates_text(tokenizer: PreTrainedTokenizerFast) -> None:
    model = classifier(num_labels=1)
    completion = [{"role": "assistant", "content": "b c"}]
    (row,) = RewardSet(model, processing_classes=tokenizer).compute([trajectory(prompt=USER, completion=completion)])
    assert row == [pytest.approx(score(model, tokenizer, "user a <e> assistant b c <e>"), abs=1e-5)]


@pytest.mark.parametrize(
    "completion",
    [
        [],
        [{"role": "tool", "content": "b"}],
        [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"function": {"name": "f", "arguments": {}}}],
            }
        ],
        [{"role": "assistant", "content": [{"type": "image", "image": 1}, {"type": "text", "text": "b"}]}],
        "b",
        "",
    ],
)
def test_h15_odd_completions_get_a_score(tokenizer: PreTrainedTokenizerFast, completion: Any) -> None:
    rewards = RewardSet(classifier(num_labels=1), processing_classes=tokenizer)
    ((value,),) = rewards.compute([trajectory(prompt=USER, completion=completion)])
    assert isinstance(value, float)


def test_h07_all_of_several_reward_models_are_used_with_one_tokenizer(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    models = [classifier(seed, num_labels=1) for seed in range(3)]
    rewards = RewardSet(models, processing_classes=tokenizer)
    (row,) = rewards.compute([trajectory(prompt="a ", completion="b")])
    assert row == [pytest.approx(score(model, tokenizer, "a b"), abs=1e-5) for model in models]
    assert len(set(row)) == 3


def test_h07_wrong_number_of_tokenizers_is_refused_naming_both(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ConfigurationError, match="`reward_processing_classes` has 1 entries for 2 reward functions"):
        RewardSet([classifier(num_labels=1), constant(1.0)], processing_classes=[tokenizer])


def test_a_reward_model_is_loaded_by_name_with_its_tokenizer(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = tmp_path / "judge"
    model = classifier(num_labels=1)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    rewards = RewardSet([str(path), constant(1.0)], model_init_kwargs={"dtype": "float64"})
    rewards.to("cpu")
    (row,) = rewards.compute([trajectory(prompt="a ", completion="b")])
    tokenizer.pad_token = tokenizer.eos_token
    assert row == [pytest.approx(score(model, tokenizer, "a b"), abs=1e-5), 1.0]
    assert rewards.names == ["judge", "function"]
    loaded = rewards.functions[0].function
    assert isinstance(loaded, RewardModel)
    assert (loaded.model.dtype, loaded.model.config.num_labels) == (torch.float64, 1)


def test_a_model_without_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="pass one in `reward_processing_classes`"):
        RewardSet(classifier(num_labels=1))


def test_only_sequence_classifiers_can_score(tokenizer: PreTrainedTokenizerFast) -> None:
    causal = LlamaForCausalLM(classifier().config)
    with pytest.raises(RewardError, match=r"LlamaForCausalLM.*only sequence-classification models can score"):
        RewardSet(causal, processing_classes=tokenizer).compute(ROWS)


def test_scoring_leaves_no_graph_and_no_training_mode(tokenizer: PreTrainedTokenizerFast) -> None:
    model = classifier(num_labels=1).train()
    rewards = RewardSet(model, processing_classes=tokenizer)
    assert not model.training
    assert rewards.compute(ROWS)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_signature_of_a_reward_function() -> None:
    def reward(completions: Any, answer: Any, *, level: Any = None) -> None: ...

    function = RewardFunction("reward", reward)
    assert function.accepts == {"completions", "answer", "level"}
    assert function.requires == ["completions", "answer"]
    assert RewardFunction("any", lambda **kwargs: None).accepts is None
