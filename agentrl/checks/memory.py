"""How much memory training will take, estimated from the sizes of a model.

With P parameters (P' of them trained) of b bytes, L layers, hidden size h, H key-value heads of size d, a vocabulary of
V, M tokens in a micro-batch, and C tokens whose keys and values the generator keeps:

- weights P b, gradients P' b, Adam's two moments 2 P' b, a reference model P b;
- keys and values 2 L H d b C;
- activations with recomputation: L M h b for what is kept between layers, and 17 M h b within the layer that is
  computed anew (Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models,
  https://arxiv.org/abs/2205.05198, equation 1 without its attention term, for attention that keeps no scores);
  without recomputation the latter L times;
- logits 4 x 4 bytes for each of min(M, 2^26 / V) V, since the head runs in chunks.

What an allocator wastes, and libraries keep, comes on top: plan for a tenth more.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from agentrl.checks.findings import Finding, passed, warned

CHUNK_LOGITS = 2**26
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the estimate is made of; see the module.

    Attributes:
        parameters: P.
        trained: P'.
        layers: L.
        hidden: h.
        key_value: H d, what one token's keys take in a layer.
        vocabulary: V.
        micro_batch_tokens: M.
        cached_tokens: C.
        bytes_each: b.
        reference: Whether there is a reference model.
        recomputed: Whether activations are recomputed.
    """

    parameters: int
    trained: int
    layers: int
    hidden: int
    key_value: int
    vocabulary: int
    micro_batch_tokens: int
    cached_tokens: int
    bytes_each: int = 4
    reference: bool = False
    recomputed: bool = True


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes by what they hold."""

    weights: int
    gradients: int
    optimizer: int
    reference: int
    cache: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(asdict(self).values())


def estimate(sizes: Sizes) -> Memory:
    """Estimate the memory of training on one device, by the formulas of this module."""
    s, b = sizes, sizes.bytes_each
    row = s.micro_batch_tokens * s.hidden * b
    return Memory(
        weights=s.parameters * b,
        gradients=s.trained * b,
        optimizer=2 * s.trained * b,
        reference=s.parameters * b if s.reference else 0,
        cache=2 * s.layers * s.key_value * b * s.cached_tokens,
        activations=s.layers * row + 17 * row * (1 if s.recomputed else s.layers),
        logits=16 * min(s.micro_batch_tokens * s.vocabulary, max(CHUNK_LOGITS, s.vocabulary)),
    )


def check_memory(sizes: Sizes, available: int | None) -> Finding:
    """Compare the estimate with what the device has.

    Args:
        sizes: Of model and batches.
        available: Bytes of the device's memory; None where there is no accelerator.
    """
    memory = estimate(sizes)
    parts = ", ".join(f"{name} {value / GIB:.2f}" for name, value in asdict(memory).items() if value)
    seen = f"about {memory.total / GIB:.2f} GiB: {parts}"
    if available is None:
        return passed("memory", f"{seen} (there is no GPU here to compare with)")
    if memory.total * 1.1 > available:
        return warned(
            "memory",
            f"{seen}; the device has {available / GIB:.2f} GiB",
            "lower per_device_train_batch_size (and raise gradient_accumulation_steps), take adapters (peft), or train "
            "on several devices",
        )
    return passed("memory", f"{seen} of {available / GIB:.2f} GiB")
