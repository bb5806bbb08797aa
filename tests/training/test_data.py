"""The order of prompts, groups and micro-batches."""

from itertools import islice

import datasets
import pytest

from agentrl.errors import ConfigurationError
from agentrl.training.data import EmptyRows, Schedule, Shape, Stream, make_tasks
from agentrl.training.loaders import make_loader
from tests.training.runs import make_trainer

SHAPE = Shape(prompts=2, generations=2, steps=2, iterations=1)


def rows(count):
    return datasets.Dataset.from_dict({"prompt": [f"p{i}" for i in range(count)]})


def prompts_of(step, shape=SHAPE):
    return [task.prompt for task in make_tasks(step, shape, seed=0)]


def stream(count):
    return datasets.IterableDataset.from_generator(lambda: ({"prompt": f"p{i}"} for i in range(count)))


EXPECTED = [["p0", "p0", "p1", "p1"]] * 2 + [["p2", "p2", "p3", "p3"]] * 2


def test_a_window_holds_whole_groups_and_is_used_for_all_its_steps():
    loader = make_loader(Schedule(rows(4), SHAPE, seed=0, shuffle=False))
    assert [prompts_of(step) for step in loader] == EXPECTED


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_keeps_its_order_whatever_the_workers_L01(workers):
    if workers:
        with pytest.warns(UserWarning, match="dataloader_num_workers=2"):
            loader = make_loader(Stream(stream(5), SHAPE), workers=workers)
    else:
        loader = make_loader(Stream(stream(5), SHAPE))
    assert [prompts_of(step) for step in islice(loader, 6)] == EXPECTED + EXPECTED[:2]


def test_iterations_repeat_the_slots_of_a_window():
    shape = Shape(prompts=1, generations=2, steps=2, iterations=2)
    schedule = Schedule(rows(1), shape, seed=0, shuffle=False)
    assert [schedule[i].slot for i in range(len(schedule))] == [0, 1, 0, 1]
    assert {schedule[i].window for i in range(len(schedule))} == {(0, 0)}


def test_each_epoch_has_its_own_order_and_every_row_once():
    schedule = Schedule(rows(8), Shape(prompts=2, generations=2, steps=1), seed=3, shuffle=True)
    loader = make_loader(schedule)
    epochs = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        epochs.append([prompt for step in loader for prompt in prompts_of(step)[::2]])
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1]) == [f"p{i}" for i in range(8)]
    again = make_loader(schedule)
    again.set_epoch(1)
    assert [prompt for step in again for prompt in prompts_of(step)[::2]] == epochs[1]


def test_processes_share_a_window_without_overlap():
    shapes = [Shape(prompts=2, generations=4, steps=1, rank=rank, world_size=4) for rank in range(4)]
    step = Schedule(rows(2), Shape(prompts=2, generations=4, steps=1), seed=0, shuffle=False)[0]
    members = [(task.group, task.member) for shape in shapes for task in make_tasks(step, shape, seed=0)]
    assert members == [(f"0.0.{p}", m) for p in range(2) for m in range(4)]


def test_members_share_group_and_seed_and_groups_differ():
    step = Schedule(rows(2), SHAPE, seed=0, shuffle=False)[0]
    tasks = make_tasks(step, SHAPE, seed=5)
    assert tasks[0].seed == tasks[1].seed != tasks[2].seed
    assert [t.member for t in tasks] == [0, 1, 0, 1]
    assert [t.group for t in tasks] == ["0.0.0", "0.0.0", "0.0.1", "0.0.1"]


def test_equal_prompts_are_different_groups():
    """Invariant 7: a group is its task, never its text."""
    same = datasets.Dataset.from_dict({"prompt": ["same", "same"]})
    tasks = make_tasks(Schedule(same, SHAPE, seed=0, shuffle=False)[0], SHAPE, seed=0)
    assert len({t.group for t in tasks}) == 2


def test_columns_reach_the_task_without_prompt_and_environment():
    data = datasets.Dataset.from_dict({"prompt": ["q"], "answer": ["1"], "environment": ["game"]})
    [task, _] = make_tasks(Schedule(data, Shape(1, 2, 1), seed=0, shuffle=False)[0], Shape(1, 2, 1), seed=0)
    assert task.columns == {"answer": "1"}
    assert (task.prompt, task.environment) == ("q", "game")


def test_a_dataset_smaller_than_a_window_is_refused():
    with pytest.raises(ConfigurationError, match=r"has 1 rows.*takes 2 prompts"):
        Schedule(rows(1), SHAPE, seed=0, shuffle=False)


def test_evaluation_keeps_a_last_window_that_is_not_full():
    schedule = Schedule(rows(3), Shape(prompts=2, generations=2, steps=1), seed=0, shuffle=False, keep_last=True)
    assert [prompts_of(schedule[i], Shape(2, 2, 1)) for i in range(len(schedule))] == [EXPECTED[0], ["p2", "p2"]]


def test_empty_rows_make_tasks_without_a_prompt():
    step = Schedule(EmptyRows(2), SHAPE, seed=0, shuffle=True)[0]
    assert [task.prompt for task in make_tasks(step, SHAPE, seed=0)] == [None] * 4


def test_workers_read_rows_ahead():
    loader = make_loader(Schedule(rows(4), SHAPE, seed=0, shuffle=False), workers=1)
    assert [prompts_of(step) for step in loader] == EXPECTED


TOOL_SCHEMAS = [
    [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}],
    [{"type": "function", "function": {"name": "find", "parameters": {"properties": {"what": {"type": "string"}}}}}],
]


def test_a_column_of_tool_definitions_is_passed_on_cleaned_and_told_of_C07(tmp_path):
    """As in TRL the model is not shown it; Arrow gives each schema the arguments of the others, which go again."""
    seen = []

    def reward(tools, completions, **_):
        seen.extend(tools)
        return [float(i) for i in range(len(completions))]

    data = datasets.Dataset.from_dict({"prompt": ["p", "q"], "tools": TOOL_SCHEMAS})
    assert "what" in data[0]["tools"][0]["function"]["parameters"]["properties"], "Arrow fills up"
    with pytest.warns(UserWarning, match="column `tools`, which the model is not shown"):
        trainer = make_trainer("grpo", tmp_path, reward=reward, dataset=data, shuffle_dataset=False, max_steps=1)
    trainer.train()
    assert seen == [TOOL_SCHEMAS[0]] * 2 + [TOOL_SCHEMAS[1]] * 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (datasets.DatasetDict({"train": rows(2), "test": rows(2)}), r"pick one of \['test', 'train'\]"),
        ([{"prompt": "p"}], "a list is not a dataset"),
    ],
)
def test_what_is_not_a_dataset_is_refused(given, message, tmp_path):
    with pytest.raises(ConfigurationError, match=message):
        make_trainer("grpo", tmp_path, dataset=given)


def test_the_last_step_of_a_window_is_known():
    shape = Shape(prompts=2, generations=2, steps=2, iterations=2)
    schedule = Schedule(rows(4), shape, seed=0, shuffle=False)
    expected = [False, False, False, True] * 2
    assert [schedule[i].last for i in range(8)] == expected
    assert [step.last for step in islice(Stream(stream(4), shape), 8)] == expected
