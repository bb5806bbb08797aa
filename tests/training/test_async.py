"""Rollouts that are played while the optimizer works: how stale, in which order, and what becomes of errors."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import IterableDataset
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback

from agentrl.errors import ConfigurationError, GenerationError
from agentrl.generation.base import SamplingParams
from agentrl.objectives.aggregation import AGGREGATIONS
from agentrl.rollout.journal.reading import Records
from agentrl.testing.models import tiny_model
from agentrl.testing.scripted import ScriptedGenerator
from agentrl.training.async_collection import may_start
from agentrl.training.batching import collate
from agentrl.training.metrics import MetricStore
from agentrl.training.objective_metrics import sampler_metrics
from agentrl.training.scoring import Scores
from agentrl.training.trainer import RolloutTrainer
from agentrl.training.windows import TrainingRow, mark_stale
from agentrl.types import FinishReason, Outcome, Task, Trajectory, Turn
from tests.training.helpers import TOKENIZER, chat_rows
from tests.training.runs import (
    length_and_ids,
    local,
    logged,
    make_config,
    make_trainer,
    rows,
    scripted,
    small_model,
    step_logs,
    untimed,
    weights,
)
from tests.waiting import LONG, eventually, wait_until

CALL = TOKENIZER.encode('<tool_call>{"name": "press", "arguments": {}}</tool_call><|im_end|>')
DONE = TOKENIZER.encode("<|im_end|>")


class Buttons:
    """Reward is how often the button was pressed, and a part that the episode's seed decides."""

    def __init_subclass__(cls) -> None:
        cls.open = set()

    open: set[int] = set()  # noqa: RUF012 - instances, of each class

    def __init__(self) -> None:
        self.open.add(id(self))

    def reset(self, seed: int, **_: Any) -> str:
        self.count = seed % 7 / 10
        return "go"

    async def press(self) -> str:
        """Press the button."""
        await asyncio.sleep(0.001)
        self.count += 1
        return "pressed"

    def get_reward(self) -> float:
        return self.count

    def close(self) -> None:
        self.open.discard(id(self))


def chat_model() -> Any:
    return tiny_model("qwen3", vocab_size=len(TOKENIZER), max_position_embeddings=1024)


def pressing(_: Any = None) -> ScriptedGenerator:
    """Writes some text, and then a call or an end, as the turn's seed says: the same for any weights."""

    def turn(_: str, __: list[int], params: SamplingParams) -> list[int]:
        draw = random.Random(params.seed)
        return [draw.randrange(40, 60) for _ in range(draw.randint(1, 3))] + (CALL if draw.random() < 0.5 else DONE)

    return ScriptedGenerator(turn)


def calling() -> ScriptedGenerator:
    """Calls the tool in the first turn of each episode, and then ends it."""
    asked: set[str] = set()

    def turn(session: str, _: list[int], __: SamplingParams) -> list[int]:
        again = session in asked
        asked.add(session)
        return DONE if again else CALL

    return ScriptedGenerator(turn)


def own_weights(model: Any) -> Any:
    generator = local(model)
    generator.own_weights()
    return generator


class Unhurried(TrainerCallback):
    """Lets what is played ahead end within each optimizer step, so that how stale it is depends on nobody's speed."""

    def __init__(self, trainer: RolloutTrainer) -> None:
        self._ahead = trainer.collector._ahead  # type: ignore[attr-defined]
        trainer.add_callback(self)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        wait_until(lambda: all(ahead.play.future.done() for ahead in self._ahead.values()))


def make(algorithm: str, folder: Path, *, environment: bool = False, **options: Any) -> RolloutTrainer:
    """A trainer of five steps, of text or in an environment with a tool."""
    options = {"max_steps": 5, "dataset": rows(10), "generator": local, "max_completion_length": 6, **options}
    if environment:
        options |= {
            "learning_rate": 1e-3,
            "generator": pressing,
            "dataset": chat_rows(10),
            "max_completion_length": 120,
            "reward": None,
        }
        options["keywords"] = {"environment_factory": Buttons, "processing_class": TOKENIZER}
        options["model"] = chat_model()
    return make_trainer(algorithm, folder, **options)


# Staleness 0 ---------------------------------------------------------------------------------------------------

SMALL = {"per_device_train_batch_size": 2}
SAME = {
    "plain": {},
    "environment": {"environment": True, "gradient_accumulation_steps": 2, "num_iterations": 2},
    "iterations": {"num_iterations": 2},
    "accumulation": {**SMALL, "gradient_accumulation_steps": 2, "beta": 0.1},
    "two windows in a step": {**SMALL, "gradient_accumulation_steps": 2, "steps_per_generation": 1},
    "two steps of a window": {**SMALL, "steps_per_generation": 2, "num_iterations": 2},
    "a copy of the weights": {"generator": own_weights, "num_iterations": 2},
    "epochs": {"max_steps": -1, "num_train_epochs": 2, "dataset": rows(5), **SMALL, "gradient_accumulation_steps": 2},
}
ROUNDED = {"sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max"}
"""Rounding differs with the rows that happen to share a step of the generator, in every trainer."""


def cases(names: Iterable[str], fast: set[tuple[str, str]]) -> list[Any]:
    """Each name with both algorithms; what is not fast is slow."""
    return [
        pytest.param(name, algorithm, marks=[] if (name, algorithm) in fast else [pytest.mark.slow])
        for name in names
        for algorithm in ("grpo", "rloo")
    ]


@pytest.mark.parametrize(
    ("name", "algorithm"), cases(SAME, {("environment", "grpo"), ("environment", "rloo"), ("iterations", "grpo")})
)
def test_staleness_0_is_the_trainer_that_is_not_async_bit_for_bit(name, algorithm, tmp_path):
    """Invariant 9: parameters and everything that is logged."""
    options = dict(SAME[name])
    ahead = make(f"async_{algorithm}", tmp_path, max_staleness=0, **options)
    options |= {"generator": local} if name == "a copy of the weights" else {}
    sync = make(algorithm, tmp_path, **options)
    before = weights(sync)
    sync.train()
    ahead.train()
    assert max((before[key] - value).abs().max() for key, value in weights(sync).items()) > 1e-3
    ours, theirs = weights(ahead), weights(sync)
    assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []
    for log, expected in zip(step_logs(ahead), step_logs(sync), strict=True):
        own = {key for key in log if key.startswith("async/")}
        assert log.keys() - own == expected.keys()
        for key in untimed(expected) - ROUNDED:
            assert log[key] == expected[key], key
        for key in ROUNDED & expected.keys():
            assert log[key] == pytest.approx(expected[key], abs=1e-5)


# How stale, and in which order ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("step", "version", "most", "may"), [(3, 3, 0, True), (4, 3, 0, False), (5, 3, 2, True)])
def test_a_window_may_start_when_its_weights_will_not_be_too_old(step, version, most, may):
    assert may_start(step, version, most) is may


PACES = {
    "1": {"max_staleness": 1},
    "3, weights handed over every other step": {"max_staleness": 3, "weight_sync_steps": 2},
    "3, a window used twice": {"max_staleness": 3, "num_iterations": 2},
    "2, two windows in a step": {
        "max_staleness": 2, **SMALL, "gradient_accumulation_steps": 2, "steps_per_generation": 1
    },
    "2, short last steps of epochs": {
        "max_staleness": 2, "max_steps": -1, "num_train_epochs": 3, "dataset": rows(5),
        **SMALL, "gradient_accumulation_steps": 2, "steps_per_generation": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("pace", "algorithm"), cases(PACES, {("1", "rloo"), ("3, weights handed over every other step", "grpo")})
)
def test_staleness_is_bounded_by_what_is_started_and_nothing_is_thrown_away(pace, algorithm, tmp_path):
    """Rollouts are as old as they may be, never older; each is trained once, in the order of the schedule."""
    order: dict[str, list[int]] = {}

    def run(name: str, **options: Any) -> RolloutTrainer:
        def reward(row: list[int], **columns: Any) -> list[float]:
            order.setdefault(name, []).extend(row)
            return length_and_ids(**columns)

        trainer = make(name, tmp_path, reward=reward, **options)
        if name.startswith("async"):
            Unhurried(trainer)
        trainer.train()
        return trainer

    options = {"max_steps": 8, "dataset": rows(6), **PACES[pace]}
    ahead = run(f"async_{algorithm}", **options)
    most = options.pop("max_staleness")
    options.pop("weight_sync_steps", None)
    run(algorithm, **options)
    assert order[f"async_{algorithm}"] == order[algorithm]
    reached = [value for value in logged(ahead, "async/staleness/max") if value is not None]
    assert max(reached) == most
    assert reached[0] == 0
    assert min(logged(ahead, "loss")) != max(logged(ahead, "loss"))
    wait_until(lambda: "async" not in " ".join(thread.name for thread in threading.enumerate()))


def test_the_tokens_of_a_rollout_that_went_on_across_updates_have_their_versions(tmp_path):
    """Long turns, and weights that change meanwhile: what is recorded for a token is its probability then."""
    trainer = make(
        "async_grpo", tmp_path, max_staleness=4, max_completion_length=60, max_steps=6, generation_batch_size=4,
        per_device_train_batch_size=4, dataset=rows(20),
    )  # fmt: skip
    spans: list[int] = []
    reward = trainer.collector._reward

    def look(trajectories: list[Trajectory]) -> Any:
        spans.extend(len({version for turn in t.turns for version in turn.versions}) for t in trajectories)
        return reward(trajectories)

    trainer.collector._reward = look  # type: ignore[method-assign]
    trainer.train()
    assert max(spans) > 1
    fresh = [value for value in logged(trainer, "sampling/sampling_logp_difference/max") if value is not None]
    assert max(fresh) < 1e-4


# What the loss makes of it -------------------------------------------------------------------------------------


def spanning_trajectory() -> Trajectory:
    """Two turns around a suffix of two; version 3 drew the first two tokens, version 5 the others."""
    return Trajectory(
        task=Task("g", 0, 0), prompt="p", prompt_ids=[1, 2], completion="c",
        completion_ids=[5, 6, 7, 20, 21, 8], loss_mask=[1, 1, 1, 0, 0, 1],
        logprobs=[-0.5, -0.25, -1.0, 0.0, 0.0, float("nan")], outcome=Outcome.FINISHED,
        turns=[
            Turn(0, 3, FinishReason.STOP, weights_version=3, updates=((2, 5),)),
            Turn(5, 6, FinishReason.STOP, weights_version=4),
        ],
    )  # fmt: skip


def test_a_stale_token_has_its_ratio_against_what_was_recorded_and_a_fresh_one_as_ever(tmp_path):
    """Of an unknown logprob there is no better guess than that of a fresh token."""
    trajectory = spanning_trajectory()
    [batch] = mark_stale([collate([trajectory], pad_token_id=0)], [TrainingRow(trajectory, True)], 5)
    assert batch.stale_N is not None
    assert batch.stale_N.tolist() == [True, True, False, False]
    trainer = make("async_grpo", tmp_path)
    logps_N = torch.tensor([-0.6, -0.3, -1.1, -2.0], requires_grad=True)
    scores = Scores(logps_N, torch.zeros(4))
    assert trainer.collector.baselines.on_policy
    old = trainer.old_logps(scores, batch)
    assert old is not None
    assert old.tolist() == pytest.approx([-0.5, -0.25, -1.1, -2.0])
    assert not old.requires_grad
    metrics = MetricStore()
    sampler_metrics(scores, batch, metrics)
    assert metrics.reduce(1) == {  # of the third token only
        "sampling/sampling_logp_difference/mean": pytest.approx(0.1),
        "sampling/sampling_logp_difference/max": pytest.approx(0.1),
    }
    [unmarked] = mark_stale([batch], [TrainingRow(trajectory, True)], 3)
    assert unmarked.stale_N is None
    assert trainer.old_logps(scores, unmarked) is None


def test_an_update_from_stale_rollouts_is_that_of_the_recorded_probabilities(tmp_path):
    """One SGD step of a clipped surrogate, spelled out: ratios against the weights of the step before."""
    options = {"max_staleness": 1, "optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0, "max_steps": 2}
    trainer = make("async_grpo", tmp_path, loss_type="grpo", **options)
    kept: list[Any] = []
    step = trainer.training_step

    def look(model: Any, inputs: Any, *rest: Any) -> Any:
        kept.append((weights(trainer), inputs))
        return step(model, inputs, *rest)

    trainer.training_step = look  # type: ignore[method-assign]
    trainer.train()
    before, batch = kept[1]
    assert batch.stale_N.all()
    model = small_model()
    model.load_state_dict(before)
    logps: list[torch.Tensor] = []
    for s, place in enumerate(batch.sequences_at):
        row = batch.input_ids.flatten()[[*chain(*place)]][None]
        scores = model(row).logits[0].log_softmax(-1)
        count = int((batch.sequence_N == s).sum())
        first = row.shape[1] - count
        logps.append(scores[torch.arange(first - 1, row.shape[1] - 1), row[0, first:]])
    ratio_N = (torch.cat(logps) - batch.sampler_logps_N).exp()
    assert (ratio_N - 1).abs().max() > 0.05
    losses = []
    for r in range(4):
        own = [
            min(float(a) * x, float(a) * x.clamp(0.8, 1.2))
            for x, a in zip(ratio_N[batch.row_N == r], batch.target_advantages[batch.row_N == r], strict=True)
        ]
        losses.append(-sum(own) / len(own))  # type: ignore[arg-type]
    (sum(losses) / 4).backward()  # type: ignore[union-attr]
    after = weights(trainer)
    for name, parameter in model.named_parameters():
        assert torch.allclose(before[name] - 0.5 * parameter.grad, after[name], atol=1e-5), name


# At the same time ----------------------------------------------------------------------------------------------


class Stepping(TrainerCallback):
    """Opens a door while the optimizer works on the first window."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.opened.set()


def test_rollouts_go_on_while_the_optimizer_works(tmp_path):
    """The second window waits in a tool for the first optimizer step, whose end it would else wait for."""
    door = Stepping()

    class Waiting(Buttons):
        def reset(self, seed: int, row: int, **_: Any) -> str:
            self.row = row
            return super().reset(seed)

        async def press(self) -> str:
            """Press the button."""
            if self.row >= 2:
                assert await asyncio.to_thread(door.opened.wait, LONG), "nothing was played meanwhile"
            return "pressed"

    trainer = make_trainer(
        "async_grpo", tmp_path, max_staleness=1, max_steps=3, shuffle_dataset=False, max_completion_length=120,
        generator=calling(), dataset=chat_rows(6, row=list(range(6))), reward=None, model=chat_model(),
        keywords={"environment_factory": Waiting, "processing_class": TOKENIZER, "callbacks": [door]},
    )  # fmt: skip
    trainer.train()
    assert min(logged(trainer, "tools/failure_frequency")) == 0
    assert max(logged(trainer, "tools/call_frequency")) > 0
    assert min(logged(trainer, "async/trainer_wait")) >= 0
    assert all(0 <= share <= 1 for share in logged(trainer, "async/generator_idle"))


def test_no_more_rollouts_run_at_once_than_max_inflight_tasks(tmp_path):
    inside, most = 0, 0

    class Counted(Buttons):
        async def press(self) -> str:
            """Press the button."""
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            await eventually(lambda: most >= 3)
            await asyncio.sleep(0.01)  # time for one too many
            inside -= 1
            return "pressed"

    trainer = make_trainer(
        "async_grpo", tmp_path, max_staleness=4, max_inflight_tasks=3, max_steps=4, generator=pressing, reward=None,
        dataset=chat_rows(8), model=chat_model(), max_completion_length=120,
        keywords={"environment_factory": Counted, "processing_class": TOKENIZER},
    )  # fmt: skip
    trainer.train()
    assert most == 3


def test_a_stream_is_read_ahead_but_once(tmp_path):
    read: list[int] = []
    data = rows(6)

    def give() -> Any:
        for row in data:
            read.append(row["row"])
            yield row

    trained: list[int] = []

    def reward(row: list[int], **columns: Any) -> list[float]:
        trained.extend(row[::2])
        return length_and_ids(**columns)

    stream = IterableDataset.from_generator(give)
    make("async_grpo", tmp_path, dataset=stream, reward=reward, max_staleness=2, max_steps=5).train()
    assert trained == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]
    assert read[:10] == trained
    assert len(read) <= 12


# Everything else goes on working -------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_all_that_the_trainer_which_is_not_async_logs_is_logged_and_only_async_metrics_besides(algorithm, tmp_path):
    def names(kind: str, **options: Any) -> set[str]:
        trainer = make(kind, tmp_path / kind, environment=True, max_steps=3, beta=0.1, **options)
        trainer.train()
        return {name for log in trainer.state.log_history for name in log}

    usual, ahead = names(algorithm), names(f"async_{algorithm}", max_staleness=1)
    assert usual - ahead <= ROUNDED  # of fresh tokens only, and there need be none
    assert {name for name in ahead - usual if not name.startswith("async/")} == set()


OBJECTIVES: dict[str, dict[str, Any]] = {
    **{loss: {"loss_type": loss} for loss in sorted(AGGREGATIONS)},
    "sequence level": {"importance_sampling_level": "sequence"},
    "reference": {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2},
    "masks": {"off_policy_mask_threshold": 0.1, "top_entropy_quantile": 0.5, "delta": 2.0},
    "entropy": {"use_adaptive_entropy": True, "entropy_coef": 0.1},
    "sampler corrected": {"bf16": True, "vllm_importance_sampling_mode": "token_truncate"},
    "rloo": {"beta": 0.1, "normalize_advantages": True},
    "adapters": {"beta": 0.1},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_learns_from_stale_rollouts(name, tmp_path):
    model = small_model()
    if name == "adapters":
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    trainer = make(
        "async_rloo" if name == "rloo" else "async_grpo", tmp_path, model=model, max_staleness=1, max_steps=3,
        num_iterations=2, **OBJECTIVES[name],
    )  # fmt: skip
    Unhurried(trainer)
    before = weights(trainer)
    trainer.train()
    change = max((before[key] - value).abs().max() for key, value in weights(trainer).items())
    assert 0 < change < 1
    assert max(value for value in logged(trainer, "async/staleness/max") if value is not None) == 1


def test_evaluation_in_between_plays_with_the_weights_of_that_step(tmp_path):
    keywords = {"eval_dataset": rows(2)}
    trainer = make(
        "async_grpo", tmp_path, keywords=keywords, max_staleness=3, weight_sync_steps=2, eval_strategy="steps",
        eval_steps=1, per_device_eval_batch_size=4,
    )  # fmt: skip
    Unhurried(trainer)
    trainer.train()
    evaluated = [log for log in trainer.state.log_history if "eval_reward" in log]
    assert len(evaluated) == 5
    assert max(log["eval_sampling/sampling_logp_difference/max"] for log in evaluated) < 1e-4
    assert max(value for value in logged(trainer, "async/staleness/max") if value is not None) == 3


def test_groups_are_drawn_again_and_the_rest_goes_on(tmp_path):
    def flat(row: list[int], completion_ids: list[list[int]], **_: Any) -> list[float]:
        values = length_and_ids(completion_ids)
        return [0.0 if r < 3 else value for r, value in zip(row, values, strict=True)]

    trainer = make("async_grpo", tmp_path, reward=flat, max_staleness=2, dynamic_sampling_max_rounds=1)
    Unhurried(trainer)
    trainer.train()
    assert sum(logged(trainer, "dynamic_sampling/groups_redrawn")) > 0
    assert max(logged(trainer, "async/staleness/max")) == 2
    with Records(tmp_path) as records:
        sql = 'SELECT DISTINCT identity, "group" FROM windows w JOIN rollouts r ON r.window = w.id'
        groups = [
            (json.loads(window), [int(part) for part in name.split(".")])
            for window, name in records.journals[0].execute(sql)
        ]
    assert any(len(group) == 4 for _, group in groups)
    assert all(group[:2] == window for window, group in groups), "also those that were drawn again"


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("agentrl")}


class Stop(TrainerCallback):
    """Ends training after a step, by a request, an error or Ctrl-C."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.how == "error":
            raise ValueError("the callback is broken")
        if self.how == "ctrl-c":
            raise KeyboardInterrupt
        control.should_training_stop = True


@pytest.mark.parametrize("how", ["request", "ctrl-c", pytest.param("error", marks=pytest.mark.slow)])
def test_whatever_ends_training_ends_what_is_being_played(how, tmp_path):
    """No thread is left, no environment open, and the trainer can train again."""

    class Endless(Buttons):
        async def press(self) -> str:
            """Press the button."""
            if self.late:
                await asyncio.sleep(3600)
            return "pressed"

        def reset(self, seed: int, row: int, **_: Any) -> str:
            self.late = row >= 2
            return super().reset(seed)

    stop = Stop(how)
    before = threads()
    trainer = make_trainer(
        "async_grpo", tmp_path, max_staleness=2, max_steps=5, shuffle_dataset=False, max_completion_length=120,
        generator=calling(), dataset=chat_rows(10, row=list(range(10))), reward=None, model=chat_model(),
        keywords={"environment_factory": Endless, "processing_class": TOKENIZER, "callbacks": [stop]},
    )  # fmt: skip
    for _ in range(2):
        if how == "request":
            trainer.train()
        else:
            with pytest.raises((ValueError, KeyboardInterrupt)):
                trainer.train()
        wait_until(lambda: threads() <= before)
        assert not Endless.open


def test_an_error_in_a_window_ahead_stops_the_run_with_its_message(tmp_path):
    """It is raised although the trainer waits for another window, which does not end."""

    def turn(session: str, *_: Any) -> list[int]:
        if session.startswith("2/"):
            raise GenerationError("the generator broke in window 2")
        return CALL

    class Slow(Buttons):
        async def press(self) -> str:
            """Press the button."""
            await asyncio.sleep(3600)
            return "pressed"

    trainer = make_trainer(
        "async_grpo", tmp_path, max_staleness=2, max_steps=5, generator=ScriptedGenerator(turn), reward=None,
        dataset=chat_rows(10), model=chat_model(), max_completion_length=120,
        keywords={"environment_factory": Slow, "processing_class": TOKENIZER},
    )  # fmt: skip
    with pytest.raises(GenerationError, match="the generator broke in window 2"):
        trainer.train()
    assert not Slow.open


# What is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_staleness": -1}, "max_staleness"),
        ({"weight_sync_steps": 0}, "weight_sync_steps"),
        ({"weight_sync_steps": 3, "max_staleness": 1}, r"weight_sync_steps=3.*2 optimizer steps behind"),
        ({"max_inflight_tasks": 0}, "max_inflight_tasks"),
        ({"vllm_enable_sleep_mode": True}, "vllm_enable_sleep_mode puts vLLM to sleep"),
        ({"queue_maxsize": 7}, "queue_maxsize=7 is refused: what may wait is bounded by max_staleness"),
        ({"heartbeat_stale_after_s": 7.0}, "heartbeat_stale_after_s=7.0 is refused"),
        ({"token_budget": 7}, "token_budget=7 is refused"),
        ({"fork_threshold_tokens": 7}, "fork_threshold_tokens=7 is refused"),
    ],
    ids=str,
)
@pytest.mark.parametrize("algorithm", ["async_grpo", "async_rloo"])
def test_arguments_that_make_no_sense_are_refused(options, message, algorithm, tmp_path):
    """Invariant 10."""
    with pytest.raises(ConfigurationError, match=message):
        make_config(algorithm, tmp_path, **options)


def test_what_cannot_sample_while_the_policy_is_trained_is_refused(tmp_path):
    class Sharing(ScriptedGenerator):
        owns_weights = False

    with pytest.raises(ConfigurationError, match="a Sharing samples from the weights that are being trained"):
        make_trainer("async_grpo", tmp_path, generator=Sharing([]))
    make_trainer("async_grpo", tmp_path, generator=Sharing([]), max_staleness=0)
    with pytest.raises(ConfigurationError, match="rollout_func plays in the thread of the trainer"):
        make_trainer("async_grpo", tmp_path, keywords={"rollout_func": lambda prompts, trainer: {}})
    with pytest.raises(ConfigurationError, match="use_transformers_continuous_batching"):
        make_trainer("async_grpo", tmp_path, generator=None, use_transformers_continuous_batching=True)


def test_defaults_are_those_that_trl_documents(tmp_path):
    config = make_config("async_grpo", tmp_path).__class__(str(tmp_path))
    assert (config.max_staleness, config.weight_sync_steps, config.max_inflight_tasks) == (4, 1, -1)
    assert (config.max_completion_length, config.logging_steps, str(config.lr_scheduler_type.value)) == (
        2048, 1, "constant"
    )  # fmt: skip
    other = make_config("async_rloo", tmp_path).__class__(str(tmp_path), dtype="bfloat16")
    assert (other.num_generations, other.beta, other.model_init_kwargs) == (2, 0.05, {"dtype": "bfloat16"})
    assert scripted().owns_weights
