"""Mixed precision, dropout, recomputation and pad tokens: what they may change, and what not."""

from __future__ import annotations

import shutil

import pytest
import torch

from agentrl.errors import ConfigurationError
from tests.training.runs import distance, local, logged, make_trainer, small_model, weights


def _scores(output):
    """What the head gave: the trainer makes it give back scores, in a tuple, in the place of logits."""
    return output[0] if isinstance(output, tuple) else output


def test_sampler_and_trainer_share_the_autocast(tmp_path):
    """bf16: weights stay float32, forward passes are rounded alike on both sides, learning goes on."""
    trainer = make_trainer("grpo", tmp_path, bf16=True, max_steps=3, generator=None, beta=0.1)
    before = weights(trainer)
    types: set[torch.dtype] = set()
    trainer.model.lm_head.register_forward_hook(lambda _, __, output: types.add(_scores(output).dtype))
    trainer.train()
    assert types == {torch.bfloat16}
    assert {value.dtype for value in weights(trainer).values()} == {torch.float32}
    differences = logged(trainer, "sampling/sampling_logp_difference/max")
    assert max(differences) < 0.1
    assert all(value < 1.0 for value in logged(trainer, "kl"))
    assert distance(before, weights(trainer)) > 1e-3


def test_a_generator_of_ones_own_may_sample_in_full_precision(tmp_path):
    """Then the difference shows in the metric that is there for it."""
    trainer = make_trainer("grpo", tmp_path, bf16=True, generator=local)
    trainer.train()
    assert 1e-4 < max(logged(trainer, "sampling/sampling_logp_difference/max")) < 0.5


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_recomputed_activations_give_the_same_gradients(algorithm, tmp_path):
    """The default, against none."""
    results = []
    for options in ({}, {"gradient_checkpointing": False}):
        trainer = make_trainer(algorithm, tmp_path, optim="sgd", beta=0.1, **options)
        trainer.train()
        assert trainer.model.is_activation_checkpointing is not bool(options)
        results.append(weights(trainer))
    assert distance(*results) < 1e-6


def test_dropout_off_is_off_in_attention_too(tmp_path):
    """Llama keeps the probability as a number, not as a module."""

    def trained(**options: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = small_model(attention_dropout=0.5 if options else 0.0)
        trainer = make_trainer("grpo", tmp_path, model=model, optim="sgd", **options)
        trainer.train()
        return weights(trainer)

    assert distance(trained(), trained(disable_dropout=True)) == 0.0
    assert distance(trained(), trained(disable_dropout=False)) > 1e-5


@pytest.mark.parametrize("pad", [[2, 9], -1, None])
def test_n01_the_models_idea_of_padding_does_not_matter(pad, tmp_path):
    """It may be a list, or nonsense; rows are laid out with the tokenizer's, and lengths say what is padding."""
    trainers = []
    for value in (0, pad):
        trainers.append(make_trainer("grpo", tmp_path, generator=local))
        vars(trainers[-1].model.config)["pad_token_id"] = value  # past the check of transformers
        trainers[-1].train()
    assert distance(*map(weights, trainers)) == 0.0


def test_n01_eos_is_trained_where_it_pads_too(tmp_path):
    """The stop id of each row is a target, although padding has the same id."""
    trainer = make_trainer("grpo", tmp_path, max_steps=1)
    tokenizer = trainer.processing_class
    tokenizer.pad_token = tokenizer.eos_token
    seen: list[tuple[int, int]] = []
    compute_loss = trainer.compute_loss

    def noting(model, inputs, **rest):
        seen.append(((inputs.target_ids_N == tokenizer.eos_token_id).sum().item(), inputs.rows))
        return compute_loss(model, inputs, **rest)

    trainer.compute_loss = noting
    trainer.train()
    assert seen == [(4, 4)]


COMPILER = pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=COMPILER)])
def test_a_compiled_model_learns_the_same(backend, tmp_path):
    """The trainer's forward and backward passes are compiled; the generator keeps to the module below."""
    plain, compiled = (
        make_trainer("grpo", tmp_path, generator=local, optim="sgd", **options)
        for options in ({}, {"torch_compile": True, "torch_compile_backend": backend})
    )
    plain.train()
    compiled.train()
    assert type(compiled.model_wrapped).__name__ == "OptimizedModule"
    assert max(logged(compiled, "sampling/sampling_logp_difference/max")) < 1e-4
    assert distance(weights(plain), weights(compiled)) < 1e-5
    compiled.save_model(str(tmp_path / "saved"))
    assert type(plain.model).from_pretrained(tmp_path / "saved").state_dict().keys() == plain.model.state_dict().keys()


def test_both_precisions_at_once_are_refused(tmp_path):
    with pytest.raises((ConfigurationError, ValueError), match="fp16"):
        make_trainer("grpo", tmp_path, fp16=True, bf16=True)
