"""The benchmarks run: what they print and how they exit, never how long anything takes."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch

from agentrl.testing.models import tiny_model
from agentrl.testing.vllm import free_port
from tests.generation.vllm_stub import StubServer
from tests.training.helpers import TOKENIZER
from tests.waiting import LONG

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TINY = ("--quick", "--rollouts", "4", "--rounds", "1")
NO_LIMIT = ("--limit", "1000")


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a benchmark as a script; gives its exit code and the lines that it printed."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))  # as for any script: benchmarks import one another

    def run_script(name: str, *options: str) -> tuple[int, list[str]]:
        monkeypatch.setattr(sys, "argv", [name, *options])
        code = 0
        try:
            runpy.run_path(str(BENCHMARKS / name), run_name="__main__")
        except SystemExit as ending:
            code = ending.code if isinstance(ending.code, int) else 1
        return code, capsys.readouterr().out.splitlines()

    yield run_script
    logging.disable(logging.NOTSET)  # --peer silences TRL


def test_engine_overhead(run):
    code, lines = run("engine_overhead.py", "--rollouts", "4", "--turns", "2")
    assert code == 0
    assert [line.split(":")[0] for line in lines if " a turn" in line] == [
        "4 rollouts x 2 turns, sync tool",
        "4 rollouts x 2 turns, sync tool, with a journal",
        "4 rollouts x 2 turns, async tool",
        "4 rollouts x 2 turns, async tool, with a journal",
    ]


def test_viewer(run):
    if shutil.which("chromium") is None:
        pytest.skip("no chromium")
    _, lines = run("viewer.py", "64")
    assert lines[0].startswith("64 rollouts")
    assert [line.split(":")[0] for line in lines[1:]] == [
        *("from the command to the address", "first page", "second page", "filter by reward and outcome"),
        *("sort by tokens", "search a text", "overview", "group", "rollout"),
    ]


def test_tool_overlap_prints_every_setting(run):
    code, lines = run("tool_overlap.py", *TINY, *NO_LIMIT)
    assert code == 0
    assert lines[0].startswith("setting")
    assert [line[:38].strip() for line in lines[1:-1]] == [
        "4 x sync tool 100 ms, 1 rounds of 1",
        "4 x sync tool 100 ms, 1 rounds of 3",
        "4 x async tool 100 ms, 1 rounds of 1",
        "4 x async tool 100 ms, 1 rounds of 3",
        "4 x reset 250 ms",
        "4 x get_reward 250 ms",
    ]
    assert all(line.endswith("ok") for line in lines[1:-1])
    assert lines[-1] == "all settings within the limit"


def test_tool_overlap_exits_with_1_above_the_limit(run):
    """Nothing ends in half of the time that the tools themselves take."""
    code, lines = run("tool_overlap.py", *TINY, "--limit", "0.5")
    assert code == 1
    assert all(line.endswith("MISSED") for line in lines[1:-1])
    assert lines[-1] == "6 of 6 settings missed the limit"


def test_tool_overlap_refuses_groups_that_trl_cannot_form(run, capsys):
    code, _ = run("tool_overlap.py", "--peer", "--rollouts", "6")
    assert code == 2


@pytest.mark.slow
@pytest.mark.parametrize("peer", [False, True], ids=["alone", "against TRL"])
def test_train_step(run, peer):
    if peer:
        pytest.importorskip("trl")
    code, lines = run("train_step.py", "--quick", "--rounds", "1", *(["--peer"] if peer else []))
    assert code == 0
    assert lines[0].split() == ["prompt", "20", "wall", "CPU", "peak", "growth"]
    assert [line.split()[0] for line in lines[1:]] == ["agentrl", *(["trl", "ratio", "gradient"] if peer else [])]


@pytest.mark.slow
def test_tool_overlap_against_trl(run):
    pytest.importorskip("trl")
    code, lines = run("tool_overlap.py", *TINY, *NO_LIMIT, "--peer")
    assert code == 0
    assert lines[0].startswith("TRL ")
    assert lines[1].endswith("TRL / agentrl")
    assert all(float(line.split()[-1]) > 0 for line in lines[2:-1])


@pytest.mark.slow
def test_sandbox(run):
    code, lines = run("sandbox.py", "--quick")
    assert code == 0
    assert {line.split()[0] for line in lines} >= {"docker", "local"}
    assert all("rollouts a minute" in " ".join(lines) or "left out" in line for line in lines)


@pytest.mark.slow
@pytest.mark.xdist_group("browser")
def test_browser(run):
    code, lines = run("browser.py", "--quick")
    assert code == 0
    words = [line.split()[0] for line in lines]
    assert words == ["scripted", "random", "reset", "screenshot", "click", "processes"] or words == ["left"]


@pytest.mark.slow
def test_vision_reuse(run):
    code, lines = run("vision_reuse.py", "--quick")
    assert code == 0
    ratios = {line.split()[0]: float(line.split()[6]) for line in lines if line.startswith(("local ", "plain "))}
    assert ratios == {"local": 1.0, "plain": 1.0}


def test_vision_rows(run):
    """Packing, which the trainer does not do with images, would be as exact."""
    code, lines = run("vision_rows.py", "--quick")
    assert code == 0
    assert [line.split(" CPU s")[0].rsplit(maxsplit=1)[0] for line in lines[1:]] == [
        "padded, as played",
        "padded, by length",
        "packed",
    ]


@pytest.mark.slow
def test_time_to_reward(run):
    pytest.importorskip("trl")
    code, lines = run("time_to_reward.py", "--quick", "--seeds", "0")
    assert code == 0
    assert lines[0].split() == ["seed", "side", "steps", "wall", "CPU", "last", "reward"]
    assert [line.split()[1:3] for line in lines[1:3]] == [["agentrl", "2"], ["trl", "2"]]
    assert lines[3].startswith("agentrl / TRL")


@pytest.mark.slow
def test_parity_table(capsys):
    table = pytest.importorskip("tests.parity.table", exc_type=ModuleNotFoundError)
    code = table.main(["dapo"])
    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    assert lines[0].startswith("TRL ")
    assert [line.split()[0] for line in lines[1:-2]] == ["dapo", "beta,"]
    assert lines[-1].endswith("within 1e-05")


@pytest.mark.slow
def test_async_vs_sync(run):
    options = "--quick", "--split", "--steps", "3", "--sides", "sync", "1", "--tools", "0.01", "0.05", "0.01"
    code, lines = run("async_vs_sync.py", *options)
    assert code == 0
    assert lines[-3].split()[:4] == ["seed", "staleness", "steps/min", "x"]
    assert [line.split()[:2] for line in lines[-2:]] == [["0", "sync"], ["0", "1"]]


@pytest.mark.slow
def test_scale_sim_prints_what_is_real_beside_what_it_makes_of_it(run):
    code, lines = run("scale_sim.py", "--check", "--quick", "--steps", "7", "--limit", "1000")
    assert code == 0
    assert [line.split()[0] for line in lines[-4:]] == ["staleness", "sync", "1", "4"]


def test_scale_sim_of_gpus(run):
    code, lines = run("scale_sim.py", "--gpus", "16", "--rows", "16")
    assert code == 0
    assert lines[0].startswith("16 rows a step")
    assert len(lines) == 3


def test_scale_sim_simulates_what_can_be_worked_out_by_hand():
    """One turn of 9 tokens and one decode step of prefill, 1 s each and 0.5 s for each row; 7 s of training."""
    sim = runpy.run_path(str(BENCHMARKS / "scale_sim.py"))
    profile = sim["Profile"]([[(9, 0.0)]], step_base=1.0, step_per_row=0.5, train_row=7.0)
    steps = {
        "alone, in turn": 60 / (15 + 7),
        "one ahead": 60 / ((10 + 7) / 2),
        "four ahead": 60 / 7,
        "two on a replica of one row": 60 / (30 + 7 * 2),
        "two on two replicas": 60 / (15 + 7 * 2),
        "tools": 60 / (2 * 15 + 100 + 7),
    }
    layouts = {
        "alone, in turn": (profile, sim["Layout"](1, 1, 1, 0)),
        "one ahead": (dataclasses.replace(profile, step_per_row=0.0), sim["Layout"](1, 1, 1, 1)),
        "four ahead": (dataclasses.replace(profile, step_per_row=0.0), sim["Layout"](1, 1, 1, 4)),
        "two on a replica of one row": (dataclasses.replace(profile, most_rows=1), sim["Layout"](1, 1, 2, 0)),
        "two on two replicas": (profile, sim["Layout"](2, 1, 2, 0)),
        "tools": (dataclasses.replace(profile, rollouts=[[(9, 100.0), (9, 0.0)]]), sim["Layout"](1, 1, 1, 0)),
    }
    for name, (measured, layout) in layouts.items():
        assert sim["simulate"](measured, layout).steps_a_minute == pytest.approx(steps[name]), name
    result = sim["simulate"](profile, sim["Layout"](1, 1, 1, 0))
    assert (result.trainer_busy, result.generator_busy) == (pytest.approx(7 / 22), pytest.approx(15 / 22))


def test_vllm_long_tail_lets_nobody_through_before_all_who_are_there():
    rounds = runpy.run_path(str(BENCHMARKS / "vllm_long_tail.py"))["Rounds"]
    passed = []

    async def rollout(meeting: object, name: str, times: int) -> None:
        for number in range(times):
            await meeting.meet()
            passed.append((number, name))
        meeting.leave()

    async def play() -> None:
        meeting = rounds(3)
        await asyncio.wait_for(
            asyncio.gather(*(rollout(meeting, name, len(name)) for name in ("a", "bb", "ccc"))), LONG
        )

    asyncio.run(play())
    assert [number for number, _ in passed] == [0, 0, 0, 1, 1, 2]


def test_the_gpu_script_leaves_out_what_needs_more_gpus(run):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    code, lines = run("gpu/vllm_modes.py")
    assert code == 0
    assert [line.split(",")[0] for line in lines] == ["colocate: left out", "server: left out"]


@pytest.mark.slow
def test_the_gpu_script_measures_and_profiles(run, monkeypatch, tmp_path):
    """On the CPU, against a server that speaks vLLM's protocol; what it measures on a GPU was never seen."""
    monkeypatch.chdir(tmp_path)
    policy = tiny_model("qwen3", vocab_size=len(TOKENIZER))
    policy.save_pretrained("model")
    TOKENIZER.save_pretrained("model")
    server = StubServer(policy, max_model_len=112)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "vllm").write_text("#!/bin/sh\n")  # the server is there already
    (tmp_path / "vllm").chmod(0o755)
    ports = "--port", str(server.port), "--group-port", str(free_port())
    few = "--steps", "3", "--rollouts", "8"
    try:
        code, lines = run("gpu/vllm_modes.py", "--mode", "server", "--model", "model", *ports, *few)
    finally:
        server.die()
    assert code == 0
    measured = [line for line in lines if not line.startswith("{")]
    assert measured[0] == "CPU, model, server, 8 rollouts a step"
    assert [line.split(",")[0].split("  ")[0] for line in measured[1:5]] == [
        "sampled tokens/s",
        "weight sync",
        "optimizer step",
        "sampler - trainer",
    ]
    assert all(float(line[22:].split()[0]) > 0 for line in measured[1:4])
    assert "CPU total" in "".join(measured[5:])
