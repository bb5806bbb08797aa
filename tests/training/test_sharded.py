"""FSDP2 and DeepSpeed ZeRO learn what one process learns, and no process waits for another in vain.

What could not be run without a GPU: NCCL, mixed precision of DeepSpeed, CPU offload, and `accelerate launch` choosing
FSDP by itself; see `tests.training.shards` for what stands in for the last.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import TrainerCallback

from agentrl.training.trainer import RolloutTrainer
from tests.training.runs import distance, length_and_ids, local, logged, make_trainer, rows, small_model, step_logs
from tests.training.shards import make_sharded, whole_weights
from tests.training.worlds import run_world

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None or shutil.which("c++") is None,
    reason="needs the extra `deepspeed` and a compiler",
)
KINDS = [
    "fsdp2",
    *(pytest.param(kind, marks=[needs_deepspeed, pytest.mark.slow]) for kind in ("zero1", "zero2", "zero3")),
]
SHARDED_WEIGHTS = [KINDS[0], KINDS[-1]]

EVERYTHING: dict[str, Any] = {
    "generator": local,
    "max_steps": 4,
    "gradient_accumulation_steps": 2,
    "num_iterations": 2,
    "optim": "sgd",
    "learning_rate": 0.1,
    "max_grad_norm": 1.0,
    "beta": 0.1,
    "sync_ref_model": True,
    "ref_model_sync_steps": 1,
    "entropy_coef": 0.01,
    "cast_lm_head_to_fp32": True,
}


def train(kind: str, folder: Path, **options: Any) -> dict[str, Any]:
    """Train with one token a chunk of the LM head, so that processes have different numbers of them."""
    make = make_trainer if kind == "alone" else lambda *args, **keywords: make_sharded(kind, *args, **keywords)
    trainer = make("grpo", folder, **{"dataset": rows(8), **EVERYTHING, **options})
    trainer.collector.score_options["chunk_logits"] = 1  # type: ignore[assignment]
    trainer.train()
    return {"weights": whole_weights(trainer), "logs": step_logs(trainer), "held": held_by_sampler(trainer)}


def held_by_sampler(trainer: RolloutTrainer) -> int:
    """Numbers in the copy that rollouts are sampled from."""
    copy = trainer.collector._whole
    return 0 if copy is None else sum(parameter.numel() for parameter in copy.model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_i03_sharded_processes_make_the_update_of_one(kind, tmp_path):
    """With rollouts, accumulation, clipping, entropy bonus and a reference that moves, all on sharded weights."""
    one = train("alone", tmp_path / "one", per_device_train_batch_size=4)
    assert distance(one["weights"], dict(small_model().named_parameters())) > 1e-2
    for result in run_world(run_two, tmp_path / "two", kind, tmp_path / "two"):
        assert distance(result["weights"], one["weights"]) < 1e-6
        assert result["held"] == 0, "the copy that samples holds memory while the optimizer steps"
        for ours, whole in zip(result["logs"], one["logs"], strict=True):
            for name in ("loss", "grad_norm", "kl", "entropy", "clip_ratio/region_mean"):
                assert ours[name] == pytest.approx(whole[name], abs=1e-5), name
            assert ours["sampling/sampling_logp_difference/max"] < 1e-5


@pytest.mark.slow
def test_mixed_precision_on_sharded_weights_learns_what_full_precision_does(tmp_path):
    """bf16 by FSDP2's own policy and accelerate's autocast, with accumulation: weights stay float32, and learn alike.

    One window, which both sides sample from the same weights in float32: rounding changes no token.
    """
    options = {"max_steps": 2, "cast_lm_head_to_fp32": False}
    exact = train("alone", tmp_path / "exact", per_device_train_batch_size=4, **options)
    moved = distance(exact["weights"], dict(small_model().named_parameters()))
    for result in run_world(run_in_bf16, tmp_path / "two", tmp_path / "two", options):
        assert {value.dtype for value in result["weights"].values()} == {torch.float32}
        assert 1e-5 < distance(result["weights"], exact["weights"]) < 0.3 * moved
        assert 1e-4 < max(logs["sampling/sampling_logp_difference/max"] for logs in result["logs"]) < 0.2


def run_in_bf16(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    return train("fsdp2", folder, per_device_train_batch_size=2, bf16=True, **options)


def run_two(kind: str, folder: Path) -> dict[str, Any]:
    return train(kind, folder, per_device_train_batch_size=2)


def with_adapters() -> Any:
    torch.manual_seed(0)
    return get_peft_model(small_model(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def go_on(kind: str, folder: Path, adapters: bool, resume: bool, killed: bool) -> dict[str, Any]:
    """Train 5 steps with a checkpoint after the third, which lies within a window."""
    options: dict[str, Any] = {"model": with_adapters()} if adapters else {"sync_ref_model": True}
    trainer = make_sharded(
        kind,
        "grpo",
        folder,
        dataset=rows(8),
        generator=local,
        per_device_train_batch_size=2,
        num_iterations=2,
        beta=0.1,
        ref_model_sync_steps=1,
        max_steps=5,
        save_strategy="steps",
        save_steps=3,
        **options,
    )
    if killed:
        trainer.add_callback(Killed())
    trainer.train(resume_from_checkpoint=resume)
    return {"weights": whole_weights(trainer), "loss": logged(trainer, "loss"), "kl": logged(trainer, "kl")}


class Killed(TrainerCallback):
    """Ends this process as a power cut would, after the step that follows the checkpoint has begun."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 3:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "adapters"),
    [("ddp", False), ("fsdp2", False), ("fsdp2", True), pytest.param("zero3", False, marks=needs_deepspeed)],
)
def test_both_processes_killed_within_a_window_go_on_as_if_they_had_not_been(kind, adapters, tmp_path):
    whole = run_world(go_on, tmp_path / "whole", kind, tmp_path / "whole", adapters, False, False)
    with pytest.raises(AssertionError, match="gave no answer"):
        run_world(go_on, tmp_path / "killed", kind, tmp_path / "run", adapters, False, True)
    assert not list((tmp_path / "run").glob("checkpoint-[45]"))
    for resumed, expected in zip(
        run_world(go_on, tmp_path / "resumed", kind, tmp_path / "run", adapters, True, False), whole, strict=True
    ):
        assert distance(resumed["weights"], expected["weights"]) == 0.0
        assert resumed["loss"] == expected["loss"]
        assert resumed["kl"] == expected["kl"]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 3])
def test_another_number_of_processes_plays_the_window_in_flight_again(processes, tmp_path):
    with pytest.raises(AssertionError, match="gave no answer"):
        run_world(go_on, tmp_path / "killed", "ddp", tmp_path / "run", False, False, True)
    results = run_world(go_on, tmp_path / "resumed", "ddp", tmp_path / "run", False, True, False, world_size=processes)
    for result in results:
        assert len(result["loss"]) == 5
        assert all(torch.isfinite(value).all() for value in result["weights"].values())
        assert distance(result["weights"], results[0]["weights"]) == 0


@pytest.mark.slow
@needs_deepspeed
def test_deepspeed_refuses_the_checkpoint_of_another_number_of_processes(tmp_path):
    with pytest.raises(AssertionError, match="gave no answer"):
        run_world(go_on, tmp_path / "killed", "zero2", tmp_path / "run", False, False, True)
    with pytest.raises(AssertionError, match="written by 2 processes"):
        run_world(go_on, tmp_path / "resumed", "zero2", tmp_path / "run", False, True, False, world_size=1)


def evaluate_and_train(kind: str, folder: Path) -> dict[str, Any]:
    """Evaluate 3 rows in windows of 2 (in the last one the second process has nothing to play), train, evaluate.

    The model is loaded by its name, which under ZeRO-3 loads it in pieces.
    """
    options = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "max_steps": 1, "beta": 0.1}
    trainer = make_sharded(
        kind,
        "grpo",
        folder,
        model=str(folder / "model"),
        keywords={"eval_dataset": rows(3)},
        reward=none_for_the_first,
        generator=local,
        **options,
    )
    before = [trainer.evaluate()] if kind == "fsdp2" else []
    trainer.train()
    trainer.save_model(str(folder / "saved"))
    return {"evaluations": [*before, trainer.evaluate()], "weights": whole_weights(trainer)}


def none_for_the_first(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """No reward for what the first process plays, so that it has no token to train."""
    scored = os.environ["RANK"] != "0"
    return [value if scored else None for value in length_and_ids(completion_ids)]


@pytest.mark.parametrize("kind", SHARDED_WEIGHTS)
def test_i09_k03_a_process_without_rows_or_trained_tokens_takes_part_in_every_pass(kind, tmp_path):
    small_model().save_pretrained(tmp_path / "model")
    first, second = run_world(evaluate_and_train, tmp_path, kind, tmp_path)
    for mine, others in zip(first["evaluations"], second["evaluations"], strict=True):
        for name in ("eval_loss", "eval_reward", "eval_kl", "eval_entropy"):
            assert mine[name] == others[name]
    assert first["evaluations"][-1]["eval_kl"] > 0
    assert distance(first["weights"], load_file(tmp_path / "model" / "model.safetensors")) > 1e-3
    assert distance(first["weights"], load_file(tmp_path / "saved" / "model.safetensors")) == 0


def test_a_sampler_of_a_plain_model_is_a_copy_with_weights_for_as_long_as_it_needs_them():
    from agentrl.training.sharding import WholeCopy

    for policy in (small_model(), small_model(tie_word_embeddings=True), with_adapters()):
        copy = WholeCopy(policy, "cpu")
        assert sum(parameter.numel() for parameter in copy.model.parameters()) == 0
        for _ in range(2):
            copy.gather(policy)
            assert distance(dict(copy.model.named_parameters()), dict(policy.named_parameters())) == 0
            ids = torch.arange(140, 150)[None]
            assert torch.equal(logits(copy.model, ids), logits(policy, ids))
            with torch.no_grad():
                next(p for p in policy.parameters() if p.requires_grad).add_(1.0)
            copy.free()
        assert sum(parameter.numel() for parameter in copy.model.parameters()) == 0


def logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits
