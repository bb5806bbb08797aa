"""Losses against hand-computed numbers, plain Python loops and finite differences."""

from __future__ import annotations

import math

import pytest
import torch

from agentrl.objectives.aggregation import AGGREGATIONS, Denominators, row_loss, token_loss
from agentrl.objectives.losses import cispo_loss, clipped_surrogate, log_ratios, rloo_loss, sapo_loss, vespo_loss
from agentrl.objectives.segments import row_counts


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


class TestClippedSurrogate:
    def test_i08_upper_bound(self):
        ratios = vector(0.5, 1, 9)
        result = clipped_surrogate(ratios.log(), vector(1, 1, 1), 0.2, 0.2)
        torch.testing.assert_close(result.loss, vector(-0.5, -1, -1.2))
        assert result.clipped_high.tolist() == [False, False, True]
        assert not result.clipped_low.any()

    def test_lower_bound_acts_on_negative_advantages(self):
        result = clipped_surrogate(vector(0.5, 1, 9).log(), vector(-1, -1, -1), 0.2, 0.3)
        torch.testing.assert_close(result.loss, vector(0.8, 1, 9))
        assert result.clipped_low.tolist() == [True, False, False]
        assert not result.clipped_high.any()

    def test_bounds_differ(self):
        result = clipped_surrogate(vector(1.25, 1.35).log(), vector(2, 2), 0.2, 0.28)
        torch.testing.assert_close(result.loss, vector(-2.5, -2.56))

    def test_delta_bounds_a_negative_advantage(self):
        result = clipped_surrogate(vector(9, 9, 2).log(), vector(-1, 1, -1), 0.2, 0.2, delta=3.0)
        torch.testing.assert_close(result.loss, vector(3, -1.2, 2))

    def test_gradient_against_finite_differences(self):
        log_ratio = vector(-0.5, -0.1, 0.0, 0.1, 0.5, 2.0).requires_grad_()
        for sign in (1, -1):
            advantages = sign * vector(1, 0.5, 2, 1, 3, 1)
            assert torch.autograd.gradcheck(
                lambda x, a=advantages: clipped_surrogate(x, a, 0.2, 0.25, 4.0).loss, log_ratio
            )

    def test_clipping_stops_the_gradient(self):
        log_ratio = vector(0.5, 0.5).requires_grad_()
        clipped_surrogate(log_ratio, vector(1, -1), 0.2, 0.2).loss.sum().backward()
        assert log_ratio.grad[0] == 0
        assert log_ratio.grad[1] != 0


class TestLogRatios:
    row = torch.tensor([0, 0, 2])

    def test_on_policy_is_zero_with_the_gradient_of_the_logps(self):
        logps = vector(-1, -2, -3).requires_grad_()
        for level in ("token", "sequence"):
            ratio = log_ratios(logps, None, self.row, 3, level).exp()
            assert ratio.tolist() == [1, 1, 1]
            (gradient,) = torch.autograd.grad(ratio.sum(), logps)
            assert gradient.tolist() == [1, 1, 1]

    def test_sequence_level_is_the_mean_of_the_row(self):
        logps, old = vector(-1, -2, -3), vector(-1.5, -2.1, -2)
        expected = vector(0.3, 0.3, -1)
        torch.testing.assert_close(log_ratios(logps, old, self.row, 3, "sequence"), expected)
        torch.testing.assert_close(log_ratios(logps, old, self.row, 3), vector(0.5, 0.1, -1))

    def test_unknown_level_is_named(self):
        with pytest.raises(ValueError, match=r"importance_sampling_level 'row'.*token, sequence"):
            log_ratios(vector(0), None, torch.tensor([0]), 1, "row")


class TestCispo:
    def test_i08_values(self):
        result = cispo_loss(vector(-1, -2, -3), vector(0.5, 1, 9).log(), vector(1, 1, 1), epsilon_max=5.0)
        torch.testing.assert_close(result.loss, vector(0.5, 2, 15))
        assert result.clipped_high.tolist() == [False, False, True]
        assert not result.clipped_low.any()

    def test_every_token_has_the_gradient_of_reinforce_times_its_weight(self):
        logps = vector(-1, -2, -3).requires_grad_()
        log_ratio = logps - (logps - vector(0.5, 1, 9).log()).detach()
        cispo_loss(logps, log_ratio, vector(1, -1, 2), epsilon_max=5.0).loss.sum().backward()
        torch.testing.assert_close(logps.grad, vector(-0.5, 1, -10))

    def test_a_clipped_weight_of_a_negative_advantage_is_not_counted(self):
        assert not cispo_loss(vector(-1), vector(9).log(), vector(-1), epsilon_max=5.0).clipped_high.any()


class TestSapo:
    def test_values(self):
        loss = sapo_loss(vector(1, 1.5, 1.5).log(), vector(2, 2, -2), temperature_pos=1.0, temperature_neg=2.0)
        expected = vector(-2 * 2, -2 * 4 / (1 + math.exp(-0.5)), 2 * 2 / (1 + math.exp(-1.0)))
        torch.testing.assert_close(loss, expected)

    def test_on_policy_gradient_is_that_of_the_ratio(self):
        log_ratio = vector(0, 0).requires_grad_()
        sapo_loss(log_ratio, vector(3, -2), 0.7, 1.3).sum().backward()
        torch.testing.assert_close(log_ratio.grad, vector(-3, 2))

    def test_gradient_against_finite_differences(self):
        log_ratio = vector(-3, -0.5, 0.0, 0.4, 1.5).requires_grad_()
        assert torch.autograd.gradcheck(lambda x: sapo_loss(x, vector(1, -2, 0.5, -1, 3), 1.0, 1.05), log_ratio)


class TestVespo:
    parameters = {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}  # noqa: RUF012
    row = torch.tensor([0, 0, 2])

    def loss(self, *weights: float, advantages: tuple[float, ...] = (1, 1, -2)):
        return vespo_loss(vector(-1, -2, -3), vector(*weights).log(), vector(*advantages), self.row, **self.parameters)

    def test_values(self):
        result = self.loss(0.5, 1.0, 1.2)
        positive, negative = 0.25 * math.exp(1.5), 1.2**3 * math.exp(-0.4)
        torch.testing.assert_close(result.weight, vector(positive, positive, negative))
        torch.testing.assert_close(result.loss, vector(positive, 2 * positive, -6 * negative))

    def test_on_policy_it_is_reinforce(self):
        assert self.loss(1.0, 1.0, 1.0).weight.tolist() == [1, 1, 1]

    def test_rows_far_away_on_either_side_weigh_nothing(self):
        log_weight = torch.tensor([-math.inf, 0.0, 200.0])  # the last one overflows
        result = vespo_loss(torch.ones(3), log_weight, torch.ones(3), self.row, **self.parameters)
        assert result.weight.tolist() == [0, 0, 0]

    def test_the_gradient_does_not_go_through_the_weight(self):
        logps = vector(-1, -2, -3).requires_grad_()
        log_weight = torch.stack([logps[0] + logps[1] + 3.5, logps.new_zeros(()), logps[2] + 2.9])
        result = vespo_loss(logps, log_weight, vector(1, 1, -2), self.row, **self.parameters)
        result.loss.sum().backward()
        torch.testing.assert_close(logps.grad, -result.weight * vector(1, 1, -2))


def test_sapo_of_a_ratio_that_overflows_has_no_gradient() -> None:
    log_ratio = torch.tensor([100.0], requires_grad=True)
    sapo_loss(log_ratio, torch.tensor([1.0]), 1.0, 1.05).backward()
    assert log_ratio.grad.tolist() == [0.0]


def test_luspo_of_rows_with_one_ratio_is_gspo_times_the_length():
    """The loss of GSPO is a mean over rows; each row's part is multiplied by its number of tokens."""
    old, row = vector(-1, -2, -1, -3), torch.tensor([0, 0, 0, 2])
    advantages = vector(1, 0, -2)
    logps = vector(-1.1, -1.7, -1.2, -3.1).requires_grad_()
    loss_N = clipped_surrogate(log_ratios(logps, old, row, 3, "sequence"), advantages[row], 0.2, 0.2).loss
    loss = token_loss(loss_N, row, 3, "luspo", Denominators(2, 4), max_completion_length=9)
    ratios = [math.exp(0.0 / 3), math.exp(-0.1)]
    assert loss.item() == pytest.approx((3 * -ratios[0] * 1 + 1 * ratios[1] * 2) / 2)
    loss.backward()
    torch.testing.assert_close(logps.grad, vector(*[-ratios[0] / 2] * 3, ratios[1]))


LOSS = vector(1, 3, 5, 2)
ROW = torch.tensor([0, 0, 0, 2])  # row 1 is masked out


class TestTokenLoss:
    @pytest.mark.parametrize(
        ("loss_type", "expected"),
        [
            ("grpo", (9 / 3 + 2) / 2),
            ("dapo", 11 / 4),
            ("bnpo", 11 / 4),
            ("dr_grpo", 11 / (2 * 10)),
        ],
    )
    def test_values(self, loss_type, expected):
        counts = Denominators(rows=2, tokens=4)
        loss = token_loss(LOSS, ROW, 3, loss_type, counts, max_completion_length=10)
        assert loss.item() == pytest.approx(expected)

    def test_counts_are_those_of_the_step(self):
        counts = Denominators(rows=8, tokens=40, micro_batches=4, world_size=2)
        losses = {
            name: token_loss(LOSS, ROW, 3, name, counts, max_completion_length=10).item() for name in AGGREGATIONS
        }
        assert losses == pytest.approx(
            {
                **dict.fromkeys(("grpo", "sapo"), 2 * 5 / 8),
                **dict.fromkeys(("dapo", "cispo", "vespo"), 2 * 11 / 40),
                "bnpo": 2 * 11 / 4 / 4,
                "dr_grpo": 2 * 11 / 80,
                "luspo": 2 * 11 / 8,
            }
        )

    @pytest.mark.parametrize("pad_rows", [0, 1, 5])
    @pytest.mark.parametrize("loss_type", ["grpo", "dapo", "bnpo"])
    def test_i02_rows_without_tokens_change_nothing(self, loss_type, pad_rows):
        counts = Denominators(rows=1, tokens=3)
        loss = token_loss(
            vector(2, 2, 2), torch.zeros(3, dtype=torch.int64), 1 + pad_rows, loss_type, counts,
            max_completion_length=3,
        )  # fmt: skip
        assert loss.item() == 2

    def test_i04_divisor(self):
        counts = Denominators(rows=1, tokens=4)
        loss = token_loss(vector(3, 3, 3, 3), torch.zeros(4).long(), 1, "dapo", counts, max_completion_length=4)
        assert loss.item() == 3

    @pytest.mark.parametrize("loss_type", AGGREGATIONS)
    @pytest.mark.parametrize("counts", [Denominators(0, 0, 0), Denominators(4, 20, 2, 2)])
    def test_i04_i09_nothing_trained_is_zero_and_runs_backward(self, loss_type, counts):
        logps = vector(-1, -2).requires_grad_()
        empty = logps[torch.zeros(2, dtype=torch.bool)]
        loss = token_loss(empty, torch.zeros(0).long(), 2, loss_type, counts, max_completion_length=5)
        loss.backward()
        assert loss.item() == 0
        assert logps.grad.tolist() == [0, 0]

    def test_unknown_type_is_named(self):
        with pytest.raises(ValueError, match=r"loss_type 'ppo'.*grpo, dapo, bnpo, dr_grpo"):
            token_loss(LOSS, ROW, 3, "ppo", Denominators(2, 4), max_completion_length=10)


class TestRlooLoss:
    logps = vector(-1, -2, -0.5, -3)
    old = vector(-1.1, -1.9, -1.5, -2.9)
    row = torch.tensor([0, 0, 2, 3])
    advantages = vector(1, 7, 2, -1)

    def test_against_a_loop(self):
        result = rloo_loss(self.logps, self.old, self.advantages, self.row, 0.2, 0.3)
        expected = []
        for r in (0, 2, 3):
            tokens = [n for n in range(4) if self.row[n] == r]
            ratio = math.exp(sum((self.logps[n] - self.old[n]).item() for n in tokens))
            advantage = self.advantages[r].item()
            expected.append(-min(ratio * advantage, min(max(ratio, 0.8), 1.3) * advantage))
        torch.testing.assert_close(result.loss, vector(*expected))
        assert result.clipped_high.tolist() == [False, True, False]

    @pytest.mark.parametrize("advantage", [1.5, 0.0, -1.5])
    @pytest.mark.parametrize("drift", [-4.0, -0.001, 0.0, 0.001, 0.05, 0.5, 4.0])
    def test_i08_no_ratio_of_a_long_row_overflows(self, advantage: float, drift: float) -> None:
        """Rows of 100 tokens in float32, up to a ratio of e^400, against plain Python and finite differences."""
        old = [-8.0 + 0.01 * n for n in range(100)]

        def loss(logps: list[float]) -> float:
            ratio = math.exp(min(math.fsum(logps) - math.fsum(old), 20.0))
            return -min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)

        logps = [value + drift for value in old]
        nudge = [logps[0] + 1e-5, *logps[1:]], [logps[0] - 1e-5, *logps[1:]]
        slope = (loss(nudge[0]) - loss(nudge[1])) / 2e-5
        logps_N = torch.tensor(logps, dtype=torch.float32, requires_grad=True)
        row_N = torch.zeros(100, dtype=torch.int64)
        result = rloo_loss(logps_N, torch.tensor(old), torch.tensor([advantage]), row_N, 0.2, 0.2)
        result.loss.sum().backward()
        torch.testing.assert_close(result.loss, torch.tensor([loss(logps)]), rtol=1e-3, atol=0)
        torch.testing.assert_close(logps_N.grad, torch.full((100,), slope), rtol=1e-3, atol=1e-30)
        assert result.clipped_high.item() == (advantage > 0 and drift > 0.002)

    def test_a_row_without_tokens_counts_nowhere(self):
        loss = rloo_loss(self.logps, None, self.advantages, self.row, 0.2, 0.2).loss
        assert loss.tolist() == [-1, -2, 1]
        assert row_loss(loss, Denominators(rows=3, tokens=4)).item() == pytest.approx(-2 / 3)

    def test_on_policy_gradient_is_reinforce(self):
        logps = self.logps.clone().requires_grad_()
        loss = rloo_loss(logps, None, self.advantages, self.row, 0.2, 0.2).loss
        row_loss(loss, Denominators(rows=3, tokens=4)).backward()
        torch.testing.assert_close(logps.grad, -vector(1, 1, 2, -1) / 3)

    def test_nothing_trained(self):
        logps = vector(-1).requires_grad_()
        loss = rloo_loss(logps[:0], None, vector(1, 2), torch.zeros(0).long(), 0.2, 0.2).loss
        row_loss(loss, Denominators(rows=0, tokens=0)).backward()
        assert logps.grad.item() == 0


def test_a10_an_advantage_reaches_every_trained_token_of_its_rows():
    # Two step rows of one trajectory, of width 4, with masks [0,0,1,1] and [1,1,0,0].
    advantages_R, row = vector(0.5, 0.5), torch.tensor([0, 0, 1, 1])
    logps = vector(-1, -1, -1, -1).requires_grad_()
    surrogate = clipped_surrogate(log_ratios(logps, None, row, 2), advantages_R[row], 0.2, 0.2)
    token_loss(surrogate.loss, row, 2, "dapo", Denominators(2, 4), max_completion_length=4).backward()
    assert (logps.grad * -4).tolist() == [0.5, 0.5, 0.5, 0.5]


# The same eight ragged rows, one of them masked out, in any split.

LENGTHS = [3, 1, 7, 0, 5, 2, 4, 6]
TOTAL = sum(LENGTHS)
TOKEN_ROW = torch.repeat_interleave(torch.arange(8), torch.tensor(LENGTHS))


def gradient(per_micro_batch: int, loss_type: str, level: str, processes: int = 1) -> torch.Tensor:
    """Gradient of one optimizer step with respect to the logprobs, as accumulation and DDP compute it."""
    generator = torch.Generator().manual_seed(3)
    logps = (-torch.rand(TOTAL, generator=generator, dtype=torch.float64)).requires_grad_()
    old = logps.detach() + 0.3 * torch.randn(TOTAL, generator=generator, dtype=torch.float64)
    advantages_R = torch.randn(8, generator=generator, dtype=torch.float64)
    micro_batches = [range(start, start + per_micro_batch) for start in range(0, 8, per_micro_batch)]
    counts = Denominators(
        rows=int((row_counts(TOKEN_ROW, 8) > 0).sum()),
        tokens=TOTAL,
        micro_batches=sum(any(LENGTHS[r] for r in rows) for rows in micro_batches),
        world_size=processes,
    )
    total = torch.zeros(TOTAL, dtype=torch.float64)
    for process in range(processes):
        for rows in micro_batches[process::processes]:
            mine = torch.isin(TOKEN_ROW, torch.tensor(rows))
            row_N = TOKEN_ROW[mine] - rows.start
            part_R = advantages_R[rows.start : rows.stop]
            if loss_type == "rloo":
                loss = row_loss(rloo_loss(logps[mine], old[mine], part_R, row_N, 0.2, 0.2).loss, counts)
            else:
                ratio = log_ratios(logps[mine], old[mine], row_N, len(rows), level)
                loss_N = clipped_surrogate(ratio, part_R[row_N], 0.2, 0.2).loss
                loss = token_loss(loss_N, row_N, len(rows), loss_type, counts, max_completion_length=8)
            total += torch.autograd.grad(loss, logps)[0]
    return total / processes


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "rloo"])
def test_gradient_does_not_depend_on_the_split(loss_type, level):
    whole = gradient(8, loss_type, level)
    assert whole.abs().sum() > 0
    for per_micro_batch in (1, 2, 4):
        torch.testing.assert_close(gradient(per_micro_batch, loss_type, level), whole, atol=1e-9, rtol=0)
        split = gradient(per_micro_batch, loss_type, level, processes=2)
        torch.testing.assert_close(split, whole, atol=1e-9, rtol=0)


def test_bnpo_of_single_rows_is_grpo():
    torch.testing.assert_close(gradient(1, "bnpo", "token"), gradient(8, "grpo", "token"))


def test_i03_global_normalisation():
    counts = Denominators(rows=2, tokens=8, micro_batches=2, world_size=2)
    first = token_loss(vector(1, 1), torch.zeros(2).long(), 1, "dapo", counts, max_completion_length=8)
    second = token_loss(vector(*[3] * 6), torch.zeros(6).long(), 1, "dapo", counts, max_completion_length=8)
    assert (first + second).item() / 2 == 2.5
