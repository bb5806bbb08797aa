"""Ready-made tools, importable as `agentrl.tools`. Empty so far."""
