"""Does the demo's agent learn with real vLLM on the CPU, and does vLLM sample from the policy all the while?

    make venv-vllm
    .venv-vllm/bin/python benchmarks/vllm_cpu.py colocate
    .venv/bin/python benchmarks/vllm_cpu.py server            # starts .venv-vllm's `vllm serve`
    .venv/bin/python benchmarks/vllm_cpu.py server --untied
    .venv/bin/python benchmarks/vllm_cpu.py server --ahead 1  # AsyncGRPOTrainer, max_staleness=1

Printed: the reward at the beginning and the end and the time of a step; the largest difference between the logprobs of
sampler and trainer, over all sampled tokens (of the asynchronous trainer, those that the weights drew with which their
window was begun) and over the probes, one after every update. Exit code 1 if the reward has not risen or a difference
is above 1e-4.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from agentrl.testing.vllm import ENVIRONMENT, VllmServer  # noqa: E402

os.environ.update({**ENVIRONMENT, **os.environ})  # before torch and vLLM read it

import torch  # noqa: E402
from guess_number import GuessNumber  # noqa: E402
from tiny_agent.agents import guessing_agent  # noqa: E402

from agentrl import AsyncGRPOConfig, AsyncGRPOTrainer, GRPOConfig, GRPOTrainer  # noqa: E402
from agentrl.training import sampler_check  # noqa: E402


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
    ahead = options.ahead is not None
    config, extra = (AsyncGRPOConfig, {"max_staleness": options.ahead}) if ahead else (GRPOConfig, {})
    probes = every_probe(options.steps)
    trainer = (AsyncGRPOTrainer if ahead else GRPOTrainer)(
        str(model),
        environment_factory=GuessNumber,
        args=config(
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
            **({"vllm_max_model_length": 512} if options.mode == "colocate" else {}),
            **extra,
        ),
    )
    began = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - began
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    rewards = [entry["reward"] for entry in logs]
    tenth = max(1, len(rewards) // 10)
    first, last = sum(rewards[:tenth]) / tenth, sum(rewards[-tenth:]) / tenth
    names = [f"{options.mode}, head {'of its own' if options.untied else 'tied'}"]
    if ahead:
        staleness = max(entry["async/staleness/max"] for entry in logs)
        names.append(f"up to {options.ahead} ahead (a token was at most {staleness:g} stale)")
    print(", ".join(names))
    print(f"reward {first:.2f} -> {last:.2f} in {len(rewards)} steps of {seconds / len(rewards):.1f} s")
    name = "sampling/sampling_logp_difference/max"
    difference = max(entry[name] for entry in logs if name in entry)
    print(f"largest difference between sampler and trainer: {difference:.1e} nats a token")
    print(f"of the probes after {len(probes)} updates: {max(probes):.1e}")
    return int(last <= first or max(difference, *probes) > sampler_check.EXACT)


def every_probe(updates: int) -> list[float]:
    """Let the trainer's check look at every update, not at the first few alone; gives the list of what it will find."""
    found: list[float] = []
    judge = sampler_check.judge

    def noting(differences: dict[str, torch.Tensor], **how: Any) -> None:
        found.extend(float(values.max()) for values in differences.values())
        judge(differences, **how)

    sampler_check.UPDATES_CHECKED, sampler_check.judge = updates, noting
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("mode", choices=["colocate", "server"])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--untied", action="store_true", help="with a head of its own instead of the embeddings'")
    parser.add_argument("--ahead", type=int, metavar="STEPS", help="the asynchronous trainer with this max_staleness")
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
