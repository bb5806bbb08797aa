"""Does the demo's agent learn with real vLLM on the CPU, and does vLLM sample from the policy all the while?

    make venv-vllm
    .venv-vllm/bin/python benchmarks/vllm_cpu.py colocate
    .venv/bin/python benchmarks/vllm_cpu.py server            # starts .venv-vllm's `vllm serve`

Printed: the reward at the beginning and the end, the largest difference between the logprobs of sampler and trainer
over all sampled tokens, the time of a step. Exit code 1 if the reward has not risen or a difference is above 1e-4.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))
for name, value in {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}.items():
    os.environ.setdefault(name, value)

from guess_number import GuessNumber  # noqa: E402
from tiny_agent.agents import guessing_agent  # noqa: E402

from agentrl import GRPOConfig, GRPOTrainer  # noqa: E402

EXACT = 1e-4
PORT = 8123


@contextmanager
def serving(model: Path, log: Path) -> Iterator[None]:
    """Run a server for a while."""
    command = [ROOT / ".venv-vllm/bin/vllm", "serve", model, "--host", "127.0.0.1", "--port", PORT]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", 512, "--enable-scale-out"]
    command += ["--no-enable-chunked-prefill", "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
    command += ["--worker-extension-cls", "agentrl.generation.vllm_worker.Extension"]
    command += ["--weight-transfer-config", '{"backend": "gloo"}']
    more = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "PYTHONPATH": str(ROOT)}
    with log.open("w") as output:
        server = subprocess.Popen(
            list(map(str, command)),
            cwd=log.parent,
            env=os.environ | more,
            stdout=output,
            stderr=output,
            process_group=0,
        )
    try:
        yield
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def train(model: Path, out: Path, options: argparse.Namespace) -> int:
    """Train and judge."""
    trainer = GRPOTrainer(
        str(model),
        environment_factory=GuessNumber,
        args=GRPOConfig(
            str(out),
            max_steps=options.steps,
            learning_rate=5e-4,
            per_device_train_batch_size=96,
            num_generations=8,
            max_completion_length=200,
            use_cpu=True,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_vllm=True,
            vllm_mode=options.mode,
            vllm_server_port=PORT,
            vllm_server_timeout=600.0,
            vllm_max_model_length=512,
        ),
    )
    began = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - began
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    rewards = [entry["reward"] for entry in logs]
    tenth = max(1, len(rewards) // 10)
    first, last = sum(rewards[:tenth]) / tenth, sum(rewards[-tenth:]) / tenth
    difference = max(entry["sampling/sampling_logp_difference/max"] for entry in logs)
    print(f"{options.mode}: reward {first:.2f} -> {last:.2f} in {len(rewards)} steps of {seconds / len(rewards):.1f} s")
    print(f"largest difference between sampler and trainer: {difference:.1e} nats a token")
    return int(last <= first or difference > EXACT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("mode", choices=["colocate", "server"])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--model", type=Path, help="a folder with the agent, made by `make demo`")
    options = parser.parse_args()
    out = ROOT / "runs" / f"vllm-cpu-{options.mode}"
    out.mkdir(parents=True, exist_ok=True)
    model = options.model or guessing_agent(GuessNumber)
    if options.mode == "server":
        with serving(model, out / "server.log"):
            sys.exit(train(model, out, options))
    sys.exit(train(model, out, options))


if __name__ == "__main__":
    main()
