"""A tiny vision-language model in vLLM on the CPU, where there is no torchvision for vLLM's models of this kind.

`python_path` makes a folder for PYTHONPATH. It has a torchvision that can be imported and does nothing, and a plugin by
which vLLM's processes use the tiny processor. Neither reads a picture: the trainer's pixels are all that vLLM sees.
As a program this trains with vLLM in the process and prints what a test wants to know.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset

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
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{ message.content }}{% else %}{% for block in message.content %}
{%- if block.type == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{ block.text }}{% endif %}
{%- endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def python_path(folder: Path) -> str:
    """Write the folder and return what goes in front of PYTHONPATH."""
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return str(folder)


def seeing(family: str) -> tuple[Any, Any]:
    """A model with heads of 32, the smallest that vLLM's CPU kernels know, and its processor."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4]}
    sizes: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": 2, "initializer_range": 0.1}
    if family == "qwen3_vl":
        sizes["head_dim"] = 32
        rope["mrope_interleaved"] = True  # transformers always does, vLLM as the checkpoint says
    model, processor = tiny_vision(family, rope_parameters=rope, bos_token_id=None, **sizes)
    for config in (model.config.text_config, model.generation_config):
        config.eos_token_id = processor.tokenizer.eos_token_id
    processor.chat_template = TEMPLATE
    return model, processor


def register() -> None:
    """Called by vLLM in each of its processes."""
    from vllm.multimodal.processing.context import InputProcessingContext

    processor = seeing(os.environ[FAMILY])[1]
    processor.video_processor = processor.image_processor  # asked which options it has
    InputProcessingContext.get_hf_processor = lambda self, *args, **kwargs: processor


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
    before = next(p for name, p in model.named_parameters() if "visual" in name).detach().clone()
    trainer.train()
    assert not before.equal(next(p for name, p in model.named_parameters() if "visual" in name))
    trainer.collector.generator.close()
    name = "sampling/sampling_logp_difference/max"
    return [entry[name] for entry in trainer.state.log_history if name in entry]


if __name__ == "__main__":
    register()
    found = train(os.environ[FAMILY], Path(sys.argv[1]), vllm_max_model_length=512)
    print("ANSWER " + json.dumps(found))
