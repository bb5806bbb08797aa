"""Ready-made environments, importable as `agentrl.envs`."""
