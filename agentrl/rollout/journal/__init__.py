"""The journal of a run: every turn of every rollout, in SQLite, durable before the next turn is sampled."""
