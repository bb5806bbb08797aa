"""Environments behind the Open Reward Standard (ORS): HTTP, with tool calls as event streams.

`sse` and `wire` read what a server says (pure), `client` speaks HTTP, `session` is the life of one session,
`environment` the contract with the rollout, `tasks` the factory and dataset that users see.
"""

from agentrl.envs.ors.tasks import ORS

__all__ = ["ORS"]
