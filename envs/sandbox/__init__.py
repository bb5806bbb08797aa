"""Sandboxes: where untrusted commands run. See docs/sandboxes.md."""

from agentrl.envs.sandbox.base import Backend, ExecResult, Sandbox, SandboxFailure, SandboxSpec
from agentrl.envs.sandbox.docker import DockerBackend
from agentrl.envs.sandbox.environment import SandboxEnvironment
from agentrl.envs.sandbox.local import LocalBackend
from agentrl.envs.sandbox.pool import SandboxPool

__all__ = [
    "Backend",
    "DockerBackend",
    "ExecResult",
    "LocalBackend",
    "Sandbox",
    "SandboxEnvironment",
    "SandboxFailure",
    "SandboxPool",
    "SandboxSpec",
]
