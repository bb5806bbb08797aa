"""The scripts for clusters start what they say: run with stand-ins for Slurm, Ray, vLLM and accelerate."""

from __future__ import annotations

import json
import os
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl import AsyncGRPOConfig
from agentrl.cli.train import Algorithm, fields_of

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples" / "cluster"

SRUN = """\
nodes=1
while [[ $1 == --* ]]; do
    [[ $1 == --ntasks=* ]] && tasks=${1#*=}
    [[ $1 == --nodelist=* ]] && list=${1#*=}
    shift
done
echo "srun $list" >> "$RECORD"
for ((task = 0; task < tasks; task++)); do SLURM_PROCID=$task "$@" & done
wait
"""
STANDS_IN = {
    "scontrol": 'for n in 1 2 3 4 5 6; do echo "node$n"; done',
    "srun": SRUN,
    "ray": 'echo "ray $*" >> "$RECORD"; [ "$1" != status ] || echo " 0.0/16.0 GPU"',
    "vllm": 'python3 -c "import json, sys; print(\'vllm\', json.dumps(sys.argv[1:]))" "$@" >> "$RECORD"',
    "accelerate": 'python3 -c "import json, sys; print(\'accelerate\', json.dumps(sys.argv[1:]))" "$@" >> "$RECORD"',
}


@pytest.fixture
def started(tmp_path) -> list[str]:
    """What the script has started, one a line, in no order."""
    for name, script in STANDS_IN.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    record = tmp_path / "record"
    environment = os.environ | {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "RECORD": str(record),
        "SLURM_JOB_NODELIST": "node[1-6]",
    }
    # The trainers end at once here, so the script would end the servers before they are all started.
    script = (CLUSTER / "train_70b.slurm").read_text().replace("trap 'kill", "trap 'wait; kill")
    command = ["bash", "-c", script, "train_70b.slurm", "--max_steps", "3"]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=60)
    return record.read_text().splitlines()


def commands(started: list[str], program: str) -> list[Any]:
    return [json.loads(line.removeprefix(program)) for line in started if line.startswith(f"{program} ")]


def test_two_nodes_sample_and_four_train(started):
    assert sorted(line for line in started if line.startswith("srun")) == [
        "srun node1,node2",
        "srun node3,node4,node5,node6",
    ]
    assert sum(line.startswith("ray start --head") for line in started) == 1
    assert "ray start --address=node1:6379 --block" in started
    [serve] = commands(started, "vllm")
    assert serve[:2] == ["serve", "meta-llama/Llama-3.3-70B-Instruct"]
    options = dict(pairwise(serve))
    assert options["--tensor-parallel-size"] == "8"
    assert options["--data-parallel-size"] == "2"
    assert options["--data-parallel-backend"] == "ray"
    trainers = commands(started, "accelerate")
    assert sorted(one[one.index("--machine_rank") + 1] for one in trainers) == ["0", "1", "2", "3"]
    for one in trainers:
        assert one[: one.index("--machine_rank")] == [
            *("launch", "--config_file", "examples/accelerate/zero3.yaml", "--num_machines", "4"),
            *("--num_processes", "32", "--main_process_ip", "node3", "--main_process_port", "29500"),
        ]
        assert one[one.index("-m") :] == [
            *("-m", "agentrl", "train", "--config", "examples/cluster/70b.yaml"),
            *("--vllm_server_base_url", "http://node1:8000", "--max_steps", "3"),
        ]


def test_accelerate_takes_these_options(started):
    """As accelerate itself reads them, on several machines with DeepSpeed."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    given = commands(started, "accelerate")[0][1:]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(given))
    assert args.use_deepspeed
    assert args.deepspeed_multinode_launcher == "standard", "else node 0 would reach the others by ssh"
    assert (args.num_machines, args.num_processes, args.training_script) == (4, 32, "agentrl")


def test_the_configuration_is_one_that_the_trainer_takes(tmp_path):
    written = yaml.safe_load((CLUSTER / "70b.yaml").read_text())
    algorithm = Algorithm(written.pop("algorithm"))
    assert (ROOT / written.pop("env").partition(":")[0]).exists()
    del written["model"], written["output_dir"]
    fields = fields_of(algorithm, [], written)
    # One process here, which has 8 rows of the 256, and the CPU.
    args = AsyncGRPOConfig(str(tmp_path), **{**fields, "bf16": False, "use_cpu": True})
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps * 32 == 256
    assert args.max_staleness == 1
