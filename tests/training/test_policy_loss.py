"""GRPO's whole loss against the loops of `tests/objectives/reference.py`: on tensors, and by what a trainer learns."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from agentrl import GRPOConfig, GRPOTrainer
from agentrl.objectives.aggregation import AGGREGATIONS, Denominators
from agentrl.training.batching import MicroBatch
from agentrl.training.metrics import MetricStore
from agentrl.training.scoring import Scores
from tests.objectives import reference
from tests.objectives.reference import Row, Settings

LENGTHS = [3, 1, 7, 0, 5, 2, 4, 6]
"""Trained tokens of eight rows; one is masked out."""


def make_rows(seed: int = 3, spread: float = 0.3) -> list[Row]:
    """Rows whose ratios leave the trust region on both sides, one token without a sampler logprob."""
    generator = torch.Generator().manual_seed(seed)

    def near(values: torch.Tensor, deviation: float) -> list[float]:
        return (values + deviation * torch.randn(len(values), generator=generator, dtype=torch.float64)).tolist()

    result = []
    for r, length in enumerate(LENGTHS):
        old = -3 * torch.rand(length, generator=generator, dtype=torch.float64) - 0.1
        sampler = near(old, spread if r % 3 else spread / 50)
        if r == 4:
            sampler[1] = math.nan
        result.append(
            Row(
                logps=near(old, spread),
                old=old.tolist(),
                sampler=sampler,
                ref=near(old, 0.5),
                entropy=(2 * torch.rand(length, generator=generator, dtype=torch.float64)).tolist(),
                advantage=[1.0, -0.7, -1.3, 2.0, 0.0, 0.4, -0.2, 0.9][r],
            )
        )
    return result


def to_batch(rows: Sequence[Row]) -> tuple[MicroBatch, torch.Tensor, torch.Tensor]:
    """The rows as the trainer sees them, with their logprobs and entropies."""

    def flat(name: str) -> torch.Tensor:
        return torch.tensor([value for row in rows for value in getattr(row, name)], dtype=torch.float64)

    lengths = [len(row.logps) for row in rows]
    row_N = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(lengths))
    batch = MicroBatch(
        input_ids=torch.zeros(len(rows), 1, dtype=torch.int64),
        attention_mask=None,
        position_ids=None,
        sequences_at=(),
        segments=None,
        target_index_N=torch.zeros(sum(lengths), dtype=torch.int64),
        target_ids_N=torch.zeros(sum(lengths), dtype=torch.int64),
        row_N=row_N,
        sequence_N=row_N,
        sampler_logps_N=flat("sampler"),
        advantages_R=torch.tensor([row.advantage for row in rows], dtype=torch.float64),
        old_logps_N=flat("old"),
        ref_logps_N=flat("ref"),
    )
    return batch, flat("logps").requires_grad_(), flat("entropy")


def compute(
    args: GRPOConfig, batches: Sequence[Sequence[Row]], world_size: int = 1
) -> tuple[float, list[float], dict[str, float]]:
    """Loss, gradient by logprob and metrics of a step, as accumulation and data parallelism add them up."""
    counts = Denominators(
        rows=sum(bool(row.logps) for rows in batches for row in rows),
        tokens=sum(len(row.logps) for rows in batches for row in rows),
        micro_batches=sum(any(row.logps for row in rows) for rows in batches),
        world_size=world_size,
    )
    trainer = cast(
        GRPOTrainer,
        SimpleNamespace(
            args=args,
            old_logps=lambda scores, batch: batch.old_logps_N,
            model=SimpleNamespace(training=False),
            collector=SimpleNamespace(corrects_sampler=args.vllm_importance_sampling_correction),
        ),
    )
    total, gradient, metrics = 0.0, [], MetricStore()
    for rows in batches:
        batch, logps, entropy = to_batch(rows)
        scores = Scores(logps, entropy)
        scores = scores._replace(selected_N=GRPOTrainer.selected(trainer, scores))
        loss = GRPOTrainer.loss(trainer, scores, batch, counts, metrics)
        loss.backward()
        total += loss.item() / world_size
        gradient += (logps.grad / world_size).tolist()
    return total, gradient, metrics.reduce(1)


def configure(settings: Settings, folder: Any) -> GRPOConfig:
    """The arguments that say the same as the settings."""
    clips = settings.loss_type not in ("sapo", "vespo")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return GRPOConfig(
            str(folder),
            loss_type=settings.loss_type,
            importance_sampling_level=settings.level,
            epsilon=settings.epsilon,
            epsilon_high=settings.epsilon_high if clips else None,
            delta=settings.delta,
            sapo_temperature_pos=settings.tau[0],
            sapo_temperature_neg=settings.tau[1],
            vespo_k_pos=settings.vespo_pos[0],
            vespo_lambda_pos=settings.vespo_pos[1],
            vespo_k_neg=settings.vespo_neg[0],
            vespo_lambda_neg=settings.vespo_neg[1],
            vllm_importance_sampling_correction=settings.mode is not None,
            vllm_importance_sampling_mode=settings.mode or "sequence_mask",
            vllm_importance_sampling_clip_min=settings.c_min,
            vllm_importance_sampling_clip_max=settings.c_max,
            off_policy_mask_threshold=settings.off_policy,
            top_entropy_quantile=settings.top_entropy,
            beta=settings.beta,
            use_bias_correction_kl=settings.bias_correction,
            max_completion_length=settings.length,
        )


LEVELS = [
    Settings(loss_type=loss_type, level=level)
    for loss_type in AGGREGATIONS
    for level in ("token", "sequence")
    if (loss_type, level) != ("vespo", "sequence")
]
BOUNDS = [
    Settings(loss_type="grpo", epsilon=0.1, epsilon_high=0.28, delta=1.4),
    Settings(loss_type="luspo", level="sequence", epsilon=0.01, epsilon_high=0.02, delta=1.05),
    Settings(loss_type="cispo", epsilon_high=1.1),
    Settings(loss_type="sapo", tau=(0.7, 2.0)),
    Settings(loss_type="vespo", vespo_pos=(1.5, 0.5), vespo_neg=(0.3, 4.0)),
]
CORRECTIONS = [
    Settings(loss_type=loss_type, mode=mode, c_min=c_min, c_max=c_max)
    for loss_type in ("dapo", "vespo")
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    for c_min, c_max in ((None, 1.1), (0.9, 1.2), (0.8, None))
]
RESTRICTIONS = [
    Settings(loss_type=loss_type, **{"off_policy": 0.05, "top_entropy": 0.4, "mode": "token_mask", **which})
    for loss_type in ("grpo", "luspo", "cispo", "sapo", "vespo", "bnpo")
    for which in ({"top_entropy": 1.0, "mode": None}, {"off_policy": None, "top_entropy": 0.0}, {})
]
PENALTIES = [
    Settings(loss_type=loss_type, level=level, beta=0.3, bias_correction=correct, off_policy=0.05)
    for loss_type, level in (("dapo", "token"), ("grpo", "sequence"), ("sapo", "token"), ("vespo", "token"))
    for correct in (True, False)
]
EVERY = [*LEVELS, *BOUNDS, *CORRECTIONS, *RESTRICTIONS, *PENALTIES]


def name_of(settings: Settings) -> str:
    changed = {name: value for name, value in vars(settings).items() if value != getattr(Settings(), name)}
    return " ".join(f"{name}={value}" for name, value in changed.items()) or "dapo"


@pytest.mark.parametrize("settings", EVERY, ids=name_of)
def test_loss_and_gradient_are_those_of_the_formula(settings, tmp_path):
    """Each objective and option against a double loop and its finite differences, in float64."""
    rows = make_rows()
    batches = [rows[:3], rows[3:4], rows[4:]]  # the second is masked out entirely: I09
    loss, gradient, _ = compute(configure(settings, tmp_path), batches)
    assert loss == pytest.approx(reference.loss(batches, settings), abs=1e-12)
    expected = [g for rows in reference.gradient(batches, settings) for row in rows for g in row]
    assert max(map(abs, expected)) > 1e-4
    assert gradient == pytest.approx(expected, abs=1e-8)


SPLITTING = [s for s in [*LEVELS, *CORRECTIONS, *PENALTIES] if s.loss_type != "bnpo"]


@pytest.mark.parametrize("settings", SPLITTING, ids=name_of)
def test_the_gradient_does_not_depend_on_the_split(settings, tmp_path):
    """1 x 8, 2 x 4 and 4 x 2 rows, by one process or two, in their order."""
    args, rows = configure(settings, tmp_path), make_rows()
    whole = compute(args, [rows])[1]
    for size in (1, 2, 4):
        for processes in (1, 2):
            split = [rows[start : start + size] for start in range(0, 8, size)]
            assert compute(args, split, processes)[1] == pytest.approx(whole, abs=1e-12)


def test_what_is_left_out_cannot_make_nan(tmp_path):
    """I06: a token whose ratio and weight overflow has loss and gradient 0 where a mask leaves it out."""
    rows = make_rows()[:3]
    rows[2] = Row([-900.0] + [-1.0] * 6, [-2.0] + [-1.0] * 6, [-900.0] * 7, [-1.0] * 7, [0.0] * 7, -1.0)
    rows[1] = Row([-1.0], [-900.0], [-1800.0], [-1.0], [0.0], -1.0)
    for loss_type in AGGREGATIONS:
        settings = Settings(loss_type=loss_type, top_entropy=0.1, mode="token_mask", c_max=None)
        loss, gradient, _ = compute(configure(settings, tmp_path), [rows])
        assert math.isfinite(loss)
        assert all(map(math.isfinite, gradient))
        assert gradient[3:] == [0.0] * 8


class TestMetrics:
    def test_shares_are_over_tokens_or_rows_whatever_the_split(self, tmp_path):
        rows = make_rows()
        for level in ("token", "sequence"):
            settings = Settings(loss_type="grpo", level=level, epsilon=0.05, epsilon_high=0.05)
            whole = compute(configure(settings, tmp_path), [rows])[2]
            split = compute(configure(settings, tmp_path), [rows[:3], rows[3:4], rows[4:]])[2]
            assert split == pytest.approx(whole)
            low, high = [], []
            for row in rows:
                differences = [p - o for p, o in zip(row.logps, row.old, strict=True)]
                if level == "sequence" and differences:
                    differences = [sum(differences) / len(differences)]
                low.append([math.exp(d) < 0.95 and row.advantage < 0 for d in differences])
                high.append([math.exp(d) > 1.05 and row.advantage > 0 for d in differences])
            assert whole["clip_ratio/low_mean"] == pytest.approx(share(low))
            assert whole["clip_ratio/high_mean"] == pytest.approx(share(high))
            assert whole["clip_ratio/region_mean"] == pytest.approx(share(low) + share(high))
            assert whole["clip_ratio/low_min"] == pytest.approx(min(sum(row) / len(row) for row in low if row))
            assert whole["clip_ratio/high_max"] == pytest.approx(max(sum(row) / len(row) for row in high if row))

    @pytest.mark.parametrize("level", ["token", "sequence"])
    def test_cispo(self, level, tmp_path):
        rows = make_rows()
        metrics = compute(configure(Settings(loss_type="cispo", level=level, epsilon_high=1.0), tmp_path), [rows])[2]
        clipped = []
        for row in rows:
            differences = [p - o for p, o in zip(row.logps, row.old, strict=True)]
            if level == "sequence" and differences:
                differences = [sum(differences) / len(differences)]
            clipped.append([math.exp(d) > 1 and row.advantage > 0 for d in differences])
        assert 0 < metrics["cispo_clip_ratio"] == pytest.approx(share(clipped))
        assert not any(name.startswith("clip_ratio") for name in metrics)

    def test_vespo(self, tmp_path):
        rows = make_rows()
        metrics = compute(configure(Settings(loss_type="vespo"), tmp_path), [rows])[2]
        phi = []
        for row in rows:
            w = math.exp(sum(row.logps) - sum(row.old))
            k, decay = (2.0, 3.0) if row.advantage >= 0 else (3.0, 2.0)
            phi += [w**k * math.exp(decay * (1 - w))] * bool(row.logps)
        assert metrics["vespo/phi_seq_mean"] == pytest.approx(sum(phi) / 7)

    @pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
    def test_weights_after_the_constraint(self, mode, tmp_path):
        rows = make_rows()
        settings = Settings(mode=mode, c_min=0.9, c_max=1.2)
        metrics = compute(configure(settings, tmp_path), [rows[:3], rows[3:]])[2]
        weights = []
        for row in rows:
            differences = [o - s if s == s else 0.0 for o, s in zip(row.old, row.sampler, strict=True)]
            if mode.startswith("sequence") and differences:
                differences = [sum(differences)]
            for rho in map(math.exp, differences):
                inside = 0.9 <= rho <= 1.2
                weights.append(rho if inside else min(max(rho, 0.9), 1.2) if "truncate" in mode else 0.0)
        name = "sampling/importance_sampling_ratio"
        assert metrics[f"{name}/mean"] == pytest.approx(sum(weights) / len(weights))
        assert metrics[f"{name}/min"] == pytest.approx(min(weights))
        assert metrics[f"{name}/max"] == pytest.approx(max(weights))

    def test_no_weights_without_a_correction(self, tmp_path):
        metrics = compute(configure(Settings(), tmp_path), [make_rows()])[2]
        assert not any("importance_sampling_ratio" in name for name in metrics)

    def test_rows_that_off_policy_masking_leaves_out(self, tmp_path):
        rows = make_rows()
        metrics = compute(configure(Settings(off_policy=0.05), tmp_path), [rows])[2]
        drift = [(sum(r.sampler) - sum(r.logps)) / len(r.logps) if r.logps else 0.0 for r in rows]
        masked = sum(row.advantage < 0 and d > 0.05 for row, d in zip(rows, drift, strict=True))
        assert 0 < metrics["off_policy_mask_ratio"] == pytest.approx(masked / 7)

    def test_kl_is_that_of_the_loss(self, tmp_path):
        rows = make_rows()
        for correct in (True, False):
            metrics = compute(configure(Settings(beta=0.1, bias_correction=correct), tmp_path), [rows[:3], rows[3:]])[2]
            values = []
            for row in rows:
                for logp, old, ref in zip(row.logps, row.old, row.ref, strict=True):
                    value = math.exp(ref - logp) - (ref - logp) - 1
                    values.append(value * (math.exp(logp - old) if correct else 1))
            assert metrics["kl"] == pytest.approx(sum(values) / len(values))

    def test_i08_the_ratio_in_the_kl_is_bounded_like_the_others(self, tmp_path):
        """A token that became e^100 times likelier, for whose ratio float32 has no number."""
        row = Row(logps=[-1.0], old=[-101.0], sampler=[-101.0], ref=[-2.0], entropy=[1.0], advantage=0.0)
        _, gradient, metrics = compute(configure(Settings(beta=0.1), tmp_path), [[row]])
        k3, slope = math.exp(-1.0) - (-1.0) - 1, 1 - math.exp(-1.0)
        assert metrics["kl"] == pytest.approx(math.exp(20) * k3)
        assert gradient == pytest.approx([0.1 * math.exp(20) * slope])


def share(flags: list[list[bool]]) -> float:
    return sum(map(sum, flags)) / sum(map(len, flags))


def test_implausible_logprobs_are_pointed_out(tmp_path):
    rows = [Row([-5.0] * 4, [-5.0] * 4, [-1.0] * 4, [-5.0] * 4, [1.0] * 4, 1.0)]
    with pytest.warns(UserWarning, match="sampling_logp_difference/mean"):
        compute(configure(Settings(mode="sequence_mask"), tmp_path), [rows])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compute(configure(Settings(), tmp_path), [rows])
        compute(configure(Settings(mode="sequence_mask"), tmp_path), [make_rows(spread=0.01)])
