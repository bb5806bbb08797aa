"""The README of a trained model: how it was made, with what, and whom to cite."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

_PAPERS = {
    "GRPO": (
        "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models",
        "https://arxiv.org/abs/2402.03300",
        "@article{shao2024deepseekmath,\n"
        "  title = {{DeepSeekMath}: Pushing the Limits of Mathematical Reasoning in Open Language Models},\n"
        "  author = {Shao, Zhihong and Wang, Peiyi and Zhu, Qihao and Xu, Runxin and Song, Junxiao and Bi, Xiao and "
        "Zhang, Haowei and Zhang, Mingchuan and Li, Y. K. and Wu, Y. and Guo, Daya},\n"
        "  year = {2024},\n"
        "  journal = {arXiv preprint arXiv:2402.03300}\n"
        "}",
    ),
    "RLOO": (
        "Back to Basics: Revisiting REINFORCE-Style Optimization for Learning from Human Feedback in LLMs",
        "https://arxiv.org/abs/2402.14740",
        "@inproceedings{ahmadian2024basics,\n"
        "  title = {Back to Basics: Revisiting {REINFORCE}-Style Optimization for Learning from Human Feedback in "
        "{LLMs}},\n"
        "  author = {Ahmadian, Arash and Cremer, Chris and Gall{\\'e}, Matthias and Fadaee, Marzieh and Kreutzer, "
        'Julia and Pietquin, Olivier and {\\"U}st{\\"u}n, Ahmet and Hooker, Sara},\n'
        "  year = {2024},\n"
        "  booktitle = {Proceedings of the 62nd Annual Meeting of the Association for Computational Linguistics}\n"
        "}",
    ),
}

_PACKAGES = ("agentrl", "transformers", "torch", "datasets", "accelerate")


def model_card(
    *,
    algorithm: str,
    model_name: str,
    base_model: str | None = None,
    dataset_name: str | Sequence[str] | None = None,
    tags: Sequence[str] = (),
    adapters: bool = False,
    **metadata: Any,
) -> ModelCard:
    """Write the card of a trained model.

    Args:
        algorithm: "GRPO" or "RLOO".
        model_name: Title of the card.
        base_model: What was trained; named in the card if it is the name of a repository on the hub.
        dataset_name: Training data on the hub, one or several.
        tags: Tags besides those of the algorithm and of agentrl.
        adapters: Whether the repository holds adapters rather than a whole model.
        **metadata: Further fields of the header, for instance `license` or `language`.
    """
    title, link, citation = _PAPERS[algorithm]
    base = base_model if base_model and _on_hub(base_model) else None
    names = [dataset_name] if isinstance(dataset_name, str) else list(dataset_name or ())
    header = {
        "base_model": base,
        "datasets": names or None,
        "library_name": "peft" if adapters else "transformers",
        "model_name": model_name,
        "pipeline_tag": "text-generation",
        "tags": list(dict.fromkeys(["agentrl", algorithm.lower(), "reinforcement-learning", *tags])),
        **metadata,
    }
    subject = "Adapters for" if adapters else "A version of"
    source = f"[{base}](https://huggingface.co/{base})" if base else "a language model"
    data = " and ".join(f"[{name}](https://huggingface.co/datasets/{name})" for name in names)
    versions = "\n".join(f"- {name} {version(name)}" for name in _PACKAGES)
    body = (
        f"# {model_name}\n\n"
        f"{subject} {source}, trained by reinforcement learning with agentrl{f' on {data}' if data else ''}.\n\n"
        f"## Training\n\nThe objective is {algorithm}, from [{title}]({link}).\n\n{versions}\n\n"
        f"## Citation\n\n```bibtex\n{citation}\n```\n"
    )
    return ModelCard(f"---\n{ModelCardData(**header).to_yaml()}\n---\n\n{body}")


def _on_hub(name: str) -> bool:
    """Whether a name can be that of a repository; a folder of this machine is nobody else's business."""
    if name.count("/") != 1 or Path(name).exists():
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True
