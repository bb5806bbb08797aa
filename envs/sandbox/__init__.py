"""Sandboxes: where untrusted commands run. See docs/sandboxes.md."""

from agentrl.envs.sandbox.base import Backend, ExecResult, Sandbox, SandboxFailure, SandboxSpec
from agentrl.envs.sandbox.docker import DockerBackend
from agentrl.envs.sandbox.local import LocalBackend

__all__ = ["Backend", "DockerBackend", "ExecResult", "LocalBackend", "Sandbox", "SandboxFailure", "SandboxSpec"]
