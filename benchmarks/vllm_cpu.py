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
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from agentrl.testing.vllm import ENVIRONMENT, VllmServer  # noqa: E402

os.environ.update({**ENVIRONMENT, **os.environ})  # before torch and vLLM read it

import torch  # noqa: E402
from guess_number import GuessNumber  # noqa: E402
from tiny_agent.agents import guessing_agent  # noqa: E402

from agentrl import GRPOConfig, GRPOTrainer  # noqa: E402

EXACT = 1e-4


def untied(model: Path, folder: Path) -> Path:
    """Save a model with a copy of its embeddings as its head."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy = AutoModelForCausalLM.from_pretrained(model)
    policy.config.tie_word_embeddings = False
    policy.lm_head.weight = torch.nn.Parameter(policy.lm_head.weight.detach().clone())
    policy.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def train(model: Path, out: Path, options: argparse.Namespace, url: str | None) -> int:
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
            vllm_server_base_url=url,
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
    parser.add_argument("--untied", action="store_true", help="with a head of its own instead of the embeddings'")
    parser.add_argument("--model", type=Path, help="a folder with the agent, made by `make demo`")
    options = parser.parse_args()
    out = ROOT / "runs" / f"vllm-cpu-{options.mode}"
    out.mkdir(parents=True, exist_ok=True)
    model = options.model or guessing_agent(GuessNumber)
    if options.untied:
        model = untied(model, out / "model")
    if options.mode == "server":
        with VllmServer(ROOT / ".venv-vllm/bin/vllm", model, out) as server:
            sys.exit(train(model, out, options, server.url))
    sys.exit(train(model, out, options, None))


if __name__ == "__main__":
    main()
