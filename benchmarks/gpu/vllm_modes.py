"""How fast vLLM's two modes are on a GPU: tokens a second, weight synchronisation, step. NOT RUN: there was no GPU.

    python benchmarks/gpu/vllm_modes.py

Under 8 minutes: each mode has 230 seconds, in a process of its own. Colocate runs on GPU 0; server mode trains there
and starts `vllm serve` on GPU 1, with weights by `nccl`. Where there is one GPU alone both share it, with `ipc`.
The environment is a counting game with a tool, so episodes have several turns. Printed are the mean over the steps
after the first two, the difference between sampler and trainer, and the kernels that took most of a profiled step.
Without a GPU a single mode (`--mode`) runs on the CPU, to see that the script does (`--quick`: a few short turns).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

import torch

from agentrl import GRPOConfig, GRPOTrainer

WARM_UP = 2
MODE_SECONDS = 230


class Counter:
    """Count up to a number by calling a tool."""

    def reset(self, seed: int, **_: Any) -> str:
        self.value, self.target = 0, random.Random(seed).randint(2, 5)
        return f"Call increment until the counter is at {self.target}. It is at 0."

    def increment(self) -> int:
        """Increment the counter.

        Returns:
            The new value.
        """
        self.value += 1
        return self.value

    def get_reward(self) -> float:
        return float(self.value == self.target)


def serve(options: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Start a server, on the second GPU or on the trainer's."""
    command = ["vllm", "serve", options.model, "--port", str(options.port), "--max-model-len", "4096"]
    command += ["--weight-transfer-config", json.dumps({"backend": options.backend}), "--enable-scale-out"]
    command += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
    environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1"}
    if options.backend == "ipc":
        command += ["--gpu-memory-utilization", "0.3"]
        environment |= {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    else:
        environment |= {"CUDA_VISIBLE_DEVICES": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)


def measure(options: argparse.Namespace) -> None:
    """Train for some steps, with a clock on what belongs to vLLM."""
    gpu = torch.cuda.is_available()
    trainer = GRPOTrainer(
        options.model,
        environment_factory=Counter,
        args=GRPOConfig(
            "runs/vllm-modes",
            max_steps=options.steps,
            per_device_train_batch_size=options.rollouts,
            num_generations=8,
            max_completion_length=64 if options.quick else 1024,
            use_cpu=not gpu,
            bf16=gpu,
            model_init_kwargs={"dtype": "bfloat16" if gpu else "float32"},
            chat_template_kwargs={"enable_thinking": False},
            use_vllm=True,
            vllm_mode=options.mode,
            vllm_server_port=options.port,
            vllm_group_port=options.group_port,
            vllm_server_timeout=float(MODE_SECONDS),
            vllm_max_model_length=512 if options.quick else 4096,
            vllm_enable_sleep_mode=options.mode == "colocate",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
        ),
    )
    generator, syncs, plays = trainer.collector.generator, [], []
    sync, play = generator.sync, trainer.collector.engine.run

    def timed_sync(version: int) -> None:
        began = time.perf_counter()
        sync(version)
        syncs.append(time.perf_counter() - began)

    def timed_play(tasks: list[Any]) -> Any:
        began, before = time.perf_counter(), generator.stats.decoded_tokens
        trajectories = play(tasks)
        plays.append((generator.stats.decoded_tokens - before, time.perf_counter() - began))
        return trajectories

    generator.sync, trainer.collector.engine.run = timed_sync, timed_play  # type: ignore[method-assign]
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "step_time" in entry][WARM_UP:]
    steps = [entry["step_time"] for entry in logs]
    tokens, seconds = (sum(column) for column in zip(*plays[WARM_UP:], strict=True))
    device = torch.cuda.get_device_name() if gpu else "CPU"
    mode = f"server with {options.backend}" if options.mode == "server" else options.mode
    print(f"{device}, {options.model}, {mode}, {options.rollouts} rollouts a step")
    print(f"sampled tokens/s      {tokens / seconds:10.0f}")
    print(f"weight sync, s        {sum(syncs[WARM_UP:]) / len(syncs[WARM_UP:]):10.3f}")
    print(f"optimizer step, s     {sum(steps) / len(steps):10.3f}   (rollouts included)")
    if gpu:
        print(f"peak memory, GiB      {torch.cuda.max_memory_allocated() / 2**30:10.1f}")
    name = "sampling/sampling_logp_difference/"
    print(f"sampler - trainer     {max(entry[name + 'max'] for entry in logs):10.2g} max, nats a token")
    with torch.profiler.profile() as profile:  # one more step
        trainer.args.max_steps = 1
        trainer.train()
    print(profile.key_averages().table(sort_by="device_time_total" if gpu else "cpu_time_total", row_limit=15))


def run_each() -> int:
    """Run each mode; returns the exit code."""
    if not torch.cuda.is_available():
        print("left out: there is no GPU")
        return 0
    backend, failed = "nccl" if torch.cuda.device_count() > 1 else "ipc", 0
    for mode in ("colocate", "server"):
        command = [sys.executable, *sys.argv, "--mode", mode, "--backend", backend]
        # A session of its own, so that a mode that takes too long ends with all that it has started.
        child = subprocess.Popen(command, env=os.environ | {"CUDA_VISIBLE_DEVICES": "0"}, start_new_session=True)
        try:
            failed |= child.wait(MODE_SECONDS)
        except subprocess.TimeoutExpired:
            print(f"{mode}: not finished after {MODE_SECONDS} s")
            failed = 1
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mode", choices=["colocate", "server"], help="this one alone, without a limit of time")
    parser.add_argument("--backend", choices=["nccl", "ipc"], default="nccl", help="of the server, for weights")
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--rollouts", type=int, default=64)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--quick", action="store_true", help="turns of a few tokens, to see that it runs")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--group-port", type=int, default=51216)
    options = parser.parse_args()
    if options.mode is None:
        sys.exit(run_each())
    server = serve(options) if options.mode == "server" else None
    try:
        measure(options)
    finally:
        if server is not None:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
