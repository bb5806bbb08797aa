"""Mixture-of-experts models: the loss that keeps their experts equally busy.

    aux = E * sum over experts e of f_e * P_e

f_e is the share of tokens routed to e, P_e the mean probability that the router gives it (Fedus et al. 2021, Switch
Transformers, https://arxiv.org/abs/2101.03961, equations 4 to 6). The model itself computes it from one forward pass,
over all tokens but padding. It is a product of means over a micro-batch, so unlike the policy loss it depends on how
rows are cut; an optimizer step adds the mean of its micro-batches with trained tokens, over all processes.
"""

from __future__ import annotations

import inspect

from torch import Tensor
from transformers import PreTrainedModel

from agentrl.errors import ConfigurationError
from agentrl.objectives.aggregation import Denominators
from agentrl.training.arguments import RolloutConfig
from agentrl.training.preparation import inner


def router_coefficient(model: PreTrainedModel, args: RolloutConfig) -> float:
    """The weight of the auxiliary loss: that of the arguments, else what the model's config declares; 0.0 for none.

    Raises:
        ConfigurationError: `router_aux_loss_coef` is set, and the model has no auxiliary loss.
    """
    base = inner(model)
    routed = "output_router_logits" in inspect.signature(base.forward).parameters
    wanted = args.router_aux_loss_coef
    if not routed:
        if wanted:
            raise ConfigurationError(
                f"router_aux_loss_coef={wanted}: {type(base).__name__} gives no router logits, so there is no "
                "auxiliary loss to weigh. It is for mixture-of-experts models; leave it unset."
            )
        return 0.0
    declared = getattr(model.config.get_text_config(), "router_aux_loss_coef", 0.0)
    return float(declared if wanted is None else wanted)


def router_term(router_loss: Tensor, tokens: int, counts: Denominators) -> Tensor:
    """A micro-batch's part of the mean auxiliary loss of its optimizer step.

    Args:
        router_loss: The auxiliary loss of the micro-batch.
        tokens: Its trained tokens; without any it takes no part, but keeps its graph.
        counts: Counts of the step.
    """
    return router_loss * (int(tokens > 0) * counts.world_size / max(counts.micro_batches, 1))
