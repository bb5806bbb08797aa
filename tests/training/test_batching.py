"""Targets point at the right positions in every layout."""

from __future__ import annotations

import pytest
import torch

from agentrl.training.batching import Layout, MicroBatch, collate, split
from agentrl.types import Outcome, Task, Trajectory


def trajectory(
    prompt: list[int], completion: list[int], mask: list[int] | None = None, logps: list[float] | None = None
) -> Trajectory:
    mask = mask or [1] * len(completion)
    return Trajectory(
        task=Task("group", 0, 0),
        prompt="",
        prompt_ids=prompt,
        completion="",
        completion_ids=completion,
        loss_mask=mask,
        logprobs=logps or [-0.1 * sampled for sampled in mask],
        outcome=Outcome.FINISHED,
    )


def predictions(batch: MicroBatch) -> list[tuple[int, int]]:
    """The pairs (id that predicts, target id)."""
    before = batch.input_ids.flatten()[batch.target_index_N]
    return list(zip(before.tolist(), batch.target_ids_N.tolist(), strict=True))


LAYOUTS = pytest.mark.parametrize("layout", Layout)


@LAYOUTS
def test_a07_the_first_sampled_token_is_trained(layout):
    batch = collate([trajectory([7, 8], [9, 10])], pad_token_id=0, layout=layout)
    assert predictions(batch) == [(8, 9), (9, 10)]


@LAYOUTS
def test_a08_no_target_crosses_a_seam(layout):
    rows = [trajectory([11, 12], [13], logps=[-0.5]), trajectory([21], [22, 23], logps=[-0.1, -0.2])]
    batch = collate(rows, pad_token_id=0, layout=layout)
    assert predictions(batch) == [(12, 13), (21, 22), (22, 23)]
    assert batch.row_N.tolist() == [0, 1, 1]
    torch.testing.assert_close(batch.sampler_logps_N, torch.tensor([-0.5, -0.1, -0.2]))


def test_a08_packed_vectors():
    rows = [trajectory([11, 12], [13], logps=[-0.5]), trajectory([21], [22, 23], logps=[-0.1, -0.2])]
    batch = collate(rows, pad_token_id=0, layout=Layout.PACKED)
    assert batch.input_ids.tolist() == [[11, 12, 13, 21, 22, 23]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 2]]
    logps = torch.zeros(6)
    logps[batch.target_index_N + 1] = batch.sampler_logps_N
    torch.testing.assert_close(logps, torch.tensor([0, 0, -0.5, 0, -0.1, -0.2]))


@LAYOUTS
def test_tool_tokens_are_context_but_no_targets(layout):
    batch = collate([trajectory([1], [2, 3, 4, 5], [1, 0, 0, 1])], pad_token_id=0, layout=layout)
    assert predictions(batch) == [(1, 2), (4, 5)]
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5]]


@LAYOUTS
def test_a02_an_excluded_row_has_no_targets(layout):
    rows = [trajectory([1], [2, 3, 4, 5], [1, 1, 0, 1]), trajectory([1], [6, 7, 8, 9], [1, 1, 0, 1])]
    batch = collate(rows, pad_token_id=0, trained=[True, False], advantages=[1.0, 2.0], layout=layout)
    assert batch.row_N.tolist() == [0, 0, 0]
    assert (batch.rows, batch.trained_rows, batch.tokens) == (2, 1, 3)
    assert batch.advantages_R.tolist() == [1, 2]


def test_h13_an_empty_completion_has_no_targets():
    batch = collate([trajectory([1], []), trajectory([1], [2])], pad_token_id=0)
    assert batch.row_N.tolist() == [1]


def test_e02_padding_that_equals_eos():
    row = trajectory([5], [2, 7, 2, 8, 6, 2], [1, 0, 0, 0, 1, 1])
    batch = collate([row, trajectory([5], [9] * 8)], pad_token_id=2)
    assert batch.input_ids[0].tolist() == [5, 2, 7, 2, 8, 6, 2, 2, 2]
    assert batch.attention_mask[0].tolist() == [1, 1, 1, 1, 1, 1, 1, 0, 0]
    assert predictions(batch)[:3] == [(5, 2), (8, 6), (6, 2)]


@pytest.mark.parametrize(("multiple", "width"), [(None, 5), (4, 8), (5, 5), (128, 128)])
def test_padded_width(multiple, width):
    rows = [trajectory([1, 2], [3, 4, 5]), trajectory([1], [2])]
    batch = collate(rows, pad_token_id=0, pad_to_multiple_of=multiple)
    assert batch.input_ids.shape == (2, width)
    assert batch.attention_mask.sum(1).tolist() == [5, 2]
    assert predictions(batch) == [(2, 3), (3, 4), (4, 5), (1, 2)]


def test_model_inputs_of_each_layout():
    rows = [trajectory([1], [2])]
    expected = {
        Layout.PADDED: {"input_ids", "attention_mask"},
        Layout.PACKED: {"input_ids", "position_ids"},
        Layout.SHARED: {"input_ids", "attention_mask", "position_ids", "segments"},
    }
    assert {layout: set(collate(rows, pad_token_id=0, layout=layout).model_inputs()) for layout in Layout} == expected


def test_a_shared_prompt_stands_once():
    prompt = [*range(20, 28)]
    rows = [trajectory(prompt, [3, 4]), trajectory([9], [8]), trajectory(prompt, [5]), trajectory(prompt, [])]
    batch = collate(rows, pad_token_id=0, layout=Layout.SHARED, pad_to_multiple_of=5)
    assert batch.input_ids.tolist() == [[*prompt, 3, 4, 5, 9, 8, 0, 0]]
    assert batch.position_ids.tolist() == [[*range(8), 8, 9, 8, 0, 1, 0, 1]]
    assert predictions(batch) == [(27, 3), (3, 4), (9, 8), (27, 5)]
    assert batch.row_N.tolist() == [0, 0, 1, 2]


def test_sampled_tokens_that_rows_share_are_targets_of_each():
    common, prompt = [*range(30, 38)], [*range(20, 28)]
    rows = [trajectory(prompt, [*common, 3]), trajectory(prompt, [*common, 4, 5]), trajectory(prompt, common)]
    batch = collate(rows, pad_token_id=0, layout=Layout.SHARED)
    assert batch.input_ids.tolist() == [[*prompt, *common, 3, 4, 5]]
    shared = [*zip([27, *common], common, strict=False)]
    assert predictions(batch) == [*shared, (37, 3), *shared, (37, 4), (4, 5), *shared]
    assert batch.row_N.tolist() == [0] * 9 + [1] * 10 + [2] * 8


@pytest.mark.parametrize("layout", [Layout.PACKED, Layout.SHARED])
def test_packed_length_is_rounded_up_with_a_row_of_its_own(layout):
    rows = [trajectory([1, 2], [3, 4, 5]), trajectory([1], [2])]
    batch = collate(rows, pad_token_id=0, layout=layout, pad_to_multiple_of=4)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 1, 2, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 0]]
    assert predictions(batch) == [(2, 3), (3, 4), (4, 5), (1, 2)]


@LAYOUTS
def test_rows_that_were_never_sampled_leave_a_token_to_run(layout):
    batch = collate([trajectory([], []), trajectory([], [])], pad_token_id=7, layout=layout)
    assert set(batch.input_ids.flatten().tolist()) == {7}
    assert (batch.rows, batch.tokens) == (2, 0)


def test_to_moves_every_tensor():
    batch = collate([trajectory([1], [2])], pad_token_id=0).to("meta")
    assert batch.input_ids.device == batch.advantages_R.device == batch.row_N.device == torch.device("meta")
    assert batch.old_logps_N is None
    assert batch.rows == 1


def test_errors_name_the_row():
    broken = trajectory([1], [2, 3])
    broken.loss_mask = [1]
    with pytest.raises(ValueError, match="row 1 has 2 completion ids, 1 mask entries and 2 logprobs"):
        collate([trajectory([1], [2]), broken], pad_token_id=0)
    with pytest.raises(ValueError, match="row 0 has an empty prompt"):
        collate([trajectory([], [2])], pad_token_id=0)
    with pytest.raises(ValueError, match="1 trajectories but 2 advantages"):
        collate([trajectory([1], [2])], pad_token_id=0, advantages=[1, 2])


def test_split_keeps_the_order():
    assert split([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4], [5]]
    assert split([], 2) == []
