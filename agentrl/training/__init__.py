"""Training: the one trainer core that GRPO, RLOO and the async trainer share."""
