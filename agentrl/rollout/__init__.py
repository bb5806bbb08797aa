"""Rollouts: many conversations at once, tasks in, trajectories out."""
