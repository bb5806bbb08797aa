"""Bad input gives one clear error when the trainer is made, before anything is generated."""

import logging

import datasets
import pytest

from agentrl import GRPOTrainer, RLOOTrainer
from agentrl.errors import ConfigurationError, RewardError, TemplateError, ToolDefinitionError
from agentrl.testing.tokenizers import qwen_like_tokenizer
from tests.training.helpers import TRAINERS, Game, chat_rows, constant, make, text_rows


def undocumented(x: int) -> int:
    return x


def unhinted(x):
    """Do something.

    Args:
        x: Something.
    """
    return x


class NoReset:
    def act(self) -> str:
        """Act."""
        return ""


class NoReward:
    def reset(self, **kwargs):
        return "go"


@pytest.mark.parametrize("cls", TRAINERS)
@pytest.mark.parametrize("options", [{"reward_funcs": None}, {"environment_factory": NoReward}])
def test_no_reward_source(cls, options, tmp_path):
    with pytest.raises(ConfigurationError, match=r"reward_funcs"):
        make(cls, tmp_path, **options)


def test_an_environment_without_reset(tmp_path):
    with pytest.raises(ToolDefinitionError, match=r"NoReset has no method `reset`"):
        make(GRPOTrainer, tmp_path, environment_factory=NoReset)


@pytest.mark.parametrize(("tool", "missing"), [(undocumented, "docstring"), (unhinted, "'x'|hint")])
def test_a_tool_that_cannot_be_described(tool, missing, tmp_path):
    with pytest.raises(ToolDefinitionError, match=missing) as error:
        make(GRPOTrainer, tmp_path, tools=[tool], train_dataset=chat_rows())
    assert tool.__name__ in str(error.value)


def test_a_template_that_cannot_render_tools(tmp_path):
    tokenizer = qwen_like_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}## {{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}## assistant\n{% endif %}"
    )
    with pytest.raises(TemplateError, match="tool"):
        make(GRPOTrainer, tmp_path, environment_factory=Game, processing_class=tokenizer)


def test_a_dict_of_factories_without_the_column(tmp_path):
    with pytest.raises(ConfigurationError, match=r"column `environment`.*\['a'\].*\['prompt'\]"):
        make(GRPOTrainer, tmp_path, environment_factory={"a": Game}, train_dataset=chat_rows())


def test_a_row_with_an_unknown_environment(tmp_path):
    rows = datasets.Dataset.from_dict({"environment": ["a", "b", "c", "a"]})
    with pytest.raises(ConfigurationError, match=r"row 2 .*environment='c'.*\['a', 'b'\]"):
        make(GRPOTrainer, tmp_path, environment_factory={"a": Game, "b": Game}, train_dataset=rows)


@pytest.mark.parametrize("cls", TRAINERS)
def test_no_dataset_and_no_max_steps(cls, tmp_path):
    with pytest.raises(ConfigurationError, match="max_steps"):
        make(cls, tmp_path, environment_factory=Game, config={"max_steps": -1})


def test_no_dataset_and_no_environment(tmp_path):
    with pytest.raises(ConfigurationError, match="train_dataset is missing"):
        make(GRPOTrainer, tmp_path, train_dataset=None)


def test_a_stream_without_max_steps_L01(tmp_path):
    stream = text_rows().to_iterable_dataset()
    with pytest.raises(ConfigurationError, match="max_steps"):
        make(GRPOTrainer, tmp_path, train_dataset=stream, config={"max_steps": -1})


def test_a_dataset_without_prompts(tmp_path):
    with pytest.raises(ConfigurationError, match=r"no column `prompt`.*\['question'\]"):
        make(GRPOTrainer, tmp_path, train_dataset=datasets.Dataset.from_dict({"question": ["a"] * 4}))


def test_plain_prompts_with_tools(tmp_path):
    with pytest.raises(ConfigurationError, match="plain-text prompt"):
        make(GRPOTrainer, tmp_path, environment_factory=Game, train_dataset=text_rows())


def test_a_reset_that_needs_a_column_the_dataset_lacks(tmp_path):
    class Needs(Game):
        def reset(self, target, **kwargs):
            return "go"

    with pytest.raises(ConfigurationError, match=r"Needs.reset needs \['target'\]"):
        make(GRPOTrainer, tmp_path, environment_factory=Needs, train_dataset=chat_rows())


def test_a_reward_function_that_needs_a_column_the_dataset_lacks_H08(tmp_path):
    def graded(completions, answer, **kwargs):
        return [0.0] * len(completions)

    with pytest.raises(ConfigurationError, match=r"'graded' needs \['answer'\]"):
        make(GRPOTrainer, tmp_path, reward_funcs=graded)


def test_wrong_number_of_weights_H07(tmp_path):
    with pytest.raises(ConfigurationError, match="2 entries for 3"):
        make(GRPOTrainer, tmp_path, reward_funcs=[constant] * 3, config={"reward_weights": [1.0, 2.0]})


def test_a_tool_with_the_name_of_an_environments_method_F10(tmp_path):
    def press() -> str:
        """Press."""
        return ""

    with pytest.raises(ToolDefinitionError, match="press"):
        make(GRPOTrainer, tmp_path, environment_factory=Game, tools=[press])


def test_rollout_func_with_tools(tmp_path):
    with pytest.raises(ConfigurationError, match="rollout_func replaces"):
        make(GRPOTrainer, tmp_path, environment_factory=Game, rollout_func=lambda prompts, trainer: {})


def test_the_other_trainers_configuration(tmp_path):
    args = make(RLOOTrainer, tmp_path).args
    with pytest.raises(ConfigurationError, match="takes a GRPOConfig, not a RLOOConfig"):
        make(GRPOTrainer, tmp_path, args=args)


def test_several_gpus_in_one_process(tmp_path, monkeypatch):
    args = make(GRPOTrainer, tmp_path).args
    monkeypatch.setattr(type(args), "n_gpu", 2)
    with pytest.raises(ConfigurationError, match=r"sees 2 GPUs.*accelerate launch"):
        make(GRPOTrainer, tmp_path, args=args)


def test_a_model_object_with_model_init_kwargs(tmp_path):
    with pytest.raises(ConfigurationError, match="model_init_kwargs"):
        make(GRPOTrainer, tmp_path, config={"model_init_kwargs": {"dtype": "float32"}})


def test_a_model_without_a_name_and_without_a_tokenizer(tmp_path):
    with pytest.raises(ConfigurationError, match="processing_class"):
        make(GRPOTrainer, tmp_path, processing_class=None)


def test_a_dataset_smaller_than_one_generation_batch(tmp_path):
    trainer = make(GRPOTrainer, tmp_path, train_dataset=text_rows(1))
    with pytest.raises(ConfigurationError, match="has 1 rows"):
        trainer.train()


@pytest.mark.parametrize("pad", [None])
def test_a_tokenizer_without_a_pad_token_pads_with_eos_and_says_so_N01(pad, tmp_path, caplog):
    tokenizer = qwen_like_tokenizer("compact")
    tokenizer.pad_token = pad
    with caplog.at_level(logging.WARNING):
        trainer = make(GRPOTrainer, tmp_path, processing_class=tokenizer)
    assert "no pad token" in caplog.text
    trainer.train()
    assert tokenizer.pad_token == tokenizer.eos_token


@pytest.mark.parametrize("returned", [[1.0], "much", 5.0, ["a", "b", "c", "d"]])
def test_a_reward_function_that_returns_something_else_H04(returned, tmp_path):
    def careless(completions, **kwargs):
        return returned

    trainer = make(GRPOTrainer, tmp_path, reward_funcs=careless)
    with pytest.raises(RewardError, match=r"'careless' must return a list of 4"):
        trainer.train()
