"""Which layout of rows a model can be given: its attention and its layers decide, and a proof on random rows.

Padding costs time and memory but is right for every model. Packing is right only where nothing but attention connects
positions, and attention keeps rows apart. So a model is packed when its cache consists of keys and values by position,
when its attention function can be told about rows, and when its logits on a few packed rows are those of the same rows
padded. Whatever fails is padded, with a line in the log that says why.
"""

from __future__ import annotations

import logging
import random
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from agentrl.training.attention import recorded_windows
from agentrl.training.batching import Layout, MicroBatch, collate
from agentrl.types import Outcome, Task, Trajectory

logger = logging.getLogger(__name__)


def choose_layout(model: PreTrainedModel, *, share: bool = True) -> Layout:
    """Find the cheapest layout that gives a model's rows the numbers that they have alone.

    Args:
        model: On its device. It is run once or twice on some 80 tokens, so several processes that share its weights
            have to call this together.
        share: Whether rows may share a prompt; what packs by sharing pads if not.
    """
    wanted = _wanted(model)
    if wanted is Layout.PADDED or (wanted is Layout.SHARED and not share):
        return Layout.PADDED
    reason = _unsuitable(model) or _disproof(model, wanted)
    if reason is None:
        return wanted
    logger.warning("rows of %s are padded, not packed: %s", type(model).__name__, reason)
    return Layout.PADDED


def _wanted(model: PreTrainedModel) -> Layout:
    """What the attention function has to gain from: eager attention builds masks of length x length when packed."""
    name = str(model.config.get_text_config(decoder=True)._attn_implementation)
    if name == "sdpa":
        return Layout.SHARED
    return Layout.PACKED if name.startswith("flash") or name == "flex_attention" else Layout.PADDED


def _unsuitable(model: PreTrainedModel) -> str | None:
    """What the structure of a model has against packing; the proof is too short to see windows and chunks."""
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        return "it is an encoder-decoder model"
    for index, layer in enumerate(DynamicCache(config=config).layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            return f"layer {index} keeps a {type(layer).__name__}, not keys and values by position"
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        return "it has layers of chunked attention"
    return None


def _disproof(model: PreTrainedModel, layout: Layout) -> str | None:
    """Why packed rows would not get their numbers, None when a trial shows that they do."""
    rows = _random_rows(min(model.config.get_text_config(decoder=True).vocab_size, 1000))
    batches = {kind: collate(rows, pad_token_id=0, layout=kind).to(model.device) for kind in (Layout.PADDED, layout)}
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), recorded_windows() as windows:
            padded, packed = (_target_logits(model, batch) for batch in batches.values())
    except Exception as error:  # noqa: BLE001 - a model that knows nothing of rows may fail in any way
        return f"the trial failed with {type(error).__name__}: {error}"
    finally:
        model.train(training)
    if layout is Layout.SHARED and windows != (expected := _windows(model)):
        return f"its layers tell attention the windows {windows}; expected {expected}"
    difference = (padded - packed).abs().max().item()
    # The square root of a precision's step lies far above its rounding and far below the effect of another row.
    limit = torch.finfo(packed.dtype).eps ** 0.5 * max(padded.abs().max().item(), 1.0)
    if not difference <= limit:
        return f"in a trial their logits were {difference:.1e} off, more than {limit:.1e}"
    return None


def _windows(model: PreTrainedModel) -> list[int | None]:
    """The sliding window of each layer."""
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    return [layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None for layer in layers]


def _target_logits(model: PreTrainedModel, batch: MicroBatch) -> Tensor:
    logits: Tensor = model(**batch.model_inputs(), use_cache=False).logits
    return logits.flatten(0, 1)[batch.target_index_N]


def _random_rows(vocab_size: int) -> list[Trajectory]:
    """Four rows of different lengths; three of them have one prompt, and two of those go on alike for a while."""
    ids = random.Random(0)

    def draw(count: int) -> list[int]:
        return [ids.randrange(vocab_size) for _ in range(count)]

    common, other, alike = draw(9), draw(3), draw(16)
    return [
        _row(common, alike + draw(5)),
        _row(other, draw(3)),
        _row(common, draw(4)),
        _row(common, alike + draw(2)),
    ]


def _row(prompt_ids: list[int], completion_ids: list[int]) -> Trajectory:
    fields: dict[str, Any] = {"task": Task("trial", 0, 0), "prompt": "", "completion": "", "outcome": Outcome.FINISHED}
    count = len(completion_ids)
    return Trajectory(
        **fields, prompt_ids=prompt_ids, completion_ids=completion_ids, loss_mask=[1] * count, logprobs=[0.0] * count
    )
