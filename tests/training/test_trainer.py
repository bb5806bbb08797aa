"""What the trainers promise, on a tiny random model that really generates and learns."""

import datasets
import pytest
import torch

from agentrl import GRPOTrainer, RLOOTrainer
from agentrl.testing.scripted import ScriptedGenerator
from agentrl.training.windows import BatchRewards
from agentrl.types import FinishReason, Sample
from tests.training.helpers import TOKENIZER, TRAINERS, Game, chat_rows, constant, logged, make, model, text_rows
from tests.waiting import wait_until

CALL = TOKENIZER.encode('<tool_call>{"name": "press", "arguments": {}}</tool_call><|im_end|>')
DONE = TOKENIZER.encode("ok<|im_end|>")


def weights(trainer):
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def largest_change(before, after):
    return max((before[name] - after[name]).abs().max().item() for name in before)


# Exactness ----------------------------------------------------------------------------------------------------

SAMPLING = [
    {},
    {"temperature": 0.7},
    {"top_p": 0.8},
    {"top_k": 5},
    {"min_p": 0.1},
    {"repetition_penalty": 1.3},
    {"temperature": 1.4, "top_p": 0.9, "top_k": 40, "min_p": 0.02, "repetition_penalty": 1.2},
]


@pytest.mark.parametrize("cls", TRAINERS)
@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
def test_trainer_and_sampler_agree_J02_J03(cls, sampling, tmp_path):
    """Invariant 3: before the first update of each window the two score the same distribution."""
    trainer = make(cls, tmp_path, config={**sampling, "max_completion_length": 12})
    trainer.train()
    differences = logged(trainer, "sampling/sampling_logp_difference/max")
    assert len(differences) == 2
    assert max(differences) < 1e-4


def test_they_agree_over_several_turns(tmp_path):
    trainer = make(GRPOTrainer, tmp_path, environment_factory=Game, config={"max_completion_length": 64})
    trainer.collector.engine.generator = _Urged(trainer.collector.generator, trainer.model)
    trainer.train()
    assert min(logged(trainer, "tools/call_frequency")) == 1.0
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-4


class _Urged:
    """Samples from the model but answers the first turn of each rollout with a tool call, scored by the model.

    A random model never writes a call by itself, so the call is put into its mouth: its logprobs are those that a
    plain forward pass gives.
    """

    def __init__(self, generator, model):
        self.inner = generator
        self.model = model
        self.stats = generator.stats
        self.seen = set()

    max_context = property(lambda self: self.inner.max_context)

    async def sample(self, session, ids, params):
        if session in self.seen:
            return await self.inner.sample(session, ids, params)
        self.seen.add(session)
        row = torch.tensor([[*ids, *CALL]])
        with torch.no_grad():
            scores = self.model(row).logits[0].log_softmax(-1)
        logprobs = [scores[len(ids) + i - 1, token].item() for i, token in enumerate(CALL)]
        return Sample(list(CALL), logprobs, FinishReason.STOP)

    def release(self, session):
        self.inner.release(session)

    def sync(self, version):
        self.inner.sync(version)

    def close(self):
        self.inner.close()


@pytest.mark.parametrize("cls", TRAINERS)
def test_the_same_configuration_gives_the_same_run(cls, tmp_path):
    """Invariant 7 (a run repeats): rewards and weights, to the bit."""
    runs = []
    for _ in range(2):
        trainer = make(cls, tmp_path, reward_funcs=_length)
        trainer.train()
        runs.append((logged(trainer, "reward"), weights(trainer)))
    assert runs[0][0] == runs[1][0]
    assert largest_change(runs[0][1], runs[1][1]) == 0.0


def _length(completion_ids, **_):
    return [float(sum(ids)) for ids in completion_ids]


# Learning -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", TRAINERS)
def test_it_learns_what_is_rewarded(cls, tmp_path):
    wanted = TOKENIZER.encode("e")[0]

    def likes_e(completion_ids, **_):
        return [sum(token == wanted for token in ids) / 6 for ids in completion_ids]

    config = {
        "max_steps": 60,
        "per_device_train_batch_size": 32,
        "num_generations": 8,
        "learning_rate": 5e-3,
        "beta": 0.0,
    }
    trainer = make(cls, tmp_path, reward_funcs=likes_e, train_dataset=text_rows(4), config=config)
    trainer.train()
    rewards = logged(trainer, "reward")
    assert sum(rewards[:6]) / 6 < 0.2
    assert sum(rewards[-6:]) / 6 > 0.8


@pytest.mark.parametrize("cls", TRAINERS)
def test_equal_rewards_change_nothing_H14(cls, tmp_path):
    trainer = make(cls, tmp_path, reward_funcs=lambda completions, **_: [1.0] * len(completions), config={"beta": 0.0})
    before = weights(trainer)
    trainer.train()
    assert largest_change(before, weights(trainer)) == 0.0
    assert logged(trainer, "frac_reward_zero_std") == [1.0, 1.0]
    assert logged(trainer, "loss") == [0.0, 0.0]
    assert logged(trainer, "grad_norm") == [0.0, 0.0]


@pytest.mark.parametrize("cls", TRAINERS)
def test_accumulation_is_exact_I05(cls, tmp_path):
    """One batch of four rows and four of one row give the same update, ragged rows and a masked one included."""
    updates = []
    for batch, accumulation in ((4, 1), (2, 2), (1, 4)):
        config = {
            "max_steps": 1,
            "per_device_train_batch_size": batch,
            "gradient_accumulation_steps": accumulation,
            "optim": "sgd",
            "learning_rate": 0.1,
            "max_grad_norm": 0.0,
            "beta": 0.1,
            "num_generations": 4,
        }
        script = [[5] * n + [TOKENIZER.eos_token_id] for n in (1, 4, 2, 3)]
        trainer = make(
            cls,
            tmp_path,
            config=config,
            generator=ScriptedGenerator(lambda s, ids, p, script=script: script[int(s.split("/")[1])]),
            reward_funcs=lambda completions, **_: [1.0, 0.0, None, 3.0],
            train_dataset=text_rows(1),
        )
        before = weights(trainer)
        trainer.train()
        after = weights(trainer)
        updates.append(({name: after[name] - before[name] for name in before}, logged(trainer, "loss")))
    for update, loss in updates[1:]:
        assert largest_change(updates[0][0], update) < 1e-6
        assert loss == pytest.approx(updates[0][1], abs=1e-6)
    assert largest_change(updates[0][0], {n: torch.zeros_like(u) for n, u in updates[0][0].items()}) > 1e-4


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({"max_steps": 4}, 4),
        ({"max_steps": 4, "num_iterations": 2}, 2),
        ({"max_steps": 4, "steps_per_generation": 2}, 2),
        ({"max_steps": 2, "gradient_accumulation_steps": 2}, 2),
        ({"max_steps": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 1}, 4),
        ({"max_steps": 2, "generation_batch_size": 8}, 1),
    ],
    ids=str,
)
def test_windows_are_played_when_the_configuration_says(config, windows, tmp_path):
    played = []

    def reward(completions, **_):
        played.append(len(completions))
        return [float(i) for i in range(len(completions))]

    trainer = make(GRPOTrainer, tmp_path, config={"num_train_epochs": 9, **config}, reward_funcs=reward)
    trainer.train()
    assert len(played) == windows
    assert set(played) == {trainer.args.generation_batch_size}


def test_later_iterations_are_off_policy_and_clipped(tmp_path):
    config = {"num_iterations": 3, "max_steps": 3, "learning_rate": 0.05, "epsilon": 0.01}
    trainer = make(GRPOTrainer, tmp_path, config=config)
    trainer.train()
    regions = logged(trainer, "clip_ratio/region_mean")
    assert regions[0] == 0.0
    assert max(regions[1:]) > 0.0
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-4, "compared under the old weights"


def test_kl_starts_at_zero_and_grows(tmp_path):
    trainer = make(GRPOTrainer, tmp_path, config={"beta": 0.1, "learning_rate": 0.05, "max_steps": 3})
    reference = trainer.collector.baselines.reference.copy
    before = {n: p.clone() for n, p in reference.named_parameters()}
    trainer.train()
    kl = logged(trainer, "kl")
    assert kl[0] == pytest.approx(0.0, abs=1e-6)
    assert kl[-1] > 1e-4
    assert largest_change(before, dict(reference.named_parameters())) == 0.0


def test_rloo_puts_the_kl_into_the_reward(tmp_path):
    """advantage = r_i - beta KL_i - mean over the others of the same, by hand."""
    trainer = make(RLOOTrainer, tmp_path, config={"beta": 0.5, "reward_clip_range": (-1.0, 2.0)})
    total = torch.tensor([5.0, 1.0, 0.0, 1.0])
    group = torch.tensor([0, 0, 1, 1])
    kl = torch.tensor([0.2, 0.4, 0.0, 0.6])
    # clipped: 2, 1, 0, 1; less the penalty: 1.9, 0.8, 0.0, 0.7
    expected = [1.1, -1.1, -0.7, 0.7]
    rewards = BatchRewards(total[:, None], torch.ones(1), group, total)
    assert trainer.advantages(rewards, kl).tolist() == pytest.approx(expected)


# Rewards ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", TRAINERS)
def test_reward_functions_get_every_documented_keyword(cls, tmp_path):
    seen = {}

    def reward(
        prompts, completions, completion_ids, trainer_state, log_extra, log_metric, environments, answer, **rest
    ):
        seen.update(locals())
        log_extra("n", list(range(len(prompts))))
        log_metric("own", 0.25)
        return [float(i) for i in range(len(prompts))]

    rows = chat_rows(4, answer=["a", "b", "c", "d"])
    trainer = make(
        cls, tmp_path, reward_funcs=reward, environment_factory=Game, train_dataset=rows, config={"max_steps": 1}
    )
    trainer.train()
    assert len(seen["prompts"]) == len(seen["completions"]) == len(seen["completion_ids"]) == 4
    assert all(isinstance(env, Game) for env in seen["environments"])
    assert seen["trainer_state"] is trainer.state
    assert seen["answer"][0] == seen["answer"][1]
    assert logged(trainer, "own") == [0.25]
    assert "prompt" not in seen["rest"]


def test_none_leaves_a_row_out_of_baseline_and_loss_H01(tmp_path):
    """With [1, 0, None, 1] the unscored row has no gradient and does not move the others' baseline."""
    trainer = make(
        GRPOTrainer,
        tmp_path,
        reward_funcs=lambda completions, **_: [1.0, 0.0, None, 1.0],
        train_dataset=text_rows(1),
        config={"num_generations": 4, "max_steps": 1, "scale_rewards": "none"},
    )
    batches = []
    collect = trainer.collector.collect
    trainer.collector.collect = lambda *a, **k: batches.append(window := collect(*a, **k)) or window
    trainer.train()
    [batch] = batches[0].batches
    assert batch.advantages_R.tolist() == pytest.approx([1 / 3, -2 / 3, 0.0, 1 / 3])
    assert 2 not in batch.row_N.tolist()
    assert logged(trainer, "reward") == [pytest.approx(2 / 3)]


def test_truncated_rows_can_be_left_out_of_the_loss_A02(tmp_path):
    script = [[5, 6, 7, TOKENIZER.eos_token_id], [5, 6, 7, 8, 9, 10]]
    trainer = make(
        GRPOTrainer,
        tmp_path,
        generator=ScriptedGenerator(lambda s, ids, p: script[int(s.split("/")[1]) % 2]),
        config={"mask_truncated_completions": True, "max_steps": 1},
    )
    counted = []
    score = trainer.collector.score
    trainer.collector.score = lambda m, batch: counted.append(batch.tokens) or score(m, batch)
    trainer.train()
    assert counted == [8], "two rows of four sampled tokens; those of the truncated ones do not count"
    assert logged(trainer, "completions/clipped_ratio") == [0.5]


def test_async_and_sync_rewards_are_summed_with_their_weights_H03(tmp_path):
    async def one(completions, **_):
        return [1.0] * len(completions)

    def zero(completions, **_):
        return [0.0] * len(completions)

    trainer = make(
        GRPOTrainer, tmp_path, reward_funcs=[one, zero], config={"reward_weights": [0.7, 0.3], "max_steps": 1}
    )
    trainer.train()
    assert logged(trainer, "reward") == [pytest.approx(0.7)]
    assert logged(trainer, "rewards/one/mean") == [1.0]
    assert logged(trainer, "rewards/zero/mean") == [0.0]


def test_rewards_of_functions_and_environment_add_up(tmp_path):
    turns = [CALL, DONE]
    generator = ScriptedGenerator(_script(turns))
    trainer = make(
        GRPOTrainer,
        tmp_path,
        environment_factory=Game,
        reward_funcs=lambda completions, **_: [0.5] * len(completions),
        generator=generator,
        config={"max_completion_length": 200, "max_steps": 1},
    )
    trainer.train()
    assert logged(trainer, "rewards/Game/mean") == [1.0]
    assert logged(trainer, "reward") == [1.5]


def _script(turns):
    """Plays the same turns in every rollout."""
    left = {}
    return lambda session, ids, params: left.setdefault(session, list(turns)).pop(0)


def test_a_sequence_classifier_rewards(tmp_path):
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    config = Qwen3Config(
        vocab_size=len(TOKENIZER), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, num_labels=1, pad_token_id=TOKENIZER.pad_token_id,
    )  # fmt: skip
    classifier = Qwen3ForSequenceClassification(config)
    classifier.save_pretrained(tmp_path / "judge")
    TOKENIZER.save_pretrained(tmp_path / "judge")
    trainer = make(GRPOTrainer, tmp_path, reward_funcs=[str(tmp_path / "judge"), constant], config={"max_steps": 1})
    trainer.train()
    assert logged(trainer, "rewards/judge/std")[0] > 0


# Environments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", TRAINERS)
def test_every_rollout_is_reset_and_instances_are_reused_G03(cls, tmp_path):
    Game.instances = []
    trainer = make(
        cls,
        tmp_path,
        environment_factory=Game,
        generator=ScriptedGenerator(_script([CALL, DONE])),
        config={"max_steps": 3, "max_completion_length": 200},
    )
    trainer.train()
    assert logged(trainer, "rewards/Game/mean") == [1.0] * 3
    assert sum(game.resets for game in Game.instances) == 12
    assert len(Game.instances) == 4, "as many as play at once"
    assert [game.closed for game in Game.instances] == [1] * 4


def test_environments_are_closed_after_an_error(tmp_path):
    Game.instances = []

    def broken(completions, **_):
        raise RuntimeError("reward server gone")

    trainer = make(GRPOTrainer, tmp_path, environment_factory=Game, reward_funcs=broken)
    with pytest.raises(RuntimeError, match="reward server gone"):
        trainer.train()
    assert all(game.closed == 1 for game in Game.instances)


def test_rows_choose_their_environment(tmp_path):
    class Other(Game):
        def get_reward(self):
            return None

    rows = datasets.Dataset.from_dict({"environment": ["game", "other"]})
    trainer = make(
        GRPOTrainer,
        tmp_path,
        environment_factory={"game": Game, "other": Other},
        train_dataset=rows,
        generator=ScriptedGenerator(_script([CALL, DONE])),
        config={"max_steps": 1, "max_completion_length": 200},
        reward_funcs=None,
    )
    trainer.train()
    assert logged(trainer, "reward") == [1.0]
    assert not logged(trainer, "rewards/Other/mean")


def test_none_that_arrow_put_into_messages_and_columns_does_not_reach_the_model_C07(tmp_path):
    seen = []

    class Sees(Game):
        def reset(self, task=None, **kwargs):
            seen.append(task)
            super().reset()

    prompts = [
        [{"role": "user", "content": "q"}],
        [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "", "tool_calls": [
                {"type": "function", "function": {"name": "press", "arguments": {"a": 1}}},
                {"type": "function", "function": {"name": "press", "arguments": {"b": 2}}},
            ]},
            {"role": "user", "content": "r"},
        ],
    ]  # fmt: skip
    rows = datasets.Dataset.from_dict({"prompt": prompts, "task": [{"x": [{"a": 1}, {"b": 2}]}] * 2})
    generator = ScriptedGenerator(_script([DONE]))
    trainer = make(GRPOTrainer, tmp_path, environment_factory=Sees, train_dataset=rows, generator=generator,
                   config={"max_steps": 1})  # fmt: skip
    trainer.train()
    texts = {TOKENIZER.decode(call.ids) for call in generator.calls}
    assert not any("null" in text or "None" in text for text in texts)
    assert any('{"a": 1}' in text and '{"b": 2}' in text for text in texts)
    assert seen[0] == {"x": [{"a": 1}, {"b": 2}]}


# Own rollouts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", TRAINERS)
def test_rollout_func_plays_instead_of_the_engine(cls, tmp_path):
    got = {}

    def rollout(prompts, trainer):
        got["prompts"] = list(prompts)
        rows = len(prompts)
        return {
            "prompt_ids": [[7, 8]] * rows,
            "completion_ids": [[5, 6, 9, TOKENIZER.eos_token_id]] * rows,
            "logprobs": [[-1.0] * 4] * rows,
            "env_mask": [[1, 0, 0, 1]] * rows,
            "speed": list(range(rows)),
        }

    def reward(speed, **_):
        got["speed"] = speed
        return [float(s) for s in speed]

    trainer = make(
        cls, tmp_path, rollout_func=rollout, reward_funcs=reward, config={"max_steps": 1, "shuffle_dataset": False}
    )
    trainer.train()
    assert got["prompts"] == ["p0", "p0", "p1", "p1"], "one for each completion wanted"
    assert got["speed"] == [0, 1, 2, 3]
    assert logged(trainer, "completions/mean_length") == [2.0], "tokens that the environment wrote do not count"


def test_rollout_func_that_answers_wrongly_is_told(tmp_path):
    from agentrl.errors import RolloutError

    def short(prompts, trainer):
        return {"prompt_ids": [[1]], "completion_ids": [[2]], "logprobs": [[0.0]]}

    trainer = make(GRPOTrainer, tmp_path, rollout_func=short)
    with pytest.raises(RolloutError, match="1 entries of prompt_ids; it got 4 prompts"):
        trainer.train()


# Logging ------------------------------------------------------------------------------------------------------

DOCUMENTED = [
    "num_tokens",
    *("step_time", "step_time/rollouts", "step_time/rewards", "step_time/sync", "step_time/training"),
    "completions/mean_length",
    "completions/min_length",
    "completions/max_length",
    "completions/mean_terminated_length",
    "completions/min_terminated_length",
    "completions/max_terminated_length",
    "completions/clipped_ratio",
    "tools/call_frequency",
    "tools/failure_frequency",
    "rewards/Game/mean",
    "rewards/Game/std",
    "reward",
    "reward_std",
    "frac_reward_zero_std",
    "entropy",
    "kl",
    "clip_ratio/region_mean",
    "clip_ratio/low_mean",
    "clip_ratio/low_min",
    "clip_ratio/high_mean",
    "clip_ratio/high_max",
    "sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/max",
]


@pytest.mark.parametrize("cls", TRAINERS)
def test_all_documented_metrics_are_logged(cls, tmp_path):
    trainer = make(cls, tmp_path, environment_factory=Game, config={"beta": 0.1, "max_steps": 1})
    trainer.train()
    assert set(DOCUMENTED) <= set(trainer.state.log_history[0])


def test_metrics_between_two_logs_are_averaged(tmp_path):
    values = iter([1.0, 2.0, 3.0, 4.0])

    def reward(completions, **_):
        value = next(values)
        return [value] * len(completions)

    trainer = make(GRPOTrainer, tmp_path, reward_funcs=reward, config={"max_steps": 4, "logging_steps": 2})
    trainer.train()
    assert logged(trainer, "reward") == [1.5, 3.5]


def test_num_tokens_counts_prompts_and_sampled_tokens(tmp_path):
    script = [[5, 6, TOKENIZER.eos_token_id]]
    trainer = make(GRPOTrainer, tmp_path, generator=ScriptedGenerator(lambda *_: script[0]))
    trainer.train()
    per_row = len(TOKENIZER("p0")["input_ids"]) + 3
    assert logged(trainer, "num_tokens") == [4 * per_row, 8 * per_row]


def test_completions_are_shown_as_a_table(tmp_path, capsys):
    trainer = make(
        GRPOTrainer,
        tmp_path,
        generator=ScriptedGenerator(lambda *_: TOKENIZER.encode("[red]x[/red]<|im_end|>")),
        config={"log_completions": True, "num_completions_to_print": 1, "max_steps": 1, "max_completion_length": 50},
    )
    trainer.train()
    shown = capsys.readouterr().out
    assert "Completions at step 1" in shown
    assert "[red]x[/red]" in shown.replace("\n", ""), "model output is text, never markup"
    assert shown.count("[red]") == 1


# Models and settings ------------------------------------------------------------------------------------------


def test_the_model_can_be_a_folder(tmp_path):
    folder = tmp_path / "policy"
    model().save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    trainer = make(GRPOTrainer, tmp_path, model=str(folder), processing_class=None, config={"max_steps": 1})
    assert next(trainer.model.parameters()).dtype is torch.float32
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "tokenizer.json").exists()


def test_gradient_checkpointing_changes_nothing_but_memory(tmp_path):
    results = []
    for checkpointing in (False, True):
        trainer = make(GRPOTrainer, tmp_path, config={"gradient_checkpointing": checkpointing})
        trainer.train()
        results.append(weights(trainer))
    assert largest_change(*results) < 1e-6


def test_padding_to_a_multiple_changes_nothing(tmp_path):
    results = []
    for multiple in (None, 64):
        trainer = make(GRPOTrainer, tmp_path, config={"pad_to_multiple_of": multiple, "optim": "sgd"})
        trainer.train()
        results.append(weights(trainer))
    assert largest_change(*results) < 1e-6


def test_unused_columns_can_be_hidden(tmp_path):
    def reward(completions, answer=None, **_):
        assert answer is None
        return [float(i) for i in range(len(completions))]

    rows = text_rows(4, answer=["a"] * 4)
    make(GRPOTrainer, tmp_path, reward_funcs=reward, train_dataset=rows, config={"remove_unused_columns": True}).train()


def test_dropout_can_be_disabled(tmp_path):
    from agentrl.testing.models import tiny_model

    gpt2 = tiny_model("gpt2", vocab_size=len(TOKENIZER))
    trainer = make(GRPOTrainer, tmp_path, model=gpt2, config={"disable_dropout": True})
    assert {m.p for m in trainer.model.modules() if isinstance(m, torch.nn.Dropout)} == {0.0}


def test_threads_return_when_trainers_are_closed_F08(tmp_path):
    import threading

    make(GRPOTrainer, tmp_path, environment_factory=Game).train()
    before = set(threading.enumerate())
    for _ in range(3):
        make(GRPOTrainer, tmp_path, environment_factory=Game).train()
    wait_until(lambda: set(threading.enumerate()) <= before)


@pytest.mark.parametrize("cls", TRAINERS)
def test_a_stream_trains(cls, tmp_path):
    trainer = make(cls, tmp_path, train_dataset=text_rows(4).to_iterable_dataset())
    trainer.train()
    assert trainer.state.global_step == 2
    assert len(logged(trainer, "reward")) == 2


# Generators ---------------------------------------------------------------------------------------------------


def test_common_generation_kwargs_win_and_stay_exact(tmp_path):
    from agentrl.generation.local import LocalGenerator

    trainer = make(
        GRPOTrainer, tmp_path, config={"temperature": 1.0, "generation_kwargs": {"temperature": 0.5, "top_k": 7}}
    )
    assert isinstance(trainer.collector.generator, LocalGenerator)
    assert (trainer.collector.sampling.temperature, trainer.collector.sampling.top_k) == (0.5, 7)
    trainer.train()
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-4


@pytest.mark.parametrize(
    "config", [{"generation_kwargs": {"suppress_tokens": [5]}}, {"cache_implementation": "dynamic"}]
)
def test_what_only_generate_knows_selects_it_and_says_so(config, tmp_path, caplog):
    from agentrl.generation.plain import PlainGenerator

    trainer = make(GRPOTrainer, tmp_path, config={**config, "max_steps": 1})
    assert isinstance(trainer.collector.generator, PlainGenerator)
    assert caplog.text.count("is sampled with model.generate, because") == 1
    trainer.train()
    if "cache_implementation" in config:
        assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-4


def test_continuous_batching_of_transformers_trains(tmp_path):
    trainer = make(GRPOTrainer, tmp_path, config={"use_transformers_continuous_batching": True})
    trainer.train()
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-4
    trainer.close()


def test_a_function_of_the_model_makes_the_generator(tmp_path):
    import functools

    from agentrl.generation.local import LocalGenerator

    small = functools.partial(LocalGenerator, max_cache_tokens=40)
    trainer = make(GRPOTrainer, tmp_path, generator=small)
    trainer.train()
    assert trainer.collector.generator._core._pool.budget == 40
