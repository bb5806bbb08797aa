"""Environments in processes of their own: what breaks, hangs or leaks there concerns one rollout."""
