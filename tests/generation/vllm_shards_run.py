"""Trains in two processes with vLLM in them, one engine for both or one each; run by torchrun of `.venv-vllm`."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

from agentrl.testing.models import tiny_model
from agentrl.testing.tokenizers import FIX_VOCAB_SIZE
from tests.generation.vllm_colocated_run import HEADS
from tests.training.runs import logged, make_trainer


def main(folder: Path, shards: int) -> None:
    logging.disable(logging.WARNING)
    trainer = make_trainer(
        "grpo",
        folder / "run",
        model=tiny_model("llama", vocab_size=FIX_VOCAB_SIZE, initializer_range=0.1, **HEADS),
        generator=None,
        use_vllm=True,
        vllm_max_model_length=512,
        vllm_tensor_parallel_size=shards,
        max_steps=3,
        gradient_checkpointing=False,
    )
    trainer.train()
    from vllm.distributed import get_tensor_model_parallel_world_size

    answer = {
        "shards": get_tensor_model_parallel_world_size(),
        "differences": logged(trainer, "sampling/sampling_logp_difference/max"),
    }
    trainer.collector.generator.close()
    (folder / f"answer-{os.environ['RANK']}").write_text(json.dumps(answer))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
