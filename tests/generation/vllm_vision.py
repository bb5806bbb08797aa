"""A tiny vision-language model in vLLM on the CPU, where there is no torchvision for vLLM's models of this kind.

`python_path` makes a folder for PYTHONPATH. It has a torchvision that can be imported and does nothing, and a plugin by
which vLLM's processes use the tiny processor. Neither reads a picture: the trainer's pixels are all that vLLM sees.
As a program this trains model after model with vLLM in the process and prints what a test wants to know of each.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from datasets import Dataset
from safetensors.torch import save_file

from agentrl import GRPOConfig, GRPOTrainer
from agentrl.testing.vision import picture, tiny_vision

FAMILY = "AGENTRL_TINY_VISION"
FILES = {
    "torchvision/__init__.py": '__version__ = "0.28.0"',
    "torchvision/io/__init__.py": "ImageReadMode = decode_image = None",
    "torchvision/transforms/__init__.py": (
        "import enum\n\nInterpolationMode = enum.Enum('InterpolationMode', "
        "'NEAREST NEAREST_EXACT BILINEAR BICUBIC BOX HAMMING LANCZOS')"
    ),
    "torchvision/transforms/functional.py": "pil_to_tensor = None",
    "torchvision/transforms/v2/__init__.py": "from . import functional",
    "torchvision/transforms/v2/functional.py": "InterpolationMode = None",
    "tiny_vision-0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tiny-vision\nVersion: 0\n",
    "tiny_vision-0.dist-info/entry_points.txt": "[vllm.general_plugins]\nx = tests.generation.vllm_vision:register\n",
}
TEMPLATE = """\
{%- for message in messages %}{{ '[' + message.role + '] ' }}
{%- if message.content is string %}{{ message.content }}{% else %}{% for block in message.content %}
{%- if block.type == 'image' %}{{ '(IMAGE)' }}{% else %}{{ block.text }}{% endif %}
{%- endfor %}{% endif %}{{ 'END' }}{% endfor %}
{%- if add_generation_prompt %}{{ '[assistant] ' }}{% endif %}"""


def python_path(folder: Path) -> str:
    """Write the folder and return what goes in front of PYTHONPATH."""
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return str(folder)


def seeing(family: str) -> tuple[Any, Any]:
    """A model with heads of 32, the smallest that vLLM's CPU kernels know, and its processor."""
    options: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": 2, "initializer_range": 0.1}
    if family in ("qwen3_vl", "qwen3_5", "gemma3"):
        options["head_dim"] = 32
    if family.startswith("qwen"):
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4]}
        if family in ("qwen3_vl", "qwen3_5"):
            rope["mrope_interleaved"] = True  # transformers always does, vLLM as the checkpoint says
        if family == "qwen3_5":
            rope["partial_rotary_factor"] = 1.0
            options |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
        options |= {"rope_parameters": rope, "bos_token_id": None}
    model, processor = tiny_vision(family, **options)
    if family in ("llava_next", "gemma3"):
        model = _as_released(model)
    for config in (model.config.get_text_config(), model.generation_config):
        config.eos_token_id = processor.tokenizer.eos_token_id
    template = TEMPLATE.replace("IMAGE", processor.image_token)
    processor.chat_template = template.replace("END", processor.tokenizer.eos_token)
    return model, processor


def _as_released(model: Any) -> Any:
    """The same model as if it had been loaded from a released checkpoint, whose names vLLM knows."""
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        weights = {
            name.replace("vision_tower.", "vision_tower.vision_model."): value.contiguous()
            for name, value in model.state_dict().items()
        }
        save_file(weights, f"{folder}/model.safetensors", {"format": "pt"})
        return type(model).from_pretrained(folder)


def register() -> None:
    """Called by vLLM in each of its processes."""
    from vllm.model_executor.models import interns1
    from vllm.multimodal.processing.context import InputProcessingContext

    processor = seeing(os.environ[FAMILY])[1]
    processor.video_processor = processor.image_processor  # asked which options it has
    InputProcessingContext.get_hf_processor = lambda self, *args, **kwargs: processor
    interns1.cached_video_processor_from_config = lambda *args, **kwargs: processor.image_processor


def train(family: str, folder: Path, **options: Any) -> list[float]:
    """Train on rows with one or two pictures and on one without; tell how far sampler and trainer were apart."""
    model, processor = seeing(family)
    images = [[picture(1)], [picture(2, 32, 24), picture(1)], [], [picture(3, 16, 32), picture(3, 16, 32)]]
    prompts = [
        [
            {
                "role": "user",
                "content": [*({"type": "image"} for _ in group), {"type": "text", "text": f"What? {number}"}],
            }
        ]
        for number, group in enumerate(images)
    ]
    trainer = GRPOTrainer(
        model,
        lambda completion_ids, **_: [float(sum(ids) % 7) for ids in completion_ids],
        GRPOConfig(
            str(folder),
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            logging_steps=1,
            per_device_train_batch_size=8,
            num_generations=2,
            max_completion_length=12,
            max_steps=4,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            gradient_checkpointing=False,
            use_vllm=True,
            **options,
        ),
        Dataset.from_dict({"prompt": prompts, "images": images}),
        processing_class=processor,
    )
    before = next(p for name, p in model.named_parameters() if _sees(name)).detach().clone()
    trainer.train()
    assert not before.equal(next(p for name, p in model.named_parameters() if _sees(name)))
    trainer.collector.generator.close()
    name = "sampling/sampling_logp_difference/max"
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def _sees(name: str) -> bool:
    return "visual" in name or "vision" in name


def main(folder: Path, families: list[str]) -> None:
    """Train a model of each family; one process, because starting vLLM takes longer than all of it."""
    from vllm.distributed import cleanup_dist_env_and_memory

    for family in families:
        os.environ[FAMILY] = family
        register()
        try:
            answer: Any = train(family, folder / family, vllm_max_model_length=512)
        except Exception as error:
            traceback.print_exc()
            answer = f"{type(error).__name__}: {error}"
        print("ANSWER " + json.dumps([family, answer]), flush=True)
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
